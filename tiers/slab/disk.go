// Package disk keeps chunks in preallocated slab files on local disks: what was stored is found
// again after a restart.
//
// Its books are a engine.Engine whose regions are the slabs; package media is the form that they
// have on the medium, package vfs the file operations. The page checksums stay in memory, so that a
// load reads nothing but the pages.
//
// # A store
//
// The engine grants a slot, evicting if it must. If the directory still has an entry of what the
// slot held, that is freed and synced first. Then the data is written, straight from the caller's
// memory, then the entry; one fdatasync makes both durable; only then the engine makes the chunk
// visible. Syncs are shared by all stores into a slab that wait for one, and by all transfers of a
// call.
//
// A power cut may leave an entry without its data if both were written and not yet synced. Each
// entry says up to which commit the slab was durable when it was written, so opening the slab knows
// the few for which that is open, and reads and checks their data.
//
// # Failing disks
//
// What does not check out is dropped, and so is a chunk that cannot be read. A slab whose sync
// fails, or where I/O fails again and again, is given up: all that it held is dropped, as nothing
// is known about it any more. Its file is made anew, after a second at first and up to a minute
// later, until that works; then the slab is there again, empty. Other slabs go on meanwhile.
//
// # Arenas
//
// An Arena is the same store with another way in: its chunks are written and read in place, by
// those who have the slabs mapped, under leases of the same engine. See there.
//
// # Locks
//
// A Disk's calls hold calls for reading, Close for writing. moving is held for writing by whoever
// moves chunks or is to free the entries of all that was dropped, for reading by whoever writes
// entries of chunks that can be found already. shape guards which slabs there are, and is held
// while one is carved. A slab's files are used under a lease or grant of a slot in it, without
// which the engine does not let its region go, or under its life. Its order is held while an entry
// is written; its mu and the Disk's regionsMu are the innermost, taken also under the engine's
// lock, and never held across I/O. They are taken in the order: calls, moving, shape, life, order,
// the engine's, mu or regionsMu. admin is held by whoever changes the directories, and by Close,
// before all of them; calls is not taken under it but by Close.
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
	"lookaside/tiers/vfs"
)

// Direct says whether the page cache is bypassed.
type Direct string

const (
	DirectAuto   Direct = "auto"   // where the file system can
	DirectAlways Direct = "always" // or Open fails
	DirectNever  Direct = "never"
)

// Options says what to open. Zero fields take the stated default.
type Options struct {
	// FS has the directories. Default vfs.OS.
	FS vfs.FS
	// Recycled: what FS allocates reads as what was there before, not as zeros.
	Recycled bool
	// Dirs are the directories, made if they are not there; one process at a time has them open.
	// The slabs are spread over all of them. There may be none: AddDir adds some.
	Dirs []string
	// CapacityBytes is the size of all slabs together, directories and all. What is there already
	// grows or shrinks to it by whole slabs.
	CapacityBytes int64
	// DirBytes is the part of each directory in it, in the order of Dirs; CapacityBytes is their
	// sum then. Default: equal parts.
	DirBytes []int64
	// SlabBytes is the size of a new slab. Default: a 32nd of the capacity, but 256 MiB to 64 GiB,
	// and as much as makes 60 slabs at most.
	SlabBytes int64
	// Policy of eviction by name. Default: the engine's.
	Policy string
	// Workers is how many requests are under way at one time, at most 256. Default 4.
	Workers int
	// Queue is how many requests may wait for a worker, each way. Default: as many as keep the
	// workers busy; more spare whoever submits them being woken for each.
	Queue int
	// MaxLoads and MaxStores bound the requests of loads and of stores that are on their way at one
	// time. Default: as many as keep the workers busy.
	MaxLoads, MaxStores int
	// PieceBytes is the most that one request moves, a multiple of 4 KiB. Default 4 MiB.
	PieceBytes int
	// Direct says whether the page cache is bypassed. Default DirectAuto.
	Direct Direct
	// MaxSpaces bounds the spaces that have chunks at one time. Default 1,024.
	MaxSpaces int
	// Seed keys the index's hash; see engine.Config.
	Seed uint64
	// RetryEvery is how long after it was given up a slab is tried again for the first time.
	// Default 1 s.
	RetryEvery time.Duration
	// WatchEvery is how often the store looks whether somebody has removed its files. Default 10 s.
	WatchEvery time.Duration
	// Log gets what an operator wants to know. Default: nothing.
	Log *zap.Logger
}

const (
	maxSlabs     = 60
	minSlabBytes = 256 << 20
	maxSlabBytes = 64 << 30
	// leastSlabBytes is the smallest slab that is made at all.
	leastSlabBytes = 64 << 10
	maxWorkers     = 256
	block          = 4096 // what pieces are cut at; a media.BlockBytes
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

	admin    sync.Mutex // see the package comment
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
	// this and places change under shape and regionsMu, and are read under either; what was read
	// stays as it is
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

// space is a space that chunks were stored in.
type space struct {
	id    engine.SpaceID
	g     tiers.Geometry // PageTokens is 1
	print tiers.Fingerprint
	users int // calls that use it; guarded by spacesMu
}

func (s *space) owner() engine.Owner { return engine.Owner(s.id) }

// normal is a geometry without what does not matter here.
func normal(g tiers.Geometry) tiers.Geometry {
	g.PageTokens = 1
	return g
}

// space answers a space, and if wanted makes it. It stays until it is let go of. nil: there is
// none.
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

// closeEmptySpaces forgets the spaces that nobody uses and that have no chunks.
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
			// cannot be: it was there a moment ago
			d.log.Error("a space lost its owner", zap.Error(err))
		}
	}
}

// begin lets a call in; end lets it out.
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

// slabOf is the slab of a region; nil if it is no more.
func (d *Disk) slabOf(region uint32) *slab {
	d.regionsMu.RLock()
	defer d.regionsMu.RUnlock()
	return d.byRegion[region]
}

// found is a space that chunks are recovered of. It is the caller's to let go of. nil: there is no
// room for it.
func (d *Disk) found(fp tiers.Fingerprint, g tiers.Geometry) *space {
	if d.arena == nil {
		s, _ := d.space(fp, g, true)
		return s
	}
	id, err := d.engine.RecoverSpace(fp, g)
	if err != nil {
		return nil
	}
	return &space{id: id, g: normal(g), print: fp}
}

// spaceByID is what is known of a space that has chunks, nil if it is none.
func (d *Disk) spaceByID(id engine.SpaceID) *tiers.Space {
	s, ok := d.engine.Space(id)
	if !ok {
		return nil
	}
	return &tiers.Space{Fingerprint: s.Fingerprint, Geometry: s.Geometry}
}

// onGone is told by the engine, under its lock, that what a slot held is gone.
func (d *Disk) onGone(region, slot uint32) {
	if s := d.slabOf(region); s != nil {
		s.noteFree(slot)
	}
}

// maxPages is how many pages the engine takes in one call.
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

// Drop implements tiers.Tier. What it dropped is gone for good when it returns, but for chunks that
// are being loaded: those go with the load.
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

// Clear implements tiers.Tier. It is as durable as Drop.
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

// shut gives back all that the tier has, with the slabs marked as whole.
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
