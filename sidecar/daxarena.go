package sidecar

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
	"lookaside/tiers"
	"lookaside/tiers/daxtier"
	"lookaside/tiers/engine"
)

// unmapPatience is how long a worker may take to let go of memory that is being removed. It
// finishes the copies that began before.
const unmapPatience = 30 * time.Second

// slabPatience is how long workers may take to map a slab before it is used all the same. Stores
// for which there is no room anywhere else wait meanwhile. A test changes it.
var slabPatience = 5 * time.Second

// daxArena is the arena on DAX devices. What was committed to it is found again, so it is full from
// the start on. Its regions are the slabs of package pool: they come when one is carved, or a
// device added, and go when one is carved anew, or a device removed.
type daxArena struct {
	cfg     ArenaConfig
	log     *zap.Logger
	control *dax.Control
	pool    *daxtier.Arena // from begin on
	found   int            // chunks, by begin

	mu sync.Mutex
	// each with an FD of its own, for workers that connect while its device goes
	regions  map[uint32]daxtier.Region
	server   *announcer     // nil: nobody has been told of a region yet
	changing map[string]int // changes under way of a device, by its path

	retracting sync.WaitGroup // regions that workers are to let go of, which nobody waits for
}

// DAXArenaState is what an arena on DAX knows beside what all arenas know.
type DAXArenaState struct {
	HotPlugEnabled   bool       `json:"hotplug_enabled" doc:"Whether devices may be added, removed and resized: arena.hotplug."`
	Devices          []DAXArena `json:"devices" doc:"In the order in which they came."`
	Slabs            int        `json:"slabs" doc:"Pieces that the devices are cut into."`
	SlabsGivenUp     int        `json:"slabs_given_up" doc:"Of these, those that were given up with what they held, because they failed. They are tried again."`
	Error            string     `json:"error" doc:"Why the last of those was given up; empty if there is none."`
	RecoveredChunks  int        `json:"recovered_chunks" doc:"Chunks that were found on the devices at the start."`
	CorruptChunks    uint64     `json:"corrupt_chunks" doc:"Chunks that were checked, before their first use or as they were moved, and dropped because they did not match their checksums."`
	UnreadableChunks uint64     `json:"unreadable_chunks" doc:"Chunks that were dropped because the device could not be read there."`
	KeptChunks       int        `json:"kept_chunks" doc:"Chunks that would be found again if this process were killed now."`
	WaitingChunks    int        `json:"waiting_chunks" doc:"Chunks that were committed, and wait for their checksums and their entry on the device: what a kill would lose now."`
	UnkeptChunks     uint64     `json:"unkept_chunks" doc:"Chunks that could not be kept, because the device failed there; they can be used until this process ends."`
}

func newDAXArena(cfg ArenaConfig, control *dax.Control, log *zap.Logger) *daxArena {
	return &daxArena{cfg: cfg, log: log, control: control, regions: map[uint32]daxtier.Region{},
		changing: map[string]int{}}
}

var (
	_ arena   = (*daxArena)(nil)
	_ daxPool = (*daxArena)(nil)
)

// begin implements arena: it opens the devices, and finds what is on them.
func (a *daxArena) begin(books engine.Config) (*engine.Engine, error) {
	start := time.Now()
	c := &a.cfg.DAX
	o := daxtier.ArenaOptions{
		Options: daxtier.Options{
			OffsetBytes: c.Offset, Rank: c.Rank, Ranks: c.Ranks, AllowFiles: c.AllowFiles,
			SlabBytes: c.Slab, HotPlug: c.HotPlug,
			Policy: a.cfg.Eviction, MaxSpaces: books.MaxSpaces, Seed: connector.RandomID(),
			Log: a.log,
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
		a.log.Info("device opened", zap.String("device", d.Path),
			zap.String("size", dax.FormatSize(d.SizeBytes)), zap.Int("chunks", d.Slots.Used))
	}
	a.log.Info("devices recovered", zap.String("kind", string(kindDAX)),
		zap.String("capacity", dax.FormatSize(st.TotalCapacityBytes)),
		zap.Int("chunks_found", found.ReadySlots),
		zap.String("of", dax.FormatSize(found.UsedBytes)),
		zap.Duration("in", time.Since(start).Round(time.Millisecond)))
	return a.pool.Engine(), nil
}

// memoryBytes implements arena: a device is no memory of a control group's.
func (a *daxArena) memoryBytes() int64 { return 0 }

// limitBytes implements arena. With hot plug it may become larger than it is.
func (a *daxArena) limitBytes() int64 {
	if a.cfg.DAX.HotPlug {
		return math.MaxInt64
	}
	return a.pool.Status().TotalCapacityBytes
}

func announced(r *daxtier.Region) connector.Region {
	return connector.Region{ID: r.ID, Kind: r.Kind, FD: r.FD, OffsetBytes: r.OffsetBytes,
		SizeBytes: r.SizeBytes, PageSize: r.PageSize}
}

// added is told of a region before anything in it can be granted.
func (a *daxArena) added(r daxtier.Region) error {
	fd, err := unix.FcntlInt(uintptr(r.FD), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("%s: a descriptor for workers: %w", r.Path, err)
	}
	r.FD = fd
	a.mu.Lock()
	a.regions[r.ID] = r
	server, n := a.server, len(a.regions)
	a.mu.Unlock()
	if server != nil {
		server.AnnounceRegion(announced(&r))
	}
	a.control.SetRegions(uint64(n))
	return nil
}

// removed is told of a region in which nobody has or gets a lease any more. Where its device goes,
// it waits until workers have unmapped it. Where its bytes only go to another region it does not: a
// mapping that nobody uses does no harm, and it may be a session that makes room, whose worker
// could not answer meanwhile.
func (a *daxArena) removed(id uint32) {
	a.mu.Lock()
	r, ok := a.regions[id]
	delete(a.regions, id)
	server, n, wait := a.server, len(a.regions), a.changing[filepath.Clean(r.Path)] > 0
	a.mu.Unlock()
	if !ok {
		return
	}
	a.control.SetRegions(uint64(n))
	retract := func() {
		if server != nil {
			server.RetractRegion(id, unmapPatience)
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
func (a *daxArena) change(path string) (done func()) {
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

// start implements arena.
func (a *daxArena) start(server *announcer) error {
	a.mu.Lock()
	a.server = server
	known := make([]daxtier.Region, 0, len(a.regions))
	for _, r := range a.regions {
		known = append(known, r)
	}
	a.mu.Unlock()
	for i := range known {
		server.AnnounceRegion(announced(&known[i]))
	}
	a.publish()
	return nil
}

// run implements arena.
func (a *daxArena) run(ctx context.Context, server *announcer) {
	tick := time.NewTicker(usageEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-server.Wanted():
		}
		a.publish()
	}
}

// publish tells clients how full the arena is.
func (a *daxArena) publish() {
	a.control.SetUsage(uint64(a.pool.Status().TotalCapacityBytes),
		uint64(a.pool.Engine().Stats().UsedBytes))
}

// bytes implements arena.
func (a *daxArena) bytes(region uint32) []byte {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.regions[region].Bytes
}

// flush implements arena.
func (a *daxArena) flush(ctx context.Context) error { return a.pool.Flush(ctx) }

// status implements arena.
func (a *daxArena) status(stats *engine.Stats) ArenaStatus {
	p, s := a.pool.Status(), a.pool.Stats()
	st := ArenaStatus{
		Kind: kindDAX, Reason: "it was asked for", LimitBytes: p.TotalCapacityBytes,
		CapacityBytes: p.TotalCapacityBytes, UsedBytes: stats.UsedBytes, Regions: []RegionStatus{},
		DAX: &DAXArenaState{
			HotPlugEnabled: a.cfg.DAX.HotPlug, Devices: daxArenas(p), Slabs: s.Slabs,
			SlabsGivenUp: s.GivenUp, RecoveredChunks: a.found,
			CorruptChunks: s.Corrupt, UnreadableChunks: s.Unreadable, KeptChunks: s.Kept,
			WaitingChunks: s.Waiting, UnkeptChunks: s.Failed,
		},
	}
	if s.Why != nil {
		st.DAX.Error = s.Why.Error()
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for id, r := range a.regions {
		st.Regions = append(st.Regions, RegionStatus{Region: id, Kind: dax.Kind(r.Kind),
			Device: r.Path, SizeBytes: r.SizeBytes, PageSize: r.PageSize})
	}
	slices.SortFunc(st.Regions, func(x, y RegionStatus) int {
		return cmp.Compare(x.Region,
			y.Region)
	})
	return st
}

// close implements arena.
func (a *daxArena) close() error {
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

// Status implements daxPool.
func (a *daxArena) Status() daxtier.Status { return a.pool.Status() }

// Add implements daxPool.
func (a *daxArena) Add(ctx context.Context, path string, sizeBytes int64) error {
	return a.pool.Add(ctx, path, sizeBytes)
}

// Remove implements daxPool.
func (a *daxArena) Remove(ctx context.Context, path string, mode daxtier.Mode, force bool) error {
	defer a.change(path)()
	return a.pool.Remove(ctx, path, mode, force)
}

// Resize implements daxPool.
func (a *daxArena) Resize(ctx context.Context, path string, sizeBytes int64, mode daxtier.Mode,
	force bool) error {
	defer a.change(path)()
	return a.pool.Resize(ctx, path, sizeBytes, mode, force)
}

const (
	// drainEvery is how often devices that are drained are looked at.
	drainEvery = 250 * time.Millisecond
	// drainAttempt bounds one attempt to empty one, which waits for leases: other devices want
	// their turn.
	drainAttempt = 5 * time.Second
	// drainPause is how long there is none after one that did not come to its end.
	drainPause = time.Second
)

// A drainer empties the devices of the arena that are drained, one at a time, until they are gone
// or in use again. Changes that somebody asks for go first.
type drainer struct {
	turn sync.RWMutex // held for reading by a change that was asked for, for writing by an attempt

	mu     sync.Mutex
	asked  int                // changes that were asked for and have not ended
	stop   context.CancelFunc // ends the attempt under way; nil: there is none
	device string             // whose it is
}

// change lets a change begin that was asked for; the caller calls done.
func (q *drainer) change() (done func()) {
	q.mu.Lock()
	q.asked++
	if q.stop != nil {
		q.stop()
	}
	q.mu.Unlock()
	q.turn.RLock()
	return func() {
		q.turn.RUnlock()
		q.mu.Lock()
		q.asked--
		q.mu.Unlock()
	}
}

// emptying is the device that is being emptied because it is drained, or "".
func (q *drainer) emptying() string {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.device
}

// attempt calls try unless somebody asks for a change, which ends it.
func (q *drainer) attempt(ctx context.Context, device string,
	try func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, drainAttempt)
	defer cancel()
	q.mu.Lock()
	if q.asked > 0 {
		q.mu.Unlock()
		return tiers.ErrBusy
	}
	q.stop, q.device = cancel, device
	q.mu.Unlock()
	defer func() {
		q.mu.Lock()
		q.stop, q.device = nil, ""
		q.mu.Unlock()
	}()
	q.turn.Lock()
	defer q.turn.Unlock()
	if err := ctx.Err(); err != nil {
		return err
	}
	return try(ctx)
}

// drainArena empties the devices that are drained, until ctx is done: their chunks are moved to the
// others, or dropped where there is no room for them.
func (d *Daemon) drainArena(ctx context.Context) {
	t := time.NewTimer(drainEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		wait := drainEvery
		for _, dev := range d.arenaPool.Status().Devices {
			if dev.State == stateDrained && d.emptyDevice(ctx, dev.Path) != nil {
				wait = drainPause
			}
		}
		t.Reset(wait)
	}
}

// emptyDevice tries to empty and remove a device that is drained.
func (d *Daemon) emptyDevice(ctx context.Context, path string) error {
	how := daxtier.Migrate
	err := d.drainer.attempt(ctx, path, func(ctx context.Context) error {
		if st := deviceOf(d.arenaPool.Status(), path); st == nil || st.State != stateDrained {
			// meanwhile somebody wanted it otherwise
			return nil
		}
		err := d.arenaPool.Remove(ctx, path, daxtier.Migrate, true)
		if errors.Is(err, daxtier.ErrNoRoom) {
			how = daxtier.Evict
			err = d.arenaPool.Remove(ctx, path, daxtier.Evict, true)
		}
		if err == nil {
			d.log.Info("DAX device drained and removed from the arena: take it out of the settings too", zap.String("device", path), zap.String("chunks", map[daxtier.Mode]string{
				daxtier.Migrate: "moved to the other devices",
				daxtier.Evict:   "dropped: there was no room for them elsewhere",
			}[how]))
		}
		return err
	})
	if err != nil && ctx.Err() == nil && !errors.Is(err, context.DeadlineExceeded) &&
		!errors.Is(err, context.Canceled) && !errors.Is(err, tiers.ErrBusy) &&
		!errors.Is(err, daxtier.ErrNotFound) {
		d.log.Warn("a drained DAX device cannot be emptied yet; it is tried again",
			zap.String("device", path), zap.Error(err))
	}
	return err
}

// stateDrained is the state of a device that is drained.
const stateDrained = "draining"

// deviceOf is a device of a pool, or nil.
func deviceOf(st daxtier.Status, path string) *daxtier.DeviceStatus {
	path = filepath.Clean(path)
	i := slices.IndexFunc(st.Devices, func(d daxtier.DeviceStatus) bool { return d.Path == path })
	if i < 0 {
		return nil
	}
	return &st.Devices[i]
}
