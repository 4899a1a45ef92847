package engine

import (
	"slices"
	"testing"
	"time"

	"lookaside/tiers"
)

// prepare a promotion of all of hashes, of which a tier has everything.
func (b *bench) promote(lookup uint64, first int, hashes []byte) []PromotedChunk {
	b.t.Helper()
	have := make([]uint16, 1+len(hashes)/32)
	for i := range have {
		have[i] = 4096
	}
	out, err := b.e.PreparePromotion(me, lookup, PromotionRun{
		FirstPage: first, Hashes: hashes, Have: have,
	}, nil)
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
	b := newBench(t, 10, 4, Config{LeaseDeadline: time.Second,
		Tiers: []TierAdmission{{Admit: AdmitStored}, {Admit: AdmitReused}, {Admit: AdmitStored}}})
	p := numbered(1, 14)
	b.store(p[:32*6]) // chunk 0, and 2 pages of chunk 1
	if n, err := b.e.Lookup(me, 1, 0, p); n != 6 || err != nil {
		t.Fatal(n, err)
	}
	got := b.promote(1, 4, p[32*4:])
	if len(got) != 3 || got[0].State != PromotionGranted || got[0].Pages != 4 ||
		got[2].Pages != 2 || got[2].Chunk != 2 {
		t.Fatalf("%+v", got)
	}
	// Another lookup joins.
	if n, err := b.e.Lookup(me, 2, 0, p); n != 6 || err != nil {
		t.Fatal(n, err)
	}
	joined := b.promote(2, 4, p[32*4:])
	for i, c := range joined {
		if c.State != PromotionJoined || c.Promotion != got[i].Promotion ||
			c.Offset != got[i].Offset {
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
		b.is(b.e.FinishPromotion(got[i].Promotion, true, 1), tiers.ErrStale)
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
	b := newBench(t, 10, 4, Config{Tiers: []TierAdmission{{Admit: AdmitStored},
		{Admit: AdmitReused}, {Admit: AdmitEvicted}}})
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
		if x.Space != b.sp || x.First != 4*i || x.Pages != 4 ||
			string(x.Hashes) != string(p[32*4*i:32*4*(i+1)]) ||
			string(x.Prev) != string(p[32*max(0, 4*i-1):32*4*i]) {
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

// TestVictimThatWaits: a partly filled chunk that waits for one tier, is its victim before its
// time, and comes to wait for it again, is in its queue once.
func TestVictimThatWaits(t *testing.T) {
	b := newBench(t, 2, 4, Config{Tiers: []TierAdmission{{Admit: AdmitEvicted},
		{Admit: AdmitEvicted}}, LowWater: 1, PartialDelay: time.Second})
	p := numbered(1, 2)
	b.store(p)
	for _, tier := range []int{0, 1, 0} { // of which each makes it wait for the other
		items, _ := b.e.NextCascades(tier, 10, nil, nil)
		if len(items) != 1 {
			t.Fatalf("%d to be written to tier %d", len(items), tier)
		}
		b.e.EndCascade(items[0].Handle, false)
		b.wantHits(2, p) // a use: it is no victim any more
		b.ok(b.e.Check())
	}
	b.now += int64(2 * time.Second)
	items, _ := b.e.NextCascades(1, 10, nil, nil)
	if len(items) != 1 {
		t.Fatal(items)
	}
	b.e.EndCascade(items[0].Handle, true)
	if n, _ := b.e.CascadeQueue(1); n != 0 {
		t.Fatal(n)
	}
}

// TestStoreOvertakesPromotion: both slots are good, the one that comes second goes when nobody uses
// it.
func TestStoreOvertakesPromotion(t *testing.T) {
	b := newBench(t, 10, 4, Config{})
	p := numbered(1, 6)
	got := b.promote(1, 0, p)
	b.store(p)
	b.wantHits(6, p)
	for _, c := range got {
		b.ok(b.e.FinishPromotion(c.Promotion, true, 0))
		b.ok(b.e.Check())
	}
	b.settle(1, 6, 6)
	_, extents, err := b.e.PrepareLoad(me, me, 1, 0, 6, nil)
	b.ok(err)
	if extents[0].Offset != got[0].Offset || extents[1].Offset != got[1].Offset {
		t.Fatalf("%+v, promoted to %+v", extents, got)
	}
	if s := b.e.Stats(); s.PromotionsLate != 2 || s.ReadySlots != 3 {
		// of the partly filled ones the unused one goes
		t.Fatalf("%+v", s)
	}
	b.e.RemoveOwner(me)
	b.ok(b.e.AddOwner(me, b.sp))
	b.wantHits(6, p)
	if s := b.e.Stats(); s.ReadySlots != 2 {
		t.Fatalf("%+v", s)
	}
}

func TestPromotedChunkReplacesShorter(t *testing.T) {
	b := newBench(t, 10, 4, Config{})
	p := numbered(1, 4)
	b.store(p[:64])
	for i := uint64(1); i <= 2; i++ {
		if n, err := b.e.Lookup(me, i, 0, p); n != 2 || err != nil {
			t.Fatal(n, err)
		}
	}
	load, _, err := b.e.PrepareLoad(me, me, 2, 0, 2, nil)
	b.ok(err)
	got := b.promote(1, 0, p)
	if len(got) != 1 || got[0].Pages != 4 || got[0].State != PromotionGranted {
		t.Fatalf("%+v", got)
	}
	b.ok(b.e.FinishPromotion(got[0].Promotion, true, 0))
	b.settle(1, 4, 4)
	_, extents, err := b.e.PrepareLoad(me, me, 1, 0, 4, nil)
	b.ok(err)
	if len(extents) != 1 || extents[0].Offset != got[0].Offset {
		t.Fatalf("%+v", extents)
	}
	if s := b.e.Stats(); s.ReadySlots != 2 { // the shorter one is still being loaded
		t.Fatalf("%+v", s)
	}
	b.ok(b.e.Release(me, load, nil))
	if s := b.e.Stats(); s.ReadySlots != 1 {
		t.Fatalf("%+v", s)
	}
	// A failed promotion leaves the shorter version to the lookup.
	q := numbered(2, 4)
	b.store(q[:64])
	if n, err := b.e.Lookup(me, 3, 0, q); n != 2 || err != nil {
		t.Fatal(n, err)
	}
	got = b.promote(3, 0, q)
	b.ok(b.e.FinishPromotion(got[0].Promotion, false, 0))
	b.settle(3, 4, 2)
	// Nothing is gained by what the lookup has.
	if out, err := b.e.PreparePromotion(me, 3, PromotionRun{
		Hashes: q, Have: []uint16{2},
	}, nil); len(out) != 0 ||
		err != nil {
		t.Fatal(out, err)
	}
}

func TestClearWhilePromoting(t *testing.T) {
	b := newBench(t, 10, 2, Config{})
	p := numbered(1, 8)
	b.store(p[:128])
	if n, err := b.e.Lookup(me, 1, 0, p); n != 4 || err != nil {
		t.Fatal(n, err)
	}
	first := b.promote(1, 4, p[128:])
	b.ok(b.e.FinishPromotion(first[0].Promotion, true, 0))
	b.e.ClearSpace(b.sp)
	if b.e.PromotionWanted(first[1].Promotion) {
		t.Fatal("what was cleared is wanted")
	}
	// Another lookup does not join what was cleared.
	again := b.promote(2, 0, p)
	if len(again) != 4 || again[3].State != PromotionGranted ||
		again[3].Promotion == first[1].Promotion {
		t.Fatalf("%+v after %+v", again, first)
	}
	b.ok(b.e.FinishPromotion(first[1].Promotion, true, 0))
	b.wantHits(0, p)
	b.settle(1, 8, 0)
	for _, c := range again {
		b.ok(b.e.FinishPromotion(c.Promotion, true, 0))
	}
	b.settle(2, 8, 8)
	b.is(b.e.CloseSpace(b.sp), tiers.ErrBusy)
}

// TestPromotionsKeepToTheirShare: what does not fit is cut off the end, whatever the limit; what is
// joined counts for each of the owners.
func TestPromotionsKeepToTheirShare(t *testing.T) {
	b := newBench(t, 20, 1, Config{OwnerShare: 0.4, PromotingShare: 0.5})
	b.ok(b.e.AddOwner(2, b.sp))
	b.ok(b.e.AddOwner(3, b.sp))
	p := numbered(1, 12)
	have := slices.Repeat([]uint16{1}, 12)
	var all []PromotedChunk
	for o, want := range []int{me: 8, 2: 8, 3: 0} {
		if o == 0 {
			continue
		}
		h := p
		if o == 3 {
			h = numbered(2, 3)
			out, err := b.e.PreparePromotion(3, 1, PromotionRun{
				Hashes: numbered(3, 12), Have: have,
			}, nil)
			if len(out) != 2 || err != nil { // 10 in all
				t.Fatal(out, err)
			}
			all = append(all, out...)
		}
		out, err := b.e.PreparePromotion(Owner(o), 7, PromotionRun{Hashes: h, Have: have}, nil)
		if len(out) != want || err != nil {
			t.Fatalf("owner %d: %d chunks, want %d; %v", o, len(out), want, err)
		}
		for _, c := range out {
			if want := []PromotionState{me: PromotionGranted,
				2: PromotionJoined}[o]; c.State != want {
				t.Fatalf("%+v", c)
			}
		}
		if o == int(me) {
			all = append(all, out...)
		}
	}
	if room, err := b.e.PromotionRoom(2); room != (Room{Most: 8}) || err != nil {
		t.Fatal(room, err)
	}
	b.ok(b.e.Trim(me, 7, 3))
	b.ok(b.e.Trim(2, 7, 3))
	for i, c := range all[:8] {
		if got := b.e.PromotionWanted(c.Promotion); got != (i >= 3) {
			t.Fatalf("chunk %d is wanted: %v", i, got)
		}
	}
	b.e.RemoveOwner(me)
	for i, c := range all {
		b.ok(b.e.FinishPromotion(c.Promotion, i != 6, 0))
	}
	if n, err := b.e.SettleLookup(2, 7, 100); n != 3 || err != nil { // chunks 3 to 5
		t.Fatal(n, err)
	}
	b.e.RemoveOwner(2)
	b.e.RemoveOwner(3)
	if s := b.e.Stats(); s.Leases != 0 || s.Promoting != 0 || s.ReadySlots != 9 ||
		s.FillingSlots != 0 {
		t.Fatalf("%+v", s)
	}
}

// TestReservationsDoNotWait: however many lookups want more than there is, each is answered at
// once, and the room comes back.
func TestReservationsDoNotWait(t *testing.T) {
	b := newBench(t, 8, 1, Config{PromotingShare: 1})
	have := slices.Repeat([]uint16{1}, 6)
	var under []uint64
	for i := range 100 {
		out, err := b.e.PreparePromotion(me, uint64(i), PromotionRun{
			Hashes: numbered(uint64(i), 6), Have: have,
		}, nil)
		b.ok(err)
		if free := 8 - len(under); len(out) != min(6, free) {
			t.Fatalf("lookup %d: %d chunks with %d slots free", i, len(out), free)
		}
		for _, c := range out {
			under = append(under, c.Promotion)
		}
		if len(out) == 0 || i%3 == 2 {
			for _, p := range under {
				b.ok(b.e.FinishPromotion(p, true, 0))
			}
			under = under[:0]
			for j := range i + 1 {
				if n, err := b.e.SettleLookup(me, uint64(j), 6); err == nil {
					if n == 0 {
						t.Fatal("a lookup has nothing")
					}
					b.ok(b.e.Cancel(me, uint64(j)))
				}
			}
		}
	}
	for _, p := range under {
		b.ok(b.e.FinishPromotion(p, true, 0))
	}
}

func TestFullQueueSheds(t *testing.T) {
	woken := 0
	b := newBench(t, 100, 1, Config{Tiers: []TierAdmission{{Admit: AdmitStored, Queue: 5}},
		Policy: "lru", Wake: func(Work) { woken++ }})
	p := numbered(1, 20)
	b.store(p)
	if n, shed := b.e.CascadeQueue(0); n != 5 || shed != 15 || woken != 1 {
		t.Fatal(n, shed, woken)
	}
	items, buf := b.e.NextCascades(0, 2, nil, nil)
	if len(items) != 2 || string(items[1].Prev) != string(p[:32]) {
		t.Fatalf("%+v", items)
	}
	b.e.EndCascade(items[0].Handle, true)
	b.e.ClearSpace(b.sp)
	if !b.e.EndCascade(items[1].Handle, true) {
		t.Fatal("it was cleared meanwhile")
	}
	if n, shed := b.e.CascadeQueue(0); n != 0 || shed != 15 {
		t.Fatal(n, shed)
	}
	if items, _ = b.e.NextCascades(0, 2, buf, items[:0]); len(items) != 0 {
		t.Fatalf("%+v", items)
	}
	b.store(p[:64])
	if woken != 2 {
		t.Fatal(woken)
	}
	// Void entries leave room for others: the queue is filled and emptied by eviction many times.
	for i := range 100 {
		b.store(numbered(uint64(100+i), 7))
		b.ok(b.e.Check())
		b.e.ClearSpace(b.sp)
	}
}

// TestPartialsWait: a partly filled chunk is written when it has not grown for a while, and again
// when it has.
func TestPartialsWait(t *testing.T) {
	b := newBench(t, 10, 4, Config{PartialDelay: 100, Tiers: []TierAdmission{{Admit: AdmitStored}}})
	p := numbered(1, 4)
	next := func(want int) {
		t.Helper()
		items, _ := b.e.NextCascades(0, 10, nil, nil)
		got := 0
		for _, x := range items {
			got = x.Pages
			b.e.EndCascade(x.Handle, true)
		}
		if got != want || len(items) > 1 {
			t.Fatalf("%+v, want %d pages", items, want)
		}
		b.ok(b.e.Check())
	}
	b.store(p[:32])
	next(0)
	b.now += 99
	b.store(p[:64])
	b.now += 1
	next(0) // it has grown since it was queued
	b.now += 100
	next(2)
	b.now += 1000
	next(0)
	res, _ := b.prepare(p[:96])
	items, _ := b.e.NextCascades(0, 10, nil, nil)
	if len(items) != 0 {
		t.Fatal("nothing is new")
	}
	b.ok(b.e.CommitStore(me, res.Store, nil))
	b.store(p)
	next(4) // whole: at once
	b.now += 1000
	next(0)
}
