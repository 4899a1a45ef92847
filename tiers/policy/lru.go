package policy

// lru evicts the end of a prefix that was not used for longest.
type lru struct{ books }

func newLRU(Options) Policy { return &lru{newBooks(1)} }

func (l *lru) Name() string { return "lru" }

func (l *lru) Grow(region uint32, slots int) { l.grow(region, slots) }

func (l *lru) Shrink(region uint32) { l.shrink(region) }

func (l *lru) Enter(ref uint32, key uint64, _ uint32, group uint8) {
	l.need(group)
	l.enter(ref, key, group).rank = l.tick()
}

func (l *lru) need(group uint8) {
	if !l.has(group) {
		l.makeGroup(group)
	}
}

func (l *lru) Use(ref uint32) {
	n := l.note(ref)
	l.queues[n.group].rank(&l.books, ref, n, l.tick())
}

func (l *lru) Offer(ref uint32) {
	n := l.note(ref)
	l.queues[n.group].offer(&l.books, ref, n)
}

func (l *lru) Hold(ref uint32) {
	n := l.note(ref)
	l.queues[n.group].hold(&l.books, n)
}

func (l *lru) Leave(ref uint32, _ bool) {
	n := l.note(ref)
	l.queues[n.group].hold(&l.books, n)
	l.leave(n)
}

func (l *lru) Regroup(ref uint32, group uint8) {
	l.need(group)
	l.regroup(ref, l.note(ref), group, 0)
}

func (l *lru) Copy(from, to uint32) { l.copy(from, to) }

func (l *lru) Inherit(parent, child uint32) {
	if p, c := l.note(parent), l.note(child); c.rank > p.rank {
		l.queues[p.group].rank(&l.books, parent, p, c.rank)
	}
}

func (l *lru) Victim(group uint8) (ref uint32, ok bool) {
	if !l.has(group) {
		return 0, false
	}
	return l.queues[group].first()
}

func (l *lru) Work(int) {}
