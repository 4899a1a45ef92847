package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"lookaside/ipc/client"
	"lookaside/ipc/wire"
	"lookaside/sidecar/doctor"
)

// A diagnosis is what lookaside doctor says.
type diagnosis struct {
	t      *testing.T
	report doctor.Report
	code   int
}

// diagnose runs lookaside doctor by a command that ends in the binary.
func diagnose(t *testing.T, command []string, args ...string) diagnosis {
	t.Helper()
	if command == nil {
		command = []string{binary}
	}
	cmd := exec.Command(command[0], slices.Concat(command[1:], []string{"doctor", "--json",
		"--timeout=1m"}, args)...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=/"}
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	d := diagnosis{t: t}
	if cmd.ProcessState == nil {
		t.Fatal(err)
	}
	d.code = cmd.ProcessState.ExitCode()
	if jsonErr := json.Unmarshal(out, &d.report); jsonErr != nil {
		t.Fatalf("%v, %v: %s%s", err, jsonErr, out, &stderr)
	}
	want := map[doctor.Level]int{doctor.OK: 0, doctor.Note: 0, doctor.Warning: exitWarnings,
		doctor.Error: exitErrors}[d.report.Worst]
	if d.code != want || d.report.Schema != doctor.Schema {
		t.Errorf("exit code %d, worst %s", d.code, d.report.Worst)
	}
	return d
}

func (s *server) diagnose(args ...string) diagnosis {
	s.t.Helper()
	return diagnose(s.t, nil, append([]string{"--runtime-dir", s.dir}, args...)...)
}

// says fails the test unless there is a finding with the id, at this level, that has all texts in
// what is seen or in the fix.
func (d diagnosis) says(id string, level doctor.Level, texts ...string) {
	d.t.Helper()
	var same []doctor.Finding
	for _, f := range d.report.Findings {
		if f.ID != id {
			continue
		}
		same = append(same, f)
		has := func(text string) bool { return strings.Contains(f.Seen+" "+f.Fix, text) }
		if f.Level == level && !slices.ContainsFunc(texts,
			func(text string) bool { return !has(text) }) {
			return
		}
	}
	d.t.Errorf("no %s %s with %q, but %+v", level, id, texts, same)
}

// saysNot fails the test if there is a finding with the id.
func (d diagnosis) saysNot(id string) {
	d.t.Helper()
	for _, f := range d.report.Findings {
		if f.ID == id {
			d.t.Errorf("%+v", f)
		}
	}
}

// engineOf connects an engine, a worker and a scheduler, with what its Hello is changed to.
func (s *server) engineOf(change func(h *wire.Hello)) *client.Session {
	s.t.Helper()
	var scheduler *client.Session
	for _, role := range []string{wire.RoleWorker, wire.RoleScheduler} {
		h := hello(role)
		h.Fields = []wire.Field{{Key: "dtype", Value: "bfloat16"}, {Key: "hash", Value: "sha256_cbor"},
			{Key: "model", Value: "m"}, {Key: "none_hash", Value: "00"},
			{Key: "revision", Value: "main"}}
		h.About = []wire.Field{{Key: "failure_policy", Value: "recompute"},
			{Key: "kv_role", Value: "kv_both"}, {Key: "vllm", Value: "0.33.0"}}
		change(h)
		if role == wire.RoleWorker {
			s.workerOf(h)
			continue
		}
		var err error
		if scheduler, err = client.Dial(s.dir, h, patience); err != nil {
			s.t.Fatal(err)
		}
		s.t.Cleanup(func() { scheduler.Close() })
	}
	return scheduler
}

// setField replaces or adds a value in a list by rising key.
func setField(list *[]wire.Field, key, value string) {
	i, found := slices.BinarySearchFunc(*list, key,
		func(f wire.Field, key string) int { return strings.Compare(f.Key, key) })
	if found {
		(*list)[i].Value = value
	} else {
		*list = slices.Insert(*list, i, wire.Field{Key: key, Value: value})
	}
}

func (s *server) tell(scheduler *client.Session, all ...wire.Prefilled) {
	s.t.Helper()
	for i := range all {
		if err := scheduler.Send(&all[i]); err != nil {
			s.t.Fatal(err)
		}
	}
	if err := scheduler.Call(&wire.Ping{ID: 1}, new(wire.Pong), patience); err != nil {
		s.t.Fatal(err)
	}
}

// A sidecar with an engine that gets hits: nothing is wrong.
func TestDoctorFindsNothing(t *testing.T) {
	disk := t.TempDir()
	s := serveProcess(t, "--disk", disk+":16M")
	scheduler := s.engineOf(func(*wire.Hello) {})
	s.tell(scheduler, wire.Prefilled{Tokens: 1000, Found: 900, Loaded: 900, Own: 24})
	d := s.diagnose()
	d.says("sidecar-ok", doctor.OK, "2 sessions", "8MiB")
	d.says("engine-ok", doctor.OK, "vllm 0.33.0", "failure_policy recompute", "blocks of 16 tokens")
	d.says("use-ok", doctor.OK, "900 (90 %) were loaded", "its own cache had 24")
	// The disk's directory is known from the sidecar's command line. A busy machine's is slow.
	if !slices.ContainsFunc(d.report.Findings, func(f doctor.Finding) bool {
		return (f.ID == "disk-speed" || f.ID == "disk-slow") && strings.Contains(f.Subject, disk) &&
			strings.Contains(f.Seen, "/s read")
	}) {
		t.Errorf("the disk was not measured: %+v", d.report.Findings)
	}
	d.says("sidecar-tier-ok", doctor.OK, disk)
	for _, f := range d.report.Findings {
		// What else runs on this machine may be unwell.
		if (f.Level == doctor.Error || f.Level == doctor.Warning) && f.Subject == s.dir {
			t.Errorf("%+v", f)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(disk, "*")); slices.ContainsFunc(left,
		func(name string) bool {
			return !strings.HasPrefix(filepath.Base(name), "slab-") &&
				filepath.Base(name) != "lock"
		}) {
		t.Errorf("the disk was not left as it was: %v", left)
	}
	text, stderr, code := run(t, nil, "doctor", "--runtime-dir", s.dir)
	if !strings.Contains(text, "fine: ") || code != 0 && !strings.HasPrefix(stderr,
		"lookaside: doctor: ") {
		t.Errorf("exit code %d: %s%s", code, text, stderr)
	}
}

// Instances that differ in one setting by accident.
func TestDoctorNamesWhatInstancesDifferIn(t *testing.T) {
	set := func(key, value string) func(*wire.Hello) {
		return func(h *wire.Hello) { setField(&h.Fields, key, value) }
	}
	for id, tc := range map[string]struct {
		change func(h *wire.Hello)
		fix    string
	}{
		"share-seed": {set("none_hash", "11"), "PYTHONHASHSEED"},
		"share-hash": {func(h *wire.Hello) {
			set("hash", "sha256")(h)
			set("none_hash", "22")(h)
		}, "--prefix-caching-hash-algo"},
		"share-block-size": {func(h *wire.Hello) {
			if h.PageTokens *= 2; h.PageBytes > 0 {
				h.PageBytes *= 2
			}
		}, "--block-size"},
		"share-chunk-tokens": {func(h *wire.Hello) { h.PagesPerChunk = 2 }, "lookaside.chunk_tokens"},
		"share-revision":     {set("revision", "v2"), "--revision"},
		"share-dtype":        {set("dtype", "float16"), "--dtype"},
		"share-kv-dtype":     {set("kv_dtype", "fp8"), "--kv-cache-dtype"},
		"share-weights":      {set("weights", "33"), ""},
		"share-vllm":         {set("vllm", "0.99.0"), "vLLM"},
		"share-python":       {set("hash_keys", "44"), "Python"},
	} {
		t.Run(id, func(t *testing.T) {
			t.Parallel()
			s := serveProcess(t)
			storePages(t, s, 8) // by a third engine
			s.engineOf(func(h *wire.Hello) { h.EngineID = "one" })
			s.engineOf(func(h *wire.Hello) {
				h.EngineID = "other"
				tc.change(h)
			})
			d := s.diagnose()
			d.says(id, doctor.Warning, "share nothing", "stored 32KiB, 0 hits", tc.fix)
			for _, f := range d.report.Findings {
				if strings.HasPrefix(f.ID, "share-") && f.ID != id {
					t.Errorf("%+v", f)
				}
			}
		})
	}
}

// Engines with settings that cost something.
func TestDoctorOnEngines(t *testing.T) {
	s := serveProcess(t, "--disk", t.TempDir()+":16M")
	about := func(key, value string) {
		s.engineOf(func(h *wire.Hello) {
			h.EngineID = "engine with " + key
			setField(&h.Fields, "model", key) // one of its own
			setField(&h.About, key, value)
		})
	}
	about("failure_policy", "fail")
	about("chunk_tokens", "100")
	about("notes", "vLLM 0.99 is newer than any")
	about("settings", "promotion_timeout_ms=0, watch_weights=False")
	about("lookaside", "9.9.9")
	s.engineOf(func(h *wire.Hello) {
		h.EngineID = "random"
		setField(&h.Fields, "hash", "xxhash")
		setField(&h.Fields, "none_hash", "engine:random")
	})
	// A worker whose scheduler does not come, and a client of another release.
	alone := hello(wire.RoleWorker)
	alone.EngineID, alone.About = "alone", []wire.Field{{Key: "kv_role", Value: "kv_both"}}
	s.workerOf(alone)
	old := hello(wire.RoleWorker)
	old.Version = wire.Version - 1
	if _, err := client.Dial(s.dir, old, patience); err == nil {
		t.Error("welcome")
	}
	d := s.diagnose()
	d.says("engine-failure-policy", doctor.Warning, "is fail", `"kv_load_failure_policy": "recompute"`)
	d.says("engine-chunk", doctor.Note, "chunk_tokens is 100", "multiple of 16")
	d.says("engine-notes", doctor.Note, "0.99")
	d.says("engine-no-promotion", doctor.Warning, "never a hit")
	d.says("engine-unwatched-weights", doctor.Note)
	d.says("engine-version", doctor.Note, "9.9.9")
	d.says("engine-random-seed", doctor.Error, "xxhash", "PYTHONHASHSEED=0")
	d.says("engine-no-scheduler", doctor.Warning)
	d.says("sidecar-refused-version", doctor.Warning, "1 sessions")
	d.says("use-idle", doctor.Note)
}

// Of what use it is, by what schedulers report.
func TestDoctorOnUse(t *testing.T) {
	for id, tc := range map[string]struct {
		told  wire.Prefilled // ten times
		level doctor.Level
		text  string
	}{
		"use-own-cache": {wire.Prefilled{Tokens: 100, Found: 3, Loaded: 3, Own: 97}, doctor.Note,
			"vLLM's own cache served 97 % of the hits: the working set fits the GPU"},
		"use-no-hits":    {wire.Prefilled{Tokens: 100}, doctor.Warning, "stored 32KiB, 0 hits"},
		"use-loads-fail": {wire.Prefilled{Tokens: 100, Found: 80}, doctor.Error, "none was loaded"},
		"use-few-hits": {wire.Prefilled{Tokens: 100, Found: 2, Loaded: 2}, doctor.Note,
			"(2 %) were loaded"},
	} {
		t.Run(id, func(t *testing.T) {
			t.Parallel()
			s := serveProcess(t)
			storePages(t, s, 8)
			other := func(h *wire.Hello) { h.EngineID = "other" } // than the one that stored
			s.tell(s.engineOf(other), slices.Repeat([]wire.Prefilled{tc.told}, 10)...)
			s.diagnose().says(id, tc.level, tc.text)
		})
	}
	t.Run("misses", func(t *testing.T) {
		t.Parallel()
		s := serveProcess(t)
		words := storePages(t, s, 8)
		c := commander{t, s.dir}
		c.says(append([]string{"lookup", "--timeout=1m", "--engine-id=engine"}, words...), nil,
			"hit: 8 of 8")
		other := strings.Repeat("77", 32)
		c.says([]string{"lookup", "--timeout=1m", "--engine-id=engine", other}, nil, "hit: 0 of 1")
		d := s.diagnose()
		d.says("miss-never-stored", doctor.Note, "1 prefixes ended and 1 pages", "100 %")
		d.saysNot("miss-evicted")
	})
}

// Sidecars that are not there, or do not answer.
func TestDoctorWithoutASidecar(t *testing.T) {
	// Without a name it is below /tmp where there is no XDG_RUNTIME_DIR. All sidecars are asked.
	diagnose(t, nil, "--timeout=5s").says("sidecar-directory", doctor.Note,
		"XDG_RUNTIME_DIR is not set")

	elsewhere, killed, stopped := serveProcess(t), serveProcess(t), serveProcess(t)
	killed.signal(syscall.SIGKILL)
	killed.exit(patience)
	killed.diagnose().says("sidecar-killed", doctor.Error, "was killed", "lookaside serve")
	stopped.signal(syscall.SIGSTOP)
	defer stopped.signal(syscall.SIGCONT)
	stopped.diagnose("--timeout=2s").says("sidecar-silent", doctor.Error,
		fmt.Sprint(stopped.cmd.Process.Pid), "kill -CONT")

	none := filepath.Join(t.TempDir(), "rank-0")
	diagnose(t, nil, "--runtime-dir", none).says("sidecar-elsewhere", doctor.Error, elsewhere.dir,
		"--runtime-dir "+none)
	open := t.TempDir()
	if err := os.Chmod(open, 0o755); err != nil {
		t.Fatal(err)
	}
	diagnose(t, nil, "--runtime-dir", open).says("sidecar-directory", doctor.Error, "0755",
		"chmod 700")
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(open, link); err != nil {
		t.Fatal(err)
	}
	diagnose(t, nil, "--runtime-dir", link).says("sidecar-directory", doctor.Error, "symbolic link")
	draining := serveProcess(t, "--lifecycle-drain", "1m")
	w := draining.worker()
	packed, _ := hashes(4)
	if err := w.Call(&wire.PrepareStore{ID: 1, Hashes: packed}, new(wire.StoreGrant),
		patience); err != nil {
		t.Fatal(err)
	}
	draining.signal(syscall.SIGTERM)
	for end := time.Now().Add(patience); draining.status().State != "draining"; {
		if time.Now().After(end) {
			t.Fatal("it does not drain")
		}
	}
	draining.diagnose().says("sidecar-draining", doctor.Warning)
	w.Close()
	draining.exit(patience)
}

// In a network namespace of its own there is no sidecar at all.
func TestDoctorOfAnEmptyHost(t *testing.T) {
	unshare, err := exec.LookPath("unshare")
	if err != nil || os.Getuid() != 0 {
		t.Skip("needs root and unshare")
	}
	none := filepath.Join(t.TempDir(), "rank-0")
	d := diagnose(t, []string{unshare, "--net", binary}, "--runtime-dir", none)
	d.says("sidecar-none", doctor.Error, "no sidecar runs on this host",
		"lookaside serve --arena-limit 16G --runtime-dir "+none)

	// Another user's.
	theirs, exe := serveProcess(t), filepath.Join(t.TempDir(), "lookaside")
	b, err := os.ReadFile(binary)
	if err == nil {
		err = os.WriteFile(exe, b, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	for dir := filepath.Dir(exe); dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(filepath.Dir(theirs.dir), 0o755); err != nil {
		t.Fatal(err)
	}
	setpriv := []string{"setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", exe}
	d = diagnose(t, setpriv, "--runtime-dir", theirs.dir)
	d.says("sidecar-directory", doctor.Error, "uid 0", "uid 65534")
	d.says("sidecar-other-user", doctor.Error, "as root")

	// No room in /dev/shm.
	full := `mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"`
	diagnose(t, []string{unshare, "--mount", "/bin/sh", "-c", full, "sh", binary}, "--runtime-dir",
		none).says("host-shm", doctor.Warning, "64KiB", "--shm-size")
}

// Settings with which a sidecar would not start here.
func TestDoctorBeforeTheStart(t *testing.T) {
	none := filepath.Join(t.TempDir(), "rank-0")
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	disk, missing := t.TempDir(), filepath.Join(t.TempDir(), "missing")
	d := diagnose(t, nil, "--runtime-dir", none, "--arena-limit", "900T", "--disk", disk+":900T",
		"--disk", file+":1G:name=file", "--disk", missing+":1M:name=missing")
	d.says("host-memory", doctor.Error, "arena.limit 900TiB", "even with all of it free")
	d.says("disk-full", doctor.Error, "smaller capacity")
	d.says("disk-unusable", doctor.Error, "is a file")
	d.says("disk-missing", doctor.Warning, "does not exist")
	if _, err := os.Stat(missing); err == nil {
		t.Error("it was made")
	}
	if _, stderr, code := run(t, nil, "doctor", "--arena-limt=1G"); code != exitFailure ||
		!strings.Contains(stderr, "--arena-limit") {
		t.Errorf("exit code %d: %s", code, stderr)
	}
}

func TestDoctorInAControlGroup(t *testing.T) {
	_, command := memoryGroup(t, 512<<20)
	d := diagnose(t, command, "--runtime-dir", filepath.Join(t.TempDir(), "x"), "--arena-limit", "2G",
		"--arena-kind", "memfd")
	d.says("host-memory", doctor.Error, "arena.limit 2GiB", "the control group limit", "container")
}

// A disk that is not mounted keeps its tier down, and the sidecar serves without it.
func TestDoctorOnATierThatIsDown(t *testing.T) {
	s := serveProcess(t, "--disk", "/proc/not-mounted/kv:16M")
	s.engineOf(func(*wire.Hello) {})
	d := s.diagnose()
	d.says("sidecar-tier", doctor.Error, "/proc/not-mounted", "mounted")
	d.says("disk-missing", doctor.Error, "a sidecar that runs has it")
}

// A server is found by its command line before it is connected, and where it looks for a sidecar.
func TestDoctorOnServers(t *testing.T) {
	s := serveProcess(t)
	dir := t.TempDir()
	start := func(environ []string, args ...string) int {
		t.Helper()
		// It stays until its input ends, with the arguments of a server of vLLM.
		cmd := exec.Command("/bin/sh", append([]string{"-c", "read x; :", "vllm"}, args...)...)
		cmd.Env = environ
		stdin, err := cmd.StdinPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = stdin.Close()
			_ = cmd.Wait()
		})
		return cmd.Process.Pid
	}
	config := func(endpoint string) string {
		return fmt.Sprintf(`{"kv_connector": "LookasideConnector", "kv_load_failure_policy": "fail", "kv_connector_extra_config": {"lookaside.endpoint": %q}}`, endpoint)
	}
	none := filepath.Join(dir, "rank-{rank}")
	elsewhere := start(nil, "--kv-transfer-config", config(none))
	loading := start(nil, "--kv-transfer-config="+config(s.dir))
	uncached := start(nil, "--kv-transfer-config", config(s.dir), "--no-enable-prefix-caching")
	plain := start([]string{"XDG_RUNTIME_DIR=" + dir}, "--kv-transfer-config",
		`{"kv_connector": "LookasideConnector", "kv_load_failure_policy": "recompute"}`)
	several := func(policy string) string {
		return fmt.Sprintf(`{"kv_connector": "MultiConnector"%s, "kv_connector_extra_config": {"connectors": [{"kv_connector": "Other"}, %s]}}`,
			policy, config(s.dir))
	}
	failing := start(nil, "--kv-transfer-config", several(""))
	computing := start(nil, "--kv-transfer-config",
		several(`, "kv_load_failure_policy": "recompute"`))
	starting := start(nil, "--kv-transfer-config", `{"kv_connector": "LookasideConnector",
		"kv_connector_extra_config": {"lookaside.autostart": true, "lookaside.endpoint": `+
		strconv.Quote(none)+`}}`)
	// Of two ranks the second one has no sidecar.
	parallel := start(nil, "-tp", "2", "--kv-transfer-config",
		config(filepath.Join(filepath.Dir(s.dir), "rank-{rank}")))
	d := s.diagnose()
	no := func(pid int, id string) {
		t.Helper()
		for _, f := range d.report.Findings {
			if f.ID == id && f.Subject == fmt.Sprintf("vLLM, process %d", pid) {
				t.Errorf("%+v", f)
			}
		}
	}
	of := func(pid int, id string, level doctor.Level, text string) {
		t.Helper()
		for _, f := range d.report.Findings {
			if f.ID == id && f.Level == level && f.Subject == fmt.Sprintf("vLLM, process %d", pid) &&
				strings.Contains(f.Seen+f.Fix, text) {
				return
			}
		}
		t.Errorf("no %s of %d with %q: %+v", id, pid, text, d.report.Findings)
	}
	of(elsewhere, "engine-elsewhere", doctor.Error, filepath.Join(dir, "rank-0"))
	of(elsewhere, "engine-elsewhere", doctor.Error, fmt.Sprintf(`"lookaside.endpoint": %q`, s.dir))
	no(elsewhere, "engine-failure-policy") // the connector sees to it
	of(failing, "engine-failure-policy", doctor.Warning, `"kv_load_failure_policy": "recompute"`)
	no(computing, "engine-failure-policy")
	of(starting, "engine-unconnected", doctor.Warning, "starts a sidecar by itself")
	of(parallel, "engine-rank", doctor.Error, "--runtime-dir "+filepath.Join(filepath.Dir(s.dir),
		"rank-1"))
	no(loading, "engine-rank")
	of(loading, "engine-unconnected", doctor.Warning, "model is loaded")
	of(uncached, "engine-no-caching", doctor.Error, "--no-enable-prefix-caching")
	of(plain, "engine-elsewhere", doctor.Error, filepath.Join(dir, fmt.Sprintf("lookaside-%d",
		os.Getuid()), "rank-0"))
}

// Whoever accepts and says nothing does not hold it up.
func TestDoctorNeverHangs(t *testing.T) {
	dir, err := os.MkdirTemp("", "la")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	l, err := net.Listen("unix", filepath.Join(dir, "admin.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	d := diagnose(t, nil, "--runtime-dir", dir, "--timeout=1s")
	d.says("sidecar-silent", doctor.Error)
	if conn, err := l.Accept(); err == nil {
		_, _ = io.Copy(io.Discard, conn)
		_ = conn.Close()
	}
}
