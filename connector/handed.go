package connector

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"slices"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"lookaside/ipc"
	"lookaside/ipc/handover"
	"lookaside/ipc/wire"
	"lookaside/tiers"
	"lookaside/tiers/engine"
)

// This file has what a frozen Server passes to the next one, and how that takes it over.

// Limits of what is handed over.
const (
	maxHandedSessions = 1 << 16
	maxHandedLeases   = 1 << 24
)

// handedState is all that is handed over.
type handedState struct {
	spaces   []handedSpace
	regions  []uint32 // that workers have
	sessions []handedSession
	visitors []handedVisitor
	leases   engine.Handover
	pins     [][]byte // the fingerprints of the spaces of pins, in the order of leases
}

// handedSpace is a space that a worker has declared.
type handedSpace struct {
	fingerprint []byte
	hello       []byte // that declared it, encoded
}

// handedVisitor is a connection that was not welcomed yet.
type handedVisitor struct {
	file  int    // its socket, by its place among the files
	hello []byte // what it has sent, or empty
	held  int    // how many files after the socket came with that
}

// handedSession is one session. What it holds is among the leases.
type handedSession struct {
	file, direct int // the socket's and the direct socket's place among the files; direct -1: none
	id           uint64
	secret       []byte
	worker       bool
	engine       string
	rank, ranks  uint32
	about        []wire.Field
	space        int // its place among the spaces
	since        int64
	late         bool
	replies      bool
	notices      []string
	unmapping    []uint32
	loads        []handedAccount
	stores       []handedAccount // of one that lingers
	held         [][]byte
	lookups      [][]byte // messages about lookups that wait
	lingers      bool
	why          string
}

// handedAccount is the entry of a load or store in the session's accounts.
type handedAccount struct {
	handle uint64
	pages  []uint32
}

func (s *handedState) fields(c *handover.Coder) {
	lim := &wire.DefaultLimits
	handover.List(c, &s.spaces, maxHandedSessions, func(v *handedSpace) {
		c.Bytes(&v.fingerprint, wire.FingerprintBytes)
		c.Bytes(&v.hello, wire.MaxPacketBytes)
	})
	handover.List(c, &s.regions, 1<<16, c.Uint32)
	handover.List(c, &s.sessions, maxHandedSessions, func(v *handedSession) {
		c.Int(&v.file, maxHandedSessions)
		direct := v.direct + 1
		c.Int(&direct, 2*maxHandedSessions)
		v.direct = direct - 1
		c.Uint64(&v.id)
		c.Bytes(&v.secret, wire.SecretBytes)
		c.Bool(&v.worker)
		c.Text(&v.engine, lim.EngineIDBytes)
		c.Uint32(&v.rank)
		c.Uint32(&v.ranks)
		handover.List(c, &v.about, wire.MaxAbout, func(f *wire.Field) {
			c.Text(&f.Key, lim.FieldKeyBytes)
			c.Text(&f.Value, lim.FieldValueBytes)
		})
		c.Int(&v.space, maxHandedSessions)
		c.Int64(&v.since)
		c.Bool(&v.late)
		c.Bool(&v.replies)
		handover.List(c, &v.notices, 1<<10, func(t *string) { c.Text(t, wire.MaxPacketBytes) })
		handover.List(c, &v.unmapping, 1<<16, c.Uint32)
		account := func(a *handedAccount) {
			c.Uint64(&a.handle)
			handover.List(c, &a.pages, maxHandedLeases, c.Uint32)
		}
		handover.List(c, &v.loads, maxHandedLeases, account)
		handover.List(c, &v.stores, maxHandedLeases, account)
		packet := func(b *[]byte) { c.Bytes(b, lim.MessageBytes()) }
		handover.List(c, &v.held, maxHeld+maxHandedLeases, packet)
		handover.List(c, &v.lookups, maxHeldLookups, packet)
		c.Bool(&v.lingers)
		c.Text(&v.why, 1<<12)
	})
	handover.List(c, &s.visitors, maxHandedSessions, func(v *handedVisitor) {
		c.Int(&v.file, maxHandedSessions)
		c.Bytes(&v.hello, wire.MaxPacketBytes)
		c.Int(&v.held, maxHandedSessions)
	})
	c.Uint32(&s.leases.Generation)
	handover.List(c, &s.leases.Held, maxHandedLeases, func(v *engine.Held) { heldFields(c, v) })
	handover.List(c, &s.pins, maxHandedLeases,
		func(b *[]byte) { c.Bytes(b, wire.FingerprintBytes) })
}

// heldFields names the fields of a lease, except the space of a pin.
func heldFields(c *handover.Coder, v *engine.Held) {
	kind, owner, left := int(v.Kind), uint64(v.Owner), int64(max(v.Left, 0))
	c.Int(&kind, int(engine.HeldPin))
	c.Uint64(&owner)
	c.Uint64(&v.Lookup)
	c.Uint64(&v.Handle)
	c.Int(&v.Takers, math.MaxInt32)
	c.Int64(&left)
	c.Int(&v.First, math.MaxInt32)
	c.Int(&v.Pages, math.MaxInt32)
	v.Kind, v.Owner, v.Left = engine.HeldKind(kind), engine.Owner(owner), time.Duration(left)
	handover.List(c, &v.Places, maxHandedLeases, func(p *engine.Place) {
		c.Uint32(&p.Region)
		c.Uint64(&p.Offset)
	})
	c.Bytes(&v.Ends, maxHandedLeases*wire.MaxDigestBytes)
}

// Export returns the sessions of a frozen Server, encoded, and descriptors that belong to them,
// which the caller owns. directs are the direct sockets by session (ipc.LookupSockets.Detach),
// which Export owns. Sessions whose client has just gone are left out. After Export the Server can
// only be closed.
func (s *Server) Export(directs map[uint64]int) (state []byte, fds []int, err error) {
	defer func() {
		for _, fd := range directs {
			_ = unix.Close(fd)
		}
		if err != nil {
			for _, fd := range fds {
				_ = unix.Close(fd)
			}
			fds = nil
		}
	}()
	s.closeLMCache() // no worker loads what its lookups hold
	var out handedState
	places := map[*space]int{}
	s.mu.Lock()
	all := slices.Clone(s.parked)
	for i, sp := range s.spaces {
		places[sp] = i
		out.spaces = append(out.spaces, handedSpace{sp.fingerprint[:], sp.hello.Append(nil)})
	}
	for i := range s.regions {
		out.regions = append(out.regions, s.regions[i].ID)
	}
	s.mu.Unlock()
	for i := range all {
		p := &all[i]
		lingers := false
		if p.ses != nil {
			s.mu.Lock()
			_, lingers = s.lingering[p.ses]
			s.mu.Unlock()
		}
		fd, err := p.conn.Detach(lingers)
		if err != nil {
			if closeAll(p.held); p.ses != nil { // its client has gone
				s.leave(p.ses)
			}
			continue
		}
		fds = append(fds, fd)
		if p.ses == nil {
			out.visitors = append(out.visitors, handedVisitor{len(fds) - 1, p.hello, len(p.held)})
			fds = append(fds, p.held...)
			continue
		}
		h := p.ses.handed(lingers)
		h.file, h.direct, h.space = len(fds)-1, -1, places[p.ses.space]
		if direct, ok := directs[p.ses.id]; ok {
			delete(directs, p.ses.id)
			fds = append(fds, direct)
			h.direct = len(fds) - 1
		}
		h.lookups = s.held.of[p.ses.id]
		out.sessions = append(out.sessions, h)
	}
	if out.leases, err = s.engine.Export(); err != nil {
		return nil, fds, err
	}
	for i := range out.leases.Held {
		if h := &out.leases.Held[i]; h.Kind == engine.HeldPin {
			st, _ := s.engine.Space(h.Space)
			out.pins = append(out.pins, st.Fingerprint[:])
		}
	}
	return handover.Encode(out.fields), fds, nil
}

// handed describes a session that is parked.
func (ses *session) handed(lingers bool) handedSession {
	s := ses.server
	s.mu.Lock()
	defer s.mu.Unlock()
	h := handedSession{
		id: ses.id, secret: ses.secret, worker: ses.role == wire.RoleWorker, engine: ses.key.id,
		rank: ses.key.rank, ranks: ses.ranks, about: ses.about, since: ses.since.UnixNano(),
		late: ses.late, replies: ses.replies, notices: ses.notices,
		unmapping: slices.Sorted(maps.Keys(ses.unmapping)), loads: accounts(ses.loads),
		stores: accounts(ses.stores), held: ses.held, lingers: lingers,
	}
	if lingers {
		h.why = fmt.Sprint(s.lingering[ses].why)
	}
	return h
}

func accounts(of map[uint64][]uint32) (out []handedAccount) {
	for _, handle := range slices.Sorted(maps.Keys(of)) {
		out = append(out, handedAccount{handle, of[handle]})
	}
	return out
}

// Adoption is what one Server takes over from that of the process before.
type Adoption struct {
	server   *Server
	listener *ipc.Listener
	adopted  []*adopted
	visitors []visitor
}

// visitor is a connection that was not welcomed yet.
type visitor struct {
	conn  *ipc.Conn
	hello []byte
	held  []int
}

// Adopt takes over what another Server has exported. The regions and all that they hold must be
// there, and nobody may be served yet. Adopt owns the files. Nothing is received until
// [Adoption.Start]; the caller must call that or close the Server. If Adopt fails, the Server must
// be closed.
func (s *Server) Adopt(state []byte, files []*os.File, l *ipc.Listener) (*Adoption, error) {
	defer func() { ipc.CloseFiles(files) }()
	var in handedState
	if err := handover.Decode(state, in.fields); err != nil {
		return nil, err
	}
	take := func(i int) *os.File {
		if i < 0 || i >= len(files) || files[i] == nil {
			return nil
		}
		f := files[i]
		files[i] = nil
		return f
	}
	spaces, err := s.adoptSpaces(in.spaces)
	if err != nil {
		return nil, err
	}
	a := &Adoption{server: s, listener: l}
	for i := range in.sessions {
		h := &in.sessions[i]
		file, direct := take(h.file), take(h.direct)
		if file == nil || h.space >= len(spaces) || len(h.secret) != wire.SecretBytes {
			ipc.CloseFiles([]*os.File{file, direct})
			return a, fmt.Errorf("%w: session %016x", handover.ErrMalformed, h.id)
		}
		conn, err := l.Adopt(file)
		if err != nil && !errors.Is(err, ipc.ErrPeerGone) {
			ipc.CloseFiles([]*os.File{direct})
			return a, err
		}
		one, err := s.adopt(h, spaces[h.space], conn, direct, in.regions)
		if err != nil {
			if conn != nil {
				conn.Close()
			}
			return a, err
		}
		a.adopted = append(a.adopted, one)
	}
	if err := s.adoptLeases(&in); err != nil {
		return a, err
	}
	for i := range in.visitors {
		v := &in.visitors[i]
		file := take(v.file)
		if file == nil {
			return a, fmt.Errorf("%w: a connection without a socket", handover.ErrMalformed)
		}
		conn, err := l.Adopt(file)
		if err != nil {
			continue // it has died
		}
		one := visitor{conn: conn, hello: bytes.Clone(v.hello)}
		for at := range v.held {
			if file := take(v.file + 1 + at); file != nil {
				fd, err := unix.FcntlInt(file.Fd(), unix.F_DUPFD_CLOEXEC, 0)
				file.Close()
				if err == nil {
					one.held = append(one.held, fd)
				}
			}
		}
		a.visitors = append(a.visitors, one)
	}
	return a, nil
}

// adoptSpaces opens the spaces, in their order. It fails if workers would declare them differently
// now, because the settings of lossy tiers have changed.
func (s *Server) adoptSpaces(in []handedSpace) ([]*space, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []*space
	for i := range in {
		var h wire.Hello
		if err := h.Decode(in[i].hello, &s.limits); err != nil {
			return nil, fmt.Errorf("space: %w", err)
		}
		declared := withFields(&h, s.cfg.ExtraFields)
		if len(compare(&h, declared, false)) > 0 {
			return nil, fmt.Errorf("%w: tiers change what they keep, or no longer do: %s",
				tiers.ErrIncompatible, compare(&h, declared, false)[0].field)
		}
		sp, r := s.spaceFor(&h)
		if r != nil {
			return nil, r
		}
		if !bytes.Equal(sp.fingerprint[:], in[i].fingerprint) {
			return nil, fmt.Errorf("%w: space %x", tiers.ErrIncompatible, in[i].fingerprint)
		}
		out = append(out, sp)
	}
	return out, nil
}

// adopt makes a session of what the process before had. conn is nil if its client has died: the
// session is made all the same, because it owns leases, and ends when it is started. has are the
// regions that a worker has.
func (s *Server) adopt(h *handedSession, sp *space, conn *ipc.Conn, direct *os.File,
	has []uint32) (*adopted, error) {
	a := &adopted{direct: direct, lookups: cloneAll(h.lookups), replies: h.replies}
	role := wire.RoleScheduler
	if h.worker {
		role = wire.RoleWorker
	}
	key := instanceKey{h.engine, h.rank}
	s.mu.Lock()
	defer s.mu.Unlock()
	if h.id == 0 || s.sessions[h.id] != nil {
		return nil, fmt.Errorf("%w: session %016x", handover.ErrMalformed, h.id)
	}
	if err := s.engine.AddOwner(engine.Owner(h.id), sp.id); err != nil {
		return nil, err
	}
	if h.ranks > 1 {
		if err := s.engine.SetTakers(engine.Owner(h.id), int(h.ranks)); err != nil {
			return nil, err
		}
	}
	pid := int32(0)
	if conn != nil {
		pid = conn.Peer().PID
	}
	ses := &session{
		server: s, id: h.id, owner: engine.Owner(h.id), secret: bytes.Clone(h.secret), role: role,
		key: key, ranks: h.ranks, about: h.about, space: sp,
		conn: conn, since: time.Unix(0, h.since),
		struck: make(chan struct{}), mapping: make(map[uint32]chan struct{}),
		unmapping: make(map[uint32]chan struct{}), stores: make(map[uint64][]uint32),
		loads: make(map[uint64][]uint32), begun: make(map[uint64]time.Time), late: h.late,
		notices: h.notices, held: cloneAll(h.held),
		log: s.sessionLog(h.id, role, key, pid),
	}
	ses.hear()
	for _, id := range h.unmapping {
		ses.unmapping[id] = make(chan struct{})
	}
	for _, of := range h.loads {
		ses.loads[of.handle] = of.pages
	}
	for _, of := range h.stores {
		ses.stores[of.handle] = of.pages
	}
	for _, b := range ses.held {
		ses.heldBytes += len(b)
	}
	a.ses = ses
	if h.lingers {
		a.lingers = &lingerInfo{why: errors.New(h.why), since: ses.since,
			stores: len(h.stores), loads: len(h.loads)}
		s.lingering[ses] = a.lingers
		close(ses.struck)
		return a, nil
	}
	inst := s.instances[key]
	if inst == nil {
		inst = &instance{space: sp}
		s.instances[key] = inst
	}
	inst.sessions++
	sp.sessions++
	if h.worker {
		inst.workers++
		for _, region := range s.regions {
			if !slices.Contains(has, region.ID) {
				a.regions = append(a.regions, region)
			}
		}
	}
	// Locked until it is welcomed, so that a region pushed meanwhile comes after that.
	ses.sendMu.Lock()
	s.sessions[h.id] = ses
	s.chooseLead(ses)
	return a, nil
}

func cloneAll(list [][]byte) (out [][]byte) {
	for _, b := range list {
		out = append(out, bytes.Clone(b))
	}
	return out
}

// adoptLeases gives sessions and operators what they held. Pins of spaces that are gone are
// dropped.
func (s *Server) adoptLeases(in *handedState) error {
	ids := map[tiers.Fingerprint]engine.SpaceID{}
	for _, st := range s.engine.Spaces() {
		ids[st.Fingerprint] = st.ID
	}
	kept, pin := in.leases.Held[:0], 0
	for _, h := range in.leases.Held {
		if h.Kind == engine.HeldPin {
			if pin++; pin > len(in.pins) || len(in.pins[pin-1]) != wire.FingerprintBytes {
				return fmt.Errorf("%w: pins", handover.ErrMalformed)
			}
			var ok bool
			if h.Space, ok = ids[tiers.Fingerprint(in.pins[pin-1])]; !ok {
				continue
			}
		}
		kept = append(kept, h)
	}
	in.leases.Held = kept
	return s.engine.Import(&in.leases)
}

// Sessions returns how many sessions are taken over.
func (a *Adoption) Sessions() int { return len(a.adopted) }

// Start serves the clients that were taken over. The lookup sockets must be set. What was held back
// is handled first.
func (a *Adoption) Start() error {
	s := a.server
	for len(a.adopted) > 0 {
		one := a.adopted[0]
		ses := one.ses
		if one.replies && one.lingers == nil {
			fd := -1
			if one.direct != nil {
				var err error
				if fd, err = unix.FcntlInt(one.direct.Fd(), unix.F_DUPFD_CLOEXEC, 0); err != nil {
					return fmt.Errorf("direct socket: %w", err)
				}
			}
			if err := s.lookups.Adopt(ses.id, ses.secret, fd, one.lookups); err != nil {
				return err
			}
			ses.replies, one.router = true, one.direct == nil
		}
		ipc.CloseFiles([]*os.File{one.direct})
		a.adopted = a.adopted[1:]
		if ses.conn == nil { // its client has died
			one.unlock()
			s.leave(ses)
			continue
		}
		s.attend(ses.conn, one.goOn)
	}
	for _, v := range a.visitors {
		s.attend(v.conn, func() (kept bool) {
			if len(v.hello) == 0 {
				return s.serveConn(v.conn, a.listener, nil, nil)
			}
			return s.serveConn(v.conn, a.listener, v.hello, v.held)
		})
	}
	a.visitors = nil
	return nil
}

// Close ends the connections of an Adoption that was not started.
func (a *Adoption) Close() {
	for _, one := range a.adopted {
		one.unlock()
		ipc.CloseFiles([]*os.File{one.direct})
		if one.ses.conn != nil {
			one.ses.conn.Close()
			one.ses.conn.Recycle()
		}
	}
	for _, v := range a.visitors {
		closeAll(v.held)
		v.conn.Close()
		v.conn.Recycle()
	}
	a.adopted, a.visitors = nil, nil
}

// welcome sends a client what has changed with the process, and the regions that it does not have.
func (a *adopted) welcome() error {
	ses := a.ses
	s := ses.server
	defer a.unlock()
	m := wire.Moved{Generation: s.cfg.Generation, LookupEndpoint: s.lookups.LookupEndpoint()}
	if a.router {
		m.ReplyEndpoint = s.lookups.ReplyEndpoint()
	}
	err := ses.conn.Send(m.Append(nil), s.cfg.Control.FD())
	for i := range a.regions {
		if err == nil {
			err = ses.conn.Send(a.regions[i].message(s.cfg.Generation), a.regions[i].FD)
		}
	}
	return err
}

// unlock lets others push messages to the client.
func (a *adopted) unlock() {
	if a.lingers == nil && !a.unlocked {
		a.unlocked = true
		a.ses.sendMu.Unlock()
	}
}

func (s *Server) sessionLog(id uint64, role string, key instanceKey, pid int32) *zap.Logger {
	return s.log.With(zap.String("session", fmt.Sprintf("%016x", id)), zap.String("role", role),
		zap.String("engine", key.id), zap.Uint32("rank", key.rank), zap.Int("pid", int(pid)))
}
