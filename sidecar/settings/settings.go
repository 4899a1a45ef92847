// Package settings has what a user may set of a sidecar: where a value may come from (a YAML file,
// the environment, flags), what each setting means, and its page in docs. One file has one section
// of that page: the struct that the sidecar reads, and the table of its settings.
//
// A [Config] is a plain struct. [Load] and [Parse] make one that is complete and checked.
package settings

import (
	"fmt"
	"slices"
	"strings"
)

// EnvPrefix begins the name of every environment variable that is a setting.
const EnvPrefix = "LOOKASIDE_"

// EnvConfigFile names the YAML file when the --config flag does not.
const EnvConfigFile = EnvPrefix + "CONFIG"

// Config is what one sidecar runs with. The zero value is not usable: start from [Defaults] or
// [Load]. Meaning, unit and default of each field are in [All], which is also where the
// command's help and docs/configuration.md come from.
type Config struct {
	Runtime   RuntimeConfig
	Arena     ArenaConfig
	Tiers     []TierConfig // below the arena, nearest first; see [OfTiers]
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

// All returns every setting, in the order in which they are documented.
func All() []Setting { return slices.Clone(settings) }

var settings = slices.Concat(runtimeSettings, arenaSettings, lookupSettings, promotionSettings,
	cascadeSettings, sessionsSettings, spacesSettings, lmcacheSettings, eventsSettings,
	peersSettings, adminSettings, logSettings, lifecycleSettings)

// Defaults returns the configuration that an empty file, environment and command line give. The
// derived settings are filled in by [Config.Complete].
func Defaults() Config {
	var c Config
	for _, s := range settings {
		if s.derived || s.Default == "" {
			continue
		}
		if err := s.set(&c, s.Default); err != nil {
			panic(fmt.Sprintf("settings: default of %s: %v", s.Key, err))
		}
	}
	return c
}
