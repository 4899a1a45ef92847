package engine

import (
	"fmt"

	"lookaside/tiers"
)

// Owners: the sessions that may hold leases. An owner uses one space and counts what it holds.

// Owner names a session that may hold leases. The caller chooses the number.
type Owner uint64

type owner struct {
	id      Owner
	space   *space
	lookups map[uint64]*lease
	all     leaseList
	loads   int
	loans   int
	stores  int
	leases  int   // in all of them, a slot leased twice counting twice
	slots   tally // by slot
	foreign tally // by foreign slot
	own     bool  // what peers lent is not for it
	takers  int   // loads that take over each of its lookups; 0: one
	leaving bool  // RemoveOwner is at it
	frozen  bool  // see frozen.go
}

// AddOwner lets a session use a space.
func (e *Engine) AddOwner(o Owner, id SpaceID) error {
	e.mu.Lock()
	defer e.unlock()
	s, err := e.space(id)
	if err != nil {
		return err
	}
	return e.addOwner(o, s, false)
}

// AddArenaOwner is AddOwner for an owner that reads the arena itself. It finds nothing that peers
// lent.
func (e *Engine) AddArenaOwner(o Owner, id SpaceID) error {
	e.mu.Lock()
	defer e.unlock()
	s, err := e.space(id)
	if err != nil {
		return err
	}
	return e.addOwner(o, s, true)
}

func (e *Engine) addOwner(o Owner, s *space, own bool) error {
	if e.owners[o] != nil {
		return invalid("owner %d is there already", o)
	}
	if len(e.owners) == e.cfg.MaxOwners {
		return fmt.Errorf("%w: %d owners are the most", tiers.ErrBusy, e.cfg.MaxOwners)
	}
	e.owners[o] = &owner{id: o, space: s, lookups: map[uint64]*lease{}, all: leaseList{owned: true},
		own: own}
	s.owners++
	e.useSpace(s)
	return nil
}

// SetTakers sets how many loads, of the ranks that hold the same pages, take over each lookup of an
// owner. The owner must have been added just now.
func (e *Engine) SetTakers(o Owner, n int) error {
	e.mu.Lock()
	defer e.unlock()
	ow, err := e.owner(o)
	if err != nil {
		return err
	}
	ow.takers = n
	return nil
}

// RemoveOwner ends a session: its lookups and loads are freed, and its unfinished stores aborted.
func (e *Engine) RemoveOwner(o Owner) {
	e.mu.Lock()
	defer e.unlock()
	ow := e.owners[o]
	if ow == nil {
		return
	}
	ow.leaving = true
	for ow.all.first != nil {
		x := ow.all.first
		if x.kind != endingLease {
			e.endLease(x)
			continue
		}
		e.endPart(x)
		if !e.pause() { // others may have it between the parts
			return
		}
	}
	ow.space.owners--
	e.useSpace(ow.space)
	delete(e.owners, o)
	if ow.frozen {
		e.countFrozen()
	}
}

func (e *Engine) owner(o Owner) (*owner, error) {
	if e.closed {
		return nil, tiers.ErrClosed
	}
	if ow := e.owners[o]; ow != nil && !ow.leaving {
		return ow, nil
	}
	return nil, fmt.Errorf("%w: owner %d", tiers.ErrNotFound, o)
}
