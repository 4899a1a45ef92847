// Package peer lets the sidecars of one host serve each other's chunks: each finds the others,
// knows what they are said to hold, and leases what it wants of it, to be read where it lies. It
// moves no bytes and knows no workers.
//
// # Roles
//
// Between two sidecars there are two connections, one for each direction. On each one side lends
// (it owns an arena) and the other borrows. The borrower connects; the lender tells it its regions
// (with descriptors to map read-only), its spaces, and by a feed of its engine what it holds:
// hints, that the borrower keeps in one table for all lenders. The borrower asks those whom the
// hints name for leases.
//
// # Promises
//
//   - A grant is a lease in the lender's engine: its slots are not used for anything else until
//     they are given back, or until the borrower is dead. A borrower that merely ended its
//     connection and lives keeps them: its workers may be copying.
//   - Hints promise nothing. One that was wrong is forgotten when it was found out.
//   - Spaces are named by their whole fingerprint in every request: pages of two spaces cannot
//     meet.
//   - A lender that dies keeps nobody waiting: leases that were asked for fail, those that are held
//     are void from OnGone on. Its memory stays what it is, as long as somebody maps it, for nobody
//     is there to grant it; a device's could be opened by the next owner, who therefore waits for
//     the lock that the borrower holds on it (dax.LockLent) until every loan is returned.
//   - What a peer sends decides no length, offset or count before it was checked; what it sends
//     wrongly ends the connection. It can neither be waited for (a lender that does not answer is
//     passed over until it does; a borrower that does not read is told everything anew when it
//     does) nor make us grow: its regions, spaces, loans and hints are bounded.
//
// # Goroutines and locks
//
// A Peers has one that looks for peers, one that accepts borrowers and one for upkeep (returns,
// sweeping of hints); a connection has one that receives and one that sends (lender) or that tells
// of regions (borrower). No lock is held across a callback or a send that waits. Their order:
// Peers.mu, then borrower.mu or lender.mu, then hintTable.mu or the engine's; loanTable.mu is taken
// with none of the others.
package peer
