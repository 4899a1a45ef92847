package tiertest

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"lookaside/tiers"
)

var (
	seedFlag  = flag.Uint64("tiertest.seed", 0, "replay this one seed of the random histories")
	seedsFlag = flag.Int("tiertest.seeds", 3, "random histories to run with each geometry")
	stepsFlag = flag.Int("tiertest.steps", 120, "calls of each")
)

// Factory makes tiers of one kind, and says what they promise beyond the contract.
type Factory struct {
	// New prepares an empty medium, such as a directory or a server's database. It cleans up by
	// t.Cleanup.
	New func(t testing.TB, o MediumOptions) *Medium

	// Persistent: stored chunks are found when the medium is opened again after Close.
	Persistent bool
	// Evicts: the medium is bounded by its capacity, and drops chunks to make room. The suite stays
	// below CapacityBytes when it needs to find all chunks.
	Evicts bool
	// MayForget: any chunk may disappear at any time.
	MayForget bool
	// Brief: another run tests the whole contract, and this one differs only in the way to the
	// medium. The suite then uses one geometry and no faults.
	Brief bool
	// Lies: failures of the medium (see MediumOptions.FailNth) are not reported. So dropped or
	// cleared chunks may be back when it is opened again.
	Lies bool
}

// MediumOptions says what a test needs of a medium.
type MediumOptions struct {
	// CapacityBytes of pages must fit without evictions, in some 500 chunks of a few geometries; 0:
	// the smallest capacity possible.
	CapacityBytes int64
	// FailNth, if positive, makes the medium's Nth operation fail. It counts all operations that
	// can fail, reads and writes alike, over all openings.
	FailNth int64
}

// Medium is where a tier keeps its chunks.
type Medium struct {
	// Open opens the medium; only one tier is open at a time. The suite closes it.
	Open func() (tiers.Tier, error)
	// Failed reports whether the operation of FailNth has come. nil: this kind of tier has no such
	// hook.
	Failed func() bool
	// Rot, if not nil, changes bytes of the pages of every chunk on the medium, so that the tier
	// can notice it only by reading.
	Rot func()
	// Stall, if not nil, makes all operations of the medium wait until resume is called; where
	// possible also those under way.
	Stall func() (resume func())
}

// Geometries returns the geometries of the suite: digests of 8, 16 and 32 bytes, chunks of one page
// and of several, pages that are whole sectors and pages that are not.
func Geometries() []tiers.Geometry {
	return []tiers.Geometry{
		{PageBytes: 256, PagesPerChunk: 1, PageTokens: 256, DigestBytes: 8},
		{PageBytes: 1000, PagesPerChunk: 3, PageTokens: 16, DigestBytes: 16},
		{PageBytes: 4096, PagesPerChunk: 16, PageTokens: 16, DigestBytes: 32},
		{PageBytes: 70001, PagesPerChunk: 3, PageTokens: 128, DigestBytes: 32},
	}
}

// Run tests a tier against the contract.
func Run(t *testing.T, f Factory) {
	geometries := Geometries()
	if f.Brief {
		geometries = geometries[1:2]
	}
	for _, g := range geometries {
		t.Run(fmt.Sprintf("%dx%d", g.PagesPerChunk, g.PageBytes), func(t *testing.T) {
			t.Run("Basics", func(t *testing.T) { testBasics(t, f, g) })
			t.Run("Diverging", func(t *testing.T) { testDiverging(t, f, g) })
			t.Run("Drop", func(t *testing.T) { testDrop(t, f, g) })
			t.Run("Batches", func(t *testing.T) { testBatches(t, f, g) })
			t.Run("Expired", func(t *testing.T) { testExpired(t, f, g) })
			t.Run("Histories", func(t *testing.T) { testHistories(t, f, []tiers.Geometry{g}) })
		})
	}
	t.Run("Spaces", func(t *testing.T) { testSpaces(t, f) })
	if !f.Brief {
		t.Run("Histories", func(t *testing.T) { testHistories(t, f, geometries) })
	}
	t.Run("Concurrent", func(t *testing.T) { testConcurrent(t, f) })
	t.Run("Cancelled", func(t *testing.T) { testCancelled(t, f) })
	t.Run("Close", func(t *testing.T) { testClose(t, f) })
	t.Run("Eviction", func(t *testing.T) { testEviction(t, f) })
	t.Run("Rot", func(t *testing.T) { testRot(t, f) })
	t.Run("Stalled", func(t *testing.T) { testStalled(t, f) })
	if !f.Brief {
		t.Run("Faults", func(t *testing.T) { Faults(t, f) })
	}
}

// plenty is a capacity that only the test of eviction reaches.
const plenty = 256 << 20

// patience is how long a test waits before a call counts as hung.
const patience = time.Minute

func (f Factory) open(t *testing.T) (tiers.Tier, *Medium) {
	t.Helper()
	m := f.New(t, MediumOptions{CapacityBytes: plenty})
	tier, err := m.Open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tier.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return tier, m
}

// within fails the test if a call does not return.
func within(t *testing.T, what string, do func()) {
	t.Helper()
	late := time.AfterFunc(patience,
		func() { panic(fmt.Sprintf("%s: %s has not returned for %v", t.Name(), what, patience)) })
	defer late.Stop()
	do()
}

// transfers makes a Load or Store of runs of one chunk each. It checks what holds for every such
// call: done is called once for each, before the call returns; nothing is written beside a
// transfer's bytes; and bytes loaded without an error are right.
func transfers(ctx context.Context, t *testing.T, tier tiers.Tier, op Op, shift int,
	runs ...tiers.Run) []error {
	t.Helper()
	mems := make([]memory, len(runs))
	ts := make([]tiers.Transfer, len(runs))
	for i, r := range runs {
		mems[i] = newMemory(tier, int(int64(r.Pages())*r.Space.Geometry.PageBytes), shift)
		ts[i] = tiers.Transfer{Run: r, Bytes: mems[i].bytes}
		if op == Store {
			FillRun(ts[i].Bytes, r)
		}
	}
	errs := make([]error, len(runs))
	calls := make([]atomic.Int32, len(runs))
	var returned atomic.Bool
	done := func(i int, err error) {
		if returned.Load() {
			t.Error("done was called after the call returned")
		}
		errs[i] = err
		calls[i].Add(1)
	}
	within(t, "a transfer", func() {
		if op == Store {
			tier.Store(ctx, ts, done)
		} else {
			tier.Load(ctx, ts, done)
		}
	})
	returned.Store(true)
	for i, r := range runs {
		if n := calls[i].Load(); n != 1 {
			t.Fatalf("done was called %d times for transfer %d", n, i)
		}
		if mems[i].overrun() {
			t.Fatalf("something was written beside the bytes of transfer %d", i)
		}
		if op == Store || errs[i] == nil {
			if page := WrongPage(ts[i].Bytes, r); page >= 0 {
				t.Fatalf("the bytes of page %d of transfer %d (pages %d to %d) are wrong", page, i,
					r.First, r.First+r.Pages())
			}
		}
	}
	return errs
}

func store(t *testing.T, tier tiers.Tier, runs ...tiers.Run) {
	t.Helper()
	for i, err := range transfers(t.Context(), t, tier, Store, 0, runs...) {
		if err != nil {
			t.Fatalf("Store of pages %d to %d: %v", runs[i].First, runs[i].First+runs[i].Pages(),
				err)
		}
	}
}

// dirty returns a slice for Contains' results that holds old values.
func dirty(run tiers.Run) []uint16 { return slices.Repeat([]uint16{math.MaxUint16}, run.Chunks()) }

func contains(t *testing.T, tier tiers.Tier, run tiers.Run) []uint16 {
	t.Helper()
	held := dirty(run)
	var err error
	within(t, "Contains", func() { err = tier.Contains(t.Context(), run, held) })
	if err != nil {
		t.Fatalf("Contains: %v", err)
	}
	for i, n := range held {
		if int(n) > run.Chunk(i).Pages() {
			t.Fatalf("Contains says that %d of the %d pages of chunk %d are held", n,
				run.Chunk(i).Pages(), i)
		}
	}
	return held
}

// found returns how many pages of a run the tier finds and loads, from the first on.
func (f Factory) found(t *testing.T, tier tiers.Tier, run tiers.Run) (pages int) {
	t.Helper()
	for i, n := range contains(t, tier, run) {
		whole := run.Chunk(i)
		if n == 0 {
			break
		}
		part := cut(whole, int(n))
		if err := transfers(t.Context(), t, tier, Load, 0, part)[0]; err != nil {
			if !errors.Is(err, tiers.ErrNotFound) || !f.MayForget && !f.Evicts {
				t.Fatalf("Load of the %d pages of chunk %d that are said to be held: %v", n, i, err)
			}
			break
		}
		pages += int(n)
		if int(n) < whole.Pages() {
			break
		}
	}
	return pages
}

// want checks how many pages are found. A tier that may forget may find fewer.
func (f Factory) want(t *testing.T, tier tiers.Tier, run tiers.Run, pages int) {
	t.Helper()
	if got := f.found(t, tier, run); got > pages || got < pages && !f.MayForget {
		t.Fatalf("%d pages are found, want %d", got, pages)
	}
}

// missing checks that a load is a miss.
func missing(t *testing.T, tier tiers.Tier, run tiers.Run) {
	t.Helper()
	if err := transfers(t.Context(), t, tier, Load, 0, run)[0]; !errors.Is(err, tiers.ErrNotFound) {
		t.Fatalf("Load of what is not there: %v, want %v", err, tiers.ErrNotFound)
	}
}

// cut returns the first pages of a run.
func cut(run tiers.Run, pages int) tiers.Run {
	run.Hashes = run.Hashes[:pages*run.Space.Geometry.DigestBytes]
	return run
}

func chunks(run tiers.Run) (all []tiers.Run) {
	for i := range run.Chunks() {
		all = append(all, run.Chunk(i))
	}
	return all
}

// twin reports whether an earlier run of the call begins with the same page. A tier may be too busy
// with that one.
func twin(runs []tiers.Run, i int) bool {
	return slices.ContainsFunc(runs[:i],
		func(r tiers.Run) bool { return keyOf(r) == keyOf(runs[i]) })
}

// tokens returns a prefix of n pages. Prefixes with different first tokens share no page.
func tokens(first byte, n int) Prefix {
	p := make(Prefix, n)
	p[0] = first
	return p
}

func testBasics(t *testing.T, f Factory, g tiers.Geometry) {
	tier, _ := f.open(t)
	space := NewSpace("basics", g)
	ppc := g.PagesPerChunk
	n := 3*ppc + (ppc+1)/2
	run := tokens(0, n).Run(space, 0, n)
	f.want(t, tier, run, 0)
	missing(t, tier, run.Chunk(0))
	if held := contains(t, tier, cut(run, 0)); len(held) != 0 {
		t.Fatalf("an empty run has %v", held)
	}
	transfers(t.Context(), t, tier, Store, 0)
	transfers(t.Context(), t, tier, Load, 0)

	store(t, tier, chunks(run)...)
	f.want(t, tier, run, n)
	for pages := 1; pages <= n; pages += max(1, ppc/3) {
		// every shorter prefix is found, with each last page
		f.want(t, tier, cut(run, pages), pages)
	}
	// A run from a later chunk on, with the digest before it and without.
	tail := tokens(0, n).Run(space, ppc, n)
	f.want(t, tier, tail, n-ppc)
	tail.Prev = nil
	f.want(t, tier, tail, n-ppc)
	// What goes on behind what is held is a miss from there on.
	longer := tokens(0, n+2*ppc).Run(space, 0, n+2*ppc)
	f.want(t, tier, longer, n)
	if ppc > 1 {
		missing(t, tier, longer.Chunk(3))
	}
	// A longer version takes the shorter one's place; the shorter one again changes nothing.
	store(t, tier, chunks(longer)...)
	f.want(t, tier, longer, n+2*ppc)
	store(t, tier, chunks(run)...)
	f.want(t, tier, longer, n+2*ppc)

	s := tier.Stats()
	switch {
	case s.Kind == "":
		t.Error("Stats has no kind")
	case s.Lossy:
		t.Error("this suite is for what gives the bytes back that it took")
	case s.Chunks != -1 && s.Chunks < int64(longer.Chunks()), s.Pages != -1 &&
		s.Pages < int64(longer.Pages()),
		s.UsedBytes != -1 && s.UsedBytes < int64(longer.Pages())*g.PageBytes,
		s.CapacityBytes != -1 && s.CapacityBytes < s.UsedBytes:
		if !f.MayForget {
			t.Errorf("Stats with %d chunks of %d pages: %+v", longer.Chunks(), longer.Pages(), s)
		}
	case s.Corrupt != 0:
		t.Errorf("%d chunks are said to have been corrupt", s.Corrupt)
	}
}

// Chunks that begin alike and go on differently are each found as far as they go.
func testDiverging(t *testing.T, f Factory, g tiers.Geometry) {
	tier, _ := f.open(t)
	space := NewSpace("diverging", g)
	ppc := g.PagesPerChunk
	var all []Prefix
	for at := range ppc {
		p := make(Prefix, 2*ppc)
		p[ppc+at] = 1 // parts from the others in the second chunk
		all = append(all, p)
	}
	for i, p := range all {
		store(t, tier, chunks(p.Run(space, 0, 2*ppc))...)
		for j, q := range all {
			want := 2 * ppc
			if j > i {
				// i > 0: prefix j leaves all before it at their own differences; the last of them
				// is nearest.
				want = ppc + i
			}
			f.want(t, tier, q.Run(space, 0, 2*ppc), want)
		}
	}
	// Shorter prefixes with a continuation that nobody stored.
	for at := range ppc {
		p := make(Prefix, 2*ppc)
		for i := at; i < ppc; i++ {
			p[ppc+i] = 2
		}
		f.want(t, tier, p.Run(space, 0, 2*ppc), ppc+at)
	}
	// The same first pages as a chunk of their own: held already.
	store(t, tier, all[0].Run(space, ppc, ppc+max(1, ppc/2)))
	for _, p := range all {
		f.want(t, tier, p.Run(space, 0, 2*ppc), 2*ppc)
	}
}

func testDrop(t *testing.T, f Factory, g tiers.Geometry) {
	tier, _ := f.open(t)
	space := NewSpace("drop", g)
	ppc := g.PagesPerChunk
	n := 3 * ppc
	p := tokens(0, n)
	run := p.Run(space, 0, n)
	if err := tier.Drop(t.Context(), run); err != nil {
		t.Fatalf("Drop of nothing: %v", err)
	}
	drop := func(run tiers.Run) {
		t.Helper()
		if err := tier.Drop(t.Context(), run); err != nil {
			t.Fatalf("Drop: %v", err)
		}
	}
	store(t, tier, chunks(run)...)
	other := tokens(1, n).Run(space, 0, n)
	store(t, tier, chunks(other)...)
	drop(p.Run(space, ppc, 2*ppc))
	f.want(t, tier, run, ppc)
	missing(t, tier, run.Chunk(1))
	f.want(t, tier, p.Run(space, 2*ppc, n), ppc)
	store(t, tier, run.Chunk(1))
	f.want(t, tier, run, n)
	// By their first pages the chunks go whole.
	drop(cut(run, ppc+1))
	f.want(t, tier, run, 0)
	missing(t, tier, run.Chunk(0))
	missing(t, tier, run.Chunk(1))
	f.want(t, tier, p.Run(space, 2*ppc, n), ppc)
	// By a longer version the shorter one goes as well.
	if ppc > 1 {
		store(t, tier, cut(run, 1))
		drop(run)
		f.want(t, tier, run, 0)
		f.want(t, tier, cut(run, 1), 0)
	}
	f.want(t, tier, other, n)
	if tier.Stats().Corrupt != 0 {
		t.Error("what was dropped on demand is counted as corrupt")
	}
}

// Calls with many transfers, the same chunk in several of them, hits and misses mixed, in memory
// that is aligned to nothing.
func testBatches(t *testing.T, f Factory, g tiers.Geometry) {
	tier, _ := f.open(t)
	space := NewSpace("batches", g)
	ppc := g.PagesPerChunk
	const prefixes = 8
	var stored, mixed []tiers.Run
	for i := range byte(prefixes) {
		n := 4*ppc - int(i)%ppc
		run := tokens(i, n).Run(space, 0, n)
		stored = append(stored, chunks(run)...)
		// again, and a shorter version
		stored = append(stored, run.Chunk(3), cut(run.Chunk(2), max(1, ppc/2)))
		for _, c := range chunks(run) {
			mixed = append(mixed, c, tokens(i+prefixes, n).Run(space, c.First, c.First+c.Pages()),
				cut(c, 1), c)
		}
	}
	for _, shift := range []int{0, 1, 512, 8} {
		for i, err := range transfers(t.Context(), t, tier, Store, shift, stored...) {
			if err != nil && !(errors.Is(err, tiers.ErrBusy) && twin(stored, i)) {
				t.Fatalf("Store %d: %v", i, err)
			}
		}
		for i, err := range transfers(t.Context(), t, tier, Load, shift, mixed...) {
			if i%4 == 1 {
				if !errors.Is(err, tiers.ErrNotFound) {
					t.Fatalf("Load %d of what is not there: %v", i, err)
				}
			} else if err != nil && !(f.MayForget && errors.Is(err, tiers.ErrNotFound)) {
				t.Fatalf("Load %d: %v", i, err)
			}
		}
	}
}

var errTest = errors.New("the test's cause")

// A context that has ended before the call: its cause, and nothing done.
func testExpired(t *testing.T, f Factory, g tiers.Geometry) {
	tier, _ := f.open(t)
	space := NewSpace("expired", g)
	n := 2 * g.PagesPerChunk
	there, new := tokens(0, n).Run(space, 0, n), tokens(1, n).Run(space, 0, n)
	store(t, tier, chunks(there)...)
	ended, cancel := context.WithCancelCause(context.Background())
	cancel(errTest)
	late, cancelLate := context.WithDeadline(context.Background(), time.Now().Add(-time.Second))
	defer cancelLate()
	for _, ctx := range []context.Context{ended, late} {
		cause := context.Cause(ctx)
		for _, err := range append(transfers(ctx, t, tier, Load, 0, chunks(there)...),
			transfers(ctx, t, tier, Store, 0, chunks(new)...)...) {
			if !errors.Is(err, cause) {
				t.Errorf("a transfer under an ended context: %v, want %v", err, cause)
			}
		}
		if err := tier.Drop(ctx, there); !errors.Is(err, cause) {
			t.Errorf("Drop under an ended context: %v, want %v", err, cause)
		}
		if _, err := tier.Clear(ctx, space.Fingerprint); !errors.Is(err, cause) {
			t.Errorf("Clear under an ended context: %v, want %v", err, cause)
		}
		if !tier.Stats().Local { // from memory it may as well answer
			if err := tier.Contains(ctx, there, make([]uint16, 2)); !errors.Is(err, cause) {
				t.Errorf("Contains under an ended context: %v, want %v", err, cause)
			}
		}
	}
	f.want(t, tier, there, n)
	f.want(t, tier, new, 0)
}

func testSpaces(t *testing.T, f Factory) {
	tier, _ := f.open(t)
	// Equal tokens, hence equal digests of equal size, in all of them; two have even equal
	// geometries.
	var spaces []*tiers.Space
	for _, g := range Geometries() {
		spaces = append(spaces, NewSpace("a", g), NewSpace("b", g))
	}
	pages := func(s *tiers.Space) tiers.Run {
		n := 2*s.Geometry.PagesPerChunk + 1
		return tokens(0, n).Run(s, 0, n)
	}
	for i, s := range spaces {
		for _, other := range spaces[i:] {
			f.want(t, tier, pages(other), 0)
		}
		missing(t, tier, pages(s).Chunk(0))
		store(t, tier, chunks(pages(s))...)
		for _, other := range spaces[:i+1] {
			f.want(t, tier, pages(other), pages(other).Pages())
		}
	}
	clear := func(fp tiers.Fingerprint, least int) {
		t.Helper()
		n, err := tier.Clear(t.Context(), fp)
		if err != nil || n < -1 || n != -1 && n < least && !f.MayForget {
			t.Fatalf("Clear of %d chunks: %d, %v", least, n, err)
		}
	}
	clear(tiers.FingerprintOf([]byte("never seen")), 0)
	gone := spaces[2]
	clear(gone.Fingerprint, 3)
	for _, s := range spaces {
		if s == gone {
			f.want(t, tier, pages(s), 0)
			missing(t, tier, pages(s).Chunk(0))
		} else {
			f.want(t, tier, pages(s), pages(s).Pages())
		}
	}
	if err := tier.Drop(t.Context(), pages(spaces[0])); err != nil {
		t.Fatal(err)
	}
	f.want(t, tier, pages(spaces[0]), 0)
	f.want(t, tier, pages(spaces[1]), pages(spaces[1]).Pages())
	store(t, tier, chunks(pages(gone))...)
	f.want(t, tier, pages(gone), pages(gone).Pages())
	clear(tiers.Fingerprint{}, 3*(len(spaces)-1))
	for _, s := range spaces {
		f.want(t, tier, pages(s), 0)
		missing(t, tier, pages(s).Chunk(1))
	}
	if s := tier.Stats(); s.Chunks > 0 || s.Pages > 0 {
		t.Errorf("after clearing all: %+v", s)
	}
	store(t, tier, chunks(pages(spaces[3]))...)
	f.want(t, tier, pages(spaces[3]), pages(spaces[3]).Pages())
}

// Everything at once, each goroutine on prefixes of its own, which it knows all about, and on
// prefixes that all share.
func testConcurrent(t *testing.T, f Factory) {
	tier, _ := f.open(t)
	g := Geometries()[1]
	own, shared := NewSpace("own", g), NewSpace("shared", g)
	n := 3*g.PagesPerChunk - 1
	const workers, rounds = 8, 15
	var running sync.WaitGroup
	for w := range byte(workers) {
		running.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(w), 1))
			for round := range byte(rounds) {
				p := tokens(w, n)
				p[1] = round
				run := p.Run(own, 0, n)
				for _, err := range transfers(t.Context(), t, tier, Store, 0, chunks(run)...) {
					if err != nil {
						t.Errorf("Store: %v", err)
					}
				}
				common := tokens(byte(rnd.IntN(4)), n).Run(shared, 0, n)
				transfers(t.Context(), t, tier, Store, 0, chunks(common)...)
				transfers(t.Context(), t, tier, Load, 0, chunks(common)...)
				switch rnd.IntN(6) {
				case 0:
					if err := tier.Drop(t.Context(), common); err != nil {
						t.Errorf("Drop: %v", err)
					}
				case 1:
					if _, err := tier.Clear(t.Context(), shared.Fingerprint); err != nil {
						t.Errorf("Clear: %v", err)
					}
				case 2:
					tier.Stats()
				}
				for i, err := range transfers(t.Context(), t, tier, Load, 0, chunks(run)...) {
					if err != nil && !f.MayForget {
						t.Errorf("Load of chunk %d, which nobody else knows: %v", i, err)
					}
				}
				if rnd.IntN(2) == 0 {
					if err := tier.Drop(t.Context(), run); err != nil {
						t.Errorf("Drop: %v", err)
					}
					if err := transfers(t.Context(), t, tier, Load, 0, run.Chunk(0))[0]; !errors.Is(
						err, tiers.ErrNotFound) {
						t.Errorf("Load of what was dropped: %v", err)
					}
				}
			}
		})
	}
	within(t, "concurrent use", running.Wait)
}

// Contexts that end at any moment of a call. What it was to fill is ours again when it returns.
func testCancelled(t *testing.T, f Factory) {
	tier, _ := f.open(t)
	space := NewSpace("cancelled", Geometries()[2])
	ppc := space.Geometry.PagesPerChunk
	n := 20 * ppc
	seed := seedOr(1)
	rnd := rand.New(rand.NewPCG(seed, 0))
	t.Logf("seed %d", seed)
	run := tokens(0, n).Run(space, 0, n)
	store(t, tier, chunks(run)...)
	start := time.Now()
	transfers(t.Context(), t, tier, Load, 0, chunks(run)...)
	whole := time.Since(start)
	var cancelled int
	for i := range 30 {
		ctx, cancel := context.WithCancelCause(context.Background())
		timer := time.AfterFunc(time.Duration(rnd.Int64N(int64(whole)+1)),
			func() { cancel(errTest) })
		var all []memory
		var ts []tiers.Transfer
		for _, r := range chunks(run) {
			m := newMemory(tier, ppc*int(space.Geometry.PageBytes), 0)
			all, ts = append(all, m), append(ts, tiers.Transfer{Run: r, Bytes: m.bytes})
		}
		within(t, "Load", func() {
			tier.Load(ctx, ts, func(i int, err error) {
				if err != nil && !errors.Is(err, errTest) &&
					!(f.MayForget && errors.Is(err, tiers.ErrNotFound)) {
					t.Errorf("a cancelled load: %v", err)
				}
			})
		})
		if ctx.Err() != nil {
			cancelled++
		}
		timer.Stop()
		cancel(nil)
		for _, m := range all {
			m.repoison()
		}
		if i%10 == 0 {
			time.Sleep(5 * time.Millisecond)
		}
		for i, m := range all {
			if !m.untouched() {
				t.Fatalf("the bytes of transfer %d were touched after Load returned", i)
			}
		}
		// A store that is cut off is there whole, or not at all.
		cs := chunks(tokens(byte(1+i), n).Run(space, 0, n))
		errs := func() []error {
			ctx, cancel := context.WithCancelCause(context.Background())
			defer cancel(nil)
			defer time.AfterFunc(time.Duration(rnd.Int64N(int64(whole)+1)),
				func() { cancel(errTest) }).Stop()
			return transfers(ctx, t, tier, Store, 0, cs...)
		}()
		for i, err := range errs {
			if err != nil && !errors.Is(err, errTest) {
				t.Fatalf("a cancelled store: %v", err)
			}
			again := transfers(t.Context(), t, tier, Load, 0, cs[i])[0]
			if again != nil && !errors.Is(again, tiers.ErrNotFound) || again != nil && err == nil &&
				!f.MayForget {
				t.Fatalf("Load after a store that said %v: %v", err, again)
			}
		}
		if err := tier.Drop(t.Context(), tokens(byte(1+i), n).Run(space, 0, n)); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d of 30 loads met the end of their context", cancelled)
	f.want(t, tier, run, n)
}

func testClose(t *testing.T, f Factory) {
	m := f.New(t, MediumOptions{CapacityBytes: plenty})
	tier, err := m.Open()
	if err != nil {
		t.Fatal(err)
	}
	space := NewSpace("close", Geometries()[2])
	n := 8 * space.Geometry.PagesPerChunk
	run := tokens(0, n).Run(space, 0, n)
	store(t, tier, chunks(run)...)
	var closed, ended atomic.Bool
	var running sync.WaitGroup
	var loads atomic.Int64
	for w := range byte(4) {
		running.Go(func() {
			for i := byte(0); !ended.Load(); i++ {
				before := closed.Load()
				fine := func(what string, err error) {
					if before && !errors.Is(err, tiers.ErrClosed) ||
						err != nil && !errors.Is(err, tiers.ErrClosed) &&
							!errors.Is(err, tiers.ErrNotFound) {
						t.Errorf("%s, closed before it: %v: %v", what, before, err)
					}
				}
				for _, err := range transfers(context.Background(), t, tier, Load, 0,
					chunks(run)...) {
					fine("Load", err)
				}
				p := tokens(w+1, space.Geometry.PagesPerChunk)
				p[1] = i % 32
				fine("Store", transfers(context.Background(), t, tier, Store, 0,
					p.Run(space, 0, len(p)))[0])
				fine("Drop", tier.Drop(context.Background(), p.Run(space, 0, len(p))))
				fine("Contains", tier.Contains(context.Background(), run,
					make([]uint16, run.Chunks())))
				_, err := tier.Clear(context.Background(), tiers.FingerprintOf([]byte("other")))
				fine("Clear", err)
				tier.Stats()
				loads.Add(1)
			}
		})
	}
	for loads.Load() < 8 && !t.Failed() {
		time.Sleep(time.Millisecond)
	}
	// One load that is under way for sure when Close begins: all is said about it when Close
	// returns.
	begun, said := make(chan struct{}), atomic.Int64{}
	running.Go(func() {
		var once sync.Once
		var ts []tiers.Transfer
		for range 20 {
			for _, c := range chunks(run) {
				ts = append(ts, tiers.Transfer{Run: c,
					Bytes: make([]byte, int64(c.Pages())*space.Geometry.PageBytes)})
			}
		}
		defer once.Do(func() { close(begun) })
		tier.Load(context.Background(), ts, func(int, error) {
			said.Add(1)
			once.Do(func() { close(begun) })
		})
	})
	<-begun
	var closing sync.WaitGroup
	for range 2 { // by two at once
		closing.Go(func() {
			if err := tier.Close(); err != nil {
				t.Errorf("Close: %v", err)
			}
			if n := int(said.Load()); n != 20*run.Chunks() {
				t.Errorf("Close returned when a load had said only %d of its %d transfers", n,
					20*run.Chunks())
			}
			closed.Store(true)
		})
	}
	within(t, "Close", closing.Wait)
	for at := loads.Load(); loads.Load() < at+8 && !t.Failed(); { // each meets ErrClosed now
		time.Sleep(time.Millisecond)
	}
	ended.Store(true)
	running.Wait()
	if err := tier.Close(); err != nil {
		t.Errorf("Close again: %v", err)
	}
	if !f.Persistent {
		return
	}
	if tier, err = m.Open(); err != nil {
		t.Fatal(err)
	}
	f.want(t, tier, run, n)
	if err := tier.Close(); err != nil {
		t.Error(err)
	}
}

func testEviction(t *testing.T, f Factory) {
	if !f.Evicts {
		t.Skip("this tier drops nothing for room")
	}
	m := f.New(t, MediumOptions{})
	tier, err := m.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer tier.Close()
	g := tiers.Geometry{PageBytes: 16 << 10, PagesPerChunk: 4, PageTokens: 16, DigestBytes: 16}
	space := NewSpace("eviction", g)
	stored := 0
	prefix := func(i int) tiers.Run { // two chunks each
		p := tokens(byte(i), 8)
		p[1], p[2] = byte(i>>8), byte(i>>16)
		return p.Run(space, 0, 8)
	}
	limit := max(tier.Stats().CapacityBytes, 1<<20) * 3
	for ; tier.Stats().Evictions < 50; stored++ {
		if int64(stored)*8*g.PageBytes > limit {
			t.Fatalf("%d prefixes of %d bytes went in without an eviction: %+v", stored,
				8*g.PageBytes, tier.Stats())
		}
		store(t, tier, chunks(prefix(stored))...)
		if s := tier.Stats(); s.UsedBytes > s.CapacityBytes {
			t.Fatalf("used more than the capacity: %+v", s)
		}
		f.found(t, tier, prefix(0)) // keep it warm
	}
	hits, orphans := 0, 0
	for i := range stored {
		switch held := contains(t, tier, prefix(i)); {
		case held[0] == 4:
			hits++
			if n := f.found(t, tier, prefix(i)); n == 0 {
				t.Errorf("prefix %d is said to be there and is not", i)
			}
		case len(held) > 1 && held[1] > 0:
			orphans++
		}
	}
	if n := f.found(t, tier, prefix(stored-1)); n == 0 && !f.MayForget {
		t.Error("what was stored last was dropped")
	}
	if hits < 2 && !f.MayForget {
		t.Errorf("of %d prefixes %d are left", stored, hits)
	}
	t.Logf("%d prefixes stored, %d left, %d continuations without their beginning: %+v", stored,
		hits, orphans, tier.Stats())
}

func testRot(t *testing.T, f Factory) {
	tier, m := f.open(t)
	if m.Rot == nil {
		t.Skip("the medium has no way to rot")
	}
	for _, g := range Geometries() {
		space := NewSpace("rot", g)
		n := 3*g.PagesPerChunk - g.PagesPerChunk/2
		run := tokens(0, n).Run(space, 0, n)
		store(t, tier, chunks(run)...)
		m.Rot()
		for round := range 2 {
			corrupt := 0
			for i, c := range chunks(run) {
				// transfers checks the bytes where a load says that all is well: in pages that were
				// not hit.
				switch err := transfers(t.Context(), t, tier, Load, 0, c)[0]; {
				case errors.Is(err, tiers.ErrCorrupt):
					corrupt++
				case errors.Is(err, tiers.ErrNotFound):
				default:
					t.Errorf("Load of chunk %d after its bytes changed: %v", i, err)
				}
			}
			if round == 0 && corrupt == 0 || round == 1 && corrupt > 0 {
				t.Errorf("round %d: %d chunks were corrupt", round, corrupt)
			}
		}
		if tier.Stats().Corrupt == 0 {
			t.Error("Stats counts none of them")
		}
		f.want(t, tier, run, 0)
		store(t, tier, chunks(run)...)
		f.want(t, tier, run, n)
		if _, err := tier.Clear(t.Context(), space.Fingerprint); err != nil {
			t.Fatal(err)
		}
	}
}

// A medium that answers nothing: calls end with their context, and what is from memory goes on.
func testStalled(t *testing.T, f Factory) {
	tier, m := f.open(t)
	if m.Stall == nil {
		t.Skip("the medium cannot be stalled")
	}
	space := NewSpace("stalled", Geometries()[1])
	n := 2 * space.Geometry.PagesPerChunk
	run := tokens(0, n).Run(space, 0, n)
	store(t, tier, chunks(run)...)
	resume := m.Stall()
	ctx, cancel := context.WithTimeoutCause(context.Background(), 50*time.Millisecond, errTest)
	defer cancel()
	var calls sync.WaitGroup
	calls.Go(func() {
		for _, err := range transfers(ctx, t, tier, Load, 0, chunks(run)...) {
			if err != nil && !errors.Is(err, errTest) {
				t.Errorf("Load: %v", err)
			}
		}
	})
	calls.Go(func() {
		other := tokens(1, n).Run(space, 0, n)
		for _, err := range transfers(ctx, t, tier, Store, 0, chunks(other)...) {
			if err != nil && !errors.Is(err, errTest) {
				t.Errorf("Store: %v", err)
			}
		}
	})
	var local bool
	within(t, "Stats on a stalled medium", func() { local = tier.Stats().Local })
	if local {
		if got := contains(t, tier, run); got[0] == 0 {
			t.Error("Contains forgot while the medium was stalled")
		}
	}
	// a call that is in the kernel cannot be called back: it ends when the medium answers
	resumed := time.AfterFunc(5*time.Second, resume)
	within(t, "a call on a stalled medium", calls.Wait)
	if resumed.Stop() {
		resume()
	}
	f.want(t, tier, run, n)
}

func seedOr(d uint64) uint64 {
	if *seedFlag != 0 {
		return *seedFlag
	}
	return d
}
