package directory

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"go.uber.org/zap"

	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/slab/media"
)

// batchChunks is how many chunks go to the engine in one call.
const batchChunks = 512

// readBytes is how much of the entries is read at a time, but at least one entry. A test changes
// it.
var readBytes = 1 << 20

// Found is what Restore has found.
type Found struct {
	Chunks int // that the engine has now
	// Damaged is the number of entries that are neither valid nor void. A process that is killed
	// leaves none.
	Damaged int
	// Spaceless is the number of chunks of spaces that the engine has no room for.
	Spaceless int
}

// Restore enters what the directory has into the engine: pieces, and their chunks. The engine has
// all regions of the directory, and nothing was stored in them (Engine.AddDrainedRegion). Chunks
// must be verified before they are read, except those that the processes which have handed over to
// this one had verified, or stored. No data of the arena is read. With Takeover it fails if
// anything is missing.
func (d *Directory) Restore() (Found, error) {
	r := restorer{d: d, spaces: map[tiers.Fingerprint]engine.SpaceID{}}
	d.mu.Lock()
	found := d.names
	d.mu.Unlock()
	var jobs []job
	for i, p := range found {
		if p == nil || !p.found {
			continue
		}
		// The engine calls onCarve, which finds the piece again.
		num, err := d.engine.RestorePiece(p.Piece)
		if err != nil {
			r.fail(fmt.Errorf("piece %d of region %d: %w", i, p.Region, err))
			d.forget(p)
			continue
		}
		if !p.bare {
			jobs = append(jobs, jobsOf(p, num)...)
		}
	}
	// The workers read different pieces, as the engine takes one call for a piece at a time.
	slices.SortStableFunc(jobs, func(a, b job) int { return cmp.Compare(a.from, b.from) })
	// Parts of different pieces side by side: those of one wait for one another.
	slices.SortStableFunc(jobs, func(x, y job) int { return cmp.Compare(x.from, y.from) })
	var next atomic.Int64
	var wait sync.WaitGroup
	for range min(len(jobs), workers()) {
		wait.Go(func() {
			var buf []byte
			for i := next.Add(1) - 1; i < int64(len(jobs)); i = next.Add(1) - 1 {
				buf = r.read(&jobs[i], buf)
			}
		})
	}
	wait.Wait()
	d.commits.Store(r.last.Load())
	out := Found{Damaged: int(r.damaged.Load()), Spaceless: int(r.spaceless.Load())}
	out.Chunks = d.engine.EndRestore()
	if d.takeover && (len(r.errs) > 0 || out.Spaceless > 0) {
		return out, fmt.Errorf("%w: %w", errTakeover, errors.Join(append(r.errs,
			fmt.Errorf("%d chunks are of spaces for which there is no room", out.Spaceless))...))
	}
	for _, err := range r.errs {
		d.log.Warn("a part of the arena is not found", zap.Error(err))
	}
	return out, nil
}

// forget takes a piece out of the directory that was found and cannot be restored.
func (d *Directory) forget(p *piece) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.names[p.record] == p && p.found {
		d.names[p.record] = nil
		d.tables.store(p.recordAt(), 0)
	}
}

// job is neighbouring slots of a piece whose entries one goroutine reads.
type job struct {
	p        *piece
	num      uint32
	from, to int
	passing  *sync.Mutex // of the piece's jobs: the engine takes one call for a piece at a time
}

func jobsOf(p *piece, num uint32) (jobs []job) {
	step, passing := max(readBytes/p.form.EntryBytes, 1), new(sync.Mutex)
	for from := 0; from < p.Slots; from += step {
		jobs = append(jobs, job{p, num, from, min(from+step, p.Slots), passing})
	}
	return jobs
}

// restorer is one call of Restore.
type restorer struct {
	d         *Directory
	last      atomic.Uint64 // the highest number of a commit
	damaged   atomic.Int64
	spaceless atomic.Int64

	mu     sync.Mutex
	spaces map[tiers.Fingerprint]engine.SpaceID // 0: there is no room for it
	errs   []error
}

func (r *restorer) fail(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.errs = append(r.errs, err)
}

// space returns the engine's id of a space; 0 if there is none.
func (r *restorer) space(p *piece, fp tiers.Fingerprint) engine.SpaceID {
	r.mu.Lock()
	defer r.mu.Unlock()
	id, known := r.spaces[fp]
	if !known {
		var err error
		if id, err = r.d.engine.RecoverSpace(fp, p.form.Geometry); err != nil {
			r.d.log.Warn("what the arena holds of a space is dropped: the space cannot be opened",
				zap.String("space", fp.Short()), zap.Error(err))
			id = 0
		}
		r.spaces[fp] = id
	}
	return id
}

// read reads entries into buf, which it returns for its reuse, and passes their chunks on.
func (r *restorer) read(j *job, buf []byte) []byte {
	d, p := r.d, j.p
	file := d.file
	size := int64(p.form.EntryBytes)
	begin := p.region.at + p.entry(uint32(j.from))
	end := begin + int64(j.to-j.from)*size
	// Entries that were never written take no memory, and are not read.
	skip := int((file.data(begin, end) - begin) / size)
	if j.from += skip; j.from >= j.to {
		return buf
	}
	b := sized(buf, (j.to-j.from)*p.form.EntryBytes)
	if _, err := file.f.ReadAt(b, begin+int64(skip)*size); err != nil {
		r.fail(fmt.Errorf("entries of region %d: %w", p.Region, err))
		return b
	}
	var print tiers.Fingerprint
	var id engine.SpaceID
	batch := make([]engine.Restored, 0, min(j.to-j.from, batchChunks))
	for slot := j.from; slot < j.to; slot++ {
		var e media.Entry
		switch p.form.DecodeEntry(b[(slot-j.from)*p.form.EntryBytes:], p.id, slot, &e) {
		case media.Free:
			continue
		case media.Bad:
			if head := b[(slot-j.from)*p.form.EntryBytes:][:8]; [8]byte(head) != [8]byte{} {
				r.damaged.Add(1)
			}
			continue
		}
		p.begin(uint32(slot))
		d.kept.Add(1)
		raise(&r.last, e.Commit)
		if e.Space != print || id == 0 { // chunks of a space lie in long runs
			print, id = e.Space, r.space(p, e.Space)
		}
		if id == 0 {
			r.spaceless.Add(1)
			d.void(p, uint32(slot))
			continue
		}
		batch = append(batch, engine.Restored{Slot: uint32(slot), Space: id, First: e.First,
			Pages: e.Pages, Prev: e.Prev, Hashes: e.Digests, Order: e.Commit,
			Unverified: e.Stable < d.header.trusted, Tenant: d.engine.TenantOf(e.Tenant)})
		if len(batch) == cap(batch) {
			r.pass(j, batch)
			batch = batch[:0]
		}
	}
	r.pass(j, batch)
	return b
}

// pass passes chunks on to the engine.
func (r *restorer) pass(j *job, batch []engine.Restored) {
	if len(batch) == 0 {
		return
	}
	j.passing.Lock()
	err := r.d.engine.RestoreIn(j.num, batch)
	j.passing.Unlock()
	if err != nil {
		r.fail(fmt.Errorf("%d chunks of region %d: %w", len(batch), j.p.Region, err))
		for i := range batch {
			r.d.void(j.p, batch[i].Slot)
		}
	}
}

// raise makes x at least n.
func raise(x *atomic.Uint64, n uint64) {
	for was := x.Load(); was < n && !x.CompareAndSwap(was, n); was = x.Load() {
	}
}
