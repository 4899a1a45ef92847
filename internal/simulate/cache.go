package simulate

import (
	"fmt"
	"math/bits"

	"lookaside/tiers/policy"
)

// A Cache is the books of one arena, or of one tier, without the rest: which pages are there, in
// slots of up to a chunk's pages, and which chunk a policy evicts next. It does what package engine
// does with the same requests one after another. It does not know leases that outlast a request,
// shares of sessions and tenants, hints, or several geometries.
//
// A page is named by a key, which names the whole prefix up to it. Equal keys are equal pages, and
// keys must be spread over 64 bits like hashes. A chunk is in the policy what it is in the engine:
// one that has all its pages is named by its last one, another one by its first.
//
// # A part of the chunks
//
// With NewSample a cache handles only the chunks whose first page is among a part of all keys, with
// as large a part of the slots (Waldspurger, Saemundsson, Ahmad, Park: Cache Modeling and
// Optimization using Miniature Simulations, ATC 2017). The other chunks cost one comparison each.
// The parent of a chunk is then the nearest chunk before it that is in the sample. A chunk that is
// held has all its prefix held, so it hits or not whatever the others do, and the ratio of the
// sample estimates that of all chunks. Versions of a chunk that begin alike are in the sample
// together.
//
// A cache takes memory as it fills. It is not safe for concurrent use.
type Cache struct {
	policy   policy.Policy
	ppc      int
	capacity int
	limit    uint64 // the largest key of a first page in the sample

	keys   []uint64 // by record: slot*ppc + position
	kin    []kin    // by record
	chunks []chunk  // by slot; those that were ever used

	// table has records plus 1 by their keys, with open addressing: one for each page, from which
	// kin leads to the others.
	table []uint32
	shift uint
	used  int

	evicted int
	due     int      // chunks since the policy's last Work
	leased  []uint32 // slots that the present request uses
	below   *below   // what feeds the tier below; nil if there is none
	tick    uint64   // requests
	stored  int      // pages that put stored
}

// kin links the records of one page, plus 1; 0 is none. The first is the one in the table.
type kin struct{ next, prev uint32 }

// chunk is what a slot holds.
type chunk struct {
	parent   uint32 // the slot plus 1 of the chunk before it; 0 is none
	children uint32 // that are not cold
	kids     uint32 // all
	first    uint32 // the number of its first page in its prefix
	pages    uint16 // 0: the slot is free
	leased   bool   // the present request uses it
	prev     uint64 // the key of the page before first, if any
	below    standing
}

// NewCache returns a cache of slots with room for a chunk of pagesPerChunk pages each.
func NewCache(p policy.Policy, slots, pagesPerChunk int) (*Cache, error) {
	return NewSample(p, slots, pagesPerChunk, 1)
}

// NewSample returns a cache of a sample of the chunks, with room for slots of that sample. rate is
// the part of all chunks that are in it, above 0 and at most 1.
func NewSample(p policy.Policy, slots, pagesPerChunk int, rate float64) (*Cache, error) {
	if slots <= 0 || slots > policy.SlotMask || slots > (1<<31)/max(pagesPerChunk, 1) {
		return nil, fmt.Errorf("capacity of %d blocks: must be 1 to %d", slots, policy.SlotMask)
	}
	if pagesPerChunk < 1 || pagesPerChunk > 1<<15 {
		return nil, fmt.Errorf("%d pages a chunk: must be 1 to %d", pagesPerChunk, 1<<15)
	}
	if !(rate > 0 && rate <= 1) {
		return nil, fmt.Errorf("sample of %v: must be above 0 and at most 1", rate)
	}
	c := &Cache{policy: p, ppc: pagesPerChunk, capacity: slots, limit: ^uint64(0)}
	if rate < 1 {
		c.limit = uint64(rate * (1 << 63) * 2)
	}
	p.Grow(region, slots)
	c.resize(1 << 8)
	return c, nil
}

// Evicted returns how many chunks have left for room.
func (c *Cache) Evicted() int { return c.evicted }

// Full reports whether the cache has had to evict: from then on its size matters.
func (c *Cache) Full() bool { return c.evicted > 0 }

// region is the number of the only region of the policy's refs.
const region = 1

// ref is the policy's name for a slot.
func ref(slot uint32) uint32 { return region<<policy.SlotBits | slot }

// workSteps is the size of one Work, and the number of chunks between two, as in the engine.
const workSteps = 32

// A Walk is what one request asks of a cache.
type Walk struct {
	First int      // the number of the first page
	Prev  uint64   // the key of the page before it, if it is known
	Keys  []uint64 // of the pages from First on
	// From is how many of the pages are stored rather than looked up: they are no hits, and using
	// them is no use. The rest is looked up.
	From int
	// Insert is how many of the pages are stored if they are not held.
	Insert int
}

// Do does what a request asks: it hits the longest held prefix of the pages that are looked up, and
// stores pages that are not held, for which it evicts. What it uses is leased until it is done, so
// a request larger than the cache keeps what fits. It returns how many pages were looked up and how
// many of them hit, both of chunks in the sample.
func (c *Cache) Do(w *Walk) (asked, hits int) {
	c.leased = c.leased[:0]
	c.tick++
	parent := uint32(0)
	if w.First > 0 && w.First%c.ppc == 0 {
		if parent = c.slotOf(c.find(w.Prev)); parent != 0 {
			c.lease(parent) // it must not make room for its own continuation
		}
	}
	gap, room := false, true // the hit has ended; there may be room for more
	prev := w.Prev
	chunks := 0
	for at := 0; at < len(w.Keys); {
		first := w.First + at
		whole := first%c.ppc == 0 // all pages of the chunk from its first on are named
		end := min(len(w.Keys), at+c.ppc-first%c.ppc)
		keys := w.Keys[at:end]
		before := prev
		prev = keys[len(keys)-1]
		chunks++
		if c.limit != ^uint64(0) && (!whole || keys[0] > c.limit) {
			at = end
			continue
		}
		lookup := min(max(w.From-at, 0), len(keys)) // from this page of the chunk on
		asked += len(keys) - lookup
		if gap && !room {
			at = end
			continue
		}
		use := lookup < len(keys) && !gap
		rec := c.find(prev)
		have := len(keys)
		if rec == 0 {
			for have = 0; have < len(keys); have++ {
				next := c.find(keys[have])
				if next == 0 {
					break
				}
				rec = next
			}
		}
		if use && have > lookup {
			hits += have - lookup
			c.use(c.slotOf(rec))
		}
		gap = gap || lookup < len(keys) && have < len(keys)
		store := keys[:min(max(w.Insert-at, 0), len(keys))]
		switch {
		case have == len(keys):
			slot := c.slotOf(rec)
			c.hold(slot, parent)
			parent = slot
		case room && whole && have < len(store):
			parent = c.put(first, before, store, have, rec, parent)
			room = parent != 0 && len(store) == len(keys)
		default:
			room = false
		}
		at = end
	}
	// The last first, so that a chunk is offered after what continues it.
	for i := len(c.leased) - 1; i >= 0; i-- {
		s := c.leased[i]
		k := &c.chunks[s-1]
		k.leased = false
		if k.children == 0 {
			c.policy.Offer(ref(s - 1))
		}
	}
	if c.below != nil {
		c.below.done(c)
	}
	if c.due += chunks; c.due >= workSteps {
		c.due = 0
		c.policy.Work(workSteps)
	}
	return asked, hits
}

// Held returns how many pages from the first of keys on are held.
func (c *Cache) Held(keys []uint64) (n int) {
	for n < len(keys) && c.find(keys[n]) != 0 {
		n++
	}
	return n
}

// use tells the policy of the use of a slot (plus 1), and leases the slot.
func (c *Cache) use(slot uint32) {
	c.policy.Use(ref(slot - 1))
	c.lease(slot)
	if c.below != nil {
		c.below.used(c, slot-1)
	}
}

func (c *Cache) lease(slot uint32) {
	if k := &c.chunks[slot-1]; !k.leased {
		c.policy.Hold(ref(slot - 1))
		if k.below.cold {
			c.below.thaw(c, slot-1)
		}
		k.leased = true
		c.leased = append(c.leased, slot)
	}
}

// hold leases a held slot, and makes parent its parent if it has none.
func (c *Cache) hold(slot, parent uint32) {
	c.lease(slot)
	if k := &c.chunks[slot-1]; k.parent == 0 && c.before(parent, k.first) {
		k.parent = parent
		c.adopt(parent)
	}
}

// adopt counts one more continuation of a slot (plus 1).
func (c *Cache) adopt(parent uint32) {
	p := &c.chunks[parent-1]
	p.children++
	p.kids++
}

// before reports whether a slot (plus 1, 0 for none) holds a chunk that lies before page first of
// its prefix. Only keys that are not of this kind lead to another one; it could become its own
// ancestor.
func (c *Cache) before(slot, first uint32) bool {
	return slot != 0 && c.chunks[slot-1].first < first
}

// put stores a chunk of which the first have pages are held, the last of these by a record (plus
// 1). It returns the slot (plus 1) that has it, 0 if there is no room.
func (c *Cache) put(first int, prev uint64, keys []uint64, have int, rec, parent uint32) uint32 {
	if have > 0 {
		slot := c.slotOf(rec)
		if k := &c.chunks[slot-1]; int(k.pages) == have { // nothing behind it: it is extended
			c.use(slot)
			for pos := have; pos < len(keys); pos++ {
				c.enter(slot-1, pos, keys[pos])
			}
			c.stored += len(keys) - have
			k.pages = uint16(len(keys))
			if c.below != nil {
				c.below.grown(c, slot-1)
			}
			return slot
		}
	}
	slot, ok := c.room()
	if !ok {
		return 0
	}
	if !c.before(parent, uint32(first)) {
		parent = 0
	}
	if parent != 0 {
		c.adopt(parent)
	}
	c.chunks[slot] = chunk{parent: parent, first: uint32(first), pages: uint16(len(keys)),
		prev: prev, leased: true}
	for pos, key := range keys {
		c.enter(slot, pos, key)
	}
	name, above := keys[0], uint32(0)
	if len(keys) == c.ppc {
		name = keys[c.ppc-1]
	}
	if parent != 0 {
		above = ref(parent - 1)
	}
	c.policy.Enter(ref(slot), max(name, 1), above, 0)
	c.leased = append(c.leased, slot+1)
	c.stored += len(keys)
	if c.below != nil {
		c.below.entered(c, slot)
	}
	return slot + 1
}

// room returns a free slot. If there is none, it evicts.
func (c *Cache) room() (slot uint32, ok bool) {
	if n := len(c.chunks); n < c.capacity {
		c.chunks = append(c.chunks, chunk{})
		for range c.ppc {
			c.keys, c.kin = append(c.keys, 0), append(c.kin, kin{})
		}
		return uint32(n), true
	}
	var victim uint32
	if c.below != nil && c.below.oldest != 0 {
		victim = ref(c.below.oldest - 1)
	} else if victim, ok = c.policy.Victim(0); !ok {
		return 0, false
	}
	slot = victim & policy.SlotMask
	k := &c.chunks[slot]
	wasCold := k.below.cold
	if wasCold {
		c.below.end(c, slot)
	}
	if k.parent != 0 {
		c.policy.Inherit(ref(k.parent-1), victim)
	}
	c.policy.Leave(victim, true)
	for pos := range int(k.pages) {
		c.leave(slot, pos)
	}
	c.evicted++
	if k.parent != 0 {
		up := &c.chunks[k.parent-1]
		up.kids--
		if up.below.cold {
			if up.kids == 0 {
				c.below.cool(c, k.parent-1)
			}
		} else if !wasCold {
			up.children--
		}
		if !up.below.cold && up.children == 0 && !up.leased {
			c.policy.Offer(ref(k.parent - 1))
		}
	}
	k.pages = 0
	return slot, true
}

// slotOf is the slot plus 1 of a record plus 1.
func (c *Cache) slotOf(rec uint32) uint32 {
	if rec == 0 {
		return 0
	}
	return (rec-1)/uint32(c.ppc) + 1
}

// The index.

func (c *Cache) home(key uint64) uint32 { return uint32(key * 0x9E3779B97F4A7C15 >> c.shift) }

func (c *Cache) next(at uint32) uint32 { return (at + 1) & uint32(len(c.table)-1) }

// find returns the record plus 1 of a page, 0 if it is not held.
func (c *Cache) find(key uint64) uint32 {
	for at := c.home(key); c.table[at] != 0; at = c.next(at) {
		if rec := c.table[at]; c.keys[rec-1] == key {
			return rec
		}
	}
	return 0
}

// enter notes that a slot has a page.
func (c *Cache) enter(slot uint32, pos int, key uint64) {
	rec := slot*uint32(c.ppc) + uint32(pos)
	c.keys[rec], c.kin[rec] = key, kin{}
	if head := c.find(key); head != 0 {
		next := c.kin[head-1].next
		c.kin[rec], c.kin[head-1].next = kin{next, head}, rec+1
		if next != 0 {
			c.kin[next-1].prev = rec + 1
		}
		return
	}
	if c.used++; c.used > len(c.table)/3*2 {
		c.resize(2 * len(c.table))
	}
	c.insert(rec)
}

func (c *Cache) insert(rec uint32) {
	at := c.home(c.keys[rec])
	for c.table[at] != 0 {
		at = c.next(at)
	}
	c.table[at] = rec + 1
}

// leave notes that a slot has a page no more.
func (c *Cache) leave(slot uint32, pos int) {
	rec := slot*uint32(c.ppc) + uint32(pos)
	links := c.kin[rec]
	if links.next != 0 {
		c.kin[links.next-1].prev = links.prev
	}
	if links.prev != 0 {
		c.kin[links.prev-1].next = links.next
		return
	}
	at := c.home(c.keys[rec])
	for c.table[at] != rec+1 {
		at = c.next(at)
	}
	if links.next != 0 {
		c.table[at] = links.next
		return
	}
	c.used--
	// What was put behind it because its place was taken moves up.
	for next := c.next(at); ; next = c.next(next) {
		moved := c.table[next]
		if moved == 0 {
			break
		}
		home := c.home(c.keys[moved-1])
		if mask := uint32(len(c.table) - 1); (next-home)&mask >= (next-at)&mask {
			c.table[at] = moved
			at = next
		}
	}
	c.table[at] = 0
}

// resize makes the table size words long, a power of two.
func (c *Cache) resize(size int) {
	old := c.table
	c.table, c.shift = make([]uint32, size), uint(64-bits.Len(uint(size-1)))
	for _, rec := range old {
		if rec != 0 {
			c.insert(rec - 1)
		}
	}
}
