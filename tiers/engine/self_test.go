package engine

import (
	"errors"
	"testing"

	"lookaside/tiers"
)

// keptEngine has one region, a tier below the arena, and the arena itself as the last one.
func keptEngine(t *testing.T, c Config) *Engine {
	t.Helper()
	c.FixedRegions, c.NoExtend, c.OwnerShare, c.PromotingShare = true, true, 1, 1
	c.Tiers = []TierAdmission{{Admit: AdmitStored}, {Self: true}}
	e, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Check(); err != nil && !errors.Is(err, tiers.ErrClosed) {
			t.Error(err)
		}
		e.Close()
	})
	if err := e.AddCarvedRegion(1, restoreGeometry, 20, packed(restoreGeometry)); err != nil {
		t.Fatal(err)
	}
	return e
}

func openOwned(t *testing.T, e *Engine, fp byte) SpaceID {
	t.Helper()
	id, err := e.OpenSpace(tiers.Fingerprint{fp}, restoreGeometry)
	if err == nil {
		err = e.AddOwner(Owner(id), id)
	}
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func line(pages int) (out []byte) {
	for i := range pages {
		out = append(out, byte(i), 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
	}
	return out
}

// keep ends all that waits for a tier, and returns how many pages each chunk had.
func keep(e *Engine, tier int, ok bool) (pages []int) {
	items, _ := e.NextCascades(tier, 100, nil, nil)
	for _, c := range items {
		pages = append(pages, c.Pages)
		e.EndCascade(c.Handle, ok)
	}
	return pages
}

// TestSelf: an arena that keeps its chunks itself is given all of them at once, but for those that
// it was given back.
func TestSelf(t *testing.T) {
	t.Parallel()
	woken := [2]int{}
	e := keptEngine(t, Config{Wake: func(tier Work) { woken[tier]++ }})
	id := openOwned(t, e, 1)
	o := Owner(id)
	storeAll(t, e, o, 0, nil, line(6))
	if got := keep(e, 1, true); len(got) != 2 || got[0] != 4 || got[1] != 2 || woken[1] == 0 {
		t.Errorf("a whole chunk and a part of one were stored: chunks of %v pages wait, woken %d times", got, woken[1])
	}
	if got := keep(e, 0, true); len(got) != 1 {
		t.Errorf("chunks of %v pages wait for the tier below", got)
	}
	if got := keep(e, 1, true); len(got) != 0 {
		t.Errorf("chunks of %v pages wait though they are kept", got)
	}
	// What comes up waits too, whatever tier it is from.
	for from := -1; from <= 0; from++ {
		id := openOwned(t, e, byte(10+from))
		p, err := e.PreparePromotion(Owner(id), 1, PromotionRun{
			Hashes: line(4), Have: []uint16{4},
		}, nil)
		if err != nil || len(p) != 1 {
			t.Fatal(p, err)
		}
		if err := e.FinishPromotion(p[0].Promotion, true, from); err != nil {
			t.Fatal(err)
		}
		if got := keep(e, 1, true); len(got) != 1 {
			t.Errorf("chunks of %v pages wait after a promotion from tier %d", got, from)
		}
	}
	if _, err := New(Config{Tiers: []TierAdmission{{Self: true}}}); !errors.Is(err,
		tiers.ErrInvalid) {
		t.Errorf("an arena that keeps its chunks itself and extends them: %v", err)
	}

	b := keptEngine(t, Config{})
	if _, err := b.RecoverSpace(tiers.Fingerprint{1}, restoreGeometry); err != nil {
		t.Fatal(err)
	}
	for region, all := range dump(e) {
		for _, x := range all {
			if x.Space == id {
				if err := b.Restore(region, []Restored{x}); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	if n := b.EndRestore(); n != 2 {
		t.Fatalf("%d chunks are restored", n)
	}
	if got := keep(b, 1, true); len(got) != 0 {
		t.Errorf("chunks of %v pages wait though they were restored", got)
	}
}

// TestGone: whatever becomes of a chunk, OnGone is called once it is out of the index, and again
// when a cascade of it has ended.
func TestGone(t *testing.T) {
	t.Parallel()
	gone := map[uint32]int{}
	e := keptEngine(t, Config{OnGone: func(_, _, slot uint32) { gone[slot]++ }})
	id := openOwned(t, e, 1)
	o := Owner(id)
	storeAll(t, e, o, 0, nil, line(4))
	if n, err := e.Lookup(o, 1, 0, line(4)); n != 4 || err != nil {
		t.Fatal(n, err)
	}
	items, _ := e.NextCascades(1, 1, nil, nil)
	e.ClearSpace(id)
	if gone[0] != 1 {
		t.Errorf("cleared while leased: told %d times", gone[0])
	}
	if !e.EndCascade(items[0].Handle, true) || gone[0] != 2 {
		t.Errorf("its cascade has ended: told %d times", gone[0])
	}
	if err := e.Cancel(o, 1); err != nil || gone[0] != 3 {
		t.Errorf("it is free: told %d times, %v", gone[0], err)
	}
}

// TestRecoveredSpaces: the spaces of what is restored are there for owners that open them, and give
// way to others.
func TestRecoveredSpaces(t *testing.T) {
	t.Parallel()
	e := keptEngine(t, Config{MaxSpaces: 3})
	var entries []Restored
	for i := range byte(3) {
		id, err := e.RecoverSpace(tiers.Fingerprint{i}, restoreGeometry)
		if err != nil {
			t.Fatal(err)
		}
		if i < 2 {
			entries = append(entries, Restored{Slot: uint32(i), Space: id, Pages: 4,
				Hashes: line(4), Order: uint64(10 - i)})
		}
	}
	if _, err := e.RecoverSpace(tiers.Fingerprint{9}, restoreGeometry); !errors.Is(err,
		tiers.ErrBusy) {
		t.Errorf("a fourth space is recovered: %v", err)
	}
	if err := e.Restore(1, entries); err != nil {
		t.Fatal(err)
	}
	if _, err := e.OpenSpace(tiers.Fingerprint{9}, restoreGeometry); !errors.Is(err,
		tiers.ErrBusy) {
		t.Errorf("a fourth space is opened while they are restored: %v", err)
	}
	if n := e.EndRestore(); n != 2 {
		t.Fatalf("%d chunks", n)
	}
	other := restoreGeometry
	other.PageBytes *= 2
	if _, err := e.OpenSpace(tiers.Fingerprint{0}, other); !errors.Is(err, tiers.ErrIncompatible) {
		t.Errorf("opened with another size of pages: %v", err)
	}
	openOwned(t, e, 0) // the one used last
	other = restoreGeometry
	other.PageTokens++
	if _, err := e.OpenSpace(tiers.Fingerprint{0}, other); !errors.Is(err, tiers.ErrIncompatible) {
		t.Errorf("opened once more, with other tokens: %v", err)
	}
	if _, err := e.RecoverSpace(tiers.Fingerprint{0}, other); err != nil {
		t.Errorf("recovered once more: %v", err)
	}
	spaces := func() (out []byte) {
		for _, s := range e.Spaces() {
			out = append(out, s.Fingerprint[0])
			if want := restoreGeometry.PageTokens; s.Fingerprint[0] != 1 && s.Fingerprint[0] != 2 &&
				s.Geometry.PageTokens != want {
				t.Errorf("space %d has pages of %d tokens, want %d", s.Fingerprint[0],
					s.Geometry.PageTokens, want)
			}
		}
		return out
	}
	openOwned(t, e, 10) // takes the place of the empty one
	if got := spaces(); string(got) != string([]byte{0, 1, 10}) {
		t.Errorf("spaces %v", got)
	}
	openOwned(t, e, 11) // and of the one that was not opened, with what it has
	if got := spaces(); string(got) != string([]byte{0, 11, 10}) {
		t.Errorf("spaces %v", got)
	}
	if _, err := e.OpenSpace(tiers.Fingerprint{12}, restoreGeometry); !errors.Is(err,
		tiers.ErrBusy) {
		t.Errorf("one more than there may be: %v", err)
	}
	if n, err := e.Lookup(1, 1, 0, line(4)); n != 4 || err != nil {
		t.Errorf("%d pages, %v", n, err)
	}
}
