package engine

// flightTable has the slots that are being promoted into and may be joined, by Engine.flight. It is
// open addressing, at most half full, which costs a tenth of a Go map's time: a lookup at peers
// enters and removes hundreds of chunks.
type flightTable struct {
	entries []flight
	n       int
}

// flight is an entry. Empty: ref 0.
type flight struct {
	hash uint64
	ref  uint32
}

const minFlights = 64

func (t *flightTable) home(hash uint64) int { return int(hash & uint64(len(t.entries)-1)) }

// find is the place of a hash, or the empty one where it would be.
func (t *flightTable) find(hash uint64) int {
	i, mask := t.home(hash), len(t.entries)-1
	for t.entries[i].ref != 0 && t.entries[i].hash != hash {
		i = (i + 1) & mask
	}
	return i
}

// get is the slot that has a hash; 0: none has.
func (t *flightTable) get(hash uint64) uint32 {
	if t.n == 0 {
		return 0
	}
	return t.entries[t.find(hash)].ref
}

// set enters a slot, in place of any that has the same hash.
func (t *flightTable) set(hash uint64, ref uint32) {
	if 2*(t.n+1) > len(t.entries) {
		old := t.entries
		t.entries = make([]flight, max(minFlights, 2*len(old)))
		for _, f := range old {
			if f.ref != 0 {
				t.entries[t.find(f.hash)] = f
			}
		}
	}
	i := t.find(hash)
	if t.entries[i].ref == 0 {
		t.n++
	}
	t.entries[i] = flight{hash, ref}
}

// remove takes a slot out, if it is the one that has the hash.
func (t *flightTable) remove(hash uint64, ref uint32) {
	if t.n == 0 {
		return
	}
	i, mask := t.find(hash), len(t.entries)-1
	if t.entries[i].ref != ref {
		return
	}
	t.n--
	for j := (i + 1) & mask; t.entries[j].ref != 0; j = (j + 1) & mask { // closes the gap
		if (j-t.home(t.entries[j].hash))&mask >= (j-i)&mask {
			t.entries[i] = t.entries[j]
			i = j
		}
	}
	t.entries[i] = flight{}
}
