package stack

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/tiertest"
)

// found is a prober with fixed results, which counts its calls.
type found struct {
	arena []uint16
	peers map[int]int // by first page of the chunk
	calls int
}

func (f *found) arenaHolds(_ engine.SpaceID, run tiers.Run) []uint16 {
	f.calls++
	return append(slices.Clone(f.arena), make([]uint16, run.Chunks()-len(f.arena))...)
}

func (f *found) peersHold(chunk tiers.Run) int {
	f.calls++
	return f.peers[chunk.First]
}

// TestPlan: what is planned for which survey, at which terms. The lookup has 14 pages from page 0
// on, in chunks of 4.
func TestPlan(t *testing.T) {
	const ms = time.Millisecond
	// A page takes 1 ms from tier 0 and 10 ms from tier 1.
	fast, slow := pace{rate: pageBytes * 1000}, pace{rate: pageBytes * 100}
	late := pace{rate: pageBytes * 1000, latency: 0.1}
	busy := pace{rate: pageBytes * 1000, ahead: 50 * pageBytes}
	type tierHeld map[int][]uint16
	for name, c := range map[string]struct {
		hit       int
		hints     []uint16
		held      tierHeld
		peers     bool
		found     found
		recompute time.Duration
		pace      []pace

		source   []int8
		pages    int
		need     int
		cut      bool
		eta      time.Duration
		patience time.Duration
		wants    [2]int64 // pages
		calls    int
	}{
		"nobody has anything": {held: tierHeld{0: {0, 0, 0, 0}}, patience: roomPatience},
		"a tier has all": {held: tierHeld{0: {4, 4, 4, 2}}, source: []int8{0, 0, 0, 0},
			pages: 14, need: 4, patience: roomPatience, wants: [2]int64{14}},
		"the first of two tiers": {held: tierHeld{0: {4, 2, 0, 0}, 1: {4, 4, 3, 2}},
			source: []int8{0, 1, 1}, pages: 11, need: 3, patience: roomPatience,
			wants: [2]int64{4, 7}, calls: 1},
		"a tier that said nothing": {held: tierHeld{1: {4, 4, 4, 2}}, source: []int8{1, 1, 1, 1},
			pages: 14, need: 4, patience: roomPatience, wants: [2]int64{0, 14}},
		"peers first": {hints: []uint16{4, 4, 0, 0}, peers: true, held: tierHeld{0: {4, 4, 4, 2}},
			source: []int8{fromPeers, fromPeers, 0, 0}, pages: 14, need: 2,
			patience: roomPatience, wants: [2]int64{6}},
		"more than was asked for": {hints: []uint16{4, 4, 4, 4}, peers: true,
			source: []int8{fromPeers, fromPeers, fromPeers, fromPeers}, pages: 14,
			patience: roomPatience},
		"a hole that the arena fills": {held: tierHeld{0: {4, 0, 4, 0}},
			found: found{arena: []uint16{0, 4}}, source: []int8{0, fromArena, 0}, pages: 12,
			need: 3, patience: roomPatience, wants: [2]int64{8}, calls: 1},
		"a part of a chunk at a peer, behind the arena's": {hints: []uint16{4, 0, 0, 0},
			peers: true, found: found{arena: []uint16{0, 4}, peers: map[int]int{8: 2}},
			source: []int8{fromPeers, fromArena, fromPeers}, pages: 10, need: 1,
			patience: roomPatience, calls: 1 + 1},
		"no more than the arena's part": {hit: 6, held: tierHeld{0: {2, 0, 0}}, pages: 6,
			patience: roomPatience},
		"a longer version of the arena's part": {hit: 6, held: tierHeld{0: {3, 4, 2}},
			source: []int8{0}, pages: 7, need: 1, patience: roomPatience, wants: [2]int64{3}},
		"behind the arena's part": {hit: 6, held: tierHeld{0: {4, 4, 2}},
			source: []int8{0, 0, 0}, pages: 14, need: 3, patience: roomPatience,
			wants: [2]int64{10}},
		"faster than computing": {held: tierHeld{0: {4, 4, 4, 2}}, recompute: 5 * ms,
			pace: []pace{fast}, source: []int8{0, 0, 0, 0}, pages: 14, need: 4, eta: 14 * ms,
			patience: 70 * ms, wants: [2]int64{14}},
		"slower than computing": {held: tierHeld{1: {4, 4, 4, 2}}, recompute: 5 * ms,
			pace: []pace{fast, slow}, source: []int8{1, 1, 1, 1}, cut: true},
		"worth it up to where the slow tier begins": {
			held: tierHeld{0: {4, 4, 0, 0}, 1: {0, 0, 4, 2}}, recompute: 5 * ms,
			pace: []pace{fast, slow}, source: []int8{0, 0, 1, 1}, pages: 8, need: 2, cut: true,
			eta: 8 * ms, patience: 40 * ms, wants: [2]int64{8}, calls: 0},
		"latency that a long run pays for": {held: tierHeld{0: {4, 4, 4, 2}}, recompute: 10 * ms,
			pace: []pace{late}, source: []int8{0, 0, 0, 0}, pages: 14, need: 4, eta: 114 * ms,
			patience: 140 * ms, wants: [2]int64{14}},
		"a queue that is too long": {held: tierHeld{0: {4, 4, 4, 2}}, recompute: 4 * ms,
			pace: []pace{busy}, source: []int8{0, 0, 0, 0}, cut: true},
		"peers cost no time": {hints: []uint16{4, 4, 0, 0}, peers: true,
			held: tierHeld{1: {0, 0, 4, 2}}, recompute: 5 * ms, pace: []pace{fast, slow},
			source: []int8{fromPeers, fromPeers, 1, 1}, pages: 8, cut: true, patience: 40 * ms},
		"a pace that is not known": {held: tierHeld{0: {4, 4, 4, 2}}, recompute: ms,
			pace: []pace{{}}, source: []int8{0, 0, 0, 0}, pages: 14, need: 4,
			patience: 14 * ms, wants: [2]int64{14}},
	} {
		t.Run(name, func(t *testing.T) {
			sp := tiertest.NewSpace("plan", geometry)
			q := question{asked: 14, all: prefix(rand.New(rand.NewPCG(1, 1)), 14).Run(sp, 0, 14)}
			v := survey{hints: c.hints, peers: c.peers}
			if !v.aim(&q, c.hit) {
				t.Fatal("nothing is behind the hit")
			}
			for tier, held := range c.held {
				v.held[tier] = held
				v.known |= 1 << tier
			}
			terms := terms{recompute: c.recompute}
			copy(terms.pace[:], c.pace)
			// The memory of an earlier plan must not matter.
			p := plan{have: []uint16{9, 9, 9}, source: []int8{9}, chunks: 9, need: 9, cut: true}
			p.wants[1] = 9
			p.make(&q, &v, &terms, &c.found)
			if !slices.Equal(p.source, c.source) || p.pages != max(c.pages, c.hit) ||
				p.need != c.need || p.cut != c.cut || p.eta != c.eta || p.patience != c.patience {
				t.Errorf("planned %+v, want %+v", p, c)
			}
			if p.wants[0] != c.wants[0]*pageBytes || p.wants[1] != c.wants[1]*pageBytes {
				t.Errorf("%v bytes are wanted of the tiers, want %v pages", p.wants, c.wants)
			}
			if c.found.calls != c.calls {
				t.Errorf("%d questions to the arena and to peers, want %d", c.found.calls, c.calls)
			}
			if p.chunks > len(p.have) || len(p.have) != len(p.source) ||
				len(p.have) != len(p.borrow) {
				t.Errorf("%d chunks of %d, %d, %d", p.chunks, len(p.have), len(p.source),
					len(p.borrow))
			}
		})
	}
}

// TestAim: what is left to look for behind a hit of the arena.
func TestAim(t *testing.T) {
	sp := tiertest.NewSpace("plan", geometry)
	whole := prefix(rand.New(rand.NewPCG(1, 1)), 20)
	for _, c := range []struct{ first, asked, hit, start, part int }{
		{0, 14, 0, 0, 0},
		{0, 14, 8, 8, 0},
		{0, 14, 6, 4, 2},
		{0, 14, 14, -1, 0}, // it has all
		{4, 10, 0, 4, 0},
		{6, 8, 0, -1, 0}, // no tier can know the chunk that it begins in
		{6, 8, 2, 8, 0},
		{6, 8, 3, 8, 1},
	} {
		q := question{first: c.first, asked: c.asked, all: whole.Run(sp, c.first, c.first+c.asked)}
		var v survey
		if ok := v.aim(&q, c.hit); ok != (c.start >= 0) {
			t.Errorf("%+v: aims %v", c, ok)
		} else if ok {
			want := whole.Run(sp, c.start, c.first+c.asked)
			if v.rest.First != c.start || v.part != c.part || v.hit != c.hit ||
				!slices.Equal(v.rest.Hashes, want.Hashes) ||
				!slices.Equal(v.rest.Prev, want.Prev) {
				t.Errorf("%+v: %+v", c, v)
			}
		}
	}
}
