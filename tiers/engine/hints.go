package engine

import (
	"fmt"
	"time"

	"lookaside/tiers/tenant"
)

// Hints: single requests say how chunks should be kept. A chunk is of one of four kinds, and room
// is made in this order: low, plain, retained. A pinned chunk is not evicted. Within a kind the
// order is the policy's, in which each kind is a group of its own. (A pinned chunk is in that of
// the retained ones, and not offered.) What is cold is on its way out already, so it goes before
// all of them.
//
// A retained or pinned chunk is kept until a time, and is plain afterwards. The times lie in a
// heap, so nothing is searched for. At most Config.HintShare of the slots of a class are kept, and
// where tenants have shares at most that part of each tenant's. A hint beyond it is ignored and
// counted. A kept chunk can still be dropped: cleared, replaced by a longer version, found bad, or
// lost with a region or a piece of the arena.
//
// A chunk is low until its next use. Low chunks are not bounded: they make room for others.
//
// All of it is forgotten with the process.

// kind is how a ready slot is kept. It is also the slot's group among those of its tenant.
type kind = uint8

const (
	plain kind = iota
	low
	retained
	pinned
)

// groupKind returns the group of a policy that slots of a kind are in.
func groupKind(k kind) uint8 { return min(k, retained) }

// evictionOrder is the kinds from which victims are taken, first to last. Of chillOrder's slots are
// chosen ahead to be written to tiers: what is cold goes before all others, so no retained slot is.
var (
	evictionOrder = []kind{low, plain, retained}
	chillOrder    = evictionOrder[:2]
)

// plainPriority is the priority of chunks without hints.
const plainPriority = 50

// Hints are what a request wants for chunks. The zero value asks for nothing.
type Hints struct {
	// Priority is 1 to 100: below 50 the chunks are low, above 50 retained. 0: none is given.
	Priority uint8
	// Retain and Pin are how long the chunks are retained and pinned, at most Config.HintLimit.
	// With Retain 0 and a Priority above 50 they are retained for Config.HintLimit.
	Retain, Pin time.Duration
}

// lowers reports whether the hints are to evict chunks before others.
func (h *Hints) lowers() bool { return h.Priority > 0 && h.Priority < plainPriority }

// hints is what the engine knows of hints.
type hints struct {
	kept   keptHeap // the slots that are retained or pinned
	pinned int      // of these
	low    int      // slots that are
	uses   uses
}

// heeds reports whether a tenant's hints count for a slot. Where tenants have shares, those of
// others do not: they would take from the share of the slot's tenant.
func (e *Engine) heeds(ref uint32, who tenant.ID) bool {
	r := e.regions[ref>>recordBits]
	if !e.divided(r.class) || r.tenants[ref&recordMask] == who {
		return true
	}
	e.stats.HintsOfOthers++
	return false
}

// follow does what a tenant's hints ask for a ready slot.
func (e *Engine) follow(ref uint32, who tenant.ID, h *Hints) {
	if *h == (Hints{}) || !e.heeds(ref, who) {
		return
	}
	retain := h.Retain
	switch {
	case h.lowers():
		retain = 0
	case retain == 0 && h.Priority > plainPriority:
		retain = e.cfg.HintLimit
	}
	switch {
	case retain > 0 || h.Pin > 0:
		e.keep(ref, retain, h.Pin)
	case h.lowers():
		e.lower(ref)
	}
}

// keep retains and pins a ready slot for these times, 0 for neither. Times that it is kept already
// are not shortened. A slot beyond the share of its class is left as it is.
func (e *Engine) keep(ref uint32, retain, pin time.Duration) {
	x := e.hints.kept.get(ref)
	if x == nil {
		r := e.regions[ref>>recordBits]
		if !e.mayKeep(r, ref) {
			e.stats.HintsOver++
			return
		}
		e.countKept(r, ref, 1)
		x = e.hints.kept.add(ref)
	}
	now := e.cfg.Now()
	until := func(d time.Duration) int64 { return now + int64(min(d, e.cfg.HintLimit)) }
	if retain > 0 {
		x.retained = max(x.retained, until(retain))
		e.stats.HintsRetained++
	}
	if pin > 0 {
		x.pinned = max(x.pinned, until(pin))
		e.stats.HintsPinned++
	}
	k := x.kind()
	e.hints.kept.fix(ref)
	e.setKind(ref, k)
}

// mayKeep reports whether one more slot of a class, which is a tenant's, may be kept.
func (e *Engine) mayKeep(r *region, ref uint32) bool {
	t := r.tenants[ref&recordMask]
	all, own := e.keptLimits(r.class, t)
	return r.class.kept < all && r.class.parts[t].kept < own
}

// keptLimits returns how many slots of a class may be kept, and how many of those a tenant's.
func (e *Engine) keptLimits(c *class, t tenant.ID) (all, own int) {
	all = int(e.cfg.HintShare * float64(c.slots+c.uncarved))
	if !e.divided(c) {
		return all, all
	}
	return all, int(e.cfg.HintShare * float64(e.quota(t, c.usable()+c.uncarved, c.unnamed)))
}

// countKept counts slots that are kept from now on, or with a negative number no longer.
func (e *Engine) countKept(r *region, ref uint32, n int) {
	r.class.kept += n
	r.class.parts[r.tenants[ref&recordMask]].kept += n
}

// unkeep ends that a slot is retained, pinned, or both, and makes it plain if it is neither.
func (e *Engine) unkeep(ref uint32, unretain, unpin bool) {
	x := e.hints.kept.get(ref)
	if x == nil {
		return
	}
	if unretain {
		x.retained = 0
	}
	if unpin {
		x.pinned = 0
	}
	k := x.kind()
	if k == plain {
		e.hints.kept.remove(ref)
		e.countKept(e.regions[ref>>recordBits], ref, -1)
	} else {
		e.hints.kept.fix(ref)
	}
	e.setKind(ref, k)
}

// lower makes a ready slot low, unless it is pinned.
func (e *Engine) lower(ref uint32) {
	e.unkeep(ref, true, false)
	if r := e.regions[ref>>recordBits]; r.kinds[ref&recordMask] == plain {
		e.setKind(ref, low)
		e.stats.HintsLow++
	}
}

// demote makes a ready slot low, and queues it for the tiers that it would go to sooner or later.
func (e *Engine) demote(ref uint32) {
	e.lower(ref)
	if r := e.regions[ref>>recordBits]; r.kinds[ref&recordMask] == low {
		e.stats.HintsDemoted++
		e.admit(ref, e.cascades.stored|e.cascades.evicted)
	}
}

// raise makes a low slot plain, because it is used. It has no effect on others.
func (e *Engine) raise(ref uint32) {
	if r := e.regions[ref>>recordBits]; r.kinds[ref&recordMask] == low {
		e.setKind(ref, plain)
	}
}

// setKind makes a ready slot one of a kind, in the books and in the order of eviction.
func (e *Engine) setKind(ref uint32, k kind) {
	r, s := e.slot(ref)
	was := r.kinds[ref&recordMask]
	if k == was {
		return
	}
	r.kinds[ref&recordMask] = k
	e.hints.low += b2i(k == low) - b2i(was == low)
	e.hints.pinned += b2i(k == pinned) - b2i(was == pinned)
	thawed := s.flags&cold != 0 && k >= retained
	if thawed {
		e.thaw(ref)
	}
	p := r.class.policy
	if groupKind(k) != groupKind(was) {
		p.Regroup(ref, groupOf(e.orderOf(r, ref), groupKind(k)))
	}
	switch {
	case k == pinned:
		p.Hold(ref)
	case (was == pinned || thawed) && s.idle() && s.children == 0:
		e.offer(ref)
	}
}

// forgetHints ends what hints say of a slot that leaves the index.
func (e *Engine) forgetHints(r *region, ref uint32) {
	switch k := r.kinds[ref&recordMask]; {
	case k >= retained:
		e.hints.kept.remove(ref)
		e.countKept(r, ref, -1)
		e.hints.pinned -= b2i(k == pinned)
	case k == low:
		e.hints.low--
	}
	r.kinds[ref&recordMask] = plain
}

// moveHints gives one slot what hints say of another, which it replaces. Both are of one class and
// of one tenant.
func (e *Engine) moveHints(from, to uint32) {
	r, rt := e.regions[from>>recordBits], e.regions[to>>recordBits]
	k := r.kinds[from&recordMask]
	if k >= retained {
		e.hints.kept.rename(from, to)
	}
	r.kinds[from&recordMask], rt.kinds[to&recordMask] = plain, k
}

// expireHints makes slots plain whose time to be kept is over, clearSlice at most. It returns
// whether there are more.
func (e *Engine) expireHints(now int64) (more bool) {
	for range clearSlice {
		x := e.hints.kept.first()
		if x == nil || x.due() > now {
			return false
		}
		e.stats.HintsExpired++
		e.unkeep(x.ref, x.retained <= now, x.pinned <= now)
	}
	return true
}

// Advice is what should become of chunks that are held.
type Advice uint8

const (
	AdviseRetain Advice = iota // as the hints say; with none, no longer
	AdvisePin                  // as the hints say; with none, no longer
	AdviseDemote               // to the tiers below, and then out before others
)

func (a Advice) String() string {
	if a > AdviseDemote {
		return fmt.Sprintf("Advice(%d)", a)
	}
	return [...]string{"retain", "pin", "demote"}[a]
}

// Advise says how the chunks of a prefix that are held from firstPage on, without a gap, should be
// kept, on behalf of a tenant. It returns how many pages these are. It is no use of them. hashes
// are the digests of the pages.
func (e *Engine) Advise(id SpaceID, who tenant.ID, firstPage int, hashes []byte, a Advice,
	h Hints) (pages int, err error) {
	e.mu.Lock()
	defer e.unlock()
	sp, err := e.space(id)
	if err != nil {
		return 0, err
	}
	w, err := e.walk(sp.g, firstPage, hashes)
	if err != nil {
		return 0, err
	}
	for i := 0; i < w.chunks; i += probeGroup {
		n := min(probeGroup, w.chunks-i)
		refs := e.scratch.refs[:n]
		e.probe(sp, &w, i, n, refs)
		for j, rec := range refs {
			last := w.last(i + j)
			end := rec == 0 || !e.at(rec, last)
			if end {
				rec, last = e.lastHeld(sp, &w, i+j)
			}
			if rec == 0 {
				return pages, nil
			}
			ref, _ := e.slotOf(rec)
			e.advise(ref, who, a, &h)
			if pages = last - w.first + 1; end {
				return pages, nil
			}
		}
	}
	return pages, nil
}

func (e *Engine) advise(ref uint32, who tenant.ID, a Advice, h *Hints) {
	switch {
	case a != AdviseDemote && *h != (Hints{}):
		e.follow(ref, who, h)
	case !e.heeds(ref, who):
	case a == AdviseDemote:
		e.demote(ref)
	default:
		e.unkeep(ref, a == AdviseRetain, a == AdvisePin)
	}
}

// kept is a slot that is retained, pinned, or both: until when, 0 for not.
type kept struct {
	ref              uint32
	retained, pinned int64
}

func (x *kept) kind() kind {
	switch {
	case x.pinned != 0:
		return pinned
	case x.retained != 0:
		return retained
	}
	return plain
}

// due is when the slot's kind may change next.
func (x *kept) due() int64 {
	if x.pinned == 0 || x.retained != 0 && x.retained < x.pinned {
		return x.retained
	}
	return x.pinned
}

// keptHeap is slots by when they are due, then by ref, so that a history can be replayed.
type keptHeap struct {
	heap  []kept
	place hashTable[uint32] // by ref: the place in heap, plus one
}

func (k *keptHeap) get(ref uint32) *kept {
	if k.place.n == 0 {
		return nil
	}
	if x := &k.place.entries[k.place.find(ref)]; x.value != 0 {
		return &k.heap[x.value-1]
	}
	return nil
}

func (k *keptHeap) first() *kept {
	if len(k.heap) == 0 {
		return nil
	}
	return &k.heap[0]
}

// add makes an entry that is due never. fix must follow, after its times were set.
func (k *keptHeap) add(ref uint32) *kept {
	k.place.grow()
	k.heap = append(k.heap, kept{ref: ref})
	k.place.entries[k.place.find(ref)] = hashEntry[uint32]{ref, uint32(len(k.heap))}
	k.place.n++
	return &k.heap[len(k.heap)-1]
}

// fix puts an entry where its times belong.
func (k *keptHeap) fix(ref uint32) {
	i := int(k.place.entries[k.place.find(ref)].value) - 1
	k.down(k.up(i))
}

func (k *keptHeap) remove(ref uint32) {
	at := k.place.find(ref)
	i, last := int(k.place.entries[at].value)-1, len(k.heap)-1
	k.place.removeAt(at)
	x := k.heap[last]
	k.heap = k.heap[:last]
	if i < last {
		k.put(i, x)
		k.down(k.up(i))
	}
}

// rename gives a slot's entry to another slot, which has none.
func (k *keptHeap) rename(from, to uint32) {
	x := *k.get(from)
	k.remove(from)
	y := k.add(to)
	y.retained, y.pinned = x.retained, x.pinned
	k.fix(to)
}

func (k *keptHeap) put(i int, x kept) {
	k.heap[i] = x
	k.place.entries[k.place.find(x.ref)].value = uint32(i + 1)
}

func (k *keptHeap) less(x, y *kept) bool {
	if a, b := x.due(), y.due(); a != b {
		return a < b
	}
	return x.ref < y.ref
}

func (k *keptHeap) up(i int) int {
	x := k.heap[i]
	for i > 0 {
		parent := (i - 1) / 2
		if !k.less(&x, &k.heap[parent]) {
			break
		}
		k.put(i, k.heap[parent])
		i = parent
	}
	k.put(i, x)
	return i
}

func (k *keptHeap) down(i int) {
	x := k.heap[i]
	for {
		child := 2*i + 1
		if child >= len(k.heap) {
			break
		}
		if child+1 < len(k.heap) && k.less(&k.heap[child+1], &k.heap[child]) {
			child++
		}
		if !k.less(&k.heap[child], &x) {
			break
		}
		k.put(i, k.heap[child])
		i = child
	}
	k.put(i, x)
}
