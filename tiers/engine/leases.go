package engine

import (
	"fmt"
	"math/bits"

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

// lease is what one lookup, load, pin or unfinished store holds: a run of chunks of one prefix, or
// for a store the slots that it was granted. Leases are reused; the generation in a handle says
// which use it means.
type lease struct {
	kind  leaseKind
	index uint32
	gen   uint32
	owner *owner

	// of a lookup: the client's id; of a cascade: the tier's bit; of a move or a copy: the slot
	// that it fills
	key      uint64
	first, n int // pages
	buf      []uint32
	slots    []uint32 // what is left of buf
	deadline int64    // of a lookup; it runs while the lookup does not wait
	// for promotions: slots[held:] are the chunks from chunk `after` on, of which it wants the
	// pages before `end`
	waiting bool
	// before them come the n pages that it held when it began to wait; the last may be a shorter
	// version of chunk `after`
	held    int
	after   int
	end     int
	prev    [32]byte // of a store or a copy: the digest of the page before
	hasPrev bool
	takers  int // of a lookup: the loads that are still to take it over
	// of a store of every nth chunk: for each grant the digests of the page before and of the page
	// after, zeros where there is none
	around   []byte
	returned int // of a loan: slots that have been given back, and are 0
	inOwner  leaseNode
	inExpiry leaseNode
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
	return &x.inExpiry
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

func (x *lease) handle() uint64 { return uint64(x.gen)<<32 | uint64(x.index) + 1 }

// newLease makes a lease of an owner on slots, which it copies and which are counted on the owner
// already.
func (e *Engine) newLease(kind leaseKind, ow *owner, slots []uint32) *lease {
	var x *lease
	if n := len(e.spare); n > 0 {
		x = e.leases[e.spare[n-1]]
		e.spare = e.spare[:n-1]
	} else {
		x = &lease{index: uint32(len(e.leases))}
		e.leases = append(e.leases, x)
	}
	x.gen++
	x.kind, x.owner, x.takers = kind, ow, ow.takers
	x.buf = append(e.bufs.get(len(slots)), slots...)
	x.slots = x.buf
	ow.leases += len(slots)
	ow.all.push(x)
	return x
}

// findLease resolves a handle of an owner's; of a pin, whose owner is nobody's, with a nil owner.
func (e *Engine) findLease(ow *owner, kind leaseKind, handle uint64) (*lease, error) {
	i, gen := uint32(handle)-1, uint32(handle>>32)
	if uint32(handle) == 0 || uint64(i) >= uint64(len(e.leases)) || gen == 0 ||
		gen > e.leases[i].gen {
		return nil, fmt.Errorf("%w: %v %#x", tiers.ErrNotFound, kind, handle)
	}
	x := e.leases[i]
	if x.gen != gen || x.kind == noLease {
		return nil, fmt.Errorf("%w: %v %#x has ended", tiers.ErrStale, kind, handle)
	}
	if ow != nil && x.owner != ow || x.kind != kind {
		return nil, fmt.Errorf("%w: %v %#x", tiers.ErrNotFound, kind, handle)
	}
	return x, nil
}

// endSlice is how many slots of a lookup are freed while the lock is held. To free as many takes
// some 100 µs.
const endSlice = 512

// endLease frees all that a lease holds; a store is aborted. What a large lookup holds is left to
// EndSome, unless it waits.
func (e *Engine) endLease(x *lease) {
	if invariants.Enabled {
		e.checkLives(x)
	}
	if x.kind == lookupLease && len(x.slots) > e.endSlice && !x.waiting {
		delete(x.owner.lookups, x.key)
		e.expiry.remove(x)
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
	e.endings.push(x)
	e.ending.Store(true)
}

// splitEnding leaves the first k slots of a lookup to EndSome. They stay counted on its owner.
func (e *Engine) splitEnding(x *lease, k int) {
	y := e.newLease(endingLease, x.owner, x.slots[:k])
	x.owner.leases -= k // newLease counted them again
	e.pushEnding(y)
	x.slots = x.slots[k:]
}

// Ending reports whether EndSome has something to do. It takes no lock.
func (e *Engine) Ending() bool { return e.ending.Load() }

// EndSome frees some of what large lookups that have ended still hold, and reports whether there is
// more. Their names and deadlines are gone before. Whoever ends lookups calls it until there is no
// more, and may do other things in between.
func (e *Engine) EndSome() (more bool) {
	e.mu.Lock()
	defer e.unlock()
	return e.endSome()
}

func (e *Engine) endSome() (more bool) {
	if e.closed || e.endings.first == nil {
		return false
	}
	e.endPart(e.endings.first)
	return e.endings.first != nil
}

// endPart frees the last slots of a lease that is ending.
func (e *Engine) endPart(x *lease) {
	from := max(0, len(x.slots)-e.endSlice)
	e.freeSlots(x, x.slots[from:])
	if x.slots = x.slots[:from]; from == 0 {
		e.forget(x)
		e.ending.Store(e.endings.first != nil)
	}
}

// freeSlots ends a lookup's, load's or pin's leases on some of its slots, the last first, so that a
// prefix is settled after its continuation.
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

// used tells the policy of a class, or of its foreign one, of the use of leased slots, those that
// are still held.
func (e *Engine) used(c *class, slots []uint32) {
	gone := false
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
	ow := x.owner
	switch x.kind {
	case lookupLease:
		delete(ow.lookups, x.key)
		if !x.waiting {
			e.expiry.remove(x)
		}
	case endingLease:
		e.endings.remove(x)
	case loadLease:
		ow.loads--
	case loanLease:
		ow.loans--
	case storeLease:
		ow.stores--
	}
	ow.all.remove(x)
	e.bufs.put(x.buf)
	*x = lease{index: x.index, gen: x.gen}
	e.spare = append(e.spare, x.index)
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

// tally counts an owner's leases by slot, so that its share is measured in slots however many of
// its requests have one prefix in common. Open addressing, at most a quarter full, as each
// collision is a mispredicted branch of a lookup; neighbouring slots lie together, as those of a
// prefix often are neighbours.
type tally struct {
	entries []uint64 // slot<<32 | count; 0 is empty
	n       int
}

func (t *tally) home(ref uint32) uint32 {
	const line = 8
	h := ref / line * 0x9E3779B1
	return (h>>16^h)*line&uint32(len(t.entries)-1) | ref%line
}

// add counts a lease, unless it is on a slot too many.
func (t *tally) add(ref uint32, limit int) bool {
	if 4*(t.n+1) > len(t.entries) {
		t.grow()
	}
	mask := uint32(len(t.entries) - 1)
	for i := t.home(ref); ; i = (i + 1) & mask {
		switch w := t.entries[i]; {
		case w == 0:
			if t.n >= limit {
				return false
			}
			t.entries[i] = uint64(ref)<<32 | 1
			t.n++
			return true
		case uint32(w>>32) == ref:
			t.entries[i]++
			return true
		}
	}
}

func (t *tally) sub(ref uint32) {
	mask := uint32(len(t.entries) - 1)
	i := t.home(ref)
	for uint32(t.entries[i]>>32) != ref {
		if t.entries[i] == 0 {
			panic("tiers: an owner ends a lease that it was not counted for")
		}
		i = (i + 1) & mask
	}
	if t.entries[i]--; uint32(t.entries[i]) > 0 {
		return
	}
	t.n--
	for j := (i + 1) & mask; t.entries[j] != 0; j = (j + 1) & mask {
		if (j-t.home(uint32(t.entries[j]>>32)))&mask >= (j-i)&mask {
			t.entries[i] = t.entries[j]
			i = j
		}
	}
	t.entries[i] = 0
}

func (t *tally) grow() {
	old := t.entries
	t.entries = make([]uint64, max(64, 2*len(old)))
	mask := uint32(len(t.entries) - 1)
	for _, w := range old {
		if w != 0 {
			i := t.home(uint32(w >> 32))
			for t.entries[i] != 0 {
				i = (i + 1) & mask
			}
			t.entries[i] = w
		}
	}
}
