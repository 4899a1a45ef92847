package engine

import (
	"cmp"
	"math"
	"slices"
	"sync"
)

// The order of what is restored: the slots whose pages are indexed are put into their prefixes, and
// made known to the policy, one by one as they were committed.

// restoring is a slot whose pages are indexed, and which is yet to be made known.
type restoring struct {
	order  uint64
	ref    uint32
	parent uint32 // 0: it has none, or none is found
}

// placeStaged gives the slots that are not odd their pages, and finds their parents. It returns
// them in their order. Apart, and in their order as well, it returns those that must be looked at
// again: the odd ones, and those whose parent may be an odd one.
func (e *Engine) placeStaged(all []*stagedRegion, odd *slotSet) (todo []restoring,
	later []*staged) {
	var blocks [][]staged
	n := 0
	for _, of := range all {
		blocks = append(blocks, of.blocks...)
	}
	for _, block := range blocks {
		n += len(block)
	}
	room := make([]restoring, n)
	runs := make([][]restoring, len(blocks)) // in room
	n = 0
	for i, block := range blocks {
		runs[i] = room[n : n : n+len(block)]
		n += len(block)
	}
	groups := make([]parentGroup, workers())
	var mu sync.Mutex
	inParallel(len(blocks), func(worker, i int) {
		g, run := &groups[worker], runs[i]
		count := perSpace{add: func(id uint16, n int) { e.spaces[id].pages += n }, mu: &mu}
		for at := range blocks[i] {
			x := &blocks[i][at]
			if x.ref == 0 {
				continue
			}
			if odd.has(x.ref) {
				g.later = append(g.later, x)
				continue
			}
			_, s := e.slot(x.ref)
			s.pages, s.granted = s.granted, 0
			count.count(s.space, int(s.pages))
			run = append(run, restoring{order: x.order, ref: x.ref})
			if x.hasPrev {
				g.x[g.n], g.to[g.n] = x, &run[len(run)-1]
				if g.n++; g.n == len(g.x) {
					e.findParents(g)
				}
			}
		}
		count.end()
		runs[i] = run
	})
	for i := range groups {
		e.findParents(&groups[i])
		e.scratch.touched |= groups[i].seen
		later = append(later, groups[i].later...)
	}
	slices.SortFunc(later, func(a, b *staged) int {
		return cmp.Or(cmp.Compare(a.order, b.order), cmp.Compare(a.ref, b.ref))
	})
	return byOrder(runs, room), later
}

// parentGroup is some slots whose parents are found together, so that the cache misses overlap, and
// what a worker has besides.
type parentGroup struct {
	n     int
	x     [64]*staged
	to    [64]*restoring
	refs  [64]uint32
	homes [64]uint32
	tags  [64]uint32
	seen  uint64
	later []*staged // see placeStaged
}

// findParents finds the slots that hold the pages before those of a group's, and empties the group.
func (e *Engine) findParents(g *parentGroup) {
	n := g.n
	g.n = 0
	t := &e.idx.cur
	for i, x := range g.x[:n] {
		sp := e.spaces[e.regions[x.ref>>recordBits].slots[x.ref&recordMask].space]
		g.tags[i] = sp.tag(x.prev[:sp.g.DigestBytes])
		g.homes[i] = t.home(g.tags[i])
	}
	for _, home := range g.homes[:n] {
		g.seen |= t.words[home]
	}
	for i, home := range g.homes[:n] {
		// the first entry with the tag: nearly always the page itself
		w := t.words[home]
		for at := home; w != 0 && uint32(w>>32) != g.tags[i]; {
			at = t.next(at)
			w = t.words[at]
		}
		g.refs[i] = uint32(w)
	}
	for _, rec := range g.refs[:n] {
		if rec != 0 {
			ref, _ := e.slotOf(rec)
			_, s := e.slot(ref)
			g.seen |= uint64(s.chunk)
		}
	}
	for i, x := range g.x[:n] {
		_, s := e.slot(x.ref)
		if g.to[i].parent = e.parentOf(s, x.prev[:]); g.to[i].parent == 0 {
			g.later = append(g.later, x)
		}
	}
}

// byOrder sorts what some runs have, which lie in a space of as many.
func byOrder(runs [][]restoring, room []restoring) []restoring {
	n := 0
	least, most := uint64(math.MaxUint64), uint64(0)
	for _, run := range runs {
		n += len(run)
		for i := range run {
			least, most = min(least, run[i].order), max(most, run[i].order)
		}
	}
	// By digits, the last first: these are mostly numbers without large gaps, so there are few
	// digits.
	const digit = 11
	out := make([]restoring, n)
	for shift := 0; shift == 0 || n > 0 && (most-least)>>shift > 0; shift += digit {
		var at [1<<digit + 1]int
		for _, run := range runs {
			for i := range run {
				at[(run[i].order-least)>>shift&(1<<digit-1)+1]++
			}
		}
		for i := range 1 << digit {
			at[i+1] += at[i]
		}
		for _, run := range runs {
			for i := range run {
				d := (run[i].order - least) >> shift & (1<<digit - 1)
				out[at[d]] = run[i]
				at[d]++
			}
		}
		runs, out, room = [][]restoring{out}, room[:n], out
	}
	return room
}

// restoreAll puts slots into their prefixes, in their order, and makes them known to the policy.
// Settling them is left to the caller. It returns those whose parent has its turn later.
func (e *Engine) restoreAll(todo []restoring) (waiting []restoring) {
	const group = 128 // that is read first, in a loop of its own, so that the cache misses overlap
	var refs [group]uint32
	seen := uint64(0)
	for from := 0; from < len(todo); from += group {
		some := todo[from:min(from+group, len(todo))]
		for i := range some {
			ref := some[i].ref
			refs[i] = ref
			r := e.regions[ref>>recordBits]
			seen |= r.slots[ref&recordMask].stamp | uint64(r.kin[ref&recordMask].parent)
		}
		for left := refs[:len(some)]; len(left) > 0; {
			// by classes: each policy knows its own slots only
			c, n := e.regions[left[0]>>recordBits].class, 1
			for n < len(left) && e.regions[left[n]>>recordBits].class == c {
				n++
			}
			c.policy.Read(left[:n])
			left = left[n:]
		}
		for i := range some {
			x := &some[i]
			if !e.restore(x.ref, x.parent) {
				waiting = append(waiting, *x)
			}
		}
	}
	e.scratch.touched |= seen // keeps the loop that only reads
	return waiting
}

// idleOf returns which of some slots that have just become ready must be settled: those without a
// continuation, or not whole.
func (e *Engine) idleOf(todo []restoring) []int {
	const piece = 1 << 14
	found := make([][]int, (len(todo)+piece-1)/piece)
	inParallel(len(found), func(_, i int) {
		for at := i * piece; at < min((i+1)*piece, len(todo)); at++ {
			if r, s := e.slot(todo[at].ref); s.children == 0 || int(s.pages) < r.ppc {
				found[i] = append(found[i], at)
			}
		}
	})
	return slices.Concat(found...)
}

// restore puts a slot whose pages are indexed into its prefix and makes it known to the policy.
// Settling it is left to the caller. It returns false if its parent is yet to be restored.
func (e *Engine) restore(ref, parent uint32) bool {
	r, s := e.slot(ref)
	e.tick++
	s.stamp, r.lastUse = e.tick, e.tick
	e.spaces[s.space].lastUse = e.tick
	there := true
	if parent != 0 {
		if _, p := e.slot(parent); p.stamp != 0 {
			e.adopt(parent, ref)
		} else { // the policy does not know it yet
			there = false
		}
	}
	e.register(ref)
	if t := e.route(ref); t != nil {
		t.held = e.cascades.self
	}
	return there
}

// restoreOdd restores a slot whose pages are not indexed yet. It returns false, with the slot free
// again, if the slot adds nothing or cannot be indexed.
func (e *Engine) restoreOdd(x *staged) bool {
	r, s := e.slot(x.ref)
	pages := int(s.granted)
	s.granted = 0
	var buf [32]byte
	if e.find(e.spaces[s.space], r.digestBytes(x.ref&recordMask, pages-1, &buf)) != 0 {
		e.stats.Duplicates++
		e.release(x.ref)
		return false
	}
	if !e.enter(x.ref, 0, pages) {
		e.release(x.ref)
		return false
	}
	parent := uint32(0)
	if x.hasPrev {
		parent = e.parentOf(s, x.prev[:])
	}
	e.restore(x.ref, parent)
	e.settle(x.ref)
	return true
}
