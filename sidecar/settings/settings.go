// Package settings has the settings of a sidecar: their sources (a YAML file, the environment,
// flags), their meanings, and their page in docs. Each file has one section of that page: the
// struct that the sidecar reads, and the table of its settings.
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

// Config configures one sidecar. The zero value is not usable: start from [Defaults] or [Load].
// [All] has the meaning, unit and default of each field; the command's help and
// docs/configuration.md are made from it.
type Config struct {
	Runtime   RuntimeConfig
	Arena     ArenaConfig
	Tiers     []TierConfig // below the arena, nearest first; see [OfTiers]
	Lookup    LookupConfig
	Cascade   CascadeConfig
	Sessions  SessionsConfig
	Spaces    SpacesConfig
	Hints     HintsConfig
	Demand    DemandConfig
	Tenants   TenantsConfig
	LMCache   LMCacheConfig
	Events    EventsConfig
	Peers     PeersConfig
	Hosts     HostsConfig
	Admin     AdminConfig
	Log       LogConfig
	Lifecycle LifecycleConfig
}

// A Setting is one setting of a sidecar. Its meaning, unit and default are written only here.
type Setting struct {
	Key     string // as in the YAML file: section.name
	Default string // as a user would write it; it may name another setting that it depends on
	Unit    string // what the value counts, or its form
	Meaning string

	derived bool // Default is a rule that Load applies, not a value
	list    bool // in YAML it may be a list of devices
	onDAX   use  // which kinds of arenas it is for
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

// All returns every setting, in the order of the document.
func All() []Setting { return slices.Clone(settings) }

var settings = slices.Concat(runtimeSettings, arenaSettings, lookupSettings, cascadeSettings,
	demandSettings, sessionsSettings, spacesSettings, hintsSettings, tenantsSettings,
	lmcacheSettings, eventsSettings, peersSettings, hostsSettings, adminSettings, logSettings,
	lifecycleSettings)

// Defaults returns the configuration of an empty file, environment and command line.
// [Config.Complete] sets the derived settings.
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
