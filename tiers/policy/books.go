package policy

import "fmt"

// note is what a policy keeps of a slot: under half a cache line, so that a lookup's walk along a prefix reads few of them.
type note struct {
	key     uint64
	rank    uint64 // where the slot stands in its queue: the victim is the smallest that is offered
	pos     uint32 // its place in the queue's heap plus one; 0: it is not offered
	queue   uint8  // which of the policy's queues
	uses    uint8  // as the policy counts them
	present bool   // resident
	_       uint8
}

// books are the notes of all slots and the clock that all policies share. The memory is plain slices without pointers, which the garbage
// collector does not scan: policies need no Close, and are replaced by dropping them.
type books struct {
	regions  [1 << (32 - SlotBits)][]note
	capacity int    // slots
	resident int    // slots
	clock    uint64 // rises at each entering and use
}

func (b *books) note(ref uint32) *note { return &b.regions[ref>>SlotBits][ref&SlotMask] }

func (b *books) tick() uint64 {
	b.clock++
	return b.clock
}

func (b *books) grow(region uint32, slots int) {
	if b.regions[region] != nil {
		panic(fmt.Sprintf("policy: region %d grown twice", region))
	}
	b.regions[region] = make([]note, slots)
	b.capacity += slots
}

func (b *books) shrink(region uint32) {
	b.capacity -= len(b.regions[region])
	b.regions[region] = nil
}

// enter notes that a chunk is resident, under its key, in no queue's heap.
func (b *books) enter(ref uint32, key uint64) *note {
	n := b.note(ref)
	if n.present {
		panic(fmt.Sprintf("policy: slot %#x entered twice", ref))
	}
	*n = note{key: key, present: true}
	b.resident++
	return n
}

// leave forgets a chunk, which no queue's heap holds any more.
func (b *books) leave(n *note) {
	*n = note{}
	b.resident--
}

// queue is the offered slots of one of a policy's queues by their rank, in a 4-ary heap. It is a heap rather than a list because slots are
// offered and held in any order: a prefix is offered only when its last continuation leaves, which puts it into the middle of the
// order. Only ends of prefixes that nobody leases are in it, so a use mostly changes a note and moves nothing.
type queue struct {
	heap []place
	n    int // places in use
}

type place struct {
	rank uint64
	ref  uint32
	_    uint32
}

// resize makes room for as many slots as there are.
func (q *queue) resize(b *books) {
	heap := make([]place, b.capacity)
	copy(heap, q.heap[:q.n])
	q.heap = heap
}

// first is the offered slot of the smallest rank.
func (q *queue) first() (ref uint32, ok bool) {
	if q.n == 0 {
		return 0, false
	}
	return q.heap[0].ref, true
}

// offer puts a slot in by its note's rank, if it is not in.
func (q *queue) offer(b *books, ref uint32, n *note) {
	if n.pos == 0 {
		q.n++
		q.up(b, q.n-1, place{rank: n.rank, ref: ref})
	}
}

// hold takes a slot out if it is in.
func (q *queue) hold(b *books, n *note) {
	if n.pos == 0 {
		return
	}
	i := int(n.pos) - 1
	n.pos = 0
	q.n--
	if i != q.n {
		q.fix(b, i, q.heap[q.n])
	}
}

// rank gives a slot another rank, whether it is offered or not.
func (q *queue) rank(b *books, ref uint32, n *note, rank uint64) {
	n.rank = rank
	if n.pos != 0 {
		q.fix(b, int(n.pos)-1, place{rank: rank, ref: ref})
	}
}

// fix puts p at or around place i, whose content it replaces.
func (q *queue) fix(b *books, i int, p place) {
	if i > 0 && p.rank < q.heap[(i-1)/4].rank {
		q.up(b, i, p)
	} else {
		q.down(b, i, p)
	}
}

func (q *queue) put(b *books, i int, p place) {
	q.heap[i] = p
	b.note(p.ref).pos = uint32(i + 1)
}

func (q *queue) up(b *books, i int, p place) {
	for i > 0 {
		above := (i - 1) / 4
		if q.heap[above].rank <= p.rank {
			break
		}
		q.put(b, i, q.heap[above])
		i = above
	}
	q.put(b, i, p)
}

func (q *queue) down(b *books, i int, p place) {
	for {
		below := 4*i + 1
		if below >= q.n {
			break
		}
		for c := below + 1; c < min(4*i+5, q.n); c++ {
			if q.heap[c].rank < q.heap[below].rank {
				below = c
			}
		}
		if q.heap[below].rank >= p.rank {
			break
		}
		q.put(b, i, q.heap[below])
		i = below
	}
	q.put(b, i, p)
}
