package main

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"lookaside/ipc/client"
	"lookaside/ipc/wire"
)

// memoryGroup makes a control group with a limit, and returns the command that runs another in it.
func memoryGroup(t *testing.T, limit int64) (dir string, command []string) {
	t.Helper()
	dir, name := "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
	if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
		dir, name = "/sys/fs/cgroup", "memory.max"
	}
	dir = filepath.Join(dir, fmt.Sprintf("lookaside-test-%d-%d", os.Getpid(), limit))
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Skipf("SKIPPED: no memory control group can be made here, which takes root: %v", err)
	}
	t.Cleanup(func() {
		for end := time.Now().Add(patience); os.Remove(dir) != nil; time.Sleep(
			10 * time.Millisecond) {
			if time.Now().After(end) {
				t.Error("the control group is not empty")
				return
			}
		}
	})
	if err := os.WriteFile(filepath.Join(dir, name), []byte(strconv.FormatInt(limit, 10)),
		0); err != nil {
		t.Skipf("SKIPPED: no memory limit can be set here: %v", err)
	}
	return dir, []string{"/bin/sh", "-c", `echo $$ >"$0/cgroup.procs" && exec "$@"`, dir, binary}
}

// usage is what the group has come to at most, or 0 where that is not counted.
func usage(dir string) (most int64) {
	for _, name := range []string{"memory.max_usage_in_bytes", "memory.peak"} {
		if b, err := os.ReadFile(filepath.Join(dir, name)); err == nil {
			most, _ = strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
		}
	}
	return most
}

// An arena that the control group has no room for is refused with the numbers: filling it would get
// the sidecar killed.
func TestArenaAboveTheGroupsLimit(t *testing.T) {
	const limit = 180 << 20
	dir, command := memoryGroup(t, limit)
	for arena, want := range map[string][]string{
		"170M": {"arena.limit 170MiB", "not enough memory", dir, "180MiB", "sessions.limit 64",
			"64MiB for the sidecar itself"},
		"128M": {"arena.limit 128MiB", "not enough memory"},
		"16G":  {"not enough memory"},
	} {
		out, code := runBy(t, command, "serve", "--runtime-dir", filepath.Join(t.TempDir(), "r"),
			"--arena-kind", "memfd", "--demand-memory", "0", "--arena-limit", arena)
		if code < 1 || code == 137 {
			t.Errorf("%s: exit code %d", arena, code)
		}
		for _, w := range want {
			if !strings.Contains(out, w) {
				t.Errorf("%s: %q is not in:\n%s", arena, w, out)
			}
		}
		if arena != "128M" {
			continue
		}
		// 116 MiB, less what the group's files have in the page cache.
		left := regexp.MustCompile(`\((\d+) bytes\) can be taken`).FindStringSubmatch(out)
		if left == nil {
			t.Errorf("it is not said what can be taken:\n%s", out)
		} else if n, _ := strconv.Atoi(left[1]); n > 116<<20 || n < 90<<20 {
			t.Errorf("%d bytes can be taken:\n%s", n, out)
		}
	}
	// What the message says is left, is.
	s := serveBy(t, command, "--arena-kind", "memfd", "--demand-memory", "0",
		"--arena-limit", "90M")
	s.signal(syscall.SIGTERM)
	if code := s.exit(patience); code != 0 {
		t.Fatalf("exit code %d:\n%s", code, s.text())
	}
}

// Clients that come and go quickly, and those that read nothing, do not take more than the group
// has room for.
func TestReconnectsBelowAMemoryLimit(t *testing.T) {
	dir, command := memoryGroup(t, 200<<20)
	s := serveBy(t, command, "--arena-kind", "memfd", "--demand-memory", "0",
		"--arena-limit", "128M")
	connect := func() (*client.Session, error) {
		return client.Dial(s.dir, hello(wire.RoleWorker),
			patience)
	}
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			for range 250 {
				c, err := connect()
				var refused *client.Refused
				if err == nil {
					c.Close()
				} else if !errors.As(err, &refused) {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	t.Logf("%d MiB at most after 750 sessions", usage(dir)>>20)
	var held []*client.Session
	for range 200 {
		c, err := connect()
		if err != nil {
			continue // there are as many as may be
		}
		held = append(held, c)
		_ = c.Conn().SetWriteDeadline(time.Now().Add(patience))
		for i := range 400 {
			if c.Send(&wire.Ping{ID: uint32(i)}) != nil {
				break // given up
			}
		}
		_ = c.Conn().CloseWrite()
	}
	t.Logf("%d MiB at most with %d clients that read nothing", usage(dir)>>20, len(held))
	if len(held) < 10 || len(held) > 64 {
		t.Errorf("%d clients that read nothing have a session", len(held))
	}
	for _, c := range held {
		c.Close()
	}
	addr, err := os.ReadFile(filepath.Join(s.dir, "admin.addr"))
	if err != nil {
		t.Fatalf("%v\n%s", err, s.text())
	}
	resp, err := http.Get("http://" + strings.TrimSpace(string(addr)) + "/healthz")
	if err != nil {
		t.Fatalf("%v\n%s", err, s.text())
	}
	resp.Body.Close()
	// All are gone: there is room again.
	for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		c, err := connect()
		if err == nil {
			c.Close()
			break
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
	}
}
