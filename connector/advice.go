package connector

import (
	"bytes"
	"context"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"lookaside/ipc/wire"
	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/tenant"
)

// Advice of schedulers: how chunks that are held should be kept, and what to bring up from tiers.
// There is no reply, so all that becomes of it is counted.
//
// Short advice about the arena is followed at once. What takes longer, prefetches and advice about
// many chunks, is done by other goroutines. Their number is bounded, and so is what waits for them;
// advice beyond that is dropped.

const (
	// inlineChunks is how many chunks may be advised about on the goroutine of the lookups. One
	// takes some 100 ns.
	inlineChunks = 512
	// maxAdvices bounds the advice that waits or is being followed, maxFollowing what is being
	// followed at a time.
	maxAdvices   = 64
	maxFollowing = 4
	// prefetchPatience bounds one prefetch.
	prefetchPatience = time.Minute
)

// advices is the advice that is followed beside the lookups.
type advices struct {
	open int           // at most maxAdvices; guarded by Server.mu
	turn chan struct{} // has room for maxFollowing
	wg   sync.WaitGroup
}

// adviceCounters count advice by its action, wire.AdviseRetain first.
type adviceCounters struct {
	received   [4]atomic.Uint64 // messages
	dropped    atomic.Uint64    // messages, because of too many or because the sidecar is leaving
	prefetched atomic.Uint64    // pages that prefetches found in the arena, or brought there
}

// AdviceCount counts what schedulers advised.
type AdviceCount struct {
	Retain          uint64 `json:"retain" doc:"Prefixes to retain."`
	Pin             uint64 `json:"pin" doc:"Prefixes to pin."`
	Prefetch        uint64 `json:"prefetch" doc:"Prefixes to bring up from the tiers."`
	Demote          uint64 `json:"demote" doc:"Prefixes to write to the tiers and then evict first."`
	Dropped         uint64 `json:"dropped" doc:"Of all of these: not followed, because too many came at once or the sidecar was ending."`
	PrefetchedPages uint64 `json:"prefetched_pages" doc:"Pages that prefetches brought into the arena, or found there."`
}

func (c *adviceCounters) snapshot() AdviceCount {
	return AdviceCount{Retain: c.received[0].Load(), Pin: c.received[1].Load(),
		Prefetch: c.received[2].Load(), Demote: c.received[3].Load(), Dropped: c.dropped.Load(),
		PrefetchedPages: c.prefetched.Load()}
}

// advise follows a scheduler's advice, or has it followed. The goroutine of the lookups calls it.
func (s *Server) advise(m *wire.Advise) {
	ses := s.asker(m.Session, m.Secret)
	if ses == nil {
		return
	}
	s.count.advice.received[m.Action-wire.AdviseRetain].Add(1)
	g := ses.space.geometry
	a := advice{space: ses.space.id, g: g, first: int(m.FirstPage), hashes: m.Hashes,
		who: s.cfg.Tenants.Find(m.Tenant), action: m.Action,
		hints: hintsOf(m.Priority, m.Ms, 0)}
	if m.Action == wire.AdvisePin {
		a.hints = hintsOf(0, 0, m.Ms)
	}
	if len(a.hashes)%g.DigestBytes != 0 || len(m.Prev) != 0 && len(m.Prev) != g.DigestBytes ||
		m.Action == wire.AdvisePrefetch && a.first != 0 { // which begins at a prefix's beginning
		s.count.fail(KindMalformed)
		return
	}
	// Pages beyond MaxPages count as not held.
	a.hashes = a.hashes[:min(len(a.hashes)/g.DigestBytes, s.cfg.MaxPages)*g.DigestBytes]
	if m.Action == wire.AdvisePrefetch || len(a.hashes) > a.window(inlineChunks) {
		s.followLater(&a)
		return
	}
	if s.beginAdvice() {
		defer s.changing.Add(-1)
		s.follow(context.Background(), &a)
	}
}

// hintsOf returns the engine's hints for those of a message.
func hintsOf(priority uint8, retainMs, pinMs uint32) engine.Hints {
	return engine.Hints{Priority: priority, Retain: time.Duration(retainMs) * time.Millisecond,
		Pin: time.Duration(pinMs) * time.Millisecond}
}

// advice is one Advise.
type advice struct {
	space  engine.SpaceID
	g      tiers.Geometry
	who    tenant.ID
	first  int
	hashes []byte
	action wire.Action
	hints  engine.Hints
}

// window returns the length of the hashes of so many chunks from a.first on.
func (a *advice) window(chunks int) int {
	return (chunks*a.g.PagesPerChunk - a.first%a.g.PagesPerChunk) * a.g.DigestBytes
}

// beginAdvice reports whether advice may be followed now: it changes the arena. If so, the caller
// counts s.changing down when it has been. Otherwise the advice is counted as dropped.
func (s *Server) beginAdvice() bool {
	s.changing.Add(1)
	if s.mode.Load() == modeServing && !s.draining.Load() {
		return true
	}
	s.changing.Add(-1)
	s.count.advice.dropped.Add(1)
	return false
}

// engineAdvice is the engine's advice for each action, wire.AdviseRetain first. A prefetch is none.
var engineAdvice = [...]engine.Advice{engine.AdviseRetain, engine.AdvisePin, 0,
	engine.AdviseDemote}

// follow advises the engine, some chunks at a time, until the first that is not held.
func (s *Server) follow(ctx context.Context, a *advice) {
	for ctx.Err() == nil && len(a.hashes) > 0 {
		part := a.hashes[:min(len(a.hashes), a.window(inlineChunks))]
		pages, err := s.engine.Advise(a.space, a.who, a.first, part,
			engineAdvice[a.action-wire.AdviseRetain], a.hints)
		s.noteLookup(err)
		if err != nil || pages*a.g.DigestBytes < len(part) {
			return
		}
		a.first, a.hashes = a.first+pages, a.hashes[len(part):]
	}
}

// followLater has advice followed on a goroutine of its own. It ends early when the sidecar is to
// end or to hand over.
func (s *Server) followLater(a *advice) {
	x := &s.advices
	s.mu.Lock()
	changed, room := s.modeChanged, !s.closed && x.open < maxAdvices
	if room {
		x.open++
		x.wg.Add(1)
	}
	s.mu.Unlock()
	if !room {
		s.count.advice.dropped.Add(1)
		return
	}
	end := func() {
		s.mu.Lock()
		x.open--
		s.mu.Unlock()
		x.wg.Done()
	}
	if !s.beginAdvice() {
		end()
		return
	}
	later := *a
	later.hashes = bytes.Clone(a.hashes)
	go func() {
		defer end()
		defer s.changing.Add(-1)
		s.followInTurn(changed, &later)
	}()
}

// followInTurn follows advice once fewer than maxFollowing others are being followed.
func (s *Server) followInTurn(changed <-chan struct{}, a *advice) {
	ctx, cancel := context.WithTimeout(context.Background(), prefetchPatience)
	defer cancel()
	s.advices.wg.Go(func() {
		select {
		case <-changed:
		case <-s.drains:
		case <-ctx.Done():
		}
		cancel()
	})
	select {
	case s.advices.turn <- struct{}{}:
		defer func() { <-s.advices.turn }()
	case <-ctx.Done():
		s.count.advice.dropped.Add(1)
		return
	}
	if a.action != wire.AdvisePrefetch {
		s.follow(ctx, a)
		return
	}
	pages, err := s.stack.Prefetch(ctx, a.space, a.who, a.hashes)
	s.count.advice.prefetched.Add(uint64(pages))
	if err != nil && ctx.Err() == nil {
		s.noteLookup(err)
		s.log.Debug("a prefetch failed", zap.Error(err))
	}
}
