package engine

import (
	"fmt"
	"math/bits"

	"lookaside/tiers"
	"lookaside/tiers/tenant"
	"lookaside/tiers/why"
)

// Foreign slots: what peers lend, read where it lies. They are those of a region without memory,
// one for each geometry. It hands out slots only to PreparePromotion, and only lookups and loads
// see them.
//
// What is in them is indexed in a space of its own (space.shadow). So no slot of the arena shares a
// page with a foreign one, is replaced by one, or continues one. A lookup tries foreign slots only
// for chunks that the arena does not hold whole. A chunk is indexed by its last page alone, as
// lookups probe for that: to index the pages before it took longer than to borrow it. A lookup for
// the first pages of a chunk that was borrowed with more borrows them again.

// Loan is what a peer lets us read of one chunk, from its first page on, until it is returned.
type Loan struct {
	Peer   uint64 // whose it is, not 0
	Region uint32 // as announced to our workers
	Offset uint64 // bytes, of the first page
	Pages  int
	Handle uint64 // by which it is returned, not 0
}

// Return is a loan to return to its peer: it is not read any more.
type Return struct {
	Handle uint64
	Bad    bool // its bytes did not check out
}

// maxForeign bounds the geometries with foreign slots: each takes the number of a region.
const maxForeign = 16

// lent is what the engine knows of loans beside its slots.
type lent struct {
	mask    uint64             // by number of a region: it is foreign
	regions int                // so many are, or are being carved
	refs    [probeGroup]uint32 // scratch
	loans   map[uint32]int     // by announced region
	returns []Return
	swept   [2]uint64 // ticks of the last sweeps, the older one first
	due     []dueCopy // chunks to copy into the arena
	reads   readCounts
}

// place is the loan of a foreign slot; without a handle there is none.
type place struct {
	peer, handle, offset uint64
	region               uint32
	reads                uint16 // loads of it
	bad                  bool
	due                  bool // it waits to be copied, or is being
}

func (e *Engine) isForeign(ref uint32) bool { return e.lent.mask>>(ref>>recordBits)&1 != 0 }

// spaceOf is the space of a slot.
func (e *Engine) spaceOf(r *region, s *slot) *space {
	if r.foreign {
		return e.spaces[s.space].shadow
	}
	return e.spaces[s.space]
}

// tally is what an owner's leases on a slot are counted in.
func (e *Engine) tally(ow *owner, ref uint32) *tally {
	if e.isForeign(ref) {
		return &ow.foreign
	}
	return &ow.slots
}

// claim counts a lease of an owner, unless it is on a slot too many.
func (e *Engine) claim(ow *owner, ref uint32) bool {
	return e.tally(ow, ref).add(ref, e.regions[ref>>recordBits].class.limit)
}

// foreignSlots is how many foreign slots a geometry has.
func (e *Engine) foreignSlots(g tiers.Geometry) int {
	return min(e.cfg.ForeignSlots, recordMask/g.PagesPerChunk)
}

// needForeign carves the foreign slots of an owner's geometry, if there are none. It may release
// the lock, and returns ErrNotFound if the owner has left meanwhile.
func (e *Engine) needForeign(ow *owner) error {
	c := ow.space.class
	if c.foreign != nil || e.cfg.ForeignSlots == 0 || e.carving || e.lent.regions == maxForeign {
		return nil
	}
	r := e.spareRegion()
	if r == nil {
		return nil
	}
	f := &class{geometry: c.geometry, policy: e.newPolicy(true), isForeign: true}
	e.lent.regions++
	e.lent.mask |= 1 << r.num
	r.foreign = true
	if err := e.carve(r, f, e.foreignSlots(c.geometry), Placement{}); err == nil {
		c.foreign = f
		for _, s := range e.byPrint {
			e.addShadow(s)
		}
		e.relimit()
	} else if !e.closed {
		e.lent.regions--
		e.lent.mask &^= 1 << r.num
		*r = region{num: r.num, firstGen: r.firstGen}
	}
	if now, err := e.owner(ow.id); err != nil || now != ow {
		return fmt.Errorf("%w: owner %d has left", tiers.ErrNotFound, ow.id)
	}
	return nil
}

// addShadow gives a space its shadow, if its class has foreign slots.
func (e *Engine) addShadow(s *space) {
	if f := s.class.foreign; f != nil && s.shadow == nil {
		s.shadow = &space{id: s.id, print: s.print, g: s.g, class: f, tagMask: s.tagMask,
			salt: mix(s.salt, 0x6C656E74)}
	}
}

// dropForeign takes the foreign slots of a class that no space uses.
func (e *Engine) dropForeign(c *class) {
	if c.foreign == nil {
		return
	}
	r := c.foreign.regions[0]
	e.uncarve(r)
	e.dropBlock(c.foreign)
	e.lent.mask &^= 1 << r.num
	e.lent.regions--
	c.foreign = nil
	*r = region{num: r.num, firstGen: r.firstGen}
}

// shadow returns the space in which the owner finds what peers lent. It is nil if there is nothing,
// or if it is not for this owner.
func (ow *owner) shadow() *space {
	if ow.own {
		return nil
	}
	return ow.space.shadow
}

// longer returns the last page of chunk i of a walk that an owner can read, and its record: in the
// arena, or where peers lent the chunk up to just that page. The chunk's last page in the walk is
// known not to be readable. A record of 0: no page is.
func (e *Engine) longer(ow *owner, w *walk, i int) (record uint32, page int) {
	record, page = e.bisect(ow.space, w, i)
	first := w.start(i)
	if record != 0 {
		first = page + 1
	}
	if s := ow.shadow(); s != nil && s.pages > 0 {
		for p := w.last(i) - 1; p >= first; p-- {
			if rec := e.find(s, w.hash(p)); rec != 0 && e.at(rec, p) {
				return rec, p
			}
		}
	}
	return record, page
}

// enterLent indexes so many pages of a foreign slot, whose digests are written, by the last of
// them. first is the record that this page is found by already, or 0. It returns false, with
// nothing changed, if that is held as another page of its prefix, which no honest client can bring
// about.
func (e *Engine) enterLent(r *region, ref uint32, pages int, first uint32) bool {
	s := &r.slots[ref&recordMask]
	sp := e.spaceOf(r, s)
	rec := ref&^recordMask | uint32(int(ref&recordMask)*r.ppc+pages-1)
	switch {
	case first == 0:
		e.idx.insert(sp.tagOfRecord(r.digest(ref&recordMask, pages-1)), rec)
		sp.pages += pages
	case !e.at(first, int(s.chunk)*r.ppc+pages-1):
		return false
	default:
		e.linkAfter(first, rec)
	}
	s.pages = uint16(pages)
	if first != 0 && pages < r.ppc { // one that is not in use adds nothing
		if other, _ := e.slotOf(first); r.slots[other&recordMask].idle() {
			e.leave(other, why.End)
			e.release(other)
		}
	}
	return true
}

// retractLent takes a foreign slot's pages out of the index: the reverse of enterLent.
func (e *Engine) retractLent(r *region, ref uint32) {
	s := &r.slots[ref&recordMask]
	if sp := e.spaceOf(r, s); e.unlink(sp.tagOfRecord(r.digest(ref&recordMask, int(s.pages)-1)), r,
		ref, int(s.pages)-1) {
		sp.pages -= int(s.pages)
	}
	s.pages = 0
}

// grantForeign takes a foreign slot for a chunk to borrow for a tenant. 0: there is none, or the
// owner has its share.
func (e *Engine) grantForeign(ow *owner, who tenant.ID, chunk, pages int) uint32 {
	s := ow.space.shadow
	if s == nil || ow.foreign.n >= s.class.limit {
		return 0
	}
	ref := e.alloc(s, who, chunk, pages)
	if ref != 0 {
		ow.foreign.add(ref, s.class.limit)
	}
	return ref
}

// FinishBorrow ends the borrowing of a chunk that PreparePromotion granted as foreign: from now on
// its pages are read at the place in l. With fewer l.Pages than were granted, the rest is not
// there. The engine keeps the loan until TakeReturns returns it, unless FinishBorrow fails. A
// foreign grant is ended by FinishBorrow or by FinishPromotion(p, false, -1). ErrStale: it has
// ended before; ErrInvalid, with nothing changed: it is not foreign, or l is no loan.
func (e *Engine) FinishBorrow(p uint64, l Loan) error {
	e.mu.Lock()
	defer e.unlock()
	err := e.finishBorrow(p, &l)
	if err == nil {
		e.countLoans(l.Region, 1)
	}
	return err
}

// FinishBorrows is FinishBorrow for several chunks. It sets done[i] to whether chunk i had no
// error.
func (e *Engine) FinishBorrows(ps []uint64, loans []Loan, done []bool) {
	e.mu.Lock()
	defer e.unlock()
	for _, p := range ps { // so that the cache misses of all of them overlap
		ref, err := e.promotion(p)
		if err != nil || !e.isForeign(ref) || e.idx.cur.used == 0 {
			continue
		}
		r, s := e.slot(ref)
		if pages := int(s.granted); pages > 0 {
			t, i := &e.idx.cur, ref&recordMask
			tag := e.spaceOf(r, s).tagOfRecord(r.digest(i, pages-1))
			e.scratch.touched += t.words[t.home(tag)] + uint64(r.places[i].region)
		}
	}
	counted := 0 // loans before it are
	for i, p := range ps {
		done[i] = e.finishBorrow(p, &loans[i]) == nil
	}
	for i := range ps { // most are in one region
		if i+1 == len(ps) || loans[i+1].Region != loans[i].Region {
			n := 0
			for ; counted <= i; counted++ {
				n += b2i(done[counted])
			}
			e.countLoans(loans[i].Region, n)
		}
	}
}

// finishBorrow is FinishBorrow without countLoans, which the caller calls.
func (e *Engine) finishBorrow(p uint64, l *Loan) error {
	ref, err := e.promotion(p)
	if err != nil {
		return err
	}
	if !e.isForeign(ref) || l.Peer == 0 || l.Handle == 0 || l.Pages < 1 {
		return invalid("promotion %#x of a loan %+v", p, *l)
	}
	e.finish(ref, true, -1, l)
	return nil
}

// countLoans counts loans in an announced region.
func (e *Engine) countLoans(region uint32, n int) {
	if e.lent.loans == nil {
		e.lent.loans = map[uint32]int{}
	}
	if n += e.lent.loans[region]; n == 0 {
		delete(e.lent.loans, region)
	} else {
		e.lent.loans[region] = n
	}
}

// takeLoan notes the loan of a slot that is about to be ready, with so many pages.
func (e *Engine) takeLoan(r *region, ref uint32, l *Loan, pages int) {
	i := ref & recordMask
	r.places[i] = place{peer: l.Peer, handle: l.Handle, offset: l.Offset, region: l.Region}
	if e.cfg.CopyAfter > 0 {
		r.places[i].reads = e.lent.reads.take(e.chunkKey(r, ref))
	}
	r.slots[i].granted = uint16(pages)
	e.stats.BorrowedChunks++
	e.stats.BorrowedPages += uint64(pages)
}

// returnLoan queues the loan of a slot that becomes free for its return.
func (e *Engine) returnLoan(r *region, ref uint32) {
	p := &r.places[ref&recordMask]
	if p.handle == 0 {
		return
	}
	e.lent.returns = append(e.lent.returns, Return{Handle: p.handle, Bad: p.bad})
	e.countLoans(p.region, -1)
	if p.reads > 0 {
		e.lent.reads.put(e.chunkKey(r, ref), p.reads)
	}
	*p = place{}
	if len(e.lent.returns) == 1 && e.cfg.Wake != nil {
		e.cfg.Wake(WorkReturns)
	}
}

// foundBad drops a foreign slot whose bytes did not check out.
func (e *Engine) foundBad(r *region, ref uint32) {
	if p := &r.places[ref&recordMask]; p.handle != 0 && !p.bad {
		p.bad = true
		e.stats.ForeignBad++
		e.doom(ref, why.End)
	}
}

// DropPeer drops all that is leased from a peer, or from all peers with 0. None of it can be found
// when DropPeer returns, and each loan is returned when its last lease ends. Refusing what is still
// being borrowed is up to the caller. It releases the lock between slices of its work.
func (e *Engine) DropPeer(peer uint64) {
	e.mu.Lock()
	defer e.unlock()
	e.eachForeign(func(r *region, ref uint32, s *slot) {
		if p := &r.places[ref&recordMask]; s.state == ready && p.handle != 0 && (peer == 0 ||
			p.peer == peer) {
			e.doom(ref, why.End)
		}
	})
}

// SweepForeign drops what is leased from peers and has not been used since the last sweep but one.
// It releases the lock between slices of its work.
func (e *Engine) SweepForeign() {
	e.mu.Lock()
	defer e.unlock()
	if e.closed {
		return
	}
	e.tick++
	before := e.lent.swept[0]
	e.lent.swept = [2]uint64{e.lent.swept[1], e.tick}
	e.eachForeign(func(_ *region, ref uint32, s *slot) {
		switch {
		case s.state != ready || s.doomed():
		case !s.idle():
			s.stamp = e.tick
		case s.stamp <= before:
			e.doom(ref, why.End)
		}
	})
}

// eachForeign calls f for all foreign slots that were ever used. It releases the lock between
// slices.
func (e *Engine) eachForeign(f func(r *region, ref uint32, s *slot)) {
	left := clearSlice
	for mask := e.lent.mask; mask != 0; mask &= mask - 1 {
		n := bits.TrailingZeros64(mask)
		for i := 0; ; i++ {
			if left == 0 {
				left = clearSlice
				if !e.pause() {
					return
				}
			}
			r := e.regions[n]
			if !r.foreign || i >= r.fresh || r.free == len(r.slots) {
				break
			}
			left--
			f(r, r.num<<recordBits|uint32(i), &r.slots[i])
		}
	}
}

// TakeReturns appends to out the loans that are not in use any more. Config.Wake is called with
// WorkReturns when there are some.
func (e *Engine) TakeReturns(out []Return) []Return {
	e.mu.Lock()
	defer e.unlock()
	out = append(out, e.lent.returns...)
	e.lent.returns = e.lent.returns[:0]
	return out
}

// ForeignIn returns how many loans the engine has in an announced region, including loans still
// being read. Loans that wait for TakeReturns do not count.
func (e *Engine) ForeignIn(region uint32) int {
	e.mu.Lock()
	defer e.unlock()
	return e.lent.loans[region]
}
