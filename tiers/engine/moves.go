package engine

import (
	"fmt"

	"lookaside/tiers"
	"lookaside/tiers/tenant"
	"lookaside/tiers/why"
)

// Move is a chunk to copy from one slot to another. Until EndMove its bytes do not change, and
// lookups find and loads read it where it was.
type Move struct {
	Handle uint64
	Space  SpaceID
	From   Extent // all pages of the chunk
	To     Extent // as many
	Prev   []byte // digest of the page before; empty if there is none, or it is not known
	Hashes []byte // digests of the pages, end to end

	Unverified bool      // the mover must check it as well
	Tenant     tenant.ID // whose chunk it is
}

// MoveEnd is how a move ended.
type MoveEnd uint8

const (
	// the bytes are in the new slot, as durable as required, and checked
	MoveDone   MoveEnd = iota
	MoveFailed         // they are not; the chunk stays where it was
	MoveBad            // they are bad where they were: the chunk is dropped
)

// NextMoves appends to out up to max chunks of a drained region to copy to slots of other regions.
// EndMove ends each. It looks at a few hundred slots from number from on, and returns where to go
// on; -1: at the end. Digests are copied into buf, which is returned for its reuse; the moves are
// valid until its bytes change.
//
// Slots in use are left for another time. If leased is set, only slots that are being filled or
// extended are skipped. Leased slots are moved too; their leases stay with the old slot, which
// becomes free when the last of them ends. Nothing
// is evicted for a move. ErrBusy, with nothing appended: no slot elsewhere is free; ErrNotFound:
// there is no such region, or it is not drained.
func (e *Engine) NextMoves(region uint32, from, max int, leased bool, buf []byte,
	out []Move) (moves []Move, next int, _ []byte, err error) {
	e.mu.Lock()
	defer e.unlock()
	buf = buf[:0]
	r := e.byID[region]
	switch {
	case e.closed:
		return out, 0, buf, tiers.ErrClosed
	case r == nil || !r.retired:
		return out, 0, buf, fmt.Errorf("%w: region %d is not drained", tiers.ErrNotFound, region)
	case from < 0:
		return out, 0, buf, invalid("moves from slot %d on", from)
	}
	e.tick++
	n := 0
	for i, looked := from, 0; ; i, looked = i+1, looked+1 {
		switch {
		case i >= r.fresh:
			return out, -1, buf, nil
		case looked == clearSlice || n >= max:
			return out, i, buf, nil
		}
		if !e.movable(&r.slots[i], leased) {
			continue
		}
		if r.class.free == 0 {
			if n == 0 {
				err = fmt.Errorf("%w: no slot is free outside of region %d", tiers.ErrBusy, region)
			}
			return out, i, buf, err
		}
		var m Move
		m, buf = e.startMove(r.num<<recordBits|uint32(i), buf)
		out = append(out, m)
		n++
	}
}

// movable reports whether a slot may be moved now. One with leases is only moved if leased is set.
func (e *Engine) movable(s *slot, leased bool) bool {
	return s.state == ready && !s.doomed() && s.flags&moving == 0 && s.granted == 0 &&
		(s.pins == 0 || leased) && e.spaces[s.space].clears == 0
}

// aim makes a granted slot the target of what a ready one holds, and returns its region.
func (e *Engine) aim(to, from uint32) *region {
	r, s := e.slot(from)
	rt, t := e.slot(to)
	t.flags |= moving
	for pos := range int(s.pages) {
		copy(rt.digest(to&recordMask, pos), r.digest(from&recordMask, pos))
	}
	return rt
}

// startMove grants a free slot for what a ready one holds, and leases that. It is not a use.
func (e *Engine) startMove(from uint32, buf []byte) (Move, []byte) {
	r, s := e.slot(from)
	who := r.tenants[from&recordMask]
	to := e.alloc(e.spaces[s.space], who, int(s.chunk), int(s.pages))
	rt := e.aim(to, from)
	if s.idle() {
		r.lease()
	}
	s.pins++
	e.leases.pins++
	s.flags |= moving
	e.mover.slots.add(from, 1<<31)
	x := e.leases.add(moveLease, &e.mover, []uint32{from})
	x.errand.to, x.n = to, int(s.pages)

	page := s.chunk * uint32(r.ppc)
	m := Move{
		Handle: x.handle(), Space: SpaceID(s.space),
		From: Extent{Page: page, Pages: uint32(s.pages), Region: r.id,
			Offset: r.offset(from, 0)},
		To: Extent{Page: page, Pages: uint32(s.pages), Region: rt.id,
			Offset: rt.offset(to, 0)},
		Unverified: s.unverified(), Tenant: who,
	}
	m.Prev, m.Hashes, buf = e.digests(from, buf)
	return m, buf
}

// EndMove ends a move, and reports whether the chunk is found in its new slot from now on. If so,
// the old slot becomes free when its last lease ends. If not, the new slot is free again: the move
// failed, or the chunk was dropped, replaced by a longer version, or is being cleared. A handle
// that has ended changes nothing. For a chunk with many continuations EndMove releases the lock
// between slices.
func (e *Engine) EndMove(handle uint64, how MoveEnd) (found bool) {
	e.mu.Lock()
	defer e.unlock()
	if e.closed {
		return false
	}
	x, err := e.leases.find(nil, moveLease, handle)
	if err != nil {
		return false
	}
	e.idx.migrate(migrateStep)
	e.tick++
	from, to := x.slots[0], x.errand.to
	r, s := e.slot(from)
	_, t := e.slot(to)
	s.flags &^= moving
	t.flags &^= moving
	// While a space is cleared nothing moves in it: the chunk might come to where the clearing has
	// been already.
	clearing := e.spaces[s.space].clears > 0
	if how != MoveDone || s.doomed() || t.doomed() || clearing || e.superfluous(r, s, from) {
		e.release(to)
		if how == MoveBad && !s.doomed() {
			e.stats.Bad++
			if s.unverified() {
				e.stats.VerifyFailed++
			}
			e.doom(from, why.Lost)
		}
		e.endLease(x)
		return false
	}
	e.relocate(from, to)
	e.mover.slots.add(to, 1<<31)
	e.leases.extend(x, []uint32{to})
	// What continued the old slot continues the new one, a slice at a time: both stay meanwhile.
	k := e.kin(from)
	for n := 1; k.child != 0 && !t.doomed(); n++ {
		child := k.child
		e.unhang(child)
		e.hang(to, child)
		if n%clearSlice == 0 {
			if !e.pause() {
				return true
			}
		}
	}
	e.stats.Moved++
	e.endLease(x)
	return true
}

// relocate makes slot to, which was filled with what slot from holds, ready in its place, with one
// lease.
func (e *Engine) relocate(from, to uint32) {
	r, s := e.slot(from)
	rt, t := e.slot(to)
	sp := e.spaces[s.space]
	if s.flags&cold != 0 {
		e.thaw(from)
	}
	if s.unverified() {
		e.vouch(s)
		e.stats.Verified++
	}
	*t = slot{stamp: s.stamp, gen: t.gen, chunk: s.chunk, pages: s.pages, space: s.space,
		state: ready, flags: s.flags&^(moved|spoiled) | t.flags&spoiled, pins: 1, last: t.last}
	e.leases.pins++
	rt.filled()
	rt.lease()
	rt.lastUse = max(rt.lastUse, s.stamp)
	rt.born[to&recordMask] = r.born[from&recordMask]
	s.flags |= moved

	// In the index the new slot is first, and the old one comes after it.
	base, baseTo := int(from&recordMask)*r.ppc, int(to&recordMask)*rt.ppc
	for pos := range int(s.pages) {
		rec, recTo := from&^recordMask|uint32(base+pos), to&^recordMask|uint32(baseTo+pos)
		l, lt := &r.links[base+pos], &rt.links[baseTo+pos]
		*lt = link{prev: l.prev, next: rec}
		if l.prev != 0 {
			e.links(l.prev).next = recTo
		} else {
			e.idx.replace(sp.tagOfRecord(r.digest(from&recordMask, pos)), rec, recTo)
		}
		l.prev = recTo
	}
	if e.journal.walks > 0 {
		e.note(PagesStored, to, 0, int(s.pages))
	}
	e.came(to)

	c := r.class
	c.policy.Copy(from, to)
	e.moveHints(from, to)
	if !e.orphan(from) {
		parent := e.kin(from).parent
		e.unhang(from)
		e.hang(parent, to)
	}
	if t := e.route(from); t != nil {
		queued := t.whole | t.part
		e.route(to).held, e.route(to).traits = t.held, t.traits
		e.unqueue(from, false)
		e.admit(to, queued)
	}
}
