package lmcache

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// An adapter is one of the L2 adapters of LMCache's server.
type adapter struct {
	where string // for messages
	kind  string
	keys  map[string]*given
}

// readAdapter reads an adapter's JSON.
func (c *converter) readAdapter(where string, v any) error {
	m, ok := v.(map[string]any)
	if !ok {
		return fmt.Errorf("%s: it is not a JSON object", where)
	}
	kind, ok := m["type"].(string)
	if !ok || kind == "" {
		return fmt.Errorf("%s: it has no type", where)
	}
	a := adapter{where, strings.ToLower(kind), map[string]*given{}}
	for key, value := range m {
		a.keys[key] = &given{key, where + ": " + key, "--l2-adapter", value}
	}
	c.adapters = append(c.adapters, a)
	return nil
}

// adapterWhys has the reasons for adapters that do not become a tier.
var adapterWhys = map[string]string{
	"raw_block":          "a disk tier is made in directories: make a file system on the device",
	"mooncake_store":     "Mooncake is not a tier: a redis or s3 tier shares between hosts",
	"aerospike":          "Aerospike is not a tier: a redis or s3 tier shares between hosts",
	"bigtable":           "Bigtable is not a tier: a redis or s3 tier shares between hosts",
	"sagemaker-hyperpod": "it is not a tier: a redis or s3 tier shares between hosts",
	"hfbucket":           "it is not a tier: an s3 tier takes its place",
	"gcs":                "Google's own protocol is not spoken; its S3-compatible interface may be used by an s3 tier",
	"wqs_store":          "it is not a tier: a redis or s3 tier shares between hosts",
	"hf3fs":              "3FS is used through its mount, by a disk tier with a directory for each sidecar",
	"valkey_rdma":        "Redis and Valkey are spoken to over TCP: a redis tier at the same server takes its place",
	"phx":                whyGDS,
	"blkio":              "a disk tier is made in directories: make a file system on the device",
	"dram":               "memory belongs into the arena: raise arena.limit",
	"p2p":                whyP2P,
	"pd":                 whyPD,
	"cxl_peer":           whyP2P,
	"mock":               "it is for tests",
	"fault_inject":       "it is for tests",
	"plugin":             whyPlugin,
	"native_plugin":      whyPlugin,
}

// applyAdapters turns the adapters into tiers, in their order.
func (c *converter) applyAdapters() error {
	for i := range c.adapters {
		if err := c.applyAdapter(&c.adapters[i]); err != nil {
			return err
		}
	}
	return nil
}

func (c *converter) applyAdapter(a *adapter) error {
	self := a.keys["type"]
	told := map[string]bool{"type": true}
	tell := func(v verdict, keys ...string) {
		for _, key := range keys {
			if g := a.keys[key]; g != nil && !told[key] {
				told[key] = true
				c.tell(g, v)
			}
		}
	}
	before := len(c.tiers)
	v, err := c.adapterTier(a, tell)
	if err != nil {
		return err
	}
	c.tell(self, v)
	if len(c.tiers) > before {
		t := c.tiers[len(c.tiers)-1]
		t.from = a.where + ", type " + a.kind
		if err := c.commonKeys(a, t, tell); err != nil {
			return err
		}
	}
	for _, key := range slices.Sorted(maps.Keys(a.keys)) {
		switch {
		case told[key]:
		case len(c.tiers) > before:
			c.tell(a.keys[key], verdict{Unknown, nil,
				"LMCache has no such key of adapters of type " + a.kind})
		default:
			c.tell(a.keys[key], none("it belongs to an adapter that is no tier"))
		}
	}
	return nil
}

// text returns a key's value, or "".
func (a *adapter) text(key string) string {
	if g := a.keys[key]; g != nil {
		return g.text()
	}
	return ""
}

// capacity returns max_capacity_gb in bytes; 0 if there is no limit.
func (a *adapter) capacity() (int64, error) {
	if g := a.keys["max_capacity_gb"]; g != nil {
		return g.bytes()
	}
	return 0, nil
}

// commonKeys converts the keys that adapters of every type have.
func (c *converter) commonKeys(a *adapter, t *tier, tell func(verdict, ...string)) error {
	tell(builtIn(whyPersist), "persist_enabled")
	if g := a.keys["eviction"]; g != nil {
		m, _ := g.value.(map[string]any)
		policy := strings.ToLower((&given{value: m["eviction_policy"]}).text())
		switch p, ok := policies[policy]; {
		case (t.kind == "disk" || t.kind == "dax") && ok:
			t.set("eviction", p.name, g.shown+".eviction_policy: "+policy)
			tell(became(strings.TrimPrefix(p.why+"; "+whyPolicy, "; "),
				"tiers: "+t.kind+": eviction"), "eviction")
		case t.kind == "disk" || t.kind == "dax":
			tell(none("what is full evicts: eviction is left at its default, adaptive"), "eviction")
		default:
			tell(none("the server makes room itself, by its maxmemory-policy or lifecycle rules; a redis tier may have a ttl"), "eviction")
		}
	}
	if g := a.keys["serde"]; g != nil {
		m, _ := g.value.(map[string]any)
		name := strings.ToLower((&given{value: m["type"]}).text())
		switch {
		case g.value == nil:
			tell(unused("it is off"), "serde")
		case t.kind == "disk" || t.kind == "dax":
			tell(none("local tiers keep pages as they are"), "serde")
		case name == "fp8":
			t.set("serde", "fp8", g.shown+": fp8")
			tell(became("", "tiers: "+t.kind+": serde"), "serde")
		default:
			t.set("serde", "lossless", g.shown+": "+name)
			tell(became("there is no "+name+": lossless is smaller than raw and changes nothing",
				"tiers: "+t.kind+": serde"), "serde")
		}
	}
	tell(none("chunks come from the arena, of which there is one"), "affinity_tag")
	tell(builtIn("sidecars with the same prefix of a redis or s3 tier share it; a disk or dax tier is its sidecar's own"), "shared")
	return nil
}

// workers sets a key to a number of workers, if it is given.
func (a *adapter) workers(t *tier, tell func(verdict, ...string), to string, most int,
	keys ...string) error {
	for _, key := range keys {
		g := a.keys[key]
		if g == nil {
			continue
		}
		n, err := g.integer(1, 1<<20)
		if err != nil {
			return err
		}
		t.set(to, min(n, most), g.origin())
		tell(became("", "tiers: "+t.kind+": "+to), key)
	}
	return nil
}

// adapterTier adds the tier of an adapter.
func (c *converter) adapterTier(a *adapter, tell func(verdict, ...string)) (verdict, error) {
	self := a.keys["type"]
	switch a.kind {
	case "dax":
		return c.daxAdapter(a, tell)

	case "fs", "fs_native":
		g := a.keys["base_path"]
		if g.off() {
			return verdict{}, fmt.Errorf("%s: it has no base_path", a.where)
		}
		n, err := a.capacity()
		if err != nil {
			return verdict{}, err
		}
		t, err := c.diskTier(g, g.list(), n, a.keys["max_capacity_gb"])
		if err != nil {
			return verdict{}, err
		}
		tell(became("", "tiers: disk: paths"), "base_path")
		if n > 0 {
			tell(became("", "tiers: disk: capacity"), "max_capacity_gb")
		}
		tell(unused("0 is no limit"), "max_capacity_gb")
		if d := a.keys["use_odirect"]; d != nil && !d.boolean() {
			t.set("direct", "never", d.origin())
			tell(became("", "tiers: disk: direct"), "use_odirect")
		}
		tell(builtIn("O_DIRECT is used where the file system allows it"), "use_odirect")
		tell(builtIn("every chunk has checksums, which are always looked at"), "checksum")
		tell(builtIn("chunks lie in slabs of equal slots, which are written in place: there are no temporary files and nothing to read ahead"), "relative_tmp_dir", "read_ahead_size")
		if err := a.workers(t, tell, "workers", 256, "num_workers", "read_io_depth"); err != nil {
			return verdict{}, err
		}
		tell(none("how much is read at a time is not bounded in bytes, but by workers"),
			"read_max_bytes_in_flight", "per_op_workers")
		return became("sidecars do not share a directory: what several hosts are to share goes into a redis or s3 tier", "tiers: disk"), nil

	case "resp", "valkey":
		return c.redisAdapter(a, tell)

	case "s3":
		g := a.keys["s3_endpoint"]
		if g.off() {
			return verdict{}, fmt.Errorf("%s: it has no s3_endpoint", a.where)
		}
		p := s3Parts{
			endpoint: g.text(), region: a.text("s3_region"), style: a.text("s3_addressing_style"),
			bucket: a.text("s3_bucket"), ca: a.text("s3_ca_bundle"),
			prefix: a.text("s3_file_prefix"),
			plain:  !a.keys["disable_tls"].off(), secret: a.keys["aws_access_key_id"] != nil ||
				a.keys["aws_secret_access_key"] != nil,
		}
		if n := a.keys["s3_num_io_threads"]; n != nil {
			v, err := n.integer(1, 1<<20)
			if err != nil {
				return verdict{}, err
			}
			p.pool = min(v, 1024)
		}
		v, err := c.s3Tier(g, p)
		if err != nil {
			return verdict{}, err
		}
		tell(became("", "tiers: s3: url, endpoint"), "s3_endpoint", "s3_bucket",
			"s3_addressing_style", "disable_tls", "s3_file_prefix")
		tell(became("", "tiers: s3: region"), "s3_region")
		tell(became("", "tiers: s3: ca_file"), "s3_ca_bundle")
		tell(became("", "tiers: s3: pool"), "s3_num_io_threads")
		tell(became("put it into the environment of the sidecar, as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a credentials_file", "tiers: s3"), "aws_access_key_id", "aws_secret_access_key")
		if h := a.keys["s3_prefer_http2"]; h != nil && h.off() {
			tell(builtIn("HTTP/1.1 is spoken"), "s3_prefer_http2")
		}
		tell(none("HTTP/1.1 is spoken, over as many connections as pool says"), "s3_prefer_http2")
		if e := a.keys["s3_enable_s3express"]; e.off() {
			tell(unused("it is off"), "s3_enable_s3express")
		}
		tell(none("S3 Express is not spoken"), "s3_enable_s3express")
		c.noLimit(a, tell)
		return v, nil

	case "nixl_store", "nixl_store_dynamic", "nixl_native":
		params := map[string]*given{}
		if m, ok := a.keys["backend_params"]; ok {
			nested, _ := m.value.(map[string]any)
			for key, value := range nested {
				params[key] = &given{key, m.shown + "." + key, m.from, value}
			}
		}
		v, err := c.nixlTier(self, a.text("backend"), params)
		if err != nil || v.outcome == None {
			return v, err
		}
		tell(became("", v.to...), "backend", "backend_params")
		tell(none("room is counted in bytes: capacity"), "pool_size")
		n, err := a.capacity()
		if err != nil {
			return verdict{}, err
		}
		if t := c.tiers[len(c.tiers)-1]; n > 0 && t.kind == "disk" {
			t.set("capacity", size(n), a.keys["max_capacity_gb"].origin())
			tell(became("", "tiers: disk: capacity"), "max_capacity_gb")
		}
		c.noLimit(a, tell)
		tell(none(whyNIXL), "num_workers", "num_threads", "per_op_workers")
		return v, nil
	}
	if why, ok := adapterWhys[a.kind]; ok {
		return none(why), nil
	}
	return verdict{Unknown, nil, "LMCache 0.5 has no such type"}, nil
}

// noLimit records the verdict on a limit that the server itself enforces.
func (c *converter) noLimit(a *adapter, tell func(verdict, ...string)) {
	if a.keys["max_capacity_gb"].off() {
		tell(unused("0 is no limit"), "max_capacity_gb")
	}
	tell(none("the server has its own limit, and makes room itself"), "max_capacity_gb")
}

func (c *converter) redisAdapter(a *adapter, tell func(verdict, ...string)) (verdict, error) {
	form, user, at, env := "redis", a.text("username"), "", passwordEnv
	hasPassword := a.text("password") != ""
	if a.kind == "resp" {
		env = "LMCACHE_RESP_PASSWORD"
		host, port := a.text("host"), a.text("port")
		if host == "" {
			host = c.variable("LMCACHE_RESP_HOST")
		}
		if port == "" || port == "0" {
			port = c.variable("LMCACHE_RESP_PORT")
		}
		if user == "" {
			user = c.variable("LMCACHE_RESP_USERNAME")
		}
		hasPassword = hasPassword || c.variable("LMCACHE_RESP_PASSWORD") != ""
		if host == "" {
			return verdict{}, fmt.Errorf(
				"%s: it has no host, and LMCACHE_RESP_HOST is not known (see --env)", a.where)
		}
		if port == "" {
			port = "6379"
		}
		at = host + ":" + port
	} else {
		at = strings.ReplaceAll(a.text("startup_nodes"), " ", "")
		if at == "" {
			return verdict{}, fmt.Errorf("%s: it has no startup_nodes", a.where)
		}
		cluster := !a.keys["cluster_mode"].off()
		switch tls := !a.keys["tls_enable"].off(); {
		case cluster && tls:
			form = "rediss+cluster"
		case cluster:
			form = "redis+cluster"
		case tls:
			form = "rediss"
		}
		if !cluster {
			at, _, _ = strings.Cut(at, ",")
		}
	}
	t := c.addTier("redis", a.keys["type"])
	t.set("url", redisURL(form, user, at), a.where)
	if hasPassword {
		c.passwordFrom(t, env)
	}
	tell(became("", "tiers: redis: url"), "host", "port", "username", "startup_nodes",
		"cluster_mode", "tls_enable")
	if g := a.keys["password"]; g != nil && g.text() == "" {
		tell(unused("it is empty"), "password")
	}
	tell(became("put it into the environment of the sidecar, as "+env,
		"tiers: redis: password_env"), "password")
	if g := a.keys["database_id"]; g != nil && g.value != nil {
		n, err := g.integer(0, 1<<20)
		if err != nil {
			return verdict{}, err
		}
		if form == "redis" || form == "rediss" {
			t.set("db", n, g.origin())
			tell(became("", "tiers: redis: db"), "database_id")
		}
	}
	tell(unused("a cluster has one database"), "database_id")
	if g := a.keys["key_prefix"]; !g.off() {
		t.set("prefix", g.text(), g.origin())
		tell(became("", "tiers: redis: prefix"), "key_prefix")
	}
	tell(unused("it is empty"), "key_prefix")
	if g := a.keys["ttl_seconds"]; !g.off() {
		n, err := g.integer(1, 1<<30)
		if err != nil {
			return verdict{}, err
		}
		t.set("ttl", duration(float64(n)), g.origin())
		tell(became("", "tiers: redis: ttl"), "ttl_seconds")
	}
	tell(unused("it is off"), "ttl_seconds")
	for key, to := range map[string]string{"request_timeout": "load_timeout",
		"connection_timeout": "dial_timeout"} {
		if g := a.keys[key]; g != nil {
			n, err := g.number()
			if err != nil {
				return verdict{}, err
			}
			if n < 0.001 || n > 86400 {
				return verdict{}, g.wrong("a number of seconds")
			}
			t.set(to, duration(n), g.origin())
			tell(became("", "tiers: redis: "+to), key)
		}
	}
	if err := a.workers(t, tell, "workers", 256, "num_workers"); err != nil {
		return verdict{}, err
	}
	tell(none("loads and stores have as many workers each"), "per_op_workers")
	c.noLimit(a, tell)
	t.note("LMCache's keys there are not read")
	return became("", "tiers: redis"), nil
}

// nixlTier adds a tier for the destination of NIXL.
func (c *converter) nixlTier(g *given, backend string, params map[string]*given) (verdict, error) {
	text := func(key string) string {
		if p := params[key]; p != nil {
			return p.text()
		}
		return ""
	}
	switch strings.ToUpper(backend) {
	case "POSIX", "GDS", "GDS_MT":
		path := params["file_path"]
		if path == nil {
			path = params["nixl_path"]
		}
		if path.off() {
			return verdict{}, fmt.Errorf(
				"%s: NIXL's backend %s wants a directory, and there is none", g.shown, backend)
		}
		capacity := int64(0)
		if p := params["max_capacity_gb"]; p != nil {
			var err error
			if capacity, err = p.bytes(); err != nil {
				return verdict{}, err
			}
		}
		if _, err := c.diskTier(path, path.list(), capacity,
			params["max_capacity_gb"]); err != nil {
			return verdict{}, err
		}
		return became(whyNIXL, "tiers: disk"), nil
	case "OBJ":
		if text("bucket") == "" {
			return none("backend_params names no bucket: add an s3 tier"), nil
		}
		endpoint := text("endpoint_override")
		p := s3Parts{endpoint: endpoint, bucket: text("bucket"), region: text("region"),
			ca: text("ca_bundle"), secret: params["access_key"] != nil}
		if endpoint == "" {
			p.endpoint, p.bucket = text("bucket"), ""
		}
		v, err := c.s3Tier(g, p)
		if err == nil {
			v.why = whyNIXL
		}
		return v, err
	case "HF3FS":
		return none("3FS is used through its mount, by a disk tier with a directory for each sidecar"), nil
	case "AZURE_BLOB":
		return none("Azure's own protocol is not spoken"), nil
	}
	return none("there is no tier for NIXL's backend " + strconv.Quote(backend)), nil
}

func nixlStorage(c *converter, g *given) (verdict, error) {
	if g.off() {
		return unused("it is off"), nil
	}
	params := map[string]*given{"nixl_path": c.extra["nixl_path"]}
	if p := c.extra["nixl_backend_params"]; p != nil {
		m, _ := p.value.(map[string]any)
		for key, value := range m {
			params[key] = &given{key, p.shown + "." + key, p.from, value}
		}
	}
	return c.nixlTier(g, c.extraText("nixl_backend"), params)
}

func nixlPart(c *converter, g *given) (verdict, error) {
	if c.extra["enable_nixl_storage"].off() {
		return unused("enable_nixl_storage is off"), nil
	}
	if g.key == "nixl_pool_size" {
		return none("room is counted in bytes: capacity"), nil
	}
	return became("", "tiers"), nil
}

// daxTier adds a tier of devices.
func (c *converter) daxTier(from *given, devices []device) *tier {
	t := c.addTier("dax", from)
	t.set("devices", devices, from.origin())
	if slices.ContainsFunc(devices, func(d device) bool {
		return !strings.HasPrefix(d.Path,
			"/dev/")
	}) {
		t.set("allow_files", true, "")
		t.note("not all of these are devices: files serve as well, but more slowly")
	}
	return t
}

// daxArena puts the arena on devices, in addition to those that it has.
func (c *converter) daxArena(from *given, note string, devices ...device) {
	c.arena, c.arenaFrom = append(c.arena, devices...), from
	c.set("arena.kind", "dax", from, "")
	c.set("arena.dax.devices", c.arena, from, note)
	if slices.ContainsFunc(c.arena, func(d device) bool {
		return !strings.HasPrefix(d.Path,
			"/dev/")
	}) {
		c.settings = put(c.settings, setting{key: "arena.dax.allow_files", value: true,
			note: "not all of these are devices: files serve as well, but more slowly"})
	}
}

// neverOnDAX lists the settings that do not apply to an arena on devices.
var neverOnDAX = []string{"arena.limit", "arena.initial", "arena.numa"}

// settleArena removes settings for an arena of DRAM if the arena is on devices.
func (c *converter) settleArena() error {
	if len(c.arena) == 0 {
		return nil
	}
	c.settings = slices.DeleteFunc(c.settings,
		func(s setting) bool { return slices.Contains(neverOnDAX, s.key) })
	c.set("arena.kind", "dax", c.arenaFrom, "")
	for i := range c.keys {
		k := &c.keys[i]
		to := slices.DeleteFunc(slices.Clone(k.To), func(key string) bool {
			return slices.Contains(neverOnDAX, key) ||
				key == "arena.kind" && strings.Contains(k.Key, "hugepages")
		})
		switch {
		case len(to) == len(k.To):
		case len(to) == 0:
			k.Outcome, k.To, k.Why = Unused, nil,
				"the arena lies on devices, and is as large as they are"
		default:
			k.To = to
		}
	}
	return nil
}

// daxPrimary reports whether the configuration's device is the arena.
func (c *converter) daxPrimary() bool {
	return strings.EqualFold(c.extraText("dax.mode"), "primary") &&
		!c.extra["dax.device_path"].off()
}

func daxDevice(c *converter, g *given) (verdict, error) {
	if g.off() {
		return unused("it is off"), nil
	}
	path, err := c.absolute(g, g.text())
	if err != nil {
		return verdict{}, err
	}
	d := device{Path: path}
	for _, key := range []string{"dax.max_dax_size", "dax.arena_size_gb"} {
		if s := c.extra[key]; s != nil {
			n, err := s.bytes()
			if err != nil {
				return verdict{}, err
			}
			if n <= 0 {
				return verdict{}, s.wrong("a size above 0")
			}
			d.Size = size(n)
		}
	}
	if c.daxPrimary() {
		c.daxArena(g, "", d)
		return became("several ranks may share it: see arena.dax.rank and arena.dax.ranks",
			"arena.dax.devices"), nil
	}
	t := c.daxTier(g, []device{d})
	if c.eviction == "" && c.config["cache_policy"] != nil {
		if p, ok := policies[strings.ToLower(c.config["cache_policy"].text())]; ok {
			t.set("eviction", p.name, c.config["cache_policy"].origin())
		}
	}
	return became("what it holds is found again after a restart; several ranks may share it: see rank and ranks", "tiers: dax: devices"), nil
}

// daxSize is the rule for the size of dax.device_path.
func daxSize(c *converter, g *given) (verdict, error) {
	switch {
	case c.extra["dax.device_path"].off():
		return unused("there is no dax.device_path"), nil
	case c.daxPrimary():
		return became("", "arena.dax.devices"), nil
	default:
		return became("", "tiers: dax: devices"), nil
	}
}

// whyDAXWorkers is why the numbers of threads are no settings.
const whyDAXWorkers = "the program chooses how many threads copy: as many as memory and processors allow"

func (c *converter) daxAdapter(a *adapter, tell func(verdict, ...string)) (verdict, error) {
	var devices []device
	one := func(where string, path, gib any) error {
		p := &given{shown: where + "device_path", value: path}
		if p.off() {
			return fmt.Errorf("%sdevice_path is missing", where)
		}
		at, err := c.absolute(p, p.text())
		if err != nil {
			return err
		}
		s := &given{shown: where + "max_dax_size_gb", value: gib}
		n, err := s.bytes()
		if err != nil {
			return err
		}
		if n <= 0 {
			return s.wrong("a size above 0")
		}
		devices = append(devices, device{at, size(n)})
		return nil
	}
	if g := a.keys["devices"]; g != nil {
		list, ok := g.value.([]any)
		if !ok {
			return verdict{}, fmt.Errorf("%s: it is not a list", g.shown)
		}
		for i, e := range list {
			m, ok := e.(map[string]any)
			if !ok {
				return verdict{}, fmt.Errorf("%s[%d]: it is not an object", g.shown, i)
			}
			if err := one(fmt.Sprintf("%s[%d].", g.shown, i), m["device_path"],
				m["max_dax_size_gb"]); err != nil {
				return verdict{}, err
			}
		}
	} else if g := a.keys["device_path"]; g != nil {
		var gib any
		if s := a.keys["max_dax_size_gb"]; s != nil {
			gib = s.value
		}
		if err := one(a.where+": ", g.value, gib); err != nil {
			return verdict{}, err
		}
	}
	hotplug := !a.keys["hotplug_enabled"].off()
	if len(devices) == 0 && !hotplug {
		return verdict{}, fmt.Errorf("%s: it has no devices, which only hotplug_enabled allows",
			a.where)
	}
	t := c.daxTier(a.keys["type"], devices)
	tell(became("", "tiers: dax: devices"), "devices", "device_path", "max_dax_size_gb")
	if hotplug {
		t.set("hotplug", true, a.keys["hotplug_enabled"].origin())
		tell(became("", "tiers: dax: hotplug"), "hotplug_enabled")
	}
	tell(unused("it is off, as by default"), "hotplug_enabled")
	tell(builtIn("slots are as large as the chunks in them; a device has chunks of several sizes"),
		"slot_bytes")
	tell(builtIn(whyDAXWorkers), "num_load_workers", "num_store_workers", "num_lookup_workers")
	return became("what it holds is found again after a restart; several ranks may share a device: see rank and ranks", "tiers: dax"), nil
}
