// Package arena is the memory that workers map: memory of the host that grows, or DAX devices that
// come and go. It makes the engine of the slots in it, tells workers of its regions, and publishes
// how full it is.
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

// An Arena is the memory that workers map. Begin, Start, Run and Close are called in this order.
// The other methods may be called from any goroutine between Begin and Close.
type Arena interface {
	// Begin makes the engine of the slots, with these books. Close closes the engine.
	Begin(books engine.Config) (*engine.Engine, error)
	// LimitBytes returns the most that the arena may come to, as far as that is known. No chunk can
	// be larger.
	LimitBytes() int64
	// MemoryBytes returns how much of the memory that control groups count the arena may take.
	MemoryBytes() int64
	// Bytes returns the memory of a region, in its whole length. It is valid while somebody has a
	// lease in the region.
	Bytes(region uint32) []byte
	// Start announces the regions. The server serves nobody yet.
	Start(workers Workers) error
	// Run does what is to be done in the background, until ctx is done.
	Run(ctx context.Context, workers Workers)
	// Flush waits until what was committed outlives the process, as far as it can.
	Flush(ctx context.Context) error
	// Status describes the arena, whose engine has these figures.
	Status(stats *engine.Stats) Status
	// Close frees the memory, which nobody in this process may use any more. Clients keep their own
	// mappings.
	Close() error
}

// Workers are those who map the arena. The methods may be called from any goroutine.
type Workers interface {
	// AddRegion has workers map a region of memory, and then makes it part of the engine's arena.
	AddRegion(id uint32, r *dax.Region) error
	// AnnounceRegion has workers map a region before anything in it is granted.
	AnnounceRegion(r connector.Region)
	// RetractRegion has workers unmap a region in which nobody has a lease, and waits for them.
	RetractRegion(id uint32)
	// Wanted delivers when the engine waits for room.
	Wanted() <-chan struct{}
}

// Options are what an arena is made of.
type Options struct {
	settings.ArenaConfig
	Control *dax.Control // where clients read how full the arena is
	// CheckMemory refuses an arena of this kind that would not leave the sidecar its own memory.
	CheckMemory func(dax.Kind) error
	// ReserveBytes returns how much memory is to stay free when the arena grows.
	ReserveBytes func() int64
	Log          *zap.Logger
}

// Status is an arena at one moment. Sizes are in bytes.
type Status struct {
	Kind           dax.Kind
	Reason         string // why it is of this kind
	LimitBytes     int64
	CapacityBytes  int64
	UsedBytes      int64 // of occupied slots
	GrowthFailures uint64
	Regions        []Region
	DAX            *DAXStatus // nil: it is not on DAX
}

// Region is one region of an arena.
type Region struct {
	ID        uint32
	Kind      dax.Kind // on DAX: devdax, fsdax or file
	Device    string   // that it lies on; empty for memory
	SizeBytes int64
	PageSize  int64
}

// DAXStatus is what an arena on DAX knows beside what all arenas know.
type DAXStatus struct {
	HotPlug bool
	Devices daxtier.Status
	Stats   slab.ArenaStats
	Found   int // chunks, at the start
}

// New decides what the arena is made of, and refuses what the host cannot give. It takes no memory
// for pages yet, and opens no device.
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
