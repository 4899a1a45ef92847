package tiers

import "context"

// Space is what a tier has to know of a space. It is immutable.
type Space struct {
	Fingerprint Fingerprint
	Geometry    Geometry
	// Element is what the pages are made of ("bfloat16", "float16", "float32", "float8"), for
	// codecs; "" if it is not known.
	Element string
}

// Run is consecutive pages of one prefix, from the first page of a chunk on.
type Run struct {
	Space  *Space
	First  int    // index of the first page; a multiple of PagesPerChunk
	Prev   []byte // digest of the page before; empty for First == 0, and where it is not known
	Hashes []byte // digests of the pages, end to end
}

// Pages is how many pages the run has.
func (r Run) Pages() int { return len(r.Hashes) / r.Space.Geometry.DigestBytes }

// Chunks is how many chunks the run touches. The last may be partly filled.
func (r Run) Chunks() int {
	ppc := r.Space.Geometry.PagesPerChunk
	return (r.Pages() + ppc - 1) / ppc
}

// Chunk is the run of the run's i-th chunk.
func (r Run) Chunk(i int) Run {
	g := r.Space.Geometry
	from := i * g.PagesPerChunk
	to := min(from+g.PagesPerChunk, r.Pages())
	c := Run{Space: r.Space, First: r.First + from, Prev: r.Prev,
		Hashes: r.Hashes[from*g.DigestBytes : to*g.DigestBytes]}
	if i > 0 {
		c.Prev = r.Hashes[(from-1)*g.DigestBytes : from*g.DigestBytes]
	}
	return c
}

// Transfer is one chunk's bytes on the way between the arena and a tier.
type Transfer struct {
	Run
	// Bytes is memory of the arena, page after page: Pages() × PageBytes. Nobody else writes it
	// during the call. What a worker could write it may have written wrongly, so nothing in it is
	// trusted.
	Bytes []byte
}

// A Tier is somewhere below the arena where chunks can live. It may fail and it may forget; it must
// never lie: what it loads are the bytes that were stored for exactly these pages, checked, or an
// error.
//
// Calls may be made from any goroutine at any time until Close, which waits for those under way. A
// tier has no queues, retries or breakers of its own: package stack, its only caller, has these for
// all of them, and gives every call a deadline. A call that cannot be done by then returns
// context.Cause of its context; bytes that it was to fill are not touched after it has returned.
//
// Errors: ErrNotFound is a miss, ErrCorrupt a chunk that was dropped for its checksum, ErrBusy that
// there was no room (for a store), ErrClosed that Close has begun. Any other is a failure of the
// medium or the server.
type Tier interface {
	// Contains sets held[i] to how many pages, from its first, the tier has of the run's i-th
	// chunk, for all chunks or for those up to the first that is not held whole: the entries behind
	// that may be 0. len(held) == run.Chunks(). It may answer from what it remembers, and be wrong.
	Contains(ctx context.Context, run Run, held []uint16) error

	// Load fills the transfers' bytes and calls done once for each, from any goroutine, before it
	// returns. Transfers are independent of each other, and wanted in their order. After an error a
	// transfer's bytes are undefined.
	Load(ctx context.Context, transfers []Transfer, done func(i int, err error))

	// Store keeps the transfers' bytes and calls done once for each, before it returns: with nil
	// when the chunk is as durable as the tier ever makes it. Storing what is held already, or is a
	// shorter version of it, is nil at once.
	Store(ctx context.Context, transfers []Transfer, done func(i int, err error))

	// Drop forgets the chunks that the run touches, in all their versions that have the run's
	// pages. Nobody can find them when it returns.
	Drop(ctx context.Context, run Run) error

	// Clear forgets everything of a space, or with the zero Fingerprint everything, and says how
	// many chunks that was, -1 if it cannot know.
	Clear(ctx context.Context, fp Fingerprint) (chunks int, err error)

	// Stats is cheap and never blocks on I/O.
	Stats() TierStats

	// Close ends the tier. What was stored stays where it is, if it is on something that lasts. It
	// is idempotent.
	Close() error
}

// TierStats is a tier at one moment. What it cannot know is -1. The counters that all tiers have
// alike are kept by package stack.
type TierStats struct {
	Kind string // "disk", "redis", "s3", …
	// Contains answers from memory, within microseconds a chunk, and never blocks
	Local bool
	// loads may give other bytes than were stored (an opt-in that is part of the space)
	Lossy         bool
	CapacityBytes int64
	UsedBytes     int64
	Chunks        int64
	Pages         int64
	Evictions     uint64 // chunks dropped for room
	Corrupt       uint64 // chunks dropped for their checksum
	// why nothing of it can be used now; empty: something can, as far as it knows
	Down   string
	Detail string // what an operator wants to see: directories, server, …; never a secret
}
