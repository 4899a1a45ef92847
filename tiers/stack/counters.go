package stack

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/engine"
)

// tierCounters counts the calls of one tier since the start. Any goroutine may use it.
type tierCounters struct {
	lookups, lookupPages, hitPages atomic.Uint64
	loads, loadBytes               atomic.Uint64
	stores, storeBytes             atomic.Uint64
	noRoom, demoted                atomic.Uint64
	missed, late                   atomic.Uint64
	failures                       [3]atomic.Uint64 // by Op
	seekNanos                      atomic.Int64     // time of one lookup, averaged

	mu   sync.Mutex
	last error
}

// failed counts an error of a call, or of one chunk in a call.
func (c *tierCounters) failed(op Op, err error) {
	switch {
	case errors.Is(err, tiers.ErrNotFound):
		c.missed.Add(1)
		return
	case errors.Is(err, tiers.ErrCorrupt): // the tier counts it
		return
	case errors.Is(err, tiers.ErrBusy):
		c.noRoom.Add(1)
		return
	case errors.Is(err, tiers.ErrClosed), errors.Is(err, ErrOff):
		return
	case errors.Is(err, errLate):
		c.late.Add(1)
	}
	c.failures[op].Add(1)
	c.mu.Lock()
	c.last = err
	c.mu.Unlock()
}

func (c *tierCounters) lastError() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.last
}

func (c *tierCounters) loaded(bytes int64) {
	c.loads.Add(1)
	c.loadBytes.Add(uint64(bytes))
}

func (c *tierCounters) stored(bytes int64) {
	c.stores.Add(1)
	c.storeBytes.Add(uint64(bytes))
}

// sought averages the time of lookups. Of two concurrent calls one may be lost, which is harmless.
func (c *tierCounters) sought(took time.Duration) {
	was := c.seekNanos.Load()
	c.seekNanos.Store(was + int64(estimateWeight*float64(int64(took)-was)))
}

func (c *tierCounters) lookupTime() time.Duration { return time.Duration(c.seekNanos.Load()) }

// TierStatus describes one tier at one moment: its own report, and the calls since the start.
type TierStatus struct {
	Name string
	tiers.TierStats
	Admit string

	Breaker   string // closed, open or probing
	Opened    uint64 // times that it opened
	LastError string

	Lookups     uint64
	LookupPages uint64 // requested
	HitPages    uint64 // found
	Loads       uint64 // chunks
	LoadBytes   uint64
	Stores      uint64
	StoreBytes  uint64
	// Demoted counts stored chunks that the tier above was about to drop.
	Demoted uint64

	LookupFailures uint64 // calls
	LoadFailures   uint64 // chunks
	StoreFailures  uint64 // chunks
	Late           uint64 // failures by timeout
	Missed         uint64 // chunks that its lookup had found
	NoRoom         uint64 // chunks that it refused to store

	LoadQueue  int // chunks waiting or loading
	StoreQueue int // chunks waiting to be stored
	// Shed counts chunks that were not stored: the queue was full, or they were evicted first.
	Shed uint64
	// Declined counts chunks that were not worth storing, if the tier admits what is learned.
	Declined uint64

	// LookupSeconds is the estimate for one lookup, unless the tier is local.
	LookupSeconds  float64
	LatencySeconds float64 // estimate for one load
	// BytesPerSecond is the estimate for all concurrent loads together; 0: not known.
	BytesPerSecond float64
}

// Status lists the tiers, nearest first.
func (s *Stack) Status() []TierStatus {
	out := make([]TierStatus, 0, len(s.tiers))
	queued := make([]int, len(s.tiers))
	s.mu.Lock()
	for _, l := range s.loads {
		if l.tier != nil {
			queued[l.tier.index]++
		}
	}
	s.unlockAndWake()
	for i, t := range s.tiers {
		c := &t.count
		st := TierStatus{
			Name: t.Name, TierStats: t.Tier.Stats(), Admit: t.Admit.String(),
			Lookups: c.lookups.Load(), LookupPages: c.lookupPages.Load(),
			HitPages: c.hitPages.Load(),
			Loads:    c.loads.Load(), LoadBytes: c.loadBytes.Load(),
			Stores: c.stores.Load(), StoreBytes: c.storeBytes.Load(), Demoted: c.demoted.Load(),
			LookupFailures: c.failures[OpLookup].Load(), LoadFailures: c.failures[OpLoad].Load(),
			StoreFailures: c.failures[OpStore].Load(),
			Late:          c.late.Load(), Missed: c.missed.Load(), NoRoom: c.noRoom.Load(),
			LoadQueue:     queued[i],
			LookupSeconds: c.lookupTime().Seconds(),
		}
		st.Breaker, st.Opened = t.breaker.state()
		if err := c.lastError(); err != nil {
			st.LastError = err.Error()
		}
		st.StoreQueue, st.Shed = s.engine.CascadeQueue(i)
		st.Declined = s.engine.Declined(i)
		latency, rate, _ := t.estimate.read()
		st.LatencySeconds, st.BytesPerSecond = latency.Seconds(), rate
		out = append(out, st)
	}
	return out
}

// Tenants returns the tiers' names, nearest first, and what each counts for tenants: nil if it does
// not know what it holds of whom.
func (s *Stack) Tenants() (names []string, counts [][]engine.TenantStats) {
	for _, t := range s.tiers {
		names = append(names, t.Name)
		var of []engine.TenantStats
		if c, ok := t.Tier.(interface {
			TenantStats(out []engine.TenantStats) []engine.TenantStats
		}); ok {
			of = c.TenantStats([]engine.TenantStats{})
		}
		counts = append(counts, of)
	}
	return names, counts
}

// LookupStats describes lookups and the patrol of the arena. The counters are totals since the
// start.
type LookupStats struct {
	Pending  int    // lookups under way
	Loading  int    // chunks being loaded into the arena
	Refused  uint64 // lookups limited to the arena because too many were under way
	Late     uint64 // lookups that ended at their deadline
	Cut      uint64 // lookups that left pages to be computed because that is faster
	Verified uint64 // lookups that waited for restored chunks to be verified
	Checked  uint64 // chunks of the arena compared with their checksum
	Walks    uint64 // complete walks over the arena
}

// LookupStats returns the present figures. It may be called at any time.
func (s *Stack) LookupStats() LookupStats {
	s.mu.Lock()
	defer s.unlockAndWake()
	return LookupStats{
		Pending: len(s.pending), Loading: len(s.loads) + s.unlisted,
		Refused: s.count.refused.Load(),
		Late:    s.count.late.Load(), Cut: s.count.cut.Load(),
		Verified: s.count.verified.Load(), Checked: s.patrol.checked.Load(),
		Walks: s.patrol.passes.Load(),
	}
}
