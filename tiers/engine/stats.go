package engine

// Counters holds totals since the start; they only rise.
type Counters struct {
	Lookups      uint64 // answered
	LookupPages  uint64 // requested by them
	HitPages     uint64 // found held by lookups
	Stores       uint64 // prepared
	StoredPages  uint64 // committed
	HeldPages    uint64 // requested to be stored, but held already
	ShedPages    uint64 // requested to be stored, but without room
	Loads        uint64
	LoadPages    uint64
	LentPages    uint64 // leased to other sidecars
	Duplicates   uint64 // chunks freed because other slots hold all their pages
	Replaced     uint64 // chunks freed because a longer version was stored
	Extended     uint64 // chunks extended in place
	Evictions    uint64 // chunks dropped for room
	EvictedPages uint64
	Expired      uint64 // lookups ended by their deadline
	Cleared      uint64 // chunks dropped by ClearSpace
	Dropped      uint64 // chunks dropped by Drop
	Bad          uint64 // chunks dropped because their bytes were bad
	Verified     uint64 // restored chunks whose bytes were good
	VerifyFailed uint64 // restored chunks among Bad that were never used
	// Rotten counts chunks among Bad whose bytes changed, or became unreadable, after their commit.
	Rotten        uint64
	Limited       uint64 // results cut short by an owner's share or limits
	Recarved      uint64 // regions emptied for another geometry
	CarveFailures uint64 // regions not carved for lack of memory
	Moved         uint64 // chunks moved from one region to another
	KeepLost      uint64 // chunks that NextUnkept will not name: too many waited

	Promotions       uint64 // chunks that got slots for loading from a tier
	PromotionsJoined uint64 // chunks already loading when another lookup wanted them
	PromotionsFailed uint64
	PromotionsLate   uint64 // chunks that a store committed first
	PromotedPages    uint64 // pages that promotions made findable

	// Of hints, in chunks; one that gets the same hint again counts again.
	HintsRetained uint64
	HintsPinned   uint64
	HintsLow      uint64 // to be evicted before others
	HintsDemoted  uint64 // of those, written to tiers first
	HintsOver     uint64 // neither retained nor pinned, because it would be more than HintShare
	HintsOfOthers uint64 // ignored, because the chunk is another tenant's, which has a share
	HintsExpired  uint64 // times to retain or pin that are over
	DeferredPages uint64 // requested to be stored from a later use on

	BorrowedChunks uint64 // leased from peers
	BorrowedPages  uint64
	ForeignEvicted uint64 // borrowed chunks dropped for room
	ForeignBad     uint64 // borrowed chunks dropped because their bytes were bad
	CopiedChunks   uint64 // copied from peers into the arena
	CopiedPages    uint64
	// CopiesFailed counts copies that failed: no room, unreadable bytes, or the peer was gone.
	CopiesFailed uint64
}

// Stats describes the engine at one moment.
type Stats struct {
	Counters

	Regions       int
	CapacityBytes int64 // of all regions
	UsedBytes     int64 // in slots that are not free
	Slots         int   // in carved regions
	FreeSlots     int
	RetainedSlots int // by hints
	PinnedSlots   int // by hints
	LowSlots      int // by hints
	FillingSlots  int
	Promoting     int // filling slots that wait for a tier
	ReadySlots    int
	Unverified    int   // restored ready slots that were not checked yet
	LeasedSlots   int   // ready slots in use by lookups, loads, loans, pins and extensions
	Leases        int   // on ready and promoting slots; a slot may have many
	Pages         int   // that can be found in ready slots
	MetadataBytes int64 // address space of tables and index; memory is taken as they are used
	Spaces        int
	Owners        int
	OpenLookups   int // those with leases
	OpenLoads     int
	OpenLoans     int // to other sidecars
	OpenStores    int
	Frozen        int // owners that hold something and are marked frozen
	FrozenSlots   int // held by frozen owners
	// ForeignSlots are slots for chunks leased from peers. Of the fields above, only Leases counts
	// them.
	ForeignSlots  int
	ForeignUsed   int  // foreign slots that are not free
	ForeignLeased int  // foreign slots in use by lookups and loads
	ForeignPages  int  // in use by lookups and loads
	WantRegion    bool // findable pages in foreign slots; the arena may hold them too
}

// Stats returns the engine's present state. Its cost does not depend on how much the engine holds.
func (e *Engine) Stats() Stats {
	e.mu.Lock()
	defer e.unlock()
	st := Stats{
		Counters: e.stats, Regions: len(e.byID) + len(e.areas), CapacityBytes: e.bytes,
		Leases: e.leases.pins, Unverified: e.Unverified(), Spaces: len(e.byPrint),
		Owners: len(e.owners), WantRegion: e.waiting, PinnedSlots: e.hints.pinned,
		RetainedSlots: len(e.hints.kept.heap) - e.hints.pinned, LowSlots: e.hints.low,
		MetadataBytes: int64(len(e.idx.cur.words)+len(e.idx.old.words)) * 8,
	}
	for _, r := range e.regions[1 : e.nregion+1] {
		if r.class == nil {
			continue
		}
		n := len(r.slots)
		st.MetadataBytes += int64(n)*(64+20+16+4+4+2) + int64(n*(r.ppc-1))*int64(8*r.words) +
			int64(n*r.ppc)*8
		if r.foreign {
			st.ForeignSlots += n
			st.ForeignUsed += n - r.free
			st.ForeignLeased += r.leased
			continue
		}
		st.Slots += n
		st.FreeSlots += r.free
		st.FillingSlots += r.filling
		st.ReadySlots += n - r.free - r.spoiled - r.filling
		st.LeasedSlots += r.leased
		st.UsedBytes += int64(n-r.free) * r.class.slotBytes()
	}
	for _, s := range e.byPrint {
		st.Pages += s.pages
		if s.shadow != nil {
			st.ForeignPages += s.shadow.pages // of which the index has one a chunk
		}
	}
	for _, c := range e.classes {
		st.Promoting += c.promoting
		st.FrozenSlots += c.frozen
	}
	st.Frozen = e.frozen
	for _, ow := range e.owners {
		st.OpenLookups += len(ow.lookups)
		st.OpenLoads += ow.loads
		st.OpenLoans += ow.loans
		st.OpenStores += ow.stores
	}
	return st
}
