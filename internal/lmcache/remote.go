package lmcache

import (
	"cmp"
	"fmt"
	"net"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// passwordEnv is the variable for a Redis password that LMCache had in its configuration.
const passwordEnv = "REDIS_PASSWORD"

// schemes has the reasons for schemes of remote_url that do not become a tier.
var schemes = map[string]string{
	"lm":                 "LMCache's own server is not spoken to: a redis or s3 tier takes its place",
	"mooncakestore":      "Mooncake is not a tier: a redis or s3 tier shares between hosts",
	"infinistore":        "InfiniStore is not a tier: a redis or s3 tier shares between hosts",
	"nixl":               whyNIXL,
	"blackhole":          "it is for tests",
	"mock":               "it is for tests",
	"benchmark":          "it is for tests",
	"audit":              "there is no auditing proxy",
	"external":           whyPlugin,
	"plugin":             whyPlugin,
	"shmfile":            "the arena is shared memory already",
	"maru":               whyMaru,
	"azure":              "Azure's own protocol is not spoken",
	"gcs":                "Google's own protocol is not spoken; its S3-compatible interface may be used by an s3 tier",
	"gs":                 "Google's own protocol is not spoken; its S3-compatible interface may be used by an s3 tier",
	"hf":                 "it is not a tier",
	"eic":                "it is not a tier",
	"couchbase":          "it is not a tier",
	"bigtable":           "it is not a tier",
	"sagemaker-hyperpod": "it is not a tier",
	"hf3fs":              "3FS is used through its mount, by a disk tier with a directory for each sidecar",
	"s3-rdma":            "objects move over HTTP: an s3 tier at the same endpoint takes its place",
	"cuobject":           "objects move over HTTP: an s3 tier at the same endpoint takes its place",
}

// hostPorts matches the address of a Valkey server without a scheme.
var hostPorts = regexp.MustCompile(
	`^(?:[\w.-]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}(?:\s*,\s*(?:[\w.-]+|\[[0-9A-Fa-f:.]+\]):\d{1,5})*/?$`)

func remoteURL(c *converter, g *given) (verdict, error) {
	if g.off() {
		return unused("it is off"), nil
	}
	text := strings.TrimSpace(g.text())
	scheme, rest, ok := strings.Cut(text, "://")
	switch {
	case ok:
	case hostPorts.MatchString(text):
		scheme, rest = "valkey", text
	default:
		return verdict{}, fmt.Errorf(
			"%s: it is neither a URL, such as valkey://HOST:6379, nor HOST:PORT (it is not repeated: it may have a secret in it)", g.shown)
	}
	switch scheme = strings.ToLower(scheme); scheme {
	case "valkey-sync":
		scheme = "valkey"
		fallthrough
	case "redis", "rediss", "redis-sentinel", "redis-cluster", "valkey", "unix":
		return c.redisTier(g, scheme, rest)
	case "s3":
		return c.s3Tier(g, s3Parts{
			endpoint: rest, region: c.extraText("s3_region", "region"),
			prefix: c.extraText("s3_file_prefix"), style: c.extraText("s3_addressing_style"),
			bucket: c.extraText("s3_bucket"), ca: c.extraText("s3_ca_bundle"),
			plain: !c.extra["disable_tls"].off(), pool: c.smallest("s3_max_io_concurrency",
				"s3_max_inflight_reqs", "s3_num_io_threads"),
			secret: c.extra["aws_access_key_id"] != nil || c.extra["aws_secret_access_key"] != nil,
		})
	case "fs", "file":
		_, path, _ := strings.Cut(rest, "/")
		if _, err := c.diskTier(g, strings.Split("/"+path, ","), 0, nil); err != nil {
			return verdict{}, err
		}
		return became("sidecars do not share a directory: what several hosts are to share goes into a redis or s3 tier", "tiers: disk"), nil
	}
	if why, ok := schemes[scheme]; ok {
		return none(why), nil
	}
	return none("there is no tier of the kind " + strconv.Quote(scheme)), nil
}

func (c *converter) extraText(keys ...string) string {
	for _, key := range keys {
		if g := c.extra[key]; g != nil && g.value != nil {
			return g.text()
		}
	}
	return ""
}

// smallest returns the smallest of some numbers of extra_config, or 0.
func (c *converter) smallest(keys ...string) (n int) {
	for _, key := range keys {
		if g := c.extra[key]; g != nil {
			if v, err := g.integer(1, 1<<20); err == nil && (n == 0 || v < n) {
				n = v
			}
		}
	}
	return min(n, 1024)
}

// redisTier adds the tier of a Redis URL, without its scheme.
func (c *converter) redisTier(g *given, scheme, rest string) (verdict, error) {
	rest, query, _ := strings.Cut(rest, "?")
	user, hasPassword := "", false
	if i := strings.LastIndexByte(rest, '@'); i >= 0 {
		name, _, colon := strings.Cut(rest[:i], ":")
		if u, err := url.PathUnescape(name); err == nil {
			name = u
		}
		user, hasPassword, rest = name, colon, rest[i+1:]
	}
	// Later hosts may repeat the scheme.
	rest = strings.ReplaceAll(strings.ReplaceAll(rest, ", ", ","), scheme+"://", "")
	hosts, path, _ := strings.Cut(rest, "/")
	hosts = strings.TrimRight(hosts, ",")
	db := strings.Trim(path, "/")
	why := ""
	if values, err := url.ParseQuery(query); err == nil {
		if v := values.Get("db"); v != "" {
			db = v
		}
		hasPassword = hasPassword || values.Has("password")
		if u := values.Get("username"); u != "" {
			user = u
		}
		for key := range values {
			if !slices.Contains([]string{"db", "password", "username"}, key) {
				why = "what else the URL's query says is left out"
			}
		}
	}
	form, at, workers := "redis", hosts, 0
	switch scheme {
	case "rediss":
		form = "rediss"
	case "redis-sentinel":
		form = "redis+sentinel"
		master := c.variable("REDIS_SERVICE_NAME")
		if master == "" {
			master, why = "redismaster",
				"the master's name is LMCache's default, as REDIS_SERVICE_NAME was not given"
		}
		at, db = hosts+"/"+master, ""
	case "redis-cluster":
		form, db = "redis+cluster", ""
	case "valkey":
		if strings.EqualFold(c.extraText("valkey_mode"), "cluster") {
			form, db = "redis+cluster", ""
		} else {
			at, _, _ = strings.Cut(hosts, ",")
			if v := c.extraText("valkey_database"); v != "" {
				db = v
			}
		}
		if n := c.extra["valkey_num_workers"]; n != nil {
			v, err := n.integer(1, 1<<20)
			if err != nil {
				return verdict{}, err
			}
			workers = min(v, 256)
		}
		if v := c.extraText("valkey_username"); v != "" {
			user = v
		}
		hasPassword = hasPassword || c.extra["valkey_password"] != nil
	case "unix":
		form, at, db = "redis+unix", "/"+strings.Trim(path, "/"), ""
		if values, err := url.ParseQuery(query); err == nil {
			db = values.Get("db")
		}
	}
	if db != "" {
		if n, err := strconv.Atoi(db); err != nil || n < 0 {
			return verdict{}, fmt.Errorf("%s: its database is not a number", g.shown)
		}
	}
	t := c.addTier("redis", g)
	t.set("url", redisURL(form, user, at), g.origin())
	if db != "" && db != "0" {
		n, _ := strconv.Atoi(db)
		t.set("db", n, "")
	}
	if workers > 0 {
		t.set("workers", workers, c.extra["valkey_num_workers"].origin())
	}
	if hasPassword {
		c.passwordFrom(t, passwordEnv)
		why = strings.TrimPrefix(why+"; the password goes into the sidecar's environment, as "+
			passwordEnv, "; ")
	}
	t.note("LMCache's keys there are not read")
	return became(why, "tiers: redis"), nil
}

func redisURL(form, user, at string) string {
	if user != "" {
		user = url.User(user).String() + "@"
	}
	return form + "://" + user + at
}

func (c *converter) passwordFrom(t *tier, env string) {
	t.set("password_env", env, "")
	t.note("put the password into this variable of the sidecar's environment, or name a password_file")
}

// s3Parts describes a bucket.
type s3Parts struct {
	endpoint      string // the bucket, a host that begins with it, or (style path) the server
	region        string
	prefix        string
	style, bucket string
	ca            string
	plain         bool // no TLS
	pool          int
	secret        bool // credentials were in the configuration
}

func (c *converter) s3Tier(g *given, p s3Parts) (verdict, error) {
	if values, rest, ok := strings.Cut(p.endpoint, "://"); ok {
		p.plain = p.plain || values == "http"
		p.endpoint = rest
	}
	host, path, _ := strings.Cut(strings.TrimSpace(p.endpoint), "/")
	prefix := strings.Trim(strings.Trim(path, "/")+"/"+strings.Trim(p.prefix, "/"), "/")
	why := ""
	bucket, server, virtual := host, "", false
	switch name, _, err := net.SplitHostPort(host); {
	case strings.EqualFold(p.style, "path") || p.bucket != "":
		bucket, server = p.bucket, host
	case strings.Contains(host, ".") || err == nil && strings.Contains(name, "."):
		// a host of the bucket's own
		bucket, server, _ = strings.Cut(host, ".")
		virtual = true
		why = "LMCache takes the host's first name for the bucket, and so does this: where it is none, set url and endpoint"
	case err == nil:
		bucket, server = name, host
		why = "the bucket could not be told from the host: set url and endpoint"
	}
	if bucket == "" {
		return verdict{}, fmt.Errorf("%s: it names no bucket", g.shown)
	}
	t := c.addTier("s3", g)
	t.set("url", "s3://"+strings.Trim(bucket+"/"+prefix, "/"), g.origin())
	if server != "" && !strings.HasSuffix(server, "amazonaws.com") || p.plain {
		scheme := "https://"
		if p.plain {
			scheme = "http://"
		}
		t.set("endpoint", scheme+cmp.Or(server, "s3.amazonaws.com"), "")
		if virtual {
			t.set("virtual_host", true, "")
		}
	} else {
		why = ""
	}
	if strings.Contains(server, "s3express") {
		why = "S3 Express is not spoken: name a bucket of the ordinary kind"
	}
	if p.region != "" {
		t.set("region", p.region, "")
	}
	if p.ca != "" && !p.plain {
		t.set("ca_file", p.ca, "")
	}
	if p.pool > 0 {
		t.set("pool", p.pool, "")
	}
	if p.secret {
		t.note("put the credentials into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of the sidecar's environment, or name a credentials_file")
	}
	t.note("LMCache's objects there are not read")
	return became(why, "tiers: s3"), nil
}

// remotePart returns a rule for a key that was read when the tier of remote_url was made.
func remotePart(kind, setting string) rule {
	return func(c *converter, g *given) (verdict, error) {
		if !c.remoteIs(kind) {
			return unused("remote_url is not of this kind"), nil
		}
		if setting == "pool" {
			if _, err := g.integer(1, 1<<20); err != nil {
				return verdict{}, err
			}
		}
		return became("", strings.TrimSuffix("tiers: "+kind+": "+setting, ": ")), nil
	}
}

// partOfRemote returns a rule for a feature that a tier of remote_url does not have.
func partOfRemote(kind, why string) rule {
	return func(c *converter, g *given) (verdict, error) {
		if !c.remoteIs(kind) {
			return unused("remote_url is not of this kind"), nil
		}
		return lost(why)(c, g)
	}
}

// secretOf returns a rule for a secret, which is not written into a file of settings.
func secretOf(kind, why string) rule {
	return func(c *converter, _ *given) (verdict, error) {
		if !c.remoteIs(kind) {
			return unused("remote_url is not of this kind"), nil
		}
		return became(why, "tiers: "+kind), nil
	}
}

// remoteIs reports whether remote_url made a tier of the kind.
func (c *converter) remoteIs(kind string) bool {
	g := c.config["remote_url"]
	return g != nil && slices.ContainsFunc(c.tiers, func(t *tier) bool {
		return t.kind == kind &&
			t.from == g.shown
	})
}

func remoteSerde(c *converter, g *given) (verdict, error) {
	switch name := strings.ToLower(g.text()); name {
	case "", "none", "naive", "null":
		return builtIn("serde: raw"), nil
	default:
		v := c.onTiers(g, "redis", "serde", "lossless")
		if w := c.onTiers(g, "s3", "serde", "lossless"); v.outcome == Unused {
			v = w
		}
		if v.outcome != Unused {
			v.why = "there is no " + name +
				": lossless is smaller than raw and changes nothing; fp8 and int8 are half the size and change the pages a little"
		} else {
			v.why = "there is no remote tier"
		}
		return v, nil
	}
}

// pluginPaths returns the directories of the fs instances of remote_storage_plugins.
func (c *converter) pluginPaths(name string) *given {
	if g := c.extra["remote_storage_plugin."+name+".base_path"]; g != nil {
		return g
	}
	return c.extra["fs_base_path"]
}

func remotePlugins(c *converter, g *given) (verdict, error) {
	if g.off() {
		return unused("there are none"), nil
	}
	var left []string
	made := false
	for _, name := range g.list() {
		kind, _, _ := strings.Cut(name, ".")
		paths := c.pluginPaths(name)
		if kind != "fs" || paths.off() {
			left = append(left, name)
			continue
		}
		if _, err := c.diskTier(paths, paths.list(), 0, nil); err != nil {
			return verdict{}, err
		}
		made = true
	}
	switch {
	case !made:
		return none("none of these is a tier of Lookaside's: disk, redis and s3 are"), nil
	case len(left) > 0:
		return became("without an equivalent are: "+strings.Join(left, ", "), "tiers: disk"), nil
	}
	return became("sidecars do not share a directory: what several hosts are to share goes into a redis or s3 tier", "tiers: disk"), nil
}

func remotePluginKey(c *converter, g *given) (verdict, error) {
	if strings.HasSuffix(g.key, ".base_path") && slices.ContainsFunc(c.tiers,
		func(t *tier) bool { return t.from == g.shown }) {
		return became("", "tiers: disk: paths"), nil
	}
	return partOfPlugins("the disk tier has nothing like it")(c, g)
}

// partOfPlugins returns a rule for keys of LMCache's file-system connector.
func partOfPlugins(why string) rule {
	return func(c *converter, g *given) (verdict, error) {
		if slices.ContainsFunc(c.tiers, func(t *tier) bool { return t.from == g.shown }) {
			return became("", "tiers: disk: paths"), nil
		}
		if u := c.config["remote_url"]; c.config["remote_storage_plugins"].off() && (u == nil ||
			!strings.HasPrefix(u.text(), "fs:")) {
			return unused("there is no file-system connector"), nil
		}
		return lost(why)(c, g)
	}
}

func storagePlugins(c *converter, g *given) (verdict, error) {
	if g.off() {
		return unused("there are none"), nil
	}
	left := slices.DeleteFunc(g.list(), func(name string) bool { return name == "dax" })
	switch {
	case len(left) == 0 && c.extra["dax.device_path"].off():
		return none("extra_config names no dax.device_path"), nil
	case len(left) == 0:
		return became("", "tiers: dax"), nil
	case len(left) < len(g.list()):
		return became("without an equivalent are: "+strings.Join(left, ", "), "tiers: dax"), nil
	}
	return none(whyPlugin), nil
}
