package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"lookaside/internal/leak"
	"lookaside/ipc/client"
	"lookaside/ipc/wire"
	"lookaside/sidecar"
)

// binary is the command, built once for all tests.
var binary string

func TestMain(m *testing.M) { os.Exit(testMain(m)) }

func testMain(m *testing.M) int {
	dir, err := os.MkdirTemp("", "lookaside-cli-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	binary = filepath.Join(dir, "lookaside")
	if out, err := exec.Command("go", "build", "-o", binary, ".").CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "%s%v\n", out, err)
		return 1
	}
	before := leak.Take()
	code := m.Run()
	if left := leak.Wait(before, patience); code == 0 && len(left) > 0 {
		leak.Report(os.Stderr, left)
		code = 1
	}
	return code
}

const patience = 2 * time.Minute

// run runs the command to its end.
func run(t *testing.T, environ []string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	cmd := exec.Command(binary, args...)
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=/"}, environ...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	if err != nil && cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

// A server is `lookaside serve` in another process.
type server struct {
	t      *testing.T
	dir    string
	cmd    *exec.Cmd
	exited chan struct{}

	mu  sync.Mutex
	log strings.Builder
}

func serveProcess(t *testing.T, args ...string) *server {
	t.Helper()
	return serveOnly(t, append([]string{"--arena-limit", "8M", "--arena-kind", "memfd"}, args...)...)
}

// serveOnly starts a sidecar with these settings alone.
func serveOnly(t *testing.T, args ...string) *server {
	t.Helper()
	dir, err := os.MkdirTemp("", "la") // t.TempDir's names are too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	dir = filepath.Join(dir, "rank-0")
	s := &server{t: t, dir: dir, exited: make(chan struct{})}
	s.cmd = exec.Command(binary, append([]string{"serve", "--runtime-dir", dir}, args...)...)
	stderr, err := s.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ready := make(chan struct{})
	go func() {
		once := sync.OnceFunc(func() { close(ready) })
		lines := bufio.NewScanner(stderr)
		for lines.Scan() {
			s.mu.Lock()
			s.log.WriteString(lines.Text() + "\n")
			s.mu.Unlock()
			if strings.Contains(lines.Text(), "\tserving\t") {
				once()
			}
		}
		_ = s.cmd.Wait()
		close(s.exited)
	}()
	t.Cleanup(func() {
		_ = s.cmd.Process.Kill()
		<-s.exited
		os.RemoveAll(filepath.Dir(dir))
	})
	select {
	case <-ready:
	case <-s.exited:
		select {
		case <-ready: // and has left again, before we looked
		default:
			t.Fatalf("it did not start:\n%s", s.text())
		}
	case <-time.After(patience):
		t.Fatalf("it does not serve:\n%s", s.text())
	}
	return s
}

func (s *server) text() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.log.String()
}

func (s *server) signal(sig os.Signal) {
	s.t.Helper()
	if err := s.cmd.Process.Signal(sig); err != nil {
		s.t.Fatal(err)
	}
}

// exit waits for the end and returns the exit code.
func (s *server) exit(within time.Duration) int {
	s.t.Helper()
	select {
	case <-s.exited:
	case <-time.After(within):
		s.t.Fatalf("still there after %v:\n%s", within, s.text())
	}
	return s.cmd.ProcessState.ExitCode()
}

func hello(role string) *wire.Hello {
	h := &wire.Hello{Role: role, EngineID: "engine", PageTokens: 16, PageBytes: 4096, PagesPerChunk: 4, DigestBytes: 32}
	if role == wire.RoleScheduler {
		h.PageBytes = 0
	}
	return h
}

// worker connects as a worker and reads its regions.
func (s *server) worker() *client.Session {
	s.t.Helper()
	w, err := client.Dial(s.dir, hello(wire.RoleWorker), patience)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { w.Close() })
	for range w.Welcome.Regions {
		_, files, err := w.Recv(patience)
		if err != nil {
			s.t.Fatal(err)
		}
		for _, f := range files {
			f.Close()
		}
	}
	return w
}

func hashes(pages int) (packed []byte, words []string) {
	for i := range pages {
		d := sidecar.BenchDigest(1, i)
		packed = append(packed, d[:]...)
		words = append(words, fmt.Sprintf("%x", d))
	}
	return packed, words
}

func TestOneInterruptDrainsAndExitsWithZero(t *testing.T) {
	for _, sig := range []os.Signal{os.Interrupt, syscall.SIGTERM} {
		s := serveProcess(t, "--lifecycle-drain=1h")
		w := s.worker()
		packed, _ := hashes(4)
		var g wire.StoreGrant
		if err := w.Call(&wire.PrepareStore{ID: 1, Hashes: packed}, &g, patience); err != nil {
			t.Fatal(err)
		}
		s.signal(sig)
		// It waits for the store that is under way, and refuses new sessions meanwhile.
		deadline := time.Now().Add(patience)
		for {
			other, err := client.Dial(s.dir, hello(wire.RoleWorker), patience)
			if err != nil && strings.Contains(err.Error(), wire.RefuseDraining) {
				break
			}
			if err == nil {
				other.Close()
			}
			if time.Now().After(deadline) {
				t.Fatalf("not draining: %v", err)
			}
		}
		if err := w.Send(&wire.CommitStore{Store: g.Store}); err != nil {
			t.Fatal(err)
		}
		if code := s.exit(patience); code != 0 {
			t.Errorf("exit code %d after %v:\n%s", code, sig, s.text())
		}
		left, _ := os.ReadDir(s.dir)
		for _, e := range left {
			if e.Name() != "lock" {
				t.Errorf("%s was left behind", e.Name())
			}
		}
	}
}

func TestDrainIsBounded(t *testing.T) {
	s := serveProcess(t, "--lifecycle-drain=300ms")
	packed, _ := hashes(4)
	var g wire.StoreGrant
	if err := s.worker().Call(&wire.PrepareStore{ID: 1, Hashes: packed}, &g, patience); err != nil {
		t.Fatal(err)
	}
	s.signal(os.Interrupt)
	if code := s.exit(patience); code != 0 {
		t.Errorf("exit code %d:\n%s", code, s.text())
	}
	if !strings.Contains(s.text(), "1 stores") {
		t.Errorf("the log does not say what was lost:\n%s", s.text())
	}
}

func TestSecondInterruptLeavesAtOnce(t *testing.T) {
	s := serveProcess(t, "--lifecycle-drain=1h")
	packed, _ := hashes(4)
	var g wire.StoreGrant
	if err := s.worker().Call(&wire.PrepareStore{ID: 1, Hashes: packed}, &g, patience); err != nil {
		t.Fatal(err)
	}
	s.signal(os.Interrupt)
	for end := time.Now().Add(patience); !strings.Contains(s.text(), "draining"); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not draining:\n%s", s.text())
		}
	}
	s.signal(os.Interrupt)
	if code := s.exit(patience); code != 130 {
		t.Errorf("exit code %d:\n%s", code, s.text())
	}
	// What it left is replaced by the next one.
	next := exec.Command(binary, "serve", "--runtime-dir", s.dir, "--arena-limit", "8M", "--arena-kind", "memfd", "--lifecycle-idle-exit", "100ms")
	if out, err := next.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestSecondSidecarNamesTheOwner(t *testing.T) {
	s := serveProcess(t)
	_, stderr, code := run(t, nil, "serve", "--runtime-dir", s.dir, "--arena-limit", "8M")
	if code == 0 || !strings.Contains(stderr, fmt.Sprintf("pid %d", s.cmd.Process.Pid)) || !strings.Contains(stderr, s.dir) {
		t.Errorf("exit code %d: %s", code, stderr)
	}
	s.worker() // the first one goes on
}

func TestIdleExit(t *testing.T) {
	t.Parallel()
	var s *server
	var w *client.Session
	for tries := 1; w == nil; tries++ { // on a busy machine it may have left before the worker comes
		s = serveProcess(t, "--lifecycle-idle-exit=2s")
		var err error
		if w, err = client.Dial(s.dir, hello(wire.RoleWorker), patience); err != nil && (tries == 5 || s.exit(patience) != 0) {
			t.Fatalf("%v:\n%s", err, s.text())
		}
	}
	defer w.Close()
	time.Sleep(2500 * time.Millisecond)
	select {
	case <-s.exited:
		t.Fatalf("it left a worker behind:\n%s", s.text())
	default:
	}
	w.Close()
	if code := s.exit(patience); code != 0 {
		t.Errorf("exit code %d:\n%s", code, s.text())
	}
}

// Whatever the level, nothing below it is written, and nothing that is no line of the log.
func TestLogLevels(t *testing.T) {
	levels := []string{"debug", "info", "warn", "error"}
	for least, level := range levels {
		t.Run(level, func(t *testing.T) {
			dir, err := os.MkdirTemp("", "la")
			if err != nil {
				t.Fatal(err)
			}
			defer os.RemoveAll(dir)
			// An address that others reach is warned about.
			_, log, code := run(t, nil, "serve", "--runtime-dir", filepath.Join(dir, "rank-0"), "--arena-limit=8M", "--arena-kind=memfd",
				"--lifecycle-idle-exit=50ms", "--admin-listen=0.0.0.0:0", "--log-format=json", "--log-level="+level)
			if code != 0 {
				t.Errorf("exit code %d", code)
			}
			seen := map[string]bool{}
			for line := range strings.Lines(log) {
				var entry struct{ Level, Msg string }
				if err := json.Unmarshal([]byte(line), &entry); err != nil || entry.Msg == "" {
					t.Errorf("no line of the log: %q", line)
				}
				seen[entry.Level] = true
			}
			for i, l := range levels[:3] { // nothing failed
				if l != "debug" && seen[l] != (i >= least) || l == "debug" && seen[l] && least > 0 {
					t.Errorf("level %s written: %v:\n%s", l, seen[l], log)
				}
			}
		})
	}
}

func TestBadSettings(t *testing.T) {
	file := filepath.Join(t.TempDir(), "c.yaml")
	if err := os.WriteFile(file, []byte("arena:\n  limti: 4G\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		environ []string
		args    []string
		want    []string
	}{
		{nil, []string{"serve", "--config", file}, []string{"arena.limti", "arena.limit"}},
		{[]string{"LOOKASIDE_ARENA_LIMITT=4G"}, []string{"serve"}, []string{"LOOKASIDE_ARENA_LIMITT", "LOOKASIDE_ARENA_LIMIT"}},
		{nil, []string{"serve", "--arena-limt=4G"}, []string{"--arena-limt", "--arena-limit"}},
		{nil, []string{"serve", "--arena-limit=4000T"}, []string{"arena.limit", "4000", "available"}},
		{nil, []string{"serve", "extra"}, []string{"extra"}},
		{nil, []string{"sevre"}, []string{"sevre", "serve"}},
		{nil, []string{"bench", "nothing"}, []string{"nothing"}},
		{nil, []string{"status", "--runtime-dir=/nowhere"}, []string{"no sidecar", "/nowhere"}},
		{nil, []string{"status", "--jsno"}, []string{"--jsno", "--json"}},
		{nil, []string{"lookup", "--runtime-dir=/nowhere", "--engine-id=e", "00ff"}, []string{"no sidecar", "/nowhere"}},
		{nil, []string{"lookup", "--engine-id=e", "xyz"}, []string{"xyz"}},
		{nil, []string{"lookup", "--engine-id=e"}, []string{"no page hashes"}},
		{nil, []string{"lookup", "00"}, []string{"engine-id"}},
	} {
		dir := t.TempDir()
		_, stderr, code := run(t, append(tc.environ, "XDG_RUNTIME_DIR="+dir), tc.args...)
		if code != 1 {
			t.Errorf("%v: exit code %d", tc.args, code)
		}
		for _, w := range tc.want {
			if !strings.Contains(strings.ToLower(stderr), strings.ToLower(w)) {
				t.Errorf("%v: %q does not say %s", tc.args, stderr, w)
			}
		}
	}
}

func TestHelpAndVersion(t *testing.T) {
	out, _, code := run(t, nil, "serve", "--help")
	if code != 0 {
		t.Errorf("exit code %d", code)
	}
	for _, s := range sidecar.Settings() {
		for _, want := range []string{"--" + s.Flag() + " ", s.Meaning, s.Unit, s.Default} {
			if !strings.Contains(out, want) {
				t.Errorf("%s: the help lacks %q", s.Key, want)
			}
		}
	}
	if out, _, code = run(t, nil, "--help"); code != 0 || !strings.Contains(out, "serve") || !strings.Contains(out, "status") {
		t.Errorf("exit code %d: %s", code, out)
	}
	if out, _, code = run(t, nil, "version"); code != 0 || !strings.HasPrefix(out, "lookaside "+sidecar.Version) {
		t.Errorf("exit code %d: %s", code, out)
	}
}

func TestStatusAndLookup(t *testing.T) {
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := serveProcess(t, "--admin-token-file", token, "--admin-pprof=true")
	w := s.worker()
	packed, words := hashes(10)
	var g wire.StoreGrant
	if err := w.Call(&wire.PrepareStore{ID: 1, Hashes: packed[:8*32]}, &g, patience); err != nil {
		t.Fatal(err)
	}
	if err := w.Send(&wire.CommitStore{Store: g.Store}); err != nil {
		t.Fatal(err)
	}
	if err := w.Call(&wire.Ping{ID: 2}, new(wire.Pong), patience); err != nil {
		t.Fatal(err)
	}

	file := filepath.Join(t.TempDir(), "hashes")
	if err := os.WriteFile(file, []byte(strings.Join(words[1:], "\n")), 0o600); err != nil {
		t.Fatal(err)
	}
	out, stderr, code := run(t, nil, "lookup", "--timeout=30s", "--runtime-dir", s.dir, "--engine-id=engine", "--json", "--hashes", file, words[0])
	var answer sidecar.Answer
	if err := json.Unmarshal([]byte(out), &answer); err != nil || code != 0 {
		t.Fatalf("exit code %d, %v: %s%s", code, err, out, stderr)
	}
	if answer.Pages != 10 || answer.HitPages != 8 || answer.HitTokens != 128 || answer.PageTokens != 16 || answer.LatencyUs <= 0 {
		t.Errorf("%+v", answer)
	}
	if out, _, _ = run(t, nil, "lookup", "--timeout=30s", "--runtime-dir", s.dir, "--engine-id=engine", words[0]); !strings.Contains(out, "hit: 1 of 1 pages, 16 tokens") {
		t.Errorf("%s", out)
	}
	if _, stderr, code = run(t, nil, "lookup", "--timeout=30s", "--runtime-dir", s.dir, "--engine-id=nobody", words[0]); code != 1 || !strings.Contains(stderr, "no_worker") {
		t.Errorf("exit code %d: %s", code, stderr)
	}

	if _, stderr, code = run(t, nil, "status", "--runtime-dir", s.dir); code != 1 || !strings.Contains(stderr, "401") {
		t.Errorf("without the token: exit code %d: %s", code, stderr)
	}
	var st sidecar.Status
	for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		out, stderr, code = run(t, nil, "status", "--runtime-dir", s.dir, "--admin-token-file", token, "--json")
		st = sidecar.Status{}
		if err := json.Unmarshal([]byte(out), &st); err != nil || code != 0 {
			t.Fatalf("exit code %d, %v: %s%s", code, err, out, stderr)
		}
		if len(st.Sessions) == 1 && st.Leases == 0 || time.Now().After(end) { // those who asked have gone, and with them what they leased
			break
		}
	}
	if st.PID != s.cmd.Process.Pid || st.State != "serving" || st.Pages != 8 || st.Slots.Ready != 2 || len(st.Sessions) != 1 || len(st.Spaces) != 1 ||
		st.Spaces[0].Pages != 8 || st.Counters.StoredBytes != 8*4096 || st.Leases != 0 || st.Arena.UsedBytes != 2*4*4096 {
		t.Errorf("%+v", st)
	}
	out, _, code = run(t, []string{"LOOKASIDE_ADMIN_TOKEN_FILE=" + token, "LOOKASIDE_RUNTIME_DIR=" + s.dir}, "status")
	for _, want := range []string{"serving", "8 held", "hit ratio", "worker", "engine"} {
		if code != 0 || !strings.Contains(out, want) {
			t.Errorf("exit code %d, lacks %q:\n%s", code, want, out)
		}
	}

	addr, err := os.ReadFile(filepath.Join(s.dir, "admin.addr"))
	if err != nil {
		t.Fatal(err)
	}
	get := func(path, token string) (int, string) {
		req, err := http.NewRequest(http.MethodGet, "http://"+strings.TrimSpace(string(addr))+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		if token != "" {
			req.Header.Set("Authorization", "Bearer "+token)
		}
		resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, _ := io.ReadAll(resp.Body)
		return resp.StatusCode, string(body)
	}
	for _, tc := range []struct {
		path, token string
		code        int
		has         string
	}{
		{"/healthz", "", 200, "ok"},
		{"/readyz", "", 200, "ok"},
		{"/metrics", "", 401, ""},
		{"/metrics", "wrong", 401, ""},
		{"/metrics", "secret", 200, "lookaside_stored_bytes_total 32768"},
		{"/metrics", "secret", 200, `lookaside_slots{state="ready"} 2`},
		{"/metrics", "secret", 200, `lookaside_sessions{role="worker"} 1`},
		{"/v1/status", "", 401, ""},
		{"/debug/pprof/", "", 401, ""},
		{"/debug/pprof/", "secret", 200, "goroutine"},
		{"/nothing", "secret", 404, ""},
	} {
		if code, body := get(tc.path, tc.token); code != tc.code || !strings.Contains(body, tc.has) {
			t.Errorf("%s with token %q: %d %.200s", tc.path, tc.token, code, body)
		}
	}
}

func TestLookupServer(t *testing.T) {
	cmd := exec.Command(binary, "bench", "lookup-server", "--pages=20000", "--prefix-pages=1000", "--copy-threads=1")
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(stdout).ReadBytes('\n')
	if err != nil {
		t.Fatal(err)
	}
	var ready sidecar.LookupServerReady
	if err := json.Unmarshal(line, &ready); err != nil {
		t.Fatal(err)
	}
	_, words := hashes(1000)
	out, stderr, code := run(t, nil, append([]string{"lookup", "--timeout=30s", "--runtime-dir", ready.Endpoint, "--engine-id", ready.EngineID}, words...)...)
	if code != 0 || !strings.Contains(out, "1000 of 1000 pages") {
		t.Errorf("exit code %d: %s%s", code, out, stderr)
	}
	stdin.Close()
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(ready.Endpoint); !os.IsNotExist(err) {
		t.Errorf("%s is left: %v", ready.Endpoint, err)
	}
}
