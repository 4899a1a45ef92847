package engine

import (
	"encoding/binary"
	"fmt"
	"math/bits"

	"lookaside/internal/invariants"
	"lookaside/tiers/why"
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
	// ready or filling, out of the index for good; freed when its last lease ends
	doomed flags = 1 << iota
	// the bytes of the slot are pending. Filling, it is promoting; ready, it is unverified: see the
	// methods of these names
	pending
	// ready, and a store committed the same chunk during this promotion: freed after its last use
	// if the stored slot still holds the chunk
	twin
	// ready, used since it was stored or grew, and queued for the tiers that admit that
	reused
	// ready, taken out of the policy's order to be written to the tiers below before it is evicted
	cold
	// ready, being copied to another slot: not extended meanwhile; or filling, and that slot
	moving
	// ready, and its chunk was copied to another slot: freed after its last use, if the other slot
	// still holds the chunk. A foreign slot that was copied is freed in any case.
	moved
	spoiled // its memory is bad: never granted again once it is free
)

// slot is the engine's account of one slot: a cache line with all of it that a lookup of the whole
// chunk reads and writes. The rest is its kin.
type slot struct {
	stamp    uint64 // tick of the last use; a prefix inherits that of a continuation that leaves
	gen      uint32 // rises each time the slot becomes free
	pins     uint32 // leases
	children uint32 // slots whose parent this is, without cold ones
	chunk    uint32 // the chunk's number in its prefix
	pages    uint16 // committed pages
	granted  uint16 // pages after them that a store is writing; the whole chunk while filling
	space    uint16
	state    state
	flags    flags
	// digest of the page at the chunk's last position; outlives the slot's becoming free
	last [4]uint64
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

func (a *arena) slot(ref uint32) (*region, *slot) {
	r := a.regions[ref>>recordBits]
	return r, &r.slots[ref&recordMask]
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

// promoting reports whether the slot is being filled from a tier or a peer. Lookups may lease such
// a slot. It stays until FinishPromotion, even if all lookups have left it.
func (s *slot) promoting() bool { return s.state == filling && s.flags&pending != 0 }

// unverified reports whether the slot was restored and may not be read before its bytes have been
// checked.
func (s *slot) unverified() bool { return s.state == ready && s.flags&pending != 0 }

// idle reports whether the slot is neither leased nor being extended.
func (s *slot) idle() bool { return s.pins == 0 && (s.state != ready || s.granted == 0) }

// touch records a use of a ready slot.
func (e *Engine) touch(ref uint32) {
	r, s := e.slot(ref)
	s.stamp, r.lastUse = e.tick, e.tick
	r.class.policy.Use(ref)
	if e.hints.low > 0 {
		e.raise(ref)
	}
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

// offer lets a slot be evicted from now on. It must be ready, without a continuation, and not in
// use.
func (e *Engine) offer(ref uint32) {
	r, s := e.slot(ref)
	switch {
	case r.retired:
		if s.flags&cold != 0 {
			e.warm(r, ref)
		}
		return
	case s.flags&cold != 0:
		if e.kin(ref).child == 0 {
			e.cool(r, ref)
		}
		return
	}
	if e.hints.pinned > 0 && r.kinds[ref&recordMask] == pinned {
		return
	}
	r.class.policy.Offer(ref)
	e.wantVictims(r.class)
}

// hold withdraws a slot from eviction (the reverse of offer), as it is about to be used or
// continued. It has no effect if the slot was not offered.
func (e *Engine) hold(ref uint32) {
	switch r, s := e.slot(ref); {
	case s.flags&cold != 0:
		e.thaw(ref)
	case s.state == ready:
		r.class.policy.Hold(ref)
	}
}

// register adds a slot that has just become ready to its class's policy. The slot's place in its
// prefix must be known.
func (e *Engine) register(ref uint32) {
	r, s := e.slot(ref)
	sp := e.spaceOf(r, s)
	pos := 0 // of a page that stays when a partly filled chunk grows
	if int(s.pages) == r.ppc {
		pos = r.ppc - 1
	}
	key, parent := sp.key(r.digest(ref&recordMask, pos)), e.heldParent(ref)
	r.class.policy.Enter(ref, key, parent, groupOf(e.orderOf(r, ref), 0))
	if e.cascades.learner != nil && !r.foreign {
		e.appraise(ref, key, parent)
	}
	s.stamp, r.lastUse = e.tick, e.tick
	r.born[ref&recordMask] = e.residence.now
}

// pin takes a lease on a ready slot. The policy learns of the use when the lease ends: the slot
// cannot be evicted until then, and a lookup need not wait for the policy.
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
	e.leases.pins++
	s.stamp, r.lastUse = e.tick, e.tick
	if e.cascades.reused != 0 && s.flags&reused == 0 {
		e.reuse(ref)
	}
}

// unpin ends a lease. A slot that is still filling stays, because it may still be written to.
func (e *Engine) unpin(ref uint32) {
	r, s := e.slot(ref)
	if invariants.Enabled && s.pins == 0 {
		e.fail(fmt.Sprintf("slot %#x loses a lease that it has not: %+v", ref, *s))
	}
	s.pins--
	e.leases.pins--
	if s.state == ready && s.idle() {
		r.unlease()
		e.settle(ref)
	}
}

// settle puts a ready slot that is not in use any more where it belongs. If it is out of the index,
// or adds nothing to it, it becomes free; if it has no continuation, it becomes evictable.
func (e *Engine) settle(ref uint32) {
	r, s := e.slot(ref)
	switch {
	case s.doomed():
		e.release(ref)
	case r.foreign && s.flags&moved != 0:
		e.leave(ref, why.End)
		e.release(ref)
	case e.superfluous(r, s, ref):
		if !r.foreign {
			e.stats.Duplicates++
		}
		e.bequeath(ref)
		if s.flags&cold != 0 && e.kin(ref).child == 0 {
			e.cool(r, ref) // as thaw expects
		}
		e.leave(ref, why.End)
		e.release(ref)
	case s.children == 0:
		e.offer(ref)
	}
}

// leave takes a ready slot out of the index, out of its prefix and out of the order of eviction.
// The reason is remembered of the pages that no other slot has; why.End: there are none, or it does
// not matter.
func (e *Engine) leave(ref uint32, reason why.Reason) {
	r, s := e.slot(ref)
	evicted := reason == why.Evicted
	by := e.taker
	if shed := e.unqueue(ref, evicted); shed != 0 && evicted && e.cfg.GoneTier == 0 {
		reason, by.Tier = why.Shed, uint8(bits.TrailingZeros8(shed))+1
	}
	if s.flags&cold != 0 {
		e.discard(r, ref)
	}
	if r.foreign {
		e.retractLent(r, ref)
	} else {
		e.retract(ref, 0, reason, by)
	}
	e.vouch(s)
	if parent := e.heldParent(ref); parent != 0 {
		r.class.policy.Inherit(parent, ref)
	}
	e.disown(ref)
	r.class.policy.Leave(ref, evicted)
	e.forgetHints(r, ref)
	s.flags |= doomed
	e.gone(ref)
}

// gone reports to Config.OnGone that what a slot holds has left the index for good.
func (e *Engine) gone(ref uint32) {
	if e.cfg.OnGone != nil && !e.isForeign(ref) {
		r := e.regions[ref>>recordBits]
		e.cfg.OnGone(r.id, r.num, ref&recordMask)
	}
}

// doom drops what a slot holds, for a reason. It leaves the index now, and becomes free now or
// after its last use.
func (e *Engine) doom(ref uint32, reason why.Reason) {
	_, s := e.slot(ref)
	if s.doomed() {
		return
	}
	if s.state == filling {
		if s.promoting() {
			e.endFlight(ref)
		}
		s.flags |= doomed
		return
	}
	e.leave(ref, reason)
	if s.idle() {
		e.release(ref)
	}
}

// release makes a slot free that left the index, or whose filling failed.
func (e *Engine) release(ref uint32) {
	r, s := e.slot(ref)
	if s.state == filling {
		r.filled()
		e.disown(ref)
	}
	e.vouch(s)
	e.gone(ref)
	e.spaceOf(r, s).chunks--
	e.unassign(r, ref)
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
