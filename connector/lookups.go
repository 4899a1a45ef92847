package connector

import (
	"errors"
	"time"

	"github.com/cespare/xxhash/v2"
	"go.uber.org/zap"

	"lookaside/ipc/wire"
	"lookaside/tiers"
)

// HandleLookup does what one message of the native lookup socket asks: it returns the session to answer and the answer,
// appended to reply, or 0 when there is nothing to say. It is called on the goroutine that owns the sockets, one message at a
// time; it does not block, and it does not allocate when all goes well. Nothing here is answered with an error: the client's
// deadline turns silence into a miss.
func (s *Server) HandleLookup(msg, reply []byte) (uint64, []byte) {
	t, err := wire.Peek(msg)
	if err != nil {
		s.count.fail(KindMalformed)
		return 0, nil
	}
	m := &s.native
	switch t {
	case wire.TypeLookup:
		if err = m.lookup.Decode(msg, &s.limits); err == nil {
			return s.lookup(&m.lookup, reply)
		}
	case wire.TypeTrim:
		if err = m.trim.Decode(msg, &s.limits); err == nil {
			s.noteLookup(s.engine.Trim(tiers.Owner(m.trim.Session), m.trim.Lookup, int(m.trim.FirstPage)))
			return 0, nil
		}
	case wire.TypeCancel:
		if err = m.cancel.Decode(msg, &s.limits); err == nil {
			s.noteLookup(s.engine.Cancel(tiers.Owner(m.cancel.Session), m.cancel.Lookup))
			return 0, nil
		}
	}
	s.count.fail(KindMalformed)
	s.log.Debug("malformed lookup message", zap.Error(err))
	return 0, nil
}

// noteLookup counts the failure of a message that has no answer. That what it names has gone already is its normal end: a
// lookup that a worker took over, or whose lease ran out.
func (s *Server) noteLookup(err error) {
	if err != nil && !errors.Is(err, tiers.ErrNotFound) && !errors.Is(err, tiers.ErrStale) {
		s.count.fail(kindOf(err))
	}
}

func (s *Server) lookup(m *wire.Lookup, reply []byte) (uint64, []byte) {
	start := time.Now()
	ses := s.findSession(m.Session)
	if ses == nil || ses.role != wire.RoleScheduler {
		s.count.fail(KindUnknownSession)
		return 0, nil
	}
	g := &ses.space.geometry
	asked := len(m.Hashes) / g.DigestBytes
	pages := 0
	switch {
	case len(m.Hashes)%g.DigestBytes != 0 || asked > s.cfg.MaxPages:
		s.count.fail(KindMalformed)
	case s.draining.Load():
		// A miss: nothing new starts here.
	default:
		var err error
		if pages, err = s.engine.Lookup(ses.owner, m.Lookup, int(m.FirstPage), m.Hashes); err != nil {
			s.count.fail(kindOf(err))
			pages = 0
		}
	}
	tokens := pages * g.PageTokens
	s.countLookup(asked, pages, tokens, start)
	r := wire.LookupResult{Lookup: m.Lookup, HitPages: uint32(pages), HitTokens: uint32(tokens)}
	return m.Session, r.Append(reply)
}

func (s *Server) countLookup(asked, pages, tokens int, start time.Time) {
	s.count.lookups.Add(1)
	s.count.lookupPages.Add(uint64(asked))
	s.count.hitPages.Add(uint64(pages))
	s.count.hitTokens.Add(uint64(tokens))
	if s.cfg.ObserveLookup != nil {
		s.cfg.ObserveLookup(tokens, time.Since(start))
	}
}

// Tick frees the leases of lookups whose deadline has passed. The goroutine of the lookup sockets calls it every little while.
func (s *Server) Tick() {
	if n := s.engine.Expire(); n > 0 {
		s.log.Debug("lookups expired", zap.Int("lookups", n))
		s.signalWanted()
	}
}

// lmcacheOwner holds the leases of LMCache's lookups. They end by cleanup or by the lease's deadline; no worker loads them.
const lmcacheOwner = tiers.Owner(1<<64 - 1)

// lmcacheState is what answers LMCache's messages. Guarded by Server.mu.
type lmcacheState struct {
	space *space // the one that lmcacheOwner is in, or nil
}

// lmcacheSpace returns the space that LMCache's hashes of that length are of, with lmcacheOwner in it, or nil when there is
// none or more than one to choose from.
func (s *Server) lmcacheSpace(digestBytes int) *space {
	s.mu.Lock()
	defer s.mu.Unlock()
	fits := func(sp *space) bool { return sp.geometry.DigestBytes == digestBytes && sp.geometry.PagesPerChunk == 1 }
	if sp := s.lmcache.space; sp != nil && sp.sessions > 0 && fits(sp) {
		return sp
	}
	var found *space
	if id := s.cfg.LMCacheEngine; id != "" {
		for key, eng := range s.engines {
			if key.id == id && fits(eng.space) {
				found = eng.space
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
	if s.lmcache.space != nil {
		s.engine.RemoveOwner(lmcacheOwner)
		s.lmcache.space = nil
	}
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
	if s.lmcache.space != nil {
		s.engine.RemoveOwner(lmcacheOwner)
		s.lmcache.space = nil
	}
}

// HandleLMCache does what one of LMCache's messages asks, and answers with the tokens that hit; a cleanup has no answer.
// Called like HandleLookup.
//
// LMCache names its lookups by strings; the engine's by numbers. The string's hash is the number: two that collide replace
// each other, which costs the earlier its leases and nothing else.
func (s *Server) HandleLMCache(m *wire.LMCacheRequest) (hitTokens uint32, answer bool) {
	lookup := xxhash.Sum64(m.ID)
	if m.Cleanup {
		s.noteLookup(s.engine.Cancel(lmcacheOwner, lookup))
		return 0, false
	}
	return uint32(s.lookupLMCache(m, lookup)), true
}

// lookupLMCache returns the tokens of the chunks that hit.
func (s *Server) lookupLMCache(m *wire.LMCacheRequest, lookup uint64) (tokens int) {
	start := time.Now()
	asked, pages := len(m.Offsets), 0
	// A tag is part of LMCache's key, but of no hash here: a chunk that was stored under another must not hit.
	if asked > 0 && !m.Tagged && !s.draining.Load() {
		if sp := s.lmcacheSpace(m.DigestBytes); sp != nil {
			var err error
			if pages, err = s.engine.Lookup(lmcacheOwner, lookup, 0, m.Hashes); err != nil {
				s.count.fail(kindOf(err))
				pages = 0
			}
		}
	}
	for _, n := range m.Offsets[:pages] {
		tokens += int(n)
	}
	s.countLookup(asked, pages, tokens, start)
	return tokens
}
