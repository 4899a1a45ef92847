package engine

import "lookaside/tiers/worth"

// What is worth writing: tiers that admit what is learned are written to like those that admit what
// is evicted, but for the chunks that the learner declines. It judges each chunk once, when the
// chunk becomes cold. All such tiers have one learner, which counts with the room of the largest.

// traits is what the learner is to know of a slot: see worth.Traits.
type traits struct {
	height            uint16
	uses, turn, floor uint8
}

// learnFor sets up the learner for a tier, given as a bit.
func (e *Engine) learnFor(bit uint8, room int64) {
	c := &e.cascades
	if c.learner == nil {
		c.learner, c.room = worth.New(e.cfg.Seed), room
	}
	c.learned |= bit
	if c.room = max(c.room, room); room == 0 {
		c.room = 0
	}
}

// appraise begins the traits of a slot that has just become ready. The key is the policy's, parent
// the slot that it continues or 0.
func (e *Engine) appraise(ref uint32, key uint64, parent uint32) {
	x := &e.route(ref).traits
	*x = traits{uses: e.cascades.learner.Wanted(key)}
	if parent != 0 {
		up := &e.route(parent).traits
		x.turn = up.turn
		if up.uses > 0 {
			x.turn = up.turn + 1
		}
		x.turn = min(x.turn, maxTrait)
	}
}

// maxTrait bounds counts of traits: the learner tells less apart.
const maxTrait = 100

// countUses counts a use of some slots of leases that end.
func (e *Engine) countUses(slots []uint32) {
	for _, ref := range slots {
		if r, s := e.slot(ref); s.state == ready && !s.doomed() && !r.foreign {
			x := &e.route(ref).traits
			x.uses = min(x.uses+1, maxTrait)
		}
	}
}

// judge has the learner judge a slot that is about to become cold, and passes on what its prefix
// inherits.
func (e *Engine) judge(r *region, ref uint32) {
	c := &e.cascades
	if c.learner == nil {
		return
	}
	s, t := &r.slots[ref&recordMask], e.route(ref)
	sp := e.spaceOf(r, s)
	pos := 0
	if int(s.pages) == r.ppc {
		pos = r.ppc - 1
	}
	c.learner.SetRoom(int(c.room / int64(r.at.Stride)))
	write, mark := c.learner.Judge(sp.key(r.digest(ref&recordMask, pos)), &worth.Traits{
		Uses: t.traits.uses, Turn: t.traits.turn, Height: t.traits.height, Depth: s.chunk,
		Age: e.tick - s.stamp, Floor: t.traits.floor})
	if !write {
		t.declined = c.learned &^ t.held
		for i := range e.cfg.Tiers {
			c.queues[i].declined += uint64(t.declined >> i & 1)
		}
	}
	if parent := e.heldParent(ref); parent != 0 {
		up := &e.route(parent).traits
		up.height = max(up.height, min(t.traits.height, 1<<15)+1)
		up.floor = max(up.floor, mark)
	}
}
