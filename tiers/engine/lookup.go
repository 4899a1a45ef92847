package engine

import (
	"fmt"
	"slices"

	"lookaside/tiers"
)

// Lookup returns how many pages from firstPage on are held without a gap, and leases them for owner
// o under a lookup id of its own. The leases last until Cancel, until PrepareLoad takes them over,
// or until the deadline. hashes are the digests of the pages, end to end. A lookup in use under the
// same id ends first. With 0 pages nothing is leased. ErrBusy: the owner has too many lookups.
func (e *Engine) Lookup(o Owner, lookup uint64, firstPage int,
	hashes []byte) (pages int, err error) {
	e.mu.Lock()
	defer e.unlock()
	pages, _, err = e.lookUp(o, lookup, firstPage, hashes)
	return pages, err
}

// BeginLookup is Lookup for the first part of a request. ContinueLookup goes on with the next part
// by the returned handle, which is 0 if nothing is held.
func (e *Engine) BeginLookup(o Owner, lookup uint64, firstPage int,
	hashes []byte) (pages int, handle uint64, err error) {
	e.mu.Lock()
	defer e.unlock()
	pages, x, err := e.lookUp(o, lookup, firstPage, hashes)
	if x == nil {
		return pages, 0, err
	}
	return pages, x.handle(), nil
}

// ContinueLookup leases what is held of the pages that follow those of a lookup, and returns how
// many. ErrStale, ErrNotFound: the lookup has ended; ErrInvalid: its last page is not the last of a
// chunk.
func (e *Engine) ContinueLookup(handle uint64, hashes []byte) (pages int, err error) {
	e.mu.Lock()
	defer e.unlock()
	if e.closed {
		return 0, tiers.ErrClosed
	}
	x, err := e.leases.find(nil, lookupLease, handle)
	if err != nil {
		return 0, err
	}
	ow := x.owner
	w, err := e.walk(ow.space.g, x.first+x.n, hashes)
	if err != nil {
		return 0, err
	}
	if x.lookup.waiting || w.first%w.ppc != 0 {
		return 0, invalid("lookup of pages %d to %d cannot go on", x.first, w.first-1)
	}
	pages, slots := e.leaseHits(ow, &w)
	e.stats.LookupPages += uint64(w.n)
	e.stats.HitPages += uint64(pages)
	if pages > 0 {
		e.leases.extend(x, slots)
		x.n += pages
	}
	return pages, nil
}

func (e *Engine) lookUp(o Owner, lookup uint64, firstPage int, hashes []byte) (pages int, x *lease,
	err error) {
	ow, err := e.owner(o)
	if err != nil {
		return 0, nil, err
	}
	w, err := e.walk(ow.space.g, firstPage, hashes)
	if err != nil {
		return 0, nil, err
	}
	e.unfreeze(ow)
	if x := ow.lookups[lookup]; x != nil {
		e.endLease(x)
	}
	if len(ow.lookups) >= e.cfg.MaxLookupsPerOwner {
		return 0, nil, fmt.Errorf("%w: owner %d has %d lookups", tiers.ErrBusy, o, len(ow.lookups))
	}
	e.idx.migrate(migrateStep)
	pages, slots := e.leaseHits(ow, &w)
	e.stats.Lookups++
	e.stats.LookupPages += uint64(w.n)
	e.stats.HitPages += uint64(pages)
	if pages == 0 {
		return 0, nil, nil
	}
	x = e.leases.addLookup(ow, lookup, firstPage, slots)
	x.n = pages
	x.lookup.deadline = e.cfg.Now() + int64(e.cfg.LeaseDeadline)
	e.leases.expiry.push(x)
	return pages, x, nil
}

// leaseHits leases the chunks of a walk that are held and verified, up to the first page that is
// not. The slots are valid until the next call.
//
// It probes one page a chunk, the last: a page's digest names its whole prefix, so the slot that
// holds it holds the chunk. In the first chunk that is not held whole it finds the last page that
// is by bisection.
//
// It stays one function: a lookup of 256 chunks takes some 10 µs, and a call for each would show.
func (e *Engine) leaseHits(ow *owner, w *walk) (pages int, slots []uint32) {
	e.tick++
	sp := ow.space
	slots = e.scratch.held[:0]
	room, left := e.cfg.MaxLeasesPerOwner-ow.leases, e.left(ow)
	anyUnverified := e.unverified.Load() > 0
	shadow := ow.shadow()
	lent := shadow != nil && shadow.pages > 0
	for i := 0; i < w.chunks; i += probeGroup {
		n := min(probeGroup, w.chunks-i)
		refs := e.scratch.refs[:n]
		e.probe(sp, w, i, n, refs)
		probed := false // what peers lent
		for j, rec := range refs {
			if anyUnverified {
				rec = e.served(rec)
			}
			last := w.last(i + j)
			end := rec == 0 || !e.at(rec, last)
			if end && lent {
				if !probed {
					e.probe(shadow, w, i+j, n-j, e.lent.refs[j:n])
					probed = true
				}
				if rec = e.lent.refs[j]; rec != 0 && e.at(rec, last) {
					end = false
				} else {
					rec, last = e.longer(ow, w, i+j)
				}
			} else if end {
				if w.ends {
					return pages, slots
				}
				rec, last = e.bisect(sp, w, i+j)
			}
			if rec == 0 {
				return pages, slots
			}
			ref, _ := e.slotOf(rec)
			t, limit := &ow.slots, sp.class.limit
			if lent && e.isForeign(ref) {
				t, limit = &ow.foreign, shadow.class.limit
			}
			if len(slots) >= room || len(slots) >= left && !e.inUse(ref) || !t.add(ref, limit) {
				e.stats.Limited++
				return pages, slots
			}
			e.pin(ref)
			slots = append(slots, ref)
			pages = last - w.first + 1
			if end {
				return pages, slots
			}
		}
	}
	return pages, slots
}

// Trim frees a lookup's leases on the chunks wholly below firstPage, also on those that it waits
// for.
func (e *Engine) Trim(o Owner, lookup uint64, firstPage int) error {
	e.mu.Lock()
	defer e.unlock()
	x, err := e.lookup(o, lookup)
	if err != nil {
		return err
	}
	ppc := x.owner.space.g.PagesPerChunk
	end := x.first + x.n // of what it holds or waits for
	if x.lookup.waiting {
		end = x.lookup.end
	}
	cut := min(firstPage, end) / ppc * ppc // the first page of the first chunk that stays
	if firstPage >= end {
		cut = end
	}
	if cut <= x.first {
		return nil
	}
	if cut == end {
		e.endLease(x)
		return nil
	}
	k := cut/ppc - x.first/ppc
	if x.lookup.waiting {
		if cut/ppc > x.lookup.after {
			k = x.lookup.held + cut/ppc - x.lookup.after
			x.lookup.after = cut / ppc
		}
		k = min(k, len(x.slots))
		x.lookup.held = max(0, x.lookup.held-k)
	}
	if k > e.leases.endSlice && !x.lookup.waiting {
		e.splitEnding(x, k)
	} else {
		e.freeSlots(x, x.slots[:k])
		x.slots = x.slots[k:]
	}
	x.n = max(0, x.n-(cut-x.first))
	x.first = cut
	return nil
}

// Cancel ends a lookup and frees its leases. ErrNotFound: there is no lookup of this id, because it
// hit nothing or has ended.
func (e *Engine) Cancel(o Owner, lookup uint64) error {
	e.mu.Lock()
	defer e.unlock()
	x, err := e.lookup(o, lookup)
	if err != nil {
		return err
	}
	e.endLease(x)
	return nil
}

// InArena reports whether a lookup has leased slots, and all of them are the arena's: none is lent
// by a peer.
func (e *Engine) InArena(o Owner, lookup uint64) bool {
	e.mu.Lock()
	defer e.unlock()
	x, err := e.lookup(o, lookup)
	return err == nil && len(x.slots) > 0 &&
		(e.lent.mask == 0 || !slices.ContainsFunc(x.slots, e.isForeign))
}

func (e *Engine) lookup(o Owner, lookup uint64) (*lease, error) {
	ow, err := e.owner(o)
	if err != nil {
		return nil, err
	}
	if x := ow.lookups[lookup]; x != nil {
		return x, nil
	}
	return nil, fmt.Errorf("%w: lookup %d of owner %d", tiers.ErrNotFound, lookup, o)
}

// Pin leases what is held of a prefix from its first page on. A pin has no deadline and belongs to
// no session: it lasts until Unpin, or until the space is cleared. Pin returns how many pages it
// pinned; with 0 there is no pin.
func (e *Engine) Pin(id SpaceID, hashes []byte) (pin uint64, pages int, err error) {
	e.mu.Lock()
	defer e.unlock()
	s, err := e.space(id)
	if err != nil {
		return 0, 0, err
	}
	w, err := e.walk(s.g, 0, hashes)
	if err != nil {
		return 0, 0, err
	}
	pages, slots := e.leaseHits(&s.pinner, &w)
	if pages == 0 {
		return 0, 0, nil
	}
	x := e.leases.add(pinLease, &s.pinner, slots)
	x.n = pages
	e.relimit()
	return x.handle(), pages, nil
}

// Unpin ends a pin.
func (e *Engine) Unpin(pin uint64) error {
	e.mu.Lock()
	defer e.unlock()
	if e.closed {
		return tiers.ErrClosed
	}
	x, err := e.leases.find(nil, pinLease, pin)
	if err != nil {
		return err
	}
	e.endLease(x)
	e.relimit()
	return nil
}
