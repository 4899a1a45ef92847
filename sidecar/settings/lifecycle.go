package settings

import "time"

// LifecycleConfig configures how a sidecar ends.
type LifecycleConfig struct {
	IdleExit time.Duration // 0: never
	Drain    time.Duration
	Flush    time.Duration
}

var lifecycleSettings = []Setting{
	{
		Key: "lifecycle.idle_exit", Default: "0", Unit: "duration (0: never)",
		Meaning: "The sidecar ends by itself after this long without a session.",
		set:     duration(0, func(c *Config) *time.Duration { return &c.Lifecycle.IdleExit }),
	},
	{
		Key: "lifecycle.drain", Default: "5s", Unit: "duration",
		Meaning: "How long a sidecar that was asked to end waits for stores and loads under way.",
		set:     duration(0, func(c *Config) *time.Duration { return &c.Lifecycle.Drain }),
	},
	{
		Key: "lifecycle.flush", Default: "10s", Unit: "duration",
		Meaning: "How long it then goes on writing to the tiers what waits for that.",
		set:     duration(0, func(c *Config) *time.Duration { return &c.Lifecycle.Flush }),
	},
}
