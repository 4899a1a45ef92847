package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"lookaside/connector"
	"lookaside/dax"
	"lookaside/internal/leak"
	"lookaside/internal/unshared"
	"lookaside/sidecar/admin"
	"lookaside/sidecar/settings"
	"lookaside/tiers/peer"
	"lookaside/tiers/why"
)

func TestMain(m *testing.M) { leak.Main(m) }

const endpoint = "/run/l/rank-0"

// wellFacts returns facts of a host where all is well: one sidecar, and one engine that gets hits.
func wellFacts() *Facts {
	about := map[string]string{"failure_policy": "recompute", "kv_role": "kv_both",
		"lookaside": "0.1.0", "vllm": "0.33.0", "chunk_tokens": "256", "python": "3.12.1"}
	st := admin.Status{Version: "0.1.0", PID: 4, State: "serving", Verdict: "healthy"}
	st.Arena.Kind, st.Arena.State, st.Arena.LimitBytes = dax.KindHugetlb, "ready", 1<<30
	st.Spaces = []admin.SpaceStatus{{SpaceStatus: connector.SpaceStatus{
		Fingerprint: strings.Repeat("ab", 32), PageTokens: 16, PagesPerChunk: 16,
		Fields: map[string]string{"hash": "sha256_cbor", "none_hash": "00ff"}}}}
	for i, role := range []string{"worker", "scheduler"} {
		st.Sessions = append(st.Sessions, connector.SessionStatus{Role: role, EngineID: "e",
			PID: int32(50 + i), Space: "abababababab", About: about})
	}
	st.Counters.Tokens = connector.TokenCount{Requests: 100, Asked: 1000, Found: 800, Loaded: 800,
		Computed: 200, Own: 500}
	st.Counters.SessionsOpened, st.Counters.StoredBytes = 2, 12<<30
	st.Counters.StoredPages = 1000
	return &Facts{
		Release: "0.1.0", Endpoint: endpoint, Default: "/run/other/rank-0", UID: 1000, XDG: "/run",
		Directory: Directory{Exists: true, UID: 1000, Mode: fs.ModeDir | 0o700},
		Host: Host{MemTotal: 64 << 30, MemAvailable: 32 << 30, HugePageBytes: 2 << 20,
			HugePages: 512, HugePagesFree: 512, ShmemEnabled: "advise", Memlock: math.MaxInt64,
			GroupFree: -1, Nodes: 1, ShmTotal: 8 << 30, ShmFree: 8 << 30, Driver: "570.86.15",
			GPUs: []string{"NVIDIA H100"}},
		Config:   settings.Defaults(),
		Sidecars: []Sidecar{{Endpoint: endpoint, PID: 4, Status: st}},
		Engines:  []Process{{PID: 49, Known: true, UID: 1000}},
		Parents:  map[int]int{50: 49, 51: 49, 49: 1},
	}
}

func TestWellIsWell(t *testing.T) {
	r := Diagnose(wellFacts())
	for _, f := range r.Findings {
		if f.Level != OK || f.Fix != "" {
			t.Errorf("%+v", f)
		}
	}
	if r.Worst != OK || r.Counts[OK] != len(r.Findings) || len(r.Findings) < 8 {
		t.Errorf("%+v", r)
	}
}

func unlike(field string) admin.UnsharedStatus {
	return admin.UnsharedStatus{Space: "abababababab", Other: "cdcdcdcdcdcd", Connected: true,
		Whose: "the instance of pid 60", Causes: []unshared.Cause{{Difference: unshared.Difference{
			Field: field, Ours: "a", Theirs: "b"}, What: "it", Fix: "do the same everywhere"}}}
}

// illnesses has, for each finding that is not OK, what is changed in facts where all is well, and
// the level that it then has. Each is found with nothing else of its level or worse.
var illnesses = map[string]struct {
	level Level
	spoil func(f *Facts, s *Sidecar)
	seen  string // in what is seen, or in the fix
}{
	"host-late": {Warning, func(f *Facts, _ *Sidecar) { f.Late = []string{"x"} }, "not known in time"},
	"host-memory": {Error, func(f *Facts, _ *Sidecar) {
		f.Budget = fmt.Errorf("%w: the control group limit", dax.ErrTooLarge)
		f.Sidecars, f.Engines = nil, nil
	}, "arena.limit"},
	"host-hugepages": {Note, func(_ *Facts, s *Sidecar) { s.Status.Arena.Kind = dax.KindMemfd },
		"vm.nr_hugepages"},
	"host-memlock": {Note, func(f *Facts, _ *Sidecar) { f.Host.Memlock = 8 << 20 }, "LimitMEMLOCK"},
	"host-numa": {Note, func(f *Facts, s *Sidecar) {
		c := settings.Defaults()
		f.Host.Nodes, s.Config = 2, &c
	}, "arena.numa"},
	"host-shm":    {Warning, func(f *Facts, _ *Sidecar) { f.Host.ShmFree = 1 << 20 }, "--shm-size"},
	"host-gpu":    {Warning, func(f *Facts, _ *Sidecar) { f.Host.GPUs = nil }, "--gpus all"},
	"host-driver": {Note, func(f *Facts, _ *Sidecar) { f.Host.Driver = "535.1" }, "570"},
	"disk-late":   {Error, disk(Disk{Late: true}), "dmesg"},
	"disk-unusable": {Error, disk(Disk{Err: fs.ErrPermission}),
		"user own the directory"},
	"disk-missing": {Error, disk(Disk{Missing: true, Used: true}), "mount the disk"},
	"disk-full":    {Error, disk(Disk{Capacity: 2 << 30, Free: 1 << 30}), "smaller capacity"},
	"disk-slow": {Warning, disk(Disk{Tested: true, Direct: true, Free: 1 << 40, Read: 50 << 20,
		Write: 1 << 30}), "NVMe"},
	"sidecar-directory": {Error, func(f *Facts, _ *Sidecar) { f.Directory.UID = 0 }, "uid 0"},
	"sidecar-none":      {Error, gone(fs.ErrNotExist), "lookaside serve"},
	"sidecar-killed":    {Error, gone(syscall.ECONNREFUSED), "out-of-memory"},
	"sidecar-elsewhere": {Error, func(f *Facts, s *Sidecar) {
		gone(fs.ErrNotExist)(f, s)
		f.Named, f.Others = true, []string{"/elsewhere"}
	}, "/elsewhere"},
	"sidecar-other-user": {Error, gone(fs.ErrPermission), "as root"},
	"sidecar-hidden": {Note, func(f *Facts, _ *Sidecar) {
		f.Sidecars = append(f.Sidecars, Sidecar{Endpoint: "/in/a/container", Err: fs.ErrNotExist})
	}, "container"},
	"sidecar-silent": {Error, gone(context.DeadlineExceeded), "kill -CONT"},
	"sidecar-draining": {Warning, func(_ *Facts, s *Sidecar) { s.Status.State = "draining" },
		"told to end"},
	"sidecar-starting": {Note, func(_ *Facts, s *Sidecar) { s.Status.Arena.State = "restoring" },
		"wait"},
	"sidecar-version": {Note, func(f *Facts, _ *Sidecar) { f.Release = "0.2.0" }, "--takeover"},
	"sidecar-growth": {Warning, func(_ *Facts, s *Sidecar) { s.Status.Arena.GrowthFailures = 3 },
		"3 times"},
	"sidecar-tier": {Error, tier(admin.TierStatus{State: "down", Error: "no such device"}),
		"no such device"},
	"sidecar-tier-sheds": {Warning, tier(admin.TierStatus{State: "closed", Shed: 100,
		StoredChunks: 100}), "admit"},
	"sidecar-dax": {Error, func(_ *Facts, s *Sidecar) {
		s.Status.Arena.DAX = &admin.DAXArenaState{Slabs: 4, SlabsGivenUp: 1}
	}, "1 of 4"},
	"sidecar-rotten": {Error, func(_ *Facts, s *Sidecar) { s.Status.Checks.Rotten = 2 }, "edac"},
	"sidecar-frozen": {Warning, func(_ *Facts, s *Sidecar) {
		s.Status.Frozen = []connector.FrozenStatus{{SessionStatus: s.Status.Sessions[0]}}
	}, "kill -CONT 50"},
	"sidecar-lingering": {Warning, func(_ *Facts, s *Sidecar) {
		s.Status.Lingering = []connector.LingeringStatus{{SessionStatus: s.Status.Sessions[0]}}
	}, "process 50"},
	"sidecar-restored": {Note, func(_ *Facts, s *Sidecar) {
		s.Status.Arena.Recovered.Frozen = true
	}, "by itself"},
	"sidecar-refused-version": {Warning, refused("version"), "pip install"},
	"sidecar-refused-space":   {Warning, refused("incompatible"), "same command"},
	"sidecar-refused-limit":   {Warning, refused("busy"), "sessions.limit"},
	"sidecar-refused-other":   {Warning, refused("malformed"), "no connector"},
	"sidecar-peers": {Warning, func(_ *Facts, s *Sidecar) {
		s.Status.Peers.Unusable = []peer.UnusableStatus{{Peer: "/x", Why: "another release"}}
	}, "another release"},
	"sidecar-hosts": {Warning, func(_ *Facts, s *Sidecar) { s.Status.Hosts.Failed = 1 },
		"token_file"},
	"engine-none": {Warning, func(f *Facts, s *Sidecar) {
		f.Engines, s.Status.Sessions, s.Status.Counters = nil, nil, connector.Counters{}
	}, "LookasideConnector"},
	"engine-left": {Note, func(f *Facts, s *Sidecar) { f.Engines, s.Status.Sessions = nil, nil },
		"some were"},
	"engine-elsewhere": {Error, func(f *Facts, _ *Sidecar) {
		f.Engines = append(f.Engines, Process{PID: 70, Known: true, UID: 1000})
	}, "no XDG_RUNTIME_DIR"},
	"engine-unconnected": {Warning, func(f *Facts, _ *Sidecar) {
		f.Engines = append(f.Engines, Process{PID: 70, Known: true,
			Settings: map[string]any{"lookaside.endpoint": "/run/l/rank-{rank}"}})
	}, "not connected"},
	"engine-no-caching": {Error, func(f *Facts, _ *Sidecar) {
		f.Engines = append(f.Engines, Process{PID: 70, NoCaching: true})
	}, "--no-enable-prefix-caching"},
	"engine-rank": {Error, func(f *Facts, _ *Sidecar) {
		f.Engines[0].TP = 2
		f.Engines[0].Settings = map[string]any{"lookaside.endpoint": "/run/l/rank-{rank}"}
	}, "--runtime-dir /run/l/rank-1"},
	"engine-failure-policy": {Warning, about("failure_policy", "fail"), "recompute"},
	"engine-no-scheduler": {Warning, func(_ *Facts, s *Sidecar) {
		s.Status.Sessions = s.Status.Sessions[:1]
	}, "scheduler"},
	"engine-random-seed": {Error, func(_ *Facts, s *Sidecar) {
		s.Status.Spaces[0].Fields = map[string]string{"hash": "xxhash", "none_hash": "engine:e"}
	}, "PYTHONHASHSEED"},
	"engine-pickled-hashes": {Note, func(_ *Facts, s *Sidecar) {
		s.Status.Spaces[0].Fields["hash"] = "sha256"
	}, "sha256_cbor"},
	"engine-chunk":   {Note, about("chunk_tokens", "100"), "multiple of 16"},
	"engine-notes":   {Note, about("notes", "vLLM 0.99 is newer"), "0.99"},
	"engine-version": {Note, about("lookaside", "0.3.0"), "0.3.0"},
	"engine-no-promotion": {Warning, func(f *Facts, s *Sidecar) {
		tier(admin.TierStatus{State: "closed"})(f, s)
		about("settings", "load_threads=3, promotion_timeout_ms=0")(f, s)
	}, "never a hit"},
	"engine-unwatched-weights": {Note, about("settings", "watch_weights=False"), "watch_weights"},
	"use-idle": {Note, func(_ *Facts, s *Sidecar) {
		s.Status.Counters.Tokens = connector.TokenCount{}
	}, "no request"},
	"use-own-cache": {Note, tokens(connector.TokenCount{Requests: 50, Asked: 100, Loaded: 30,
		Found: 30, Own: 970}), "vLLM's own cache served 97 % of the hits"},
	"use-no-hits": {Warning, tokens(connector.TokenCount{Requests: 50, Asked: 5000}),
		"stored 12GiB, 0 hits"},
	"use-loads-fail": {Error, tokens(connector.TokenCount{Requests: 50, Asked: 5000, Found: 4000}),
		"none was loaded"},
	"use-few-hits": {Note, tokens(connector.TokenCount{Requests: 50, Asked: 5000, Found: 100,
		Loaded: 100}), "2 %"},
	"use-shed": {Warning, func(_ *Facts, s *Sidecar) { s.Status.Counters.ShedPages = 500 },
		"arena.limit"},
	"gpu-none":   {Warning, gpu(GPU{Missing: "gpu", Err: "torch sees no GPU"}), "no GPU"},
	"gpu-failed": {Error, gpu(GPU{Err: "cuMemHostRegister failed"}), "cuMemHostRegister"},
	"gpu-bytes":  {Error, gpu(GPU{Device: "d", Wrong: []string{"host to GPU"}}), "host to GPU"},
	"gpu-slow": {Warning, gpu(GPU{Device: "d", Store: Copy{1e9, 1e10}, Load: Copy{1e10, 1e10}}),
		"10 %"},
}

func init() {
	for field, id := range shareIDs {
		ill := illnesses[id]
		ill.level, ill.seen = Warning, "everywhere"
		ill.spoil = func(_ *Facts, s *Sidecar) {
			s.Status.Unshared = []admin.UnsharedStatus{unlike(field), unlike(field)}
		}
		illnesses[id] = ill
	}
	for _, m := range admin.MissReasons() {
		level := Note
		switch m.Reason {
		case why.EngineHad.String():
			continue
		case why.Lost.String(), why.OtherSeed.String():
			level = Warning
		}
		ill := illnesses[missID(m.Reason)]
		ill.level, ill.seen = level, m.Means
		ill.spoil = func(_ *Facts, s *Sidecar) {
			s.Status.Misses = map[string]why.Count{m.Reason: {Ends: 3, Pages: 30}}
		}
		illnesses[missID(m.Reason)] = ill
	}
}

func gone(err error) func(*Facts, *Sidecar) {
	return func(f *Facts, s *Sidecar) {
		f.Sidecars, f.Engines = []Sidecar{{Endpoint: endpoint, PID: 4, Err: err}}, nil
	}
}

func disk(d Disk) func(*Facts, *Sidecar) {
	return func(f *Facts, _ *Sidecar) { f.Disks = []Disk{d} }
}

func tier(t admin.TierStatus) func(*Facts, *Sidecar) {
	return func(_ *Facts, s *Sidecar) { s.Status.Tiers = []admin.TierStatus{t} }
}

func about(name, value string) func(*Facts, *Sidecar) {
	return func(_ *Facts, s *Sidecar) { s.Status.Sessions[0].About[name] = value }
}

func refused(code string) func(*Facts, *Sidecar) {
	return func(_ *Facts, s *Sidecar) {
		s.Status.Counters.Refused = map[string]uint64{code: 2, "no_worker": 7}
	}
}

func tokens(c connector.TokenCount) func(*Facts, *Sidecar) {
	return func(_ *Facts, s *Sidecar) { s.Status.Counters.Tokens = c }
}

func gpu(g GPU) func(*Facts, *Sidecar) {
	return func(f *Facts, _ *Sidecar) { f.GPU = &g }
}

func TestEachIllnessIsFoundAlone(t *testing.T) {
	for id, ill := range illnesses {
		f := wellFacts()
		ill.spoil(f, &f.Sidecars[0])
		r := Diagnose(f)
		found := 0
		for _, x := range r.Findings {
			switch {
			case x.Level == OK:
			case x.ID != id && !alsoFound(id, x.ID):
				t.Errorf("%s: also %+v", id, x)
			case x.ID == id:
				if found++; x.Level != ill.level || x.Fix == "" ||
					!strings.Contains(x.Seen+" "+x.Fix, ill.seen) {
					t.Errorf("%s: %+v", id, x)
				}
			}
		}
		if found != 1 || r.Worst == OK {
			t.Errorf("%s: found %d times; the worst is %s", id, found, r.Worst)
		}
	}
}

// alsoFound reports whether one thing that is wrong is two findings.
func alsoFound(id, other string) bool {
	return id == "host-memory" && other == "sidecar-none"
}

// fine are the ids that are OK only.
var fine = []string{"disk-speed", "sidecar-ok", "sidecar-tier-ok", "engine-ok", "use-ok",
	"miss-engine-had", "gpu-copies"}

// TestEveryIDIsTestedAndExplained checks that every id has a test, and a place in the docs.
func TestEveryIDIsTestedAndExplained(t *testing.T) {
	b, err := os.ReadFile("../../docs/troubleshooting.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range IDs() {
		if _, ok := illnesses[id]; !ok && !slices.Contains(fine, id) {
			t.Errorf("%s has no test", id)
		}
		if !strings.Contains(string(b), "`"+id+"`") {
			t.Errorf("docs/troubleshooting.md lacks %s", id)
		}
	}
	known := IDs()
	for _, m := range regexp.MustCompile("`((?:host|disk|sidecar|engine|share|use|miss|gpu)-[a-z0-9-]+)`").
		FindAllStringSubmatch(string(b), -1) {
		if !slices.Contains(known, m[1]) {
			t.Errorf("docs/troubleshooting.md has %s, which is no finding", m[1])
		}
	}
}

func TestWhatIsFineHasIDsToo(t *testing.T) {
	f := wellFacts()
	s := &f.Sidecars[0]
	f.Disks = []Disk{{Tested: true, Direct: true, Free: 1 << 40, Read: 3 << 30, Write: 1 << 30}}
	s.Status.Tiers = []admin.TierStatus{{State: "closed", BytesPerSecond: 1e9}}
	s.Status.Misses = map[string]why.Count{"engine_had": {Ends: 5, Pages: 50},
		"evicted": {Ends: 1, Pages: 1}, "never_stored": {Ends: 9, Pages: 99}}
	f.GPU = &GPU{Device: "d", Store: Copy{9e9, 1e10}, Load: Copy{1e10, 1e10}}
	r := Diagnose(f)
	for _, id := range fine {
		if !slices.ContainsFunc(r.Findings,
			func(x Finding) bool { return x.ID == id && x.Level == OK }) {
			t.Errorf("no %s", id)
		}
	}
	for _, x := range r.Findings {
		if x.ID == "miss-evicted" && x.Level != OK {
			t.Errorf("one of a hundred: %+v", x)
		}
	}
}

func TestText(t *testing.T) {
	f := wellFacts()
	illnesses["host-numa"].spoil(f, &f.Sidecars[0])
	illnesses["sidecar-rotten"].spoil(f, &f.Sidecars[0])
	var b strings.Builder
	r := Diagnose(f)
	if err := r.WriteText(&b, false); err != nil {
		t.Fatal(err)
	}
	text := b.String()
	if !strings.HasPrefix(text, "ERROR  sidecar-rotten  ("+endpoint+")\n") ||
		!strings.HasSuffix(text, "\n1 error, 0 warnings, 1 note\n") ||
		!strings.Contains(text, "\nfine: host-memory, ") || strings.Contains(text, "OK  ") {
		t.Error(text)
	}
	for line := range strings.SplitSeq(text, "\n") {
		if len([]rune(line)) > columns {
			t.Errorf("too long: %s", line)
		}
	}
	b.Reset()
	if err := r.WriteText(&b, true); err != nil || !strings.Contains(b.String(), "OK  host-memory") {
		t.Error(b.String())
	}
}

func TestWithinLeavesWhatHangs(t *testing.T) {
	hang := make(chan struct{})
	defer close(hang)
	var late []string
	set := false
	within(time.Millisecond, func(what string) { late = append(late, what) }, "a disk",
		func() func() {
			<-hang
			return func() { set = true }
		})
	if set || !slices.Equal(late, []string{"a disk"}) {
		t.Errorf("%v, %v", set, late)
	}
	within(time.Hour, func(string) { t.Error("late") }, "", func() func() {
		return func() { set = true }
	})
	if !set {
		t.Error("not set")
	}
}

func TestCommandsOfVLLM(t *testing.T) {
	one := `{"kv_connector": "LookasideConnector", "kv_role": "kv_both", "kv_load_failure_policy": "fail",
		"kv_connector_extra_config": {"lookaside.endpoint": "/run/x/rank-{rank}", "lookaside.autostart": "true"}}`
	several := `{"kv_connector": "MultiConnector", "kv_load_failure_policy": "recompute",
		"kv_connector_extra_config": {"connectors": [{"kv_connector": "Other"}, ` + one + `]}}`
	for _, args := range [][]string{
		{"vllm", "serve", "m", "--kv-transfer-config", one, "--no-enable-prefix-caching"},
		{"python3", "-m", "vllm", "--no_enable_prefix_caching", "--kv-transfer-config=" + one},
		{"vllm", "--kv_transfer_config", several, "--no-enable-prefix-caching",
			"--prefix-caching-hash-algo=sha256_cbor"},
	} {
		p, ok := parseCommand(args)
		if !ok || !p.NoCaching || p.EndpointOf(3) != "/run/x/rank-3" || !p.Autostart() ||
			p.Role != "kv_both" {
			t.Errorf("%v: %v, %+v", args, ok, p)
		}
		if want := map[bool]string{true: "recompute", false: "fail"}[len(args) == 5]; len(args) == 5 &&
			args[1] == "--kv_transfer_config" && p.FailurePolicy != want {
			t.Errorf("%q", p.FailurePolicy)
		}
	}
	// Alone the connector sees to it that what fails to load is computed. Among several it cannot.
	for config, fails := range map[string]bool{
		one:     false,
		several: false,
		strings.Replace(several, "recompute", "fail", 1):                                      true,
		strings.Replace(several, `"kv_load_failure_policy": "recompute",`, "", 1):             true,
		`{"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": []}}`: false,
	} {
		p, _ := parseCommand([]string{"vllm", "serve", "m", "--kv-transfer-config", config})
		if p.FailsRequests != fails {
			t.Errorf("%s: %v", config, p.FailsRequests)
		}
	}
	for _, args := range [][]string{
		{"vllm", "--kv-transfer-config", one, "-tp", "4", "--pipeline-parallel-size=2"},
		{"vllm", "-pp=2", "--tensor_parallel_size", "4", "--kv-transfer-config", one},
	} {
		if p, _ := parseCommand(args); p.Ranks() != 8 {
			t.Errorf("%v: %d ranks", args, p.Ranks())
		}
	}
	for _, args := range [][]string{nil, {"vllm"}, {"x", "--kv-transfer-config"},
		{"x", "--kv-transfer-config", `{"kv_connector": "Other"}`},
		{"x", "--kv-transfer-config", "{"}, {"grep", "LookasideConnector"}} {
		if p, ok := parseCommand(args); ok {
			t.Errorf("%v: %+v", args, p)
		}
	}
	p := Process{Known: true, UID: 7}
	if p.EndpointOf(0) != "/tmp/lookaside-7/rank-0" {
		t.Error(p.EndpointOf(0))
	}
	if p.XDG = "/run/user/7"; p.EndpointOf(1) != "/run/user/7/lookaside-7/rank-1" {
		t.Error(p.EndpointOf(1))
	}
	if p.Known = false; p.EndpointOf(0) != "" {
		t.Error(p.EndpointOf(0))
	}
}

// TestHostIsRead reads this very host, and a made-up one with a GPU.
func TestHostIsRead(t *testing.T) {
	h := readHost("/")
	if h.MemTotal <= 0 || h.MemAvailable <= 0 || h.CPUs == 0 || h.HugePageBytes <= 0 {
		t.Errorf("%+v", h)
	}
	root := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		path := filepath.Join(root, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700),
			os.WriteFile(path, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	write("proc/meminfo", "MemTotal: 2048 kB\nHugePages_Free: 3\nHugepagesize: 2048 kB\n")
	write("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size [advise] never\n")
	write("sys/devices/system/node/node0/meminfo", "")
	write("sys/devices/system/node/node1/meminfo", "")
	write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct\n")
	write("proc/driver/nvidia/gpus/0000:1/information", "Model: \t\t NVIDIA H100\nIRQ: 5\n")
	h = readHost(root)
	if h.MemTotal != 2<<20 || h.HugePagesFree != 3 || h.ShmemEnabled != "advise" || h.Nodes != 2 ||
		h.Driver != "535.129.03" || !slices.Equal(h.GPUs, []string{"NVIDIA H100"}) ||
		h.ShmTotal != -1 {
		t.Errorf("%+v", h)
	}
	write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release\n")
	if h = readHost(root); h.Driver != "570.86.15" {
		t.Errorf("%q", h.Driver)
	}
}

func TestDiskIsMeasuredAndLeftAsItWas(t *testing.T) {
	dir := t.TempDir()
	d := Disk{Path: dir, Capacity: 1 << 20}
	if d.look(true); d.Err != nil || d.Missing || d.Free <= 0 {
		t.Fatalf("%+v", d)
	}
	if d.Tested && (d.Read <= 0 || d.Write <= 0) {
		t.Errorf("%+v", d)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("%v, %v", left, err)
	}
	missing := Disk{Path: filepath.Join(dir, "a", "b")}
	if missing.look(true); !missing.Missing || missing.Err != nil || missing.Tested {
		t.Errorf("%+v", missing)
	}
	if left, _ := os.ReadDir(dir); len(left) > 0 {
		t.Error("it was made")
	}
	file := Disk{Path: filepath.Join(dir, "file")}
	if err := os.WriteFile(file.Path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if file.look(true); file.Err == nil {
		t.Errorf("%+v", file)
	}
}
