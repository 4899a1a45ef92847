package tiers

// Foreign slots: what is leased from peers, to be read where it lies.

// Loan is what a peer lets us read of one chunk, from its first page on, until it is returned.
type Loan struct {
	Peer   uint64 // whose it is, not 0
	Region uint32 // as announced to our workers
	Offset uint64 // bytes, of the first page
	Pages  int
	Handle uint64 // by which it is returned, not 0
}

// Return is a loan that is to be given back: nobody reads it any more.
type Return struct {
	Handle uint64
	Bad    bool // its bytes did not check out
}

// FinishBorrow ends the borrowing of a chunk that PreparePromotion granted as foreign: its pages are to be read where l says from now on. With l.Pages fewer than were granted the rest is not
// there. The loan is the engine's from then on, and comes back by TakeReturns, unless there is an error. What is granted as foreign ends either by it or by FinishPromotion(p, false, -1). ErrStale: it has ended before.
func (e *Engine) FinishBorrow(p uint64, l Loan) error { return ErrNotFound }

// DropPeer drops all that is leased from a peer, or with 0 from all: it leaves the index at once, and is returned when nobody uses it. What is still being borrowed of it is the caller's to refuse.
func (e *Engine) DropPeer(peer uint64) {}

// SweepForeign drops what is leased from peers and nobody has used since the last sweep but one. It lets go of the lock between slices of its work.
func (e *Engine) SweepForeign() {}

// TakeReturns appends to out the loans that nobody uses any more; Config.Wake is called with tier -1 when there are some.
func (e *Engine) TakeReturns(out []Return) []Return { return out }

// ForeignIn is how many loans the engine has in a region that was announced, those that somebody still reads included. Those that were taken by TakeReturns do not count.
func (e *Engine) ForeignIn(region uint32) int { return 0 }
