package engine

import (
	"fmt"
	"maps"
	"math"

	"lookaside/internal/invariants"
	"lookaside/tiers"
	"lookaside/tiers/tenant"
)

// Check verifies every invariant of the engine and returns the first that does not hold. It looks
// at everything under the lock, so it is for tests and for a tool that asks an idle engine.
func (e *Engine) Check() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return tiers.ErrClosed
	}
	return e.check()
}

// check is Check for a caller that holds the lock.
func (e *Engine) check() error {
	c := e.debug.checker
	if c == nil {
		c = newChecker(e)
		if invariants.Enabled {
			e.debug.checker = c
		}
	}
	c.reset()
	for i := range e.lent.due {
		if d := e.lent.due[i]; e.isForeign(d.ref) &&
			int(d.ref&recordMask) < e.regions[d.ref>>recordBits].fresh {
			if _, s := e.slot(d.ref); s.gen == d.gen && s.state == ready {
				c.due[d.ref]++
			}
		}
	}
	for _, step := range [...]func(*checker) error{(*checker).leases, (*checker).parents,
		(*checker).slots, (*checker).index, (*checker).promotions, (*checker).cascades,
		(*checker).totals, (*checker).tenants, (*checker).hints, (*checker).lent,
		(*checker).classes, (*checker).areas} {
		if err := step(c); err != nil {
			return err
		}
	}
	return nil
}

// checker counts anew what the engine counts as it goes.
type checker struct {
	e *Engine
	counts

	pins     map[uint32]uint32 // by slot: leases of lookups, loads and pins
	copied   map[uint32]uint32 // by slot: those of cascades and moves among them
	children map[uint32]uint32 // by slot
	writers  map[uint32]int    // by slot: stores
	chunks   map[*space]int
	pages    map[*space]int // indexed
	loans    map[uint32]int // by announced region

	busy      map[uint32]uint8 // by slot: tiers that it is being written to
	promoting map[*class]int
	cold      map[orderOf]int
	held      map[orderOf]int // slots that are not free
	moving    map[uint32]bool // slots that moves are from or to, and that copies are to
	due       map[uint32]int  // by slot: copies of it, under way or queued

	seen map[uint32]bool      // of one queue: scratch
	by   map[ownerSlot]uint32 // leases
	uses map[*owner]int       // slots that it has leases on
}

// orderOf is a tenant's part of a class, or its order of eviction there.
type orderOf struct {
	c *class
	t tenant.ID
}

// ownerSlot is a slot that an owner has leases on.
type ownerSlot struct {
	ow  *owner
	ref uint32
}

// counts are what a checker counts of the whole engine.
type counts struct {
	heads      int
	records    int
	flying     int // slots that are being promoted into, and may be joined
	unverified int
	waits      int // lookups that wait
}

func newChecker(e *Engine) *checker {
	return &checker{e: e, pins: map[uint32]uint32{}, copied: map[uint32]uint32{},
		children: map[uint32]uint32{}, writers: map[uint32]int{}, chunks: map[*space]int{},
		pages: map[*space]int{}, loans: map[uint32]int{}, busy: map[uint32]uint8{},
		promoting: map[*class]int{}, cold: map[orderOf]int{}, held: map[orderOf]int{},
		moving: map[uint32]bool{},
		due:    map[uint32]int{}, seen: map[uint32]bool{}, by: map[ownerSlot]uint32{},
		uses: map[*owner]int{}}
}

// reset forgets what the last check counted. A debug build checks often, so the maps stay.
func (c *checker) reset() {
	c.counts = counts{}
	clear(c.pins)
	clear(c.copied)
	clear(c.children)
	clear(c.writers)
	clear(c.chunks)
	clear(c.pages)
	clear(c.loans)
	clear(c.busy)
	clear(c.promoting)
	clear(c.cold)
	clear(c.held)
	clear(c.moving)
	clear(c.due)
	clear(c.by)
	clear(c.uses)
}

func broken(format string, args ...any) error {
	return fmt.Errorf("broken invariant: "+format, args...)
}

func (c *checker) leases() error {
	e := c.e
	live, pins := 0, 0
	for i, x := range e.leases.all {
		if x.index != uint32(i) {
			return broken("lease %d thinks that it is %d", i, x.index)
		}
		if x.kind == noLease {
			if x.gen < e.leases.skipped {
				return broken("lease %d would get a handle of another engine again", i)
			}
			continue
		}
		live++
		n, err := c.lease(x)
		if err != nil {
			return err
		}
		pins += n
	}
	for handle, x := range e.leases.imported {
		if x.kind == noLease || x.was != handle || e.leases.all[x.index] != x {
			return broken("imported lease %#x is a %v that was %#x", handle, x.kind, x.was)
		}
	}
	if live+len(e.leases.spare) != len(e.leases.all) {
		return broken("%d leases in use and %d spare make not %d", live, len(e.leases.spare),
			len(e.leases.all))
	}
	if pins != e.leases.pins {
		return broken("%d leases on slots, counted %d", pins, e.leases.pins)
	}
	for _, ow := range []*owner{&e.cascades.owner, &e.mover} {
		if err := c.owner(ow, &live); err != nil {
			return err
		}
	}
	for _, ow := range e.owners {
		if err := c.owner(ow, &live); err != nil {
			return err
		}
	}
	for _, s := range e.byPrint {
		if err := c.owner(&s.pinner, &live); err != nil {
			return err
		}
	}
	if live != 0 {
		return broken("%d leases have no living owner", live)
	}
	return c.deadlines()
}

// lease verifies one lease, and returns how many slots it pins.
func (c *checker) lease(x *lease) (pins int, err error) {
	e := c.e
	returned := 0
	for j, ref := range x.slots {
		if ref == 0 && x.kind == loanLease {
			returned++
			continue
		}
		if by := (ownerSlot{x.owner, ref}); c.by[by] == 0 {
			c.uses[x.owner]++
			c.by[by] = 1
		} else {
			c.by[by]++
		}
		_, s := e.slot(ref)
		if x.kind == storeLease {
			c.writers[ref]++
			if s.granted == 0 || s.state == free {
				return 0, broken("slot %#x of a store is in state %d with %d pages granted", ref,
					s.state, s.granted)
			}
			continue
		}
		c.pins[ref]++
		pins++
		if x.kind == cascadeLease || x.kind == moveLease {
			c.copied[ref]++
		}
		waits := x.lookup.waiting && j >= x.lookup.held
		if s.state != ready && !(s.promoting() && waits) {
			return 0, broken("slot %#x of a %v is in state %d", ref, x.kind, s.state)
		}
		if err := c.leased(x, j, ref, s); err != nil {
			return 0, err
		}
	}
	if returned != x.loan.returned || returned > 0 && returned == len(x.slots) {
		return 0, broken("%d of the %d slots of a %v have been given back, counted %d", returned,
			len(x.slots), x.kind, x.loan.returned)
	}
	if x.kind == lookupLease {
		return pins, c.lookup(x)
	}
	return pins, nil
}

// leased verifies slot j of a lease: that it is the right chunk, and what an errand does with it.
func (c *checker) leased(x *lease, j int, ref uint32, s *slot) error {
	want := int(s.chunk)
	switch {
	case x.lookup.waiting && j >= x.lookup.held:
		want = x.lookup.after + j - x.lookup.held
	case x.kind == lookupLease || x.kind == loadLease || x.kind == loanLease:
		want = x.first/x.owner.space.g.PagesPerChunk + j
	case x.kind == cascadeLease:
		c.busy[ref] |= x.errand.tier
	case x.kind == moveLease && len(x.slots) == 1 || x.kind == copyLease:
		if err := c.filled(x, ref, s); err != nil {
			return err
		}
	}
	if int(s.chunk) != want {
		return broken("slot %#x of a %v is chunk %d, want %d", ref, x.kind, s.chunk, want)
	}
	return nil
}

// filled verifies the slot that a move or a copy of a slot fills.
func (c *checker) filled(x *lease, ref uint32, s *slot) error {
	e, to := c.e, x.errand.to
	_, t := e.slot(to)
	ok := !c.moving[to] && t.state == filling && t.chunk == s.chunk && int(t.granted) == x.n &&
		(s.doomed() || int(s.pages) == x.n)
	if x.kind == copyLease {
		ok = ok && e.isForeign(ref) && !e.isForeign(to)
		c.due[ref]++
	} else {
		ok = ok && !c.moving[ref]
		c.moving[ref] = true
	}
	if !ok {
		return broken("slot %#x with %d pages has a %v to slot %#x in state %d with %d granted",
			ref, s.pages, x.kind, to, t.state, t.granted)
	}
	c.writers[to]++
	c.moving[to] = true
	return nil
}

// lookup verifies what a lookup holds and waits for.
func (c *checker) lookup(x *lease) error {
	l, ppc := &x.lookup, x.owner.space.g.PagesPerChunk
	held, end := len(x.slots), x.first+x.n
	if l.waiting {
		held, end = l.held, l.end
		if x.n < 0 || l.held < 0 || l.held >= len(x.slots) ||
			(l.end+ppc-1)/ppc != l.after+len(x.slots)-l.held {
			return broken("a lookup waits for the chunks from %d on, up to page %d, with %d "+
				"slots, %d of them held", l.after, l.end, len(x.slots), l.held)
		}
		c.waits++
	}
	if end <= x.first || x.n == 0 != (held == 0) ||
		x.n > 0 && held != (x.first+x.n-1)/ppc-x.first/ppc+1 {
		return broken("a lookup of %d pages from %d has %d slots, waiting %v to %d", x.n, x.first,
			held, l.waiting, end)
	}
	if x.owner.lookups[l.id] != x {
		return broken("lookup %d is not its owner's", l.id)
	}
	return nil
}

// owner verifies what an owner counts, and takes its leases off those that are live.
func (c *checker) owner(ow *owner, live *int) error {
	e := c.e
	var counts [endingLease + 1]int
	total := 0
	for x := ow.all.first; x != nil; x = x.inOwner.next {
		if x.owner != ow {
			return broken("a lease is in another owner's list")
		}
		*live--
		counts[x.kind]++
		total += len(x.slots) - x.loan.returned
	}
	if counts[lookupLease] != len(ow.lookups) || counts[loadLease] != ow.loads ||
		counts[loanLease] != ow.loans || counts[storeLease] != ow.stores || total != ow.leases {
		return broken("owner %d has %v by kind on %d slots, counted %d lookups, %d loads, "+
			"%d stores, %d", ow.id, counts, total, len(ow.lookups), ow.loads, ow.stores, ow.leases)
	}
	if c.uses[ow] != ow.slots.n+ow.foreign.n {
		return broken("owner %d uses %d slots, counted %d and %d", ow.id, c.uses[ow], ow.slots.n,
			ow.foreign.n)
	}
	for _, t := range [...]*tally{&ow.slots, &ow.foreign} {
		used := 0
		for _, x := range t.entries {
			if x.value == 0 {
				continue
			}
			used++
			if n := c.by[ownerSlot{ow, x.key}]; n != x.value || e.tally(ow, x.key) != t {
				return broken("owner %d has %d leases on slot %#x, counted %d", ow.id, n, x.key,
					x.value)
			}
		}
		if used != t.n {
			return broken("owner %d counts %d slots in %d entries", ow.id, t.n, used)
		}
	}
	if ow.own && ow.foreign.n > 0 {
		return broken("owner %d has leases on %d foreign slots", ow.id, ow.foreign.n)
	}
	return nil
}

// deadlines verifies that each lookup has a deadline or waits.
func (c *checker) deadlines() error {
	lookups := c.waits
	last := int64(math.MinInt64)
	for x := c.e.leases.expiry.first; x != nil; x = x.lookup.queued.next {
		if x.kind != lookupLease || x.lookup.waiting || x.lookup.deadline < last {
			return broken("the deadlines' order")
		}
		last = x.lookup.deadline
		lookups++
	}
	for _, ow := range c.e.owners {
		lookups -= len(ow.lookups)
	}
	if lookups != 0 {
		return broken("%d lookups too many have a deadline or wait", lookups)
	}
	return nil
}

func (c *checker) parents() error {
	return c.each(func(r *region, ref uint32, s *slot) error {
		if s.state == free || c.e.orphan(ref) {
			return nil
		}
		parent := c.e.kin(ref).parent
		if r.foreign || c.e.isForeign(parent) {
			return broken("slot %#x continues slot %#x", ref, parent)
		}
		if s.flags&cold == 0 {
			c.children[parent]++
		}
		k := c.e.kin(ref)
		if k.prev != 0 && c.e.kin(k.prev).next != ref ||
			k.prev == 0 && c.e.kin(parent).child != ref ||
			k.next != 0 && c.e.kin(k.next).prev != ref {
			return broken("slot %#x is not in the list of what continues slot %#x", ref, parent)
		}
		if _, p := c.e.slot(parent); p.state != ready && !p.promoting() ||
			p.chunk+1 != s.chunk || p.space != s.space || !p.doomed() && int(p.pages) != r.ppc &&
			int(p.granted) != r.ppc {
			return broken("slot %#x, chunk %d, has parent %#x, chunk %d with %d pages in state %d",
				ref, s.chunk, parent, p.chunk, p.pages, p.state)
		}
		return nil
	})
}

func (c *checker) each(f func(r *region, ref uint32, s *slot) error) error {
	for n := 1; n <= c.e.nregion; n++ {
		r := c.e.regions[n]
		if r.class == nil {
			continue
		}
		for i := range r.fresh {
			if err := f(r, r.num<<recordBits|uint32(i), &r.slots[i]); err != nil {
				return err
			}
		}
	}
	return nil
}

func (c *checker) slots() error {
	for _, r := range c.e.regions[1 : c.e.nregion+1] {
		if r.retired && !r.draining {
			return broken("region %d is retired and hands out slots", r.id)
		}
		if r.class == nil {
			continue
		}
		if err := c.region(r); err != nil {
			return err
		}
	}
	return nil
}

// region verifies the slots of a region and what it counts of them.
func (c *checker) region(r *region) error {
	c.records += len(r.slots) * r.ppc
	found := regionCounts{free: len(r.slots) - r.fresh}
	for i := range r.fresh {
		ref, s := r.num<<recordBits|uint32(i), &r.slots[i]
		if err := c.slot(r, ref, s); err != nil {
			return err
		}
		if err := c.state(r, ref, s, &found); err != nil {
			return err
		}
	}
	listed := len(r.slots) - r.fresh
	for i := r.freeList; i != 0; i = r.kin[i-1].next {
		if listed++; r.slots[i-1].state != free || r.slots[i-1].flags != 0 || listed > r.free {
			return broken("the list of free slots of region %d", r.id)
		}
	}
	if counted := (regionCounts{r.free, r.spoiled, r.filling, r.leased}); found != counted ||
		listed != r.free {
		return broken("region %d has %+v slots, %d of them listed as free; counted %+v", r.id,
			found, listed, counted)
	}
	return nil
}

// regionCounts are what a region counts of its slots.
type regionCounts struct{ free, spoiled, filling, leased int }

// slot verifies what slots of all states have.
func (c *checker) slot(r *region, ref uint32, s *slot) error {
	e := c.e
	if s.state != free {
		if int(s.space) >= len(e.spaces) || e.spaces[s.space] == nil || e.spaceOf(r, s) == nil ||
			e.spaceOf(r, s).class != r.class {
			return broken("slot %#x is in space %d", ref, s.space)
		}
		c.chunks[e.spaceOf(r, s)]++
		if s.children > 0 && e.kin(ref).child == 0 {
			return broken("slot %#x has %d continuations, the first of them %#x", ref, s.children,
				e.kin(ref).child)
		}
	}
	if s.pins != c.pins[ref] || s.children != c.children[ref] {
		return broken("slot %#x has %d leases and %d continuations, counted %d and %d", ref,
			c.pins[ref], c.children[ref], s.pins, s.children)
	}
	if want := b2i(s.state == filling && !s.promoting() ||
		s.state == ready && s.granted > 0); c.writers[ref] != want {
		return broken("slot %#x in state %d with %d pages granted has %d writers", ref, s.state,
			s.granted, c.writers[ref])
	}
	if !c.flags(ref, s) {
		return broken("slot %#x in state %d with %d continuations has flags %b", ref, s.state,
			s.children, s.flags)
	}
	if (s.flags&moving != 0) != c.moving[ref] {
		return broken("slot %#x in state %d with flags %b moves: %v", ref, s.state, s.flags,
			c.moving[ref])
	}
	c.cold[orderOf{r.class, e.orderOf(r, ref)}] += b2i(s.flags&cold != 0)
	if s.state != free {
		c.held[orderOf{r.class, r.tenants[ref&recordMask]}]++
	}
	if k := r.kinds[ref&recordMask]; k != plain && (s.state != ready || s.doomed() || r.foreign ||
		k >= retained && s.flags&cold != 0) {
		return broken("slot %#x in state %d with flags %b is of kind %d", ref, s.state, s.flags, k)
	}
	c.unverified += b2i(s.unverified())
	if s.promoting() {
		c.promoting[r.class]++
		if !s.doomed() {
			c.flying++
			if e.flights.get(e.flight(ref)) != ref {
				return broken("slot %#x is being promoted into, and cannot be joined", ref)
			}
		}
	}
	if r.foreign {
		return c.loan(r, ref, s)
	}
	return nil
}

// flags reports whether the flags of a slot go together with its state.
func (c *checker) flags(ref uint32, s *slot) bool {
	switch {
	case s.flags&pending != 0 && s.state == free,
		s.flags&(twin|reused|cold|moved) != 0 && s.state != ready,
		s.flags&cold != 0 && (s.doomed() || s.children > 0):
		return false
	}
	return !s.unverified() || !s.doomed() && s.granted == 0 && s.pins == c.copied[ref]
}

// state verifies what slots of one state have, and counts them.
func (c *checker) state(r *region, ref uint32, s *slot, found *regionCounts) error {
	switch s.state {
	case free:
		bad := b2i(s.flags&spoiled != 0)
		found.free += 1 - bad
		found.spoiled += bad
		if s.pages != 0 || s.granted != 0 || s.pins != 0 {
			return broken("free slot %#x has %d pages, %d granted, %d leases", ref, s.pages,
				s.granted, s.pins)
		}
	case filling:
		found.filling++
		if s.pages != 0 || s.granted == 0 || int(s.granted) > r.ppc ||
			!s.promoting() && (s.pins != 0 || s.children != 0) {
			return broken("filling slot %#x has %d pages, %d granted, %d leases, %d continuations",
				ref, s.pages, s.granted, s.pins, s.children)
		}
	case ready:
		found.leased += b2i(!s.idle())
		ok := s.pages > 0 && int(s.pages)+int(s.granted) <= r.ppc
		if s.doomed() {
			ok = s.pages == 0 && !s.idle()
		}
		if !ok {
			return broken("ready slot %#x has %d pages, %d granted, doomed %v, idle %v", ref,
				s.pages, s.granted, s.doomed(), s.idle())
		}
		if !s.doomed() && s.idle() && (int(s.pages) < r.ppc || s.flags&(twin|moved) != 0) &&
			c.e.redundant(ref) {
			return broken("idle slot %#x adds nothing", ref)
		}
		return c.pageRecords(r, ref, s)
	}
	return nil
}

// loan verifies the loan of a foreign slot.
func (c *checker) loan(r *region, ref uint32, s *slot) error {
	p := &r.places[ref&recordMask]
	if s.flags&(cold|moving|spoiled) != 0 || s.flags&moved != 0 && s.idle() || c.copied[ref] > 0 ||
		s.granted > 0 && s.state == ready || (p.handle != 0) != (s.state == ready) &&
		!(s.state == ready && s.doomed()) || p.handle == 0 && *p != (place{}) {
		return broken("foreign slot %#x in state %d with flags %b has %+v", ref, s.state, s.flags,
			*p)
	}
	if p.handle != 0 {
		c.loans[p.region]++
	}
	if c.due[ref] != b2i(p.due) {
		return broken("foreign slot %#x is to be copied %d times, and is due: %v", ref, c.due[ref],
			p.due)
	}
	return nil
}

// originals is how many of the slots that share the last page of a chunk, from a record on, are
// there to stay.
func (c *checker) originals(rec uint32) (n int) {
	for ; rec != 0; rec = c.e.links(rec).next {
		ref, _ := c.e.slotOf(rec)
		_, s := c.e.slot(ref)
		n += b2i(s.flags&(twin|moved) == 0)
	}
	return n
}

// linked reports whether a record that is linked to page pos of a slot is one of the same page.
func (c *checker) linked(r *region, s *slot, ref uint32, pos int, other uint32) bool {
	var buf [32]byte
	or, op := c.e.slotOf(other)
	ro, o := c.e.slot(or)
	return o.state == ready && !o.doomed() && op < int(o.pages) && op == pos &&
		o.chunk == s.chunk && o.space == s.space && ro.class == r.class &&
		equal(ro.digest(or&recordMask, op), r.digestBytes(ref&recordMask, pos, &buf))
}

// pageRecords verifies the page records of a ready slot.
func (c *checker) pageRecords(r *region, ref uint32, s *slot) error {
	e := c.e
	base := int(ref&recordMask) * r.ppc
	var buf [32]byte
	for pos := range r.ppc {
		rec, l := ref&^recordMask|uint32(base+pos), r.links[base+pos]
		if pos >= int(s.pages) || r.foreign && pos < int(s.pages)-1 {
			if l != (link{}) {
				return broken("page %d of slot %#x is linked and not to be found", pos, ref)
			}
			continue
		}
		for _, other := range [...]uint32{l.prev, l.next} {
			if other != 0 && !c.linked(r, s, ref, pos, other) {
				return broken("page %d of slot %#x is linked to another page, %#x", pos, ref, other)
			}
		}
		if l.next != 0 && e.links(l.next).prev != rec ||
			l.prev != 0 && e.links(l.prev).next != rec {
			return broken("the links of page %d of slot %#x", pos, ref)
		}
		if l.prev != 0 {
			continue
		}
		c.heads++
		if c.pages[e.spaceOf(r, s)]++; r.foreign {
			c.pages[e.spaceOf(r, s)] += pos
		}
		if pos == r.ppc-1 && c.originals(rec) > 1 {
			return broken("%d slots have the whole chunk of slot %#x", c.originals(rec), ref)
		}
		if found, _ := e.seek(e.spaceOf(r, s), r.digestBytes(ref&recordMask, pos,
			&buf)); found != rec {
			return broken("page %d of slot %#x is found as %#x", pos, ref, found)
		}
	}
	return nil
}

func (c *checker) index() error {
	for _, t := range []*table{&c.e.idx.cur, &c.e.idx.old} {
		used := 0
		for _, w := range t.words {
			used += b2i(w != 0)
		}
		if used != t.used || used > 0 && used >= len(t.words) {
			return broken("a table of %d has %d entries, counted %d", len(t.words), used, t.used)
		}
	}
	if c.heads != c.e.idx.len() {
		return broken("%d pages can be found, %d entries", c.heads, c.e.idx.len())
	}
	return nil
}

func (c *checker) promotions() error {
	if c.e.flights.n != c.flying {
		return broken("%d chunks are on their way, counted %d", c.flying, c.e.flights.n)
	}
	var err error
	c.e.allClasses(func(cl *class) {
		if cl.promoting != c.promoting[cl] || cl.promoting > 0 && len(cl.regions) == 0 {
			err = broken("a class has %d slots that are promoted into, counted %d", c.promoting[cl],
				cl.promoting)
		}
	})
	return err
}

// routes verifies how the slots stand to the tiers, and counts into queued those that wait.
func (c *checker) routes(queued *[MaxTiers]int) error {
	e := c.e
	return c.each(func(r *region, ref uint32, s *slot) error {
		t := e.route(ref)
		if t == nil {
			return nil
		}
		all := t.held | t.whole | t.part | t.busy
		if s.state != ready && all != 0 || all>>len(e.cfg.Tiers) != 0 ||
			s.doomed() && all != t.busy || t.whole&t.part != 0 || (t.whole|t.part)&t.held != 0 ||
			t.whole != 0 && int(s.pages) < r.ppc || t.part != 0 && int(s.pages) == r.ppc ||
			t.busy != c.busy[ref] {
			return broken("slot %#x in state %d with flags %b and %d pages, being written to %b, "+
				"stands to the tiers as %+v", ref, s.state, s.flags, s.pages, c.busy[ref], *t)
		}
		for i := range queued {
			queued[i] += int((t.whole|t.part)>>i) & 1
		}
		return nil
	})
}

func (c *checker) cascades() error {
	var queued [MaxTiers]int
	if err := c.routes(&queued); err != nil {
		return err
	}
	for i := range c.e.cfg.Tiers {
		q := &c.e.cascades.queues[i]
		whole, err := c.queue(i, &q.whole, (*route).isWhole)
		if err != nil {
			return err
		}
		part, err := c.queue(i, &q.part, (*route).isPart)
		if err != nil {
			return err
		}
		if queued[i] != q.queued || whole+part != q.queued || q.queued > q.limit {
			return broken("%d slots are queued for tier %d by %d entries, counted %d of at most %d",
				queued[i], i, whole+part, q.queued, q.limit)
		}
	}
	for _, cl := range c.e.classes {
		if err := c.coldest(cl); err != nil {
			return err
		}
	}
	return nil
}

// queue verifies one queue of a tier, and returns how many of its entries are not void.
func (c *checker) queue(tier int, f *fifo, in func(*route, uint8) bool) (entries int, err error) {
	clear(c.seen)
	for _, x := range f.entries[f.head:] {
		if t := c.e.queuedRoute(x); t != nil && in(t, 1<<tier) {
			if c.seen[x.ref] {
				return 0, broken("slot %#x is queued twice for tier %d", x.ref, tier)
			}
			c.seen[x.ref] = true
			entries++
		}
	}
	if limit := c.e.cascades.queues[tier].limit; len(f.entries) > 2*limit {
		return 0, broken("a queue of at most %d has %d entries", limit, len(f.entries))
	}
	return entries, nil
}

// coldest verifies the list of a class's cold slots that are not in use.
func (c *checker) coldest(cl *class) error {
	e := c.e
	idle, sum := 0, 0
	for i := range cl.parts {
		p, order := &cl.parts[i], tenant.ID(i)
		if n := c.cold[orderOf{cl, order}]; p.cold != n {
			return broken("tenant %d has %d cold slots of a class, counted %d", i, n, p.cold)
		}
		sum += p.cold
		prev := uint32(0)
		for ref := p.coldFirst; ref != 0; ref = e.route(ref).next {
			r, s := e.slot(ref)
			if r.class != cl || e.orderOf(r, ref) != order || s.flags&cold == 0 || !s.idle() ||
				e.kin(ref).child != 0 || e.route(ref).prev != prev {
				return broken("slot %#x with flags %b is listed as cold", ref, s.flags)
			}
			idle++
			prev = ref
		}
		if prev != p.coldLast {
			return broken("the list of cold slots ends with %#x, not %#x", prev, p.coldLast)
		}
	}
	if sum != cl.cold {
		return broken("a class has %d cold slots, counted %d", sum, cl.cold)
	}
	if err := c.each(func(r *region, ref uint32, s *slot) error {
		idle -= b2i(r.class == cl && s.flags&cold != 0 && s.idle() && e.kin(ref).child == 0)
		return nil
	}); err != nil || idle != 0 {
		return broken("%d cold slots too many are listed", idle)
	}
	return nil
}

func (c *checker) totals() error {
	e := c.e
	if c.records != e.records {
		return broken("%d records, counted %d", c.records, e.records)
	}
	if n := e.Unverified(); n != c.unverified {
		return broken("%d slots are unverified, counted %d", c.unverified, n)
	}
	for _, own := range e.byPrint {
		for _, s := range [...]*space{own, own.shadow} {
			if s != nil && (s.chunks != c.chunks[s] || s.pages != c.pages[s]) {
				return broken("space %d has %d chunks, %d pages; counted %d, %d", s.id, c.chunks[s],
					c.pages[s], s.chunks, s.pages)
			}
		}
	}
	return nil
}

// lent verifies what is counted of loans and foreign regions.
func (c *checker) lent() error {
	e := c.e
	if !maps.Equal(c.loans, e.lent.loans) {
		return broken("loans by region are %v, counted %v", c.loans, e.lent.loans)
	}
	foreign := 0
	for n, r := range e.regions {
		if r != nil && r.foreign != (e.lent.mask>>n&1 != 0) {
			return broken("region %d is foreign: %v", n, r.foreign)
		}
		foreign += b2i(r != nil && r.foreign)
	}
	if foreign != e.lent.regions {
		return broken("%d regions are foreign, counted %d", foreign, e.lent.regions)
	}
	return nil
}

// classes verifies what each class counts of its regions.
func (c *checker) classes() (err error) {
	c.e.allClasses(func(cl *class) {
		slots, frees, busy := 0, 0, 0
		for _, r := range cl.regions {
			if r.class != cl {
				err = broken("region %d is in another class's list", r.id)
			}
			if !r.draining {
				slots += len(r.slots)
				frees += r.free
			}
			busy += r.leased + r.filling
		}
		if slots != cl.slots || frees != cl.free || busy != cl.busy {
			err = broken("a class has %d slots, %d free, %d leased or filling; counted %d, %d, %d",
				slots, frees, busy, cl.slots, cl.free, cl.busy)
		}
	})
	return err
}

// areas verifies that areas and pieces agree with one another.
func (c *checker) areas() error {
	e := c.e
	bytes, pieces := int64(0), 0
	for _, a := range e.areas {
		n, err := c.area(a)
		if err != nil {
			return err
		}
		pieces += n
		bytes += a.size
	}
	for _, r := range e.byID {
		bytes += r.size
	}
	for _, r := range e.regions {
		if r != nil && r.area != nil {
			pieces--
		}
	}
	if bytes != e.bytes || pieces != 0 {
		return broken("regions of %d bytes with %d pieces too many, counted %d bytes", bytes,
			pieces, e.bytes)
	}
	return nil
}

// area verifies the parts of an area, and returns how many of them are pieces.
func (c *checker) area(a *area) (pieces int, err error) {
	at := int64(0)
	for i, s := range a.spans {
		if s.at != at || s.size <= 0 || s.r == nil && i > 0 && a.spans[i-1].r == nil {
			return 0, broken("region %d has a part of %d bytes at %d, after the one that ends at "+
				"%d", a.id, s.size, s.at, at)
		}
		if r := s.r; r != nil {
			pieces++
			if r.class != nil && (a.retired != r.retired || a.going && !r.draining) {
				return 0, broken("region %d is drained: %v, removed: %v; its piece at %d hands "+
					"out slots: %v, is emptied: %v", a.id, a.retired, a.going, s.at, !r.draining,
					r.emptying())
			}
			if r.area != a || r.id != a.id || r.class != nil && (r.at.Offset != s.at ||
				r.size != s.size || r.size != int64(len(r.slots))*r.class.slotBytes()) {
				return 0, broken("region %d has a piece of %d bytes at %d that is one of region "+
					"%d, of %d bytes at %d", a.id, s.size, s.at, r.id, r.size, r.at.Offset)
			}
		}
		at += s.size
	}
	if at != a.size {
		return 0, broken("region %d of %d bytes has parts of %d", a.id, a.size, at)
	}
	return pieces, nil
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

// tenants verifies what is counted for tenants.
func (c *checker) tenants() error {
	e := c.e
	var rows [tenant.MaxIDs]tenantRow
	var wrong error
	e.allClasses(func(cl *class) {
		unnamed := 0
		for i := range cl.parts {
			t, held := tenant.ID(i), cl.parts[i].held
			if n := c.held[orderOf{cl, t}]; n != held || held > 0 && t >= e.tenants.top {
				wrong = broken("tenant %d has %d slots of a class, counted %d", i, n, held)
			}
			unnamed += b2i(held > 0 && !e.tenants.shares.Named(t))
			if !cl.isForeign {
				rows[i].slots += held
				rows[i].bytes += int64(held) * cl.slotBytes()
			}
		}
		if unnamed != cl.unnamed {
			wrong = broken("%d tenants without a named share have slots of a class, counted %d",
				unnamed, cl.unnamed)
		}
	})
	for i := range rows {
		if row := &e.tenants.rows[i]; row.slots != rows[i].slots || row.bytes != rows[i].bytes {
			wrong = broken("tenant %d has %d slots of %d bytes, counted %d of %d", i,
				rows[i].slots, rows[i].bytes, row.slots, row.bytes)
		}
	}
	return wrong
}

// hints verifies what is known of hints.
func (c *checker) hints() error {
	e := c.e
	h := &e.hints
	if h.kept.place.n != len(h.kept.heap) {
		return broken("%d slots are kept, and %d have places", len(h.kept.heap), h.kept.place.n)
	}
	kinds := [...]int{retained: 0, pinned: 0}
	counts := map[orderOf]int{}
	if err := c.each(func(r *region, ref uint32, _ *slot) error {
		k := r.kinds[ref&recordMask]
		kinds[k]++
		x := h.kept.get(ref)
		if (x != nil) != (k >= retained) || x != nil && x.kind() != k {
			return broken("slot %#x is of kind %d, and kept as %+v", ref, k, x)
		}
		if x != nil {
			counts[orderOf{r.class, r.tenants[ref&recordMask]}]++
		}
		return nil
	}); err != nil {
		return err
	}
	if kinds[low] != h.low || kinds[pinned] != h.pinned ||
		kinds[retained]+kinds[pinned] != len(h.kept.heap) {
		return broken("%d low, %d retained and %d pinned slots, counted %d, %d, %d", kinds[low],
			kinds[retained], kinds[pinned], h.low, len(h.kept.heap)-h.pinned, h.pinned)
	}
	for i := range h.kept.heap {
		if i > 0 && h.kept.less(&h.kept.heap[i], &h.kept.heap[(i-1)/2]) {
			return broken("kept slot %d of the heap is due before the one above it", i)
		}
	}
	var wrong error
	e.allClasses(func(cl *class) {
		sum := 0
		for i := range cl.parts {
			n := counts[orderOf{cl, tenant.ID(i)}]
			if sum += n; n != cl.parts[i].kept {
				wrong = broken("tenant %d has %d kept slots of a class, counted %d", i, n,
					cl.parts[i].kept)
			}
		}
		if sum != cl.kept {
			wrong = broken("%d slots of a class are kept, counted %d", sum, cl.kept)
		}
	})
	return wrong
}
