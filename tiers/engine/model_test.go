package engine

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"lookaside/internal/leak"
	"lookaside/tiers"
	"lookaside/tiers/policy"
	"lookaside/tiers/tenant"
)

var (
	seedFlag  = flag.Uint64("engine.seed", 0, "replay this one seed of the random histories")
	seedsFlag = flag.Int("engine.seeds", 150, "random histories to run")
	stepsFlag = flag.Int("tiers.steps", 400, "calls of each")
)

func TestMain(m *testing.M) { leak.Main(m) }

// prefix is a sequence of tokens, one a page; its page digests chain over it as vLLM's do.
type prefix []byte

func (p prefix) digests(from, to, size int) []byte {
	var out []byte
	h := sha256.Sum256([]byte("root"))
	for i, token := range p[:to] {
		h = sha256.Sum256(append(h[:], token))
		if i >= from {
			out = append(out, h[:size]...)
		}
	}
	return out
}

// pattern fills buf with the bytes that a page has: they depend on the space and on the whole
// digest.
func pattern(buf []byte, fp tiers.Fingerprint, digest []byte) {
	h := sha256.Sum256(append(slices.Clone(fp[:]), digest...))
	for i := range buf {
		buf[i] = h[i%len(h)]
	}
}

// The model: what was committed, who leased what. It is as plain as can be, and knows nothing of
// slots.
type modelSpace struct {
	fp        tiers.Fingerprint
	g         tiers.Geometry
	id        SpaceID
	committed map[string]bool // page digests, what peers lent included
	own       map[string]bool // those that the arena had
	clears    int
	tiers     [modelTiers]map[string]bool // what the tiers have of it
	restored  map[string]bool             // page digests that may be held and not verified
}

// modelTiers is how many tiers there are at most.
const modelTiers = 3

type modelLookup struct {
	p        prefix
	first, n int
	deadline int64
	loads    int            // that have taken it over
	clears   int            // of the space when it began to wait
	waits    []*modelFlight // by chunk, from the one that holds page first+n on; nil: it was ready
	end      int            // the page after the last that it waits for
}

// modelFlight is a chunk on its way up from a tier.
type modelFlight struct {
	space  *modelSpace
	p      prefix
	ex     Extent
	clears int
	ended  bool
	ok     bool
	lent   bool // from a peer
	got    int  // pages of it
}

// modelCascade is a chunk on its way down to a tier.
type modelCascade struct {
	tier  int
	space *modelSpace
	item  CascadeItem
}

type modelLoad struct {
	p       prefix
	first   int
	extents []Extent
}

type modelStore struct {
	p      prefix
	grants []Grant
	clears int // of the space when it was prepared
}

type modelSession struct {
	owner   Owner
	space   *modelSpace
	takers  int // loads that take over each lookup
	lookups map[uint64]*modelLookup
	loads   map[uint64]*modelLoad
	stores  map[uint64]*modelStore
	writes  []Grant // see writeLate
}

type world struct {
	t                 *testing.T
	seed              uint64
	rng               *rand.Rand
	e                 *Engine
	now               int64
	deadline          int64
	arena             map[uint32][]byte
	spaces            []*modelSpace
	sessions          []*modelSession
	owners            Owner
	pins              map[uint64]*modelSpace
	flights           map[uint64]*modelFlight
	cascades          map[uint64]*modelCascade
	moves             map[uint64]*modelMove
	drained, going    map[uint32]bool // regions
	sizes             []int64         // of regions
	restores          bool            // regions come with restored chunks
	checks            []modelCheck
	verified, corrupt int
	patrols           []patrolling
	patrolPlace       PatrolPlace
	patrolSums        map[patrolledPages]uint64
	compared          int // checksums, with that of before
	nextRegion        uint32
	moved, unplugged  int
	calls             int // kinds of calls, by their weight
	tiers             []TierAdmission
	chain             map[string]string // by digest: that of the page before
	place             map[string]int    // by digest: the page's index
	awake             [modelTiers]bool
	gone              int
	// what regions are carved for from the start, if they are: then it is an arena that keeps its
	// chunks itself
	fixed                     []tiers.Geometry
	policies                  []*strict
	ended                     []uint64 // handles that are no longer good
	alphabet                  int
	depth                     int
	step                      int
	bad                       bool // a chunk was dropped as bad
	hits                      int
	cascaded, droppedCascades int
	exacts                    int // answers that the model knew exactly
	followers                 followers
	mirror                    mirror
	peers                     modelPeers
	tenants                   modelTenants
	advised                   int
	expired                   bool                   // Expire was called since the clock moved
	kept                      map[tiers.Geometry]int // slots that hints keep
	hinted, deferred          int                    // chunks evicted in spite of a hint; pages
}

func (w *world) fatal(format string, args ...any) {
	w.t.Helper()
	w.t.Fatalf("seed %d step %d (replay: go test ./tiers/engine -run TestRandomHistories -engine.seed=%d): %s", w.seed, w.step, w.seed, fmt.Sprintf(format, args...))
}

func (w *world) check(err error) {
	w.t.Helper()
	if err != nil {
		w.fatal("%v", err)
	}
}

func (w *world) chance(n int) bool { return w.rng.IntN(n) == 0 }

// exact says whether nothing was forgotten so far: then the model knows each answer.
func (w *world) exact() bool {
	s := w.e.Stats()
	return !w.bad && s.Evictions == 0 && s.Limited == 0 && s.ShedPages == 0
}

func newWorld(t *testing.T, seed uint64) *world {
	w := &world{t: t, seed: seed, rng: rand.New(rand.NewPCG(seed, 1)), arena: map[uint32][]byte{},
		pins:    map[uint64]*modelSpace{},
		flights: map[uint64]*modelFlight{}, cascades: map[uint64]*modelCascade{},
		moves: map[uint64]*modelMove{}, drained: map[uint32]bool{}, going: map[uint32]bool{},
		nextRegion: 200, chain: map[string]string{}, place: map[string]int{},
		kept: map[tiers.Geometry]int{}}
	w.calls = 60
	if w.chance(2) { // regions are drained, and go
		w.calls = 72
	}
	w.restores = w.chance(3)
	w.alphabet, w.depth = 1+w.rng.IntN(3), 1+w.rng.IntN(40)
	w.deadline = 1 + w.rng.Int64N(2*growPatience)
	digest := []int{8, 16, 32}[w.rng.IntN(3)]
	ppc := []int{1, 2, 3, 4, 16}[w.rng.IntN(5)]
	var geometries []tiers.Geometry
	for range 1 + w.rng.IntN(2) {
		geometries = append(geometries, tiers.Geometry{PageBytes: 16 + 8*w.rng.Int64N(3),
			PagesPerChunk: ppc, PageTokens: 16, DigestBytes: digest})
		ppc, digest = 1+w.rng.IntN(5), []int{8, 16, 32}[w.rng.IntN(3)]
	}
	slot := geometries[0].PageBytes * int64(geometries[0].PagesPerChunk)
	var regions []int64
	switch w.rng.IntN(4) {
	case 0: // one slot
		regions = []int64{slot}
	case 1: // tiny regions
		for range 1 + w.rng.IntN(5) {
			regions = append(regions, slot*int64(1+w.rng.IntN(3))+w.rng.Int64N(slot))
		}
	case 2:
		regions = []int64{slot * int64(5+w.rng.IntN(20)), slot * int64(5+w.rng.IntN(20))}
	case 3: // room for all
		regions = []int64{slot * 3000, slot * 3000, 200 * 16 * 40}
	}
	w.sizes = regions
	var limit int64
	for _, r := range regions {
		limit += r
	}
	if w.chance(3) {
		limit = 1 // the index must grow
	}
	cfg := Config{
		Now: func() int64 { return w.now }, Seed: seed, LeaseDeadline: time.Duration(w.deadline),
		MaxSpaces: 4, MaxOwners: 8, MaxLookupsPerOwner: 1 + w.rng.IntN(20),
		MaxPages: 64, MinPageBytes: 1, OwnerShare: []float64{0.3, 0.5, 1}[w.rng.IntN(3)],
		ArenaLimitBytes: limit,
	}
	cfg.JointShare = []float64{0.4, 0.8, 1}[w.rng.IntN(3)]
	cfg.JournalBytes = minJournalBytes
	cfg.Policy = policy.Names()[w.rng.IntN(len(policy.Names()))]
	cfg.PromotingShare = []float64{0.1, 0.5, 1}[w.rng.IntN(3)]
	cfg.HintShare = []float64{0.1, 0.5, 1}[w.rng.IntN(3)]
	cfg.HintLimit = time.Duration(1 + w.rng.Int64N(4*w.deadline))
	cfg.LowWater = []float64{0.1, 0.5, 1}[w.rng.IntN(3)]
	cfg.PartialDelay = time.Duration(1 + w.rng.Int64N(growPatience/5))
	cfg.Wake = func(work Work) {
		switch work {
		case WorkReturns:
			w.peers.rung = true
			return
		case WorkCopies:
			w.peers.due = true
			return
		case WorkKeep:
			w.mirror.awake = true
			return
		}
		w.awake[work] = true
	}
	cfg.ForeignSlots, cfg.CopyAfter = w.startPeers()
	w.startMirror(&cfg)
	w.startTenants(&cfg)
	for range w.rng.IntN(4) {
		cfg.Tiers = append(cfg.Tiers, TierAdmission{Admit: Admission(w.rng.IntN(5)),
			Queue: []int{1, 3, 0}[w.rng.IntN(3)]})
	}
	if len(cfg.Tiers) < modelTiers && w.chance(2) {
		w.fixed = geometries
		cfg.FixedRegions, cfg.NoExtend = true, true
		cfg.Tiers = append(cfg.Tiers, TierAdmission{Self: true, Queue: []int{3, 0}[w.rng.IntN(2)]})
	}
	w.tiers = cfg.Tiers
	if w.chance(4) {
		cfg.MaxLeasesPerOwner = 1 + w.rng.IntN(30)
	}
	w.start(cfg)
	e := w.e
	if e.cascades.learner != nil && w.chance(2) {
		declineEnds(e.cascades.learner)
	}
	if w.chance(2) {
		e.leases.endSlice = 1 + w.rng.IntN(3)
	}
	if w.chance(3) {
		e.tagMask = 3 << 30 // nearly all digests collide
	}
	for i, size := range regions {
		w.addRegion(uint32(100+i), size)
	}
	for i := range 1 + w.rng.IntN(3) {
		s := &modelSpace{fp: tiers.FingerprintOf([]byte{byte(i)}),
			g: geometries[w.rng.IntN(len(geometries))], committed: map[string]bool{},
			own: map[string]bool{}, restored: map[string]bool{}}
		for t := range s.tiers {
			s.tiers[t] = map[string]bool{}
		}
		var err error
		s.id, err = e.OpenSpace(s.fp, s.g)
		w.check(err)
		w.spaces = append(w.spaces, s)
	}
	return w
}

// start makes the engine.
func (w *world) start(cfg Config) {
	e, err := New(cfg)
	w.check(err)
	w.e, w.policies = e, nil
	plain := e.newPolicy
	e.newPolicy = func(foreign bool) policy.Policy {
		s := &strict{Policy: plain(foreign), notes: map[uint32]bool{}, slots: map[uint32]int{},
			groups: map[uint32]uint8{}, w: w}
		w.policies = append(w.policies, s)
		return s
	}
}

// addRegion adds a region, and in an arena that keeps its chunks itself carves it, with slots that
// lie somewhere.
func (w *world) addRegion(id uint32, size int64) {
	if w.fixed == nil {
		w.arena[id] = make([]byte, size)
		w.check(w.e.AddRegion(id, size))
		return
	}
	g := w.fixed[w.rng.IntN(len(w.fixed))]
	slot := packed(g).Stride
	slots := max(1, size/slot)
	at := Placement{Offset: w.rng.Int64N(100), Stride: slot + w.rng.Int64N(2)*w.rng.Int64N(30)}
	w.arena[id] = make([]byte, at.Offset+at.Stride*slots)
	w.check(w.e.AddCarvedRegion(id, g, int(slots), at))
}

func (w *world) page(s *modelSpace, ex Extent, i int) []byte {
	mem := w.arena[ex.Region]
	if ex.Region >= peerRegions {
		mem = w.peers.mem[ex.Region]
	}
	at := int64(ex.Offset) + int64(i)*s.g.PageBytes
	if mem == nil || at < 0 || at+s.g.PageBytes > int64(len(mem)) {
		w.fatal("extent %+v lies outside the arena", ex)
	}
	return mem[at : at+s.g.PageBytes]
}

// verify compares the bytes of a load with those of its prefix.
func (w *world) verify(s *modelSpace, l *modelLoad) {
	want := make([]byte, s.g.PageBytes)
	for _, ex := range l.extents {
		for i := range int(ex.Pages) {
			p := int(ex.Page) + i
			pattern(want, s.fp, l.p.digests(p, p+1, s.g.DigestBytes))
			if !bytes.Equal(w.page(s, ex, i), want) {
				w.fatal("FALSE HIT: page %d of %v in space %d", p, l.p, s.id)
			}
		}
	}
}

func (w *world) prefix() prefix {
	p := make(prefix, 1+w.rng.IntN(w.depth))
	same := w.rng.IntN(len(p) + 1) // beyond it the prefixes part
	for i := range p {
		if i >= same {
			p[i] = byte(w.rng.IntN(w.alphabet))
		}
	}
	return p
}

func (w *world) session() *modelSession {
	if len(w.sessions) == 0 || len(w.sessions) < 6 && w.chance(20) {
		w.owners++
		s := &modelSession{owner: w.owners, space: w.spaces[w.rng.IntN(len(w.spaces))],
			lookups: map[uint64]*modelLookup{}, loads: map[uint64]*modelLoad{},
			stores: map[uint64]*modelStore{}}
		w.check(w.e.AddOwner(s.owner, s.space.id))
		s.takers = 1
		if w.chance(3) {
			s.takers = 2 + w.rng.IntN(2)
			w.check(w.e.SetTakers(s.owner, s.takers))
		}
		w.sessions = append(w.sessions, s)
	}
	return w.sessions[w.rng.IntN(len(w.sessions))]
}

// sorted makes iteration over a map repeatable.
func sorted[K uint64, V any](m map[K]V) []K {
	keys := make([]K, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

func pick[V any](w *world, m map[uint64]V) (uint64, V, bool) {
	var v V
	if len(m) == 0 {
		return 0, v, false
	}
	keys := sorted(m)
	k := keys[w.rng.IntN(len(keys))]
	return k, m[k], true
}

func (w *world) lookup(s *modelSession) {
	p := w.prefix()
	first := w.rng.IntN(len(p))
	if w.chance(2) {
		first = 0
	}
	size := s.space.g.DigestBytes
	id := uint64(w.rng.IntN(8))
	delete(s.lookups, id)
	held := make([]uint16, len(p)/s.space.g.PagesPerChunk+1)
	w.check(w.e.Contains(s.space.id, first, p.digests(first, len(p), size), held))
	limited := w.e.Stats().Limited
	pages, err := w.lookUp(s, id, first, p)
	if errors.Is(err, tiers.ErrBusy) {
		return
	}
	w.check(err)
	for i := first; i < first+pages; i++ {
		if !s.space.committed[string(p.digests(i, i+1, size))] {
			w.fatal("FALSE HIT: page %d of %v was never committed", i, p)
		}
	}
	if w.exact() {
		w.exacts++
		if next := first + pages; next < len(p) &&
			s.space.own[string(p.digests(next, next+1, size))] {
			w.fatal("page %d of %v is held and was not found", next, p)
		}
	}
	if w.e.Unverified() > 0 {
		// an older lookup of that name may have been the last to use what an unverified chunk holds
		// as well
		w.check(w.e.Contains(s.space.id, first, p.digests(first, len(p), size), held))
	}
	contained := 0
	for i := 0; first+contained < len(p); i++ {
		contained += int(held[i])
		if next := first + contained; held[i] == 0 || next%s.space.g.PagesPerChunk != 0 {
			break
		}
	}
	if (contained > pages || contained < pages && w.peers.loans == nil) &&
		w.e.Stats().Limited == limited {
		w.fatal("%d pages of %v from page %d hit, contained are %v", pages, p, first, held)
	}
	if pages > 0 {
		w.hits++
		s.lookups[id] = &modelLookup{p: p, first: first, n: pages, deadline: w.now + w.deadline}
	}
}

// lookUp looks a prefix up, in one piece or in parts, which is the same.
func (w *world) lookUp(s *modelSession, id uint64, first int, p prefix) (pages int, err error) {
	size, ppc := s.space.g.DigestBytes, s.space.g.PagesPerChunk
	if !w.chance(3) {
		return w.e.Lookup(s.owner, id, first, p.digests(first, len(p), size))
	}
	part := func(from int) int { return min(len(p), (from/ppc+1+w.rng.IntN(3))*ppc) }
	to := part(first)
	pages, handle, err := w.e.BeginLookup(s.owner, id, first, p.digests(first, to, size))
	if err != nil {
		return 0, err
	}
	if (handle != 0) != (pages > 0) {
		w.fatal("handle %#x of %d pages", handle, pages)
	}
	for from := first; pages == to-first && to < len(p); {
		from, to = to, part(to)
		n, err := w.e.ContinueLookup(handle, p.digests(from, to, size))
		w.check(err)
		pages += n
	}
	if handle != 0 && w.chance(5) {
		w.check(w.e.Cancel(s.owner, id))
		if _, err := w.e.ContinueLookup(handle, p.digests(first, to, size)); !errors.Is(err,
			tiers.ErrStale) && !errors.Is(err, tiers.ErrNotFound) {
			w.fatal("a lookup that was cancelled goes on: %v", err)
		}
		return w.e.Lookup(s.owner, id, first, p.digests(first, len(p), size))
	}
	return pages, nil
}

func (w *world) prepareStore(s *modelSession) {
	p, g := w.prefix(), s.space.g
	first := w.rng.IntN(len(p)) / g.PagesPerChunk * g.PagesPerChunk
	if w.chance(2) {
		first = 0
	}
	var prev []byte
	if first > 0 {
		prev = p.digests(first-1, first, g.DigestBytes)
	}
	exact := w.exact()
	out := []Grant{{Page: 12345}}
	share := Share{Of: 1}
	if w.chance(2) {
		share = Share{Of: 2 + w.rng.IntN(2)}
		share.Index = w.rng.IntN(share.Of)
	}
	mine := func(page int) bool { return page/g.PagesPerChunk%share.Of == share.Index }
	asked := 0
	for i := first; i < len(p); i++ {
		if mine(i) {
			asked++
		}
	}
	how := Storing{Share: share, Tenant: w.tenant()}
	if w.chance(2) {
		how.Hints, how.FromUse = w.hint()
	}
	var res StoreResult
	var err error
	w.fairly(s.space, how.Tenant, func() {
		res, out, err = w.e.PrepareStoring(s.owner, first, prev,
			p.digests(first, len(p), g.DigestBytes), how, out)
	})
	if errors.Is(err, tiers.ErrBusy) {
		return
	}
	w.check(err)
	grants := slices.Clone(out[1:])
	granted := map[int]bool{}
	end := first
	for _, gr := range grants {
		if w.drained[gr.Region] {
			w.fatal("grant %+v in a drained region", gr)
		}
		if int(gr.Page) < end || int(gr.Page+gr.Pages) > len(p) || gr.Pages == 0 ||
			int(gr.Page)/g.PagesPerChunk != int(gr.Page+gr.Pages-1)/g.PagesPerChunk {
			w.fatal("grant %+v after page %d of %d", gr, end, len(p))
		}
		end = int(gr.Page + gr.Pages)
		for i := range int(gr.Pages) {
			if !mine(int(gr.Page) + i) {
				w.fatal("grant %+v, which is not of share %+v", gr, share)
			}
			granted[int(gr.Page)+i] = true
			page := w.page(s.space, gr, i)
			for j := range page {
				page[j] = 0xEE // half-written
			}
		}
	}
	w.deferred += res.Deferred
	if res.Deferred > 0 && how.FromUse < 2 {
		w.fatal("%d pages are deferred", res.Deferred)
	}
	if res.Held+res.Shed+res.Deferred+len(granted) != asked ||
		(res.Store == 0) != (len(grants) == 0) {
		w.fatal("%+v and %d granted for %d pages", res, len(granted), asked)
	}
	shed := res.Shed // the last of them
	if res.Deferred > 0 {
		shed = asked // which of them is not told
	}
	for i := len(p) - 1; i >= first; i-- {
		if !mine(i) {
			continue
		}
		if shed > 0 {
			shed--
			continue
		}
		held := s.space.own[string(p.digests(i, i+1, g.DigestBytes))]
		if !granted[i] && !held && !s.space.restored[string(p.digests(i, i+1, g.DigestBytes))] {
			w.fatal("page %d of %v is neither held nor granted", i, p)
		}
		if exact && res.Shed == 0 && granted[i] && held {
			// Only as the front of a chunk that goes elsewhere, or behind a gap.
			last := min((i/g.PagesPerChunk+1)*g.PagesPerChunk, len(p)) - 1
			if s.space.own[string(p.digests(last, last+1, g.DigestBytes))] {
				w.fatal("page %d of %v is held and granted", i, p)
			}
		}
	}
	if res.Store != 0 {
		s.stores[res.Store] = &modelStore{p: p, grants: grants, clears: s.space.clears}
	}
}

func (w *world) commit(s *modelSession) {
	h, st, ok := pick(w, s.stores)
	if !ok {
		return
	}
	var failed []uint32
	g := s.space.g
	for i, gr := range st.grants {
		if w.chance(10) {
			failed = append(failed, uint32(i))
			continue
		}
		for j := range int(gr.Pages) {
			p := int(gr.Page) + j
			d := st.p.digests(p, p+1, g.DigestBytes)
			pattern(w.page(s.space, gr, j), s.space.fp, d)
			if st.clears == s.space.clears {
				s.space.committed[string(d)], s.space.own[string(d)] = true, true
			}
			w.note(st.p, p, g.DigestBytes)
		}
	}
	if w.chance(10) {
		before := w.e.Stats()
		if err := w.e.CommitStore(s.owner, h, []uint32{uint32(len(st.grants))}); !errors.Is(err,
			tiers.ErrInvalid) || w.e.Stats() != before {
			w.fatal("a commit of no grant: %v", err)
		}
	}
	w.check(w.e.CommitStore(s.owner, h, failed))
	delete(s.stores, h)
	w.ended = append(w.ended, h)
}

func (w *world) prepareLoad(s *modelSession) {
	sched := w.sessions[w.rng.IntN(len(w.sessions))]
	id, l, ok := pick(w, sched.lookups)
	if !ok {
		return
	}
	if l.n == 0 {
		return // it waits for all of it
	}
	first := l.first + w.rng.IntN(l.n)
	n := 1 + w.rng.IntN(l.first+l.n-first)
	if w.chance(10) {
		n = l.first + l.n - first + 1
		if _, _, err := w.e.PrepareLoad(s.owner, sched.owner, id, first, n, nil); !errors.Is(err,
			tiers.ErrStale) && !errors.Is(err, tiers.ErrIncompatible) {
			w.fatal("a load beyond its lookup: %v", err)
		}
		return
	}
	h, extents, err := w.e.PrepareLoad(s.owner, sched.owner, id, first, n, nil)
	if s.space != sched.space {
		if !errors.Is(err, tiers.ErrIncompatible) {
			w.fatal("a load across spaces: %v", err)
		}
		return
	}
	if errors.Is(err, tiers.ErrBusy) || errors.Is(err, tiers.ErrStale) && (w.bad ||
		s.space.clears > 0) {
		return
	}
	w.check(err)
	if l.loads++; l.loads == sched.takers {
		delete(sched.lookups, id)
	}
	next := first
	for _, ex := range extents {
		if int(ex.Page) != next {
			w.fatal("extents %+v of a load from page %d", extents, first)
		}
		next += int(ex.Pages)
		w.peers.read(w, ex)
	}
	if next != first+n {
		w.fatal("extents %+v for pages %d to %d", extents, first, first+n-1)
	}
	ld := &modelLoad{p: l.p, first: first, extents: extents}
	w.verify(s.space, ld)
	s.loads[h] = ld
}

func (w *world) release(s *modelSession) {
	h, l, ok := pick(w, s.loads)
	if !ok {
		return
	}
	w.verify(s.space, l)
	var bad []uint32
	if w.chance(15) {
		bad = []uint32{uint32(w.rng.IntN(len(l.extents)))}
		w.bad = true
		if ex := l.extents[bad[0]]; ex.Region >= peerRegions {
			w.peers.find(ex).bad = true
		}
	}
	w.check(w.e.Release(s.owner, h, bad))
	delete(s.loads, h)
	w.ended = append(w.ended, h)
}

func (w *world) trim(s *modelSession) {
	id, l, ok := pick(w, s.lookups)
	if !ok {
		return
	}
	ppc := s.space.g.PagesPerChunk
	end := max(l.first+l.n, l.end)
	at := l.first + w.rng.IntN(end-l.first+2)
	w.check(w.e.Trim(s.owner, id, at))
	if at >= end {
		delete(s.lookups, id)
		return
	}
	if cut := at / ppc * ppc; cut > l.first {
		if gone := cut/ppc - (l.first+l.n)/ppc; gone > 0 {
			l.waits = l.waits[gone:]
		}
		l.n = max(0, l.n-(cut-l.first))
		l.first = cut
	}
}

// stale sends a handle that is no longer good, is another's, or never was.
func (w *world) stale(s *modelSession) {
	var h uint64
	want := []error{tiers.ErrNotFound, tiers.ErrStale}
	switch other := w.sessions[w.rng.IntN(len(w.sessions))]; {
	case len(w.ended) > 0 && w.chance(2):
		h = w.ended[w.rng.IntN(len(w.ended))]
		want = want[1:]
	case other != s && w.chance(2):
		if h, _, _ = pick(w, other.loads); h == 0 {
			h, _, _ = pick(w, other.stores)
		}
		want = want[:1]
	default:
		h = w.rng.Uint64() >> w.rng.IntN(64)
		for _, x := range w.sessions {
			if x.loads[h] != nil || x.stores[h] != nil {
				return
			}
		}
	}
	before := w.e.Stats()
	for i, err := range []error{w.e.Release(s.owner, h, nil), w.e.CommitStore(s.owner, h, nil),
		w.e.AbortStore(s.owner, h)} {
		if !slices.ContainsFunc(want, func(e error) bool { return errors.Is(err, e) }) {
			w.fatal("call %d with handle %#x: %v, want %v", i, h, err, want)
		}
	}
	if after := w.e.Stats(); before != after {
		w.fatal("a stale handle changed %+v to %+v", before, after)
	}
}

func (w *world) clear() {
	s := w.spaces[w.rng.IntN(len(w.spaces))]
	w.e.ClearSpace(s.id)
	s.committed, s.own, s.restored = map[string]bool{}, map[string]bool{}, map[string]bool{}
	for t := range s.tiers {
		s.tiers[t] = map[string]bool{}
	}
	s.clears++
}

func (w *world) die(s *modelSession) {
	w.e.RemoveOwner(s.owner)
	for h := range s.loads {
		w.ended = append(w.ended, h)
	}
	for h := range s.stores {
		w.ended = append(w.ended, h)
	}
	slices.Sort(w.ended)
	w.sessions = slices.DeleteFunc(w.sessions, func(x *modelSession) bool { return x == s })
}

func (w *world) stall() {
	w.now += w.rng.Int64N(w.deadline + 1)
	if w.chance(10) { // whatever is not used from now on is old
		w.now += agedAfter
	}
	want := 0
	for _, s := range w.sessions {
		for id, l := range s.lookups {
			if l.deadline <= w.now && len(l.waits) == 0 {
				want++
				delete(s.lookups, id)
			}
		}
	}
	w.expired = true
	if n := w.e.Expire(); n != want {
		w.fatal("%d lookups expired, want %d", n, want)
	}
}

// freeze has some sessions, and one that there is not, frozen, and the others not. They may do what
// they like all the same.
func (w *world) freeze() {
	frozen := []Owner{1 << 40}
	for _, s := range w.sessions {
		if w.chance(3) {
			frozen = append(frozen, s.owner)
		}
	}
	w.e.SetFrozen(frozen)
}

func (w *world) pin() {
	if k, _, ok := pick(w, w.pins); ok && w.chance(2) {
		w.check(w.e.Unpin(k))
		delete(w.pins, k)
		if err := w.e.Unpin(k); !errors.Is(err, tiers.ErrStale) {
			w.fatal("a second unpin: %v", err)
		}
		return
	}
	s, p := w.spaces[w.rng.IntN(len(w.spaces))], w.prefix()
	pin, pages, err := w.e.Pin(s.id, p.digests(0, len(p), s.g.DigestBytes))
	w.check(err)
	for i := range pages {
		if !s.committed[string(p.digests(i, i+1, s.g.DigestBytes))] {
			w.fatal("FALSE HIT: pinned page %d of %v was never committed", i, p)
		}
	}
	if pages > 0 {
		w.pins[pin] = s
	}
}

func (w *world) run(steps int) {
	for w.step = 0; w.step < steps; w.step++ {
		s := w.session()
		if w.restores {
			w.restoreSome(s)
		}
		w.patrolSome()
		switch w.rng.IntN(w.calls) {
		case 0, 1, 2, 3, 4, 5, 6, 7:
			w.lookup(s)
		case 8, 9, 10, 11, 12, 13, 14:
			w.prepareStore(s)
		case 15, 16, 17, 18, 19, 20, 21:
			w.commit(s)
		case 22:
			if h, _, ok := pick(w, s.stores); ok {
				w.check(w.e.AbortStore(s.owner, h))
				delete(s.stores, h)
				w.ended = append(w.ended, h)
			}
		case 23, 24, 25, 26, 27:
			w.prepareLoad(s)
		case 28, 29, 30, 31:
			w.release(s)
		case 32:
			w.trim(s)
		case 33:
			if id, _, ok := pick(w, s.lookups); ok {
				w.check(w.e.Cancel(s.owner, id))
				delete(s.lookups, id)
			} else if err := w.e.Cancel(s.owner, 99); !errors.Is(err, tiers.ErrNotFound) {
				w.fatal("a cancel of nothing: %v", err)
			}
		case 34:
			w.stale(s)
		case 35:
			w.stall()
		case 36:
			if w.chance(3) {
				w.die(s)
			}
			if w.chance(3) {
				w.freeze()
			}
		case 37:
			if w.chance(10) {
				w.clear()
			}
		case 38:
			w.pin()
		case 40, 41, 42, 43, 44:
			w.promote(s)
		case 45, 46, 47, 48, 49:
			w.finishPromotion()
		case 50, 51, 52:
			w.settle(s)
		case 53, 54, 55:
			w.cascade()
		case 56, 57, 58:
			w.endCascade()
		case 59:
			if w.chance(6) {
				w.drop()
			}
		case 60, 61:
			if w.chance(2) {
				w.drain()
			}
		case 62, 63, 64, 65, 66:
			w.move()
		case 67, 68, 69, 70:
			w.endMove()
		case 71:
			if w.chance(4) {
				w.unplug()
			}
		case 39:
			// less than a deadline: nothing is done about it yet
			w.now += w.rng.Int64N(growPatience / 20)
			w.expired = false
		}
		if w.chance(8) {
			w.advise()
		}
		w.checkHints()
		if w.seed%4 == 0 || w.chance(20) {
			w.check(w.e.Check())
			w.checkPolicies()
		}
		for w.e.EndSome() { // whoever ends lookups has it done
			if w.seed%4 == 0 || w.chance(20) {
				w.check(w.e.Check())
			}
		}
		w.follow()
		w.lend()
		w.keepSome()
		w.takeOver()
		w.checkFill()
		st := w.e.Stats()
		leases := 0
		for _, s := range w.sessions {
			leases += len(s.lookups)
		}
		if st.OpenLookups != leases {
			w.fatal("%d lookups, want %d", st.OpenLookups, leases)
		}
	}
	for len(w.sessions) > 0 {
		w.die(w.sessions[0])
	}
	for len(w.flights) > 0 {
		w.finishPromotion()
	}
	for len(w.cascades) > 0 {
		w.endCascade()
	}
	for len(w.moves) > 0 {
		w.endMove()
	}
	for len(w.checks) > 0 {
		w.endVerify()
	}
	for pin := range w.pins {
		w.check(w.e.Unpin(pin))
	}
	w.endFollow()
	w.endLend()
	w.restart()
	w.check(w.e.Check())
	st := w.e.Stats()
	if st.Leases != 0 || st.LeasedSlots != 0 || st.FillingSlots != 0 ||
		st.OpenLookups+st.OpenLoads+st.OpenStores != 0 || st.FreeSlots+st.ReadySlots != st.Slots {
		w.fatal("at the end: %+v", st)
	}
	for _, s := range w.spaces {
		w.e.ClearSpace(s.id)
		w.check(w.e.CloseSpace(s.id))
	}
	if st := w.e.Stats(); st.FreeSlots != st.Slots || st.UsedBytes != 0 || st.Pages != 0 {
		w.fatal("after clearing all: %+v", st)
	}
	w.check(w.e.Check())
	w.e.Close()
	if err := w.e.AddRegion(1, 1); !errors.Is(err, tiers.ErrClosed) {
		w.fatal("after Close: %v", err)
	}
}

// TestRandomHistories runs random histories of sessions against the model, in many configurations.
// Arena bytes are simulated: what a load is pointed at must hold the bytes of exactly that prefix
// in that space, from PrepareLoad to Release, whatever was evicted meanwhile.
func TestRandomHistories(t *testing.T) {
	if *seedFlag != 0 {
		newWorld(t, *seedFlag).run(*stepsFlag)
		return
	}
	var total Counters
	hits, exacts, cascades, dropped, unplugged, verified, corrupt, compared := 0, 0, 0, 0, 0, 0, 0,
		0
	var synced, gaps, borrowed, mixed, copied, kept, refused, restarted uint64
	var taken, cut, blocked, written, spared uint64
	advised, hinted, deferred := 0, 0, 0
	for seed := uint64(1); seed <= uint64(*seedsFlag); seed++ {
		w := newWorld(t, seed)
		w.run(*stepsFlag)
		s := w.e.stats
		hits += w.hits
		exacts += w.exacts
		cascades += w.cascaded
		dropped += w.droppedCascades
		unplugged += w.unplugged
		verified += w.verified
		corrupt += w.corrupt
		compared += w.compared
		advised, hinted, deferred = advised+w.advised, hinted+w.hinted, deferred+w.deferred
		kept, refused, restarted = kept+w.mirror.published, refused+w.mirror.refused,
			restarted+w.mirror.restarted
		taken, cut = taken+w.mirror.taken, cut+w.mirror.cut
		blocked, written = blocked+w.mirror.blocked, written+w.mirror.written
		spared += uint64(w.tenants.spared)
		synced += uint64(w.followers.synced)
		gaps += w.followers.gaps
		borrowed, mixed, copied = borrowed+w.peers.borrowed, mixed+w.peers.mixed,
			copied+w.peers.copied
		for _, c := range []struct {
			to *uint64
			v  uint64
		}{{&total.Evictions, s.Evictions}, {&total.Duplicates, s.Duplicates},
			{&total.Replaced, s.Replaced}, {&total.Extended, s.Extended},
			{&total.Recarved, s.Recarved},
			{&total.Promotions, s.Promotions}, {&total.PromotionsJoined, s.PromotionsJoined},
			{&total.PromotionsFailed, s.PromotionsFailed},
			{&total.PromotionsLate, s.PromotionsLate}, {&total.PromotedPages, s.PromotedPages},
			{&total.Dropped, s.Dropped},
			{&total.Limited, s.Limited}, {&total.Bad, s.Bad}, {&total.Cleared, s.Cleared},
			{&total.LoadPages, s.LoadPages}, {&total.Expired, s.Expired}, {&total.Moved, s.Moved},
			{&total.ForeignEvicted, s.ForeignEvicted}, {&total.ForeignBad, s.ForeignBad},
			{&total.CopiesFailed, s.CopiesFailed},
			{&total.HintsRetained, s.HintsRetained}, {&total.HintsPinned, s.HintsPinned},
			{&total.HintsDemoted, s.HintsDemoted}, {&total.HintsOver, s.HintsOver},
			{&total.HintsExpired, s.HintsExpired}} {
			*c.to += c.v
		}
	}
	t.Logf("%d hits, %d answers known exactly; %+v", hits, exacts, total)
	for name, n := range map[string]uint64{"evictions": total.Evictions,
		"duplicates": total.Duplicates, "replaced": total.Replaced, "extended": total.Extended,
		"recarved": total.Recarved, "limited": total.Limited, "bad": total.Bad,
		"cleared": total.Cleared, "loads": total.LoadPages, "expired": total.Expired,
		"promotions": total.Promotions, "joined promotions": total.PromotionsJoined,
		"failed promotions": total.PromotionsFailed, "late promotions": total.PromotionsLate,
		"promoted pages": total.PromotedPages, "dropped": total.Dropped,
		"cascades": uint64(cascades), "dropped cascades": uint64(dropped),
		"known answers": uint64(exacts), "moves": total.Moved, "removed regions": uint64(unplugged),
		"verified": uint64(verified), "corrupt": uint64(corrupt),
		"compared checksums": uint64(compared), "followers compared": synced,
		"kept chunks": kept, "chunks gone before they were kept": refused,
		"chunks restored after a restart": restarted, "leases taken over": taken,
		"lookups cut at a takeover": cut, "dropped chunks read during a takeover": blocked,
		"grants written to after a takeover": written,
		"evictions that spared a tenant":     spared,
		"followers overrun":                  gaps,
		"loans":                              borrowed, "loads from the arena and from peers": mixed,
		"loans evicted": total.ForeignEvicted, "bad loans": total.ForeignBad, "copies": copied,
		"failed copies": total.CopiesFailed,
		"advice":        uint64(advised), "retained chunks evicted": uint64(hinted),
		"deferred pages": uint64(deferred), "retained": total.HintsRetained,
		"pinned": total.HintsPinned, "demoted": total.HintsDemoted,
		"hints beyond their share": total.HintsOver, "expired hints": total.HintsExpired} {
		if n == 0 && *seedsFlag >= 100 {
			t.Errorf("the histories never came to %s", name)
		}
	}
}

// FuzzEngine drives the engine with arbitrary calls and arguments: nothing may panic or break an
// invariant.
func FuzzEngine(f *testing.F) {
	f.Add([]byte("\x00\x01\x02\x03"))
	rng := rand.New(rand.NewPCG(1, 2))
	for range 20 {
		b := make([]byte, 400)
		for i := range b {
			b[i] = byte(rng.UintN(256))
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		now := int64(0)
		e, err := New(Config{Now: func() int64 { return now }, MaxPages: 40, MaxOwners: 4,
			MaxLookupsPerOwner: 4, MaxSpaces: 3, MinPageBytes: 1, ArenaLimitBytes: 4096,
			Tiers: []TierAdmission{{Admit: AdmitStored, Queue: 3}, {Admit: AdmitReused},
				{Admit: AdmitEvicted}, {Admit: AdmitLearned}}, LowWater: 0.5,
			ForeignSlots: 3, CopyAfter: 1, Keep: true})
		if err != nil {
			t.Fatal(err)
		}
		defer e.Close()
		next := func() int {
			if len(data) == 0 {
				return 0
			}
			b := data[0]
			data = data[1:]
			return int(b)
		}
		odd := func() int { // mostly small, sometimes at an edge
			b := next()
			return []int{b % 4, b % 16, b, -b, 1 << 30, 1<<30 - b, -1 << 62,
				1<<62 + b}[max(0, b%12-4)]
		}
		take := func(n int) []byte {
			p := make(prefix, n)
			for i := range p {
				p[i] = byte(next() % 2)
			}
			return p.digests(0, n, 32)
		}
		handles := []uint64{0, 1, 1 << 32, 1<<32 | 1, ^uint64(0)}
		handle := func() uint64 { return handles[next()%len(handles)] }
		for len(data) > 0 {
			o := Owner(next() % 5)
			switch next() % 30 {
			case 29:
				at := int64(odd())
				num, err := e.RestorePiece(Piece{Region: uint32(next() % 4), Slots: odd(),
					Geometry:  tiers.Geometry{PageBytes: 16, PagesPerChunk: 4, DigestBytes: 8},
					Placement: Placement{at, 64 + int64(odd()%2)}})
				if err == nil && (num == 0 || num > MaxPieces) {
					t.Fatal(num)
				}
				sp, _ := e.OpenSpace(tiers.Fingerprint{1}, tiers.Geometry{PageBytes: 16,
					PagesPerChunk: 4, PageTokens: 16, DigestBytes: 8})
				h := take(4)
				_ = e.RestoreIn(num+uint32(odd()%2), []Restored{{Slot: uint32(next() % 4),
					Space: sp, First: 4 * (next() % 3), Pages: 1, Hashes: h[:8],
					Unverified: next()%2 == 0}})
				if next()%4 > 0 {
					e.EndRestore()
				}
				if v, _, ok := e.NextUnkept(nil); ok {
					handles = append(handles, v.Handle)
				}
				e.Publish(handle(), odd(), func() {})
			case 27:
				_ = e.FinishBorrow(handle(), Loan{Peer: uint64(next() % 3),
					Region: uint32(next() % 3), Offset: uint64(next()), Pages: next() % 6,
					Handle: uint64(next() % 50)})
			case 28:
				e.DropPeer(uint64(next() % 8))
				e.SweepForeign()
				e.TakeReturns(nil)
				if c, ok := e.NextCopy(); ok {
					handles = append(handles, c.Handle)
				}
				e.EndCopy(handle(), next()%4 > 0)
				_ = e.AddArenaOwner(o, SpaceID(next()%3))
			case 17, 18:
				var lent []bool
				if next()%2 == 0 {
					for range 12 {
						lent = append(lent, next()%2 == 0)
					}
				}
				have := []uint16{uint16(next()), uint16(odd()), uint16(next() % 5), 4, 4, 4, 4, 4,
					4, 4, 4, 4}
				h := take(next() % 12)
				out, err := e.PreparePromotion(o, uint64(next()%4), PromotionRun{
					FirstPage: odd(), Prev: take(next() % 2), Hashes: h, Have: have[:next()%13],
					Lent: lent,
				}, nil)
				for _, c := range out {
					handles = append(handles, c.Promotion)
				}
				if err != nil && len(out) > 0 {
					t.Fatal(out, err)
				}
			case 19:
				h := handle()
				e.PromotionWanted(h)
				_ = e.FinishPromotion(h, next()%4 > 0, odd())
			case 20:
				_, _ = e.SettleLookup(o, uint64(next()%4), odd())
			case 21:
				items, _ := e.NextCascades(odd(), odd(), nil, nil)
				for _, c := range items {
					handles = append(handles, c.Handle)
				}
				e.EndCascade(handle(), next()%3 > 0)
				e.CascadeQueue(odd())
			case 22:
				first, h := odd(), take(next()%12)
				_ = e.Contains(SpaceID(next()%5), first, h, make([]uint16, next()%13))
				if next()%4 == 0 {
					_, _ = e.Drop(SpaceID(next()%5), first, h)
				}
				if next()%2 == 0 {
					_, _ = e.Advise(SpaceID(next()%5), tenant.ID(next()%3), first, h,
						Advice(next()%3), Hints{Priority: uint8(next()),
							Retain: time.Duration(odd()), Pin: time.Duration(odd())})
					now += int64(next())
					e.Expire()
				}
			case 23:
				if err := e.Drain(uint32(next() % 4)); err == nil && next()%3 == 0 {
					_ = e.Undrain(uint32(next() % 4))
				}
				if next()%8 == 0 {
					_ = e.RemoveRegion(uint32(next() % 4))
				}
			case 25:
				id, g := uint32(next()%4), tiers.Geometry{PageBytes: 16, PagesPerChunk: 4,
					PageTokens: 16, DigestBytes: 8}
				sp, _ := e.OpenSpace(tiers.Fingerprint{1}, g)
				_ = e.AddCarvedRegion(id, g, next()%20, Placement{int64(odd()), int64(odd())})
				for range next() % 4 {
					first, h := next()%3*4, take(12)
					n := 1 + next()%4
					x := Restored{Slot: uint32(next() % 20), Space: sp, First: first, Pages: n,
						Order: uint64(next()), Unverified: next()%4 > 0}
					for page := first; page < first+n; page++ {
						x.Hashes = append(x.Hashes, h[page*32:page*32+8]...)
					}
					_ = e.Restore(id, []Restored{x})
				}
				if next()%4 > 0 {
					e.EndRestore()
				}
			case 26:
				found, _, err := e.NextVerify(o, odd(), take(next()%12), nil, nil)
				if err == nil && len(found) > 0 && e.Unverified() == 0 {
					t.Fatal(found)
				}
				for _, v := range found {
					handles = append(handles, v.Handle)
				}
				h := handle()
				e.EndVerify(h, next()%3 > 0)
				e.Verified(h)
			case 24:
				moves, _, _, _ := e.NextMoves(uint32(next()%4), odd(), odd(), next()%2 == 0, nil,
					nil)
				for _, m := range moves {
					handles = append(handles, m.Handle)
				}
				e.EndMove(handle(), MoveEnd(next()%3))
			case 0:
				// pages may be of one byte: a larger one is carved into tables of gigabytes
				add := e.AddRegion
				if next()%2 == 0 {
					add = e.AddDrainedRegion
				}
				_ = add(uint32(next()%4), min(int64(odd()), 1<<16))
			case 1:
				_ = e.AddRegion(uint32(next()%4), 1024)
			case 2:
				id, err := e.OpenSpace(tiers.Fingerprint{byte(next() % 4)},
					tiers.Geometry{PageBytes: int64(odd()), PagesPerChunk: odd(), PageTokens: odd(),
						DigestBytes: []int{8, 16, 32, odd()}[next()%4]})
				if err == nil {
					_ = e.AddOwner(o, id)
				}
			case 3:
				id, err := e.OpenSpace(tiers.Fingerprint{1}, tiers.Geometry{PageBytes: 16,
					PagesPerChunk: 4, PageTokens: 16, DigestBytes: 8})
				if err == nil {
					_ = e.AddOwner(o, id)
				}
			case 4:
				e.RemoveOwner(o)
			case 5, 6:
				h := take(next() % 12)
				_, _ = e.Lookup(o, uint64(next()%4), odd(), h[:max(0, len(h)-next()%2)])
			case 7, 8:
				first := odd()
				prev := take(next() % 2)
				res, _, err := e.PrepareStore(o, first, prev, take(next()%12), nil)
				if err == nil {
					handles = append(handles, res.Store)
				}
			case 9, 10:
				_ = e.CommitStore(o, handle(), []uint32{uint32(next()), uint32(odd())}[:next()%3])
			case 11:
				_ = e.AbortStore(o, handle())
			case 12:
				h, _, err := e.PrepareLoad(o, Owner(next()%5), uint64(next()%4), odd(), odd(), nil)
				if err == nil {
					handles = append(handles, h)
				}
			case 13:
				_ = e.Release(o, handle(), []uint32{uint32(next()), uint32(odd())}[:next()%3])
			case 14:
				_ = e.Trim(o, uint64(next()%4), odd())
				_ = e.Cancel(o, uint64(next()%4))
			case 15:
				now += int64(odd())
				e.Expire()
				e.ClearSpace(SpaceID(next() % 5))
				_ = e.CloseSpace(SpaceID(next() % 5))
			case 16:
				if h, _, err := e.Pin(SpaceID(next()%5), take(next()%12)); err == nil {
					handles = append(handles, h)
				}
				_ = e.Unpin(handle())
			}
		}
		if err := e.Check(); err != nil {
			t.Fatal(err)
		}
	})
}

// numbered makes n digests of 32 bytes that nothing else has.
func numbered(label uint64, n int) []byte {
	out := make([]byte, 0, 32*n)
	for i := range n {
		var b [16]byte
		binary.LittleEndian.PutUint64(b[:], label)
		binary.LittleEndian.PutUint64(b[8:], uint64(i))
		h := sha256.Sum256(b[:])
		out = append(out, h[:]...)
	}
	return out
}
