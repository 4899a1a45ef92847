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

// Errors that callers meet wrapped.
var (
	// ErrClosed is returned by operations on something closed.
	ErrClosed = errors.New("closed")
	// ErrNoAnswer means that a peer did not reply in time.
	ErrNoAnswer = errors.New("the peer does not answer")
)

// Limits on what peers may make us hold.
const (
	maxPeers   = 64 // bits of the hint table
	maxRegions = 256
	maxSpaces  = 512

	pollEvery   = 200 * time.Millisecond // how often the directory is read
	upkeepEvery = 20 * time.Millisecond  // how often unsent returns are retried
	rateEvery   = time.Second
	retryAfter  = 5 * time.Second // delay before a sidecar that failed is tried again
	// defaultCallPatience is the default of Config.CallPatience.
	defaultCallPatience = 250 * time.Millisecond
	// stalledAfter is how long a lender may keep an answer before it is skipped.
	stalledAfter  = 50 * time.Millisecond
	helloPatience = 5 * time.Second
	// closingPatience is far longer than a dying process takes to close its descriptors.
	closingPatience = time.Second
)

// Config configures a Peers.
type Config struct {
	// Dir is where sidecars find each other. It must belong to this user alone (mode 0700); until
	// it does, no peers are looked for, and Status says so.
	Dir string
	// Generation identifies this run of the sidecar: random, not 0.
	Generation uint64
	// Engine is our own engine, from which others borrow. Its Config.JournalBytes must not be 0.
	Engine *engine.Engine
	// Log gets what an operator needs to know. Default: none.
	Log *zap.Logger
	// HintsLimitBytes bounds the memory of the hints. While their table grows it may take half as
	// much again. Default 512 MiB.
	HintsLimitBytes int64
	// MaxPages bounds the pages of one lease. Default 65,536.
	MaxPages int
	// CallPatience is how long to wait for a lender's answer. Default 250 ms.
	CallPatience time.Duration
	// Verify checks the chunks of a run that the engine restored and nobody has checked yet. It
	// returns when they are checked or ctx is done. If it is nil, such chunks are never lent.
	Verify func(ctx context.Context, o engine.Owner, run tiers.Run) error

	// OnRegion is called for each region of a lender. Nothing in the region is lent to us before it
	// returns; if it fails, nothing ever is. The descriptor is read-only where possible, and stays
	// open until OnRegionGone returns for it. OnRegion, OnRegionGone and OnGone may be nil.
	OnRegion func(Region) error
	// OnRegionGone is called when a region goes. It returns once no worker maps the region. A
	// living lender takes a region away only when nobody has a loan in it. Calls of OnRegion and
	// OnRegionGone for one lender never overlap. A region's identity may come back later.
	OnRegionGone func(peer uint64, region uint32)
	// OnGone is called at once when a lender has gone, even during a call of OnRegion or
	// OnRegionGone for it. The lender's loans are void: nobody may be given their pages any more.
	// Each loan must still be returned when nobody reads it. OnRegionGone follows for each region.
	OnGone func(peer uint64)
}

// Region is a part of an arena. Its offset, and the address of a mapping of it, are multiples of
// PageSize.
type Region struct {
	Peer                             uint64 // the lender's generation; 0 for our own
	ID                               uint32
	Kind                             string // a dax.Kind or dax.DeviceKind
	FD                               int
	OffsetBytes, SizeBytes, PageSize int64
}

// Peers connects a sidecar to the others. All methods are safe for concurrent use.
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

	group atomic.Uint64 // returned by Group

	waiting atomic.Int32 // calls that wait for a lender's checks

	held atomic.Pointer[sync.Mutex] // tests hold it to keep this sidecar from replying

	mu  sync.Mutex
	off string // why no peers are looked for, "" if they are
	// lenders that we are connected to, or still owe loans, by generation
	peers     map[uint64]*borrower
	byBit     [maxPeers]*borrower   // by bit of the hint table
	troubles  map[uint64]trouble    // lenders that cannot be used
	lenders   map[*lender]struct{}  // borrowers that are connected to us
	regions   map[uint32]*ownRegion // of the own arena
	order     []uint32              // their ids, in the order they came
	spaces    map[tiers.Fingerprint]*declared
	dir       *ipc.PeerDir
	listening *ipc.Listener
	rates     rates
}

// trouble is why a lender cannot be used, and when it is tried again.
type trouble struct {
	why   string
	pid   int32
	again time.Time
}

// ownRegion is a region of our own arena.
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

// Start starts looking for peers and lending. A region of the arena is lent once AddRegion is
// called for it.
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
	p.poll() // finds the sidecars that exist already
	p.wg.Go(p.discover)
	p.wg.Go(p.keepUp)
	return p, nil
}

// Group returns the id of the group of sidecars that share this directory; 0 while none are looked
// for.
func (p *Peers) Group() uint64 { return p.group.Load() }

// Close returns all loans and ends sharing. Nobody may read borrowed pages any more. The engine
// must already grant nothing that is lent, because borrowers may read it until they notice the end.
// OnRegionGone has been called for every region when Close returns. Close is idempotent.
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

// allPeers returns the lenders. The caller holds p.mu.
func (p *Peers) allPeers() []*borrower {
	out := make([]*borrower, 0, len(p.peers))
	for _, b := range p.peers {
		out = append(out, b)
	}
	slices.SortFunc(out, func(a, b *borrower) int { return cmp.Compare(a.gen, b.gen) })
	return out
}

// AddRegion allows lending from a region of our own arena. The caller keeps its descriptor open
// until RemoveRegion or Close returns. Ids are not reused within a run.
func (p *Peers) AddRegion(r Region) error {
	ro, err := dax.ReadOnly(r.FD)
	if err != nil { // no read-only descriptor can be had
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

// RemoveRegion takes a region back from all borrowers, and returns when none maps it. A borrower
// that does not give it back within patience is given up. The engine must have removed the region
// before. It returns at once for an unknown region.
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

// wakeLenders wakes the senders of all lenders. The caller holds p.mu.
func (p *Peers) wakeLenders() {
	for l := range p.lenders {
		l.ring()
	}
}

// wake wakes the upkeep.
func (p *Peers) wake() {
	select {
	case p.upkeep <- struct{}{}:
	default:
	}
}

// pause blocks while a test holds held.
func (p *Peers) pause() {
	if m := p.held.Load(); m != nil {
		m.Lock()
		defer m.Unlock()
	}
}

// keepUp sends returns, sweeps hints and updates counters, until Close.
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
