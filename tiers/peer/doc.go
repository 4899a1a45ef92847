// Package peer lets the sidecars of one host use each other's chunks. Each sidecar finds the
// others, keeps hints of what they hold, and leases chunks that it wants. Leased chunks are read
// where they lie. The package moves no bytes and knows no workers.
//
// # Roles
//
// Two sidecars have two connections, one for each direction. On each of them one side lends (it
// owns an arena) and one borrows. The borrower connects. The lender sends its regions, with
// descriptors to map read-only, its spaces, and hints of the pages that it holds, as a feed from
// its engine. The borrower keeps the hints of all lenders in one table. It asks the lenders that
// the hints name for leases.
//
// # Promises
//
//   - A grant is a lease in the lender's engine. Its slots are not reused until they are returned or
//     the borrower's process is dead. A borrower whose connection has ended keeps them while its
//     process lives, because its workers may be copying.
//   - Hints promise nothing. A wrong hint is removed when it is found.
//   - Each request names its space by the whole fingerprint, so pages of two spaces cannot meet.
//   - A dead lender blocks nobody. Pending requests fail, and its loans are void from OnGone on. Its
//     memory keeps its contents as long as somebody maps it, because no one is left to grant it
//     again. A device may be opened by a next owner. That owner waits for the lock that a borrower
//     holds on it (dax.LockLent) until every loan is returned.
//   - Offsets, lengths and counts from a peer are checked before they are used. A wrong message ends
//     the connection.
//   - A peer cannot make us wait or grow. A lender that sends nothing is skipped until it does. A
//     borrower that does not read gets all hints anew when it does. Regions, spaces, loans and hints
//     are bounded.
//
// # Goroutines and locks
//
// A Peers has three goroutines: one looks for peers, one accepts borrowers, and one does the upkeep
// (returns, and sweeping of hints). A connection has two: one receives, and one sends (lender) or
// calls OnRegion and OnRegionGone (borrower).
//
// No lock is held across a callback or a send that waits. Locks are taken in this order: Peers.mu,
// then borrower.mu or lender.mu, then hintTable.mu or the engine's. loanTable.mu is never held
// together with another.
//
// # Speed
//
// A lookup at a peer costs three wakings (the lender's goroutine, the connection's, the one of the
// ZMQ sockets), some 50 µs each where processors sleep. Each chunk costs some 0.3 µs at the lender
// and as much here. So Ask sends from the caller's goroutine, done runs on the connection's, and a
// request names one page a chunk. A worker in between, a hint for every page of a loan, and polling
// for the answer instead of sleeping were all slower; docs/performance.md has the figures.
package peer
