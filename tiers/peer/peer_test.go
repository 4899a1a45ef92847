package peer

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"lookaside/dax"
	"lookaside/ipc/wire"
	"lookaside/tiers"
	"lookaside/tiers/engine"
)

func errorsIsUnmapped(err error) bool { return errors.Is(err, errUnmapped) }

func TestBorrow(t *testing.T) {
	dir := peerDir(t)
	a := newSide(t, dir, "a", sideOptions{})
	sp := space("m", 4)
	tokens := stretch(1, 22)
	hashes := prefix(tokens...)
	a.store(sp, hashes[:18*32])
	b := newSide(t, dir, "b", sideOptions{})
	b.learns(sp, hashes, 18)
	loans := b.borrows(sp, hashes, 18)
	check(t, b.verify(loans))
	a.lends(5)
	// It may be given back chunk by chunk.
	b.giveBack(loans[:2], false)
	eventually(t, "two chunks are back", func() bool { return a.e.Stats().LeasedSlots == 3 })
	check(t, b.verify(loans[2:]))
	b.giveBack(loans, false)
	b.p.Return([]uint64{0, 1, 1 << 40, loans[0].Handle}, true)
	a.noLoans()

	// What comes and goes is heard.
	a.store(sp, hashes)
	b.learns(sp, hashes, 22)
	other := prefix(append(stretch(1, 8), stretch(2, 4)...)...)
	a.store(sp, other)
	b.learns(sp, other, 12)
	a.clear(sp)
	b.learns(sp, hashes, 0)
	if _, pages, err := b.borrow(sp, hashes); pages != 0 || err != nil {
		t.Fatalf("%d pages of what was cleared, %v", pages, err)
	}
	if st := b.p.Status(); st.HintPages != 0 || len(st.Lenders) != 1 || st.Lenders[0].Pages != 0 {
		t.Fatalf("%+v", st)
	}
}

// TestAsk: what one peer holds is asked for by one message, and the caller gets the result whatever
// becomes of that peer.
func TestAsk(t *testing.T) {
	dir := peerDir(t)
	a, b, c := newSide(t, dir, "a", sideOptions{}), newSide(t, dir, "b", sideOptions{}),
		newSide(t, dir, "c", sideOptions{})
	sp, hashes := space("m", 4), prefix(stretch(1, 14)...)
	if _, _, asked := c.ask(run(sp, hashes)); asked {
		t.Fatal("it is asked for, and nobody has it")
	}
	a.store(sp, hashes)
	b.store(sp, hashes[:8*32])
	c.learns(sp, hashes, 14)
	check(t, c.verify(c.borrows(sp, hashes, 14)))
	for _, n := range []int{13, 14} { // b has not so many
		loans, pages, asked := c.ask(run(sp, hashes[:n*32]))
		if !asked || pages != n || len(loans) != 4 {
			t.Fatalf("%d pages of %d in %d chunks, asked %v", pages, n, len(loans), asked)
		}
		check(t, c.verify(loans))
	}
	// What no peer holds all of is for Borrow, and so is what two hold together.
	longer := prefix(append(stretch(1, 8), stretch(2, 4)...)...)
	if _, _, asked := c.ask(run(sp, longer)); asked {
		t.Fatal("it is asked for, and nobody has all of it")
	}
	o := b.open(sp)
	b.clear(sp)
	res, _, err := b.e.PrepareStore(o, 8, longer[7*32:8*32], longer[8*32:], nil)
	check(t, err)
	check(t, b.e.CommitStore(o, res.Store, nil))
	c.learns(sp, longer, 12)
	eventually(t, "two have it together",
		func() bool { _, _, asked := c.ask(run(sp, longer)); return !asked })

	// One that does not answer in time lends nothing, and has back what it lent too late.
	c.patient(false)
	stop := new(sync.Mutex)
	stop.Lock()
	a.p.held.Store(stop)
	if loans, pages, asked := c.ask(run(sp, hashes)); !asked || pages != 0 || len(loans) != 0 {
		t.Fatalf("%d pages are lent by one that does not answer, asked %v", pages, asked)
	}
	if _, _, asked := c.ask(run(sp, hashes)); asked {
		t.Fatal("one that does not answer is asked again")
	}
	a.p.held.Store(nil)
	stop.Unlock()
	eventually(t, "it is asked again", func() bool {
		loans, pages, _ := c.ask(run(sp, hashes))
		c.giveBack(loans, false)
		return pages == 14
	})
	// One that goes meanwhile, or is left.
	c.patient(true)
	stop = new(sync.Mutex)
	stop.Lock()
	a.p.held.Store(stop)
	answer := make(chan int, 2)
	if !c.p.Ask(run(sp, hashes), c.all(run(sp, hashes)),
		func(loans []Loan) { answer <- len(loans) }) {
		t.Fatal("it is not asked")
	}
	closed := make(chan struct{})
	go func() { c.close(); close(closed) }()
	select {
	case n := <-answer:
		if n != 0 {
			t.Errorf("%d chunks are lent", n)
		}
	case <-time.After(patience):
		t.Error("who asked is told nothing")
	}
	<-closed
	a.p.held.Store(nil)
	stop.Unlock()
	a.noLoans()
	b.noLoans()
}

// Chunks that their reader finds bad are dropped by their owner.
func TestBadLoan(t *testing.T) {
	dir := peerDir(t)
	a, b := newSide(t, dir, "a", sideOptions{}), newSide(t, dir, "b", sideOptions{})
	sp := space("m", 4)
	hashes := prefix(stretch(1, 16)...)
	a.store(sp, hashes)
	b.learns(sp, hashes, 16)
	loans := b.borrows(sp, hashes, 16)
	b.giveBack(loans[2:3], true)
	b.giveBack(loans, false)
	a.noLoans()
	b.learns(sp, hashes, 8)
	if st := a.e.Stats(); st.Bad != 1 {
		t.Errorf("%+v", st)
	}
}

// What a lender found on its device at its start is checked before it is lent: who asks for it
// waits for that, and what is malformed counts as not there.
func TestRestoredIsCheckedFirst(t *testing.T) {
	const region, rotten, chunks = 9, 6, 8
	dir := peerDir(t)
	sp := space("m", 4)
	hashes := prefix(stretch(1, 4*chunks)...)
	var a *side
	hold := make(chan struct{})
	verified := atomic.Int32{}
	a = newSide(t, dir, "a", sideOptions{config: func(c *Config) {
		c.Verify = func(ctx context.Context, o engine.Owner, run tiers.Run) error {
			verified.Add(1)
			select {
			case <-hold:
			case <-ctx.Done():
				return ctx.Err()
			}
			list, _, err := a.e.NextVerify(o, run.First, run.Hashes, nil, nil)
			for _, v := range list {
				want, ok := make([]byte, pageSize), true
				for i := range v.Pages {
					pattern(want, sp, v.Hashes[i*32:(i+1)*32])
					ok = ok && bytes.Equal(a.memory[region].Bytes()[int(v.Offset)+
						i*pageSize:][:pageSize], want)
				}
				a.e.EndVerify(v.Handle, ok)
			}
			return err
		}
	}})
	b := newSide(t, dir, "b", sideOptions{})
	b.open(sp)
	a.open(sp)
	r, err := dax.Create(t.Context(), dax.Options{Kind: dax.KindMemfd,
		SizeBytes: chunks * 4 * pageSize})
	check(t, err)
	a.memory[region] = r
	check(t, a.e.AddCarvedRegion(region, sp.Geometry, chunks,
		engine.Placement{Stride: 4 * pageSize}))
	id := a.e.Spaces()[0].ID
	for i := range chunks {
		of := run(sp, hashes).Chunk(i)
		for page := range 4 {
			pattern(r.Bytes()[(4*i+page)*pageSize:][:pageSize], sp, of.Hashes[page*32:(page+1)*32])
		}
		check(t, a.e.Restore(region, []engine.Restored{{Slot: uint32(i), Space: id, First: 4 * i,
			Pages: 4, Prev: of.Prev, Hashes: of.Hashes, Order: uint64(i), Unverified: true}}))
	}
	r.Bytes()[rotten*4*pageSize]++
	a.e.EndRestore()
	check(t, a.p.AddRegion(Region{ID: region, Kind: string(r.Kind()), FD: r.FD(),
		SizeBytes: r.Size(), PageSize: r.PageSize()}))
	b.learns(sp, hashes, 4*chunks)
	b.reads(a.gen, 2)

	// Who cannot wait long gets nothing; what does not wait is answered at once. What is asked for
	// again meanwhile is checked once.
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	got := make(chan int, 1)
	go func() {
		n, _ := b.p.Borrow(ctx, run(sp, hashes),
			func(int, Loan) { t.Error("lent before it was checked") })
		got <- n
	}()
	eventually(t, "it is asked for again and again, and checked",
		func() bool { return a.p.Status().Leases >= 3 && verified.Load() > 0 })
	cancel()
	if n := <-got; n != 0 {
		t.Errorf("%d pages", n)
	}
	if n := b.p.Touch(t.Context(), run(sp, hashes)); n != 0 {
		t.Errorf("%d pages are counted as held before they were checked", n)
	}
	if n := verified.Load(); n != 1 {
		t.Errorf("checked %d times at once", n)
	}
	b.learns(sp, hashes, 4*chunks) // no hint was wrong
	time.AfterFunc(20*time.Millisecond, func() { close(hold) })
	loans := b.borrows(sp, hashes, 4*rotten)
	check(t, b.verify(loans))
	b.giveBack(loans, false)
	b.learns(sp, hashes, 4*rotten)
	eventually(t, "all is checked", func() bool { return a.e.Unverified() == 0 })
	if st := a.e.Stats(); st.VerifyFailed != 1 || st.Unverified != 0 || st.LentPages < 4*rotten {
		t.Errorf("%+v", st)
	}
	a.noLoans()
}

// A prefix is put together of what several have, each being asked for what it has most of.
func TestBorrowFromSeveral(t *testing.T) {
	dir := peerDir(t)
	sp := space("m", 4)
	hashes := prefix(stretch(1, 30)...)
	a, b, c := newSide(t, dir, "a", sideOptions{}), newSide(t, dir, "b", sideOptions{}),
		newSide(t, dir, "c", sideOptions{})
	a.store(sp, hashes[:10*32])
	b.store(sp, hashes[:22*32])
	// c has the end only: what came before it is evicted, or bad.
	c.store(sp, hashes)
	s := newSide(t, dir, "s", sideOptions{})
	s.learns(sp, hashes, 30)
	eventually(t, "all three are known", func() bool { return s.lenders() == 3 })
	for _, of := range []*side{a, b, c} {
		s.reads(of.gen, 1)
	}
	loans := s.borrows(sp, hashes, 30)
	check(t, s.verify(loans))
	for _, l := range loans {
		if l.Peer != c.gen {
			t.Errorf("chunk %d came from %x, though %x has all", l.chunk, l.Peer, c.gen)
		}
	}
	s.giveBack(loans[1:2], true) // c drops that chunk
	s.giveBack(loans, false)
	c.noLoans()
	eventually(t, "c has lost a chunk", func() bool {
		loans, pages, _ := s.borrow(sp, hashes)
		check(t, s.verify(loans))
		s.giveBack(loans, false)
		from := map[uint64]int{}
		for _, l := range loans {
			from[l.Peer] += l.Pages
		}
		return pages == 30 && from[b.gen] == 20 && from[c.gen] == 10
	})
	b.close()
	eventually(t, "b has left", func() bool {
		loans, pages, _ := s.borrow(sp, hashes)
		check(t, s.verify(loans))
		s.giveBack(loans, false)
		return pages == 30 && len(loans) > 1 && loans[0].Peer != b.gen && loans[1].Peer == a.gen
	})
}

// What is lent is not evicted, whatever room is wanted.
func TestEvictionLeavesLoans(t *testing.T) {
	dir := peerDir(t)
	sp := space("m", 4)
	a := newSide(t, dir, "a", sideOptions{bytes: 8 * 4 * pageSize}) // eight slots
	b := newSide(t, dir, "b", sideOptions{})
	hashes := prefix(stretch(1, 16)...)
	a.store(sp, hashes)
	loans := b.borrows(sp, hashes, 16)
	for i := range 50 {
		a.store(sp, prefix(append(stretch(2, 4), byte(i), 0, 0, byte(i))...))
	}
	check(t, b.verify(loans))
	if st := a.e.Stats(); st.Evictions == 0 || st.LeasedSlots != 4 {
		t.Fatalf("%+v", st)
	}
	b.giveBack(loans, false)
	a.noLoans()
	for i := range 50 {
		a.store(sp, prefix(append(stretch(3, 4), byte(i), 0, 0, byte(i))...))
	}
	b.learns(sp, hashes, 0)
}

// A borrower's share bounds what it has; what is over that is not lent.
func TestLoansAreLimited(t *testing.T) {
	dir := peerDir(t)
	sp := space("m", 4)
	a := newSide(t, dir, "a", sideOptions{bytes: 8 * 4 * pageSize, share: 0.5})
	b := newSide(t, dir, "b", sideOptions{})
	one, two := prefix(stretch(1, 12)...), prefix(stretch(2, 12)...)
	a.store(sp, one)
	a.store(sp, two)
	b.learns(sp, two, 12)
	first := b.borrows(sp, one, 12)
	second := b.borrows(sp, two, 4)
	b.learns(sp, two, 12) // it does hold them
	check(t, b.verify(append(first, second...)))
	b.giveBack(first, false)
	b.giveBack(second, false)
	a.noLoans()
	b.giveBack(b.borrows(sp, two, 12), false)
	a.noLoans()
}

func TestTouch(t *testing.T) {
	dir := peerDir(t)
	sp := space("m", 1)
	a := newSide(t, dir, "a", sideOptions{bytes: 8 * pageSize})
	b := newSide(t, dir, "b", sideOptions{})
	for i := range byte(8) {
		a.store(sp, prefix(10+i))
	}
	b.learns(sp, prefix(10), 1)
	b.learns(sp, prefix(17), 1)
	for range 3 {
		if n := b.p.Touch(t.Context(), run(sp, prefix(10))); n != 1 {
			t.Fatalf("%d pages", n)
		}
	}
	if n := b.p.Touch(t.Context(), run(sp, prefix(99))); n != 0 {
		t.Fatalf("%d pages of what nobody has", n)
	}
	for i := range byte(7) {
		a.store(sp, prefix(30+i))
	}
	b.learns(sp, prefix(11), 0)
	b.learns(sp, prefix(10), 1) // it was used
	if st := a.e.Stats(); st.Leases != 0 {
		t.Errorf("%+v", st)
	}
}

// Regions of a lender come and go while it lends.
func TestRegionsComeAndGo(t *testing.T) {
	dir := peerDir(t)
	sp := space("m", 4)
	a := newSide(t, dir, "a", sideOptions{bytes: 4 * 4 * pageSize})
	b := newSide(t, dir, "b", sideOptions{})
	one := prefix(stretch(1, 16)...)
	a.store(sp, one)
	loans := b.borrows(sp, one, 16)
	a.addRegion(5, 4*4*pageSize)
	two := prefix(stretch(2, 16)...)
	a.store(sp, two)
	more := b.borrows(sp, two, 16)
	check(t, b.verify(append(loans, more...)))
	if !slices.ContainsFunc(more, func(l loan) bool { return l.Region == 5 }) {
		t.Fatalf("%+v", more)
	}
	b.giveBack(more, false)
	b.giveBack(loans, false)
	a.noLoans()
	for st := a.e.Spaces(); ; {
		a.e.ClearSpace(st[0].ID)
		break
	}
	check(t, a.e.RemoveRegion(5))
	a.p.RemoveRegion(5, patience)
	b.mu.Lock()
	if b.mapped[regionID{a.gen, 5}] != nil || b.mapped[regionID{a.gen, 0}] == nil {
		t.Error("the wrong region is mapped")
	}
	b.mu.Unlock()
	a.p.RemoveRegion(5, patience)
	a.store(sp, one)
	check(t, b.verify(b.borrows(sp, one, 16)))
	if st := b.p.Status(); st.Malformed != 0 || st.Lenders[0].Regions != 1 {
		t.Errorf("%+v", st)
	}
}

// A borrower whose worker does not unmap a region delays others no longer than it may, and keeps
// what it has.
func TestRegionIsKept(t *testing.T) {
	dir := peerDir(t)
	sp := space("m", 4)
	a := newSide(t, dir, "a", sideOptions{regions: 2, bytes: 4 * 4 * pageSize})
	b := newSide(t, dir, "b", sideOptions{})
	hashes := prefix(stretch(1, 16)...)
	a.store(sp, hashes)
	loans := b.borrows(sp, hashes, 16)
	used := loans[0].Region
	other := 1 - used
	b.reads(a.gen, 2)
	a.lends(4)
	b.mu.Lock()
	for id := range uint32(2) {
		b.mapped[regionID{a.gen, id}].users++ // a copy that hangs
	}
	b.mu.Unlock()
	check(t, a.e.RemoveRegion(other))
	a.p.RemoveRegion(other, 50*time.Millisecond)
	eventually(t, "it is given up",
		func() bool { b.mu.Lock(); defer b.mu.Unlock(); return b.gone[a.gen] == 1 })
	if st := a.e.Stats(); st.OpenLoans != 1 {
		t.Fatalf("a borrower that lives has lost what it reads: %+v", st)
	}
	check(t, b.verify(loans))
	b.mu.Lock()
	for id := range uint32(2) {
		m := b.mapped[regionID{a.gen, id}]
		m.users--
		m.idle.Broadcast()
	}
	b.mu.Unlock()
	b.giveBack(loans, false)
	a.noLoans()
	check(t, b.verify(b.borrows(sp, hashes, 16))) // it has come back
}

func TestSpacesDoNotMeet(t *testing.T) {
	dir := peerDir(t)
	log, seen := observer.New(zapcore.InfoLevel)
	a := newSide(t, dir, "a", sideOptions{})
	b := newSide(t, dir, "b", sideOptions{log: zap.New(log)})
	ours, theirs := space("seed 0", 4), space("seed 1", 4)
	hashes := prefix(stretch(1, 8)...)
	a.open(theirs, wire.Field{Key: "hash_seed", Value: "1"}, wire.Field{Key: "model", Value: "m"})
	b.open(ours, wire.Field{Key: "hash_seed", Value: "0"}, wire.Field{Key: "model", Value: "m"})
	a.store(theirs, hashes)
	b.learns(theirs, hashes, 8)
	eventually(t, "a has told all", func() bool { return b.p.peersBit(a.gen) >= 0 })
	if n := b.hinted(ours, hashes); n != 0 {
		t.Errorf("%d pages of another space", n)
	}
	// A borrower that asks for that space gets nothing of it.
	b.p.hints.ask(b.p.peersBit(a.gen), ours.Fingerprint)
	var words []byte
	for i := range 8 {
		words = append(words, packedKey(hintKey(&ours.Fingerprint, hashes[i*32:(i+1)*32]))...)
	}
	b.p.hints.apply(b.p.peersBit(a.gen), words)
	if loans, pages, err := b.borrow(ours, hashes); pages != 0 || err != nil {
		t.Errorf("borrowed %+v, %v", loans, err)
	}
	var st LenderStatus
	eventually(t, "the status says why", func() bool {
		st = b.p.Status().Lenders[0]
		return len(st.Unshared) == 1
	})
	if d := st.Unshared[0].Differences; !slices.Equal(d,
		[]Difference{{Field: "hash_seed", Ours: "0", Theirs: "1"}}) || st.Shared != 0 {
		t.Errorf("%+v", st)
	}
	eventually(t, "the log says why",
		func() bool { return seen.FilterMessageSnippet("these fields differ").Len() == 1 })
	if f := seen.FilterMessageSnippet(
		"these fields differ").All()[0].ContextMap()["fields"]; !strings.Contains(
		strings.Join(strs(f), " "), `hash_seed: ours "0", the peer's "1"`) {
		t.Errorf("%v", f)
	}
	b.open(theirs, wire.Field{Key: "hash_seed", Value: "1"}, wire.Field{Key: "model", Value: "m"})
	if st := b.p.Status().Lenders[0]; st.Shared != 1 {
		t.Errorf("%+v", st)
	}
}

func strs(v any) (out []string) {
	for _, x := range v.([]any) {
		out = append(out, x.(string))
	}
	return out
}

func packedKey(k uint64) []byte {
	b := make([]byte, 8)
	for i := range b {
		b[i] = byte(k >> (8 * i))
	}
	return b
}

// peersBit is a lender's bit, -1 if it has none.
func (p *Peers) peersBit(gen uint64) int {
	p.mu.Lock()
	b := p.peers[gen]
	p.mu.Unlock()
	if b == nil {
		return -1
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.bit
}

// A space that is not in use any more can be closed soon, though it was lent from.
func TestLentSpaceCanBeClosed(t *testing.T) {
	dir := peerDir(t)
	a, b := newSide(t, dir, "a", sideOptions{}), newSide(t, dir, "b", sideOptions{})
	sp := space("m", 4)
	hashes := prefix(stretch(1, 8)...)
	a.store(sp, hashes)
	b.giveBack(b.borrows(sp, hashes, 8), false)
	a.noLoans()
	a.e.RemoveOwner(a.spaces[sp])
	delete(a.spaces, sp)
	a.clear(sp)
	id := a.e.Spaces()[0].ID
	eventually(t, "the space is closed", func() bool { return a.e.CloseSpace(id) == nil })
	if _, pages, _ := b.borrow(sp, hashes); pages != 0 {
		t.Error("borrowed of a space that is closed")
	}
	a.store(sp, hashes)
	check(t, b.verify(b.borrows(sp, hashes, 8)))
}

func TestDirectories(t *testing.T) {
	parent := peerDir(t)
	dir := filepath.Join(parent, "peers")
	a := newSide(t, dir, "a", sideOptions{}) // makes it
	sp := space("m", 4)
	hashes := prefix(stretch(1, 8)...)
	a.store(sp, hashes)
	b := newSide(t, dir, "b", sideOptions{})
	b.learns(sp, hashes, 8)
	if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o700 {
		t.Fatalf("%v, %v", info, err)
	}

	group := a.p.Group()
	if group == 0 || b.p.Group() != group {
		t.Errorf("groups %x and %x", group, b.p.Group())
	}

	// It vanishes: who knows each other goes on.
	exchange := func(with string) {
		check(t, unix.Renameat2(unix.AT_FDCWD, dir, unix.AT_FDCWD, with, unix.RENAME_EXCHANGE))
	} // at once: where nothing is, they make one
	check(t, os.WriteFile(dir+".gone", nil, 0o600))
	exchange(dir + ".gone")
	eventually(t, "it is noticed", func() bool {
		return a.p.Status().Off != "" &&
			b.p.Status().Off != ""
	})
	c := newSide(t, dir, "c", sideOptions{})
	if off := c.p.Status().Off; !strings.Contains(off, "peers.dir") ||
		a.p.Group()|c.p.Group() != 0 {
		t.Errorf("off: %q; groups %x and %x", off, a.p.Group(), c.p.Group())
	}
	loans := b.borrows(sp, hashes, 8)
	check(t, b.verify(loans))

	// It comes back, open to others at first.
	check(t, os.Mkdir(dir+".new", 0o755))
	check(t, os.Chmod(dir+".new", 0o755))
	exchange(dir + ".new")
	eventually(t, "it is not private", func() bool {
		return strings.Contains(a.p.Status().Off, "0755") && strings.Contains(c.p.Status().Off,
			"chmod")
	})
	check(t, os.Chmod(dir, 0o700))
	c.learns(sp, hashes, 8)
	eventually(t, "all are there", func() bool {
		return a.lenders() == 2 && b.lenders() == 2 &&
			c.lenders() == 2
	})
	check(t, b.verify(loans))
	if again := a.p.Group(); again == 0 || again == group || b.p.Group() != again ||
		c.p.Group() != again {
		t.Errorf("groups %x, %x and %x, in another directory than %x", again, b.p.Group(),
			c.p.Group(), group)
	}

	// A socket that is removed is made again; those of the dead are removed.
	check(t, os.Remove(socketOf(dir, a.gen)))
	d := newSide(t, dir, "d", sideOptions{})
	d.learns(sp, hashes, 8)
	b.giveBack(loans, false)
}

func TestStaleSockets(t *testing.T) {
	dir := peerDir(t)
	them := start(t, "lend", dir)
	them.kill()
	left, _ := filepath.Glob(filepath.Join(dir, "peer-*.sock"))
	if len(left) != 1 {
		t.Fatalf("%v", left)
	}
	check(t, os.WriteFile(filepath.Join(dir, "peer-zz.sock"), nil, 0o600))
	check(t, os.WriteFile(socketOf(dir, 0xABCDEF), nil, 0o600)) // no socket at all
	check(t, os.Mkdir(socketOf(dir, 0xABCDEE), 0o700))
	a := newSide(t, dir, "a", sideOptions{})
	eventually(t, "the dead one's socket is removed",
		func() bool { _, err := os.Stat(left[0]); return err != nil })
	a.close()
	if _, err := os.Stat(socketOf(dir, a.gen)); err == nil {
		t.Error("a socket is left behind")
	}
}

// Of a run's first part that does not begin a prefix.
func TestBorrowFromTheMiddle(t *testing.T) {
	dir := peerDir(t)
	a, b := newSide(t, dir, "a", sideOptions{}), newSide(t, dir, "b", sideOptions{})
	sp := space("m", 4)
	hashes := prefix(stretch(1, 16)...)
	a.store(sp, hashes)
	b.learns(sp, hashes, 16)
	b.giveBack(b.borrows(sp, hashes, 16), false)
	r := tiers.Run{Space: sp, First: 8, Prev: hashes[7*32 : 8*32], Hashes: hashes[8*32:]}
	var got []loan
	pages, err := b.p.Borrow(t.Context(), r,
		func(chunk int, l Loan) { got = append(got, loan{l, chunk, r}) })
	if err != nil || pages != 8 || len(got) != 2 {
		t.Fatalf("%d pages, %v, %+v", pages, err, got)
	}
	check(t, b.verify(got))
	b.giveBack(got, false)
}

// TestLeaveAtOnce: a sidecar that ends before its handshake sends nothing else instead.
func TestLeaveAtOnce(t *testing.T) {
	dir := peerDir(t)
	a := newSide(t, dir, "a", sideOptions{})
	e, err := engine.New(engine.Config{JournalBytes: 1 << 20})
	check(t, err)
	defer e.Close()
	for i := range 200 {
		p, err := Start(Config{Dir: dir, Generation: 0x900000 + uint64(i), Engine: e})
		check(t, err)
		check(t, p.Close())
	}
	eventually(t, "they are gone", func() bool { return len(a.p.Status().Borrowers) == 0 })
	if st := a.p.Status(); st.Malformed != 0 {
		t.Fatalf("%+v", st)
	}
}
