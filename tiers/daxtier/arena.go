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

// Region is what others map of a slab: all of its slots, and what of the device lies around them to
// where it can be mapped.
type Region struct {
	ID          uint32
	Path        string // of the device
	Kind        string // dax.DeviceKind
	FD          int    // of the device; it stays the device's
	OffsetBytes int64  // in the device: a multiple of PageSize
	SizeBytes   int64  // likewise
	// the device's alignment: an address that it is mapped at must be a multiple of it too
	PageSize int64
	// this process's mapping of the same bytes; valid until Removed has returned, or Close
	Bytes []byte
}

// ArenaOptions says what to open as an arena. Of Options it uses neither Policy, MaxSpaces and
// Seed, which Books has, nor LoadWorkers, MaxRegions and LookupWorkers; StoreWorkers is how many
// threads keep what is committed.
type ArenaOptions struct {
	Options
	// Books is the engine's; what an arena needs is set in it: see slab.ArenaOptions.
	Books engine.Config
	// Added is told of a region before a slot of it can be granted, during OpenArena of those that
	// have something already. After an error the slab is tried again later, and OpenArena fails.
	Added func(Region) error
	// Removed is told that nobody has a lease in a region, or will. When it returns, its bytes may
	// go. It is not called for those that are there at Close, or when OpenArena fails.
	Removed func(id uint32)
}

// Arena is a slab.Arena on devices.
type Arena struct {
	*slab.Arena
	devices
	added func(Region) error
}

// OpenArena opens the devices as an arena. A failed OpenArena leaves nothing open; what it made on
// them stays. Errors are those of Open, and of Added.
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

// announce tells of a slab whose slots lie from byte at of a file on.
func (a *Arena) announce(id uint32, file string, at, bytes int64) (skew int64, err error) {
	p, err := a.fs.Piece(file)
	if err != nil {
		return 0, err
	}
	// Partitions begin and end at multiples of the alignment, so this does not leave ours.
	d, align := p.Device, p.Device.Align()
	from := (p.At + at) / align * align
	to := (p.At + at + bytes + align - 1) / align * align
	return p.At + at - from, a.added(Region{
		ID: id, Path: d.Path(), Kind: string(d.Kind()), FD: d.FD(), OffsetBytes: d.Offset() + from,
		SizeBytes: to - from, PageSize: align, Bytes: d.Bytes()[from:to:to],
	})
}

// Close ends the arena and its engine, and lets go of the devices: see slab.Arena.
func (a *Arena) Close() error { return errors.Join(a.Arena.Close(), a.fs.Close()) }
