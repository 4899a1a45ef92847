package lmcache

import (
	"encoding/json"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
)

// serverSwitches lists the flags of LMCache's server without a value.
var serverSwitches = []string{
	"isolated-ipc", "enable-segmented-prefix", "enable-dedup-content", "separate-object-groups",
	"l1-use-lazy", "l1-use-hugepages", "gds-l1-use-direct-io",
	"disable-observability", "disable-metrics", "disable-grpc-metrics", "disable-logging",
	"enable-tracing", "enable-extra-logging", "run-script-api-enabled",
}

// readServer reads the flags of the server's command line.
func (c *converter) readServer() error {
	args := c.src.Server
	for len(args) > 0 && !strings.HasPrefix(args[0], "-") {
		args = args[1:] // lmcache server
	}
	for i := 0; i < len(args); i++ {
		name, value, hasValue := strings.Cut(strings.ToValidUTF8(args[i], "?"), "=")
		name, ok := strings.CutPrefix(name, "--")
		if !ok {
			return fmt.Errorf("server: %q is not a flag", redact(args[i]))
		}
		var v any = value
		base, negated := strings.CutPrefix(name, "no-")
		switch {
		case slices.Contains(serverSwitches, base):
			name = base
			v = !negated
		case !hasValue:
			// a list continues until the next flag
			var values []string
			for i+1 < len(args) && !strings.HasPrefix(args[i+1], "--") {
				i++
				values = append(values, strings.ToValidUTF8(args[i], "?"))
			}
			v = strings.Join(values, " ")
		}
		if name == "l2-adapter" {
			c.src.Adapters = append(c.src.Adapters, fmt.Sprint(v))
			continue
		}
		c.server = append(c.server, &given{name, "--" + name, "server", v})
	}
	return nil
}

func redact(text string) string { return (&given{value: text}).safe() }

// These are reasons that several flags share.
const (
	whyTransport = "vLLM finds the sidecar by lookaside.endpoint, on the same host: there is no port for it"
	whyShared    = "LMCache's server held this for all ranks together: where there are several, give each rank's sidecar the same device, with arena.dax.ranks and its arena.dax.rank. Changing devices while it serves wants arena.dax.hotplug: true"
	whyThreads   = "vLLM's workers copy for themselves, and each tier has its own workers"
	whyTrace     = "there is no export of traces, and /metrics is always served by the admin server; what is stored and dropped is published by events.endpoint"
)

// serverTable has the rules for the flags of LMCache's server, separated by spaces. A flag that
// ends in * matches all flags with that prefix.
var serverTable = []struct {
	keys string
	rule rule
}{
	{"l1-size-gb", arenaLimitOfServer},
	{"l1-init-size-gb", func(c *converter, g *given) (verdict, error) {
		n, err := g.bytes()
		if err != nil {
			return verdict{}, err
		}
		if l := c.flag("l1-use-lazy"); l != nil && l.off() {
			return unused("--no-l1-use-lazy"), nil
		}
		if limit, _ := c.flag("l1-size-gb").bytesOr(4 << 30); n > 0 {
			c.set("arena.initial", size(min(n, limit)), g, "")
			return became("", "arena.initial"), nil
		}
		return unused("it is 0"), nil
	}},
	{"l1-use-lazy", func(c *converter, g *given) (verdict, error) {
		if g.off() {
			limit, err := c.flag("l1-size-gb").bytesOr(4 << 30)
			if err != nil {
				return verdict{}, err
			}
			c.set("arena.initial", size(limit), g, "")
			return became("all of the arena is made at the start", "arena.initial"), nil
		}
		return builtIn("the arena grows from arena.initial to arena.limit"), nil
	}},
	{"l1-use-hugepages", hugepages},
	{"l1-devdax-path", func(c *converter, g *given) (verdict, error) {
		if g.off() {
			return unused("it is off"), nil
		}
		path, err := c.absolute(g, g.text())
		if err != nil {
			return verdict{}, err
		}
		d := device{Path: path}
		if s := c.flag("l1-size-gb"); s != nil {
			n, err := s.bytes()
			if err != nil {
				return verdict{}, err
			}
			d.Size = size(n)
		}
		c.daxArena(g, whyShared, d)
		return became(whyShared, "arena.kind", "arena.dax.devices"), nil
	}},
	{"l1-manager", l1Manager},
	{"l1-read-ttl-seconds", pinTimeout},
	{"l1-write-ttl-seconds", say(builtIn("a store is its session's, for as long as that lives"))},
	{"l1-align-bytes", say(builtIn("slots are aligned for direct I/O"))},
	{"eviction-policy", func(c *converter, g *given) (verdict, error) {
		if strings.EqualFold(g.text(), "noop") {
			return none("the arena keeps what passes through it until room is wanted"), nil
		}
		v, err := cachePolicy(c, g)
		c.eviction = "" // adapters have their own policy
		return v, err
	}},
	{"eviction-trigger-watermark eviction-ratio", say(builtIn(whyPolicy))},
	{"chunk-size", chunkSize},
	{"hash-algorithm", func(*converter, *given) (verdict, error) {
		return vllm("--prefix-caching-hash-algo",
			"prefixes are named by vLLM's own block hashes; sha256_cbor is the one that all processes compute alike"), nil
	}},
	{"http-port", func(c *converter, g *given) (verdict, error) {
		port, err := g.integer(1, 65535)
		if err != nil {
			return verdict{}, err
		}
		host := "127.0.0.1"
		if h := c.flag("http-host"); h != nil && h.text() != "" {
			host = h.text()
		}
		c.set("admin.listen", net.JoinHostPort(host, strconv.Itoa(port)), g,
			"each rank's sidecar wants a port of its own")
		return became("each rank's sidecar wants a port of its own", "admin.listen"), nil
	}},
	{"http-host", func(c *converter, g *given) (verdict, error) {
		if c.flag("http-port") == nil {
			c.set("admin.listen", net.JoinHostPort(g.text(), "8080"), g,
				"8080 is LMCache's default; each rank's sidecar wants a port of its own")
		}
		return became("", "admin.listen"), nil
	}},
	{"l2-store-policy", func(_ *converter, g *given) (verdict, error) {
		if g.text() == "default" {
			return builtIn("everything is written to every tier, and stays in the arena"), nil
		}
		return none("what was written to a tier stays in the arena until room is wanted"), nil
	}},
	{"l2-prefetch-policy", say(
		builtIn("what was brought up is in the arena, and stays until room is wanted"))},
	{"l2-prefetch-max-in-flight", func(*converter, *given) (verdict, error) {
		return none("promotions are bounded by slots: they fill at most half of the arena's at a time"), nil
	}},
	{"host port transport instance-id grpc-server-workers", say(none(whyTransport))},
	{"max-workers max-gpu-workers max-cpu-workers", say(builtIn(whyThreads))},
	{"supported-transfer-mode isolated-ipc shm-name",
		say(builtIn("workers copy from and to the arena, whose memory they are given over the session's socket"))},
	{"worker-reap-timeout-seconds worker-registration-grace-seconds",
		say(builtIn("a dead worker is noticed at once, by its socket, and a slow one is not dead"))},
	{"runtime-plugin-locations runtime-plugin-config script-allowed-imports run-script-api-enabled",
		lost(whyPlugin)},
	{"engine-type", func(_ *converter, g *given) (verdict, error) {
		if g.text() == "default" {
			return builtIn("prefixes"), nil
		}
		return none(whyBlend), nil
	}},
	{"enable-segmented-prefix enable-dedup-content", lost(whyBlend)},
	{"separate-object-groups",
		say(builtIn("a page has the blocks of all KV-cache groups; of sliding windows, those that a hit can need"))},
	{"null-block-id", say(builtIn("vLLM's null block is never stored"))},
	{"lookup-hash-log-*", lost(whyTrace)},
	{"p2p-*", lost(whyP2P)},
	{"coordinator-*", lost(whyFleet)},
	{"gds-l1-*", lost(whyGDS)},
	{"periodic-notifier-interval-ms", say(builtIn("nothing is polled"))},
	{"prometheus-port", func(*converter, *given) (verdict, error) {
		return none("/metrics is served by the admin server: admin.listen"), nil
	}},
	{"disable-* enable-tracing enable-extra-logging extra-logging-interval event-bus-queue-size otlp-endpoint metrics-sample-rate trace-level trace-output", lost(whyTrace)},
}

// mpTable has the rules for the keys that vLLM passes on to LMCache's connectors.
var mpTable = []struct {
	keys string
	rule rule
}{
	{"lmcache.mp.save_decode_cache", func(c *converter, g *given) (verdict, error) {
		c.inVLLM("lookaside.save_decode", g.boolean(), g)
		return vllm("lookaside.save_decode", ""), nil
	}},
	{"lmcache.mp.host lmcache.mp.port lmcache.mp.server_urls",
		func(*converter, *given) (verdict, error) {
			return vllm("lookaside.endpoint",
				"the sidecar is found by its directory, on the same host"), nil
		}},
	{"lmcache.mp.mq_timeout", func(*converter, *given) (verdict, error) {
		return vllm("lookaside.load_timeout_ms",
			"every kind of wait has a setting of its own, of milliseconds: vLLM never waits for minutes"), nil
	}},
	{"lmcache.mp.autostart", func(c *converter, g *given) (verdict, error) {
		if g.off() {
			return unused("it is off"), nil
		}
		c.inVLLM("lookaside.autostart", true, g)
		return vllm("lookaside.autostart", "with lookaside.sidecar_config for the settings"), nil
	}},
	{"lmcache.mp.autostart.server_args", func(*converter, *given) (verdict, error) {
		return vllm("lookaside.sidecar_config", "convert its arguments by giving them after --"),
			nil
	}},
	{"lmcache.mp.nonblocking_lookup_status",
		say(builtIn("the scheduler never waits for an answer"))},
	{"lmcache.mp.eager_prefetch", say(builtIn("a lookup starts when its request arrives"))},
	{"lmcache.mp.heartbeat_interval lmcache.mp.autostart.wait_timeout",
		say(builtIn("a sidecar that is gone is noticed by its socket, and connected to again by itself"))},
	{"lmcache.mp.mp_transfer_mode lmcache.mp.isolated_ipc lmcache.mp.use_vmm_api",
		say(builtIn("workers copy from and to the arena, whose memory they are given over the session's socket"))},
	{"lmcache.mp.lazy_offload*", lost("chunks are stored as they complete")},
	{"lmcache_rpc_port", func(*converter, *given) (verdict, error) {
		return vllm("lookaside.endpoint",
			"the sidecar is found by its directory, on the same host"), nil
	}},
	{"discard_partial_chunks skip_last_n_tokens",
		lost("a hit ends at a whole block before the last token")},
}

// applyServer converts the flags of the server's command line and the keys that vLLM passes on.
func (c *converter) applyServer() error {
	apply := func(list []*given, table []struct {
		keys string
		rule rule
	}, what string) error {
		for _, g := range list {
			var r rule
			for _, e := range table {
				for pattern := range strings.FieldsSeq(e.keys) {
					if prefix, wild := strings.CutSuffix(pattern, "*"); r == nil &&
						(g.key == pattern || wild && strings.HasPrefix(g.key, prefix)) {
						r = e.rule
					}
				}
			}
			v := verdict{Unknown, nil, what}
			if r != nil {
				var err error
				if v, err = r(c, g); err != nil {
					return err
				}
			}
			c.tell(g, v)
		}
		return nil
	}
	if err := apply(c.server, serverTable, "LMCache 0.5 has no such flag"); err != nil {
		return err
	}
	return apply(c.mp, mpTable, "it is none of LMCache's: other connectors may have it")
}

// flag returns a flag of the server, or nil.
func (c *converter) flag(name string) *given {
	for _, g := range c.server {
		if g.key == name {
			return g
		}
	}
	return nil
}

func (g *given) bytesOr(other int64) (int64, error) {
	if g == nil {
		return other, nil
	}
	return g.bytes()
}

func arenaLimitOfServer(c *converter, g *given) (verdict, error) {
	n, err := g.bytes()
	if err != nil {
		return verdict{}, err
	}
	if n <= 0 {
		return verdict{}, g.wrong("a size above 0")
	}
	if !c.flag("l1-devdax-path").off() {
		return became("", "arena.dax.devices"), nil
	}
	c.set("arena.limit", size(n), g,
		"LMCache's server held this for all ranks together, and a sidecar is for one: divide it by them")
	return became("LMCache's server held this for all ranks together, and a sidecar is for one: divide it by them", "arena.limit"), nil
}

// managerType returns the type of an L1 manager.
func managerType(g *given) string {
	var m struct {
		Type string `json:"type"`
	}
	_ = json.Unmarshal([]byte(g.text()), &m) // text that is not JSON has no type
	return m.Type
}

// l1Manager is the rule for the server's L1 managers, whose values are JSON.
func l1Manager(c *converter, g *given) (verdict, error) {
	var m struct {
		Type   string  `json:"type"`
		SizeGB float64 `json:"size_gb"`
		Path   string  `json:"path"`
	}
	if json.Unmarshal([]byte(g.text()), &m) != nil {
		return verdict{}, fmt.Errorf("%s: it is not JSON", g.shown)
	}
	n, err := (&given{shown: g.shown + ": size_gb", value: m.SizeGB}).bytes()
	if err != nil || n <= 0 {
		return verdict{}, fmt.Errorf("%s: size_gb is not a size above 0", g.shown)
	}
	switch strings.ToUpper(m.Type) {
	case "DRAM":
		c.set("arena.limit", size(n), g,
			"LMCache's server held this for all ranks together, and a sidecar is for one: divide it by them")
		return became("", "arena.limit"), nil
	case "DEVDAX":
		path, err := c.absolute(g, m.Path)
		if err != nil {
			return verdict{}, err
		}
		d := device{path, size(n)}
		if slices.ContainsFunc(c.server, func(o *given) bool {
			return o.key == g.key &&
				strings.EqualFold(managerType(o), "DRAM")
		}) {
			c.daxTier(g, []device{d})
			return became("there is one arena, of DRAM, and the device is a tier below it",
				"tiers: dax"), nil
		}
		c.daxArena(g, whyShared, d)
		return became(whyShared, "arena.kind", "arena.dax.devices"), nil
	}
	return none(whyGDS), nil
}
