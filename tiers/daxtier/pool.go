// Package pool is the tier on DAX devices: the store of package disk, over package mapped. Each
// device is a directory of the store, which lies in this rank's partition of it; slabs, recovery,
// checksums, healing and eviction are the disk's, and so are its promises.
//
// A load is one copy from the mapping into the arena's slot and a store one back, past the caches,
// with the checksums of the pages. There is no page cache below, no system call in between, and
// nothing to wait for but memory.
//
// An Arena is on devices too, in the same form, but its chunks are used where they lie: workers map
// the slabs and copy between them and their GPUs, and what was committed is found again when it is
// opened. See slab.Arena.
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
)

// ErrDevice: a device cannot be used as it was asked to, whoever asks: it is not there, is
// something else, or the partition does not fit.
var ErrDevice = dax.ErrDevice

// ErrForeign: a file holds something that is not ours.
var ErrForeign = mapped.ErrForeign

// DeviceSpec is a device of a pool.
type DeviceSpec struct {
	Path string
	// SizeBytes of it to use, from the pool's offset on; 0 is all. With ranks it is what all of
	// them together use.
	SizeBytes int64
}

// Options says what to open. Zero fields take the stated default.
type Options struct {
	Devices []DeviceSpec
	// HotPlug: there may be no device yet. Add, Remove and Resize work in any case.
	HotPlug bool
	// OffsetBytes is where what is used of each device begins.
	OffsetBytes int64
	// Rank of Ranks: that is cut into so many equal partitions, of which this process has one.
	// Default: one.
	Rank, Ranks int
	// AllowFiles lets regular files stand in for devices. One that is not there is made, of the
	// size that was given.
	AllowFiles bool
	// SlabBytes, Policy, MaxSpaces, Seed, RetryEvery and WatchEvery are package disk's.
	SlabBytes  int64
	Policy     string
	MaxSpaces  int
	Seed       uint64
	RetryEvery time.Duration
	WatchEvery time.Duration
	// LoadWorkers is how many threads copy to restore, MaxRegions how many regions (large chunks in
	// pieces, small neighbours together) are on their way at a time. Default 8 of each; there are
	// no more threads than processors.
	LoadWorkers, MaxRegions int
	// StoreWorkers is how many threads copy to store. Default 4.
	StoreWorkers int
	// LookupWorkers bounds the lookups that walk the index at a time; 0: nothing does.
	LookupWorkers int
	// SysFS is where the kernel describes devices. Default /sys.
	SysFS string
	// Log gets what an operator wants to know. Default: nothing.
	Log *zap.Logger
}

const (
	defaultLoadWorkers  = 8
	defaultStoreWorkers = 4
	// queue is how many pieces may wait: all of a large batch, so that the copying threads are not
	// made to wake anybody between two pieces. Waking a thread takes longer than such a copy, and
	// may cost the one that runs its processor for a tick.
	queue = 1024
	// pieceBytes is what is copied and checked in one go: while its checksums are computed it is in
	// the core's cache.
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
	lookups chan struct{} // nil: not bounded
}

var _ tiers.Tier = (*Pool)(nil)

// Open opens the devices. A failed Open leaves nothing open; what it made on them stays. Errors are
// those of dax.OpenDevice, of mapped.FS.Mount and of slab.Open.
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
	// They wait for nothing but memory: more than one a core would only take turns, and each begins
	// with cold streams.
	workers := min(max(o.LoadWorkers, o.StoreWorkers), runtime.GOMAXPROCS(0))
	atMost := func(n int) int { // a bound where there are more workers than that
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
