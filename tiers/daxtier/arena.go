package daxtier

import (
	"errors"
	"fmt"
	"runtime"

	"lookaside/tiers"
	"lookaside/tiers/daxtier/mapped"
	"lookaside/tiers/engine"
	"lookaside/tiers/slab"
)

// Region is the part of a device that others map for one slab: all of its slots, extended to where
// the device can be mapped.
type Region struct {
	ID          uint32
	Path        string // of the device
	Kind        string // dax.DeviceKind
	FD          int    // of the device, which keeps it
	OffsetBytes int64  // in the device: a multiple of PageSize
	SizeBytes   int64  // likewise
	// the device's alignment: a mapping's address must also be a multiple of it
	PageSize int64
	// this process's mapping of the same bytes; valid until Removed or Close returns
	Bytes []byte
}

// ArenaOptions says what to open as an arena. Six fields of Options have no effect: Policy,
// MaxSpaces and Seed, which Books sets, and LoadWorkers, MaxRegions and LookupWorkers. StoreWorkers
// is the number of threads that keep what is committed.
type ArenaOptions struct {
	Options
	// Books configures the arena's engine: see slab.ArenaOptions.
	Books engine.Config
	// Added is called before the first slot of a region can be granted; OpenArena calls it for
	// regions that hold chunks already. If it fails, the slab is retried later, or OpenArena fails.
	Added func(Region) error
	// Removed is called when nobody has or will get a lease in a region. Once it returns, the
	// region's bytes may disappear. It is not called for regions that exist at Close or when
	// OpenArena fails.
	Removed func(id uint32)
}

// Arena is a slab.Arena on devices.
type Arena struct {
	*slab.Arena
	devices
	added func(Region) error
}

// OpenArena opens the devices as an arena. A failed OpenArena leaves nothing open; what it made on
// the devices stays. It returns the errors of Open and of Added.
func OpenArena(o ArenaOptions) (_ *Arena, err error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	if o.Added == nil || o.Removed == nil {
		return nil, fmt.Errorf("%w: an arena without hooks", tiers.ErrInvalid)
	}
	a := &Arena{devices: devices{o: o.Options, fs: mapped.New(o.Log)}, added: o.Added}
	dirs, sizes, err := a.mountAll()
	if err != nil {
		return nil, errors.Join(err, a.fs.Close())
	}
	a.Arena, err = slab.OpenArena(slab.ArenaOptions{
		Options: slab.Options{
			FS: a.fs, Recycled: true, Dirs: dirs, DirBytes: sizes, SlabBytes: o.SlabBytes,
			Workers: min(o.StoreWorkers, runtime.GOMAXPROCS(0)), PieceBytes: pieceBytes,
			Direct: slab.DirectNever, RetryEvery: o.RetryEvery, WatchEvery: o.WatchEvery,
			Log: o.Log,
		},
		Books: o.Books, Added: a.announce, Removed: o.Removed,
	})
	if err != nil {
		return nil, errors.Join(err, a.fs.Close())
	}
	a.store = a.Arena
	return a, nil
}

// announce calls Added for a slab whose slots begin at byte at of a file.
func (a *Arena) announce(id uint32, file string, at, bytes int64) (skew int64, err error) {
	p, err := a.fs.Piece(file)
	if err != nil {
		return 0, err
	}
	// Partitions begin and end at multiples of the alignment, so the region stays inside ours.
	d, align := p.Device, p.Device.Align()
	from := (p.At + at) / align * align
	to := (p.At + at + bytes + align - 1) / align * align
	return p.At + at - from, a.added(Region{
		ID: id, Path: d.Path(), Kind: string(d.Kind()), FD: d.FD(), OffsetBytes: d.Offset() + from,
		SizeBytes: to - from, PageSize: align, Bytes: d.Bytes()[from:to:to],
	})
}

// Close ends the arena and its engine, and closes the devices: see slab.Arena.
func (a *Arena) Close() error { return errors.Join(a.Arena.Close(), a.fs.Close()) }
