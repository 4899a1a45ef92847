package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"lookaside/sidecar"
)

// ended waits until no process has that id.
func ended(t *testing.T, pid int) {
	t.Helper()
	for deadline := time.Now().Add(patience); syscall.Kill(pid, 0) == nil; time.Sleep(
		10 * time.Millisecond) {
		if b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); strings.Contains(string(b),
			") Z ") {
			return // who adopts orphans here does not wait for them
		}
		if time.Now().After(deadline) {
			t.Fatalf("process %d lives", pid)
		}
	}
}

func TestDetach(t *testing.T) {
	parent, err := os.MkdirTemp("", "la")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(parent)
	dir := filepath.Join(parent, "rank-0")
	serve := func(args ...string) (string, string, int) {
		return run(t, nil, append([]string{"serve", "--detach", "--runtime-dir", dir,
			"--arena-kind", "memfd", "--arena-limit"}, args...)...)
	}

	for _, c := range []struct {
		args string
		code int
		why  string
	}{
		{"8X", 78, "unknown unit"},
		{"8M --arena-size 5", 78, "unknown flag"},
		{"1024T", 78, "even with all of it free"},
		// a file in its way: waiting would not mend it
		{"8M --disk /etc/passwd/kv:8M", 1, "disk tier"},
	} {
		out, errs, code := serve(strings.Fields(c.args)...)
		if out != "" || code != c.code || !strings.Contains(errs, c.why) ||
			strings.Count(errs, "\n") != 1 {
			t.Errorf("%s: %d, %q, %q", c.args, code, out, errs)
		}
	}

	out, errs, code := serve("8M", "--detach=true")
	var pid int
	if n, _ := fmt.Sscanf(out, "lookaside: serving on "+dir+", pid %d, log "+filepath.Join(dir,
		sidecar.LogName)+"\n", &pid); n != 1 || code != 0 || errs != "" {
		t.Fatalf("%d, %q, %q", code, out, errs)
	}
	defer syscall.Kill(pid, syscall.SIGKILL)
	if sid, _, errno := syscall.Syscall(syscall.SYS_GETSID, uintptr(pid), 0, 0); errno != 0 ||
		int(sid) != pid {
		t.Errorf("its session is %d: %v", sid, errno)
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	if ppid, _ := strconv.Atoi(
		strings.Fields(string(b[strings.LastIndex(string(b), ")")+1:]))[1]); ppid == os.Getpid() {
		t.Error("it is a child of ours")
	}
	if out, errs, code := run(t, nil, "status", "--runtime-dir", dir); code != 0 {
		t.Errorf("status: %q, %q", out, errs)
	}
	if _, errs, code := serve("8M"); code != 75 || !strings.Contains(errs, strconv.Itoa(pid)) {
		t.Errorf("a second one: %d, %q", code, errs)
	}
	if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	ended(t, pid)
	log, err := os.ReadFile(filepath.Join(dir, sidecar.LogName))
	if err != nil {
		t.Fatal(err)
	}
	for _, words := range []string{"\tserving\t", "\tclosed\n", "lookaside: disk tier",
		"is owned by another sidecar"} {
		if !strings.Contains(string(log), words) {
			t.Errorf("the log has no %q:\n%s", words, log)
		}
	}
}
