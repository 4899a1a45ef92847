package engine

import (
	"testing"

	"lookaside/tiers"
	"lookaside/tiers/tenant"
	"lookaside/tiers/why"
)

// newWhyBench returns an engine that remembers what goes, as a tier of this number.
func newWhyBench(t *testing.T, slots, ppc int, cfg Config) *bench {
	m, err := why.NewMemory(1 << 12)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.Close() })
	cfg.Gone = m
	return newBench(t, slots, ppc, cfg)
}

// wantWhy checks the reason of a prefix's page.
func (b *bench) wantWhy(want why.Reason, hashes []byte, page int) Absence {
	b.t.Helper()
	a := b.e.Why(b.sp, hashes[32*page:32*page+32])
	if a.Reason != want {
		b.t.Fatalf("page %d: %v, want %v", page, a.Reason, want)
	}
	return a
}

// TestWhyEvicted: each page of an evicted chunk is known, also where another chunk shares its
// first pages, and by whose store it was evicted.
func TestWhyEvicted(t *testing.T) {
	r, err := tenant.New(tenant.Config{Max: 4})
	if err != nil {
		t.Fatal(err)
	}
	who := r.Find([]byte("who"))
	b := newWhyBench(t, 2, 4, Config{Tenants: r})
	p := numbered(1, 8)
	b.wantWhy(why.NeverStored, p, 0)
	b.store(p)
	b.wantWhy(why.Late, p, 3) // it is there
	b.storeAs(who, numbered(100, 4))
	for page := 4; page < 8; page++ {
		a := b.wantWhy(why.Evicted, p, page)
		if a.Tenant != who || a.Space != why.Mark(tiers.Fingerprint{1}) || a.Tier != 0 {
			t.Fatalf("evicted by %+v", a.By)
		}
	}
	b.wantWhy(why.Late, p, 3)
	b.store(p) // it is back, so that its end is another
	b.wantHits(8, p)
	b.wantWhy(why.Evicted, numbered(100, 4), 0)
}

func TestWhyCleared(t *testing.T) {
	b := newWhyBench(t, 4, 4, Config{})
	p, q := numbered(1, 8), numbered(50, 4)
	b.store(p)
	b.store(q)
	if _, err := b.e.Drop(b.sp, 4, p[32*4:]); err != nil {
		t.Fatal(err)
	}
	b.wantWhy(why.Cleared, p, 4)
	b.wantWhy(why.Late, p, 3)
	b.e.ClearSpace(b.sp)
	b.wantWhy(why.Cleared, p, 0)
	b.wantWhy(why.Cleared, q, 3)
}

// TestWhyShed: what found no room, and what was granted and never written.
func TestWhyShed(t *testing.T) {
	b := newWhyBench(t, 2, 4, Config{})
	p := numbered(1, 12)
	res, _ := b.prepare(p)
	if res.Shed != 4 {
		t.Fatalf("%+v", res)
	}
	b.wantWhy(why.NeverStored, p, 0)
	b.wantWhy(why.Shed, p, 8)
	b.wantWhy(why.Shed, p, 11)
	b.ok(b.e.AbortStore(me, res.Store))
	b.wantWhy(why.Shed, p, 0)
	b.wantWhy(why.Shed, p, 7)
}

func TestWhyLost(t *testing.T) {
	b := newWhyBench(t, 2, 4, Config{})
	p := numbered(1, 4)
	b.store(p)
	if n, err := b.e.Lookup(me, 1, 0, p); n != 4 || err != nil {
		t.Fatal(n, err)
	}
	load, _, err := b.e.PrepareLoad(me, me, 1, 0, 4, nil)
	b.ok(err)
	b.ok(b.e.Release(me, load, []uint32{0}))
	b.wantWhy(why.Lost, p, 0)
}

// TestWhyOtherSpace: the same digests lie in another space, unless it is remembered that this one
// had them.
func TestWhyOtherSpace(t *testing.T) {
	b := newWhyBench(t, 4, 4, Config{})
	other, err := b.e.OpenSpace(tiers.Fingerprint{2}, tiers.Geometry{PageBytes: 64,
		PagesPerChunk: 4, PageTokens: 16, DigestBytes: 32})
	b.ok(err)
	const they = Owner(2)
	b.ok(b.e.AddOwner(they, other))
	p := numbered(1, 4)
	res, _, err := b.e.PrepareStore(they, 0, nil, p, nil)
	b.ok(err)
	b.wantWhy(why.NeverStored, p, 0)
	b.ok(b.e.CommitStore(they, res.Store, nil))
	if a := b.wantWhy(why.OtherSpace, p, 0); a.Other != other {
		t.Fatalf("space %d has it, not %d", other, a.Other)
	}
	b.store(p)
	b.e.ClearSpace(b.sp)
	b.wantWhy(why.Cleared, p, 0)
}

// TestWhyShedByTier: a chunk that is evicted before its tier has taken it was shed.
func TestWhyShedByTier(t *testing.T) {
	b := newWhyBench(t, 1, 4, Config{Tiers: []TierAdmission{{Admit: AdmitStored}}})
	p := numbered(1, 4)
	b.store(p)
	b.store(numbered(50, 4))
	if a := b.wantWhy(why.Shed, p, 0); a.Tier != 1 {
		t.Fatalf("shed by tier %d", a.Tier)
	}
}

// TestWhyAllocatesNothing: stores that evict, and the question, with the memory on.
func TestWhyAllocatesNothing(t *testing.T) {
	b := newWhyBench(t, 4, 4, Config{})
	p := numbered(1, 4)
	b.store(p)
	b.e.ClearSpace(b.sp)
	if n := testing.AllocsPerRun(100, func() { b.e.Why(b.sp, p[:32]) }); n > 0 {
		t.Errorf("%v allocations", n)
	}
}
