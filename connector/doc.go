// Package connector serves the connected vLLM roles: it holds what each may ask of the sidecar, and
// what each owns until it leaves.
//
// A [Server] accepts sessions on the session socket and checks what they declare. It turns their
// validated messages into calls of the engine, and lookups into calls of the stack of tiers. A
// lookup that the arena holds whole gets its reply at once, any other when its pages are promoted.
// A session owns everything that it holds in the engine: lookups, loads and stores. So one call
// frees all of it when the session ends, however it ends.
//
// # Ends
//
// A session ends when its client closes the socket or dies. No thread of the client uses the arena
// then. The sidecar also ends sessions itself, when a client breaks the protocol or does not read.
// Such a client may live, and may still write to slots that it was granted or read slots that it
// leased. Those slots must not be given to another. So a worker then lingers: its end of the socket
// reads as closed, nothing more is received from it, and its unfinished stores never become
// visible, but it keeps its slots until it has closed its end or has died.
//
// # Regions
//
// A worker is sent each region before a grant can name it, and the region's end when no lease is
// left in it ([Server.AnnounceRegion], [Server.RetractRegion]). The worker then ends the copies
// that it has begun, unmaps the region and reports that. A worker that does not in time is given
// up, so that nobody waits for its mapping, which only its death ends. It could still write to the
// region: workers are trusted with the bytes of the arena (see the protocol).
//
// # Another process
//
// A Server passes its sessions to that of another process, which has the same memory: handover.go
// has the modes of a Server that does, handed.go what is passed and how it is taken over. Clients
// keep their sockets and what they hold.
//
// # Trust
//
// A client may ask for anything at any time, and may stop reading, writing or running at any
// moment. It reaches only chunks of the space that it declared, and only lookups of schedulers of
// its own engine and rank. Every message is decoded by bounded code before it is used. A message
// that does not decode ends its session. No client makes another wait: each session has its own
// goroutine, the engine's lock is held for microseconds, and a client that does not read its
// replies is given up. A client that lingers keeps only what it had, and counts for the limit of
// sessions.
//
// # Locks
//
// Server.mu guards the maps of sessions, the spaces and the list of regions. The locks of the
// stack, of the engine and of LMCache's waiting lookups (lmcacheState.mu) may be taken under it.
// The locks of the stack and the engine may be taken under lmcacheState.mu. A session's sendMu puts
// its handshake and the pushed messages about regions in order. It is never taken under Server.mu,
// and it is the only lock held during a send. Results of lookups that had to wait come from a
// goroutine of the stack that holds no lock.
package connector
