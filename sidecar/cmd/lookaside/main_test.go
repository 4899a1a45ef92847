package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"lookaside/connector"
	"lookaside/internal/leak"
	"lookaside/internal/prefixes"
	"lookaside/ipc/client"
	"lookaside/ipc/wire"
	"lookaside/sidecar"
	"lookaside/sidecar/admin"
	"lookaside/sidecar/settings"
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

// runBy runs it by a command that ends in the binary, and returns all that it says.
func runBy(t *testing.T, command []string, args ...string) (said string, code int) {
	t.Helper()
	cmd := exec.Command(command[0], slices.Concat(command[1:], args)...)
	out, err := cmd.CombinedOutput()
	if err != nil && cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return string(out), cmd.ProcessState.ExitCode()
}

// A server is `lookaside serve` in another process.
type server struct {
	t      *testing.T
	dir    string
	cmd    *exec.Cmd
	stderr io.Closer // the end that is read
	exited chan struct{}

	mu  sync.Mutex
	log strings.Builder
}

func serveProcess(t *testing.T, args ...string) *server {
	t.Helper()
	return serveOnly(t, append([]string{"--arena-limit", "8M", "--arena-kind", "memfd"},
		args...)...)
}

// serveOnly starts a sidecar with these settings alone.
func serveOnly(t *testing.T, args ...string) *server {
	t.Helper()
	return serveBy(t, []string{binary}, args...)
}

// serveBy starts a sidecar by a command that ends in the binary.
func serveBy(t *testing.T, command []string, args ...string) *server {
	t.Helper()
	dir, err := os.MkdirTemp("", "la") // t.TempDir's names are too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return serveIn(t, filepath.Join(dir, "rank-0"), command, args...)
}

// serveIn is serveBy for a directory.
func serveIn(t *testing.T, dir string, command []string, args ...string) *server {
	t.Helper()
	s := &server{t: t, dir: dir, exited: make(chan struct{})}
	s.cmd = exec.Command(command[0], slices.Concat(command[1:], []string{"serve", "--runtime-dir",
		dir}, args)...)
	stderr, err := s.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	s.stderr = stderr
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
			if strings.Contains(lines.Text(), "\tready\t") {
				once()
			}
		}
		_ = s.cmd.Wait()
		close(s.exited)
	}()
	t.Cleanup(func() {
		_ = s.cmd.Process.Kill()
		<-s.exited
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
	h := &wire.Hello{Role: role, EngineID: "engine", PageTokens: 16, PageBytes: 4096,
		PagesPerChunk: 4, DigestBytes: 32}
	if role == wire.RoleScheduler {
		h.PageBytes = 0
	}
	return h
}

// worker connects as a worker and reads its regions.
func (s *server) worker() *client.Session { return s.workerOf(hello(wire.RoleWorker)) }

func (s *server) workerOf(h *wire.Hello) *client.Session {
	s.t.Helper()
	w, err := client.Dial(s.dir, h, patience)
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
		d := prefixes.Digest(1, i)
		packed = append(packed, d[:]...)
		words = append(words, fmt.Sprintf("%x", d))
	}
	return packed, words
}

func TestOneInterruptDrainsAndExitsWithZero(t *testing.T) {
	for _, sig := range []os.Signal{os.Interrupt, syscall.SIGTERM, syscall.SIGHUP} {
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
			if e.Name() != "lock" && e.Name() != "directory" { // for the next sidecar
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
	for end := time.Now().Add(patience); !strings.Contains(s.text(), "draining"); time.Sleep(
		5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not draining:\n%s", s.text())
		}
	}
	// Those of the first second do not count.
	for s.cmd.Process.Signal(os.Interrupt) == nil {
		select {
		case <-s.exited:
		case <-time.After(50 * time.Millisecond):
		}
	}
	if code := s.exit(patience); code != 130 {
		t.Errorf("exit code %d:\n%s", code, s.text())
	}
	// What it left is replaced by the next one.
	next := exec.Command(binary, "serve", "--runtime-dir", s.dir, "--arena-limit", "8M",
		"--arena-kind", "memfd", "--lifecycle-idle-exit", "100ms")
	if out, err := next.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// A signal that comes twice at once, as timeout(1) sends it to the process and to its group, drains
// and flushes like one.
func TestSignalTwiceAtOnceFlushes(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGHUP} {
		flags := []string{"--disk", t.TempDir() + ":8M:slab=1M", "--cascade-partial-delay=1h",
			"--lookup-deadline=1m"}
		s := serveProcess(t, flags...)
		words := storePages(t, s, 10)
		s.signal(sig)
		s.signal(sig)
		if code := s.exit(patience); code != 0 {
			t.Errorf("%v: exit code %d:\n%s", sig, code, s.text())
		}
		s = serveProcess(t, flags...)
		s.worker()
		commander{t, s.dir}.says(append([]string{"lookup", "--timeout=1m", "--engine-id=engine"},
			words...), nil, "hit: 10 of 10 pages")
	}
}

// Under nohup SIGHUP is nothing.
func TestIgnoredHangupIsIgnored(t *testing.T) {
	s := serveBy(t, []string{"nohup", binary})
	s.signal(syscall.SIGHUP)
	s.worker()
	s.signal(syscall.SIGTERM)
	if code := s.exit(patience); code != 0 || strings.Contains(s.text(), "hangup") {
		t.Errorf("exit code %d:\n%s", code, s.text())
	}
}

// Who reads the log may be gone before the sidecar drains.
func TestDrainWithoutAReaderOfTheLog(t *testing.T) {
	flags := []string{"--disk", t.TempDir() + ":8M:slab=1M", "--cascade-partial-delay=1h",
		"--lookup-deadline=1m"}
	s := serveProcess(t, flags...)
	words := storePages(t, s, 10)
	s.stderr.Close()
	s.signal(syscall.SIGTERM)
	if code := s.exit(patience); code != 0 {
		t.Errorf("exit code %d, %v", code, s.cmd.ProcessState)
	}
	s = serveProcess(t, flags...)
	s.worker()
	commander{t, s.dir}.says(append([]string{"lookup", "--timeout=1m", "--engine-id=engine"},
		words...), nil, "hit: 10 of 10 pages")
}

func TestSecondSidecarNamesTheOwner(t *testing.T) {
	s := serveProcess(t)
	_, stderr, code := run(t, nil, "serve", "--runtime-dir", s.dir, "--arena-limit", "8M")
	if code == 0 || !strings.Contains(stderr, fmt.Sprintf("pid %d", s.cmd.Process.Pid)) ||
		!strings.Contains(stderr, s.dir) {
		t.Errorf("exit code %d: %s", code, stderr)
	}
	s.worker() // the first one goes on
}

func TestIdleExit(t *testing.T) {
	t.Parallel()
	var s *server
	var w *client.Session
	for tries := 1; w == nil; tries++ {
		// on a busy machine it may have left before the worker comes
		s = serveProcess(t, "--lifecycle-idle-exit=2s")
		var err error
		if w, err = client.Dial(s.dir, hello(wire.RoleWorker), patience); err != nil &&
			(tries == 5 || s.exit(patience) != 0) {
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
			_, log, code := run(t, nil, "serve", "--runtime-dir", filepath.Join(dir, "rank-0"),
				"--arena-limit=8M", "--arena-kind=memfd",
				"--lifecycle-idle-exit=50ms", "--admin-listen=0.0.0.0:0", "--log-format=json",
				"--log-level="+level)
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
		{[]string{"LOOKASIDE_ARENA_LIMITT=4G"}, []string{"serve"},
			[]string{"LOOKASIDE_ARENA_LIMITT", "LOOKASIDE_ARENA_LIMIT"}},
		{nil, []string{"serve", "--arena-limt=4G"}, []string{"--arena-limt", "--arena-limit"}},
		{nil, []string{"serve", "--arena-limit=4000T"}, []string{"arena.limit", "4000",
			"available"}},
		{nil, []string{"serve", "extra"}, []string{"extra"}},
		{nil, []string{"sevre"}, []string{"sevre", "serve"}},
		{nil, []string{"status", "--runtime-dir=/nowhere"}, []string{"no sidecar", "/nowhere"}},
		{nil, []string{"status", "--jsno"}, []string{"--jsno", "--json"}},
		{nil, []string{"lookup", "--runtime-dir=/nowhere", "--engine-id=e", "00ff"},
			[]string{"no sidecar", "/nowhere"}},
		{nil, []string{"lookup", "--engine-id=e", "xyz"}, []string{"xyz"}},
		{nil, []string{"lookup", "--engine-id=e"}, []string{"no page hashes"}},
		{nil, []string{"lookup", "--runtime-dir=/nowhere", "00"},
			[]string{"no sidecar", "/nowhere"}},
		{nil, []string{"lookup", "--runtime-dir=/nowhere", "--tokens=-", "00"},
			[]string{"only one of them"}},
		{nil, []string{"lookup", "--tokens=-", "--prompt=a"}, []string{"[prompt tokens]"}},
		{nil, []string{"prefetch", "--prompt=a", "--hashes=-"}, []string{"[hashes prompt]"}},
		{nil, []string{"clear", "--all", "--prompt=a", "--yes"}, []string{"clear what?"}},
		{nil, []string{"clear", "--prompt=a"}, []string{"--yes", "the prefix"}},
	} {
		dir := t.TempDir()
		_, stderr, code := run(t, append(tc.environ, "XDG_RUNTIME_DIR="+dir), tc.args...)
		want := 1
		if tc.args[0] == "serve" {
			want = 78 // trying again does not help
		}
		if code != want {
			t.Errorf("%v: exit code %d", tc.args, code)
		}
		for _, w := range tc.want {
			if !strings.Contains(strings.ToLower(stderr), strings.ToLower(w)) {
				t.Errorf("%v: %q does not say %s", tc.args, stderr, w)
			}
		}
	}
}

// The help of serve has eight flags, and says where the others are.
func TestHelpAndVersion(t *testing.T) {
	flags := func(args ...string) (text string, names []string) {
		out, stderr, code := run(t, nil, args...)
		if code != 0 {
			t.Errorf("%v: exit code %d: %s", args, code, stderr)
		}
		for line := range strings.Lines(out) {
			if words := strings.Fields(line); len(words) > 0 && strings.HasPrefix(words[0], "--") {
				names = append(names, strings.TrimPrefix(words[0], "--"))
			}
		}
		return strings.Join(strings.Fields(out), " "), names
	}
	want := append(settings.MainFlags(), "help-all")
	slices.Sort(want)
	for _, args := range [][]string{{"serve", "--help"}, {"serve", "-h", "--arena-limit=1G"},
		{"help", "serve"}} {
		text, names := flags(args...)
		slices.Sort(names)
		if len(want) != 10 || !slices.Equal(names, want) ||
			!strings.Contains(text, "--help-all lists the others") ||
			!strings.Contains(text, "default: 4G") {
			t.Errorf("%v: %v: %s", args, names, text)
		}
	}
	text, names := flags("serve", "--help-all")
	for _, s := range settings.All() {
		if !slices.Contains(names, s.Flag()) {
			t.Errorf("the help has no --%s", s.Flag())
		}
		for _, want := range []string{s.Meaning, s.Unit, s.Default} {
			if !strings.Contains(text, strings.Join(strings.Fields(want), " ")) {
				t.Errorf("%s: the help lacks %q", s.Key, want)
			}
		}
	}
	var out string
	var code int
	if out, _, code = run(t, nil, "--help"); code != 0 || !strings.Contains(out, "serve") ||
		!strings.Contains(out, "status") {
		t.Errorf("exit code %d: %s", code, out)
	}
	for _, args := range [][]string{{"version"}, {"--version"}} {
		if out, _, code = run(t, nil, args...); code != 0 ||
			!strings.HasPrefix(out, "lookaside "+sidecar.Version+" (commit ") ||
			!strings.Contains(out, " libzmq 4.") || strings.Count(out, "\n") != 1 {
			t.Errorf("%v: exit code %d: %s", args, code, out)
		}
	}
}

// A flag that is true or false needs no value, and what follows it is none.
func TestFlagsThatAreTrueOrFalse(t *testing.T) {
	s := serveProcess(t, "--admin-pprof", "--peers-enabled=false", "--peers-skip-stores",
		"--log-format", "console")
	var st admin.Status
	commander{t, s.dir}.says([]string{"status", "--json"}, &st)
	if st.Peers.Enabled {
		t.Error("--peers-enabled=false was not taken")
	}
	if err := admin.NewClient(s.dir).Get(t.Context(), "/debug/pprof/cmdline",
		new(struct{})); err == nil || strings.Contains(err.Error(), "404") {
		t.Errorf("--admin-pprof was not taken: %v", err)
	}
	for _, args := range [][]string{{"--admin-pprof", "false"}, {"--peers-enabled", "0",
		"--admin-pprof"}} {
		if _, stderr, code := run(t, nil, append([]string{"serve"},
			args...)...); code != exitSettings || !strings.Contains(stderr, "--FLAG="+args[1]) {
			t.Errorf("%v: exit code %d: %s", args, code, stderr)
		}
	}
	if _, stderr, code := run(t, nil, "serve", "here"); code != exitSettings ||
		!strings.Contains(stderr, `"here"`) {
		t.Errorf("exit code %d: %s", code, stderr)
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
	out, stderr, code := run(t, nil, "lookup", "--timeout=30s", "--runtime-dir", s.dir,
		"--engine-id=engine", "--json", "--hashes", file, words[0])
	var answer admin.Answer
	if err := json.Unmarshal([]byte(out), &answer); err != nil || code != 0 {
		t.Fatalf("exit code %d, %v: %s%s", code, err, out, stderr)
	}
	if answer.Pages != 10 || answer.HitPages != 8 || answer.HitTokens != 128 ||
		answer.PageTokens != 16 || answer.LatencyUs <= 0 {
		t.Errorf("%+v", answer)
	}
	if out, _, _ = run(t, nil, "lookup", "--timeout=30s", "--runtime-dir", s.dir,
		"--engine-id=engine", words[0]); !strings.Contains(out, "hit: 1 of 1 pages, 16 tokens") {
		t.Errorf("%s", out)
	}
	if _, stderr, code = run(t, nil, "lookup", "--timeout=30s", "--runtime-dir", s.dir,
		"--engine-id=nobody", words[0]); code != 1 || !strings.Contains(stderr, "no_worker") {
		t.Errorf("exit code %d: %s", code, stderr)
	}

	var st admin.Status
	for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		// the owner needs no token
		out, stderr, code = run(t, nil, "status", "--runtime-dir", s.dir, "--json")
		st = admin.Status{}
		if err := json.Unmarshal([]byte(out), &st); err != nil || code != 0 {
			t.Fatalf("exit code %d, %v: %s%s", code, err, out, stderr)
		}
		if len(st.Sessions) == 1 && st.Leases == 0 || time.Now().After(end) {
			// those who asked have gone, and with them what they leased
			break
		}
	}
	if st.PID != s.cmd.Process.Pid || st.State != "serving" || st.Pages != 8 ||
		st.Slots.Ready != 2 || len(st.Sessions) != 1 || len(st.Spaces) != 1 ||
		st.Spaces[0].Pages != 8 || st.Counters.StoredBytes != 8*4096 || st.Leases != 0 ||
		st.Arena.UsedBytes != 2*4*4096 {
		t.Errorf("%+v", st)
	}
	out, _, code = run(t, []string{"LOOKASIDE_RUNTIME_DIR=" + s.dir}, "status")
	for _, want := range []string{"serving", "8 held", "computed", "worker", "engine"} {
		if code != 0 || !strings.Contains(out, want) {
			t.Errorf("exit code %d, lacks %q:\n%s", code, want, out)
		}
	}

	addr, err := os.ReadFile(filepath.Join(s.dir, "admin.addr"))
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(s.dir, "admin.sock")
	if info, err := os.Stat(socket); err != nil || info.Mode() != os.ModeSocket|0o600 {
		t.Errorf("%v, %v", info, err)
	}
	own := &http.Client{Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		}}}
	resp, err := own.Get("http://localhost/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if body, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != http.StatusOK ||
		!strings.Contains(string(body), "lookaside_state 1") {
		t.Errorf("%s, %v: %s", resp.Status, err, body)
	}
	get := func(path, token string) (int, string) {
		req, err := http.NewRequest(http.MethodGet, "http://"+strings.TrimSpace(string(addr))+path,
			nil)
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
		if code, body := get(tc.path, tc.token); code != tc.code ||
			!strings.Contains(body, tc.has) {
			t.Errorf("%s with token %q: %d %.200s", tc.path, tc.token, code, body)
		}
	}
}

// The admin socket lets in its user and root, whatever has become of its mode.
func TestAdminSocketIsTheOwners(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can be somebody else")
	}
	const nobody = 65534
	s := serveProcess(t, "--log-level=info")
	as := func(uid uint32) (string, error) {
		cmd := exec.Command("/proc/self/fd/3", "status", "--runtime-dir", s.dir)
		f, err := os.Open(binary)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		cmd.ExtraFiles = []*os.File{f}
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	if out, err := as(nobody); err == nil || !strings.Contains(out, "another user's") {
		t.Errorf("%v: %s", err, out)
	}
	for path, mode := range map[string]os.FileMode{filepath.Dir(s.dir): 0o755, s.dir: 0o755,
		filepath.Join(s.dir, "admin.sock"): 0o666} {
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := as(nobody); err == nil || !strings.Contains(out, "no sidecar answers") {
		t.Errorf("%v: %s", err, out)
	}
	if out, err := as(0); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	if !strings.Contains(s.text(), "another user") {
		t.Errorf("%s", s.text())
	}
}

// What lookups found is not what vLLM loaded: only the schedulers say that, and of that is the
// ratio.
func TestStatusTellsFoundFromLoaded(t *testing.T) {
	s := serveProcess(t)
	c := commander{t, s.dir}
	first := func() string {
		out, stderr, code := c.run("status")
		if code != 0 {
			t.Fatalf("exit code %d: %s", code, stderr)
		}
		line, _, _ := strings.Cut(out, "\n")
		return line
	}
	if got := first(); got != "no engine has connected" {
		t.Errorf("%q", got)
	}
	words := storePages(t, s, 10)
	for range 3 {
		c.says(append([]string{"lookup", "--timeout=1m", "--engine-id=engine"}, words...), nil,
			"hit: 10 of 10")
	}
	var st admin.Status
	c.says([]string{"status", "--json"}, &st, `"loaded_ratio": 0`)
	if n := st.Counters; n.HitPages != 30 || n.LookupPages != 30 ||
		n.Tokens != (connector.TokenCount{}) || st.LastMinute.Lookups > 3 {
		t.Errorf("%+v, %+v", n, st.LastMinute)
	}
	if got := first(); got !=
		"healthy: 1 engine connected, no tokens were asked for in the last minute" {
		t.Errorf("%q", got)
	}

	scheduler, err := client.Dial(s.dir, hello(wire.RoleScheduler), patience)
	if err != nil {
		t.Fatal(err)
	}
	defer scheduler.Close()
	for _, m := range []wire.Prefilled{{Tokens: 700}, {Tokens: 300, Found: 200},
		{Tokens: 1000, Found: 1000, Loaded: 640}} {
		if err := scheduler.Send(&m); err != nil {
			t.Fatal(err)
		}
	}
	if err := scheduler.Call(&wire.Ping{ID: 1}, new(wire.Pong), patience); err != nil {
		t.Fatal(err)
	}
	c.says([]string{"status", "--json"}, &st)
	want := connector.TokenCount{Requests: 3, Asked: 2000, Found: 1200, Loaded: 640, Computed: 1360}
	if st.Counters.Tokens != want || st.LoadedRatio != 0.32 {
		t.Errorf("%+v, %v", st.Counters.Tokens, st.LoadedRatio)
	}
	verdict, recent := first(), st.LastMinute
	c.says([]string{"status", "--json"}, &st)
	if st.UptimeS < 60 && (recent.Tokens != want || recent.LoadedRatio != 0.32 ||
		verdict != "healthy: 1 engine connected, 32 % of the tokens asked for were loaded in the last minute") {
		t.Errorf("%+v, %q", recent, verdict)
	}
	c.says([]string{"status"}, nil,
		"2000 asked for in 3 requests: 1200 found (60 %), 640 loaded (32 %), 1360 computed",
		"last minute")

	// Only a scheduler may say so.
	w := s.worker()
	if err := w.Send(&wire.Prefilled{Tokens: 1}); err != nil {
		t.Fatal(err)
	}
	if err := w.Call(&wire.Ping{ID: 1}, new(wire.Pong), patience); err == nil {
		t.Error("a worker may")
	}
}
