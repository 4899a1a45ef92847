package policy

import (
	"math"
	"math/bits"
)

// adaptive evicts the chunk that is expected to bring the fewest hits for the room it takes. Only
// the ends of prefixes are candidates. The expectation comes from what chunks of the same class
// have done lately. It learns what LHD learns (Beckmann, Chen, Cidon: LHD: Improving Cache Hit Rate
// by Maximizing Hit Density, NSDI 2018), in a different way.
//
// # What it learns
//
// A chunk's class has two parts. The first is how often the chunk was used; evicted chunks are
// remembered, so a chunk that returns keeps its count. The second is whether another chunk ever
// continued it: the last block of a prompt is seldom requested again, the blocks before it are. A
// chunk's age is the time since its last use, on a clock that ticks at each use and each entry. For
// each class and each half octave of age, the policy keeps
//
//   - reused: the uses at that age, of chunks resident or remembered;
//   - held: the time that chunks, resident or remembered, have spent at that age. Each Work
//     estimates it from a few chunks. A Weyl sequence selects them, because neighbours in memory
//     arrived together.
//
// reused divided by held is the hazard: the chance of a use per unit of time at that age. Evicted
// chunks are still counted, so the hazards do not depend on what the policy evicts, and it needs no
// exploration. Both sums decay exponentially. Where a class has seen little of an age, its hazard
// is that of all classes at that age times one factor for the class. Where the class has seen
// little at all, the factor is a guess.
//
// The hazards give the worth of a chunk of a class and age: the most hits per unit of time that
// keeping it, for the best length of time from now on, is expected to bring (its Gittins index).
// Where hazards fall with age, the worth is the present hazard, and the least recently used chunk
// of a class is worth least. Where chunks return after a fixed time, in a loop, the worth rises
// with age, and the newest chunk is worth least. So the candidates are the oldest chunk of each
// class and the newest of all, and the victim is the one worth least. LRU, LFU, and admission at
// second sight are special cases; the hazards decide which of them applies to which class and from
// which age on.
//
// # What it costs
//
// A use changes one word of a note and queues another. A victim takes one comparison for each
// class. Work looks at one note a step and renews one class's worths now and then. Each slot takes
// some 40 bytes, and so does each remembered chunk. There are as many remembered chunks as slots,
// plus 65,536. Groups share all that is learned, and have queues of their own: some 60 KiB for each
// group beside the first.
type adaptive struct {
	books  // a queue for each class
	gone   ghosts
	recent []*stack // by group: offered slots, the newest last

	// used is a ring of the rank that each slot had before its use, by the time of the use. Uses
	// after counted are not in reused yet; Work adds them. Adding each use at once would make a
	// lookup of many chunks wait for each note, because the rank in the note selects the counter.
	used    [1024]uint64
	counted uint64

	reused [classes][ages]float64
	held   [classes][ages]float64
	pooled [ages]float64 // the hazards of all classes together
	worth  [classes][ages + 1]float64

	at      [2]uint32 // where sampling continues: among residents, among ghosts
	sampled uint64    // the clock at the last sample
	begun   uint64    // the clock when the last renewal of worths began
	renewed int       // classes renewed since begun
}

const (
	levels  = 7          // of use counts
	classes = 2 * levels // first the classes of chunks never continued, then the others
	ages    = 64         // half octaves

	// minGhosts is the number of remembered chunks beyond one for each slot. The sums decay with a
	// time constant of memory uses for each slot, and of at least minMemory uses.
	minGhosts = 1 << 16
	memory    = 8
	minMemory = 40000
	// What was seen of a class at an age weighs as much as the estimate for it after ageTrust uses.
	// What was seen of a class weighs as much as its guess after classTrust uses.
	ageTrust   = 20
	classTrust = 100
	// reach is how many half octaves away a use still counts for an age.
	reach = 4
)

// guess is each class's hazard relative to all classes together, before any use is seen.
var guess = [classes]float64{0.5, 1, 1.5, 2, 3, 4, 5, 1, 2, 3, 4, 6, 8, 10}

// starts holds the age at which each half octave begins: 0, 1, 2, 3, 4, 6, 8, 12, …
var starts = func() (s [ages + 1]float64) {
	for i := 1; i <= ages; i++ {
		s[i] = math.Ldexp(1+0.5*float64(i&1), i/2)
	}
	s[1] = 1
	return s
}()

// halfOctave returns the index of the half octave that contains age.
func halfOctave(age uint64) int {
	if age < 2 {
		return int(age)
	}
	o := bits.Len64(age) - 1
	return min(2*o+int(age>>(o-1)&1), ages-1)
}

// A chunk's rank holds the time of its last use, shifted by rankShift. The bits below hold goneOn,
// which is set once the chunk was continued, and its uses, up to maxUses. It is one word, so a use
// reads and writes one word of a note.
const (
	rankShift = 8
	goneOn    = 1 << 7
	maxUses   = goneOn - 1
)

// classOf returns a chunk's class by the last byte of its rank. The levels are 1, 2, 3–4, 5–8,
// 9–16, 17–64 and more uses. oneMore returns that byte after one more use. Both are tables, because
// branches would make a lookup wait for each note.
var classOf, oneMore = func() (class, next [256]uint8) {
	for b := range class {
		uses := b & maxUses
		switch {
		case uses <= 16:
			class[b] = uint8(bits.Len(uint(max(uses, 1) - 1)))
		case uses <= 64:
			class[b] = 5
		default:
			class[b] = 6
		}
		if b&goneOn != 0 {
			class[b] += levels
		}
		next[b] = uint8(b&goneOn | min(uses+1, maxUses))
	}
	return class, next
}()

func newAdaptive(o Options) Policy {
	a := &adaptive{books: newBooks(classes), gone: ghosts{seed: o.Seed},
		recent: []*stack{new(stack)}}
	a.at[0], a.at[1] = uint32(mix(o.Seed)), uint32(mix(o.Seed)>>32)
	a.renew(0)
	for a.renewed < classes {
		a.assess()
	}
	return a
}

func (a *adaptive) Name() string { return "adaptive" }

func (a *adaptive) Grow(region uint32, slots int) {
	a.grow(region, slots)
	a.gone.resize(a.capacity + minGhosts)
}

func (a *adaptive) Shrink(region uint32) {
	a.shrink(region)
	a.gone.resize(a.capacity + minGhosts)
}

func (a *adaptive) Enter(ref uint32, key uint64, parent uint32, group uint8) {
	a.need(group)
	n := a.enter(ref, key, group)
	if i := a.gone.find(key); i != 0 {
		n.rank = a.again(a.gone.nodes[i].rank)
		a.gone.remove(i)
	} else {
		n.rank = a.again(0)
	}
	if parent != 0 {
		a.goesOn(parent)
	}
}

func (a *adaptive) need(group uint8) {
	if !a.has(group) {
		a.makeGroup(group)
		a.recent = append(a.recent, make([]*stack, len(a.of)-len(a.recent))...)
		a.recent[group] = new(stack)
	}
}

// count adds the queued uses to reused. Chunks of one request often share a counter, so it adds up
// runs of equal counters first.
//
//go:noinline
func (a *adaptive) count() {
	var none float64
	counter, run := &none, 0.0
	for ; a.counted < a.clock; a.counted++ {
		t := a.counted + 1
		rank := a.used[t%uint64(len(a.used))]
		if rank == 0 {
			continue
		}
		if c := &a.reused[classOf[uint8(rank)]][halfOctave(t-rank>>rankShift)]; c != counter {
			*counter += run
			counter, run = c, 0
		}
		run++
	}
	*counter += run
}

// goesOn records that a slot has a continuation.
func (a *adaptive) goesOn(ref uint32) {
	if n := a.note(ref); n.rank&goneOn == 0 {
		a.shift(ref, n, n.rank|goneOn)
	}
}

// queueOf returns the queue of a slot's class. note.queue is not used.
func (a *adaptive) queueOf(n *note) *queue { return a.queue(n.group, classOf[uint8(n.rank)]) }

// shift changes a slot's rank, and moves the slot if that changes its class.
func (a *adaptive) shift(ref uint32, n *note, rank uint64) {
	if n.pos == 0 {
		n.rank = rank
		return
	}
	from, to := a.queueOf(n), a.queue(n.group, classOf[uint8(rank)])
	if from == to {
		from.rank(&a.books, ref, n, rank)
		return
	}
	from.hold(&a.books, n)
	n.rank = rank
	to.offer(&a.books, ref, n)
}

func (a *adaptive) Use(ref uint32) {
	n := a.note(ref)
	if rank := a.again(n.rank); n.pos == 0 {
		n.rank = rank
	} else {
		a.shift(ref, n, rank)
	}
}

// again counts a use and returns the rank after it. rank is the one before, 0 for an unknown chunk.
func (a *adaptive) again(rank uint64) uint64 {
	if a.clock-a.counted == uint64(len(a.used)) {
		a.count()
	}
	a.clock++
	a.used[a.clock%uint64(len(a.used))] = rank
	return a.clock<<rankShift | uint64(oneMore[uint8(rank)])
}

func (a *adaptive) Offer(ref uint32) {
	if n := a.note(ref); n.pos == 0 {
		a.queueOf(n).offer(&a.books, ref, n)
		a.recent[n.group].push(ref)
	}
}

func (a *adaptive) Hold(ref uint32) {
	n := a.note(ref)
	a.queueOf(n).hold(&a.books, n)
}

func (a *adaptive) Leave(ref uint32, evicted bool) {
	n := a.note(ref)
	a.queueOf(n).hold(&a.books, n)
	if evicted && n.key != 0 {
		if a.gone.full() {
			a.gone.drop(0)
		}
		a.gone.add(0, n.key).rank = n.rank
	}
	a.leave(n)
}

func (a *adaptive) Regroup(ref uint32, group uint8) {
	a.need(group)
	n := a.note(ref)
	a.regroup(ref, n, group, classOf[uint8(n.rank)])
	if n.pos != 0 {
		a.recent[group].push(ref)
	}
}

func (a *adaptive) Copy(from, to uint32) { a.copy(from, to) }

// Inherit gives parent the later of both last uses; the prefix's age counts from it.
func (a *adaptive) Inherit(parent, child uint32) {
	p, c := a.note(parent), a.note(child)
	last := max(p.rank, c.rank) >> rankShift
	a.shift(parent, p, last<<rankShift|goneOn|p.rank&maxUses)
}

func (a *adaptive) Victim(group uint8) (ref uint32, ok bool) {
	if !a.has(group) {
		return 0, false
	}
	var least float64
	queues, recent := a.queues[int(group)*classes:][:classes], a.recent[group]
	for i := range queues {
		if queues[i].n == 0 {
			continue
		}
		first := queues[i].at(0)
		if w := a.value(first.rank); !ok || w < least {
			ref, least, ok = first.ref, w, true
		}
	}
	for recent.n > 0 {
		r := recent.top()
		if notes := a.regions[r>>SlotBits]; int(r&SlotMask) < len(notes) &&
			notes[r&SlotMask].pos != 0 && notes[r&SlotMask].group == group {
			if n := &notes[r&SlotMask]; a.value(n.rank) < least {
				ref = r
			}
			break
		}
		recent.pop()
	}
	return ref, ok
}

// value returns the worth of a chunk by its rank, interpolated between half octaves.
func (a *adaptive) value(rank uint64) float64 {
	worth := &a.worth[classOf[uint8(rank)]]
	age := a.clock - rank>>rankShift
	i := halfOctave(age)
	low, high := starts[i], starts[i+1]
	part := min((float64(age)-low)/(high-low), 1)
	return worth[i] + part*(worth[i+1]-worth[i])
}

// Work samples about n chunks and renews at most one class's worths. One step for each chunk that
// is looked up or stored is enough.
func (a *adaptive) Work(n int) {
	a.count()
	past := float64(a.clock - a.sampled)
	if past == 0 || n <= 0 {
		return
	}
	a.sampled = a.clock
	n = n/2 + 1
	for i, weight := 0, past*float64(a.capacity)/float64(n); i < n && a.capacity > 0; i++ {
		if x := a.nth(weyl(&a.at[0], a.capacity)); x.present {
			a.held[classOf[uint8(x.rank)]][halfOctave(a.clock-x.rank>>rankShift)] += weight
		}
	}
	known := int(a.gone.fresh) - 1
	for i, weight := 0, past*float64(known)/float64(n); i < n && known > 0; i++ {
		if x := &a.gone.nodes[1+weyl(&a.at[1], known)]; x.key != 0 {
			a.held[classOf[uint8(x.rank)]][halfOctave(a.clock-x.rank>>rankShift)] += weight
		}
	}
	if a.renewed < classes {
		a.assess()
	} else if since := a.clock - a.begun; since >= uint64(max(a.capacity/4, 500)) {
		a.renew(since)
	}
}

// weyl returns the next number of a sequence in which any run of numbers is spread evenly over 0 …
// n-1.
func weyl(at *uint32, n int) int {
	*at += 0x9E3779B9
	return int(uint64(*at) * uint64(n) >> 32)
}

// renew begins a renewal of the worths. It decays the sums by the time since the last renewal, and
// computes the hazards of all classes together.
func (a *adaptive) renew(since uint64) {
	a.begun, a.renewed = a.clock, 0
	keep := math.Exp(-float64(since) / float64(max(memory*a.capacity, minMemory)))
	for i := range a.pooled {
		var reused, held float64
		for c := range classes {
			a.reused[c][i] *= keep
			a.held[c][i] *= keep
			reused += a.reused[c][i]
			held += a.held[c][i]
		}
		// In most traces the hazard falls about as the inverse of the age.
		a.pooled[i] = (reused + ageTrust) / (held + ageTrust*20*(starts[i]+1))
	}
}

// assess renews the worths of the next class.
func (a *adaptive) assess() {
	c := a.renewed
	a.renewed++
	var reused, expected float64
	for i := range a.pooled {
		reused += a.reused[c][i]
		expected += a.held[c][i] * a.pooled[i]
	}
	factor := (reused + classTrust*guess[c]) / (expected + classTrust)
	var chance [ages]float64 // of a use within each half octave
	for i := range chance {
		// Neighbouring ages count as well: chunks come in requests, so the uses at one age are a
		// few large lumps.
		reused, expected = 0, 0
		for j := max(i-reach, 0); j <= min(i+reach, ages-1); j++ {
			near := 1 - math.Abs(float64(i-j))/(reach+1)
			reused += near * a.reused[c][j]
			expected += near * a.held[c][j] * a.pooled[j] * factor
		}
		hazard := a.pooled[i] * factor * (reused + ageTrust) / (expected + ageTrust)
		chance[i] = -math.Expm1(-hazard * (starts[i+1] - starts[i]))
	}
	for from := range chance {
		left, hits, time := 1.0, 0.0, 0.0
		bestHits, bestTime := 0.0, 1.0
		for i := from; i < ages && left > 1e-3; i++ {
			hits += left * chance[i]
			time += left * (starts[i+1] - starts[i]) * (1 - chance[i]/2)
			left *= 1 - chance[i]
			if hits*bestTime > bestHits*time {
				bestHits, bestTime = hits, time
			}
		}
		a.worth[c][from] = bestHits / bestTime
	}
	a.worth[c][ages] = a.worth[c][ages-1]
}

// stack holds the last refs pushed, the newest on top. A push on a full stack drops the oldest.
type stack struct {
	refs [256]uint32
	end  uint8 // where the next push goes
	n    int
}

func (s *stack) push(ref uint32) {
	s.refs[s.end] = ref
	s.end++
	s.n = min(s.n+1, len(s.refs))
}

func (s *stack) top() uint32 { return s.refs[s.end-1] }

func (s *stack) pop() {
	s.end--
	s.n--
}
