package engine

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/policy"
)

// bench is an engine with one space and one session, for tests of one thing.
type bench struct {
	t   testing.TB
	e   *Engine
	sp  SpaceID
	now int64
}

const me = Owner(1)

func newBench(t testing.TB, slots, ppc int, cfg Config) *bench {
	b := &bench{t: t}
	cfg.Now = func() int64 { return b.now }
	cfg.MinPageBytes = 1
	if cfg.Policy == "" {
		cfg.Policy = "lru" // whose victims a test can name
	}
	if cfg.OwnerShare == 0 {
		cfg.OwnerShare = 1
	}
	var err error
	if b.e, err = New(cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.e.Check(); err != nil {
			t.Error(err)
		}
		b.e.Close()
	})
	b.ok(b.e.AddRegion(7, int64(slots*ppc)*64))
	b.sp, err = b.e.OpenSpace(tiers.Fingerprint{1}, tiers.Geometry{PageBytes: 64,
		PagesPerChunk: ppc, PageTokens: 16, DigestBytes: 32})
	b.ok(err)
	b.ok(b.e.AddOwner(me, b.sp))
	return b
}

func (b *bench) ok(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) is(err, want error) {
	b.t.Helper()
	if !errors.Is(err, want) {
		b.t.Fatalf("got %v, want %v", err, want)
	}
}

// prepare prepares a store of a prefix from its first page.
func (b *bench) prepare(hashes []byte) (StoreResult, []Grant) {
	b.t.Helper()
	res, grants, err := b.e.PrepareStore(me, 0, nil, hashes, nil)
	b.ok(err)
	return res, grants
}

// store stores a prefix from its first page.
func (b *bench) store(hashes []byte) (StoreResult, []Grant) {
	b.t.Helper()
	res, grants := b.prepare(hashes)
	if res.Store != 0 {
		b.ok(b.e.CommitStore(me, res.Store, nil))
	}
	return res, grants
}

// share stores one of the parts of a prefix's chunks for an owner, but for the commit.
func (b *bench) share(o Owner, hashes []byte, s Share) StoreResult {
	b.t.Helper()
	res, grants, err := b.e.PrepareStoring(o, 0, nil, hashes, Storing{Share: s}, nil)
	b.ok(err)
	for _, g := range grants {
		if !s.has(int(g.Page)) { // of chunks of one page
			b.t.Fatalf("%+v of share %+v", g, s)
		}
	}
	return res
}

// hits looks a prefix up and lets go of it at once.
func (b *bench) hits(hashes []byte) int {
	b.t.Helper()
	n, err := b.e.Lookup(me, 99, 0, hashes)
	b.ok(err)
	if n > 0 {
		b.ok(b.e.Cancel(me, 99))
	}
	return n
}

func join(parts ...[]byte) []byte { return slices.Concat(parts...) }

func (b *bench) wantHits(want int, hashes []byte) {
	b.t.Helper()
	if n := b.hits(hashes); n != want {
		b.t.Fatalf("%d pages hit, want %d", n, want)
	}
}

func TestExtensionInPlace(t *testing.T) {
	b := newBench(t, 10, 4, Config{})
	p := numbered(1, 8)
	_, first := b.store(p[:32*6])
	if len(first) != 2 || first[1].Pages != 2 {
		t.Fatalf("granted %+v", first)
	}
	// Pages 6 and 7 go behind 4 and 5, and nothing is written twice; another store of the same
	// meanwhile gets a slot of its own.
	res, grants := b.prepare(p)
	if res.Held != 6 || len(grants) != 1 ||
		grants[0] != (Grant{Page: 6, Pages: 2, Region: 7, Offset: first[1].Offset + 128}) {
		t.Fatalf("%+v, granted %+v", res, grants)
	}
	other, grants2 := b.prepare(p)
	if other.Held != 4 || len(grants2) != 1 || grants2[0].Page != 4 || grants2[0].Pages != 4 ||
		grants2[0].Offset == first[1].Offset {
		t.Fatalf("%+v, granted %+v", other, grants2)
	}
	b.wantHits(6, p)
	b.ok(b.e.CommitStore(me, res.Store, nil))
	b.wantHits(8, p)
	b.ok(b.e.CommitStore(me, other.Store, nil))
	b.wantHits(8, p)
	if s := b.e.Stats(); s.ReadySlots != 2 || s.Extended != 1 || s.Duplicates != 1 {
		t.Fatalf("%+v", s)
	}
	// Once it has grown, a continuation that parts inside it cannot use it.
	q := join(p[:32*6], numbered(2, 1))
	if res, grants := b.store(q); res.Held != 4 || len(grants) != 1 || grants[0].Page != 4 ||
		grants[0].Pages != 3 {
		t.Fatalf("%+v, granted %+v", res, grants)
	}
	b.wantHits(7, q)
	b.wantHits(8, p)
}

func TestFailedExtensionLeavesTheOldPages(t *testing.T) {
	b := newBench(t, 10, 4, Config{})
	p := numbered(1, 4)
	b.store(p[:64])
	for _, end := range []func(uint64) error{
		func(h uint64) error { return b.e.AbortStore(me, h) },
		func(h uint64) error { return b.e.CommitStore(me, h, []uint32{0}) },
	} {
		res, grants := b.prepare(p)
		if len(grants) != 1 || grants[0].Page != 2 {
			t.Fatalf("granted %+v", grants)
		}
		b.ok(end(res.Store))
		b.wantHits(2, p)
	}
}

func TestLongerReplacesShorter(t *testing.T) {
	b := newBench(t, 10, 4, Config{})
	p := numbered(1, 4)
	// Two stores under way, the shorter commits first.
	short, _ := b.prepare(p[:64])
	long, _ := b.prepare(p)
	b.ok(b.e.CommitStore(me, short.Store, nil))
	b.wantHits(2, p)
	b.ok(b.e.CommitStore(me, long.Store, nil))
	b.wantHits(4, p)
	if s := b.e.Stats(); s.ReadySlots != 1 || s.Replaced != 1 {
		t.Fatalf("%+v", s)
	}
	// A leased shorter one stays readable until its release.
	q := numbered(2, 4)
	short, _ = b.prepare(q[:64])
	long, _ = b.prepare(q)
	b.ok(b.e.CommitStore(me, short.Store, nil))
	if n, err := b.e.Lookup(me, 1, 0, q); n != 2 || err != nil {
		t.Fatal(n, err)
	}
	b.ok(b.e.CommitStore(me, long.Store, nil))
	if s := b.e.Stats(); s.ReadySlots != 3 {
		t.Fatalf("%+v", s)
	}
	load, extents, err := b.e.PrepareLoad(me, me, 1, 0, 2, nil)
	if err != nil || len(extents) != 1 {
		t.Fatal(extents, err)
	}
	b.ok(b.e.Release(me, load, nil))
	if s := b.e.Stats(); s.ReadySlots != 2 {
		t.Fatalf("%+v", s)
	}
	b.wantHits(4, q)
}

func TestSharedPagesAreHandedOver(t *testing.T) {
	b := newBench(t, 3, 4, Config{})
	p := numbered(1, 2)
	var tails [][]byte
	for i := range 3 {
		tails = append(tails, join(p, numbered(uint64(10+i), 2)))
		b.store(tails[i])
	}
	// Evict them one by one; as long as one is left, the shared pages are found.
	for i := range 3 {
		b.wantHits(2, join(p, numbered(99, 2)))
		for _, tail := range tails[i:] {
			b.wantHits(4, tail)
		}
		for j := range i {
			b.wantHits(4, numbered(uint64(20+j), 4)) // these are used later than the tails
		}
		b.store(numbered(uint64(20+i), 4))
		want := 2
		if i == 2 {
			want = 0
		}
		b.wantHits(want, tails[i])
		if err := b.e.Check(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestPrefixOutlivesContinuation(t *testing.T) {
	b := newBench(t, 6, 1, Config{})
	a, c := numbered(1, 3), numbered(2, 3)
	b.store(a)
	b.store(c)
	b.wantHits(3, a)
	// c is the older: its end goes first, then what it continues.
	for i, want := range []struct{ a, c int }{{3, 2}, {3, 1}, {3, 0}} {
		b.store(numbered(uint64(10+i), 1))
		if n, err := b.e.Lookup(me, 1, 0, c); n != want.c || err != nil {
			t.Fatalf("after %d stores: %d, %v", i+1, n, err)
		}
		_ = b.e.Cancel(me, 1)
		b.wantHits(want.a, a)
		for j := range i + 1 {
			b.wantHits(1, numbered(uint64(10+j), 1))
		}
	}
	// A store does not evict what it continues: of four new pages behind a only those fit that need
	// no page of a.
	d := join(a, numbered(3, 9))
	res, grants := b.store(d)
	if res.Held != 3 || len(grants) != 3 || res.Shed != 6 {
		t.Fatalf("%+v, granted %d", res, len(grants))
	}
	b.wantHits(6, d)
}

func TestHandlesOfTheEnded(t *testing.T) {
	b := newBench(t, 4, 2, Config{LeaseDeadline: time.Second})
	p := numbered(1, 4)
	b.ok(b.e.AddOwner(2, b.sp))
	res, _ := b.prepare(p)
	b.is(b.e.CommitStore(2, res.Store, nil), tiers.ErrNotFound)
	b.is(b.e.AbortStore(2, res.Store), tiers.ErrNotFound)
	b.is(b.e.CommitStore(me, res.Store, []uint32{2}), tiers.ErrInvalid)
	b.is(b.e.Release(me, res.Store, nil), tiers.ErrNotFound)
	b.ok(b.e.CommitStore(me, res.Store, nil))
	b.is(b.e.CommitStore(me, res.Store, nil), tiers.ErrStale)
	b.is(b.e.AbortStore(me, res.Store), tiers.ErrStale)

	if n, err := b.e.Lookup(me, 5, 0, p); n != 4 || err != nil {
		t.Fatal(n, err)
	}
	_, _, err := b.e.PrepareLoad(2, me, 6, 0, 4, nil)
	b.is(err, tiers.ErrNotFound)
	_, _, err = b.e.PrepareLoad(2, me, 5, 0, 5, nil)
	b.is(err, tiers.ErrStale)
	_, _, err = b.e.PrepareLoad(2, me, 5, 0, 0, nil)
	b.is(err, tiers.ErrInvalid)
	b.ok(b.e.Trim(me, 5, 2))
	_, _, err = b.e.PrepareLoad(2, me, 5, 0, 4, nil)
	b.is(err, tiers.ErrStale)
	load, extents, err := b.e.PrepareLoad(2, me, 5, 3, 1, nil)
	b.ok(err)
	if len(extents) != 1 || extents[0].Page != 3 || extents[0].Pages != 1 ||
		extents[0].Offset%64 != 0 {
		t.Fatalf("%+v", extents)
	}
	_, _, err = b.e.PrepareLoad(2, me, 5, 3, 1, nil)
	b.is(err, tiers.ErrNotFound)
	// The deadline ran only until the load took over.
	b.now += int64(time.Hour)
	if n := b.e.Expire(); n != 0 {
		t.Fatalf("%d expired", n)
	}
	if s := b.e.Stats(); s.Leases != 1 {
		t.Fatalf("%+v", s)
	}
	b.is(b.e.Release(me, load, nil), tiers.ErrNotFound)
	b.is(b.e.Release(2, load, []uint32{1}), tiers.ErrInvalid)
	b.ok(b.e.Release(2, load, nil))
	b.is(b.e.Release(2, load, nil), tiers.ErrStale)

	if n, _ := b.e.Lookup(me, 5, 0, p); n != 4 {
		t.Fatal(n)
	}
	b.now += int64(time.Second)
	if n := b.e.Expire(); n != 1 {
		t.Fatalf("%d expired", n)
	}
	b.is(b.e.Cancel(me, 5), tiers.ErrNotFound)
	b.is(b.e.AddOwner(me, b.sp), tiers.ErrInvalid)
	b.is(b.e.AddOwner(9, 77), tiers.ErrNotFound)
}

func TestBadChunkIsDropped(t *testing.T) {
	b := newBench(t, 4, 2, Config{})
	p := numbered(1, 6)
	b.store(p)
	if n, _ := b.e.Lookup(me, 1, 0, p); n != 6 {
		t.Fatal(n)
	}
	if n, _ := b.e.Lookup(me, 2, 0, p); n != 6 {
		t.Fatal(n)
	}
	load, _, err := b.e.PrepareLoad(me, me, 1, 0, 6, nil)
	b.ok(err)
	b.ok(b.e.Release(me, load, []uint32{1, 1}))
	b.wantHits(2, p)
	_, _, err = b.e.PrepareLoad(me, me, 2, 0, 6, nil)
	b.is(err, tiers.ErrStale)
	b.ok(b.e.Cancel(me, 2))
	// Stored again, it joins the chain: what was behind it is found again.
	if res, grants := b.store(p); res.Held != 4 || len(grants) != 1 {
		t.Fatalf("%+v %+v", res, grants)
	}
	b.wantHits(6, p)
}

func TestClear(t *testing.T) {
	b := newBench(t, 2000, 2, Config{})
	other, err := b.e.OpenSpace(tiers.Fingerprint{2}, tiers.Geometry{PageBytes: 64,
		PagesPerChunk: 2, PageTokens: 16, DigestBytes: 32})
	b.ok(err)
	b.ok(b.e.AddOwner(2, other))
	p := numbered(1, 2500)
	b.store(p)
	if n, err := b.e.Lookup(2, 1, 0, p); n != 0 || err != nil {
		t.Fatal("another space's pages are found", n, err)
	}
	res, _, err := b.e.PrepareStore(2, 0, nil, p[:320], nil)
	b.ok(err)
	b.ok(b.e.CommitStore(2, res.Store, nil))
	if n, _ := b.e.Lookup(me, 1, 0, p[:320]); n != 10 {
		t.Fatal(n)
	}
	pin, pages, err := b.e.Pin(b.sp, p[:640])
	if err != nil || pages != 20 {
		t.Fatal(pages, err)
	}
	doomed, _ := b.prepare(numbered(2, 4))
	if n := b.e.ClearSpace(b.sp); n != 1250 {
		t.Fatalf("%d chunks cleared", n)
	}
	b.ok(b.e.CommitStore(me, doomed.Store, nil))
	b.wantHits(0, numbered(2, 4))
	b.wantHits(0, p)
	if s := b.e.Stats(); s.ReadySlots != 10+5 || s.LeasedSlots != 10 {
		t.Fatalf("%+v", s)
	}
	b.is(b.e.CloseSpace(b.sp), tiers.ErrBusy)
	b.ok(b.e.Cancel(me, 1))
	b.ok(b.e.Unpin(pin))
	b.is(b.e.Unpin(pin), tiers.ErrStale)
	b.is(b.e.Unpin(12345), tiers.ErrNotFound)
	if s := b.e.Stats(); s.ReadySlots != 5 {
		t.Fatalf("%+v", s)
	}
	if n, _ := b.e.Lookup(2, 1, 0, p[:320]); n != 10 {
		t.Fatal("another space was cleared")
	}
	b.e.RemoveOwner(me)
	b.ok(b.e.CloseSpace(b.sp))
	b.is(b.e.CloseSpace(b.sp), tiers.ErrNotFound)
}

func TestPinnedPrefixIsNotEvicted(t *testing.T) {
	b := newBench(t, 8, 1, Config{OwnerShare: 0.5})
	p := numbered(1, 4)
	b.store(p)
	pin, pages, err := b.e.Pin(b.sp, p)
	if err != nil || pages != 4 {
		t.Fatal(pages, err)
	}
	for i := range 50 {
		b.store(numbered(uint64(10+i), 4))
		b.wantHits(4, p)
		b.now += int64(time.Hour)
		b.e.Expire()
	}
	b.ok(b.e.Unpin(pin))
	for i := range 5 {
		b.store(numbered(uint64(100+i), 4))
	}
	b.wantHits(0, p)
}

// TestFrozenOwnerHasItsShare: whatever one session leases and never releases, another has the rest;
// and a prefix that many of its requests share counts once.
func TestFrozenOwnerHasItsShare(t *testing.T) {
	b := newBench(t, 20, 1, Config{OwnerShare: 0.5, MaxLookupsPerOwner: 1000})
	b.ok(b.e.AddOwner(2, b.sp))
	p := numbered(1, 8)
	b.store(p)
	for i := range 100 {
		if n, err := b.e.Lookup(2, uint64(i), 0, p); n != 8 || err != nil {
			t.Fatal(i, n, err)
		}
	}
	for i := range 30 {
		h := numbered(uint64(10+i), 1)
		b.store(h)
		if _, err := b.e.Lookup(2, uint64(1000+i), 0, h); err != nil {
			t.Fatal(err)
		}
		if _, _, err := b.e.PrepareStore(2, 0, nil, numbered(uint64(100+i), 3), nil); err != nil {
			t.Fatal(err)
		}
	}
	if s := b.e.Stats(); s.LeasedSlots+s.FillingSlots != 10 {
		t.Fatalf("%+v", s)
	}
	q := numbered(500, 10)
	if res, _ := b.store(q); res.Shed != 0 {
		t.Fatalf("%+v", res)
	}
	b.wantHits(10, q)
	b.e.RemoveOwner(2)
	if s := b.e.Stats(); s.LeasedSlots+s.FillingSlots+s.Leases != 0 {
		t.Fatalf("%+v", s)
	}
}

// TestFrozenOwners: owners that freeze with all that they can have leave some for the next ones,
// however many freeze, and it is theirs again when they thaw.
func TestFrozenOwners(t *testing.T) {
	const slots = 1000
	b := newBench(t, slots, 1, Config{OwnerShare: 0.5, JointShare: 0.75, MaxOwners: 100})
	for i := range uint64(slots / 100) {
		b.store(numbered(i, 100))
	}
	var frozen []Owner
	left := slots
	for round := range 4 {
		taken := 0
		for i := range Owner(2) { // each takes what it can get, to read and to write
			o := Owner(100) + Owner(10*round) + i
			b.ok(b.e.AddOwner(o, b.sp))
			p := numbered(uint64(2000+round-1), left/8)
			if round == 0 {
				p = numbered(0, 100)
			}
			n, err := b.e.Lookup(o, 1, 0, p)
			b.ok(err)
			if n > 0 {
				_, _, err := b.e.PrepareLoad(o, o, 1, 0, n, nil)
				b.ok(err)
			}
			res, _, err := b.e.PrepareStore(o, 0, nil, numbered(uint64(1000+10*round)+uint64(i),
				slots), nil)
			b.ok(err)
			if st, _ := b.e.Owner(o); st.Slots == 0 || st.Slots > left/2 ||
				res.Store != 0 != (st.Stores == 1) {
				t.Fatalf("round %d: owner %d has %+v of %d slots that are left", round, o, st, left)
			}
			frozen = append(frozen, o)
			b.ok(b.e.Check())
		}
		st := b.e.Stats()
		if taken = st.LeasedSlots + st.FillingSlots; taken > slots-left+left*3/4 ||
			taken < slots-left+left*3/4-2 {
			t.Fatalf("round %d: %d slots are taken, with %d left before", round, taken, left)
		}
		b.e.SetFrozen(frozen)
		st = b.e.Stats()
		if st.Frozen != len(frozen) || st.FrozenSlots != taken {
			t.Fatalf("round %d: %d owners have frozen with %d slots, want %d with %d", round,
				st.Frozen, st.FrozenSlots, len(frozen), taken)
		}
		left = slots - taken
		p := numbered(uint64(2000+round), max(1, left/8))
		if res, _ := b.store(p); res.Shed != 0 {
			t.Fatalf("round %d: %+v with %d slots that nobody has", round, res, left)
		}
		b.wantHits(max(1, left/8), p)
	}
	for _, o := range frozen[1:] {
		b.e.RemoveOwner(o)
	}
	if st := b.e.Stats(); st.Frozen != 1 || st.FrozenSlots != slots/2 {
		t.Fatalf("%d owners have frozen with %d slots, when all but the first have left", st.Frozen,
			st.FrozenSlots)
	}
	b.e.SetFrozen(nil)
	b.e.RemoveOwner(frozen[0])
	p := numbered(3000, slots/2)
	if res, _ := b.store(p); res.Shed != 0 {
		t.Fatalf("%+v with all free again", res)
	}
}

// TestFrozenOwnerGoesOn: an owner that was frozen has its whole share again as soon as it looks up,
// stores or loads, or a worker loads what it looked up.
func TestFrozenOwnerGoesOn(t *testing.T) {
	const slots, pages, worker = 10, 8, 2
	for name, goOn := range map[string]func(b *bench, p []byte){
		"looks up again": func(b *bench, p []byte) {
			b.ok(b.e.Cancel(me, 1))
			b.wantHits(pages, p)
		},
		"looks up something else": func(b *bench, p []byte) {
			b.wantHits(2, numbered(2, 2))
		},
		"stores": func(b *bench, p []byte) {
			b.ok(b.e.Cancel(me, 1))
			if res, _ := b.store(numbered(3, slots-1)); res.Shed != 0 {
				b.t.Errorf("%+v", res)
			}
		},
		"a worker loads": func(b *bench, p []byte) {
			b.ok(b.e.AddOwner(worker, b.sp))
			load, _, err := b.e.PrepareLoad(worker, me, 1, 0, pages, nil)
			b.ok(err)
			b.e.SetFrozen([]Owner{worker})
			b.wantHits(2, numbered(2, 2)) // what frozen owners leave
			if n, err := b.e.Lookup(me, 2, 0, numbered(2, 2)); n != 2 || err != nil {
				b.t.Errorf("%d pages hit: %v", n, err)
			}
			_, _, err = b.e.PrepareLoad(worker, me, 2, 0, 2, nil)
			b.ok(err)
			b.ok(b.e.Release(worker, load, nil))
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, slots, 1, Config{})
			p := numbered(1, pages)
			b.store(p)
			b.store(numbered(2, 2))
			if n, err := b.e.Lookup(me, 1, 0, p); n != pages || err != nil {
				t.Fatal(n, err)
			}
			b.e.SetFrozen([]Owner{me})
			if st := b.e.Stats(); st.Frozen != 1 || st.FrozenSlots != pages {
				t.Fatalf("%+v", st)
			}
			goOn(b, p)
			if st := b.e.Stats(); st.Frozen != 0 || st.FrozenSlots != 0 {
				t.Errorf("%d owners are frozen with %d slots", st.Frozen, st.FrozenSlots)
			}
			b.ok(b.e.Check())
		})
	}
}

// TestColdRegionChangesGeometry: at the arena's limit a new geometry gets the coldest region, not
// one in use; below it, it waits first.
func TestColdRegionChangesGeometry(t *testing.T) {
	for _, limit := range []int64{0, 1 << 20} {
		t.Run(fmt.Sprint(limit), func(t *testing.T) {
			b := newBench(t, 1000, 2, Config{ArenaLimitBytes: limit})
			b.ok(b.e.AddRegion(8, 1000*2*64))
			p := numbered(1, 2000)
			b.store(p)
			q := numbered(2, 1900)
			b.store(q)
			other, err := b.e.OpenSpace(tiers.Fingerprint{2}, tiers.Geometry{PageBytes: 100,
				PagesPerChunk: 3, PageTokens: 16, DigestBytes: 16})
			b.ok(err)
			b.ok(b.e.AddOwner(2, other))
			store := func() int {
				t.Helper()
				res, grants, err := b.e.PrepareStore(2, 0, nil, numbered(3, 30), nil)
				b.ok(err)
				if res.Store != 0 {
					b.ok(b.e.CommitStore(2, res.Store, nil))
				}
				for _, g := range grants {
					if g.Region != 7 || g.Offset%300 != 0 {
						t.Fatalf("granted %+v", g)
					}
				}
				b.ok(b.e.Check())
				return len(grants)
			}
			if n, _ := b.e.Lookup(me, 1, 0, q); n != 1900 {
				t.Fatal(n)
			}
			if limit > 0 {
				if n := store(); n != 0 || !b.e.Stats().WantRegion {
					t.Fatalf("%d granted before the arena could grow", n)
				}
				b.now += growPatience
			}
			if n := store(); n == 0 {
				t.Fatal("nothing granted")
			}
			b.wantHits(0, p)
			if n, _ := b.e.Lookup(me, 1, 0, q); n != 1900 {
				t.Fatal("the region in use was taken", n)
			}
			b.ok(b.e.Check())
		})
	}
}

// TestContinuationOutlivesItsRegion: a continuation whose prefix lay in a region that was carved
// anew must not be taken for that of what lies there now.
func TestContinuationOutlivesItsRegion(t *testing.T) {
	b := newBench(t, 2, 1, Config{})
	b.ok(b.e.AddRegion(8, 2*64))
	p := numbered(1, 4)
	b.store(p)
	if n, err := b.e.Lookup(me, 1, 2, p[64:]); n != 2 || err != nil {
		// the prefix is cold, its continuation is not
		t.Fatal(n, err)
	}
	b.ok(b.e.Cancel(me, 1))
	other, err := b.e.OpenSpace(tiers.Fingerprint{2}, tiers.Geometry{PageBytes: 32,
		PagesPerChunk: 2, PageTokens: 1, DigestBytes: 8})
	b.ok(err)
	b.ok(b.e.AddOwner(2, other))
	res, grants, err := b.e.PrepareStore(2, 0, nil, numbered(2, 1), nil)
	if err != nil || len(grants) != 2 || grants[0].Region != 7 {
		t.Fatal(grants, err)
	}
	b.ok(b.e.CommitStore(2, res.Store, nil))
	b.ok(b.e.Check())
	if n := b.e.ClearSpace(b.sp); n != 2 {
		t.Fatalf("%d chunks cleared", n)
	}
	b.ok(b.e.Check())
	if n, err := b.e.Lookup(2, 1, 0, numbered(2, 1)); n != 4 || err != nil {
		t.Fatal(n, err)
	}
}

// TestIndexGrowsInSteps: when records outgrow the index, no call moves more than a bounded number
// of entries, and all stay found.
func TestIndexGrowsInSteps(t *testing.T) {
	b := newBench(t, 5000, 1, Config{MaxPages: 5000})
	p := numbered(1, 5000)
	b.store(p)
	b.ok(b.e.AddRegion(8, 50000*64))
	q := numbered(2, 3)
	b.store(q)
	if !b.e.idx.migrating() {
		t.Fatal("the index does not grow")
	}
	calls := 0
	for ; b.e.idx.migrating(); calls++ {
		before := b.e.idx.old.used
		switch calls % 3 {
		case 0:
			b.wantHits(5000, p)
		case 1:
			b.store(numbered(uint64(100+calls), 2))
		case 2:
			b.wantHits(2, numbered(uint64(100+calls-1), 2))
		}
		if moved := before - b.e.idx.old.used; moved > 3*migrateStep {
			t.Fatalf("%d entries moved in one step", moved)
		}
		b.ok(b.e.Check())
	}
	if calls < 10 {
		t.Fatalf("it grew within %d calls", calls)
	}
	b.wantHits(5000, p)
	b.wantHits(3, q)
	b.e.Expire()
	if len(b.e.idx.garbage) != 0 {
		t.Fatal("the old table is still there")
	}
}

// TestFullDigestsAreCompared: with all hashes cut to two bits, digests that differ in their last
// bit alone still name different pages.
func TestFullDigestsAreCompared(t *testing.T) {
	for _, size := range []int{8, 16, 32} {
		e, err := New(Config{MinPageBytes: 1, OwnerShare: 1})
		if err != nil {
			t.Fatal(err)
		}
		defer e.Close()
		e.tagMask = 3 << 30
		b := &bench{t: t, e: e}
		b.ok(e.AddRegion(1, 1<<16))
		var owners []Owner
		for i := range 2 {
			id, err := e.OpenSpace(tiers.Fingerprint{byte(i)}, tiers.Geometry{PageBytes: 16,
				PagesPerChunk: 1, PageTokens: 1, DigestBytes: size})
			b.ok(err)
			b.ok(e.AddOwner(Owner(i), id))
			owners = append(owners, Owner(i))
		}
		digest := func(i, bit int) []byte {
			d := numbered(uint64(i), 1)[:size]
			d[bit/8] ^= 1 << (bit % 8)
			return d
		}
		for i := range 50 {
			res, _, err := e.PrepareStore(owners[0], 0, nil, digest(i, 0), nil)
			b.ok(err)
			b.ok(e.CommitStore(owners[0], res.Store, nil))
		}
		for i := range 50 {
			for bit := range 8 * size {
				want := 0
				if bit == 0 {
					want = 1
				}
				if n, err := e.Lookup(owners[0], 1, 0, digest(i, bit)); n != want || err != nil {
					t.Fatalf("digest %d of %d bytes with bit %d changed: %d pages, %v", i, size,
						bit, n, err)
				}
			}
			if n, err := e.Lookup(owners[1], 1, 0, digest(i, 0)); n != 0 || err != nil {
				t.Fatal("found in another space", n, err)
			}
		}
		b.ok(e.Check())
	}
}

func (e *Engine) work() uint64 {
	return e.idx.linkSteps + e.idx.steps
}

// TestManyContinuations counts the steps of every call while ten thousand continuations of one
// prompt come and go: they must not depend on how many there are. The prompt ends in the middle of
// a chunk, so that all share its first pages, or at its end, so that all continue one slot.
func TestManyContinuations(t *testing.T) {
	const n, ppc = 10_000, 16
	for _, shared := range []int{3 * ppc, 3*ppc + 9} {
		t.Run(fmt.Sprint(shared), func(t *testing.T) {
			b := newBench(t, n+100, ppc, Config{Seed: 5})
			p := numbered(1, shared)
			most := uint64(0)
			counted := func(what string, f func()) {
				t.Helper()
				before := b.e.work()
				f()
				if d := b.e.work() - before; d > 1000 {
					t.Fatalf("%s took %d steps", what, d)
				} else {
					most = max(most, d)
				}
			}
			tail := func(i int) []byte { return join(p, numbered(uint64(100+i), 20)) }
			for i := range n {
				counted("a store", func() { b.store(tail(i)) })
				if i%10 == 0 {
					counted("a lookup", func() { b.wantHits(shared, join(p, numbered(99, 20))) })
					counted("a lookup", func() { b.wantHits(shared+20, tail(i)) })
				}
			}
			if s := b.e.Stats(); s.Evictions == 0 {
				t.Fatalf("%+v", s)
			}
			for i := range n {
				counted("an eviction", func() { b.store(numbered(uint64(1_000_000+i), ppc)) })
			}
			b.wantHits(0, tail(n - 1)[32*3*ppc:])
			t.Logf("at most %d steps", most)
		})
	}
}

// TestLongLookupsEndInParts: what a long lookup held is freed in parts, however it ends, and its
// name and its deadline are gone at once.
func TestLongLookupsEndInParts(t *testing.T) {
	const chunks, ppc, part = 40, 2, 8
	for name, end := range map[string]func(b *bench){
		"cancel": func(b *bench) { b.ok(b.e.Cancel(me, 7)) },
		"another": func(b *bench) {
			_, err := b.e.Lookup(me, 7, 0, numbered(2, 1))
			b.ok(
				err)
		},
		"its deadline": func(b *bench) { b.now += int64(time.Hour); b.e.Expire() },
		"trim":         func(b *bench) { b.ok(b.e.Trim(me, 7, chunks*ppc)) },
		"most trimmed": func(b *bench) {
			b.ok(b.e.Trim(me, 7, (chunks-3)*ppc))
			b.ok(b.e.Cancel(me,
				7))
		},
		"a load": func(b *bench) {
			load, _, err := b.e.PrepareLoad(me, me, 7, 0, 3, nil)
			b.ok(err)
			b.ok(b.e.Release(me, load, nil))
		},
		"its owner": func(b *bench) { b.e.RemoveOwner(me); b.ok(b.e.AddOwner(me, b.sp)) },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, chunks, ppc, Config{})
			b.e.leases.endSlice = part
			p := numbered(1, chunks*ppc)
			b.store(p)
			if n, err := b.e.Lookup(me, 7, 0, p); n != chunks*ppc || err != nil {
				t.Fatal(n, err)
			}
			end(b)
			if st := b.e.Stats(); st.OpenLookups != 0 || (st.Leases > 0) != b.e.Ending() {
				t.Fatalf("%d lookups, %d leases, more to do: %v", st.OpenLookups, st.Leases,
					b.e.Ending())
			}
			b.is(b.e.Cancel(me, 7), tiers.ErrNotFound)
			for before := b.e.Stats().Leases; before > 0; {
				b.ok(b.e.Check())
				more := b.e.EndSome()
				st := b.e.Stats()
				if more != (st.Leases > 0) || more != b.e.Ending() || before-st.Leases > part ||
					st.Leases >= before {
					t.Fatalf("%d of %d leases are left, more to do: %v", st.Leases, before, more)
				}
				before = st.Leases
			}
			if b.e.EndSome() {
				t.Error("there is always more to do")
			}
			b.wantHits(chunks*ppc, p)
		})
	}
}

func TestNothingIsAllocated(t *testing.T) {
	for _, name := range policy.Names() {
		t.Run(name, func(t *testing.T) { nothingIsAllocated(t, Config{Policy: name}) })
	}
	t.Run("with tiers", func(t *testing.T) {
		nothingIsAllocated(t, Config{Tiers: []TierAdmission{{Admit: AdmitStored},
			{Admit: AdmitReused}, {Admit: AdmitEvicted}}})
	})
}

func nothingIsAllocated(t *testing.T, cfg Config) {
	for _, ppc := range []int{1, 16} {
		b := newBench(t, 4096/ppc, ppc, cfg)
		var prompts [][]byte
		for i := range 300 { // none is stored twice: some policies would keep it
			prompts = append(prompts, numbered(uint64(i), 1000))
		}
		grants := make([]Grant, 0, 2000)
		i := 0
		store := func() {
			h := prompts[i%len(prompts)]
			i++
			res, out, err := b.e.PrepareStore(me, 0, nil, h, grants[:0])
			if err != nil || res.Store == 0 || len(out) == 0 {
				t.Fatal(res, err)
			}
			b.ok(b.e.CommitStore(me, res.Store, nil))
		}
		lookup := func() {
			h := prompts[(i-1)%len(prompts)]
			if n, err := b.e.Lookup(me, 1, 0, h); n != 1000 || err != nil {
				t.Fatal(n, err)
			}
			load, _, err := b.e.PrepareLoad(me, me, 1, 0, 1000, grants[:0])
			b.ok(err)
			b.ok(b.e.Release(me, load, nil))
			for b.e.EndSome() {
			}
		}
		for range 20 { // until it evicts, and buffers are there
			store()
			lookup()
		}
		if n := testing.AllocsPerRun(40, store); n != 0 {
			t.Errorf("%d pages a chunk: a store of 1,000 pages allocates %v times", ppc, n)
		}
		if n := testing.AllocsPerRun(40, lookup); n != 0 {
			t.Errorf("%d pages a chunk: a lookup and load of 1,000 pages allocate %v times", ppc, n)
		}
	}
}

// TestConcurrentSessions lets sessions of several spaces and geometries use one engine at once,
// with the arena's bytes: under the race detector it also shows that nobody may read what another
// may write.
func TestConcurrentSessions(t *testing.T) {
	const slots = 60
	e, err := New(Config{MinPageBytes: 1, MaxSpaces: 4, LeaseDeadline: 2 * time.Millisecond,
		MaxPages: 64, ArenaLimitBytes: 1, PartialDelay: time.Microsecond,
		Tiers: []TierAdmission{{Admit: AdmitStored}, {Admit: AdmitReused}, {Admit: AdmitEvicted}}})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	arena := map[uint32][]byte{}
	for i := range uint32(3) {
		arena[i] = make([]byte, slots*4*32)
		if err := e.AddRegion(i, int64(len(arena[i]))); err != nil {
			t.Fatal(err)
		}
	}
	var spaces []*modelSpace
	for i := range 3 {
		s := &modelSpace{fp: tiers.FingerprintOf([]byte{byte(i)}), g: tiers.Geometry{PageBytes: 32,
			PagesPerChunk: 4, PageTokens: 1, DigestBytes: 32}}
		if i == 2 {
			s.g = tiers.Geometry{PageBytes: 24, PagesPerChunk: 3, PageTokens: 1, DigestBytes: 16}
		}
		if s.id, err = e.OpenSpace(s.fp, s.g); err != nil {
			t.Fatal(err)
		}
		spaces = append(spaces, s)
	}
	var wg, background sync.WaitGroup
	stop := make(chan struct{})
	background.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			e.Expire()
			e.Stats()
			if i%5 == 0 {
				e.ClearSpace(spaces[i/5%3].id)
			}
			if err := e.Check(); err != nil {
				t.Error(err)
				return
			}
			time.Sleep(time.Millisecond)
		}
	})
	var promoted atomic.Int64
	var cascaded [3]atomic.Int64
	for tier := range cascaded {
		background.Go(func() {
			w := &world{t: t, arena: arena}
			var buf []byte
			var items []CascadeItem
			for {
				select {
				case <-stop:
					return
				default:
				}
				items, buf = e.NextCascades(tier, 8, buf, items[:0])
				for _, x := range items {
					s := spaces[slices.IndexFunc(spaces,
						func(s *modelSpace) bool { return s.id == x.Space })]
					want := make([]byte, s.g.PageBytes)
					for j := range x.Pages {
						pattern(want, s.fp, x.Hashes[j*s.g.DigestBytes:(j+1)*s.g.DigestBytes])
						if !slices.Equal(w.page(s, Extent{Region: x.Region, Offset: x.Offset}, j),
							want) {
							t.Errorf("tier %d is given the wrong bytes of page %d", tier, x.First+j)
							return
						}
					}
					e.EndCascade(x.Handle, true)
					cascaded[tier].Add(1)
				}
				if len(items) == 0 {
					time.Sleep(50 * time.Microsecond)
				}
			}
		})
	}
	session := func(i int) {
		w := &world{t: t, seed: uint64(i), rng: rand.New(rand.NewPCG(uint64(i), 9)), e: e,
			arena: arena, alphabet: 2, depth: 30}
		s := spaces[i%3]
		me := Owner(i)
		for w.step = range 1500 {
			if w.step%200 == 0 {
				e.RemoveOwner(me)
				if err := e.AddOwner(me, s.id); err != nil {
					t.Error(err)
					return
				}
			}
			p := w.prefix()
			size := s.g.DigestBytes
			res, grants, err := e.PrepareStore(me, 0, nil, p.digests(0, len(p), size), nil)
			if err != nil {
				t.Error(err)
				return
			}
			for _, g := range grants {
				for j := range int(g.Pages) {
					pattern(w.page(s, g, j), s.fp, p.digests(int(g.Page)+j, int(g.Page)+j+1, size))
				}
			}
			if res.Store != 0 {
				if err := e.CommitStore(me, res.Store, nil); err != nil {
					t.Error(err)
					return
				}
			}
			p = w.prefix()
			n, err := e.Lookup(me, 1, 0, p.digests(0, len(p), size))
			if err != nil {
				t.Error(err)
				return
			}
			if from := n / s.g.PagesPerChunk * s.g.PagesPerChunk; n < len(p) && w.chance(2) {
				// A tier that has everything.
				out, err := e.PreparePromotion(me, 1, PromotionRun{
					FirstPage: from, Hashes: p.digests(from, len(p), size),
					Have: slices.Repeat([]uint16{99}, len(p)),
				}, nil)
				if err != nil && !errors.Is(err, tiers.ErrStale) { // it has expired
					t.Error(err)
					return
				}
				for _, c := range out {
					if c.State != PromotionGranted {
						continue
					}
					for j := range c.Pages {
						page := from + c.Chunk*s.g.PagesPerChunk + j
						pattern(w.page(s, Extent{Region: c.Region, Offset: c.Offset}, j), s.fp,
							p.digests(page, page+1, size))
					}
					if err := e.FinishPromotion(c.Promotion, true, 0); err != nil {
						t.Error(err)
						return
					}
					promoted.Add(1)
				}
				if n, err = e.SettleLookup(me, 1, len(p)); errors.Is(err, tiers.ErrNotFound) {
					n = 0
				} else if err != nil {
					t.Error(err)
					return
				}
			}
			if n == 0 {
				continue
			}
			load, extents, err := e.PrepareLoad(me, me, 1, 0, n, nil)
			if errors.Is(err, tiers.ErrStale) || errors.Is(err, tiers.ErrNotFound) {
				continue // cleared or expired meanwhile
			}
			if err != nil {
				t.Error(err)
				return
			}
			want := make([]byte, s.g.PageBytes)
			for _, ex := range extents {
				for j := range int(ex.Pages) {
					pattern(want, s.fp, p.digests(int(ex.Page)+j, int(ex.Page)+j+1, size))
					if !slices.Equal(w.page(s, ex, j), want) {
						t.Errorf("FALSE HIT: session %d step %d", i, w.step)
						return
					}
				}
			}
			if err := e.Release(me, load, nil); err != nil {
				t.Error(err)
				return
			}
		}
		e.RemoveOwner(me)
	}
	idle := func() bool {
		return promoted.Load() == 0 || cascaded[0].Load() == 0 || cascaded[1].Load() == 0 ||
			cascaded[2].Load() == 0
	}
	for round := 0; round == 0 || round < 50 && idle() && !t.Failed(); round++ {
		// again if those in the background have not come to their turn
		for i := range 6 {
			wg.Go(func() { session(i) })
		}
		wg.Wait()
	}
	close(stop)
	background.Wait()
	if err := e.Check(); err != nil {
		t.Fatal(err)
	}
	s := e.Stats()
	if s.Leases+s.LeasedSlots+s.FillingSlots != 0 || s.FreeSlots+s.ReadySlots != s.Slots {
		t.Fatalf("at the end: %+v", s)
	}
	if idle() {
		t.Errorf("%d chunks were promoted, %d, %d and %d cascaded", promoted.Load(),
			cascaded[0].Load(), cascaded[1].Load(), cascaded[2].Load())
	}
	t.Logf("%+v", s)
}
