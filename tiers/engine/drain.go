package engine

import (
	"fmt"

	"lookaside/tiers"
)

// Draining: a region hands out no more slots, so that its chunks can be moved (moves.go).

// Drain has a region hand out no more slots. What is in it, or being filled, stays: it can be found
// and used, but is not evicted, until it is dropped, goes with the region (RemoveRegion), or is
// moved (NextMoves, for a region that was added carved). No piece of the region is carved or taken
// for another geometry. Undrain ends that. Draining twice is no error. Both release the lock
// between slices of their work.
//
// ErrNotFound: there is no such region; ErrBusy: it is being emptied, or some of it carved.
func (e *Engine) Drain(region uint32) error { return e.retire(region, true, e.hold) }

// Undrain lets a drained region hand out slots again. ErrBusy, also: what is restored in it waits
// for EndRestore.
func (e *Engine) Undrain(region uint32) error { return e.retire(region, false, e.offer) }

// retire drains a region or ends that, and calls f for the slots that may be chosen for eviction
// otherwise.
func (e *Engine) retire(id uint32, retired bool, f func(ref uint32)) error {
	e.mu.Lock()
	defer e.unlock()
	parts, is, err := e.drainable(id)
	if err != nil || is == retired {
		return err
	}
	for _, r := range parts {
		if !retired && e.staging.regions[r.mem] != nil {
			return fmt.Errorf("%w: region %d is being restored", tiers.ErrBusy, id)
		}
	}
	if a := e.areaOf(id); a != nil {
		a.retired = retired
	}
	for _, r := range parts {
		r.retire(retired)
	}
	e.waiting = e.waiting && retired
	e.relimit()
	for _, r := range parts {
		if err := e.eachIdle(id, r, retired, f); err != nil {
			return err
		}
	}
	return nil
}

// drainable returns the parts of a region that is drained, or can be, and which of both it is.
func (e *Engine) drainable(id uint32) (parts []*region, retired bool, err error) {
	if e.closed {
		return nil, false, tiers.ErrClosed
	}
	parts, ok := e.parts(id)
	if !ok {
		return nil, false, fmt.Errorf("%w: region %d", tiers.ErrNotFound, id)
	}
	a := e.areaOf(id)
	busy := a != nil && a.going
	for _, r := range parts {
		busy = busy || r.class == nil || r.emptying()
		retired = r.retired
	}
	if busy {
		return nil, false, fmt.Errorf("%w: region %d is being emptied, or some of it carved",
			tiers.ErrBusy, id)
	}
	if a != nil {
		retired = a.retired
	}
	return parts, retired, nil
}

// eachIdle calls f for the slots of a part of a region that may be chosen for eviction, as long as
// r.retired is as given. It releases the lock between slices.
func (e *Engine) eachIdle(id uint32, r *region, retired bool, f func(ref uint32)) error {
	for i := 0; ; i++ {
		switch {
		case r.retired != retired:
			return fmt.Errorf("%w: region %d has gone another way meanwhile", tiers.ErrBusy, id)
		case i >= r.fresh:
			return nil
		}
		if s := &r.slots[i]; s.state == ready && !s.doomed() && s.idle() && s.children == 0 {
			f(r.num<<recordBits | uint32(i))
		}
		if i%clearSlice == clearSlice-1 && !e.pause() {
			return tiers.ErrClosed
		}
	}
}
