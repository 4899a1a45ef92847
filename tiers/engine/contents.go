package engine

import (
	"fmt"
	"math"

	"lookaside/tiers"
	"lookaside/tiers/why"
)

// probeSlice is how many chunks are looked for while the lock is held.
const probeSlice = 4 * probeGroup

// Contains sets held[i] to how many pages of the i-th chunk that the given pages touch are held and
// verified, from the first of them in the chunk on. Chunks behind a gap count as well; what peers
// lent does not. Nothing is leased and nothing counts as a use, so what is held may be gone when
// Contains returns. It releases the lock between slices of its work. ErrInvalid: held is too short.
func (e *Engine) Contains(id SpaceID, firstPage int, hashes []byte, held []uint16) error {
	return e.eachHeld(id, firstPage, hashes, len(held), func(i int, _ uint32, pages int) {
		held[i] = uint16(pages)
	})
}

// Unwritten returns how many of the chunks that the given pages touch are still to be written to a
// tier: they wait for it, or are being written. ErrInvalid and concurrency are as for Contains.
func (e *Engine) Unwritten(id SpaceID, firstPage int, hashes []byte) (chunks int, err error) {
	err = e.eachHeld(id, firstPage, hashes, math.MaxInt, func(_ int, rec uint32, pages int) {
		if pages == 0 {
			return
		}
		ref, _ := e.slotOf(rec)
		if t := e.route(ref); t != nil && t.whole|t.part|t.busy != 0 {
			chunks++
		}
	})
	return chunks, err
}

// eachHeld calls visit for each chunk that the given pages touch, at most so many: with its number
// from 0 on, how many of its pages are held and verified, and the record of the last of these. The
// lock is held during a call and released between slices of them.
func (e *Engine) eachHeld(id SpaceID, firstPage int, hashes []byte, most int,
	visit func(i int, rec uint32, pages int)) error {
	e.mu.Lock()
	defer e.unlock()
	s, err := e.space(id)
	if err != nil {
		return err
	}
	w, err := e.walk(s.g, firstPage, hashes)
	if err != nil {
		return err
	}
	if most < w.chunks {
		return invalid("%d counts for %d chunks", most, w.chunks)
	}
	e.idx.migrate(migrateStep)
	for i := 0; i < w.chunks; i += probeGroup {
		if i > 0 && i%probeSlice == 0 {
			e.pause()
			if now, err := e.space(id); err != nil || now != s {
				return fmt.Errorf("%w: space %d was closed", tiers.ErrNotFound, id)
			}
		}
		n := min(probeGroup, w.chunks-i)
		refs := e.scratch.refs[:n]
		e.probe(s, &w, i, n, refs)
		for j, rec := range refs {
			start, last := w.start(i+j), w.last(i+j)
			if rec = e.served(rec); rec == 0 || !e.at(rec, last) {
				rec, last = e.bisect(s, &w, i+j)
			}
			pages := 0
			if rec != 0 {
				pages = last - start + 1
			}
			visit(i+j, rec, pages)
		}
	}
	return nil
}

// Drop drops all chunks that hold any of the given pages, and returns how many. Leased chunks
// become free at their release. Chunks on their way from a tier do not appear if they end with one
// of the pages. What peers lent of the pages is dropped as well, and not counted. None of the pages
// can be found when Drop returns, unless it was stored meanwhile: Drop releases the lock between
// slices of its work.
func (e *Engine) Drop(id SpaceID, firstPage int, hashes []byte) (chunks int, err error) {
	e.mu.Lock()
	defer e.unlock()
	s, err := e.space(id)
	if err != nil {
		return 0, err
	}
	w, err := e.walk(s.g, firstPage, hashes)
	if err != nil {
		return 0, err
	}
	left := clearSlice
	for i := range w.chunks {
		for page := w.start(i); page <= w.last(i); page++ {
			if ref := e.flying(s, w.hash(page)); ref != 0 {
				e.doom(ref, why.Cleared)
			}
		}
		// What holds a page of a chunk holds those before it.
		for {
			rec := e.find(s, w.hash(w.start(i)))
			if rec == 0 || !e.at(rec, w.start(i)) {
				break
			}
			ref, _ := e.slotOf(rec)
			e.doom(ref, why.Cleared)
			chunks++
			if left--; left == 0 {
				left = clearSlice
				e.pause()
				if now, err := e.space(id); err != nil || now != s {
					return chunks, err
				}
			}
		}
	}
	if s.shadow != nil {
		e.dropLent(s, &w)
	}
	e.stats.Dropped += uint64(chunks)
	return chunks, nil
}

// dropLent drops what peers lent of the pages of a walk. It releases the lock between slices of its
// work.
func (e *Engine) dropLent(s *space, w *walk) {
	e.eachForeign(func(r *region, ref uint32, sl *slot) {
		i := int(sl.chunk) - w.chunk
		if e.spaces[s.id] != s || r.class != s.shadow.class || sl.space != s.id ||
			sl.state == free || i < 0 || i >= w.chunks {
			return
		}
		start := w.start(i)
		pos := start % w.ppc
		if pos < int(max(sl.pages, sl.granted)) &&
			equal(r.digest(ref&recordMask, pos), w.hash(start)) {
			e.doom(ref, why.Cleared)
		}
	})
}
