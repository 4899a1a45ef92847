package stack

import (
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
