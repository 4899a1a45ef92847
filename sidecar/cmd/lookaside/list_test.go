package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"lookaside/sidecar"
	"lookaside/sidecar/admin"
)

// Every sidecar of the host is found, wherever its directory is; one that is dead is none, and one
// that is stopped is named.
func TestListOfTheHostsSidecars(t *testing.T) {
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	// Directories that have nothing in common; one asks for a token. Names of other tests' sidecars
	// differ.
	serving, stopped, killed := serveProcess(t, "--admin-token-file", token), serveProcess(t),
		serveProcess(t)
	storePages(t, serving, 10)
	killed.signal(syscall.SIGKILL)
	killed.exit(patience)
	list := func(environ []string, args ...string) map[string]admin.HostSidecar {
		t.Helper()
		out, stderr, code := run(t, environ, append([]string{"list", "--json"}, args...)...)
		var all []admin.HostSidecar
		if err := json.Unmarshal([]byte(out), &all); err != nil || code != 0 {
			t.Fatalf("exit code %d, %v: %s%s", code, err, out, stderr)
		}
		if !slices.IsSortedFunc(all,
			func(a, b admin.HostSidecar) int { return strings.Compare(a.Endpoint, b.Endpoint) }) {
			t.Errorf("%+v", all)
		}
		by := make(map[string]admin.HostSidecar)
		for _, s := range all {
			if _, twice := by[s.Endpoint]; twice {
				t.Errorf("%s is there twice", s.Endpoint)
			}
			by[s.Endpoint] = s
		}
		return by
	}
	for end := time.Now().Add(patience); ; {
		s := list(nil)[serving.dir]
		if s.PID == serving.cmd.Process.Pid && s.Version == sidecar.Version && s.Error == "" &&
			s.Arena.UsedBytes > 0 && s.Arena.LimitBytes == 8<<20 &&
			strings.HasPrefix(s.Verdict, "healthy: 1 engine connected") {
			break
		}
		if time.Now().After(end) {
			// a machine that stands still for five seconds makes it not answer
			t.Fatalf("%+v", s)
		}
	}
	stopped.signal(syscall.SIGSTOP)
	defer stopped.signal(syscall.SIGCONT)
	by := list(nil, "--runtime-dir", killed.dir)
	if _, there := by[killed.dir]; there {
		t.Error("a killed one is listed")
	}
	if s := by[stopped.dir]; s.PID != stopped.cmd.Process.Pid ||
		!strings.Contains(s.Error, "no sidecar answers") {
		t.Errorf("%+v", s)
	}
	out, stderr, code := run(t, nil, "list")
	for _, want := range []string{"ENDPOINT", serving.dir, stopped.dir} {
		if code != 0 || !strings.Contains(out, want) {
			t.Errorf("exit code %d, lacks %q: %s%s", code, want, out, stderr)
		}
	}
}

// In a network namespace of its own there is none but those beside its directory.
func TestListWithoutSidecars(t *testing.T) {
	unshare, err := exec.LookPath("unshare")
	if err != nil || os.Getuid() != 0 {
		t.Skip("needs root and unshare")
	}
	s := serveProcess(t)
	alone := func(dir string) string {
		out, err := exec.Command(unshare, "--net", binary, "list", "--runtime-dir",
			dir).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return string(out)
	}
	if got := alone("/nowhere/x"); got != "no sidecar runs on this host\n" {
		t.Errorf("%q", got)
	}
	if got := alone(filepath.Join(filepath.Dir(s.dir), "rank-1")); !strings.Contains(got, s.dir) {
		t.Errorf("%q", got)
	}
}
