package engine

import (
	"encoding/binary"
	"fmt"
	"sync/atomic"

	"lookaside/dax"
	"lookaside/internal/invariants"
	"lookaside/tiers"
	"lookaside/tiers/policy"
)

type state uint8

// See the package comment for what each state means and how they follow on one another.
const (
	free state = iota
	filling
	ready
)

// flags are what else is to know of a slot.
type flags uint8

const (
	// ready or filling, out of the index for good; freed when nobody uses it
	doomed flags = 1 << iota
	// filling from a tier: lookups lease it meanwhile, and it stays until FinishPromotion whoever
	// gives up
	promoting
	// ready, promoted while a store was first with the same chunk: freed when nobody uses it, if
	// that still is there
	twin
	// ready, used since it was stored or grew, and queued for the tiers that admit that
	reused
	// ready, taken out of the policy's order to be written to the tiers below before it is evicted
	cold
	// ready, being copied to another slot: not extended meanwhile; or filling, and that slot
	moving
	// ready, and another slot has what it holds since: freed when nobody uses it, if that still is
	// there; or foreign, and it has been copied: freed then in any case
	moved
	spoiled // its memory is bad: never granted again once it is free

	// unverified, of a ready slot: restored, and nobody reads it before its bytes were checked. A
	// slot that is promoting is filling, so that both are one bit.
	unverified = promoting
)

// slot is the engine's account of one slot: a cache line with all of it that a lookup of the whole
// chunk reads and writes. The rest is its kin.
type slot struct {
	stamp    uint64 // tick of the last use; a prefix inherits that of a continuation that leaves
	gen      uint32 // rises each time the slot becomes free
	pins     uint32 // leases
	children uint32 // slots whose parent this is
	chunk    uint32 // the chunk's number in its prefix
	pages    uint16 // committed pages
	granted  uint16 // pages after them that a store is writing; the whole chunk while filling
	space    uint16
	state    state
	flags    flags
	// digest of the page at the chunk's last position; outlives the slot's becoming free
	last [4]uint64
}

// kin is what a slot hangs on, and what hangs on it.
type kin struct {
	parent    uint32 // the slot of the chunk before, if it was held when this one came
	parentGen uint32 // generation of parent; another one there now means that the parent is gone
	// of a held slot with a parent: the next one with that parent, by ref; of a free slot: the next
	// free one plus one
	next  uint32
	prev  uint32 // of a held slot with a parent: the one before
	child uint32 // the first slot whose parent this is
}

// link chains the records of one page that several slots hold. The one without prev is in the
// index.
type link struct{ next, prev uint32 }

// region is an array of slots of one geometry with their records. It is all of a region that was
// added carved, or a piece of one that stores carve.
type region struct {
	id   uint32 // by which the caller knows where it lies
	num  uint32 // the engine's, from 1: the upper bits of refs
	size int64
	area *area // of which it is a piece; nil: it is all of the caller's region

	class    *class // nil: the number is not in use
	draining bool   // hands out no slots
	// draining, and nothing in it is evicted; see Drain. Otherwise what drains is being emptied
	retired bool
	at      Placement
	ppc     int
	shift   int8 // its logarithm if it is a power of two, else -1
	words   int  // of a digest

	slots   []slot
	kin     []kin    // by slot
	digests []uint64 // of the pages at all but the last position of each slot
	links   []link
	routes  []route // by slot; nil without tiers below

	fresh    int    // slots [fresh:] were never used since the carving
	firstGen uint32 // their generation
	freeList uint32 // a free slot plus one
	free     int    // and not spoiled
	spoiled  int    // free ones that are
	filling  int
	leased   int    // slots with pins or with an extension under way
	lastUse  uint64 // newest stamp

	foreign bool       // its slots stand for chunks in peers' memory, and it has none itself
	places  []place    // by slot, of a foreign region
	sums    []chunkSum // by slot; nil without Config.Sums

	mem *carved // what the slices lie in
}

// class is the regions carved alike: for the same size of slot, pages a slot and length of digest.
type class struct {
	geometry tiers.Geometry // PageTokens is 0
	regions  []*region
	slots    int // in regions that are not draining
	free     int // of those
	policy   policy.Policy
	due      int // chunks since it did what it puts off
	limit    int // slots that one owner may have leased or filling
	busy     int // slots that are leased or filling
	most     int // slots that may be, before owners are refused more
	frozen   int // slots that frozen owners have

	promoting  int // slots that are filling from a tier
	promotable int // how many may be

	uncarved            int         // slots that the regions which are not carved yet would have
	cold                int         // slots that are
	coldFirst, coldLast uint32      // those of them that nobody uses, which are evicted next
	turn                int         // the region that the last store went to, counted on
	open                *region     // where a slot was free last, nil: nowhere yet
	block               *tableBlock // for the tables of the next piece, if they fit; nil: none yet

	// of the slots for what peers lend of the same geometry; nil: there are none (yet)
	foreign   *class
	isForeign bool // it is that of another class
}

func (c *class) slotBytes() int64 { return c.geometry.PageBytes * int64(c.geometry.PagesPerChunk) }

// slotsIn is the slots that a region would have.
func (c *class) slotsIn(size int64) int {
	return int(min(size/c.slotBytes(), recordMask/int64(c.geometry.PagesPerChunk)))
}

// digest is where that of a slot's page is kept.
func (r *region) digest(slot uint32, pos int) []uint64 {
	if pos == r.ppc-1 {
		return r.slots[slot].last[:r.words]
	}
	at := (int(slot)*(r.ppc-1) + pos) * r.words
	return r.digests[at : at+r.words]
}

func (r *region) setDigest(slot uint32, pos int, d []byte) {
	for i, words := 0, r.digest(slot, pos); i < len(words); i++ {
		words[i] = binary.LittleEndian.Uint64(d[8*i:])
	}
}

// digestBytes writes the digest of a slot's page into buf.
func (r *region) digestBytes(slot uint32, pos int, buf *[32]byte) []byte {
	for i, w := range r.digest(slot, pos) {
		binary.LittleEndian.PutUint64(buf[8*i:], w)
	}
	return buf[:8*r.words]
}

func (e *Engine) slot(ref uint32) (*region, *slot) {
	r := e.regions[ref>>recordBits]
	return r, &r.slots[ref&recordMask]
}

func (e *Engine) kin(ref uint32) *kin {
	return &e.regions[ref>>recordBits].kin[ref&recordMask]
}

// split is the slot of a record in its region, and the position in it. The division would be a good
// part of a lookup's time.
func (r *region) split(rec uint32) (slot, pos uint32) {
	if r.shift >= 0 {
		return rec >> (r.shift & 31), rec & uint32(r.ppc-1)
	}
	slot = rec / uint32(r.ppc)
	return slot, rec - slot*uint32(r.ppc)
}

// slotOf is the slot of a page's record, and the page's position in it.
func (e *Engine) slotOf(page uint32) (ref uint32, pos int) {
	i, p := e.regions[page>>recordBits].split(page & recordMask)
	return page&^recordMask | i, int(p)
}

// at says whether a record is that of the given page of its prefix: an honest client's always is.
func (e *Engine) at(record uint32, page int) bool {
	r := e.regions[record>>recordBits]
	i, pos := r.split(record & recordMask)
	return int(r.slots[i].chunk)*r.ppc+int(pos) == page
}

// offset is where page pos of a slot lies in its region.
func (r *region) offset(ref uint32, pos int) uint64 {
	return uint64(r.at.Offset) + uint64(ref&recordMask)*uint64(r.at.Stride) + uint64(pos)*uint64(
		r.class.geometry.PageBytes)
}

// where is the region, as workers know it, and the offset of page pos of a slot.
func (r *region) where(ref uint32, pos int) (region uint32, offset uint64) {
	if r.foreign {
		p := &r.places[ref&recordMask]
		return p.region, p.offset + uint64(pos)*uint64(r.class.geometry.PageBytes)
	}
	return r.id, r.offset(ref, pos)
}

// lease counts a ready slot that is in use from now on.
func (r *region) lease() {
	r.leased++
	r.class.busy++
}

// unlease counts one that is in use no more.
func (r *region) unlease() {
	r.leased--
	r.class.busy--
}

// filled counts a slot that is not being filled any more.
func (r *region) filled() {
	r.filling--
	r.class.busy--
}

func (s *slot) doomed() bool { return s.flags&doomed != 0 }

// idle says that nobody leases or extends the slot.
func (s *slot) idle() bool { return s.pins == 0 && (s.state != ready || s.granted == 0) }

// touch records a use of a ready slot.
func (e *Engine) touch(ref uint32) {
	r, s := e.slot(ref)
	s.stamp, r.lastUse = e.tick, e.tick
	r.class.policy.Use(ref)
	if s.flags&cold != 0 {
		e.thaw(ref)
		if s.idle() {
			e.offer(ref)
		}
	}
	if e.cascades.reused != 0 && s.flags&reused == 0 {
		e.reuse(ref)
	}
}

// offer lets a slot be evicted from now on: it is ready, nobody uses it, and it has no
// continuation.
func (e *Engine) offer(ref uint32) {
	r, s := e.slot(ref)
	switch {
	case r.retired:
		if s.flags&cold != 0 {
			s.flags &^= cold
			r.class.cold--
		}
		return
	case s.flags&cold != 0:
		e.cool(r.class, ref)
		return
	}
	r.class.policy.Offer(ref)
	e.wantVictims(r.class)
}

// hold ends that, if it was so: it is about to be used, or continued.
func (e *Engine) hold(ref uint32) {
	switch r, s := e.slot(ref); {
	case s.flags&cold != 0:
		e.thaw(ref)
	case s.state == ready:
		r.class.policy.Hold(ref)
	}
}

// register tells the policy of a slot that has just become ready, and whose place in its prefix is
// known.
func (e *Engine) register(ref uint32) {
	r, s := e.slot(ref)
	sp := e.spaceOf(r, s)
	pos := 0 // of a page that stays when a partly filled chunk grows
	if int(s.pages) == r.ppc {
		pos = r.ppc - 1
	}
	r.class.policy.Enter(ref, sp.key(r.digest(ref&recordMask, pos)), e.heldParent(ref))
	s.stamp, r.lastUse = e.tick, e.tick
	e.unsum(ref)
}

// pin takes a lease on a ready slot. The policy is told of the use when the lease ends: until then
// it has no say, and an answer need not wait for it.
func (e *Engine) pin(ref uint32) {
	r, s := e.slot(ref)
	if s.idle() {
		r.lease()
		if s.children == 0 {
			e.hold(ref)
		}
	} else if s.flags&cold != 0 {
		e.thaw(ref)
	}
	s.pins++
	e.pins++
	s.stamp, r.lastUse = e.tick, e.tick
	if e.cascades.reused != 0 && s.flags&reused == 0 {
		e.reuse(ref)
	}
}

// workSteps is how much a policy does at a time, and after the leases of how many chunks have ended
// or begun to be stored: a lookup's answer does not wait for it.
const workSteps = 32

// work counts chunks after which the policy may do what it has put off.
func (c *class) work(chunks int) {
	if c.due += chunks; c.due >= workSteps {
		c.due = 0
		c.policy.Work(workSteps)
	}
}

// unpin ends a lease. A slot that is still filling stays: somebody may be writing it.
func (e *Engine) unpin(ref uint32) {
	r, s := e.slot(ref)
	if invariants.Enabled && s.pins == 0 {
		e.fail(fmt.Sprintf("slot %#x loses a lease that it has not: %+v", ref, *s))
	}
	s.pins--
	e.pins--
	if s.state == ready && s.idle() {
		r.unlease()
		e.settle(ref)
	}
}

// settle puts a ready slot that nobody uses any more where it belongs: back to the free ones if it
// is out of the index or adds nothing to it, to the evictable ones if it has no continuation.
func (e *Engine) settle(ref uint32) {
	r, s := e.slot(ref)
	switch {
	case s.doomed():
		e.release(ref)
	case r.foreign && s.flags&moved != 0:
		e.leave(ref, false)
		e.release(ref)
	case (int(s.pages) < r.ppc || s.flags&(twin|moved) != 0) && e.redundant(ref):
		if !r.foreign {
			e.stats.Duplicates++
		}
		e.bequeath(ref)
		if s.flags&cold != 0 {
			e.cool(r.class, ref) // as thaw expects
		}
		e.leave(ref, false)
		e.release(ref)
	case s.children == 0:
		e.offer(ref)
	}
}

// redundant says whether another slot holds all that this one holds, and is there to stay.
func (e *Engine) redundant(ref uint32) bool { return e.heir(ref) != 0 }

// heir is such a slot, 0 if there is none. It holds the last page, as a page's digest names the
// whole prefix. It looks beyond the neighbours among those that share that page only where these
// have been moved away.
func (e *Engine) heir(ref uint32) uint32 {
	r, s := e.slot(ref)
	l := r.links[int(ref&recordMask)*r.ppc+int(s.pages)-1]
	for rec := l.prev; rec != 0; rec = e.links(rec).prev {
		if other, _ := e.slotOf(rec); e.stays(other) {
			return other
		}
	}
	for rec := l.next; rec != 0; rec = e.links(rec).next {
		if other, _ := e.slotOf(rec); e.stays(other) {
			return other
		}
	}
	return 0
}

func (e *Engine) stays(ref uint32) bool {
	_, s := e.slot(ref)
	return s.flags&moved == 0
}

// adopt makes parent the parent of a held slot that has none.
func (e *Engine) adopt(parent, child uint32) {
	if _, p := e.slot(parent); p.children == 0 {
		e.hold(parent)
	}
	e.hang(parent, child)
}

// hang puts a slot without a parent among those that continue parent.
func (e *Engine) hang(parent, child uint32) {
	_, p := e.slot(parent)
	k, c := e.kin(parent), e.kin(child)
	*c = kin{parent: parent, parentGen: p.gen, next: k.child, child: c.child}
	if k.child != 0 {
		e.kin(k.child).prev = child
	}
	k.child = child
	p.children++
}

// unhang undoes that. What has been orphaned is in no list: its siblings may be other chunks by
// now.
func (e *Engine) unhang(child uint32) {
	c := e.kin(child)
	_, p := e.slot(c.parent)
	p.children--
	if c.prev != 0 {
		e.kin(c.prev).next = c.next
	} else {
		e.kin(c.parent).child = c.next
	}
	if c.next != 0 {
		e.kin(c.next).prev = c.prev
	}
	*c = kin{child: c.child}
}

// bequeath hands what continues a slot to another that holds the same chunk. Beyond clearSlice of
// them they are left without a parent.
func (e *Engine) bequeath(ref uint32) {
	k := e.kin(ref)
	if k.child == 0 {
		return
	}
	heir := e.heir(ref)
	if _, h := e.slot(heir); h.children == 0 {
		e.hold(heir)
	}
	for n := 0; k.child != 0 && n < clearSlice; n++ {
		child := k.child
		e.unhang(child)
		e.hang(heir, child)
	}
}

// orphan says whether a held slot has no parent, or none any more.
func (e *Engine) orphan(ref uint32) bool {
	k := e.kin(ref)
	if k.parent == 0 {
		return true
	}
	r, i := e.regions[k.parent>>recordBits], int(k.parent&recordMask)
	return i >= r.fresh || r.slots[i].gen != k.parentGen // the region may have been carved anew
}

// heldParent is a slot's parent if that can be found, else 0.
func (e *Engine) heldParent(ref uint32) uint32 {
	if e.orphan(ref) {
		return 0
	}
	parent := e.kin(ref).parent
	if _, p := e.slot(parent); p.state != ready || p.doomed() {
		return 0
	}
	return parent
}

// disown ends a slot's being the continuation of its parent.
func (e *Engine) disown(ref uint32) {
	if e.orphan(ref) {
		e.kin(ref).parent = 0
		return
	}
	parent := e.kin(ref).parent
	_, s := e.slot(ref)
	_, p := e.slot(parent)
	e.unhang(ref)
	p.stamp = max(p.stamp, s.stamp)
	if p.children == 0 && p.state == ready && !p.doomed() && p.idle() {
		e.offer(parent)
	}
}

// enter indexes pages [from, to) of a slot, whose digests are written. It undoes itself and answers
// false if one of them is held as another page of its prefix, which no honest client can bring
// about.
func (e *Engine) enter(ref uint32, from, to int) bool {
	r, s := e.slot(ref)
	sp := e.spaces[s.space]
	base := int(ref&recordMask) * r.ppc
	var tags [tagGroup]uint32
	noted := e.journal.on
	unnoted := from // pages from here on are new, and the journal is yet to hear of them
	for pos := from; pos < to; pos++ {
		i := (pos - from) % tagGroup
		if i == 0 {
			e.tagsOf(sp, r, ref, tags[:min(to-pos, tagGroup)], pos)
		}
		rec := ref&^recordMask | uint32(base+pos)
		head := e.findOrInsert(sp, tags[i], r.digest(ref&recordMask, pos), rec)
		if head == 0 {
			sp.pages++
			s.pages++
			continue
		}
		if noted {
			e.note(PagesStored, ref, unnoted, pos)
			unnoted = pos + 1
		}
		if !e.at(head, int(s.chunk)*r.ppc+pos) {
			e.retract(ref, from)
			return false
		}
		e.linkAfter(head, rec)
		s.pages++
		if noted && e.journal.walks > 0 {
			e.note(PagesStored, ref, pos, pos+1)
		}
		// The slot that ended here is the shorter version of this one.
		if other, _ := e.slotOf(head); other != ref {
			_, o := e.slot(other)
			if int(o.pages) == pos+1 && o.idle() && pos+1 < r.ppc {
				e.stats.Replaced++
				e.leave(other, false)
				e.release(other)
			}
		}
	}
	if noted {
		e.note(PagesStored, ref, unnoted, to)
	}
	return true
}

func (e *Engine) links(record uint32) *link {
	return &e.regions[record>>recordBits].links[record&recordMask]
}

func (e *Engine) linkAfter(head, rec uint32) {
	e.linkSteps++
	h, l := e.links(head), e.links(rec)
	l.prev, l.next = head, h.next
	if h.next != 0 {
		e.links(h.next).prev = rec
	}
	h.next = rec
}

// retract takes a slot's pages from page from on out of the index; where another slot has the page
// too, that one takes its place.
func (e *Engine) retract(ref uint32, from int) {
	r, s := e.slot(ref)
	sp := e.spaces[s.space]
	var tags [tagGroup]uint32
	noted := e.journal.on
	unnoted := from
	for pos := from; pos < int(s.pages); pos++ {
		i := (pos - from) % tagGroup
		if i == 0 {
			e.tagsOf(sp, r, ref, tags[:min(int(s.pages)-pos, tagGroup)], pos)
		}
		if e.unlink(tags[i], r, ref, pos) {
			sp.pages--
		} else if noted {
			e.note(PagesRemoved, ref, unnoted, pos)
			unnoted = pos + 1
		}
	}
	if noted {
		e.note(PagesRemoved, ref, unnoted, int(s.pages))
	}
	s.pages = uint16(from)
}

// unlink takes one page of a slot, by its tag, out of the index, and says whether no other slot of
// its space has it.
func (e *Engine) unlink(tag uint32, r *region, ref uint32, pos int) (gone bool) {
	e.linkSteps++
	at := int(ref&recordMask)*r.ppc + pos
	rec := ref&^recordMask | uint32(at)
	l := &r.links[at]
	switch {
	case l.prev != 0:
		e.links(l.prev).next = l.next
		if l.next != 0 {
			e.links(l.next).prev = l.prev
		}
	case l.next != 0:
		e.links(l.next).prev = 0
		e.idx.replace(tag, rec, l.next)
	default:
		e.idx.remove(tag, rec)
		gone = true
	}
	*l = link{}
	return gone
}

// leave takes a ready slot out of the index, out of its prefix and out of the order of eviction;
// evicted says that it is for room.
func (e *Engine) leave(ref uint32, evicted bool) {
	r, s := e.slot(ref)
	e.unqueue(ref, evicted)
	if s.flags&cold != 0 {
		e.thaw(ref)
	}
	if r.foreign {
		e.retractLent(r, ref)
	} else {
		e.retract(ref, 0)
	}
	e.vouch(s)
	if parent := e.heldParent(ref); parent != 0 {
		r.class.policy.Inherit(parent, ref)
	}
	e.disown(ref)
	r.class.policy.Leave(ref, evicted)
	s.flags |= doomed
	e.gone(ref)
}

// gone tells whoever wants to know that what a slot holds has left the index for good.
func (e *Engine) gone(ref uint32) {
	if e.cfg.OnGone != nil && !e.isForeign(ref) {
		e.cfg.OnGone(e.regions[ref>>recordBits].id, ref&recordMask)
	}
}

// doom drops what a slot holds: at once if nobody uses it, else it leaves the index now and is
// freed after its last use.
func (e *Engine) doom(ref uint32) {
	_, s := e.slot(ref)
	if s.doomed() {
		return
	}
	if s.state == filling {
		if s.flags&promoting != 0 {
			e.land(ref)
		}
		s.flags |= doomed
		return
	}
	e.leave(ref, false)
	if s.idle() {
		e.release(ref)
	}
}

// release makes a slot free: one that left the index, or one whose filling failed.
func (e *Engine) release(ref uint32) {
	r, s := e.slot(ref)
	if s.state == filling {
		r.filled()
		e.disown(ref)
	}
	e.vouch(s)
	e.gone(ref)
	e.spaceOf(r, s).chunks--
	if r.foreign {
		e.returnLoan(r, ref)
	}
	bad := s.flags & spoiled
	*s = slot{gen: s.gen + 1, last: s.last, flags: bad}
	if invariants.Enabled {
		r.poison(ref & recordMask)
	}
	if bad != 0 {
		r.spoiled++
		return
	}
	e.kin(ref).next = r.freeList
	r.freeList = ref&recordMask + 1
	r.free++
	if !r.draining {
		r.class.free++
		r.class.open = r
	}
}

// maxStrays bounds the victims in regions that hand out no slots which a call passes on its way to
// one elsewhere.
const maxStrays = 64

// victim is the slot of a class that its policy would evict next. Slots of regions that are being
// emptied may be dropped on the way.
func (e *Engine) victim(c *class) (ref uint32, ok bool) {
	for range maxStrays {
		if ref, ok = c.policy.Victim(); !ok {
			return ref, ok
		}
		switch r := e.regions[ref>>recordBits]; {
		case r.retired: // Drain has not come to it yet
			e.hold(ref)
		case r.draining:
			e.expel(ref)
		default:
			return ref, ok
		}
	}
	return 0, false
}

// evict makes room by dropping the end of a prefix of a class: one that was written ahead, or the
// policy's choice. It answers false if there is none.
func (e *Engine) evict(c *class) bool {
	for range maxStrays {
		ref := c.coldFirst
		if ref == 0 {
			var ok bool
			if ref, ok = e.victim(c); !ok {
				return false
			}
		} else if e.regions[ref>>recordBits].retired {
			e.thaw(ref)
			continue
		}
		e.expel(ref)
		if c.free > 0 {
			return true
		}
	}
	return false
}

// expel drops an idle ready slot for room.
func (e *Engine) expel(ref uint32) {
	if r, s := e.slot(ref); r.foreign {
		e.stats.ForeignEvicted++
	} else {
		e.stats.Evictions++
		e.stats.EvictedPages += uint64(s.pages)
	}
	e.leave(ref, true)
	e.release(ref)
}

// alloc takes a free slot for a store, evicting if it must. 0: there is none.
func (e *Engine) alloc(s *space, chunk, pages int) uint32 {
	c := s.class
	if c.free == 0 && !e.evict(c) {
		return 0
	}
	if e.cfg.FixedRegions { // each may be on a device of its own
		c.turn++
		return e.take(c.nextOpen(c.turn), s, chunk, pages)
	}
	if r := c.open; r == nil || r.class != c || r.free == 0 || r.draining {
		c.open = c.nextOpen(0)
	}
	return e.take(c.open, s, chunk, pages)
}

// nextOpen returns the first region of a class, from the given one on, that has a free slot. There
// must be one.
func (c *class) nextOpen(first int) *region {
	for k := range c.regions {
		if r := c.regions[(first+k)%len(c.regions)]; r.free > 0 && !r.draining {
			return r
		}
	}
	panic("tiers: a class counts free slots that its regions have not")
}

// take makes a free slot of a region one that is being filled.
func (e *Engine) take(r *region, s *space, chunk, pages int) uint32 {
	i, gen := uint32(r.fresh), r.firstGen
	if r.freeList != 0 {
		i = r.freeList - 1
		if invariants.Enabled {
			e.checkPoison(r, i)
		}
		r.freeList = r.kin[i].next
		gen = r.slots[i].gen
	} else {
		r.fresh++
	}
	r.free--
	r.filling++
	r.class.busy++
	r.class.free--
	s.chunks++
	r.lastUse = e.tick
	r.slots[i] = slot{stamp: e.tick, gen: gen, chunk: uint32(chunk), granted: uint16(pages),
		space: s.id, state: filling}
	r.kin[i] = kin{}
	e.wantVictims(r.class)
	return r.num<<recordBits | i
}

// carved is what carving a region takes, made outside the lock.
type carved struct {
	block *tableBlock
	part  []byte // of it, in which the tables lie

	slots   []slot
	kin     []kin
	digests []uint64   // nil: a slot has one page
	routes  []route    // nil: not wanted
	places  []place    // likewise
	sums    []chunkSum // likewise
	// by record; hardly any are ever written, so they take no huge pages of the block
	links *dax.Table[link]
	index *dax.Table[uint64] // nil: not wanted
}

// tableBlock is memory that the tables of some pieces of one geometry lie in, one behind another:
// each of its own would be too small for huge pages, without which each look at a slot takes
// longer.
type tableBlock struct {
	table *dax.Table[byte]
	rest  []byte       // that is in no piece's use and never was; carving's alone
	users atomic.Int32 // pieces, and the class for its next piece
}

func (b *tableBlock) hold() { b.users.Add(1) }

func (b *tableBlock) release() {
	if b.users.Add(-1) == 0 {
		b.table.Close()
	}
}

// blockPieces is for how many pieces a block has room: it is address space until they come.
const blockPieces = piecesOfArena

// tableSpec is what tables a region of slots has.
type tableSpec struct {
	slots, ppc, words int
	routes, places    bool
	sums              bool
	indexWords        int // 0: no index
	pieces            int // for how many regions to make a block, if one is to be made
}

func (t *tableSpec) bytes() int {
	n := dax.CutBytes[slot](t.slots) + dax.CutBytes[kin](t.slots) + dax.CutBytes[uint64](
		t.digests())
	if t.routes {
		n += dax.CutBytes[route](t.slots)
	}
	if t.places {
		n += dax.CutBytes[place](t.slots)
	}
	if t.sums {
		n += dax.CutBytes[chunkSum](t.slots)
	}
	return n
}

func (t *tableSpec) digests() int { return t.slots * (t.ppc - 1) * t.words }

// makeCarved makes tables in a block if that has room for them, else in a new one. The caller's
// hold on the block, which may be nil, becomes the result's, or ends.
func makeCarved(block *tableBlock, spec tableSpec) (_ *carved, err error) {
	bytes := spec.bytes()
	if block != nil && len(block.rest) < bytes {
		block.release()
		block = nil
	}
	if block == nil {
		table, err := dax.NewTable[byte](bytes * spec.pieces)
		if err != nil {
			return nil, err
		}
		block = &tableBlock{table: table, rest: table.Slice()}
		block.hold()
	}
	c := &carved{block: block, part: block.rest[:bytes:bytes]}
	c.links, err = dax.NewTable[link](spec.slots * spec.ppc)
	if err == nil && spec.indexWords > 0 {
		c.index, err = dax.NewTable[uint64](spec.indexWords)
	}
	if err != nil {
		c.close()
		return nil, err
	}
	left := block.rest
	c.slots, left = dax.Cut[slot](left, spec.slots)
	c.kin, left = dax.Cut[kin](left, spec.slots)
	if spec.ppc > 1 {
		c.digests, left = dax.Cut[uint64](left, spec.digests())
	}
	if spec.routes {
		c.routes, left = dax.Cut[route](left, spec.slots)
	}
	if spec.places {
		c.places, left = dax.Cut[place](left, spec.slots)
	}
	if spec.sums {
		c.sums, left = dax.Cut[chunkSum](left, spec.slots)
	}
	block.rest = left
	return c, nil
}

// close gives the memory back, as far as it is no other's. A carved of a block alone ends a hold on
// that.
func (c *carved) close() {
	if len(c.part) > 0 {
		dax.Discard(c.part)
	}
	c.block.release()
	if c.links != nil {
		c.links.Close()
	}
	if c.index != nil {
		c.index.Close()
	}
}
