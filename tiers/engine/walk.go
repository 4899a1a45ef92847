package engine

import "lookaside/tiers"

// Walks: the pages of one request, and the lookups of their records, many at a time.

// walk is the chunks of one request: n pages from page first on.
type walk struct {
	first, n int
	chunk    int // the first chunk
	chunks   int
	ppc      int
	digest   int // bytes of a digest
	hashes   []byte
	ends     bool // hashes are of the last page of each chunk only: no other page can be asked for
}

func (e *Engine) walk(g tiers.Geometry, firstPage int, hashes []byte) (walk, error) {
	w := walk{first: firstPage, ppc: g.PagesPerChunk, digest: g.DigestBytes, hashes: hashes}
	w.n = len(hashes) / w.digest
	if len(hashes)%w.digest != 0 || w.n > e.cfg.MaxPages {
		return w, invalid("%d bytes of hashes: want a multiple of %d, at most %d pages",
			len(hashes), w.digest, e.cfg.MaxPages)
	}
	if firstPage < 0 || firstPage > maxPage-w.n {
		return w, invalid("first page %d", firstPage)
	}
	w.chunk = firstPage / w.ppc
	if w.n > 0 {
		w.chunks = (firstPage+w.n-1)/w.ppc - w.chunk + 1
	}
	return w, nil
}

// walkEnds is a walk of whole chunks from firstPage on, n pages with those of the last, of which
// only the last pages' digests are known.
func (e *Engine) walkEnds(g tiers.Geometry, firstPage, n int, ends []byte) (walk, error) {
	w := walk{first: firstPage, n: n, ppc: g.PagesPerChunk, digest: g.DigestBytes, hashes: ends,
		ends: true}
	if n < 1 || n > e.cfg.MaxPages || firstPage < 0 || firstPage > maxPage-n ||
		firstPage%w.ppc != 0 {
		return w, invalid("%d pages from page %d on: want the first of a chunk, and at most %d", n,
			firstPage, e.cfg.MaxPages)
	}
	w.chunk, w.chunks = firstPage/w.ppc, (n+w.ppc-1)/w.ppc
	if len(ends) != w.chunks*w.digest {
		return w, invalid("%d bytes of the last hashes of %d chunks: want %d of each", len(ends),
			w.chunks, w.digest)
	}
	return w, nil
}

// start is the first page of the walk's chunk i.
func (w *walk) start(i int) int { return max(w.first, (w.chunk+i)*w.ppc) }

// last is the last page of the walk's chunk i.
func (w *walk) last(i int) int { return min(w.first+w.n, (w.chunk+i+1)*w.ppc) - 1 }

// end is the page after the walk's last.
func (w *walk) end() int { return w.first + w.n }

// hash is the digest of a page.
func (w *walk) hash(page int) []byte {
	o := page - w.first
	if w.ends {
		o /= w.ppc
	}
	o *= w.digest
	return w.hashes[o : o+w.digest]
}

// probeGroup is how many chunks are probed together. The loads of each pass do not depend on each
// other, so that their cache misses overlap.
const probeGroup = 128

// probe finds the last pages of chunks [from, from+n) of a walk, n at most probeGroup, and puts
// their refs into out, 0 for a miss.
//
// It stays one function: what its loops have in common lies on the stack, and a loop is as short as
// it can be.
func (e *Engine) probe(s *space, w *walk, from, n int, out []uint32) {
	if e.idx.migrating() || e.idx.cur.used == 0 {
		for i := range n {
			out[i] = e.find(s, w.hash(w.last(from+i)))
		}
		return
	}
	t := &e.idx.cur
	table := t.words
	var (
		tags  [probeGroup]uint32
		homes [probeGroup]uint32
		words [probeGroup]uint64
		seen  uint64
	)
	n = min(n, probeGroup)
	out = out[:n]
	for i := range out {
		tags[i] = s.tag(w.hash(w.last(from + i)))
		homes[i] = t.home(tags[i])
	}
	// What misses the cache stands in loops of its own, as short as can be: the more of them fit
	// into the processor's window, the more misses are under way at once.
	for i, home := range homes[:n] {
		words[i] = table[home]
	}
	for i, word := range words[:n] {
		// The first entry with the tag: nearly always the page itself.
		if tag := tags[i]; word != 0 && uint32(word>>32) != tag {
			for at := homes[i]; word != 0 && uint32(word>>32) != tag; {
				at = t.next(at)
				word = table[at]
				e.idx.steps++
			}
		}
		out[i] = uint32(word)
	}
	for _, ref := range out {
		if ref != 0 {
			r := e.regions[ref>>recordBits]
			slot, _ := r.split(ref & recordMask)
			seen |= uint64(r.slots[slot].pins)
		}
	}
	e.scratch.touched = seen
	for i, ref := range out {
		if d := w.hash(w.last(from + i)); ref != 0 && !e.same(s, ref, d) {
			out[i] = e.find(s, d)
		}
	}
}

// bisect returns the last page of chunk i of a walk that can be read, and its record. The chunk's
// last page in the walk is known not to be readable. A record of 0: no page is.
func (e *Engine) bisect(s *space, w *walk, i int) (record uint32, page int) {
	if record, page = e.lastHeld(s, w, i); e.unverified.Load() == 0 {
		return record, page
	}
	if rec := e.served(record); rec != 0 || record == 0 {
		return rec, page
	}
	return e.lastPage(s, w, i, true)
}

// lastHeld is bisect for pages that are held, verified or not.
func (e *Engine) lastHeld(s *space, w *walk, i int) (record uint32, page int) {
	return e.lastPage(s, w, i, false)
}

// lastPage is bisect, for readable pages or for held ones.
func (e *Engine) lastPage(s *space, w *walk, i int, readable bool) (record uint32, page int) {
	lo, hi := w.start(i), w.last(i) // the result is below hi, and at or above lo if there is one
	for lo < hi {
		mid := int(uint(lo+hi) / 2)
		rec := e.find(s, w.hash(mid))
		if readable {
			rec = e.served(rec)
		}
		if rec != 0 && e.at(rec, mid) {
			record, page = rec, mid
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return record, page
}
