package engine

import (
	"fmt"
	"math/bits"
	"sync/atomic"

	"lookaside/dax"
	"lookaside/tiers"
	"lookaside/tiers/tenant"
)

// Carving: a region gets slots for one geometry, or loses them. The tables lie off the Go heap, and
// are mapped and unmapped without the lock.

// carve makes slots of a region for a class. It releases the lock while it allocates.
func (e *Engine) carve(r *region, c *class, slots int, at Placement) error {
	need := e.records + slots*c.geometry.PagesPerChunk
	indexWords := 0
	if need > e.idx.limit() {
		e.carving = true
		for e.idx.migrating() && !e.closed {
			e.idx.migrate(clearSlice)
			e.pause()
		}
		e.carving = false
		if e.closed {
			return tiers.ErrClosed
		}
		if e.idx.cur.mem == nil {
			need = max(need, int(min(e.cfg.ArenaLimitBytes/c.geometry.PageBytes,
				maxRegions*recordMask))) + e.foreignSlots(c.geometry)*c.geometry.PagesPerChunk
		} else {
			need += need / 4
		}
		indexWords = tableWords(need)
	}
	spec := tableSpec{
		slots: slots, ppc: c.geometry.PagesPerChunk, words: c.geometry.DigestBytes / 8,
		routes: len(e.cfg.Tiers) > 0 && !c.isForeign, places: c.isForeign,
		indexWords: indexWords, pieces: 1,
	}
	block := c.block
	if r.area != nil {
		spec.pieces = blockPieces
	}
	if block != nil {
		block.hold()
	}
	e.carving = true
	e.mu.Unlock()
	m, err := makeCarved(block, spec)
	e.mu.Lock()
	e.carving = false
	if err != nil {
		e.stats.CarveFailures++
		return err
	}
	if e.closed {
		m.close()
		return tiers.ErrClosed
	}
	if m.block != c.block {
		e.dropBlock(c)
		c.block = m.block
		c.block.hold()
	}
	if m.index != nil {
		e.idx.grow(m.index)
		m.index = nil
	}
	*r = region{
		id: r.id, num: r.num, size: r.size, area: r.area, class: c, at: at,
		ppc: c.geometry.PagesPerChunk, shift: logarithm(c.geometry.PagesPerChunk),
		words: c.geometry.DigestBytes / 8,
		slots: m.slots, kin: m.kin, digests: m.digests, links: m.links.Slice(), routes: m.routes,
		places: m.places, tenants: m.tenants, kinds: m.kinds, born: m.born,
		firstGen: r.firstGen, free: slots, lastUse: e.tick, mem: m, foreign: c.isForeign,
	}
	c.policy.Grow(r.num, slots)
	c.regions = append(c.regions, r)
	c.slots += slots
	c.free += slots
	if r.area != nil && r.area.retired {
		r.retire(true)
	}
	e.records += slots * r.ppc
	e.relimit()
	if e.cfg.OnCarve != nil && !r.foreign {
		e.cfg.OnCarve(r.piece())
	}
	return nil
}

// dropBlock ends a class's hold on its block.
func (a *arena) dropBlock(c *class) {
	if c.block != nil {
		a.trash = append(a.trash, &carved{block: c.block})
		c.block = nil
	}
}

// logarithm of a power of two; -1 for other numbers.
func logarithm(n int) int8 {
	if n&(n-1) != 0 {
		return -1
	}
	return int8(bits.TrailingZeros(uint(n)))
}

// drain empties a region and takes it from its class. It returns false, and leaves the region with
// its class, if something in it is used meanwhile. It releases the lock between slices of its work.
func (e *Engine) drain(r *region) bool {
	r.stopGranting()
	for i := 0; i < r.fresh; i++ {
		s := &r.slots[i]
		if s.state == filling || s.state == ready && !s.idle() {
			r.goOnGranting()
			return false
		}
		if s.state == ready {
			e.expel(r.num<<recordBits | uint32(i))
		}
		if i%clearSlice == clearSlice-1 {
			if !e.pause() {
				return false
			}
		}
	}
	if r.leased != 0 || r.free+r.spoiled != len(r.slots) {
		panic(fmt.Sprintf("engine: an emptied region has %d of %d slots free, %d leased", r.free,
			len(r.slots), r.leased))
	}
	e.stats.Recarved++
	e.uncarve(r)
	e.relimit()
	return true
}

// uncarve takes an empty region that hands out no slots from its class.
func (e *Engine) uncarve(r *region) {
	c := r.class
	for i := range c.regions {
		if c.regions[i] == r {
			c.regions = append(c.regions[:i], c.regions[i+1:]...)
			break
		}
	}
	c.policy.Shrink(r.num)
	e.records -= len(r.slots) * r.ppc
	e.trash = append(e.trash, r.mem)
	if e.cfg.OnUncarve != nil && !r.foreign {
		e.cfg.OnUncarve(r.num)
	}
	gen := r.firstGen
	for i := range r.slots[:r.fresh] {
		gen = max(gen, r.slots[i].gen)
	}
	if r.area == nil {
		*r = region{id: r.id, num: r.num, size: r.size, firstGen: gen + 1}
		return
	}
	r.area.free(r)
	*r = region{num: r.num, firstGen: gen + 1}
}

func (e *Engine) takeTrash() ([]*carved, []*dax.Table[uint64]) {
	a, b := e.trash, e.idx.garbage
	e.trash, e.idx.garbage = nil, nil
	return a, b
}

func emptyTrash(c []*carved, t []*dax.Table[uint64]) {
	for _, m := range c {
		m.close()
	}
	for _, m := range t {
		m.Close()
	}
}

// carved is what carving a region takes, made outside the lock.
type carved struct {
	block *tableBlock
	part  []byte // of it, in which the tables lie

	slots   []slot
	kin     []kin
	digests []uint64 // nil: a slot has one page
	tenants []tenant.ID
	kinds   []kind
	born    []uint32
	routes  []route // nil: not wanted
	places  []place // likewise
	// by record; hardly any are ever written, so they take no huge pages of the block
	links *dax.Table[link]
	index *dax.Table[uint64] // nil: not wanted
}

// tableBlock is memory for the tables of several pieces of one geometry, one behind another. The
// tables of one piece would be too small for huge pages, and without these each look at a slot
// takes longer.
type tableBlock struct {
	table *dax.Table[byte]
	rest  []byte       // that is in no piece's use and never was; carving's alone
	users atomic.Int32 // pieces, and the class for its next piece
}

func (b *tableBlock) hold() { b.users.Add(1) }

func (b *tableBlock) release() {
	if b.users.Add(-1) == 0 {
		b.table.Close()
	}
}

// blockPieces is for how many pieces a block has room: it is address space until they come.
const blockPieces = piecesOfArena

// tableSpec is what tables a region of slots has.
type tableSpec struct {
	slots, ppc, words int
	routes, places    bool
	indexWords        int // 0: no index
	pieces            int // for how many regions to make a block, if one must be made
}

func (t *tableSpec) bytes() int {
	n := dax.CutBytes[slot](t.slots) + dax.CutBytes[kin](t.slots) + dax.CutBytes[uint64](
		t.digests()) + dax.CutBytes[tenant.ID](t.slots) + dax.CutBytes[kind](t.slots) +
		dax.CutBytes[uint32](t.slots)
	if t.routes {
		n += dax.CutBytes[route](t.slots)
	}
	if t.places {
		n += dax.CutBytes[place](t.slots)
	}
	return n
}

func (t *tableSpec) digests() int { return t.slots * (t.ppc - 1) * t.words }

// makeCarved makes the tables of a region in a block, or in a new block if that one has no room.
// block may be nil. The caller's hold on block passes to the result, or ends.
func makeCarved(block *tableBlock, spec tableSpec) (_ *carved, err error) {
	bytes := spec.bytes()
	if block != nil && len(block.rest) < bytes {
		block.release()
		block = nil
	}
	if block == nil {
		table, err := dax.NewTable[byte](bytes * spec.pieces)
		if err != nil {
			return nil, err
		}
		block = &tableBlock{table: table, rest: table.Slice()}
		block.hold()
	}
	c := &carved{block: block, part: block.rest[:bytes:bytes]}
	c.links, err = dax.NewTable[link](spec.slots * spec.ppc)
	if err == nil && spec.indexWords > 0 {
		c.index, err = dax.NewTable[uint64](spec.indexWords)
	}
	if err != nil {
		c.close()
		return nil, err
	}
	left := block.rest
	c.slots, left = dax.Cut[slot](left, spec.slots)
	c.kin, left = dax.Cut[kin](left, spec.slots)
	c.tenants, left = dax.Cut[tenant.ID](left, spec.slots)
	c.kinds, left = dax.Cut[kind](left, spec.slots)
	c.born, left = dax.Cut[uint32](left, spec.slots)
	if spec.ppc > 1 {
		c.digests, left = dax.Cut[uint64](left, spec.digests())
	}
	if spec.routes {
		c.routes, left = dax.Cut[route](left, spec.slots)
	}
	if spec.places {
		c.places, left = dax.Cut[place](left, spec.slots)
	}
	block.rest = left
	return c, nil
}

// close gives the memory back. A carved that has only a block ends one hold on that.
func (c *carved) close() {
	if len(c.part) > 0 {
		dax.Discard(c.part)
	}
	c.block.release()
	if c.links != nil {
		c.links.Close()
	}
	if c.index != nil {
		c.index.Close()
	}
}
