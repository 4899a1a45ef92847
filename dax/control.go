//go:build linux

package dax

import (
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// State is the state of a sidecar in its control region.
type State uint32

const (
	// StateServing means that new sessions are accepted.
	StateServing State = 1
	// StateDraining means that work under way may finish and no new work starts.
	StateDraining State = 2
	// StateClosed means that the sidecar is gone.
	StateClosed State = 3
)

// The control region has ControlSize bytes, little-endian, and zeros up to the end of its page.
// Every field is naturally aligned and written with one store, so a reader needs no lock. Fields
// may be from different moments.
const (
	// ControlSize in bytes.
	ControlSize = 4096
	// ControlMagic is the first eight bytes.
	ControlMagic = "LOOKASID"
	// ControlLayout is the version of this layout.
	ControlLayout = 1

	controlMagicAt      = 0  // 8 bytes
	controlLayoutAt     = 8  // u32
	controlStateAt      = 12 // u32
	controlGenerationAt = 16 // u64
	controlRegionsAt    = 24 // u64
	controlCapacityAt   = 32 // u64, bytes
	controlUsedAt       = 40 // u64, bytes
)

// Control is a region that clients can poll without a message. Only this process can write it: its
// memfd is sealed with F_SEAL_FUTURE_WRITE after our own mapping was made, so any other mapping is
// read-only, also through /proc/PID/fd. The seal also refuses write(2) and fallocate(2).
//
// Any goroutine may call its methods. Setters after Close do nothing.
type Control struct {
	mu  sync.Mutex // guards the other fields
	mem []byte     // nil once closed
	fd  int
}

// NewControl makes the control region of the sidecar run named generation, in
// state StateServing with all numbers zero.
func NewControl(generation uint64) (*Control, error) {
	size, err := roundUp(ControlSize, int64(os.Getpagesize()))
	if err != nil {
		return nil, err // not reached
	}
	fd, err := newMemfd("lookaside-control", size, false)
	if err != nil {
		return nil, err
	}
	mem, err := mapAligned(fd, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	c := &Control{mem: mem, fd: fd}
	copy(mem[controlMagicAt:], ControlMagic)
	c.store32(controlLayoutAt, ControlLayout)
	c.store64(controlGenerationAt, generation)
	c.store32(controlStateAt, uint32(StateServing))
	// F_SEAL_FUTURE_WRITE (Linux 5.1) leaves this mapping writable.
	err = addSeals(fd, unix.F_SEAL_FUTURE_WRITE|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|
		unix.F_SEAL_SEAL)
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

// SetState publishes the sidecar's state.
func (c *Control) SetState(s State) { c.store32(controlStateAt, uint32(s)) }

// SetRegions publishes the number of data regions.
func (c *Control) SetRegions(n uint64) { c.store64(controlRegionsAt, n) }

// SetUsage publishes the arena's capacity and its used part, in bytes.
func (c *Control) SetUsage(capacityBytes, usedBytes uint64) {
	c.store64(controlCapacityAt, capacityBytes)
	c.store64(controlUsedAt, usedBytes)
}

// FD returns the descriptor to pass to clients. The Control keeps ownership.
func (c *Control) FD() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.fd
}

// Close publishes StateClosed to all processes that still map the region, then unmaps and closes
// it. It is idempotent.
func (c *Control) Close() error {
	c.SetState(StateClosed)
	return c.Leave()
}

// Leave is Close without a word to clients: another process serves them, and gives them its own
// region.
func (c *Control) Leave() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mem == nil {
		return nil
	}
	err := unmap(c.mem)
	c.mem = nil
	err = errors.Join(err, unix.Close(c.fd))
	c.fd = -1
	return err
}

func (c *Control) store32(at int, v uint32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mem != nil {
		atomic.StoreUint32((*uint32)(unsafe.Pointer(&c.mem[at])), v)
	}
}

func (c *Control) store64(at int, v uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mem != nil {
		atomic.StoreUint64((*uint64)(unsafe.Pointer(&c.mem[at])), v)
	}
}
