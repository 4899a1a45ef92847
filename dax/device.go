//go:build linux

package dax

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"lookaside/internal/bytesize"
)

// DeviceKind is the kind of byte-addressable memory that a [Device] is on.
type DeviceKind string

const (
	// DevDAX is a character device /dev/daxX.Y: persistent memory or CXL memory,
	// without a file system.
	DevDAX DeviceKind = "devdax"
	// FSDAX is a file on a file system mounted with -o dax that takes MAP_SYNC:
	// its pages are the persistent memory itself.
	FSDAX DeviceKind = "fsdax"
	// PlainFile is a regular file in place of a device. Its pages are in the page cache.
	PlainFile DeviceKind = "file"
)

// ErrDevice means that a path is not a DAX device that this process can use as requested: it does
// not exist, permission is missing, it is another kind of file, or the partition does not fit or is
// not aligned.
var ErrDevice = errors.New("not usable as a DAX device")

// RangeLockedError means that another open Device has a part of the partition. It wraps [ErrBusy].
type RangeLockedError struct {
	Path string
	// OffsetBytes and SizeBytes are the part of the device that the first conflicting lock covers.
	OffsetBytes, SizeBytes int64
	// PID is the owner's process, or 0 if unknown. The lock does not contain it, but the format on
	// the device may (see Peek).
	PID int
}

func (e *RangeLockedError) Error() string {
	who := "another process"
	if e.PID > 0 {
		who = fmt.Sprintf("process %d", e.PID)
	}
	return fmt.Sprintf("%s: %v: %s has its bytes %d to %d (%s)", e.Path, ErrBusy, who,
		e.OffsetBytes, e.OffsetBytes+e.SizeBytes-1, bytesize.Format(e.SizeBytes))
}

func (e *RangeLockedError) Unwrap() error { return ErrBusy }

// DeviceOptions selects the device, and the part of it, to open.
type DeviceOptions struct {
	// Path of a DAX character device or of a file.
	Path string
	// OffsetBytes and SizeBytes are the partition, multiples of the device's
	// alignment. SizeBytes 0 is all from the offset to the device's end.
	OffsetBytes, SizeBytes int64
	// Ranks, if more than one, cuts these bytes into as many equal parts, each as large as
	// alignment allows. The partition is part number Rank, from 0.
	Rank, Ranks int
	// AllowFile allows a regular file that is not on DAX in place of a device. A missing or empty
	// file is made, and ends with these bytes.
	AllowFile bool
	// SysFS is the directory where the kernel describes devices; "" is /sys.
	SysFS string
}

// Device is a mapped partition of a DAX device. While it is open the partition belongs to this
// process alone, by a lock on exactly these bytes. So several ranks can share a device, each with a
// partition of its own.
//
// Any goroutine may call its methods. Before Resize and Close, the caller must ensure that the
// bytes that go are not in use. Every access to the bytes belongs inside [Guard]: a device can go
// away, a page can be poisoned, and a file can be truncated by any process that can write it.
type Device struct {
	path   string
	kind   DeviceKind
	align  int64
	node   int
	offset int64
	fd     int // to map and to pass on
	lock   int // an open file of its own that has the lock, see createFile

	// address space reserved for the partition to grow in; the first size bytes are mapped
	room []byte
	size atomic.Int64 // of the partition

	mu       sync.Mutex // held by Resize and Close
	closed   bool
	closeErr error
}

// fileRoom is the address space that is reserved for a file, so that its partition can grow without
// moving.
const fileRoom = 1 << 40

// fileUnit is the unit in which a file is cut where no size is given. It does not depend on the
// machine's pages. So where they are larger a file is cut in the same way, or it is refused.
const fileUnit = 4096

// OpenDevice locks and maps a partition of a device. Errors wrap [ErrDevice], [ErrBusy] (a
// *RangeLockedError, or after a few seconds a *LentError), [ErrNoSpace] or [ErrNoMemory], and
// contain a fix. A failed OpenDevice leaves nothing open, but a file that it made stays.
func OpenDevice(o DeviceOptions) (d *Device, err error) {
	switch {
	case o.OffsetBytes < 0 || o.SizeBytes < 0 || o.OffsetBytes > math.MaxInt64-o.SizeBytes:
		return nil, fmt.Errorf("%s: %w: a partition of %d bytes from byte %d on", o.Path, ErrDevice,
			o.SizeBytes, o.OffsetBytes)
	case o.Ranks < 0 || o.Rank < 0 || o.Rank >= max(o.Ranks, 1):
		return nil, fmt.Errorf("%s: %w: rank %d of %d", o.Path, ErrDevice, o.Rank, o.Ranks)
	}
	if o.SysFS == "" {
		o.SysFS = "/sys"
	}
	fd, err := openDeviceFile(&o)
	if err != nil {
		return nil, err
	}
	d = &Device{path: o.Path, fd: fd, lock: -1, offset: o.OffsetBytes, node: NoNUMANode,
		kind: PlainFile, align: int64(os.Getpagesize())}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.Close())
			d = nil
		}
	}()
	// The lock needs an open file of its own: workers' mappings of the mapped one would keep the
	// lock alive after our death.
	if d.lock, err = unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd),
		unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0); err != nil {
		return d, fmt.Errorf("%s: open: %w", o.Path, err)
	}
	var st unix.Stat_t
	if err = unix.Fstat(fd, &st); err != nil {
		return d, fmt.Errorf("%s: stat: %w", o.Path, err)
	}
	total := st.Size // the partition must lie below it
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFCHR:
		info, err := readDaxInfo(o.SysFS, o.Path, st.Rdev)
		if err != nil {
			return d, err
		}
		d.kind, d.align, d.node, total = DevDAX, info.align, info.node, info.size
	case unix.S_IFREG:
		if d.kind, err = fileKind(fd); err != nil {
			return d, fmt.Errorf("%s: %w", o.Path, err)
		}
		if d.kind == PlainFile && !o.AllowFile {
			return d, fmt.Errorf("%s: %w: it is a regular file, and not on a file system mounted with -o dax; set allow_files to have it stand in for a device", o.Path, ErrDevice)
		}
		if d.kind == FSDAX {
			if err = canWriteBack(); err != nil {
				return d, fmt.Errorf("%s: %w", o.Path, err)
			}
		}
		if total == 0 && o.AllowFile {
			if total, err = makeDeviceFile(o, d.lock); err != nil {
				return d, err
			}
		}
	default:
		return d, fmt.Errorf("%s: %w: it is %s", o.Path, ErrDevice, fileType(st.Mode))
	}
	unit := d.align
	if d.kind != DevDAX {
		unit = fileUnit
	}
	size := o.SizeBytes
	if size == 0 {
		size = (total - d.offset) / unit * unit
	}
	if o.Ranks > 1 {
		if size > total-d.offset {
			return d, d.fits(size, total)
		}
		share := size / int64(o.Ranks) / unit * unit
		if d.offset, size = d.offset+int64(o.Rank)*share, share; share == 0 {
			return d, fmt.Errorf("%s: %w: %s in %d parts, each a multiple of %s", o.Path, ErrDevice,
				bytesize.Format(o.SizeBytes), o.Ranks, bytesize.Format(unit))
		}
	}
	if err = d.fits(size, total); err != nil {
		return d, err
	}
	if err = d.lockRange(d.offset, size); err != nil {
		return d, err
	}
	if err = d.awaitLent(d.offset, size); err != nil {
		return d, err
	}
	if d.kind != DevDAX {
		// else a store into the mapping could meet a full file system, which is SIGBUS
		if err = allocateRange(d.path, fd, d.offset, size); err != nil {
			return d, err
		}
	}
	room := total - d.offset
	switch {
	case o.Ranks > 1: // the bytes behind it belong to another rank
		room = size
	case d.kind != DevDAX:
		room = max(room, fileRoom)
	}
	// Less room does where the address space is limited (ulimit -v): the partition can grow less.
	for d.room, err = reserve(room, d.align); err != nil; d.room, err = reserve(room, d.align) {
		if room == size {
			return d, fmt.Errorf("%s: %w", o.Path, err)
		}
		room = max(size, room/16/d.align*d.align)
	}
	return d, d.mapTo(size)
}

// fits returns an error if the partition cannot have the given size.
func (d *Device) fits(size, total int64) error {
	switch {
	case d.kind != DevDAX && (d.offset%d.align != 0 || size%d.align != 0):
		return fmt.Errorf("%s: %w: a partition of %d bytes from byte %d on is not aligned to %s, the pages of this machine: set an offset and a size that are multiples of it, for each rank", d.path, ErrDevice, size, d.offset, bytesize.Format(d.align))
	case d.offset%d.align != 0 || size%d.align != 0:
		return fmt.Errorf("%s: %w: a partition of %d bytes from byte %d on is not aligned to %s, as this device wants it", d.path, ErrDevice, size, d.offset, bytesize.Format(d.align))
	case size <= 0:
		return fmt.Errorf("%s: %w: a partition of %d bytes from byte %d on, of %s", d.path,
			ErrDevice, size, d.offset, bytesize.Format(total))
	case size > total-d.offset:
		return fmt.Errorf("%s: %w: a partition of %s from byte %d on does not fit: it has %s (%d bytes)", d.path, ErrDevice, bytesize.Format(size), d.offset, bytesize.Format(total), total)
	}
	return nil
}

// openDeviceFile opens the path, and makes the file if that is allowed.
func openDeviceFile(o *DeviceOptions) (fd int, err error) {
	const flags = unix.O_RDWR | unix.O_CLOEXEC | unix.O_NONBLOCK | unix.O_NOCTTY
	fd, err = unix.Open(o.Path, flags, 0)
	if errors.Is(err, unix.ENOENT) && o.AllowFile {
		if o.SizeBytes == 0 {
			return -1, fmt.Errorf("%s: %w: there is no such file, and no size to make it of",
				o.Path, ErrDevice)
		}
		fd, err = unix.Open(o.Path, flags|unix.O_CREAT, 0o600)
	}
	switch {
	case err == nil:
		return fd, nil
	case errors.Is(err, unix.ENOENT):
		return -1, fmt.Errorf("%s: %w: %w (`daxctl list` shows the devices; one in system-ram mode has no node: `daxctl reconfigure-device --mode=devdax NAME`)", o.Path, ErrDevice, err)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return -1, fmt.Errorf("%s: %w: %w for uid %d: give it read and write permission, for good by a udev rule such as SUBSYSTEM==\"dax\", GROUP=\"…\", MODE=\"0660\"",
			o.Path, ErrDevice, err, os.Geteuid())
	case errors.Is(err, unix.EISDIR):
		return -1, fmt.Errorf("%s: %w: it is a directory; name a device, or a file in it", o.Path,
			ErrDevice)
	default:
		return -1, fmt.Errorf("%s: %w: open: %w", o.Path, ErrDevice, err)
	}
}

func fileType(mode uint32) string {
	switch mode & unix.S_IFMT {
	case unix.S_IFBLK:
		return "a block device; `ndctl create-namespace --mode=devdax` makes a DAX device of persistent memory, or mount a file system on it with -o dax and name a file there"
	case unix.S_IFDIR:
		return "a directory"
	case unix.S_IFIFO:
		return "a pipe"
	}
	return "no device"
}

// fileKind reports whether a regular file is on DAX: the kernel accepts MAP_SYNC only there.
func fileKind(fd int) (DeviceKind, error) {
	page := uintptr(os.Getpagesize())
	p, err := unix.MmapPtr(fd, 0, nil, page, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED_VALIDATE|unix.MAP_SYNC)
	switch {
	case err == nil:
		return FSDAX, unix.MunmapPtr(p, page)
	// EINVAL: a kernel before 4.15
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EINVAL):
		return PlainFile, nil
	}
	return PlainFile, fmt.Errorf("%w: mmap: %w", ErrDevice, err)
}

// makingByte is locked while a file is being made, so that ranks that share a missing file make it
// once.
const makingByte = 1 << 62

// makeDeviceFile gives an empty file its size, unless another process has just done so, and returns
// the size.
func makeDeviceFile(o DeviceOptions, lock int) (size int64, err error) {
	making := unix.Flock_t{Type: unix.F_WRLCK, Start: makingByte, Len: 1}
	for {
		err = unix.FcntlFlock(uintptr(lock), unix.F_OFD_SETLKW, &making)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		return 0, fmt.Errorf("%s: lock: %w", o.Path, err)
	}
	defer func() {
		making.Type = unix.F_UNLCK
		if e := unix.FcntlFlock(uintptr(lock), unix.F_OFD_SETLK, &making); err == nil && e != nil {
			err = fmt.Errorf("%s: unlock: %w", o.Path, e)
		}
	}()
	var st unix.Stat_t
	if err := unix.Fstat(lock, &st); err != nil || st.Size > 0 {
		return st.Size, err
	}
	if o.SizeBytes == 0 {
		return 0, fmt.Errorf("%s: %w: the file is empty, and there is no size to make it of",
			o.Path, ErrDevice)
	}
	size = o.OffsetBytes + o.SizeBytes
	return size, allocateRange(o.Path, lock, 0, size)
}

// allocateRange allocates all blocks of a range of a file, and extends the file if it ends before.
// It first checks that there is room for the missing blocks.
func allocateRange(path string, fd int, off, n int64) error {
	var st unix.Stat_t
	var fs unix.Statfs_t
	if err := errors.Join(unix.Fstat(fd, &st), unix.Fstatfs(fd, &fs)); err != nil {
		return fmt.Errorf("%s: stat: %w", path, err)
	}
	if fs.Type == unix.HUGETLBFS_MAGIC {
		return fmt.Errorf("%s: %w: a file on hugetlbfs", path, ErrDevice)
	}
	if missing := off + n - st.Size; missing > 0 {
		if fs.Type == unix.TMPFS_MAGIC { // files on tmpfs are memory
			if err := checkBudget(systemHost, missing, KindMemfd, regionReserve); err != nil {
				return fmt.Errorf("%s: on tmpfs: %w", path, err)
			}
		}
		if free := int64(fs.Bavail) * fs.Bsize; free < missing {
			return fmt.Errorf("%s: %w: need %s more, free %s", path, ErrNoSpace,
				bytesize.Format(missing), bytesize.Format(free))
		}
	}
	// tmpfs visits each page that is already there, which takes 0.2 s for 5 GiB. It counts its
	// blocks exactly, so the call can be left out. Other file systems may count differently.
	if fs.Type == unix.TMPFS_MAGIC && off+n <= st.Size && st.Blocks*512 >= st.Size {
		return nil
	}
	return allocate(path, fd, off, n)
}

// lockPatience is how long a lock of another process is tried. The open files of a killed process
// may be closed some time after its end was seen.
const lockPatience = 250 * time.Millisecond

// lockRange locks some bytes of the device. An open file description lock belongs to this open
// file: it conflicts with other open files of this process too, and ends when the file is closed
// for any reason.
func (d *Device) lockRange(off, n int64) error {
	var l unix.Flock_t
	var err error
	for start := time.Now(); ; time.Sleep(5 * time.Millisecond) {
		l = unix.Flock_t{Type: unix.F_WRLCK, Start: off, Len: n}
		if err = unix.FcntlFlock(uintptr(d.lock), unix.F_OFD_SETLK, &l); err == nil {
			return nil
		}
		if time.Since(start) > lockPatience {
			break
		}
	}
	if !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EACCES) {
		return fmt.Errorf("%s: lock: %w", d.path, err)
	}
	busy := &RangeLockedError{Path: d.path, OffsetBytes: off, SizeBytes: n}
	l = unix.Flock_t{Type: unix.F_WRLCK, Start: off, Len: n}
	if unix.FcntlFlock(uintptr(d.lock), unix.F_OFD_GETLK, &l) == nil && l.Type != unix.F_UNLCK {
		busy.OffsetBytes, busy.SizeBytes = l.Start, l.Len
		if l.Pid > 0 { // a lock of the older kind, by another program
			busy.PID = int(l.Pid)
		}
	}
	return busy
}

// reserve reserves address space for a mapping of n bytes whose start may have to be a multiple of
// align.
func reserve(n, align int64) ([]byte, error) {
	return mapAlignedAt(-1, 0, n, max(align, HugePageSize), unix.PROT_NONE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
}

// mapTo maps what is missing for a partition of size bytes.
func (d *Device) mapTo(size int64) error {
	from := d.size.Load()
	flags := unix.MAP_SHARED | unix.MAP_FIXED
	if d.kind == FSDAX {
		flags = unix.MAP_SHARED_VALIDATE | unix.MAP_SYNC | unix.MAP_FIXED
	}
	at := unsafe.Pointer(&d.room[from])
	if _, err := unix.MmapPtr(d.fd, d.offset+from, at, uintptr(size-from),
		unix.PROT_READ|unix.PROT_WRITE, flags); err != nil {
		return fmt.Errorf("%s: %w: mmap of %s from byte %d on: %w", d.path, ErrDevice,
			bytesize.Format(size-from), d.offset+from, err)
	}
	mem := d.room[from:size]
	_ = unix.Madvise(mem, unix.MADV_DONTDUMP) // as in create
	if d.kind == PlainFile {
		_ = unix.Madvise(mem, unix.MADV_HUGEPAGE) // if the file system supports them
	}
	d.size.Store(size)
	return nil
}

// Resize changes the end of the partition. To grow, it locks the new bytes. It returns the same
// errors as OpenDevice, and extends a file in place of a device. When it shrinks, the bytes that go
// must not be in use. The bytes that stay do not move and keep their content.
func (d *Device) Resize(sizeBytes int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	was := d.size.Load()
	if d.closed {
		return fmt.Errorf("%s: %w: closed", d.path, ErrDevice)
	}
	switch err := d.fits(sizeBytes, d.offset+int64(len(d.room))); {
	case err != nil:
		return err
	case sizeBytes == was:
		return nil
	case sizeBytes < was:
		at := unsafe.Pointer(&d.room[sizeBytes])
		if _, err := unix.MmapPtr(-1, 0, at, uintptr(was-sizeBytes), unix.PROT_NONE,
			unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE|unix.MAP_FIXED); err != nil {
			return fmt.Errorf("%s: munmap: %w", d.path, err)
		}
		d.size.Store(sizeBytes)
		return d.unlockRange(d.offset+sizeBytes, was-sizeBytes)
	}
	if err := d.lockRange(d.offset+was, sizeBytes-was); err != nil {
		return err
	}
	err := d.awaitLent(d.offset+was, sizeBytes-was)
	if err == nil && d.kind != DevDAX {
		err = allocateRange(d.path, d.fd, d.offset+was, sizeBytes-was)
	}
	if err == nil {
		err = d.mapTo(sizeBytes)
	}
	if err != nil {
		return errors.Join(err, d.unlockRange(d.offset+was, sizeBytes-was))
	}
	return nil
}

func (d *Device) unlockRange(off, n int64) error {
	l := unix.Flock_t{Type: unix.F_UNLCK, Start: off, Len: n}
	if err := unix.FcntlFlock(uintptr(d.lock), unix.F_OFD_SETLK, &l); err != nil {
		return fmt.Errorf("%s: unlock: %w", d.path, err)
	}
	return nil
}

// Bytes returns the partition. It is valid until Close, except for bytes that Resize has removed.
func (d *Device) Bytes() []byte {
	n := d.size.Load()
	return d.room[:n:n]
}

// Path returns the path that was opened.
func (d *Device) Path() string { return d.path }

// Offset returns the partition's offset in the device, in bytes.
func (d *Device) Offset() int64 { return d.offset }

// Size returns the partition's size in bytes, a multiple of Align.
func (d *Device) Size() int64 { return d.size.Load() }

// Align returns the alignment of partitions of the device, in bytes.
func (d *Device) Align() int64 { return d.align }

// NUMANode returns the node that the device is attached to, or NoNUMANode if the kernel does not
// know it.
func (d *Device) NUMANode() int { return d.node }

// Kind returns the kind of the device.
func (d *Device) Kind() DeviceKind { return d.kind }

// FD returns the descriptor to pass to clients. The device keeps ownership.
func (d *Device) FD() int { return d.fd }

// Direct reports whether the bytes are the medium itself, so that a write-back of the caches (see
// Persist) is enough to make them last.
func (d *Device) Direct() bool { return d.kind != PlainFile }

// Linked returns an error that wraps fs.ErrNotExist if the path of a regular file no longer names
// the open file, because it was removed or replaced. The mapping still works, but a later open of
// the path does not find its content.
func (d *Device) Linked() error {
	if d.kind == DevDAX {
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return fmt.Errorf("%s: %w: closed", d.path, ErrDevice)
	}
	var mine, there unix.Stat_t
	if err := unix.Fstat(d.fd, &mine); err != nil {
		return &fs.PathError{Op: "stat", Path: d.path, Err: err}
	}
	err := unix.Stat(d.path, &there)
	if err == nil && (there.Dev != mine.Dev || there.Ino != mine.Ino) {
		err = fmt.Errorf("%w: another file is there", fs.ErrNotExist)
	}
	if err != nil {
		return &fs.PathError{Op: "stat", Path: d.path, Err: err}
	}
	return nil
}

// Persist makes n bytes of the partition from off on last, as they are now. On a device or a file
// on DAX it writes back their cache lines; other files are synced. After an error it is unknown
// which bytes last.
func (d *Device) Persist(off, n int64) error {
	if n == 0 {
		return nil
	}
	mem := d.Bytes()[off : off+n]
	if d.Direct() {
		if err := Guard(func() { writeBack(mem) }, mem); err != nil {
			return fmt.Errorf("%s: %w", d.path, err)
		}
		return nil
	}
	page := int64(os.Getpagesize())
	from := off / page * page
	for {
		err := unix.Msync(d.Bytes()[from:off+n], unix.MS_SYNC)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("%s: msync: %w", d.path, err)
		}
		return nil
	}
}

// Close unmaps and unlocks the partition. It is idempotent and returns its first error. The content
// of the device stays.
func (d *Device) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return d.closeErr
	}
	d.closed = true
	d.size.Store(0)
	var errs []error
	if d.room != nil {
		errs = append(errs, unmap(d.room))
		d.room = nil
	}
	if d.lock >= 0 {
		errs = append(errs, unix.Close(d.lock))
	}
	errs = append(errs, unix.Close(d.fd))
	d.closeErr = errors.Join(errs...)
	return d.closeErr
}

// Peek reads a few bytes of a device or file without a lock. It may belong to another process, so
// the bytes may be torn or outdated. An error wraps ErrFault if the file has fewer bytes. sysFS is
// as DeviceOptions.SysFS.
func Peek(path, sysFS string, off int64, p []byte) error {
	if sysFS == "" {
		sysFS = "/sys"
	}
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return &fs.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT == unix.S_IFREG {
		n, err := unix.Pread(fd, p, off)
		if err != nil {
			return &fs.PathError{Op: "read", Path: path, Err: err}
		}
		if n < len(p) {
			return fmt.Errorf("%s: %w: it ends before byte %d", path, ErrFault, off+int64(len(p)))
		}
		return nil
	}
	align := int64(os.Getpagesize())
	if st.Mode&unix.S_IFMT == unix.S_IFCHR {
		info, err := readDaxInfo(sysFS, path, st.Rdev)
		if err != nil {
			return err
		}
		align = info.align
	}
	from := off / align * align
	size := (off + int64(len(p)) - from + align - 1) / align * align
	mem, err := mapAlignedAt(fd, from, size, max(align, HugePageSize), unix.PROT_READ,
		unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	err = Guard(func() { copy(p, mem[off-from:]) }, mem)
	return errors.Join(err, unmap(mem))
}
