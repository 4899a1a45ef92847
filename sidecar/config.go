package sidecar

import (
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/agnivade/levenshtein"
	"github.com/knadh/koanf/parsers/yaml"
	"github.com/knadh/koanf/providers/env/v2"
	"github.com/knadh/koanf/providers/posflag"
	"github.com/knadh/koanf/providers/rawbytes"
	"github.com/knadh/koanf/v2"
	"github.com/spf13/pflag"
	"go.uber.org/zap/zapcore"

	"lookaside/dax"
	"lookaside/ipc/wire"
	"lookaside/tiers/policy"
)

// EnvPrefix begins the name of every environment variable that is a setting.
const EnvPrefix = "LOOKASIDE_"

// EnvConfigFile names the YAML file when the --config flag does not.
const EnvConfigFile = EnvPrefix + "CONFIG"

// maxRegions bounds the regions of an arena: the engine names a slot's region in a few bits.
const maxRegions = 60

// Config is what one sidecar runs with. The zero value is not usable: start from [Defaults] or
// [Load]. Meaning, unit and default of each field are in [Settings], which is also where the
// command's help and docs/configuration.md come from.
type Config struct {
	Runtime   RuntimeConfig
	Arena     ArenaConfig
	Tiers     []TierConfig // below the arena, nearest first; see [TierSettings]
	Lookup    LookupConfig
	Promotion PromotionConfig
	Cascade   CascadeConfig
	Sessions  SessionsConfig
	Spaces    SpacesConfig
	LMCache   LMCacheConfig
	Events    EventsConfig
	Peers     PeersConfig
	Admin     AdminConfig
	Log       LogConfig
	Lifecycle LifecycleConfig
}

// RuntimeConfig says where the sidecar's sockets are.
type RuntimeConfig struct {
	Dir string // the endpoint: an absolute path of a directory that the sidecar owns
}

// kindDAX is the kind of an arena on DAX devices, which package dax does not make as it makes the
// others.
const kindDAX dax.Kind = "dax"

// ArenaConfig sizes the shared memory. Sizes are in bytes.
type ArenaConfig struct {
	Limit           int64
	Kind            dax.Kind
	Initial         int64 // never above Limit
	Step            int64
	GrowAt          float64 // fraction of the arena's slots that are taken
	Path            string  // only for dax.KindFile: the directory of the backing files
	NUMA            string  // "none", "auto" or a node's number
	PopulateThreads int     // 0: one a CPU
	Eviction        string  // name of a policy
	LowWater        float64 // fraction of the slots
	CheckRate       int64   // bytes a second; 0: what is in the arena is not checked
	CheckEvery      time.Duration
	// only for kindDAX, which uses of the others Kind, Eviction, LowWater, CheckRate and CheckEvery
	DAX DAXDevices
}

// LookupConfig limits lookups.
type LookupConfig struct {
	MaxPages int
	Lease    time.Duration
	Promote  string // auto, always or never
	Deadline time.Duration
}

// PromotionConfig limits promotions, which bring chunks from the tiers into the arena.
type PromotionConfig struct {
	Share float64 // fraction of the slots
}

// CascadeConfig says how chunks are written to the tiers.
type CascadeConfig struct {
	PartialDelay time.Duration
}

// SessionsConfig limits sessions.
type SessionsConfig struct {
	Limit      int
	Share      float64
	JointShare float64
}

// SpacesConfig limits spaces.
type SpacesConfig struct {
	Limit int
}

// EventsConfig has what the arena holds published, as vLLM publishes what its own cache holds.
type EventsConfig struct {
	Endpoint       string // empty: not published
	Bind           string // auto, true or false
	ReplayEndpoint string // empty: not replayed
	TokenFile      string // empty: no token
	Topic          string // a template; see topicOf
	Hashes         wire.KVHashes
	BufferSteps    int
	HWM            int
	Interval       time.Duration
	DPRank         uint32
	Journal        int64 // bytes; 0: nobody can follow
}

// PeersConfig has sidecars of one host share what they hold.
type PeersConfig struct {
	Enabled    bool
	Dir        string // empty: beside runtime.dir
	HintsLimit int64  // bytes
	Slots      int    // chunks of each geometry
	Linger     time.Duration
	CopyAfter  int // lookups; 0: never
	SkipStores bool
}

// LMCacheConfig turns on LMCache's lookup messages; both endpoints or none.
type LMCacheConfig struct {
	WorkerEndpoint    string
	SchedulerEndpoint string
	EngineID          string
}

// AdminConfig configures the admin HTTP server.
type AdminConfig struct {
	Listen    string
	Hosts     []string
	TokenFile string
	PProf     bool
}

// LogConfig configures logging.
type LogConfig struct {
	Level  string
	Format string
}

// LifecycleConfig says how a sidecar ends.
type LifecycleConfig struct {
	IdleExit time.Duration // 0: never
	Drain    time.Duration
	Flush    time.Duration
}

// A Setting is one thing that a user may set. It is the only place where its meaning, unit and
// default are written.
type Setting struct {
	Key     string // as in the YAML file: section.name
	Default string // as a user would write it; may name another setting where it depends on one
	Unit    string // what the value counts, or its form
	Meaning string

	derived bool // Default is a rule that Load applies, not a value
	list    bool // in YAML it may be a list of devices
	onDAX   use  // whether it is of use for an arena on DAX
	set     func(*Config, string) error
}

// A use says for which arenas a setting is.
type use uint8

const (
	everywhere use = iota
	onlyOnDAX      // and an error with arenas of another kind
	neverOnDAX     // and an error there
)

// boolUnit is the Unit of settings that are true or false. Their flags need no value.
const boolUnit = "true or false"

// Env returns the name of the environment variable of the setting.
func (s Setting) Env() string {
	return EnvPrefix + strings.ToUpper(strings.NewReplacer(".", "_", "-", "_").Replace(s.Key))
}

// Flag returns the name of the setting's flag, without dashes.
func (s Setting) Flag() string {
	return strings.NewReplacer(".", "-", "_", "-").Replace(s.Key)
}

// Settings returns every setting, in the order in which they are documented.
func Settings() []Setting { return slices.Clone(settings) }

var settings = []Setting{
	{
		Key: "runtime.dir", Default: "${XDG_RUNTIME_DIR:-/tmp}/lookaside-$UID/rank-0",
		Unit: "directory", derived: true,
		Meaning: "The endpoint: where the sidecar makes its sockets. Owned by it alone: made with mode 0700, refused if another user owns it, others may enter it, or it is a symbolic link.",
		set:     func(c *Config, v string) error { c.Runtime.Dir = v; return nil },
	},
	{
		Key: "arena.limit", Default: "4G", Unit: "bytes (K, M, G and T are powers of 1024)",
		onDAX:   neverOnDAX,
		Meaning: "The most shared memory that KV pages may take. Checked at the start against what the host and its cgroup can give.",
		set: func(c *Config, v string) (err error) {
			c.Arena.Limit,
				err = parseSize(v)
			return
		},
	},
	{
		Key: "arena.kind", Default: "auto", Unit: "auto, hugetlb, thp, memfd, file or dax",
		Meaning: "What the arena is made of: 2 MiB huge pages (hugetlb), transparent huge pages (thp), 4 KiB pages (memfd), files in arena.path, or the DAX devices of arena.devices. auto takes the first of hugetlb, thp and memfd that this host gives, and logs which and why. " +
			"What an arena on DAX holds is found again after a restart or a crash; it is as large as its devices, and arena.limit, initial, step, grow_at, path, numa and populate_threads are errors with it.",
		set: func(c *Config, v string) error {
			kinds := []dax.Kind{dax.KindAuto, dax.KindHugetlb, dax.KindTHP, dax.KindMemfd,
				dax.KindFile, kindDAX}
			if !slices.Contains(kinds, dax.Kind(v)) {
				return fmt.Errorf("%q is none of %v", v, kinds)
			}
			c.Arena.Kind = dax.Kind(v)
			return nil
		},
	},
	{
		Key: "arena.initial", Default: "min(arena.limit, 1G)", Unit: "bytes", derived: true,
		onDAX:   neverOnDAX,
		Meaning: "How much of the arena is made at the start.",
		set: func(c *Config, v string) (err error) {
			c.Arena.Initial,
				err = parseSize(v)
			return
		},
	},
	{
		Key: "arena.step", Default: "max(256M, arena.limit/4)", Unit: "bytes", derived: true,
		onDAX:   neverOnDAX,
		Meaning: "By how much the arena grows at a time, in the background, until arena.limit.",
		set:     func(c *Config, v string) (err error) { c.Arena.Step, err = parseSize(v); return },
	},
	{
		Key: "arena.grow_at", Default: "0.8", Unit: "fraction of the arena, above 0 and at most 1",
		onDAX:   neverOnDAX,
		Meaning: "How full the arena is when it starts to grow.",
		set: func(c *Config, v string) (err error) {
			c.Arena.GrowAt, err = parseFraction(v)
			return
		},
	},
	{
		Key: "arena.path", Default: "", Unit: "directory", onDAX: neverOnDAX,
		Meaning: "Where the arena's files are made when arena.kind is file; it must not be set otherwise. Files of an earlier run are replaced.",
		set:     func(c *Config, v string) error { c.Arena.Path = v; return nil },
	},
	{
		Key: "arena.numa", Default: "none", Unit: "none, auto or a node's number",
		onDAX:   neverOnDAX,
		Meaning: "Which NUMA node the arena's memory comes from. auto: the node of the CPUs that the sidecar may run on, when they are all of one node.",
		set: func(c *Config, v string) error {
			if n, err := strconv.Atoi(v); v != "none" && v != "auto" && (err != nil || n < 0) {
				return fmt.Errorf("%q is neither none, auto nor the number of a node", v)
			}
			c.Arena.NUMA = v
			return nil
		},
	},
	{
		Key: "arena.populate_threads", Default: "0", Unit: "threads (0: one for each CPU)",
		onDAX:   neverOnDAX,
		Meaning: "How many threads fault in new memory of the arena.",
		set: func(c *Config, v string) (err error) {
			c.Arena.PopulateThreads, err = parseInt(v, 0, 1024)
			return
		},
	},
	{
		Key: "arena.eviction", Default: policy.Default, Unit: choices(policy.Names()),
		Meaning: "Which chunk leaves the arena first when there is no room. Never one whose continuation is held: a continuation without its prefix is worth nothing. lookaside simulate compares them on a trace.",
		set: func(c *Config, v string) error {
			c.Arena.Eviction = v
			return nearestOf(v,
				policy.Names())
		},
	},
	{
		Key: "arena.low_water", Default: "0.125",
		Unit:    "fraction of the arena's slots, above 0 and at most 1",
		Meaning: "A tier with admit: evicted is written to while fewer slots than these are free, so that what is evicted then is there already.",
		set: func(c *Config, v string) (err error) {
			c.Arena.LowWater,
				err = parseFraction(v)
			return
		},
	},
	{
		Key: "arena.check_rate", Default: "256M", Unit: "bytes a second (0: never)",
		Meaning: "How much of the arena is read at most in a second to find bytes that have changed since they were stored: by bad memory, or by a client that writes where it must not. What is found is dropped, logged and counted. " +
			"With 0 nothing is checked, also not before it is written to a tier.",
		set: func(c *Config, v string) (err error) {
			if c.Arena.CheckRate = 0; v != "0" {
				c.Arena.CheckRate, err = parseSize(v)
			}
			return
		},
	},
	{
		Key: "arena.check_every", Default: "10m", Unit: "duration",
		Meaning: "How long a walk over the whole arena takes at least: what has changed is found within it, and until then may be loaded. A large arena takes longer, by arena.check_rate.",
		set: func(c *Config, v string) (err error) {
			c.Arena.CheckEvery, err = parseDuration(v, time.Millisecond)
			return
		},
	},
	{
		Key: "arena.devices", Default: "",
		Unit: "DEVICE[:SIZE],… (in the file also a list of devices, or of {path: DEVICE, size: BYTES})", list: true, onDAX: onlyOnDAX,
		Meaning: "With arena.kind: dax, the DAX devices (/dev/daxX.Y) that the arena lies on, or files on a file system mounted with -o dax, and how much to use of each: a multiple of its alignment; all, if nothing is said. It may be empty if arena.hotplug is true. Workers map the devices, and copy straight to and from them.",
		set:     func(c *Config, v string) error { return c.Arena.DAX.addAll(v) },
	},
	{
		Key: "arena.offset", Default: "0", Unit: sizeUnit, onDAX: onlyOnDAX,
		Meaning: "Where in each device of arena.devices begins what is used of it: a multiple of its alignment. What lies before and behind is left to others.",
		set: func(c *Config, v string) (err error) {
			c.Arena.DAX.Offset,
				err = dax.ParseSize(v)
			return
		},
	},
	{
		Key: "arena.ranks", Default: "1", Unit: "sidecars", onDAX: onlyOnDAX,
		Meaning: "How many sidecars share arena.devices, one for each rank: each has an equal part of what is used of a device.",
		set: func(c *Config, v string) (err error) {
			c.Arena.DAX.Ranks,
				err = parseInt(v, 1, maxRanks)
			return
		},
	},
	{
		Key: "arena.rank", Default: "0", Unit: "number", onDAX: onlyOnDAX,
		Meaning: "Which of these parts is this sidecar's, from 0.",
		set: func(c *Config, v string) (err error) {
			c.Arena.DAX.Rank,
				err = parseInt(v, 0, maxRanks-1)
			return
		},
	},
	{
		Key: "arena.allow_files", Default: "false", Unit: boolUnit, onDAX: onlyOnDAX,
		Meaning: "Whether regular files may stand in for arena.devices. One that is not there is made, of the size that is set.",
		set: func(c *Config, v string) (err error) {
			c.Arena.DAX.AllowFiles,
				err = parseBool(v)
			return
		},
	},
	{
		Key: "arena.hotplug", Default: "false", Unit: boolUnit, onDAX: onlyOnDAX,
		Meaning: "Whether devices of the arena may be added, removed and resized while the sidecar serves, by lookaside dax --arena and over HTTP.",
		set: func(c *Config, v string) (err error) {
			c.Arena.DAX.HotPlug,
				err = parseBool(v)
			return
		},
	},
	{
		Key: "arena.slab", Default: "a 32nd of all devices, from 256M to 64G", Unit: sizeUnit,
		derived: true, onDAX: onlyOnDAX,
		Meaning: "Size of the pieces that arena.devices are cut into. Each has room for chunks of one geometry, and is a region that workers map.",
		set: func(c *Config, v string) (err error) {
			c.Arena.DAX.Slab,
				err = parseSize(v)
			return
		},
	},
	{
		Key: "lookup.max_pages", Default: "65536", Unit: "pages",
		Meaning: "The most page hashes that one lookup or one store may name. A longer lookup is answered for as many, a longer store is refused; the connector reads it and asks for no more.",
		set: func(c *Config, v string) (err error) {
			c.Lookup.MaxPages,
				err = parseInt(v, 1, 1<<20)
			return
		},
	},
	{
		Key: "lookup.lease", Default: "30s", Unit: "duration",
		Meaning: "How long a lookup keeps what it found from being evicted while no worker has taken it over to load it.",
		set: func(c *Config, v string) (err error) {
			c.Lookup.Lease, err = parseDuration(v, time.Millisecond)
			return
		},
	},
	{
		Key: "lookup.promote", Default: "auto", Unit: choices(promoteModes),
		Meaning: "Whether a lookup waits for what the tiers have. auto: unless vLLM would compute it again sooner than it arrives, going by each tier's measured latency and bandwidth and by vLLM's prefill rate.",
		set: func(c *Config, v string) error {
			c.Lookup.Promote = v
			return nearestOf(v,
				promoteModes)
		},
	},
	{
		Key: "lookup.deadline", Default: "3s", Unit: "duration",
		Meaning: "The longest that a lookup waits for the tiers: then it is answered with what is in the arena. A lookup may ask for a shorter one.",
		set: func(c *Config, v string) (err error) {
			c.Lookup.Deadline, err = parseDuration(v, time.Millisecond)
			return
		},
	},
	{
		Key: "promotion.share", Default: "0.5",
		Unit:    "fraction of the arena's slots, above 0 and at most 1",
		Meaning: "The most slots that may be filling from the tiers at a time; further promotions wait for their turn.",
		set: func(c *Config, v string) (err error) {
			c.Promotion.Share,
				err = parseFraction(v)
			return
		},
	},
	{
		Key: "cascade.partial_delay", Default: "1s", Unit: "duration",
		Meaning: "How long a partly filled chunk must not have grown before it is written to the tiers. Whole ones are written at once.",
		set: func(c *Config, v string) (err error) {
			c.Cascade.PartialDelay, err = parseDuration(v, time.Millisecond)
			return
		},
	},
	{
		Key: "sessions.limit", Default: "64", Unit: "sessions",
		Meaning: "The most clients connected at a time: one for each scheduler and one for each worker. Further ones are refused as busy.",
		set: func(c *Config, v string) (err error) {
			c.Sessions.Limit,
				err = parseInt(v, 1, 4096)
			return
		},
	},
	{
		Key: "sessions.share", Default: "0.5",
		Unit:    "fraction of the arena's slots, above 0 and at most 1",
		Meaning: "The most that one session may hold leased or half written, so that a frozen client cannot fill the arena.",
		set: func(c *Config, v string) (err error) {
			c.Sessions.Share,
				err = parseFraction(v)
			return
		},
	},
	{
		Key: "sessions.joint_share", Default: "0.75",
		Unit:    "fraction of the arena's slots, above 0 and at most 1",
		Meaning: "The most that all sessions together may hold leased or half written. It and sessions.share are of what frozen clients do not hold: those keep what they have, and the others get along with the rest, however many freeze.",
		set: func(c *Config, v string) (err error) {
			c.Sessions.JointShare,
				err = parseFraction(v)
			return
		},
	},
	{
		Key: "spaces.limit", Default: "16", Unit: "spaces",
		Meaning: "The most kinds of pages (model, precision, layout, …) held side by side. A worker that needs one more has the one dropped from the arena that was used longest ago, of those that have no session, lease or pin; what the tiers below hold of that stays. If all of them have, it is refused.",
		set: func(c *Config, v string) (err error) {
			c.Spaces.Limit,
				err = parseInt(v, 1, 1024)
			return
		},
	},
	{
		Key: "lmcache.worker_endpoint", Default: "",
		Unit:    "ZMQ endpoint, such as ipc:///run/x/engine_0_service_lookup_worker_lmcache_rpc_port_0",
		Meaning: "Where the sidecar binds the socket on which it receives LMCache's lookup messages. Needs lmcache.scheduler_endpoint.",
		set: func(c *Config,
			v string) error {
			c.LMCache.WorkerEndpoint = v
			return checkIPCEndpoint(v)
		},
	},
	{
		Key: "lmcache.scheduler_endpoint", Default: "", Unit: "ZMQ endpoint",
		Meaning: "Where LMCache's scheduler side receives the answers; the sidecar connects to it. Needs lmcache.worker_endpoint.",
		set: func(c *Config,
			v string) error {
			c.LMCache.SchedulerEndpoint = v
			return checkIPCEndpoint(v)
		},
	},
	{
		Key: "lmcache.engine_id", Default: "", Unit: "engine id",
		Meaning: "Whose pages LMCache's lookups ask for, when several engines with 8-byte hashes use the sidecar.",
		set:     func(c *Config, v string) error { c.LMCache.EngineID = v; return nil },
	},
	{
		Key: "events.endpoint", Default: "",
		Unit:    "ZMQ endpoint, such as ipc:///run/x/events or tcp://127.0.0.1:5657",
		Meaning: "Where the sidecar publishes which pages the arena holds, in vLLM's format of KV events (docs/events.md). Unset: nothing is published.",
		set: func(c *Config,
			v string) error {
			c.Events.Endpoint = v
			return checkEventsEndpoint(v)
		},
	},
	{
		Key: "events.bind", Default: "auto", Unit: "auto, true or false",
		Meaning: "Whether the sidecar listens at events.endpoint, or connects to a subscriber that listens there. auto: as vLLM does, it listens if the endpoint has a wildcard (tcp://*:5657) or is of ipc://.",
		set: func(c *Config, v string) error {
			c.Events.Bind = v
			return oneOf(v, "auto", "true", "false")
		},
	},
	{
		Key: "events.replay_endpoint", Default: "", Unit: "ZMQ endpoint",
		Meaning: "Where subscribers may ask for events again from a sequence number on; the sidecar binds it. Needs events.endpoint.",
		set: func(c *Config,
			v string) error {
			c.Events.ReplayEndpoint = v
			return checkEventsEndpoint(v)
		},
	},
	{
		Key: "events.token_file", Default: "", Unit: "file",
		Meaning: "A file with the token that subscribers must send as the password of ZeroMQ's PLAIN mechanism, with any user name. It is asked for wherever the sidecar listens for subscribers. Unset: none is asked for, and a listening address that other machines can reach is warned about. PLAIN does not encrypt.",
		set:     func(c *Config, v string) error { c.Events.TokenFile = v; return nil },
	},
	{
		Key: "events.topic", Default: "kv@{host}@{model}", Unit: "text",
		Meaning: "The topic of events. {model} and any other field of the space that the pages are of (lookaside status lists them), {fingerprint}, {host} and {rank} (events.data_parallel_rank) are filled in.",
		set:     func(c *Config, v string) error { c.Events.Topic = v; return checkTopic(v) },
	},
	{
		Key: "events.hashes", Default: "int", Unit: "int or bytes",
		Meaning: "How events name blocks: by the last 8 bytes of their hash as a number, vLLM's default, or by the whole hash, as vLLM does with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0.",
		set: func(c *Config, v string) error {
			switch v {
			case "int":
				c.Events.Hashes = wire.KVHashInts
			case "bytes":
				c.Events.Hashes = wire.KVHashBytes
			default:
				return errors.New("want int or bytes")
			}
			return nil
		},
	},
	{
		Key: "events.buffer_steps", Default: "10000", Unit: "batches",
		Meaning: "How many batches are kept for events.replay_endpoint, within 64 MiB.",
		set: func(c *Config, v string) (err error) {
			c.Events.BufferSteps,
				err = parseInt(v, 1, 1<<24)
			return
		},
	},
	{
		Key: "events.hwm", Default: "1000", Unit: "batches",
		Meaning: "How many batches wait for a subscriber that does not read, before it loses the oldest; within the 64 MiB of events.buffer_steps. A batch has up to 1,024 pages, and then some 10 or 36 KiB.",
		set: func(c *Config, v string) (err error) {
			c.Events.HWM,
				err = parseInt(v, 1, 1<<24)
			return
		},
	},
	{
		Key: "events.interval", Default: "10ms", Unit: "duration",
		Meaning: "How long changes are collected into one batch.",
		set: func(c *Config, v string) (err error) {
			c.Events.Interval,
				err = parseDuration(v, 0)
			return
		},
	},
	{
		Key: "events.data_parallel_rank", Default: "0", Unit: "rank",
		Meaning: "The data-parallel rank of the engine that the sidecar serves, which events carry.",
		set: func(c *Config, v string) error {
			n, err := parseInt(v, 0, 1<<20)
			c.Events.DPRank = uint32(n)
			return err
		},
	},
	{
		Key: "events.journal", Default: "16MiB", Unit: "size",
		Meaning: "How many bytes of changes are remembered for those that follow what the arena holds: events.endpoint, and schedulers whose engines publish KV events. Taken only while somebody follows; who falls behind by more is told everything anew. 0: nobody can follow.",
		set: func(c *Config, v string) (err error) {
			if v == "0" {
				c.Events.Journal = 0
				return nil
			}
			c.Events.Journal, err = dax.ParseSize(v)
			if err == nil && (c.Events.Journal < 512<<10 || c.Events.Journal > 1<<32) {
				err = errors.New("want 0, or 512KiB to 4GiB")
			}
			return err
		},
	},
	{
		Key: "peers.enabled", Default: "true", Unit: boolUnit,
		Meaning: "Whether this sidecar shares what it holds with others of this host (docs/peers.md): each serves hits in all arenas, and workers read them where they lie. Needs events.journal.",
		set: func(c *Config, v string) (err error) {
			c.Peers.Enabled,
				err = parseBool(v)
			return
		},
	},
	{
		Key: "peers.dir", Default: "the directory that runtime.dir is in", Unit: "directory",
		derived: true,
		Meaning: "The directory in which sidecars find each other: those that name the same share. It must be this user's, with mode 0700, for whoever may enter it may read what is held; until it is, nothing is shared, and the log says so.",
		set:     func(c *Config, v string) error { c.Peers.Dir = v; return nil },
	},
	{
		Key: "peers.hints_limit", Default: "512M", Unit: sizeUnit,
		Meaning: "The most memory for what others are said to hold: 21 to 43 bytes a page, which several may hold. What does not fit is not found there.",
		set: func(c *Config, v string) (err error) {
			c.Peers.HintsLimit,
				err = parseSize(v)
			return
		},
	},
	{
		Key: "peers.slots", Default: "65536", Unit: "chunks",
		Meaning: "The most chunks of one geometry that are borrowed at a time. Memory is taken as they are used.",
		set: func(c *Config, v string) (err error) {
			c.Peers.Slots,
				err = parseInt(v, 16, 1<<24)
			return
		},
	},
	{
		Key: "peers.linger", Default: "2s", Unit: "duration",
		Meaning: "How long a borrowed chunk that nobody uses is kept before it is given back: until then it is found as quickly as an own one, and who lent it cannot evict it.",
		set: func(c *Config, v string) (err error) {
			c.Peers.Linger, err = parseDuration(v, time.Millisecond)
			return
		},
	},
	{
		Key: "peers.copy_after", Default: "0", Unit: "lookups",
		Meaning: "After how many lookups that were loaded from another sidecar's arena a chunk is copied into the own one, in the background: from then on it needs no other sidecar, and takes room here as well. 0: nothing is copied.",
		set: func(c *Config, v string) (err error) {
			c.Peers.CopyAfter,
				err = parseInt(v, 0, 1000)
			return
		},
	},
	{
		Key: "peers.skip_stores", Default: "true", Unit: boolUnit,
		Meaning: "Whether a chunk that another sidecar holds is not stored here as well: so several sidecars cost about one cache.",
		set: func(c *Config, v string) (err error) {
			c.Peers.SkipStores,
				err = parseBool(v)
			return
		},
	},
	{
		Key: "admin.listen", Default: "127.0.0.1:0",
		Unit:    "host:port (port 0: any free one, written to admin.addr in runtime.dir)",
		Meaning: "Where the admin HTTP server listens, beside the Unix socket admin.sock in runtime.dir. An address that other machines can reach is warned about.",
		set: func(c *Config, v string) error {
			if _, _, err := net.SplitHostPort(v); err != nil {
				return err
			}
			c.Admin.Listen = v
			return nil
		},
	},
	{
		Key: "admin.hosts", Default: "", Unit: "NAME,…",
		Meaning: "Names, besides this machine's own, localhost and addresses, by which admin requests may name the sidecar in their Host header, such as a Kubernetes service's. Others are refused with 421, because a page in a browser could have bound its own name to the sidecar's address. Not asked of requests that carry the token of admin.token_file.",
		set: func(c *Config, v string) error {
			c.Admin.Hosts = nil
			for name := range strings.SplitSeq(v, ",") {
				if name = strings.TrimSpace(name); name == "" || strings.ContainsAny(name, ":/ ") {
					return fmt.Errorf("%q is not a name without a port", name)
				}
				c.Admin.Hosts = append(c.Admin.Hosts, name)
			}
			return nil
		},
	},
	{
		Key: "admin.token_file", Default: "", Unit: "file",
		Meaning: "A file with the token that requests to admin.listen must carry as \"Authorization: Bearer …\". Unset: none is asked for. /healthz, /readyz and admin.sock never ask for it.",
		set:     func(c *Config, v string) error { c.Admin.TokenFile = v; return nil },
	},
	{
		Key: "admin.pprof", Default: "false", Unit: boolUnit,
		Meaning: "Serves Go's profiles under /debug/pprof/ on the admin server.",
		set: func(c *Config, v string) (err error) {
			c.Admin.PProf, err = parseBool(v)
			return
		},
	},
	{
		Key: "log.level", Default: "info", Unit: "debug, info, warn or error",
		Meaning: "The least that is logged.",
		set: func(c *Config, v string) error {
			c.Log.Level = v
			return oneOf(v, "debug", "info", "warn", "error")
		},
	},
	{
		Key: "log.format", Default: "console", Unit: "console or json",
		Meaning: "How log lines are written to standard error.",
		set: func(c *Config, v string) error {
			c.Log.Format = v
			return oneOf(v, "console", "json")
		},
	},
	{
		Key: "lifecycle.idle_exit", Default: "0", Unit: "duration (0: never)",
		Meaning: "The sidecar ends by itself after this long without a session.",
		set: func(c *Config, v string) (err error) {
			c.Lifecycle.IdleExit, err = parseDuration(v, 0)
			return
		},
	},
	{
		Key: "lifecycle.drain", Default: "5s", Unit: "duration",
		Meaning: "How long a sidecar that was asked to end waits for stores and loads under way.",
		set: func(c *Config, v string) (err error) {
			c.Lifecycle.Drain,
				err = parseDuration(v, 0)
			return
		},
	},
	{
		Key: "lifecycle.flush", Default: "10s", Unit: "duration",
		Meaning: "How long it then goes on writing to the tiers what waits for that.",
		set: func(c *Config, v string) (err error) {
			c.Lifecycle.Flush,
				err = parseDuration(v, 0)
			return
		},
	},
}

var promoteModes = []string{"auto", "always", "never"}

// choices writes a setting's unit.
func choices(of []string) string {
	if len(of) == 1 {
		return of[0]
	}
	return strings.Join(of[:len(of)-1], ", ") + " or " + of[len(of)-1]
}

// Defaults returns the configuration that an empty file, environment and command line give. The
// derived settings are filled in by [Config.Complete].
func Defaults() Config {
	var c Config
	for _, s := range settings {
		if s.derived || s.Default == "" {
			continue
		}
		if err := s.set(&c, s.Default); err != nil {
			panic(fmt.Sprintf("sidecar: default of %s: %v", s.Key, err))
		}
	}
	return c
}

// AddFlags defines --config and a flag for every setting and for every kind of tier, or only for
// the settings with the given keys.
func AddFlags(fs *pflag.FlagSet, keys ...string) {
	fs.String("config", "", "YAML `file` with settings. Environment: "+EnvConfigFile)
	for _, s := range settings {
		if len(keys) == 0 || slices.Contains(keys, s.Key) {
			f := fs.VarPF(&settingFlag{kind: s.valueName()}, s.Flag(), "", s.usage())
			if s.Unit == boolUnit {
				f.NoOptDefVal = "true" // it needs no value, and what follows it is none
			}
		}
	}
	if len(keys) == 0 {
		addTierFlags(fs)
	}
	fs.SortFlags = false
}

// MainFlags are the names of the flags that most sidecars need no others than.
func MainFlags() []string {
	return []string{"config", "runtime-dir", "arena-limit", tierDAX, tierDisk, tierRedis, tierS3,
		"admin-listen"}
}

// settingFlag is the value of a setting's flag. What is right for it is decided by Load.
type settingFlag struct{ text, kind string }

// String implements pflag.Value.
func (f *settingFlag) String() string { return f.text }

// Set implements pflag.Value.
func (f *settingFlag) Set(v string) error {
	f.text = v
	return nil
}

// Type implements pflag.Value: it is what the help calls the value.
func (f *settingFlag) Type() string { return f.kind }

// valueName is what the help calls the setting's value: its unit, if that is short.
func (s Setting) valueName() string {
	if s.Unit == boolUnit {
		return "bool" // which the help does not show
	}
	name, _, _ := strings.Cut(s.Unit, " (")
	if name, _, _ = strings.Cut(name, ", such as "); len(name) > 20 || strings.Contains(name, ",") {
		return "value"
	}
	return name
}

// usage is the help text of the setting's flag.
func (s Setting) usage() string {
	def := s.Default
	if def == "" {
		def = "unset"
	}
	return fmt.Sprintf("%s Value: %s; default: %s", s.Meaning, s.Unit, def)
}

// Load reads the settings of the YAML file (flag --config, else environment LOOKASIDE_CONFIG, else
// none), the environment and the flags of fs, each overriding the one before; of the tiers, all
// that one names take the place of all that one before it named. fs may be nil: no flags. An
// unknown name is an error that says which right one is nearest.
func Load(fs *pflag.FlagSet, environ []string) (Config, error) {
	k := koanf.New(".")
	var entries []tierEntry
	file := ""
	for _, e := range environ {
		if v, ok := strings.CutPrefix(e, EnvConfigFile+"="); ok {
			file = v
		}
	}
	if fs != nil {
		if f := fs.Lookup("config"); f != nil && f.Changed {
			file = f.Value.String()
		}
	}
	if file != "" {
		b, err := os.ReadFile(file)
		if err != nil {
			return Config{}, fmt.Errorf("settings: %w", err)
		}
		if entries, err = loadYAML(k, file, b); err != nil {
			return Config{}, err
		}
	}
	if err := loadEnv(k, environ); err != nil {
		return Config{}, err
	}
	if more := envTiers(environ); len(more) > 0 {
		entries = more
	}
	if fs != nil {
		if more := flagTiers(fs); len(more) > 0 {
			entries = more
		}
		p := posflag.ProviderWithFlag(fs, ".", nil, func(f *pflag.Flag) (string, any) {
			if !f.Changed {
				return "", nil
			}
			for _, s := range settings {
				if s.Flag() == f.Name {
					return s.Key, f.Value.String()
				}
			}
			return "", nil
		})
		if err := k.Load(p, nil); err != nil {
			return Config{}, fmt.Errorf("settings: flags: %w", err)
		}
	}
	return settle(k, entries, environ)
}

// Parse reads the settings of a YAML text alone, as Load reads those of a file. The name is for
// errors.
func Parse(name string, text []byte, environ []string) (Config, error) {
	k := koanf.New(".")
	entries, err := loadYAML(k, name, text)
	if err != nil {
		return Config{}, err
	}
	return settle(k, entries, environ)
}

// settle makes a configuration of what the sources say.
func settle(k *koanf.Koanf, entries []tierEntry, environ []string) (Config, error) {
	c := Defaults()
	var given []Setting
	for _, s := range settings {
		if !k.Exists(s.Key) {
			continue
		}
		// k holds strings from flags and the environment, scalars and lists that loadYAML has made
		// strings of from YAML.
		v := fmt.Sprint(k.Get(s.Key))
		if v == "" && s.derived {
			continue
		}
		if v == "" && s.Default == "" {
			continue
		}
		if err := s.set(&c, v); err != nil {
			return Config{}, fmt.Errorf("settings: %s: %w", s.Key, err)
		}
		given = append(given, s)
	}
	if err := c.Arena.fits(given); err != nil {
		return Config{}, fmt.Errorf("settings: %w", err)
	}
	for _, e := range entries {
		t, err := parseTier(e)
		if err != nil {
			return Config{}, err
		}
		c.Tiers = append(c.Tiers, t)
	}
	return c.Complete(environ)
}

func loadYAML(k *koanf.Koanf, file string, b []byte) ([]tierEntry, error) {
	one := koanf.New(".")
	if err := one.Load(rawbytes.Provider(b), yaml.Parser()); err != nil {
		return nil, fmt.Errorf("settings: %s: %w", file, err)
	}
	tiers, err := yamlTiers(file, one.Get("tiers"))
	if err != nil {
		return nil, err
	}
	one.Delete("tiers")
	for key, v := range one.All() {
		if !slices.ContainsFunc(settings, func(s Setting) bool { return s.Key == key }) {
			return nil, unknown(fmt.Sprintf("settings: %s: unknown setting %q", file, key), key, "",
				append(settingNames(Setting.key), "tiers"))
		}
		switch v := v.(type) {
		case string, bool, int, int64, uint64, float64:
		case []any:
			if i := slices.IndexFunc(settings,
				func(s Setting) bool { return s.Key == key }); !settings[i].list {
				return nil, fmt.Errorf("settings: %s: %s: want a single value, got %v", file, key,
					v)
			}
			text, err := yamlTierValue("devices", v)
			if err == nil {
				err = one.Set(key, text)
			}
			if err != nil {
				return nil, fmt.Errorf("settings: %s: %s: %w", file, key, err)
			}
		default:
			return nil, fmt.Errorf("settings: %s: %s: want a single value, got %v", file, key, v)
		}
	}
	return tiers, k.Merge(one)
}

func loadEnv(k *koanf.Koanf, environ []string) error {
	var err error
	p := env.Provider(".", env.Opt{
		Prefix:      EnvPrefix,
		EnvironFunc: func() []string { return environ },
		TransformFunc: func(name, value string) (string, any) {
			if name == EnvConfigFile {
				return "", nil
			}
			for _, s := range settings {
				if s.Env() == name {
					return s.Key, value
				}
			}
			if err == nil && looksLikeSetting(name) {
				err = unknown(fmt.Sprintf("settings: unknown environment variable %s", name), name,
					"", append(settingNames(Setting.Env), TierEnv(tierDAX), TierEnv(tierDisk),
						TierEnv(tierRedis), TierEnv(tierS3)))
			}
			return "", nil
		},
	})
	if e := k.Load(p, nil); e != nil {
		return fmt.Errorf("settings: environment: %w", e)
	}
	return err
}

// looksLikeSetting reports whether an environment variable that is no setting was meant to be one:
// it names a section, or is a few letters from a setting. Other variables with our prefix belong to
// other parts, such as the Python package, whose environment a sidecar that it starts inherits.
func looksLikeSetting(name string) bool {
	for _, kind := range tierKinds {
		// One letter only: these names are short, and so are others'.
		if d := levenshtein.ComputeDistance(name, TierEnv(kind)); d == 1 {
			return true
		} else if d == 0 {
			return false
		}
	}
	for _, s := range settings {
		section, _, _ := strings.Cut(s.Key, ".")
		if strings.HasPrefix(name, EnvPrefix+strings.ToUpper(section)+"_") ||
			levenshtein.ComputeDistance(name, s.Env()) <= 3 {
			return true
		}
	}
	return false
}

func (s Setting) key() string { return s.Key }

// FlagError adds the nearest right flag of fs to pflag's complaint about an unknown one.
func FlagError(fs *pflag.FlagSet, err error) error {
	var missing *pflag.NotExistError
	if !errors.As(err, &missing) {
		return err
	}
	var names []string
	fs.VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
	return unknown(err.Error(), missing.GetSpecifiedName(), "--", names)
}

// settingNames returns every setting's name as form writes it.
func settingNames(form func(Setting) string) []string {
	names := make([]string, 0, len(settings))
	for _, s := range settings {
		names = append(names, form(s))
	}
	return names
}

// unknown is an error that begins with what and says which of names is nearest to got.
func unknown(what, got, prefix string, names []string) error {
	return fmt.Errorf("%s; the nearest is %q", what, prefix+nearest(got, names))
}

// nearest is the one of names that got was probably meant to be.
func nearest(got string, names []string) string {
	best, distance := "", len(got)+64
	for _, name := range names {
		d := levenshtein.ComputeDistance(strings.ToLower(got), strings.ToLower(name))
		// A name without its section is the commonest slip.
		if i := strings.IndexAny(name, ".-"); i >= 0 && strings.EqualFold(name[i+1:], got) {
			d = 1
		}
		if d < distance {
			best, distance = name, d
		}
	}
	return best
}

// Complete fills in the settings that depend on others and on environ, and checks what concerns
// several at once.
func (c Config) Complete(environ []string) (Config, error) {
	if c.Runtime.Dir == "" {
		c.Runtime.Dir = DefaultDir(environ)
	}
	if !filepath.IsAbs(c.Runtime.Dir) {
		return c, fmt.Errorf("settings: runtime.dir: %q is not an absolute path", c.Runtime.Dir)
	}
	c.Runtime.Dir = filepath.Clean(c.Runtime.Dir)
	if c.Arena.Kind == kindDAX {
		if err := c.Arena.DAX.check("arena."); err != nil {
			return c, fmt.Errorf("settings: arena.kind is dax: %w", err)
		}
		return c.completeRest()
	}
	if c.Arena.Initial == 0 {
		c.Arena.Initial = min(c.Arena.Limit, 1<<30)
	}
	if c.Arena.Initial > c.Arena.Limit {
		return c, fmt.Errorf("settings: arena.initial is %s, above arena.limit, %s",
			dax.FormatSize(c.Arena.Initial), dax.FormatSize(c.Arena.Limit))
	}
	if c.Arena.Step == 0 {
		c.Arena.Step = max(256<<20, c.Arena.Limit/4)
	}
	if n := c.Arena.regions(); n > maxRegions {
		return c, fmt.Errorf("settings: arena.step %s takes %d regions to reach arena.limit %s, and there may be %d",
			dax.FormatSize(c.Arena.Step), n, dax.FormatSize(c.Arena.Limit), maxRegions)
	}
	if c.Arena.Kind == dax.KindFile && c.Arena.Path == "" {
		return c, errors.New("settings: arena.kind is file: arena.path must name a directory")
	}
	if c.Arena.Kind != dax.KindFile && c.Arena.Path != "" {
		return c, fmt.Errorf("settings: arena.path is set, but arena.kind is %s, not file",
			c.Arena.Kind)
	}
	return c.completeRest()
}

// regions is how many regions an arena of memory has at its limit.
func (a *ArenaConfig) regions() int64 { return 1 + (a.Limit-a.Initial+a.Step-1)/a.Step }

// completeRest completes and checks what is not about the arena.
func (c Config) completeRest() (Config, error) {
	if (c.LMCache.WorkerEndpoint == "") != (c.LMCache.SchedulerEndpoint == "") {
		return c, errors.New("settings: lmcache.worker_endpoint and lmcache.scheduler_endpoint: set both or neither")
	}
	if c.Events.ReplayEndpoint != "" && c.Events.Endpoint == "" {
		return c, errors.New("settings: events.replay_endpoint is set, but events.endpoint is not")
	}
	if c.Events.TokenFile != "" && c.Events.ReplayEndpoint == "" && !c.Events.binds() {
		return c, errors.New("settings: events.token_file is set, and the sidecar listens for no subscriber: set events.endpoint, and events.bind to true if the endpoint has no wildcard")
	}
	if c.Events.Endpoint != "" && c.Events.Journal == 0 {
		return c, errors.New("settings: events.endpoint is set, but events.journal is 0: there would be nothing to publish")
	}
	if c.Peers.Dir == "" {
		c.Peers.Dir = defaultPeersDir(c.Runtime.Dir)
	}
	if !filepath.IsAbs(c.Peers.Dir) {
		return c, fmt.Errorf("settings: peers.dir: %q is not an absolute path", c.Peers.Dir)
	}
	var err error
	if c.Tiers, err = completeTiers(c.Tiers); err != nil {
		return c, err
	}
	return c, c.checkDevices()
}

// checkDevices refuses devices that the arena and a tier both want: the one that is opened later
// would find this very process in its way.
func (c *Config) checkDevices() error {
	if c.Arena.Kind != kindDAX {
		return nil
	}
	for _, mine := range c.Arena.DAX.Devices {
		for i := range c.Tiers {
			t := &c.Tiers[i]
			for _, other := range t.DAX.Devices {
				if other.Path != mine.Path {
					continue
				}
				size := other.Size
				if size == 0 {
					size = t.DAX.Size
				}
				before := func(at, size, next int64) bool {
					return size > 0 &&
						at <= math.MaxInt64-size && at+size <= next
				}
				if !before(c.Arena.DAX.Offset, mine.Size, t.DAX.Offset) &&
					!before(t.DAX.Offset, size, c.Arena.DAX.Offset) {
					return fmt.Errorf("settings: %s is in arena.devices and in tier %q: give each a part of its own, by arena.offset, the tier's offset, and sizes", mine.Path, t.Name)
				}
			}
		}
	}
	return nil
}

// fits refuses settings that were given and do not go with the arena's kind: who sets them expects
// something that would not happen.
func (c *ArenaConfig) fits(given []Setting) error {
	for _, s := range given {
		switch on := c.Kind == kindDAX; {
		case on && s.onDAX == neverOnDAX:
			return fmt.Errorf("%s is set, and arena.kind is dax: %s; take it out", s.Key,
				whyNeverOnDAX[s.Key])
		case !on && s.onDAX == onlyOnDAX && !s.isDefault(c):
			return fmt.Errorf("%s is set, but arena.kind is %s: set arena.kind to dax, or take it out", s.Key, c.Kind)
		}
	}
	return nil
}

// isDefault says whether a setting of the arena on DAX, which was given, has no more than its
// default.
func (s Setting) isDefault(c *ArenaConfig) bool {
	with := Config{Arena: *c}
	return s.Default != "" && !s.derived && s.set(&with, s.Default) == nil &&
		reflect.DeepEqual(with.Arena.DAX, c.DAX)
}

// whyNeverOnDAX says why a setting is of no use for an arena on DAX.
var whyNeverOnDAX = map[string]string{
	"arena.limit":            "such an arena is as large as its devices, whose sizes are set as DEVICE:SIZE in arena.devices",
	"arena.initial":          "such an arena has all of its devices from the start",
	"arena.step":             "such an arena does not grow by itself; with arena.hotplug devices are added by lookaside dax add --arena",
	"arena.grow_at":          "such an arena does not grow by itself; with arena.hotplug devices are added by lookaside dax add --arena",
	"arena.path":             "its devices, or the files that stand in for them, are set in arena.devices",
	"arena.numa":             "its memory is of the node that the device is on: see lookaside status",
	"arena.populate_threads": "the memory of a device is there, and need not be faulted in by the sidecar",
}

// DefaultDir is the endpoint that a sidecar uses, and a client looks for, when none is named.
func DefaultDir(environ []string) string {
	base := "/tmp"
	for _, e := range environ {
		if v, ok := strings.CutPrefix(e, "XDG_RUNTIME_DIR="); ok && v != "" {
			base = v
		}
	}
	return filepath.Join(base, "lookaside-"+strconv.Itoa(os.Getuid()), "rank-0")
}

// ConfigurationDoc returns docs/configuration.md.
func ConfigurationDoc() string {
	var b strings.Builder
	b.WriteString(`# Settings of the sidecar

<!-- Generated from the table in sidecar/config.go by: go test ./sidecar -run TestConfigurationDoc -update -->

` + "`lookaside serve`" + ` takes each setting from a YAML file (` + "`--config FILE` or `" + EnvConfigFile + "`" + `), from the environment and from flags; each of
these overrides the one before. An unknown name is an error that says which right one is nearest. In the YAML file the part
before the dot is a section:

` + "```yaml\narena:\n  limit: 16G\n  kind: hugetlb\nlog:\n  format: json\n```" + `

Sizes are bytes or have a suffix: ` + "`500M`, `500MiB`, `4G`" + ` (powers of 1024). Durations have a unit: ` + "`250ms`, `30s`, `5m`" + `.

`)
	section := ""
	for _, s := range settings {
		name, _, _ := strings.Cut(s.Key, ".")
		if name != section {
			if section == "arena" {
				tiersDoc(&b)
			}
			section = name
			fmt.Fprintf(&b, "## %s\n\n", section)
		}
		fmt.Fprintf(&b, "### %s\n\n%s\n\n- Value: %s\n- Default: %s\n- Environment: `%s`; flag: `--%s`\n\n", s.Key, s.Meaning, s.Unit, shownDefault(s.Default, s.derived), s.Env(), s.Flag())
	}
	return strings.TrimRight(b.String(), "\n") + "\n"
}

func shownDefault(def string, derived bool) string {
	switch {
	case def == "":
		return "unset"
	case derived && strings.Contains(def, " "):
		return def
	}
	return "`" + def + "`"
}

// level returns the zap level of log.level.
func (c LogConfig) level() zapcore.Level {
	l, err := zapcore.ParseLevel(c.Level)
	if err != nil {
		return zapcore.InfoLevel
	}
	return l
}

func oneOf(v string, allowed ...string) error {
	if !slices.Contains(allowed, v) {
		return fmt.Errorf("%q is none of %v", v, allowed)
	}
	return nil
}

func parseSize(v string) (int64, error) {
	n, err := dax.ParseSize(v)
	if err == nil && n <= 0 {
		err = fmt.Errorf("%q is not above 0", v)
	}
	return n, err
}

func parseFraction(v string) (float64, error) {
	f, err := strconv.ParseFloat(v, 64)
	if err != nil || !(f > 0 && f <= 1) {
		return 0, fmt.Errorf("%q is not a fraction above 0 and at most 1", v)
	}
	return f, nil
}

func parseBool(v string) (bool, error) {
	b, err := strconv.ParseBool(v)
	if err != nil {
		return false, fmt.Errorf("%q is neither true nor false", v)
	}
	return b, nil
}

func parseInt(v string, low, high int) (int, error) {
	n, err := strconv.Atoi(v)
	if err != nil || n < low || n > high {
		return 0, fmt.Errorf("%q is not a whole number from %d to %d", v, low, high)
	}
	return n, nil
}

func parseDuration(v string, low time.Duration) (time.Duration, error) {
	d, err := time.ParseDuration(v)
	if err != nil {
		return 0, fmt.Errorf("%q is not a duration such as 250ms, 30s or 5m", v)
	}
	if d < low {
		return 0, fmt.Errorf("%q is below %v", v, low)
	}
	return d, nil
}

func checkIPCEndpoint(v string) error {
	if v != "" && !strings.HasPrefix(v, "ipc://") {
		return fmt.Errorf("%q does not start with ipc:// (anything else would let other machines in)", v)
	}
	return nil
}
