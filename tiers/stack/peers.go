package stack

import (
	"context"

	"lookaside/tiers"
)

// Peers is how a Stack reaches other sidecars' arenas. Its methods may be called from any goroutine.
type Peers interface {
	// Contains sets held[i] to how many pages of the run's i-th chunk, from its first, some peer is said to hold; those behind the first that is not held whole count only if held whole.
	// It takes microseconds, and never waits for anybody. len(held) == run.Chunks().
	Contains(run tiers.Run, held []uint16)
	// Borrow leases what peers hold of a run, from its first page on without a gap, and tells out of each chunk, in order, on the caller's goroutine, before it returns. Regions are those that were announced to our
	// workers. A chunk with fewer pages than the run has of it is the last. It answers the pages leased, and an error only when that is none. It waits until ctx is done, and a bounded time, at most.
	Borrow(ctx context.Context, run tiers.Run, out func(chunk int, l tiers.Loan)) (pages int, err error)
	// Return gives loans back: nobody reads them any more. With bad, their bytes did not check out. It does not wait.
	Return(handles []uint64, bad bool)
}

// PeerGone drops all that is leased from a peer: from now on nobody is given pages of it. It is returned when nobody uses it.
func (s *Stack) PeerGone(peer uint64) {}

// PeerStats is what goes on with peers.
type PeerStats struct {
	Lookups  uint64 // that wanted chunks from peers
	Borrows  uint64 // calls of Peers.Borrow
	Failed   uint64 // of those, that leased nothing
	Short    uint64 // of those, that leased less than was asked for
	Chunks   uint64 // leased
	Pages    uint64
	Joined   uint64 // chunks that were being leased for another lookup already
	Late     uint64 // chunks leased for lookups that had ended meanwhile
	Void     uint64 // loans that were void before they were used, as their peer had gone
	Retried  uint64 // lookups that went on with tiers after peers had failed
	Returned uint64 // loans
	Bad      uint64 // of those, for bytes that did not check out

	Slots, Used, Leased, Held int // slots for loans, those with one, those in use, and pages that can be found in them
}

// PeerStats may be called at any time.
func (s *Stack) PeerStats() PeerStats { return PeerStats{} }
