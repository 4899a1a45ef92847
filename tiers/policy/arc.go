package policy

// arc is ARC (Megiddo, Modha: ARC: A Self-Tuning, Low Overhead Replacement Cache, FAST 2003).
// Chunks used once and chunks used again are in two orders of recency. What is evicted from either
// is remembered for a while. A chunk that returns after it was evicted from an order shifts the
// balance to that order.
//
// It differs from the paper in one point: the engine makes room before the chunk is known, so the
// victim is chosen before a returning chunk shifts the balance, not after.
type arc struct {
	books
	queues [2]queue // used once, used again
	sizes  [2]int   // resident, offered or not; T1 and T2 in the paper
	gone   ghosts   // B1 and B2 in the paper
	p      int      // the target of sizes[0]
}

func newARC(o Options) Policy { return &arc{gone: ghosts{seed: o.Seed}} }

func (a *arc) Name() string { return "arc" }

func (a *arc) Grow(region uint32, slots int) {
	a.grow(region, slots, a.queues[:])
	a.gone.resize(a.capacity)
}

func (a *arc) Shrink(region uint32) {
	a.shrink(region, a.queues[:])
	a.gone.resize(a.capacity)
	a.p = min(a.p, a.capacity)
}

func (a *arc) Enter(ref uint32, key uint64, _ uint32) {
	n := a.enter(ref, key)
	n.rank = a.tick()
	if g := a.gone.find(key); g != 0 {
		once, again := a.gone.lists[0].n, a.gone.lists[1].n
		if a.gone.nodes[g].list == 0 {
			a.p = min(a.capacity, a.p+max(1, again/once))
		} else {
			a.p = max(0, a.p-max(1, once/again))
		}
		a.gone.remove(g)
		n.queue = 1
	}
	a.sizes[n.queue]++
}

func (a *arc) Use(ref uint32) {
	n := a.note(ref)
	if n.queue == 1 {
		a.queues[1].rank(&a.books, ref, n, a.tick())
		return
	}
	a.sizes[0]--
	a.sizes[1]++
	a.move(a.queues[:], ref, n, 1, a.tick())
}

func (a *arc) Offer(ref uint32) {
	n := a.note(ref)
	a.queues[n.queue].offer(&a.books, ref, n)
}

func (a *arc) Hold(ref uint32) {
	n := a.note(ref)
	a.queues[n.queue].hold(&a.books, n)
}

func (a *arc) Leave(ref uint32, evicted bool) {
	n := a.note(ref)
	a.queues[n.queue].hold(&a.books, n)
	a.sizes[n.queue]--
	if evicted && n.key != 0 {
		a.remember(n.queue, n.key)
	}
	a.leave(n)
}

// remember adds an evicted chunk to a list, within the bounds of the paper. Chunks used once,
// resident and remembered, number at most the capacity; so do all remembered chunks.
func (a *arc) remember(list uint8, key uint64) {
	if list == 0 {
		for a.gone.lists[0].n > 0 && a.gone.lists[0].n+a.sizes[0] >= a.capacity {
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

func (a *arc) Copy(from, to uint32) { a.sizes[a.copy(from, to).queue]++ }

// Inherit gives parent the later of both last uses.
func (a *arc) Inherit(parent, child uint32) {
	if p, c := a.note(parent), a.note(child); c.rank > p.rank {
		a.queues[p.queue].rank(&a.books, parent, p, c.rank)
	}
}

func (a *arc) Victim() (ref uint32, ok bool) {
	once, again := &a.queues[0], &a.queues[1]
	if once.n > 0 && (a.sizes[0] > a.p || again.n == 0) {
		return once.first()
	}
	return again.first()
}

func (a *arc) Work(int) {}
