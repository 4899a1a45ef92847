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

// place is where a slab's file is. There is nothing in it (blank), a carved slab, or what is there
// does not work (off).
type place struct {
	home  *directory
	index uint32
	bytes int64
	slab  *slab // nil: blank or off; guarded by Disk.shape
	// retired: it is not carved any more, and if it is its region is drained; changed under
	// Disk.shape. gone: it is the store's no more; guarded by Disk.shape.
	retired atomic.Bool
	gone    bool
	// fresh: nothing but a header was ever written to the file; guarded by Disk.shape.
	fresh bool
	epoch uint64 // of its header; guarded by Disk.shape
	// unfit is the last geometry that it turned out to be too small for; guarded by Disk.shape.
	unfit tiers.Geometry

	mu  sync.Mutex
	off error // why it was given up; guarded by mu
}

func (p *place) name() string { return path.Join(p.home.path, SlabName(p.index)) }

// failure is why the place was given up, nil if it was not.
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

// What a slab knows of a slot's entry on the medium.
const (
	written = 1 << iota // it may be there
	stale               // and it is of something that the engine has freed
	blanked             // and it was freed as well, but that is not synced
)

// slab is a place's file as it was carved once. Carved or made anew it is another slab.
type slab struct {
	place  *place
	region uint32
	header media.Header
	id     media.Identity
	layout *media.Layout
	// through the page cache: headers, the directory, and data that O_DIRECT does not take
	buffed  vfs.File
	direct  vfs.File // nil: not to be had
	align   int      // of addresses, offsets and lengths in direct
	file    vfs.FileID
	failed  atomic.Bool
	usedAt  atomic.Int64 // ns since the tier was opened
	faults  atomic.Int32 // failures of I/O since the last success
	spoiled atomic.Int32 // slots that are not used any more

	// life is held for reading by whoever uses the files or tables without a lease on a slot, for
	// writing to close them.
	life   sync.RWMutex
	closed bool
	sums   *dax.Table[uint64] // of the pages, by slot
	// generation of what a slot holds; a slot's are its writer's, and readers' who have a lease, in
	// an arena under mu
	gens *dax.Table[uint64]

	fills atomic.Uint64 // generations given out
	base  int64         // of an arena: where what workers map begins in the file
	told  sync.Once     // of an arena: that its region has gone
	// lastUse is, of an arena, what the engine called the region's last use when that was looked at
	// last.
	lastUse atomic.Uint64

	order    sync.Mutex // held while an entry is written
	entries  []byte     // to encode into
	lastDone uint64     // the commit number of the last entry that was written
	stable   uint64     // commits up to this one are durable

	syncs    group
	flushing sync.Mutex // held by freeStale and hideStale, outside order

	mu    sync.Mutex
	slots []uint8  // by slot: written, stale
	kept  int      // slots that are written and not stale
	frees []uint32 // stale ones that are not blanked, perhaps outdated
	blank []uint32 // that are blanked, likewise
}

// group lets those who wait for a sync of the same file share one.
type group struct {
	mu      sync.Mutex
	cond    *sync.Cond
	running bool
	started uint64
	done    uint64
	err     error // of the last one
}

// do returns after a call of f that began after do was called.
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
			g.err = err // one that failed leaves everything after it in doubt
		}
		g.cond.Broadcast()
	}
	return g.err
}

// sync makes what was written before it durable. Once one has failed, all fail.
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

// maxRun is how many bytes of the directory are written at once, but at least one entry.
const maxRun = 256 << 10

// runs calls do for each run of slots that are neighbours, of sorted ones. A file system makes each
// write through the page cache wait for all that are under way around it, and others for that: the
// fewer the better.
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

// writeEntries writes the entries of slots that are neighbours. They get the next commit numbers.
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

// mark changes what is known of a slot's entry. The caller holds mu, or is alone.
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

// isKept says whether a slot's entry is on the medium and of what the slot holds.
func (s *slab) isKept(slot int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.slots[slot]&(written|stale) == written
}

// setSums sets the generation of what a slot holds, and the checksums of its pages.
func (s *slab) setSums(slot int, gen uint64, sums []uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gens.Slice()[slot] = gen
	copy(s.pageSums(slot), sums)
}

// getSums appends the checksums of so many pages of a slot to out, and answers their generation.
func (s *slab) getSums(slot, pages int, out []uint64) (gen uint64, sums []uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.gens.Slice()[slot], append(out, s.pageSums(slot)[:pages]...)
}

// corrupt is the error of a page that does not check out.
func (s *slab) corrupt(page, slot int) error {
	return fmt.Errorf("%w: page %d in slot %d of %s", tiers.ErrCorrupt, page, slot, s.place.name())
}

// noteFree remembers that a slot's entry, if there is one, is of something that is gone.
func (s *slab) noteFree(slot uint32) {
	s.mu.Lock()
	if s.slots[slot]&(written|stale) == written {
		s.mark(int(slot), s.slots[slot]|stale)
		s.frees = append(s.frees, slot)
	}
	s.mu.Unlock()
}

// zeros are as many as are written at once: entries that are free, at least where it counts.
var zeros = make([]byte, maxRun)

// free writes that the entries of n neighbouring slots are free. order is held.
func (s *slab) free(first uint32, n int) error {
	_, err := s.buffed.WriteAt(zeros[:(n-1)*s.layout.EntryBytes+len(freeEntry)],
		s.layout.EntryOffset(int(first)))
	return err
}

var freeEntry = media.FreeEntry()

// freeSlots frees the entries of slots, sorted, that the caller was granted. wrote is told of each
// where there was anything to write, and whether that failed.
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

// freeStale durably frees the entries of what the engine has freed since it did so last. A slot
// that is granted again meanwhile is its writer's.
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

// hideStale does so for a process that ends in any way, but not for a machine that does.
func (s *slab) hideStale() error {
	s.flushing.Lock()
	defer s.flushing.Unlock()
	return s.blankStale()
}

// blankStale writes free entries over those that are stale. The caller holds flushing.
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

// writeBlanks writes free entries over those of slots that are stale.
func (s *slab) writeBlanks(slots []uint32) error {
	const most = 64 // for which order is held
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

// placement is where the slots lie in the region that the slab is.
func (s *slab) placement() engine.Placement {
	return engine.Placement{Offset: s.layout.DataOffset - s.base, Stride: s.layout.StrideBytes}
}

// slotAt is the slot that an offset in that region lies in.
func (s *slab) slotAt(offset uint64) int {
	at := s.placement()
	return int((int64(offset) - at.Offset) / at.Stride)
}

// pageSums is where the checksums of a slot's pages are kept.
func (s *slab) pageSums(slot int) []uint64 {
	ppc := s.layout.Geometry.PagesPerChunk
	return s.sums.Slice()[slot*ppc : (slot+1)*ppc]
}

// takes says whether memory can be moved to or from the slab without the page cache.
func (s *slab) takes(p []byte) bool {
	return s.direct != nil && reflect.ValueOf(p).Pointer()&uintptr(s.align-1) == 0
}

// writeHeader writes the header of the next epoch.
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

// seal marks the slab as whole: opened again, nothing in it is in doubt. Nobody else uses it.
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

// close gives back what the slab has, when nobody uses it any more.
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

// newSlab makes what a carved slab has in memory, and opens its files. It has no region yet.
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

// openFiles opens a slab's file through the page cache and, where that is possible and wanted,
// around it.
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

// enough is after how many failures in a row a slab is given up.
const enough = 4

// faulty takes a slot that alone has failed out of use, or counts a failure of I/O, and gives the
// slab up when it is one too many. Who calls it has the slot still.
func (d *Disk) faulty(s *slab, err error) {
	if d.spoil(s, err) {
		return
	}
	if s.faults.Add(1) >= enough {
		d.giveUp(s, err)
	}
}

// callersFault says whether an error is not the medium's but that of the memory that was to be
// moved.
func callersFault(err error) bool {
	return errors.Is(err, syscall.EFAULT) || errors.Is(err, dax.ErrFault)
}

var _ tiers.Tier = (*Disk)(nil)
