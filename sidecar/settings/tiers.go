package settings

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"lookaside/tiers/engine"
	"lookaside/tiers/remote"
	"lookaside/tiers/serde"
)

// These are the kinds of tiers. Each is also the name of a flag and, in capitals, the end of the
// name of an environment variable.
const (
	TierDAX     = "dax"
	TierDisk    = "disk"
	TierRedis   = "redis"
	TierS3      = "s3"
	TierProgram = "program"
)

// tierKinds lists all kinds, usually the nearest first.
var tierKinds = []string{TierDAX, TierDisk, TierProgram, TierRedis, TierS3}

// localKinds are the kinds whose tiers know from memory what they hold.
var localKinds = []string{TierDAX, TierDisk}

// Local reports whether the tier knows from memory what it holds.
func (c *TierConfig) Local() bool { return slices.Contains(localKinds, c.Kind) }

// TierConfig configures one tier below the arena. [OfTiers] has the meaning of the fields. Only the
// part of its Kind is used.
type TierConfig struct {
	Kind          string // dax, disk, program, redis or s3
	Name          string // unique
	Admit         engine.Admission
	Queue         int // chunks
	Workers       int
	LookupTimeout time.Duration // not for devices and disks, whose lookups read only memory
	LoadTimeout   time.Duration
	StoreTimeout  time.Duration
	DAX           DAXConfig
	Disk          DiskConfig
	Redis         remote.RedisOptions // zero fields are its defaults, except those from the URL
	S3            remote.S3Options
	Program       ProgramConfig

	source string // where it was set, for errors
}

// A TierSetting is one key of an entry of the list tiers. Its meaning, unit and default are written
// only here.
type TierSetting struct {
	Key     string
	Kinds   []string // the kinds that have this key
	Default string   // as a user would write it; "" is unset
	Unit    string
	Meaning string

	required bool
	derived  bool // Default is a rule, not a value
	set      func(*TierConfig, string) error
}

// OfTiers returns every key of a tier, in the order of the document. A key may appear more than
// once, with different kinds.
func OfTiers() []TierSetting { return slices.Clone(tierSettings) }

// admissions returns the names of all admissions, in their order.
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
		set: duration(time.Millisecond, field)}
}

func workersSetting(kinds []string, def, unit, meaning string) TierSetting {
	return TierSetting{Key: "workers", Kinds: kinds, Default: def, Unit: unit, Meaning: meaning,
		set: whole(1, 256, func(c *TierConfig) *int { return &c.Workers })}
}

func textSetting(key string, kinds []string, def, unit, meaning string,
	field func(*TierConfig) *string) TierSetting {
	return TierSetting{Key: key, Kinds: kinds, Default: def, Unit: unit, Meaning: meaning,
		set: text(field)}
}

func choiceSetting(key string, kinds []string, def, meaning string, of []string,
	field func(*TierConfig) *string) TierSetting {
	return TierSetting{Key: key, Kinds: kinds, Default: def, Unit: choices(of), Meaning: meaning,
		set: choice(of, field)}
}

var tierSettings = slices.Concat(commonTierSettings, daxSettings, diskSettings,
	programSettings, redisSettings, s3Settings)

var commonTierSettings = []TierSetting{
	{
		Key: "kind", Kinds: tierKinds, Unit: "dax, disk, program, redis or s3", required: true,
		Meaning: "What the tier is.",
		// setKind has read it already
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
			"when it is hit for the first time (reused); shortly before it would be evicted from the arena (evicted), or only if it is likely to be asked for again then (learned); or never: what is there is only read. " +
			"docs/sizing.md has what each costs.",
		set: func(c *TierConfig, v string) error {
			c.Admit = engine.Admission(max(slices.Index(admissions(), v), 0))
			return nearestOf(v, admissions())
		},
	},
	{
		Key: "queue", Kinds: tierKinds, Default: "4096", Unit: "chunks",
		Meaning: "How many chunks may wait to be written. What comes when it is full is not written to the tier and is counted as shed: a tier that is slower than vLLM never slows it down.",
		set:     whole(1, 1<<20, func(c *TierConfig) *int { return &c.Queue }),
	},
	workersSetting([]string{TierDisk}, "4", "I/O goroutines",
		"How many reads and writes are under way at a time."),
	workersSetting([]string{TierProgram, TierRedis}, "4", "calls",
		"How many loads, and how many stores, are under way at a time."),
	workersSetting([]string{TierS3}, "8", "calls",
		"How many loads, and how many stores, are under way at a time."),
	timeoutSetting("lookup_timeout", "500ms",
		"How long asking what it has may take. What it has not answered by then is a miss; several in a row turn the tier off for a while.",
		[]string{TierProgram, TierRedis, TierS3},
		func(c *TierConfig) *time.Duration { return &c.LookupTimeout }),
	timeoutSetting("load_timeout", "2s",
		"How long loading a batch of chunks may take. A chunk that is not there by then is a miss; several in a row turn the tier off for a while.",
		[]string{TierDAX, TierDisk, TierProgram, TierRedis},
		func(c *TierConfig) *time.Duration { return &c.LoadTimeout }),
	timeoutSetting("load_timeout", "10s",
		"How long loading a batch of chunks may take. A chunk that is not there by then is a miss; several in a row turn the tier off for a while.",
		[]string{TierS3}, func(c *TierConfig) *time.Duration { return &c.LoadTimeout }),
	timeoutSetting("store_timeout", "30s",
		"How long writing a batch of chunks may take. What is not written by then is given up.",
		tierKinds, func(c *TierConfig) *time.Duration { return &c.StoreTimeout }),
}

func countSetting(key string, kinds []string, def string, least, most int, unit, meaning string,
	field func(*TierConfig) *int) TierSetting {
	return TierSetting{Key: key, Kinds: kinds, Default: def, Unit: unit, Meaning: meaning,
		set: whole(least, most, field)}
}

func flagSetting(key string, kinds []string, meaning string,
	field func(*TierConfig) *bool) TierSetting {
	return TierSetting{Key: key, Kinds: kinds, Default: "false", Unit: boolUnit, Meaning: meaning,
		set: boolean(field)}
}

const evictionMeaning = "Which chunk leaves first when the store is full. Never one whose continuation is held: a continuation without its prefix is worth nothing."

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

// lossyMeaning describes which codecs change the values they carry.
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
