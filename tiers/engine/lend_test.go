package engine

import (
	"testing"

	"lookaside/tiers"
)

const them = Owner(2)

func everywhere(uint32) bool { return true }

// newLender is a bench whose space another sidecar uses.
func newLender(t *testing.T, slots, ppc int, cfg Config) *bench {
	b := newBench(t, slots, ppc, cfg)
	g, err := b.e.AddLender(them, tiers.Fingerprint{1})
	b.ok(err)
	if g.PagesPerChunk != ppc {
		t.Fatalf("geometry %+v", g)
	}
	return b
}

// TestLendEnds: the last page of each chunk tells all of it.
func TestLendEnds(t *testing.T) {
	b := newLender(t, 8, 4, Config{})
	hashes := numbered(1, 16)
	ends := func(pages ...int) (d []byte) {
		for _, p := range pages {
			d = append(d, hashes[p*32:(p+1)*32]...)
		}
		return d
	}
	_, grants := b.store(hashes[:14*32])
	for _, c := range []struct {
		first, n    int
		ends        []byte
		want        int
		extents     int
		more, wrong bool
	}{
		{0, 14, ends(3, 7, 11, 13), 14, 4, false, false},
		{4, 8, ends(7, 11), 8, 2, false, false},
		{4, 6, ends(7, 9), 6, 2, false, false},
		// less of the last is held, but who knows which pages that is to be
		{0, 16, ends(3, 7, 11, 15), 12, 3, false, false},
		// another page of the chunk is not its last
		{0, 14, ends(3, 6, 11, 13), 4, 1, false, false},
		{0, 14, ends(3, 11, 7, 13), 4, 1, false, false},
		{0, 4, ends(15), 0, 0, false, false},
		{2, 2, ends(3), 0, 0, false, true},
		{0, 14, ends(3, 7, 11), 0, 0, false, true},
		{0, 14, ends(3, 7, 11, 13)[:100], 0, 0, false, true},
		{0, 0, nil, 0, 0, false, true},
		{-4, 4, ends(3), 0, 0, false, true},
		{1 << 30, 4, ends(3), 0, 0, false, true},
	} {
		loan, pages, more, extents, err := b.e.LendEnds(them, c.first, c.n, c.ends, everywhere, nil)
		if c.wrong {
			b.is(err, tiers.ErrInvalid)
			continue
		}
		b.ok(err)
		if pages != c.want || len(extents) != c.extents || more != c.more {
			t.Fatalf("%+v: %d pages, more %v, %+v", c, pages, more, extents)
		}
		for i, x := range extents {
			if x.Offset != grants[c.first/4+i].Offset || int(x.Page) != c.first+4*i ||
				int(x.Pages) != min(4, pages-4*i) {
				t.Fatalf("%+v: extent %d is %+v", c, i, x)
			}
		}
		b.ok(b.e.Check())
		if loan != 0 {
			_, err = b.e.EndLoan(them, loan, nil, false)
			b.ok(err)
		}
	}
	// What is out of sight is there.
	if _, pages, more, _, err := b.e.LendEnds(them, 0, 14, ends(3, 7, 11, 13),
		func(uint32) bool { return false }, nil); pages != 0 || !more || err != nil {
		t.Fatal(pages, more, err)
	}
	b.ok(b.e.Check())
}

func TestLend(t *testing.T) {
	b := newLender(t, 8, 4, Config{})
	_, err := b.e.AddLender(3, tiers.Fingerprint{9})
	b.is(err, tiers.ErrNotFound)
	hashes := numbered(1, 14)
	_, grants := b.store(hashes[:10*32])
	loan, pages, more, extents, err := b.e.Lend(them, 2, hashes[2*32:], everywhere, nil)
	b.ok(err)
	if pages != 8 || more || len(extents) != 3 {
		t.Fatalf("%d pages, more %v, %+v", pages, more, extents)
	}
	for i, want := range []Extent{
		{2, 2, 7, grants[0].Offset + 2*64}, {4, 4, 7, grants[1].Offset},
		{8, 2, 7, grants[2].Offset},
	} {
		if extents[i] != want {
			t.Fatalf("extent %d is %+v, want %+v", i, extents[i], want)
		}
	}
	b.ok(b.e.Check())
	if st := b.e.Stats(); st.OpenLoans != 1 || st.OpenLoads != 0 || st.LeasedSlots != 3 ||
		st.LentPages != 8 {
		t.Fatalf("%+v", st)
	}

	// What is lent stays where it is, whatever room is wanted; what is given back does not.
	ended, err := b.e.EndLoan(them, loan, []uint32{1}, false)
	b.ok(err)
	if ended {
		t.Fatal("a loan with two slots left ended")
	}
	b.ok(b.e.Check())
	_, err = b.e.EndLoan(them, loan, []uint32{0, 3}, false)
	b.is(err, tiers.ErrInvalid)
	_, err = b.e.EndLoan(me, loan, nil, false)
	b.is(err, tiers.ErrNotFound)
	for i := range uint64(8) {
		b.store(numbered(100+i, 4))
	}
	if st := b.e.Stats(); st.LeasedSlots != 2 {
		t.Fatalf("%+v", st)
	}
	b.wantHits(4, hashes[:4*32]) // the first is leased, the second was the last of what is not
	if _, err = b.e.EndLoan(them, loan, []uint32{1, 2}, false); err != nil {
		t.Fatal(err)
	}
	if ended, err = b.e.EndLoan(them, loan, nil, true); err != nil || !ended {
		t.Fatalf("ended %v, %v", ended, err)
	}
	b.wantHits(0, hashes[:4*32]) // it was bad
	_, err = b.e.EndLoan(them, loan, nil, false)
	b.is(err, tiers.ErrStale)
	if st := b.e.Stats(); st.OpenLoans != 0 || st.Leases != 0 || st.Bad != 1 {
		t.Fatalf("%+v", st)
	}
}

func TestLendOnlyWhatIsSeen(t *testing.T) {
	b := newLender(t, 2, 2, Config{})
	hashes := numbered(1, 8)
	b.store(hashes[:4*32])
	b.ok(b.e.AddRegion(8, 2*2*64))
	b.store(hashes)
	seen := map[uint32]bool{7: true}
	loan, pages, more, extents, err := b.e.Lend(them, 0, hashes,
		func(r uint32) bool { return seen[r] }, nil)
	b.ok(err)
	if pages != 4 || !more || len(extents) != 2 || loan == 0 {
		t.Fatalf("%d pages, more %v, %+v", pages, more, extents)
	}
	b.ok(b.e.Check())
	loan, pages, more, extents, err = b.e.Lend(them, 4, hashes[4*32:],
		func(uint32) bool { return false }, nil)
	b.ok(err)
	if pages != 0 || !more || len(extents) != 0 || loan != 0 {
		t.Fatalf("%d pages, more %v, %+v", pages, more, extents)
	}
	if st := b.e.Stats(); st.Leases != 2 {
		t.Fatalf("%+v", st)
	}
	b.e.RemoveOwner(them)
	if st := b.e.Stats(); st.Leases != 0 || st.OpenLoans != 0 {
		t.Fatalf("%+v", st)
	}
}

func TestLendWithinItsShare(t *testing.T) {
	b := newLender(t, 8, 1, Config{OwnerShare: 0.5, MaxLookupsPerOwner: 2})
	hashes := numbered(1, 4)
	for i := range uint64(2) {
		b.store(numbered(1+i, 4))
	}
	_, pages, more, _, err := b.e.Lend(them, 0, hashes[:3*32], everywhere, nil)
	b.ok(err)
	if pages != 3 || more {
		t.Fatalf("%d pages, more %v", pages, more)
	}
	loan, pages, more, _, err := b.e.Lend(them, 0, numbered(2, 4), everywhere, nil)
	b.ok(err)
	if pages != 1 || !more {
		t.Fatalf("%d pages, more %v", pages, more)
	}
	_, _, _, _, err = b.e.Lend(them, 0, hashes, everywhere, nil)
	b.is(err, tiers.ErrBusy)
	if _, err = b.e.EndLoan(them, loan, nil, false); err != nil {
		t.Fatal(err)
	}
	// A partly returned loan of an owner that leaves.
	loan, _, _, _, err = b.e.Lend(them, 0, hashes, everywhere, nil)
	b.ok(err)
	_, err = b.e.EndLoan(them, loan, []uint32{2}, false)
	b.ok(err)
	b.ok(b.e.Check())
	b.e.RemoveOwner(them)
	if st := b.e.Stats(); st.Leases != 0 {
		t.Fatalf("%+v", st)
	}
}

// What is touched is used: it outlives what was not.
func TestTouch(t *testing.T) {
	b := newLender(t, 3, 1, Config{})
	for i := range uint64(3) {
		b.store(numbered(1+i, 1))
	}
	pages, _, err := b.e.Touch(them, 0, numbered(1, 2))
	b.ok(err)
	if st := b.e.Stats(); pages != 1 || st.Leases != 0 {
		t.Fatalf("%d pages, %+v", pages, st)
	}
	b.store(numbered(9, 1))
	b.wantHits(1, numbered(1, 1))
	b.wantHits(0, numbered(2, 1))
	loan, _, _, _, err := b.e.Lend(them, 0, numbered(3, 1), everywhere, nil)
	b.ok(err)
	_, err = b.e.EndLoan(them, loan, nil, false)
	b.ok(err)
	b.store(numbered(10, 1))
	b.wantHits(1, numbered(3, 1))
}
