package engine

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"lookaside/tiers"
)

// The part of the random histories that is about restored chunks that are to be verified.

// modelCheck is a check of a chunk that is under way.
type modelCheck struct {
	space *modelSpace
	v     Verification
}

// restoreSome adds a region with restored chunks, or has some verified.
func (w *world) restoreSome(s *modelSession) {
	switch {
	case w.chance(15) && len(w.arena) < 10:
		w.restoreRegion()
	case w.chance(4):
		w.nextVerify(s)
	case w.chance(2):
		w.endVerify()
	}
}

func (w *world) restoreRegion() {
	w.nextRegion++
	id := w.nextRegion
	if w.fixed == nil && w.chance(2) {
		w.restorePieces(id)
	} else {
		s := w.spaces[w.rng.IntN(len(w.spaces))]
		slots, at := 1+w.rng.IntN(12), packed(s.g)
		at.Offset, at.Stride = w.rng.Int64N(50), at.Stride+w.rng.Int64N(20)
		w.arena[id] = make([]byte, at.Offset+at.Stride*int64(slots))
		w.check(w.e.AddCarvedRegion(id, s.g, slots, at))
		w.restoreSlots(s, Piece{Region: id, Placement: at, Slots: slots},
			func(x []Restored) error { return w.e.Restore(id, x) })
	}
	w.bad = true // what is not verified is no hit
	if w.chance(4) {
		w.prepareStore(w.session())
	}
	w.mirror.granted(w, id)
	w.e.EndRestore()
	w.mirror.check(w, true)
}

// restorePieces adds a region with pieces that are restored. It is drained for a while.
func (w *world) restorePieces(id uint32) {
	var size, end int64
	var pieces []Piece
	var of []*modelSpace
	for range w.rng.IntN(4) {
		s := w.spaces[w.rng.IntN(len(w.spaces))]
		p := Piece{Num: w.rng.Uint32(), Region: id, Placement: packed(s.g), Geometry: s.g,
			Slots: 1 + w.rng.IntN(8)}
		p.Offset = size + w.rng.Int64N(2)*w.rng.Int64N(500)
		size = p.Offset + p.Stride*int64(p.Slots)
		pieces, of = append(pieces, p), append(of, s)
	}
	end, size = size, size+1+w.rng.Int64N(3000)
	w.arena[id] = make([]byte, size)
	w.check(w.e.AddDrainedRegion(id, size))
	w.drained[id] = true
	w.mirror.carving = id
	for _, i := range w.rng.Perm(len(pieces)) {
		p := pieces[i]
		num, err := w.e.RestorePiece(p)
		if errors.Is(err, tiers.ErrBusy) {
			continue // as many as there may be
		}
		w.check(err)
		if got := w.mirror.pieces[num]; got == nil || got.p.Placement != p.Placement ||
			got.p.Slots != p.Slots || got.p.Region != id {
			w.fatal("%+v is restored as number %d, told as %+v", p, num, got)
		}
		for _, bad := range []Piece{p, {Region: id, Geometry: p.Geometry, Slots: p.Slots,
			Placement: Placement{p.Offset + p.Stride*int64(p.Slots) - 1, p.Stride}},
			{Region: id, Geometry: p.Geometry, Slots: 1, Placement: Placement{size, p.Stride}},
			{Region: id, Geometry: p.Geometry, Slots: int(size), Placement: Placement{end,
				p.Stride}}} {
			if _, err := w.e.RestorePiece(bad); !errors.Is(err, tiers.ErrInvalid) {
				w.fatal("%+v is restored where %+v is: %v", bad, p, err)
			}
		}
		p.Num = num
		w.restoreSlots(of[i], p, func(x []Restored) error { return w.e.RestoreIn(num, x) })
		if err := w.e.Undrain(id); len(w.e.staging.regions) > 0 != errors.Is(err, tiers.ErrBusy) {
			w.fatal("region %d is undrained while it is restored: %v", id, err)
		} else if err == nil {
			w.check(w.e.Drain(id))
		}
	}
	w.mirror.carving = 0
}

// restoreSlots restores some slots of a piece.
func (w *world) restoreSlots(s *modelSpace, in Piece, restore func([]Restored) error) {
	id, at, g := in.Region, in.Placement, s.g
	for slot := range in.Slots {
		if w.chance(4) {
			continue
		}
		p := w.prefix()
		first := w.rng.IntN(len(p)) / g.PagesPerChunk * g.PagesPerChunk
		end := min(first+g.PagesPerChunk, len(p))
		x := Restored{Slot: uint32(slot), Space: s.id, Tenant: w.tenant(), First: first,
			Pages:  end - first,
			Hashes: p.digests(first, end, g.DigestBytes), Order: w.rng.Uint64(),
			Unverified: !w.chance(4)}
		if first > 0 && !w.chance(4) {
			x.Prev = p.digests(first-1, first, g.DigestBytes)
		}
		for page := first; page < end; page++ {
			d := p.digests(page, page+1, g.DigestBytes)
			pattern(w.arena[id][at.Offset+int64(slot)*at.Stride+
				int64(page-first)*g.PageBytes:][:g.PageBytes], s.fp, d)
			w.note(p, page, g.DigestBytes)
			s.restored[string(d)] = true
			if !x.Unverified {
				s.committed[string(d)] = true
			}
		}
		if x.Unverified && w.chance(3) {
			w.arena[id][at.Offset+int64(slot)*at.Stride+w.rng.Int64N(int64(x.Pages)*g.PageBytes)]++
		}
		w.check(restore([]Restored{x}))
		w.mirror.restored(w, in, s, x)
	}
}

// good says whether the pages of an extent have the bytes that they should have.
func (w *world) good(s *modelSpace, ex Extent, hashes []byte) bool {
	want := make([]byte, s.g.PageBytes)
	for i := range int(ex.Pages) {
		pattern(want, s.fp, hashes[i*s.g.DigestBytes:(i+1)*s.g.DigestBytes])
		if !bytes.Equal(w.page(s, ex, i), want) {
			return false
		}
	}
	return true
}

func (w *world) commitAll(s *modelSpace, hashes []byte) {
	for d := range slices.Chunk(hashes, s.g.DigestBytes) {
		s.committed[string(d)] = true
	}
}

// nextVerify begins checks of what some prefix needs, and at times ends them all: then everything
// that is held of it can be read.
func (w *world) nextVerify(s *modelSession) {
	p := w.prefix()
	first := w.rng.IntN(len(p))
	h := p.digests(first, len(p), s.space.g.DigestBytes)
	for all := w.chance(2); ; {
		found, _, err := w.e.NextVerify(s.owner, first, h, nil, nil)
		w.check(err)
		for _, v := range found {
			page := max(v.First, first)
			if v.Space != s.space.id || page >= min(v.First+v.Pages, len(p)) ||
				!bytes.Contains(v.Hashes, p.digests(page, page+1, s.space.g.DigestBytes)) ||
				w.e.Verified(v.Handle) {
				w.fatal("%+v is to be verified for %v from page %d", v, p, first)
			}
			w.checks = append(w.checks, modelCheck{s.space, v})
		}
		if !all {
			return
		}
		if len(found) == 0 {
			break
		}
		for range found {
			w.endCheck(len(w.checks) - 1)
		}
	}
	held := make([]uint16, len(p)/s.space.g.PagesPerChunk+1)
	w.check(w.e.Contains(s.space.id, first, h, held))
	sp := w.e.spaces[s.space.id]
	for page := first; page < len(p); page++ {
		i := page/s.space.g.PagesPerChunk - first/s.space.g.PagesPerChunk
		start := max(first, page/s.space.g.PagesPerChunk*s.space.g.PagesPerChunk)
		if found := w.e.find(sp, p.digests(page, page+1, s.space.g.DigestBytes)) != 0; found !=
			(page-start < int(held[i])) {
			w.fatal("page %d of %v is held: %v; verified from page %d on are %v", page, p, found,
				first, held)
		}
	}
}

func (w *world) endVerify() {
	if len(w.checks) > 0 {
		w.endCheck(w.rng.IntN(len(w.checks)))
	}
}

// endCheck ends the i-th check with what the bytes say. That changes nothing if the chunk has left
// meanwhile.
func (w *world) endCheck(i int) {
	c := w.checks[i]
	w.checks = slices.Delete(w.checks, i, i+1)
	ref, slot := w.e.verifying(c.v.Handle)
	if slot == nil || !slot.unverified() {
		before := w.e.Stats()
		w.e.EndVerify(c.v.Handle, w.chance(2))
		if after := w.e.Stats(); before != after {
			w.fatal("the end of a check of what has left changed %+v to %+v", before, after)
		}
		return
	}
	good := w.good(c.space, Extent{Region: c.v.Region, Offset: c.v.Offset,
		Pages: uint32(c.v.Pages)}, c.v.Hashes)
	w.e.EndVerify(c.v.Handle, good)
	if w.e.Verified(c.v.Handle) != good {
		w.fatal("%+v in slot %#x with flags %b was found good: %v", c.v, ref, slot.flags, good)
	}
	if good {
		w.verified++
		w.commitAll(c.space, c.v.Hashes)
	} else {
		w.corrupt++
	}
}

// verifyItem checks what is being written to a tier, through the engine if that says so. It answers
// false if it is bad.
func (w *world) verifyItem(c *modelCascade) (good bool) {
	if c.item.Unverified {
		if w.chance(2) && w.cascades[c.item.Handle] == nil {
			return true // later
		}
		good = w.good(c.space, Extent{Region: c.item.Region, Offset: c.item.Offset,
			Pages: uint32(c.item.Pages)}, c.item.Hashes)
		if good && !w.e.Verified(c.item.VerifyHandle) {
			if _, s := w.e.verifying(c.item.VerifyHandle); s != nil {
				w.commitAll(c.space, c.item.Hashes)
			}
		}
		w.e.EndVerify(c.item.VerifyHandle, good)
		if !good {
			return false
		}
		c.item.Unverified = false
	}
	w.verifyCascade(c)
	return true
}

// TestUnverified: what was restored and not verified is held for stores, and no hit.
func TestUnverified(t *testing.T) {
	e := fixedEngine(t, 2, 8)
	h := treeHashes(rand.New(rand.NewPCG(1, 1)), 12)
	d := restoreGeometry.DigestBytes
	check := func(err error) {
		t.Helper()
		if err := errors.Join(err, e.Check()); err != nil {
			t.Fatal(err)
		}
	}
	expect := func(pages int, held ...uint16) {
		t.Helper()
		n, err := e.Lookup(1, 1, 0, h)
		check(err)
		pin, m, err := e.Pin(1, h)
		check(err)
		if m > 0 {
			check(e.Unpin(pin))
		}
		got := make([]uint16, 3)
		check(e.Contains(1, 0, h, got))
		if n != pages || m != pages || !slices.Equal(got, held) {
			t.Fatalf("%d pages hit, %d pinned, %v contained; want %d and %v", n, m, got, pages,
				held)
		}
	}
	next := func(want ...uint32) []Verification {
		t.Helper()
		found, _, err := e.NextVerify(1, 0, h, nil, nil)
		check(err)
		var slots []uint32
		for _, v := range found {
			slots = append(slots, v.Region*100+uint32(v.Offset/uint64(restoreGeometry.PageBytes*4)))
			if !bytes.Equal(v.Hashes, h[v.First*d:(v.First+v.Pages)*d]) || v.Space != 1 {
				t.Fatalf("%+v", v)
			}
		}
		if !slices.Equal(slots, want) {
			t.Fatalf("slots %d are to be verified, want %d", slots, want)
		}
		return found
	}
	check(e.Restore(10, []Restored{
		{Slot: 1, Space: 1, Pages: 4, Hashes: h[:4*d], Unverified: true},
		{Slot: 3, Space: 1, First: 4, Pages: 4, Prev: h[3*d : 4*d], Hashes: h[4*d : 8*d],
			Unverified: true, Order: 1},
	}))
	check(e.Restore(11, []Restored{{Slot: 2, Space: 1, First: 8, Pages: 3, Prev: h[7*d : 8*d],
		Hashes: h[8*d : 11*d], Order: 2}}))
	if n := e.EndRestore(); n != 3 || e.Unverified() != 2 {
		t.Fatal(n, e.Unverified())
	}
	expect(0, 0, 0, 3)
	res, grants, err := e.PrepareStore(1, 0, nil, h[:11*d], nil)
	if check(err); res.Held != 11 || len(grants) != 0 {
		t.Fatalf("%+v, %+v", res, grants)
	}
	found := next(1001, 1003)
	e.EndVerify(found[0].Handle, true)
	e.EndVerify(found[0].Handle, false) // another check of it, which came late
	expect(4, 4, 0, 3)
	e.EndVerify(next(1003)[0].Handle, true)
	expect(11, 4, 4, 3)
	next()
	if st := e.Stats(); st.Verified != 2 || st.Bad != 0 || st.Unverified != 0 ||
		e.Unverified() != 0 {
		t.Fatalf("%+v", st)
	}
	e.ClearSpace(1)
	check(nil)
	if e.Verified(found[0].Handle) || e.Verified(0) || e.Verified(1<<63) {
		t.Fatal("what was dropped is verified")
	}
}

// TestUnverifiedShared: of slots that share pages the verified one is read, and each of the others
// comes to its check.
func TestUnverifiedShared(t *testing.T) {
	e := fixedEngine(t, 2, 8)
	d := restoreGeometry.DigestBytes
	h := treeHashes(rand.New(rand.NewPCG(2, 1)), 4)
	fork := slices.Clone(h[:4*d])
	fork[3*d]++
	expect := func(pages int) {
		t.Helper()
		if n, err := e.Lookup(1, 1, 0, h); err != nil || n != pages {
			t.Fatal(n, err)
		}
		if err := e.Check(); err != nil {
			t.Fatal(err)
		}
	}
	if err := e.Restore(10, []Restored{
		{Slot: 0, Space: 1, Pages: 4, Hashes: h, Unverified: true},
		{Slot: 1, Space: 1, Pages: 4, Hashes: fork, Order: 1},
	}); err != nil {
		t.Fatal(err)
	}
	e.EndRestore()
	expect(3)
	found, _, _ := e.NextVerify(1, 0, h[:3*d], nil, nil)
	if len(found) != 0 {
		t.Fatalf("%+v is to be verified where another slot has it", found)
	}
	found, _, _ = e.NextVerify(1, 0, h, nil, nil)
	if len(found) != 1 || found[0].Pages != 4 {
		t.Fatalf("%+v", found)
	}
	e.EndVerify(found[0].Handle, false)
	expect(3)
	if st := e.Stats(); st.Bad != 1 || st.ReadySlots != 1 {
		t.Fatalf("%+v", st)
	}
}

// TestUnverifiedUse: what is being written to a tier or moved says that it is to be checked; a move
// has checked it; none of it is lost count of.
func TestUnverifiedUse(t *testing.T) {
	e, err := New(Config{FixedRegions: true, NoExtend: true, OwnerShare: 1,
		Tiers: []TierAdmission{{Admit: AdmitReused}}})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	check := func(err error) {
		t.Helper()
		if err := errors.Join(err, e.Check()); err != nil {
			t.Fatal(err)
		}
	}
	g := restoreGeometry
	sp, err := e.OpenSpace([32]byte{1}, g)
	check(err)
	check(e.AddOwner(1, sp))
	h := treeHashes(rand.New(rand.NewPCG(3, 1)), 16)
	for _, id := range []uint32{10, 11} {
		check(e.AddCarvedRegion(id, g, 4, packed(g)))
	}
	var all []Restored
	for i := range 4 {
		all = append(all, Restored{Slot: uint32(i), Space: sp, First: 4 * i, Pages: 4,
			Hashes: h[4*i*g.DigestBytes : 4*(i+1)*g.DigestBytes], Unverified: true})
	}
	check(e.Restore(10, all))
	e.EndRestore()
	res, _, err := e.PrepareStore(1, 0, nil, h, nil) // a use
	if check(err); res.Held != 16 {
		t.Fatalf("%+v", res)
	}
	items, _ := e.NextCascades(0, 9, nil, nil)
	if len(items) != 4 || !items[0].Unverified || !items[3].Unverified ||
		e.Verified(items[0].VerifyHandle) {
		t.Fatalf("%+v", items)
	}
	check(nil)
	e.EndVerify(items[0].VerifyHandle, true)
	e.EndVerify(items[1].VerifyHandle, false)
	check(nil)
	if e.EndCascade(items[0].Handle, true) || !e.EndCascade(items[1].Handle, false) {
		t.Fatal("dropped is what was found bad")
	}
	check(e.Drain(10))
	moves, _, _, err := e.NextMoves(10, 0, 9, true, nil, nil)
	check(err)
	if len(moves) != 3 || moves[0].Unverified || !moves[1].Unverified || !moves[2].Unverified ||
		e.Unverified() != 2 {
		t.Fatalf("%+v", moves)
	}
	if !e.EndMove(moves[0].Handle, MoveDone) || !e.EndMove(moves[1].Handle, MoveDone) ||
		e.EndMove(moves[2].Handle, MoveFailed) {
		t.Fatal("moves")
	}
	check(nil)
	if !e.Verified(items[2].VerifyHandle) || e.Verified(items[3].VerifyHandle) ||
		e.Unverified() != 1 {
		t.Fatal("a move has checked what it moved")
	}
	e.EndVerify(items[2].VerifyHandle, false) // of the old slot
	for _, x := range items[2:] {
		e.EndCascade(x.Handle, false)
	}
	check(nil)
	if n, err := e.Lookup(1, 1, 8, h[8*g.DigestBytes:]); n != 4 || err != nil {
		t.Fatal(n, err)
	}
	if err := e.RemoveRegion(10); err != nil || e.Unverified() != 0 {
		t.Fatal(err, e.Unverified())
	}
	check(nil)
}
