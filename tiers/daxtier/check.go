package daxtier

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"lookaside/dax"
	"lookaside/tiers/daxtier/mapped"
	"lookaside/tiers/slab"
)

// CheckOptions says what to check, and how.
type CheckOptions struct {
	// Devices, or files that stand in for them. On each device Check finds all partitions that
	// follow one another from OffsetBytes on, as those of ranks do.
	Devices     []string
	OffsetBytes int64
	// Repair and Progress are as in slab.CheckOptions.
	Repair   bool
	Progress func(done, total int64)
	// SysFS is where the kernel shows devices. Default /sys.
	SysFS string
}

// Check reads and verifies a whole pool that no process has open: see slab.Check. It creates
// nothing. It returns fs.ErrNotExist if a device has no partition of ours.
func Check(ctx context.Context, o CheckOptions) (r slab.Report, err error) {
	fsys := mapped.New(nil)
	defer func() { err = errors.Join(err, fsys.Close()) }()
	var dirs []string
	for _, device := range o.Devices {
		for at := o.OffsetBytes; ; {
			dir := filepath.Clean(device)
			if at != 0 {
				dir += fmt.Sprintf("@%d", at)
			}
			err := fsys.MountExisting(dir, dax.DeviceOptions{Path: device, OffsetBytes: at,
				AllowFile: true, SysFS: o.SysFS})
			if err != nil && (at == o.OffsetBytes || !errors.Is(err, fs.ErrNotExist)) {
				return r, err
			}
			if err != nil {
				break
			}
			dirs = append(dirs, dir)
			at += fsys.Device(dir).Size()
		}
	}
	return slab.Check(ctx, slab.CheckOptions{FS: fsys, Dirs: dirs, Repair: o.Repair,
		Progress: o.Progress})
}
