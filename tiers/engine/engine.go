package engine

import (
	"fmt"
	"math"
	"sync"
	"sync/atomic"

	"lookaside/tiers"
	"lookaside/tiers/policy"
	"lookaside/tiers/why"
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

	mu     sync.Mutex // guards all that follows
	closed bool
	tick   uint64 // counts operations: the time by which use is ordered

	arena // whose slots these are: regions.go

	spaces  []*space // by SpaceID; 0 is none
	byPrint map[tiers.Fingerprint]*space

	owners map[Owner]*owner
	frozen int // owners that SetFrozen named and that hold something
	leases leaseBook

	idx     index
	flights flightTable // slots that are being promoted into and may be joined
	lent    lent
	// unverified counts the slots that are, and is read without the lock.
	unverified atomic.Int64
	unkept     unkept

	cascades cascades
	tenants  tenants
	hints    hints
	mover    owner // of the leases on what is moved or copied
	journal  journal
	staging  staging // what EndRestore has yet to make ready

	stats     Counters
	residence residence
	scratch   scratch

	newPolicy func(foreign bool) policy.Policy
	taker     why.By     // who the room is for that is being made
	tagMask   uint32     // ^0; tests clear bits to make digests collide
	debug     debugState // of a debug build
}

// scratch is memory that calls use while they hold the lock.
type scratch struct {
	refs    []uint32 // MaxPages+1 refs
	held    []uint32 // likewise
	marks   []uint64 // a bit for each of MaxPages+1
	touched uint64   // keeps loops that only read
}

// New makes an engine without regions.
func New(cfg Config) (*Engine, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	e := &Engine{
		cfg:    cfg,
		arena:  arena{byID: map[uint32]*region{}, classes: map[tiers.Geometry]*class{}},
		spaces: []*space{nil}, byPrint: map[tiers.Fingerprint]*space{},
		owners: map[Owner]*owner{}, tagMask: math.MaxUint32,
		scratch: scratch{
			refs: make([]uint32, cfg.MaxPages+1), held: make([]uint32, cfg.MaxPages+1),
			marks: make([]uint64, cfg.MaxPages/64+1),
		},
	}
	e.taker.Tier = cfg.GoneTier
	e.leases.endSlice = endSlice
	e.hints.uses.limit = usesKept
	e.tenants.registry = cfg.Tenants
	e.tenants.shares, _ = cfg.Shares.Table(cfg.Tenants) // validate tried it
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

// Close gives back the engine's memory. It is idempotent. Later calls return ErrClosed, or nothing.
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
	e.tenants.close()
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
	e.regions, e.nregion, e.areas = [maxRegions + 1]*region{}, 0, nil
	e.owners, e.leases.all = nil, nil
}

// clearSlice is how many slots ClearSpace and the emptying of a region look at before they let
// others have the lock.
const clearSlice = 512

// Expire frees the lookups whose deadline has passed, and does other work that is due. Call it
// several times a second. It returns how many lookups expired.
func (e *Engine) Expire() (n int) {
	e.mu.Lock()
	if e.closed {
		e.mu.Unlock()
		return 0
	}
	now := e.cfg.Now()
	e.aged.note(now, e.tick)
	e.residence.now = residenceTime(now)
	for e.leases.expiry.first != nil && e.leases.expiry.first.lookup.deadline <= now {
		e.endLease(e.leases.expiry.first)
		n++
	}
	e.stats.Expired += uint64(n)
	for e.expireHints(now) {
		if !e.pause() {
			e.mu.Unlock()
			return n
		}
	}
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
