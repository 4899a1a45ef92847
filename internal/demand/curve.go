package demand

import (
	"runtime"
	"time"

	"lookaside/internal/simulate"
	"lookaside/tiers/policy"
)

// MinMemory is the least memory of a curve: the policies' own books take most of it.
const MinMemory = 24 << 20

// multiples are the sizes of the curve, in arenas.
var multiples = [...]float64{0.25, 0.5, 1, 2, 4, 8}

// half is how long it takes until a request counts half as much in a Point's recent ratio.
const half = time.Hour

// curve is miniature simulations of the arena at several sizes (Waldspurger, Saemundsson, Ahmad,
// Park: Cache Modeling and Optimization using Miniature Simulations, ATC 2017). Each has the
// arena's own policy, and handles a sample of the chunks in a like part of the slots; as a sidecar
// has some thousand slots, the sample is mostly all of them. Stack distances (SHARDS) would give
// the curve of LRU in one pass. The default policy hits up to a third more than LRU, so that curve
// would be of another cache.
//
// # What it assumes
//
// What clients store is stored in an arena of any size, and what they found in a larger one they
// would have stored themselves in a smaller. A request is done before the next one begins. Shares,
// hints, pins and leases do not matter. The arena has pages of one geometry: the one that is asked
// for most. At the start all sizes are empty, even if the arena was not; a size says nothing beyond
// the next smaller one before it is full.
type curve struct {
	shape  shape
	arena  int64
	rate   float64
	sizes  [len(multiples)]size
	asked  uint64  // pages that were looked up, in the sample or not, ever
	recent float64 // likewise; older ones count less

	measured                 float64 // hits in the arena; older ones count less
	own, others              uint64  // pages since judged, of this shape and of others
	judged, decayed, started time.Time
}

// size is a simulation. It counts misses of the sample, not hits: which of the few chunks that
// nearly everybody asks for are in the sample is chance, and they hit at any size. So what the
// sample should have had of lookups, and has not, is taken for hits (SHARDS' adjustment).
type size struct {
	cache  *simulate.Cache
	missed uint64 // pages in the sample, ever
	recent float64
}

// judgeEvery is how often it is considered whether other pages are asked for more.
const judgeEvery = 10 * time.Minute

// perChunk estimates what a chunk takes in a simulation beside the policy's fixed part, in bytes.
func perChunk(ppc int) int64 { return 150 + 32*int64(ppc) }

// fixedBytes is what the policies of all sizes take however small they are.
const fixedBytes = 20 << 20

func newCurve(cfg *Config, s shape, now time.Time) (*curve, error) {
	arena := cfg.ArenaBytes()
	c := &curve{shape: s, arena: arena, rate: 1, judged: now, decayed: now, started: now}
	total := 0.0
	for _, m := range multiples {
		total += m
	}
	slots := float64(max(arena/s.chunkBytes(), 1))
	room := float64(max(cfg.MemoryBytes-fixedBytes, 1<<20)) / float64(perChunk(s.pagesPerChunk))
	c.rate = min(1, room/(total*slots))
	for i, m := range multiples {
		order, err := policy.New(cfg.Policy, policy.Options{Seed: cfg.Seed})
		if err != nil {
			return nil, err
		}
		n := max(1, int(slots*m*c.rate+0.5))
		c.sizes[i].cache, err = simulate.NewSample(order, n, s.pagesPerChunk, c.rate)
		if err != nil {
			return nil, err
		}
	}
	return c, nil
}

// outdated reports whether the curve is of something that is not asked for any more.
func (c *curve) outdated(arena int64, now time.Time) bool {
	if diff := arena - c.arena; diff > c.arena/50 || -diff > c.arena/50 {
		return true
	}
	if now.Sub(c.judged) < judgeEvery {
		return false
	}
	outdone := c.others > c.own
	c.judged, c.own, c.others = now, 0, 0
	return outdone
}

func (c *curve) count(r *request) {
	if r.shape != c.shape {
		c.others += uint64(len(r.pages))
		return
	}
	c.own += uint64(len(r.pages))
	w := simulate.Walk{First: r.first, Prev: r.prev, Keys: r.pages, Insert: len(r.pages)}
	if r.kind == store {
		w.From = len(r.pages)
	} else {
		w.Insert = r.held
		c.measured += float64(r.arena)
		c.asked += uint64(len(r.pages))
		c.recent += float64(len(r.pages))
	}
	for i := range c.sizes {
		asked, hits := c.sizes[i].cache.Do(&w)
		c.sizes[i].missed += uint64(asked - hits)
		c.sizes[i].recent += float64(asked - hits)
		runtime.Gosched() // a long request takes long
	}
}

// decay has what was counted count less, step by step.
func (c *curve) decay(now time.Time) {
	const steps = 60
	for ; now.Sub(c.decayed) >= half/steps; c.decayed = c.decayed.Add(half / steps) {
		const keep = 0.988514 // 2^(-1/60)
		c.recent, c.measured = c.recent*keep, c.measured*keep
		for i := range c.sizes {
			c.sizes[i].recent *= keep
		}
		if now.Sub(c.decayed) > 100*half {
			c.decayed = now
		}
	}
}

// Curve is what arenas of other sizes would have hit of the pages that were looked up.
type Curve struct {
	Rate       float64 // the part of all chunks that is watched
	ArenaBytes int64
	Asked      uint64 // pages that were looked up since the beginning
	// Measured is the part of recent lookups' pages that the arena itself held: what the point of
	// the arena's own size estimates. Recent is the last hour or two: older ones count less.
	Measured float64
	Since    time.Time // the curve's beginning
	Points   []Point   // by size
}

// Point is one size.
type Point struct {
	Multiple float64 // of the arena
	Bytes    int64
	Missed   uint64  // pages since the beginning, as many as of Asked
	Ratio    float64 // the part of recent lookups' pages that would have hit
	Full     bool    // the size has had to evict; before, a larger one is of no use
}

func (c *curve) report() Curve {
	out := Curve{Rate: c.rate, ArenaBytes: c.arena, Asked: c.asked, Since: c.started}
	if c.recent > 0 {
		out.Measured = c.measured / c.recent
	}
	for i := range c.sizes {
		s := &c.sizes[i]
		p := Point{Multiple: multiples[i], Bytes: int64(float64(c.arena) * multiples[i]),
			Missed: uint64(float64(s.missed) / c.rate), Full: s.cache.Full()}
		if c.recent > 0 {
			p.Ratio = max(0, 1-s.recent/c.rate/c.recent)
		}
		out.Points = append(out.Points, p)
	}
	return out
}
