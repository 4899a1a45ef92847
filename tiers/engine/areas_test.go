package engine

import (
	"math/rand/v2"
	"testing"

	"lookaside/tiers"
)

// aModel is an honest client of an arena that several share: its requests begin with one of its
// prompts, and it stores what it did not hit.
type aModel struct {
	pageBytes int64
	ppc       int
	prompts   int // that it asks for by chance
	chunks    int // of each
	fresh     int // of ten requests, so many are for a prompt that never comes again
	requests  int // in its turn
	// a lookup of its first prompt is never given back, as that of a client which has stopped
	keeps bool
}

func (m *aModel) bytes() int64 { return m.pageBytes * int64(m.ppc*m.chunks*m.prompts) }

// shareArena lets models use one arena of one region by turns, and returns which part of the pages
// of their prompts hit, once all have been stored.
func shareArena(t *testing.T, bytes int64, models ...aModel) (ratios []float64) {
	t.Helper()
	now := int64(0)
	e, err := New(Config{ArenaLimitBytes: bytes, MinPageBytes: 1, OwnerShare: 1,
		Now: func() int64 { return now }})
	b := &bench{t: t, e: e}
	b.ok(err)
	defer e.Close()
	b.ok(e.AddRegion(1, bytes))
	rng := rand.New(rand.NewPCG(1, 2))
	asked, hit := make([]int, len(models)), make([]int, len(models))
	unique := uint64(1 << 40)
	for i, m := range models {
		sp, err := e.OpenSpace(tiers.Fingerprint{byte(i + 1)},
			tiers.Geometry{PageBytes: m.pageBytes, PagesPerChunk: m.ppc, PageTokens: 16,
				DigestBytes: 32})
		b.ok(err)
		b.ok(e.AddOwner(Owner(i), sp))
	}
	const turns = 60
	for turn := range turns {
		for i, m := range models {
			for range m.requests {
				n := m.ppc * m.chunks
				prompt := uint64(i)<<32 | uint64(rng.IntN(m.prompts))<<16
				again := rng.IntN(10) >= m.fresh
				if !again {
					unique += 1 << 16
					prompt = unique
				}
				hashes := numbered(prompt, n)
				pages, err := e.Lookup(Owner(i), 1, 0, hashes)
				b.ok(err)
				if pages > 0 {
					b.ok(e.Cancel(Owner(i), 1))
				}
				if again && turn >= turns/2 {
					asked[i] += n
					hit[i] += pages
				}
				res, _, err := e.PrepareStore(Owner(i), 0, nil, hashes, nil)
				b.ok(err)
				if res.Store != 0 {
					b.ok(e.CommitStore(Owner(i), res.Store, nil))
				}
				if m.keeps && turn == 1 {
					if _, err := e.Lookup(Owner(i), 2, 0, hashes); err != nil {
						t.Fatal(err)
					}
				}
				now += 1e6
			}
			e.Expire()
		}
		b.ok(e.Check())
	}
	for i := range models {
		ratios = append(ratios, float64(hit[i])/float64(asked[i]))
	}
	return ratios
}

// TestOldPiecesChangeHands: a model may have more than its share of what another has not used for
// long, and gives it back when that comes again.
func TestOldPiecesChangeHands(t *testing.T) {
	const slots = 320
	b := newBench(t, slots, 1, Config{})
	other, err := b.e.OpenSpace(tiers.Fingerprint{2}, tiers.Geometry{PageBytes: 128,
		PagesPerChunk: 1, PageTokens: 16, DigestBytes: 32})
	b.ok(err)
	b.ok(b.e.AddOwner(2, other))
	label := uint64(0)
	fill := func(o Owner) { // stores more than fits
		for range 2 * slots {
			label++
			res, _, err := b.e.PrepareStore(o, 0, nil, numbered(label, 1), nil)
			b.ok(err)
			if res.Store != 0 {
				b.ok(b.e.CommitStore(o, res.Store, nil))
			}
		}
		b.ok(b.e.Check())
	}
	share := func(id SpaceID) float64 {
		s, _ := b.e.Space(id)
		return float64(int64(s.Chunks)*s.Geometry.PageBytes) / float64(slots*64)
	}
	want := func(when string, mine, others float64) {
		t.Helper()
		if a, c := share(b.sp), share(other); a < mine-0.07 || a > mine+0.07 || c < others-0.07 ||
			c > others+0.07 {
			t.Errorf("%s: the models have %.2f and %.2f of the arena, want some %.2f and %.2f",
				when, a, c, mine, others)
		}
	}
	fill(me)
	want("with one", 1, 0)
	fill(2)
	want("with another", 0.5, 0.5)
	fill(me)
	fill(2)
	want("with both for a while", 0.5, 0.5)
	for range 3 { // the first is idle
		b.now += agedAfter
		b.e.Expire()
		fill(2)
	}
	want("after the first was idle for long", 0, 1)
	fill(me)
	want("when the first is back", 0.5, 0.5)
}

// TestModelsShareOneRegion: models of different geometries in one small arena each hit nine tenths
// of what they would in a part of their own.
func TestModelsShareOneRegion(t *testing.T) {
	const kib = 1 << 10
	for _, c := range []struct {
		name   string
		bytes  int64
		models []aModel
	}{
		{"request by request", 4096 * kib, []aModel{{4 * kib, 4, 12, 8, 0, 1, false},
			{1 * kib, 16, 12, 8, 0, 1, false}}},
		{"by bursts", 4096 * kib, []aModel{{4 * kib, 4, 12, 8, 0, 80, false},
			{3 * kib, 5, 12, 8, 0, 80, false}}},
		{"one with much that comes once", 4096 * kib, []aModel{{4 * kib, 4, 12, 8, 0, 10, false},
			{3 * kib, 5, 12, 8, 8, 200, false}}},
		{"one that leases", 4096 * kib, []aModel{{4 * kib, 4, 12, 8, 0, 10, true},
			{3 * kib, 5, 12, 8, 2, 10, true}}},
		{"a slot of one is many of the other", 4096 * kib,
			[]aModel{{96 * kib, 4, 2, 2, 0, 10, false}, {1 * kib, 3, 60, 8, 0, 10, false}}},
		{"slots larger than pieces", 4096 * kib, []aModel{{40 * kib, 4, 2, 5, 0, 10, false},
			{33 * kib, 5, 2, 5, 0, 10, false}}},
		{"nearly all of a share each", 4096 * kib, []aModel{{4 * kib, 4, 15, 8, 0, 10, false},
			{3 * kib, 5, 16, 8, 1, 30, false}}},
		{"more than a share each", 4096 * kib, []aModel{{4 * kib, 4, 20, 8, 0, 10, false},
			{3 * kib, 5, 40, 8, 1, 60, false}}},
		{"three", 4096 * kib, []aModel{{4 * kib, 4, 7, 8, 3, 10, false}, {1 * kib, 16, 7, 8, 3, 30,
			false}, {8 * kib, 3, 6, 8, 3, 20, false}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			together := shareArena(t, c.bytes, c.models...)
			share := c.bytes / int64(len(c.models))
			for i, m := range c.models {
				alone := shareArena(t, share, m)[0]
				t.Logf("model %d, which wants %d%% of its share: %.3f, alone in its share %.3f", i,
					100*m.bytes()/share, together[i], alone)
				if together[i] < 0.9*alone {
					t.Errorf("model %d hits %.3f, alone in a share of its own %.3f", i, together[i],
						alone)
				}
			}
		})
	}
}

// TestDrainArea: nothing in a drained region is granted, evicted, extended or carved, and no other
// geometry takes it. What it holds is found. Other regions are used meanwhile, and Undrain ends it.
func TestDrainArea(t *testing.T) {
	pieces := map[uint32]Piece{}
	b := newBench(t, 8, 4, Config{ArenaLimitBytes: 8 * 256, OnCarve: func(p Piece) {
		pieces[p.Num] = p
	}, OnUncarve: func(num uint32) { delete(pieces, num) }})
	other, err := b.e.OpenSpace(tiers.Fingerprint{2}, tiers.Geometry{PageBytes: 96,
		PagesPerChunk: 2, PageTokens: 16, DigestBytes: 32})
	b.ok(err)
	b.ok(b.e.AddOwner(2, other))
	h := numbered(1, 18) // four whole chunks and a part
	b.store(h)
	before := len(pieces)
	b.ok(b.e.Drain(7))
	b.ok(b.e.Drain(7))
	b.ok(b.e.Check())
	b.is(b.e.Drain(8), tiers.ErrNotFound)
	b.is(b.e.Undrain(8), tiers.ErrNotFound)
	store := func(o Owner, hashes []byte) (grants []Grant) {
		t.Helper()
		res, grants, err := b.e.PrepareStore(o, 0, nil, hashes, nil)
		b.ok(err)
		if res.Store != 0 {
			b.ok(b.e.CommitStore(o, res.Store, nil))
		}
		return grants
	}
	longer := append(h[:18*32:18*32], numbered(9, 2)...)
	for range 2 {
		for o, hashes := range map[Owner][]byte{me: longer, 2: numbered(2, 4)} {
			if grants := store(o, hashes); len(grants) > 0 {
				t.Fatalf("all is drained, and %+v granted", grants)
			}
		}
		b.now += 10 * agedAfter
		b.e.Expire()
	}
	b.wantHits(18, longer)
	if st := b.e.Stats(); len(pieces) != before || st.Recarved+st.Evictions > 0 {
		t.Fatalf("%d pieces, there were %d; %+v", len(pieces), before, st)
	}

	// Elsewhere there is room. The part gets a slot of its own there, and the old one is free, but
	// is not granted.
	b.ok(b.e.AddRegion(8, 4*256))
	if grants := store(me, longer); len(grants) != 1 || grants[0].Region != 8 ||
		grants[0].Pages != 4 {
		t.Fatalf("%+v", grants)
	}
	b.wantHits(20, longer)
	for i := range uint64(20) {
		for _, g := range append(store(me, numbered(100+i, 4)), store(2, numbered(200+i, 2))...) {
			if g.Region != 8 {
				t.Fatalf("%+v is granted in a drained region", g)
			}
		}
	}
	b.wantHits(16, h[:16*32])
	b.ok(b.e.Check())

	b.ok(b.e.Undrain(7))
	b.ok(b.e.Undrain(7))
	b.ok(b.e.Check())
	where := map[uint32]int{}
	for i := range uint64(20) {
		for _, g := range store(me, numbered(300+i, 4)) {
			where[g.Region]++
		}
	}
	if where[7] == 0 {
		t.Fatalf("granted by regions: %v", where)
	}
	b.wantHits(0, h)

	// A drained region can be taken away.
	b.ok(b.e.Drain(7))
	b.ok(b.e.RemoveRegion(7))
	b.ok(b.e.Check())
	b.is(b.e.Undrain(7), tiers.ErrNotFound)
	for _, p := range pieces {
		if p.Region == 7 {
			t.Fatalf("%+v is there", p)
		}
	}
}

// TestRestorePieces: an engine that got the pieces of another one, and what they held, gives the
// same results, and stores go elsewhere until it may use them.
func TestRestorePieces(t *testing.T) {
	const region, size = 7, 60 * 256
	for seed := range uint64(20) {
		rnd := rand.New(rand.NewPCG(seed, 9))
		start := func(drained bool) (*bench, map[uint32]Piece, *int) {
			pieces, gone := map[uint32]Piece{}, new(int)
			e, err := New(Config{ArenaLimitBytes: size, MinPageBytes: 1, OwnerShare: 1,
				OnCarve:   func(p Piece) { pieces[p.Num] = p },
				OnUncarve: func(num uint32) { delete(pieces, num) },
				OnGone:    func(_, _, _ uint32) { *gone++ }})
			b := &bench{t: t, e: e}
			b.ok(err)
			t.Cleanup(e.Close)
			if drained {
				b.ok(e.AddDrainedRegion(region, size))
			} else {
				b.ok(e.AddRegion(region, size))
			}
			for i, g := range []tiers.Geometry{{PageBytes: 64, PagesPerChunk: 4},
				{PageBytes: 96, PagesPerChunk: 2}} {
				g.DigestBytes, g.PageTokens = 16, 16
				sp, err := e.OpenSpace(tiers.Fingerprint{byte(i)}, g)
				b.ok(err)
				b.ok(e.AddOwner(Owner(i+1), sp))
			}
			return b, pieces, gone
		}
		a, was, _ := start(false)
		for range 40 {
			storeAll(t, a.e, Owner(1+rnd.IntN(2)), 0, nil, treeHashes(rnd, 1+rnd.IntN(24)))
		}
		b, is, gone := start(true)
		nums := map[uint32]uint32{}
		b.is(second(b.e.RestorePiece(Piece{Region: 9, Geometry: was[1].Geometry,
			Placement: was[1].Placement, Slots: 1})), tiers.ErrNotFound)
		for num, p := range was {
			n, err := b.e.RestorePiece(p)
			b.ok(err)
			nums[num] = n
			b.is(second(b.e.RestorePiece(p)), tiers.ErrInvalid)
		}
		for num, p := range was {
			if p.Num = nums[num]; is[p.Num] != p {
				t.Fatalf("%+v is carved as %+v", p, is[p.Num])
			}
		}
		want := 0
		for num, all := range dumpPieces(a.e) {
			want += len(all)
			b.ok(b.e.RestoreIn(nums[num], all))
			if seed%2 == 0 { // once more, in a slot that is free otherwise
				x := all[0]
				used := map[uint32]bool{}
				for _, y := range all {
					used[y.Slot] = true
				}
				for x.Slot = 0; used[x.Slot]; x.Slot++ {
				}
				x.Order = 1 << 40
				if int(x.Slot) < was[num].Slots {
					b.ok(b.e.RestoreIn(nums[num], []Restored{x}))
				}
			}
		}
		b.is(b.e.Undrain(region), tiers.ErrBusy)
		b.is(b.e.RestoreIn(0, nil), tiers.ErrInvalid)
		b.is(b.e.RestoreIn(MaxPieces+1, nil), tiers.ErrInvalid)
		b.is(b.e.RestoreIn(MaxPieces, nil), tiers.ErrNotFound)
		if got := b.e.EndRestore(); got != want || uint64(*gone) != b.e.Stats().Duplicates {
			t.Fatalf("seed %d: %d of %d chunks; %d slots are gone of %d", seed, got, want, *gone,
				b.e.Stats().Duplicates)
		}
		b.ok(b.e.Check())
		alike(t, seed, rnd, a.e, b.e, 1, 2)
		res, _, err := b.e.PrepareStore(1, 0, nil, numbered(5, 8), nil)
		b.ok(err)
		if res.Store != 0 {
			t.Fatalf("%+v is granted before the region may be used", res)
		}
		b.ok(b.e.Undrain(region))
		b.ok(b.e.Check())
		b.is(second(b.e.RestorePiece(was[1])), tiers.ErrBusy)
		b.is(b.e.RestoreIn(nums[1], nil), tiers.ErrBusy)
		for range 60 {
			storeAll(t, b.e, Owner(1+rnd.IntN(2)), 0, nil, treeHashes(rnd, 1+rnd.IntN(24)))
		}
		b.ok(b.e.Check())
	}
}

func second(_ uint32, err error) error { return err }

// dumpPieces is dump by pieces.
func dumpPieces(e *Engine) map[uint32][]Restored {
	out := map[uint32][]Restored{}
	for _, r := range e.regions[1 : e.nregion+1] {
		if r.class == nil {
			continue
		}
		id := r.id
		r.id = 1<<20 + r.num
		if all := dump(e)[r.id]; len(all) > 0 {
			out[r.num] = all
		}
		r.id = id
	}
	return out
}
