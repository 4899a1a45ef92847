package engine

import "math/bits"

// Residence: how long chunks stay in the arena until they are evicted for room. It is what an arena
// of this size gives a prefix: a request that comes back later than this finds nothing.
//
// Nobody pays for it but stores and evictions, a word each. The clock is read in Expire only, so
// that a store does not wait for it: a time is wrong by what passes between two calls of Expire.

// residenceUnit is the unit of a slot's birth, in nanoseconds: 1/8 s. 32 bits of it are 17 years.
const residenceUnit = 125e6

// residenceTime is a reading of the clock in residenceUnits.
func residenceTime(now int64) uint32 { return uint32(max(now, 0) / residenceUnit) }

// ResidenceBuckets is the number of bounded buckets of a Residence.
const ResidenceBuckets = 12

// ResidenceBound returns the upper bound of bucket i, in seconds: 1, 4, 16, … 4^11, which is 48
// days.
func ResidenceBound(i int) float64 { return float64(uint64(1) << (2 * i)) }

// Residence is a histogram of how long chunks were in the arena when they were evicted for room.
// What was restored at the start counts from then on.
type Residence struct {
	// Counts has the chunks of each bucket, not of those below it; the last is unbounded.
	Counts  [ResidenceBuckets + 1]uint64
	Seconds float64 // of all of them together
}

// residence is guarded by the engine's lock.
type residence struct {
	now  uint32 // the time of the last Expire
	hist Residence
}

// note counts the eviction of a chunk that became ready at born.
func (r *residence) note(born uint32) {
	age := r.now - min(born, r.now)
	// Up to 8 units are the first bucket, up to 32 the second.
	bucket := 0
	if age > 8 {
		bucket = (bits.Len32((age-1)>>3) + 1) / 2
	}
	r.hist.Counts[min(bucket, ResidenceBuckets)]++
	r.hist.Seconds += float64(age) * (residenceUnit / 1e9)
}

// Residence returns how long evicted chunks had been in the arena.
func (e *Engine) Residence() Residence {
	e.mu.Lock()
	defer e.unlock()
	return e.residence.hist
}
