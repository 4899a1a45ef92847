package tiers

import (
	"encoding/binary"

	"lookaside/dax"
)

type state uint8

// See the package comment for what each state means and how they follow on one another.
const (
	free state = iota
	filling
	ready
)

// slot is the engine's account of one slot: a cache line with all of it that a lookup of the whole chunk reads and writes. The rest is its kin.
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
	doomed   bool      // ready or filling, out of the index for good; freed when nobody uses it
	last     [4]uint64 // digest of the page at the chunk's last position; outlives the slot's becoming free
}

// kin is what a slot hangs on.
type kin struct {
	parent    uint32 // the slot of the chunk before, if it was held when this one came
	parentGen uint32 // generation of parent; another one there now means that the parent is gone
	next      uint32 // of a free slot: the next free one plus one
}

// link chains the records of one page that several slots hold. The one without prev is in the index.
type link struct{ next, prev uint32 }

// region is one mapping. Carved, it is an array of slots of one geometry with their records.
type region struct {
	id   uint32 // the caller's name
	num  uint32 // the engine's, from 1: the upper bits of refs
	size int64

	class    *class // nil: not carved
	draining bool   // being emptied for another geometry: hands out no slots
	ppc      int
	shift    int8 // its logarithm if it is a power of two, else -1
	words    int  // of a digest

	slots   []slot
	kin     []kin    // by slot
	digests []uint64 // of the pages at all but the last position of each slot
	links   []link
	lru     lru

	fresh    int    // slots [fresh:] were never used since the carving
	firstGen uint32 // their generation
	freeList uint32 // a free slot plus one
	free     int
	filling  int
	leased   int    // slots with pins or with an extension under way
	lastUse  uint64 // newest stamp

	mem *carved // what the slices lie in
}

// class is the regions carved alike: for the same size of slot, pages a slot and length of digest.
type class struct {
	geometry Geometry // PageTokens is 0
	regions  []*region
	slots    int // in regions that are not draining
	free     int // of those
	limit    int // slots that one owner may have leased or filling
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

// split is the slot of a record in its region, and the position in it. The division would be a good part of a lookup's time.
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
	g := r.class.geometry
	return uint64(ref&recordMask)*uint64(r.class.slotBytes()) + uint64(pos)*uint64(g.PageBytes)
}

func (s *slot) idle() bool { return s.pins == 0 && (s.state != ready || s.granted == 0) }

// touch records a use. Only ends of prefixes are in the lru, so that of a slot with continuations is a store.
func (e *Engine) touch(ref uint32) {
	r, s := e.slot(ref)
	s.stamp, r.lastUse = e.tick, e.tick
	if i := ref & recordMask; s.children == 0 && r.lru.has(i) {
		r.lru.touch(i, e.tick)
	}
}

// pin takes a lease on a ready slot.
func (e *Engine) pin(ref uint32) {
	r, s := e.slot(ref)
	if s.idle() {
		r.leased++
		if s.children == 0 {
			r.lru.remove(ref & recordMask)
		}
	}
	s.pins++
	e.pins++
	s.stamp, r.lastUse = e.tick, e.tick
}

// unpin ends a lease.
func (e *Engine) unpin(ref uint32) {
	r, s := e.slot(ref)
	s.pins--
	e.pins--
	if s.idle() {
		r.leased--
		e.settle(ref)
	}
}

// settle puts a ready slot that nobody uses any more where it belongs: back to the free ones if it is out of the index or adds nothing to
// it, to the evictable ones if it has no continuation.
func (e *Engine) settle(ref uint32) {
	r, s := e.slot(ref)
	switch {
	case s.doomed:
		e.release(ref)
	case int(s.pages) < r.ppc && e.redundant(ref): // there are no two whole ones
		e.stats.Duplicates++
		e.leave(ref)
		e.release(ref)
	case s.children == 0:
		r.lru.add(ref&recordMask, s.stamp)
	}
}

// redundant says whether another slot holds all that this one holds. Then it holds its last page, as a page's digest names the whole prefix.
func (e *Engine) redundant(ref uint32) bool {
	r, s := e.slot(ref)
	l := r.links[int(ref&recordMask)*r.ppc+int(s.pages)-1]
	return l.next != 0 || l.prev != 0
}

// adopt makes parent the parent of a held slot.
func (e *Engine) adopt(parent, child uint32) {
	r, p := e.slot(parent)
	if p.children == 0 {
		r.lru.remove(parent & recordMask)
	}
	p.children++
	k := e.kin(child)
	k.parent, k.parentGen = parent, p.gen
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

// disown ends a slot's being the continuation of its parent.
func (e *Engine) disown(ref uint32) {
	k := e.kin(ref)
	if !e.orphan(ref) {
		_, s := e.slot(ref)
		r, p := e.slot(k.parent)
		p.children--
		p.stamp = max(p.stamp, s.stamp)
		if p.children == 0 && p.state == ready && !p.doomed && p.idle() {
			r.lru.add(k.parent&recordMask, p.stamp)
		}
	}
	k.parent = 0
}

// enter indexes pages [from, to) of a slot, whose digests are written. It undoes itself and answers false if one of them is held as another
// page of its prefix, which no honest client can bring about.
func (e *Engine) enter(ref uint32, from, to int) bool {
	r, s := e.slot(ref)
	sp := e.spaces[s.space]
	base := int(ref&recordMask) * r.ppc
	var buf [32]byte
	for pos := from; pos < to; pos++ {
		rec := ref&^recordMask | uint32(base+pos)
		d := r.digestBytes(ref&recordMask, pos, &buf)
		head := e.find(sp, d)
		if head == 0 {
			e.idx.insert(sp.tagOfRecord(r.digest(ref&recordMask, pos)), rec)
			sp.pages++
			s.pages++
			continue
		}
		if !e.at(head, int(s.chunk)*r.ppc+pos) {
			e.retract(ref, from)
			return false
		}
		e.linkAfter(head, rec)
		s.pages++
		// The slot that ended here is the shorter version of this one.
		if other, _ := e.slotOf(head); other != ref {
			ro, o := e.slot(other)
			if int(o.pages) == pos+1 && o.idle() {
				e.stats.Replaced++
				ro.lru.remove(other & recordMask)
				e.leave(other)
				e.release(other)
			}
		}
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

// retract takes a slot's pages from page from on out of the index; where another slot has the page too, that one takes its place.
func (e *Engine) retract(ref uint32, from int) {
	r, s := e.slot(ref)
	sp := e.spaces[s.space]
	base := int(ref&recordMask) * r.ppc
	for pos := from; pos < int(s.pages); pos++ {
		e.linkSteps++
		rec := ref&^recordMask | uint32(base+pos)
		l := &r.links[base+pos]
		switch {
		case l.prev != 0:
			e.links(l.prev).next = l.next
			if l.next != 0 {
				e.links(l.next).prev = l.prev
			}
		case l.next != 0:
			e.links(l.next).prev = 0
			e.idx.replace(sp.tagOfRecord(r.digest(ref&recordMask, pos)), rec, l.next)
		default:
			e.idx.remove(sp.tagOfRecord(r.digest(ref&recordMask, pos)), rec)
			sp.pages--
		}
		*l = link{}
	}
	s.pages = uint16(from)
}

// leave takes a ready slot out of the index and out of its prefix. It must not be in the lru any more.
func (e *Engine) leave(ref uint32) {
	_, s := e.slot(ref)
	e.retract(ref, 0)
	e.disown(ref)
	s.doomed = true
}

// doom drops what a slot holds: at once if nobody uses it, else it leaves the index now and is freed after its last use.
func (e *Engine) doom(ref uint32) {
	r, s := e.slot(ref)
	if s.doomed {
		return
	}
	if s.state == filling {
		s.doomed = true
		return
	}
	r.lru.remove(ref & recordMask)
	e.leave(ref)
	if s.idle() {
		e.release(ref)
	}
}

// release makes a slot free: one that left the index, or one whose filling failed.
func (e *Engine) release(ref uint32) {
	r, s := e.slot(ref)
	if s.state == filling {
		r.filling--
		e.disown(ref)
	}
	e.spaces[s.space].chunks--
	*s = slot{gen: s.gen + 1, last: s.last}
	e.kin(ref).next = r.freeList
	r.freeList = ref&recordMask + 1
	r.free++
	if !r.draining {
		r.class.free++
	}
}

// evict makes room by dropping the least recently used end of a prefix of a class. It answers false if there is none.
func (e *Engine) evict(c *class) bool {
	var from *region
	var oldest uint64
	for _, r := range c.regions {
		if _, stamp, ok := r.lru.min(); ok && !r.draining && (from == nil || stamp < oldest) {
			from, oldest = r, stamp
		}
	}
	if from == nil {
		return false
	}
	i, _, _ := from.lru.min()
	from.lru.remove(i)
	ref := from.num<<recordBits | i
	e.stats.Evictions++
	e.stats.EvictedPages += uint64(from.slots[i].pages)
	e.leave(ref)
	e.release(ref)
	return true
}

// alloc takes a free slot for a store, evicting if it must. 0: there is none.
func (e *Engine) alloc(s *space, chunk, pages int) uint32 {
	c := s.class
	if c.free == 0 && !e.evict(c) {
		return 0
	}
	for _, r := range c.regions {
		if r.free == 0 || r.draining {
			continue
		}
		i, gen := uint32(r.fresh), r.firstGen
		if r.freeList != 0 {
			i = r.freeList - 1
			r.freeList = r.kin[i].next
			gen = r.slots[i].gen
		} else {
			r.fresh++
		}
		r.free--
		r.filling++
		c.free--
		s.chunks++
		r.lastUse = e.tick
		r.slots[i] = slot{stamp: e.tick, gen: gen, chunk: uint32(chunk), granted: uint16(pages), space: s.id, state: filling}
		return r.num<<recordBits | i
	}
	panic("tiers: a class counts free slots that its regions have not")
}

// carved is what carving a region takes, made outside the lock.
type carved struct {
	slots   *dax.Table[slot]
	kin     *dax.Table[kin]
	digests *dax.Table[uint64] // nil: a slot has one page
	links   *dax.Table[link]
	heap    *dax.Table[lruEntry]
	pos     *dax.Table[uint32]
	index   *dax.Table[uint64] // nil: not wanted
}

func makeCarved(slots, ppc, words, indexWords int) (c *carved, err error) {
	c = &carved{}
	defer func() {
		if err != nil {
			c.close()
			c = nil
		}
	}()
	if c.slots, err = dax.NewTable[slot](slots); err != nil {
		return c, err
	}
	if c.kin, err = dax.NewTable[kin](slots); err != nil {
		return c, err
	}
	if ppc > 1 {
		if c.digests, err = dax.NewTable[uint64](slots * (ppc - 1) * words); err != nil {
			return c, err
		}
	}
	if c.links, err = dax.NewTable[link](slots * ppc); err != nil {
		return c, err
	}
	if c.heap, err = dax.NewTable[lruEntry](slots); err != nil {
		return c, err
	}
	if c.pos, err = dax.NewTable[uint32](slots); err != nil {
		return c, err
	}
	if indexWords > 0 {
		c.index, err = dax.NewTable[uint64](indexWords)
	}
	return c, err
}

func (c *carved) close() {
	if c.slots != nil {
		c.slots.Close()
	}
	if c.kin != nil {
		c.kin.Close()
	}
	if c.digests != nil {
		c.digests.Close()
	}
	if c.links != nil {
		c.links.Close()
	}
	if c.heap != nil {
		c.heap.Close()
	}
	if c.pos != nil {
		c.pos.Close()
	}
	if c.index != nil {
		c.index.Close()
	}
}
