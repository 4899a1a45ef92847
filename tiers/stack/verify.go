package stack

import (
	"context"
	"slices"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/engine"
)

const (
	// verifyWorkers is how many lookups have chunks verified at one time.
	verifyWorkers = 4
	// verifyBatch is how many chunks one call of Config.Verify gets. After each call another lookup
	// has its turn.
	verifyBatch = 16
)

// checklist is the chunks that must be verified before all that the arena holds of a request can be
// read. It belongs to the owner of the request's phase.
type checklist struct {
	list   []engine.Verification
	names  []byte // digests of the list
	done   int    // how many of the list are verified, or are about to be
	expect int    // pages that the lookup is expected to hold when all are
}

// take appends to batch the next chunks that reach beyond a page, up to verifyBatch, and counts
// them as done.
func (c *checklist) take(page int, batch []engine.Verification) []engine.Verification {
	for ; c.done < len(c.list) && len(batch) < verifyBatch; c.done++ {
		if v := c.list[c.done]; v.First+v.Pages > page {
			batch = append(batch, v)
		}
	}
	return batch
}

// verify verifies chunks. It waits for those that another goroutine verifies at this moment. A
// chunk that is not verified when it returns was dropped, or the Stack is being closed.
func (s *Stack) verify(list []engine.Verification) {
	over := make(chan struct{})
	var mine []engine.Verification
	var others []chan struct{}
	size := int64(0)
	s.mu.Lock()
	if s.closed {
		s.unlockAndWake()
		return
	}
	s.wg.Add(1) // Close waits for callers of verify
	for _, v := range list {
		if c := s.checking[v.Handle]; c != nil {
			others = append(others, c)
			continue
		}
		if !s.engine.NeedsVerify(v.Handle) {
			continue // another goroutine has verified it
		}
		s.checking[v.Handle] = over
		mine = append(mine, v)
		size += s.sizeOf(&v)
	}
	s.unlockAndWake()
	defer s.wg.Done()
	if len(mine) > 0 {
		alone, start := s.verifying.begin(), time.Now()
		s.cfg.Verify(s.ctx, mine)
		if alone {
			s.verifying.first(time.Since(start), size)
		}
		s.verifying.moved(size)
		s.verifying.end()
	}
	s.mu.Lock()
	for i := range mine {
		delete(s.checking, mine[i].Handle)
	}
	s.unlockAndWake()
	close(over)
	for _, c := range others {
		<-c
	}
}

// sizeOf returns a chunk's bytes, 0 if its space is not known.
func (s *Stack) sizeOf(v *engine.Verification) int64 {
	if sp := s.space(v.Space); sp != nil {
		return int64(v.Pages) * sp.Geometry.PageBytes
	}
	return 0
}

// VerifyRun verifies all that the engine holds of a run, for an owner of its space. The error is
// the context's or the engine's.
func (s *Stack) VerifyRun(ctx context.Context, o engine.Owner, run tiers.Run) error {
	if s.cfg.Verify == nil {
		return nil
	}
	var list []engine.Verification
	var names []byte
	for last := uint64(0); ; last = list[0].Handle {
		var err error
		list, names, err = s.engine.NextVerify(o, run.First, run.Hashes, names, list[:0])
		if err != nil || len(list) == 0 || list[0].Handle == last {
			return err
		}
		for batch := range slices.Chunk(list, verifyBatch) {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			s.verify(batch)
		}
	}
}

// verifyItems verifies the chunks of items that need it. It returns the items that may be written,
// and ends the rest.
func (s *Stack) verifyItems(items []engine.CascadeItem) []engine.CascadeItem {
	var list []engine.Verification
	for i := range items {
		if c := &items[i]; c.Unverified {
			list = append(list, engine.Verification{
				Handle: c.VerifyHandle, Space: c.Space, Region: c.Region, Offset: c.Offset,
				First: c.First, Pages: c.Pages, Hashes: c.Hashes,
			})
		}
	}
	if len(list) == 0 {
		return items
	}
	if s.cfg.Verify != nil {
		s.verify(list)
	}
	return slices.DeleteFunc(items, func(c engine.CascadeItem) bool {
		bad := c.Unverified && !s.engine.Verified(c.VerifyHandle)
		if bad {
			s.engine.EndCascade(c.Handle, false)
		}
		return bad
	})
}

// Verify verifies all that the arena holds of a prefix, as a lookup does. It is for callers that
// use the engine directly. The error is the context's or the engine's.
func (s *Stack) Verify(ctx context.Context, id engine.SpaceID, hashes []byte) error {
	if s.cfg.Verify == nil || s.engine.Unverified() == 0 {
		return nil
	}
	return s.asOwner(id, func(o engine.Owner, sp *tiers.Space) error {
		return s.VerifyRun(ctx, o, tiers.Run{Space: sp, Hashes: hashes})
	})
}

// listChecks fills a request's checklist. What lies behind a gap is left out if neither tiers nor
// peers can fill it. The request's owner calls it.
func (s *Stack) listChecks(r *request) {
	c := &r.check
	last := uint64(0)
	if len(c.list) > 0 {
		last = c.list[0].Handle
	}
	var err error
	c.done = 0
	c.list, c.names, err = s.engine.NextVerify(r.owner, r.first, r.all.Hashes, c.names, c.list[:0])
	if err != nil || len(c.list) == 0 || c.list[0].Handle == last {
		c.list = nil // the same chunk again: it could not be verified
		return
	}
	n, page := s.reach(r)
	if c.expect = page - r.first; !r.use.promote && !r.seen.peers {
		c.list = c.list[:n]
	} else if page < r.end() {
		c.expect = r.asked // peers or tiers may have the rest
	}
}

// reach returns the page up to which a request's pages are in the arena without a gap when its
// checklist is verified, and how many of the list that takes.
func (s *Stack) reach(r *request) (n, page int) {
	ppc := r.all.Space.Geometry.PagesPerChunk
	chunk, end := r.first/ppc, r.end()
	held := make([]uint16, (end-1)/ppc-chunk+1)
	if s.engine.Contains(r.space, r.first, r.all.Hashes, held) != nil {
		clear(held)
	}
	page = r.first
	for i := range held {
		limit := min((chunk+i+1)*ppc, end)
		got := page + int(held[i])
		for list := r.check.list; n < len(list) && list[n].First < limit; n++ {
			got = max(got, min(list[n].First+list[n].Pages, limit))
		}
		if page = got; page < limit {
			break
		}
	}
	return n, page
}

// sendVerify queues a request for the verifyWorkers. s.mu is held.
func (s *Stack) sendVerify(r *request) {
	if r.state.phase != verifying {
		s.advance(r, verifying)
		s.unsure++
		s.count.verified.Add(1)
	}
	left := int64(0)
	for i := r.check.done; i < len(r.check.list); i++ {
		left += s.sizeOf(&r.check.list[i])
	}
	s.unverified += left - r.state.unverified
	r.state.unverified = left
	r.state.expected = r.check.expect
	pace := s.verifying.pace(0)
	r.state.eta = pace.arrival(s.unverified)
	if now := time.Now(); r.state.promised.IsZero() || now.Sub(r.state.promised) >= promiseEvery {
		r.state.promised = now
		s.promise(r, r.state.expected, r.state.eta)
	}
	s.verifies.push(r)
	s.verifiable.Signal()
}

// endVerifying takes a request out of the counts of those that are verified. s.mu is held.
func (s *Stack) endVerifying(r *request) {
	s.unsure--
	s.unverified -= r.state.unverified
	r.state.unverified = 0
}

// promiseUnverified renews the promises to the askers of requests that are being verified. s.mu is
// held.
func (s *Stack) promiseUnverified(now time.Time) {
	for _, r := range s.pending {
		if r.state.phase == verifying && now.Sub(r.state.promised) >= promiseEvery {
			r.state.promised = now
			s.promise(r, r.state.expected, max(r.state.eta, promiseEvery))
		}
	}
}

// verifyWorker verifies the chunks of requests, which take turns.
func (s *Stack) verifyWorker() {
	var batch []engine.Verification
	for {
		s.mu.Lock()
		r, ok := s.verifies.peek()
		for ; !ok && !s.closed; r, ok = s.verifies.peek() {
			s.verifiable.Wait()
		}
		if s.closed {
			s.unlockAndWake()
			return
		}
		s.verifies.pop()
		batch = r.check.take(r.base(), batch[:0])
		more := r.check.done < len(r.check.list)
		s.unlockAndWake()
		s.verify(batch)
		if !more {
			s.listChecks(r)
		}
		s.mu.Lock()
		switch {
		case r.state.phase == ended || s.closed:
		case len(r.check.list) > 0:
			s.sendVerify(r)
		default:
			s.afterVerify(r)
		}
		s.unlockAndWake()
	}
}

// lookAgain looks a request up in the engine again, from the first page that is still wanted. It
// returns the pages found, from the lookup's first on. s.mu is held.
func (s *Stack) lookAgain(r *request) (pages int) {
	base := r.base()
	if r.state.trim >= r.end() {
		_ = s.engine.Cancel(r.owner, r.lookup)
		return base - r.first
	}
	n, _ := s.engine.Lookup(r.owner, r.lookup, base,
		r.all.Hashes[(base-r.first)*r.all.Space.Geometry.DigestBytes:])
	return base - r.first + n
}

// afterVerify continues with a request whose chunks are verified, as with a new lookup. The
// verifyWorker that owns the request calls it and holds s.mu; afterVerify releases it for a while.
func (s *Stack) afterVerify(r *request) {
	hit := s.lookAgain(r)
	s.endVerifying(r)
	s.advance(r, seeking)
	if !r.use.promote && !r.seen.peers || !r.seen.aim(&r.question, hit) {
		s.settle(r)
		return
	}
	s.unlockAndWake()
	next := s.surveyBelow(r)
	s.mu.Lock()
	s.proceed(r, next)
}

// forget calls Config.Forget.
func (s *Stack) forget() error {
	if s.cfg.Forget == nil {
		return nil
	}
	return s.cfg.Forget()
}
