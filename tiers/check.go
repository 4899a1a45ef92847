package tiers

import (
	"fmt"
	"math"
)

// Check verifies every invariant of the engine and answers the first that does not hold. It looks at everything under the lock, so it is for
// tests and for a tool that asks an idle engine.
func (e *Engine) Check() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return ErrClosed
	}
	c := checker{e: e, pins: map[uint32]uint32{}, children: map[uint32]uint32{}, writers: map[uint32]int{}, chunks: map[uint16]int{}, pages: map[uint16]int{}}
	for _, step := range []func() error{c.leases, c.parents, c.slots, c.index, c.totals} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

type checker struct {
	e        *Engine
	pins     map[uint32]uint32 // by slot: leases of lookups, loads and pins
	children map[uint32]uint32 // by slot
	writers  map[uint32]int    // by slot: stores
	chunks   map[uint16]int    // by space
	pages    map[uint16]int    // by space: indexed
	heads    int
	records  int
}

func broken(format string, args ...any) error {
	return fmt.Errorf("broken invariant: "+format, args...)
}

func (c *checker) leases() error {
	e := c.e
	live, pins := 0, 0
	byOwner := map[*owner]map[uint32]uint32{}
	for i, x := range e.leases {
		if x.index != uint32(i) {
			return broken("lease %d thinks that it is %d", i, x.index)
		}
		if x.kind == noLease {
			continue
		}
		live++
		if byOwner[x.owner] == nil {
			byOwner[x.owner] = map[uint32]uint32{}
		}
		for _, ref := range x.slots {
			byOwner[x.owner][ref]++
			_, s := e.slot(ref)
			if x.kind == storeLease {
				c.writers[ref]++
				if s.granted == 0 || s.state == free {
					return broken("slot %#x of a store is in state %d with %d pages granted", ref, s.state, s.granted)
				}
				continue
			}
			c.pins[ref]++
			pins++
			if s.state != ready {
				return broken("slot %#x of a %v is in state %d", ref, x.kind, s.state)
			}
		}
		if x.kind == lookupLease && x.owner.lookups[x.key] != x {
			return broken("lookup %d is not its owner's", x.key)
		}
	}
	if live+len(e.spare) != len(e.leases) {
		return broken("%d leases in use and %d spare make not %d", live, len(e.spare), len(e.leases))
	}
	if pins != e.pins {
		return broken("%d leases on slots, counted %d", pins, e.pins)
	}
	owners := make([]*owner, 0, len(e.owners))
	for _, ow := range e.owners {
		owners = append(owners, ow)
	}
	for _, s := range e.byPrint {
		owners = append(owners, &s.pinner)
	}
	for _, ow := range owners {
		counts := map[leaseKind]int{}
		total := 0
		for x := ow.all.first; x != nil; x = x.inOwner.next {
			if x.owner != ow {
				return broken("a lease is in another owner's list")
			}
			live--
			counts[x.kind]++
			total += len(x.slots)
		}
		if counts[lookupLease] != len(ow.lookups) || counts[loadLease] != ow.loads || counts[storeLease] != ow.stores || total != ow.leases {
			return broken("owner %d has %v on %d slots, counted %d lookups, %d loads, %d stores, %d", ow.id, counts, total,
				len(ow.lookups), ow.loads, ow.stores, ow.leases)
		}
		if len(byOwner[ow]) != ow.slots.n {
			return broken("owner %d uses %d slots, counted %d", ow.id, len(byOwner[ow]), ow.slots.n)
		}
		used := 0
		for _, w := range ow.slots.entries {
			if w != 0 {
				used++
				if byOwner[ow][uint32(w>>32)] != uint32(w) {
					return broken("owner %d has %d leases on slot %#x, counted %d", ow.id, byOwner[ow][uint32(w>>32)], w>>32, uint32(w))
				}
			}
		}
		if used != ow.slots.n {
			return broken("owner %d counts %d slots in %d entries", ow.id, ow.slots.n, used)
		}
	}
	if live != 0 {
		return broken("%d leases have no living owner", live)
	}
	lookups := 0
	last := int64(math.MinInt64)
	for x := e.expiry.first; x != nil; x = x.inExpiry.next {
		if x.kind != lookupLease || x.deadline < last {
			return broken("the deadlines' order")
		}
		last = x.deadline
		lookups++
	}
	for _, ow := range e.owners {
		lookups -= len(ow.lookups)
	}
	if lookups != 0 {
		return broken("%d lookups too many have a deadline", lookups)
	}
	return nil
}

func (c *checker) parents() error {
	return c.each(func(r *region, ref uint32, s *slot) error {
		if s.state == free || c.e.orphan(ref) {
			return nil
		}
		parent := c.e.kin(ref).parent
		c.children[parent]++
		if _, p := c.e.slot(parent); p.state != ready || p.chunk+1 != s.chunk || p.space != s.space || !p.doomed && int(p.pages) != r.ppc {
			return broken("slot %#x, chunk %d, has parent %#x, chunk %d with %d pages in state %d", ref, s.chunk, parent, p.chunk, p.pages, p.state)
		}
		return nil
	})
}

func (c *checker) each(f func(r *region, ref uint32, s *slot) error) error {
	for n := 1; n <= c.e.nregion; n++ {
		r := c.e.regions[n]
		if r.class == nil {
			continue
		}
		for i := range r.fresh {
			if err := f(r, r.num<<recordBits|uint32(i), &r.slots[i]); err != nil {
				return err
			}
		}
	}
	return nil
}

func (c *checker) slots() error {
	e := c.e
	for n := 1; n <= e.nregion; n++ {
		r := e.regions[n]
		if r.class == nil {
			continue
		}
		c.records += len(r.slots) * r.ppc
		frees, fillings, leased, evictable := len(r.slots)-r.fresh, 0, 0, 0
		for i := range r.fresh {
			ref, s := r.num<<recordBits|uint32(i), &r.slots[i]
			if s.state != free {
				c.chunks[s.space]++
				if int(s.space) >= len(e.spaces) || e.spaces[s.space] == nil || e.spaces[s.space].class != r.class {
					return broken("slot %#x is in space %d", ref, s.space)
				}
			}
			if s.pins != c.pins[ref] || s.children != c.children[ref] {
				return broken("slot %#x has %d leases and %d continuations, counted %d and %d", ref, c.pins[ref], c.children[ref], s.pins, s.children)
			}
			if want := b2i(s.state == filling || s.state == ready && s.granted > 0); c.writers[ref] != want {
				return broken("slot %#x in state %d with %d pages granted has %d writers", ref, s.state, s.granted, c.writers[ref])
			}
			in := r.lru.has(uint32(i))
			if want := s.state == ready && !s.doomed && s.idle() && s.children == 0; in != want {
				return broken("slot %#x is evictable: %v, and in the lru: %v", ref, want, in)
			}
			evictable += b2i(in)
			switch s.state {
			case free:
				frees++
				if s.pages != 0 || s.granted != 0 || s.pins != 0 {
					return broken("free slot %#x has %d pages, %d granted, %d leases", ref, s.pages, s.granted, s.pins)
				}
			case filling:
				fillings++
				if s.pages != 0 || s.granted == 0 || int(s.granted) > r.ppc || s.pins != 0 || s.children != 0 {
					return broken("filling slot %#x has %d pages, %d granted, %d leases, %d continuations", ref, s.pages, s.granted, s.pins, s.children)
				}
			case ready:
				leased += b2i(!s.idle())
				if s.doomed && (s.idle() || s.pages != 0) || !s.doomed && (s.pages == 0 || int(s.pages)+int(s.granted) > r.ppc) {
					return broken("ready slot %#x has %d pages, %d granted, doomed %v, idle %v", ref, s.pages, s.granted, s.doomed, s.idle())
				}
				if !s.doomed && s.idle() && e.redundant(ref) {
					return broken("idle slot %#x adds nothing", ref)
				}
				if err := c.pageRecords(r, ref, s); err != nil {
					return err
				}
			}
		}
		listed := 0
		for i := r.freeList; i != 0; i = r.kin[i-1].next {
			if listed++; r.slots[i-1].state != free || listed > r.free {
				return broken("the list of free slots of region %d", r.id)
			}
		}
		if frees != r.free || listed+len(r.slots)-r.fresh != r.free || fillings != r.filling || leased != r.leased || evictable != r.lru.n {
			return broken("region %d has %d free, %d listed, %d filling, %d leased, %d evictable; counted %d, %d, %d, %d", r.id, frees, listed, fillings,
				leased, evictable, r.free, r.filling, r.leased, r.lru.n)
		}
		for i := range r.lru.n {
			l := r.lru.heap[i]
			if r.lru.pos[l.slot] != uint32(i+1) || r.slots[l.slot].stamp != l.stamp || i > 0 && r.lru.heap[(i-1)/4].stamp > l.stamp {
				return broken("the lru of region %d at %d", r.id, i)
			}
		}
	}
	return nil
}

// pageRecords verifies the page records of a ready slot.
func (c *checker) pageRecords(r *region, ref uint32, s *slot) error {
	e := c.e
	base := int(ref&recordMask) * r.ppc
	var buf [32]byte
	for pos := range r.ppc {
		rec, l := ref&^recordMask|uint32(base+pos), r.links[base+pos]
		if pos >= int(s.pages) {
			if l != (link{}) {
				return broken("page %d of slot %#x is linked and not committed", pos, ref)
			}
			continue
		}
		for _, other := range []uint32{l.prev, l.next} {
			if other == 0 {
				continue
			}
			or, op := e.slotOf(other)
			ro, o := e.slot(or)
			if o.state != ready || o.doomed || op >= int(o.pages) || op != pos || o.chunk != s.chunk || o.space != s.space ||
				!equal(ro.digest(or&recordMask, op), r.digestBytes(ref&recordMask, pos, &buf)) {
				return broken("page %d of slot %#x is linked to another page, %#x", pos, ref, other)
			}
		}
		if l.next != 0 && e.links(l.next).prev != rec || l.prev != 0 && e.links(l.prev).next != rec {
			return broken("the links of page %d of slot %#x", pos, ref)
		}
		if l.prev == 0 {
			c.heads++
			c.pages[s.space]++
			if found := e.find(e.spaces[s.space], r.digestBytes(ref&recordMask, pos, &buf)); found != rec {
				return broken("page %d of slot %#x is found as %#x", pos, ref, found)
			}
		}
	}
	return nil
}

func (c *checker) index() error {
	for _, t := range []*table{&c.e.idx.cur, &c.e.idx.old} {
		used := 0
		for _, w := range t.words {
			used += b2i(w != 0)
		}
		if used != t.used || used > 0 && used >= len(t.words) {
			return broken("a table of %d has %d entries, counted %d", len(t.words), used, t.used)
		}
	}
	if c.heads != c.e.idx.len() {
		return broken("%d pages can be found, %d entries", c.heads, c.e.idx.len())
	}
	return nil
}

func (c *checker) totals() error {
	e := c.e
	if c.records != e.records {
		return broken("%d records, counted %d", c.records, e.records)
	}
	for _, s := range e.byPrint {
		if s.chunks != c.chunks[s.id] || s.pages != c.pages[s.id] {
			return broken("space %d has %d chunks, %d pages; counted %d, %d", s.id, c.chunks[s.id], c.pages[s.id], s.chunks, s.pages)
		}
	}
	for _, cl := range e.classes {
		slots, frees := 0, 0
		for _, r := range cl.regions {
			if r.class != cl {
				return broken("region %d is in another class's list", r.id)
			}
			if !r.draining {
				slots += len(r.slots)
				frees += r.free
			}
		}
		if slots != cl.slots || frees != cl.free {
			return broken("a class has %d slots, %d free; counted %d, %d", slots, frees, cl.slots, cl.free)
		}
	}
	return nil
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}
