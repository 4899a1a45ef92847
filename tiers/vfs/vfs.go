// Package vfs is the file operations that the tiers on disk are built on. OS is the real file
// system. Package vfstest has one in memory and one with faults, so that faults and power cuts are
// ordinary tests.
//
// # What lasts
//
// As on a real file system: the bytes and the size of a file last once Datasync has returned nil,
// the entries of a directory (files made, renamed, removed) once SyncDir has. What was not synced
// may last wholly, in part, or not at all, in any order. After a Datasync that failed nothing is
// known about what was written since the one before, even if a later one succeeds.
package vfs

import (
	"errors"
	"fmt"
	"io"
	"syscall"
)

// Flag says how OpenFile opens. Without ReadOnly a file is opened for reading and writing.
type Flag uint8

const (
	ReadOnly  Flag = 1 << iota
	Create         // make the file if it is not there, readable by its owner only
	Exclusive      // with Create: fail with fs.ErrExist if it is there
	Direct         // bypass the page cache; see File.DirectAlign
)

// Advice is what File.Advise tells the kernel about a range.
type Advice uint8

const (
	DontNeed   Advice = iota // drop it from the page cache; only what is synced can be dropped
	Random                   // no readahead
	Sequential               // more readahead
)

// ErrNoDirect is OpenFile's answer where the file system cannot bypass the page cache: open the
// file without Direct instead.
var ErrNoDirect = errors.New("direct I/O is not supported here")

// ErrNotRegular is OpenFile's and Lock's answer to a name that stands for something else than a
// file or a directory: a link, a pipe, a device.
var ErrNotRegular = errors.New("not a regular file")

// LockedError says that somebody else holds a lock.
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

// BadPlaceError is an I/O error that is about a part of a file only: the medium is bad there, and
// elsewhere it works.
type BadPlaceError struct {
	Off int64 // in the file, of a byte that cannot be read or written
	Err error
}

func (e *BadPlaceError) Error() string { return e.Err.Error() }

func (e *BadPlaceError) Unwrap() error { return e.Err }

// IsNoSpace says whether err is that of a full disk, or of a quota that is used up.
func IsNoSpace(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// Info is what Stat knows of a name.
type Info struct {
	Dir       bool
	Size      int64 // bytes
	Allocated int64 // bytes of disk that it takes; less than Size where there are holes
	// ID tells one file from another that has its name later, as long as somebody has the first one
	// open. The zero FileID: it is not known.
	ID FileID
}

// FileID is what a file system knows a file by.
type FileID struct{ Device, Inode uint64 }

// FS is a file system. Names are slash-separated and, for OS, absolute or relative to the working
// directory. Errors are *fs.PathError or wrap one, so errors.Is works with fs.ErrNotExist,
// fs.ErrExist and errno values. All methods may be called concurrently.
type FS interface {
	// OpenFile opens a regular file. It does not follow a link that has the name. The caller closes
	// it.
	OpenFile(name string, flags Flag) (File, error)
	// MkdirAll makes a directory, for its owner only, and those above it. It makes their entries
	// durable as well.
	MkdirAll(dir string) error
	// Remove removes a file or an empty directory.
	Remove(name string) error
	// Rename gives a file another name in the same file system, atomically replacing what had it.
	Rename(from, to string) error
	// ReadDir lists the names in a directory, in order.
	ReadDir(dir string) ([]string, error)
	// Stat is about what a name stands for, links followed.
	Stat(name string) (Info, error)
	// SyncDir makes the entries of a directory durable.
	SyncDir(dir string) error
	// Lock takes an exclusive lock on a file, made if it is not there, and writes this process's id
	// into it. It does not wait: the error is a *LockedError if somebody, also in this process,
	// holds it. Closing the lock, or the process's death however it dies, lets go of it; the file
	// stays.
	Lock(name string) (io.Closer, error)
	// FreeSpace is how many bytes this process may still allocate under a directory.
	FreeSpace(dir string) (int64, error)
}

// Summing is a File that computes checksums of what it moves as it moves it, which costs less than
// doing so before or after. p is len(sums) pages of the same size; sums[i] becomes the XXH3-64 of
// page i as it was moved, with seed seeds[i]. Errors are those of ReadAt and WriteAt.
type Summing interface {
	File
	ReadSums(p []byte, off int64, seeds, sums []uint64) error
	WriteSums(p []byte, off int64, seeds, sums []uint64) error
}

// Resident is a File whose bytes lie in memory that others have mapped too, and write to and read
// from there.
type Resident interface {
	File
	// Sums computes the checksums of pages where they lie: sums[i] becomes the XXH3-64, with seed
	// seeds[i], of the i-th page of so many bytes from off on. Errors are those of ReadAt.
	Sums(off, pageBytes int64, seeds, sums []uint64) error
	// Persist makes what others wrote to n bytes from off on last. Errors are those of Datasync; a
	// *BadPlaceError is about a part of the range only.
	Persist(off, n int64) error
}

// File is an open file. Methods may be called concurrently with each other, Close only when none of
// them is under way.
type File interface {
	// ReadAt and WriteAt move len(p) bytes or return an error: io.EOF, or one that wraps it, at the
	// file's end. In a file opened with Direct, off and len(p) must be multiples of DirectAlign's
	// offset and p's address of its mem.
	io.ReaderAt
	io.WriterAt
	io.Closer

	// DirectAlign is what a file opened with Direct wants: the alignment in bytes of memory
	// addresses, and that of file offsets and lengths. Both are powers of two, and 1 in a file that
	// was opened without.
	DirectAlign() (mem, offset int)
	// Allocate makes sure that writes into [off, off+n) will not run out of space, growing the file
	// if it ends before off+n. Bytes that are there stay, new ones read as zero. An error may leave
	// a part allocated. Nobody else may write the range meanwhile.
	Allocate(off, n int64) error
	// Truncate cuts or grows the file to a size, without allocating.
	Truncate(size int64) error
	// Size is the file's length in bytes.
	Size() (int64, error)
	// Datasync makes all writes that have returned durable, with what of the metadata is needed to
	// read them back.
	Datasync() error
	// Advise is a hint about [off, off+n), n 0 meaning to the end; failing is harmless.
	Advise(off, n int64, a Advice) error
}
