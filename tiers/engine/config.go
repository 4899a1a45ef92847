package engine

import (
	"fmt"
	"math"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/policy"
)

// Work names what Config.Wake reports: that there is something to write to a tier, by the tier's
// number (NextCascades), or one of the constants.
type Work int

const (
	WorkReturns Work = -1 - iota // loans are to be returned to peers: TakeReturns
	WorkCopies                   // chunks are to be copied from peers: NextCopy
)

// Config is what the engine is told at its start. Zero fields take the stated default.
type Config struct {
	// Now is a monotonic clock in nanoseconds. Default: time since the engine was made.
	Now func() int64
	// Seed keys the index's hash, so that no client can choose digests that collide in it. It
	// changes no answer. Default 0: fit for tests only.
	Seed uint64
	// LeaseDeadline is how long a lookup's leases last unless a load takes them over. Default 30 s.
	LeaseDeadline time.Duration
	// MaxSpaces bounds the open spaces, at most 65,535. Default 16.
	MaxSpaces int
	// MaxOwners bounds the sessions. Default 256.
	MaxOwners int
	// MaxLookupsPerOwner bounds, each by itself, the lookups, loads, loans and unfinished stores of
	// one owner. Default 4,096.
	MaxLookupsPerOwner int
	// MaxLeasesPerOwner bounds the leases in all lookups, loads and stores of one owner, a slot
	// leased twice counting twice: it bounds the engine's own memory (4 bytes a lease, and up to 64
	// bytes a slot that the owner uses). Default 1 Mi.
	MaxLeasesPerOwner int
	// MaxPages bounds the pages of one call. Default 65,536.
	MaxPages int
	// MinPageBytes is the smallest page of a space, so that the books of an arena (some 60 bytes a
	// page) stay small beside it. Default 256.
	MinPageBytes int64
	// OwnerShare is the part of the slots of a geometry that one owner may have leased or filling,
	// a slot leased twice counting once, so that a client which freezes cannot take everything.
	// Slots that frozen owners have do not count. At least one slot is always allowed. Default 0.5,
	// at most 1.
	OwnerShare float64
	// JointShare is the part of the slots of a geometry that all owners together may have leased or
	// filling, of those that no frozen owner (SetFrozen) has: so if all of them freeze at once,
	// some are left for those that come. At least one slot is always allowed. Default 1.
	JointShare float64
	// Policy names the order of eviction of each geometry, as package policy does. Default: its
	// default.
	Policy string
	// PromotingShare is the part of the slots of a geometry that may be on their way up from a tier
	// at one time. At least one slot always may. Default 0.5, at most 1.
	PromotingShare float64
	// OnGone, if given, is told the region and number of a slot whose content is gone: when that
	// leaves the index, when a cascade of it ends after that, and when the slot becomes Free,
	// whatever the reason. So what was written of it down to any of these moments is known to be of
	// something that is gone. It is called under the engine's lock, so it must be quick and call
	// nothing of the engine. Default: none.
	OnGone func(region, slot uint32)
	// Sums: the engine keeps a checksum of each chunk, for whoever patrols the arena; see
	// NextUnsummed. It takes 16 bytes a slot.
	Sums bool
	// Tiers are those below the arena, nearest first, at most MaxTiers. Default: none, and then
	// nothing is queued.
	Tiers []TierAdmission
	// PartialDelay is how long a partly filled chunk must not have grown before it goes to a tier.
	// Default 1 s.
	PartialDelay time.Duration
	// LowWater is the part of the slots of a geometry that should be free, or have been written to
	// the tiers that admit what is evicted. Default 1/8.
	LowWater float64
	// Wake, if given, is called when there is work of a kind again. It is called under the engine's
	// lock, so it must not block and call nothing of the engine. Default: none.
	Wake func(Work)
	// ArenaLimitBytes is what the regions may come to; the index is sized for it when the first
	// region is carved. Default 0: the regions that there are then.
	ArenaLimitBytes int64
	// JournalBytes bounds the journal of changes that followers (Follow) read, rounded up to a
	// power of two; memory is taken while somebody follows. Default 0: nobody can. Otherwise at
	// least 512 KiB.
	JournalBytes int64
	// Regions is how many regions AddRegion may bring in all. With more of them than some 15
	// geometries share the arena in larger pieces. Default 0: those that there are.
	Regions int
	// FixedRegions: no store carves a region, or takes one from another geometry; only
	// AddCarvedRegion carves. Stores go to the regions by turns.
	FixedRegions bool
	// ForeignSlots is how many chunks of each geometry may be leased from peers at a time; tables
	// for them are made when first one is, and paid for as they are used. Default 0: none.
	ForeignSlots int
	// CopyAfter is how many loads of a chunk from where peers lent it have it copied into the
	// arena; see NextCopy. Default 0: it never is.
	CopyAfter int
	// NoExtend: a store never writes behind the committed pages of a slot, it always gets a slot of
	// its own.
	NoExtend bool
}

// setDefaults gives the fields that are zero their defaults.
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
	setShare(&c.PromotingShare, 0.5)
	setShare(&c.LowWater, defaultLowWater)
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
	} {
		if !(f.v > 0 && f.v <= 1) {
			return fmt.Errorf("%w: %s is %v, want more than 0, at most 1", tiers.ErrInvalid,
				f.name, f.v)
		}
	}
	if c.LeaseDeadline < 0 {
		return fmt.Errorf("%w: LeaseDeadline is %v", tiers.ErrInvalid, c.LeaseDeadline)
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
	return c.validateTiers()
}
