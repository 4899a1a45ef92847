package ipc

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/pebbe/zmq4"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"lookaside/ipc/wire"
)

const (
	// maxLookupPeers bounds the connections to one bound socket. A scheduler needs one. libzmq has
	// no such bound, and aborts the process when it runs out of descriptors.
	maxLookupPeers = 128
	// recvHWM bounds the messages that wait on one connection. The loop takes them at once; further
	// ones wait in the sender.
	recvHWM = 32
	// sendHWM bounds the replies that wait for a peer that does not read. Each is a few bytes.
	sendHWM = 1024
	// burst is how many messages of one socket, or posted replies, are handled before the other
	// sockets have their turn. burstTime is how long messages of one socket are handled: libzmq
	// reads from a peer that was silent only after that.
	burst     = 64
	burstTime = 200 * time.Microsecond
	// maxPosts bounds the posted replies that wait for the loop. The loop sends them within
	// microseconds, so it is stuck when so many wait.
	maxPosts = 1 << 14
	// handshakeTimeout closes a connection that does not speak ZMTP.
	handshakeTimeout = 2 * time.Second
	// breakPause is how long a socket stays shut after a flood.
	breakPause = 100 * time.Millisecond
	// closePatience bounds the wait for libzmq's thread to close a socket, which takes
	// microseconds.
	closePatience = time.Second
	// earlyPatience is how long replies to adopted clients of ZMQ wait for these to connect anew,
	// which takes libzmq some 100 ms. maxEarly bounds how many wait. earlyPoll is how often they
	// are tried.
	earlyPatience = 3 * time.Second
	maxEarly      = 4096
	earlyPoll     = 2 * time.Millisecond
	// detachLinger is how long Detach waits for libzmq to send what it has.
	detachLinger = 20 * time.Millisecond
)

// Handler handles lookup messages. All its methods are called from one goroutine, which serves
// nobody else meanwhile. So they must not wait, and must not call AddSession, RemoveSession or
// Close. A message is what a peer sent, unchecked, and is valid until the method returns.
type Handler interface {
	// HandleLookup handles one native message. Unless answer is empty, it is sent to the session's
	// client. reply is an empty buffer that answer may use; answer must stay valid until the next
	// call. Post sends a later reply.
	HandleLookup(msg, reply []byte) (session uint64, answer []byte)
	// HandleLMCache handles one of LMCache's messages. If answer is true, hitTokens is sent as the
	// reply to a lookup; a cleanup has no reply. PostLMCache sends a later reply.
	HandleLMCache(req *wire.LMCacheRequest) (hitTokens uint32, answer bool)
	// Tick is called every LookupOptions.Tick, and earlier by request of LookupSockets.TickWithin.
	Tick()
}

// LookupOptions configure LookupSockets.
type LookupOptions struct {
	// Limits caps the messages of LMCache and, by Limits.MessageBytes, the length of a frame.
	// libzmq drops a longer frame together with its connection. Default: wire.DefaultLimits.
	Limits wire.Limits
	// HeapBytes is how far the C heap may grow above its size at start before every lookup
	// connection is dropped. It is needed because a peer can make libzmq hold any number of frames
	// of an unfinished message, and no option of libzmq bounds that. Default 1 GiB.
	HeapBytes int
	// Tick is the period of Handler.Tick. Default 100 ms.
	Tick time.Duration
	// LMCacheWorker is the path that LMCache's lookup client sends to. A PULL is bound there.
	// LMCacheScheduler is the path that the client listens on. A PUSH connects to it. Set both or
	// neither, with or without "ipc://".
	LMCacheWorker, LMCacheScheduler string
	// Log receives floods. Default: no log.
	Log *zap.Logger
}

func (o *LookupOptions) ensureDefaults() {
	if o.Limits == (wire.Limits{}) {
		o.Limits = wire.DefaultLimits
	}
	if o.HeapBytes <= 0 {
		o.HeapBytes = 1 << 30
	}
	if o.Tick <= 0 {
		o.Tick = 100 * time.Millisecond
	}
	if o.Log == nil {
		o.Log = zap.NewNop()
	}
}

// LookupStats are counts since the start, except Sessions and Peers.
type LookupStats struct {
	Sessions int    // that replies can be sent to now
	Peers    int    // connections to the bound sockets now
	Messages uint64 // received, malformed ones included
	// Malformed counts messages dropped for their frames, and LMCache's dropped for their content.
	// The handler counts the other malformed ones.
	Malformed uint64
	Answers   uint64 // replies sent
	Dropped   uint64 // replies dropped because the peer does not read or is not connected
	NoSession uint64 // replies dropped because their session has ended
	// FloodBreaks counts how often a socket was shut because of too many connections or too much
	// memory.
	FloodBreaks uint64
}

type lookupCounters struct {
	sessions, peers                                  atomic.Int64
	messages, malformed, answers, dropped, noSession atomic.Uint64
	floodBreaks                                      atomic.Uint64
}

// LookupSockets has the ZMQ sockets of lookups and the goroutine that owns them, its loop. The loop
// receives a request into a fixed buffer, calls the Handler and sends the reply, all on its own
// thread, because a hand-over to another costs more than the lookup itself. In steady state a
// lookup allocates nothing.
//
// A session may have a direct socket (direct.go), which the loop serves beside the ZMQ sockets. Its
// replies go there.
//
// A ROUTER sends the other replies to the connection whose routing id is the session's secret. A
// PUSH is not used: it would spread the replies over all its connections, and any process of the
// user can connect.
//
// The loop also watches what libzmq does not bound: the number of connections of each bound socket,
// by the socket's monitor, and the memory of the C heap. When a bound is passed, the loop shuts the
// socket with all its connections and opens it again a little later; honest peers reconnect by
// themselves. Connections that come while the loop is busy cannot end the process, because
// libzmq's thread goes on when no descriptors are left (accept_linux.c).
//
// Methods may be called from any goroutine.
type LookupSockets struct {
	dir     string
	opt     LookupOptions
	handler Handler
	count   lookupCounters
	wake    int // eventfd

	mu      sync.Mutex
	queue   []func()      // for the loop to run; guarded by mu
	posts   []post        // for the loop to send; guarded by mu
	closed  bool          // guarded by mu
	done    chan struct{} // closed when the loop has ended
	stopped bool          // used by the loop only

	// The fields below are used by the loop only.
	ctx        *zmq4.Context
	native     *guarded
	replies    *guarded
	lmWorker   *guarded // nil without LMCache
	lmSend     *zsock
	sessions   map[uint64]*replyTo // that replies can be sent to
	directs    []*direct           // in the order of their poll items, which follow those of watched
	poll       *poller
	watched    []*guarded // every bound socket, in the order of their poll items
	buf        []byte
	reply      []byte
	sending    []post // taken from posts
	frames     [][]byte
	lmRequest  wire.LMCacheRequest
	monitorSeq int
	heapStart  int
	tickBy     time.Time // when TickWithin wants the next tick; zero: at the regular time
	early      []post    // replies to clients that are about to connect anew, oldest first
	earlyUntil time.Time // when these are dropped
}

// NewLookupSockets opens the lookup sockets and starts to serve them. The caller must own the
// directory by a Listener.
func NewLookupSockets(dir string, opt LookupOptions, h Handler) (*LookupSockets, error) {
	opt.ensureDefaults()
	if (opt.LMCacheWorker == "") != (opt.LMCacheScheduler == "") {
		return nil, errors.New("lmcache.worker_endpoint and lmcache.scheduler_endpoint: set both or neither")
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("runtime.dir: %w", err)
	}
	if err := checkPath("runtime.dir", filepath.Join(dir, longestName)); err != nil {
		return nil, err
	}
	l := &LookupSockets{
		dir: dir, opt: opt, handler: h,
		done:     make(chan struct{}),
		sessions: make(map[uint64]*replyTo),
		buf:      make([]byte, opt.Limits.MessageBytes()),
		reply:    make([]byte, 0, 4096),
	}
	if l.wake, err = unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC); err != nil {
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	if err := startLoop(l.open, l.loop, l.shut, l.done); err != nil {
		unix.Close(l.wake)
		return nil, err
	}
	return l, nil
}

// LookupEndpoint returns the ZMQ endpoint that clients push lookups to.
func (l *LookupSockets) LookupEndpoint() string {
	return endpoint(filepath.Join(l.dir,
		lookupName))
}

// Stats returns the counts.
func (l *LookupSockets) Stats() LookupStats {
	c := &l.count
	return LookupStats{
		Sessions: int(c.sessions.Load()), Peers: int(c.peers.Load()),
		Messages: c.messages.Load(), Malformed: c.malformed.Load(),
		Answers: c.answers.Load(), Dropped: c.dropped.Load(), NoSession: c.noSession.Load(),
		FloodBreaks: c.floodBreaks.Load(),
	}
}

// ReplyEndpoint returns the ZMQ endpoint that clients receive replies from.
func (l *LookupSockets) ReplyEndpoint() string { return endpoint(filepath.Join(l.dir, replyName)) }

// replyTo is where a session's replies go.
type replyTo struct {
	secret []byte  // the routing id at the ROUTER; unused with direct
	direct *direct // nil: by the ROUTER

	adopted bool // its client may have yet to connect anew
}

// AddSession makes replies to a session possible. They go only to the client that connects to
// ReplyEndpoint with the session's secret as its routing id, or that has the session's direct
// socket. It returns ErrClosed after Close.
func (l *LookupSockets) AddSession(id uint64, secret []byte) error {
	return l.add(id, &replyTo{secret: bytes.Clone(secret)})
}

func (l *LookupSockets) add(id uint64, to *replyTo) error {
	if !l.do(func() { l.enter(id, to) }) {
		return ErrClosed
	}
	return nil
}

// enter is add on the loop.
func (l *LookupSockets) enter(id uint64, to *replyTo) {
	l.sessions[id] = to
	l.count.sessions.Store(int64(len(l.sessions)))
	if to.direct != nil {
		l.directs = append(l.directs, to.direct)
		l.pollDirects()
	}
}

// RemoveSession ends replies to a session: later ones are dropped. It closes the session's direct
// socket.
func (l *LookupSockets) RemoveSession(id uint64) {
	l.do(func() {
		if to := l.sessions[id]; to != nil && to.direct != nil {
			l.closeDirect(to.direct)
		}
		delete(l.sessions, id)
		l.count.sessions.Store(int64(len(l.sessions)))
	})
}

// post is a reply from another goroutine than the loop's.
type post struct {
	session uint64 // that the reply is for; 0: LMCache
	lookup  []byte // the first frame of a reply to LMCache's multipart form: the id; or empty
	msg     []byte
}

// Post sends a copy of msg to a session's client. It does not wait. It drops and counts the message
// if too many wait for the loop or if the session has ended.
func (l *LookupSockets) Post(session uint64, msg []byte) {
	l.post(post{session: session, msg: bytes.Clone(msg)})
}

// TickWithin makes the loop call Handler.Tick within d, rounded up to whole milliseconds. Only the
// Handler's methods may call it.
func (l *LookupSockets) TickWithin(d time.Duration) {
	if by := time.Now().Add(d); l.tickBy.IsZero() || by.Before(l.tickBy) {
		l.tickBy = by
	}
}

// PostLMCache replies to the LMCache lookup with the given id, in the form that the lookup had. It
// does not wait; see Post.
func (l *LookupSockets) PostLMCache(id []byte, multipart bool, hitTokens uint32) {
	if multipart {
		l.post(post{lookup: bytes.Clone(id), msg: wire.AppendLMCacheTokens(nil, hitTokens)})
	} else {
		l.post(post{msg: wire.AppendLMCacheResponse(nil, id, hitTokens)})
	}
}

func (l *LookupSockets) post(p post) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || len(l.posts) >= maxPosts {
		l.count.dropped.Add(1)
		return
	}
	l.posts = append(l.posts, p)
	if len(l.posts) == 1 {
		l.kick()
	}
}

// Close stops serving and removes the sockets. A second Close only waits for the first.
func (l *LookupSockets) Close() error {
	l.mu.Lock()
	first := !l.closed
	l.closed = true
	if first {
		l.queue = append(l.queue, func() { l.stopped = true })
		l.kick()
	}
	l.mu.Unlock()
	<-l.done
	if first {
		unix.Close(l.wake)
	}
	return nil
}

// Detach stops serving, like Close, for a process that takes over. It first handles what libzmq had
// received by then, and gives libzmq a moment to send the replies. It returns the direct sockets by
// session, with what their clients have sent and the loop has not read. The caller owns them.
func (l *LookupSockets) Detach() map[uint64]int {
	directs := map[uint64]int{}
	if !l.do(func() { l.detach(directs) }) {
		return directs
	}
	<-l.done
	unix.Close(l.wake)
	return directs
}

// detach is Detach on the loop.
func (l *LookupSockets) detach(directs map[uint64]int) {
	for l.serveRest() {
	}
	l.mu.Lock()
	l.closed = true // nothing is queued or posted from here on
	queue, posts := l.queue, l.posts
	l.queue, l.posts = nil, nil
	l.mu.Unlock()
	for i := range posts {
		l.send(&posts[i])
	}
	for id, to := range l.sessions {
		if to.direct != nil && to.direct.fd >= 0 {
			directs[id] = to.direct.fd
			to.direct.fd = -1
		}
	}
	l.directs = nil
	for _, f := range queue {
		f()
	}
	l.replies.lingers()
	if l.lmSend != nil {
		l.lmSend.lingers()
	}
	l.stopped = true
}

// lingers makes the socket's close wait for what is not sent yet, which is dropped otherwise.
func (s *zsock) lingers() { _ = s.SetLinger(detachLinger) }

// serveRest handles messages that libzmq has received, at most a burst of each socket, and reports
// whether there was any.
func (l *LookupSockets) serveRest() bool {
	before := l.count.messages.Load()
	l.serveNative()
	if l.lmWorker != nil {
		l.serveLMCache()
	}
	return l.count.messages.Load() != before
}

// Adopt makes replies to a session possible whose client was another process's before. fd is the
// loop's end of the session's direct socket, which Adopt owns, or -1: replies then go to the
// connection of the secret. The Handler must know the session already. Adopt has it handle the
// messages in held, in their order, before any that comes.
func (l *LookupSockets) Adopt(id uint64, secret []byte, fd int, held [][]byte) error {
	to := &replyTo{secret: bytes.Clone(secret), adopted: true}
	if fd >= 0 {
		// It may have become blocking on its way, and the loop must never wait for one session.
		if err := unix.SetNonblock(fd, true); err != nil {
			closeFD(fd)
			return fmt.Errorf("direct socket: %w", err)
		}
		to.direct = &direct{fd: fd}
	}
	if !l.do(func() {
		l.enter(id, to)
		l.earlyUntil = time.Now().Add(earlyPatience)
		for _, msg := range held {
			l.handle(msg)
		}
	}) {
		closeFD(fd)
		return ErrClosed
	}
	return nil
}

// Handle handles messages as if they were received now, in their order. take returns them. It is
// called on the goroutine of the Handler.
func (l *LookupSockets) Handle(take func() [][]byte) {
	l.do(func() {
		for _, msg := range take() {
			l.handle(msg)
		}
	})
}

// handle handles a native message on the loop.
func (l *LookupSockets) handle(msg []byte) {
	if session, answer := l.handler.HandleLookup(msg, l.reply[:0]); len(answer) > 0 {
		l.answer(session, answer)
	}
}

// do runs f on the loop and waits for it. It returns false if the loop is closed.
func (l *LookupSockets) do(f func()) bool {
	ran := make(chan struct{})
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return false
	}
	l.queue = append(l.queue, func() { f(); close(ran) })
	l.kick()
	l.mu.Unlock()
	<-ran
	return true
}

// kick wakes the loop. The caller holds mu, so the eventfd is not closed yet.
func (l *LookupSockets) kick() {
	one := [8]byte{1} // any native-endian number above 0 will do
	_, _ = unix.Write(l.wake, one[:])
}

func endpoint(path string) string { return "ipc://" + path }

func (l *LookupSockets) open() error {
	var err error
	if l.ctx, err = zmq4.NewContext(); err != nil {
		return fmt.Errorf("zmq context: %w", err)
	}
	// Without "blocky", Term does not wait for unsent messages.
	if err := l.ctx.SetBlocky(false); err != nil {
		return fmt.Errorf("zmq context: %w", err)
	}
	if l.native, err = l.bind(zmq4.PULL, filepath.Join(l.dir, lookupName),
		maxLookupPeers); err != nil {
		return err
	}
	if l.replies, err = l.bind(zmq4.ROUTER, filepath.Join(l.dir, replyName),
		maxLookupPeers); err != nil {
		return err
	}
	l.watched = append(l.watched, l.native, l.replies)
	if l.opt.LMCacheWorker != "" {
		if err := l.openLMCache(); err != nil {
			return err
		}
		l.watched = append(l.watched, l.lmWorker)
	}
	var socks []*zsock
	for _, g := range l.watched {
		socks = append(socks, g.zsock)
	}
	for _, g := range l.watched {
		socks = append(socks, g.monitor)
	}
	l.poll = newPoller(l.wake, socks...)
	l.heapStart = heapBytes()
	return nil
}

func (l *LookupSockets) openLMCache() error {
	worker := strings.TrimPrefix(l.opt.LMCacheWorker, "ipc://")
	scheduler := strings.TrimPrefix(l.opt.LMCacheScheduler, "ipc://")
	for _, p := range []struct{ setting, path string }{
		{"lmcache.worker_endpoint", worker}, {"lmcache.scheduler_endpoint", scheduler},
	} {
		if !filepath.IsAbs(p.path) || strings.Contains(p.path, "://") {
			return fmt.Errorf("%s: %q is not an absolute path, with or without ipc://", p.setting,
				p.path)
		}
		if err := checkPath(p.setting, p.path); err != nil {
			return err
		}
	}
	if worker == scheduler {
		return errors.New("lmcache.worker_endpoint and lmcache.scheduler_endpoint are the same path")
	}
	// LMCache chooses the path, which is not in our directory. So no lock guards it, and bind would
	// silently take it from a live server.
	if c, err := net.DialTimeout("unix", worker, time.Second); err == nil {
		c.Close()
		return fmt.Errorf("lmcache.worker_endpoint: another process listens on %s", worker)
	}
	if st, err := os.Lstat(worker); err == nil && st.Mode()&os.ModeSocket == 0 {
		return fmt.Errorf("lmcache.worker_endpoint: %s is there and is not a socket", worker)
	}
	var err error
	if l.lmWorker, err = l.bind(zmq4.PULL, worker, maxLookupPeers); err != nil {
		return fmt.Errorf("lmcache.worker_endpoint: %w", err)
	}
	if l.lmSend, err = l.socket(zmq4.PUSH); err != nil {
		return err
	}
	if err := l.lmSend.Connect(endpoint(scheduler)); err != nil {
		return fmt.Errorf("lmcache.scheduler_endpoint: %w", err)
	}
	return nil
}

// socket makes a socket and sets every bound that libzmq has.
func (l *LookupSockets) socket(t zmq4.Type) (*zsock, error) {
	s, err := newZsock(l.ctx, t)
	if err != nil {
		return nil, err
	}
	maxBytes := int64(l.opt.Limits.MessageBytes())
	if t != zmq4.PULL {
		maxBytes = 128 // a socket for replies receives nothing but handshakes
	}
	err = errors.Join(
		s.SetLinger(0),
		s.SetRcvhwm(recvHWM),
		s.SetSndhwm(sendHWM),
		s.SetMaxmsgsize(maxBytes),
		s.SetBacklog(64),
		s.SetHandshakeIvl(handshakeTimeout),
		s.onlyUID(os.Geteuid()),
	)
	if err == nil && t == zmq4.ROUTER {
		// Mandatory makes a send to an unknown routing id fail. Handover lets a client that
		// reconnects keep its routing id.
		err = errors.Join(s.SetRouterMandatory(1), s.SetRouterHandover(true))
	}
	if err != nil {
		s.Close()
		return nil, fmt.Errorf("zmq socket options: %w", err)
	}
	return s, nil
}

// guarded is a bound socket that can be shut for a while when it has too many connections.
type guarded struct {
	*zsock
	monitor  *zsock // PAIR that receives the socket's connection events
	endpoint string
	limit    int
	peers    int
	bound    bool
	shutAt   time.Time // when it was unbound because of a flood
	closed   bool      // libzmq has reported that the listening end is closed
	total    *atomic.Int64
	log      *zap.Logger
}

// bind makes a guarded socket on a path. It replaces a stale file there.
func (l *LookupSockets) bind(t zmq4.Type, path string, limit int) (*guarded, error) {
	s, err := l.socket(t)
	if err != nil {
		return nil, err
	}
	g := &guarded{zsock: s, endpoint: endpoint(path), limit: limit, total: &l.count.peers,
		log: l.opt.Log}
	l.monitorSeq++
	name := fmt.Sprintf("inproc://monitor-%d", l.monitorSeq)
	if err := g.start(l.ctx, name); err != nil {
		g.close()
		return nil, fmt.Errorf("zmq socket %s: %w", path, err)
	}
	return g, nil
}

// start starts a monitor of the socket, at the endpoint monitor, and binds the socket.
func (g *guarded) start(ctx *zmq4.Context, monitor string) (err error) {
	if err = g.Monitor(monitor,
		zmq4.EVENT_ACCEPTED|zmq4.EVENT_DISCONNECTED|zmq4.EVENT_CLOSED); err != nil {
		return err
	}
	if g.monitor, err = newZsock(ctx, zmq4.PAIR); err != nil {
		return err
	}
	if err = errors.Join(g.monitor.SetLinger(0), g.monitor.Connect(monitor)); err != nil {
		return err
	}
	return g.open()
}

func (g *guarded) open() error {
	g.closed = false
	if err := g.Bind(g.endpoint); err != nil {
		return err
	}
	g.bound = true
	return os.Chmod(g.path(), 0o600)
}

func (g *guarded) path() string { return strings.TrimPrefix(g.endpoint, "ipc://") }

// close closes the socket with its connections. libzmq's thread reports each of them by a blocking
// send to the monitor, and would hang for ever if nobody received. So close first ends the reports,
// and closes the monitor's receiving end last.
func (g *guarded) close() {
	if g.bound && g.Unbind(g.endpoint) == nil {
		for end := time.Now().Add(closePatience); !g.closed && time.Now().Before(end); {
			time.Sleep(20 * time.Microsecond)
			g.watch()
		}
	}
	// Only the connections that are left can still be reported, and there is room for that.
	if err := g.Monitor("", 0); err != nil {
		g.log.Error("zmq socket: monitor", zap.Error(err))
	}
	g.Close()
	if g.monitor != nil {
		g.monitor.Close()
	}
	// libzmq leaves the file. While the socket is shut, a file there may not be ours.
	if g.bound {
		g.unlink()
	}
	g.total.Add(-int64(g.peers))
	g.peers = 0
}

// unlink removes the file of the socket.
func (g *guarded) unlink() {
	if err := os.Remove(g.path()); err != nil {
		g.log.Warn("zmq socket: remove", zap.Error(err))
	}
}

// watch counts the connections by the monitor's events, and reports whether there are more than the
// limit.
func (g *guarded) watch() (flooded bool) {
	for {
		event, ok := g.monitor.event()
		if !ok {
			return g.peers > g.limit
		}
		delta := 0
		switch event {
		case zmq4.EVENT_ACCEPTED:
			delta = 1
		case zmq4.EVENT_DISCONNECTED:
			if g.peers > 0 {
				delta = -1
			}
		case zmq4.EVENT_CLOSED: // unbound: libzmq ends the connections without an event for each
			delta = -g.peers
			g.closed = true
		}
		g.peers += delta
		g.total.Add(int64(delta))
	}
}

// shut unbinds the socket, which ends its connections, and reports whether it did.
func (g *guarded) shut(why string) bool {
	if !g.bound {
		return false
	}
	g.log.Warn("zmq socket shut for a moment", zap.String("why", why),
		zap.String("endpoint", g.endpoint), zap.Int("peers", g.peers))
	if err := g.Unbind(g.endpoint); err != nil {
		g.log.Error("zmq socket: unbind", zap.Error(err))
		return false
	}
	g.unlink()
	g.bound, g.shutAt = false, time.Now()
	return true
}

// reopen binds the socket again once its pause is over.
func (g *guarded) reopen() {
	if g.bound || time.Since(g.shutAt) < breakPause {
		return
	}
	g.watch()
	if err := g.open(); err != nil {
		g.log.Error("zmq socket: bind", zap.Error(err)) // the next tick tries again
	}
}

func (l *LookupSockets) loop() {
	next := time.Now().Add(l.opt.Tick)
	for !l.stopped {
		by := next
		if !l.tickBy.IsZero() && l.tickBy.Before(next) {
			by = l.tickBy
		}
		if len(l.early) > 0 {
			by = time.Now().Add(earlyPoll)
		}
		if errno := l.poll.wait(time.Until(by)); errno != 0 && errno != syscall.EINTR {
			l.opt.Log.Error("lookup sockets: poll", zap.Error(errno))
			time.Sleep(10 * time.Millisecond) // so that the loop is never busy
		}
		if l.poll.ready(1) {
			l.serveNative()
		}
		if l.poll.ready(2) {
			l.dropReplies()
		}
		if l.lmWorker != nil && l.poll.ready(3) {
			l.serveLMCache()
		}
		for i, g := range l.watched {
			if l.poll.ready(1 + len(l.watched) + i) {
				l.check(g, false)
			}
		}
		l.serveDirects()
		if len(l.early) > 0 {
			l.sendEarly()
		}
		if l.poll.ready(0) {
			l.runQueue()
		}
		switch now := time.Now(); {
		case !now.Before(next):
			next, l.tickBy = now.Add(l.opt.Tick), time.Time{}
			l.tick()
		case !l.tickBy.IsZero() && !now.Before(l.tickBy):
			l.tickBy = time.Time{}
			l.handler.Tick()
		}
	}
}

func (l *LookupSockets) tick() {
	l.handler.Tick()
	tooMuch := heapBytes() > l.heapStart+l.opt.HeapBytes
	for _, g := range l.watched {
		l.check(g, tooMuch)
		g.reopen()
	}
}

// check shuts a socket if it has too many connections, or if the C heap is too large.
func (l *LookupSockets) check(g *guarded, tooMuch bool) {
	flooded := g.watch()
	if flooded && g.shut("too many connections") || tooMuch && g.shut("too much memory") {
		l.count.floodBreaks.Add(1)
	}
}

func (l *LookupSockets) runQueue() {
	var b [8]byte
	_, _ = unix.Read(l.wake, b[:])
	l.mu.Lock()
	queue := l.queue
	l.queue = nil
	n := min(len(l.posts), burst)
	l.sending = append(l.sending[:0], l.posts[:n]...)
	left := copy(l.posts, l.posts[n:])
	clear(l.posts[left:])
	if l.posts = l.posts[:left]; left > 0 && !l.closed {
		l.kick()
	}
	l.mu.Unlock()
	for i := range l.sending {
		l.send(&l.sending[i])
	}
	clear(l.sending)
	for _, f := range queue {
		f()
	}
}

// send sends a posted reply.
func (l *LookupSockets) send(p *post) {
	if p.session != 0 {
		l.answer(p.session, p.msg)
	} else if l.lmSend != nil {
		l.answerLMCache(p.lookup, p.msg)
	}
}

func (l *LookupSockets) answer(session uint64, msg []byte) {
	to := l.sessions[session]
	switch {
	case to == nil:
		l.count.noSession.Add(1)
	case to.direct != nil:
		l.countAnswer(to.direct.send(msg))
	default:
		errno := l.replies.route(to.secret, msg)
		if errno == syscall.EHOSTUNREACH && to.adopted && len(l.early) < maxEarly &&
			time.Now().Before(l.earlyUntil) {
			l.early = append(l.early, post{session: session, msg: bytes.Clone(msg)})
			return
		}
		l.countAnswer(errno)
	}
}

// sendEarly tries the replies again that wait for their clients to connect.
func (l *LookupSockets) sendEarly() {
	early := l.early
	l.early = nil
	for i := range early {
		l.send(&early[i]) // keeps it if its client is still not there
	}
}

// dropReplies drops messages that clients send to the socket for replies.
func (l *LookupSockets) dropReplies() {
	for range burst {
		if _, ok := l.receive(l.replies.zsock, 0); !ok {
			return
		}
	}
}

// answerLMCache sends a reply to LMCache. If id is not empty, it is a frame before msg.
func (l *LookupSockets) answerLMCache(id, msg []byte) {
	if len(id) > 0 {
		// libzmq takes whole messages: if it takes the first frame, it takes the second.
		if errno := l.lmSend.send(id, true); errno != 0 {
			l.countAnswer(errno)
			return
		}
	}
	l.countAnswer(l.lmSend.send(msg, false))
}

// serveNative handles native lookups that wait, at most a burst.
func (l *LookupSockets) serveNative() {
	for n, start := 0, time.Now(); n < burst && (n == 0 || time.Since(start) < burstTime); n++ {
		frames, ok := l.receive(l.native.zsock, 1)
		if !ok {
			return
		}
		if frames == nil {
			continue
		}
		l.handle(frames[0])
	}
}

// serveLMCache handles LMCache's messages that wait, at most a burst.
func (l *LookupSockets) serveLMCache() {
	for n, start := 0, time.Now(); n < burst && (n == 0 || time.Since(start) < burstTime); n++ {
		frames, ok := l.receive(l.lmWorker.zsock, wire.MaxLMCacheFrames)
		if !ok {
			return
		}
		if frames == nil {
			continue
		}
		req := &l.lmRequest
		if err := req.Decode(frames, &l.opt.Limits); err != nil {
			l.count.malformed.Add(1)
			continue
		}
		tokens, answer := l.handler.HandleLMCache(req)
		if !answer || req.Cleanup {
			continue
		}
		if req.Multipart {
			l.answerLMCache(req.ID, wire.AppendLMCacheTokens(l.reply[:0], tokens))
		} else {
			l.answerLMCache(nil, wire.AppendLMCacheResponse(l.reply[:0], req.ID, tokens))
		}
	}
}

func (l *LookupSockets) countAnswer(errno syscall.Errno) {
	if errno == 0 {
		l.count.answers.Add(1)
	} else {
		l.count.dropped.Add(1)
	}
}

// receive receives one message. ok is false if there is none. frames is nil if the message has more
// than limit frames, or if together they are longer than the buffer.
func (l *LookupSockets) receive(s *zsock, limit int) (frames [][]byte, ok bool) {
	l.frames = l.frames[:0]
	good, rest := true, l.buf
	for {
		size, more, errno := s.recv(rest)
		if errno != 0 {
			if errno != syscall.EAGAIN && errno != syscall.EINTR {
				l.opt.Log.Error("lookup sockets: receive", zap.Error(errno))
			}
			return nil, false
		}
		if size > len(rest) || len(l.frames) == limit {
			good = false
		}
		if good {
			l.frames = append(l.frames, rest[:size:size])
			rest = rest[size:]
		}
		if !more {
			break
		}
	}
	l.count.messages.Add(1)
	if !good {
		l.count.malformed.Add(1)
		return nil, true
	}
	return l.frames, true
}

// shut closes everything that open has made, also if open failed halfway.
func (l *LookupSockets) shut() {
	for _, d := range l.directs {
		d.close()
	}
	for _, g := range []*guarded{l.native, l.replies, l.lmWorker} {
		if g != nil {
			g.close()
		}
	}
	if l.lmSend != nil {
		l.lmSend.Close()
	}
	if l.poll != nil {
		l.poll.close()
	}
	if l.ctx != nil {
		if err := l.ctx.Term(); err != nil {
			l.opt.Log.Error("lookup sockets: term", zap.Error(err))
		}
	}
}
