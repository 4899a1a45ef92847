package stack

import (
	"context"

	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/why"
)

// Sources counts the pages of an answer by where they lay when the lookup came: the arena, peers,
// and each tier.
type Sources struct {
	Arena, Peers int
	Tiers        [engine.MaxTiers]int
}

// add counts pages that were loaded from a tier, or lent.
func (f *Sources) add(l *load) {
	if l.foreign {
		f.Peers += l.pages
	} else if l.tier != nil {
		f.Tiers[l.tier.index] += l.pages
	}
}

// of returns the counts for an answer of so many pages: what no tier and no peer gave was in the
// arena.
func (f Sources) of(pages int) Sources {
	f.Arena = max(0, pages-f.Peers)
	for _, n := range f.Tiers {
		f.Arena = max(0, f.Arena-n)
	}
	return f
}

// whyOf returns why a query that the arena alone answered ends after so many pages.
func (s *Stack) whyOf(q *Query, digestBytes, pages int) engine.Absence {
	if (pages+1)*digestBytes > len(q.Hashes) {
		return engine.Absence{}
	}
	return s.engine.Why(q.Space, q.Hashes[pages*digestBytes:(pages+1)*digestBytes])
}

// why returns why a request's hit ends after so many pages, from its first on. The caller owns the
// request's phase, or holds s.mu.
func (s *Stack) why(r *request, pages int) (a engine.Absence) {
	if pages >= r.asked {
		return a
	}
	if r.state.trim > r.first+pages {
		a.Reason = why.EngineHad
		return a
	}
	a.Reason = r.state.cause
	if a.Reason == why.End && r.planned {
		switch {
		case pages < r.plan.pages:
			a.Reason = why.Late // room was short, or peers lent less
		case r.plan.cut:
			a.Reason = why.NotWorth
		}
	}
	if a.Reason != why.End && a.Reason != why.NeverStored {
		return a
	}
	g := &r.all.Space.Geometry
	at := (r.first + pages - r.all.First) * g.DigestBytes
	if at < 0 || at+g.DigestBytes > len(r.all.Hashes) {
		a.Reason = why.Late // what the arena held has gone since
		return a
	}
	a = s.engine.Why(r.space, r.all.Hashes[at:at+g.DigestBytes])
	if t := s.failing(r); t >= 0 && a.Tier == 0 && a.Reason == why.Evicted {
		a.Reason, a.Tier = why.Lost, uint8(t+1) // the arena had it, so that this tier may have it
	}
	return a
}

// failing returns the first tier that a request would have searched and that did not answer, or -1.
func (s *Stack) failing(r *request) int {
	if !r.use.promote || !r.planned {
		return -1
	}
	for i := range s.tiers {
		if !r.seen.knows(i) && !s.tiers[i].breaker.usable() {
			return i
		}
	}
	return -1
}

// TierNames returns the names of the tiers, nearest first.
func (s *Stack) TierNames() []string {
	names := make([]string, len(s.tiers))
	for i, t := range s.tiers {
		names[i] = t.Name
	}
	return names
}

// Where says how much of a prefix is held now, and where.
type Where struct {
	Pages int // from the first on, held without a gap by the arena or a tier
	Arena int // of these, from the first on, those that the arena holds
	// By tier: of the pages, those that it holds; -1 if it did not answer.
	Tiers []int
	Why   engine.Absence // why the prefix ends after Pages
}

// Where looks for the pages of a prefix from its first page on. It leases nothing and moves
// nothing. ctx bounds the tiers that do not know from memory what they hold. Peers are not asked.
func (s *Stack) Where(ctx context.Context, id engine.SpaceID, hashes []byte) (w Where, err error) {
	sp := s.space(id)
	if sp == nil {
		return w, tiers.ErrNotFound
	}
	g := &sp.Geometry
	run := tiers.Run{Space: sp, Hashes: hashes}
	n := run.Chunks()
	held := make([][]uint16, len(s.tiers)+1)
	for i := range held {
		held[i] = make([]uint16, n)
	}
	if err := s.engine.Contains(id, 0, hashes, held[0]); err != nil {
		return w, err
	}
	w.Tiers = make([]int, len(s.tiers))
	down := -1
	for i, t := range s.tiers {
		if !t.breaker.usable() || t.Tier.Contains(ctx, run, held[i+1]) != nil {
			clear(held[i+1])
			w.Tiers[i] = -1
			if down < 0 {
				down = i
			}
		}
	}
	whole := true // the arena holds all so far
	for c := range n {
		want := pagesOf(run.Pages(), g.PagesPerChunk, c)
		best := 0
		for i := range held {
			have := min(int(held[i][c]), want)
			best = max(best, have)
			if i > 0 && w.Tiers[i-1] >= 0 {
				w.Tiers[i-1] += have
			}
		}
		w.Pages += best
		if whole {
			w.Arena += min(int(held[0][c]), want)
			whole = int(held[0][c]) >= want
		}
		if best < want {
			break
		}
	}
	if at := w.Pages * g.DigestBytes; at < len(hashes) {
		w.Why = s.engine.Why(id, hashes[at:at+g.DigestBytes])
		if down >= 0 && w.Why.Tier == 0 && w.Why.Reason == why.Evicted {
			w.Why.Reason, w.Why.Tier = why.Lost, uint8(down+1)
		}
	}
	return w, nil
}
