// Package arena manages the memory that workers map: host memory that grows, or DAX devices that
// come and go. It makes the engine for the slots in it, announces its regions to workers, and
// publishes how full it is.
package arena

import (
	"context"
	"time"

	"go.uber.org/zap"

	"lookaside/connector"
	"lookaside/dax"
	"lookaside/sidecar/settings"
	"lookaside/tiers/daxtier"
	"lookaside/tiers/engine"
	"lookaside/tiers/slab"
)

// usageEvery is how often an arena publishes its fill when nothing else wakes it.
const usageEvery = 100 * time.Millisecond

// An Arena is the memory that workers map. Call Begin, Start, Run and Close in this order. Any
// goroutine may call the other methods between Begin and Close.
type Arena interface {
	// Begin makes the engine of the slots with these settings. Close closes the engine.
	Begin(books engine.Config) (*engine.Engine, error)
	// LimitBytes returns the largest size of the arena, as far as it is known. No chunk can be
	// larger.
	LimitBytes() int64
	// MemoryBytes returns how much memory that control groups count the arena may take.
	MemoryBytes() int64
	// Bytes returns the memory of a region, in its whole length. It is valid while the region has a
	// lease.
	Bytes(region uint32) []byte
	// Start announces the regions. Call it before the server accepts clients.
	Start(workers Workers) error
	// Run does the background work until ctx is done.
	Run(ctx context.Context, workers Workers)
	// Flush waits until committed chunks would outlive the process, as far as the arena can ensure
	// it.
	Flush(ctx context.Context) error
	// Status describes the arena. stats are the figures of its engine.
	Status(stats *engine.Stats) Status
	// Close frees the memory. Nothing in this process may use it any more. Clients keep their own
	// mappings.
	Close() error
}

// Workers is the set of workers that map the arena. Any goroutine may call the methods.
type Workers interface {
	// AddRegion has workers map a region of memory, and then adds it to the engine's arena.
	AddRegion(id uint32, r *dax.Region) error
	// AnnounceRegion has workers map a region before anything in it is granted.
	AnnounceRegion(r connector.Region)
	// RetractRegion has workers unmap a region without leases, and waits for them.
	RetractRegion(id uint32)
	// Wanted returns a channel that receives a value when the engine waits for room.
	Wanted() <-chan struct{}
}

// Options configures an arena.
type Options struct {
	settings.ArenaConfig
	Control *dax.Control // shows clients how full the arena is
	// CheckMemory refuses an arena of this kind that would not leave the sidecar its own memory.
	CheckMemory func(dax.Kind) error
	// ReserveBytes returns how much memory must stay free when the arena grows.
	ReserveBytes func() int64
	Log          *zap.Logger
}

// Status describes an arena at one moment. Sizes are in bytes.
type Status struct {
	Kind           dax.Kind
	Reason         string // why the arena is of this kind
	LimitBytes     int64
	CapacityBytes  int64
	UsedBytes      int64 // of occupied slots
	GrowthFailures uint64
	Regions        []Region
	DAX            *DAXStatus // nil: the arena is not on DAX
}

// Region is one region of an arena.
type Region struct {
	ID        uint32
	Kind      dax.Kind // on DAX: devdax, fsdax or file
	Device    string   // the device it is on; empty for memory
	SizeBytes int64
	PageSize  int64
}

// DAXStatus describes what only an arena on DAX has.
type DAXStatus struct {
	HotPlug bool
	Devices daxtier.Status
	Stats   slab.ArenaStats
	Found   int // chunks found at the start
}

// New decides what the arena is made of, and refuses sizes that the host cannot give. It takes no
// memory for pages yet and opens no device.
func New(o Options) (Arena, error) {
	if o.Kind == settings.KindDAX {
		return newDAX(o), nil
	}
	a, err := newMemory(o)
	if err != nil {
		return nil, err
	}
	return a, nil
}
