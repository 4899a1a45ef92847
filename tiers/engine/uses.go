package engine

// usesKept is how many chunks the table of uses remembers.
const usesKept = 1 << 16

// uses counts how often chunks were wanted that are not stored yet, for stores that are to wait for
// a later use (Storing.FromUse). It is exact for the last usesKept chunks, but for collisions of
// 64-bit hashes, which are keyed by the space. Older ones are forgotten, first come first. A sketch
// would take less memory and count what it has not seen. The memory, 5 MiB at most, is taken as it
// is used.
type uses struct {
	counts hashTable[uint64] // by hash
	order  []uint64          // the hashes as they came: a ring once it is full
	next   int               // the oldest, once it is full
	limit  int               // usesKept; tests change it
}

// add counts a use of a chunk, and returns how many that makes.
func (u *uses) add(hash uint64) uint32 {
	if u.counts.n > 0 {
		if x := &u.counts.entries[u.counts.find(hash)]; x.value != 0 {
			x.value++
			return x.value
		}
	}
	switch {
	case len(u.order) < max(u.limit, 1):
		u.order = append(u.order, hash)
	default:
		u.counts.removeAt(u.counts.find(u.order[u.next]))
		u.order[u.next] = hash
		u.next = (u.next + 1) % len(u.order)
	}
	u.counts.grow()
	u.counts.entries[u.counts.find(hash)] = hashEntry[uint64]{hash, 1}
	u.counts.n++
	return 1
}
