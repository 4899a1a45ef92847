package engine

import (
	"fmt"

	"lookaside/tiers"
	"lookaside/tiers/tenant"
)

// PromotionState is what remains to be done for a chunk that a lookup goes on with.
type PromotionState uint8

const (
	PromotionReady   PromotionState = iota // it is held now, and leased
	PromotionJoined                        // another lookup is loading it already
	PromotionGranted                       // the caller must load it
)

// PromotedChunk is one chunk that PreparePromotion leased.
type PromotedChunk struct {
	Promotion uint64 // handle for FinishPromotion; 0 if the chunk is ready
	State     PromotionState
	Chunk     int // its place among the chunks of the run
	Pages     int // from its first page on
	Region    uint32
	Offset    uint64 // bytes, of its first page
	// it is leased from a peer, or will be; Region and Offset are those of the loan, if it is ready
	Foreign bool
}

// flight returns what a chunk that is on its way is known by: the hash of its last page, which
// names all its pages. A slot that is found by it must be compared with the page.
func (e *Engine) flight(ref uint32) uint64 {
	r, s := e.slot(ref)
	return e.spaceOf(r, s).hashOfRecord(r.digest(ref&recordMask, int(s.granted)-1))
}

// flying returns the slot of a space that is being promoted into for the chunk that ends with a
// page. 0: there is none. The space may be nil.
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

// Awaited reports whether the chunk that ends with a page is on its way for some lookup.
func (e *Engine) Awaited(id SpaceID, digest []byte) bool {
	e.mu.Lock()
	defer e.unlock()
	s, err := e.space(id)
	return err == nil && len(digest) == s.g.DigestBytes && (e.flying(s, digest) != 0 ||
		e.flying(s.shadow, digest) != 0)
}

// PromotionRun is the run of chunks that a lookup is to go on with. It begins with the first chunk
// that the lookup does not hold whole.
type PromotionRun struct {
	FirstPage int    // the first of that chunk
	Prev      []byte // digest of the page before; empty if there is none, or it is not known
	Hashes    []byte // digests of the run's pages, end to end
	// Have is how many pages of each chunk of the run, from its first, a tier has.
	Have []uint16
	// Lent names the chunks that a peer has and not a tier. They must be borrowed (FinishBorrow).
	// Nil: none are.
	Lent []bool
	// Tenant is whose request it is. New slots are its, whoever stored the chunks in the tier: the
	// tenant that has a chunk brought up is the one that uses the room.
	Tenant tenant.ID
}

// validate checks a run of an owner's, whose chunks are those of w.
func (run *PromotionRun) validate(ow *owner, w *walk) error {
	ok := run.FirstPage%w.ppc == 0 && len(run.Have) >= w.chunks
	if run.Lent != nil {
		ok = ok && len(run.Lent) >= w.chunks && !ow.own
	}
	if len(run.Prev) != 0 {
		ok = ok && len(run.Prev) == w.digest && run.FirstPage != 0
	}
	if !ok {
		return invalid("promotion from page %d of %d chunks with %d counts and %d bytes of the "+
			"page before: want a multiple of %d", run.FirstPage, w.chunks, len(run.Have),
			len(run.Prev), w.ppc)
	}
	return nil
}

// lent reports whether chunk i of the run must be borrowed from a peer.
func (run *PromotionRun) lent(i int) bool { return run.Lent != nil && run.Lent[i] }

// PreparePromotion lets a lookup of owner o go on with chunks that a tier or a peer has. A lookup
// that hit nothing is made here.
//
// All slots are reserved at once, and nothing is waited for. The end of the run is cut off from the
// first chunk that neither a tier nor a peer has, or that finds no room: in the owner's share, in
// the part of the slots that may be promoted into, or because nothing can be evicted. The chunks
// that are left are appended to out and leased by the lookup. A chunk of which a peer lent
// something already is borrowed, whatever run.Lent has.
//
// The lookup then waits, without a deadline, until SettleLookup. Trim, Cancel and RemoveOwner may
// free its leases before that. ErrStale: the lookup ends somewhere else; ErrBusy: the owner has too
// many lookups.
func (e *Engine) PreparePromotion(o Owner, lookup uint64, run PromotionRun,
	out []PromotedChunk) ([]PromotedChunk, error) {
	e.mu.Lock()
	defer e.unlock()
	ow, err := e.owner(o)
	if err != nil {
		return out, err
	}
	w, err := e.walk(ow.space.g, run.FirstPage, run.Hashes)
	if err != nil {
		return out, err
	}
	if err := run.validate(ow, &w); err != nil {
		return out, err
	}
	e.idx.migrate(migrateStep)
	refs := e.scratch.refs[:w.chunks]
	if run.Lent != nil {
		if err := e.needForeign(ow); err != nil {
			return out, err
		}
	}
	if err := e.probeWithRoom(ow, &w, refs, run.Have, run.Lent); err != nil {
		return out, err
	}
	x, err := e.goingOn(ow, lookup, &w)
	if err != nil {
		return out, err
	}
	if ow.space.clears > 0 {
		return out, nil // what a tier still has may be on its way out
	}
	e.tick++
	p := promoter{e: e, ow: ow, w: w, run: run, refs: refs, x: x}
	out, slots, end := p.reserve(out)
	if len(slots) > 0 {
		e.await(ow, x, lookup, &w, slots, end)
	}
	return out, nil
}

// goingOn returns the lookup that is to go on with a walk. It is nil if the lookup is yet to be
// made.
func (e *Engine) goingOn(ow *owner, lookup uint64, w *walk) (*lease, error) {
	x := ow.lookups[lookup]
	if x == nil {
		if len(ow.lookups) >= e.cfg.MaxLookupsPerOwner {
			return nil, fmt.Errorf("%w: owner %d has %d lookups", tiers.ErrBusy, ow.id,
				len(ow.lookups))
		}
		return nil, nil
	}
	fits := (x.first+x.n)/w.ppc == w.chunk
	if x.lookup.waiting {
		fits = x.lookup.end == w.first
	}
	if !fits {
		return nil, fmt.Errorf("%w: lookup %d holds pages %d to %d, and cannot go on at %d",
			tiers.ErrStale, lookup, x.first, x.first+x.n-1, w.first)
	}
	return x, nil
}

// await has a lookup wait for slots, which end before page end. With a nil x it is made.
func (e *Engine) await(ow *owner, x *lease, lookup uint64, w *walk, slots []uint32, end int) {
	if x == nil {
		x = e.leases.addLookup(ow, lookup, w.first, slots)
		x.lookup.waiting, x.lookup.after = true, w.chunk
	} else {
		if !x.lookup.waiting {
			e.leases.expiry.remove(x)
			x.lookup.waiting, x.lookup.held, x.lookup.after = true, len(x.slots), w.chunk
		}
		e.leases.extend(x, slots)
	}
	x.lookup.end = end
}

// promoter is one call of PreparePromotion. It has no pointer to the walk or the run, as that would
// move them to the heap.
type promoter struct {
	e    *Engine
	ow   *owner
	w    walk
	run  PromotionRun
	refs []uint32 // by chunk: the record of its last page; from pinHeld on its slot, 0 for none
	x    *lease   // the lookup; nil: it is yet to be made

	parent uint32 // the slot of the chunk before the next one, 0 for none
	join   bool   // something was on its way before the call
}

// reserve leases the chunks of the run, as far as there is room, and appends them to out. It
// returns their slots, which are valid until the next call, and the page after the last of them.
func (p *promoter) reserve(out []PromotedChunk) (_ []PromotedChunk, slots []uint32, end int) {
	e, w := p.e, &p.w
	pinned := p.pinHeld()
	slots = e.scratch.held[:0]
	room, left := e.cfg.MaxLeasesPerOwner-p.ow.leases, e.left(p.ow)+pinned
	p.parent = e.chunkBefore(p.ow.space, p.x, w, p.run.Prev)
	p.join = e.flights.n > 0
	end = w.first
	i := 0
	for ; i < w.chunks && end == w.start(i) && len(slots) < room; i++ {
		c := PromotedChunk{Chunk: i, Pages: w.last(i) - w.start(i) + 1}
		ref := p.lease(i, len(slots) < left, &c)
		if ref == 0 {
			break
		}
		r, s := e.slot(ref)
		if p.parent != 0 && !r.foreign && e.orphan(ref) {
			e.adopt(p.parent, ref)
		}
		c.Foreign = r.foreign
		c.Region, c.Offset = r.where(ref, 0)
		if c.State != PromotionReady {
			c.Promotion = uint64(s.gen)<<32 | uint64(ref)
		}
		out = append(out, c)
		slots = append(slots, ref)
		if p.parent = ref; r.foreign {
			p.parent = 0
		}
		end = w.start(i) + c.Pages
	}
	for j := w.chunks - 1; j >= i; j-- {
		if p.refs[j] != 0 {
			e.unpin(p.refs[j])
		}
	}
	return out, slots, end
}

// pinHeld leases the chunks of the run that are held whole, before any room is made: room for one
// chunk must not cost another. It returns how many slots had no other lease.
func (p *promoter) pinHeld() (pinned int) {
	e, w := p.e, &p.w
	shadow := p.ow.shadow()
	for i, rec := range p.refs {
		if rec = e.served(rec); shadow != nil && shadow.pages > 0 && (rec == 0 ||
			!e.at(rec, w.last(i))) {
			rec = e.find(shadow, w.hash(w.last(i)))
		}
		if rec == 0 || !e.at(rec, w.last(i)) {
			p.refs[i] = 0
			continue
		}
		p.refs[i], _ = e.slotOf(rec)
		if _, s := e.slot(p.refs[i]); s.idle() {
			pinned++
		}
		e.pin(p.refs[i])
	}
	return pinned
}

// lease leases chunk i of the run for the lookup, and fills in c. It returns the slot. 0: the
// lookup has as much of it, neither a tier nor a peer has it, or there is no room. idle reports
// whether the owner may lease one more slot that is held and has no other lease.
func (p *promoter) lease(i int, idle bool, c *PromotedChunk) uint32 {
	e, ref := p.e, p.refs[i]
	if ref == 0 {
		return p.promote(i, c)
	}
	if i == 0 && p.x != nil && p.w.last(0) < p.x.first+p.x.n {
		return 0 // the lookup has more
	}
	if !idle || !e.claim(p.ow, ref) {
		e.stats.Limited++
		return 0
	}
	return ref
}

// promote leases a slot for a chunk that the arena does not hold whole. It takes the first of: a
// held part that is at least as long as the tier's, a slot that is being filled with this chunk, a
// new slot.
func (p *promoter) promote(i int, c *PromotedChunk) uint32 {
	e, w := p.e, &p.w
	start := w.start(i)
	all := w.last(i) - start + 1
	have := min(int(p.run.Have[i]), all)
	held, rec := 0, uint32(0)
	if have < all { // else it is no less than what is held
		var page int
		if rec, page = e.longer(p.ow, w, i); rec != 0 {
			held = page - start + 1
		}
	}
	got := start + max(held, have)
	if got == start || i == 0 && p.x != nil && got <= p.x.first+p.x.n {
		return 0
	}
	if rec != 0 && held >= have {
		ref, _ := e.slotOf(rec)
		if !e.claim(p.ow, ref) {
			e.stats.Limited++
			return 0
		}
		e.pin(ref)
		c.Pages = held
		return ref
	}
	c.Pages = have
	ref := p.flying(i, w.hash(start+have-1))
	if ref != 0 {
		c.State = PromotionJoined
		if !p.joins(ref, start) {
			return 0
		}
	} else {
		c.State = PromotionGranted
		if ref = p.grant(i, have); ref == 0 {
			e.stats.Limited++
			return 0
		}
	}
	_, s := e.slot(ref)
	s.pins++
	e.leases.pins++
	return ref
}

// in is the space in which chunk i of the run is to appear, and the one in which it may be as well.
// The second is nil if there is none.
func (p *promoter) in(i int) (in, other *space) {
	in, other = p.ow.space, p.ow.shadow()
	if p.run.lent(i) {
		return other, in
	}
	return in, other
}

// flying returns the slot that is being filled with chunk i of the run, which ends with a page. It
// may come from a tier or from a peer: both are as good. 0: there is none.
func (p *promoter) flying(i int, last []byte) uint32 {
	if !p.join {
		return 0
	}
	in, other := p.in(i)
	if ref := p.e.flying(in, last); ref != 0 {
		return ref
	}
	return p.e.flying(other, last)
}

// joins counts the lookup among those that wait for a slot, whose chunk must begin at page start.
func (p *promoter) joins(ref uint32, start int) bool {
	e := p.e
	r, s := e.slot(ref)
	if int(s.chunk)*r.ppc != start {
		return false // no honest client's
	}
	if !e.claim(p.ow, ref) {
		e.stats.Limited++
		return false
	}
	if !r.foreign {
		e.stats.PromotionsJoined++
	}
	return true
}

// grant takes a slot for chunk i of the run, of which so many pages come, and lets others join in.
// 0: there is no room.
func (p *promoter) grant(i, pages int) (ref uint32) {
	e, w := p.e, &p.w
	start := w.start(i)
	switch c := p.ow.space.class; {
	case p.run.lent(i):
		ref = e.grantForeign(p.ow, p.run.Tenant, w.chunk+i, pages)
	case c.promoting < c.promotable:
		ref = e.grant(p.ow, p.run.Tenant, p.parent, w.chunk+i, pages)
	}
	if ref == 0 {
		return 0
	}
	e.write(ref, w, start, 0, pages)
	r, s := e.slot(ref)
	s.flags |= pending
	r.class.promoting++
	in, _ := p.in(i)
	e.flights.set(in.hash(w.hash(start+pages-1)), ref)
	if !r.foreign {
		e.stats.Promotions++
	}
	return ref
}

// chunkBefore returns the slot of the chunk before a run, if the lookup that goes on or anybody
// else holds it.
func (e *Engine) chunkBefore(sp *space, x *lease, w *walk, prev []byte) uint32 {
	if x != nil {
		i := len(x.slots) - 1
		if _, s := e.slot(x.slots[i]); !x.lookup.waiting && int(s.chunk) == w.chunk {
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
	if s := &e.regions[n].slots[i]; s.gen != gen || !s.promoting() {
		return 0, fmt.Errorf("%w: promotion %#x has ended", tiers.ErrStale, p)
	}
	return ref, nil
}

// PromotionWanted reports whether a lookup still waits for a chunk. Ask it before the chunk's I/O
// begins. FinishPromotion must follow in any case.
func (e *Engine) PromotionWanted(p uint64) bool {
	e.mu.Lock()
	defer e.unlock()
	ref, err := e.promotion(p)
	if err != nil {
		return false
	}
	_, s := e.slot(ref)
	return s.pins > 0 && !s.doomed()
}

// FinishPromotion ends the loading of a chunk: nothing writes its slot any more. With ok its bytes
// are there and checked: it can be found, and the lookups that wait for it hold it. Otherwise, or
// if it was cleared meanwhile, it is dropped. fromTier is the tier that had it and need not be
// given it back; -1: unknown. ErrStale: it has ended before.
func (e *Engine) FinishPromotion(p uint64, ok bool, fromTier int) error {
	e.mu.Lock()
	defer e.unlock()
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

// finish ends the loading of a chunk, or its borrowing: then l is its loan.
func (e *Engine) finish(ref uint32, ok bool, fromTier int, l *Loan) {
	e.idx.migrate(migrateStep)
	e.tick++
	e.endFlight(ref)
	r, s := e.slot(ref)
	r.class.promoting--
	s.flags &^= pending
	pages, first := e.arrived(ref, ok, l)
	if s.pins == 0 && (!ok || s.doomed() || first != 0) {
		e.release(ref)
		return
	}
	s.state, s.granted = ready, 0
	r.filled()
	if s.pins > 0 {
		r.lease()
	}
	if !ok || s.doomed() || !e.appear(r, ref, pages, first) {
		e.disown(ref)
		s.flags |= doomed
		if s.idle() {
			e.release(ref)
		}
		return
	}
	e.register(ref)
	e.came(ref)
	if !r.foreign {
		e.stats.PromotedPages += uint64(pages)
		e.admitPromoted(ref, fromTier)
	}
	if s.idle() {
		e.settle(ref)
	}
}

// arrived counts what has come into a slot, and keeps its loan, if there is one. It returns how
// many pages have come, and the record that has the last of them already, or 0.
func (e *Engine) arrived(ref uint32, ok bool, l *Loan) (pages int, first uint32) {
	r, s := e.slot(ref)
	pages = int(s.granted)
	if l != nil {
		pages = min(pages, l.Pages)
		e.takeLoan(r, ref, l, pages)
	}
	var buf [32]byte
	first = e.find(e.spaceOf(r, s), r.digestBytes(ref&recordMask, pages-1, &buf))
	if !r.foreign {
		e.stats.PromotionsFailed += uint64(b2i(!ok))
		e.stats.PromotionsLate += uint64(b2i(first != 0))
	}
	return pages, first
}

// appear indexes what has come into a slot. first is the record that has its last page already, or
// 0: a store may have been first with it. The lookups that waited keep what they have, which is as
// good, and it goes when they do. It returns false if the slot cannot be indexed.
func (e *Engine) appear(r *region, ref uint32, pages int, first uint32) bool {
	if r.foreign {
		if !e.enterLent(r, ref, pages, first) {
			return false
		}
	} else if !e.enter(ref, 0, pages) {
		return false
	}
	if first != 0 {
		r.slots[ref&recordMask].flags |= twin
	}
	return true
}

// endFlight removes a slot that is being promoted into from the table of chunks on their way. It
// must be there.
func (e *Engine) endFlight(ref uint32) {
	e.flights.remove(e.flight(ref), ref)
}

// SettleLookup ends a lookup's waiting for promotions. The lookup keeps what it holds by now
// without a gap, but at most the given number of pages from its first; the rest of its leases are
// freed, and its deadline starts. With no pages the lookup ends. A lookup that does not wait is
// cut, and given a new deadline, likewise. ErrNotFound: there is no such lookup.
func (e *Engine) SettleLookup(o Owner, lookup uint64, pages int) (ready int, err error) {
	e.mu.Lock()
	defer e.unlock()
	x, err := e.lookup(o, lookup)
	if err != nil {
		return 0, err
	}
	ppc := x.owner.space.g.PagesPerChunk
	if x.lookup.waiting {
		e.endWait(x, ppc)
	} else {
		e.leases.expiry.remove(x)
	}
	x.lookup.deadline = e.cfg.Now() + int64(e.cfg.LeaseDeadline)
	e.leases.expiry.push(x)

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

// endWait makes those chunks of a waiting lookup that have arrived pages that it holds, and frees
// the others.
func (e *Engine) endWait(x *lease, ppc int) {
	i, end := x.lookup.held, x.lookup.end
	for ; i < len(x.slots) && end == x.lookup.end; i++ {
		_, s := e.slot(x.slots[i])
		if s.state != ready || s.doomed() {
			break
		}
		// A peer may have lent less of it than it was said to have.
		if got := int(s.chunk)*ppc + int(s.pages); got < min(x.lookup.end, (int(s.chunk)+1)*ppc) {
			if got <= x.first+x.n {
				break
			}
			end = got
		}
	}
	e.freeSlots(x, x.slots[i:])
	x.slots = x.slots[:i]
	if n := i - x.lookup.held; n > 0 {
		if x.lookup.held > 0 && (x.first+x.n-1)/ppc == x.lookup.after {
			// The shorter version of the first of them.
			e.freeSlots(x, x.slots[x.lookup.held-1:x.lookup.held])
			copy(x.slots[x.lookup.held-1:], x.slots[x.lookup.held:])
			x.slots = x.slots[:i-1]
		}
		x.n = min(end, (x.lookup.after+n)*ppc) - x.first
	}
	x.lookup.waiting = false
}

// Room is what PreparePromotion could reserve or lease now, in chunks. It is an estimate: a slot
// that is not in use may still not be evictable.
type Room struct {
	// of the part of the slots that may be promoted into at a time: it frees itself as promotions
	// end
	Budget int
	// of the owner's share, and of the slots that are not in use: it frees itself as leases end
	Share int
	Most  int // with all of both: what wants more may as well not wait for it
}

// PromotionRoom returns the room for the lookups of an owner.
func (e *Engine) PromotionRoom(o Owner) (Room, error) {
	e.mu.Lock()
	defer e.unlock()
	ow, err := e.owner(o)
	if err != nil {
		return Room{}, err
	}
	c := ow.space.class
	idle, all := c.uncarved, c.uncarved
	for _, r := range c.regions {
		if !r.draining {
			idle += len(r.slots) - r.filling - r.leased
			all += len(r.slots)
		}
	}
	return Room{
		Budget: max(0, c.promotable-c.promoting),
		Share:  max(0, min(c.limit-ow.slots.n, idle, c.most-c.busy)),
		Most:   min(c.promotable, c.limit, all, c.most-c.frozen),
	}, nil
}
