package directory

import (
	crand "crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"go.uber.org/zap"

	"lookaside/tiers/engine"
	"lookaside/tiers/slab/media"
)

// Options says which directory to open.
type Options struct {
	// Path of the file. Whoever calls Open owns the file, by a lock of its own.
	Path string
	// LockDev and LockInode are device and inode of the file that has this lock. A directory that
	// was made under another lock file is not used.
	LockDev, LockInode uint64
	// Takeover: the process that has the directory is alive, hands it over, and changes nothing in
	// it. The generation stays, and what that process had checked need not be checked again. Open
	// fails if the directory cannot be used.
	Takeover bool
	Log      *zap.Logger

	boot  string // default: the kernel's; for tests
	wrote func() // see file; for tests
}

// A Directory is open until Close.
type Directory struct {
	log        *zap.Logger
	path       string
	file       *file
	tables     *view
	header     header
	takeover   bool
	why        string
	lasting    bool
	generation uint64

	engine *engine.Engine             // set by Attach
	bytes  func(region uint32) []byte // likewise

	// growing is held while regions come and go; outside mu.
	growing sync.Mutex
	// mu guards what follows, and the records in the file. It is not held during system calls.
	mu      sync.Mutex
	regions [records]*region // by the number of the record; nil: it is free
	names   [records]*piece  // likewise
	next    uint32           // the id of no region so far, and of no later one

	pieces [engine.MaxPieces + 1]atomic.Pointer[piece] // by the engine's number

	fills   atomic.Uint64 // generations of slots given out
	commits atomic.Uint64 // numbers of commits given out
	kept    atomic.Int64  // valid entries; changed under the engine's lock
	left    atomic.Bool   // see Leave
	failed  atomic.Uint64
	full    atomic.Bool // an entry could not be written, and that was logged

	keepers keepers
	checks  chan struct{} // has one entry for each chunk being verified
	closing sync.Once
	err     error
}

// region is a region and its part of the file.
type region struct {
	regionRecord
	view *view
	gone []*piece // that were in the region, and for which a keeper may still write
}

// piece is a piece whose chunks are kept.
type piece struct {
	pieceRecord
	record int // its number
	region *region
	form   media.Layout
	id     media.Identity
	from   int64           // where its entries begin in the region's part
	found  bool            // it is of the run before, and not restored yet
	begun  []atomic.Uint32 // by slot, a bit each: its entry was written

	// life is held for reading by those who write entries, or read the arena to do so. dead: the
	// piece is gone; who has life and finds it unset may write.
	life sync.RWMutex
	dead atomic.Bool
	// first makes the place ready for the first entry. before are the pieces that lay there.
	first  sync.Once
	before []*piece
}

// Open opens the directory that the run before has left, or makes a new one if there is none that
// can be used; Why says why. If there is no room for one, or the filesystem cannot be written, the
// directory lies in memory of this process: chunks are kept, and nobody finds them. It fails only
// if there is not even memory, or with Takeover.
//
// Nothing in it is in effect before Restore. The caller first drops the regions that it does not
// have.
func Open(o Options) (*Directory, error) {
	if o.boot == "" {
		b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
		if err != nil {
			return nil, err
		}
		o.boot = strings.TrimSpace(string(b))
	}
	d := &Directory{log: o.Log, path: o.Path, takeover: o.Takeover,
		lasting: true, checks: make(chan struct{}, workers())}
	d.keepers.init()
	c, err := d.load(&o)
	if err == nil {
		err = d.file.write(c.header.encode(), headerOffset(c.header.epoch))
	}
	if err == nil {
		err = d.mapAll(c)
	}
	if err == nil {
		return d, nil
	}
	err = errors.Join(err, d.unmap())
	if o.Takeover {
		return nil, fmt.Errorf("%s: %w", o.Path, err)
	}
	d.why = err.Error()
	if errors.Is(err, os.ErrNotExist) {
		d.why = "there is no directory of an earlier run"
	}
	return d, d.start(&o)
}

// load reads a directory that is there.
func (d *Directory) load(o *Options) (*contents, error) {
	f, err := openFile(o.Path)
	if err != nil {
		return nil, err
	}
	d.file = d.newFile(f, o)
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	b := make([]byte, entriesAt)
	n, err := f.ReadAt(b, 0)
	if n < len(b) && st.Size() >= int64(len(b)) {
		return nil, err
	}
	c, err := decode(b[:n], st.Size())
	if err != nil {
		return nil, err
	}
	h := &c.header
	switch {
	case h.boot != o.boot:
		return nil, errBoot
	case h.lockDev != o.LockDev || h.lockInode != o.LockInode:
		return nil, errLock
	case h.epoch >= maxEpoch-2 || h.generation >= maxGeneration-2 || h.next >= maxRegion-records:
		return nil, errOld
	}
	h.epoch++
	if !o.Takeover {
		h.generation++
		h.trusted = h.epoch
	}
	for _, r := range c.regions {
		if r != nil {
			h.next = max(h.next, r.ID+1)
		}
	}
	return c, nil
}

func (d *Directory) newFile(f *os.File, o *Options) *file {
	return &file{f: f, wrote: o.wrote, faulty: func(err error) {
		d.warn("something has cut it short; start this sidecar anew", err)
	}}
}

// warn logs, once, that chunks are not kept.
func (d *Directory) warn(fix string, err error) {
	if !d.full.Swap(true) {
		d.log.Warn("some of what is stored is not found after a restart: the directory of the arena cannot be written",
			zap.String("path", d.path), zap.String("fix", fix), zap.Error(err))
	}
}

// start makes a new directory.
func (d *Directory) start(o *Options) error {
	h := header{boot: o.boot, lockDev: o.LockDev, lockInode: o.LockInode, epoch: 1, trusted: 1,
		generation: rand.Uint64() % (maxGeneration / 4)}
	_, _ = crand.Read(h.store[:]) // never fails
	first := make([]byte, entriesAt)
	copy(first[headerOffset(h.epoch):], h.encode())
	use := func(f *os.File, err error) error {
		if err != nil {
			return err
		}
		d.file = d.newFile(f, o)
		d.file.note()
		if err := d.mapAll(&contents{header: h}); err != nil {
			return errors.Join(err, d.unmap())
		}
		return nil
	}
	if err := use(createFile(o.Path, first)); err != nil {
		d.lasting = false
		d.log.Warn("there is no directory of the arena: it works, but is empty after a restart; see that runtime.dir can be written and has room",
			zap.String("path", o.Path), zap.Error(err))
		if err := use(memoryFile(first)); err != nil {
			return fmt.Errorf("memory for the directory of the arena: %w", err)
		}
	}
	return nil
}

// mapAll maps the file's parts.
func (d *Directory) mapAll(c *contents) (err error) {
	d.header, d.generation, d.next = c.header, c.header.generation, c.header.next
	if d.tables, err = d.file.view(0, entriesAt); err != nil {
		return err
	}
	for i, r := range c.regions {
		if r == nil {
			continue
		}
		v, err := d.file.view(r.at, roundUp(r.SizeBytes, entriesAt))
		if err != nil {
			return err
		}
		d.regions[i] = &region{regionRecord: *r, view: v}
	}
	for i, p := range c.pieces {
		if p == nil {
			continue
		}
		if d.names[i], err = d.newPiece(p, d.regionByID(p.Region)); err != nil {
			return fmt.Errorf("%w: %w", errDamaged, err) // not reached: decode has checked it
		}
		d.names[i].record, d.names[i].found = i, true
		if !p.bare {
			d.names[i].first.Do(func() {})
		}
	}
	return nil
}

// unmap unmaps everything and closes the file.
func (d *Directory) unmap() error {
	var errs []error
	for i, r := range d.regions {
		if r != nil {
			errs = append(errs, r.view.close())
		}
		d.regions[i], d.names[i] = nil, nil
	}
	if d.tables != nil {
		errs = append(errs, d.tables.close())
		d.tables = nil
	}
	if d.file != nil {
		errs = append(errs, d.file.f.Close())
		d.file = nil
	}
	return errors.Join(errs...)
}

// Generation returns the generation of this run: one more than that of the run before, or a random
// one.
func (d *Directory) Generation() uint64 { return d.generation }

// Why returns why nothing of an earlier run is known, in words that follow on "empty because"; ""
// if something is.
func (d *Directory) Why() string { return d.why }

// Lasting reports whether the next process finds the directory.
func (d *Directory) Lasting() bool { return d.lasting }

// Regions returns the regions of the directory, by id. After Open these are the regions of the run
// before.
func (d *Directory) Regions() []Region {
	d.mu.Lock()
	defer d.mu.Unlock()
	var out []Region
	for _, r := range d.regions {
		if r != nil {
			out = append(out, r.Region)
		}
	}
	slices.SortFunc(out, func(a, b Region) int { return int(a.ID) - int(b.ID) })
	return out
}

// Next returns an id that no region has, nor had in this directory.
func (d *Directory) Next() uint32 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.next
}

// regionByID returns a region, nil if there is none. The caller holds mu, or is the only user.
func (d *Directory) regionByID(id uint32) *region {
	for _, r := range d.regions {
		if r != nil && r.ID == id {
			return r
		}
	}
	return nil
}

// AddRegion enters a new region, before it is added to the engine. If it fails, nothing in the
// region is kept.
func (d *Directory) AddRegion(n Region) error {
	d.growing.Lock()
	defer d.growing.Unlock()
	d.mu.Lock()
	d.next = max(d.next, n.ID+1)
	slot := slices.Index(d.regions[:], nil)
	there := d.regionByID(n.ID) != nil
	at := d.place(roundUp(n.SizeBytes, entriesAt))
	d.mu.Unlock()
	r := &region{regionRecord: regionRecord{Region: n, at: at}}
	if _, ok := decodeRegion(r.encode()); !ok || slot < 0 || there || n.ID >= maxRegion-1 {
		return fmt.Errorf("region %d of %d bytes cannot be in the directory", n.ID, n.SizeBytes)
	}
	size := roundUp(n.SizeBytes, entriesAt)
	err := d.file.grow(at + size)
	if err == nil {
		r.view, err = d.file.view(at, size)
	}
	if err != nil {
		return fmt.Errorf("region %d in the directory: %w", n.ID, err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.regions[slot] = r
	at = int64(regionsAt + slot*recordBytes)
	d.enter(at, seal(r.encode(), d.header.store, at))
	return nil
}

// place returns where a part of so many bytes can lie. The caller holds mu.
func (d *Directory) place(size int64) int64 {
	var parts []*region
	for _, r := range d.regions {
		if r != nil {
			parts = append(parts, r)
		}
	}
	slices.SortFunc(parts, func(a, b *region) int { return int((a.at - b.at) / entriesAt) })
	at := int64(entriesAt)
	for _, r := range parts {
		if r.at-at >= size {
			break
		}
		at = r.at + roundUp(r.SizeBytes, entriesAt)
	}
	return at
}

// enter makes a record with its checksum valid that was not. The caller holds mu.
func (d *Directory) enter(offset int64, record []byte) {
	d.tables.put(offset, record)
	d.tables.store(offset, binary.LittleEndian.Uint64(record))
}

// Drop forgets regions and all that is in them. It is for the time before Restore: nothing in them
// is in use. Their ids are not used again.
func (d *Directory) Drop(ids ...uint32) error {
	d.growing.Lock()
	defer d.growing.Unlock()
	var errs []error
	for _, id := range ids {
		d.mu.Lock()
		r := d.regionByID(id)
		if r == nil {
			d.mu.Unlock()
			continue
		}
		for i, p := range d.names {
			if p != nil && p.region == r {
				d.tables.store(int64(piecesAt+i*recordBytes), 0)
				d.names[i] = nil
			}
		}
		slot := slices.Index(d.regions[:], r)
		d.tables.store(int64(regionsAt+slot*recordBytes), 0)
		d.regions[slot] = nil
		d.mu.Unlock()
		d.file.discard(r.at, roundUp(r.SizeBytes, entriesAt))
		errs = append(errs, r.view.close())
	}
	return errors.Join(errs...)
}

// newPiece makes what is known of a piece. The caller enters it.
func (d *Directory) newPiece(rec *pieceRecord, r *region) (*piece, error) {
	p := &piece{pieceRecord: *rec, region: r, begun: make([]atomic.Uint32, (rec.Slots+31)/32)}
	var err error
	if p.form, err = rec.layout(); err != nil {
		return nil, err
	}
	var ok bool
	if p.from, _, ok = rec.entries(p.form.EntryBytes, r.SizeBytes); !ok {
		return nil, fmt.Errorf("piece %+v is not in its region", rec.Piece)
	}
	p.id = media.NewIdentity(d.header.store, r.ID, rec.format)
	return p, nil
}

// entry returns where the entry of a slot lies in the region's part.
func (p *piece) entry(slot uint32) int64 {
	return p.from + int64(slot)*int64(p.form.EntryBytes)
}

// recordAt returns where the piece's record lies in the file.
func (p *piece) recordAt() int64 { return int64(piecesAt + p.record*recordBytes) }

func (p *piece) wasBegun(slot uint32) bool { return p.begun[slot/32].Load()>>(slot%32)&1 != 0 }

func (p *piece) begin(slot uint32) { p.begun[slot/32].Or(1 << (slot % 32)) }

// Hooks sets the hooks of an engine's configuration by which the directory learns of changes. It
// calls those that are set already as well. All that the engine has then belongs in the directory.
func (d *Directory) Hooks(c *engine.Config) {
	was := *c
	c.Keep = true
	c.Wake = func(w engine.Work) {
		if w == engine.WorkKeep {
			d.keepers.ring()
		} else if was.Wake != nil {
			was.Wake(w)
		}
	}
	c.OnCarve = func(p engine.Piece) {
		d.onCarve(p)
		if was.OnCarve != nil {
			was.OnCarve(p)
		}
	}
	c.OnUncarve = func(num uint32) {
		d.onUncarve(num)
		if was.OnUncarve != nil {
			was.OnUncarve(num)
		}
	}
	c.OnGone = func(region, piece, slot uint32) {
		d.onGone(piece, slot)
		if was.OnGone != nil {
			was.OnGone(region, piece, slot)
		}
	}
}

// onCarve enters a piece. A piece that the directory has found keeps its entries.
func (d *Directory) onCarve(n engine.Piece) {
	if d.left.Load() {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, p := range d.names {
		if p != nil && p.found && p.Region == n.Region && p.Offset == n.Offset {
			p.found = false
			d.pieces[n.Num].Store(p)
			return
		}
	}
	r := d.regionByID(n.Region)
	slot := slices.Index(d.names[:], nil)
	if r == nil || slot < 0 {
		return
	}
	p, err := d.newPiece(&pieceRecord{Piece: n, format: rand.Uint64()}, r)
	if err != nil {
		return // the form has no such entries: its chunks are not kept
	}
	p.record, p.before = slot, slices.Clone(r.gone)
	d.names[slot] = p
	b := p.encode()
	binary.LittleEndian.PutUint64(b, bareSum(sumOf(b, d.header.store, p.recordAt())))
	d.enter(p.recordAt(), b)
	d.pieces[n.Num].Store(p)
}

// onUncarve forgets a piece.
func (d *Directory) onUncarve(num uint32) {
	p := d.pieces[num].Swap(nil)
	if p == nil || d.left.Load() {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	p.dead.Store(true)
	p.region.gone = append(p.region.gone, p)
	d.names[p.record] = nil
	d.tables.store(p.recordAt(), 0)
}

// onGone makes the entry of a slot invalid.
func (d *Directory) onGone(num, slot uint32) {
	if p := d.pieces[num].Load(); p != nil && !d.left.Load() {
		d.void(p, slot)
	}
}

// awaitWriters waits for those who have life now, and for nobody who comes later.
func (p *piece) awaitWriters() {
	p.life.Lock()
	//lint:ignore SA2001 see above
	p.life.Unlock()
}

// prepare makes a piece's place ready for its first entry: nobody writes there any more for a piece
// that lay there before, and what was written for that is gone. Until then the piece is bare: the
// next process does not read what is there. The caller holds life.
func (d *Directory) prepare(p *piece) {
	p.first.Do(func() {
		for _, q := range p.before {
			q.awaitWriters() // later ones see that q is dead
		}
		d.file.discard(p.region.at+p.from, int64(p.Slots)*int64(p.form.EntryBytes))
		d.mu.Lock()
		defer d.mu.Unlock()
		p.region.gone = slices.DeleteFunc(p.region.gone,
			func(q *piece) bool { return slices.Contains(p.before, q) })
		p.before = nil
		if !p.dead.Load() && !d.left.Load() {
			d.tables.store(p.recordAt(), sumOf(p.encode(), d.header.store, p.recordAt()))
		}
	})
}

// Attach names the engine whose configuration has the Hooks, and the memory of its regions. It
// starts to keep what the engine has.
func (d *Directory) Attach(e *engine.Engine, bytes func(region uint32) []byte) {
	d.engine, d.bytes = e, bytes
	for range min(workers(), 4) {
		d.keepers.wg.Go(d.keeper)
	}
}

// Stats is a snapshot of a directory. Counters start when it is opened.
type Stats struct {
	Kept   int    // chunks that would be found again if the process died now
	Failed uint64 // chunks that could not be kept
}

// Stats returns a snapshot. It is cheap.
func (d *Directory) Stats() Stats {
	return Stats{Kept: int(d.kept.Load()), Failed: d.failed.Load()}
}

// Leave ends all changes of the file: another process has taken the directory over. What becomes of
// chunks here is not noted any more. Leave waits for the entries that are being written, as long as
// it takes to read a chunk.
func (d *Directory) Leave() {
	d.left.Store(true)
	for i := range d.pieces {
		if p := d.pieces[i].Load(); p != nil {
			p.awaitWriters() // later ones see that left is set
		}
	}
}

// Close ends the keepers, waits for calls under way, and closes the file, which stays. Call it when
// the engine is closed, so that no hook is called any more, and before the arena's memory is. It is
// idempotent and returns its first error.
func (d *Directory) Close() error {
	d.closing.Do(func() {
		d.keepers.end()
		d.err = d.unmap()
	})
	return d.err
}

// Remove is Close, and removes the file, unless another process has it: nobody looks for what is in
// it.
func (d *Directory) Remove() error {
	err := d.Close()
	if d.lasting && !d.left.Load() {
		err = errors.Join(err, os.Remove(d.path))
	}
	return err
}
