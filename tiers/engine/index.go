package engine

import (
	"encoding/binary"
	"math/bits"
	"slices"

	"lookaside/dax"
	"lookaside/tiers"
)

// A page's record is named by a ref: the region's number and the record's number in it. Records lie
// slot by slot, so the number also gives slot and position. 0 is no ref, as regions count from 1.
// Slots are named likewise, by region and slot.
const (
	recordBits = 26
	recordMask = 1<<recordBits - 1
	maxRegions = 1<<(32-recordBits) - 1
)

// index maps page digests to the refs of the pages' records. It holds neither digest nor space,
// these are in the records: a candidate that it names must be compared with them in full.
//
// It is open addressing over 8-byte entries, a 32-bit tag above the ref, in one table off the Go
// heap. The tag also gives an entry's home, so that entries can be moved and removed without
// reading a record. Tables are sized for the arena's limit when the first region is carved. Should
// another geometry need more, a larger table takes over step by step: both are searched until the
// old one is empty.
type index struct {
	cur, old table
	scan     uint32 // in old: entries below it have moved
	garbage  []*dax.Table[uint64]
	steps    uint64 // entries looked at, for tests of the work done
}

type table struct {
	words []uint64
	used  int
	mem   *dax.Table[uint64]
}

// maxLoad is the part of a table that may be used, in eighths. A fuller one is smaller, but half of
// its entries lie away from their homes, which a lookup's loop over many of them pays for with a
// mispredicted branch each.
const maxLoad = 4

func (t *table) home(tag uint32) uint32 {
	return uint32(uint64(tag) * uint64(len(t.words)) >> 32)
}

func (t *table) next(i uint32) uint32 {
	if i++; int(i) == len(t.words) {
		return 0
	}
	return i
}

func entry(tag, ref uint32) uint64 { return uint64(tag)<<32 | uint64(ref) }

// limit is the entries that the current table may hold.
func (x *index) limit() int { return len(x.cur.words) / 8 * maxLoad }

// tableWords is the size of a table for n entries: a multiple of parts, so that the homes of the
// tags of one part are that part's alone.
func tableWords(n int) int { return (n/(maxLoad*parts/8) + 1) * parts }

func (x *index) migrating() bool { return x.old.used > 0 }

// grow makes an empty table the current one. There must be no other growth under way.
func (x *index) grow(mem *dax.Table[uint64]) {
	if x.cur.used == 0 {
		x.retire(&x.cur)
	} else {
		x.old, x.scan = x.cur, 0
	}
	x.cur = table{words: mem.Slice(), mem: mem}
}

func (x *index) retire(t *table) {
	if t.mem != nil {
		x.garbage = append(x.garbage, t.mem)
	}
	*t = table{}
}

// migrate moves up to n entries, looking at no more than 8n places.
func (x *index) migrate(n int) {
	if !x.migrating() {
		return
	}
	for looked := 0; n > 0 && looked < 8*n; looked++ {
		w := x.old.words[x.scan]
		if w == 0 {
			x.scan = x.old.next(x.scan)
			continue
		}
		x.cur.insert(w)
		x.old.removeAt(x.scan)
		n--
		if x.old.used == 0 {
			x.retire(&x.old)
			return
		}
	}
}

func (t *table) insert(w uint64) {
	i := t.home(uint32(w >> 32))
	for t.words[i] != 0 {
		i = t.next(i)
	}
	t.words[i] = w
	t.used++
}

// removeAt empties place i and closes the gap: what was displaced over it moves back.
func (t *table) removeAt(i uint32) {
	n := uint32(len(t.words))
	distance := func(from, to uint32) uint32 {
		if to < from {
			return to + n - from
		}
		return to - from
	}
	t.used--
	for j := t.next(i); t.words[j] != 0; j = t.next(j) {
		if distance(t.home(uint32(t.words[j]>>32)), j) >= distance(i, j) {
			t.words[i] = t.words[j]
			i = j
		}
	}
	t.words[i] = 0
}

// place finds an entry, which must be there.
func (x *index) place(w uint64) (*table, uint32) {
	for _, t := range [...]*table{&x.cur, &x.old} {
		if len(t.words) == 0 {
			continue
		}
		for i := t.home(uint32(w >> 32)); t.words[i] != 0; i = t.next(i) {
			x.steps++
			if t.words[i] == w {
				return t, i
			}
		}
	}
	panic("tiers: an indexed page has no entry")
}

func (x *index) insert(tag, ref uint32) { x.cur.insert(entry(tag, ref)) }

func (x *index) remove(tag, ref uint32) {
	t, i := x.place(entry(tag, ref))
	t.removeAt(i)
	if t == &x.old && t.used == 0 {
		x.retire(t)
	}
}

// replace makes the entry of one ref that of another with the same digest.
func (x *index) replace(tag, ref, by uint32) {
	t, i := x.place(entry(tag, ref))
	t.words[i] = entry(tag, by)
}

func (x *index) len() int { return x.cur.used + x.old.used }

func (x *index) close() {
	x.retire(&x.cur)
	x.retire(&x.old)
}

const mixer = 0x9E3779B97F4A7C15

func mix(h, w uint64) uint64 {
	hi, lo := bits.Mul64(h^w, mixer)
	return hi ^ lo
}

// hash is a digest's, keyed by its space.
func (s *space) hash(d []byte) uint64 {
	h := s.salt
	for i := 0; i+8 <= len(d); i += 8 {
		h = mix(h, binary.LittleEndian.Uint64(d[i:]))
	}
	return h
}

// hashOfRecord is hash for a digest as records keep it.
func (s *space) hashOfRecord(words []uint64) uint64 {
	h := s.salt
	for _, w := range words {
		h = mix(h, w)
	}
	return h
}

// tag is what the index has of a digest's hash.
func (s *space) tag(d []byte) uint32 { return uint32(s.hash(d)>>32) & s.tagMask }

// tagOfRecord is tag for a digest as records keep it.
func (s *space) tagOfRecord(words []uint64) uint32 {
	return uint32(s.hashOfRecord(words)>>32) & s.tagMask
}

// key is what the policies know a page by.
func (s *space) key(words []uint64) uint64 { return max(s.hashOfRecord(words), 1) }

// equal compares a record's digest with one from a message.
func equal(words []uint64, d []byte) bool {
	var diff uint64
	for i, w := range words {
		diff |= w ^ binary.LittleEndian.Uint64(d[8*i:])
	}
	return diff == 0
}

// same says whether ref is the record of digest d in space s.
func (e *Engine) same(s *space, ref uint32, d []byte) bool {
	r := e.regions[ref>>recordBits]
	if r.class != s.class {
		return false
	}
	i, pos := r.split(ref & recordMask)
	return r.slots[i].space == s.id && equal(r.digest(i, int(pos)), d)
}

// sameAs is same for a digest as records keep it.
func (e *Engine) sameAs(s *space, ref uint32, words []uint64) bool {
	r := e.regions[ref>>recordBits]
	if r.class != s.class {
		return false
	}
	i, pos := r.split(ref & recordMask)
	return r.slots[i].space == s.id && slices.Equal(r.digest(i, int(pos)), words)
}

// find is the indexed record of digest d in space s, 0 if the page is not held.
func (e *Engine) find(s *space, d []byte) uint32 {
	rec, steps := e.seek(s, d)
	e.idx.steps += steps
	return rec
}

// seek is find, which changes nothing: the entries that it looked at are for its caller to count.
func (e *Engine) seek(s *space, d []byte) (rec uint32, steps uint64) {
	tag := s.tag(d)
	for _, t := range [...]*table{&e.idx.cur, &e.idx.old} {
		if t.used == 0 {
			continue
		}
		for i := t.home(tag); t.words[i] != 0; i = t.next(i) {
			steps++
			if w := t.words[i]; uint32(w>>32) == tag && e.same(s, uint32(w), d) {
				return uint32(w), steps
			}
		}
	}
	return 0, steps
}

// findOrInsert is find for a page that a record has, by its tag and digest: if it is not held, the
// record's entry is put where it was looked for.
func (e *Engine) findOrInsert(s *space, tag uint32, digest []uint64, rec uint32) (held uint32) {
	held, at := e.findIn(&e.idx.cur, s, tag, digest)
	if held == 0 && e.idx.old.used > 0 {
		held, _ = e.findIn(&e.idx.old, s, tag, digest)
	}
	if held == 0 {
		e.idx.cur.words[at] = entry(tag, rec)
		e.idx.cur.used++
	}
	return held
}

// findIn is the record of a page in one table and the place of its entry; without one the record is
// 0, and the place is where its entry belongs.
func (e *Engine) findIn(t *table, s *space, tag uint32, digest []uint64) (rec, at uint32) {
	for at = t.home(tag); t.words[at] != 0; at = t.next(at) {
		e.idx.steps++
		if w := t.words[at]; uint32(w>>32) == tag && e.sameAs(s, uint32(w), digest) {
			return uint32(w), at
		}
	}
	return 0, at
}

// tagGroup is how many pages' tags are computed at a time.
const tagGroup = 32

// tagsOf computes the tags of a slot's pages from one on, and reads their homes, which are about to
// be used, in a loop of its own: its cache misses overlap.
func (e *Engine) tagsOf(s *space, r *region, ref uint32, tags []uint32, from int) {
	for i := range tags {
		tags[i] = s.tagOfRecord(r.digest(ref&recordMask, from+i))
	}
	seen := uint64(0)
	t := &e.idx.cur
	for _, tag := range tags {
		seen |= t.words[t.home(tag)]
	}
	e.touched = seen // keeps the loop that only reads
}

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

// last is its last page.
func (w *walk) last(i int) int { return min(w.first+w.n, (w.chunk+i+1)*w.ppc) - 1 }

// end is the page after its last.
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
	e.touched = seen
	for i, ref := range out {
		if d := w.hash(w.last(from + i)); ref != 0 && !e.same(s, ref, d) {
			out[i] = e.find(s, d)
		}
	}
}
