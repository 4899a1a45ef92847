package engine

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/tenant"
)

// hinted stores a prefix with hints.
func (b *bench) hinted(hashes []byte, how Storing) StoreResult {
	b.t.Helper()
	res, _, err := b.e.PrepareStoring(me, 0, nil, hashes, how, nil)
	b.ok(err)
	if res.Store != 0 {
		b.ok(b.e.CommitStore(me, res.Store, nil))
	}
	return res
}

// advise advises about a prefix, of which it must be so many pages that are held.
func (b *bench) advise(want int, hashes []byte, a Advice, h Hints) {
	b.t.Helper()
	if n, err := b.e.Advise(b.sp, tenant.None, 0, hashes, a, h); n != want || err != nil {
		b.t.Fatalf("advised about %d pages, %v: want %d", n, err, want)
	}
}

// flood stores so many chunks of their own, beginning with some number.
func (b *bench) flood(from, n int) {
	b.t.Helper()
	for i := range n {
		b.store(numbered(uint64(from+i), 1))
	}
}

// held returns which of these one-chunk prefixes are held, without using them.
func (b *bench) held(prefixes ...[]byte) (held []int) {
	b.t.Helper()
	for i, p := range prefixes {
		have := make([]uint16, 1)
		b.ok(b.e.Contains(b.sp, 0, p, have))
		if have[0] > 0 {
			held = append(held, i)
		}
	}
	return held
}

func (b *bench) wantHeld(want []int, prefixes ...[]byte) {
	b.t.Helper()
	if got := b.held(prefixes...); !slices.Equal(got, want) {
		b.t.Fatalf("prefixes %v are held, want %v", got, want)
	}
}

func TestRetainedChunksOutliveOthersUntilTheirTime(t *testing.T) {
	b := newBench(t, 16, 1, Config{HintShare: 0.25})
	p := [][]byte{numbered(1, 1), numbered(2, 1), numbered(3, 1)}
	b.hinted(p[0], Storing{Hints: Hints{Retain: time.Minute}})
	b.hinted(p[1], Storing{Hints: Hints{Priority: 51}}) // for HintLimit, an hour
	b.store(p[2])
	b.flood(100, 100)
	b.wantHeld([]int{0, 1}, p...)
	if s := b.e.Stats(); s.RetainedSlots != 2 || s.HintsRetained != 2 || s.HintsOver != 0 {
		t.Fatalf("%+v", s)
	}
	b.now = int64(time.Minute) - 1
	b.e.Expire()
	b.flood(300, 100)
	b.wantHeld([]int{0, 1}, p...)
	b.now++
	b.e.Expire()
	if s := b.e.Stats(); s.RetainedSlots != 1 || s.HintsExpired != 1 {
		t.Fatalf("%+v", s)
	}
	b.flood(500, 100)
	b.wantHeld([]int{1}, p...)
	b.now = int64(time.Hour)
	b.e.Expire()
	b.flood(700, 100)
	b.wantHeld(nil, p...)
}

// A retained chunk leaves when nothing else can, and a pinned one not even then.
func TestRetainedChunksLeaveBeforePinnedOnes(t *testing.T) {
	b := newBench(t, 4, 1, Config{HintShare: 1})
	var p [][]byte
	for i := range 4 {
		p = append(p, numbered(uint64(i+1), 1))
		h := Hints{Retain: time.Minute}
		if i < 2 {
			h = Hints{Pin: time.Second}
		}
		b.hinted(p[i], Storing{Hints: h})
	}
	b.store(numbered(10, 1))
	b.wantHeld([]int{0, 1, 3}, p...)
	b.hinted(numbered(10, 1), Storing{Hints: Hints{Pin: time.Second}})
	b.hinted(numbered(11, 1), Storing{Hints: Hints{Pin: time.Second}})
	b.wantHeld([]int{0, 1}, p...)
	if res, _ := b.prepare(numbered(12, 1)); res.Shed != 1 {
		t.Fatalf("%+v, with all slots pinned", res)
	}
	// The pins end at their deadline.
	b.now = int64(time.Second)
	b.e.Expire()
	if s := b.e.Stats(); s.PinnedSlots != 0 || s.RetainedSlots != 0 || s.HintsExpired != 4 {
		t.Fatalf("%+v", s)
	}
	b.flood(20, 4)
	b.wantHeld(nil, p...)
}

func TestAChunkMayBeRetainedAndPinned(t *testing.T) {
	b := newBench(t, 4, 1, Config{HintShare: 1})
	p := numbered(1, 1)
	b.hinted(p, Storing{Hints: Hints{Retain: 3 * time.Second, Pin: time.Second}})
	want := func(pinned, retained int) {
		t.Helper()
		b.e.Expire()
		if s := b.e.Stats(); s.PinnedSlots != pinned || s.RetainedSlots != retained {
			t.Fatalf("%d pinned, %d retained: want %d, %d", s.PinnedSlots, s.RetainedSlots, pinned,
				retained)
		}
	}
	want(1, 0)
	b.now = int64(time.Second)
	want(0, 1)
	// A shorter time does not shorten, a longer one does.
	b.advise(1, p, AdviseRetain, Hints{Retain: time.Second})
	b.advise(1, p, AdvisePin, Hints{Pin: 9 * time.Second})
	b.now = int64(3 * time.Second)
	want(1, 0)
	b.advise(1, p, AdvisePin, Hints{})
	want(0, 0)
	b.advise(1, p, AdviseRetain, Hints{Retain: time.Second})
	want(0, 1)
	b.advise(1, p, AdviseRetain, Hints{})
	want(0, 0)
}

func TestHintsBeyondTheirShareAreIgnored(t *testing.T) {
	b := newBench(t, 20, 1, Config{HintShare: 0.2})
	for i := range 10 {
		b.hinted(numbered(uint64(i+1), 1), Storing{Hints: Hints{Pin: time.Minute}})
	}
	if s := b.e.Stats(); s.PinnedSlots != 4 || s.HintsPinned != 4 || s.HintsOver != 6 {
		t.Fatalf("%+v", s)
	}
	// One that leaves makes room for another.
	if _, err := b.e.Drop(b.sp, 0, numbered(1, 1)); err != nil {
		t.Fatal(err)
	}
	b.advise(1, numbered(9, 1), AdvisePin, Hints{Pin: time.Minute})
	b.advise(1, numbered(10, 1), AdvisePin, Hints{Pin: time.Minute})
	if s := b.e.Stats(); s.PinnedSlots != 4 || s.HintsPinned != 5 || s.HintsOver != 7 {
		t.Fatalf("%+v", s)
	}
}

// With shares no tenant keeps more than that part of its own.
func TestHintsOfATenantAreBoundedByItsShare(t *testing.T) {
	reg, err := tenant.New(tenant.Config{Listed: []string{"a", "b"}})
	if err != nil {
		t.Fatal(err)
	}
	b := newBench(t, 40, 1, Config{HintShare: 0.5, Tenants: reg,
		Shares: tenant.Shares{Named: map[string]float64{"a": 0.2, "b": 0.6}}})
	a := reg.Find([]byte("a"))
	for i := range 10 {
		b.hinted(numbered(uint64(i+1), 1), Storing{Tenant: a, Hints: Hints{Pin: time.Minute}})
	}
	if s := b.e.Stats(); s.PinnedSlots != 4 || s.HintsOver != 6 {
		t.Fatalf("%+v", s)
	}
	// Nor does another have its chunks kept, or not kept.
	other := reg.Find([]byte("b"))
	for i, advice := range []Advice{AdviseRetain, AdvisePin, AdviseDemote} {
		if n, err := b.e.Advise(b.sp, other, 0, numbered(uint64(8+i), 1), advice,
			Hints{Retain: 1, Pin: 1}); n != 1 || err != nil {
			t.Fatal(n, err)
		}
	}
	if s := b.e.Stats(); s.PinnedSlots != 4 || s.RetainedSlots+s.LowSlots != 0 ||
		s.HintsOfOthers != 3 {
		t.Fatalf("%+v", s)
	}
}

func TestTimesAreBounded(t *testing.T) {
	b := newBench(t, 8, 1, Config{HintLimit: time.Minute})
	b.hinted(numbered(1, 1), Storing{Hints: Hints{Retain: time.Hour}})
	b.hinted(numbered(2, 1), Storing{Hints: Hints{Pin: 1 << 62}})
	b.now = int64(time.Minute)
	b.e.Expire()
	if s := b.e.Stats(); s.PinnedSlots+s.RetainedSlots != 0 {
		t.Fatalf("%+v", s)
	}
}

func TestLowChunksLeaveFirstUntilTheyAreUsed(t *testing.T) {
	b := newBench(t, 4, 1, Config{})
	var p [][]byte
	for i := range 4 {
		p = append(p, numbered(uint64(i+1), 1))
		how := Storing{}
		if i >= 2 { // the newest
			how.Priority = 10
		}
		b.hinted(p[i], how)
	}
	b.wantHits(1, p[3])
	if s := b.e.Stats(); s.LowSlots != 1 || s.HintsLow != 2 {
		t.Fatalf("%+v", s)
	}
	b.flood(10, 1)
	b.wantHeld([]int{0, 1, 3}, p...)
	b.flood(11, 1)
	b.wantHeld([]int{1, 3}, p...)
}

func TestADemotedChunkIsWrittenAndLeavesFirst(t *testing.T) {
	b := newBench(t, 4, 1, Config{LowWater: 0.01, Tiers: []TierAdmission{{Admit: AdmitEvicted}}})
	p := [][]byte{numbered(1, 1), numbered(2, 1), numbered(3, 1), numbered(4, 1)}
	for _, each := range p {
		b.store(each)
	}
	b.hinted(p[2], Storing{Hints: Hints{Retain: time.Minute}})
	b.advise(1, p[2], AdviseDemote, Hints{})
	if s := b.e.Stats(); s.LowSlots != 1 || s.RetainedSlots != 0 || s.HintsDemoted != 1 {
		t.Fatalf("%+v", s)
	}
	items, _ := b.e.NextCascades(0, 10, nil, nil)
	if len(items) != 1 || !slices.Equal(items[0].Hashes, p[2]) {
		t.Fatalf("%d chunks are written: %+v", len(items), items)
	}
	b.e.EndCascade(items[0].Handle, true)
	b.flood(10, 1)
	b.wantHeld([]int{0, 1, 3}, p...)
	if _, shed := b.e.CascadeQueue(0); shed != 0 {
		t.Fatal("what was written is counted as shed")
	}
	// A pinned chunk stays what it is.
	b.advise(1, p[0], AdvisePin, Hints{Pin: time.Minute})
	b.advise(1, p[0], AdviseDemote, Hints{})
	if s := b.e.Stats(); s.PinnedSlots != 1 || s.LowSlots != 0 {
		t.Fatalf("%+v", s)
	}
}

// A cold chunk that is retained comes back into the order.
func TestAColdChunkIsRetained(t *testing.T) {
	b := newBench(t, 4, 1, Config{LowWater: 0.9, Tiers: []TierAdmission{{Admit: AdmitEvicted}}})
	p := [][]byte{numbered(1, 1), numbered(2, 1), numbered(3, 1), numbered(4, 1)}
	for _, each := range p {
		b.store(each)
	}
	items, _ := b.e.NextCascades(0, 10, nil, nil)
	for _, x := range items {
		b.e.EndCascade(x.Handle, true)
	}
	if len(items) != 3 {
		t.Fatalf("%d chunks were written", len(items))
	}
	b.advise(1, p[0], AdviseRetain, Hints{Retain: time.Minute})
	b.flood(10, 3)
	b.wantHeld([]int{0}, p...)
}

func TestAdviceEndsWhereThePrefixDoes(t *testing.T) {
	b := newBench(t, 16, 4, Config{HintShare: 1})
	p := numbered(1, 14)
	b.store(p[:32*10])
	b.advise(10, p, AdvisePin, Hints{Pin: time.Minute})
	if s := b.e.Stats(); s.PinnedSlots != 3 {
		t.Fatalf("%+v", s)
	}
	from := func(first, want int, a Advice, h Hints) {
		t.Helper()
		if n, err := b.e.Advise(b.sp, tenant.None, first, p[32*first:], a, h); n != want ||
			err != nil {
			t.Fatal(n, err)
		}
	}
	from(4, 6, AdviseRetain, Hints{Retain: 1})
	from(12, 0, AdviseRetain, Hints{Retain: 1})
	_, err := b.e.Advise(b.sp, tenant.None, -1, p, AdviseDemote, Hints{})
	b.is(err, tiers.ErrInvalid)
	_, err = b.e.Advise(b.sp+1, tenant.None, 0, p, AdviseDemote, Hints{})
	b.is(err, tiers.ErrNotFound)
	// What a pinned chunk continues stays with it.
	b.advise(10, p, AdvisePin, Hints{})
	from(8, 2, AdvisePin, Hints{Pin: time.Minute})
	for i := range 30 {
		b.store(numbered(uint64(100+i), 4))
	}
	b.wantHits(10, p)
}

func TestAnExtendedChunkGetsItsHints(t *testing.T) {
	b := newBench(t, 8, 4, Config{})
	p := numbered(1, 4)
	b.store(p[:64])
	b.hinted(p, Storing{Hints: Hints{Retain: time.Minute}})
	if s := b.e.Stats(); s.RetainedSlots != 1 || s.Extended != 1 {
		t.Fatalf("%+v", s)
	}
}

func TestStoresFromALaterUse(t *testing.T) {
	b := newBench(t, 40, 4, Config{})
	p := numbered(1, 10)
	for use := 1; use <= 3; use++ {
		res := b.hinted(p, Storing{FromUse: 3})
		if want := (use < 3); (res.Deferred == 10) != want || (res.Store == 0) != want ||
			res.Shed != 0 {
			t.Fatalf("use %d: %+v", use, res)
		}
	}
	b.wantHits(10, p)
	if s := b.e.Stats(); s.DeferredPages != 20 || s.ShedPages != 0 {
		t.Fatalf("%+v", s)
	}
	// What continues it is counted by itself; a store without the hint is granted at once.
	q := join(p[:32*8], numbered(2, 8))
	if res := b.hinted(q, Storing{FromUse: 2}); res.Held != 8 || res.Deferred != 8 {
		t.Fatalf("%+v", res)
	}
	if res := b.hinted(q, Storing{FromUse: 2}); res.Held != 8 || res.Deferred != 0 {
		t.Fatalf("%+v", res)
	}
	b.wantHits(16, q)
	r := numbered(3, 4)
	b.hinted(r, Storing{FromUse: 2})
	b.hinted(r, Storing{})
	b.wantHits(4, r)
}

// Of a share only its own chunks are counted and deferred.
func TestStoresOfAShareFromALaterUse(t *testing.T) {
	b := newBench(t, 40, 1, Config{})
	p := numbered(1, 6)
	how := Storing{Share: Share{Of: 2, Index: 1}, FromUse: 2}
	if res := b.hinted(p, how); res.Deferred != 3 || res.Held != 0 || res.Store != 0 {
		t.Fatalf("%+v", res)
	}
	res, grants, err := b.e.PrepareStoring(me, 0, nil, p, how, nil)
	if err != nil || res.Deferred != 0 || len(grants) != 3 {
		t.Fatalf("%+v, %d grants, %v", res, len(grants), err)
	}
	b.ok(b.e.AbortStore(me, res.Store))
}

func TestUsesAreBoundedAndForgetTheOldest(t *testing.T) {
	u := uses{limit: 100}
	model := map[uint64]uint32{}
	var order []uint64
	rnd := rand.New(rand.NewPCG(1, 1))
	for range 20_000 {
		h := rnd.Uint64N(300)
		if model[h] == 0 {
			if len(order) == 100 {
				delete(model, order[0])
				order = order[1:]
			}
			order = append(order, h)
		}
		model[h]++
		if n := u.add(h); n != model[h] {
			t.Fatalf("use %d of %d, want %d", n, h, model[h])
		}
		if u.counts.n != len(model) || len(u.order) > 100 {
			t.Fatalf("%d hashes are remembered, want %d", u.counts.n, len(model))
		}
	}
	if len(u.counts.entries) > 1024 {
		t.Fatalf("%d entries for 100 hashes", len(u.counts.entries))
	}
}

// Hints of chunks that move go with them, and a region that goes takes its own along.
func TestHintsMoveWithTheirChunks(t *testing.T) {
	g := tiers.Geometry{PageBytes: 64, PagesPerChunk: 1, PageTokens: 16, DigestBytes: 32}
	now := int64(0)
	e, err := New(Config{Now: func() int64 { return now }, MinPageBytes: 1, OwnerShare: 1,
		FixedRegions: true, NoExtend: true, HintShare: 1})
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{t: t, e: e}
	defer e.Close()
	b.ok(e.AddCarvedRegion(1, g, 4, packed(g)))
	b.sp, err = e.OpenSpace(tiers.Fingerprint{1}, g)
	b.ok(err)
	b.ok(e.AddOwner(me, b.sp))
	p := [][]byte{numbered(1, 1), numbered(2, 1), numbered(3, 1)}
	b.hinted(p[0], Storing{Hints: Hints{Retain: time.Minute}})
	b.hinted(p[1], Storing{Hints: Hints{Pin: time.Minute}})
	b.hinted(p[2], Storing{Hints: Hints{Priority: 1}})
	b.ok(e.AddCarvedRegion(2, g, 4, packed(g)))
	b.ok(e.Drain(1))
	for {
		moves, _, _, err := e.NextMoves(1, 0, 4, true, nil, nil)
		b.ok(err)
		if len(moves) == 0 {
			break
		}
		for _, m := range moves {
			if !e.EndMove(m.Handle, MoveDone) {
				t.Fatal("not moved")
			}
		}
	}
	if s := e.Stats(); s.RetainedSlots != 1 || s.PinnedSlots != 1 || s.LowSlots != 1 {
		t.Fatalf("%+v", s)
	}
	b.ok(e.Check())
	b.ok(e.RemoveRegion(1))
	b.flood(10, 2) // one is free, and the low one leaves
	b.wantHeld([]int{0, 1}, p...)
	b.ok(e.Check())
	if err := e.RemoveRegion(2); err != nil && !errors.Is(err, tiers.ErrBusy) {
		t.Fatal(err)
	}
	if s := e.Stats(); s.RetainedSlots+s.PinnedSlots+s.LowSlots != 0 {
		t.Fatalf("%+v", s)
	}
	b.ok(e.Check())
}

func TestFollowingHintsAllocatesNothing(t *testing.T) {
	b := newBench(t, 64, 1, Config{HintShare: 1})
	p := numbered(1, 32)
	b.store(p)
	b.advise(32, p, AdvisePin, Hints{Pin: time.Minute})
	if n := testing.AllocsPerRun(50, func() {
		b.now++
		if n, _ := b.e.Advise(b.sp, tenant.None, 0, p, AdviseRetain,
			Hints{Retain: time.Minute}); n != 32 {
			panic(n)
		}
		if n, _ := b.e.Advise(b.sp, tenant.None, 0, p, AdviseRetain, Hints{}); n != 32 {
			panic(n)
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// hint returns hints, and what else a store may want.
func (w *world) hint() (h Hints, fromUse int) {
	if w.chance(2) {
		h.Priority = uint8(w.rng.IntN(101))
	}
	if w.chance(2) {
		h.Retain = time.Duration(w.rng.Int64N(w.deadline * 4))
	}
	if w.chance(3) {
		h.Pin = time.Duration(w.rng.Int64N(w.deadline * 2))
	}
	if w.chance(3) {
		fromUse = w.rng.IntN(4)
	}
	return h, fromUse
}

// advise advises about some prefix.
func (w *world) advise() {
	s, p := w.spaces[w.rng.IntN(len(w.spaces))], w.prefix()
	h, _ := w.hint()
	first := w.rng.IntN(len(p)) / s.g.PagesPerChunk * s.g.PagesPerChunk
	size := s.g.DigestBytes
	pages, err := w.e.Advise(s.id, w.tenant(), first, p.digests(first, len(p), size),
		Advice(w.rng.IntN(3)), h)
	w.check(err)
	for i := first; i < first+pages; i++ {
		d := p.digests(i, i+1, size)
		if !s.own[string(d)] && !s.restored[string(d)] {
			w.fatal("advised about page %d of %v, which was never committed", i, p)
		}
	}
	w.advised++
}

// checkHints verifies the bound on what hints keep, and that nothing is kept beyond its time.
func (w *world) checkHints() {
	for i := range w.e.hints.kept.heap {
		x := &w.e.hints.kept.heap[i]
		if late := w.now - x.due(); late >= 0 && w.expired {
			w.fatal("slot %#x is kept %d ns beyond its time", x.ref, late)
		}
		if x.due()-w.now > int64(w.e.cfg.HintLimit) {
			w.fatal("slot %#x is kept for %d ns", x.ref, x.due()-w.now)
		}
	}
	for g, c := range w.e.classes {
		limit, _ := w.e.keptLimits(c, tenant.None)
		if c.kept > max(limit, w.kept[g]) {
			w.fatal("%d of %d slots are kept, at most %d", c.kept, c.slots+c.uncarved, limit)
		}
		w.kept[g] = c.kept
	}
}
