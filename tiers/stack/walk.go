package stack

import (
	"runtime"
	"sync"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/why"
)

// This file walks long lookups. Lookup walks the first part of a long lookup on its caller's
// goroutine, and leaves the rest to the walker. The walker looks up the rest in the arena, part by
// part. Owners take turns, so that no owner waits longer because another owner's lookups are
// longer. Between two parts callers of Lookup go first. A lookup of which the arena holds no more
// continues like any other.
//
// The walker also frees, in parts, the leases of long lookups that have ended.
//
// Without the walker, one client's lookups of 65,536 pages made other clients wait for seconds.

const (
	// walkTurn is how long the lookups of one owner are walked before the next owner's.
	walkTurn = 200 * time.Microsecond
	// walkPart is how many chunks are looked for while the engine is locked.
	walkPart = 256
	// walkYield bounds the wait for callers of Lookup between two parts.
	walkYield = time.Millisecond
	// walkShare is the part of Config.MaxPendingBytes that one owner's long lookups may take.
	walkShare = 8
	// walkSpare is how many buffers are kept for the next ones.
	walkSpare = 4
)

// walks are the long lookups that wait to be walked. Guarded by Stack.mu.
type walks struct {
	turns    []*ownerWalks // the owners that have some; the first is the next
	spare    [][]byte      // buffers for digests
	walkable sync.Cond
}

// ownerWalks are the long lookups of one owner.
type ownerWalks struct {
	owner engine.Owner
	now   *request       // the one that is being walked, or nil
	list  fifo[*request] // the rest, oldest first
	bytes int64          // of the digests of all of them
}

// next returns the lookup to walk, or nil.
func (w *ownerWalks) next() *request {
	if w.now != nil && w.now.state.phase == walking {
		return w.now
	}
	w.now = nil
	if r, ok := w.list.peek(); ok {
		w.list.pop()
		w.now = r
	}
	return w.now
}

// of returns the walks of an owner, or nil.
func (w *walks) of(o engine.Owner) *ownerWalks {
	for _, each := range w.turns { // there are no more than sessions
		if each.owner == o {
			return each
		}
	}
	return nil
}

// isLong reports whether the walker must walk a lookup.
func (s *Stack) isLong(q *Query, sp *tiers.Space) bool {
	g := &sp.Geometry
	pages := len(q.Hashes) / g.DigestBytes
	return pages > 0 && (q.FirstPage+
		pages-1)/g.PagesPerChunk-q.FirstPage/g.PagesPerChunk >= s.cfg.LongChunks
}

// walk is what the walker needs to know about a long lookup. It does not change.
type walk struct {
	handle uint64 // the engine's
	gap    bool   // its first part was not held whole, so that there is nothing to walk
}

// lookupLong is Lookup for a long lookup: the first part at once, the rest by the walker. If no
// more than the first part can be had, the first part is the answer.
func (s *Stack) lookupLong(q *Query, sp *tiers.Space, a Asker, use sources) (pages int, done bool,
	err error) {
	g := &sp.Geometry
	first := (q.FirstPage/g.PagesPerChunk+s.cfg.LongChunks)*g.PagesPerChunk - q.FirstPage
	s.callers.Add(1)
	pages, handle, err := s.engine.BeginLookup(q.Owner, q.Lookup, q.FirstPage,
		q.Hashes[:first*g.DigestBytes])
	s.callers.Add(-1)
	s.Sweep()
	q.Why = engine.Absence{}
	if err == nil && pages < first && use.none() {
		q.Why = s.whyOf(q, g.DigestBytes, pages)
	}
	if err != nil || pages < first && use.none() {
		return pages, true, err
	}
	s.mu.Lock()
	defer s.unlockAndWake()
	size := int64(len(q.Hashes) + len(q.Prev))
	mine := s.walks.of(q.Owner)
	if s.full(size) || mine != nil && mine.bytes+size > s.cfg.MaxPendingBytes/walkShare {
		s.count.refused.Add(1)
		q.Why.Reason = why.Late
		return pages, true, nil
	}
	r := &request{question: newQuestion(q, sp, a, use), walk: walk{handle, pages < first}}
	r.question.keep(r.all, s.walks.buffer())
	r.seen.rest, r.seen.peers, r.state.walked = r.all, use.peers, pages
	s.add(r, s.deadlineOf(q))
	s.advance(r, walking)
	if mine == nil {
		mine = &ownerWalks{owner: q.Owner}
		s.walks.turns = append(s.walks.turns, mine)
	}
	mine.list.push(r)
	mine.bytes += size
	s.walks.walkable.Signal()
	return pages, false, nil
}

// buffer returns an empty buffer, an old one if there is one.
func (w *walks) buffer() []byte {
	if n := len(w.spare); n > 0 {
		b := w.spare[n-1]
		w.spare = w.spare[:n-1]
		return b[:0]
	}
	return nil
}

// recycle takes back the buffer of a request that has ended. Only the caller may have a pointer to
// the request.
func (w *walks) recycle(r *request) {
	if len(w.spare) < walkSpare {
		w.spare = append(w.spare, r.all.Hashes)
	}
	r.all, r.seen.rest = tiers.Run{}, tiers.Run{}
}

// Sweep wakes the walker if lookups that have ended left it something to free. Callers that end
// lookups at the engine directly call it.
func (s *Stack) Sweep() {
	if s.engine.Ending() {
		s.mu.Lock()
		s.walks.walkable.Signal()
		s.mu.Unlock()
	}
}

// walker walks long lookups, whose owners take turns.
func (s *Stack) walker() {
	s.mu.Lock()
	defer s.unlockAndWake()
	for !s.closed {
		r := s.nextWalk()
		if r == nil && !s.engine.Ending() {
			s.walks.walkable.Wait()
			continue
		}
		s.unlockAndWake()
		for start := time.Now(); s.engine.EndSome() && time.Since(start) < walkTurn; {
			s.yield()
		}
		s.yield()
		if r != nil {
			s.walkOn(r)
		}
		s.mu.Lock()
	}
}

// nextWalk returns the lookup whose turn it is, and puts its owner behind the others. nil: there is
// none. s.mu is held.
func (s *Stack) nextWalk() *request {
	for w := &s.walks; len(w.turns) > 0; {
		mine := w.turns[0]
		w.turns = append(w.turns[:0], w.turns[1:]...)
		if r := mine.next(); r != nil {
			w.turns = append(w.turns, mine)
			return r
		}
	}
	return nil
}

// yield waits, for a bounded time, until no caller of Lookup uses the engine.
func (s *Stack) yield() {
	for start := time.Now(); s.callers.Load() > 0 && time.Since(start) < walkYield; {
		runtime.Gosched()
	}
}

// walkOn walks a lookup for one turn. When the arena holds no more of it, the lookup goes to its
// next phase.
func (s *Stack) walkOn(r *request) {
	over := r.walk.gap
	for start := time.Now(); !over; {
		var ok bool
		if over, ok = s.walkNext(r); !ok {
			return
		}
		if !over && time.Since(start) >= walkTurn {
			return
		}
	}
	s.mu.Lock()
	defer s.unlockAndWake()
	if r.state.phase == ended || s.closed {
		s.walks.recycle(r)
	} else {
		s.afterWalk(r)
	}
}

// walkNext walks the next part of a lookup. over reports that the arena holds no more of it. ok is
// false if the lookup has ended.
func (s *Stack) walkNext(r *request) (over, ok bool) {
	g := &r.all.Space.Geometry
	walked := r.state.walked // only the walker changes it
	from := r.first + walked
	to := min(r.end(), (from/g.PagesPerChunk+walkPart)*g.PagesPerChunk)
	pages, err := s.engine.ContinueLookup(r.walk.handle,
		r.all.Hashes[walked*g.DigestBytes:(to-r.first)*g.DigestBytes])
	s.yield()
	s.mu.Lock()
	defer s.unlockAndWake()
	if r.state.phase == ended || s.closed {
		s.walks.recycle(r)
		return true, false
	}
	if r.state.walked += pages; err != nil {
		r.state.walked = 0 // its lease has ended
	}
	return err != nil || from+pages < to || to == r.end(), true
}

// afterWalk moves a walked lookup to its next phase, or settles it. s.mu is held; afterWalk
// releases it for a while.
func (s *Stack) afterWalk(r *request) {
	if r.state.trim > r.first {
		_ = s.engine.Trim(r.owner, r.lookup, r.state.trim)
	}
	walked := r.state.walked
	if walked == r.asked || r.state.trim >= r.end() || r.use.none() {
		s.settle(r)
		s.walks.recycle(r)
		return
	}
	s.unwalk(r)
	s.advance(r, seeking)
	s.unlockAndWake()
	next, more := s.surveyWalked(r, walked)
	s.mu.Lock()
	switch {
	case r.state.phase == ended || s.closed:
	case len(r.check.list) > 0:
		s.promise(r, 0, 0)
		s.sendVerify(r)
	case more:
		if next != nil || r.plan.need > 0 {
			s.promise(r, 0, 0)
		}
		s.proceed(r, next)
	default:
		s.settle(r)
	}
}

// surveyWalked lists the chunks of a walked lookup that must be verified. If there are none, it
// surveys what can be had of the rest. more is false if there is neither.
func (s *Stack) surveyWalked(r *request, walked int) (next *tier, more bool) {
	if r.use.verify {
		s.listChecks(r)
	}
	if len(r.check.list) > 0 {
		return nil, true
	}
	if !r.use.promote && !r.use.peers || !r.seen.aim(&r.question, walked) {
		return nil, false
	}
	return s.surveyBelow(r), true
}

// unwalk takes a lookup from those that wait to be walked. s.mu is held.
func (s *Stack) unwalk(r *request) {
	if w := s.walks.of(r.owner); w != nil {
		w.bytes -= r.size
	}
}
