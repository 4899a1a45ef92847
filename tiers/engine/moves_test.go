package engine

import (
	"bytes"
	"errors"
	"slices"
	"sync"
	"testing"

	"lookaside/tiers"
)

// The part of the random histories that is about regions which are drained, emptied by moves, and
// come and go.

// modelMove is a chunk on its way from one region to another.
type modelMove struct {
	space *modelSpace
	m     Move
}

// drain drains a region, or ends that for one: mostly there is at most one.
func (w *world) drain() {
	ids := regionIDs(w.arena)
	id := ids[w.rng.IntN(len(ids))]
	for _, other := range ids {
		if w.drained[other] && !w.chance(4) {
			id = other
		}
	}
	var err error
	if w.drained[id] {
		if err = w.e.Undrain(id); err == nil {
			delete(w.drained, id)
		}
	} else if err = w.e.Drain(id); err == nil {
		w.drained[id] = true
	}
	if err != nil && !(errors.Is(err, tiers.ErrBusy) && w.going[id]) {
		w.fatal("draining region %d: %v", id, err)
	}
}

func regionIDs(m map[uint32][]byte) (ids []uint32) {
	for id := range m {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

// unplug takes a region away, and now and then adds one.
func (w *world) unplug() {
	if w.chance(2) && len(w.arena) < 8 {
		w.nextRegion++
		size := w.sizes[w.rng.IntN(len(w.sizes))]
		w.addRegion(w.nextRegion, size)
		return
	}
	for _, id := range regionIDs(w.arena) {
		_, carved := w.e.Region(id)
		if !w.going[id] && (carved && !w.drained[id] || !carved && !w.chance(4)) ||
			len(w.arena) == 1 {
			continue
		}
		regions, ok := w.e.parts(id)
		if !ok || w.fixed != nil && !carved {
			w.fatal("region %d is there: %v, carved from the start: %v", id, ok, carved)
		}
		var st RegionStats
		for _, r := range regions {
			st.Slots += len(r.slots)
			st.Free += r.free
			st.Leased += r.leased
			st.Filling += r.filling
		}
		if st.Free < st.Slots {
			w.bad = true // something is dropped
		}
		delete(w.drained, id)
		err := w.e.RemoveRegion(id)
		if busy := st.Leased+st.Filling > 0; busy != errors.Is(err, tiers.ErrBusy) ||
			!busy && err != nil {
			w.fatal("region %d with %+v is removed: %v", id, st, err)
		}
		if w.going[id] = err != nil; err == nil {
			if w.mirror.has(id) {
				w.fatal("region %d is gone and has pieces", id)
			}
			delete(w.going, id)
			delete(w.arena, id)
			w.unplugged++
		}
		return
	}
}

// move begins to move what is in some drained region.
func (w *world) move() {
	ids := regionIDs(w.arena)
	id := ids[w.rng.IntN(len(ids))]
	for _, other := range ids {
		if w.drained[other] && !w.chance(4) {
			id = other
		}
	}
	if _, carved := w.e.Region(id); !w.drained[id] || !carved {
		if _, _, _, err := w.e.NextMoves(id, 0, 1, true, nil, nil); !errors.Is(err,
			tiers.ErrNotFound) {
			w.fatal("moves out of region %d, which is not drained, or not one piece: %v", id, err)
		}
		return
	}
	most, leased := 1+w.rng.IntN(4), w.chance(2)
	evictions := w.e.Stats().Evictions
	moves, next, _, err := w.e.NextMoves(id, max(0, w.rng.IntN(20)-15), most, leased, nil, nil)
	if err != nil && (!errors.Is(err, tiers.ErrBusy) || len(moves) > 0) || len(moves) > most ||
		w.e.Stats().Evictions != evictions {
		w.fatal("%d moves, %v; evictions were %d", len(moves), err, evictions)
	}
	if next < -1 {
		w.fatal("moves go on at %d", next)
	}
	for _, m := range moves {
		x := &modelMove{m: m}
		for _, s := range w.spaces {
			if s.id == m.Space {
				x.space = s
			}
		}
		if m.From.Region != id || w.drained[m.To.Region] || m.To.Region == id ||
			m.From.Page != m.To.Page || m.From.Pages != m.To.Pages {
			w.fatal("%+v out of region %d", m, id)
		}
		w.verifyMove(x)
		for i := range int(m.To.Pages) {
			for j, page := 0, w.page(x.space, m.To, i); j < len(page); j++ {
				page[j] = 0xEE // half-written
			}
		}
		w.moves[m.Handle] = x
	}
}

// verifyMove compares what is being moved with what it should be, where it was.
func (w *world) verifyMove(x *modelMove) {
	if x.m.Unverified {
		return
	}
	w.verifyCascade(&modelCascade{space: x.space, item: CascadeItem{
		Space: x.m.Space, Region: x.m.From.Region, Offset: x.m.From.Offset,
		First: int(x.m.From.Page), Pages: int(x.m.From.Pages), Prev: x.m.Prev, Hashes: x.m.Hashes,
	}})
}

func (w *world) endMove() {
	h, x, ok := pick(w, w.moves)
	if !ok {
		return
	}
	w.verifyMove(x)
	how := MoveDone
	if w.chance(6) {
		how = MoveFailed
	} else if w.chance(30) {
		how = MoveBad
		w.bad = true
	}
	if x.m.Unverified && !w.good(x.space, x.m.From, x.m.Hashes) {
		how = MoveBad
	}
	if how == MoveDone {
		for i := range int(x.m.To.Pages) {
			copy(w.page(x.space, x.m.To, i), w.page(x.space, x.m.From, i))
		}
	}
	before := w.e.Stats()
	moved := w.e.EndMove(h, how)
	delete(w.moves, h)
	w.ended = append(w.ended, h)
	if w.e.EndMove(h, MoveDone) {
		w.fatal("a move ends twice")
	}
	if moved && how != MoveDone {
		w.fatal("%+v has moved though it ended with %d", x.m, how)
	}
	if after := w.e.Stats(); after.Pages != before.Pages && (how != MoveBad ||
		after.Pages > before.Pages) || after.FillingSlots != before.FillingSlots-1 {
		w.fatal("a move changed %+v to %+v", before, after)
	}
	if moved {
		if x.m.Unverified {
			w.commitAll(x.space, x.m.Hashes)
		}
		w.moved++
	}
}

// rig is an engine with two regions and an owner, for tests of what moves.
func newMoveRig(t *testing.T, g tiers.Geometry, slots int64, admissions ...TierAdmission) (*Engine,
	SpaceID) {
	t.Helper()
	e, err := New(Config{MaxPages: 4096, MinPageBytes: 1, OwnerShare: 1, Tiers: admissions,
		LowWater: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Check(); err != nil && !errors.Is(err, tiers.ErrClosed) {
			t.Error(err)
		}
		e.Close()
	})
	for id := uint32(1); id <= 2; id++ {
		if err := e.AddCarvedRegion(id, g, int(slots), packed(g)); err != nil {
			t.Fatal(err)
		}
	}
	sp, err := e.OpenSpace(tiers.FingerprintOf([]byte("moves")), g)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.AddOwner(1, sp); err != nil {
		t.Fatal(err)
	}
	return e, sp
}

func moveStore(t *testing.T, e *Engine, first int, prev, hashes []byte) []Grant {
	t.Helper()
	res, grants, err := e.PrepareStore(1, first, prev, hashes, nil)
	if err == nil && res.Store != 0 {
		err = e.CommitStore(1, res.Store, nil)
	}
	if err != nil || res.Shed > 0 {
		t.Fatal(res, err)
	}
	return grants
}

// moveAll moves whatever is in a region, and answers how many.
func moveAll(t *testing.T, e *Engine, region uint32, leased bool) (n int) {
	t.Helper()
	for from := 0; from >= 0; {
		moves, next, _, err := e.NextMoves(region, from, 3, leased, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		from = next
		for _, m := range moves {
			if !e.EndMove(m.Handle, MoveDone) {
				t.Fatalf("%+v has not moved", m)
			}
			n++
		}
	}
	return n
}

// TestMove: what is moved is found in its new place, with its place in its prefix and in the order
// of eviction; what was leased stays readable where it was until its lease ends.
func TestMove(t *testing.T) {
	t.Parallel()
	g := tiers.Geometry{PageBytes: 16, PagesPerChunk: 4, PageTokens: 1, DigestBytes: 32}
	e, _ := newMoveRig(t, g, 40)
	h := numbered(1, 32) // 8 chunks
	for _, gr := range moveStore(t, e, 0, nil, h) {
		if gr.Region != 1 {
			t.Fatalf("%+v", gr)
		}
	}
	if n, err := e.Lookup(1, 7, 0, h[:4*4*32]); n != 16 || err != nil {
		t.Fatal(n, err)
	}
	if _, _, _, err := e.NextMoves(1, 0, 10, false, nil, nil); !errors.Is(err, tiers.ErrNotFound) {
		t.Fatal(err)
	}
	if err := e.Drain(1); err != nil {
		t.Fatal(err)
	}
	// The first four chunks are leased.
	if n := moveAll(t, e, 1, false); n != 4 {
		t.Fatalf("%d chunks moved", n)
	}
	if st, _ := e.Region(1); st.Leased != 4 || st.Free != 36 || !st.Draining {
		t.Fatalf("%+v", st)
	}
	if n := moveAll(t, e, 1, true); n != 4 {
		t.Fatalf("%d leased chunks moved", n)
	}
	if st, _ := e.Region(1); st.Leased != 4 {
		t.Fatalf("%+v", st)
	}
	load, extents, err := e.PrepareLoad(1, 1, 7, 0, 16, nil)
	if err != nil || extents[0].Region != 1 {
		t.Fatal(extents, err)
	}
	// Whoever comes now gets the new places.
	if n, err := e.Lookup(1, 8, 0, h); n != 32 || err != nil {
		t.Fatal(n, err)
	}
	again, extents, err := e.PrepareLoad(1, 1, 8, 0, 32, nil)
	if err != nil || slices.ContainsFunc(extents, func(x Extent) bool { return x.Region != 2 }) {
		t.Fatal(extents, err)
	}
	if err := errors.Join(e.Check(), e.Release(1, load, nil), e.Check()); err != nil {
		t.Fatal(err)
	}
	if st, _ := e.Region(1); st.Free != 40 {
		t.Fatalf("%+v", st)
	}
	if err := e.RemoveRegion(1); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(e.Release(1, again, nil), e.Check()); err != nil {
		t.Fatal(err)
	}
	// Room is made from the end of the prefix, not from its beginning.
	moveStore(t, e, 0, nil, numbered(2, 4*36))
	for n := 8; n > 4; n-- {
		held := make([]uint16, 8)
		if err := e.Contains(1, 0, h, held); err != nil || held[n-5] != 4 || held[4] != 0 {
			t.Fatal(held, err)
		}
	}
	if st := e.Stats(); st.Moved != 8 || st.Evictions != 4 {
		t.Fatalf("%+v", st)
	}
}

// TestDrained: a drained region gets nothing new and keeps what it has, whatever is wanted
// elsewhere; undrained, it is as before.
func TestDrained(t *testing.T) {
	t.Parallel()
	g := tiers.Geometry{PageBytes: 16, PagesPerChunk: 1, PageTokens: 1, DigestBytes: 32}
	e, sp := newMoveRig(t, g, 10)
	old := numbered(1, 10)
	moveStore(t, e, 0, nil, old)
	if err := e.Drain(1); err != nil {
		t.Fatal(err)
	}
	held := make([]uint16, 10)
	for i := range uint64(30) {
		for _, gr := range moveStore(t, e, 0, nil, numbered(10+i, 1)) {
			if gr.Region != 2 {
				t.Fatalf("%+v", gr)
			}
		}
		if err := e.Contains(sp, 0, old, held); err != nil || slices.Contains(held, 0) {
			t.Fatal(i, held, err)
		}
	}
	if _, _, _, err := e.NextMoves(1, 0, 1, false, nil, nil); !errors.Is(err, tiers.ErrBusy) {
		t.Fatalf("moves without room: %v", err)
	}
	if slots, free := e.Room(g); slots != 10 || free != 0 {
		t.Fatal(slots, free)
	}
	if err := errors.Join(e.Check(), e.Undrain(1), e.Undrain(1), e.Check()); err != nil {
		t.Fatal(err)
	}
	moveStore(t, e, 0, nil, numbered(100, 5))
	if err := e.Contains(sp, 0, old, held); err != nil || held[4] != 1 || held[5] != 0 {
		t.Fatal(held, err) // the oldest
	}
	if err := errors.Join(e.Drain(1), e.Check()); err != nil {
		t.Fatal(err)
	}
	if err := e.Drain(2); err != nil { // what is drained can be leased as before
		t.Fatal(err)
	}
	if n, err := e.Lookup(1, 1, 0, old); n != 5 || err != nil {
		t.Fatal(n, err)
	}
	if err := errors.Join(e.Cancel(1, 1), e.Undrain(1), e.Undrain(2)); err != nil {
		t.Fatal(err)
	}
	if err := e.Drain(5); !errors.Is(err, tiers.ErrNotFound) {
		t.Fatal(err)
	}
}

// TestMoveMeanwhile: whatever happens to a chunk while it is copied, nothing is found that should
// not be, and nothing is lost that should not be.
func TestMoveMeanwhile(t *testing.T) {
	t.Parallel()
	g := tiers.Geometry{PageBytes: 16, PagesPerChunk: 4, PageTokens: 1, DigestBytes: 32}
	h := numbered(1, 8)
	half := h[:6*32]
	for name, c := range map[string]struct {
		do    func(t *testing.T, e *Engine, sp SpaceID)
		moved bool // the second chunk, of two pages
		held  int  // pages
	}{
		"nothing": {func(*testing.T, *Engine, SpaceID) {}, true, 6},
		"cleared": {func(_ *testing.T, e *Engine, sp SpaceID) { e.ClearSpace(sp) }, false, 0},
		"dropped": {func(_ *testing.T, e *Engine, sp SpaceID) {
			_,
				_ = e.Drop(sp, 4, h[4*32:6*32])
		}, false, 4},
		"replaced": {func(t *testing.T, e *Engine, _ SpaceID) { moveStore(t, e, 0, nil, h) }, false,
			8},
		"removed": {func(t *testing.T, e *Engine, _ SpaceID) {
			if err := e.RemoveRegion(1); !errors.Is(err, tiers.ErrBusy) {
				t.Error(err)
			}
		}, false, 0},
		"target removed": {func(t *testing.T, e *Engine, _ SpaceID) {
			if err := e.RemoveRegion(2); !errors.Is(err, tiers.ErrBusy) {
				t.Error(err)
			}
		}, false, 6},
		"target drained": {func(t *testing.T, e *Engine, _ SpaceID) {
			if err := e.Drain(2); err != nil {
				t.Error(err)
			}
		}, true, 6},
		"undrained": {func(t *testing.T, e *Engine, _ SpaceID) {
			if err := e.Undrain(1); err != nil {
				t.Error(err)
			}
		}, true, 6},
		"leased": {func(t *testing.T, e *Engine, _ SpaceID) {
			if n, err := e.Lookup(1, 1, 0, half); n != 6 || err != nil {
				t.Error(n, err)
			}
		}, true, 6},
		"continued": {func(t *testing.T, e *Engine, _ SpaceID) {
			moveStore(t, e, 0, nil, append(slices.Clone(h[:4*32]), numbered(2, 4)...))
		}, true, 6},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e, sp := newMoveRig(t, g, 20)
			moveStore(t, e, 0, nil, half)
			if err := e.Drain(1); err != nil {
				t.Fatal(err)
			}
			moves, next, _, err := e.NextMoves(1, 0, 5, false, nil, nil)
			if err != nil || len(moves) != 2 || next != -1 ||
				!bytes.Equal(moves[1].Hashes, h[4*32:6*32]) ||
				!bytes.Equal(moves[1].Prev, h[3*32:4*32]) || len(moves[0].Prev) != 0 {
				t.Fatal(moves, next, err)
			}
			if again, _, _, err := e.NextMoves(1, 0, 5, true, nil, nil); len(again) != 0 ||
				err != nil {
				t.Fatal("moved twice at once: ", again, err)
			}
			c.do(t, e, sp)
			if err := e.Check(); err != nil {
				t.Fatal(err)
			}
			for i, m := range moves {
				if moved := e.EndMove(m.Handle, MoveDone); i == 1 && moved != c.moved {
					t.Errorf("the second chunk moved: %v", moved)
				}
				if err := e.Check(); err != nil {
					t.Fatal(err)
				}
			}
			held := make([]uint16, 2)
			if err := e.Contains(sp, 0, h, held); err != nil || int(held[0]+held[1]) != c.held {
				t.Errorf("%v held, want %d pages; %v", held, c.held, err)
			}
			e.RemoveOwner(1)
			st := e.Stats()
			if st.Leases != 0 || st.FillingSlots != 0 || st.LeasedSlots != 0 {
				t.Errorf("%+v", st)
			}
			if r, ok := e.Region(1); ok && c.moved && r.Free != r.Slots {
				t.Errorf("%+v", r)
			}
		})
	}
}

// TestMoveKeepsWhatTiersHave: the queues and what was written to the tiers below go over.
func TestMoveKeepsWhatTiersHave(t *testing.T) {
	t.Parallel()
	g := tiers.Geometry{PageBytes: 16, PagesPerChunk: 1, PageTokens: 1, DigestBytes: 32}
	e, _ := newMoveRig(t, g, 20, TierAdmission{Admit: AdmitStored})
	moveStore(t, e, 0, nil, numbered(1, 6))
	items, _ := e.NextCascades(0, 2, nil, nil)
	if len(items) != 2 {
		t.Fatal(items)
	}
	for _, c := range items {
		e.EndCascade(c.Handle, true)
	}
	if err := e.Drain(1); err != nil {
		t.Fatal(err)
	}
	if n := moveAll(t, e, 1, false); n != 6 {
		t.Fatal(n)
	}
	items, _ = e.NextCascades(0, 10, nil, nil)
	if len(items) != 4 {
		t.Fatalf("%d chunks wait to be written, want 4", len(items))
	}
	for _, c := range items {
		if c.Region != 2 {
			t.Fatalf("%+v", c)
		}
		e.EndCascade(c.Handle, true)
	}
	if _, shed := e.CascadeQueue(0); shed != 0 {
		t.Fatalf("%d shed", shed)
	}
}

// TestMoveManyContinuations: a chunk with more of them than a slice of the lock takes along keeps
// them all.
func TestMoveManyContinuations(t *testing.T) {
	t.Parallel()
	g := tiers.Geometry{PageBytes: 16, PagesPerChunk: 1, PageTokens: 1, DigestBytes: 32}
	const many = 3*clearSlice + 5
	e, _ := newMoveRig(t, g, many+1)
	root := numbered(1, 1)
	moveStore(t, e, 0, nil, root)
	for i := range uint64(many) {
		moveStore(t, e, 1, root, numbered(100+i, 1))
	}
	if err := e.Drain(1); err != nil {
		t.Fatal(err)
	}
	if n := moveAll(t, e, 1, false); n != many+1 {
		t.Fatalf("%d moved", n)
	}
	if err := errors.Join(e.Check(), e.RemoveRegion(1), e.Check()); err != nil {
		t.Fatal(err)
	}
	for i := range uint64(many) { // each costs a continuation, and none the root
		moveStore(t, e, 0, nil, numbered(1<<20+i, 1))
		if held := make([]uint16, 1); e.Contains(1, 0, root, held) != nil || held[0] != 1 {
			t.Fatalf("after %d stores the root is gone", i)
		}
	}
}

// TestClearWhileMoving: what is on its way to a region that the clearing of its space has been to
// already is cleared nonetheless.
func TestClearWhileMoving(t *testing.T) {
	t.Parallel()
	g := tiers.Geometry{PageBytes: 16, PagesPerChunk: 1, PageTokens: 1, DigestBytes: 32}
	const slots = 32 * clearSlice
	for range 5 {
		e, sp := newMoveRig(t, g, slots)
		if err := e.Drain(1); err != nil {
			t.Fatal(err)
		}
		for i := range uint64(slots / 4096) {
			moveStore(t, e, 0, nil, numbered(i, 4096))
		}
		if err := errors.Join(e.Undrain(1), e.Drain(2)); err != nil {
			t.Fatal(err)
		}
		started, stop := make(chan struct{}), make(chan struct{})
		var mover sync.WaitGroup
		var once sync.Once
		mover.Go(func() {
			var moves []Move
			var buf []byte
			for from := 0; ; {
				select {
				case <-stop:
					return
				default:
				}
				var err error
				if moves, from, buf, err = e.NextMoves(2, max(from, 0), 8, true, buf,
					moves[:0]); err != nil {
					t.Error(err)
					return
				}
				for i, m := range moves {
					if i == 4 {
						once.Do(func() { close(started) })
					}
					e.EndMove(m.Handle, MoveDone)
				}
			}
		})
		<-started
		e.ClearSpace(sp)
		if st := e.Stats(); st.Pages != 0 {
			t.Errorf("%d pages are there after the space was cleared, %d chunks had moved",
				st.Pages, st.Moved)
		}
		close(stop)
		mover.Wait()
	}
}

// BenchmarkMove is what a move takes of the lock.
func BenchmarkMove(b *testing.B) {
	g := tiers.Geometry{PageBytes: 16, PagesPerChunk: 16, PageTokens: 1, DigestBytes: 32}
	e, err := New(Config{MaxPages: 1 << 16, MinPageBytes: 1, OwnerShare: 1})
	if err != nil {
		b.Fatal(err)
	}
	defer e.Close()
	const slots = 4096
	if err := errors.Join(e.AddCarvedRegion(1, g, slots, packed(g)), e.AddCarvedRegion(2, g, slots,
		packed(g))); err != nil {
		b.Fatal(err)
	}
	sp, _ := e.OpenSpace(tiers.FingerprintOf([]byte("bench")), g)
	if err := e.AddOwner(1, sp); err != nil {
		b.Fatal(err)
	}
	for i := range slots / 8 {
		res, _, err := e.PrepareStore(1, 0, nil, numbered(uint64(i), 8*16), nil)
		if err == nil {
			err = e.CommitStore(1, res.Store, nil)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
	from, region := 0, uint32(1)
	var moves []Move
	var buf []byte
	if err := e.Drain(region); err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for n := 0; n < b.N; {
		if from < 0 {
			b.StopTimer()
			if err := errors.Join(e.Undrain(region), e.Drain(3-region)); err != nil {
				b.Fatal(err)
			}
			from, region = 0, 3-region
			b.StartTimer()
		}
		moves, from, buf, err = e.NextMoves(region, from, 8, false, buf, moves[:0])
		if err != nil {
			b.Fatal(err)
		}
		for _, m := range moves {
			e.EndMove(m.Handle, MoveDone)
			n++
		}
	}
}
