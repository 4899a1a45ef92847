// Package policy orders the chunks of a store by which should leave first when room is needed. A
// policy keeps books only: it does no I/O and knows no clock. Nothing in it is safe for concurrent
// use; the owner calls it under its own lock.
//
// # The calls of a policy
//
// Slots are named by refs, as in the engine: the region's number in the upper 6 bits, the slot's in
// the lower 26. A chunk enters a slot, is used, and leaves it. In between the owner offers the slot
// while it is unleased and no resident chunk continues it, because a continuation without its
// prefix is useless. So a victim is always the end of a prefix, whatever the policy. When the last
// continuation of a chunk leaves, the chunk is offered. A policy that goes by time then takes the
// later of both times of use.
//
// # Groups
//
// The owner divides the chunks into groups. Each group has an order of its own, and Victim names
// the chunk of one group that should leave first. What a policy learns of chunks, and what it
// remembers of those that left, is common to all groups. A group's capacity is what the others
// leave of the store: with one group it is the whole store. Group 0 is always there, another is
// made when its first chunk comes. That allocates, and so do its offers while they are more than
// ever before.
//
// A chunk's key is the same whenever the same content is resident, and differs from every other key
// (except for collisions). A policy that remembers evicted chunks remembers their keys. 0 is no
// key.
package policy

// SlotBits and SlotMask split a slot's ref: the region's number above, the slot's number in the
// region below.
const (
	SlotBits = 26
	SlotMask = 1<<SlotBits - 1
)

// Policy is one order of eviction. All methods but Grow, Shrink, Work and Read take amortised
// constant or logarithmic time; Read is linear in its refs. All but Grow, Shrink and Work allocate
// nothing once the policy has grown.
type Policy interface {
	// Name returns the name that New takes.
	Name() string
	// Grow makes room for a region's slots, refs region<<SlotBits … region<<SlotBits + slots-1,
	// none of them resident. The policy's capacity is the sum over all regions.
	Grow(region uint32, slots int)
	// Shrink forgets a region, none of whose slots is resident.
	Shrink(region uint32)
	// Enter records that a chunk became resident in a slot. It is held (not offered) until Offer.
	// parent is the resident slot that it continues; 0 means none, so no slot may have the ref 0,
	// and regions are best numbered from 1. The parent may be of another group.
	Enter(ref uint32, key uint64, parent uint32, group uint8)
	// Use records that a resident chunk was hit or stored again.
	Use(ref uint32)
	// Read prefetches the notes of slots of known regions, resident or not, for calls that are
	// about to follow for each. It reads in a loop of its own, so that the cache misses overlap. It
	// changes nothing.
	Read(refs []uint32)
	// Offer allows a resident slot to be chosen from now on. It has no effect on an offered slot.
	Offer(ref uint32)
	// Hold withdraws an offered slot (the reverse of Offer). It has no effect on a slot that is not
	// offered.
	Hold(ref uint32)
	// Leave records that a chunk is no longer resident; its slot is no longer offered. evicted
	// means that it left for room, and may be wanted back.
	Leave(ref uint32, evicted bool)
	// Regroup moves a resident slot to another group. It stays offered if it was.
	Regroup(ref uint32, group uint8)
	// Copy records that the chunk of one slot is now resident in another too, with the same history
	// and group, and not offered. The chunk is moving: it will leave the first slot soon, not
	// evicted.
	Copy(from, to uint32)
	// Inherit records that a prefix was last used when its continuation was. child is about to
	// leave, parent stays. They may be of different groups.
	Inherit(parent, child uint32)
	// Victim returns the offered slot of a group that should leave first. It stays until Leave. The
	// call may change the policy's state, for example when a second chance is given.
	Victim(group uint8) (ref uint32, ok bool)
	// Work does up to n small steps of deferred work (adaptive's samples), which keeps them out of
	// the owner's critical path. The owner calls it now and then.
	Work(n int)
}
