//go:build linux

package dax

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// Lent bytes of a device. Other processes may read a partition with its owner's permission. When
// the owner dies they may read on for a while, and the next owner must not write the partition
// during that time. So each reader holds a read lock on the lender bytes of the range that it
// reads. Byte lentFrom + i stands for the device's byte i. These bytes are far outside the data,
// where the owner's lock does not reach. OpenDevice waits until they are free.
const lentFrom = 1 << 61

// lentPatience is how long OpenDevice waits for readers that the previous owner had lent to.
const lentPatience = 3 * time.Second

// LentError means that a partition cannot be opened yet: another process still reads what the
// previous owner had lent. It wraps [ErrBusy].
type LentError struct {
	Path                   string
	OffsetBytes, SizeBytes int64 // of the partition
}

func (e *LentError) Error() string {
	return fmt.Sprintf("%s: %v: another process still reads what the last owner of bytes %d to %d had lent it", e.Path, ErrBusy, e.OffsetBytes, e.OffsetBytes+e.SizeBytes-1)
}

func (e *LentError) Unwrap() error { return ErrBusy }

// LentLock keeps bytes of a device from the next owner of their partition. It ends when it is
// closed or when this process ends.
type LentLock struct{ fd int }

// LockLent locks n bytes from off on of the device behind fd, for a process that will read them
// with their owner's permission. Take the lock first, then request the permission. fd may be
// read-only; the caller keeps ownership. It returns ErrBusy if the partition is being opened.
func LockLent(fd int, off, n int64) (*LentLock, error) {
	if off < 0 || n <= 0 || off > lentFrom-n {
		return nil, fmt.Errorf("lock %d bytes from %d on: out of range", n, off)
	}
	// An open file of its own, because other processes have copies of fd.
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

// Close ends the lock. It is idempotent. Only one goroutine at a time may call it.
func (l *LentLock) Close() error {
	if l.fd < 0 {
		return nil
	}
	fd := l.fd
	l.fd = -1
	return unix.Close(fd)
}

// IsMemory reports whether a descriptor is of unnamed memory that only processes with a copy of the
// descriptor can reach: a memfd.
func IsMemory(fd int) bool {
	_, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	var st unix.Stat_t
	return err == nil && unix.Fstat(fd, &st) == nil && st.Nlink == 0
}

// ReadOnly opens the file behind a descriptor again, for reading only, if that is possible. The
// caller must close the result.
func ReadOnly(fd int) (int, error) {
	return unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd),
		unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
}

// awaitLent waits until no process reads lent bytes of a range of the device. This process has
// locked the range, so no new loan begins.
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
