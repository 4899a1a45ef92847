package engine

import "lookaside/tiers/why"

// Patrol finds out, while the arena is in use, that bytes in it have changed. Its driver reads the
// chunks that are held, again and again, and compares their checksums, which it has from when they
// were kept (keep.go). Nothing is leased: a chunk may leave at any moment. Then what was read of it
// is void, and its handle changes nothing.

// patrolled resolves a handle of something that may be read: held, and verified if it was restored.
func (e *Engine) patrolled(handle uint64) (ref uint32, r *region, s *slot) {
	if ref, s = e.verifying(handle); s == nil || s.unverified() {
		return 0, nil, nil
	}
	return ref, e.regions[ref>>recordBits], s
}

// PatrolPlace is where a walk over the arena is. The zero PatrolPlace is its beginning.
type PatrolPlace struct{ region, slot int }

// NextPatrol returns the next chunk of a walk over all that is held. Its digests are in buf, which
// is returned for its reuse. false: the walk is at its end, and begins anew.
func (e *Engine) NextPatrol(at *PatrolPlace, buf []byte) (v Verification, _ []byte, ok bool) {
	e.mu.Lock()
	defer e.unlock()
	for left := clearSlice; !e.closed && at.region <= e.nregion; {
		r := e.regions[at.region]
		if r == nil || r.class == nil || r.foreign || at.slot >= r.fresh {
			*at = PatrolPlace{region: at.region + 1}
			continue
		}
		ref := r.num<<recordBits | uint32(at.slot)
		at.slot++
		if _, s := e.slot(ref); s.state == ready && !s.doomed() && !s.unverified() {
			v, buf = e.verification(ref, buf[:0])
			return v, buf, true
		}
		if left--; left == 0 {
			left = clearSlice
			e.pause()
		}
	}
	*at = PatrolPlace{}
	return v, buf, false
}

// DropRotten drops the chunk that a handle names, because its bytes have changed since they were
// committed. With faulty they cannot be read, and the slot is never granted again. It returns false
// if the chunk is gone already.
func (e *Engine) DropRotten(handle uint64, faulty bool) bool {
	e.mu.Lock()
	defer e.unlock()
	ref, _, s := e.patrolled(handle)
	if s == nil {
		return false
	}
	e.idx.migrate(migrateStep)
	e.tick++
	if faulty {
		s.flags |= spoiled
	}
	e.stats.Bad++
	e.stats.Rotten++
	e.doom(ref, why.Lost)
	return true
}
