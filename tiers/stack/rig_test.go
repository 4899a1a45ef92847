package stack

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"

	"lookaside/internal/leak"
	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/tiertest"
)

func TestMain(m *testing.M) { leak.Main(m) }

const (
	pageBytes = 1024
	ppc       = 4
	slotBytes = ppc * pageBytes
)

var geometry = tiers.Geometry{PageBytes: pageBytes, PagesPerChunk: ppc, PageTokens: 16,
	DigestBytes: 32}

// rig is a Stack over tiers in memory, with a worker (owner 1) that stores and loads and a
// scheduler (owner 2) that looks up. Time is that of a synctest bubble.
type rig struct {
	*Stack
	t      testing.TB
	engine *engine.Engine
	arena  []byte
	mem    []*tiertest.Memory
	space  *tiers.Space
	id     engine.SpaceID
	medium *medium // nil: nothing is restored

	lenders *lenders // nil: no peers

	mu      sync.Mutex
	answers map[uint64]int // by lookup
	pending map[uint64]int // pages promised
	etas    map[uint64]time.Duration
	wrong   error
}

const (
	worker    = engine.Owner(1)
	scheduler = engine.Owner(2)
)

type rigOptions struct {
	slots   int
	tiers   []tiertest.MemoryOptions
	config  func(c *Config)        // changes the stack's
	engine  func(c *engine.Config) // changes the engine's
	wrap    func(i int, t tiers.Tier) tiers.Tier
	log     bool
	restore func(m *medium) // says what the arena has from its last run
	peers   *rand.Rand      // there are lenders
}

// beSlow has nothing given up within d that takes its time only as the machine does. Time is the
// real one.
func (c *Config) beSlow(d time.Duration) {
	c.LookupDeadline, c.BorrowTimeout = d, d
	for i := range c.Tiers {
		t := &c.Tiers[i]
		t.LookupTimeout, t.LoadTimeout, t.StoreTimeout = d, d, d
	}
}

// inBubble runs f with a rig in a bubble of its own, and checks the rig when f is done.
func inBubble(t *testing.T, o rigOptions, f func(t *testing.T, r *rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, o)
		defer r.close()
		f(t, r)
	})
}

func newRig(t testing.TB, o rigOptions) *rig {
	t.Helper()
	if o.slots == 0 {
		o.slots = 64
	}
	r := &rig{
		t: t, space: tiertest.NewSpace("stack", geometry), arena: make([]byte, o.slots*slotBytes),
		answers: map[uint64]int{}, pending: map[uint64]int{}, etas: map[uint64]time.Duration{},
	}
	bell := NewBell()
	cfg := Config{Bell: bell, Arena: func(uint32) []byte { return r.arena }, Log: zap.NewNop()}
	if o.log {
		cfg.Log = zaptest.NewLogger(t)
	}
	for i, mo := range o.tiers {
		m := tiertest.NewMemory(mo)
		r.mem = append(r.mem, m)
		var tier tiers.Tier = m
		if o.wrap != nil {
			tier = o.wrap(i, m)
		}
		cfg.Tiers = append(cfg.Tiers, TierConfig{Name: fmt.Sprintf("t%d", i), Tier: tier})
	}
	if o.restore != nil {
		r.medium = newMedium(r)
		cfg.Verify, cfg.Forget = r.medium.verify, r.medium.forget
	}
	if o.peers != nil {
		r.lenders = newLenders(r.space, o.peers)
		cfg.Peers = r.lenders
	}
	if o.config != nil {
		o.config(&cfg)
	}
	ec := engine.Config{Tiers: Admissions(cfg.Tiers), Wake: bell.Ring, OwnerShare: 1,
		PartialDelay: 100 * time.Millisecond}
	if o.peers != nil {
		ec.ForeignSlots = 512
	}
	if o.restore != nil {
		ec.FixedRegions, ec.NoExtend = true, true
	}
	if o.engine != nil {
		o.engine(&ec)
	}
	var err error
	if r.engine, err = engine.New(ec); err != nil {
		t.Fatal(err)
	}
	cfg.Engine = r.engine
	if o.restore != nil {
		err = r.engine.AddCarvedRegion(7, geometry, o.slots, engine.Placement{Stride: slotBytes})
	} else {
		err = r.engine.AddRegion(7, int64(len(r.arena)))
	}
	if err != nil {
		t.Fatal(err)
	}
	if r.id, err = r.engine.OpenSpace(r.space.Fingerprint, geometry); err != nil {
		t.Fatal(err)
	}
	if o.restore != nil {
		o.restore(r.medium)
		r.engine.EndRestore()
	}
	if r.Stack, err = New(cfg); err != nil {
		t.Fatal(err)
	}
	r.OpenSpace(r.id, r.space)
	for _, o := range []engine.Owner{worker, scheduler} {
		if err := r.engine.AddOwner(o, r.id); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

// close ends everything, and checks that nothing is left.
func (r *rig) close() {
	r.t.Helper()
	r.RemoveOwner(worker)
	r.RemoveOwner(scheduler)
	r.Stack.Close()
	if r.lenders != nil {
		r.lenders.asks.Wait()
	}
	if err := r.engine.Check(); err != nil {
		r.t.Error(err)
	}
	if l := r.lenders; l != nil && (len(l.out) > 0 || l.wrong != nil ||
		len(r.borrowings)+r.quiet > 0 || r.engine.Stats().ForeignUsed > 0) {
		r.t.Errorf("left behind: %d loans, %d calls, %d quiet lookups; %v; %+v", len(l.out),
			len(r.borrowings), r.quiet, l.wrong, r.engine.Stats())
	}
	if st := r.engine.Stats(); st.Leases != 0 || st.Promoting != 0 || st.FillingSlots != 0 ||
		st.OpenLookups != 0 {
		r.t.Errorf("left behind: %+v", st)
	}
	if n := r.open.Load(); n != 0 || len(r.Stack.pending) != 0 || len(r.loads) != 0 ||
		r.bytes != 0 || len(r.deadlines) != 0 {
		r.t.Errorf("left behind: %d lookups, %d, %d loads, %d bytes, %d deadlines", n,
			len(r.Stack.pending), len(r.loads), r.bytes, len(r.deadlines))
	}
	if r.unsure != 0 || r.unverified != 0 || len(r.checking) != 0 {
		r.t.Errorf("left behind: %d lookups that are being verified, %d bytes, %d chunks", r.unsure,
			r.unverified, len(r.checking))
	}
	for _, t := range r.Stack.tiers {
		if n := t.ahead.Load(); n != 0 {
			r.t.Errorf("tier %s: %d bytes ahead", t.Name, n)
		}
	}
	for _, m := range r.mem {
		if err := m.Close(); err != nil {
			r.t.Error(err)
		}
	}
	r.engine.Close()
	if r.wrong != nil {
		r.t.Error(r.wrong)
	}
}

// LookupPending implements Asker.
func (r *rig) LookupPending(o engine.Owner, lookup uint64, pages int, eta time.Duration) {
	if pages == 0 {
		return // nothing is promised
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, answered := r.answers[lookup]; answered || pages < 1 || eta < 0 {
		r.wrong = fmt.Errorf("lookup %d: pending %d pages in %v; answered before: %v", lookup,
			pages, eta, answered)
	}
	r.pending[lookup], r.etas[lookup] = pages, eta
}

// LookupAnswered implements Asker.
func (r *rig) LookupAnswered(a Answer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, twice := r.answers[a.Lookup]; twice || a.Took < 0 || a.Owner != scheduler {
		r.wrong = fmt.Errorf("%+v; answered before: %v", a, twice)
	}
	r.answers[a.Lookup] = a.Pages
}

// prefix is one of n pages that begins with those of common if that is given.
func prefix(rnd *rand.Rand, n int, common ...byte) tiertest.Prefix {
	p := slices.Clone(tiertest.Prefix(common))
	for len(p) < n {
		p = append(p, byte(rnd.Uint32()))
	}
	return p
}

// store stores pages [0, n) of a prefix, as a worker does. It returns how many pages are held then.
func (r *rig) store(p tiertest.Prefix, n int) int {
	r.t.Helper()
	run := p.Run(r.space, 0, n)
	res, grants, err := r.engine.PrepareStore(worker, 0, nil, run.Hashes, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	for _, g := range grants {
		part := p.Run(r.space, int(g.Page), int(g.Page+g.Pages))
		tiertest.FillRun(r.arena[g.Offset:g.Offset+uint64(g.Pages)*pageBytes], part)
	}
	if res.Store != 0 {
		if err := r.engine.CommitStore(worker, res.Store, nil); err != nil {
			r.t.Fatal(err)
		}
	}
	return n - res.Shed
}

// flush waits until all that is queued is written.
func (r *rig) flush() {
	r.t.Helper()
	if err := r.Flush(r.t.Context()); err != nil {
		r.t.Fatal(err)
	}
}

// ask looks up pages [first, n) of a prefix. done as Stack.Lookup says.
func (r *rig) ask(lookup uint64, p tiertest.Prefix, first, n int,
	options ...func(*Query)) (pages int, done bool) {
	r.t.Helper()
	q := Query{Owner: scheduler, Lookup: lookup, Space: r.id, FirstPage: first,
		Hashes: p.Digests(first, n, 32)}
	if first > 0 {
		q.Prev = p.Digests(first-1, first, 32)
	}
	for _, o := range options {
		o(&q)
	}
	pages, done, err := r.Lookup(&q, r)
	for end := time.Now().Add(10 * time.Second); errors.Is(err, tiers.ErrBusy) &&
		time.Now().Before(end); pages, done, err = r.Lookup(&q, r) {
		time.Sleep(time.Millisecond) // the one of that name is just being ended
	}
	if err != nil {
		r.t.Fatal(err)
	}
	clear(q.Hashes) // they are the caller's
	return pages, done
}

// answer waits for a lookup's answer. ok is false if there is none within a time.
func (r *rig) answer(lookup uint64, within time.Duration) (pages int, ok bool) {
	for end := time.Now().Add(within); ; time.Sleep(time.Millisecond) {
		r.mu.Lock()
		pages, ok = r.answers[lookup]
		r.mu.Unlock()
		if ok || time.Now().After(end) {
			return pages, ok
		}
	}
}

// lookup looks up, waits, and returns the pages.
func (r *rig) lookup(lookup uint64, p tiertest.Prefix, first, n int, options ...func(*Query)) int {
	r.t.Helper()
	pages, done := r.ask(lookup, p, first, n, options...)
	if !done {
		var ok bool
		if pages, ok = r.answer(lookup, time.Minute); !ok {
			r.t.Fatalf("lookup %d is not answered", lookup)
		}
	}
	return pages
}

// load loads pages [first, first+n) of a lookup as a worker does, and checks every byte.
func (r *rig) load(lookup uint64, p tiertest.Prefix, first, n int) {
	r.t.Helper()
	if n == 0 {
		return
	}
	load, extents, err := r.engine.PrepareLoad(worker, scheduler, lookup, first, n, nil)
	if err != nil {
		r.t.Fatalf("load of pages %d to %d of lookup %d: %v", first, first+n-1, lookup, err)
	}
	next := first
	for _, x := range extents {
		if int(x.Page) != next {
			r.t.Fatalf("extent from page %d, want %d", x.Page, next)
		}
		part := p.Run(r.space, next, next+int(x.Pages))
		if bad := tiertest.WrongPage(r.memoryOf(x), part); bad >= 0 {
			r.t.Fatalf("page %d of lookup %d has wrong bytes", next+bad, lookup)
		}
		next += int(x.Pages)
	}
	if next != first+n {
		r.t.Fatalf("extents up to page %d, want %d", next, first+n)
	}
	if err := r.engine.Release(worker, load, nil); err != nil {
		r.t.Fatal(err)
	}
}

// want looks up a prefix, and checks the answer and the bytes.
func (r *rig) want(lookup uint64, p tiertest.Prefix, first, n, pages int) {
	r.t.Helper()
	if got := r.lookup(lookup, p, first, n); got != pages {
		r.t.Fatalf("lookup %d of pages %d to %d: %d, want %d", lookup, first, n-1, got, pages)
	}
	r.load(lookup, p, first, pages)
}

func (r *rig) clearArena() { r.engine.ClearSpace(r.id) }
