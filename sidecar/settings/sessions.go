package settings

// SessionsConfig limits sessions.
type SessionsConfig struct {
	Limit      int
	Share      float64
	JointShare float64
}

var sessionsSettings = []Setting{
	{
		Key: "sessions.limit", Default: "64", Unit: "sessions",
		Meaning: "The most clients connected at a time: one for each scheduler and one for each worker. Further ones are refused as busy.",
		set:     whole(1, 4096, func(c *Config) *int { return &c.Sessions.Limit }),
	},
	{
		Key: "sessions.share", Default: "0.5",
		Unit:    "fraction of the arena's slots, above 0 and at most 1",
		Meaning: "The most that one session may hold leased or half written, so that a frozen client cannot fill the arena.",
		set:     fraction(func(c *Config) *float64 { return &c.Sessions.Share }),
	},
	{
		Key: "sessions.joint_share", Default: "0.75",
		Unit:    "fraction of the arena's slots, above 0 and at most 1",
		Meaning: "The most that all sessions together may hold leased or half written. It and sessions.share are of what frozen clients do not hold: those keep what they have, and the others get along with the rest, however many freeze.",
		set:     fraction(func(c *Config) *float64 { return &c.Sessions.JointShare }),
	},
}
