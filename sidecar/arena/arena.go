// Package arena manages the memory that workers map: host memory that grows, or DAX devices that
// come and go. It makes the engine for the slots in it, finds again what an earlier process has
// left, announces its regions to workers, and publishes how full it is.
package arena

import (
	"context"
	"errors"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

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
// goroutine may call the other methods between Begin and Close, and Generation, Offer and Status
// before Begin as well.
type Arena interface {
	// Generation returns the generation of this run: below 2^62, and above that of the run whose
	// memory may be found; the same in a takeover.
	Generation() uint64
	// Begin makes the engine of the slots with these settings. Close closes the engine. control
	// shows clients how full the arena is.
	Begin(control *dax.Control, books engine.Config) (*engine.Engine, error)
	// LimitBytes returns the largest size of the arena, as far as it is known. No chunk can be
	// larger.
	LimitBytes() int64
	// MemoryBytes returns how much memory that control groups count the arena may take.
	MemoryBytes() int64
	// Bytes returns the memory of a region, in its whole length. It is valid while the region has a
	// lease.
	Bytes(region uint32) []byte
	// Offer passes descriptors on that a worker gives back: they may be of memory that an earlier
	// process had. The arena owns them, and closes those that it does not want.
	Offer(fds []int)
	// Verify checks restored chunks, and reports the results to the engine; see stack.Config.
	Verify(ctx context.Context, list []engine.Verification)
	// Recheck compares a chunk with its checksums; see stack.Config.
	Recheck(v *engine.Verification) (known bool, err error)
	// Start finds or makes the first memory and announces it. An arena on DAX must be started
	// before the server accepts clients. Any other may wait for clients to give memory back, at
	// most until ctx is done, and must be started after that.
	Start(ctx context.Context, workers Workers) error
	// Reuse lets memory that was taken over from a living process be written to, as far as nobody
	// else may copy there. Call it once the engine has the leases of that process. Run does it for
	// the rest.
	Reuse(workers Workers)
	// Run does the background work until ctx is done.
	Run(ctx context.Context, workers Workers)
	// Flush waits until committed chunks would outlive the process, as far as the arena can ensure
	// it.
	Flush(ctx context.Context) error
	// Status describes the arena. stats are the figures of its engine.
	Status(stats *engine.Stats) Status
	// Handover returns the descriptors by which the next process takes the memory over
	// (Options.Inherited). The arena keeps ownership; they are valid until Close. Run has ended,
	// and all is flushed. The error says why the memory cannot be handed over.
	Handover() ([]int, error)
	// Leave is called when another process has taken the memory over, with all leases. Nothing that
	// is done here after that changes what that process has.
	Leave()
	// Close frees the memory, or leaves it to processes that hold it as well. Nothing in this
	// process may use it any more. Clients keep their own mappings.
	Close() error
}

// Workers is the set of workers that map the arena. Any goroutine may call the methods.
type Workers interface {
	// AddRegion has workers map a region of memory, and then adds it to the engine's arena.
	AddRegion(id uint32, r *dax.Region) error
	// AnnounceRegion has workers map a region before anything in it is granted. With lend it also
	// does what LendRegion does.
	AnnounceRegion(r connector.Region, lend bool)
	// LendRegion lends what is in an announced region to other sidecars from now on.
	LendRegion(r connector.Region)
	// RetractRegion has workers unmap a region without leases, and waits for them.
	RetractRegion(id uint32)
	// Wanted returns a channel that receives a value when the engine waits for room.
	Wanted() <-chan struct{}
}

// Options configures an arena.
type Options struct {
	settings.ArenaConfig
	// Directory is the path of the file by which the next process finds what is in memory. It is
	// made if it is missing. Claims is the owner of the runtime directory that the file is in.
	Directory string
	Claims    Claims
	// Inherited are descriptors of memory that an earlier process had, from the service manager or
	// from that process. The arena owns them, also if New fails.
	Inherited []int
	// Trusted: that process lives, hands its memory over, and copies nothing any more. So nothing
	// needs to be verified that it had verified, and Start fails if any of it is missing. Run
	// begins when the engine has the leases of that process.
	Trusted bool
	// Hold keeps memory while no process serves; nil: nobody does.
	Hold Hold
	// CheckMemory refuses an arena that takes so many bytes more, of this kind, if that would not
	// leave the sidecar its own memory.
	CheckMemory func(kind dax.Kind, bytes int64) error
	// ReserveBytes returns how much memory must stay free when the arena grows.
	ReserveBytes func() int64
	Log          *zap.Logger
}

// Claims knows which processes may still copy to or from the memory of an earlier process. Any
// goroutine may call its methods.
type Claims interface {
	// LockID returns device and inode of the file by which the runtime directory is owned.
	LockID() (dev, inode uint64)
	// Claims reports whether a process has a claim on another generation than except. With an error
	// it is not known.
	Claims(except uint64) (held bool, err error)
	// Claimants returns the ids of these processes, as far as they are known.
	Claimants(except uint64) []int
}

// Hold is a service manager that keeps descriptors of memory while no process serves.
type Hold interface {
	Store(fd int) error // keeps a copy of the descriptor
	Clear() error       // drops all that were stored, in this run or before
}

// State is what an arena is doing.
type State string

const (
	Waiting   State = "waiting for workers" // that may give memory back
	Restoring State = "restoring"           // what is in memory that was found
	Preparing State = "preparing"           // new memory
	Ready     State = "ready"
)

// Found is what an earlier process has left.
type Found struct {
	Regions int
	Bytes   int64  // of these regions
	Chunks  int    // in them
	Why     string // why nothing was found, or not all; "" if all was
}

// Reuse says whether memory that was found is not written to yet, because a process may still copy
// there for the process before.
type Reuse struct {
	Waiting bool
	PIDs    []int // of the processes that are waited for, as far as they are known
}

// Status describes an arena at one moment. Sizes are in bytes.
type Status struct {
	State          State
	Found          Found
	Reuse          Reuse
	Kept           int // chunks that would be found again if the process were killed now
	Waiting        int // committed chunks that would not be
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
}

// New decides what the arena is made of, and refuses sizes that the host cannot give. It takes no
// memory for pages yet and opens no device.
func New(o Options) (Arena, error) {
	if o.Kind == settings.KindDAX {
		closeAll(o.Inherited)
		if o.Trusted {
			return nil, errDAXHandover
		}
		return newDAX(o), nil
	}
	a, err := newMemory(o)
	if err != nil {
		return nil, err
	}
	return a, nil
}

// errDAXHandover is why an arena on DAX is not taken over.
var errDAXHandover = errors.New("an arena on DAX is not handed over from process to process: end the old sidecar and start the new one, which finds what is on the devices again")

// closeAll closes descriptors of memory, of which nothing was written through them.
func closeAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}
