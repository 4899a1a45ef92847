package engine

import (
	"maps"
	"slices"
	"testing"
	"time"

	"lookaside/tiers"
)

// The part of the random histories that is about another process that goes on: an engine restores
// what is kept, and takes over what the owners hold. The history goes on with it.

// takeOver now and then has another engine go on.
func (w *world) takeOver() {
	m := &w.mirror
	if m.rng.IntN(150) > 0 {
		return
	}
	w.endErrands()
	if m.rng.IntN(3) > 0 {
		w.keepAll()
	}
	h := w.e.Export()
	if h.Stores+h.Foreign > 0 {
		w.fatal("nothing is stored, and no peer's slot is read: %+v", h)
	}
	w.checkExport(&h)
	old, pieces := w.e, m.pieces
	w.endFollow()
	w.followers.all = nil
	areas := map[uint32]bool{}
	for _, a := range old.areas {
		areas[a.id] = true
	}
	type keptSlot struct {
		x keptChunk
		r Restored
	}
	kept := map[uint32][]keptSlot{} // by old piece
	for num, p := range pieces {
		for _, slot := range slices.Sorted(maps.Keys(p.kept)) {
			x := p.kept[slot]
			_, s := old.slot(num<<recordBits | slot)
			kept[num] = append(kept[num], keptSlot{x, Restored{Slot: slot, First: x.first,
				Pages: len(x.hashes) / x.space.g.DigestBytes, Prev: x.prev, Hashes: x.hashes,
				Order: s.stamp, Unverified: s.unverified() || m.rng.IntN(4) == 0}})
		}
	}
	old.Close()

	// The other engine: the same regions, pieces and chunks.
	m.pieces, m.writes, m.place, m.awake = map[uint32]*mirrorPiece{}, nil, PatrolPlace{}, false
	w.patrols, w.patrolPlace, w.awake = nil, PatrolPlace{}, [modelTiers]bool{}
	w.drained, w.going = map[uint32]bool{}, map[uint32]bool{}
	if m := &w.peers; m.loans != nil {
		m.loans, m.rung, m.due = map[uint64]*modelLoan{}, false, false
		m.last++
		m.mem[uint32(peerRegions+m.last)] = []byte{}
	}
	w.start(old.cfg)
	w.e.leases.endSlice, w.e.tagMask = old.leases.endSlice, old.tagMask
	w.e.journal.words = old.journal.words
	for _, s := range w.spaces {
		_, err := w.e.RecoverSpace(s.fp, s.g)
		w.check(err)
		s.id, err = w.e.OpenSpace(s.fp, s.g)
		w.check(err)
	}
	for _, id := range regionIDs(w.arena) {
		if areas[id] {
			w.check(w.e.AddDrainedRegion(id, int64(len(w.arena[id]))))
			w.drained[id] = true
		}
	}
	for _, num := range slices.Sorted(maps.Keys(pieces)) {
		p := pieces[num].p
		id := p.Region
		m.carving = id
		restore := func(all []Restored) error { return w.e.Restore(id, all) }
		if areas[id] {
			now, err := w.e.RestorePiece(p)
			w.check(err)
			p.Num = now
			restore = func(all []Restored) error { return w.e.RestoreIn(now, all) }
		} else {
			g := p.Geometry
			g.PageTokens = 16
			w.check(w.e.AddCarvedRegion(id, g, p.Slots, p.Placement))
			w.check(w.e.Drain(id))
			w.drained[id] = true
			p.Num = 0
		}
		var all []Restored
		for _, k := range kept[num] {
			k.r.Space = k.x.space.id
			all = append(all, k.r)
			m.restored(w, p, k.x.space, k.r)
		}
		w.check(restore(all))
	}
	m.carving = 0
	w.e.EndRestore()
	m.check(w, true)

	w.importAll(&h)
	w.check(w.e.Check())
	m.check(w, true)
	for _, id := range regionIDs(w.arena) {
		if m.rng.IntN(4) > 0 {
			w.check(w.e.Undrain(id))
			delete(w.drained, id)
		}
	}
	w.bad = true // not all is there
}

// endErrands ends what is not handed over.
func (w *world) endErrands() {
	for _, s := range w.sessions {
		for h := range s.stores {
			w.check(w.e.AbortStore(s.owner, h))
			w.ended = append(w.ended, h)
		}
		clear(s.stores)
		for h, l := range s.loads {
			if slices.ContainsFunc(l.extents, func(x Extent) bool {
				return x.Region >= peerRegions
			}) {
				if w.e.Export().Foreign == 0 {
					w.fatal("a load of what peers lent is not counted")
				}
				w.check(w.e.Release(s.owner, h, nil))
				delete(s.loads, h)
				w.ended = append(w.ended, h)
			}
		}
	}
	for len(w.flights) > 0 {
		w.finishPromotion()
	}
	for len(w.cascades) > 0 {
		w.endCascade()
	}
	for len(w.moves) > 0 {
		w.endMove()
	}
	for len(w.peers.copies) > 0 {
		w.endCopy()
	}
	w.checks = nil
	slices.Sort(w.ended)
}

// checkExport compares what is handed over with what the sessions hold. Lookups that wait are not,
// and end.
func (w *world) checkExport(h *Handover) {
	owners := map[Owner]*Holding{}
	for i := range h.Owners {
		owners[h.Owners[i].Owner] = &h.Owners[i]
	}
	waiting := 0
	for _, s := range w.sessions {
		x := owners[s.owner]
		if x == nil || x.Space != s.space.fp || len(x.Loads) != len(s.loads) ||
			max(1, x.Takers) != s.takers {
			w.fatal("owner %d is handed over as %+v", s.owner, x)
		}
		for _, l := range x.Loads {
			if s.loads[l.Load] == nil || len(s.loads[l.Load].extents) != len(l.Slots) {
				w.fatal("%+v is handed over, and is %+v", l, s.loads[l.Load])
			}
		}
		for _, l := range x.Lookups {
			is := s.lookups[l.Lookup]
			if is == nil || len(is.waits) > 0 || is.first != l.First || is.n < l.Pages ||
				is.deadline != w.now+int64(l.Left) || max(1, l.Takers) != s.takers-is.loads {
				w.fatal("%+v is handed over, and is %+v", l, is)
			}
		}
		for id, l := range s.lookups {
			if len(l.waits) > 0 {
				waiting++
				delete(s.lookups, id)
			}
		}
	}
	if waiting != h.Waiting || len(h.Pins) > len(w.pins) {
		w.fatal("%d lookups wait, %d are pinned; said are %d and %d", waiting, len(w.pins),
			h.Waiting, len(h.Pins))
	}
}

// importAll takes over what was handed over.
func (w *world) importAll(h *Handover) {
	m := &w.mirror
	w.check(w.e.BeginImport(h))
	for pin := range w.pins {
		if w.e.leases.imported[pin] == nil {
			delete(w.pins, pin)
		}
	}
	for _, s := range w.sessions {
		w.check(w.e.AddOwner(s.owner, s.space.id))
		if s.takers > 1 {
			w.check(w.e.SetTakers(s.owner, s.takers))
		}
	}
	for i := range h.Owners {
		x := &h.Owners[i]
		w.check(w.e.Import(x.Owner, x))
		if err := w.e.Import(x.Owner, x); err == nil && len(x.Loads) > 0 {
			w.fatal("%+v is taken over twice", x)
		}
		m.taken += uint64(len(x.Loads))
	}
	for _, s := range w.sessions {
		ow := w.e.owners[s.owner]
		for id, l := range s.lookups {
			x := ow.lookups[id]
			if x == nil {
				delete(s.lookups, id)
				m.cut++
				continue
			}
			if x.first != l.first || x.n > l.n || x.lookup.deadline != l.deadline {
				w.fatal("%+v is taken over as %+v", l, x)
			}
			if x.n < l.n {
				m.cut++
			}
			l.n = x.n
			m.taken++
		}
		for handle := range s.loads {
			x, err := w.e.leases.find(ow, loadLease, handle)
			w.check(err)
			for _, ref := range x.slots {
				if _, s := w.e.slot(ref); s.doomed() {
					m.blocked++
				}
			}
		}
	}
}

// TestTakeOver: what is read keeps its slots, wherever they are and whatever has become of their
// chunks; lookups end before what is not there; handles stay as they were.
func TestTakeOver(t *testing.T) {
	a := newBench(t, 12, 4, Config{LeaseDeadline: 10 * time.Second})
	h := numbered(1, 12)
	a.store(h)
	n, err := a.e.Lookup(me, 1, 0, h)
	a.ok(err)
	load, extents, err := a.e.PrepareLoad(me, me, 1, 2, 8, nil) // three chunks
	a.ok(err)
	ended, _, err := a.e.PrepareLoad(me, me, 1, 0, 1, nil)
	a.is(err, tiers.ErrNotFound)
	if n != 12 || ended != 0 {
		t.Fatal(n, ended)
	}
	n, err = a.e.Lookup(me, 5, 0, h)
	a.ok(err)
	pin, _, err := a.e.Pin(a.sp, h[:4*32])
	a.ok(err)
	a.now += int64(4 * time.Second)
	if _, err := a.e.Drop(a.sp, 8, h[8*32:9*32]); err != nil || n != 12 {
		t.Fatal(err)
	}
	held := dumpPieces(a.e)
	out := a.e.Export()
	if len(out.Owners) != 1 || len(out.Pins) != 1 || out.Stores+out.Waiting+out.Foreign != 0 {
		t.Fatalf("%+v", out)
	}
	mine := &out.Owners[0]
	if len(mine.Lookups) != 1 || mine.Lookups[0].Pages != 8 ||
		mine.Lookups[0].Left != 6*time.Second || len(mine.Loads) != 1 ||
		len(mine.Loads[0].Slots) != 3 || mine.Loads[0].Load != load {
		t.Fatalf("%+v", mine)
	}
	pieces := []Piece{}
	for _, s := range a.e.areas[0].spans {
		if s.r != nil {
			pieces = append(pieces, s.r.piece())
		}
	}

	now := int64(0)
	other := numbered(77, 12) // what lies where a chunk is that is lost
	start := func(lose int) *bench {
		t.Helper()
		b := &bench{t: t}
		b.e, err = New(Config{Now: func() int64 { return now }, LeaseDeadline: 10 * time.Second,
			MinPageBytes: 1, OwnerShare: 0.01, Policy: "lru", MaxLookupsPerOwner: 1})
		b.ok(err)
		t.Cleanup(b.e.Close)
		b.ok(b.e.AddDrainedRegion(7, 12*256))
		g := pieces[0].Geometry
		g.PageTokens = 16
		b.sp, err = b.e.OpenSpace(tiers.Fingerprint{1}, g)
		b.ok(err)
		for _, p := range pieces {
			num, err := b.e.RestorePiece(p)
			b.ok(err)
			for _, x := range held[p.Num] {
				if x.Pages == 0 {
					continue
				}
				if x.First/4 == lose%10 {
					if lose < 10 {
						continue
					}
					x.Hashes = other[x.First*32 : (x.First+4)*32]
				}
				x.Space = b.sp
				b.ok(b.e.RestoreIn(num, []Restored{x}))
			}
		}
		b.e.EndRestore()
		return b
	}
	for lose, want := range map[int]int{-1: 8, 0: 0, 1: 4, 10: 0, 11: 4} {
		b := start(lose)
		b.ok(b.e.BeginImport(&out))
		b.ok(b.e.AddOwner(me, b.sp))
		b.ok(b.e.Import(me, mine))
		b.ok(b.e.Undrain(7))
		b.ok(b.e.Check())
		st := b.e.Stats()
		if st.OpenLoads != 1 || st.LeasedSlots != 3 || st.OpenLookups != b2i(want > 0) {
			t.Fatalf("without chunk %d: %+v", lose, st)
		}
		if got := b.e.Unpin(pin); (got == nil) != (lose%10 != 0) {
			t.Fatalf("without chunk %d: the pin ends: %v", lose, got)
		}
		b.ok(b.e.AddOwner(2, b.sp))
		b.e.cfg.OwnerShare = 1
		b.e.mu.Lock()
		b.e.relimit()
		b.e.mu.Unlock()
		for i := range uint64(30) { // more than fits
			res, grants, err := b.e.PrepareStore(2, 0, nil, numbered(10+i, 4), nil)
			b.ok(err)
			for _, g := range grants {
				for _, x := range extents {
					if from := x.Offset / 256; g.Offset/256 == from {
						t.Fatalf("without chunk %d: %+v is granted while %+v is read", lose, g, x)
					}
				}
			}
			if res.Store != 0 {
				b.ok(b.e.CommitStore(2, res.Store, nil))
			}
		}
		if want > 0 {
			second, more, err := b.e.PrepareLoad(me, me, 5, 0, want, nil)
			b.is(err, tiers.ErrBusy) // as many loads as there may be
			b.ok(b.e.Release(me, load, nil))
			second, more, err = b.e.PrepareLoad(me, me, 5, 0, want, nil)
			b.ok(err)
			if second>>32 <= uint64(out.Uses) || more[0].Offset/256 != extents[0].Offset/256 {
				t.Fatalf("load %#x of %+v", second, more)
			}
			b.ok(b.e.Release(me, second, nil))
		} else {
			b.ok(b.e.Release(me, load, nil))
		}
		b.is(b.e.Release(me, load, nil), tiers.ErrStale)
		if st := b.e.Stats(); st.Leases != 0 || st.LeasedSlots != 0 {
			t.Fatalf("without chunk %d: %+v", lose, st)
		}
		b.ok(b.e.Check())
	}

	// The deadline goes on.
	b := start(-1)
	b.ok(b.e.BeginImport(&out))
	b.ok(b.e.AddOwner(me, b.sp))
	b.ok(b.e.Import(me, mine))
	now += int64(5 * time.Second)
	if n := b.e.Expire(); n != 0 {
		t.Fatal("too early")
	}
	if again := b.e.Export(); again.Owners[0].Lookups[0].Left != time.Second ||
		again.Owners[0].Loads[0].Load != load || again.Pins[0].Pin != pin || again.Uses < out.Uses {
		t.Fatalf("%+v", again)
	}
	now += int64(2 * time.Second)
	if n := b.e.Expire(); n != 1 {
		t.Fatal("too late")
	}

	// What no engine can have had is refused, and leaves nothing behind.
	for name, change := range map[string]func(h *Holding){
		"another space":    func(h *Holding) { h.Space[3]++ },
		"no slots":         func(h *Holding) { h.Loads[0].Slots = nil },
		"no digests":       func(h *Holding) { h.Lookups[0].Ends = nil },
		"no pages":         func(h *Holding) { h.Lookups[0].Pages = 0 },
		"a negative page":  func(h *Holding) { h.Loads[0].First = -4 },
		"no handle":        func(h *Holding) { h.Loads[0].Load = 0 },
		"a handle to come": func(h *Holding) { h.Loads[0].Load += uint64(out.Uses) << 32 },
		"the same handle":  func(h *Holding) { h.Loads = append(h.Loads, h.Loads[0]) },
		"the same lookup":  func(h *Holding) { h.Lookups = append(h.Lookups, h.Lookups[0]) },
		"no such region":   func(h *Holding) { h.Loads[0].Slots[1].Region++ },
		"between slots":    func(h *Holding) { h.Loads[0].Slots[1].Offset++ },
		"far away":         func(h *Holding) { h.Loads[0].Slots[1].Offset = 1<<64 - 1 },
	} {
		b := start(-1)
		b.ok(b.e.BeginImport(&out))
		b.ok(b.e.AddOwner(me, b.sp))
		bad := *mine
		bad.Loads, bad.Lookups = slices.Clone(mine.Loads), slices.Clone(mine.Lookups)
		bad.Loads[0].Slots = slices.Clone(mine.Loads[0].Slots)
		change(&bad)
		if err := b.e.Import(me, &bad); err == nil {
			t.Errorf("%s: no error", name)
		}
		b.ok(b.e.Check())
		b.e.RemoveOwner(me)
		b.ok(b.e.Unpin(pin))
		if st := b.e.Stats(); st.Leases != 0 || st.LeasedSlots != 0 {
			t.Errorf("%s: %+v", name, st)
		}
		b.ok(b.e.Check())
	}
}
