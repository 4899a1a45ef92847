package engine

import (
	"fmt"
	"math"
	"math/bits"
	"sync"
	"sync/atomic"

	"lookaside/dax"
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

// SpaceID names an open space. 0 is none.
type SpaceID uint16

type space struct {
	id      uint16
	print   tiers.Fingerprint
	g       tiers.Geometry
	class   *class
	salt    uint64
	tagMask uint32
	owners  int
	chunks  int    // slots that are not free
	staged  int    // that Restore was told of, until EndRestore
	pages   int    // indexed
	clears  int    // ClearSpace calls under way
	serial  uint32 // by which the journal knows it
	pinner  owner  // of its pins; in no map
	// what peers lent of it, with a salt and a class of its own, and the same id; nil: nothing can
	// be
	shadow *space
	// recovered: only RecoverSpace opened it, so nobody has said its PageTokens.
	recovered bool
	// the tick when an owner last came or went; of one that is recovered, when the newest of its
	// chunks was restored
	lastUse uint64
}

// Owner names a session: whoever may hold leases. Its id is the caller's.
type Owner uint64

type owner struct {
	id      Owner
	space   *space
	lookups map[uint64]*lease
	all     leaseList
	loads   int
	loans   int
	stores  int
	leases  int   // in all of them, a slot leased twice counting twice
	slots   tally // by slot
	foreign tally // by foreign slot
	own     bool  // what peers lent is not for it
	takers  int   // loads that take over each of its lookups; 0: one
	leaving bool  // RemoveOwner is at it
	frozen  bool  // see frozen.go
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

func (e *Engine) takeTrash() ([]*carved, []*dax.Table[uint64]) {
	a, b := e.trash, e.idx.garbage
	e.trash, e.idx.garbage = nil, nil
	return a, b
}

func emptyTrash(c []*carved, t []*dax.Table[uint64]) {
	for _, m := range c {
		m.close()
	}
	for _, m := range t {
		m.Close()
	}
}

// AddRegion gives the engine a region of the arena, under an id of the caller's. The engine never
// touches the memory itself. Stores carve it into slots piece by piece: see areas.go.
func (e *Engine) AddRegion(id uint32, size int64) error {
	e.mu.Lock()
	defer e.unlock()
	if err := e.mayAdd(id, size); err != nil {
		return err
	}
	e.areas = append(e.areas, newArea(id, size))
	e.added(size)
	e.relimit()
	return nil
}

// mayAdd checks that a region can be added.
func (e *Engine) mayAdd(id uint32, size int64) error {
	switch {
	case e.closed:
		return tiers.ErrClosed
	case size <= 0 || size > math.MaxInt64-e.bytes:
		return invalid("region %d of %d bytes", id, size)
	case e.byID[id] != nil || e.areaOf(id) != nil:
		return invalid("region %d is there already", id)
	case len(e.byID)+len(e.areas) >= maxRegions:
		return fmt.Errorf("%w: %d regions are the most", tiers.ErrBusy, maxRegions)
	}
	return nil
}

// added counts a region that was just added.
func (e *Engine) added(size int64) {
	e.bytes += size
	e.waiting = false
}

// spareRegion returns the region of the lowest number that is not in use, nil if all are. Its
// caller carves it before the lock is released, or has e.carving set.
func (e *Engine) spareRegion() *region {
	for _, q := range e.regions[1 : e.nregion+1] {
		if q.spare() {
			return q
		}
	}
	if e.nregion == maxRegions {
		return nil
	}
	e.nregion++
	r := &region{num: uint32(e.nregion)}
	e.regions[e.nregion] = r
	return r
}

func (r *region) spare() bool { return r.class == nil && !r.foreign }

// relimit computes the classes' limits anew.
func (e *Engine) relimit() {
	for _, c := range e.classes {
		c.uncarved = 0
		for _, a := range e.areas {
			c.uncarved += a.uncarved(c)
		}
		retired := 0 // slots that may be leased, but are not handed out
		for _, r := range c.regions {
			if r.retired {
				retired += len(r.slots)
			}
		}
		slots := c.slots + c.uncarved
		others := float64(max(0, slots+retired-c.frozen)) // slots that no frozen owner has
		c.limit = max(1, int(e.cfg.OwnerShare*others))
		c.most = c.frozen + max(1, int(e.cfg.JointShare*others))
		c.promotable = max(1, int(e.cfg.PromotingShare*float64(slots)))
		if f := c.foreign; f != nil {
			f.limit = max(1, int(e.cfg.OwnerShare*float64(f.slots)))
			f.most = f.slots
		}
	}
	for _, s := range e.byPrint { // what operators pinned is no session's
		s.class.most += s.pinner.slots.n
	}
}

// OpenSpace answers the space of a fingerprint, and makes it if it is new. Another geometry under
// the same fingerprint is ErrIncompatible, one space too many ErrBusy. Room for it is made by
// closing spaces that only RecoverSpace opened: empty ones, or else the one that was used longest
// ago, which is cleared. For that it may let go of the lock.
func (e *Engine) OpenSpace(fp tiers.Fingerprint, g tiers.Geometry) (SpaceID, error) {
	if err := g.Validate(e.cfg.MinPageBytes); err != nil {
		return 0, err
	}
	e.mu.Lock()
	defer e.unlock()
	for e.byPrint[fp] == nil && len(e.byPrint) == e.cfg.MaxSpaces && e.closeRecovered() {
	}
	s, err := e.openSpace(fp, g)
	if err != nil {
		return 0, err
	}
	if s.recovered {
		s.g, s.recovered = g, false
		e.journal.name(s)
	}
	return SpaceID(s.id), nil
}

// RecoverSpace answers the space of a fingerprint whose chunks are to be restored, and makes it if
// it is new. PageTokens are those of whoever opens it by OpenSpace. Errors are those of OpenSpace,
// but no room is made.
func (e *Engine) RecoverSpace(fp tiers.Fingerprint, g tiers.Geometry) (SpaceID, error) {
	g.PageTokens = 1
	if err := g.Validate(e.cfg.MinPageBytes); err != nil {
		return 0, err
	}
	e.mu.Lock()
	defer e.unlock()
	known := e.byPrint[fp]
	if known != nil {
		g.PageTokens = known.g.PageTokens
	}
	s, err := e.openSpace(fp, g)
	if err != nil {
		return 0, err
	}
	s.recovered = s.recovered || known == nil
	return SpaceID(s.id), nil
}

// closeRecovered closes a space that only RecoverSpace opened, as OpenSpace says. It answers false
// if there is none that can be, and may let go of the lock.
func (e *Engine) closeRecovered() bool {
	var old *space
	for _, s := range e.spaces {
		if s == nil || !s.recovered || s.owners > 0 || s.clears > 0 || len(e.staging.regions) > 0 {
			continue
		}
		if s.inUse() == 0 {
			e.closeSpace(s)
			return true
		}
		if old == nil || s.lastUse < old.lastUse {
			old = s
		}
	}
	if e.closed || old == nil {
		return false
	}
	e.clearSpace(old)
	switch {
	case e.closed:
		return false
	case !old.recovered: // somebody opened it meanwhile
		return true
	case old.inUse() > 0 || old.owners > 0 || old.clears > 0:
		return false
	}
	e.closeSpace(old)
	return true
}

// openSpace finds or makes a space. One that only RecoverSpace opened is found whatever
// g.PageTokens is.
func (e *Engine) openSpace(fp tiers.Fingerprint, g tiers.Geometry) (*space, error) {
	if e.closed {
		return nil, tiers.ErrClosed
	}
	if s := e.byPrint[fp]; s != nil {
		has := s.g
		if s.recovered {
			has.PageTokens = g.PageTokens
		}
		if has != g {
			return nil, fmt.Errorf("%w: space %s has geometry %+v, asked for %+v",
				tiers.ErrIncompatible, fp.Short(), s.g, g)
		}
		return s, nil
	}
	if len(e.byPrint) == e.cfg.MaxSpaces {
		return nil, fmt.Errorf("%w: %d spaces are open", tiers.ErrBusy, e.cfg.MaxSpaces)
	}
	id := 1
	for id < len(e.spaces) && e.spaces[id] != nil {
		id++
	}
	if id == len(e.spaces) {
		e.spaces = append(e.spaces, nil)
	}
	if !e.carving {
		used := map[*class]bool{}
		for _, s := range e.byPrint {
			used[s.class] = true
		}
		for key, c := range e.classes {
			if len(c.regions) == 0 && !used[c] {
				e.dropForeign(c)
				e.dropBlock(c)
				delete(e.classes, key)
			}
		}
	}
	s := &space{id: uint16(id), print: fp, g: g, class: e.classOf(g), tagMask: e.tagMask,
		salt: e.cfg.Seed ^ 0x6C6F6F6B61736964}
	s.pinner.all.owned, s.pinner.space, s.pinner.own = true, s, true
	for i := range 4 {
		var w uint64
		for j := range 8 {
			w = w<<8 | uint64(fp[8*i+j])
		}
		s.salt = mix(s.salt, w)
	}
	e.addShadow(s)
	e.journal.opened(s)
	e.spaces[id], e.byPrint[fp] = s, s
	e.relimit()
	return s, nil
}

// classOf is the class of a geometry, made if there is none.
func (e *Engine) classOf(g tiers.Geometry) *class {
	g.PageTokens = 0
	c := e.classes[g]
	if c == nil {
		c = &class{geometry: g, policy: e.newPolicy(false)}
		e.classes[g] = c
	}
	return c
}

// CloseSpace forgets a space that has neither owners nor chunks; ErrBusy if it has. Clear it first
// if its chunks are not wanted.
func (e *Engine) CloseSpace(id SpaceID) error {
	e.mu.Lock()
	defer e.unlock()
	s, err := e.space(id)
	if err != nil {
		return err
	}
	if s.owners > 0 || s.inUse() > 0 || s.clears > 0 {
		return fmt.Errorf("%w: space %d has %d owners and %d chunks", tiers.ErrBusy, id, s.owners,
			s.inUse())
	}
	e.closeSpace(s)
	return nil
}

// inUse is how many slots hold something of a space, are being filled, or are to be restored.
func (s *space) inUse() int {
	if s.shadow != nil {
		return s.chunks + s.staged + s.shadow.chunks
	}
	return s.chunks + s.staged
}

func (e *Engine) closeSpace(s *space) {
	e.journal.forgotten(s)
	e.spaces[s.id] = nil
	delete(e.byPrint, s.print)
}

func (e *Engine) space(id SpaceID) (*space, error) {
	if e.closed {
		return nil, tiers.ErrClosed
	}
	if int(id) >= len(e.spaces) || e.spaces[id] == nil {
		return nil, fmt.Errorf("%w: space %d", tiers.ErrNotFound, id)
	}
	return e.spaces[id], nil
}

// clearSlice is how many slots ClearSpace and the emptying of a region look at before they let
// others have the lock.
const clearSlice = 512

// ClearSpace drops all chunks that a space has when it is called, and answers how many. Leased ones
// can no longer be found when it returns, and are freed at their release; what is being stored will
// not appear. It lets go of the lock between slices of its work.
func (e *Engine) ClearSpace(id SpaceID) (chunks int) {
	e.mu.Lock()
	defer e.unlock()
	s, err := e.space(id)
	if err != nil {
		return 0
	}
	return e.clearSpace(s)
}

func (e *Engine) clearSpace(s *space) (chunks int) {
	s.clears++
	defer func() { s.clears-- }()
	left := clearSlice
	for n := 1; n <= e.nregion; n++ {
		for i := 0; ; i++ {
			if left == 0 {
				left = clearSlice
				if !e.pause() {
					return chunks
				}
			}
			r := e.regions[n]
			if r.class == nil || r.class.geometry != s.class.geometry || i >= r.fresh {
				break
			}
			left--
			if sl := &r.slots[i]; sl.state != free && sl.space == s.id && !sl.doomed() {
				if sl.state == ready && !r.foreign {
					chunks++
				}
				e.doom(r.num<<recordBits | uint32(i))
			}
		}
	}
	e.stats.Cleared += uint64(chunks)
	return chunks
}

// SetTakers has each lookup of an owner that was just added be taken over by n loads, of the ranks
// that hold the same pages.
func (e *Engine) SetTakers(o Owner, n int) error {
	e.mu.Lock()
	defer e.unlock()
	ow, err := e.owner(o)
	if err != nil {
		return err
	}
	ow.takers = n
	return nil
}

// AddOwner lets a session use a space.
func (e *Engine) AddOwner(o Owner, id SpaceID) error {
	e.mu.Lock()
	defer e.unlock()
	s, err := e.space(id)
	if err != nil {
		return err
	}
	return e.addOwner(o, s, false)
}

// AddArenaOwner is AddOwner for one who reads the arena itself: what peers lent is not for it.
func (e *Engine) AddArenaOwner(o Owner, id SpaceID) error {
	e.mu.Lock()
	defer e.unlock()
	s, err := e.space(id)
	if err != nil {
		return err
	}
	return e.addOwner(o, s, true)
}

func (e *Engine) addOwner(o Owner, s *space, own bool) error {
	if e.owners[o] != nil {
		return invalid("owner %d is there already", o)
	}
	if len(e.owners) == e.cfg.MaxOwners {
		return fmt.Errorf("%w: %d owners are the most", tiers.ErrBusy, e.cfg.MaxOwners)
	}
	e.owners[o] = &owner{id: o, space: s, lookups: map[uint64]*lease{}, all: leaseList{owned: true},
		own: own}
	s.owners++
	e.useSpace(s)
	return nil
}

// useSpace notes that a space is in use now.
func (e *Engine) useSpace(s *space) {
	e.tick++
	s.lastUse = e.tick
}

// RemoveOwner ends a session: its lookups and loads are freed, its unfinished stores aborted.
func (e *Engine) RemoveOwner(o Owner) {
	e.mu.Lock()
	defer e.unlock()
	ow := e.owners[o]
	if ow == nil {
		return
	}
	ow.leaving = true
	for ow.all.first != nil {
		x := ow.all.first
		if x.kind != endingLease {
			e.endLease(x)
			continue
		}
		e.endPart(x)
		if !e.pause() { // others may have it between the parts
			return
		}
	}
	ow.space.owners--
	e.useSpace(ow.space)
	delete(e.owners, o)
	if ow.frozen {
		e.countFrozen()
	}
}

func (e *Engine) owner(o Owner) (*owner, error) {
	if e.closed {
		return nil, tiers.ErrClosed
	}
	if ow := e.owners[o]; ow != nil && !ow.leaving {
		return ow, nil
	}
	return nil, fmt.Errorf("%w: owner %d", tiers.ErrNotFound, o)
}

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

// carve makes slots of a region for a class. It releases the lock while it allocates.
func (e *Engine) carve(r *region, c *class, slots int, at Placement) error {
	need := e.records + slots*c.geometry.PagesPerChunk
	indexWords := 0
	if need > e.idx.limit() {
		e.carving = true
		for e.idx.migrating() && !e.closed {
			e.idx.migrate(clearSlice)
			e.pause()
		}
		e.carving = false
		if e.closed {
			return tiers.ErrClosed
		}
		if e.idx.cur.mem == nil {
			need = max(need, int(min(e.cfg.ArenaLimitBytes/c.geometry.PageBytes,
				maxRegions*recordMask))) + e.foreignSlots(c.geometry)*c.geometry.PagesPerChunk
		} else {
			need += need / 4
		}
		indexWords = tableWords(need)
	}
	spec := tableSpec{
		slots: slots, ppc: c.geometry.PagesPerChunk, words: c.geometry.DigestBytes / 8,
		routes: len(e.cfg.Tiers) > 0 && !c.isForeign, places: c.isForeign, sums: e.cfg.Sums &&
			!c.isForeign,
		indexWords: indexWords, pieces: 1,
	}
	block := c.block
	if r.area != nil {
		spec.pieces = blockPieces
	}
	if block != nil {
		block.hold()
	}
	e.carving = true
	e.mu.Unlock()
	m, err := makeCarved(block, spec)
	e.mu.Lock()
	e.carving = false
	if err != nil {
		e.stats.CarveFailures++
		return err
	}
	if e.closed {
		m.close()
		return tiers.ErrClosed
	}
	if m.block != c.block {
		e.dropBlock(c)
		c.block = m.block
		c.block.hold()
	}
	if m.index != nil {
		e.idx.grow(m.index)
		m.index = nil
	}
	*r = region{
		id: r.id, num: r.num, size: r.size, area: r.area, class: c, at: at,
		ppc: c.geometry.PagesPerChunk, shift: logarithm(c.geometry.PagesPerChunk),
		words: c.geometry.DigestBytes / 8,
		slots: m.slots, kin: m.kin, digests: m.digests, links: m.links.Slice(), routes: m.routes,
		places: m.places, sums: m.sums,
		firstGen: r.firstGen, free: slots, lastUse: e.tick, mem: m, foreign: c.isForeign,
	}
	c.policy.Grow(r.num, slots)
	c.regions = append(c.regions, r)
	c.slots += slots
	c.free += slots
	e.records += slots * r.ppc
	e.relimit()
	return nil
}

// dropBlock ends a class's hold on its block.
func (e *Engine) dropBlock(c *class) {
	if c.block != nil {
		e.trash = append(e.trash, &carved{block: c.block})
		c.block = nil
	}
}

// logarithm of a power of two; -1 for other numbers.
func logarithm(n int) int8 {
	if n&(n-1) != 0 {
		return -1
	}
	return int8(bits.TrailingZeros(uint(n)))
}

// drain empties a region and takes it from its class. It answers false, and leaves the region as it
// is, if something in it is used meanwhile.
func (e *Engine) drain(r *region) bool {
	c := r.class
	r.draining = true
	c.free -= r.free
	c.slots -= len(r.slots)
	for i := 0; i < r.fresh; i++ {
		s := &r.slots[i]
		if s.state == filling || s.state == ready && !s.idle() {
			r.draining = false
			c.free += r.free
			c.slots += len(r.slots)
			return false
		}
		if s.state == ready {
			e.expel(r.num<<recordBits | uint32(i))
		}
		if i%clearSlice == clearSlice-1 {
			if !e.pause() {
				return false
			}
		}
	}
	if r.leased != 0 || r.free+r.spoiled != len(r.slots) {
		panic(fmt.Sprintf("tiers: an emptied region has %d of %d slots free, %d leased", r.free,
			len(r.slots), r.leased))
	}
	e.stats.Recarved++
	e.uncarve(r)
	e.relimit()
	return true
}

// uncarve takes an empty region that hands out no slots from its class.
func (e *Engine) uncarve(r *region) {
	c := r.class
	for i := range c.regions {
		if c.regions[i] == r {
			c.regions = append(c.regions[:i], c.regions[i+1:]...)
			break
		}
	}
	c.policy.Shrink(r.num)
	e.records -= len(r.slots) * r.ppc
	e.trash = append(e.trash, r.mem)
	gen := r.firstGen
	for i := range r.slots[:r.fresh] {
		gen = max(gen, r.slots[i].gen)
	}
	if r.area == nil {
		*r = region{id: r.id, num: r.num, size: r.size, firstGen: gen + 1}
		return
	}
	r.area.free(r)
	*r = region{num: r.num, firstGen: gen + 1}
}
