package connector

import (
	"testing"

	"lookaside/internal/unshared"
	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/why"
)

// TestEndsAreCounted: one end a lookup, with the pages that it did not find.
func TestEndsAreCounted(t *testing.T) {
	s := &Server{}
	sp := &space{fingerprint: tiers.Fingerprint{1}}
	s.spaces = []*space{sp}
	miss := func(r why.Reason) (a engine.Absence) {
		a.Reason = r
		return a
	}
	s.ended(sp, 0, 10, 10, miss(why.Late)) // all was found
	s.ended(sp, 0, 10, 4, miss(why.Evicted))
	s.ended(sp, 0, 10, 0, miss(why.NeverStored))
	differ := func(fields ...string) []Unshared {
		u := Unshared{Ours: sp.fingerprint}
		for _, f := range fields {
			u.Causes = append(u.Causes, unshared.Cause{Difference: unshared.Difference{Field: f}})
		}
		return []Unshared{u}
	}
	s.noteNames(differ("none_hash", "dtype"))
	s.ended(sp, 0, 10, 0, miss(why.NeverStored))
	s.noteNames(differ("none_hash"))
	s.ended(sp, 0, 10, 0, miss(why.NeverStored)) // the only one that counts as other_seed
	s.ended(sp, 0, 10, 1, miss(why.NeverStored))
	s.ended(sp, 4, 10, 0, miss(why.NeverStored))
	s.noteNames(nil)
	s.ended(sp, 0, 10, 0, miss(why.NeverStored))
	want := map[string]why.Count{"end": {Ends: 1}, "evicted": {Ends: 1, Pages: 6},
		"never_stored": {Ends: 5, Pages: 49}, "other_seed": {Ends: 1, Pages: 10}}
	for name, got := range s.count.misses.snapshot() {
		if got != want[name] {
			t.Errorf("%s: %+v, want %+v", name, got, want[name])
		}
	}
}
