package stack

import (
	"context"
	"errors"
	"slices"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/engine"
)

// This file looks up in peers and tiers what they hold of a request's rest. All of it except seek,
// proceed and enqueue runs on the phase's owner and needs no lock.

// slowSeek is the time of a tier's lookup above which the asker gets a promise before that lookup
// ends. It is well below the time that an asker waits without a promise.
const slowSeek = 5 * time.Millisecond

// surveyBelow reads the hints of peers, looks up in the Local tiers, and returns the next tier to
// search. If it returns nil, the plan is made.
func (s *Stack) surveyBelow(r *request) (next *tier) {
	s.readHints(r)
	return s.askLocal(r)
}

// readHints records what peers hint that they hold of a request's rest. It returns what
// Peers.Contains returns.
func (s *Stack) readHints(r *request) (pages, by int) {
	if !r.seen.peers {
		r.seen.hints = r.seen.hints[:0]
		return 0, -1
	}
	n := r.seen.rest.Chunks()
	r.seen.hints = slices.Grow(r.seen.hints[:0], n)[:n]
	return s.cfg.Peers.Contains(r.seen.rest, r.seen.hints)
}

// askLocal looks up a request's rest in the Local tiers, after readHints. It returns the next tier
// to search. If it returns nil, the plan is made.
func (s *Stack) askLocal(r *request) (next *tier) {
	r.seen.known = 0
	if !r.use.promote {
		s.makePlan(r)
		return nil
	}
	for _, t := range s.tiers {
		if t.local {
			s.askTier(r, t, 0)
		}
	}
	if next = s.nextSeek(r, 0); next == nil {
		s.makePlan(r)
	}
	return next
}

// askTier looks up a request's rest, from chunk i on, in a tier.
func (s *Stack) askTier(r *request, t *tier, i int) {
	n := r.seen.rest.Chunks()
	held := slices.Grow(r.seen.held[t.index][:0], n)[:n]
	clear(held)
	r.seen.held[t.index] = held
	if !t.breaker.usable() {
		return
	}
	run := tail(r.seen.rest, i)
	start := time.Now()
	var err error
	if t.local {
		err = t.Tier.Contains(s.ctx, run, held[i:])
	} else {
		if ok, _ := t.breaker.enter(); !ok {
			return
		}
		ctx, cancel := context.WithTimeoutCause(s.ctx, t.LookupTimeout, errLate)
		err = t.Tier.Contains(ctx, run, held[i:])
		cancel()
		t.breaker.leave(s.judge(err))
	}
	took := time.Since(start)
	if !t.local {
		t.count.sought(took)
	}
	if err != nil {
		clear(held)
		t.count.failed(OpLookup, err)
		return
	}
	r.seen.known |= 1 << t.index
	pages := 0
	for _, n := range held[i:] {
		pages += int(n)
	}
	t.count.lookups.Add(1)
	t.count.lookupPages.Add(uint64(run.Pages()))
	t.count.hitPages.Add(uint64(pages))
	if s.cfg.Observe != nil {
		s.cfg.Observe(t.index, OpLookup, 0, took)
	}
}

// judge returns what an error of a tier means to its breaker.
func (s *Stack) judge(err error) verdict {
	switch {
	case err == nil, errors.Is(err, tiers.ErrNotFound), errors.Is(err, tiers.ErrCorrupt),
		errors.Is(err, tiers.ErrBusy):
		return worked
	case s.ctx.Err() != nil, errors.Is(err, tiers.ErrClosed):
		return neither
	}
	return failed
}

// nextSeek returns the next tier, from the given one on, that a seekWorker must search. nil: none.
func (s *Stack) nextSeek(r *request, from int) *tier {
	for _, t := range s.tiers[from:] {
		if !t.local && t.breaker.usable() {
			if r.seen.missing() == r.seen.rest.Chunks() {
				return nil
			}
			return t
		}
	}
	return nil
}

// makePlan makes a request's plan at the present estimates.
func (s *Stack) makePlan(r *request) {
	var t terms
	if s.cfg.Promote == PromoteAuto {
		t.recompute = max(0, r.recompute)
	}
	for i, each := range s.tiers {
		if r.seen.knows(i) {
			t.pace[i] = each.estimate.pace(each.ahead.Load())
		}
	}
	r.plan.make(&r.question, &r.seen, &t, s)
	r.planned = true
	if r.plan.cut {
		s.count.cut.Add(1)
		s.probeTier(r)
	}
}

// arenaHolds implements prober.
func (s *Stack) arenaHolds(id engine.SpaceID, run tiers.Run) []uint16 {
	held := make([]uint16, run.Chunks())
	if s.engine.Contains(id, run.First, run.Hashes, held) != nil {
		clear(held)
	}
	return held
}

// peersHold implements prober.
func (s *Stack) peersHold(chunk tiers.Run) int {
	var held [1]uint16
	s.cfg.Peers.Contains(chunk, held[:])
	return int(held[0])
}

// seek hands a request to the seekWorkers of a tier. s.mu is held.
func (s *Stack) seek(r *request, t *tier) {
	if latency := t.count.lookupTime(); latency > slowSeek {
		s.promise(r, r.asked, 2*latency)
	}
	s.advance(r, seeking)
	t.seeks.push(r)
	t.seekable.Signal()
}

// seekWorker looks up in one tier what requests miss.
func (s *Stack) seekWorker(t *tier) {
	for {
		s.mu.Lock()
		r, ok := t.seeks.peek()
		for ; !ok && !s.closed; r, ok = t.seeks.peek() {
			t.seekable.Wait()
		}
		if s.closed {
			s.unlockAndWake()
			return
		}
		t.seeks.pop()
		s.unlockAndWake()
		s.askTier(r, t, r.seen.missing())
		next := s.nextSeek(r, t.index+1)
		if next == nil {
			s.makePlan(r)
		}
		s.mu.Lock()
		s.proceed(r, next)
		s.unlockAndWake()
	}
}

// proceed passes a surveyed request on: to the next tier to search, or to the queue if the plan has
// anything to wait for. s.mu is held.
func (s *Stack) proceed(r *request, next *tier) {
	switch {
	case r.state.phase == ended || s.closed:
	case next != nil:
		s.seek(r, next)
	case r.plan.chunks == 0:
		s.settle(r)
	default:
		s.enqueue(r)
	}
}

// enqueue queues a planned request for the dispatcher. One that needs no room in the arena, as all
// its rest is at peers, is queued for the peerWorkers instead. s.mu is held.
func (s *Stack) enqueue(r *request) {
	s.advance(r, queued)
	r.state.queued = time.Now()
	if r.plan.need == 0 {
		s.setQuiet(r, true)
		s.atPeers.push(r)
		s.borrowable.Signal()
		return
	}
	for i, t := range s.tiers {
		t.ahead.Add(r.plan.wants[i])
	}
	r.state.promised = r.state.queued
	s.promise(r, r.plan.pages, r.plan.eta)
	s.queue.push(r)
	ring(s.kick)
}
