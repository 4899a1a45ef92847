package engine

import (
	"fmt"
	"math"
	"sync"
	"sync/atomic"

	"lookaside/tiers"
	"lookaside/tiers/policy"
)

// maxPage bounds page indices, so that no arithmetic on them wraps.
const maxPage = 1 << 30

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{tiers.ErrInvalid}, args...)...)
}

// Engine is the index and the books of one arena. See the package comment. All methods may be
// called from any goroutine.
type Engine struct {
	cfg Config

	// restores is held for reading while slots are restored without mu, for writing to take a
	// region's tables away. It is taken before mu.
	restores sync.RWMutex

	mu       sync.Mutex // guards all that follows
	closed   bool
	tick     uint64 // counts operations: the time by which use is ordered
	regions  [maxRegions + 1]*region
	byID     map[uint32]*region // those of AddCarvedRegion
	areas    []*area            // those of AddRegion
	nregion  int
	bytes    int64 // of all regions
	records  int   // in carved regions
	classes  map[tiers.Geometry]*class
	spaces   []*space // by SpaceID; 0 is none
	byPrint  map[tiers.Fingerprint]*space
	owners   map[Owner]*owner
	leases   []*lease
	spare    []uint32 // indices of free leases
	expiry   leaseList
	endings  leaseList   // what EndSome has to do
	endSlice int         // tests change it
	ending   atomic.Bool // there is something in endings
	idx      index
	cascades cascades
	mover    owner // of the leases on what is being moved
	journal  journal
	lent     lent
	flights  flightTable // slots that are being promoted into and may be joined
	carving  bool        // a region is being carved with the lock released
	// wanted is when a geometry first had to wait for a region, 0 for none waiting.
	wanted    int64
	waiting   bool
	aged      aged
	frozen    int // owners that SetFrozen named and that hold something
	pins      int // leases on slots
	stats     Counters
	linkSteps uint64 // links followed, for tests of the work done
	touched   uint64 // keeps the loads of probe
	// unverified counts the slots that are, and is read without the lock.
	unverified atomic.Int64
	newPolicy  func(foreign bool) policy.Policy
	tagMask    uint32 // ^0; tests clear bits to make digests collide

	refs  []uint32 // scratch: MaxPages+1 refs
	held  []uint32 // scratch: likewise
	marks []uint64 // scratch: a bit for each of MaxPages+1
	bufs  bufferPool
	trash []*carved

	unsummed unsummed

	staging staging // what EndRestore has yet to make ready

	debug debugState // of a debug build
}

// New makes an engine without regions.
func New(cfg Config) (*Engine, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	e := &Engine{
		cfg: cfg, byID: map[uint32]*region{}, classes: map[tiers.Geometry]*class{},
		spaces: []*space{nil}, byPrint: map[tiers.Fingerprint]*space{},
		owners: map[Owner]*owner{}, tagMask: math.MaxUint32, endSlice: endSlice,
		refs: make([]uint32, cfg.MaxPages+1), held: make([]uint32, cfg.MaxPages+1),
		marks: make([]uint64, cfg.MaxPages/64+1),
	}
	e.newPolicy = func(foreign bool) policy.Policy {
		name := cfg.Policy
		if foreign {
			name = "lru"
		}
		p, err := policy.New(name, policy.Options{Seed: cfg.Seed})
		if err != nil {
			panic(err) // validate tried it
		}
		return p
	}
	e.mover.all.owned = true
	e.journal.words = journalWords(cfg.JournalBytes)
	e.lent.reads.limit = cfg.ForeignSlots
	e.setUpCascades()
	return e, nil
}

// Close gives back the engine's memory. It is idempotent. Calls after it answer ErrClosed, or
// nothing.
func (e *Engine) Close() {
	e.restores.Lock()
	defer e.restores.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return
	}
	e.closed = true
	e.unverified.Store(0)
	for _, r := range e.regions[1 : e.nregion+1] {
		if r.mem != nil {
			r.mem.close()
		}
	}
	e.allClasses(e.dropBlock)
	e.idx.close()
	e.journal.close()
	e.staging.close()
	trash, tables := e.takeTrash()
	emptyTrash(trash, tables)
	e.regions, e.nregion, e.areas, e.owners, e.leases = [maxRegions + 1]*region{}, 0, nil, nil, nil
}

// clearSlice is how many slots ClearSpace and the emptying of a region look at before they let
// others have the lock.
const clearSlice = 512

// Expire frees the lookups whose deadline has passed and does what else is due; call it some times
// a second. It answers how many expired.
func (e *Engine) Expire() (n int) {
	e.mu.Lock()
	if e.closed {
		e.mu.Unlock()
		return 0
	}
	now := e.cfg.Now()
	e.aged.note(now, e.tick)
	for e.expiry.first != nil && e.expiry.first.deadline <= now {
		e.endLease(e.expiry.first)
		n++
	}
	e.stats.Expired += uint64(n)
	e.endSome()
	e.duePartials(now)
	e.idx.migrate(4 * migrateStep)
	trash, tables := e.takeTrash()
	e.unlock()
	emptyTrash(trash, tables)
	return n
}

// migrateStep is how many index entries move with each operation while a larger index takes over.
const migrateStep = 128
