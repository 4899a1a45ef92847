// Package vfs has the file operations that the tiers on disk use. OS is the real file system.
// Package vfstest has one in memory and one with faults, so that faults and power cuts are ordinary
// tests.
//
// # Durability
//
// It is that of a real file system. The bytes and the size of a file are durable once Datasync
// returns nil. The entries of a directory (files made, renamed, removed) are durable once SyncDir
// returns nil. Changes that were not synced may survive wholly, in part, or not at all, in any
// order. After a failed Datasync nothing is known about the writes since the one before, even if a
// later Datasync succeeds.
package vfs

import (
	"errors"
	"fmt"
	"io"
	"syscall"
)

// Flag says how OpenFile opens. Without ReadOnly it opens for reading and writing.
type Flag uint8

const (
	ReadOnly  Flag = 1 << iota
	Create         // make the file if it is not there, readable by its owner only
	Exclusive      // with Create: fail with fs.ErrExist if it exists
	Direct         // bypass the page cache; see File.DirectAlign
)

// Advice is what File.Advise tells the kernel about a range.
type Advice uint8

const (
	DontNeed   Advice = iota // drop it from the page cache; only what is synced can be dropped
	Random                   // no readahead
	Sequential               // more readahead
)

// ErrNoDirect is returned by OpenFile if the file system cannot bypass the page cache. Open the
// file without Direct instead.
var ErrNoDirect = errors.New("direct I/O is not supported here")

// ErrNotRegular is returned by OpenFile and Lock for a link, a pipe, a device, or anything else
// that is neither a file nor a directory.
var ErrNotRegular = errors.New("not a regular file")

// LockedError means that another process, or another part of this one, holds a lock.
type LockedError struct {
	Name string
	PID  int // the owner's process id as it wrote it; 0 if it cannot be read
}

func (e *LockedError) Error() string {
	if e.PID == 0 {
		return fmt.Sprintf("%s: locked by another process", e.Name)
	}
	return fmt.Sprintf("%s: locked by process %d", e.Name, e.PID)
}

// BadPlaceError is an I/O error of one part of a file. Other parts work.
type BadPlaceError struct {
	Off int64 // in the file, of a byte that cannot be read or written
	Err error
}

func (e *BadPlaceError) Error() string { return e.Err.Error() }

func (e *BadPlaceError) Unwrap() error { return e.Err }

// IsNoSpace reports whether err means a full disk or an exhausted quota.
func IsNoSpace(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// Info is the result of Stat.
type Info struct {
	Dir       bool
	Size      int64 // bytes
	Allocated int64 // bytes of disk; less than Size if there are holes
	// ID identifies the file, as opposed to a later file of the same name, as long as the first one
	// is open. The zero FileID means not known.
	ID FileID
}

// FileID is a file system's identity of a file.
type FileID struct{ Device, Inode uint64 }

// FS is a file system. Names are slash-separated; for OS they are absolute or relative to the
// working directory. Errors are or wrap *fs.PathError, so errors.Is works with fs.ErrNotExist,
// fs.ErrExist and errno values. All methods are safe for concurrent use.
type FS interface {
	// OpenFile opens a regular file, which the caller closes. It does not follow a link in the last
	// element of the name.
	OpenFile(name string, flags Flag) (File, error)
	// MkdirAll makes a directory and its missing parents, for its owner only, durably.
	MkdirAll(dir string) error
	// Remove removes a file or an empty directory.
	Remove(name string) error
	// Rename renames a file within a file system, and atomically replaces a file of the new name.
	Rename(from, to string) error
	// ReadDir returns the sorted names in a directory.
	ReadDir(dir string) ([]string, error)
	// Stat describes what a name leads to; it follows links.
	Stat(name string) (Info, error)
	// SyncDir makes the entries of a directory durable.
	SyncDir(dir string) error
	// Lock takes an exclusive lock on a file, which it makes if missing, and writes this process's
	// id into it. It does not wait: it returns a *LockedError if the lock is held, even by this
	// process. Closing the lock releases it, and so does the death of the process. The file stays.
	Lock(name string) (io.Closer, error)
	// FreeSpace returns how many bytes this process may still allocate under a directory.
	FreeSpace(dir string) (int64, error)
}

// Summing is a File that computes checksums while it moves bytes, which costs less than a pass
// before or after. p is len(sums) pages of the same size. sums[i] becomes the XXH3-64, with seed
// seeds[i], of page i as it was moved. Errors are those of ReadAt and WriteAt.
type Summing interface {
	File
	ReadSums(p []byte, off int64, seeds, sums []uint64) error
	WriteSums(p []byte, off int64, seeds, sums []uint64) error
}

// Resident is a File whose bytes lie in memory that other processes map, read and write.
type Resident interface {
	File
	// Sums computes the checksums of pages in place. sums[i] becomes the XXH3-64, with seed
	// seeds[i], of the i-th page of pageBytes from off on. Errors are those of ReadAt.
	Sums(off, pageBytes int64, seeds, sums []uint64) error
	// Persist makes durable what others wrote to n bytes from off on. Errors are those of Datasync.
	// A *BadPlaceError concerns a part of the range only.
	Persist(off, n int64) error
}

// File is an open file. Methods are safe for concurrent use; Close must not overlap with another.
type File interface {
	// ReadAt and WriteAt move len(p) bytes or return an error, which is or wraps io.EOF at the
	// file's end. In a file opened with Direct, off and len(p) must be multiples of DirectAlign's
	// offset, and p's address of its mem.
	io.ReaderAt
	io.WriterAt
	io.Closer

	// DirectAlign returns the alignment in bytes that a file opened with Direct requires: of memory
	// addresses, and of file offsets and lengths. Both are powers of two, and 1 without Direct.
	DirectAlign() (mem, offset int)
	// Allocate makes sure that writes into [off, off+n) do not run out of space. It grows the file
	// if it ends before off+n. Existing bytes stay, and new ones read as zero. After an error a
	// part may be allocated. Nobody else may write the range meanwhile.
	Allocate(off, n int64) error
	// Truncate cuts or grows the file to a size, without allocating.
	Truncate(size int64) error
	// Size returns the file's length in bytes.
	Size() (int64, error)
	// Datasync makes all writes that have returned durable, with the metadata needed to read them
	// back.
	Datasync() error
	// Advise gives a hint about [off, off+n); n 0 means to the end. Failing is harmless.
	Advise(off, n int64, a Advice) error
}
