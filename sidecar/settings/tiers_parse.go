package settings

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"lookaside/tiers/engine"
	"lookaside/tiers/remote"
	"lookaside/tiers/serde"
)

// A tierEntry is one tier as a source names it, before it is parsed.
type tierEntry struct {
	source string      // names the source, for errors
	keys   [][2]string // key and value, in the order of the source
	err    error       // set if a short form could not be parsed
}

// parseTier returns the tier that an entry describes. Errors contain the source, the tier and the
// key.
func parseTier(e tierEntry) (TierConfig, error) {
	c := TierConfig{source: e.source}
	err := e.err
	if err == nil {
		err = splitURL(&e)
	}
	if err == nil {
		err = c.setKind(e.keys)
	}
	if err == nil {
		if err = c.setKeys(e.keys); err == nil {
			err = c.check()
		}
		if err != nil {
			err = fmt.Errorf("%s: %w", c.title(), err)
		}
	}
	if err != nil {
		return c, fmt.Errorf("settings: %s: %w", e.source, err)
	}
	return c, nil
}

// setKind sets the tier's kind, and the defaults of its settings.
func (c *TierConfig) setKind(keys [][2]string) error {
	for _, kv := range keys {
		if kv[0] == "kind" {
			c.Kind = kv[1]
		}
	}
	if c.Kind == "" {
		return fmt.Errorf("kind is missing: add \"kind: \" and one of %s",
			strings.Join(tierKinds, ", "))
	}
	if err := nearestOf(c.Kind, tierKinds); err != nil {
		return fmt.Errorf("kind: %w", err)
	}
	for _, s := range tierSettingsOf(c.Kind) {
		if s.Default != "" && !s.derived {
			if err := s.set(c, s.Default); err != nil {
				panic(fmt.Sprintf("settings: default of a %s tier's %s: %v", c.Kind, s.Key, err))
			}
		}
	}
	return nil
}

// setKeys sets the tier's settings, the name first, because errors about others contain the name.
func (c *TierConfig) setKeys(keys [][2]string) error {
	mine, given := tierSettingsOf(c.Kind), map[string]bool{}
	keys = slices.Clone(keys)
	slices.SortStableFunc(keys, func(a, b [2]string) int {
		return rankOfKey(a[0]) - rankOfKey(
			b[0])
	})
	for _, kv := range keys {
		key, value := kv[0], kv[1]
		i := slices.IndexFunc(mine, func(s TierSetting) bool { return s.Key == key })
		switch {
		case i < 0:
			return c.unknownKey(key, mine)
		case given[key]:
			return fmt.Errorf("%s is there twice", key)
		}
		given[key] = true
		if value == "" {
			if mine[i].Default == "" && !mine[i].required {
				continue
			}
			return fmt.Errorf("%s: it has no value: want %s", key, mine[i].Unit)
		}
		if err := mine[i].set(c, value); err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
	}
	for _, s := range mine {
		if s.required && !given[s.Key] {
			return fmt.Errorf("%s is missing: add %s: %s", s.Key, s.Key, s.Unit)
		}
	}
	return nil
}

// unknownKey returns the error for a key that is not in mine, the settings of the tier's kind.
func (c *TierConfig) unknownKey(key string, mine []TierSetting) error {
	if slices.Contains(formerTierKeys, formerTierKey{c.Kind, key}) {
		return goneError(key)
	}
	var names []string
	for _, s := range mine {
		names = append(names, s.Key)
	}
	msg := fmt.Sprintf("unknown key %q", key)
	if others := kindsWith(key); len(others) > 0 {
		msg += fmt.Sprintf(" (%s tiers have it)", strings.Join(others, " and "))
	}
	return unknown(msg, key, "", names)
}

// title returns the tier's name in errors.
func (c *TierConfig) title() string {
	if c.Name != "" {
		return fmt.Sprintf("%s tier %q", c.Kind, c.Name)
	}
	return c.Kind + " tier"
}

// rankOfKey returns the place of a key in the order of evaluation. The name is first, because
// errors about other keys contain it. Then the URL, because other keys may replace parts of it.
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

// check checks rules that concern several keys of a tier.
func (c *TierConfig) check() error {
	switch c.Kind {
	case TierDAX:
		return c.DAX.check("")
	case TierDisk:
		return c.Disk.check()
	case TierProgram:
		return c.Program.check()
	case TierRedis:
		return cmp.Or(checkRedis(&c.Redis), checkTLS(c.Redis.Files, c.Redis.TLS))
	default:
		return checkTLS(c.S3.Files, strings.HasPrefix(c.S3.Endpoint, "https:"))
	}
}

// checkTLS refuses incomplete files for TLS, and files without TLS.
func checkTLS(files remote.TLSFiles, tls bool) error {
	if (files.Cert == "") != (files.Key == "") {
		return errors.New("cert_file and key_file: set both or neither")
	}
	if !tls && files != (remote.TLSFiles{}) {
		return errors.New("ca_file and cert_file are for TLS, and the connection has none: write the URL with rediss://, or the endpoint with https://")
	}
	return nil
}

// Lossy returns the tier's codec if loaded bytes may differ from stored ones, or "".
func (c *TierConfig) Lossy() string {
	name := c.Redis.Serde
	if c.Kind == TierS3 {
		name = c.S3.Serde
	}
	if codec, err := serde.New(name); err != nil || !codec.Lossy() {
		return ""
	}
	return name
}

// completeTiers names the tiers without a name, and checks rules that concern several tiers.
func completeTiers(list []TierConfig) ([]TierConfig, error) {
	if len(list) > engine.MaxTiers {
		return nil, fmt.Errorf("%d tiers, and there may be %d", len(list), engine.MaxTiers)
	}
	out := slices.Clone(list)
	if err := nameTiers(out); err != nil {
		return nil, err
	}
	if err := checkPaths(out); err != nil {
		return nil, err
	}
	return out, nil
}

// nameTiers names the tiers without a name by their kinds.
func nameTiers(list []TierConfig) error {
	names := map[string]string{} // name to source
	for _, t := range list {
		if t.Name == "" {
			continue
		}
		if other, ok := names[t.Name]; ok {
			return fmt.Errorf("%s and %s: both tiers are called %q: give one another name", other,
				t.source, t.Name)
		}
		names[t.Name] = t.source
	}
	for i := range list {
		t := &list[i]
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
	}
	return nil
}

// checkPaths refuses directories of disk tiers that contain one another.
func checkPaths(list []TierConfig) error {
	dirs := map[string]string{} // directory to the tier's name
	for _, t := range list {
		for _, dir := range t.Disk.Paths {
			for other, name := range dirs {
				if dir == other || strings.HasPrefix(dir, other+"/") ||
					strings.HasPrefix(other, dir+"/") {
					return fmt.Errorf("%s: disk tier %q: %s and %s of tier %q are one in the other: give each a directory of its own", t.source, t.Name, dir, other, name)
				}
			}
		}
		for _, dir := range t.Disk.Paths {
			dirs[dir] = t.Name
		}
	}
	return nil
}
