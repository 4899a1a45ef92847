package engine

import (
	"fmt"
	"math"
	"slices"

	"lookaside/tiers"
)

// How geometries share the arena. The caller's region (AddRegion) is called an area here.
// Stores carve it piece by piece, each piece for one geometry. All other files call a piece a
// region. A geometry that needs slots
// takes the first of these that there is:
//
//  1. Memory that is not carved.
//  2. Pieces of other geometries that hold nothing.
//  3. Pieces that have not been used for a while (agedAfter), if it would itself have to evict
//     something newer.
//  4. The coldest piece of a geometry that has more of the arena than it, and has no less
//     afterwards. A geometry that has nothing takes any piece.
//
// So each gets as much as any other, if it wants it, and two that want all of the arena do not take
// the same pieces from one another over and over. A geometry evicts its own chunks instead if they
// have not been used for a while.
//
// Nothing that is leased or being filled is ever taken. What a taken piece holds is dropped: moving
// its chunks elsewhere would cost a copy of each, and a session that wants them stores them again.

// area is a region of the arena that is carved piece by piece.
type area struct {
	id      uint32
	size    int64
	spans   []span // all of it, in its order; no two neighbours are both not carved
	retired bool   // it is drained, as are all its pieces; no piece comes or goes
	going   bool   // it is being removed
}

// span is a part of an area: a piece, or with a nil region what is not carved.
type span struct {
	at, size int64
	r        *region
}

func newArea(id uint32, size int64) *area {
	return &area{id: id, size: size, spans: []span{{size: size}}}
}

// areaOf returns the area of a caller's region, nil if there is none.
func (a *arena) areaOf(id uint32) *area {
	for _, of := range a.areas {
		if of.id == id {
			return of
		}
	}
	return nil
}

// uncarved is how many slots a class could have in what is not carved.
func (a *area) uncarved(c *class) (slots int) {
	if a.going || a.retired {
		return 0
	}
	for _, s := range a.spans {
		if s.r == nil {
			slots += c.slotsIn(s.size)
		}
	}
	return slots
}

// take makes a part of span i, which is not carved, a piece.
func (a *area) take(i int, at int64, r *region) {
	s := a.spans[i]
	parts := []span{{s.at, at - s.at, nil}, {at, r.size, r},
		{at + r.size, s.at + s.size - at - r.size, nil}}
	parts = slices.DeleteFunc(parts, func(p span) bool { return p.size == 0 })
	a.spans = slices.Replace(a.spans, i, i+1, parts...)
}

// free makes a piece memory that is not carved.
func (a *area) free(r *region) {
	i := slices.IndexFunc(a.spans, func(s span) bool { return s.r == r })
	a.spans[i].r = nil
	if i+1 < len(a.spans) && a.spans[i+1].r == nil {
		a.spans[i].size += a.spans[i+1].size
		a.spans = slices.Delete(a.spans, i+1, i+2)
	}
	if i > 0 && a.spans[i-1].r == nil {
		a.spans[i-1].size += a.spans[i].size
		a.spans = slices.Delete(a.spans, i, i+1)
	}
}

// agedAfter is how long (ns) a piece must have been unused before a geometry with as much of the
// arena may take it, to within a factor of two.
const agedAfter = int64(5 * 60e9)

// aged knows the tick before which a use was long ago. Uses are ordered by ticks, so the clock is
// noted beside them now and then.
type aged struct {
	noted         int64
	before, since uint64 // agedAfter to twice agedAfter ago, and less than that
}

// note notes the tick that it is now.
func (a *aged) note(now int64, tick uint64) {
	if now-a.noted >= agedAfter {
		a.noted, a.before, a.since = now, a.since, tick
	}
}

// growPatience is how long (ns) a geometry that wants memory waits for the arena to grow before it
// takes some from another geometry.
const growPatience = int64(1e9)

// makeRoom carves one more piece for a class, of memory that is not carved or of what the class may
// take from another one. It releases the lock while it allocates and between slices of longer work.
// ok reports whether there are new slots, unlocked whether others may have changed anything.
func (e *Engine) makeRoom(c *class) (ok, unlocked bool) {
	if e.carving || e.cfg.FixedRegions {
		return false, false
	}
	if a, i := e.uncarvedFor(c); a != nil {
		return e.carvePiece(a, i, c) == nil, true
	}
	a, at, taken := e.takeFor(c)
	if a == nil {
		return false, false
	}
	e.carving = true
	for _, r := range taken {
		if !e.drain(r) {
			e.carving = false
			return false, true
		}
	}
	e.carving = false
	i := slices.IndexFunc(a.spans, func(s span) bool {
		return s.r == nil && s.at <= at &&
			at < s.at+s.size
	})
	return e.carvePiece(a, i, c) == nil, true
}

// pieceSlots is how many slots of a class a piece has that is carved from so many bytes. 0: there
// is no room for one. What is left should be as large as a piece, or nothing.
func (e *Engine) pieceSlots(c *class, bytes int64) int {
	most := c.slotsIn(bytes)
	want := min((e.pieceBytes()+c.slotBytes()-1)/c.slotBytes(), recordMask)
	if int64(most) < 2*want {
		return most
	}
	return int(want)
}

// piecesOfArena is how many pieces the arena is carved into, or some more: less would be few to
// share out, and each takes the number of a region.
const piecesOfArena = 32

// pieceBytes is the size of a piece. With many regions pieces are larger, as each region that is
// added takes a number, too.
func (e *Engine) pieceBytes() int64 {
	numbers := maxRegions - maxForeign - max(e.cfg.Regions, len(e.areas))
	return max(1, max(e.cfg.ArenaLimitBytes, e.bytes)/int64(min(max(numbers, 1), piecesOfArena)))
}

// uncarvedFor finds memory that is not carved and has room for a slot of a class. What is smaller
// than a piece is left when few numbers for regions are: those are for what peers lend, and for
// regions to come.
func (e *Engine) uncarvedFor(c *class) (a *area, i int) {
	spare := maxRegions - e.nregion
	for _, r := range e.regions[1 : e.nregion+1] {
		spare += b2i(r.spare())
	}
	if spare == 0 {
		return nil, 0
	}
	for _, a := range e.areas {
		if a.going || a.retired {
			continue
		}
		for i, s := range a.spans {
			if s.r == nil && c.slotsIn(s.size) > 0 && (spare > maxForeign ||
				s.size >= e.pieceBytes() || s.size == a.size) {
				return a, i
			}
		}
	}
	return nil, 0
}

// carvePiece makes a piece for a class from span i of an area, which is not carved. It releases the
// lock while it allocates.
func (e *Engine) carvePiece(a *area, i int, c *class) error {
	return e.carveAt(e.spareRegion(), a, i, c, a.spans[i].at, e.pieceSlots(c, a.spans[i].size))
}

// carveAt makes r, which is not in use, a piece of so many slots for a class, that begins at a byte
// of span i of an area. It releases the lock while it allocates.
func (e *Engine) carveAt(r *region, a *area, i int, c *class, at int64, slots int) error {
	r.id, r.size, r.area = a.id, int64(slots)*c.slotBytes(), a
	a.take(i, at, r)
	err := e.carve(r, c, slots, Placement{Offset: at, Stride: c.slotBytes()})
	if err != nil && !e.closed {
		a.free(r)
		*r = region{num: r.num, firstGen: r.firstGen}
	}
	return err
}

// RestorePiece carves a piece of a region as it was in another run, and returns its number. p.Num
// does not matter. RestoreIn names what it held. The region must be drained, and stay so until
// EndRestore: then no slot of the piece is granted before. RestorePiece releases the lock while it
// allocates.
//
// ErrInvalid: no run can have had such a piece there, or a part of it is carved; ErrNotFound: there
// is no such region, or it was added carved; ErrBusy: it is not drained, a region is being carved,
// or there are MaxPieces already.
func (e *Engine) RestorePiece(p Piece) (num uint32, err error) {
	p.Geometry.PageTokens = 1 // does not matter either
	if err := p.Geometry.Validate(e.cfg.MinPageBytes); err != nil {
		return 0, err
	}
	ppc := p.Geometry.PagesPerChunk
	bytes := p.Geometry.PageBytes * int64(ppc)
	if p.Slots < 1 || p.Slots > recordMask/ppc || bytes > math.MaxInt64/int64(p.Slots) ||
		p.Stride != bytes {
		return 0, invalid("a piece of %d slots of %d bytes, one every %d", p.Slots, bytes, p.Stride)
	}
	size := bytes * int64(p.Slots)
	e.mu.Lock()
	defer e.unlock()
	if e.closed {
		return 0, tiers.ErrClosed
	}
	a := e.areaOf(p.Region)
	if a == nil {
		return 0, fmt.Errorf("%w: region %d", tiers.ErrNotFound, p.Region)
	}
	if e.carving || !a.retired {
		return 0, fmt.Errorf("%w: region %d is not drained, or a region is being carved",
			tiers.ErrBusy, p.Region)
	}
	i := slices.IndexFunc(a.spans, func(s span) bool {
		return s.r == nil && s.at <= p.Offset && size <= s.size && p.Offset-s.at <= s.size-size
	})
	if i < 0 {
		return 0, invalid("a piece of %d bytes at byte %d of region %d, where not all is free",
			size, p.Offset, p.Region)
	}
	r := e.spareRegion()
	if r == nil {
		return 0, fmt.Errorf("%w: %d pieces are the most", tiers.ErrBusy, MaxPieces)
	}
	if err := e.carveAt(r, a, i, e.classOf(p.Geometry), p.Offset, p.Slots); err != nil {
		return 0, err
	}
	return r.num, nil
}

// held is the bytes of a class's regions.
func (c *class) held() (bytes int64) {
	for _, r := range c.regions {
		bytes += r.size
	}
	return bytes
}

// window is neighbouring spans of an area that a class could take together.
type window struct {
	a        *area
	at, size int64
	regions  []*region
	cost     [4]uint64 // what it would cost their owners, most important first: the least is taken
}

// takeFor chooses what a class may take from others: the pieces to empty, and where the memory
// lies. Without an area there is nothing to take, or the arena should grow first.
func (e *Engine) takeFor(c *class) (a *area, at int64, taken []*region) {
	if len(e.classes) == 1 || len(e.staging.regions) > 0 { // what is being restored looks empty
		return nil, 0, nil
	}
	var best window
	t := taker{e: e, c: c, held: c.held(), oldest: e.oldest(c), others: map[*class]int64{}}
	for _, a := range e.areas {
		for i := range a.spans {
			if w, ok := t.window(a, i); ok && (best.a == nil ||
				slices.Compare(w.cost[:], best.cost[:]) < 0) {
				best = w
			}
		}
	}
	if best.a == nil || e.waitsForGrowth() {
		return nil, 0, nil
	}
	return best.a, best.at, best.regions
}

// oldest is the last use of what a class would evict next, the largest number if there is nothing.
func (e *Engine) oldest(c *class) uint64 {
	before := uint64(math.MaxUint64)
	if ref, ok := e.nextVictim(c, evictionOrder); ok {
		_, s := e.slot(ref)
		before = s.stamp
	}
	if c.cold > 0 {
		for i := range c.parts {
			if ref := c.parts[i].coldFirst; ref != 0 {
				_, s := e.slot(ref)
				before = min(before, s.stamp)
			}
		}
	}
	return before
}

// waitsForGrowth reports whether the arena should be given time to grow.
func (e *Engine) waitsForGrowth() bool {
	if e.bytes >= e.cfg.ArenaLimitBytes {
		return false
	}
	now := e.cfg.Now()
	if !e.waiting {
		e.waiting, e.wanted = true, now
	}
	return now-e.wanted < growPatience
}

// taker is a class that looks for memory of others.
type taker struct {
	e      *Engine
	c      *class
	held   int64
	oldest uint64           // see Engine.oldest
	others map[*class]int64 // what they hold, as far as it was asked
}

// window returns the fewest spans from span i of an area on that have room for a slot, if the class
// may take all of them.
func (t *taker) window(a *area, i int) (w window, ok bool) {
	w = window{a: a, at: a.spans[i].at}
	var pieces int64
	for ; i < len(a.spans) && t.c.slotsIn(w.size) == 0; i++ {
		s := a.spans[i]
		w.size += s.size
		if s.r == nil {
			continue
		}
		if r := s.r; r.class == nil || r.class == t.c || r.draining || r.leased > 0 ||
			r.filling > 0 {
			return w, false
		}
		pieces += s.size
		w.regions = append(w.regions, s.r)
	}
	if t.c.slotsIn(w.size) == 0 || len(w.regions) == 0 {
		return w, false
	}
	for _, r := range w.regions {
		cost, ok := t.cost(r, pieces)
		if !ok {
			return w, false
		}
		if slices.Compare(cost[:], w.cost[:]) > 0 {
			w.cost = cost
		}
	}
	w.cost[3] = uint64(w.size)
	return w, true
}

// cost returns what it costs to take a region as one of pieces of so many bytes. It returns false
// if the region must not be taken.
func (t *taker) cost(r *region, pieces int64) (cost [4]uint64, ok bool) {
	aged := t.e.aged.before
	theirs, known := t.others[r.class]
	if !known {
		theirs = r.class.held()
		t.others[r.class] = theirs
	}
	switch {
	case r.free+r.spoiled == len(r.slots):
		return cost, true
	case r.lastUse < aged && r.lastUse < t.oldest:
		return [4]uint64{1, r.lastUse}, true
	case len(t.c.regions) > 0 && (t.held+pieces > theirs-pieces ||
		t.oldest < aged && t.oldest <= r.lastUse):
		return cost, false
	}
	return [4]uint64{2, uint64(math.MaxInt64 - theirs), r.lastUse}, true
}

// dropArea takes an area of which nothing is carved out of the books.
func (a *arena) dropArea(of *area) {
	a.areas = slices.DeleteFunc(a.areas, func(b *area) bool { return of == b })
	a.bytes -= of.size
}
