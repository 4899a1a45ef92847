package daxtier

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"

	"lookaside/dax"
	"lookaside/internal/bytesize"
	"lookaside/tiers"
	"lookaside/tiers/daxtier/mapped"
	"lookaside/tiers/slab"
)

var _ slab.Sized = (*mapped.FS)(nil)

// Reasons for which a call leaves the devices as they are, beside ErrDevice, tiers.ErrBusy and
// tiers.ErrClosed.
var (
	ErrNotFound = tiers.ErrNotFound // no such device in the pool
	ErrExists   = slab.ErrExists    // the device is in the pool, perhaps with another size
	// chunks on it are in use, or another process has the partition
	ErrLeased = slab.ErrLeased
	// for the chunks to move, or for the file that stands in for a device
	ErrNoRoom = slab.ErrNoRoom
)

// Mode says what happens to the chunks on what is taken away.
type Mode = slab.Mode

const (
	Migrate = slab.Migrate // they go to the other devices
	Evict   = slab.Evict   // they are dropped
	Drain   = slab.Drain   // they stay on the device, which takes nothing new
)

// DeviceStatus is a device at one moment.
type DeviceStatus struct {
	slab.DirStatus
	SizeBytes int64 // of the partition; CapacityBytes of it hold slabs
}

// Status is a snapshot of a pool.
type Status struct {
	Devices                            []DeviceStatus
	TotalCapacityBytes, TotalUsedBytes int64
}

// devices are the devices of a pool or an arena, and the operations that change them.
type devices struct {
	o     Options
	fs    *mapped.FS
	store directories // the store on them
}

// directories is the part of slab.Disk and slab.Arena that devices needs.
type directories interface {
	Dirs() []slab.DirStatus
	AddDir(ctx context.Context, dir string, bytes int64) error
	RemoveDir(ctx context.Context, dir string, how slab.Mode, force bool) error
	ResizeDir(ctx context.Context, dir string, bytes int64, how slab.Mode, force bool) error
}

// mountAll opens this process's partitions of all devices. It returns their directories and sizes.
func (p *devices) mountAll() (dirs []string, sizes []int64, err error) {
	for _, d := range p.o.Devices {
		dir, err := p.mount(d)
		if err != nil {
			return nil, nil, err
		}
		n, err := p.fs.Capacity(dir)
		if err != nil {
			return nil, nil, err
		}
		dirs, sizes = append(dirs, dir), append(sizes, n)
	}
	return dirs, sizes, nil
}

// mount opens this process's partition of a device and returns its directory.
func (p *devices) mount(d DeviceSpec) (dir string, err error) {
	dir = filepath.Clean(d.Path)
	return dir, p.fs.Mount(dir, dax.DeviceOptions{
		Path: d.Path, OffsetBytes: p.o.OffsetBytes, SizeBytes: d.SizeBytes, Rank: p.o.Rank,
		Ranks: p.o.Ranks, AllowFile: p.o.AllowFiles, SysFS: p.o.SysFS,
	})
}

// Status returns a snapshot. It is cheap and never waits for a change under way.
func (p *devices) Status() Status {
	var st Status
	for _, d := range p.store.Dirs() {
		x := DeviceStatus{DirStatus: d}
		if dev := p.fs.Device(d.Path); dev != nil {
			x.SizeBytes = dev.Size()
		}
		st.Devices = append(st.Devices, x)
		st.TotalCapacityBytes += d.CapacityBytes
		st.TotalUsedBytes += d.UsedBytes
	}
	return st
}

func (p *devices) device(dir string) (DeviceStatus, error) {
	devices := p.Status().Devices
	i := slices.IndexFunc(devices, func(x DeviceStatus) bool { return x.Path == dir })
	if i < 0 {
		return DeviceStatus{}, fmt.Errorf("%w: device %s", ErrNotFound, dir)
	}
	return devices[i], nil
}

// Add takes a device into use, with the fields of DeviceSpec. New chunks are stored there too, and
// old contents are dropped. A drained device is taken into use again if sizeBytes is 0 or its size.
//
// It returns ErrExists, ErrDevice, ErrLeased or ErrNoRoom. It returns tiers.ErrBusy if another
// change is under way or the pool has its maximum number of slabs.
func (p *devices) Add(ctx context.Context, path string, sizeBytes int64) error {
	dir := filepath.Clean(path)
	if d, err := p.device(dir); err == nil {
		if d.State != slab.Draining || sizeBytes != 0 && sizeBytes/int64(p.o.Ranks) != d.SizeBytes {
			return fmt.Errorf("%w: device %s of %s", ErrExists, dir, bytesize.Format(d.SizeBytes))
		}
		return p.store.AddDir(ctx, dir, 0)
	}
	if _, err := p.mount(DeviceSpec{Path: path, SizeBytes: sizeBytes}); err != nil {
		return deviceError(err)
	}
	n, err := p.fs.Capacity(dir)
	if err == nil {
		err = p.store.AddDir(ctx, dir, n)
	}
	if err != nil {
		return errors.Join(deviceError(err), p.fs.Unmount(dir))
	}
	return nil
}

// deviceError maps errors of devices to those of this package.
func deviceError(err error) error {
	switch {
	case errors.Is(err, fs.ErrExist): // another call is adding or removing it
		return fmt.Errorf("%w: %w", ErrExists, err)
	case errors.Is(err, dax.ErrBusy):
		return fmt.Errorf("%w: %w", ErrLeased, err)
	case errors.Is(err, dax.ErrNoSpace) || errors.Is(err, dax.ErrNoMemory):
		return fmt.Errorf("%w: %w", ErrNoRoom, err)
	case errors.Is(err, mapped.ErrForeign) || errors.Is(err, mapped.ErrVersion) ||
		errors.Is(err, tiers.ErrInvalid):
		return fmt.Errorf("%w: %w", ErrDevice, err)
	}
	return err
}

// Remove takes a device out of use, as slab.Disk.RemoveDir does with a directory, and closes it.
// With Drain the device stays and takes nothing new. Remove returns when that is done; Status shows
// the progress of a migration. After ErrNotFound, ErrLeased, ErrNoRoom or tiers.ErrBusy the device
// is in use as before.
func (p *devices) Remove(ctx context.Context, path string, mode Mode, force bool) error {
	dir := filepath.Clean(path)
	if err := p.store.RemoveDir(ctx, dir, mode, force); err != nil || mode == Drain {
		return err
	}
	return p.fs.Unmount(dir)
}

// Resize changes the size of a device's partition, as slab.Disk.ResizeDir does with a directory. It
// returns the errors of Add and Remove. A device that several ranks share cannot be resized,
// because every rank's part would move.
func (p *devices) Resize(ctx context.Context, path string, sizeBytes int64, mode Mode,
	force bool) error {
	dir := filepath.Clean(path)
	if _, err := p.device(dir); err != nil {
		return err
	}
	dev := p.fs.Device(dir)
	switch {
	case dev == nil: // removed by another call
		return fmt.Errorf("%w: device %s", ErrNotFound, dir)
	case p.o.Ranks > 1:
		return fmt.Errorf("%s: %w: %d ranks share it, and all would have to be resized at once: remove it and add it in another size", dir, ErrDevice, p.o.Ranks)
	case sizeBytes <= 0 || sizeBytes%dev.Align() != 0:
		return fmt.Errorf("%s: %w: %d bytes, want a multiple of %s", dir, ErrDevice, sizeBytes,
			bytesize.Format(dev.Align()))
	}
	if mode != Migrate && mode != Evict {
		return fmt.Errorf("%w: mode %q: want %s or %s", tiers.ErrInvalid, mode, Migrate, Evict)
	}
	return deviceError(p.store.ResizeDir(ctx, dir, mapped.CapacityOf(sizeBytes), mode, force))
}
