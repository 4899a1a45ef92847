package slab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"lookaside/tiers"
	"lookaside/tiers/vfs"
)

// Directories can be added, removed and resized while the store is in use, by one call at a time of
// AddDir, RemoveDir and ResizeDir. Slabs that a directory is to lose are drained first: they take
// nothing new, and their chunks can still be found. Then the chunks are moved elsewhere one by one,
// or dropped.
//
// A move reads and checks a chunk, writes it and its entry to the new place, and syncs. Only then
// does the engine switch to the new place, and only after that is the old entry freed. So the chunk
// can be loaded at any moment. After a kill both entries may be valid, and opening the store keeps
// one of them.
//
// A call that fails or is cancelled leaves the directory in use as before, without the chunks that
// have already left it.

// Reasons for which a call leaves the directories as they are, beside the errors of package tiers.
var (
	ErrExists = errors.New("there already")
	// in use by loads or stores, or by a tier below that is copying it
	ErrLeased  = errors.New("in use")
	ErrNoRoom  = errors.New("not enough room")      // for the chunks to move, or for a slab
	errEmptied = errors.New("it was being emptied") // why a place is off
)

// Mode says what happens to the chunks in what is taken away.
type Mode string

const (
	Migrate Mode = "migrate" // they move to other directories, or to what is left of this one
	Evict   Mode = "evict"   // they are dropped
	Drain   Mode = "drain"   // they stay, and so does the directory, but nothing new comes
)

// State is what a directory is doing.
type State string

const (
	Active    State = "active"
	Draining  State = "draining"  // it takes nothing new
	Migrating State = "migrating" // what is in it, or in a part of it, moves
	Removing  State = "removing"  // that is dropped
)

// DirStatus is a directory at one moment.
type DirStatus struct {
	Path          string
	State         State
	CapacityBytes int64 // of its slabs that work
	UsedBytes     int64 // by slots that are not free
	// Slots of carved slabs. Free slots may be granted. Used slots hold a chunk or are being
	// filled. Leased slots are those of the used ones that are being read or written. Draining
	// slots are those of the used ones in slabs that take nothing new.
	Slots struct{ Free, Used, Leased, Draining int }
	// Moved and Total are the chunks moved, and to move, of the last migration.
	Moved, Total int64
}

// directory is one directory of the store.
type directory struct {
	path  string
	bytes int64 // limit of its slabs; guarded by Disk.admin once the store is open
	state State // "" is Active; guarded by Disk.regionsMu

	moved, total atomic.Int64

	lockMu sync.Mutex // guards lock and lockFile; innermost, but held across the I/O of hold
	lock   io.Closer
	// zero: it is not known whether the lock's file still exists, or the lock was given up
	lockFile vfs.FileID
}

// table returns the current directories and places.
func (d *Disk) table() ([]*directory, []*place) {
	d.regionsMu.RLock()
	defer d.regionsMu.RUnlock()
	return d.dirs, d.places
}

// Dirs returns a snapshot of each directory.
func (d *Disk) Dirs() []DirStatus {
	d.calls.RLock()
	defer d.calls.RUnlock()
	if d.closed {
		return nil
	}
	d.regionsMu.RLock()
	dirs, places := d.dirs, d.places
	regions := map[*place]uint32{}
	for id, s := range d.byRegion {
		regions[s.place] = id
	}
	out := make([]DirStatus, len(dirs))
	at := map[*directory]*DirStatus{}
	for i, dir := range dirs {
		out[i] = DirStatus{Path: dir.path, State: dir.state, Moved: dir.moved.Load(),
			Total: dir.total.Load()}
		if dir.state == "" {
			out[i].State = Active
		}
		at[dir] = &out[i]
	}
	d.regionsMu.RUnlock()
	for _, p := range places {
		st := at[p.home]
		if p.failure() != nil {
			continue
		}
		st.CapacityBytes += p.bytes
		r, ok := d.engine.Region(regions[p])
		if !ok {
			continue
		}
		used := r.Used()
		st.UsedBytes += int64(used) * r.SlotBytes
		st.Slots.Used += used
		st.Slots.Leased += r.Leased + r.Filling
		if p.retired.Load() {
			st.Slots.Draining += used
		} else {
			st.Slots.Free += r.Free
		}
	}
	return out
}

// beginChange starts a change of the directories, or returns tiers.ErrBusy if one is under way. The
// caller ends it with admin.Unlock.
func (d *Disk) beginChange(ctx context.Context) error {
	if err := d.going(ctx); err != nil {
		return err
	}
	if !d.admin.TryLock() {
		return fmt.Errorf("%w: another directory is being added, removed or resized", tiers.ErrBusy)
	}
	err := d.going(ctx)
	if err == nil && d.frozen.Load() != nil {
		err = fmt.Errorf("%w: a process may still copy to what it was granted before the last start", tiers.ErrBusy)
	}
	if err != nil {
		d.admin.Unlock()
	}
	return err
}

// going returns an error if a change must stop: ctx has ended, or the store is being closed.
func (d *Disk) going(ctx context.Context) error {
	select {
	case <-d.stopping:
		return tiers.ErrClosed
	case <-ctx.Done():
		return context.Cause(ctx)
	default:
		return nil
	}
}

// pause waits, and returns an error if a change must stop.
func (d *Disk) pause(ctx context.Context, wait time.Duration) error {
	t := time.NewTimer(wait)
	defer t.Stop()
	select {
	case <-d.stopping:
	case <-ctx.Done():
	case <-t.C:
	}
	return d.going(ctx)
}

// find returns a directory and its places in order. The caller holds admin.
func (d *Disk) find(dir string) (*directory, []*place, error) {
	dirs, all := d.table()
	i := slices.IndexFunc(dirs, func(x *directory) bool { return x.path == dir })
	if i < 0 {
		return nil, nil, fmt.Errorf("%w: directory %s", tiers.ErrNotFound, dir)
	}
	var places []*place
	for _, p := range all {
		if p.home == dirs[i] {
			places = append(places, p)
		}
	}
	slices.SortFunc(places, func(a, b *place) int { return int(a.index) - int(b.index) })
	return dirs[i], places, nil
}

func bytesOf(places []*place) (n int64) {
	for _, p := range places {
		n += p.bytes
	}
	return n
}

func (d *Disk) setState(h *directory, s State) (was State) {
	d.regionsMu.Lock()
	defer d.regionsMu.Unlock()
	was, h.state = h.state, s
	return was
}

// AddDir adds a directory whose slabs take the given bytes together. They are used for stores from
// then on. Slabs that the directory holds already are dropped. A drained directory is taken into
// use again if bytes is 0 or its size.
//
// It returns ErrExists; ErrNoRoom if the file system is full; tiers.ErrBusy if the store has its
// maximum number of slabs or another change is under way; tiers.ErrInvalid; a *vfs.LockedError if
// another process has the directory open; or the error that keeps it from working there.
func (d *Disk) AddDir(ctx context.Context, dir string, bytes int64) error {
	if err := d.beginChange(ctx); err != nil {
		return err
	}
	defer d.admin.Unlock()
	if h, places, err := d.find(dir); err == nil {
		return d.reactivate(h, places, bytes)
	}
	bytes = bytes / block * block
	dirs, places := d.table()
	switch {
	case dir == "" || bytes < leastSlabBytes:
		return fmt.Errorf("%w: a capacity of %d bytes in %q: want %d or more", tiers.ErrInvalid,
			bytes, dir, leastSlabBytes)
	case len(places) >= maxSlabs:
		return fmt.Errorf("%w: there are %d slabs, the most that a store can have: open it with larger ones", tiers.ErrBusy, len(places))
	}
	locks, err := lockAll(d.o.FS, []string{dir}, true)
	if err != nil {
		return err
	}
	h := &directory{path: dir, bytes: bytes}
	h.setLock(d.o.FS, locks[0])
	made, err := d.populate(h, places)
	if err != nil {
		return errors.Join(fmt.Errorf("disk tier: %w", roomError(err)), d.erase(h, made),
			h.unlock())
	}
	d.shape.Lock()
	d.regionsMu.Lock()
	d.dirs, d.places = append(slices.Clip(dirs), h), append(slices.Clip(places), made...)
	d.regionsMu.Unlock()
	d.countBlank()
	d.shape.Unlock()
	d.log.Info("added a directory", zap.String("directory", dir), zap.Int64("bytes", bytesOf(made)),
		zap.Int("slabs", len(made)))
	return nil
}

// roomError wraps an error with ErrNoRoom if the file system is full.
func roomError(err error) error {
	if vfs.IsNoSpace(err) {
		return fmt.Errorf("%w: %w", ErrNoRoom, err)
	}
	return err
}

// reactivate takes a drained directory into use again.
func (d *Disk) reactivate(h *directory, places []*place, bytes int64) error {
	d.regionsMu.RLock()
	state := h.state
	d.regionsMu.RUnlock()
	if state != Draining || bytes != 0 && bytes/block*block != h.bytes {
		return fmt.Errorf("%w: directory %s of %d bytes", ErrExists, h.path, h.bytes)
	}
	d.restoreUse(places)
	d.setState(h, Active)
	d.log.Info("a drained directory is in use again", zap.String("directory", h.path))
	return nil
}

// populate makes the slabs of a directory that no other goroutine knows yet, beside those of
// others. It leaves half of the remaining slab numbers to later directories.
func (d *Disk) populate(h *directory, others []*place) ([]*place, error) {
	numbers, err := slabNumbers(d.o.FS, h.path)
	if err != nil {
		return nil, err
	}
	for _, n := range numbers {
		name := path.Join(h.path, SlabName(n))
		d.log.Warn("dropping a slab: what is in a directory that is added is not kept",
			zap.String("slab", name))
		if err := d.o.FS.Remove(name); err != nil {
			return nil, err
		}
	}
	most := max(1, (maxSlabs-len(others)+1)/2)
	return d.fill(h, nil, h.bytes, d.slabBytes(bytesOf(others)+h.bytes), most)
}

// erase durably removes the files of places that are no longer in the store.
func (d *Disk) erase(h *directory, places []*place) error {
	var errs []error
	for _, p := range places {
		if err := d.o.FS.Remove(p.name()); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	if len(places) > 0 {
		errs = append(errs, d.o.FS.SyncDir(h.path))
	}
	return errors.Join(errs...)
}

// RemoveDir removes a directory. With Drain the directory stays and takes nothing new.
//
// Without force it returns ErrLeased if chunks are still in use after a moment. With force it waits
// for their uses to end, which takes as long as a load or a store. It returns ErrNoRoom if Migrate
// finds too little room elsewhere (it evicts nothing for that), tiers.ErrNotFound if there is no
// such directory, and tiers.ErrBusy if another change is under way.
func (d *Disk) RemoveDir(ctx context.Context, dir string, how Mode, force bool) error {
	if how != Migrate && how != Evict && how != Drain {
		return fmt.Errorf("%w: mode %q: want %s, %s or %s", tiers.ErrInvalid, how, Migrate, Evict,
			Drain)
	}
	if err := d.beginChange(ctx); err != nil {
		return err
	}
	defer d.admin.Unlock()
	h, places, err := d.find(dir)
	if err != nil {
		return err
	}
	if how == Drain {
		d.retire(places)
		d.setState(h, Draining)
		d.log.Info("a directory takes nothing new", zap.String("directory", dir))
		return nil
	}
	if err := d.vacate(ctx, h, places, how, force); err != nil {
		return err
	}
	if err := errors.Join(d.detach(h, places, true), h.unlock()); err != nil {
		// logged, not returned: the store no longer uses the directory
		d.log.Warn("a directory is removed, and its files may be there still",
			zap.String("directory", dir), zap.Error(err))
	}
	d.log.Info("removed a directory", zap.String("directory", dir), zap.String("mode", string(how)))
	return nil
}

// ResizeDir changes the size of a directory. Growing adds slabs and moves nothing. Shrinking
// empties slabs from the end, by Migrate or Evict as RemoveDir does; the rest of the size becomes a
// smaller slab. It returns the errors of RemoveDir, or for growing those of AddDir.
func (d *Disk) ResizeDir(ctx context.Context, dir string, bytes int64, how Mode, force bool) error {
	if how != Migrate && how != Evict {
		return fmt.Errorf("%w: mode %q: want %s or %s", tiers.ErrInvalid, how, Migrate, Evict)
	}
	if err := d.beginChange(ctx); err != nil {
		return err
	}
	defer d.admin.Unlock()
	h, places, err := d.find(dir)
	if err != nil {
		return err
	}
	bytes = bytes / block * block
	if bytes < leastSlabBytes {
		return fmt.Errorf("%w: a capacity of %d bytes in %s: want %d or more", tiers.ErrInvalid,
			bytes, dir, leastSlabBytes)
	}
	d.regionsMu.RLock()
	state := h.state
	d.regionsMu.RUnlock()
	if state == Draining {
		return fmt.Errorf("%w: %s is drained", tiers.ErrBusy, dir)
	}
	keep, leaving, left := d.fits(places, bytes)
	if len(leaving) > 0 {
		if err := d.vacate(ctx, h, leaving, how, force); err != nil {
			return err
		}
		err := d.detach(h, leaving, false)
		d.setState(h, Active)
		h.bytes = bytesOf(keep)
		if err != nil {
			return fmt.Errorf("%d slabs of %s are no longer used, but: %w", len(leaving), dir, err)
		}
	}
	_, all := d.table()
	sized, ok := d.o.FS.(Sized)
	if ok {
		if err := sized.ResizeDir(dir, bytes); err != nil {
			return fmt.Errorf("disk tier: %w", roomError(err))
		}
	}
	var made []*place
	if left >= leastSlabBytes {
		if len(all) < maxSlabs {
			most := max(1, (maxSlabs-len(all)+1)/2)
			made, err = d.fill(h, keep, left, d.slabBytes(bytesOf(all)+left), most)
		} else {
			err = fmt.Errorf("%w: there are %d slabs, the most that a store can have: open it with larger ones", tiers.ErrBusy, len(all))
		}
		if err != nil && len(leaving) == 0 {
			// too small a rest to fail for
			err = errors.Join(fmt.Errorf("disk tier: %w", roomError(err)), d.erase(h, made))
			if ok {
				err = errors.Join(err, sized.ResizeDir(dir, h.bytes))
			}
			return err
		}
	}
	d.shape.Lock()
	d.regionsMu.Lock()
	d.places = append(slices.Clip(all), made...)
	d.regionsMu.Unlock()
	d.countBlank()
	d.shape.Unlock()
	h.bytes = bytes
	d.log.Info("resized a directory", zap.String("directory", dir),
		zap.Int64("bytes", bytesOf(keep)+bytesOf(made)))
	return nil
}

// Sized is an optional interface of Options.FS: a file system whose directories have sizes of their
// own, and whose files are contiguous.
type Sized interface {
	vfs.FS
	// ResizeDir sets how many bytes the files of a directory may take together.
	ResizeDir(dir string, bytes int64) error
	// End returns how many bytes a directory must hold for the named file to stay in place.
	End(name string) (int64, error)
	// Hole returns the size of the largest file that can be made in a directory.
	Hole(dir string) (int64, error)
}

// fits splits the places of a directory into those that fit into the given bytes and those that do
// not, which are the last ones. left is the bytes that the kept places leave free.
func (d *Disk) fits(places []*place, bytes int64) (keep, leaving []*place, left int64) {
	sized, ok := d.o.FS.(Sized)
	left = bytes
	for _, p := range places {
		end := p.bytes - left // bytes that it needs beyond the places before it
		if ok {
			if at, err := sized.End(p.name()); err == nil {
				end = max(end, at-bytes)
			}
		}
		if end > 0 || !ok && len(leaving) > 0 {
			leaving = append(leaving, p)
			continue
		}
		keep = append(keep, p)
		left -= p.bytes
	}
	return keep, leaving, left
}

// retire drains places and stops the carving of more there. It returns those that it newly retired.
func (d *Disk) retire(places []*place) (newly []*place) {
	d.shape.Lock()
	defer d.shape.Unlock()
	for _, p := range places {
		if p.retired.Swap(true) {
			continue
		}
		newly = append(newly, p)
		if p.slab != nil {
			if err := d.engine.Drain(p.slab.region); err != nil { // it is being given up
				d.log.Debug("draining", zap.String("slab", p.name()), zap.Error(err))
			}
		}
	}
	d.countBlank()
	return newly
}

// restoreUse reverses retire. Places that were emptied meanwhile are made anew. It frees the
// entries of chunks that moved away before their slots can be filled again.
func (d *Disk) restoreUse(places []*place) {
	_ = d.flushFrees() // a slab that fails is given up
	d.shape.Lock()
	defer d.shape.Unlock()
	for _, p := range places {
		p.retired.Store(false)
		s := p.slab
		if s == nil {
			continue
		}
		switch err := d.engine.Undrain(s.region); {
		case err == nil:
		// the region is gone: no chunk of it may be found when the store is opened again
		case errors.Is(err, tiers.ErrNotFound) && s.failed.CompareAndSwap(false, true):
			d.forget(s)
			p.slab = nil
			if err := d.remake(p); err != nil {
				d.off(p, err)
				d.heal(p, nil)
			}
		case s.failed.CompareAndSwap(false, true): // half of it is dropped
			p.setFailure(errEmptied)
			d.heal(p, s)
		}
	}
	d.countBlank()
}

// vacate empties places and removes their regions. If it fails, the places are as before, without
// the chunks that have left them.
func (d *Disk) vacate(ctx context.Context, h *directory, places []*place, how Mode,
	force bool) (err error) {
	newly := d.retire(places)
	state := Removing
	if how == Migrate {
		state = Migrating
	}
	was := d.setState(h, state)
	defer func() {
		if err != nil {
			d.restoreUse(newly)
			d.setState(h, was)
		}
	}()
	if !force {
		if err := d.unused(ctx, places); err != nil {
			return err
		}
	}
	if how == Migrate {
		if err := d.migrate(ctx, h, places); err != nil {
			return err
		}
	}
	for _, s := range d.slabsOf(places) {
		for {
			err := d.engine.RemoveRegion(s.region)
			if err == nil || errors.Is(err, tiers.ErrNotFound) {
				d.retract(s)
				break
			}
			if err := d.pause(ctx, time.Millisecond); err != nil {
				return err
			}
		}
	}
	return nil
}

// slabsOf returns the slabs in places.
func (d *Disk) slabsOf(places []*place) (slabs []*slab) {
	d.shape.Lock()
	defer d.shape.Unlock()
	for _, p := range places {
		if p.slab != nil {
			slabs = append(slabs, p.slab)
		}
	}
	return slabs
}

// patience is how long a slab may be in use before a call without force gives up.
const patience = time.Second

// unused returns ErrLeased if drained places are still in use after patience.
func (d *Disk) unused(ctx context.Context, places []*place) error {
	for end := time.Now().Add(patience); ; {
		uses := 0
		for _, s := range d.slabsOf(places) {
			if st, ok := d.engine.Region(s.region); ok {
				uses += st.Leased + st.Filling
			}
		}
		if uses == 0 {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("%w: %d chunks are being read or written", ErrLeased, uses)
		}
		if err := d.pause(ctx, time.Millisecond); err != nil {
			return err
		}
	}
}

// detach takes places without regions out of the store and removes their files; if whole is set,
// their directory too.
func (d *Disk) detach(h *directory, places []*place, whole bool) error {
	// Until the file is gone, it may hold an old entry of a chunk that is dropped elsewhere. So
	// drops wait.
	d.moving.Lock()
	defer d.moving.Unlock()
	d.shape.Lock()
	defer d.shape.Unlock()
	for _, p := range places {
		p.gone = true
		if s := p.slab; s != nil {
			s.failed.Store(true)
			d.forget(s)
			p.slab = nil
		}
	}
	d.regionsMu.Lock()
	d.places = slices.DeleteFunc(slices.Clone(d.places), func(p *place) bool { return p.gone })
	if whole {
		d.dirs = slices.DeleteFunc(slices.Clone(d.dirs), func(x *directory) bool { return x == h })
	}
	d.regionsMu.Unlock()
	d.countBlank()
	return d.erase(h, places)
}
