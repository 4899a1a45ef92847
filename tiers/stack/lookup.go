package stack

import (
	"container/heap"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/engine"
)

// Asker is told how a lookup goes on that was not answered at once. Its methods are called from one
// goroutine, which tells nobody else meanwhile, so they must not wait long; they may not close the
// Stack. They may still come when the lookup was cancelled at that moment.
type Asker interface {
	// LookupPending says that so many pages from the lookup's first on are expected so much later.
	// A later one takes the place of an earlier one.
	LookupPending(o engine.Owner, lookup uint64, pages int, eta time.Duration)
	// LookupAnswered says what is leased in the end.
	LookupAnswered(a Answer)
}

// Answer is the answer to a lookup.
type Answer struct {
	Owner  engine.Owner
	Lookup uint64
	Pages  int // leased, from the lookup's first on
	Took   time.Duration
}

// Query is a lookup.
type Query struct {
	Owner     engine.Owner
	Lookup    uint64 // the owner's name for it
	Space     engine.SpaceID
	FirstPage int
	// digest of the page before FirstPage; empty if there is none or it is not known
	Prev []byte
	// digests of the pages, end to end; copied if the lookup is not answered at once
	Hashes    []byte
	Deadline  time.Duration // after which the answer is of no use; 0: not said
	Recompute time.Duration // that computing a page takes; 0: not known
	// if it is not answered at once the caller calls Tick within TickWithin, so that nobody is
	// woken only to see to it: that would be in its way
	Ticks bool

	always bool // whatever Config says of promotion and deadlines
}

// TickWithin is what Query.Ticks promises. It is well below what an asker waits who is told
// nothing.
const TickWithin = 5 * time.Millisecond

// Tick sees to lookups that were asked with Query.Ticks and have not been answered yet.
func (s *Stack) Tick() {
	s.Sweep()
	s.mu.Lock()
	s.due = s.due || s.ticks && len(s.pending) > 0
	s.ticks = false
	s.unlockAndWake()
}

// phase is where a lookup is; see the package comment.
type phase uint8

const (
	asking phase = iota // on the caller's goroutine, and nobody else knows of it
	walking
	verifying
	seeking
	queued
	preparing
	loading
	ended
)

// request is a lookup. Whoever has it in the phases asking, walking (the walker), verifying (a
// verifyWorker), seeking (a worker of a tier, or the walker) and preparing (the dispatcher) may use
// what is not said to be guarded without a lock, and sees only when it is done whether it has ended
// meanwhile.
type request struct {
	asker     Asker
	owner     engine.Owner
	lookup    uint64
	first     int // the first page asked for
	asked     int // pages
	hit       int // pages that the arena had when it came
	part      int // of them, those in the run's first chunk
	run       tiers.Run
	id        engine.SpaceID
	deadline  time.Time
	recompute time.Duration
	held      [engine.MaxTiers][]uint16 // by tier: what it says that it has of the run's chunks
	known     uint8                     // the tiers that said so
	// what peers are said to hold of them; empty: they are not asked
	lent   []uint16
	have   []uint16 // what can be had of each chunk
	source []int8   // and from which tier; fromArena, fromPeers
	borrow []bool   // or from peers
	// of the chunks that are worth having, those that are not from peers
	need    int
	chunks  int // of the run, how many are worth having
	pages   int // that the lookup would hold then
	eta     time.Duration
	promote bool // tiers may be asked
	peers   bool // peers may be asked
	// all that was asked for. Of the rest of these only one that is to be verified has any:
	all    tiers.Run
	checks []engine.Verification // chunks that are to be verified,
	names  []byte                // their digests,
	done   int                   // how many are, or are about to be,
	expect int                   // and the pages that the lookup would hold then
	check  bool                  // chunks may have to be verified
	handle uint64                // of one that is walked: the engine's
	// and its first part was not held whole, so that there is nothing to walk
	gap bool
	// by which its caller asks peers, being about to prepare it, with Stack.prepareMu held
	ask *borrowing

	// Guarded by Stack.mu.
	phase      phase
	walked     int   // pages that the arena has, of one that is being walked
	cancelled  bool  // while preparing
	trim       int   // pages before this one are not wanted any more
	place      int   // in Stack.deadlines
	size       int64 // of its digests
	unverified int64 // bytes of checks that are not done
	wants      [engine.MaxTiers]int64
	since      time.Time // when it came,
	queued     time.Time // was queued,
	told       time.Time // and said last to be pending
	quiet      bool      // it was not said to be pending, as peers mostly answer at once
	inline     bool      // its answer is its caller's, who waits for it: it goes to settled
	settled    int       // pages; -1: not yet
	unlent     bool      // peers did not lend all that they were said to hold
	loads      []*load   // by chunk; nil: it has arrived, or nobody waits for it
	from       int       // chunks [from, want) are wanted,
	want       int
	left       int // of which so many have not arrived
}

// Where a chunk can be had that is in no tier.
const (
	fromArena = -1
	fromPeers = -2
)

// over says that a request has left the queue that it was in. Stack.mu is held.
func (r *request) over() bool {
	return r.phase != walking && r.phase != verifying && r.phase != seeking && r.phase != queued
}

// deadlines is a heap of the lookups under way.
type deadlines []*request

func (d deadlines) Len() int           { return len(d) }
func (d deadlines) Less(i, j int) bool { return d[i].deadline.Before(d[j].deadline) }
func (d deadlines) Swap(i, j int) {
	d[i], d[j] = d[j], d[i]
	d[i].place, d[j].place = i, j
}
func (d *deadlines) Push(x any) {
	r := x.(*request)
	r.place = len(*d)
	*d = append(*d, r)
}
func (d *deadlines) Pop() any {
	last := len(*d) - 1
	r := (*d)[last]
	(*d)[last] = nil
	*d = (*d)[:last]
	return r
}

// Lookup answers how many pages from q.FirstPage on are leased, as engine.Engine.Lookup does, if
// that is known at once (done). Otherwise a is told later, once, unless the lookup is cancelled or
// repeated, its owner removed or the Stack closed before; pages is then what the arena has now.
// ErrBusy: a lookup of that name is just being ended.
func (s *Stack) Lookup(q *Query, a Asker) (pages int, done bool, err error) {
	if s.open.Load() > 0 {
		if err := s.replace(lookupKey{q.Owner, q.Lookup}); err != nil {
			return 0, true, err
		}
	}
	check := s.cfg.Verify != nil && s.engine.Unverified() > 0
	promote := len(s.tiers) > 0 && (s.cfg.Promote != PromoteNever || q.always)
	peers := s.cfg.Peers != nil && !q.always
	sp := s.space(q.Space)
	if sp != nil && s.isLong(q, sp) {
		return s.lookupLong(q, sp, a, check, promote, peers)
	}
	s.callers.Add(1)
	pages, err = s.engine.Lookup(q.Owner, q.Lookup, q.FirstPage, q.Hashes)
	s.callers.Add(-1)
	s.Sweep()
	if err != nil || sp == nil || !check && !promote && !peers {
		return pages, true, err
	}
	asked := len(q.Hashes) / sp.Geometry.DigestBytes
	if pages >= asked {
		return pages, true, nil
	}
	r := s.spare.Swap(nil)
	if r == nil {
		r = new(request)
	}
	r.asker, r.owner, r.lookup, r.id = a, q.Owner, q.Lookup, q.Space
	r.first, r.asked, r.recompute, r.promote = q.FirstPage, asked, q.Recompute, promote
	r.peers, r.quiet, r.unlent, r.inline = peers, false, false, false
	r.all = tiers.Run{Space: sp, First: q.FirstPage, Prev: q.Prev, Hashes: q.Hashes}
	r.checks = nil
	if check {
		s.listChecks(r)
	}
	var next *tier
	goesOn := len(r.checks) > 0
	if r.ask = nil; goesOn {
		r.run = r.all
	} else if (promote || peers) && r.aim(pages) {
		lent, by := s.readHints(r)
		if lent == r.run.Pages() { // that is all there is to know
			s.askFirst(r, lent, by)
		}
		next = s.askLocal(r)
		goesOn = next != nil || r.chunks > 0
		if r.ask == nil && goesOn && next == nil && r.need == 0 && r.chunks <= maxAtOnce {
			if lent < r.run.Pages() && r.pages-(r.hit-r.part) == lent { // what is planned
				s.askFirst(r, lent, by)
			}
			if r.ask == nil && s.prepareMu.TryLock() {
				r.ask = s.newBorrowing()
			}
		}
	}
	b := r.ask
	begun := goesOn && s.begin(r, next, q)
	if b != nil {
		if n, settled := s.prepareAtOnce(r, b, begun); settled {
			return n, true, nil
		}
	}
	if !begun {
		r.asker, r.run, r.all, r.checks = nil, tiers.Run{}, tiers.Run{}, nil
		s.spare.Store(r)
		return pages, true, nil
	}
	return pages, false, nil
}

// aim makes the run of a request what comes behind the pages that hit. false: there is nothing, or
// no tier can know it: they know a chunk only by all its pages.
func (r *request) aim(hit int) bool {
	g := &r.all.Space.Geometry
	start := (r.first + hit) / g.PagesPerChunk * g.PagesPerChunk
	if hit >= r.asked || start < r.first {
		return false
	}
	r.hit, r.part = hit, r.first+hit-start
	at := (start - r.first) * g.DigestBytes
	r.run = tiers.Run{Space: r.all.Space, First: start, Hashes: r.all.Hashes[at:]}
	switch {
	case at > 0:
		r.run.Prev = r.all.Hashes[at-g.DigestBytes : at]
	case start > 0:
		r.run.Prev = r.all.Prev
	}
	return true
}

// readHints notes what peers are said to hold of a request's run, and answers what Peers.Contains
// does.
func (s *Stack) readHints(r *request) (pages, by int) {
	if !r.peers {
		r.lent = r.lent[:0]
		return 0, -1
	}
	n := r.run.Chunks()
	r.lent = slices.Grow(r.lent[:0], n)[:n]
	return s.cfg.Peers.Contains(r.run, r.lent)
}

// askLocal asks the tiers that answer from memory for a request's run, of which it is known what
// peers are said to hold. It answers the tier that is to be asked next, or plans.
func (s *Stack) askLocal(r *request) (next *tier) {
	r.known = 0
	if !r.promote || r.ask != nil { // one peer has all of it
		s.plan(r)
		return nil
	}
	for _, t := range s.tiers {
		if t.local {
			s.askTier(r, t, 0)
		}
	}
	if next = s.nextSeek(r, 0); next == nil {
		s.plan(r)
	}
	return next
}

// replace ends a lookup that is asked again.
func (s *Stack) replace(key lookupKey) error {
	s.mu.Lock()
	defer s.unlockAndWake()
	r := s.pending[key]
	if r == nil {
		return nil
	}
	if r.phase == preparing {
		r.cancelled = true
		return fmt.Errorf("%w: lookup %d is being ended", tiers.ErrBusy, key.lookup)
	}
	s.remove(r)
	_ = s.engine.Cancel(key.owner, key.lookup)
	return nil
}

// askTier asks a tier for what it has of a request's run, from chunk i on.
func (s *Stack) askTier(r *request, t *tier, i int) {
	n := r.run.Chunks()
	held := slices.Grow(r.held[t.index][:0], n)[:n]
	clear(held)
	r.held[t.index] = held
	if !t.breaker.usable() {
		return
	}
	run := tail(r.run, i)
	start := time.Now()
	var err error
	if t.local {
		err = t.Tier.Contains(s.ctx, run, held[i:])
	} else {
		if ok, _ := t.breaker.enter(); !ok {
			return
		}
		ctx, cancel := context.WithTimeoutCause(s.ctx, t.LookupTimeout, errLate)
		err = t.Tier.Contains(ctx, run, held[i:])
		cancel()
		t.breaker.leave(s.judge(err))
	}
	took := time.Since(start)
	if !t.local {
		t.count.sought(took)
	}
	if err != nil {
		clear(held)
		t.count.failed(OpLookup, err)
		return
	}
	r.known |= 1 << t.index
	pages := 0
	for _, n := range held[i:] {
		pages += int(n)
	}
	t.count.lookups.Add(1)
	t.count.lookupPages.Add(uint64(run.Pages()))
	t.count.hitPages.Add(uint64(pages))
	if s.cfg.Observe != nil {
		s.cfg.Observe(t.index, OpLookup, 0, took)
	}
}

// judge says what an error of a tier is to its breaker.
func (s *Stack) judge(err error) verdict {
	switch {
	case err == nil, errors.Is(err, tiers.ErrNotFound), errors.Is(err, tiers.ErrCorrupt),
		errors.Is(err, tiers.ErrBusy):
		return worked
	case s.ctx.Err() != nil, errors.Is(err, tiers.ErrClosed):
		return neither
	}
	return failed
}

// missing is the first chunk of a request's run of which neither peers nor any tier have said that
// they have all.
func (r *request) missing(list []*tier) int {
	n, ppc := r.run.Pages(), r.run.Space.Geometry.PagesPerChunk
	chunks := r.run.Chunks()
	for i := range chunks {
		want, best := pagesOf(n, ppc, i), 0
		if i < len(r.lent) {
			best = int(r.lent[i])
		}
		for _, t := range list {
			if r.known&(1<<t.index) != 0 {
				best = max(best, int(r.held[t.index][i]))
			}
		}
		if best < want {
			return i
		}
	}
	return chunks
}

// nextSeek is the next tier, from the given one on, that is to be asked by a worker of its own.
// nil: none.
func (s *Stack) nextSeek(r *request, from int) *tier {
	for _, t := range s.tiers[from:] {
		if !t.local && t.breaker.usable() {
			if r.missing(s.tiers) == r.run.Chunks() {
				return nil
			}
			return t
		}
	}
	return nil
}

// plan finds what of a request's run can be had, from where, and how much of it is worth its time.
func (s *Stack) plan(r *request) {
	g := &r.run.Space.Geometry
	n, chunks := r.run.Pages(), r.run.Chunks()
	r.have, r.source, r.borrow = slices.Grow(r.have[:0], chunks), slices.Grow(r.source[:0], chunks),
		slices.Grow(r.borrow[:0], chunks)
	r.chunks, r.pages, r.eta = 0, r.hit, 0
	var arena []uint16
	for i := range chunks {
		want := pagesOf(n, g.PagesPerChunk, i)
		best, source := 0, fromArena
		if i < len(r.lent) && r.lent[i] > 0 {
			best, source = min(int(r.lent[i]), want), fromPeers
		}
		for _, t := range s.tiers {
			if r.known&(1<<t.index) == 0 {
				continue
			}
			if have := min(int(r.held[t.index][i]), want); have > best {
				best, source = have, t.index
			}
		}
		if best < want && i > 0 {
			// It may be in the arena, behind a hole.
			if arena == nil {
				arena = make([]uint16, chunks)
				if s.engine.Contains(r.id, r.run.First, r.run.Hashes, arena) != nil {
					clear(arena)
				}
			}
			if have := min(int(arena[i]), want); have > best {
				best, source = have, fromArena
			}
		}
		if best < want && i > 0 && r.peers {
			// Behind what the arena holds peers may hold a part of a chunk, as in a conversation
			// that moves; of such Contains tells for a run's first only.
			var part [1]uint16
			s.cfg.Peers.Contains(r.run.Chunk(i), part[:])
			if have := min(int(part[0]), want); have > best {
				best, source = have, fromPeers
			}
		}
		if best == 0 || i == 0 && best <= r.part {
			break
		}
		r.have, r.source = append(r.have, uint16(best)), append(r.source, int8(source))
		r.borrow = append(r.borrow, source == fromPeers)
		if best < want {
			break
		}
	}
	var bytes [engine.MaxTiers]int64
	var arrival, gain time.Duration
	pages := r.hit - r.part
	auto := s.cfg.Promote == PromoteAuto && r.recompute > 0
	for i, have := range r.have {
		pages += int(have)
		if t := r.source[i]; t >= 0 {
			bytes[t] += int64(have) * g.PageBytes
			arrival = max(arrival, s.tiers[t].estimate.arrival(s.tiers[t].ahead.Load()+bytes[t]))
		}
		if won := time.Duration(pages-r.hit)*r.recompute - arrival; !auto || won > gain {
			r.chunks, r.pages, r.eta, gain = i+1, pages, arrival, won
		}
	}
	if auto && r.chunks < len(r.have) {
		s.count.cut.Add(1)
		s.probeTier(r)
	}
	r.wants, r.need = [engine.MaxTiers]int64{}, 0
	for i := range r.chunks {
		if r.source[i] != fromPeers {
			r.need++
		}
		if t := r.source[i]; t >= 0 {
			r.wants[t] += int64(r.have[i]) * g.PageBytes
		}
	}
}

// begin lets a request go on without its caller: to be verified, to a tier that is to be asked, or
// to be promoted; but with r.ask its caller goes on with it. false: there is no room.
func (s *Stack) begin(r *request, next *tier, q *Query) bool {
	r.keep()
	s.mu.Lock()
	if s.full(r.size) {
		s.count.refused.Add(1)
		s.unlockAndWake()
		return false
	}
	deadline := s.deadlineOf(q)
	due := s.due
	s.add(r, deadline)
	if r.ask != nil {
		r.phase, r.queued = preparing, r.since
		s.setQuiet(r, true)
		if q.Ticks && deadline >= 2*TickWithin {
			s.due, s.ticks = due, s.ticks || s.due
		}
		s.mu.Unlock() // prepareAtOnce does what is due
		return true
	}
	defer s.unlockAndWake()
	switch {
	case len(r.checks) > 0:
		s.sendVerify(r)
	case next != nil:
		s.seek(r, next)
	default:
		s.enqueue(r)
	}
	return true
}

// deadlineOf is how long a lookup may wait for tiers.
func (s *Stack) deadlineOf(q *Query) time.Duration {
	if !q.always && (q.Deadline <= 0 || q.Deadline > s.cfg.LookupDeadline) {
		return s.cfg.LookupDeadline
	}
	return q.Deadline
}

// full says whether there is no room for one more request, whose digests have so many bytes. mu is
// held.
func (s *Stack) full(bytes int64) bool {
	return s.closed || len(s.pending) >= s.cfg.MaxPending || s.bytes+bytes > s.cfg.MaxPendingBytes
}

// add takes a request into the books. mu is held.
func (s *Stack) add(r *request, deadline time.Duration) {
	r.since = time.Now()
	r.deadline = r.since.Add(deadline)
	s.pending[lookupKey{r.owner, r.lookup}] = r
	s.bytes += r.size
	heap.Push(&s.deadlines, r)
	s.due = s.due || r.place == 0
	s.open.Add(1)
}

// remove takes a request out of all books, and lets go of what it waits for. mu is held.
func (s *Stack) remove(r *request) {
	delete(s.pending, lookupKey{r.owner, r.lookup})
	s.bytes -= r.size
	heap.Remove(&s.deadlines, r.place)
	s.open.Add(-1)
	s.unwant(r)
	switch r.phase {
	case verifying:
		s.endVerifying(r)
	case walking:
		s.unwalk(r)
	}
	for _, l := range r.loads {
		if l != nil {
			s.leave(l, r)
		}
	}
	r.loads = nil
	s.setQuiet(r, false)
	r.phase = ended
}

// unwant takes a request's bytes out of what tiers are asked for. mu is held.
func (s *Stack) unwant(r *request) {
	if r.phase == queued || r.phase == preparing {
		for i, t := range s.tiers {
			t.ahead.Add(-r.wants[i])
		}
	}
}

// seek gives a request to a worker that asks a tier. mu is held.
func (s *Stack) seek(r *request, t *tier) {
	if latency := t.count.lookupTime(); latency > slowSeek {
		s.promise(r, r.asked, 2*latency)
	}
	r.phase = seeking
	t.seeks.push(r)
	t.seekable.Signal()
}

// slowSeek is how long a tier takes to say what it has before an asker is told that its lookup is
// pending for that alone. It is well below what an asker waits who is told nothing.
const slowSeek = 5 * time.Millisecond

// seekWorker asks one tier for what requests miss.
func (s *Stack) seekWorker(t *tier) {
	for {
		s.mu.Lock()
		r, ok := t.seeks.peek()
		for ; !ok && !s.closed; r, ok = t.seeks.peek() {
			t.seekable.Wait()
		}
		if s.closed {
			s.unlockAndWake()
			return
		}
		t.seeks.pop()
		s.unlockAndWake()
		s.askTier(r, t, r.missing(s.tiers))
		next := s.nextSeek(r, t.index+1)
		if next == nil {
			s.plan(r)
		}
		s.mu.Lock()
		s.proceed(r, next)
		s.unlockAndWake()
	}
}

// proceed has a request go on of which it has been asked what there is: to the tier that is to be
// asked next, or to be promoted as planned. mu is held.
func (s *Stack) proceed(r *request, next *tier) {
	switch {
	case r.phase == ended || s.closed:
	case next != nil:
		s.seek(r, next)
	case r.chunks == 0:
		s.settle(r)
	default:
		s.enqueue(r)
	}
}

// enqueue lets a request wait for its turn to be promoted. mu is held.
func (s *Stack) enqueue(r *request) {
	r.phase = queued
	if r.need == 0 {
		s.askPeers(r)
		return
	}
	for i, t := range s.tiers {
		t.ahead.Add(r.wants[i])
	}
	r.queued = time.Now()
	r.told = r.queued
	s.promise(r, r.pages, r.eta)
	s.queue.push(r)
	ring(s.kick)
}

// promise says that a request is pending. mu is held.
func (s *Stack) promise(r *request, pages int, eta time.Duration) {
	s.outbox = append(s.outbox, message{asker: r.asker, pending: true, eta: eta,
		answer: Answer{Owner: r.owner, Lookup: r.lookup, Pages: pages}})
}

// settle ends a request: its lookup keeps what it has by now, and its asker is told, unless the
// Stack is closed. mu is held.
func (s *Stack) settle(r *request) {
	if r.phase == verifying && !s.closed {
		s.lookAgain(r)
	}
	wasWalking := r.phase == walking
	s.remove(r)
	if s.closed {
		_, _ = s.engine.SettleLookup(r.owner, r.lookup, 0)
		return
	}
	pages := 0
	if wasWalking { // it waits for nothing, so that there is nothing to settle
		pages = r.walked
	} else if n, err := s.engine.SettleLookup(r.owner, r.lookup, r.asked); err == nil && n > 0 {
		pages = r.base() + n - r.first
	}
	if r.inline {
		r.settled = pages
		return
	}
	s.outbox = append(s.outbox, message{asker: r.asker, answer: Answer{r.owner, r.lookup, pages,
		time.Since(r.since)}})
}

// base is the first page that the lookup still holds or waits for: the engine frees whole chunks
// below what is trimmed. Stack.mu is held.
func (r *request) base() int {
	ppc := r.run.Space.Geometry.PagesPerChunk
	return max(r.first, r.trim/ppc*ppc)
}

const (
	// roomPoll is how often those that are queued look whether there is room for them: what workers
	// release is not told.
	roomPoll = 2 * time.Millisecond
	// roomPatience is how long a request waits for room that others have leased, unless it is known
	// that computing takes longer.
	roomPatience = 250 * time.Millisecond
	// tellEvery is how often the asker of one that waits for room, or is being verified, is told
	// that it does.
	tellEvery = 50 * time.Millisecond
)

// dispatch is the dispatcher: it answers what is late, and promotes what has its turn.
func (s *Stack) dispatch() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		s.mu.Lock()
		if s.due = false; s.closed {
			s.unlockAndWake()
			return
		}
		now := time.Now()
		for len(s.deadlines) > 0 && !s.deadlines[0].deadline.After(now) {
			if r := s.deadlines[0]; r.phase == preparing {
				// by a peerWorker, who has it for a moment yet
				r.deadline = now.Add(time.Millisecond)
				heap.Fix(&s.deadlines, 0)
				continue
			}
			s.count.late.Add(1)
			s.settle(s.deadlines[0])
		}
		wait := time.Hour
		if len(s.deadlines) > 0 {
			wait = s.deadlines[0].deadline.Sub(now)
		}
		if s.unsure > 0 {
			s.promiseUnverified(now)
			wait = min(wait, tellEvery)
		}
		if s.quiet > 0 {
			wait = min(wait, s.promiseQuiet(now))
		}
		if r := s.next(now); r != nil {
			r.phase = preparing
			s.unlockAndWake()
			s.prepare(r, false)
			continue
		}
		if _, ok := s.queue.peek(); ok {
			wait = min(wait, roomPoll)
		}
		s.unlockAndWake()
		timer.Reset(wait)
		select {
		case <-s.kick:
		case <-timer.C:
		case <-s.ctx.Done():
		}
	}
}

// next is the request whose turn it is: the first for all of which there is room, or as much as
// there ever will be. For room in the budget, which frees itself, everybody waits in order; one
// that waits for leases to end, which may take long and may be its own owner's, lets others pass,
// and in the end takes what there is. mu is held.
func (s *Stack) next(now time.Time) *request {
	s.queue.peek() // what is over goes
	var room engine.Room
	var err error
	full := false
	for i, last := s.queue.head, engine.Owner(0); i < len(s.queue.list); i++ {
		r := s.queue.list[i]
		if r.phase != queued { // over, or here from before peers failed it
			continue
		}
		if i == s.queue.head || r.owner != last {
			room, err = s.engine.PromotionRoom(r.owner)
			last = r.owner
		}
		trimmed := max(0, r.base()-r.run.First) / r.run.Space.Geometry.PagesPerChunk
		need := min(max(0, r.need-trimmed), room.Most)
		if full = full || err == nil && room.Budget < need; !full && (err != nil ||
			room.Share >= need || now.Sub(r.queued) >= s.patience(r)) {
			return r
		}
		if now.Sub(r.told) >= tellEvery {
			r.told = now
			s.promise(r, r.pages, max(r.eta, tellEvery))
		}
	}
	return nil
}

// patience is how long a request waits for room that others have leased.
func (s *Stack) patience(r *request) time.Duration {
	if s.cfg.Promote == PromoteAuto && r.recompute > 0 {
		return time.Duration(r.pages-r.hit) * r.recompute
	}
	return roomPatience
}

// prepare reserves slots for a request's chunks, and queues the loads. It does so for one request
// at a time, so that of several requests for one chunk each but the first finds the load that the
// first has begun. The dispatcher calls it, and peerWorkers (mine), each of whom goes on with the
// first of what is to be borrowed.
func (s *Stack) prepare(r *request, mine bool) {
	s.prepareMu.Lock()
	defer s.prepareMu.Unlock()
	s.prepareHeld(r, mine, nil)
}

// prepareHeld is prepare with s.prepareMu held. With b, chunks that are to be borrowed are put
// there: who lends them is its caller's matter.
func (s *Stack) prepareHeld(r *request, mine bool, b *borrowing) {
	out := s.granted[:0]
	ppc := r.run.Space.Geometry.PagesPerChunk
	var trim, skip int
	ok := false
	for again := true; again; {
		s.mu.Lock()
		trim, again = r.trim, false
		base := r.base()
		s.mu.Unlock()
		skip = max(0, base-r.run.First) / ppc
		ok = skip < r.chunks
		// What it holds may have run out, or been dropped, while it waited. If none of it is wanted
		// any more it has ended, and begins anew.
		if held := r.first + r.hit; ok && max(base, trim) < held {
			n, err := s.engine.SettleLookup(r.owner, r.lookup, r.asked)
			if ok = err == nil && base+n == held; !ok {
				s.mu.Lock()
				again = r.trim != trim
				s.mu.Unlock()
			}
		}
	}
	if ok {
		run := tail(r.run, skip)
		n := min(run.Pages(), (r.chunks-skip)*ppc)
		// Whatever goes wrong, nothing is appended, and the lookup ends with what it has.
		out, _ = s.engine.PreparePromotion(r.owner, r.lookup, engine.PromotionRun{
			FirstPage: run.First, Prev: run.Prev,
			Hashes: run.Hashes[:n*run.Space.Geometry.DigestBytes], Have: r.have[skip:r.chunks],
			Lent: r.borrowed(skip),
		}, out)
	}

	s.granted = out
	lent := 0
	for i := range out {
		lent += btoi(out[i].Foreign && out[i].State == engine.PromotionGranted)
	}
	var loads []load
	if lent > 0 {
		if b == nil {
			loads = make([]load, lent)
		} else {
			loads = slices.Grow(b.loads[:0], lent)[:lent]
		}
	}
	if b != nil {
		b.r, b.batch, b.loads = r, b.batch[:0], loads
	}
	all := make([]*load, r.chunks)
	r.loads = all

	s.mu.Lock()
	if b == nil {
		defer s.unlockAndWake()
	} else {
		defer s.mu.Unlock()
	}
	s.unwant(r)
	r.phase = loading
	r.from, r.want, r.left = skip, skip+len(out), 0
	var joined joins
	for i := range out {
		c := &out[i]
		c.Chunk += skip
		var l *load
		switch {
		case c.State == engine.PromotionJoined:
			l = s.joined(c.Promotion, &joined)
		case c.State == engine.PromotionReady:
		case c.Foreign:
			l, loads = &loads[0], loads[1:]
			*l = load{promotion: c.Promotion, transfer: tiers.Transfer{Run: r.run}, pages: c.Pages,
				foreign: true, chunk: c.Chunk}
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
			if l.foreign && c.State == engine.PromotionJoined {
				s.peers.joined.Add(1)
			}
			l.waiters = append(l.waiters, waiter{r, c.Chunk})
			r.loads[c.Chunk] = l
			r.left++
		}
	}
	for i := range out {
		l := all[out[i].Chunk]
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
	if r.phase == ended {
		return // none of it could be had after all
	}
	if r.cancelled || s.closed {
		_ = s.engine.Cancel(r.owner, r.lookup)
		s.remove(r)
		return
	}
	if !r.quiet && time.Since(r.queued) > roomPoll && r.left > 0 {
		s.promise(r, r.pages, r.eta) // it was promised from an earlier moment on
	}
	if r.trim != trim {
		_ = s.engine.Trim(r.owner, r.lookup, r.trim)
		s.trimLoads(r)
	}
	if r.left == 0 {
		s.settle(r)
	}
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// trimLoads lets go of the chunks below what a loading request still wants. mu is held.
func (s *Stack) trimLoads(r *request) {
	ppc := r.run.Space.Geometry.PagesPerChunk
	for to := min((r.base()-r.run.First)/ppc, r.want); r.from < to; r.from++ {
		s.abandon(r, r.from)
	}
}

// abandon ends a request's waiting for one chunk. mu is held.
func (s *Stack) abandon(r *request, chunk int) {
	if l := r.loads[chunk]; l != nil {
		r.loads[chunk] = nil
		r.left--
		s.leave(l, r)
	}
}

// arrived says that a chunk that a request waits for is there, or will not be, or with short not
// all of it. mu is held.
func (s *Stack) arrived(r *request, chunk int, ok, short bool) {
	r.loads[chunk] = nil
	r.left--
	if !ok || short {
		for c := chunk + 1; c < r.want; c++ {
			s.abandon(r, c)
		}
		if r.want = chunk; ok {
			r.want++
		}
	}
	switch {
	case r.left > 0:
	case r.unlent && r.peers && r.promote && r.phase == loading && !s.closed:
		s.retry(r)
	default:
		s.settle(r)
	}
}

// Trim says that a lookup's pages before firstPage are not wanted any more: its leases on chunks
// wholly below are freed, and their promotion ends.
func (s *Stack) Trim(o engine.Owner, lookup uint64, firstPage int) error {
	defer s.Sweep()
	if s.open.Load() == 0 {
		return s.engine.Trim(o, lookup, firstPage)
	}
	s.mu.Lock()
	defer s.unlockAndWake()
	r := s.pending[lookupKey{o, lookup}]
	if r != nil && r.phase == walking { // when it has been walked
		r.trim = max(r.trim, firstPage)
		return nil
	}
	err := s.engine.Trim(o, lookup, firstPage)
	if r == nil {
		return err
	}
	r.trim = max(r.trim, firstPage)
	switch {
	case r.phase == preparing:
	case r.trim >= r.first+r.asked:
		s.settle(r)
	case r.phase == loading:
		if s.trimLoads(r); r.left == 0 {
			s.settle(r)
		}
	}
	return nil
}

// Cancel ends a lookup, and frees what it holds. It will not be answered any more.
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

// end ends a request without an answer. mu is held.
func (s *Stack) end(r *request) {
	if r.phase == preparing {
		r.cancelled = true
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
