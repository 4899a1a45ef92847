package stack

import (
	"fmt"

	"lookaside/internal/invariants"
)

// phase is how far a request has come. The package comment has the picture, phases the rules.
type phase uint8

const (
	asking    phase = iota // Lookup surveys what can be had; the request is in no book yet
	walking                // the walker looks for the rest of a long lookup in the arena
	verifying              // chunks that the arena restored are verified
	seeking                // tiers or peers are asked for what they hold
	queued                 // the plan is made and waits for its turn
	preparing              // slots are reserved and loads are queued
	loading                // chunks are on their way
	ended                  // the request is in no book any more
	phaseCount
)

// rule is what holds in one phase.
type rule struct {
	name string
	// owner may use the request's survey, plan and checklist without a lock. An owner finds out
	// whether the request ended meanwhile when it locks Stack.mu. Where it is stackMu nobody but
	// the holder of Stack.mu may use them.
	owner string
	next  []phase
}

const stackMu = "the holder of Stack.mu"

// phases is the table of legal transitions.
var phases = [phaseCount]rule{
	asking: {"asking", "the caller of Lookup",
		[]phase{walking, verifying, seeking, queued, preparing}},
	walking:   {"walking", "the walker", []phase{seeking, ended}},
	verifying: {"verifying", "one verifyWorker", []phase{seeking, ended}},
	seeking: {"seeking", "one seekWorker or peerWorker, the walker or a verifyWorker",
		[]phase{seeking, verifying, queued, ended}},
	queued:    {"queued", stackMu, []phase{preparing, ended}},
	preparing: {"preparing", "the holder of Stack.prepareMu", []phase{loading}},
	loading:   {"loading", stackMu, []phase{seeking, ended}},
	ended:     {"ended", "the last owner, until it sees the end", nil},
}

func (p phase) String() string { return phases[p].name }

// inQueue reports whether a request in this phase waits in a queue or is with a worker that took
// it from one.
func (p phase) inQueue() bool {
	return p == walking || p == verifying || p == seeking || p == queued
}

// advance moves a request to another phase. s.mu is held. In debug builds a transition that is not
// in the table panics, and so does a call without the lock.
func (s *Stack) advance(r *request, to phase) {
	if invariants.Enabled {
		if s.mu.TryLock() {
			panic(fmt.Sprintf("lookup %d of owner %d goes from %v to %v without Stack.mu",
				r.lookup, r.owner, r.state.phase, to))
		}
		if !r.state.phase.leadsTo(to) {
			panic(fmt.Sprintf("lookup %d of owner %d goes from %v to %v", r.lookup, r.owner,
				r.state.phase, to))
		}
	}
	r.state.phase = to
}

// leadsTo reports whether a transition is legal.
func (p phase) leadsTo(to phase) bool {
	for _, next := range phases[p].next {
		if next == to {
			return true
		}
	}
	return false
}
