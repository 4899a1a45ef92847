//go:build linux

package dax

import (
	"bufio"
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"lookaside/internal/bytesize"
)

// createFile makes a new, fully allocated file of size bytes at path. It returns a descriptor to
// map and to pass on, and another that holds the lock.
//
// The owner of a file holds flock on it. A lock belongs to an open file, and a client's mapping of
// a received descriptor keeps that open file alive after our death. So the lock has an open file of
// its own, which never leaves this process. A file that is not locked is stale. It is unlinked, not
// truncated, because truncating kills the processes that still map it. After taking a lock,
// createFile checks that path still names the locked file, so two concurrent starts end with one
// owner and one ErrBusy.
func createFile(h host, path string, size int64) (fd, lock int, err error) {
	if path == "" {
		return -1, -1, errors.New("no path given for the backing file")
	}
	if err := unlinkStale(h, path); err != nil {
		return -1, -1, err
	}
	lock, err = unix.Open(path, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC|unix.O_NOFOLLOW,
		0o600)
	if errors.Is(err, unix.EEXIST) {
		return -1, -1, fmt.Errorf("%s: %w: another process made it just now", path, ErrBusy)
	}
	if err != nil {
		return -1, -1, fmt.Errorf("%s: create: %w", path, err)
	}
	fd = -1
	defer func() {
		if err != nil {
			_ = removeIfSame(path, lock)
			_ = unix.Close(lock)
			if fd >= 0 {
				_ = unix.Close(fd)
			}
			fd, lock = -1, -1
		}
	}()
	if err := lockFile(h, path, lock); err != nil {
		return fd, lock, err
	}
	if fd, err = unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0); err != nil {
		return fd, lock, fmt.Errorf("%s: open: %w", path, err)
	}
	if !sameFile(path, lock) || !sameFile(path, fd) {
		return fd, lock, fmt.Errorf("%s: %w: another process replaced it just now", path, ErrBusy)
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return fd, lock, fmt.Errorf("%s: statfs: %w", path, err)
	}
	if fs.Type == unix.HUGETLBFS_MAGIC {
		return fd, lock, fmt.Errorf("%s: %w: a file on hugetlbfs; take kind %q instead", path,
			ErrUnsupported, KindHugetlb)
	}
	if fs.Type == unix.TMPFS_MAGIC { // files on tmpfs are memory
		if err := checkBudget(h, size, KindMemfd, regionReserve); err != nil {
			return fd, lock, fmt.Errorf("%s: on tmpfs: %w", path, err)
		}
	}
	// Check the room first: fallocate on a filesystem with too little takes all there is before it
	// fails, which harms every user of it.
	if free := int64(fs.Bavail) * fs.Bsize; free < size {
		return fd, lock, fmt.Errorf("%s: %w: need %s, free %s", path, ErrNoSpace, bytesize.Format(size),
			bytesize.Format(free))
	}
	return fd, lock, allocate(path, fd, 0, size)
}

// allocate allocates all blocks of a range of the file, so that no store into the mapping can meet
// a full filesystem (which is SIGBUS).
func allocate(path string, fd int, off, size int64) error {
	for {
		err := unix.Fallocate(fd, 0, off, size)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT), errors.Is(err, unix.EFBIG):
			return fmt.Errorf("%s: %w: fallocate of %s: %w", path, ErrNoSpace,
				bytesize.Format(size), err)
		case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOSYS):
			return fmt.Errorf("%s: %w: this filesystem cannot preallocate: %w", path,
				ErrUnsupported, err)
		default:
			return fmt.Errorf("%s: fallocate of %s: %w", path, bytesize.Format(size), err)
		}
	}
}

// unlinkStale removes the file at path if it is a regular file that no process has locked.
func unlinkStale(h host, path string) error {
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil
	case errors.Is(err, unix.ELOOP):
		return fmt.Errorf("%s: a symbolic link; give the path of the file itself", path)
	case err != nil:
		return fmt.Errorf("%s: open: %w", path, err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("%s: stat: %w", path, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return fmt.Errorf("%s: %w: not a regular file", path, ErrUnsupported)
	}
	if err := lockFile(h, path, fd); err != nil {
		return err
	}
	if err := unix.Unlink(path); err != nil {
		return fmt.Errorf("%s: remove the stale file: %w", path, err)
	}
	return nil
}

// lockFile takes the file's lock and makes sure that path still names the file.
func lockFile(h host, path string, fd int) error {
	err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		if pid := flockOwner(h, fd); pid > 0 {
			return fmt.Errorf("%s: %w by process %d", path, ErrBusy, pid)
		}
		return fmt.Errorf("%s: %w by another process", path, ErrBusy)
	}
	if err != nil {
		return fmt.Errorf("%s: flock: %w", path, err)
	}
	if !sameFile(path, fd) {
		return fmt.Errorf("%s: %w: another process replaced it just now", path, ErrBusy)
	}
	return nil
}

// sameFile reports whether path names the open file fd.
func sameFile(path string, fd int) bool {
	var open, named unix.Stat_t
	return unix.Fstat(fd, &open) == nil && unix.Lstat(path, &named) == nil &&
		open.Dev == named.Dev && open.Ino == named.Ino
}

// removeIfSame unlinks path if it names the open file fd, whose lock the caller holds.
func removeIfSame(path string, fd int) error {
	if !sameFile(path, fd) {
		return nil
	}
	return unix.Unlink(path)
}

// flockOwner returns the process that holds a flock on the open file fd, or 0 if unknown: the
// kernel hides processes of other pid namespaces.
func flockOwner(h host, fd int) int {
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil {
		return 0
	}
	locks, err := h.read("proc/locks")
	if err != nil {
		return 0
	}
	want := fmt.Sprintf("%02x:%02x:%d", unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino)
	for lines := bufio.NewScanner(strings.NewReader(locks)); lines.Scan(); {
		// "1: FLOCK  ADVISORY  WRITE 1234 fe:00:131 0 EOF"
		f := strings.Fields(lines.Text())
		if len(f) >= 6 && f[1] == "FLOCK" && f[5] == want {
			var pid int
			if _, err := fmt.Sscan(f[4], &pid); err == nil && pid > 0 {
				return pid
			}
		}
	}
	return 0
}
