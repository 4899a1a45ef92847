package engine

import "lookaside/tiers/tenant"

// Tenants: whose slots are (package tenant), and which tenant loses one when room is wanted.
//
// A slot is the tenant's whose store or promotion it was granted for, from the grant until it is
// free, whoever uses it. A chunk that others use as well is charged to the first: to divide it
// would cost every lookup a write to each chunk, and a rule that charges shared chunks to nobody
// lets two names that use each other's chunks hold what neither may. The first is not hurt much. A
// chunk that is used or continued is no victim before its tenant's other chunks are; and when it
// leaves, the next to store it is its tenant.
//
// With Config.Shares a tenant's quota is its share of the slots of a class. While a slot is free,
// nobody is kept from taking it: what nobody uses is lent. When none is, the tenant with the most
// slots beyond its quota loses one, the coldest of its own. The one that wants the slot counts as
// having it already. So a tenant at or below its quota loses nothing to others, and what is lent is
// divided equally among those who want it. If that tenant has nothing that can be evicted, because
// all is leased, or continued by other tenants' chunks, the next one loses. A tenant that wants a
// slot may always evict its own.
//
// Quotas are parts of a class, not of the arena: slots of another geometry are of no use for its
// chunks. Pieces that go from one geometry to another (areas.go) go without regard to tenants.
//
// Without Config.Shares tenants are counted, and one order of eviction is common to all.

// tenants is what an engine counts for each tenant.
type tenants struct {
	registry *tenant.Registry // nil: there is only tenant.None
	shares   tenant.Table
	top      tenant.ID // no slot is or was of a tenant from here on
	rows     [tenant.MaxIDs]tenantRow
}

// tenantRow is what an engine counts for one tenant in the arena; what peers lend is not counted.
type tenantRow struct {
	life    uint32 // whose row it is; see tenant.Registry.Life
	slots   int
	bytes   int64
	evicted uint64 // chunks
	shed    uint64 // pages
}

// close has the registry forget what the engine holds.
func (t *tenants) close() {
	for i := range t.rows {
		if t.registry != nil && t.rows[i].slots > 0 {
			t.registry.Hold(tenant.ID(i), false)
		}
	}
}

// part is what a tenant has of a class.
type part struct {
	held int // slots that are not free
	// Its order of eviction. Without Config.Shares that of tenant.None is everybody's.
	coldFirst, coldLast uint32 // cold slots that are not in use, which are evicted next
	cold                int    // slots that are
	kept                int    // slots that are retained or pinned
}

// groupsOfTenant is how many groups of a policy each tenant has.
const groupsOfTenant = 3

// groupOf returns a group of a policy: one of those of an order of eviction.
func groupOf(order tenant.ID, kind uint8) uint8 { return uint8(order)*groupsOfTenant + kind }

// orderOf returns the order of eviction that a slot is in.
func (e *Engine) orderOf(r *region, ref uint32) tenant.ID {
	if r.foreign || !e.tenants.shares.On() {
		return tenant.None
	}
	return r.tenants[ref&recordMask]
}

// assign counts a slot that is not free any more as a tenant's.
func (e *Engine) assign(r *region, ref uint32, t tenant.ID) {
	r.tenants[ref&recordMask] = t
	e.tenants.top = max(e.tenants.top, t+1)
	p := &r.class.parts[t]
	if p.held++; p.held == 1 && !e.tenants.shares.Named(t) {
		r.class.unnamed++
	}
	if !r.foreign {
		e.countSlots(t, 1, r.class.slotBytes())
	}
}

// countSlots counts slots of the arena as a tenant's, or with a negative number no longer.
func (e *Engine) countSlots(t tenant.ID, slots int, bytes int64) {
	row := &e.tenants.rows[t]
	was := row.slots
	row.slots += slots
	row.bytes += bytes * int64(slots)
	if reg := e.tenants.registry; reg != nil && (was == 0) != (row.slots == 0) {
		if life := reg.Hold(t, was == 0); life != row.life {
			*row = tenantRow{life: life, slots: row.slots, bytes: row.bytes}
		}
	}
}

// unassign counts a slot that becomes free.
func (e *Engine) unassign(r *region, ref uint32) {
	t := r.tenants[ref&recordMask]
	p := &r.class.parts[t]
	if p.held--; p.held == 0 && !e.tenants.shares.Named(t) {
		r.class.unnamed--
	}
	if !r.foreign {
		e.countSlots(t, -1, r.class.slotBytes())
	}
}

// assignAll counts the slots of a region that are not free, which was empty before.
func (e *Engine) assignAll(r *region) {
	var of [tenant.MaxIDs]int
	for i := range r.slots[:r.fresh] {
		if r.slots[i].state != free {
			of[r.tenants[i]]++
		}
	}
	for i, n := range of {
		if n == 0 {
			continue
		}
		t, p := tenant.ID(i), &r.class.parts[i]
		e.tenants.top = max(e.tenants.top, t+1)
		if p.held == 0 && !e.tenants.shares.Named(t) {
			r.class.unnamed++
		}
		p.held += n
		e.countSlots(t, n, r.class.slotBytes())
	}
}

// row returns the counters of the tenant that has an ID now.
func (e *Engine) row(t tenant.ID) *tenantRow {
	row := &e.tenants.rows[t]
	if reg := e.tenants.registry; reg != nil && row.slots == 0 {
		if life := reg.Life(t); life != row.life {
			*row = tenantRow{life: life}
		}
	}
	return row
}

// usable returns how many slots of a class tenants have quotas of.
func (c *class) usable() (slots int) {
	for _, r := range c.regions {
		if !r.emptying() {
			slots += len(r.slots) - r.spoiled
		}
	}
	return slots
}

// quota returns how many of a class's usable slots are a tenant's own. others is how many tenants
// without a named share divide what the named ones leave.
func (e *Engine) quota(t tenant.ID, usable, others int) int {
	const rounding = 1e-6 // 29 % of 100 are 29
	return int(e.tenants.shares.Part(t, others)*float64(usable) + rounding)
}

// nobody is the tenant that wants a slot where none does.
const nobody tenant.ID = tenant.MaxIDs

// loser returns the tenant that is to lose a slot of a class to tenant who, but for those that were
// tried. It returns false if none may.
//
// For nobody it returns whose slot is likely to be evicted next: the one with the most slots beyond
// its quota, or nearest to it. Slots that are cold already do not count.
func (e *Engine) loser(c *class, who tenant.ID, tried *[tenant.MaxIDs]bool) (t tenant.ID, ok bool) {
	others, most := c.unnamed, 0
	if who != nobody && c.parts[who].held == 0 && !e.tenants.shares.Named(who) {
		others++
	}
	usable := c.usable()
	for i := range c.parts[:e.tenants.top] {
		p, id := &c.parts[i], tenant.ID(i)
		if p.held == 0 || tried[i] {
			continue
		}
		over := p.held - e.quota(id, usable, others)
		switch {
		case who == nobody:
			over -= p.cold
		case id == who:
			over++
		case over <= 0:
			continue
		}
		if !ok || over > most || over == most && id == who {
			t, most, ok = id, over, true
		}
	}
	return t, ok
}

// TenantKey returns what names a tenant on media.
func (e *Engine) TenantKey(t tenant.ID) tenant.Key {
	if reg := e.tenants.registry; reg != nil {
		return reg.Key(t)
	}
	return tenant.Key{}
}

// TenantOf returns the tenant that a medium names: the reverse of TenantKey.
func (e *Engine) TenantOf(key tenant.Key) tenant.ID {
	if reg := e.tenants.registry; reg != nil {
		return reg.FindKey(key)
	}
	return tenant.None
}

// TenantStats is a tenant at one moment.
type TenantStats struct {
	ID         tenant.ID
	Slots      int
	Bytes      int64  // of those
	QuotaBytes int64  // that it keeps however much others store; 0 if the store is not divided
	Evicted    uint64 // chunks of it dropped for room
	ShedPages  uint64 // that it wanted to store, and for which there was no room
}

// Tenants appends what is counted for each tenant of the registry to out.
func (e *Engine) Tenants(out []TenantStats) []TenantStats {
	e.mu.Lock()
	defer e.unlock()
	for i := range e.tenants.rows {
		id := tenant.ID(i)
		row := e.row(id)
		if *row == (tenantRow{life: row.life}) && id != tenant.None &&
			!e.tenants.shares.Named(id) {
			continue
		}
		st := TenantStats{ID: id, Slots: row.slots, Bytes: row.bytes, Evicted: row.evicted,
			ShedPages: row.shed}
		if e.tenants.shares.On() {
			for _, c := range e.classes {
				others := c.unnamed
				if c.parts[i].held == 0 {
					others++
				}
				st.QuotaBytes += int64(e.quota(id, c.usable(), others)) * c.slotBytes()
			}
		}
		out = append(out, st)
	}
	return out
}
