package engine

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"lookaside/tiers"
)

var restoreGeometry = tiers.Geometry{PageBytes: 256, PagesPerChunk: 4, PageTokens: 16,
	DigestBytes: 16}

// packed is slots one behind the other.
func packed(g tiers.Geometry) Placement {
	return Placement{Stride: g.PageBytes * int64(g.PagesPerChunk)}
}

// fixedEngine has regions that are carved from the start, and an owner for each of two spaces.
func fixedEngine(t testing.TB, regions, slots int) *Engine {
	t.Helper()
	e, err := New(Config{FixedRegions: true, NoExtend: true, OwnerShare: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	for i := range regions {
		if err := e.AddCarvedRegion(uint32(10+i), restoreGeometry, slots,
			packed(restoreGeometry)); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 2 {
		id, err := e.OpenSpace(tiers.Fingerprint{byte(i)}, restoreGeometry)
		if err != nil {
			t.Fatal(err)
		}
		if err := e.AddOwner(Owner(id), id); err != nil {
			t.Fatal(err)
		}
	}
	return e
}

// treeHashes is the digests of a random walk from the root of a tree of prompts: walks share their
// beginnings.
func treeHashes(rnd *rand.Rand, pages int) []byte {
	var out []byte
	path := uint64(1)
	for range pages {
		path = path*31 + uint64(rnd.IntN(10)/9)
		out = binary.LittleEndian.AppendUint64(out, path)
		out = binary.LittleEndian.AppendUint64(out, path*path)
	}
	return out
}

func storeAll(t testing.TB, e *Engine, o Owner, first int, prev, hashes []byte) {
	t.Helper()
	res, _, err := e.PrepareStore(o, first, prev, hashes, nil)
	if err != nil {
		t.Fatal(err)
	}
	if res.Store != 0 {
		if err := e.CommitStore(o, res.Store, nil); err != nil {
			t.Fatal(err)
		}
	}
}

// dump is what a medium would know of an engine's slots.
func dump(e *Engine) map[uint32][]Restored {
	out := map[uint32][]Restored{}
	for _, r := range e.regions[1 : e.nregion+1] {
		for i := range r.fresh {
			s := &r.slots[i]
			if s.state != ready {
				continue
			}
			ref := r.num<<recordBits | uint32(i)
			x := Restored{Slot: uint32(i), Space: SpaceID(s.space), First: int(s.chunk) * r.ppc,
				Pages: int(s.pages), Order: s.stamp}
			var buf [32]byte
			for pos := range int(s.pages) {
				x.Hashes = append(x.Hashes, r.digestBytes(uint32(i), pos, &buf)...)
			}
			if !e.orphan(ref) {
				p := e.kin(ref).parent
				x.Prev = slices.Clone(e.regions[p>>recordBits].digestBytes(p&recordMask, r.ppc-1,
					&buf))
			}
			out[r.id] = append(out[r.id], x)
		}
	}
	return out
}

// alike asks two engines, the second of which restored the first one's slots, for the same
// prefixes.
func alike(t *testing.T, seed uint64, rnd *rand.Rand, a, b *Engine, owners ...Owner) {
	t.Helper()
	for range 300 {
		o, hashes := owners[rnd.IntN(len(owners))], treeHashes(rnd, 1+rnd.IntN(24))
		x, errA := a.Lookup(o, 1, 0, hashes)
		y, errB := b.Lookup(o, 1, 0, hashes)
		if x != y || errA != nil || errB != nil {
			t.Fatalf("seed %d: %d pages before, %d after (%v, %v)", seed, x, y, errA, errB)
		}
	}
}

// TestRestore: an engine that restored the slots of another one gives the same results, and its
// books are in order.
func TestRestore(t *testing.T) {
	t.Parallel()
	for seed := range uint64(40) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		a := fixedEngine(t, 3, 20)
		for range 60 {
			storeAll(t, a, Owner(1+rnd.IntN(2)), 0, nil, treeHashes(rnd, 1+rnd.IntN(24)))
		}
		held := dump(a)
		b := fixedEngine(t, 3, 20)
		want := 0
		for id, all := range held {
			want += len(all)
			rnd.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
			for len(all) > 0 {
				n := 1 + rnd.IntN(len(all))
				if err := b.Restore(id, all[:n]); err != nil {
					t.Fatalf("seed %d: %v", seed, err)
				}
				all = all[n:]
			}
		}
		if got := b.EndRestore(); got != want {
			t.Fatalf("seed %d: %d of %d chunks", seed, got, want)
		}
		alike(t, seed, rnd, a, b, 1, 2)
		for range 60 {
			storeAll(t, b, Owner(1+rnd.IntN(2)), 0, nil, treeHashes(rnd, 1+rnd.IntN(24)))
		}
		if err := b.Check(); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
}

// TestRestoreKeepsOne: of what is redundant, named twice or contradictory one is kept, and the rest
// is free.
func TestRestoreKeepsOne(t *testing.T) {
	t.Parallel()
	e := fixedEngine(t, 2, 8)
	h := treeHashes(rand.New(rand.NewPCG(1, 1)), 8)
	d := restoreGeometry.DigestBytes
	for _, x := range []struct {
		region uint32
		r      Restored
	}{
		// the shorter version
		{10, Restored{Slot: 3, Space: 1, Pages: 2, Hashes: h[:2*d], Order: 1}},
		//
		{11, Restored{Slot: 0, Space: 1, Pages: 4, Hashes: h[:4*d], Order: 2}},
		// a duplicate
		{11, Restored{Slot: 1, Space: 1, Pages: 4, Hashes: h[:4*d], Order: 3}},
		// before its prefix
		{10, Restored{Slot: 5, Space: 1, First: 4, Pages: 4, Prev: h[3*d : 4*d], Hashes: h[4*d:]}},
		// the same pages in another place
		{10, Restored{Slot: 6, Space: 1, First: 8, Pages: 4, Hashes: h[4*d:], Order: 9}},
		// of the other space, its prefix unknown
		{10, Restored{Slot: 7, Space: 2, First: 4, Pages: 4, Prev: h[:d], Hashes: h[4*d:],
			Order: 10}},
		//
		{11, Restored{Slot: 7, Space: 2, First: 400, Pages: 1, Prev: h[:d], Hashes: h[:d],
			Order: 1 << 60}},
	} {
		if err := e.Restore(x.region, []Restored{x.r}); err != nil {
			t.Fatal(err)
		}
	}
	if err := e.Restore(10, []Restored{{Slot: 5, Space: 1, Pages: 1, Hashes: h[:d]}}); !errors.Is(
		err, tiers.ErrInvalid) {
		t.Errorf("a slot told of twice: %v", err)
	}
	if n := e.EndRestore(); n != 5 {
		t.Fatalf("%d chunks", n)
	}
	if err := e.Check(); err != nil {
		t.Fatal(err)
	}
	if n, err := e.Lookup(1, 1, 0, h); n != 8 || err != nil {
		t.Fatal(n, err)
	}
	if st := e.Stats(); st.ReadySlots != 4 || st.FreeSlots != 12 {
		t.Fatalf("%+v", st)
	}

	for _, x := range []Restored{
		{Slot: 8, Space: 1, Pages: 1, Hashes: h[:d]}, {Space: 1, Pages: 0},
		{Space: 1, Pages: 5, Hashes: h[:5*d]}, {Space: 1, First: 2, Pages: 1, Hashes: h[:d]},
		{Space: 1, First: -4, Pages: 1, Hashes: h[:d]}, {Space: 1, First: maxPage, Pages: 1,
			Hashes: h[:d]}, {Space: 1, Pages: 2, Hashes: h[:d]},
		{Space: 1, Pages: 1, Hashes: h[:d], Prev: h[:d]}, {Space: 1, First: 4, Pages: 1,
			Hashes: h[:d], Prev: h[:1]},
	} {
		f := fixedEngine(t, 1, 8)
		if err := f.Restore(10, []Restored{{Space: 1, Pages: 1, Hashes: h[:d]}, x}); !errors.Is(err,
			tiers.ErrInvalid) {
			t.Errorf("%+v: %v", x, err)
		}
		if n := f.EndRestore(); n != 0 {
			t.Errorf("%+v: %d chunks", x, n)
		}
	}
	if err := e.Restore(10, []Restored{{Space: 1, Pages: 1, Hashes: h[:d]}}); !errors.Is(err,
		tiers.ErrBusy) {
		t.Error(err)
	}
}

// TestRestoreMany: so many pages are restored that they are ordered by parts of the index, also
// where tags are few; what was taken back meanwhile is not there.
func TestRestoreMany(t *testing.T) {
	t.Parallel()
	const slots = batchEntries/4 + 1000 // of 4 pages: more than a batch
	for seed := range uint64(2) {
		rnd := rand.New(rand.NewPCG(seed, 3))
		a, b := fixedEngine(t, 3, slots), fixedEngine(t, 3, slots)
		if seed == 1 {
			for _, e := range []*Engine{a, b} {
				for _, s := range e.byPrint {
					s.tagMask = 0xFFF << 20
				}
			}
		}
		var stored [][]byte
		for st := a.Stats(); st.FreeSlots > 100; st = a.Stats() {
			for range 10 {
				h := treeHashes(rnd, 1+rnd.IntN(24))
				stored = append(stored, h)
				storeAll(t, a, Owner(1+len(stored)%2), 0, nil, h)
			}
		}
		// Some chunks are there a second time, as they are where a program ended before a commit.
		held := dump(a)
		twice := held[10][:200]
		held[10] = held[10][200:]
		for i, x := range held[12][:200] {
			x.Slot, x.Order = twice[i].Slot, x.Order+1
			held[10] = append(held[10], x)
		}
		held[12] = append(held[12][200:], held[12][:200]...)
		d := restoreGeometry.DigestBytes
		gone := map[string]bool{} // pages of what is missing
		lose := func(x Restored) {
			for h := range slices.Chunk(x.Hashes, d) {
				gone[string(h)] = true
			}
		}
		for _, x := range twice {
			lose(x)
		}
		want, prev := 0, map[string]string{}
		for id, all := range held {
			want += len(all)
			rnd.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
			for _, x := range all {
				prev[fmt.Sprintf("%d %s", x.Space, x.Hashes)] = string(x.Prev)
			}
			for left := all; len(left) > 0; {
				n := min(1+rnd.IntN(3000), len(left))
				if err := b.Restore(id, left[:n]); err != nil {
					t.Fatalf("seed %d: %v", seed, err)
				}
				left = left[n:]
			}
			if id == 11 {
				for _, x := range all[:300] {
					b.Unrestore(id, x.Slot)
					lose(x)
				}
				want -= 300
			}
		}
		if got := b.EndRestore(); got != want-200 || b.Stats().Duplicates != 200 {
			t.Fatalf("seed %d: %d of %d chunks, %d there twice", seed, got, want-200,
				b.Stats().Duplicates)
		}
		if err := b.Check(); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		for i, h := range stored {
			if i%8 > 0 {
				continue
			}
			o := Owner(1 + (i+1)%2)
			x, errA := a.Lookup(o, 1, 0, h)
			y, errB := b.Lookup(o, 1, 0, h)
			missing := false
			for page := range x {
				missing = missing || gone[string(h[page*d:(page+1)*d])]
			}
			if errA != nil || errB != nil || y > x || y < x && !missing {
				t.Fatalf("seed %d: %d pages before, %d after (%v, %v)", seed, x, y, errA, errB)
			}
		}
		for _, all := range dump(b) {
			for _, x := range all {
				was := prev[fmt.Sprintf("%d %s", x.Space, x.Hashes)]
				if string(x.Prev) != was && (len(x.Prev) > 0 || !gone[was]) {
					t.Fatalf("seed %d: the chunk from page %d on continues %x, and continued %x",
						seed, x.First, x.Prev, was)
				}
			}
		}
	}
}

// TestRestoreClasses: chunks of two sizes that were stored in turns are restored together, more of
// them than are read ahead at a time.
func TestRestoreClasses(t *testing.T) {
	t.Parallel()
	const slots = 400 // a region
	owners := []Owner{1, 2, 9}
	other := restoreGeometry
	other.PageBytes *= 2
	begin := func() *Engine {
		e := fixedEngine(t, 1, slots)
		if err := e.AddCarvedRegion(20, other, slots, packed(other)); err != nil {
			t.Fatal(err)
		}
		id, err := e.OpenSpace(tiers.Fingerprint{9}, other)
		if err != nil {
			t.Fatal(err)
		}
		if err := e.AddOwner(9, id); err != nil {
			t.Fatal(err)
		}
		return e
	}
	for seed := range uint64(4) {
		rnd := rand.New(rand.NewPCG(seed, 4))
		a, b := begin(), begin()
		for range 2000 {
			storeAll(t, a, owners[rnd.IntN(len(owners))], 0, nil, treeHashes(rnd, 1+rnd.IntN(24)))
		}
		want := 0
		for id, all := range dump(a) {
			want += len(all)
			if err := b.Restore(id, all); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
		}
		if got := b.EndRestore(); got != want || want < 600 {
			t.Fatalf("seed %d: %d of %d chunks", seed, got, want)
		}
		if err := b.Check(); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		alike(t, seed, rnd, a, b, owners...)
	}
}

// TestCloseSpaceRestored: a space whose chunks will be restored is in use, or they would be
// another's.
func TestCloseSpaceRestored(t *testing.T) {
	t.Parallel()
	e := fixedEngine(t, 1, 8)
	h := treeHashes(rand.New(rand.NewPCG(1, 1)), 4)
	if err := e.Restore(10, []Restored{{Slot: 3, Space: 1, Pages: 4, Hashes: h,
		Order: 1}}); err != nil {
		t.Fatal(err)
	}
	e.RemoveOwner(1)
	if err := e.CloseSpace(1); !errors.Is(err, tiers.ErrBusy) {
		t.Fatalf("closed a space with a chunk that is to be restored: %v", err)
	}
	e.Unrestore(10, 3)
	e.Unrestore(10, 4)
	e.Unrestore(10, 8)
	e.Unrestore(11, 3)
	if err := e.Restore(10, []Restored{{Slot: 3, Space: 2, Pages: 4, Hashes: h,
		Order: 1}}); !errors.Is(err, tiers.ErrInvalid) {
		t.Fatalf("a slot that was taken back: %v", err)
	}
	if n := e.EndRestore(); n != 0 {
		t.Fatalf("%d chunks", n)
	}
	if err := e.CloseSpace(1); err != nil {
		t.Fatal(err)
	}
	if err := e.Check(); err != nil {
		t.Fatal(err)
	}
}

// TestRemoveRegion: what a region held cannot be found at once, it goes when it is not in use any
// more, and its number serves another.
func TestRemoveRegion(t *testing.T) {
	t.Parallel()
	rnd := rand.New(rand.NewPCG(4, 4))
	e := fixedEngine(t, 2, 6)
	for range 30 {
		storeAll(t, e, 1, 0, nil, treeHashes(rnd, 12))
	}
	h := treeHashes(rnd, 12)
	storeAll(t, e, 1, 0, nil, h)
	n, err := e.Lookup(1, 1, 0, h)
	if err != nil || n != 12 {
		t.Fatal(n, err)
	}
	res, grants, err := e.PrepareStore(1, 0, nil, treeHashes(rand.New(rand.NewPCG(9, 9)), 12), nil)
	if err != nil || len(grants) == 0 {
		t.Fatal(res, err)
	}
	for _, id := range []uint32{10, 11} {
		if err := e.RemoveRegion(id); err != nil && !errors.Is(err, tiers.ErrBusy) {
			t.Fatal(err)
		}
	}
	if err := e.Check(); err != nil {
		t.Fatal(err)
	}
	if n, err := e.Lookup(1, 2, 0, h); n != 0 || err != nil {
		t.Fatalf("%d pages of removed regions are found (%v)", n, err)
	}
	if err := e.CommitStore(1, res.Store, nil); err != nil {
		t.Fatal(err)
	}
	if err := e.Cancel(1, 1); err != nil {
		t.Fatal(err)
	}
	for _, id := range []uint32{10, 11} {
		if err := e.RemoveRegion(id); err != nil && !errors.Is(err, tiers.ErrNotFound) {
			t.Fatal(err)
		}
	}
	if st := e.Stats(); st.Regions != 0 || st.Slots != 0 || st.CapacityBytes != 0 || st.Pages != 0 {
		t.Fatalf("%+v", st)
	}
	if err := e.AddCarvedRegion(7, restoreGeometry, 5, packed(restoreGeometry)); err != nil {
		t.Fatal(err)
	}
	storeAll(t, e, 1, 0, nil, h)
	if n, err := e.Lookup(1, 3, 0, h); n != 12 || err != nil {
		t.Fatal(n, err)
	}
	if err := e.Check(); err != nil {
		t.Fatal(err)
	}
	if e.nregion != 2 {
		t.Fatalf("%d numbers of regions were used", e.nregion)
	}
}

// TestNoExtend: a longer version of a chunk gets a slot of its own, and the shorter one goes at its
// commit.
func TestNoExtend(t *testing.T) {
	t.Parallel()
	e := fixedEngine(t, 1, 4)
	h := treeHashes(rand.New(rand.NewPCG(2, 2)), 4)
	storeAll(t, e, 1, 0, nil, h[:2*16])
	res, grants, err := e.PrepareStore(1, 0, nil, h, nil)
	if err != nil || len(grants) != 1 || grants[0].Page != 0 || grants[0].Pages != 4 {
		t.Fatalf("%+v %+v %v", res, grants, err)
	}
	if err := e.CommitStore(1, res.Store, nil); err != nil {
		t.Fatal(err)
	}
	if st := e.Stats(); st.ReadySlots != 1 || st.Replaced != 1 {
		t.Fatalf("%+v", st)
	}
	// A full engine of fixed regions evicts, and carves nothing.
	for range 20 {
		storeAll(t, e, 2, 0, nil, treeHashes(rand.New(rand.NewPCG(rand.Uint64(), 2)), 4))
	}
	if err := e.Check(); err != nil {
		t.Fatal(err)
	}
}

// BenchmarkRestore restores a million pages a round, as of a store that was filled evenly.
func BenchmarkRestore(b *testing.B) {
	const chunks, ppc = 1 << 18, 16
	g := tiers.Geometry{PageBytes: 4096, PagesPerChunk: ppc, PageTokens: 1, DigestBytes: 32}
	rnd := rand.New(rand.NewPCG(1, 1))
	hashes := make([]byte, 512*ppc*32)
	for b.Loop() {
		e, err := New(Config{FixedRegions: true, NoExtend: true, OwnerShare: 1,
			ArenaLimitBytes: chunks * ppc * 4096})
		if err != nil {
			b.Fatal(err)
		}
		if err := e.AddCarvedRegion(1, g, chunks, packed(g)); err != nil {
			b.Fatal(err)
		}
		id, err := e.OpenSpace(tiers.Fingerprint{}, g)
		if err != nil {
			b.Fatal(err)
		}
		entries := make([]Restored, 0, 512)
		for i := range chunks {
			from := len(entries) * ppc * 32
			for j := from; j < from+ppc*32; j += 8 {
				binary.LittleEndian.PutUint64(hashes[j:], rnd.Uint64())
			}
			if entries = append(entries, Restored{Slot: uint32(i), Space: id, Pages: ppc,
				Hashes: hashes[from : from+ppc*32], Order: uint64(i)}); len(entries) < cap(
				entries) {
				continue
			}
			if err := e.Restore(1, entries); err != nil {
				b.Fatal(err)
			}
			entries = entries[:0]
		}
		if n := e.EndRestore(); n != chunks {
			b.Fatal(n)
		}
		e.Close()
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/chunks, "ns/chunk")
}
