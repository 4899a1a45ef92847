package policy

import "math/bits"

// wtinylfu is W-TinyLFU (Einziger, Friedman, Manes: TinyLFU: A Highly Efficient Cache Admission
// Policy, ACM TOS 2017). A new chunk passes through a window of a hundredth of the cache. At the
// window's end it replaces the victim of the main part only if a sketch of the recent past has seen
// it more often than the victim. The main part is segmented: four fifths are protected, for chunks
// used again there.
//
// Protected chunks beyond that share step down when a victim is wanted, not at each use. This keeps
// a use cheap.
type wtinylfu struct {
	books
	sizes  [][3]int // by group: resident, offered or not
	sketch sketch
}

const (
	tlWindow = iota
	tlProbation
	tlProtected
)

func newWTinyLFU(o Options) Policy {
	return &wtinylfu{books: newBooks(3), sizes: make([][3]int, 1), sketch: sketch{seed: o.Seed}}
}

func (w *wtinylfu) Name() string { return "wtinylfu" }

func (w *wtinylfu) Grow(region uint32, slots int) {
	w.grow(region, slots)
	w.sketch.resize(w.capacity)
}

func (w *wtinylfu) Shrink(region uint32) {
	w.shrink(region)
	w.sketch.resize(w.capacity)
}

func (w *wtinylfu) Enter(ref uint32, key uint64, _ uint32, group uint8) {
	w.need(group)
	n, sizes := w.enter(ref, key, group), &w.sizes[group]
	n.rank, n.queue = w.tick(), tlWindow
	sizes[tlWindow]++
	w.sketch.add(key)
	// While the main part has room, the window's surplus moves there without a contest. Moving two
	// at a time catches up with chunks that could not move while they were held.
	room, window := w.room(group), w.window(group)
	for i := 0; i < 2 && sizes[tlWindow] > window &&
		sizes[tlProbation]+sizes[tlProtected] < room-window && w.step(group, tlWindow); i++ {
	}
}

func (w *wtinylfu) need(group uint8) {
	if !w.has(group) {
		w.makeGroup(group)
		w.sizes = append(w.sizes, make([][3]int, len(w.of)-len(w.sizes))...)
	}
}

func (w *wtinylfu) Use(ref uint32) {
	n := w.note(ref)
	w.sketch.add(n.key)
	if n.queue == tlProbation {
		w.shift(ref, n, tlProtected, w.tick())
		return
	}
	w.home(n).rank(&w.books, ref, n, w.tick())
}

// shift moves a slot to another queue of its group.
func (w *wtinylfu) shift(ref uint32, n *note, to uint8, rank uint64) {
	w.sizes[n.group][n.queue]--
	w.sizes[n.group][to]++
	w.move(ref, n, to, rank)
}

func (w *wtinylfu) Offer(ref uint32) {
	n := w.note(ref)
	w.home(n).offer(&w.books, ref, n)
}

func (w *wtinylfu) Hold(ref uint32) {
	n := w.note(ref)
	w.home(n).hold(&w.books, n)
}

func (w *wtinylfu) Leave(ref uint32, _ bool) {
	n := w.note(ref)
	w.home(n).hold(&w.books, n)
	w.sizes[n.group][n.queue]--
	w.leave(n)
}

func (w *wtinylfu) Regroup(ref uint32, group uint8) {
	w.need(group)
	n := w.note(ref)
	w.sizes[n.group][n.queue]--
	w.sizes[group][n.queue]++
	w.regroup(ref, n, group, n.queue)
}

func (w *wtinylfu) Copy(from, to uint32) {
	n := w.copy(from, to)
	w.sizes[n.group][n.queue]++
}

func (w *wtinylfu) Inherit(parent, child uint32) {
	p, c := w.note(parent), w.note(child)
	if c.rank > p.rank {
		w.home(p).rank(&w.books, parent, p, c.rank)
	}
}

func (w *wtinylfu) Victim(group uint8) (ref uint32, ok bool) {
	if !w.has(group) {
		return 0, false
	}
	sizes, room, window := &w.sizes[group], w.room(group), w.window(group)
	for sizes[tlProtected] > (room-window)*4/5 && w.step(group, tlProtected) {
	}
	victim, has := w.queue(group, tlProbation).first()
	if !has {
		victim, has = w.queue(group, tlProtected).first()
	}
	if sizes[tlWindow] < window && has {
		return victim, true
	}
	candidate, ok := w.queue(group, tlWindow).first()
	if !ok || !has {
		return max(candidate, victim), ok || has
	}
	n := w.note(candidate)
	if w.sketch.estimate(n.key) <= w.sketch.estimate(w.note(victim).key) {
		return candidate, true
	}
	w.shift(candidate, n, tlProbation, n.rank)
	return victim, true
}

// window returns the number of slots of a group's window.
func (w *wtinylfu) window(group uint8) int { return max(w.room(group)/100, 1) }

// step moves the first slot of a group's queue to probation. It returns false if the queue is
// empty.
func (w *wtinylfu) step(group, from uint8) bool {
	ref, ok := w.queue(group, from).first()
	if ok {
		n := w.note(ref)
		w.shift(ref, n, tlProbation, n.rank)
	}
	return ok
}

func (w *wtinylfu) Work(int) {}

// sketch counts how often keys were seen in the recent past, in counters of 4 bits. It is a
// count-min sketch of four rows, with all of a key's counters in one cache line. All counters are
// halved after as many counted keys as ten times the capacity.
type sketch struct {
	words  []uint64 // in blocks of 8
	mask   uint64   // selects a block
	seed   uint64
	added  int
	period int
}

// resize sizes the sketch for a capacity. It forgets all counts if that changes its size.
func (s *sketch) resize(capacity int) {
	blocks := 1 << bits.Len(uint(max(capacity, 8)/8-1))
	s.period = 10 * max(capacity, 1)
	if len(s.words) != 8*blocks {
		*s = sketch{words: make([]uint64, 8*blocks), mask: uint64(blocks - 1), seed: s.seed,
			period: s.period}
	}
}

func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xBF58476D1CE4E5B9
	x = (x ^ x>>27) * 0x94D049BB133111EB
	return x ^ x>>31
}

// add counts a key.
func (s *sketch) add(key uint64) {
	h := mix(key ^ s.seed)
	block := s.words[h>>32&s.mask*8:][:8]
	grew := false
	for row := range uint64(4) {
		b := h >> (8 * row) // 1 bit selects the word, 4 the counter
		w := &block[2*row+b&1]
		shift := b >> 1 & 15 * 4
		if *w>>shift&15 < 15 {
			*w += 1 << shift
			grew = true
		}
	}
	if !grew {
		return
	}
	if s.added++; s.added >= s.period {
		for i := range s.words {
			s.words[i] = s.words[i] >> 1 & 0x7777777777777777
		}
		s.added /= 2
	}
}

// estimate returns a key's count, or more if other keys share all of its counters. 15 is the most.
func (s *sketch) estimate(key uint64) (n uint64) {
	h := mix(key ^ s.seed)
	block := s.words[h>>32&s.mask*8:][:8]
	n = 15
	for row := range uint64(4) {
		b := h >> (8 * row)
		n = min(n, block[2*row+b&1]>>(b>>1&15*4)&15)
	}
	return n
}
