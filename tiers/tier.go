package tiers

import (
	"context"

	"lookaside/tiers/tenant"
)

// Space is what a tier needs to know of a space. It is immutable.
type Space struct {
	Fingerprint Fingerprint
	Geometry    Geometry
	// Element is the type of the pages' elements ("bfloat16", "float16", "float32", "float8"), for
	// codecs; "encoded" if the worker has encoded them, so that their bytes are no numbers; "" if
	// not known.
	Element string
}

// Run is consecutive pages of one prefix, from the first page of a chunk on.
type Run struct {
	Space  *Space
	First  int    // index of the first page; a multiple of PagesPerChunk
	Prev   []byte // digest of the page before; empty if there is none or it is not known
	Hashes []byte // digests of the pages, end to end
	// Tenant is whose chunks they are in a tier that counts it. It matters to Store only; chunks of
	// any tenant are found and loaded alike.
	Tenant tenant.ID
}

// Pages returns the number of pages.
func (r Run) Pages() int { return len(r.Hashes) / r.Space.Geometry.DigestBytes }

// Chunks returns the number of chunks that the run touches. The last may be partly filled.
func (r Run) Chunks() int {
	ppc := r.Space.Geometry.PagesPerChunk
	return (r.Pages() + ppc - 1) / ppc
}

// Chunk returns the part of the run in its i-th chunk.
func (r Run) Chunk(i int) Run {
	g := r.Space.Geometry
	from := i * g.PagesPerChunk
	to := min(from+g.PagesPerChunk, r.Pages())
	c := Run{Space: r.Space, First: r.First + from, Prev: r.Prev,
		Hashes: r.Hashes[from*g.DigestBytes : to*g.DigestBytes], Tenant: r.Tenant}
	if i > 0 {
		c.Prev = r.Hashes[(from-1)*g.DigestBytes : from*g.DigestBytes]
	}
	return c
}

// Transfer is one chunk to be copied between the arena and a tier.
type Transfer struct {
	Run
	// Bytes is memory of the arena, page after page: Pages() × PageBytes. Nobody else writes it
	// during the call. A worker may have written it before, so nothing in it is trusted.
	Bytes []byte
}

// Tier is a place below the arena where chunks can live. It may fail and it may forget, but it must
// never lie: a load returns the bytes that were stored for exactly these pages, checked, or an
// error.
//
// Calls may come from any goroutine at any time until Close, which waits for those under way. A
// tier needs no queues, retries or breakers: package stack, its only caller, has them for all
// tiers, and gives every call a deadline. A call that cannot finish by then returns context.Cause
// of its context. After it has returned, it does not touch the bytes that it was to fill.
//
// Errors: ErrNotFound is a miss. ErrCorrupt is a chunk that was dropped for its checksum. ErrBusy
// means that there was no room (for a store). ErrClosed means that Close has begun. Any other error
// is a failure of the medium or the server.
type Tier interface {
	// Contains sets held[i] to the number of pages, from its first, that the tier has of the run's
	// i-th chunk. Entries behind the first chunk that is not held whole may be 0. len(held) ==
	// run.Chunks(). Contains may use remembered state, and be wrong.
	Contains(ctx context.Context, run Run, held []uint16) error

	// Load fills the transfers' bytes. It calls done once for each transfer, from any goroutine,
	// before it returns. Transfers are independent, and the first are wanted first. After an error
	// a transfer's bytes are undefined.
	Load(ctx context.Context, transfers []Transfer, done func(i int, err error))

	// Store keeps the transfers' bytes. It calls done once for each before it returns: with nil
	// once the chunk is as durable as the tier ever makes it. For a chunk that is held already, or
	// is a shorter version of one, it calls done with nil at once.
	Store(ctx context.Context, transfers []Transfer, done func(i int, err error))

	// Drop forgets the chunks that the run touches, in all versions that have the run's pages. Once
	// Drop returns, nobody can find them.
	Drop(ctx context.Context, run Run) error

	// Clear forgets all chunks of a space, or of all spaces for the zero Fingerprint. It returns
	// how many there were, -1 if it cannot know.
	Clear(ctx context.Context, fp Fingerprint) (chunks int, err error)

	// Stats returns a snapshot. It is cheap and never blocks on I/O.
	Stats() TierStats

	// Close ends the tier. Chunks on durable media stay. Close is idempotent.
	Close() error
}

// TierStats is a snapshot of a tier. A value that cannot be known is -1. Package stack keeps the
// counters that all tiers share.
type TierStats struct {
	Kind string // "disk", "redis", "s3", …
	// Contains works from memory, takes microseconds a chunk, and never blocks
	Local bool
	// loads may return other bytes than were stored (an opt-in that is part of the space)
	Lossy         bool
	CapacityBytes int64
	UsedBytes     int64
	Chunks        int64
	Pages         int64
	Evictions     uint64 // chunks dropped for room
	Corrupt       uint64 // chunks dropped for their checksum
	// why the tier cannot be used now; empty: it can, as far as it knows
	Down   string
	Detail string // for operators: directories, server, …; never a secret
}
