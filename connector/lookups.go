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
)

// HandleLookup does what one message of the native lookup socket asks: it returns the session to
// answer and the answer, appended to reply, or 0 when there is nothing to say. It is called on the
// goroutine that owns the sockets, one message at a time; it does not block, and it does not
// allocate when all goes well. Nothing here is answered with an error: the client's deadline turns
// silence into a miss.
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
			return s.lookup(&m.lookup, reply)
		}
	case wire.TypeTrim:
		if err = m.trim.Decode(msg, &s.limits); err == nil {
			if ses := s.asker(m.trim.Session, m.trim.Secret); ses != nil {
				s.noteLookup(s.stack.Trim(ses.owner, m.trim.Lookup, int(m.trim.FirstPage)))
			}
			return 0, nil
		}
	case wire.TypeCancel:
		if err = m.cancel.Decode(msg, &s.limits); err == nil {
			if ses := s.asker(m.cancel.Session, m.cancel.Secret); ses != nil {
				s.noteLookup(s.stack.Cancel(ses.owner, m.cancel.Lookup))
			}
			return 0, nil
		}
	}
	s.count.fail(KindMalformed)
	s.log.Debug("malformed lookup message", zap.Error(err))
	return 0, nil
}

// noteLookup counts the failure of a message that has no answer. That what it names has gone
// already is its normal end: a lookup that a worker took over, or whose lease ran out.
func (s *Server) noteLookup(err error) {
	if err != nil && !errors.Is(err, tiers.ErrNotFound) && !errors.Is(err, tiers.ErrStale) {
		s.count.fail(kindOf(err))
	}
}

// asker returns the scheduler's session that a lookup message is of, or nil, which is counted. ZMQ
// does not tell who sends a message, and a session's number is no secret: the message has to prove
// that it is the session's by the secret that the handshake gave it.
func (s *Server) asker(session uint64, secret []byte) *session {
	ses := s.findSession(session)
	switch {
	case ses == nil || ses.role != wire.RoleScheduler:
		s.count.fail(KindUnknownSession)
	case subtle.ConstantTimeCompare(secret, ses.secret) == 0:
		s.count.fail(KindForged)
	default:
		return ses
	}
	return nil
}

func (s *Server) lookup(m *wire.Lookup, reply []byte) (uint64, []byte) {
	start := time.Now()
	ses := s.asker(m.Session, m.Secret)
	if ses == nil {
		return 0, nil
	}
	g := &ses.space.geometry
	// what is beyond is not held, as far as the asker is told
	asked := min(len(m.Hashes)/g.DigestBytes, s.cfg.MaxPages)
	s.count.lookups.Add(1)
	s.count.lookupPages.Add(uint64(asked))
	pages := 0
	switch {
	case len(m.Hashes)%g.DigestBytes != 0 || len(m.Prev) != 0 && len(m.Prev) != g.DigestBytes:
		s.count.fail(KindMalformed)
	case s.draining.Load():
		// A miss: nothing new starts here.
	default:
		q := &s.native.query
		*q = stack.Query{
			Owner: ses.owner, Lookup: m.Lookup, Space: ses.space.id, FirstPage: int(m.FirstPage),
			Prev: m.Prev, Hashes: m.Hashes[:asked*g.DigestBytes],
			Deadline:  time.Duration(m.DeadlineMs) * time.Millisecond,
			Recompute: time.Duration(m.RecomputeUs) * time.Microsecond,
			Ticks:     true,
		}
		n, done, err := s.stack.Lookup(q, s)
		if err == nil && !done {
			s.lookups.TickWithin(stack.TickWithin)
			return 0, nil
		}
		if pages = n; err != nil {
			s.count.fail(kindOf(err))
			pages = 0
		}
	}
	tokens := pages * g.PageTokens
	s.countAnswer(pages, tokens, time.Since(start))
	r := wire.LookupResult{Lookup: m.Lookup, HitPages: uint32(pages), HitTokens: uint32(tokens)}
	return m.Session, r.Append(reply)
}

func (s *Server) countAnswer(pages, tokens int, took time.Duration) {
	s.count.hitPages.Add(uint64(pages))
	s.count.hitTokens.Add(uint64(tokens))
	if s.cfg.ObserveLookup != nil {
		s.cfg.ObserveLookup(tokens, took)
	}
}

// LookupPending implements stack.Asker: what is asked for is on its way from a tier.
func (s *Server) LookupPending(o engine.Owner, lookup uint64, pages int, eta time.Duration) {
	if o == lmcacheOwner {
		return // its protocol has no such message
	}
	s.count.promised.Add(1)
	m := wire.LookupPending{Lookup: lookup, Pages: uint32(pages),
		EtaMs: uint32(min((eta + time.Millisecond - 1).Milliseconds(), math.MaxUint32))}
	s.lookups.Post(uint64(o), m.Append(nil))
}

// LookupAnswered implements stack.Asker: a lookup that waited for a tier has its answer.
func (s *Server) LookupAnswered(a stack.Answer) {
	if a.Owner == lmcacheOwner {
		s.lmcacheAnswered(a)
		return
	}
	ses := s.findSession(uint64(a.Owner))
	if ses == nil {
		return // it has left, and with it the lookup
	}
	tokens := a.Pages * ses.space.geometry.PageTokens
	s.countAnswer(a.Pages, tokens, a.Took)
	m := wire.LookupResult{Lookup: a.Lookup, HitPages: uint32(a.Pages), HitTokens: uint32(tokens)}
	s.lookups.Post(ses.id, m.Append(nil))
}

// Tick frees the leases of lookups whose deadline has passed, and sees to those that are waiting.
// The goroutine of the lookup sockets calls it every little while.
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

// lmcacheState is what answers LMCache's messages.
type lmcacheState struct {
	space *space // the one that lmcacheOwner is in, or nil; guarded by Server.mu

	// mu is held while a lookup is asked, so that an answer from another goroutine finds it among
	// those that wait. Server.mu is not taken under it.
	mu      sync.Mutex
	waiting map[uint64]*lmcacheWait // by lookup; the stack bounds them
}

// lmcacheWait is a lookup of LMCache's that waits for a tier.
type lmcacheWait struct {
	id        []byte
	multipart bool
	offsets   []uint32
}

// lmcacheSpace returns the space that LMCache's hashes of that length are of, with lmcacheOwner in
// it, or nil when there is none or more than one to choose from.
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

// dropLMCache ends all that LMCache asked. s.mu is held.
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

// HandleLMCache does what one of LMCache's messages asks, and answers with the tokens that hit; a
// cleanup has no answer, and what waits for a tier has it later. Called like HandleLookup.
//
// LMCache names its lookups by strings; the engine's by numbers. The string's hash is the number:
// two that collide replace each other, which costs the earlier its leases and nothing else.
func (s *Server) HandleLMCache(m *wire.LMCacheRequest) (hitTokens uint32, answer bool) {
	start := time.Now()
	lookup := xxhash.Sum64(m.ID)
	if m.Cleanup {
		s.forgetLMCache(lookup)
		s.noteLookup(s.stack.Cancel(lmcacheOwner, lookup))
		return 0, false
	}
	asked, pages := min(len(m.Offsets), s.cfg.MaxPages), 0
	m.Hashes, m.Offsets = m.Hashes[:asked*m.DigestBytes], m.Offsets[:asked]
	s.count.lookups.Add(1)
	s.count.lookupPages.Add(uint64(asked))
	// A tag is part of LMCache's key, but of no hash here: a chunk that was stored under another
	// must not hit.
	if asked > 0 && !m.Tagged && !s.draining.Load() {
		if sp := s.lmcacheSpace(m.DigestBytes); sp != nil {
			n, done := s.lookupLMCache(m, lookup, sp.id)
			if !done {
				return 0, false
			}
			pages = n
		}
	}
	tokens := tokensOf(m.Offsets[:pages])
	s.countAnswer(pages, tokens, time.Since(start))
	return uint32(tokens), true
}

func (s *Server) lookupLMCache(m *wire.LMCacheRequest, lookup uint64,
	space engine.SpaceID) (pages int, done bool) {
	l := &s.lmcache
	l.mu.Lock()
	defer l.mu.Unlock()
	q := &s.native.query
	*q = stack.Query{Owner: lmcacheOwner, Lookup: lookup, Space: space, Hashes: m.Hashes,
		Ticks: true}
	pages, done, err := s.stack.Lookup(q, s)
	if err != nil {
		s.count.fail(kindOf(err))
		pages = 0
	}
	delete(l.waiting, lookup) // an earlier one of that name
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

// forgetLMCache takes a lookup of LMCache's from those that wait, and returns it, or nil.
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
		return // it was cleaned up
	}
	tokens := tokensOf(w.offsets[:min(a.Pages, len(w.offsets))])
	s.countAnswer(a.Pages, tokens, a.Took)
	s.lookups.PostLMCache(w.id, w.multipart, uint32(tokens))
}

// tokensOf is the tokens of chunks.
func tokensOf(offsets []uint32) (tokens int) {
	for _, n := range offsets {
		tokens += int(n)
	}
	return tokens
}
