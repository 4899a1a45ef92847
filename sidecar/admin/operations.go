// Package admin serves operators over HTTP: the status and metrics of a sidecar, operations on its
// chunks, and changes of its devices. It has the routes and the document that describes them, the
// server, and the client that commands use.
//
// [Operations] implements the operations. It works on the parts of a daemon and does not depend on
// the daemon.
package admin

import (
	"context"
	"errors"
	"time"

	"go.uber.org/zap"

	"lookaside/connector"
	"lookaside/internal/demand"
	"lookaside/ipc"
	"lookaside/ipc/hosts"
	"lookaside/sidecar/arena"
	"lookaside/sidecar/settings"
	"lookaside/tiers/engine"
	"lookaside/tiers/stack"
	"lookaside/tiers/tenant"
)

// Peers describes the sharing with other sidecars.
type Peers interface {
	Status() PeersStatus
}

// Events counts published events.
type Events interface {
	Stats() ipc.EventStats
	Gaps() uint64 // times that changes were lost and everything held was published again
}

// Parts holds the parts of a daemon that operators look at and control. All must be set, except
// those that may be nil.
type Parts struct {
	Settings   *settings.Config
	Version    string // of this release
	Commit     string // the commit that the program was built from
	Generation uint64
	Started    time.Time
	Background context.Context // ends when the daemon does
	ArenaReady <-chan struct{} // closed once the arena has its first memory

	Engine   *engine.Engine
	Demand   *demand.Demand // nil: nothing is watched
	Tenants  *tenant.Registry
	Stack    *stack.Stack
	Server   *connector.Server
	Lookups  *ipc.LookupSockets
	Arena    arena.Arena
	DAX      *arena.DAX // nil if the arena is not on DAX
	Adapters []Adapter  // tiers whose devices may be added and removed, nearest first
	Peers    Peers
	Hosts    *hosts.Hosts // nil: no session with another host
	Events   Events       // nil: nothing is published
	Log      *zap.Logger
}

// Operations implements what operators can do with one sidecar. Any goroutine may call its methods.
type Operations struct {
	Parts
	pins    pins
	rates   rates
	changes changes
	mapped  mapped

	recordings recordings
}

// New returns the operations on the given parts.
func New(p Parts) *Operations {
	o := &Operations{Parts: p}
	o.rates.note(p.Started, p.Server.Counters())
	return o
}

// Watch samples the counters for rates until ctx is done.
func (o *Operations) Watch(ctx context.Context) { o.rates.watch(ctx, o.Server.Counters) }

// Close waits for the changes of devices under way; the end of Background has stopped them. Later
// changes are refused.
func (o *Operations) Close() {
	o.changes.mu.Lock()
	o.changes.closed = true
	o.changes.mu.Unlock()
	o.changes.wg.Wait()
}

// arenaState returns "ok", or what clients wait for that are connected and find nothing yet.
func (o *Operations) arenaState() string {
	select {
	case <-o.ArenaReady:
		return "ok"
	default:
		return "ok: clients are welcome, and the arena is being prepared"
	}
}

// ready returns why the sidecar does not accept clients, or nil.
func (o *Operations) ready() error {
	if o.Server.Draining() {
		return errors.New("draining")
	}
	return nil
}
