//go:build linux

package dax

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func mustLockLent(t *testing.T, fd int, off, n int64) *LentLock {
	t.Helper()
	l, err := LockLent(fd, off, n)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// Who opens a partition waits for those who still read what its last owner had lent them, and for
// no others.
func TestOpenWaitsForWhatIsLent(t *testing.T) {
	o := DeviceOptions{Path: filepath.Join(t.TempDir(), "dev"), SizeBytes: 4 * mib, AllowFile: true}
	whole := mustOpenDevice(t, o)
	ro, err := ReadOnly(whole.FD())
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(ro)
	if _, err := unix.Mmap(ro, 0, mib, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); !errors.Is(
		err, unix.EACCES) {
		t.Fatalf("mapped for writing: %v", err)
	}
	lent := mustLockLent(t, ro, mib, 4096)
	again := mustLockLent(t, ro, mib, 4096) // others may read, too
	if err := whole.Close(); err != nil {
		t.Fatal(err)
	}

	// What is beside it is nobody's business.
	for _, part := range []DeviceOptions{{OffsetBytes: 0, SizeBytes: mib},
		{OffsetBytes: 2 * mib, SizeBytes: mib}} {
		part.Path, part.AllowFile = o.Path, true
		if err := mustOpenDevice(t, part).Close(); err != nil {
			t.Fatal(err)
		}
	}
	d, err := OpenDevice(o)
	var busy *LentError
	if !errors.As(err, &busy) || !errors.Is(err, ErrBusy) || busy.SizeBytes != 4*mib {
		t.Fatalf("opened %v, %v", d, err)
	}
	small := mustOpenDevice(t, DeviceOptions{Path: o.Path, SizeBytes: mib, AllowFile: true})
	if err := small.Resize(2 * mib); !errors.As(err, &busy) || small.Size() != mib {
		t.Fatalf("grown to %d, %v", small.Size(), err)
	}

	// It opens as soon as the last of them has gone.
	opened := make(chan error, 1)
	go func() {
		err := small.Close()
		if err == nil {
			d, err = OpenDevice(o)
		}
		opened <- err
	}()
	if err := lent.Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-opened:
		t.Fatalf("opened beside one that reads: %v", err)
	case <-time.After(50 * time.Millisecond): // may pass wrongly, not fail wrongly
	}
	if err := errors.Join(again.Close(), again.Close(), <-opened); err != nil {
		t.Fatal(err)
	}
	// The owner keeps nobody from reading what it lends.
	mustLockLent(t, d.FD(), 0, 4*mib)
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestLentLockIsDeadWithItsProcess(t *testing.T) {
	path := filepath.Join(t.TempDir(), "dev")
	o := DeviceOptions{Path: path, SizeBytes: mib, AllowFile: true}
	d := mustOpenDevice(t, o)
	lent := mustLockLent(t, d.FD(), 0, mib)
	// A copy of the descriptor, as another process may have it, does not keep the lock.
	dup, err := unix.FcntlInt(uintptr(d.FD()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(dup)
	if err := errors.Join(lent.Close(), d.Close()); err != nil {
		t.Fatal(err)
	}
	mustOpenDevice(t, o)
	for _, r := range [][2]int64{{-1, 1}, {0, 0}, {lentFrom, 1}, {1, lentFrom}} {
		if l, err := LockLent(dup, r[0], r[1]); err == nil {
			l.Close()
			t.Errorf("locked %d", r)
		}
	}
}

func TestIsMemory(t *testing.T) {
	r, err := Create(t.Context(), Options{Kind: KindMemfd, SizeBytes: 4096})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	shm, err := os.CreateTemp("/dev/shm", "lookaside-test-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.Remove(shm.Name())
	defer shm.Close()
	if !IsMemory(r.FD()) || IsMemory(int(f.Fd())) || IsMemory(int(shm.Fd())) || IsMemory(-1) {
		t.Error("what is memory, and what is not")
	}
	ro, err := ReadOnly(r.FD())
	if err != nil || !IsMemory(ro) {
		t.Fatalf("a read-only descriptor of it: %v", err)
	}
	unix.Close(ro)
}
