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
	// Contains sets held[i] to how many pages of the run's i-th chunk, from its first, some peer is
	// said to hold; those behind the first that is not held whole count only if held whole. It
	// takes microseconds, and never waits for anybody. len(held) == run.Chunks(). pages are said to
	// be held from the first on without a gap; by is the number, for Ask, of a peer that is said to
	// hold all of these, -1: there is none.
	Contains(run tiers.Run, held []uint16) (pages, by int)
	// Borrow leases what peers hold of a run, from its first page on without a gap, and tells out
	// of each chunk, in order, on the caller's goroutine, before it returns. Regions are those that
	// were announced to our workers. A chunk with fewer pages than the run has of it is the last.
	// It answers the pages leased, and an error only when that is none. It waits until ctx is done,
	// and a bounded time, at most.
	Borrow(ctx context.Context, run tiers.Run, out func(chunk int, l engine.Loan)) (pages int,
		err error)
	// Ask begins to lease a run, the pages that Contains has just answered, of the peer by whose
	// number, and calls done once, on another goroutine, with what has been leased, as by Borrow:
	// loans is valid until done returns, none is an answer, too, and it comes within a bounded
	// time. done does not wait. The digests of run are read before it returns. Ask answers false,
	// and never calls done, where it is for Borrow to see who has what. It does not wait.
	Ask(run tiers.Run, peer int, done func(loans []engine.Loan)) bool
	// Return gives loans back: nobody reads them any more. With bad, their bytes did not check out.
	// It does not wait, and keeps nothing of handles.
	Return(handles []uint64, bad bool)
	// Memory is that of a region that loans are in, to read, for its whole length, as long as a
	// loan in it is out. nil: it cannot be had. It may fault (dax.Guard).
	Memory(region uint32) []byte
}

const (
	// peerWorkers is how many calls of Peers.Borrow there are at a time.
	peerWorkers = 8
	// finishSlice is how many loans are given to the engine before others may have mu.
	finishSlice = 64
	// callTime is what a peer that does not answer at once may take to.
	callTime = 100 * time.Millisecond
	// maxAtOnce is how many chunks a request may have that is prepared by its asker, if there is
	// nothing to wait for: that takes less than waking a peerWorker.
	maxAtOnce = 512
)

// borrowing is a call of Peers.Borrow or Peers.Ask. Guarded by Stack.mu.
type borrowing struct {
	gone []uint64 // peers that have gone since it began: what they lent it is void

	// Of Ask. It is used again, if nobody else can know of what is in it.
	r      *request // nil: nobody wants what is lent any more
	direct bool     // of Peers.Ask, which has begun: what follows is its
	// what is below is as it will be: whoever sees both this and came first goes on
	prepared bool
	came     bool          // done was called
	loans    []engine.Loan // with these, if before prepared
	done     func(loans []engine.Loan)
	batch    []*load
	loads    []load // granted to the request: those of batch, and maybe others
	digests  []byte // of the request
}

// borrowed says which chunks that a request wants, from one on, are to be borrowed. nil: none.
func (r *request) borrowed(from int) []bool {
	if len(r.lent) == 0 {
		return nil
	}
	return r.borrow[from:r.chunks]
}

// askPeers gives a request all of whose rest is at peers to a peerWorker. It waits for no room in
// the arena. mu is held.
func (s *Stack) askPeers(r *request) {
	r.queued = time.Now()
	s.setQuiet(r, true)
	s.atPeers.push(r)
	s.borrowable.Signal()
}

// setQuiet notes that a request's asker is not told that it is pending, or that this has an end. mu
// is held.
func (s *Stack) setQuiet(r *request, quiet bool) {
	if r.quiet == quiet {
		return
	}
	if r.quiet = quiet; quiet {
		if s.quiet++; s.quiet == 1 {
			s.due = true // the dispatcher tells it in the end
		}
	} else {
		s.quiet--
	}
}

// promiseQuiet tells the askers that were told nothing that their lookups are pending, where that
// has come to take long. It answers when to look again. mu is held.
func (s *Stack) promiseQuiet(now time.Time) time.Duration {
	next := slowSeek
	for _, r := range s.pending {
		if !r.quiet || r.inline {
			continue
		}
		if left := slowSeek - now.Sub(r.queued); left > 0 {
			next = min(next, left)
			continue
		}
		s.setQuiet(r, false)
		s.promise(r, r.pages, callTime)
	}
	return next
}

// sendBorrow queues a load for a peerWorker, and says whether one is to be woken for it: of
// consecutive chunks for the first. mu is held.
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

// before says whether another load is of the next chunk for the same request.
func (l *load) before(next *load) bool {
	return next.chunk == l.chunk+1 && &next.transfer.Hashes[0] == &l.transfer.Hashes[0]
}

// peerWorker borrows, and prepares requests all of whose rest is at peers.
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
				s.borrowable.Signal() // some in between may have been given up
			}
			b := &borrowing{}
			s.borrowings[b] = struct{}{}
			s.unlockAndWake()
			loans = s.borrow(b, batch, loans[:0])
			clear(batch)
		case r.phase == seeking:
			s.atPeers.pop()
			s.unlockAndWake()
			s.readHints(r)
			next := s.askLocal(r)
			s.mu.Lock()
			s.proceed(r, next)
			s.unlockAndWake()
		default:
			s.atPeers.pop()
			r.phase = preparing
			s.unlockAndWake()
			s.peers.lookups.Add(1)
			s.prepare(r, true)
		}
	}
}

// runOf is the run of consecutive chunks.
func runOf(batch []*load) tiers.Run {
	run := tail(batch[0].transfer.Run, batch[0].chunk)
	pages := 0
	for _, l := range batch {
		pages += l.pages
	}
	run.Hashes = run.Hashes[:pages*run.Space.Geometry.DigestBytes]
	return run
}

// borrow borrows consecutive chunks.
func (s *Stack) borrow(b *borrowing, batch []*load, loans []engine.Loan) []engine.Loan {
	ctx, cancel := context.WithTimeoutCause(s.ctx, s.cfg.BorrowTimeout, errLate)
	_, _ = s.cfg.Peers.Borrow(ctx, runOf(batch), func(_ int, l engine.Loan) {
		loans = append(loans,
			l)
	})
	cancel()
	s.finishBorrow(b, batch, loans, false)
	return loans
}

// newBorrowing is one for Ask.
func (s *Stack) newBorrowing() *borrowing {
	b := s.spareAsk.Swap(nil)
	if b == nil {
		b = &borrowing{}
		b.done = func(loans []engine.Loan) { s.directDone(b, loans) }
	}
	b.direct, b.prepared, b.came, b.batch, b.loads = false, false, false, b.batch[:0], b.loads[:0]
	return b
}

// askFirst asks a peer for the first pages of a request's run, all that can be had, before the rest
// is done about it, as the peer answers meanwhile; -1: there is none that has them. Then r.ask is
// not nil, and s.prepareMu is held. Where others wait for the same chunks already nobody is asked.
func (s *Stack) askFirst(r *request, pages, peer int) {
	run := r.run
	d := run.Space.Geometry.DigestBytes
	run.Hashes = run.Hashes[:pages*d]
	if peer < 0 || run.Chunks() > maxAtOnce {
		return
	}
	first := pagesOf(pages, run.Space.Geometry.PagesPerChunk, 0) * d
	if s.engine.Awaited(r.id, run.Hashes[first-d:first]) || !s.prepareMu.TryLock() {
		return
	}
	b := s.newBorrowing()
	b.direct = true
	s.mu.Lock()
	full := s.full(int64(len(r.run.Hashes) + len(r.run.Prev)))
	s.borrowings[b] = struct{}{} // a peer may go as soon as it has lent
	s.mu.Unlock()
	if !full && s.cfg.Peers.Ask(run, peer, b.done) {
		r.ask = b
		return
	}
	s.mu.Lock()
	delete(s.borrowings, b)
	s.mu.Unlock()
	s.spareAsk.Store(b)
	s.prepareMu.Unlock()
}

// prepareAtOnce prepares a request of its caller's, all of whose rest is at peers, or on its way,
// while one of them is asked for it already (b.direct), or a peerWorker is to see who has it.
// s.prepareMu is held, and let go of. Without begun there is none. settled: the request has ended,
// with so many pages, and nobody else is told.
func (s *Stack) prepareAtOnce(r *request, b *borrowing, begun bool) (pages int, settled bool) {
	if r.ask = nil; begun {
		s.peers.lookups.Add(1)
		s.prepareHeld(r, false, b)
		b.r = r
	}
	s.prepareMu.Unlock()
	s.mu.Lock()
	b.prepared = true
	if !b.direct {
		for _, l := range b.batch {
			s.borrowAgain(l)
		}
	}
	if r.settled, r.inline = -1, begun && b.came && r.phase == loading && r.quiet; b.came {
		s.mu.Unlock()
		s.finishBorrow(b, b.batch, b.loans, true)
		s.mu.Lock()
		r.inline = false // it goes on with tiers, or others
	}
	pages = r.settled
	s.unlockAndWake() // only now, so that the dispatcher is in nobody's way
	return pages, pages >= 0
}

// directDone is told what an Ask has brought.
func (s *Stack) directDone(b *borrowing, loans []engine.Loan) {
	s.mu.Lock()
	if b.came = true; !b.prepared {
		b.loans = append(b.loans[:0], loans...)
		s.mu.Unlock()
		return
	}
	s.mu.Unlock()
	s.finishBorrow(b, b.batch, loans, true)
	s.deliver()
}

// joins is where a request's last joined load was found.
type joins struct {
	batch []*load
	next  int
}

// joined is the load of a promotion; nil: it has ended by now. What a peer was asked for is in no
// table, as its entries took longer than all else about it; who joins one chunk of it mostly joins
// those behind it, too. mu is held.
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

// borrowAgain has a peerWorker borrow what could not be had as it was asked for, if somebody still
// wants it. mu is held.
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

// finishBorrow is told what was leased of consecutive chunks, in order. With again it is what Ask
// has brought, for all chunks of a request's run, and what was not leased is borrowed from others.
func (s *Stack) finishBorrow(b *borrowing, batch []*load, loans []engine.Loan, again bool) {
	c := &s.peers
	var void []uint64
	var promotions [finishSlice]uint64
	var done [finishSlice]bool
	pages, got, left := 0, 0, 0
	if again { // some chunks may be held, or not wanted any more
		loans, void = match(batch, loans)
	}
	for at := 0; at < len(batch); at += finishSlice {
		list := batch[at:min(at+finishSlice, len(batch))]
		mine := loans[min(at, len(loans)):min(at+len(list), len(loans))]
		s.mu.Lock()
		for i, l := range list[:len(mine)] {
			if promotions[i] = l.promotion; slices.Contains(b.gone, mine[i].Peer) {
				promotions[i] = 0 // of none
			}
			if len(l.waiters) == 0 {
				c.late.Add(1)
			}
		}
		s.engine.FinishBorrows(promotions[:len(mine)], mine, done[:])
		for i, l := range list {
			pages += l.pages
			switch {
			case i >= len(mine) && again:
				left += btoi(s.borrowAgain(l))
			case i >= len(mine):
				s.endLoad(l, false, false)
			case done[i]:
				n := min(mine[i].Pages, l.pages)
				got += n
				c.chunks.Add(1)
				s.endLoad(l, true, n < l.pages)
			default:
				c.void.Add(1)
				void = append(void, mine[i].Handle)
				s.endLoad(l, false, false)
			}
		}
		if at+len(list) == len(batch) { // before anybody is answered
			c.borrows.Add(1)
			c.pages.Add(uint64(got))
			switch {
			case got == 0:
				c.failed.Add(1)
			case got < pages:
				c.short.Add(1)
			}
		}
		if again {
			s.mu.Unlock() // its caller delivers
		} else {
			s.unlockAndWake()
		}
	}
	for i := len(batch); i < len(loans); i++ { // more than was asked for
		void = append(void, loans[i].Handle)
	}
	n := len(batch)
	s.mu.Lock()
	delete(s.borrowings, b)
	if again && left == 0 && n == len(b.loads) && (b.r == nil || b.r.phase == ended) && !s.closed {
		b.gone, b.r = b.gone[:0], nil
		s.spareAsk.Store(b)
	}
	s.mu.Unlock()
	s.giveBack(void, false)
}

// match leaves in loans, which are those of a run's chunks from the first on, the ones of the loads
// in a batch, in their order, and answers the handles of the others.
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

// retry has a request go on with tiers for what peers have not lent. mu is held.
func (s *Stack) retry(r *request) {
	ppc := r.run.Space.Geometry.PagesPerChunk
	n, _ := s.engine.SettleLookup(r.owner, r.lookup, r.asked)
	end := r.base() + n
	start := end / ppc * ppc
	if start < r.run.First || end >= r.first+r.asked {
		s.settle(r)
		return
	}
	r.run = tail(r.run, (start-r.run.First)/ppc)
	r.hit, r.part = end-r.first, end-start
	r.peers, r.loads, r.phase = false, nil, seeking
	s.setQuiet(r, false)
	s.peers.retried.Add(1)
	s.atPeers.push(r)
	s.borrowable.Signal()
}

// PeerGone drops all that is leased from a peer: from now on nobody is given pages of it. It is
// returned when nobody uses it.
func (s *Stack) PeerGone(peer uint64) {
	s.mu.Lock()
	for b := range s.borrowings {
		b.gone = append(b.gone, peer)
	}
	s.unlockAndWake()
	s.engine.DropPeer(peer)
}

// returner returns what nobody uses any more, and drops what nobody has used for a while.
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

// returnAll returns what the engine has to return.
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

// PeerStats is what goes on with peers.
type PeerStats struct {
	Lookups  uint64 // all of whose rest was at peers
	Borrows  uint64 // calls of Peers.Borrow
	Failed   uint64 // of those, that leased nothing
	Short    uint64 // of those, that leased less than was asked for
	Chunks   uint64 // leased
	Pages    uint64
	Joined   uint64 // chunks that were being leased for another lookup already
	Late     uint64 // chunks leased for lookups that had ended meanwhile
	Void     uint64 // loans that were void before they were used, as their peer had gone
	Retried  uint64 // lookups that went on with tiers after peers had failed
	Returned uint64 // loans
	Bad      uint64 // of those, for bytes that did not check out

	Copied      uint64 // chunks copied into the arena
	CopiedPages uint64
	// times that a chunk was to be, and there was no room, its bytes could not be read, or its peer
	// had gone
	NotCopied uint64

	// slots for loans, those with one or on their way, those in use, and pages that can be found in
	// them
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
