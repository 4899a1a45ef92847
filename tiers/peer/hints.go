package peer

import (
	"encoding/binary"
	"math/bits"
	"sync"

	"github.com/cespare/xxhash/v2"

	"lookaside/dax"
	"lookaside/tiers"
)

// hintKey returns a page's key in the hint table: the XXH64 of its space's fingerprint and its
// digest, with the lowest bit set.
func hintKey(fp *tiers.Fingerprint, digest []byte) uint64 {
	var b [64]byte
	copy(b[:32], fp[:])
	n := copy(b[32:], digest)
	return xxhash.Sum64(b[:32+n]) | 1
}

// hint is an entry of the table. Key 0 marks an empty one.
type hint struct{ key, who uint64 }

// hintTable says which peers are said to hold a page; each peer has a bit. It uses open addressing
// over 16-byte entries off the Go heap, and is at most three quarters full. It grows by doubling:
// lookups search both tables until the smaller one is empty. When a peer leaves, its bit is removed
// from the entries in slices, and is free again after that.
//
// Each hold of the lock is short: one slice of work, and no mapping or unmapping of much memory.
type hintTable struct {
	mu      sync.RWMutex // guards all that follows
	cur     hintSlots
	old     hintSlots // being moved to cur
	scan    int       // in old: all entries before it have moved
	most    int       // limit of entries in cur
	dropped uint64    // hints for which there was no room

	free     uint64 // bits without a peer
	dead     uint64 // retired bits that entries may still have
	sweeping uint64 // those of the dead bits that this pass removes
	sweepAt  int    // in cur: entries before it are clean of sweeping
	pages    [64]int
	freed    chan struct{} // closed, and made anew, when bits become free

	mask  uint64                       // bits of peers that send answers
	asked map[tiers.Fingerprint]uint64 // bits of peers that have a space

	garbage []*dax.Table[hint]
}

type hintSlots struct {
	slots []hint
	seed  uint64 // random, so that no peer can choose colliding pages
	used  int
	mem   *dax.Table[hint]
}

const (
	minHintSlots = 4096
	hintBytes    = 16
	// sliceHints is how many hints are applied, or entries visited, in one hold of the lock.
	sliceHints = 512
	// moveAhead is how many entries of old are visited with each hint that is applied.
	moveAhead = 8
)

func newHintTable(limitBytes int64) (*hintTable, error) {
	t := &hintTable{most: max(minHintSlots, int(limitBytes/hintBytes)), free: ^uint64(0),
		freed: make(chan struct{}), asked: map[tiers.Fingerprint]uint64{}}
	var err error
	t.cur, err = makeHintSlots(minHintSlots)
	return t, err
}

func makeHintSlots(n int) (hintSlots, error) {
	mem, err := dax.NewTable[hint](n)
	if err != nil {
		return hintSlots{}, err
	}
	return hintSlots{slots: mem.Slice(), seed: randomID(), mem: mem}, nil
}

// close frees the memory. Nobody may use the table afterwards.
func (t *hintTable) close() {
	t.mu.Lock()
	for _, s := range []*hintSlots{&t.cur, &t.old} {
		if s.mem != nil {
			t.garbage = append(t.garbage, s.mem)
		}
		*s = hintSlots{}
	}
	t.mu.Unlock()
	t.collect()
}

// collect unmaps tables that are no longer used, outside the lock.
func (t *hintTable) collect() {
	t.mu.Lock()
	garbage := t.garbage
	t.garbage = nil
	t.mu.Unlock()
	for _, g := range garbage {
		_ = g.Close()
	}
}

func (s *hintSlots) home(key uint64) int {
	hi, lo := bits.Mul64(key^s.seed, 0x9E3779B97F4A7C15)
	hi, _ = bits.Mul64(hi^lo, uint64(len(s.slots)))
	return int(hi)
}

func (s *hintSlots) next(i int) int {
	if i++; i == len(s.slots) {
		return 0
	}
	return i
}

// find returns the entry of a key, or nil.
func (s *hintSlots) find(key uint64) *hint {
	if s.used == 0 {
		return nil
	}
	for i := s.home(key); ; i = s.next(i) {
		switch h := &s.slots[i]; h.key {
		case key:
			return h
		case 0:
			return nil
		}
	}
}

func (s *hintSlots) insert(h hint) {
	i := s.home(h.key)
	for s.slots[i].key != 0 {
		i = s.next(i)
	}
	s.slots[i] = h
	s.used++
}

// removeAt empties place i and closes the gap. It returns the first place before from that received
// an entry from place from or behind it, or from if there is none.
func (s *hintSlots) removeAt(i, from int) int {
	n := len(s.slots)
	distance := func(a, b int) int {
		if b < a {
			return b + n - a
		}
		return b - a
	}
	first := from
	s.used--
	for j := s.next(i); s.slots[j].key != 0; j = s.next(j) {
		if distance(s.home(s.slots[j].key), j) >= distance(i, j) {
			if j >= from && i < first {
				first = i
			}
			s.slots[i] = s.slots[j]
			i = j
		}
	}
	s.slots[i] = hint{}
	return first
}

func (s *hintSlots) place(h *hint) int {
	for i := s.home(h.key); ; i = s.next(i) {
		if s.slots[i].key == h.key {
			return i
		}
	}
}

// apply applies a peer's hints: packed words as in wire.PeerPages.
func (t *hintTable) apply(bit int, words []byte) {
	for len(words) > 0 {
		n := min(len(words), 8*sliceHints)
		t.mu.Lock()
		for at := 0; at < n; at += 8 {
			if t.old.used > 0 {
				t.move(moveAhead)
			}
			w := binary.LittleEndian.Uint64(words[at:])
			if w&1 != 0 {
				t.add(w, bit)
			} else {
				t.sub(w|1, bit)
			}
		}
		collect := len(t.garbage) > 0
		t.mu.Unlock()
		if collect {
			t.collect()
		}
		words = words[n:]
	}
}

// add records that a peer holds a page. The caller holds t.mu.
func (t *hintTable) add(key uint64, bit int) {
	b := uint64(1) << bit
	h := t.cur.find(key)
	if h == nil {
		h = t.old.find(key)
	}
	if h != nil {
		if h.who&b == 0 {
			h.who |= b
			t.pages[bit]++
		}
		return
	}
	if 4*(t.cur.used+t.old.used+1) > 3*len(t.cur.slots) && !t.grow() {
		t.dropped++
		return
	}
	t.cur.insert(hint{key, b})
	t.pages[bit]++
}

// sub records that a peer does not hold a page. The caller holds t.mu.
func (t *hintTable) sub(key uint64, bit int) {
	b := uint64(1) << bit
	s := &t.cur
	h := s.find(key)
	if h == nil {
		s = &t.old
		h = s.find(key)
	}
	if h == nil || h.who&b == 0 {
		return
	}
	t.pages[bit]--
	if h.who &^= b; h.who&^t.dead != 0 {
		return
	}
	if s == &t.cur {
		t.sweepAt = s.removeAt(s.place(h), t.sweepAt)
		return
	}
	t.scan = s.removeAt(s.place(h), t.scan)
	t.moved()
}

// grow starts to move to a larger table. It returns false at the limit. The caller holds t.mu.
func (t *hintTable) grow() bool {
	for t.old.used > 0 { // not reached: entries move faster than they come
		t.move(len(t.old.slots))
	}
	n := min(2*len(t.cur.slots), t.most)
	if 4*n < 5*len(t.cur.slots) {
		return false
	}
	s, err := makeHintSlots(n)
	if err != nil {
		return false
	}
	t.old, t.cur, t.scan = t.cur, s, 0
	t.sweepAt = len(s.slots) // entries that move are clean
	t.moved()
	return true
}

// move visits n entries of the old table and moves them. The caller holds t.mu.
func (t *hintTable) move(n int) {
	for ; n > 0 && t.old.used > 0; n-- {
		h := t.old.slots[t.scan]
		if h.key == 0 {
			t.scan = t.old.next(t.scan)
			continue
		}
		t.old.removeAt(t.scan, len(t.old.slots))
		if h.who &^= t.dead; h.who != 0 {
			t.cur.insert(h)
		}
	}
	t.moved()
}

// moved frees the old table if it is empty. The caller holds t.mu.
func (t *hintTable) moved() {
	if t.old.used == 0 && t.old.mem != nil {
		t.garbage = append(t.garbage, t.old.mem)
		t.old = hintSlots{}
	}
}

// take returns a free bit, or -1; freed is closed when one may be free.
func (t *hintTable) take() (bit int, freed <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.free == 0 {
		return -1, t.freed
	}
	bit = bits.TrailingZeros64(t.free)
	t.free &^= 1 << bit
	t.mask |= 1 << bit
	t.pages[bit] = 0
	return bit, nil
}

// retire releases a bit. Hints under it stop counting at once; sweep removes them.
func (t *hintTable) retire(bit int) {
	b := uint64(1) << bit
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mask &^= b
	t.dead |= b
	for fp, who := range t.asked {
		if who &^= b; who == 0 {
			delete(t.asked, fp)
		} else {
			t.asked[fp] = who
		}
	}
}

// sweep removes retired bits from one slice of entries, and continues a move to a larger table.
// more reports whether there is more to do.
func (t *hintTable) sweep() (more bool) {
	t.mu.Lock()
	if t.sweeping == 0 {
		t.sweeping, t.sweepAt = t.dead, 0
	}
	switch {
	case t.old.used > 0:
		t.move(sliceHints)
	case t.sweeping == 0:
	default:
		for n := 0; n < sliceHints && t.sweepAt < len(t.cur.slots); n++ {
			h := &t.cur.slots[t.sweepAt]
			if h.key != 0 {
				if h.who &^= t.sweeping; h.who == 0 {
					// visit the entry that moved into its place next
					t.cur.removeAt(t.sweepAt, len(t.cur.slots))
					continue
				}
			}
			t.sweepAt++
		}
	}
	if t.sweeping != 0 && t.old.used == 0 && t.sweepAt == len(t.cur.slots) {
		t.dead &^= t.sweeping
		t.free |= t.sweeping
		t.sweeping = 0
		close(t.freed)
		t.freed = make(chan struct{})
	}
	more = t.dead != 0 || t.old.used > 0
	collect := len(t.garbage) > 0
	t.mu.Unlock()
	if collect {
		t.collect()
	}
	return more
}

// ask includes a bit in lookups of a space.
func (t *hintTable) ask(bit int, fp tiers.Fingerprint) {
	t.mu.Lock()
	t.asked[fp] |= 1 << bit
	t.mu.Unlock()
}

// answers includes a bit in lookups, or excludes it.
func (t *hintTable) answers(bit int, does bool) {
	t.mu.Lock()
	if t.mask &^= 1 << bit; does {
		t.mask |= 1 << bit
	}
	t.mu.Unlock()
}

// forget removes a wrong hint.
func (t *hintTable) forget(key uint64, bit int) {
	t.mu.Lock()
	t.sub(key, bit)
	t.mu.Unlock()
}

// groupHints is how many pages are looked up together. The loads of one pass do not depend on each
// other, so their cache misses overlap.
const groupHints = 64

// lookUp sets who[i] to the bits, among mask, of the peers said to hold page keys[i]. The caller
// holds t.mu for reading.
func (t *hintTable) lookUp(keys []uint64, mask uint64, who []uint64) {
	var homes [groupHints]int
	var seen [groupHints]hint
	for len(keys) > 0 {
		n := min(len(keys), groupHints)
		for i, key := range keys[:n] {
			homes[i] = t.cur.home(key)
		}
		for i, at := range homes[:n] {
			seen[i] = t.cur.slots[at]
		}
		for i, key := range keys[:n] {
			h := seen[i]
			for at := homes[i]; h.key != key && h.key != 0; h = t.cur.slots[at] {
				at = t.cur.next(at)
			}
			who[i] = h.who & mask // 0 at an empty place
			if h.key == 0 && t.old.used > 0 {
				if o := t.old.find(key); o != nil {
					who[i] = o.who & mask
				}
			}
		}
		keys, who = keys[n:], who[n:]
	}
}

// hintStats is a snapshot of the table.
type hintStats struct {
	pages, slots int
	bytes        int64
	dropped      uint64
}

func (t *hintTable) stats() hintStats {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return hintStats{pages: t.cur.used + t.old.used, slots: len(t.cur.slots),
		bytes: int64(len(t.cur.slots)+len(t.old.slots)) * hintBytes, dropped: t.dropped}
}

// held returns how many pages the peer with a bit is said to hold.
func (t *hintTable) held(bit int) int {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.pages[bit]
}
