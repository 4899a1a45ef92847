package policy

// arc is ARC (Megiddo, Modha: ARC: A Self-Tuning, Low Overhead Replacement Cache, FAST 2003): what was used once and what was used again
// stand in two orders of recency, and what left either is remembered for a while. Coming back too late to one of the two shifts the
// balance to it.
//
// The room for a chunk is made before the chunk is known, so a victim is chosen before the chunk that comes shifts the balance, not after.
type arc struct {
	books
	queues [2]queue // once, again
	sizes  [2]int   // resident, offered or not: T1, T2
	gone   ghosts   // B1, B2
	p      int      // what sizes[0] aims at
}

func newARC(o Options) Policy { return &arc{gone: ghosts{seed: o.Seed}} }

func (a *arc) Name() string { return "arc" }

func (a *arc) Grow(region uint32, slots int) {
	a.grow(region, slots)
	a.resize()
}

func (a *arc) Shrink(region uint32) {
	a.shrink(region)
	a.resize()
}

func (a *arc) resize() {
	for i := range a.queues {
		a.queues[i].resize(&a.books)
	}
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
	a.again(ref, n)
}

// again moves a slot that is used for the second time to the other order.
func (a *arc) again(ref uint32, n *note) {
	offered := n.pos != 0
	a.queues[0].hold(&a.books, n)
	a.sizes[0]--
	a.sizes[1]++
	n.queue, n.rank = 1, a.tick()
	if offered {
		a.queues[1].offer(&a.books, ref, n)
	}
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
		a.remember(uint32(n.queue), n.key)
	}
	a.leave(n)
}

// remember keeps what left, within the bounds of the paper: resident and remembered, those used once are at most the capacity, and all are at most
// twice that.
func (a *arc) remember(list uint32, key uint64) {
	if a.gone.full() {
		if list == 0 && a.gone.lists[0].n+a.sizes[0] >= a.capacity || a.gone.lists[1].n == 0 {
			a.gone.drop(0)
		} else {
			a.gone.drop(1)
		}
	}
	a.gone.add(list, key)
	for a.gone.lists[0].n > 0 && a.gone.lists[0].n+a.sizes[0] > a.capacity {
		a.gone.drop(0)
	}
}

// Inherit passes on the later use, and that there was a second one.
func (a *arc) Inherit(parent, child uint32) {
	p, c := a.note(parent), a.note(child)
	if c.rank <= p.rank {
		return
	}
	a.queues[p.queue].rank(&a.books, parent, p, c.rank)
}

func (a *arc) Victim() (ref uint32, ok bool) {
	once, again := &a.queues[0], &a.queues[1]
	if once.n > 0 && (a.sizes[0] > a.p || again.n == 0) {
		return once.first()
	}
	return again.first()
}

func (a *arc) Work(int) {}
