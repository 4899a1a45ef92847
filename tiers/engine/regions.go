package engine

import (
	"fmt"
	"math"

	"lookaside/tiers"
	"lookaside/tiers/policy"
	"lookaside/tiers/tenant"
	"lookaside/tiers/why"
)

// Regions: the memory of the arena by number, and the classes of regions that are carved alike.
// areas.go has how geometries share memory, carve.go how a region gets its slots, drain.go how it
// is emptied, evict.go which slot is granted next.

// arena is the regions, and who has them. It is embedded in the Engine, as nearly every method
// looks at a slot.
type arena struct {
	regions [maxRegions + 1]*region // by number, from 1
	nregion int                     // the highest number that was ever in use
	byID    map[uint32]*region      // those of AddCarvedRegion
	areas   []*area                 // those of AddRegion
	bytes   int64                   // of all of them
	records int                     // in carved regions
	classes map[tiers.Geometry]*class

	carving bool // a region is being carved with the lock released
	waiting bool // a geometry waits for a region, since wanted
	wanted  int64
	aged    aged
	trash   []*carved // tables to be unmapped without the lock
}

// region is an array of slots of one geometry with their records. It is all of a region that was
// added carved, or a piece of one that stores carve.
type region struct {
	id   uint32 // by which the caller knows where it lies
	num  uint32 // the engine's, from 1: the upper bits of refs
	size int64
	area *area // of which it is a piece; nil: it is all of the caller's region

	class    *class // nil: the number is not in use
	draining bool   // hands out no slots
	// draining, and nothing in it is evicted; see Drain. Otherwise what drains is being emptied
	retired bool
	at      Placement
	ppc     int
	shift   int8 // its logarithm if it is a power of two, else -1
	words   int  // of a digest

	slots   []slot
	kin     []kin    // by slot
	digests []uint64 // of the pages at all but the last position of each slot
	links   []link
	routes  []route // by slot; nil without tiers below

	fresh    int    // slots [fresh:] were never used since the carving
	firstGen uint32 // their generation
	freeList uint32 // a free slot plus one
	free     int    // and not spoiled
	spoiled  int    // free ones that are
	filling  int
	leased   int    // slots with pins or with an extension under way
	lastUse  uint64 // newest stamp

	foreign bool        // its slots stand for chunks in peers' memory, and it has none itself
	places  []place     // by slot, of a foreign region
	tenants []tenant.ID // by slot; of a free one it means nothing
	kinds   []kind      // by slot; plain unless it is ready
	born    []uint32    // by slot: when a ready one became so, by coarse; residence.go

	mem *carved // what the slices lie in
}

// class is the regions carved alike: for the same size of slot, pages a slot and length of digest.
type class struct {
	geometry tiers.Geometry // PageTokens is 0
	regions  []*region
	slots    int // in regions that are not draining
	free     int // of those
	policy   policy.Policy
	due      int // chunks since it did what it puts off
	limit    int // slots that one owner may have leased or filling
	busy     int // slots that are leased or filling
	most     int // slots that may be, before owners are refused more
	frozen   int // slots that frozen owners have

	promoting  int // slots that are filling from a tier
	promotable int // how many may be

	uncarved int         // slots that the regions which are not carved yet would have
	cold     int         // slots that are
	kept     int         // slots that are retained or pinned
	turn     int         // the region that the last store went to, counted on
	open     *region     // where a slot was free last, nil: nowhere yet
	block    *tableBlock // for the tables of the next piece, if they fit; nil: none yet

	parts   [tenant.MaxIDs]part // by tenant
	unnamed int                 // tenants that hold something, and have no named share

	// of the slots for what peers lend of the same geometry; nil: there are none (yet)
	foreign   *class
	isForeign bool // it is that of another class
}

func (c *class) slotBytes() int64 { return c.geometry.PageBytes * int64(c.geometry.PagesPerChunk) }

// slotsIn is the slots that a region would have.
func (c *class) slotsIn(size int64) int {
	return int(min(size/c.slotBytes(), recordMask/int64(c.geometry.PagesPerChunk)))
}

// Placement is where the slots of a carved region lie in it: slot i begins at Offset + i × Stride.
// In bytes.
type Placement struct{ Offset, Stride int64 }

// AddRegion gives the engine a region of the arena, under an id of the caller's. The engine never
// touches the memory. Stores carve it into slots piece by piece: see areas.go.
func (e *Engine) AddRegion(id uint32, size int64) error { return e.addRegion(id, size, false) }

// AddDrainedRegion is AddRegion for a region that is drained from the start (Drain). So it can be
// restored (RestorePiece) while stores take memory elsewhere.
func (e *Engine) AddDrainedRegion(id uint32, size int64) error {
	return e.addRegion(id, size, true)
}

func (e *Engine) addRegion(id uint32, size int64, retired bool) error {
	e.mu.Lock()
	defer e.unlock()
	if err := e.mayAdd(id, size); err != nil {
		return err
	}
	a := newArea(id, size)
	a.retired = retired
	e.areas = append(e.areas, a)
	e.added(size)
	e.relimit()
	return nil
}

// AddCarvedRegion gives the engine a region that is carved for a geometry from the start. Its slots
// lie where at has them, and offsets that the engine returns count from the region's beginning.
// ErrBusy: there is no room for another region, or one is being carved.
func (e *Engine) AddCarvedRegion(id uint32, g tiers.Geometry, slots int, at Placement) error {
	if err := g.Validate(e.cfg.MinPageBytes); err != nil {
		return err
	}
	if slots < 1 || slots > recordMask/g.PagesPerChunk {
		return invalid("region %d of %d slots of %d pages", id, slots, g.PagesPerChunk)
	}
	bytes := g.PageBytes * int64(g.PagesPerChunk)
	if bytes > math.MaxInt64/int64(slots) {
		return invalid("region %d of %d slots of %d bytes", id, slots, bytes)
	}
	if at.Offset < 0 || at.Stride < bytes || at.Stride > (math.MaxInt64-at.Offset)/int64(slots) {
		return invalid("region %d of %d slots of %d bytes, from byte %d on every %d", id, slots,
			bytes, at.Offset, at.Stride)
	}
	e.mu.Lock()
	defer e.unlock()
	if e.carving {
		return fmt.Errorf("%w: a region is being carved", tiers.ErrBusy)
	}
	if err := e.mayAdd(id, bytes*int64(slots)); err != nil {
		return err
	}
	r := e.spareRegion()
	if r == nil {
		return fmt.Errorf("%w: %d regions are the most", tiers.ErrBusy, maxRegions)
	}
	r.id, r.size = id, bytes*int64(slots)
	e.byID[id] = r
	e.added(r.size)
	if err := e.carve(r, e.classOf(g), slots, at); err != nil {
		if !e.closed {
			e.dropRegion(r)
		}
		return err
	}
	return nil
}

// mayAdd checks that a region can be added.
func (e *Engine) mayAdd(id uint32, size int64) error {
	switch {
	case e.closed:
		return tiers.ErrClosed
	case size <= 0 || size > math.MaxInt64-e.bytes:
		return invalid("region %d of %d bytes", id, size)
	case e.byID[id] != nil || e.areaOf(id) != nil:
		return invalid("region %d is there already", id)
	case len(e.byID)+len(e.areas) >= maxRegions:
		return fmt.Errorf("%w: %d regions are the most", tiers.ErrBusy, maxRegions)
	}
	return nil
}

// added counts a region that was just added.
func (a *arena) added(size int64) {
	a.bytes += size
	a.waiting = false
}

// spareRegion returns the region of the lowest number that is not in use, nil if all are. Its
// caller carves it before the lock is released, or has e.carving set.
func (a *arena) spareRegion() *region {
	for _, q := range a.regions[1 : a.nregion+1] {
		if q.spare() {
			return q
		}
	}
	if a.nregion == maxRegions {
		return nil
	}
	a.nregion++
	r := &region{num: uint32(a.nregion)}
	a.regions[a.nregion] = r
	return r
}

func (r *region) spare() bool { return r.class == nil && !r.foreign }

// parts are the regions that a caller's region consists of, and how many of them: an area has those
// that are carved.
func (a *arena) parts(id uint32) (regions []*region, ok bool) {
	if r := a.byID[id]; r != nil {
		return []*region{r}, true
	}
	of := a.areaOf(id)
	if of == nil {
		return nil, false
	}
	for _, s := range of.spans {
		if s.r != nil {
			regions = append(regions, s.r)
		}
	}
	return regions, true
}

// RemoveRegion drops all that a region holds and takes the region from the engine. It releases the
// lock between slices of its work.
//
// ErrBusy: something in the region is leased or being filled, or some region is being carved. In
// the first case nothing in the region can be found from then on, and no more of it is granted.
// Call again when these uses have ended.
func (e *Engine) RemoveRegion(id uint32) error {
	e.restores.Lock()
	defer e.restores.Unlock()
	e.mu.Lock()
	defer e.unlock()
	if e.closed {
		return tiers.ErrClosed
	}
	regions, ok := e.parts(id)
	if !ok {
		return fmt.Errorf("%w: region %d", tiers.ErrNotFound, id)
	}
	a := e.areaOf(id)
	if a != nil && e.carving || a == nil && regions[0].class == nil {
		// one of its pieces, perhaps, or it
		return fmt.Errorf("%w: a region is being carved", tiers.ErrBusy)
	}
	if a != nil {
		a.going, a.retired = true, false
	}
	for _, r := range regions {
		r.stopGranting()
		r.retired = false // what is not dropped yet may be evicted meanwhile
	}
	used := 0
	for _, r := range regions {
		if err := e.doomAll(id, r); err != nil {
			return err
		}
	}
	for _, r := range regions {
		used += len(r.slots) - r.free - r.spoiled
	}
	if used > 0 {
		return fmt.Errorf("%w: %d slots of region %d are in use", tiers.ErrBusy, used, id)
	}
	for _, r := range regions {
		e.uncarve(r)
	}
	if a != nil {
		e.dropArea(a)
	} else {
		e.dropRegion(regions[0])
	}
	e.relimit()
	return nil
}

// emptying reports whether what a region holds is being dropped.
func (r *region) emptying() bool { return r.draining && !r.retired }

// stopGranting has a carved region hand out no more slots.
func (r *region) stopGranting() {
	if !r.draining {
		r.draining = true
		r.class.free -= r.free
		r.class.slots -= len(r.slots)
	}
}

// goOnGranting has a region hand out slots again: the reverse of stopGranting.
func (r *region) goOnGranting() {
	r.draining = false
	r.class.free += r.free
	r.class.slots += len(r.slots)
}

// retire drains a region that is not being emptied, or ends that, in the books.
func (r *region) retire(retired bool) {
	if retired {
		r.stopGranting()
	} else {
		r.goOnGranting()
	}
	r.retired = retired
}

// doomAll drops all that r holds, which is the caller's region id or a piece of it. It releases the
// lock between slices of its work.
func (e *Engine) doomAll(id uint32, r *region) error {
	a, mem := r.area, r.mem
	for i := 0; i < r.fresh; i++ {
		if r.slots[i].state != free {
			e.doom(r.num<<recordBits|uint32(i), why.Evicted)
		}
		if i%clearSlice == clearSlice-1 {
			if !e.pause() {
				return tiers.ErrClosed
			}
			if r.mem != mem || a == nil && e.byID[id] != r || a != nil && e.areaOf(id) != a {
				return fmt.Errorf("%w: region %d", tiers.ErrNotFound, id)
			}
		}
	}
	return nil
}

// dropRegion takes a region that is not carved out of the books. Its number is used again for the
// next region.
func (a *arena) dropRegion(r *region) {
	delete(a.byID, r.id)
	a.bytes -= r.size
	*r = region{num: r.num, firstGen: r.firstGen}
}

// Spoil withdraws a slot in use for good: its memory is bad, so it is never granted again until its
// region is removed or carved anew. Dropping what the slot holds is up to the caller. It returns
// false if there is no such slot, or if it is free.
func (e *Engine) Spoil(region, slot uint32) bool {
	e.mu.Lock()
	defer e.unlock()
	r := e.byID[region]
	if e.closed || r == nil || int64(slot) >= int64(r.fresh) || r.slots[slot].state == free {
		return false
	}
	r.slots[slot].flags |= spoiled
	return true
}

// classOf is the class of a geometry, made if there is none.
func (e *Engine) classOf(g tiers.Geometry) *class {
	g.PageTokens = 0
	c := e.classes[g]
	if c == nil {
		c = &class{geometry: g, policy: e.newPolicy(false)}
		e.classes[g] = c
	}
	return c
}

// allClasses calls f for each class, foreign ones as well.
func (a *arena) allClasses(f func(c *class)) {
	for _, c := range a.classes {
		f(c)
		if c.foreign != nil {
			f(c.foreign)
		}
	}
}

// relimit computes the classes' limits anew.
func (e *Engine) relimit() {
	for _, c := range e.classes {
		c.uncarved = 0
		for _, a := range e.areas {
			c.uncarved += a.uncarved(c)
		}
		retired := 0 // slots that may be leased, but are not handed out
		for _, r := range c.regions {
			if r.retired {
				retired += len(r.slots)
			}
		}
		slots := c.slots + c.uncarved
		others := float64(max(0, slots+retired-c.frozen)) // slots that no frozen owner has
		c.limit = max(1, int(e.cfg.OwnerShare*others))
		c.most = c.frozen + max(1, int(e.cfg.JointShare*others))
		c.promotable = max(1, int(e.cfg.PromotingShare*float64(slots)))
		if f := c.foreign; f != nil {
			f.limit = max(1, int(e.cfg.OwnerShare*float64(f.slots)))
			f.most = f.slots
		}
	}
	for _, s := range e.byPrint { // what operators pinned is no session's
		s.class.most += s.pinner.slots.n
	}
}

// Room returns how many slots the regions of a geometry have, and how many of them are free.
func (e *Engine) Room(g tiers.Geometry) (slots, free int) {
	g.PageTokens = 0
	e.mu.Lock()
	defer e.unlock()
	if c := e.classes[g]; c != nil && !e.closed {
		return c.slots, c.free
	}
	return 0, 0
}

// RegionStats is a region at one moment.
type RegionStats struct {
	Geometry  tiers.Geometry // PageTokens is 0
	Slots     int
	Free      int
	Spoiled   int // free ones that are never granted again
	Filling   int
	Leased    int // ready ones in use by lookups, loads, pins, extensions, cascades and moves
	SlotBytes int64
	Draining  bool   // it hands out no slots
	LastUse   uint64 // rises with each use of it
}

// Used is how many slots hold something, or are being filled.
func (s *RegionStats) Used() int { return s.Slots - s.Free - s.Spoiled }

// Region returns a region that was added carved; false: there is none.
func (e *Engine) Region(id uint32) (RegionStats, bool) {
	e.mu.Lock()
	defer e.unlock()
	r := e.byID[id]
	if e.closed || r == nil || r.class == nil { // it is being carved
		return RegionStats{}, false
	}
	return RegionStats{
		Slots: len(r.slots), Free: r.free, Spoiled: r.spoiled, Filling: r.filling, Leased: r.leased,
		Draining: r.draining, LastUse: r.lastUse,
		Geometry: r.class.geometry, SlotBytes: r.class.slotBytes(),
	}, true
}
