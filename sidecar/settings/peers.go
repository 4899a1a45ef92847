package settings

import (
	"fmt"
	"path/filepath"
	"time"
)

// PeersConfig configures what sidecars of one host share.
type PeersConfig struct {
	Enabled    bool
	Dir        string // empty: beside runtime.dir
	Linger     time.Duration
	CopyAfter  int // lookups; 0: never
	SkipStores bool
}

var peersSettings = []Setting{
	{
		Key: "peers.enabled", Default: "true", Unit: boolUnit,
		Meaning: "Whether this sidecar shares what it holds with others of this host (docs/peers.md): each serves hits in all arenas, and workers read them where they lie. Needs events.journal.",
		set:     boolean(func(c *Config) *bool { return &c.Peers.Enabled }),
	},
	{
		Key: "peers.dir", Default: "the directory that runtime.dir is in", Unit: "directory",
		derived: true,
		Meaning: "The directory in which sidecars find each other: those that name the same share. It must be this user's, with mode 0700, for whoever may enter it may read what is held; until it is, nothing is shared, and the log says so.",
		set:     text(func(c *Config) *string { return &c.Peers.Dir }),
	},
	{
		Key: "peers.linger", Default: "2s", Unit: "duration",
		Meaning: "How long a borrowed chunk that nobody uses is kept before it is given back: until then it is found as quickly as an own one, and who lent it cannot evict it.",
		set: duration(time.Millisecond,
			func(c *Config) *time.Duration { return &c.Peers.Linger }),
	},
	{
		Key: "peers.copy_after", Default: "0", Unit: "lookups",
		Meaning: "After how many lookups that were loaded from another sidecar's arena a chunk is copied into the own one, in the background: from then on it needs no other sidecar, and takes room here as well. 0: nothing is copied.",
		set:     whole(0, 1000, func(c *Config) *int { return &c.Peers.CopyAfter }),
	},
	{
		Key: "peers.skip_stores", Default: "true", Unit: boolUnit,
		Meaning: "Whether a chunk that another sidecar holds is not stored here as well: so several sidecars cost about one cache.",
		set:     boolean(func(c *Config) *bool { return &c.Peers.SkipStores }),
	},
}

// complete sets the directory, if none is given, to that of runtimeDir. There sidecars find each
// other without a setting.
func (c *PeersConfig) complete(runtimeDir string) error {
	if c.Dir == "" {
		c.Dir = filepath.Dir(runtimeDir)
	}
	if !filepath.IsAbs(c.Dir) {
		return fmt.Errorf("peers.dir: %q is not an absolute path", c.Dir)
	}
	return nil
}
