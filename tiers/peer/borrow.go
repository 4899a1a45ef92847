package peer

import (
	"cmp"
	"context"
	"fmt"
	"math/bits"
	"slices"
	"sync"
	"time"

	"lookaside/ipc"
	"lookaside/ipc/wire"
	"lookaside/tiers"
	"lookaside/tiers/engine"
)

// Loan is what a lender lets us read of one chunk, from its first page on, until Return. Peer is
// the lender's generation, Region the lender's id of the region.
type Loan = engine.Loan

// plan says which lenders are said to hold which chunks of a run.
type plan struct {
	who []uint64 // by chunk: bits of lenders said to hold all pages of it that the run has
	// bits of lenders said to hold partPages of chunk partChunk
	part uint64
	// the first chunk that no lender holds whole (len(who): none), and how many of its pages some
	// hold
	partChunk, partPages int
}

var plans = sync.Pool{New: func() any { return new(plan) }}

// hinted reads the hints for a run. total is the number of pages held without a gap from the first
// on; all has the bits of the peers said to hold each of them. If held is not nil, held[i] is set
// to the pages of the i-th chunk that some peer is said to hold. If s is not nil, it is filled with
// who holds what.
func (p *Peers) hinted(run *tiers.Run, s *plan, held []uint16) (total int, all uint64) {
	g := &run.Space.Geometry
	d, ppc := g.DigestBytes, g.PagesPerChunk
	pages, chunks := run.Pages(), run.Chunks()
	if s != nil {
		if cap(s.who) < chunks {
			s.who = make([]uint64, chunks)
		}
		s.who, s.part, s.partChunk, s.partPages = s.who[:chunks], 0, chunks, 0
		clear(s.who)
	}
	fp := &run.Space.Fingerprint
	t := p.hints
	t.mu.RLock()
	defer t.mu.RUnlock()
	mask := t.mask & t.asked[*fp]
	if mask == 0 {
		clear(held)
		return 0, 0
	}
	whole := true // up to here
	all = mask
	var keys, who [groupHints]uint64
	for at := 0; at < chunks; at += groupHints {
		n := min(groupHints, chunks-at)
		for i := range n {
			last := min((at+i+1)*ppc, pages) - 1
			keys[i] = hintKey(fp, run.Hashes[last*d:(last+1)*d])
		}
		t.lookUp(keys[:n], mask, who[:n])
		for i, w := range who[:n] {
			from, to := (at+i)*ppc, min((at+i+1)*ppc, pages)
			count := 0
			switch {
			case w != 0:
				if count = to - from; whole {
					total, all = to, all&w
				}
			case whole:
				whole = false
				var part uint64
				if part, count = t.part(run, from, to-1, mask); s != nil {
					s.part, s.partChunk, s.partPages = part, at+i, count
				}
				if count > 0 {
					total, all = total+count, all&part
				}
			}
			if s != nil {
				s.who[at+i] = w
			}
			if held != nil {
				held[at+i] = uint16(count)
			}
		}
	}
	return total, all
}

// part finds by bisection how many pages from index from on are held, and who holds them. Page to
// is known not to be held. The caller holds t.mu.
func (t *hintTable) part(run *tiers.Run, from, to int, mask uint64) (who uint64, pages int) {
	d := run.Space.Geometry.DigestBytes
	for lo, hi := from, to; lo < hi; {
		mid := (lo + hi) / 2
		var at [1]uint64
		t.lookUp([]uint64{hintKey(&run.Space.Fingerprint, run.Hashes[mid*d:(mid+1)*d])}, mask,
			at[:])
		if at[0] != 0 {
			who, pages = at[0], mid+1-from
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return who, pages
}

// Contains sets held[i] to the number of pages of the run's i-th chunk, from its first, that some
// peer is said to hold. Behind the first chunk that is not held whole, only whole chunks count.
// len(held) == run.Chunks().
//
// pages is the number of pages held without a gap from the first on. by is the number, for Ask, of
// a peer said to hold all of these, or -1. Contains reads hints only: it sends nothing, takes
// microseconds, and may be wrong.
func (p *Peers) Contains(run tiers.Run, held []uint16) (pages, by int) {
	pages, who := p.hinted(&run, nil, held)
	if pages == 0 || who == 0 {
		return pages, -1
	}
	return pages, bits.TrailingZeros64(who)
}

// Borrow leases the pages of a run that the hints say peers hold, from its first page on without a
// gap. It asks the peer that holds most, then others for what follows. It calls out for each leased
// chunk, in order, on the caller's goroutine, before it returns. It returns the number of leased
// pages; an error only if that is 0 and a peer has failed. Each loan must be returned, even after
// OnGone.
//
// Borrow waits until ctx is done at most. It waits Config.CallPatience for each lender that sends
// nothing, and longer only for a restarted lender that is checking the pages.
func (p *Peers) Borrow(ctx context.Context, run tiers.Run, out func(chunk int, l Loan)) (pages int,
	err error) {
	p.borrows.Add(1)
	pages, err = p.asking(ctx, &run, out)
	p.borrowedPages.Add(uint64(pages))
	if err != nil {
		p.failedBorrows.Add(1)
	}
	return pages, err
}

// Ask requests a lease on run, as just returned by Contains, from the given peer and does not wait.
// If it returns true, done is called exactly once, on another goroutine, with the loans granted,
// possibly none. The loans are valid until done returns, and done must not block. If it returns
// false, done is never called: one message is not enough for the run, or the peer cannot be asked
// now. Ask keeps no reference to the run's digests.
func (p *Peers) Ask(run tiers.Run, peer int, done func(loans []Loan)) bool {
	p.mu.Lock()
	b := p.byBit[peer]
	p.mu.Unlock()
	if b == nil || run.Pages() == 0 || run.Pages() > b.pagesAtMost(run.Space.Geometry.DigestBytes) {
		return false
	}
	c := asks.Get().(*call)
	c.b, c.done, c.run = b, done, run
	ends := packets.Get().(*[]byte) // digests of the chunks' last pages
	defer packets.Put(ends)
	*ends = (*ends)[:0]
	g, n := &run.Space.Geometry, run.Pages()
	for i := range run.Chunks() {
		last := min((i+1)*g.PagesPerChunk, n) * g.DigestBytes
		*ends = append(*ends, run.Hashes[last-g.DigestBytes:last]...)
	}
	if b.send(c, &wire.PeerLease{Fingerprint: run.Space.Fingerprint[:],
		FirstPage: uint32(run.First), Pages: uint32(n), Hashes: *ends}) != nil {
		c.end()
		return false
	}
	p.borrows.Add(1)
	return true
}

// Touch returns how many pages of a run peers hold, from its first on without a gap, and marks them
// as used there. It asks the peers that the hints name. It leases nothing.
func (p *Peers) Touch(ctx context.Context, run tiers.Run) (pages int) {
	p.touches.Add(1)
	pages, _ = p.asking(ctx, &run, nil)
	return pages
}

// asking implements Borrow, and with a nil out Touch.
func (p *Peers) asking(ctx context.Context, run *tiers.Run, out func(chunk int, l Loan)) (pages int,
	err error) {
	if run.Pages() == 0 {
		return 0, nil
	}
	s := plans.Get().(*plan)
	defer plans.Put(s)
	p.hinted(run, s, nil)
	ppc := run.Space.Geometry.PagesPerChunk
	var failed uint64 // bits of peers that failed
	var failure error
	var wait checkWait
	defer wait.end(p)
	for at := 0; at < len(s.who) && at <= s.partChunk; {
		bit, chunks, part := s.best(at, failed)
		if bit < 0 {
			break
		}
		ask := chunks * ppc
		if part {
			ask += s.partPages
		}
		ask = min(ask, run.Pages()-at*ppc)
		p.mu.Lock()
		b := p.byBit[bit]
		p.mu.Unlock()
		if b == nil {
			failed |= 1 << bit
			continue
		}
		a := asked{run: run, at: at, pages: ask, out: out, others: func(chunk int) bool {
			return chunk < s.partChunk && s.who[chunk]&^failed&^(1<<bit) != 0
		}}
		got, err := b.ask(ctx, &a)
		if err != nil {
			failed |= 1 << bit
			failure = err
			if ctx.Err() != nil {
				break
			}
			continue
		}
		ask = a.pages
		pages = at*ppc + got
		if got >= ask || got%ppc != 0 {
			at += (got + ppc - 1) / ppc
			if got%ppc != 0 {
				break // nobody holds the rest of the chunk
			}
			continue
		}
		// The peer lacks a page that the hints promised, or cannot lease it now: ask others for
		// that chunk.
		at += got / ppc
		if a.soon && !a.others(at) && wait.more(ctx, p) {
			continue // ask the same peer again
		}
		if !a.more {
			p.wrongHints.Add(1)
			last := min((at+1)*ppc, run.Pages())
			if at == s.partChunk {
				last = at*ppc + s.partPages
			}
			d := run.Space.Geometry.DigestBytes
			p.hints.forget(hintKey(&run.Space.Fingerprint, run.Hashes[(last-1)*d:last*d]), bit)
		}
		s.who[at] &^= 1 << bit
		if at == s.partChunk {
			s.part &^= 1 << bit
		}
	}
	if pages > 0 {
		return pages, nil
	}
	return 0, failure
}

// maxWaiting bounds the calls of Borrow that wait at a time for lenders to check pages. It keeps
// other lookups from waiting behind them.
const maxWaiting = 4

// checkWait is one such wait. Its pauses grow.
type checkWait struct {
	timer *time.Timer
	pause time.Duration
}

// more pauses and reports whether to ask again.
func (w *checkWait) more(ctx context.Context, p *Peers) bool {
	switch {
	case w.timer != nil:
		w.pause = min(2*w.pause, 32*time.Millisecond)
		w.timer.Reset(w.pause)
	case p.waiting.Add(1) > maxWaiting:
		p.waiting.Add(-1)
		return false
	default:
		w.pause = time.Millisecond
		w.timer = time.NewTimer(w.pause)
	}
	select {
	case <-w.timer.C:
		return true
	case <-ctx.Done():
		return false
	case <-p.ctx.Done():
		return false
	}
}

// end ends the waiting.
func (w *checkWait) end(p *Peers) {
	if w.timer != nil {
		w.timer.Stop()
		p.waiting.Add(-1)
	}
}

// best returns the peer said to hold most from chunk at on: the number of whole chunks, and whether
// it also holds the part of the next chunk that s.part is about. bit is -1 if nobody holds
// anything.
func (s *plan) best(at int, without uint64) (bit, chunks int, part bool) {
	if at == s.partChunk {
		if who := s.part &^ without; who != 0 {
			return bits.TrailingZeros64(who), 0, true
		}
		return -1, 0, false
	}
	who := s.who[at] &^ without
	if who == 0 {
		return -1, 0, false
	}
	n := 1
	for at+n < s.partChunk && who&s.who[at+n] != 0 {
		who &= s.who[at+n]
		n++
	}
	if at+n == s.partChunk && who&s.part != 0 {
		who &= s.part
		part = true
	}
	return bits.TrailingZeros64(who), n, part
}

// asked is a request to a lender: pages of a run from chunk at on.
type asked struct {
	run       *tiers.Run
	at, pages int
	out       func(chunk int, l Loan) // nil: nothing is leased
	others    func(chunk int) bool    // reports whether others are said to hold all of a chunk
	more      bool                    // result: it holds more, but cannot lease it now
	soon      bool                    // result: it is checking that now
}

// ask sends a request to the lender and returns how many pages it leased.
func (b *borrower) ask(ctx context.Context, a *asked) (pages int, err error) {
	g := &a.run.Space.Geometry
	a.pages = min(a.pages, b.pagesAtMost(g.DigestBytes)/g.PagesPerChunk*g.PagesPerChunk)
	if a.pages <= 0 {
		return 0, fmt.Errorf("%w: it takes no leases on chunks of %d pages", ipc.ErrOversize,
			g.PagesPerChunk)
	}
	from := a.at * g.PagesPerChunk
	c, err := b.call(ctx, &wire.PeerLease{
		Fingerprint: a.run.Space.Fingerprint[:], FirstPage: uint32(a.run.First + from),
		Touch:  a.out == nil,
		Hashes: a.run.Hashes[from*g.DigestBytes : (from+a.pages)*g.DigestBytes],
	})
	if err != nil {
		return 0, err
	}
	defer calls.Put(c)
	a.more, a.soon = c.grant.More, c.grant.Soon && a.out != nil
	if a.out == nil {
		return min(int(c.grant.Pages), a.pages), nil
	}
	if c.loans, pages, err = b.accept(a, &c.grant, c.loans[:0]); err != nil {
		return 0, err
	}
	for i := range c.loans {
		a.out(a.at+i, c.loans[i])
	}
	return pages, nil
}

func (b *borrower) pagesAtMost(digestBytes int) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return min(b.maxPages, wire.MaxLeasePages(digestBytes))
}

// accept checks a grant and appends loans to out for the part of it that can be read.
func (b *borrower) accept(a *asked, m *wire.PeerGrant, out []Loan) (loans []Loan, pages int,
	err error) {
	if m.Load == 0 {
		return out, 0, nil
	}
	g := &a.run.Space.Geometry
	first := a.run.First + a.at*g.PagesPerChunk
	usable := 0
	b.mu.Lock()
	cut := b.ended
	a.more = a.more || cut
	var r *peerRegion
	for i := range m.Extents {
		e := &m.Extents[i]
		if r == nil || r.ID != e.Region {
			r = b.regions[e.Region]
		}
		whole := int(e.Pages) == g.PagesPerChunk || first+pages+int(e.Pages) == first+a.pages
		switch {
		case cut:
		case int(e.Page) != first+i*g.PagesPerChunk || int(e.Pages) > g.PagesPerChunk ||
			i*g.PagesPerChunk+int(e.Pages) > a.pages || !whole && i < len(m.Extents)-1:
			err = malformed("extent %d of a grant has pages %d to %d", i, e.Page, e.Page+e.Pages-1)
		// the region is being announced or removed, or another peer has more of the chunk
		case r == nil || !r.ready || !whole && a.others != nil && a.others(a.at+i):
			cut, a.more = true, true
		case e.Offset > uint64(r.SizeBytes) ||
			uint64(r.SizeBytes)-e.Offset < uint64(e.Pages)*uint64(g.PageBytes):
			err = malformed("extent %d of a grant lies at %d of a region of %d bytes", i, e.Offset,
				r.SizeBytes)
		default:
			usable++
			pages += int(e.Pages)
		}
		if err != nil {
			break
		}
	}
	if err != nil {
		b.broken = err
		b.mu.Unlock()
		// wakes the receiver, which stops; loans can still be returned
		_ = b.conn.SetRecvDeadline(time.Unix(1, 0))
		return out, 0, err
	}
	b.out += usable
	b.borrowed += uint64(pages)
	for i := usable; i < len(m.Extents); i++ {
		b.returns = append(b.returns, loanReturn{m.Load, uint32(i), false})
	}
	b.mu.Unlock()
	if usable < len(m.Extents) {
		b.p.wake()
	}
	n := len(out)
	for i := range usable {
		e := &m.Extents[i]
		out = append(out, Loan{Peer: b.gen, Region: e.Region, Offset: e.Offset,
			Pages: int(e.Pages)})
	}
	b.p.loans.add(b, m.Load, out[n:])
	return out, pages, nil
}

var calls = sync.Pool{New: func() any {
	c := &call{answered: make(chan struct{}, 1), timer: time.NewTimer(time.Hour)}
	c.timer.Stop()
	return c
}}

// asks is the pool of calls whose caller does not wait: done is called.
var asks = sync.Pool{New: func() any {
	c := &call{}
	c.timer = time.AfterFunc(time.Hour, func() { c.late() })
	c.timer.Stop()
	return c
}}

// late abandons a call whose time is over. If its grant still comes, the receiver returns it.
func (c *call) late() {
	c.b.mu.Lock()
	ours := c.b.calls[c.id] == c && !c.abandoned
	if ours {
		c.abandoned = true
		c.b.noAnswer()
	}
	c.b.mu.Unlock()
	if ours { // the call is never used again
		c.b.p.failedBorrows.Add(1)
		c.done(nil)
	}
}

// answeredTo calls done with the loans of a grant, or with none if err is not nil.
func (c *call) answeredTo(err error) {
	b := c.b
	pages := 0
	c.loans = c.loans[:0]
	if err == nil {
		c.loans, pages, err = b.accept(&asked{run: &c.run, pages: c.run.Pages()}, &c.grant, c.loans)
	}
	b.p.borrowedPages.Add(uint64(pages))
	if err != nil {
		b.p.failedBorrows.Add(1)
	}
	c.done(c.loans)
	c.end()
}

// end puts a call back into asks, unless late may be using it.
func (c *call) end() {
	if c.timer.Stop() {
		c.b, c.done, c.run = nil, nil, tiers.Run{}
		asks.Put(c)
	}
}

// call sends a request and waits for its grant. Without an error the caller owns the call and puts
// it back into the pool.
func (b *borrower) call(ctx context.Context, m *wire.PeerLease) (*call, error) {
	if err := ctx.Err(); err != nil {
		return nil, context.Cause(ctx)
	}
	c := calls.Get().(*call)
	if err := b.send(c, m); err != nil {
		if len(c.answered) == 0 {
			calls.Put(c)
		}
		return nil, err
	}
	c.timer.Reset(b.p.cfg.CallPatience)
	defer c.timer.Stop()
	var err error
	select {
	case <-c.answered:
		if c.err != nil {
			err := c.err
			calls.Put(c)
			return nil, err
		}
		return c, nil
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-c.timer.C:
		err = ErrNoAnswer
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.calls[c.id] != c { // the grant has just come
		<-c.answered
		if c.err != nil {
			err := c.err
			calls.Put(c)
			return nil, err
		}
		return c, nil
	}
	c.abandoned = true
	b.noAnswer()
	return nil, err
}

// noAnswer stops borrowing from a lender that has kept its answer for too long. The caller holds
// b.mu.
func (b *borrower) noAnswer() {
	if time.Since(b.waitSince) > stalledAfter {
		b.stall(true)
	}
}

// send sends the request of a call. If it fails, the borrower does not hold the call.
func (b *borrower) send(c *call, m *wire.PeerLease) error {
	c.err, c.abandoned = nil, false
	waits := c.done == nil
	now := time.Now()
	b.mu.Lock()
	switch {
	case b.ended:
		b.mu.Unlock()
		return ipc.ErrPeerGone
	case !b.stalled && len(b.calls) > 0 && now.Sub(b.waitSince) > stalledAfter:
		b.stall(true)
		fallthrough
	case b.stalled:
		b.mu.Unlock()
		return ErrNoAnswer
	}
	if len(b.calls) == 0 {
		b.waitSince = now
	}
	b.nextCall++
	c.id = b.nextCall
	b.calls[c.id] = c
	m.ID = c.id
	if !waits {
		c.timer.Reset(b.p.cfg.CallPatience)
	}
	b.mu.Unlock()
	buf := packets.Get().(*[]byte)
	*buf = m.Append((*buf)[:0])
	sent, err := b.conn.TrySend(*buf)
	packets.Put(buf)
	if sent {
		return nil
	}
	b.mu.Lock()
	_, mine := b.calls[m.ID]
	delete(b.calls, m.ID)
	b.mu.Unlock()
	if !mine && !waits {
		return nil // fail has ended the call
	}
	if err == nil {
		err = ErrNoAnswer // the lender has not read for long
	}
	return err
}

var packets = sync.Pool{New: func() any { return new([]byte) }}

// stall excludes the lender from lookups, or includes it again. The caller holds b.mu.
func (b *borrower) stall(does bool) {
	b.stalled = does
	for _, bit := range []int{b.bit, b.filling} {
		if bit >= 0 {
			b.p.hints.answers(bit, !does)
		}
	}
}

// answer passes a grant to its call.
func (b *borrower) answer() error {
	m := &b.grant
	b.mu.Lock()
	defer b.mu.Unlock()
	c := b.calls[m.ID]
	if c == nil {
		return malformed("a grant that nobody asked for")
	}
	delete(b.calls, m.ID)
	b.waitSince = time.Now()
	if b.stalled {
		b.stall(false)
	}
	if c.abandoned {
		for i := range m.Extents {
			b.returns = append(b.returns, loanReturn{m.Load, uint32(i), false})
		}
		b.p.wake()
		return nil
	}
	c.grant, b.grant = b.grant, c.grant
	if c.done != nil {
		b.mu.Unlock()
		c.answeredTo(nil)
		b.mu.Lock()
		return nil
	}
	c.answered <- struct{}{}
	return nil
}

// Return ends loans: nobody reads them any more. If bad is set, their bytes were wrong, and the
// lender drops the chunks. Return does not wait. It skips handles that are not out.
func (p *Peers) Return(handles []uint64, bad bool) {
	wake := false
	for _, h := range handles {
		l, ok := p.loans.take(h)
		if !ok {
			continue
		}
		wake = true
		b := l.b
		b.mu.Lock()
		b.returns = append(b.returns, loanReturn{l.load, l.index, bad})
		if b.out--; b.out == 0 && b.ended {
			b.ring()
		}
		b.mu.Unlock()
	}
	if wake {
		p.wake()
	}
}

// flush sends the returns. It returns false if some are left because the lender does not read.
func (b *borrower) flush() bool {
	b.mu.Lock()
	returns := b.returns
	b.returns = nil
	b.mu.Unlock()
	if len(returns) == 0 {
		return true
	}
	slices.SortFunc(returns, func(x, y loanReturn) int {
		if x.bad != y.bad {
			if x.bad {
				return -1 // before the load can end
			}
			return 1
		}
		return cmp.Or(cmp.Compare(x.load, y.load), cmp.Compare(x.index, y.index))
	})
	m := wire.PeerRelease{}
	buf := packets.Get().(*[]byte)
	defer packets.Put(buf)
	for i := 0; i < len(returns); {
		r := returns[i]
		m.Load, m.Bad, m.Extents = r.load, r.bad, m.Extents[:0]
		k := i
		for ; k < len(returns) && returns[k].load == r.load && returns[k].bad == r.bad; k++ {
			m.Extents = append(m.Extents, returns[k].index)
		}
		*buf = m.Append((*buf)[:0])
		sent, err := b.conn.TrySend(*buf)
		if err != nil {
			return true // the lender is dead or has given us up: nothing to return
		}
		if !sent {
			b.mu.Lock()
			b.returns = append(b.returns, returns[i:]...)
			b.mu.Unlock()
			return false
		}
		i = k
	}
	return true
}

// bye tells the lender that all loans are returned and that this connection ends.
func (b *borrower) bye() {
	if !b.said.Load() {
		return
	}
	_, _ = b.conn.TrySend((&wire.PeerRelease{}).Append(nil))
}

// loanTable holds the loans that are out.
type loanTable struct {
	mu      sync.Mutex // guards what follows
	entries []loanEntry
	spare   []uint32
}

type loanEntry struct {
	b     *borrower // nil: not in use
	load  uint64
	index uint32
	gen   uint32
}

// add assigns handles to the loans of a grant, from its first extent on.
func (t *loanTable) add(b *borrower, load uint64, loans []Loan) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for index := range loans {
		var i uint32
		if n := len(t.spare); n > 0 {
			i = t.spare[n-1]
			t.spare = t.spare[:n-1]
		} else {
			i = uint32(len(t.entries))
			t.entries = append(t.entries, loanEntry{})
		}
		e := &t.entries[i]
		*e = loanEntry{b: b, load: load, index: uint32(index), gen: e.gen + 1}
		loans[index].Handle = uint64(e.gen)<<32 | uint64(i) + 1
	}
}

// take removes a loan from the table.
func (t *loanTable) take(handle uint64) (loanEntry, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	i := uint32(handle) - 1
	if uint32(handle) == 0 || int64(i) >= int64(len(t.entries)) {
		return loanEntry{}, false
	}
	e := t.entries[i]
	if e.b == nil || e.gen != uint32(handle>>32) {
		return loanEntry{}, false
	}
	t.entries[i] = loanEntry{gen: e.gen}
	t.spare = append(t.spare, i)
	return e, true
}
