package sidecar

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"

	"lookaside/connector"
	"lookaside/dax"
	"lookaside/ipc/wire"
	"lookaside/sidecar/admin"
	"lookaside/sidecar/arena"
	"lookaside/sidecar/settings"
	"lookaside/tiers"
	"lookaside/tiers/elsewhere"
	"lookaside/tiers/engine"
	"lookaside/tiers/peer"
	"lookaside/tiers/stack"
)

const (
	// firstPeerRegion is the first number under which our workers know other sidecars' regions. It
	// is far above the numbers of our own arena.
	firstPeerRegion = 1 << 31
	// maxPeerRegions bounds the foreign regions that workers map at a time. A worker takes 4,096
	// regions in all.
	maxPeerRegions = 1024
	// maxBorrowers is how many sidecars may borrow at a time, each with an owner for each space.
	maxBorrowers = 64
	// borrowedSlots is the most chunks of one geometry that are borrowed at a time. It bounds the
	// engine's tables of them: some 100 bytes for a chunk, taken once it is borrowed. With chunks
	// of 16 pages of 16 tokens these are 16 million tokens, more than the requests that run have.
	borrowedSlots = 65536
	// returnEvery is the interval of checks whether all loans in a leaving region were returned.
	returnEvery = 5 * time.Millisecond
)

// touchPatience is how long a store waits for other sidecars to report which of its pages they
// hold. A test changes it.
var touchPatience = 5 * time.Millisecond

// peers connects package peer to the stack, the workers and the arena. A nil *peers shares nothing.
// Any goroutine may call its methods after start.
type peers struct {
	cfg    settings.PeersConfig
	log    *zap.Logger
	peer   *peer.Peers // set by start
	engine *engine.Engine
	stack  *stack.Stack
	server *connector.Server

	closing chan struct{} // closed by close
	once    sync.Once

	mu      sync.RWMutex // guards the fields below; read-held while a loan is handed over
	ids     map[peerRegion]uint32
	next    uint32
	regions map[uint32]*foreignRegion // by the number that workers know
}

// foreignRegion is another sidecar's region, as this sidecar reads it.
type foreignRegion struct {
	peer.Region
	tried bool
	mem   *dax.Attached // nil: not needed yet, or it cannot be mapped
}

// peerRegion is the owner's name for a region.
type peerRegion struct {
	peer   uint64
	region uint32
}

var (
	_ stack.Peers   = (*peers)(nil)
	_ admin.Peers   = (*peers)(nil)
	_ arena.Workers = (*announcer)(nil)
)

// newPeers returns nil if the settings turn sharing off.
func newPeers(cfg *settings.Config, log *zap.Logger) *peers {
	if !cfg.Peers.Enabled {
		return nil
	}
	if cfg.Events.Journal == 0 {
		log.Warn("nothing is shared with other sidecars: events.journal is 0, and what is held is sent to them from it; set events.journal, or set peers.enabled to false")
		return nil
	}
	return &peers{cfg: cfg.Peers, log: log, closing: make(chan struct{}),
		ids: map[peerRegion]uint32{}, next: firstPeerRegion, regions: map[uint32]*foreignRegion{}}
}

// start looks for other sidecars. hintLimit bounds the memory for what they hold. Nothing is lent
// before the arena's regions are added.
func (p *peers) start(cfg *settings.Config, hintLimit int64, generation uint64, e *engine.Engine,
	s *stack.Stack, server *connector.Server) (err error) {
	p.engine, p.stack, p.server = e, s, server
	p.peer, err = peer.Start(peer.Config{
		Dir: cfg.Peers.Dir, Generation: generation, Engine: e, Log: p.log,
		HintsLimitBytes: hintLimit, MaxPages: cfg.Lookup.MaxPages,
		Verify: s.VerifyRun, OnRegion: p.onRegion, OnRegionGone: p.onRegionGone, OnGone: s.PeerGone,
	})
	if err != nil {
		return fmt.Errorf("peers: %w", err)
	}
	return nil
}

// close ends the sharing. Close the server and the stack before it, the arena after it.
func (p *peers) close() error {
	if p == nil || p.peer == nil {
		return nil
	}
	p.once.Do(func() { close(p.closing) })
	return p.peer.Close()
}

// lend reports whether other sidecars may lend something.
func (p *peers) lend() bool { return p != nil && len(p.peer.Status().Lenders) > 0 }

// nextRegion returns the next number for a region of another sidecar, or 0 if nothing is shared.
// Workers never see a number twice, also not from the process that takes over.
func (p *peers) nextRegion() uint32 {
	if p == nil {
		return 0
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.next
}

// onRegion has workers map a region of another sidecar.
func (p *peers) onRegion(r peer.Region) error {
	p.mu.Lock()
	if len(p.ids) == maxPeerRegions || p.next == 0 {
		p.mu.Unlock()
		return fmt.Errorf("workers map %d regions of other sidecars already", maxPeerRegions)
	}
	id := p.next
	p.next++
	p.mu.Unlock()
	p.server.AnnounceRegion(connector.Region{
		ID: id, Kind: r.Kind, FD: r.FD, OffsetBytes: r.OffsetBytes, SizeBytes: r.SizeBytes,
		PageSize: r.PageSize, ReadOnly: true,
	})
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ids[peerRegion{r.Peer, r.ID}] = id
	p.regions[id] = &foreignRegion{Region: r}
	return nil
}

// onRegionGone has workers unmap a region of another sidecar, once no loan in it is in use.
func (p *peers) onRegionGone(peer uint64, region uint32) {
	p.mu.Lock()
	key := peerRegion{peer, region}
	id, ok := p.ids[key]
	delete(p.ids, key)
	p.mu.Unlock()
	if !ok {
		return
	}
	tick := time.NewTicker(returnEvery)
	defer tick.Stop()
	for p.engine.ForeignIn(id) > 0 {
		select {
		case <-tick.C:
			continue
		case <-p.closing: // no worker is left
		}
		break
	}
	p.mu.Lock()
	if r := p.regions[id]; r.mem != nil {
		_ = r.mem.Close()
	}
	delete(p.regions, id)
	p.mu.Unlock()
	p.server.RetractRegion(id, unmapPatience)
}

// Contains implements stack.Peers.
func (p *peers) Contains(run tiers.Run, held []uint16) (pages, by int) {
	return p.peer.Contains(run, held)
}

// Borrow implements stack.Peers.
func (p *peers) Borrow(ctx context.Context, run tiers.Run,
	out func(chunk int, l engine.Loan)) (pages int, err error) {
	var lost []uint64 // loans in a region that is leaving, and all after them
	_, err = p.peer.Borrow(ctx, run, func(chunk int, l peer.Loan) {
		if len(lost) == 0 {
			p.mu.RLock()
			defer p.mu.RUnlock()
			if id, ok := p.ids[peerRegion{l.Peer, l.Region}]; ok {
				pages += l.Pages
				out(chunk, engine.Loan{Peer: l.Peer, Region: id, Offset: l.Offset, Pages: l.Pages,
					Handle: l.Handle})
				return
			}
		}
		lost = append(lost, l.Handle)
	})
	if len(lost) > 0 {
		p.peer.Return(lost, false)
		if pages == 0 {
			err = errors.Join(err, tiers.ErrStale)
		}
	}
	return pages, err
}

// Ask implements stack.Peers.
func (p *peers) Ask(run tiers.Run, peer int, done func(loans []engine.Loan)) bool {
	return p.peer.Ask(run, peer, func(loans []engine.Loan) {
		known := 0 // loans before the first one in a region that is leaving
		p.mu.RLock()
		var key peerRegion
		var id uint32
		for ; known < len(loans); known++ {
			l := &loans[known]
			if now := (peerRegion{l.Peer, l.Region}); known == 0 || now != key {
				var ok bool
				if id, ok = p.ids[now]; !ok {
					break
				}
				key = now
			}
			l.Region = id
		}
		p.mu.RUnlock()
		done(loans[:known])
		var lost []uint64
		for _, l := range loans[known:] {
			lost = append(lost, l.Handle)
		}
		p.peer.Return(lost, false)
	})
}

// Return implements stack.Peers.
func (p *peers) Return(handles []uint64, bad bool) { p.peer.Return(handles, bad) }

// Memory implements stack.Peers. A region is mapped at its first use here, because most are read by
// workers only.
func (p *peers) Memory(region uint32) []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	r := p.regions[region]
	if r == nil {
		return nil
	}
	if !r.tried {
		r.tried = true
		var err error
		if r.mem, err = dax.AttachReadOnly(r.FD, r.OffsetBytes, r.SizeBytes,
			r.PageSize); err != nil {
			p.log.Warn("nothing is copied from a region of another sidecar",
				zap.Uint64("peer", r.Peer), zap.Uint32("region", r.ID), zap.Error(err))
		}
	}
	if r.mem == nil {
		return nil
	}
	return r.mem.Bytes()
}

// elsewhere returns how many pages of a run other sidecars hold, in whole chunks from the first
// page on. A store of the run leaves these out. Their holders count it as a use.
func (p *peers) elsewhere(run tiers.Run) int {
	ppc := run.Space.Geometry.PagesPerChunk
	held := make([]uint16, run.Chunks())
	p.peer.Contains(run, held)
	pages := 0
	for _, n := range held {
		if int(n) < min(ppc, run.Pages()-pages) {
			break
		}
		pages += int(n)
	}
	if pages == 0 {
		return 0
	}
	run.Hashes = run.Hashes[:pages*run.Space.Geometry.DigestBytes]
	ctx, cancel := context.WithTimeout(context.Background(), touchPatience)
	defer cancel()
	if got := p.peer.Touch(ctx, run); got < pages {
		return got / ppc * ppc
	}
	return pages
}

// group returns the id of the group of sidecars that share with this one, 0 if sharing is off.
func (p *peers) group() uint64 { return p.peer.Group() }

// declare sends other sidecars the fields that a worker declared of a space.
func (p *peers) declare(sp *tiers.Space, fields []wire.Field) { p.peer.DeclareSpace(sp, fields) }

// accidents lists our spaces that share nothing with another sidecar's for a reason that users
// rarely intend.
func (p *peers) accidents() []connector.Unshared {
	var out []connector.Unshared
	for _, a := range p.peer.Accidents() {
		out = append(out, connector.Unshared{Ours: a.Ours, Theirs: a.Theirs,
			Whose: fmt.Sprintf("what the sidecar of pid %d holds", a.PID), Connected: true,
			Causes: a.Causes})
	}
	return out
}

// mapPatience is how long workers may take to map a region that the arena has grown by. Then it is
// used anyway. No call waits for it.
const mapPatience = 30 * time.Second

// unmapPatience is how long a worker may take to unmap memory that is being removed. It first
// finishes the copies that it began before.
const unmapPatience = 30 * time.Second

// slabPatience is how long workers may take to map a slab before it is used anyway. Stores that
// find room nowhere else wait for that time. A test changes it.
var slabPatience = 5 * time.Second

// An announcer announces the regions of the arena to workers, to other sidecars, and to programs
// that are tiers.
type announcer struct {
	*connector.Server
	peers    *peers // nil: nothing is shared
	log      *zap.Logger
	programs []*elsewhere.Program       // that are tiers
	memory   func(region uint32) []byte // of the arena
}

// AddRegion makes a region part of the arena and lends it.
func (a *announcer) AddRegion(id uint32, r *dax.Region) error {
	if err := a.Server.AddRegion(id, r, mapPatience); err != nil {
		return err
	}
	region := connector.Region{ID: id, Kind: string(r.Kind()), FD: r.FD(), SizeBytes: r.Size(),
		PageSize: r.PageSize()}
	a.LendRegion(region)
	a.tellPrograms(region, r.Bytes())
	return nil
}

// AnnounceRegion has workers map a region before anything in it is granted. It waits for the
// workers, but not longer than slabPatience.
func (a *announcer) AnnounceRegion(r connector.Region, lend bool) {
	a.Server.AnnounceRegion(r)
	a.tellPrograms(r, a.memory(r.ID))
	if lend {
		a.LendRegion(r)
	}
	a.AwaitRegion(r.ID, slabPatience)
}

// tellPrograms has programs that are tiers map a region. It does not wait for them.
func (a *announcer) tellPrograms(r connector.Region, mem []byte) {
	for _, p := range a.programs {
		p.AddRegion(elsewhere.Region{ID: r.ID, Kind: r.Kind, FD: r.FD, OffsetBytes: r.OffsetBytes,
			SizeBytes: r.SizeBytes, PageSize: r.PageSize, Mem: mem})
	}
}

// LendRegion lends what is in a region to other sidecars.
func (a *announcer) LendRegion(r connector.Region) {
	if a.peers == nil {
		return
	}
	err := a.peers.peer.AddRegion(peer.Region{ID: r.ID, Kind: r.Kind, FD: r.FD,
		OffsetBytes: r.OffsetBytes, SizeBytes: r.SizeBytes, PageSize: r.PageSize})
	if err != nil {
		a.log.Warn("a region is not lent to other sidecars", zap.Uint32("region", r.ID),
			zap.Error(err))
	}
}

// RetractRegion has workers and other sidecars unmap a region without leases.
func (a *announcer) RetractRegion(id uint32) {
	var others sync.WaitGroup
	if a.peers != nil {
		others.Go(func() { a.peers.peer.RemoveRegion(id, unmapPatience) })
	}
	for _, p := range a.programs {
		others.Go(func() {
			if err := p.RemoveRegion(id, unmapPatience); err != nil {
				a.log.Warn("a program that is a tier keeps memory that is removed",
					zap.Uint32("region", id), zap.Error(err))
			}
		})
	}
	a.Server.RetractRegion(id, unmapPatience)
	others.Wait()
}

// Status implements admin.Peers. A nil p shares nothing.
func (p *peers) Status() admin.PeersStatus {
	if p == nil {
		return admin.PeersStatus{Status: peer.Status{Lenders: []peer.LenderStatus{},
			Borrowers: []peer.BorrowerStatus{}, Unusable: []peer.UnusableStatus{}}}
	}
	b := p.stack.PeerStats()
	return admin.PeersStatus{Enabled: true, Status: p.peer.Status(),
		Borrowing: admin.BorrowingStatus{
			Slots: b.Slots, Used: b.Used, Leased: b.Leased, Pages: b.Held, Lookups: b.Lookups,
			Chunks: b.Chunks, Joined: b.Joined, Failed: b.Failed, Short: b.Short, Late: b.Late,
			Void: b.Void, Retried: b.Retried, Copied: b.Copied, CopiedPages: b.CopiedPages,
			NotCopied: b.NotCopied, Returned: b.Returned, Bad: b.Bad,
		}}
}
