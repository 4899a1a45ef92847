package engine

import (
	"fmt"

	"lookaside/tiers"
	"lookaside/tiers/why"
)

// Lending: what another sidecar may ask of this arena. A loan is a lease without a deadline on what
// is held and lies in regions that the borrower can see. Its slots are given back one by one, as
// the borrower needs them no more. Nothing is promoted for it.

// AddLender lets another sidecar use the space of a fingerprint, as owner o, until RemoveOwner.
// ErrNotFound: there is no such space.
func (e *Engine) AddLender(o Owner, fp tiers.Fingerprint) (tiers.Geometry, error) {
	e.mu.Lock()
	defer e.unlock()
	if e.closed {
		return tiers.Geometry{}, tiers.ErrClosed
	}
	s := e.byPrint[fp]
	if s == nil {
		return tiers.Geometry{}, fmt.Errorf("%w: space %s", tiers.ErrNotFound, fp.Short())
	}
	return s.g, e.addOwner(o, s, true)
}

// Lend leases what is held without a gap of the pages from firstPage on, up to the first chunk in a
// region for which visible returns false. It appends one extent a chunk to out, and counts as a
// use. more reports that the next page is held as well, but is out of sight, not verified, or
// beyond the owner's share. With no pages there is no loan. visible is called under the engine's
// lock.
func (e *Engine) Lend(o Owner, firstPage int, hashes []byte, visible func(region uint32) bool,
	out []Extent) (loan uint64, pages int, more bool, extents []Extent, err error) {
	e.mu.Lock()
	defer e.unlock()
	ow, w, err := e.borrower(o, firstPage, hashes)
	if err != nil {
		return 0, 0, false, out, err
	}
	return e.lend(ow, &w, visible, out)
}

// LendEnds is Lend for n pages from the first of a chunk on. Only the digests of each chunk's last
// page are given, as a digest names all pages before it. A chunk that is held in part only is not
// leased.
func (e *Engine) LendEnds(o Owner, firstPage, n int, ends []byte, visible func(region uint32) bool,
	out []Extent) (loan uint64, pages int, more bool, extents []Extent, err error) {
	e.mu.Lock()
	defer e.unlock()
	ow, err := e.owner(o)
	if err != nil {
		return 0, 0, false, out, err
	}
	w, err := e.walkEnds(ow.space.g, firstPage, n, ends)
	if err != nil {
		return 0, 0, false, out, err
	}
	e.idx.migrate(migrateStep)
	return e.lend(ow, &w, visible, out)
}

func (e *Engine) lend(ow *owner, w *walk, visible func(region uint32) bool,
	out []Extent) (loan uint64, pages int, more bool, extents []Extent, err error) {
	if ow.loans >= e.cfg.MaxLookupsPerOwner {
		return 0, 0, false, out, fmt.Errorf("%w: owner %d has %d loans", tiers.ErrBusy, ow.id,
			ow.loans)
	}
	firstPage := w.first
	pages, slots := e.leaseHits(ow, w)
	for i, ref := range slots {
		if r, _ := e.slot(ref); !visible(r.id) {
			e.unlease(ow, slots[i:])
			slots, pages, more = slots[:i], w.start(i)-firstPage, true
			break
		}
	}
	more = more || e.goesOn(ow.space, w, firstPage+pages)
	if len(slots) == 0 {
		return 0, 0, more, out, nil
	}
	e.used(ow.space.class, slots)
	x := e.leases.add(loanLease, ow, slots)
	ow.loans++
	x.first, x.n = firstPage, pages
	for i, ref := range slots {
		r, _ := e.slot(ref)
		page := w.start(i)
		end := min(firstPage+pages, w.last(i)+1)
		out = append(out, Extent{Page: uint32(page), Pages: uint32(end - page), Region: r.id,
			Offset: r.offset(ref, page%r.ppc)})
	}
	e.stats.LentPages += uint64(pages)
	return x.handle(), pages, more, out, nil
}

// goesOn reports whether a page of a walk is held, verified or not. A page behind the walk's end is
// not.
func (e *Engine) goesOn(s *space, w *walk, page int) bool {
	if page >= w.end() {
		return false
	}
	if w.ends { // it is the first of a chunk
		page = w.last(page/w.ppc - w.chunk)
	}
	rec := e.find(s, w.hash(page))
	return rec != 0 && e.at(rec, page)
}

// Touch returns how many of the pages from firstPage on are held without a gap, as Lend would find
// them, and counts as a use of them. Nothing is leased. more is as Lend's.
func (e *Engine) Touch(o Owner, firstPage int, hashes []byte) (pages int, more bool, err error) {
	e.mu.Lock()
	defer e.unlock()
	ow, w, err := e.borrower(o, firstPage, hashes)
	if err != nil {
		return 0, false, err
	}
	pages, slots := e.leaseHits(ow, &w)
	e.used(ow.space.class, slots)
	e.unlease(ow, slots)
	return pages, e.goesOn(ow.space, &w, firstPage+pages), nil
}

func (e *Engine) borrower(o Owner, firstPage int, hashes []byte) (*owner, walk, error) {
	ow, err := e.owner(o)
	if err != nil {
		return nil, walk{}, err
	}
	w, err := e.walk(ow.space.g, firstPage, hashes)
	if err != nil {
		return nil, walk{}, err
	}
	e.idx.migrate(migrateStep)
	return ow, w, nil
}

// unlease ends leases that leaseHits has just taken.
func (e *Engine) unlease(ow *owner, slots []uint32) {
	for i := len(slots) - 1; i >= 0; i-- {
		ow.slots.sub(slots[i])
		e.unpin(slots[i])
	}
}

// EndLoan gives back slots of a loan. some names them by the place of their extents, rising; nil
// names all that are left. With bad their chunks are dropped: their bytes did not check out. The
// loan ends with its last slot, and then ended is true.
//
// ErrStale: the loan has ended before; ErrInvalid, with nothing changed: some names an extent that
// is not there. A slot that was given back before is passed over.
func (e *Engine) EndLoan(o Owner, loan uint64, some []uint32, bad bool) (ended bool, err error) {
	e.mu.Lock()
	defer e.unlock()
	ow, err := e.owner(o)
	if err != nil {
		return false, err
	}
	x, err := e.leases.find(ow, loanLease, loan)
	if err != nil {
		return false, err
	}
	for _, i := range some {
		if int64(i) >= int64(len(x.slots)) {
			return false, invalid("extent %d of a loan of %d", i, len(x.slots))
		}
	}
	if some == nil {
		for i := len(x.slots) - 1; i >= 0; i-- {
			e.giveBack(x, i, bad)
		}
	}
	for k := len(some) - 1; k >= 0; k-- {
		e.giveBack(x, int(some[k]), bad)
	}
	if x.loan.returned == len(x.slots) {
		e.forget(x)
		return true, nil
	}
	return false, nil
}

func (e *Engine) giveBack(x *lease, i int, bad bool) {
	ref := x.slots[i]
	if ref == 0 {
		return
	}
	if _, s := e.slot(ref); bad && !s.doomed() {
		e.stats.Bad++
		e.doom(ref, why.Lost)
	}
	e.freeSlots(x, x.slots[i:i+1])
	x.slots[i] = 0
	x.loan.returned++
}
