package connector_test

import (
	"errors"
	"slices"
	"testing"

	"lookaside/connector"
	"lookaside/ipc/client"
	"lookaside/ipc/wire"
)

// named returns the names that the scheduler has been given for its weights so far.
func (s *scheduler) named() []string {
	s.told()
	return s.ses.Epochs
}

// ofEpoch adds to h the field that names an epoch of its weights.
func ofEpoch(h *wire.Hello, epoch string) *wire.Hello {
	h.Fields = append(h.Fields, wire.Field{Key: connector.EpochField, Value: epoch})
	return h
}

// Only the schedulers of the engine that is meant are told, and in their order.
func TestWeightsAreNamed(t *testing.T) {
	r := newRig(t, rigOptions{})
	r.worker(workerHello("a"))
	a := r.scheduler(schedulerHello("a"))
	r.worker(workerHello("b"))
	b := r.scheduler(schedulerHello("b"))
	for _, name := range []string{"step 1", "", "größer"} {
		if n := r.server.NameWeights("a", name); n != 1 {
			t.Errorf("%q: %d were told", name, n)
		}
	}
	if n := r.server.NameWeights("c", "x"); n != 0 {
		t.Errorf("nobody is there, and %d were told", n)
	}
	if got := a.named(); !slices.Equal(got, []string{"step 1", "", "größer"}) {
		t.Errorf("%q", got)
	}
	if got := b.named(); len(got) != 0 {
		t.Errorf("%q", got)
	}
}

// hits returns how many of the first pages of a prefix the scheduler finds.
func (s *scheduler) hits(pages int) int {
	id, hit := s.lookup(prefix{stretch: 4}, 0, pages)
	s.cancel(id)
	return hit
}

// What one epoch of weights stored is no hit in another, and is one when the epoch is back.
func TestEpochsOfWeightsDoNotMeet(t *testing.T) {
	r := newRig(t, rigOptions{})
	first := r.worker(workerHello("a"))
	first.store(prefix{stretch: 4}, 0, 8)
	s := r.scheduler(schedulerHello("a"))
	if got := r.server.Weights(); len(got) != 1 || got[0].EngineID != "a" || got[0].Epoch != "" {
		t.Errorf("%+v", got)
	}
	if n := s.hits(8); n != 8 {
		t.Errorf("%d hits", n)
	}

	// While one role is in the space of the old epoch, the other is told which field differs. An
	// epoch without a name is none that fits all.
	isRefused := func(h *wire.Hello) {
		t.Helper()
		_, err := client.Dial(r.dir, h, patience)
		var no *client.Refused
		if !errors.As(err, &no) || no.Code != wire.RefuseIncompatible ||
			no.Field != connector.EpochField {
			t.Errorf("%v", err)
		}
	}
	isRefused(ofEpoch(workerHello("a"), "two"))
	isRefused(ofEpoch(schedulerHello("a"), "two"))
	leave := func(w *worker) {
		s.close()
		w.close()
		r.eventually("they have left", func() bool { return r.server.Sessions() == 0 })
	}
	leave(first)

	second := r.worker(ofEpoch(workerHello("a"), "two"))
	isRefused(schedulerHello("a"))
	s = r.scheduler(ofEpoch(schedulerHello("a"), "two"))
	if n := s.hits(8); n != 0 {
		t.Errorf("%d hits of another epoch", n)
	}
	if got := r.server.Weights(); len(got) != 1 || got[0].Epoch != "two" {
		t.Errorf("%+v", got)
	}
	if u := r.server.Unshared(); len(u) != 0 {
		t.Errorf("epochs differ on purpose: %+v", u)
	}
	leave(second)

	r.worker(workerHello("a"))
	s = r.scheduler(schedulerHello("a"))
	if n := s.hits(8); n != 8 {
		t.Errorf("%d hits", n)
	}
}
