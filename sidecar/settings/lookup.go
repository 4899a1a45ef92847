package settings

import "time"

// LookupConfig limits lookups.
type LookupConfig struct {
	MaxPages int
	Lease    time.Duration
	Promote  string // auto, always or never
	Deadline time.Duration
	Remember int
}

var lookupSettings = []Setting{
	{
		Key: "lookup.max_pages", Default: "65536", Unit: "pages",
		Meaning: "The most page hashes that one lookup or one store may name. A longer lookup is answered for as many, a longer store is refused; the connector reads it and asks for no more.",
		set:     whole(1, 1<<20, func(c *Config) *int { return &c.Lookup.MaxPages }),
	},
	{
		Key: "lookup.lease", Default: "30s", Unit: "duration",
		Meaning: "How long a lookup keeps what it found from being evicted while no worker has taken it over to load it.",
		set: duration(time.Millisecond,
			func(c *Config) *time.Duration { return &c.Lookup.Lease }),
	},
	{
		Key: "lookup.promote", Default: "auto", Unit: choices(promoteModes),
		Meaning: "Whether a lookup waits for what the tiers have. auto: unless vLLM would compute it again sooner than it arrives, going by each tier's measured latency and bandwidth and by vLLM's prefill rate.",
		set:     choice(promoteModes, func(c *Config) *string { return &c.Lookup.Promote }),
	},
	{
		Key: "lookup.deadline", Default: "3s", Unit: "duration",
		Meaning: "The longest that a lookup waits for the tiers: then it is answered with what is in the arena. A lookup may ask for a shorter one.",
		set: duration(time.Millisecond,
			func(c *Config) *time.Duration { return &c.Lookup.Deadline }),
	},
	{
		Key: "lookup.remember", Default: "262144", Unit: "pages",
		Meaning: "How many pages that have gone lately the sidecar remembers, with the cause, to say why a lookup missed (lookaside why). Each takes 16 bytes. 0: none, and what was evicted counts as never stored.",
		set:     whole(0, 1<<30, func(c *Config) *int { return &c.Lookup.Remember }),
	},
}

var promoteModes = []string{"auto", "always", "never"}
