package engine

import (
	"fmt"
	"math/bits"
	"sync/atomic"

	"lookaside/internal/invariants"
	"lookaside/tiers"
	"lookaside/tiers/policy"
)

type leaseKind uint8

const (
	noLease leaseKind = iota
	lookupLease
	loadLease
	storeLease
	pinLease
	cascadeLease
	moveLease
	loanLease
	copyLease
	endingLease // of a lookup that has ended, what is still to be freed of it
)

func (k leaseKind) String() string {
	return [...]string{"none", "lookup", "load", "store", "pin", "cascade", "move", "loan", "copy",
		"ending"}[k]
}

// lease is what one lookup, load, loan, pin or unfinished store holds, or one errand: a run of
// chunks of one prefix, or for a store the slots that it was granted. What leases of all kinds have
// comes first, then a body for each kind. Leases are reused: the generation in a handle is that of
// one use.
type lease struct {
	kind     leaseKind
	index    uint32 // in leaseBook.all
	gen      uint32
	was      uint64 // its handle in another engine, which it keeps; 0: it was not imported
	owner    *owner
	inOwner  leaseNode
	first, n int // pages
	buf      []uint32
	slots    []uint32 // what is left of buf

	lookup lookupBody // of a lookupLease or endingLease
	loan   loanBody
	store  storeBody
	errand errandBody // of a cascadeLease, moveLease or copyLease
}

// lookupBody is what a lookup has beside its slots. While it waits, slots[held:] are the chunks
// from chunk after on, and may still be filled. Before them come the n pages that it held when it
// began to wait; the last of these may be a shorter version of chunk after.
type lookupBody struct {
	id       uint64 // the client's
	takers   int    // loads that are still to take it over
	deadline int64  // runs while the lookup does not wait
	waiting  bool
	held     int
	after    int
	end      int       // of the pages that it waits for
	queued   leaseNode // by deadline, or among those that are ending
}

// loanBody is what a loan has beside its slots.
type loanBody struct {
	returned int // slots that have been given back, and are 0
}

// storeBody is what a store has beside its slots.
type storeBody struct {
	prev    [32]byte // digest of the page before
	hasPrev bool
	// of a store of every nth chunk: for each grant the digests of the page before and of the page
	// after, zeros where there is none
	around []byte
	hints  Hints // for the chunks, once they are stored
}

// errandBody is what the writing, moving or copying of a chunk has beside its slot.
type errandBody struct {
	tier uint8    // of a cascade: the bit of the tier that it goes to
	to   uint32   // of a move or a copy: the slot that is filled
	prev [32]byte // of a copy: the digest of the page before
}

type leaseNode struct{ prev, next *lease }

// leaseList is a list of leases: those of one owner (owned), the lookups by deadline, or those that
// are ending.
type leaseList struct {
	first, last *lease
	owned       bool
}

func (l *leaseList) node(x *lease) *leaseNode {
	if l.owned {
		return &x.inOwner
	}
	return &x.lookup.queued
}

func (l *leaseList) push(x *lease) {
	*l.node(x) = leaseNode{prev: l.last}
	if l.last != nil {
		l.node(l.last).next = x
	} else {
		l.first = x
	}
	l.last = x
}

// insert puts a lookup among the others by its deadline.
func (l *leaseList) insert(x *lease) {
	next := l.first
	if l.last == nil || l.last.lookup.deadline <= x.lookup.deadline {
		l.push(x)
		return
	}
	for next.lookup.deadline <= x.lookup.deadline {
		next = next.lookup.queued.next
	}
	n := &next.lookup.queued
	x.lookup.queued = leaseNode{prev: n.prev, next: next}
	if n.prev != nil {
		n.prev.lookup.queued.next = x
	} else {
		l.first = x
	}
	n.prev = x
}

func (l *leaseList) remove(x *lease) {
	n := l.node(x)
	if n.prev != nil {
		l.node(n.prev).next = n.next
	} else {
		l.first = n.next
	}
	if n.next != nil {
		l.node(n.next).prev = n.prev
	} else {
		l.last = n.prev
	}
	*n = leaseNode{}
}

func (x *lease) handle() uint64 {
	if x.was != 0 {
		return x.was
	}
	return uint64(x.gen)<<32 | uint64(x.index) + 1
}

// leaseBook is all leases.
type leaseBook struct {
	all   []*lease
	spare []uint32 // indices of those that have ended

	// by handle: those that had it in another engine, which had no handle of a higher generation;
	// see Import
	imported map[uint64]*lease
	skipped  uint32
	pins     int // leases on slots
	bufs     bufferPool

	expiry leaseList // lookups, by deadline

	endings  leaseList   // what EndSome has to do
	endSlice int         // tests change it
	ending   atomic.Bool // there is something in endings
}

// add makes a lease of an owner on slots. It copies them. They are counted on the owner already.
func (b *leaseBook) add(kind leaseKind, ow *owner, slots []uint32) *lease {
	var x *lease
	if n := len(b.spare); n > 0 {
		x = b.all[b.spare[n-1]]
		b.spare = b.spare[:n-1]
	} else {
		x = &lease{index: uint32(len(b.all)), gen: b.skipped}
		b.all = append(b.all, x)
	}
	x.gen++
	x.kind, x.owner = kind, ow
	x.buf = append(b.bufs.get(len(slots)), slots...)
	x.slots = x.buf
	ow.leases += len(slots)
	ow.all.push(x)
	return x
}

// addLookup makes a lookup of an owner, under the client's id, from a page on.
func (b *leaseBook) addLookup(ow *owner, id uint64, first int, slots []uint32) *lease {
	x := b.add(lookupLease, ow, slots)
	x.first, x.lookup.id, x.lookup.takers = first, id, ow.takers
	ow.lookups[id] = x
	return x
}

// extend adds slots, which are counted on its owner already, to a lease.
func (b *leaseBook) extend(x *lease, slots []uint32) {
	x.owner.leases += len(slots)
	if cap(x.slots)-len(x.slots) >= len(slots) {
		x.slots = append(x.slots, slots...) // still in buf
		return
	}
	buf := append(b.bufs.get(len(x.slots)+len(slots)), x.slots...)
	b.bufs.put(x.buf)
	x.buf = append(buf, slots...)
	x.slots = x.buf
}

// find resolves a handle of an owner's. With a nil owner it is that of a pin or of an errand.
func (b *leaseBook) find(ow *owner, kind leaseKind, handle uint64) (*lease, error) {
	i, gen := uint32(handle)-1, uint32(handle>>32)
	if x := b.imported[handle]; x != nil {
		i, gen = x.index, x.gen
	} else if uint32(handle) == 0 || gen == 0 || gen > b.skipped &&
		(uint64(i) >= uint64(len(b.all)) || gen > b.all[i].gen) {
		return nil, fmt.Errorf("%w: %v %#x", tiers.ErrNotFound, kind, handle)
	}
	if uint64(i) >= uint64(len(b.all)) || b.all[i].gen != gen || b.all[i].kind == noLease {
		return nil, fmt.Errorf("%w: %v %#x has ended", tiers.ErrStale, kind, handle)
	}
	x := b.all[i]
	if ow != nil && x.owner != ow || x.kind != kind {
		return nil, fmt.Errorf("%w: %v %#x", tiers.ErrNotFound, kind, handle)
	}
	return x, nil
}

// mayImport checks that a handle can be that of a lease in another engine, and is not one here.
func (b *leaseBook) mayImport(handle uint64) error {
	if uint32(handle) == 0 || handle>>32 == 0 || handle>>32 > uint64(b.skipped) ||
		b.imported[handle] != nil {
		return invalid("handle %#x", handle)
	}
	return nil
}

// name gives a lease the handle that it had in another engine.
func (b *leaseBook) name(x *lease, handle uint64) {
	if b.imported == nil {
		b.imported = map[uint64]*lease{}
	}
	x.was = handle
	b.imported[handle] = x
}

// skip has all handles from now on have a higher generation than given.
func (b *leaseBook) skip(gen uint32) {
	b.skipped = max(b.skipped, gen)
	for _, x := range b.all {
		if x.kind == noLease {
			x.gen = max(x.gen, gen)
		}
	}
}

// remove takes out a lease that holds nothing any more.
func (b *leaseBook) remove(x *lease) {
	ow := x.owner
	switch x.kind {
	case lookupLease:
		delete(ow.lookups, x.lookup.id)
		if !x.lookup.waiting {
			b.expiry.remove(x)
		}
	case endingLease:
		b.endings.remove(x)
	case loadLease:
		ow.loads--
	case loanLease:
		ow.loans--
	case storeLease:
		ow.stores--
	}
	ow.all.remove(x)
	b.bufs.put(x.buf)
	if x.was != 0 {
		delete(b.imported, x.was)
	}
	*x = lease{index: x.index, gen: max(x.gen, b.skipped)}
	b.spare = append(b.spare, x.index)
}

// endSlice is how many slots of a lookup are freed while the lock is held. To free as many takes
// some 100 µs.
const endSlice = 512

// endLease frees all that a lease holds; a store is aborted. What a large lookup holds is left to
// EndSome, unless the lookup waits.
func (e *Engine) endLease(x *lease) {
	if invariants.Enabled {
		e.checkLives(x)
	}
	if x.kind == lookupLease && len(x.slots) > e.leases.endSlice && !x.lookup.waiting {
		delete(x.owner.lookups, x.lookup.id)
		e.leases.expiry.remove(x)
		x.kind = endingLease
		e.pushEnding(x)
		return
	}
	if x.kind == storeLease {
		for i := range x.slots {
			e.finishGrant(x, i, false)
		}
	} else {
		e.freeSlots(x, x.slots)
	}
	e.forget(x)
}

// pushEnding leaves a lease to EndSome.
func (e *Engine) pushEnding(x *lease) {
	e.leases.endings.push(x)
	e.leases.ending.Store(true)
}

// splitEnding leaves the first k slots of a lookup to EndSome. They stay counted on its owner.
func (e *Engine) splitEnding(x *lease, k int) {
	y := e.leases.add(endingLease, x.owner, x.slots[:k])
	x.owner.leases -= k // add counted them again
	e.pushEnding(y)
	x.slots = x.slots[k:]
}

// Ending reports whether EndSome has something to do. It takes no lock.
func (e *Engine) Ending() bool { return e.leases.ending.Load() }

// EndSome frees some of what large lookups that have ended still hold, and reports whether there is
// more. Their names and deadlines are gone already. A caller that ends lookups calls it until there
// is no more, and may do other things in between.
func (e *Engine) EndSome() (more bool) {
	e.mu.Lock()
	defer e.unlock()
	return e.endSome()
}

func (e *Engine) endSome() (more bool) {
	if e.closed || e.leases.endings.first == nil {
		return false
	}
	e.endPart(e.leases.endings.first)
	return e.leases.endings.first != nil
}

// endPart frees the last slots of a lease that is ending.
func (e *Engine) endPart(x *lease) {
	from := max(0, len(x.slots)-e.leases.endSlice)
	e.freeSlots(x, x.slots[from:])
	if x.slots = x.slots[:from]; from == 0 {
		e.forget(x)
		e.leases.ending.Store(e.leases.endings.first != nil)
	}
}

// freeSlots ends a lease's hold on some of its slots. It takes the last one first, so that a prefix
// is settled after its continuation.
func (e *Engine) freeSlots(x *lease, slots []uint32) {
	if x.kind == lookupLease || x.kind == pinLease || x.kind == endingLease {
		// a load's were its lookup's
		e.used(x.owner.space.class, slots)
	}
	freed := 0
	for i := len(slots) - 1; i >= 0; i-- {
		if slots[i] == 0 { // of a loan
			continue
		}
		e.tally(x.owner, slots[i]).sub(slots[i])
		e.unpin(slots[i])
		freed++
	}
	x.owner.leases -= freed
	if x.kind != cascadeLease && x.kind != moveLease && x.kind != copyLease {
		// their owners are of no space, and they were no use
		x.owner.space.class.work(len(slots))
	}
}

// used reports a use of the leased slots that are still held to the policy of the class or of its
// foreign class.
func (e *Engine) used(c *class, slots []uint32) {
	gone := false
	if e.hints.low > 0 {
		for _, ref := range slots {
			e.raise(ref)
		}
	}
	if e.cascades.learner != nil {
		e.countUses(slots)
	}
	for _, ref := range slots {
		r, s := e.slot(ref)
		gone = gone || s.state != ready || s.doomed() || r.foreign
	}
	if !gone {
		policy.UseAll(c.policy, slots)
		return
	}
	for _, ref := range slots {
		if r, s := e.slot(ref); s.state == ready && !s.doomed() {
			r.class.policy.Use(ref)
		}
	}
}

// forget takes a lease that holds nothing any more out of the books.
func (e *Engine) forget(x *lease) {
	if invariants.Enabled {
		e.noteEnd(x)
	}
	e.leases.remove(x)
}

// bufferPool keeps the buffers of ended leases by size, powers of two.
type bufferPool struct {
	free [32][][]uint32
	kept int // entries in all of free
}

// maxKept bounds what the pool keeps, in entries of 4 bytes.
const maxKept = 1 << 22

func (p *bufferPool) get(n int) []uint32 {
	k := bits.Len(uint(max(n, 4) - 1))
	if f := p.free[k]; len(f) > 0 {
		b := f[len(f)-1]
		p.free[k] = f[:len(f)-1]
		p.kept -= cap(b)
		return b[:0]
	}
	return make([]uint32, 0, 1<<k)
}

func (p *bufferPool) put(b []uint32) {
	if c := cap(b); c > 0 && p.kept+c <= maxKept {
		k := bits.Len(uint(c)) - 1
		p.free[k] = append(p.free[k], b[:0])
		p.kept += c
	}
}
