package engine

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"lookaside/tiers"
	"lookaside/tiers/policy"
	"lookaside/tiers/tenant"
)

// modelTenants is what a random history has of tenants. It has chances of its own, so that the
// histories of engines without shares stay the same.
type modelTenants struct {
	rng      *rand.Rand
	registry *tenant.Registry
	spared   int // calls that evicted something while others were at or below their quotas
}

// startTenants configures tenants: two in three histories divide the arena.
func (w *world) startTenants(cfg *Config) {
	t := &w.tenants
	t.rng = rand.New(rand.NewPCG(w.seed, 7))
	var err error
	t.registry, err = tenant.New(tenant.Config{Listed: []string{"a", "b"}, Max: 2,
		Now: func() int64 { return w.now }})
	w.check(err)
	cfg.Tenants = t.registry
	cfg.Shares = []tenant.Shares{
		{},
		{Named: map[string]float64{"a": 0.4, "b": 0.1}},
		{Named: map[string]float64{"a": 0.6, "b": 0.4}},
		{Named: map[string]float64{"b": 0.5}, Default: 0.2},
		{Default: 0.5},
		{},
	}[t.rng.IntN(6)]
}

// tenant is somebody who asks.
func (w *world) tenant() tenant.ID {
	return w.tenants.registry.Find([]byte([]string{"", "a", "b", "c", "d",
		"e"}[w.tenants.rng.IntN(6)]))
}

// fairly calls f, which takes slots for a tenant in a space, and checks that nobody else at or
// below its quota loses one.
func (w *world) fairly(s *modelSpace, who tenant.ID, f func()) {
	e := w.e
	if !e.tenants.shares.On() {
		f()
		return
	}
	c := e.spaces[s.id].class
	others := c.unnamed
	if c.parts[who].held == 0 && !e.tenants.shares.Named(who) {
		others++
	}
	before := c.parts
	usable := c.usable()
	at := 0 // others at their quota
	evictions := e.stats.Evictions
	f()
	for i := range before {
		t, held := tenant.ID(i), before[i].held
		if t == who || held == 0 || held > e.quota(t, usable, others) {
			continue
		}
		at++
		if now := c.parts[i].held; now != held {
			w.fatal("tenant %d had %d slots of a quota of %d, and has %d after a call of tenant %d",
				t, held, e.quota(t, usable, others), now, who)
		}
	}
	if at > 0 && e.stats.Evictions > evictions {
		w.tenants.spared++
	}
}

// storeAs stores a prefix for a tenant.
func (b *bench) storeAs(who tenant.ID, hashes []byte) StoreResult {
	b.t.Helper()
	res, _, err := b.e.PrepareStoring(me, 0, nil, hashes, Storing{Tenant: who}, nil)
	b.ok(err)
	if res.Store != 0 {
		b.ok(b.e.CommitStore(me, res.Store, nil))
	}
	return res
}

// stats returns what is counted for a tenant.
func (b *bench) tenant(who tenant.ID) TenantStats {
	for _, st := range b.e.Tenants(nil) {
		if st.ID == who {
			return st
		}
	}
	return TenantStats{ID: who}
}

// tenantBench is an engine of slots of one page that is divided among a, b and others.
func tenantBench(t *testing.T, slots int, shares tenant.Shares, cfg Config) (b *bench,
	find func(name string) tenant.ID) {
	r, err := tenant.New(tenant.Config{Listed: []string{"a", "b"}, Max: 8,
		Now: func() int64 { return 0 }})
	if err != nil {
		t.Fatal(err)
	}
	cfg.Tenants, cfg.Shares = r, shares
	return newBench(t, slots, 1, cfg), func(name string) tenant.ID { return r.Find([]byte(name)) }
}

// TestFlood: whatever the policy, a tenant keeps its share however much others store, what it does
// not use is lent, and it takes back what it had lent.
func TestFlood(t *testing.T) {
	t.Parallel()
	const slots = 100
	for _, name := range policy.Names() {
		b, find := tenantBench(t, slots, tenant.Shares{Named: map[string]float64{"a": 0.3}},
			Config{Policy: name})
		a, x := find("a"), find("x")
		flood := func(from uint64, prompts int) {
			for i := range prompts {
				b.storeAs(x, numbered(from, 10)[:32*(1+i%10)])
				from++
			}
		}
		mine := numbered(1, 20)
		b.storeAs(a, mine)
		flood(10, 60)
		b.wantHits(20, mine)
		if st := b.tenant(x); st.Slots != slots-20 || st.Evicted == 0 || st.Bytes != 80*64 {
			t.Fatalf("%s: the flood has %+v", name, st)
		}
		// It takes the rest of its share back, and from then on its own coldest goes.
		b.storeAs(a, numbered(2, 10))
		b.storeAs(a, numbered(3, 30))
		b.wantHits(30, numbered(3, 30))
		if st := b.tenant(a); st.Slots != 30 || st.QuotaBytes != 30*64 || st.Evicted != 30 {
			t.Fatalf("%s: a has %+v", name, st)
		}
		flood(100, 60)
		b.wantHits(30, numbered(3, 30))
	}
}

// TestLent: without others a tenant may take everything; those who come then get their shares, and
// what nobody has a share of is divided among those who want it.
func TestLent(t *testing.T) {
	t.Parallel()
	b, find := tenantBench(t, 100, tenant.Shares{Named: map[string]float64{"a": 0.2, "b": 0.2},
		Default: 0.1}, Config{})
	a, c, d := find("a"), find("c"), find("d")
	has := func(want ...int) {
		t.Helper()
		for i, who := range []tenant.ID{a, find("b"), c, d} {
			if n := b.tenant(who).Slots; n != want[i] {
				t.Fatalf("tenant %d of %v has %d slots", i, want, n)
			}
		}
	}
	b.storeAs(c, numbered(1, 80))
	b.storeAs(c, numbered(2, 30))
	has(0, 0, 100, 0)
	b.storeAs(a, numbered(3, 10))
	has(10, 0, 90, 0)
	b.wantHits(30, numbered(2, 30)) // the coldest went, ends first
	b.wantHits(60, numbered(1, 80))
	// 80 slots beyond quotas are lent to two who want them: 40 each.
	for i := range 20 {
		b.storeAs(d, numbered(uint64(10+i), 9))
		b.storeAs(c, numbered(uint64(50+i), 9))
	}
	has(10, 0, 45, 45)
	for i := range 20 {
		b.storeAs(a, numbered(uint64(90+i), 9))
	}
	// Now three want the 60 that nobody has a share of, and the 20 of b.
	if n := b.tenant(a).Slots + b.tenant(c).Slots + b.tenant(d).Slots; n != 100 {
		t.Fatalf("%d slots are used", n)
	}
	if n := b.tenant(a).Slots; n < 39 || n > 41 {
		t.Fatalf("a has %d slots, want some 40: 20 of its own, and a third of 60", n)
	}
}

// TestManyNames: tenants without a share of their own divide what is left, so names are no way to
// more than that.
func TestManyNames(t *testing.T) {
	t.Parallel()
	b, find := tenantBench(t, 100, tenant.Shares{Named: map[string]float64{"a": 0.5}}, Config{})
	a := find("a")
	b.storeAs(a, numbered(1, 50))
	for i := range 100 {
		b.storeAs(find(fmt.Sprint("stranger", i)), numbered(uint64(2+i), 10))
	}
	b.wantHits(50, numbered(1, 50))
	if st := b.tenant(tenant.Other); st.Slots == 0 {
		t.Fatalf("92 strangers too many have %+v together", st)
	}
}

// TestPrefixOfAnother: a prefix outlives its continuation, whoever has that. So a tenant may have
// nothing to lose although it has more than its share; then the next one loses.
func TestPrefixOfAnother(t *testing.T) {
	t.Parallel()
	b, find := tenantBench(t, 20, tenant.Shares{Named: map[string]float64{"a": 0.5, "b": 0.25}},
		Config{})
	a, other, x := find("a"), find("b"), find("x")
	p := numbered(1, 15)
	b.storeAs(x, p[:32*10])
	b.storeAs(other, p) // 5 of its own behind 10 of x: just its quota
	b.storeAs(x, numbered(2, 5))
	for i := range 4 {
		b.storeAs(a, numbered(uint64(10+i), 1))
	}
	// x had 15 of a quota of 5, and has lost the only ones that nothing continues.
	b.wantHits(15, p)
	if st := b.tenant(x); st.Slots != 11 || st.Evicted != 4 {
		t.Fatalf("x has %+v", st)
	}
	b.storeAs(a, numbered(20, 6)) // one more of x, then its own, and then there is none
	b.wantHits(15, p)
	if x, a := b.tenant(x), b.tenant(a); x.Slots != 10 || a.Slots != 5 || a.Evicted != 4 ||
		a.ShedPages != 1 {
		t.Fatalf("x has %+v, a has %+v", x, a)
	}
	// What it wants and cannot have is counted as shed.
	b.ok(lookupAll(b, numbered(20, 6)))
	if res := b.storeAs(a, numbered(30, 3)); res.Shed != 3 || b.tenant(a).ShedPages != 4 {
		t.Fatalf("%+v, and a has %+v", res, b.tenant(a))
	}
}

// lookupAll leases what is held of a prefix for the rest of the test.
func lookupAll(b *bench, hashes []byte) error {
	_, err := b.e.Lookup(me, 5, 0, hashes)
	return err
}

// TestColdOnesOfTenants: what is written ahead of its eviction is that of the tenant which will
// lose it, and is not evicted for another.
func TestColdOnesOfTenants(t *testing.T) {
	t.Parallel()
	b, find := tenantBench(t, 40, tenant.Shares{Named: map[string]float64{"a": 0.5, "b": 0.5}},
		Config{Tiers: []TierAdmission{{Admit: AdmitEvicted}}, LowWater: 0.5})
	a, other := find("a"), find("b")
	chill := func() {
		items, _ := b.e.NextCascades(0, 100, nil, nil)
		for _, c := range items {
			b.e.EndCascade(c.Handle, true)
		}
	}
	b.storeAs(other, numbered(1, 18))
	b.storeAs(a, numbered(100, 1))
	for i := range 21 {
		b.storeAs(a, numbered(uint64(101+i), 1))
	}
	chill() // 20 slots are wanted: a's, down to as much below its quota as b is, then both by turns
	if p := b.e.classes[tiers.Geometry{PageBytes: 64, PagesPerChunk: 1,
		DigestBytes: 32}].parts; p[a].cold == 0 || p[other].cold == 0 || p[a].cold < p[other].cold {
		t.Fatalf("%d of a are cold, and %d of b", p[a].cold, p[other].cold)
	}
	for i := range 60 {
		b.storeAs(a, numbered(uint64(150+i), 1))
	}
	b.wantHits(18, numbered(1, 18))
	if n := b.e.Stats().Evictions; n != 60 {
		t.Fatalf("%d evictions", n)
	}
}

// TestTenantsOfSlots: promotions, moves and restored chunks have the right tenant, and what is
// extended or replaced keeps it.
func TestTenantsOfSlots(t *testing.T) {
	t.Parallel()
	r, err := tenant.New(tenant.Config{Listed: []string{"a", "b"}})
	if err != nil {
		t.Fatal(err)
	}
	a, other := r.Find([]byte("a")), r.Find([]byte("b"))
	b := newBench(t, 10, 4, Config{Tenants: r,
		Shares: tenant.Shares{Named: map[string]float64{"a": 0.5}}})
	p := numbered(1, 10)
	b.storeAs(a, p[:32*6])
	b.storeAs(other, p[:32*8]) // behind a's
	if a, o := b.tenant(a).Slots, b.tenant(other).Slots; a != 2 || o != 0 {
		t.Fatalf("a has %d slots, b %d", a, o)
	}
	out, err := b.e.PreparePromotion(me, 1, PromotionRun{FirstPage: 0, Hashes: numbered(9, 8),
		Have: []uint16{4, 4}, Tenant: other}, nil)
	b.ok(err)
	for _, c := range out {
		b.ok(b.e.FinishPromotion(c.Promotion, true, 0))
	}
	if n := b.tenant(other).Slots; n != 2 {
		t.Fatalf("b has %d slots", n)
	}
	var at PatrolPlace
	got := map[tenant.ID]int{}
	for {
		v, _, ok := b.e.NextPatrol(&at, nil)
		if !ok {
			break
		}
		got[v.Tenant]++
	}
	if got[a] != 2 || got[other] != 2 {
		t.Fatalf("a walk finds %v", got)
	}
	b.ok(b.e.Cancel(me, 1))
	b.e.ClearSpace(b.sp)
	for _, st := range b.e.Tenants(nil) {
		if st.Slots != 0 || st.Bytes != 0 {
			t.Fatalf("an empty engine counts %+v", st)
		}
	}
}

// TestTenantsAreRestored with their chunks, moved with them, and forgotten with the last.
func TestTenantsAreRestored(t *testing.T) {
	t.Parallel()
	r, err := tenant.New(tenant.Config{Max: 4})
	if err != nil {
		t.Fatal(err)
	}
	a, x := r.Find([]byte("a")), r.Find([]byte("x"))
	e, err := New(Config{MinPageBytes: 1, OwnerShare: 1, Tenants: r, FixedRegions: true,
		Shares: tenant.Shares{Default: 0.5}})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	g := tiers.Geometry{PageBytes: 64, PagesPerChunk: 1, PageTokens: 16, DigestBytes: 32}
	b := &bench{t: t, e: e}
	for id := range uint32(2) {
		b.ok(e.AddCarvedRegion(id+1, g, 10, packed(g)))
	}
	b.sp, err = e.OpenSpace(tiers.Fingerprint{1}, g)
	b.ok(err)
	b.ok(e.AddOwner(me, b.sp))
	p := numbered(1, 10)
	var all []Restored
	for i := range 10 {
		who := a
		if i%2 == 1 {
			who = x
		}
		all = append(all, Restored{Slot: uint32(i), Space: b.sp, First: i, Pages: 1,
			Hashes: p[32*i:][:32], Order: uint64(i), Unverified: i%3 == 0, Tenant: who})
		if i > 0 {
			all[i].Prev = p[32*(i-1):][:32]
		}
	}
	b.ok(e.Restore(1, all))
	e.Unrestore(1, 9)
	e.EndRestore()
	if n, m := b.tenant(a).Slots, b.tenant(x).Slots; n != 5 || m != 4 {
		t.Fatalf("a has %d slots, x has %d", n, m)
	}
	b.ok(e.Check())
	for i := range 10 {
		b.storeAs(x, numbered(uint64(50+i), 1))
	}
	b.ok(e.Drain(1))
	b.ok(e.Check())
	b.ok(e.RemoveRegion(1))
	if n := b.tenant(a).Slots; n != 0 || b.tenant(x).Slots == 0 {
		t.Fatalf("a has %d slots of a region that is gone, x has %d", n, b.tenant(x).Slots)
	}
	b.ok(e.Check())
}

// BenchmarkEvict stores chunk after chunk in a full arena, for one tenant after the other: without
// shares, and with shares of few and of many tenants.
func BenchmarkEvict(b *testing.B) {
	const slots = 10000
	for _, c := range []struct {
		name    string
		tenants int
		shares  tenant.Shares
	}{
		{"undivided", 4, tenant.Shares{}},
		{"of4", 4, tenant.Shares{Default: 1}},
		{"of64", 64, tenant.Shares{Default: 1}},
	} {
		b.Run(c.name, func(b *testing.B) {
			r, err := tenant.New(tenant.Config{Max: c.tenants})
			if err != nil {
				b.Fatal(err)
			}
			var who []tenant.ID
			for i := range c.tenants {
				who = append(who, r.Find(fmt.Append(nil, i)))
			}
			e := newBench(b, slots, 1, Config{Policy: policy.Default, Tenants: r, Shares: c.shares})
			next := uint64(0)
			store := func() {
				e.storeAs(who[next%uint64(len(who))], numbered(next, 1))
				next++
			}
			for range slots {
				store()
			}
			b.ReportAllocs()
			for b.Loop() {
				store()
			}
		})
	}
}
