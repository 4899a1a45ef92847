//go:build linux

package dax

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

func TestAttach(t *testing.T) {
	r, err := Create(Options{Kind: KindMemfd, SizeBytes: 1 << 16, NUMANode: NoNUMANode})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	fd, err := unix.Dup(r.FD())
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "region")
	defer f.Close()
	for _, size := range []int64{0, -1, 1<<16 + 1} {
		if _, err := Attach(f, size); err == nil {
			t.Errorf("attached %d bytes of 64 KiB", size)
		}
	}
	a, err := Attach(f, 1<<16)
	if err != nil {
		t.Fatal(err)
	}
	a.Bytes()[5] = 7
	if r.Bytes()[5] != 7 {
		t.Error("what one writes the other does not see")
	}
	for range 2 {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	}
}
