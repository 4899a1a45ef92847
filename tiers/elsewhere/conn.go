package elsewhere

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"lookaside/dax"
	"lookaside/ipc"
	"lookaside/ipc/wire"
)

// sendPatience is how long the program may leave no room for a message.
const sendPatience = 2 * time.Second

// conn is one connection to the program, from the handshake on. It is not used again.
type conn struct {
	p       *Program
	c       *ipc.Conn
	process *process // nil: the program only listens
	claim   int      // -1: there is none
	program string   // what it says that it is

	maxItems int
	turns    chan struct{} // holds a token for each unanswered call

	lifeline chan struct{} // closed when no process has the lifeline any more
	ended    chan struct{} // closed when the connection has failed: no result comes any more
	free     chan struct{} // closed when the program writes no memory any more, or Close gave up

	// places are the regions that the program has mapped.
	places atomic.Pointer[[]place]

	mu       sync.Mutex // guards what follows
	cause    error      // why it has failed
	calls    map[uint64]*call
	next     uint64
	regions  map[uint32]*announced
	left     []span // scratch memory of calls that have returned; given back when free
	freed    bool   // free is about to be closed: nothing is added to left
	figures  wire.TierFigures
	reported time.Time // when figures came
}

// place is memory that the program has mapped.
type place struct {
	id  uint32
	mem []byte
}

// announced is a region that the program was told of.
type announced struct {
	mem   []byte
	ready chan struct{} // closed when the program has said whether it is mapped
	err   error         // why it is not; valid once ready is closed
	said  bool          // guarded by conn.mu
	gone  chan struct{} // closed when the program has unmapped it
	gones bool          // it was told to; guarded by conn.mu
}

// call is an unanswered call.
type call struct {
	// These do not change once the call is in the books.
	id      uint64
	items   int
	turn    bool          // it has a turn
	figured bool          // it is a TierStats
	clears  bool          // it is a TierClear
	bell    chan struct{} // cap 1: there are new results

	// Guarded by conn.mu.
	open    int // results that have not come
	seen    []bool
	results []wire.TierResult // that the caller has not taken
	text    string
	figures *wire.TierFigures // of a TierStats
	cleared *wire.TierCleared // of a TierClear
}

var (
	errHung   = errors.New("the program does not report a call in time after it was cancelled")
	errSilent = errors.New("the program has stopped to send figures")
	errLeft   = errors.New("the program has closed the connection")
	errHolds  = errors.New("the program has closed the descriptors that came with TierHello")
)

// protocolError reports something that no correct program does.
func protocolError(format string, args ...any) error {
	return fmt.Errorf("the program breaks the protocol: "+format, args...)
}

// connect starts the program or connects to it, and does the handshake. After an error nothing of
// it is left.
func (p *Program) connect(ctx context.Context) (_ *conn, err error) {
	c := &conn{p: p, claim: -1, lifeline: make(chan struct{}), ended: make(chan struct{}),
		free: make(chan struct{}), calls: map[uint64]*call{}, regions: map[uint32]*announced{}}
	c.places.Store(&[]place{})
	if p.o.Socket != "" {
		if c.c, err = ipc.DialProgram(p.o.Socket, sendPatience); err != nil {
			return nil, err
		}
	} else {
		var other *os.File
		if c.c, other, err = ipc.ProgramPair(sendPatience); err != nil {
			return nil, err
		}
		c.process, err = start(p.o.Command, other, p.o.Log)
		if err = errors.Join(err, other.Close()); err != nil {
			return nil, errors.Join(err, c.c.Close())
		}
	}
	if err := c.greet(ctx); err != nil {
		c.fail(err)
		go c.receiveNothing()
		c.depart()
		if c.process != nil {
			return nil, fmt.Errorf("%w (%s)", err, c.process.reason())
		}
		return nil, err
	}
	go c.receive()
	if c.process != nil {
		go func() {
			<-c.process.ended
			c.fail(errors.New(c.process.reason()))
		}()
	}
	go func() {
		<-c.lifeline
		c.fail(errHolds)
	}()
	return c, nil
}

// greet does the handshake.
func (c *conn) greet(ctx context.Context) (err error) {
	r, w, err := os.Pipe()
	if err != nil {
		close(c.lifeline)
		return err
	}
	go func() {
		_, _ = io.Copy(io.Discard, r)
		r.Close()
		close(c.lifeline)
	}()
	defer w.Close()
	holds := []int{int(w.Fd())}
	if c.p.o.Claim != nil {
		if c.claim, err = c.p.o.Claim(); err != nil {
			return err
		}
		holds = append(holds, c.claim)
	}
	hello := wire.TierHello{Tier: c.p.o.Name, Holds: uint8(len(holds))}
	if err := c.c.Send(hello.Append(nil), holds...); err != nil {
		return connError(err)
	}
	deadline := time.Now().Add(c.p.o.StartTimeout)
	if err := c.c.SetRecvDeadline(deadline); err != nil {
		return connError(err)
	}
	stop := context.AfterFunc(ctx, func() { _ = c.c.SetRecvDeadline(time.Unix(1, 0)) })
	defer stop()
	b, err := c.c.Recv()
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("the program has not welcomed the sidecar within %v", c.p.o.StartTimeout)
	case err != nil:
		return connError(err)
	}
	var welcome wire.TierWelcome
	if t, terr := wire.Peek(b); terr == nil && t == wire.TypeTierRefuse {
		var refuse wire.TierRefuse
		if err := refuse.Decode(b, &wire.DefaultLimits); err != nil {
			return protocolError("%w", err)
		}
		return fmt.Errorf("the program refuses: %s", refuse.Message)
	}
	if err := welcome.Decode(b, &wire.DefaultLimits); err != nil {
		return protocolError("%w", err)
	}
	c.program, c.maxItems = welcome.Program, int(welcome.MaxItems)
	c.turns = make(chan struct{}, welcome.MaxCalls)
	c.reported = time.Now()
	if stop() {
		return c.c.SetRecvDeadline(time.Time{})
	}
	return context.Cause(ctx)
}

// connError returns the error of a connection, in words for operators.
func connError(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, ipc.ErrPeerGone) {
		return errLeft
	}
	return err
}

// fail ends the connection. A program that was started here is killed unless it has left by itself.
// The first cause stays.
func (c *conn) fail(cause error) {
	c.mu.Lock()
	first := c.cause == nil
	if first {
		c.cause = cause
		close(c.ended)
	}
	c.mu.Unlock()
	if !first {
		return
	}
	_ = c.c.Close() // the program reads the end
	if c.process != nil && !errors.Is(cause, errLeaving) && !errors.Is(cause, errLeft) {
		c.process.kill()
	}
}

// errLeaving is the cause for which Close ends a connection: the program may end by itself.
var errLeaving = errors.New("the sidecar ends the tier")

// failed returns why the connection has failed.
func (c *conn) failed() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.cause
}

// depart waits until nothing of a failed connection is left, and frees it. It closes free.
func (c *conn) depart() {
	<-c.ended
	patience := time.NewTimer(c.p.o.EndTimeout)
	defer patience.Stop()
	if c.process != nil {
		select {
		case <-c.process.ended:
		case <-patience.C:
			c.process.kill()
			<-c.process.ended
		}
	}
	warn := time.NewTimer(c.p.o.EndTimeout)
	defer warn.Stop()
	for waiting := true; waiting; {
		select {
		case <-c.lifeline:
			waiting = false
		case <-warn.C:
			c.p.o.Log.Warn("the program still has the sidecar's memory mapped: what it was to fill is not used, and the tier stays off, until it has unmapped it or has died",
				zap.Int32("pid", c.c.Peer().PID))
		case <-c.p.abandon: // Close does not wait for ever
			waiting = false
			if c.claim >= 0 {
				if err := ipc.StrandClaim(c.claim); err != nil {
					c.p.o.Log.Error("a later sidecar will not learn that a program may still write to its memory",
						zap.Error(err))
				}
			}
		}
	}
	c.mu.Lock()
	left := c.left
	c.left, c.freed = nil, true
	c.mu.Unlock()
	for _, sp := range left {
		c.p.scratch.give(sp)
	}
	close(c.free)
	if c.claim >= 0 {
		unix.Close(c.claim)
	}
}

// receiveNothing returns the buffer of a connection that nobody receives from.
func (c *conn) receiveNothing() {
	<-c.free
	c.c.Recycle()
}

// receive handles what the program sends, until the end.
func (c *conn) receive() {
	defer c.receiveNothing()
	for {
		b, err := c.c.Recv()
		if err == nil {
			err = c.handle(b)
		}
		if err != nil {
			c.fail(connError(err))
			return
		}
	}
}

func (c *conn) handle(b []byte) error {
	t, err := wire.Peek(b)
	if err != nil {
		return protocolError("%w", err)
	}
	switch t {
	case wire.TypeTierDone:
		var m wire.TierDone
		if err = m.Decode(b, &wire.DefaultLimits); err == nil {
			return c.onDone(&m)
		}
	case wire.TypeTierCleared:
		var m wire.TierCleared
		if err = m.Decode(b, &wire.DefaultLimits); err == nil {
			return c.onReply(m.ID, func(o *call) bool {
				o.cleared = &m
				return o.clears
			})
		}
	case wire.TypeTierFigures:
		var m wire.TierFigures
		if err = m.Decode(b, &wire.DefaultLimits); err == nil {
			return c.onReply(m.ID, func(o *call) bool {
				o.figures = &m
				c.figures, c.reported = m, time.Now()
				return o.figured
			})
		}
	case wire.TypeTierRegionReady:
		var m wire.TierRegionReady
		if err = m.Decode(b, &wire.DefaultLimits); err == nil {
			return c.onReady(&m)
		}
	case wire.TypeTierRegionLeft:
		var m wire.TierRegionLeft
		if err = m.Decode(b, &wire.DefaultLimits); err == nil {
			return c.onLeft(m.Region)
		}
	default:
		return protocolError("a message of the type %v", t)
	}
	return protocolError("%w", err)
}

func (o *call) ring() {
	select {
	case o.bell <- struct{}{}:
	default:
	}
}

func (c *conn) onDone(m *wire.TierDone) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	o := c.calls[m.ID]
	if o == nil || o.clears || o.figured {
		return protocolError("results of a call %d that is not open", m.ID)
	}
	for _, r := range m.Results {
		if int(r.Index) >= o.items || o.seen[r.Index] {
			return protocolError("result %d of a call of %d items, or twice", r.Index, o.items)
		}
		o.seen[r.Index] = true
	}
	o.open -= len(m.Results) // only now: none of a message that breaks the protocol counts
	o.results = append(o.results, m.Results...)
	if m.Text != "" {
		o.text = m.Text
	}
	c.over(o)
	return nil
}

func (c *conn) onReply(id uint64, take func(o *call) bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	o := c.calls[id]
	if o == nil || !take(o) {
		return protocolError("a reply to a call %d that is not open", id)
	}
	o.open = 0
	c.over(o)
	return nil
}

// over wakes the caller, and ends a call whose results have all come. c.mu is held.
func (c *conn) over(o *call) {
	if o.open == 0 {
		delete(c.calls, o.id)
		if o.turn {
			<-c.turns
		}
	}
	o.ring()
}

// begin takes a turn for a call, and enters it into the books, where it is until all results have
// come.
func (c *conn) begin(ctx context.Context, o *call) error {
	select {
	case c.turns <- struct{}{}:
	case <-c.ended:
		return c.down()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	o.turn = true
	err := c.enter(o)
	if err != nil {
		<-c.turns
	}
	return err
}

// enter enters a call into the books, and gives it its number.
func (c *conn) enter(o *call) error {
	o.open, o.seen, o.bell = o.items, make([]bool, o.items), make(chan struct{}, 1)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cause != nil {
		return c.downBy(c.cause)
	}
	c.next++
	o.id = c.next
	c.calls[o.id] = o
	return nil
}

func (c *conn) down() error { return c.downBy(c.failed()) }

func (c *conn) downBy(cause error) error {
	if errors.Is(cause, errLeaving) {
		return errClosed
	}
	return fmt.Errorf("the program of this tier cannot be used now: %w", cause)
}

// send sends a message. An error ends the connection.
func (c *conn) send(m wire.Message, fds ...int) error {
	err := c.c.Send(m.Append(nil), fds...)
	if err != nil {
		c.fail(connError(err))
		return c.down()
	}
	return nil
}

// Regions.

// announce tells the program of a region, if it was not told yet. The descriptor is valid during
// the call.
func (c *conn) announce(r *Region) (*announced, error) {
	c.mu.Lock()
	a := c.regions[r.ID]
	if a != nil {
		c.mu.Unlock()
		return a, nil
	}
	a = &announced{mem: r.Mem, ready: make(chan struct{}), gone: make(chan struct{})}
	c.regions[r.ID] = a
	c.mu.Unlock()
	return a, c.send(&wire.TierRegion{Region: r.ID, Kind: r.Kind, SizeBytes: uint64(r.SizeBytes),
		Offset: uint64(r.OffsetBytes), PageSize: uint64(r.PageSize)}, r.FD)
}

func (c *conn) onReady(m *wire.TierRegionReady) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	a := c.regions[m.Region]
	if a == nil || a.said {
		return protocolError("a reply about a region %d that it was not told of", m.Region)
	}
	a.said = true
	if m.Error != "" {
		a.err = fmt.Errorf("the program cannot map memory: %s", m.Error)
		c.p.o.Log.Warn("the program does not map a region; what is there is copied once more",
			zap.Uint32("region", m.Region), zap.String("error", m.Error))
	} else if !a.gones {
		places := append(slices.Clone(*c.places.Load()), place{m.Region, a.mem})
		c.places.Store(&places)
	}
	close(a.ready)
	return nil
}

// retract has the program unmap a region, and waits for it. nil: it has.
func (c *conn) retract(id uint32, patience time.Duration) error {
	c.mu.Lock()
	a := c.regions[id]
	if a == nil {
		c.mu.Unlock()
		return nil
	}
	a.gones = true
	places := slices.DeleteFunc(slices.Clone(*c.places.Load()),
		func(p place) bool { return p.id == id })
	c.places.Store(&places)
	c.mu.Unlock()
	if err := c.send(&wire.TierRegionGone{Region: id}); err == nil {
		late := time.NewTimer(patience)
		defer late.Stop()
		select {
		case <-a.gone:
			return nil
		case <-c.ended:
		case <-late.C:
			c.fail(errors.New("the program does not unmap a region that is removed"))
		}
	}
	select { // a program that has ended has unmapped it
	case <-c.free:
		return nil
	case <-time.After(patience):
		return errors.New("the program still maps a region that is removed")
	}
}

func (c *conn) onLeft(id uint32) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	a := c.regions[id]
	if a == nil || !a.gones {
		return protocolError("it has unmapped a region %d, and was not told to", id)
	}
	delete(c.regions, id)
	close(a.gone)
	return nil
}

// find returns where memory lies in a region that the program maps.
func (c *conn) find(mem []byte) (wire.TierPiece, bool) {
	for _, p := range *c.places.Load() {
		if at, ok := dax.OffsetIn(p.mem, mem); ok {
			return wire.TierPiece{Region: p.id, Offset: uint64(at),
				SizeBytes: uint64(len(mem))}, true
		}
	}
	return wire.TierPiece{}, false
}
