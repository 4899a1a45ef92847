package engine

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"lookaside/tiers"
)

// The part of the random histories that is about what peers lend.

// peerRegions is the first of the regions that peers have: each has one, in which no loan lies
// where another was.
const peerRegions = 1000

type modelLoan struct {
	ex    Extent // of all its pages
	space *modelSpace
	p     prefix
	peer  uint64
	bad   bool // it was found bad
}

// modelCopy is a chunk on its way from a peer into the arena.
type modelCopy struct {
	c      Copy
	loan   *modelLoan
	clears int
}

// modelPeers have randomness of their own, so that the other histories do not depend on them.
type modelPeers struct {
	rng *rand.Rand
	// by handle, those that were not returned; nil: there are no peers
	loans           map[uint64]*modelLoan
	mem             map[uint32][]byte // of their regions
	last            uint64            // peer; those before it are gone
	handles         uint64
	rung            bool // Wake was called for returns
	due             bool // and for copies
	copies          map[uint64]*modelCopy
	borrowed, mixed uint64
	copied          uint64
	own, lent       bool // of the load that is being prepared
}

// startPeers sets how many foreign slots the engine has, and after how many loads what is in them
// is copied.
func (w *world) startPeers() (slots, copyAfter int) {
	m := &w.peers
	m.rng = rand.New(rand.NewPCG(w.seed, 3))
	slots = []int{0, 1, 3, 100}[m.rng.IntN(4)]
	if slots > 0 {
		m.loans = map[uint64]*modelLoan{}
		m.last = 1
		m.mem = map[uint32][]byte{peerRegions + 1: {}}
		m.copies = map[uint64]*modelCopy{}
		copyAfter = m.rng.IntN(3)
	}
	return slots, copyAfter
}

// offer has peers hold some of the chunks from page first of a prefix on.
func (m *modelPeers) offer(p prefix, first, ppc int, have []uint16) (lent []bool) {
	if m.loans == nil || m.rng.IntN(3) == 0 {
		return nil
	}
	lent = make([]bool, len(have))
	for i := range have {
		if lent[i] = m.rng.IntN(3) > 0; lent[i] {
			have[i] = uint16(min(ppc, len(p)-first-i*ppc))
			if m.rng.IntN(6) == 0 {
				have[i] = uint16(m.rng.IntN(int(have[i]) + 1))
			}
		}
	}
	return lent
}

// borrow ends the borrowing of a chunk.
func (w *world) borrow(h uint64, f *modelFlight) {
	m, g := &w.peers, f.space.g
	if m.rng.IntN(4) == 0 {
		f.got = 1 + m.rng.IntN(f.got)
	}
	id := uint32(peerRegions + m.last)
	m.handles++
	ex := Extent{Page: f.ex.Page, Pages: uint32(f.got), Region: id, Offset: uint64(len(m.mem[id]))}
	m.mem[id] = append(m.mem[id], make([]byte, int64(f.got)*g.PageBytes)...)
	for j := range f.got {
		p := int(ex.Page) + j
		d := f.p.digests(p, p+1, g.DigestBytes)
		pattern(w.page(f.space, ex, j), f.space.fp, d)
		w.note(f.p, p, g.DigestBytes)
		if f.clears == f.space.clears {
			f.space.committed[string(d)] = true
		}
	}
	if err := w.e.FinishBorrow(h, Loan{Region: id, Pages: f.got, Handle: 1}); !errors.Is(err,
		tiers.ErrInvalid) {
		w.fatal("a loan of nobody: %v", err)
	}
	pages := f.got
	if pages == int(f.ex.Pages) && m.rng.IntN(2) == 0 {
		pages += 3 // more than was asked for
	}
	m.loans[m.handles] = &modelLoan{ex: ex, space: f.space, p: f.p, peer: m.last}
	l := Loan{Peer: m.last, Region: id, Offset: ex.Offset, Pages: pages, Handle: m.handles}
	w.check(w.e.FinishBorrow(h, l))
	if err := w.e.FinishBorrow(h, l); !errors.Is(err, tiers.ErrStale) &&
		!errors.Is(err, tiers.ErrNotFound) {
		w.fatal("a chunk is borrowed twice: %v", err)
	}
	m.borrowed++
	delete(w.flights, h)
}

// read notes an extent that a load is given.
func (m *modelPeers) read(w *world, ex Extent) {
	if ex.Region < peerRegions {
		m.own = true
		return
	}
	m.lent = true
	if uint64(ex.Region) != peerRegions+m.last {
		w.fatal("a load is given %+v, of a peer that is gone", ex)
	}
	if m.find(ex) == nil {
		w.fatal("a load is given %+v, which was returned", ex)
	}
}

// find is the loan that an extent is of.
func (m *modelPeers) find(ex Extent) *modelLoan {
	for _, l := range m.loans {
		if l.ex.Region == ex.Region && l.ex.Offset <= ex.Offset && ex.Offset < l.ex.Offset+
			uint64(l.ex.Pages)*uint64(l.space.g.PageBytes) {
			return l
		}
	}
	return nil
}

// lend is what happens to loans meanwhile.
func (w *world) lend() {
	m := &w.peers
	if m.own && m.lent {
		m.mixed++
	}
	m.own, m.lent = false, false
	if m.loans == nil {
		return
	}
	switch m.rng.IntN(40) {
	case 0:
		w.e.SweepForeign()
	case 1:
		if m.rng.IntN(3) == 0 {
			w.e.DropPeer(m.last)
			m.last++
			m.mem[uint32(peerRegions+m.last)] = []byte{}
			w.bad = true // what lookups hold may be void
		}
	case 2, 3, 4, 5, 6:
		w.takeReturns()
	case 7, 8, 9:
		w.copy()
	case 10, 11:
		w.endCopy()
	case 12, 13, 14:
		w.reread()
	}
}

// reread has an owner of its own load what a peer has lent, or what the arena has of it by now.
func (w *world) reread() {
	m := &w.peers
	if len(m.loans) == 0 {
		return
	}
	handles := sorted(m.loans)
	l := m.loans[handles[m.rng.IntN(len(handles))]]
	const o = Owner(1 << 40)
	w.check(w.e.AddOwner(o, l.space.id))
	defer w.e.RemoveOwner(o)
	first := int(l.ex.Page)
	hashes := l.p.digests(first, first+int(l.ex.Pages), l.space.g.DigestBytes)
	pages, err := w.e.Lookup(o, 1, first, hashes)
	w.check(err)
	for i := range pages {
		if !l.space.committed[string(hashes[i*l.space.g.DigestBytes:][:l.space.g.DigestBytes])] {
			w.fatal("FALSE HIT: page %d of %v was never committed", first+i, l.p)
		}
	}
	if pages == 0 {
		return
	}
	_, extents, err := w.e.PrepareLoad(o, o, 1, first, pages, nil)
	if errors.Is(err, tiers.ErrBusy) {
		return
	}
	w.check(err)
	for _, ex := range extents {
		if ex.Region >= peerRegions && m.find(ex) == nil {
			w.fatal("%+v is read, which was returned", ex)
		}
	}
	w.verify(l.space, &modelLoad{p: l.p, first: first, extents: extents})
}

// copy begins to copy what has been read often.
func (w *world) copy() {
	m := &w.peers
	c, ok := w.e.NextCopy()
	if ok && !m.due {
		w.fatal("nobody was told of %+v", c)
	}
	if !ok {
		m.due = false
		return
	}
	if w.e.cfg.CopyAfter == 0 {
		w.fatal("%+v is to be copied", c)
	}
	l := m.find(c.From)
	if l == nil || l.ex.Page != c.From.Page || l.ex.Pages < c.From.Pages ||
		c.To.Page != c.From.Page || c.To.Pages != c.From.Pages || w.drained[c.To.Region] ||
		w.arena[c.To.Region] == nil {
		w.fatal("%+v is to be copied, of %+v", c, l)
	}
	for i := range int(c.To.Pages) {
		for j, page := 0, w.page(l.space, c.To, i); j < len(page); j++ {
			page[j] = 0xEE // half-written
		}
	}
	m.copies[c.Handle] = &modelCopy{c: c, loan: l, clears: l.space.clears}
}

func (w *world) endCopy() {
	m := &w.peers
	if len(m.copies) == 0 {
		return
	}
	handles := sorted(m.copies)
	h := handles[m.rng.IntN(len(handles))]
	x := m.copies[h]
	if m.find(x.c.From) != x.loan {
		w.fatal("%+v is returned while it is copied", x.loan)
	}
	ok := m.rng.IntN(6) > 0
	if ok {
		for i := range int(x.c.To.Pages) {
			copy(w.page(x.loan.space, x.c.To, i), w.page(x.loan.space, x.c.From, i))
		}
	}
	before := w.e.Stats()
	copied := w.e.EndCopy(h, ok)
	delete(m.copies, h)
	if w.e.EndCopy(h, true) {
		w.fatal("a copy ends twice")
	}
	if after := w.e.Stats(); copied && !ok || after.FillingSlots != before.FillingSlots-1 ||
		after.Leases != before.Leases-1 || copied != (after.CopiedChunks == before.CopiedChunks+1) {
		w.fatal("the end of a copy, %v, changed %+v to %+v", copied, before, after)
	}
	if !copied {
		return
	}
	if x.loan.peer != m.last || x.clears != x.loan.space.clears {
		w.fatal("%+v is kept, and was dropped meanwhile", x.c)
	}
	g := x.loan.space.g
	for i := range int(x.c.To.Pages) {
		p := int(x.c.To.Page) + i
		d := string(x.loan.p.digests(p, p+1, g.DigestBytes))
		x.loan.space.committed[d], x.loan.space.own[d] = true, true
	}
	m.copied++
}

// takeReturns takes back what is not in use any more. Its memory is overwritten at once.
func (w *world) takeReturns() {
	m := &w.peers
	list := w.e.TakeReturns(nil)
	if len(list) > 0 && !m.rung {
		w.fatal("nobody was told of %+v", list)
	}
	m.rung = false
	for _, r := range list {
		l := m.loans[r.Handle]
		if l == nil {
			w.fatal("%+v was not lent, or was returned before", r)
		}
		if r.Bad != l.bad {
			w.fatal("%+v is returned, it was found bad: %v", r, l.bad)
		}
		delete(m.loans, r.Handle)
		for j := range int(l.ex.Pages) {
			for k, page := 0, w.page(l.space, l.ex, j); k < len(page); k++ {
				page[k] = 0xDD
			}
		}
	}
	in := map[uint32]int{}
	for _, l := range m.loans {
		in[l.ex.Region]++
	}
	for id := uint32(peerRegions); id <= uint32(peerRegions+m.last); id++ {
		if n := w.e.ForeignIn(id); n != in[id] {
			w.fatal("%d loans are in region %d, want %d", n, id, in[id])
		}
	}
}

// endLend has everything returned when nothing is in use.
func (w *world) endLend() {
	m := &w.peers
	if m.loans == nil {
		return
	}
	for len(m.copies) > 0 {
		w.endCopy()
	}
	if m.rng.IntN(2) == 0 {
		w.e.DropPeer(0)
	} else {
		for range 3 {
			w.e.SweepForeign()
		}
	}
	w.takeReturns()
	if s := w.e.Stats(); len(m.loans) > 0 || s.ForeignUsed+s.ForeignLeased+s.ForeignPages != 0 {
		w.fatal("at the end %d loans are out: %+v", len(m.loans), s)
	}
}

// lend has a lookup go on with what peers have of hashes, whole chunks, and lends it all, at
// offsets that rise by chunk.
func (b *bench) lend(lookup uint64, first int, hashes []byte, peer uint64) []PromotedChunk {
	b.t.Helper()
	have := slices.Repeat([]uint16{4096}, 1+len(hashes)/32)
	out, err := b.e.PreparePromotion(me, lookup, PromotionRun{
		FirstPage: first, Hashes: hashes, Have: have,
		Lent: slices.Repeat([]bool{true}, len(have)),
	}, nil)
	b.ok(err)
	for i, c := range out {
		if c.State == PromotionGranted {
			b.ok(b.e.FinishBorrow(c.Promotion, Loan{Peer: peer, Region: 77, Offset: uint64(i) << 20,
				Pages: c.Pages, Handle: peer<<32 | uint64(first+i)}))
		}
	}
	return out
}

func (b *bench) returns(want ...Return) {
	b.t.Helper()
	if got := b.e.TakeReturns(nil); !slices.Equal(got, want) {
		b.t.Fatalf("%+v are returned, want %+v", got, want)
	}
}

func TestForeign(t *testing.T) {
	b := newBench(t, 10, 4, Config{ForeignSlots: 8, JournalBytes: minJournalBytes, OwnerShare: 1})
	p := numbered(1, 16)
	f, err := b.e.Follow(b.sp)
	b.ok(err)
	x := &follower{f: f}

	// The arena has the first turn, a chunk and a half; a peer has the rest, and a longer version
	// of that half.
	b.store(p[:6*32])
	if n, err := b.e.Lookup(me, 1, 0, p); n != 6 || err != nil {
		t.Fatal(n, err)
	}
	if !b.e.InArena(me, 1) || b.e.InArena(me, 2) {
		t.Fatal("in the arena: only what was looked up, and all of it")
	}
	got := b.lend(1, 4, p[4*32:], 5)
	if len(got) != 3 || !got[0].Foreign || got[0].Pages != 4 || got[0].State != PromotionGranted {
		t.Fatalf("%+v", got)
	}
	b.ok(b.e.Check())
	b.settle(1, 100, 16)
	load, ex, err := b.e.PrepareLoad(me, me, 1, 0, 16, nil)
	b.ok(err)
	if len(ex) != 4 || ex[0].Region == 77 || ex[1] != (Extent{Page: 4, Pages: 4, Region: 77}) ||
		ex[3] != (Extent{Page: 12, Pages: 4, Region: 77, Offset: 2 << 20}) {
		t.Fatalf("%+v", ex)
	}
	b.ok(b.e.Check())

	// For stores, for what asks the arena, and for followers, it is not there.
	held := make([]uint16, 4)
	b.ok(b.e.Contains(b.sp, 0, p, held))
	if !slices.Equal(held, []uint16{4, 2, 0, 0}) || len(b.followed(x)) != 6 {
		t.Fatal(held, len(b.followed(x)))
	}
	if pin, n, err := b.e.Pin(b.sp, p); n != 6 || err != nil {
		t.Fatal(n, err)
	} else {
		b.ok(b.e.Unpin(pin))
	}
	b.ok(b.e.AddArenaOwner(50, b.sp))
	if n, err := b.e.Lookup(50, 1, 0, p); n != 6 || err != nil {
		t.Fatal(n, err)
	}
	b.e.RemoveOwner(50)
	res, grants, err := b.e.PrepareStore(me, 0, nil, p[:12*32], nil)
	b.ok(err)
	if res.Held != 6 || len(grants) != 2 || grants[0].Pages != 2 {
		t.Fatalf("%+v %+v", res, grants)
	}
	b.ok(b.e.CommitStore(me, res.Store, nil))
	b.ok(b.e.Check())
	if n := len(b.followed(x)); n != 12 {
		t.Fatal(n)
	}

	// What was stored is found first; what is read stays as long as it is.
	if n, err := b.e.Lookup(me, 2, 0, p); n != 16 || err != nil || b.e.InArena(me, 2) {
		t.Fatal(n, err)
	}
	other, ex, err := b.e.PrepareLoad(me, me, 2, 0, 16, nil)
	b.ok(err)
	if ex[1].Region == 77 || ex[2].Region == 77 || ex[3].Region != 77 {
		t.Fatalf("%+v", ex)
	}
	b.ok(b.e.Release(me, other, nil))
	b.e.DropPeer(6)
	b.wantHits(16, p)
	b.e.DropPeer(5)
	b.wantHits(12, p)
	b.returns()
	if n := b.e.ForeignIn(77); n != 3 {
		t.Fatal(n)
	}
	b.ok(b.e.Check())
	b.ok(b.e.Release(me, load, []uint32{3}))
	b.returns(Return{Handle: 5<<32 | 6, Bad: true}, Return{Handle: 5<<32 | 5},
		Return{Handle: 5<<32 | 4})
	if s := b.e.Stats(); b.e.ForeignIn(77) != 0 || s.ForeignUsed != 0 || s.ForeignBad != 1 ||
		s.Bad != 0 || s.Pages != 12 {
		t.Fatalf("%+v", s)
	}
	if n := len(b.followed(x)); n != 12 {
		t.Fatal(n)
	}
	f.Close()
	b.ok(b.e.Check())
}

// TestForeignParts: a chunk that is lent is found whole, or as far as it was lent; who wants less
// of it has that lent. Dropping a page takes it, in whatever length it was lent.
func TestForeignParts(t *testing.T) {
	b := newBench(t, 10, 4, Config{ForeignSlots: 8, OwnerShare: 1})
	p := numbered(1, 8)
	b.lend(1, 0, p, 5)
	b.settle(1, 100, 8)
	b.ok(b.e.Cancel(me, 1))
	b.wantHits(8, p)
	b.wantHits(4, p[:7*32])
	if n, err := b.e.Lookup(me, 1, 0, p[:7*32]); n != 4 || err != nil {
		t.Fatal(n, err)
	}
	if got := b.lend(1, 4, p[4*32:7*32], 6); len(got) != 1 || got[0].State != PromotionGranted ||
		got[0].Pages != 3 {
		t.Fatalf("%+v", got)
	}
	b.settle(1, 100, 7)
	b.ok(b.e.Cancel(me, 1))
	b.wantHits(7, p[:7*32])
	b.wantHits(8, p)
	b.ok(b.e.Check())
	if s := b.e.Stats(); s.ForeignUsed != 3 || s.ForeignPages != 11 || s.Pages != 0 {
		t.Fatalf("%+v", s)
	}
	b.e.DropPeer(5)
	b.returns(Return{Handle: 5 << 32}, Return{Handle: 5<<32 | 1})
	b.lend(1, 0, p[:4*32], 7)
	b.settle(1, 100, 4)
	b.ok(b.e.Cancel(me, 1))
	b.wantHits(7, p) // the part that was lent is all that there is of the second
	b.lend(1, 4, p[4*32:], 7)
	b.settle(1, 100, 4)
	b.ok(b.e.Cancel(me, 1))
	for i, drop := range [][2]int{{7, 8}, {5, 6}, {0, 3}} {
		if n, err := b.e.Drop(b.sp, drop[0], p[drop[0]*32:drop[1]*32]); n != 0 || err != nil {
			t.Fatal(n, err)
		}
		b.returns([][]Return{{{Handle: 7<<32 | 4}}, {{Handle: 6<<32 | 4}},
			{{Handle: 7 << 32}}}[i]...)
		b.ok(b.e.Check())
		b.wantHits([]int{7, 4, 0}[i], p)
	}
	// One on its way does not appear.
	out, err := b.e.PreparePromotion(me, 1, PromotionRun{
		Hashes: p[:4*32], Have: []uint16{4}, Lent: []bool{true},
	}, nil)
	b.ok(err)
	_, err = b.e.Drop(b.sp, 1, p[32:2*32])
	b.ok(err)
	b.ok(b.e.FinishBorrow(out[0].Promotion, Loan{Peer: 5, Region: 77, Pages: 4, Handle: 9}))
	b.settle(1, 100, 0)
	b.returns(Return{Handle: 9})
	b.ok(b.e.Check())
}

func TestForeignShortLoan(t *testing.T) {
	b := newBench(t, 10, 4, Config{ForeignSlots: 8, OwnerShare: 1})
	p := numbered(1, 12)
	b.store(p[:6*32])
	for got, want := range map[int]int{1: 6, 2: 6, 3: 7} {
		if n, err := b.e.Lookup(me, 1, 0, p); n != 6 || err != nil {
			t.Fatal(n, err)
		}
		out, err := b.e.PreparePromotion(me, 1, PromotionRun{
			FirstPage: 4, Hashes: p[4*32:], Have: []uint16{4, 4}, Lent: []bool{true, true},
		}, nil)
		b.ok(err)
		for i, c := range out {
			b.ok(b.e.FinishBorrow(c.Promotion, Loan{Peer: 5, Region: 77, Pages: []int{got, 4}[i],
				Handle: uint64(1 + i)}))
		}
		b.settle(1, 100, want)
		b.ok(b.e.Check())
		b.ok(b.e.Cancel(me, 1))
		b.e.DropPeer(0)
		if n := len(b.e.TakeReturns(nil)); n != 2 {
			t.Fatal(n)
		}
	}
}

// TestForeignRoom: what is leased is not evicted, what was unused for longest goes first, and no
// owner has more than a share.
func TestForeignRoom(t *testing.T) {
	b := newBench(t, 10, 1, Config{ForeignSlots: 4, OwnerShare: 0.5, PromotingShare: 0.1})
	a, c := numbered(1, 2), numbered(2, 4)
	if got := b.lend(1, 0, a, 5); len(got) != 2 {
		t.Fatalf("%+v", got)
	}
	b.settle(1, 2, 2)
	if got := b.lend(2, 0, c, 6); len(got) != 0 {
		t.Fatalf("%+v is beyond the share", got)
	}
	b.ok(b.e.Cancel(me, 1))
	if got := b.lend(2, 0, c, 6); len(got) != 2 {
		t.Fatalf("%+v", got)
	}
	b.settle(2, 2, 2)
	b.ok(b.e.Cancel(me, 2))
	b.wantHits(1, a[:32]) // so the second of them goes first
	b.returns()
	if got := b.lend(3, 0, numbered(3, 1), 7); len(got) != 1 {
		t.Fatalf("%+v", got)
	}
	b.settle(3, 1, 1)
	b.returns(Return{Handle: 5<<32 | 1})
	b.wantHits(1, a)
	if s := b.e.Stats(); s.ForeignEvicted != 1 || s.Evictions != 0 || s.FreeSlots != s.Slots {
		t.Fatalf("%+v", s)
	}
	b.ok(b.e.Check())
	// What is not used goes.
	b.ok(b.e.Cancel(me, 3))
	b.e.SweepForeign()
	b.wantHits(2, c)
	b.e.SweepForeign()
	b.wantHits(2, c)
	b.e.SweepForeign()
	if s := b.e.Stats(); s.ForeignUsed != 2 {
		t.Fatalf("%+v", s)
	}
	b.wantHits(2, c)
	if n, err := b.e.Lookup(me, 4, 0, c); n != 2 || err != nil {
		t.Fatal(n, err)
	}
	for range 5 {
		b.e.SweepForeign()
	}
	if s := b.e.Stats(); s.ForeignUsed != 2 {
		t.Fatalf("what is leased was swept: %+v", s)
	}
	b.ok(b.e.Check())
}

// TestForeignGeometries: foreign slots go with the last space of their geometry, and take no region
// from the arena for good.
func TestForeignGeometries(t *testing.T) {
	b := newBench(t, 10, 4, Config{ForeignSlots: 8, MaxSpaces: 3, LeaseDeadline: time.Hour})
	for i := range 3 * maxRegions {
		g := tiers.Geometry{PageBytes: int64(512 + 8*i), PagesPerChunk: 1 + i%5, PageTokens: 16,
			DigestBytes: 32}
		id, err := b.e.OpenSpace([32]byte{9, byte(i), byte(i >> 8)}, g)
		b.ok(err)
		o := Owner(100 + i)
		b.ok(b.e.AddOwner(o, id))
		out, err := b.e.PreparePromotion(o, 1, PromotionRun{
			Hashes: numbered(7, 1), Have: []uint16{1}, Lent: []bool{true},
		}, nil)
		b.ok(err)
		if len(out) != 1 {
			t.Fatalf("geometry %d: %+v", i, out)
		}
		b.ok(b.e.FinishBorrow(out[0].Promotion, Loan{Peer: 1, Region: 2, Pages: 1, Handle: 3}))
		b.is(b.e.CloseSpace(id), tiers.ErrBusy)
		b.e.RemoveOwner(o)
		b.is(b.e.CloseSpace(id), tiers.ErrBusy)
		if i%2 == 0 {
			b.e.DropPeer(1)
		} else if n := b.e.ClearSpace(id); n != 0 {
			t.Fatal(n)
		}
		b.returns(Return{Handle: 3})
		b.ok(b.e.CloseSpace(id))
		b.ok(b.e.Check())
		b.e.Expire()
	}
	if s := b.e.Stats(); s.ForeignSlots > 16 {
		t.Fatalf("%+v", s)
	}
}
