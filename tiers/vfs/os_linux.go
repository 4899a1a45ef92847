package vfs

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// OS is the file system of the machine.
var OS FS = osFS{}

type osFS struct{}

func (osFS) OpenFile(name string, flags Flag) (File, error) {
	how := os.O_RDWR
	if flags&ReadOnly != 0 {
		how = os.O_RDONLY
	}
	if flags&Create != 0 {
		how |= os.O_CREATE
		if flags&Exclusive != 0 {
			how |= os.O_EXCL
		}
	}
	if flags&Direct != 0 {
		how |= unix.O_DIRECT
	}
	f, err := openRegular(name, how)
	if err != nil {
		if flags&Direct != 0 && (errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP)) {
			return nil, &fs.PathError{Op: "open", Path: name, Err: ErrNoDirect}
		}
		return nil, err
	}
	of := &osFile{f: f, mem: 1, offset: 1}
	if flags&Direct != 0 {
		if of.mem, of.offset, err = directAlign(f); err != nil {
			f.Close()
			return nil, err
		}
	}
	return of, nil
}

// openRegular opens a regular file. It does not follow a link, which may lead anywhere, and does
// not wait for a pipe's writer.
func openRegular(name string, how int) (*os.File, error) {
	f, err := os.OpenFile(name, how|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOCTTY, 0o600)
	if errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENXIO) {
		return nil, fmt.Errorf("%w: %w", ErrNotRegular, err)
	}
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		if err = error(ErrNotRegular); info.IsDir() {
			err = unix.EISDIR
		}
		err = &fs.PathError{Op: "open", Path: name, Err: err}
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// onFD calls do with f's descriptor, again after each EINTR. It reports a failure as that of op on
// f.
func onFD(f *os.File, op string, do func(fd int) error) error {
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	if err := conn.Control(func(fd uintptr) {
		for failed = do(int(fd)); failed == unix.EINTR; failed = do(int(fd)) {
		}
	}); err != nil {
		return &fs.PathError{Op: op, Path: f.Name(), Err: err}
	}
	if failed != nil {
		return &fs.PathError{Op: op, Path: f.Name(), Err: failed}
	}
	return nil
}

// directAlign returns the alignment for direct I/O on f that the kernel reports (statx, since 6.1).
// If the kernel reports none, it returns the file system's preferred block size, within 4 KiB and
// 64 KiB. 4 KiB is a multiple of the sectors of all devices in use. A larger size of a network file
// system is not an alignment.
func directAlign(f *os.File) (mem, offset int, err error) {
	err = onFD(f, "statx", func(fd int) error {
		var st unix.Statx_t
		if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &st); err != nil {
			return err
		}
		if st.Mask&unix.STATX_DIOALIGN != 0 {
			mem, offset = int(st.Dio_mem_align), int(st.Dio_offset_align)
			if mem == 0 || offset == 0 {
				return ErrNoDirect
			}
			return nil
		}
		mem = min(max(int(st.Blksize), 4096), 64<<10)
		offset = mem
		return nil
	})
	return mem, offset, err
}

func (osFS) MkdirAll(dir string) error {
	// The missing directories, innermost first. Each is made durable in its parent.
	var missing []string
	for at := filepath.Clean(dir); ; at = filepath.Dir(at) {
		info, err := os.Stat(at)
		if err == nil && !info.IsDir() {
			return &fs.PathError{Op: "mkdir", Path: at, Err: unix.ENOTDIR}
		}
		if err == nil {
			break
		}
		if !errors.Is(err, fs.ErrNotExist) || filepath.Dir(at) == at {
			return err
		}
		missing = append(missing, at)
	}
	for _, at := range slices.Backward(missing) {
		if err := os.Mkdir(at, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		if err := OS.SyncDir(filepath.Dir(at)); err != nil {
			return err
		}
	}
	return nil
}

func (osFS) Remove(name string) error { return os.Remove(name) }

func (osFS) Rename(from, to string) error { return os.Rename(from, to) }

func (osFS) ReadDir(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names, nil
}

func (osFS) Stat(name string) (Info, error) {
	var st unix.Stat_t
	if err := retry(func() error { return unix.Stat(name, &st) }); err != nil {
		return Info{}, &fs.PathError{Op: "stat", Path: name, Err: err}
	}
	return Info{Dir: st.Mode&unix.S_IFMT == unix.S_IFDIR, Size: st.Size, Allocated: st.Blocks * 512,
		ID: FileID{st.Dev, st.Ino}}, nil
}

func retry(do func() error) error {
	for {
		if err := do(); err != unix.EINTR {
			return err
		}
	}
}

func (osFS) SyncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

func (osFS) Lock(name string) (io.Closer, error) {
	// No O_TRUNC: until we hold the lock, the text belongs to its owner.
	f, err := openRegular(name, os.O_RDWR|os.O_CREATE)
	if err != nil {
		return nil, err
	}
	if err := onFD(f, "flock",
		func(fd int) error { return unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) }); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			err = &LockedError{Name: name, PID: lockOwner(f)}
		}
		f.Close()
		return nil, err
	}
	err = f.Truncate(0)
	if err == nil {
		_, err = f.WriteAt(fmt.Appendf(nil, "%d\n", os.Getpid()), 0)
	}
	if err != nil && !IsNoSpace(err) {
		// on a full disk the lock holds too, but does not name its owner
		f.Close()
		return nil, err
	}
	return f, nil
}

// lockOwner returns the process id in a lock file, or 0.
func lockOwner(f *os.File) int {
	text := make([]byte, 32)
	n, _ := f.ReadAt(text, 0)
	pid, err := strconv.Atoi(strings.TrimSpace(string(text[:n])))
	if err != nil || pid < 0 {
		return 0
	}
	return pid
}

func (osFS) FreeSpace(dir string) (int64, error) {
	var st unix.Statfs_t
	if err := retry(func() error { return unix.Statfs(dir, &st) }); err != nil {
		return 0, &fs.PathError{Op: "statfs", Path: dir, Err: err}
	}
	return int64(st.Bavail) * st.Frsize, nil
}

type osFile struct {
	f           *os.File
	mem, offset int
}

func (f *osFile) ReadAt(p []byte, off int64) (int, error) { return f.f.ReadAt(p, off) }

func (f *osFile) WriteAt(p []byte, off int64) (int, error) { return f.f.WriteAt(p, off) }

func (f *osFile) Close() error { return f.f.Close() }

func (f *osFile) DirectAlign() (mem, offset int) { return f.mem, f.offset }

func (f *osFile) Truncate(size int64) error { return f.f.Truncate(size) }

func (f *osFile) Size() (int64, error) {
	info, err := f.f.Stat()
	if err != nil {
		return 0, err
	}
	return info.Size(), nil
}

func (f *osFile) Datasync() error { return onFD(f.f, "fdatasync", unix.Fdatasync) }

func (f *osFile) Advise(off, n int64, a Advice) error {
	advice := [...]int{DontNeed: unix.FADV_DONTNEED, Random: unix.FADV_RANDOM,
		Sequential: unix.FADV_SEQUENTIAL}[a]
	return onFD(f.f, "fadvise", func(fd int) error { return unix.Fadvise(fd, off, n, advice) })
}

func (f *osFile) Allocate(off, n int64) error {
	err := onFD(f.f, "fallocate", func(fd int) error { return unix.Fallocate(fd, 0, off, n) })
	if errors.Is(err, unix.EOPNOTSUPP) {
		return f.allocateByWriting(off, n)
	}
	return err
}

// allocateByWriting is Allocate for a file system without fallocate, as posix_fallocate does it. It
// writes zeros beyond the file's end, and before it rewrites a byte of each block. It uses a
// descriptor of its own, which may write unaligned.
func (f *osFile) allocateByWriting(off, n int64) error {
	g, err := os.OpenFile(f.f.Name(), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer g.Close()
	size, err := f.Size()
	if err != nil {
		return err
	}
	const block = 4096
	var one [1]byte
	for at := off; at < min(off+n, size); at += block - at%block {
		if _, err := g.ReadAt(one[:], at); err != nil {
			return err
		}
		if _, err := g.WriteAt(one[:], at); err != nil {
			return err
		}
	}
	zeros := make([]byte, 1<<20)
	for at := max(off, size); at < off+n; {
		m, err := g.WriteAt(zeros[:min(int64(len(zeros)), off+n-at)], at)
		if err != nil {
			return err
		}
		at += int64(m)
	}
	// If off is beyond the end, the hole before it reads as zero, as it should.
	return g.Sync()
}
