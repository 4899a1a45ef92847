package settings

// SpacesConfig limits spaces.
type SpacesConfig struct {
	Limit int
}

var spacesSettings = []Setting{
	{
		Key: "spaces.limit", Default: "16", Unit: "spaces",
		Meaning: "The most kinds of pages (model, precision, layout, …) held side by side. A worker that needs one more has the one dropped from the arena that was used longest ago, of those that have no session, lease or pin; what the tiers below hold of that stays. If all of them have, it is refused.",
		set:     whole(1, 1024, func(c *Config) *int { return &c.Spaces.Limit }),
	},
}
