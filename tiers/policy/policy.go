// Package policy orders the chunks of a store by which should leave first when room is wanted. A
// policy only keeps books: it does no I/O, knows no clock, and nothing in it is safe for concurrent
// use; its owner calls it under the owner's lock.
//
// # What a policy is told
//
// Slots are named by refs as the engine's are: the region's number in the upper 6 bits, the slot's
// in the lower 26. A chunk enters a slot, is used, and leaves it. In between the owner says whether
// the slot may be chosen: it is offered while it is unleased and no resident chunk continues it,
// because a continuation without its prefix is worth nothing. So a victim always is the end of a
// prefix, whatever the policy. When the last continuation of a chunk leaves, the chunk is offered,
// and a policy that goes by time takes the later of both times of use.
//
// A chunk's key is the same whenever the same content is resident, and nothing else's (but for
// chance): it is what a policy that remembers what has left remembers it by. 0 is no key.
package policy

// SlotBits and SlotMask say how a slot's ref is split: the region's number above, the slot's number
// in it below.
const (
	SlotBits = 26
	SlotMask = 1<<SlotBits - 1
)

// Policy is one order of eviction. All methods but Grow, Shrink and Work take amortised constant or
// logarithmic time and allocate nothing once the policy has grown.
type Policy interface {
	// Name is the name that New takes.
	Name() string
	// Grow makes room for a region's slots, refs region<<SlotBits … region<<SlotBits + slots-1,
	// none of them resident. The policy's capacity is the sum over all regions.
	Grow(region uint32, slots int)
	// Shrink forgets a region, none of whose slots is resident.
	Shrink(region uint32)
	// Enter says that a chunk became resident in a slot. It is held (not offered) until Offer.
	// parent is the resident slot that it continues, 0 for none (so no slot may have the ref 0:
	// regions are best numbered from 1).
	Enter(ref uint32, key uint64, parent uint32)
	// Use says that a resident chunk was hit (or stored again).
	Use(ref uint32)
	// Read reads what the policy has of some slots of its regions, resident or not, in a loop of
	// its own, so that the cache misses overlap: calls for each of them are about to be made. It
	// changes nothing.
	Read(refs []uint32)
	// Offer says that a resident slot may be chosen from now on. Offering what is offered changes
	// nothing.
	Offer(ref uint32)
	// Hold ends an Offer. Holding what is not offered changes nothing.
	Hold(ref uint32)
	// Leave says that a chunk is resident no more; evicted says that it went for room, and might be
	// wanted back. Its slot is not offered any more.
	Leave(ref uint32, evicted bool)
	// Copy says that what is resident in one slot is resident in another as well from now on, with
	// the same past and not offered: it is moving there, and will leave the first slot, not
	// evicted, before long.
	Copy(from, to uint32)
	// Inherit says that a continuation was used last when its prefix was: child is about to leave,
	// parent stays.
	Inherit(parent, child uint32)
	// Victim is the offered slot that should leave first. It stays until Leave. It may change what
	// the policy knows (a second chance was given).
	Victim() (ref uint32, ok bool)
	// Work does up to n small steps of what a policy puts off to stay out of its owner's way
	// (adaptive's trials). The owner calls it now and then.
	Work(n int)
}
