package arena

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"lookaside/connector"
	"lookaside/dax"
	"lookaside/internal/bytesize"
	"lookaside/sidecar/settings"
	"lookaside/tiers/daxtier"
	"lookaside/tiers/engine"
)

// A DAX is an arena on DAX devices. Committed chunks are found again after a restart, so it may be
// full from the start. Its regions are the slabs of package daxtier. A region comes when a slab is
// carved or a device is added, and goes when a slab is carved again or a device is removed.
type DAX struct {
	Options
	generation uint64
	control    *dax.Control   // set by Begin
	pool       *daxtier.Arena // likewise
	found      int            // chunks found by Begin
	drains     drainer
	waits      claimants

	mu sync.Mutex
	// each with an FD of its own, for workers that connect while the device is being removed
	regions  map[uint32]daxtier.Region
	workers  Workers        // nil until Start
	changing map[string]int // by device path: changes under way

	retracting sync.WaitGroup // calls of RetractRegion that run in the background
}

func newDAX(o Options) *DAX {
	return &DAX{Options: o, generation: connector.RandomID() >> 2,
		regions: map[uint32]daxtier.Region{}, changing: map[string]int{}}
}

var _ Arena = (*DAX)(nil)

// Generation implements Arena.
func (a *DAX) Generation() uint64 { return a.generation }

// Offer implements Arena. What was on devices is found there.
func (a *DAX) Offer(fds []int) { closeAll(fds) }

// Handover implements Arena.
func (a *DAX) Handover() ([]int, error) { return nil, errDAXHandover }

// Leave implements Arena.
func (a *DAX) Leave() {}

// Verify implements Arena.
func (a *DAX) Verify(ctx context.Context, list []engine.Verification) { a.pool.Verify(ctx, list) }

// Recheck implements Arena.
func (a *DAX) Recheck(v *engine.Verification) (known bool, err error) { return a.pool.Recheck(v) }

// Begin implements Arena. It opens the devices and finds what is on them.
func (a *DAX) Begin(control *dax.Control, books engine.Config) (*engine.Engine, error) {
	start := time.Now()
	a.control = control
	c := &a.Options.DAX
	o := daxtier.ArenaOptions{
		Options: daxtier.Options{
			OffsetBytes: c.Offset, Rank: c.Rank, Ranks: c.Ranks, AllowFiles: c.AllowFiles,
			SlabBytes: c.Slab, HotPlug: c.HotPlug,
			Policy: a.Eviction, MaxSpaces: books.MaxSpaces, Seed: connector.RandomID(),
			Log: a.Log,
		},
		Books: books, Added: a.added, Removed: a.removed,
	}
	for _, d := range c.Devices {
		o.Devices = append(o.Devices, daxtier.DeviceSpec{Path: d.Path, SizeBytes: d.Size})
	}
	var err error
	if a.pool, err = daxtier.OpenArena(o); err != nil {
		a.pool = nil
		return nil, fmt.Errorf("arena.dax.devices: %w", err)
	}
	st, found := a.pool.Status(), a.pool.Engine().Stats()
	a.found = found.ReadySlots
	for _, d := range st.Devices {
		a.Log.Info("device opened", zap.String("device", d.Path),
			zap.String("size", bytesize.Format(d.SizeBytes)), zap.Int("chunks", d.Slots.Used))
	}
	if a.claimed() {
		a.pool.Freeze()
		a.Log.Info("nothing is granted or found yet: clients of the sidecar before may still copy",
			zap.Ints("pids", a.waits.list(a.Claims, a.generation)))
	}
	a.Log.Info("devices recovered", zap.String("kind", string(settings.KindDAX)),
		zap.String("capacity", bytesize.Format(st.TotalCapacityBytes)),
		zap.Int("chunks_found", found.ReadySlots),
		zap.String("of", bytesize.Format(found.UsedBytes)),
		zap.Duration("in", time.Since(start).Round(time.Millisecond)))
	return a.pool.Engine(), nil
}

// claimed reports whether a process may still copy to what an earlier run has granted it.
func (a *DAX) claimed() bool {
	held, err := a.Claims.Claims(a.generation)
	return held || err != nil
}

// thaw ends the time in which nothing is granted, if it is over. It returns false if it is not.
func (a *DAX) thaw() bool {
	if !a.pool.Frozen() {
		return true
	}
	if a.claimed() {
		return false
	}
	a.pool.Thaw()
	a.Log.Info("no client of the sidecar before copies any more")
	return true
}

// MemoryBytes implements Arena. Control groups do not count devices.
func (a *DAX) MemoryBytes() int64 { return 0 }

// LimitBytes implements Arena. With hot plug the arena can later grow beyond its size.
func (a *DAX) LimitBytes() int64 {
	if a.Options.DAX.HotPlug {
		return math.MaxInt64
	}
	return a.pool.Status().TotalCapacityBytes
}

func announced(r *daxtier.Region) connector.Region {
	return connector.Region{ID: r.ID, Kind: r.Kind, FD: r.FD, OffsetBytes: r.OffsetBytes,
		SizeBytes: r.SizeBytes, PageSize: r.PageSize}
}

// added is called before anything in a new region can be granted.
func (a *DAX) added(r daxtier.Region) error {
	fd, err := unix.FcntlInt(uintptr(r.FD), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("%s: a descriptor for workers: %w", r.Path, err)
	}
	r.FD = fd
	a.mu.Lock()
	a.regions[r.ID] = r
	workers, n := a.workers, len(a.regions)
	a.mu.Unlock()
	if workers != nil {
		workers.AnnounceRegion(announced(&r), true)
	}
	a.control.SetRegions(uint64(n))
	return nil
}

// removed is called for a region that has no lease and gets none any more. If the region's device
// is leaving, removed waits until workers have unmapped the region. If only its bytes go to another
// region, it does not wait. An unused mapping does no harm, and the caller may be a session that
// makes room, whose worker could not respond during the wait.
func (a *DAX) removed(id uint32) {
	a.mu.Lock()
	r, ok := a.regions[id]
	delete(a.regions, id)
	workers, n, wait := a.workers, len(a.regions), a.changing[filepath.Clean(r.Path)] > 0
	a.mu.Unlock()
	if !ok {
		return
	}
	a.control.SetRegions(uint64(n))
	retract := func() {
		if workers != nil {
			workers.RetractRegion(id)
		}
		_ = unix.Close(r.FD) // a duplicate; nothing was written through it
	}
	if wait {
		retract()
		return
	}
	a.retracting.Go(retract)
}

// change records that a device is being changed. The caller must call done.
func (a *DAX) change(path string) (done func()) {
	path = filepath.Clean(path)
	add := func(n int) {
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.changing[path] += n; a.changing[path] == 0 {
			delete(a.changing, path)
		}
	}
	add(1)
	return func() { add(-1) }
}

// Start implements Arena.
func (a *DAX) Start(_ context.Context, workers Workers) error {
	a.mu.Lock()
	a.workers = workers
	known := make([]daxtier.Region, 0, len(a.regions))
	for _, r := range a.regions {
		known = append(known, r)
	}
	a.mu.Unlock()
	for i := range known {
		workers.AnnounceRegion(announced(&known[i]), true)
	}
	a.publish()
	return nil
}

// Reuse implements Arena.
func (a *DAX) Reuse(Workers) {}

// Run implements Arena.
func (a *DAX) Run(ctx context.Context, workers Workers) {
	var drains sync.WaitGroup
	drains.Go(func() { a.drain(ctx) })
	defer drains.Wait()
	tick := time.NewTicker(usageEvery)
	defer tick.Stop()
	for {
		wait := tick.C
		if !a.thaw() {
			wait = time.After(claimsEvery)
		}
		select {
		case <-ctx.Done():
			return
		case <-wait:
		case <-workers.Wanted():
		}
		a.publish()
	}
}

// publish shows clients how full the arena is.
func (a *DAX) publish() {
	a.control.SetUsage(uint64(a.pool.Status().TotalCapacityBytes),
		uint64(a.pool.Engine().Stats().UsedBytes))
}

// Bytes implements Arena.
func (a *DAX) Bytes(region uint32) []byte {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.regions[region].Bytes
}

// Flush implements Arena.
func (a *DAX) Flush(ctx context.Context) error { return a.pool.Flush(ctx) }

// Status implements Arena.
func (a *DAX) Status(stats *engine.Stats) Status {
	p := a.pool.Status()
	st := Status{
		State: Ready, Kind: settings.KindDAX, Reason: "it was asked for", LimitBytes: p.TotalCapacityBytes,
		CapacityBytes: p.TotalCapacityBytes, UsedBytes: stats.UsedBytes,
		DAX: &DAXStatus{HotPlug: a.Options.DAX.HotPlug, Devices: p, Stats: a.pool.Stats()},
	}
	if st.Reuse.Waiting = a.pool.Frozen(); st.Reuse.Waiting {
		st.Reuse.PIDs = a.waits.list(a.Claims, a.generation)
	}
	st.Kept, st.Waiting, st.Found.Chunks = st.DAX.Stats.Kept, st.DAX.Stats.Waiting, a.found
	a.mu.Lock()
	defer a.mu.Unlock()
	for id, r := range a.regions {
		st.Regions = append(st.Regions, Region{ID: id, Kind: dax.Kind(r.Kind), Device: r.Path,
			SizeBytes: r.SizeBytes, PageSize: r.PageSize})
	}
	slices.SortFunc(st.Regions, func(x, y Region) int { return cmp.Compare(x.ID, y.ID) })
	return st
}

// Close implements Arena.
func (a *DAX) Close() error {
	var err error
	if a.pool != nil {
		err = a.pool.Close()
	}
	a.retracting.Wait()
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, r := range a.regions {
		err = errors.Join(err, unix.Close(r.FD))
	}
	clear(a.regions)
	return err
}

// Pool returns the store on the devices. It is valid from Begin to Close.
func (a *DAX) Pool() *daxtier.Arena { return a.pool }

// Devices describes the devices. A drained device that is being emptied is shown as draining.
func (a *DAX) Devices() daxtier.Status {
	// emptying is read before the status: the status may be newer, but does not show a state of an
	// attempt that is unknown here.
	emptying := a.drains.emptying()
	st := a.pool.Status()
	for i := range st.Devices {
		if d := &st.Devices[i]; d.Path == emptying && d.State != "active" {
			d.State = stateDrained
		}
	}
	return st
}

// Change begins a requested change of the devices. Drains wait until done is called.
func (a *DAX) Change() (done func()) { return a.drains.change() }

// Add adds a device.
func (a *DAX) Add(ctx context.Context, path string, sizeBytes int64) error {
	return a.pool.Add(ctx, path, sizeBytes)
}

// Remove removes a device, or starts to drain it.
func (a *DAX) Remove(ctx context.Context, path string, mode daxtier.Mode, force bool) error {
	defer a.change(path)()
	return a.pool.Remove(ctx, path, mode, force)
}

// Resize changes how much of a device is used.
func (a *DAX) Resize(ctx context.Context, path string, sizeBytes int64, mode daxtier.Mode,
	force bool) error {
	defer a.change(path)()
	return a.pool.Resize(ctx, path, sizeBytes, mode, force)
}
