package lmcache

import (
	"fmt"
	"maps"
	"math"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"
)

// A rule returns what becomes of a key. The converter has all keys, so a rule may read others.
type rule func(*converter, *given) (verdict, error)

// say returns a rule with a fixed verdict.
func say(v verdict) rule { return func(*converter, *given) (verdict, error) { return v, nil } }

// lost returns a rule for a feature that Lookaside does not have. It does not matter if the feature
// was off.
func lost(why string) rule {
	return func(_ *converter, g *given) (verdict, error) {
		if g.off() {
			return unused("it is off"), nil
		}
		return none(why), nil
	}
}

// partOf returns a rule for a key that has a meaning only together with another key.
func partOf(key, why string) rule {
	return func(c *converter, g *given) (verdict, error) {
		if c.config[key].off() && c.extra[key].off() {
			return unused(key + " is off"), nil
		}
		return lost(why)(c, g)
	}
}

// These are reasons that several keys share.
const (
	whyBlend   = "KV of text that is not a prefix is not reused"
	whyP2P     = "sidecars of one host find each other and share by themselves (peers.enabled); those of several hosts share a redis or s3 tier"
	whyFleet   = "there is no controller of a fleet: each sidecar's admin server has status, pin, move and clear"
	whyPD      = "prefiller and decoder meet in one sidecar, or in sidecars of one host that share; those of several hosts need a redis or s3 tier"
	whyChannel = "KV goes by way of the arena: between prefiller and decoder there is no channel, buffer or port to set up"
	whyGDS     = "KV does not go from storage to the GPU directly, but through the arena, which the worker maps and pins"
	whyNIXL    = "NIXL is not used: disk, redis and s3 tiers read and write straight from and into the arena"
	whyPlugin  = "no code is loaded into the sidecar"
	whyEncoder = "encoder outputs are not cached"
	whyHidden  = "hidden states are not cached"
	whyStats   = "there are no statistics of chunks; lookaside simulate replays traces, and /metrics counts hits"
	whyRanks   = "every rank's sidecar is asked for that rank's pages"
	whySame    = "ranks that hold the same pages, as with MLA, store them once where they have one sidecar, or sidecars that share"
	whyRecord  = "a chunk is kept with its description and checksums, always"
	whyMaru    = "there is no client of Maru's server; sidecars of one host share by themselves (peers.enabled)"
	whyPolicy  = "nothing is evicted before room is wanted: there is no watermark and no batch to set"
	whyGrowth  = "the arena grows when it is four fifths full, by a quarter of arena.limit or by arena.initial, whichever is more"
	whyPersist = "what a tier holds is always found again after a restart"
)

// configTable has the rules for the keys of LMCache's configuration, in the order of their
// conversion.
var configTable = []struct {
	keys string // separated by spaces
	rule rule
}{
	{"max_local_cpu_size", arenaLimit},
	{"chunk_size", chunkSize},
	{"local_cpu", localCPU},
	{"enable_lazy_memory_allocator", lazyAllocator},
	{"lazy_memory_initial_ratio", lazyRatio},
	{"lazy_memory_step_ratio lazy_memory_expand_trigger_ratio",
		partOf("enable_lazy_memory_allocator", whyGrowth)},
	{"lazy_memory_safe_size", lazySafeSize},
	{"local_cpu_use_hugepages", hugepages},
	{"reserve_local_cpu_size",
		lost("at its start the sidecar checks that host and cgroups can give arena.limit, and takes no more: choose it so that this much stays free")},
	{"numa_mode", numaMode},
	{"cache_policy", cachePolicy},
	{"cost_aware_half_life_seconds cost_aware_ewma_alpha",
		partOf("cache_policy", "arena.eviction: adaptive learns by itself, and has nothing to set")},

	{"local_disk", localDisk},
	{"max_local_disk_size", diskSize},
	{"local_disk_path_sharding", func(c *converter, _ *given) (verdict, error) {
		if g := c.config["local_disk"]; g.off() || len(g.list()) < 2 {
			return unused("there is one directory, or none"), nil
		}
		return none("a sidecar spreads its chunks over all of its directories: name in each rank's settings those that are its own"), nil
	}},
	{"gds_path", gdsPath},
	{"gds_path_sharding gds_buffer_size gds_backend", partOf("gds_path", whyGDS)},
	{"use_gds", partOf("gds_path", whyGDS)},
	{"remote_url", remoteURL},
	{"remote_serde", remoteSerde},
	{"remote_storage_plugins", remotePlugins},
	{"storage_plugins", storagePlugins},
	{"blocking_timeout_secs", blockingTimeout},
	{"retrieve_locations", lost(
		"all tiers are asked, nearest first; one that is not wanted is left out of the list tiers")},
	{"store_location", lost("every tier is written to unless its admit is never")},

	{"lookup_timeout_ms", lookupTimeout},
	{"pin_timeout_sec", pinTimeout},
	{"pin_check_interval_sec", say(builtIn("a lease that has run out is freed at once"))},
	{"enable_async_loading", say(builtIn("loads never hold up the scheduler or other requests"))},
	{"save_unfull_chunk", func(_ *converter, g *given) (verdict, error) {
		if g.boolean() {
			return builtIn("a partly filled last chunk is always stored, and found by the page"),
				nil
		}
		return none("a partly filled last chunk is always stored, and found by the page; nothing is lost by that"), nil
	}},
	{"save_decode_cache", func(c *converter, g *given) (verdict, error) {
		c.inVLLM("lookaside.save_decode", g.boolean(), g)
		return vllm("lookaside.save_decode", ""), nil
	}},
	{"pre_caching_hash_algorithm", func(_ *converter, g *given) (verdict, error) {
		return vllm("--prefix-caching-hash-algo",
			"prefixes are named by vLLM's own block hashes; sha256_cbor is the one that all processes compute alike"), nil
	}},
	{"use_layerwise", lost("a prefix is loaded before its request is scheduled, beside other requests' steps, and not layer by layer within its own")},
	{"min_retrieve_tokens", lost(
		"with lookup.promote: auto, what vLLM computes sooner than it arrives is not waited for")},
	{"priority_limit", lost("requests are stored whatever their priority")},
	{"external_lookup_client", lost("hits are found in the sidecars")},
	{"hit_miss_ratio", lost("hits cannot be made up for experiments")},
	{"lookup_server_worker_ids", lost(whyRanks)},
	{"enable_scheduler_bypass_lookup",
		lost("the scheduler always asks the sidecars, over their lookup sockets")},
	{"py_enable_gc", say(builtIn("no Python runs in the sidecar"))},
	{"use_gpu_connector_v3", say(builtIn("there is one way to copy"))},

	{"internal_api_server_enabled", apiServer},
	{"internal_api_server_host internal_api_server_port_start",
		func(c *converter, _ *given) (verdict, error) {
			if c.config["internal_api_server_enabled"].off() {
				return unused("internal_api_server_enabled is off"), nil
			}
			return became("", "admin.listen"), nil
		}},
	{"internal_api_server_include_index_list", partOf("internal_api_server_enabled",
		"every sidecar has an admin server")},
	{"internal_api_server_socket_path_prefix",
		say(builtIn("the admin server also listens on admin.sock in runtime.dir"))},
	{"script_allowed_imports", lost("the admin server runs no scripts")},
	{"runtime_plugin_locations", lost(whyPlugin)},
	{"remote_config_url app_id", lost("settings come from a file, the environment and flags")},
	{"enable_kv_events", kvEvents},
	{"audit_actual_remote_url", lost("there is no auditing proxy")},

	{"enable_blending", lost(whyBlend)},
	{"blend_recompute_ratios blend_thresholds blend_check_layers blend_min_tokens blend_special_str", partOf("enable_blending", whyBlend)},
	{"enable_p2p", lost(whyP2P)},
	{"p2p_host p2p_init_ports p2p_lookup_ports", partOf("enable_p2p", whyP2P)},
	{"lookup_url distributed_url", lost(whyP2P)},
	{"transfer_channel", lost(
		"KV moves through shared memory on a host, and through redis and s3 tiers between hosts")},
	{"enable_controller", lost(whyFleet)},
	{"controller_pull_url controller_reply_url lmcache_worker_ports lmcache_worker_ids lmcache_worker_heartbeat_time lmcache_worker_heartbeat_delay_time lmcache_instance_id", partOf("enable_controller", whyFleet)},
	{"enable_pd", func(_ *converter, g *given) (verdict, error) {
		if g.off() {
			return unused("it is off"), nil
		}
		return vllm("kv_role", whyPD), nil
	}},
	{"pd_role", func(c *converter, g *given) (verdict, error) {
		if c.config["enable_pd"].off() {
			return unused("enable_pd is off"), nil
		}
		role, ok := map[string]string{"sender": "kv_producer",
			"receiver": "kv_consumer"}[strings.ToLower(strings.TrimSpace(g.text()))]
		if !ok {
			return verdict{}, g.wrong("sender or receiver")
		}
		c.role = role
		return vllm("kv_role", role), nil
	}},
	{"pd_buffer_size pd_buffer_device pd_peer_host pd_peer_init_port pd_peer_alloc_port pd_peer_query_port pd_proxy_host pd_proxy_port", channel},
	{"pd_allocation_timeout_sec pd_shutdown_timeout_sec pd_condition_poll_interval_sec pd_max_prefill_len pd_backend_mode pd_skip_proxy_notification pd_bidirectional", channel},
	{"enable_nixl nixl_enable_gc nixl_receiver_host nixl_receiver_port nixl_peer_port nixl_file_pool_size", lost(whyChannel)},
	{"nixl_backends", lost(whyNIXL)},
	{"nixl_buffer_size nixl_buffer_device", func(c *converter, g *given) (verdict, error) {
		if c.config["enable_pd"].off() && c.extra["enable_nixl_storage"].off() {
			return unused("neither enable_pd nor extra_config.enable_nixl_storage is on"), nil
		}
		return none(whyNIXL), nil
	}},
	{"maru_path", lost(whyMaru)},
	{"maru_pool_size", partOf("maru_path", whyMaru)},
	{"mp_host mp_port", lost("they are for SGLang, and Lookaside is for vLLM")},
	{"enable_chunk_statistics", lost(whyStats)},
	{"chunk_statistics_auto_start_statistics chunk_statistics_auto_exit_timeout_hours chunk_statistics_auto_exit_target_unique_chunks chunk_statistics_strategy", partOf("enable_chunk_statistics", whyStats)},
	{"enable_hidden_state_cache", lost(whyHidden)},
	{"max_hidden_state_cpu_size hidden_state_layers hidden_states_retrieve_mode",
		partOf("enable_hidden_state_cache", whyHidden)},
	{"error_handling", say(builtIn("a load that fails is reported, and vLLM computes it"))},
	{"ec", lost(whyEncoder)},
}

// extraTable has the rules for the keys of extra_config. A key that ends in * matches all keys with
// that prefix.
var extraTable = []struct {
	keys string
	rule rule
}{
	{"dax.device_path", daxDevice},
	{"dax.max_dax_size dax.arena_size_gb", daxSize},
	{"dax.restore_workers dax.restore_max_regions", say(builtIn(whyDAXWorkers))},
	{"dax.retrieve_staging_slab_bytes",
		say(builtIn("nothing is staged: a restore is one copy from the device into the arena"))},
	{"dax.mode", func(c *converter, g *given) (verdict, error) {
		switch {
		case c.extra["dax.device_path"].off():
			return unused("there is no dax.device_path"), nil
		case c.daxPrimary():
			return became("the arena lies on the device, and what it holds is found again after a restart", "arena.kind"), nil
		}
		return builtIn("a dax tier is below the arena"), nil
	}},
	{"enable_nixl_storage", nixlStorage},
	{"nixl_backend nixl_path nixl_backend_params nixl_pool_size", nixlPart},
	{"nixl_use_hugepages", func(c *converter, g *given) (verdict, error) {
		if c.config["nixl_buffer_device"] == nil || c.config["nixl_buffer_device"].text() != "cpu" {
			return unused("nixl_buffer_device is not cpu"), nil
		}
		return hugepages(c, g)
	}},
	{"use_direct_io", func(c *converter, g *given) (verdict, error) {
		if c.extra["enable_nixl_storage"].off() {
			return unused("enable_nixl_storage is off"), nil
		}
		return direct(c, g)
	}},
	{"use_odirect fs_connector_use_odirect", direct},
	{"disk_io_threads", func(c *converter, g *given) (verdict, error) {
		n, err := g.integer(1, 256)
		if err != nil {
			return verdict{}, err
		}
		return c.onTiers(g, "disk", "workers", n), nil
	}},
	{"gpu_to_numa_mapping", func(c *converter, _ *given) (verdict, error) {
		if c.config["numa_mode"] == nil || c.config["numa_mode"].text() != "manual" {
			return unused("numa_mode is not manual"), nil
		}
		return became("", "arena.numa"), nil
	}},
	{"s3_region region", remotePart("s3", "region")},
	{"s3_max_io_concurrency s3_max_inflight_reqs s3_num_io_threads", remotePart("s3", "pool")},
	{"s3_file_prefix", remotePart("s3", "url")},
	{"s3_addressing_style s3_bucket s3_ca_bundle disable_tls", remotePart("s3", "")},
	{"s3_prefer_http2", partOfRemote("s3",
		"HTTP/1.1 is spoken, over as many connections as pool says")},
	{"s3_enable_s3express", partOfRemote("s3", "S3 Express is not spoken")},
	{"s3_part_size", partOfRemote("s3", "a chunk is one object, which is uploaded in one piece")},
	{"aws_access_key_id aws_secret_access_key",
		secretOf("s3", "put it into the environment of the sidecar, as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a credentials_file")},
	{"valkey_mode valkey_username valkey_database", remotePart("redis", "url")},
	{"valkey_num_workers", remotePart("redis", "workers")},
	{"valkey_password redis_password",
		secretOf("redis", "put it into the environment of the sidecar, as "+passwordEnv)},
	{"save_chunk_meta", say(builtIn(whyRecord))},
	{"remote_enable_mla_worker_id_as0 save_only_first_rank create_lookup_server_only_on_worker_0_for_mla first_rank_max_local_cpu_size", say(builtIn(whySame))},
	{"histogram_bucket_*", lost("the buckets of histograms are fixed")},
	{"p2p_socket_recv_timeout_ms p2p_socket_send_timeout_ms p2p_*", partOf("enable_p2p", whyP2P)},
	{"local_hostname metadata_server protocol device_name master_server_address global_segment_size local_buffer_size transfer_timeout storage_root_dir mooncake_*", lost("Mooncake is not a tier: a redis or s3 tier shares between hosts")},
	{"infinistore_* eic_* azure_* gcs_* hf3fs_* hfbucket_* bigtable_* sagemaker_* aerospike_*",
		lost("this store is not a tier: a redis or s3 tier shares between hosts")},
	{"nixl_presence_cache nixl_presence_cache_only nixl_async_put nixl_enable_prog_thread nixl_*",
		partOf("enable_nixl_storage", whyNIXL)},
	{"storage_plugin.dax.module_path storage_plugin.dax.class_name",
		say(builtIn("a tier of kind dax is part of the sidecar"))},
	{"fs_base_path fs_connector_relative_tmp_dir fs_connector_read_ahead_size",
		partOfPlugins("chunks lie in slabs of equal slots, which are written in place: there is no file a chunk")},
	{"remote_storage_plugin.fs.*", remotePluginKey},
	{"storage_plugin.* remote_storage_plugin.* external_backend.* plugin.*", lost(whyPlugin)},
	{"gds_io_threads use_cufile phx_* gds_*", partOf("gds_path", whyGDS)},
	{"rust_raw_block.* raw_block.*",
		lost("a disk tier is made in directories: make a file system on the device")},
	{"maru_*", partOf("maru_path", whyMaru)},
	{"audit_* audit_actual_remote_url", lost("there is no auditing proxy")},
	{"lookup_backoff_time", say(builtIn("the scheduler asks again at its next step"))},
	{"cost_aware_half_life_seconds cost_aware_ewma_alpha",
		partOf("cache_policy", "arena.eviction: adaptive learns by itself, and has nothing to set")},
}

// configRules has the rules of configTable by key.
var configRules = map[string]rule{}

func init() {
	configRules["extra_config"] = say(verdict{}) // the keys in it have rules of their own
	for _, e := range configTable {
		for key := range strings.FieldsSeq(e.keys) {
			configRules[key] = e.rule
		}
	}
}

// environRules has the rules for variables that are not keys of the configuration.
var environRules = map[string]func(*converter, *given) verdict{
	"LMCACHE_CONFIG_FILE": func(*converter,
		*given) verdict {
		return builtIn("the file that was converted")
	},
	"LMCACHE_LOG_LEVEL": func(c *converter, g *given) verdict {
		level, ok := map[string]string{"DEBUG": "debug", "INFO": "info", "WARNING": "warn",
			"WARN": "warn", "ERROR": "error", "CRITICAL": "error"}[strings.ToUpper(g.text())]
		if !ok {
			return none("it is none of debug, info, warn and error")
		}
		c.set("log.level", level, g, "")
		return became("", "log.level")
	},
	"LMCACHE_LOG_FORMAT": func(*converter,
		*given) verdict {
		return none("log.format is console or json")
	},
	"LMCACHE_TRACK_USAGE": func(*converter,
		*given) verdict {
		return builtIn("no use is ever reported")
	},
	"LMCACHE_USAGE_TRACK_INTERVAL": func(*converter,
		*given) verdict {
		return builtIn("no use is ever reported")
	},
	"LMCACHE_USE_EXPERIMENTAL": func(*converter,
		*given) verdict {
		return builtIn("there is one version of everything")
	},
	"LMCACHE_MP_TRANSFER_MODE": func(*converter,
		*given) verdict {
		return builtIn("workers copy from and to the arena, which they map")
	},
	"LMCACHE_COORDINATOR_URL": func(*converter, *given) verdict { return none(whyFleet) },
	"LMCACHE_RESP_HOST":       respVariable, "LMCACHE_RESP_PORT": respVariable,
	"LMCACHE_RESP_USERNAME": respVariable, "LMCACHE_RESP_PASSWORD": respVariable,
	"REDIS_SERVICE_NAME": sentinelVariable,
	"REDIS_TIMEOUT": func(*converter,
		*given) verdict {
		return unused("timeouts are those of the redis tier")
	},
	"PYTHONHASHSEED": func(*converter, *given) verdict {
		return vllm("PYTHONHASHSEED",
			"vLLM's xxhash wants it; with --prefix-caching-hash-algo sha256_cbor it need not be set, but if it is, alike for all that share")
	},
}

func respVariable(c *converter, _ *given) verdict {
	if !slices.ContainsFunc(c.adapters, func(a adapter) bool { return a.kind == "resp" }) {
		return unused("there is no resp adapter")
	}
	return became("", "tiers: redis")
}

func sentinelVariable(c *converter, _ *given) verdict {
	if g := c.config["remote_url"]; g == nil || !strings.HasPrefix(g.text(), "redis-sentinel:") {
		return unused("remote_url names no sentinels")
	}
	return became("", "tiers: redis")
}

// applyConfig converts the keys of the configuration.
func (c *converter) applyConfig() error {
	if len(c.config)+len(c.extra) > 0 && c.config["max_local_cpu_size"] == nil {
		c.set("arena.limit", "5G", nil, "LMCache's own default, as max_local_cpu_size was not set")
	}
	seen := map[*given]bool{}
	apply := func(g *given, r rule) error {
		if seen[g] {
			return nil
		}
		seen[g] = true
		if g.value == nil {
			c.tell(g, unused("it has no value"))
			return nil
		}
		v, err := r(c, g)
		if err == nil {
			c.tell(g, v)
		}
		return err
	}
	// Devices first: they are the nearest tiers.
	for _, e := range extraTable {
		for key := range strings.FieldsSeq(e.keys) {
			if g := c.extra[key]; g != nil && strings.HasPrefix(key, "dax.") {
				if err := apply(g, e.rule); err != nil {
					return err
				}
			}
		}
	}
	for _, e := range configTable {
		for key := range strings.FieldsSeq(e.keys) {
			if g := c.config[key]; g != nil {
				if err := apply(g, e.rule); err != nil {
					return err
				}
			}
		}
	}
	for _, e := range extraTable {
		for pattern := range strings.FieldsSeq(e.keys) {
			for _, key := range slices.Sorted(maps.Keys(c.extra)) {
				if prefix, wild := strings.CutSuffix(pattern, "*"); key == pattern ||
					wild && strings.HasPrefix(key, prefix) {
					if err := apply(c.extra[key], e.rule); err != nil {
						return err
					}
				}
			}
		}
	}
	for _, key := range slices.Sorted(maps.Keys(c.extra)) {
		if g := c.extra[key]; !seen[g] {
			c.tell(g, verdict{Unknown, nil, "LMCache passes it on to whatever asks for it"})
		}
	}
	for _, g := range c.unknown {
		switch {
		case strings.HasPrefix(g.key, "ec_"):
			c.tell(g, none(whyEncoder))
		default:
			c.tell(g, verdict{Unknown, nil, "LMCache 0.3 to 0.5 has no such key"})
		}
	}
	return nil
}

func arenaLimit(c *converter, g *given) (verdict, error) {
	n, err := g.bytes()
	if err != nil {
		return verdict{}, err
	}
	if n <= 0 {
		c.set("arena.limit", "1G", g,
			"vLLM's workers copy from and to the arena, so there always is one")
		return became("there always is an arena: it was given 1G", "arena.limit"), nil
	}
	c.set("arena.limit", size(n), g, "")
	return became("", "arena.limit"), nil
}

// limit returns the arena's limit in bytes.
func (c *converter) limit() int64 {
	n := int64(5 << 30)
	if g := c.config["max_local_cpu_size"]; g != nil {
		n, _ = g.bytes()
	}
	return max(n, 1<<30/16)
}

func chunkSize(c *converter, g *given) (verdict, error) {
	n, err := g.integer(1, 1<<20)
	if err != nil {
		return verdict{}, err
	}
	c.inVLLM("lookaside.chunk_tokens", n, g)
	return vllm("lookaside.chunk_tokens", ""), nil
}

func localCPU(_ *converter, g *given) (verdict, error) {
	if g.boolean() {
		return builtIn("the arena"), nil
	}
	return none("vLLM's workers copy from and to the arena, and what passes through it is found there; it may be small"), nil
}

func (c *converter) lazy() bool {
	safe, _ := c.config["lazy_memory_safe_size"].orZero()
	return !c.config["enable_lazy_memory_allocator"].off() && float64(c.limit()) > safe*(1<<30)
}

func (g *given) orZero() (float64, error) {
	if g == nil {
		return 0, nil
	}
	return g.number()
}

// lazyInitial is a default of LMCache's lazy allocator.
const lazyInitial = 0.2

func lazyAllocator(c *converter, g *given) (verdict, error) {
	if g.off() {
		c.set("arena.initial", size(c.limit()), g, "")
		return became("all of the arena is made at the start", "arena.initial"), nil
	}
	if !c.lazy() {
		return unused("max_local_cpu_size is not above lazy_memory_safe_size"), nil
	}
	c.setInitial(lazyInitial, g)
	return became("", "arena.initial"), nil
}

// setInitial makes arena.initial a part of the arena.
func (c *converter) setInitial(ratio float64, g *given) {
	const page = 2 << 20
	n := int64(math.Ceil(ratio*float64(c.limit())/page)) * page
	c.set("arena.initial", size(min(max(n, page), c.limit())), g, "")
}

func lazyRatio(c *converter, g *given) (verdict, error) {
	f, err := g.number()
	switch {
	case err != nil:
		return verdict{}, err
	case f < 0 || f > 1:
		return verdict{}, g.wrong("from 0 to 1")
	case !c.lazy():
		return unused("the lazy allocator is off"), nil
	}
	c.setInitial(f, g)
	return became("", "arena.initial"), nil
}

func lazySafeSize(c *converter, g *given) (verdict, error) {
	if _, err := g.number(); err != nil {
		return verdict{}, err
	}
	if c.config["enable_lazy_memory_allocator"].off() {
		return unused("the lazy allocator is off"), nil
	}
	return became("it decided whether the arena grows", "arena.initial"), nil
}

func hugepages(c *converter, g *given) (verdict, error) {
	if !g.boolean() {
		return builtIn("arena.kind: auto takes huge pages where the host gives them, and does without where not"), nil
	}
	c.set("arena.kind", "hugetlb", g, "")
	return became("", "arena.kind"), nil
}

func numaMode(c *converter, g *given) (verdict, error) {
	switch strings.ToLower(g.text()) {
	case "", "none", "null":
		return unused("it is off"), nil
	case "auto":
		c.set("arena.numa", "auto", g, "")
		return became("", "arena.numa"), nil
	case "manual":
	default:
		return verdict{}, g.wrong("auto or manual")
	}
	nodes := map[string]string{}
	if m := c.extra["gpu_to_numa_mapping"]; m != nil {
		switch m := m.value.(type) {
		case map[string]any:
			for gpu, node := range m {
				nodes[gpu] = (&given{value: node}).text()
			}
		case map[any]any:
			for gpu, node := range m {
				nodes[fmt.Sprint(gpu)] = (&given{value: node}).text()
			}
		}
	}
	distinct := slices.Compact(slices.Sorted(maps.Values(nodes)))
	for _, node := range distinct {
		if n, err := strconv.Atoi(node); err != nil || n < 0 {
			return verdict{}, fmt.Errorf(
				"extra_config.gpu_to_numa_mapping: %q is not a node's number", node)
		}
	}
	switch len(distinct) {
	case 0:
		return none("extra_config.gpu_to_numa_mapping does not say which node"), nil
	case 1:
		n, _ := strconv.Atoi(distinct[0])
		c.set("arena.numa", n, g, "")
		return became("", "arena.numa"), nil
	}
	var each []string
	for _, gpu := range slices.Sorted(maps.Keys(nodes)) {
		each = append(each, fmt.Sprintf("GPU %s: %s", gpu, nodes[gpu]))
	}
	c.set("arena.numa", "auto", g, "each rank's sidecar may set its own node instead: "+
		strings.Join(each, ", "))
	return became("auto is the node of the CPUs that a sidecar may run on: bind it, or set the node of its GPU", "arena.numa"), nil
}

// policies maps LMCache's policies to ours that decide most similarly.
var policies = map[string]struct{ name, why string }{
	"lru":         {"lru", ""},
	"lfu":         {"wtinylfu", "frequency decides, of the recent past"},
	"fifo":        {"s3fifo", "first in, first out, but what is used again stays"},
	"arc":         {"arc", ""},
	"s3fifo":      {"s3fifo", ""},
	"s3_fifo":     {"s3fifo", ""},
	"cost_aware":  {"adaptive", "what keeping a chunk earns for the room it takes is learnt"},
	"isolatedlru": {"lru", "there are no quotas by cache_salt"},
	"user_lru":    {"lru", "there are no quotas by user"},
}

func cachePolicy(c *converter, g *given) (verdict, error) {
	p, ok := policies[strings.ToLower(g.text())]
	if !ok {
		return none("arena.eviction is left at its default, adaptive"), nil
	}
	c.set("arena.eviction", p.name, g, "")
	c.eviction = p.name
	return became(p.why, "arena.eviction"), nil
}

func localDisk(c *converter, g *given) (verdict, error) {
	if g.off() {
		return unused("it is off"), nil
	}
	s := c.config["max_local_disk_size"]
	n := int64(0)
	if s != nil {
		var err error
		if n, err = s.bytes(); err != nil {
			return verdict{}, err
		}
	}
	if n <= 0 {
		return unused("max_local_disk_size is 0: LMCache keeps nothing there"), nil
	}
	if _, err := c.diskTier(g, g.list(), n, s); err != nil {
		return verdict{}, err
	}
	return became("", "tiers: disk"), nil
}

func diskSize(c *converter, g *given) (verdict, error) {
	if _, err := g.bytes(); err != nil {
		return verdict{}, err
	}
	if c.config["local_disk"].off() {
		return unused("local_disk is off"), nil
	}
	if n, _ := g.bytes(); n <= 0 {
		return unused("LMCache keeps nothing on its disk"), nil
	}
	return became("", "tiers: disk"), nil
}

// diskTier adds a disk tier. capacity 0: LMCache had no limit.
func (c *converter) diskTier(g *given, paths []string, capacity int64, from *given) (*tier, error) {
	var out []string
	for _, p := range paths {
		dir, err := c.absolute(g, p)
		if err != nil {
			return nil, err
		}
		if !slices.Contains(out, dir) {
			out = append(out, dir)
		}
	}
	if len(out) == 0 {
		return nil, g.wrong("a directory")
	}
	t := c.addTier("disk", g)
	t.set("paths", out, g.origin())
	if capacity > 0 {
		t.set("capacity", size(capacity), from.origin())
	} else {
		n := c.src.DiskCapacityBytes
		if n == 0 {
			n = 64 << 30
		}
		t.set("capacity", size(n), "")
		t.note("LMCache set no limit. The capacity is taken at the start: make it what these directories can give")
	}
	if c.eviction != "" {
		t.set("eviction", c.eviction, c.config["cache_policy"].origin())
	}
	t.note("one sidecar at a time uses a directory: with several ranks give each one its own. What LMCache left there is not read")
	return t, nil
}

func gdsPath(c *converter, g *given) (verdict, error) {
	if g.off() {
		return unused("it is off"), nil
	}
	if _, err := c.diskTier(g, g.list(), 0, nil); err != nil {
		return verdict{}, err
	}
	return became("by way of the arena: "+whyGDS, "tiers: disk"), nil
}

func blockingTimeout(c *converter, g *given) (verdict, error) {
	n, err := g.number()
	if err != nil {
		return verdict{}, err
	}
	if n < 0.001 || n > 86400 {
		return verdict{}, g.wrong("a number of seconds")
	}
	v := c.onTiers(g, "redis", "load_timeout", duration(n))
	if w := c.onTiers(g, "s3", "load_timeout", duration(n)); v.outcome == Unused {
		v = w
	}
	return v, nil
}

// duration returns seconds as text.
func duration(seconds float64) string {
	d := time.Duration(seconds * float64(time.Second)).Round(time.Millisecond)
	if d%time.Second == 0 && d < 2*time.Minute {
		return strconv.Itoa(int(d/time.Second)) + "s"
	}
	return d.String()
}

// onTiers sets a key of all tiers of a kind.
func (c *converter) onTiers(g *given, kind, key string, value any) verdict {
	v := unused("there is no " + kind + " tier")
	for _, t := range c.tiers {
		if t.kind == kind {
			t.set(key, value, g.origin())
			v = became("", "tiers: "+kind+": "+key)
		}
	}
	return v
}

func direct(c *converter, g *given) (verdict, error) {
	if g.boolean() {
		if !slices.ContainsFunc(c.tiers, func(t *tier) bool { return t.kind == "disk" }) {
			return unused("there is no disk tier"), nil
		}
		return builtIn("O_DIRECT is used where the file system allows it"), nil
	}
	return c.onTiers(g, "disk", "direct", "never"), nil
}

func lookupTimeout(c *converter, g *given) (verdict, error) {
	ms, err := g.integer(1, 86400000)
	if err != nil {
		return verdict{}, err
	}
	c.set("lookup.deadline", duration(float64(ms)/1000), g, "")
	c.inVLLM("lookaside.promotion_timeout_ms", ms, g)
	return became("", "lookup.deadline", "lookaside.promotion_timeout_ms (vLLM)"), nil
}

func pinTimeout(c *converter, g *given) (verdict, error) {
	s, err := g.number()
	if err != nil {
		return verdict{}, err
	}
	if s < 0.001 || s > 86400 {
		return verdict{}, g.wrong("a number of seconds")
	}
	c.set("lookup.lease", duration(s), g, "")
	return became("it runs until a worker begins to load; from then on the lease lasts as long as the worker", "lookup.lease"), nil
}

// channel is the rule for keys that configure LMCache's transfer from prefiller to decoder.
func channel(c *converter, _ *given) (verdict, error) {
	if c.config["enable_pd"].off() {
		return unused("enable_pd is off"), nil
	}
	return builtIn(whyChannel), nil
}

func kvEvents(_ *converter, g *given) (verdict, error) {
	if g.off() {
		return unused("it is off"), nil
	}
	return vllm("--kv-events-config",
		`with "enable_kv_cache_events": true there, vLLM publishes what the sidecars hold, too; a sidecar publishes by itself with events.endpoint`), nil
}

func apiServer(c *converter, g *given) (verdict, error) {
	if g.off() {
		return unused("it is off; the sidecar's admin server listens on a free port of the loopback"), nil
	}
	host, port := "127.0.0.1", 6999
	why := "rank 0's; the next ranks' sidecars want the next ports"
	if h := c.config["internal_api_server_host"]; h != nil && h.value != nil {
		host = h.text()
	} else {
		why += ". LMCache's default was every address of the host: this is the loopback"
	}
	if p := c.config["internal_api_server_port_start"]; p != nil && p.value != nil {
		var err error
		if port, err = p.integer(1, 65000); err != nil {
			return verdict{}, err
		}
	}
	c.set("admin.listen", net.JoinHostPort(host, strconv.Itoa(port+1)), g, why)
	return became(why, "admin.listen"), nil
}

// size returns an exact number of bytes as text.
func size(n int64) string {
	for i, unit := range []string{"T", "G", "M", "K"} {
		if one := int64(1) << (40 - 10*i); n >= one && n%one == 0 {
			return strconv.FormatInt(n/one, 10) + unit
		}
	}
	return strconv.FormatInt(n, 10)
}
