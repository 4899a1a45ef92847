package tiers

// Victim is a chunk that a tier will drop when it needs room.
type Victim struct {
	Run
	Handle uint64
}

// Victims is an optional interface of a Tier that can tell in advance what it will drop. A tier
// below it that admits evicted chunks is then given them first. Methods may be called from any
// goroutine; package stack calls them from one.
type Victims interface {
	Tier
	// NextVictims appends up to max chunks that the tier would drop next, coldest first. The tier
	// keeps each until the caller ends it by EndVictim. Fewer than max means that there are no more
	// for now. The caller owns the runs.
	NextVictims(max int, out []Victim) []Victim
	// EndVictim releases a victim. ok reports that a tier below holds it now, so that it need not
	// be offered again.
	EndVictim(handle uint64, ok bool)
	// VictimsReady receives when NextVictims may have more victims.
	VictimsReady() <-chan struct{}
}
