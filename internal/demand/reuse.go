package demand

import (
	"container/heap"
	"math"
	"math/bits"
	"slices"
	"time"
)

// reuse measures how chunks are used again: after how long, and after how many bytes of other
// chunks (the reuse distance: an LRU cache of that size would just hit). It is SHARDS in its
// variant of fixed size (Waldspurger, Park, Garthwaite, Ahmad: Efficient MRC Construction with
// SHARDS, FAST 2015). It remembers the chunks with the smallest hashes, at most sampleChunks of
// them, so the sample of all chunks gets thinner the more different ones there are; what it sees
// counts for as many as were left out. A chunk is named by its first page.
type reuse struct {
	seed  uint64
	limit uint64 // hashes from here on are not in the sample
	all   map[uint64]*used
	byTop hashHeap
	// order is a Fenwick tree of the bytes of chunks by their last use: places 1 to next-1.
	order []int64
	at    []*used // by place; nil: used again since
	next  int
	hist  Reuse
}

// used is a chunk of the sample.
type used struct {
	hash  uint64
	place int
	bytes int64
	last  time.Time
	index int // in byTop
}

// sampleChunks is the most chunks of the sample. The error of the distances is some 1 %.
const sampleChunks = 8192

// places is the length of the order. It is renumbered when it is full.
const places = 4 * sampleChunks

// ReuseBuckets is the number of bounded buckets of each histogram of a Reuse.
const ReuseBuckets = 16

// SecondsBound returns the upper bound of bucket i of a Reuse's times: 1, 2, 4, … 2^15 s, 9 hours.
func SecondsBound(i int) float64 { return float64(uint64(1) << i) }

// BytesBound returns the upper bound of bucket i of a Reuse's distances: 2^28, 2^29 … 2^43 bytes,
// 256 MiB to 8 TiB.
func BytesBound(i int) float64 { return float64(uint64(1) << (28 + i)) }

// Reuse has histograms of lookups of chunks that had been looked up or stored before, in chunks.
// Each bucket counts its own; the last is unbounded.
type Reuse struct {
	Seconds    [ReuseBuckets + 1]uint64
	SumSeconds float64
	Bytes      [ReuseBuckets + 1]uint64
	SumBytes   float64
	First      uint64  // lookups of chunks that had not been seen before
	Rate       float64 // the part of the chunks that is in the sample now
}

type hashHeap []*used

func (h hashHeap) Len() int           { return len(h) }
func (h hashHeap) Less(i, j int) bool { return h[i].hash > h[j].hash }
func (h hashHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

// Push implements heap.Interface.
func (h *hashHeap) Push(x any) {
	u := x.(*used)
	u.index = len(*h)
	*h = append(*h, u)
}

// Pop implements heap.Interface.
func (h *hashHeap) Pop() any {
	old := *h
	u := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	return u
}

func newReuse(seed uint64) *reuse {
	return &reuse{seed: seed, limit: math.MaxUint64, all: map[uint64]*used{},
		order: make([]int64, places+1), at: make([]*used, places+1), next: 1}
}

// rate is the part of all chunks that is in the sample.
func (u *reuse) rate() float64 {
	if u.limit == math.MaxUint64 {
		return 1
	}
	return float64(u.limit) / (1 << 64)
}

// note counts a request's chunks.
func (u *reuse) note(r *request, now time.Time) {
	ppc := r.shape.pagesPerChunk
	for i := 0; i < len(r.pages); i += ppc - (r.first+i)%ppc {
		if (r.first+i)%ppc != 0 {
			continue // its first page is not named
		}
		// The names are spread already, but samples by themselves: the curve's are others.
		if hash := (r.pages[i] ^ u.seed) * 0x9E3779B97F4A7C15; hash < u.limit {
			u.use(hash, r.shape.chunkBytes(), now, r.kind != store)
		}
	}
}

// use counts a use of a chunk of the sample.
func (u *reuse) use(hash uint64, bytes int64, now time.Time, lookup bool) {
	c := u.all[hash]
	if c == nil {
		if lookup {
			u.hist.First += uint64(1/u.rate() + 0.5)
		}
		c = &used{hash: hash, bytes: bytes, last: now}
		u.all[hash] = c
		heap.Push(&u.byTop, c)
		u.append(c)
		if len(u.byTop) > sampleChunks {
			top := heap.Pop(&u.byTop).(*used)
			u.limit = top.hash
			u.remove(top)
			delete(u.all, top.hash)
		}
		return
	}
	if lookup {
		weight := uint64(1/u.rate() + 0.5)
		u.hist.Seconds[bucket(now.Sub(c.last).Seconds(), 0)] += weight
		u.hist.SumSeconds += now.Sub(c.last).Seconds() * float64(weight)
		// With the chunk itself: a cache of this size holds it still.
		distance := float64(u.after(c.place))/u.rate() + float64(c.bytes)
		u.hist.Bytes[bucket(distance, 28)] += weight
		u.hist.SumBytes += distance * float64(weight)
	}
	c.last = now
	u.remove(c)
	u.append(c)
}

// bucket returns the bucket of a value whose first bound is 2^first.
func bucket(v float64, first int) int {
	n := uint64(math.Ceil(v))
	if n <= 1<<first {
		return 0
	}
	return min(bits.Len64(n-1)-first, ReuseBuckets)
}

// after returns the bytes of the chunks used after a place.
func (u *reuse) after(place int) int64 { return u.sum(u.next-1) - u.sum(place) }

func (u *reuse) sum(place int) (n int64) {
	for ; place > 0; place &= place - 1 {
		n += u.order[place]
	}
	return n
}

func (u *reuse) add(place int, n int64) {
	for ; place < len(u.order); place += place & -place {
		u.order[place] += n
	}
}

func (u *reuse) remove(c *used) {
	u.add(c.place, -c.bytes)
	u.at[c.place] = nil
}

// append makes a chunk the one used last.
func (u *reuse) append(c *used) {
	if u.next > places {
		kept := slices.DeleteFunc(slices.Clone(u.at), func(c *used) bool { return c == nil })
		clear(u.order)
		clear(u.at)
		u.next = 1
		for _, k := range kept {
			u.append(k)
		}
	}
	c.place = u.next
	u.next++
	u.at[c.place] = c
	u.add(c.place, c.bytes)
}

func (u *reuse) report() Reuse {
	out := u.hist
	out.Rate = u.rate()
	return out
}
