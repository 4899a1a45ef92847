package settings

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// yamlTiers parses the value of the key tiers.
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
	"want a list of tiers, nearest first, each beginning with \"- kind: disk\" (or dax, program, redis, s3)")

// listed says what the lists of the settings that may be lists have.
var listed = map[string]string{"paths": "directory", "devices": "device",
	"arena_shares": "share of a tenant", "tier_shares": "share of a tenant"}

func yamlTierValue(key string, v any) (string, error) {
	switch v := v.(type) {
	case string, bool, int, int64, uint64, float64:
		return fmt.Sprint(v), nil
	case nil:
		return "", errors.New("it has no value")
	case []any:
		what := listed[key]
		if what == "" {
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
				return "", fmt.Errorf("%v is not a %s (a comma in its name is not supported)", p,
					what)
			}
			parts = append(parts, s)
		}
		return strings.Join(parts, ","), nil
	}
	return "", fmt.Errorf("want a single value, got %v", v)
}

// yamlDevice returns {path: DEVICE, size: BYTES} as DEVICE:BYTES.
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
