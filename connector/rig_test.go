package connector_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"
	"golang.org/x/sys/unix"

	"lookaside/connector"
	"lookaside/dax"
	"lookaside/internal/leak"
	"lookaside/ipc"
	"lookaside/ipc/client"
	"lookaside/ipc/wire"
	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/stack"
	"lookaside/tiers/tiertest"
)

// clientEnv makes the test binary a client process instead: see process_test.go.
const clientEnv = "CONNECTOR_TEST_CLIENT"

func TestMain(m *testing.M) {
	if os.Getenv(clientEnv) != "" {
		clientMain()
		return
	}
	leak.Main(m)
}

// The geometry of most tests.
const (
	pageTokens = 16
	pageBytes  = 256
	perChunk   = 4
	patience   = 2 * time.Minute // for what comes at once, unless the machine is busy
)

func workerHello(engine string) *wire.Hello {
	return &wire.Hello{
		Role: wire.RoleWorker, EngineID: engine, PageTokens: pageTokens, PageBytes: pageBytes,
		PagesPerChunk: perChunk, DigestBytes: 32,
		Fields: []wire.Field{{Key: "dtype", Value: "float32"}, {Key: "model", Value: "small"}},
	}
}

func schedulerHello(engine string) *wire.Hello {
	return &wire.Hello{
		Role: wire.RoleScheduler, EngineID: engine, PageTokens: pageTokens, PagesPerChunk: perChunk,
		DigestBytes: 32,
		Fields:      []wire.Field{{Key: "model", Value: "small"}},
	}
}

// A rig is a Server with all that it works with: real engine, real sockets, real memory.
type rig struct {
	t        testing.TB
	dir      string
	engine   *engine.Engine
	stack    *stack.Stack
	tiers    []*tiertest.Memory
	server   *connector.Server
	lookups  *ipc.LookupSockets
	listener *ipc.Listener
	control  *dax.Control
	regions  []*dax.Region
	cancel   context.CancelFunc
	served   chan error
	lmcache  [2]string // worker's and scheduler's endpoint

	options rigOptions
	log     *zap.Logger
	there   map[uint32]bool         // the regions that the engine has
	pieces  map[uint32]engine.Piece // of the engine
}

type rigOptions struct {
	regionBytes int64         // of the first region; 0: 1 MiB
	spaces      int           // 0: 4
	maxPages    int           // 0: 4096
	lease       time.Duration // 0: an hour, so that none runs out, however slow the machine
	now         func() int64  // the engine's clock; nil: the real one
	share       float64
	joint       float64       // 0: 1
	frozenAfter time.Duration // 0: the Server's default
	lmcache     bool
	log         *zap.Logger              // nil: none, but where tests are verbose
	tiers       []tiertest.MemoryOptions // below the arena
	makeRoom    func(g tiers.Geometry, slots int)
	preparing   bool // no region is there at first; see connector.Config
	onHeld      func(fds []int)
}

func newRig(t testing.TB, o rigOptions) *rig {
	t.Helper()
	if o.regionBytes == 0 {
		o.regionBytes = 1 << 20
	}
	if o.spaces == 0 {
		o.spaces = 4
	}
	if o.maxPages == 0 {
		o.maxPages = 4096
	}
	if o.lease == 0 {
		o.lease = time.Hour
	}
	if o.share == 0 {
		o.share = 1
	}
	dir, err := os.MkdirTemp("", "la") // t.TempDir's names are too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	log := o.log
	if log == nil {
		log = zap.NewNop()
	}
	if testing.Verbose() && o.log == nil {
		log = zaptest.NewLogger(t, zaptest.Level(zap.InfoLevel))
	}
	r := &rig{t: t, dir: dir, options: o, log: log, there: map[uint32]bool{},
		pieces: map[uint32]engine.Piece{}}
	for _, mo := range o.tiers {
		r.tiers = append(r.tiers, tiertest.NewMemory(mo))
	}
	r.listener, err = ipc.Listen(dir, ipc.Options{MaxSessions: 64, Log: log})
	check(t, err)
	r.openEngine()
	r.openLookups()
	r.serve()
	if !o.preparing {
		r.grow(o.regionBytes)
	}
	t.Cleanup(r.close)
	return r
}

// openEngine makes the engine and all that works on it, except what has sockets.
func (r *rig) openEngine() {
	r.t.Helper()
	o := &r.options
	bell := stack.NewBell()
	var list []stack.TierConfig
	for i, m := range r.tiers {
		list = append(list, stack.TierConfig{
			Name: fmt.Sprintf("t%d", i), Tier: m, LookupTimeout: patience, LoadTimeout: patience,
			StoreTimeout: patience,
		})
	}
	pieces := r.pieces
	var err error
	r.engine, err = engine.New(engine.Config{
		Now: o.now, LeaseDeadline: o.lease, MaxSpaces: o.spaces, MaxOwners: 129,
		MaxPages: o.maxPages, OwnerShare: o.share, JointShare: o.joint, ArenaLimitBytes: 16 << 20,
		Tiers: stack.Admissions(list), Wake: bell.Ring, PartialDelay: 10 * time.Millisecond,
		JournalBytes: 1 << 20,
		OnCarve:      func(p engine.Piece) { pieces[p.Num] = p },
		OnUncarve:    func(num uint32) { delete(pieces, num) },
	})
	check(r.t, err)
	r.stack, err = stack.New(stack.Config{
		Engine: r.engine, Bell: bell, Log: r.log, Tiers: list, LookupDeadline: patience,
		Arena: func(id uint32) []byte { return r.regions[id].Bytes() },
	})
	check(r.t, err)
	r.control, err = dax.NewControl(77)
	check(r.t, err)
	r.server = connector.New(connector.Config{
		Log: r.log, Engine: r.engine, Stack: r.stack, Generation: 77, Control: r.control,
		MaxSpaces: o.spaces, MaxPages: o.maxPages, Lease: o.lease, ArenaLimit: 16 << 20,
		MakeRoom:    o.makeRoom,
		FrozenAfter: o.frozenAfter, Preparing: o.preparing, OnHeld: o.onHeld,
	})
}

func (r *rig) openLookups() {
	r.t.Helper()
	lo := ipc.LookupOptions{Limits: r.server.Limits(), Tick: 20 * time.Millisecond, Log: r.log}
	if r.options.lmcache {
		r.lmcache = [2]string{"ipc://" + r.dir + "/lmw.sock", "ipc://" + r.dir + "/lms.sock"}
		lo.LMCacheWorker, lo.LMCacheScheduler = r.lmcache[0], r.lmcache[1]
	}
	var err error
	r.lookups, err = ipc.NewLookupSockets(r.dir, lo, r.server)
	check(r.t, err)
	r.server.SetLookupSockets(r.lookups)
}

func (r *rig) serve() {
	ctx, cancel := context.WithCancel(context.Background())
	server, listener, served := r.server, r.listener, make(chan error, 1)
	r.cancel, r.served = cancel, served
	go func() { served <- server.Serve(ctx, listener) }()
}

// grow adds a region.
func (r *rig) grow(size int64) {
	r.t.Helper()
	reg, err := dax.Create(context.Background(), dax.Options{Kind: dax.KindMemfd, SizeBytes: size,
		NUMANode: dax.NoNUMANode})
	check(r.t, err)
	r.regions = append(r.regions, reg)
	id := uint32(len(r.regions) - 1)
	check(r.t, r.server.AddRegion(id, reg, 0))
	r.there[id] = true
}

// close ends everything and audits the engine: nothing may be held for a session that is gone.
func (r *rig) close() {
	r.cancel()
	if err := <-r.served; err != nil {
		r.t.Errorf("Serve: %v", err)
	}
	r.server.Close()
	r.stack.Close()
	r.audit()
	for _, m := range r.tiers {
		check(r.t, m.Close())
	}
	if err := errors.Join(r.lookups.Close(), r.listener.Close(), r.control.Close()); err != nil {
		r.t.Error(err)
	}
	r.engine.Close()
	for _, reg := range r.regions {
		check(r.t, reg.Close())
	}
	left, _ := os.ReadDir(r.dir)
	for _, e := range left {
		if e.Name() != "lock" {
			r.t.Errorf("%s was left behind", e.Name())
		}
	}
	check(r.t, os.RemoveAll(r.dir))
}

// audit checks the engine's invariants, and that no lease is left.
func (r *rig) audit() {
	r.t.Helper()
	if err := r.engine.Check(); err != nil {
		r.t.Errorf("engine: %v", err)
	}
	st := r.engine.Stats()
	if st.Leases != 0 || st.LeasedSlots != 0 || st.OpenLookups != 0 || st.OpenLoads != 0 ||
		st.OpenStores != 0 || st.FillingSlots != 0 {
		r.t.Errorf("left behind: %d leases on %d slots, %d lookups, %d loads, %d stores, %d slots being filled",
			st.Leases, st.LeasedSlots, st.OpenLookups, st.OpenLoads, st.OpenStores, st.FillingSlots)
	}
	if st.FreeSlots+st.ReadySlots != st.Slots {
		r.t.Errorf("%d free + %d ready slots of %d", st.FreeSlots, st.ReadySlots, st.Slots)
	}
}

// eventually waits for a condition.
func (r *rig) eventually(what string, cond func() bool) {
	r.t.Helper()
	start := time.Now()
	for !cond() {
		if time.Since(start) > patience {
			r.t.Fatalf("it never came: %s; engine %+v", what, r.engine.Stats())
		}
		time.Sleep(time.Millisecond)
	}
}

// within is eventually for what must come within some time. It is told by a clock that stands still
// while this process does: each of its milliseconds is one in which the process ran, so that a
// machine which is busy, or stands still, does not make it run out.
func (r *rig) within(d time.Duration, what string, cond func() bool) {
	r.t.Helper()
	for range d / time.Millisecond {
		if cond() {
			return
		}
		time.Sleep(time.Millisecond)
	}
	if !cond() {
		r.t.Fatalf("it did not come within %v: %s; engine %+v", d, what, r.engine.Stats())
	}
}

func (r *rig) errorCount(kind string) uint64 { return r.server.Counters().Errors[kind] }

// A worker is a client in the worker's role, in this process, with the arena mapped.
type worker struct {
	t        testing.TB
	ses      *client.Session
	perChunk uint32
	regions  map[uint32][]byte
	gone     map[uint32]bool // regions that there were
}

func (r *rig) worker(h *wire.Hello) *worker {
	r.t.Helper()
	w, err := dialWorker(r.dir, h)
	check(r.t, err)
	w.t = r.t
	r.t.Cleanup(w.close)
	return w
}

func dialWorker(dir string, h *wire.Hello) (*worker, error) {
	ses, err := client.Dial(dir, h, patience)
	if err != nil {
		return nil, err
	}
	w := &worker{ses: ses, perChunk: h.PagesPerChunk, regions: map[uint32][]byte{},
		gone: map[uint32]bool{}}
	for range ses.Welcome.Regions {
		if _, err := w.recv(true); err != nil {
			w.close()
			return nil, err
		}
	}
	return w, nil
}

// recv receives one packet; regions that come are mapped and those that go unmapped, which is
// skipped unless the caller wants to see it.
func (w *worker) recv(regions bool) ([]byte, error) {
	for {
		b, files, err := w.ses.Recv(patience)
		if err != nil {
			return nil, err
		}
		t, _ := wire.Peek(b)
		switch t {
		case wire.TypeRegionAdded:
			err = w.mapRegion(b, files)
		case wire.TypeRegionRemoved:
			err = w.unmapRegion(b)
		default:
			return b, nil
		}
		if err != nil || regions {
			return b, err
		}
	}
}

// readsToTheEnd reads what the sidecar has sent, until it has ended the session.
func (w *worker) readsToTheEnd() {
	for {
		_, files, err := w.ses.Recv(patience)
		for _, f := range files {
			f.Close()
		}
		if err != nil {
			return
		}
	}
}

func (w *worker) mapRegion(b []byte, files []*os.File) error {
	var m wire.RegionAdded
	if err := m.Decode(b, &wire.DefaultLimits); err != nil {
		return err
	}
	if len(files) != 1 {
		return fmt.Errorf("region %d came with %d files", m.Region, len(files))
	}
	defer files[0].Close()
	if _, there := w.regions[m.Region]; there || w.gone[m.Region] {
		return fmt.Errorf("region %d came again", m.Region)
	}
	mem, err := unix.Mmap(int(files[0].Fd()), int64(m.Offset), int(m.SizeBytes),
		unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	w.regions[m.Region] = mem
	return w.ses.Send(&wire.RegionMapped{Region: m.Region})
}

func (w *worker) unmapRegion(b []byte) error {
	var m wire.RegionRemoved
	if err := m.Decode(b, &wire.DefaultLimits); err != nil {
		return err
	}
	mem, there := w.regions[m.Region]
	if !there {
		return fmt.Errorf("region %d goes, and never came", m.Region)
	}
	delete(w.regions, m.Region)
	w.gone[m.Region] = true
	return errors.Join(unix.Munmap(mem), w.ses.Send(&wire.RegionUnmapped{Region: m.Region}))
}

// call sends a request and decodes its answer.
func (w *worker) call(request, reply wire.Message) error {
	if err := w.ses.Send(request); err != nil {
		return err
	}
	b, err := w.recv(false)
	if err != nil {
		return err
	}
	if t, _ := wire.Peek(b); t == wire.TypeError {
		var e wire.Error
		if err := e.Decode(b, &wire.DefaultLimits); err != nil {
			return err
		}
		return (*client.CallError)(&e)
	}
	return reply.Decode(b, &wire.DefaultLimits)
}

// sync returns when the sidecar has handled all that was sent before.
func (w *worker) sync() {
	w.t.Helper()
	var pong wire.Pong
	id := w.ses.NextID()
	check(w.t, w.call(&wire.Ping{ID: id}, &pong))
	if pong.ID != id || pong.Generation != 77 {
		w.t.Fatalf("pong %+v to ping %d", pong, id)
	}
}

func (w *worker) close() {
	w.ses.Close()
	for _, m := range w.regions {
		_ = unix.Munmap(m)
	}
	w.regions = nil
}

// prepare asks for room for the pages from first on.
func (w *worker) prepare(p prefix, first, pages int) (wire.StoreGrant, error) {
	m := wire.PrepareStore{ID: w.ses.NextID(), FirstPage: uint32(first),
		Hashes: p.hashes(first, pages)}
	if first > 0 {
		m.Prev = p.hashes(first-1, 1)
	}
	var g wire.StoreGrant
	err := w.call(&m, &g)
	if err == nil && g.ID != m.ID {
		err = fmt.Errorf("grant %d to request %d", g.ID, m.ID)
	}
	return g, err
}

// fill writes the pages of a grant into the arena.
func (w *worker) fill(p prefix, grants []wire.Extent) error {
	for _, g := range grants {
		for i := range int(g.Pages) {
			dst, err := w.page(g, i)
			if err != nil {
				return err
			}
			copy(dst, p.content(int(g.Page)+i))
		}
	}
	return nil
}

// page is page i of an extent in the arena, checked as a client must.
func (w *worker) page(e wire.Extent, i int) ([]byte, error) {
	mem, off := w.regions[e.Region], e.Offset+uint64(i)*pageBytes
	if mem == nil || off > uint64(len(mem)) || uint64(len(mem))-off < pageBytes {
		return nil, fmt.Errorf("extent %+v is in no region that is mapped", e)
	}
	return mem[off:][:pageBytes], nil
}

// store stores pages of a prefix and waits until they are visible.
func (w *worker) store(p prefix, first, pages int) {
	w.t.Helper()
	g, err := w.prepare(p, first, pages)
	check(w.t, err)
	if g.Shed != 0 {
		w.t.Fatalf("%d pages shed", g.Shed)
	}
	if g.Store == 0 {
		return
	}
	check(w.t, w.fill(p, g.Grants))
	check(w.t, w.ses.Send(&wire.CommitStore{Store: g.Store}))
	w.sync()
}

// load takes over a lookup, checks the bytes of each of its pages, and leaves the load open.
func (w *worker) load(s *scheduler, lookup uint64, p prefix, first,
	pages int) (wire.LoadGrant, error) {
	names := wire.NamesOf(p.hashes(first, pages), 32, first, int(w.perChunk))
	m := wire.PrepareLoad{
		ID: w.ses.NextID(), Session: s.ses.Welcome.Session, Lookup: lookup,
		Ticket:    s.ses.Ticket(lookup),
		FirstPage: uint32(first), Pages: uint32(pages), Names: names[:],
	}
	var g wire.LoadGrant
	if err := w.call(&m, &g); err != nil {
		return g, err
	}
	if !bytes.Equal(g.Names, names[:]) {
		return g, errors.New("the grant names other pages")
	}
	return g, w.verify(p, g.Extents, first, pages)
}

func (w *worker) verify(p prefix, extents []wire.Extent, first, pages int) error {
	next := first
	for _, e := range extents {
		if int(e.Page) != next {
			return fmt.Errorf("extent of page %d, expected %d", e.Page, next)
		}
		for i := range int(e.Pages) {
			src, err := w.page(e, i)
			if err != nil {
				return err
			}
			if string(src) != string(p.content(next)) {
				return fmt.Errorf("page %d of prefix %v has other bytes", next, p)
			}
			next++
		}
	}
	if next != first+pages {
		return fmt.Errorf("extents end at page %d, asked for %d pages from %d", next, pages, first)
	}
	return nil
}

// A scheduler is a client in the scheduler's role.
type scheduler struct {
	t       testing.TB
	r       *rig
	ses     *client.Session
	lookups *client.Lookups
	next    uint64
	memory  bool // the last lookup's hit is in memory

	recomputeUs uint32 // of its lookups
}

func (r *rig) scheduler(h *wire.Hello) *scheduler {
	r.t.Helper()
	ses, err := client.Dial(r.dir, h, patience)
	check(r.t, err)
	l, err := ses.Lookups()
	check(r.t, err)
	s := &scheduler{t: r.t, r: r, ses: ses, lookups: l}
	r.t.Cleanup(s.close)
	return s
}

// lookup asks for pages and returns the lookup's id and how many hit.
func (s *scheduler) lookup(p prefix, first, pages int) (id uint64, hit int) {
	s.t.Helper()
	s.next++
	r, err := s.lookups.Lookup(&wire.Lookup{
		Session: s.ses.Welcome.Session, Secret: s.ses.Welcome.Secret, Lookup: s.next,
		FirstPage: uint32(first), Hashes: p.hashes(first, pages), RecomputeUs: s.recomputeUs,
	}, patience)
	if err != nil {
		s.t.Fatalf("lookup: %v; lookup sockets: %+v", err, s.r.lookups.Stats())
	}
	if r.HitTokens != r.HitPages*pageTokens {
		s.t.Errorf("%d pages are %d tokens", r.HitPages, r.HitTokens)
	}
	s.memory = r.InMemory
	return s.next, int(r.HitPages)
}

func (s *scheduler) cancel(lookup uint64) {
	check(s.t, s.lookups.Send((&wire.Cancel{Session: s.ses.Welcome.Session,
		Secret: s.ses.Welcome.Secret, Lookup: lookup}).Append(nil)))
}

func (s *scheduler) trim(lookup uint64, first int) {
	check(s.t, s.lookups.Send((&wire.Trim{Session: s.ses.Welcome.Session,
		Secret: s.ses.Welcome.Secret, Lookup: lookup, FirstPage: uint32(first)}).Append(nil)))
}

func (s *scheduler) close() {
	if s.lookups != nil {
		_ = s.lookups.Close()
		s.lookups = nil
	}
	s.ses.Close()
}

// A prefix is a made-up prompt: its pages come in stretches, each of which is all the same number.
// Prefixes share the pages up to the first that differs.
type prefix struct {
	stretches [4]uint8
	stretch   int // pages of a stretch
}

func (p prefix) digest(page int) [32]byte {
	h := p.hashes(page, 1)
	return [32]byte(h)
}

// hashes chains the digests from the first page on, so that each names all that comes before it:
// the engine relies on it.
func (p prefix) hashes(first, pages int) []byte {
	out := make([]byte, 0, pages*32)
	var d [32]byte
	for i := range first + pages {
		token := p.stretches[min(i/p.stretch, len(p.stretches)-1)]
		d = sha256.Sum256(append(d[:], token))
		if i >= first {
			out = append(out, d[:]...)
		}
	}
	return out
}

// content is the KV bytes of a page: made of its hash, so that another page's are never taken for
// them.
func (p prefix) content(page int) []byte {
	d := p.digest(page)
	out := make([]byte, 0, pageBytes)
	for len(out) < pageBytes {
		d = sha256.Sum256(d[:])
		out = append(out, d[:]...)
	}
	return out[:pageBytes]
}

func onePrefix(n uint8) prefix { return prefix{stretches: [4]uint8{n, n, n, n}, stretch: 1000} }

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantCode(t testing.TB, err error, code string) {
	t.Helper()
	var e *client.CallError
	if !errors.As(err, &e) || e.Code != code {
		t.Errorf("got %v, want the error %q", err, code)
	}
}

func hexOf(b []byte) string { return hex.EncodeToString(b) }
