package connector_test

import (
	"testing"
	"time"

	"lookaside/ipc/wire"
)

// TestEvents: a session is told what its space holds, and then what comes and goes in it, and
// nothing of other spaces.
func TestEvents(t *testing.T) {
	r := newRig(t, rigOptions{})
	w := r.worker(workerHello("e"))
	other := workerHello("f")
	other.Fields[1].Value = "other"
	w2 := r.worker(other)
	s := r.scheduler(schedulerHello("e"))
	p := onePrefix(1)
	w.store(p, 0, 6)
	w2.store(p, 0, 12)
	held := map[string]bool{}
	ask := func(reset bool) (runs int) {
		t.Helper()
		for first := true; ; first = false {
			var m wire.Events
			check(t, s.ses.Call(&wire.ReadEvents{ID: 9}, &m, patience))
			if m.ID != 9 || m.Reset != (first && reset) {
				t.Fatalf("%+v", m)
			}
			if m.Reset {
				clear(held)
			}
			for _, run := range m.Runs {
				for at := 0; at < len(run.Hashes); at += 32 {
					if h := string(run.Hashes[at : at+32]); run.Removed {
						delete(held, h)
					} else {
						held[h] = true
					}
				}
			}
			runs += len(m.Runs)
			if !m.More {
				return runs
			}
		}
	}
	if ask(true); len(held) != 6 {
		t.Fatalf("%d pages", len(held))
	}
	if n := ask(false); n != 0 {
		t.Fatalf("%d runs", n)
	}
	w.store(p, 4, 8)
	if n := ask(false); n != 2 || len(held) != 12 {
		// what is new of the second chunk, and the third
		t.Fatalf("%d runs, %d pages", n, len(held))
	}
	var c wire.Cleared
	check(t, s.ses.Call(&wire.ClearSpace{ID: 7}, &c, patience))
	if n := ask(false); n != 3 || len(held) != 0 {
		t.Fatalf("%d runs, %d pages", n, len(held))
	}
	if j := r.engine.Journal(); j.Feeds != 1 {
		t.Fatalf("%+v", j)
	}
	s.ses.Close()
	for end := time.Now().Add(patience); r.engine.Journal().Feeds != 0; time.Sleep(
		time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the feed of a session that has ended goes on")
		}
	}
}
