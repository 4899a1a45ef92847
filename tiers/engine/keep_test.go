package engine

import (
	"bytes"
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/tenant"
)

// The part of the random histories that is about what is written down for the next process.

// mirror is a directory of the arena: at any time the next process could begin with what it has. It
// has randomness of its own, so that the other histories do not depend on it.
type mirror struct {
	rng    *rand.Rand
	pieces map[uint32]*mirrorPiece
	writes []mirrorWrite // that keepers are at, each at a slot of its own
	place  PatrolPlace
	awake  bool // Wake was called

	carving uint32 // the drained region of which pieces may come

	published, refused, restarted uint64
	taken, cut, blocked, written  uint64 // see takeOver
}

type mirrorPiece struct {
	p    Piece
	kept map[uint32]keptChunk // by slot
}

type mirrorWrite struct {
	v Verification
	p *mirrorPiece
}

type keptChunk struct {
	space  *modelSpace
	first  int
	prev   []byte
	hashes []byte
	who    tenant.ID
	// it was restored and may be bad: unless it is unverified, its bytes are good
	unsure bool
}

func (w *world) startMirror(c *Config) {
	m := &w.mirror
	m.rng = rand.New(rand.NewPCG(w.seed, 5))
	m.pieces = map[uint32]*mirrorPiece{}
	c.Keep = m.rng.IntN(4) > 0
	c.OnCarve = func(p Piece) {
		if m.pieces[p.Num] != nil || p.Num < 1 || p.Num > MaxPieces || w.drained[p.Region] &&
			m.carving != p.Region || w.arena[p.Region] == nil || p.Slots < 1 || p.Offset+
			p.Stride*int64(p.Slots-1)+p.Geometry.PageBytes*int64(p.Geometry.PagesPerChunk) >
			int64(len(w.arena[p.Region])) {
			w.fatal("there comes %+v", p)
		}
		for _, other := range m.pieces {
			if q := other.p; q.Region == p.Region && p.Offset < q.Offset+q.Stride*int64(q.Slots) &&
				q.Offset < p.Offset+p.Stride*int64(p.Slots) {
				w.fatal("there comes %+v, where %+v is", p, q)
			}
		}
		m.pieces[p.Num] = &mirrorPiece{p, map[uint32]keptChunk{}}
	}
	c.OnUncarve = func(num uint32) {
		p := m.pieces[num]
		if p == nil || len(p.kept) > 0 || w.drained[p.p.Region] {
			w.fatal("piece %d goes, which is %+v", num, p)
		}
		delete(m.pieces, num)
	}
	c.OnGone = func(region, num, slot uint32) {
		p := m.pieces[num]
		if p == nil || p.p.Region != region || int(slot) >= p.p.Slots {
			w.fatal("slot %d of piece %d of region %d is gone", slot, num, region)
		}
		delete(p.kept, slot)
		w.gone++
	}
}

// has reports whether a region has pieces.
func (m *mirror) has(region uint32) bool {
	for _, p := range m.pieces {
		if p.p.Region == region {
			return true
		}
	}
	return false
}

// restored notes a chunk that was kept by another run. Its piece is the only one of its region if
// it has no number.
func (m *mirror) restored(w *world, in Piece, s *modelSpace, x Restored) {
	for num, p := range m.pieces {
		if num == in.Num || in.Num == 0 && p.p.Region == in.Region {
			p.kept[x.Slot] = keptChunk{s, x.First, x.Prev, x.Hashes, x.Tenant, x.Unverified}
			return
		}
	}
	w.fatal("%+v is in no piece", x)
}

// granted forgets what was kept of slots of a region that is not drained and was stored to while it
// was being restored. A directory drains its regions.
func (m *mirror) granted(w *world, region uint32) {
	if r := w.e.byID[region]; r != nil {
		maps.DeleteFunc(m.pieces[r.num].kept, func(slot uint32, _ keptChunk) bool {
			return r.slots[slot].state != free
		})
	}
}

// keepSome has keepers write some chunks down. A chunk may be gone by then.
func (w *world) keepSome() {
	m := &w.mirror
	if m.rng.IntN(3) == 0 {
		w.beginKeep(m.rng.IntN(4) == 0)
	}
	if len(m.writes) > 0 && m.rng.IntN(3) == 0 {
		w.endKeep(m.rng.IntN(len(m.writes)))
	}
	m.check(w, w.seed%4 == 0 || m.rng.IntN(20) == 0)
}

// beginKeep takes the next chunk to write down. It returns false if there is none.
func (w *world) beginKeep(walk bool) bool {
	m := &w.mirror
	v, _, ok := Verification{}, []byte(nil), false
	if walk {
		v, _, ok = w.e.NextPatrol(&m.place, nil)
	} else {
		waiting := w.e.unkept.n > 0
		if waiting && !m.awake {
			w.fatal("chunks wait to be written down, and nobody was told")
		}
		if v, _, ok = w.e.NextUnkept(nil); !ok {
			m.awake = false
		}
	}
	if !ok {
		return false
	}
	if i := slices.IndexFunc(m.writes, func(x mirrorWrite) bool {
		return x.v.Piece == v.Piece && x.v.Slot == v.Slot
	}); i >= 0 {
		w.endKeep(i)
	}
	m.writes = append(m.writes, mirrorWrite{v, m.pieces[v.Piece]})
	return true
}

// endKeep ends the writing of the i-th chunk.
func (w *world) endKeep(i int) {
	m := &w.mirror
	v, p := m.writes[i].v, m.writes[i].p
	m.writes = slices.Delete(m.writes, i, i+1)
	delete(p.kept, v.Slot) // the entry is written over; nobody reads that of a piece that is gone
	ref, s := w.e.verifying(v.Handle)
	want := s != nil && !s.unverified()
	done := w.e.Publish(v.Handle, v.Pages, func() {
		x := keptChunk{first: v.First, prev: v.Prev, hashes: v.Hashes, who: v.Tenant}
		for _, s := range w.spaces {
			if s.id == v.Space {
				x.space = s
			}
		}
		if m.pieces[v.Piece] != p || p.p.Region != v.Region ||
			v.Offset != uint64(p.p.Offset+int64(v.Slot)*p.p.Stride) {
			w.fatal("%+v is in piece %+v", v, p)
		}
		p.kept[v.Slot] = x
	})
	if done != want || done && ref&recordMask != v.Slot {
		w.fatal("%+v is published: %v", v, done)
	}
	if w.e.Publish(v.Handle, w.e.cfg.MaxPages+1, func() {}) ||
		w.e.Publish(v.Handle+1<<62, v.Pages, func() {}) || w.e.Publish(v.Handle, 0, func() {}) {
		w.fatal("more than there is of %+v is published", v)
	}
	if done {
		m.published++
	} else {
		m.refused++
	}
}

// check compares what is kept with what the engine and the arena have: all of it, or a part.
func (m *mirror) check(w *world, all bool) {
	left := 30
	for _, num := range slices.Sorted(maps.Keys(m.pieces)) {
		r, p := w.e.regions[num], m.pieces[num]
		if got := r.piece(); got != p.p {
			w.fatal("piece %+v is told as %+v", got, p.p)
		}
		for _, slot := range slices.Sorted(maps.Keys(p.kept)) {
			x := p.kept[slot]
			if left--; left < 0 && !all {
				return
			}
			m.checkSlot(w, p, slot, &x)
		}
	}
	if all {
		m.checkAll(w)
	}
}

// checkAll verifies that all pieces are known, and that all that is held is kept or will be.
func (m *mirror) checkAll(w *world) {
	coming := map[uint64]bool{} // handles
	for i := range w.e.unkept.n {
		coming[w.e.unkept.ring[(w.e.unkept.head+i)%len(w.e.unkept.ring)]] = true
	}
	pages := map[uint64]int{}
	for _, x := range m.writes {
		pages[x.v.Handle] = x.v.Pages
	}
	pieces := 0
	for _, r := range w.e.regions[1 : w.e.nregion+1] {
		if r.class == nil || r.foreign {
			continue
		}
		pieces++
		for i := range r.slots[:r.fresh] {
			s := &r.slots[i]
			if !w.e.cfg.Keep || s.state != ready || s.doomed() || s.unverified() {
				continue
			}
			h := verifyHandle(r.num<<recordBits|uint32(i), s)
			if x := m.pieces[r.num].kept[uint32(i)]; !coming[h] && pages[h] != int(s.pages) &&
				len(x.hashes) != int(s.pages)*8*r.words {
				w.fatal("slot %d of piece %d is %+v, and kept as %+v", i, r.num, s, x)
			}
		}
	}
	if pieces != len(m.pieces) {
		w.fatal("there are %d pieces, of which %d were told", pieces, len(m.pieces))
	}
}

func (m *mirror) checkSlot(w *world, p *mirrorPiece, slot uint32, x *keptChunk) {
	r := w.e.regions[p.p.Num]
	s, size := &r.slots[slot], x.space.g.DigestBytes
	pages := len(x.hashes) / size
	var buf [32]byte
	ok := int(slot) < r.fresh && s.state == ready && !s.doomed() && int(s.pages) >= pages &&
		SpaceID(s.space) == x.space.id && int(s.chunk)*r.ppc == x.first
	for pos := 0; ok && pos < pages; pos++ {
		d := x.hashes[pos*size : (pos+1)*size]
		ok = bytes.Equal(r.digestBytes(slot, pos, &buf), d) &&
			w.e.find(w.e.spaces[s.space], d) != 0
	}
	if !ok {
		w.fatal("slot %d of piece %d is kept as %+v, and is %+v", slot, p.p.Num, x, s)
	}
	if len(x.prev) > 0 && w.chain[string(x.hashes[:size])] != string(x.prev) {
		w.fatal("slot %d of piece %d is kept as %+v", slot, p.p.Num, x)
	}
	if x.unsure && s.unverified() {
		return
	}
	if !w.good(x.space, Extent{Region: p.p.Region, Offset: uint64(p.p.Offset +
		int64(slot)*p.p.Stride), Pages: uint32(pages)}, x.hashes) {
		w.fatal("slot %d of piece %d is kept as %+v, and its bytes are others", slot, p.p.Num, x)
	}
}

// restart compares the engine with one that begins with what is kept now, and, once all is kept,
// once more.
func (w *world) restart() {
	m := &w.mirror
	m.check(w, true)
	w.compareRestart(false)
	w.keepAll()
	w.compareRestart(true)
}

// keepAll has all that is held kept.
func (w *world) keepAll() {
	m := &w.mirror
	for w.beginKeep(false) {
	}
	for m.place = (PatrolPlace{}); w.beginKeep(true); {
	}
	for len(m.writes) > 0 {
		w.endKeep(0)
	}
	m.check(w, true)
}

// compareRestart has another engine begin with what is kept. whole says that it is all that is
// held: then it finds as much.
func (w *world) compareRestart(whole bool) {
	m := &w.mirror
	b, err := New(Config{Now: func() int64 { return w.now }, Seed: w.seed + 1, MaxSpaces: 4,
		MaxPages: 64, MinPageBytes: 1, OwnerShare: 1, FixedRegions: w.fixed != nil,
		NoExtend: w.fixed != nil, LeaseDeadline: time.Second})
	w.check(err)
	defer b.Close()
	ids := map[*modelSpace]SpaceID{}
	for _, s := range w.spaces {
		ids[s], err = b.RecoverSpace(s.fp, s.g)
		w.check(err)
	}
	areas := map[uint32]bool{}
	n := 0
	for _, num := range slices.Sorted(maps.Keys(m.pieces)) {
		p := m.pieces[num]
		var all []Restored
		for _, slot := range slices.Sorted(maps.Keys(p.kept)) {
			x := p.kept[slot]
			ref := num<<recordBits | slot
			_, s := w.e.slot(ref)
			all = append(all, Restored{Slot: slot, Space: ids[x.space], First: x.first,
				Pages: len(x.hashes) / x.space.g.DigestBytes, Prev: x.prev, Hashes: x.hashes,
				Order: s.stamp, Unverified: s.unverified()})
			n++
		}
		id := p.p.Region
		if w.e.areaOf(id) == nil {
			g := p.p.Geometry
			g.PageTokens = 16
			w.check(b.AddCarvedRegion(id, g, p.p.Slots, p.p.Placement))
			w.check(b.Restore(id, all))
			continue
		}
		if !areas[id] {
			w.check(b.AddDrainedRegion(id, int64(len(w.arena[id]))))
			areas[id] = true
		}
		num, err := b.RestorePiece(p.p)
		w.check(err)
		w.check(b.RestoreIn(num, all))
	}
	got := b.EndRestore()
	m.restarted += uint64(got)
	w.check(b.Check())
	if st := b.Stats(); got > n || st.ReadySlots != got-int(st.Replaced) {
		w.fatal("%d of %d kept chunks are restored: %+v", got, n, st)
	}
	for id := range areas {
		w.check(b.Undrain(id))
	}
	w.check(b.Check())
	for range 30 {
		s, p := w.spaces[m.rng.IntN(len(w.spaces))], make(prefix, 1+m.rng.IntN(w.depth))
		for i := range p {
			p[i] = byte(m.rng.IntN(w.alphabet))
		}
		h := p.digests(0, len(p), s.g.DigestBytes)
		was, is := make([]uint16, len(p)+1), make([]uint16, len(p)+1)
		w.check(w.e.Contains(s.id, 0, h, was))
		w.check(b.Contains(ids[s], 0, h, is))
		for i := range was {
			if is[i] > was[i] || whole && is[i] < was[i] {
				w.fatal("of %v there was %v, and is %v after a restart", p, was, is)
			}
		}
	}
}

// What waits to be written down is named once it is there, and with all of its pages; what is gone
// by then is neither named nor published.
func TestKeep(t *testing.T) {
	var woken int
	b := newBench(t, 6, 4, Config{Keep: true, Wake: func(work Work) {
		if work != WorkKeep {
			t.Errorf("woken for %d", work)
		}
		woken++
	}})
	next := func() Verification {
		t.Helper()
		v, _, ok := b.e.NextUnkept(nil)
		if !ok {
			t.Fatal("nothing is to be written down")
		}
		return v
	}
	none := func() {
		t.Helper()
		if v, _, ok := b.e.NextUnkept(nil); ok {
			t.Fatalf("%+v is to be written down", v)
		}
	}
	publish := func(v Verification, pages int, want bool) {
		t.Helper()
		called := false
		if got := b.e.Publish(v.Handle, pages, func() { called = true }); got != want ||
			called != want {
			t.Fatalf("published %v, called %v", got, called)
		}
	}
	none()
	h := numbered(1, 8)
	b.store(h[:32*6])
	first, second := next(), next()
	if woken != 1 || first.Pages != 4 || len(first.Prev) != 0 || second.Pages != 2 ||
		string(second.Prev) != string(h[3*32:4*32]) || second.First != 4 ||
		second.Offset == first.Offset || second.Region != first.Region {
		t.Fatalf("%d, %+v, %+v", woken, first, second)
	}
	publish(first, 4, true)
	publish(second, 3, false)
	b.store(h) // the second grows
	publish(second, 2, true)
	if grown := next(); grown.Handle != second.Handle || grown.Pages != 4 {
		t.Fatalf("%+v", grown)
	}
	none()
	if woken != 1 {
		t.Fatalf("woken %d times though the queue was not empty", woken)
	}
	b.store(numbered(2, 4))
	if woken != 2 {
		t.Fatalf("woken %d times", woken)
	}
	b.e.ClearSpace(b.sp)
	none()
	publish(first, 4, false)
	publish(Verification{}, 1, false)
	b.store(h)
	if v := next(); v.Offset == first.Offset && v.Handle == first.Handle {
		t.Fatalf("%+v has the handle of what was there before", v)
	}
}

// TestKeepersBesideTraffic: chunks are written down by several keepers while two geometries store
// more than fits, spaces are cleared and the region is drained and not. What is kept is held at the
// end of each call, as the callbacks are under the lock.
func TestKeepersBesideTraffic(t *testing.T) {
	type entry struct{ handle uint64 }
	kept := map[uint32]map[uint32]entry{} // by piece and slot; guarded by the engine's lock
	var published atomic.Int64
	e, err := New(Config{MinPageBytes: 1, OwnerShare: 1, Keep: true, ArenaLimitBytes: 200 * 256,
		OnCarve: func(p Piece) { kept[p.Num] = map[uint32]entry{} },
		OnUncarve: func(num uint32) {
			if len(kept[num]) > 0 {
				t.Errorf("piece %d goes with %d chunks", num, len(kept[num]))
			}
			delete(kept, num)
		},
		OnGone: func(_, piece, slot uint32) { delete(kept[piece], slot) },
	})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	if err := e.AddRegion(7, 200*256); err != nil {
		t.Fatal(err)
	}
	var stores, others sync.WaitGroup
	stop := make(chan struct{})
	running := func() bool {
		select {
		case <-stop:
			return false
		default:
			return true
		}
	}
	for i, g := range []tiers.Geometry{{PageBytes: 64, PagesPerChunk: 4}, {PageBytes: 96,
		PagesPerChunk: 2}} {
		g.DigestBytes, g.PageTokens = 16, 16
		sp, err := e.OpenSpace(tiers.Fingerprint{byte(i)}, g)
		if err == nil {
			err = e.AddOwner(Owner(i+1), sp)
		}
		if err != nil {
			t.Fatal(err)
		}
		stores.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(i), 1))
			for n := 0; n < 2000 || published.Load() == 0; n++ { // a keeper may come late
				h := treeHashes(rnd, 1+rnd.IntN(24))
				res, _, err := e.PrepareStore(Owner(i+1), 0, nil, h, nil)
				if err == nil && res.Store != 0 {
					err = e.CommitStore(Owner(i+1), res.Store, nil)
				}
				if err != nil {
					t.Error(err)
					return
				}
				if n%200 == 199 {
					e.ClearSpace(sp)
				}
			}
		})
	}
	for range 2 {
		others.Go(func() {
			var buf []byte
			var place PatrolPlace
			for running() {
				v, b, ok := e.NextUnkept(buf)
				if buf = b; !ok {
					if v, buf, ok = e.NextPatrol(&place, buf); !ok {
						continue
					}
				}
				e.Publish(v.Handle, v.Pages, func() {
					kept[v.Piece][v.Slot] = entry{v.Handle}
					published.Add(1)
				})
			}
		})
	}
	others.Go(func() {
		for running() {
			for _, f := range []func(uint32) error{e.Drain, e.Undrain} {
				for err := f(7); err != nil; err = f(7) {
					if !errors.Is(err, tiers.ErrBusy) {
						t.Error(err)
						return
					}
				}
			}
		}
	})
	stores.Wait()
	close(stop)
	others.Wait()
	if err := e.Check(); err != nil {
		t.Fatal(err)
	}
	for piece, slots := range kept {
		for slot, x := range slots {
			ref, s := e.verifying(x.handle)
			if s == nil || ref != piece<<recordBits|slot {
				t.Fatalf("slot %d of piece %d is kept and not held", slot, piece)
			}
		}
	}
	if published.Load() == 0 {
		t.Fatal("nothing was kept")
	}
	t.Logf("%d kept, %d evicted, %d pieces recarved", published.Load(), e.Stats().Evictions,
		e.Stats().Recarved)
}
