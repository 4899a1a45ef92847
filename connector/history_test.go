package connector_test

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"lookaside/ipc/client"
	"lookaside/ipc/wire"
	"lookaside/tiers"
)

var (
	historySeed = flag.Uint64("history.seed", 0,
		"replay the history of this seed (0: the fixed ones)")
	historySteps = flag.Int("history.steps", 1500, "steps of each history")
)

// A history drives many sessions over real sockets at random, and compares each answer with a plain
// model: the set of pages that were committed. A lookup may answer less than the model where room
// is short, never more; bytes that are loaded must be the page's; and when all sessions have gone,
// nothing is held (the rig's audit).
//
// Where room is short, regions come and go, too: a region goes from the engine first, and from the
// workers when nobody uses it.
//
// Some workers break the protocol, are given up, and go on: they write into what they were granted
// and read what they had leased, at any later time, until they leave.
type history struct {
	t     *testing.T
	r     *rig
	rnd   *rand.Rand
	exact bool // room is never short: lookups must find all of the model's pages

	engines []*instance
	linger  []*instance                  // given up: their worker, its stores and loads
	held    map[string]map[[32]byte]bool // by model: pages committed
	going   int                          // the region that is being removed, -1 if none is
	removed int                          // regions that are gone; those after it are there

	takeovers bool     // another server goes on now and then
	lingered  uint64   // workers, at earlier servers
	log       []string // last steps, for a failure
}

// An instance is one made-up vLLM instance: a worker, a scheduler, and what they have under way.
type instance struct {
	name, model string
	w           *worker
	s           *scheduler
	stores      []openStore
	lookups     []openLookup
	loads       []openLoad
}

type openStore struct {
	p prefix
	g wire.StoreGrant
}

type openLookup struct {
	p          prefix
	id         uint64
	first, hit int
}

type openLoad struct {
	p            prefix
	g            wire.LoadGrant
	first, pages int
}

func (h *history) step(format string, args ...any) {
	h.log = append(h.log, fmt.Sprintf(format, args...))
	if len(h.log) > 30 {
		h.log = h.log[1:]
	}
}

func (h *history) fatal(format string, args ...any) {
	h.t.Helper()
	for _, l := range h.log {
		h.t.Log(l)
	}
	h.t.Fatalf(format, args...)
}

func (h *history) hello(in *instance, role string) *wire.Hello {
	m := workerHello(in.name)
	if role == wire.RoleScheduler {
		m = schedulerHello(in.name)
	}
	m.Fields[len(m.Fields)-1].Value = in.model
	m.Direct = h.takeovers && role == wire.RoleScheduler // ZMQ may lose answers then
	return m
}

func (h *history) connect(in *instance) {
	if in.w == nil {
		w, err := dialWorker(h.r.dir, h.hello(in, wire.RoleWorker))
		if err != nil {
			h.fatal("worker of %s: %v", in.name, err)
		}
		w.t, in.w = h.t, w
	}
	if in.s == nil {
		in.s = h.r.scheduler(h.hello(in, wire.RoleScheduler))
	}
}

// die ends one of the instance's sessions, as its process's death would.
func (h *history) die(in *instance) {
	before := h.r.server.Sessions()
	gone := 0
	if in.w != nil && h.rnd.IntN(2) == 0 {
		in.w.close()
		in.w, in.stores, in.loads = nil, nil, nil
		gone++
	}
	if in.s != nil && (gone == 0 || h.rnd.IntN(2) == 0) {
		in.s.close()
		in.s, in.lookups = nil, nil
		gone++
	}
	h.step("%s: %d sessions die", in.name, gone)
	h.r.eventually("the dead are gone", func() bool { return h.r.server.Sessions() == before-gone })
}

// maxLingering bounds the workers that linger at a time.
const maxLingering = 5

// breakOff makes the sidecar give a worker up.
func (h *history) breakOff(in *instance) {
	if len(h.linger) == maxLingering {
		return
	}
	how := breaks[h.rnd.IntN(len(breaks)-1)] // the last one takes a second
	sessions, lingering := h.r.server.Sessions(), len(h.linger)
	old := &instance{name: in.name, w: in.w, stores: in.stores, loads: in.loads}
	h.step("%s: %s, with %d stores and %d loads", in.name, how.name, len(old.stores),
		len(old.loads))
	check(h.t, how.do(in.w.ses))
	in.w, in.stores, in.loads = nil, nil, nil
	if len(old.stores)+len(old.loads) == 0 {
		defer old.w.close()
	} else {
		h.linger = append(h.linger, old)
		lingering++
	}
	h.r.eventually("it is given up", func() bool {
		return h.r.server.Sessions() == sessions-1 && len(h.r.lingering()) == lingering
	})
}

// goOn lets one of the workers that linger use what it held, or leave.
func (h *history) goOn() {
	if len(h.linger) == 0 {
		return
	}
	i := h.rnd.IntN(len(h.linger))
	old := h.linger[i]
	for _, l := range old.loads {
		if err := old.w.verify(l.p, l.g.Extents, l.first, l.pages); err != nil {
			h.fatal("what a lingering worker reads: %v", err)
		}
	}
	for _, st := range old.stores {
		for _, e := range st.g.Grants {
			for page := range int(e.Pages) {
				dst, err := old.w.page(e, page)
				check(h.t, err)
				for b := range dst {
					dst[b] = 0xEE
				}
			}
		}
	}
	if h.rnd.IntN(8) > 0 {
		return
	}
	h.step("%s: a lingering worker leaves", old.name)
	old.w.close()
	h.linger = append(h.linger[:i], h.linger[i+1:]...)
	h.r.eventually("it has left", func() bool { return len(h.r.lingering()) == len(h.linger) })
}

// changeRegions adds a region, or takes the oldest out of the engine, and as soon as nobody has a
// lease in it from the workers, too.
func (h *history) changeRegions() {
	if h.going < 0 {
		if len(h.r.regions) < 40 {
			h.r.grow(8 << 10)
		}
		if len(h.r.regions)-h.removed > 3 {
			h.going = h.removed
		}
		return
	}
	err := h.r.engine.RemoveRegion(uint32(h.going))
	h.step("removing region %d: %v", h.going, err)
	if errors.Is(err, tiers.ErrBusy) {
		return
	}
	check(h.t, err)
	delete(h.r.there, uint32(h.going))
	done := make(chan struct{})
	go func() {
		defer close(done)
		h.r.server.RetractRegion(uint32(h.going), patience)
	}()
	for _, in := range h.engines {
		for !in.w.gone[uint32(h.going)] {
			b, err := in.w.recv(true)
			if err != nil {
				h.fatal("%s: waiting for the end of region %d: %v", in.name, h.going, err)
			}
			if t, _ := wire.Peek(b); t != wire.TypeRegionAdded && t != wire.TypeRegionRemoved {
				h.fatal("%s: %v while waiting for the end of region %d", in.name, t, h.going)
			}
		}
	}
	<-done
	h.going, h.removed = -1, h.going+1
}

func (h *history) randomPrefix() prefix {
	p := prefix{stretch: 3 + h.rnd.IntN(2)*4}
	for i := range p.stretches {
		p.stretches[i] = uint8(h.rnd.IntN(3))
	}
	return p
}

func (h *history) act(in *instance) { h.do(in, h.rnd.IntN(100)) }

func (h *history) do(in *instance, op int) {
	p := h.randomPrefix()
	switch {
	case op < 4:
		h.die(in)
		h.connect(in)
	case op < 6:
		h.breakOff(in)
		h.connect(in)
	case op < 10:
		h.goOn()
	case op < 20 && !h.exact:
		h.changeRegions()
	case op < 30:
		first := h.rnd.IntN(4) * perChunk
		pages := 1 + h.rnd.IntN(12)
		g, err := in.w.prepare(p, first, pages)
		if err != nil {
			h.fatal("store: %v", err)
		}
		h.step("%s: prepare %v from %d, %d pages: store %x, held %d, shed %d, %v", in.name, p,
			first, pages, g.Store, g.Held, g.Shed, g.Grants)
		granted := 0
		for _, e := range g.Grants {
			granted += int(e.Pages)
		}
		// A chunk is granted whole, also where its first pages are held, so more may be granted
		// than asked for and not held.
		if granted+int(g.Held)+int(g.Shed) < pages {
			h.fatal("%d granted + %d held + %d shed of %d pages", granted, g.Held, g.Shed, pages)
		}
		if h.exact && g.Shed > 0 {
			h.fatal("%d shed", g.Shed)
		}
		if g.Store != 0 {
			in.stores = append(in.stores, openStore{p, g})
		}
	case op < 55:
		if len(in.stores) == 0 {
			return
		}
		i := h.rnd.IntN(len(in.stores))
		st := in.stores[i]
		in.stores = append(in.stores[:i], in.stores[i+1:]...)
		h.finish(in, st)
	case op < 80:
		first, pages := h.rnd.IntN(12), 1+h.rnd.IntN(16)
		id, hit := in.s.lookup(p, first, pages)
		h.step("%s: lookup %d of %v from %d, %d pages: %d", in.name, id, p, first, pages, hit)
		want := 0
		for want < pages && h.held[in.model][p.digest(first+want)] {
			want++
		}
		if hit > want || h.exact && hit < want {
			h.fatal("lookup answers %d pages, the model %d", hit, want)
		}
		if hit > 0 {
			in.lookups = append(in.lookups, openLookup{p, id, first, hit})
		}
	case op < 90:
		if len(in.lookups) == 0 {
			return
		}
		i := h.rnd.IntN(len(in.lookups))
		l := in.lookups[i]
		in.lookups = append(in.lookups[:i], in.lookups[i+1:]...)
		if h.rnd.IntN(4) == 0 {
			h.step("%s: cancel %d", in.name, l.id)
			in.s.cancel(l.id)
			return
		}
		skip := h.rnd.IntN(l.hit)
		pages := 1 + h.rnd.IntN(l.hit-skip)
		if h.exact && h.rnd.IntN(3) == 0 {
			in.s.trim(l.id, l.first+skip)
		}
		g, err := in.w.load(in.s, l.id, l.p, l.first+skip, pages)
		h.step("%s: load lookup %d from %d, %d pages: %v %v", in.name, l.id, l.first+skip, pages, g,
			err)
		var no *client.CallError
		if !h.exact && h.takeovers && errors.As(err, &no) && no.Code == wire.CodeNotFound {
			return // its chunks were found bad before the takeover
		}
		if !h.exact && errors.As(err, &no) && (no.Code == wire.CodeBusy ||
			no.Code == wire.CodeStale) {
			// the worker has its share, or a chunk was found bad: the lookup stays as it is
			in.lookups = append(in.lookups, l)
			return
		}
		if err != nil {
			h.fatal("load of what is leased: %v", err)
		}
		in.loads = append(in.loads, openLoad{l.p, g, l.first + skip, pages})
	default:
		if len(in.loads) == 0 {
			return
		}
		i := h.rnd.IntN(len(in.loads))
		l := in.loads[i]
		in.loads = append(in.loads[:i], in.loads[i+1:]...)
		// However long it took, its bytes are still there.
		if err := in.w.verify(l.p, l.g.Extents, l.first, l.pages); err != nil {
			h.fatal("before the release: %v", err)
		}
		m := wire.Release{Load: l.g.Load}
		if !h.exact && h.rnd.IntN(4) == 0 {
			m.Bad = []uint32{uint32(h.rnd.IntN(len(l.g.Extents)))}
		}
		h.step("%s: release %x, bad %v", in.name, l.g.Load, m.Bad)
		check(h.t, in.w.ses.Send(&m))
	}
}

// finish commits a store, in part or whole, or gives it up.
func (h *history) finish(in *instance, st openStore) {
	if h.rnd.IntN(6) == 0 {
		h.step("%s: abort %x", in.name, st.g.Store)
		check(h.t, in.w.ses.Send(&wire.AbortStore{Store: st.g.Store}))
		in.w.sync()
		return
	}
	m := wire.CommitStore{Store: st.g.Store}
	for i, e := range st.g.Grants {
		if h.rnd.IntN(8) == 0 {
			m.Failed = append(m.Failed, uint32(i)) // its bytes are never written
			continue
		}
		if err := in.w.fill(st.p, []wire.Extent{e}); err != nil {
			h.fatal("%v", err)
		}
		for page := range int(e.Pages) {
			h.held[in.model][st.p.digest(int(e.Page)+page)] = true
		}
	}
	h.step("%s: commit %x, failed %v", in.name, st.g.Store, m.Failed)
	check(h.t, in.w.ses.Send(&m))
	in.w.sync()
}

// takeOver has another server go on. Stores end before it. While it restores, the others look up,
// load and release, and their stores wait.
func (h *history) takeOver() {
	if h.going >= 0 {
		return
	}
	for _, old := range h.linger {
		if h.exact && len(old.stores) > 0 {
			return // a chunk that a lingering worker extends is forgotten
		}
	}
	for _, in := range h.engines {
		for _, st := range in.stores {
			h.finish(in, st)
		}
		in.stores = nil
	}
	h.step("another server takes over")
	h.lingered += h.r.server.Counters().Lingered
	type waits struct {
		in *instance
		p  prefix
		id uint32
	}
	var list []waits
	h.r.takeOver(func() {
		for range h.rnd.IntN(30) {
			in := h.engines[h.rnd.IntN(len(h.engines))]
			if h.rnd.IntN(5) > 0 {
				h.do(in, 55+h.rnd.IntN(45))
				continue
			}
			p := h.randomPrefix()
			m := wire.PrepareStore{ID: in.w.ses.NextID(), Hashes: p.hashes(0, 1+h.rnd.IntN(12))}
			check(h.t, in.w.ses.Send(&m))
			list = append(list, waits{in, p, m.ID})
		}
	})
	for _, l := range list {
		b, err := l.in.w.recv(false)
		if err != nil {
			h.fatal("%s: the reply to a store that waited: %v", l.in.name, err)
		}
		var g wire.StoreGrant
		if err := g.Decode(b, &wire.DefaultLimits); err != nil || g.ID != l.id {
			h.fatal("%s: %+v, %v for store %d, which waited", l.in.name, g, err, l.id)
		}
		if g.Store != 0 {
			l.in.stores = append(l.in.stores, openStore{l.p, g})
		}
	}
}

func runHistory(t *testing.T, seed uint64, exact, takeovers bool,
	o rigOptions) (regionsRemoved int) {
	t.Logf("seed %d: replay with -run '%s' -history.seed=%d", seed, t.Name(), seed)
	h := &history{
		t: t, r: newRig(t, o), rnd: rand.New(rand.NewPCG(seed, 1)), exact: exact,
		held: map[string]map[[32]byte]bool{"small": {}, "large": {}}, going: -1,
		takeovers: takeovers,
	}
	for i, model := range []string{"small", "small", "large", "small"} {
		in := &instance{name: fmt.Sprintf("engine-%d", i), model: model}
		h.connect(in)
		h.engines = append(h.engines, in)
	}
	for i := range *historySteps {
		h.act(h.engines[h.rnd.IntN(len(h.engines))])
		if h.takeovers && i%50 == 49 {
			h.takeOver()
		}
		if i%100 == 0 {
			if err := h.r.engine.Check(); err != nil {
				h.fatal("engine: %v", err)
			}
		}
	}
	for _, in := range h.engines {
		in.w.sync()
		if n := len(in.w.regions); n != len(h.r.regions)-h.removed {
			t.Errorf("%s has %d regions, there are %d", in.name, n, len(h.r.regions)-h.removed)
		}
	}
	for _, in := range h.engines {
		in.w.close()
		in.s.close()
	}
	h.r.eventually("all are gone", func() bool {
		return h.r.server.Sessions() == 0 &&
			len(h.r.lingering()) == len(h.linger)
	})
	for _, old := range h.linger {
		old.w.close()
	}
	h.r.eventually("nobody lingers", func() bool { return len(h.r.lingering()) == 0 })
	if h.lingered+h.r.server.Counters().Lingered == 0 {
		t.Error("no worker lingered: the history tests less than it says")
	}
	h.r.audit()
	return h.removed
}

func TestHistories(t *testing.T) {
	for _, tc := range []struct {
		name             string
		exact, takeovers bool
		o                rigOptions
	}{
		{"room for all", true, false, rigOptions{regionBytes: 8 << 20}},
		{"room for all, takeovers", true, true, rigOptions{regionBytes: 8 << 20}},
		{"little room", false, false, rigOptions{regionBytes: 24 << 10}},
		{"little room, takeovers", false, true, rigOptions{regionBytes: 24 << 10}},
		{"little room, small shares", false, false, rigOptions{regionBytes: 48 << 10, share: 0.3}},
		{"little room, made slowly", false, false, rigOptions{regionBytes: 24 << 10,
			makeRoom: func(tiers.Geometry, int) {
				if rand.IntN(4) == 0 {
					time.Sleep(3 * time.Millisecond)
				}
			}}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			seeds := []uint64{1, 2, 3}
			if *historySeed != 0 {
				seeds = []uint64{*historySeed}
			}
			removed := 0
			for _, seed := range seeds {
				t.Run(fmt.Sprint(seed), func(t *testing.T) {
					removed += runHistory(t, seed,
						tc.exact, tc.takeovers, tc.o)
				})
			}
			t.Logf("%d regions removed", removed)
			if removed == 0 && !tc.exact && *historySeed == 0 {
				t.Error("no region was removed: the histories test less than they say")
			}
		})
	}
}

// Many sessions come and go at the same time, and each does a little: nothing may be left, and no
// one may be refused but for coming too early.
func TestManySessionsAtOnce(t *testing.T) {
	r := newRig(t, rigOptions{})
	w := r.worker(workerHello("e"))
	w.store(onePrefix(1), 0, 8)
	failed := make(chan error, 12)
	for i := range 12 {
		go func() {
			failed <- func() error {
				for range 15 {
					name := fmt.Sprintf("engine-%d", i)
					w, err := dialWorker(r.dir, workerHello(name))
					if err != nil {
						return err
					}
					ses, err := client.Dial(r.dir, schedulerHello(name), patience)
					if err != nil {
						return err
					}
					l, err := ses.Lookups()
					if err != nil {
						return err
					}
					p := onePrefix(1)
					res, err := l.Lookup(&wire.Lookup{Session: ses.Welcome.Session,
						Secret: ses.Welcome.Secret, Lookup: 1, Hashes: p.hashes(0, 8)}, patience)
					if err == nil && res.HitPages != 8 {
						err = fmt.Errorf("%d pages hit", res.HitPages)
					}
					if err == nil {
						_, err = w.load(&scheduler{ses: ses}, 1, p, 0, 8)
					}
					if err == nil {
						_, err = w.prepare(onePrefix(uint8(20+i)), 0, 6)
					}
					if err := errors.Join(err, l.Close(), ses.Close()); err != nil {
						return err
					}
					w.close() // with its store and its load open
				}
				return nil
			}()
		}()
	}
	for range 12 {
		if err := <-failed; err != nil {
			t.Error(err)
		}
	}
	r.eventually("all are gone", func() bool { return r.server.Sessions() == 1 })
	time.Sleep(10 * time.Millisecond)
	r.audit()
}
