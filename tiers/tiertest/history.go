package tiertest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"testing"

	"lookaside/tiers"
)

// version is a chunk that was stored and may still be in the tier.
type version struct {
	run  tiers.Run
	sure bool // it must be there, unless the tier evicts or forgets
}

// world is a tier and its model: for each space and first page of a chunk, the versions that may be
// there.
type world struct {
	t      *testing.T
	f      Factory
	m      *Medium
	tier   tiers.Tier
	seed   uint64
	rnd    *rand.Rand
	step   int
	spaces []*tiers.Space
	model  map[memKey][]version
	// faulty: the medium may fail at any call. An error is then no fault of the tier, but the model
	// no longer knows what is there. Chunks that were dropped after a failure (or cleared, if the
	// medium lies) may be back when the medium is opened again.
	faulty  bool
	dropped map[memKey][]version
	hits    int
	exact   int // results that the model knew had to be hits
}

func (w *world) fatalf(format string, args ...any) {
	w.t.Helper()
	w.t.Fatalf("seed %d step %d (replay: -run '%s' -tiertest.seed=%d): %s", w.seed, w.step,
		w.t.Name(), w.seed, fmt.Sprintf(format, args...))
}

// agree returns how many pages, from the first, two runs of one chunk share.
func agree(a, b tiers.Run) int {
	d := a.Space.Geometry.DigestBytes
	n := 0
	for n < min(a.Pages(), b.Pages()) &&
		string(a.Hashes[n*d:(n+1)*d]) == string(b.Hashes[n*d:(n+1)*d]) {
		n++
	}
	return n
}

// bounds returns how many pages of a run of one chunk must be held, and how many may be.
func (w *world) bounds(run tiers.Run) (least, most int) {
	for _, v := range w.model[keyOf(run)] {
		n := agree(v.run, run)
		most = max(most, n)
		if v.sure && !w.f.Evicts && !w.f.MayForget {
			least = max(least, n)
		}
	}
	return least, most
}

// doubt records that a chunk may or may not be there.
func (w *world) doubt(key memKey) {
	for i := range w.model[key] {
		w.model[key][i].sure = false
	}
}

// run returns a random run of few tokens and short prefixes, so that most calls meet earlier ones.
func (w *world) run() tiers.Run {
	space := w.spaces[w.rnd.IntN(len(w.spaces))]
	ppc := space.Geometry.PagesPerChunk
	p := make(Prefix, 1+w.rnd.IntN(3*ppc))
	p[0] = byte(w.rnd.IntN(3))
	for range w.rnd.IntN(3) { // where it leaves what others have in common
		p[w.rnd.IntN(len(p))] = byte(w.rnd.IntN(3))
	}
	from := 0
	if w.rnd.IntN(3) == 0 {
		from = w.rnd.IntN((len(p)-1)/ppc+1) * ppc
	}
	return p.Run(space, from, len(p))
}

// allowed reports whether an error is allowed. Only a failure of the medium is.
func (w *world) allowed(err error) bool {
	return w.faulty && err != nil && !errors.Is(err, tiers.ErrClosed) &&
		!errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded)
}

func (w *world) store() {
	runs := chunks(w.run())
	if w.rnd.IntN(3) == 0 {
		runs = append(runs, chunks(w.run())...)
	}
	for i, err := range transfers(w.t.Context(), w.t, w.tier, Store, w.shift(), runs...) {
		// The least capacity there is may be too little for all chunks of a call at once.
		if err != nil && !w.allowed(err) && !(errors.Is(err, tiers.ErrBusy) && (w.f.Evicts ||
			twin(runs, i))) {
			w.fatalf("Store: %v", err)
		}
		key := keyOf(runs[i])
		w.model[key] = append(w.model[key], version{runs[i], err == nil})
	}
}

func (w *world) shift() int { return []int{0, 0, 1, 512}[w.rnd.IntN(4)] }

func (w *world) load() {
	runs := chunks(w.run())
	for i, err := range transfers(w.t.Context(), w.t, w.tier, Load, w.shift(), runs...) {
		least, most := w.bounds(runs[i])
		switch {
		case err == nil && most < runs[i].Pages():
			w.fatalf("Load of %d pages, of which no more than %d can be there, is a hit",
				runs[i].Pages(), most)
		case err == nil:
			w.hits++
			if least == runs[i].Pages() {
				w.exact++
			}
		case errors.Is(err, tiers.ErrNotFound) && least < runs[i].Pages():
		case w.allowed(err):
			w.doubt(keyOf(runs[i]))
		default:
			w.fatalf("Load of %d pages, of which %d must be there: %v", runs[i].Pages(), least, err)
		}
	}
}

func (w *world) contains() {
	run := w.run()
	held := dirty(run)
	if err := w.tier.Contains(w.t.Context(), run, held); err != nil {
		if !w.allowed(err) {
			w.fatalf("Contains: %v", err)
		}
		return
	}
	whole := true
	for i, n := range held {
		least, most := w.bounds(run.Chunk(i))
		if int(n) > most || int(n) < least && whole && !w.faulty {
			w.fatalf("Contains says %d for chunk %d, of which at least %d and at most %d pages are there", n, i, least, most)
		}
		whole = whole && int(n) == run.Chunk(i).Pages()
	}
}

func (w *world) drop() {
	run := w.run()
	err := w.tier.Drop(w.t.Context(), run)
	if err != nil && !w.allowed(err) {
		w.fatalf("Drop: %v", err)
	}
	for _, c := range chunks(run) {
		key := keyOf(c)
		w.doubt(key) // also of what only begins alike: the tier may keep their common pages once
		if err != nil {
			continue
		}
		var left []version
		for _, v := range w.model[key] {
			if agree(v.run, c) < min(v.run.Pages(), c.Pages()) {
				left = append(left, v)
			} else {
				w.dropped[key] = append(w.dropped[key], version{run: v.run})
			}
		}
		w.model[key] = left
	}
}

func (w *world) clear() {
	fp := w.spaces[w.rnd.IntN(len(w.spaces))].Fingerprint
	if w.rnd.IntN(3) == 0 {
		fp = tiers.Fingerprint{}
	}
	_, err := w.tier.Clear(w.t.Context(), fp)
	if err != nil && !w.allowed(err) {
		w.fatalf("Clear: %v", err)
	}
	of := func(key memKey) bool { return fp == (tiers.Fingerprint{}) || key.fp == fp }
	for key := range w.model {
		if of(key) && err != nil {
			w.doubt(key)
		}
	}
	if err == nil {
		for key, vs := range w.model {
			if of(key) && w.f.Lies {
				w.dropped[key] = append(w.dropped[key], vs...)
			}
		}
		maps.DeleteFunc(w.model, func(key memKey, _ []version) bool { return of(key) })
		maps.DeleteFunc(w.dropped, func(key memKey, _ []version) bool {
			return of(key) &&
				!w.f.Lies
		})
	}
}

// open opens the medium, and retries if it may fail. It reports whether the medium is open.
func (w *world) open() bool {
	if w.faulty && w.m.Failed() {
		for key, vs := range w.dropped {
			w.model[key] = append(w.model[key], vs...)
			w.doubt(key)
		}
		clear(w.dropped)
	}
	for try := 0; ; try++ {
		tier, err := w.m.Open()
		if err == nil {
			w.tier = tier
			return true
		}
		if !w.allowed(err) {
			w.fatalf("Open: %v", err)
		}
		if try == 3 {
			return false
		}
		for key := range w.model {
			w.doubt(key)
		}
	}
}

func (w *world) close() {
	err := w.tier.Close()
	w.tier = nil
	if err == nil {
		return
	}
	if !w.allowed(err) {
		w.fatalf("Close: %v", err)
	}
	for key := range w.model {
		w.doubt(key)
	}
}

func (w *world) steps(n int) {
	if !w.open() {
		return
	}
	defer func() {
		if w.tier != nil {
			_ = w.tier.Close()
		}
	}()
	for w.step = range n {
		if w.tier == nil && !w.open() {
			return // it has failed for good
		}
		within(w.t, "a step", func() {
			switch at := w.rnd.IntN(100); {
			case at < 35:
				w.store()
			case at < 65:
				w.load()
			case at < 85:
				w.contains()
			case at < 95:
				w.drop()
			case at < 97:
				w.clear()
			case at < 99 && w.f.Persistent:
				w.close() // and the next step opens it
			default:
				if s := w.tier.Stats(); s.CapacityBytes != -1 && s.UsedBytes > s.CapacityBytes {
					w.fatalf("more is used than there is: %+v", s)
				}
			}
		})
	}
	if w.tier != nil {
		w.close()
	}
}

// testHistories runs random calls against the model.
func testHistories(t *testing.T, f Factory, gs []tiers.Geometry) {
	first, last := uint64(1), uint64(*seedsFlag)
	if *seedFlag != 0 {
		first, last = *seedFlag, *seedFlag
	}
	hits, exact := 0, 0
	for seed := first; seed <= last; seed++ {
		o := MediumOptions{CapacityBytes: plenty}
		g := f
		if f.Evicts && seed%2 == 0 {
			o.CapacityBytes = 0
		} else {
			g.Evicts = false
		}
		w := newWorld(t, g, g.New(t, o), seed, gs)
		w.steps(*stepsFlag)
		hits, exact = hits+w.hits, exact+w.exact
	}
	t.Logf("%d hits, %d of them certain beforehand", hits, exact)
	if hits == 0 && !f.MayForget {
		t.Error("no load was a hit")
	}
}

func newWorld(t *testing.T, f Factory, m *Medium, seed uint64, gs []tiers.Geometry) *world {
	w := &world{t: t, f: f, m: m, seed: seed, rnd: rand.New(rand.NewPCG(seed, 0x74696572)),
		model:   map[memKey][]version{},
		dropped: map[memKey][]version{}}
	for _, g := range gs {
		w.spaces = append(w.spaces, NewSpace("one", g), NewSpace("other", g))
	}
	return w
}

// Faults runs one history again and again. In each run one operation of the medium fails: the
// first, the second, … until a run has fewer. A failure may lose the chunk concerned, and never
// returns a wrong byte. Faults is a part of Run, and is exported for media that fail in other ways.
func Faults(t *testing.T, f Factory) {
	seed := seedOr(1)
	t.Logf("seed %d", seed)
	for n := int64(1); ; n++ {
		m := f.New(t, MediumOptions{CapacityBytes: plenty, FailNth: n})
		if m.Failed == nil {
			t.Skip("the medium cannot be made to fail")
		}
		w := newWorld(t, f, m, seed, Geometries()[1:2])
		w.faulty = true
		w.steps(24)
		if !m.Failed() {
			t.Logf("%d operations could fail", n-1)
			if n == 1 {
				t.Error("none")
			}
			return
		}
	}
}
