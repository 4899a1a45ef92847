// Package sidecar assembles, runs and ends one daemon that keeps the KV cache of one rank's vLLM
// workers: its settings, its arena, its tiers, its sockets and its admin HTTP server.
package sidecar

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"lookaside/connector"
	"lookaside/dax"
	"lookaside/internal/demand"
	"lookaside/ipc"
	"lookaside/ipc/hosts"
	"lookaside/sidecar/admin"
	"lookaside/sidecar/arena"
	"lookaside/sidecar/settings"
	"lookaside/sidecar/systemd"
	"lookaside/tiers"
	"lookaside/tiers/daxtier"
	"lookaside/tiers/engine"
	"lookaside/tiers/stack"
	"lookaside/tiers/tenant"
	"lookaside/tiers/why"
)

// gcPercent is how far the Go heap may grow before a collection, unless GOGC is set. The heap is
// only a few MiB at first, because index, slots and arena are outside it. Go's default would
// collect all the time, which slows the slowest lookups. paceCollector lowers it as the heap fills.
const gcPercent = 800

// directoryName is the file in runtime.dir by which the next sidecar finds what is in the arena.
const directoryName = "directory"

// A Daemon is one running sidecar. Its methods may be called from any goroutine.
type Daemon struct {
	cfg        settings.Config
	log        *zap.Logger
	generation uint64
	start      time.Time
	done       chan error    // see Done
	restored   chan struct{} // closed once the arena has what it is to have from earlier runs

	listener *ipc.Listener
	control  *dax.Control
	tiers    []stack.TierConfig // open
	engine   *engine.Engine
	demand   *demand.Demand
	stack    *stack.Stack
	server   *connector.Server
	lookups  *ipc.LookupSockets
	shares   shares // set by openMemory
	arena    arena.Arena
	admin    *admin.Server
	origin   Origin
	events   *events      // nil: not published
	peers    *peers       // nil: nothing is shared
	hosts    *hosts.Hosts // nil: no session with another host
	onDAX    *arena.DAX   // nil: the arena is not on DAX

	operations *admin.Operations // what operators may do
	tenants    *tenant.Registry
	gone       *why.Memory

	// Handing over to another process: see handover.go.
	handovers      *ipc.HandoverListener
	handoversEnded chan struct{} // closed when handovers is no longer used; nil: it never was
	handing        chan struct{} // cap 1: has a token during a handover, and during Shutdown
	leaving        atomic.Bool   // a handover has no way back
	given          atomic.Bool   // clients and sockets are another process's

	handovering context.Context // of a handover that can still be given up
	endHandover context.CancelFunc

	background context.Context    // ends when the daemon does
	stop       context.CancelFunc // ends the background goroutines
	wg         sync.WaitGroup     // of the background goroutines
	stopOnce   sync.Once
	stopErr    error
}

// Origin is what a sidecar gets from the processes before it and around it. The zero Origin is a
// sidecar that somebody started by hand.
type Origin struct {
	// Manager is told when the sidecar serves and when it ends.
	Manager systemd.Manager
	// Inherited are descriptors of memory that the manager has kept. Start owns them.
	Inherited []int
	// Takeover is what the sidecar before has handed over. Start owns it. Nil: nothing.
	Takeover *Takeover
}

// Start starts a sidecar: when it returns, clients can connect and the arena has its first memory.
// Clients can connect before it returns: memory may take long. ctx bounds the start only; a start
// that fails leaves nothing behind. The logger must outlive the Daemon.
func Start(ctx context.Context, cfg settings.Config, log *zap.Logger, origin Origin) (_ *Daemon,
	err error) {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	background, stop := context.WithCancel(context.Background())
	d := &Daemon{cfg: cfg, log: log, start: time.Now(),
		done: make(chan error, 1), restored: make(chan struct{}), background: background,
		stop: stop, origin: origin, handing: make(chan struct{}, 1)}
	d.handovering, d.endHandover = context.WithCancel(background)
	take := origin.Takeover
	if take != nil {
		d.generation = take.memory.Generation
		defer take.Close()
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.close())
		}
	}()

	if err = d.openMemory(); err != nil {
		return nil, err
	}
	bell, metrics := stack.NewBell(), admin.NewMetrics(cfg.Tiers)
	if err = d.openEngine(bell); err != nil {
		return nil, err
	}
	if err = d.openServer(bell, metrics); err != nil {
		return nil, err
	}
	announce := &announcer{Server: d.server, peers: d.peers, log: log.Named("peers"),
		programs: programsOf(d.tiers), memory: d.arena.Bytes}
	early := d.onDAX != nil || take != nil
	if early {
		// What is on the devices, or was handed over, may be granted at once, so it is announced
		// before clients come.
		if err = d.arena.Start(ctx, announce); err != nil {
			return nil, err
		}
	}
	if err = d.openEvents(); err != nil {
		return nil, err
	}
	if take == nil {
		err = d.openLookups()
	} else {
		err = d.finishTakeover(ctx, take, announce)
	}
	if err != nil {
		return nil, err
	}
	if err = d.openHosts(); err != nil {
		return nil, err
	}
	if err = d.openAdmin(metrics); err != nil {
		return nil, err
	}
	if take != nil {
		take.pins(d.operations)
	}
	d.serve()
	if !early {
		// Memory takes long to make. Clients that connect meanwhile find and store nothing.
		if err = d.arena.Start(ctx, announce); err != nil {
			return nil, err
		}
		d.server.RegionsReady()
	}
	close(d.restored)
	log.Info("ready", zap.Duration("after", time.Since(d.start).Round(time.Millisecond)))
	if err = ctx.Err(); err != nil {
		return nil, err
	}
	d.wg.Go(func() { d.arena.Run(d.background, announce) })
	// Last: what is handed over must be complete.
	if d.handovers, err = d.listener.ListenHandover(); err != nil {
		return nil, err
	}
	d.handoversEnded = make(chan struct{})
	go d.serveHandovers()
	return d, nil
}

// serve accepts clients, and starts the background goroutines, which end with d.background.
func (d *Daemon) serve() {
	ctx := d.background
	d.wg.Go(func() { d.demand.Run(ctx) })
	d.wg.Go(func() { paceCollector(ctx) })
	d.wg.Go(func() { d.operations.Watch(ctx) })
	d.wg.Go(func() { checkTiers(ctx, d.tiers, d.log.Named("tiers")) })
	d.wg.Go(func() {
		if err := d.server.Serve(ctx, d.listener); err != nil {
			d.finish(err)
		}
	})
	if d.cfg.Lifecycle.IdleExit > 0 {
		d.wg.Go(func() { d.watchIdle(ctx) })
	}
	d.log.Info("serving", zap.String("version", Version), zap.String("commit", Revision()),
		zap.String("endpoint", d.listener.Dir()), zap.String("admin", d.adminURL()),
		zap.Int("pid", os.Getpid()), zap.String("generation", fmt.Sprintf("%016x", d.generation)))
	if err := d.origin.Manager.Ready(); err != nil {
		d.log.Warn("the service manager does not learn that this sidecar serves", zap.Error(err))
	}
}

// listenOptions returns the options of the session socket.
func listenOptions(cfg *settings.Config, log *zap.Logger) ipc.Options {
	eventFDs := 0
	if cfg.Events.Endpoint != "" {
		eventFDs = ipc.EventFDs
	}
	hostFDs := 0
	if cfg.Hosts.Enabled() {
		hostFDs = cfg.Hosts.Connections * hosts.FDs
	}
	return ipc.Options{MaxSessions: cfg.Sessions.Limit, OtherFDs: eventFDs + hostFDs, Log: log}
}

// openMemory takes the endpoint and decides what the arena is made of. It also decides how much
// memory the sidecar's own parts may take.
func (d *Daemon) openMemory() (err error) {
	cfg := &d.cfg
	// The lock comes first: its holder owns the sockets and the arena's files.
	opt := listenOptions(cfg, d.log.Named("ipc"))
	if d.origin.Takeover == nil {
		d.listener, err = ipc.Listen(cfg.Runtime.Dir, opt)
	} else {
		d.listener, err = d.origin.Takeover.listen(cfg.Runtime.Dir, opt)
	}
	if err != nil {
		return err
	}
	inherited, trusted := d.origin.Inherited, false
	if take := d.origin.Takeover; take != nil {
		regions, err := take.regions()
		if err != nil {
			return err
		}
		inherited, trusted = append(inherited, regions...), true
	}
	if d.arena, err = arena.New(arena.Options{ArenaConfig: cfg.Arena,
		Directory: filepath.Join(d.listener.Dir(), directoryName), Claims: d.listener,
		CheckMemory: func(kind dax.Kind, bytes int64) error {
			return checkMemory(cfg, kind, bytes)
		},
		ReserveBytes: func() int64 { return reserve(cfg) }, Log: d.log.Named("arena"),
		Inherited: inherited, Trusted: trusted, Hold: d.origin.Manager,
	}); err != nil {
		return err
	}
	d.generation = d.arena.Generation()
	if d.control, err = dax.NewControl(d.generation); err != nil {
		return fmt.Errorf("control region: %w", err)
	}
	d.shares, err = shareMemory(cfg, d.arena.MemoryBytes(), d.log)
	return err
}

// openEngine opens the tiers and makes the engine of the arena's slots.
func (d *Daemon) openEngine(bell *stack.Bell) (err error) {
	cfg := &d.cfg
	if d.tenants, err = tenant.New(cfg.Tenants.Registry()); err != nil {
		return fmt.Errorf("tenants: %w", err)
	}
	if d.gone, err = why.NewMemory(cfg.Lookup.Remember); err != nil {
		return fmt.Errorf("lookup.remember: %w", err)
	}
	if d.tiers, err = openTiers(d.cfg, d.tenants, d.gone,
		func() (int, error) { return d.listener.Claim(d.generation) }, d.log); err != nil {
		return err
	}
	d.peers = newPeers(cfg, d.log.Named("peers"))
	borrowers, foreign := 0, 0
	if d.peers != nil {
		borrowers, foreign = maxBorrowers*cfg.Spaces.Limit, borrowedSlots
	}
	d.engine, err = d.arena.Begin(d.control, engine.Config{
		Seed:          connector.RandomID(),
		LeaseDeadline: cfg.Lookup.Lease,
		MaxSpaces:     cfg.Spaces.Limit,
		// includes sessions that are leaving, and LMCache
		MaxOwners:    2*cfg.Sessions.Limit + 1 + borrowers,
		MaxPages:     cfg.Lookup.MaxPages,
		OwnerShare:   cfg.Sessions.Share,
		JointShare:   cfg.Sessions.JointShare,
		Policy:       cfg.Arena.Eviction,
		Tiers:        stack.Admissions(d.tiers),
		PartialDelay: cfg.Cascade.PartialDelay,
		Wake:         bell.Ring,
		JournalBytes: cfg.Events.Journal,
		ForeignSlots: foreign,
		CopyAfter:    cfg.Peers.CopyAfter,
		HintShare:    cfg.Hints.Share,
		HintLimit:    cfg.Hints.RetainLimit,
		Tenants:      d.tenants,
		Shares:       cfg.Tenants.ArenaShares(),
		Gone:         d.gone,
	})
	d.onDAX, _ = d.arena.(*arena.DAX)
	return err
}

// openServer makes the stack and the server, and looks for other sidecars. Clients cannot connect
// yet.
func (d *Daemon) openServer(bell *stack.Bell, metrics *admin.Metrics) error {
	cfg := &d.cfg
	mode, err := stack.ParseMode(cfg.Lookup.Promote)
	if err != nil {
		return err
	}
	sc := stack.Config{
		Engine:         d.engine,
		Bell:           bell,
		Arena:          d.arena.Bytes,
		Log:            d.log.Named("tiers"),
		Promote:        mode,
		LookupDeadline: cfg.Lookup.Deadline,
		Observe:        metrics.ObserveTier,
		Tenants:        d.tenants,
		Tiers:          d.tiers,
		Linger:         cfg.Peers.Linger,
		Verify:         d.arena.Verify,
		Recheck:        d.arena.Recheck,
		PatrolBytes:    cfg.Arena.CheckRate,
		PatrolEvery:    cfg.Arena.CheckEvery,
		Restored:       d.awaitRestored,
	}
	d.demand = demand.New(demand.Config{MemoryBytes: cfg.Demand.Memory, Policy: cfg.Arena.Eviction,
		Seed: connector.RandomID(), ArenaBytes: d.arena.LimitBytes})
	cc := connector.Config{
		Demand:        d.demand,
		Log:           d.log.Named("connector"),
		Engine:        d.engine,
		Generation:    d.generation,
		Control:       d.control,
		MaxSpaces:     cfg.Spaces.Limit,
		MaxPages:      cfg.Lookup.MaxPages,
		Lease:         cfg.Lookup.Lease,
		ArenaLimit:    d.arena.LimitBytes(),
		LMCacheEngine: cfg.LMCache.EngineID,
		ExtraFields:   lossyFields(cfg.Tiers),
		ObserveLookup: metrics.ObserveLookup,
		Tenants:       d.tenants,
		OnHeld:        d.arena.Offer,
		Preparing:     d.onDAX == nil && d.origin.Takeover == nil,
	}
	if d.onDAX != nil {
		pool := d.onDAX.Pool()
		sc.Forget, cc.MakeRoom = pool.Forget, pool.MakeRoom
	}
	if d.peers != nil {
		sc.Peers, cc.OnSpace, cc.UnsharedPeers = d.peers, d.peers.declare, d.peers.accidents
		if cfg.Peers.SkipStores {
			cc.Elsewhere = d.peers.elsewhere
		}
		if cfg.Peers.SkipStores && len(cfg.Tiers) == 0 {
			// With tiers each sidecar must store everything, because none loads from its tiers for
			// another.
			cc.Peers = d.peers.group
		}
	}
	if d.stack, err = stack.New(sc); err != nil {
		return err
	}
	cc.Stack = d.stack
	d.server = connector.New(cc)
	if d.peers == nil {
		return nil
	}
	if take := d.origin.Takeover; take != nil && take.memory.PeerRegion != 0 {
		d.peers.next = take.memory.PeerRegion
	}
	return d.peers.start(cfg, d.shares.hints, d.generation, d.engine, d.stack, d.server)
}

// openLookups opens the lookup sockets.
func (d *Daemon) openLookups() (err error) {
	cfg := &d.cfg
	if d.lookups, err = ipc.NewLookupSockets(cfg.Runtime.Dir, ipc.LookupOptions{
		Limits:           d.server.Limits(),
		HeapBytes:        int(d.shares.lookups),
		LMCacheWorker:    cfg.LMCache.WorkerEndpoint,
		LMCacheScheduler: cfg.LMCache.SchedulerEndpoint,
		Log:              d.log.Named("ipc"),
	}, d.server); err != nil {
		return err
	}
	d.server.SetLookupSockets(d.lookups)
	return nil
}

// openEvents opens the sockets of subscribers.
func (d *Daemon) openEvents() (err error) {
	if d.cfg.Events.Endpoint == "" {
		return nil
	}
	if d.events, err = newEvents(d.cfg.Events, d.engine, d.server.SpaceFields,
		d.log.Named("events")); err != nil {
		return err
	}
	ev := d.events
	d.wg.Go(func() { ev.run(d.background) })
	return nil
}

// openAdmin opens the sockets of operators.
func (d *Daemon) openAdmin(metrics *admin.Metrics) (err error) {
	d.operations = admin.New(d.parts())
	d.admin, err = admin.Start(d.operations, metrics, d.listener.Dir(), d.log.Named("admin"))
	return err
}

// awaitRestored waits until the arena has what it is to have from earlier runs.
func (d *Daemon) awaitRestored(ctx context.Context) error {
	select {
	case <-d.restored:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-d.background.Done():
		return tiers.ErrClosed
	}
}

// Done delivers one value if the sidecar ends by itself: nil after lifecycle.idle_exit without a
// session, else the failure. The caller must still call Shutdown.
func (d *Daemon) Done() <-chan error { return d.done }

// adminURL returns where the admin server is, as lookaside's --admin takes it.
func (d *Daemon) adminURL() string {
	if addr := d.admin.Addr(); addr != "" {
		return "http://" + addr
	}
	return "unix://" + filepath.Join(d.listener.Dir(), "admin.sock")
}

// AdminAddr returns the host:port of the admin server; "" if it has none.
func (d *Daemon) AdminAddr() string { return d.admin.Addr() }

func (d *Daemon) finish(err error) {
	select {
	case d.done <- err:
	default:
	}
}

// Shutdown refuses new sessions and waits for stores and loads under way, at most lifecycle.drain.
// Then it waits until the queues of the tiers are written, at most lifecycle.flush. Then it closes
// everything. ctx bounds both waits. A second call returns the first call's error.
func (d *Daemon) Shutdown(ctx context.Context) error {
	d.stopOnce.Do(func() {
		// A handover is given up, or ends.
		d.endHandover()
		d.handing <- struct{}{}
		defer func() { <-d.handing }()
		if d.leaving.Load() { // nothing is under way here
			d.stopErr = d.close()
			d.log.Info("closed")
			return
		}
		d.control.SetState(dax.StateDraining)
		if err := d.origin.Manager.Stopping(); err != nil {
			d.log.Warn("the service manager does not learn that this sidecar ends", zap.Error(err))
		}
		parent := ctx
		ctx, cancel := context.WithTimeout(ctx, d.cfg.Lifecycle.Drain)
		defer cancel()
		if err := d.server.Drain(ctx); err != nil {
			// They are lost, as after a kill: a cache may forget.
			d.log.Warn("drained for as long as lifecycle.drain allows", zap.Error(err))
		}
		flush, cancelFlush := context.WithTimeout(parent, d.cfg.Lifecycle.Flush)
		defer cancelFlush()
		if err := d.stack.Flush(flush); err != nil {
			d.log.Warn("wrote to the tiers for as long as lifecycle.flush allows; the rest is forgotten", zap.Error(err))
		}
		if err := d.arena.Flush(flush); err != nil {
			d.log.Warn("kept what is in the arena for as long as lifecycle.flush allows; what was committed last is forgotten", zap.Error(err))
		}
		d.stopErr = d.close()
		d.log.Info("closed")
	})
	return d.stopErr
}

// close ends everything that was started, in the opposite order.
func (d *Daemon) close() error {
	var errs []error
	given := d.given.Load()
	if d.control != nil && !given {
		d.control.SetState(dax.StateClosed)
	}
	if d.handovers != nil {
		errs = append(errs, d.handovers.Close())
	}
	d.stop()
	if d.handoversEnded != nil {
		<-d.handoversEnded
	}
	d.wg.Wait()
	errs = append(errs, d.closeHosts())
	if d.server != nil {
		d.server.Close()
	}
	if d.admin != nil {
		errs = append(errs, d.admin.Close())
	}
	if d.operations != nil {
		d.operations.Close()
	}
	// The stack goes before the sockets that it replies on and the memory that its tiers use.
	if d.stack != nil {
		d.stack.Close()
	}
	errs = append(errs, d.peers.close(), closeTiers(d.tiers))
	if d.lookups != nil {
		errs = append(errs, d.lookups.Close())
	}
	if d.events != nil {
		errs = append(errs, d.events.close())
	}
	if d.arena != nil {
		errs = append(errs, d.arena.Close())
	}
	errs = append(errs, d.gone.Close())
	if given {
		// Clients and their socket are the other process's.
		return errors.Join(append(errs, d.control.Leave(), d.listener.Leave())...)
	}
	if d.control != nil {
		errs = append(errs, d.control.Close())
	}
	if d.listener != nil {
		errs = append(errs, d.listener.Close())
	}
	return errors.Join(errs...)
}

// Status describes the sidecar.
func (d *Daemon) Status() admin.Status { return d.operations.Status() }

// parts returns the parts that operators look at and control.
func (d *Daemon) parts() admin.Parts {
	p := admin.Parts{
		Settings: &d.cfg, Version: Version, Commit: Revision(), Generation: d.generation,
		Started: d.start, Background: d.background, ArenaReady: d.restored,
		Engine: d.engine, Tenants: d.tenants, Stack: d.stack, Server: d.server,
		Lookups: d.lookups, Arena: d.arena, DAX: d.onDAX, Demand: d.demand,
		Peers: d.peers, Hosts: d.hosts,
		Log: d.log,
	}
	for i, t := range d.tiers {
		if pool, ok := t.Tier.(*daxtier.Pool); ok {
			c := &d.cfg.Tiers[i].DAX
			p.Adapters = append(p.Adapters, admin.Adapter{Tier: t.Name, HotPlug: c.HotPlug,
				Ranks: c.Ranks, DevicePool: pool})
		}
	}
	if d.events != nil {
		p.Events = d.events
	}
	return p
}

// watchIdle ends the sidecar after lifecycle.idle_exit without a session.
func (d *Daemon) watchIdle(ctx context.Context) {
	limit := d.cfg.Lifecycle.IdleExit
	tick := time.NewTicker(max(limit/10, 10*time.Millisecond))
	defer tick.Stop()
	last := time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if d.server.Sessions() > 0 {
			last = time.Now()
		} else if time.Since(last) >= limit {
			d.log.Info("no session for lifecycle.idle_exit", zap.Duration("idle_exit", limit))
			d.finish(nil)
			return
		}
	}
}
