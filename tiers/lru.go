package tiers

// lru orders the slots of one region that may be evicted by the time of their last use: slots that are ready, unleased, and have no held
// continuation. It only keeps books and never sees any other slot. Its owner calls it under the engine's lock.
//
// It is an indexed 4-ary heap rather than a list, because a prefix enters only when its last continuation leaves, with the later of both
// stamps: that is an insertion into the middle of the order. It is kept exact rather than repaired when a victim is wanted: only the ends of
// prefixes are in it, so a lookup moves at most one entry, whereas a lazy heap may have to repair a million before it finds a victim.
type lru struct {
	heap  []lruEntry // heap[:n], smallest stamp first; off heap, room for every slot
	pos   []uint32   // by slot: its place in heap plus one, 0 if absent; off heap
	n     int
	steps uint64 // entries moved, for tests of the work done
}

type lruEntry struct {
	stamp uint64
	slot  uint32
	_     uint32
}

func (l *lru) has(slot uint32) bool { return l.pos[slot] != 0 }

// min is the slot that was not used for longest.
func (l *lru) min() (slot uint32, stamp uint64, ok bool) {
	if l.n == 0 {
		return 0, 0, false
	}
	return l.heap[0].slot, l.heap[0].stamp, true
}

// add enters an absent slot.
func (l *lru) add(slot uint32, stamp uint64) {
	l.n++
	l.up(l.n-1, lruEntry{stamp: stamp, slot: slot})
}

// remove takes out a slot if it is in.
func (l *lru) remove(slot uint32) {
	p := l.pos[slot]
	if p == 0 {
		return
	}
	l.pos[slot] = 0
	l.n--
	last := l.heap[l.n]
	if i := int(p) - 1; i != l.n {
		l.fix(i, last)
	}
}

// touch gives a slot that is in a new stamp.
func (l *lru) touch(slot uint32, stamp uint64) {
	l.fix(int(l.pos[slot])-1, lruEntry{stamp: stamp, slot: slot})
}

// fix puts e at or around place i, whose entry it replaces.
func (l *lru) fix(i int, e lruEntry) {
	if i > 0 && e.stamp < l.heap[(i-1)/4].stamp {
		l.up(i, e)
	} else {
		l.down(i, e)
	}
}

func (l *lru) put(i int, e lruEntry) {
	l.heap[i] = e
	l.pos[e.slot] = uint32(i + 1)
	l.steps++
}

func (l *lru) up(i int, e lruEntry) {
	for i > 0 {
		parent := (i - 1) / 4
		if l.heap[parent].stamp <= e.stamp {
			break
		}
		l.put(i, l.heap[parent])
		i = parent
	}
	l.put(i, e)
}

func (l *lru) down(i int, e lruEntry) {
	for {
		child := 4*i + 1
		if child >= l.n {
			break
		}
		for c := child + 1; c < min(4*i+5, l.n); c++ {
			if l.heap[c].stamp < l.heap[child].stamp {
				child = c
			}
		}
		if l.heap[child].stamp >= e.stamp {
			break
		}
		l.put(i, l.heap[child])
		i = child
	}
	l.put(i, e)
}
