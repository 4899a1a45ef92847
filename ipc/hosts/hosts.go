package hosts

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/cespare/xxhash/v2"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"lookaside/dax"
	"lookaside/ipc"
	"lookaside/ipc/wire"
)

const (
	// patience bounds the time from a connection to its session: for a caller to connect, and for
	// an answerer to be told everything. It is shorter than the scheduler's, which thus learns the
	// reason.
	patience = 3 * time.Second
	// maxStrangers is how many connections an answerer greets at a time. One more ends the oldest.
	maxStrangers = 32
	// stuckAfter is how long an end may leave what it was sent unread.
	stuckAfter = time.Second
)

// helloPatience is how long a scheduler may take from connecting to its Hello. Tests change it.
var helloPatience = 10 * time.Second

const (
	// FDs is how many descriptors one of [Options.Connections] takes, both ways together: a TCP
	// connection, a local one with its pidfd, and a direct socket each, and a control region.
	FDs = 9
	// Bytes bounds the memory that one of Options.Connections takes, both ways together: buffers
	// for a packet for each source and for the stream, and what the kernel holds.
	Bytes = 2 * (4*wire.MaxPacketBytes + 1<<20)
)

// keepAlive has the kernel find a dead host: with nothing to say after some 4 s, and by
// unacknowledged, with something to say. The connection then ends, and so does its session.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: time.Second, Interval: time.Second,
	Count: 3}

// unacknowledged is the TCP_USER_TIMEOUT of connections.
const unacknowledged = 4 * time.Second

// Options configure a Hosts.
type Options struct {
	// Listen is where callers are accepted, host:port. "": none are.
	Listen string
	// Connections is how many sessions with other hosts are carried at a time, each way.
	Connections int
	// Token is what both ends must know. "": none is asked for.
	Token string
	// Answer has the certificate of an answerer, and whether callers need one. nil: no TLS.
	Answer *tls.Config
	// Call has what a caller checks answerers by. nil: no TLS. A ServerName that is empty is the
	// host that is called.
	Call *tls.Config
	// Log receives sessions and refusals.
	Log *zap.Logger
}

// Hosts carries sessions of schedulers to and from other hosts. Its methods may be called from any
// goroutine.
type Hosts struct {
	dir string
	opt Options
	log *zap.Logger

	local *ipc.Listener // accepts schedulers
	tcp   net.Listener  // accepts callers; nil: there are none

	ctx  context.Context // ends with Close
	stop context.CancelFunc
	wg   sync.WaitGroup // all goroutines

	refused atomic.Uint64 // callers
	failed  atomic.Uint64 // calls
	dropped atomic.Uint64 // answers that a scheduler did not read

	in atomic.Int64 // sessions of other hosts, those included that are being opened

	mu        sync.Mutex // guards the fields below
	closed    bool
	strangers []net.Conn // being greeted, oldest first
	tunnels   map[*tunnel]struct{}
}

// Start starts to carry sessions for the sidecar that l is the session socket of. Close must be
// called before l's Close.
func Start(l *ipc.Listener, opt Options) (*Hosts, error) {
	h := &Hosts{dir: l.Dir(), opt: opt, log: opt.Log, tunnels: map[*tunnel]struct{}{}}
	var err error
	if opt.Listen != "" {
		if h.tcp, err = net.Listen("tcp", opt.Listen); err != nil {
			return nil, fmt.Errorf("hosts.listen: %w", err)
		}
	}
	h.local, err = l.ListenHosts(ipc.Options{MaxSessions: opt.Connections,
		Limit: "hosts.connections", Log: opt.Log})
	if err != nil {
		if h.tcp != nil {
			h.tcp.Close()
		}
		return nil, err
	}
	h.ctx, h.stop = context.WithCancel(context.Background())
	h.wg.Go(h.serveSchedulers)
	if h.tcp != nil {
		h.wg.Go(h.serveCallers)
	}
	return h, nil
}

// Addr returns the host:port where callers are accepted, "" if they are not.
func (h *Hosts) Addr() string {
	if h == nil || h.tcp == nil {
		return ""
	}
	return h.tcp.Addr().String()
}

// Close ends all sessions that are carried and waits for the goroutines. It is idempotent, and does
// nothing on nil.
func (h *Hosts) Close() error {
	if h == nil {
		return nil
	}
	h.mu.Lock()
	if h.closed {
		h.mu.Unlock()
		return nil
	}
	h.closed = true
	for _, c := range h.strangers {
		c.Close()
	}
	for t := range h.tunnels {
		t.end()
	}
	h.mu.Unlock()
	h.stop()
	err := h.local.Close()
	if h.tcp != nil {
		err = errors.Join(err, h.tcp.Close())
	}
	h.wg.Wait()
	return err
}

// Direction says which end of a carried session this sidecar is.
type Direction string

// The directions.
const (
	In  Direction = "in"  // a scheduler of another host has the session with this sidecar
	Out Direction = "out" // a scheduler of this host has the session with another sidecar
)

// Carried describes one carried session.
type Carried struct {
	Direction Direction `json:"direction" doc:"in: of a scheduler of another host with this sidecar. out: of a scheduler of this host with a sidecar of another."`
	Address   string    `json:"address" doc:"The other host's end."`
	Session   string    `json:"session"`
	EngineID  string    `json:"engine_id"`
	Rank      uint32    `json:"rank"`
	Since     time.Time `json:"since"`
}

// Status describes the sessions with other hosts.
type Status struct {
	Listen  string    `json:"listen" doc:"Where schedulers of other hosts are accepted; empty: nowhere."`
	Carried []Carried `json:"carried"`
	Refused uint64    `json:"refused" doc:"Connections of other hosts that were not let in."`
	Failed  uint64    `json:"failed" doc:"Attempts of schedulers of this host to reach another that failed."`
	Dropped uint64    `json:"dropped" doc:"Answers that a scheduler of this host did not read."`
}

// Status returns a snapshot. On nil it is empty.
func (h *Hosts) Status() Status {
	st := Status{Carried: []Carried{}}
	if h == nil {
		return st
	}
	st.Listen, st.Refused, st.Failed = h.Addr(), h.refused.Load(), h.failed.Load()
	st.Dropped = h.dropped.Load()
	h.mu.Lock()
	defer h.mu.Unlock()
	for t := range h.tunnels {
		st.Carried = append(st.Carried, t.info)
	}
	slices.SortFunc(st.Carried, func(a, b Carried) int {
		return cmp.Or(a.Since.Compare(b.Since), cmp.Compare(a.Session, b.Session))
	})
	return st
}

// ---- as an answerer ----

func (h *Hosts) serveCallers() {
	for {
		c, err := h.tcp.Accept()
		switch {
		case err == nil:
		case errors.Is(err, net.ErrClosed):
			return
		default: // descriptors have run out for a while
			h.log.Warn("accepting another host failed", zap.Error(err))
			select {
			case <-h.ctx.Done():
			case <-time.After(50 * time.Millisecond):
			}
			continue
		}
		if !h.meet(c) {
			c.Close()
			return
		}
		h.wg.Go(func() { h.serveCaller(c) })
	}
}

// meet adds a stranger, and ends the oldest if there are too many. It returns false after Close.
func (h *Hosts) meet(c net.Conn) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return false
	}
	if len(h.strangers) == maxStrangers {
		h.strangers[0].Close()
		h.strangers = slices.Delete(h.strangers, 0, 1)
	}
	h.strangers = append(h.strangers, c)
	return true
}

// known ends what meet began.
func (h *Hosts) known(c net.Conn) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.strangers = slices.DeleteFunc(h.strangers, func(s net.Conn) bool { return s == c })
}

func (h *Hosts) serveCaller(c net.Conn) {
	defer c.Close()
	address := c.RemoteAddr().String()
	t, err := h.open(c)
	h.known(c)
	if err != nil {
		h.refused.Add(1)
		h.log.Warn("refused a scheduler of another host", zap.String("address", address),
			zap.Error(err))
		return
	}
	t.info.Address = address
	h.carry(t)
	t.conn.Recycle()
	h.in.Add(-1)
}

// open greets a caller and opens its session with this sidecar.
func (h *Hosts) open(c net.Conn) (*tunnel, error) {
	if err := errors.Join(c.SetDeadline(time.Now().Add(patience)), watchHost(c)); err != nil {
		return nil, err
	}
	stream := c
	if h.opt.Answer != nil {
		t := tls.Server(c, h.opt.Answer)
		err := t.HandshakeContext(h.ctx)
		var plain tls.RecordHeaderError
		if errors.As(err, &plain) && plain.Conn != nil {
			r := refuse(wire.RefuseDenied, "hosts.ca_file",
				"the other host's sidecar demands TLS: set hosts.ca_file to the authority of its certificate")
			_, _ = c.Write(appendFrame(nil, onGreeting, r.Append(nil)))
			drain(c)
			return nil, r
		}
		if err != nil {
			return nil, err
		}
		stream = t
	}
	var first [len(preamble)]byte
	if _, err := io.ReadFull(stream, first[:]); err != nil {
		return nil, err
	}
	if string(first[:]) != preamble {
		if first[0] == 0x16 { // a TLS handshake; that the reply is none says why it fails
			_, _ = c.Write([]byte(preamble))
			drain(c)
			return nil, errors.New("it speaks TLS, and hosts.cert_file is not set here")
		}
		return nil, fmt.Errorf("%w: not a sidecar", errFrame)
	}
	g := &greetings{token: h.opt.Token, conn: stream, frames: newFrames(stream)}
	if err := g.answer(); err != nil {
		drain(stream)
		return nil, err
	}
	t := &tunnel{hosts: h, stream: stream, frames: g.frames}
	if err := h.join(t); err != nil {
		var r *refused
		if errors.As(err, &r) {
			_, _ = stream.Write(appendFrame(nil, onSession, r.Append(nil)))
			drain(stream)
		}
		return nil, err
	}
	if err := c.SetDeadline(time.Time{}); err != nil { // Close has closed it
		h.leave(t)
		return nil, err
	}
	return t, nil
}

// leave ends the session that join has opened, before it is carried.
func (h *Hosts) leave(t *tunnel) {
	t.closeOurs()
	t.conn.Recycle()
	h.in.Add(-1)
}

// drain reads what the other end has sent and waits for its end. A connection that is closed with
// something unread is reset, and the other end may then not read the reason that it was sent.
func drain(c net.Conn) {
	if tc, ok := c.(interface{ CloseWrite() error }); ok {
		_ = tc.CloseWrite()
	}
	_, _ = io.CopyN(io.Discard, c, greetingBytes)
}

// join reads the caller's Hello and opens the session with this sidecar, as a client of it. If it
// returns nil, the session counts in h.in.
func (h *Hosts) join(t *tunnel) (err error) {
	b, err := t.frames.on(onSession, wire.MaxPacketBytes)
	if err != nil {
		return err
	}
	var hello wire.Hello
	if err := hello.Decode(b, &wire.DefaultLimits); err != nil {
		var v *wire.VersionError
		if errors.As(err, &v) {
			return refuseVersion(v.Got)
		}
		return &refused{wire.Refuse{Code: wire.RefuseMalformed, Message: err.Error()}}
	}
	if hello.Role != wire.RoleScheduler || !hello.Direct {
		return refuse(wire.RefuseIncompatible, "role",
			"only schedulers with a direct socket may come from another host: a worker must map this host's memory")
	}
	if h.in.Add(1) > int64(h.opt.Connections) {
		h.in.Add(-1)
		return refuse(wire.RefuseBusy, "hosts.connections",
			"the sidecar has its %d sessions of other hosts already", h.opt.Connections)
	}
	t.info = Carried{Direction: In, EngineID: hello.EngineID, Rank: hello.Rank, Since: time.Now()}
	if t.conn, err = ipc.DialSession(h.dir, stuckAfter); err != nil {
		h.in.Add(-1)
		return refuse(wire.RefuseBusy, "", "the sidecar takes no session now: %v", err)
	}
	reply, err := h.welcome(t, b, hello.DigestBytes)
	if err == nil {
		err = t.send(onSession, reply)
	}
	if err != nil {
		h.leave(t)
	}
	return err
}

// welcome sends the Hello to this sidecar and takes the descriptors of its reply. It returns the
// Welcome as the caller gets it, or a *refused.
func (h *Hosts) welcome(t *tunnel, hello []byte, digestBytes uint8) ([]byte, error) {
	err := t.conn.SetRecvDeadline(time.Now().Add(patience))
	if err == nil {
		err = t.conn.Send(hello)
	}
	if err != nil && !errors.Is(err, ipc.ErrPeerGone) { // it may have refused and closed already
		return nil, err
	}
	b, fds, err := t.conn.RecvFDs(nil)
	if err != nil {
		return nil, err
	}
	defer func() {
		for _, fd := range fds {
			unix.Close(fd)
		}
	}()
	if typ, _ := wire.Peek(b); typ == wire.TypeRefuse {
		r := new(refused)
		if err := r.Decode(b, &wire.DefaultLimits); err != nil {
			return nil, err
		}
		return nil, r
	}
	var w wire.Welcome
	if err := w.Decode(b, &wire.DefaultLimits); err != nil {
		return nil, err
	}
	if len(fds) != 2 {
		return nil, fmt.Errorf("%d descriptors with a Welcome", len(fds))
	}
	t.direct, err = ipc.DirectConn(fds[1])
	fds = fds[:1] // the control region, which another host cannot map
	if err != nil {
		return nil, err
	}
	t.info.Session = fmt.Sprintf("%016x", w.Session)
	// A path of this host means nothing there. So a lookup must fit the direct socket.
	w.LookupEndpoint, w.ReplyEndpoint = "", ""
	w.MaxPages = min(w.MaxPages, maxPages(digestBytes))
	reply := w.Append(nil)
	return reply, t.conn.SetRecvDeadline(time.Time{})
}

// ---- as a caller ----

func (h *Hosts) serveSchedulers() {
	for {
		conn, err := h.local.Accept(h.ctx)
		if err != nil {
			return
		}
		h.wg.Go(func() {
			if !h.serveScheduler(conn) {
				conn.Close()
			}
			conn.Recycle()
		})
	}
}

// serveScheduler serves one connection of hosts.sock. It returns whether it has closed it.
func (h *Hosts) serveScheduler(conn *ipc.Conn) (closed bool) {
	log := h.log.With(zap.Int32("pid", conn.Peer().PID))
	stop := context.AfterFunc(h.ctx, func() { conn.GiveUp(ipc.ErrClosed) })
	reach, hello, err := receiveReach(conn)
	stop()
	if err != nil {
		var r *refused
		if errors.As(err, &r) {
			_ = conn.Send(r.Append(nil))
		}
		log.Debug("a scheduler left before it had said whom to reach", zap.Error(err))
		return false
	}
	t := &tunnel{hosts: h, conn: conn, dropping: true}
	t.info = Carried{Direction: Out, Address: reach.Address, Since: time.Now()}
	var said wire.Hello
	if said.Decode(hello, &wire.DefaultLimits) == nil { // else the answerer refuses it
		t.info.EngineID, t.info.Rank = said.EngineID, said.Rank
	}
	ctx, cancel := context.WithTimeout(h.ctx, patience)
	defer cancel()
	left := make(chan struct{})
	h.wg.Go(func() {
		select {
		case <-conn.Closed():
			cancel()
		case <-left:
		}
	})
	err = h.reach(ctx, t, hello)
	close(left)
	if err != nil {
		h.failed.Add(1)
		r := explain(reach.Address, err)
		// A scheduler that is earlier than its worker tries again and again, which is normal.
		level := zap.WarnLevel
		if r.Code == wire.RefuseNoWorker {
			level = zap.DebugLevel
		}
		log.Log(level, "a sidecar of another host was not reached", zap.String("address",
			reach.Address), zap.String("engine", t.info.EngineID), zap.Uint32("rank", t.info.Rank),
			zap.Error(r))
		if !t.welcomed {
			_ = conn.Send(r.Append(nil))
		}
		return false
	}
	h.carry(t)
	return true
}

// receiveReach receives what a scheduler sends first: whom to reach, and its Hello.
func receiveReach(conn *ipc.Conn) (reach wire.Reach, hello []byte, err error) {
	if err := conn.SetRecvDeadline(time.Now().Add(helloPatience)); err != nil {
		return reach, nil, err
	}
	b, err := conn.Recv()
	if err != nil {
		return reach, nil, err
	}
	if err := reach.Decode(b, &wire.DefaultLimits); err != nil {
		var v *wire.VersionError
		if errors.As(err, &v) {
			return reach, nil, &refused{wire.Refuse{Code: wire.RefuseVersion, Field: "version",
				Want: fmt.Sprint(wire.Version), Got: fmt.Sprint(v.Got),
				Message: "the sidecar and its client are of different releases"}}
		}
		return reach, nil, &refused{wire.Refuse{Code: wire.RefuseMalformed, Message: err.Error()}}
	}
	if b, err = conn.Recv(); err != nil {
		return reach, nil, err
	}
	return reach, bytes.Clone(b), conn.SetRecvDeadline(time.Time{})
}

// reach connects t to its address, opens the session that hello asks for, and welcomes the
// scheduler.
func (h *Hosts) reach(ctx context.Context, t *tunnel, hello []byte) error {
	stream, err := h.dial(ctx, t.info.Address)
	if err != nil {
		return err
	}
	t.stream = stream
	stop := context.AfterFunc(ctx, func() { _ = stream.SetDeadline(time.Unix(1, 0)) })
	err = h.greet(t, hello)
	if !stop() && err == nil {
		err = os.ErrDeadlineExceeded
	}
	if err == nil {
		err = stream.SetDeadline(time.Time{})
	}
	if err != nil {
		stream.Close()
		if t.direct != nil {
			t.direct.Close() // the scheduler has not got the other end, or reads the end of it
		}
	}
	return err
}

func (h *Hosts) dial(ctx context.Context, address string) (net.Conn, error) {
	d := net.Dialer{KeepAliveConfig: keepAlive}
	c, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	if err := watchHost(c); err != nil {
		c.Close()
		return nil, err
	}
	if h.opt.Call == nil {
		return c, nil
	}
	cfg := h.opt.Call
	if cfg.ServerName == "" {
		cfg = cfg.Clone()
		if cfg.ServerName, _, err = net.SplitHostPort(address); err != nil {
			c.Close()
			return nil, err
		}
	}
	t := tls.Client(c, cfg)
	if err := t.HandshakeContext(ctx); err != nil {
		c.Close()
		return nil, err
	}
	return t, nil
}

// watchHost has the kernel end the connection when the other host is dead.
func watchHost(c net.Conn) error {
	tc, ok := c.(*net.TCPConn)
	if !ok {
		return nil
	}
	raw, err := tc.SyscallConn()
	if err != nil {
		return err
	}
	ctlErr := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, unix.TCP_USER_TIMEOUT,
			int(unacknowledged.Milliseconds()))
	})
	return errors.Join(err, ctlErr, tc.SetKeepAliveConfig(keepAlive), tc.SetNoDelay(true))
}

func (h *Hosts) greet(t *tunnel, hello []byte) error {
	if _, err := t.stream.Write([]byte(preamble)); err != nil {
		return err
	}
	g := &greetings{token: h.opt.Token, conn: t.stream, frames: newFrames(t.stream)}
	if err := g.call(); err != nil {
		return err
	}
	t.frames = g.frames
	if err := t.send(onSession, hello); err != nil {
		return err
	}
	b, err := t.frames.on(onSession, wire.MaxPacketBytes)
	if err != nil {
		return err
	}
	if typ, _ := wire.Peek(b); typ == wire.TypeRefuse {
		r := new(refused)
		if err := r.Decode(b, &wire.DefaultLimits); err != nil {
			return err
		}
		return r
	}
	var w wire.Welcome
	if err := w.Decode(b, &wire.DefaultLimits); err != nil {
		return err
	}
	return h.pass(t, &w)
}

// pass gives the scheduler the Welcome of the other host's sidecar, with a control region and a
// direct socket of this host's.
func (h *Hosts) pass(t *tunnel, w *wire.Welcome) error {
	control, err := dax.NewControl(w.Generation)
	if err != nil {
		return err
	}
	// The scheduler maps it. No one else writes it: the end of the session is the socket's.
	defer func() { _ = control.Leave() }()
	direct, theirs, err := ipc.DirectPair()
	if err != nil {
		return err
	}
	defer unix.Close(theirs)
	t.direct = direct
	t.info.Session = fmt.Sprintf("%016x", w.Session)
	if w.Peers != 0 {
		// Groups of lenders have numbers of their host. Two hosts may use one number for two
		// groups, and ranks of both would then leave each other's chunks out.
		host, _, _ := net.SplitHostPort(t.info.Address)
		w.Peers = max(1, w.Peers^xxhash.Sum64String(host))
	}
	err = t.conn.Send(w.Append(nil), control.FD(), theirs)
	t.welcomed = err == nil
	return err
}

// carry carries a session until it ends.
func (h *Hosts) carry(t *tunnel) {
	h.mu.Lock()
	if h.closed {
		h.mu.Unlock()
		t.close()
		return
	}
	h.tunnels[t] = struct{}{}
	h.mu.Unlock()
	log := h.log.With(zap.String("direction", string(t.info.Direction)), zap.String("address",
		t.info.Address), zap.String("session", t.info.Session), zap.String("engine",
		t.info.EngineID), zap.Uint32("rank", t.info.Rank))
	log.Info("carrying a session with another host")
	err := t.run()
	log.Info("the session with another host ended", zap.Error(err), zap.Duration("after",
		time.Since(t.info.Since).Round(time.Millisecond)))
	h.mu.Lock()
	delete(h.tunnels, t)
	h.mu.Unlock()
}
