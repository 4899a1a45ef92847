package settings

import "time"

// CascadeConfig configures how chunks are written to the tiers.
type CascadeConfig struct {
	PartialDelay time.Duration
}

var cascadeSettings = []Setting{
	{
		Key: "cascade.partial_delay", Default: "1s", Unit: "duration",
		Meaning: "How long a partly filled chunk must not have grown before it is written to the tiers. Whole ones are written at once. A chunk that is evicted earlier is not written: set less where the arena is small for what is stored in a second. A shorter delay writes growing chunks more often.",
		set: duration(time.Millisecond,
			func(c *Config) *time.Duration { return &c.Cascade.PartialDelay }),
	},
}
