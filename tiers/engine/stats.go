package engine

// Counters only rise.
type Counters struct {
	Lookups      uint64 // answered
	LookupPages  uint64 // asked for in them
	HitPages     uint64 // answered as held
	Stores       uint64 // prepared
	StoredPages  uint64 // committed
	HeldPages    uint64 // asked to be stored and held already
	ShedPages    uint64 // asked to be stored without room
	Loads        uint64
	LoadPages    uint64
	LentPages    uint64 // leased to other sidecars
	Duplicates   uint64 // chunks freed because others hold all that they hold
	Replaced     uint64 // chunks freed because a longer version was stored
	Extended     uint64 // chunks extended in place
	Evictions    uint64 // chunks dropped for room
	EvictedPages uint64
	Expired      uint64 // lookups ended by their deadline
	Cleared      uint64 // chunks dropped by ClearSpace
	Dropped      uint64 // chunks dropped by Drop
	Bad          uint64 // chunks dropped because their bytes were found bad
	Verified     uint64 // restored chunks whose bytes were found good
	VerifyFailed uint64 // of the bad ones: restored chunks, before anybody used them
	// of the bad ones: chunks whose bytes had changed since they were committed, or could not be
	// read any more
	Rotten        uint64
	Limited       uint64 // answers cut short by an owner's share or limits
	Recarved      uint64 // regions emptied for another geometry
	CarveFailures uint64 // regions that could not be carved for want of memory
	Moved         uint64 // chunks moved from one region to another

	Promotions       uint64 // chunks for which slots were reserved, to be loaded from a tier
	PromotionsJoined uint64 // chunks that were on their way already when another lookup wanted them
	PromotionsFailed uint64
	PromotionsLate   uint64 // chunks that a store was first with
	PromotedPages    uint64 // that can be found since

	BorrowedChunks uint64 // leased from peers
	BorrowedPages  uint64
	ForeignEvicted uint64 // of those, dropped for room
	ForeignBad     uint64 // of those, dropped because their bytes were found bad
	CopiedChunks   uint64 // copied from peers into the arena
	CopiedPages    uint64
	// times that a chunk was to be copied, and there was no room, its bytes could not be read, or
	// its peer had gone
	CopiesFailed uint64
}

// Stats is the engine at one moment.
type Stats struct {
	Counters

	Regions       int
	CapacityBytes int64 // of all regions
	UsedBytes     int64 // in slots that are not free
	Slots         int   // in carved regions
	FreeSlots     int
	FillingSlots  int
	Promoting     int // of those: from a tier
	ReadySlots    int
	Unverified    int   // of those: restored, and not checked since
	LeasedSlots   int   // ready ones in use by lookups, loads, loans, pins and extensions
	Leases        int   // on them and on those being promoted into; one slot may have many
	Pages         int   // that can be found in them
	MetadataBytes int64 // address space of tables and index; they are paid for as they are used
	Spaces        int
	Owners        int
	OpenLookups   int // that hold leases
	OpenLoads     int
	OpenLoans     int // to other sidecars
	OpenStores    int
	Frozen        int // owners that are said to have frozen and hold something
	FrozenSlots   int // that they hold
	// slots for what is leased from peers. They count in none of the above but Leases
	ForeignSlots  int
	ForeignUsed   int  // of those, that are not free
	ForeignLeased int  // of those, that are in use by lookups and loads
	ForeignPages  int  // that can be found in them; those that the arena has as well count, too
	WantRegion    bool // a geometry without a region waits for the arena to grow
}

// Stats returns the engine at one moment. It may be called at any time; its cost does not depend on
// what is held.
func (e *Engine) Stats() Stats {
	e.mu.Lock()
	defer e.unlock()
	st := Stats{
		Counters: e.stats, Regions: len(e.byID) + len(e.areas), CapacityBytes: e.bytes,
		Leases: e.leases.pins, Unverified: e.Unverified(), Spaces: len(e.byPrint),
		Owners: len(e.owners), WantRegion: e.waiting,
		MetadataBytes: int64(len(e.idx.cur.words)+len(e.idx.old.words)) * 8,
	}
	for _, r := range e.regions[1 : e.nregion+1] {
		if r.class == nil {
			continue
		}
		n := len(r.slots)
		st.MetadataBytes += int64(n)*(64+20+16+4) + int64(n*(r.ppc-1))*int64(8*r.words) +
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
