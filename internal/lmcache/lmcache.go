// Package lmcache turns what a user of LMCache has configured into Lookaside's settings, and says
// of each key what became of it. It knows the keys of LMCache 0.3 to 0.5: those of its
// configuration file and environment, of its extra_config, of its server's L2 adapters and command
// line, and those that vLLM passes on to its connectors.
//
// It reads text and makes text. Whether the settings are ones that a sidecar takes is for package
// sidecar to say, and for the tests.
package lmcache

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
)

// Source is LMCache's configuration. Each part may be missing, but not all.
type Source struct {
	// Text is YAML or JSON: LMCache's configuration; one L2 adapter of its server, or a list of
	// them; or the value of vLLM's --kv-transfer-config.
	Text []byte
	// Name is Text's file, for messages.
	Name string
	// Environ is an environment, as os.Environ gives it: what LMCache reads from it overrides Text,
	// as in LMCache. Nil: none.
	Environ []string
	// Adapters are the values of --l2-adapter, in their order.
	Adapters []string
	// Server is the command line of LMCache's server, with or without its first words "lmcache
	// server".
	Server []string
	// Dir and Home are what relative paths and ~ stand for. Where they are not set such paths are
	// errors.
	Dir, Home string
	// DiskCapacityBytes is for a directory that LMCache filled without a limit. 0: 64 GiB.
	DiskCapacityBytes int64
}

// An Outcome is what became of a key.
type Outcome string

// The outcomes, in the order in which they are shown.
const (
	None    Outcome = "none"     // Lookaside has no equivalent
	Unknown Outcome = "unknown"  // it is none of LMCache's keys, as far as this package knows
	VLLM    Outcome = "vllm"     // it is set on vLLM's side: To says how
	Set     Outcome = "set"      // it became the settings in To
	BuiltIn Outcome = "built in" // Lookaside does it without a setting
	Unused  Outcome = "unused"   // it changed nothing in this configuration
)

var outcomes = []Outcome{None, Unknown, VLLM, Set, BuiltIn, Unused}

// A Key is one key of LMCache and what became of it.
type Key struct {
	// with where it was, as in extra_config.dax.device_path
	Key     string   `json:"key"`
	From    string   `json:"from,omitempty"` // file, environment, …
	Value   string   `json:"value"`          // as given; never a secret
	Outcome Outcome  `json:"outcome"`
	To      []string `json:"to,omitempty"` // settings of Lookaside or of vLLM
	Why     string   `json:"why,omitempty"`
}

// Result is a configuration of Lookaside.
type Result struct {
	// Config is what YAML says: sections of settings, and the list tiers.
	Config map[string]any `json:"config"`
	// Connector is what belongs into kv_connector_extra_config of vLLM's --kv-transfer-config.
	Connector map[string]any `json:"connector"`
	// Keys are all keys that were given: first those without an equivalent.
	Keys []Key `json:"keys"`
	// YAML is a file for lookaside serve --config, with comments.
	YAML string `json:"yaml"`
}

// Convert converts. An error means that the source cannot be understood, or that a value is not
// what its key wants; a key that has no equivalent is no error. Errors and results repeat no
// secret.
func Convert(src Source) (*Result, error) {
	c := &converter{src: src, config: map[string]*given{}, extra: map[string]*given{}}
	if err := c.read(); err != nil {
		return nil, err
	}
	for _, step := range []func() error{c.applyServer, c.applyConfig, c.applyAdapters,
		c.settleArena} {
		if err := step(); err != nil {
			return nil, err
		}
	}
	slices.SortStableFunc(c.keys, func(a, b Key) int {
		return cmp.Compare(slices.Index(outcomes, a.Outcome), slices.Index(outcomes, b.Outcome))
	})
	r := &Result{Config: map[string]any{}, Connector: map[string]any{}, Keys: c.keys}
	for _, s := range c.settings {
		section, name, _ := strings.Cut(s.key, ".")
		if r.Config[section] == nil {
			r.Config[section] = map[string]any{}
		}
		r.Config[section].(map[string]any)[name] = s.value
	}
	var list []any
	for _, t := range c.tiers {
		m := map[string]any{"kind": t.kind}
		for _, s := range t.settings {
			m[s.key] = s.value
		}
		list = append(list, m)
	}
	if list != nil {
		r.Config["tiers"] = list
	}
	for _, s := range c.connector {
		r.Connector[s.key] = s.value
	}
	r.YAML = c.yaml()
	return r, nil
}

// Missing are the keys without an equivalent.
func (r *Result) Missing() []Key {
	return slices.DeleteFunc(slices.Clone(r.Keys), func(k Key) bool {
		return k.Outcome != None &&
			k.Outcome != Unknown
	})
}

// WriteTable writes what became of the keys, for people. Those that say all that there is to say by
// themselves are only counted.
func (r *Result) WriteTable(w io.Writer) error {
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	counts := map[Outcome]int{}
	header := false
	for _, k := range r.Keys {
		counts[k.Outcome]++
		if k.Outcome == BuiltIn || k.Outcome == Unused || k.Outcome == Set && k.Why == "" {
			continue
		}
		if !header {
			fmt.Fprintln(tw, "LMCACHE\tLOOKASIDE\tWHY")
			header = true
		}
		to := strings.Join(k.To, ", ")
		switch k.Outcome {
		case None:
			to = cmp.Or(to, "no equivalent")
		case Unknown:
			to = "unknown"
		}
		fmt.Fprintf(tw, "%s: %s\t%s\t%s\n", k.Key, k.Value, to, k.Why)
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	var parts []string
	for _, o := range outcomes {
		if n := counts[o]; n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, map[Outcome]string{
				None: "without an equivalent", Unknown: "unknown", VLLM: "to be set in vLLM",
				Set: "converted", BuiltIn: "built in", Unused: "without effect here",
			}[o]))
		}
	}
	keys := "keys"
	if len(r.Keys) == 1 {
		keys = "key"
	}
	_, err := fmt.Fprintf(w, "%d %s: %s\n", len(r.Keys), keys, strings.Join(parts, ", "))
	return err
}

// A setting is one of Lookaside's.
type setting struct {
	key   string
	value any    // string, int, float64, bool, []string or []device
	from  string // what it was in LMCache
	note  string // what its reader should know
}

// A tier is an entry of the list tiers.
type tier struct {
	kind     string
	settings []setting
	from     string
	notes    []string
}

func (t *tier) set(key string, value any, from string) {
	for i := range t.settings {
		if t.settings[i].key == key {
			t.settings[i] = setting{key: key, value: value, from: from}
			return
		}
	}
	t.settings = append(t.settings, setting{key: key, value: value, from: from})
}

func (t *tier) note(text string) {
	if !slices.Contains(t.notes, text) {
		t.notes = append(t.notes, text)
	}
}

// A device is one of a dax tier's.
type device struct {
	Path string `json:"path"`
	Size string `json:"size,omitempty"`
}

// A verdict is what a rule says of a key.
type verdict struct {
	outcome Outcome
	to      []string
	why     string
}

func none(why string) verdict    { return verdict{outcome: None, why: why} }
func builtIn(why string) verdict { return verdict{outcome: BuiltIn, why: why} }
func unused(why string) verdict  { return verdict{outcome: Unused, why: why} }

func vllm(to, why string) verdict { return verdict{VLLM, []string{to}, why} }

func became(why string, to ...string) verdict { return verdict{Set, to, why} }

// A converter is one conversion under way.
type converter struct {
	src       Source
	config    map[string]*given // LMCache's configuration, by current names
	extra     map[string]*given // its extra_config
	unknown   []*given
	adapters  []adapter
	server    []*given
	mp        []*given // keys that vLLM passes on to LMCache's multi-process connector
	settings  []setting
	tiers     []*tier
	connector []setting
	role      string // kv_role, if it is not kv_both
	keys      []Key
	arena     []device // that the arena lies on
	arenaFrom *given   // what put it there
	eviction  string   // of tiers, as cache_policy has it; or ""
}

// set sets a setting; the last one counts.
func (c *converter) set(key string, value any, from *given, note string) {
	c.settings = put(c.settings, setting{key, value, from.origin(), note})
}

// inVLLM sets a setting of the connector.
func (c *converter) inVLLM(key string, value any, from *given) {
	c.connector = put(c.connector, setting{key: key, value: value, from: from.origin()})
}

func put(list []setting, s setting) []setting {
	if i := slices.IndexFunc(list, func(o setting) bool { return o.key == s.key }); i >= 0 {
		list[i] = s
		return list
	}
	return append(list, s)
}

// tell records what became of a key.
func (c *converter) tell(g *given, v verdict) {
	k := Key{Key: g.shown, From: g.from, Value: g.safe(), Outcome: v.outcome, To: v.to, Why: v.why}
	if v.outcome == Unknown {
		k.Value = notShown // it could be anything, a secret too
	}
	c.keys = append(c.keys, k)
}

// addTier adds a tier below those that there are.
func (c *converter) addTier(kind string, from *given) *tier {
	t := &tier{kind: kind, from: from.shown}
	c.tiers = append(c.tiers, t)
	return t
}
