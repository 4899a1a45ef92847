package connector

import (
	"slices"
	"sync/atomic"
	"time"

	"lookaside/internal/unshared"
	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/stack"
	"lookaside/tiers/why"
)

// missCounters count where prefixes end, by reason. Any goroutine may use them.
type missCounters [why.Reasons]struct{ ends, pages atomic.Uint64 }

// add counts a prefix that ended for a reason, before so many pages that were asked for.
func (c *missCounters) add(r why.Reason, pages int) {
	c[r].ends.Add(1)
	if pages > 0 {
		c[r].pages.Add(uint64(pages))
	}
}

// snapshot returns the counts by the reasons' names. All names are there.
func (c *missCounters) snapshot() map[string]why.Count {
	out := make(map[string]why.Count, len(c))
	for r := range c {
		out[why.Reason(r).String()] = why.Count{Ends: c[r].ends.Load(), Pages: c[r].pages.Load()}
	}
	return out
}

// ended notes the end of a lookup that asked for pages from first on and found so many. It counts
// it unless another lookup for the same request was counted: a request that waits asks again, the
// ranks of an engine ask separately, and states are looked up by themselves. It returns why, which
// may say more than the stack knew.
func (s *Server) ended(ses *session, lookup uint64, first, asked, pages int, a engine.Absence,
	from stack.Sources, took time.Duration) engine.Absence {
	if pages >= asked {
		a = engine.Absence{}
	} else if a.Reason == why.NeverStored && first+pages == 0 && ses.space.otherNames.Load() {
		a.Reason = why.OtherSeed
	}
	if s.ends.answer(ses.id, lookup, pages, a, from, took) {
		s.count.misses.add(a.Reason, asked-pages)
	}
	return a
}

// naming are the fields of a space that decide only how prefixes are named.
var naming = []string{"none_hash", "hash", "hash_keys"}

// renames reports whether a pair of spaces differs only in how pages are named.
func renames(u Unshared) bool {
	return !slices.ContainsFunc(u.Causes, func(c unshared.Cause) bool {
		return !slices.Contains(naming, c.Field)
	})
}

// Renamed returns the pairs of a space with others that differ only in how pages are named.
func (s *Server) Renamed(fp tiers.Fingerprint) []Unshared {
	return slices.DeleteFunc(s.Unshared(), func(u Unshared) bool {
		return u.Ours != fp || !renames(u)
	})
}

// noteNames records for each space whether another one with pages differs from it only in how it
// names prefixes. What is stored there may be what a lookup misses here.
func (s *Server) noteNames(pairs []Unshared) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, sp := range s.spaces {
		sp.otherNames.Store(slices.ContainsFunc(pairs, func(u Unshared) bool {
			return u.Ours == sp.fingerprint && renames(u)
		}))
	}
}
