// Package tiers is the engine: it knows which pages of KV cache are held, where, and who may use them until when. It keeps books only;
// bytes are moved by others, into and out of the extents that it names.
//
// # Words
//
// A page is named by its digest in a space (see package chunk); the digest is cumulative, so it names a whole prefix. A chunk is up to
// PagesPerChunk consecutive pages, a slot the room for one. Regions are carved into slots for one geometry when a store first needs them,
// and carved again for another geometry when that has none and theirs are the coldest.
//
// # States of a slot
//
//	Free ── PrepareStore ──▶ Filling ── CommitStore ──▶ Ready ── evicted, cleared, replaced, bad ──▶ Free
//	  ▲                         │
//	  └── AbortStore, failed, ──┘
//	      duplicate, cleared
//
// Only Ready slots are in the index. A Ready slot whose last chunk is partly filled may be extended: a store writes behind its committed
// pages, which stay readable meanwhile. A slot's generation rises each time it becomes Free. A Ready slot in use by a lookup, load, pin or
// extension is neither evicted nor moved; dropped meanwhile, it leaves the index at once and becomes Free after its last use.
//
// # Promises
//
//   - No false hit. A page is found only if its bytes were committed under its full digest in its very space. Any doubt is a miss.
//   - A prefix outlives its continuation: what is evicted is the least recently used slot that no held slot continues.
//   - Where several slots share a page one of them is in the index; when it leaves another takes its place. No operation walks over the slots that share.
//   - Every lease has a living owner, or is a pin. An owner that leaves or dies leaves nothing behind; one that freezes keeps at most its share.
//   - Handles of what has ended are refused, and change nothing.
//
// # Concurrency
//
// One lock guards everything. It is held neither across I/O nor a copy nor a system call: tables are mapped and unmapped without it, and work
// that depends on the size of the arena (clearing a space, emptying a region, a larger index) lets go of it between small slices.
// The clock is injected and nothing depends on chance, so a history of calls can be replayed exactly.
package tiers
