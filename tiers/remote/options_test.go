package remote

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
)

func TestParseRedisURL(t *testing.T) {
	for text, want := range map[string]RedisOptions{
		"redis://h":           {Addrs: []string{"h:6379"}},
		"redis://me@h:1/3":    {Addrs: []string{"h:1"}, User: "me", DB: 3},
		"rediss://[::1]:2/":   {Addrs: []string{"[::1]:2"}, TLS: true},
		"redis://[fe80::1]/1": {Addrs: []string{"[fe80::1]:6379"}, DB: 1},
		"redis+sentinel://a:1,b,c:3/master/2?sentinel_user=s&sentinel_password_env=X": {Mode: RedisSentinel, Addrs: []string{"a:1", "b:26379", "c:3"}, Master: "master", DB: 2,
			SentinelUser: "s", SentinelPassword: Secret{Env: "X"}},
		"rediss+cluster://u@a:1,b:2?ca_file=/ca&cert_file=/c&key_file=/k": {Mode: RedisCluster,
			Addrs: []string{"a:1", "b:2"}, User: "u", TLS: true,
			Files: TLSFiles{"/ca", "/c", "/k"}},
		"redis+unix:///run/redis.sock?db=4": {Addrs: []string{"/run/redis.sock"}, DB: 4},
		"redis://h?ttl=24h&serde=raw&pool=3&prefix=a/b&password_file=/p&dial_timeout=1s": {Addrs: []string{"h:6379"}, TTL: 24 * time.Hour, Serde: "raw",
			Pool: 3, Prefix: "a/b", Password: Secret{File: "/p"},
			DialTimeout: time.Second},
	} {
		if got, err := ParseRedisURL(text); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s:\n got %+v, %v\nwant %+v", text, got, err, want)
		}
	}
	for text, want := range map[string]string{
		"h:6379":                      "not a URL",
		"redis://u:hunter2@h":         "password_file",
		"redis://u:hunter2%zz@h":      "not a URL",
		"redis://u:hunter2@h:x:y/%zz": "not a URL",
		"redis://u:hunter2/x@h":       "not a URL",
		"redis://h?password=hunter2":  "password_file",
		"redis://h?passwort=hunter2":  `"passwort"`,
		"redis://h?a=1;b=hunter2":     "not a URL",
		"redis://":                    "host is missing",
		"redis+cluster://a,,b":        "host is missing",
		"redis://a,b":                 "2 addresses",
		"redis+cluster://a/1":         "database 1",
		"redis+sentinel://a":          "master",
		"redis://h/x":                 `"x" is not a number`,
		"http://h":                    `scheme "http"`,
		"redis+unix://h/x":            "redis+unix:///run/redis.sock",
		"redis://h?ca_file=/x":        "without TLS",
		"redis://h?ttl=5":             "24h",
		"redis://h?ttl=5ms":           "below 1s",
		"redis://h?split=1":           "split",
		"redis://h?serde=pickle":      `"pickle" is no codec`,
		"redis://h?pool=2000":         "pool",
		"redis://h?pool=2&pool=3":     "twice",
		"redis://h?prefix=a*":         "prefix",
		"redis://h#x":                 "fragment",
	} {
		_, err := ParseRedisURL(text)
		if err == nil || !strings.Contains(err.Error(), want) ||
			strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v, want something of %q, and no password", text, err, want)
		}
	}
}

func TestParseS3URL(t *testing.T) {
	for text, want := range map[string]S3Options{
		"s3://bbb": {Bucket: "bbb"},
		"s3://b.c/p/q/?endpoint=http://h:9000&region=eu&credentials_file=/c&profile=x&pool=4&serde=raw": {Bucket: "b.c", Prefix: "p/q", Endpoint: "http://h:9000", Region: "eu",
			CredentialsFile: "/c", Profile: "x", Pool: 4, Serde: "raw"},
		"s3://bbb?endpoint=https://h&ca_file=/ca&virtual_host=true&access_key_env=A&secret_key_env=S&session_token_env=T": {Bucket: "bbb", Endpoint: "https://h",
			Files: TLSFiles{CA: "/ca"}, VirtualHost: true, AccessKeyEnv: "A", SecretKeyEnv: "S",
			SessionTokenEnv: "T"},
	} {
		if got, err := ParseS3URL(text); err != nil || got != want {
			t.Errorf("%s:\n got %+v, %v\nwant %+v", text, got, err, want)
		}
	}
	for text, want := range map[string]string{
		"b/p":                                   "not a URL",
		"s3://B":                                "bucket",
		"s3:///p":                               "s3://bucket/prefix",
		"s3://key:hunter2@bbb":                  "credentials_file",
		"s3://bbb?endpoint=h:9000":              "endpoint",
		"s3://bbb?endpoint=http://u:p@h":        "endpoint",
		"s3://bbb?endpont=http://h":             `"endpont"`,
		"s3://bbb?ca_file=/x&endpoint=http://h": "files for TLS",
		"s3://bbb?virtual_host=1":               "neither",
		"s3://bbb/..%2f*":                       "prefix",
	} {
		if _, err := ParseS3URL(text); err == nil || !strings.Contains(err.Error(), want) ||
			strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v, want something of %q, and no secret", text, err, want)
		}
	}
}

func TestSecret(t *testing.T) {
	file := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(file, []byte(" hunter 2\r\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("REMOTE_TEST_SECRET", "hunter3")
	for _, c := range []struct {
		s    Secret
		want string
		fail string
	}{
		{Secret{}, "", ""},
		{Secret{File: file}, " hunter 2", ""},
		{Secret{Env: "REMOTE_TEST_SECRET"}, "hunter3", ""},
		{Secret{Env: "REMOTE_TEST_NONE"}, "", "REMOTE_TEST_NONE is not set"},
		{Secret{File: "/none"}, "", "/none"},
		{Secret{File: os.DevNull}, "", "is empty"},
		{Secret{File: file, Env: "REMOTE_TEST_SECRET"}, "", "name one"},
	} {
		got, err := c.s.read()
		if got != c.want || (err != nil) != (c.fail != "") ||
			err != nil && (!strings.Contains(err.Error(), c.fail) ||
				strings.Contains(err.Error(), "hunter")) {
			t.Errorf("%+v: %q, %v", c.s, got, err)
		}
	}
}
