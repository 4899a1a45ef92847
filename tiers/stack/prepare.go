package stack

import (
	"slices"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/engine"
)

// prepare reserves slots for a request's chunks and queues the loads. The dispatcher and the
// peerWorkers call it. mine: the caller is a peerWorker, which then borrows the first stretch
// itself. One request is prepared at a time, so that of several requests for one chunk the first
// begins the load and the rest join it.
func (s *Stack) prepare(r *request, mine bool) {
	s.prepareMu.Lock()
	defer s.prepareMu.Unlock()
	s.prepareHeld(r, mine, nil)
}

// prepareHeld is prepare for a caller that holds s.prepareMu. If b is given, the chunks to borrow
// become b's batch, and the caller must borrow them.
func (s *Stack) prepareHeld(r *request, mine bool, b *borrowing) {
	skip, trim, ok := s.confirm(r)
	out := s.granted[:0]
	if ok {
		out = s.promote(r, skip, out)
	}
	s.granted = out
	loads := newBorrows(out, b)
	if b != nil {
		b.r, b.batch, b.loads = r, b.batch[:0], loads
	}
	all := make([]*load, r.plan.chunks)

	s.mu.Lock()
	s.unwant(r)
	s.advance(r, loading)
	r.state.began = time.Now()
	r.state.loads, r.state.from, r.state.want, r.state.left = all, skip, skip+len(out), 0
	s.attach(r, skip, out, loads, b)
	s.startLoads(all, out, mine, b)
	if r.state.phase != ended { // startLoads ends it if all loads failed
		s.endPrepare(r, trim)
	}
	if b == nil {
		s.unlockAndWake()
	} else {
		s.mu.Unlock() // the reservation wakes the dispatcher when it is closed
	}
}

// confirm checks that a request still holds the hit that its plan starts from. It returns the
// request's trim, and how many chunks that trims off its beginning (skip). ok is false if there is
// nothing to promote.
func (s *Stack) confirm(r *request) (skip, trim int, ok bool) {
	for again := true; again; {
		s.mu.Lock()
		trim, again = r.state.trim, false
		base := r.base()
		s.mu.Unlock()
		skip = chunksBelow(r.seen.rest, base)
		ok = skip < r.plan.chunks
		// The request's hit may have expired, or been dropped, while it waited. If a Trim came
		// meanwhile, that may be the cause: then all is computed again. If none of the hit is
		// wanted any more, its lookup in the engine has ended, and promote begins a new one.
		if held := r.first + r.seen.hit; ok && max(base, trim) < held {
			n, err := s.engine.SettleLookup(r.owner, r.lookup, r.asked)
			if ok = err == nil && base+n == held; !ok {
				s.mu.Lock()
				again = r.state.trim != trim
				s.mu.Unlock()
			}
		}
	}
	return skip, trim, ok
}

// promote has the engine reserve slots for a request's chunks behind the skipped ones, and appends
// what it grants to out. If that fails nothing is appended, and the lookup ends with what it has.
func (s *Stack) promote(r *request, skip int, out []engine.PromotedChunk) []engine.PromotedChunk {
	run := tail(r.seen.rest, skip)
	g := &run.Space.Geometry
	n := min(run.Pages(), (r.plan.chunks-skip)*g.PagesPerChunk)
	out, _ = s.engine.PreparePromotion(r.owner, r.lookup, engine.PromotionRun{
		FirstPage: run.First, Prev: run.Prev, Hashes: run.Hashes[:n*g.DigestBytes],
		Have: r.plan.have[skip:r.plan.chunks], Lent: r.plan.borrowed(&r.seen, skip),
		Tenant: r.tenant,
	}, out)
	return out
}

// newBorrows returns room for the loads of granted chunks to borrow, in b's memory if b is given.
// nil: there are none.
func newBorrows(out []engine.PromotedChunk, b *borrowing) []load {
	n := 0
	for i := range out {
		if out[i].Foreign && out[i].State == engine.PromotionGranted {
			n++
		}
	}
	switch {
	case n == 0:
		return nil
	case b == nil:
		return make([]load, n)
	}
	return slices.Grow(b.loads[:0], n)[:n]
}

// attach makes a request wait for the load of each chunk in out: a new load, or one that another
// request has begun. New loads of borrowed chunks are taken from loads. s.mu is held.
func (s *Stack) attach(r *request, skip int, out []engine.PromotedChunk, loads []load,
	b *borrowing) {
	var last joins
	for i := range out {
		c := &out[i]
		c.Chunk += skip
		var l *load
		switch {
		case c.State == engine.PromotionJoined:
			if l = s.joined(c.Promotion, &last); l != nil && l.foreign {
				s.peers.joined.Add(1)
			}
		case c.State == engine.PromotionReady:
		case c.Foreign:
			l, loads = &loads[0], loads[1:]
			*l = load{promotion: c.Promotion, transfer: tiers.Transfer{Run: r.seen.rest},
				pages: c.Pages, foreign: true, chunk: c.Chunk}
			l.waiters = l.one[:0]
			if l.unlisted = b != nil && b.direct; l.unlisted {
				s.unlisted++
			} else {
				s.loads[c.Promotion] = l
			}
		default:
			l = s.newLoad(r, c)
		}
		if l != nil {
			l.waiters = append(l.waiters, waiter{r, c.Chunk})
			r.state.loads[c.Chunk] = l
			r.state.left++
		}
	}
}

// startLoads queues the new loads of a request, or adds them to b's batch. loads is what the
// request waited for at the beginning: a load that fails here may end the request. s.mu is held.
func (s *Stack) startLoads(loads []*load, out []engine.PromotedChunk, mine bool, b *borrowing) {
	for i := range out {
		l := loads[out[i].Chunk]
		switch {
		case l == nil || l.state != loadNew:
		case !l.foreign:
			s.sendLoad(l)
		case b != nil:
			l.state = loadRunning
			b.batch = append(b.batch, l)
		case s.sendBorrow(l):
			if !mine {
				s.borrowable.Signal()
			}
			mine = false
		}
	}
}

// endPrepare carries out a Cancel or Trim that came while the request was being prepared. s.mu is
// held.
func (s *Stack) endPrepare(r *request, trim int) {
	if r.state.cancelled || s.closed {
		_ = s.engine.Cancel(r.owner, r.lookup)
		s.remove(r)
		return
	}
	if !r.state.quiet && time.Since(r.state.queued) > roomPoll && r.state.left > 0 {
		s.promise(r, r.plan.pages, r.plan.eta) // the first one is old by now
	}
	if r.state.trim != trim {
		_ = s.engine.Trim(r.owner, r.lookup, r.state.trim)
		s.trimLoads(r)
	}
	if r.state.left == 0 {
		s.settle(r)
	}
}
