package tiers

import (
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"
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

// staged is a slot that Restore was told of and EndRestore has yet to make ready. Its digests are in the region already.
type staged struct {
	order      uint64
	ref        uint32
	hasPrev    bool
	unverified bool
	prev       [32]byte
}

// Placement is where the slots of a carved region lie in it: slot i begins at Offset + i × Stride. In bytes.
type Placement struct{ Offset, Stride int64 }

// AddCarvedRegion gives the engine a region that is carved for a geometry from the start. Its slots lie where the caller says, and all offsets that the engine
// answers are by that. ErrBusy: there is no room for another region, or one is being carved.
func (e *Engine) AddCarvedRegion(id uint32, g Geometry, slots int, at Placement) error {
	if err := g.validate(e.cfg.MinPageBytes); err != nil {
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
		return invalid("region %d of %d slots of %d bytes, from byte %d on every %d", id, slots, bytes, at.Offset, at.Stride)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.carving {
		return fmt.Errorf("%w: a region is being carved", ErrBusy)
	}
	r, err := e.addRegion(id, bytes*int64(slots))
	if err != nil {
		return err
	}
	if err := e.carve(r, e.classOf(g), slots, at); err != nil {
		if !e.closed {
			e.dropRegion(r)
		}
		return err
	}
	return nil
}

// RemoveRegion drops all that a region holds and takes it from the engine. ErrBusy: something in it is leased or being filled. Nothing in the region
// can be found then, nor is more granted; call again when these uses have ended. It lets go of the lock between slices of its work.
func (e *Engine) RemoveRegion(id uint32) error {
	e.restores.Lock()
	defer e.restores.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return ErrClosed
	}
	r := e.byID[id]
	if r == nil {
		return fmt.Errorf("%w: region %d", ErrNotFound, id)
	}
	if r.class != nil {
		if !r.draining {
			r.draining = true
			r.class.free -= r.free
			r.class.slots -= len(r.slots)
		}
		r.retired = false // what is not dropped yet may be evicted meanwhile
		for i := 0; i < r.fresh; i++ {
			if r.slots[i].state != free {
				e.doom(r.num<<recordBits | uint32(i))
			}
			if i%clearSlice == clearSlice-1 {
				e.mu.Unlock()
				e.mu.Lock()
				if e.closed {
					return ErrClosed
				}
				if e.byID[id] != r {
					return fmt.Errorf("%w: region %d", ErrNotFound, id)
				}
			}
		}
		if n := len(r.slots) - r.free - r.spoiled; n > 0 {
			return fmt.Errorf("%w: %d slots of region %d are in use", ErrBusy, n, id)
		}
		e.uncarve(r)
	}
	e.dropRegion(r)
	e.relimit()
	return nil
}

// Spoil has a slot that is in use never be granted again: its memory has turned out to be bad. What it holds is the caller's to drop. It lasts until the region is removed or
// carved again. false: there is no such slot, or it is free.
func (e *Engine) Spoil(region, slot uint32) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	r := e.byID[region]
	if e.closed || r == nil || int64(slot) >= int64(r.fresh) || r.slots[slot].state == free {
		return false
	}
	r.slots[slot].flags |= spoiled
	return true
}

// dropRegion takes a region that is not carved out of the books. Its number stays, for the next region that is added.
func (e *Engine) dropRegion(r *region) {
	delete(e.byID, r.id)
	e.bytes -= r.size
	*r = region{num: r.num, firstGen: r.firstGen}
}

// Restore tells of slots that are to be ready again, in regions that are carved and in which nothing was ever stored. It may be called any number of
// times, for any region, also concurrently for different ones, and takes effect with EndRestore. ErrInvalid, with nothing of the call in effect: an entry that
// no engine can have had, or a slot that a call before told of. What entries point to is not kept.
func (e *Engine) Restore(region uint32, entries []Restored) error {
	e.restores.RLock()
	defer e.restores.RUnlock()
	r, block, err := e.stage(region, entries)
	if err != nil {
		return err
	}
	// Most of the time goes into the digests' memory, which is touched for the first time here. Nobody else looks at it yet.
	for i := range entries {
		x := &entries[i]
		if block[i].ref == 0 {
			continue
		}
		d := len(x.Hashes) / x.Pages
		for pos := range x.Pages {
			r.setDigest(x.Slot, pos, x.Hashes[pos*d:])
		}
	}
	return nil
}

// stage notes all of some entries but their digests. What it answers is for each of them what is staged, without a ref if it was told of twice.
func (e *Engine) stage(region uint32, entries []Restored) (*region, []staged, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil, nil, ErrClosed
	}
	r := e.byID[region]
	if r == nil || r.class == nil || r.draining {
		return nil, nil, fmt.Errorf("%w: region %d", ErrNotFound, region)
	}
	if r.fresh > 0 {
		return nil, nil, fmt.Errorf("%w: region %d was stored to", ErrBusy, region)
	}
	for i := range entries {
		x := &entries[i]
		s, err := e.space(x.Space)
		if err != nil {
			return nil, nil, err
		}
		d := s.g.DigestBytes
		if s.class != r.class || int64(x.Slot) >= int64(len(r.slots)) || x.Pages < 1 || x.Pages > r.ppc || x.First < 0 || x.First > maxPage-x.Pages ||
			x.First%r.ppc != 0 || r.slots[x.Slot].granted != 0 || len(x.Hashes) != x.Pages*d || len(x.Prev) != 0 && (len(x.Prev) != d || x.First == 0) {
			return nil, nil, invalid("slot %d of region %d restored with pages %d to %d of space %d", x.Slot, region, x.First, x.First+x.Pages-1, x.Space)
		}
	}
	block := make([]staged, len(entries))
	for i := range entries {
		x := &entries[i]
		sl := &r.slots[x.Slot]
		if sl.granted != 0 { // twice in one call
			continue
		}
		sl.chunk, sl.granted, sl.space = uint32(x.First/r.ppc), uint16(x.Pages), uint16(x.Space)
		block[i] = staged{order: x.Order, ref: r.num<<recordBits | x.Slot, hasPrev: len(x.Prev) > 0, unverified: x.Unverified}
		copy(block[i].prev[:], x.Prev)
	}
	e.staged = append(e.staged, block)
	return r, block, nil
}

// EndRestore makes the slots ready that Restore was told of, in their order, and answers how many. One that another slot makes
// redundant, one of a region that was stored to meanwhile and one with a page that is held as another page of its prefix are left free; OnGone
// is told of them. It holds the lock throughout, for about a second a million chunks of 16 pages: it is for before the engine is in use.
func (e *Engine) EndRestore() (chunks int) {
	e.restores.Lock()
	defer e.restores.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	blocks := e.staged
	e.staged = nil
	if e.closed || len(blocks) == 0 {
		return 0
	}
	all := e.takeStaged(byOrder(blocks))
	odd := e.indexAll(all)
	parents := e.parentsOf(all)
	// What many would continue is offered for eviction only once all is there.
	for i, next := 0, 0; i < len(all); i++ {
		if next < len(odd) && odd[next] == i {
			next++
			continue
		}
		e.restore(&all[i], parents[i])
		chunks++
	}
	for i, next := 0, 0; i < len(all); i++ {
		if next < len(odd) && odd[next] == i {
			next++
			continue
		}
		e.settle(all[i].ref)
	}
	for _, i := range odd { // last, as they may replace others
		if e.restoreOdd(&all[i]) {
			chunks++
		}
	}
	// Prefixes that came before their continuations are their parents by now; the others follow.
	for i := range all {
		x := &all[i]
		if _, s := e.slot(x.ref); x.hasPrev && s.state == ready && s.pages > 0 && e.orphan(x.ref) {
			if parent := e.parentOf(s, x.prev[:]); parent != 0 {
				e.adopt(parent, x.ref)
			}
		}
	}
	e.noteRestored(all)
	return chunks
}

// each calls f for 0 to n-1 on all processors, in pieces.
func each(n int, f func(from, to int)) {
	workers := runtime.GOMAXPROCS(0)
	var wait sync.WaitGroup
	for w := range workers {
		wait.Go(func() { f(w*n/workers, (w+1)*n/workers) })
	}
	wait.Wait()
}

// parentsOf finds the slots that hold the pages before those of staged slots, all of whose pages are indexed but of the odd ones.
func (e *Engine) parentsOf(all []staged) []uint32 {
	parents := make([]uint32, len(all))
	each(len(all), func(from, to int) {
		for i := from; i < to; i++ {
			if x := &all[i]; x.hasPrev {
				_, s := e.slot(x.ref)
				parents[i] = e.parentOf(s, x.prev[:])
			}
		}
	})
	return parents
}

// takeStaged takes the slots that can be restored from the free ones of their regions, as ready ones without a page.
func (e *Engine) takeStaged(all []staged) []staged {
	stale := map[*region]bool{} // stored to since Restore
	top := map[*region]int{}
	here := all[:0]
	for i := range all { // the region may have been removed since, or carved for another geometry
		if int64(all[i].ref&recordMask) < int64(len(e.regions[all[i].ref>>recordBits].slots)) {
			here = append(here, all[i])
		}
	}
	all = here
	for i := range all {
		r, _ := e.slot(all[i].ref)
		if r.fresh > 0 || r.class == nil || r.draining {
			stale[r] = true
		} else {
			top[r] = max(top[r], int(all[i].ref&recordMask)+1)
		}
	}
	kept := all[:0]
	for i := range all {
		r, s := e.slot(all[i].ref)
		if stale[r] || s.state != free || s.granted == 0 || e.spaces[s.space] == nil || e.spaces[s.space].class != r.class {
			continue
		}
		s.state, s.gen = ready, r.firstGen
		if all[i].unverified {
			s.flags |= unverified
			e.unverified.Add(1)
		}
		r.free--
		r.class.free--
		e.spaces[s.space].chunks++
		kept = append(kept, all[i])
	}
	for r, n := range top {
		r.fresh = n
		for i := n - 1; i >= 0; i-- {
			if s := &r.slots[i]; s.state == free {
				*s = slot{gen: r.firstGen, last: s.last}
				r.kin[i].next = r.freeList
				r.freeList = uint32(i) + 1
			}
		}
	}
	return kept
}

// byOrder is all that is staged, sorted.
func byOrder(blocks [][]staged) []staged {
	type key struct {
		order uint64
		x     *staged
	}
	n := 0
	for _, block := range blocks {
		n += len(block)
	}
	keys := make([]key, 0, n)
	least, most := uint64(math.MaxUint64), uint64(0)
	for _, block := range blocks {
		for i := range block {
			if x := &block[i]; x.ref != 0 {
				keys = append(keys, key{x.order, x})
				least, most = min(least, x.order), max(most, x.order)
			}
		}
	}
	// By digits, the last first: these are mostly numbers without large gaps, so there are few digits.
	const digit = 11
	other := make([]key, len(keys))
	for shift := 0; len(keys) > 0 && (most-least)>>shift > 0; shift += digit {
		var at [1<<digit + 1]int
		for i := range keys {
			at[(keys[i].order-least)>>shift&(1<<digit-1)+1]++
		}
		for i := range 1 << digit {
			at[i+1] += at[i]
		}
		for i := range keys {
			d := (keys[i].order - least) >> shift & (1<<digit - 1)
			other[at[d]] = keys[i]
			at[d]++
		}
		keys, other = other, keys
	}
	out := make([]staged, len(keys))
	each(len(keys), func(from, to int) {
		for i := from; i < to; i++ {
			out[i] = *keys[i].x
		}
	})
	return out
}

// fresh is a page that is about to be indexed.
type fresh struct {
	tag, rec uint32
	i        int32 // whose it is, in a batch
}

// indexBatch is how many slots are indexed together.
const indexBatch = 1 << 14

// indexAll indexes the pages of slots that have none yet, and answers, in order, which slots it left for restoreOdd: those with a page whose tag is
// indexed already, which mostly is the same page of another slot. It uses all processors: each first computes the tags of a part of the slots, and then has
// a part of the index to itself.
func (e *Engine) indexAll(all []staged) (odd []int) {
	t := &e.idx.cur
	workers := runtime.GOMAXPROCS(0)
	size := uint64(len(t.words))
	if e.idx.migrating() || size < uint64(workers) { // never before the engine is used
		for i := range all {
			odd = append(odd, i)
		}
		return odd
	}
	lists := make([][]fresh, workers*workers) // by who computed them and who enters them
	left := make([][]int32, workers)
	entered := make([]int, workers)
	touched := make([]uint64, workers)
	parallel := func(f func(w int)) {
		var wait sync.WaitGroup
		for w := range workers {
			wait.Go(func() { f(w) })
		}
		wait.Wait()
	}
	for from := 0; from < len(all); from += indexBatch {
		batch := all[from:min(from+indexBatch, len(all))]
		parallel(func(w int) {
			mine := lists[w*workers : (w+1)*workers]
			for part := range mine {
				mine[part] = mine[part][:0]
			}
			for i := w * len(batch) / workers; i < (w+1)*len(batch)/workers; i++ {
				ref := batch[i].ref
				r, s := e.slot(ref)
				sp := e.spaces[s.space]
				rec := ref&^recordMask | uint32(int(ref&recordMask)*r.ppc)
				for pos := range int(s.granted) {
					tag := sp.tagOfRecord(r.digest(ref&recordMask, pos))
					part := uint64(t.home(tag)) * uint64(workers) / size
					mine[part] = append(mine[part], fresh{tag, rec + uint32(pos), int32(i)})
				}
			}
		})
		parallel(func(part int) {
			left[part] = left[part][:0]
			end := (uint64(part+1)*size + uint64(workers) - 1) / uint64(workers)
			for w := range workers {
				n, missed, seen := t.enterAll(lists[w*workers+part], uint32(end), left[part])
				entered[part] += n
				left[part] = missed
				touched[part] |= seen
			}
		})
		some := slices.Concat(left...)
		slices.Sort(some)
		for _, i := range slices.Compact(some) {
			odd = append(odd, from+int(i))
		}
	}
	for part, n := range entered {
		t.used += n
		e.touched |= touched[part] // keeps the loop that only reads
	}
	next := 0
	for i := range all {
		r, s := e.slot(all[i].ref)
		sp := e.spaces[s.space]
		if next < len(odd) && odd[next] == i {
			next++
			rec := all[i].ref&^recordMask | uint32(int(all[i].ref&recordMask)*r.ppc)
			for pos := range int(s.granted) {
				t.removeIf(entry(sp.tagOfRecord(r.digest(all[i].ref&recordMask, pos)), rec+uint32(pos)))
			}
			continue
		}
		s.pages, s.granted = s.granted, 0
		sp.pages += int(s.pages)
	}
	return odd
}

// enterAll enters pages whose places are below end, but for those whose tag is there or that find no place below it: whose these are it appends to left.
func (t *table) enterAll(pages []fresh, end uint32, left []int32) (entered int, _ []int32, seen uint64) {
	const group = 64 // whose places are read first, in a loop of its own, so that the cache misses overlap
	for from := 0; from < len(pages); from += group {
		some := pages[from:min(from+group, len(pages))]
		for i := range some {
			seen |= t.words[t.home(some[i].tag)]
		}
		for i := range some {
			x := &some[i]
			at := t.home(x.tag)
			for at < end && t.words[at] != 0 && uint32(t.words[at]>>32) != x.tag {
				at++
			}
			if at == end || t.words[at] != 0 {
				left = append(left, x.i)
				continue
			}
			t.words[at] = entry(x.tag, x.rec)
			entered++
		}
	}
	return entered, left, seen
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

// restore puts a slot whose pages are indexed into its prefix and makes it known to the policy. It is still to be settled.
func (e *Engine) restore(x *staged, parent uint32) {
	r, s := e.slot(x.ref)
	e.tick++
	s.stamp, r.lastUse = e.tick, e.tick
	e.spaces[s.space].lastUse = e.tick
	if parent != 0 {
		if _, p := e.slot(parent); p.stamp != 0 { // else its own turn is to come, and the policy does not know it yet
			e.adopt(parent, x.ref)
		}
	}
	e.register(x.ref)
	if t := e.route(x.ref); t != nil {
		t.held = e.cascades.self
	}
}

// restoreOdd does all that for a slot whose pages are not indexed yet; false: it is free again, as it adds nothing or cannot be.
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
	e.restore(x, parent)
	e.settle(x.ref)
	return true
}

// parentOf is the slot that holds the page before a slot's first, whose digest prev begins with. 0: none does.
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
func (e *Engine) Room(g Geometry) (slots, free int) {
	g.PageTokens = 0
	e.mu.Lock()
	defer e.mu.Unlock()
	if c := e.classes[g]; c != nil && !e.closed {
		return c.slots, c.free
	}
	return 0, 0
}

// Unrestore takes back what Restore was told of a slot, before EndRestore.
func (e *Engine) Unrestore(region, slot uint32) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if r := e.byID[region]; r != nil && int64(slot) < int64(len(r.slots)) && r.fresh == 0 {
		r.slots[slot].granted = 0
	}
}
