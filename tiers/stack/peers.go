package stack

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/engine"
)

// Peers is how a Stack reaches other sidecars' arenas. Its methods may be called from any
// goroutine.
type Peers interface {
	// Contains looks a run up in the hints of peers. It sets held[i] to how many pages of the run's
	// i-th chunk, from the chunk's first page, some peer holds. Chunks behind the first that is not
	// held whole count only if held whole. len(held) is run.Chunks(). It returns how many pages
	// peers hold from the first on without a gap, and the number, for Ask, of one peer that holds
	// all of these. -1: there is no such peer. It takes microseconds and does not wait.
	Contains(run tiers.Run, held []uint16) (pages, by int)
	// Borrow leases what peers hold of a run, from its first page on without a gap. It calls out
	// for each chunk, in order, on the caller's goroutine. Regions are those that were announced to
	// our workers. A chunk with fewer pages than the run has of it is the last. Borrow returns the
	// pages leased, and an error only if there are none. It returns when ctx is done, and within a
	// bounded time.
	Borrow(ctx context.Context, run tiers.Run, out func(chunk int, l engine.Loan)) (pages int,
		err error)
	// Ask requests a lease on run, the pages that Contains has just returned, from the given peer,
	// and does not wait. If it returns true, done is called exactly once, within a bounded time, on
	// another goroutine, with the loans granted as by Borrow, possibly none. The loans are valid
	// until done returns; done does not wait. If Ask returns false, done is never called, and the
	// caller uses Borrow instead. The digests of run are read before Ask returns.
	Ask(run tiers.Run, peer int, done func(loans []engine.Loan)) bool
	// Return gives loans back; the caller no longer reads them. bad reports that their bytes did
	// not match their checksum. Return does not wait, and does not keep handles.
	Return(handles []uint64, bad bool)
	// Memory returns the whole memory of a region that loans are in. The caller may read it until
	// it has returned the last loan in it. nil: the memory cannot be had. Reading it may fault
	// (dax.Guard).
	Memory(region uint32) []byte
}

const (
	// peerWorkers is how many calls of Peers.Borrow there are at a time.
	peerWorkers = 8
	// finishSlice is how many loans are given to the engine before Stack.mu is released for a
	// moment.
	finishSlice = 64
	// callTime is what askers are promised when a peer does not reply at once.
	callTime = 100 * time.Millisecond
)

// borrowing is one call of Peers.Borrow (by a peerWorker) or Peers.Ask (by a reservation). Guarded
// by Stack.mu.
type borrowing struct {
	gone   []uint64 // peers that have gone since it began: their loans are void
	direct bool     // a call of Ask, which has begun

	// The fields below are for a reservation. Their memory is used again if no other goroutine can
	// have a pointer into it.
	r       *request // nil: no request waits for the loans
	batch   []*load  // loads that wait for this call
	loads   []load   // their memory, and that of other loads of the request
	digests []byte   // of the request

	// The reservation's close sets prepared, and done sets came. The later of the two continues
	// with the request.
	prepared bool
	came     bool
	loans    []engine.Loan // from done, if it was called before prepared was set
	done     func(loans []engine.Loan)
}

// sendBorrow queues a load for a peerWorker. It reports whether a peerWorker must be woken for it,
// which is true for the first of consecutive chunks. s.mu is held.
func (s *Stack) sendBorrow(l *load) (wake bool) {
	wake = true
	if n := len(s.borrows.list); n > s.borrows.head {
		last := s.borrows.list[n-1]
		wake = last.over() || !last.before(l)
	}
	l.state = loadQueued
	s.borrows.push(l)
	return wake
}

// before reports whether next is the load of the next chunk for the same request.
func (l *load) before(next *load) bool {
	return next.chunk == l.chunk+1 && &next.transfer.Hashes[0] == &l.transfer.Hashes[0]
}

// peerWorker borrows chunks, and prepares requests all of whose rest is at peers.
func (s *Stack) peerWorker() {
	var batch []*load
	var loans []engine.Loan
	for {
		s.mu.Lock()
		l, borrow := s.borrows.peek()
		r, ask := s.atPeers.peek()
		for ; !borrow && !ask && !s.closed; r, ask = s.atPeers.peek() {
			s.borrowable.Wait()
			l, borrow = s.borrows.peek()
		}
		switch {
		case s.closed:
			s.unlockAndWake()
			return
		case borrow:
			batch = batch[:0]
			for ; borrow && (len(batch) == 0 ||
				batch[len(batch)-1].before(l)); l, borrow = s.borrows.peek() {
				l.state = loadRunning
				batch = append(batch, l)
				s.borrows.pop()
			}
			if borrow {
				s.borrowable.Signal() // the chunk that joined the two stretches may be over
			}
			b := &borrowing{}
			s.borrowings[b] = struct{}{}
			s.unlockAndWake()
			loans = s.borrow(b, batch, loans[:0])
			clear(batch)
		case r.state.phase == seeking:
			s.atPeers.pop()
			s.unlockAndWake()
			next := s.surveyBelow(r)
			s.mu.Lock()
			s.proceed(r, next)
			s.unlockAndWake()
		default:
			s.atPeers.pop()
			s.advance(r, preparing)
			s.unlockAndWake()
			s.peers.lookups.Add(1)
			s.prepare(r, true)
		}
	}
}

// runOf returns the run of a batch of consecutive chunks.
func runOf(batch []*load) tiers.Run {
	run := tail(batch[0].transfer.Run, batch[0].chunk)
	pages := 0
	for _, l := range batch {
		pages += l.pages
	}
	run.Hashes = run.Hashes[:pages*run.Space.Geometry.DigestBytes]
	return run
}

// borrow borrows a batch of consecutive chunks. It returns loans, to use again.
func (s *Stack) borrow(b *borrowing, batch []*load, loans []engine.Loan) []engine.Loan {
	ctx, cancel := context.WithTimeoutCause(s.ctx, s.cfg.BorrowTimeout, errLate)
	_, _ = s.cfg.Peers.Borrow(ctx, runOf(batch), func(_ int, l engine.Loan) {
		loans = append(loans, l)
	})
	cancel()
	s.finishBorrow(b, batch, loans)
	return loans
}

// joins is where a request's last joined load was found.
type joins struct {
	batch []*load
	next  int
}

// joined returns the load of a promotion. nil: it has ended by now. last is where the caller's
// previous one was found: a request that joins one chunk of a batch mostly joins those behind it.
// s.mu is held.
//
// Loads of a direct borrowing are in its batch, not in Stack.loads: entering them there took longer
// than all the rest of their handling.
func (s *Stack) joined(promotion uint64, last *joins) *load {
	if i := last.next; i < len(last.batch) && last.batch[i].promotion == promotion &&
		last.batch[i].unlisted {
		last.next++
		return last.batch[i]
	}
	if l := s.loads[promotion]; l != nil || s.unlisted == 0 {
		return l
	}
	for b := range s.borrowings {
		for i, l := range b.batch {
			if l.promotion == promotion && l.unlisted {
				*last = joins{b.batch, i + 1}
				return l
			}
		}
	}
	return nil
}

// borrowAgain queues a chunk that a direct call did not bring for a peerWorker. If no request waits
// for the chunk, it ends the load and returns false. s.mu is held.
func (s *Stack) borrowAgain(l *load) (again bool) {
	if len(l.waiters) == 0 || s.closed {
		s.endLoad(l, false, false)
		return false
	}
	if l.unlisted {
		l.unlisted = false
		s.unlisted--
		s.loads[l.promotion] = l
	}
	if s.sendBorrow(l) {
		s.borrowable.Signal()
	}
	return true
}

// finishBorrow passes the loans of consecutive chunks to the engine, in their order, and ends their
// loads. The loans of a direct call are for all chunks of a request's rest. Chunks that it did not
// bring are borrowed from other peers, and the caller of finishBorrow must call deliver.
func (s *Stack) finishBorrow(b *borrowing, batch []*load, loans []engine.Loan) {
	direct := b.direct
	var t tally
	if direct { // some chunks may be held, or not wanted any more
		loans, t.void = match(batch, loans)
	}
	for at := 0; at < len(batch); at += finishSlice {
		list := batch[at:min(at+finishSlice, len(batch))]
		s.mu.Lock()
		s.finishLoans(b, list, loans[min(at, len(loans)):min(at+len(list), len(loans))], &t)
		if at+len(list) == len(batch) {
			s.peers.count(&t) // before an asker has the answer
		}
		if direct {
			s.mu.Unlock()
		} else {
			s.unlockAndWake()
		}
	}
	for i := len(batch); i < len(loans); i++ { // more than was requested
		t.void = append(t.void, loans[i].Handle)
	}
	s.mu.Lock()
	delete(s.borrowings, b)
	if direct && t.again == 0 && len(batch) == len(b.loads) &&
		(b.r == nil || b.r.state.phase == ended) && !s.closed {
		b.gone, b.r = b.gone[:0], nil
		s.spareBorrowing.Store(b) // no other goroutine has a pointer into it
	}
	s.mu.Unlock()
	s.giveBack(t.void, false)
}

// tally is the outcome of a borrowing.
type tally struct {
	pages int      // requested
	got   int      // of them, leased
	again int      // chunks that are borrowed again, from any peer
	void  []uint64 // handles of unused loans
}

// finishLoans ends the loads in list, at most finishSlice, with the loans of the first of them.
// s.mu is held.
func (s *Stack) finishLoans(b *borrowing, list []*load, loans []engine.Loan, t *tally) {
	var promotions [finishSlice]uint64
	var done [finishSlice]bool
	for i, l := range list[:len(loans)] {
		if promotions[i] = l.promotion; slices.Contains(b.gone, loans[i].Peer) {
			promotions[i] = 0 // the loan is void
		}
		if len(l.waiters) == 0 {
			s.peers.late.Add(1)
		}
	}
	s.engine.FinishBorrows(promotions[:len(loans)], loans, done[:])
	for i, l := range list {
		t.pages += l.pages
		switch {
		case i >= len(loans) && b.direct:
			if s.borrowAgain(l) {
				t.again++
			}
		case i >= len(loans):
			s.endLoad(l, false, false)
		case done[i]:
			n := min(loans[i].Pages, l.pages)
			t.got += n
			s.peers.chunks.Add(1)
			s.endLoad(l, true, n < l.pages)
		default:
			s.peers.void.Add(1)
			t.void = append(t.void, loans[i].Handle)
			s.endLoad(l, false, false)
		}
	}
}

// match picks the loans of a batch's loads, in their order. loans are those of a run's chunks, from
// the first on. matched uses the memory of loans. others are the handles of the loans not picked.
func match(batch []*load, loans []engine.Loan) (matched []engine.Loan, others []uint64) {
	at := 0
	for i, l := range batch {
		for ; at < min(l.chunk, len(loans)); at++ {
			others = append(others, loans[at].Handle)
		}
		if at == len(loans) {
			return loans[:i], others
		}
		if at > i {
			loans[i] = loans[at]
		}
		at++
	}
	for _, l := range loans[at:] {
		others = append(others, l.Handle)
	}
	return loans[:len(batch)], others
}

// retry sends a request back to the phase seeking, for what peers did not lend. s.mu is held.
func (s *Stack) retry(r *request) {
	v := &r.seen
	ppc := v.rest.Space.Geometry.PagesPerChunk
	n, _ := s.engine.SettleLookup(r.owner, r.lookup, r.asked)
	end := r.base() + n
	start := end / ppc * ppc
	if start < v.rest.First || end >= r.end() {
		s.settle(r)
		return
	}
	v.rest = tail(v.rest, (start-v.rest.First)/ppc)
	v.hit, v.part = end-r.first, end-start
	v.peers, r.state.loads = false, nil
	s.advance(r, seeking)
	s.setQuiet(r, false)
	s.peers.retried.Add(1)
	s.atPeers.push(r)
	s.borrowable.Signal()
}

// PeerGone drops all that is leased from a peer: no lookup finds pages of it from now on. Each loan
// is returned when its last lease ends.
func (s *Stack) PeerGone(peer uint64) {
	s.mu.Lock()
	for b := range s.borrowings {
		b.gone = append(b.gone, peer)
	}
	s.unlockAndWake()
	s.engine.DropPeer(peer)
}

// returner returns loans whose last lease has ended, and drops those that have been unused for
// Config.Linger.
func (s *Stack) returner() {
	tick := time.NewTicker(max(s.cfg.Linger/2, time.Millisecond))
	defer tick.Stop()
	var list []engine.Return
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-s.cfg.Bell.returns:
		case <-tick.C:
			s.engine.SweepForeign()
		}
		list = s.returnAll(list)
	}
}

// returnAll returns the loans that the engine wants returned. It returns list, to use again.
func (s *Stack) returnAll(list []engine.Return) []engine.Return {
	list = s.engine.TakeReturns(list[:0])
	var good, bad []uint64
	for _, r := range list {
		if r.Bad {
			bad = append(bad, r.Handle)
		} else {
			good = append(good, r.Handle)
		}
	}
	s.giveBack(bad, true)
	s.giveBack(good, false)
	return list
}

// giveBack counts loans and returns them to their peers.
func (s *Stack) giveBack(handles []uint64, bad bool) {
	if len(handles) == 0 {
		return
	}
	s.peers.returned.Add(uint64(len(handles)))
	if bad {
		s.peers.bad.Add(uint64(len(handles)))
	}
	s.cfg.Peers.Return(handles, bad)
}

// peerCounters count since the start; see PeerStats.
type peerCounters struct {
	lookups, borrows, failed, short, chunks, pages, joined, late, void, retried, returned,
	bad atomic.Uint64
}

// count counts one borrowing.
func (c *peerCounters) count(t *tally) {
	c.borrows.Add(1)
	c.pages.Add(uint64(t.got))
	switch {
	case t.got == 0:
		c.failed.Add(1)
	case t.got < t.pages:
		c.short.Add(1)
	}
}

// PeerStats describes the borrowing from peers. The counters are totals since the start.
type PeerStats struct {
	Lookups  uint64 // lookups all of whose rest was at peers
	Borrows  uint64 // calls of Peers.Borrow
	Failed   uint64 // borrows that leased nothing
	Short    uint64 // borrows that leased less than was requested
	Chunks   uint64 // chunks leased
	Pages    uint64 // pages leased
	Joined   uint64 // chunks that were being leased for another lookup already
	Late     uint64 // chunks leased for lookups that had ended meanwhile
	Void     uint64 // loans that were void before they were used, as their peer had gone
	Retried  uint64 // lookups that continued with tiers after peers had failed
	Returned uint64 // loans returned
	Bad      uint64 // loans returned because their bytes did not match their checksum

	Copied      uint64 // chunks copied into the arena
	CopiedPages uint64
	// NotCopied counts copies that failed: there was no room, the bytes could not be read, or the
	// peer had gone.
	NotCopied uint64

	// Slots is the slots for loans; Used, those that have a loan or wait for one; Leased, those in
	// use; Held, the pages that lookups can find in them.
	Slots, Used, Leased, Held int
}

// PeerStats may be called at any time.
func (s *Stack) PeerStats() PeerStats {
	c, e := &s.peers, s.engine.Stats()
	return PeerStats{
		Lookups: c.lookups.Load(), Borrows: c.borrows.Load(), Failed: c.failed.Load(),
		Short: c.short.Load(), Chunks: c.chunks.Load(), Pages: c.pages.Load(),
		Joined: c.joined.Load(),
		Copied: e.CopiedChunks, CopiedPages: e.CopiedPages, NotCopied: e.CopiesFailed,
		Late: c.late.Load(), Void: c.void.Load(), Retried: c.retried.Load(),
		Returned: c.returned.Load(), Bad: c.bad.Load(),
		Slots: e.ForeignSlots, Used: e.ForeignUsed, Leased: e.ForeignLeased, Held: e.ForeignPages,
	}
}
