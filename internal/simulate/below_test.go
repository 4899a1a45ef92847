package simulate

import (
	"context"
	"testing"
)

// tiered runs a trace with a tier of some caches below a cache of a part of the distinct blocks.
func tiered(t *testing.T, trace *Trace, part float64, times int, admit Admission) Result {
	t.Helper()
	_, distinct := trace.Blocks()
	slots := max(int(part*float64(distinct)), 1)
	r, err := Run(context.Background(), trace, Setup{Seed: 1, Capacity: slots, Tier: slots * times,
		Admit: admit}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestLearned holds learned admission to its promise on workloads that nobody tuned it to, small
// ones here: nearly the hits of stored for fewer writes.
func TestLearned(t *testing.T) {
	t.Parallel()
	for _, trace := range workloads(13, 1500) {
		if trace.Name == "loop" { // in a loop everything comes back, and mostly too late
			continue
		}
		for _, times := range []int{2, 20} {
			stored := tiered(t, trace, 0.02, times, admitStored)
			learned := tiered(t, trace, 0.02, times, admitLearned)
			if learned.Hits < stored.Hits*92/100 || learned.TierWrites > stored.TierWrites*101/100 {
				t.Errorf("%s, a tier of %d arenas: %d hits for %d writes, with stored %d for %d",
					trace.Name, times, learned.Hits, learned.TierWrites, stored.Hits,
					stored.TierWrites)
			}
		}
	}
}

// With a tier that holds everything, all that ever leaves or is stored is found again.
func TestEverythingIsFoundBelow(t *testing.T) {
	t.Parallel()
	for _, trace := range workloads(3, 60) {
		if trace.Name == "swe" { // its requests are larger than the cache
			continue
		}
		for _, admit := range []Admission{admitStored, admitEvicted, Oracle} {
			_, distinct := trace.Blocks()
			r := tiered(t, trace, 0.2, 10, admit)
			if r.Ratio() != trace.Ceiling() {
				t.Errorf("%s, %s: %.4f hit of %.4f", trace.Name, admit, r.Ratio(), trace.Ceiling())
			}
			if r.TierWrites > distinct || admit == admitStored && r.TierWrites != distinct {
				t.Errorf("%s, %s: %d writes of %d blocks", trace.Name, admit, r.TierWrites,
					distinct)
			}
		}
	}
}

// What is written ahead leaves in the policy's order, so the cache hits what it hits without a
// tier.
func TestColdKeepsTheOrder(t *testing.T) {
	t.Parallel()
	for _, trace := range workloads(5, 100) {
		with := func(capacity, tier int) Result {
			r, err := Run(context.Background(), trace, Setup{Policy: "lru", Capacity: capacity,
				Tier: tier, Admit: admitEvicted}, nil)
			if err != nil {
				t.Fatal(err)
			}
			return r
		}
		r := with(400, 4000)
		if got, want := r.Hits-r.TierHits, with(400, 0).Hits; got < want*97/100 ||
			got > want*103/100 {
			t.Errorf("%s: %d hits in the arena, %d without a tier", trace.Name, got, want)
		}
	}
}

func TestParseAdmission(t *testing.T) {
	t.Parallel()
	for _, a := range Admissions() {
		if got, err := ParseAdmission(string(a)); err != nil || got != a {
			t.Errorf("%s: %s, %v", a, got, err)
		}
	}
	if _, err := ParseAdmission("never"); err == nil || err.Error() !=
		"want one of stored, evicted, learned, reused, second-sight, oracle" {
		t.Error(err)
	}
}
