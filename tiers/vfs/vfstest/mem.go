// Package vfstest has file systems for tests of code that uses package vfs. Mem is in memory, and
// can be cloned as a power cut would leave it. Faulty injects faults into any other file system.
package vfstest

import (
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/bits"
	"math/rand/v2"
	"os"
	"path"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"lookaside/tiers/vfs"
)

// Mem is a file system in memory. It keeps synced and unsynced changes apart, so that CrashClone
// knows what a power cut may leave. Set the exported fields before use.
type Mem struct {
	// SpaceBytes is how much files may allocate before writes fail with ENOSPC. Default 0: 1 TiB.
	SpaceBytes int64
	// Align is the alignment of addresses, offsets and lengths that Direct requires; other calls
	// fail with EINVAL. 0: direct I/O is refused.
	Align   int
	onWrite atomic.Pointer[func()]

	mu    sync.Mutex
	root  *memNode
	used  int64           // blocks in the current images of files × memBlock
	locks map[string]bool // by clean name
}

// memBlock is the unit of files' images. A block in an image is immutable, so images share blocks,
// and cloning copies none.
const memBlock = 4096

// memSector is the unit that a disk writes whole or not at all.
const memSector = 512

type block = [memBlock]byte

// leaf has the blocks of a piece of a file; nil is a hole. A leaf in an image is immutable too:
// changing an image copies the leaves that it touches, 8 KiB for 4 MiB of file.
type leaf [1024]*block

const leafBytes = int64(len(leaf{})) * memBlock

var (
	zeroBlock block
	zeroLeaf  = func() *leaf {
		l := new(leaf)
		for i := range l {
			l[i] = &zeroBlock
		}
		return l
	}()
)

type image struct {
	size   int64
	leaves map[int64]*leaf
	n      int64 // blocks
}

func newImage() image { return image{leaves: map[int64]*leaf{}} }

func (im *image) clone() image { return image{im.size, maps.Clone(im.leaves), im.n} }

// pieces calls do for each leaf that [off, end) touches, with the range of its blocks.
func pieces(off, end int64, do func(at int64, lo, hi int)) {
	for at := off / leafBytes; at*leafBytes < end; at++ {
		lo := max(off-at*leafBytes, 0) / memBlock
		hi := (min(end-at*leafBytes, leafBytes) + memBlock - 1) / memBlock
		do(at, int(lo), int(hi))
	}
}

// edit returns a leaf of the image that may be changed while nobody else sees the image.
func (im *image) edit(at int64) *leaf {
	l := new(leaf)
	if old := im.leaves[at]; old != nil {
		*l = *old
	}
	im.leaves[at] = l
	return l
}

// memOp is a change of a file that is not durable yet: bytes at an offset, or a size if data is
// nil.
type memOp struct {
	off  int64
	data []byte
	size int64 // of the file after it
	hold bool  // an allocation: [off, size) gets blocks
}

// dirOp is a change of a directory that is not durable yet.
type dirOp struct {
	name string
	node *memNode // nil: removed
	from string   // a rename: the entry that goes at the same time
}

// memNode is a file or a directory.
type memNode struct {
	dir bool
	// A file.
	id      uint64
	now     image
	durable image
	pending []memOp
	// A directory.
	entries    map[string]*memNode
	durEntries map[string]*memNode
	dirOps     []dirOp
	nlink      int // entries in the current tree
	open       int
}

// NewMem returns an empty file system with the root directory "/". A name without a leading "/"
// gets one.
func NewMem() *Mem {
	return &Mem{Align: memSector, root: newMemDir(), locks: map[string]bool{}}
}

func newMemDir() *memNode {
	return &memNode{dir: true, entries: map[string]*memNode{}, durEntries: map[string]*memNode{}}
}

func newMemFile() *memNode {
	return &memNode{id: memFiles.Add(1), now: newImage(), durable: newImage()}
}

// memFiles numbers the files of all Mems.
var memFiles atomic.Uint64

func clean(name string) string { return path.Clean("/" + name) }

// find returns the node of a name, or a bare errno.
func (m *Mem) find(name string) (*memNode, error) {
	at := m.root
	for part := range strings.SplitSeq(clean(name)[1:], "/") {
		if part == "" {
			continue
		}
		if !at.dir {
			return nil, syscall.ENOTDIR
		}
		next := at.entries[part]
		if next == nil {
			return nil, syscall.ENOENT
		}
		at = next
	}
	return at, nil
}

// parent returns the directory of a name, and the name in it.
func (m *Mem) parent(name string) (*memNode, string, error) {
	dir, base := path.Split(clean(name))
	if base == "" {
		return nil, "", syscall.EINVAL
	}
	d, err := m.find(dir)
	if err != nil {
		return nil, "", err
	}
	if !d.dir {
		return nil, "", syscall.ENOTDIR
	}
	return d, base, nil
}

func pathError(op, name string, err error) error {
	if err == nil {
		return nil
	}
	return &fs.PathError{Op: op, Path: name, Err: err}
}

// OnWrite sets a function that is called after each change: a write, truncation, allocation, sync,
// or change of a directory. It runs on the goroutine of the change, with no lock held, so it may
// clone. nil ends the calls. OnWrite may be called while files are in use.
func (m *Mem) OnWrite(f func()) {
	if f == nil {
		m.onWrite.Store(nil)
		return
	}
	m.onWrite.Store(&f)
}

func (m *Mem) changed() {
	if f := m.onWrite.Load(); f != nil {
		(*f)()
	}
}

func (m *Mem) space() int64 {
	if m.SpaceBytes == 0 {
		return 1 << 40
	}
	return m.SpaceBytes
}

// OpenFile implements FS.
func (m *Mem) OpenFile(name string, flags vfs.Flag) (vfs.File, error) {
	if flags&vfs.Direct != 0 && m.Align == 0 {
		return nil, pathError("open", name, vfs.ErrNoDirect)
	}
	m.mu.Lock()
	d, base, err := m.parent(name)
	if err != nil {
		m.mu.Unlock()
		return nil, pathError("open", name, err)
	}
	made := false
	n := d.entries[base]
	switch {
	case n == nil && flags&vfs.Create == 0:
		err = syscall.ENOENT
	case n == nil:
		n = newMemFile()
		n.nlink = 1
		d.entries[base] = n
		d.dirOps = append(d.dirOps, dirOp{name: base, node: n})
		made = true
	case n.dir:
		err = syscall.EISDIR
	case flags&(vfs.Create|vfs.Exclusive) == vfs.Create|vfs.Exclusive:
		err = syscall.EEXIST
	}
	if err == nil {
		n.open++
	}
	m.mu.Unlock()
	if err != nil {
		return nil, pathError("open", name, err)
	}
	if made {
		m.changed()
	}
	align := 1
	if flags&vfs.Direct != 0 {
		align = m.Align
	}
	return &memFile{m: m, n: n, name: name, align: align, readOnly: flags&vfs.ReadOnly != 0}, nil
}

// MkdirAll implements FS.
func (m *Mem) MkdirAll(dir string) error {
	m.mu.Lock()
	at, made := m.root, false
	for part := range strings.SplitSeq(clean(dir)[1:], "/") {
		if part == "" {
			continue
		}
		next := at.entries[part]
		if next == nil {
			next = newMemDir()
			next.nlink = 1
			at.entries[part] = next
			at.durEntries[part] = next // durable at once, as MkdirAll promises
			made = true
		}
		if !next.dir {
			m.mu.Unlock()
			return pathError("mkdir", dir, syscall.ENOTDIR)
		}
		at = next
	}
	m.mu.Unlock()
	if made {
		m.changed()
	}
	return nil
}

// unlinked frees the space of a node without names and descriptors.
func (m *Mem) unlinked(n *memNode) {
	if n.nlink == 0 && n.open == 0 {
		m.used -= n.now.n * memBlock
		n.now = newImage()
	}
}

// Remove implements FS.
func (m *Mem) Remove(name string) error {
	m.mu.Lock()
	d, base, err := m.parent(name)
	if err == nil {
		switch n := d.entries[base]; {
		case n == nil:
			err = syscall.ENOENT
		case n.dir && len(n.entries) > 0:
			err = syscall.ENOTEMPTY
		default:
			delete(d.entries, base)
			d.dirOps = append(d.dirOps, dirOp{name: base})
			n.nlink--
			m.unlinked(n)
		}
	}
	m.mu.Unlock()
	if err != nil {
		return pathError("remove", name, err)
	}
	m.changed()
	return nil
}

// Rename implements FS. Both names must be in one directory.
func (m *Mem) Rename(from, to string) error {
	m.mu.Lock()
	d, base, err := m.parent(from)
	td, tbase, terr := m.parent(to)
	switch {
	case err != nil:
	case terr != nil:
		err = terr
	case d != td:
		err = syscall.EXDEV
	case d.entries[base] == nil:
		err = syscall.ENOENT
	case d.entries[tbase] != nil && (d.entries[tbase].dir || d.entries[base].dir):
		err = syscall.EISDIR
	case base != tbase:
		n, old := d.entries[base], d.entries[tbase]
		delete(d.entries, base)
		d.entries[tbase] = n
		d.dirOps = append(d.dirOps, dirOp{name: tbase, node: n, from: base})
		if old != nil {
			old.nlink--
			m.unlinked(old)
		}
	}
	m.mu.Unlock()
	if err != nil {
		return &os.LinkError{Op: "rename", Old: from, New: to, Err: err}
	}
	m.changed()
	return nil
}

// ReadDir implements FS.
func (m *Mem) ReadDir(dir string) ([]string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n, err := m.find(dir)
	if err == nil && !n.dir {
		err = syscall.ENOTDIR
	}
	if err != nil {
		return nil, pathError("readdir", dir, err)
	}
	return slices.Sorted(maps.Keys(n.entries)), nil
}

// Stat implements FS.
func (m *Mem) Stat(name string) (vfs.Info, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n, err := m.find(name)
	if err != nil {
		return vfs.Info{}, pathError("stat", name, err)
	}
	return vfs.Info{Dir: n.dir, Size: n.now.size, Allocated: n.now.n * memBlock,
		ID: vfs.FileID{Inode: n.id}}, nil
}

// SyncDir implements FS.
func (m *Mem) SyncDir(dir string) error {
	m.mu.Lock()
	n, err := m.find(dir)
	if err == nil && !n.dir {
		err = syscall.ENOTDIR
	}
	if err == nil {
		n.durEntries = maps.Clone(n.entries)
		n.dirOps = nil
	}
	m.mu.Unlock()
	if err != nil {
		return pathError("sync", dir, err)
	}
	m.changed()
	return nil
}

// Lock implements FS. Locks belong to this Mem; a clone has none.
func (m *Mem) Lock(name string) (io.Closer, error) {
	f, err := m.OpenFile(name, vfs.Create)
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	taken := m.locks[clean(name)]
	m.locks[clean(name)] = true
	m.mu.Unlock()
	if taken {
		f.Close()
		return nil, &vfs.LockedError{Name: name, PID: os.Getpid()}
	}
	if _, err := f.WriteAt(fmt.Appendf(nil, "%d\n", os.Getpid()), 0); err != nil &&
		!vfs.IsNoSpace(err) {
		f.Close()
		return nil, err
	}
	return &memLock{m: m, name: clean(name), f: f}, nil
}

type memLock struct {
	m    *Mem
	name string
	f    vfs.File
}

func (l *memLock) Close() error {
	l.m.mu.Lock()
	delete(l.m.locks, l.name)
	l.m.mu.Unlock()
	return l.f.Close()
}

// FreeSpace implements FS.
func (m *Mem) FreeSpace(dir string) (int64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, err := m.find(dir); err != nil {
		return 0, pathError("statfs", dir, err)
	}
	return max(m.space()-m.used, 0), nil
}

// CrashClone returns the file system as it may be after a power cut now. It has all that was
// synced. Of each other change it has all, nothing, or some sectors, as the seed decides. Changes
// of a directory survive in order up to some point, as with journals. The clone is independent of
// m, and everything in it is durable.
func (m *Mem) CrashClone(seed uint64) *Mem {
	m.mu.Lock()
	defer m.mu.Unlock()
	c := NewMem()
	c.SpaceBytes, c.Align = m.SpaceBytes, m.Align
	rnd := rand.New(rand.NewPCG(seed, 0x6c6f6f6b))
	// The likelihood that a change survives is drawn too, so that clones in which nearly all or
	// nearly none did are common.
	c.root = c.crashed(m.root, rnd, rnd.Float64())
	return c
}

// Clone returns the file system as it is, all of it durable: the state after an orderly shutdown.
func (m *Mem) Clone() *Mem {
	m.mu.Lock()
	defer m.mu.Unlock()
	c := NewMem()
	c.SpaceBytes, c.Align = m.SpaceBytes, m.Align
	c.root = c.crashed(m.root, nil, 1)
	return c
}

// crashed copies a node with the changes that survive; with a nil rnd all do.
func (c *Mem) crashed(n *memNode, rnd *rand.Rand, likely float64) *memNode {
	if !n.dir {
		f := newMemFile()
		f.nlink = 1
		if rnd == nil {
			f.now = n.now.clone()
		} else {
			f.now = n.durable.clone()
			for _, op := range n.pending {
				crashOp(&f.now, op, rnd, likely)
			}
		}
		f.durable = f.now.clone()
		c.used += f.now.n * memBlock
		return f
	}
	entries := n.entries
	if rnd != nil {
		entries = maps.Clone(n.durEntries)
		lasting := 0
		for lasting < len(n.dirOps) && rnd.Float64() < likely {
			lasting++
		}
		for _, op := range n.dirOps[:lasting] {
			delete(entries, op.from)
			if op.node == nil {
				delete(entries, op.name)
			} else {
				entries[op.name] = op.node
			}
		}
	}
	d := newMemDir()
	d.nlink = 1
	for _, name := range slices.Sorted(maps.Keys(entries)) {
		// in order: a seed must always give the same clone
		d.entries[name] = c.crashed(entries[name], rnd, likely)
	}
	d.durEntries = maps.Clone(d.entries)
	return d
}

// crashOp applies the surviving part of a change.
func crashOp(im *image, op memOp, rnd *rand.Rand, likely float64) {
	if op.data == nil {
		if rnd.Float64() < likely {
			im.apply(op)
		}
		return
	}
	torn := rnd.Float64() < 0.3
	if !torn {
		if rnd.Float64() < likely {
			im.apply(op)
		}
		return
	}
	// Each sector shares the fate of the one before as often as not.
	keep := rnd.Float64() < likely
	for at := op.off; at < op.off+int64(len(op.data)); {
		end := min(at-at%memSector+memSector, op.off+int64(len(op.data)))
		if keep {
			im.write(at, op.data[at-op.off:end-op.off])
		}
		if rnd.IntN(4) == 0 {
			keep = rnd.Float64() < likely
		}
		at = end
	}
}

// apply applies a change. It returns how many blocks it added.
func (im *image) apply(op memOp) int64 {
	before := im.n
	switch {
	case op.data != nil:
		im.write(op.off, op.data)
	case op.hold:
		im.hold(op.off, op.size)
	default:
		im.truncate(op.size)
	}
	return im.n - before
}

func (im *image) write(off int64, p []byte) {
	end := off + int64(len(p))
	im.size = max(im.size, end)
	pieces(off, end, func(at int64, lo, hi int) {
		l := im.edit(at)
		for b := lo; b < hi; b++ {
			begin := at*leafBytes + int64(b)*memBlock
			in := max(off-begin, 0)
			next := new(block)
			if old := l[b]; old == nil {
				im.n++
			} else if in > 0 || end < begin+memBlock {
				*next = *old
			}
			copy(next[in:], p[begin+in-off:])
			l[b] = next
		}
	})
}

func (im *image) hold(off, end int64) {
	im.size = max(im.size, end)
	pieces(off, end, func(at int64, lo, hi int) {
		if im.leaves[at] == nil && lo == 0 && hi == len(leaf{}) {
			im.leaves[at] = zeroLeaf
			im.n += int64(hi)
			return
		}
		l := im.edit(at)
		for b := lo; b < hi; b++ {
			if l[b] == nil {
				l[b] = &zeroBlock
				im.n++
			}
		}
	})
}

func (im *image) truncate(size int64) {
	if size < im.size {
		keep := (size + memBlock - 1) / memBlock * memBlock
		for at, old := range im.leaves {
			from := max(keep-at*leafBytes, 0) / memBlock
			if from >= int64(len(leaf{})) {
				continue
			}
			for _, b := range old[from:] {
				if b != nil {
					im.n--
				}
			}
			if from == 0 {
				delete(im.leaves, at)
			} else {
				clear(im.edit(at)[from:])
			}
		}
		if in := size % memBlock; in != 0 && im.at(size) != nil {
			next := *im.at(size)
			clear(next[in:])
			im.edit(size / leafBytes)[size%leafBytes/memBlock] = &next
		}
	}
	im.size = size
}

// at returns the block at an offset; nil in a hole.
func (im *image) at(off int64) *block {
	if l := im.leaves[off/leafBytes]; l != nil {
		return l[off%leafBytes/memBlock]
	}
	return nil
}

func (im *image) read(p []byte, off int64) int {
	if off >= im.size {
		return 0
	}
	p = p[:min(int64(len(p)), im.size-off)]
	total := len(p)
	for len(p) > 0 {
		in := off % memBlock
		n := min(memBlock-int(in), len(p))
		if b := im.at(off); b != nil {
			copy(p[:n], b[in:])
		} else {
			clear(p[:n])
		}
		p, off = p[n:], off+int64(n)
	}
	return total
}

// missing returns how many blocks of [off, end) the image lacks.
func (im *image) missing(off, end int64) (n int64) {
	pieces(off, end, func(at int64, lo, hi int) {
		l := im.leaves[at]
		if l == nil {
			n += int64(hi - lo)
			return
		}
		for _, b := range l[lo:hi] {
			if b == nil {
				n++
			}
		}
	})
	return n
}

// take replaces the blocks of [off, end) by those of another image, which is not shorter there.
func (im *image) take(from *image, off, end int64) {
	pieces(off, end, func(at int64, lo, hi int) {
		src := from.leaves[at]
		if src == nil || src == im.leaves[at] {
			return
		}
		dst := im.edit(at)
		for b := lo; b < hi; b++ {
			if dst[b] == nil && src[b] != nil {
				im.n++
			}
			dst[b] = src[b]
		}
	})
}

type memFile struct {
	m        *Mem
	n        *memNode
	name     string
	align    int
	readOnly bool
	closed   bool // guarded by m.mu
}

func (f *memFile) aligned(p []byte, off int64) error {
	if off < 0 {
		return syscall.EINVAL
	}
	if f.align == 1 || len(p) == 0 {
		return nil
	}
	mask := uint64(f.align - 1)
	if bits.OnesCount(uint(f.align)) != 1 ||
		(uint64(off)|uint64(len(p))|uint64(reflect.ValueOf(p).Pointer()))&mask != 0 {
		return syscall.EINVAL
	}
	return nil
}

func (f *memFile) ReadAt(p []byte, off int64) (int, error) {
	if err := f.aligned(p, off); err != nil {
		return 0, pathError("read", f.name, err)
	}
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	if f.closed {
		return 0, pathError("read", f.name, fs.ErrClosed)
	}
	n := f.n.now.read(p, off)
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

// change applies a change of the file, if there is room for it.
func (f *memFile) change(what string, op memOp) error {
	f.m.mu.Lock()
	err := func() error {
		switch {
		case f.closed:
			return fs.ErrClosed
		case f.readOnly:
			return syscall.EBADF
		}
		need := int64(0)
		if op.data != nil {
			need = f.n.now.missing(op.off, op.off+int64(len(op.data)))
		} else if op.hold {
			need = f.n.now.missing(op.off, op.size)
		}
		if f.m.used+need*memBlock > f.m.space() {
			return syscall.ENOSPC
		}
		f.m.used += f.n.now.apply(op) * memBlock
		f.n.pending = append(f.n.pending, op)
		return nil
	}()
	f.m.mu.Unlock()
	if err != nil {
		return pathError(what, f.name, err)
	}
	f.m.changed()
	return nil
}

func (f *memFile) WriteAt(p []byte, off int64) (int, error) {
	if err := f.aligned(p, off); err != nil {
		return 0, pathError("write", f.name, err)
	}
	if len(p) == 0 {
		return 0, nil
	}
	if err := f.change("write", memOp{off: off, data: slices.Clone(p)}); err != nil {
		return 0, err
	}
	return len(p), nil
}

func (f *memFile) Allocate(off, n int64) error {
	if off < 0 || n <= 0 {
		return pathError("fallocate", f.name, syscall.EINVAL)
	}
	return f.change("fallocate", memOp{off: off, size: off + n, hold: true})
}

func (f *memFile) Truncate(size int64) error {
	if size < 0 {
		return pathError("truncate", f.name, syscall.EINVAL)
	}
	return f.change("truncate", memOp{size: size})
}

func (f *memFile) Size() (int64, error) {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	if f.closed {
		return 0, pathError("stat", f.name, fs.ErrClosed)
	}
	return f.n.now.size, nil
}

func (f *memFile) Datasync() error {
	f.m.mu.Lock()
	if f.closed {
		f.m.mu.Unlock()
		return pathError("fdatasync", f.name, fs.ErrClosed)
	}
	f.n.settle()
	f.m.mu.Unlock()
	f.m.changed()
	return nil
}

// settle makes the pending changes durable: the blocks that they touched are copied from the
// current image.
func (n *memNode) settle() {
	for _, op := range n.pending {
		if op.data == nil && !op.hold { // a truncation may touch them all
			n.durable = n.now.clone()
			n.pending = nil
			return
		}
	}
	for _, op := range n.pending {
		end := op.size
		if op.data != nil {
			end = op.off + int64(len(op.data))
		}
		n.durable.take(&n.now, op.off, end)
	}
	n.durable.size = n.now.size
	n.pending = nil
}

// failSync applies a failed sync. Some bytes were written. The kernel marks the others as clean, so
// they read as before but are never written.
func (f *memFile) failSync(seed uint64) {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	rnd := rand.New(rand.NewPCG(seed, 0x6661696c))
	for _, op := range f.n.pending {
		crashOp(&f.n.durable, op, rnd, 0.5)
	}
	f.n.pending = nil
}

func (f *memFile) Advise(int64, int64, vfs.Advice) error { return nil }

func (f *memFile) DirectAlign() (mem, offset int) { return f.align, f.align }

func (f *memFile) Close() error {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	if f.closed {
		return pathError("close", f.name, fs.ErrClosed)
	}
	f.closed = true
	f.n.open--
	f.m.unlinked(f.n)
	return nil
}
