package engine

import (
	"cmp"
	"slices"

	"lookaside/tiers"
)

// A Fill describes what lies where in the arena.
type Fill struct {
	Spaces  []tiers.Fingerprint // the spaces that anything is held of
	Regions []RegionFill        // in the order of their ids
}

// RegionFill describes one region of the caller's, cut into cells of equal size.
type RegionFill struct {
	Region    uint32
	SizeBytes int64
	Cells     []Cell
}

// Cell counts the bytes of slots in one stretch of a region. What no field counts is free. A slot
// that lies in several cells counts in each with the part that lies there.
type Cell struct {
	Held    []int64 // of held slots, by index into Fill.Spaces; may be shorter than that
	Leased  int64   // of the held slots, those that are leased
	Filling int64   // of slots that a store or a promotion is writing
}

// Fill returns what lies where in the arena, with so many cells a region. It looks at each slot
// that was ever used, and releases the lock between slices of its work, so that its parts are from
// different moments.
func (e *Engine) Fill(cells int) Fill {
	e.mu.Lock()
	defer e.unlock()
	f := filler{at: map[uint32]int{}, spaces: map[uint16]int{}}
	for _, a := range e.areas {
		f.region(a.id, a.size, cells)
	}
	for id, r := range e.byID {
		if !r.foreign {
			f.region(id, r.size, cells)
		}
	}
	slices.SortFunc(f.Regions, func(a, b RegionFill) int {
		return cmp.Compare(a.Region, b.Region)
	})
	for i := range f.Regions {
		f.at[f.Regions[i].Region] = i
	}
	left := clearSlice
	for num := 1; num <= e.nregion; num++ {
		for i := 0; ; i++ {
			if left == 0 {
				left = clearSlice
				if !e.pause() {
					return f.Fill
				}
			}
			// Looked at anew after each pause: the piece may have gone meanwhile.
			r := e.regions[num]
			if r == nil || r.class == nil || r.foreign || i >= r.fresh {
				break
			}
			left--
			if s := &r.slots[i]; s.state != free && e.spaces[s.space] != nil {
				f.add(r, int64(i), s, e.spaces[s.space].print)
			}
		}
	}
	return f.Fill
}

// filler makes a Fill.
type filler struct {
	Fill
	at     map[uint32]int // index into Regions, by id
	spaces map[uint16]int // index into Spaces, by number
}

func (f *filler) region(id uint32, size int64, cells int) {
	f.Regions = append(f.Regions, RegionFill{Region: id, SizeBytes: size,
		Cells: make([]Cell, cells)})
}

// add counts a slot in the cells that it lies in.
func (f *filler) add(r *region, i int64, s *slot, print tiers.Fingerprint) {
	at, there := f.at[r.id]
	if !there {
		return // the region came since the walk began
	}
	space, known := f.spaces[s.space]
	if !known {
		space = len(f.Spaces)
		f.spaces[s.space] = space
		f.Spaces = append(f.Spaces, print)
	}
	in := &f.Regions[at]
	width := max(1, (in.SizeBytes+int64(len(in.Cells))-1)/int64(len(in.Cells)))
	from := i * r.class.slotBytes() // what lies between carved slots is not counted
	if r.area != nil {
		from += r.at.Offset
	}
	for to := from + r.class.slotBytes(); from < to; {
		cell := min(from/width, int64(len(in.Cells))-1)
		n := to - from
		if cell < int64(len(in.Cells))-1 {
			n = min(n, (cell+1)*width-from)
		}
		in.Cells[cell].count(s, space, n)
		from += n
	}
}

// count counts so many bytes of a slot of the space with this index.
func (c *Cell) count(s *slot, space int, bytes int64) {
	if s.state == filling {
		c.Filling += bytes
		return
	}
	for len(c.Held) <= space {
		c.Held = append(c.Held, 0)
	}
	c.Held[space] += bytes
	if s.pins > 0 {
		c.Leased += bytes
	}
}
