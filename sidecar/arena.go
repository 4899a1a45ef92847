package sidecar

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	"go.uber.org/zap"

	"lookaside/dax"
	"lookaside/tiers/engine"
)

// usageEvery is how often the arena looks at its fill when nobody tells it to.
const usageEvery = 100 * time.Millisecond

// growthBackOff is how long the arena waits after the host gave no memory, doubling up to
// growthBackOffMost.
const (
	growthBackOff     = 5 * time.Second
	growthBackOffMost = 5 * time.Minute
)

// An arena is the memory that workers map. There are two kinds: memory that grows, and DAX devices,
// which come and go.
type arena interface {
	// begin makes the engine of the slots, with these books; close closes it.
	begin(books engine.Config) (*engine.Engine, error)
	// limitBytes is the most that it may come to, as far as that is known: no chunk can be larger.
	limitBytes() int64
	// memoryBytes is how much of the memory that control groups count it may take.
	memoryBytes() int64
	// bytes is the memory of a region, for its whole length, for as long as somebody has a lease in
	// it.
	bytes(region uint32) []byte
	// start tells of the regions; the server serves nobody yet.
	start(server *announcer) error
	// run does what is to be done in the background, until ctx is done.
	run(ctx context.Context, server *announcer)
	// flush waits until what was committed outlives the process, as far as it can.
	flush(ctx context.Context) error
	status(st *engine.Stats) ArenaStatus
	// close lets go of the memory, which nobody may use any more; clients keep their own mappings.
	close() error
}

// newArena decides what the arena is made of, and refuses what the host cannot give. It takes no
// memory for pages yet, and opens no device.
func newArena(cfg *Config, control *dax.Control, log *zap.Logger) (arena, error) {
	if cfg.Arena.Kind == kindDAX {
		return newDAXArena(cfg.Arena, control, log), nil
	}
	a, err := newMemoryArena(cfg, control, log)
	if err != nil {
		return nil, err
	}
	return a, nil
}

// memoryArena owns its regions. It grows by adding one at a time; none is ever removed before the
// end.
type memoryArena struct {
	cfg     ArenaConfig
	reserve func() int64   // see Config.reserve
	engine  *engine.Engine // from begin on
	log     *zap.Logger
	control *dax.Control
	kind    dax.Kind // of the first region; auto chooses anew for each
	reason  string
	node    int
	limit   int64 // cfg.Limit, rounded up to whole pages

	mu       sync.Mutex
	regions  []*dax.Region
	capacity int64
	failures uint64 // times that the host did not give a region
}

// ArenaStatus describes the shared memory, in bytes.
type ArenaStatus struct {
	Kind           dax.Kind       `json:"kind"`
	Reason         string         `json:"reason"`
	LimitBytes     int64          `json:"limit_bytes" doc:"arena.limit, in whole pages; of an arena on DAX, its capacity."`
	CapacityBytes  int64          `json:"capacity_bytes"`
	UsedBytes      int64          `json:"used_bytes"` // of occupied slots
	GrowthFailures uint64         `json:"growth_failures"`
	Regions        []RegionStatus `json:"regions"`
	DAX            *DAXArenaState `json:"dax,omitempty" doc:"Only of an arena on DAX."`
}

// RegionStatus describes one region.
type RegionStatus struct {
	Region    uint32   `json:"region" doc:"Its number."`
	Kind      dax.Kind `json:"kind" doc:"Of an arena on DAX: devdax, fsdax or file."`
	Device    string   `json:"device,omitempty" doc:"What it lies on, of an arena on DAX."`
	SizeBytes int64    `json:"size_bytes"`
	PageSize  int64    `json:"page_size"`
}

func newMemoryArena(whole *Config, control *dax.Control, log *zap.Logger) (*memoryArena, error) {
	cfg := whole.Arena
	kind, reason, err := dax.Choose(cfg.Kind, cfg.Limit)
	if err != nil {
		return nil, fmt.Errorf("arena.kind: %w", err)
	}
	if err := whole.checkMemory(kind); err != nil {
		return nil, err
	}
	node, nodeReason, err := dax.NUMANode(cfg.NUMA)
	if err != nil {
		return nil, fmt.Errorf("arena.numa: %w", err)
	}
	a := &memoryArena{cfg: cfg, reserve: whole.reserve, log: log, control: control, kind: kind,
		reason: reason, node: node}
	page := int64(4096)
	if kind == dax.KindHugetlb || kind == dax.KindTHP {
		page = dax.HugePageSize
	}
	a.limit = (cfg.Limit + page - 1) / page * page
	log.Info("memory chosen", zap.String("kind", string(kind)), zap.String("because", reason),
		zap.String("limit", dax.FormatSize(cfg.Limit)),
		zap.String("initial", dax.FormatSize(cfg.Initial)), zap.Int("numa_node", node),
		zap.String("numa", nodeReason))
	return a, nil
}

// begin implements arena.
func (a *memoryArena) begin(books engine.Config) (_ *engine.Engine, err error) {
	books.ArenaLimitBytes, books.Regions = a.limit, int(a.cfg.regions())
	a.engine, err = engine.New(books)
	return a.engine, err
}

func (a *memoryArena) limitBytes() int64 { return a.limit }

func (a *memoryArena) memoryBytes() int64 {
	if a.kind == dax.KindHugetlb || a.kind == dax.KindFile {
		return 0 // huge pages count apart, pages of files can be written back
	}
	return a.limit
}

func (a *memoryArena) flush(context.Context) error { return nil }

// start implements arena.
func (a *memoryArena) start(server *announcer) error {
	if err := a.grow(server, a.cfg.Initial); err != nil {
		return fmt.Errorf("arena.initial: %w", err)
	}
	return nil
}

// mapPatience is how long workers may take to map a region that the arena has grown by, before it
// is used all the same. Nobody waits meanwhile.
const mapPatience = 30 * time.Second

// errArenaFull means that arena.limit is reached.
var errArenaFull = errors.New("arena.limit is reached")

// grow adds one region of size bytes, or of what is left below the limit.
func (a *memoryArena) grow(server *announcer, size int64) error {
	a.mu.Lock()
	id := uint32(len(a.regions))
	size = min(size, a.limit-a.capacity)
	a.mu.Unlock()
	if size <= 0 {
		return errArenaFull
	}
	start := time.Now()
	kind := a.kind
	if a.cfg.Kind == dax.KindAuto && id > 0 {
		// What was best at the start may be used up by now.
		var err error
		if kind, _, err = dax.Choose(dax.KindAuto, size); err != nil {
			return err
		}
	}
	if err := dax.CheckBudget(size, kind, a.reserve()); err != nil {
		return err
	}
	o := dax.Options{Kind: kind, SizeBytes: size, NUMANode: a.node, Populate: true,
		Threads: a.cfg.PopulateThreads}
	if kind == dax.KindFile {
		o.Path = filepath.Join(a.cfg.Path, fmt.Sprintf("lookaside-region-%04d", id))
	}
	r, err := dax.Create(o)
	if err != nil {
		return err
	}
	// Only one goroutine grows the arena, so id is still right. From here on the region stays open
	// until the end, even if the engine does not take it: workers may have its fd by then.
	a.mu.Lock()
	a.regions = append(a.regions, r)
	a.mu.Unlock()
	if err := server.AddRegion(id, r); err != nil {
		return err
	}
	a.mu.Lock()
	a.capacity += r.Size()
	capacity := a.capacity
	a.mu.Unlock()
	a.control.SetRegions(uint64(id) + 1)
	a.log.Info("grew", zap.Uint32("region", id), zap.String("by", dax.FormatSize(r.Size())),
		zap.String("to", dax.FormatSize(capacity)),
		zap.String("kind", string(r.Kind())),
		zap.Duration("in", time.Since(start).Round(time.Millisecond)))
	return nil
}

// run grows the arena whenever it is short of room, and publishes its usage, until ctx is done. It
// is short of room when its fill passes arena.grow_at, when a geometry that has no region waits for
// one, and when something has been evicted or refused for want of room although arena.limit is not
// reached, as happens when one geometry is full and another is not.
func (a *memoryArena) run(ctx context.Context, server *announcer) {
	tick := time.NewTicker(usageEvery)
	defer tick.Stop()
	var retry time.Time
	var lost uint64
	backOff := growthBackOff
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-server.Wanted():
		}
		st := a.engine.Stats()
		a.mu.Lock()
		capacity := a.capacity
		a.mu.Unlock()
		a.control.SetUsage(uint64(capacity), uint64(st.UsedBytes))
		full := float64(st.UsedBytes) >= a.cfg.GrowAt*float64(capacity) || st.WantRegion ||
			st.Evictions+st.ShedPages > lost
		lost = st.Evictions + st.ShedPages
		if !full || capacity >= a.limit || time.Now().Before(retry) {
			continue
		}
		if err := a.grow(server, a.cfg.Step); err != nil {
			a.mu.Lock()
			a.failures++
			a.mu.Unlock()
			a.log.Warn("cannot grow; goes on with what it has", zap.Error(err),
				zap.Duration("next_try_in", backOff))
			retry = time.Now().Add(backOff)
			backOff = min(2*backOff, growthBackOffMost)
			continue
		}
		backOff = growthBackOff
	}
}

// bytes implements arena.
func (a *memoryArena) bytes(region uint32) []byte {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.regions[region].Bytes()
}

func (a *memoryArena) status(stats *engine.Stats) ArenaStatus {
	a.mu.Lock()
	defer a.mu.Unlock()
	st := ArenaStatus{
		Kind: a.kind, Reason: a.reason, LimitBytes: a.limit, CapacityBytes: a.capacity,
		UsedBytes: stats.UsedBytes, GrowthFailures: a.failures,
		Regions: []RegionStatus{},
	}
	for i, r := range a.regions {
		st.Regions = append(st.Regions, RegionStatus{Region: uint32(i), Kind: r.Kind(),
			SizeBytes: r.Size(), PageSize: r.PageSize()})
	}
	return st
}

// close implements arena.
func (a *memoryArena) close() error {
	if a.engine != nil {
		a.engine.Close()
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	var errs []error
	for _, r := range a.regions {
		errs = append(errs, r.Close())
	}
	a.regions, a.capacity = nil, 0
	return errors.Join(errs...)
}
