// Package stack puts the tiers below the arena under one engine. It answers lookups from all of
// them, promotes what they hold before it is needed, and writes down what the arena holds before
// that is lost. A tier (tiers.Tier) only moves chunks. Queues, workers, deadlines, estimates and
// the breaker are here, the same for all tiers. So a tier that is slow, full or dead costs only
// those who wait for it, and costs them a bounded time.
//
// # Lookups
//
// A lookup that the arena holds whole is done when Lookup returns. So is one that no tier can
// better: there is none, or all of them answer from memory (Local) and hold no more. Every other
// lookup becomes a request, which goes on behind its caller:
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
// panic at any other transition. A request that is cancelled while it is being prepared ends as
// soon as it has been.
//
// A request has three parts. The question is what was asked for, and does not change. The plan is
// what it waits for, from where, and until when: a pure function of the question, of the survey
// (what hints and tiers say they hold) and of the terms (estimates, and the time that computing
// takes). The progress changes all the time and is guarded by Stack.mu.
//
// asking: Lookup reads the hints of peers and asks the tiers that answer from memory.
//
// walking: the walker goes on in the arena with a long lookup (Config.LongChunks), part by part.
// Owners take turns.
//
// verifying: chunks that the arena restored from its last run are verified (Config.Verify), nearest
// first, by a few workers in turns. Each chunk is verified once, whoever wants it. Then the lookup
// is looked up again, as if it came then. A corrupt chunk ends its hit, unless a tier holds it. At
// the deadline the answer is what is verified.
//
// seeking: the tiers are asked in their order for what is still missing. Each tier that is not
// Local has a few workers for that, so that a slow tier delays only what the faster ones do not
// hold. Then the plan is made. It ends where waiting longer would take more time than computing:
// what a tier still has to load, at the latency and bandwidth it showed lately, against the time
// for a page that the asker named.
//
// queued: one goroutine, the dispatcher, lets promotions go in their order, each when the engine
// has room for all of it. A request that waits holds no slots, so promotions can neither dead-lock
// nor starve each other.
//
// preparing: the engine reserves the slots, and the loads are queued in the order of the prefix. A
// chunk that is already on its way for another request is waited for, not loaded twice.
//
// loading: the request ends when its last chunk has arrived, when its first has failed in every
// tier that could hold it, or at its deadline. The answer is what the arena holds then without a
// gap. A load that nobody waits for any more is not begun. A load that was begun ends in the arena,
// where the next lookup may find it.
//
// # Peers
//
// Peers (Config.Peers) come before all tiers, and what they hold costs no time in the plan. A
// request all of whose rest is at peers goes a shorter way: it waits neither for room in the arena
// nor for its turn, and its caller prepares it (reserve.go). A peer that holds all of it is asked
// before that, so that it answers meanwhile. Otherwise a peerWorker leases each stretch of
// consecutive chunks by one call. What peers do not lend after all is asked of the tiers.
//
// A borrowed chunk is found by later lookups until nobody has used it for Config.Linger. Then it is
// returned. A chunk that is loaded often is copied into the arena by a goroutine that nobody waits
// for.
//
// # Cascades
//
// Workers of each tier take what the engine has queued for it (engine.Engine.NextCascades), have
// verified what needs it, write it, and tell the engine. While a tier's breaker is open its queue
// fills and sheds in the engine; nothing else notices. A tier below another one that admits what is
// evicted gets what the tier above names as its next victims (tiers.Victims), through a buffer of
// bounded size.
//
// # Concurrency
//
// There are three locks. A goroutine takes them in this order:
//
//	Stack.prepareMu   held while a request is prepared: one at a time
//	Stack.deliverMu   held while askers are told, so that each is told in order
//	Stack.mu          guards requests' progress, the books, the loads and the queues
//
// The engine's lock may be taken under any of them. Stack.mu is held for microseconds, and across
// no call of a tier or of peers. Stack.unlockAndWake releases it and wakes the goroutines that then
// have something to do.
//
// An [Asker] is called by one goroutine at a time, without a lock but deliverMu. All goroutines
// belong to the Stack and end in Close.
package stack
