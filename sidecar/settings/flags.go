package settings

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/pflag"
)

// AddFlags defines --config and a flag for every setting and for every kind of tier, or only for
// the settings with the given keys.
func AddFlags(fs *pflag.FlagSet, keys ...string) {
	fs.String("config", "", "YAML `file` with settings. Environment: "+EnvConfigFile)
	for _, s := range settings {
		if len(keys) == 0 || slices.Contains(keys, s.Key) {
			f := fs.VarPF(&settingFlag{kind: s.valueName()}, s.Flag(), "", s.usage())
			if s.Unit == boolUnit {
				f.NoOptDefVal = "true" // it needs no value, so the next argument is not its value
			}
		}
	}
	if len(keys) == 0 {
		addTierFlags(fs)
	}
	fs.SortFlags = false
}

// MainFlags returns the names of the flags that are enough for most sidecars.
func MainFlags() []string {
	return []string{"config", "runtime-dir", "arena-limit", TierDAX, TierDisk, TierProgram,
		TierRedis, TierS3, "admin-listen"}
}

// settingFlag is the value of a setting's flag. Load checks it.
type settingFlag struct{ text, kind string }

// String implements pflag.Value.
func (f *settingFlag) String() string { return f.text }

// Set implements pflag.Value.
func (f *settingFlag) Set(v string) error {
	f.text = v
	return nil
}

// Type implements pflag.Value. It returns the help's name for the value.
func (f *settingFlag) Type() string { return f.kind }

// valueName returns the help's name for the setting's value: its unit, if that is short.
func (s Setting) valueName() string {
	if s.Unit == boolUnit {
		return "bool" // the help does not show it
	}
	name, _, _ := strings.Cut(s.Unit, " (")
	if name, _, _ = strings.Cut(name, ", such as "); len(name) > 20 || strings.Contains(name, ",") {
		return "value"
	}
	return name
}

// usage returns the help text of the setting's flag.
func (s Setting) usage() string {
	def := s.Default
	if def == "" {
		def = "unset"
	}
	return fmt.Sprintf("%s Value: %s; default: %s", s.Meaning, s.Unit, def)
}

// FlagError adds the nearest right flag of fs to pflag's complaint about an unknown one.
func FlagError(fs *pflag.FlagSet, err error) error {
	var missing *pflag.NotExistError
	if !errors.As(err, &missing) {
		return err
	}
	name := missing.GetSpecifiedName()
	if fs.Lookup("arena-limit") != nil { // the command has a flag for every setting
		if err := formerError("unknown flag", name, "--", Setting.Flag); err != nil {
			return err
		}
	}
	var names []string
	fs.VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
	return unknown(err.Error(), name, "--", names)
}
