package settings

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/agnivade/levenshtein"
	"github.com/knadh/koanf/parsers/yaml"
	"github.com/knadh/koanf/providers/env/v2"
	"github.com/knadh/koanf/providers/posflag"
	"github.com/knadh/koanf/providers/rawbytes"
	"github.com/knadh/koanf/v2"
	"github.com/spf13/pflag"
)

// Load reads the settings from the YAML file (flag --config, else environment LOOKASIDE_CONFIG,
// else none), the environment and the flags of fs. Each source overrides the one before. The tiers
// of one source replace all tiers of the sources before it. fs may be nil: no flags. An unknown
// name is an error that contains the nearest right one.
func Load(fs *pflag.FlagSet, environ []string) (Config, error) {
	k := koanf.New(".")
	var entries []tierEntry
	if file := fileName(fs, environ); file != "" {
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
		if err := loadFlags(k, fs); err != nil {
			return Config{}, err
		}
	}
	return settle(k, entries, environ)
}

// fileName returns the name of the YAML file, or "".
func fileName(fs *pflag.FlagSet, environ []string) (file string) {
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
	return file
}

func loadFlags(k *koanf.Koanf, fs *pflag.FlagSet) error {
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
		return fmt.Errorf("settings: flags: %w", err)
	}
	return nil
}

// Parse reads the settings only from a YAML text, as Load reads those of a file. The name is for
// errors.
func Parse(name string, text []byte, environ []string) (Config, error) {
	k := koanf.New(".")
	entries, err := loadYAML(k, name, text)
	if err != nil {
		return Config{}, err
	}
	return settle(k, entries, environ)
}

// settle makes a configuration from the merged sources.
func settle(k *koanf.Koanf, entries []tierEntry, environ []string) (Config, error) {
	c := Defaults()
	var given []Setting
	for _, s := range settings {
		if !k.Exists(s.Key) {
			continue
		}
		// k holds strings from flags and the environment. loadYAML has turned scalars and lists of
		// YAML into strings.
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
			if err := formerError("settings: "+file, key, "", Setting.key); err != nil {
				return nil, err
			}
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
			text, err := yamlTierValue(key[strings.LastIndex(key, ".")+1:], v)
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
			if err == nil {
				err = formerError("settings: environment", name, "", Setting.Env)
			}
			if err == nil && looksLikeSetting(name) {
				err = unknown(fmt.Sprintf("settings: unknown environment variable %s", name), name,
					"", append(settingNames(Setting.Env), TierEnv(TierDAX), TierEnv(TierDisk),
						TierEnv(TierProgram), TierEnv(TierRedis), TierEnv(TierS3)))
			}
			return "", nil
		},
	})
	if e := k.Load(p, nil); e != nil {
		return fmt.Errorf("settings: environment: %w", e)
	}
	return err
}

// looksLikeSetting reports whether an unknown environment variable was meant to be a setting: it
// contains the name of a section, or is a few letters from a setting. Other variables with our
// prefix belong to other parts, such as the Python package, whose environment a sidecar inherits if
// it started the sidecar.
func looksLikeSetting(name string) bool {
	for _, kind := range tierKinds {
		// Only one letter: these names are short, and so are other programs'.
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

// Complete sets the settings that depend on others and on environ, and checks the rules that
// concern several settings.
func (c Config) Complete(environ []string) (Config, error) {
	for _, complete := range []func() error{
		func() error { return c.Runtime.complete(environ) },
		c.Arena.complete,
		c.Tenants.complete,
		c.LMCache.check,
		c.Events.check,
		func() error { return c.Peers.complete(c.Runtime.Dir) },
		c.Hosts.check,
		func() (err error) { c.Tiers, err = completeTiers(c.Tiers); return },
		c.checkDevices,
	} {
		if err := complete(); err != nil {
			return c, fmt.Errorf("settings: %w", err)
		}
	}
	return c, nil
}
