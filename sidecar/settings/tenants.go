package settings

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"lookaside/tiers/tenant"
)

// TenantsConfig says which tenants there are, and what they keep.
type TenantsConfig struct {
	Max          int // names at a time beside those with a share
	DefaultShare float64
	Arena        map[string]float64 // parts by name
	Tiers        map[string]float64 // likewise; nil: as Arena
}

var tenantsSettings = []Setting{
	{
		Key: "tenants.max", Default: "32", Unit: "names",
		Meaning: "How many tenants without a share of their own are told apart at a time: in what is counted, and as those who divide what the named shares leave. All others are one tenant, other. A name is forgotten for a new one when nothing of it is held and nothing was asked in its name for ten minutes.",
		set:     whole(0, tenant.MaxIDs-2, func(c *Config) *int { return &c.Tenants.Max }),
	},
	{
		Key: "tenants.arena_shares", Default: "", Unit: sharesUnit, list: true,
		Meaning: "What part of the arena a tenant keeps however much others store: of each model's part where several models share the arena. A tenant is the name that requests carry. What nobody uses is lent to those who want it. Names have at most 64 bytes, without commas. The shares may add up to 100 %. Without any share, tenants are only counted.",
		set:     parsed(parseShares, func(c *Config) *map[string]float64 { return &c.Tenants.Arena }),
	},
	{
		Key: "tenants.tier_shares", Default: "as tenants.arena_shares", Unit: sharesUnit, list: true,
		derived: true,
		Meaning: "What part of each disk and DAX tier a tenant keeps. What is in Redis and S3 is only counted as it is written: they do not say what they drop.",
		set:     parsed(parseShares, func(c *Config) *map[string]float64 { return &c.Tenants.Tiers }),
	},
	{
		Key: "tenants.default_share", Default: "",
		Unit:    "percent, as 10%, or a fraction",
		Meaning: "The most that a tenant without a share of its own keeps, also the requests without a name. These tenants divide equally what the named shares leave, each up to this. Unset: as much as that gives; without any named share, nobody has a share.",
		set: parsed(parseShare,
			func(c *Config) *float64 { return &c.Tenants.DefaultShare }),
	},
}

const sharesUnit = "NAME=PERCENT%,… (in the file also a list)"

// parseShare parses a part of a store: 40%, or 0.4.
func parseShare(v string) (float64, error) {
	text, percent := strings.CutSuffix(strings.TrimSpace(v), "%")
	f, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
	if percent {
		f /= 100
	}
	if err != nil || !(f > 0 && f <= 1) {
		return 0, fmt.Errorf("%q is not a share: want more than 0%%, at most 100%%", v)
	}
	return f, nil
}

// parseShares parses shares by name.
func parseShares(v string) (map[string]float64, error) {
	shares := map[string]float64{}
	for _, one := range strings.Split(v, ",") {
		at := strings.LastIndex(one, "=")
		if at < 0 {
			return nil, fmt.Errorf("%q is not the share of a tenant: want %s", one, "NAME=PERCENT%")
		}
		name := strings.TrimSpace(one[:at])
		if !tenant.ValidName([]byte(name)) {
			return nil, fmt.Errorf("%q is no name of a tenant: want 1 to %d bytes, printable", name,
				tenant.MaxName)
		}
		if _, twice := shares[name]; twice {
			return nil, fmt.Errorf("tenant %q is there twice", name)
		}
		part, err := parseShare(one[at+1:])
		if err != nil {
			return nil, fmt.Errorf("tenant %q: %w", name, err)
		}
		shares[name] = part
	}
	s := tenant.Shares{Named: shares}
	return shares, s.Validate()
}

// complete sets the shares of tiers, and checks that there are not too many names.
func (c *TenantsConfig) complete() error {
	if c.Tiers == nil {
		c.Tiers = c.Arena
	}
	if _, err := tenant.New(c.Registry()); err != nil {
		return fmt.Errorf("tenants.arena_shares and tenants.tier_shares: %w", err)
	}
	return nil
}

// Registry returns the configuration of the registry of tenants.
func (c *TenantsConfig) Registry() tenant.Config {
	names := maps.Clone(c.Arena)
	if names == nil {
		names = map[string]float64{}
	}
	maps.Copy(names, c.Tiers)
	return tenant.Config{Listed: slices.Sorted(maps.Keys(names)), Max: c.Max}
}

// Divided reports whether anybody has a share.
func (c *TenantsConfig) Divided() bool {
	a, t := c.ArenaShares(), c.TierShares()
	return a.On() || t.On()
}

// ArenaShares returns how the arena is divided.
func (c *TenantsConfig) ArenaShares() tenant.Shares {
	return tenant.Shares{Named: c.Arena, Default: c.DefaultShare}
}

// TierShares returns how each tier is divided.
func (c *TenantsConfig) TierShares() tenant.Shares {
	return tenant.Shares{Named: c.Tiers, Default: c.DefaultShare}
}
