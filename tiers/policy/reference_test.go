package policy

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// reference is a policy written down as plainly as can be: lists of keys, the oldest first, all of
// them always to be had.
type reference interface {
	enter(key uint64)
	use(key uint64)
	victim() uint64
	evict(key uint64)
}

type list []uint64

func (l *list) remove(key uint64) bool {
	i := slices.Index(*l, key)
	if i >= 0 {
		*l = slices.Delete(*l, i, i+1)
	}
	return i >= 0
}

func (l *list) toEnd(key uint64) bool {
	if !l.remove(key) {
		return false
	}
	*l = append(*l, key)
	return true
}

type refLRU struct{ list }

func (r *refLRU) enter(key uint64) { r.list = append(r.list, key) }
func (r *refLRU) use(key uint64)   { r.toEnd(key) }
func (r *refLRU) victim() uint64   { return r.list[0] }
func (r *refLRU) evict(key uint64) { r.remove(key) }

type refSIEVE struct {
	list
	visited map[uint64]bool
	hand    int // what it looks at next
}

func (r *refSIEVE) enter(key uint64) {
	if r.hand == len(r.list) { // it went past the newest, so it is at the oldest again
		r.hand = 0
	}
	r.list = append(r.list, key)
}

func (r *refSIEVE) use(key uint64) { r.visited[key] = true }

func (r *refSIEVE) victim() uint64 {
	for {
		if r.hand >= len(r.list) {
			r.hand = 0
		}
		key := r.list[r.hand]
		if !r.visited[key] {
			return key
		}
		r.visited[key] = false
		r.hand++
	}
}

func (r *refSIEVE) evict(key uint64) {
	r.list = slices.Delete(r.list, r.hand, r.hand+1)
	delete(r.visited, key)
}

type refS3FIFO struct {
	capacity           int
	small, main, ghost list
	uses               map[uint64]int
}

func (r *refS3FIFO) enter(key uint64) {
	r.uses[key] = 0
	if r.ghost.remove(key) {
		r.main = append(r.main, key)
	} else {
		r.small = append(r.small, key)
	}
}

func (r *refS3FIFO) use(key uint64) { r.uses[key] = min(r.uses[key]+1, 3) }

func (r *refS3FIFO) victim() uint64 {
	for {
		if len(r.small) > 0 && (len(r.small) >= r.capacity/10 || len(r.main) == 0) {
			key := r.small[0]
			if r.uses[key] <= 1 {
				return key
			}
			r.small = r.small[1:]
			r.main = append(r.main, key)
			continue
		}
		key := r.main[0]
		if r.uses[key] == 0 {
			return key
		}
		r.uses[key]--
		r.main.toEnd(key)
	}
}

func (r *refS3FIFO) evict(key uint64) {
	if r.small.remove(key) {
		if r.ghost = append(r.ghost, key); len(r.ghost) > r.capacity-r.capacity/10 {
			r.ghost = r.ghost[1:]
		}
	} else {
		r.main.remove(key)
	}
}

type refARC struct {
	capacity, p    int
	t1, t2, b1, b2 list
}

func (r *refARC) enter(key uint64) {
	b1, b2 := len(r.b1), len(r.b2)
	switch {
	case r.b1.remove(key):
		r.p = min(r.capacity, r.p+max(1, b2/b1))
		r.t2 = append(r.t2, key)
	case r.b2.remove(key):
		r.p = max(0, r.p-max(1, b1/b2))
		r.t2 = append(r.t2, key)
	default:
		r.t1 = append(r.t1, key)
	}
}

func (r *refARC) use(key uint64) {
	r.t1.remove(key)
	r.t2.remove(key)
	r.t2 = append(r.t2, key)
}

func (r *refARC) victim() uint64 {
	if len(r.t1) > 0 && (len(r.t1) > r.p || len(r.t2) == 0) {
		return r.t1[0]
	}
	return r.t2[0]
}

func (r *refARC) evict(key uint64) {
	once := r.t1.remove(key)
	if once {
		for len(r.b1) > 0 && len(r.t1)+len(r.b1) >= r.capacity {
			r.b1 = r.b1[1:]
		}
	} else {
		r.t2.remove(key)
	}
	if len(r.b1)+len(r.b2) >= r.capacity {
		if len(r.b2) > 0 {
			r.b2 = r.b2[1:]
		} else {
			r.b1 = r.b1[1:]
		}
	}
	if once {
		r.b1 = append(r.b1, key)
	} else {
		r.b2 = append(r.b2, key)
	}
}

type refTinyLFU struct {
	capacity                     int
	window, probation, protected list
	last                         map[uint64]int // when a key was used
	now                          int
	sketch                       sketch
}

func (r *refTinyLFU) room() int { return max(r.capacity/100, 1) }

// sorted inserts a key into probation, which is in the order of use.
func (r *refTinyLFU) sorted(key uint64) {
	i := 0
	for i < len(r.probation) && r.last[r.probation[i]] < r.last[key] {
		i++
	}
	r.probation = slices.Insert(r.probation, i, key)
}

func (r *refTinyLFU) enter(key uint64) {
	r.now++
	r.last[key] = r.now
	r.window = append(r.window, key)
	r.sketch.add(key)
	// The newest is leased still.
	for i := 0; i < 2 && len(r.window) > r.room() &&
		len(r.probation)+len(r.protected) < r.capacity-r.room() && len(r.window) > 1; i++ {
		r.sorted(r.window[0])
		r.window = r.window[1:]
	}
}

func (r *refTinyLFU) use(key uint64) {
	r.now++
	r.last[key] = r.now
	r.sketch.add(key)
	if !r.window.toEnd(key) && !r.protected.toEnd(key) {
		r.probation.remove(key)
		r.protected = append(r.protected, key)
	}
}

func (r *refTinyLFU) victim() uint64 {
	for len(r.protected) > (r.capacity-r.room())*4/5 {
		r.sorted(r.protected[0])
		r.protected = r.protected[1:]
	}
	main := r.probation
	if len(main) == 0 {
		main = r.protected
	}
	switch {
	case len(main) == 0:
		return r.window[0]
	case len(r.window) < r.room():
		return main[0]
	case r.sketch.estimate(r.window[0]) <= r.sketch.estimate(main[0]):
		return r.window[0]
	}
	victim := main[0]
	r.sorted(r.window[0])
	r.window = r.window[1:]
	return victim
}

func (r *refTinyLFU) evict(key uint64) {
	_ = r.window.remove(key) || r.probation.remove(key) || r.protected.remove(key)
}

// TestAgainstReference: on chunks without prefixes each policy evicts what its plain form evicts.
func TestAgainstReference(t *testing.T) {
	t.Parallel()
	const seed = 7
	references := map[string]func(capacity int) reference{
		"lru":   func(int) reference { return &refLRU{} },
		"sieve": func(int) reference { return &refSIEVE{visited: map[uint64]bool{}} },
		"s3fifo": func(c int) reference {
			return &refS3FIFO{capacity: c, uses: map[uint64]int{}}
		},
		"arc": func(c int) reference { return &refARC{capacity: c} },
		"wtinylfu": func(c int) reference {
			r := &refTinyLFU{capacity: c, last: map[uint64]int{}, sketch: sketch{seed: seed}}
			r.sketch.resize(c)
			return r
		},
	}
	for name := range references {
		if !slices.Contains(Names(), name) {
			t.Errorf("there is no policy %q", name)
		}
	}
	for _, name := range Names() {
		reference := references[name]
		if reference == nil {
			continue // adaptive and those to come: they have no plain form
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, capacity := range []int{10, 37, 300} {
				p, _ := New(name, Options{Seed: seed})
				half := capacity / 2
				p.Grow(3, half) // the regions make no difference
				p.Grow(1, capacity-half)
				var free []uint32
				for i := range capacity {
					if i < half {
						free = append(free, 3<<SlotBits|uint32(i))
					} else {
						free = append(free, 1<<SlotBits|uint32(i-half))
					}
				}
				ref := reference(capacity)
				slots, keys := map[uint64]uint32{}, map[uint32]uint64{}
				rnd := rand.New(rand.NewPCG(seed, uint64(capacity)))
				z := rand.NewZipf(rnd, 1.1, 3, uint64(8*capacity))
				loop := uint64(0)
				for i := range 40 * capacity {
					key := mix(z.Uint64() + 1)
					if i/(5*capacity)%2 == 1 { // now and then a loop that does not fit
						loop++
						key = mix(1<<32 + loop%uint64(capacity+capacity/4+1))
					}
					if slot, ok := slots[key]; ok {
						leased := rnd.IntN(2) == 0
						if leased {
							p.Hold(slot)
						}
						p.Use(slot)
						if leased {
							p.Offer(slot)
						}
						ref.use(key)
						continue
					}
					if len(free) == 0 {
						want := ref.victim()
						got, ok := p.Victim(0)
						if !ok || keys[got] != want {
							t.Fatalf("seed %d, capacity %d, access %d: victim %#x, want %#x", seed,
								capacity, i, keys[got], want)
						}
						p.Leave(got, true)
						ref.evict(want)
						delete(slots, want)
						free = append(free, got)
					}
					slot := free[len(free)-1]
					free = free[:len(free)-1]
					slots[key], keys[slot] = slot, key
					p.Enter(slot, key, 0, 0)
					ref.enter(key)
					p.Offer(slot)
				}
			}
		})
	}
}
