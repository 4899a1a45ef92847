package stack

import (
	"fmt"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/engine"
)

// Lookup leases the pages from q.FirstPage on that the arena holds, as engine.Engine.Lookup does.
// If done is true, pages is the answer. If done is false, pages is what the arena holds now, and a
// receives the answer once, later. It receives none if the lookup is cancelled or repeated, its
// owner removed or the Stack closed before. ErrBusy: a lookup of that name is being ended; try
// again.
func (s *Stack) Lookup(q *Query, a Asker) (pages int, done bool, err error) {
	if s.open.Load() > 0 {
		if err := s.replace(lookupKey{q.Owner, q.Lookup}); err != nil {
			return 0, true, err
		}
	}
	use := s.sourcesFor(q)
	sp := s.space(q.Space)
	if sp != nil && s.isLong(q, sp) {
		return s.lookupLong(q, sp, a, use)
	}
	s.callers.Add(1)
	pages, err = s.engine.Lookup(q.Owner, q.Lookup, q.FirstPage, q.Hashes)
	s.callers.Add(-1)
	s.Sweep()
	q.Why = engine.Absence{}
	if err != nil || sp == nil || pages >= len(q.Hashes)/sp.Geometry.DigestBytes {
		return pages, true, err
	}
	if use.none() {
		q.Why = s.whyOf(q, sp.Geometry.DigestBytes, pages)
		return pages, true, nil
	}
	r := s.newRequest(newQuestion(q, sp, a, use))
	pages, done = s.lookupBelow(r, q, pages)
	return pages, done, nil
}

// sourcesFor returns the sources that a query may use beside the arena.
func (s *Stack) sourcesFor(q *Query) sources {
	return sources{
		verify:  s.cfg.Verify != nil && s.engine.Unverified() > 0,
		promote: len(s.tiers) > 0 && (s.cfg.Promote != PromoteNever || q.always),
		peers:   s.cfg.Peers != nil && !q.always,
	}
}

// replace ends a lookup when another one of the same name begins.
func (s *Stack) replace(key lookupKey) error {
	s.mu.Lock()
	defer s.unlockAndWake()
	r := s.pending[key]
	if r == nil {
		return nil
	}
	if r.state.phase == preparing {
		r.state.cancelled = true
		return fmt.Errorf("%w: lookup %d is being ended", tiers.ErrBusy, key.lookup)
	}
	s.remove(r)
	_ = s.engine.Cancel(key.owner, key.lookup)
	return nil
}

// lookupBelow looks for what the arena does not hold, on the goroutine of Lookup's caller: it
// surveys what can be had without waiting, and begins the request if there is more to have. It
// returns as Lookup does. hit is what the arena holds.
func (s *Stack) lookupBelow(r *request, q *Query, hit int) (pages int, done bool) {
	var res reservation
	var next *tier
	more := false
	if r.use.verify {
		s.listChecks(r)
	}
	if len(r.check.list) > 0 {
		r.seen.rest, more = r.all, true
	} else if (r.use.promote || r.use.peers) && r.seen.aim(&r.question, hit) {
		next, res = s.surveyAtOnce(r)
		more = next != nil || r.plan.chunks > 0
	}
	begun := more && s.begin(r, next, q, &res)
	if res.held {
		if n, settled := res.close(r, begun); settled {
			q.Why = r.state.absence
			return n, true
		}
	}
	if !begun {
		q.Why = s.why(r, hit)
		s.dismiss(r)
	}
	return hit, !begun
}

// begin enters a request and passes it to the verifyWorkers, to the next tier to search, or to the
// queue. With a reservation the caller continues with the request, in the phase preparing. It
// returns false if there is no room for one more request.
func (s *Stack) begin(r *request, next *tier, q *Query, res *reservation) bool {
	res.keep(r)
	s.mu.Lock()
	if s.full(r.size) {
		s.count.refused.Add(1)
		s.unlockAndWake()
		return false
	}
	deadline := s.deadlineOf(q)
	due := s.due
	s.add(r, deadline)
	if res.held {
		s.advance(r, preparing)
		r.state.queued = r.state.since
		s.setQuiet(r, true)
		if q.Ticks && deadline >= 2*TickWithin {
			s.due, s.ticks = due, s.ticks || s.due
		}
		s.mu.Unlock() // the reservation wakes the dispatcher when it is closed
		return true
	}
	defer s.unlockAndWake()
	if next != nil || len(r.check.list) > 0 || r.plan.need > 0 {
		s.promise(r, 0, 0) // it takes longer than what memory holds
	}
	switch {
	case len(r.check.list) > 0:
		s.sendVerify(r)
	case next != nil:
		s.seek(r, next)
	default:
		s.enqueue(r)
	}
	return true
}

// deadlineOf returns how long a lookup may wait for tiers.
func (s *Stack) deadlineOf(q *Query) time.Duration {
	if !q.always && (q.Deadline <= 0 || q.Deadline > s.cfg.LookupDeadline) {
		return s.cfg.LookupDeadline
	}
	return q.Deadline
}

// Tick wakes the dispatcher for lookups with Query.Ticks that are still under way.
func (s *Stack) Tick() {
	s.Sweep()
	s.mu.Lock()
	s.due = s.due || s.ticks && len(s.pending) > 0
	s.ticks = false
	s.unlockAndWake()
}
