// Package lmcache converts a user's configuration of LMCache into Lookaside's settings, and reports
// for each key what became of it. It knows the keys of LMCache 0.3 to 0.5: those of its
// configuration file and environment, of its extra_config, of its server's L2 adapters and command
// line, and those that vLLM passes on to its connectors.
//
// It reads text and produces text. It does not check whether a sidecar accepts the settings;
// package sidecar and the tests do.
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
	// Dir and Home replace relative paths and ~. If they are empty, such paths are errors.
	Dir, Home string
	// DiskCapacityBytes is the capacity for a directory that LMCache filled without a limit. 0: 64
	// GiB.
	DiskCapacityBytes int64
}

// An Outcome is what became of a key.
type Outcome string

// These are the outcomes, in the order of the output.
const (
	None    Outcome = "none"     // Lookaside has no equivalent
	Unknown Outcome = "unknown"  // this package does not know it as one of LMCache's keys
	VLLM    Outcome = "vllm"     // it is set in vLLM: To contains how
	Set     Outcome = "set"      // it became the settings in To
	BuiltIn Outcome = "built in" // Lookaside does it without a setting
	Unused  Outcome = "unused"   // it has no effect in this configuration
)

var outcomes = []Outcome{None, Unknown, VLLM, Set, BuiltIn, Unused}

// A Key is one key of LMCache and what became of it.
type Key struct {
	// Key includes its place, as in extra_config.dax.device_path.
	Key     string   `json:"key"`
	From    string   `json:"from,omitempty"` // file, environment, …
	Value   string   `json:"value"`          // as given; never a secret
	Outcome Outcome  `json:"outcome"`
	To      []string `json:"to,omitempty"` // settings of Lookaside or of vLLM
	Why     string   `json:"why,omitempty"`
}

// Result is a configuration of Lookaside.
type Result struct {
	// Config is the content of the YAML: sections of settings, and the list tiers.
	Config map[string]any `json:"config"`
	// Connector is the content of kv_connector_extra_config in vLLM's --kv-transfer-config.
	Connector map[string]any `json:"connector"`
	// Keys lists all given keys, first those without an equivalent.
	Keys []Key `json:"keys"`
	// YAML is a file for lookaside serve --config, with comments.
	YAML string `json:"yaml"`
}

// Convert converts a configuration. It returns an error if the source cannot be parsed or a value
// is not valid for its key. A key without an equivalent is no error. Errors and results contain no
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

// Missing returns the keys without an equivalent.
func (r *Result) Missing() []Key {
	return slices.DeleteFunc(slices.Clone(r.Keys), func(k Key) bool {
		return k.Outcome != None &&
			k.Outcome != Unknown
	})
}

// WriteTable writes for people what became of the keys. Keys that need no explanation are only
// counted.
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

// A setting is one of Lookaside's settings.
type setting struct {
	key   string
	value any    // string, int, float64, bool, []string or []device
	from  string // its form in LMCache
	note  string // a remark for the reader
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

// A device is a device of a dax tier.
type device struct {
	Path string `json:"path"`
	Size string `json:"size,omitempty"`
}

// A verdict is a rule's result for a key.
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

// A converter is a conversion in progress.
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
	arena     []device // the arena's devices
	arenaFrom *given   // the key that put the arena there
	eviction  string   // of tiers, from cache_policy; or ""
}

// set sets a setting; the last call for a key counts.
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
		k.Value = notShown // it could be anything, even a secret
	}
	c.keys = append(c.keys, k)
}

// addTier adds a tier below the existing ones.
func (c *converter) addTier(kind string, from *given) *tier {
	t := &tier{kind: kind, from: from.shown}
	c.tiers = append(c.tiers, t)
	return t
}
