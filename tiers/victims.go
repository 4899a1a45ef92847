package tiers

// Victim is a chunk that a tier will drop for want of room.
type Victim struct {
	Run
	Handle uint64
}

// Victims is what a Tier may offer beside: to say ahead what it will drop next, so that a tier
// below it that admits what is evicted can be given it first. Its methods may be called from any
// goroutine; package stack calls them from one.
type Victims interface {
	Tier
	// NextVictims appends up to max chunks that the tier would drop next, coldest first, each to be
	// ended by EndVictim. Until then it keeps them. With fewer than max there are no more for now.
	// The runs are the caller's.
	NextVictims(max int, out []Victim) []Victim
	// EndVictim gives a victim back; ok says that it is kept below now, and need not be offered
	// again.
	EndVictim(handle uint64, ok bool)
	// VictimsReady is sent to when NextVictims may have something (again).
	VictimsReady() <-chan struct{}
}
