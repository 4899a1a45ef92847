package sidecar

import (
	"errors"
	"fmt"
	"maps"
	"net/url"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"lookaside/dax"
	"lookaside/tiers/engine"
	"lookaside/tiers/policy"
	"lookaside/tiers/remote"
	"lookaside/tiers/serde"
)

// The kinds of tiers. Each is also the name of a flag, and in capitals the end of the name of an
// environment variable.
const (
	tierDAX   = "dax"
	tierDisk  = "disk"
	tierRedis = "redis"
	tierS3    = "s3"
)

// tierKinds lists all, those first that are mostly nearer.
var tierKinds = []string{tierDAX, tierDisk, tierRedis, tierS3}

// localKinds are those whose tiers know from memory what they hold.
var localKinds = []string{tierDAX, tierDisk}

// TierConfig is one tier below the arena. What the fields mean is in [TierSettings]. Only the part
// of its Kind is used.
type TierConfig struct {
	Kind          string // dax, disk, redis or s3
	Name          string // unique
	Admit         engine.Admission
	Queue         int // chunks
	Workers       int
	LookupTimeout time.Duration // not for devices and disks, which answer from memory
	LoadTimeout   time.Duration
	StoreTimeout  time.Duration
	DAX           DAXConfig
	Disk          DiskConfig
	Redis         remote.RedisOptions // but for what the URL says, zero fields are its defaults
	S3            remote.S3Options

	source string // where it was set, for errors
}

// DAXConfig is what a tier of DAX devices has beside what all tiers have.
type DAXConfig struct {
	DAXDevices
	Size           int64 // bytes of those without a size of their own; 0: all
	RestoreWorkers int
	MaxRegions     int
	StoreWorkers   int
	LookupWorkers  int // 0: not bounded
	Eviction       string
}

// DAXDevices is what a tier and an arena on DAX devices have in common.
type DAXDevices struct {
	Devices     []DAXDevice
	Offset      int64 // bytes
	Rank, Ranks int
	AllowFiles  bool
	HotPlug     bool
	Slab        int64 // bytes; 0: the store chooses
}

// DAXDevice is a device of a tier or of the arena.
type DAXDevice struct {
	Path string // absolute
	Size int64  // bytes; 0: for a tier see DAXConfig.Size, else all
}

// DiskConfig is what a disk tier has beside what all tiers have.
type DiskConfig struct {
	Paths    []string // absolute
	Capacity int64    // bytes
	Slab     int64    // bytes; 0: the store chooses
	Eviction string
	Direct   string // auto, always or never
}

// A TierSetting is one key of an entry of the list tiers. It is the only place where its meaning,
// unit and default are written.
type TierSetting struct {
	Key     string
	Kinds   []string // that have it
	Default string   // as a user would write it; "" is unset
	Unit    string
	Meaning string

	required bool
	derived  bool // Default is a rule, not a value
	set      func(*TierConfig, string) error
}

// TierSettings returns every key of a tier, in the order in which they are documented. A key may be
// there more than once, with other kinds.
func TierSettings() []TierSetting { return slices.Clone(tierSettings) }

// admissions are the names of all, in their order.
func admissions() (names []string) {
	for a := engine.AdmitStored; a <= engine.AdmitNever; a++ {
		names = append(names, a.String())
	}
	return names
}

const sizeUnit = "bytes (K, M, G and T are powers of 1024)"

func timeoutSetting(key, def, meaning string, kinds []string,
	field func(*TierConfig) *time.Duration) TierSetting {
	return TierSetting{Key: key, Kinds: kinds, Default: def, Unit: "duration", Meaning: meaning,
		set: func(c *TierConfig, v string) (err error) {
			*field(c), err = parseDuration(v, time.Millisecond)
			return
		}}
}

func workersSetting(kinds []string, def, unit, meaning string) TierSetting {
	return TierSetting{Key: "workers", Kinds: kinds, Default: def, Unit: unit, Meaning: meaning,
		set: func(c *TierConfig, v string) (err error) {
			c.Workers, err = parseInt(v, 1, 256)
			return
		}}
}

func textSetting(key string, kinds []string, def, unit, meaning string,
	field func(*TierConfig) *string) TierSetting {
	return TierSetting{Key: key, Kinds: kinds, Default: def, Unit: unit, Meaning: meaning,
		set: func(c *TierConfig, v string) error {
			*field(c) = v
			return nil
		}}
}

func choiceSetting(key string, kinds []string, def, meaning string, of []string,
	field func(*TierConfig) *string) TierSetting {
	return TierSetting{Key: key, Kinds: kinds, Default: def, Unit: choices(of), Meaning: meaning,
		set: func(c *TierConfig, v string) error {
			*field(c) = v
			return nearestOf(v, of)
		}}
}

var tierSettings = slices.Concat(commonTierSettings, daxSettings, diskSettings, redisSettings,
	s3Settings)

var commonTierSettings = []TierSetting{
	{
		Key: "kind", Kinds: tierKinds, Unit: "dax, disk, redis or s3", required: true,
		Meaning: "What the tier is.",
		// it decided which settings there are
		set: func(*TierConfig, string) error { return nil },
	},
	{
		Key: "name", Kinds: tierKinds, Default: "the kind; disk-2, … when repeated",
		Unit: "up to 32 of a-z, 0-9, - and _", derived: true,
		Meaning: "What the tier is called in commands, status, metrics and logs.",
		set: func(c *TierConfig, v string) error {
			if !tierName.MatchString(v) || v == "arena" || v == "all" {
				return fmt.Errorf("%q is no name for a tier: take up to 32 of a-z, 0-9, - and _, the first a letter or digit; not arena and not all", v)
			}
			c.Name = v
			return nil
		},
	},
	{
		Key: "admit", Kinds: tierKinds, Default: "stored", Unit: choices(admissions()),
		Meaning: "When a chunk is written to the tier: when it was stored in the arena (and when it was promoted from a tier below); " +
			"when it is hit for the first time (reused); shortly before it would be evicted from the arena; or never: what is there is only read.",
		set: func(c *TierConfig, v string) error {
			c.Admit = engine.Admission(max(slices.Index(admissions(), v), 0))
			return nearestOf(v, admissions())
		},
	},
	{
		Key: "queue", Kinds: tierKinds, Default: "4096", Unit: "chunks",
		Meaning: "How many chunks may wait to be written. What comes when it is full is not written to the tier and is counted as shed: a tier that is slower than vLLM never slows it down.",
		set: func(c *TierConfig, v string) (err error) {
			c.Queue,
				err = parseInt(v, 1, 1<<20)
			return
		},
	},
	workersSetting([]string{tierDisk}, "4", "I/O goroutines",
		"How many reads and writes are under way at a time."),
	workersSetting([]string{tierRedis}, "4", "calls",
		"How many loads, and how many stores, are under way at a time."),
	workersSetting([]string{tierS3}, "8", "calls",
		"How many loads, and how many stores, are under way at a time."),
	timeoutSetting("lookup_timeout", "500ms",
		"How long asking what it has may take. What it has not answered by then is a miss; several in a row turn the tier off for a while.",
		[]string{tierRedis, tierS3},
		func(c *TierConfig) *time.Duration { return &c.LookupTimeout }),
	timeoutSetting("load_timeout", "2s",
		"How long loading a batch of chunks may take. A chunk that is not there by then is a miss; several in a row turn the tier off for a while.",
		[]string{tierDAX, tierDisk, tierRedis},
		func(c *TierConfig) *time.Duration { return &c.LoadTimeout }),
	timeoutSetting("load_timeout", "10s",
		"How long loading a batch of chunks may take. A chunk that is not there by then is a miss; several in a row turn the tier off for a while.",
		[]string{tierS3}, func(c *TierConfig) *time.Duration { return &c.LoadTimeout }),
	timeoutSetting("store_timeout", "30s",
		"How long writing a batch of chunks may take. What is not written by then is given up.",
		tierKinds, func(c *TierConfig) *time.Duration { return &c.StoreTimeout }),
}

func countSetting(key string, kinds []string, def string, least, most int, unit, meaning string,
	field func(*TierConfig) *int) TierSetting {
	return TierSetting{Key: key, Kinds: kinds, Default: def, Unit: unit, Meaning: meaning,
		set: func(c *TierConfig, v string) (err error) {
			*field(c), err = parseInt(v, least, most)
			return
		}}
}

func flagSetting(key string, kinds []string, meaning string,
	field func(*TierConfig) *bool) TierSetting {
	return TierSetting{Key: key, Kinds: kinds, Default: "false", Unit: "true or false",
		Meaning: meaning, set: func(c *TierConfig, v string) (err error) {
			*field(c), err = parseBool(v)
			return
		}}
}

// maxRanks is more than any host has workers.
const maxRanks = 1024

var daxSettings = []TierSetting{
	{
		Key: "devices", Kinds: []string{tierDAX},
		Unit:    "list of devices, or of {path: DEVICE, size: BYTES}",
		Meaning: "The DAX devices (/dev/daxX.Y), or files on a file system mounted with -o dax. Chunks are spread over all of them. It may be empty if hotplug is true.",
		set:     func(c *TierConfig, v string) error { return c.DAX.addAll(v) },
	},
	{
		Key: "device", Kinds: []string{tierDAX}, Unit: "device",
		Meaning: "In place of devices, where there is but one.",
		set:     func(c *TierConfig, v string) error { return c.DAX.add(v) },
	},
	{
		Key: "size", Kinds: []string{tierDAX}, Unit: sizeUnit, Default: "all of the device",
		derived: true,
		Meaning: "How much to use of each device that has no size of its own: a multiple of its alignment, which is 2M or 1G.",
		set: func(c *TierConfig, v string) (err error) {
			c.DAX.Size,
				err = parseSize(v)
			return
		},
	},
	{
		Key: "offset", Kinds: []string{tierDAX}, Unit: sizeUnit, Default: "0",
		Meaning: "Where in each device begins what is used of it: a multiple of its alignment. What lies before and behind is left to others.",
		set: func(c *TierConfig, v string) (err error) {
			c.DAX.Offset,
				err = dax.ParseSize(v)
			return
		},
	},
	countSetting("ranks", []string{tierDAX}, "1", 1, maxRanks, "sidecars",
		"How many sidecars share the devices, one for each rank: each has an equal part of what is used of a device.",
		func(c *TierConfig) *int { return &c.DAX.Ranks }),
	countSetting("rank", []string{tierDAX}, "0", 0, maxRanks-1, "number",
		"Which of the parts is this sidecar's, from 0.",
		func(c *TierConfig) *int { return &c.DAX.Rank }),
	flagSetting("allow_files", []string{tierDAX},
		"Whether regular files may stand in for devices. One that is not there is made, of the size that is set.", func(c *TierConfig) *bool { return &c.DAX.AllowFiles }),
	countSetting("restore_workers", []string{tierDAX}, "8", 1, 256, "threads",
		"How many threads copy from the devices into the arena; no more than there are processors.",
		func(c *TierConfig) *int { return &c.DAX.RestoreWorkers }),
	countSetting("restore_max_regions", []string{tierDAX}, "8", 1, 256, "regions",
		"How many regions are on their way into the arena at a time: pieces of large chunks, and runs of small ones that are neighbours.", func(c *TierConfig) *int { return &c.DAX.MaxRegions }),
	countSetting("store_workers", []string{tierDAX}, "4", 1, 256, "threads",
		"How many threads copy from the arena onto the devices; no more than there are processors.",
		func(c *TierConfig) *int { return &c.DAX.StoreWorkers }),
	countSetting("lookup_workers", []string{tierDAX}, "0", 0, 256, "lookups (0: any number)",
		"How many lookups walk the index at a time. They are answered from memory and wait for nothing, so this is of use only to keep cores free.",
		func(c *TierConfig) *int { return &c.DAX.LookupWorkers }),
	choiceSetting("eviction", []string{tierDAX}, policy.Default, evictionMeaning, policy.Names(),
		func(c *TierConfig) *string { return &c.DAX.Eviction }),
	{
		Key: "slab", Kinds: []string{tierDAX}, Default: "a 32nd of all devices, from 256M to 64G",
		Unit: sizeUnit, derived: true,
		Meaning: "Size of the pieces that a device is cut into. Each has room for chunks of one geometry.",
		set: func(c *TierConfig, v string) (err error) {
			c.DAX.Slab,
				err = parseSize(v)
			return
		},
	},
	flagSetting("hotplug", []string{tierDAX},
		"Whether devices may be added, removed and resized while the sidecar serves, by lookaside dax and over HTTP.", func(c *TierConfig) *bool { return &c.DAX.HotPlug }),
}

// addAll adds devices, separated by commas.
func (c *DAXDevices) addAll(v string) error {
	for d := range strings.SplitSeq(v, ",") {
		if err := c.add(d); err != nil {
			return err
		}
	}
	return nil
}

// add adds a device, written as DEVICE or DEVICE:SIZE.
func (c *DAXDevices) add(v string) error {
	d := DAXDevice{Path: strings.TrimSpace(v)}
	if i := strings.LastIndexByte(d.Path, ':'); i >= 0 {
		size, err := parseSize(d.Path[i+1:])
		if err != nil {
			return err
		}
		d.Path, d.Size = d.Path[:i], size
	}
	if !filepath.IsAbs(d.Path) {
		return fmt.Errorf("%q is not an absolute path: write it from the root, /dev/dax0.0", d.Path)
	}
	d.Path = filepath.Clean(d.Path)
	if slices.ContainsFunc(c.Devices, func(o DAXDevice) bool { return o.Path == d.Path }) {
		return fmt.Errorf("%s is there twice", d.Path)
	}
	c.Devices = append(c.Devices, d)
	return nil
}

const evictionMeaning = "Which chunk leaves first when the store is full. Never one whose continuation is held: a continuation without its prefix is worth nothing."

var diskSettings = []TierSetting{
	{
		Key: "paths", Kinds: []string{tierDisk}, Unit: "list of directories", required: true,
		Meaning: "Where the store is; made if they are not there. With several, best on devices of their own, chunks are spread over all of them. One sidecar at a time uses a directory.",
		set: func(c *TierConfig, v string) error {
			for p := range strings.SplitSeq(v, ",") {
				p = strings.TrimSpace(p)
				if !filepath.IsAbs(p) {
					return fmt.Errorf("%q is not an absolute path: write it from the root, /…", p)
				}
				if p = filepath.Clean(p); slices.Contains(c.Disk.Paths, p) {
					return fmt.Errorf("%s is there twice", p)
				}
				c.Disk.Paths = append(c.Disk.Paths, p)
			}
			return nil
		},
	},
	{
		Key: "capacity", Kinds: []string{tierDisk}, Unit: sizeUnit, required: true,
		Meaning: "How much of the disks the store takes, over all its directories together. It is allocated when the sidecar starts. With another capacity an existing store grows or shrinks; shrinking drops what was in the part that goes.",
		set: func(c *TierConfig, v string) (err error) {
			c.Disk.Capacity,
				err = parseSize(v)
			return
		},
	},
	choiceSetting("eviction", []string{tierDisk}, policy.Default, evictionMeaning,
		policy.Names(), func(c *TierConfig) *string { return &c.Disk.Eviction }),
	choiceSetting("direct", []string{tierDisk}, "auto",
		"Whether I/O goes around the page cache (O_DIRECT). auto: where the file system allows it; always: an error where it does not.",
		[]string{"auto", "always", "never"}, func(c *TierConfig) *string { return &c.Disk.Direct }),
	{
		Key: "slab", Kinds: []string{tierDisk}, Default: "capacity/32, from 256M to 64G",
		Unit: sizeUnit, derived: true,
		Meaning: "Size of one file of the store. Each has room for chunks of one geometry.",
		set: func(c *TierConfig, v string) (err error) {
			c.Disk.Slab,
				err = parseSize(v)
			return
		},
	},
}

var redisSchemes = []string{"redis", "rediss", "redis+sentinel", "rediss+sentinel", "redis+cluster",
	"rediss+cluster", "redis+unix"}

var redisSettings = slices.Concat([]TierSetting{
	{
		Key: "url", Kinds: []string{tierRedis}, required: true,
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
		Key: "db", Kinds: []string{tierRedis}, Default: "that of the URL, or 0", Unit: "number",
		Meaning: "The database.", derived: true,
		set: func(c *TierConfig, v string) (err error) {
			c.Redis.DB,
				err = parseInt(v, 0, 1<<20)
			return
		},
	},
	textSetting("password_file", []string{tierRedis}, "", "file",
		"A file with the password. It is read again for each connection.",
		func(c *TierConfig) *string { return &c.Redis.Password.File }),
	textSetting("password_env", []string{tierRedis}, "", "name of an environment variable",
		"An environment variable that has the password.",
		func(c *TierConfig) *string { return &c.Redis.Password.Env }),
	textSetting("sentinel_user", []string{tierRedis}, "", "name", "Who we are to the sentinels.",
		func(c *TierConfig) *string { return &c.Redis.SentinelUser }),
	textSetting("sentinel_password_file", []string{tierRedis}, "", "file",
		"A file with the password for the sentinels.",
		func(c *TierConfig) *string { return &c.Redis.SentinelPassword.File }),
	textSetting("sentinel_password_env", []string{tierRedis}, "", "name of an environment variable",
		"An environment variable that has the password for the sentinels.",
		func(c *TierConfig) *string { return &c.Redis.SentinelPassword.Env }),
}, tlsSettings(tierRedis, func(c *TierConfig) *remote.TLSFiles { return &c.Redis.Files }),
	[]TierSetting{
		textSetting("prefix", []string{tierRedis}, "la1", "letters, digits and _.:-/",
			"What the names of all keys begin with. Sidecars with the same prefix share their chunks.",
			func(c *TierConfig) *string { return &c.Redis.Prefix }),
		{
			Key: "ttl", Kinds: []string{tierRedis}, Default: "0",
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
		serdeSetting(tierRedis, func(c *TierConfig) *string { return &c.Redis.Serde }),
		{
			Key: "split", Kinds: []string{tierRedis}, Default: "8M", Unit: sizeUnit,
			Meaning: "Larger chunks are kept as several values of this size, which are sent one behind the other without waiting.",
			set: func(c *TierConfig, v string) (err error) {
				if c.Redis.SplitBytes, err = parseSize(v); err == nil &&
					(c.Redis.SplitBytes < 64<<10 ||
						c.Redis.SplitBytes > 512<<20) {
					err = fmt.Errorf("%q is not from 64K to 512M", v)
				}
				return
			},
		},
		{
			Key: "pool", Kinds: []string{tierRedis}, Default: "16", Unit: "connections",
			Meaning: "The most connections to the server (to each, in a cluster).",
			set: func(c *TierConfig, v string) (err error) {
				c.Redis.Pool,
					err = parseInt(v, 1, 1024)
				return
			},
		},
		timeoutSetting("dial_timeout", "2s", "How long making a connection may take.",
			[]string{tierRedis}, func(
				c *TierConfig) *time.Duration {
				return &c.Redis.DialTimeout
			}),
	})

var s3Settings = slices.Concat([]TierSetting{
	{
		Key: "url", Kinds: []string{tierS3}, Unit: "s3://BUCKET[/PREFIX]", required: true,
		Meaning: "The bucket, and what the names of our objects in it begin with (la1 if nothing is said). The bucket must be there.",
		set: func(c *TierConfig, v string) error {
			o, err := remote.ParseS3URL(v)
			c.S3.Bucket, c.S3.Prefix = o.Bucket, o.Prefix
			return err
		},
	},
	{
		Key: "endpoint", Kinds: []string{tierS3}, Unit: "http:// or https:// and HOST[:PORT]",
		Default: "https://s3.amazonaws.com",
		Meaning: "The server.",
		set:     func(c *TierConfig, v string) error { c.S3.Endpoint = v; return checkEndpoint(v) },
	},
	textSetting("region", []string{tierS3}, "", "region",
		"The bucket's region; unset: the server is asked.",
		func(c *TierConfig) *string { return &c.S3.Region }),
	textSetting("credentials_file", []string{tierS3}, "", "file",
		"Credentials in the form of ~/.aws/credentials. Unset: the environment variables; if these are not set either, requests are not signed.",
		func(c *TierConfig) *string { return &c.S3.CredentialsFile }),
	textSetting("profile", []string{tierS3}, "default", "name", "The section of credentials_file.",
		func(c *TierConfig) *string { return &c.S3.Profile }),
	textSetting("access_key_env", []string{tierS3}, "AWS_ACCESS_KEY_ID",
		"name of an environment variable", "An environment variable that has the access key.",
		func(c *TierConfig) *string { return &c.S3.AccessKeyEnv }),
	textSetting("secret_key_env", []string{tierS3}, "AWS_SECRET_ACCESS_KEY",
		"name of an environment variable", "An environment variable that has the secret key.",
		func(c *TierConfig) *string { return &c.S3.SecretKeyEnv }),
	textSetting("session_token_env", []string{tierS3}, "AWS_SESSION_TOKEN",
		"name of an environment variable",
		"An environment variable that has the session's token, if there is one.",
		func(c *TierConfig) *string { return &c.S3.SessionTokenEnv }),
}, tlsSettings(tierS3, func(c *TierConfig) *remote.TLSFiles { return &c.S3.Files }), []TierSetting{
	flagSetting("virtual_host", []string{tierS3},
		"Whether the bucket is named in the host's name and not in the path. AWS's own endpoints always do it so.",
		func(c *TierConfig) *bool { return &c.S3.VirtualHost }),
	serdeSetting(tierS3, func(c *TierConfig) *string { return &c.S3.Serde }),
	{
		Key: "pool", Kinds: []string{tierS3}, Default: "32", Unit: "requests",
		Meaning: "The most requests that are under way at a time.",
		set: func(c *TierConfig, v string) (err error) {
			c.S3.Pool,
				err = parseInt(v, 1, 1024)
			return
		},
	},
	timeoutSetting("dial_timeout", "5s", "How long making a connection may take.", []string{tierS3},
		func(c *TierConfig) *time.Duration { return &c.S3.DialTimeout }),
})

func tlsSettings(kind string, files func(*TierConfig) *remote.TLSFiles) []TierSetting {
	return []TierSetting{
		textSetting("ca_file", []string{kind}, "", "PEM file",
			"Certificates of the authorities that the server's is checked by; unset: the system's.",
			func(c *TierConfig) *string { return &files(c).CA }),
		textSetting("cert_file", []string{kind}, "", "PEM file",
			"Our own certificate, where the server asks for one. Needs key_file.",
			func(c *TierConfig) *string { return &files(c).Cert }),
		textSetting("key_file", []string{kind}, "", "PEM file", "The key of cert_file.",
			func(c *TierConfig) *string { return &files(c).Key }),
	}
}

func serdeSetting(kind string, field func(*TierConfig) *string) TierSetting {
	return choiceSetting("serde", []string{kind}, "raw", "How pages are encoded on their way. "+
		lossyMeaning(), serde.Names(), field)
}

// lossyMeaning says which codecs change what they carry.
func lossyMeaning() string {
	var lossy []string
	for _, name := range serde.Names() {
		if c, err := serde.New(name); err == nil && c.Lossy() {
			lossy = append(lossy, name)
		}
	}
	if len(lossy) == 0 {
		return "None changes a byte."
	}
	return strings.Join(lossy, " and ") +
		" change the pages a little, and so perhaps what vLLM computes from them: what is stored with one of them is of a space of its own, that nobody else hits."
}

var tierName = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,31}$`)

// nearestOf is nil if v is one of choices, or an error that names the nearest.
func nearestOf(v string, choices []string) error {
	if slices.Contains(choices, v) {
		return nil
	}
	return unknown(fmt.Sprintf("%q is none of %s", v, strings.Join(choices, ", ")), v, "", choices)
}

func checkEndpoint(v string) error {
	u, err := url.Parse(v)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil ||
		strings.Trim(u.Path, "/") != "" {
		return errors.New("it is not of the form https://host:port")
	}
	return nil
}

// A tierEntry is one tier as a source names it, before it is understood.
type tierEntry struct {
	source string      // names the place, for errors
	keys   [][2]string // key and value, in the order of the source
	err    error       // it was not of the short form
}

// tierFlag is the value of --dax, --disk, --redis or --s3: all append to one list, so that their
// order is kept.
type tierFlag struct {
	kind string
	list *[]tierEntry
}

var _ pflag.Value = tierFlag{}

// String implements pflag.Value.
func (tierFlag) String() string { return "" }

// Type implements pflag.Value: it is what the help calls the value. pflag counts bytes, so there is
// no ellipsis in it.
func (f tierFlag) Type() string { return strings.ReplaceAll(shortForms[f.kind], "…", "...") }

// Set implements pflag.Value. It never fails, because pflag would repeat the value, and with it
// what secret may be in it.
func (f tierFlag) Set(v string) error {
	*f.list = append(*f.list, shortTier("--"+f.kind, f.kind, v))
	return nil
}

// shortForms says how a tier is written in one word, by its kind.
var shortForms = map[string]string{
	tierDAX:   "DEVICE[,DEVICE…][:SIZE][:KEY=VALUE…]",
	tierDisk:  "DIR[,DIR…]:CAPACITY[:KEY=VALUE…]",
	tierRedis: "URL[?KEY=VALUE&…]",
	tierS3:    "URL[?KEY=VALUE&…]",
}

var shortExamples = map[string]string{
	tierDAX:   "/dev/dax0.0,/dev/dax1.0:100G:hotplug=true",
	tierDisk:  "/mnt/nvme0/kv,/mnt/nvme1/kv:200G:admit=reused",
	tierRedis: "redis://cache.internal:6379/0?ttl=24h&password_file=/run/secrets/redis",
	tierS3:    "s3://kv-cache/llama?endpoint=https://minio.internal:9000",
}

// addTierFlags defines a flag for each kind of tier.
func addTierFlags(fs *pflag.FlagSet) {
	list := new([]tierEntry)
	for _, kind := range tierKinds {
		fs.Var(tierFlag{kind, list}, kind,
			fmt.Sprintf("Adds a tier of kind %s below those before it, such as %s. May be repeated; takes the place of the list tiers of the file, whose keys it has.",
				kind, shortExamples[kind]))
	}
}

// flagTiers returns the tiers of the command line, in their order.
func flagTiers(fs *pflag.FlagSet) []tierEntry {
	for _, kind := range tierKinds {
		if f := fs.Lookup(kind); f != nil {
			return *f.Value.(tierFlag).list
		}
	}
	return nil
}

// TierEnv is the environment variable that adds tiers of a kind.
func TierEnv(kind string) string { return EnvPrefix + strings.ToUpper(kind) }

// envTiers returns the tiers of the environment: devices, then disks, then Redis servers, then
// buckets, for variables have no order.
func envTiers(environ []string) (out []tierEntry) {
	for _, kind := range tierKinds {
		for _, e := range environ {
			if v, ok := strings.CutPrefix(e, TierEnv(kind)+"="); ok {
				for _, word := range strings.Fields(v) {
					out = append(out, shortTier(TierEnv(kind), kind, word))
				}
			}
		}
	}
	return out
}

// shortTier takes the short form of a tier apart. Which keys and values are right is not decided
// here.
func shortTier(source, kind, v string) tierEntry {
	e := tierEntry{source: source, keys: [][2]string{{"kind", kind}}}
	add := func(key, value string) { e.keys = append(e.keys, [2]string{key, value}) }
	form := fmt.Sprintf("want %s, such as %s", shortForms[kind], shortExamples[kind])
	if slices.Contains(localKinds, kind) {
		parts := strings.Split(v, ":")
		rest := parts[1:]
		switch has := len(rest) > 0 && !strings.Contains(rest[0], "="); {
		case kind == tierDAX && parts[0] == "":
			e.err = fmt.Errorf("%q has no device: %s", v, form)
			return e
		case kind == tierDAX:
			add("devices", parts[0])
			if has {
				add("size", rest[0])
				rest = rest[1:]
			}
		case parts[0] == "" || !has:
			e.err = fmt.Errorf("%q has no capacity: %s", v, form)
			return e
		default:
			add("paths", parts[0])
			add("capacity", rest[0])
			rest = rest[1:]
		}
		for _, p := range rest {
			key, value, ok := strings.Cut(p, "=")
			if !ok {
				e.err = fmt.Errorf("%q: %q is not KEY=VALUE: %s", v, p, form)
			}
			add(key, value)
		}
		return e
	}
	add("url", v)
	return e
}

// splitURL makes keys of the query of a URL, whichever source the tier is of.
func splitURL(e *tierEntry) error {
	var out [][2]string
	for _, kv := range e.keys {
		base, query, _ := strings.Cut(kv[1], "?")
		if kv[0] != "url" || query == "" {
			out = append(out, kv)
			continue
		}
		out = append(out, [2]string{"url", base})
		// Not url.ParseQuery: it keeps no order, and its errors repeat what they are about, which
		// could be a secret.
		for p := range strings.SplitSeq(query, "&") {
			key, value, ok := strings.Cut(p, "=")
			value, err := url.QueryUnescape(value)
			if !ok || err != nil {
				return errors.New("url: what follows the ? is not KEY=VALUE&…, with keys of the tier")
			}
			out = append(out, [2]string{key, value})
		}
	}
	e.keys = out
	return nil
}

// yamlTiers understands the value of the key tiers.
func yamlTiers(file string, v any) ([]tierEntry, error) {
	list, ok := v.([]any)
	if !ok && v != nil {
		return nil, fmt.Errorf("settings: %s: tiers: %w", file, errNoTierList)
	}
	out := []tierEntry{}
	for i, item := range list {
		source := fmt.Sprintf("%s: tiers[%d]", file, i)
		m, ok := item.(map[string]any)
		if !ok {
			return nil, fmt.Errorf("settings: %s: %w", source, errNoTierList)
		}
		e := tierEntry{source: source}
		for _, key := range slices.Sorted(maps.Keys(m)) {
			value, err := yamlTierValue(key, m[key])
			if err != nil {
				return nil, fmt.Errorf("settings: %s: %s: %w", source, key, err)
			}
			e.keys = append(e.keys, [2]string{key, value})
		}
		out = append(out, e)
	}
	return out, nil
}

var errNoTierList = errors.New(
	"want a list of tiers, nearest first, each beginning with \"- kind: disk\" (or dax, redis, s3)")

func yamlTierValue(key string, v any) (string, error) {
	switch v := v.(type) {
	case string, bool, int, int64, uint64, float64:
		return fmt.Sprint(v), nil
	case nil:
		return "", errors.New("it has no value")
	case []any:
		if key != "paths" && key != "devices" {
			return "", fmt.Errorf("want a single value, got %v", v)
		}
		var parts []string
		for _, p := range v {
			s, ok := p.(string)
			switch m, isMap := p.(map[string]any); {
			case isMap && key == "devices":
				var err error
				if s, err = yamlDevice(m); err != nil {
					return "", err
				}
			case !ok || strings.Contains(s, ","):
				what := map[string]string{"paths": "directory", "devices": "device"}[key]
				return "", fmt.Errorf("%v is not a %s (a comma in its name is not supported)", p,
					what)
			}
			parts = append(parts, s)
		}
		return strings.Join(parts, ","), nil
	}
	return "", fmt.Errorf("want a single value, got %v", v)
}

// yamlDevice writes {path: DEVICE, size: BYTES} as DEVICE:BYTES.
func yamlDevice(m map[string]any) (string, error) {
	path, ok := m["path"].(string)
	if !ok || strings.ContainsAny(path, ",:") {
		return "", fmt.Errorf("%v: path is not that of a device (commas and colons are not supported)", m)
	}
	for _, key := range slices.Sorted(maps.Keys(m)) {
		if key != "path" && key != "size" {
			return "", unknown(fmt.Sprintf("%s: unknown key %q", path, key), key, "",
				[]string{"path", "size"})
		}
	}
	switch size := m["size"].(type) {
	case nil:
		return path, nil
	case string, int, int64, uint64:
		return fmt.Sprintf("%s:%v", path, size), nil
	default:
		return "", fmt.Errorf("%s: size: want a single value, got %v", path, size)
	}
}

// parseTier understands one tier. Errors name the place, the tier and the key.
func parseTier(e tierEntry) (TierConfig, error) {
	c := TierConfig{source: e.source}
	fail := func(err error) (TierConfig, error) {
		return c, fmt.Errorf("settings: %s: %w", e.source, err)
	}
	if e.err != nil {
		return fail(e.err)
	}
	if err := splitURL(&e); err != nil {
		return fail(err)
	}
	for _, kv := range e.keys {
		if kv[0] == "kind" {
			c.Kind = kv[1]
		}
	}
	if c.Kind == "" {
		return fail(fmt.Errorf("kind is missing: add \"kind: \" and one of %s",
			strings.Join(tierKinds, ", ")))
	}
	if err := nearestOf(c.Kind, tierKinds); err != nil {
		return fail(fmt.Errorf("kind: %w", err))
	}
	mine := tierSettingsOf(c.Kind)
	for _, s := range mine {
		if s.Default != "" && !s.derived {
			if err := s.set(&c, s.Default); err != nil {
				panic(fmt.Sprintf("sidecar: default of a %s tier's %s: %v", c.Kind, s.Key, err))
			}
		}
	}
	// The name first, so that errors of other keys can use it.
	what := func() string {
		if c.Name != "" {
			return fmt.Sprintf("%s tier %q", c.Kind, c.Name)
		}
		return c.Kind + " tier"
	}
	given := map[string]bool{}
	ordered := slices.Clone(e.keys)
	slices.SortStableFunc(ordered, func(a, b [2]string) int {
		return rankOfKey(a[0]) - rankOfKey(
			b[0])
	})
	for _, kv := range ordered {
		key, value := kv[0], kv[1]
		i := slices.IndexFunc(mine, func(s TierSetting) bool { return s.Key == key })
		if i < 0 {
			var names []string
			for _, s := range mine {
				names = append(names, s.Key)
			}
			msg := fmt.Sprintf("%s: unknown key %q", what(), key)
			if others := kindsWith(key); len(others) > 0 {
				msg += fmt.Sprintf(" (%s tiers have it)", strings.Join(others, " and "))
			}
			return fail(unknown(msg, key, "", names))
		}
		if given[key] {
			return fail(fmt.Errorf("%s: %s is there twice", what(), key))
		}
		given[key] = true
		if value == "" {
			if mine[i].Default == "" && !mine[i].required {
				continue
			}
			return fail(fmt.Errorf("%s: %s: it has no value: want %s", what(), key, mine[i].Unit))
		}
		if err := mine[i].set(&c, value); err != nil {
			return fail(fmt.Errorf("%s: %s: %w", what(), key, err))
		}
	}
	for _, s := range mine {
		if s.required && !given[s.Key] {
			return fail(fmt.Errorf("%s: %s is missing: add %s: %s", what(), s.Key, s.Key, s.Unit))
		}
	}
	if err := c.check(); err != nil {
		return fail(fmt.Errorf("%s: %w", what(), err))
	}
	return c, nil
}

// rankOfKey is the place of a key among those of a tier: the name, for the errors of the others,
// then the URL, a part of which other keys may replace.
func rankOfKey(key string) int {
	switch key {
	case "name":
		return 0
	case "url":
		return 1
	}
	return 2
}

// tierSettingsOf returns the settings of one kind of tier.
func tierSettingsOf(kind string) []TierSetting {
	return slices.DeleteFunc(slices.Clone(tierSettings),
		func(s TierSetting) bool { return !slices.Contains(s.Kinds, kind) })
}

// kindsWith returns the kinds of tiers that have a key.
func kindsWith(key string) (kinds []string) {
	for _, kind := range tierKinds {
		if slices.ContainsFunc(tierSettingsOf(kind),
			func(s TierSetting) bool { return s.Key == key }) {
			kinds = append(kinds, kind)
		}
	}
	return kinds
}

// check checks what concerns several keys of a tier.
func (c *TierConfig) check() error {
	var files remote.TLSFiles
	tls := true
	switch c.Kind {
	case tierDAX:
		return c.DAX.check("")
	case tierDisk:
		if c.Disk.Slab > c.Disk.Capacity {
			return fmt.Errorf("slab is %s, above capacity, %s", dax.FormatSize(c.Disk.Slab),
				dax.FormatSize(c.Disk.Capacity))
		}
		if c.Disk.Capacity < int64(len(c.Disk.Paths))<<20 {
			return fmt.Errorf("capacity is %s: a directory wants 1M at least, and a useful one many G", dax.FormatSize(c.Disk.Capacity))
		}
	case tierRedis:
		r := &c.Redis
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
		files, tls = r.Files, r.TLS
	case tierS3:
		files, tls = c.S3.Files, strings.HasPrefix(c.S3.Endpoint, "https:")
	}
	if (files.Cert == "") != (files.Key == "") {
		return errors.New("cert_file and key_file: set both or neither")
	}
	if !tls && files != (remote.TLSFiles{}) {
		return errors.New("ca_file and cert_file are for TLS, and the connection has none: write the URL with rediss://, or the endpoint with https://")
	}
	return nil
}

// check checks what concerns several settings of devices, whose names begin with at.
func (c *DAXDevices) check(at string) error {
	switch {
	case len(c.Devices) == 0 && !c.HotPlug:
		return fmt.Errorf("%[1]sdevices is missing: add the devices' paths, such as [/dev/dax0.0]; only with %[1]shotplug: true there may be none at the start", at)
	case c.Rank >= c.Ranks:
		return fmt.Errorf("%[1]srank is %[2]d of %[1]sranks %[3]d: they count from 0", at, c.Rank,
			c.Ranks)
	}
	return nil
}

// lossy is the tier's codec if what comes back may differ from what was stored, or "".
func (c *TierConfig) lossy() string {
	name := c.Redis.Serde
	if c.Kind == tierS3 {
		name = c.S3.Serde
	}
	if codec, err := serde.New(name); err != nil || !codec.Lossy() {
		return ""
	}
	return name
}

// completeTiers names the tiers that have no name, and checks what concerns several of them.
func completeTiers(list []TierConfig) ([]TierConfig, error) {
	if len(list) > engine.MaxTiers {
		return nil, fmt.Errorf("settings: %d tiers, and there may be %d", len(list),
			engine.MaxTiers)
	}
	out := slices.Clone(list)
	names := map[string]string{}
	for _, t := range out {
		if t.Name == "" {
			continue
		}
		if other, ok := names[t.Name]; ok {
			return nil, fmt.Errorf("settings: %s and %s: both tiers are called %q: give one another name", other, t.source, t.Name)
		}
		names[t.Name] = t.source
	}
	dirs := map[string]string{}
	for i := range out {
		t := &out[i]
		for n := 1; t.Name == ""; n++ {
			name := t.Kind
			if n > 1 {
				name = fmt.Sprintf("%s-%d", t.Kind, n)
			}
			if _, taken := names[name]; !taken {
				t.Name = name
				names[name] = t.source
			}
		}
		for _, dir := range t.Disk.Paths {
			for other, name := range dirs {
				if dir == other || strings.HasPrefix(dir, other+"/") ||
					strings.HasPrefix(other, dir+"/") {
					return nil, fmt.Errorf("settings: %s: disk tier %q: %s and %s of tier %q are one in the other: give each a directory of its own", t.source, t.Name, dir, other, name)
				}
			}
		}
		for _, dir := range t.Disk.Paths {
			dirs[dir] = t.Name
		}
	}
	return out, nil
}

// tiersDoc writes the part of docs/configuration.md that is about tiers.
func tiersDoc(b *strings.Builder) {
	b.WriteString(`## tiers

The tiers below the arena, as a list, nearest first. A lookup walks them in this order; what it finds is brought into the arena. Without any,
the arena is all there is.

` + "```yaml" + `
tiers:
  - kind: dax
    devices: [{path: /dev/dax0.0, size: 100G}, /dev/dax1.0]
  - kind: disk
    paths: [/mnt/nvme0/kv, /mnt/nvme1/kv]
    capacity: 200G
  - kind: redis
    url: rediss://lookaside@cache.internal:6379/0
    password_file: /run/secrets/redis
    admit: reused
    ttl: 24h
  - kind: s3
    url: s3://kv-cache/llama
    endpoint: https://minio.internal:9000
` + "```" + `

On the command line and in the environment a tier is one word. Flags may be repeated, and are taken in their order whatever their kinds; a
variable may hold several words, and the tiers of ` + "`" + TierEnv(tierDAX) + "` come before those of `" + TierEnv(tierDisk) + "`, `" + TierEnv(tierRedis) + "` and `" + TierEnv(tierS3) + "`" + `. If there is any such flag, the
tiers of the environment and of the file are not used; if there is any such variable, those of the file are not.

| kind | flag | variable | form | for example |
|---|---|---|---|---|
`)
	for _, kind := range tierKinds {
		form := strings.ReplaceAll(shortForms[kind], "|", "\\|")
		fmt.Fprintf(b, "| %s | `--%s` | `%s` | `%s` | `%s` |\n", kind, kind, TierEnv(kind), form,
			shortExamples[kind])
	}
	b.WriteString("\n")
	table := func(title string, list []TierSetting) {
		fmt.Fprintf(b, "### %s\n\n| key | value | default | meaning |\n|---|---|---|---|\n", title)
		for _, s := range list {
			key, def := "`"+s.Key+"`", shownDefault(s.Default, s.derived)
			if s.required {
				def = "(required)"
			}
			if title == allTiersTitle && len(s.Kinds) < len(tierKinds) {
				key += " (" + strings.Join(s.Kinds, ", ") + ")"
			}
			fmt.Fprintf(b, "| %s | %s | %s | %s |\n", key, s.Unit, def, s.Meaning)
		}
		b.WriteString("\n")
	}
	table(allTiersTitle, commonTierSettings)
	table("DAX", daxSettings)
	table("Disk", diskSettings)
	table("Redis, Valkey", redisSettings)
	table("S3", s3Settings)
}

const allTiersTitle = "All tiers"
