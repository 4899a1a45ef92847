package engine

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"lookaside/dax"
	"lookaside/tiers"
	"lookaside/tiers/tenant"
)

// Restored is a slot that was ready when the engine of another run ended.
type Restored struct {
	Slot   uint32
	Space  SpaceID
	First  int    // index of the chunk's first page
	Pages  int    // committed
	Prev   []byte // digest of the page before; empty if there is none, or it is not known
	Hashes []byte // digests of the pages, end to end
	Order  uint64 // by which the slots of all regions were committed, smaller ones first

	Unverified bool      // its bytes must be checked before they are read: see NextVerify
	Tenant     tenant.ID // whose chunk it is
}

// fits reports whether an engine can have had x in a region and a space. It is false if an earlier
// call named its slot.
func (x *Restored) fits(r *region, s *space) bool {
	if s.class != r.class || int64(x.Slot) >= int64(len(r.slots)) ||
		r.slots[x.Slot].granted != 0 {
		return false
	}
	if x.Pages < 1 || x.Pages > r.ppc || x.First < 0 || x.First > maxPage-x.Pages ||
		x.First%r.ppc != 0 {
		return false
	}
	d := s.g.DigestBytes
	return len(x.Hashes) == x.Pages*d && (len(x.Prev) == 0 || len(x.Prev) == d && x.First != 0)
}

// staged is a slot that Restore has named and EndRestore has yet to make ready. Its digests are in
// the region already.
type staged struct {
	order      uint64
	ref        uint32 // 0: it was named twice, or cannot be restored
	pages      uint16
	hasPrev    bool
	unverified bool
	prev       [32]byte
}

// stagedRegion holds what Restore has named in a region.
type stagedRegion struct {
	r      *region
	mem    *carved         // the region's at that time
	blocks [][]staged      // one for each call
	open   []uint64        // index entries of pages that are in no batch yet
	filed  []batch         // full batches; each was open once
	rooms  [][]uint64      // for the next ones
	back   map[uint32]bool // slots that were passed to Unrestore
}

// staging is all that is staged. What grows with the slots lies off the Go heap, so that it is gone
// when it is over.
type staging struct {
	regions map[*carved]*stagedRegion
	slots   pile[staged]
	entries pile[uint64]
}

func (s *staging) close() {
	s.slots.close()
	s.entries.close()
	*s = staging{}
}

// pile is memory off the Go heap that is taken piece by piece, and given back as a whole.
type pile[T any] struct {
	tables []*dax.Table[T]
	left   []T
}

// pileStep is how many entries a pile grows by at least.
const pileStep = 1 << 19

func (p *pile[T]) take(n int) ([]T, error) {
	if n > len(p.left) {
		t, err := dax.NewTable[T](max(n, pileStep))
		if err != nil {
			return nil, err
		}
		p.tables, p.left = append(p.tables, t), t.Slice()
	}
	some := p.left[:n:n]
	p.left = p.left[n:]
	return some, nil
}

func (p *pile[T]) close() {
	for _, t := range p.tables {
		t.Close()
	}
	*p = pile[T]{}
}

// Restore names slots that become ready again, in a region that was added carved and to which
// nothing was ever stored. It takes effect with EndRestore. It may be called any number of times
// for any region, and for several regions at the same time, but not for one. It keeps nothing that
// entries point to. ErrInvalid, with nothing of the call in effect: an entry that no engine can
// have had, or a slot that an earlier call named.
func (e *Engine) Restore(region uint32, entries []Restored) error {
	e.restores.RLock()
	defer e.restores.RUnlock()
	e.mu.Lock()
	r := e.byID[region]
	e.mu.Unlock()
	return e.restoreIn(r, entries)
}

// RestoreIn is Restore for a piece, by the number that RestorePiece returned. Calls for one piece
// must follow on one another; others may run at the same time. ErrBusy: its region is not drained
// any more.
func (e *Engine) RestoreIn(piece uint32, entries []Restored) error {
	e.restores.RLock()
	defer e.restores.RUnlock()
	if piece == 0 || piece > maxRegions {
		return invalid("piece %d", piece)
	}
	e.mu.Lock()
	r := e.regions[piece]
	e.mu.Unlock()
	return e.restoreIn(r, entries)
}

// restoreIn is Restore for a region of the engine's, nil if there is none, that cannot be removed
// meanwhile.
func (e *Engine) restoreIn(r *region, entries []Restored) error {
	of, block, spaces, err := e.stage(r, entries)
	if err != nil {
		return err
	}
	// Most of the time goes into the digests' memory, which is touched for the first time here. It
	// is not shared yet.
	for i := range entries {
		x, s := &entries[i], &block[i]
		if s.ref == 0 {
			continue
		}
		s.order, s.hasPrev, s.unverified = x.Order, len(x.Prev) > 0, x.Unverified
		copy(s.prev[:], x.Prev)
		sp, rec := spaces[x.Space], r.record(s.ref, 0)
		for pos := 0; pos < x.Pages; {
			if len(of.open) == cap(of.open) {
				of.file()
			}
			to, n := r.slots[x.Slot].last[:r.words], 1
			if at := int(x.Slot)*(r.ppc-1) + pos; pos < r.ppc-1 {
				n = min(x.Pages, r.ppc-1) - pos
				to = r.digests[at*r.words : (at+n)*r.words]
			}
			n = min(n, cap(of.open)-len(of.open))
			some := of.open[len(of.open) : len(of.open)+n]
			sp.keep(to[:n*r.words], x.Hashes[pos*8*r.words:], some, rec+uint32(pos))
			of.open = of.open[:len(of.open)+n]
			pos += n
		}
	}
	return nil
}

// keep writes digests as records keep them, and the index's entries of these, which follow on one
// another from rec on.
func (s *space) keep(to []uint64, hashes []byte, entries []uint64, rec uint32) {
	words := len(to) / len(entries)
	for i := range entries {
		h := s.salt
		if words == 4 { // nearly always
			d, b := (*[4]uint64)(to[4*i:]), (*[32]byte)(hashes[32*i:])
			for j := range 4 {
				d[j] = binary.LittleEndian.Uint64(b[8*j:])
			}
			h = mix(mix(mix(mix(h, d[0]), d[1]), d[2]), d[3])
		} else {
			for j := words * i; j < words*(i+1); j++ {
				to[j] = binary.LittleEndian.Uint64(hashes[8*j:])
				h = mix(h, to[j])
			}
		}
		entries[i] = entry(uint32(h>>32)&s.tagMask, rec+uint32(i))
	}
}

// stage notes what others may see of some entries, in their order. The caller fills in the rest
// without the lock. It also returns the spaces by their ids.
func (e *Engine) stage(r *region, entries []Restored) (*stagedRegion, []staged, []*space, error) {
	e.mu.Lock()
	defer e.unlock()
	if e.closed {
		return nil, nil, nil, tiers.ErrClosed
	}
	if r == nil || r.class == nil || r.foreign || r.emptying() {
		return nil, nil, nil, fmt.Errorf("%w: no region that can be restored", tiers.ErrNotFound)
	}
	if r.fresh > 0 || r.area != nil && !r.retired {
		return nil, nil, nil, fmt.Errorf("%w: region %d was stored to, or is not drained",
			tiers.ErrBusy, r.id)
	}
	pages := 0
	for i := range entries {
		x := &entries[i]
		s, err := e.space(x.Space)
		if err != nil {
			return nil, nil, nil, err
		}
		if !x.fits(r, s) {
			return nil, nil, nil, invalid(
				"slot %d of region %d restored with pages %d to %d of space %d", x.Slot, r.id,
				x.First, x.First+x.Pages-1, x.Space)
		}
		pages += x.Pages
	}
	of, err := e.stagedIn(r, pages)
	if err != nil {
		return nil, nil, nil, err
	}
	block, err := e.staging.slots.take(len(entries))
	if err != nil {
		return nil, nil, nil, err
	}
	for i := range entries {
		x := &entries[i]
		sl := &r.slots[x.Slot]
		if sl.granted != 0 { // twice in one call
			continue
		}
		sl.chunk, sl.granted, sl.space = uint32(x.First/r.ppc), uint16(x.Pages), uint16(x.Space)
		block[i].ref, block[i].pages = r.num<<recordBits|x.Slot, uint16(x.Pages)
		r.tenants[x.Slot] = x.Tenant
		e.spaces[x.Space].staged++
	}
	of.blocks = append(of.blocks, block)
	return of, block, e.spaces, nil
}

// stagedIn is what is staged in a region, with room for the entries of so many pages more.
func (e *Engine) stagedIn(r *region, pages int) (*stagedRegion, error) {
	st := &e.staging
	of := st.regions[r.mem]
	size := min(batchEntries, len(r.slots)*r.ppc)
	if of == nil {
		open, err := st.entries.take(size)
		if err != nil {
			return nil, err
		}
		if st.regions == nil {
			st.regions = map[*carved]*stagedRegion{}
		}
		of = &stagedRegion{r: r, mem: r.mem, open: open[:0]}
		st.regions[r.mem] = of
	}
	for len(of.rooms)*size < len(of.open)+pages {
		room, err := st.entries.take(size)
		if err != nil {
			return nil, err
		}
		of.rooms = append(of.rooms, room)
	}
	return of, nil
}

// EndRestore makes the slots that Restore named ready, in their order, and returns how many. Some
// are left free, and reported to OnGone: those that other slots make redundant, those of a region
// that was stored to meanwhile, and those with a page that is held as another page of its prefix.
// It holds the lock throughout, for half a second a million chunks of 16 pages: it is for the time
// before the engine is in use.
func (e *Engine) EndRestore() (chunks int) {
	e.restores.Lock()
	defer e.restores.Unlock()
	e.mu.Lock()
	defer e.unlock()
	st := e.staging
	e.staging = staging{}
	defer st.close()
	for _, s := range e.spaces {
		if s != nil {
			s.staged = 0
		}
	}
	if e.closed || len(st.regions) == 0 {
		return 0
	}
	here, dropped := e.takeStaged(slices.Collect(maps.Values(st.regions)))
	odd := e.indexStaged(here)
	for _, x := range dropped {
		e.unindex(x)
	}
	todo, later := e.placeStaged(here, odd)
	// What many would continue is offered for eviction only once all is there.
	waiting := e.restoreAll(todo)
	for _, i := range e.idleOf(todo) {
		e.settle(todo[i].ref)
	}
	chunks = len(todo)
	for _, x := range later { // those that are odd last, as they may replace others
		if odd.has(x.ref) && e.restoreOdd(x) {
			chunks++
		}
	}
	e.adoptRestored(waiting, later)
	e.noteRestored(here)
	return chunks
}

// adoptRestored gives parents to those restored slots that came before them. The others have
// theirs.
func (e *Engine) adoptRestored(waiting []restoring, later []*staged) {
	for _, x := range waiting {
		// unless an odd one has replaced it; its parent is whole, so none has replaced that
		if _, s := e.slot(x.ref); s.state == ready && e.orphan(x.ref) {
			e.adopt(x.parent, x.ref)
		}
	}
	for _, x := range later {
		if _, s := e.slot(x.ref); x.hasPrev && s.state == ready && s.pages > 0 && e.orphan(x.ref) {
			if parent := e.parentOf(s, x.prev[:]); parent != 0 {
				e.adopt(parent, x.ref)
			}
		}
	}
}

// inParallel calls f for 0 to n-1 on all processors, each time with the number of the worker that
// it is, below workers().
func inParallel(n int, f func(worker, i int)) {
	var next atomic.Int64
	var wait sync.WaitGroup
	for w := range min(workers(), n) {
		wait.Go(func() {
			for {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				f(w, i)
			}
		})
	}
	wait.Wait()
}

func workers() int { return runtime.GOMAXPROCS(0) }

// slotSet is a set of slots, a bit for each.
type slotSet [maxRegions + 1][]uint64

func (s *slotSet) add(e *Engine, ref uint32) {
	num, i := ref>>recordBits, ref&recordMask
	if s[num] == nil {
		s[num] = make([]uint64, len(e.regions[num].slots)/64+1)
	}
	s[num][i/64] |= 1 << (i % 64)
}

func (s *slotSet) has(ref uint32) bool {
	bits, i := s[ref>>recordBits], ref&recordMask
	return bits != nil && bits[i/64]>>(i%64)&1 != 0
}

// misfit is a slot with the number of its pages that are entered with all others and must not be in
// the index.
type misfit struct {
	ref   uint32
	pages int
	space *space
}

// takeStaged takes the slots that can be restored from the free ones of their regions, as ready
// slots without a page. It returns the regions that have some, and the slots in these that
// Unrestore named.
func (e *Engine) takeStaged(all []*stagedRegion) (here []*stagedRegion, dropped []misfit) {
	for _, of := range all {
		// The region may have been removed since, carved anew, or stored to.
		if r := of.r; r.mem == of.mem && r.fresh == 0 && !r.emptying() {
			here = append(here, of)
		} else if r.mem == of.mem {
			of.each(func(x *staged) {
				if _, s := e.slot(x.ref); s.state == free {
					e.gone(x.ref)
				}
			})
		}
	}
	slices.SortFunc(here, func(a, b *stagedRegion) int { return cmp.Compare(a.r.num, b.r.num) })
	var mu sync.Mutex // guards what the regions share
	inParallel(len(here), func(_, at int) {
		r, back := here[at].r, here[at].back
		count := perSpace{add: func(id uint16, n int) { e.spaces[id].chunks += n }, mu: &mu}
		top, taken := 0, 0
		for _, block := range here[at].blocks {
			for i := range block {
				x := &block[i]
				if x.ref == 0 {
					continue
				}
				s := &r.slots[x.ref&recordMask]
				top = max(top, int(x.ref&recordMask)+1)
				if len(back) > 0 && back[x.ref&recordMask] {
					mu.Lock()
					dropped = append(dropped, misfit{x.ref, int(x.pages), e.spaces[s.space]})
					mu.Unlock()
					x.ref = 0
					continue
				}
				s.state, s.gen = ready, r.firstGen
				if x.unverified {
					s.flags |= pending
					e.unverified.Add(1)
				}
				taken++
				count.count(s.space, 1)
			}
		}
		count.end()
		r.fresh = top
		for i := top - 1; i >= 0; i-- {
			if s := &r.slots[i]; s.state == free {
				*s = slot{gen: r.firstGen, last: s.last}
				r.kin[i].next = r.freeList
				r.freeList = uint32(i) + 1
			}
		}
		mu.Lock()
		e.assignAll(r)
		r.free -= taken
		if !r.draining {
			r.class.free -= taken
		}
		mu.Unlock()
	})
	return here, dropped
}

// perSpace sums something up by spaces, of which there mostly are few, and each in long runs.
type perSpace struct {
	add func(id uint16, n int)
	mu  *sync.Mutex // add is called under it
	id  uint16
	n   int
}

func (p *perSpace) count(id uint16, n int) {
	if id != p.id {
		p.end()
		p.id = id
	}
	p.n += n
}

func (p *perSpace) end() {
	if p.n > 0 {
		p.mu.Lock()
		p.add(p.id, p.n)
		p.mu.Unlock()
	}
	p.n = 0
}

// each calls f for all slots that are staged.
func (of *stagedRegion) each(f func(x *staged)) {
	for _, block := range of.blocks {
		for i := range block {
			if block[i].ref != 0 {
				f(&block[i])
			}
		}
	}
}

// Unrestore takes back what Restore named of a slot, before EndRestore. Restore cannot name it
// again.
func (e *Engine) Unrestore(region, slot uint32) {
	e.mu.Lock()
	defer e.unlock()
	r := e.byID[region]
	if r == nil || e.staging.regions[r.mem] == nil || int64(slot) >= int64(len(r.slots)) ||
		r.slots[slot].granted == 0 {
		return
	}
	of := e.staging.regions[r.mem]
	if of.back == nil {
		of.back = map[uint32]bool{}
	}
	of.back[slot] = true
}
