package engine

import (
	"bytes"
	"errors"
	"maps"
	"reflect"
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
	if m.rng.IntN(10) == 0 {
		w.writeLate()
	}
	if m.rng.IntN(150) > 0 {
		return
	}
	w.endErrands()
	if m.rng.IntN(3) > 0 {
		w.keepAll()
	}
	h, err := w.e.Export()
	w.check(err)
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
				Order: s.stamp, Unverified: s.unverified() || m.rng.IntN(4) == 0,
				Tenant: x.who}})
		}
	}
	old.Close()

	// The other engine: the same regions, pieces and chunks.
	m.pieces, m.writes, m.place, m.awake = map[uint32]*mirrorPiece{}, nil, PatrolPlace{}, false
	w.patrols, w.patrolPlace, w.awake = nil, PatrolPlace{}, [modelTiers]bool{}
	w.patrolSums = nil
	w.drained, w.going = map[uint32]bool{}, map[uint32]bool{}
	if m := &w.peers; m.loans != nil {
		m.loans, m.rung, m.due = map[uint64]*modelLoan{}, false, false
		m.last++
		m.mem[uint32(peerRegions+m.last)] = []byte{}
	}
	w.start(old.cfg)
	w.e.leases.endSlice, w.e.tagMask = old.leases.endSlice, old.tagMask
	w.e.journal.words = old.journal.words
	ids := map[SpaceID]SpaceID{}
	for _, i := range m.rng.Perm(len(w.spaces)) {
		s := w.spaces[i]
		_, err := w.e.RecoverSpace(s.fp, s.g)
		w.check(err)
		was := s.id
		s.id, err = w.e.OpenSpace(s.fp, s.g)
		w.check(err)
		ids[was] = s.id
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

	w.importAll(&h, ids)
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

// endErrands ends what is not handed over, and at times the stores.
func (w *world) endErrands() {
	m := &w.mirror
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
	busy := false
	_, err := w.e.Export()
	for _, s := range w.sessions {
		for _, h := range sorted(s.stores) {
			if m.rng.IntN(2) == 0 {
				w.check(w.e.AbortStore(s.owner, h))
				delete(s.stores, h)
			}
			w.ended = append(w.ended, h) // it cannot be committed any more
		}
		for _, h := range sorted(s.loads) {
			if slices.ContainsFunc(s.loads[h].extents, func(x Extent) bool {
				return x.Region >= peerRegions
			}) {
				busy = true
				w.check(w.e.Release(s.owner, h, nil))
				delete(s.loads, h)
				w.ended = append(w.ended, h)
			}
		}
		for _, id := range sorted(s.lookups) {
			if len(s.lookups[id].waits) > 0 {
				busy = true
				w.check(w.e.Cancel(s.owner, id))
				delete(s.lookups, id)
			}
		}
	}
	if busy != errors.Is(err, tiers.ErrBusy) {
		w.fatal("something is not handed over: %v; %v", busy, err)
	}
	slices.Sort(w.ended)
}

// checkExport compares what is handed over with what the sessions hold.
func (w *world) checkExport(h *Handover) {
	pins, loads, stores := 0, 0, 0
	for i := range h.Held {
		x := &h.Held[i]
		var of *modelSession
		for _, s := range w.sessions {
			if s.owner == x.Owner {
				of = s
			}
		}
		if x.Kind == HeldPin {
			if w.pins[x.Handle] == nil || w.pins[x.Handle].id != x.Space {
				w.fatal("%+v is handed over", x)
			}
			pins++
			continue
		}
		if of == nil {
			w.fatal("%+v is handed over", x)
		}
		switch x.Kind {
		case HeldLoad:
			loads++
			if of.loads[x.Handle] == nil && len(of.writes) > 0 {
				break // a slot of a store that was under way at another takeover
			}
			if of.loads[x.Handle] == nil || len(of.loads[x.Handle].extents) != len(x.Places) {
				w.fatal("%+v is handed over, and is %+v", x, of.loads[x.Handle])
			}
		case HeldLookup:
			is := of.lookups[x.Lookup]
			if is == nil || is.first != x.First || is.n < x.Pages ||
				is.deadline != w.now+int64(x.Left) || max(1, x.Takers) != of.takers-is.loads {
				w.fatal("%+v is handed over, and is %+v", x, is)
			}
		case HeldStore:
			stores++
		}
	}
	for _, s := range w.sessions {
		loads -= len(s.loads) + len(s.writes)
		for _, st := range s.stores {
			stores -= len(st.grants)
		}
	}
	if loads != 0 || stores != 0 || pins > len(w.pins) {
		w.fatal("%d loads, %d slots of stores too many are handed over; %d of %d pins", loads,
			stores, pins, len(w.pins))
	}
}

// importAll takes over what was handed over.
func (w *world) importAll(h *Handover, spaces map[SpaceID]SpaceID) {
	m := &w.mirror
	for _, s := range w.sessions {
		w.check(w.e.AddOwner(s.owner, s.space.id))
		if s.takers > 1 {
			w.check(w.e.SetTakers(s.owner, s.takers))
		}
	}
	for i := range h.Held {
		h.Held[i].Space = spaces[h.Held[i].Space]
	}
	w.check(w.e.Import(h))
	for pin := range w.pins {
		if !w.e.Pinned(pin) {
			delete(w.pins, pin)
		}
	}
	for _, s := range w.sessions {
		for _, h := range sorted(s.stores) { // until the session ends its client may write to them
			s.writes = append(s.writes, s.stores[h].grants...)
			m.written += uint64(len(s.stores[h].grants))
		}
		clear(s.stores)
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
			m.taken++
		}
	}
}

// writeLate has clients write to what stores were granted that were under way at a takeover.
func (w *world) writeLate() {
	for _, s := range w.sessions {
		for _, gr := range s.writes {
			for i := range int(gr.Pages) {
				for j, page := 0, w.page(s.space, gr, i); j < len(page); j++ {
					page[j]++
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
	out, err := a.e.Export()
	a.ok(err)
	of := map[HeldKind]*Held{}
	for i := range out.Held {
		of[out.Held[i].Kind] = &out.Held[i]
	}
	if l := of[HeldLookup]; len(out.Held) != 3 || len(of) != 3 || l.Pages != 8 || l.Lookup != 5 ||
		l.Left != 6*time.Second || len(of[HeldLoad].Places) != 3 || of[HeldLoad].Handle != load ||
		of[HeldPin].Handle != pin || of[HeldPin].Space != a.sp {
		t.Fatalf("%+v", out)
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
					if lose < 20 {
						x.Hashes = other[x.First*32 : (x.First+4)*32]
					} else { // only its beginning is there
						x.Pages, x.Hashes = 2, x.Hashes[:2*32]
					}
				}
				x.Space = b.sp
				b.ok(b.e.RestoreIn(num, []Restored{x}))
			}
		}
		b.e.EndRestore()
		return b
	}
	for lose, want := range map[int]int{-1: 8, 0: 0, 1: 4, 10: 0, 11: 4, 20: 0, 21: 4} {
		b := start(lose)
		var early []uint64
		for range 5 {
			if pin, _, err := b.e.Pin(b.sp, h[:4*32]); err != nil || pin != 0 {
				b.ok(err)
				early = append(early, pin)
			}
		}
		for _, pin := range early {
			b.ok(b.e.Unpin(pin))
		}
		b.ok(b.e.AddOwner(me, b.sp))
		b.ok(b.e.Import(&out))
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
			_, _, err := b.e.PrepareLoad(me, me, 5, 0, want, nil)
			b.is(err, tiers.ErrBusy) // as many loads as there may be
			b.ok(b.e.Release(me, load, nil))
			second, more, err := b.e.PrepareLoad(me, me, 5, 0, want, nil)
			b.ok(err)
			if second>>32 <= uint64(out.Generation) || more[0].Offset/256 != extents[0].Offset/256 {
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
	b.ok(b.e.AddOwner(me, b.sp))
	b.ok(b.e.Import(&out))
	now += int64(5 * time.Second)
	if n := b.e.Expire(); n != 0 {
		t.Fatal("too early")
	}
	again, err := b.e.Export()
	b.ok(err)
	if len(again.Held) != 3 || again.Generation < out.Generation {
		t.Fatalf("%+v", again)
	}
	for i := range again.Held {
		x := &again.Held[i]
		was := *of[x.Kind]
		switch x.Kind {
		case HeldLookup:
			was.Left = time.Second
		case HeldLoad: // of the chunk that was dropped nothing is known
			x.Ends, was.Ends = x.Ends[:2*32], was.Ends[:2*32]
		}
		if !reflect.DeepEqual(*x, was) {
			t.Fatalf("%+v is handed over again as %+v", was, x)
		}
	}
	now += int64(2 * time.Second)
	if n := b.e.Expire(); n != 1 {
		t.Fatal("too late")
	}

	// What no engine can have had is refused.
	for name, change := range map[string]func(h *Handover, lookup, load *Held){
		"another owner":   func(_ *Handover, l, _ *Held) { l.Owner++ },
		"another space":   func(h *Handover, _, _ *Held) { h.Held[2].Space++ },
		"no slots":        func(_ *Handover, _, l *Held) { l.Places = nil },
		"no digests":      func(_ *Handover, l, _ *Held) { l.Ends = nil },
		"no pages":        func(_ *Handover, l, _ *Held) { l.Pages = 0 },
		"a negative page": func(_ *Handover, _, l *Held) { l.First = -4 },
		"many pages":      func(_ *Handover, _, l *Held) { l.Pages = 1 << 62 },
		"no handle":       func(_ *Handover, _, l *Held) { l.Handle = 0 },
		"a handle to come": func(h *Handover, _, l *Held) {
			l.Handle += uint64(h.Generation) << 32
		},
		"the same handle": func(h *Handover, _, l *Held) { h.Held = append(h.Held, *l) },
		"the same lookup": func(h *Handover, l, _ *Held) { h.Held = append(h.Held, *l) },
		"no such kind":    func(_ *Handover, l, _ *Held) { l.Kind = 0 },
		"a store's ends":  func(_ *Handover, l, _ *Held) { l.Kind = HeldStore },
		"no such region":  func(_ *Handover, _, l *Held) { l.Places[1].Region++ },
		"between slots":   func(_ *Handover, _, l *Held) { l.Places[1].Offset++ },
		"far away":        func(_ *Handover, _, l *Held) { l.Places[1].Offset = 1<<64 - 1 },
	} {
		b := start(-1)
		b.ok(b.e.AddOwner(me, b.sp))
		bad := Handover{Generation: out.Generation}
		var lookup, load *Held
		for _, kind := range []HeldKind{HeldLookup, HeldLoad, HeldPin} {
			x := *of[kind]
			x.Places = slices.Clone(x.Places)
			bad.Held = append(bad.Held, x)
		}
		lookup, load = &bad.Held[0], &bad.Held[1]
		change(&bad, lookup, load)
		b.is(b.e.Import(&bad), tiers.ErrInvalid)
		b.ok(b.e.Check())
		b.e.RemoveOwner(me)
		if b.e.Pinned(pin) {
			b.ok(b.e.Unpin(pin))
		}
		if st := b.e.Stats(); st.Leases != 0 || st.LeasedSlots != 0 {
			t.Errorf("%s: %+v", name, st)
		}
		b.ok(b.e.Check())
	}
}

// FuzzImport hands over arbitrary leases: nothing may panic or break an invariant, and no lease is
// left when the owners are gone.
func FuzzImport(f *testing.F) {
	f.Add([]byte("\x01\x00\x02\x08\x00\x01\x02\x03"))
	f.Add(bytes.Repeat([]byte{2, 1, 0, 4, 0, 1, 1, 0}, 4))
	f.Fuzz(func(t *testing.T, data []byte) {
		e, err := New(Config{MinPageBytes: 1, OwnerShare: 1})
		if err != nil {
			t.Fatal(err)
		}
		defer e.Close()
		g := tiers.Geometry{PageBytes: 64, PagesPerChunk: 4, PageTokens: 16, DigestBytes: 32}
		sp, err := e.OpenSpace(tiers.Fingerprint{1}, g)
		if err == nil {
			err = e.AddDrainedRegion(7, 12*256)
		}
		if err != nil {
			t.Fatal(err)
		}
		num, err := e.RestorePiece(Piece{Region: 7, Placement: packed(g), Geometry: g, Slots: 10})
		if err != nil {
			t.Fatal(err)
		}
		h := numbered(1, 16)
		for i := range 4 {
			err := e.RestoreIn(num, []Restored{{Slot: uint32(2 * i), Space: sp, First: 4 * i,
				Pages: 4, Hashes: h[4*i*32 : 4*(i+1)*32], Unverified: i == 1}})
			if err != nil {
				t.Fatal(err)
			}
		}
		e.EndRestore()
		for o := range Owner(2) {
			if err := e.AddOwner(o, sp); err != nil {
				t.Fatal(err)
			}
		}
		next := func() int {
			if len(data) == 0 {
				return 0
			}
			b := int(data[0])
			data = data[1:]
			return b
		}
		odd := func() int {
			b := next()
			return []int{b % 4, b % 16, b, -b, 1 << 30, -1 << 62}[max(0, b%16-10)]
		}
		in := Handover{Generation: uint32(odd())}
		for len(data) > 0 {
			x := Held{Kind: HeldKind(next() % 6), Owner: Owner(next() % 3),
				Space: SpaceID(next() % 3), Lookup: uint64(odd()),
				Handle: uint64(odd())<<32 | uint64(odd()), Takers: odd(),
				Left: time.Duration(odd()), First: odd(), Pages: odd()}
			n := 1 + next()%4
			for range n {
				x.Places = append(x.Places, Place{7, uint64(256 * odd())})
			}
			if from := next() % 12; next()%4 > 0 {
				x.First, x.Pages = from/4*4, 4*n
				for i := range n {
					page := min(from/4*4+4*i+3, 15)
					x.Places[i].Offset = uint64(page/4*2) * 256
					x.Ends = append(x.Ends, h[page*32:(page+1)*32]...)
				}
			}
			if x.Kind == HeldStore {
				x.Ends = nil
			}
			in.Held = append(in.Held, x)
		}
		_ = e.Import(&in)
		if err := e.Check(); err != nil {
			t.Fatal(err)
		}
		if _, err := e.Export(); err != nil {
			t.Fatal(err)
		}
		for o := range Owner(2) {
			e.RemoveOwner(o)
		}
		for pin := range maps.Clone(e.leases.imported) {
			if err := e.Unpin(pin); err != nil {
				t.Fatal(err)
			}
		}
		if st := e.Stats(); st.Leases != 0 || st.LeasedSlots != 0 {
			t.Fatalf("%+v", st)
		}
		if err := e.Undrain(7); err != nil {
			t.Fatal(err)
		}
		if err := e.Check(); err != nil {
			t.Fatal(err)
		}
	})
}
