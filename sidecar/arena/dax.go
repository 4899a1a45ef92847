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

// A DAX is an arena on DAX devices. What was committed to it is found again, so it is full from
// the start on. Its regions are the slabs of package pool: they come when one is carved, or a
// device added, and go when one is carved anew, or a device removed.
type DAX struct {
	Options
	pool   *daxtier.Arena // from Begin on
	found  int            // chunks, by Begin
	drains drainer

	mu sync.Mutex
	// each with an FD of its own, for workers that connect while its device goes
	regions  map[uint32]daxtier.Region
	workers  Workers        // nil: nobody has been told of a region yet
	changing map[string]int // changes under way of a device, by its path

	retracting sync.WaitGroup // regions that workers are to let go of, which nobody waits for
}

func newDAX(o Options) *DAX {
	return &DAX{Options: o, regions: map[uint32]daxtier.Region{}, changing: map[string]int{}}
}

var _ Arena = (*DAX)(nil)

// Begin implements Arena: it opens the devices, and finds what is on them.
func (a *DAX) Begin(books engine.Config) (*engine.Engine, error) {
	start := time.Now()
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
		return nil, fmt.Errorf("arena.devices: %w", err)
	}
	st, found := a.pool.Status(), a.pool.Engine().Stats()
	a.found = found.ReadySlots
	for _, d := range st.Devices {
		a.Log.Info("device opened", zap.String("device", d.Path),
			zap.String("size", bytesize.Format(d.SizeBytes)), zap.Int("chunks", d.Slots.Used))
	}
	a.Log.Info("devices recovered", zap.String("kind", string(settings.KindDAX)),
		zap.String("capacity", bytesize.Format(st.TotalCapacityBytes)),
		zap.Int("chunks_found", found.ReadySlots),
		zap.String("of", bytesize.Format(found.UsedBytes)),
		zap.Duration("in", time.Since(start).Round(time.Millisecond)))
	return a.pool.Engine(), nil
}

// MemoryBytes implements Arena: a device is no memory of a control group's.
func (a *DAX) MemoryBytes() int64 { return 0 }

// LimitBytes implements Arena. With hot plug it may become larger than it is.
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

// added is told of a region before anything in it can be granted.
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
		workers.AnnounceRegion(announced(&r))
	}
	a.Control.SetRegions(uint64(n))
	return nil
}

// removed is told of a region in which nobody has or gets a lease any more. Where its device goes,
// it waits until workers have unmapped it. Where its bytes only go to another region it does not: a
// mapping that nobody uses does no harm, and it may be a session that makes room, whose worker
// could not answer meanwhile.
func (a *DAX) removed(id uint32) {
	a.mu.Lock()
	r, ok := a.regions[id]
	delete(a.regions, id)
	workers, n, wait := a.workers, len(a.regions), a.changing[filepath.Clean(r.Path)] > 0
	a.mu.Unlock()
	if !ok {
		return
	}
	a.Control.SetRegions(uint64(n))
	retract := func() {
		if workers != nil {
			workers.RetractRegion(id)
		}
		_ = unix.Close(r.FD) // it is a duplicate: nothing was written by it
	}
	if wait {
		retract()
		return
	}
	a.retracting.Go(retract)
}

// change notes that a device is being changed; the caller calls done.
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
func (a *DAX) Start(workers Workers) error {
	a.mu.Lock()
	a.workers = workers
	known := make([]daxtier.Region, 0, len(a.regions))
	for _, r := range a.regions {
		known = append(known, r)
	}
	a.mu.Unlock()
	for i := range known {
		workers.AnnounceRegion(announced(&known[i]))
	}
	a.publish()
	return nil
}

// Run implements Arena.
func (a *DAX) Run(ctx context.Context, workers Workers) {
	var drains sync.WaitGroup
	drains.Go(func() { a.drain(ctx) })
	defer drains.Wait()
	tick := time.NewTicker(usageEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-workers.Wanted():
		}
		a.publish()
	}
}

// publish tells clients how full the arena is.
func (a *DAX) publish() {
	a.Control.SetUsage(uint64(a.pool.Status().TotalCapacityBytes),
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
		Kind: settings.KindDAX, Reason: "it was asked for", LimitBytes: p.TotalCapacityBytes,
		CapacityBytes: p.TotalCapacityBytes, UsedBytes: stats.UsedBytes,
		DAX: &DAXStatus{HotPlug: a.Options.DAX.HotPlug, Devices: p, Stats: a.pool.Stats(),
			Found: a.found},
	}
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

// Devices describes the devices. One that is being emptied because it is drained is draining.
func (a *DAX) Devices() daxtier.Status {
	// Before the status: what it says then may be newer, but is no state of an attempt that nobody
	// knows of.
	emptying := a.drains.emptying()
	st := a.pool.Status()
	for i := range st.Devices {
		if d := &st.Devices[i]; d.Path == emptying && d.State != "active" {
			d.State = stateDrained
		}
	}
	return st
}

// Change begins a change of the devices that somebody asks for. Drains wait until done is called.
func (a *DAX) Change() (done func()) { return a.drains.change() }

// Add adds a device.
func (a *DAX) Add(ctx context.Context, path string, sizeBytes int64) error {
	return a.pool.Add(ctx, path, sizeBytes)
}

// Remove removes a device, or has it drained.
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
