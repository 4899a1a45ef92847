package settings

import "go.uber.org/zap/zapcore"

// LogConfig configures logging.
type LogConfig struct {
	Level  string
	Format string
}

// ZapLevel returns the zap level of log.level.
func (c LogConfig) ZapLevel() zapcore.Level {
	l, err := zapcore.ParseLevel(c.Level)
	if err != nil {
		return zapcore.InfoLevel
	}
	return l
}

var logSettings = []Setting{
	{
		Key: "log.level", Default: "info", Unit: "debug, info, warn or error",
		Meaning: "The least that is logged.",
		set: oneOf(func(c *Config) *string { return &c.Log.Level }, "debug", "info", "warn",
			"error"),
	},
	{
		Key: "log.format", Default: "console", Unit: "console or json",
		Meaning: "How log lines are written to standard error.",
		set:     oneOf(func(c *Config) *string { return &c.Log.Format }, "console", "json"),
	},
}
