//go:build linux

package dax

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// Fault 15: the file behind a mapping is truncated.
func TestGuardTruncated(t *testing.T) {
	path := filepath.Join(t.TempDir(), "region")
	r, err := Create(t.Context(), fileOptions(path))
	if err != nil {
		t.Fatal(err)
	}
	mustClose(t, r)
	mem := r.Bytes()
	for i := range mem {
		mem[i] = 5
	}
	if err := os.Truncate(path, 8192); err != nil {
		t.Fatal(err)
	}
	var fault *FaultError
	var sum int
	err = Guard(func() {
		for _, b := range mem {
			sum += int(b)
		}
	}, make([]byte, 10), mem)
	if !errors.As(err, &fault) || !errors.Is(err, ErrFault) || fault.Slice != 1 ||
		fault.Offset != 8192 || sum != 5*8192 {
		t.Errorf("load: %v after a sum of %d", err, sum)
	}
	if err := Guard(func() { mem[9000] = 1 }, mem); !errors.As(err, &fault) ||
		fault.Offset != 9000 {
		t.Errorf("store: %v", err)
	}
	if err := Guard(func() { copy(make([]byte, len(mem)), mem) }, mem); !errors.Is(err, ErrFault) {
		t.Errorf("copy: %v", err)
	}
	if err := Guard(func() { mem[0] = 1 }, mem); err != nil {
		t.Errorf("what is left of it: %v", err)
	}
	if err := populateWrite(mem[8192:]); !errors.Is(err, ErrNoMemory) {
		t.Errorf("populate: %v", err)
	}
	if err := touch(mem[8192:]); !errors.Is(err, ErrNoMemory) || !errors.Is(err, ErrFault) {
		t.Errorf("touch: %v", err)
	}
	// A system call says so by itself.
	null, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	if _, err := unix.Write(int(null.Fd()), mem[8192:9000]); !errors.Is(err, unix.EFAULT) {
		t.Errorf("write(2): %v, want EFAULT", err)
	}
}

// Whatever is not a fault in the memory that was named is a bug, and goes on.
func TestGuardLetsBugsThrough(t *testing.T) {
	mem, err := mapAligned(-1, 8192, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unmap(mem); err != nil {
			t.Error(err)
		}
	}()
	var null *int
	for name, fn := range map[string]func(){
		"panic":           func() { panic("mine") },
		"nil pointer":     func() { *null = 1 },
		"index":           func() { _ = make([]int, 1)[len(mem)] },
		"unnamed mapping": func() { mem[5000] = 1 },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: swallowed", name)
				}
			}()
			t.Errorf("%s: returned %v", name, Guard(fn, mem[:4096]))
		}()
	}
	if err := Guard(func() { mem[5000] = 1 }, mem); !errors.Is(err, ErrFault) {
		t.Errorf("the same mapping, named: %v", err)
	}
	if err := Guard(func() {}); err != nil {
		t.Error(err)
	}
}

func BenchmarkGuard(b *testing.B) {
	mem := make([]byte, 64)
	b.ReportAllocs()
	for b.Loop() {
		if err := Guard(func() { mem[0]++ }, mem); err != nil {
			b.Fatal(err)
		}
	}
}
