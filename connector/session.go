package connector

import (
	"bytes"
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"math"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"lookaside/ipc"
	"lookaside/ipc/wire"
	"lookaside/tiers"
	"lookaside/tiers/engine"
)

// session is one connected scheduler or worker. Its goroutine handles its messages one after the
// other, except that stores may wait for room (room.go). A field without a named lock is constant,
// or used by that goroutine only.
type session struct {
	server  *Server
	id      uint64
	owner   engine.Owner
	secret  []byte // see wire.Welcome; only the handshake and the lookup sockets may send it
	role    string
	key     instanceKey
	ranks   uint32       // of a scheduler: this many ranks, from key.rank on, may load what it looks up
	about   []wire.Field // what its client says of itself, for operators alone
	space   *space
	conn    *ipc.Conn
	log     *zap.Logger
	since   time.Time
	heard   atomic.Int64 // when its client last sent something, ns after since; see frozen.go
	replies bool         // the lookup sockets know it

	// sendMu is held from admission to the end of the handshake, and while a message is pushed.
	sendMu sync.Mutex

	notices []string // texts of the notices that it was sent; guarded by Server.mu

	// unmapping has the regions that the worker was told to unmap. The channel of each is closed
	// when the worker has. Guarded by Server.mu.
	unmapping map[uint32]chan struct{}
	// mapping has the regions that the worker was told to map after its handshake. The channel of
	// each is closed when the worker has. Guarded by Server.mu.
	mapping map[uint32]chan struct{}
	// late is set if AwaitRegion has timed out for the worker and it has mapped no region since.
	// Guarded by Server.mu.
	late bool
	// struck is closed by Server.strike.
	struck chan struct{}

	// held has copies of the messages that wait for Server.Resume or for the next process, oldest
	// first, and heldBytes is their length.
	held      [][]byte
	heldBytes int

	asking atomic.Int32 // Contains under way

	room    *roomCall // the call of Config.MakeRoom that takes long, or nil
	waiting [][]byte  // copies of the PrepareStores that wait for room, oldest first

	out     []byte // the encoded reply
	extents []engine.Extent
	// stores and loads have the pages of each extent of the open stores and loads, for the
	// counters. The engine bounds how many there are.
	stores, loads map[uint64][]uint32
	// begun has when the open loads were granted that saved time is counted of: those of the first
	// rank of a scheduler that leads.
	begun map[uint64]time.Time
	// leads is set for a scheduler if no other one of its engine here has a lower rank. Ranks ask
	// and load at the same time, so the time that an engine waits is counted of this one alone.
	leads atomic.Bool
	// recomputeUs is what computing a page takes, by a scheduler's last lookup; 0: not known.
	recomputeUs atomic.Uint32
	spare       [][]uint32 // slices for reuse, see pagesOf

	feed   *engine.Feed   // nil until it asks for events
	events []engine.Event // for reuse by tellEvents
	told   []byte         // digests of events, for reuse
	ends   []byte         // digests of a load's pages, for reuse

	msg struct {
		prepareStore wire.PrepareStore
		storeGrant   wire.StoreGrant
		commit       wire.CommitStore
		abort        wire.AbortStore
		prepareLoad  wire.PrepareLoad
		fetch        wire.Fetch
		contains     wire.Contains
		loadGrant    wire.LoadGrant
		release      wire.Release
		ping         wire.Ping
		clear        wire.ClearSpace
		readEvents   wire.ReadEvents
		events       wire.Events
		prefilled    wire.Prefilled
		unmapped     wire.RegionUnmapped
		mapped       wire.RegionMapped
	}
}

// serveConn runs one connection of l from its Hello to its end. hello and held are the Hello and
// the descriptors that came with it if another process has received them, else nil. It returns true
// if the Server is frozen and keeps the connection.
func (s *Server) serveConn(conn *ipc.Conn, l *ipc.Listener, hello []byte, held []int) (kept bool) {
	peer := conn.Peer()
	log := s.log.With(zap.Int("pid", int(peer.PID)), zap.Int("uid", int(peer.UID)))
	var err error
	if hello == nil {
		hello, held, err = s.receiveHello(conn)
	}
	if err == nil {
		if err = s.beginHandshake(); errors.Is(err, errFrozen) {
			hello = bytes.Clone(hello) // it lies in the connection's buffer
		}
	}
	if errors.Is(err, errFrozen) {
		s.park(parked{conn: conn, hello: hello, held: held})
		return true
	}
	var ses *session
	if err == nil {
		ses, err = s.handshake(conn, l, hello, held)
		s.endHandshake()
	}
	if ses != nil && err != nil {
		defer s.leave(ses)
	}
	if err != nil {
		var r *refusal
		if errors.As(err, &r) {
			for i, name := range refusalNames {
				if name == r.Code {
					s.count.refused[i].Add(1)
				}
			}
			// A scheduler that is earlier than its worker tries again and again, which is normal.
			// So is a role that moves to another epoch of weights before the other role.
			level := zap.WarnLevel
			if r.Code == wire.RefuseNoWorker || r.Field == EpochField {
				level = zap.DebugLevel
			}
			log.Log(level, "refused a session", zap.Error(r))
			if err := conn.Send(r.Append(nil)); err != nil {
				log.Debug("refusal not delivered", zap.Error(err))
			}
			return false
		}
		s.count.fail(KindHandshake)
		log.Debug("a client left during its handshake", zap.Error(err))
		return false
	}
	ses.log.Info("session opened")
	if ses.role == wire.RoleWorker {
		ses.makeRoom(1)
	}
	return ses.finish(ses.run())
}

// finish ends a session whose messages are no longer received, or parks it if the Server is frozen.
func (ses *session) finish(err error) (kept bool) {
	if errors.Is(err, errFrozen) {
		ses.server.park(parked{conn: ses.conn, ses: ses})
		return true
	}
	if ses.feed != nil {
		ses.feed.Close()
	}
	ses.server.linger(ses, err)
	return ses.over(err)
}

// over ends a session that no longer lingers, or parks it if it still does and the Server is
// frozen.
func (ses *session) over(err error) (kept bool) {
	s := ses.server
	s.mu.Lock()
	_, lingers := s.lingering[ses]
	s.mu.Unlock()
	if lingers && s.mode.Load() == modeFrozen && ses.conn.GiveUp(err) {
		s.park(parked{conn: ses.conn, ses: ses})
		return true
	}
	ses.log.Info("session ended", zap.Error(err),
		zap.Duration("after", time.Since(ses.since).Round(time.Millisecond)))
	s.leave(ses)
	return false
}

// handshake replies to the Hello b, with which the descriptors held came. It owns these. The caller
// must end the session with leave if it is not nil, also if there is an error. It must send the
// error to the client if it is a *refusal.
func (s *Server) handshake(conn *ipc.Conn, l *ipc.Listener, b []byte, held []int) (*session,
	error) {
	defer func() { closeAll(held) }()
	var h wire.Hello
	if err := h.Decode(b, &s.limits); err != nil {
		var v *wire.VersionError
		if errors.As(err, &v) {
			return nil, refuseMismatch(wire.RefuseVersion,
				mismatch{"version", fmt.Sprint(wire.Version), fmt.Sprint(v.Got)},
				"the sidecar and its client are of different releases")
		}
		s.count.fail(KindMalformed)
		return nil, refuse(wire.RefuseMalformed, err.Error())
	}
	if len(held) != int(h.Held) {
		s.count.fail(KindMalformed)
		return nil, refuse(wire.RefuseMalformed, fmt.Sprintf(
			"the Hello came with %d descriptors, and names %d", len(held), h.Held))
	}
	ses, regions, preparing, r := s.admit(&h, conn)
	if r != nil {
		return nil, r
	}
	defer ses.sendMu.Unlock()
	if s.cfg.OnHeld != nil && len(held) > 0 {
		s.cfg.OnHeld(held)
		held = nil
	}

	w := wire.Welcome{
		Session:        ses.id,
		Secret:         ses.secret,
		Generation:     s.cfg.Generation,
		Fingerprint:    ses.space.fingerprint[:],
		LookupEndpoint: s.lookups.LookupEndpoint(),
		Regions:        uint32(len(regions)),
		MaxPages:       uint32(s.cfg.MaxPages),
		LeaseMs:        uint32(min(s.cfg.Lease.Milliseconds(), 1<<31)),
		Preparing:      preparing,
	}
	if s.cfg.Peers != nil {
		w.Peers = s.cfg.Peers()
	}
	fds := []int{s.cfg.Control.FD()}
	if ses.role == wire.RoleWorker {
		claim, err := l.Claim(s.cfg.Generation)
		if err != nil {
			return ses, refuse(wire.RefuseBusy, err.Error())
		}
		defer unix.Close(claim)
		fds = append(fds, claim)
	} else {
		direct, err := s.addReplies(ses, h.Direct)
		if err != nil {
			return ses, err
		}
		if direct >= 0 {
			defer unix.Close(direct)
			fds = append(fds, direct)
		} else {
			w.ReplyEndpoint = s.lookups.ReplyEndpoint()
		}
	}
	if err := conn.Send(w.Append(nil), fds...); err != nil {
		return ses, err
	}
	for i := range regions {
		if err := conn.Send(regions[i].message(s.cfg.Generation), regions[i].FD); err != nil {
			return ses, err
		}
	}
	return ses, nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}

// addReplies makes replies to a scheduler's session possible. It returns the descriptor of the
// client's end of the direct socket if the client wants one, else -1.
func (s *Server) addReplies(ses *session, wantsDirect bool) (direct int, err error) {
	direct = -1
	if wantsDirect {
		direct, err = s.lookups.AddDirect(ses.id)
	} else {
		err = s.lookups.AddSession(ses.id, ses.secret)
	}
	if errors.Is(err, ipc.ErrClosed) {
		return -1, refuse(wire.RefuseDraining, err.Error())
	}
	if err != nil {
		return -1, refuse(wire.RefuseBusy, err.Error())
	}
	ses.replies = true
	return direct, nil
}

// push sends a message that is not a reply, after the handshake. Any goroutine may call it.
func (ses *session) push(message []byte, fds ...int) error {
	ses.sendMu.Lock()
	defer ses.sendMu.Unlock()
	return ses.conn.Send(message, fds...)
}

// run handles messages until the client leaves, breaks the protocol or stops reading. It returns
// the reason.
func (ses *session) run() error {
	for {
		b, err := ses.conn.Recv()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			if err = ses.interrupted(); err == nil {
				continue
			}
		}
		if err != nil {
			if errors.Is(err, ipc.ErrOversize) || errors.Is(err, ipc.ErrEmpty) {
				ses.server.count.fail(KindMalformed)
			}
			return err
		}
		if len(ses.held) > 0 && ses.server.mode.Load() == modeServing {
			b = bytes.Clone(b) // it comes after those, which use the same buffers
			if err := ses.replay(); err != nil {
				return err
			}
		}
		if err := ses.respond(b); err != nil {
			return err
		}
	}
}

// respond handles a message and sends the reply, if there is one now. An error must end the
// session.
func (ses *session) respond(b []byte) error {
	ses.heard.Store(handling)
	reply, err := ses.handle(b)
	ses.hear()
	if reply != nil {
		if err := ses.reply(reply); err != nil {
			return err
		}
	}
	if err != nil {
		ses.server.count.fail(KindMalformed)
	}
	return err
}

// reply sends a reply. An error must end the session.
func (ses *session) reply(b []byte) error {
	err := ses.conn.Send(b)
	if errors.Is(err, ipc.ErrPeerStuck) {
		ses.server.count.fail(KindSend)
	}
	return err
}

// handle handles one message. It returns the reply, which is valid until the next call, or nil. It
// returns an error if the session must end.
func (ses *session) handle(b []byte) ([]byte, error) {
	t, err := wire.Peek(b)
	if err != nil {
		return nil, err
	}
	lim := &ses.server.limits
	worker := ses.role == wire.RoleWorker
	m := &ses.msg
	switch {
	case t == wire.TypePing:
		if err := m.ping.Decode(b, lim); err != nil {
			return nil, err
		}
		pong := wire.Pong{ID: m.ping.ID, Generation: ses.server.cfg.Generation}
		return ses.answer(&pong), nil
	case t == wire.TypeClearSpace:
		if err := m.clear.Decode(b, lim); err != nil {
			return nil, err
		}
		return ses.clearNowOrLater(b), nil
	case t == wire.TypeReadEvents:
		if err := m.readEvents.Decode(b, lim); err != nil {
			return nil, err
		}
		return ses.tellEvents(), nil
	case t == wire.TypePrefilled && !worker:
		if err := m.prefilled.Decode(b, lim); err != nil {
			return nil, err
		}
		ses.server.noteAdmission(ses, &m.prefilled)
		return nil, nil
	case t == wire.TypePrepareStore && worker:
		if err := m.prepareStore.Decode(b, lim); err != nil {
			return nil, err
		}
		return ses.prepareNowOrLater(b), nil
	case t == wire.TypeCommitStore && worker:
		if err := m.commit.Decode(b, lim); err != nil {
			return nil, err
		}
		ses.commitStore()
		return nil, nil
	case t == wire.TypeAbortStore && worker:
		if err := m.abort.Decode(b, lim); err != nil {
			return nil, err
		}
		if err := ses.server.engine.AbortStore(ses.owner, m.abort.Store); err != nil {
			ses.note(err)
			return nil, nil
		}
		ses.done(ses.stores, m.abort.Store, nil)
		return nil, nil
	case t == wire.TypePrepareLoad && worker:
		if err := m.prepareLoad.Decode(b, lim); err != nil {
			return nil, err
		}
		return ses.prepareLoad(), nil
	case t == wire.TypeFetch && worker:
		if err := m.fetch.Decode(b, lim); err != nil {
			return nil, err
		}
		return ses.fetch(), nil
	case t == wire.TypeContains && worker:
		if err := m.contains.Decode(b, lim); err != nil {
			return nil, err
		}
		return ses.contains(), nil
	case t == wire.TypeRelease && worker:
		if err := m.release.Decode(b, lim); err != nil {
			return nil, err
		}
		ses.releaseNowOrLater(b)
		return nil, nil
	case t == wire.TypeRegionUnmapped && worker:
		if err := m.unmapped.Decode(b, lim); err != nil {
			return nil, err
		}
		return nil, ses.server.unmapped(ses, m.unmapped.Region)
	case t == wire.TypeRegionMapped && worker:
		if err := m.mapped.Decode(b, lim); err != nil {
			return nil, err
		}
		ses.server.mapped(ses, m.mapped.Region)
		return nil, nil
	}
	return nil, fmt.Errorf("%w: %v from a %s", wire.ErrMalformed, t, ses.role)
}

func (ses *session) answer(m wire.Message) []byte {
	ses.out = m.Append(ses.out[:0])
	return ses.out
}

// clearPatience bounds the clearing of a space in the tiers below the arena.
const clearPatience = 30 * time.Second

// clearSpace drops all chunks of the session's space, in the arena and in the tiers, and returns
// the reply. It replies with an error if any tier fails, because a page that is left may be wrong:
// a client clears its cache for such reasons as new weights.
func (ses *session) clearSpace() []byte {
	id := ses.msg.clear.ID
	ctx, cancel := context.WithTimeout(context.Background(), clearPatience)
	defer cancel()
	cleared, err := ses.server.stack.Clear(ctx, ses.space.fingerprint, "")
	chunks := 0
	for _, c := range cleared {
		chunks += max(0, c.Chunks)
		if c.Err != nil {
			err = errors.Join(err, fmt.Errorf("%w: tier %s is not cleared: %w", tiers.ErrBusy,
				c.Tier, c.Err))
		}
	}
	ses.log.Info("space cleared", zap.Int("chunks", chunks), zap.Error(err))
	if err != nil {
		return ses.fail(id, err)
	}
	return ses.answer(&wire.Cleared{ID: id, Chunks: uint32(min(chunks, math.MaxUint32))})
}

// tellPages is how many pages one reply to ReadEvents has, and at most one chunk more. So many fit
// a packet.
const tellPages = 2048

// tellEvents returns the reply to ReadEvents.
func (ses *session) tellEvents() []byte {
	id := ses.msg.readEvents.ID
	if ses.feed == nil {
		feed, err := ses.server.engine.Follow(ses.space.id)
		if err != nil {
			return ses.fail(id, err)
		}
		ses.feed = feed
	}
	b, buf, err := ses.feed.Next(tellPages, ses.told, ses.events[:0])
	ses.told, ses.events = buf, b.Events
	if err != nil {
		return ses.fail(id, err)
	}
	m := &ses.msg.events
	*m = wire.Events{ID: id, Reset: b.Reset, More: b.More, Runs: m.Runs[:0]}
	for i := range b.Events {
		m.Runs = append(m.Runs, wire.Run{Removed: b.Events[i].Kind == engine.PagesRemoved,
			Hashes: b.Events[i].Hashes})
	}
	return ses.answer(m)
}

// fail counts an error of the engine and returns the reply to request id that reports it.
func (ses *session) fail(id uint32, err error) []byte {
	kind := kindOf(err)
	ses.server.count.fail(kind)
	if kind == KindInternal {
		// The wire has no code for this, and the client can only try again.
		ses.log.Error("engine", zap.Error(err))
		kind = KindBusy
	}
	return ses.answer(&wire.Error{ID: id, Code: kind.String(), Message: err.Error()})
}

// note counts the error of a request without a reply.
func (ses *session) note(err error) {
	if err != nil {
		ses.server.count.fail(kindOf(err))
		ses.log.Debug("request without an answer failed", zap.Error(err))
	}
}

// prepareStore returns the reply to msg.prepareStore, whose encoding is b. If the store must wait
// for room, it keeps a copy of b and returns nil.
func (ses *session) prepareStore(b []byte) []byte {
	m, s := &ses.msg.prepareStore, ses.server
	digest := ses.space.geometry.DigestBytes
	if len(m.Hashes)%digest != 0 || len(m.Prev) != 0 && len(m.Prev) != digest {
		return ses.fail(m.ID, fmt.Errorf("%w: hashes are not of %d bytes each", tiers.ErrInvalid,
			digest))
	}
	if n := len(m.Hashes) / digest; n > min(s.cfg.MaxPages, wire.MaxStorePages(digest)) {
		return ses.fail(m.ID, fmt.Errorf("%w: %d pages in one store, at most %d", tiers.ErrInvalid,
			n, min(s.cfg.MaxPages, wire.MaxStorePages(digest))))
	}
	if !ses.mustWait(ses.chunksOf(m)) {
		return ses.grantStore()
	}
	if len(ses.waiting) == maxWaitingStores {
		return ses.fail(m.ID, fmt.Errorf("%w: %d stores wait for room", tiers.ErrBusy,
			maxWaitingStores))
	}
	ses.waiting = append(ses.waiting, bytes.Clone(b))
	return nil
}

// chunksOf returns in how many chunks the pages of a store are, counting only one of Every.
func (ses *session) chunksOf(m *wire.PrepareStore) int {
	ppc := ses.space.geometry.PagesPerChunk
	chunks := uint64(len(m.Hashes)/ses.space.geometry.DigestBytes+ppc-1) / uint64(ppc)
	return int((chunks + uint64(m.Every) - 1) / uint64(m.Every))
}

// grantStore returns the reply to msg.prepareStore after room was made.
func (ses *session) grantStore() []byte {
	m, s := &ses.msg.prepareStore, ses.server
	if s.draining.Load() {
		return ses.fail(m.ID, fmt.Errorf("%w: the sidecar is shutting down", tiers.ErrClosed))
	}
	how := engine.Storing{Share: engine.Share{Of: int(m.Every), Index: int(m.Which)},
		Tenant: s.cfg.Tenants.Find(m.Tenant), FromUse: int(m.FromUse),
		Hints: hintsOf(m.Priority, m.RetainMs, m.PinMs)}
	skipped := ses.elsewhere(m)
	first, prev, hashes := int(m.FirstPage), m.Prev, m.Hashes
	if skipped > 0 {
		at := skipped * ses.space.geometry.DigestBytes
		first, prev, hashes = first+skipped, hashes[at-ses.space.geometry.DigestBytes:at],
			hashes[at:]
	}
	var res engine.StoreResult
	grants := ses.extents[:0]
	if len(hashes) > 0 {
		var err error
		res, grants, err = s.engine.PrepareStoring(ses.owner, first, prev, hashes, how, grants)
		ses.extents = grants
		if err != nil {
			return ses.fail(m.ID, err)
		}
	}
	for page, ppc := 0, ses.space.geometry.PagesPerChunk; page < skipped; page += ppc {
		if (int(m.FirstPage)+page)/ppc%how.Of == how.Index {
			res.Held += min(ppc, skipped-page)
		}
	}
	if res.Deferred == 0 {
		s.cfg.Demand.Store(ses.space.fingerprint, &ses.space.geometry, int(m.FirstPage), m.Prev,
			m.Hashes)
	}
	s.count.heldPages.Add(uint64(res.Held))
	s.count.shedPages.Add(uint64(res.Shed))
	if res.Shed > 0 || res.Store != 0 {
		s.signalWanted()
	}
	g := &ses.msg.storeGrant
	*g = wire.StoreGrant{ID: m.ID, Store: res.Store, Held: uint32(res.Held), Shed: uint32(res.Shed),
		Grants: g.Grants[:0]}
	g.Grants = ses.convert(g.Grants, grants)
	if res.Store != 0 {
		ses.stores[res.Store] = ses.pagesOf(grants)
	}
	return ses.answer(g)
}

// elsewhere returns how many pages of a store, as whole chunks from the first page on, need not be
// stored here.
func (ses *session) elsewhere(m *wire.PrepareStore) int {
	s, g := ses.server, &ses.space.geometry
	if s.cfg.Elsewhere == nil || int(m.FirstPage)%g.PagesPerChunk != 0 {
		return 0
	}
	pages := s.cfg.Elsewhere(tiers.Run{Space: ses.space.declared, First: int(m.FirstPage),
		Prev: m.Prev, Hashes: m.Hashes})
	s.count.elsewherePages.Add(uint64(pages))
	return pages
}

// convert appends the engine's extents as the wire's.
func (ses *session) convert(out []wire.Extent, extents []engine.Extent) []wire.Extent {
	for _, e := range extents {
		out = append(out, wire.Extent{Page: e.Page, Pages: e.Pages, Region: e.Region,
			Offset: e.Offset})
	}
	return out
}

// pagesOf returns the number of pages of each extent. done takes the slice back for reuse.
func (ses *session) pagesOf(extents []engine.Extent) []uint32 {
	var pages []uint32
	if n := len(ses.spare); n > 0 {
		pages, ses.spare = ses.spare[n-1][:0], ses.spare[:n-1]
	}
	for _, e := range extents {
		pages = append(pages, e.Pages)
	}
	return pages
}

// done removes a store or load from account and returns its number of pages, without those of the
// extents in except.
func (ses *session) done(account map[uint64][]uint32, id uint64, except []uint32) (pages uint64) {
	of := account[id]
	delete(account, id)
	for _, n := range of {
		pages += uint64(n)
	}
	for _, i := range except {
		if int(i) < len(of) {
			pages -= uint64(of[i])
		}
	}
	if len(ses.spare) < 64 {
		ses.spare = append(ses.spare, of)
	}
	return pages
}

// secondsPerToken returns what computing a token takes in a scheduler's engine; 0: not known.
func (ses *session) secondsPerToken() float64 {
	return float64(ses.recomputeUs.Load()) / 1e6 / float64(ses.space.geometry.PageTokens)
}

func (ses *session) commitStore() {
	m, s := &ses.msg.commit, ses.server
	if err := s.engine.CommitStore(ses.owner, m.Store, m.Failed); err != nil {
		ses.note(err)
		return
	}
	pages := ses.done(ses.stores, m.Store, m.Failed)
	s.count.stores.Add(1)
	s.count.storedPages.Add(pages)
	s.count.storedBytes.Add(pages * uint64(ses.space.geometry.PageBytes))
}

func (ses *session) prepareLoad() []byte {
	m, s := &ses.msg.prepareLoad, ses.server
	// The lookup must be of a scheduler of the same engine whose ranks include this one, so that a
	// worker cannot reach the leases of another instance. Any client can claim an engine and a rank
	// in its Hello, so the load also needs the lookup's ticket, which only the scheduler can give.
	scheduler := s.findSession(m.Session)
	if scheduler == nil || scheduler.role != wire.RoleScheduler {
		return ses.fail(m.ID, fmt.Errorf("%w: no scheduler has the session %016x",
			tiers.ErrNotFound, m.Session))
	}
	if scheduler.key.id != ses.key.id || ses.key.rank-scheduler.key.rank >= scheduler.ranks {
		return ses.fail(m.ID, fmt.Errorf("%w: session %016x is of another engine or rank",
			tiers.ErrIncompatible, m.Session))
	}
	if ticket := wire.Ticket(scheduler.secret, m.Lookup); subtle.ConstantTimeCompare(m.Ticket,
		ticket[:]) == 0 {
		ses.server.count.fail(KindForged)
		return ses.fail(m.ID, fmt.Errorf("%w: this is not the ticket of lookup %d of session %016x",
			tiers.ErrNotFound, m.Lookup, m.Session))
	}
	ppc := ses.space.geometry.PagesPerChunk
	if chunks := int(m.Pages)/ppc + 2; chunks > wire.MaxExtents {
		return ses.fail(m.ID, fmt.Errorf("%w: %d pages in one load, at most %d", tiers.ErrInvalid,
			m.Pages, (wire.MaxExtents-2)*ppc))
	}
	load, extents, err := s.engine.PrepareLoad(ses.owner, scheduler.owner, m.Lookup,
		int(m.FirstPage), int(m.Pages), ses.extents[:0])
	s.stack.Sweep() // frees the rest of what the lookup had
	ses.extents = extents
	if err != nil {
		return ses.fail(m.ID, err)
	}
	if err := ses.nameLoad(load); err != nil {
		return ses.fail(m.ID, err)
	}
	if wire.Names(ses.ends) != [wire.NamesBytes]byte(m.Names) {
		_ = s.engine.Release(ses.owner, load, nil)
		return ses.fail(m.ID, fmt.Errorf("%w: lookup %d holds other pages than were ordered",
			tiers.ErrStale, m.Lookup))
	}
	if ses.key.rank == scheduler.key.rank && scheduler.leads.Load() {
		ses.begun[load] = time.Now()
	}
	return ses.grantLoad(m.ID, load)
}

// fetch leases what is held of one chunk, and says where it is. Nothing waits for a tier: a client
// that can wait has a lookup bring the chunk up first.
func (ses *session) fetch() []byte {
	m, s := &ses.msg.fetch, ses.server
	g := &ses.space.geometry
	if len(m.Hash) != g.DigestBytes {
		return ses.fail(m.ID, fmt.Errorf("%w: a hash of %d bytes, want %d", tiers.ErrInvalid,
			len(m.Hash), g.DigestBytes))
	}
	load, extents, err := s.engine.Fetch(ses.owner, m.Hash, ses.extents[:0])
	ses.extents = extents
	held := 0
	if err == nil {
		held = 1
	}
	s.cfg.Demand.Lookup(ses.space.fingerprint, g, uint64(ses.owner), 0, 0, nil, m.Hash, held, true)
	if err == nil {
		err = ses.nameLoad(load)
	}
	if err != nil {
		return ses.fail(m.ID, err)
	}
	return ses.grantLoad(m.ID, load)
}

// nameLoad reads the digests of a load's pages into ses.ends. If it fails the load has ended.
func (ses *session) nameLoad(load uint64) (err error) {
	if ses.ends, err = ses.server.engine.LoadEnds(ses.owner, load, ses.ends[:0]); err != nil {
		_ = ses.server.engine.Release(ses.owner, load, nil)
	}
	return err
}

// grantLoad answers with a load of ses.extents, which nameLoad has named.
func (ses *session) grantLoad(id uint32, load uint64) []byte {
	names := wire.Names(ses.ends)
	g := &ses.msg.loadGrant
	*g = wire.LoadGrant{ID: id, Load: load, Names: names[:], Extents: g.Extents[:0]}
	g.Extents = ses.convert(g.Extents, ses.extents)
	ses.loads[load] = ses.pagesOf(ses.extents)
	return ses.answer(g)
}

func (ses *session) release() {
	m, s := &ses.msg.release, ses.server
	if err := s.engine.Release(ses.owner, m.Load, m.Bad); err != nil {
		ses.note(err)
		return
	}
	pages := ses.done(ses.loads, m.Load, m.Bad)
	if at, ok := ses.begun[m.Load]; ok {
		delete(ses.begun, m.Load)
		s.count.loadNanos.Add(int64(time.Since(at)))
	}
	s.count.loads.Add(1)
	s.count.badExtents.Add(uint64(len(m.Bad)))
	s.count.loadedPages.Add(pages)
	s.count.loadedBytes.Add(pages * uint64(ses.space.geometry.PageBytes))
}
