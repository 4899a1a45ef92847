// Package admin is what an operator may ask of a sidecar over HTTP: its status, its metrics, what
// it is to keep where, and which devices it uses. It has the routes and the document that describes
// them, the server, and the client that commands are made of.
//
// [Operations] does what is asked. It works on the parts of a daemon and knows no daemon.
package admin

import (
	"context"
	"errors"
	"time"

	"go.uber.org/zap"

	"lookaside/connector"
	"lookaside/ipc"
	"lookaside/sidecar/arena"
	"lookaside/sidecar/settings"
	"lookaside/tiers/engine"
	"lookaside/tiers/stack"
)

// Peers describes what is shared with other sidecars.
type Peers interface {
	Status() PeersStatus
}

// Events counts what is published.
type Events interface {
	Stats() ipc.EventStats
	Gaps() uint64 // times that changes were lost, and all that is held was published anew
}

// Parts are the parts of a daemon that operators look at and control. All but those that may be nil
// must be set.
type Parts struct {
	Settings   *settings.Config
	Version    string // this release's
	Commit     string // that the program was built from
	Generation uint64
	Started    time.Time
	Background context.Context // ends when the daemon does

	Engine   *engine.Engine
	Stack    *stack.Stack
	Server   *connector.Server
	Lookups  *ipc.LookupSockets
	Arena    arena.Arena
	DAX      *arena.DAX // the arena, if it is on DAX; else nil
	Adapters []Adapter  // tiers whose devices may come and go, nearest first
	Peers    Peers
	Events   Events // nil: nothing is published
	Log      *zap.Logger
}

// Operations is what operators may ask of one sidecar. Its methods may be called from any
// goroutine.
type Operations struct {
	Parts
	pins    pins
	rates   rates
	changes changes
}

// New returns the operations on these parts.
func New(p Parts) *Operations {
	o := &Operations{Parts: p}
	o.rates.note(p.Started, p.Server.Counters())
	return o
}

// Watch notes what rates are made of, until ctx is done.
func (o *Operations) Watch(ctx context.Context) { o.rates.watch(ctx, o.Server.Counters) }

// Close waits for the changes of devices under way, which the end of Background has stopped. Later
// ones are refused.
func (o *Operations) Close() {
	o.changes.mu.Lock()
	o.changes.closed = true
	o.changes.mu.Unlock()
	o.changes.wg.Wait()
}

// ready returns why clients are not welcome, or nil.
func (o *Operations) ready() error {
	if o.Server.Draining() {
		return errors.New("draining")
	}
	return nil
}
