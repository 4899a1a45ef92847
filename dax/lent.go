//go:build linux

package dax

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// What is lent of a device. Other processes may read a partition by leave of its owner. When that
// dies they may read on for a while, and who opens the partition next must not write it meanwhile.
// So whoever reads what was lent holds a lock for reading on the lender bytes of what it sees: byte
// lentFrom + i stands for the device's byte i, far outside its data, where the owner's lock does
// not reach. OpenDevice waits for these to be free.
const lentFrom = 1 << 61

// lentPatience is how long OpenDevice waits for those who read what the owner before had lent them.
const lentPatience = 3 * time.Second

// LentError says that a partition cannot be opened yet: another process reads what the owner before
// had lent it. It wraps [ErrBusy].
type LentError struct {
	Path                   string
	OffsetBytes, SizeBytes int64 // of the partition
}

func (e *LentError) Error() string {
	return fmt.Sprintf("%s: %v: another process still reads what the last owner of bytes %d to %d had lent it", e.Path, ErrBusy, e.OffsetBytes, e.OffsetBytes+e.SizeBytes-1)
}

func (e *LentError) Unwrap() error { return ErrBusy }

// LentLock keeps bytes of a device from the next owner of their partition, until it is closed or
// this process ends.
type LentLock struct{ fd int }

// LockLent takes the lock on n bytes from off on of what fd is open on, for somebody who is about
// to read them by leave of their owner: take it first, and then ask for leave. fd may be read-only,
// and stays the caller's. ErrBusy: somebody is just opening the partition.
func LockLent(fd int, off, n int64) (*LentLock, error) {
	if off < 0 || n <= 0 || off > lentFrom-n {
		return nil, fmt.Errorf("lock %d bytes from %d on: out of range", n, off)
	}
	// An open file of its own: others have copies of fd.
	own, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd),
		unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, fmt.Errorf("open again: %w", err)
	}
	l := unix.Flock_t{Type: unix.F_RDLCK, Start: lentFrom + off, Len: n}
	if err := unix.FcntlFlock(uintptr(own), unix.F_OFD_SETLK, &l); err != nil {
		unix.Close(own)
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
			err = ErrBusy
		}
		return nil, fmt.Errorf("lock what is lent: %w", err)
	}
	return &LentLock{fd: own}, nil
}

// Close ends the lock. It is idempotent, and may be called by one goroutine at a time.
func (l *LentLock) Close() error {
	if l.fd < 0 {
		return nil
	}
	fd := l.fd
	l.fd = -1
	return unix.Close(fd)
}

// IsMemory says whether a descriptor is of memory that has no name, and that nobody but those who
// were given it can ever have: a memfd.
func IsMemory(fd int) bool {
	_, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	var st unix.Stat_t
	return err == nil && unix.Fstat(fd, &st) == nil && st.Nlink == 0
}

// ReadOnly opens what a descriptor is open on anew, for reading only, where that can be had; it is
// to be closed by the caller.
func ReadOnly(fd int) (int, error) {
	return unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd),
		unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
}

// awaitLent waits until nobody reads what was lent of some bytes of the device. These are locked
// for us: nobody lends them meanwhile.
func (d *Device) awaitLent(off, n int64) error {
	if off > lentFrom-n {
		return fmt.Errorf("%s: %w: a partition beyond byte %d", d.path, ErrDevice, int64(lentFrom))
	}
	for start := time.Now(); ; time.Sleep(5 * time.Millisecond) {
		l := unix.Flock_t{Type: unix.F_WRLCK, Start: lentFrom + off, Len: n}
		err := unix.FcntlFlock(uintptr(d.lock), unix.F_OFD_SETLK, &l)
		switch {
		case err == nil:
			return d.unlockRange(lentFrom+off, n)
		case errors.Is(err, unix.EINTR):
		case !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EACCES):
			return fmt.Errorf("%s: lock: %w", d.path, err)
		case time.Since(start) > lentPatience:
			return &LentError{Path: d.path, OffsetBytes: off, SizeBytes: n}
		}
	}
}
