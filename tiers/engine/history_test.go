package engine

import (
	"bytes"
	"errors"
	"fmt"
	"slices"

	"lookaside/tiers"
	"lookaside/tiers/policy"
)

// The part of the random histories that is about promotions and cascades.

// note remembers what comes before a page.
func (w *world) note(p prefix, page, size int) {
	d := string(p.digests(page, page+1, size))
	w.place[d] = page
	if page > 0 {
		w.chain[d] = string(p.digests(page-1, page, size))
	}
}

// promote looks a prefix up if it must, and lets the lookup go on with what the tiers have.
func (w *world) promote(s *modelSession) {
	id, l, ok := pick(w, s.lookups)
	g := s.space.g
	ppc, size := g.PagesPerChunk, g.DigestBytes
	if !ok || w.chance(2) {
		p := w.prefix()
		id = uint64(w.rng.IntN(8))
		delete(s.lookups, id)
		pages, err := w.e.Lookup(s.owner, id, 0, p.digests(0, len(p), size))
		if errors.Is(err, tiers.ErrBusy) {
			return
		}
		w.check(err)
		l = &modelLookup{p: p, n: pages, deadline: w.now + w.deadline}
		if pages > 0 {
			s.lookups[id] = l
		}
	}
	if len(l.waits) > 0 && l.end%ppc != 0 {
		return
	}
	first := max(l.first+l.n, l.end) / ppc * ppc
	if first >= len(l.p) {
		return
	}
	have := make([]uint16, (len(l.p)-first+ppc-1)/ppc)
	tier := w.rng.IntN(len(s.space.tiers))
	for page := range w.rng.IntN(len(l.p) + 1) { // another owner has stored this
		s.space.tiers[tier][string(l.p.digests(page, page+1, size))] = true
	}
	for i := range have {
		for pos := range min(ppc, len(l.p)-first-i*ppc) {
			page := first + i*ppc + pos
			if s.space.tiers[tier][string(l.p.digests(page, page+1, size))] {
				have[i] = uint16(pos + 1)
			}
		}
	}
	var prev []byte
	if first > 0 && !w.chance(4) {
		prev = l.p.digests(first-1, first, size)
	}
	lent := w.peers.offer(l.p, first, ppc, have)
	if w.chance(20) {
		if _, err := w.e.PreparePromotion(s.owner, id, PromotionRun{
			FirstPage: first + ppc,
		}, nil); len(l.waits) > 0 && !errors.Is(err, tiers.ErrStale) &&
			!errors.Is(err, tiers.ErrBusy) {
			w.fatal("a promotion that leaves a gap: %v", err)
		}
	}
	who := w.tenant()
	var out []PromotedChunk
	var err error
	w.fairly(s.space, who, func() {
		out, err = w.e.PreparePromotion(s.owner, id, PromotionRun{
			FirstPage: first, Prev: prev, Hashes: l.p.digests(first, len(l.p), size), Have: have,
			Lent: lent, Tenant: who,
		}, nil)
	})
	if errors.Is(err, tiers.ErrBusy) {
		return
	}
	w.check(err)
	if len(out) == 0 {
		return
	}
	if len(l.waits) == 0 {
		l.clears = s.space.clears
	}
	if s.lookups[id] == nil {
		l.first, s.lookups[id] = first, l
	}
	for i, c := range out {
		start := first + i*ppc
		if c.Chunk != i || c.Pages < 1 || c.Pages > min(ppc, len(l.p)-start) ||
			c.Pages < ppc && i != len(out)-1 {
			w.fatal("%+v is promoted of %v from page %d with %v", out, l.p, first, have)
		}
		l.end = start + c.Pages
		f := w.flights[c.Promotion]
		switch c.State {
		case PromotionReady:
			if c.Promotion != 0 || !s.space.committed[string(l.p.digests(l.end-1, l.end, size))] {
				w.fatal("%+v is ready of %v from page %d", c, l.p, first)
			}
			f = nil
		case PromotionJoined:
			if f == nil || f.ex.Region != c.Region || f.ex.Offset != c.Offset ||
				int(f.ex.Pages) != c.Pages || f.clears != s.space.clears || f.space != s.space {
				w.fatal("%+v of %v from page %d joins %+v", c, l.p, first, f)
			}
		case PromotionGranted:
			if f != nil || c.Pages != int(have[i]) || !c.Foreign && w.drained[c.Region] {
				w.fatal("%+v of %v from page %d, of which %v can be had, is granted beside %+v", c,
					l.p, first, have, f)
			}
			if c.Foreign != (lent != nil && lent[i]) ||
				c.Foreign && c.Region|uint32(c.Offset) != 0 {
				w.fatal("%+v of %v from page %d with %v is granted as foreign: %v", c, l.p, first,
					lent, c.Foreign)
			}
			f = &modelFlight{space: s.space, p: l.p, lent: c.Foreign,
				ex: Extent{Page: uint32(start), Pages: uint32(c.Pages), Region: c.Region,
					Offset: c.Offset}, clears: s.space.clears}
			w.flights[c.Promotion] = f
			for j := 0; j < c.Pages && !c.Foreign; j++ {
				for k, page := 0, w.page(s.space, f.ex, j); k < len(page); k++ {
					page[k] = 0xEE // half-written
				}
			}
		}
		l.waits = append(l.waits, f)
	}
}

func (w *world) finishPromotion() {
	h, f, ok := pick(w, w.flights)
	if !ok {
		return
	}
	wanted := w.e.PromotionWanted(h)
	waiting := false
	for _, s := range w.sessions {
		for _, l := range s.lookups {
			waiting = waiting || slices.Contains(l.waits, f)
		}
	}
	if wanted && (!waiting || f.clears != f.space.clears) ||
		!wanted && waiting && f.clears == f.space.clears && !w.bad {
		w.fatal("promotion %#x of %+v is wanted: %v", h, f, wanted)
	}
	f.ended, f.ok = true, !w.chance(6)
	f.got = int(f.ex.Pages)
	g := f.space.g
	if f.ok && f.lent {
		w.borrow(h, f)
		return
	}
	if f.ok {
		for j := range int(f.ex.Pages) {
			p := int(f.ex.Page) + j
			d := f.p.digests(p, p+1, g.DigestBytes)
			pattern(w.page(f.space, f.ex, j), f.space.fp, d)
			w.note(f.p, p, g.DigestBytes)
			if f.clears == f.space.clears {
				f.space.committed[string(d)], f.space.own[string(d)] = true, true
			}
		}
	}
	if f.lent {
		if err := w.e.FinishPromotion(h, true, -1); !errors.Is(err, tiers.ErrInvalid) {
			w.fatal("a borrowed chunk is said to have been loaded: %v", err)
		}
	}
	w.check(w.e.FinishPromotion(h, f.ok, w.rng.IntN(5)-1))
	if err := w.e.FinishPromotion(h, true, 0); !errors.Is(err, tiers.ErrStale) &&
		!errors.Is(err, tiers.ErrNotFound) {
		w.fatal("a promotion ends twice: %v", err)
	}
	delete(w.flights, h)
}

func (w *world) settle(s *modelSession) {
	id, l, ok := pick(w, s.lookups)
	if !ok {
		return
	}
	ppc := s.space.g.PagesPerChunk
	want := l.n
	for i, f := range l.waits {
		if f != nil && !f.ok {
			break
		}
		last := min(l.end, ((l.first+l.n)/ppc+i+1)*ppc) - l.first
		if f != nil && f.got < int(f.ex.Pages) { // a peer had less of it
			want = max(want, int(f.ex.Page)+f.got-l.first)
			break
		}
		want = last
	}
	pages := want
	if w.chance(3) {
		pages = w.rng.IntN(want + 2)
	}
	n, err := w.e.SettleLookup(s.owner, id, pages)
	w.check(err)
	exact := !w.bad && (s.space.clears == 0 || len(l.waits) > 0 && l.clears == s.space.clears &&
		l.n == 0)
	if want = min(want, pages); n > want || exact && n < want {
		w.fatal("a lookup of %v from page %d with %d pages that waited for %d more chunks settles with %d pages, want %d", l.p, l.first, l.n, len(l.waits), n, want)
	}
	for i := l.first; i < l.first+n; i++ {
		if !s.space.committed[string(l.p.digests(i, i+1, s.space.g.DigestBytes))] {
			w.fatal("FALSE HIT: page %d of %v was never committed", i, l.p)
		}
	}
	l.n, l.waits, l.end, l.deadline = n, nil, 0, w.now+w.deadline
	if n == 0 {
		delete(s.lookups, id)
	}
}

// cascade begins to write what is queued for a tier.
func (w *world) cascade() {
	if len(w.tiers) == 0 {
		return
	}
	tier, most := w.rng.IntN(len(w.tiers)), 1+w.rng.IntN(4)
	w.awake[tier] = false
	items, _ := w.e.NextCascades(tier, most, nil, nil)
	if len(items) == most {
		w.awake[tier] = true
	}
	if len(items) > most || len(items) > 0 && w.tiers[tier].Admit == AdmitNever {
		w.fatal("%d items for tier %d", len(items), tier)
	}
	if queued, _ := w.e.CascadeQueue(tier); queued > 0 && w.tiers[tier].Queue > 0 &&
		queued > w.tiers[tier].Queue {
		w.fatal("%d chunks are queued for tier %d", queued, tier)
	}
	for _, item := range items {
		c := &modelCascade{tier: tier, item: item}
		for _, s := range w.spaces {
			if s.id == item.Space {
				c.space = s
			}
		}
		if item.Region >= peerRegions {
			w.fatal("%+v is a peer's", item)
		}
		for _, other := range w.cascades {
			if other.tier == tier && other.item.Region == item.Region &&
				other.item.Offset == item.Offset {
				w.fatal("%+v is written to tier %d twice at once", item, tier)
			}
		}
		w.verifyItem(c)
		w.cascades[item.Handle] = c
		w.cascaded++
	}
}

// verifyCascade compares a chunk that is being written with the pages that it should have.
func (w *world) verifyCascade(c *modelCascade) {
	size := c.space.g.DigestBytes
	want := make([]byte, c.space.g.PageBytes)
	prev := string(c.item.Prev)
	if len(c.item.Hashes) != c.item.Pages*size || c.item.Pages < 1 ||
		c.item.Pages > c.space.g.PagesPerChunk {
		w.fatal("%+v", c.item)
	}
	for i := range c.item.Pages {
		d := string(c.item.Hashes[i*size : (i+1)*size])
		place, known := w.place[d]
		if !known || place != c.item.First+i || prev != "" && w.chain[d] != prev ||
			i == 0 && place == 0 && prev != "" {
			w.fatal("page %d of %+v has digest %x after %x, which is that of page %d after %x", i,
				c.item, d, prev, place, w.chain[d])
		}
		pattern(want, c.space.fp, []byte(d))
		if !bytes.Equal(w.page(c.space, Extent{Region: c.item.Region, Offset: c.item.Offset}, i),
			want) {
			w.fatal("page %d of %+v has the wrong bytes", i, c.item)
		}
		prev = d
	}
}

func (w *world) endCascade() {
	h, c, ok := pick(w, w.cascades)
	if !ok {
		return
	}
	good := w.verifyItem(c)
	written := good && !w.chance(5)
	dropped := w.e.EndCascade(h, written)
	if !good && !dropped {
		w.fatal("%+v was found bad, and is not dropped", c.item)
	}
	delete(w.cascades, h)
	if w.e.EndCascade(h, true) {
		w.fatal("a cascade ends twice")
	}
	size := c.space.g.DigestBytes
	if dropped {
		w.droppedCascades++
	} else if written {
		for i := range c.item.Pages {
			c.space.tiers[c.tier][string(c.item.Hashes[i*size:(i+1)*size])] = true
		}
	}
}

// drop drops some pages; nothing of them is held then.
func (w *world) drop() {
	s, p := w.spaces[w.rng.IntN(len(w.spaces))], w.prefix()
	first := w.rng.IntN(len(p))
	h := p.digests(first, len(p), s.g.DigestBytes)
	_, err := w.e.Drop(s.id, first, h)
	w.check(err)
	w.bad = true
	held := make([]uint16, len(p)/s.g.PagesPerChunk+1)
	w.check(w.e.Contains(s.id, first, h, held))
	for _, n := range held {
		if n != 0 {
			w.fatal("after a drop of %v from page %d there is %v", p, first, held)
		}
	}
}

// strict is a policy that holds its owner to the interface.
type strict struct {
	policy.Policy
	notes map[uint32]bool // residents, and whether they are offered
	slots map[uint32]int  // of the regions that it was given

	groups map[uint32]uint8 // of residents
	victim uint32           // that was named last
	w      *world
}

func (s *strict) must(ok bool, what string, ref uint32) {
	if !ok {
		panic(fmt.Sprintf("%s is told of slot %#x: %s", s.Name(), ref, what))
	}
}

func (s *strict) resident(ref uint32) bool { _, ok := s.notes[ref]; return ok }

func (s *strict) Grow(region uint32, slots int) {
	s.slots[region] = slots
	s.Policy.Grow(region, slots)
}

func (s *strict) Shrink(region uint32) {
	delete(s.slots, region)
	s.Policy.Shrink(region)
}

func (s *strict) Read(refs []uint32) {
	for _, ref := range refs {
		s.must(int(ref&recordMask) < s.slots[ref>>recordBits],
			"what is no slot of its regions is read", ref)
	}
	s.Policy.Read(refs)
}

func (s *strict) Enter(ref uint32, key uint64, parent uint32, group uint8) {
	s.must(!s.resident(ref) && key != 0, "a resident slot, or one without a key, is entered", ref)
	s.must(parent == 0 || s.resident(parent), "a parent is not resident", parent)
	s.notes[ref], s.groups[ref] = false, group
	s.Policy.Enter(ref, key, parent, group)
}

func (s *strict) Use(ref uint32) {
	s.must(s.resident(ref), "a use of what is not resident", ref)
	s.Policy.Use(ref)
}

func (s *strict) Offer(ref uint32) {
	s.must(s.resident(ref), "an offer of what is not resident", ref)
	s.notes[ref] = true
	s.Policy.Offer(ref)
}

func (s *strict) Hold(ref uint32) {
	s.must(s.resident(ref), "a hold of what is not resident", ref)
	s.notes[ref] = false
	s.Policy.Hold(ref)
}

func (s *strict) Leave(ref uint32, evicted bool) {
	s.must(s.resident(ref), "what is not resident leaves", ref)
	s.checkOrder(ref, evicted)
	delete(s.notes, ref)
	delete(s.groups, ref)
	s.Policy.Leave(ref, evicted)
}

func (s *strict) Regroup(ref uint32, group uint8) {
	s.must(s.resident(ref), "what is not resident goes to another group", ref)
	s.groups[ref] = group
	s.Policy.Regroup(ref, group)
}

// checkOrder verifies that a slot that leaves for room is not pinned, and is cold or the victim
// that was named last. A region that is emptied goes as it is.
func (s *strict) checkOrder(ref uint32, evicted bool) {
	r := s.w.e.regions[ref>>recordBits]
	if !evicted || r.draining || r.foreign {
		return
	}
	s.must(r.kinds[ref&recordMask] != pinned, "a pinned slot is evicted", ref)
	if s.notes[ref] {
		s.must(ref == s.victim, "it is evicted and is no victim", ref)
		s.w.hinted += b2i(r.kinds[ref&recordMask] == retained)
	}
}

func (s *strict) Copy(from, to uint32) {
	s.must(s.resident(from) && !s.resident(to), "a copy of what is not resident, or to what is", to)
	s.notes[to], s.groups[to] = false, s.groups[from]
	s.Policy.Copy(from, to)
}

func (s *strict) Inherit(parent, child uint32) {
	s.must(s.resident(parent) && s.resident(child), "an inheritance of what is not resident",
		parent)
	s.Policy.Inherit(parent, child)
}

func (s *strict) Victim(group uint8) (uint32, bool) {
	ref, ok := s.Policy.Victim(group)
	s.must(!ok || s.notes[ref], "a victim that is not offered", ref)
	if s.victim = ref; ok {
		// None is there that hints have leave before it.
		rank := func(group uint8) int {
			return slices.Index(evictionOrder, group%groupsOfTenant)
		}
		for other, offered := range s.notes {
			g := s.groups[other]
			s.must(!offered || g/groupsOfTenant != group/groupsOfTenant || rank(g) >= rank(group),
				"it should leave after another", ref)
		}
	}
	return ref, ok
}

// checkPolicies compares what the policies were given with what the engine holds.
func (w *world) checkPolicies() {
	residents := 0
	for _, p := range w.policies {
		residents += len(p.notes)
	}
	for _, r := range w.e.regions[1 : w.e.nregion+1] {
		for i := range r.fresh {
			ref, s := r.num<<recordBits|uint32(i), &r.slots[i]
			if s.state != ready || s.doomed() {
				continue
			}
			residents--
			if !w.e.orphan(ref) {
				k := w.e.kin(ref)
				var a, b [32]byte
				first, last := r.digestBytes(uint32(i), 0, &a),
					w.e.regions[k.parent>>recordBits].digestBytes(k.parent&recordMask, r.ppc-1, &b)
				if w.chain[string(first)] != string(last) {
					w.fatal("slot %#x, chunk %d with digest %x, has parent %#x, which ends with %x",
						ref, s.chunk, first, k.parent, last)
				}
			}
			offered, ok := r.class.policy.(*strict).notes[ref]
			if want := s.idle() && s.children == 0 && s.flags&cold == 0 && !r.retired &&
				r.kinds[i] != pinned; !ok ||
				offered != want {
				w.fatal("slot %#x is evictable: %v; the policy knows it: %v, and was offered it: %v", ref, want, ok, offered)
			}
		}
	}
	if residents != 0 {
		w.fatal("the policies know %d chunks too many", residents)
	}
}
