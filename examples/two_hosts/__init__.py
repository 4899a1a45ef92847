"""Two hosts that share every prefix through Mooncake Store: `make demo TIERS=mooncake`."""
