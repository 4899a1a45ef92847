package settings

import (
	"fmt"

	"lookaside/internal/bytesize"
	"lookaside/internal/demand"
)

// DemandConfig configures how the sidecar watches what clients ask for.
type DemandConfig struct {
	Memory int64 // bytes; 0: it does not watch
}

var demandSettings = []Setting{
	{
		Key: "demand.memory", Default: "48M",
		Unit:    "bytes, at least " + bytesize.Format(demand.MinMemory) + " (0: nothing is watched)",
		Meaning: "The most memory that watching the requests may take: from them the sidecar knows what arenas of other sizes would hit, and after how much else prefixes are asked for again (lookaside status, docs/sizing.md). Less memory watches a smaller sample of the chunks of a large arena.",
		set: func(c *Config, v string) error {
			parse := sizeOrZero(func(c *Config) *int64 { return &c.Demand.Memory })
			if err := parse(c, v); err != nil {
				return err
			}
			if n := c.Demand.Memory; n != 0 && n < demand.MinMemory {
				return fmt.Errorf("%s: want at least %s, or 0 to watch nothing", v,
					bytesize.Format(demand.MinMemory))
			}
			return nil
		},
	},
}
