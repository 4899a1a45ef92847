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
	"lookaside/ipc"
	"lookaside/ipc/wire"
	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/stack"
)

// handshakePatience is how long a client may take from connecting to its Hello.
const handshakePatience = 10 * time.Second

// Config is what a Server works with. All fields are required but the LMCache one and those that
// say so.
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
	// how long a client that holds something may say nothing before it counts as frozen; 0: 3 s
	FrozenAfter time.Duration
	// engine whose pages LMCache's lookups ask for; "" is whichever has 8-byte hashes
	LMCacheEngine string

	// ExtraFields become fields of every space, as if its worker had declared them: what the
	// sidecar does to pages that makes them differ.
	ExtraFields []wire.Field

	// ObserveLookup is told of each answered lookup, on the goroutine that answers, which may be
	// another each time: it must not block or allocate. May be nil.
	ObserveLookup func(hitTokens int, took time.Duration)

	// Elsewhere answers how many pages of a run, whole chunks from its first on, are held where
	// they can be had without storing them here: they are not. It may take a few milliseconds. May
	// be nil.
	Elsewhere func(run tiers.Run) (pages int)

	// Peers answers what clients are told as they connect: a number of the sidecars that lend each
	// other what they hold, the same for each of them; 0: this one is alone. What one of them
	// stores may then be left out by the others' workers, who ask for every n-th chunk. May be nil.
	Peers func() uint64

	// UnsharedPeers answers which spaces of ours differ by accident from one of another sidecar's.
	// May be nil.
	UnsharedPeers func() []Unshared

	// OnSpace is told of each space that a worker brings, with what it declared, before anything is
	// stored in it or asked of it. The Server's lock is held. May be nil.
	OnSpace func(sp *tiers.Space, fields []wire.Field)

	// MakeRoom is told how many slots of a geometry are going to be asked for: 1 for each worker
	// that connects, then the chunks of each store. A store waits for it only if there is no room
	// for it, and one for which there is room may not be told of at all while a call for the same
	// worker goes on. Nothing else waits: MakeRoom may wait for any session, such as for a
	// RetractRegion. Several goroutines call it. May be nil.
	MakeRoom func(g tiers.Geometry, slots int)
}

// A Server owns the sessions of one sidecar. All methods may be called from any goroutine.
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
	drains       chan struct{}  // closed when it is draining
	wg           sync.WaitGroup // the sessions

	native struct { // HandleLookup's, which one goroutine calls
		lookup wire.Lookup
		trim   wire.Trim
		cancel wire.Cancel
		query  stack.Query
	}
	lmcache lmcacheState

	mu        sync.Mutex
	closed    bool
	conns     map[*ipc.Conn]struct{}   // every accepted connection, welcomed or not
	sessions  map[uint64]*session      // welcomed, or about to be
	lingering map[*session]*lingerInfo // given up while their clients live; in no other map
	frozen    map[*session]frozenInfo  // that are known to have frozen; replaced, never changed
	instances map[instanceKey]*instance
	spaces    []*space
	regions   []Region
	retracted map[uint32]struct{} // ids of regions that there were
}

// New returns a Server that accepts nobody yet: bind its lookup sockets with
// [Server.SetLookupSockets], then call [Server.Serve].
func New(cfg Config) *Server {
	limits := wire.DefaultLimits
	limits.Pages = cfg.MaxPages
	// A lookup that names more than MaxPages is answered for as many, so it has to be read: the
	// protocol's limit holds.
	lookupLimits := wire.DefaultLimits
	lookupLimits.Pages = max(lookupLimits.Pages, cfg.MaxPages)
	if cfg.FrozenAfter == 0 {
		cfg.FrozenAfter = defaultFrozenAfter
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
	}
}

// Limits are those by which lookups are decoded; the lookup sockets are sized by them.
func (s *Server) Limits() wire.Limits { return s.lookupLimits }

// SetLookupSockets gives the Server the sockets whose Handler it is. To be called once, before
// Serve.
func (s *Server) SetLookupSockets(l *ipc.LookupSockets) { s.lookups = l }

// Wanted is signalled when a store did not find the room that it asked for or changed how full the
// arena is.
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
		conn, err := l.Accept(ctx)
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, ipc.ErrClosed) {
				return nil
			}
			return fmt.Errorf("accept a session: %w", err)
		}
		s.mu.Lock()
		if s.closed {
			s.mu.Unlock()
			conn.Close()
			return nil
		}
		s.conns[conn] = struct{}{}
		s.wg.Add(1)
		s.mu.Unlock()
		go func() {
			defer s.wg.Done()
			s.serveConn(conn)
			conn.Close()
			conn.Recycle()
			s.mu.Lock()
			delete(s.conns, conn)
			s.mu.Unlock()
		}()
	}
}

// Drain refuses new sessions and stores, lets stores and loads that are under way finish, and
// returns when none is left or ctx is done. Those of lingering sessions have nobody who could
// finish them, and are not waited for.
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
	s.mu.Lock() // what lingers is freed under it, so that the two counts agree
	defer s.mu.Unlock()
	st := s.engine.Stats()
	stores, loads = st.OpenStores, st.OpenLoads
	for _, l := range s.lingering {
		stores -= l.stores
		loads -= l.loads
	}
	return stores, loads
}

// Close ends every session, frees what they hold and waits for them. Serve must have returned; the
// lookup sockets are closed after it. It is idempotent.
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
	s.closeLMCache()
}

// Sessions returns how many sessions are welcomed; those that linger are none any more.
func (s *Server) Sessions() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.sessions)
}

// A refusal turns a client away. It is the error form of wire.Refuse.
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

// The codes of refusals, for the counters.
var refusalNames = [...]string{
	wire.RefuseVersion, wire.RefuseIncompatible, wire.RefuseNoWorker, wire.RefuseBusy,
	wire.RefuseDraining, wire.RefuseLimit, wire.RefuseMalformed,
}

const refusals = len(refusalNames)

// admit gives the client that said h a session, or refuses it. The session is in the maps and owned
// in the engine; the caller must end it with s.leave.
func (s *Server) admit(h *wire.Hello, conn *ipc.Conn) (*session, []Region, *refusal) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if h.Role == wire.RoleWorker {
		h = withFields(h, s.cfg.ExtraFields)
		s.makeSpaceRoom(h)
	}
	if s.draining.Load() || s.closed {
		return nil, nil, refuse(wire.RefuseDraining, "the sidecar is shutting down")
	}
	key := instanceKey{h.EngineID, h.Rank}
	inst := s.instances[key]
	var sp *space
	if h.Role == wire.RoleWorker {
		var r *refusal
		if sp, r = s.spaceFor(h); r != nil {
			return nil, nil, r
		}
		if inst != nil && inst.space != sp {
			diff := compare(&inst.space.hello, h, false)
			return nil, nil, refuseMismatch(wire.RefuseIncompatible, diff[0],
				fmt.Sprintf("other sessions of engine %q, rank %d, use another space (%d fields differ)", h.EngineID, h.Rank, len(diff)))
		}
	} else {
		var r *refusal
		if sp, r = s.spaceOf(h); r != nil {
			return nil, nil, r
		}
		if diff := compare(&sp.hello, h, true); len(diff) > 0 {
			return nil, nil, refuseMismatch(wire.RefuseIncompatible, diff[0],
				fmt.Sprintf("the worker of engine %q, rank %d, declared another space (%d fields differ)", h.EngineID, h.Rank, len(diff)))
		}
	}

	id := s.newSessionID()
	if err := s.engine.AddOwner(engine.Owner(id), sp.id); err != nil {
		code := wire.RefuseLimit
		if errors.Is(err, tiers.ErrBusy) {
			code = wire.RefuseBusy
		}
		return nil, nil, refuse(code, err.Error())
	}
	if h.Ranks > 1 {
		if err := s.engine.SetTakers(engine.Owner(id), int(h.Ranks)); err != nil {
			return nil, nil, refuse(wire.RefuseBusy, err.Error()) // it is shutting down
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
	}
	ses := &session{
		server:    s,
		id:        id,
		owner:     engine.Owner(id),
		secret:    newSecret(),
		role:      h.Role,
		key:       key,
		ranks:     h.Ranks,
		space:     sp,
		conn:      conn,
		since:     time.Now(),
		struck:    make(chan struct{}),
		mapping:   make(map[uint32]chan struct{}),
		unmapping: make(map[uint32]chan struct{}),
		stores:    make(map[uint64][]uint32),
		loads:     make(map[uint64][]uint32),
		log: s.log.With(zap.String("session", fmt.Sprintf("%016x", id)), zap.String("role", h.Role),
			zap.String("engine", h.EngineID),
			zap.Uint32("rank", h.Rank), zap.Int("pid", int(conn.Peer().PID))),
	}
	// Held until the handshake has been sent, so that a region pushed meanwhile comes after it.
	ses.sendMu.Lock()
	s.sessions[id] = ses
	s.count.sessionsOpened.Add(1)
	return ses, regions, nil
}

// spaceOf is the space that the workers of all the ranks that a scheduler asks for have declared.
// s.mu is held.
func (s *Server) spaceOf(h *wire.Hello) (*space, *refusal) {
	var sp *space
	for i := range h.Ranks {
		inst := s.instances[instanceKey{h.EngineID, h.Rank + i}]
		if inst == nil || inst.workers == 0 {
			// as every rank has a session, this ends soon, whatever the number
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

// spaceFor finds or opens the space that a worker declares. s.mu is held.
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
	sp.hello.Fields = slices.Clone(h.Fields)
	if s.cfg.OnSpace != nil {
		s.cfg.OnSpace(declared, sp.hello.Fields)
	}
	s.spaces = append(s.spaces, sp)
	return sp, nil
}

// refuseSpace explains by the closest of the spaces held why h cannot have one of its own. s.mu is
// held.
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

// spaceRoomPatience is how long a space that makes room may take to become empty: its last chunks
// may be on their way to a tier.
const spaceRoomPatience = 2 * time.Second

// makeSpaceRoom has the space that was used longest ago, of those without a session, a lease or a
// pin, make room for the one that h declares, if there is none left for that. What it has in the
// arena goes; what the tiers below have of it stays, and is found again when it comes back. s.mu is
// held; it is released while chunks are dropped.
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

// coldestSpace returns the space that nobody uses and that was used longest ago, but for those that
// were tried; nil: there is none. s.mu is held.
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

// emptySpace drops what a space has in the arena, waits a little for what is in use, and returns
// how many chunks it dropped.
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

// dropEmptySpaces closes spaces that hold nothing and that nobody uses. s.mu is held.
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

// newSessionID returns a random id that is not in use and not 0. It is no secret: status and logs
// name it. s.mu is held.
func (s *Server) newSessionID() uint64 {
	for {
		id := RandomID()
		if s.sessions[id] == nil && id != uint64(lmcacheOwner) {
			// that of one that lingers the engine would refuse
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

// leave frees everything that ses holds. It is called once for each admitted session.
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

// strike takes ses out of the books of who is connected. s.mu is held.
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
}

// lingerInfo is what is told of a session that lingers. It does not change.
type lingerInfo struct {
	why           error
	since         time.Time
	stores, loads int // that it keeps
}

// linger ends a session of which we want to hear no more, and returns when what it holds in the
// arena may become another's: when its client has closed its end or has died, at once if it holds
// nothing there, and when the Server is closed. A scheduler's lookups are nothing there: only a
// worker's loads and stores move bytes.
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
