package policy

// lru evicts the end of a prefix that was not used for longest.
type lru struct {
	books
	queues [1]queue
}

func newLRU(Options) Policy { return &lru{} }

func (l *lru) Name() string { return "lru" }

func (l *lru) Grow(region uint32, slots int) { l.grow(region, slots, l.queues[:]) }

func (l *lru) Shrink(region uint32) { l.shrink(region, l.queues[:]) }

func (l *lru) Enter(ref uint32, key uint64, _ uint32) { l.enter(ref, key).rank = l.tick() }

func (l *lru) Use(ref uint32) { l.queues[0].rank(&l.books, ref, l.note(ref), l.tick()) }

func (l *lru) Offer(ref uint32) { l.queues[0].offer(&l.books, ref, l.note(ref)) }

func (l *lru) Hold(ref uint32) { l.queues[0].hold(&l.books, l.note(ref)) }

func (l *lru) Leave(ref uint32, _ bool) {
	n := l.note(ref)
	l.queues[0].hold(&l.books, n)
	l.leave(n)
}

func (l *lru) Copy(from, to uint32) { l.copy(from, to) }

func (l *lru) Inherit(parent, child uint32) {
	if p, c := l.note(parent), l.note(child); c.rank > p.rank {
		l.queues[0].rank(&l.books, parent, p, c.rank)
	}
}

func (l *lru) Victim() (ref uint32, ok bool) { return l.queues[0].first() }

func (l *lru) Work(int) {}
