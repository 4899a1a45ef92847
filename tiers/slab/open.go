package slab

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"path"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"go.uber.org/zap"

	"lookaside/dax"
	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/slab/media"
	"lookaside/tiers/vfs"
)

// LockName is the file in each directory that says which process has it open.
const LockName = "lock"

const slabPrefix = "slab-"

// Open opens the store in some directories, and makes what is missing. A failed Open leaves nothing
// open; files that it made stay. It returns a *vfs.LockedError, with the pid, if another process
// has a directory open. It fails if there is no room for the slabs, if a slab has another version
// of the format, and if it cannot work in the directories at all. A slab that does not work is
// given up and retried later.
func Open(o Options) (*Disk, error) { return open(o, nil) }

// open opens a store as a tier, or for an arena, in which it sets the store.
func open(o Options, arena *Arena) (_ *Disk, err error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	d := &Disk{
		o: o, log: o.Log, arena: arena, start: time.Now(), stop: make(chan struct{}),
		stopping: make(chan struct{}),
		byRegion: map[uint32]*slab{}, spaces: map[tiers.Fingerprint]*space{},
		victims: make(chan struct{}, 1),
	}
	binary.LittleEndian.PutUint64(d.store[:], rand.Uint64())
	binary.LittleEndian.PutUint64(d.store[8:], rand.Uint64())
	books := engine.Config{
		Seed: o.Seed, MaxSpaces: o.MaxSpaces, MaxOwners: o.MaxSpaces, MaxPages: maxPages,
		OwnerShare: 1, ArenaLimitBytes: o.CapacityBytes,
		FixedRegions: true, NoExtend: true, OnGone: d.onGone, Policy: o.Policy,
		Tenants: o.Tenants, Shares: o.Shares, Gone: o.Gone, GoneTier: o.GoneTier,
		// see NextVictims; nobody need call it
		Tiers: []engine.TierAdmission{{Admit: engine.AdmitEvicted}}, Wake: d.wakeVictims,
	}
	if arena != nil {
		arena.d = d
		books = arena.books()
	}
	if d.engine, err = engine.New(books); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			close(d.stop)
			d.healers.Wait()
			err = errors.Join(err, d.shut())
		}
	}()
	locks, err := lockAll(o.FS, o.Dirs, true)
	if err != nil {
		return nil, err
	}
	for i, lock := range locks {
		dir := &directory{path: o.Dirs[i],
			bytes: o.CapacityBytes / int64(len(locks)) / block * block}
		dir.setLock(o.FS, lock)
		if o.DirBytes != nil {
			dir.bytes = o.DirBytes[i] / block * block
		}
		d.dirs = append(d.dirs, dir)
	}
	slabs, err := d.survey()
	if err != nil {
		return nil, err
	}
	if err := d.recover(slabs); err != nil {
		return nil, err
	}
	if arena != nil {
		arena.start()
	} else {
		d.startWorkers()
	}
	d.helpers.Go(d.flusher)
	return d, nil
}

// Usable returns the error that would keep Open from using a directory, as far as it shows in
// advance. It makes the directory and its lock if they are missing.
func Usable(fsys vfs.FS, dir string) error {
	locks, err := lockAll(fsys, []string{dir}, true)
	for _, l := range locks {
		_, err = fsys.ReadDir(dir)
		err = errors.Join(err, l.Close())
	}
	return err
}

// lockAll takes the directories' locks. If make is set, it makes missing directories first.
func lockAll(fsys vfs.FS, dirs []string, make bool) (locks []io.Closer, err error) {
	for _, dir := range dirs {
		var l io.Closer
		if make {
			err = fsys.MkdirAll(dir)
		}
		if err == nil {
			l, err = fsys.Lock(path.Join(dir, LockName))
		}
		if err != nil {
			for _, l := range locks {
				err = errors.Join(err, l.Close())
			}
			return nil, fmt.Errorf("disk tier in %s: %w", dir, err)
		}
		locks = append(locks, l)
	}
	return locks, nil
}

// slabNumbers returns the numbers of the slabs in a directory.
func slabNumbers(fsys vfs.FS, dir string) ([]uint32, error) {
	names, err := fsys.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var out []uint32
	for _, name := range names {
		digits, ok := strings.CutPrefix(name, slabPrefix)
		n, err := strconv.ParseUint(digits, 10, 16)
		if ok && err == nil && name == SlabName(uint32(n)) {
			out = append(out, uint32(n))
		}
	}
	slices.Sort(out)
	return out, nil
}

// SlabName returns the file name of a slab.
func SlabName(index uint32) string { return fmt.Sprintf("%s%03d", slabPrefix, index) }

// readHeader reads a slab's header. The error wraps media.ErrBlank or media.ErrCorrupt if no header
// is intact.
func readHeader(f vfs.File) (media.Header, error) {
	size, err := f.Size()
	if err != nil {
		return media.Header{}, err
	}
	b := make([]byte, 2*media.BlockBytes)
	if size < int64(len(b)) {
		return media.Header{}, fmt.Errorf("%w: the file has %d bytes", media.ErrCorrupt, size)
	}
	if _, err := f.ReadAt(b, 0); err != nil {
		return media.Header{}, err
	}
	h, err := media.DecodeHeader(b)
	if err == nil && h.Bytes > size {
		return h, fmt.Errorf("%w: the file has %d bytes of %d", media.ErrCorrupt, size, h.Bytes)
	}
	return h, err
}

// slabBytes returns the size of a new slab for a store's capacity.
func (d *Disk) slabBytes(capacity int64) int64 {
	if d.o.SlabBytes != 0 {
		return d.o.SlabBytes
	}
	return min(max(capacity/32, minSlabBytes), maxSlabBytes)
}

// survey finds the slab files, drops those beyond the capacity, makes missing ones, and returns
// those that are carved for a geometry.
func (d *Disk) survey() (found []*slab, err error) {
	want := d.slabBytes(d.o.CapacityBytes)
	numbers := make([][]uint32, len(d.dirs))
	atLeast := 0 // slabs, counting each directory as one at least
	for i, dir := range d.dirs {
		if numbers[i], err = slabNumbers(d.o.FS, dir.path); err != nil {
			return nil, fmt.Errorf("disk tier in %s: %w", dir.path, err)
		}
		atLeast += max(len(numbers[i]), 1)
	}
	headers := map[*place]media.Header{}
	places := make([][]*place, len(d.dirs))
	left := make([]int64, len(d.dirs))
	free, wanting := maxSlabs, 0 // slabs that may still be made, directories that need some
	for i, dir := range d.dirs {
		left[i] = dir.bytes
		most := max(maxSlabs/len(d.dirs), maxSlabs-atLeast+max(len(numbers[i]), 1))
		for _, n := range numbers[i] {
			p := &place{home: dir, index: n}
			h, err := d.look(p, want)
			if err != nil {
				return nil, err
			}
			if p.bytes > left[i] || len(places[i]) == most {
				d.log.Info("dropping a slab: the capacity is smaller than what is there",
					zap.String("slab", p.name()), zap.Int64("bytes", p.bytes))
				if err := d.o.FS.Remove(p.name()); err != nil {
					return nil, fmt.Errorf("disk tier in %s: %w", dir.path, err)
				}
				continue
			}
			left[i] -= p.bytes
			places[i] = append(places[i], p)
			headers[p] = h
			free--
		}
		if left[i] >= leastSlabBytes {
			wanting++
		}
	}
	for i, dir := range d.dirs {
		if left[i] >= leastSlabBytes {
			made, err := d.fill(dir, places[i], left[i], want, free/wanting)
			if err != nil {
				return nil, fmt.Errorf("disk tier: %w", err)
			}
			if len(places[i]) > 0 && len(made) > 0 {
				d.log.Info("added slabs: the capacity is larger than what was there",
					zap.String("directory", dir.path), zap.Int("slabs", len(made)))
			}
			places[i] = append(places[i], made...)
			free -= len(made)
			wanting--
		}
		d.places = append(d.places, places[i]...)
	}
	for _, p := range d.places {
		h, known := headers[p]
		switch {
		case p.failure() != nil:
			d.heal(p, nil)
		case known && h.Carved():
			s, err := d.newSlab(p, h)
			if err != nil {
				if ours(err) {
					return nil, fmt.Errorf("disk tier: %w", err)
				}
				d.off(p, err)
				d.heal(p, nil)
				continue
			}
			d.shape.Lock()
			p.slab = s
			d.shape.Unlock()
			found = append(found, s)
		}
	}
	d.shape.Lock()
	d.countBlank()
	d.shape.Unlock()
	if len(d.places) == 0 && len(d.dirs) > 0 {
		return nil, fmt.Errorf("%w: no slab fits into %d bytes in %d directories", tiers.ErrInvalid,
			d.o.CapacityBytes, len(d.dirs))
	}
	if d.o.Direct == DirectAlways && len(found) == 0 && len(d.places) > 0 {
		// fails here, not at the first store
		buffed, direct, _, err := d.openFiles(d.places[0].name())
		if err != nil {
			return nil, fmt.Errorf("disk tier: %w", err)
		}
		if err := errors.Join(buffed.Close(), direct.Close()); err != nil {
			return nil, err
		}
	}
	return found, nil
}

// fill makes slabs for the rest of a directory's capacity, beside those in has, and at most want.
// With an error it returns the slabs made before it.
func (d *Disk) fill(dir *directory, has []*place, left, want int64,
	most int) (made []*place, err error) {
	next := uint32(0)
	for ; left >= leastSlabBytes && len(made) < most; next++ {
		if slices.ContainsFunc(has, func(p *place) bool { return p.index == next }) {
			continue
		}
		size := max(min(want, left), left/int64(most-len(made))/block*block)
		if rest := left - size; rest < max(size/4, leastSlabBytes) && rest > 0 &&
			len(has)+len(made) > 0 {
			size = left // avoids a small slab at the end
		}
		if sized, ok := d.o.FS.(Sized); ok {
			hole, err := sized.Hole(dir.path)
			if err != nil {
				return made, err
			}
			if size = min(size, hole); size < leastSlabBytes {
				break
			}
		}
		p := &place{home: dir, index: next, bytes: size / block * block}
		if err := d.remake(p); err != nil {
			return made, err
		}
		made = append(made, p)
		left -= p.bytes
	}
	return made, nil
}

// look reads the header of an existing file. A damaged file is made anew, with the given size if
// its own is of no use. A file that does not work is off.
func (d *Disk) look(p *place, bytes int64) (media.Header, error) {
	h, err := func() (media.Header, error) {
		f, err := d.o.FS.OpenFile(p.name(), 0)
		if err != nil {
			return media.Header{}, err
		}
		size, err := f.Size()
		p.bytes = size / block * block
		var h media.Header
		if err == nil {
			h, err = readHeader(f)
		}
		return h, errors.Join(err, f.Close())
	}()
	switch {
	case err == nil:
		p.bytes, p.epoch = h.Bytes, h.Epoch
		p.fresh = !h.Carved() && !d.o.Recycled
		if h.Epoch+1 < media.EpochLimit {
			return h, nil
		}
		err = errors.New("its header was written too often")
	case errors.Is(err, media.ErrVersion):
		return h, fmt.Errorf("disk tier: %s: %w: use the version of this program that wrote it, or remove the directory's slabs to start empty", p.name(), err)
	case ours(err):
		return h, fmt.Errorf("disk tier: %w", err)
	case !errors.Is(err, media.ErrBlank) && !errors.Is(err, media.ErrCorrupt):
		if p.bytes < leastSlabBytes {
			p.bytes = bytes
		}
		d.off(p, err)
		return media.Header{}, nil
	}
	if h.Bytes > 0 {
		p.bytes = h.Bytes
	}
	if p.bytes < leastSlabBytes {
		p.bytes = bytes
	}
	d.log.Warn("a slab has no intact header: it is made anew", zap.String("slab", p.name()),
		zap.Error(err))
	if err := d.remake(p); err != nil {
		d.off(p, err)
		return media.Header{}, nil
	}
	return media.Header{Epoch: p.epoch, Bytes: p.bytes}, nil
}

// ours reports whether an error is a fault of our setup, not of the medium. Then opening fails, and
// nothing is given up.
func ours(err error) bool {
	for _, e := range []error{vfs.ErrNoDirect, dax.ErrNoMemory, syscall.EMFILE, syscall.ENFILE,
		syscall.ENOMEM, syscall.EACCES, syscall.EPERM, syscall.EROFS} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// recover finds the chunks of the slabs.
func (d *Disk) recover(slabs []*slab) error {
	for _, s := range slabs {
		if err := d.addSlab(s); err != nil {
			return err
		}
	}
	found := make([]findings, len(slabs))
	var wait sync.WaitGroup
	next := make(chan int)
	for range min(len(slabs), runtime.GOMAXPROCS(0)) {
		wait.Add(1)
		go func() {
			defer wait.Done()
			for i := range next {
				found[i].err = d.restore(slabs[i], &found[i])
			}
		}()
	}
	for i := range slabs {
		next <- i
	}
	close(next)
	wait.Wait()
	last := uint64(0)
	for i := range found {
		last = max(last, found[i].last)
	}
	d.commits.Store(last)
	chunks := d.engine.EndRestore()
	bad, doubtful, spaceless := 0, 0, 0
	for i, s := range slabs {
		f := &found[i]
		if f.err == nil {
			f.err = s.ready()
		}
		if f.err != nil {
			d.giveUp(s, f.err)
			continue
		}
		bad, doubtful, spaceless = bad+f.bad, doubtful+f.dropped, spaceless+f.spaceless
	}
	d.log.Info("opened", zap.Strings("directories", d.o.Dirs), zap.Int("slabs", len(d.places)),
		zap.Int("blank", int(d.blank.Load())),
		zap.Int("chunks", chunks), zap.Int("damaged", bad), zap.Int("unfinished", doubtful),
		zap.Int("spaceless", spaceless), zap.Duration("in", time.Since(d.start)))
	return nil
}

// findings is what was found in one slab.
type findings struct {
	err     error
	last    uint64 // the highest commit number
	bad     int    // entries that do not match their checksums
	dropped int    // entries in doubt whose data is wrong
	// entries of spaces that could not be opened; they are dropped
	spaceless int
}

// doubt is an entry that may not have been durable.
type doubt struct {
	commit uint64
	slot   int
}

// maxDoubts is how many doubts are collected before they are checked.
const maxDoubts = 1 << 14

// restoreBatch is how many slots go to the engine in one call.
const restoreBatch = 512

// restore enters a slab's chunks into the engine.
func (d *Disk) restore(s *slab, out *findings) error {
	table, err := dax.NewTable[byte](s.layout.ScanBytes(1 << 20)) // aligned
	if err != nil {
		return err
	}
	defer table.Close()
	var (
		file   vfs.File = s.buffed
		batch           = make([]engine.Restored, 0, restoreBatch)
		doubts []doubt
		stable = s.header.Stable
		spaces = map[tiers.Fingerprint]*space{} // nil: it cannot be opened
		last   *space
		ppc    = s.layout.Geometry.PagesPerChunk
		sums   = s.sums.Slice()
		gens   = s.gens.Slice()
	)
	// Chunks with commit numbers up to stable may be gone, but those numbers must not be reused.
	out.last = stable
	if s.direct != nil {
		file = s.direct
	}
	flush := func() error {
		if len(batch) == 0 {
			return nil
		}
		err := d.engine.Restore(s.region, batch)
		batch = batch[:0]
		return err
	}
	drop := func(slot int) {
		s.mark(slot, written)
		s.noteFree(uint32(slot))
	}
	err = s.layout.Scan(file, s.id, 0, s.layout.Slots, table.Slice(),
		func(slot int, state media.State, e *media.Entry) error {
			switch state {
			case media.Free:
				return nil
			case media.Bad:
				out.bad++
				drop(slot)
				return nil
			}
			out.last, stable = max(out.last, e.Commit), max(stable, e.Stable)
			if last == nil || last.print != e.Space {
				sp, known := spaces[e.Space]
				if !known {
					var err error
					if sp, err = d.found(e.Space, s.layout.Geometry); err != nil {
						d.log.Warn("a slab's chunks of a space are dropped: it cannot be opened",
							zap.String("slab", s.place.name()),
							zap.String("space", e.Space.Short()), zap.Error(err))
					}
					spaces[e.Space] = sp
				}
				if last = sp; sp == nil {
					out.spaceless++
					drop(slot)
					return nil
				}
			}
			s.mark(slot, written)
			gens[slot] = e.Generation
			for i := range e.Pages {
				sums[slot*ppc+i] = e.Sum(i)
			}
			if e.Commit > stable && d.arena == nil {
				// an arena checks every chunk before its first use
				if len(doubts) >= maxDoubts {
					doubts = slices.DeleteFunc(doubts,
						func(x doubt) bool { return x.commit <= stable })
				}
				doubts = append(doubts, doubt{e.Commit, slot})
			}
			batch = append(batch, engine.Restored{Slot: uint32(slot), Space: last.id,
				First: e.First,
				Pages: e.Pages, Prev: e.Prev, Hashes: e.Digests, Order: e.Commit,
				Unverified: d.arena != nil, Tenant: d.engine.TenantOf(e.Tenant)})
			if len(batch) == restoreBatch {
				return flush()
			}
			return nil
		}, flush) // flush reads the table's memory over, so it runs after the scan
	for _, sp := range spaces {
		if sp != nil {
			d.letGo(sp)
		}
	}
	if err != nil {
		return err
	}
	for _, x := range doubts {
		if x.commit <= stable {
			continue
		}
		ok, err := s.intact(x.slot)
		if err != nil {
			return err
		}
		if !ok {
			out.dropped++
			d.engine.Unrestore(s.region, uint32(x.slot))
			drop(x.slot)
		}
	}
	s.lastDone, s.stable = out.last, stable
	return nil
}

// intact reads an entry again and reports whether it and its data are intact.
func (s *slab) intact(slot int) (bool, error) {
	b := make([]byte, s.layout.EntryBytes)
	if _, err := s.buffed.ReadAt(b, s.layout.EntryOffset(slot)); err != nil {
		return false, err
	}
	var e media.Entry
	if s.layout.DecodeEntry(b, s.id, slot, &e) != media.Used {
		return false, nil
	}
	n, err := verify(s.buffed, s.layout, s.id, slot, &e, make([]byte, verifyBytes))
	return n == e.Pages, err
}

// verifyBytes is how much verify reads at a time.
const verifyBytes = 1 << 20

// verify reads the pages of an entry up to the first wrong one, through buf, whose size is a
// multiple of a block. It returns how many are right.
func verify(f vfs.File, l *media.Layout, id media.Identity, slot int, e *media.Entry,
	buf []byte) (pages int, err error) {
	g := &l.Geometry
	total := int64(e.Pages) * g.PageBytes
	hasher := id.PageHasher(e.Digests[:g.DigestBytes], e.Generation)
	room := g.PageBytes // bytes of the current page still to hash
	for at := int64(0); at < total; at += int64(len(buf)) {
		n := min(total-at, int64(len(buf)))
		if _, err := f.ReadAt(buf[:(n+block-1)/block*block], l.SlotOffset(slot)+at); err != nil {
			// not reached: strides are whole blocks
			return pages, err
		}
		for rest := buf[:n]; len(rest) > 0; {
			m := min(room, int64(len(rest)))
			_, _ = hasher.Write(rest[:m]) // never fails
			rest, room = rest[m:], room-m
			if room > 0 {
				continue
			}
			if hasher.Sum64() != e.Sum(pages) {
				return pages, nil
			}
			if pages++; pages < e.Pages {
				hasher = id.PageHasher(e.Digests[pages*g.DigestBytes:(pages+1)*g.DigestBytes],
					e.Generation)
				room = g.PageBytes
			}
		}
	}
	return pages, nil
}

// ready prepares a recovered slab for stores: its contents become durable, and it gets an epoch of
// its own for generations.
func (s *slab) ready() error {
	if err := s.buffed.Datasync(); err != nil {
		return err
	}
	s.stable = s.lastDone
	if err := s.writeHeader(s.lastDone); err != nil {
		return err
	}
	s.place.epoch = s.header.Epoch
	return nil
}
