package settings

import (
	"errors"
	"net/url"
	"slices"
	"strings"
	"time"

	"lookaside/tiers/remote"
)

var s3Settings = slices.Concat([]TierSetting{
	{
		Key: "url", Kinds: []string{TierS3}, Unit: "s3://BUCKET[/PREFIX]", required: true,
		Meaning: "The bucket, and what the names of our objects in it begin with (la1 if nothing is said). The bucket must be there.",
		set: func(c *TierConfig, v string) error {
			o, err := remote.ParseS3URL(v)
			c.S3.Bucket, c.S3.Prefix = o.Bucket, o.Prefix
			return err
		},
	},
	{
		Key: "endpoint", Kinds: []string{TierS3}, Unit: "http:// or https:// and HOST[:PORT]",
		Default: "https://s3.amazonaws.com",
		Meaning: "The server.",
		set:     checked(checkEndpoint, func(c *TierConfig) *string { return &c.S3.Endpoint }),
	},
	textSetting("region", []string{TierS3}, "", "region",
		"The bucket's region; unset: the server is asked.",
		func(c *TierConfig) *string { return &c.S3.Region }),
	textSetting("credentials_file", []string{TierS3}, "", "file",
		"Credentials in the form of ~/.aws/credentials. Unset: the environment variables; if these are not set either, requests are not signed.",
		func(c *TierConfig) *string { return &c.S3.CredentialsFile }),
	textSetting("profile", []string{TierS3}, "default", "name", "The section of credentials_file.",
		func(c *TierConfig) *string { return &c.S3.Profile }),
	textSetting("access_key_env", []string{TierS3}, "AWS_ACCESS_KEY_ID",
		"name of an environment variable", "An environment variable that has the access key.",
		func(c *TierConfig) *string { return &c.S3.AccessKeyEnv }),
	textSetting("secret_key_env", []string{TierS3}, "AWS_SECRET_ACCESS_KEY",
		"name of an environment variable", "An environment variable that has the secret key.",
		func(c *TierConfig) *string { return &c.S3.SecretKeyEnv }),
	textSetting("session_token_env", []string{TierS3}, "AWS_SESSION_TOKEN",
		"name of an environment variable",
		"An environment variable that has the session's token, if there is one.",
		func(c *TierConfig) *string { return &c.S3.SessionTokenEnv }),
}, tlsSettings(TierS3, func(c *TierConfig) *remote.TLSFiles { return &c.S3.Files }), []TierSetting{
	flagSetting("virtual_host", []string{TierS3},
		"Whether the bucket is named in the host's name and not in the path. AWS's own endpoints always do it so.",
		func(c *TierConfig) *bool { return &c.S3.VirtualHost }),
	serdeSetting(TierS3, func(c *TierConfig) *string { return &c.S3.Serde }),
	{
		Key: "pool", Kinds: []string{TierS3}, Default: "32", Unit: "requests",
		Meaning: "The most requests that are under way at a time.",
		set:     whole(1, 1024, func(c *TierConfig) *int { return &c.S3.Pool }),
	},
	timeoutSetting("dial_timeout", "5s", "How long making a connection may take.", []string{TierS3},
		func(c *TierConfig) *time.Duration { return &c.S3.DialTimeout }),
})

func checkEndpoint(v string) error {
	u, err := url.Parse(v)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil ||
		strings.Trim(u.Path, "/") != "" {
		return errors.New("it is not of the form https://host:port")
	}
	return nil
}
