// Package simulate replays the requests of a trace through the eviction policies of package policy.
// The result shows how much of what is requested again each policy keeps, in how much memory. It
// keeps only names: the books of an engine without an engine.
package simulate

import (
	"cmp"
	"context"

	"lookaside/tiers/policy"
)

// Result is the result of one policy on one trace at one capacity. Blocks are the pages of a
// recording, and a chunk's worth of them is one slot of the capacity.
type Result struct {
	Trace    string `json:"trace"`
	Policy   string `json:"policy"`
	Capacity int    `json:"capacity"` // chunks; of a trace without chunks: blocks
	Requests int    `json:"requests"`
	Blocks   int    `json:"blocks"` // requested
	Hits     int    `json:"hits"`   // in the prefix that was held when the request came
	Evicted  int    `json:"evicted"`
	// Tier is the capacity of a tier below, 0 for none, TierHits those of Hits that it had and the
	// cache above it had not, and TierWrites the blocks that were written to it.
	Tier       int       `json:"tier,omitempty"`
	Admit      Admission `json:"admit,omitempty"` // what the tier took
	TierHits   int       `json:"tier_hits,omitempty"`
	TierWrites int       `json:"tier_writes,omitempty"`
}

// Ratio returns the part of the blocks that hit.
func (r Result) Ratio() float64 { return float64(r.Hits) / float64(max(r.Blocks, 1)) }

// every is how many requests a run handles before it checks ctx and reports progress.
const every = 1024

// A Setup is a cache and, if there is one, a tier below it. What only the tier has comes up when it
// is requested.
type Setup struct {
	Policy   string
	Seed     uint64
	Capacity int       // chunks
	Tier     int       // chunks; 0: there is none
	Admit    Admission // what the tier takes; "" is what is stored
}

// Run replays a trace. A request first hits the longest held prefix of its blocks, then stores the
// rest and evicts where there is no room. Its blocks are leased until it is done. A request that is
// larger than the cache keeps what fits. progress, if not nil, is called now and then with the
// number of requests replayed since its last call.
func Run(ctx context.Context, t *Trace, how Setup, progress func(requests int)) (Result, error) {
	res := Result{Trace: t.Name, Capacity: how.Capacity, Tier: how.Tier, Requests: t.Requests(),
		Blocks: t.asked}
	cache, err := how.cache(how.Capacity, t.PagesPerChunk)
	if err != nil {
		return Result{}, err
	}
	res.Policy = cache.policy.Name()
	var tier *Cache
	now := 0
	if how.Tier > 0 {
		if tier, err = how.cache(how.Tier, t.PagesPerChunk); err != nil {
			return Result{}, err
		}
		res.Admit = cmp.Or(how.Admit, admitStored)
		cache.below = newBelow(cache, tier, res.Admit, how.Seed)
		if res.Admit == Oracle {
			last := t.lastRequests()
			cache.below.again = func(page uint64) bool { return last[page] > now }
		}
	}
	told := 0
	var w Walk
	for i := range t.requests {
		if i%every == 0 && i > 0 {
			if err := ctx.Err(); err != nil {
				return res, err
			}
			if progress != nil {
				progress(i - told)
				told = i
			}
		}
		t.walk(i, &w)
		now = i
		asked, hits := len(w.Keys)-w.From, 0
		if tier == nil {
			_, hits = cache.Do(&w)
		} else {
			var below int
			hits, below = both(cache, tier, w)
			res.TierHits += below
		}
		res.Hits += min(hits, asked)
	}
	if progress != nil {
		progress(t.Requests() - told)
	}
	res.Evicted = cache.Evicted()
	if tier != nil {
		res.TierWrites = tier.stored
	}
	return res, nil
}

func (s Setup) cache(slots, ppc int) (*Cache, error) {
	order, err := policy.New(s.Policy, policy.Options{Seed: s.Seed})
	if err != nil {
		return nil, err
	}
	return NewCache(order, slots, ppc)
}

// lastRequests returns the number of the last request that looks each page up, by its key.
func (t *Trace) lastRequests() map[uint64]int {
	last := make(map[uint64]int, len(t.parent))
	for i := range t.requests {
		if !t.requests[i].stored {
			for _, b := range t.request(i) {
				last[key(b)] = i
			}
		}
	}
	return last
}

// both does a request in a cache with a tier below, and returns how many pages hit, and how many of
// them only the tier had.
func both(cache, tier *Cache, w Walk) (hits, below int) {
	looked := w.Keys[w.From:]
	held := cache.Held(looked)
	if len(looked) > held {
		below = tier.Held(looked[held:])
	}
	// What the tier has comes up, and is used there.
	w.Insert = max(w.Insert, w.From+held+below)
	if below > 0 {
		tier.Do(&Walk{First: w.First, Prev: w.Prev, Keys: w.Keys[:w.From+held+below],
			From: w.From + held})
	}
	if cache.below.promoted = 0; below > 0 {
		cache.below.promoted = w.First + w.From + held + below
	}
	cache.Do(&w)
	return held + below, below
}
