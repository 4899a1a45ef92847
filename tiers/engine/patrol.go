package engine

// Patrol finds out, while the arena is in use, that bytes in it have changed. Its driver reads the
// chunks that are held, again and again, and compares their checksums. With Config.Sums the engine
// keeps one checksum a chunk. The first to read the chunk makes it (NextUnsummed, NoteSum), some
// time after the commit: nothing waits for it, but what changes before that is not found. Nothing
// is leased: a chunk may leave at any moment. Then what was read of it is void, and its handle
// changes nothing.

// chunkSum is the checksum of a slot's first pages, as they were under one generation.
type chunkSum struct {
	sum   uint64
	gen   uint32
	pages uint16 // 0: there is none
}

// patrolled resolves a handle of something that may be read: held, and verified if it was restored.
func (e *Engine) patrolled(handle uint64) (ref uint32, r *region, s *slot) {
	if ref, s = e.verifying(handle); s == nil || s.unverified() {
		return 0, nil, nil
	}
	return ref, e.regions[ref>>recordBits], s
}

// NextUnsummed returns the oldest of the chunks that have come or grown of late and have no
// checksum. Its digests are in buf, which is returned for its reuse. false: there is none.
func (e *Engine) NextUnsummed(buf []byte) (Verification, []byte, bool) {
	e.mu.Lock()
	defer e.unlock()
	for e.unsummed.n > 0 {
		if ref, r, s := e.patrolled(e.unsummed.pop()); s != nil &&
			r.sums[ref&recordMask].of(s) == 0 {
			v, buf := e.verification(ref, buf[:0])
			return v, buf, true
		}
	}
	return Verification{}, buf, false
}

// of returns how many pages of s the checksum covers. 0 means that it belongs to another content.
func (c *chunkSum) of(s *slot) int {
	if c.gen != s.gen || c.pages != s.pages {
		return 0
	}
	return int(c.pages)
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

// NoteSum notes the checksum of a chunk, as NextUnsummed, NextPatrol or a CascadeItem named it.
// known reports that there was one already; same reports that it is the same.
func (e *Engine) NoteSum(handle uint64, pages int, sum uint64) (known, same bool) {
	e.mu.Lock()
	defer e.unlock()
	ref, r, s := e.patrolled(handle)
	if s == nil || r.sums == nil || pages < 1 || pages > int(s.pages) {
		return false, true
	}
	c := &r.sums[ref&recordMask]
	if c.gen == s.gen && int(c.pages) == pages {
		return true, c.sum == sum
	}
	if pages == int(s.pages) {
		*c = chunkSum{sum, s.gen, s.pages}
	}
	return false, true
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
	e.doom(ref)
	return true
}
