package stack

import (
	"container/heap"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/why"
)

// request is a lookup that the arena alone cannot complete. The question does not change. The
// survey, the plan and the checklist belong to the owner of the phase (see phases). The state is
// guarded by Stack.mu.
type request struct {
	question
	walk  walk
	seen  survey
	plan  plan
	check checklist
	state progress

	planned bool // the plan is this question's; belongs to the owner of the phase
}

// progress is how far a request has come. Guarded by Stack.mu.
type progress struct {
	phase     phase
	cancelled bool // while it was being prepared: it ends when it has been
	trim      int  // pages before this one are not wanted any more
	walked    int  // pages that the arena holds, while it is being walked

	// The books.
	deadline time.Time
	place    int       // in Stack.deadlines
	since    time.Time // when it came
	queued   time.Time // when its plan began to wait

	// What the asker was promised.
	promised time.Time     // when it was promised something last; zero: never
	expected int           // pages that verifying is expected to lead to
	eta      time.Duration // and how long it takes
	quiet    bool          // it was promised nothing, as peers mostly reply at once

	// inline: the caller of Lookup waits for the answer, which goes to settled, not to the asker.
	inline  bool
	settled int // pages; -1: not yet
	absence engine.Absence

	unverified int64 // bytes of its checklist that are not verified
	unlent     bool  // peers lent less than they hinted
	// What the answer tells beside the pages: why a load failed or was not in time (why.End: none),
	// where pages came from, and when the first load began.
	cause why.Reason
	came  Sources
	began time.Time

	// loads are by chunk of the survey's rest; nil: it has arrived, or is not wanted. Chunks
	// [from, want) are wanted, and left of them have not arrived.
	loads []*load
	from  int
	want  int
	left  int
}

// over reports whether a request has left the queue that it was in. Stack.mu is held.
func (r *request) over() bool { return !r.state.phase.inQueue() }

// base is the first page that the lookup still holds or waits for: the engine frees whole chunks
// below what is trimmed. Stack.mu is held.
func (r *request) base() int {
	ppc := r.all.Space.Geometry.PagesPerChunk
	return max(r.first, r.state.trim/ppc*ppc)
}

// deadlines is a heap of the lookups under way.
type deadlines []*request

func (d deadlines) Len() int           { return len(d) }
func (d deadlines) Less(i, j int) bool { return d[i].state.deadline.Before(d[j].state.deadline) }
func (d deadlines) Swap(i, j int) {
	d[i], d[j] = d[j], d[i]
	d[i].state.place, d[j].state.place = i, j
}
func (d *deadlines) Push(x any) {
	r := x.(*request)
	r.state.place = len(*d)
	*d = append(*d, r)
}
func (d *deadlines) Pop() any {
	last := len(*d) - 1
	r := (*d)[last]
	(*d)[last] = nil
	*d = (*d)[:last]
	return r
}

// newRequest returns a request in the phase asking. dismiss takes it back.
func (s *Stack) newRequest(q question) *request {
	r := s.spare.Swap(nil)
	if r == nil {
		r = new(request)
	}
	r.question, r.check.list, r.seen.peers, r.planned = q, nil, q.use.peers, false
	return r
}

// dismiss takes back a request that was never begun, to use it again.
func (s *Stack) dismiss(r *request) {
	r.question, r.seen.rest, r.check.list = question{}, tiers.Run{}, nil
	s.spare.Store(r)
}

// full reports whether there is no room for one more request, whose digests have so many bytes.
// s.mu is held.
func (s *Stack) full(bytes int64) bool {
	return s.closed || len(s.pending) >= s.cfg.MaxPending || s.bytes+bytes > s.cfg.MaxPendingBytes
}

// add enters a request into the books. s.mu is held.
func (s *Stack) add(r *request, deadline time.Duration) {
	r.state.since = time.Now()
	r.state.deadline = r.state.since.Add(deadline)
	s.pending[r.key()] = r
	s.bytes += r.size
	heap.Push(&s.deadlines, r)
	s.due = s.due || r.state.place == 0
	s.open.Add(1)
}

// remove takes a request out of all books and leaves its loads. s.mu is held.
func (s *Stack) remove(r *request) {
	delete(s.pending, r.key())
	s.bytes -= r.size
	heap.Remove(&s.deadlines, r.state.place)
	s.open.Add(-1)
	s.unwant(r)
	switch r.state.phase {
	case verifying:
		s.endVerifying(r)
	case walking:
		s.unwalk(r)
	}
	for _, l := range r.state.loads {
		if l != nil {
			s.leave(l, r)
		}
	}
	r.state.loads = nil
	s.setQuiet(r, false)
	s.advance(r, ended)
}

// unwant subtracts a request's bytes from what waits to be loaded from tiers. s.mu is held.
func (s *Stack) unwant(r *request) {
	if r.state.phase == queued || r.state.phase == preparing {
		for i, t := range s.tiers {
			t.ahead.Add(-r.plan.wants[i])
		}
	}
}

// promise sends a request's asker how many pages are expected, and when; 0 pages: that is not known
// yet. s.mu is held.
func (s *Stack) promise(r *request, pages int, eta time.Duration) {
	s.outbox = append(s.outbox, message{asker: r.asker, pending: true, eta: eta,
		answer: Answer{Owner: r.owner, Lookup: r.lookup, Pages: pages,
			Tenant: r.tenant}})
}

// promiseEvery is how often the asker of a request that waits for room, or is being verified, is
// promised something.
const promiseEvery = 50 * time.Millisecond

// settle ends a request: its lookup keeps what it has by now, and its asker receives the answer,
// unless the Stack is closed. s.mu is held.
func (s *Stack) settle(r *request) {
	if r.state.phase == verifying && !s.closed {
		s.lookAgain(r)
	}
	wasWalking := r.state.phase == walking
	s.remove(r)
	if s.closed {
		_, _ = s.engine.SettleLookup(r.owner, r.lookup, 0)
		return
	}
	pages := 0
	if wasWalking { // it waits for nothing, so that there is nothing to settle
		pages = r.state.walked
	} else if n, err := s.engine.SettleLookup(r.owner, r.lookup, r.asked); err == nil && n > 0 {
		pages = r.base() + n - r.first
	}
	if r.state.inline {
		r.state.settled, r.state.absence = pages, s.why(r, pages)
		return
	}
	a := Answer{Owner: r.owner, Lookup: r.lookup, First: r.first, Asked: r.asked, Pages: pages,
		Took: time.Since(r.state.since), Tenant: r.tenant, Why: s.why(r, pages),
		From: r.state.came.of(pages)}
	if !r.state.began.IsZero() {
		a.Began = r.state.began.Sub(r.state.since)
	}
	s.outbox = append(s.outbox, message{asker: r.asker, answer: a})
}

// arrived records that a chunk that a request waits for has arrived (ok) or will not arrive. short:
// only its first pages have arrived. s.mu is held.
func (s *Stack) arrived(r *request, chunk int, ok, short bool) {
	w := &r.state
	w.loads[chunk] = nil
	w.left--
	if !ok || short {
		for c := chunk + 1; c < w.want; c++ {
			s.abandon(r, c)
		}
		if w.want = chunk; ok {
			w.want++
		}
	}
	switch {
	case w.left > 0:
	case w.unlent && r.seen.peers && r.use.promote && w.phase == loading && !s.closed:
		s.retry(r)
	default:
		s.settle(r)
	}
}

// abandon makes a request wait for one chunk no longer. s.mu is held.
func (s *Stack) abandon(r *request, chunk int) {
	if l := r.state.loads[chunk]; l != nil {
		r.state.loads[chunk] = nil
		r.state.left--
		s.leave(l, r)
	}
}

// trimLoads abandons the chunks below what a loading request still wants. s.mu is held.
func (s *Stack) trimLoads(r *request) {
	w := &r.state
	ppc := r.seen.rest.Space.Geometry.PagesPerChunk
	for to := min((r.base()-r.seen.rest.First)/ppc, w.want); w.from < to; w.from++ {
		s.abandon(r, w.from)
	}
}

// Trim frees a lookup's leases on chunks wholly below firstPage, and ends their promotion. Pages
// before firstPage are not wanted any more.
func (s *Stack) Trim(o engine.Owner, lookup uint64, firstPage int) error {
	defer s.Sweep()
	if s.open.Load() == 0 {
		return s.engine.Trim(o, lookup, firstPage)
	}
	s.mu.Lock()
	defer s.unlockAndWake()
	r := s.pending[lookupKey{o, lookup}]
	if r != nil && r.state.phase == walking { // afterWalk trims it
		r.state.trim = max(r.state.trim, firstPage)
		return nil
	}
	err := s.engine.Trim(o, lookup, firstPage)
	if r == nil {
		return err
	}
	r.state.trim = max(r.state.trim, firstPage)
	switch {
	case r.state.phase == preparing:
	case r.state.trim >= r.end():
		s.settle(r)
	case r.state.phase == loading:
		if s.trimLoads(r); r.state.left == 0 {
			s.settle(r)
		}
	}
	return nil
}

// Cancel ends a lookup and frees what it holds. Its asker gets no answer.
func (s *Stack) Cancel(o engine.Owner, lookup uint64) error {
	defer s.Sweep()
	if s.open.Load() == 0 {
		return s.engine.Cancel(o, lookup)
	}
	s.mu.Lock()
	defer s.unlockAndWake()
	err := s.engine.Cancel(o, lookup)
	r := s.pending[lookupKey{o, lookup}]
	if r == nil {
		return err
	}
	s.end(r)
	return nil
}

// end ends a request without an answer. s.mu is held.
func (s *Stack) end(r *request) {
	if r.state.phase == preparing {
		r.state.cancelled = true
	} else {
		s.remove(r)
	}
}

// RemoveOwner ends a session in the engine, and all its lookups.
func (s *Stack) RemoveOwner(o engine.Owner) {
	if s.open.Load() > 0 {
		s.mu.Lock()
		for key, r := range s.pending {
			if key.owner == o {
				s.end(r)
			}
		}
		s.unlockAndWake()
	}
	s.engine.RemoveOwner(o)
}

// Settle ends the requests under way: it waits for them, at most for patience, and then has each
// answered with what has arrived. It returns when the askers have their answers. Requests that
// begin meanwhile are treated alike, so nobody should begin any.
func (s *Stack) Settle(patience time.Duration) {
	for end := time.Now().Add(patience); ; time.Sleep(settlePoll) {
		s.mu.Lock()
		left := len(s.pending)
		if now := time.Now(); left > 0 && now.After(end) {
			// Each deadline becomes the earlier of two, so the heap keeps its order.
			for _, r := range s.deadlines {
				if r.state.deadline.After(now) {
					r.state.deadline = now
				}
			}
			s.due = true
		}
		closed := s.closed
		s.unlockAndWake()
		if left == 0 || closed {
			s.deliver()
			return
		}
	}
}

// settlePoll is how often Settle looks.
const settlePoll = 500 * time.Microsecond
