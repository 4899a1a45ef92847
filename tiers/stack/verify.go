package stack

import (
	"bytes"
	"context"
	"slices"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/engine"
)

const (
	// verifyWorkers is how many lookups have chunks verified at one time.
	verifyWorkers = 4
	// verifyBatch is how many chunks one call of Config.Verify is given: after each the lookup's
	// turn goes to the next.
	verifyBatch = 16
)

// verify has chunks verified, and waits for those of them that somebody else has verified just now.
// What is not verified when it returns was dropped, or the Stack is being closed.
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
	s.wg.Add(1) // Close waits for callers as well
	for _, v := range list {
		if c := s.checking[v.Handle]; c != nil {
			others = append(others, c)
			continue
		}
		if !s.engine.NeedsVerify(v.Handle) {
			continue // somebody was first
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

// sizeOf is a chunk's bytes, 0 if its space is not known.
func (s *Stack) sizeOf(v *engine.Verification) int64 {
	if sp := s.space(v.Space); sp != nil {
		return int64(v.Pages) * sp.Geometry.PageBytes
	}
	return 0
}

// VerifyRun has all verified that the engine has of a run, for an owner of its space. The error is
// the context's, or the engine's.
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

// verifyItems has verified what is to be, and answers the items that may be written. The others are
// ended.
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

// Verify has all verified that the arena has of a prefix, as a lookup has: for what asks the engine
// itself. The error is the context's, or the engine's.
func (s *Stack) Verify(ctx context.Context, id engine.SpaceID, hashes []byte) error {
	if s.cfg.Verify == nil || s.engine.Unverified() == 0 {
		return nil
	}
	return s.asOwner(id, func(o engine.Owner, sp *tiers.Space) error {
		return s.VerifyRun(ctx, o, tiers.Run{Space: sp, Hashes: hashes})
	})
}

// listChecks finds what is to be verified before all that the arena has of a request's pages can be
// read. Without tiers to go on with it is of no use behind a gap.
func (s *Stack) listChecks(r *request) {
	last := uint64(0)
	if len(r.checks) > 0 {
		last = r.checks[0].Handle
	}
	var err error
	r.done = 0
	r.checks, r.names, err = s.engine.NextVerify(r.owner, r.first, r.all.Hashes, r.names,
		r.checks[:0])
	if err != nil || len(r.checks) == 0 || r.checks[0].Handle == last {
		r.checks = nil // the last: it could not be verified
		return
	}
	ppc := r.all.Space.Geometry.PagesPerChunk
	chunk, end := r.first/ppc, r.first+r.asked
	held := make([]uint16, (end-1)/ppc-chunk+1)
	if s.engine.Contains(r.id, r.first, r.all.Hashes, held) != nil {
		clear(held)
	}
	n, page := 0, r.first
	for i := range held {
		limit := min((chunk+i+1)*ppc, end)
		got := page + int(held[i])
		for ; n < len(r.checks) && r.checks[n].First < limit; n++ {
			got = max(got, min(r.checks[n].First+r.checks[n].Pages, limit))
		}
		if page = got; page < limit {
			break
		}
	}
	if r.expect = page - r.first; !r.promote && !r.peers {
		r.checks = r.checks[:n]
	} else if page < end {
		r.expect = r.asked // peers or tiers may have the rest
	}
}

// sendVerify queues a request whose chunks are to be verified. mu is held.
func (s *Stack) sendVerify(r *request) {
	if r.phase != verifying {
		r.phase = verifying
		s.unsure++
		s.count.verified.Add(1)
	}
	left := int64(0)
	for i := r.done; i < len(r.checks); i++ {
		left += s.sizeOf(&r.checks[i])
	}
	s.unverified += left - r.unverified
	r.unverified = left
	r.pages = r.expect
	r.eta = s.verifying.arrival(s.unverified)
	if now := time.Now(); r.told.IsZero() || now.Sub(r.told) >= tellEvery {
		r.told = now
		s.promise(r, r.pages, r.eta)
	}
	s.verifies.push(r)
	s.verifiable.Signal()
}

// endVerifying ends a request's being verified. mu is held.
func (s *Stack) endVerifying(r *request) {
	s.unsure--
	s.unverified -= r.unverified
	r.unverified = 0
}

// promiseUnverified tells the askers of those that are being verified, now and then, that they are.
// mu is held.
func (s *Stack) promiseUnverified(now time.Time) {
	for _, r := range s.pending {
		if r.phase == verifying && now.Sub(r.told) >= tellEvery {
			r.told = now
			s.promise(r, r.pages, max(r.eta, tellEvery))
		}
	}
}

// verifyWorker has the chunks of lookups verified, by turns.
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
		batch = batch[:0]
		for base := r.base(); r.done < len(r.checks) && len(batch) < verifyBatch; r.done++ {
			if v := r.checks[r.done]; v.First+v.Pages > base {
				batch = append(batch, v)
			}
		}
		more := r.done < len(r.checks)
		s.unlockAndWake()
		s.verify(batch)
		if !more {
			s.listChecks(r)
		}
		s.mu.Lock()
		switch {
		case r.phase == ended || s.closed:
		case len(r.checks) > 0:
			s.sendVerify(r)
		default:
			s.afterVerify(r)
		}
		s.unlockAndWake()
	}
}

// lookAgain looks a request up anew, from the first page on that is still wanted. It answers the
// pages found, from the lookup's first on. mu is held.
func (s *Stack) lookAgain(r *request) (pages int) {
	base := r.base()
	if r.trim >= r.first+r.asked {
		_ = s.engine.Cancel(r.owner, r.lookup)
		return base - r.first
	}
	n, _ := s.engine.Lookup(r.owner, r.lookup, base,
		r.all.Hashes[(base-r.first)*r.all.Space.Geometry.DigestBytes:])
	return base - r.first + n
}

// afterVerify has a request go on whose chunks are verified, as if it came now. The verifyWorker
// that has it calls it, with mu held, of which it lets go meanwhile.
func (s *Stack) afterVerify(r *request) {
	hit := s.lookAgain(r)
	s.endVerifying(r)
	r.phase = seeking
	if !r.promote && !r.peers || !r.aim(hit) {
		s.settle(r)
		return
	}
	s.unlockAndWake()
	s.readHints(r)
	next := s.askLocal(r)
	s.mu.Lock()
	s.proceed(r, next)
}

// forget is Config.Forget.
func (s *Stack) forget() error {
	if s.cfg.Forget == nil {
		return nil
	}
	return s.cfg.Forget()
}

// keep makes what a request names its own.
func (r *request) keep() {
	if b := r.ask; b != nil {
		b.digests = append(append(b.digests[:0], r.run.Hashes...), r.run.Prev...)
		n := len(r.run.Hashes)
		r.run.Hashes, r.run.Prev = b.digests[:n:n], b.digests[n:]
	} else {
		r.run.Hashes, r.run.Prev = bytes.Clone(r.run.Hashes), bytes.Clone(r.run.Prev)
	}
	r.all = r.run
	r.size = int64(len(r.run.Hashes) + len(r.run.Prev))
}
