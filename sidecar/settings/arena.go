package settings

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strconv"
	"time"

	"lookaside/dax"
	"lookaside/internal/bytesize"
	"lookaside/tiers/policy"
)

// KindDAX is the kind of an arena on DAX devices. The other kinds are those of package dax.
const KindDAX dax.Kind = "dax"

// ArenaConfig sizes the shared memory. Sizes are in bytes.
type ArenaConfig struct {
	Limit      int64
	Kind       dax.Kind
	Initial    int64  // never above Limit
	Path       string // only for dax.KindFile: the directory of the backing files
	NUMA       string // "none", "auto" or a node's number
	Eviction   string // name of a policy
	CheckRate  int64  // bytes a second; 0: the arena is not checked
	CheckEvery time.Duration
	// DAX is only for KindDAX. Of the other fields KindDAX uses Kind, Eviction, CheckRate and
	// CheckEvery.
	DAX DAXDevices
}

// Regions returns how many regions an arena of memory has at its limit.
func (a *ArenaConfig) Regions() int64 {
	step := a.Step()
	return 1 + (a.Limit-a.Initial+step-1)/step
}

// Step returns by how much an arena of memory grows at a time. Larger regions are few, and so are
// the mappings of workers; smaller ones take memory later.
func (a *ArenaConfig) Step() int64 { return max(a.Initial, a.Limit/4) }

var arenaSettings = []Setting{
	{
		Key: "arena.limit", Default: "4G", Unit: "bytes (K, M, G and T are powers of 1024)",
		onDAX:   neverOnDAX,
		Meaning: "The most shared memory that KV pages may take. Checked at the start against what the host and its cgroup can give.",
		set:     size(func(c *Config) *int64 { return &c.Arena.Limit }),
	},
	{
		Key: "arena.kind", Default: "auto", Unit: "auto, hugetlb, thp, memfd, file or dax",
		Meaning: "What the arena is made of: 2 MiB huge pages (hugetlb), transparent huge pages (thp), 4 KiB pages (memfd), files in arena.path, or the DAX devices of arena.dax.devices. auto takes the first of hugetlb, thp and memfd that this host gives, and logs which and why. " +
			"What an arena on DAX holds is found again after a restart or a crash; it is as large as its devices, and arena.limit, initial, path and numa are errors with it.",
		set: func(c *Config, v string) error {
			kinds := []dax.Kind{dax.KindAuto, dax.KindHugetlb, dax.KindTHP, dax.KindMemfd,
				dax.KindFile, KindDAX}
			if !slices.Contains(kinds, dax.Kind(v)) {
				return fmt.Errorf("%q is none of %v", v, kinds)
			}
			c.Arena.Kind = dax.Kind(v)
			return nil
		},
	},
	{
		Key: "arena.initial", Default: "min(arena.limit, 1G)", Unit: "bytes", derived: true,
		onDAX:   neverOnDAX,
		Meaning: "How much of the arena is made at the start. It grows in the background when it is four fifths full, by a quarter of arena.limit or by arena.initial, whichever is more.",
		set:     size(func(c *Config) *int64 { return &c.Arena.Initial }),
	},
	{
		Key: "arena.path", Default: "", Unit: "directory", onDAX: neverOnDAX,
		Meaning: "Where the arena's files are made when arena.kind is file; it must not be set otherwise. Files of an earlier run are replaced.",
		set:     text(func(c *Config) *string { return &c.Arena.Path }),
	},
	{
		Key: "arena.numa", Default: "none", Unit: "none, auto or a node's number",
		onDAX:   neverOnDAX,
		Meaning: "Which NUMA node the arena's memory comes from. auto: the node of the CPUs that the sidecar may run on, when they are all of one node.",
		set: func(c *Config, v string) error {
			if n, err := strconv.Atoi(v); v != "none" && v != "auto" && (err != nil || n < 0) {
				return fmt.Errorf("%q is neither none, auto nor the number of a node", v)
			}
			c.Arena.NUMA = v
			return nil
		},
	},
	{
		Key: "arena.eviction", Default: policy.Default, Unit: choices(policy.Names()),
		Meaning: "Which chunk leaves the arena first when there is no room. Never one whose continuation is held: a continuation without its prefix is worth nothing. lookaside simulate compares them on a trace.",
		set:     choice(policy.Names(), func(c *Config) *string { return &c.Arena.Eviction }),
	},
	{
		Key: "arena.check_rate", Default: "256M", Unit: "bytes a second (0: never)",
		Meaning: "How much of the arena is read at most in a second to find bytes that have changed since they were stored: by bad memory, or by a client that writes where it must not. What is found is dropped, logged and counted. " +
			"With 0 nothing is checked, also not before it is written to a tier.",
		set: func(c *Config, v string) (err error) {
			if c.Arena.CheckRate = 0; v != "0" {
				c.Arena.CheckRate, err = parseSize(v)
			}
			return
		},
	},
	{
		Key: "arena.check_every", Default: "10m", Unit: "duration",
		Meaning: "How often a walk over the whole arena begins at most: what has changed is found within this time, and until then may be loaded. A large arena takes longer, by arena.check_rate.",
		set: duration(time.Millisecond,
			func(c *Config) *time.Duration { return &c.Arena.CheckEvery }),
	},
	{
		Key: "arena.dax.devices", Default: "",
		Unit: "DEVICE[:SIZE],… (in the file also a list of devices, or of {path: DEVICE, size: BYTES})", list: true, onDAX: onlyOnDAX,
		Meaning: "With arena.kind: dax, the DAX devices (/dev/daxX.Y) that the arena lies on, or files on a file system mounted with -o dax, and how much to use of each: a multiple of its alignment; all, if nothing is said. It may be empty if arena.dax.hotplug is true. Workers map the devices, and copy straight to and from them.",
		set:     func(c *Config, v string) error { return c.Arena.DAX.addAll(v) },
	},
	{
		Key: "arena.dax.offset", Default: "0", Unit: sizeUnit, onDAX: onlyOnDAX,
		Meaning: "Where in each device of arena.dax.devices begins what is used of it: a multiple of its alignment. What lies before and behind is left to others.",
		set:     sizeOrZero(func(c *Config) *int64 { return &c.Arena.DAX.Offset }),
	},
	{
		Key: "arena.dax.ranks", Default: "1", Unit: "sidecars", onDAX: onlyOnDAX,
		Meaning: "How many sidecars share arena.dax.devices, one for each rank: each has an equal part of what is used of a device.",
		set:     whole(1, maxRanks, func(c *Config) *int { return &c.Arena.DAX.Ranks }),
	},
	{
		Key: "arena.dax.rank", Default: "0", Unit: "number", onDAX: onlyOnDAX,
		Meaning: "Which of these parts is this sidecar's, from 0.",
		set:     whole(0, maxRanks-1, func(c *Config) *int { return &c.Arena.DAX.Rank }),
	},
	{
		Key: "arena.dax.allow_files", Default: "false", Unit: boolUnit, onDAX: onlyOnDAX,
		Meaning: "Whether regular files may stand in for arena.dax.devices. One that is not there is made, of the size that is set.",
		set:     boolean(func(c *Config) *bool { return &c.Arena.DAX.AllowFiles }),
	},
	{
		Key: "arena.dax.hotplug", Default: "false", Unit: boolUnit, onDAX: onlyOnDAX,
		Meaning: "Whether devices of the arena may be added, removed and resized while the sidecar serves, by lookaside dax --arena and over HTTP.",
		set:     boolean(func(c *Config) *bool { return &c.Arena.DAX.HotPlug }),
	},
	{
		Key: "arena.dax.slab", Default: "a 32nd of all devices, from 256M to 64G", Unit: sizeUnit,
		derived: true, onDAX: onlyOnDAX,
		Meaning: "Size of the pieces that arena.dax.devices are cut into. Each has room for chunks of one geometry, and is a region that workers map.",
		set:     size(func(c *Config) *int64 { return &c.Arena.DAX.Slab }),
	},
}

// A use selects the kinds of arenas that a setting is for.
type use uint8

const (
	everywhere use = iota
	onlyOnDAX      // an error with arenas of another kind
	neverOnDAX     // an error with an arena on DAX
)

// complete sets the fields that follow from the limit, and checks the kind's own settings.
func (a *ArenaConfig) complete() error {
	if a.Kind == KindDAX {
		if err := a.DAX.check("arena.dax."); err != nil {
			return fmt.Errorf("arena.kind is dax: %w", err)
		}
		return nil
	}
	if a.Initial == 0 {
		a.Initial = min(a.Limit, 1<<30)
	}
	if a.Initial > a.Limit {
		return fmt.Errorf("arena.initial is %s, above arena.limit, %s", bytesize.Format(a.Initial),
			bytesize.Format(a.Limit))
	}
	if a.Kind == dax.KindFile && a.Path == "" {
		return errors.New("arena.kind is file: arena.path must name a directory")
	}
	if a.Kind != dax.KindFile && a.Path != "" {
		return fmt.Errorf("arena.path is set, but arena.kind is %s, not file", a.Kind)
	}
	return nil
}

// fits refuses given settings that do not apply to the arena's kind. Ignoring them would hide that
// they have no effect.
func (c *ArenaConfig) fits(given []Setting) error {
	for _, s := range given {
		switch on := c.Kind == KindDAX; {
		case on && s.onDAX == neverOnDAX:
			return fmt.Errorf("%s is set, and arena.kind is dax: %s; take it out", s.Key,
				whyNeverOnDAX[s.Key])
		case !on && s.onDAX == onlyOnDAX && !s.isDefault(c):
			return fmt.Errorf("%s is set, but arena.kind is %s: set arena.kind to dax, or take it out", s.Key, c.Kind)
		}
	}
	return nil
}

// isDefault reports whether a given setting of an arena on DAX still has its default.
func (s Setting) isDefault(c *ArenaConfig) bool {
	with := Config{Arena: *c}
	return s.Default != "" && !s.derived && s.set(&with, s.Default) == nil &&
		reflect.DeepEqual(with.Arena.DAX, c.DAX)
}

// whyNeverOnDAX has the reason why a setting does not apply to an arena on DAX.
var whyNeverOnDAX = map[string]string{
	"arena.limit":   "such an arena is as large as its devices, whose sizes are set as DEVICE:SIZE in arena.dax.devices",
	"arena.initial": "such an arena has all of its devices from the start, and does not grow by itself; with arena.dax.hotplug devices are added by lookaside dax add --arena",
	"arena.path":    "its devices, or the files that stand in for them, are set in arena.dax.devices",
	"arena.numa":    "its memory is of the node that the device is on: see lookaside status",
}

// checkDevices refuses devices that both the arena and a tier name. The one opened later would find
// the device locked by this process.
func (c *Config) checkDevices() error {
	if c.Arena.Kind != KindDAX {
		return nil
	}
	for _, mine := range c.Arena.DAX.Devices {
		for i := range c.Tiers {
			t := &c.Tiers[i]
			for _, other := range t.DAX.Devices {
				size := other.Size
				if size == 0 {
					size = t.DAX.Size
				}
				if other.Path == mine.Path && overlap(c.Arena.DAX.Offset, mine.Size, t.DAX.Offset,
					size) {
					return fmt.Errorf("%s is in arena.dax.devices and in tier %q: give each a part of its own, by arena.dax.offset, the tier's offset, and sizes", mine.Path, t.Name)
				}
			}
		}
	}
	return nil
}

// overlap reports whether two parts of a device have bytes in common. A size of 0 means everything
// from the offset on.
func overlap(at, size, otherAt, otherSize int64) bool {
	before := func(at, size, next int64) bool {
		return size > 0 && at <= math.MaxInt64-size && at+size <= next
	}
	return !before(at, size, otherAt) && !before(otherAt, otherSize, at)
}
