package admin

import (
	"sync"
	"time"

	"lookaside/dax"
)

// These bound how finely a map of the arena is drawn: at most mapCells in all, at least leastCells
// and at most mostCells a region.
const (
	mapCells   = 1024
	leastCells = 4
	mostCells  = 128
)

// mapAge is how old a map may be that is returned again. So however many look, the arena is walked
// at most this often.
const mapAge = time.Second

// ArenaMap describes what lies where in the arena.
type ArenaMap struct {
	Spaces  []string    `json:"spaces" doc:"Fingerprints of the spaces that anything is held of."`
	Regions []RegionMap `json:"regions"`
}

// RegionMap describes what lies where in a region.
type RegionMap struct {
	Region    uint32    `json:"region"`
	Kind      dax.Kind  `json:"kind"`
	Device    string    `json:"device,omitempty" doc:"What it lies on, of an arena on DAX."`
	SizeBytes int64     `json:"size_bytes"`
	Cells     []CellMap `json:"cells" doc:"It is cut into cells of equal size; the last may be smaller."`
}

// CellMap counts the bytes of slots in a cell. What is not counted is free.
type CellMap struct {
	Held    []int64 `json:"held" doc:"Bytes held of each space, in the order of spaces; those at the end that are 0 may be left out."`
	Leased  int64   `json:"leased" doc:"Of what is held, bytes that are in use."`
	Filling int64   `json:"filling" doc:"Bytes that are being written."`
}

// mapped keeps the last map for a moment.
type mapped struct {
	mu   sync.Mutex // held while the arena is walked
	at   time.Time
	last *ArenaMap
}

// ArenaMap returns what lies where in the arena, as of a moment ago.
func (o *Operations) ArenaMap() *ArenaMap {
	m := &o.mapped
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.last != nil && time.Since(m.at) < mapAge {
		return m.last
	}
	e := o.Engine.Stats()
	st := o.Arena.Status(&e)
	cells := min(max(mapCells/max(1, len(st.Regions)), leastCells), mostCells)
	fill := o.Engine.Fill(cells)
	out := &ArenaMap{Spaces: []string{}, Regions: []RegionMap{}}
	for _, fp := range fill.Spaces {
		out.Spaces = append(out.Spaces, fp.String())
	}
	for _, r := range fill.Regions {
		one := RegionMap{Region: r.Region, SizeBytes: r.SizeBytes, Kind: st.Kind}
		for _, s := range st.Regions {
			if s.ID == r.Region {
				one.Kind, one.Device = s.Kind, s.Device
			}
		}
		for _, c := range r.Cells {
			one.Cells = append(one.Cells, CellMap{Held: append([]int64{}, c.Held...),
				Leased: c.Leased, Filling: c.Filling})
		}
		out.Regions = append(out.Regions, one)
	}
	m.last, m.at = out, time.Now()
	return out
}
