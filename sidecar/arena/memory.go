package arena

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"lookaside/connector"
	"lookaside/dax"
	"lookaside/internal/bytesize"
	"lookaside/tiers/directory"
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
// before the end. Their ids rise, also over restarts.
type memory struct {
	Options
	dir      *directory.Directory
	expected []directory.Region // of the process before; until Start
	engine   *engine.Engine     // set by Begin
	control  *dax.Control       // likewise
	node     int
	limit    int64 // cfg.Limit, rounded up to whole pages

	inherited int  // regions that came with Options.Inherited
	useless   bool // other descriptors came with it

	mu       sync.Mutex
	offers   offers
	kind     dax.Kind // of the first region; auto chooses again for each
	reason   string
	state    State
	found    Found
	drained  []uint32 // regions that were found and must not be written to yet
	regions  map[uint32]*dax.Region
	capacity int64
	failures uint64 // times that the host refused a region
	waited   bool   // some of what was found could not be written to at once
	waits    claimants
}

func newMemory(o Options) (_ *memory, err error) {
	a := &memory{Options: o, state: Preparing, regions: map[uint32]*dax.Region{},
		offers: offers{came: make(chan struct{}, 1)}}
	defer func() {
		if err != nil {
			if a.dir != nil {
				err = errors.Join(err, a.dir.Close())
			}
			closeAll(a.Inherited)
		}
	}()
	var nodeReason string
	if a.node, nodeReason, err = dax.NUMANode(o.NUMA); err != nil {
		return nil, fmt.Errorf("arena.numa: %w", err)
	}
	dev, inode := o.Claims.LockID()
	if a.dir, err = directory.Open(directory.Options{Path: o.Directory, LockDev: dev,
		LockInode: inode, Takeover: o.Trusted, Log: o.Log}); err != nil {
		return nil, err
	}
	a.found.Why = a.dir.Why()
	if a.expected, err = a.wanted(a.dir.Regions()); err != nil {
		return nil, err
	}
	size := int64(0) // that is there already
	for _, r := range a.expected {
		size += r.SizeBytes
	}
	if len(a.expected) > 0 {
		a.kind, a.reason, a.state = dax.Kind(a.expected[0].Kind), "it was found so", Waiting
	} else if a.kind, a.reason, err = dax.Choose(o.Kind, o.Limit); err != nil {
		return nil, fmt.Errorf("arena.kind: %w", err)
	}
	a.limit = roundTo(o.Limit, a.kind.PageSize())
	if err := o.CheckMemory(a.kind, max(a.limit-size, 0)); err != nil {
		return nil, err
	}
	o.Log.Info("memory chosen", zap.String("kind", string(a.kind)),
		zap.String("because", a.reason), zap.String("limit", bytesize.Format(o.Limit)),
		zap.String("initial", bytesize.Format(o.Initial)), zap.Int("numa_node", a.node),
		zap.String("numa", nodeReason))
	return a, nil
}

func roundTo(n, unit int64) int64 { return (n + unit - 1) / unit * unit }

// Generation implements Arena.
func (a *memory) Generation() uint64 { return a.dir.Generation() }

// Begin implements Arena.
func (a *memory) Begin(control *dax.Control, books engine.Config) (_ *engine.Engine, err error) {
	books.ArenaLimitBytes, books.Regions = a.limit, len(a.expected)+int(a.ArenaConfig.Regions())
	a.dir.Hooks(&books)
	a.control = control
	if a.engine, err = engine.New(books); err != nil {
		return nil, err
	}
	a.dir.Attach(a.engine, a.Bytes)
	return a.engine, nil
}

// LimitBytes implements Arena.
func (a *memory) LimitBytes() int64 { return a.limit }

// MemoryBytes implements Arena. What is found is there already.
func (a *memory) MemoryBytes() int64 {
	if a.kind == dax.KindHugetlb || a.kind == dax.KindFile {
		return 0 // huge pages are counted separately, pages of files can be written back
	}
	n := a.limit
	for _, r := range a.expected {
		n -= r.SizeBytes
	}
	return max(n, 0)
}

// Flush implements Arena.
func (a *memory) Flush(ctx context.Context) error { return a.dir.Flush(ctx) }

// Verify implements Arena.
func (a *memory) Verify(ctx context.Context, list []engine.Verification) { a.dir.Verify(ctx, list) }

// Recheck implements Arena.
func (a *memory) Recheck(v *engine.Verification) (known bool, err error) { return a.dir.Recheck(v) }

// Start implements Arena.
func (a *memory) Start(ctx context.Context, workers Workers) error {
	start, expected := time.Now(), len(a.expected)
	found, err := a.find(ctx)
	if err != nil {
		return err
	}
	a.removeStale(found)
	if expected > 0 && len(found) == 0 {
		if kind, reason, err := dax.Choose(a.Kind, a.Initial); err == nil {
			a.mu.Lock()
			a.kind, a.reason = kind, reason
			a.mu.Unlock()
		}
	}
	if len(found) > 0 {
		a.setState(Restoring)
		if err := a.restore(found, workers); err != nil {
			return err
		}
	}
	a.holdFound(found)
	a.mu.Lock()
	f := a.found
	a.mu.Unlock()
	if f.Regions > 0 {
		a.Log.Info("found what the process before had left", zap.Int("chunks", f.Chunks),
			zap.Int("regions", f.Regions), zap.String("of", bytesize.Format(f.Bytes)),
			zap.String("missing", f.Why),
			zap.Duration("in", time.Since(start).Round(time.Microsecond)))
		// With Trusted, Run ends the draining: leases of the process before are still to come.
		if !a.Trusted && !a.undrain(workers) {
			a.mu.Lock()
			a.waited = true
			a.mu.Unlock()
			a.Log.Info("nothing that was found is written over until the workers of the process before have ended or connected",
				zap.Ints("pids", a.waitedFor()))
		}
		a.setState(Ready)
		return nil
	}
	a.Log.Info("the arena starts empty", zap.String("because", f.Why))
	a.setState(Preparing)
	if err := a.grow(ctx, workers, a.Initial); err != nil {
		if expected == 0 || !errors.Is(err, dax.ErrNoMemory) {
			return fmt.Errorf("arena.initial: %w", err)
		}
		// Workers may still hold the memory of before. They free it when they connect.
		a.Log.Warn("there is no memory yet; tries again", zap.Error(err))
		return nil
	}
	a.setState(Ready)
	return nil
}

// restore makes the memory that was found the arena's, with what is in it. The arena owns the
// regions from then on.
func (a *memory) restore(found map[uint32]*dax.Region, workers Workers) error {
	ids := slices.Sorted(maps.Keys(found))
	a.mu.Lock()
	maps.Copy(a.regions, found)
	for id, r := range found {
		a.capacity += r.Size()
		a.drained = append(a.drained, id)
	}
	a.found.Regions, a.found.Bytes = len(found), a.capacity
	a.mu.Unlock()
	var announced sync.WaitGroup // workers that are slow cost their time once
	for _, id := range ids {
		// Nothing is lent before nobody reads what the process before had lent: see undrain.
		announced.Go(func() { workers.AnnounceRegion(announcedMemory(id, found[id]), false) })
	}
	announced.Wait()
	for _, id := range ids {
		if err := a.engine.AddDrainedRegion(id, found[id].Size()); err != nil {
			return err
		}
	}
	a.control.SetRegions(uint64(len(ids)))
	got, err := a.dir.Restore()
	if err != nil {
		return err
	}
	if got.Damaged+got.Spaceless > 0 {
		a.Log.Info("some of what was left is not found", zap.Int("damaged", got.Damaged),
			zap.Int("spaceless", got.Spaceless))
	}
	a.mu.Lock()
	a.found.Chunks = got.Chunks
	a.mu.Unlock()
	return nil
}

func announcedMemory(id uint32, r *dax.Region) connector.Region {
	return connector.Region{ID: id, Kind: string(r.Kind()), FD: r.FD(), SizeBytes: r.Size(),
		PageSize: r.PageSize()}
}

// holdFound has the service manager keep the regions that were found, and nothing else.
func (a *memory) holdFound(found map[uint32]*dax.Region) {
	if a.Hold == nil || a.inherited > 0 && a.inherited == len(found) && !a.useless {
		return // it keeps exactly these
	}
	err := a.Hold.Clear()
	for _, r := range found {
		err = errors.Join(err, a.Hold.Store(r.LockFD()))
	}
	if err != nil {
		a.Log.Warn("the service manager does not keep the arena while no sidecar runs",
			zap.Error(err))
	}
}

func (a *memory) setState(s State) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.state = s
}

// setWhy adds a reason for which not all is found.
func (a *memory) setWhy(why string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.found.Why != "" {
		why = a.found.Why + "; " + why
	}
	a.found.Why = why
}

// errArenaFull means that arena.limit is reached.
var errArenaFull = errors.New("arena.limit is reached")

// grow adds one region of size bytes, or of what is left below the limit. It ends early with ctx.
func (a *memory) grow(ctx context.Context, workers Workers, size int64) error {
	a.mu.Lock()
	id, first := a.dir.Next(), len(a.regions) == 0
	size = min(size, a.limit-a.capacity)
	kind := a.kind
	a.mu.Unlock()
	if size <= 0 {
		return errArenaFull
	}
	start := time.Now()
	if a.Kind == dax.KindAuto && !first {
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
		o.Path = filepath.Join(a.Path, regionFile(id))
	}
	r, err := dax.Create(ctx, o)
	if err != nil {
		return err
	}
	// Only one goroutine grows the arena, so id is still right. The region stays open until the end
	// from here on, even if the engine refuses it: workers may have its fd already.
	a.mu.Lock()
	a.regions[id] = r
	a.mu.Unlock()
	a.enter(id, r)
	if err := workers.AddRegion(id, r); err != nil {
		return err
	}
	a.mu.Lock()
	a.capacity += r.Size()
	capacity, n := a.capacity, len(a.regions)
	a.mu.Unlock()
	a.control.SetRegions(uint64(n))
	a.Log.Info("grew", zap.Uint32("region", id), zap.String("by", bytesize.Format(r.Size())),
		zap.String("to", bytesize.Format(capacity)),
		zap.String("kind", string(r.Kind())),
		zap.Duration("in", time.Since(start).Round(time.Millisecond)))
	return nil
}

// enter has the next process find a new region.
func (a *memory) enter(id uint32, r *dax.Region) {
	dev, inode, size, seals, err := dax.Identity(r.FD())
	if err == nil {
		err = a.dir.AddRegion(directory.Region{ID: id, Kind: string(r.Kind()), Dev: dev,
			Inode: inode, SizeBytes: size, PageSize: r.PageSize(), Seals: seals})
	}
	if err != nil {
		a.Log.Warn("what is in a region is not found after a restart", zap.Uint32("region", id),
			zap.Error(err))
		return
	}
	if a.Hold == nil {
		return
	}
	if err := a.Hold.Store(r.LockFD()); err != nil {
		a.Log.Warn("the service manager does not keep a region while no sidecar runs",
			zap.Uint32("region", id), zap.Error(err))
	}
}

// Reuse implements Arena.
func (a *memory) Reuse(workers Workers) { a.undrain(workers) }

// Run grows the arena when it is short of room, and publishes its usage, until ctx is done. The
// arena is short of room in three cases: its fill passes growAt; a geometry without a region
// waits for one; or chunks were evicted or refused for lack of room below arena.limit, as when one
// geometry is full and another is not, or as long as what was found is not written to. Run also
// ends that.
func (a *memory) Run(ctx context.Context, workers Workers) {
	tick := time.NewTicker(usageEvery)
	defer tick.Stop()
	var retry time.Time
	var lost uint64
	backOff, waits := growthBackOff, true
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-workers.Wanted():
		}
		if waits && a.undrain(workers) {
			waits = false
			a.noteReuse()
		}
		st := a.engine.Stats()
		a.mu.Lock()
		capacity := a.capacity
		a.mu.Unlock()
		a.control.SetUsage(uint64(capacity), uint64(st.UsedBytes))
		full := float64(st.UsedBytes) >= growAt*float64(capacity) || st.WantRegion ||
			st.Evictions+st.ShedPages > lost
		lost = st.Evictions + st.ShedPages
		if !full || capacity >= a.limit || time.Now().Before(retry) {
			continue
		}
		if err := a.grow(ctx, workers, a.Step()); ctx.Err() != nil {
			return
		} else if err != nil {
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
		a.setState(Ready)
	}
}

// noteReuse logs that what was found is used as any memory.
func (a *memory) noteReuse() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.waited {
		a.Log.Info("what was found is written over from now on: no worker of the process before is left")
	}
}

// waitedFor returns the processes that may still copy to or from what was found.
func (a *memory) waitedFor() []int {
	a.mu.Lock()
	waiting := len(a.drained) > 0
	a.mu.Unlock()
	if !waiting {
		return nil
	}
	return a.waits.list(a.Claims, a.Generation())
}

// region returns a region that is there.
func (a *memory) region(id uint32) *dax.Region {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.regions[id]
}

// Bytes implements Arena.
func (a *memory) Bytes(region uint32) []byte { return a.region(region).Bytes() }

// Status implements Arena.
func (a *memory) Status(stats *engine.Stats) Status {
	pids, kept := a.waitedFor(), a.dir.Stats().Kept
	a.mu.Lock()
	defer a.mu.Unlock()
	st := Status{
		State: a.state, Found: a.found, Reuse: Reuse{Waiting: len(a.drained) > 0, PIDs: pids},
		Kept: kept, Waiting: max(stats.ReadySlots-kept, 0),
		Kind: a.kind, Reason: a.reason, LimitBytes: a.limit, CapacityBytes: a.capacity,
		UsedBytes: stats.UsedBytes, GrowthFailures: a.failures,
		Regions: []Region{},
	}
	for id, r := range a.regions {
		st.Regions = append(st.Regions, Region{ID: id, Kind: r.Kind(), SizeBytes: r.Size(),
			PageSize: r.PageSize()})
	}
	slices.SortFunc(st.Regions, func(x, y Region) int { return cmp.Compare(x.ID, y.ID) })
	return st
}

// Handover implements Arena.
func (a *memory) Handover() ([]int, error) {
	if !a.dir.Lasting() {
		return nil, errors.New("the arena cannot be handed over: there is no directory of it in runtime.dir, as the log says")
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	var fds []int
	for _, r := range a.regions {
		fds = append(fds, r.LockFD())
	}
	return fds, nil
}

// Leave implements Arena.
func (a *memory) Leave() { a.dir.Leave() }

// Close implements Arena. The directory stays, with the regions that other processes hold.
func (a *memory) Close() error {
	if a.engine != nil {
		a.engine.Close()
	}
	closeAll(a.taken(true))
	closeAll(a.Inherited)
	a.Inherited = nil
	a.mu.Lock()
	defer a.mu.Unlock()
	var errs []error
	if len(a.dir.Regions()) == 0 {
		errs = append(errs, a.dir.Remove())
	} else {
		errs = append(errs, a.dir.Close())
	}
	for _, r := range a.regions {
		if a.dir.Lasting() {
			errs = append(errs, r.Leave())
		} else {
			errs = append(errs, r.Close())
		}
	}
	a.regions, a.capacity = nil, 0
	return errors.Join(errs...)
}
