package slab

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"time"

	"go.uber.org/zap"

	"lookaside/tiers"
	"lookaside/tiers/slab/media"
	"lookaside/tiers/vfs"
)

const (
	// coldAfter is how long a slab must have been unused before a geometry that already has slabs
	// takes it.
	coldAfter = 10 * time.Minute
	// coolAfter is the same for a geometry without slabs.
	coolAfter = time.Second
)

func (d *Disk) touch(s *slab) { s.usedAt.Store(int64(time.Since(d.start))) }

// makeRoom carves slabs for a geometry with fewer free slots than wanted. It takes blank places,
// and slabs that another geometry has not used for long.
func (d *Disk) makeRoom(g tiers.Geometry, want int) {
	slots, free := d.engine.Room(g)
	if free >= want || slots > 0 && d.blank.Load() == 0 && d.coldest(g, coldAfter) == nil {
		return
	}
	d.shape.Lock()
	defer d.shape.Unlock()
	if slots, free = d.engine.Room(g); free >= want {
		return
	}
	for {
		// Carve one in each directory, so that stores are spread over all of them.
		had := slots
		for _, dir := range d.dirs {
			for _, p := range d.places {
				if p.home == dir && p.blank() && p.unfit != normal(g) {
					d.carveOrGiveUp(p, g)
					break
				}
			}
		}
		slots, free = d.engine.Room(g)
		if d.arena == nil || free >= want || slots == had {
			// in an arena nothing is evicted while a blank place has room
			break
		}
	}
	if free > 0 {
		return
	}
	if d.arena != nil {
		d.arena.noteUse()
	}
	idle := coldAfter
	if slots == 0 {
		idle = coolAfter
	}
	if s := d.coldest(g, idle); s != nil {
		d.reclaim(s, g)
	}
}

// blank reports whether a place can be carved. The caller holds Disk.shape.
func (p *place) blank() bool { return p.slab == nil && !p.retired.Load() && p.failure() == nil }

// countBlank counts the places that can be carved. The caller holds shape.
func (d *Disk) countBlank() {
	n := int32(0)
	for _, p := range d.places {
		if p.blank() {
			n++
		}
	}
	d.blank.Store(n)
}

// coldest returns the slab of another geometry that has been unused for longest, and for at least
// idle, or nil.
func (d *Disk) coldest(g tiers.Geometry, idle time.Duration) *slab {
	before := int64(time.Since(d.start) - idle)
	var cold *slab
	d.regionsMu.RLock()
	defer d.regionsMu.RUnlock()
	for _, s := range d.byRegion {
		if at := s.usedAt.Load(); at <= before && s.layout.Geometry != normal(g) &&
			!s.failed.Load() && !s.place.retired.Load() {
			cold, before = s, at-1
		}
	}
	return cold
}

// reclaim carves a slab anew for another geometry. The caller holds shape.
func (d *Disk) reclaim(s *slab, g tiers.Geometry) {
	p := s.place
	if _, err := media.NewLayout(g, p.bytes); err != nil || !s.failed.CompareAndSwap(false, true) {
		return
	}
	d.log.Info("a slab goes to another geometry", zap.String("slab", p.name()),
		zap.Any("from", s.layout.Geometry), zap.Any("to", g))
	if err := d.engine.RemoveRegion(s.region); err != nil {
		// A lease came meanwhile. A part of the slab is dropped already, so wait for the lease to
		// end and drop the rest.
		p.setFailure(errors.New("it is being emptied for another geometry"))
		d.heal(p, s)
		return
	}
	d.forget(s)
	p.slab = nil
	d.carveOrGiveUp(p, g)
}

// retract calls Removed for a slab's region, once.
func (d *Disk) retract(s *slab) {
	if d.arena != nil {
		s.told.Do(func() { d.arena.o.Removed(s.region) })
	}
}

// forget drops a slab whose region is removed.
func (d *Disk) forget(s *slab) {
	d.retract(s)
	d.regionsMu.Lock()
	delete(d.byRegion, s.region)
	d.regionsMu.Unlock()
	if err := s.close(); err != nil {
		d.log.Warn("closing a slab", zap.String("slab", s.place.name()), zap.Error(err))
	}
}

// carveOrGiveUp carves a blank place, and gives it up if that fails. The caller holds shape.
func (d *Disk) carveOrGiveUp(p *place, g tiers.Geometry) {
	err := d.carve(p, g)
	defer d.countBlank()
	switch {
	case err == nil:
	case errors.Is(err, media.ErrLayout):
		p.unfit = normal(g)
		d.log.Warn("chunks are too large for a slab", zap.String("slab", p.name()), zap.Error(err))
	default:
		d.off(p, err)
		d.heal(p, nil)
	}
}

// carve makes a blank place a slab of a geometry.
func (d *Disk) carve(p *place, g tiers.Geometry) error {
	layout, err := media.NewLayout(g, p.bytes)
	if err != nil {
		return err
	}
	if p.epoch+1 >= media.EpochLimit {
		if err := d.remake(p); err != nil {
			return err
		}
	}
	h := media.Header{Store: d.store, Index: p.index, Bytes: p.bytes, Format: rand.Uint64(),
		Epoch: p.epoch + 1, Stable: d.commits.Load(), Layout: layout}
	s, err := d.newSlab(p, h)
	if err != nil {
		return err
	}
	if !p.fresh {
		// Old entries would not match their checksums, but they would count as damage.
		if err = zero(s.buffed, layout.EntryOffset(0), layout.DataOffset); err == nil {
			err = s.buffed.Datasync()
		}
	}
	p.fresh = false
	if err == nil {
		err = writeHeader(s.buffed, &h)
	}
	if err == nil {
		err = d.addSlab(s)
	}
	if err != nil {
		return errors.Join(err, s.close())
	}
	p.slab, p.epoch = s, h.Epoch
	return nil
}

// addSlab adds a slab's slots to the engine.
func (d *Disk) addSlab(s *slab) error {
	s.region = d.regionIDs.Add(1)
	d.touch(s)
	if d.arena != nil {
		if err := d.arena.announce(s); err != nil {
			return err
		}
	}
	d.regionsMu.Lock()
	d.byRegion[s.region] = s
	d.regionsMu.Unlock()
	err := d.engine.AddCarvedRegion(s.region, s.layout.Geometry, s.layout.Slots, s.placement())
	if err != nil {
		d.regionsMu.Lock()
		delete(d.byRegion, s.region)
		d.regionsMu.Unlock()
		d.retract(s)
	}
	return err
}

// zero writes zeros over [from, to) of a file.
func zero(f vfs.File, from, to int64) error {
	for from < to {
		n, err := f.WriteAt(zeros[:min(int64(len(zeros)), to-from)], from)
		if err != nil {
			return err
		}
		from += int64(n)
	}
	return nil
}

// off marks a place as given up.
func (d *Disk) off(p *place, err error) {
	p.setFailure(err)
	d.log.Error("a slab is given up, what it held is dropped; it is tried again from time to time",
		zap.String("slab", p.name()), zap.Error(err))
}

// giveUp drops all chunks of a slab and has it made anew.
func (d *Disk) giveUp(s *slab, err error) {
	if s.failed.CompareAndSwap(false, true) {
		d.off(s.place, err)
		d.heal(s.place, s)
	}
}

// heal brings a place back into use, in a goroutine of its own. s is the slab that is still there,
// or nil.
func (d *Disk) heal(p *place, s *slab) {
	d.healers.Add(1)
	go func() {
		defer d.healers.Done()
		if s != nil && !d.empty(s) {
			return
		}
		d.shape.Lock()
		if !p.gone {
			d.discard(p)
		}
		d.shape.Unlock()
		for wait := d.o.RetryEvery; ; wait = min(2*wait, 60*d.o.RetryEvery) {
			select {
			case <-d.stop:
				return
			case <-time.After(wait):
			}
			d.shape.Lock()
			if p.gone {
				d.shape.Unlock()
				return
			}
			err := d.remake(p)
			if err == nil {
				p.setFailure(nil)
				d.countBlank()
			}
			d.shape.Unlock()
			if err == nil {
				d.log.Info("a slab works again, and is empty", zap.String("slab", p.name()))
				return
			}
			p.setFailure(err)
		}
	}()
}

// empty takes a given-up slab from the engine and closes it once nobody uses it. It returns false
// if the tier is being closed first; Close then closes the slab.
func (d *Disk) empty(s *slab) bool {
	for {
		err := d.engine.RemoveRegion(s.region)
		if err == nil || errors.Is(err, tiers.ErrNotFound) {
			break
		}
		select {
		case <-d.stop:
			return false
		case <-time.After(20 * time.Millisecond):
		}
	}
	d.forget(s)
	d.shape.Lock()
	s.place.slab = nil
	d.shape.Unlock()
	return true
}

// discard removes the file of a given-up place, so that its dropped chunks are not found when the
// store is opened again.
func (d *Disk) discard(p *place) {
	if err := d.hold(p.home); err != nil { // the file belongs to another process
		return
	}
	if err := d.o.FS.Remove(p.name()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		d.log.Warn("removing a slab that was given up", zap.String("slab", p.name()),
			zap.Error(err))
	}
}

// remake makes a place's file anew, and blank. The caller holds shape, or is the only one who knows
// the place.
func (d *Disk) remake(p *place) (err error) {
	if err := errors.Join(d.o.FS.MkdirAll(p.home.path), d.hold(p.home)); err != nil {
		return err
	}
	if err := d.o.FS.Remove(p.name()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := d.o.FS.OpenFile(p.name(), vfs.Create|vfs.Exclusive)
	if err != nil {
		return err
	}
	defer func() {
		if e := f.Close(); err == nil {
			err = e
		}
	}()
	if err := f.Allocate(0, p.bytes); err != nil {
		if vfs.IsNoSpace(err) {
			// Free the part that may have been allocated.
			_ = f.Truncate(0)
			free, e := d.o.FS.FreeSpace(p.home.path)
			return errors.Join(fmt.Errorf("%s: no room for a slab of %d bytes, %d are free: %w",
				p.home.path, p.bytes, free, err), e)
		}
		return err
	}
	if d.o.Recycled { // else the header of an earlier slab would count
		if err := errors.Join(zero(f, 0, 2*media.BlockBytes), f.Datasync()); err != nil {
			return err
		}
	}
	h := media.Header{Store: d.store, Index: p.index, Bytes: p.bytes, Format: rand.Uint64(),
		Epoch: 1}
	if err := writeHeader(f, &h); err != nil {
		return err
	}
	if err := d.o.FS.SyncDir(p.home.path); err != nil {
		return err
	}
	// Test both writing and reading.
	want, got := make([]byte, media.BlockBytes), make([]byte, media.BlockBytes)
	h.Encode(want)
	if _, err := f.ReadAt(got, media.HeaderOffset(h.Epoch)); err != nil {
		return err
	}
	if !bytes.Equal(want, got) {
		return fmt.Errorf("%s: it does not read back what was written", p.name())
	}
	p.fresh, p.epoch = !d.o.Recycled, h.Epoch
	return nil
}

// noRoom returns why a store got no slot.
func (d *Disk) noRoom() error {
	var why error
	_, places := d.table()
	for _, p := range places {
		if p.retired.Load() {
			continue
		}
		err := p.failure()
		if err == nil {
			return fmt.Errorf("%w: no slot is free", tiers.ErrBusy)
		}
		why = err
	}
	if why == nil {
		return fmt.Errorf("%w: no directory takes more", tiers.ErrBusy)
	}
	return fmt.Errorf("every slab is given up: %w", why)
}

// flushEvery is how often the entries of dropped chunks are freed on the medium.
const flushEvery = time.Second

func (d *Disk) flusher() {
	tick, look := time.NewTicker(flushEvery), time.NewTicker(d.o.WatchEvery)
	defer tick.Stop()
	defer look.Stop()
	for {
		select {
		case <-d.stop:
			return
		case <-look.C:
			d.watch()
		case <-tick.C:
			_ = d.flushFrees() // a slab that fails is given up
			if d.arena != nil {
				d.arena.noteUse()
			} else {
				d.engine.Expire() // frees unused tables; no lease here has a deadline
			}
		}
	}
}

// flushDropped durably frees the entries of dropped chunks, including chunks that are being moved
// or kept.
func (d *Disk) flushDropped() error {
	d.moving.Lock()
	defer d.moving.Unlock()
	return d.flushFrees()
}

// flushFrees durably frees the entries of dropped chunks.
func (d *Disk) flushFrees() error { return d.eachSlab((*slab).freeStale) }

// eachSlab calls f for each slab that works. It gives up slabs for which f fails.
func (d *Disk) eachSlab(f func(*slab) error) error {
	d.regionsMu.RLock()
	all := make([]*slab, 0, len(d.byRegion))
	for _, s := range d.byRegion {
		all = append(all, s)
	}
	d.regionsMu.RUnlock()
	var errs []error
	for _, s := range all {
		s.life.RLock()
		if !s.closed && !s.failed.Load() {
			if err := f(s); err != nil {
				errs = append(errs, err)
				d.giveUp(s, err)
			}
		}
		s.life.RUnlock()
	}
	return errors.Join(errs...)
}
