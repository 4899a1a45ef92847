package peer

import (
	"cmp"
	"context"
	"errors"
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
	"lookaside/tiers"
	"lookaside/tiers/engine"
)

// Errors that are wrapped.
var (
	// ErrClosed is returned by operations on what was closed.
	ErrClosed = errors.New("closed")
	// ErrNoAnswer means that a peer did not answer in time.
	ErrNoAnswer = errors.New("the peer does not answer")
)

// Limits on what peers may have us keep.
const (
	maxPeers   = 64 // bits of the hint table
	maxRegions = 256
	maxSpaces  = 512

	pollEvery   = 200 * time.Millisecond // how often the directory is read
	upkeepEvery = 20 * time.Millisecond  // how often returns that could not be sent are tried again
	rateEvery   = time.Second
	retryAfter  = 5 * time.Second // a peer that could not be talked to
	// defaultCallPatience is Config's.
	defaultCallPatience = 250 * time.Millisecond
	// stalledAfter is how long a lender may keep an answer before it is passed over.
	stalledAfter  = 50 * time.Millisecond
	helloPatience = 5 * time.Second
	// closingPatience is how long a process that ends takes to close all its descriptors, by far.
	closingPatience = time.Second
)

// Config is what a Peers works with.
type Config struct {
	// Dir is the directory in which sidecars find each other. Unless it is this user's alone (mode
	// 0700) no peers are looked for, until it is; Status says so.
	Dir string
	// Generation of this run of the sidecar, random, not 0.
	Generation uint64
	// Engine is the own one, that others borrow from. Its Config.JournalBytes must not be 0.
	Engine *engine.Engine
	// Log. Default: nothing.
	Log *zap.Logger
	// HintsLimitBytes bounds the memory of the hints; while their table grows it may take half as
	// much again. Default 512 MiB.
	HintsLimitBytes int64
	// MaxPages bounds the pages of one lease. Default 65,536.
	MaxPages int
	// CallPatience is how long a lender's answer is waited for. Default 250 ms.
	CallPatience time.Duration
	// Verify has checked what the engine restored of a run and nobody has checked since, which
	// others want lent. It returns when that is done, or ctx is. May be nil: nothing such is ever
	// lent.
	Verify func(ctx context.Context, o engine.Owner, run tiers.Run) error

	// OnRegion is told of a lender's region. Nothing in it is lent to us until it has returned; an
	// error means that nothing ever is. The descriptor is read-only where that can be had, and
	// stays open until OnRegionGone has returned for it. May be nil, as the next two.
	OnRegion func(Region) error
	// OnRegionGone is told that a region goes. It returns when no worker maps it any more. A lender
	// that lives takes a region away when nobody has a loan in it. For each lender calls of
	// OnRegion and OnRegionGone come one after the other; an identity may come again later.
	OnRegionGone func(peer uint64, region uint32)
	// OnGone is told at once that a lender has gone, also while a call of the above for it is under
	// way. Its loans are void: nobody may be given pages of them any more, and each is still to be
	// returned, when nobody reads it. OnRegionGone for its regions comes after it.
	OnGone func(peer uint64)
}

// Region is a part of an arena. The offset, and the address that it is mapped at, are multiples of
// PageSize.
type Region struct {
	Peer                             uint64 // the lender's generation; 0 for our own
	ID                               uint32
	Kind                             string // a dax.Kind or dax.DeviceKind
	FD                               int
	OffsetBytes, SizeBytes, PageSize int64
}

// Peers is a sidecar's part in the sharing. All methods may be called from any goroutine.
type Peers struct {
	cfg   Config
	log   *zap.Logger
	hints *hintTable
	loans loanTable

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup
	once   sync.Once

	upkeep chan struct{} // cap 1: there is something to do

	borrows, borrowedPages, failedBorrows, touches atomic.Uint64
	leases, lentPages, refusedLeases               atomic.Uint64
	hintsTold, hintsHeard, malformed               atomic.Uint64
	wrongHints, resyncs                            atomic.Uint64

	group atomic.Uint64 // what Group answers

	waiting atomic.Int32 // calls that wait for a lender to have something checked

	held atomic.Pointer[sync.Mutex] // tests hold it to have this sidecar answer nobody

	mu  sync.Mutex
	off string // why no peers are looked for, "" if they are
	// lenders that we are connected to, or have been and must return loans to, by generation
	peers     map[uint64]*borrower
	byBit     [maxPeers]*borrower   // by bit of the hint table
	troubles  map[uint64]trouble    // lenders that could not be talked to
	lenders   map[*lender]struct{}  // borrowers that are connected to us
	regions   map[uint32]*ownRegion // of the own arena
	order     []uint32              // their ids, in the order they came
	spaces    map[tiers.Fingerprint]*declared
	dir       *ipc.PeerDir
	listening *ipc.Listener
	rates     rates
}

// trouble is why a lender was not talked to, and when it is tried again.
type trouble struct {
	why   string
	pid   int32
	again time.Time
}

// ownRegion is a region of the own arena, that is lent.
type ownRegion struct {
	Region
	ro    int // descriptor to pass on, of its own
	going bool
}

type rates struct {
	at          time.Time
	told, heard uint64 // then
	toldPer     float64
	heardPer    float64
}

// Start begins to look for peers and to lend. Regions of the arena are lent from AddRegion on.
func Start(cfg Config) (*Peers, error) {
	if cfg.Log == nil {
		cfg.Log = zap.NewNop()
	}
	if cfg.HintsLimitBytes == 0 {
		cfg.HintsLimitBytes = 512 << 20
	}
	if cfg.MaxPages == 0 {
		cfg.MaxPages = wire.DefaultLimits.Pages
	}
	if cfg.CallPatience == 0 {
		cfg.CallPatience = defaultCallPatience
	}
	if cfg.Generation == 0 || cfg.Engine == nil || cfg.MaxPages < 0 || cfg.HintsLimitBytes < 0 ||
		cfg.CallPatience < 0 {
		return nil, errors.New("peers: a generation and an engine are needed, and limits above 0")
	}
	hints, err := newHintTable(cfg.HintsLimitBytes)
	if err != nil {
		return nil, err
	}
	p := &Peers{
		cfg: cfg, log: cfg.Log, hints: hints, upkeep: make(chan struct{}, 1),
		peers: map[uint64]*borrower{}, troubles: map[uint64]trouble{},
		lenders: map[*lender]struct{}{}, regions: map[uint32]*ownRegion{},
		spaces: map[tiers.Fingerprint]*declared{},
	}
	p.rates.at = time.Now()
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.poll() // what can be found at once is found at once
	p.wg.Go(p.discover)
	p.wg.Go(p.keepUp)
	return p, nil
}

// Group is a number that all sidecars have which look for each other in this directory, and others
// do not; 0 while no peers are looked for.
func (p *Peers) Group() uint64 { return p.group.Load() }

// Close gives all loans back, and ends. Nobody may read what was borrowed any more, and the engine
// must grant nothing any more of what is lent, for borrowers may go on reading it until they have
// heard. OnRegionGone has been called for every region when it returns. It is idempotent.
func (p *Peers) Close() error {
	p.once.Do(func() {
		p.cancel()
		p.mu.Lock()
		listening := p.listening
		p.listening = nil
		lenders := make([]*lender, 0, len(p.lenders))
		for l := range p.lenders {
			lenders = append(lenders, l)
		}
		borrowers := p.allPeers()
		p.mu.Unlock()
		if listening != nil {
			_ = listening.Close()
		}
		for _, b := range borrowers {
			b.flush()
			b.bye()
			_ = b.close()
		}
		for _, l := range lenders {
			_ = l.conn.Close()
		}
		p.wg.Wait()
		p.mu.Lock()
		for _, r := range p.regions {
			_ = unix.Close(r.ro)
		}
		clear(p.regions)
		if p.dir != nil {
			_ = p.dir.Close()
			p.dir = nil
		}
		p.mu.Unlock()
		p.hints.close()
	})
	return nil
}

// allPeers lists the lenders. p.mu is held.
func (p *Peers) allPeers() []*borrower {
	out := make([]*borrower, 0, len(p.peers))
	for _, b := range p.peers {
		out = append(out, b)
	}
	slices.SortFunc(out, func(a, b *borrower) int { return cmp.Compare(a.gen, b.gen) })
	return out
}

// AddRegion lends a region of the own arena from now on. Its descriptor stays the caller's, open
// until RemoveRegion returns or Close. No two regions of a run have the same id.
func (p *Peers) AddRegion(r Region) error {
	ro, err := dax.ReadOnly(r.FD)
	if err != nil { // it can be had only as it is
		if ro, err = unix.FcntlInt(uintptr(r.FD), unix.F_DUPFD_CLOEXEC, 0); err != nil {
			return os.NewSyscallError("dup", err)
		}
	}
	r.Peer = 0
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ctx.Err() != nil || p.regions[r.ID] != nil {
		unix.Close(ro)
		return ErrClosed
	}
	p.regions[r.ID] = &ownRegion{Region: r, ro: ro}
	p.order = append(p.order, r.ID)
	p.wakeLenders()
	return nil
}

// RemoveRegion has borrowers let go of a region, and returns when they have. One that has not
// within the patience is given up. The engine must have taken the region away before. A region that
// is not there is not waited for.
func (p *Peers) RemoveRegion(id uint32, patience time.Duration) {
	p.mu.Lock()
	r := p.regions[id]
	if r == nil || r.going {
		p.mu.Unlock()
		return
	}
	r.going = true
	p.order = slices.DeleteFunc(p.order, func(o uint32) bool { return o == id })
	p.wakeLenders()
	var waits []*lender
	for l := range p.lenders {
		waits = append(waits, l)
	}
	p.mu.Unlock()
	late := time.NewTimer(patience)
	defer late.Stop()
	expired := false
	for _, l := range waits {
		for !expired && !l.without(id) {
			select {
			case <-l.changed():
			case <-l.done:
			case <-p.ctx.Done():
				expired = true
			case <-late.C:
				expired = true
			}
		}
		if !l.without(id) {
			l.giveUp(errRegionKept)
		}
	}
	p.mu.Lock()
	delete(p.regions, id)
	p.mu.Unlock()
	_ = unix.Close(r.ro)
}

var errRegionKept = errors.New("it does not let go of a region that is removed")

// wakeLenders has what is sent to borrowers looked at. p.mu is held.
func (p *Peers) wakeLenders() {
	for l := range p.lenders {
		l.ring()
	}
}

// wake has the upkeep look at what there is to do.
func (p *Peers) wake() {
	select {
	case p.upkeep <- struct{}{}:
	default:
	}
}

// pause waits while a test has this sidecar answer nobody.
func (p *Peers) pause() {
	if m := p.held.Load(); m != nil {
		m.Lock()
		defer m.Unlock()
	}
}

// keepUp returns loans, sweeps hints and counts.
func (p *Peers) keepUp() {
	tick := time.NewTicker(rateEvery)
	defer tick.Stop()
	retry := time.NewTimer(time.Hour)
	defer retry.Stop()
	for {
		select {
		case <-p.ctx.Done():
			return
		case <-p.upkeep:
		case <-retry.C:
		case <-tick.C:
			p.countRates()
		}
		left := false
		for _, b := range p.snapshotPeers() {
			left = !b.flush() || left
		}
		for more := true; more && p.ctx.Err() == nil; {
			more = p.hints.sweep()
		}
		if left {
			retry.Reset(upkeepEvery)
		}
	}
}

func (p *Peers) snapshotPeers() []*borrower {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.allPeers()
}

func (p *Peers) countRates() {
	p.mu.Lock()
	defer p.mu.Unlock()
	r := &p.rates
	now, told, heard := time.Now(), p.hintsTold.Load(), p.hintsHeard.Load()
	if s := now.Sub(r.at).Seconds(); s > 0 {
		r.toldPer, r.heardPer = float64(told-r.told)/s, float64(heard-r.heard)/s
	}
	r.at, r.told, r.heard = now, told, heard
}
