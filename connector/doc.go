// Package connector is what a connected vLLM role may ask of the sidecar, and what it owns until it
// leaves.
//
// A [Server] accepts sessions on the session socket, checks what they declare, and turns their
// validated messages into calls of the engine, and lookups into calls of the stack of tiers over
// it: what the arena has is answered at once, the rest when it has been brought up. Everything that
// a session holds in the engine (lookups, loads, stores) is held in the session's name, so its end,
// however it comes, frees all of it with one call.
//
// # Ends
//
// A session ends when its client closes the socket or dies: then none of its threads touches the
// arena any more. When it is we who want to hear no more of a client (it breaks the protocol, or
// does not read), it may live, and be writing to what it was granted or reading what it leased:
// that must not become another's. Such a worker lingers: its end of the socket reads as closed,
// nothing that it says is heard, what it was filling will never be visible, but its slots stay its
// own until it has closed its end or has died.
//
// # Regions
//
// A worker hears of each region before a grant can name it, and of its end when no lease is left in
// it ([Server.AnnounceRegion], [Server.RetractRegion]). It then lets its copies that began before
// end, unmaps the region and says so; one that does not in time is given up, so that its mapping,
// which only its own death ends, keeps nobody waiting. It has no business there any more, but could
// write: workers are trusted with the bytes of the arena (see the protocol).
//
// # Trust
//
// A client may ask for anything at any time and may stop reading, writing or running at any moment.
// It reaches only chunks of the space that it declared, and only lookups of schedulers of its own
// engine and rank. Every message is decoded by bounded code before anything is done; one that does
// not decode ends its session. No client makes another wait: each session has its own goroutine,
// the engine's lock is held for microseconds, and a client that does not read its answers is given
// up. One that lingers keeps no more than it had, and takes one of the places for sessions.
//
// # Locks
//
// Server.mu guards who is connected, the spaces and the list of regions. The locks of the stack and
// of the engine may be taken under it, and that of LMCache's waiting lookups; under the latter
// those of the stack and the engine. A session's sendMu keeps its handshake and what is pushed to
// it, of regions that come and go, in order; it is never taken under Server.mu, and no lock is held
// across a send but sendMu. Answers to lookups that had to wait come from a goroutine of the stack,
// which holds no lock.
package connector
