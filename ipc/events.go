package ipc

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
)

const (
	// maxSubscribers bounds the connections to the publishing socket. maxReplayPeers bounds those
	// to the replaying socket.
	maxSubscribers = 256
	maxReplayPeers = 64
	// maxSubscriptions and maxSubscriptionBytes bound the subscriptions of one peer.
	maxSubscriptions     = 256
	maxSubscriptionBytes = 16 << 10
	// maxSubscribeFrame and maxRequestFrame bound one frame from a peer.
	maxSubscribeFrame = 4096
	maxRequestFrame   = 64
	// maxRequests bounds the replays that one peer has requested and not received.
	maxRequests = 16
	// peerBurstBytes and peerBytesPerSecond bound what one peer sends. Each frame counts with its
	// length and frameBytes more. Subscriptions, heartbeats and replay requests need far less.
	peerBurstBytes     = 128 << 10
	peerBytesPerSecond = 4 << 10
	frameBytes         = 64
	// acceptBurst and acceptsPerSecond bound the work for peers that reconnect again and again.
	acceptBurst      = 256
	acceptsPerSecond = 1000
	// maxReplayBytes bounds the batches that are kept for replay and for slow subscribers.
	maxReplayBytes = 64 << 20
	// peerReadBuffer and peerWriteBuffer bound the kernel's memory for one connection.
	peerReadBuffer  = 16 << 10
	peerWriteBuffer = 64 << 10
	// resyncPause is the least time between two resyncs (see EventPublisher).
	resyncPause = 10 * time.Second
	// eventLinger is how long Close waits for the last batches to be sent.
	eventLinger = 200 * time.Millisecond
	// dialPatience bounds an attempt to connect. dialPause is the first pause between two attempts;
	// each further one is twice as long, up to dialPauseMost.
	dialPatience  = 5 * time.Second
	dialPause     = 100 * time.Millisecond
	dialPauseMost = 5 * time.Second
)

// EventFDs is how many file descriptors an EventPublisher may take.
const EventFDs = 2 + maxSubscribers + maxReplayPeers

// EventBytes is how much memory an EventPublisher may take, for the batches that it keeps and for
// its connections.
const EventBytes = maxReplayBytes + (maxSubscribers+maxReplayPeers)*(32<<10)

// EventSource has the batches for an EventPublisher. Only the publisher's goroutine calls its
// methods, which must not wait.
type EventSource interface {
	// NextBatch returns the next batch, which is valid until the next call. ok is false if there is
	// none. The source must call Wake when there is one again.
	NextBatch() (topic string, payload []byte, ok bool)
	// Resync makes the source report everything held anew.
	Resync()
	// LastBatch returns the batches to publish before the end, one a call. ok is false if there are
	// no more.
	LastBatch() (topic string, payload []byte, ok bool)
}

// EventOptions configure an EventPublisher.
type EventOptions struct {
	// Endpoint is where batches are published: tcp://HOST:PORT or ipc://PATH.
	Endpoint string
	// Bind makes the publisher listen at Endpoint. Otherwise it connects to Endpoint.
	Bind bool
	// ReplayEndpoint is where peers can request batches again. It is always bound. Empty: no
	// replays.
	ReplayEndpoint string
	// Token is the password that peers of bound endpoints must send by ZMTP's mechanism PLAIN.
	// Empty: no password, and the mechanism is NULL.
	Token string
	// BufferSteps is how many batches are kept for replay, within 64 MiB.
	BufferSteps int
	// HWM is how many batches wait for a subscriber that does not read before it loses some. They
	// count for the 64 MiB of BufferSteps.
	HWM int
	// Log receives failures. Default: no log.
	Log *zap.Logger

	// Only tests set these.
	resyncPause time.Duration // default resyncPause
	linger      time.Duration // default eventLinger
}

// EventStats are counts since the start, except Subscribers.
type EventStats struct {
	Subscribers int    // connections that have finished the handshake
	Batches     uint64 // published
	Bytes       uint64 // in the published batches
	// Dropped counts batches that a subscriber has lost because it did not read, and replay
	// requests above the limit of one peer.
	Dropped uint64
	Replays uint64 // requested
	Resyncs uint64 // see EventPublisher
	// Cut counts connections that were refused or cut off, or that left before the end of the
	// handshake.
	Cut uint64
}

// EventPublisher publishes batches of events and replays them, as vLLM's ZmqEventPublisher does.
// Its PUB socket sends each batch as the frames (topic, sequence number as 8 bytes big-endian,
// payload). Its ROUTER socket replies to an 8-byte number with all batches kept from that one on,
// each as (empty, topic, number, payload), and then with (empty, empty, -1, empty).
//
// One goroutine takes batches from the source and appends them to a buffer. Each connection reads
// the buffer at its own pace, by the number of its next batch, so a peer that does not read costs
// no memory. A subscriber that falls behind by more than [EventOptions.HWM] loses the oldest
// batches, and sees that by their numbers. A replay goes on with the oldest batch that is kept.
// Each connection has two goroutines.
//
// Peers may be strangers. The length, the number and the rate of their messages are bounded. A peer
// that passes a bound is cut off, without effect on the others. When there are too many
// connections, the address with the most of them loses one.
//
// Unlike vLLM's publisher, a request for batches that are no longer kept also causes a resync: the
// source publishes everything anew, at most once in resyncPause.
type EventPublisher struct {
	opt     EventOptions
	src     EventSource
	doors   []*eventDoor
	wake    chan struct{} // capacity 1
	resync  chan struct{} // capacity 1
	closing chan struct{}
	once    sync.Once
	wg      sync.WaitGroup
	count   struct {
		subscribers                                    atomic.Int64
		batches, bytes, dropped, replays, resyncs, cut atomic.Uint64
	}

	mu sync.Mutex // guards the fields below, and those of doors and peers that say so

	kept     []batch // batch i has number oldest+i
	oldest   uint64
	bytes    int       // in kept
	resynced time.Time // of the last resync
	over     bool      // nothing is published any more
}

type batch struct {
	topic   string
	payload []byte
}

// NewEventPublisher opens the sockets and starts to publish.
func NewEventPublisher(opt EventOptions, src EventSource) (*EventPublisher, error) {
	if opt.Log == nil {
		opt.Log = zap.NewNop()
	}
	if opt.resyncPause == 0 {
		opt.resyncPause = resyncPause
	}
	if opt.linger == 0 {
		opt.linger = eventLinger
	}
	p := &EventPublisher{
		opt: opt, src: src,
		wake: make(chan struct{}, 1), resync: make(chan struct{}, 1), closing: make(chan struct{}),
	}
	subscribers := &eventDoor{
		p: p, setting: "events.endpoint", endpoint: opt.Endpoint, limit: maxSubscribers,
		ready: &p.count.subscribers,
		own:   "PUB", types: []string{"SUB", "XSUB"}, token: opt.Token, frame: maxSubscribeFrame,
	}
	replays := &eventDoor{
		p: p, setting: "events.replay_endpoint", endpoint: opt.ReplayEndpoint,
		limit: maxReplayPeers, ready: new(atomic.Int64),
		own: "ROUTER", types: []string{"REQ", "DEALER", "ROUTER"}, token: opt.Token,
		frame: maxRequestFrame, replay: true,
	}
	p.doors = append(p.doors, subscribers)
	if opt.ReplayEndpoint != "" {
		p.doors = append(p.doors, replays)
	}
	for _, d := range p.doors {
		if d == subscribers && !opt.Bind {
			d.token = "" // the token is only for peers of bound endpoints
			continue
		}
		if err := d.listen(); err != nil {
			for _, d := range p.doors {
				d.shut()
			}
			return nil, fmt.Errorf("%s: %w", d.setting, err)
		}
	}
	for _, d := range p.doors {
		if d.ln != nil {
			p.wg.Go(d.accept)
		} else {
			p.wg.Go(d.connect)
		}
	}
	p.wg.Go(p.run)
	return p, nil
}

// Endpoints returns the endpoints that peers connect to, with the actual ports for wildcards.
func (p *EventPublisher) Endpoints() (publish, replay string) {
	if len(p.doors) > 1 {
		replay = p.doors[1].endpoint
	}
	return p.doors[0].endpoint, replay
}

// Stats returns the counts.
func (p *EventPublisher) Stats() EventStats {
	c := &p.count
	return EventStats{
		Subscribers: int(c.subscribers.Load()), Batches: c.batches.Load(), Bytes: c.bytes.Load(),
		Dropped: c.dropped.Load(),
		Replays: c.replays.Load(), Resyncs: c.resyncs.Load(), Cut: c.cut.Load(),
	}
}

// Wake makes the publisher ask the source for batches. It does not wait.
func (p *EventPublisher) Wake() { ring(p.wake) }

// ring sends to a channel of capacity 1 and does not wait.
func ring(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Close publishes the source's last batches, closes the sockets and waits for the goroutines. A
// second Close only waits.
func (p *EventPublisher) Close() error {
	p.once.Do(func() { close(p.closing) })
	p.wg.Wait()
	return nil
}

// run is the publisher's goroutine.
func (p *EventPublisher) run() {
	for last := false; !last; {
		select {
		case <-p.wake:
		case <-p.resync:
			p.count.resyncs.Add(1)
			p.src.Resync()
		case <-p.closing:
			last = true
		}
		for p.publish(p.src.NextBatch()) {
		}
	}
	for p.publish(p.src.LastBatch()) {
	}
	p.mu.Lock()
	p.over = true
	p.mu.Unlock()
	for _, d := range p.doors {
		d.shut()
	}
}

// publish appends a batch if ok, wakes the connections, and returns ok.
func (p *EventPublisher) publish(topic string, payload []byte, ok bool) bool {
	if !ok {
		return false
	}
	b := batch{topic: topic, payload: slices.Clone(payload)}
	p.count.batches.Add(1)
	p.count.bytes.Add(uint64(len(payload)))
	p.mu.Lock()
	defer p.mu.Unlock()
	p.kept = append(p.kept, b)
	p.bytes += len(payload)
	p.forget()
	for _, d := range p.doors {
		d.ring()
	}
	return true
}

// next returns the number of the next batch. The caller holds p.mu.
func (p *EventPublisher) next() uint64 { return p.oldest + uint64(len(p.kept)) }

// last returns the number of the oldest of the last n batches. The caller holds p.mu.
func (p *EventPublisher) last(n int) uint64 {
	return p.next() - min(uint64(n), p.next())
}

// forget drops batches that no door needs, and the oldest above maxReplayBytes. It keeps at least
// one. The caller holds p.mu.
func (p *EventPublisher) forget() {
	need := p.next()
	for _, d := range p.doors {
		need = min(need, d.need())
	}
	n := 0
	for ; n < len(p.kept)-1 && (p.oldest < need || p.bytes > maxReplayBytes); n++ {
		p.bytes -= len(p.kept[n].payload)
		p.kept[n] = batch{} // frees the payload now; append moves the rest only now and then
		p.oldest++
	}
	p.kept = p.kept[n:]
}

// askAnew requests a resync, unless the last one is more recent than resyncPause. The caller holds
// p.mu.
func (p *EventPublisher) askAnew() {
	if now := time.Now(); p.resynced.IsZero() || now.Sub(p.resynced) >= p.opt.resyncPause {
		p.resynced = now
		ring(p.resync)
	}
}

// eventDoor is one endpoint with its connections.
type eventDoor struct {
	p        *EventPublisher
	setting  string // that the endpoint comes from
	endpoint string
	limit    int           // of connections
	ready    *atomic.Int64 // connections that have finished the handshake
	own      string        // our type of socket
	types    []string      // the types that peers may have
	token    string
	frame    int // length of the longest frame from a peer, bytes
	replay   bool
	ln       net.Listener // nil: the publisher connects to the endpoint

	closed bool         // guarded by p.mu
	peers  []*eventPeer // in the order of their connecting; guarded by p.mu
}

// listen binds the endpoint, whose host and port may be *.
func (d *eventDoor) listen() error {
	path, isPath := strings.CutPrefix(d.endpoint, "ipc://")
	if isPath {
		ln, err := listenPath(d.setting, path)
		d.ln = ln
		return err
	}
	host, port, err := splitTCP(d.endpoint)
	if err != nil {
		return err
	}
	network := "tcp"
	if host == "*" {
		network, host = "tcp4", "0.0.0.0" // as libzmq does unless IPv6 is enabled
	}
	if port == "*" {
		port = "0"
	}
	if d.ln, err = net.Listen(network, net.JoinHostPort(host, port)); err != nil {
		return err
	}
	d.endpoint = "tcp://" + d.ln.Addr().String()
	return nil
}

func splitTCP(endpoint string) (host, port string, err error) {
	address, ok := strings.CutPrefix(endpoint, "tcp://")
	if !ok {
		return "", "", fmt.Errorf("%q is neither tcp://HOST:PORT nor ipc://PATH", endpoint)
	}
	return net.SplitHostPort(address)
}

// listenPath listens on a Unix socket. It replaces the socket of an earlier process.
func listenPath(setting, path string) (net.Listener, error) {
	if err := checkPath(setting, path); err != nil {
		return nil, err
	}
	if c, err := net.DialTimeout("unix", path, time.Second); err == nil {
		c.Close()
		return nil, fmt.Errorf("another process listens on %s", path)
	}
	switch st, err := os.Lstat(path); {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, err
	case st.Mode()&os.ModeSocket == 0:
		return nil, fmt.Errorf("%s is there and is not a socket", path)
	default:
		if err := os.Remove(path); err != nil {
			return nil, err
		}
	}
	return net.Listen("unix", path)
}

// shut refuses new connections, and ends the present ones when they have been sent everything.
func (d *eventDoor) shut() {
	d.p.mu.Lock()
	d.closed = true
	peers := slices.Clone(d.peers)
	d.p.mu.Unlock()
	if d.ln != nil {
		d.ln.Close()
	}
	for _, peer := range peers {
		peer.end(d.p.opt.linger)
	}
}

// ring wakes all connections. The caller holds p.mu.
func (d *eventDoor) ring() {
	for _, peer := range d.peers {
		ring(peer.wake)
	}
}

// need returns the number of the oldest batch that this door needs. The caller holds p.mu.
func (d *eventDoor) need() uint64 {
	if d.replay {
		return d.p.last(d.p.opt.BufferSteps)
	}
	need := d.p.next()
	for _, peer := range d.peers {
		if peer.ready {
			need = min(need, peer.at)
		}
	}
	return max(need, d.p.last(d.p.opt.HWM))
}

// accept accepts connections until the door is shut.
func (d *eventDoor) accept() {
	may := allowance{most: acceptBurst, perSecond: acceptsPerSecond}
	for {
		c, err := d.ln.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			// Descriptors or memory have run out for a while. The peer stays in the backlog.
			d.p.opt.Log.Warn("events: accept failed", zap.String("setting", d.setting),
				zap.Error(err))
			time.Sleep(50 * time.Millisecond)
			continue
		}
		for !may.take(1, time.Now()) {
			time.Sleep(time.Second / acceptsPerSecond)
		}
		if peer := d.admit(c); peer != nil {
			d.p.wg.Go(peer.serve)
		}
	}
}

// connect keeps one connection to the endpoint until the publisher is closed.
func (d *eventDoor) connect() {
	network, address := "unix", strings.TrimPrefix(d.endpoint, "ipc://")
	if host, port, err := splitTCP(d.endpoint); err == nil {
		network, address = "tcp", net.JoinHostPort(host, port)
	}
	ctx, cancel := context.WithCancel(context.Background())
	d.p.wg.Go(func() {
		<-d.p.closing
		cancel()
	})
	failed := false
	for pause := dialPause; ; pause = min(2*pause, dialPauseMost) {
		c, err := (&net.Dialer{Timeout: dialPatience}).DialContext(ctx, network, address)
		if err == nil {
			failed, pause = false, dialPause
			if peer := d.admit(c); peer != nil {
				peer.serve()
			}
		} else if !failed && ctx.Err() == nil {
			failed = true
			d.p.opt.Log.Warn("events: no subscriber listens at "+d.setting+
				": a subscriber must bind it, or set events.bind to true to listen there",
				zap.String("endpoint", d.endpoint), zap.Error(err))
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// admit makes a peer of a connection, or closes the connection and returns nil. If there are too
// many peers, it cuts one off; see surplus.
func (d *eventDoor) admit(c net.Conn) *eventPeer {
	if b, ok := c.(interface {
		SetReadBuffer(int) error
		SetWriteBuffer(int) error
	}); ok {
		_, _ = b.SetReadBuffer(peerReadBuffer), b.SetWriteBuffer(peerWriteBuffer) // a hint
	}
	peer := &eventPeer{d: d, c: c, from: origin(c), wake: make(chan struct{}, 1)}
	d.p.mu.Lock()
	if d.closed {
		d.p.mu.Unlock()
		c.Close()
		return nil
	}
	d.peers = append(d.peers, peer)
	var out *eventPeer
	if len(d.peers) > d.limit {
		out = d.surplus()
		d.remove(out)
	}
	d.p.mu.Unlock()
	if out != nil {
		d.p.count.cut.Add(1)
		d.p.opt.Log.Warn("events: too many connections, one was cut off",
			zap.String("setting", d.setting), zap.Int("limit", d.limit),
			zap.String("peer", out.from))
		out.c.Close()
	}
	if out == peer {
		return nil
	}
	return peer
}

// origin returns the address that a connection comes from, without the port. For IPv6 it returns
// the /64 network, for a Unix socket "local".
func origin(c net.Conn) string {
	at, err := netip.ParseAddrPort(c.RemoteAddr().String())
	if err != nil {
		return "local"
	}
	ip := at.Addr().Unmap()
	if ip.Is6() {
		if p, err := ip.WithZone("").Prefix(64); err == nil {
			return p.String()
		}
	}
	return ip.String()
}

// surplus returns the peer to cut off when there are too many. It is of the address with the most
// connections: the oldest that has not finished the handshake, or else the newest. The caller holds
// p.mu.
func (d *eventDoor) surplus() *eventPeer {
	of := map[string]int{}
	for _, peer := range d.peers {
		of[peer.from]++
	}
	// Backward, so that among addresses with equally many the one of the newest peer is chosen.
	var out *eventPeer
	for _, peer := range slices.Backward(d.peers) {
		if out == nil || of[peer.from] > of[out.from] {
			out = peer
		}
	}
	for _, peer := range d.peers {
		if peer.from == out.from && !peer.ready && peer != d.peers[len(d.peers)-1] {
			return peer
		}
	}
	return out
}

// remove removes a peer and reports whether it was there. The caller holds p.mu.
func (d *eventDoor) remove(peer *eventPeer) bool {
	i := slices.Index(d.peers, peer)
	if i < 0 {
		return false
	}
	d.peers = slices.Delete(d.peers, i, i+1)
	if peer.ready {
		d.ready.Add(-1)
	}
	return true
}

// eventPeer is one connection. serve runs on one goroutine and receives. send runs on another.
type eventPeer struct {
	d    *eventDoor
	c    net.Conn
	from string
	wake chan struct{} // capacity 1

	// Guarded by p.mu.
	ready         bool   // the handshake is finished
	gone          bool   // send must end at once
	at            uint64 // number of the next batch: of a subscriber, or of the present replay
	subscriptions []subscription
	bytes         int      // in the prefixes of subscriptions
	replaying     bool     // a replay is under way
	requests      []uint64 // first numbers of the replays that follow it
	pong          []byte   // to send next, or nil
}

type subscription struct {
	prefix string
	times  int // subscribed to, minus unsubscribed from
}

// errTalks means that a peer has passed peerBytesPerSecond.
var errTalks = fmt.Errorf("more than %d bytes a second", peerBytesPerSecond)

// serve runs a connection until its end.
func (e *eventPeer) serve() {
	p := e.d.p
	err := e.receive()
	p.mu.Lock()
	e.gone = true
	shaken := e.ready
	was := e.d.remove(e)
	over := p.over
	p.mu.Unlock()
	ring(e.wake)
	e.c.Close()
	if !was || over {
		return // we ended it, which is logged already
	}
	level := zap.WarnLevel
	var failed *net.OpError
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.As(err, &failed) &&
		!failed.Timeout() {
		if shaken {
			return // the peer left
		}
		// A libzmq peer leaves without an error when the security mechanisms differ. A probe of the
		// port looks the same, so this is not a warning.
		level = zap.DebugLevel
	}
	p.count.cut.Add(1)
	p.opt.Log.Log(level, "events: a connection was cut off", zap.String("setting", e.d.setting),
		zap.String("peer", e.from), zap.NamedError("why", err))
}

// receive does the handshake and then handles what the peer sends, until there is an error.
func (e *eventPeer) receive() error {
	z := newZMTP(e.c, e.d.frame)
	if err := z.SetDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return err
	}
	if err := z.shake(e.d.own, e.d.types, e.d.token); err != nil {
		return err
	}
	if err := z.SetDeadline(time.Time{}); err != nil {
		return err
	}
	if !e.begin() {
		return io.EOF
	}
	request := request{}
	for {
		f, err := z.next(e.d.frame)
		if err != nil {
			return err
		}
		if !z.may.take(len(f.body)+frameBytes, time.Now()) {
			return errTalks
		}
		switch {
		case f.command:
			err = e.command(f.body)
		case !e.d.replay:
			err = e.message(f)
		default:
			if from, ok := request.add(f); ok {
				e.ask(from)
			}
		}
		if err != nil {
			return err
		}
	}
}

// begin starts sending to the peer. It returns false if the peer was cut off meanwhile.
func (e *eventPeer) begin() bool {
	p := e.d.p
	p.mu.Lock()
	defer p.mu.Unlock()
	if e.d.closed || !slices.Contains(e.d.peers, e) {
		return false
	}
	e.ready, e.at = true, p.next()
	e.d.ready.Add(1)
	p.wg.Go(e.send)
	return true
}

// end ends the connection when it has been sent everything, at the latest after linger.
func (e *eventPeer) end(linger time.Duration) {
	e.d.p.mu.Lock()
	ready := e.ready
	e.d.p.mu.Unlock()
	by := time.Unix(1, 0)
	if ready {
		by = time.Now().Add(linger)
	}
	_ = e.c.SetDeadline(by)
	ring(e.wake)
}

// command handles a command: a heartbeat, or a subscription in the form of ZMTP 3.1.
func (e *eventPeer) command(b []byte) error {
	name, rest, ok := splitCommand(b)
	if !ok {
		return fmt.Errorf("%w: a command", errZMTP)
	}
	switch {
	case name == "PING" && len(rest) >= 2 && len(rest) <= 2+16:
		e.d.p.mu.Lock()
		e.pong = appendCommand(nil, "PONG", rest[2:])
		e.d.p.mu.Unlock()
		ring(e.wake)
	case name == "SUBSCRIBE" && !e.d.replay:
		return e.subscribe(string(rest))
	case name == "CANCEL" && !e.d.replay:
		e.unsubscribe(string(rest))
	}
	return nil
}

// message handles a frame from a subscriber: a subscription in the form of ZMTP 3.0.
func (e *eventPeer) message(f frame) error {
	switch {
	case f.more:
		return errors.New("a message of several parts: a subscriber sends only single ones")
	case len(f.body) > 0 && f.body[0] == 1:
		return e.subscribe(string(f.body[1:]))
	case len(f.body) > 0 && f.body[0] == 0:
		e.unsubscribe(string(f.body[1:]))
	}
	return nil
}

// subscribe adds a subscription. As in libzmq, a prefix that was subscribed to n times stays until
// it is unsubscribed from n times.
func (e *eventPeer) subscribe(prefix string) error {
	e.d.p.mu.Lock()
	defer e.d.p.mu.Unlock()
	if i := e.find(prefix); i >= 0 {
		e.subscriptions[i].times++
		return nil
	}
	if len(e.subscriptions) == maxSubscriptions || e.bytes+len(prefix) > maxSubscriptionBytes {
		return fmt.Errorf("more than %d subscriptions, or more than %d bytes of topics", maxSubscriptions,
			maxSubscriptionBytes)
	}
	e.subscriptions = append(e.subscriptions, subscription{prefix, 1})
	e.bytes += len(prefix)
	return nil
}

func (e *eventPeer) unsubscribe(prefix string) {
	e.d.p.mu.Lock()
	defer e.d.p.mu.Unlock()
	i := e.find(prefix)
	if i < 0 {
		return
	}
	if e.subscriptions[i].times--; e.subscriptions[i].times == 0 {
		e.subscriptions = slices.Delete(e.subscriptions, i, i+1)
		e.bytes -= len(prefix)
	}
}

func (e *eventPeer) find(prefix string) int {
	return slices.IndexFunc(e.subscriptions,
		func(s subscription) bool { return s.prefix == prefix })
}

// request is the received part of a replay request. A whole one is an empty frame and a number of
// up to 8 bytes.
type request struct {
	frames int // so far
	bad    bool
}

// add adds the next frame. If the frame completes a request, it returns the number that the request
// begins with, and true.
func (r *request) add(f frame) (from uint64, ok bool) {
	switch r.frames {
	case 0:
		r.bad = len(f.body) != 0
	case 1:
		r.bad = r.bad || len(f.body) > 8
	default:
		r.bad = true
	}
	r.frames = min(r.frames+1, 3)
	if f.more {
		return 0, false
	}
	ok = !r.bad && r.frames == 2
	*r = request{}
	if !ok {
		return 0, false
	}
	for _, c := range f.body {
		from = from<<8 | uint64(c)
	}
	return from, true
}

// ask queues a replay of the batches from a number on. It drops the request if the peer has too
// many.
func (e *eventPeer) ask(from uint64) {
	p := e.d.p
	p.count.replays.Add(1)
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(e.requests) == maxRequests {
		p.count.dropped.Add(1)
		return
	}
	if len(p.kept) > 0 && from < max(p.oldest, p.last(p.opt.BufferSteps)) {
		p.askAnew()
	}
	e.requests = append(e.requests, from)
	ring(e.wake)
}

// send sends until the connection or the publisher ends.
func (e *eventPeer) send() {
	for {
		out, over := e.take()
		if over {
			break
		}
		if out == nil {
			<-e.wake
			continue
		}
		if _, err := out.WriteTo(e.c); err != nil {
			e.c.Close() // so that receive ends, which logs
			return
		}
	}
	// The peer closes its end when it has read everything. receive waits for that until its
	// deadline.
	if c, ok := e.c.(interface{ CloseWrite() error }); ok {
		_ = c.CloseWrite()
	}
}

// take returns what to send next, or nil if there is nothing now. over means that nothing will
// follow.
func (e *eventPeer) take() (out net.Buffers, over bool) {
	p := e.d.p
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case e.gone:
		return nil, true
	case e.pong != nil:
		out, e.pong = net.Buffers{e.pong}, nil
		return out, false
	case e.d.replay:
		out = e.takeReplay()
	default:
		out = e.takeBatch()
	}
	return out, out == nil && p.over
}

// takeBatch returns the next batch that the subscriber has subscribed to, or nil. The caller holds
// p.mu.
func (e *eventPeer) takeBatch() net.Buffers {
	p := e.d.p
	if first := max(p.oldest, p.last(p.opt.HWM)); e.at < first {
		p.count.dropped.Add(first - e.at)
		e.at = first
	}
	for e.at < p.next() {
		b := &p.kept[e.at-p.oldest]
		e.at++
		if slices.ContainsFunc(e.subscriptions,
			func(s subscription) bool { return strings.HasPrefix(b.topic, s.prefix) }) {
			return b.frames(nil, e.at-1)
		}
	}
	return nil
}

// endOfReplay is the message after the last batch of a replay.
var endOfReplay = func() []byte {
	b := appendFrame(appendFrame(nil, flagMore, 0), flagMore, 0)
	b = append(appendFrame(b, flagMore, 8), 255, 255, 255, 255, 255, 255, 255, 255)
	return appendFrame(b, 0, 0)
}()

// takeReplay returns the next batch of the present replay, its end, or nil if no replay is
// requested. The caller holds p.mu.
func (e *eventPeer) takeReplay() net.Buffers {
	p := e.d.p
	if !e.replaying {
		if len(e.requests) == 0 {
			return nil
		}
		e.at, e.replaying = e.requests[0], true
		e.requests = slices.Delete(e.requests, 0, 1)
	}
	e.at = max(e.at, p.oldest, p.last(p.opt.BufferSteps))
	if e.at >= p.next() {
		e.replaying = false
		return net.Buffers{endOfReplay}
	}
	b := &p.kept[e.at-p.oldest]
	e.at++
	return b.frames(appendFrame(nil, flagMore, 0), e.at-1)
}

// frames returns the batch's message after the frames in head. The payload is not copied.
func (b *batch) frames(head []byte, seq uint64) net.Buffers {
	head = append(appendFrame(head, flagMore, len(b.topic)), b.topic...)
	head = binary.BigEndian.AppendUint64(appendFrame(head, flagMore, 8), seq)
	return net.Buffers{appendFrame(head, 0, len(b.payload)), b.payload}
}
