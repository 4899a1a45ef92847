package stack

import (
	"slices"
	"testing"

	"lookaside/internal/invariants"
)

// TestPhases checks the table of transitions: each phase has a name and an owner, can be reached,
// and leads to the end.
func TestPhases(t *testing.T) {
	reached := map[phase]bool{asking: true}
	for again := true; again; {
		again = false
		for p := range phaseCount {
			for _, next := range phases[p].next {
				if reached[p] && !reached[next] {
					reached[next], again = true, true
				}
			}
		}
	}
	ends := map[phase]bool{ended: true}
	for range phaseCount {
		for p := range phaseCount {
			ends[p] = ends[p] || slices.ContainsFunc(phases[p].next,
				func(next phase) bool { return ends[next] })
		}
	}
	for p := range phaseCount {
		if r := phases[p]; r.name == "" || r.owner == "" || !reached[p] || !ends[p] {
			t.Errorf("phase %d: %+v; reached %v, ends %v", p, r, reached[p], ends[p])
		}
	}
	if len(phases[ended].next) > 0 || preparing.leadsTo(ended) {
		t.Error("a request ends twice, or while it is being prepared")
	}
}

// TestPhasesAreChecked: a debug build panics at an illegal transition, and at one without the lock.
func TestPhasesAreChecked(t *testing.T) {
	if !invariants.Enabled {
		t.Skip("not a debug build")
	}
	panics := func(locked bool, from, to phase) (did bool) {
		s, r := &Stack{}, &request{}
		r.state.phase = from
		if locked {
			s.mu.Lock()
		}
		defer func() { did = recover() != nil }()
		s.advance(r, to)
		return false
	}
	for from := range phaseCount {
		for to := range phaseCount {
			if got := panics(true, from, to); got == from.leadsTo(to) {
				t.Errorf("from %v to %v: panics %v", from, to, got)
			}
		}
	}
	if !panics(false, asking, queued) {
		t.Error("no panic without the lock")
	}
}
