package simulate

import (
	"fmt"
	"slices"
	"strings"

	"lookaside/tiers/engine"
	"lookaside/tiers/policy"
	"lookaside/tiers/worth"
)

// Admission says what a tier takes from the cache above it: what one of the engine's admissions
// takes, or what one takes that only a simulation can have.
type Admission string

const (
	// SecondSight takes what is evicted if it was asked for before, however long ago.
	SecondSight Admission = "second-sight"
	// Oracle takes what is evicted if it will be asked for again.
	Oracle Admission = "oracle"
)

var (
	admitStored  = Admission(engine.AdmitStored.String())
	admitReused  = Admission(engine.AdmitReused.String())
	admitEvicted = Admission(engine.AdmitEvicted.String())
	admitLearned = Admission(engine.AdmitLearned.String())
)

// Admissions returns all admissions, those of the engine first.
func Admissions() []Admission {
	return []Admission{admitStored, admitEvicted, admitLearned, admitReused, SecondSight, Oracle}
}

// ParseAdmission returns the admission with a name.
func ParseAdmission(name string) (Admission, error) {
	if a := Admission(name); slices.Contains(Admissions(), a) {
		return a, nil
	}
	var names []string
	for _, a := range Admissions() {
		names = append(names, string(a))
	}
	return "", fmt.Errorf("want one of %s", strings.Join(names, ", "))
}

// below is the tier below a cache, and what decides what goes to it. It does what the engine does
// (cascades.go and learned.go there), as if writing took no time: a chunk is written when it is
// queued, so nothing is shed.
type below struct {
	tier     *Cache
	admit    Admission
	low      int // slots that are to be free or cold, if the tier takes what is evicted
	ahead    int // slots that are cold
	oldest   uint32
	newest   uint32   // cold slots plus 1 that have no continuations, in the order of their leaving
	promoted int      // pages of the present request before this one come from the tier or are held
	fresh    []uint32 // slots that the present request stored
	learner  *worth.Learner
	seen     map[uint64]int               // requests of each page, for SecondSight
	again    func(page uint64) (due bool) // for Oracle
}

// standing is how a chunk stands to the tier below.
type standing struct {
	held, reused, cold bool
	uses, turn, floor  uint8
	height             uint16
	stamp              uint64 // request that used it last
	next, prev         uint32
}

// newBelow puts a tier below a cache. Oracle needs again to be set.
func newBelow(c, tier *Cache, admit Admission, seed uint64) *below {
	b := &below{tier: tier, admit: admit}
	switch admit {
	case admitStored, admitReused:
		return b
	case admitLearned:
		b.learner = worth.New(seed)
		b.learner.SetRoom(tier.capacity)
	case SecondSight:
		b.seen = map[uint64]int{}
	}
	b.low = int(engine.DefaultLowWater * float64(c.capacity))
	return b
}

// name is what the policy knows a chunk by.
func (c *Cache) name(slot uint32) uint64 {
	at := int(slot) * c.ppc
	if int(c.chunks[slot].pages) == c.ppc {
		at += c.ppc - 1
	}
	return max(c.keys[at], 1)
}

// write writes a chunk to the tier, unless it was before.
func (b *below) write(c *Cache, slot uint32) {
	k := &c.chunks[slot]
	if k.below.held {
		return
	}
	k.below.held = true
	keys := c.keys[int(slot)*c.ppc:][:k.pages]
	b.tier.Do(&Walk{First: int(k.first), Prev: k.prev, Keys: keys, From: len(keys),
		Insert: len(keys)})
}

// entered is called with a slot that has just got a chunk.
func (b *below) entered(c *Cache, slot uint32) {
	k := &c.chunks[slot]
	x := &k.below
	*x = standing{stamp: c.tick}
	if b.learner != nil {
		x.uses = b.learner.Wanted(c.name(slot))
		if k.parent != 0 {
			up := &c.chunks[k.parent-1].below
			x.turn = up.turn
			if up.uses > 0 {
				x.turn++
			}
			x.turn = min(x.turn, maxTrait)
		}
	}
	if b.seen != nil {
		b.seen[c.name(slot)]++
	}
	if int(k.first)+int(k.pages) <= b.promoted {
		x.held, x.reused = true, true
	} else {
		b.stored(slot)
	}
	b.chill(c)
}

// maxTrait is the engine's.
const maxTrait = 100

// grown is called with a slot that has got more pages.
func (b *below) grown(c *Cache, slot uint32) {
	x := &c.chunks[slot].below
	x.held, x.reused = false, false
	b.stored(slot)
}

func (b *below) stored(slot uint32) {
	if b.admit == admitStored {
		b.fresh = append(b.fresh, slot)
	}
}

// used is called with a slot that a request has hit.
func (b *below) used(c *Cache, slot uint32) {
	x := &c.chunks[slot].below
	x.stamp = c.tick
	x.uses = min(x.uses+1, maxTrait)
	if b.seen != nil {
		b.seen[c.name(slot)]++
	}
	if b.admit == admitReused && !x.reused {
		x.reused = true
		b.write(c, slot)
	}
}

// done is called when a request has ended.
func (b *below) done(c *Cache) {
	for _, slot := range b.fresh {
		b.write(c, slot)
	}
	b.fresh = b.fresh[:0]
	b.chill(c)
}

// worthy reports whether a chunk that leaves is to be written, if the tier does not have it.
func (b *below) worthy(c *Cache, slot uint32) bool {
	k := &c.chunks[slot]
	name := c.name(slot)
	switch b.admit {
	case SecondSight:
		return b.seen[name] > 1
	case Oracle:
		return b.again(name)
	case admitLearned:
		x := &k.below
		write, mark := b.learner.Judge(name, &worth.Traits{Uses: x.uses, Turn: x.turn,
			Height: x.height, Depth: k.first / uint32(c.ppc), Age: c.tick - x.stamp,
			Floor: x.floor})
		if k.parent != 0 {
			up := &c.chunks[k.parent-1].below
			up.height = max(up.height, min(x.height, 1<<15)+1)
			up.floor = max(up.floor, mark)
		}
		return write
	}
	return true
}

// chill makes slots cold until enough are free or cold.
func (b *below) chill(c *Cache) {
	for b.low-(c.capacity-len(c.chunks))-b.ahead > 0 {
		victim, ok := c.policy.Victim(0)
		if !ok {
			return
		}
		c.policy.Hold(victim)
		slot := victim & policy.SlotMask
		k := &c.chunks[slot]
		worthy := b.worthy(c, slot)
		k.below.cold = true
		b.ahead++
		if k.kids == 0 {
			b.cool(c, slot)
		}
		if k.parent != 0 {
			c.policy.Inherit(ref(k.parent-1), victim)
			up := &c.chunks[k.parent-1]
			up.below.stamp = max(up.below.stamp, k.below.stamp)
			if up.children--; up.children == 0 && !up.leased {
				c.policy.Offer(ref(k.parent - 1))
			}
		}
		if worthy {
			b.write(c, slot)
		}
	}
}

// cool appends a cold slot to those that leave next.
func (b *below) cool(c *Cache, slot uint32) {
	x := &c.chunks[slot].below
	x.next, x.prev = 0, b.newest
	if b.newest != 0 {
		c.chunks[b.newest-1].below.next = slot + 1
	} else {
		b.oldest = slot + 1
	}
	b.newest = slot + 1
}

func (b *below) uncool(c *Cache, slot uint32) {
	x := &c.chunks[slot].below
	if x.prev != 0 {
		c.chunks[x.prev-1].below.next = x.next
	} else {
		b.oldest = x.next
	}
	if x.next != 0 {
		c.chunks[x.next-1].below.prev = x.prev
	} else {
		b.newest = x.prev
	}
	x.next, x.prev = 0, 0
}

// thaw ends that a slot, and all that it continues, is cold.
func (b *below) thaw(c *Cache, slot uint32) {
	k := &c.chunks[slot]
	b.end(c, slot)
	if k.parent == 0 {
		return
	}
	up := &c.chunks[k.parent-1]
	up.children++
	if up.below.cold {
		b.thaw(c, k.parent-1)
	} else {
		c.policy.Hold(ref(k.parent - 1))
	}
}

// end ends that a slot is cold.
func (b *below) end(c *Cache, slot uint32) {
	k := &c.chunks[slot]
	if k.kids == 0 {
		b.uncool(c, slot)
	}
	k.below.cold = false
	b.ahead--
}
