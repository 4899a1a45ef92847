package settings

import (
	"slices"
	"strings"
	"testing"
)

// inYAML returns a file with one setting.
func inYAML(key, value string) string {
	parts := strings.Split(key, ".")
	slices.Reverse(parts)
	for _, name := range parts {
		value = "{" + name + ": " + value + "}"
	}
	return value
}

// fails requires that load refuses the sources by an error that contains all of want.
func fails(t *testing.T, text string, environ, args, want []string) {
	t.Helper()
	_, err := load(t, text, environ, args...)
	if err == nil {
		t.Errorf("accepted: %q %v %v", text, environ, args)
		return
	}
	for _, w := range want {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("%q does not say %s", err, w)
		}
	}
}

// Each former name, in each source, gives an error that contains the present name, or that says
// that there is none.
func TestFormerNames(t *testing.T) {
	find := func(key string) int {
		return slices.IndexFunc(settings, func(s Setting) bool { return s.Key == key })
	}
	for _, f := range formers {
		if find(f.Key) >= 0 {
			t.Errorf("%s is a setting", f.Key)
		}
		key := []string{`"` + f.Key + `"`}
		env := []string{f.Env()}
		flag := []string{`"--` + f.Flag() + `"`}
		if f.now == "" {
			const chosen = "the program chooses it now; remove it"
			key, env, flag = append(key, chosen), append(env, chosen), append(flag, chosen)
		} else if i := find(f.now); i < 0 {
			t.Errorf("%s: there is no setting %s", f.Key, f.now)
		} else {
			now := settings[i]
			key, env = append(key, `"`+now.Key+`"`), append(env, `"`+now.Env()+`"`)
			flag = append(flag, `"--`+now.Flag()+`"`)
		}
		fails(t, inYAML(f.Key, "1"), nil, nil, append(key, "lookaside.yaml"))
		fails(t, inYAML(f.Key, "[1, 2]"), nil, nil, key)
		fails(t, "", []string{f.Env() + "=1"}, nil, append(env, "environment"))
		fails(t, "", nil, []string{"--" + f.Flag() + "=1"}, append(flag, "flag"))
	}
	for _, f := range formerTierKeys {
		if slices.ContainsFunc(tierSettingsOf(f.kind),
			func(s TierSetting) bool { return s.Key == f.key }) {
			t.Errorf("%s tiers have %s", f.kind, f.key)
		}
		short, sep := map[string]string{TierDAX: "/dev/dax0.0", TierDisk: "/a:1G",
			TierRedis: "redis://h", TierS3: "s3://kv1"}[f.kind], ":"
		long := map[string]string{TierDAX: "device: /dev/dax0.0",
			TierDisk: "paths: [/a], capacity: 1G", TierRedis: "url: redis://h",
			TierS3: "url: s3://kv1"}[f.kind]
		if f.kind == TierRedis || f.kind == TierS3 {
			sep = "?"
		}
		short += sep + f.key + "=5"
		want := []string{f.kind + " tier", `"` + f.key + `"`, "the program chooses it now; remove it"}
		fails(t, "tiers: [{kind: "+f.kind+", "+long+", "+f.key+": 5}]", nil, nil,
			append(want, "tiers[0]"))
		fails(t, "", []string{TierEnv(f.kind) + "=" + short}, nil, append(want, TierEnv(f.kind)))
		fails(t, "", nil, []string{"--" + f.kind + "=" + short}, append(want, "--"+f.kind))
	}
}
