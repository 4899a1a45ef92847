package engine

// Prefixes: which slot continues which. A held slot knows its parent, the slot of the chunk before,
// if that was held when the slot came, and the first of its own continuations.

// kin links a slot to its parent (the chunk before it) and to its children (the chunks that
// continue it).
type kin struct {
	parent    uint32 // the slot of the chunk before, if it was held when this one came
	parentGen uint32 // generation of parent; another one there now means that the parent is gone
	// of a held slot with a parent: the next one with that parent, by ref; of a free slot: the next
	// free one plus one
	next  uint32
	prev  uint32 // of a held slot with a parent: the one before
	child uint32 // the first slot whose parent this is
}

func (a *arena) kin(ref uint32) *kin {
	return &a.regions[ref>>recordBits].kin[ref&recordMask]
}

// adopt makes parent the parent of a held slot that has none.
func (e *Engine) adopt(parent, child uint32) {
	if _, p := e.slot(parent); p.children == 0 {
		e.hold(parent)
	}
	e.hang(parent, child)
	e.offerEnd(parent) // the child may be cold
}

// offerEnd offers a slot if nothing but cold slots continues it and it is not in use.
func (e *Engine) offerEnd(ref uint32) {
	_, s := e.slot(ref)
	if s.children == 0 && s.state == ready && !s.doomed() && s.idle() {
		e.offer(ref)
	}
}

// hang puts a slot without a parent among the continuations of parent.
func (a *arena) hang(parent, child uint32) {
	_, p := a.slot(parent)
	_, s := a.slot(child)
	k, c := a.kin(parent), a.kin(child)
	*c = kin{parent: parent, parentGen: p.gen, next: k.child, child: c.child}
	if k.child != 0 {
		a.kin(k.child).prev = child
	}
	k.child = child
	if s.flags&cold == 0 {
		p.children++
	}
}

// unhang removes child from its parent's continuations. A slot that has been orphaned is in no such
// list: the slots that were its siblings may hold other chunks by now.
func (a *arena) unhang(child uint32) {
	c := a.kin(child)
	_, p := a.slot(c.parent)
	if _, s := a.slot(child); s.flags&cold == 0 {
		p.children--
	}
	if c.prev != 0 {
		a.kin(c.prev).next = c.next
	} else {
		a.kin(c.parent).child = c.next
	}
	if c.next != 0 {
		a.kin(c.next).prev = c.prev
	}
	*c = kin{child: c.child}
}

// bequeath hands the continuations of a slot to another slot that holds the same chunk. Beyond
// clearSlice of them they are left without a parent.
func (e *Engine) bequeath(ref uint32) {
	k := e.kin(ref)
	if k.child == 0 {
		return
	}
	heir := e.heir(ref)
	if _, h := e.slot(heir); h.children == 0 {
		e.hold(heir)
	}
	for n := 0; k.child != 0 && n < clearSlice; n++ {
		child := k.child
		e.unhang(child)
		e.hang(heir, child)
	}
	e.offerEnd(heir) // all of them may be cold
}

// superfluous reports whether a ready slot adds nothing to what others hold: it is the shorter
// version of another, or another has taken its place.
func (a *arena) superfluous(r *region, s *slot, ref uint32) bool {
	return (int(s.pages) < r.ppc || s.flags&(twin|moved) != 0) && a.redundant(ref)
}

// redundant reports whether another slot holds all that this one holds, and stays.
func (a *arena) redundant(ref uint32) bool { return a.heir(ref) != 0 }

// heir returns a slot that holds all that this one holds, and stays; 0: there is none. It holds the
// last page, as a page's digest names the whole prefix. Among the slots that share that page it
// looks beyond the neighbours only where these have been moved away.
func (a *arena) heir(ref uint32) uint32 {
	r, s := a.slot(ref)
	l := r.links[int(ref&recordMask)*r.ppc+int(s.pages)-1]
	for rec := l.prev; rec != 0; rec = a.links(rec).prev {
		if other, _ := a.slotOf(rec); a.stays(other) {
			return other
		}
	}
	for rec := l.next; rec != 0; rec = a.links(rec).next {
		if other, _ := a.slotOf(rec); a.stays(other) {
			return other
		}
	}
	return 0
}

func (a *arena) stays(ref uint32) bool {
	_, s := a.slot(ref)
	return s.flags&moved == 0
}

// orphan reports whether a held slot has no parent, or none any more.
func (a *arena) orphan(ref uint32) bool {
	k := a.kin(ref)
	if k.parent == 0 {
		return true
	}
	r, i := a.regions[k.parent>>recordBits], int(k.parent&recordMask)
	return i >= r.fresh || r.slots[i].gen != k.parentGen // the region may have been carved anew
}

// heldParent returns a slot's parent if that can be found, else 0.
func (a *arena) heldParent(ref uint32) uint32 {
	if a.orphan(ref) {
		return 0
	}
	parent := a.kin(ref).parent
	if _, p := a.slot(parent); p.state != ready || p.doomed() {
		return 0
	}
	return parent
}

// disown removes a slot from its parent's continuations, if it has a parent.
func (e *Engine) disown(ref uint32) {
	if e.orphan(ref) {
		e.kin(ref).parent = 0
		return
	}
	parent := e.kin(ref).parent
	_, s := e.slot(ref)
	_, p := e.slot(parent)
	e.unhang(ref)
	p.stamp = max(p.stamp, s.stamp)
	e.offerEnd(parent)
}

// parentOf returns the slot that holds the page before a slot's first. prev begins with that page's
// digest. 0: none does.
func (e *Engine) parentOf(s *slot, prev []byte) uint32 {
	sp := e.spaces[s.space]
	rec, _ := e.seek(sp, prev[:sp.g.DigestBytes])
	if rec == 0 || !e.at(rec, int(s.chunk)*sp.g.PagesPerChunk-1) {
		return 0
	}
	ref, _ := e.slotOf(rec)
	return ref
}

// digests appends to buf the digest of the page before a slot's first, if the slot's parent is
// held, and the digests of its pages.
func (a *arena) digests(ref uint32, buf []byte) (prev, hashes, _ []byte) {
	r, s := a.slot(ref)
	var d [32]byte
	from := len(buf)
	if !a.orphan(ref) {
		k := a.kin(ref)
		buf = append(buf, a.regions[k.parent>>recordBits].digestBytes(k.parent&recordMask, r.ppc-1,
			&d)...)
	}
	mid := len(buf)
	for pos := range int(s.pages) {
		buf = append(buf, r.digestBytes(ref&recordMask, pos, &d)...)
	}
	return buf[from:mid:mid], buf[mid:len(buf):len(buf)], buf
}
