package engine

import (
	"fmt"

	"lookaside/tiers"
)

// PromotionState says what has to be done for a chunk that a lookup goes on with.
type PromotionState uint8

const (
	PromotionReady   PromotionState = iota // it is held by now, and leased
	PromotionJoined                        // it is on its way for another lookup already
	PromotionGranted                       // it is to be loaded by whoever asked
)

// PromotedChunk is one chunk that PreparePromotion leased.
type PromotedChunk struct {
	Promotion uint64 // handle for FinishPromotion; 0 if the chunk is ready
	State     PromotionState
	Chunk     int // its place among the chunks of the run
	Pages     int // from its first page on
	Region    uint32
	Offset    uint64 // bytes, of its first page
	// it is, or is to be, leased from a peer; Region and Offset are those of the loan, if it is
	// ready
	Foreign bool
}

// flight is what a chunk that is on its way is known by: the hash of its last page, which names all
// its pages. Whoever finds a slot by it compares the page.
func (e *Engine) flight(ref uint32) uint64 {
	r, s := e.slot(ref)
	return e.spaceOf(r, s).hashOfRecord(r.digest(ref&recordMask, int(s.granted)-1))
}

// flying is the slot of a space, which may be nil, that is being promoted into for the chunk that
// ends with a page; 0: there is none.
func (e *Engine) flying(s *space, d []byte) uint32 {
	if s == nil || e.flights.n == 0 {
		return 0
	}
	ref := e.flights.get(s.hash(d))
	if ref == 0 {
		return 0
	}
	if r, sl := e.slot(ref); r.class != s.class || sl.space != s.id ||
		!equal(r.digest(ref&recordMask, int(sl.granted)-1), d) {
		return 0
	}
	return ref
}

// Awaited says whether the chunk that ends with a page is on its way for some lookup.
func (e *Engine) Awaited(id SpaceID, digest []byte) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	s, err := e.space(id)
	return err == nil && len(digest) == s.g.DigestBytes && (e.flying(s, digest) != 0 ||
		e.flying(s.shadow, digest) != 0)
}

// PreparePromotion lets a lookup of owner o go on with chunks that can be had from a tier: a run
// that begins with the first chunk that the lookup does not hold whole (firstPage is that chunk's
// first page), hashes being the digests of its pages and prev that of the page before, if it is
// known. have[i] is how many pages of the run's i-th chunk a tier has, from its first, or with
// lent[i] a peer: then it is to be borrowed (FinishBorrow), as it is where peers lent something
// already. lent may be nil. A lookup that hit nothing is made here.
//
// Slots are reserved for all of them at once, and nothing is waited for: what finds no room (in the
// owner's share, in the part of the slots that may be promoted into, or because nothing can be
// evicted) is cut off the end, as is what nobody has. The chunks that are left are appended to out,
// and leased by the lookup. It then waits, without a deadline, until SettleLookup; Trim, Cancel and
// RemoveOwner may free its leases before. ErrStale: the lookup ends somewhere else; ErrBusy: the
// owner has too many lookups.
func (e *Engine) PreparePromotion(o Owner, lookup uint64, firstPage int, prev, hashes []byte,
	have []uint16, lent []bool, out []PromotedChunk) ([]PromotedChunk, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	ow, err := e.owner(o)
	if err != nil {
		return out, err
	}
	sp := ow.space
	w, err := e.walk(sp.g, firstPage, hashes)
	if err != nil {
		return out, err
	}
	if firstPage%w.ppc != 0 || len(have) < w.chunks || lent != nil && (len(lent) < w.chunks ||
		ow.own) || len(prev) != 0 && (len(prev) != w.digest || firstPage == 0) {
		return out, invalid("promotion from page %d of %d chunks with %d counts and %d bytes of the page before: want a multiple of %d", firstPage, w.chunks, len(have), len(prev), w.ppc)
	}
	e.idx.migrate(migrateStep)
	refs := e.refs[:w.chunks]
	if lent != nil {
		if err := e.needForeign(ow); err != nil {
			return out, err
		}
	}
	if err := e.probeWithRoom(ow, &w, refs, have, lent); err != nil {
		return out, err
	}
	shadow := ow.shadow()
	x := ow.lookups[lookup]
	switch {
	case x == nil && len(ow.lookups) >= e.cfg.MaxLookupsPerOwner:
		return out, fmt.Errorf("%w: owner %d has %d lookups", tiers.ErrBusy, o, len(ow.lookups))
	case x != nil && (x.waiting && x.end != firstPage ||
		!x.waiting && (x.first+x.n)/w.ppc != w.chunk):
		return out, fmt.Errorf("%w: lookup %d holds pages %d to %d, and cannot go on at %d",
			tiers.ErrStale, lookup, x.first, x.first+x.n-1, firstPage)
	}
	if sp.clears > 0 {
		return out, nil // what a tier still has may be on its way out
	}

	e.tick++
	// What is held is leased first, so that room for one chunk does not cost another.
	pinned := 0 // slots that nobody else has leased
	for i, rec := range refs {
		if rec = e.served(rec); shadow != nil && shadow.pages > 0 && (rec == 0 ||
			!e.at(rec, w.last(i))) {
			rec = e.find(shadow, w.hash(w.last(i)))
		}
		if rec != 0 && e.at(rec, w.last(i)) {
			refs[i], _ = e.slotOf(rec)
			if _, s := e.slot(refs[i]); s.idle() {
				pinned++
			}
			e.pin(refs[i])
		} else {
			refs[i] = 0
		}
	}
	slots := e.held[:0]
	room, left := e.cfg.MaxLeasesPerOwner-ow.leases, e.left(ow)+pinned
	parent := e.chunkBefore(sp, x, &w, prev)
	join := e.flights.n > 0 // not only what is granted here
	end, i := firstPage, 0
	for ; i < w.chunks && end == w.start(i) && len(slots) < room; i++ {
		c := PromotedChunk{Chunk: i, Pages: w.last(i) - w.start(i) + 1}
		ref := refs[i]
		if ref != 0 {
			if i == 0 && x != nil && w.last(0) < x.first+x.n {
				break // it has more
			}
			if len(slots) >= left || !e.claim(ow, ref) {
				e.stats.Limited++
				break
			}
		} else if ref = e.promote(ow, &w, i, int(have[i]), lent != nil && lent[i], join, parent, x,
			&c); ref == 0 {
			break
		}
		r, s := e.slot(ref)
		if parent != 0 && !r.foreign && e.orphan(ref) {
			e.adopt(parent, ref)
		}
		c.Foreign = r.foreign
		c.Region, c.Offset = r.where(ref, 0)
		if c.State != PromotionReady {
			c.Promotion = uint64(s.gen)<<32 | uint64(ref)
		}
		out = append(out, c)
		slots = append(slots, ref)
		if parent = ref; r.foreign {
			parent = 0
		}
		end = w.start(i) + c.Pages
		if c.Pages < w.ppc {
			i++
			break
		}
	}
	for j := w.chunks - 1; j >= i; j-- {
		if refs[j] != 0 {
			e.unpin(refs[j])
		}
	}
	if len(slots) == 0 {
		return out, nil
	}
	if x == nil {
		x = e.newLease(lookupLease, ow, slots)
		x.key, x.first = lookup, firstPage
		ow.lookups[lookup] = x
		x.waiting, x.after = true, w.chunk
	} else {
		if !x.waiting {
			e.expiry.remove(x)
			x.waiting, x.held, x.after = true, len(x.slots), w.chunk
		}
		e.extendLease(x, slots)
	}
	x.end = end
	return out, nil
}

// promote leases chunk i of a walk, of which a tier has have pages and the arena not all, for a
// lookup x, which may be nil. 0: nobody has more of it than the lookup, or there is no room. lent
// says that it is a peer that has them, join that it may be on its way already.
func (e *Engine) promote(ow *owner, w *walk, i, have int, lent, join bool, parent uint32, x *lease,
	c *PromotedChunk) uint32 {
	sp := ow.space
	start := w.start(i)
	all := w.last(i) - start + 1
	have = min(have, all)
	held, rec := 0, uint32(0)
	if have < all { // else it is no less than what is held
		var page int
		if rec, page = e.longer(ow, w, i); rec != 0 {
			held = page - start + 1
		}
	}
	if got := start + max(held, have); got == start || i == 0 && x != nil && got <= x.first+x.n {
		return 0
	}
	if rec != 0 && held >= have {
		ref, _ := e.slotOf(rec)
		if !e.claim(ow, ref) {
			e.stats.Limited++
			return 0
		}
		e.pin(ref)
		c.Pages = held
		return ref
	}
	c.Pages = have
	last := w.hash(start + have - 1)
	in, other := sp, ow.shadow() // one is as good as the other
	if lent {
		in, other = other, in
	}
	var ref uint32
	if join {
		if ref = e.flying(in, last); ref == 0 {
			ref = e.flying(other, last)
		}
	}
	if ref != 0 {
		r, s := e.slot(ref)
		if int(s.chunk)*r.ppc != start {
			return 0 // no honest client's
		}
		if !e.claim(ow, ref) {
			e.stats.Limited++
			return 0
		}
		c.State = PromotionJoined
		if !r.foreign {
			e.stats.PromotionsJoined++
		}
	} else {
		switch {
		case lent:
			ref = e.grantForeign(ow, w.chunk+i, have)
		case sp.class.promoting < sp.class.promotable:
			ref = e.grant(ow, parent, w.chunk+i, have)
		}
		if ref == 0 {
			e.stats.Limited++
			return 0
		}
		e.write(ref, w, start, 0, have)
		r, s := e.slot(ref)
		s.flags |= promoting
		r.class.promoting++
		e.flights.set(in.hash(last), ref)
		c.State = PromotionGranted
		if !lent {
			e.stats.Promotions++
		}
	}
	_, s := e.slot(ref)
	s.pins++
	e.pins++
	return ref
}

// chunkBefore is the slot of the chunk before a run, if it is held: by the lookup that goes on, or
// by anybody.
func (e *Engine) chunkBefore(sp *space, x *lease, w *walk, prev []byte) uint32 {
	if x != nil {
		i := len(x.slots) - 1
		if _, s := e.slot(x.slots[i]); !x.waiting && int(s.chunk) == w.chunk {
			i--
		}
		if i >= 0 {
			if r, s := e.slot(x.slots[i]); int(s.chunk) == w.chunk-1 && !s.doomed() && !r.foreign {
				return x.slots[i]
			}
		}
	}
	if len(prev) > 0 {
		if rec := e.find(sp, prev); rec != 0 && e.at(rec, w.first-1) {
			ref, _ := e.slotOf(rec)
			return ref
		}
	}
	return 0
}

// extendLease adds slots, which are counted on its owner already, to a lease.
func (e *Engine) extendLease(x *lease, slots []uint32) {
	x.owner.leases += len(slots)
	if cap(x.slots)-len(x.slots) >= len(slots) {
		x.slots = append(x.slots, slots...) // still in buf
		return
	}
	buf := append(e.bufs.get(len(x.slots)+len(slots)), x.slots...)
	e.bufs.put(x.buf)
	x.buf = append(buf, slots...)
	x.slots = x.buf
}

// promotion resolves a handle.
func (e *Engine) promotion(p uint64) (uint32, error) {
	ref, gen := uint32(p), uint32(p>>32)
	if e.closed {
		return 0, tiers.ErrClosed
	}
	n, i := int(ref>>recordBits), int(ref&recordMask)
	if n == 0 || n > e.nregion || e.regions[n] == nil || i >= e.regions[n].fresh ||
		gen > e.regions[n].slots[i].gen {
		return 0, fmt.Errorf("%w: promotion %#x", tiers.ErrNotFound, p)
	}
	if s := &e.regions[n].slots[i]; s.gen != gen || s.state != filling || s.flags&promoting == 0 {
		return 0, fmt.Errorf("%w: promotion %#x has ended", tiers.ErrStale, p)
	}
	return ref, nil
}

// PromotionWanted says whether some lookup still waits for a chunk: to be asked before its I/O
// begins. FinishPromotion must follow in any case.
func (e *Engine) PromotionWanted(p uint64) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	ref, err := e.promotion(p)
	if err != nil {
		return false
	}
	_, s := e.slot(ref)
	return s.pins > 0 && !s.doomed()
}

// FinishPromotion ends the loading of a chunk: nothing writes its slot any more. ok says that the
// bytes are there, and checked; then it can be found, and the lookups that wait for it hold it.
// Otherwise, and if it was cleared meanwhile, it is dropped. fromTier is the tier that had it, and
// need not be given it back; -1 if that is unknown. ErrStale: it has ended before.
func (e *Engine) FinishPromotion(p uint64, ok bool, fromTier int) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	ref, err := e.promotion(p)
	if err != nil {
		return err
	}
	if ok && e.isForeign(ref) {
		return invalid("promotion %#x is of what peers lend", p)
	}
	e.finish(ref, ok, fromTier, nil)
	return nil
}

// finish ends the loading of a chunk, or its being borrowed: then l says where it is.
func (e *Engine) finish(ref uint32, ok bool, fromTier int, l *Loan) {
	e.idx.migrate(migrateStep)
	e.tick++
	e.land(ref)
	r, s := e.slot(ref)
	r.class.promoting--
	s.flags &^= promoting
	pages := int(s.granted)
	if l != nil {
		pages = min(pages, l.Pages)
		e.takeLoan(r, ref, l, pages)
	} else if !ok && !r.foreign {
		e.stats.PromotionsFailed++
	}
	var buf [32]byte
	first := e.find(e.spaceOf(r, s), r.digestBytes(ref&recordMask, pages-1, &buf))
	there := first != 0
	if there && !r.foreign {
		e.stats.PromotionsLate++
	}
	if s.pins == 0 && (!ok || s.doomed() || there) {
		e.release(ref)
		return
	}
	s.state, s.granted = ready, 0
	r.filled()
	if s.pins > 0 {
		r.lease()
	}
	// A store may have been first with it. The lookups keep what they have, which is as good; it
	// goes when they do.
	if !ok || s.doomed() || !(r.foreign && e.enterLent(r, ref, pages, first) ||
		!r.foreign && e.enter(ref, 0, pages)) {
		e.disown(ref)
		s.flags |= doomed
		if s.idle() {
			e.release(ref)
		}
		return
	}
	if there {
		s.flags |= twin
	}
	e.register(ref)
	if !r.foreign {
		e.stats.PromotedPages += uint64(pages)
		e.admitPromoted(ref, fromTier)
	}
	if s.idle() {
		e.settle(ref)
	}
}

// land takes a slot that is being promoted into, and was not landed before, out of the table of
// what is on its way.
func (e *Engine) land(ref uint32) {
	e.flights.remove(e.flight(ref), ref)
}

// SettleLookup ends a lookup's waiting for promotions. It keeps what it holds by now without a gap,
// but at most the given number of pages, from the first that it (still) holds or waits for; the
// rest of its leases are freed, and its deadline starts. With no pages the lookup ends. A lookup
// that does not wait is cut and given a new deadline likewise. ErrNotFound: there is none (any
// more).
func (e *Engine) SettleLookup(o Owner, lookup uint64, pages int) (ready int, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	x, err := e.lookup(o, lookup)
	if err != nil {
		return 0, err
	}
	ppc := x.owner.space.g.PagesPerChunk
	if x.waiting {
		e.endWait(x, ppc)
	} else {
		e.expiry.remove(x)
	}
	x.deadline = e.cfg.Now() + int64(e.cfg.LeaseDeadline)
	e.expiry.push(x)

	first := x.first / ppc
	for i, ref := range x.slots {
		if _, s := e.slot(ref); s.doomed() {
			x.n = min(x.n, (first+i)*ppc-x.first)
			break
		}
	}
	if x.n = min(x.n, pages); x.n <= 0 {
		e.endLease(x)
		return 0, nil
	}
	keep := (x.first+x.n-1)/ppc - first + 1
	e.freeSlots(x, x.slots[keep:])
	x.slots = x.slots[:keep]
	for i := 1; i < keep; i++ {
		if e.orphan(x.slots[i]) && !e.isForeign(x.slots[i]) && !e.isForeign(x.slots[i-1]) {
			e.adopt(x.slots[i-1], x.slots[i])
		}
	}
	return x.n, nil
}

// endWait makes what has arrived of a waiting lookup's chunks pages that it holds, and frees what
// has not.
func (e *Engine) endWait(x *lease, ppc int) {
	i, end := x.held, x.end
	for ; i < len(x.slots) && end == x.end; i++ {
		_, s := e.slot(x.slots[i])
		if s.state != ready || s.doomed() {
			break
		}
		// A peer may have lent less of it than it was said to have.
		if got := int(s.chunk)*ppc + int(s.pages); got < min(x.end, (int(s.chunk)+1)*ppc) {
			if got <= x.first+x.n {
				break
			}
			end = got
		}
	}
	e.freeSlots(x, x.slots[i:])
	x.slots = x.slots[:i]
	if n := i - x.held; n > 0 {
		if x.held > 0 && (x.first+x.n-1)/ppc == x.after {
			// The shorter version of the first of them.
			e.freeSlots(x, x.slots[x.held-1:x.held])
			copy(x.slots[x.held-1:], x.slots[x.held:])
			x.slots = x.slots[:i-1]
		}
		x.n = min(end, (x.after+n)*ppc) - x.first
	}
	x.waiting = false
}
