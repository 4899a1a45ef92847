package directory

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"lookaside/internal/invariants"
	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/slab/media"
	"lookaside/tiers/tiertest"
)

// place is where a chunk lies.
type place struct {
	region uint32
	offset uint64
}

// pages are pages by their space and digest.
type pages map[string]bool

func (p pages) add(space int, digests string, size int) {
	for ; digests != ""; digests = digests[size:] {
		p[fmt.Sprint(space, digests[:size])] = true
	}
}

// has reports whether p has all of some.
func (p pages) has(some pages) bool {
	for page := range some {
		if !p[page] {
			return false
		}
	}
	return true
}

// held is a chunk that was kept when a step began.
type held struct {
	handle uint64
	pages  pages
}

// history is a random history of a sidecar whose directory is looked at after each write to it, and
// in the middle of each that may be torn, as the next process would find it.
type history struct {
	t   *testing.T
	m   *machine
	rnd *rand.Rand
	p   *process

	open      []*grants
	taken     []engine.Verification   // by keepers that have not written their entries yet
	promoted  map[uint64]engine.Grant // granted to promotions, by handle
	committed pages                   // that ever were

	before map[place]held // what was kept when the step began, by where it lies
	seen   []pages        // what each clone of the step has
	loose  bool           // the step may rewrite entries of what stays
	ended  bool           // the process is being started, or ended
	clones int

	recarved uint64
}

// clone opens the directory as it is now, as the next process does. It returns what that finds.
func (h *history) clone(when string) pages {
	h.clones++
	path := filepath.Join(filepath.Dir(h.m.path), "clone")
	copyFile(h.t, h.p.d.file.f, path)
	defer os.Remove(path)
	m := *h.m
	m.path = path
	q := m.start(engine.Config{}, nil)
	defer q.close()
	if q.d.Why() != "" {
		h.t.Fatalf("clone %d, %s: %s", h.clones, when, q.d.Why())
	}
	all, n := pages{}, 0
	k := newScratch()
	for _, p := range q.d.names {
		if p == nil {
			continue
		}
		for slot := range uint32(p.Slots) {
			if e, ok := q.d.read(p, slot, k); ok {
				at := place{p.Region, uint64(p.Offset) + uint64(slot)*uint64(p.Stride)}
				h.check(when, p, at, &e, all)
				n++
			}
		}
	}
	if ready := q.e.Stats().ReadySlots; ready != n || q.d.Stats().Kept != n || q.found.Chunks < n ||
		q.found.Damaged != 0 {
		h.t.Fatalf("clone %d, %s: %d entries, %d chunks, %+v", h.clones, when, n, ready, q.found)
	}
	if h.clones%50 == 0 {
		if err := q.e.Check(); err != nil {
			h.t.Fatalf("clone %d, %s: %v", h.clones, when, err)
		}
	}
	return all
}

// check checks an entry that the next process finds, and adds its pages to all.
func (h *history) check(when string, p *piece, at place, e *media.Entry, all pages) {
	for i, sp := range h.m.spaces {
		if sp.Fingerprint != e.Space {
			continue
		}
		d := sp.Geometry.DigestBytes
		size := uint64(e.Pages) * uint64(sp.Geometry.PageBytes)
		run := tiers.Run{Space: sp, First: e.First, Hashes: bytes.Clone(e.Digests)}
		if page := tiertest.WrongPage(h.m.memory[at.region][at.offset:][:size], run); page >= 0 {
			h.t.Fatalf("clone %d, %s: page %d of %+v at %+v is wrong", h.clones, when, page, e, at)
		}
		for i := range e.Pages {
			size := uint64(sp.Geometry.PageBytes)
			page := h.m.memory[at.region][at.offset+uint64(i)*size:][:size]
			if p.id.PageSum(e.Digests[i*d:(i+1)*d], e.Generation, page) != e.Sum(i) {
				h.t.Fatalf("clone %d, %s: the sum of page %d of %+v", h.clones, when, i, e)
			}
		}
		mine := pages{}
		mine.add(i, string(e.Digests), d)
		if !h.committed.has(mine) {
			h.t.Fatalf("clone %d, %s: %+v at %+v was not committed", h.clones, when, e, at)
		}
		overlaps := func(g engine.Grant, pageBytes int64) bool {
			return g.Region == at.region && g.Offset < at.offset+size &&
				at.offset < g.Offset+uint64(g.Pages)*uint64(pageBytes)
		}
		for _, o := range h.open {
			for _, g := range o.all {
				if overlaps(g, o.run.Space.Geometry.PageBytes) {
					h.t.Fatalf("clone %d, %s: %+v at %+v is granted: %+v", h.clones, when, e, at, g)
				}
			}
		}
		for _, g := range h.promoted {
			if overlaps(g, 1) { // Pages are bytes there
				h.t.Fatalf("clone %d, %s: %+v at %+v is granted: %+v", h.clones, when, e, at, g)
			}
		}
		all.add(i, string(e.Digests), d)
		return
	}
	h.t.Fatalf("clone %d, %s: %+v is of no space", h.clones, when, e)
}

// wrote is called after each write to the directory.
func (h *history) wrote() {
	if h.ended {
		return
	}
	h.seen = append(h.seen, h.clone("at a write"))
}

// pagesOf returns the pages of a chunk.
func (h *history) pagesOf(v *engine.Verification) pages {
	for i, id := range h.p.ids {
		if id == v.Space {
			all := pages{}
			all.add(i, string(v.Hashes), h.m.spaces[i].Geometry.DigestBytes)
			return all
		}
	}
	h.t.Fatalf("%+v is of no space", v)
	return nil
}

// kept returns all that is held, may be read and is kept, by where it lies.
func (h *history) kept() map[place]held {
	all := map[place]held{}
	k := newScratch()
	for _, v := range list(h.p.e) {
		p := h.p.d.pieces[v.Piece].Load()
		if p == nil {
			h.t.Fatalf("%+v is in no piece", v)
		}
		if e, ok := h.p.d.read(p, v.Slot, k); ok && e.Pages == v.Pages {
			all[place{v.Region, v.Offset}] = held{v.Handle, h.pagesOf(&v)}
		}
	}
	return all
}

// step does one step and compares what clones have with what was there all the time.
func (h *history) step(name string, do func()) {
	h.before, h.seen, h.loose = h.kept(), nil, false
	do()
	after := h.kept()
	if !h.loose {
		for i, seen := range h.seen {
			for at, was := range h.before {
				if after[at].handle == was.handle && !seen.has(was.pages) {
					h.t.Fatalf("%s: what is kept at %+v was not found at write %d of %d", name, at, i,
						len(h.seen))
				}
			}
		}
	}
	h.clone("after " + name)
}

// take takes a chunk as a keeper does that is slow.
func (h *history) take() {
	if v, _, ok := h.p.e.NextUnkept(nil); ok {
		h.taken = append(h.taken, v)
	}
}

// keep writes the entry of a chunk that was taken, whatever became of it.
func (h *history) keep() {
	h.loose = true // the chunk may have grown
	if len(h.taken) == 0 {
		h.p.d.keepNext(newScratch())
		return
	}
	i := h.rnd.IntN(len(h.taken))
	v := h.taken[i]
	h.taken = append(h.taken[:i], h.taken[i+1:]...)
	if err := h.p.d.keep(&v, h.p.d.commits.Add(1), newScratch()); err != nil {
		h.t.Fatal(err)
	}
}

// whole keeps everything, and compares a clone with the engine.
func (h *history) whole() {
	for len(h.taken) > 0 {
		h.keep()
	}
	h.p.keepAll()
	found := h.clone("when all is kept")
	for _, v := range list(h.p.e) {
		if !found.has(h.pagesOf(&v)) {
			h.t.Fatalf("%+v is held, and not found", v)
		}
	}
	if st := h.p.e.Stats(); h.p.d.Stats().Kept != st.ReadySlots {
		h.t.Fatalf("%d are held, %+v", st.ReadySlots, h.p.d.Stats())
	}
	if err := h.p.e.Check(); err != nil {
		h.t.Fatal(err)
	}
}

func (h *history) prefix() (space int, p tiertest.Prefix) {
	space = h.rnd.IntN(len(h.m.spaces))
	p = make(tiertest.Prefix, 1+h.rnd.IntN(14))
	tokens := 1 + h.rnd.IntN(3)
	for i := range p {
		p[i] = byte(h.rnd.IntN(tokens))
	}
	return space, p
}

// note notes what a store or a promotion has committed.
func (h *history) note(space int, digests []byte) {
	h.committed.add(space, string(digests), h.m.spaces[space].Geometry.DigestBytes)
}

func (h *history) prepare() {
	space, p := h.prefix()
	ppc := h.m.spaces[space].Geometry.PagesPerChunk
	from := h.rnd.IntN((len(p)-1)/ppc+1) * ppc
	if g := h.p.prepare(space, p, from, len(p)); g != nil {
		h.open = append(h.open, g)
		if h.rnd.IntN(2) == 0 {
			h.p.fill(g)
		}
	}
}

func (h *history) endStore() {
	if len(h.open) == 0 {
		return
	}
	i := h.rnd.IntN(len(h.open))
	g := h.open[i]
	h.p.fill(g)
	h.open = append(h.open[:i], h.open[i+1:]...)
	if h.rnd.IntN(4) == 0 {
		if err := h.p.e.AbortStore(owner(g.space), g.store); err != nil {
			h.t.Fatal(err)
		}
		return
	}
	var failed []uint32
	for j := range g.all {
		if h.rnd.IntN(8) == 0 {
			failed = append(failed, uint32(j))
		}
	}
	h.note(g.space, g.run.Hashes)
	h.p.commit(g, failed...)
}

// promote loads a part of a prefix as from a tier.
func (h *history) promote() {
	space, p := h.prefix()
	sp := h.m.spaces[space]
	g := sp.Geometry
	run := p.Run(sp, 0, len(p))
	n, err := h.p.e.Lookup(owner(space), 1, 0, run.Hashes)
	if err != nil {
		h.t.Fatal(err)
	}
	first := n / g.PagesPerChunk * g.PagesPerChunk
	defer func() { _ = h.p.e.Cancel(owner(space), 1) }() // there may be nothing left of it
	if first == len(p) {
		return
	}
	rest := p.Run(sp, first, len(p))
	have := make([]uint16, rest.Chunks())
	for i := range have {
		have[i] = uint16(min(g.PagesPerChunk, rest.Pages()-i*g.PagesPerChunk))
	}
	all, err := h.p.e.PreparePromotion(owner(space), 1, engine.PromotionRun{FirstPage: first,
		Prev: rest.Prev, Hashes: rest.Hashes, Have: have}, nil)
	if err != nil {
		h.t.Fatal(err)
	}
	for _, c := range all {
		if c.State == engine.PromotionGranted {
			h.promoted[c.Promotion] = engine.Grant{Region: c.Region, Offset: c.Offset,
				Pages: uint32(int64(c.Pages) * g.PageBytes)}
		}
	}
	h.clone("with a promotion under way")
	for _, c := range all {
		if c.State != engine.PromotionGranted {
			continue
		}
		part := rest
		part.First += c.Chunk * g.PagesPerChunk
		part.Hashes = rest.Hashes[c.Chunk*g.PagesPerChunk*g.DigestBytes:][:c.Pages*g.DigestBytes]
		tiertest.FillRun(h.m.memory[c.Region][c.Offset:][:int64(c.Pages)*g.PageBytes], part)
		ok := h.rnd.IntN(5) > 0
		if ok {
			h.note(space, part.Hashes)
		}
		delete(h.promoted, c.Promotion)
		if err := h.p.e.FinishPromotion(c.Promotion, ok, 0); err != nil {
			h.t.Fatal(err)
		}
	}
	if len(all) > 0 {
		if _, err := h.p.e.SettleLookup(owner(space), 1, len(p)); err != nil {
			h.t.Fatal(err)
		}
	}
}

// drop drops a prefix, or all of a space.
func (h *history) drop() {
	space, p := h.prefix()
	if h.rnd.IntN(4) == 0 {
		h.p.e.ClearSpace(h.p.ids[space])
		return
	}
	run := p.Run(h.m.spaces[space], 0, len(p))
	if _, err := h.p.e.Drop(h.p.ids[space], 0, run.Hashes); err != nil {
		h.t.Fatal(err)
	}
}

// restart starts the next process, after a kill or a takeover.
func (h *history) restart() {
	takeover := h.rnd.IntN(2) == 0
	if takeover {
		for len(h.open) > 0 {
			h.endStore()
		}
		h.p.keepAll()
		for len(h.taken) > 0 {
			h.keep()
		}
	}
	h.recarved += h.p.e.Stats().Recarved
	h.ended, h.open, h.taken, h.loose = true, nil, nil, true
	old := h.p
	if !takeover {
		old.close()
	}
	before := old.d.Generation()
	h.start(func(o *Options) { o.Takeover = takeover })
	if takeover {
		old.close()
	}
	if h.p.d.Generation()-before != map[bool]uint64{false: 1, true: 0}[takeover] {
		h.t.Fatalf("takeover %v: generation %d after %d", takeover, h.p.d.Generation(), before)
	}
	h.verify()
	h.ended = false
}

// verify checks what was found, as lookups do.
func (h *history) verify() {
	h.loose = true
	for range h.rnd.IntN(40) {
		space, p := h.prefix()
		h.p.verifyAll(space, p)
	}
	if st := h.p.e.Stats(); st.VerifyFailed > 0 {
		h.t.Fatalf("%+v", st)
	}
}

func (h *history) start(edit func(*Options)) {
	h.p = h.m.start(engine.Config{}, func(o *Options) {
		if o.wrote = h.wrote; edit != nil {
			edit(o)
		}
	})
}

// TestCrashClones: whenever the process dies, the next one finds only what was committed, with its
// bytes, nothing that is granted, and all that was kept and not dropped.
func TestCrashClones(t *testing.T) {
	seeds, steps := uint64(12), 150
	if testing.Short() || invariants.Enabled {
		seeds, steps = 3, 60
	}
	for seed := range seeds {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			t.Parallel()
			gs := []tiers.Geometry{
				{PageBytes: 512, PagesPerChunk: 4, PageTokens: 16, DigestBytes: 32},
				{PageBytes: 1000, PagesPerChunk: 3, PageTokens: 16, DigestBytes: 16},
				{PageBytes: 256, PagesPerChunk: 1, PageTokens: 16, DigestBytes: 8},
			}
			h := &history{t: t, m: newMachine(t, gs[:1+seed%3]...),
				rnd: rand.New(rand.NewPCG(seed, 18)), promoted: map[uint64]engine.Grant{},
				committed: pages{}, ended: true}
			h.start(nil)
			h.ended = false
			h.p.addRegion(16 << 10)
			for range steps {
				switch k := h.rnd.IntN(40); {
				case k < 10 && len(h.open) < 3:
					h.step("preparing a store", h.prepare)
				case k < 20:
					h.step("ending a store", h.endStore)
				case k < 23:
					h.step("taking a chunk", h.take)
				case k < 26:
					h.step("keeping a chunk", h.keep)
				case k < 31:
					h.step("promoting", h.promote)
				case k < 33:
					h.step("dropping", h.drop)
				case k < 35:
					h.step("restarting", h.restart)
				case k < 36:
					h.step("verifying", h.verify)
				case k < 37 && len(h.m.memory) < 3:
					h.step("growing", func() { h.p.addRegion(12 << 10) })
				default:
					h.whole()
				}
			}
			h.whole()
			h.ended, h.recarved = true, h.recarved+h.p.e.Stats().Recarved
			h.p.close()
			t.Logf("%d clones, %d pieces taken for others", h.clones, h.recarved)
		})
	}
}
