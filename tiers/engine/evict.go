package engine

import "lookaside/internal/invariants"

// Eviction: who hands out slots. A free one is taken, or the policy of the class names a victim.

// maxStrays bounds the victims in regions that hand out no slots which a call passes on its way to
// one elsewhere.
const maxStrays = 64

// victim returns the slot of a class that its policy would evict next. It may drop slots of regions
// that are being emptied on the way.
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

// evict drops the end of a prefix of a class for room: one that was written ahead, or the policy's
// choice. It returns false if there is none.
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

// alloc takes a free slot for a store, and evicts one if it must. 0: there is none.
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
	panic("engine: a class counts free slots that its regions have not")
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

// workSteps is how much a policy does at a time, and after the leases of how many chunks have ended
// or begun to be stored. A lookup does not wait for it.
const workSteps = 32

// work counts chunks after which the policy may do what it has put off.
func (c *class) work(chunks int) {
	if c.due += chunks; c.due >= workSteps {
		c.due = 0
		c.policy.Work(workSteps)
	}
}
