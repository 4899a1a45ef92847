// Package stack connects one engine with the tiers below its arena. It looks chunks up in all of
// them, promotes chunks before they are needed, and writes the arena's chunks to tiers before they
// are evicted. A tier (tiers.Tier) only moves chunks. Queues, workers, deadlines, estimates and the
// breaker are in this package, the same for all tiers. So a slow, full or failed tier delays only
// the requests that wait for it, and by a bounded time.
//
// # Lookups
//
// A lookup is done when Lookup returns if the arena holds all of it, if there is no tier, or if all
// tiers are Local (they look up in memory) and hold no more than the arena. Every other lookup
// becomes a request, which continues after Lookup has returned:
//
//	asking ────▶ walking, verifying, seeking, queued or preparing
//	walking ───▶ seeking
//	verifying ─▶ seeking
//	seeking ───▶ seeking (the next tier), verifying (after walking), queued
//	queued ────▶ preparing
//	preparing ─▶ loading
//	loading ───▶ seeking (peers lent less than they hinted)
//	each but asking and preparing ─▶ ended
//
// The table named phases has every legal transition. It also names the one owner that may use a
// request's survey, plan and checklist in each phase. Debug builds (the tag invariants, or -race)
// panic at any other transition. A request that is cancelled in the phase preparing ends when that
// phase ends.
//
// A request has three parts. The question is the lookup's arguments, and does not change. The plan
// is what the request waits for, from where, and until when. It is a pure function of the question,
// of the survey (what peers hint and tiers report that they hold) and of the terms (estimates, and
// the time that computing takes). The progress changes all the time and is guarded by Stack.mu.
//
// asking: Lookup reads the hints of peers and looks up in the Local tiers.
//
// walking: the walker goes on in the arena with a long lookup (Config.LongChunks), part by part.
// Owners take turns.
//
// verifying: chunks that the arena restored from its last run are verified (Config.Verify), nearest
// first, by a few workers; requests take turns. Each chunk is verified once, however many requests
// wait for it. Then the request is looked up in the arena again. A corrupt chunk ends the hit,
// unless a tier holds it. At the deadline the answer is what is verified.
//
// seeking: what is still missing is looked up in the tiers, in their order. Each tier that is not
// Local has a few workers for lookups, so that a slow tier delays only what the faster ones do not
// hold. Then the plan is made. It ends where waiting longer would take more time than computing.
// The time to wait is what a tier still has to load, at its recent latency and bandwidth. The time
// to compute is Query.Recompute for each page.
//
// queued: one goroutine, the dispatcher, starts promotions in their order, each when the engine has
// room for all of it. A request that waits holds no slots, so promotions can neither deadlock nor
// starve each other.
//
// preparing: the engine reserves the slots, and the loads are queued in the order of the prefix. A
// chunk that is already on its way for another request is waited for, not loaded twice.
//
// loading: the request ends when its last chunk has arrived, when its first has failed in every
// tier that could hold it, or at its deadline. The answer is what the arena holds then without a
// gap. A load that no request waits for any more is not begun. A load that was begun ends in the
// arena, where the next lookup may find it.
//
// # Peers
//
// Peers (Config.Peers) come before all tiers, and what they hold costs no time in the plan. A
// request all of whose rest is at peers takes a shorter path: it waits neither for room in the
// arena nor for its turn, and its caller prepares it (reserve.go). If one peer holds all of the
// rest, the caller first sends that peer a request for a lease; the reply arrives during the
// preparation. Otherwise a peerWorker leases each stretch of consecutive chunks by one call. Tiers
// are searched for what peers then do not lend.
//
// A borrowed chunk is found by later lookups until it has been unused for Config.Linger. Then it is
// returned. A background goroutine, the copier, copies a chunk that is loaded often into the arena.
//
// # Cascades
//
// Workers of each tier take the chunks that the engine has queued for it
// (engine.Engine.NextCascades), verify those that need it, write them, and report the outcome to
// the engine. While a tier's breaker is open, its queue in the engine fills and then drops chunks;
// other tiers are not affected. A tier that admits evicted chunks and lies below another tier
// receives what the tier above names as its next victims (tiers.Victims), through a buffer of
// bounded size.
//
// # Concurrency
//
// There are three locks. A goroutine takes them in this order:
//
//	Stack.prepareMu   held while a request is prepared: one at a time
//	Stack.deliverMu   held while Askers are called, so that each receives its calls in order
//	Stack.mu          guards requests' progress, the books, the loads and the queues
//
// The engine's lock may be taken while any of them is held. Stack.mu is held for microseconds, and
// never across a call of a tier or of peers. Stack.unlockAndWake releases it and wakes the
// goroutines that have something to do.
//
// An [Asker] is called by one goroutine at a time, which holds only deliverMu. All goroutines
// belong to the Stack and end in Close.
package stack
