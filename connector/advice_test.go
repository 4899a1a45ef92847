package connector_test

import (
	"testing"
	"time"

	"lookaside/ipc/wire"
	"lookaside/tiers/engine"
	"lookaside/tiers/tiertest"
)

// advise sends advice about pages of a prefix from its first on.
func (s *scheduler) advise(p prefix, pages int, action wire.Action, ms uint32, priority uint8) {
	s.t.Helper()
	check(s.t, s.lookups.Send((&wire.Advise{Session: s.ses.Welcome.Session,
		Secret: s.ses.Welcome.Secret, Hashes: p.hashes(0, pages), Action: action, Ms: ms,
		Priority: priority, Tenant: wire.Label("a")}).Append(nil)))
}

// adviceCount returns what was counted of advice.
func (r *rig) advised() (n uint64, dropped uint64) {
	c := r.server.Counters().Advice
	return c.Retain + c.Pin + c.Prefetch + c.Demote, c.Dropped
}

func TestAdvice(t *testing.T) {
	r := newRig(t, rigOptions{tiers: []tiertest.MemoryOptions{{Local: true}}})
	w := r.worker(workerHello("e"))
	s := r.scheduler(schedulerHello("e"))
	p := onePrefix(1)
	w.store(p, 0, 10)
	want := func(what string, cond func(st engine.Stats) bool) {
		t.Helper()
		r.eventually(what, func() bool { return cond(r.engine.Stats()) })
	}
	s.advise(p, 20, wire.AdviseRetain, 60_000, 0)
	want("retain", func(st engine.Stats) bool { return st.RetainedSlots == 3 })
	s.advise(p, 20, wire.AdviseRetain, 0, 0)
	want("retain no more", func(st engine.Stats) bool { return st.RetainedSlots == 0 })
	s.advise(p, 20, wire.AdviseRetain, 0, 80)
	want("priority", func(st engine.Stats) bool { return st.RetainedSlots == 3 })
	s.advise(p, 20, wire.AdvisePin, 60_000, 0)
	want("pin", func(st engine.Stats) bool { return st.PinnedSlots == 3 })
	s.advise(p, 20, wire.AdvisePin, 0, 0)
	want("pin no more", func(st engine.Stats) bool { return st.RetainedSlots == 3 })
	s.advise(p, 20, wire.AdviseDemote, 0, 0)
	want("demote", func(st engine.Stats) bool { return st.LowSlots == 3 && st.HintsDemoted == 3 })
	if n, dropped := r.advised(); n != 6 || dropped != 0 {
		t.Fatalf("%d advices, %d dropped", n, dropped)
	}
	// It is no use of the chunks, leases nothing, and is not answered.
	if st := r.engine.Stats(); st.Lookups != 0 || st.Leases != 0 {
		t.Fatalf("%+v", st)
	}
	s.quiet()
}

// Advice about many chunks is followed beside the lookups, whole.
func TestAdviceAboutManyChunks(t *testing.T) {
	r := newRig(t, rigOptions{regionBytes: 4096 * pageBytes, maxPages: 4096})
	w := r.worker(workerHello("e"))
	s := r.scheduler(schedulerHello("e"))
	p := onePrefix(1)
	const pages = 2500
	w.store(p, 0, pages)
	s.advise(p, 4096, wire.AdviseDemote, 0, 0)
	r.eventually("all chunks are low", func() bool {
		return r.engine.Stats().LowSlots == pages/perChunk
	})
}

func TestAdvisedPrefetch(t *testing.T) {
	r := newRig(t, rigOptions{tiers: []tiertest.MemoryOptions{slow}})
	w := r.worker(workerHello("e"))
	s := r.scheduler(schedulerHello("e"))
	p := onePrefix(1)
	r.below(w, p, 30)
	s.advise(p, 64, wire.AdvisePrefetch, 0, 0)
	r.eventually("the prefix is in the arena", func() bool {
		return r.server.Counters().Advice.PrefetchedPages == 30
	})
	if id, hit := s.lookup(p, 0, 64); hit != 30 || !s.memory {
		t.Fatalf("lookup %d hits %d pages, in memory %v", id, hit, s.memory)
	}
}

// Prefetches are bounded: too many at once are dropped, and the end of the server waits for none.
func TestPrefetchesAreBounded(t *testing.T) {
	r := newRig(t, rigOptions{tiers: []tiertest.MemoryOptions{{Local: true}}})
	w := r.worker(workerHello("e"))
	s := r.scheduler(schedulerHello("e"))
	open := gate(r.tiers[0], tiertest.Load)
	defer open()
	r.below(w, onePrefix(1), 30)
	const sent = 100
	for range sent {
		s.advise(onePrefix(1), 30, wire.AdvisePrefetch, 0, 0)
	}
	r.eventually("all have come", func() bool { n, _ := r.advised(); return n == sent })
	if _, dropped := r.advised(); dropped != sent-64 {
		t.Fatalf("%d of %d were dropped", dropped, sent)
	}
	if st := r.engine.Stats(); st.Owners > 2+4 {
		t.Fatalf("%d prefetches at a time", st.Owners-2)
	}
}

func TestAdviceThatIsRefused(t *testing.T) {
	r := newRig(t, rigOptions{})
	w := r.worker(workerHello("e"))
	s := r.scheduler(schedulerHello("e"))
	p := onePrefix(1)
	w.store(p, 0, 4)
	send := func(kind string, m wire.Advise) {
		t.Helper()
		before := r.errorCount(kind)
		check(t, s.lookups.Send(m.Append(nil)))
		r.eventually(kind, func() bool { return r.errorCount(kind) == before+1 })
	}
	good := wire.Advise{Session: s.ses.Welcome.Session, Secret: s.ses.Welcome.Secret,
		Hashes: p.hashes(0, 4), Action: wire.AdvisePin, Ms: 1000}
	bad := good
	bad.Secret = make([]byte, 16)
	send("forged", bad)
	bad = good
	bad.Session = w.ses.Welcome.Session
	send("unknown_session", bad)
	bad = good
	bad.Hashes = bad.Hashes[:33]
	send("malformed", bad)
	bad = good
	bad.Action, bad.FirstPage, bad.Prev = wire.AdvisePrefetch, 4, p.hashes(3, 1)
	send("malformed", bad)
	if st := r.engine.Stats(); st.HintsPinned != 0 {
		t.Fatalf("%+v", st)
	}
	// While the sidecar ends, advice is dropped.
	go func() { _ = r.server.Drain(t.Context()) }()
	r.eventually("draining", r.server.Draining)
	s.advise(p, 4, wire.AdvisePin, 1000, 0)
	r.eventually("dropped", func() bool { _, dropped := r.advised(); return dropped == 1 })
}

// Hints of a store are followed when it is committed, and for what is held already.
func TestHintsOfStores(t *testing.T) {
	var now int64
	r := newRig(t, rigOptions{now: func() int64 { return now }})
	w := r.worker(workerHello("e"))
	p := onePrefix(1)
	store := func(pages int, h wire.Hints) wire.StoreGrant {
		t.Helper()
		m := wire.PrepareStore{ID: w.ses.NextID(), Hashes: p.hashes(0, pages), Hints: h}
		var g wire.StoreGrant
		check(t, w.call(&m, &g))
		if g.Store != 0 {
			check(t, w.fill(p, g.Grants))
			check(t, w.ses.Send(&wire.CommitStore{Store: g.Store}))
			w.sync()
		}
		return g
	}
	if g := store(8, wire.Hints{FromUse: 2}); g.Store != 0 || g.Shed != 0 || g.Held != 0 {
		t.Fatalf("%+v", g)
	}
	if g := store(8, wire.Hints{FromUse: 2, RetainMs: 1000}); len(g.Grants) != 2 {
		t.Fatalf("%+v", g)
	}
	if st := r.engine.Stats(); st.RetainedSlots != 2 || st.DeferredPages != 8 {
		t.Fatalf("%+v", st)
	}
	if g := store(8, wire.Hints{PinMs: 500}); g.Held != 8 {
		t.Fatalf("%+v", g)
	}
	if st := r.engine.Stats(); st.PinnedSlots != 2 {
		t.Fatalf("%+v", st)
	}
	now = int64(time.Second)
	r.engine.Expire()
	if st := r.engine.Stats(); st.PinnedSlots+st.RetainedSlots != 0 {
		t.Fatalf("%+v", st)
	}
}
