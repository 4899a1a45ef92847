package engine

import (
	"math"
	"testing"
	"time"

	"lookaside/internal/invariants"
)

// TestResidence counts each chunk that is evicted for room in the bucket of the time that it was
// there, and no other.
func TestResidence(t *testing.T) {
	b := newBench(t, 4, 1, Config{Policy: "lru"})
	ages := []time.Duration{0, 900 * time.Millisecond, time.Second, 1125 * time.Millisecond,
		4 * time.Second, 5 * time.Second, time.Hour, 100 * 24 * time.Hour}
	want := [ResidenceBuckets + 1]uint64{0: 3, 1: 2, 2: 1, 6: 1, ResidenceBuckets: 1}
	next, sum := uint64(0), 0.0
	for range 4 {
		b.store(numbered(next, 1))
		next++
	}
	for _, age := range ages {
		// All four are stored anew at one time, and one of them leaves after age.
		b.e.ClearSpace(b.sp)
		for range 4 {
			b.store(numbered(next, 1))
			next++
		}
		b.now += int64(age)
		b.e.Expire()
		b.store(numbered(next, 1))
		next++
		sum += age.Truncate(time.Duration(residenceUnit)).Seconds()
	}
	got := b.e.Residence()
	if got.Counts != want || math.Abs(got.Seconds-sum) > 0.125*float64(len(ages)) {
		t.Errorf("%+v, want %v and %v s", got, want, sum)
	}
	if n := b.e.Stats().Evictions; n != uint64(len(ages)) {
		t.Errorf("%d evictions", n)
	}
	if invariants.Enabled {
		return // its checks allocate
	}
	if n := testing.AllocsPerRun(100, func() { b.e.residence.note(1) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
