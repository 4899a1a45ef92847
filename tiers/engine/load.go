package engine

import (
	"fmt"

	"lookaside/tiers"
	"lookaside/tiers/why"
)

// Extent is pages that lie one after another in a region.
type Extent struct {
	Page   uint32 // index of the first in its prefix
	Pages  uint32
	Region uint32 // the id given to AddRegion
	Offset uint64 // bytes
}

// Grant is an extent that a store is to write.
type Grant = Extent

// PrepareLoad takes over, for owner o, the leases that a lookup of owner scheduler has on the given
// pages. It appends one extent a chunk to out. The leases lose their deadline: they end with
// Release or with o. The rest of the lookup is freed.
//
// If several loads take over a lookup (SetTakers), all but the last take leases of their own, and
// leave the lookup and its deadline as they are.
//
// ErrNotFound: there is no such lookup; ErrStale: it does not hold all of these pages, or some were
// dropped since. The lookup stays as it is then.
func (e *Engine) PrepareLoad(o, scheduler Owner, lookup uint64, firstPage, pages int,
	out []Extent) (load uint64, extents []Extent, err error) {
	e.mu.Lock()
	defer e.unlock()
	return e.prepareLoad(o, scheduler, lookup, firstPage, pages, out)
}

// fetchLookup is the id of the lookup that a Fetch is for a moment.
const fetchLookup = 0

// Fetch leases page 0 of a prefix, if it is held, as PrepareLoad does for a lookup of the owner's
// own. An owner that fetches has no lookup 0.
//
// ErrNotFound: it is not held; ErrBusy: the owner has leased as much of the arena as one may.
func (e *Engine) Fetch(o Owner, hash []byte, out []Extent) (load uint64, extents []Extent,
	err error) {
	e.mu.Lock()
	defer e.unlock()
	limited := e.stats.Limited
	pages, x, err := e.lookUp(o, fetchLookup, 0, hash)
	switch {
	case err != nil:
		return 0, out, err
	case pages == 0 && e.stats.Limited != limited:
		return 0, out, fmt.Errorf("%w: owner %d has leased as much as one may", tiers.ErrBusy, o)
	case pages == 0:
		return 0, out, fmt.Errorf("%w: not held", tiers.ErrNotFound)
	}
	load, extents, err = e.prepareLoad(o, o, fetchLookup, 0, 1, out)
	if err != nil {
		e.endLease(x)
	}
	return load, extents, err
}

func (e *Engine) prepareLoad(o, scheduler Owner, lookup uint64, firstPage, pages int,
	out []Extent) (load uint64, extents []Extent, err error) {
	ow, err := e.owner(o)
	if err != nil {
		return 0, out, err
	}
	x, err := e.lookup(scheduler, lookup)
	if err != nil {
		return 0, out, err
	}
	if err := x.loads(ow, firstPage, pages); err != nil {
		return 0, out, err
	}
	if ow.loads >= e.cfg.MaxLookupsPerOwner {
		return 0, out, fmt.Errorf("%w: owner %d has %d loads", tiers.ErrBusy, o, ow.loads)
	}
	ppc := ow.space.g.PagesPerChunk
	from := firstPage/ppc - x.first/ppc
	to := (firstPage+pages-1)/ppc - x.first/ppc + 1
	slots := x.slots[from:to]
	for _, ref := range slots {
		if _, s := e.slot(ref); s.doomed() {
			return 0, out, fmt.Errorf("%w: chunk %d of lookup %d was dropped", tiers.ErrStale,
				s.chunk, lookup)
		}
	}
	e.unfreeze(ow)
	e.unfreeze(x.owner) // else the slots that change hands would make the share smaller
	if err := e.claimAll(ow, slots); err != nil {
		return 0, out, err
	}
	y := e.leases.add(loadLease, ow, slots)
	ow.loads++
	y.first, y.n = firstPage, pages
	for _, ref := range slots {
		r, s := e.slot(ref)
		s.pins++ // taken over, not taken: the lookup's are freed below, or by a later load
		e.leases.pins++
		page := max(firstPage, int(s.chunk)*ppc)
		end := min(firstPage+pages, (int(s.chunk)+1)*ppc)
		region, offset := r.where(ref, page%ppc)
		out = append(out, Extent{Page: uint32(page), Pages: uint32(end - page), Region: region,
			Offset: offset})
	}
	if x.lookup.takers--; x.lookup.takers <= 0 {
		e.countReads(x.slots, from, to)
		e.endLease(x)
	}
	e.stats.Loads++
	e.stats.LoadPages += uint64(pages)
	return y.handle(), out, nil
}

// loads checks that a load of an owner can take over some pages of a lookup.
func (x *lease) loads(ow *owner, firstPage, pages int) error {
	switch {
	case x.owner.space != ow.space:
		return fmt.Errorf("%w: owner %d is in space %d, owner %d in space %d",
			tiers.ErrIncompatible, ow.id, ow.space.id, x.owner.id, x.owner.space.id)
	case pages < 1 || firstPage < 0 || pages > maxPage || firstPage > maxPage:
		return invalid("load of %d pages from page %d", pages, firstPage)
	case firstPage < x.first || firstPage+pages > x.first+x.n:
		return fmt.Errorf("%w: lookup %d holds pages %d to %d, asked for %d to %d", tiers.ErrStale,
			x.lookup.id, x.first, x.first+x.n-1, firstPage, firstPage+pages-1)
	}
	return nil
}

// claimAll counts leases of an owner on slots: all of them, or with an error none.
func (e *Engine) claimAll(ow *owner, slots []uint32) error {
	if ow.leases+len(slots) > e.cfg.MaxLeasesPerOwner {
		return fmt.Errorf("%w: owner %d has %d leases", tiers.ErrBusy, ow.id, ow.leases)
	}
	for i, ref := range slots {
		if !e.claim(ow, ref) {
			for _, taken := range slots[:i] {
				e.tally(ow, taken).sub(taken)
			}
			return fmt.Errorf("%w: owner %d has leases on %d slots, wants %d and may have %d",
				tiers.ErrBusy, ow.id, e.tally(ow, ref).n, len(slots),
				e.regions[ref>>recordBits].class.limit)
		}
	}
	return nil
}

// LoadEnds appends the digests of the last pages of PrepareLoad's extents, in the same order, as
// the index has them.
func (e *Engine) LoadEnds(o Owner, load uint64, out []byte) ([]byte, error) {
	e.mu.Lock()
	defer e.unlock()
	ow, err := e.owner(o)
	if err != nil {
		return out, err
	}
	x, err := e.leases.find(ow, loadLease, load)
	if err != nil {
		return out, err
	}
	ppc := ow.space.g.PagesPerChunk
	var buf [32]byte
	for _, ref := range x.slots {
		r, s := e.slot(ref)
		last := min(x.first+x.n, (int(s.chunk)+1)*ppc) - 1
		out = append(out, r.digestBytes(ref&recordMask, last%ppc, &buf)...)
	}
	return out, nil
}

// Release ends a load. bad names extents, by their place among those that PrepareLoad appended,
// whose bytes did not check out: their chunks are dropped. ErrStale: the load was released before;
// ErrInvalid, with nothing changed: bad names an extent that is not there.
func (e *Engine) Release(o Owner, load uint64, bad []uint32) error {
	e.mu.Lock()
	defer e.unlock()
	ow, err := e.owner(o)
	if err != nil {
		return err
	}
	x, err := e.leases.find(ow, loadLease, load)
	if err != nil {
		return err
	}
	for _, i := range bad {
		if int64(i) >= int64(len(x.slots)) {
			return invalid("extent %d of a load of %d", i, len(x.slots))
		}
	}
	for _, i := range bad {
		if r, s := e.slot(x.slots[i]); r.foreign {
			e.foundBad(r, x.slots[i])
		} else if !s.doomed() {
			e.stats.Bad++
			e.doom(x.slots[i], why.Lost)
		}
	}
	e.endLease(x)
	return nil
}
