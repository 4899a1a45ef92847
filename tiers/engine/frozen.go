package engine

// Frozen owners. An owner whose client has stopped keeps what it holds for as long as the client
// lives: the client may continue, and read or write its slots. So nothing is taken from it; other
// owners get less instead. All owners together have at most Config.JointShare of the slots, and
// each at most Config.OwnerShare. If all of them freeze, that much is gone. From SetFrozen on, both
// are shares of what is left, so new owners are served. If these freeze as well, some is left
// again.
//
// A frozen owner that looks up, stores or loads is frozen no longer. Otherwise it would get only a
// share of what it does not hold itself, until the next SetFrozen.

// OwnerStats is what an owner holds.
type OwnerStats struct {
	Slots                  int // of the arena, leased or filling
	Lookups, Loads, Stores int
}

// Owner returns what an owner holds; false: there is no such owner.
func (e *Engine) Owner(o Owner) (OwnerStats, bool) {
	e.mu.Lock()
	defer e.unlock()
	ow := e.owners[o]
	if ow == nil {
		return OwnerStats{}, false
	}
	return OwnerStats{Slots: ow.slots.n, Lookups: len(ow.lookups), Loads: ow.loads,
		Stores: ow.stores}, true
}

// SetFrozen names the owners that have frozen, instead of those named before. Each stays frozen
// until it looks up, stores or loads, or until SetFrozen no longer names it. Unknown owners are
// passed over. The cost of SetFrozen depends on what the owners hold.
func (e *Engine) SetFrozen(owners []Owner) {
	e.mu.Lock()
	defer e.unlock()
	for _, ow := range e.owners {
		ow.frozen = false
	}
	for _, o := range owners {
		if ow := e.owners[o]; ow != nil {
			ow.frozen = true
		}
	}
	e.countFrozen()
}

// unfreeze records that an owner goes on. It has no effect if the owner is not frozen.
func (e *Engine) unfreeze(ow *owner) {
	if ow.frozen {
		ow.frozen = false
		e.countFrozen()
	}
}

// countFrozen counts the slots that frozen owners have.
func (e *Engine) countFrozen() {
	for _, c := range e.classes {
		c.frozen = 0
	}
	e.frozen = 0
	seen := map[uint32]bool{}
	for _, ow := range e.owners {
		if !ow.frozen || ow.slots.n == 0 {
			continue
		}
		e.frozen++
		for _, x := range ow.slots.entries {
			if ref := x.key; x.value != 0 && !seen[ref] {
				seen[ref] = true
				e.regions[ref>>recordBits].class.frozen++
			}
		}
	}
	e.relimit()
}

// left returns how many more idle slots an owner may lease before owners together have their share.
// Pins do not count.
func (e *Engine) left(ow *owner) int {
	if ow == &ow.space.pinner {
		return e.cfg.MaxLeasesPerOwner
	}
	return ow.space.class.most - ow.space.class.busy
}

// inUse reports whether a slot is leased or being filled already, or is a foreign one.
func (e *Engine) inUse(ref uint32) bool {
	_, s := e.slot(ref)
	return !s.idle() || s.state == filling || e.isForeign(ref)
}
