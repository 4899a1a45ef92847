package stack

import "lookaside/tiers/engine"

// This file has the short path of a lookup all of whose rest is at peers: the caller of Lookup
// prepares the request on its own goroutine, while a peer already leases what the request needs.

// maxAtOnce is how many chunks a request may have to be prepared by the caller of Lookup, if there
// is nothing to wait for. Preparing so many takes less time than waking a peerWorker.
const maxAtOnce = 512

// reservation is the right to prepare a request on the goroutine of Lookup's caller. While held is
// true the caller holds Stack.prepareMu and must call close, which releases it.
type reservation struct {
	held bool
	s    *Stack
	call *borrowing // set while held; direct if a request was sent to a peer
}

// surveyAtOnce surveys what can be had of a request's rest without waiting. It returns the next
// tier to search; if it returns nil, the plan is made. If peers hold all that is worth having, it
// also makes a reservation, unless another goroutine holds Stack.prepareMu.
func (s *Stack) surveyAtOnce(r *request) (next *tier, res reservation) {
	pages, by := s.readHints(r)
	if pages == r.seen.rest.Pages() { // there is nothing more to know
		if res = s.reserveAsking(r, pages, by); res.held {
			r.seen.known = 0
			s.makePlan(r)
			return nil, res
		}
	}
	next = s.askLocal(r)
	if next != nil || r.plan.need > 0 || r.plan.chunks == 0 || r.plan.chunks > maxAtOnce {
		return next, res
	}
	planned := r.plan.pages - (r.seen.hit - r.seen.part)
	if pages < r.seen.rest.Pages() && planned == pages {
		res = s.reserveAsking(r, pages, by)
	}
	if !res.held && s.prepareMu.TryLock() {
		res = reservation{held: true, s: s, call: s.newBorrowing()}
	}
	return nil, res
}

// reserveAsking makes a reservation and sends a peer a request for a lease on the first pages of
// the rest, which are all that can be had. The peer's reply arrives while the request is being
// prepared. There is no reservation if no peer has these pages (peer is -1), if other requests wait
// for the same chunks, or if another goroutine holds Stack.prepareMu.
func (s *Stack) reserveAsking(r *request, pages, peer int) (res reservation) {
	run := r.seen.rest
	d := run.Space.Geometry.DigestBytes
	run.Hashes = run.Hashes[:pages*d]
	if peer < 0 || run.Chunks() > maxAtOnce {
		return res
	}
	first := pagesOf(pages, run.Space.Geometry.PagesPerChunk, 0) * d
	if s.engine.Awaited(r.space, run.Hashes[first-d:first]) || !s.prepareMu.TryLock() {
		return res
	}
	b := s.newBorrowing()
	b.direct = true
	s.mu.Lock()
	full := s.full(int64(len(r.seen.rest.Hashes) + len(r.seen.rest.Prev)))
	s.borrowings[b] = struct{}{} // a peer may go as soon as it has lent
	s.mu.Unlock()
	if !full && s.cfg.Peers.Ask(run, peer, b.done) {
		return reservation{held: true, s: s, call: b}
	}
	s.mu.Lock()
	delete(s.borrowings, b)
	s.mu.Unlock()
	s.spareBorrowing.Store(b)
	s.prepareMu.Unlock()
	return res
}

// keep makes a request independent of its caller's memory. A held reservation provides the memory
// for the digests.
func (res *reservation) keep(r *request) {
	if res.held {
		res.call.digests = r.question.keep(r.seen.rest, res.call.digests)
	} else {
		r.question.keep(r.seen.rest, nil)
	}
	r.seen.rest = r.all
}

// close ends a reservation: it prepares the request if that was begun, and releases
// Stack.prepareMu. If settled is true the request has ended with that number of pages, and its
// asker receives nothing.
func (res *reservation) close(r *request, begun bool) (pages int, settled bool) {
	s, b := res.s, res.call
	if begun {
		s.peers.lookups.Add(1)
		s.prepareHeld(r, false, b)
		b.r = r
	}
	res.held = false
	s.prepareMu.Unlock()
	s.mu.Lock()
	b.prepared = true
	if !b.direct {
		for _, l := range b.batch {
			s.borrowAgain(l)
		}
	}
	r.state.settled = -1
	r.state.inline = begun && b.came && r.state.phase == loading && r.state.quiet
	if b.came {
		s.mu.Unlock()
		s.finishBorrow(b, b.batch, b.loans)
		s.mu.Lock()
		r.state.inline = false // the request continues with tiers, or with other peers
	}
	pages = r.state.settled
	s.unlockAndWake() // only now, so that the dispatcher does not delay the caller
	return pages, pages >= 0
}

// newBorrowing returns a borrowing for a reservation.
func (s *Stack) newBorrowing() *borrowing {
	b := s.spareBorrowing.Swap(nil)
	if b == nil {
		b = &borrowing{}
		b.done = func(loans []engine.Loan) { s.directDone(b, loans) }
	}
	b.direct, b.prepared, b.came = false, false, false
	b.batch, b.loads = b.batch[:0], b.loads[:0]
	return b
}

// directDone receives the loans of a peer that got a direct request (Peers.Ask). The later of
// directDone and the reservation's close continues with the request.
func (s *Stack) directDone(b *borrowing, loans []engine.Loan) {
	s.mu.Lock()
	if b.came = true; !b.prepared {
		b.loans = append(b.loans[:0], loans...)
		s.mu.Unlock()
		return
	}
	s.mu.Unlock()
	s.finishBorrow(b, b.batch, loans)
	s.deliver()
}
