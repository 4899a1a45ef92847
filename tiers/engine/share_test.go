package engine

import (
	"testing"

	"lookaside/tiers"
)

// TestSharesMakeOnePrefix has two owners store every other chunk, committed in either order: what
// is continued must outlive its continuation as ever.
func TestSharesMakeOnePrefix(t *testing.T) {
	const other = Owner(2)
	for _, first := range []Owner{me, other} {
		b := newBench(t, 6, 1, Config{})
		b.ok(b.e.AddOwner(other, b.sp))
		p := numbered(1, 6)
		even, odd := b.share(me, p, Share{2, 0}), b.share(other, p, Share{2, 1})
		if even.Held+odd.Held+even.Shed+odd.Shed != 0 {
			t.Fatalf("%+v and %+v of an empty arena of 6", even, odd)
		}
		commit := map[Owner]uint64{me: even.Store, other: odd.Store}
		b.ok(b.e.CommitStore(first, commit[first], nil))
		if first == me {
			b.wantHits(1, p)
		} else {
			b.wantHits(0, p)
		}
		b.ok(b.e.CommitStore(me+other-first, commit[me+other-first], nil))
		b.wantHits(6, p)
		// Each new page costs the last of them, whoever stored it.
		for i := range 6 {
			b.store(numbered(uint64(10+i), 1))
			if n, err := b.e.Lookup(other, 1, 0, p); n != 5-i || err != nil {
				t.Fatalf("committed first by %d: %d pages after %d more, %v", first, n, i+1, err)
			}
			_ = b.e.Cancel(other, 1)
			for j := range i + 1 {
				b.wantHits(1, numbered(uint64(10+j), 1))
			}
		}
	}
}

// TestLostShareIsMissed has the other owner die, and then the chunks that it had be stored by
// whoever comes.
func TestLostShareIsMissed(t *testing.T) {
	const other = Owner(2)
	b := newBench(t, 8, 1, Config{})
	b.ok(b.e.AddOwner(other, b.sp))
	p := numbered(1, 6)
	mine := b.share(me, p, Share{2, 0})
	b.share(other, p, Share{2, 1})
	b.ok(b.e.CommitStore(me, mine.Store, nil))
	b.e.RemoveOwner(other)
	b.wantHits(1, p)
	if res := b.share(me, p, Share{2, 0}); res.Held != 3 || res.Store != 0 {
		t.Errorf("%+v of what is held", res)
	}
	res, grants := b.store(p)
	if res.Held != 3 || len(grants) != 3 {
		t.Fatalf("%+v, granted %d", res, len(grants))
	}
	b.wantHits(6, p)
}

// TestLookupOfSeveralLoads has a lookup be taken over by three loads, one of which finds a chunk
// bad.
func TestLookupOfSeveralLoads(t *testing.T) {
	b := newBench(t, 8, 2, Config{LeaseDeadline: 100})
	const scheduler = Owner(9)
	workers := []Owner{2, 3, 4}
	b.ok(b.e.AddOwner(scheduler, b.sp))
	b.ok(b.e.SetTakers(scheduler, len(workers)))
	for _, w := range workers {
		b.ok(b.e.AddOwner(w, b.sp))
	}
	p := numbered(1, 6)
	b.store(p)
	ask := func() {
		t.Helper()
		if n, err := b.e.Lookup(scheduler, 1, 0, p); n != 6 || err != nil {
			t.Fatalf("%d pages hit, %v", n, err)
		}
	}
	load := func(w Owner, want error) uint64 {
		t.Helper()
		h, extents, err := b.e.PrepareLoad(w, scheduler, 1, 1, 4, nil)
		b.is(err, want)
		if err == nil && len(extents) != 3 {
			t.Fatalf("%+v", extents)
		}
		return h
	}
	ask()
	loads := []uint64{load(2, nil), load(3, nil), load(4, nil)}
	b.is(b.e.Cancel(scheduler, 1), tiers.ErrNotFound)
	for i, w := range workers {
		b.ok(b.e.Release(w, loads[i], nil))
	}
	if st := b.e.Stats(); st.Leases != 0 || st.OpenLookups != 0 {
		t.Fatalf("%d leases, %d lookups are left", st.Leases, st.OpenLookups)
	}

	// What one finds bad the next are not given.
	ask()
	b.ok(b.e.Release(2, load(2, nil), []uint32{1}))
	load(3, tiers.ErrStale)
	b.ok(b.e.Cancel(scheduler, 1))

	// A worker that is gone costs no more than the lookup's deadline.
	b.store(p)
	ask()
	b.ok(b.e.Release(2, load(2, nil), nil))
	b.now += 101
	b.e.Expire()
	load(3, tiers.ErrNotFound)
	if st := b.e.Stats(); st.Leases != 0 || st.OpenLookups != 0 {
		t.Fatalf("%d leases, %d lookups are left", st.Leases, st.OpenLookups)
	}
}
