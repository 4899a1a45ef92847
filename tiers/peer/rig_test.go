package peer

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"lookaside/dax"
	"lookaside/ipc/wire"
	"lookaside/tiers"
	"lookaside/tiers/engine"
)

const (
	patience = 2 * time.Minute
	pageSize = 512
)

func geometry(ppc int) tiers.Geometry {
	return tiers.Geometry{PageBytes: pageSize, PagesPerChunk: ppc, PageTokens: 16, DigestBytes: 32}
}

func space(name string, ppc int) *tiers.Space {
	g := geometry(ppc)
	return &tiers.Space{Fingerprint: tiers.FingerprintOf(fmt.Append(nil, name, g)), Geometry: g}
}

// prefix is the digests of a sequence of pages, each named by all before it.
func prefix(tokens ...byte) []byte {
	var out []byte
	h := sha256.Sum256([]byte("root"))
	for _, t := range tokens {
		h = sha256.Sum256(append(h[:], t))
		out = append(out, h[:]...)
	}
	return out
}

// stretch is n tokens that differ from those of other labels.
func stretch(label byte, n int) []byte {
	out := make([]byte, n)
	for i := range out {
		out[i] = label
	}
	return out
}

// pattern is the bytes that a page has in a space.
func pattern(buf []byte, s *tiers.Space, digest []byte) {
	h := sha256.Sum256(append(slices.Clone(s.Fingerprint[:]), digest...))
	for i := 0; i < len(buf); i += len(h) {
		copy(buf[i:], h[:])
		binary.LittleEndian.PutUint64(h[:], binary.LittleEndian.Uint64(h[:])*0x9E3779B97F4A7C15+1)
	}
}

// side is a sidecar as far as peers see it: an engine, its memory, and what its workers would map
// of others.
type side struct {
	t      testing.TB
	name   string
	dir    string
	gen    uint64
	e      *engine.Engine
	p      *Peers
	spaces map[*tiers.Space]engine.Owner
	memory map[uint32]*dax.Region

	mu     sync.Mutex
	mapped map[regionID]*mapping
	// at the end: the race detector takes what another goroutine maps at the same address for the
	// same memory
	unmap [][]byte
	gone  map[uint64]int // OnGone calls
	dead  bool
}

type regionID struct {
	peer uint64
	id   uint32
}

type mapping struct {
	mem   []byte
	users int // who reads it: OnRegionGone waits for them
	idle  *sync.Cond
}

type sideOptions struct {
	regions int // of regionBytes each
	bytes   int64
	share   float64
	limit   int64 // of hints, bytes
	log     *zap.Logger
	// impatient is for lenders that do not answer. Others are waited for, however slow the machine
	// is.
	impatient bool
	config    func(*Config)
}

func peerDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "la-peer-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

var generations = struct {
	sync.Mutex
	n uint64
}{n: 0x1000}

func newSide(t testing.TB, dir, name string, o sideOptions) *side {
	t.Helper()
	generations.Lock()
	generations.n++
	s := &side{
		t: t, name: name, dir: dir, gen: generations.n, spaces: map[*tiers.Space]engine.Owner{},
		memory: map[uint32]*dax.Region{}, mapped: map[regionID]*mapping{}, gone: map[uint64]int{},
	}
	generations.Unlock()
	if o.bytes == 0 {
		o.bytes = 64 << 10
	}
	if o.regions == 0 {
		o.regions = 1
	}
	if o.share == 0 {
		o.share = 1
	}
	var err error
	s.e, err = engine.New(engine.Config{OwnerShare: o.share, JournalBytes: 1 << 20, MaxSpaces: 8})
	check(t, err)
	cfg := Config{
		Dir: dir, Generation: s.gen, Engine: s.e, Log: o.log, HintsLimitBytes: o.limit,
		OnRegion: s.onRegion, OnRegionGone: s.onRegionGone, OnGone: s.onGone,
	}
	if o.config != nil {
		o.config(&cfg)
	}
	s.p, err = Start(cfg)
	check(t, err)
	s.patient(!o.impatient)
	for i := range o.regions {
		s.addRegion(uint32(i), o.bytes)
	}
	t.Cleanup(s.close)
	return s
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

// patient has lenders waited for, or else for no longer than ever. Nobody is being asked.
func (s *side) patient(is bool) {
	s.p.cfg.CallPatience = defaultCallPatience
	if is {
		s.p.cfg.CallPatience = patience / 2
	}
}

func (s *side) addRegion(id uint32, size int64) {
	s.t.Helper()
	r, err := dax.Create(context.Background(), dax.Options{Kind: dax.KindMemfd, SizeBytes: size})
	check(s.t, err)
	s.memory[id] = r
	check(s.t, s.p.AddRegion(Region{ID: id, Kind: string(r.Kind()), FD: r.FD(), SizeBytes: r.Size(),
		PageSize: r.PageSize()}))
	check(s.t, s.e.AddRegion(id, r.Size()))
}

// close is an orderly end. It is idempotent.
func (s *side) close() {
	if s.dead {
		return
	}
	s.dead = true
	start := time.Now()
	if err := s.p.Close(); err != nil {
		s.t.Error(err)
	}
	if took := time.Since(start); took > patience/2 {
		s.t.Errorf("%s: Close took %v", s.name, took)
	}
	if err := s.e.Check(); err != nil {
		s.t.Error(err)
	}
	s.e.Close()
	for _, r := range s.memory {
		r.Close()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, mem := range s.unmap {
		if err := unix.Munmap(mem); err != nil {
			s.t.Error(err)
		}
	}
	for id := range s.mapped {
		s.t.Errorf("%s: region %d of %x is mapped still", s.name, id.id, id.peer)
	}
}

func (s *side) onRegion(r Region) error {
	mem, err := unix.Mmap(r.FD, r.OffsetBytes, int(r.SizeBytes), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mapped[regionID{r.Peer, r.ID}] != nil {
		s.t.Errorf("region %d of %x came again", r.ID, r.Peer)
	}
	s.mapped[regionID{r.Peer, r.ID}] = &mapping{mem: mem, idle: sync.NewCond(&s.mu)}
	return nil
}

func (s *side) onRegionGone(peer uint64, id uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.mapped[regionID{peer, id}]
	if m == nil {
		s.t.Errorf("region %d of %x goes and never came", id, peer)
		return
	}
	for m.users > 0 {
		m.idle.Wait()
	}
	delete(s.mapped, regionID{peer, id})
	s.unmap = append(s.unmap, m.mem)
}

func (s *side) onGone(peer uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gone[peer]++
}

// open is the owner that stores in a space.
func (s *side) open(sp *tiers.Space, fields ...wire.Field) engine.Owner {
	s.t.Helper()
	if o, ok := s.spaces[sp]; ok {
		return o
	}
	id, err := s.e.OpenSpace(sp.Fingerprint, sp.Geometry)
	check(s.t, err)
	o := engine.Owner(len(s.spaces) + 1)
	check(s.t, s.e.AddOwner(o, id))
	s.spaces[sp] = o
	if len(fields) > 0 {
		s.p.DeclareSpace(sp, fields)
	}
	return o
}

// store stores a prefix, with the bytes that its pages have, and answers how many of its pages
// found room or were held.
func (s *side) store(sp *tiers.Space, hashes []byte) (pages int) {
	s.t.Helper()
	o := s.open(sp)
	res, grants, err := s.e.PrepareStore(o, 0, nil, hashes, nil)
	check(s.t, err)
	for _, g := range grants {
		mem := s.memory[g.Region].Bytes()[g.Offset:]
		for i := range int(g.Pages) {
			d := (int(g.Page) + i) * 32
			pattern(mem[i*pageSize:(i+1)*pageSize], sp, hashes[d:d+32])
		}
	}
	if res.Store != 0 {
		check(s.t, s.e.CommitStore(o, res.Store, nil))
	}
	return len(hashes)/32 - res.Shed
}

func (s *side) clear(sp *tiers.Space) {
	for _, st := range s.e.Spaces() {
		if st.Fingerprint == sp.Fingerprint {
			s.e.ClearSpace(st.ID)
		}
	}
}

func run(sp *tiers.Space, hashes []byte) tiers.Run { return tiers.Run{Space: sp, Hashes: hashes} }

// hinted is how many pages of a prefix some peer is said to hold, without a gap.
func (s *side) hinted(sp *tiers.Space, hashes []byte) (pages int) {
	r := run(sp, hashes)
	held := make([]uint16, r.Chunks())
	s.p.Contains(r, held)
	for i, n := range held {
		pages += int(n)
		if int(n) < r.Chunk(i).Pages() {
			break
		}
	}
	return pages
}

func (s *side) learns(sp *tiers.Space, hashes []byte, pages int) {
	s.t.Helper()
	eventually(s.t, fmt.Sprintf("%s hears that %d pages are held", s.name, pages),
		func() bool { return s.hinted(sp, hashes) == pages })
}

type loan struct {
	Loan
	chunk int
	run   tiers.Run
}

func (s *side) borrow(sp *tiers.Space, hashes []byte) ([]loan, int, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var loans []loan
	pages, err := s.p.Borrow(ctx, run(sp, hashes),
		func(chunk int, l Loan) { loans = append(loans, loan{l, chunk, run(sp, hashes)}) })
	sum := 0
	for i, l := range loans {
		if l.chunk != i {
			s.t.Errorf("chunk %d was lent as number %d", l.chunk, i)
		}
		sum += l.Pages
	}
	if sum != pages {
		s.t.Errorf("%d pages were lent, said to be %d", sum, pages)
	}
	return loans, pages, err
}

// borrows borrows until so many pages come: regions may still be on their way.
func (s *side) borrows(sp *tiers.Space, hashes []byte, want int) []loan {
	s.t.Helper()
	var got []loan
	eventually(s.t, fmt.Sprintf("%s borrows %d pages", s.name, want), func() bool {
		loans, pages, _ := s.borrow(sp, hashes)
		if pages == want {
			got = loans
			return true
		}
		if pages > want {
			s.t.Fatalf("%s borrows %d pages, not %d", s.name, pages, want)
		}
		s.giveBack(loans, false)
		return false
	})
	return got
}

// reads waits until so many regions of a lender can be read.
func (s *side) reads(lender uint64, regions int) {
	s.t.Helper()
	eventually(s.t, fmt.Sprintf("%s reads %d regions of %x", s.name, regions, lender), func() bool {
		s.p.mu.Lock()
		b := s.p.peers[lender]
		s.p.mu.Unlock()
		if b == nil {
			return false
		}
		b.mu.Lock()
		defer b.mu.Unlock()
		ready := 0
		for _, r := range b.regions {
			if r.ready {
				ready++
			}
		}
		return ready == regions
	})
}

// all is the number of a peer that is said to hold all of a run, or -1.
func (s *side) all(r tiers.Run) int {
	pages, by := s.p.Contains(r, make([]uint16, r.Chunks()))
	if pages < r.Pages() {
		return -1
	}
	return by
}

// ask borrows by Ask; asked says whether that was a matter of one message.
func (s *side) ask(r tiers.Run) (loans []loan, pages int, asked bool) {
	s.t.Helper()
	answer := make(chan []loan, 2)
	all := s.all(r)
	if all < 0 {
		return nil, 0, false
	}
	if !s.p.Ask(r, all, func(list []Loan) {
		var loans []loan
		for i, l := range list {
			loans = append(loans, loan{l, i, r})
		}
		answer <- loans
	}) {
		return nil, 0, false
	}
	select {
	case loans = <-answer:
	case <-time.After(patience):
		s.t.Fatal("who asked is told nothing")
	}
	for _, l := range loans {
		pages += l.Pages
	}
	return loans, pages, true
}

func (s *side) giveBack(loans []loan, bad bool) {
	var handles []uint64
	for _, l := range loans {
		handles = append(handles, l.Handle)
	}
	s.p.Return(handles, bad)
}

var errUnmapped = errors.New("the region is not mapped")

// verify reads what was lent where it lies, and compares it with what its pages are.
func (s *side) verify(loans []loan) error {
	want := make([]byte, pageSize)
	for _, l := range loans {
		s.mu.Lock()
		m := s.mapped[regionID{l.Peer, l.Region}]
		if m != nil {
			m.users++
		}
		s.mu.Unlock()
		if m == nil {
			return fmt.Errorf("%w: %d of %x", errUnmapped, l.Region, l.Peer)
		}
		c := l.run.Chunk(l.chunk)
		var err error
		for i := range l.Pages {
			pattern(want, c.Space, c.Hashes[i*32:(i+1)*32])
			at := int(l.Offset) + i*pageSize
			if !bytes.Equal(m.mem[at:at+pageSize], want) {
				err = fmt.Errorf("FALSE HIT: page %d of chunk %d, lent by %x, has other bytes", i,
					l.chunk, l.Peer)
			}
		}
		s.mu.Lock()
		if m.users--; m.users == 0 {
			m.idle.Broadcast()
		}
		s.mu.Unlock()
		if err != nil {
			return err
		}
	}
	return nil
}

func (s *side) lenders() int {
	n := 0
	for _, l := range s.p.Status().Lenders {
		if l.Complete {
			n++
		}
	}
	return n
}

// lends waits until one loan of so many slots is all that is lent of an engine: one that its
// borrower could not use yet is on its way back.
func (s *side) lends(slots int) {
	s.t.Helper()
	eventually(s.t, fmt.Sprintf("%s lends %d slots", s.name, slots), func() bool {
		st := s.e.Stats()
		return st.OpenLoans == 1 && st.LeasedSlots == slots
	})
}

// noLoans waits until nothing of an engine is lent.
func (s *side) noLoans() {
	s.t.Helper()
	eventually(s.t, s.name+" has back what it lent",
		func() bool { return s.e.Stats().OpenLoans == 0 })
}

func socketOf(dir string, gen uint64) string {
	return filepath.Join(dir, fmt.Sprintf("peer-%016x.sock", gen))
}

func seeded(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 7)) }
