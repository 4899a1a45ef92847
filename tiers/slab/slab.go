package slab

import (
	"errors"
	"fmt"
	"path"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"

	"lookaside/dax"
	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/slab/media"
	"lookaside/tiers/vfs"
)

// place is where a slab's file lies. It is blank (nothing in it), carved (a slab), or off (it does
// not work).
type place struct {
	home  *directory
	index uint32
	bytes int64
	slab  *slab // nil: blank or off; guarded by Disk.shape
	// retired: it is not carved any more, and its region, if any, is drained; changed under
	// Disk.shape. gone: it has left the store; guarded by Disk.shape.
	retired atomic.Bool
	gone    bool
	// fresh: only a header was ever written to the file; guarded by Disk.shape.
	fresh bool
	epoch uint64 // of its header; guarded by Disk.shape
	// unfit is the last geometry for which the place was too small; guarded by Disk.shape.
	unfit tiers.Geometry

	mu  sync.Mutex
	off error // why it was given up; guarded by mu
}

func (p *place) name() string { return path.Join(p.home.path, SlabName(p.index)) }

// failure returns why the place was given up, or nil.
func (p *place) failure() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.off
}

func (p *place) setFailure(err error) {
	p.mu.Lock()
	p.off = err
	p.mu.Unlock()
}

// State of a slot's entry on the medium, as bits.
const (
	written = 1 << iota // an entry may be on the medium
	stale               // the entry is of a chunk that the engine has freed
	blanked             // the entry was freed too, but that is not synced
)

// slab is a place's file, from one carving to the next. A place that is carved or made anew gets
// another slab.
type slab struct {
	place  *place
	region uint32
	header media.Header
	id     media.Identity
	layout *media.Layout
	// through the page cache: for headers, the directory, and data unfit for O_DIRECT
	buffed  vfs.File
	direct  vfs.File // nil: O_DIRECT is not available
	align   int      // of addresses, offsets and lengths in direct
	file    vfs.FileID
	failed  atomic.Bool
	usedAt  atomic.Int64 // ns since the tier was opened
	faults  atomic.Int32 // consecutive failures of I/O
	spoiled atomic.Int32 // slots that are out of use

	// life is held for reading by a user of the files or tables who has no lease on a slot, for
	// writing to close them.
	life   sync.RWMutex
	closed bool
	sums   *dax.Table[uint64] // checksums of the pages, by slot
	// Generation of each slot's contents. An entry belongs to the slot's writer and to readers with
	// a lease; in an arena mu guards it.
	gens *dax.Table[uint64]

	fills atomic.Uint64 // generations given out
	base  int64         // of an arena: where the workers' mapping begins in the file
	told  sync.Once     // of an arena: for the call of Removed
	// lastUse, of an arena, is the engine's last use of the region as last seen by noteUse.
	lastUse atomic.Uint64

	order    sync.Mutex // held while an entry is written
	entries  []byte     // buffer for encoding
	lastDone uint64     // the commit number of the last entry that was written
	stable   uint64     // commits up to this one are durable

	syncs    group
	flushing sync.Mutex // held by freeStale and hideStale, outside order

	mu    sync.Mutex
	slots []uint8  // by slot: written, stale
	kept  int      // slots that are written and not stale
	frees []uint32 // candidates: stale slots that are not blanked
	blank []uint32 // candidates: blanked slots
}

// group lets goroutines that need a sync of the same file share one.
type group struct {
	mu      sync.Mutex
	cond    *sync.Cond
	running bool
	started uint64
	done    uint64
	err     error // of the last call
}

// do returns after a call of f that began after do was called, with its error.
func (g *group) do(f func() error) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.cond == nil {
		g.cond = sync.NewCond(&g.mu)
	}
	want := g.started + 1
	for g.done < want {
		if g.running {
			g.cond.Wait()
			continue
		}
		g.running = true
		g.started++
		n := g.started
		g.mu.Unlock()
		err := f()
		g.mu.Lock()
		g.running, g.done = false, n
		if g.err == nil {
			g.err = err // after a failure everything later is in doubt
		}
		g.cond.Broadcast()
	}
	return g.err
}

// sync makes all writes before it durable. After one failure every sync fails.
func (s *slab) sync() error {
	return s.syncs.do(func() error {
		s.order.Lock()
		upTo := s.lastDone
		s.order.Unlock()
		if err := s.buffed.Datasync(); err != nil {
			return err
		}
		s.order.Lock()
		s.stable = max(s.stable, upTo)
		s.order.Unlock()
		return nil
	})
}

// maxRun is the most bytes of the directory that one write covers, but at least one entry.
const maxRun = 256 << 10

// runs calls do for each run of neighbours in sorted slots. Fewer writes are faster: ext4 makes
// each write through the page cache wait for all direct writes in progress to the file.
func (s *slab) runs(slots []uint32, do func(from, to int)) {
	for from := 0; from < len(slots); {
		to := from + 1
		for to < len(slots) && slots[to] == slots[to-1]+1 &&
			(to-from+1)*s.layout.EntryBytes <= maxRun {
			to++
		}
		do(from, to)
		from = to
	}
}

// writeEntries writes the entries of neighbouring slots. They get the next commit numbers.
func (s *slab) writeEntries(d *Disk, first uint32, entries []media.Entry) error {
	s.order.Lock()
	defer s.order.Unlock()
	size := s.layout.EntryBytes
	s.entries = slices.Grow(s.entries[:0], len(entries)*size)[:len(entries)*size]
	for i := range entries {
		e := &entries[i]
		e.Commit, e.Stable = d.commits.Add(1), s.stable
		s.layout.EncodeEntry(s.entries[i*size:], s.id, int(first)+i, e)
	}
	s.mu.Lock()
	for i := range entries {
		s.mark(int(first)+i, written)
	}
	s.mu.Unlock()
	if _, err := s.buffed.WriteAt(s.entries, s.layout.EntryOffset(int(first))); err != nil {
		return err
	}
	s.lastDone = entries[len(entries)-1].Commit
	return nil
}

// mark sets the state of a slot's entry. The caller holds mu, or is the only user.
func (s *slab) mark(slot int, now uint8) {
	was := s.slots[slot]
	s.slots[slot] = now
	if was&(written|stale) == written {
		s.kept--
	}
	if now&(written|stale) == written {
		s.kept++
	}
}

// isKept reports whether the medium has an entry of the slot's current chunk.
func (s *slab) isKept(slot int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.slots[slot]&(written|stale) == written
}

// setSums sets the generation of a slot's contents and the checksums of its pages.
func (s *slab) setSums(slot int, gen uint64, sums []uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gens.Slice()[slot] = gen
	copy(s.pageSums(slot), sums)
}

// getSums appends the checksums of a slot's first pages to out. It also returns their generation.
func (s *slab) getSums(slot, pages int, out []uint64) (gen uint64, sums []uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.gens.Slice()[slot], append(out, s.pageSums(slot)[:pages]...)
}

// corrupt returns the error for a page that does not match its checksum.
func (s *slab) corrupt(page, slot int) error {
	return fmt.Errorf("%w: page %d in slot %d of %s", tiers.ErrCorrupt, page, slot, s.place.name())
}

// noteFree marks a slot's entry as stale. After this call, anything already written for the slot
// describes content that no longer exists.
func (s *slab) noteFree(slot uint32) {
	s.mu.Lock()
	if s.slots[slot]&(written|stale) == written {
		s.mark(int(slot), s.slots[slot]|stale)
		s.frees = append(s.frees, slot)
	}
	s.mu.Unlock()
}

// zeros is the largest run of freed entries: an entry of zeros is free.
var zeros = make([]byte, maxRun)

// free writes free entries for n neighbouring slots. The caller holds order.
func (s *slab) free(first uint32, n int) error {
	_, err := s.buffed.WriteAt(zeros[:(n-1)*s.layout.EntryBytes+len(freeEntry)],
		s.layout.EntryOffset(int(first)))
	return err
}

var freeEntry = media.FreeEntry()

// freeSlots frees the entries of sorted slots that the caller was granted. It calls wrote for each
// slot whose entry it had to write, with the error of that.
func (s *slab) freeSlots(slots []uint32, wrote func(slot uint32, err error)) {
	s.order.Lock()
	defer s.order.Unlock()
	s.mu.Lock()
	slots = slices.Clone(slots)
	slots = slices.DeleteFunc(slots, func(slot uint32) bool {
		was := s.slots[slot]
		s.mark(int(slot), 0) // the caller syncs before it uses the slot
		return was&written == 0
	})
	s.mu.Unlock()
	s.runs(slots, func(from, to int) {
		err := s.free(slots[from], to-from)
		if err != nil {
			s.mu.Lock()
			for _, slot := range slots[from:to] {
				s.mark(int(slot), written|stale)
				s.frees = append(s.frees, slot)
			}
			s.mu.Unlock()
		}
		for _, slot := range slots[from:to] {
			wrote(slot, err)
		}
	})
}

// freeStale durably frees the entries of all chunks that the engine has freed. It skips slots that
// are granted again meanwhile: they belong to their writers.
func (s *slab) freeStale() error {
	s.flushing.Lock()
	defer s.flushing.Unlock()
	if err := s.blankStale(); err != nil {
		return err
	}
	s.mu.Lock()
	done := len(s.blank) == 0
	s.mu.Unlock()
	if done {
		return nil
	}
	if err := s.sync(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, slot := range s.blank {
		if s.slots[slot] == written|stale|blanked {
			s.slots[slot] = 0
		}
	}
	s.blank = s.blank[:0]
	return nil
}

// hideStale blanks stale entries without syncing: enough for a process crash, not for a power cut.
func (s *slab) hideStale() error {
	s.flushing.Lock()
	defer s.flushing.Unlock()
	return s.blankStale()
}

// blankStale writes free entries over stale ones. The caller holds flushing.
func (s *slab) blankStale() error {
	s.mu.Lock()
	frees := s.frees
	s.frees = nil
	s.mu.Unlock()
	err := s.writeBlanks(frees)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		s.frees = append(s.frees, frees...)
	} else {
		s.blank = append(s.blank, frees...)
	}
	return err
}

// writeBlanks writes free entries over those of the given slots that are stale.
func (s *slab) writeBlanks(slots []uint32) error {
	const most = 64 // written in one hold of order
	slots = slices.Sorted(slices.Values(slots))
	for some := range slices.Chunk(slots, most) {
		if err := s.blankSome(some); err != nil {
			return err
		}
	}
	return nil
}

func (s *slab) blankSome(slots []uint32) (err error) {
	s.order.Lock()
	defer s.order.Unlock()
	s.mu.Lock()
	slots = slices.DeleteFunc(slots, func(slot uint32) bool { return s.slots[slot]&stale == 0 })
	s.mu.Unlock()
	s.runs(slots, func(from, to int) {
		if err == nil {
			err = s.free(slots[from], to-from)
		}
		if err != nil {
			return
		}
		s.mu.Lock()
		for _, slot := range slots[from:to] {
			s.slots[slot] |= blanked
		}
		s.mu.Unlock()
	})
	return err
}

// placement returns where the slots lie in the slab's region.
func (s *slab) placement() engine.Placement {
	return engine.Placement{Offset: s.layout.DataOffset - s.base, Stride: s.layout.StrideBytes}
}

// slotAt returns the slot at an offset of the region.
func (s *slab) slotAt(offset uint64) int {
	at := s.placement()
	return int((int64(offset) - at.Offset) / at.Stride)
}

// pageSums returns the checksums of a slot's pages, as a part of the table.
func (s *slab) pageSums(slot int) []uint64 {
	ppc := s.layout.Geometry.PagesPerChunk
	return s.sums.Slice()[slot*ppc : (slot+1)*ppc]
}

// takes reports whether memory can be moved to or from the slab by O_DIRECT.
func (s *slab) takes(p []byte) bool {
	return s.direct != nil && reflect.ValueOf(p).Pointer()&uintptr(s.align-1) == 0
}

// writeHeader writes a header with the next epoch.
func (s *slab) writeHeader(stable uint64) error {
	h := s.header
	h.Epoch++
	h.Stable = stable
	if err := writeHeader(s.buffed, &h); err != nil {
		return err
	}
	s.header = h
	return nil
}

func writeHeader(f vfs.File, h *media.Header) error {
	b := make([]byte, media.BlockBytes)
	h.Encode(b)
	if _, err := f.WriteAt(b, media.HeaderOffset(h.Epoch)); err != nil {
		return err
	}
	return f.Datasync()
}

// seal marks the slab as whole: when it is opened again, none of its entries is in doubt. The
// caller is its only user.
func (s *slab) seal() error {
	if s.failed.Load() {
		return nil
	}
	err := s.freeStale()
	if err == nil {
		err = s.sync()
	}
	if err == nil && s.header.Epoch+1 < media.EpochLimit {
		err = s.writeHeader(s.lastDone)
	}
	return err
}

// close closes the slab's files and tables. The caller is its only user.
func (s *slab) close() error {
	s.life.Lock()
	defer s.life.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	errs := []error{s.buffed.Close()}
	if s.direct != nil {
		errs = append(errs, s.direct.Close())
	}
	if s.sums != nil {
		errs = append(errs, s.sums.Close())
	}
	if s.gens != nil {
		errs = append(errs, s.gens.Close())
	}
	return errors.Join(errs...)
}

// newSlab opens a carved slab's files and makes its tables. It has no region yet.
func (d *Disk) newSlab(p *place, h media.Header) (s *slab, err error) {
	s = &slab{place: p, header: h, id: h.Identity()}
	s.layout = &s.header.Layout
	s.slots = make([]uint8, s.layout.Slots)
	s.lastDone, s.stable = h.Stable, h.Stable
	if s.buffed, s.direct, s.align, err = d.openFiles(p.name()); err != nil {
		return nil, err
	}
	info, err := d.o.FS.Stat(p.name())
	if err != nil {
		return nil, errors.Join(err, s.close())
	}
	s.file = info.ID
	s.sums, err = dax.NewTable[uint64](s.layout.Slots * s.layout.Geometry.PagesPerChunk)
	if err == nil {
		s.gens, err = dax.NewTable[uint64](s.layout.Slots)
	}
	if err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

// openFiles opens a slab's file through the page cache and, if wanted and possible, with O_DIRECT.
func (d *Disk) openFiles(name string) (buffed, direct vfs.File, align int, err error) {
	if buffed, err = d.o.FS.OpenFile(name, 0); err != nil {
		return nil, nil, 0, err
	}
	if d.o.Direct == DirectNever {
		return buffed, nil, 0, nil
	}
	direct, err = d.o.FS.OpenFile(name, vfs.Direct)
	if err == nil {
		mem, offset := direct.DirectAlign()
		if align = max(mem, offset); align <= block {
			return buffed, direct, align, nil
		}
		err = fmt.Errorf("%s: %w: it wants an alignment of %d bytes", name, vfs.ErrNoDirect, align)
		err = errors.Join(err, direct.Close())
	}
	if errors.Is(err, vfs.ErrNoDirect) && d.o.Direct == DirectAuto {
		return buffed, nil, 0, nil
	}
	return nil, nil, 0, errors.Join(err, buffed.Close())
}

// enough is the number of consecutive failures after which a slab is given up.
const enough = 4

// faulty handles a failure of I/O. If only the slot failed, it takes the slot out of use. Otherwise
// it counts the failure and gives the slab up after enough of them. The caller still holds the
// slot.
func (d *Disk) faulty(s *slab, err error) {
	if d.spoil(s, err) {
		return
	}
	if s.faults.Add(1) >= enough {
		d.giveUp(s, err)
	}
}

// callersFault reports whether an error is of the memory to be moved, not of the medium.
func callersFault(err error) bool {
	return errors.Is(err, syscall.EFAULT) || errors.Is(err, dax.ErrFault)
}

var _ tiers.Tier = (*Disk)(nil)
