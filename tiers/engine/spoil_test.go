package engine

import (
	"errors"
	"testing"

	"lookaside/tiers"
)

// A spoiled slot is never granted again, until its region is another.
func TestSpoil(t *testing.T) {
	g := tiers.Geometry{PageBytes: 4096, PagesPerChunk: 1, PageTokens: 16, DigestBytes: 8}
	e, err := New(Config{FixedRegions: true, NoExtend: true, OwnerShare: 1})
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
	check(e.AddCarvedRegion(1, g, 8, packed(g)))
	space, err := e.OpenSpace(tiers.FingerprintOf([]byte("spoil")), g)
	check(err)
	check(e.AddOwner(1, space))
	n := byte(0)
	grant := func() (StoreResult, Grant) {
		t.Helper()
		n++
		res, grants, err := e.PrepareStore(1, 0, nil, []byte{n, 0, 0, 0, 0, 0, 0, 1}, nil)
		check(err)
		if len(grants) != 1 {
			t.Fatalf("no slot for chunk %d", n)
		}
		return res, grants[0]
	}
	spoiled := map[uint64]bool{}
	for i := range 40 {
		res, at := grant()
		if spoiled[at.Offset] {
			t.Fatalf("a spoiled slot was granted")
		}
		switch slot := uint32(at.Offset / 4096); {
		case i%5 == 1 && len(spoiled) < 3: // as it is being filled
			if !e.Spoil(1, slot) {
				t.Fatal("not spoiled")
			}
			spoiled[at.Offset] = true
			check(e.AbortStore(1, res.Store))
		case i%5 == 3 && len(spoiled) < 6: // holding a chunk
			check(e.CommitStore(1, res.Store, nil))
			e.Spoil(1, slot)
			check(nil)
			spoiled[at.Offset] = true
			_, err := e.Drop(space, 0, []byte{n, 0, 0, 0, 0, 0, 0, 1})
			check(err)
		default:
			check(e.CommitStore(1, res.Store, nil))
		}
	}
	st := e.Stats()
	if len(spoiled) != 6 || st.ReadySlots != 2 || st.FreeSlots != 0 {
		t.Errorf("%d are spoiled: %+v", len(spoiled), st)
	}
	if e.Spoil(1, 8) || e.Spoil(2, 0) {
		t.Error("spoiled what is not there")
	}
	e.ClearSpace(space)
	check(nil)
	if slots, free := e.Room(g); slots != 8 || free != 2 {
		t.Errorf("%d slots, %d free", slots, free)
	}
	check(e.RemoveRegion(1))
	check(e.AddCarvedRegion(1, g, 8, packed(g)))
	for range 8 {
		res, _ := grant()
		check(e.CommitStore(1, res.Store, nil))
	}
}
