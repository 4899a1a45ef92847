package policy

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// owner is what keeps prefixes in slots, as an engine does, and tells a policy of it.
type owner struct {
	t      *testing.T
	p      Policy
	rnd    *rand.Rand
	chunks map[uint32]*held
	refs   []uint32 // resident
	free   []uint32
	slots  map[uint32]int // by region
	groups int
}

type held struct {
	group    uint8
	at       int // in refs
	parent   uint32
	children int
	leases   int
}

func (o *owner) offered(ref uint32) bool {
	c := o.chunks[ref]
	return c.children == 0 && c.leases == 0
}

func (o *owner) grow(region uint32, slots int) {
	o.p.Grow(region, slots)
	o.slots[region] = slots
	for i := range slots {
		o.free = append(o.free, region<<SlotBits|uint32(i))
	}
	o.rnd.Shuffle(len(o.free), func(i, j int) { o.free[i], o.free[j] = o.free[j], o.free[i] })
}

// shrink clears a region and takes it away. What continued its chunks elsewhere goes on without a
// prefix.
func (o *owner) shrink(region uint32) {
	for i := len(o.refs) - 1; i >= 0; i-- {
		if ref := o.refs[i]; ref>>SlotBits == region {
			for _, other := range o.refs {
				if c := o.chunks[other]; c.parent == ref {
					c.parent = 0
				}
			}
			o.leave(ref, false)
		}
	}
	kept := o.free[:0]
	for _, ref := range o.free {
		if ref>>SlotBits != region {
			kept = append(kept, ref)
		}
	}
	o.free = kept
	o.p.Shrink(region)
	delete(o.slots, region)
}

func (o *owner) enter() {
	if len(o.free) == 0 && !o.evict() {
		return
	}
	ref := o.free[len(o.free)-1]
	o.free = o.free[:len(o.free)-1]
	parent := uint32(0)
	if len(o.refs) > 0 && o.rnd.IntN(3) > 0 {
		parent = o.refs[o.rnd.IntN(len(o.refs))]
		o.p.Hold(parent)
		o.chunks[parent].children++
	}
	group := o.group()
	o.chunks[ref] = &held{group: group, at: len(o.refs), parent: parent, leases: 1}
	o.refs = append(o.refs, ref)
	key := mix(o.rnd.Uint64N(4000)) // some come back
	if o.rnd.IntN(50) == 0 {
		key = 0
	}
	o.p.Enter(ref, key, parent, group)
	if o.rnd.IntN(4) > 0 {
		o.release(ref)
	}
}

func (o *owner) release(ref uint32) {
	c := o.chunks[ref]
	if c.leases > 0 {
		c.leases--
	}
	if o.offered(ref) {
		o.p.Offer(ref)
	}
}

func (o *owner) leave(ref uint32, evicted bool) {
	c := o.chunks[ref]
	if c.parent != 0 {
		o.p.Inherit(c.parent, ref)
	}
	o.p.Leave(ref, evicted)
	last := o.refs[len(o.refs)-1]
	o.refs[c.at], o.chunks[last].at = last, c.at
	o.refs = o.refs[:len(o.refs)-1]
	delete(o.chunks, ref)
	o.free = append(o.free, ref)
	if c.parent != 0 {
		o.chunks[c.parent].children--
		if o.offered(c.parent) {
			o.p.Offer(c.parent)
		}
	}
}

// group is some group, low ones more often than high ones.
func (o *owner) group() uint8 { return uint8(o.rnd.IntN(1 + o.rnd.IntN(o.groups))) }

func (o *owner) evict() bool {
	group := o.group()
	ref, ok := o.p.Victim(group)
	any := false
	for r, c := range o.chunks {
		any = any || c.group == group && o.offered(r)
	}
	if ok != any {
		o.t.Fatalf("a victim of group %d: %v; offered: %v", group, ok, any)
	}
	if !ok {
		return false
	}
	if c := o.chunks[ref]; c == nil || !o.offered(ref) || c.group != group {
		o.t.Fatalf("victim %#x of group %d is not offered there", ref, group)
	}
	o.leave(ref, true)
	return true
}

// move puts what a slot holds into another one.
func (o *owner) move(ref uint32) {
	if len(o.free) == 0 {
		return
	}
	to := o.free[len(o.free)-1]
	o.free = o.free[:len(o.free)-1]
	c := o.chunks[ref]
	o.p.Copy(ref, to)
	o.chunks[to] = &held{group: c.group, at: len(o.refs), parent: c.parent, children: c.children}
	o.refs = append(o.refs, to)
	for _, x := range o.chunks {
		if x.parent == ref {
			x.parent = to
		}
	}
	c.parent, c.children = 0, 0
	if o.offered(to) {
		o.p.Offer(to)
	}
	if c.leases == 0 {
		o.leave(ref, false)
	}
}

// check compares a policy's books with the owner's.
func (o *owner) check() error {
	b, sizes, ghosts := innards(o.p)
	if b == nil {
		return nil
	}
	offered := 0
	of := make([]int, len(b.of))
	for _, ref := range o.refs {
		n := b.note(ref)
		of[n.group]++
		if n.group != o.chunks[ref].group {
			return fmt.Errorf("%#x is in group %d, want %d", ref, n.group, o.chunks[ref].group)
		}
		if !n.present {
			return fmt.Errorf("%#x is not present", ref)
		}
		if o.offered(ref) != (n.pos != 0) {
			return fmt.Errorf("%#x is offered: %v, and its place is %d", ref, o.offered(ref), n.pos)
		}
		if n.pos != 0 {
			offered++
		}
	}
	capacity := 0
	for _, n := range o.slots {
		capacity += n
	}
	if b.capacity != capacity || b.resident != len(o.refs) || len(b.grown) != len(o.slots) {
		return fmt.Errorf("capacity %d, resident %d, want %d, %d", b.capacity, b.resident, capacity,
			len(o.refs))
	}
	if !slices.Equal(of, b.of) || len(b.queues) != len(of)*b.kinds {
		return fmt.Errorf("residents %v of groups with %d queues, want %v", b.of, len(b.queues), of)
	}
	pages := len(b.spare)
	for k := range b.queues {
		q := &b.queues[k]
		offered -= q.n
		pages += len(q.pages)
		for i := range q.n {
			at := q.at(i)
			if n := b.note(at.ref); int(n.pos) != i+1 || int(n.group) != k/b.kinds ||
				n.rank != at.rank || i > 0 && q.at((i-1)/4).rank > at.rank {
				return fmt.Errorf("queue %d at %d: %+v, %+v", k, i, *at, *n)
			}
		}
	}
	if offered != 0 {
		return fmt.Errorf("%d offered slots too many or too few are in the queues", offered)
	}
	if pages != b.pages {
		return fmt.Errorf("%d pages, want %d", pages, b.pages)
	}
	if sizes != nil && !slices.Equal(sizes, of) {
		return fmt.Errorf("queues of %v for %v residents", sizes, of)
	}
	if ghosts != nil {
		if ghosts.n() > ghosts.limit {
			return fmt.Errorf("%d ghosts, at most %d", ghosts.n(), ghosts.limit)
		}
		listed := 0
		for l := range ghosts.lists {
			for n, before := ghosts.lists[l].oldest, uint32(0); n != 0; before, n = n,
				ghosts.nodes[n].next {
				x := ghosts.nodes[n]
				if x.prev != before || int(x.list) != l || ghosts.find(x.key) != n {
					return fmt.Errorf("ghost %d of list %d: %+v", n, l, x)
				}
				listed++
			}
		}
		if listed != ghosts.n() {
			return fmt.Errorf("%d ghosts listed of %d", listed, ghosts.n())
		}
	}
	if a, ok := o.p.(*adaptive); ok {
		for c := range a.worth {
			for i, w := range a.worth[c] {
				if !(w > 0) || math.IsInf(w, 0) {
					return fmt.Errorf("class %d, half octave %d: worth %v", c, i, w)
				}
			}
		}
	}
	return nil
}

// innards returns what check compares: the books, the sizes of each group's queues together if the
// policy counts them, and what it remembers. A policy that is not named here is tested by its
// victims alone.
func innards(p Policy) (b *books, sizes []int, gone *ghosts) {
	switch p := p.(type) {
	case *lru:
		return &p.books, nil, nil
	case *sieve:
		return &p.books, nil, nil
	case *s3fifo:
		for _, s := range p.sizes {
			sizes = append(sizes, s[0]+s[1])
		}
		return &p.books, sizes, &p.gone
	case *arc:
		once := 0
		for i := range p.parts {
			s := &p.parts[i].sizes
			sizes = append(sizes, s[0]+s[1])
			once += s[0]
		}
		if once != p.once {
			sizes = []int{-once}
		}
		return &p.books, sizes, &p.gone
	case *wtinylfu:
		for _, s := range p.sizes {
			sizes = append(sizes, s[0]+s[1]+s[2])
		}
		return &p.books, sizes, nil
	case *adaptive:
		return &p.books, nil, &p.gone
	}
	return nil, nil, nil
}

// TestHistories: random histories of an owner of prefixes, with leases, clearing, one group or
// several, and regions that come and go. The same seed gives the same victims.
func TestHistories(t *testing.T) {
	t.Parallel()
	for _, name := range Names() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for seed := range uint64(6) {
				a, b := history(t, name, seed), history(t, name, seed)
				if a != b {
					t.Fatalf("seed %d: histories end in %#x and %#x", seed, a, b)
				}
			}
		})
	}
}

func history(t *testing.T, name string, seed uint64) (sum uint64) {
	p, err := New(name, Options{Seed: seed})
	if err != nil {
		t.Fatal(err)
	}
	o := &owner{t: t, p: p, rnd: rand.New(rand.NewPCG(seed, 3)), chunks: map[uint32]*held{},
		slots: map[uint32]int{}, groups: 1 + int(seed)%3*4}
	o.grow(1, 1+int(seed)*60)
	for step := range 6000 {
		switch op := o.rnd.IntN(100); {
		case op < 40:
			o.enter()
		case op < 60 && len(o.refs) > 0: // a lookup along a prefix
			for ref := o.refs[o.rnd.IntN(len(o.refs))]; ref != 0; ref = o.chunks[ref].parent {
				if o.rnd.IntN(2) == 0 {
					p.Hold(ref)
					o.chunks[ref].leases++
				}
				p.Use(ref)
			}
		case op < 85 && len(o.refs) > 0:
			o.release(o.refs[o.rnd.IntN(len(o.refs))])
		case op < 87 && len(o.refs) > 0:
			if ref := o.refs[o.rnd.IntN(len(o.refs))]; o.chunks[ref].children == 0 {
				o.leave(ref, false)
			}
		case op < 90 && len(o.refs) > 0:
			o.move(o.refs[o.rnd.IntN(len(o.refs))])
		case op < 92 && len(o.refs) > 0:
			ref := o.refs[o.rnd.IntN(len(o.refs))]
			o.chunks[ref].group = o.group()
			p.Regroup(ref, o.chunks[ref].group)
		case op < 97:
			p.Work(o.rnd.IntN(20))
		case op < 98 && len(o.slots) < 5:
			for region := uint32(1); region < 8; region++ {
				if o.slots[region] == 0 {
					o.grow(region, 1+o.rnd.IntN(200))
					break
				}
			}
		case op < 99 && len(o.slots) > 0 && o.rnd.IntN(4) == 0:
			for region := uint32(1); region < 8; region++ {
				if o.slots[region] != 0 {
					o.shrink(region)
					break
				}
			}
		default:
			o.evict()
		}
		if v, ok := p.Victim(o.group()); ok {
			sum = mix(sum ^ uint64(v))
		}
		if step%10 == 0 {
			if err := o.check(); err != nil {
				t.Fatalf("seed %d, step %d: %v", seed, step, err)
			}
		}
	}
	return sum
}

// TestNothingIsAllocated once a policy has grown.
func TestNothingIsAllocated(t *testing.T) {
	for _, name := range Names() {
		const slots = 1000
		p := full(name, slots)
		for i := range uint32(slots) {
			p.Offer(1<<SlotBits | i)
		}
		key := uint64(1) << 40
		turn := func() {
			for range 3000 {
				v, ok := p.Victim(0)
				if !ok {
					t.Fatal("no victim")
				}
				p.Leave(v, true)
				key++
				p.Enter(v, mix(key%1700), 0, 0)
				p.Use(v)
				p.Offer(v)
				p.Work(3)
			}
		}
		if n := testing.AllocsPerRun(5, turn); n != 0 {
			t.Errorf("%s allocates %v times", name, n)
		}
	}
}

// TestPagesAreHanded: all slots may go from one queue into another, as nothing is allocated for
// that.
func TestPagesAreHanded(t *testing.T) {
	t.Parallel()
	const slots = 5000
	p := full("arc", slots)
	for i := range uint32(slots) {
		p.Offer(1<<SlotBits | i)
	}
	a := p.(*arc)
	for i := range uint32(slots) {
		p.Use(1<<SlotBits | i)
	}
	if a.queues[0].n != 0 || a.queues[1].n != slots || len(a.queues[0].pages) > 1 {
		t.Fatalf("%d and %d offered", a.queues[0].n, a.queues[1].n)
	}
	for i := range uint32(slots) {
		p.Leave(1<<SlotBits|i, true)
	}
	p.Shrink(1)
	if a.pages > 2*len(a.queues)+1 || a.capacity != 0 {
		t.Fatalf("%d pages for no slots", a.pages)
	}
}

// TestAdaptiveLearns: of chunks of two kinds, those that come back and those that do not, it keeps
// the former, whichever of a class's marks tells them apart; and in a loop that does not fit it
// comes to keep a part.
func TestAdaptiveLearns(t *testing.T) {
	t.Parallel()
	const slots = 1000
	run := func(name string, next func(i int) uint64) float64 {
		p, _ := New(name, Options{Seed: 1})
		p.Grow(1, slots)
		at, keys := map[uint64]uint32{}, map[uint32]uint64{}
		hits, n := 0, 200*slots
		for i := range n {
			key := next(i)
			if ref, ok := at[key]; ok {
				p.Use(ref)
				hits++
			} else {
				ref := 1<<SlotBits | uint32(len(at))
				if len(at) == slots {
					ref, _ = p.Victim(0)
					delete(at, keys[ref])
					p.Leave(ref, true)
				}
				at[key], keys[ref] = ref, key
				p.Enter(ref, mix(key), 0, 0)
				p.Offer(ref)
			}
			p.Work(1)
		}
		return float64(hits) / float64(n)
	}
	for _, c := range []struct {
		name string
		next func(i int) uint64
		more float64 // than LRU has
	}{
		{"scan", func(i int) uint64 {
			// 800 chunks that are used in turn, between twice as many that never come back
			if i%3 == 0 {
				return uint64(i/3*7919%800) + 1
			}
			return uint64(i) + 1<<32
		}, 0.25},
		{"loop", func(i int) uint64 { return uint64(i%1300) + 1 }, 0.2},
	} {
		lru, adaptive := run("lru", c.next), run("adaptive", c.next)
		if adaptive < lru+c.more {
			t.Errorf("%s: adaptive hits %.3f, lru %.3f", c.name, adaptive, lru)
		}
	}
}
