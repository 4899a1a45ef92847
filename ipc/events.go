package ipc

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/pebbe/zmq4"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"
)

const (
	// maxSubscribers bounds the connections to the socket that publishes,
	// maxReplayPeers those to the one that replays.
	maxSubscribers = 256
	maxReplayPeers = 64
	// maxReplays bounds the replays under way.
	maxReplays = 64
	// replayHWM bounds the batches that wait for one replaying peer in libzmq.
	replayHWM = 64
	// replayPause is how long one that does not read is left alone.
	replayPause = 5 * time.Millisecond
	// maxReplayBytes bounds the batches that are kept for replay.
	maxReplayBytes = 64 << 20
	// resyncPause is the least time between two publications of all that is held
	// because somebody asked for batches that are no longer kept.
	resyncPause = 10 * time.Second
	// eventLinger is how long what is published last has to leave.
	eventLinger = 50 * time.Millisecond
)

// EventSource is what an EventPublisher publishes. Its methods are called from
// the publisher's goroutine alone and must not wait.
type EventSource interface {
	// NextBatch answers the next batch, valid until the next call; ok is false when
	// there is none until Wake.
	NextBatch() (topic string, payload []byte, ok bool)
	// Resync has all that is held told anew.
	Resync()
	// LastBatch answers, one by one, what is to be published before the end.
	LastBatch() (topic string, payload []byte, ok bool)
}

// EventOptions configure an EventPublisher.
type EventOptions struct {
	// Endpoint is where batches are published: bound if it has a wildcard, or is
	// of ipc://; else connected to.
	Endpoint string
	// ReplayEndpoint is where they can be asked for again; always bound. Empty: nowhere.
	ReplayEndpoint string
	// BufferSteps is how many batches are kept for that, within 64 MiB.
	BufferSteps int
	// HWM is how many batches wait for a subscriber that does not read, before it
	// loses some.
	HWM int
	// Log is told of what fails. Default: nothing.
	Log *zap.Logger

	// Only tests set these.
	resyncPause time.Duration // default resyncPause
	linger      func()        // default: waits for eventLinger
}

// EventStats are counts since the start, but for Subscribers.
type EventStats struct {
	Subscribers int    // connections
	Batches     uint64 // published
	Bytes       uint64 // in them
	Dropped     uint64 // batches that could not be handed to libzmq, and replays that there were too many of
	Replays     uint64 // asked for
	Resyncs     uint64 // of them, those for batches that are no longer kept, for which all was published anew
}

// EventPublisher publishes batches of events, and replays them, as vLLM's
// ZmqEventPublisher does: frames (topic, sequence number as 8 bytes big-endian,
// payload) from a PUB socket; a ROUTER socket answers an 8-byte number with all
// batches kept from that one on, each as (empty, topic, number, payload), and then
// (empty, empty, -1, empty).
//
// One goroutine owns the sockets. A subscriber that does not read loses batches
// (libzmq drops them), which it sees by their numbers; nobody waits for it. A
// replay goes on as its peer reads.
//
// Beyond vLLM's: who asks for batches that are no longer kept gets those that are,
// and has the source publish everything anew.
type EventPublisher struct {
	opt   EventOptions
	src   EventSource
	wake  int // eventfd
	done  chan struct{}
	count struct {
		peers                                     atomic.Int64
		batches, bytes, dropped, replays, resyncs atomic.Uint64
	}
	mu     sync.Mutex
	closed bool // guarded by mu

	endpoint, replayEndpoint string // as bound

	// All below belongs to the loop.
	ctx        *zmq4.Context
	pub        *guarded // when bound; otherwise only its zsock is used
	out        *zsock
	replay     *guarded // nil: none
	poll       *poller
	watched    []*guarded
	monitorSeq int
	buffer     []batch // ring of what can be replayed, oldest at first
	first      int
	bytes      int
	next       uint64 // number of the next batch
	replays    []replay
	resynced   time.Time
}

type batch struct {
	seq     uint64
	topic   string
	payload []byte
}

// replay is one under way: the batches from next on are still to be sent.
type replay struct {
	peer []byte
	next uint64
}

// NewEventPublisher opens the sockets and begins to publish.
func NewEventPublisher(opt EventOptions, src EventSource) (*EventPublisher, error) {
	if opt.Log == nil {
		opt.Log = zap.NewNop()
	}
	if opt.resyncPause == 0 {
		opt.resyncPause = resyncPause
	}
	if opt.linger == nil {
		opt.linger = func() { time.Sleep(eventLinger) }
	}
	p := &EventPublisher{opt: opt, src: src, done: make(chan struct{})}
	var err error
	if p.wake, err = unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC); err != nil {
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	if err := startLoop(p.open, p.loop, p.shut, p.done); err != nil {
		unix.Close(p.wake)
		return nil, err
	}
	return p, nil
}

// Endpoints are those that peers connect to, with the ports that were found for
// wildcards.
func (p *EventPublisher) Endpoints() (publish, replay string) { return p.endpoint, p.replayEndpoint }

// Stats returns the counts.
func (p *EventPublisher) Stats() EventStats {
	c := &p.count
	return EventStats{
		Subscribers: int(c.peers.Load()), Batches: c.batches.Load(), Bytes: c.bytes.Load(), Dropped: c.dropped.Load(),
		Replays: c.replays.Load(), Resyncs: c.resyncs.Load(),
	}
}

// Wake has the source asked for batches.
func (p *EventPublisher) Wake() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.closed {
		one := [8]byte{1}
		_, _ = unix.Write(p.wake, one[:])
	}
}

// Close publishes what the source has last, and closes the sockets. Closing again
// does nothing.
func (p *EventPublisher) Close() error {
	p.Wake()
	p.mu.Lock()
	first := !p.closed
	p.closed = true
	p.mu.Unlock()
	<-p.done
	if first {
		unix.Close(p.wake)
	}
	return nil
}

func (p *EventPublisher) isClosed() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.closed
}

// isBind says whether vLLM's publisher would bind an endpoint.
func isBind(endpoint string) bool {
	return strings.Contains(endpoint, "*") || strings.Contains(endpoint, "::") || strings.HasPrefix(endpoint, "ipc://") || strings.HasPrefix(endpoint, "inproc://")
}

func (p *EventPublisher) open() error {
	var err error
	if p.ctx, err = zmq4.NewContext(); err != nil {
		return fmt.Errorf("zmq context: %w", err)
	}
	if err := p.ctx.SetBlocky(false); err != nil {
		return fmt.Errorf("zmq context: %w", err)
	}
	out, err := newZsock(p.ctx, zmq4.PUB)
	if err != nil {
		return err
	}
	p.out = out
	// A subscriber sends no more than its subscriptions.
	if err := errors.Join(out.SetLinger(eventLinger), out.SetSndhwm(p.opt.HWM), out.SetMaxmsgsize(4096), out.SetHandshakeIvl(handshakeTimeout),
		out.SetIpv6(strings.Contains(p.opt.Endpoint, "::"))); err != nil {
		return fmt.Errorf("zmq socket options: %w", err)
	}
	p.endpoint = p.opt.Endpoint
	if isBind(p.opt.Endpoint) {
		if p.pub, err = p.guard(out, p.opt.Endpoint, maxSubscribers); err != nil {
			return fmt.Errorf("events.endpoint: %w", err)
		}
		p.endpoint = p.pub.endpoint
	} else if err := out.Connect(p.opt.Endpoint); err != nil {
		return fmt.Errorf("events.endpoint %s: %w", p.opt.Endpoint, err)
	}
	if p.opt.ReplayEndpoint != "" {
		r, err := newZsock(p.ctx, zmq4.ROUTER)
		if err != nil {
			return err
		}
		if err := errors.Join(r.SetLinger(eventLinger), r.SetSndhwm(replayHWM), r.SetRcvhwm(recvHWM), r.SetMaxmsgsize(64), r.SetRouterMandatory(1), r.SetHandshakeIvl(handshakeTimeout),
			r.SetIpv6(strings.Contains(p.opt.ReplayEndpoint, "::"))); err != nil {
			r.Close()
			return fmt.Errorf("zmq socket options: %w", err)
		}
		if p.replay, err = p.guard(r, p.opt.ReplayEndpoint, maxReplayPeers); err != nil {
			return fmt.Errorf("events.replay_endpoint: %w", err)
		}
		p.replayEndpoint = p.replay.endpoint
	}
	var socks []*zsock
	for _, g := range []*guarded{p.pub, p.replay} {
		if g != nil {
			p.watched = append(p.watched, g)
			socks = append(socks, g.monitor)
		}
	}
	if p.replay != nil {
		socks = append(socks, p.replay.zsock)
	}
	p.poll = newPoller(p.wake, socks...)
	return nil
}

// guard binds a socket, which it closes if it cannot.
func (p *EventPublisher) guard(s *zsock, endpoint string, limit int) (*guarded, error) {
	p.monitorSeq++
	g := &guarded{zsock: s, endpoint: endpoint, limit: limit, public: true, total: new(atomic.Int64), log: p.opt.Log}
	if s == p.out {
		g.total = &p.count.peers
	}
	if err := g.start(p.ctx, fmt.Sprintf("inproc://monitor-%d", p.monitorSeq)); err != nil {
		g.close()
		if s == p.out {
			p.out = nil
		}
		return nil, fmt.Errorf("zmq socket %s: %w", endpoint, err)
	}
	return g, nil
}

func (p *EventPublisher) loop() {
	for {
		wait := time.Second
		if len(p.replays) > 0 {
			wait = replayPause
		}
		if errno := p.poll.wait(wait); errno != 0 && errno != syscall.EINTR {
			p.opt.Log.Error("events: poll", zap.Error(errno))
			time.Sleep(10 * time.Millisecond) // never a busy loop
		}
		for i, g := range p.watched {
			if p.poll.ready(1+i) && g.watch() {
				g.shut("too many connections")
			}
			g.reopen()
		}
		if p.replay != nil {
			p.receive()
		}
		if p.poll.ready(0) {
			var b [8]byte
			_, _ = unix.Read(p.wake, b[:])
		}
		closed := p.isClosed()
		for more := true; more; {
			more = p.publish(p.src.NextBatch())
			p.replayMore() // a long publication holds no replay up
		}
		if closed {
			for p.publish(p.src.LastBatch()) {
			}
			p.replayMore()
			if p.count.peers.Load() > 0 {
				p.opt.linger() // unbinding ends connections, whatever lingers in them
			}
			return
		}
	}
}

// publish sends a batch, if there is one.
func (p *EventPublisher) publish(topic string, payload []byte, ok bool) bool {
	if !ok {
		return false
	}
	b := batch{seq: p.next, topic: topic, payload: slices.Clone(payload)}
	p.next++
	if errno := p.send(p.out, &b); errno != 0 {
		p.count.dropped.Add(1)
		p.opt.Log.Debug("events: publish", zap.Error(errno))
	}
	p.count.batches.Add(1)
	p.count.bytes.Add(uint64(len(payload)))
	if p.replay != nil {
		p.keep(b)
	}
	return true
}

// send sends a batch's three frames. libzmq takes a message whole: if it takes the
// first frame, it takes all.
func (p *EventPublisher) send(s *zsock, b *batch) syscall.Errno {
	var seq [8]byte
	binary.BigEndian.PutUint64(seq[:], b.seq)
	return sendFrames(s, []byte(b.topic), seq[:], b.payload)
}

func sendFrames(s *zsock, frames ...[]byte) syscall.Errno {
	for i, f := range frames {
		if errno := s.send(f, i < len(frames)-1); errno != 0 {
			return errno
		}
	}
	return 0
}

// keep keeps a batch for replay, and forgets the oldest ones.
func (p *EventPublisher) keep(b batch) {
	p.buffer = append(p.buffer, b)
	p.bytes += len(b.payload)
	for len(p.buffer)-p.first > p.opt.BufferSteps || p.bytes > maxReplayBytes && len(p.buffer)-p.first > 1 {
		p.bytes -= len(p.buffer[p.first].payload)
		p.buffer[p.first] = batch{}
		p.first++
	}
	if p.first > len(p.buffer)/2 {
		n := copy(p.buffer, p.buffer[p.first:])
		clear(p.buffer[n:])
		p.buffer, p.first = p.buffer[:n], 0
	}
}

// receive takes in the requests that wait: identity, an empty frame, a number.
func (p *EventPublisher) receive() {
	for range burst {
		var frames [3][]byte
		var buf [3][64]byte
		n, more := 0, true
		good := true
		for ; more; n++ {
			var size int
			var errno syscall.Errno
			into := buf[min(n, 2)][:]
			if size, more, errno = p.replay.recv(into); errno != 0 {
				return
			}
			if n >= len(frames) || size > len(into) {
				good = false
				continue
			}
			frames[n] = into[:size]
		}
		if !good || n != 3 || len(frames[2]) > 8 {
			continue
		}
		p.count.replays.Add(1)
		var start uint64
		for _, c := range frames[2] {
			start = start<<8 | uint64(c)
		}
		if len(p.replays) == maxReplays {
			p.count.dropped.Add(1)
			continue
		}
		if p.first < len(p.buffer) && start < p.buffer[p.first].seq && time.Since(p.resynced) >= p.opt.resyncPause {
			p.resynced = time.Now()
			p.count.resyncs.Add(1)
			p.src.Resync()
		}
		p.replays = append(p.replays, replay{slices.Clone(frames[0]), start})
	}
}

var endOfReplay = []byte{255, 255, 255, 255, 255, 255, 255, 255}

// replayMore sends what the peers of the replays under way have room for.
func (p *EventPublisher) replayMore() {
	n := 0
	for i := range p.replays {
		if r := p.replays[i]; !p.replayOne(&r) {
			p.replays[n] = r
			n++
		}
	}
	clear(p.replays[n:])
	p.replays = p.replays[:n]
}

// replayOne goes on with a replay, and says whether it has ended.
func (p *EventPublisher) replayOne(r *replay) bool {
	for range burst {
		kept := p.buffer[p.first:]
		i, _ := slices.BinarySearchFunc(kept, r.next, func(b batch, seq uint64) int {
			if b.seq < seq {
				return -1
			}
			return 1
		})
		if i == len(kept) {
			switch sendFrames(p.replay.zsock, r.peer, nil, nil, endOfReplay, nil) {
			case syscall.EAGAIN:
				return false
			default:
				return true
			}
		}
		b := &kept[i]
		var seq [8]byte
		binary.BigEndian.PutUint64(seq[:], b.seq)
		switch errno := sendFrames(p.replay.zsock, r.peer, nil, []byte(b.topic), seq[:], b.payload); errno {
		case 0:
			r.next = b.seq + 1
		case syscall.EAGAIN:
			return false
		default: // it has left
			return true
		}
	}
	return false
}

// shut closes everything that open made, as far as it came.
func (p *EventPublisher) shut() {
	for _, g := range []*guarded{p.pub, p.replay} {
		if g != nil {
			g.close()
		}
	}
	if p.pub == nil && p.out != nil {
		p.out.Close()
	}
	if p.poll != nil {
		p.poll.close()
	}
	if p.ctx != nil {
		if err := p.ctx.Term(); err != nil {
			p.opt.Log.Error("events: term", zap.Error(err))
		}
	}
}

// unlink removes the file of a socket, if it has one.
func (g *guarded) unlink() {
	if path, ok := strings.CutPrefix(g.endpoint, "ipc://"); ok {
		if err := os.Remove(path); err != nil {
			g.log.Warn("zmq socket: remove", zap.Error(err))
		}
	}
}
