package sidecar

import (
	"runtime"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

// metrics has the histograms that are fed as things happen; all else is read from the parts when Prometheus asks.
type metrics struct {
	lookupSeconds prometheus.Histogram
	hitTokens     prometheus.Histogram
}

func newMetrics() *metrics {
	return &metrics{
		lookupSeconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "lookaside_lookup_seconds",
			Help:    "Time that the sidecar took to answer a lookup, from its decoding to its answer.",
			Buckets: prometheus.ExponentialBuckets(1e-6, 4, 10),
		}),
		hitTokens: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "lookaside_hit_tokens",
			Help:    "Tokens found by each lookup.",
			Buckets: append([]float64{0}, prometheus.ExponentialBuckets(64, 2, 13)...),
		}),
	}
}

// observeLookup implements connector.Config.ObserveLookup.
func (m *metrics) observeLookup(hitTokens int, took time.Duration) {
	m.lookupSeconds.Observe(took.Seconds())
	m.hitTokens.Observe(float64(hitTokens))
}

// registry returns a registry of the daemon's metrics, Go's and the process's.
func (m *metrics) registry(d *Daemon) *prometheus.Registry {
	reg := prometheus.NewRegistry()
	reg.MustRegister(m.lookupSeconds, m.hitTokens, newCollector(d),
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return reg
}

// collector reads the daemon's counters and gauges. Its cost does not depend on what is held.
type collector struct {
	d     *Daemon
	descs map[string]*prometheus.Desc
}

// The metrics of the collector; docs/operations.md explains them to operators.
var collected = []struct {
	name, help string
	labels     []string
}{
	{"lookaside_build_info", "1; its labels say which release this is.", []string{"version", "goversion"}},
	{"lookaside_state", "1 while serving, 2 while draining.", nil},
	{"lookaside_sessions", "Sessions that are connected.", []string{"role"}},
	{"lookaside_lingering_sessions", "Sessions that the sidecar gave up while their clients live: what they were granted and leased stays theirs until they close or die.", nil},
	{"lookaside_lingered_sessions_total", "Sessions that have become such.", nil},
	{"lookaside_sessions_opened_total", "Sessions opened.", nil},
	{"lookaside_sessions_refused_total", "Sessions refused, by why.", []string{"code"}},
	{"lookaside_spaces", "Kinds of pages held side by side.", nil},
	{"lookaside_lookups_in_flight", "Lookups that were answered and hold leases: no worker has taken them over and nobody cancelled them.", nil},
	{"lookaside_lookups_total", "Lookups answered.", nil},
	{"lookaside_lookups_expired_total", "Lookups whose leases were freed by lookup.lease.", nil},
	{"lookaside_lookup_pages_total", "Pages that lookups asked for.", nil},
	{"lookaside_hit_pages_total", "Pages that lookups found.", nil},
	{"lookaside_hit_tokens_total", "Tokens that lookups found.", nil},
	{"lookaside_answers_dropped_total", "Answers to lookups that a client did not read.", nil},
	{"lookaside_lookup_floods_total", "Times that a lookup socket was shut for a moment because of too many connections or too much memory.", nil},
	{"lookaside_stores_total", "Stores committed.", nil},
	{"lookaside_stores_in_flight", "Stores that were granted slots and are not yet committed.", nil},
	{"lookaside_stored_pages_total", "Pages stored.", nil},
	{"lookaside_stored_bytes_total", "Bytes stored.", nil},
	{"lookaside_held_pages_total", "Pages offered for storing that were held already.", nil},
	{"lookaside_shed_pages_total", "Pages offered for storing for which there was no room.", nil},
	{"lookaside_loads_total", "Loads finished.", nil},
	{"lookaside_loads_in_flight", "Loads under way.", nil},
	{"lookaside_loaded_pages_total", "Pages loaded.", nil},
	{"lookaside_loaded_bytes_total", "Bytes loaded.", nil},
	{"lookaside_leases", "Leases on slots.", nil},
	{"lookaside_slots", "Slots of the arena, by state; leased ones are ready ones as well.", []string{"state"}},
	{"lookaside_pages", "Pages that can be found.", nil},
	{"lookaside_evictions_total", "Chunks that left the arena, by why: room (least recently used), cleared, bad (a worker found its bytes wrong), duplicate or replaced (another chunk holds the same pages).", []string{"cause"}},
	{"lookaside_region_bytes", "Bytes of each region of the arena.", []string{"region", "kind"}},
	{"lookaside_arena_limit_bytes", "arena.limit, in whole pages.", nil},
	{"lookaside_arena_capacity_bytes", "Bytes of all regions.", nil},
	{"lookaside_arena_used_bytes", "Bytes of occupied slots.", nil},
	{"lookaside_arena_growth_failures_total", "Times that the host did not give the arena the memory to grow.", nil},
	{"lookaside_metadata_bytes", "Address space of the index and the slot tables.", nil},
	{"lookaside_limited_total", "Lookups and stores that were cut short because their session had its share of the arena, or its leases.", nil},
	{"lookaside_errors_total", "Requests that failed, by kind.", []string{"kind"}},
}

func newCollector(d *Daemon) *collector {
	c := &collector{d: d, descs: make(map[string]*prometheus.Desc, len(collected))}
	for _, m := range collected {
		c.descs[m.name] = prometheus.NewDesc(m.name, m.help, m.labels, nil)
	}
	return c
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range c.descs {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(name string, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(c.descs[name], prometheus.GaugeValue, v, labels...)
	}
	count := func(name string, v uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(c.descs[name], prometheus.CounterValue, float64(v), labels...)
	}
	st := c.d.Status()
	gauge("lookaside_build_info", 1, st.Version, runtime.Version())
	state := 1.0
	if st.State == stateDraining {
		state = 2
	}
	gauge("lookaside_state", state)
	roles := map[string]int{"scheduler": 0, "worker": 0}
	for _, s := range st.Sessions {
		roles[s.Role]++
	}
	for role, n := range roles {
		gauge("lookaside_sessions", float64(n), role)
	}
	gauge("lookaside_lingering_sessions", float64(len(st.Lingering)))
	n := st.Counters
	count("lookaside_lingered_sessions_total", n.Lingered)
	count("lookaside_sessions_opened_total", n.SessionsOpened)
	for code, v := range n.Refused {
		count("lookaside_sessions_refused_total", v, code)
	}
	gauge("lookaside_spaces", float64(len(st.Spaces)))
	gauge("lookaside_lookups_in_flight", float64(st.Lookups.InFlight))
	count("lookaside_lookups_total", n.Lookups)
	count("lookaside_lookups_expired_total", st.Lookups.Expired)
	count("lookaside_lookup_pages_total", n.LookupPages)
	count("lookaside_hit_pages_total", n.HitPages)
	count("lookaside_hit_tokens_total", n.HitTokens)
	count("lookaside_answers_dropped_total", st.Lookups.AnswersDropped)
	count("lookaside_lookup_floods_total", st.Lookups.Floods)
	count("lookaside_stores_total", n.Stores)
	gauge("lookaside_stores_in_flight", float64(st.StoresInFlight))
	count("lookaside_stored_pages_total", n.StoredPages)
	count("lookaside_stored_bytes_total", n.StoredBytes)
	count("lookaside_held_pages_total", n.HeldPages)
	count("lookaside_shed_pages_total", n.ShedPages)
	count("lookaside_loads_total", n.Loads)
	gauge("lookaside_loads_in_flight", float64(st.LoadsInFlight))
	count("lookaside_loaded_pages_total", n.LoadedPages)
	count("lookaside_loaded_bytes_total", n.LoadedBytes)
	gauge("lookaside_leases", float64(st.Leases))
	gauge("lookaside_slots", float64(st.Slots.Free), "free")
	gauge("lookaside_slots", float64(st.Slots.Filling), "filling")
	gauge("lookaside_slots", float64(st.Slots.Ready), "ready")
	gauge("lookaside_slots", float64(st.Slots.Leased), "leased")
	gauge("lookaside_pages", float64(st.Pages))
	for cause, v := range st.Evictions {
		count("lookaside_evictions_total", v, cause)
	}
	for i, r := range st.Arena.Regions {
		gauge("lookaside_region_bytes", float64(r.SizeBytes), strconv.Itoa(i), string(r.Kind))
	}
	gauge("lookaside_arena_limit_bytes", float64(st.Arena.LimitBytes))
	gauge("lookaside_arena_capacity_bytes", float64(st.Arena.CapacityBytes))
	gauge("lookaside_arena_used_bytes", float64(st.Arena.UsedBytes))
	count("lookaside_arena_growth_failures_total", st.Arena.GrowthFailures)
	gauge("lookaside_metadata_bytes", float64(st.MetadataBytes))
	count("lookaside_limited_total", st.Limited)
	for kind, v := range n.Errors {
		count("lookaside_errors_total", v, kind)
	}
}
