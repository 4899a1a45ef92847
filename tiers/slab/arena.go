package slab

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/vfs"
)

// ArenaOptions says what to open as an arena. Five fields of Options have no effect: Policy,
// MaxSpaces, Seed, Tenants and Shares, which Books sets. The fields about moving bytes have none
// either, except Workers: the number of goroutines that keep what is committed.
type ArenaOptions struct {
	Options
	// Books configures the arena's engine. OpenArena sets FixedRegions and NoExtend, sets
	// ArenaLimitBytes if it is 0, adds one tier, and calls the hooks given here beside its own.
	Books engine.Config
	// Added is called before the first slot of a slab is granted. It gets the id of the slab's
	// region, its file, and the offset and size of the slots in that file. It returns skew, by
	// which offsets in the region are shifted: the slots begin skew bytes behind the region's
	// start.
	Added func(region uint32, file string, at, bytes int64) (skew int64, err error)
	// Removed is called when a region is gone: nobody has or will get a lease in it. Once Removed
	// returns, the region's bytes may disappear. It is not called for regions that exist at Close.
	Removed func(region uint32)
}

// Arena is a store whose chunks are used in place. Processes that map its slabs read and write them
// under leases of its engine. When a chunk is committed, a keeper computes its checksums, makes its
// bytes durable and writes its entry. From then on the chunk survives the process. A chunk found at
// opening is used only after Verify has checked it. Carving, the healing of slabs, and directories
// that come and go work as in a Disk.
//
// The old entry of a slot is not freed before the slot is filled again. New contents cannot pass
// for the old chunk, because an entry's checksums are seeded with page and generation.
type Arena struct {
	o ArenaOptions
	d *Disk

	tier    int           // the index of the arena's own tier in its engine
	bell    chan struct{} // rung when chunks wait for a keeper
	keeping atomic.Int64  // keepers that may hold chunks

	checks   chan struct{} // has one entry for each chunk being checked
	checkMu  sync.Mutex
	checking map[uint64]chan struct{} // by handle: closed when the check has ended

	// why chunks of some slab will not be found again; nil, or a pointer to nil: they will
	lost     atomic.Pointer[error]
	verified atomic.Uint64
	failed   atomic.Uint64 // chunks whose entry could not be written
}

// OpenArena opens a store as an arena, with all chunks that were kept in it; Added reports where
// they lie. Both hooks must be set, and the files must implement vfs.Resident. It returns the
// errors of Open and of Added.
func OpenArena(o ArenaOptions) (*Arena, error) {
	if o.Added == nil || o.Removed == nil {
		return nil, fmt.Errorf("%w: an arena without hooks", tiers.ErrInvalid)
	}
	a := &Arena{
		o: o, tier: len(o.Books.Tiers), bell: make(chan struct{}, 1), checks: make(chan struct{},
			runtime.GOMAXPROCS(0)), checking: map[uint64]chan struct{}{},
	}
	if _, err := open(o.Options, a); err != nil {
		return nil, err
	}
	return a, nil
}

// books returns the configuration of the arena's engine.
func (a *Arena) books() engine.Config {
	d, c := a.d, a.o.Books
	c.FixedRegions, c.NoExtend = true, true
	if c.ArenaLimitBytes == 0 {
		c.ArenaLimitBytes = d.o.CapacityBytes
	}
	c.Tiers = append(c.Tiers[:len(c.Tiers):len(c.Tiers)],
		engine.TierAdmission{Admit: engine.AdmitStored, Self: true, Queue: 1 << 24})
	c.Wake = func(w engine.Work) {
		if int(w) == a.tier {
			a.ring()
		} else if a.o.Books.Wake != nil {
			a.o.Books.Wake(w)
		}
	}
	c.OnGone = func(region, piece, slot uint32) {
		d.onGone(region, piece, slot)
		if a.o.Books.OnGone != nil {
			a.o.Books.OnGone(region, piece, slot)
		}
	}
	return c
}

func (a *Arena) ring() {
	select {
	case a.bell <- struct{}{}:
	default:
	}
}

// start starts the keepers. They run until the arena is closed.
func (a *Arena) start() {
	for range a.d.o.Workers {
		a.d.helpers.Go(a.keeper)
	}
}

// announce calls Added for a slab.
func (a *Arena) announce(s *slab) error {
	if _, ok := s.buffed.(vfs.Resident); !ok {
		return fmt.Errorf("%w: %s cannot be mapped", tiers.ErrInvalid, s.place.name())
	}
	skew, err := a.o.Added(s.region, s.place.name(), s.layout.DataOffset,
		int64(s.layout.Slots)*s.layout.StrideBytes)
	s.base = s.layout.DataOffset - skew
	return err
}

// noteUse updates the time of last use of each slab that was used since the last call.
func (a *Arena) noteUse() {
	d := a.d
	d.regionsMu.RLock()
	slabs := make([]*slab, 0, len(d.byRegion))
	for _, s := range d.byRegion {
		slabs = append(slabs, s)
	}
	d.regionsMu.RUnlock()
	for _, s := range slabs {
		if st, ok := d.engine.Region(s.region); ok && s.lastUse.Swap(st.LastUse) != st.LastUse {
			d.touch(s)
		}
	}
}

// Engine returns the arena's engine, which the arena closes.
func (a *Arena) Engine() *engine.Engine { return a.d.engine }

// MakeRoom carves slabs for a geometry with fewer free slots than wanted. It takes blank slabs, and
// slabs that another geometry has not used for long. It is cheap if nothing needs doing; any
// goroutine may call it.
func (a *Arena) MakeRoom(g tiers.Geometry, slots int) {
	if a.d.begin(context.Background()) != nil {
		return
	}
	defer a.d.end()
	a.d.makeRoom(g, slots+spareSlots)
}

// spareSlots is the number of slots carved beyond those wanted. Other stores and moves may take
// some before they are granted, and then a chunk would be evicted.
const spareSlots = 32

// Freeze has the arena grant no slot, evict nothing and verify nothing, until Thaw. Call it before
// anything is granted, if a process may still write to what another run of the arena has granted
// it. Such a slot may have an entry of its old chunk, and even match it until that process writes.
// What is found is not served meanwhile. Directories do not change.
func (a *Arena) Freeze() {
	_, places := a.d.table()
	newly := a.d.retire(places)
	a.d.frozen.Store(&newly)
}

// Thaw ends Freeze. Without one it has no effect.
func (a *Arena) Thaw() {
	if was := a.d.frozen.Swap(nil); was != nil {
		a.d.restoreUse(*was)
	}
}

// Frozen reports whether the arena is frozen.
func (a *Arena) Frozen() bool { return a.d.frozen.Load() != nil }

// Forget durably frees the entries of dropped chunks, including chunks that are being kept or moved
// at that moment.
func (a *Arena) Forget() error {
	if err := a.d.begin(context.Background()); err != nil {
		return err
	}
	defer a.d.end()
	return a.d.flushDropped()
}

// flushPoll is the interval at which Flush polls.
const flushPoll = 5 * time.Millisecond

// Flush waits until all chunks committed before the call are kept. If ctx ends first, it returns
// ctx's error.
func (a *Arena) Flush(ctx context.Context) error {
	for {
		if err := a.d.going(ctx); err != nil {
			return err
		}
		// The order matters: a keeper counts itself before it takes chunks from the queue.
		if queued, _ := a.d.engine.CascadeQueue(a.tier); queued == 0 && a.keeping.Load() == 0 {
			return nil
		}
		a.ring()
		if err := a.d.pause(ctx, flushPoll); err != nil {
			return err
		}
	}
}

// Dirs is as Disk.Dirs.
func (a *Arena) Dirs() []DirStatus { return a.d.Dirs() }

// AddDir is as Disk.AddDir.
func (a *Arena) AddDir(ctx context.Context, dir string, bytes int64) error {
	return a.d.AddDir(ctx, dir, bytes)
}

// RemoveDir is as Disk.RemoveDir. Without force, chunks in the directory may be leased for a moment
// only.
func (a *Arena) RemoveDir(ctx context.Context, dir string, how Mode, force bool) error {
	return a.d.RemoveDir(ctx, dir, how, force)
}

// ResizeDir is as Disk.ResizeDir. Without force, chunks in what is cut off may be leased for a
// moment only.
func (a *Arena) ResizeDir(ctx context.Context, dir string, bytes int64, how Mode,
	force bool) error {
	return a.d.ResizeDir(ctx, dir, bytes, how, force)
}

// Close ends the arena and its engine. It drops what waits to be kept: call Flush first. Nobody may
// use the arena's bytes after Close begins. Close is idempotent.
func (a *Arena) Close() error { return a.d.Close() }

// ArenaStats is a snapshot of an arena. Counters start when the arena is opened.
type ArenaStats struct {
	CapacityBytes int64 // of the slabs that work
	UsedBytes     int64 // in slots that are not free
	Slabs         int
	GivenUp       int // slabs that do not work
	// the last error of a slab that does not work, or of one whose file is gone while it stays in
	// use
	Why        error
	Kept       int // chunks that would be found again if the process died now
	Waiting    int // chunks that wait to be kept
	Unverified int // chunks found at opening and not checked yet
	Verified   uint64
	Corrupt    uint64 // chunks that did not match their checksums
	Unreadable uint64 // chunks that could not be read
	Failed     uint64 // chunks that can be used but could not be kept
}

// Stats returns a snapshot. It is cheap.
func (a *Arena) Stats() ArenaStats {
	d := a.d
	st := ArenaStats{
		UsedBytes: d.engine.Stats().UsedBytes, Unverified: d.engine.Unverified(),
		Verified: a.verified.Load(), Corrupt: d.corrupt.Load(), Unreadable: d.unread.Load(),
		Failed: a.failed.Load(),
	}
	st.Waiting, _ = d.engine.CascadeQueue(a.tier)
	d.regionsMu.RLock()
	places := d.places
	for _, s := range d.byRegion {
		s.mu.Lock()
		st.Kept += s.kept
		s.mu.Unlock()
	}
	d.regionsMu.RUnlock()
	st.Slabs = len(places)
	if lost := a.lost.Load(); lost != nil {
		st.Why = *lost
	}
	for _, p := range places {
		if err := p.failure(); err != nil {
			st.GivenUp++
			st.Why = err
			continue
		}
		st.CapacityBytes += p.bytes
	}
	return st
}
