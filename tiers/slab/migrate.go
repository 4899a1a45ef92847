package slab

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"lookaside/dax"
	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/slab/media"
	"lookaside/tiers/vfs"
)

const (
	// moveBatch is the most chunks that move between two syncs, batchBytes the most bytes.
	moveBatch  = 8
	batchBytes = 32 << 20
	// moveBytes is the largest request of a migration. It bounds how long lookups wait.
	moveBytes = 1 << 20
)

// mover moves chunks out of slabs that are drained.
type mover struct {
	d     *Disk
	buf   []byte // aligned
	moves []engine.Move
	names []byte // backs the moves' digests
}

// migrate moves all chunks of drained places elsewhere. It waits for chunks in use.
func (d *Disk) migrate(ctx context.Context, h *directory, places []*place) error {
	h.moved.Store(0)
	h.total.Store(0)
	if err := d.room(places, h); err != nil {
		return err
	}
	buf, err := dax.NewTable[byte](min(d.o.PieceBytes, moveBytes))
	if err != nil {
		return err
	}
	defer buf.Close()
	v := mover{d: d, buf: buf.Slice()}
	start := time.Now()
	progress := start // when a chunk moved last
	wait := time.Millisecond
	for failures := 0; ; {
		left, moved := 0, int64(0)
		var failed error
		for _, s := range d.slabsOf(places) {
			n, err := v.empty(ctx, s, h, time.Since(progress) > patience)
			moved += n
			if errors.Is(err, errMove) {
				failed = err
			} else if err != nil {
				return err
			}
			if st, ok := d.engine.Region(s.region); ok {
				left += st.Used()
			}
		}
		if left == 0 {
			d.log.Info("moved what was in a directory, or a part of it",
				zap.String("directory", h.path), zap.Int64("chunks", h.moved.Load()),
				zap.Duration("in", time.Since(start)))
			return nil
		}
		if moved > 0 {
			progress, failures, wait = time.Now(), 0, time.Millisecond
		} else if failed != nil {
			if failures++; failures >= enough {
				return failed
			}
		}
		if err := d.pause(ctx, wait); err != nil {
			return err
		}
		wait = min(2*wait, 20*time.Millisecond)
	}
}

// errMove marks an error of single moves; the migration goes on.
var errMove = errors.New("a chunk could not be moved")

// room carves places elsewhere for all chunks of drained places. It returns an error with the
// missing amount if there is too little room.
func (d *Disk) room(places []*place, h *directory) error {
	need := map[tiers.Geometry]int{}
	for _, s := range d.slabsOf(places) {
		if st, ok := d.engine.Region(s.region); ok {
			need[s.layout.Geometry] += st.Used()
			h.total.Add(int64(st.Used()))
		}
	}
	missing := int64(0)
	for g, n := range need {
		if free := d.carveFor(g, n); free < n {
			missing += int64(n-free) * g.PageBytes * int64(g.PagesPerChunk)
		}
	}
	if missing > 0 {
		return fmt.Errorf("%w: for what is to be moved %d bytes are missing elsewhere", ErrNoRoom,
			missing)
	}
	return nil
}

// carveFor carves blank places for a geometry until it has the wanted free slots. It returns how
// many it has.
func (d *Disk) carveFor(g tiers.Geometry, want int) (free int) {
	d.shape.Lock()
	defer d.shape.Unlock()
	_, free = d.engine.Room(g)
	for _, p := range d.places {
		if free >= want {
			break
		}
		if p.blank() {
			d.carveOrGiveUp(p, g)
			_, free = d.engine.Room(g)
		}
	}
	return free
}

// empty moves what it can out of a drained slab; if leased is set, also chunks that are being read.
// It returns how many it moved.
func (v *mover) empty(ctx context.Context, s *slab, h *directory,
	leased bool) (moved int64, err error) {
	var failed error
	for from := 0; from >= 0; {
		if err := v.d.going(ctx); err != nil {
			return moved, err
		}
		n, next, err := v.some(ctx, s, from, leased)
		h.moved.Add(n)
		moved += n
		switch {
		case errors.Is(err, tiers.ErrNotFound): // the slab was given up
			return moved, nil
		case errors.Is(err, tiers.ErrBusy):
			st, _ := v.d.engine.Region(s.region)
			if rest := st.Used(); v.d.carveFor(s.layout.Geometry, rest) == 0 && rest > 0 {
				return moved, fmt.Errorf(
					"%w: others have taken it: %d chunks, %d bytes, have not moved", ErrNoRoom,
					rest, int64(rest)*st.SlotBytes)
			}
		case errors.Is(err, errMove):
			failed = err
			from = next
		case err != nil:
			return moved, err
		default:
			from = next
		}
		runtime.Gosched()
	}
	return moved, failed
}

// some moves the next chunks of a slab, beginning at slot from.
func (v *mover) some(ctx context.Context, s *slab, from int, leased bool) (moved int64, next int,
	err error) {
	d := v.d
	d.moving.Lock()
	defer d.moving.Unlock()
	batch := int(min(moveBatch, max(1, batchBytes/s.layout.StrideBytes)))
	v.moves, next, v.names, err = d.engine.NextMoves(s.region, from, batch, leased, v.names,
		v.moves[:0])
	if err != nil || len(v.moves) == 0 {
		return 0, next, err
	}
	trips := make([]*trip, len(v.moves))
	for i := range v.moves {
		trips[i] = v.prepare(s, &v.moves[i])
	}
	v.sync(trips, func(t *trip) bool { return t.wrote })
	for _, t := range trips {
		if t.err == nil {
			v.carry(ctx, t)
		}
	}
	v.sync(trips, func(*trip) bool { return true })
	for _, t := range trips {
		how := engine.MoveDone
		switch {
		case t.bad:
			how = engine.MoveBad
		case t.err != nil:
			how = engine.MoveFailed
		default:
			t.to.faults.Store(0)
		}
		if d.engine.EndMove(t.move.Handle, how) {
			moved++
		}
		if t.err != nil && !t.bad {
			err = fmt.Errorf("%w: %w", errMove, t.err)
		}
	}
	if e := d.going(ctx); e != nil {
		err = e
	}
	return moved, next, err
}

// trip is one chunk on its way from slot to slot.
type trip struct {
	move     *engine.Move
	from, to *slab
	slot     int // in from
	place    int // in to
	gen      uint64
	kept     bool  // it has an entry, with checksums
	wrote    bool  // the old entry of its new slot was freed, which must be synced
	err      error // why it cannot be moved
	bad      bool  // because of its old slot
}

func (v *mover) prepare(s *slab, m *engine.Move) *trip {
	t := &trip{move: m, from: s, to: v.d.slabOf(m.To.Region), slot: s.slotAt(m.From.Offset)}
	if t.to == nil || t.to.failed.Load() {
		t.err = errors.New("where it was to go has been given up")
		return t
	}
	t.place = t.to.slotAt(m.To.Offset)
	v.d.touch(t.to)
	t.gen, t.kept = media.Generation(t.to.header.Epoch, t.to.fills.Add(1)), s.isKept(t.slot)
	t.to.freeSlots([]uint32{uint32(t.place)}, func(_ uint32, err error) {
		t.wrote, t.err = true,
			err
	})
	if t.err != nil {
		v.d.faulty(t.to, t.err)
	}
	return t
}

// sync makes the writes of some trips durable. A slab whose sync fails is given up.
func (v *mover) sync(trips []*trip, wants func(*trip) bool) {
	errs := map[*slab]error{}
	for _, t := range trips {
		if t.err != nil || !wants(t) {
			continue
		}
		err, done := errs[t.to]
		if !done {
			if err = t.to.sync(); err != nil {
				v.d.giveUp(t.to, err)
			}
			errs[t.to] = err
		}
		t.err = err
	}
}

// carry copies a chunk and writes its entry. It syncs neither.
func (v *mover) carry(ctx context.Context, t *trip) {
	d := v.d
	sums, read, write := v.copy(ctx, t)
	switch {
	case read != nil && errors.Is(read, d.going(ctx)):
		t.err = read
	case errors.Is(read, tiers.ErrCorrupt):
		t.err, t.bad = read, true
		d.corrupt.Add(1)
		d.log.Warn("a chunk on disk is corrupt; dropped", zap.Error(read))
	case read != nil: // as a load that fails
		t.err, t.bad = read, true
		d.unread.Add(1)
		d.faulty(t.from, read)
	case write != nil:
		t.err = write
		d.faulty(t.to, write)
	}
	if t.err != nil {
		return
	}
	m := t.move
	e := media.Entry{Generation: t.gen, First: int(m.From.Page), Pages: int(m.From.Pages),
		Prev: m.Prev, Digests: m.Hashes, Tenant: d.engine.TenantKey(m.Tenant)}
	sp := d.spaceByID(m.Space)
	if sp == nil { // cannot be: it has a chunk
		t.err = tiers.ErrNotFound
		return
	}
	e.Space = sp.Fingerprint
	if len(e.Prev) == 0 && e.First > 0 && t.kept {
		e.Prev = t.from.prevOf(t.slot)
	}
	e.Sums = encodeSums(sums)
	t.to.setSums(t.place, t.gen, sums)
	if t.err = t.to.writeEntries(d, uint32(t.place), []media.Entry{e}); t.err != nil {
		d.faulty(t.to, t.err)
	}
}

// prevOf returns the hash of the page before a slot's chunk, from the slot's entry on the medium,
// for chunks whose parent the engine no longer knows. It is empty if the entry does not have it.
func (s *slab) prevOf(slot int) []byte {
	b := make([]byte, s.layout.EntryBytes)
	if _, err := s.buffed.ReadAt(b, s.layout.EntryOffset(slot)); err != nil {
		return nil
	}
	var e media.Entry
	if s.layout.DecodeEntry(b, s.id, slot, &e) != media.Used ||
		e.Generation != s.gens.Slice()[slot] {
		return nil
	}
	return e.Prev
}

// copy reads the pages of a chunk, checks them if they have checksums, and writes them to the new
// slot. It returns their checksums there, and the error of reading or of writing.
func (v *mover) copy(ctx context.Context, t *trip) (sums []uint64, read, write error) {
	g := &t.from.layout.Geometry
	pages := int(t.move.From.Pages)
	total := int64(pages) * g.PageBytes
	in, out := t.from.buffed, t.to.buffed
	if t.from.direct != nil {
		in = t.from.direct
	}
	if t.to.direct != nil {
		out = t.to.direct
	}
	oldGen, oldSums := t.from.getSums(t.slot, pages, nil)
	digest := func(i int) []byte { return t.move.Hashes[i*g.DigestBytes : (i+1)*g.DigestBytes] }
	page, room := 0, g.PageBytes // the page being hashed, and its bytes still to come
	was, is := t.from.id.PageHasher(digest(0), oldGen), t.to.id.PageHasher(digest(0), t.gen)
	for at := int64(0); at < total; at += int64(len(v.buf)) {
		if err := v.d.going(ctx); err != nil {
			return nil, err, nil
		}
		n := min(total-at, int64(len(v.buf)))
		b := v.buf[:(n+block-1)/block*block] // strides are whole blocks
		if _, err := in.ReadAt(b, t.from.layout.SlotOffset(t.slot)+at); err != nil {
			return nil, err, nil
		}
		for rest := b[:n]; len(rest) > 0; {
			k := min(room, int64(len(rest)))
			_, _ = was.Write(rest[:k]) // never fails
			_, _ = is.Write(rest[:k])
			rest, room = rest[k:], room-k
			if room > 0 {
				continue
			}
			if t.kept && was.Sum64() != oldSums[page] {
				return nil, t.from.corrupt(int(t.move.From.Page)+page, t.slot), nil
			}
			sums = append(sums, is.Sum64())
			if page++; page < pages {
				was, is, room = t.from.id.PageHasher(digest(page), oldGen),
					t.to.id.PageHasher(digest(page), t.gen), g.PageBytes
			}
		}
		clear(b[n:])
		if _, err := out.WriteAt(b, t.to.layout.SlotOffset(t.place)+at); err != nil {
			return nil, nil, err
		}
		if in == t.from.buffed {
			_ = in.Advise(t.from.layout.SlotOffset(t.slot)+at, n, vfs.DontNeed)
		}
		giveWay()
	}
	return sums, nil, nil
}

// giveWay yields the processor to lookups: to their goroutines, and to their threads. Gosched alone
// is not enough. The kernel wakes a lookup's thread on the processor that copies and may leave it
// there until the next tick (4 ms), although another processor is idle. Before this call lookups
// were 1.5 to 4 ms late. Beside busy threads giveWay makes its caller slow, so only work that
// nobody waits for calls it.
func giveWay() {
	runtime.Gosched()
	_, _, _ = unix.Syscall(unix.SYS_SCHED_YIELD, 0, 0, 0) // it never fails
}
