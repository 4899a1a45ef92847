package stack

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"lookaside/dax"
	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/why"
)

// loadState is how far a load has come. A queued load may go back to queued from running, when its
// tier failed and another one may have the chunk.
type loadState uint8

const (
	loadNew     loadState = iota
	loadQueued            // it waits for a worker
	loadRunning           // a worker has it
	loadOver              // it has ended
)

// load is a chunk on its way to the arena: one promotion of the engine.
type load struct {
	// These do not change.
	promotion uint64
	transfer  tiers.Transfer // to borrow: no bytes, and the rest of the request that began it
	pages     int
	foreign   bool                    // it is borrowed from a peer
	chunk     int                     // to borrow: its place in the transfer's run
	known     uint8                   // tiers that have reported what they hold of it
	held      [engine.MaxTiers]uint16 // pages, by tier

	// These are guarded by Stack.mu.
	state   loadState
	tried   uint8 // tiers that failed to give it
	cause   why.Reason
	tier    *tier    // that it waits for, or is read from
	waiters []waiter // the requests that wait for it
	one     [1]waiter
	// unlisted reports that the load is in the batch of a direct borrowing and not in Stack.loads.
	unlisted bool
}

// over reports whether a load has left the queue that it was in. Stack.mu is held.
func (l *load) over() bool { return l.state != loadQueued }

// waiter is a request that waits for a load.
type waiter struct {
	r     *request
	chunk int // of the request's rest
}

// newLoad makes the load of a chunk that was granted to a request. s.mu is held.
func (s *Stack) newLoad(r *request, c *engine.PromotedChunk) *load {
	g := &r.seen.rest.Space.Geometry
	run := r.seen.rest.Chunk(c.Chunk)
	run.Hashes = run.Hashes[:c.Pages*g.DigestBytes]
	size := uint64(c.Pages) * uint64(g.PageBytes)
	l := &load{
		promotion: c.Promotion, known: r.seen.known, pages: c.Pages,
		transfer: tiers.Transfer{Run: run, Bytes: s.cfg.Arena(c.Region)[c.Offset : c.Offset+
			size : c.Offset+size]},
	}
	for i := range s.tiers {
		if r.seen.knows(i) {
			l.held[i] = r.seen.held[i][c.Chunk]
		}
	}
	s.loads[c.Promotion] = l
	return l
}

// sendLoad queues a load for the next tier that may have the chunk, or ends it. s.mu is held.
func (s *Stack) sendLoad(l *load) {
	for i, t := range s.tiers {
		bit := uint8(1) << i
		// A tier that was not searched may have it.
		if l.tried&bit == 0 && (l.known&bit == 0 || int(l.held[i]) >= l.transfer.Pages()) &&
			t.breaker.usable() {
			l.tier, l.state = t, loadQueued
			t.ahead.Add(int64(len(l.transfer.Bytes)))
			t.loads.push(l)
			t.loadable.Signal()
			return
		}
	}
	s.endLoad(l, false, false)
}

// endLoad ends a load that no worker has, for all requests that wait for it. ok: the chunk has
// arrived, and the engine knows. short: only its first pages have arrived. s.mu is held.
func (s *Stack) endLoad(l *load, ok, short bool) {
	l.state = loadOver
	if l.unlisted {
		l.unlisted = false
		s.unlisted--
	} else {
		delete(s.loads, l.promotion)
	}
	if !ok {
		_ = s.engine.FinishPromotion(l.promotion, false, -1)
	}
	waiters := l.waiters
	l.waiters = nil
	for _, w := range waiters {
		if ok {
			w.r.state.came.add(l)
		} else if l.cause != why.End {
			w.r.state.cause = l.cause
		}
		w.r.state.unlent = w.r.state.unlent || l.foreign && (!ok || short)
		s.arrived(w.r, w.chunk, ok, short)
	}
}

// leave makes a request wait for a load no longer. A load that no request waits for is ended,
// unless a worker has begun it. s.mu is held.
func (s *Stack) leave(l *load, r *request) {
	l.waiters = slices.DeleteFunc(l.waiters, func(w waiter) bool { return w.r == r })
	if len(l.waiters) > 0 || l.state > loadQueued {
		return
	}
	if l.state == loadQueued && !l.foreign {
		l.tier.ahead.Add(-int64(len(l.transfer.Bytes)))
	}
	s.endLoad(l, false, false)
}

// loadWorker loads from one tier, batch by batch.
func (s *Stack) loadWorker(t *tier) {
	var batch []*load
	for {
		s.mu.Lock()
		l, ok := t.loads.peek()
		for ; !ok && !s.closed; l, ok = t.loads.peek() {
			t.loadable.Wait()
		}
		if s.closed {
			s.unlockAndWake()
			return
		}
		batch = batch[:0]
		for ; ok && len(batch) < t.Batch; l, ok = t.loads.peek() {
			l.state = loadRunning
			batch = append(batch, l)
			t.loads.pop()
		}
		s.unlockAndWake()
		s.load(t, batch)
	}
}

// load loads a batch from a tier.
func (s *Stack) load(t *tier, batch []*load) {
	if !t.breaker.enterAfter() {
		for _, l := range batch {
			s.loaded(t, l, ErrOff)
		}
		return
	}
	transfers := make([]tiers.Transfer, len(batch))
	for i, l := range batch {
		transfers[i] = l.transfer
	}
	start := time.Now()
	alone := t.estimate.begin()
	var first atomic.Bool
	v := s.call(t.Tier.Load, t.LoadTimeout, transfers, func(i int, err error) {
		l, bytes := batch[i], int64(len(transfers[i].Bytes))
		took := time.Since(start)
		if err == nil {
			if alone && first.CompareAndSwap(false, true) {
				t.estimate.first(took, bytes)
			}
			t.estimate.moved(bytes)
			t.count.loaded(bytes)
			if s.cfg.Observe != nil {
				s.cfg.Observe(t.index, OpLoad, bytes, took)
			}
		} else {
			t.count.failed(OpLoad, err)
		}
		s.loaded(t, l, err)
	})
	t.estimate.end()
	t.breaker.leave(v)
}

// loaded ends a tier's call for one load. If it failed, another tier may be tried.
func (s *Stack) loaded(t *tier, l *load, err error) {
	if err == nil {
		_ = s.engine.FinishPromotion(l.promotion, true, t.index)
	}
	s.mu.Lock()
	defer s.unlockAndWake()
	t.ahead.Add(-int64(len(l.transfer.Bytes)))
	l.tried |= 1 << t.index
	switch {
	case err == nil:
	case errors.Is(err, tiers.ErrNotFound):
		l.cause = why.NeverStored // as far as this tier goes: ask what is remembered
	case errors.Is(err, errLate):
		l.cause = why.Late
	default:
		l.cause = why.Lost
	}
	if err != nil && len(l.waiters) > 0 && !s.closed {
		s.sendLoad(l)
		return
	}
	s.endLoad(l, err == nil, false)
}

// call calls a tier's Load or Store. done is called exactly once for each transfer, whatever the
// tier does. The verdict is for the breaker: a call worked if anything in it did.
func (s *Stack) call(op func(context.Context, []tiers.Transfer, func(int, error)),
	timeout time.Duration, transfers []tiers.Transfer, done func(i int, err error)) verdict {
	ctx, cancel := context.WithTimeoutCause(s.ctx, timeout, errLate)
	defer cancel()
	told := make([]atomic.Bool, len(transfers))
	var verdicts [3]atomic.Int32
	once := func(i int, err error) {
		if told[i].CompareAndSwap(false, true) {
			verdicts[s.judge(err)].Add(1)
			done(i, err)
		}
	}
	mem := make([][]byte, len(transfers))
	for i := range transfers {
		mem[i] = transfers[i].Bytes
	}
	// A tier guards what it does on goroutines of its own; this is for what it does on ours.
	err := dax.Guard(func() { op(ctx, transfers, once) }, mem...)
	if err == nil {
		err = errSilent
	}
	for i := range transfers {
		once(i, err)
	}
	switch {
	case verdicts[worked].Load() > 0:
		return worked
	case verdicts[failed].Load() > 0:
		return failed
	}
	return neither
}

var errSilent = errors.New("the tier returned without a result for this chunk")
