package settings

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"lookaside/internal/bytesize"
	"lookaside/tiers/policy"
)

// DiskConfig has the settings that only a disk tier has.
type DiskConfig struct {
	Paths    []string // absolute
	Capacity int64    // bytes
	Slab     int64    // bytes; 0: the store chooses
	Eviction string
	Direct   string // auto, always or never
}

var diskSettings = []TierSetting{
	{
		Key: "paths", Kinds: []string{TierDisk}, Unit: "list of directories", required: true,
		Meaning: "Where the store is; made if they are not there. With several, best on devices of their own, chunks are spread over all of them. One sidecar at a time uses a directory.",
		set: func(c *TierConfig, v string) error {
			for p := range strings.SplitSeq(v, ",") {
				p = strings.TrimSpace(p)
				if !filepath.IsAbs(p) {
					return fmt.Errorf("%q is not an absolute path: write it from the root, /…", p)
				}
				if p = filepath.Clean(p); slices.Contains(c.Disk.Paths, p) {
					return fmt.Errorf("%s is there twice", p)
				}
				c.Disk.Paths = append(c.Disk.Paths, p)
			}
			return nil
		},
	},
	{
		Key: "capacity", Kinds: []string{TierDisk}, Unit: sizeUnit, required: true,
		Meaning: "How much of the disks the store takes, over all its directories together. It is allocated when the sidecar starts. With another capacity an existing store grows or shrinks; shrinking drops what was in the part that goes.",
		set:     size(func(c *TierConfig) *int64 { return &c.Disk.Capacity }),
	},
	choiceSetting("eviction", []string{TierDisk}, policy.Default, evictionMeaning,
		policy.Names(), func(c *TierConfig) *string { return &c.Disk.Eviction }),
	choiceSetting("direct", []string{TierDisk}, "auto",
		"Whether I/O goes around the page cache (O_DIRECT). auto: where the file system allows it; always: an error where it does not.",
		[]string{"auto", "always", "never"}, func(c *TierConfig) *string { return &c.Disk.Direct }),
	{
		Key: "slab", Kinds: []string{TierDisk}, Default: "capacity/32, from 256M to 64G",
		Unit: sizeUnit, derived: true,
		Meaning: "Size of one file of the store. Each has room for chunks of one geometry.",
		set:     size(func(c *TierConfig) *int64 { return &c.Disk.Slab }),
	},
}

// check checks rules that concern several keys.
func (c *DiskConfig) check() error {
	if c.Slab > c.Capacity {
		return fmt.Errorf("slab is %s, above capacity, %s", bytesize.Format(c.Slab),
			bytesize.Format(c.Capacity))
	}
	if c.Capacity < int64(len(c.Paths))<<20 {
		return fmt.Errorf("capacity is %s: a directory wants 1M at least, and a useful one many G",
			bytesize.Format(c.Capacity))
	}
	return nil
}
