// Package daxtier keeps chunks on DAX devices: as a tier (Pool), or as an arena whose chunks are
// used in place (Arena). It is the store of package slab over package mapped: each device is a
// directory of the store, and lies in this rank's partition of the device. Slabs, recovery,
// checksums, healing and eviction are those of package slab, and so are its promises.
//
// A load is one copy from the mapping into the arena's slot. A store is one copy in the other
// direction, past the caches. Both compute the pages' checksums on the way. There is no page cache,
// no system call and no wait but for memory.
//
// Workers map the slabs of an Arena and copy between them and their GPUs. Committed chunks are
// found again when the arena is opened. See slab.Arena.
package daxtier

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"go.uber.org/zap"

	"lookaside/dax"
	"lookaside/tiers"
	"lookaside/tiers/daxtier/mapped"
	"lookaside/tiers/slab"
	"lookaside/tiers/tenant"
	"lookaside/tiers/why"
)

// ErrDevice means that a device cannot be used as asked: it is missing, it is something else, or
// the partition does not fit.
var ErrDevice = dax.ErrDevice

// ErrForeign means that a file holds something that is not ours.
var ErrForeign = mapped.ErrForeign

// DeviceSpec is a device of a pool.
type DeviceSpec struct {
	Path string
	// SizeBytes is how much of the device to use, from the pool's offset on; 0 is all of it. With
	// several ranks it is the size of all their parts together.
	SizeBytes int64
}

// Options says what to open. A zero field takes the stated default.
type Options struct {
	Devices []DeviceSpec
	// HotPlug allows a pool without devices. Add, Remove and Resize work in any case.
	HotPlug bool
	// OffsetBytes is where the used part of each device begins.
	OffsetBytes int64
	// Ranks is the number of equal partitions that the used part is cut into, Rank the index of
	// this process's. Default: one partition.
	Rank, Ranks int
	// AllowFiles lets regular files stand in for devices. A missing file is made with the given
	// size.
	AllowFiles bool
	// SlabBytes, Policy, MaxSpaces, Seed, Tenants, Shares, Gone, RetryEvery, WatchEvery are as in
	// slab.Options.
	SlabBytes  int64
	Policy     string
	MaxSpaces  int
	Seed       uint64
	Tenants    *tenant.Registry
	Shares     tenant.Shares
	Gone       *why.Memory
	GoneTier   uint8
	RetryEvery time.Duration
	WatchEvery time.Duration
	// LoadWorkers is the number of threads that copy for restores. MaxRegions is the number of
	// regions (pieces of large chunks, runs of small neighbours) submitted at a time. Default 8
	// each; there are never more threads than processors. No setting of the sidecar: copies
	// wait for nothing but memory, so that more threads than processors are no faster.
	LoadWorkers, MaxRegions int
	// StoreWorkers is the number of threads that copy for stores. Default 4.
	StoreWorkers int
	// LookupWorkers bounds the concurrent lookups in the index; 0 means no bound. No setting of the
	// sidecar: a lookup waits for nothing.
	LookupWorkers int
	// SysFS is where the kernel shows devices. Default /sys.
	SysFS string
	// Log gets what an operator needs to know. Default: none.
	Log *zap.Logger
}

const (
	defaultLoadWorkers  = 8
	defaultStoreWorkers = 4
	// queue is how many pieces may wait. It holds a large batch whole, so that copying threads wake
	// nobody between two pieces. Waking a thread takes longer than one such copy, and may cost the
	// copying thread its processor for a tick.
	queue = 1024
	// pieceBytes is copied and checked in one pass: it stays in the core's cache while its
	// checksums are computed.
	pieceBytes = 1 << 20
)

func (o *Options) validate() error {
	if o.Log == nil {
		o.Log = zap.NewNop()
	}
	for _, v := range []struct {
		n *int
		d int
	}{{&o.LoadWorkers, defaultLoadWorkers}, {&o.MaxRegions, defaultLoadWorkers},
		{&o.StoreWorkers, defaultStoreWorkers}, {&o.Ranks, 1}} {
		if *v.n == 0 {
			*v.n = v.d
		}
	}
	switch {
	case len(o.Devices) == 0 && !o.HotPlug:
		return fmt.Errorf("%w: no device", tiers.ErrInvalid)
	case o.LoadWorkers < 1 || o.StoreWorkers < 1 || o.MaxRegions < 1 || o.LookupWorkers < 0:
		return fmt.Errorf("%w: %d load workers, %d store workers, %d regions, %d lookup workers",
			tiers.ErrInvalid, o.LoadWorkers, o.StoreWorkers, o.MaxRegions, o.LookupWorkers)
	case o.Ranks < 1 || o.Rank < 0 || o.Rank >= o.Ranks:
		return fmt.Errorf("%w: rank %d of %d", tiers.ErrInvalid, o.Rank, o.Ranks)
	}
	return nil
}

// Pool is a tiers.Tier, and names its victims. See the package comment.
type Pool struct {
	*slab.Disk
	devices
	lookups chan struct{} // nil: no bound
}

var _ tiers.Tier = (*Pool)(nil)

// Open opens the devices. A failed Open leaves nothing open; what it made on the devices stays. It
// returns the errors of dax.OpenDevice, mapped.FS.Mount and slab.Open.
func Open(o Options) (_ *Pool, err error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	p := &Pool{devices: devices{o: o, fs: mapped.New(o.Log)}}
	if o.LookupWorkers > 0 {
		p.lookups = make(chan struct{}, o.LookupWorkers)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.fs.Close())
		}
	}()
	dirs, sizes, err := p.mountAll()
	if err != nil {
		return nil, err
	}
	// Copies wait for memory only. More threads than processors would take turns, and each turn
	// begins with cold prefetch streams.
	workers := min(max(o.LoadWorkers, o.StoreWorkers), runtime.GOMAXPROCS(0))
	atMost := func(n int) int { // a bound, where there are more workers than n
		if n >= workers {
			n = 0
		}
		return n
	}
	p.Disk, err = slab.Open(slab.Options{
		FS: p.fs, Recycled: true, Dirs: dirs, DirBytes: sizes, SlabBytes: o.SlabBytes,
		Policy: o.Policy, Workers: workers,
		MaxLoads: atMost(min(o.LoadWorkers, o.MaxRegions)), MaxStores: atMost(o.StoreWorkers),
		Queue: queue, PieceBytes: pieceBytes, Direct: slab.DirectNever, MaxSpaces: o.MaxSpaces,
		Seed: o.Seed, RetryEvery: o.RetryEvery, WatchEvery: o.WatchEvery, Log: o.Log,
		Tenants: o.Tenants, Shares: o.Shares, Gone: o.Gone, GoneTier: o.GoneTier,
	})
	if err != nil {
		return nil, err
	}
	p.store = p.Disk
	return p, nil
}

// Contains implements tiers.Tier.
func (p *Pool) Contains(ctx context.Context, run tiers.Run, held []uint16) error {
	if p.lookups != nil {
		select {
		case p.lookups <- struct{}{}:
			defer func() { <-p.lookups }()
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return p.Disk.Contains(ctx, run, held)
}

// Stats implements tiers.Tier.
func (p *Pool) Stats() tiers.TierStats {
	st := p.Disk.Stats()
	st.Kind = "dax"
	return st
}

// Close implements tiers.Tier.
func (p *Pool) Close() error { return errors.Join(p.Disk.Close(), p.fs.Close()) }
