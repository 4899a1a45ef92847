package remote

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"lookaside/tiers/serde"
)

// Secret says where a secret is: in a file or in an environment variable. If both are empty there
// is none. Only its place is ever shown.
type Secret struct {
	File string // its content without trailing white space is the secret
	Env  string // name of the variable
}

// read reads the secret. It is read again for each connection, so it can be changed.
func (s Secret) read() (string, error) {
	switch {
	case s.File != "" && s.Env != "":
		return "", fmt.Errorf("the file %s and the environment variable %s are both named: name one", s.File, s.Env)
	case s.File != "":
		b, err := os.ReadFile(s.File)
		if err != nil {
			return "", err
		}
		if v := strings.TrimRight(string(b), "\r\n\t "); v != "" {
			return v, nil
		}
		return "", fmt.Errorf("%s is empty", s.File)
	case s.Env != "":
		if v := os.Getenv(s.Env); v != "" {
			return v, nil
		}
		return "", fmt.Errorf("the environment variable %s is not set", s.Env)
	}
	return "", nil
}

// TLSFiles are the files of a TLS connection. The server's certificate and name are always
// verified.
type TLSFiles struct {
	// PEM: the authorities that sign the server's certificate. Default: the system's
	CA   string
	Cert string // PEM: our certificate, if the server requires one. Needs Key. Default: none
	Key  string // PEM: the key of Cert
}

// RedisMode says how to reach a Redis service.
type RedisMode uint8

const (
	RedisSingle   RedisMode = iota // one server
	RedisSentinel                  // servers watched by sentinels, which name the master
	RedisCluster                   // a cluster, any of whose nodes name the others
)

// RedisOptions configures the tier on a Redis or Valkey service. A zero field takes the stated
// default.
type RedisOptions struct {
	Mode RedisMode
	// Addrs are the server, the sentinels or some nodes of the cluster, as host:port. A single
	// server may be the absolute path of a Unix socket. Required.
	Addrs []string
	// Master is the master's name at the sentinels. Required with RedisSentinel, refused otherwise.
	Master string
	// DB is the number of the database. Default 0, a cluster's only one.
	DB int
	// User is the name to log in with. Default: the server's default user.
	User string
	// Password to log in with. Default: none.
	Password Secret
	// SentinelUser and SentinelPassword are for the sentinels. Default: none.
	SentinelUser     string
	SentinelPassword Secret
	// TLS encrypts connections, those to sentinels too. Files requires it.
	TLS   bool
	Files TLSFiles
	// Prefix begins all keys. It has letters, digits and _.:-/ . Services with the same prefix
	// share their chunks. Default "la1".
	Prefix string
	// TTL is how long the server keeps a chunk, at least a second. Default 0: until it needs room
	// (its maxmemory-policy), or forever.
	TTL time.Duration
	// Serde names a codec of package serde. Default "raw".
	Serde string
	// SplitBytes is the largest value. Larger chunks are split into several values, sent one after
	// another. From 64 KiB to 512 MiB, the server's own limit. Default 8 MiB.
	SplitBytes int64
	// Pool is the most connections; in a cluster, to each server. Default 16.
	Pool int
	// DialTimeout bounds the making of a connection. Default 2 s.
	DialTimeout time.Duration
}

// S3Options configures the tier on a bucket. A zero field takes the stated default.
type S3Options struct {
	// Endpoint is the server, as http:// or https:// and host[:port]. Default
	// https://s3.amazonaws.com.
	Endpoint string
	// Bucket must exist. Required.
	Bucket string
	// Prefix begins the names of all objects, with a slash behind it. Default "la1".
	Prefix string
	// Region of the bucket. Default: as the server says.
	Region string
	// CredentialsFile has the form of ~/.aws/credentials; Profile is the section in it, by default
	// "default". Without a file, the credentials are read from the variables AccessKeyEnv (default
	// AWS_ACCESS_KEY_ID), SecretKeyEnv (AWS_SECRET_ACCESS_KEY) and SessionTokenEnv
	// (AWS_SESSION_TOKEN). If the first two are unset, requests are not signed.
	CredentialsFile string
	Profile         string
	AccessKeyEnv    string
	SecretKeyEnv    string
	SessionTokenEnv string
	// Files are for an endpoint with https.
	Files TLSFiles
	// VirtualHost puts the bucket into the host's name, as AWS requires, and not into the path, as
	// most others do. Default: for AWS's endpoints only.
	VirtualHost bool
	// Serde names a codec of package serde. Default "raw".
	Serde string
	// Pool is the most concurrent requests. Default 32.
	Pool int
	// DialTimeout bounds the making of a connection. Default 5 s.
	DialTimeout time.Duration
}

const (
	defaultPrefix = "la1"
	// defaultSplit keeps a value far below the server's limit, 512 MiB, and keeps commands few:
	// even at 8 GB/s the transfer of a value takes a millisecond.
	defaultSplit = 8 << 20
	minSplit     = 64 << 10
	maxSplit     = 512 << 20
)

var prefixForm = regexp.MustCompile(`^[A-Za-z0-9_.:-]+(/[A-Za-z0-9_.:-]+)*$`)

var bucketForm = regexp.MustCompile(`^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$`)

func validPrefix(p string) error {
	if len(p) > 256 || !prefixForm.MatchString(p) {
		return fmt.Errorf("prefix %q is not of letters, digits and _.:- with single slashes between them", p)
	}
	return nil
}

func setDefault[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

// validate checks the options and fills in the defaults.
func (o *RedisOptions) validate() error {
	setDefault(&o.Prefix, defaultPrefix)
	setDefault(&o.Serde, "raw")
	setDefault(&o.SplitBytes, defaultSplit)
	setDefault(&o.Pool, 16)
	setDefault(&o.DialTimeout, 2*time.Second)
	if len(o.Addrs) == 0 {
		return errors.New("no address")
	}
	for _, a := range o.Addrs {
		if strings.HasPrefix(a, "/") && o.Mode == RedisSingle && !o.TLS {
			continue
		}
		if _, port, err := net.SplitHostPort(a); err != nil || port == "" {
			return fmt.Errorf("address %q is not of the form host:port", a)
		}
	}
	if _, err := serde.New(o.Serde); err != nil {
		return fmt.Errorf("serde: %w", err)
	}
	switch {
	case o.Mode > RedisCluster:
		return fmt.Errorf("mode %d is unknown", o.Mode)
	case o.Mode == RedisSingle && len(o.Addrs) > 1:
		return fmt.Errorf("%d addresses of a single server", len(o.Addrs))
	case (o.Mode == RedisSentinel) != (o.Master != ""):
		return errors.New("the master's name belongs to sentinels, and they need it")
	case o.DB < 0 || o.Mode == RedisCluster && o.DB != 0:
		return fmt.Errorf("database %d: from 0 on, and a cluster has only 0", o.DB)
	case !o.TLS && o.Files != TLSFiles{}:
		return errors.New("files for TLS without TLS")
	case o.TTL != 0 && o.TTL < time.Second:
		return fmt.Errorf("ttl %v is below 1s", o.TTL)
	case o.SplitBytes < minSplit || o.SplitBytes > maxSplit:
		return fmt.Errorf("split %d is not from %d to %d", o.SplitBytes, minSplit, maxSplit)
	case o.Pool < 1 || o.Pool > 1024:
		return fmt.Errorf("pool %d is not from 1 to 1024", o.Pool)
	case o.DialTimeout < 0:
		return fmt.Errorf("dial timeout %v", o.DialTimeout)
	}
	return validPrefix(o.Prefix)
}

func (o *S3Options) validate() error {
	setDefault(&o.Endpoint, "https://s3.amazonaws.com")
	setDefault(&o.Prefix, defaultPrefix)
	setDefault(&o.Serde, "raw")
	setDefault(&o.Profile, "default")
	setDefault(&o.AccessKeyEnv, "AWS_ACCESS_KEY_ID")
	setDefault(&o.SecretKeyEnv, "AWS_SECRET_ACCESS_KEY")
	setDefault(&o.SessionTokenEnv, "AWS_SESSION_TOKEN")
	setDefault(&o.Pool, 32)
	setDefault(&o.DialTimeout, 5*time.Second)
	if _, err := serde.New(o.Serde); err != nil {
		return fmt.Errorf("serde: %w", err)
	}
	u, err := url.Parse(o.Endpoint)
	switch {
	case err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil ||
		strings.Trim(u.Path, "/") != "" || u.RawQuery != "":
		return errors.New("endpoint: it is not of the form https://host:port")
	case u.Scheme == "http" && o.Files != TLSFiles{}:
		return errors.New("files for TLS, and the endpoint is http")
	case !bucketForm.MatchString(o.Bucket):
		return fmt.Errorf("bucket %q is not 3 to 63 letters, digits, hyphens and dots, all in lower case", o.Bucket)
	case o.Pool < 1 || o.Pool > 1024:
		return fmt.Errorf("pool %d is not from 1 to 1024", o.Pool)
	case o.DialTimeout < 0:
		return fmt.Errorf("dial timeout %v", o.DialTimeout)
	}
	return validPrefix(o.Prefix)
}

var (
	errNoURL = errors.New(
		"it is not a URL (what was given is not repeated here, for it may have a secret in it)")
	errSecretInURL = errors.New(
		"the URL has a password in it, which commands and settings show to others: take it out and set password_file or password_env")
	errSecretInS3URL = errors.New(
		"the URL has credentials in it, which commands and settings show to others: set credentials_file or the environment variables")
)

// query reads the keys of a URL's query. Keys left over at the end are an error.
type query struct {
	values url.Values
	err    error
}

func (q *query) fail(key string, err error) {
	if q.err == nil {
		q.err = fmt.Errorf("%s: %w", key, err)
	}
}

func (q *query) text(key string) string {
	v := q.values[key]
	delete(q.values, key)
	if len(v) > 1 {
		q.fail(key, errors.New("it is there twice"))
	}
	if len(v) == 0 {
		return ""
	}
	return v[0]
}

func (q *query) number(key string) int {
	v := q.text(key)
	if v == "" {
		return 0
	}
	n, err := strconv.Atoi(v)
	if err != nil || n < 1 {
		q.fail(key, fmt.Errorf("%q is not a number from 1 on", v))
	}
	return n
}

func (q *query) duration(key string) time.Duration {
	v := q.text(key)
	if v == "" {
		return 0
	}
	d, err := time.ParseDuration(v)
	if err != nil || d < 0 {
		q.fail(key, fmt.Errorf("%q is not a duration such as 90s or 24h", v))
	}
	return d
}

func (q *query) secret(key string) Secret {
	return Secret{File: q.text(key + "_file"), Env: q.text(key + "_env")}
}

func (q *query) files() TLSFiles {
	return TLSFiles{CA: q.text("ca_file"), Cert: q.text("cert_file"), Key: q.text("key_file")}
}

// end returns the first error.
func (q *query) end() error {
	if q.err != nil || len(q.values) == 0 {
		return q.err
	}
	var left []string
	for key := range q.values {
		left = append(left, strconv.Quote(key))
	}
	slices.Sort(left)
	return fmt.Errorf("unknown in the query: %s", strings.Join(left, ", "))
}

// parse is url.Parse without its errors, which repeat the URL and so perhaps a secret. It also
// accepts several hosts with ports, which stay as written in the URL's Host.
func parse(text string) (*url.URL, *query, error) {
	scheme, rest, ok := strings.Cut(text, "://")
	if !ok {
		return nil, nil, errNoURL
	}
	end := strings.IndexAny(rest, "/?#")
	if end < 0 {
		end = len(rest)
	}
	hosts := rest[strings.LastIndexByte(rest[:end], '@')+1 : end]
	u, err := url.Parse(scheme + "://" + strings.TrimSuffix(rest[:end], hosts) + rest[end:])
	if err != nil || strings.ContainsAny(hosts, "%\\\"<> ") {
		return nil, nil, errNoURL
	}
	u.Host = hosts
	values, err := url.ParseQuery(u.RawQuery)
	if err != nil || u.Opaque != "" {
		return nil, nil, errNoURL
	}
	q := &query{values: values}
	if u.Fragment != "" {
		q.fail("#", errors.New("there is nothing that a fragment could say"))
	}
	return u, q, nil
}

// ParseRedisURL reads the URL form of a Redis service:
//
//	redis://[USER@]HOST[:PORT][/DB]                          one server
//	redis+sentinel://[USER@]HOST[:PORT],…/MASTER[/DB]        by sentinels (port 26379)
//	redis+cluster://[USER@]HOST[:PORT],…                     a cluster
//	redis+unix://[USER@]/PATH?db=DB                          one server's Unix socket
//
// with rediss in place of redis for TLS. A query may have password_file, password_env,
// sentinel_user, sentinel_password_file, sentinel_password_env, ca_file, cert_file, key_file,
// prefix, ttl, serde, pool and dial_timeout. A password in the URL is refused, and no error
// repeats what could be one.
func ParseRedisURL(text string) (RedisOptions, error) {
	var o RedisOptions
	u, q, err := parse(text)
	if err != nil {
		return o, err
	}
	if _, has := u.User.Password(); has || q.values.Has("password") ||
		q.values.Has("sentinel_password") {
		return o, errSecretInURL
	}
	o.User = u.User.Username()
	port, path := "6379", strings.Trim(u.Path, "/")
	db := func(text string) {
		if text == "" {
			return
		}
		if o.DB, err = strconv.Atoi(text); err != nil {
			q.fail("database", fmt.Errorf("%q is not a number", text))
		}
	}
	switch u.Scheme {
	case "redis", "rediss":
		db(path)
	case "redis+sentinel", "rediss+sentinel":
		o.Mode, port = RedisSentinel, "26379"
		master, number, _ := strings.Cut(path, "/")
		o.Master = master
		db(number)
	case "redis+cluster", "rediss+cluster":
		o.Mode = RedisCluster
		db(path)
	case "redis+unix":
		db(q.text("db"))
		if u.Host != "" || path == "" {
			return o, errors.New("a Unix socket has no host and a path: redis+unix:///run/redis.sock")
		}
		o.Addrs = []string{u.Path}
	default:
		return o, fmt.Errorf("scheme %q is none of redis, redis+sentinel, redis+cluster (each with rediss for TLS) and redis+unix", u.Scheme)
	}
	o.TLS = strings.HasPrefix(u.Scheme, "rediss")
	if o.Addrs == nil {
		for host := range strings.SplitSeq(u.Host, ",") {
			h := url.URL{Host: host}
			if strings.Contains(h.Hostname(), ":") && host[0] != '[' {
				// the text behind the colon is not a port; it may be a password with a slash
				return o, errNoURL
			}
			if h.Hostname() == "" {
				return o, fmt.Errorf("a host is missing: %s://host:%s", u.Scheme, port)
			}
			at := h.Port()
			setDefault(&at, port)
			o.Addrs = append(o.Addrs, net.JoinHostPort(h.Hostname(), at))
		}
	}
	o.Password, o.SentinelUser, o.SentinelPassword = q.secret("password"), q.text("sentinel_user"),
		q.secret("sentinel_password")
	o.Files, o.Prefix, o.TTL, o.Serde = q.files(), q.text("prefix"), q.duration("ttl"),
		q.text("serde")
	o.Pool, o.DialTimeout = q.number("pool"), q.duration("dial_timeout")
	if err := q.end(); err != nil {
		return o, err
	}
	checked := o
	return o, checked.validate()
}

// ParseS3URL reads the URL form of a bucket: s3://BUCKET[/PREFIX]. A query may have endpoint,
// region, credentials_file, profile, access_key_env, secret_key_env, session_token_env, ca_file,
// cert_file, key_file, virtual_host (true or false), serde, pool and dial_timeout.
func ParseS3URL(text string) (S3Options, error) {
	var o S3Options
	u, q, err := parse(text)
	if err != nil {
		return o, err
	}
	if u.User != nil {
		return o, errSecretInS3URL
	}
	if u.Scheme != "s3" || u.Host == "" {
		return o, errors.New("it is not of the form s3://bucket/prefix")
	}
	o.Bucket, o.Prefix = u.Host, strings.Trim(u.Path, "/")
	o.Endpoint, o.Region, o.Serde = q.text("endpoint"), q.text("region"), q.text("serde")
	o.CredentialsFile, o.Profile = q.text("credentials_file"), q.text("profile")
	o.AccessKeyEnv, o.SecretKeyEnv, o.SessionTokenEnv = q.text("access_key_env"),
		q.text("secret_key_env"), q.text("session_token_env")
	o.Files, o.Pool, o.DialTimeout = q.files(), q.number("pool"), q.duration("dial_timeout")
	switch v := q.text("virtual_host"); v {
	case "", "false":
	case "true":
		o.VirtualHost = true
	default:
		q.fail("virtual_host", fmt.Errorf("%q is neither true nor false", v))
	}
	if err := q.end(); err != nil {
		return o, err
	}
	checked := o
	return o, checked.validate()
}
