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

// ArenaOptions says what to open as an arena. Of Options it uses neither Policy, MaxSpaces and
// Seed, which Books has, nor what is about how bytes are moved; Workers is how many goroutines keep
// what is committed.
type ArenaOptions struct {
	Options
	// Books is the engine's. What an arena needs is set in it: FixedRegions, NoExtend,
	// ArenaLimitBytes if it is 0, one more tier, and its hooks are called beside the arena's own.
	Books engine.Config
	// Added is told of a slab before a slot of it is granted: the id of its region, its file, and
	// that its slots are so many bytes from byte at on. It answers how far behind the beginning of
	// the region that is: offsets in the region are by that.
	Added func(region uint32, file string, at, bytes int64) (skew int64, err error)
	// Removed is told that a region is gone: nobody has a lease in it, or will. When it returns,
	// its bytes may go. It is not called for those that are there at Close.
	Removed func(region uint32)
}

// Arena is a store whose chunks are used where they lie, under leases of its engine, by those who
// have its slabs mapped. They also write them: when a chunk is committed, a keeper computes its
// checksums, makes its bytes last, and writes its entry; from then on it is found again, whatever
// happens to the process. What is found so is only believed once it was checked (Verify). All else,
// from carving to the healing of slabs and to directories that come and go, is as in a Disk.
//
// The old entry of a slot is not freed before the slot is filled again: what is in it then does not
// check out with the old entry's checksums, which are seeded with page and generation.
type Arena struct {
	o ArenaOptions
	d *Disk

	tier    int           // the arena's own, among those of its engine
	bell    chan struct{} // rung when chunks wait for a keeper
	keeping atomic.Int64  // keepers that may have some

	checks   chan struct{} // has an entry for each chunk that is being checked
	checkMu  sync.Mutex
	checking map[uint64]chan struct{} // by handle: closed when the check has ended

	// why what is in some slab will not be found again; nil, or of nil: it will
	lost     atomic.Pointer[error]
	verified atomic.Uint64
	failed   atomic.Uint64 // chunks whose entry could not be written
}

// OpenArena opens a store as an arena, with everything that was kept in it: that is told of by
// Added. Both hooks must be given, and its files must be vfs.Resident. Errors are those of Open,
// and of Added.
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

// books is what the arena's engine is told.
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
	c.OnGone = func(region, slot uint32) {
		d.onGone(region, slot)
		if a.o.Books.OnGone != nil {
			a.o.Books.OnGone(region, slot)
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

// start has the keepers go on until the arena is closed.
func (a *Arena) start() {
	for range a.d.o.Workers {
		a.d.helpers.Go(a.keeper)
	}
}

// announce tells of a slab's region.
func (a *Arena) announce(s *slab) error {
	if _, ok := s.buffed.(vfs.Resident); !ok {
		return fmt.Errorf("%w: %s cannot be mapped", tiers.ErrInvalid, s.place.name())
	}
	skew, err := a.o.Added(s.region, s.place.name(), s.layout.DataOffset,
		int64(s.layout.Slots)*s.layout.StrideBytes)
	s.base = s.layout.DataOffset - skew
	return err
}

// noteUse has slabs that were used since the last call count as used now.
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

// Engine is the arena's engine. It is closed with the arena.
func (a *Arena) Engine() *engine.Engine { return a.d.engine }

// MakeRoom carves slabs for a geometry that has fewer free slots than are wanted, while there are
// blank ones or such that another geometry left cold. It is cheap if there is nothing to do; any
// goroutine may call it.
func (a *Arena) MakeRoom(g tiers.Geometry, slots int) {
	if a.d.begin(context.Background()) != nil {
		return
	}
	defer a.d.end()
	a.d.makeRoom(g, slots+spareSlots)
}

// spareSlots are carved beyond what is wanted: others, and moves, may take some before it is
// granted, and then something would be evicted.
const spareSlots = 32

// Forget durably frees the entries of what was dropped, also of what is on its way to where it is
// kept, or moved to.
func (a *Arena) Forget() error {
	if err := a.d.begin(context.Background()); err != nil {
		return err
	}
	defer a.d.end()
	return a.d.flushDropped()
}

// flushPoll is how often Flush looks.
const flushPoll = 5 * time.Millisecond

// Flush waits until what was committed before is kept, or ctx ends, which is the error then.
func (a *Arena) Flush(ctx context.Context) error {
	for {
		if err := a.d.going(ctx); err != nil {
			return err
		}
		// In this order: a keeper counts before it takes anything out of the queue.
		if queued, _ := a.d.engine.CascadeQueue(a.tier); queued == 0 && a.keeping.Load() == 0 {
			return nil
		}
		a.ring()
		if err := a.d.pause(ctx, flushPoll); err != nil {
			return err
		}
	}
}

// Dirs, AddDir, RemoveDir and ResizeDir are those of a Disk. What is removed or made smaller
// without force must not be leased for longer than a moment.
func (a *Arena) Dirs() []DirStatus { return a.d.Dirs() }

// AddDir is that of a Disk.
func (a *Arena) AddDir(ctx context.Context, dir string, bytes int64) error {
	return a.d.AddDir(ctx, dir, bytes)
}

// RemoveDir is that of a Disk.
func (a *Arena) RemoveDir(ctx context.Context, dir string, how Mode, force bool) error {
	return a.d.RemoveDir(ctx, dir, how, force)
}

// ResizeDir is that of a Disk.
func (a *Arena) ResizeDir(ctx context.Context, dir string, bytes int64, how Mode,
	force bool) error {
	return a.d.ResizeDir(ctx, dir, bytes, how, force)
}

// Close ends the arena and its engine. What waits to be kept is lost: Flush first. Nobody may use
// the arena's bytes any more. It is idempotent.
func (a *Arena) Close() error { return a.d.Close() }

// ArenaStats is an arena at one moment. Chunks are counted since it was opened where nothing else
// is said.
type ArenaStats struct {
	CapacityBytes int64 // of the slabs that work
	UsedBytes     int64 // in slots that are not free
	Slabs         int
	GivenUp       int // slabs that do not work
	// the last of them does not; or a slab's file is gone, and it goes on without
	Why        error
	Kept       int // chunks that would be found again now
	Waiting    int // chunks that wait to be kept
	Unverified int // chunks that were found and not checked yet
	Verified   uint64
	Corrupt    uint64 // chunks that did not check out
	Unreadable uint64 // chunks that could not be read
	Failed     uint64 // chunks that can be used, but could not be kept
}

// Stats is cheap.
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
