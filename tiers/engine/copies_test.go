package engine

import (
	"slices"
	"testing"
)

// read looks pages up, which must all hit, and loads them; it returns the extents, which are
// released.
func (b *bench) read(first int, hashes []byte) []Extent {
	b.t.Helper()
	n := len(hashes) / 32
	if got, err := b.e.Lookup(me, 77, first, hashes); got != n || err != nil {
		b.t.Fatalf("%d of %d pages hit: %v", got, n, err)
	}
	load, ex, err := b.e.PrepareLoad(me, me, 77, first, n, nil)
	b.ok(err)
	b.ok(b.e.Release(me, load, nil))
	b.ok(b.e.Check())
	return ex
}

// nextCopy is the copy that begins next, of some pages.
func (b *bench) nextCopy(page, pages int) Copy {
	b.t.Helper()
	c, ok := b.e.NextCopy()
	if !ok || c.From.Region != 77 || c.To.Region != 7 || int(c.From.Page) != page ||
		int(c.To.Page) != page || int(c.From.Pages) != pages || int(c.To.Pages) != pages {
		b.t.Fatalf("%+v, %v; want pages %d to %d", c, ok, page, page+pages-1)
	}
	b.ok(b.e.Check())
	return c
}

func (b *bench) noCopy() {
	b.t.Helper()
	if c, ok := b.e.NextCopy(); ok {
		b.t.Fatalf("%+v is to be copied", c)
	}
	b.ok(b.e.Check())
}

// own returns which extents lie in the arena.
func own(ex []Extent) (own []bool) {
	for _, x := range ex {
		own = append(own, x.Region == 7)
	}
	return own
}

// TestCopyAfter: a chunk that has been loaded so often from where a peer lent it, also by way of
// several loans, is copied, and is from then on as good as stored: it can be found without a loan,
// followers get it and what comes before, and it goes to tiers.
func TestCopyAfter(t *testing.T) {
	rung := map[Work]int{}
	b := newBench(t, 10, 4, Config{ForeignSlots: 8, CopyAfter: 3, JournalBytes: minJournalBytes,
		Tiers: []TierAdmission{{}, {Admit: AdmitReused}}, Wake: func(w Work) { rung[w]++ }})
	p := numbered(1, 10) // two chunks and a half
	f, err := b.e.Follow(b.sp)
	b.ok(err)
	defer f.Close()
	b.followed(&follower{f: f})

	b.lend(1, 0, p, 5)
	b.settle(1, 100, 10)
	b.ok(b.e.Cancel(me, 1)) // a lookup without a load is not a use
	for range 2 {
		b.read(0, p)
	}
	b.e.DropPeer(5)
	if len(b.e.TakeReturns(nil)) != 3 || rung[WorkCopies] != 0 {
		t.Fatal(rung)
	}
	b.noCopy()
	b.lend(1, 0, p[:8*32], 6)
	b.settle(1, 100, 8)
	b.ok(b.e.Cancel(me, 1))
	if ex := b.read(2, p[2*32:8*32]); rung[WorkCopies] != 1 || slices.Contains(own(ex), true) {
		t.Fatal(rung, ex)
	}
	// While it is copied all goes on.
	c := b.nextCopy(0, 4)
	if ex := b.read(0, p[:8*32]); slices.Contains(own(ex), true) {
		t.Fatal(ex)
	}
	if n, err := b.e.Lookup(me, 5, 0, p[:8*32]); n != 8 || err != nil {
		t.Fatal(n, err)
	}
	if !b.e.EndCopy(c.Handle, true) || b.e.EndCopy(c.Handle, true) {
		t.Fatal("the copy has not ended once")
	}
	b.ok(b.e.Check())
	c = b.nextCopy(4, 4)
	b.returns() // a lookup has the first, and the second
	if !b.e.EndCopy(c.Handle, true) {
		t.Fatal("not copied")
	}
	b.noCopy()
	load, ex, err := b.e.PrepareLoad(me, me, 5, 0, 8, nil)
	if b.ok(err); slices.Contains(own(ex), true) {
		t.Fatalf("%+v: a lookup reads where it has leased", ex)
	}
	if got := b.read(0, p[:8*32]); slices.Contains(own(got), false) {
		t.Fatalf("%+v: what the arena holds is read elsewhere", got)
	}
	b.returns()
	b.ok(b.e.Release(me, load, nil))
	if n := len(b.e.TakeReturns(nil)); n != 2 {
		t.Fatalf("%d loans are returned", n)
	}
	b.wantHits(8, p)

	batch, _, err := f.Next(100, nil, nil)
	b.ok(err)
	if ev := batch.Events; len(ev) != 2 || ev[0].First != 0 || ev[1].First != 4 ||
		!slices.Equal(ev[1].Prev, p[3*32:4*32]) || !slices.Equal(ev[1].Hashes, p[4*32:8*32]) {
		t.Fatalf("%+v", ev)
	}
	for tier := range 2 {
		items, _ := b.e.NextCascades(tier, 10, nil, nil)
		if len(items) != 2 || items[1].First != 4 || !slices.Equal(items[1].Prev, p[3*32:4*32]) {
			t.Fatalf("tier %d is given %+v", tier, items)
		}
		for _, i := range items {
			b.e.EndCascade(i.Handle, true)
		}
	}
	if s := b.e.Stats(); s.CopiedChunks != 2 || s.CopiedPages != 8 || s.CopiesFailed != 0 ||
		s.Pages != 8 || s.ForeignUsed != 0 || s.Promotions+s.StoredPages != 0 {
		t.Fatalf("%+v", s)
	}

	// What is not leased is returned at once, and what has been copied is read anew as often before
	// it is copied again.
	b.e.ClearSpace(b.sp)
	b.lend(1, 0, p, 7)
	b.settle(1, 100, 10)
	b.ok(b.e.Cancel(me, 1))
	b.read(0, p) // the end for the third time, what comes before it for the first
	b.noCopy()
	b.read(8, p[8*32:])
	c = b.nextCopy(8, 2)
	b.noCopy()
	b.returns()
	if !b.e.EndCopy(c.Handle, true) {
		t.Fatal("not copied")
	}
	b.returns(Return{Handle: 7<<32 | 2})
	if ex := b.read(0, p); !slices.Equal(own(ex), []bool{false, false, true}) {
		t.Fatalf("%+v", ex)
	}
}

// TestCopyOncePerLookup: the loads of several ranks that take one lookup over are one use.
func TestCopyOncePerLookup(t *testing.T) {
	b := newBench(t, 10, 4, Config{ForeignSlots: 8, CopyAfter: 2})
	p := numbered(1, 4)
	b.ok(b.e.SetTakers(me, 2))
	b.lend(1, 0, p, 5)
	b.settle(1, 100, 4)
	for i := range 3 {
		load, _, err := b.e.PrepareLoad(me, me, 1, 0, 4, nil)
		b.ok(err)
		b.ok(b.e.Release(me, load, nil))
		if i == 1 {
			if n, err := b.e.Lookup(me, 1, 0, p); n != 4 || err != nil {
				t.Fatal(n, err)
			}
		}
		b.noCopy()
	}
	load, _, err := b.e.PrepareLoad(me, me, 1, 0, 4, nil)
	b.ok(err)
	b.ok(b.e.Release(me, load, nil))
	if !b.e.EndCopy(b.nextCopy(0, 4).Handle, true) {
		t.Fatal("not copied")
	}
}

// TestCopyGivenUp: whatever happens meanwhile, a copy that is not to be leaves nothing behind, and
// the chunk is due again at its next load.
func TestCopyGivenUp(t *testing.T) {
	for name, c := range map[string]struct {
		meanwhile func(b *bench, p []byte)
		failed    uint64
		hits      int
	}{
		"bytes cannot be read": {func(*bench, []byte) {}, 1, 8},
		"the peer goes":        {func(b *bench, _ []byte) { b.e.DropPeer(5) }, 1, 4},
		"it is cleared":        {func(b *bench, _ []byte) { b.e.ClearSpace(b.sp) }, 1, 0},
		"it is stored":         {func(b *bench, p []byte) { b.store(p) }, 0, 8},
		"a longer one is": {func(b *bench, p []byte) {
			b.store(slices.Concat(p, numbered(9, 1)))
		}, 0, 8},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, 10, 8, Config{ForeignSlots: 8, CopyAfter: 1,
				JournalBytes: minJournalBytes})
			p := numbered(1, 12)
			b.store(p[:4*32])
			b.lend(1, 0, p, 5)
			b.settle(1, 100, 12)
			b.ok(b.e.Cancel(me, 1))
			b.read(0, p[:8*32])
			x := b.nextCopy(0, 8)
			c.meanwhile(b, p[:7*32])
			b.ok(b.e.Check())
			if name == "it is stored" { // it is shorter than what is copied
				b.store(p[:8*32])
			}
			if b.e.EndCopy(x.Handle, c.failed == 0) {
				if name == "a longer one is" {
					return // they differ
				}
				t.Fatal("copied")
			}
			b.ok(b.e.Check())
			if s := b.e.Stats(); s.CopiesFailed != c.failed || s.CopiedChunks != 0 ||
				s.FillingSlots != 0 || s.Leases != 0 {
				t.Fatalf("%+v", s)
			}
			b.wantHits(c.hits, p[:8*32])
			if c.hits == 8 && c.failed > 0 {
				b.read(0, p)
				if !b.e.EndCopy(b.nextCopy(0, 8).Handle, true) {
					t.Fatal("not copied at the second time")
				}
				b.wantHits(12, p)
			}
		})
	}
}

// TestCopyRoom: a copy evicts what a promotion would, nothing that is used, and never a chunk that
// it continues.
func TestCopyRoom(t *testing.T) {
	b := newBench(t, 2, 1, Config{ForeignSlots: 8, CopyAfter: 1, PromotingShare: 0.5})
	p, q := numbered(1, 3), numbered(2, 1)
	b.store(q)
	b.lend(1, 0, p, 5)
	b.settle(1, 100, 3)
	b.ok(b.e.Cancel(me, 1))
	pin, _, err := b.e.Pin(b.sp, q)
	b.ok(err)
	b.read(0, p)
	if !b.e.EndCopy(b.nextCopy(0, 1).Handle, true) {
		t.Fatal("not copied into a free slot")
	}
	b.noCopy() // the other slot is in use, and no chunk takes the place of one that comes before it
	if s := b.e.Stats(); s.CopiesFailed != 2 || s.Evictions != 0 {
		t.Fatalf("%+v", s)
	}
	b.ok(b.e.Unpin(pin))
	b.read(0, p)
	if !b.e.EndCopy(b.nextCopy(1, 1).Handle, true) {
		t.Fatal("not copied into the slot of another")
	}
	b.noCopy()
	b.wantHits(0, q)
	b.e.DropPeer(0)
	b.wantHits(2, p)
	if s := b.e.Stats(); s.Evictions != 1 || s.CopiesFailed != 3 {
		t.Fatalf("%+v", s)
	}
	b.e.TakeReturns(nil)
}

// TestCopyNothingDue: an engine that copies nothing counts nothing, and what is due and gone is
// passed over.
func TestCopyNothingDue(t *testing.T) {
	for _, after := range []int{0, 1} {
		b := newBench(t, 10, 4, Config{ForeignSlots: 8, CopyAfter: after})
		p := numbered(1, 8)
		b.lend(1, 0, p, 5)
		b.settle(1, 100, 8)
		b.ok(b.e.Cancel(me, 1))
		b.read(0, p)
		b.e.DropPeer(5)
		b.noCopy()
		if n := len(b.e.TakeReturns(nil)); n != 2 || len(b.e.lent.due)+b.e.Stats().Leases != 0 ||
			len(b.e.lent.reads.young) != 2*after {
			t.Fatal(n, b.e.lent.due, b.e.lent.reads)
		}
	}
}

// TestReadCounts: what is remembered of chunks that are not borrowed is bounded, and of those that
// were returned last.
func TestReadCounts(t *testing.T) {
	c := readCounts{limit: 10}
	for i := range uint64(100) {
		c.put(i, uint16(i))
		if len(c.young)+len(c.old) > 20 {
			t.Fatalf("%d counts", len(c.young)+len(c.old))
		}
	}
	for i := range uint64(100) {
		n, again := c.take(i), c.take(i)
		if again != 0 || i >= 90 && n != uint16(i) || i < 80 && n != 0 {
			t.Fatalf("chunk %d was read %d times, then %d", i, n, again)
		}
	}
}
