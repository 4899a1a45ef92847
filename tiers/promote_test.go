package tiers

import (
	"testing"
	"time"
)

// prepare a promotion of all of hashes, of which a tier has everything.
func (b *bench) promote(lookup uint64, first int, hashes []byte) []PromotedChunk {
	b.t.Helper()
	have := make([]uint16, 1+len(hashes)/32)
	for i := range have {
		have[i] = 4096
	}
	out, err := b.e.PreparePromotion(me, lookup, first, nil, hashes, have, nil)
	b.ok(err)
	return out
}

func (b *bench) settle(lookup uint64, pages, want int) {
	b.t.Helper()
	if n, err := b.e.SettleLookup(me, lookup, pages); n != want || err != nil {
		b.t.Fatalf("settled with %d pages, %v; want %d", n, err, want)
	}
}

func TestPromotion(t *testing.T) {
	b := newBench(t, 10, 4, Config{LeaseDeadline: time.Second, Tiers: []TierAdmission{{Admit: AdmitStored}, {Admit: AdmitReused}, {Admit: AdmitStored}}})
	p := numbered(1, 14)
	b.store(p[:32*6]) // chunk 0, and 2 pages of chunk 1
	if n, err := b.e.Lookup(me, 1, 0, p); n != 6 || err != nil {
		t.Fatal(n, err)
	}
	got := b.promote(1, 4, p[32*4:])
	if len(got) != 3 || got[0].State != PromotionGranted || got[0].Pages != 4 || got[2].Pages != 2 || got[2].Chunk != 2 {
		t.Fatalf("%+v", got)
	}
	// Another lookup joins.
	if n, err := b.e.Lookup(me, 2, 0, p); n != 6 || err != nil {
		t.Fatal(n, err)
	}
	joined := b.promote(2, 4, p[32*4:])
	for i, c := range joined {
		if c.State != PromotionJoined || c.Promotion != got[i].Promotion || c.Offset != got[i].Offset {
			t.Fatalf("%+v, granted %+v", joined, got)
		}
	}
	b.ok(b.e.Check())
	b.ok(b.e.Cancel(me, 1)) // the granter
	b.now += int64(time.Hour)
	if n := b.e.Expire(); n != 0 {
		t.Fatalf("%d expired while they wait", n)
	}
	for i := 2; i >= 0; i-- {
		if !b.e.PromotionWanted(got[i].Promotion) {
			t.Fatal(i, "is not wanted")
		}
		b.ok(b.e.FinishPromotion(got[i].Promotion, true, 1))
		b.is(b.e.FinishPromotion(got[i].Promotion, true, 1), ErrStale)
		b.ok(b.e.Check())
	}
	b.settle(2, 100, 14)
	b.ok(b.e.Check())
	load, ex, err := b.e.PrepareLoad(me, me, 2, 0, 14, nil)
	if err != nil || len(ex) != 4 {
		t.Fatal(ex, err)
	}
	b.ok(b.e.Release(me, load, nil))
	b.wantHits(14, p)
	if s := b.e.Stats(); s.ReadySlots != 4 || s.Promoting != 0 || s.PromotionsJoined != 3 {
		t.Fatalf("%+v", s)
	}
}

func TestCascades(t *testing.T) {
	b := newBench(t, 10, 4, Config{Tiers: []TierAdmission{{Admit: AdmitStored}, {Admit: AdmitReused}, {Admit: AdmitEvicted}}})
	p := numbered(1, 14)
	b.store(p)
	next := func(tier, want int) []CascadeItem {
		t.Helper()
		items, _ := b.e.NextCascades(tier, 100, nil, nil)
		if len(items) != want {
			t.Fatalf("%d to be written to tier %d, want %d", len(items), tier, want)
		}
		return items
	}
	items := next(0, 3)
	for i, x := range items {
		if x.Space != b.sp || x.First != 4*i || x.Pages != 4 || string(x.Hashes) != string(p[32*4*i:32*4*(i+1)]) || string(x.Prev) != string(p[32*max(0, 4*i-1):32*4*i]) {
			t.Fatalf("%+v", x)
		}
	}
	b.ok(b.e.Check())
	next(1, 0)
	b.wantHits(14, p)
	b.now += int64(time.Second)
	part := next(0, 1)
	for _, x := range append(append(items, part...), next(1, 4)...) {
		b.e.EndCascade(x.Handle, true)
	}
	next(0, 0)
	b.ok(b.e.Check())
	next(2, 0)
	b.store(numbered(2, 24)) // all slots are in use
	one := next(2, 1)        // as many as are below the low water mark
	b.ok(b.e.Check())
	b.e.EndCascade(one[0].Handle, true)
	b.ok(b.e.Check())
	b.store(numbered(3, 4))
	if _, shed := b.e.CascadeQueue(2); shed != 0 {
		t.Fatal(shed)
	}
	b.store(numbered(4, 4))
	if _, shed := b.e.CascadeQueue(2); shed != 1 {
		t.Fatal(shed)
	}
	b.ok(b.e.Check())
}
