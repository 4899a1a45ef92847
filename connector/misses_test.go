package connector

import (
	"testing"
	"time"

	"lookaside/internal/unshared"
	"lookaside/ipc/wire"
	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/stack"
	"lookaside/tiers/why"
)

func miss(r why.Reason) (a engine.Absence) {
	a.Reason = r
	return a
}

// TestEndsAreCounted: one end a lookup, with the pages that it did not find.
func TestEndsAreCounted(t *testing.T) {
	s := &Server{}
	sp := &space{fingerprint: tiers.Fingerprint{1}}
	s.spaces = []*space{sp}
	ses := &session{space: sp}
	end := func(first, asked, pages int, a engine.Absence) {
		s.ended(ses, 1, first, asked, pages, a, stack.Sources{}, 0)
	}
	end(0, 10, 10, miss(why.Late)) // all was found
	end(0, 10, 4, miss(why.Evicted))
	end(0, 10, 0, miss(why.NeverStored))
	differ := func(fields ...string) []Unshared {
		u := Unshared{Ours: sp.fingerprint}
		for _, f := range fields {
			u.Causes = append(u.Causes, unshared.Cause{Difference: unshared.Difference{Field: f}})
		}
		return []Unshared{u}
	}
	s.noteNames(differ("none_hash", "dtype"))
	end(0, 10, 0, miss(why.NeverStored))
	s.noteNames(differ("none_hash"))
	end(0, 10, 0, miss(why.NeverStored)) // the only one that counts as other_seed
	end(0, 10, 1, miss(why.NeverStored))
	end(4, 10, 0, miss(why.NeverStored))
	s.noteNames(nil)
	end(0, 10, 0, miss(why.NeverStored))
	want := map[string]why.Count{"end": {Ends: 1}, "evicted": {Ends: 1, Pages: 6},
		"never_stored": {Ends: 5, Pages: 49}, "other_seed": {Ends: 1, Pages: 10}}
	for name, got := range s.count.misses.snapshot() {
		if got != want[name] {
			t.Errorf("%s: %+v, want %+v", name, got, want[name])
		}
	}
}

// TestEndsAreCountedOnceARequest whichever of its lookups, of whichever rank, has an answer first.
func TestEndsAreCountedOnceARequest(t *testing.T) {
	s := &Server{}
	sp := &space{fingerprint: tiers.Fingerprint{1}}
	one := &session{id: 1, key: instanceKey{"a", 0}, space: sp}
	rank := &session{id: 2, key: instanceKey{"a", 1}, space: sp}
	other := &session{id: 3, key: instanceKey{"b", 0}, space: sp}
	lookup := uint64(0)
	begin := func(ses *session, request string) uint64 {
		lookup++
		m := wire.Lookup{Lookup: lookup, Request: wire.Label(request)}
		s.ends.begin(ses, &m, 10, time.Now())
		return lookup
	}
	end := func(ses *session, lookup uint64, r why.Reason) {
		s.ended(ses, lookup, 0, 10, 2, miss(r), stack.Sources{}, 0)
	}
	begin(one, "x") // given up without an answer
	again, states := begin(one, "x"), begin(one, "x")
	ranks := begin(rank, "x")
	end(rank, ranks, why.Evicted) // the first answer
	end(one, again, why.Late)
	end(one, states, why.NeverStored)
	end(other, begin(other, "x"), why.Shed) // another engine's request
	end(one, begin(one, "y"), why.Evicted)
	end(one, begin(one, ""), why.Lost) // without a name each counts
	end(one, begin(one, ""), why.Lost)
	want := map[string]why.Count{"evicted": {Ends: 2, Pages: 16}, "shed": {Ends: 1, Pages: 8},
		"lost": {Ends: 2, Pages: 16}}
	for name, got := range s.count.misses.snapshot() {
		if got != want[name] {
			t.Errorf("%s: %+v, want %+v", name, got, want[name])
		}
	}
	if got := s.Ends("x", 8); len(got) != 5 || got[0].Session != other.id ||
		got[4].Why.Reason != why.End || got[1].Why.Reason != why.Evicted {
		t.Errorf("%+v", got)
	}
	for range endsKept { // what is forgotten counts again
		end(one, begin(one, "z"), why.Expired)
	}
	if got := s.count.misses.snapshot()["expired"]; got.Ends != 1 {
		t.Errorf("%+v", got)
	}
	end(one, begin(one, "x"), why.Late)
	if got := s.count.misses.snapshot()["late"]; got.Ends != 1 {
		t.Errorf("%+v", got)
	}
}
