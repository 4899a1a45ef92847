package main

import (
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"lookaside/sidecar/admin"
)

// tcpOf returns the URL of a sidecar's admin server.
func tcpOf(t *testing.T, s *server) string {
	t.Helper()
	addr, err := os.ReadFile(filepath.Join(s.dir, "admin.addr"))
	if err != nil {
		t.Fatal(err)
	}
	return "http://" + strings.TrimSpace(string(addr))
}

// Commands ask the admin server at an address as they ask the one in runtime.dir.
func TestAdminAddress(t *testing.T) {
	dir := t.TempDir()
	token, wrong := filepath.Join(dir, "token"), filepath.Join(dir, "wrong")
	for file, text := range map[string]string{token: "secret\n", wrong: "guess\n"} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s := serveProcess(t, "--admin-token-file", token)
	storePages(t, s, 8)
	socket, tcp := "unix://"+filepath.Join(s.dir, "admin.sock"), tcpOf(t, s)
	c := commander{t: t, dir: filepath.Join(dir, "nowhere")}
	for _, at := range [][]string{{"--admin", socket}, {"--admin=" + tcp, "--token-file", token},
		{"--admin", tcp + "/", "--token-file=" + token}} {
		with := func(args ...string) []string { return append(args, at...) }
		var st admin.Status
		c.says(with("status", "--json"), &st)
		if st.PID != s.cmd.Process.Pid || st.Pages != 8 {
			t.Errorf("%v: %+v", at, st)
		}
		c.says(with("tiers"), nil, "arena")
		c.says(with("ready"), nil, "ok")
		c.says(with("ready", "--live", "--json"), nil, `"state": "ok"`)
		var list []admin.HostSidecar
		c.says(with("list", "--json"), &list)
		var states []admin.HostState
		c.says(with("top", "--json"), &states)
		found := 0
		for i, l := range list {
			if l.Endpoint == s.dir {
				found += i + 1 // lists may have sidecars of other tests
			}
		}
		if found == 0 {
			t.Errorf("%v: %+v", at, list)
		}
		for _, state := range states {
			if state.Endpoint == s.dir && (state.Status == nil || state.Status.Pages != 8) {
				t.Errorf("%v: %+v", at, state)
			}
		}
	}
	// The settings may name the token too.
	if out, stderr, code := run(t, []string{"LOOKASIDE_ADMIN_TOKEN_FILE=" + token}, "status",
		"--admin", tcp); code != 0 {
		t.Errorf("%s%s", out, stderr)
	}
	c.says([]string{"clear", "--all", "--yes", "--admin", socket}, nil, "2 chunks")

	elsewhere := httptest.NewServer(http.RedirectHandler("http://other.example/",
		http.StatusFound))
	defer elsewhere.Close()
	c.fails([]string{"status", "--admin", tcp}, "401", "token is required")
	c.fails([]string{"status", "--admin", tcp, "--token-file", wrong}, "401")
	c.fails([]string{"status", "--admin", tcp, "--token-file", filepath.Join(dir, "none")},
		"--token-file", "no such file")
	c.fails([]string{"status", "--admin", elsewhere.URL, "--token-file", token}, "302 Found")
	c.fails([]string{"status", "--token-file", token}, "--admin")
	c.fails([]string{"status", "--admin", socket, "--runtime-dir", s.dir}, "runtime-dir")
	for _, bad := range []string{"admin.sock", "unix://admin.sock", "unix:admin.sock", "127.0.0.1:80",
		"http://", tcp + "/v1", "ftp://x", tcp + "?token=secret", "http://me@" + tcp[len("http://"):],
		"%zz"} {
		c.fails([]string{"status", "--admin", bad}, "is no address of an admin server")
	}
	gone := filepath.Join(dir, "gone.sock")
	c.fails([]string{"ready", "--admin", "unix://" + gone}, "no sidecar runs at unix://"+gone)
}

// With admin.listen none a sidecar has no port, and its user and root reach it all the same.
func TestAdminWithoutAPort(t *testing.T) {
	s := serveProcess(t, "--admin-listen", "none", "--log-level=info")
	if _, err := os.Stat(filepath.Join(s.dir, "admin.addr")); !os.IsNotExist(err) {
		t.Errorf("admin.addr: %v", err)
	}
	socket := "unix://" + filepath.Join(s.dir, "admin.sock")
	if !strings.Contains(s.text(), socket) {
		t.Errorf("the log lacks %s:\n%s", socket, s.text())
	}
	c := commander{t: t, dir: s.dir}
	c.says([]string{"status"}, nil, "serving")
	c.says([]string{"ready", "--wait=1m"}, nil, "ok")

	// A neighbour with a port shows it to its owner and refuses it to all others.
	beside := serveIn(t, filepath.Join(filepath.Dir(s.dir), "rank-1"), []string{binary},
		"--arena-limit=8M", "--arena-kind=memfd")
	state := func(at ...string) admin.HostState {
		t.Helper()
		var states []admin.HostState
		c.says(append([]string{"top", "--json"}, at...), &states)
		for _, st := range states {
			if st.Endpoint == s.dir {
				return st
			}
		}
		return admin.HostState{HostSidecar: admin.HostSidecar{Error: "not there"}}
	}
	owner := "unix://" + filepath.Join(beside.dir, "admin.sock")
	if st := state("--admin", owner); st.Status == nil || st.PID != s.cmd.Process.Pid {
		t.Errorf("%+v", st)
	}
	if st := state("--admin", tcpOf(t, beside)); st.Status != nil ||
		!strings.Contains(st.Error, "admin.listen is none") {
		t.Errorf("%+v", st)
	}
	s.signal(syscall.SIGKILL)
	s.exit(patience)
	if st := state("--admin", tcpOf(t, beside)); st.Error != "not there" {
		t.Errorf("%+v", st)
	}

	// A sidecar with a port that is killed leaves its address behind: the next one has none.
	beside.signal(syscall.SIGKILL)
	beside.exit(patience)
	next := serveIn(t, beside.dir, []string{binary}, "--arena-limit=8M", "--arena-kind=memfd",
		"--admin-listen=none")
	if _, err := os.Stat(filepath.Join(next.dir, "admin.addr")); !os.IsNotExist(err) {
		t.Errorf("admin.addr: %v", err)
	}
	next.signal(syscall.SIGTERM)
	if code := next.exit(patience); code != 0 {
		t.Errorf("exit code %d:\n%s", code, next.text())
	}
}

// lookaside ready waits for a sidecar that starts later, and tells one that drains from one that
// lives.
func TestReady(t *testing.T) {
	answers := make(chan int, 8)
	for _, status := range []int{503, 503, 200, 503, 200} {
		answers <- status
	}
	asked := make(chan string, 8)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		status := <-answers
		asked <- r.URL.Path
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		if status == 200 {
			_, _ = w.Write([]byte("ok\n"))
			return
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"error": "it drains", "fix": "wait"})
	}))
	defer srv.Close()
	c := commander{t: t, dir: "/nowhere"}
	c.says([]string{"ready", "--wait=1m", "--admin", srv.URL}, nil, "ok\n")
	c.fails([]string{"ready", "--admin", srv.URL}, "it drains", "503")
	c.says([]string{"ready", "--live", "--admin", srv.URL}, nil, "ok\n")
	want := []string{"/readyz", "/readyz", "/readyz", "/readyz", "/healthz"}
	for _, path := range want {
		if got := <-asked; got != path {
			t.Errorf("asked %s, want %s", got, path)
		}
	}
	c.fails([]string{"ready", "--wait=-1s"}, "--wait")
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ln.Close()
	c.fails([]string{"ready", "--wait=200ms", "--admin", "http://" + ln.Addr().String()},
		"no sidecar answers")
}
