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
	// maxLookupPeers bounds the connections to one bound socket: a scheduler needs
	// one. libzmq has no such bound of its own and aborts the process when it runs
	// out of descriptors.
	maxLookupPeers = 128
	// recvHWM bounds the messages that wait on one connection; the loop empties it
	// at once, so what is more waits in the sender.
	recvHWM = 32
	// sendHWM bounds the answers that wait for a peer that does not read. They are
	// a few bytes each.
	sendHWM = 1024
	// burst is how many messages of one socket, or posted answers, are handled
	// before the others have their turn, and burstTime how long messages are handled:
	// libzmq lets a peer that was silent take part only after that.
	burst     = 64
	burstTime = 200 * time.Microsecond
	// maxPosts bounds the posted answers that wait for the loop. It sends them
	// within microseconds, so that these many are a sign that it is stuck.
	maxPosts = 1 << 14
	// handshakeTimeout closes a connection that does not speak ZMTP.
	handshakeTimeout = 2 * time.Second
	// breakPause is how long a socket stays shut after a flood.
	breakPause = 100 * time.Millisecond
	// closePatience bounds the wait for libzmq's thread to close a socket; it takes
	// microseconds.
	closePatience = time.Second
)

// Handler answers lookup messages. Its methods are called from one goroutine,
// which answers nobody else meanwhile, so they must not wait, nor call AddSession,
// RemoveSession or Close. Messages are whatever a peer sent, valid until the
// method returns.
type Handler interface {
	// HandleLookup handles one native message. Unless answer is empty, it goes to
	// the session's client. reply is an empty buffer that answer may use;
	// answer must stay valid until the next call. What is answered later goes
	// through Post.
	HandleLookup(msg, reply []byte) (session uint64, answer []byte)
	// HandleLMCache handles one of LMCache's messages. The answer to a lookup is
	// how many tokens hit, unless answer is false; a cleanup has none. What is
	// answered later goes through PostLMCache.
	HandleLMCache(req *wire.LMCacheRequest) (hitTokens uint32, answer bool)
	// Tick is called every LookupOptions.Tick, and when LookupSockets.TickWithin wants it.
	Tick()
}

// LookupOptions configure LookupSockets.
type LookupOptions struct {
	// Limits are those that messages are decoded by; they also say how long a frame
	// may be. A longer one is dropped by libzmq, together with its connection.
	// Default: wire.DefaultLimits.
	Limits wire.Limits
	// HeapBytes is how far the C heap may grow above its size at start, before
	// every lookup connection is dropped: a peer can make libzmq hold any number of
	// frames of one unfinished message, which no option of it bounds. Default 1 GiB.
	HeapBytes int
	// Tick is the period of Handler.Tick. Default 100 ms.
	Tick time.Duration
	// LMCacheWorker is the path (with or without "ipc://") that LMCache's lookup
	// client sends to, where a PULL is bound; LMCacheScheduler the one that it
	// listens on, where a PUSH connects. Both or neither.
	LMCacheWorker, LMCacheScheduler string
	// Log is told of floods. Default: nothing.
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

// LookupStats are counts since the start, but for Sessions and Peers.
type LookupStats struct {
	Sessions int    // that may be answered now
	Peers    int    // connections to the bound sockets now
	Messages uint64 // received, malformed ones included
	// dropped for their frames, or of LMCache's for their content; the handler counts the others
	Malformed uint64
	Answers   uint64 // sent
	Dropped   uint64 // answers dropped because the peer does not read, or is not there
	NoSession uint64 // answers dropped because their session has ended
	// times that a socket was shut because of too many connections or too much memory
	FloodBreaks uint64
}

type lookupCounters struct {
	sessions, peers                                  atomic.Int64
	messages, malformed, answers, dropped, noSession atomic.Uint64
	floodBreaks                                      atomic.Uint64
}

// LookupSockets has the ZMQ sockets of lookups and the goroutine that owns them. A request is
// received into a fixed buffer, handled, and answered by that one goroutine, on its own thread:
// handing over to another costs more than the lookup itself. In steady state a lookup allocates
// nothing.
//
// Answers go by a ROUTER to the connection that is named by the session's secret. A PUSH would
// share them out among all who connect to it, and any process of the user can connect.
//
// What libzmq does not bound is watched by the same goroutine: the number of connections of each
// bound socket, by its monitor, and the memory of the C heap. When a bound is passed, the socket is
// shut with all its connections and opened again a little later; honest peers reconnect by
// themselves. What comes while this goroutine is busy cannot end the process: libzmq's own thread
// goes on when there are no descriptors left (accept_linux.c).
//
// Methods may be called from any goroutine.
type LookupSockets struct {
	dir     string
	opt     LookupOptions
	handler Handler
	count   lookupCounters
	wake    int // eventfd

	mu      sync.Mutex
	queue   []func() // for the loop to run; guarded by mu
	posts   []post   // for the loop to send; guarded by mu
	closed  bool     // guarded by mu
	done    chan struct{}
	stopped bool // the loop's own

	// All below belongs to the loop.
	ctx        *zmq4.Context
	native     *guarded
	replies    *guarded
	lmWorker   *guarded // nil without LMCache
	lmSend     *zsock
	sessions   map[uint64][]byte // the routing ids of those that may be answered
	poll       *poller
	watched    []*guarded // every bound socket, in the order of their poll items
	buf        []byte
	reply      []byte
	sending    []post // posts that were taken from the queue
	frames     [][]byte
	lmRequest  wire.LMCacheRequest
	monitorSeq int
	heapStart  int
	tickBy     time.Time // zero: at the next regular time
}

// NewLookupSockets opens the lookup sockets in a directory that the caller owns
// by a Listener, and starts to serve them.
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
		sessions: make(map[uint64][]byte),
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

// ReplyEndpoint returns the ZMQ endpoint that clients hear answers from.
func (l *LookupSockets) ReplyEndpoint() string { return endpoint(filepath.Join(l.dir, replyName)) }

// AddSession lets a session be answered: whoever connects to ReplyEndpoint with its secret as the
// routing id gets the answers, and nobody else does.
func (l *LookupSockets) AddSession(id uint64, secret []byte) error {
	if !l.do(func() {
		l.sessions[id] = bytes.Clone(secret)
		l.count.sessions.Store(
			int64(len(l.sessions)))
	}) {
		return ErrClosed
	}
	return nil
}

// RemoveSession drops the answers to a session from now on.
func (l *LookupSockets) RemoveSession(id uint64) {
	l.do(func() { delete(l.sessions, id); l.count.sessions.Store(int64(len(l.sessions))) })
}

// post is an answer from another goroutine than the loop's.
type post struct {
	session uint64 // whose answer it is; 0: LMCache's
	lookup  []byte // LMCache's id in frames: the first frame; otherwise empty
	msg     []byte
}

// Post sends a message, which it copies, to a session's client. It does not
// wait: what the socket loop has no room for, or whose session has none any more,
// is dropped and counted.
func (l *LookupSockets) Post(session uint64, msg []byte) {
	l.post(post{session: session, msg: bytes.Clone(msg)})
}

// TickWithin has Handler.Tick called within d, but for what is missing to a whole millisecond. Only
// the Handler may call it, from its methods.
func (l *LookupSockets) TickWithin(d time.Duration) {
	if by := time.Now().Add(d); l.tickBy.IsZero() || by.Before(l.tickBy) {
		l.tickBy = by
	}
}

// PostLMCache answers one of LMCache's lookups, by its id and in the form that it
// came in, like Post.
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

// Close stops serving and removes the sockets. Closing again does nothing.
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

// do runs f on the loop and waits for it; false means that the loop is closed.
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

// kick wakes the loop. Called with mu held, so never after the eventfd is closed.
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
	// Not blocky: nothing lingers at close.
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
	// The path is LMCache's choice and not in our directory, so no lock guards it,
	// and binding would take it from a living server without a word.
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

// socket makes a socket with every bound that libzmq offers.
func (l *LookupSockets) socket(t zmq4.Type) (*zsock, error) {
	s, err := newZsock(l.ctx, t)
	if err != nil {
		return nil, err
	}
	maxBytes := int64(l.opt.Limits.MessageBytes())
	if t != zmq4.PULL {
		maxBytes = 128 // what answers has nothing to receive but a handshake
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
		// Who is not there is told of, and a client that comes back takes its name over from the
		// connection that it had.
		err = errors.Join(s.SetRouterMandatory(1), s.SetRouterHandover(true))
	}
	if err != nil {
		s.Close()
		return nil, fmt.Errorf("zmq socket options: %w", err)
	}
	return s, nil
}

// guarded is a bound socket that is shut while it has too many connections.
type guarded struct {
	*zsock
	monitor  *zsock // PAIR that receives the socket's connection events
	endpoint string
	limit    int
	peers    int
	bound    bool
	shutAt   time.Time // when it was unbound because of a flood
	closed   bool      // libzmq has told that its listening end is closed
	total    *atomic.Int64
	log      *zap.Logger
}

// bind makes a guarded socket on a path. A stale file there is replaced.
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

// start begins to watch the socket, by a monitor of the given endpoint, and binds it.
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

// close closes the socket with its connections. libzmq's own thread tells of
// them by a blocking send to the monitor, and would hang for ever if nobody were
// left to take it in: so first the source dries up, and the taker goes last.
func (g *guarded) close() {
	if g.bound && g.Unbind(g.endpoint) == nil {
		for end := time.Now().Add(closePatience); !g.closed && time.Now().Before(end); {
			time.Sleep(20 * time.Microsecond)
			g.watch()
		}
	}
	// Now only the connections that are left may be told of, and there is room for that.
	if err := g.Monitor("", 0); err != nil {
		g.log.Error("zmq socket: monitor", zap.Error(err))
	}
	g.Close()
	if g.monitor != nil {
		g.monitor.Close()
	}
	if g.bound { // libzmq leaves the file; what is there while it is shut need not be ours
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

// watch takes in what has happened to the connections, and says whether there
// are more than the limit.
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
		case zmq4.EVENT_CLOSED: // unbound: libzmq ends the connections without a word on each
			delta = -g.peers
			g.closed = true
		}
		g.peers += delta
		g.total.Add(int64(delta))
	}
}

// shut unbinds the socket, which ends its connections, and says whether it was
// bound.
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
		g.log.Error("zmq socket: bind", zap.Error(err)) // again at the next tick
	}
}

func (l *LookupSockets) loop() {
	next := time.Now().Add(l.opt.Tick)
	for !l.stopped {
		by := next
		if !l.tickBy.IsZero() && l.tickBy.Before(next) {
			by = l.tickBy
		}
		if errno := l.poll.wait(time.Until(by)); errno != 0 && errno != syscall.EINTR {
			l.opt.Log.Error("lookup sockets: poll", zap.Error(errno))
			time.Sleep(10 * time.Millisecond) // never a busy loop
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

// check shuts a socket that has too many connections, or holds too much memory.
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

// send sends a posted answer.
func (l *LookupSockets) send(p *post) {
	if p.session != 0 {
		l.answer(p.session, p.msg)
	} else if l.lmSend != nil {
		l.answerLMCache(p.lookup, p.msg)
	}
}

func (l *LookupSockets) answer(session uint64, msg []byte) {
	to := l.sessions[session]
	if to == nil {
		l.count.noSession.Add(1)
		return
	}
	l.countAnswer(l.replies.route(to, msg))
}

// dropReplies drops what clients send where they are to listen.
func (l *LookupSockets) dropReplies() {
	for range burst {
		if _, ok := l.receive(l.replies.zsock, 0); !ok {
			return
		}
	}
}

// answerLMCache sends an answer in one frame, or in two with the lookup's id as
// the first.
func (l *LookupSockets) answerLMCache(id, msg []byte) {
	if len(id) > 0 {
		// libzmq takes a message whole: if it takes the first frame, it takes both.
		if errno := l.lmSend.send(id, true); errno != 0 {
			l.countAnswer(errno)
			return
		}
	}
	l.countAnswer(l.lmSend.send(msg, false))
}

// serveNative handles the native lookups that wait, up to a burst.
func (l *LookupSockets) serveNative() {
	for n, start := 0, time.Now(); n < burst && (n == 0 || time.Since(start) < burstTime); n++ {
		frames, ok := l.receive(l.native.zsock, 1)
		if !ok {
			return
		}
		if frames == nil {
			continue
		}
		session, answer := l.handler.HandleLookup(frames[0], l.reply[:0])
		if len(answer) == 0 {
			continue
		}
		l.answer(session, answer)
	}
}

// serveLMCache does the same for LMCache's.
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

// receive takes one message. ok is false when there is none; the frames are nil
// when it has more than limit of them or is, all in all, longer than the buffer.
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

// shut closes everything that open made, as far as it came.
func (l *LookupSockets) shut() {
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
