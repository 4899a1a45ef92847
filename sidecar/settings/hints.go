package settings

import "time"

// HintsConfig bounds what hints of requests may do.
type HintsConfig struct {
	Share       float64
	RetainLimit time.Duration
}

var hintsSettings = []Setting{
	{
		Key: "hints.share", Default: "0.25",
		Unit:    "fraction of the arena's slots, above 0 and at most 1",
		Meaning: "The most that hints of requests may have retained or pinned at a time, of each geometry; where tenants have shares, also the most of each tenant's. A hint beyond it is ignored and counted.",
		set:     fraction(func(c *Config) *float64 { return &c.Hints.Share }),
	},
	{
		Key: "hints.retain_limit", Default: "1h", Unit: "duration, at least 1ms",
		Meaning: "The longest that a hint may have a chunk retained or pinned. A longer time is cut to it.",
		set: duration(time.Millisecond,
			func(c *Config) *time.Duration { return &c.Hints.RetainLimit }),
	},
}
