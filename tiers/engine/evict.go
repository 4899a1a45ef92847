package engine

import (
	"lookaside/internal/invariants"
	"lookaside/tiers/tenant"
	"lookaside/tiers/why"
)

// Eviction: who hands out slots. A free one is taken, or the policy of the class names a victim.

// maxStrays bounds the victims in regions that hand out no slots which a call passes on its way to
// one elsewhere.
const maxStrays = 64

// victim returns the slot of one of a class's orders that would be evicted next, of the given kinds
// in their order. It may drop slots of regions that are being emptied on the way.
func (e *Engine) victim(c *class, order tenant.ID, kinds []kind) (ref uint32, ok bool) {
	for range maxStrays {
		for _, k := range kinds {
			if ref, ok = c.policy.Victim(groupOf(order, k)); ok {
				break
			}
		}
		if !ok {
			return 0, false
		}
		switch r := e.regions[ref>>recordBits]; {
		case r.retired: // Drain has not come to it yet
			e.hold(ref)
		case r.draining && e.kin(ref).child == 0:
			e.expel(ref)
		default:
			return ref, ok
		}
	}
	return 0, false
}

// nextVictim returns the slot of a class, of the given kinds, that is likely to be evicted next.
func (e *Engine) nextVictim(c *class, kinds []kind) (ref uint32, ok bool) {
	if !e.divided(c) {
		return e.victim(c, tenant.None, kinds)
	}
	var tried [tenant.MaxIDs]bool
	for {
		t, ok := e.loser(c, nobody, &tried)
		if !ok {
			return 0, false
		}
		if ref, ok = e.victim(c, t, kinds); ok {
			return ref, true
		}
		tried[t] = true
	}
}

// evict drops the end of a prefix of a class, because a tenant wants room. It returns false if
// there is none that this tenant may have evicted.
func (e *Engine) evict(c *class, who tenant.ID) bool {
	var tried [tenant.MaxIDs]bool
	for range maxStrays + tenant.MaxIDs {
		order, divided := tenant.None, e.divided(c)
		if divided {
			var ok bool
			if order, ok = e.loser(c, who, &tried); !ok {
				return false
			}
		}
		dropped := e.evictFrom(c, order)
		switch {
		case dropped && c.free > 0:
			return true
		case !dropped && !divided:
			return false
		}
		tried[order] = !dropped
	}
	return false
}

// divided reports whether each tenant has an order of eviction of its own in a class.
func (e *Engine) divided(c *class) bool { return e.tenants.shares.On() && !c.isForeign }

// evictFrom drops the end of a prefix of one of a class's orders: one that was written ahead, or
// the policy's choice. It returns false if there is none. A slot of a region that is being emptied
// is not handed out when it has become free.
func (e *Engine) evictFrom(c *class, order tenant.ID) bool {
	for range maxStrays {
		ref := c.parts[order].coldFirst
		if ref == 0 {
			var ok bool
			if ref, ok = e.victim(c, order, evictionOrder); !ok {
				return false
			}
			if e.kin(ref).child != 0 {
				return e.evictPast(c, order)
			}
		} else if e.regions[ref>>recordBits].retired {
			e.thaw(ref)
			continue
		}
		e.expel(ref)
		return true
	}
	return false
}

// evictPast drops the policy's first choice without continuations. Those of the slots that it
// passes are cold, and are just being written.
func (e *Engine) evictPast(c *class, order tenant.ID) (dropped bool) {
	var strays [maxStrays]uint32
	n := 0
	for n < len(strays) {
		ref, ok := e.victim(c, order, evictionOrder)
		if !ok {
			break
		}
		if e.kin(ref).child == 0 {
			e.expel(ref)
			dropped = true
			break
		}
		e.hold(ref)
		strays[n] = ref
		n++
	}
	for _, ref := range strays[:n] {
		e.offerEnd(ref)
	}
	return dropped
}

// expel drops an idle ready slot for room.
func (e *Engine) expel(ref uint32) {
	if r, s := e.slot(ref); r.foreign {
		e.stats.ForeignEvicted++
	} else {
		e.stats.Evictions++
		e.stats.EvictedPages += uint64(s.pages)
		e.residence.note(r.born[ref&recordMask])
		e.row(r.tenants[ref&recordMask]).evicted++
	}
	e.leave(ref, why.Evicted)
	e.release(ref)
}

// alloc takes a free slot for a tenant, and evicts one if it must. 0: there is none.
func (e *Engine) alloc(s *space, who tenant.ID, chunk, pages int) uint32 {
	c := s.class
	if c.free == 0 {
		e.taker = why.By{Space: s.mark, Tenant: who, Tier: e.cfg.GoneTier}
		evicted := e.evict(c, who)
		e.taker = why.By{Tier: e.cfg.GoneTier}
		if !evicted {
			return 0
		}
	}
	if e.cfg.FixedRegions { // each may be on a device of its own
		c.turn++
		return e.take(c.nextOpen(c.turn), s, who, chunk, pages)
	}
	if r := c.open; r == nil || r.class != c || r.free == 0 || r.draining {
		c.open = c.nextOpen(0)
	}
	return e.take(c.open, s, who, chunk, pages)
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

// take makes a free slot of a region one that is being filled for a tenant.
func (e *Engine) take(r *region, s *space, who tenant.ID, chunk, pages int) uint32 {
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
	e.assign(r, i, who)
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
