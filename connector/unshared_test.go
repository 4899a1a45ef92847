package connector_test

import (
	"strings"
	"testing"

	"lookaside/internal/unshared"
	"lookaside/ipc/wire"
)

// seeded is a hello whose none_hash, and whose other fields, are these.
func seeded(h *wire.Hello, seed string, more ...wire.Field) *wire.Hello {
	if h.Role == wire.RoleWorker {
		h.Fields = append(append([]wire.Field{{Key: "dtype", Value: "float32"},
			{Key: "model", Value: "small"}}, more...), wire.Field{Key: "none_hash", Value: seed})
	}
	return h
}

// told returns what the scheduler has been told so far.
func (s *scheduler) told() []string {
	s.t.Helper()
	var pong wire.Pong
	check(s.t, s.ses.Call(&wire.Ping{ID: s.ses.NextID()}, &pong, patience))
	return s.ses.Notices
}

// Both instances hear that their seeds differ: the one that was there before, too. Each hears it
// once.
func TestInstancesThatDifferByAccidentAreTold(t *testing.T) {
	r := newRig(t, rigOptions{})
	r.worker(seeded(workerHello("a"), "1111"))
	a := r.scheduler(seeded(schedulerHello("a"), "1111"))
	if u := r.server.Unshared(); len(u) != 0 {
		t.Errorf("one instance alone: %+v", u)
	}
	r.worker(seeded(workerHello("b"), "2222"))
	b := r.scheduler(seeded(schedulerHello("b"), "2222"))
	for s, want := range map[*scheduler]string{a: `"1111" here and "2222" there`,
		b: `"2222" here and "1111" there`} {
		r.eventually("it is told", func() bool { return len(s.told()) > 0 })
		if n := s.told(); len(n) != 1 || !strings.Contains(n[0], want) ||
			!strings.Contains(n[0], "PYTHONHASHSEED") || !strings.Contains(n[0], "pid ") {
			t.Errorf("%q", n)
		}
	}
	// A second scheduler with the first one's space is told as well; nobody is told again.
	r.worker(seeded(workerHello("c"), "1111"))
	c := r.scheduler(seeded(schedulerHello("c"), "1111"))
	r.eventually("it is told", func() bool { return len(c.told()) == 1 })
	if len(a.told()) != 1 || len(b.told()) != 1 {
		t.Errorf("told again: %q, %q", a.told(), b.told())
	}
	u := r.server.Unshared()
	if len(u) != 2 || len(u[0].Causes) != 1 ||
		u[0].Causes[0].Difference != (unshared.Difference{Field: "none_hash", Ours: "1111",
			Theirs: "2222"}) || u[1].Ours != u[0].Theirs {
		t.Errorf("%+v", u)
	}
}

// An instance that restarts with another seed hears that it finds nothing of what it stored before.
func TestAnInstanceThatComesBackWithAnotherSeedIsTold(t *testing.T) {
	r := newRig(t, rigOptions{})
	w := r.worker(seeded(workerHello("a"), "1111"))
	w.store(prefix{stretch: 4}, 0, 8)
	w.close()
	r.eventually("it has left", func() bool { return r.server.Sessions() == 0 })
	r.worker(seeded(workerHello("b"), "2222"))
	b := r.scheduler(seeded(schedulerHello("b"), "2222"))
	r.eventually("it is told", func() bool { return len(b.told()) == 1 })
	if n := b.told()[0]; !strings.Contains(n, "not connected") {
		t.Errorf("%q", n)
	}
	// With nothing left of it there is nothing to tell.
	if n := r.engine.ClearSpace(r.engine.Spaces()[0].ID); n == 0 {
		t.Fatal("nothing was there")
	}
	r.eventually("nobody is unshared", func() bool { return len(r.server.Unshared()) == 0 })
}

func TestInstancesThatDifferOnPurposeAreNotTold(t *testing.T) {
	r := newRig(t, rigOptions{})
	r.worker(seeded(workerHello("a"), "1111"))
	a := r.scheduler(seeded(schedulerHello("a"), "1111"))
	r.worker(seeded(workerHello("b"), "2222", wire.Field{Key: "model_extra", Value: "b"}))
	b := r.scheduler(seeded(schedulerHello("b"), "2222"))
	// Whoever is told hears of it before what comes after it.
	r.worker(seeded(workerHello("c"), "3333"))
	c := r.scheduler(seeded(schedulerHello("c"), "3333"))
	r.eventually("a and c are told", func() bool {
		return len(a.told()) == 1 &&
			len(c.told()) == 1
	})
	if n := b.told(); len(n) != 0 {
		t.Errorf("%q", n)
	}
}

// What others declare, however often, does not fill a session's log.
func TestNoticesAreBounded(t *testing.T) {
	r := newRig(t, rigOptions{spaces: 40})
	r.worker(seeded(workerHello("a"), "1111"))
	a := r.scheduler(seeded(schedulerHello("a"), "1111"))
	for i := range 30 {
		r.worker(seeded(workerHello("other"+string(rune('A'+i))),
			strings.Repeat(string(rune('A'+i)), 4)))
	}
	r.eventually("it is told", func() bool { return len(a.told()) == 16 })
	if len(r.server.Unshared()) != 31*30 {
		t.Errorf("%d pairs", len(r.server.Unshared()))
	}
}
