package directory

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"lookaside/dax"
)

// file is the directory's file. All writes go through it.
type file struct {
	f *os.File
	// wrote is called after each write, and in the middle of each that may be torn; for tests.
	wrote func()
	// faulty is called when mapped bytes are not there: somebody has cut the file short.
	faulty func(error)
}

// write writes bytes behind which the file's pages need not exist yet.
func (f *file) write(b []byte, offset int64) error {
	if f.wrote != nil {
		half := len(b) / 2
		if _, err := f.f.WriteAt(b[:half], offset); err != nil {
			return err
		}
		f.wrote()
		b, offset = b[half:], offset+int64(half)
	}
	_, err := f.f.WriteAt(b, offset)
	f.note()
	return err
}

func (f *file) note() {
	if f.wrote != nil {
		f.wrote()
	}
}

// grow makes the file at least so long.
func (f *file) grow(size int64) error {
	st, err := f.f.Stat()
	if err != nil || st.Size() >= size {
		return err
	}
	return f.f.Truncate(size)
}

// discard frees the pages of a part of the file, which reads as zeros then. Best effort: what was
// there is not valid any more. On a filesystem without holes it stays, and may count as damaged.
func (f *file) discard(from, size int64) {
	const hole = unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE
	for unix.Fallocate(int(f.f.Fd()), hole, from, size) == unix.EINTR {
	}
	f.note()
}

// data returns the next offset from from on, below end, at which the file may have data.
func (f *file) data(from, end int64) int64 {
	const seekData = 3
	at, err := unix.Seek(int(f.f.Fd()), from, seekData)
	switch {
	case errors.Is(err, unix.ENXIO):
		return end
	case err != nil:
		return from
	}
	return min(max(at, from), end)
}

// view is a part of the file that is mapped. Its pages that were written may be stored to.
type view struct {
	file  *file
	mem   *dax.Attached
	words []atomic.Uint64 // all of it
}

// view maps a part of the file.
func (f *file) view(offset, size int64) (*view, error) {
	mem, err := dax.Attach(f.f, offset, size, 0)
	if err != nil {
		return nil, fmt.Errorf("map the directory: %w", err)
	}
	words, _ := dax.Cut[atomic.Uint64](mem.Bytes(), int(size/8))
	return &view{file: f, mem: mem, words: words}, nil
}

// load returns the 8 bytes at an offset, which is a multiple of 8; 0 if they are not there any
// more.
func (v *view) load(offset int64) (x uint64) {
	v.guard(func() { x = v.words[offset/8].Load() })
	return x
}

// store stores 8 bytes.
func (v *view) store(offset int64, x uint64) {
	v.guard(func() { v.words[offset/8].Store(x) })
	v.file.note()
}

// take stores 0 and returns what was there.
func (v *view) take(offset int64) (x uint64) {
	v.guard(func() { x = v.words[offset/8].Swap(0) })
	v.file.note()
	return x
}

// put stores a record of which no other goroutine reads or writes anything, without its checksum.
func (v *view) put(offset int64, record []byte) {
	v.guard(func() { copy(v.mem.Bytes()[offset+8:], record[8:]) })
	v.file.note()
}

// guard calls do, which may end early if the file was cut short.
func (v *view) guard(do func()) {
	if err := dax.Guard(do, v.mem.Bytes()); err != nil {
		v.file.faulty(err)
	}
}

func (v *view) close() error {
	v.words = nil
	return v.mem.Close()
}

// openFile opens the file of a directory that is there. It returns an error that wraps
// os.ErrNotExist if there is none.
func openFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Uid != uint32(os.Geteuid()) {
		return nil, errors.Join(fmt.Errorf("%s is not a file of this user", path), f.Close())
	}
	return f, nil
}

// memoryFile makes a file in memory of this process with these first bytes.
func memoryFile(first []byte) (*os.File, error) {
	f, err := dax.Memory("lookaside-directory")
	if err != nil {
		return nil, err
	}
	if _, err = f.WriteAt(first, 0); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// createFile makes a directory's file with these first bytes, in place of one that may be there.
func createFile(path string, first []byte) (f *os.File, err error) {
	next := path + ".new"
	if err := os.Remove(next); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	f, err = os.OpenFile(next, os.O_RDWR|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC,
		0o600)
	if err != nil {
		return nil, err
	}
	if _, err = f.WriteAt(first, 0); err == nil {
		err = os.Rename(next, path)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close(), os.Remove(next))
	}
	return f, nil
}
