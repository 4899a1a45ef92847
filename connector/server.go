package connector

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"lookaside/dax"
	"lookaside/internal/demand"
	"lookaside/ipc"
	"lookaside/ipc/wire"
	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/stack"
	"lookaside/tiers/tenant"
)

// handshakePatience is how long a client may take from connecting to its Hello.
const handshakePatience = 10 * time.Second

// Config configures a Server. All fields are required except LMCacheEngine, ExtraFields and those
// that may be zero or nil.
type Config struct {
	Log        *zap.Logger
	Engine     *engine.Engine
	Stack      *stack.Stack // over the engine; lookups and what ends them go through it
	Generation uint64       // of this run of the sidecar
	Control    *dax.Control // its fd goes to every client; the state is set by the owner

	MaxSpaces  int           // spaces held side by side
	MaxPages   int           // pages that one lookup is answered for, and one store may name
	Lease      time.Duration // told to clients; the engine enforces it
	ArenaLimit int64         // bytes; a chunk must fit
	// FrozenAfter is how long a client that holds something may be silent before it counts as
	// frozen. 0 means 3 s.
	FrozenAfter time.Duration
	// LMCacheEngine is the engine whose pages LMCache's lookups ask for. "" means the only
	// space that LMCache's hashes fit.
	LMCacheEngine string

	// Tenants has the tenants that requests name, and counts what they ask for. The engine has the
	// same. Default: all that have a name are tenant.Other.
	Tenants *tenant.Registry

	// ExtraFields are added to every space, as if its worker had declared them. They describe what
	// the sidecar does to pages, so that differently treated pages are of different spaces.
	ExtraFields []wire.Field

	// ObserveLookup is called for each finished lookup, from the goroutine that replies. Calls may
	// come from several goroutines. It must not block or allocate. May be nil.
	ObserveLookup func(hitTokens int, took time.Duration)
	// Demand watches what clients ask for. Default: nothing does.
	Demand *demand.Demand

	// Elsewhere returns how many pages of a run, as whole chunks from its first page on, can be
	// loaded from elsewhere. They are not stored here. It may take a few milliseconds. May be nil.
	Elsewhere func(run tiers.Run) (pages int)

	// Peers returns the id of the group of sidecars that lend to each other; 0 if this one is
	// alone. Clients are sent it when they connect. Workers of one group that hold the same pages
	// may then share the stores, each asking for every n-th chunk. May be nil.
	Peers func() uint64

	// UnsharedPeers returns the spaces that differ by accident from a space of another sidecar. May
	// be nil.
	UnsharedPeers func() []Unshared

	// OnSpace is called for each space that a worker declares first, with the declared fields,
	// before the space is used. The caller holds Server.mu. May be nil.
	OnSpace func(sp *tiers.Space, fields []wire.Field)

	// Preparing says that the arena's first regions are still found or made, and that
	// [Server.RegionsReady] will be called. Workers are told so when they connect.
	Preparing bool

	// OnHeld is called with the descriptors that a worker has sent with its Hello, at least one:
	// those of the memory that it still has from an earlier session. They may be of anything. The
	// callee owns them. Calls come from several goroutines. nil: they are closed.
	OnHeld func(fds []int)

	// MakeRoom is called with the number of slots that will be needed: 1 for each worker that
	// connects, then the chunks of each store. A store waits for the call only if there is no room
	// for it. While a call for a worker goes on, stores of that worker with room may be left out.
	// Nothing else waits, so MakeRoom may wait for any session, such as in RetractRegion. Several
	// goroutines call it. May be nil.
	MakeRoom func(g tiers.Geometry, slots int)
}

// Server owns the sessions of one sidecar. Its methods may be called from any goroutine.
type Server struct {
	cfg          Config
	log          *zap.Logger
	engine       *engine.Engine
	stack        *stack.Stack
	lookups      *ipc.LookupSockets
	count        counters
	limits       wire.Limits   // of sessions' messages
	lookupLimits wire.Limits   // of lookups
	wanted       chan struct{} // see Wanted
	draining     atomic.Bool
	drains       chan struct{}  // closed when draining is set
	wg           sync.WaitGroup // the goroutines of connections

	native struct { // used by HandleLookup and HandleLMCache, on one goroutine
		lookup wire.Lookup
		trim   wire.Trim
		cancel wire.Cancel
		advise wire.Advise
		query  stack.Query
	}
	lmcache lmcacheState

	// Handing over to another process: see handover.go.
	mode        atomic.Int32 // written with mu held
	changing    atomic.Int64 // requests under way that change the arena
	holdPartial atomic.Bool
	held        heldLookups

	advices advices
	ends    ends

	mu        sync.Mutex // guards the fields below
	closed    bool
	conns     map[*ipc.Conn]struct{}   // every accepted connection, welcomed or not
	sessions  map[uint64]*session      // welcomed, or about to be
	lingering map[*session]*lingerInfo // sessions that linger; they are not in sessions
	frozen    map[*session]frozenInfo  // sessions found frozen; the map is replaced, never changed
	instances map[instanceKey]*instance
	spaces    []*space
	regions   []Region
	retracted map[uint32]struct{} // ids of regions that are gone
	preparing bool                // see Config.Preparing

	modeChanged chan struct{}      // closed, and made anew, when the mode changes
	stopAccept  context.CancelFunc // interrupts the present Accept; nil: there was none
	shaking     int                // handshakes under way
	parked      []parked           // once frozen

	frail atomic.Int32 // how many of regions are the arena's and may fail; see Region.mayFail
}

// New returns a Server that does not accept sessions yet. Call [Server.SetLookupSockets] and then
// [Server.Serve].
func New(cfg Config) *Server {
	limits := wire.DefaultLimits
	limits.Pages = cfg.MaxPages
	// A lookup that names more than MaxPages gets a reply for the first MaxPages. So it must be
	// decoded, by the protocol's limit.
	lookupLimits := wire.DefaultLimits
	lookupLimits.Pages = max(lookupLimits.Pages, cfg.MaxPages)
	if cfg.FrozenAfter == 0 {
		cfg.FrozenAfter = defaultFrozenAfter
	}
	if cfg.Tenants == nil {
		cfg.Tenants, _ = tenant.New(tenant.Config{}) // it has no names to refuse
	}
	return &Server{
		cfg:          cfg,
		log:          cfg.Log,
		engine:       cfg.Engine,
		stack:        cfg.Stack,
		limits:       limits,
		lookupLimits: lookupLimits,
		wanted:       make(chan struct{}, 1),
		drains:       make(chan struct{}),
		conns:        make(map[*ipc.Conn]struct{}),
		sessions:     make(map[uint64]*session),
		lingering:    make(map[*session]*lingerInfo),
		instances:    make(map[instanceKey]*instance),
		retracted:    make(map[uint32]struct{}),
		preparing:    cfg.Preparing,
		modeChanged:  make(chan struct{}),
		advices:      advices{turn: make(chan struct{}, maxFollowing)},
	}
}

// Limits returns the limits that lookups are decoded by. The lookup sockets need the same.
func (s *Server) Limits() wire.Limits { return s.lookupLimits }

// SetLookupSockets sets the sockets whose Handler the Server is. It must be called once, before
// Serve.
func (s *Server) SetLookupSockets(l *ipc.LookupSockets) { s.lookups = l }

// Wanted returns a channel that receives when a store has found too little room, or when the arena
// may have become fuller or emptier.
func (s *Server) Wanted() <-chan struct{} { return s.wanted }

// Serve accepts sessions until the listener is closed or ctx is done. It does not wait for the
// sessions.
func (s *Server) Serve(ctx context.Context, l *ipc.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	var watch sync.WaitGroup
	watch.Go(func() { s.watchFrozen(ctx) })
	watch.Go(func() { s.tellUnshared(ctx) })
	defer watch.Wait()
	defer cancel()
	for {
		turn, cancelTurn, err := s.acceptTurn(ctx)
		if err != nil {
			return nil
		}
		conn, err := l.Accept(turn)
		interrupted := turn.Err() != nil
		cancelTurn()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, ipc.ErrClosed) {
				return nil
			}
			if interrupted {
				continue
			}
			return fmt.Errorf("accept a session: %w", err)
		}
		if !s.attend(conn, func() (kept bool) { return s.serveConn(conn, l, nil, nil) }) {
			return nil
		}
	}
}

// attend runs serve for a connection on a goroutine of its own, and closes the connection unless
// serve has kept it. It returns false, with the connection closed, if the Server is closed.
func (s *Server) attend(conn *ipc.Conn, serve func() (kept bool)) bool {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		conn.Close()
		return false
	}
	s.conns[conn] = struct{}{}
	s.wg.Add(1)
	s.mu.Unlock()
	go func() {
		defer s.wg.Done()
		if serve() {
			return
		}
		conn.Close()
		conn.Recycle()
		s.mu.Lock()
		delete(s.conns, conn)
		s.mu.Unlock()
	}()
	return true
}

// Drain refuses new sessions and stores, and waits until the open stores and loads are finished or
// ctx is done. It does not wait for those of lingering sessions, which nobody can finish.
func (s *Server) Drain(ctx context.Context) error {
	s.refuseStores()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		stores, loads := s.underWay()
		if stores == 0 && loads == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d stores and %d loads were still under way: %w", stores, loads,
				context.Cause(ctx))
		case <-tick.C:
		}
	}
}

func (s *Server) refuseStores() {
	if s.draining.CompareAndSwap(false, true) {
		close(s.drains)
	}
}

// underWay counts the stores and loads of the sessions that do not linger.
func (s *Server) underWay() (stores, loads int) {
	s.mu.Lock() // leases of lingering sessions are freed under mu, so that the two counts agree
	defer s.mu.Unlock()
	st := s.engine.Stats()
	stores, loads = st.OpenStores, st.OpenLoads
	for _, l := range s.lingering {
		stores -= l.stores
		loads -= l.loads
	}
	return stores, loads
}

// Close ends every session, frees what they hold and waits for their goroutines. Serve must have
// returned. The lookup sockets must be closed after it. It is idempotent.
func (s *Server) Close() {
	s.refuseStores()
	s.mu.Lock()
	s.closed = true
	conns := make([]*ipc.Conn, 0, len(s.conns))
	for c := range s.conns {
		conns = append(conns, c)
	}
	s.mu.Unlock()
	for _, c := range conns {
		c.Close()
	}
	s.wg.Wait()
	s.advices.wg.Wait()
	s.mu.Lock()
	left := s.parked
	s.parked = nil
	s.mu.Unlock()
	for _, p := range left {
		closeAll(p.held)
		p.conn.Close()
		p.conn.Recycle()
	}
	s.closeLMCache()
}

// Sessions returns the number of sessions without those that linger.
func (s *Server) Sessions() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.sessions)
}

// refusal is a wire.Refuse as an error.
type refusal struct{ wire.Refuse }

func (r *refusal) Error() string {
	if r.Field == "" {
		return fmt.Sprintf("%s: %s", r.Code, r.Message)
	}
	return fmt.Sprintf("%s: %s: want %q, got %q: %s", r.Code, r.Field, r.Want, r.Got, r.Message)
}

func refuse(code, message string) *refusal {
	return &refusal{wire.Refuse{Code: code, Message: message}}
}

func refuseMismatch(code string, m mismatch, message string) *refusal {
	return &refusal{wire.Refuse{Code: code, Field: m.field, Want: m.want, Got: m.got,
		Message: message}}
}

// refusalNames are the codes of refusals, for the counters.
var refusalNames = [...]string{
	wire.RefuseVersion, wire.RefuseIncompatible, wire.RefuseNoWorker, wire.RefuseBusy,
	wire.RefuseDraining, wire.RefuseLimit, wire.RefuseMalformed,
}

const refusals = len(refusalNames)

// admit makes a session for the client that sent h, or returns a refusal. It also returns the
// regions that a worker must be sent, and whether RegionsReady will tell it of more. The session is
// in the maps and an owner in the engine. The caller must end it with s.leave, and unlock its
// sendMu after the handshake.
func (s *Server) admit(h *wire.Hello, conn *ipc.Conn) (_ *session, _ []Region, preparing bool,
	_ *refusal) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if h.Role == wire.RoleWorker {
		h = withFields(h, s.cfg.ExtraFields)
		s.makeSpaceRoom(h)
	}
	if s.draining.Load() || s.closed {
		return nil, nil, false, refuse(wire.RefuseDraining, "the sidecar is shutting down")
	}
	key := instanceKey{h.EngineID, h.Rank}
	inst := s.instances[key]
	var sp *space
	if h.Role == wire.RoleWorker {
		var r *refusal
		if sp, r = s.spaceFor(h); r != nil {
			return nil, nil, false, r
		}
		if inst != nil && inst.space != sp {
			diff := compare(&inst.space.hello, h, false)
			return nil, nil, false, refuseMismatch(wire.RefuseIncompatible, diff[0],
				fmt.Sprintf("other sessions of engine %q, rank %d, use another space (%d fields differ)", h.EngineID, h.Rank, len(diff)))
		}
	} else {
		var r *refusal
		if sp, r = s.spaceOf(h); r != nil {
			return nil, nil, false, r
		}
		if diff := compare(&sp.hello, h, true); len(diff) > 0 {
			return nil, nil, false, refuseMismatch(wire.RefuseIncompatible, diff[0],
				fmt.Sprintf("the worker of engine %q, rank %d, declared another space (%d fields differ)", h.EngineID, h.Rank, len(diff)))
		}
	}

	id := s.newSessionID()
	if err := s.engine.AddOwner(engine.Owner(id), sp.id); err != nil {
		code := wire.RefuseLimit
		if errors.Is(err, tiers.ErrBusy) {
			code = wire.RefuseBusy
		}
		return nil, nil, false, refuse(code, err.Error())
	}
	if h.Ranks > 1 {
		if err := s.engine.SetTakers(engine.Owner(id), int(h.Ranks)); err != nil {
			return nil, nil, false, refuse(wire.RefuseBusy, err.Error()) // it is shutting down
		}
	}
	if inst == nil {
		inst = &instance{space: sp}
		s.instances[key] = inst
	}
	inst.sessions++
	sp.sessions++
	var regions []Region
	if h.Role == wire.RoleWorker {
		inst.workers++
		regions = slices.Clone(s.regions)
		preparing = s.preparing
	}
	ses := &session{
		server:    s,
		id:        id,
		owner:     engine.Owner(id),
		secret:    newSecret(),
		role:      h.Role,
		key:       key,
		ranks:     h.Ranks,
		about:     h.About,
		space:     sp,
		conn:      conn,
		since:     time.Now(),
		struck:    make(chan struct{}),
		mapping:   make(map[uint32]chan struct{}),
		unmapping: make(map[uint32]chan struct{}),
		stores:    make(map[uint64][]uint32),
		loads:     make(map[uint64][]uint32),
		begun:     make(map[uint64]time.Time),
		log:       s.sessionLog(id, h.Role, key, conn.Peer().PID),
	}
	// Locked until the handshake is sent, so that a region pushed meanwhile comes after it.
	ses.sendMu.Lock()
	s.sessions[id] = ses
	s.chooseLead(ses)
	s.count.sessionsOpened.Add(1)
	return ses, regions, preparing, nil
}

// spaceOf returns the space that the workers of all ranks of a scheduler have declared. The caller
// holds s.mu.
func (s *Server) spaceOf(h *wire.Hello) (*space, *refusal) {
	var sp *space
	for i := range h.Ranks {
		inst := s.instances[instanceKey{h.EngineID, h.Rank + i}]
		if inst == nil || inst.workers == 0 {
			// Ranks before this one have a session each, so a large number ends the loop soon.
			return nil, refuse(wire.RefuseNoWorker,
				fmt.Sprintf("no worker of engine %q, rank %d, is connected; it declares the space, so it comes first", h.EngineID, h.Rank+i))
		}
		if sp != nil && inst.space != sp {
			diff := compare(&sp.hello, &inst.space.hello, false)
			return nil, refuseMismatch(wire.RefuseIncompatible, diff[0],
				fmt.Sprintf("ranks %d and %d of engine %q have different spaces (%d fields differ)",
					h.Rank, h.Rank+i, h.EngineID, len(diff)))
		}
		sp = inst.space
	}
	return sp, nil
}

// spaceFor returns the space that a worker declares, and opens it if it is new. The caller holds
// s.mu.
func (s *Server) spaceFor(h *wire.Hello) (*space, *refusal) {
	geometry, bad := geometryOf(h, s.cfg.ArenaLimit)
	if bad != nil {
		return nil, refuseMismatch(wire.RefuseLimit, *bad, "the page geometry is out of bounds")
	}
	fp, err := fingerprintOf(h)
	if err != nil {
		return nil, refuse(wire.RefuseMalformed, err.Error())
	}
	for _, sp := range s.spaces {
		if sp.fingerprint == fp {
			return sp, nil
		}
	}
	if len(s.spaces) >= s.cfg.MaxSpaces {
		return nil, s.refuseSpace(h)
	}
	id, err := s.engine.OpenSpace(fp, geometry)
	if err != nil {
		return nil, refuse(wire.RefuseLimit, err.Error())
	}
	declared := &tiers.Space{Fingerprint: fp, Geometry: geometry, Element: elementOf(h.Fields)}
	s.stack.OpenSpace(id, declared)
	sp := &space{id: id, fingerprint: fp, geometry: geometry, declared: declared, hello: *h}
	sp.hello.Fields, sp.hello.About = slices.Clone(h.Fields), nil
	if s.cfg.OnSpace != nil {
		s.cfg.OnSpace(declared, sp.hello.Fields)
	}
	s.spaces = append(s.spaces, sp)
	return sp, nil
}

// refuseSpace returns the refusal of a worker when there are too many spaces. It names a field on
// which the closest of them differs. The caller holds s.mu.
func (s *Server) refuseSpace(h *wire.Hello) *refusal {
	var best []mismatch
	for _, sp := range s.spaces {
		if diff := compare(&sp.hello, h, false); best == nil || len(diff) < len(best) {
			best = diff
		}
	}
	return refuseMismatch(wire.RefuseIncompatible, best[0], fmt.Sprintf(
		"spaces.limit allows %d, and all of them have sessions, leases or pins; the closest one differs in %d fields", s.cfg.MaxSpaces, len(best)))
}

// spaceRoomPatience is how long emptySpace waits for chunks in use, such as those being copied to a
// tier.
const spaceRoomPatience = 2 * time.Second

// makeSpaceRoom makes room for the space that h declares if it is new and MaxSpaces are open. It
// drops the space used longest ago of those without a session, a lease or a pin. Chunks of that
// space in the arena are dropped. Those in the tiers stay, and are found again when the space is
// opened again. The caller holds s.mu, which is released while chunks are dropped.
func (s *Server) makeSpaceRoom(h *wire.Hello) {
	if _, bad := geometryOf(h, s.cfg.ArenaLimit); bad != nil {
		return
	}
	fp, err := fingerprintOf(h)
	if err != nil {
		return
	}
	tried := map[*space]bool{}
	for len(s.spaces) >= s.cfg.MaxSpaces && !s.draining.Load() {
		if slices.ContainsFunc(s.spaces, func(sp *space) bool { return sp.fingerprint == fp }) {
			return
		}
		if s.dropEmptySpaces(); len(s.spaces) < s.cfg.MaxSpaces {
			return
		}
		sp := s.coldestSpace(tried)
		if sp == nil {
			return
		}
		tried[sp] = true
		s.mu.Unlock()
		chunks := s.emptySpace(sp)
		s.mu.Lock()
		s.log.Info("dropped the space that was used longest ago, to make room for another: raise spaces.limit to keep more",
			zap.String("space", sp.fingerprint.Short()), zap.Any("fields", fieldsOf(&sp.hello)),
			zap.Int("chunks", chunks), zap.Int("spaces.limit", s.cfg.MaxSpaces),
			zap.String("for", fp.Short()))
	}
}

// coldestSpace returns the space used longest ago of those without a session, a lease or a pin and
// not in tried, or nil. The caller holds s.mu.
func (s *Server) coldestSpace(tried map[*space]bool) *space {
	var coldest *space
	last := uint64(math.MaxUint64)
	for _, sp := range s.spaces {
		if sp.sessions > 0 || tried[sp] {
			continue
		}
		if st, ok := s.engine.Space(sp.id); ok && st.Owners == 0 && st.Pinned == 0 &&
			st.LastUse < last {
			coldest, last = sp, st.LastUse
		}
	}
	return coldest
}

// emptySpace drops the chunks of a space in the arena and returns how many. It waits for chunks in
// use, at most for spaceRoomPatience.
func (s *Server) emptySpace(sp *space) (chunks int) {
	chunks = s.engine.ClearSpace(sp.id)
	for end := time.Now().Add(spaceRoomPatience); time.Now().Before(end); time.Sleep(
		time.Millisecond) {
		if st, ok := s.engine.Space(sp.id); !ok || st.Chunks == 0 || st.Owners > 0 {
			break
		}
	}
	return chunks
}

// dropEmptySpaces closes the spaces without chunks and sessions. The caller holds s.mu.
func (s *Server) dropEmptySpaces() {
	s.spaces = slices.DeleteFunc(s.spaces, func(sp *space) bool {
		if sp.sessions > 0 {
			return false
		}
		if s.lmcache.space == sp {
			s.dropLMCache()
		}
		return s.engine.CloseSpace(sp.id) == nil
	})
}

// newSessionID returns a random id that is not in use and not 0. The id is no secret: status and
// logs show it. The caller holds s.mu.
func (s *Server) newSessionID() uint64 {
	for {
		id := RandomID()
		if s.sessions[id] == nil && id != uint64(lmcacheOwner) {
			// The engine refuses the id of a session that lingers.
			return id
		}
	}
}

func newSecret() []byte {
	b := make([]byte, wire.SecretBytes)
	_, _ = rand.Read(b) // never fails
	return b
}

// RandomID returns a random number that is not 0.
func RandomID() uint64 {
	for {
		var b [8]byte
		_, _ = rand.Read(b[:]) // never fails
		if id := binary.LittleEndian.Uint64(b[:]); id != 0 && id != math.MaxUint64 {
			return id
		}
	}
}

// leave ends a session and frees everything that it holds. It is called once for each admitted
// session.
func (s *Server) leave(ses *session) {
	s.mu.Lock()
	_, lingers := s.lingering[ses]
	if lingers {
		s.stack.RemoveOwner(ses.owner)
		delete(s.lingering, ses)
	}
	s.mu.Unlock()
	if !lingers {
		s.stack.RemoveOwner(ses.owner)
		s.mu.Lock()
		s.strike(ses)
		s.mu.Unlock()
	}
	if ses.replies {
		s.lookups.RemoveSession(ses.id)
	}
	s.signalWanted()
}

// strike removes ses from the sessions, and from the counts of its space and instance. The caller
// holds s.mu.
func (s *Server) strike(ses *session) {
	delete(s.sessions, ses.id)
	close(ses.struck)
	ses.space.sessions--
	inst := s.instances[ses.key]
	if ses.role == wire.RoleWorker {
		inst.workers--
	}
	if inst.sessions--; inst.sessions == 0 {
		delete(s.instances, ses.key)
	}
	s.chooseLead(ses)
}

// chooseLead sets which schedulers of an engine lead, after ses has come or gone. The caller holds
// s.mu.
func (s *Server) chooseLead(ses *session) {
	if ses.role != wire.RoleScheduler {
		return
	}
	var all []*session
	lowest := uint32(math.MaxUint32)
	for _, other := range s.sessions {
		if other.role == wire.RoleScheduler && other.key.id == ses.key.id {
			all, lowest = append(all, other), min(lowest, other.key.rank)
		}
	}
	for _, other := range all {
		other.leads.Store(other.key.rank == lowest)
	}
}

// lingerInfo describes a session that lingers. It does not change.
type lingerInfo struct {
	why           error
	since         time.Time
	stores, loads int // that the session keeps
}

// linger ends a session and returns when its slots may be given to others: when its client has
// closed its end or has died, or when the Server is closed. It returns at once if the session has
// no loads or stores. Lookups do not count, because only loads and stores move bytes.
func (s *Server) linger(ses *session, why error) {
	open := ses.conn.GiveUp(why)
	info := &lingerInfo{why: why, since: time.Now(), stores: len(ses.stores), loads: len(ses.loads)}
	if !open || info.stores+info.loads == 0 {
		return
	}
	s.count.lingered.Add(1)
	s.mu.Lock()
	s.strike(ses)
	s.lingering[ses] = info
	s.mu.Unlock()
	ses.log.Warn("session given up; what it was granted and leased stays its own until its client leaves",
		zap.Error(why), zap.Int("stores", info.stores), zap.Int("loads", info.loads))
	ses.conn.Linger()
}

// findSession returns the welcomed session with that id, or nil.
func (s *Server) findSession(id uint64) *session {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sessions[id]
}

func (s *Server) signalWanted() {
	select {
	case s.wanted <- struct{}{}:
	default:
	}
}

// Draining reports whether Drain or Close has begun.
func (s *Server) Draining() bool { return s.draining.Load() }
