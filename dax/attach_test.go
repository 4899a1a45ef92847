//go:build linux

package dax

import (
	"errors"
	"math"
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

func TestAttach(t *testing.T) {
	r, err := Create(t.Context(), Options{Kind: KindMemfd, SizeBytes: 1 << 16,
		NUMANode: NoNUMANode})
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
		if _, err := Attach(f, 0, size, 0); err == nil {
			t.Errorf("attached %d bytes of 64 KiB", size)
		}
	}
	a, err := Attach(f, 0, 1<<16, 0)
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

	ro, err := AttachReadOnly(fd, 0, 1<<16, 0)
	if err != nil {
		t.Fatal(err)
	}
	if ro.Bytes()[5] != 7 {
		t.Error("what one writes a reader does not see")
	}
	if err := Guard(func() { ro.Bytes()[5] = 8 }, ro.Bytes()); !errors.Is(err, ErrFault) ||
		r.Bytes()[5] != 7 {
		t.Errorf("a reader writes: %v", err)
	}
	if err := ro.Close(); err != nil {
		t.Error(err)
	}
}

// A part of a descriptor's bytes is mapped where its pages want it, and nothing that does not fit
// them.
func TestAttachAtAnOffset(t *testing.T) {
	path := filepath.Join(t.TempDir(), "device")
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(8 << 20); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ offset, size, page int64 }{
		{-4096, 4096, 4096},
		{4096, 4096, 2 << 20},
		{6 << 20, 2<<20 + 4096, 2 << 20},
		{8 << 20, 4096, 4096},
		{math.MaxInt64 - 4095, 4096, 4096},
		{0, 4096, -4096},
		{0, 4096, 3 * 4096},
	} {
		if a, err := Attach(f, c.offset, c.size, c.page); err == nil {
			t.Errorf("attached %+v of 8 MiB", c)
			_ = a.Close()
		}
	}
	for _, page := range []int64{4096, 2 << 20, 4 << 20} {
		a, err := Attach(f, 4<<20, 2<<20, page)
		if err != nil {
			t.Fatal(err)
		}
		if at := uintptr(unsafe.Pointer(unsafe.SliceData(a.Bytes()))); at%uintptr(page) != 0 {
			t.Errorf("at %#x, not a multiple of %d", at, page)
		}
		a.Bytes()[5] = byte(page >> 12)
		b := make([]byte, 1)
		if _, err := f.ReadAt(b, 4<<20+5); err != nil || b[0] != byte(page>>12) {
			t.Errorf("the byte at the offset is %d, %v", b[0], err)
		}
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	}
}

// What a character device's fstat tells is no size: /dev/zero maps as one does.
func TestAttachDevice(t *testing.T) {
	f, err := os.OpenFile("/dev/zero", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	a, err := Attach(f, 0, 1<<20, 2<<20)
	if err != nil {
		t.Fatal(err)
	}
	a.Bytes()[1<<20-1] = 1
	if err := a.Close(); err != nil {
		t.Error(err)
	}
}
