package engine

import (
	"slices"
	"testing"

	"lookaside/tiers/worth"
)

// declineEnds teaches a learner that chunks with a continuation come back, and others do not.
func declineEnds(l *worth.Learner) {
	for i := range uint64(5000) {
		l.Judge(2*i, &worth.Traits{Height: 1})
		l.Judge(2*i+1, &worth.Traits{})
		l.Wanted(2 * i)
	}
}

func TestWhatIsNotWorthItIsNotWritten(t *testing.T) {
	b := newBench(t, 8, 1, Config{LowWater: 0.9, Tiers: []TierAdmission{{Admit: AdmitLearned}}})
	declineEnds(b.e.cascades.learner)
	p := numbered(1, 3)
	b.store(p)
	b.flood(200, 1)
	items, _ := b.e.NextCascades(0, 10, nil, nil)
	// The end of the prompt is declined. Chunks before it are written.
	if len(items) != 2 || items[0].First != 1 || items[1].First != 0 {
		t.Fatalf("%d chunks are written: %+v", len(items), items)
	}
	for _, item := range items {
		b.e.EndCascade(item.Handle, true)
	}
	if n := b.e.Declined(0); n != 1 {
		t.Fatalf("%d chunks were declined", n)
	}
	b.flood(300, 7)
	if _, shed := b.e.CascadeQueue(0); shed != 0 {
		t.Fatalf("%d declined chunks are counted as shed", shed)
	}
}

// TestChunksWrittenAheadLeaveInThePolicysOrder: the ends of prefixes that are cold do not keep what
// is before them from being cold, so a cold prefix leaves before a warm one's end.
func TestChunksWrittenAheadLeaveInThePolicysOrder(t *testing.T) {
	b := newBench(t, 12, 1, Config{LowWater: 0.5, Policy: "lru",
		Tiers: []TierAdmission{{Admit: AdmitEvicted}}})
	old, recent := numbered(1, 6), numbered(101, 6)
	b.store(old)
	b.store(recent)
	items, _ := b.e.NextCascades(0, 20, nil, nil)
	var first []int
	for _, item := range items {
		if !slices.Equal(item.Hashes, old[32*item.First:][:32]) {
			t.Fatalf("page %d of the prompt that was used last is written ahead", item.First)
		}
		first = append(first, item.First)
	}
	if !slices.Equal(first, []int{5, 4, 3, 2, 1, 0}) {
		t.Fatalf("written ahead: %v", first)
	}
	// While they are being written none of them can leave, and nothing that they continue does.
	for _, item := range items {
		b.e.EndCascade(item.Handle, true)
	}
	b.flood(200, 3)
	b.wantHits(3, old)
	b.wantHits(6, recent)
	// The use of the old prompt took all of it back into the order.
	b.flood(300, 3)
	b.wantHits(3, old)
}
