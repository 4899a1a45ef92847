package engine

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"lookaside/dax"
	"lookaside/tiers"
)

// Restored is a slot that was ready when the engine of another run ended.
type Restored struct {
	Slot   uint32
	Space  SpaceID
	First  int    // index of the chunk's first page
	Pages  int    // committed
	Prev   []byte // digest of the page before; empty if there is none, or it is not known
	Hashes []byte // digests of the pages, end to end
	Order  uint64 // by which the slots of all regions were committed, smaller ones first

	Unverified bool // its bytes are to be checked before anybody reads them: see NextVerify
}

// staged is a slot that Restore was told of and EndRestore has yet to make ready. Its digests are
// in the region already.
type staged struct {
	order      uint64
	ref        uint32 // 0: it was told of twice, or cannot be restored
	pages      uint16
	hasPrev    bool
	unverified bool
	prev       [32]byte
}

// stagedRegion is what Restore told of a region.
type stagedRegion struct {
	r      *region
	mem    *carved         // the region's at that time
	blocks [][]staged      // one for each call
	open   []uint64        // index entries of pages
	filed  []batch         // and those of as many pages as there is room for in open, over and over
	rooms  [][]uint64      // for the next ones
	back   map[uint32]bool // slots that Unrestore was told of
}

// batch is the index entries of many pages. Those of part i of the index are together, and end at
// ends[i].
type batch struct {
	entries []uint64
	ends    *[parts]uint16
}

// The index is filled in parts, by the upper bits of the tags, each of which fits into a core's
// cache.
const (
	partBits = 10
	parts    = 1 << partBits
	// batchEntries are ordered by parts at a time. That fits as well. Less than minBatch are not
	// worth it.
	batchEntries = 1 << 15
	minBatch     = 4 * parts
)

func partOf(entry uint64) int { return int(entry >> (64 - partBits)) }

// staging is all that is staged. What grows with the slots lies off the Go heap, so that it is gone
// when it is over.
type staging struct {
	regions map[*carved]*stagedRegion
	slots   pile[staged]
	entries pile[uint64]
}

func (s *staging) close() {
	s.slots.close()
	s.entries.close()
	*s = staging{}
}

// pile is memory off the Go heap that is taken piece by piece, and given back as a whole.
type pile[T any] struct {
	tables []*dax.Table[T]
	left   []T
}

// pileStep is how many entries a pile grows by at least.
const pileStep = 1 << 19

func (p *pile[T]) take(n int) ([]T, error) {
	if n > len(p.left) {
		t, err := dax.NewTable[T](max(n, pileStep))
		if err != nil {
			return nil, err
		}
		p.tables, p.left = append(p.tables, t), t.Slice()
	}
	some := p.left[:n:n]
	p.left = p.left[n:]
	return some, nil
}

func (p *pile[T]) close() {
	for _, t := range p.tables {
		t.Close()
	}
	*p = pile[T]{}
}

// Placement is where the slots of a carved region lie in it: slot i begins at Offset + i × Stride.
// In bytes.
type Placement struct{ Offset, Stride int64 }

// AddCarvedRegion gives the engine a region that is carved for a geometry from the start. Its slots
// lie where the caller says, and all offsets that the engine answers are by that. ErrBusy: there is
// no room for another region, or one is being carved.
func (e *Engine) AddCarvedRegion(id uint32, g tiers.Geometry, slots int, at Placement) error {
	if err := g.Validate(e.cfg.MinPageBytes); err != nil {
		return err
	}
	if slots < 1 || slots > recordMask/g.PagesPerChunk {
		return invalid("region %d of %d slots of %d pages", id, slots, g.PagesPerChunk)
	}
	bytes := g.PageBytes * int64(g.PagesPerChunk)
	if bytes > math.MaxInt64/int64(slots) {
		return invalid("region %d of %d slots of %d bytes", id, slots, bytes)
	}
	if at.Offset < 0 || at.Stride < bytes || at.Stride > (math.MaxInt64-at.Offset)/int64(slots) {
		return invalid("region %d of %d slots of %d bytes, from byte %d on every %d", id, slots,
			bytes, at.Offset, at.Stride)
	}
	e.mu.Lock()
	defer e.unlock()
	if e.carving {
		return fmt.Errorf("%w: a region is being carved", tiers.ErrBusy)
	}
	if err := e.mayAdd(id, bytes*int64(slots)); err != nil {
		return err
	}
	r := e.spareRegion()
	if r == nil {
		return fmt.Errorf("%w: %d regions are the most", tiers.ErrBusy, maxRegions)
	}
	r.id, r.size = id, bytes*int64(slots)
	e.byID[id] = r
	e.added(r.size)
	if err := e.carve(r, e.classOf(g), slots, at); err != nil {
		if !e.closed {
			e.dropRegion(r)
		}
		return err
	}
	return nil
}

// RemoveRegion drops all that a region holds and takes it from the engine. ErrBusy: something in it
// is leased or being filled, or a region is being carved. In the first case nothing in the region
// can be found, nor is more granted; call again when these uses have ended. It lets go of the lock
// between slices of its work.
func (e *Engine) RemoveRegion(id uint32) error {
	e.restores.Lock()
	defer e.restores.Unlock()
	e.mu.Lock()
	defer e.unlock()
	if e.closed {
		return tiers.ErrClosed
	}
	regions, ok := e.parts(id)
	if !ok {
		return fmt.Errorf("%w: region %d", tiers.ErrNotFound, id)
	}
	a := e.areaOf(id)
	if a != nil && e.carving || a == nil && regions[0].class == nil {
		// one of its pieces, perhaps, or it
		return fmt.Errorf("%w: a region is being carved", tiers.ErrBusy)
	}
	if a != nil {
		a.going = true
	}
	for _, r := range regions {
		if !r.draining {
			r.draining = true
			r.class.free -= r.free
			r.class.slots -= len(r.slots)
		}
		r.retired = false // what is not dropped yet may be evicted meanwhile
	}
	used := 0
	for _, r := range regions {
		if err := e.doomAll(id, r); err != nil {
			return err
		}
	}
	for _, r := range regions {
		used += len(r.slots) - r.free - r.spoiled
	}
	if used > 0 {
		return fmt.Errorf("%w: %d slots of region %d are in use", tiers.ErrBusy, used, id)
	}
	for _, r := range regions {
		e.uncarve(r)
	}
	if a != nil {
		e.dropArea(a)
	} else {
		e.dropRegion(regions[0])
	}
	e.relimit()
	return nil
}

// doomAll drops all that a region holds, which is the caller's region of that id, or a piece of it.
// It lets go of the lock between slices of its work.
func (e *Engine) doomAll(id uint32, r *region) error {
	a, mem := r.area, r.mem
	for i := 0; i < r.fresh; i++ {
		if r.slots[i].state != free {
			e.doom(r.num<<recordBits | uint32(i))
		}
		if i%clearSlice == clearSlice-1 {
			if !e.pause() {
				return tiers.ErrClosed
			}
			if r.mem != mem || a == nil && e.byID[id] != r || a != nil && e.areaOf(id) != a {
				return fmt.Errorf("%w: region %d", tiers.ErrNotFound, id)
			}
		}
	}
	return nil
}

// Spoil has a slot that is in use never be granted again: its memory has turned out to be bad. What
// it holds is the caller's to drop. It lasts until the region is removed or carved again. false:
// there is no such slot, or it is free.
func (e *Engine) Spoil(region, slot uint32) bool {
	e.mu.Lock()
	defer e.unlock()
	r := e.byID[region]
	if e.closed || r == nil || int64(slot) >= int64(r.fresh) || r.slots[slot].state == free {
		return false
	}
	r.slots[slot].flags |= spoiled
	return true
}

// dropRegion takes a region that is not carved out of the books. Its number stays, for the next
// region that is added.
func (e *Engine) dropRegion(r *region) {
	delete(e.byID, r.id)
	e.bytes -= r.size
	*r = region{num: r.num, firstGen: r.firstGen}
}

// Restore tells of slots that are to be ready again, in regions that are carved and in which
// nothing was ever stored. It may be called any number of times, for any region, also concurrently
// for different ones, and takes effect with EndRestore. ErrInvalid, with nothing of the call in
// effect: an entry that no engine can have had, or a slot that a call before told of. What entries
// point to is not kept.
func (e *Engine) Restore(region uint32, entries []Restored) error {
	e.restores.RLock()
	defer e.restores.RUnlock()
	of, block, spaces, err := e.stage(region, entries)
	if err != nil {
		return err
	}
	// Most of the time goes into the digests' memory, which is touched for the first time here.
	// Nobody else looks at it yet.
	r := of.r
	for i := range entries {
		x, s := &entries[i], &block[i]
		if s.ref == 0 {
			continue
		}
		s.order, s.hasPrev, s.unverified = x.Order, len(x.Prev) > 0, x.Unverified
		copy(s.prev[:], x.Prev)
		sp, rec := spaces[x.Space], r.record(s.ref, 0)
		for pos := 0; pos < x.Pages; {
			if len(of.open) == cap(of.open) {
				of.file()
			}
			to, n := r.slots[x.Slot].last[:r.words], 1
			if at := int(x.Slot)*(r.ppc-1) + pos; pos < r.ppc-1 {
				n = min(x.Pages, r.ppc-1) - pos
				to = r.digests[at*r.words : (at+n)*r.words]
			}
			n = min(n, cap(of.open)-len(of.open))
			some := of.open[len(of.open) : len(of.open)+n]
			sp.keep(to[:n*r.words], x.Hashes[pos*8*r.words:], some, rec+uint32(pos))
			of.open = of.open[:len(of.open)+n]
			pos += n
		}
	}
	return nil
}

// keep writes digests as records keep them, and the index's entries of these, which follow on one
// another from rec on.
func (s *space) keep(to []uint64, hashes []byte, entries []uint64, rec uint32) {
	words := len(to) / len(entries)
	for i := range entries {
		h := s.salt
		if words == 4 { // nearly always
			d, b := (*[4]uint64)(to[4*i:]), (*[32]byte)(hashes[32*i:])
			for j := range 4 {
				d[j] = binary.LittleEndian.Uint64(b[8*j:])
			}
			h = mix(mix(mix(mix(h, d[0]), d[1]), d[2]), d[3])
		} else {
			for j := words * i; j < words*(i+1); j++ {
				to[j] = binary.LittleEndian.Uint64(hashes[8*j:])
				h = mix(h, to[j])
			}
		}
		entries[i] = entry(uint32(h>>32)&s.tagMask, rec+uint32(i))
	}
}

// record is that of page pos of a slot of the region.
func (r *region) record(ref uint32, pos int) uint32 {
	return ref&^recordMask | uint32(int(ref&recordMask)*r.ppc+pos)
}

// file orders the open entries by parts.
func (of *stagedRegion) file() {
	sorted := of.rooms[0][:len(of.open)]
	of.rooms = of.rooms[1:]
	var ends [parts]uint16
	for _, w := range of.open {
		ends[partOf(w)]++
	}
	at := uint16(0)
	for i, n := range ends {
		ends[i] = at // where the part begins, until all are in their places
		at += n
	}
	for _, w := range of.open {
		p := partOf(w)
		sorted[ends[p]] = w
		ends[p]++
	}
	of.filed = append(of.filed, batch{sorted, &ends})
	of.open = of.open[:0]
}

// stage notes all of some entries that others may see, in their order. What it leaves is to be
// filled in without the lock. It also answers the spaces by their ids.
func (e *Engine) stage(region uint32, entries []Restored) (*stagedRegion, []staged, []*space,
	error) {
	e.mu.Lock()
	defer e.unlock()
	if e.closed {
		return nil, nil, nil, tiers.ErrClosed
	}
	r := e.byID[region]
	if r == nil || r.class == nil || r.draining {
		return nil, nil, nil, fmt.Errorf("%w: region %d", tiers.ErrNotFound, region)
	}
	if r.fresh > 0 {
		return nil, nil, nil, fmt.Errorf("%w: region %d was stored to", tiers.ErrBusy, region)
	}
	pages := 0
	for i := range entries {
		x := &entries[i]
		s, err := e.space(x.Space)
		if err != nil {
			return nil, nil, nil, err
		}
		d := s.g.DigestBytes
		if s.class != r.class || int64(x.Slot) >= int64(len(r.slots)) || x.Pages < 1 ||
			x.Pages > r.ppc || x.First < 0 || x.First > maxPage-x.Pages ||
			x.First%r.ppc != 0 || r.slots[x.Slot].granted != 0 || len(x.Hashes) != x.Pages*d ||
			len(x.Prev) != 0 && (len(x.Prev) != d || x.First == 0) {
			return nil, nil, nil, invalid(
				"slot %d of region %d restored with pages %d to %d of space %d", x.Slot, region,
				x.First, x.First+x.Pages-1, x.Space)
		}
		pages += x.Pages
	}
	of, err := e.stagedIn(r, pages)
	if err != nil {
		return nil, nil, nil, err
	}
	block, err := e.staging.slots.take(len(entries))
	if err != nil {
		return nil, nil, nil, err
	}
	for i := range entries {
		x := &entries[i]
		sl := &r.slots[x.Slot]
		if sl.granted != 0 { // twice in one call
			continue
		}
		sl.chunk, sl.granted, sl.space = uint32(x.First/r.ppc), uint16(x.Pages), uint16(x.Space)
		block[i].ref, block[i].pages = r.num<<recordBits|x.Slot, uint16(x.Pages)
		e.spaces[x.Space].staged++
	}
	of.blocks = append(of.blocks, block)
	return of, block, e.spaces, nil
}

// stagedIn is what is staged in a region, with room for the entries of so many pages more.
func (e *Engine) stagedIn(r *region, pages int) (*stagedRegion, error) {
	st := &e.staging
	of := st.regions[r.mem]
	size := min(batchEntries, len(r.slots)*r.ppc)
	if of == nil {
		open, err := st.entries.take(size)
		if err != nil {
			return nil, err
		}
		if st.regions == nil {
			st.regions = map[*carved]*stagedRegion{}
		}
		of = &stagedRegion{r: r, mem: r.mem, open: open[:0]}
		st.regions[r.mem] = of
	}
	for len(of.rooms)*size < len(of.open)+pages {
		room, err := st.entries.take(size)
		if err != nil {
			return nil, err
		}
		of.rooms = append(of.rooms, room)
	}
	return of, nil
}

// EndRestore makes the slots ready that Restore was told of, in their order, and answers how many.
// One that another slot makes redundant, one of a region that was stored to meanwhile and one with
// a page that is held as another page of its prefix are left free; OnGone is told of them. It holds
// the lock throughout, for half a second a million chunks of 16 pages: it is for before the engine
// is in use.
func (e *Engine) EndRestore() (chunks int) {
	e.restores.Lock()
	defer e.restores.Unlock()
	e.mu.Lock()
	defer e.unlock()
	st := e.staging
	e.staging = staging{}
	defer st.close()
	for _, s := range e.spaces {
		if s != nil {
			s.staged = 0
		}
	}
	if e.closed || len(st.regions) == 0 {
		return 0
	}
	here, dropped := e.takeStaged(slices.Collect(maps.Values(st.regions)))
	odd := e.indexStaged(here)
	for _, x := range dropped {
		e.unindex(x)
	}
	todo, later := e.placeStaged(here, odd)
	// What many would continue is offered for eviction only once all is there.
	waiting := e.restoreAll(todo)
	for _, i := range e.idleOf(todo) {
		e.settle(todo[i].ref)
	}
	chunks = len(todo)
	for _, x := range later { // those that are odd last, as they may replace others
		if odd.has(x.ref) && e.restoreOdd(x) {
			chunks++
		}
	}
	// Prefixes that came before their continuations are their parents by now; the others follow.
	for _, x := range waiting {
		// unless an odd one has replaced it; its parent is whole, so none has replaced that
		if _, s := e.slot(x.ref); s.state == ready && e.orphan(x.ref) {
			e.adopt(x.parent, x.ref)
		}
	}
	for _, x := range later {
		if _, s := e.slot(x.ref); x.hasPrev && s.state == ready && s.pages > 0 && e.orphan(x.ref) {
			if parent := e.parentOf(s, x.prev[:]); parent != 0 {
				e.adopt(parent, x.ref)
			}
		}
	}
	e.noteRestored(here)
	return chunks
}

// inParallel calls f for 0 to n-1 on all processors, each time with the number of the worker that
// it is, below workers().
func inParallel(n int, f func(worker, i int)) {
	var next atomic.Int64
	var wait sync.WaitGroup
	for w := range min(workers(), n) {
		wait.Go(func() {
			for {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				f(w, i)
			}
		})
	}
	wait.Wait()
}

func workers() int { return runtime.GOMAXPROCS(0) }

// slotSet is a set of slots, a bit for each.
type slotSet [maxRegions + 1][]uint64

func (s *slotSet) add(e *Engine, ref uint32) {
	num, i := ref>>recordBits, ref&recordMask
	if s[num] == nil {
		s[num] = make([]uint64, len(e.regions[num].slots)/64+1)
	}
	s[num][i/64] |= 1 << (i % 64)
}

func (s *slotSet) has(ref uint32) bool {
	bits, i := s[ref>>recordBits], ref&recordMask
	return bits != nil && bits[i/64]>>(i%64)&1 != 0
}

// misfit is a slot with the number of its pages that are entered with all others and must not be in
// the index.
type misfit struct {
	ref   uint32
	pages int
	space *space
}

// takeStaged takes the slots that can be restored from the free ones of their regions, as ready
// ones without a page. It answers the regions that have some, and the slots in these that Unrestore
// was told of.
func (e *Engine) takeStaged(all []*stagedRegion) (here []*stagedRegion, dropped []misfit) {
	for _, of := range all {
		// The region may have been removed since, carved anew, or stored to.
		if r := of.r; r.mem == of.mem && r.fresh == 0 && !r.draining {
			here = append(here, of)
		}
	}
	slices.SortFunc(here, func(a, b *stagedRegion) int { return cmp.Compare(a.r.num, b.r.num) })
	var mu sync.Mutex // guards what the regions share
	inParallel(len(here), func(_, at int) {
		r, back := here[at].r, here[at].back
		count := perSpace{add: func(id uint16, n int) { e.spaces[id].chunks += n }, mu: &mu}
		top, taken := 0, 0
		for _, block := range here[at].blocks {
			for i := range block {
				x := &block[i]
				if x.ref == 0 {
					continue
				}
				s := &r.slots[x.ref&recordMask]
				top = max(top, int(x.ref&recordMask)+1)
				if len(back) > 0 && back[x.ref&recordMask] {
					mu.Lock()
					dropped = append(dropped, misfit{x.ref, int(x.pages), e.spaces[s.space]})
					mu.Unlock()
					x.ref = 0
					continue
				}
				s.state, s.gen = ready, r.firstGen
				if x.unverified {
					s.flags |= unverified
					e.unverified.Add(1)
				}
				taken++
				count.count(s.space, 1)
			}
		}
		count.end()
		r.fresh = top
		for i := top - 1; i >= 0; i-- {
			if s := &r.slots[i]; s.state == free {
				*s = slot{gen: r.firstGen, last: s.last}
				r.kin[i].next = r.freeList
				r.freeList = uint32(i) + 1
			}
		}
		mu.Lock()
		r.free -= taken
		r.class.free -= taken
		mu.Unlock()
	})
	return here, dropped
}

// perSpace sums something up by spaces, of which there mostly are few, and each in long runs.
type perSpace struct {
	add func(id uint16, n int)
	mu  *sync.Mutex // add is called under it
	id  uint16
	n   int
}

func (p *perSpace) count(id uint16, n int) {
	if id != p.id {
		p.end()
		p.id = id
	}
	p.n += n
}

func (p *perSpace) end() {
	if p.n > 0 {
		p.mu.Lock()
		p.add(p.id, p.n)
		p.mu.Unlock()
	}
	p.n = 0
}

// indexStaged indexes the pages of staged slots, and answers which slots it left for restoreOdd:
// those with a page that is indexed already, as another slot holds it too. Each processor has a
// part of the index to itself at a time.
func (e *Engine) indexStaged(all []*stagedRegion) *slotSet {
	odd := &slotSet{}
	t := &e.idx.cur
	if e.idx.migrating() { // never before the engine is used
		for _, of := range all {
			of.each(func(x *staged) { odd.add(e, x.ref) })
		}
		return odd
	}
	inParallel(len(all), func(_, i int) {
		if len(all[i].open) >= minBatch {
			all[i].file()
		}
	})
	var batches []batch
	entries := 0
	for _, of := range all {
		batches = append(batches, of.filed...)
	}
	for i := range batches {
		entries += len(batches[i].entries)
	}
	dense := entries > len(t.words)/lineWords
	type tally struct {
		entered int
		seen    uint64
		left    []uint64
	}
	tallies := make([]tally, workers())
	if len(batches) > 0 {
		inParallel(parts, func(worker, part int) {
			x := &tallies[worker]
			from, end := part*len(t.words)/parts, (part+1)*len(t.words)/parts
			for i := range batches {
				for run := batches[i].part(part); len(run) > 0; run = run[min(len(run),
					lineWords):] {
					x.seen |= run[0]
				}
			}
			for i := range batches {
				n, left := e.enterAll(batches[i].part(part), uint32(end), x.left)
				x.entered, x.left = x.entered+n, left
				if i == 0 && dense {
					// what will be written to is read first, but for what the first entries take
					// the fault for
					for i := from; i < end; i += lineWords {
						x.seen |= t.words[i]
					}
				}
			}
		})
	}
	for _, of := range all {
		n, left := e.enterAll(of.open, uint32(len(t.words)), tallies[0].left)
		tallies[0].entered, tallies[0].left = tallies[0].entered+n, left
	}
	for i := range tallies {
		t.used += tallies[i].entered
		e.touched |= tallies[i].seen // keeps the loops that only read
	}
	for i := range tallies {
		for _, w := range tallies[i].left {
			if ref, _ := e.slotOf(uint32(w)); !odd.has(ref) {
				odd.add(e, ref)
				_, s := e.slot(ref)
				e.unindex(misfit{ref, int(s.granted), e.spaces[s.space]})
			}
		}
	}
	return odd
}

// lineWords are in a cache line.
const lineWords = 8

func (b *batch) part(i int) []uint64 {
	from := uint16(0)
	if i > 0 {
		from = b.ends[i-1]
	}
	return b.entries[from:b.ends[i]]
}

// each calls f for all slots that are staged.
func (of *stagedRegion) each(f func(x *staged)) {
	for _, block := range of.blocks {
		for i := range block {
			if block[i].ref != 0 {
				f(&block[i])
			}
		}
	}
}

// enterAll enters pages whose places are below end, but for those that are indexed already or find
// no place below it: these it appends to left.
func (e *Engine) enterAll(pages []uint64, end uint32, left []uint64) (entered int, _ []uint64) {
	t := &e.idx.cur
	words := t.words
	for _, w := range pages {
		at := t.home(uint32(w >> 32))
		for at < end && words[at] != 0 && (uint32(words[at]>>32) != uint32(w>>32) ||
			!e.alike(uint32(words[at]), uint32(w))) {
			at++
		}
		if at == end || words[at] != 0 {
			left = append(left, w)
			continue
		}
		words[at] = w
		entered++
	}
	return entered, left
}

// alike says whether two records are of the same page.
func (e *Engine) alike(a, b uint32) bool {
	q, r := e.regions[a>>recordBits], e.regions[b>>recordBits]
	if q.class != r.class {
		return false
	}
	i, posA := q.split(a & recordMask)
	j, posB := r.split(b & recordMask)
	return q.slots[i].space == r.slots[j].space && slices.Equal(q.digest(i, int(posA)),
		r.digest(j, int(posB)))
}

// unindex removes the pages of a slot from the index, as far as they are there.
func (e *Engine) unindex(x misfit) {
	r, _ := e.slot(x.ref)
	for pos := range x.pages {
		e.idx.cur.removeIf(entry(x.space.tagOfRecord(r.digest(x.ref&recordMask, pos)),
			r.record(x.ref, pos)))
	}
}

// removeIf removes an entry if it is there.
func (t *table) removeIf(w uint64) {
	for at := t.home(uint32(w >> 32)); t.words[at] != 0; at = t.next(at) {
		if t.words[at] == w {
			t.removeAt(at)
			return
		}
	}
}

// restoring is a slot whose pages are indexed, and which is yet to be made known.
type restoring struct {
	order  uint64
	ref    uint32
	parent uint32 // 0: it has none, or none is found
}

// placeStaged has the slots that are not odd hold their pages, and finds their parents. It answers
// them in their order, and apart, in their order too, those that are to be looked at again: the odd
// ones, and those whose parent may be one of these.
func (e *Engine) placeStaged(all []*stagedRegion, odd *slotSet) (todo []restoring,
	later []*staged) {
	var blocks [][]staged
	n := 0
	for _, of := range all {
		blocks = append(blocks, of.blocks...)
	}
	for _, block := range blocks {
		n += len(block)
	}
	room := make([]restoring, n)
	runs := make([][]restoring, len(blocks)) // in room
	n = 0
	for i, block := range blocks {
		runs[i] = room[n : n : n+len(block)]
		n += len(block)
	}
	groups := make([]parentGroup, workers())
	var mu sync.Mutex
	inParallel(len(blocks), func(worker, i int) {
		g, run := &groups[worker], runs[i]
		count := perSpace{add: func(id uint16, n int) { e.spaces[id].pages += n }, mu: &mu}
		for at := range blocks[i] {
			x := &blocks[i][at]
			if x.ref == 0 {
				continue
			}
			if odd.has(x.ref) {
				g.later = append(g.later, x)
				continue
			}
			_, s := e.slot(x.ref)
			s.pages, s.granted = s.granted, 0
			count.count(s.space, int(s.pages))
			run = append(run, restoring{order: x.order, ref: x.ref})
			if x.hasPrev {
				g.x[g.n], g.to[g.n] = x, &run[len(run)-1]
				if g.n++; g.n == len(g.x) {
					e.findParents(g)
				}
			}
		}
		count.end()
		runs[i] = run
	})
	for i := range groups {
		e.findParents(&groups[i])
		e.touched |= groups[i].seen
		later = append(later, groups[i].later...)
	}
	slices.SortFunc(later, func(a, b *staged) int {
		return cmp.Or(cmp.Compare(a.order, b.order), cmp.Compare(a.ref, b.ref))
	})
	return byOrder(runs, room), later
}

// parentGroup is some slots whose parents are found together, so that the cache misses overlap, and
// what a worker has besides.
type parentGroup struct {
	n     int
	x     [64]*staged
	to    [64]*restoring
	refs  [64]uint32
	homes [64]uint32
	tags  [64]uint32
	seen  uint64
	later []*staged // see placeStaged
}

// findParents finds the slots that hold the pages before those of a group's, and empties the group.
func (e *Engine) findParents(g *parentGroup) {
	n := g.n
	g.n = 0
	t := &e.idx.cur
	for i, x := range g.x[:n] {
		sp := e.spaces[e.regions[x.ref>>recordBits].slots[x.ref&recordMask].space]
		g.tags[i] = sp.tag(x.prev[:sp.g.DigestBytes])
		g.homes[i] = t.home(g.tags[i])
	}
	for _, home := range g.homes[:n] {
		g.seen |= t.words[home]
	}
	for i, home := range g.homes[:n] {
		// the first entry with the tag: nearly always the page itself
		w := t.words[home]
		for at := home; w != 0 && uint32(w>>32) != g.tags[i]; {
			at = t.next(at)
			w = t.words[at]
		}
		g.refs[i] = uint32(w)
	}
	for _, rec := range g.refs[:n] {
		if rec != 0 {
			ref, _ := e.slotOf(rec)
			_, s := e.slot(ref)
			g.seen |= uint64(s.chunk)
		}
	}
	for i, x := range g.x[:n] {
		_, s := e.slot(x.ref)
		if g.to[i].parent = e.parentOf(s, x.prev[:]); g.to[i].parent == 0 {
			g.later = append(g.later, x)
		}
	}
}

// byOrder sorts what some runs have, which lie in a space of as many.
func byOrder(runs [][]restoring, room []restoring) []restoring {
	n := 0
	least, most := uint64(math.MaxUint64), uint64(0)
	for _, run := range runs {
		n += len(run)
		for i := range run {
			least, most = min(least, run[i].order), max(most, run[i].order)
		}
	}
	// By digits, the last first: these are mostly numbers without large gaps, so there are few
	// digits.
	const digit = 11
	out := make([]restoring, n)
	for shift := 0; shift == 0 || n > 0 && (most-least)>>shift > 0; shift += digit {
		var at [1<<digit + 1]int
		for _, run := range runs {
			for i := range run {
				at[(run[i].order-least)>>shift&(1<<digit-1)+1]++
			}
		}
		for i := range 1 << digit {
			at[i+1] += at[i]
		}
		for _, run := range runs {
			for i := range run {
				d := (run[i].order - least) >> shift & (1<<digit - 1)
				out[at[d]] = run[i]
				at[d]++
			}
		}
		runs, out, room = [][]restoring{out}, room[:n], out
	}
	return room
}

// restoreAll puts slots into their prefixes, in their order, and makes them known to the policy.
// They are still to be settled. It answers those that have a parent whose own turn came later.
func (e *Engine) restoreAll(todo []restoring) (waiting []restoring) {
	const group = 128 // that is read first, in a loop of its own, so that the cache misses overlap
	var refs [group]uint32
	seen := uint64(0)
	for from := 0; from < len(todo); from += group {
		some := todo[from:min(from+group, len(todo))]
		for i := range some {
			ref := some[i].ref
			refs[i] = ref
			r := e.regions[ref>>recordBits]
			seen |= r.slots[ref&recordMask].stamp | uint64(r.kin[ref&recordMask].parent)
		}
		for left := refs[:len(some)]; len(left) > 0; {
			// by classes: each policy knows its own slots only
			c, n := e.regions[left[0]>>recordBits].class, 1
			for n < len(left) && e.regions[left[n]>>recordBits].class == c {
				n++
			}
			c.policy.Read(left[:n])
			left = left[n:]
		}
		for i := range some {
			x := &some[i]
			if !e.restore(x.ref, x.parent) {
				waiting = append(waiting, *x)
			}
		}
	}
	e.touched |= seen // keeps the loop that only reads
	return waiting
}

// idleOf is which of some slots that have just become ready are to be settled: what has a
// continuation stays as it is.
func (e *Engine) idleOf(todo []restoring) []int {
	const piece = 1 << 14
	found := make([][]int, (len(todo)+piece-1)/piece)
	inParallel(len(found), func(_, i int) {
		for at := i * piece; at < min((i+1)*piece, len(todo)); at++ {
			if r, s := e.slot(todo[at].ref); s.children == 0 || int(s.pages) < r.ppc {
				found[i] = append(found[i], at)
			}
		}
	})
	return slices.Concat(found...)
}

// restore puts a slot whose pages are indexed into its prefix and makes it known to the policy. It
// is still to be settled. false: it has a parent that is yet to be restored.
func (e *Engine) restore(ref, parent uint32) bool {
	r, s := e.slot(ref)
	e.tick++
	s.stamp, r.lastUse = e.tick, e.tick
	e.spaces[s.space].lastUse = e.tick
	there := true
	if parent != 0 {
		if _, p := e.slot(parent); p.stamp != 0 {
			e.adopt(parent, ref)
		} else { // the policy does not know it yet
			there = false
		}
	}
	e.register(ref)
	if t := e.route(ref); t != nil {
		t.held = e.cascades.self
	}
	return there
}

// restoreOdd does all that for a slot whose pages are not indexed yet; false: it is free again, as
// it adds nothing or cannot be.
func (e *Engine) restoreOdd(x *staged) bool {
	r, s := e.slot(x.ref)
	pages := int(s.granted)
	s.granted = 0
	var buf [32]byte
	if e.find(e.spaces[s.space], r.digestBytes(x.ref&recordMask, pages-1, &buf)) != 0 {
		e.stats.Duplicates++
		e.release(x.ref)
		return false
	}
	if !e.enter(x.ref, 0, pages) {
		e.release(x.ref)
		return false
	}
	parent := uint32(0)
	if x.hasPrev {
		parent = e.parentOf(s, x.prev[:])
	}
	e.restore(x.ref, parent)
	e.settle(x.ref)
	return true
}

// parentOf is the slot that holds the page before a slot's first, whose digest prev begins with. 0:
// none does.
func (e *Engine) parentOf(s *slot, prev []byte) uint32 {
	sp := e.spaces[s.space]
	rec, _ := e.seek(sp, prev[:sp.g.DigestBytes])
	if rec == 0 || !e.at(rec, int(s.chunk)*sp.g.PagesPerChunk-1) {
		return 0
	}
	ref, _ := e.slotOf(rec)
	return ref
}

// Room is how many slots the regions of a geometry have, and how many of them are free.
func (e *Engine) Room(g tiers.Geometry) (slots, free int) {
	g.PageTokens = 0
	e.mu.Lock()
	defer e.unlock()
	if c := e.classes[g]; c != nil && !e.closed {
		return c.slots, c.free
	}
	return 0, 0
}

// Unrestore takes back what Restore was told of a slot, before EndRestore. Restore cannot be told
// of it again.
func (e *Engine) Unrestore(region, slot uint32) {
	e.mu.Lock()
	defer e.unlock()
	r := e.byID[region]
	if r == nil || e.staging.regions[r.mem] == nil || int64(slot) >= int64(len(r.slots)) ||
		r.slots[slot].granted == 0 {
		return
	}
	of := e.staging.regions[r.mem]
	if of.back == nil {
		of.back = map[uint32]bool{}
	}
	of.back[slot] = true
}
