package ipc

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Claims say who may still copy in the memory of an earlier run of the sidecar. A claim is an open
// file of the directory's lock file with a read lock (an open file description lock) on the byte
// that is the number of the run's generation. A worker holds its own from the Welcome on, until its
// session has ended, none of its copies goes on, and the next sidecar has welcomed it. The kernel
// ends the claim of a process that dies, and of no other: a process that is stopped keeps it. A
// table of process ids could not do this, because ids are reused and differ between namespaces.
//
// The flock by which a sidecar owns the directory is on the same file. Neither kind of lock affects
// the other.

// claimBytes is how many bytes of the lock file stand for generations.
const claimBytes = 1 << 62

// Claim returns a new claim on a generation, as a descriptor that can be sent to a worker. The
// caller must close it. The claim ends when all copies of the descriptor are closed. It fails for a
// listener of peers and after Close.
func (l *Listener) Claim(generation uint64) (fd int, err error) {
	fd = -1
	err = l.withLock(func(lock int) error {
		own, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", lock),
			unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open again: %w", err)
		}
		lk := unix.Flock_t{Type: unix.F_RDLCK, Start: int64(generation % claimBytes), Len: 1}
		if err := unix.FcntlFlock(uintptr(own), unix.F_OFD_SETLK, &lk); err != nil {
			unix.Close(own)
			return err
		}
		fd = own
		return nil
	})
	if err != nil {
		return -1, fmt.Errorf("runtime.dir %s: claim: %w", l.dir, err)
	}
	return fd, nil
}

// Claims reports whether any process has a claim on another generation than except. With an error
// it is not known, and must be taken for true.
func (l *Listener) Claims(except uint64) (held bool, err error) {
	own := int64(except % claimBytes)
	err = l.withLock(func(lock int) error {
		for _, r := range [...]unix.Flock_t{
			{Start: 0, Len: own}, {Start: own + 1, Len: claimBytes - own - 1},
		} {
			if r.Len == 0 { // it would mean all bytes up to the end
				continue
			}
			r.Type = unix.F_WRLCK
			if err := unix.FcntlFlock(uintptr(lock), unix.F_OFD_GETLK, &r); err != nil {
				return err
			}
			held = held || r.Type != unix.F_UNLCK
		}
		return nil
	})
	if err != nil {
		return true, fmt.Errorf("runtime.dir %s: claims: %w", l.dir, err)
	}
	return held, nil
}

// LockID returns the identity of the lock file. Claims are known only as long as it is the same: a
// directory that was removed and made again has another lock file. Both are 0 for a listener of
// peers and after Close.
func (l *Listener) LockID() (dev, inode uint64) {
	var st unix.Stat_t
	if l.withLock(func(lock int) error { return unix.Fstat(lock, &st) }) != nil {
		return 0, 0
	}
	return uint64(st.Dev), st.Ino
}

// Claimants returns the ids of the processes that have a claim on another generation than except,
// in rising order, to be shown to people. Processes of other users and of other pid namespaces are
// missing. It reads much of /proc, so it takes milliseconds.
func (l *Listener) Claimants(except uint64) []int {
	dev, inode := l.LockID()
	if inode == 0 {
		return nil
	}
	procs, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	var pids []int
	for _, p := range procs {
		pid, err := strconv.Atoi(p.Name())
		if err != nil {
			continue
		}
		if claims(pid, dev, inode, int64(except%claimBytes)) {
			pids = append(pids, pid)
		}
	}
	slices.Sort(pids)
	return pids
}

// claims reports whether a process has a descriptor of the lock file with a claim on another byte
// than except.
func claims(pid int, dev, inode uint64, except int64) bool {
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		return false // another user's, or it has ended
	}
	for _, fd := range fds {
		var st unix.Stat_t
		if unix.Stat(fmt.Sprintf("/proc/%d/fd/%s", pid, fd.Name()), &st) != nil ||
			uint64(st.Dev) != dev || st.Ino != inode {
			continue
		}
		info, err := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%s", pid, fd.Name()))
		if err == nil && claimsOf(string(info), except) {
			return true
		}
	}
	return false
}

// claimsOf reports whether a descriptor's fdinfo has a claim on another byte than except. A lock's
// line ends with its first and its last byte.
func claimsOf(info string, except int64) bool {
	for line := range strings.Lines(info) {
		f := strings.Fields(line)
		if len(f) < 4 || f[0] != "lock:" || f[2] != "OFDLCK" {
			continue
		}
		if at, err := strconv.ParseInt(f[len(f)-1], 10, 64); err == nil && at != except {
			return true
		}
	}
	return false
}

// withLock calls f with the descriptor of the lock file, which stays open meanwhile.
func (l *Listener) withLock(f func(fd int) error) error {
	if l.lock == nil {
		return errors.New("a listener of peers has no lock file")
	}
	raw, err := l.lock.SyscallConn()
	if err != nil {
		return err
	}
	if ctlErr := raw.Control(func(fd uintptr) { err = f(int(fd)) }); ctlErr != nil {
		return ctlErr
	}
	return err
}
