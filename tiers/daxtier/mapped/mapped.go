// Package mapped is a vfs.FS on byte-addressable memory. Each directory is a partition of a DAX
// device, and each file in it is one contiguous piece. The same code that makes a store crash-safe
// in files makes it crash-safe on a device.
//
// # Durability
//
// Making, growing and removing a file is durable when the call returns: a new header with a
// checksum is written beside the old one. On a device, and on a file on DAX, WriteAt is durable
// too: large parts are stored past the caches, and the rest is written back. Datasync then has
// nothing to do. On a regular file Datasync syncs what was written since the last one.
//
// # Differences to package vfs
//
// An allocated file reads as the old contents of its place, not as zeros, because clearing a
// terabyte takes minutes. A partition has no directories below it. Files have no holes: a file that
// is made longer is allocated.
//
// # Faults
//
// A removed device, a poisoned page and a truncated file raise SIGBUS at an access. Each copy runs
// under dax.Guard. A fault in the partition becomes an I/O error (EIO) of the call, and a
// *vfs.BadPlaceError if the beginning of the file can still be read. A fault in the caller's memory
// becomes its dax.ErrFault.
//
// # Locks
//
// volume.life is held for reading while the volume's memory is used, and for writing to unmap it.
// volume.meta guards the table of files and is taken after life.
package mapped

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"

	"go.uber.org/zap"

	"lookaside/dax"
	"lookaside/dax/memcopy"
	"lookaside/tiers/vfs"
)

// FS is a set of mounted partitions. Its methods are safe for concurrent use.
type FS struct {
	log *zap.Logger

	mu      sync.Mutex // guards volumes
	volumes map[string]*volume
}

// New returns a file system without partitions. Close unmounts those that are mounted later.
func New(log *zap.Logger) *FS {
	if log == nil {
		log = zap.NewNop()
	}
	return &FS{log: log, volumes: map[string]*volume{}}
}

// volume is a mounted partition.
type volume struct {
	dir     string
	dev     *dax.Device
	persist func(off, n int64) error // the device's Persist; replaced in tests
	// failures counts failed syncs of a regular file. The kernel reports a failed write once for
	// the whole file, so a sync of one range may get the error of another.
	failures atomic.Int64

	life   sync.RWMutex // see the package comment
	closed bool

	meta   sync.Mutex
	head   *header          // as on the device; replaced, never changed
	open   map[string]*node // files that are or were open
	ghosts []*node          // files removed while they were open
	// old places of removed files: made anew they go there, so that free room stays in one piece
	places map[string]entry
	locks  map[string]bool
}

// node is an open file.
type node struct {
	v     *volume
	name  string
	users int // guarded by v.meta
	// at and capacity are the file's piece. They change under life and meta; users of the memory
	// read them under life.
	at, capacity int64
	size         atomic.Int64

	// Of a regular file, [from, to) was written and not synced, and failures is the value of
	// v.failures before its first byte was written. All three are guarded by dirty.
	dirty    sync.Mutex
	from, to int64
	failures int64
	// syncing is held during a sync, and taken before dirty. It guards syncErr, the error of the
	// first failed sync.
	syncing sync.Mutex
	syncErr error
}

// Mount opens a partition as a directory. It returns the errors of dax.OpenDevice (with the owner's
// process id if the partition is locked), ErrVersion, and ErrForeign for a file with foreign
// contents. A device with foreign contents is overwritten, because volatile devices hold whatever
// was left there.
func (f *FS) Mount(dir string, o dax.DeviceOptions) error { return f.mount(dir, o, true) }

// MountExisting opens the partition at o.OffsetBytes, with the size that its header gives. It
// creates nothing, and returns fs.ErrNotExist if there is no partition of ours.
func (f *FS) MountExisting(dir string, o dax.DeviceOptions) error {
	h, err := peek(o, o.OffsetBytes)
	switch {
	case err == nil:
	case errors.Is(err, errBlank), errors.Is(err, errCorrupt), errors.Is(err, ErrForeign),
		errors.Is(err, dax.ErrFault):
		return &fs.PathError{Op: "mount", Path: o.Path,
			Err: fmt.Errorf("%w: no partition of ours begins at byte %d: %w", fs.ErrNotExist,
				o.OffsetBytes, err)}
	default:
		return err
	}
	o.SizeBytes, o.Ranks = h.size, 0
	return f.mount(dir, o, false)
}

func (f *FS) mount(dir string, o dax.DeviceOptions, create bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	dir = path.Clean(dir)
	if f.volumes[dir] != nil {
		return &fs.PathError{Op: "mount", Path: dir, Err: fs.ErrExist}
	}
	dev, err := dax.OpenDevice(o)
	if err != nil {
		var busy *dax.RangeLockedError
		if errors.As(err, &busy) && busy.PID == 0 {
			busy.PID = ownerOf(o, busy.OffsetBytes)
		}
		return err
	}
	v := &volume{dir: dir, dev: dev, persist: dev.Persist, open: map[string]*node{},
		places: map[string]entry{}, locks: map[string]bool{}}
	if err := v.load(f.log, create); err != nil {
		return errors.Join(fmt.Errorf("%s: %w", o.Path, err), dev.Close())
	}
	f.volumes[dir] = v
	return nil
}

// ownerOf returns the process that opened the partition at offset, from its header; 0 if that
// cannot be read.
func ownerOf(o dax.DeviceOptions, offset int64) int {
	h, err := peek(o, offset)
	if err != nil {
		return 0
	}
	return int(h.pid)
}

// peek reads the header of a partition that another process may own.
func peek(o dax.DeviceOptions, offset int64) (*header, error) {
	b := make([]byte, headBytes)
	if err := dax.Peek(o.Path, o.SysFS, offset, b); err != nil {
		return nil, err
	}
	return decodeHeader(b, offset)
}

// load reads the partition's header, or makes one if create is set.
func (v *volume) load(log *zap.Logger, create bool) error {
	if v.dev.Size() < headBytes+blockBytes {
		return fmt.Errorf("%w: a partition of %d bytes", dax.ErrDevice, v.dev.Size())
	}
	b := make([]byte, headBytes)
	if err := v.copyOut(b, 0); err != nil {
		return err
	}
	h, err := decodeHeader(b, v.dev.Offset())
	switch {
	case err == nil:
	case !create:
		return err
	case errors.Is(err, ErrVersion):
		return fmt.Errorf("%w: use the version of this program that wrote it, or clear its first %d bytes to start empty", err, headBytes)
	case errors.Is(err, ErrForeign) && v.dev.Kind() != dax.DevDAX:
		return fmt.Errorf("%w, not chunks: name another file, or empty this one first", err)
	default:
		if !errors.Is(err, errBlank) {
			log.Warn("a partition has no header of ours: it is made anew",
				zap.String("device", v.dir), zap.Error(err))
		}
		h = &header{offset: v.dev.Offset()}
		for i := range h.identity {
			h.identity[i] = byte(rand.Uint32())
		}
		// Clear both copies first, so that the old contents cannot come back.
		if err := v.copyIn(0, make([]byte, headBytes)); err != nil {
			return err
		}
		if err := v.dev.Persist(0, headBytes); err != nil {
			return err
		}
	}
	v.head = h
	next := h.clone()
	next.pid, next.size = uint32(os.Getpid()), v.dev.Size()
	next.files = slices.DeleteFunc(next.files, func(e entry) bool {
		gone := e.at+e.capacity > next.size
		if gone {
			log.Warn("a file is dropped: the partition is smaller than it was",
				zap.String("device", v.dir), zap.String("file", e.name))
		}
		return gone
	})
	return v.commit(next)
}

// commit replaces the partition's table. The caller holds meta, or is load. After an error the old
// table holds.
func (v *volume) commit(next *header) error {
	next.epoch = v.head.epoch + 1
	b := next.encode()
	if err := v.copyIn(next.slot(), b); err != nil {
		return err
	}
	if err := v.dev.Persist(next.slot(), blockBytes); err != nil {
		return err
	}
	v.head = next
	return nil
}

// lookup splits a name into its volume and the name there, "" for the directory itself. It returns
// fs.ErrNotExist.
func (f *FS) lookup(op, name string) (*volume, string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	name = path.Clean(name)
	if v := f.volumes[name]; v != nil {
		return v, "", nil
	}
	if v := f.volumes[path.Dir(name)]; v != nil {
		return v, path.Base(name), nil
	}
	return nil, "", &fs.PathError{Op: op, Path: name, Err: fs.ErrNotExist}
}

// enter locks life for reading, which keeps the volume mounted.
func (v *volume) enter(op string) error {
	v.life.RLock()
	if v.closed {
		v.life.RUnlock()
		return &fs.PathError{Op: op, Path: v.dir, Err: fs.ErrClosed}
	}
	return nil
}

// OpenFile implements vfs.FS.
func (f *FS) OpenFile(name string, flags vfs.Flag) (vfs.File, error) {
	v, base, err := f.lookup("open", name)
	if err != nil {
		return nil, err
	}
	fail := func(err error) (vfs.File, error) {
		return nil, &fs.PathError{Op: "open", Path: name,
			Err: err}
	}
	switch {
	case base == "":
		return fail(syscall.EISDIR)
	case flags&vfs.Direct != 0:
		return fail(vfs.ErrNoDirect)
	}
	if err := v.enter("open"); err != nil {
		return nil, err
	}
	defer v.life.RUnlock()
	v.meta.Lock()
	defer v.meta.Unlock()
	i := v.head.find(base)
	switch {
	case i < 0 && flags&vfs.Create == 0:
		return fail(fs.ErrNotExist)
	case i >= 0 && flags&vfs.Create != 0 && flags&vfs.Exclusive != 0:
		return fail(fs.ErrExist)
	case i < 0 && !validName(base):
		return fail(syscall.ENAMETOOLONG)
	case i < 0 && len(v.head.files) >= MaxFiles:
		return fail(syscall.ENOSPC)
	case i < 0:
		next := v.head.clone()
		next.files = append(next.files, entry{name: base})
		if err := v.commit(next); err != nil {
			return fail(err)
		}
		i = len(next.files) - 1
	}
	n := v.open[base]
	if n == nil {
		e := &v.head.files[i]
		n = &node{v: v, name: base, at: e.at, capacity: e.capacity}
		n.size.Store(e.size)
		v.open[base] = n
	}
	n.users++
	return &file{n: n, readOnly: flags&vfs.ReadOnly != 0}, nil
}

// MkdirAll implements vfs.FS. Only mounted directories exist.
func (f *FS) MkdirAll(dir string) error {
	v, base, err := f.lookup("mkdir", dir)
	switch {
	case err != nil:
		return err
	case base == "":
		return v.dev.Linked() // files made in a removed file would be lost
	case v.has(base):
		return &fs.PathError{Op: "mkdir", Path: dir, Err: syscall.ENOTDIR}
	}
	return &fs.PathError{Op: "mkdir", Path: dir, Err: fs.ErrPermission}
}

func (v *volume) has(base string) bool {
	v.meta.Lock()
	defer v.meta.Unlock()
	return v.head.find(base) >= 0
}

// Remove implements vfs.FS. The piece of an open file is freed when the file is closed for the last
// time.
func (f *FS) Remove(name string) error {
	return f.change("remove", name, func(v *volume, next *header, i int) error {
		if e := next.files[i]; e.capacity > 0 {
			v.places[e.name] = e
		}
		next.files = slices.Delete(next.files, i, i+1)
		return nil
	}, func(v *volume, base string) { v.bury(base) })
}

// bury keeps the piece of a removed file from reuse while the file is open. The caller holds meta.
func (v *volume) bury(base string) {
	if n := v.open[base]; n != nil {
		delete(v.open, base)
		if n.users > 0 {
			v.ghosts = append(v.ghosts, n)
		}
	}
}

// Rename implements vfs.FS, within one partition.
func (f *FS) Rename(from, to string) error {
	v, _, err := f.lookup("rename", from)
	if err != nil {
		return err
	}
	w, base, err := f.lookup("rename", to)
	switch {
	case err != nil:
		return err
	case v != w || base == "":
		return &fs.PathError{Op: "rename", Path: to, Err: syscall.EXDEV}
	case !validName(base):
		return &fs.PathError{Op: "rename", Path: to, Err: syscall.ENAMETOOLONG}
	}
	return f.change("rename", from, func(v *volume, next *header, i int) error {
		if old := next.find(base); old >= 0 && old != i {
			next.files[i].name = ""
			next.files = slices.Delete(next.files, old, old+1)
			i = next.find("")
		}
		next.files[i].name = base
		return nil
	}, func(v *volume, old string) {
		if old == base {
			return
		}
		v.bury(base)
		if n := v.open[old]; n != nil {
			delete(v.open, old)
			n.name = base
			v.open[base] = n
		}
	})
}

// change commits a change of an existing file's entry.
func (f *FS) change(op, name string, edit func(v *volume, next *header, i int) error,
	done func(v *volume, base string)) error {
	v, base, err := f.lookup(op, name)
	if err != nil {
		return err
	}
	if err := v.enter(op); err != nil {
		return err
	}
	defer v.life.RUnlock()
	v.meta.Lock()
	defer v.meta.Unlock()
	next := v.head.clone()
	i := next.find(base)
	if i < 0 {
		return &fs.PathError{Op: op, Path: name, Err: fs.ErrNotExist}
	}
	if err := edit(v, next, i); err != nil {
		return &fs.PathError{Op: op, Path: name, Err: err}
	}
	if err := v.commit(next); err != nil {
		return &fs.PathError{Op: op, Path: name, Err: err}
	}
	done(v, base)
	return nil
}

// ReadDir implements vfs.FS.
func (f *FS) ReadDir(dir string) ([]string, error) {
	v, base, err := f.lookup("readdir", dir)
	if err != nil {
		return nil, err
	}
	if base != "" {
		err := error(fs.ErrNotExist)
		if v.has(base) {
			err = syscall.ENOTDIR
		}
		return nil, &fs.PathError{Op: "readdir", Path: dir, Err: err}
	}
	v.meta.Lock()
	defer v.meta.Unlock()
	names := []string{}
	for _, e := range v.head.files {
		names = append(names, e.name)
	}
	slices.Sort(names)
	return names, nil
}

// Stat implements vfs.FS.
func (f *FS) Stat(name string) (vfs.Info, error) {
	v, base, err := f.lookup("stat", name)
	if err != nil {
		return vfs.Info{}, err
	}
	if base == "" {
		return vfs.Info{Dir: true}, nil
	}
	v.meta.Lock()
	defer v.meta.Unlock()
	i := v.head.find(base)
	if i < 0 {
		return vfs.Info{}, &fs.PathError{Op: "stat", Path: name, Err: fs.ErrNotExist}
	}
	// Other processes cannot remove or replace a file in a partition. They can remove the file that
	// holds the whole partition.
	if err := v.dev.Linked(); err != nil {
		return vfs.Info{}, err
	}
	return vfs.Info{Size: v.head.files[i].size, Allocated: v.head.files[i].capacity,
		ID: vfs.FileID{Inode: 1}}, nil
}

// SyncDir implements vfs.FS. Directory entries are durable already.
func (f *FS) SyncDir(dir string) error {
	_, _, err := f.lookup("sync", dir)
	return err
}

// Lock implements vfs.FS, within this process. The partition's own lock excludes other processes.
// It writes nothing.
func (f *FS) Lock(name string) (io.Closer, error) {
	v, base, err := f.lookup("lock", name)
	if err != nil {
		return nil, err
	}
	v.meta.Lock()
	defer v.meta.Unlock()
	if v.locks[base] {
		return nil, &vfs.LockedError{Name: name, PID: os.Getpid()}
	}
	v.locks[base] = true
	return &lock{v: v, name: base}, nil
}

type lock struct {
	v    *volume
	name string
	once sync.Once
}

func (l *lock) Close() error {
	l.once.Do(func() {
		l.v.meta.Lock()
		delete(l.v.locks, l.name)
		l.v.meta.Unlock()
	})
	return nil
}

// FreeSpace implements vfs.FS. It returns the largest hole, because a file is one piece.
func (f *FS) FreeSpace(dir string) (int64, error) { return f.Hole(dir) }

// Capacity returns how many bytes the files of a partition can have together.
func (f *FS) Capacity(dir string) (int64, error) {
	v, _, err := f.lookup("statfs", dir)
	if err != nil {
		return 0, err
	}
	v.meta.Lock()
	defer v.meta.Unlock()
	return v.head.size/blockBytes*blockBytes - headBytes, nil
}

// CapacityOf returns the Capacity of a partition of the given size.
func CapacityOf(sizeBytes int64) int64 { return sizeBytes/blockBytes*blockBytes - headBytes }

// Device returns the device of a directory, or nil. The file system keeps owning it.
func (f *FS) Device(dir string) *dax.Device {
	f.mu.Lock()
	defer f.mu.Unlock()
	if v := f.volumes[path.Clean(dir)]; v != nil {
		return v.dev
	}
	return nil
}

// holes calls f for each hole in order, until f returns false. The caller holds meta.
func (v *volume) holes(h *header, f func(at, n int64) bool) {
	taken := h.pieces()
	for _, n := range v.ghosts {
		if n.capacity > 0 {
			taken = append(taken, entry{at: n.at, capacity: n.capacity})
		}
	}
	slices.SortFunc(taken, func(a, b entry) int {
		if a.at < b.at {
			return -1
		}
		return 1
	})
	at := int64(headBytes)
	for _, e := range append(taken, entry{at: h.size / blockBytes * blockBytes}) {
		if e.at > at && !f(at, e.at-at) {
			return
		}
		at = max(at, e.at+e.capacity)
	}
}

// Resize changes a partition's size: see dax.Device.Resize. Files do not move. It returns EBUSY if
// one lies beyond the new end.
func (f *FS) Resize(dir string, sizeBytes int64) error {
	v, base, err := f.lookup("resize", dir)
	if err != nil || base != "" {
		return errors.Join(err, &fs.PathError{Op: "resize", Path: dir, Err: fs.ErrNotExist})
	}
	v.life.Lock()
	defer v.life.Unlock()
	if v.closed {
		return &fs.PathError{Op: "resize", Path: dir, Err: fs.ErrClosed}
	}
	v.meta.Lock()
	defer v.meta.Unlock()
	end := int64(headBytes + blockBytes)
	for _, e := range v.head.files {
		end = max(end, e.at+e.capacity)
	}
	for _, n := range v.ghosts {
		end = max(end, n.at+n.capacity)
	}
	if sizeBytes < end {
		return &fs.PathError{Op: "resize", Path: dir, Err: fmt.Errorf("%w: %d bytes are in use",
			syscall.EBUSY, end)}
	}
	next := v.head.clone()
	next.size = sizeBytes
	if sizeBytes < v.head.size { // write the smaller size before memory goes
		if err := v.commit(next); err != nil {
			return err
		}
		return v.dev.Resize(sizeBytes)
	}
	if err := v.dev.Resize(sizeBytes); err != nil {
		return err
	}
	return v.commit(next)
}

// Unmount unmounts a partition and keeps its contents. It waits for calls under way. Calls on open
// files then return fs.ErrClosed.
func (f *FS) Unmount(dir string) error {
	f.mu.Lock()
	v := f.volumes[path.Clean(dir)]
	delete(f.volumes, path.Clean(dir))
	f.mu.Unlock()
	if v == nil {
		return &fs.PathError{Op: "unmount", Path: dir, Err: fs.ErrNotExist}
	}
	v.life.Lock()
	defer v.life.Unlock()
	v.closed = true
	v.meta.Lock()
	defer v.meta.Unlock()
	next := v.head.clone()
	next.pid = 0
	return errors.Join(v.commit(next), v.dev.Close())
}

// Close unmounts all partitions. It is idempotent.
func (f *FS) Close() error {
	f.mu.Lock()
	dirs := slices.Sorted(maps.Keys(f.volumes))
	f.mu.Unlock()
	var errs []error
	for _, dir := range dirs {
		if err := f.Unmount(dir); !errors.Is(err, fs.ErrNotExist) { // else unmounted by another
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// file is a vfs.File.
type file struct {
	n        *node
	readOnly bool
	closed   atomic.Bool
}

func (f *file) fail(op string, err error) error {
	return &fs.PathError{Op: op, Path: path.Join(f.n.v.dir, f.n.name), Err: err}
}

// ReadAt implements vfs.File.
func (f *file) ReadAt(p []byte, off int64) (int, error) {
	v := f.n.v
	if err := v.enter("read"); err != nil {
		return 0, err
	}
	defer v.life.RUnlock()
	size := f.n.size.Load()
	if off < 0 {
		return 0, f.fail("read", syscall.EINVAL)
	}
	n := int(min(int64(len(p)), max(size-off, 0)))
	if n > 0 {
		if err := v.copyOut(p[:n], f.n.at+off); err != nil {
			return 0, f.fail("read", f.n.locate(err))
		}
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

// WriteAt implements vfs.File.
func (f *file) WriteAt(p []byte, off int64) (int, error) {
	v, n := f.n.v, f.n
	if off < 0 || f.readOnly {
		return 0, f.fail("write", syscall.EBADF)
	}
	if len(p) == 0 {
		return 0, nil
	}
	if off+int64(len(p)) > n.size.Load() {
		if err := f.grow("write", off+int64(len(p))); err != nil {
			return 0, err
		}
	}
	if err := v.enter("write"); err != nil {
		return 0, err
	}
	defer v.life.RUnlock()
	if off+int64(len(p)) > n.size.Load() { // cut short meanwhile
		return 0, f.fail("write", io.ErrUnexpectedEOF)
	}
	failures := v.failures.Load()
	if err := v.copyIn(n.at+off, p); err != nil {
		return 0, f.fail("write", n.locate(err))
	}
	n.written(off, off+int64(len(p)), failures)
	return len(p), nil
}

// written records bytes for Datasync. It must be called after the copy. If it were called before, a
// concurrent Datasync could take the range, sync it half copied, and leave nothing for the copier's
// own Datasync. failures is the value of v.failures before the copy.
func (n *node) written(from, to, failures int64) {
	if n.v.dev.Direct() {
		return
	}
	n.dirty.Lock()
	if n.from == n.to {
		n.from, n.to, n.failures = from, to, failures
	} else {
		n.from, n.to, n.failures = min(n.from, from), max(n.to, to), min(n.failures, failures)
	}
	n.dirty.Unlock()
}

// Datasync implements vfs.File.
func (f *file) Datasync() error {
	v, n := f.n.v, f.n
	if err := v.enter("sync"); err != nil {
		return err
	}
	defer v.life.RUnlock()
	if v.dev.Direct() {
		return nil // WriteAt was durable
	}
	// Only one sync runs at a time. This call's bytes may be in a range that another sync has
	// taken, and they must be durable when this call returns.
	n.syncing.Lock()
	defer n.syncing.Unlock()
	if n.syncErr == nil {
		n.syncErr = n.sync()
	}
	if n.syncErr != nil { // kept, as the kernel forgets failed writes
		return f.fail("sync", n.syncErr)
	}
	return nil
}

// sync syncs what was written since the last sync. The caller holds syncing.
func (n *node) sync() error {
	n.dirty.Lock()
	from, to, failures := n.from, n.to, n.failures
	n.from, n.to = 0, 0
	n.dirty.Unlock()
	if from == to {
		return nil
	}
	return n.v.sync(n.at+from, to-from, failures)
}

// sync syncs n bytes of a regular file from off on. failures is the value of v.failures before they
// were written: a sync that has failed since may have failed for these bytes.
func (v *volume) sync(off, n, failures int64) error {
	if err := v.persist(off, n); err != nil {
		v.failures.Add(1)
		return err
	}
	if v.failures.Load() != failures {
		return fmt.Errorf("%w: another sync of %s has failed meanwhile", syscall.EIO, v.dev.Path())
	}
	return nil
}

// Allocate implements vfs.File, without zeroing: see the package comment.
func (f *file) Allocate(off, n int64) error {
	if off < 0 || n <= 0 || f.readOnly {
		return f.fail("allocate", syscall.EINVAL)
	}
	return f.grow("allocate", off+n)
}

// Truncate implements vfs.File. A file that it makes longer is allocated.
func (f *file) Truncate(size int64) error {
	switch {
	case size < 0 || f.readOnly:
		return f.fail("truncate", syscall.EINVAL)
	case size > f.n.size.Load():
		return f.grow("truncate", size)
	}
	v, n := f.n.v, f.n
	v.life.Lock()
	defer v.life.Unlock()
	if v.closed {
		return f.fail("truncate", fs.ErrClosed)
	}
	v.meta.Lock()
	defer v.meta.Unlock()
	return f.reshape("truncate", size, n.at, (size+blockBytes-1)/blockBytes*blockBytes)
}

// grow makes the file at least size bytes long.
func (f *file) grow(op string, size int64) error {
	v, n := f.n.v, f.n
	v.life.Lock()
	defer v.life.Unlock()
	if v.closed {
		return f.fail(op, fs.ErrClosed)
	}
	v.meta.Lock()
	defer v.meta.Unlock()
	if size <= n.size.Load() {
		return nil
	}
	if size <= n.capacity {
		return f.reshape(op, size, n.at, n.capacity)
	}
	want := (size + blockBytes - 1) / blockBytes * blockBytes
	at, was := int64(0), v.places[n.name]
	v.holes(v.head, func(from, length int64) bool {
		switch {
		case n.capacity > 0 && from == n.at+n.capacity && length >= want-n.capacity:
			at = n.at
		case n.capacity > 0:
		case was.capacity == want && from <= was.at && was.at+want <= from+length:
			at = was.at
			return false
		case at == 0 && length >= want: // first fit
			at = from
		}
		return true
	})
	if at == 0 {
		return f.fail(op, syscall.ENOSPC)
	}
	return f.reshape(op, size, at, want)
}

// reshape gives the file another piece. The caller holds life and meta.
func (f *file) reshape(op string, size, at, capacity int64) error {
	v, n := f.n.v, f.n
	if capacity == 0 {
		at = 0
	}
	next := v.head.clone()
	if i := next.find(n.name); i >= 0 && v.open[n.name] == n {
		next.files[i].at, next.files[i].capacity, next.files[i].size = at, capacity, size
		if err := v.commit(next); err != nil {
			return f.fail(op, err)
		}
	}
	n.at, n.capacity = at, capacity
	n.size.Store(size)
	return nil
}

// Size implements vfs.File.
func (f *file) Size() (int64, error) { return f.n.size.Load(), nil }

// DirectAlign implements vfs.File.
func (f *file) DirectAlign() (mem, offset int) { return 1, 1 }

// Advise implements vfs.File. There is no cache.
func (f *file) Advise(int64, int64, vfs.Advice) error { return nil }

// Close implements vfs.File.
func (f *file) Close() error {
	if f.closed.Swap(true) {
		return f.fail("close", fs.ErrClosed)
	}
	v, n := f.n.v, f.n
	v.meta.Lock()
	defer v.meta.Unlock()
	if n.users--; n.users == 0 {
		if v.open[n.name] == n {
			delete(v.open, n.name)
		}
		v.ghosts = slices.DeleteFunc(v.ghosts, func(g *node) bool { return g == n })
	}
	return nil
}

// copyOut copies from the partition. The caller holds life, or is the only user.
func (v *volume) copyOut(p []byte, at int64) error {
	mem := v.dev.Bytes()[at : at+int64(len(p))]
	for {
		n := min(len(p), memcopy.PieceBytes)
		if err := v.guard(func() { memcopy.Copy(p[:n], mem[:n]) }, at, mem[:n], p[:n]); err != nil {
			return err
		}
		if p, mem = p[n:], mem[n:]; len(p) == 0 {
			return nil
		}
		at += int64(n)
		runtime.Gosched() // without it lookups wait for copies
	}
}

// copyIn copies into the partition; on a device durably.
func (v *volume) copyIn(at int64, p []byte) error {
	mem := v.dev.Bytes()[at : at+int64(len(p))]
	direct := v.dev.Direct()
	for {
		n := min(len(p), memcopy.PieceBytes)
		if err := v.guard(func() { memcopy.Copy(mem[:n], p[:n]) }, at, mem[:n], p[:n]); err != nil {
			return err
		}
		if direct {
			from, to := memcopy.Streamed(mem[:n])
			for _, cached := range [][2]int{{0, from}, {to, n}} {
				if err := v.dev.Persist(at+int64(cached[0]),
					int64(cached[1]-cached[0])); err != nil {
					return fmt.Errorf("%w: %w", syscall.EIO, err)
				}
			}
		}
		if p, mem = p[n:], mem[n:]; len(p) == 0 {
			return nil
		}
		at += int64(n)
		runtime.Gosched()
	}
}

// guard calls f, which accesses memory of the partition, from byte at on, and memory of the caller.
// It returns a *faultError for a fault in the partition.
func (v *volume) guard(f func(), at int64, mem, p []byte) error {
	err := dax.Guard(f, mem, p)
	var fault *dax.FaultError
	if errors.As(err, &fault) && fault.Slice == 0 {
		return &faultError{v.dev.Path(), at + fault.Offset}
	}
	return err
}

// faultError is an I/O error of a partition. It is not a dax.ErrFault, which means the caller's
// memory.
type faultError struct {
	device string
	at     int64
}

func (e *faultError) Error() string {
	return fmt.Sprintf("%v: the memory of %s faults at byte %d of the partition", syscall.EIO,
		e.device, e.at)
}

func (e *faultError) Unwrap() error { return syscall.EIO }

// locate turns an error of a copy into a *vfs.BadPlaceError, unless the whole file is bad. The
// caller holds life.
func (n *node) locate(err error) error {
	var fault *faultError
	if !errors.As(err, &fault) || fault.at < n.at+blockBytes ||
		n.v.copyOut(make([]byte, 1), n.at) != nil {
		return err
	}
	return &vfs.BadPlaceError{Off: fault.at - n.at, Err: err}
}
