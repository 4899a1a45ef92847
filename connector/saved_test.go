package connector_test

import (
	"math"
	"testing"
	"time"

	"lookaside/connector"
	"lookaside/ipc/wire"
)

// What the loaded tokens saved is counted with the price that the scheduler's last lookup had, less
// what lookups and loads took.
func TestSavedTime(t *testing.T) {
	r := newRig(t, rigOptions{})
	w, s := r.worker(workerHello("e")), r.scheduler(schedulerHello("e"))
	p := onePrefix(1)
	w.store(p, 0, 8)
	prefilled := func(loaded uint32) {
		t.Helper()
		check(t, s.ses.Send(&wire.Prefilled{Tokens: loaded + 5, Found: loaded, Loaded: loaded}))
		var pong wire.Pong
		check(t, s.ses.Call(&wire.Ping{ID: s.ses.NextID()}, &pong, patience))
	}
	prefilled(100) // before any lookup had a price
	if got := r.server.Counters().Saved; got != (connector.SavedTime{UnpricedTokens: 100}) {
		t.Errorf("%+v", got)
	}
	s.recomputeUs = 640_000 // a page
	id, _ := s.lookup(p, 0, 8)
	before := time.Now()
	g, err := w.load(s, id, p, 0, 8)
	check(t, err)
	check(t, w.ses.Send(&wire.Release{Load: g.Load}))
	w.sync()
	took := time.Since(before).Seconds()
	prefilled(128)
	s.recomputeUs = 0 // the scheduler has forgotten: the last one known counts
	s.lookup(p, 0, 8)
	prefilled(64)
	got := r.server.Counters().Saved
	perToken := 0.64 / float64(schedulerHello("e").PageTokens)
	if want := 192 * perToken; math.Abs(got.ComputeS-want) > 1e-4 {
		t.Errorf("computing would have taken %v s, want %v", got.ComputeS, want)
	}
	if got.UnpricedTokens != 100 || got.LookupS <= 0 || got.LoadS <= 0 || got.LoadS > took ||
		got.TTFTS != got.ComputeS-got.LookupS-got.LoadS {
		t.Errorf("%+v; the load took %v s at most", got, took)
	}
	d := got.Since(connector.SavedTime{ComputeS: 0.5, UnpricedTokens: 1})
	if d.ComputeS != got.ComputeS-0.5 || d.UnpricedTokens != 99 {
		t.Errorf("%+v", d)
	}
}

// Ranks with a session each look up and load at the same time: their engine waits once.
func TestSavedTimeOfRanksOnOneSidecar(t *testing.T) {
	r := newRig(t, rigOptions{})
	p := onePrefix(1)
	var workers []*worker
	var schedulers []*scheduler
	for rank := range uint32(2) {
		w := r.worker(ranked(workerHello("e"), rank, 1))
		w.store(p, 0, 8)
		workers = append(workers, w)
	}
	for rank := range uint32(2) {
		schedulers = append(schedulers, r.scheduler(ranked(schedulerHello("e"), 1-rank, 1)))
	}
	low, high := schedulers[1], schedulers[0]
	loads := func(s *scheduler, w *worker) connector.SavedTime {
		t.Helper()
		before := r.server.Counters().Saved
		id, hit := s.lookup(p, 0, 8)
		if hit != 8 {
			t.Fatal(hit)
		}
		g, err := w.load(s, id, p, 0, 8)
		check(t, err)
		check(t, w.ses.Send(&wire.Release{Load: g.Load}))
		w.sync()
		return r.server.Counters().Saved.Since(before)
	}
	if got := loads(high, workers[1]); got != (connector.SavedTime{}) {
		t.Errorf("the higher rank's time counts: %+v", got)
	}
	if got := loads(low, workers[0]); got.LookupS <= 0 || got.LoadS <= 0 {
		t.Errorf("the lowest rank's time does not count: %+v", got)
	}
	// The remaining one leads.
	low.ses.Close()
	r.eventually("the session to end", func() bool { return r.server.Sessions() == 3 })
	if got := loads(high, workers[1]); got.LookupS <= 0 || got.LoadS <= 0 {
		t.Errorf("the remaining rank's time does not count: %+v", got)
	}
}
