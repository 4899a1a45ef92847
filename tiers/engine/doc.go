// Package engine knows which pages of KV cache one arena holds, where, and who may use them until
// when. It keeps books only; bytes are moved by others, into and out of the extents that it names.
//
// # Words
//
// A page is named by its digest in a space (see package tiers); the digest is cumulative, so it
// names a whole prefix. A chunk is up to PagesPerChunk consecutive pages, a slot the room for one.
// Regions are carved into slots piece by piece as stores need them, each piece for one geometry,
// and carved again for another geometry when that wants more and has less, or when the piece has
// not been used for long (areas.go).
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
// A slot may be restored (Restore) as Ready and unverified: that its bytes are those of its pages
// has not been checked yet. It is held, so stores offer nothing for it, and it is evicted like any
// other. But its bytes are not read: for lookups, pins and promotions what is held ends there,
// unless a verified slot has the page as well. A check (NextVerify … EndVerify) makes it an
// ordinary slot, or drops it. Only cascades and moves lease unverified slots, and learn that they
// are. A move checks what it copies.
//
// # Promotions
//
// A lookup that continues with chunks from a tier (PreparePromotion) leases slots that are still
// Filling and waits. They are its own slots, or slots that another lookup fills with the same
// chunks. All are reserved at once, or the end of the run is cut off. So no lookup waits for a slot
// while it holds others, and promotions cannot deadlock. A slot that may still be written to stays
// until FinishPromotion, even if all lookups have left it. SettleLookup ends the wait: the lookup
// holds what has arrived without a gap, and its deadline starts.
//
// A chunk that is cleared on its way up does not appear. If a store is first with it, both slots
// stay until the lookups that wait for the promoted one have left it. They are linked like any
// slots that share pages. A partly filled chunk that a lookup holds is replaced, when the lookup
// settles, by the longer version that it waited for.
//
// # Cascades
//
// Each tier below has a bounded queue of slots to be written to it. Each slot has three bits for
// each tier: held, queued, being written. A chunk is queued when it is committed, when it is used
// again, or ahead of its eviction, as the tier admits. Ahead of its eviction package worth may
// decline it. A partly filled chunk is queued when it has not grown for a while. A chunk that finds
// the queue full, or is evicted before its turn, is shed and counted.
//
// A chunk that is written ahead of its eviction is cold: it leaves the policy's order, is written,
// and is evicted before all others. Any use puts it back. What a cold chunk continues may become
// cold while the chunk is still there, so the order of eviction stays the policy's. Cold chunks
// without continuations are evicted first, in the order in which they became that.
//
// An arena on a medium that lasts is the last of its own tiers (TierAdmission.Self): a chunk that
// was written there is found again by the next process.
//
// # Keeping and restoring
//
// A driver can write down what the arena holds, so that the next process finds it. The engine names
// the pieces (Config.OnCarve, OnUncarve), the new chunks (NextUnkept), all chunks (NextPatrol), and
// the slots whose chunk is gone (Config.OnGone). The driver writes a chunk's entry without a lock,
// and makes it valid in Publish, if the chunk is still held. OnGone makes it void before the slot
// is granted to another chunk. So at any instant each valid entry names a chunk that is held, and
// whose bytes nobody may write to.
//
// The next process adds each region drained (AddDrainedRegion), carves its pieces as they were
// (RestorePiece) and names what they held (RestoreIn). EndRestore makes it ready. It can be found,
// once it is verified, while stores take memory elsewhere. Undrain has the region used as any
// other: for the time when nobody can still be writing to it under a grant of the process before.
//
// # Handover
//
// Another process can go on with an arena at once. Its engine restores what this one holds, and
// takes over what owners and operators hold (Export, Import): the same leases on the same slots,
// under the same handles. A slot that a load reads is kept even if its chunk was dropped, and one
// that an unfinished store may write to holds no chunk. Promotions and loads of what peers lent end
// before.
//
// # Hints
//
// A request may have chunks retained or pinned for a time, or evicted before others (hints.go). A
// pinned slot is not in use: it is just not offered to the policy. The others differ by the
// policy's group that they are in. What may be kept so is bounded, and times end in Expire.
//
// # Tenants
//
// A slot counts as a tenant's (package tenant), from its grant until it is free. With Config.Shares
// each tenant has an order of eviction of its own in each geometry, and what is evicted is the
// coldest of the tenant that has the most beyond its share: tenants.go.
//
// # Moves
//
// A region that is drained (Drain) hands out no slots, and nothing in it is evicted, carved or
// taken for another geometry. If it was added carved, its chunks can be moved out of it one by one.
// NextMoves grants a slot elsewhere, without evicting anything for it,
// and leases the chunk, which is found and read where it is meanwhile. EndMove gives the new slot,
// at one moment, the old one's place in the index, in its prefix and in the order of eviction, and
// what the tiers have of it. Leases stay with the old slot, which becomes free when they have
// ended. A chunk that was dropped, or replaced by a longer version, during its move has not moved.
// An empty region can be taken away (RemoveRegion).
//
// # Foreign slots
//
// A foreign slot (Config.ForeignSlots) stands for what a peer lends. PreparePromotion grants it,
// and FinishBorrow sets where its pages lie and how many they are. From then on lookups, joins and
// loads treat it as any other. But it is not one of the arena's: it has limits and an order of
// eviction of its own, is no chunk's parent, and goes to no tier. Stores, pins, loans, Contains and
// followers do not see it. If the arena has the chunk as well, that is read. Its loan is returned
// (TakeReturns) when it becomes Free: because room is wanted, because it has not been used for a
// while (SweepForeign), because its bytes were found bad, or because its peer has gone (DropPeer).
//
// A chunk that is loaded often from a peer is copied (Config.CopyAfter). NextCopy makes room as for
// a promotion, grants a slot of the arena, and leases the foreign slot. EndCopy makes the new slot
// Ready, as if it had been stored. It becomes Free instead if the foreign slot was dropped
// meanwhile.
//
// # Followers
//
// With Config.JournalBytes a follower can watch what can be found (Follow): first everything held,
// in slices of the lock, then each change. Changes come from a bounded ring that is written only
// while a feed is open. A follower that falls behind by more than the ring begins again.
//
// # Debug builds
//
// A debug build (package invariants) checks itself at the end of calls on small arenas, poisons
// freed slots, and panics with both stacks when a lease ends twice: debug.go.
//
// # Promises
//
//   - No false hit. A page is found only if its bytes were committed under its full digest in its
//     very space. Any doubt is a miss.
//   - A prefix outlives its continuation: what is evicted is a slot that no held slot continues, in
//     the order of the geometry's policy.
//   - With shares, a tenant at or below its own loses no slot to another tenant's store or
//     promotion in the geometry.
//   - Where several slots share a page one of them is in the index; when it leaves another takes
//     its place. No operation but Drop walks over the slots that share.
//   - Every lease has a living owner, or is a pin, a cascade, a move or a copy. An owner that
//     leaves or dies leaves nothing behind; one that freezes keeps at most its share.
//   - Handles of what has ended are refused, and change nothing.
//
// # Concurrency
//
// One lock guards everything. It is held neither across I/O nor a copy nor a system call: tables
// are mapped and unmapped without it. Work that depends on the size of the arena (clearing a space,
// emptying a region, a larger index) releases it between small slices. The clock is injected and
// nothing depends on chance, so a history of calls can be replayed exactly.
//
// # Files
//
//	engine.go, config.go, debug.go   the type, its settings, its checks of itself (check.go)
//	regions.go, areas.go, carve.go   memory: who has it, who may take it, how it gets slots
//	slots.go, pages.go, prefixes.go  one slot, its pages' records, what it continues
//	index.go, walk.go, evict.go      how a page is found, many at a time; how room is made
//	spaces.go, owners.go, leases.go  whose pages are alike, who holds slots, and how
//	lookup.go, load.go, store.go     what a session asks
//	tenants.go                       whose slots are, and which tenant loses one
//	hints.go, uses.go                how single requests want chunks kept, and when stored
//	lend.go, foreign.go, copies.go   what is lent to peers, lent by them, and kept of that
//	promotions.go, cascades.go       up from the tiers, and down to them
//	drain.go, moves.go               out of a region
//	keep.go, handover.go             what is written down for another run, and handed over to it
//	restore*.go, verify.go           what another run has left; patrol.go looks at it later
//	journal.go, stats.go,            what followers and operators learn
//	residence.go
//	why.go                           why a page is not held
package engine
