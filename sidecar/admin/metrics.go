package admin

import (
	"runtime"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"lookaside/ipc/hosts"
	"lookaside/sidecar/settings"
	"lookaside/tiers/stack"
)

// Metrics holds the histograms, which are updated at each event. All other metrics are read from
// the parts at each scrape.
type Metrics struct {
	lookupSeconds prometheus.Histogram
	hitTokens     prometheus.Histogram
	tierSeconds   *prometheus.HistogramVec
	tierBytes     *prometheus.HistogramVec
	tiers         []tierMetrics // by the tier's number; ObserveTier adds to them
}

// tierMetrics holds a tier's histograms, by operation.
type tierMetrics struct {
	seconds, bytes [tierOps]prometheus.Observer // bytes has no entry for lookups
}

// tierOps is the number of operations; tierOpNames has their labels.
const tierOps = 3

var tierOpNames = [tierOps]string{stack.OpLookup: "lookup", stack.OpLoad: "load",
	stack.OpStore: "store"}

// NewMetrics returns the histograms of a sidecar with these tiers.
func NewMetrics(tiers []settings.TierConfig) *Metrics {
	m := &Metrics{
		lookupSeconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "lookaside_lookup_seconds",
			Help:    "Time that the sidecar took to answer a lookup, from its decoding to its answer.",
			Buckets: prometheus.ExponentialBuckets(1e-6, 4, 12),
		}),
		hitTokens: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "lookaside_hit_tokens",
			Help:    "Tokens found by each lookup.",
			Buckets: append([]float64{0}, prometheus.ExponentialBuckets(64, 2, 13)...),
		}),
		tierSeconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "lookaside_tier_seconds",
			Help:    "Time that a lookup of a tier took, or that passed from the beginning of the call of the tier until a chunk was loaded or stored.",
			Buckets: prometheus.ExponentialBuckets(1e-5, 4, 12),
		}, []string{"tier", "op"}),
		tierBytes: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "lookaside_tier_chunk_bytes",
			Help:    "Bytes of the chunks that were loaded from a tier or stored in it; the sum is the traffic each way.",
			Buckets: prometheus.ExponentialBuckets(64<<10, 4, 8),
		}, []string{"tier", "op"}),
	}
	for _, t := range tiers {
		var tm tierMetrics
		for op, name := range tierOpNames {
			tm.seconds[op] = m.tierSeconds.WithLabelValues(t.Name, name)
			if stack.Op(op) != stack.OpLookup {
				tm.bytes[op] = m.tierBytes.WithLabelValues(t.Name, name)
			}
		}
		m.tiers = append(m.tiers, tm)
	}
	return m
}

// ObserveTier implements stack.Config.Observe.
func (m *Metrics) ObserveTier(tier int, op stack.Op, bytes int64, took time.Duration) {
	t := &m.tiers[tier]
	t.seconds[op].Observe(took.Seconds())
	if t.bytes[op] != nil {
		t.bytes[op].Observe(float64(bytes))
	}
}

// ObserveLookup implements connector.Config.ObserveLookup.
func (m *Metrics) ObserveLookup(hitTokens int, took time.Duration) {
	m.lookupSeconds.Observe(took.Seconds())
	m.hitTokens.Observe(float64(hitTokens))
}

// registry returns a registry of the daemon's metrics, Go's and the process's.
func (m *Metrics) registry(o *Operations) *prometheus.Registry {
	reg := prometheus.NewRegistry()
	reg.MustRegister(m.lookupSeconds, m.hitTokens, m.tierSeconds, m.tierBytes, newCollector(o),
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return reg
}

// collector reads the daemon's counters and gauges. Its cost does not depend on how much is held.
type collector struct {
	o     *Operations
	descs map[string]*prometheus.Desc
}

// collected lists the collector's metrics. docs/operations.md explains them to operators.
var collected = []struct {
	name, help string
	labels     []string
}{
	{"lookaside_build_info", "1; its labels say which release and commit this is.",
		[]string{"version", "revision", "goversion"}},
	{"lookaside_state", "1 while serving, 2 while draining.", nil},
	{"lookaside_sessions", "Sessions that are connected.", []string{"role"}},
	{"lookaside_lingering_sessions",
		"Sessions that the sidecar has given up and whose clients live: what they were granted and leased stays theirs until they close or die.", nil},
	{"lookaside_lingered_sessions_total",
		"Sessions that the sidecar gave up while their clients lived and held slots.", nil},
	{"lookaside_frozen_sessions",
		"Sessions whose clients live, say nothing for seconds, and hold slots: those stay theirs.",
		nil},
	{"lookaside_frozen_slots", "Slots that frozen and lingering sessions hold.", nil},
	{"lookaside_froze_sessions_total", "Times that a session which held slots froze.", nil},
	{"lookaside_sessions_opened_total", "Sessions opened.", nil},
	{"lookaside_sessions_refused_total", "Sessions refused, by why.", []string{"code"}},
	{"lookaside_spaces", "Kinds of pages held side by side.", nil},
	{"lookaside_requests_total",
		"Requests that vLLM admitted. One that was preempted is admitted again.", nil},
	{"lookaside_asked_tokens_total",
		"Tokens of admitted requests that vLLM's own cache did not have.", nil},
	{"lookaside_own_tokens_total",
		"Tokens of admitted requests that vLLM's own cache had.", nil},
	{"lookaside_found_tokens_total",
		"Tokens of admitted requests that vLLM's own cache did not have and the sidecars of all ranks held.", nil},
	{"lookaside_loaded_tokens_total",
		"Tokens of admitted requests that vLLM loaded instead of computing them. Divided by lookaside_asked_tokens_total it is what the cache is worth.", nil},
	{"lookaside_computed_tokens_total",
		"Tokens of admitted requests that vLLM computed: those asked for and not loaded.", nil},
	{"lookaside_unpriced_tokens_total",
		"Loaded tokens without an estimate of the time saved, because vLLM had not measured its prefills yet.", nil},
	{"lookaside_saved_compute_seconds_total",
		"Estimate of the time in which vLLM would have computed the loaded tokens.", nil},
	{"lookaside_spent_seconds_total",
		"What engines waited for lookups, and for loads.", []string{"on"}},
	{"lookaside_saved_ttft_seconds",
		"Estimate of the time to first token saved since the start: saved_compute less spent. Falls where lookups and loads take longer than computing would.", nil},
	{"lookaside_unshared_spaces",
		"Spaces that share nothing with another one of their model, here or at another sidecar, by the field that differs by accident, such as none_hash (PYTHONHASHSEED).", []string{"field"}},
	{"lookaside_lookups_in_flight",
		"Lookups that were answered and hold leases: no worker has taken them over and nobody cancelled them.", nil},
	{"lookaside_lookups_total", "Lookups answered.", nil},
	{"lookaside_lookups_expired_total", "Lookups whose leases were freed by lookup.lease.", nil},
	{"lookaside_lookup_pages_total",
		"Pages that lookups asked for, also those that vLLM then had itself.", nil},
	{"lookaside_hit_pages_total", "Pages that lookups found, also those that nobody then loaded.",
		nil},
	{"lookaside_hit_tokens_total", "Tokens of the pages that lookups found.", nil},
	{"lookaside_answers_dropped_total", "Answers to lookups that a client did not read.", nil},
	{"lookaside_lookup_floods_total",
		"Times that a lookup socket was shut for a moment because of too many connections or too much memory.", nil},
	{"lookaside_stores_total", "Stores committed.", nil},
	{"lookaside_stores_in_flight", "Stores that were granted slots and are not yet committed.",
		nil},
	{"lookaside_stored_pages_total", "Pages stored.", nil},
	{"lookaside_stored_bytes_total", "Bytes stored.", nil},
	{"lookaside_held_pages_total", "Pages offered for storing that were held already.", nil},
	{"lookaside_shed_pages_total", "Pages offered for storing for which there was no room.", nil},
	{"lookaside_loads_total", "Loads finished.", nil},
	{"lookaside_loads_in_flight", "Loads under way.", nil},
	{"lookaside_loaded_pages_total", "Pages loaded.", nil},
	{"lookaside_loaded_bytes_total", "Bytes loaded.", nil},
	{"lookaside_leases", "Leases on slots.", nil},
	{"lookaside_slots", "Slots of the pieces of the arena that models have so far, by state; leased ones are ready ones as well.", []string{"state"}},
	{"lookaside_hint_slots",
		"Slots of the arena that hints of requests have kept, or have go first, by how: retained, pinned, low.", []string{"kind"}},
	{"lookaside_hint_chunks_total",
		"Chunks that hints of requests were followed for, by the hint: retain, pin, low (a priority below 50, or demoted), demote.", []string{"hint"}},
	{"lookaside_hints_ignored_total",
		"Hints of requests that were not followed, by why: share (chunks beyond hints.share), tenant (chunks of another tenant), busy (advice, because too much came at once or the sidecar was ending).", []string{"reason"}},
	{"lookaside_hints_expired_total", "Times to retain or pin a chunk that are over.", nil},
	{"lookaside_advice_total", "Advice of schedulers about prefixes, by what it asked for.",
		[]string{"action"}},
	{"lookaside_advised_prefetch_pages_total",
		"Pages that prefetches by advice brought into the arena, or found there.", nil},
	{"lookaside_deferred_pages_total",
		"Pages offered for storing that requests want stored from a later use on.", nil},
	{"lookaside_pages", "Pages that lookups can find in the arena.", nil},
	{"lookaside_prefix_ends_total",
		"Requests that were looked up, by the reason for which the prefix ends where it does; end: all was found. What the engine reports of a request counts besides.",
		[]string{"reason"}},
	{"lookaside_miss_pages_total",
		"Pages that lookups asked for and did not find, by the reason of the first page missed.",
		[]string{"reason"}},
	{"lookaside_evictions_total",
		"Chunks that left the arena, by why: room (chosen by arena.eviction), cleared, bad (a worker, or the check of a restored chunk before its first use, found its bytes wrong), duplicate or replaced (another chunk holds the same pages).", []string{"cause"}},
	{"lookaside_residence_seconds",
		"Time that chunks were in the arena before they were evicted for room.", nil},
	{"lookaside_reuse_seconds",
		"Time from one use of a chunk to its next lookup. From a sample of the chunks.", nil},
	{"lookaside_reuse_distance_bytes",
		"Bytes of different chunks used from one use of a chunk to its next lookup: an LRU cache of that size would just hit. From a sample of the chunks.", nil},
	{"lookaside_first_use_chunks_total",
		"Chunks looked up that had been neither looked up nor stored before. From a sample of the chunks.", nil},
	{"lookaside_curve_asked_pages_total",
		"Pages looked up, for which arenas of other sizes are simulated.", nil},
	{"lookaside_curve_missed_pages_total",
		"Pages looked up that an arena of another size would not have held, by the size in arenas. 1 less its part of lookaside_curve_asked_pages_total is the hit ratio of that size.", []string{"size"}},
	{"lookaside_demand_dropped_requests_total",
		"Lookups and stores that were neither watched for the curve nor recorded, because there was no time for them.", nil},
	{"lookaside_tenant_asked_tokens_total",
		"Tokens that lookups of a tenant asked for. There are series of tenants only if a request has had a name, or somebody has a share; their number is bounded by tenants.max.",
		[]string{"tenant"}},
	{"lookaside_tenant_hit_tokens_total", "Tokens that lookups of a tenant found.",
		[]string{"tenant"}},
	{"lookaside_tenant_shed_pages_total",
		"Pages that a tenant offered for storing and for which there was no room.",
		[]string{"tenant"}},
	{"lookaside_tenant_used_bytes",
		"Bytes of the slots of a tenant's chunks, in the arena or in a tier.",
		[]string{"tenant", "tier"}},
	{"lookaside_tenant_share_bytes",
		"Bytes that a tenant keeps in the arena or in a tier however much others store.",
		[]string{"tenant", "tier"}},
	{"lookaside_tenant_evictions_total",
		"Chunks of a tenant that were dropped for room, in the arena or in a tier.",
		[]string{"tenant", "tier"}},
	{"lookaside_tenant_written_bytes_total", "Bytes of a tenant that were written to a tier.",
		[]string{"tenant", "tier"}},
	{"lookaside_region_bytes", "Bytes of each region of the arena.", []string{"region", "kind",
		"device"}},
	{"lookaside_arena_limit_bytes", "arena.limit, in whole pages.", nil},
	{"lookaside_arena_capacity_bytes", "Bytes of all regions.", nil},
	{"lookaside_arena_used_bytes", "Bytes of occupied slots.", nil},
	{"lookaside_arena_growth_failures_total",
		"Times that the host did not give the arena the memory to grow.", nil},
	{"lookaside_arena_device_bytes",
		"Of an arena on DAX: bytes of each device that are for chunks, by use.",
		[]string{"device", "use"}},
	{"lookaside_arena_device_state",
		"Of an arena on DAX: 1, for each device with the state that it is in.",
		[]string{"device", "state"}},
	{"lookaside_arena_kept_chunks",
		"Chunks that would be found again after a kill now.", nil},
	{"lookaside_arena_waiting_chunks",
		"Chunks that were committed and wait to be kept: what a kill would lose now.", nil},
	{"lookaside_arena_unkept_chunks_total",
		"Of an arena on DAX: chunks that could not be kept, because the device failed there.", nil},
	{"lookaside_arena_recovered_chunks", "Chunks that were found at the start.", nil},
	{"lookaside_arena_frozen",
		"1 while nothing is stored in memory that was found at the start, because a client of the sidecar before may still copy there.", nil},
	{"lookaside_arena_unreadable_chunks_total",
		"Of an arena on DAX: chunks that were dropped because the device could not be read there.",
		nil},
	{"lookaside_arena_slabs",
		"Of an arena on DAX: pieces that the devices are cut into, by state: in_use, or given_up with what they held, because they failed.", []string{"state"}},
	{"lookaside_metadata_bytes", "Address space of the index and the slot tables.", nil},
	{"lookaside_limited_total",
		"Lookups and stores that were cut short because their session had its share of the arena, or its leases.", nil},
	{"lookaside_errors_total", "Requests that failed, by kind.", []string{"kind"}},
	{"lookaside_event_subscribers", "Subscribers connected at events.endpoint.", nil},
	{"lookaside_event_batches_total", "Batches of KV events published.", nil},
	{"lookaside_event_bytes_total", "Bytes of the batches of KV events published.", nil},
	{"lookaside_event_batches_dropped_total",
		"Batches of KV events that a subscriber lost because it did not read, counted for each subscriber, and replays that a peer asked for too many of.", nil},
	{"lookaside_event_peers_cut_total",
		"Connections to events.endpoint and events.replay_endpoint that were refused, or cut off for what they sent.", nil},
	{"lookaside_event_replays_total", "Times that a subscriber asked for KV events again.", nil},
	{"lookaside_event_gaps_total",
		"Times that all that is held was published anew: changes were lost because the publisher fell behind by more than events.journal, or batches were asked for that are no longer kept.", nil},
	{"lookaside_event_pages_total",
		"Pages that followers (events.endpoint, schedulers) were told of, by what happened.",
		[]string{"kind"}},
	{"lookaside_hosts_sessions",
		"Sessions with other hosts: in, of schedulers there with this sidecar; out, of schedulers here with a sidecar there.",
		[]string{"direction"}},
	{"lookaside_hosts_refused_total",
		"Connections of other hosts that were not let in: a wrong token or certificate, another release, too many.", nil},
	{"lookaside_hosts_failed_total",
		"Attempts to reach a sidecar of another host for a scheduler here that failed.", nil},
	{"lookaside_hosts_dropped_total",
		"Answers of other hosts' sidecars that were dropped because a scheduler here did not read.",
		nil},
	{"lookaside_peers", "Other sidecars that can be borrowed from.", nil},
	{"lookaside_peer_borrowers", "Other sidecars that borrow from this one.", nil},
	{"lookaside_peers_unusable", "Other sidecars that cannot be talked to.", nil},
	{"lookaside_peer_hint_pages", "Pages that others are said to hold.", nil},
	{"lookaside_peer_hint_bytes", "Memory of the table of pages that others are said to hold.",
		nil},
	{"lookaside_peer_hints_total",
		"Changes to what others hold, by what became of them: heard from others, told to others, dropped for want of memory (lookaside_peer_hint_bytes), found to be wrong.", []string{"kind"}},
	{"lookaside_peer_resyncs_total", "Times that another told everything that it holds anew.", nil},
	{"lookaside_peer_borrows_total", "Times that others were asked for chunks.", nil},
	{"lookaside_peer_failed_borrows_total",
		"Times that others were asked for chunks, and asking failed.", nil},
	{"lookaside_peer_borrowed_pages_total", "Pages that others lent.", nil},
	{"lookaside_peer_borrowed_chunks", "Chunks of others that are here now, by use.",
		[]string{"state"}},
	{"lookaside_peer_joined_chunks_total",
		"Chunks that were being borrowed for another lookup already.", nil},
	{"lookaside_peer_void_chunks_total", "Chunks whose sidecar went before they were used.", nil},
	{"lookaside_peer_copied_chunks_total",
		"Chunks of others that were copied into the own arena, being read often.", nil},
	{"lookaside_peer_copied_pages_total",
		"Pages of the chunks of others that were copied into the own arena.", nil},
	{"lookaside_peer_not_copied_chunks_total",
		"Chunks of others that were to be copied into the own arena and were not: there was no room, their bytes could not be read, or their sidecar went.", nil},
	{"lookaside_peer_bad_chunks_total", "Chunks of others whose bytes did not check out.", nil},
	{"lookaside_peer_leases_total", "Times that others asked for leases.", nil},
	{"lookaside_peer_refused_leases_total", "Times that others asked for leases and got none.",
		nil},
	{"lookaside_peer_lent_pages_total", "Pages lent to others.", nil},
	{"lookaside_peer_skipped_pages_total",
		"Pages that were not stored because another sidecar holds them.", nil},
	{"lookaside_pins", "Prefixes that are pinned.", nil},
	{"lookaside_lookups_waiting",
		"Lookups that wait for tiers, or for restored chunks to be verified.", nil},
	{"lookaside_promises_total",
		"Times that a scheduler was told that its pages are on their way, and when they arrive.",
		nil},
	{"lookaside_lookups_refused_total",
		"Lookups that were answered by the arena alone, because too many waited for tiers.", nil},
	{"lookaside_lookups_late_total",
		"Lookups that were answered with what there was at their deadline.", nil},
	{"lookaside_lookups_cut_total",
		"Lookups that returned fewer pages than a tier holds, because computing them is faster.",
		nil},
	{"lookaside_lookups_verified_total", "Lookups that waited for restored chunks to be verified.",
		nil},
	{"lookaside_unverified_chunks",
		"Chunks restored with the arena that nobody has used so far: they are verified before their first use.", nil},
	{"lookaside_verified_chunks_total",
		"Chunks restored with the arena that matched their checksums when they were first used.",
		nil},
	{"lookaside_corrupt_chunks_total",
		"Chunks restored with the arena that did not match their checksums, and were dropped.",
		nil},
	{"lookaside_checked_chunks_total",
		"Chunks in the arena that were compared with the checksum that they had before.", nil},
	{"lookaside_check_walks_total",
		"Times that the whole arena was walked over to compare checksums.", nil},
	{"lookaside_rotten_chunks_total",
		"Chunks in the arena whose bytes had changed since they were stored, or could not be read any more. They were dropped.", nil},
	{"lookaside_promotions_total",
		"Chunks for which room was made in the arena, to be loaded from a tier.", nil},
	{"lookaside_promotions_joined_total",
		"Chunks that lookups wanted and that were on their way for others already.", nil},
	{"lookaside_promotions_failed_total", "Chunks that no tier could load.", nil},
	{"lookaside_promotions_late_total", "Chunks that came when a store had been first.", nil},
	{"lookaside_promoted_pages_total", "Pages that came from tiers.", nil},
	{"lookaside_promoting_slots", "Chunks on their way from tiers to the arena.", nil},
	{"lookaside_tier_up", "1 while the tier is in use, 0 while its breaker is not closed.",
		[]string{"tier", "kind"}},
	{"lookaside_tier_breaker_opened_total", "Times that the breaker of the tier opened.",
		[]string{"tier"}},
	{"lookaside_tier_lookups_total", "Lookups that asked the tier.", []string{"tier"}},
	{"lookaside_tier_lookup_pages_total",
		"Pages that lookups asked the tier for: those that no tier above has.", []string{"tier"}},
	{"lookaside_tier_hit_pages_total", "Pages that lookups asked the tier for and that it had.",
		[]string{"tier"}},
	{"lookaside_tier_load_queue_chunks",
		"Chunks that wait to be loaded from the tier, or are being.", []string{"tier"}},
	{"lookaside_tier_store_queue_chunks", "Chunks that wait to be written to the tier.",
		[]string{"tier"}},
	{"lookaside_tier_shed_chunks_total",
		"Chunks that were not written to the tier, because its queue was full or they were evicted before their turn.", []string{"tier"}},
	{"lookaside_tier_declined_chunks_total",
		"Chunks that were not written to the tier, because they were not worth it (admit: learned).",
		[]string{"tier"}},
	{"lookaside_tier_no_room_chunks_total", "Chunks for which the tier had no room.",
		[]string{"tier"}},
	{"lookaside_tier_demoted_chunks_total",
		"Chunks written to the tier because the tier above was about to drop them.",
		[]string{"tier"}},
	{"lookaside_tier_failures_total",
		"Lookups of the tier, and chunks loaded and stored, that failed or were late.",
		[]string{"tier", "op"}},
	{"lookaside_tier_late_total",
		"Lookups of the tier, and chunks loaded and stored, that were given up because they took too long.", []string{"tier"}},
	{"lookaside_tier_missed_chunks_total",
		"Chunks that the tier had said it has, and did not have when they were loaded.",
		[]string{"tier"}},
	{"lookaside_tier_corrupt_chunks_total",
		"Chunks of the tier that did not match their checksum, and were dropped.",
		[]string{"tier"}},
	{"lookaside_tier_evictions_total", "Chunks that the tier dropped for room.", []string{"tier"}},
	{"lookaside_tier_capacity_bytes", "Size of the tier, where it is known.", []string{"tier"}},
	{"lookaside_tier_used_bytes", "Bytes of what the tier holds, where it is known.",
		[]string{"tier"}},
	{"lookaside_tier_chunks", "Chunks that the tier holds, where it is known.", []string{"tier"}},
	{"lookaside_tier_pages", "Pages that the tier holds, where it is known.", []string{"tier"}},
	{"lookaside_tier_lookup_estimate_seconds",
		"Estimate of how long a lookup of the tier takes, where it is not local.",
		[]string{"tier"}},
	{"lookaside_tier_latency_estimate_seconds",
		"Estimate of how long it takes until a load's first byte.", []string{"tier"}},
	{"lookaside_tier_bandwidth_estimate_bytes_per_second",
		"Estimate of how fast the tier loads; 0 before the first load.", []string{"tier"}},
}

func newCollector(o *Operations) *collector {
	c := &collector{o: o, descs: make(map[string]*prometheus.Desc, len(collected))}
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

// Collect implements prometheus.Collector. It is one list with a line for each metric, which is why
// it is long.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(name string, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(c.descs[name], prometheus.GaugeValue, v, labels...)
	}
	count := func(name string, v uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(c.descs[name], prometheus.CounterValue, float64(v),
			labels...)
	}
	seconds := func(name string, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(c.descs[name], prometheus.CounterValue, v, labels...)
	}
	st := c.o.Status()
	gauge("lookaside_build_info", 1, st.Version, st.Commit, runtime.Version())
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
	gauge("lookaside_frozen_sessions", float64(len(st.Frozen)))
	gauge("lookaside_frozen_slots", float64(st.FrozenSlots))
	count("lookaside_froze_sessions_total", n.Froze)
	count("lookaside_sessions_opened_total", n.SessionsOpened)
	for code, v := range n.Refused {
		count("lookaside_sessions_refused_total", v, code)
	}
	gauge("lookaside_spaces", float64(len(st.Spaces)))
	c.collectDemand(ch, count)
	differ := map[string]map[string]bool{}
	for _, u := range st.Unshared {
		for _, c := range u.Causes {
			if differ[c.Field] == nil {
				differ[c.Field] = map[string]bool{}
			}
			differ[c.Field][u.Space] = true
		}
	}
	for field, spaces := range differ {
		gauge("lookaside_unshared_spaces", float64(len(spaces)), field)
	}
	gauge("lookaside_lookups_in_flight", float64(st.Lookups.InFlight))
	count("lookaside_lookups_total", n.Lookups)
	count("lookaside_lookups_expired_total", st.Lookups.Expired)
	count("lookaside_lookup_pages_total", n.LookupPages)
	count("lookaside_requests_total", n.Tokens.Requests)
	count("lookaside_asked_tokens_total", n.Tokens.Asked)
	count("lookaside_own_tokens_total", n.Tokens.Own)
	count("lookaside_found_tokens_total", n.Tokens.Found)
	count("lookaside_loaded_tokens_total", n.Tokens.Loaded)
	count("lookaside_computed_tokens_total", n.Tokens.Computed)
	count("lookaside_unpriced_tokens_total", n.Saved.UnpricedTokens)
	seconds("lookaside_saved_compute_seconds_total", n.Saved.ComputeS)
	seconds("lookaside_spent_seconds_total", n.Saved.LookupS, "lookup")
	seconds("lookaside_spent_seconds_total", n.Saved.LoadS, "load")
	gauge("lookaside_saved_ttft_seconds", n.Saved.TTFTS)
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
	h := st.Hints
	gauge("lookaside_hint_slots", float64(h.RetainedSlots), "retained")
	gauge("lookaside_hint_slots", float64(h.PinnedSlots), "pinned")
	gauge("lookaside_hint_slots", float64(h.LowSlots), "low")
	count("lookaside_hint_chunks_total", h.Retained, "retain")
	count("lookaside_hint_chunks_total", h.Pinned, "pin")
	count("lookaside_hint_chunks_total", h.Low, "low")
	count("lookaside_hint_chunks_total", h.Demoted, "demote")
	count("lookaside_hints_ignored_total", h.OverShare, "share")
	count("lookaside_hints_ignored_total", h.OfOthers, "tenant")
	count("lookaside_hints_ignored_total", h.Advice.Dropped, "busy")
	count("lookaside_hints_expired_total", h.Expired)
	count("lookaside_advice_total", h.Advice.Retain, "retain")
	count("lookaside_advice_total", h.Advice.Pin, "pin")
	count("lookaside_advice_total", h.Advice.Prefetch, "prefetch")
	count("lookaside_advice_total", h.Advice.Demote, "demote")
	count("lookaside_advised_prefetch_pages_total", h.Advice.PrefetchedPages)
	count("lookaside_deferred_pages_total", h.DeferredPages)
	for reason, n := range st.Misses {
		count("lookaside_prefix_ends_total", n.Ends, reason)
		count("lookaside_miss_pages_total", n.Pages, reason)
	}
	for cause, v := range st.Evictions {
		count("lookaside_evictions_total", v, cause)
	}
	for _, r := range st.Arena.Regions {
		gauge("lookaside_region_bytes", float64(r.SizeBytes), strconv.FormatUint(uint64(r.Region),
			10), string(r.Kind), r.Device)
	}
	gauge("lookaside_arena_kept_chunks", float64(st.Arena.KeptChunks))
	gauge("lookaside_arena_waiting_chunks", float64(st.Arena.WaitingChunks))
	gauge("lookaside_arena_recovered_chunks", float64(st.Arena.Recovered.Chunks))
	gauge("lookaside_arena_frozen", boolGauge(st.Arena.Recovered.Frozen))
	if a := st.Arena.DAX; a != nil {
		for _, dev := range a.Devices {
			gauge("lookaside_arena_device_bytes", float64(dev.UsedBytes), dev.DevicePath, "used")
			gauge("lookaside_arena_device_bytes", float64(dev.FreeBytes), dev.DevicePath, "free")
			gauge("lookaside_arena_device_state", 1, dev.DevicePath, dev.State)
		}
		count("lookaside_arena_unkept_chunks_total", a.UnkeptChunks)
		count("lookaside_arena_unreadable_chunks_total", a.UnreadableChunks)
		gauge("lookaside_arena_slabs", float64(a.Slabs-a.SlabsGivenUp), "in_use")
		gauge("lookaside_arena_slabs", float64(a.SlabsGivenUp), "given_up")
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
	c.collectEvents(gauge, count)
	c.collectPeers(&st, gauge, count)
	carried := map[hosts.Direction]float64{}
	for i := range st.Hosts.Carried {
		carried[st.Hosts.Carried[i].Direction]++
	}
	for _, way := range []hosts.Direction{hosts.In, hosts.Out} {
		gauge("lookaside_hosts_sessions", carried[way], string(way))
	}
	count("lookaside_hosts_refused_total", st.Hosts.Refused)
	count("lookaside_hosts_failed_total", st.Hosts.Failed)
	count("lookaside_hosts_dropped_total", st.Hosts.Dropped)
	gauge("lookaside_pins", float64(st.Pins))
	gauge("lookaside_lookups_waiting", float64(st.Lookups.Waiting))
	count("lookaside_promises_total", n.Promised)
	count("lookaside_lookups_refused_total", st.Lookups.Refused)
	count("lookaside_lookups_late_total", st.Lookups.Late)
	count("lookaside_lookups_cut_total", st.Lookups.Cut)
	count("lookaside_lookups_verified_total", st.Lookups.Verified)
	v := st.Verifications
	gauge("lookaside_unverified_chunks", float64(v.Unverified))
	count("lookaside_verified_chunks_total", v.Verified)
	count("lookaside_corrupt_chunks_total", v.Corrupt)
	count("lookaside_checked_chunks_total", st.Checks.Checked)
	count("lookaside_check_walks_total", st.Checks.Walks)
	count("lookaside_rotten_chunks_total", st.Checks.Rotten)
	p := st.Promotions
	count("lookaside_promotions_total", p.Chunks)
	count("lookaside_promotions_joined_total", p.Joined)
	count("lookaside_promotions_failed_total", p.Failed)
	count("lookaside_promotions_late_total", p.Late)
	count("lookaside_promoted_pages_total", p.Pages)
	gauge("lookaside_promoting_slots", float64(p.InFlight))
	for i := range st.Tiers {
		c.collectTier(&st.Tiers[i], gauge, count)
	}
	for i := range st.Tenants {
		collectTenant(&st.Tenants[i], gauge, count)
	}
}

func collectTenant(t *TenantStatus, gauge func(string, float64, ...string),
	count func(string, uint64, ...string)) {
	count("lookaside_tenant_asked_tokens_total", t.AskedTokens, t.Name)
	count("lookaside_tenant_hit_tokens_total", t.HitTokens, t.Name)
	count("lookaside_tenant_shed_pages_total", t.ShedPages, t.Name)
	for i := range len(t.Tiers) + 1 {
		s := &t.Arena
		if i > 0 {
			s = &t.Tiers[i-1]
			count("lookaside_tenant_written_bytes_total", s.WrittenBytes, t.Name, s.Name)
		}
		if s.UsedBytes < 0 { // unknown
			continue
		}
		gauge("lookaside_tenant_used_bytes", float64(s.UsedBytes), t.Name, s.Name)
		gauge("lookaside_tenant_share_bytes", float64(s.ShareBytes), t.Name, s.Name)
		count("lookaside_tenant_evictions_total", s.Evictions, t.Name, s.Name)
	}
}

func (c *collector) collectPeers(st *Status, gauge func(string, float64, ...string),
	count func(string, uint64, ...string)) {
	p := &st.Peers
	gone := 0
	for _, l := range p.Lenders {
		if l.Gone {
			gone++
		}
	}
	gauge("lookaside_peers", float64(len(p.Lenders)-gone))
	gauge("lookaside_peer_borrowers", float64(len(p.Borrowers)))
	gauge("lookaside_peers_unusable", float64(len(p.Unusable)))
	gauge("lookaside_peer_hint_pages", float64(p.HintPages))
	gauge("lookaside_peer_hint_bytes", float64(p.HintBytes))
	for kind, v := range map[string]uint64{"heard": p.HintsHeard, "told": p.HintsTold,
		"dropped": p.HintsDropped, "wrong": p.HintsWrong} {
		count("lookaside_peer_hints_total", v, kind)
	}
	count("lookaside_peer_resyncs_total", p.Resyncs)
	count("lookaside_peer_borrows_total", p.Borrows)
	count("lookaside_peer_failed_borrows_total", p.FailedBorrows)
	count("lookaside_peer_borrowed_pages_total", p.BorrowedPages)
	gauge("lookaside_peer_borrowed_chunks", float64(p.Borrowing.Leased), "leased")
	gauge("lookaside_peer_borrowed_chunks", float64(p.Borrowing.Used-p.Borrowing.Leased), "idle")
	count("lookaside_peer_joined_chunks_total", p.Borrowing.Joined)
	count("lookaside_peer_void_chunks_total", p.Borrowing.Void)
	count("lookaside_peer_copied_chunks_total", p.Borrowing.Copied)
	count("lookaside_peer_copied_pages_total", p.Borrowing.CopiedPages)
	count("lookaside_peer_not_copied_chunks_total", p.Borrowing.NotCopied)
	count("lookaside_peer_bad_chunks_total", p.Borrowing.Bad)
	count("lookaside_peer_leases_total", p.Leases)
	count("lookaside_peer_refused_leases_total", p.RefusedLeases)
	count("lookaside_peer_lent_pages_total", p.LentPages)
	count("lookaside_peer_skipped_pages_total", st.Counters.ElsewherePages)
}

func (c *collector) collectEvents(gauge func(string, float64, ...string), count func(string, uint64,
	...string)) {
	j := c.o.Engine.Journal()
	count("lookaside_event_pages_total", j.StoredPages, "stored")
	count("lookaside_event_pages_total", j.RemovedPages, "removed")
	if c.o.Events == nil {
		return
	}
	st := c.o.Events.Stats()
	gauge("lookaside_event_subscribers", float64(st.Subscribers))
	count("lookaside_event_batches_total", st.Batches)
	count("lookaside_event_bytes_total", st.Bytes)
	count("lookaside_event_batches_dropped_total", st.Dropped)
	count("lookaside_event_peers_cut_total", st.Cut)
	count("lookaside_event_replays_total", st.Replays)
	count("lookaside_event_gaps_total", c.o.Events.Gaps()+st.Resyncs)
}

func (c *collector) collectTier(t *TierStatus, gauge func(string, float64, ...string),
	count func(string, uint64, ...string)) {
	up := 0.0
	if t.State == breakerClosed {
		up = 1
	}
	gauge("lookaside_tier_up", up, t.Name, t.Kind)
	for _, n := range []struct {
		name string
		v    uint64
	}{
		{"breaker_opened", t.Opened}, {"lookups", t.Lookups}, {"lookup_pages", t.LookupPages},
		{"hit_pages", t.HitPages}, {"shed_chunks", t.Shed},
		{"declined_chunks", t.Declined}, {"no_room_chunks", t.NoRoom}, {"demoted_chunks", t.Demoted}, {"late", t.Late},
		{"missed_chunks", t.Missed}, {"corrupt_chunks", t.CorruptChunks},
		{"evictions", t.Evictions},
	} {
		count("lookaside_tier_"+n.name+"_total", n.v, t.Name)
	}
	for op, v := range [tierOps]uint64{stack.OpLookup: t.LookupFailures,
		stack.OpLoad: t.LoadFailures, stack.OpStore: t.StoreFailures} {
		count("lookaside_tier_failures_total", v, t.Name, tierOpNames[op])
	}
	for _, n := range []struct {
		name string
		v    float64
	}{
		{"load_queue_chunks", float64(t.LoadQueue)}, {"store_queue_chunks", float64(t.StoreQueue)},
		{"capacity_bytes", float64(t.CapacityBytes)}, {"used_bytes", float64(t.UsedBytes)},
		{"chunks", float64(t.Chunks)}, {"pages", float64(t.Pages)},
		{"lookup_estimate_seconds", t.LookupS}, {"latency_estimate_seconds", t.LatencyS},
		{"bandwidth_estimate_bytes_per_second", t.BytesPerSecond},
	} {
		if n.v >= 0 { // -1 means unknown
			gauge("lookaside_tier_"+n.name, n.v, t.Name)
		}
	}
}

// boolGauge is 1 for true.
func boolGauge(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
