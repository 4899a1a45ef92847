package elsewhere

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"lookaside/tiers"
)

var errClosed = tiers.ErrClosed

// Region is memory that items may lie in. FD and Mem stay valid until RemoveRegion has returned, or
// Close.
type Region struct {
	ID                               uint32 // below 3 << 30, used once
	Kind                             string // a dax.Kind or dax.DeviceKind
	FD                               int
	OffsetBytes, SizeBytes, PageSize int64
	Mem                              []byte // the region, mapped in this process
}

// Stats is a snapshot of a Program.
type Stats struct {
	CapacityBytes int64 // -1: not known
	UsedBytes     int64 // -1: not known
	Keys          int64 // -1: not known
	Evictions     uint64
	Down          string // why it cannot be used now; empty: it can
	Detail        string
	PID           int    // 0: not known
	Starts        uint64 // how often it was started or connected to
	Failures      uint64 // how often that failed, or a connection was lost
}

// Program is one program. Any goroutine may call its methods; after Close they return
// tiers.ErrClosed.
type Program struct {
	o       Options
	scratch scratch
	ctx     context.Context // ends when Close begins
	end     context.CancelCauseFunc
	abandon chan struct{} // closed when Close waits no longer
	gone    chan struct{} // closed when run has returned
	closing sync.Once
	calls   sync.WaitGroup // calls.Add is guarded by mu
	telling sync.Mutex     // held while regions are announced; taken before mu

	mu       sync.Mutex // guards what follows
	closed   bool
	conn     *conn         // nil: none is serving
	leaving  *conn         // one that has failed, and is not free yet
	changed  chan struct{} // closed when conn, starting or down change
	starting bool          // a connection is being made
	down     error         // why there is no conn
	regions  map[uint32]*Region
	last     Stats // of the connection before
	starts   uint64
	failures uint64
}

// Open makes a Program and begins to start it, or to connect to it. It does not wait for that: a
// program that cannot be used is tried again.
func Open(o Options) (*Program, error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	p := &Program{o: o, abandon: make(chan struct{}), gone: make(chan struct{}), starting: true,
		changed: make(chan struct{}), regions: map[uint32]*Region{},
		last: Stats{CapacityBytes: -1, UsedBytes: -1, Keys: -1}}
	p.scratch.limit, p.scratch.added = o.ScratchBytes, p.addScratch
	p.ctx, p.end = context.WithCancelCause(context.Background())
	go p.run()
	return p, nil
}

// set changes the state.
func (p *Program) set(c *conn, starting bool, down error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conn, p.starting, p.down = c, starting, down
	close(p.changed)
	p.changed = make(chan struct{})
}

// run has the life of the program.
func (p *Program) run() {
	defer close(p.gone)
	pause, said := p.o.FirstPause, ""
	for p.ctx.Err() == nil {
		p.set(nil, true, errors.New("it is being started"))
		began := time.Now()
		err := p.serve(func() { said = "" })
		if p.ctx.Err() != nil {
			break
		}
		if time.Since(began) >= p.o.SteadyAfter {
			pause = p.o.FirstPause
		}
		p.mu.Lock()
		p.failures++
		p.mu.Unlock()
		p.set(nil, false, err)
		if text := err.Error(); text != said { // the same again and again is logged once
			said = text
			p.o.Log.Warn("the program of the tier cannot be used now; it is tried again",
				zap.Error(err), zap.Duration("pause", pause))
		}
		t := time.NewTimer(pause)
		select {
		case <-p.ctx.Done():
		case <-t.C:
		}
		t.Stop()
		pause = min(2*pause, p.o.LastPause)
	}
	p.set(nil, false, errClosed)
}

// serve has one connection, and returns why it ended. served is called if it began to serve.
func (p *Program) serve(served func()) error {
	c, err := p.connect(p.ctx)
	if err != nil {
		return err
	}
	stop := context.AfterFunc(p.ctx, func() { c.fail(errLeaving) })
	defer stop()
	if err := p.prepare(c); err != nil {
		c.fail(err)
	} else {
		served()
		p.mu.Lock()
		p.starts++
		p.mu.Unlock()
		p.o.Log.Info("the program of the tier serves", zap.String("program", c.program),
			zap.Int("pid", c.pid()))
		p.set(c, false, nil)
		p.watch(c)
	}
	// Calls fail from now on. Those under way wait for free, if they must.
	cause := c.failed()
	p.note(c)
	p.set(nil, false, cause)
	c.depart()
	p.mu.Lock()
	p.leaving = nil
	p.mu.Unlock()
	if c.process != nil && errors.Is(cause, errLeft) {
		cause = errors.New(c.process.reason())
	}
	return cause
}

// prepare has the program map what a connection begins with.
func (p *Program) prepare(c *conn) error {
	if len(p.scratch.list()) == 0 {
		sp, err := p.scratch.take(p.ctx, scratchUnit)
		if err != nil {
			return err
		}
		p.scratch.give(sp)
	}
	for _, area := range p.scratch.list() {
		a, err := c.announce(area.asRegion())
		if err != nil {
			return err
		}
		select {
		case <-a.ready:
		case <-c.ended:
			return c.failed()
		case <-time.After(p.o.StartTimeout):
			return fmt.Errorf("the program has not mapped memory within %v", p.o.StartTimeout)
		}
		if a.err != nil {
			return a.err
		}
	}
	p.telling.Lock()
	defer p.telling.Unlock()
	p.mu.Lock()
	p.conn = c // from here on AddRegion and addScratch announce by themselves
	regions := slices.Collect(maps.Values(p.regions))
	p.mu.Unlock()
	for _, r := range regions {
		if _, err := c.announce(r); err != nil {
			return err
		}
	}
	return nil
}

func (a *area) asRegion() *Region {
	r := a.region
	return &Region{ID: a.id, Kind: string(r.Kind()), FD: r.FD(), SizeBytes: r.Size(),
		PageSize: r.PageSize(), Mem: r.Bytes()}
}

// addScratch announces new scratch memory.
func (p *Program) addScratch(ctx context.Context, area *area) error {
	p.mu.Lock()
	c := p.conn
	p.mu.Unlock()
	if c == nil {
		return nil // the next connection begins with it
	}
	a, err := c.announce(area.asRegion())
	if err != nil {
		return err
	}
	select {
	case <-a.ready:
		return a.err
	case <-c.ended:
		return c.down()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// watch asks for figures until the connection has failed.
func (p *Program) watch(c *conn) {
	t := time.NewTicker(p.o.StatsEvery)
	defer t.Stop()
	for {
		if c.figure(p.ctx) != nil && c.failed() == nil {
			c.mu.Lock()
			silent := time.Since(c.reported) > p.o.StatsTimeout
			c.mu.Unlock()
			if silent {
				c.fail(errSilent)
			}
		}
		select {
		case <-c.ended:
			return
		case <-t.C:
		}
	}
}

// note keeps the figures of a connection that has failed, until it is free the connection too.
func (p *Program) note(c *conn) {
	st := c.stats()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.last, p.leaving = st, c
}

// current returns the connection that serves. With wait it waits for one that is being made.
func (p *Program) current(ctx context.Context, wait bool) (*conn, error) {
	for {
		p.mu.Lock()
		c, starting, down, changed, closed := p.conn, p.starting, p.down, p.changed, p.closed
		p.mu.Unlock()
		switch {
		case closed:
			return nil, errClosed
		case c != nil && !starting:
			return c, nil
		case !starting || !wait:
			if errors.Is(down, errClosed) {
				return nil, errClosed
			}
			return nil, fmt.Errorf("the program of this tier cannot be used now: %w", down)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// enter begins a call, which must end with p.calls.Done.
func (p *Program) enter() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return errClosed
	}
	p.calls.Add(1)
	return nil
}

// Check returns nil if the program serves. It waits for one that is being started.
func (p *Program) Check(ctx context.Context) error {
	c, err := p.current(ctx, true)
	if err != nil {
		return err
	}
	return c.figure(ctx)
}

// AddRegion has the program map a region, now and whenever it is started again. It does not wait.
// Until the program has mapped it, and if it cannot, items in it are copied.
func (p *Program) AddRegion(r Region) {
	if p.o.Isolated {
		return
	}
	p.telling.Lock()
	defer p.telling.Unlock()
	p.mu.Lock()
	p.regions[r.ID] = &r
	c := p.conn
	p.mu.Unlock()
	if c != nil {
		_, _ = c.announce(&r) // an error has ended the connection
	}
}

// RemoveRegion has the program unmap a region in which no item lies, and waits for it, at most for
// patience, and as long again for a program that has to be ended for it. With an error the program
// may still have it mapped.
func (p *Program) RemoveRegion(id uint32, patience time.Duration) error {
	p.telling.Lock()
	p.mu.Lock()
	delete(p.regions, id)
	c := p.conn
	if c == nil {
		c = p.leaving
	}
	p.mu.Unlock()
	p.telling.Unlock()
	if c == nil {
		return nil
	}
	return c.retract(id, patience)
}

// Stats returns a snapshot. It does not wait.
func (p *Program) Stats() Stats {
	p.mu.Lock()
	c, st, down := p.conn, p.last, p.down
	starts, failures := p.starts, p.failures
	if p.starting {
		c = nil
	}
	p.mu.Unlock()
	if c != nil {
		st = c.stats()
	} else if down != nil {
		st.Down, st.PID = down.Error(), 0
	}
	if st.Detail == "" {
		st.Detail = p.where()
	}
	st.Starts, st.Failures = starts, failures
	return st
}

// where returns what the program is, as it is configured.
func (p *Program) where() string {
	if p.o.Socket != "" {
		return p.o.Socket
	}
	return p.o.Command[0]
}

// Close ends the program, or leaves it. Calls under way return tiers.ErrClosed. It returns when
// nothing of the program's may write to the regions any more, or when EndTimeout is over; see the
// package comment. Close is idempotent.
func (p *Program) Close() error {
	p.closing.Do(func() {
		p.mu.Lock()
		p.closed = true
		p.mu.Unlock()
		p.end(errClosed)
		late := time.AfterFunc(2*p.o.EndTimeout, func() { close(p.abandon) })
		<-p.gone
		late.Stop()
	})
	<-p.gone
	p.calls.Wait()
	return p.scratch.close()
}

func (c *conn) pid() int {
	if c.process != nil {
		return c.process.cmd.Process.Pid
	}
	return int(c.c.Peer().PID)
}

// stats returns the figures that came last.
func (c *conn) stats() Stats {
	c.mu.Lock()
	f := c.figures
	c.mu.Unlock()
	st := Stats{CapacityBytes: int64(f.CapacityBytes), UsedBytes: int64(f.UsedBytes),
		Keys: int64(f.Keys), Evictions: f.Evictions, Down: f.Problem, Detail: c.program,
		PID: c.pid()}
	if f.CapacityBytes == 0 {
		st.CapacityBytes = -1
	}
	if f.Detail != "" {
		st.Detail += ": " + f.Detail
	}
	st.Detail += fmt.Sprintf(" (pid %d)", c.pid())
	return st
}
