package engine

import (
	"fmt"
	"math"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/policy"
	"lookaside/tiers/tenant"
	"lookaside/tiers/why"
)

// defaultPromotingShare leaves half of the slots to stores, however much lookups load from tiers.
const defaultPromotingShare = 0.5

// defaultHintShare leaves most of the slots to the order of eviction, whatever hints say.
const defaultHintShare = 0.25

// Work is the kind of work that Config.Wake reports: the number of a tier that has chunks to write
// (NextCascades), or one of the constants.
type Work int

const (
	WorkReturns Work = -1 - iota // loans wait to be returned to peers; see TakeReturns
	WorkCopies                   // chunks wait to be copied from peers; see NextCopy
	WorkKeep                     // chunks wait to be written down; see NextUnkept
)

// Config configures an engine. Zero fields take the stated default.
type Config struct {
	// Now is a monotonic clock in nanoseconds. Default: time since the engine was made.
	Now func() int64
	// Seed keys the index's hash, so that no client can choose digests that collide in it. It
	// affects no result. Default 0, which is for tests only.
	Seed uint64
	// LeaseDeadline is how long a lookup's leases last unless a load takes them over. Default 30 s.
	LeaseDeadline time.Duration
	// MaxSpaces bounds the open spaces, at most 65,535. Default 16.
	MaxSpaces int
	// MaxOwners bounds the sessions. Default 256.
	MaxOwners int
	// MaxLookupsPerOwner bounds each of these for one owner: lookups, loads, loans, unfinished
	// stores. Default 4,096.
	MaxLookupsPerOwner int
	// MaxLeasesPerOwner bounds the leases in all lookups, loads and stores of one owner. A slot
	// leased twice counts twice. This bounds the engine's own memory: 4 bytes a lease, and up to 64
	// bytes a slot that the owner uses. Default 1 Mi.
	MaxLeasesPerOwner int
	// MaxPages bounds the pages of one call. Default 65,536.
	MaxPages int
	// MinPageBytes is the smallest page of a space. It keeps the books of an arena, some 60 bytes a
	// page, small beside the arena. Default 256.
	MinPageBytes int64
	// OwnerShare is the part of the slots of a geometry that one owner may have leased or filling.
	// A slot leased twice counts once. It keeps a client that freezes from taking everything. Slots
	// of frozen owners do not count. At least one slot is always allowed. Default 0.5, at most 1.
	OwnerShare float64
	// JointShare is the part of the slots of a geometry that all owners together may have leased or
	// filling. Slots of frozen owners (SetFrozen) are left out of both numbers, so if all owners
	// freeze at once, later ones still find some. At least one slot is always allowed. Default 1.
	JointShare float64
	// Policy names the order of eviction of each geometry; see package policy. Default: the default
	// of that package.
	Policy string
	// PromotingShare is the part of the slots of a geometry that may be loading from a tier at one
	// time. At least one slot is always allowed. Default 0.5, at most 1.
	PromotingShare float64
	// OnGone, if given, is called with the region, the piece and the number in that of a slot whose
	// content is gone: when the content leaves the index, when a cascade of it ends after that, and
	// when the slot becomes Free, whatever the reason. After a call, anything already written for
	// the slot describes content that no longer exists. It is called under the engine's lock, so it
	// must be quick and must not call the engine. Default: none.
	OnGone func(region, piece, slot uint32)
	// OnCarve, if given, is called when there is a new piece, before the first of its slots is
	// granted; OnUncarve when a piece is gone, and its number may be another's. All its slots are
	// free then, and were named to OnGone. Both are called under the engine's lock, as OnGone. The
	// slots that stand for what peers lend are in no piece. Default: none.
	OnCarve   func(p Piece)
	OnUncarve func(piece uint32)
	// Gone remembers why pages have left the index, and by what: see Why. Engines may share it.
	// GoneTier is what it calls this engine: 0 is the arena, i+1 the i-th tier below it. Default:
	// nothing is remembered.
	Gone     *why.Memory
	GoneTier uint8
	// Keep makes the engine queue new chunks for NextUnkept. A chunk takes 8 bytes while it waits.
	Keep bool
	// Tiers are the tiers below the arena, nearest first, at most MaxTiers. Default: none; nothing
	// is queued then.
	Tiers []TierAdmission
	// PartialDelay is how long a partly filled chunk must stay unchanged before it is written to a
	// tier. Default 1 s.
	PartialDelay time.Duration
	// LowWater is a part of the slots of a geometry. That many should be free, or already written
	// to the tiers that admit evicted chunks. Default 1/8.
	LowWater float64
	// Wake, if given, is called when there is new work of a kind. It is called under the engine's
	// lock, so it must not block and must not call the engine. Default: none.
	Wake func(Work)
	// ArenaLimitBytes is the most bytes that all regions together will have. The index is sized for
	// it when the first region is carved. Default 0: the regions present at that time.
	ArenaLimitBytes int64
	// JournalBytes bounds the journal of changes that followers (Follow) read. It is rounded up to
	// a power of two. The memory is taken while a feed is open. Default 0: Follow fails. Otherwise
	// at least 512 KiB.
	JournalBytes int64
	// Regions is the number of regions that AddRegion may add in all. With more than about 15,
	// geometries share the arena in larger pieces. Default 0: those present at the start.
	Regions int
	// FixedRegions keeps stores from carving a region or taking one from another geometry. Only
	// AddCarvedRegion carves. Stores use the regions by turns.
	FixedRegions bool
	// ForeignSlots is how many chunks of each geometry may be leased from peers at a time. Their
	// tables are made at the first such lease, and take memory as they are used. Default 0: none.
	ForeignSlots int
	// CopyAfter is how many loads of a borrowed chunk cause its copy into the arena; see NextCopy.
	// Default 0: chunks are never copied.
	CopyAfter int
	// Tenants has the tenants that calls name by ID. Engines may share it. Default: none; then
	// there is only tenant.None.
	Tenants *tenant.Registry
	// Shares divides each geometry's slots among tenants: see tenants.go. Tenants must list the
	// names. Default: they are not divided, and one order of eviction is common to all.
	Shares tenant.Shares
	// HintShare is the part of the slots of a geometry that hints may have retained or pinned at a
	// time. Default 0.25, at most 1.
	HintShare float64
	// HintLimit is the longest that a hint may have a chunk retained or pinned. Default 1 h.
	HintLimit time.Duration
	// NoExtend gives each store a slot of its own: it never writes behind a slot's committed pages.
	NoExtend bool
}

// setDefaults sets fields that are zero to their defaults.
func (c *Config) setDefaults() {
	setInt := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	setInt(&c.MaxSpaces, 16)
	setInt(&c.MaxOwners, 256)
	setInt(&c.MaxLookupsPerOwner, 4096)
	setInt(&c.MaxLeasesPerOwner, 1<<20)
	setInt(&c.MaxPages, 65536)
	setShare := func(v *float64, d float64) {
		if *v == 0 {
			*v = d
		}
	}
	setShare(&c.OwnerShare, 0.5)
	setShare(&c.JointShare, 1)
	setShare(&c.PromotingShare, defaultPromotingShare)
	setShare(&c.LowWater, DefaultLowWater)
	setShare(&c.HintShare, defaultHintShare)
	if c.HintLimit == 0 {
		c.HintLimit = time.Hour
	}
	if c.MinPageBytes == 0 {
		c.MinPageBytes = 256
	}
	if c.LeaseDeadline == 0 {
		c.LeaseDeadline = 30 * time.Second
	}
	if c.PartialDelay == 0 {
		c.PartialDelay = defaultPartialDelay
	}
	if c.Now == nil {
		start := time.Now()
		c.Now = func() int64 { return int64(time.Since(start)) }
	}
}

// validate sets the defaults and checks all fields.
func (c *Config) validate() error {
	c.setDefaults()
	for _, f := range []struct {
		name           string
		v, least, most int64
	}{
		{"MaxSpaces", int64(c.MaxSpaces), 1, math.MaxUint16},
		{"MaxOwners", int64(c.MaxOwners), 1, math.MaxInt32},
		{"MaxPages", int64(c.MaxPages), 1, 1 << 24},
		{"MaxLookupsPerOwner", int64(c.MaxLookupsPerOwner), 1, math.MaxInt32},
		{"MaxLeasesPerOwner", int64(c.MaxLeasesPerOwner), 1, math.MaxInt32},
		{"MinPageBytes", c.MinPageBytes, 0, math.MaxInt64},
		{"Regions", int64(c.Regions), 0, maxRegions},
		{"ArenaLimitBytes", c.ArenaLimitBytes, 0, math.MaxInt64},
		{"ForeignSlots", int64(c.ForeignSlots), 0, math.MaxInt64},
		{"CopyAfter", int64(c.CopyAfter), 0, math.MaxUint16},
	} {
		if f.v < f.least || f.v > f.most {
			return fmt.Errorf("%w: %s is %d, want %d to %d", tiers.ErrInvalid, f.name, f.v,
				f.least, f.most)
		}
	}
	for _, f := range []struct {
		name string
		v    float64
	}{
		{"OwnerShare", c.OwnerShare}, {"JointShare", c.JointShare},
		{"PromotingShare", c.PromotingShare}, {"LowWater", c.LowWater},
		{"HintShare", c.HintShare},
	} {
		if !(f.v > 0 && f.v <= 1) {
			return fmt.Errorf("%w: %s is %v, want more than 0, at most 1", tiers.ErrInvalid,
				f.name, f.v)
		}
	}
	if c.LeaseDeadline < 0 {
		return fmt.Errorf("%w: LeaseDeadline is %v", tiers.ErrInvalid, c.LeaseDeadline)
	}
	if c.HintLimit < 0 {
		return fmt.Errorf("%w: HintLimit is %v", tiers.ErrInvalid, c.HintLimit)
	}
	if c.PartialDelay < 0 {
		return fmt.Errorf("%w: PartialDelay is %v", tiers.ErrInvalid, c.PartialDelay)
	}
	if _, err := policy.New(c.Policy, policy.Options{}); err != nil {
		return fmt.Errorf("%w: %w", tiers.ErrInvalid, err)
	}
	if c.JournalBytes != 0 && (c.JournalBytes < minJournalBytes ||
		c.JournalBytes > maxJournalBytes) {
		return fmt.Errorf("%w: JournalBytes is %d, want 0 or %d to %d", tiers.ErrInvalid,
			c.JournalBytes, minJournalBytes, int64(maxJournalBytes))
	}
	if _, err := c.Shares.Table(c.Tenants); err != nil {
		return fmt.Errorf("%w: %w", tiers.ErrInvalid, err)
	}
	return c.validateTiers()
}
