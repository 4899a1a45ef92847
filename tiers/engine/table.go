package engine

// hashTable maps integer keys to 32-bit numbers that are not 0. It is open addressing, at most a
// quarter full, as each collision is a mispredicted branch of a lookup. Neighbouring keys lie
// together: the slots of a prefix often are neighbours. It takes a tenth of a Go map's time.
//
// The index of pages (index.go) is a table of its own. Several of its entries may have one key, and
// only the records of their pages distinguish them. It lies off the Go heap. It is restored in
// parts, so its entries must lie in the order of their keys.
type hashTable[K ~uint32 | ~uint64] struct {
	entries []hashEntry[K]
	n       int // in use
}

// hashEntry is empty if its value is 0.
type hashEntry[K ~uint32 | ~uint64] struct {
	key   K
	value uint32
}

const minEntries = 64

// home is where the entry of a key lies, unless another one is there.
func (t *hashTable[K]) home(key K) uint32 {
	const line = 8
	h := uint32(uint64(key) / line * mixer >> 32)
	return (h*line | uint32(key)%line) & uint32(len(t.entries)-1)
}

// find returns the place of a key, or the empty one where it would be. There must be entries.
func (t *hashTable[K]) find(key K) uint32 {
	i, mask := t.home(key), uint32(len(t.entries)-1)
	for t.entries[i].key != key && t.entries[i].value != 0 {
		i = (i + 1) & mask
	}
	return i
}

// grow makes room for one entry more.
func (t *hashTable[K]) grow() {
	if 4*(t.n+1) <= len(t.entries) {
		return
	}
	old := t.entries
	t.entries = make([]hashEntry[K], max(minEntries, 2*len(old)))
	for _, x := range old {
		if x.value != 0 {
			t.entries[t.find(x.key)] = x
		}
	}
}

// removeAt empties place i and closes the gap: what was displaced over it moves back.
func (t *hashTable[K]) removeAt(i uint32) {
	t.n--
	mask := uint32(len(t.entries) - 1)
	for j := (i + 1) & mask; t.entries[j].value != 0; j = (j + 1) & mask {
		if (j-t.home(t.entries[j].key))&mask >= (j-i)&mask {
			t.entries[i] = t.entries[j]
			i = j
		}
	}
	t.entries[i] = hashEntry[K]{}
}

// tally counts an owner's leases by slot, so that its share is measured in slots however many of
// its requests have one prefix in common.
type tally struct{ hashTable[uint32] }

// add counts a lease. It returns false, with nothing counted, if that is on a slot too many.
func (t *tally) add(ref uint32, limit int) bool {
	t.grow()
	x := &t.entries[t.find(ref)]
	if x.value == 0 {
		if t.n >= limit {
			return false
		}
		x.key = ref
		t.n++
	}
	x.value++
	return true
}

// sub takes back a lease that was counted.
func (t *tally) sub(ref uint32) {
	i := t.find(ref)
	x := &t.entries[i]
	if x.value == 0 {
		panic("engine: an owner ends a lease that it was not counted for")
	}
	if x.value--; x.value == 0 {
		t.removeAt(i)
	}
}

// flightTable has the slots that are being promoted into and may be joined, by arena.flight.
type flightTable struct{ hashTable[uint64] }

// get returns the slot that has a hash. 0: none has.
func (t *flightTable) get(hash uint64) uint32 {
	if t.n == 0 {
		return 0
	}
	return t.entries[t.find(hash)].value
}

// set enters a slot, in place of any that has the same hash.
func (t *flightTable) set(hash uint64, ref uint32) {
	t.grow()
	x := &t.entries[t.find(hash)]
	t.n += b2i(x.value == 0)
	*x = hashEntry[uint64]{hash, ref}
}

// remove takes a slot out, if it is the one that has the hash.
func (t *flightTable) remove(hash uint64, ref uint32) {
	if t.n == 0 {
		return
	}
	if i := t.find(hash); t.entries[i].value == ref {
		t.removeAt(i)
	}
}
