// Package hosts carries sessions of schedulers to sidecars of other hosts.
//
// An engine whose ranks are on several hosts has one scheduler, which looks prefixes up at every
// rank's sidecar. It reaches those of other hosts through the sidecar of its own host:
//
//	scheduler                   host A │ host B
//	    │ hosts.sock, direct socket    │           session.sock, direct socket
//	    └────── caller ════════════════╪═ TCP ════ answerer ────── session
//
// Both sidecars have a [Hosts]. The caller's accepts schedulers on a Unix socket of its directory.
// The answerer's accepts callers on a TCP port, and is a client of its own session socket. What
// they carry are the packets of the session socket and of the direct socket, unchanged but for the
// Welcome. No descriptor is carried, so a worker cannot have such a session: it must map memory.
// The scheduler gets a control region and a direct socket of the caller's.
//
// Why the sidecar carries them, and not the scheduler's process: vLLM's scheduler can wait for an
// answer without Python's lock only on a local socket; and token and keys stay with the sidecars,
// outside of vLLM's configuration. If the caller is gone, the rank of the scheduler's host is gone
// too, and then nothing hits anyway.
//
// # Trust
//
// Who connects over TCP is a stranger until it has proved that it knows the token, or has a
// certificate that the configured authority has signed, or, on loopback, until it has connected.
// Before that it costs a goroutine and a few KiB, for [patience] at most, and [maxStrangers] at a
// time. After that it may do what a scheduler of this host may do: waste its share.
//
// # Ends
//
// A session ends when any part of the way ends: the scheduler's socket, the TCP connection, the
// session at the answerer. The kernels find a dead host: see [keepAlive]. A scheduler that is
// stopped but lives keeps its session, because the caller's kernel still acknowledges.
//
// # Goroutines and locks
//
// A Hosts has one goroutine for each of its two sockets and one for each connection, and a
// connection that carries a session has three more. Hosts.mu is held for a moment only, and no
// other lock is taken under it, nor under tunnel.mu.
package hosts
