package connector

import (
	"bytes"
	"crypto/subtle"
	"errors"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/cespare/xxhash/v2"
	"go.uber.org/zap"

	"lookaside/ipc/wire"
	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/stack"
	"lookaside/tiers/tenant"
	"lookaside/tiers/why"
)

// HandleLookup implements ipc.Handler for one message of the native lookup socket. It returns the
// session to reply to and the reply, appended to reply; or 0 if there is no reply. The goroutine
// that owns the sockets calls it. It does not block, and allocates nothing unless there is an
// error, or advice that takes long. No error is sent: the client's deadline turns silence into a
// miss.
func (s *Server) HandleLookup(msg, reply []byte) (uint64, []byte) {
	t, err := wire.Peek(msg)
	if err != nil {
		s.count.fail(KindMalformed)
		return 0, nil
	}
	m := &s.native
	switch t {
	case wire.TypeLookup:
		if err = m.lookup.Decode(msg, &s.lookupLimits); err == nil {
			return s.lookup(&m.lookup, msg, reply)
		}
	case wire.TypeTrim:
		if err = m.trim.Decode(msg, &s.limits); err == nil {
			if ses := s.asker(m.trim.Session, m.trim.Secret); ses != nil &&
				!s.holdLookup(ses.id, m.trim.Lookup, msg, false) {
				s.noteLookup(s.stack.Trim(ses.owner, m.trim.Lookup, int(m.trim.FirstPage)))
			}
			return 0, nil
		}
	case wire.TypeCancel:
		if err = m.cancel.Decode(msg, &s.limits); err == nil {
			if ses := s.asker(m.cancel.Session, m.cancel.Secret); ses != nil &&
				!s.holdLookup(ses.id, m.cancel.Lookup, msg, false) {
				s.noteLookup(s.stack.Cancel(ses.owner, m.cancel.Lookup))
			}
			return 0, nil
		}
	case wire.TypeAdvise:
		if err = m.advise.Decode(msg, &s.lookupLimits); err == nil {
			s.advise(&m.advise)
			return 0, nil
		}
	}
	s.count.fail(KindMalformed)
	s.log.Debug("malformed lookup message", zap.Error(err))
	return 0, nil
}

// noteLookup counts the error of a message without a reply. It does not count a lookup that is gone
// already, because a worker may have taken it over or its lease may have expired.
func (s *Server) noteLookup(err error) {
	if err != nil && !errors.Is(err, tiers.ErrNotFound) && !errors.Is(err, tiers.ErrStale) {
		s.count.fail(kindOf(err))
	}
}

// asker returns the scheduler's session that has sent a lookup message. If the session is not
// connected or the secret is wrong, it counts that and returns nil. The secret is needed because
// ZMQ does not tell who sends a message, and a session's id is no secret.
func (s *Server) asker(session uint64, secret []byte) *session {
	ses := s.findSession(session)
	switch {
	case ses == nil || ses.role != wire.RoleScheduler:
		s.count.fail(KindUnknownSession)
	case subtle.ConstantTimeCompare(secret, ses.secret) == 0:
		s.count.fail(KindForged)
	default:
		ses.hearLookup()
		return ses
	}
	return nil
}

// lookup handles a lookup, whose encoding is msg.
func (s *Server) lookup(m *wire.Lookup, msg, reply []byte) (uint64, []byte) {
	start := time.Now()
	ses := s.asker(m.Session, m.Secret)
	if ses == nil {
		return 0, nil
	}
	if m.RecomputeUs > 0 {
		ses.recomputeUs.Store(m.RecomputeUs)
	}
	g := &ses.space.geometry
	// Pages beyond MaxPages count as not held.
	asked := min(len(m.Hashes)/g.DigestBytes, s.cfg.MaxPages)
	s.count.lookups.Add(1)
	s.count.lookupPages.Add(uint64(asked))
	who := s.cfg.Tenants.Find(m.Tenant)
	s.cfg.Tenants.Asked(who, asked*g.PageTokens)
	s.ends.begin(ses, m, asked, start)
	pages := 0
	q := &s.native.query
	q.Why = engine.Absence{}
	q.Why.Reason = why.Late // unless the stack is asked
	switch {
	case len(m.Hashes)%g.DigestBytes != 0 || len(m.Prev) != 0 && len(m.Prev) != g.DigestBytes:
		s.count.fail(KindMalformed)
	case s.draining.Load():
		// A miss: nothing new may start.
	case s.mode.Load() >= modeQuiet:
		n, held, err := s.lookupQuiet(ses, m, asked, msg)
		if held {
			return 0, nil
		}
		if pages = n; err != nil {
			s.count.fail(kindOf(err))
			pages = 0
		}
	default:
		*q = stack.Query{
			Owner: ses.owner, Lookup: m.Lookup, Space: ses.space.id, FirstPage: int(m.FirstPage),
			Prev: m.Prev, Hashes: m.Hashes[:asked*g.DigestBytes],
			Deadline:  time.Duration(m.DeadlineMs) * time.Millisecond,
			Recompute: time.Duration(m.RecomputeUs) * time.Microsecond,
			Tenant:    who,
			Ticks:     true,
		}
		n, done, err := s.stack.Lookup(q, s)
		if err == nil {
			s.watchLookup(ses.space, q, n, done)
			if !done {
				s.lookups.TickWithin(stack.TickWithin)
				return 0, nil
			}
		}
		if pages = n; err != nil {
			s.count.fail(kindOf(err))
			pages = 0
		}
	}
	tokens := pages * g.PageTokens
	took := time.Since(start)
	s.countWait(ses, took)
	s.countAnswer(who, pages, tokens, took)
	a := s.ended(ses, m.Lookup, int(m.FirstPage), asked, pages, q.Why,
		stack.Sources{Arena: pages}, took)
	r := wire.LookupResult{Lookup: m.Lookup, HitPages: uint32(pages), HitTokens: uint32(tokens),
		InMemory: pages > 0 && s.inMemory(ses.owner, m.Lookup), Reason: uint8(a.Reason),
		TookUs: micros(took), HitBytes: uint64(pages) * uint64(g.PageBytes)}
	return m.Session, r.Append(reply)
}

// countWait counts the time that an engine has waited for a lookup.
func (s *Server) countWait(ses *session, took time.Duration) {
	if ses.leads.Load() {
		s.count.lookupNanos.Add(int64(took))
	}
}

// micros returns a time in µs, as messages have it: at least 1 unless it is 0.
func micros(d time.Duration) uint32 {
	return uint32(min((d + time.Microsecond - 1).Microseconds(), math.MaxUint32))
}

// watchLookup notes a lookup that began: what the arena holds of it is known.
func (s *Server) watchLookup(sp *space, q *stack.Query, held int, done bool) {
	s.cfg.Demand.Lookup(sp.fingerprint, &sp.geometry, uint64(q.Owner), q.Lookup, q.FirstPage,
		q.Prev, q.Hashes, held, done)
}

// inMemory reports whether all that a lookup has leased lies in the arena, in memory.
func (s *Server) inMemory(o engine.Owner, lookup uint64) bool {
	return s.frail.Load() == 0 && s.engine.InArena(o, lookup)
}

func (s *Server) countAnswer(who tenant.ID, pages, tokens int, took time.Duration) {
	s.cfg.Tenants.Hit(who, tokens)
	s.count.hitPages.Add(uint64(pages))
	s.count.hitTokens.Add(uint64(tokens))
	if s.cfg.ObserveLookup != nil {
		s.cfg.ObserveLookup(tokens, took)
	}
}

// LookupPending implements stack.Asker. It sends the scheduler a LookupPending.
func (s *Server) LookupPending(o engine.Owner, lookup uint64, pages int, eta time.Duration) {
	if o == lmcacheOwner {
		return // its protocol has no such message
	}
	if pages > 0 {
		s.count.promised.Add(1)
	}
	m := wire.LookupPending{Lookup: lookup, Pages: uint32(pages),
		EtaMs: uint32(min((eta + time.Millisecond - 1).Milliseconds(), math.MaxUint32))}
	s.lookups.Post(uint64(o), m.Append(nil))
}

// LookupAnswered implements stack.Asker. It sends the result of a lookup that waited for a tier.
func (s *Server) LookupAnswered(a stack.Answer) {
	s.cfg.Demand.Answered(uint64(a.Owner), a.Lookup, a.Pages)
	if a.Owner == lmcacheOwner {
		s.lmcacheAnswered(a)
		return
	}
	ses := s.findSession(uint64(a.Owner))
	if ses == nil {
		return // the session has ended, and with it the lookup
	}
	g := ses.space.geometry
	tokens := a.Pages * g.PageTokens
	s.countWait(ses, a.Took)
	s.countAnswer(a.Tenant, a.Pages, tokens, a.Took)
	x := s.ended(ses, a.Lookup, a.First, a.Asked, a.Pages, a.Why, a.From, a.Took)
	m := wire.LookupResult{Lookup: a.Lookup, HitPages: uint32(a.Pages), HitTokens: uint32(tokens),
		InMemory: a.Pages > 0 && s.inMemory(a.Owner, a.Lookup), Reason: uint8(x.Reason),
		TookUs: micros(a.Took), BeganUs: micros(a.Began), Sources: s.appendSources(&a.From, nil),
		HitBytes: uint64(a.Pages) * uint64(g.PageBytes)}
	s.lookups.Post(ses.id, m.Append(nil))
}

// Tick implements ipc.Handler. It frees the leases of lookups whose deadline has passed, and calls
// the stack's Tick for those that wait.
func (s *Server) Tick() {
	s.stack.Tick()
	if n := s.engine.Expire(); n > 0 {
		s.log.Debug("lookups expired", zap.Int("lookups", n))
		s.signalWanted()
	}
}

// lmcacheOwner holds the leases of LMCache's lookups. They end by cleanup or by the lease's
// deadline; no worker loads them.
const lmcacheOwner = engine.Owner(1<<64 - 1)

// lmcacheState is the state for LMCache's lookups.
type lmcacheState struct {
	space *space // that lmcacheOwner is in, or nil; guarded by Server.mu

	// mu is held during a call of the stack's Lookup, so that a result from another goroutine finds
	// the lookup in waiting. Server.mu is not taken under it.
	mu      sync.Mutex
	waiting map[uint64]*lmcacheWait // by lookup; bounded by the stack; guarded by mu
}

// lmcacheWait is a lookup of LMCache that waits for a tier.
type lmcacheWait struct {
	id        []byte
	multipart bool
	offsets   []uint32
}

// lmcacheSpace returns the space for LMCache's hashes of a length, with lmcacheOwner in it. It
// returns nil if no space fits or if it cannot choose between several.
func (s *Server) lmcacheSpace(digestBytes int) *space {
	s.mu.Lock()
	defer s.mu.Unlock()
	fits := func(sp *space) bool {
		return sp.geometry.DigestBytes == digestBytes &&
			sp.geometry.PagesPerChunk == 1
	}
	if sp := s.lmcache.space; sp != nil && sp.sessions > 0 && fits(sp) {
		return sp
	}
	var found *space
	if id := s.cfg.LMCacheEngine; id != "" {
		for key, inst := range s.instances {
			if key.id == id && fits(inst.space) {
				found = inst.space
			}
		}
	} else {
		for _, sp := range s.spaces {
			if fits(sp) {
				if found != nil {
					return nil
				}
				found = sp
			}
		}
	}
	if found == s.lmcache.space {
		return found
	}
	s.dropLMCache()
	if found != nil {
		if err := s.engine.AddOwner(lmcacheOwner, found.id); err != nil {
			s.count.fail(kindOf(err))
			return nil
		}
		s.lmcache.space = found
	}
	return found
}

func (s *Server) closeLMCache() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dropLMCache()
}

// dropLMCache ends all lookups of LMCache. The caller holds s.mu.
func (s *Server) dropLMCache() {
	if s.lmcache.space == nil {
		return
	}
	s.stack.RemoveOwner(lmcacheOwner)
	s.lmcache.space = nil
	s.lmcache.mu.Lock()
	defer s.lmcache.mu.Unlock()
	clear(s.lmcache.waiting)
}

// HandleLMCache implements ipc.Handler for one of LMCache's messages. It returns the tokens that
// hit and true, or false if there is no reply now: to a cleanup, or to a lookup that waits for a
// tier.
//
// LMCache names its lookups by strings, the engine by numbers. The number is the string's hash. If
// two collide, the later replaces the earlier, which loses its leases and nothing else.
func (s *Server) HandleLMCache(m *wire.LMCacheRequest) (hitTokens uint32, answer bool) {
	start := time.Now()
	lookup := xxhash.Sum64(m.ID)
	if m.Cleanup {
		s.forgetLMCache(lookup)
		s.noteLookup(s.stack.Cancel(lmcacheOwner, lookup))
		return 0, false
	}
	asked, pages, reason := min(len(m.Offsets), s.cfg.MaxPages), 0, why.NeverStored
	m.Hashes, m.Offsets = m.Hashes[:asked*m.DigestBytes], m.Offsets[:asked]
	s.cfg.Tenants.Asked(tenant.None, tokensOf(m.Offsets)) // its messages name nobody
	s.count.lookups.Add(1)
	s.count.lookupPages.Add(uint64(asked))
	// A tag is part of LMCache's keys, but not of the hashes. A chunk that was stored with another
	// tag must not hit.
	if asked > 0 && !m.Tagged && !s.draining.Load() {
		if sp := s.lmcacheSpace(m.DigestBytes); sp != nil {
			n, done := s.lookupLMCache(m, lookup, sp)
			if !done {
				return 0, false
			}
			pages = n
			reason = s.native.query.Why.Reason
		}
	}
	if pages >= asked {
		reason = why.End
	}
	s.count.misses.add(reason, asked-pages)
	tokens := tokensOf(m.Offsets[:pages])
	s.countAnswer(tenant.None, pages, tokens, time.Since(start))
	return uint32(tokens), true
}

func (s *Server) lookupLMCache(m *wire.LMCacheRequest, lookup uint64,
	sp *space) (pages int, done bool) {
	l := &s.lmcache
	l.mu.Lock()
	defer l.mu.Unlock()
	q := &s.native.query
	*q = stack.Query{Owner: lmcacheOwner, Lookup: lookup, Space: sp.id, Hashes: m.Hashes,
		Ticks: true}
	var err error
	if s.mode.Load() >= modeQuiet {
		_ = s.stack.Cancel(lmcacheOwner, lookup)
		pages, err = s.engine.Lookup(lmcacheOwner, lookup, 0, m.Hashes)
		done = true
	} else {
		pages, done, err = s.stack.Lookup(q, s)
	}
	if err != nil {
		s.count.fail(kindOf(err))
		pages = 0
	} else {
		s.watchLookup(sp, q, pages, done)
	}
	delete(l.waiting, lookup) // an earlier lookup of the same name
	if !done {
		s.lookups.TickWithin(stack.TickWithin)
		if l.waiting == nil {
			l.waiting = make(map[uint64]*lmcacheWait)
		}
		l.waiting[lookup] = &lmcacheWait{id: bytes.Clone(m.ID), multipart: m.Multipart,
			offsets: slices.Clone(m.Offsets)}
	}
	return pages, done
}

// forgetLMCache removes a lookup of LMCache from those that wait, and returns it or nil.
func (s *Server) forgetLMCache(lookup uint64) *lmcacheWait {
	l := &s.lmcache
	l.mu.Lock()
	defer l.mu.Unlock()
	w := l.waiting[lookup]
	delete(l.waiting, lookup)
	return w
}

func (s *Server) lmcacheAnswered(a stack.Answer) {
	w := s.forgetLMCache(a.Lookup)
	if w == nil {
		return // the lookup was cleaned up
	}
	tokens := tokensOf(w.offsets[:min(a.Pages, len(w.offsets))])
	s.countAnswer(tenant.None, a.Pages, tokens, a.Took)
	s.count.misses.add(a.Why.Reason, a.Asked-a.Pages)
	s.lookups.PostLMCache(w.id, w.multipart, uint32(tokens))
}

// tokensOf returns the sum of the tokens of chunks.
func tokensOf(offsets []uint32) (tokens int) {
	for _, n := range offsets {
		tokens += int(n)
	}
	return tokens
}
