package engine

import "math"

// Copies of what is read often from peers. The engine counts the loads of each chunk that a peer
// lent, from one loan to the next. At Config.CopyAfter the chunk is due: while it is lent it is
// copied into a slot of the arena (NextCopy, EndCopy), and is held from then on as if it had been
// stored. A chunk that could not be copied is due again at its next load.

// Copy is a peer's chunk to copy into the arena. Until EndCopy its loan is not returned.
type Copy struct {
	Handle uint64
	From   Extent // in a region as announced to our workers
	To     Extent // as many pages
	Bytes  uint64 // that they have
}

// maxDue bounds the chunks that wait to be copied.
const maxDue = 4096

// dueCopy is a foreign slot that waits to be copied. It is void if another generation is there by
// now.
type dueCopy struct {
	ref, gen uint32
	prev     [32]byte // digest of the page before; zeros if there is none, or it is not known
	follows  bool     // the chunk before was loaded with it
}

// readCounts remembers how often chunks were read that are not borrowed any more: of those that
// were returned last, as many as limit, and of up to as many before these.
type readCounts struct {
	limit      int
	young, old map[uint64]uint16
}

func (c *readCounts) put(chunk uint64, n uint16) {
	if c.young == nil || len(c.young) >= c.limit {
		c.old, c.young = c.young, map[uint64]uint16{}
	}
	c.young[chunk] = n
}

func (c *readCounts) take(chunk uint64) uint16 {
	n, ok := c.young[chunk]
	if ok {
		delete(c.young, chunk)
	} else if n, ok = c.old[chunk]; ok {
		delete(c.old, chunk)
	}
	return n
}

// chunkKey is what reads of a foreign slot's chunk are remembered by: its first page, so that they
// go on when it grows.
func (e *Engine) chunkKey(r *region, ref uint32) uint64 {
	return e.spaces[r.slots[ref&recordMask].space].key(r.digest(ref&recordMask, 0))
}

// countReads counts a load of slots [from, to) of a lookup, and has those copied that were read
// often enough.
func (e *Engine) countReads(slots []uint32, from, to int) {
	if e.cfg.CopyAfter == 0 {
		return
	}
	for i := from; i < to; i++ {
		ref := slots[i]
		if !e.isForeign(ref) {
			continue
		}
		r, s := e.slot(ref)
		p := &r.places[ref&recordMask]
		if p.reads < math.MaxUint16 {
			p.reads++
		}
		if int(p.reads) < e.cfg.CopyAfter || p.due || len(e.lent.due) == maxDue {
			continue
		}
		p.due = true
		d := dueCopy{ref: ref, gen: s.gen, follows: i > from}
		if i > 0 {
			before, _ := e.slot(slots[i-1])
			before.digestBytes(slots[i-1]&recordMask, before.ppc-1, &d.prev)
		}
		if e.lent.due = append(e.lent.due, d); len(e.lent.due) == 1 && e.cfg.Wake != nil {
			e.cfg.Wake(WorkCopies)
		}
	}
}

// NextCopy returns the next chunk to copy; EndCopy ends it. ok is false if there is none for now:
// Config.Wake is called with WorkCopies when there is. NextCopy makes room as a promotion does, and
// passes over chunks that find none. It may release the lock.
func (e *Engine) NextCopy() (c Copy, ok bool) {
	e.mu.Lock()
	defer e.unlock()
	var tried dueCopy
	for !e.closed && len(e.lent.due) > 0 {
		d := e.lent.due[0]
		if e.isDue(&d) {
			_, s := e.slot(d.ref)
			if own := e.spaces[s.space].class; own.free == 0 && d != tried {
				tried = d
				e.makeRoom(own)
				continue // makeRoom may have released the lock
			}
			c, ok = e.startCopy(&d)
		}
		if e.lent.due = e.lent.due[1:]; ok {
			return c, true
		}
	}
	return Copy{}, false
}

// isDue reports whether a chunk that is due is still there. If it has been dropped, isDue notes
// that it waits no more.
func (e *Engine) isDue(d *dueCopy) bool {
	if !e.isForeign(d.ref) { // its region is another's by now
		return false
	}
	r, i := e.regions[d.ref>>recordBits], int(d.ref&recordMask)
	if i >= r.fresh || r.slots[i].gen != d.gen || r.slots[i].state != ready {
		return false
	}
	if r.slots[i].doomed() {
		r.places[i].due = false
		return false
	}
	return true
}

// startCopy grants a slot of the arena for what a foreign slot holds, and leases the foreign one.
// That is not a use. It returns false if the arena has the chunk, or has no room for it, or has not
// the chunk before that was loaded with it: a prefix is copied from its beginning, so that its end
// never takes the place of that.
func (e *Engine) startCopy(d *dueCopy) (Copy, bool) {
	from := d.ref
	r, s := e.slot(from)
	p := &r.places[from&recordMask]
	sp := e.spaces[s.space]
	p.due = false
	var buf [32]byte
	if e.find(sp, r.digestBytes(from&recordMask, int(s.pages)-1, &buf)) != 0 {
		return Copy{}, false
	}
	to := uint32(0)
	parent := uint32(0)
	if rec := e.find(sp, d.prev[:sp.g.DigestBytes]); rec != 0 && e.at(rec, int(s.chunk)*r.ppc-1) {
		parent, _ = e.slotOf(rec)
	}
	if sp.clears == 0 && sp.class.promoting < sp.class.promotable && (parent != 0 || !d.follows) {
		e.tick++
		to = e.allocAfter(sp, r.tenants[from&recordMask], parent, int(s.chunk), int(s.pages))
	}
	if to == 0 {
		e.stats.CopiesFailed++
		return Copy{}, false
	}
	rt := e.aim(to, from)
	p.due = true
	if s.idle() {
		r.lease()
		e.hold(from)
	}
	s.pins++
	e.leases.pins++
	e.mover.foreign.add(from, 1<<31)
	x := e.leases.add(copyLease, &e.mover, []uint32{from})
	x.n, x.errand.to, x.errand.prev = int(s.pages), to, d.prev

	page := s.chunk * uint32(r.ppc)
	return Copy{
		Handle: x.handle(),
		From:   Extent{Page: page, Pages: uint32(s.pages), Region: p.region, Offset: p.offset},
		To:     Extent{Page: page, Pages: uint32(s.pages), Region: rt.id, Offset: rt.offset(to, 0)},
		Bytes:  uint64(s.pages) * uint64(sp.g.PageBytes),
	}, true
}

// EndCopy ends the copying of a chunk; ok: its bytes are in the arena. It reports whether the arena
// holds the chunk from now on. Otherwise its slot in the arena becomes free; this also happens if
// the peer is gone or a store has committed the chunk in the meantime. A handle that has ended
// changes nothing.
func (e *Engine) EndCopy(handle uint64, ok bool) (copied bool) {
	e.mu.Lock()
	defer e.unlock()
	if e.closed {
		return false
	}
	x, err := e.leases.find(nil, copyLease, handle)
	if err != nil {
		return false
	}
	e.idx.migrate(migrateStep)
	e.tick++
	from, to := x.slots[0], x.errand.to
	r, s := e.slot(from)
	rt, t := e.slot(to)
	p := &r.places[from&recordMask]
	sp := e.spaces[t.space]
	p.due = false
	t.flags &^= moving
	var buf [32]byte
	switch {
	case !ok || s.doomed() || t.doomed() || sp.clears > 0:
		e.stats.CopiesFailed++
		e.release(to)
	case e.find(sp, rt.digestBytes(to&recordMask, x.n-1, &buf)) != 0: // a store was faster
		e.release(to)
	case e.publish(to, x.errand.prev[:sp.g.DigestBytes]):
		copied = true
		p.reads = 0
		s.flags |= moved // only present readers still use the peer's bytes
		e.stats.CopiedChunks++
		e.stats.CopiedPages += uint64(x.n)
		e.admitPromoted(to, -1)
		rt.class.policy.Use(to)
		e.settle(to)
	}
	e.endLease(x)
	return copied
}
