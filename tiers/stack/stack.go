package stack

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"lookaside/tiers"
	"lookaside/tiers/engine"
)

// ErrOff is returned by operations on a tier whose breaker is open. The tier has failed; the Stack
// tries it again by itself.
var ErrOff = errors.New("the tier is off after failures")

var errLate = errors.New("not done in time")

// Stack is the tiers below one engine. See the package comment. Its methods may be called from any
// goroutine. Those for the lookups of one owner may be called by one goroutine at a time.
type Stack struct {
	cfg    Config
	engine *engine.Engine
	log    *zap.Logger
	tiers  []*tier
	start  time.Time

	ctx    context.Context // ends when Close begins
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup // all goroutines
	kick   chan struct{}  // wakes the dispatcher
	mail   chan struct{}  // wakes the mailer

	spaces  atomic.Pointer[[]*tiers.Space] // by SpaceID; replaced under mu
	owners  atomic.Uint64                  // names the owners of the Stack's own leases
	open    atomic.Int64                   // lookups under way
	callers atomic.Int32                   // of Lookup, that use the engine at this moment
	probe   atomic.Bool                    // a probe is under way

	count     lookupCounters
	peers     peerCounters
	patrol    patrol
	verifying estimate // of Config.Verify

	// What was used before and may be used again.
	spare          atomic.Pointer[request]   // of a lookup that ended at once
	spareBorrowing atomic.Pointer[borrowing] // of one that was completed at once

	prepareMu sync.Mutex // held while a request is prepared; taken before deliverMu and mu
	granted   []engine.PromotedChunk

	deliverMu sync.Mutex // held while Askers are called; taken before mu
	spareBox  []message

	mu     sync.Mutex // guards all fields below, and fields of other types that name it
	closed bool
	due    bool // the dispatcher must be woken
	ticks  bool // Tick must wake the dispatcher

	// The books: requests that have begun and not ended.
	pending   map[lookupKey]*request
	bytes     int64 // of their digests
	deadlines deadlines
	quiet     int // how many have promised nothing to their askers yet
	outbox    []message

	// Requests that are walked or verified.
	walks      walks
	verifies   fifo[*request] // wait for their turn
	verifiable sync.Cond
	unsure     int   // requests that are being verified
	unverified int64 // bytes of their chunks that are not verified
	// checking has the chunks that Config.Verify is called for, by handle. The channel is closed
	// when it has returned.
	checking map[uint64]chan struct{}

	// written is closed when the next call of a tier's Store ends; nil: nobody waits for that.
	written chan struct{}

	// Requests and chunks that are promoted.
	queue fifo[*request]   // wait for the dispatcher
	loads map[uint64]*load // by promotion

	// Peers.
	atPeers    fifo[*request] // wait for a peerWorker: to be prepared, or to go on with tiers
	borrows    fifo[*load]    // wait for a peerWorker
	borrowable sync.Cond      // of both
	borrowings map[*borrowing]struct{}
	unlisted   int // loads in the borrowings' batches that are not in loads
}

type lookupKey struct {
	owner  engine.Owner
	lookup uint64
}

// lookupCounters count since the start.
type lookupCounters struct {
	refused  atomic.Uint64 // limited to the arena, as too many were under way
	late     atomic.Uint64 // ended at their deadline
	cut      atomic.Uint64 // cut where computing is faster
	verified atomic.Uint64 // that waited for chunks to be verified
}

// tier is one tier, its queues and its counters.
type tier struct {
	TierConfig
	index    int
	local    bool
	breaker  breaker
	estimate estimate
	count    tierCounters
	ahead    atomic.Int64 // bytes that lookups wait for, or will, from this tier
	bell     chan struct{}
	victims  tiers.Victims // that this tier is given, or nil

	// Guarded by Stack.mu.
	seeks    fifo[*request]
	loads    fifo[*load]
	seekable sync.Cond
	loadable sync.Cond
	calm     sync.Cond // storing fell to 0
	storing  int       // calls of Store under way, with what leads to them
	paused   int       // callers of pause that have not called resume
}

// fifo is a queue. An element that becomes over while it waits is skipped by peek. push removes
// such elements when the queue has doubled.
type fifo[T interface{ over() bool }] struct {
	list []T
	head int
	mark int // length at which push removes what is over
}

// push appends an element.
func (f *fifo[T]) push(v T) {
	if len(f.list) >= max(64, f.mark) {
		n := 0
		for _, v := range f.list[f.head:] {
			if !v.over() {
				f.list[n] = v
				n++
			}
		}
		clear(f.list[n:])
		f.list, f.head, f.mark = f.list[:n], 0, 2*n
	}
	f.list = append(f.list, v)
}

// peek returns the first element that is not over.
func (f *fifo[T]) peek() (v T, ok bool) {
	for ; f.head < len(f.list); f.pop() {
		if v = f.list[f.head]; !v.over() {
			return v, true
		}
	}
	return v, false
}

// pop drops the first.
func (f *fifo[T]) pop() {
	var none T
	f.list[f.head] = none
	if f.head++; f.head == len(f.list) {
		f.list, f.head = f.list[:0], 0
	}
}

// New makes a Stack and starts its goroutines. Close ends them.
func New(cfg Config) (*Stack, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	s := &Stack{
		cfg: cfg, engine: cfg.Engine, log: cfg.Log, kick: make(chan struct{}, 1),
		mail: make(chan struct{}, 1), pending: map[lookupKey]*request{}, loads: map[uint64]*load{},
		start: time.Now(), checking: map[uint64]chan struct{}{},
		borrowings: map[*borrowing]struct{}{},
	}
	s.verifiable.L, s.borrowable.L, s.walks.walkable.L = &s.mu, &s.mu, &s.mu
	s.spaces.Store(&[]*tiers.Space{})
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	for i, c := range cfg.Tiers {
		t := &tier{TierConfig: c, index: i, local: c.Tier.Stats().Local, bell: cfg.Bell.tiers[i],
			victims: victims(cfg.Tiers, i)}
		t.seekable.L, t.loadable.L, t.calm.L = &s.mu, &s.mu, &s.mu
		log := s.log.With(zap.String("tier", c.Name))
		t.breaker = breaker{limit: c.Failures, change: func(open bool, pause time.Duration) {
			if open {
				log.Warn("tier off: it fails", zap.Duration("tried_again_in", pause),
					zap.NamedError("last", t.count.lastError()))
			} else {
				log.Info("tier on again")
				ring(t.bell) // chunks may wait to be written
			}
		}}
		s.tiers = append(s.tiers, t)
	}
	for _, t := range s.tiers {
		if !t.local {
			for range t.LookupWorkers {
				s.wg.Go(func() { s.seekWorker(t) })
			}
		}
		for range t.LoadWorkers {
			s.wg.Go(func() { s.loadWorker(t) })
		}
		for range t.StoreWorkers {
			s.wg.Go(func() { s.storeWorker(t) })
		}
		if t.victims != nil {
			s.wg.Go(func() { s.demoteWorker(t) })
		}
	}
	if cfg.Verify != nil {
		for range verifyWorkers {
			s.wg.Go(s.verifyWorker)
		}
	}
	if cfg.PatrolBytes > 0 {
		s.wg.Go(s.patroller)
	}
	if cfg.Peers != nil {
		for range peerWorkers {
			s.wg.Go(s.peerWorker)
		}
		s.wg.Go(s.returner)
		s.wg.Go(s.copier)
	}
	s.wg.Go(s.dispatch)
	s.wg.Go(s.mailer)
	s.wg.Go(s.walker)
	return s, nil
}

// Close ends all requests without an answer, and waits for the calls of tiers to return. What waits
// to be written is dropped: see Flush. Loans are returned to peers, except those that are still
// leased. After Close, lookups use the arena only. Close is idempotent. After it, the caller closes
// the tiers and then the engine.
func (s *Stack) Close() {
	s.mu.Lock()
	first := !s.closed
	s.closed = true
	if first {
		s.cancel(tiers.ErrClosed)
		s.verifiable.Broadcast()
		s.borrowable.Broadcast()
		s.walks.walkable.Broadcast()
		for _, t := range s.tiers {
			t.seekable.Broadcast()
			t.loadable.Broadcast()
			t.calm.Broadcast()
		}
	}
	s.unlockAndWake()
	s.wg.Wait()
	if !first {
		return
	}
	s.prepareMu.Lock() // a caller of Lookup may hold it,
	s.deliverMu.Lock() // and an asker may be receiving an answer
	s.mu.Lock()
	for _, r := range s.pending {
		s.remove(r)
		_, _ = s.engine.SettleLookup(r.owner, r.lookup, 0)
	}
	for p := range s.loads {
		_ = s.engine.FinishPromotion(p, false, -1)
	}
	clear(s.loads)
	for b := range s.borrowings {
		for _, l := range b.batch {
			if l.unlisted {
				s.endLoad(l, false, false)
			}
		}
	}
	clear(s.borrowings) // what peers still lend for these calls is returned
	s.unlockAndWake()
	s.deliverMu.Unlock()
	s.prepareMu.Unlock()
	if s.cfg.Peers != nil {
		s.engine.DropPeer(0)
		s.returnAll(nil)
	}
}

// OpenSpace makes a space of the engine known. It replaces a space of the same id, which was
// closed.
func (s *Stack) OpenSpace(id engine.SpaceID, sp *tiers.Space) {
	s.mu.Lock()
	defer s.unlockAndWake()
	old := *s.spaces.Load()
	list := make([]*tiers.Space, max(len(old), int(id)+1))
	copy(list, old)
	list[id] = sp
	s.spaces.Store(&list)
}

// space returns a space by its id, or nil.
func (s *Stack) space(id engine.SpaceID) *tiers.Space {
	if list := *s.spaces.Load(); int(id) < len(list) {
		return list[id]
	}
	return nil
}

// message is a call of an Asker that waits in the outbox.
type message struct {
	asker   Asker
	pending bool
	eta     time.Duration
	answer  Answer
}

// unlockAndWake releases s.mu, rings for the dispatcher if something is due, and for the mailer if
// the outbox is not empty.
func (s *Stack) unlockAndWake() {
	if len(s.outbox) > 0 {
		ring(s.mail)
	}
	if s.due {
		s.due = false
		ring(s.kick)
	}
	s.mu.Unlock()
}

// mailer delivers the outbox. It is a goroutine of its own, so that an Asker may take locks that
// its own callers of the Stack hold.
func (s *Stack) mailer() {
	for {
		select {
		case <-s.mail:
		case <-s.ctx.Done():
			return
		}
		s.deliver()
	}
}

// deliver calls the askers, in order. The caller holds no lock.
func (s *Stack) deliver() {
	s.deliverMu.Lock()
	defer s.deliverMu.Unlock()
	s.mu.Lock()
	out := s.outbox
	if s.outbox = s.spareBox; s.closed {
		out = nil
	}
	s.unlockAndWake()
	for i := range out {
		if m := &out[i]; m.pending {
			m.asker.LookupPending(m.answer.Owner, m.answer.Lookup, m.answer.Pages, m.eta)
		} else {
			m.asker.LookupAnswered(m.answer)
		}
	}
	clear(out)
	s.spareBox = out[:0]
}

// tail returns a run from its i-th chunk on.
func tail(r tiers.Run, i int) tiers.Run {
	if i == 0 {
		return r
	}
	g := &r.Space.Geometry
	at := i * g.PagesPerChunk * g.DigestBytes
	return tiers.Run{Space: r.Space, First: r.First + i*g.PagesPerChunk,
		Prev: r.Hashes[at-g.DigestBytes : at], Hashes: r.Hashes[at:]}
}

// pagesOf returns how many pages the i-th chunk of a run of n pages has.
func pagesOf(n, ppc, i int) int { return min(ppc, n-i*ppc) }
