// Package worth learns which chunks are worth writing to a tier when they leave the arena.
//
// Most chunks that leave the arena are never asked for again, so a tier that takes all of them
// spends most of its writes, and of its room, on nothing. Admission by what a chunk is expected to
// bring is known from flash caches: CacheLib rejects what it has not seen before (Berg and others,
// OSDI 2020), LARC admits at second sight (Huang and others, MSST 2013), Flashield learns from what
// a chunk did in memory (Eisenman and others, NSDI 2019), LRB learns how far away the next request
// is (Song and others, NSDI 2020). Prefixes need a rule of their own: a chunk is of use only with
// all chunks before it, and a chunk that was written for nothing is seldom alone.
//
// # What it learns
//
// A chunk is judged when it is about to leave the arena. Its cell has four parts: how often it was
// used, in which turn of a conversation it came, how many chunks behind it left before it, and how
// far from the beginning of the prompt it is. For each cell the Learner counts the chunks judged
// and those of them that came back to the arena. A cell that has seen little counts as the one
// without the distance, and that as all chunks together. How long the chunk was not used is one
// factor more, learned in the same way. The result is the chance that the chunk comes back.
//
// A chunk is asked for whenever its continuation is. So the chance of a chunk is never below that
// of a continuation that left before it: otherwise what is written of a prefix would have holes.
//
// Chunks that the tier has already are judged as well. So what is learned does not depend on what
// is written.
//
// # What is written
//
// Chunks are sorted into marks by their chance. For each mark the Learner knows how many chunks had
// it, and after how many judgements they came back. From the room of the tier it computes for each
// mark what the tier would hit and what would be written if only chunks from that mark on were
// written: the fewer are, the longer each stays. It takes the mark with the most hits less the
// price of its writes. A write costs 0.15 of the hits that a write brings on average where
// hits are most.
//
// Everything is bounded and allocated by New: 4 MiB. All calls take constant time, but for one of
// 512, which takes some microseconds. The same calls and seed give the same answers. Nothing is
// safe for concurrent use; the owner calls it under its own lock.
package worth

import (
	"math"
	"math/bits"
)

// Traits is what a chunk is judged by.
type Traits struct {
	// Uses counts the requests that used the chunk after the one that stored it. It continues the
	// count that Wanted returned.
	Uses uint8
	// Turn counts the chunks before it in its prefix that had been used when their continuation
	// was stored: about the turn of a conversation.
	Turn uint8
	// Height is the length of the longest run of its continuations that were judged before it.
	Height uint16
	Depth  uint32 // the chunk's number in its prefix
	Age    uint64 // requests since its last use
	// Floor is the highest mark of its continuations that were judged before it.
	Floor uint8
}

const (
	// The parts of a cell. Counts above the last level count as it. Heights and depths are in
	// octaves.
	sights  = 4
	turns   = 4
	heights = 8
	depths  = 8
	coarse  = sights * turns * heights
	fine    = coarse * depths
	octaves = 20 // of ages

	marks  = 48 // a quarter of an octave of the chance each, the last one ends at 1
	spans  = 44 // half octaves of judgements
	memory = 18 // bits: judgements remembered

	// What was seen of a cell weighs as much as the estimate for it after trust chunks.
	trust = 20
	// decay is how many judgements later a count weighs 1/e.
	decay = 100000
	// price is what a write costs, in hits that a write brings on average.
	price = 0.15
	// enough is how many chunks must have come back before anything is declined.
	enough = 200
	every  = 512 // judgements between two renewals
	guess  = 0.2 // the chance of any chunk before anything was seen
)

// sum counts chunks, and those of them that came back.
type sum struct{ n, back float64 }

// rate returns the part that came back, given an estimate of it.
func (s *sum) rate(estimate float64) float64 { return (s.back + trust*estimate) / (s.n + trust) }

// judged is what is remembered of a judgement.
type judged struct {
	print  uint32 // of the key; 0: none is remembered
	at     uint32 // the clock then
	cell   uint16
	octave uint8
	mark   uint8
	uses   uint8
}

// Learner learns from what leaves the arena and comes back. Its zero value is not ready for use.
type Learner struct {
	table [1 << memory]judged // by key; a later one takes the place of an earlier one
	seed  uint64
	slots float64
	clock uint32 // judgements

	all    sum
	coarse [coarse]sum
	fine   [fine]sum
	ages   [octaves]struct{ expected, back float64 }
	marks  [marks]struct {
		n     float64
		after [spans]float64 // came back, by the judgements between
	}
	weight  float64 // of a count that is added now: it rises, so that earlier ones weigh less
	least   uint8   // the mark from which on chunks are written
	horizon uint32  // judgements after which a chunk that was written is expected to be gone
}

// New returns a Learner that writes everything until it has learned. Keys are hard to guess by
// their seed.
func New(seed uint64) *Learner {
	return &Learner{seed: seed, weight: 1, horizon: math.MaxUint32}
}

// SetRoom tells how many chunks the tier has room for; 0 is unknown, and counts as unlimited.
func (l *Learner) SetRoom(slots int) { l.slots = float64(slots) }

func (l *Learner) place(key uint64) (*judged, uint32) {
	h := (key ^ l.seed) * 0x9E3779B97F4A7C15
	return &l.table[h>>(64-memory)], uint32(h) | 1
}

// cells returns the coarse and the fine cell of a chunk, and the octave of its age.
func (t *Traits) cells() (c, f, octave int) {
	level := func(n uint64, most int) int { return min(bits.Len64(n), most-1) }
	c = int(min(t.Uses, sights-1))*turns + int(min(t.Turn, turns-1))
	c = c*heights + level(uint64(t.Height), heights)
	return c, c*depths + level(uint64(t.Depth), depths), level(t.Age, octaves)
}

// Judge reports whether a chunk that is about to leave the arena is worth writing. mark is to be
// the Floor of what it continues, unless that has a higher one.
func (l *Learner) Judge(key uint64, t *Traits) (write bool, mark uint8) {
	c, f, octave := t.cells()
	age := &l.ages[octave]
	chance := l.fine[f].rate(l.coarse[c].rate(l.all.rate(guess)))
	mark = max(markOf(chance*(age.back+trust*guess)/(age.expected+trust*guess)), t.Floor)

	l.clock++
	l.weight *= 1 + 1.0/decay
	l.all.n += l.weight
	l.coarse[c].n += l.weight
	l.fine[f].n += l.weight
	age.expected += chance * l.weight
	l.marks[mark].n += l.weight
	x, print := l.place(key)
	*x = judged{print: print, at: l.clock, cell: uint16(f), octave: uint8(octave), mark: mark,
		uses: t.Uses}
	if l.clock%every == 0 {
		l.renew()
	}
	return mark >= l.least, mark
}

// Wanted records that a chunk came to the arena, from a client or from a tier. It returns the
// chunk's uses if it left the arena lately, this one counted; else 0.
func (l *Learner) Wanted(key uint64) (uses uint8) {
	x, print := l.place(key)
	if x.print != print {
		return 0
	}
	after := l.clock - x.at
	l.marks[x.mark].after[span(after)] += l.weight
	if after <= l.horizon {
		l.all.back += l.weight
		l.coarse[x.cell/depths].back += l.weight
		l.fine[x.cell].back += l.weight
		l.ages[x.octave].back += l.weight
	}
	uses = min(x.uses, maxUses-1) + 1
	*x = judged{}
	return uses
}

const maxUses = 100

// markOf returns the mark of a chance.
func markOf(chance float64) uint8 {
	return uint8(min(max(marks-1+int(4*math.Log2(max(chance, 1e-9))), 0), marks-1))
}

// starts holds the judgements at which each span begins: 0, 1, 2, 3, 4, 6, 8, 12, …
var starts = func() (s [spans + 1]float64) {
	for i := 1; i <= spans; i++ {
		s[i] = math.Ldexp(1+0.5*float64(i&1), i/2)
	}
	s[1] = 1
	return s
}()

// span returns the index of the span that contains a number of judgements.
func span(n uint32) int {
	if n < 2 {
		return int(n)
	}
	o := bits.Len32(n) - 1
	return min(2*o+int(n>>(o-1)&1), spans-1)
}

// renew chooses from which mark on chunks are written, and gives what is added from now on the
// weight 1 again.
func (l *Learner) renew() {
	l.rescale()
	var back, judged float64
	for i := range l.marks {
		judged += l.marks[i].n
		for _, n := range l.marks[i].after {
			back += n
		}
	}
	l.least, l.horizon = 0, math.MaxUint32
	if back < enough {
		return
	}
	// hits and writes of each mark if chunks from it on are written, and for how long they stay
	var hits, writes, life [marks]float64
	var after [spans]float64
	written, best := 0.0, marks-1
	for i := marks - 1; i >= 0; i-- {
		m := &l.marks[i]
		written += m.n
		life[i] = math.Inf(1)
		if l.slots > 0 {
			life[i] = l.slots * judged / max(written, 1)
		}
		for j := range after {
			after[j] += m.after[j]
			part := (life[i] - starts[j]) / (starts[j+1] - starts[j])
			hits[i] += min(max(part, 0), 1) * after[j]
		}
		// What is hit is on the tier already when it leaves the arena again.
		writes[i] = max(written-hits[i], 1)
		if hits[i] > hits[best] {
			best = i
		}
	}
	cost := price * hits[best] / writes[best]
	gain := 0.0
	for i := marks - 1; i >= 0; i-- {
		if g := hits[i] - cost*writes[i]; g > gain {
			gain, l.least = g, uint8(i)
		}
	}
	l.horizon = uint32(min(2*life[l.least], math.MaxUint32))
}

// rescale divides all counts by the present weight.
func (l *Learner) rescale() {
	by := 1 / l.weight
	l.weight = 1
	scale := func(s *sum) { s.n, s.back = s.n*by, s.back*by }
	scale(&l.all)
	for i := range l.coarse {
		scale(&l.coarse[i])
	}
	for i := range l.fine {
		scale(&l.fine[i])
	}
	for i := range l.ages {
		l.ages[i].expected *= by
		l.ages[i].back *= by
	}
	for i := range l.marks {
		l.marks[i].n *= by
		for j := range l.marks[i].after {
			l.marks[i].after[j] *= by
		}
	}
}
