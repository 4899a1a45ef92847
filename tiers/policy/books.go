package policy

import (
	"fmt"

	"lookaside/dax"
)

// note is a policy's state of a slot. It is less than half a cache line, so that a walk along a
// prefix reads few lines.
type note struct {
	key     uint64
	rank    uint64 // its order in its queue: the victim is the smallest one offered
	pos     uint32 // its place in the queue's heap plus one; 0: not offered
	queue   uint8  // which of its group's queues
	uses    uint8  // as the policy counts them
	present bool   // resident
	group   uint8
}

// books has the notes of all slots and the clock that all policies share. Its memory belongs to the
// garbage collector, so policies need no Close and can be replaced by dropping them. What grows
// with the slots holds no pointers except those to a queue's pages, one for 128 slots.
type books struct {
	regions  [1 << (32 - SlotBits)][]note
	grown    []uint32 // regions that have slots
	capacity int      // slots
	resident int      // slots
	of       []int    // resident slots by group
	made     []bool   // by group: it is there; group 0 always is
	groups   int      // that are there
	kinds    int      // queues of one group; constant
	queues   []queue  // of all groups: those of group g are kinds queues from g×kinds on
	clock    uint64   // rises at each entering and use
	spare    []*page  // that no queue uses
	pages    int      // all there are
	read     uint32   // keeps the loads of Read
}

func (b *books) note(ref uint32) *note { return &b.regions[ref>>SlotBits][ref&SlotMask] }

func (b *books) tick() uint64 {
	b.clock++
	return b.clock
}

// newBooks returns the books of a policy with so many queues a group. Group 0 is there already.
func newBooks(kinds int) books {
	return books{kinds: kinds, of: make([]int, 1), made: []bool{true}, groups: 1,
		queues: make([]queue, kinds)}
}

// has reports whether a group is there.
func (b *books) has(group uint8) bool { return int(group) < len(b.made) && b.made[group] }

// makeGroup makes a group that is not there.
func (b *books) makeGroup(group uint8) {
	for len(b.of) <= int(group) {
		b.of, b.made = append(b.of, 0), append(b.made, false)
		b.queues = append(b.queues, make([]queue, b.kinds)...)
	}
	b.made[group] = true
	b.groups++
	b.paginate()
}

// regroup moves a slot to another group, which must be there, and there to the queue of a kind. It
// stays offered if it was.
func (b *books) regroup(ref uint32, n *note, group, kind uint8) {
	offered := n.pos != 0
	b.queue(n.group, kind).hold(b, n)
	b.of[n.group]--
	n.group = group
	b.of[group]++
	if offered {
		b.queue(group, kind).offer(b, ref, n)
	}
}

// queue returns one of a group's queues.
func (b *books) queue(group, kind uint8) *queue { return &b.queues[int(group)*b.kinds+int(kind)] }

// home returns the queue that a slot is in, or will be when it is offered.
func (b *books) home(n *note) *queue { return b.queue(n.group, n.queue) }

// room returns how many slots a group would have if it took all that others leave.
func (b *books) room(group uint8) int { return b.capacity - b.resident + b.of[group] }

func (b *books) grow(region uint32, slots int) {
	if b.regions[region] != nil {
		panic(fmt.Sprintf("policy: region %d grown twice", region))
	}
	b.regions[region] = make([]note, slots)
	dax.AdviseHuge(b.regions[region])
	b.grown = append(b.grown, region)
	b.capacity += slots
	b.paginate()
}

func (b *books) shrink(region uint32) {
	b.capacity -= len(b.regions[region])
	b.regions[region] = nil
	for i, r := range b.grown {
		if r == region {
			b.grown = append(b.grown[:i], b.grown[i+1:]...)
			break
		}
	}
	b.paginate()
}

// paginate makes as many pages as the queues can need together: each queue may have one partly
// filled page and one spare page. The queues of group 0 get room for the places of all pages, the
// others as they grow: many groups would take much memory.
func (b *books) paginate() {
	whole := b.capacity>>pageBits + 1
	want := whole + 2*b.kinds*b.groups
	for b.pages < want {
		b.spare = append(b.spare, new(page))
		b.pages++
	}
	for b.pages > want && len(b.spare) > 0 {
		b.spare[len(b.spare)-1] = nil
		b.spare = b.spare[:len(b.spare)-1]
		b.pages--
	}
	for i := range b.kinds {
		if q := &b.queues[i]; cap(q.pages) < whole+1 {
			q.pages = append(make([]*page, 0, max(whole+1, 2*cap(q.pages))), q.pages...)
		}
	}
	if cap(b.spare) < b.pages {
		b.spare = append(make([]*page, 0, b.pages), b.spare...)
	}
}

// nth returns the note of the i-th slot of all regions.
func (b *books) nth(i int) *note {
	for _, r := range b.grown {
		if n := len(b.regions[r]); i >= n {
			i -= n
		} else {
			return &b.regions[r][i]
		}
	}
	panic("policy: a slot beyond the capacity")
}

// enter records a resident chunk with its key, not offered. Its group must be there.
func (b *books) enter(ref uint32, key uint64, group uint8) *note {
	n := b.note(ref)
	if n.present {
		panic(fmt.Sprintf("policy: slot %#x entered twice", ref))
	}
	*n = note{key: key, present: true, group: group}
	b.resident++
	b.of[group]++
	return n
}

// copy records that the chunk of one slot is resident in another too, not offered.
func (b *books) copy(from, to uint32) *note {
	n := b.note(to)
	if n.present {
		panic(fmt.Sprintf("policy: slot %#x entered twice", to))
	}
	*n = *b.note(from)
	n.pos = 0
	b.resident++
	b.of[n.group]++
	return n
}

// leave forgets a chunk, which is not offered.
func (b *books) leave(n *note) {
	b.of[n.group]--
	*n = note{}
	b.resident--
}

// queue holds the offered slots of one of a group's queues, by rank, in a 4-ary heap. A list would
// not do, because slots are offered and held in any order: a prefix is offered when its last
// continuation leaves, which puts it into the middle of the order. Only unleased ends of prefixes
// are in the heap, so most uses change a note and move nothing. The heap lies in pages, which the
// queues of a policy share: together they never have more entries than there are slots.
type queue struct {
	pages []*page
	n     int // places in use
}

const pageBits = 7

type page [1 << pageBits]place

type place struct {
	rank uint64
	ref  uint32
	_    uint32
}

func (q *queue) at(i int) *place { return &q.pages[i>>pageBits][i&(1<<pageBits-1)] }

// first returns the offered slot with the smallest rank.
func (q *queue) first() (ref uint32, ok bool) {
	if q.n == 0 {
		return 0, false
	}
	return q.pages[0][0].ref, true
}

// offer adds a slot by its note's rank, if it is not in the queue.
func (q *queue) offer(b *books, ref uint32, n *note) {
	if n.pos != 0 {
		return
	}
	if q.n == len(q.pages)<<pageBits {
		last := len(b.spare) - 1
		q.pages = append(q.pages, b.spare[last])
		b.spare = b.spare[:last]
	}
	q.n++
	q.up(b, q.n-1, place{rank: n.rank, ref: ref})
}

// hold removes a slot, if it is in the queue.
func (q *queue) hold(b *books, n *note) {
	if n.pos == 0 {
		return
	}
	i := int(n.pos) - 1
	n.pos = 0
	q.n--
	if i != q.n {
		q.fix(b, i, *q.at(q.n))
	}
	if q.n <= (len(q.pages)-2)<<pageBits {
		// of two empty pages one stays, for the next offer
		last := len(q.pages) - 1
		b.spare = append(b.spare, q.pages[last])
		q.pages = q.pages[:last]
	}
}

// rank changes the rank of a slot, offered or not.
func (q *queue) rank(b *books, ref uint32, n *note, rank uint64) {
	n.rank = rank
	if n.pos != 0 {
		q.fix(b, int(n.pos)-1, place{rank: rank, ref: ref})
	}
}

// fix puts p at or near place i, whose content it replaces.
func (q *queue) fix(b *books, i int, p place) {
	if i > 0 && p.rank < q.at((i-1)/4).rank {
		q.up(b, i, p)
	} else {
		q.down(b, i, p)
	}
}

func (q *queue) put(b *books, i int, p place) {
	*q.at(i) = p
	b.note(p.ref).pos = uint32(i + 1)
}

func (q *queue) up(b *books, i int, p place) {
	for i > 0 {
		above := (i - 1) / 4
		if q.at(above).rank <= p.rank {
			break
		}
		q.put(b, i, *q.at(above))
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
			if q.at(c).rank < q.at(below).rank {
				below = c
			}
		}
		if q.at(below).rank >= p.rank {
			break
		}
		q.put(b, i, *q.at(below))
		i = below
	}
	q.put(b, i, p)
}

// move moves a slot to another queue of its group. It stays offered if it was.
func (b *books) move(ref uint32, n *note, to uint8, rank uint64) {
	if n.pos == 0 {
		n.queue, n.rank = to, rank
		return
	}
	b.home(n).hold(b, n)
	n.queue, n.rank = to, rank
	b.home(n).offer(b, ref, n)
}
