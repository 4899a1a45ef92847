package engine

import (
	"testing"

	"lookaside/tiers"
)

// checkFill compares now and then what Fill counts with the books of regions. It draws no number,
// which would change the histories.
func (w *world) checkFill() {
	if w.e.tick%8 != 0 {
		return
	}
	cells := 1 + int(w.e.tick/8%9)
	held, leased, filling, fill := int64(0), int64(0), int64(0), w.e.Fill(cells)
	for _, r := range fill.Regions {
		if len(r.Cells) != cells {
			w.fatal("%d cells of region %d, want %d", len(r.Cells), r.Region, cells)
		}
		width := (r.SizeBytes + int64(cells) - 1) / int64(cells)
		for i, c := range r.Cells {
			sum := c.Filling
			for _, n := range c.Held {
				sum += n
				held += n
			}
			filling += c.Filling
			leased += c.Leased
			if sum > width || c.Leased > sum {
				w.fatal("cell %d of region %d, of %d bytes: %+v", i, r.Region, width, c)
			}
		}
	}
	wantHeld, wantFilling := int64(0), int64(0)
	for _, r := range w.e.regions[1 : w.e.nregion+1] {
		if r.class != nil && !r.foreign {
			wantFilling += int64(r.filling) * r.class.slotBytes()
			wantHeld += int64(len(r.slots)-r.free-r.spoiled-r.filling) * r.class.slotBytes()
		}
	}
	if held != wantHeld || filling != wantFilling || leased > held {
		w.fatal("%d bytes held (%d of them leased), %d filling; want %d and %d", held, leased,
			filling, wantHeld, wantFilling)
	}
}

// Each cell has what lies in it: a slot that lies in two counts in both.
func TestFill(t *testing.T) {
	b := newBench(t, 6, 4, Config{}) // slots of 256 bytes
	other, err := b.e.OpenSpace(tiers.Fingerprint{2}, tiers.Geometry{PageBytes: 64,
		PagesPerChunk: 4, PageTokens: 16, DigestBytes: 32})
	b.ok(err)
	b.ok(b.e.AddOwner(me+1, other))
	b.store(numbered(1, 8))
	_, err = b.e.Lookup(me, 1, 0, numbered(1, 4))
	b.ok(err)
	f := b.e.Fill(4) // of 384 bytes each
	if len(f.Spaces) != 1 || f.Spaces[0] != (tiers.Fingerprint{1}) || len(f.Regions) != 1 ||
		f.Regions[0].Region != 7 || f.Regions[0].SizeBytes != 6*256 {
		t.Fatalf("%+v", f)
	}
	sum := func() (held []int64, leased, filling int64) {
		f := b.e.Fill(4)
		for _, c := range f.Regions[0].Cells {
			held = append(held, 0)
			for _, n := range c.Held {
				held[len(held)-1] += n
			}
			leased, filling = leased+c.Leased, filling+c.Filling
		}
		return held, leased, filling
	}
	held, leased, filling := sum()
	total := int64(0)
	for _, n := range held {
		total += n
	}
	if total != 512 || leased != 256 || filling != 0 || len(held) != 4 {
		t.Errorf("%v held, %d leased, %d filling", held, leased, filling)
	}
	// The two slots are next to one another, at an end of the region.
	if max(held[0], held[3]) != 384 || max(held[1], held[2]) != 128 {
		t.Errorf("%v", held)
	}
	res, _, err := b.e.PrepareStore(me+1, 0, nil, numbered(2, 4), nil)
	b.ok(err)
	if _, _, filling = sum(); filling != 256 {
		t.Errorf("%d bytes are filling", filling)
	}
	b.ok(b.e.CommitStore(me+1, res.Store, nil))
	if f := b.e.Fill(1); len(f.Spaces) != 2 || len(f.Regions[0].Cells[0].Held) != 2 ||
		f.Regions[0].Cells[0].Held[0] != 512 || f.Regions[0].Cells[0].Held[1] != 256 {
		t.Errorf("%+v", f)
	}
	b.ok(b.e.Cancel(me, 1))
}
