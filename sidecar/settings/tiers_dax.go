package settings

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"lookaside/tiers/policy"
)

// DAXConfig has the settings that only a tier of DAX devices has.
type DAXConfig struct {
	DAXDevices
	Size     int64 // bytes of devices without a size of their own; 0: all
	Eviction string
}

// DAXDevices has the settings that a tier and an arena on DAX devices share.
type DAXDevices struct {
	Devices     []DAXDevice
	Offset      int64 // bytes
	Rank, Ranks int
	AllowFiles  bool
	HotPlug     bool
	Slab        int64 // bytes; 0: the store chooses
}

// DAXDevice is a device of a tier or of the arena.
type DAXDevice struct {
	Path string // absolute
	Size int64  // bytes; 0: the tier's DAXConfig.Size, else all
}

// maxRanks is more than the workers of any host.
const maxRanks = 1024

var daxSettings = []TierSetting{
	{
		Key: "devices", Kinds: []string{TierDAX},
		Unit:    "list of devices, or of {path: DEVICE, size: BYTES}",
		Meaning: "The DAX devices (/dev/daxX.Y), or files on a file system mounted with -o dax. Chunks are spread over all of them. It may be empty if hotplug is true.",
		set:     func(c *TierConfig, v string) error { return c.DAX.addAll(v) },
	},
	{
		Key: "device", Kinds: []string{TierDAX}, Unit: "device",
		Meaning: "In place of devices, where there is but one.",
		set:     func(c *TierConfig, v string) error { return c.DAX.add(v) },
	},
	{
		Key: "size", Kinds: []string{TierDAX}, Unit: sizeUnit, Default: "all of the device",
		derived: true,
		Meaning: "How much to use of each device that has no size of its own: a multiple of its alignment, which is 2M or 1G.",
		set:     size(func(c *TierConfig) *int64 { return &c.DAX.Size }),
	},
	{
		Key: "offset", Kinds: []string{TierDAX}, Unit: sizeUnit, Default: "0",
		Meaning: "Where in each device begins what is used of it: a multiple of its alignment. What lies before and behind is left to others.",
		set:     sizeOrZero(func(c *TierConfig) *int64 { return &c.DAX.Offset }),
	},
	countSetting("ranks", []string{TierDAX}, "1", 1, maxRanks, "sidecars",
		"How many sidecars share the devices, one for each rank: each has an equal part of what is used of a device.",
		func(c *TierConfig) *int { return &c.DAX.Ranks }),
	countSetting("rank", []string{TierDAX}, "0", 0, maxRanks-1, "number",
		"Which of the parts is this sidecar's, from 0.",
		func(c *TierConfig) *int { return &c.DAX.Rank }),
	flagSetting("allow_files", []string{TierDAX},
		"Whether regular files may stand in for devices. One that is not there is made, of the size that is set.", func(c *TierConfig) *bool { return &c.DAX.AllowFiles }),
	choiceSetting("eviction", []string{TierDAX}, policy.Default, evictionMeaning, policy.Names(),
		func(c *TierConfig) *string { return &c.DAX.Eviction }),
	{
		Key: "slab", Kinds: []string{TierDAX}, Default: "a 32nd of all devices, from 256M to 64G",
		Unit: sizeUnit, derived: true,
		Meaning: "Size of the pieces that a device is cut into. Each has room for chunks of one geometry.",
		set:     size(func(c *TierConfig) *int64 { return &c.DAX.Slab }),
	},
	flagSetting("hotplug", []string{TierDAX},
		"Whether devices may be added, removed and resized while the sidecar serves, by lookaside dax and over HTTP.", func(c *TierConfig) *bool { return &c.DAX.HotPlug }),
}

// addAll adds devices, separated by commas.
func (c *DAXDevices) addAll(v string) error {
	for d := range strings.SplitSeq(v, ",") {
		if err := c.add(d); err != nil {
			return err
		}
	}
	return nil
}

// add adds a device, written as DEVICE or DEVICE:SIZE.
func (c *DAXDevices) add(v string) error {
	d := DAXDevice{Path: strings.TrimSpace(v)}
	if i := strings.LastIndexByte(d.Path, ':'); i >= 0 {
		size, err := parseSize(d.Path[i+1:])
		if err != nil {
			return err
		}
		d.Path, d.Size = d.Path[:i], size
	}
	if !filepath.IsAbs(d.Path) {
		return fmt.Errorf("%q is not an absolute path: write it from the root, /dev/dax0.0", d.Path)
	}
	d.Path = filepath.Clean(d.Path)
	if slices.ContainsFunc(c.Devices, func(o DAXDevice) bool { return o.Path == d.Path }) {
		return fmt.Errorf("%s is there twice", d.Path)
	}
	c.Devices = append(c.Devices, d)
	return nil
}

// check checks rules that concern several settings of devices. Their names begin with at.
func (c *DAXDevices) check(at string) error {
	switch {
	case len(c.Devices) == 0 && !c.HotPlug:
		return fmt.Errorf("%[1]sdevices is missing: add the devices' paths, such as [/dev/dax0.0]; only with %[1]shotplug: true there may be none at the start", at)
	case c.Rank >= c.Ranks:
		return fmt.Errorf("%[1]srank is %[2]d of %[1]sranks %[3]d: they count from 0", at, c.Rank,
			c.Ranks)
	}
	return nil
}
