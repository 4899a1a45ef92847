package engine

import (
	"fmt"

	"lookaside/tiers"
)

// Draining: a region hands out no more slots, so that its chunks can be moved (moves.go).

// Drain has a region that was added carved hand out no more slots. What is in it, or being filled,
// stays: it can be found and used, but is not evicted, until it is moved (NextMoves), dropped, or
// goes with the region (RemoveRegion). Undrain ends that. Draining twice is no error. Both release
// the lock between slices of their work. ErrNotFound: there is no such region; ErrBusy: it is being
// emptied, or one is being carved.
func (e *Engine) Drain(region uint32) error {
	e.mu.Lock()
	defer e.unlock()
	r, err := e.drainable(region)
	if err != nil || r.retired {
		return err
	}
	r.draining, r.retired = true, true
	if c := r.class; c != nil {
		c.free -= r.free
		c.slots -= len(r.slots)
	}
	e.relimit()
	return e.eachIdle(region, r, true, e.hold)
}

// Undrain lets a drained region hand out slots again.
func (e *Engine) Undrain(region uint32) error {
	e.mu.Lock()
	defer e.unlock()
	r, err := e.drainable(region)
	if err != nil || !r.retired {
		return err
	}
	r.draining, r.retired = false, false
	if c := r.class; c != nil {
		c.free += r.free
		c.slots += len(r.slots)
	}
	e.waiting = false
	e.relimit()
	return e.eachIdle(region, r, false, e.offer)
}

// drainable resolves a region that is drained, or can be.
func (e *Engine) drainable(region uint32) (*region, error) {
	if e.closed {
		return nil, tiers.ErrClosed
	}
	r := e.byID[region]
	switch {
	case r == nil:
		return nil, fmt.Errorf("%w: region %d", tiers.ErrNotFound, region)
	case e.carving || r.draining && !r.retired:
		return nil, fmt.Errorf("%w: region %d is being emptied, or one is being carved",
			tiers.ErrBusy, region)
	}
	return r, nil
}

// eachIdle calls f for the slots of a region that may be chosen for eviction, as long as r.retired
// is as given. It releases the lock between slices.
func (e *Engine) eachIdle(id uint32, r *region, retired bool, f func(ref uint32)) error {
	for i := 0; i < r.fresh; i++ {
		if s := &r.slots[i]; s.state == ready && !s.doomed() && s.idle() && s.children == 0 {
			f(r.num<<recordBits | uint32(i))
		}
		if i%clearSlice == clearSlice-1 {
			if !e.pause() {
				return tiers.ErrClosed
			}
			if e.byID[id] != r || r.retired != retired {
				return fmt.Errorf("%w: region %d has gone another way meanwhile", tiers.ErrBusy, id)
			}
		}
	}
	return nil
}
