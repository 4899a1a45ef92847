package arena

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	"go.uber.org/zap"

	"lookaside/dax"
	"lookaside/internal/bytesize"
	"lookaside/tiers/engine"
)

// growAt is the fill at which the arena grows. The rest takes what is stored until the workers have
// mapped the new region.
const growAt = 0.8

// growthBackOff is how long the arena waits after the host gave no memory. It doubles up to
// growthBackOffMost.
const (
	growthBackOff     = 5 * time.Second
	growthBackOffMost = 5 * time.Minute
)

// memory is an arena of host memory. It owns its regions, adds one at a time, and removes none
// before the end.
type memory struct {
	Options
	engine *engine.Engine // set by Begin
	kind   dax.Kind       // of the first region; auto chooses again for each
	reason string
	node   int
	limit  int64 // cfg.Limit, rounded up to whole pages

	mu       sync.Mutex
	regions  []*dax.Region
	capacity int64
	failures uint64 // times that the host refused a region
}

func newMemory(o Options) (*memory, error) {
	kind, reason, err := dax.Choose(o.Kind, o.Limit)
	if err != nil {
		return nil, fmt.Errorf("arena.kind: %w", err)
	}
	if err := o.CheckMemory(kind); err != nil {
		return nil, err
	}
	node, nodeReason, err := dax.NUMANode(o.NUMA)
	if err != nil {
		return nil, fmt.Errorf("arena.numa: %w", err)
	}
	a := &memory{Options: o, kind: kind, reason: reason, node: node}
	page := int64(4096)
	if kind == dax.KindHugetlb || kind == dax.KindTHP {
		page = dax.HugePageSize
	}
	a.limit = (o.Limit + page - 1) / page * page
	o.Log.Info("memory chosen", zap.String("kind", string(kind)), zap.String("because", reason),
		zap.String("limit", bytesize.Format(o.Limit)),
		zap.String("initial", bytesize.Format(o.Initial)), zap.Int("numa_node", node),
		zap.String("numa", nodeReason))
	return a, nil
}

// Begin implements Arena.
func (a *memory) Begin(books engine.Config) (_ *engine.Engine, err error) {
	books.ArenaLimitBytes, books.Regions = a.limit, int(a.ArenaConfig.Regions())
	a.engine, err = engine.New(books)
	return a.engine, err
}

func (a *memory) LimitBytes() int64 { return a.limit }

func (a *memory) MemoryBytes() int64 {
	if a.kind == dax.KindHugetlb || a.kind == dax.KindFile {
		return 0 // huge pages are counted separately, pages of files can be written back
	}
	return a.limit
}

func (a *memory) Flush(context.Context) error { return nil }

// Start implements Arena.
func (a *memory) Start(workers Workers) error {
	if err := a.grow(workers, a.Initial); err != nil {
		return fmt.Errorf("arena.initial: %w", err)
	}
	return nil
}

// errArenaFull means that arena.limit is reached.
var errArenaFull = errors.New("arena.limit is reached")

// grow adds one region of size bytes, or of what is left below the limit.
func (a *memory) grow(workers Workers, size int64) error {
	a.mu.Lock()
	id := uint32(len(a.regions))
	size = min(size, a.limit-a.capacity)
	a.mu.Unlock()
	if size <= 0 {
		return errArenaFull
	}
	start := time.Now()
	kind := a.kind
	if a.Kind == dax.KindAuto && id > 0 {
		// The best kind at the start may be used up by now.
		var err error
		if kind, _, err = dax.Choose(dax.KindAuto, size); err != nil {
			return err
		}
	}
	if err := dax.CheckBudget(size, kind, a.ReserveBytes()); err != nil {
		return err
	}
	o := dax.Options{Kind: kind, SizeBytes: size, NUMANode: a.node, Populate: true}
	if kind == dax.KindFile {
		o.Path = filepath.Join(a.Path, fmt.Sprintf("lookaside-region-%04d", id))
	}
	r, err := dax.Create(o)
	if err != nil {
		return err
	}
	// Only one goroutine grows the arena, so id is still right. The region stays open until the end
	// from here on, even if the engine refuses it: workers may have its fd already.
	a.mu.Lock()
	a.regions = append(a.regions, r)
	a.mu.Unlock()
	if err := workers.AddRegion(id, r); err != nil {
		return err
	}
	a.mu.Lock()
	a.capacity += r.Size()
	capacity := a.capacity
	a.mu.Unlock()
	a.Control.SetRegions(uint64(id) + 1)
	a.Log.Info("grew", zap.Uint32("region", id), zap.String("by", bytesize.Format(r.Size())),
		zap.String("to", bytesize.Format(capacity)),
		zap.String("kind", string(r.Kind())),
		zap.Duration("in", time.Since(start).Round(time.Millisecond)))
	return nil
}

// Run grows the arena when it is short of room, and publishes its usage, until ctx is done. The
// arena is short of room in three cases: its fill passes growAt; a geometry without a region
// waits for one; or chunks were evicted or refused for lack of room below arena.limit, as when one
// geometry is full and another is not.
func (a *memory) Run(ctx context.Context, workers Workers) {
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
		case <-workers.Wanted():
		}
		st := a.engine.Stats()
		a.mu.Lock()
		capacity := a.capacity
		a.mu.Unlock()
		a.Control.SetUsage(uint64(capacity), uint64(st.UsedBytes))
		full := float64(st.UsedBytes) >= growAt*float64(capacity) || st.WantRegion ||
			st.Evictions+st.ShedPages > lost
		lost = st.Evictions + st.ShedPages
		if !full || capacity >= a.limit || time.Now().Before(retry) {
			continue
		}
		if err := a.grow(workers, a.Step()); err != nil {
			a.mu.Lock()
			a.failures++
			a.mu.Unlock()
			a.Log.Warn("cannot grow; goes on with what it has", zap.Error(err),
				zap.Duration("next_try_in", backOff))
			retry = time.Now().Add(backOff)
			backOff = min(2*backOff, growthBackOffMost)
			continue
		}
		backOff = growthBackOff
	}
}

// Bytes implements Arena.
func (a *memory) Bytes(region uint32) []byte {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.regions[region].Bytes()
}

func (a *memory) Status(stats *engine.Stats) Status {
	a.mu.Lock()
	defer a.mu.Unlock()
	st := Status{
		Kind: a.kind, Reason: a.reason, LimitBytes: a.limit, CapacityBytes: a.capacity,
		UsedBytes: stats.UsedBytes, GrowthFailures: a.failures,
		Regions: []Region{},
	}
	for i, r := range a.regions {
		st.Regions = append(st.Regions, Region{ID: uint32(i), Kind: r.Kind(),
			SizeBytes: r.Size(), PageSize: r.PageSize()})
	}
	return st
}

// Close implements Arena.
func (a *memory) Close() error {
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
