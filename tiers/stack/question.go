package stack

import (
	"slices"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/tenant"
)

// Asker receives the progress and the answer of a lookup that was not done when Lookup returned.
// Its methods are called from one goroutine at a time, which serves all askers: they must not
// block, and they must not close the Stack. A call may still come while the lookup is being
// cancelled.
type Asker interface {
	// LookupPending promises that so many pages, from the lookup's first on, arrive within eta. A
	// later promise replaces an earlier one. No pages: the lookup waits for a tier that is slower
	// than memory, and nothing is promised yet.
	LookupPending(o engine.Owner, lookup uint64, pages int, eta time.Duration)
	// LookupAnswered returns the lookup's answer.
	LookupAnswered(a Answer)
}

// Answer is the answer to a lookup.
type Answer struct {
	Owner  engine.Owner
	Lookup uint64
	First  int // the query's first page
	Asked  int // how many it asked for
	Pages  int // leased, from the lookup's first on
	Took   time.Duration
	Tenant tenant.ID // the query's
	// Why is why the lookup ends after Pages.
	Why engine.Absence
	// From says where the pages lay. Began is when their loads began, from the lookup's beginning
	// on; 0 if there were none.
	From  Sources
	Began time.Duration
}

// Query is a lookup.
type Query struct {
	Owner     engine.Owner
	Lookup    uint64 // the owner's name for it
	Space     engine.SpaceID
	FirstPage int
	// Prev is the digest of the page before FirstPage. It is empty if there is none or it is not
	// known.
	Prev []byte
	// Hashes are the digests of the pages, end to end. They are copied unless the lookup is done
	// when Lookup returns.
	Hashes []byte
	// Deadline is how long the asker can use an answer. 0: not known.
	Deadline time.Duration
	// Recompute is how long computing a page takes. 0: not known.
	Recompute time.Duration
	// Tenant is whose request it is: the room for what is loaded is charged to it.
	Tenant tenant.ID
	// Ticks promises that the caller calls Tick within TickWithin if the lookup is not done at
	// once. Then no goroutine is woken for the lookup, which would slow its caller down.
	Ticks bool

	// Why is why the lookup ends after its pages. Lookup sets it if the lookup is done when it
	// returns.
	Why engine.Absence

	// always overrides Config.Promote and Config.LookupDeadline.
	always bool
}

// TickWithin is the time that Query.Ticks promises. It is well below the time that an asker waits
// without a promise.
const TickWithin = 5 * time.Millisecond

// sources are the places that a lookup may use beside the arena.
type sources struct {
	verify  bool // chunks that the arena restored may have to be verified
	promote bool // tiers may be searched
	peers   bool // peers may be used
}

func (u sources) none() bool { return !u.verify && !u.promote && !u.peers }

// question is the arguments of a lookup. Lookup fills it; it does not change after keep.
type question struct {
	asker     Asker
	owner     engine.Owner
	lookup    uint64 // the owner's name for it
	space     engine.SpaceID
	first     int           // the first page looked up
	asked     int           // how many pages, from first on
	recompute time.Duration // that computing a page takes; 0: not known
	tenant    tenant.ID     // whose request it is
	use       sources
	// all is the run looked up. A question that is neither verified nor walked keeps only what lies
	// behind the arena's hit.
	all  tiers.Run
	size int64 // bytes of all's digests
}

// newQuestion returns the question of a query. Its digests are still the caller's.
func newQuestion(q *Query, sp *tiers.Space, a Asker, use sources) question {
	return question{
		asker: a, owner: q.Owner, lookup: q.Lookup, space: q.Space,
		first: q.FirstPage, asked: len(q.Hashes) / sp.Geometry.DigestBytes,
		recompute: q.Recompute, use: use,
		all:    tiers.Run{Space: sp, First: q.FirstPage, Prev: q.Prev, Hashes: q.Hashes},
		tenant: q.Tenant,
	}
}

func (q *question) key() lookupKey { return lookupKey{q.owner, q.lookup} }

// end is the page behind the last one looked up.
func (q *question) end() int { return q.first + q.asked }

// chunksBelow returns how many whole chunks of a run lie below a page.
func chunksBelow(run tiers.Run, page int) int {
	return max(0, page-run.First) / run.Space.Geometry.PagesPerChunk
}

// keep copies the digests of run, the part of the question that is still of use, into buf. It makes
// the question independent of its caller.
func (q *question) keep(run tiers.Run, buf []byte) (used []byte) {
	n := len(run.Hashes)
	buf = slices.Grow(buf[:0], n+len(run.Prev))
	buf = append(append(buf, run.Hashes...), run.Prev...)
	q.all, q.size = run, int64(len(buf))
	q.all.Hashes, q.all.Prev = buf[:n:n], buf[n:]
	return buf
}
