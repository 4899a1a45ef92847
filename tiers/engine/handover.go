package engine

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/tenant"
	"lookaside/tiers/why"
)

// Handover: the engine of another process goes on with what this one's owners and operators hold.
// It has restored the same chunks in the same slots. Slots that may still be read or written to
// under a grant of this one are not granted there, whatever has become of their chunks.

// HeldKind is what holds slots.
type HeldKind uint8

const (
	HeldLookup HeldKind = iota + 1
	HeldLoad
	HeldStore // a slot of a store that has not ended: it may still be written to
	HeldPin
)

func (k HeldKind) String() string {
	if k > HeldPin {
		return fmt.Sprintf("HeldKind(%d)", k)
	}
	return [...]string{"nothing", "lookup", "load", "store", "pin"}[k]
}

// Held is a run of pages that is leased.
type Held struct {
	Kind   HeldKind
	Owner  Owner         // not of a pin
	Space  SpaceID       // of a pin
	Lookup uint64        // its id
	Handle uint64        // of a load or a pin
	Takers int           // of a lookup: loads that are still to take it over
	Left   time.Duration // of a lookup, until its deadline

	First, Pages int     // of a store: the chunk's
	Places       []Place // one a chunk
	Ends         []byte  // digests of the run's last page in each chunk, end to end; not of a store
}

// Place is where a slot begins.
type Place struct {
	Region uint32
	Offset uint64 // bytes
}

// Handover is what an engine's owners and operators hold at one moment.
type Handover struct {
	Generation uint32 // no handle so far has a higher one
	Held       []Held
}

// Export returns what owners and operators hold, and changes nothing. Lookups and pins end before
// the first chunk that was dropped or that a peer lent. What is lent to peers is not in it.
// ErrBusy: a lookup waits for promotions, or a load reads what a peer lent. Export holds the lock
// throughout.
func (e *Engine) Export() (Handover, error) {
	e.mu.Lock()
	defer e.unlock()
	if e.closed {
		return Handover{}, tiers.ErrClosed
	}
	h := Handover{Generation: e.leases.skipped}
	for _, x := range e.leases.all {
		h.Generation = max(h.Generation, x.gen)
	}
	for _, o := range slices.Sorted(maps.Keys(e.owners)) {
		if e.owners[o].leaving {
			continue
		}
		for x := e.owners[o].all.first; x != nil; x = x.inOwner.next {
			if err := e.export(x, &h); err != nil {
				return Handover{}, err
			}
		}
	}
	for _, s := range e.spaces {
		if s == nil {
			continue
		}
		for x := s.pinner.all.first; x != nil; x = x.inOwner.next {
			if err := e.export(x, &h); err != nil {
				return Handover{}, err
			}
		}
	}
	return h, nil
}

// export appends what a lease holds.
func (e *Engine) export(x *lease, h *Handover) error {
	sp := x.owner.space
	out := Held{Owner: x.owner.id, First: x.first}
	switch x.kind {
	case storeLease:
		for _, ref := range x.slots {
			r, s := e.slot(ref)
			h.Held = append(h.Held, Held{Kind: HeldStore, Owner: x.owner.id,
				First: int(s.chunk) * r.ppc, Pages: r.ppc, Places: []Place{e.place(ref)}})
		}
		return nil
	case lookupLease:
		if x.lookup.waiting {
			return fmt.Errorf("%w: lookup %d of owner %d waits", tiers.ErrBusy, x.lookup.id,
				x.owner.id)
		}
		out.Kind, out.Lookup, out.Takers = HeldLookup, x.lookup.id, x.lookup.takers
		out.Left = time.Duration(x.lookup.deadline - e.cfg.Now())
	case loadLease:
		if slices.ContainsFunc(x.slots, e.isForeign) {
			return fmt.Errorf("%w: load %#x of owner %d reads what a peer lent", tiers.ErrBusy,
				x.handle(), x.owner.id)
		}
		out.Kind, out.Handle = HeldLoad, x.handle()
	case pinLease:
		out.Kind, out.Owner, out.Handle, out.Space = HeldPin, 0, x.handle(), SpaceID(sp.id)
	default: // loans, and what is ending
		return nil
	}
	ppc, end := sp.g.PagesPerChunk, x.first+x.n
	var buf [32]byte
	for i, ref := range x.slots {
		r, s := e.slot(ref)
		start := (x.first/ppc + i) * ppc
		if x.kind != loadLease && (s.doomed() || r.foreign) {
			end = start
			break
		}
		out.Places = append(out.Places, e.place(ref))
		out.Ends = append(out.Ends, r.digestBytes(ref&recordMask, (min(end, start+ppc)-1)%ppc,
			&buf)...)
	}
	if out.Pages = end - x.first; out.Pages > 0 {
		h.Held = append(h.Held, out)
	}
	return nil
}

func (e *Engine) place(ref uint32) Place {
	r, _ := e.slot(ref)
	return Place{r.id, r.offset(ref, 0)}
}

// Import takes over what the owners and operators of another engine had. What was in its slots has
// been restored; the owners have been added, and have no leases yet. Handles and names stay the
// same, deadlines go on, handles that have ended stay ended. The limits of owners are not applied.
//
// A lookup or pin ends before the first chunk that is not there any more. A load keeps all its
// slots, also one whose chunk was dropped: nothing may be written to it before Release. A store's
// slot is kept likewise, as by a load that has no name, until its owner is removed: its chunk is
// dropped.
//
// The regions should be drained from before they were restored until after Import: else a slot may
// have been granted that is still in use. ErrBusy: one was; ErrInvalid: no engine can have had
// that, there is no such owner, or a slot is in no piece. The engine should be closed then.
func (e *Engine) Import(h *Handover) error {
	e.mu.Lock()
	defer e.unlock()
	if e.closed {
		return tiers.ErrClosed
	}
	e.leases.skip(h.Generation)
	e.tick++
	// What stores may write to is nobody's chunk, so they come first. Loads may have to take slots
	// that nothing else uses.
	for _, kind := range [...]HeldKind{HeldStore, HeldLoad, HeldPin, HeldLookup} {
		for i := range h.Held {
			if h.Held[i].Kind != kind {
				continue
			}
			if err := e.importHeld(&h.Held[i]); err != nil {
				return err
			}
		}
	}
	for i := range h.Held {
		if k := h.Held[i].Kind; k < HeldLookup || k > HeldPin {
			return invalid("%v handed over", k)
		}
	}
	e.relimit()
	return nil
}

// importHeld takes over one lease.
func (e *Engine) importHeld(h *Held) error {
	var ow *owner
	if h.Kind == HeldPin {
		s, err := e.space(h.Space)
		if err != nil {
			return invalid("a pin of space %d, which there is not", h.Space)
		}
		ow = &s.pinner
	} else if ow = e.owners[h.Owner]; ow == nil || ow.leaving {
		return invalid("a %v of owner %d, which there is not", h.Kind, h.Owner)
	}
	if err := h.fits(ow.space); err != nil {
		return err
	}
	if h.Kind == HeldLoad || h.Kind == HeldPin {
		if err := e.leases.mayImport(h.Handle); err != nil {
			return err
		}
	}
	var x *lease
	switch h.Kind {
	case HeldStore, HeldLoad:
		slots, err := e.importAll(ow, h)
		if err != nil {
			return err
		}
		x = e.leases.add(loadLease, ow, slots)
		x.first, x.n = h.First, h.Pages
		ow.loads++
		if h.Kind == HeldStore {
			return nil
		}
	case HeldPin:
		slots, pages := e.importRun(ow, h)
		if pages == 0 {
			return nil
		}
		x = e.leases.add(pinLease, ow, slots)
		x.first, x.n = h.First, pages
	case HeldLookup:
		if ow.lookups[h.Lookup] != nil {
			return invalid("lookup %d of owner %d twice", h.Lookup, h.Owner)
		}
		slots, pages := e.importRun(ow, h)
		if pages == 0 {
			return nil
		}
		x = e.leases.addLookup(ow, h.Lookup, h.First, slots)
		x.n, x.lookup.takers = pages, h.Takers
		x.lookup.deadline = e.cfg.Now() + int64(min(h.Left, e.cfg.LeaseDeadline))
		e.leases.expiry.insert(x)
		return nil
	}
	e.leases.name(x, h.Handle)
	return nil
}

// Pinned reports whether there is a pin of this handle.
func (e *Engine) Pinned(pin uint64) bool {
	e.mu.Lock()
	defer e.unlock()
	if e.closed {
		return false
	}
	_, err := e.leases.find(nil, pinLease, pin)
	return err == nil
}

// fits reports whether an engine can have leased a run in a space.
func (h *Held) fits(s *space) error {
	ppc, ends := s.g.PagesPerChunk, len(h.Places)*s.g.DigestBytes
	if h.Kind == HeldStore {
		ends = 0
	}
	if h.First < 0 || h.Pages < 1 || h.First > maxPage || h.Pages > maxPage ||
		len(h.Places) != (h.First+h.Pages-1)/ppc-h.First/ppc+1 || len(h.Ends) != ends {
		return invalid("a %v of %d pages from %d in %d slots, whose ends have %d bytes", h.Kind,
			h.Pages, h.First, len(h.Places), len(h.Ends))
	}
	return nil
}

// has reports whether a slot holds what the i-th one of a run did.
func (h *Held) has(e *Engine, sp *space, ref uint32, i int) bool {
	if h.Kind == HeldStore {
		return false
	}
	r, s := e.slot(ref)
	chunk, d := h.First/r.ppc+i, sp.g.DigestBytes
	pages := min(h.First+h.Pages-chunk*r.ppc, r.ppc)
	return int(ref&recordMask) < r.fresh && s.state == ready && !s.doomed() && s.space == sp.id &&
		int(s.chunk) == chunk && int(s.pages) >= pages &&
		equal(r.digest(ref&recordMask, pages-1), h.Ends[i*d:(i+1)*d])
}

// elsewhere returns another slot that holds what the i-th one of a run did, such as a longer
// version of the chunk, which has replaced it as it was restored. 0: there is none that may be
// read.
func (h *Held) elsewhere(e *Engine, sp *space, i int) uint32 {
	d := sp.g.DigestBytes
	rec := e.find(sp, h.Ends[i*d:(i+1)*d])
	if rec == 0 {
		return 0
	}
	if ref, _ := e.slotOf(rec); e.served(rec) == rec && h.has(e, sp, ref, i) {
		return ref
	}
	return 0
}

// importRun leases what is held of a run for an owner, up to the first chunk that is not.
func (e *Engine) importRun(ow *owner, h *Held) (slots []uint32, pages int) {
	ppc := ow.space.g.PagesPerChunk
	for i, at := range h.Places {
		ref := e.placed(ow.space, at)
		if ref == 0 || !h.has(e, ow.space, ref, i) {
			if ref = h.elsewhere(e, ow.space, i); ref == 0 {
				break
			}
		}
		e.importSlot(ow, ref)
		slots = append(slots, ref)
		pages = min(h.Pages, (h.First/ppc+i+1)*ppc-h.First)
	}
	return slots, pages
}

// importAll leases all slots of a run for an owner. It blocks those that hold something else.
func (e *Engine) importAll(ow *owner, h *Held) (slots []uint32, err error) {
	for i, at := range h.Places {
		ref := e.placed(ow.space, at)
		if ref == 0 {
			err = invalid("a %v of no slot, at byte %d of region %d", h.Kind, at.Offset, at.Region)
		} else if !h.has(e, ow.space, ref, i) &&
			!e.block(ow.space, ref, h.First/ow.space.g.PagesPerChunk+i) {
			err = fmt.Errorf("%w: the slot at byte %d of region %d, which a %v has, is in use",
				tiers.ErrBusy, at.Offset, at.Region, h.Kind)
		}
		if err != nil {
			e.unlease(ow, slots)
			return nil, err
		}
		e.importSlot(ow, ref)
		slots = append(slots, ref)
	}
	return slots, nil
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

// block has a slot be as if it held a chunk of a space that was dropped and is still read. What it
// holds is dropped: even a beginning of that chunk, as a store might extend it. It returns false if
// the slot is in use for another chunk.
func (e *Engine) block(sp *space, ref uint32, chunk int) bool {
	r, i := e.regions[ref>>recordBits], ref&recordMask
	if int(i) < r.fresh {
		s := &r.slots[i]
		if s.state == filling {
			return false
		}
		if s.state == ready {
			e.doom(ref, why.Cleared)
		}
		if s.state == ready { // it is in use
			return s.space == sp.id && int(s.chunk) == chunk
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
	e.assign(r, i, tenant.None)
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
