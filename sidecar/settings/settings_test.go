package settings

import (
	"flag"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"lookaside/internal/bytesize"
	"lookaside/internal/leak"
)

var update = flag.Bool("update", false, "rewrite docs/configuration.md")

func TestMain(m *testing.M) { leak.Main(m) }

// load reads settings from a YAML text, an environment and a command line.
func load(t *testing.T, text string, environ []string, args ...string) (Config, error) {
	t.Helper()
	fs := pflag.NewFlagSet("serve", pflag.ContinueOnError)
	fs.SetOutput(io.Discard)
	AddFlags(fs)
	if text != "" {
		file := filepath.Join(t.TempDir(), "lookaside.yaml")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		args = append(args, "--config", file)
	}
	if err := fs.Parse(args); err != nil {
		return Config{}, FlagError(fs, err)
	}
	return Load(fs, environ)
}

func TestEachSourceOverridesTheOneBefore(t *testing.T) {
	yaml := "arena:\n  limit: 1G\n  initial: 16M\nsessions:\n  share: 0.5\nlog:\n  level: debug\n"
	environ := []string{"LOOKASIDE_ARENA_INITIAL=32M", "LOOKASIDE_SESSIONS_SHARE=0.6", "HOME=/root"}
	c, err := load(t, yaml, environ, "--sessions-share=0.7")
	if err != nil {
		t.Fatal(err)
	}
	if c.Arena.Limit != 1<<30 || c.Arena.Initial != 32<<20 || c.Sessions.Share != 0.7 ||
		c.Log.Level != "debug" {
		t.Errorf("limit %d, initial %d, share %v, level %s: want 1 GiB of the file, 32 MiB of the environment, 0.7 of the flag, debug of the file",
			c.Arena.Limit, c.Arena.Initial, c.Sessions.Share, c.Log.Level)
	}
	if c.Lookup.MaxPages != 65536 || c.Lookup.Lease != 30*time.Second {
		t.Errorf("defaults: %+v", c.Lookup)
	}
}

func TestConfigFileOfTheEnvironment(t *testing.T) {
	file := filepath.Join(t.TempDir(), "c.yaml")
	if err := os.WriteFile(file, []byte("spaces: {limit: 1}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := load(t, "", []string{"LOOKASIDE_CONFIG=" + file})
	if err != nil {
		t.Fatal(err)
	}
	if c.Spaces.Limit != 1 {
		t.Errorf("spaces.limit is %d", c.Spaces.Limit)
	}
}

func TestDerivedDefaults(t *testing.T) {
	for _, tc := range []struct {
		args          []string
		initial, step int64
	}{
		{nil, 1 << 30, 1 << 30},
		{[]string{"--arena-limit=500MiB"}, 500 << 20, 500 << 20},
		{[]string{"--arena-limit=64G"}, 1 << 30, 16 << 30},
		{[]string{"--arena-limit=64G", "--arena-initial=20G"}, 20 << 30, 20 << 30},
	} {
		c, err := load(t, "", []string{"XDG_RUNTIME_DIR=/run/user/7"}, tc.args...)
		if err != nil {
			t.Fatal(err)
		}
		if c.Arena.Initial != tc.initial || c.Arena.Step() != tc.step {
			t.Errorf("%v: initial %s, step %s", tc.args, bytesize.Format(c.Arena.Initial),
				bytesize.Format(c.Arena.Step()))
		}
		if !strings.HasPrefix(c.Runtime.Dir, "/run/user/7/lookaside-") ||
			!strings.HasSuffix(c.Runtime.Dir, "/rank-0") {
			t.Errorf("runtime.dir %s", c.Runtime.Dir)
		}
	}
}

func TestBadSettingsSayWhatIsWrong(t *testing.T) {
	for _, tc := range []struct {
		name    string
		yaml    string
		environ []string
		args    []string
		want    []string // all in the error
	}{
		{"unknown key", "arena:\n  limt: 4G\n", nil, nil, []string{`"arena.limt"`,
			`"arena.limit"`}},
		{"unknown section", "area:\n  limit: 4G\n", nil, nil, []string{`"area.limit"`,
			`"arena.limit"`}},
		{"key without its section", "max_pages: 5\n", nil, nil,
			[]string{`"max_pages"`, `"lookup.max_pages"`}},
		{"unknown variable", "", []string{"LOOKASIDE_ARENA_LIMITS=4G"}, nil,
			[]string{"LOOKASIDE_ARENA_LIMITS", `"LOOKASIDE_ARENA_LIMIT"`}},
		{"misspelt section of a variable", "", []string{"LOOKASIDE_AREAN_LIMIT=4G"}, nil,
			[]string{"LOOKASIDE_AREAN_LIMIT", `"LOOKASIDE_ARENA_LIMIT"`}},
		{"unknown flag", "", nil, []string{"--arena-limt=4G"}, []string{"--arena-limt",
			`"--arena-limit"`}},
		{"size", "", nil, []string{"--arena-limit=4X"}, []string{"arena.limit", "4X"}},
		{"zero size", "arena: {initial: 0}\n", nil, nil, []string{"arena.initial", `"0"`}},
		{"duration", "lookup: {lease: 30}\n", nil, nil, []string{"lookup.lease", `"30"`, "30s"}},
		{"kind", "", nil, []string{"--arena-kind=huge"}, []string{"arena.kind", `"huge"`,
			"hugetlb"}},
		{"fraction", "", nil, []string{"--sessions-share=1.5"},
			[]string{"sessions.share", `"1.5"`}},
		{"NaN", "", nil, []string{"--sessions-share=NaN"}, []string{"sessions.share", `"NaN"`}},
		{"list", "arena: {limit: [1, 2]}\n", nil, nil, []string{"arena.limit", "single value"}},
		{"initial above limit", "", nil, []string{"--arena-limit=1G", "--arena-initial=2G"},
			[]string{"arena.initial", "arena.limit", "2", "1"}},
		{"file kind without path", "", nil, []string{"--arena-kind=file"},
			[]string{"arena.kind", "arena.path"}},
		{"path without file kind", "", nil, []string{"--arena-path=/x"},
			[]string{"arena.path", "arena.kind"}},
		{"one LMCache endpoint", "", nil, []string{"--lmcache-worker-endpoint=ipc:///x"},
			[]string{"lmcache.worker_endpoint", "lmcache.scheduler_endpoint"}},
		{"LMCache over TCP", "", nil, []string{"--lmcache-worker-endpoint=tcp://*:5"},
			[]string{"lmcache.worker_endpoint", "ipc://"}},
		{"relative directory", "", nil, []string{"--runtime-dir=x/y"},
			[]string{"runtime.dir", `"x/y"`}},
		{"boolean", "", nil, []string{"--admin-pprof=maybe"}, []string{"admin.pprof", `"maybe"`}},
		{"listen", "", nil, []string{"--admin-listen=9090"}, []string{"admin.listen", "9090"}},
		{"not YAML", "a: [", nil, nil, []string{"lookaside.yaml"}},
		{"twice in YAML", "log: {level: info}\nlog: {level: debug}\n", nil, nil, []string{"log"}},
		{"numa", "", nil, []string{"--arena-numa=-2"}, []string{"arena.numa", `"-2"`}},
		{"DAX without devices", "", nil, []string{"--arena-kind=dax"},
			[]string{"arena.kind", "arena.dax.devices", "/dev/dax0.0", "arena.dax.hotplug"}},
		{"limit on DAX", "", nil, []string{"--arena-kind=dax", "--arena-dax-devices=/dev/dax0.0",
			"--arena-limit=4G"}, []string{"arena.limit", "arena.kind is dax", "DEVICE:SIZE"}},
		{"initial on DAX", "arena: {kind: dax, dax: {devices: [/dev/dax0.0]}, initial: 1G}", nil, nil,
			[]string{"arena.initial", "from the start", "lookaside dax add --arena"}},
		{"path on DAX", "", nil, []string{"--arena-kind=dax", "--arena-path=/mnt/pmem"},
			[]string{"arena.path", "arena.dax.devices"}},
		{"numa on DAX", "", nil, []string{"--arena-kind=dax", "--arena-dax-devices=/dev/dax0.0",
			"--arena-numa=1"}, []string{"arena.numa", "node"}},
		{"devices on memory", "", nil, []string{"--arena-dax-devices=/dev/dax0.0"},
			[]string{"arena.dax.devices", "arena.kind is auto", "set arena.kind to dax"}},
		{"hotplug on memory", "arena: {kind: memfd, dax: {hotplug: true}}", nil, nil,
			[]string{"arena.dax.hotplug", "arena.kind is memfd"}},
		{"slab on memory", "", []string{"LOOKASIDE_ARENA_DAX_SLAB=1G"}, nil,
			[]string{"arena.dax.slab", "arena.kind"}},
		{"relative device", "", nil, []string{"--arena-kind=dax", "--arena-dax-devices=dax0.0"},
			[]string{"arena.dax.devices", `"dax0.0"`, "/dev/dax0.0"}},
		{"device twice", "", nil, []string{"--arena-kind=dax",
			"--arena-dax-devices=/dev/dax0.0,/dev/../dev/dax0.0:1G"}, []string{"arena.dax.devices",
			"/dev/dax0.0", "twice"}},
		{"size of a device", "", nil, []string{"--arena-kind=dax",
			"--arena-dax-devices=/dev/dax0.0:lots"}, []string{"arena.dax.devices", "lots"}},
		{"key of a device", "arena: {kind: dax, dax: {devices: [{path: /dev/dax0.0, sise: 1G}]}}", nil,
			nil, []string{"arena.dax.devices", "sise", `"size"`}},
		{"device that is none", "arena: {kind: dax, dax: {devices: [7]}}", nil, nil,
			[]string{"arena.dax.devices", "7"}},
		{"rank", "", nil, []string{"--arena-kind=dax", "--arena-dax-devices=/dev/dax0.0",
			"--arena-dax-ranks=2", "--arena-dax-rank=2"}, []string{"arena.dax.rank is 2", "arena.dax.ranks 2",
			"from 0"}},
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

// The devices of an arena may be written in one word, or as a list.
func TestArenaOnDAXSettings(t *testing.T) {
	want := DAXDevices{Devices: []DAXDevice{{"/dev/dax0.0", 100 << 30}, {"/dev/dax1.0", 0}},
		Offset: 2 << 20, Ranks: 4, Rank: 3, HotPlug: true, AllowFiles: true, Slab: 1 << 30}
	yaml := "arena:\n  kind: dax\n  dax:\n    devices: [{path: /dev/dax0.0, size: 100G}, /dev/dax1.0]\n    offset: 2M\n    ranks: 4\n    rank: 3\n    hotplug: true\n    allow_files: true\n    slab: 1G\n"
	words := []string{"devices=/dev/dax0.0:100G,/dev/dax1.0", "offset=2M", "ranks=4", "rank=3",
		"hotplug=true", "allow_files=true", "slab=1G"}
	environ, flags := []string{"LOOKASIDE_ARENA_KIND=dax"}, []string{"--arena-kind=dax"}
	for _, w := range words {
		name, value, _ := strings.Cut(w, "=")
		environ = append(environ, "LOOKASIDE_ARENA_DAX_"+strings.ToUpper(name)+"="+value)
		flags = append(flags, "--arena-dax-"+strings.ReplaceAll(name, "_", "-")+"="+value)
	}
	for name, tc := range map[string]struct {
		yaml    string
		environ []string
		flags   []string
	}{"file": {yaml, nil, nil}, "environment": {"", environ, nil}, "flags": {"", nil, flags},
		"flags over a file": {"arena: {kind: memfd}", nil, flags}} {
		c, err := load(t, tc.yaml, tc.environ, tc.flags...)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		} else if c.Arena.Kind != KindDAX || !reflect.DeepEqual(c.Arena.DAX, want) {
			t.Errorf("%s: %+v", name, c.Arena)
		}
	}
	// What it is to be, and that it may be told otherwise later.
	c, err := load(t, "arena: {kind: dax, dax: {devices: [], hotplug: true}}", nil)
	if err != nil || len(c.Arena.DAX.Devices) != 0 || c.Arena.DAX.Ranks != 1 {
		t.Errorf("%v: %+v", err, c.Arena)
	}
	// A tier may have another part of a device.
	for sizes, ok := range map[[2]string]bool{{":1G", ":offset=1G"}: true,
		{":1G", ":offset=512M"}: false, {"", ":offset=1G"}: false, {":1G", ""}: false} {
		_, err := load(t, "", nil, "--arena-kind=dax", "--arena-dax-devices=/dev/dax0.0"+sizes[0],
			"--dax=/dev/dax0.0"+sizes[1])
		if (err == nil) != ok || err != nil && (!strings.Contains(err.Error(), "/dev/dax0.0") ||
			!strings.Contains(err.Error(), `tier "dax"`)) {
			t.Errorf("%q: %v", sizes, err)
		}
	}
	// A default that is written out is no contradiction.
	if _, err := load(t, "", nil, "--arena-kind=memfd", "--arena-dax-ranks=1",
		"--arena-dax-hotplug=false"); err != nil {
		t.Error(err)
	}
}

func TestOtherPartsMayHaveVariables(t *testing.T) {
	if _, err := load(t, "", []string{"LOOKASIDE_COPY_KERNEL=plain"}); err != nil {
		t.Error(err)
	}
}

func TestMissingConfigFile(t *testing.T) {
	if _, err := load(t, "", nil, "--config=/nowhere/x.yaml"); err == nil ||
		!strings.Contains(err.Error(), "/nowhere/x.yaml") {
		t.Errorf("got %v", err)
	}
}

func TestSettingNamesAreUnique(t *testing.T) {
	seen := map[string]string{}
	for _, s := range All() {
		for _, name := range []string{s.Key, s.Env(), "--" + s.Flag()} {
			if other, ok := seen[name]; ok {
				t.Errorf("%s names both %s and %s", name, other, s.Key)
			}
			seen[name] = s.Key
		}
		if s.Meaning == "" || s.Unit == "" {
			t.Errorf("%s: no meaning or unit", s.Key)
		}
	}
}

// Every stated default must be what an empty configuration gives.
func TestStatedDefaultsAreTrue(t *testing.T) {
	base, err := load(t, "", nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range All() {
		if s.derived || s.Default == "" {
			continue
		}
		c, err := load(t, "", nil, "--"+s.Flag()+"="+s.Default)
		if err != nil {
			t.Errorf("%s: %v", s.Key, err)
		} else if !reflect.DeepEqual(c, base) {
			t.Errorf("%s: setting it to its stated default %q changes the configuration", s.Key,
				s.Default)
		}
	}
}

func TestConfigurationDoc(t *testing.T) {
	const path = "../../docs/configuration.md"
	want := Document()
	if *update {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != want {
		t.Errorf("%s is out of date: go test ./sidecar/settings -run TestConfigurationDoc -update",
			path)
	}
	fs := pflag.NewFlagSet("serve", pflag.ContinueOnError)
	AddFlags(fs)
	help := fs.FlagUsages()
	for _, s := range All() {
		for _, text := range []string{s.Meaning, s.Unit} {
			if !strings.Contains(help, text) || !strings.Contains(want, text) {
				t.Errorf("%s: help or document lack %q", s.Key, text)
			}
		}
		if !strings.Contains(help, "--"+s.Flag()+" ") {
			t.Errorf("help lacks --%s", s.Flag())
		}
	}
}
