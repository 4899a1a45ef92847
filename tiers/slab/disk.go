// Package slab keeps chunks in preallocated slab files. Chunks that were stored are found again
// after a restart. A store is used in one of two ways: as a tier (Disk), or as an arena whose
// chunks are used in place (Arena).
//
// An engine.Engine keeps the store's books; its regions are the slabs. Package media has the form
// of a slab on the medium, package vfs the file operations. The checksums of pages stay in memory,
// so a load reads the pages and nothing else.
//
// # A store
//
// The engine grants a slot, and evicts a chunk if it must. If the slab's directory still has an
// entry of the slot's old chunk, that entry is freed and synced first. Then the data is written
// straight from the caller's memory, then the entry. One fdatasync makes both durable, and only
// then does the engine make the chunk visible. All transfers of a call share their syncs, and so do
// stores that wait for a sync of the same slab.
//
// A power cut may leave an entry without its data if both were written and not yet synced. Each
// entry says up to which commit the slab was durable when the entry was written. So opening the
// slab knows the few entries that are in doubt, and reads and checks their data.
//
// # Failing disks
//
// A chunk that cannot be read or does not match its checksum is dropped. A slab is given up if a
// sync of it fails, or if I/O fails several times in a row. All its chunks are dropped, because
// nothing is known about them any more. Its file is made anew, after a second at first and up to a
// minute later, until that works; then the slab is in use again, empty. Other slabs go on
// meanwhile.
//
// # Locks
//
// A Disk has these locks, in the order in which they are taken:
//
//   - admin: held by a change of the directories, and by Close.
//   - calls: held for reading by each call, for writing by Close. No other holder of admin takes it.
//   - moving: held for writing while chunks move, and while the entries of all dropped chunks are
//     freed. Held for reading while the entry of a chunk is written that can already be found.
//   - shape: guards which slabs exist. It is held while one is carved.
//   - slab.life: held for reading by a user of the slab's files who has no lease or grant in it,
//     for writing to close them. A lease or grant keeps the region, so its holder needs no lock.
//   - slab.order: held while an entry is written.
//   - the engine's lock.
//   - slab.mu and Disk.regionsMu: innermost, and never held across I/O. They are also taken under
//     the engine's lock.
package slab

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/tenant"
	"lookaside/tiers/vfs"
	"lookaside/tiers/why"
)

// Direct says whether the page cache is bypassed.
type Direct string

const (
	DirectAuto   Direct = "auto"   // where the file system can
	DirectAlways Direct = "always" // or Open fails
	DirectNever  Direct = "never"
)

// Options says what to open. A zero field takes the stated default.
type Options struct {
	// FS has the directories. Default vfs.OS.
	FS vfs.FS
	// Recycled says that space allocated by FS reads as its old contents, not as zeros.
	Recycled bool
	// Dirs are the directories over which the slabs are spread. Missing ones are made. One process
	// at a time has them open. The list may be empty: AddDir adds directories.
	Dirs []string
	// CapacityBytes is the size of all slabs together, their directories included. An existing
	// store grows or shrinks to it by whole slabs.
	CapacityBytes int64
	// DirBytes is the size of each directory, in the order of Dirs. CapacityBytes is then their
	// sum. Default: equal parts.
	DirBytes []int64
	// SlabBytes is the size of a new slab. Default: a 32nd of the capacity, within 256 MiB and 64
	// GiB, and large enough that there are at most 60 slabs.
	SlabBytes int64
	// Policy is the name of the eviction policy. Default: the engine's.
	Policy string
	// Workers is the number of concurrent requests, at most 256. Default 4.
	Workers int
	// Queue is how many requests may wait for a worker, in each direction. Default: enough to keep
	// the workers busy. A longer queue wakes submitters less often.
	Queue int
	// MaxLoads and MaxStores bound the requests of loads and of stores that are submitted at one
	// time. Default: enough to keep the workers busy.
	MaxLoads, MaxStores int
	// PieceBytes is the largest request, a multiple of 4 KiB. Default 4 MiB.
	PieceBytes int
	// Direct says whether the page cache is bypassed. Default DirectAuto.
	Direct Direct
	// MaxSpaces bounds the spaces that hold chunks at one time. Default 1,024.
	MaxSpaces int
	// Seed keys the index's hash; see engine.Config.
	Seed uint64
	// Tenants has the tenants that chunks belong to, and Shares divides the store among them; see
	// engine.Config. Default: there are none.
	Tenants *tenant.Registry
	Shares  tenant.Shares
	// Gone remembers what is dropped, as GoneTier; see engine.Config. Default: nothing does.
	Gone     *why.Memory
	GoneTier uint8
	// RetryEvery is the delay before the first attempt to bring a given-up slab back. Default 1 s.
	RetryEvery time.Duration
	// WatchEvery is how often the store checks that its files were not removed. Default 10 s.
	WatchEvery time.Duration
	// Log gets what an operator needs to know. Default: none.
	Log *zap.Logger
}

const (
	maxSlabs     = 60
	minSlabBytes = 256 << 20
	maxSlabBytes = 64 << 30
	// leastSlabBytes is the smallest slab that is made.
	leastSlabBytes = 64 << 10
	maxWorkers     = 256
	block          = 4096 // pieces are cut at multiples of it; a media.BlockBytes
)

func (o *Options) validate() error {
	if o.FS == nil {
		o.FS = vfs.OS
	}
	if o.Log == nil {
		o.Log = zap.NewNop()
	}
	setInt := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	setInt(&o.Workers, 4)
	setInt(&o.PieceBytes, 4<<20)
	setInt(&o.MaxSpaces, 1024)
	if o.Direct == "" {
		o.Direct = DirectAuto
	}
	if o.RetryEvery == 0 {
		o.RetryEvery = time.Second
	}
	if o.WatchEvery == 0 {
		o.WatchEvery = 10 * time.Second
	}
	if o.DirBytes != nil {
		if len(o.DirBytes) != len(o.Dirs) {
			return fmt.Errorf("%w: sizes of %d directories, and %d directories", tiers.ErrInvalid,
				len(o.DirBytes), len(o.Dirs))
		}
		o.CapacityBytes = 0
		for i, n := range o.DirBytes {
			if n < leastSlabBytes || n > math.MaxInt64-o.CapacityBytes {
				return fmt.Errorf("%w: a capacity of %d bytes in %s", tiers.ErrInvalid, n,
					o.Dirs[i])
			}
			o.CapacityBytes += n
		}
	}
	switch {
	case len(o.Dirs) > maxSlabs || len(o.Dirs) == 0 && o.CapacityBytes != 0:
		return fmt.Errorf("%w: %d directories for %d bytes: at most %d directories",
			tiers.ErrInvalid, len(o.Dirs), o.CapacityBytes, maxSlabs)
	case o.CapacityBytes < int64(len(o.Dirs))*leastSlabBytes:
		return fmt.Errorf("%w: a capacity of %d bytes in %d directories", tiers.ErrInvalid,
			o.CapacityBytes, len(o.Dirs))
	case o.SlabBytes != 0 && o.SlabBytes < leastSlabBytes:
		return fmt.Errorf("%w: slabs of %d bytes: want %d or more", tiers.ErrInvalid, o.SlabBytes,
			leastSlabBytes)
	case o.MaxLoads < 0 || o.MaxStores < 0 || o.Queue < 0:
		return fmt.Errorf("%w: %d loads and %d stores at most, %d in the queue", tiers.ErrInvalid,
			o.MaxLoads, o.MaxStores, o.Queue)
	case o.RetryEvery < 0 || o.WatchEvery < 0:
		return fmt.Errorf("%w: RetryEvery is %v and WatchEvery %v", tiers.ErrInvalid, o.RetryEvery,
			o.WatchEvery)
	case o.Workers < 1 || o.Workers > maxWorkers:
		return fmt.Errorf("%w: %d workers: want 1 to %d", tiers.ErrInvalid, o.Workers, maxWorkers)
	case o.PieceBytes < block || o.PieceBytes%block != 0:
		return fmt.Errorf("%w: pieces of %d bytes: want a multiple of %d", tiers.ErrInvalid,
			o.PieceBytes, block)
	case o.Direct != DirectAuto && o.Direct != DirectAlways && o.Direct != DirectNever:
		return fmt.Errorf("%w: direct %q: want %s, %s or %s", tiers.ErrInvalid, o.Direct,
			DirectAuto, DirectAlways, DirectNever)
	}
	for i, dir := range o.Dirs {
		if dir == "" || slices.Contains(o.Dirs[:i], dir) {
			return fmt.Errorf("%w: directory %q is empty or named twice", tiers.ErrInvalid, dir)
		}
	}
	return nil
}

// Disk is a tiers.Tier, and names its victims. See the package comment.
type Disk struct {
	o       Options
	log     *zap.Logger
	engine  *engine.Engine
	arena   *Arena // nil: it is a tier
	loads   line
	stores  line
	stop    chan struct{}  // closed by Close
	helpers sync.WaitGroup // the workers and the flusher
	healers sync.WaitGroup // those that bring slabs back
	start   time.Time
	store   [16]byte // the store that slabs made now belong to

	frozen   atomic.Pointer[[]*place] // what Arena.Freeze has retired; nil: nothing
	admin    sync.Mutex               // see the package comment
	ending   sync.Once
	stopping chan struct{} // closed when Close begins

	calls  sync.RWMutex // see the package comment
	closed bool         // guarded by calls
	closeE error

	shape sync.Mutex // see the package comment; guards what places point to
	blank atomic.Int32

	moving sync.RWMutex // see the package comment, and flushDropped

	regionsMu sync.RWMutex // innermost
	byRegion  map[uint32]*slab
	// dirs and places change under both shape and regionsMu, and are read under either. A slice
	// that was read is never changed.
	dirs      []*directory
	places    []*place
	regionIDs atomic.Uint32

	spacesMu sync.Mutex
	spaces   map[tiers.Fingerprint]*space

	victims chan struct{} // see VictimsReady

	granting atomic.Int32 // calls of grant under way

	commits atomic.Uint64 // the last commit number
	lookups atomic.Uint64
	corrupt atomic.Uint64
	unread  atomic.Uint64 // chunks that could not be read
}

// space is a space in which chunks were stored.
type space struct {
	id    engine.SpaceID
	g     tiers.Geometry // PageTokens is 1
	print tiers.Fingerprint
	users int // calls that use it; guarded by spacesMu
}

func (s *space) owner() engine.Owner { return engine.Owner(s.id) }

// normal returns a geometry without the fields that do not matter here.
func normal(g tiers.Geometry) tiers.Geometry {
	g.PageTokens = 1
	return g
}

// space returns a space, made anew if make is set, or nil if there is none. The space stays until
// the caller releases it.
func (d *Disk) space(fp tiers.Fingerprint, g tiers.Geometry, make bool) (*space, error) {
	d.spacesMu.Lock()
	defer d.spacesMu.Unlock()
	s := d.spaces[fp]
	if s == nil {
		if !make {
			return nil, nil
		}
		if len(d.spaces) >= d.o.MaxSpaces {
			d.closeEmptySpaces()
		}
		id, err := d.engine.OpenSpace(fp, normal(g))
		if err != nil {
			return nil, err
		}
		if err := d.engine.AddOwner(engine.Owner(id), id); err != nil {
			return nil, errors.Join(err, d.engine.CloseSpace(id))
		}
		s = &space{id: id, g: normal(g), print: fp}
		d.spaces[fp] = s
	}
	if s.g != normal(g) {
		return nil, fmt.Errorf("%w: space %s has geometry %+v, asked for %+v",
			tiers.ErrIncompatible, fp.Short(), s.g, g)
	}
	s.users++
	return s, nil
}

func (d *Disk) letGo(s *space) {
	d.spacesMu.Lock()
	s.users--
	d.spacesMu.Unlock()
}

// closeEmptySpaces closes the spaces that nobody uses and that have no chunks.
func (d *Disk) closeEmptySpaces() {
	for _, st := range d.engine.Spaces() {
		s := d.spaces[st.Fingerprint]
		if st.Chunks > 0 || s == nil || s.users > 0 {
			continue
		}
		d.engine.RemoveOwner(s.owner())
		if err := d.engine.CloseSpace(s.id); err == nil {
			delete(d.spaces, st.Fingerprint)
		} else if err := d.engine.AddOwner(s.owner(), s.id); err != nil {
			// not reached: the owner existed a moment ago
			d.log.Error("a space lost its owner", zap.Error(err))
		}
	}
}

// begin starts a call and end ends it. Close waits for calls that have begun.
func (d *Disk) begin(ctx context.Context) error {
	d.calls.RLock()
	if d.closed {
		d.calls.RUnlock()
		return tiers.ErrClosed
	}
	if ctx.Err() != nil {
		d.calls.RUnlock()
		return context.Cause(ctx)
	}
	return nil
}

func (d *Disk) end() { d.calls.RUnlock() }

// slabOf returns the slab of a region, or nil if it is gone.
func (d *Disk) slabOf(region uint32) *slab {
	d.regionsMu.RLock()
	defer d.regionsMu.RUnlock()
	return d.byRegion[region]
}

// found returns the space of a recovered chunk, which the caller releases. It fails if there is no
// room for another space, or if the space is known with another geometry.
func (d *Disk) found(fp tiers.Fingerprint, g tiers.Geometry) (*space, error) {
	if d.arena == nil {
		return d.space(fp, g, true)
	}
	id, err := d.engine.RecoverSpace(fp, g)
	if err != nil {
		return nil, err
	}
	return &space{id: id, g: normal(g), print: fp}, nil
}

// spaceByID returns what is known of a space that has chunks, or nil.
func (d *Disk) spaceByID(id engine.SpaceID) *tiers.Space {
	s, ok := d.engine.Space(id)
	if !ok {
		return nil
	}
	return &tiers.Space{Fingerprint: s.Fingerprint, Geometry: s.Geometry}
}

// onGone is called by the engine, under its lock, when a slot's chunk is gone.
func (d *Disk) onGone(region, _, slot uint32) {
	if s := d.slabOf(region); s != nil {
		s.noteFree(slot)
	}
}

// maxPages is the most pages that the engine takes in one call.
const maxPages = 65536

// Contains implements tiers.Tier.
func (d *Disk) Contains(ctx context.Context, run tiers.Run, held []uint16) error {
	clear(held)
	if err := d.begin(ctx); err != nil {
		return err
	}
	defer d.end()
	s, err := d.space(run.Space.Fingerprint, run.Space.Geometry, false)
	if s == nil {
		return err
	}
	defer d.letGo(s)
	step := maxPages / s.g.PagesPerChunk
	for i := 0; i < len(held); i += step {
		n := min(step, len(held)-i)
		from := i * s.g.PagesPerChunk
		to := min((i+n)*s.g.PagesPerChunk, run.Pages())
		if err := d.engine.Contains(s.id, run.First+from,
			run.Hashes[from*s.g.DigestBytes:to*s.g.DigestBytes], held[i:i+n]); err != nil {
			return err
		}
	}
	return nil
}

// Drop implements tiers.Tier. The drop is durable when it returns, except for chunks that are being
// loaded: they go when the load ends.
func (d *Disk) Drop(ctx context.Context, run tiers.Run) error {
	if err := d.begin(ctx); err != nil {
		return err
	}
	defer d.end()
	s, err := d.space(run.Space.Fingerprint, run.Space.Geometry, false)
	if s == nil {
		return err
	}
	defer d.letGo(s)
	step := maxPages / s.g.PagesPerChunk * s.g.PagesPerChunk
	dropped := 0
	for from := 0; from < run.Pages(); from += step {
		to := min(from+step, run.Pages())
		n, err := d.engine.Drop(s.id, run.First+from,
			run.Hashes[from*s.g.DigestBytes:to*s.g.DigestBytes])
		if err != nil {
			return err
		}
		dropped += n
	}
	if dropped == 0 {
		return nil
	}
	return d.flushDropped()
}

// TenantStats appends what the store counts for each tenant to out; see engine.Engine.Tenants.
func (d *Disk) TenantStats(out []engine.TenantStats) []engine.TenantStats {
	return d.engine.Tenants(out)
}

// Clear implements tiers.Tier. It is durable in the same way as Drop.
func (d *Disk) Clear(ctx context.Context, fp tiers.Fingerprint) (chunks int, err error) {
	if err := d.begin(ctx); err != nil {
		return 0, err
	}
	defer d.end()
	for _, st := range d.engine.Spaces() {
		if fp == (tiers.Fingerprint{}) || st.Fingerprint == fp {
			chunks += d.engine.ClearSpace(st.ID)
		}
	}
	return chunks, d.flushDropped()
}

// Stats implements tiers.Tier.
func (d *Disk) Stats() tiers.TierStats {
	st := d.engine.Stats()
	out := tiers.TierStats{
		Kind: "disk", Local: true, UsedBytes: st.UsedBytes, Chunks: int64(st.ReadySlots),
		Pages: int64(st.Pages), Evictions: st.Evictions,
		Corrupt: d.corrupt.Load(),
	}
	off := 0
	var why error
	dirs, places := d.table()
	for _, p := range places {
		if err := p.failure(); err != nil {
			off++
			why = err
			continue
		}
		out.CapacityBytes += p.bytes
	}
	names := make([]string, len(dirs))
	for i, dir := range dirs {
		names[i] = dir.path
	}
	out.Detail = fmt.Sprintf("%d slabs in %s", len(places), list(names))
	if off > 0 {
		out.Detail += fmt.Sprintf("; %d given up: %v", off, why)
		if off == len(places) {
			out.Down = why.Error()
		}
	}
	return out
}

func list(names []string) string {
	if len(names) > 4 || len(names) == 0 {
		return fmt.Sprintf("%d directories", len(names))
	}
	out := names[0]
	for _, n := range names[1:] {
		out += ", " + n
	}
	return out
}

// Close implements tiers.Tier.
func (d *Disk) Close() error {
	d.ending.Do(func() { close(d.stopping) })
	d.admin.Lock() // whoever changes the directories stops
	defer d.admin.Unlock()
	d.calls.Lock()
	defer d.calls.Unlock()
	if d.closed {
		return d.closeE
	}
	d.closed = true
	close(d.stop)
	d.helpers.Wait()
	d.healers.Wait()
	d.closeE = d.shut()
	return d.closeE
}

// shut releases all that the tier has, and marks its slabs as whole.
func (d *Disk) shut() error {
	var errs []error
	for _, p := range d.places {
		if s := p.slab; s != nil {
			errs = append(errs, s.seal(), s.close())
			if s.failed.Load() {
				d.discard(p)
			}
			p.slab = nil
		}
	}
	d.engine.Close()
	for _, dir := range d.dirs {
		errs = append(errs, dir.unlock())
	}
	return errors.Join(errs...)
}
