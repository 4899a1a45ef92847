package engine

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"

	"lookaside/tiers"
)

// Handover: the engine of another process goes on with what this one's owners and operators hold.
// It has restored the same chunks in the same slots. Slots that are still being read there are not
// granted, whatever has become of their chunks.

// Handover is what an engine's owners and operators hold at one moment. It says of a few things
// only how many there are: these are not handed over, and should have ended.
type Handover struct {
	Owners []Holding
	Pins   []HeldPin
	Uses   uint32 // no handle so far is of more; see BeginImport

	Stores  int // that have not ended
	Waiting int // lookups that wait for promotions
	Foreign int // loads of slots that peers lent
}

// Holding is what one owner holds.
type Holding struct {
	Owner   Owner
	Space   tiers.Fingerprint
	Takers  int  // see SetTakers; 0: it was not called
	Own     bool // AddArenaOwner or AddLender added it
	Lookups []HeldLookup
	Loads   []HeldLoad
}

// Held is a run of pages that is leased.
type Held struct {
	First, Pages int
	Slots        []Place // of the chunks
	Ends         []byte  // digests of the last pages of the run in each chunk, end to end
}

// Place is where a slot begins.
type Place struct {
	Region uint32
	Offset uint64 // bytes
}

// HeldLookup is a lookup and what it holds.
type HeldLookup struct {
	Held
	Lookup uint64        // its id
	Takers int           // loads that are still to take it over
	Left   time.Duration // until its deadline
}

// HeldLoad is a load and what it reads.
type HeldLoad struct {
	Held
	Load uint64 // its handle
}

// HeldPin is a pin.
type HeldPin struct {
	Held
	Pin   uint64 // its handle
	Space tiers.Fingerprint
}

// Export returns what owners and operators hold. Lookups end before the first chunk that was
// dropped or that a peer lent. What is lent to peers is not in it. It holds the lock throughout,
// for some 50 ns a slot. Of a closed engine it returns nothing.
func (e *Engine) Export() (h Handover) {
	e.mu.Lock()
	defer e.unlock()
	if e.closed {
		return h
	}
	h.Uses = e.leases.skipped
	for _, x := range e.leases.all {
		h.Uses = max(h.Uses, x.gen)
	}
	for _, ow := range e.owners {
		if !ow.leaving {
			h.Owners = append(h.Owners, e.exportOwner(ow, &h))
		}
	}
	slices.SortFunc(h.Owners, func(a, b Holding) int { return cmp.Compare(a.Owner, b.Owner) })
	for _, s := range e.spaces {
		if s == nil {
			continue
		}
		for x := s.pinner.all.first; x != nil; x = x.inOwner.next {
			if held := e.exportRun(s, x, x.slots); held.Pages > 0 {
				h.Pins = append(h.Pins, HeldPin{Held: held, Pin: x.handle(), Space: s.print})
			}
		}
	}
	return h
}

// exportOwner returns what an owner holds, and counts in h what it leaves out.
func (e *Engine) exportOwner(ow *owner, h *Handover) Holding {
	out := Holding{Owner: ow.id, Space: ow.space.print, Takers: ow.takers, Own: ow.own}
	now := e.cfg.Now()
	for x := ow.all.first; x != nil; x = x.inOwner.next {
		switch {
		case x.kind == storeLease:
			h.Stores++
		case x.kind == lookupLease && x.lookup.waiting:
			h.Waiting++
		case x.kind == lookupLease:
			if held := e.exportRun(ow.space, x, x.slots); held.Pages > 0 {
				out.Lookups = append(out.Lookups, HeldLookup{Held: held, Lookup: x.lookup.id,
					Takers: x.lookup.takers, Left: time.Duration(x.lookup.deadline - now)})
			}
		case x.kind == loadLease && slices.ContainsFunc(x.slots, e.isForeign):
			h.Foreign++
		case x.kind == loadLease:
			out.Loads = append(out.Loads, HeldLoad{Held: e.exportRun(ow.space, x, x.slots),
				Load: x.handle()})
		}
	}
	return out
}

// exportRun returns what a lease holds. Unless it is a load's, it ends before the first slot that
// cannot be found, or is a foreign one.
func (e *Engine) exportRun(sp *space, x *lease, slots []uint32) Held {
	h := Held{First: x.first, Slots: make([]Place, 0, len(slots))}
	ppc, end := sp.g.PagesPerChunk, x.first+x.n
	var buf [32]byte
	for i, ref := range slots {
		r, s := e.slot(ref)
		start := (x.first/ppc + i) * ppc
		if x.kind != loadLease && (s.doomed() || r.foreign) {
			end = start
			break
		}
		last := min(end, start+ppc) - 1
		h.Slots = append(h.Slots, Place{r.id, r.offset(ref, 0)})
		h.Ends = append(h.Ends, r.digestBytes(ref&recordMask, last%ppc, &buf)...)
	}
	h.Pages = max(0, end-x.first)
	return h
}

// BeginImport takes over what the engine of another process had for its operators, when what was in
// its slots has been restored, and before it has any owner. A pin ends before the first chunk that
// is not there any more. Handles of the other engine that have ended stay ended. ErrInvalid: no
// engine can have had that.
func (e *Engine) BeginImport(h *Handover) error {
	e.mu.Lock()
	defer e.unlock()
	if e.closed {
		return tiers.ErrClosed
	}
	if len(e.owners) > 0 {
		return fmt.Errorf("%w: there are %d owners", tiers.ErrBusy, len(e.owners))
	}
	e.leases.skip(h.Uses)
	e.tick++
	for i := range h.Pins {
		p := &h.Pins[i]
		s := e.byPrint[p.Space]
		if s == nil {
			continue
		}
		if err := p.fits(s); err != nil {
			return err
		}
		if err := e.leases.mayImport(p.Pin); err != nil {
			return err
		}
		slots, pages := e.importRun(&s.pinner, &p.Held)
		if pages == 0 {
			continue
		}
		x := e.leases.addAs(pinLease, &s.pinner, slots, p.Pin)
		x.first, x.n = p.First, pages
	}
	e.relimit()
	return nil
}

// Import gives an owner, which was added just now, what it held in the engine of another process,
// under the same names and handles. h.Owner does not matter. A lookup ends before the first chunk
// that is not there any more, and its deadline goes on. A load keeps all its slots, also those
// whose chunk was dropped: nothing may be written to them before Release. The limits of owners are
// not applied.
//
// The regions should be drained from before they were restored until after Import: else a slot may
// have been granted that a load reads. ErrBusy: one was; ErrInvalid: no engine can have had that;
// ErrIncompatible: the owner is in another space. The owner should be removed then.
func (e *Engine) Import(o Owner, h *Holding) error {
	e.mu.Lock()
	defer e.unlock()
	ow, err := e.owner(o)
	if err != nil {
		return err
	}
	if ow.space.print != h.Space {
		return fmt.Errorf("%w: owner %d is in space %s, and was in %s", tiers.ErrIncompatible, o,
			ow.space.print.Short(), h.Space.Short())
	}
	if ow.all.first != nil {
		return fmt.Errorf("%w: owner %d has leases", tiers.ErrBusy, o)
	}
	e.tick++
	for i := range h.Loads {
		if err := e.importLoad(ow, &h.Loads[i]); err != nil {
			return err
		}
	}
	now := e.cfg.Now()
	for i := range h.Lookups {
		l := &h.Lookups[i]
		if err := l.fits(ow.space); err != nil {
			return err
		}
		if ow.lookups[l.Lookup] != nil {
			return invalid("lookup %d twice", l.Lookup)
		}
		slots, pages := e.importRun(ow, &l.Held)
		if pages == 0 {
			continue
		}
		x := e.leases.addLookup(ow, l.Lookup, l.First, slots)
		x.n, x.lookup.takers = pages, l.Takers
		x.lookup.deadline = now + int64(min(l.Left, e.cfg.LeaseDeadline))
		e.leases.expiry.insert(x)
	}
	return nil
}

// fits reports whether an engine can have leased a run in a space.
func (h *Held) fits(s *space) error {
	ppc := s.g.PagesPerChunk
	if h.First < 0 || h.Pages < 1 || h.First > maxPage || h.Pages > maxPage ||
		len(h.Slots) != (h.First+h.Pages-1)/ppc-h.First/ppc+1 ||
		len(h.Ends) != len(h.Slots)*s.g.DigestBytes {
		return invalid("%d pages from %d held in %d slots that end with %d bytes", h.Pages, h.First,
			len(h.Slots), len(h.Ends))
	}
	return nil
}

// part is how many pages chunk i of a run must have, and the digest of the last of them.
func (h *Held) part(s *space, i int) (chunk, pages int, end []byte) {
	ppc := s.g.PagesPerChunk
	chunk = h.First/ppc + i
	return chunk, min(h.First+h.Pages-chunk*ppc, ppc), h.Ends[i*s.g.DigestBytes:][:s.g.DigestBytes]
}

// importRun leases what is held of a run for an owner, up to the first chunk that is not.
func (e *Engine) importRun(ow *owner, h *Held) (slots []uint32, pages int) {
	for i, at := range h.Slots {
		ref := e.placed(ow.space, at)
		chunk, n, end := h.part(ow.space, i)
		if ref == 0 || !e.hasPages(ow.space, ref, chunk, n, end) {
			break
		}
		e.importSlot(ow, ref)
		slots = append(slots, ref)
		pages = chunk*ow.space.g.PagesPerChunk + n - h.First
	}
	return slots, pages
}

// importLoad has an owner read what it read in another process.
func (e *Engine) importLoad(ow *owner, l *HeldLoad) error {
	if err := l.fits(ow.space); err != nil {
		return err
	}
	if err := e.leases.mayImport(l.Load); err != nil {
		return err
	}
	var slots []uint32
	for i, at := range l.Slots {
		ref := e.placed(ow.space, at)
		chunk, n, end := l.part(ow.space, i)
		if ref != 0 && !e.hasPages(ow.space, ref, chunk, n, end) && !e.block(ow.space, ref, chunk) {
			ref = 0
		}
		if ref == 0 {
			e.unlease(ow, slots)
			return fmt.Errorf("%w: no slot, or one that was granted, at byte %d of region %d",
				tiers.ErrBusy, at.Offset, at.Region)
		}
		e.importSlot(ow, ref)
		slots = append(slots, ref)
	}
	x := e.leases.addAs(loadLease, ow, slots, l.Load)
	x.first, x.n = l.First, l.Pages
	ow.loads++
	return nil
}

// importSlot leases a ready slot for an owner that had it already. It was readable then.
func (e *Engine) importSlot(ow *owner, ref uint32) {
	_, s := e.slot(ref)
	e.vouch(s)
	ow.slots.add(ref, math.MaxInt)
	if s.doomed() {
		s.pins++
		e.leases.pins++
		return
	}
	e.pin(ref)
}

// placed returns the slot of a space's geometry that begins at a place. 0: there is none.
func (e *Engine) placed(s *space, at Place) uint32 {
	for _, r := range s.class.regions {
		if r.id != at.Region || at.Offset > math.MaxInt64 || int64(at.Offset) < r.at.Offset {
			continue
		}
		from := int64(at.Offset) - r.at.Offset
		if i := from / r.at.Stride; from%r.at.Stride == 0 && i < int64(len(r.slots)) {
			return r.num<<recordBits | uint32(i)
		}
	}
	return 0
}

// hasPages reports whether a slot holds the first pages of a chunk, the last of them with a digest.
func (e *Engine) hasPages(sp *space, ref uint32, chunk, pages int, end []byte) bool {
	r, s := e.slot(ref)
	return int(ref&recordMask) < r.fresh && s.state == ready && !s.doomed() && s.space == sp.id &&
		int(s.chunk) == chunk && int(s.pages) >= pages &&
		equal(r.digest(ref&recordMask, pages-1), end)
}

// block has a slot be as if it held a chunk of a space that was dropped and is still read. What it
// holds is dropped. It returns false if the slot is in use.
func (e *Engine) block(sp *space, ref uint32, chunk int) bool {
	r, i := e.regions[ref>>recordBits], ref&recordMask
	if int(i) < r.fresh {
		switch s := &r.slots[i]; {
		case s.state == ready && s.doomed(): // blocked before
			return s.space == sp.id && int(s.chunk) == chunk
		case s.state == filling || s.state == ready && !s.idle():
			return false
		case s.state == ready:
			e.doom(ref)
		}
	}
	gen, ok := r.claim(i)
	if !ok {
		return false
	}
	r.free--
	if !r.draining {
		r.class.free--
	}
	sp.chunks++
	r.slots[i] = slot{stamp: e.tick, gen: gen, chunk: uint32(chunk), space: sp.id, state: ready,
		flags: doomed}
	r.kin[i] = kin{}
	r.lease()
	return true
}

// claim takes a slot out of those that are listed as free, and returns its generation. It returns
// false if it is not there.
func (r *region) claim(i uint32) (gen uint32, ok bool) {
	for ; r.fresh <= int(i); r.fresh++ {
		r.slots[r.fresh] = slot{gen: r.firstGen}
		r.kin[r.fresh].next = r.freeList
		r.freeList = uint32(r.fresh) + 1
	}
	for at := &r.freeList; *at != 0; at = &r.kin[*at-1].next {
		if *at == i+1 {
			*at = r.kin[i].next
			return r.slots[i].gen, true
		}
	}
	return 0, false
}

// LastUses appends to out a number for each slot of a piece that holds something, and 0 for the
// others. It rises with the slot's last use: Restored.Order keeps the order of eviction. It
// releases the lock between slices of its work. ErrNotFound: there is no such piece.
func (e *Engine) LastUses(piece uint32, out []uint64) ([]uint64, error) {
	e.mu.Lock()
	defer e.unlock()
	if piece == 0 || int(piece) > e.nregion || e.closed {
		return out, fmt.Errorf("%w: piece %d", tiers.ErrNotFound, piece)
	}
	r := e.regions[piece]
	mem := r.mem
	if mem == nil || r.foreign {
		return out, fmt.Errorf("%w: piece %d", tiers.ErrNotFound, piece)
	}
	for i := range r.slots {
		used := uint64(0)
		if s := &r.slots[i]; i < r.fresh && s.state == ready && !s.doomed() {
			used = max(s.stamp, 1)
		}
		out = append(out, used)
		if i%clearSlice == clearSlice-1 && (!e.pause() || r.mem != mem) {
			return out, fmt.Errorf("%w: piece %d", tiers.ErrNotFound, piece)
		}
	}
	return out, nil
}
