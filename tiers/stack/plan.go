package stack

import (
	"slices"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/engine"
)

// survey is what is known of the rest of a lookup: what the arena and tiers report that they hold,
// and what peers hint. It belongs to the owner of the request's phase.
type survey struct {
	// rest is the run behind what the arena holds. It begins with the chunk in which the hit ends.
	rest tiers.Run
	hit  int // pages that the arena holds, from the lookup's first on
	part int // of these, the pages in rest's first chunk
	// peers reports whether peers may be asked. It is false after they lent less than they hinted.
	peers bool
	hints []uint16 // by chunk: pages that peers hint at; empty: peers are not used
	// held is, by tier and chunk, how many pages the tier reports that it holds. known has a bit
	// for each tier that has reported.
	held  [engine.MaxTiers][]uint16
	known uint8
}

// aim sets rest to what lies behind a hit of the arena. It returns false if there is nothing behind
// it, or if no tier can look it up: tiers find a chunk only by all its pages.
func (v *survey) aim(q *question, hit int) bool {
	g := &q.all.Space.Geometry
	start := (q.first + hit) / g.PagesPerChunk * g.PagesPerChunk
	if hit >= q.asked || start < q.first {
		return false
	}
	v.hit, v.part = hit, q.first+hit-start
	at := (start - q.first) * g.DigestBytes
	v.rest = tiers.Run{Space: q.all.Space, First: start, Hashes: q.all.Hashes[at:]}
	switch {
	case at > 0:
		v.rest.Prev = q.all.Hashes[at-g.DigestBytes : at]
	case start > 0:
		v.rest.Prev = q.all.Prev
	}
	return true
}

// knows reports whether a tier has reported what it holds.
func (v *survey) knows(tier int) bool { return v.known&(1<<tier) != 0 }

// best returns the most pages of the i-th chunk that a peer or a tier holds, at most want, and the
// first source that has them.
func (v *survey) best(i, want int) (pages, source int) {
	source = fromArena
	if i < len(v.hints) && v.hints[i] > 0 {
		pages, source = min(int(v.hints[i]), want), fromPeers
	}
	for t := range v.held {
		if v.knows(t) {
			if have := min(int(v.held[t][i]), want); have > pages {
				pages, source = have, t
			}
		}
	}
	return pages, source
}

// missing returns the first chunk of the rest that neither peers nor a tier hold whole, or the
// number of chunks.
func (v *survey) missing() int {
	n, chunks := v.rest.Pages(), v.rest.Chunks()
	for i := range chunks {
		want := pagesOf(n, v.rest.Space.Geometry.PagesPerChunk, i)
		if have, _ := v.best(i, want); have < want {
			return i
		}
	}
	return chunks
}

// Sources of a chunk that are no tier.
const (
	fromArena = -1
	fromPeers = -2
)

// plan is what a lookup waits for, from where, and until when. It is a function of the question,
// the survey, the terms and what a prober returns: it has no other input and changes nothing else.
// It is made in the phases asking and seeking, and does not change after them.
type plan struct {
	// By chunk of the survey's rest: the pages that can be had, from which tier (or fromArena,
	// fromPeers), and whether that is from peers.
	have   []uint16
	source []int8
	borrow []bool

	chunks int // how many of them are worth waiting for
	pages  int // that the lookup holds when all of these have come
	need   int // of the chunks, how many need room in the arena: those not from peers
	cut    bool
	wants  [engine.MaxTiers]int64 // bytes from each tier

	eta      time.Duration // until the last of them is here
	patience time.Duration // that the plan is worth waiting for room
}

// terms are what a plan weighs.
type terms struct {
	recompute time.Duration // that computing a page takes; 0: all that can be had is worth it
	pace      [engine.MaxTiers]pace
}

// pace is how fast a tier loads.
type pace struct {
	latency float64 // s
	rate    float64 // bytes/s; 0: not known
	ahead   int64   // bytes that others wait for
}

// arrival returns when the last of so many bytes arrives, after those ahead. 0 while nothing is
// known.
func (p *pace) arrival(bytes int64) time.Duration {
	s := p.latency
	if p.rate > 0 {
		s += float64(p.ahead+bytes) / p.rate
	}
	return time.Duration(s * float64(time.Second))
}

// prober looks up what a plan needs only where the survey leaves a gap. It does not wait.
type prober interface {
	// arenaHolds returns how many pages the arena holds of each chunk of a run.
	arenaHolds(id engine.SpaceID, run tiers.Run) []uint16
	// peersHold returns how many pages of one chunk peers hint at.
	peersHold(chunk tiers.Run) int
}

// make makes the plan, in the memory of an earlier one.
func (p *plan) make(q *question, v *survey, t *terms, x prober) {
	p.choose(q, v, x)
	p.weigh(v, t)
	p.wants, p.need = [engine.MaxTiers]int64{}, 0
	for i, from := range p.source[:p.chunks] {
		if from != fromPeers {
			p.need++
		}
		if from >= 0 {
			p.wants[from] += int64(p.have[i]) * v.rest.Space.Geometry.PageBytes
		}
	}
}

// choose finds what can be had of each chunk, and the best source of it, up to the first gap.
func (p *plan) choose(q *question, v *survey, x prober) {
	n, chunks := v.rest.Pages(), v.rest.Chunks()
	p.have, p.source = slices.Grow(p.have[:0], chunks), slices.Grow(p.source[:0], chunks)
	p.borrow = slices.Grow(p.borrow[:0], chunks)
	var arena []uint16
	for i := range chunks {
		want := pagesOf(n, v.rest.Space.Geometry.PagesPerChunk, i)
		best, source := v.best(i, want)
		if best < want && i > 0 {
			// The arena may hold it behind a hole.
			if arena == nil {
				arena = x.arenaHolds(q.space, v.rest)
			}
			if have := min(int(arena[i]), want); have > best {
				best, source = have, fromArena
			}
		}
		if best < want && i > 0 && v.peers {
			// Behind what the arena holds, peers may hold a part of a chunk, as when a conversation
			// moves. Peers.Contains reports such a part only for a run's first chunk.
			if have := min(x.peersHold(v.rest.Chunk(i)), want); have > best {
				best, source = have, fromPeers
			}
		}
		if best == 0 || i == 0 && best <= v.part {
			return
		}
		p.have, p.source = append(p.have, uint16(best)), append(p.source, int8(source))
		p.borrow = append(p.borrow, source == fromPeers)
		if best < want {
			return
		}
	}
}

// weigh cuts the chosen chunks where waiting longer takes more time than computing.
func (p *plan) weigh(v *survey, t *terms) {
	p.chunks, p.pages, p.eta, p.patience = 0, v.hit, 0, roomPatience
	var bytes [engine.MaxTiers]int64
	var arrival, gain time.Duration
	pages := v.hit - v.part
	for i, have := range p.have {
		pages += int(have)
		if from := p.source[i]; from >= 0 {
			bytes[from] += int64(have) * v.rest.Space.Geometry.PageBytes
			arrival = max(arrival, t.pace[from].arrival(bytes[from]))
		}
		saved := time.Duration(pages-v.hit) * t.recompute
		if t.recompute == 0 || saved-arrival > gain {
			p.chunks, p.pages, p.eta, gain = i+1, pages, arrival, saved-arrival
		}
	}
	p.cut = p.chunks < len(p.have)
	if t.recompute > 0 {
		p.patience = time.Duration(p.pages-v.hit) * t.recompute
	}
}

// borrowed returns which chunks, from one on, are to be borrowed. nil: none are.
func (p *plan) borrowed(v *survey, from int) []bool {
	if len(v.hints) == 0 {
		return nil
	}
	return p.borrow[from:p.chunks]
}

// roomPatience is how long a request waits for room that others have leased, unless it is known
// that computing takes longer.
const roomPatience = 250 * time.Millisecond
