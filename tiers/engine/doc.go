// Package engine knows which pages of KV cache one arena holds, where, and who may use them until
// when. It keeps books only; bytes are moved by others, into and out of the extents that it names.
//
// # Words
//
// A page is named by its digest in a space (see package tiers); the digest is cumulative, so it
// names a whole prefix. A chunk is up to PagesPerChunk consecutive pages, a slot the room for one.
// Regions are carved into slots piece by piece as stores need them, each piece for one geometry,
// and carved again for another geometry when that wants more and has less, or when nobody has used
// the piece for long (areas.go).
//
// # States of a slot
//
//	Free ── PrepareStore ──────▶ Filling ── CommitStore ─────▶ Ready ── evicted, bad, … ──▶ Free
//	  ▲  ├─ PreparePromotion ──▶    │    ├─ FinishPromotion ──▶  │ ▲    (also cleared, replaced)
//	  │  └─ NextCopy ──────────▶    │    └─ EndCopy ──────────▶  │ │
//	  │                             │                            ▼ │
//	  └── AbortStore, failed, ──────┘                        being written to a tier
//	      duplicate, cleared                                 (NextCascades … EndCascade)
//
// Only Ready slots are in the index. A Ready slot whose last chunk is partly filled may be
// extended: a store writes behind its committed pages, which stay readable meanwhile. A slot's
// generation rises each time it becomes Free. A Ready slot in use by a lookup, load, pin,
// extension, cascade, move or copy is not evicted, and its bytes stay where they are; dropped
// meanwhile, it leaves the index at once and becomes Free after its last use. One whose memory has
// turned out to be bad (Spoil) is Free, and never granted again.
//
// # Unverified slots
//
// A slot may be restored (Restore) as Ready and unverified: nobody has checked yet that its bytes
// are those of its pages. Such a slot is held, so stores offer nothing for it and it is evicted
// like any other, but nobody is led to its bytes: for lookups, pins and promotions it is the end of
// what is held, unless a verified slot has the page as well. Whoever wants it has it checked
// (NextVerify … EndVerify), which makes it an ordinary one, or drops it. Only cascades and moves
// lease unverified slots, and are told so. A move checks what it copies.
//
// # Promotions
//
// A lookup that goes on with what a tier has (PreparePromotion) leases slots that are still
// Filling, its own or those that another lookup is having filled with the same chunks, and waits.
// They are reserved all at once or cut from its end: no lookup ever waits for a slot while it has
// others, so promotions cannot deadlock. Whoever gives up meanwhile, a slot that somebody may be
// writing stays until FinishPromotion. SettleLookup ends the waiting: the lookup holds what has
// arrived without a gap, and its deadline starts.
//
// A chunk that is cleared while it comes up does not appear. If a store is first with it, both
// slots stay, linked like any that share pages, until the lookups that wait for the promoted one
// have let go of it. A partly filled chunk that a lookup holds is replaced by the longer one that
// it waited for when it settles.
//
// # Cascades
//
// Each tier below has a bounded queue of slots to be written to it, and each slot a bit for each
// tier: held, queued, being written. A chunk is queued when it is committed, when it is used again,
// or ahead of its eviction, as the tier admits; a partly filled one when it has not grown for a
// while. What finds the queue full, or is evicted before its turn, is shed and counted. What is
// evicted ahead goes through a list of cold slots: taken out of the policy's order, written,
// evicted before all others, and put back by any use.
//
// An arena that lies on something that lasts is the last of its own tiers (TierAdmission.Self):
// what is to be written there is what makes a chunk be found again.
//
// # Moves
//
// A region that is drained (Drain) hands out no slots, and nothing in it is evicted. Its chunks are
// moved out of it one by one: NextMoves grants a slot elsewhere, without evicting anything for it,
// and leases the chunk, which goes on being found and read where it is; EndMove makes the index,
// the slots that continue it, its place in the order of eviction and what the tiers have of it
// those of the new slot, at one moment. Leases stay with the old slot, which is free when they have
// ended. What was dropped, or replaced by a longer version, during its move has not moved. An empty
// region can be taken away (RemoveRegion).
//
// # Foreign slots
//
// What a peer lends is a slot, too (Config.ForeignSlots): PreparePromotion grants it, FinishBorrow
// says where its pages lie and how many they are, and from then on lookups, joins, loads and their
// ends treat it as any other. But it is none of the arena's: it has limits and an order of eviction
// of its own, is no chunk's parent, is seen neither by stores, pins, loans and Contains nor by
// followers, and goes to no tier. Where the arena has a chunk as well, that is read. It becomes
// Free as any slot does, and its loan is then returned (TakeReturns): because room is wanted,
// nobody has used it for a while (SweepForeign), its bytes were found bad, or its peer has gone
// (DropPeer).
//
// What was loaded so often from there is copied (Config.CopyAfter): NextCopy grants a slot of the
// arena, with room made as for a promotion, and leases the foreign one; EndCopy makes the former
// Ready, as if it had been stored, or Free, if the latter was dropped meanwhile.
//
// # Followers
//
// With Config.JournalBytes anybody may follow (Follow) what can be found: everything that is held,
// walked over in slices of the lock, and each change from then on, out of a bounded ring that is
// written only while somebody follows. Who falls behind by more than the ring is told so, and gets
// everything anew.
//
// # Promises
//
//   - No false hit. A page is found only if its bytes were committed under its full digest in its
//     very space. Any doubt is a miss.
//   - A prefix outlives its continuation: what is evicted is a slot that no held slot continues, in
//     the order of the geometry's policy.
//   - Where several slots share a page one of them is in the index; when it leaves another takes
//     its place. No operation but Drop walks over the slots that share.
//   - Every lease has a living owner, or is a pin, a cascade, a move or a copy. An owner that
//     leaves or dies leaves nothing behind; one that freezes keeps at most its share.
//   - Handles of what has ended are refused, and change nothing.
//
// # Concurrency
//
// One lock guards everything. It is held neither across I/O nor a copy nor a system call: tables
// are mapped and unmapped without it, and work that depends on the size of the arena (clearing a
// space, emptying a region, a larger index) lets go of it between small slices. The clock is
// injected and nothing depends on chance, so a history of calls can be replayed exactly.
package engine
