package engine

import "lookaside/dax"

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
	// For tests of the work done: entries looked at, and links between records followed.
	steps, linkSteps uint64
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
	panic("engine: an indexed page has no entry")
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

// removeIf removes an entry if it is there.
func (t *table) removeIf(w uint64) {
	for at := t.home(uint32(w >> 32)); t.words[at] != 0; at = t.next(at) {
		if t.words[at] == w {
			t.removeAt(at)
			return
		}
	}
}
