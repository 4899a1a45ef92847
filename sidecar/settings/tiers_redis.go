package settings

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"lookaside/tiers/remote"
)

var redisSchemes = []string{"redis", "rediss", "redis+sentinel", "rediss+sentinel", "redis+cluster",
	"rediss+cluster", "redis+unix"}

var redisSettings = slices.Concat([]TierSetting{
	{
		Key: "url", Kinds: []string{TierRedis}, required: true,
		Unit:    "redis://[USER@]HOST[:PORT][/DB]; redis+sentinel://HOST,HOST…/MASTER[/DB]; redis+cluster://HOST,HOST…; each with rediss for TLS; redis+unix:///SOCKET",
		Meaning: "The server. A password does not belong in it, because commands and settings are seen by others: use password_file or password_env.",
		set: func(c *TierConfig, v string) error {
			if scheme, _, ok := strings.Cut(v, "://"); ok && !strings.ContainsAny(scheme, ":@/") {
				if err := nearestOf(scheme, redisSchemes); err != nil {
					return fmt.Errorf("scheme %w", err)
				}
			}
			o, err := remote.ParseRedisURL(v)
			r := &c.Redis
			r.Mode, r.Addrs, r.Master, r.DB, r.User, r.TLS = o.Mode, o.Addrs, o.Master, o.DB,
				o.User, o.TLS
			return err
		},
	},
	{
		Key: "db", Kinds: []string{TierRedis}, Default: "that of the URL, or 0", Unit: "number",
		Meaning: "The database.", derived: true,
		set: whole(0, 1<<20, func(c *TierConfig) *int { return &c.Redis.DB }),
	},
	textSetting("password_file", []string{TierRedis}, "", "file",
		"A file with the password. It is read again for each connection.",
		func(c *TierConfig) *string { return &c.Redis.Password.File }),
	textSetting("password_env", []string{TierRedis}, "", "name of an environment variable",
		"An environment variable that has the password.",
		func(c *TierConfig) *string { return &c.Redis.Password.Env }),
	textSetting("sentinel_user", []string{TierRedis}, "", "name", "Who we are to the sentinels.",
		func(c *TierConfig) *string { return &c.Redis.SentinelUser }),
	textSetting("sentinel_password_file", []string{TierRedis}, "", "file",
		"A file with the password for the sentinels.",
		func(c *TierConfig) *string { return &c.Redis.SentinelPassword.File }),
	textSetting("sentinel_password_env", []string{TierRedis}, "", "name of an environment variable",
		"An environment variable that has the password for the sentinels.",
		func(c *TierConfig) *string { return &c.Redis.SentinelPassword.Env }),
}, tlsSettings(TierRedis, func(c *TierConfig) *remote.TLSFiles { return &c.Redis.Files }),
	[]TierSetting{
		textSetting("prefix", []string{TierRedis}, "la1", "letters, digits and _.:-/",
			"What the names of all keys begin with. Sidecars with the same prefix share their chunks.",
			func(c *TierConfig) *string { return &c.Redis.Prefix }),
		{
			Key: "ttl", Kinds: []string{TierRedis}, Default: "0",
			Unit:    "duration (0: the server decides)",
			Meaning: "After how long the server forgets a chunk.",
			set: func(c *TierConfig, v string) (err error) {
				if c.Redis.TTL, err = parseDuration(v, 0); err == nil && c.Redis.TTL > 0 &&
					c.Redis.TTL < time.Second {
					err = fmt.Errorf("%q is below 1s", v)
				}
				return
			},
		},
		serdeSetting(TierRedis, func(c *TierConfig) *string { return &c.Redis.Serde }),
		{
			Key: "pool", Kinds: []string{TierRedis}, Default: "16", Unit: "connections",
			Meaning: "The most connections to the server (to each, in a cluster).",
			set:     whole(1, 1024, func(c *TierConfig) *int { return &c.Redis.Pool }),
		},
		timeoutSetting("dial_timeout", "2s", "How long making a connection may take.",
			[]string{TierRedis}, func(
				c *TierConfig) *time.Duration {
				return &c.Redis.DialTimeout
			}),
	})

// checkRedis checks rules that concern several keys.
func checkRedis(r *remote.RedisOptions) error {
	if r.Password.File != "" && r.Password.Env != "" {
		return errors.New("password_file and password_env: set one of them")
	}
	if r.SentinelPassword.File != "" && r.SentinelPassword.Env != "" {
		return errors.New("sentinel_password_file and sentinel_password_env: set one of them")
	}
	if r.Mode != remote.RedisSentinel && (r.SentinelUser != "" ||
		r.SentinelPassword != remote.Secret{}) {
		return errors.New("sentinel_user and sentinel_password are set, and the URL is not of sentinels: write it as redis+sentinel://HOST,HOST/MASTER")
	}
	return nil
}
