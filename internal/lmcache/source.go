package lmcache

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// maxText bounds each text.
const maxText = 1 << 20

// A given is a key with its value from one source.
type given struct {
	key   string // the name in rules
	shown string // the name as written
	from  string
	value any
}

func (g *given) origin() string {
	if g == nil {
		return ""
	}
	return g.shown + ": " + g.safe()
}

// notShown replaces a value that is or could be a secret.
const notShown = "(not shown)"

var secretName = regexp.MustCompile(
	`(?i)passw|secret|token|credential|access_key|api_key|private_key`)

var userInfo = regexp.MustCompile(`//[^/@\s]*@`)

// safe returns the value without possible secrets.
func (g *given) safe() string {
	if secretName.MatchString(g.shown) {
		return notShown
	}
	switch v := g.value.(type) {
	case map[string]any, map[any]any:
		return "{…}"
	case []any:
		if slices.ContainsFunc(v, func(e any) bool { _, ok := e.(map[string]any); return ok }) {
			return "[…]"
		}
	case nil:
		return "null"
	}
	text := userInfo.ReplaceAllString(g.text(), "//…@")
	if path, query, ok := strings.Cut(text, "?"); ok && strings.Contains(path, "://") &&
		query != "" {
		text = path + "?…"
	}
	if r := []rune(text); len(r) > 80 {
		text = string(r[:80]) + "…"
	}
	if strings.ContainsAny(text, "\n\r\t") {
		text = strconv.Quote(text)
	}
	return text
}

// text returns the value as a word.
func (g *given) text() string {
	switch v := g.value.(type) {
	case nil:
		return ""
	case string:
		return v
	case float64:
		return strconv.FormatFloat(v, 'f', -1, 64)
	case []any:
		return strings.Join(g.list(), ",")
	}
	return fmt.Sprint(g.value)
}

// list returns the value as a list of words. A word with commas is a list.
func (g *given) list() []string {
	var out []string
	switch v := g.value.(type) {
	case nil:
	case []any:
		for _, e := range v {
			out = append(out, (&given{value: e}).text())
		}
	default:
		for p := range strings.SplitSeq(g.text(), ",") {
			if p = strings.TrimSpace(p); p != "" {
				out = append(out, p)
			}
		}
	}
	return out
}

func (g *given) wrong(want string) error {
	return fmt.Errorf("%s: %s is not %s", g.shown, strconv.Quote(g.safe()), want)
}

// number returns the value as a finite number.
func (g *given) number() (float64, error) {
	f, err := strconv.ParseFloat(strings.TrimSpace(g.text()), 64)
	if err != nil || math.IsInf(f, 0) || math.IsNaN(f) {
		return 0, g.wrong("a number")
	}
	return f, nil
}

// integer returns the value as a whole number from low to high.
func (g *given) integer(low, high int) (int, error) {
	f, err := g.number()
	if err != nil || f != math.Trunc(f) || f < float64(low) || f > float64(high) {
		return 0, g.wrong(fmt.Sprintf("a whole number from %d to %d", low, high))
	}
	return int(f), nil
}

// boolean returns the value as LMCache reads it: everything except true and 1 is false.
func (g *given) boolean() bool {
	t := strings.ToLower(strings.TrimSpace(g.text()))
	return t == "true" || t == "1"
}

// off reports whether the value turns the feature off.
func (g *given) off() bool {
	if g == nil {
		return true
	}
	switch v := g.value.(type) {
	case map[string]any:
		return len(v) == 0
	case map[any]any:
		return len(v) == 0
	case []any:
		return len(v) == 0
	}
	switch strings.ToLower(strings.TrimSpace(g.text())) {
	case "", "false", "0", "0.0", "none", "null":
		return true
	}
	return false
}

// bytes returns the value, a number of GiB like all sizes of LMCache, in bytes.
func (g *given) bytes() (int64, error) {
	f, err := g.number()
	if err != nil {
		return 0, err
	}
	if f *= 1 << 30; f > 1<<60 {
		return 0, g.wrong("a size in GiB")
	}
	return int64(f), nil
}

// absolute returns an absolute path. Its note contains the original path if that changed.
func (c *converter) absolute(g *given, path string) (string, error) {
	path = strings.TrimPrefix(path, "file://")
	base := ""
	if rest, ok := strings.CutPrefix(path, "~"); ok && (rest == "" || rest[0] == '/') {
		base, path = c.src.Home, strings.TrimPrefix(rest, "/")
	} else if !filepath.IsAbs(path) {
		base = c.src.Dir
	}
	if base != "" {
		path = filepath.Join(base, path)
	}
	if path == "" || !filepath.IsAbs(path) || strings.ContainsAny(path, ",\x00") {
		return "", fmt.Errorf("%s: %q is not an absolute path of one directory or device", g.shown,
			path)
	}
	return filepath.Clean(path), nil
}

// parse parses YAML or JSON.
func parse(name string, text []byte) (v any, err error) {
	if len(text) > maxText {
		return nil, fmt.Errorf("%s is larger than %d bytes", name, maxText)
	}
	if !utf8.Valid(text) {
		return nil, fmt.Errorf("%s is not UTF-8", name)
	}
	if json.Unmarshal(text, &v) == nil { // JSON may contain tabs
		return v, nil
	}
	var doc yaml.Node
	err = yaml.Unmarshal(text, &doc)
	if err == nil {
		if err := checkKeys(&doc); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		err = doc.Decode(&v)
	}
	if err != nil {
		return nil, fmt.Errorf("%s is neither YAML nor JSON (the parser's words are not repeated: it may have secrets in it)", name)
	}
	return v, nil
}

// maxKeys bounds the keys of one map. LMCache has some 200.
const maxKeys = 2048

// checkKeys refuses maps with too many keys or with the same key twice. The decoder compares each
// key with every other and makes a message for each equal pair: a few KiB of one key take minutes
// and all memory.
func checkKeys(n *yaml.Node) error {
	if n.Kind == yaml.MappingNode {
		if len(n.Content) > 2*maxKeys {
			return fmt.Errorf("line %d: a map of %d keys, at most %d", n.Line, len(n.Content)/2,
				maxKeys)
		}
		lines := map[string]int{}
		for i := 0; i < len(n.Content); i += 2 {
			key := n.Content[i]
			if key.Kind != yaml.ScalarNode {
				continue
			}
			if line, twice := lines[key.Value]; twice {
				return fmt.Errorf("line %d: the key of line %d again", key.Line, line)
			}
			lines[key.Value] = key.Line
		}
	}
	for _, c := range n.Content { // an alias has no content
		if err := checkKeys(c); err != nil {
			return err
		}
	}
	return nil
}

// aliases maps earlier names of keys to the current ones.
var aliases = map[string]string{
	"enable_xpyd": "enable_pd", "nixl_peer_host": "pd_peer_host",
	"nixl_peer_init_port": "pd_peer_init_port", "nixl_peer_alloc_port": "pd_peer_alloc_port",
	"nixl_proxy_host": "pd_proxy_host", "nixl_proxy_port": "pd_proxy_port", "nixl_role": "pd_role",
	"controller_url": "controller_pull_url", "lmcache_worker_port": "lmcache_worker_ports",
	"plugin_locations":  "runtime_plugin_locations",
	"external_backends": "storage_plugins", "cufile_buffer_size": "gds_buffer_size",
	"weka_path":       "gds_path",
	"peer_init_ports": "p2p_init_ports", "peer_lookup_ports": "p2p_lookup_ports",
}

func current(key string) string {
	key = strings.ToLower(strings.TrimSpace(key))
	if now, ok := aliases[key]; ok {
		return now
	}
	return key
}

// read reads all parts of the source.
func (c *converter) read() error {
	name := c.src.Name
	if name == "" {
		name = "the configuration"
	}
	if strings.TrimSpace(string(c.src.Text)) != "" {
		v, err := parse(name, c.src.Text)
		if err != nil {
			return err
		}
		if err := c.readText(name, v); err != nil {
			return err
		}
	}
	if err := c.readServer(); err != nil {
		return err
	}
	for _, text := range c.src.Adapters {
		where := fmt.Sprintf("--l2-adapter %d", len(c.adapters)+1)
		var v any
		if len(text) > maxText || !utf8.ValidString(text) ||
			json.Unmarshal([]byte(text), &v) != nil {
			return fmt.Errorf("%s: it is not JSON (what was given is not repeated: it may have a secret in it)", where)
		}
		if err := c.readAdapter(where, v); err != nil {
			return err
		}
	}
	if err := c.readEnviron(); err != nil {
		return err
	}
	if len(c.config)+len(c.extra)+len(c.unknown)+len(c.adapters)+len(c.server)+len(c.mp) == 0 {
		return errors.New("there is nothing to convert: no key of LMCache was found")
	}
	return nil
}

// readText reads the text, after detecting its kind.
func (c *converter) readText(name string, v any) error {
	switch v := v.(type) {
	case nil:
		return nil // comments only
	case []any:
		for _, e := range v {
			if err := c.readAdapter(fmt.Sprintf("--l2-adapter %d", len(c.adapters)+1),
				e); err != nil {
				return err
			}
		}
		return nil
	case map[string]any:
		if _, ok := v["type"].(string); ok {
			return c.readAdapter(fmt.Sprintf("--l2-adapter %d", len(c.adapters)+1), v)
		}
		if _, ok := v["kv_connector"]; ok {
			more, _ := v["kv_connector_extra_config"].(map[string]any)
			c.readTransfer(more)
			return nil
		}
		for _, key := range slices.Sorted(maps.Keys(v)) {
			if err := c.readKey("file", key, key, v[key]); err != nil {
				return err
			}
		}
		return nil
	}
	return fmt.Errorf("%s: it holds a single %T, not keys and values", name, v)
}

// readKey reads a key of LMCache's configuration. It overrides an earlier value of the key.
func (c *converter) readKey(from, shown, key string, value any) error {
	g := &given{current(key), shown, from, value}
	if g.key == "extra_config" {
		if text, ok := value.(string); ok && strings.TrimSpace(text) != "" {
			v, err := parse(shown, []byte(text))
			if err != nil {
				return err
			}
			value = v
		}
		switch m := value.(type) {
		case map[string]any:
			for _, k := range slices.Sorted(maps.Keys(m)) {
				c.take(c.extra, &given{k, "extra_config." + k, from, m[k]})
			}
		case nil, string:
		default:
			return fmt.Errorf("%s: it is not a map of keys", shown)
		}
		return nil
	}
	if _, known := configRules[g.key]; !known {
		c.unknown = append(c.unknown, g)
		return nil
	}
	c.take(c.config, g)
	return nil
}

// take stores a key. It overrides a value from another source.
func (c *converter) take(in map[string]*given, g *given) {
	if before := in[g.key]; before != nil && g.value != nil {
		c.tell(before, unused("overridden by "+g.shown))
	} else if before != nil {
		return
	}
	in[g.key] = g
}

// readTransfer reads what vLLM passes on to LMCache's connectors.
func (c *converter) readTransfer(m map[string]any) {
	for _, key := range slices.Sorted(maps.Keys(m)) {
		name, ours := strings.CutPrefix(key, "lmcache.")
		g := &given{name, key, "kv_connector_extra_config", m[key]}
		if _, known := configRules[current(name)]; ours && known &&
			!strings.HasPrefix(name, "mp.") {
			g.key = current(name)
			c.take(c.config, g)
			continue
		}
		g.key = key
		c.mp = append(c.mp, g)
	}
}

// readEnviron reads LMCache's variables.
func (c *converter) readEnviron() error {
	environ := slices.Sorted(slices.Values(c.src.Environ))
	for _, e := range environ {
		name, value, _ := strings.Cut(e, "=")
		key, ours := strings.CutPrefix(name, "LMCACHE_")
		_, known := environRules[name]
		if !ours && !known {
			continue
		}
		value = unquote(strings.ToValidUTF8(value, "?"))
		if known {
			c.tell(&given{name, name, "environment", value},
				environRules[name](c, &given{name, name, "environment", value}))
			continue
		}
		if rest, ok := strings.CutPrefix(key, "EC_"); ok && rest != "" {
			c.tell(&given{name, name, "environment", value}, none(whyEncoder))
			continue
		}
		var v any = value
		if value == "" {
			v = nil
		}
		if err := c.readKey("environment", name, key, v); err != nil {
			return err
		}
	}
	return nil
}

// unquote removes the quotes from a variable's value, as LMCache does.
func unquote(v string) string {
	v = strings.TrimSpace(v)
	if n := len(v); n >= 2 && v[0] == v[n-1] && (v[0] == '"' || v[0] == '\'') {
		return v[1 : n-1]
	}
	return v
}

// variable returns a variable of the environment, or "".
func (c *converter) variable(name string) string {
	for _, e := range c.src.Environ {
		if v, ok := strings.CutPrefix(e, name+"="); ok {
			return v
		}
	}
	return ""
}
