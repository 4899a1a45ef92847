//go:build linux

package leak

import (
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) { Main(m) }

// expect looks for one thing left that says all of words, ends it, and looks
// again.
func expect(t *testing.T, before Snapshot, end func(), words ...string) {
	t.Helper()
	left := Wait(before, 0)
	if len(left) != 1 {
		t.Errorf("%d left, want 1: %q", len(left), left)
	}
	var out strings.Builder
	Report(&out, left)
	for _, w := range words {
		if !strings.Contains(out.String(), w) {
			t.Errorf("the report does not say %q:\n%s", w, out.String())
		}
	}
	end()
	if left := Wait(before, patience); len(left) != 0 {
		t.Errorf("still left: %q", left)
	}
}

func TestNothing(t *testing.T) {
	before := Take()
	ln, err := net.Listen("unix", t.TempDir()+"/s")
	if err != nil {
		t.Fatal(err)
	}
	if err := ln.Close(); err != nil {
		t.Fatal(err)
	}
	if left := Wait(before, time.Second); len(left) != 0 {
		t.Errorf("%q", left)
	}
}

func TestDescriptor(t *testing.T) {
	before := Take()
	name := t.TempDir() + "/forgotten"
	f, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	expect(t, before, func() { f.Close() }, "descriptor", "/forgotten")

	before = Take()
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	expect(t, before, func() { unix.Close(fd) }, "descriptor", "eventfd")
}

func TestMapping(t *testing.T) {
	before := Take()
	fd, err := unix.MemfdCreate("lookaside-test", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Ftruncate(fd, 4096); err != nil {
		t.Fatal(err)
	}
	mem, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Close(fd); err != nil {
		t.Fatal(err)
	}
	expect(t, before, func() { _ = unix.Munmap(mem) }, "mapping", "memfd:lookaside-test")
}

func TestGoroutine(t *testing.T) {
	before := Take()
	started, quit := make(chan struct{}), make(chan struct{})
	go forgotten(started, quit)
	<-started
	expect(t, before, func() { close(quit) }, "goroutine", "leak.forgotten", "leak_test.go")
}

func forgotten(started, quit chan struct{}) {
	close(started)
	<-quit
}

// What goes away by itself in time is no leak.
func TestPatience(t *testing.T) {
	before := Take()
	go time.Sleep(50 * time.Millisecond)
	if left := Wait(before, patience); len(left) != 0 {
		t.Errorf("%q", left)
	}
}
