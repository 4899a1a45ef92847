package settings

import (
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"lookaside/tiers/engine"
	"lookaside/tiers/policy"
	"lookaside/tiers/remote"
)

const threeTiers = `tiers:
  - kind: disk
    paths: [/a, /b/]
    capacity: 200G
    admit: reused
    eviction: lru
    workers: 3
    direct: never
    queue: 12
    load_timeout: 1s
    store_timeout: 3s
  - kind: redis
    url: rediss://user@host:6379/0
    password_file: /run/secret
    ca_file: /ca.pem
    cert_file: /cert.pem
    key_file: /key.pem
    ttl: 24h
    pool: 7
  - kind: s3
    name: archive
    url: s3://bucket/some/prefix
    endpoint: http://localhost:9000
    region: eu-1
    admit: never
`

func TestTiersOfTheFile(t *testing.T) {
	c, err := load(t, threeTiers, nil)
	if err != nil {
		t.Fatal(err)
	}
	want := []TierConfig{
		{Kind: "disk", Name: "disk", Admit: engine.AdmitReused, Queue: 12, Workers: 3,
			LoadTimeout: time.Second, StoreTimeout: 3 * time.Second,
			Disk: DiskConfig{Paths: []string{"/a", "/b"}, Capacity: 200 << 30, Eviction: "lru",
				Direct: "never"}},
		{Kind: "redis", Name: "redis", Admit: engine.AdmitStored, Queue: 4096, Workers: 4,
			LookupTimeout: 500 * time.Millisecond, LoadTimeout: 2 * time.Second,
			StoreTimeout: 30 * time.Second,
			Redis: remote.RedisOptions{Addrs: []string{"host:6379"}, User: "user", TLS: true,
				Password: remote.Secret{File: "/run/secret"}, Prefix: "la1",
				Files: remote.TLSFiles{CA: "/ca.pem", Cert: "/cert.pem", Key: "/key.pem"},
				TTL:   24 * time.Hour, Serde: "raw", Pool: 7,
				DialTimeout: 2 * time.Second}},
		{Kind: "s3", Name: "archive", Admit: engine.AdmitNever, Queue: 4096, Workers: 8,
			LookupTimeout: 500 * time.Millisecond, LoadTimeout: 10 * time.Second,
			StoreTimeout: 30 * time.Second,
			S3: remote.S3Options{Bucket: "bucket", Prefix: "some/prefix",
				Endpoint: "http://localhost:9000", Region: "eu-1", Profile: "default",
				AccessKeyEnv: "AWS_ACCESS_KEY_ID",
				SecretKeyEnv: "AWS_SECRET_ACCESS_KEY", SessionTokenEnv: "AWS_SESSION_TOKEN",
				Serde: "raw", Pool: 32, DialTimeout: 5 * time.Second}},
	}
	for i := range c.Tiers {
		if !strings.HasSuffix(c.Tiers[i].source, "tiers["+string(rune('0'+i))+"]") {
			t.Errorf("tier %d is said to come from %s", i, c.Tiers[i].source)
		}
		c.Tiers[i].source = ""
	}
	if !reflect.DeepEqual(c.Tiers, want) {
		t.Errorf("got  %+v\nwant %+v", c.Tiers, want)
	}
}

func TestDAXTiers(t *testing.T) {
	of := func(edit func(*DAXConfig)) DAXConfig {
		c := DAXConfig{DAXDevices: DAXDevices{Devices: []DAXDevice{{Path: "/dev/dax0.0"}},
			Ranks: 1}, Eviction: policy.Default}
		edit(&c)
		return c
	}
	file := func(text string) string {
		return "tiers:\n  - kind: dax\n    " + strings.ReplaceAll(text, "; ", "\n    ") + "\n"
	}
	for _, tc := range []struct {
		name, yaml string
		args       []string
		want       DAXConfig
	}{
		{"a device", file("device: /dev/dax0.0"), nil, of(func(*DAXConfig) {})},
		{"a list of one", file("devices: /dev/dax0.0"), nil, of(func(*DAXConfig) {})},
		{"with its size", file("device: /dev/dax0.0; size: 100G"), nil,
			of(func(c *DAXConfig) { c.Size = 100 << 30 })},
		{"devices", file("devices: [/dev/dax0.0, {path: /dev/dax1.0, size: 2G}, {path: /mnt/pmem/kv}, '/dev/dax2.0:1M', {path: /dev/x, size: 1048576}]; size: 1G"), nil, of(func(c *DAXConfig) {
			c.Devices = append(c.Devices, DAXDevice{"/dev/dax1.0", 2 << 30},
				DAXDevice{Path: "/mnt/pmem/kv"}, DAXDevice{"/dev/dax2.0", 1 << 20},
				DAXDevice{"/dev/x", 1 << 20})
			c.Size = 1 << 30
		})},
		{"all keys", file("devices: [/dev/dax0.0]; offset: 2M; rank: 1; ranks: 2; allow_files: true; eviction: lru; slab: 256M; hotplug: true"), nil,
			of(func(c *DAXConfig) {
				c.Offset, c.Rank, c.Ranks, c.AllowFiles = 2<<20, 1, 2, true
				c.Eviction, c.Slab, c.HotPlug = "lru", 256<<20, true
			})},
		{"none yet", file("devices: []; hotplug: true"), nil,
			of(func(c *DAXConfig) { c.Devices, c.HotPlug = nil, true })},
		{"none named", file("hotplug: true"), nil,
			of(func(c *DAXConfig) { c.Devices, c.HotPlug = nil, true })},
		{"in a word", "", []string{"--dax=/dev/dax0.0"}, of(func(*DAXConfig) {})},
		{"in a word with its size", "", []string{"--dax=/dev/dax0.0:100G"},
			of(func(c *DAXConfig) { c.Size = 100 << 30 })},
		{"in a word with keys", "", []string{"--dax", "/dev/dax0.0:rank=1:ranks=4"},
			of(func(c *DAXConfig) { c.Rank, c.Ranks = 1, 4 })},
		{"in a word with all", "", []string{"--dax", "/dev/dax0.0,/dev/dax1.0:1T:allow_files=1"},
			of(func(c *DAXConfig) {
				c.Devices, c.Size, c.AllowFiles = append(c.Devices, DAXDevice{Path: "/dev/dax1.0"}),
					1<<40, true
			})},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, err := load(t, tc.yaml, nil, tc.args...)
			if err != nil {
				t.Fatal(err)
			}
			if got := c.Tiers[0]; got.Kind != "dax" || got.Name != "dax" ||
				!reflect.DeepEqual(got.DAX, tc.want) {
				t.Errorf("got  %+v\nwant %+v", got.DAX, tc.want)
			}
		})
	}
	for _, tc := range []struct {
		name, yaml string
		args       []string
		want       []string
	}{
		{"none", file("size: 1G"), nil, []string{"dax tier", "devices is missing", "hotplug"}},
		{"relative", file("device: dax0.0"), nil, []string{"device", `"dax0.0"`, "absolute"}},
		{"twice", file("devices: [/dev/dax0.0, /dev/../dev/dax0.0]"), nil,
			[]string{"devices", "twice"}},
		{"twice by both keys", file("device: /dev/dax0.0; devices: [/dev/dax0.0]"), nil,
			[]string{"twice"}},
		{"size", file("device: /dev/dax0.0; size: lots"), nil, []string{"size", "lots"}},
		{"size of one", file("devices: [{path: /dev/dax0.0, size: lots}]"), nil,
			[]string{"devices", "lots"}},
		{"no path", file("devices: [{size: 1G}]"), nil, []string{"devices", "path"}},
		{"another key of one", file("devices: [{path: /dev/dax0.0, sise: 1G}]"), nil,
			[]string{"devices", `"sise"`, `"size"`}},
		{"a list as size", file("devices: [{path: /dev/dax0.0, size: [1]}]"), nil,
			[]string{"devices", "single value"}},
		{"a number as device", file("devices: [5]"), nil, []string{"devices", "5", "device"}},
		{"rank", file("device: /dev/dax0.0; rank: 2; ranks: 2"), nil,
			[]string{"rank", "2", "from 0"}},
		{"hotplug", file("device: /dev/dax0.0; hotplug: perhaps"), nil,
			[]string{"hotplug", `"perhaps"`}},
		{"another kind's key", file("device: /dev/dax0.0; paths: [/a]"), nil,
			[]string{"dax tier", `"paths"`, "disk tiers have it"}},
		{"short without device", "", []string{"--dax=:1G"}, []string{"--dax", "no device",
			"/dev/dax0.0"}},
		{"short, no key", "", []string{"--dax=/dev/dax0.0:1G:true"}, []string{"--dax", `"true"`,
			"KEY=VALUE"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := load(t, tc.yaml, nil, tc.args...)
			if err == nil {
				t.Fatal("accepted")
			}
			for _, w := range tc.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%q does not say %s", err, w)
				}
			}
		})
	}
}

func tierNames(c Config) (names []string) {
	for _, t := range c.Tiers {
		names = append(names, t.Name)
	}
	return names
}

func TestShortTiers(t *testing.T) {
	flags := []string{"--s3=s3://kv1?endpoint=http://h:9000&region=x", "--disk",
		"/a,/b:20G:admit=evicted:name=fast", "--redis=redis://h:1/2?ttl=1h&serde=raw",
		"--disk=/c:1G", "--disk=/d:1G"}
	environ := []string{"LOOKASIDE_REDIS=redis://one  redis://two", "LOOKASIDE_DISK=/e:3M\t/f:4M"}
	for _, tc := range []struct {
		name, yaml string
		environ    []string
		args       []string
		want       []string
	}{
		{"flags keep their order across kinds", "", nil, flags, []string{"s3", "fast", "redis",
			"disk", "disk-2"}},
		{"flags take the place of all others", threeTiers, environ, flags,
			[]string{"s3", "fast", "redis", "disk", "disk-2"}},
		{"variables", "", environ, nil, []string{"disk", "disk-2", "redis", "redis-2"}},
		{"variables take the place of the file's", threeTiers, environ, nil,
			[]string{"disk", "disk-2", "redis", "redis-2"}},
		{"empty variables say nothing", threeTiers, []string{"LOOKASIDE_DISK="}, nil,
			[]string{"disk", "redis", "archive"}},
		{"an empty list", "tiers: []\n", nil, nil, nil},
		{"an empty key", "tiers:\n", nil, nil, nil},
		{"a name that another would have by default", "", nil, []string{"--disk=/a:1G",
			"--disk=/b:1G:name=disk"}, []string{"disk-2", "disk"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, err := load(t, tc.yaml, tc.environ, tc.args...)
			if err != nil {
				t.Fatal(err)
			}
			if got := tierNames(c); !slices.Equal(got, tc.want) {
				t.Errorf("%v, want %v", got, tc.want)
			}
		})
	}
	c, err := load(t, "", nil, flags...)
	if err != nil {
		t.Fatal(err)
	}
	if d := c.Tiers[1]; !slices.Equal(d.Disk.Paths, []string{"/a", "/b"}) ||
		d.Disk.Capacity != 20<<30 || d.Admit != engine.AdmitEvicted {
		t.Errorf("%+v", d)
	}
	if r := c.Tiers[2].Redis; !slices.Equal(r.Addrs, []string{"h:1"}) || r.DB != 2 ||
		r.TTL != time.Hour {
		t.Errorf("%+v", r)
	}
	if s := c.Tiers[0].S3; s.Bucket != "kv1" || s.Endpoint != "http://h:9000" || s.Region != "x" {
		t.Errorf("%+v", s)
	}
}

func TestBadTiersSayWhatIsWrong(t *testing.T) {
	list := func(entry string) string {
		return "tiers:\n  - " + strings.ReplaceAll(entry, "; ",
			"\n    ") + "\n"
	}
	disk := func(rest string) string {
		return list("kind: disk; paths: [/a]; capacity: 1G; " +
			rest)
	}
	redis := func(rest string) string { return list("kind: redis; " + rest) }
	for _, tc := range []struct {
		name    string
		yaml    string
		environ []string
		args    []string
		want    []string // all in the error
	}{
		{"unknown key", disk("capcity: 5G"), nil, nil, []string{"tiers[0]", "disk tier",
			`"capcity"`, `"capacity"`}},
		{"with its name", disk("name: nvme; capcity: 5G"), nil, nil, []string{`disk tier "nvme"`,
			`"capcity"`, `"capacity"`}},
		{"another kind's key", disk("ttl: 5h"), nil, nil, []string{"disk tier", `"ttl"`,
			"redis tiers have it"}},
		{"no kind", list("paths: [/a]"), nil, nil, []string{"tiers[0]", "kind is missing",
			"dax, disk, program, redis, s3"}},
		{"unknown kind", list("kind: disc"), nil, nil, []string{"tiers[0]", `"disc"`, `"disk"`}},
		{"the second one", disk("queue: 5") + "  - kind: s3\n    url: s3:/x\n", nil, nil,
			[]string{"tiers[1]", "s3 tier", "url", "not a URL"}},
		{"no capacity", list("kind: disk; paths: [/a]"), nil, nil,
			[]string{"disk tier", "capacity is missing"}},
		{"no paths", list("kind: disk; capacity: 1G"), nil, nil,
			[]string{"disk tier", "paths is missing"}},
		{"no url", list("kind: redis"), nil, nil, []string{"redis tier", "url is missing",
			"redis://"}},
		{"empty value", disk("workers:"), nil, nil, []string{"tiers[0]", "workers", "no value"}},
		{"empty text", disk(`admit: ""`), nil, nil, []string{"admit", "no value", "stored"}},
		{"relative path", list("kind: disk; paths: [a/b]; capacity: 1G"), nil, nil,
			[]string{"paths", `"a/b"`, "absolute"}},
		{"path twice", list("kind: disk; paths: [/a, /a/]; capacity: 1G"), nil, nil,
			[]string{"paths", "/a is there twice"}},
		{"comma in a path", list("kind: disk; paths: ['/a,b']; capacity: 1G"), nil, nil,
			[]string{"paths", "comma"}},
		{"size", list("kind: disk; paths: [/a]; capacity: lots"), nil, nil,
			[]string{"disk tier", "capacity", "lots"}},
		{"slab above capacity", disk("slab: 2G"), nil, nil, []string{"slab", "capacity"}},
		{"choice", disk("admit: reuse"), nil, nil, []string{"admit", `"reuse"`,
			"stored, reused, evicted, learned, never", `"reused"`}},
		{"policy", disk("eviction: lur"), nil, nil, []string{"eviction", `"lur"`, `"lru"`}},
		{"direct", disk("direct: yes please"), nil, nil, []string{"direct", "auto, always, never"}},
		{"workers", disk("workers: 0"), nil, nil, []string{"workers", `"0"`, "1 to 256"}},
		{"timeout", disk("load_timeout: 5"), nil, nil, []string{"load_timeout", `"5"`, "30s"}},
		{"list where one value belongs", disk("queue: [1, 2]"), nil, nil,
			[]string{"queue", "single value"}},
		{"map where one value belongs", disk("queue: {a: 1}"), nil, nil,
			[]string{"queue", "single value"}},
		{"tiers is a map", "tiers:\n  disk:\n    paths: [/a]\n", nil, nil, []string{"tiers", "list",
			"- kind: disk"}},
		{"tiers is a word", "tiers: disk\n", nil, nil, []string{"tiers", "list", "- kind: disk"}},
		{"a word in tiers", "tiers: [disk]\n", nil, nil, []string{"tiers[0]", "- kind: disk"}},
		{"tier instead of tiers", "tier: []\n", nil, nil, []string{`"tier"`, `"tiers"`}},
		{"name", disk("name: A B"), nil, nil, []string{"name", `"A B"`, "a-z"}},
		{"name of the arena", disk("name: arena"), nil, nil, []string{"name", `"arena"`}},
		{"two of one name", disk("name: x") + "  - kind: redis\n    name: x\n    url: redis://h\n",
			nil, nil, []string{"tiers[0]", "tiers[1]", `"x"`}},
		{"two tiers in a directory", "", nil, []string{"--disk=/a:1G", "--disk=/a:2G"},
			[]string{"--disk", `"disk-2"`, "/a", `"disk"`}},
		{"a tier within another's directory", "", nil, []string{"--disk=/a/b:1G", "--disk=/a:2G"},
			[]string{"/a/b", "of its own"}},
		{"key twice", "", nil, []string{"--disk=/a:1G:capacity=3G"},
			[]string{"--disk", "capacity is there twice"}},
		{"nine tiers", "", nil, slices.Repeat([]string{"--redis=redis://h"}, 9),
			[]string{"9 tiers", "8"}},
		{"short disk without capacity", "", nil, []string{"--disk=/a"}, []string{"--disk", `"/a"`,
			"capacity", ":200G"}},
		{"short disk, keys but no capacity", "", nil, []string{"--disk=/a:admit=stored"},
			[]string{"--disk", "capacity"}},
		{"short disk, no key", "", nil, []string{"--disk=/a:1G:reused"},
			[]string{"--disk", `"reused"`, "KEY=VALUE"}},
		{"short disk, unknown key", "", nil, []string{"--disk=/a:1G:admti=stored"},
			[]string{"--disk", `"admti"`, `"admit"`}},
		{"short redis, unknown key", "", nil, []string{"--redis=redis://h?tll=1h"},
			[]string{"--redis", `"tll"`, `"ttl"`}},
		{"short redis, no key", "", nil, []string{"--redis=redis://h?ttl"},
			[]string{"--redis", "KEY=VALUE"}},
		{"variable", "", []string{"LOOKASIDE_DISK=/a:1G /b"}, nil, []string{"LOOKASIDE_DISK",
			`"/b"`, "capacity"}},
		{"misspelt variable", "", []string{"LOOKASIDE_DISKS=/a:1G"}, nil,
			[]string{"LOOKASIDE_DISKS", `"LOOKASIDE_DISK"`}},
		{"misspelt flag", "", nil, []string{"--disks=/a:1G"}, []string{"--disks", `"--disk"`}},
		{"scheme", redis("url: reddis://h"), nil, nil, []string{"url", `"reddis"`, `"redis"`}},
		{"host", redis("url: 'redis:///0'"), nil, nil, []string{"url", "host is missing",
			"redis://host:6379"}},
		{"two passwords", redis("url: redis://h; password_file: /x; password_env: Y"), nil, nil,
			[]string{"password_file", "password_env", "one of them"}},
		{"certificate without key", redis("url: rediss://h; cert_file: /x"), nil, nil,
			[]string{"cert_file", "key_file"}},
		{"TLS files without TLS", redis("url: redis://h; ca_file: /x"), nil, nil,
			[]string{"ca_file", "rediss"}},
		{"ttl", redis("url: redis://h; ttl: 5ms"), nil, nil, []string{"ttl", `"5ms"`, "1s"}},
		{"capacity without a unit", list("kind: disk; paths: [/a]; capacity: 200"), nil, nil,
			[]string{"capacity", "200B", "1M"}},
		{"two passwords for sentinels",
			redis("url: redis+sentinel://h/m; sentinel_password_file: /x; sentinel_password_env: Y"), nil, nil, []string{"sentinel_password_env", "one of them"}},
		{"sentinels' password without sentinels",
			redis("url: redis://h; sentinel_password_file: /x"), nil, nil,
			[]string{"sentinel_password", "redis+sentinel://"}},
		{"sentinels without a master", redis("url: redis+sentinel://h"), nil, nil,
			[]string{"url", "master"}},
		{"database", redis("url: redis://h; db: x"), nil, nil, []string{"db", `"x"`}},
		{"TLS files without https",
			list("kind: s3; url: s3://kv1; endpoint: http://h; ca_file: /x"), nil, nil,
			[]string{"ca_file", "https://"}},
		{"virtual_host", list("kind: s3; url: s3://kv1; virtual_host: maybe"), nil, nil,
			[]string{"virtual_host", `"maybe"`}},
		{"serde", redis("url: redis://h; serde: pickle"), nil, nil, []string{"serde", `"pickle"`,
			"raw, "}},
		{"endpoint", list("kind: s3; url: s3://kv1; endpoint: localhost:9000"), nil, nil,
			[]string{"endpoint", "https://host:port"}},
		{"bucket", list("kind: s3; url: s3:///x"), nil, nil, []string{"url", "s3://bucket"}},
		{"eviction of the arena", "", nil, []string{"--arena-eviction=fifo"},
			[]string{"arena.eviction", `"fifo"`}},
		{"promote", "", nil, []string{"--lookup-promote=alway"}, []string{"lookup.promote",
			`"always"`}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := load(t, tc.yaml, tc.environ, tc.args...)
			if err == nil {
				t.Fatal("accepted")
			}
			for _, w := range tc.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%q does not say %s", err, w)
				}
			}
		})
	}
}

// What might be a password is in no error, however it is given.
func TestErrorsKeepSecrets(t *testing.T) {
	const secret = "hunter2"
	for _, url := range []string{
		"redis://user:" + secret + "@h", "redis://:" + secret + "@h:77777777/x",
		"reddis://user:" + secret + "@h", "redis://u:" + secret + "@h:port", "redis://u:" + secret +
			"%zz@h",
		"redis://h?password=" + secret, "redis://u:" + secret + "@h?=%zz",
		"redis://h?pasword_file=" + secret + "&pool=0", "s3://" + secret + ":" + secret + "@kv1",
	} {
		kind, _, _ := strings.Cut(url, ":")
		kind = strings.Replace(kind, "reddis", "redis", 1)
		for _, tc := range []struct {
			yaml    string
			environ []string
			args    []string
		}{
			{args: []string{"--" + kind + "=" + url}},
			{environ: []string{TierEnv(kind) + "=" + url}},
			{yaml: "tiers:\n  - kind: " + kind + "\n    url: '" + url + "'\n"},
		} {
			c, err := load(t, tc.yaml, tc.environ, tc.args...)
			if err == nil {
				t.Errorf("%s was accepted: %+v", url, c.Tiers)
			} else if strings.Contains(err.Error(), secret) {
				t.Errorf("a secret in: %v", err)
			}
		}
	}
}

// Every stated default of a tier must be what leaving it out gives.
func TestStatedDefaultsOfTiersAreTrue(t *testing.T) {
	least := map[string][][2]string{
		TierDAX:     {{"kind", "dax"}, {"devices", "/dev/dax0.0"}},
		TierDisk:    {{"kind", "disk"}, {"paths", "/a"}, {"capacity", "1G"}},
		TierProgram: {{"kind", "program"}, {"command", "a b"}},
		TierRedis:   {{"kind", "redis"}, {"url", "redis://h"}},
		TierS3:      {{"kind", "s3"}, {"url", "s3://kv1"}},
	}
	for _, kind := range tierKinds {
		base, err := parseTier(tierEntry{keys: least[kind]})
		if err != nil {
			t.Fatal(err)
		}
		seen := map[string]bool{}
		for _, s := range tierSettingsOf(kind) {
			if seen[s.Key] {
				t.Errorf("%s: %s is there twice", kind, s.Key)
			}
			seen[s.Key] = true
			if s.Meaning == "" || s.Unit == "" || s.required && s.Default != "" {
				t.Errorf("%s: %s: %+v", kind, s.Key, s)
			}
			if s.derived || s.Default == "" {
				continue
			}
			got, err := parseTier(tierEntry{keys: append(slices.Clone(least[kind]),
				[2]string{s.Key, s.Default})})
			if err != nil || !reflect.DeepEqual(got, base) {
				t.Errorf("%s: %s: setting it to its stated default %q changes the tier: %v", kind,
					s.Key, s.Default, err)
			}
		}
	}
}

func TestTiersAreDocumented(t *testing.T) {
	doc := Document()
	fs := pflag.NewFlagSet("serve", pflag.ContinueOnError)
	AddFlags(fs)
	help := fs.FlagUsages()
	for _, s := range OfTiers() {
		for _, text := range []string{s.Key, s.Meaning, s.Unit, s.Default} {
			if !strings.Contains(doc, text) {
				t.Errorf("%s: the document lacks %q", s.Key, text)
			}
		}
	}
	for _, kind := range tierKinds {
		if !strings.Contains(help, "--"+kind+" ") ||
			!strings.Contains(help, strings.ReplaceAll(shortForms[kind], "…", "...")) ||
			!strings.Contains(help, shortExamples[kind]) {
			t.Errorf("the help lacks --%s or its form", kind)
		}
		if _, err := load(t, "", nil, "--"+kind+"="+shortExamples[kind]); err != nil {
			t.Errorf("the example for --%s is refused: %v", kind, err)
		}
	}
	// The example is one that works.
	_, example, _ := strings.Cut(doc[strings.Index(doc, "## tiers"):], "```yaml\n")
	example, _, _ = strings.Cut(example, "```")
	if c, err := load(t, example, nil); err != nil || len(c.Tiers) != 5 {
		t.Errorf("%v: %s", err, example)
	}
}
