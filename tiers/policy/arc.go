package policy

// arc is ARC (Megiddo, Modha: ARC: A Self-Tuning, Low Overhead Replacement Cache, FAST 2003).
// Chunks used once and chunks used again are in two orders of recency. What is evicted from either
// is remembered for a while. A chunk that returns after it was evicted from an order shifts the
// balance to that order.
//
// Each group has both orders and a balance of its own. What is remembered is common to all.
//
// It differs from the paper in another point: the engine makes room before the chunk is known, so
// the victim is chosen before a returning chunk shifts the balance, not after.
type arc struct {
	books            // of queues for chunks used once, and used again
	parts []arcGroup // by group
	once  int        // the sum of sizes[0] of all groups
	gone  ghosts     // B1 and B2 in the paper
}

type arcGroup struct {
	sizes [2]int // resident, offered or not; T1 and T2 in the paper
	p     int    // the target of sizes[0]
}

func newARC(o Options) Policy {
	return &arc{books: newBooks(2), parts: make([]arcGroup, 1), gone: ghosts{seed: o.Seed}}
}

func (a *arc) Name() string { return "arc" }

func (a *arc) Grow(region uint32, slots int) {
	a.grow(region, slots)
	a.gone.resize(a.capacity)
}

func (a *arc) Shrink(region uint32) {
	a.shrink(region)
	a.gone.resize(a.capacity)
	for i := range a.parts {
		a.parts[i].p = min(a.parts[i].p, a.capacity)
	}
}

func (a *arc) Enter(ref uint32, key uint64, _ uint32, group uint8) {
	a.need(group)
	n, of := a.enter(ref, key, group), &a.parts[group]
	n.rank = a.tick()
	if g := a.gone.find(key); g != 0 {
		once, again := a.gone.lists[0].n, a.gone.lists[1].n
		if a.gone.nodes[g].list == 0 {
			of.p = min(a.capacity, of.p+max(1, again/once))
		} else {
			of.p = max(0, of.p-max(1, once/again))
		}
		a.gone.remove(g)
		n.queue = 1
	}
	a.count(n, 1)
}

// count adds to the size of a slot's queue.
func (a *arc) count(n *note, by int) {
	a.parts[n.group].sizes[n.queue] += by
	if n.queue == 0 {
		a.once += by
	}
}

func (a *arc) need(group uint8) {
	if !a.has(group) {
		a.makeGroup(group)
		a.parts = append(a.parts, make([]arcGroup, len(a.of)-len(a.parts))...)
	}
}

func (a *arc) Use(ref uint32) {
	n := a.note(ref)
	if n.queue == 1 {
		a.home(n).rank(&a.books, ref, n, a.tick())
		return
	}
	a.count(n, -1)
	a.move(ref, n, 1, a.tick())
	a.count(n, 1)
}

func (a *arc) Offer(ref uint32) {
	n := a.note(ref)
	a.home(n).offer(&a.books, ref, n)
}

func (a *arc) Hold(ref uint32) {
	n := a.note(ref)
	a.home(n).hold(&a.books, n)
}

func (a *arc) Leave(ref uint32, evicted bool) {
	n := a.note(ref)
	a.home(n).hold(&a.books, n)
	a.count(n, -1)
	if evicted && n.key != 0 {
		a.remember(n.queue, n.key)
	}
	a.leave(n)
}

// remember adds an evicted chunk to a list, within the bounds of the paper. Chunks used once,
// resident and remembered, number at most the capacity; so do all remembered chunks.
func (a *arc) remember(list uint8, key uint64) {
	if list == 0 {
		for a.gone.lists[0].n > 0 && a.gone.lists[0].n+a.once >= a.capacity {
			a.gone.drop(0)
		}
	}
	if a.gone.full() {
		if a.gone.lists[1].n > 0 {
			a.gone.drop(1)
		} else {
			a.gone.drop(0)
		}
	}
	a.gone.add(list, key)
}

func (a *arc) Regroup(ref uint32, group uint8) {
	a.need(group)
	n := a.note(ref)
	a.count(n, -1)
	a.regroup(ref, n, group, n.queue)
	a.count(n, 1)
}

func (a *arc) Copy(from, to uint32) { a.count(a.copy(from, to), 1) }

// Inherit gives parent the later of both last uses.
func (a *arc) Inherit(parent, child uint32) {
	if p, c := a.note(parent), a.note(child); c.rank > p.rank {
		a.home(p).rank(&a.books, parent, p, c.rank)
	}
}

func (a *arc) Victim(group uint8) (ref uint32, ok bool) {
	if !a.has(group) {
		return 0, false
	}
	once, again, of := a.queue(group, 0), a.queue(group, 1), &a.parts[group]
	if once.n > 0 && (of.sizes[0] > of.p || again.n == 0) {
		return once.first()
	}
	return again.first()
}

func (a *arc) Work(int) {}
