//go:build linux

package dax

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"lookaside/internal/bytesize"
)

// ErrForeign means that a descriptor is not of the memory that it is expected to be of.
var ErrForeign = errors.New("other memory")

// regionSeals are the seals of each region that is a memfd. It may have others: the kernel adds
// F_SEAL_EXEC to one that can never hold a program.
const regionSeals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// PageSize returns the size in bytes of the pages that are requested for a region of the kind.
func (k Kind) PageSize() int64 { return pageSizeOf(k) }

// Identity returns what tells the memory behind a descriptor from other memory, as long as a
// process holds it: the device and inode, the size in bytes, and the seals; 0 if it cannot have
// any.
func Identity(fd int) (dev, inode uint64, size int64, seals int, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0, 0, 0, 0, os.NewSyscallError("fstat", err)
	}
	seals, err = unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if errors.Is(err, unix.EINVAL) { // not a memfd
		seals, err = 0, nil
	}
	if err != nil {
		return 0, 0, 0, 0, os.NewSyscallError("fcntl(F_GET_SEALS)", err)
	}
	return st.Dev, st.Ino, st.Size, seals, nil
}

// Adopt maps a region that another process made, with the pages that it has. The kind is that of
// the region, not KindAuto, and size its size in bytes. numaNode is as in Options, for pages that
// it does not have yet.
//
// A memfd must have the seals of a region, so that no client can make this process fault. For a
// file Adopt takes the lock through fd, which may be read-only, and opens the file again for
// clients; it returns ErrBusy if another process has the lock. Identity and trust are the caller's
// to check.
//
// If Adopt returns no error, the region owns fd. Otherwise the caller still owns it.
func Adopt(fd int, kind Kind, size int64, numaNode int) (r *Region, err error) {
	_, _, has, seals, err := Identity(fd)
	switch {
	case err != nil:
		return nil, err
	case kind == "" || kind == KindAuto:
		return nil, fmt.Errorf("adopt a region: %w: no kind is named", ErrUnsupported)
	case has != size || size <= 0 || size%pageSizeOf(kind) != 0:
		return nil, fmt.Errorf("%w: it has %d bytes, the %s region has %d", ErrForeign, has, kind,
			size)
	case kind != KindFile && seals&regionSeals != regionSeals:
		return nil, fmt.Errorf("%w: it has the seals %#x, a %s region has %#x", ErrForeign, seals,
			kind, regionSeals)
	}
	r = &Region{kind: kind, pageSize: pageSizeOf(kind), fd: -1, lock: -1}
	defer func() {
		if err != nil {
			err = fmt.Errorf("adopt a %s region of %s: %w", kind, bytesize.Format(size), err)
			r.path = "" // not ours to remove
			if kind == KindFile && r.lock == fd {
				_ = unix.Flock(fd, unix.LOCK_UN)
			}
			if r.fd == fd {
				r.fd = -1
			}
			r.lock = -1
			_ = r.Close()
			r = nil
		}
	}()
	if kind == KindFile {
		path, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
		if err != nil {
			return r, err
		}
		if err := lockFile(systemHost, path, fd); err != nil {
			return r, err
		}
		r.lock, r.path = fd, path
		if r.fd, err = unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0); err != nil {
			return r, fmt.Errorf("%s: open: %w", path, err)
		}
		if !sameFile(path, r.fd) {
			return r, fmt.Errorf("%s: %w: another process replaced it just now", path, ErrBusy)
		}
	} else {
		r.fd = fd
	}
	return r, r.mapMemory(size, numaNode)
}

// mapMemory maps a region's file, with the advice of its kind.
func (r *Region) mapMemory(size int64, numaNode int) (err error) {
	if r.mem, err = mapAligned(r.fd, size, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED); err != nil {
		return mapError(err, r.kind, size)
	}
	// An arena has the tenants' data and is as large as memory, so keep it out of core dumps. Best
	// effort; no kernel that we support refuses it.
	_ = unix.Madvise(r.mem, unix.MADV_DONTDUMP)
	switch r.kind {
	case KindTHP:
		err = unix.Madvise(r.mem, unix.MADV_HUGEPAGE)
	case KindMemfd:
		// With shmem_enabled=always the kernel would use huge pages for a region that must have
		// none.
		err = unix.Madvise(r.mem, unix.MADV_NOHUGEPAGE)
		if errors.Is(err, unix.EINVAL) { // a kernel without THP
			err = nil
		}
	}
	if err != nil {
		return fmt.Errorf("madvise: %w", err)
	}
	if numaNode >= 0 {
		return bindNode(r.mem, numaNode)
	}
	return nil
}

// Leave is Close for a region that other processes hold, or that will be adopted by the next
// process: a region's file is not removed.
func (r *Region) Leave() error {
	r.closing.Do(func() { r.closeErr = r.close(false) })
	return r.closeErr
}

// LockFD returns the descriptor by which the next process adopts the region. The region keeps
// ownership. For a file it is the one that has the lock, and must not be passed to clients; for
// memory it is FD.
func (r *Region) LockFD() int {
	if r.lock >= 0 {
		return r.lock
	}
	return r.fd
}

// RemoveStale removes a region's file that no process has locked. A file that is not there is no
// error. It returns ErrBusy if a process has locked it. Processes that map the file keep its bytes.
func RemoveStale(path string) error { return unlinkStale(systemHost, path) }

// Lent reports whether another process reads bytes of the region or device behind fd that were lent
// to it (LockLent), whoever had lent them.
func Lent(fd int) (bool, error) {
	l := unix.Flock_t{Type: unix.F_WRLCK, Start: lentFrom}
	for {
		err := unix.FcntlFlock(uintptr(fd), unix.F_OFD_GETLK, &l)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return false, os.NewSyscallError("fcntl(F_OFD_GETLK)", err)
		}
		return l.Type != unix.F_UNLCK, nil
	}
}

// Memory returns a new file of unnamed memory without seals, of no bytes yet. It is freed when the
// last descriptor and mapping of it are gone.
func Memory(name string) (*os.File, error) {
	fd, err := newMemfd(name, 0, false)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}
