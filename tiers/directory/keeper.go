package directory

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"runtime"
	"sync"

	"lookaside/dax"
	"lookaside/dax/memcopy"
	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/slab/media"
)

func workers() int { return runtime.GOMAXPROCS(0) }

// turns is how many slots can be handled at a time without waiting for one another. Two slots share
// one by chance.
const turns = 64

// keepers are the goroutines that keep what is committed, and those who do it for them.
type keepers struct {
	wg   sync.WaitGroup
	bell chan struct{} // rung when chunks wait
	stop chan struct{}

	// turn has a lock for each slot, some sharing one. It is held while the slot's entry is
	// written.
	turn [turns]sync.Mutex

	mu    sync.Mutex
	quiet *sync.Cond // a chunk was handled
	taken uint64     // chunks taken from the engine
	doing map[uint64]bool
	walk  bool // somebody walks over all chunks

	lost uint64 // chunks that the engine's queue had lost when the last walk began; guarded by mu
}

func (k *keepers) init() {
	k.bell, k.stop = make(chan struct{}, 1), make(chan struct{})
	k.quiet, k.doing = sync.NewCond(&k.mu), map[uint64]bool{}
}

// ring wakes a keeper.
func (k *keepers) ring() {
	select {
	case k.bell <- struct{}{}:
	default:
	}
}

func (k *keepers) end() {
	close(k.stop)
	k.wg.Wait()
}

func (k *keepers) ended() bool {
	select {
	case <-k.stop:
		return true
	default:
		return false
	}
}

// scratch is one goroutine's memory.
type scratch struct {
	names   []byte // digests of what the engine named
	entry   []byte
	old     []byte
	seeds   []uint64
	sums    []uint64
	encoded []byte // sums
	yield   *memcopy.Yielder
}

func newScratch() *scratch { return &scratch{yield: memcopy.NewYielder(4)} }

// keeper keeps chunks until the directory is closed.
func (d *Directory) keeper() {
	k := newScratch()
	for n := 0; !d.keepers.ended(); {
		if d.keepNext(k) {
			if n++; n > 1 {
				d.keepers.ring() // more wait than one keeper has kept meanwhile
			}
			continue
		}
		n = 0
		if d.keepLost(k) {
			continue
		}
		select {
		case <-d.keepers.bell:
		case <-d.keepers.stop:
		}
	}
}

// keepNext keeps the next chunk that waits. It returns false if there is none.
func (d *Directory) keepNext(k *scratch) bool {
	ks := &d.keepers
	ks.mu.Lock()
	v, names, ok := d.engine.NextUnkept(k.names)
	k.names = names
	if !ok {
		ks.mu.Unlock()
		return false
	}
	ks.taken++
	number, commit := ks.taken, d.commits.Add(1)
	ks.doing[number] = true
	ks.mu.Unlock()
	_ = d.keep(&v, commit, k)
	ks.mu.Lock()
	delete(ks.doing, number)
	ks.quiet.Broadcast()
	ks.mu.Unlock()
	return true
}

// keepLost walks over all chunks if some were lost from the engine's queue, and keeps those that
// are not kept. It returns false if there was nothing to do, or if another goroutine does it.
func (d *Directory) keepLost(k *scratch) bool {
	ks, lost := &d.keepers, d.engine.Stats().KeepLost
	ks.mu.Lock()
	if lost == ks.lost || ks.walk {
		ks.mu.Unlock()
		return false
	}
	ks.lost, ks.walk = lost, true
	ks.mu.Unlock()
	var at engine.PatrolPlace
	for ok := true; ok && !ks.ended(); {
		var v engine.Verification
		if v, k.names, ok = d.engine.NextPatrol(&at, k.names); ok {
			_ = d.keep(&v, d.commits.Add(1), k)
		}
	}
	ks.mu.Lock()
	ks.walk = false
	ks.quiet.Broadcast()
	ks.mu.Unlock()
	return true
}

// queued is the most chunks that wait in the engine at a time.
const queued = 1 << 16

// Flush waits until all chunks that were committed before the call are kept, except those that
// could not be. If ctx ends first, it returns ctx's error.
func (d *Directory) Flush(ctx context.Context) error {
	ks, k := &d.keepers, newScratch()
	defer context.AfterFunc(ctx, func() {
		ks.mu.Lock()
		defer ks.mu.Unlock()
		ks.quiet.Broadcast()
	})()
	going := func() bool { return ctx.Err() == nil && !ks.ended() }
	for n := 0; n < queued && going() && d.keepNext(k); n++ {
	}
	for d.keepLost(k) {
	}
	ks.mu.Lock()
	defer ks.mu.Unlock()
	for last := ks.taken; going() && (ks.walk || ks.before(last)); {
		ks.quiet.Wait()
	}
	return context.Cause(ctx)
}

// before reports whether a chunk up to this number is still being handled. The caller holds mu.
func (k *keepers) before(last uint64) bool {
	for n := range k.doing {
		if n <= last {
			return true
		}
	}
	return false
}

// using returns the piece of a chunk, with its life held for reading, and the turn for the slot,
// which is not held. The piece is nil, and nothing is held, if the chunk cannot be kept, or has
// gone.
func (d *Directory) using(v *engine.Verification) (p *piece, turn *sync.Mutex) {
	if v.Piece >= uint32(len(d.pieces)) {
		return nil, nil
	}
	p = d.pieces[v.Piece].Load()
	if p == nil || !p.has(v) {
		return nil, nil
	}
	p.life.RLock()
	if p.dead.Load() || d.left.Load() {
		p.life.RUnlock()
		return nil, nil
	}
	d.prepare(p) // without a turn: it waits for others who may want that
	return p, &d.keepers.turn[(v.Piece*0x9E3779B1+v.Slot)%turns]
}

// has reports whether a chunk can be in the piece. Since it was named, its piece may have gone, and
// another may have got the number.
func (p *piece) has(v *engine.Verification) bool {
	g := &p.form.Geometry
	return v.Region == p.Region && int64(v.Slot) < int64(p.Slots) &&
		v.Offset == uint64(p.Offset)+uint64(v.Slot)*uint64(p.Stride) && v.Pages >= 1 &&
		v.Pages <= g.PagesPerChunk && len(v.Hashes) == v.Pages*g.DigestBytes &&
		v.First%g.PagesPerChunk == 0 && (len(v.Prev) == 0 || len(v.Prev) == g.DigestBytes)
}

// keep writes the entry of a chunk, unless it has one. The chunk may go at any moment. The error
// says why the chunk's bytes cannot be read.
func (d *Directory) keep(v *engine.Verification, commit uint64, k *scratch) error {
	p, turn := d.using(v)
	if p == nil {
		return nil
	}
	defer p.life.RUnlock()
	turn.Lock()
	defer turn.Unlock()
	sp, ok := d.engine.Space(v.Space)
	if !ok {
		return nil
	}
	e := media.Entry{
		Generation: media.Generation(d.header.epoch, d.fills.Add(1)), Commit: commit,
		Stable: d.header.epoch, Space: sp.Fingerprint, First: v.First, Pages: v.Pages, Prev: v.Prev,
		Digests: v.Hashes, Tenant: d.engine.TenantKey(v.Tenant),
	}
	k.encoded = k.encoded[:0]
	have := 0
	if old, there := d.read(p, v.Slot, k); there {
		// An entry that is there is of what the slot holds now. If that is something else than v, v
		// is of what it held before.
		if !sameChunk(&old, v) || old.Pages >= v.Pages {
			return nil
		}
		// The chunk has grown. What its first pages should be is known, whatever they are now.
		have, e.Generation = old.Pages, old.Generation
		k.encoded = append(k.encoded, old.Sums...)
	}
	if err := d.sum(p, v, have, v.Pages, e.Generation, k); err != nil {
		return err
	}
	for _, sum := range k.sums {
		k.encoded = binary.LittleEndian.AppendUint64(k.encoded, sum)
	}
	e.Sums = k.encoded
	d.write(p, v.Handle, v.Slot, &e, k)
	return nil
}

// sameChunk reports whether an entry is of the chunk, with more or fewer pages.
func sameChunk(e *media.Entry, v *engine.Verification) bool {
	n := min(len(e.Digests), len(v.Hashes))
	return e.First == v.First && bytes.Equal(e.Digests[:n], v.Hashes[:n])
}

// read reads the valid entry of a slot. It returns false if there is none. The entry lies in k.old.
func (d *Directory) read(p *piece, slot uint32, k *scratch) (e media.Entry, ok bool) {
	if !d.valid(p, slot) {
		return e, false
	}
	k.old = sized(k.old, p.form.EntryBytes)
	if _, err := d.file.f.ReadAt(k.old, p.region.at+p.entry(slot)); err != nil {
		return e, false
	}
	return e, p.form.DecodeEntry(k.old, p.id, int(slot), &e) == media.Used
}

func sized[T any](s []T, n int) []T {
	if cap(s) < n {
		return make([]T, n)
	}
	return s[:n]
}

// sum computes the checksums of pages [from, to) of a chunk, as they are now, into k.sums.
func (d *Directory) sum(p *piece, v *engine.Verification, from, to int, generation uint64,
	k *scratch) error {
	g := &p.form.Geometry
	k.seeds, k.sums = k.seeds[:0], sized(k.sums, to-from)
	for i := from; i < to; i++ {
		k.seeds = append(k.seeds,
			p.id.PageSeed(v.Hashes[i*g.DigestBytes:(i+1)*g.DigestBytes], generation))
	}
	mem := d.bytes(v.Region)
	at := v.Offset + uint64(from)*uint64(g.PageBytes)
	if end := at + uint64(len(k.sums))*uint64(g.PageBytes); end > uint64(len(mem)) {
		return fmt.Errorf("%w: bytes %d to %d of region %d of %d", tiers.ErrInvalid, at, end,
			v.Region, len(mem))
	} else {
		mem = mem[at:end]
	}
	return dax.Guard(func() {
		memcopy.Sums(mem, int(g.PageBytes), k.seeds, k.sums, k.yield.Yield)
	}, mem)
}

// write writes an entry, and makes it valid if the chunk is still held. The caller holds the slot's
// turn and the piece's life.
func (d *Directory) write(p *piece, handle uint64, slot uint32, e *media.Entry, k *scratch) {
	k.entry = sized(k.entry, p.form.EntryBytes)
	p.form.EncodeEntry(k.entry, p.id, int(slot), e)
	sum := binary.LittleEndian.Uint64(k.entry)
	if sum == 0 { // one of 2^64
		d.failed.Add(1)
		return
	}
	clear(k.entry[:8])
	at := p.entry(slot)
	// What is written over must not be valid, and counts as kept only while it is.
	if d.valid(p, slot) && !d.engine.Publish(handle, 1, func() { d.void(p, slot) }) {
		return // it is not held any more
	}
	if err := d.file.write(k.entry, p.region.at+at); err != nil {
		d.failed.Add(1)
		d.warn("make room in runtime.dir", err)
		return
	}
	p.begin(slot)
	d.engine.Publish(handle, e.Pages, func() {
		p.region.view.store(at, sum)
		d.kept.Add(1)
	})
}

// valid reports whether the entry of a slot may be valid.
func (d *Directory) valid(p *piece, slot uint32) bool {
	return p.wasBegun(slot) && p.region.view.load(p.entry(slot)) != 0
}

// void makes the entry of a slot invalid. It is called under the engine's lock.
func (d *Directory) void(p *piece, slot uint32) {
	if p.wasBegun(slot) && p.region.view.take(p.entry(slot)) != 0 {
		d.kept.Add(-1)
	}
}
