// Package stack puts the tiers below the arena under one engine: it answers lookups from all of
// them, brings up what they have before it is needed, and writes down what the arena has before
// that is lost. A tier (see tiers.Tier) only moves chunks; queues, workers, deadlines, estimates
// and the breaker are here, alike for all tiers, so that a tier that is slow, full or dead costs
// nobody but those who wait for it, and these a bounded time.
//
// # Lookups
//
// What the arena answers in full is answered at once, on the caller's goroutine, and so is what no
// tier can better: when there is none, or all answer from memory (Local) and have no more.
// Everything else goes on without the caller:
//
//	walking ──▶ verifying ──▶ seeking ──▶ queued ──▶ preparing ──▶ loading ──▶ answered
//
// Walking is for long lookups only (Config.LongChunks): a goroutine, the walker, goes on with them
// in the arena where their caller has stopped, in parts and by turns of their owners (walk.go).
// Verifying is for what the arena has from its last run (see Config.Verify): its chunks are
// verified, near ones first, by a few workers in turns, each chunk once whoever wants it. Then the
// lookup is looked up again, as if it came then; a chunk that was corrupt ends its hit, unless a
// tier has it. At the deadline it is answered with what is verified. Seeking asks the tiers in
// their order how much they have of the rest; for each tier that is not Local a few workers do, so
// that a slow one delays only what the faster ones have not. Then it is known what could come from
// where, and the lookup is cut where waiting longer would take more time than computing: the sum of
// what a tier still has to load, at the latency and bandwidth that it showed lately, against the
// time for a page that the asker named. What is left is queued. One goroutine, the dispatcher, lets
// promotions go in their order, each when the engine has room for all of it: one that waits holds
// no slots, so promotions can neither dead-lock nor starve each other. Its chunks are then loaded
// in the order of the prefix. The answer is sent when the last of them has arrived, the first has
// failed in every tier that could have it, or the deadline has passed: it is what is in the arena
// then, without a gap. Whoever else asks for a chunk that is on its way waits for the same load.
//
// Peers (Config.Peers) are asked before all tiers, by what they are said to hold, and what they
// have costs no time in the sum. A lookup all of whose rest is there goes by a shorter way: it
// waits neither for room in the arena nor for its turn, and a peer that has all of it is asked
// first of all, so that it answers while the lookup is prepared by whoever asked; else one of a few
// workers leases it. In others each stretch of consecutive chunks is one call. What peers do not
// lend after all is asked of the tiers. A chunk that was borrowed is found again by whoever asks,
// until nobody has used it for Config.Linger; then it is returned. What was loaded often is copied
// into the arena by a goroutine that nobody waits for.
//
// A lookup may be trimmed, cancelled or lose its owner in every phase. A load that nobody waits for
// any more is not begun; one that was begun ends in the arena, where the next may find it.
//
// # Cascades
//
// Workers of each tier take what the engine has queued for it (see engine.Engine.NextCascades),
// have verified what is to be, write it, and tell the engine. While a tier's breaker is open its
// queue fills and sheds in the engine; nothing else notices. A tier below another one that admits
// what is evicted gets what the tier above names as its next victims (see tiers.Victims), through a
// buffer of bounded size.
//
// # Concurrency
//
// Stack.mu guards the lookups under way, the loads and the queues; it is held for microseconds and
// across no call of a tier or of peers. The engine's lock may be taken under it, and it under
// Stack.prepareMu. An [Asker] is called by one goroutine, without a lock. All goroutines belong to
// the Stack and end in Close.
package stack
