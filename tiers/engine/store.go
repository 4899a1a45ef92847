package engine

import (
	"encoding/binary"
	"fmt"

	"lookaside/tiers"
	"lookaside/tiers/tenant"
	"lookaside/tiers/why"
)

// StoreResult is what PrepareStore found.
type StoreResult struct {
	Store uint64 // handle for CommitStore or AbortStore; 0: nothing was granted
	Held  int    // pages that are held already
	Shed  int    // pages for which there is no room
	// Deferred counts pages that are to be stored from a later use on. Every page asked for is
	// held, shed, deferred or granted.
	Deferred int
}

// PrepareStore finds which of the pages from firstPage on are not held, and appends grants for them
// to out, one a chunk. firstPage is the first of a chunk; hashes are the digests of the pages; prev
// is the digest of the page before, empty if there is none. Granted pages stay invisible until
// CommitStore.
//
// A partly filled last chunk is extended in place unless another store extends it. Then and with
// Config.NoExtend, the grant is the whole chunk from its first page on. ErrBusy: the owner has too
// many stores.
func (e *Engine) PrepareStore(o Owner, firstPage int, prev, hashes []byte,
	out []Grant) (StoreResult, []Grant, error) {
	return e.PrepareStoring(o, firstPage, prev, hashes, Storing{}, out)
}

// Share is one of the parts into which owners that hold the same pages divide their stores: the
// chunks whose number in the prefix leaves Index when divided by Of. With Of 0 or 1 it is all
// chunks.
type Share struct{ Of, Index int }

func (p Share) has(chunk int) bool { return p.Of <= 1 || chunk%p.Of == p.Index }

// Storing is what a store wants beside its pages.
type Storing struct {
	Share
	Tenant  tenant.ID // whose chunks they are
	Hints             // how they are kept, and those that are held already
	FromUse int       // store each chunk when it is wanted for this number of times; 0 and 1: at once
}

// PrepareStoring is PrepareStore as how has it. The result has nothing of the chunks that are not
// in how.Share; they may become visible before or after.
func (e *Engine) PrepareStoring(o Owner, firstPage int, prev, hashes []byte, how Storing,
	out []Grant) (StoreResult, []Grant, error) {
	e.mu.Lock()
	defer e.unlock()
	ow, err := e.owner(o)
	if err != nil {
		return StoreResult{}, out, err
	}
	w, err := e.walk(ow.space.g, firstPage, hashes)
	if err != nil {
		return StoreResult{}, out, err
	}
	if firstPage%w.ppc != 0 || len(prev) != w.digest && firstPage != 0 ||
		len(prev) != 0 && firstPage == 0 {
		return StoreResult{}, out, invalid("store from page %d with %d bytes of the page before: "+
			"want a multiple of %d with a digest of %d, or page 0 without", firstPage, len(prev),
			w.ppc, w.digest)
	}
	if ow.stores >= e.cfg.MaxLookupsPerOwner {
		return StoreResult{}, out, fmt.Errorf("%w: owner %d has %d stores", tiers.ErrBusy, o,
			ow.stores)
	}
	e.unfreeze(ow)
	e.idx.migrate(migrateStep)
	refs := e.scratch.refs[:w.chunks]
	if err := e.probeWithRoom(ow, &w, refs, nil, nil); err != nil {
		return StoreResult{}, out, err
	}
	e.tick++
	p := storer{e: e, ow: ow, w: w, how: how, granted: e.scratch.held[:0], out: out}
	if firstPage > 0 {
		if rec := e.find(ow.space, prev); rec != 0 && e.at(rec, firstPage-1) {
			p.parent, _ = e.slotOf(rec)
		}
	}
	p.reserve(refs)
	p.end(prev)
	return p.res, p.out, nil
}

// storer is one call of PrepareStoring. It has the walk and not a pointer to it, as that would move
// the walk to the heap.
type storer struct {
	e   *Engine
	ow  *owner
	w   walk
	how Storing

	parent  uint32 // the slot of the chunk before the next one, if it is ready
	granted []uint32
	out     []Grant
	res     StoreResult
}

// reserve finds a slot for each chunk, given the records of their last pages as probed before, and
// counts from the first on that has no room as shed.
func (p *storer) reserve(refs []uint32) {
	for i, rec := range refs {
		if p.held(i, rec) {
			continue
		}
		mine := p.how.has(p.w.chunk + i)
		if mine && p.how.FromUse > 1 && !p.due(i) {
			p.postpone(i, refs)
			return
		}
		if mine && !p.grant(i) {
			p.shed(i)
			return
		}
		p.parent = 0
	}
}

// held uses chunk i if it is held, and reports whether it is.
func (p *storer) held(i int, rec uint32) bool {
	e, w := p.e, &p.w
	last := w.last(i)
	// Room made for an earlier chunk may have cost this one.
	if rec == 0 || !e.holds(p.ow.space, rec, last, w.hash(last)) {
		return false
	}
	ref, _ := e.slotOf(rec)
	if p.parent != 0 && e.orphan(ref) {
		e.adopt(p.parent, ref)
	}
	e.touch(ref)
	e.follow(ref, p.how.Tenant, &p.how.Hints)
	p.parent = ref
	if p.how.has(w.chunk + i) {
		p.res.Held += last - w.start(i) + 1
	}
	return true
}

// grant grants room for chunk i: what is missing of a slot that has its beginning, or a slot. It
// reports whether there is any.
func (p *storer) grant(i int) bool {
	e, w := p.e, &p.w
	if p.ow.leases+len(p.granted) >= e.cfg.MaxLeasesPerOwner {
		return false
	}
	if p.extend(i) {
		return true
	}
	start := w.start(i)
	pages := w.last(i) - start + 1
	ref := e.grant(p.ow, p.how.Tenant, p.parent, w.chunk+i, pages)
	if ref == 0 {
		e.stats.Limited++
		return false
	}
	p.add(ref, start, 0, pages)
	return true
}

// extend grants what is missing of chunk i, if a slot that has its beginning may be extended. It
// reports whether one may be.
func (p *storer) extend(i int) bool {
	e, w := p.e, &p.w
	rec, page := e.extendable(p.ow.space, w, i)
	if rec == 0 {
		return false
	}
	start := w.start(i)
	have := page - start + 1
	ref, _ := e.slotOf(rec)
	r, s := e.slot(ref)
	if int(s.pages) != have || s.granted != 0 || s.flags&(moving|pending) != 0 || r.draining ||
		!p.ow.slots.add(ref, p.ow.space.class.limit) {
		return false
	}
	e.hold(ref)
	if s.idle() {
		r.lease()
	}
	pages := w.last(i) - start + 1
	s.granted = uint16(pages - have)
	s.stamp, r.lastUse = e.tick, e.tick
	p.add(ref, start, have, pages)
	p.res.Held += have
	return true
}

// add notes that pages [from, to) of a slot, whose first page is start, must be written.
func (p *storer) add(ref uint32, start, from, to int) {
	r, _ := p.e.slot(ref)
	p.e.write(ref, &p.w, start, from, to)
	p.granted = append(p.granted, ref)
	p.out = append(p.out, Grant{Page: uint32(start + from), Pages: uint32(to - from),
		Region: r.id, Offset: r.offset(ref, from)})
}

// due counts a use of chunk i, and reports whether it is one to store the chunk.
func (p *storer) due(i int) bool {
	hash := p.ow.space.hash(p.w.hash(p.w.last(i)))
	return int(p.e.hints.uses.add(hash)) >= p.how.FromUse
}

// postpone counts the pages of the share from chunk i on that are not held as deferred, and a use
// of each of the chunks after it. What follows chunk i is of no use without it.
func (p *storer) postpone(i int, refs []uint32) {
	for first := i; i < p.w.chunks; i++ {
		if i > first && p.held(i, refs[i]) {
			continue
		}
		p.parent = 0
		if !p.how.has(p.w.chunk + i) {
			continue
		}
		if i > first {
			p.due(i)
		}
		p.res.Deferred += p.w.last(i) - p.w.start(i) + 1
	}
}

// shed counts the pages of the share from chunk i on for which there is no room.
func (p *storer) shed(i int) {
	p.e.noteShed(p.ow.space, &p.w, i, why.By{Space: p.ow.space.mark, Tenant: p.how.Tenant,
		Tier: p.e.cfg.GoneTier})
	for ; i < p.w.chunks; i++ {
		if p.how.has(p.w.chunk + i) {
			p.res.Shed += p.w.last(i) - p.w.start(i) + 1
		}
	}
}

// end makes the store, if anything was granted.
func (p *storer) end(prev []byte) {
	e, w := p.e, &p.w
	p.ow.space.class.work(len(p.granted))
	e.stats.Stores++
	e.stats.HeldPages += uint64(p.res.Held)
	e.stats.ShedPages += uint64(p.res.Shed)
	e.stats.DeferredPages += uint64(p.res.Deferred)
	if p.res.Shed > 0 {
		e.row(p.how.Tenant).shed += uint64(p.res.Shed)
	}
	if len(p.granted) == 0 {
		return
	}
	x := e.leases.add(storeLease, p.ow, p.granted)
	p.ow.stores++
	x.first, x.n = w.first, w.n
	x.store.hasPrev = w.first > 0
	x.store.hints = p.how.Hints
	copy(x.store.prev[:], prev)
	if p.how.Of > 1 {
		x.store.around = e.around(w, prev, p.granted)
	}
	p.res.Store = x.handle()
}

// extendable is the last held page of a walk's chunk, if the slot that has it may be extended; the
// record is 0 otherwise.
func (e *Engine) extendable(sp *space, w *walk, i int) (record uint32, page int) {
	if e.cfg.NoExtend {
		return 0, 0
	}
	return e.bisect(sp, w, i)
}

// around is what a lease keeps of the pages around the slots that it was granted.
func (e *Engine) around(w *walk, prev []byte, granted []uint32) []byte {
	b := make([]byte, len(granted)*2*w.digest)
	for i, ref := range granted {
		_, s := e.slot(ref)
		before, after := b[2*i*w.digest:][:w.digest], b[(2*i+1)*w.digest:][:w.digest]
		if page := int(s.chunk)*w.ppc - 1; page >= w.first {
			copy(before, w.hash(page))
		} else {
			copy(before, prev)
		}
		if page := (int(s.chunk) + 1) * w.ppc; page < w.end() {
			copy(after, w.hash(page))
		}
	}
	return b
}

// probeWithRoom finds which chunks of a walk are held, as probe does, and carves regions while
// fewer slots are free than chunks are missing. have, if given, is what tiers have: chunks from the
// first with 0 on do not count as missing. Nor do lent chunks. It may release the lock, and returns
// ErrNotFound if the owner has left meanwhile.
func (e *Engine) probeWithRoom(ow *owner, w *walk, refs []uint32, have []uint16,
	lent []bool) error {
	c := ow.space.class
	for attempt := 0; ; attempt++ {
		missing := 0
		for i := 0; i < w.chunks; i += probeGroup {
			e.probe(ow.space, w, i, min(probeGroup, w.chunks-i), refs[i:])
		}
		for i, ref := range refs {
			if ref == 0 {
				if have != nil && have[i] == 0 {
					break
				}
				if lent == nil || !lent[i] {
					missing++
				}
			}
		}
		if missing <= c.free || attempt > maxRegions {
			return nil
		}
		ok, unlocked := e.makeRoom(c)
		if !unlocked {
			return nil
		}
		if now, err := e.owner(ow.id); err != nil || now != ow {
			return fmt.Errorf("%w: owner %d has left", tiers.ErrNotFound, ow.id)
		}
		if !ok {
			attempt = maxRegions
		}
	}
}

// holds reports whether a record that was probed before still is a committed page of its prefix.
func (e *Engine) holds(s *space, rec uint32, page int, d []byte) bool {
	ref, pos := e.slotOf(rec)
	_, sl := e.slot(ref)
	return sl.state == ready && pos < int(sl.pages) && e.at(rec, page) && e.same(s, rec, d)
}

// grant takes a slot for a chunk of a tenant to fill, as a continuation of parent if that is held.
// It returns 0 if there is no room, or if the owner has its share.
func (e *Engine) grant(ow *owner, who tenant.ID, parent uint32, chunk, pages int) uint32 {
	if c := ow.space.class; ow.slots.n >= c.limit || c.busy >= c.most {
		return 0
	}
	ref := e.allocAfter(ow.space, who, parent, chunk, pages)
	if ref != 0 {
		ow.slots.add(ref, ow.space.class.limit)
	}
	return ref
}

// allocAfter takes a slot for a chunk of a tenant, as a continuation of parent if that is held. 0:
// there is no room.
func (e *Engine) allocAfter(sp *space, who tenant.ID, parent uint32, chunk, pages int) uint32 {
	if parent != 0 {
		// It must not make room for its own continuation.
		_, p := e.slot(parent)
		if p.children == 0 {
			e.hold(parent)
		}
		p.children++
	}
	ref := e.alloc(sp, who, chunk, pages)
	if parent != 0 {
		_, p := e.slot(parent)
		p.children--
		if ref != 0 {
			e.hang(parent, ref)
		} else if p.children == 0 && p.state == ready && p.idle() {
			e.offer(parent)
		}
	}
	return ref
}

// write notes the digests of pages [from, to) of a slot whose first page is start.
func (e *Engine) write(ref uint32, w *walk, start, from, to int) {
	r, _ := e.slot(ref)
	if to == r.ppc && from < to {
		to--
		r.setDigest(ref&recordMask, to, w.hash(start+to))
	}
	at := (start + from - w.first) * w.digest
	// one after another
	words := r.digests[(int(ref&recordMask)*(r.ppc-1)+from)*r.words:][:(to-from)*r.words]
	d := w.hashes[at:][:8*len(words)]
	for ; len(words) >= 4; words, d = words[4:], d[32:] {
		to, from := words[:4:4], d[:32:32]
		to[0] = binary.LittleEndian.Uint64(from)
		to[1] = binary.LittleEndian.Uint64(from[8:])
		to[2] = binary.LittleEndian.Uint64(from[16:])
		to[3] = binary.LittleEndian.Uint64(from[24:])
	}
	for i := range words {
		words[i] = binary.LittleEndian.Uint64(d[8*i:])
	}
}

// CommitStore makes what a store was granted visible. failed names grants, by their place among
// those that PrepareStore appended, that were not written: these become free. ErrStale: the store
// has ended before; ErrInvalid, with nothing changed: failed names a grant that is not there.
func (e *Engine) CommitStore(o Owner, store uint64, failed []uint32) error {
	e.mu.Lock()
	defer e.unlock()
	ow, err := e.owner(o)
	if err != nil {
		return err
	}
	x, err := e.leases.find(ow, storeLease, store)
	if err != nil {
		return err
	}
	for _, i := range failed {
		if int64(i) >= int64(len(x.slots)) {
			return invalid("grant %d of a store of %d", i, len(x.slots))
		}
	}
	e.idx.migrate(migrateStep)
	e.tick++
	marks := e.scratch.marks[:len(x.slots)/64+1]
	clear(marks)
	for _, i := range failed {
		marks[i/64] |= 1 << (i % 64)
	}
	for i := range x.slots {
		e.finishGrant(x, i, marks[i/64]>>(i%64)&1 == 0)
	}
	e.forget(x)
	return nil
}

// AbortStore gives back what a store was granted. ErrStale: the store has ended before.
func (e *Engine) AbortStore(o Owner, store uint64) error {
	e.mu.Lock()
	defer e.unlock()
	ow, err := e.owner(o)
	if err != nil {
		return err
	}
	x, err := e.leases.find(ow, storeLease, store)
	if err != nil {
		return err
	}
	e.endLease(x)
	return nil
}

// finishGrant ends the filling of a store's slot i; ok reports whether its bytes are there. Grants
// must be finished in their order.
func (e *Engine) finishGrant(x *lease, i int, ok bool) {
	ref := x.slots[i]
	x.owner.slots.sub(ref)
	x.owner.leases--
	r, s := e.slot(ref)
	sp := x.owner.space
	if s.state == ready {
		e.finishExtension(ref, ok, &x.store.hints)
		return
	}
	if !ok || s.doomed() {
		if !ok {
			e.noteUnfilled(r, ref, 0, int(s.granted))
		}
		e.release(ref)
		return
	}
	pages := int(s.granted)
	var buf [32]byte
	if rec := e.find(sp, r.digestBytes(ref&recordMask, pages-1, &buf)); rec != 0 {
		e.stats.Duplicates++ // another store was first: the slot adds nothing
		e.release(ref)
		return
	}
	var before []byte
	if s.chunk > 0 && e.orphan(ref) {
		before = e.before(x, i, &buf)
	}
	if !e.publish(ref, before) {
		return
	}
	e.adoptNext(x, i, ref)
	e.stats.StoredPages += uint64(pages)
	e.admit(ref, e.cascades.stored)
	e.follow(ref, r.tenants[ref&recordMask], &x.store.hints)
	e.settle(ref)
}

// publish makes a slot ready that was filled with pages of which the last is not held. before is
// the digest of the page before, if it is known; it does not matter if the slot has a parent. It
// returns false, with the slot free again, if one of the pages is held as another page of its
// prefix.
func (e *Engine) publish(ref uint32, before []byte) bool {
	r, s := e.slot(ref)
	pages := int(s.granted)
	s.state, s.granted = ready, 0
	r.filled()
	orphan := s.chunk > 0 && e.orphan(ref)
	if orphan && e.journal.on {
		e.noteBefore(ref, before)
	}
	entered := e.enter(ref, 0, pages)
	e.journal.hasBefore = false
	if !entered {
		e.disown(ref)
		e.release(ref)
		return false
	}
	if orphan {
		if rec := e.find(e.spaces[s.space], before); rec != 0 && e.at(rec, int(s.chunk)*r.ppc-1) {
			parent, _ := e.slotOf(rec)
			e.adopt(parent, ref)
		}
	}
	e.register(ref)
	e.came(ref)
	return true
}

// before returns the digest of the page before grant i, if the store knows it, and otherwise a
// digest of no page.
func (e *Engine) before(x *lease, i int, buf *[32]byte) []byte {
	d := x.owner.space.g.DigestBytes
	if x.store.around != nil {
		return x.store.around[2*i*d:][:d]
	}
	_, s := e.slot(x.slots[i])
	if i > 0 {
		// The chunk before may have been a duplicate: its slot is free by now, but not in use
		// again.
		ref := x.slots[i-1]
		r, p := e.slot(ref)
		if p.state == free || p.chunk+1 == s.chunk {
			return r.digestBytes(ref&recordMask, r.ppc-1, buf)
		}
	}
	if x.store.hasPrev && int(s.chunk)*x.owner.space.g.PagesPerChunk == x.first {
		return x.store.prev[:d]
	}
	clear(buf[:])
	return buf[:d]
}

// adoptNext makes the slot of grant i, which has just become ready, the parent of the chunk that
// continues it, where another owner's store of that was faster.
func (e *Engine) adoptNext(x *lease, i int, ref uint32) {
	if x.store.around == nil {
		return
	}
	d := x.owner.space.g.DigestBytes
	r, s := e.slot(ref)
	rec := e.find(x.owner.space, x.store.around[(2*i+1)*d:][:d])
	if rec == 0 || int(s.pages) < r.ppc || !e.at(rec, (int(s.chunk)+1)*r.ppc) {
		return
	}
	if next, _ := e.slotOf(rec); e.orphan(next) {
		e.adopt(ref, next)
	}
}

// finishExtension ends the extension of a ready slot.
func (e *Engine) finishExtension(ref uint32, ok bool, h *Hints) {
	r, s := e.slot(ref)
	from, to := int(s.pages), int(s.pages)+int(s.granted)
	s.granted = 0
	var buf [32]byte
	last := r.digestBytes(ref&recordMask, to-1, &buf)
	// If another store was first with the last page, this slot stays the shorter version.
	if ok && !s.doomed() && e.find(e.spaces[s.space], last) == 0 && e.enter(ref, from, to) {
		e.stats.StoredPages += uint64(to - from)
		e.stats.Extended++
		s.stamp, r.lastUse = e.tick, e.tick
		r.class.policy.Use(ref)
		e.grown(ref)
		e.came(ref)
		e.follow(ref, r.tenants[ref&recordMask], h)
	} else if !ok {
		e.noteUnfilled(r, ref, from, to)
	}
	if s.idle() {
		r.unlease()
		e.settle(ref)
	}
}
