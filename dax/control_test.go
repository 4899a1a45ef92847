//go:build linux

package dax

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

func TestControl(t *testing.T) {
	c, err := NewControl(0x0123456789abcdef)
	if err != nil {
		t.Fatal(err)
	}
	mustClose(t, c)
	mem, err := unix.Mmap(c.FD(), 0, ControlSize, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatalf("a client maps it to read: %v", err)
	}
	defer func() { _ = unix.Munmap(mem) }()
	check := func(state State, regions, capacity, used uint64) {
		t.Helper()
		u32, u64 := binary.LittleEndian.Uint32, binary.LittleEndian.Uint64
		if string(mem[:8]) != "LOOKASID" || u32(mem[8:]) != 1 || u32(mem[12:]) != uint32(state) ||
			u64(mem[16:]) != 0x0123456789abcdef || u64(mem[24:]) != regions ||
			u64(mem[32:]) != capacity || u64(mem[40:]) != used {
			t.Errorf("control region: %x", mem[:48])
		}
	}
	check(StateServing, 0, 0, 0)
	c.SetRegions(3)
	c.SetUsage(1<<40, 1<<39+1)
	c.SetState(StateDraining)
	check(StateDraining, 3, 1<<40, 1<<39+1)

	// Fault 11: no way to write it, from the descriptor or by opening it anew.
	reopened, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", c.FD()), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer reopened.Close()
	for _, fd := range []int{c.FD(), int(reopened.Fd())} {
		if m, err := unix.Mmap(fd, 0, ControlSize, unix.PROT_READ|unix.PROT_WRITE,
			unix.MAP_SHARED); err == nil {
			_ = unix.Munmap(m)
			t.Error("mapped to write")
		} else if !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.EACCES) {
			t.Errorf("mapping to write: %v", err)
		}
		if _, err := unix.Pwrite(fd, []byte{1}, 0); !errors.Is(err, unix.EPERM) {
			t.Errorf("write(2): %v, want EPERM", err)
		}
		if err := unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0,
			ControlSize); !errors.Is(err, unix.EPERM) {
			t.Errorf("punch: %v, want EPERM", err)
		}
		for _, size := range []int64{0, 2 * ControlSize} {
			if err := unix.Ftruncate(fd, size); !errors.Is(err, unix.EPERM) {
				t.Errorf("ftruncate to %d: %v, want EPERM", size, err)
			}
		}
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_WRITE); !errors.Is(
			err, unix.EPERM) {
			t.Errorf("adding a seal: %v, want EPERM", err)
		}
	}
	if err := unix.Mprotect(mem, unix.PROT_READ|unix.PROT_WRITE); err == nil {
		t.Error("a read-only mapping became writable")
	}

	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	check(StateClosed, 3, 1<<40, 1<<39+1)
	c.SetState(StateServing)
	c.SetRegions(9)
	c.SetUsage(9, 9)
	check(StateClosed, 3, 1<<40, 1<<39+1)
	if c.FD() != -1 {
		t.Error("a descriptor after Close")
	}
}

func TestControlConcurrent(t *testing.T) {
	c, err := NewControl(1)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i := range uint64(4) {
		wg.Go(func() {
			for range 1000 {
				c.SetRegions(i)
				c.SetUsage(i, i)
				c.SetState(StateDraining)
			}
		})
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	wg.Wait()
}
