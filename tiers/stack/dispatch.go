package stack

import (
	"container/heap"
	"time"

	"lookaside/tiers/engine"
	"lookaside/tiers/why"
)

const (
	// roomPoll is how often the dispatcher checks whether there is room for queued requests.
	// Workers release slots without a signal to it.
	roomPoll = 2 * time.Millisecond
	// prepareGrace is how much later the deadline of a request becomes that is being prepared at
	// its deadline.
	prepareGrace = time.Millisecond
)

// dispatch is the dispatcher: it settles requests whose deadline has passed, renews promises, and
// prepares the request whose turn it is.
func (s *Stack) dispatch() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		s.mu.Lock()
		if s.due = false; s.closed {
			s.unlockAndWake()
			return
		}
		now := time.Now()
		wait := s.settleLate(now)
		if s.unsure > 0 {
			s.promiseUnverified(now)
			wait = min(wait, promiseEvery)
		}
		if s.quiet > 0 {
			wait = min(wait, s.promiseQuiet(now))
		}
		if r := s.next(now); r != nil {
			s.advance(r, preparing)
			s.unlockAndWake()
			s.prepare(r, false)
			continue
		}
		if _, ok := s.queue.peek(); ok {
			wait = min(wait, roomPoll)
		}
		s.unlockAndWake()
		timer.Reset(wait)
		select {
		case <-s.kick:
		case <-timer.C:
		case <-s.ctx.Done():
		}
	}
}

// settleLate settles the requests whose deadline has passed, and returns when the next one does.
// s.mu is held.
func (s *Stack) settleLate(now time.Time) time.Duration {
	for len(s.deadlines) > 0 && !s.deadlines[0].state.deadline.After(now) {
		if r := s.deadlines[0]; r.state.phase == preparing {
			// A peerWorker or a caller of Lookup will have prepared it in a moment.
			r.state.deadline = now.Add(prepareGrace)
			heap.Fix(&s.deadlines, 0)
			continue
		}
		s.count.late.Add(1)
		s.deadlines[0].state.cause = why.Late
		s.settle(s.deadlines[0])
	}
	if len(s.deadlines) > 0 {
		return s.deadlines[0].state.deadline.Sub(now)
	}
	return time.Hour
}

// next returns the first queued request that fits now, or nil. A request that can never fit whole
// counts as fitting when its largest possible part fits. s.mu is held.
//
// All requests wait in order for room in the budget, which becomes free as promotions end. Requests
// may overtake one that waits for leases to end: that may take long, and the leases may be of its
// own owner. When its patience is over it takes what room there is.
func (s *Stack) next(now time.Time) *request {
	s.queue.peek() // drops what is over
	var room engine.Room
	var err error
	full := false
	for i, last := s.queue.head, engine.Owner(0); i < len(s.queue.list); i++ {
		r := s.queue.list[i]
		if r.state.phase != queued { // over, or queued before peers failed it
			continue
		}
		if i == s.queue.head || r.owner != last {
			room, err = s.engine.PromotionRoom(r.owner)
			last = r.owner
		}
		trimmed := chunksBelow(r.seen.rest, r.base())
		need := min(max(0, r.plan.need-trimmed), room.Most)
		full = full || err == nil && room.Budget < need
		if !full && (err != nil || room.Share >= need ||
			now.Sub(r.state.queued) >= r.plan.patience) {
			return r
		}
		if now.Sub(r.state.promised) >= promiseEvery {
			r.state.promised = now
			s.promise(r, r.plan.pages, max(r.plan.eta, promiseEvery))
		}
	}
	return nil
}

// setQuiet records whether a request's asker has been promised nothing yet. s.mu is held.
func (s *Stack) setQuiet(r *request, quiet bool) {
	if r.state.quiet == quiet {
		return
	}
	if r.state.quiet = quiet; quiet {
		if s.quiet++; s.quiet == 1 {
			s.due = true // the dispatcher makes the promise if it takes long
		}
	} else {
		s.quiet--
	}
}

// promiseQuiet makes a promise to the askers of quiet requests that have waited for slowSeek. It
// returns how long to wait before the next call. s.mu is held.
func (s *Stack) promiseQuiet(now time.Time) time.Duration {
	next := slowSeek
	for _, r := range s.pending {
		if !r.state.quiet || r.state.inline {
			continue
		}
		if left := slowSeek - now.Sub(r.state.queued); left > 0 {
			next = min(next, left)
			continue
		}
		s.setQuiet(r, false)
		s.promise(r, r.plan.pages, callTime)
	}
	return next
}
