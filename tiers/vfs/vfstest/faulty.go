package vfstest

import (
	"io"
	"io/fs"
	"reflect"
	"sync/atomic"

	"lookaside/tiers/vfs"
)

// Op is a kind of operation that Faulty can make fail.
type Op uint16

const (
	OpOpen Op = 1 << iota
	OpMkdir
	OpRemove
	OpRename
	OpReadDir
	OpStat
	OpSyncDir
	OpLock
	OpFreeSpace
	OpRead
	OpWrite
	OpAllocate
	OpTruncate
	OpSize
	OpSync

	OpAny = OpSync<<1 - 1
	// OpChange is every operation that changes the medium.
	OpChange = OpMkdir | OpRemove | OpRename | OpSyncDir | OpWrite | OpAllocate | OpTruncate |
		OpSync
)

// Call is an operation that is about to run.
type Call struct {
	Op   Op
	Name string // of the file as opened, or the first name of the call
	Off  int64  // of a read, write, allocation; the size of a truncation
	Len  int64
}

// Fault is what goes wrong with one operation. The zero Fault is no fault.
type Fault struct {
	// Err makes the operation fail without running it. A failed Datasync leaves some unsynced bytes
	// unwritten for good, as the kernel does.
	Err error
	// Torn runs only the first half of a write, in whole blocks. Without Err the write reports
	// success.
	Torn bool
	// Flip flips a bit of what a read or write moves: bit Flip modulo their number. 0 flips none.
	Flip int
	// Shift moves the place of a read or write by so many bytes.
	Shift int64
}

// Faulty returns a file system that injects faults into another one. It calls inject before each
// operation, on the caller's goroutine. inject must be safe for concurrent use; it may sleep to
// delay the operation.
func Faulty(under vfs.FS, inject func(Call) Fault) vfs.FS {
	return &faultyFS{under: under, inject: inject}
}

// Counter injects a fault into the Nth operation of some kinds, counted from 1. A test tries N = 1,
// 2, 3… until Met returns false.
type Counter struct {
	Kinds Op
	N     int64
	Fault Fault
	Stays bool // all operations of these kinds from the Nth on

	seen atomic.Int64
}

// Inject is for Faulty.
func (c *Counter) Inject(call Call) Fault {
	if call.Op&c.Kinds == 0 {
		return Fault{}
	}
	if n := c.seen.Add(1); n == c.N || c.Stays && n > c.N {
		return c.Fault
	}
	return Fault{}
}

// Met reports whether the Nth operation has come.
func (c *Counter) Met() bool { return c.seen.Load() >= c.N }

type faultyFS struct {
	under  vfs.FS
	inject func(Call) Fault
	failed atomic.Uint64 // failed syncs; seeds what each leaves
}

// fails returns the error of an operation that either runs or fails.
func (f *faultyFS) fails(op Op, name, what string, off, n int64) error {
	if fault := f.inject(Call{op, name, off, n}); fault.Err != nil {
		return &fs.PathError{Op: what, Path: name, Err: fault.Err}
	}
	return nil
}

func (f *faultyFS) OpenFile(name string, flags vfs.Flag) (vfs.File, error) {
	if err := f.fails(OpOpen, name, "open", 0, 0); err != nil {
		return nil, err
	}
	under, err := f.under.OpenFile(name, flags)
	if err != nil {
		return nil, err
	}
	return &faultyFile{File: under, fs: f, name: name}, nil
}

func (f *faultyFS) MkdirAll(dir string) error {
	if err := f.fails(OpMkdir, dir, "mkdir", 0, 0); err != nil {
		return err
	}
	return f.under.MkdirAll(dir)
}

func (f *faultyFS) Remove(name string) error {
	if err := f.fails(OpRemove, name, "remove", 0, 0); err != nil {
		return err
	}
	return f.under.Remove(name)
}

func (f *faultyFS) Rename(from, to string) error {
	if err := f.fails(OpRename, from, "rename", 0, 0); err != nil {
		return err
	}
	return f.under.Rename(from, to)
}

func (f *faultyFS) ReadDir(dir string) ([]string, error) {
	if err := f.fails(OpReadDir, dir, "readdir", 0, 0); err != nil {
		return nil, err
	}
	return f.under.ReadDir(dir)
}

func (f *faultyFS) Stat(name string) (vfs.Info, error) {
	if err := f.fails(OpStat, name, "stat", 0, 0); err != nil {
		return vfs.Info{}, err
	}
	return f.under.Stat(name)
}

func (f *faultyFS) SyncDir(dir string) error {
	if err := f.fails(OpSyncDir, dir, "fsync", 0, 0); err != nil {
		return err
	}
	return f.under.SyncDir(dir)
}

func (f *faultyFS) Lock(name string) (io.Closer, error) {
	if err := f.fails(OpLock, name, "flock", 0, 0); err != nil {
		return nil, err
	}
	return f.under.Lock(name)
}

func (f *faultyFS) FreeSpace(dir string) (int64, error) {
	if err := f.fails(OpFreeSpace, dir, "statfs", 0, 0); err != nil {
		return 0, err
	}
	return f.under.FreeSpace(dir)
}

type faultyFile struct {
	vfs.File // Close, Advise and DirectAlign never fail
	fs       *faultyFS
	name     string
}

// misdirected returns where an operation at off goes instead. A place before the file's beginning
// becomes one behind off.
func (f Fault) misdirected(off int64) int64 {
	if off+f.Shift < 0 {
		return off - f.Shift
	}
	return off + f.Shift
}

func (f Fault) flip(p []byte) {
	if f.Flip != 0 && len(p) > 0 {
		bit := f.Flip % (8 * len(p))
		p[bit/8] ^= 1 << (bit % 8)
	}
}

func (f *faultyFile) ReadAt(p []byte, off int64) (int, error) {
	fault := f.fs.inject(Call{OpRead, f.name, off, int64(len(p))})
	if fault.Err != nil {
		return 0, &fs.PathError{Op: "read", Path: f.name, Err: fault.Err}
	}
	n, err := f.File.ReadAt(p, fault.misdirected(off))
	fault.flip(p[:n])
	return n, err
}

func (f *faultyFile) WriteAt(p []byte, off int64) (int, error) {
	fault := f.fs.inject(Call{OpWrite, f.name, off, int64(len(p))})
	q := p
	if fault.Torn {
		_, align := f.DirectAlign()
		align = max(align, memSector)
		q = p[:len(p)/2/align*align]
	}
	if fault.Flip != 0 {
		q = alignedCopy(f.File, q) // the caller's bytes must not change
		fault.flip(q)
	}
	if fault.Err == nil || fault.Torn {
		if n, err := f.File.WriteAt(q, fault.misdirected(off)); err != nil {
			return n, err
		}
	}
	if fault.Err != nil {
		return 0, &fs.PathError{Op: "write", Path: f.name, Err: fault.Err}
	}
	return len(p), nil
}

// alignedCopy copies p to memory with the alignment that a file requires.
func alignedCopy(f vfs.File, p []byte) []byte {
	mem, _ := f.DirectAlign()
	room := make([]byte, len(p)+mem)
	skip := -int(reflect.ValueOf(room).Pointer()) & (mem - 1)
	q := room[skip : skip+len(p)]
	copy(q, p)
	return q
}

func (f *faultyFile) Allocate(off, n int64) error {
	if err := f.fs.fails(OpAllocate, f.name, "fallocate", off, n); err != nil {
		return err
	}
	return f.File.Allocate(off, n)
}

func (f *faultyFile) Truncate(size int64) error {
	if err := f.fs.fails(OpTruncate, f.name, "truncate", size, 0); err != nil {
		return err
	}
	return f.File.Truncate(size)
}

func (f *faultyFile) Size() (int64, error) {
	if err := f.fs.fails(OpSize, f.name, "stat", 0, 0); err != nil {
		return 0, err
	}
	return f.File.Size()
}

func (f *faultyFile) Datasync() error {
	if err := f.fs.fails(OpSync, f.name, "fdatasync", 0, 0); err != nil {
		if m, ok := f.File.(*memFile); ok {
			m.failSync(f.fs.failed.Add(1))
		}
		return err
	}
	return f.File.Datasync()
}
