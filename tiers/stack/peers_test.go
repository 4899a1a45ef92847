package stack

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lookaside/dax"
	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/peer"
	"lookaside/tiers/tiertest"
)

// Sidecars in one process that share by real peers: each has an engine, an arena of shared memory,
// a Stack, and what its workers would map of others.

const peerPatience = 2 * time.Minute

// side is one of them, with a worker and a scheduler as a rig has.
type side struct {
	*Stack
	t      testing.TB
	engine *engine.Engine
	region *dax.Region
	peers  *peer.Peers
	space  *tiers.Space
	id     engine.SpaceID
	mem    []*tiertest.Memory
	around aroundBorrow

	hearing sync.RWMutex // read-locked while a peer's reply is handled

	mu     sync.Mutex
	mapped map[uint32]*foreignRegion // by the id that our workers know
	ids    map[[2]uint64]uint32      // by peer and its id
	next   uint32
	// at the end: the race detector takes what another goroutine maps at the same address for the
	// same memory
	unmap   [][]byte
	answers map[uint64]int
	pending map[uint64]bool // those that were reported as pending
	closed  bool
}

// aroundBorrow is called around calls of Borrow, and before a chunk is copied, if it is set.
type aroundBorrow struct {
	before, after, copy atomic.Pointer[func()]
	askToo              atomic.Bool
	// before the result of an Ask is reported
	heard atomic.Pointer[func()]
	// what it goes through then
	change atomic.Pointer[func(loans []engine.Loan) []engine.Loan]
	// what an Ask brings goes through it, and is heard of before Ask returns
	early atomic.Pointer[func(loans []engine.Loan) []engine.Loan]
}

type foreignRegion struct{ mem []byte }

type sideOptions struct {
	slots   int // of the arena. Default 256
	limit   int // foreign slots. Default 1024
	linger  time.Duration
	tiers   []tiertest.MemoryOptions
	mode    Mode
	share   float64
	copy    int // loads after which a chunk is copied
	lookups int // under way at most. Default Config's
	// impatient: peers, tiers and lookups have the time that they have by default. Others are
	// waited for, however slow the machine is.
	impatient bool
}

var sideGeneration atomic.Uint64

func peerDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "la-peer-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func newSide(t testing.TB, dir string, o sideOptions) *side {
	t.Helper()
	orDefault(&o.slots, 256)
	orDefault(&o.limit, 1024)
	orDefault(&o.linger, time.Hour)
	if o.share == 0 {
		o.share = 1
	}
	s := &side{t: t, space: tiertest.NewSpace("peers", geometry),
		mapped: map[uint32]*foreignRegion{}, ids: map[[2]uint64]uint32{}, next: 1000,
		answers: map[uint64]int{}, pending: map[uint64]bool{}}
	bell := NewBell()
	cfg := Config{Bell: bell, Arena: func(uint32) []byte { return s.region.Bytes() }, Peers: s,
		Linger: o.linger, Promote: o.mode, MaxPending: o.lookups}
	for i, mo := range o.tiers {
		m := tiertest.NewMemory(mo)
		s.mem = append(s.mem, m)
		cfg.Tiers = append(cfg.Tiers, TierConfig{Name: fmt.Sprintf("t%d", i), Tier: m})
	}
	var call time.Duration
	if !o.impatient {
		call = peerPatience / 2
		cfg.beSlow(peerPatience)
	}
	var err error
	s.region, err = dax.Create(t.Context(), dax.Options{Kind: dax.KindMemfd,
		SizeBytes: int64(o.slots) * slotBytes})
	must(t, err)
	s.engine, err = engine.New(engine.Config{
		Tiers: Admissions(cfg.Tiers), Wake: bell.Ring, OwnerShare: o.share,
		PartialDelay: 100 * time.Millisecond, JournalBytes: 1 << 20, ForeignSlots: o.limit,
		CopyAfter: o.copy, ArenaLimitBytes: s.region.Size(),
	})
	must(t, err)
	s.id, err = s.engine.OpenSpace(s.space.Fingerprint, geometry)
	must(t, err)
	cfg.Engine = s.engine
	s.Stack, err = New(cfg)
	must(t, err)
	s.OpenSpace(s.id, s.space)
	for _, o := range []engine.Owner{worker, scheduler} {
		must(t, s.engine.AddOwner(o, s.id))
	}
	gen := sideGeneration.Add(1) + 0x5000
	s.peers, err = peer.Start(peer.Config{Dir: dir, Generation: gen, Engine: s.engine,
		CallPatience: call, OnRegion: s.onRegion, OnRegionGone: s.onRegionGone,
		OnGone: func(p uint64) { s.PeerGone(p) }})
	must(t, err)
	must(t, s.peers.AddRegion(peer.Region{ID: 7, Kind: string(s.region.Kind()), FD: s.region.FD(),
		SizeBytes: s.region.Size(), PageSize: s.region.PageSize()}))
	must(t, s.engine.AddRegion(7, s.region.Size()))
	t.Cleanup(s.close)
	return s
}

// close ends a side in order, and checks that nothing is left.
func (s *side) close() {
	if s.closed {
		return
	}
	s.closed = true
	s.RemoveOwner(worker)
	s.RemoveOwner(scheduler)
	s.Stack.Close()
	// A reply ends its request before it is done with the Stack.
	s.hearing.Lock()
	if n := s.engine.Stats(); n.ForeignUsed+n.ForeignLeased+n.ForeignPages+n.Promoting != 0 {
		s.t.Errorf("left behind: %+v", n)
	}
	if err := s.engine.Check(); err != nil {
		s.t.Error(err)
	}
	if len(s.loads)+len(s.borrowings)+s.unlisted+s.quiet != 0 {
		s.t.Errorf("left behind: %d loads, %d calls with %d, %d quiet lookups", len(s.loads),
			len(s.borrowings), s.unlisted, s.quiet)
	}
	s.hearing.Unlock()
	if err := s.peers.Close(); err != nil {
		s.t.Error(err)
	}
	for _, m := range s.mem {
		_ = m.Close()
	}
	s.engine.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.mapped) > 0 {
		s.t.Errorf("%d regions of peers are mapped still", len(s.mapped))
	}
	for _, m := range s.unmap {
		_ = unix.Munmap(m)
	}
	_ = s.region.Close()
}

// The side as its Stack's Peers, which knows the regions of others by ids of its own.

func (s *side) Contains(run tiers.Run, held []uint16) (pages, by int) {
	return s.peers.Contains(run, held)
}

func (s *side) Borrow(ctx context.Context, run tiers.Run, out func(chunk int, l engine.Loan)) (int,
	error) {
	if f := s.around.before.Load(); f != nil {
		(*f)()
	}
	pages, err := s.peers.Borrow(ctx, run, func(chunk int, l peer.Loan) {
		s.mu.Lock()
		id := s.ids[[2]uint64{l.Peer, uint64(l.Region)}]
		s.mu.Unlock()
		out(chunk, engine.Loan{Peer: l.Peer, Region: id, Offset: l.Offset, Pages: l.Pages,
			Handle: l.Handle})
	})
	if f := s.around.after.Load(); f != nil {
		(*f)()
	}
	return pages, err
}

func (s *side) Ask(run tiers.Run, peer int, done func(loans []engine.Loan)) bool {
	if f := s.around.before.Load(); (f != nil || s.around.after.Load() != nil) &&
		!s.around.askToo.Load() {
		return false // it is Borrow that tests stop
	}
	heard := make(chan struct{})
	early := s.around.early.Load()
	asked := s.peers.Ask(run, peer, func(loans []engine.Loan) {
		s.hearing.RLock()
		defer s.hearing.RUnlock()
		s.mu.Lock()
		for i := range loans {
			loans[i].Region = s.ids[[2]uint64{loans[i].Peer, uint64(loans[i].Region)}]
		}
		s.mu.Unlock()
		if f := s.around.heard.Load(); f != nil {
			(*f)()
		}
		if f := s.around.change.Load(); f != nil {
			loans = (*f)(loans)
		}
		if early != nil {
			loans = (*early)(loans)
		}
		done(loans)
		close(heard)
	})
	if asked && early != nil {
		<-heard
	}
	return asked
}

func (s *side) Return(handles []uint64, bad bool) { s.peers.Return(handles, bad) }

func (s *side) Memory(region uint32) []byte {
	if f := s.around.copy.Load(); f != nil {
		(*f)()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if m := s.mapped[region]; m != nil {
		return m.mem
	}
	return nil
}

func (s *side) onRegion(r peer.Region) error {
	mem, err := unix.Mmap(r.FD, r.OffsetBytes, int(r.SizeBytes), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.next++
	s.mapped[s.next] = &foreignRegion{mem: mem}
	s.ids[[2]uint64{r.Peer, uint64(r.ID)}] = s.next
	return nil
}

func (s *side) onRegionGone(p uint64, region uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	id := s.ids[[2]uint64{p, uint64(region)}]
	for s.engine.ForeignIn(id) > 0 {
		s.mu.Unlock()
		time.Sleep(time.Millisecond)
		s.mu.Lock()
	}
	s.unmap = append(s.unmap, s.mapped[id].mem)
	delete(s.mapped, id)
	delete(s.ids, [2]uint64{p, uint64(region)})
}

// LookupPending implements Asker.
func (s *side) LookupPending(_ engine.Owner, lookup uint64, pages int, _ time.Duration) {
	if pages == 0 {
		return // nothing is promised
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pending[lookup] = true
}

// LookupAnswered implements Asker.
func (s *side) LookupAnswered(a Answer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answers[a.Lookup] = a.Pages
}

// store stores pages [first, to) of a prefix, and returns how many pages there was no room for.
func (s *side) store(p tiertest.Prefix, first, to int) (shed int) {
	s.t.Helper()
	run := p.Run(s.space, first, to)
	res, grants, err := s.engine.PrepareStore(worker, first, run.Prev, run.Hashes, nil)
	must(s.t, err)
	for _, g := range grants {
		tiertest.FillRun(s.region.Bytes()[g.Offset:g.Offset+uint64(g.Pages)*pageBytes],
			pages(p, s.space, int(g.Page), int(g.Page+g.Pages)))
	}
	if res.Store != 0 {
		must(s.t, s.engine.CommitStore(worker, res.Store, nil))
	}
	return res.Shed
}

func pages(p tiertest.Prefix, sp *tiers.Space, from, to int) tiers.Run {
	return tiers.Run{Space: sp, First: from, Hashes: p.Digests(from, to, 32)}
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(peerPatience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

// hears waits until peers are known to hold pages [first, to) of a prefix, a whole number of chunks
// but for the end, and can lend them.
func (s *side) hears(p tiertest.Prefix, first, to int) {
	s.t.Helper()
	run := p.Run(s.space, first, to)
	held := make([]uint16, run.Chunks())
	eventually(s.t, fmt.Sprintf("pages %d to %d are said to be held", first, to-1), func() bool {
		s.peers.Contains(run, held)
		for i, n := range held {
			if int(n) != run.Chunk(i).Pages() {
				return false
			}
		}
		return true
	})
	eventually(s.t, "they are lent", func() bool {
		var handles []uint64
		n, _ := s.peers.Borrow(s.t.Context(), run,
			func(_ int, l peer.Loan) { handles = append(handles, l.Handle) })
		s.peers.Return(handles, false)
		return n == run.Pages()
	})
}

// forgets waits until peers are said to hold nothing of the chunk that begins at page first.
func (s *side) forgets(p tiertest.Prefix, first int) {
	s.t.Helper()
	run := p.Run(s.space, first, first+1)
	held := make([]uint16, 1)
	eventually(s.t, "the hints go", func() bool {
		s.peers.Contains(run, held)
		return held[0] == 0
	})
}

func (s *side) ask(lookup uint64, p tiertest.Prefix, first, n int,
	deadline time.Duration) (pages int, done bool) {
	s.t.Helper()
	q := Query{Owner: scheduler, Lookup: lookup, Space: s.id, FirstPage: first,
		Hashes: p.Digests(first, n, 32), Deadline: deadline}
	if first > 0 {
		q.Prev = p.Digests(first-1, first, 32)
	}
	pages, done, err := s.Lookup(&q, s)
	must(s.t, err)
	return pages, done
}

func (s *side) lookup(lookup uint64, p tiertest.Prefix, first, n int) int {
	s.t.Helper()
	pages, done := s.ask(lookup, p, first, n, 0)
	if !done {
		pages = s.answer(lookup)
	}
	return pages
}

func (s *side) answer(lookup uint64) (pages int) {
	s.t.Helper()
	eventually(s.t, fmt.Sprintf("lookup %d is answered", lookup), func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		var ok bool
		pages, ok = s.answers[lookup]
		return ok
	})
	return pages
}

// load is a load that is not released yet.
type sideLoad struct {
	handle uint64
	p      tiertest.Prefix
	list   []engine.Extent
}

func (s *side) prepareLoad(lookup uint64, p tiertest.Prefix, first, n int) (*sideLoad, error) {
	handle, list, err := s.engine.PrepareLoad(worker, scheduler, lookup, first, n, nil)
	if err != nil {
		return nil, err
	}
	return &sideLoad{handle, p, list}, nil
}

// check compares every byte of a load with what it must be.
func (s *side) check(l *sideLoad) error {
	for _, x := range l.list {
		mem := s.region.Bytes()
		if x.Region != 7 {
			s.mu.Lock()
			m := s.mapped[x.Region]
			s.mu.Unlock()
			if m == nil {
				return fmt.Errorf("%+v is in a region that is not mapped", x)
			}
			mem = m.mem
		}
		if bad := tiertest.WrongPage(mem[x.Offset:x.Offset+uint64(x.Pages)*pageBytes],
			pages(l.p, s.space, int(x.Page), int(x.Page+x.Pages))); bad >= 0 {
			return fmt.Errorf("FALSE HIT: page %d, in %+v, has other bytes", int(x.Page)+bad, x)
		}
	}
	return nil
}

// want looks up, checks the answer, every byte, and where the chunks are: 'o' for the own arena,
// 'p' for a peer's.
func (s *side) want(lookup uint64, p tiertest.Prefix, first, n, want int, where string) {
	s.t.Helper()
	if got := s.lookup(lookup, p, first, n); got != want {
		s.t.Fatalf("lookup %d of pages %d to %d: %d, want %d; %+v", lookup, first, n-1, got, want,
			s.PeerStats())
	}
	if want == 0 {
		return
	}
	l, err := s.prepareLoad(lookup, p, first, want)
	must(s.t, err)
	must(s.t, s.check(l))
	got := ""
	for _, x := range l.list {
		got += map[bool]string{true: "o", false: "p"}[x.Region == 7]
	}
	if got != where {
		s.t.Fatalf("lookup %d is read from %s, want %s", lookup, got, where)
	}
	must(s.t, s.engine.Release(worker, l.handle, nil))
	must(s.t, s.engine.Check())
}

// lentNothing waits until a side has back what it lent.
func (s *side) lentNothing() {
	s.t.Helper()
	eventually(s.t, "everything is returned",
		func() bool { return s.engine.Stats().OpenLoans == 0 })
}

func some(seed uint64, n int) tiertest.Prefix { return prefix(rand.New(rand.NewPCG(seed, 9)), n) }

// TestPeers: what each of several sidecars has stored of a conversation is found by all, read where
// it lies, and returned.
func TestPeers(t *testing.T) {
	for _, mode := range []Mode{PromoteAuto, PromoteNever} {
		t.Run(mode.String(), func(t *testing.T) {
			dir := peerDir(t)
			o := sideOptions{mode: mode, tiers: []tiertest.MemoryOptions{{Local: true}}}
			a, b, c := newSide(t, dir, o), newSide(t, dir, o), newSide(t, dir, o)
			p := some(1, 26)
			a.store(p, 0, 8)
			b.store(p, 8, 16)
			a.store(p, 16, 26) // ends in the middle of a chunk
			a.hears(p, 8, 16)
			b.hears(p, 0, 8)
			b.hears(p, 16, 26)
			c.hears(p, 0, 26)
			c.want(1, p, 0, 26, 26, "ppppppp")
			a.want(1, p, 0, 26, 26, "ooppooo")
			b.want(1, p, 0, 26, 26, "ppooppp")
			// From within a chunk, and more than anybody has.
			c.want(2, p, 5, 26, 21, "pppppp")
			longer := append(slices.Clone(p), 1, 2, 3, 4, 5)
			c.want(3, longer, 0, 31, 26, "ppppppp")
			if st := c.PeerStats(); st.Borrows == 0 || st.Chunks != 7 || st.Failed > 1 ||
				st.Used != 7 {
				t.Fatalf("%+v", st)
			}
			// What was borrowed once is found at once.
			if n, done := c.ask(4, p, 0, 26, 0); n != 26 || !done {
				t.Fatal(n, done)
			}
			must(t, c.Cancel(scheduler, 4))
			// The tiers were not asked, and nothing borrowed went there.
			if st := c.Status()[0]; st.Loads+st.Stores != 0 {
				t.Fatalf("%+v", st)
			}
			c.Stack.engine.DropPeer(0)
			a.Stack.engine.DropPeer(0)
			b.Stack.engine.DropPeer(0)
			for _, s := range []*side{a, b, c} {
				s.lentNothing()
			}
		})
	}
}

// TestPeersCopied: what is read often is copied, and goes on being found when who lent it has gone;
// others hear of it, too.
func TestPeersCopied(t *testing.T) {
	dir := peerDir(t)
	a, b, c := newSide(t, dir, sideOptions{}),
		newSide(t, dir, sideOptions{copy: 2, tiers: []tiertest.MemoryOptions{{Local: true}}}),
		newSide(t, dir, sideOptions{})
	p := some(11, 26)
	a.store(p, 0, 26)
	b.hears(p, 0, 26)
	b.want(1, p, 0, 26, 26, "ppppppp")
	b.want(2, p, 0, 12, 12, "ppp")
	eventually(t, "the first three chunks are copied",
		func() bool { return b.PeerStats().Copied == 3 })
	b.want(3, p, 0, 26, 26, "ooopppp")
	eventually(t, "all are copied", func() bool { return b.PeerStats().Copied == 7 })
	b.want(4, p, 0, 26, 26, "ooooooo")
	a.lentNothing()
	if st := b.PeerStats(); st.CopiedPages != 26 || st.NotCopied != 0 || st.Used != 0 {
		t.Fatalf("%+v", st)
	}
	must(t, b.Flush(t.Context()))
	if st := b.mem[0].Stats(); st.Chunks != 7 {
		t.Fatalf("%+v", st)
	}
	a.close()
	b.want(5, p, 0, 26, 26, "ooooooo")
	c.hears(p, 0, 26)
	c.want(1, p, 0, 26, 26, "ppppppp")
}

// TestPeersNotCopied: if the lender goes while a chunk is copied, or its memory does, nothing of
// that stays.
func TestPeersNotCopied(t *testing.T) {
	dir := peerDir(t)
	a, b := newSide(t, dir, sideOptions{}), newSide(t, dir, sideOptions{copy: 1})
	p := some(12, 8)
	a.store(p, 0, 8)
	b.hears(p, 0, 8)
	gone := filepath.Join(dir, "gone")
	must(t, os.WriteFile(gone, make([]byte, 8*slotBytes), 0o600))
	f, err := os.OpenFile(gone, os.O_RDWR, 0)
	must(t, err)
	defer f.Close()
	mem, err := unix.Mmap(int(f.Fd()), 0, 8*slotBytes, unix.PROT_READ, unix.MAP_SHARED)
	must(t, err)
	b.unmap = append(b.unmap, mem)
	must(t, f.Truncate(0))
	var there []byte
	cut := func() { // the first to be copied is cut off, the second is not mapped
		b.mu.Lock()
		defer b.mu.Unlock()
		for _, m := range b.mapped {
			if there == nil {
				there, m.mem = m.mem, mem
			} else {
				m.mem = nil
			}
		}
	}
	b.around.copy.Store(&cut)
	if n := b.lookup(1, p, 0, 8); n != 8 {
		t.Fatal(n)
	}
	l, err := b.prepareLoad(1, p, 0, 8)
	must(t, err)
	eventually(t, "neither is copied", func() bool { return b.PeerStats().NotCopied == 2 })
	b.around.copy.Store(nil)
	b.mu.Lock()
	for _, m := range b.mapped {
		m.mem = there
	}
	b.mu.Unlock()
	must(t, b.check(l))
	must(t, b.engine.Release(worker, l.handle, nil))

	die := func() {
		a.close()
		eventually(t, "that is known", func() bool { return b.PeerStats().Held == 0 })
	}
	b.around.copy.Store(&die)
	b.want(2, p, 0, 8, 8, "pp")
	eventually(t, "none is copied", func() bool {
		return b.PeerStats().NotCopied >= 3 &&
			b.PeerStats().Used == 0
	})
	b.around.copy.Store(nil)
	if st := b.engine.Stats(); st.CopiedChunks+uint64(st.Pages+st.FillingSlots) != 0 ||
		st.FreeSlots != st.Slots {
		t.Fatalf("%+v", st)
	}
	b.want(3, p, 0, 8, 0, "")
}

// TestPeersPartBehindOwn: a conversation moves, and what ends it is a part of a chunk at a peer,
// behind what the arena holds.
func TestPeersPartBehindOwn(t *testing.T) {
	dir := peerDir(t)
	a, b := newSide(t, dir, sideOptions{}), newSide(t, dir, sideOptions{})
	p := some(7, 20)
	b.store(p, 0, 4)
	a.store(p, 4, 8)
	b.store(p, 8, 10)
	a.hears(p, 0, 4)
	a.hears(p, 8, 10)
	a.want(1, p, 0, 20, 10, "pop")
}

// TestPeersTrimmed: that nothing is wanted any more of what the arena had does not end a lookup
// which goes on with what peers have.
func TestPeersTrimmed(t *testing.T) {
	dir := peerDir(t)
	a, b := newSide(t, dir, sideOptions{}), newSide(t, dir, sideOptions{})
	p := some(8, 16)
	a.store(p, 0, 6) // ends in the middle of a chunk
	b.store(p, 4, 16)
	a.hears(p, 4, 16)
	a.prepareMu.Lock()
	if n, done := a.ask(1, p, 0, 16, 0); done {
		t.Fatalf("answered %d at once", n)
	}
	must(t, a.Trim(scheduler, 1, 6))
	a.prepareMu.Unlock()
	if n := a.answer(1); n != 16 {
		t.Fatalf("%d pages, want 16", n)
	}
	l, err := a.prepareLoad(1, p, 6, 10)
	must(t, err)
	must(t, a.check(l))
	must(t, a.Stack.engine.Release(worker, l.handle, nil))
}

// TestPeersLinger: a loan that is not in use is returned by itself.
func TestPeersLinger(t *testing.T) {
	dir := peerDir(t)
	a, b := newSide(t, dir, sideOptions{}),
		newSide(t, dir, sideOptions{linger: 40 * time.Millisecond})
	p := some(2, 16)
	a.store(p, 0, 16)
	b.hears(p, 0, 16)
	b.want(1, p, 0, 16, 16, "pppp")
	a.lentNothing()
	if st := b.PeerStats(); st.Used != 0 || st.Returned != 4 {
		t.Fatalf("%+v", st)
	}
	// What is read stays, as long as it takes.
	if n := b.lookup(2, p, 0, 16); n != 16 {
		t.Fatal(n)
	}
	l, err := b.prepareLoad(2, p, 0, 16)
	must(t, err)
	time.Sleep(200 * time.Millisecond)
	if a.engine.ClearSpace(a.id); a.engine.Stats().OpenLoans == 0 {
		t.Fatal("what is read was returned")
	}
	must(t, b.check(l))
	must(t, b.engine.Release(worker, l.handle, []uint32{1}))
	a.lentNothing()
	if st := b.PeerStats(); st.Bad != 1 {
		t.Fatalf("%+v", st)
	}
}

// TestPeersEviction: hints may be wrong; what the lender has dropped is a miss, and tiers are asked
// for it.
func TestPeersEviction(t *testing.T) {
	dir := peerDir(t)
	a := newSide(t, dir, sideOptions{slots: 8})
	b := newSide(t, dir, sideOptions{tiers: []tiertest.MemoryOptions{{Local: true}},
		mode: PromoteAlways})
	p, q := some(3, 32), some(4, 32)
	a.store(p, 0, 32)
	b.hears(p, 0, 32)
	a.lentNothing() // or there is no room for the other prefix
	// The lender clears everything at the moment that it is asked.
	drop := func() {
		a.engine.ClearSpace(a.id)
		a.store(q, 0, 32)
	}
	b.around.before.Store(&drop)
	b.want(1, p, 0, 32, 0, "")
	b.around.before.Store(nil)
	if st := b.PeerStats(); st.Failed == 0 || st.Used != 0 {
		t.Fatalf("%+v", st)
	}
	b.forgets(p, 0)
	b.hears(q, 0, 32)
	// It drops the end, and a tier has all.
	b.store(q, 0, 32)
	must(t, b.Flush(t.Context()))
	b.engine.ClearSpace(b.id)
	drop = func() {
		if _, err := a.engine.Drop(a.id, 20, q.Digests(20, 24, 32)); err != nil {
			t.Error(err)
		}
	}
	b.around.before.Store(&drop)
	b.want(2, q, 0, 32, 32, "pppppooo")
	b.around.before.Store(nil)
	if st := b.PeerStats(); st.Retried != 2 {
		t.Fatalf("%+v", st)
	}
}

// TestPeerDies: a peer that goes while it lends ends as a miss, and what it lent is not given to
// anybody any more.
func TestPeerDies(t *testing.T) {
	dir := peerDir(t)
	a := newSide(t, dir, sideOptions{})
	b := newSide(t, dir, sideOptions{tiers: []tiertest.MemoryOptions{{Local: true}},
		mode: PromoteAlways})
	p := some(5, 32)
	a.store(p, 0, 32)
	b.store(p, 0, 6)
	must(t, b.Flush(t.Context()))
	b.hears(p, 0, 32)
	if n := b.lookup(1, p, 0, 32); n != 32 {
		t.Fatal(n)
	}
	if n := b.lookup(2, p, 0, 32); n != 32 {
		t.Fatal(n)
	}
	l, err := b.prepareLoad(2, p, 0, 32)
	must(t, err)
	b.engine.DropPeer(0) // so that the next one borrows again
	die := func() {
		a.close()
		eventually(t, "it is noticed", func() bool {
			return len(b.peers.Status().Lenders) == 0 || b.engine.Stats().ForeignPages == 0 &&
				b.goneSeen()
		})
	}
	b.around.after.Store(&die)
	b.want(3, p, 0, 32, 6, "oo")
	b.around.after.Store(nil)
	if st := b.PeerStats(); st.Void != 7 || st.Held != 0 {
		t.Fatalf("%+v", st)
	}
	// What a lookup held is void, what is being read stays what it is.
	if _, err := b.prepareLoad(1, p, 0, 32); err == nil {
		t.Fatal("pages of a peer that is gone are given to a load")
	}
	must(t, b.check(l))
	must(t, b.engine.Release(worker, l.handle, nil))
	b.want(4, p, 0, 32, 6, "oo")
}

// goneSeen reports whether some call of Borrow under way has been notified that its peer has gone.
func (s *side) goneSeen() bool {
	s.Stack.mu.Lock()
	defer s.unlockAndWake()
	for b := range s.borrowings {
		if len(b.gone) > 0 {
			return true
		}
	}
	return false
}

// hold has a hook wait until open is called.
func hold(hook *atomic.Pointer[func()]) (open func()) {
	gate := make(chan struct{})
	wait := func() { <-gate }
	hook.Store(&wait)
	return func() { close(gate) }
}

// returns drops all that the side has borrowed, and waits until its lender has it back.
func (s *side) returns(lender *side) {
	s.t.Helper()
	s.engine.DropPeer(0)
	eventually(s.t, "all is returned", func() bool {
		return s.engine.Stats().ForeignUsed == 0 &&
			lender.engine.Stats().OpenLoans == 0
	})
	// what is being prepared has been when this returns, and the next to ask need not wait
	s.prepareMu.Lock()
	defer s.prepareMu.Unlock()
}

// TestAskFirst: a peer that is said to have all is asked before the lookup is prepared, and may
// answer before it is.
func TestAskFirst(t *testing.T) {
	dir := peerDir(t)
	a, b := newSide(t, dir, sideOptions{}), newSide(t, dir, sideOptions{lookups: 1})
	p, q := some(21, 32), some(22, 32)
	a.store(p, 0, 32)
	a.store(q, 0, 32)
	b.store(p, 0, 6)
	b.hears(p, 0, 32)
	b.hears(q, 0, 32)
	asIs := func(loans []engine.Loan) []engine.Loan { return loans }
	early := func(f func([]engine.Loan) []engine.Loan) { b.around.early.Store(&f) }
	id := uint64(0) // of the last lookup
	ask := func(p tiertest.Prefix, first, n int) (pages int, done bool) {
		t.Helper()
		id++
		return b.ask(id, p, first, n, 0)
	}
	reads := func(n int) {
		t.Helper()
		l, err := b.prepareLoad(id, p, 0, n)
		must(t, err)
		must(t, b.check(l))
		must(t, b.engine.Release(worker, l.handle, nil))
	}

	// Its answer is the lookup's own.
	early(asIs)
	if n, done := ask(p, 0, 32); !done || n != 32 {
		t.Fatal(n, done)
	}
	reads(32)
	b.returns(a)
	// What it has lent of chunks that are here meanwhile goes back; b has chunks 3 and 4 from
	// before.
	if n, done := ask(p, 12, 20); !done || n != 8 {
		t.Fatal(n, done)
	}
	must(t, b.Cancel(scheduler, id))
	before := b.PeerStats()
	if n, done := ask(p, 0, 32); !done || n != 32 {
		t.Fatal(n, done)
	}
	if st := b.PeerStats(); st.Borrows != before.Borrows+1 || st.Chunks != before.Chunks+5 ||
		st.Returned != before.Returned+2 || st.Joined != 0 {
		t.Fatalf("%+v after %+v", st, before)
	}
	reads(32)
	b.returns(a)
	// So it is asked for the first pages of a lookup that no peer has all of, whole chunks and the
	// part of one.
	longer := append(slices.Clone(p[:29]), some(25, 20)...)
	before = b.PeerStats()
	if n, done := ask(longer, 0, 49); !done || n != 29 {
		t.Fatal(n, done)
	}
	if st := b.PeerStats(); st.Borrows != before.Borrows+1 || st.Chunks != before.Chunks+7 ||
		st.Returned != before.Returned {
		t.Fatalf("%+v after %+v", st, before)
	}
	reads(29)
	b.returns(a)
	// What it does not lend of what it is said to have is borrowed by others, and then the answer
	// may come later.
	early(func(loans []engine.Loan) []engine.Loan {
		b.Return([]uint64{loans[4].Handle, loans[5].Handle, loans[6].Handle}, false)
		return loans[:4]
	})
	n, done := ask(p, 0, 32)
	if !done {
		n = b.answer(id)
	}
	if n != 32 {
		t.Fatal(n)
	}
	reads(32)
	b.returns(a)
	// A lookup for which there comes to be no room keeps nothing of it; one for which there is none
	// does not ask.
	early(func(loans []engine.Loan) []engine.Loan {
		if n, done := b.ask(100, q, 0, 32, 0); done {
			t.Error(n)
		}
		return loans
	})
	open := hold(&b.around.after)
	lent := a.engine.Stats().LentPages
	b.around.askToo.Store(true)
	if n, done := ask(p, 0, 32); !done || n != 6 {
		t.Fatal(n, done)
	}
	must(t, b.Cancel(scheduler, id))
	early(asIs)
	eventually(t, "another is being borrowed",
		func() bool {
			return a.engine.Stats().LentPages == lent+28+32 &&
				a.engine.Stats().OpenLoans == 1
		})
	if n, done := ask(p, 0, 32); !done || n != 6 {
		t.Fatal(n, done)
	}
	must(t, b.Cancel(scheduler, id))
	open()
	if n := b.answer(100); n != 32 {
		t.Fatal(n)
	}
	b.around.after.Store(nil)
	if n := a.engine.Stats().LentPages; n != lent+28+32 {
		t.Fatalf("%d pages lent", n-lent)
	}
	must(t, b.Cancel(scheduler, 100))
	b.returns(a)
	// Its loans are void if it has gone meanwhile.
	early(func(loans []engine.Loan) []engine.Loan {
		b.PeerGone(loans[0].Peer)
		return loans
	})
	if n, done := ask(p, 0, 32); !done || n != 6 {
		t.Fatal(n, done)
	}
	if st := b.PeerStats(); st.Void != 7 || st.Held != 0 {
		t.Fatalf("%+v", st)
	}
	reads(6)
	b.returns(a)
}

// TestAskedIsJoined: lookups that want what a peer is being asked for wait for the same, also when
// it does not come and others are asked.
func TestAskedIsJoined(t *testing.T) {
	dir := peerDir(t)
	a, b := newSide(t, dir, sideOptions{}), newSide(t, dir, sideOptions{})
	p := some(24, 40)
	a.store(p, 0, 32)
	b.store(p, 0, 6)
	for i, part := range []int{7, 3, 0} { // chunks that come at once
		b.hears(p, 0, 32)
		open := hold(&b.around.heard)
		early := func(loans []engine.Loan) []engine.Loan {
			for _, l := range loans[part:] {
				b.Return([]uint64{l.Handle}, false)
			}
			return loans[:part]
		}
		b.around.change.Store(&early)
		before := b.PeerStats()
		id := uint64(10 * i)
		ask := func(first, n int) {
			t.Helper()
			id++
			if _, done := b.ask(id, p, first, n, 0); done {
				t.Fatal("answered without its rest")
			}
		}
		ask(0, 32)
		ask(0, 32)
		ask(8, 24)  // chunks 2 to 5
		ask(16, 20) // chunk 4
		eventually(t, "they join", func() bool {
			return b.PeerStats().Joined == before.Joined+7+4+
				1
		})
		if n := b.LookupStats().Loading; n != 7 {
			t.Errorf("%d loads under way", n)
		}
		must(t, b.Cancel(scheduler, uint64(10*i+1)))
		open()
		for k, want := range []int{32, 16, 4} {
			if n := b.answer(uint64(10*i + 2 + k)); n != want {
				t.Fatalf("%d pages of %d", n, want)
			}
		}
		b.around.heard.Store(nil)
		b.around.change.Store(nil)
		if st := b.PeerStats(); st.Chunks != before.Chunks+7 {
			t.Fatalf("%+v after %+v", st, before)
		}
		for k := range uint64(3) {
			must(t, b.Cancel(scheduler, uint64(10*i)+2+k))
		}
		b.returns(a)
	}
}

// TestTick: a lookup whose asker ticks is seen to by that: it is told that it waits, and its
// deadline ends it.
func TestTick(t *testing.T) {
	dir := peerDir(t)
	a, b := newSide(t, dir, sideOptions{}), newSide(t, dir, sideOptions{})
	p := some(23, 32)
	a.store(p, 0, 32)
	b.store(p, 0, 6)
	b.hears(p, 0, 32)
	ask := func(lookup uint64, deadline time.Duration) {
		t.Helper()
		q := Query{Owner: scheduler, Lookup: lookup, Space: b.id, Hashes: p.Digests(0, 32, 32),
			Deadline: deadline, Ticks: true}
		if n, done, err := b.Lookup(&q, b); done || n != 6 || err != nil {
			t.Fatal(n, done, err)
		}
		b.Tick()
	}
	open := hold(&b.around.heard)
	ask(1, 0)
	eventually(t, "it is told to be pending",
		func() bool { b.mu.Lock(); defer b.mu.Unlock(); return b.pending[1] })
	open()
	if n := b.answer(1); n != 32 {
		t.Fatal(n)
	}
	must(t, b.Cancel(scheduler, 1))
	b.returns(a)

	open = hold(&b.around.heard)
	ask(2, 100*time.Millisecond)
	if n := b.answer(2); n != 6 {
		t.Fatal(n)
	}
	open()
	eventually(t, "what came too late is kept", func() bool { return b.PeerStats().Late == 7 })
	b.around.heard.Store(nil)
	b.Tick() // for nothing
	if n := b.lookup(3, p, 0, 32); n != 32 {
		t.Fatal(n)
	}
}

// TestPeersLate: a lookup that ends before its loans come leaves them to be found; others that ask
// meanwhile wait for the same.
func TestPeersLate(t *testing.T) {
	dir := peerDir(t)
	a, b := newSide(t, dir, sideOptions{}), newSide(t, dir, sideOptions{})
	p := some(6, 32)
	a.store(p, 0, 32)
	b.store(p, 0, 5)
	b.hears(p, 0, 32)
	open := hold(&b.around.before)
	for deadline := 20 * time.Millisecond; b.LookupStats().Loading == 0; deadline *= 2 {
		// until it ends after its loans were asked for
		b.mu.Lock()
		delete(b.answers, 1)
		b.mu.Unlock()
		if n, done := b.ask(1, p, 0, 32, deadline); done || n != 5 {
			t.Fatal(n, done)
		}
		if n := b.answer(1); n != 5 {
			t.Fatal(n)
		}
	}
	if _, done := b.ask(2, p, 0, 32, 0); done {
		t.Fatal("answered without its rest")
	}
	if _, done := b.ask(3, p, 8, 32, 0); done {
		t.Fatal("answered without its rest")
	}
	eventually(t, "they join", func() bool { return b.PeerStats().Joined == 7+6 })
	must(t, b.Cancel(scheduler, 2))
	must(t, b.Cancel(scheduler, 1))
	open()
	if n := b.answer(3); n != 24 {
		t.Fatal(n)
	}
	b.around.before.Store(nil)
	if st := b.PeerStats(); st.Borrows != 1 || st.Chunks != 7 || st.Late != 1 {
		t.Fatalf("%+v", st)
	}
	b.want(4, p, 0, 32, 32, "opppppppp"[:8])
}

// TestPeerHistories: several sidecars with small arenas, each with a few that ask and load at the
// same time, while all store, clear, leave and come: whatever is read, as long as it is read, is
// the bytes of its pages.
func TestPeerHistories(t *testing.T) {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("seed %d", seed)
	dir := peerDir(t)
	var all []tiertest.Prefix // many of which begin alike
	rnd := rand.New(rand.NewPCG(seed, 5))
	for len(all) < 30 {
		var base tiertest.Prefix
		if len(all) > 0 {
			base = all[rnd.IntN(len(all))]
			base = base[:rnd.IntN(len(base)+1)]
		}
		all = append(all, prefix(rnd, min(60, len(base)+1+rnd.IntN(20)), base...))
	}
	var pages, copied, hits, void atomic.Uint64
	options := []sideOptions{
		{slots: 40, limit: 30, linger: 20 * time.Millisecond, share: 0.7, copy: 1, impatient: true},
		{slots: 60, limit: 200, linger: 100 * time.Millisecond,
			tiers: []tiertest.MemoryOptions{{Local: true}}, mode: PromoteAlways, copy: 3,
			impatient: true},
		{slots: 30, limit: 8, linger: 2 * time.Millisecond,
			tiers: []tiertest.MemoryOptions{{Latency: time.Millisecond}}, share: 0.8,
			impatient: true},
	}
	var wg sync.WaitGroup
	for i, o := range options {
		rnd := rand.New(rand.NewPCG(seed, uint64(10+i)))
		wg.Go(func() {
			// A few seeds take longer to come to a copy.
			for life := 0; life < 3 || life < 30 && (pages.Load() == 0 || copied.Load() == 0 ||
				hits.Load() == 0); life++ {
				s := newSide(t, dir, o)
				n := s.live(rnd, all, 150+100*min(life, 2), &hits, &void)
				pages.Add(n)
				copied.Add(s.PeerStats().Copied)
				s.close()
			}
		})
	}
	wg.Wait()
	t.Logf("%d pages borrowed, %d chunks copied, %d loads, %d lookups void", pages.Load(),
		copied.Load(), hits.Load(), void.Load())
	if pages.Load() == 0 || copied.Load() == 0 || hits.Load() == 0 {
		t.Error("nothing was borrowed, or copied: the history tests nothing")
	}
}

// live is a life of a sidecar. It returns how many pages it borrowed.
func (s *side) live(rnd *rand.Rand, all []tiertest.Prefix, steps int, hits,
	void *atomic.Uint64) (borrowed uint64) {
	var loads []*sideLoad
	pick := func() tiertest.Prefix { return all[rnd.IntN(len(all))] }
	release := func(i int) {
		l := loads[i]
		if err := s.check(l); err != nil {
			s.t.Error(err)
		}
		var bad []uint32
		if rnd.IntN(20) == 0 {
			bad = []uint32{uint32(rnd.IntN(len(l.list)))}
		}
		if err := s.engine.Release(worker, l.handle, bad); err != nil {
			s.t.Error(err)
		}
		loads = slices.Delete(loads, i, i+1)
	}
	type asked struct {
		id    uint64
		p     tiertest.Prefix
		first int
	}
	var out []asked
	end := func(a asked) {
		s.mu.Lock()
		n, ok := s.answers[a.id]
		s.mu.Unlock()
		for end := time.Now().Add(peerPatience); !ok; time.Sleep(100 * time.Microsecond) {
			if time.Now().After(end) {
				s.t.Errorf("lookup %d is not answered", a.id)
				return
			}
			s.mu.Lock()
			n, ok = s.answers[a.id]
			s.mu.Unlock()
		}
		if n == 0 {
			return
		}
		l, err := s.prepareLoad(a.id, a.p, a.first, n)
		if err != nil { // its peer has gone, it was cleared, or the share is used up
			void.Add(1)
			_ = s.Cancel(scheduler, a.id)
			return
		}
		if err := s.check(l); err != nil {
			s.t.Error(err)
		}
		hits.Add(1)
		loads = append(loads, l)
	}
	for i := range steps {
		switch k := rnd.IntN(100); {
		case k < 15:
			p := pick()
			s.store(p, 0, len(p))
		case k < 25: // what comes behind what a peer may have
			p := pick()
			s.store(p, len(p)/2/ppc*ppc, len(p))
		case k < 65:
			p := pick()
			first := rnd.IntN(len(p)) * rnd.IntN(2)
			a := asked{uint64(i), p, first}
			n, done := s.ask(a.id, p, first, len(p),
				time.Duration(1+rnd.IntN(300))*time.Millisecond)
			if done {
				s.mu.Lock()
				s.answers[a.id] = n
				s.mu.Unlock()
			}
			if out = append(out, a); len(out) > 5 {
				end(out[0])
				out = out[1:]
			}
		case k < 70 && len(out) > 0:
			a := out[len(out)-1]
			out = out[:len(out)-1]
			_ = s.Cancel(scheduler, a.id)
		case k < 75 && len(out) > 0:
			a := &out[rnd.IntN(len(out))]
			_ = s.Trim(scheduler, a.id, a.first+rnd.IntN(5))
		case k < 90 && len(loads) > 0:
			release(rnd.IntN(len(loads)))
		case k < 91:
			s.engine.ClearSpace(s.id)
		case k < 92:
			if err := s.engine.Check(); err != nil {
				s.t.Error(err)
			}
		case k < 94:
			time.Sleep(time.Duration(rnd.IntN(10)) * time.Millisecond)
		}
		for len(loads) > 8 {
			release(0)
		}
	}
	for _, a := range out {
		end(a)
	}
	for len(loads) > 0 {
		release(0)
	}
	return s.PeerStats().Pages
}

// What a lookup costs whose pages are all a peer's, beside one of the own arena: the medians, from
// the call to the answer. Between two of the former what was borrowed is returned.
func BenchmarkPeerLookup(b *testing.B) {
	for _, n := range []int{4, 64, 1024} {
		dir := peerDir(b)
		lender, borrower := newSide(b, dir, sideOptions{slots: 512}),
			newSide(b, dir, sideOptions{slots: 512})
		p := some(7, n)
		lender.store(p, 0, n)
		borrower.hears(p, 0, n)
		hashes := p.Digests(0, n, 32)
		for name, s := range map[string]*side{"own": lender, "peer": borrower} {
			b.Run(fmt.Sprintf("%s/%d", name, n), func(b *testing.B) {
				took := make([]float64, 0, b.N)
				wait := make(answer, 1)
				for i := 0; b.Loop(); i++ {
					start := time.Now()
					pages, done, err := s.Lookup(&Query{Owner: scheduler, Lookup: uint64(i),
						Space: s.id, Hashes: hashes}, wait)
					if !done {
						pages = <-wait
					}
					took = append(took, float64(time.Since(start).Nanoseconds()))
					if pages != n || err != nil || s == lender && !done {
						b.Fatal(pages, done, err)
					}
					_ = s.Cancel(scheduler, uint64(i))
					s.engine.DropPeer(0)
					for lender.engine.Stats().OpenLoans > 0 {
						time.Sleep(20 * time.Microsecond)
					}
				}
				slices.Sort(took)
				b.ReportMetric(took[len(took)/2]/1e3, "p50-µs")
			})
		}
	}
}
