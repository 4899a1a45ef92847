package settings

// PromotionConfig limits promotions, which load chunks from tiers into the arena.
type PromotionConfig struct {
	Share float64 // fraction of the slots
}

var promotionSettings = []Setting{
	{
		Key: "promotion.share", Default: "0.5",
		Unit:    "fraction of the arena's slots, above 0 and at most 1",
		Meaning: "The most slots that may be filling from the tiers at a time; further promotions wait for their turn.",
		set:     fraction(func(c *Config) *float64 { return &c.Promotion.Share }),
	},
}
