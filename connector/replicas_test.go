package connector_test

import (
	"testing"

	"lookaside/ipc/client"
	"lookaside/ipc/wire"
)

// ranked is a Hello of one of the ranks that hold the same pages, or of the scheduler of several.
func ranked(h *wire.Hello, rank, ranks uint32) *wire.Hello {
	h.Rank, h.Ranks = rank, ranks
	return h
}

// prepareShare asks for room for every nth chunk of a prefix's first pages.
func (w *worker) prepareShare(p prefix, pages int, every, which uint32) wire.StoreGrant {
	w.t.Helper()
	m := wire.PrepareStore{ID: w.ses.NextID(), Hashes: p.hashes(0, pages), Every: every,
		Which: which}
	var g wire.StoreGrant
	check(w.t, w.call(&m, &g))
	return g
}

// TestRanksOfOneSpace has three ranks store a third of the chunks each, and load what one lookup
// for all of them found.
func TestRanksOfOneSpace(t *testing.T) {
	r := newRig(t, rigOptions{})
	p := onePrefix(1)
	const pages = 5*perChunk + 2
	var ranks []*worker
	for rank := range uint32(3) {
		ranks = append(ranks, r.worker(ranked(workerHello("e"), 4+rank, 1)))
	}
	s := r.scheduler(ranked(schedulerHello("e"), 4, 3))
	granted := 0
	for i, w := range ranks {
		g := w.prepareShare(p, pages, 3, uint32(i))
		if g.Held != 0 || g.Shed != 0 || len(g.Grants) != 2 ||
			g.Grants[0].Page != uint32(i*perChunk) {
			t.Fatalf("rank %d: %+v", i, g)
		}
		for _, e := range g.Grants {
			granted += int(e.Pages)
		}
		check(t, w.fill(p, g.Grants))
		check(t, w.ses.Send(&wire.CommitStore{Store: g.Store}))
		w.sync()
		// A prefix ends where somebody has not stored yet.
		id, hit := s.lookup(p, 0, pages)
		if want := []int{perChunk, 2 * perChunk, pages}[i]; hit != want {
			t.Fatalf("%d pages hit after %d ranks, want %d", hit, i+1, want)
		}
		s.cancel(id)
	}
	if granted != pages || r.server.Counters().StoredPages != pages {
		t.Errorf("%d pages were granted, %d stored, want %d: each once", granted,
			r.server.Counters().StoredPages, pages)
	}

	id, hit := s.lookup(p, 0, pages)
	if hit != pages {
		t.Fatalf("%d pages hit", hit)
	}
	for _, w := range ranks {
		g, err := w.load(s, id, p, 0, pages)
		check(t, err)
		check(t, w.ses.Send(&wire.Release{Load: g.Load}))
		w.sync()
	}
	_, err := ranks[0].load(s, id, p, 0, pages)
	wantCode(t, err, wire.CodeNotFound)

	// Neither a rank beside them nor another engine reaches the lookup.
	id, _ = s.lookup(p, 0, pages)
	for _, h := range []*wire.Hello{ranked(workerHello("e"), 3, 1), ranked(workerHello("e"), 7, 1),
		ranked(workerHello("other"), 4, 1)} {
		_, err := r.worker(h).load(s, id, p, 0, pages)
		wantCode(t, err, wire.CodeIncompatible)
	}
	s.cancel(id)
}

// TestSchedulerOfSeveralRanksWaitsForAll has a scheduler be refused while a rank is absent, or
// holds other pages.
func TestSchedulerOfSeveralRanksWaitsForAll(t *testing.T) {
	r := newRig(t, rigOptions{})
	r.worker(ranked(workerHello("e"), 0, 1))
	refused := func(code, field string) {
		t.Helper()
		s, err := client.Dial(r.dir, ranked(schedulerHello("e"), 0, 2), patience)
		if err == nil {
			s.Close()
			t.Fatal("welcomed")
		}
		if no, ok := err.(*client.Refused); !ok || no.Code != code || no.Field != field {
			t.Fatalf("got %v", err)
		}
	}
	refused(wire.RefuseNoWorker, "")
	h := ranked(workerHello("e"), 1, 1)
	h.Fields[0].Value = "bfloat16"
	other := r.worker(h)
	refused(wire.RefuseIncompatible, "dtype")
	other.close()
	r.eventually("the other rank has left", func() bool { return r.server.Sessions() == 1 })
	r.worker(ranked(workerHello("e"), 1, 1))
	r.scheduler(ranked(schedulerHello("e"), 0, 2))
}

// TestDeadRankLeavesAMiss has a rank die with its chunks half stored, and another with a load open.
func TestDeadRankLeavesAMiss(t *testing.T) {
	r := newRig(t, rigOptions{})
	p := onePrefix(1)
	const pages = 4 * perChunk
	one, two := r.worker(ranked(workerHello("e"), 0, 1)), r.worker(ranked(workerHello("e"), 1, 1))
	s := r.scheduler(ranked(schedulerHello("e"), 0, 2))
	g := one.prepareShare(p, pages, 2, 0)
	check(t, one.fill(p, g.Grants))
	check(t, one.ses.Send(&wire.CommitStore{Store: g.Store}))
	one.sync()
	check(t, two.fill(p, two.prepareShare(p, pages, 2, 1).Grants))
	id, hit := s.lookup(p, 0, pages)
	if hit != perChunk {
		t.Fatalf("%d pages hit", hit)
	}
	if _, err := two.load(s, id, p, 0, perChunk); err != nil {
		t.Fatal(err)
	}
	two.close()
	r.eventually("what the dead rank held is free", func() bool {
		st := r.engine.Stats()
		return st.OpenStores == 0 && st.OpenLoads == 0
	})
	if _, err := one.load(s, id, p, 0, perChunk); err != nil {
		t.Errorf("the other rank's load: %v", err)
	}
	if _, hit := s.lookup(p, 0, pages); hit != perChunk {
		t.Errorf("%d pages hit", hit)
	}
}
