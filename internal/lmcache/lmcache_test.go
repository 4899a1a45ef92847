package lmcache_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"lookaside/internal/lmcache"
	"lookaside/sidecar/settings"
	"lookaside/tiers/remote"
)

var update = flag.Bool("update", false, "rewrite testdata/*.yaml")

// source is a Source with places for relative paths.
func source(text string) lmcache.Source {
	return lmcache.Source{Text: []byte(text), Dir: "/srv", Home: "/home/u"}
}

// converted converts, and loads what came out as a sidecar does.
func converted(t *testing.T, src lmcache.Source) (*lmcache.Result, settings.Config) {
	t.Helper()
	r, err := lmcache.Convert(src)
	if err != nil {
		t.Fatal(err)
	}
	c, err := settings.Parse("converted", []byte(r.YAML), nil)
	if err != nil {
		t.Fatalf("%v:\n%s", err, r.YAML)
	}
	return r, c
}

// key is what became of a key, which must be there once.
func key(t *testing.T, r *lmcache.Result, name string) lmcache.Key {
	t.Helper()
	var found []lmcache.Key
	for _, k := range r.Keys {
		if k.Key == name {
			found = append(found, k)
		}
	}
	if len(found) != 1 {
		t.Fatalf("%q is there %d times: %+v", name, len(found), r.Keys)
	}
	return found[0]
}

// Whole configurations, as the examples of LMCache's documentation are, with what they become.
func TestExamples(t *testing.T) {
	inputs, err := filepath.Glob("testdata/*.lmcache")
	if err != nil || len(inputs) == 0 {
		t.Fatal(err, inputs)
	}
	for _, in := range inputs {
		t.Run(filepath.Base(in), func(t *testing.T) {
			b, err := os.ReadFile(in)
			if err != nil {
				t.Fatal(err)
			}
			src := source("")
			// What stands before a line of dashes is the environment; after a second one come
			// adapters, and after a third the server's flags.
			parts := strings.Split(string(b), "\n-----\n")
			src.Text = []byte(parts[0])
			if len(parts) > 1 {
				src.Environ = strings.Fields(parts[1])
			}
			if len(parts) > 2 {
				src.Adapters = slices.DeleteFunc(strings.Split(parts[2], "\n"),
					func(s string) bool { return strings.TrimSpace(s) == "" })
			}
			if len(parts) > 3 {
				src.Server = strings.Fields(parts[3])
			}
			r, _ := converted(t, src)
			out := strings.TrimSuffix(in, ".lmcache") + ".yaml"
			if *update {
				if err := os.WriteFile(out, []byte(r.YAML), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(out)
			if err != nil || string(want) != r.YAML {
				t.Errorf("%v: the result differs from %s (go test ./internal/lmcache -run Examples -update):\n%s", err, out, r.YAML)
			}
		})
	}
}

func TestArena(t *testing.T) {
	for _, tc := range []struct {
		text string
		want func(settings.ArenaConfig) bool
	}{
		{"chunk_size: 256", func(a settings.ArenaConfig) bool { return a.Limit == 5<<30 }},
		{"max_local_cpu_size: 0.1",
			func(a settings.ArenaConfig) bool { return a.Limit == 107374182 }},
		{"max_local_cpu_size: 20", func(a settings.ArenaConfig) bool {
			return a.Limit == 20<<30 &&
				a.Initial == 1<<30
		}},
		{"max_local_cpu_size: 0", func(a settings.ArenaConfig) bool { return a.Limit == 1<<30 }},
		{"max_local_cpu_size: 20\nenable_lazy_memory_allocator: false",
			func(a settings.ArenaConfig) bool { return a.Initial == 20<<30 }},
		{"max_local_cpu_size: 20\nenable_lazy_memory_allocator: true",
			func(a settings.ArenaConfig) bool { return a.Initial == 4<<30 }},
		{"max_local_cpu_size: 20\nenable_lazy_memory_allocator: true\nlazy_memory_initial_ratio: 0.5\nlazy_memory_step_ratio: 0.25\nlazy_memory_expand_trigger_ratio: 0.9", func(a settings.ArenaConfig) bool {
			return a.Initial == 10<<30
		}},
		{"max_local_cpu_size: 20\nenable_lazy_memory_allocator: true\nlazy_memory_initial_ratio: 0\nlazy_memory_step_ratio: 0\nlazy_memory_expand_trigger_ratio: 0", func(a settings.ArenaConfig) bool {
			return a.Initial == 2<<20
		}},
		{"max_local_cpu_size: 20\nenable_lazy_memory_allocator: true\nlazy_memory_safe_size: 30",
			func(a settings.ArenaConfig) bool { return a.Initial == 1<<30 }},
		{"local_cpu_use_hugepages: true",
			func(a settings.ArenaConfig) bool { return a.Kind == "hugetlb" }},
		{"local_cpu_use_hugepages: false",
			func(a settings.ArenaConfig) bool { return a.Kind == "auto" }},
		{"nixl_buffer_device: cpu\nextra_config: {nixl_use_hugepages: true}",
			func(a settings.ArenaConfig) bool { return a.Kind == "hugetlb" }},
		{"numa_mode: auto", func(a settings.ArenaConfig) bool { return a.NUMA == "auto" }},
		{"numa_mode: manual\nextra_config: {gpu_to_numa_mapping: {0: 1, 1: 1}}",
			func(a settings.ArenaConfig) bool { return a.NUMA == "1" }},
		{"numa_mode: manual\nextra_config: {gpu_to_numa_mapping: {0: 0, 1: 1}}",
			func(a settings.ArenaConfig) bool { return a.NUMA == "auto" }},
		{"numa_mode: manual", func(a settings.ArenaConfig) bool { return a.NUMA == "none" }},
		{"cache_policy: LRU", func(a settings.ArenaConfig) bool { return a.Eviction == "lru" }},
		{"cache_policy: lfu", func(a settings.ArenaConfig) bool {
			return a.Eviction ==
				"wtinylfu"
		}},
		{"cache_policy: FIFO", func(a settings.ArenaConfig) bool { return a.Eviction == "s3fifo" }},
		{"cache_policy: MRU", func(a settings.ArenaConfig) bool {
			return a.Eviction ==
				"adaptive"
		}},
		{"cache_policy: COST_AWARE",
			func(a settings.ArenaConfig) bool { return a.Eviction == "adaptive" }},
	} {
		r, c := converted(t, source(tc.text))
		if !tc.want(c.Arena) {
			t.Errorf("%s: %+v\n%s", tc.text, c.Arena, r.YAML)
		}
	}
}

func TestOtherSettings(t *testing.T) {
	r, c := converted(t, source(`
lookup_timeout_ms: 1500
pin_timeout_sec: 300
chunk_size: 512
save_decode_cache: false
internal_api_server_enabled: true
internal_api_server_host: 127.0.0.1
internal_api_server_port_start: 7100
`))
	if c.Lookup.Deadline != 1500*time.Millisecond || c.Lookup.Lease != 5*time.Minute ||
		c.Admin.Listen != "127.0.0.1:7101" {
		t.Errorf("%+v, %+v", c.Lookup, c.Admin)
	}
	want := map[string]any{"lookaside.chunk_tokens": 512, "lookaside.save_decode": false,
		"lookaside.promotion_timeout_ms": 1500}
	if fmt.Sprint(r.Connector) != fmt.Sprint(want) {
		t.Errorf("for vLLM: %v, want %v", r.Connector, want)
	}
	// LMCache's default for the host would open the admin server to everybody.
	_, c = converted(t, source("internal_api_server_enabled: true"))
	if c.Admin.Listen != "127.0.0.1:7000" {
		t.Errorf("%+v", c.Admin)
	}
}

func TestDisks(t *testing.T) {
	for _, tc := range []struct {
		name, text string
		adapters   []string
		paths      string
		capacity   int64
		more       func(settings.TierConfig) bool
	}{
		{"local disk", "local_disk: 'file:///mnt/kv/'\nmax_local_disk_size: 5.5", nil, "/mnt/kv",
			11 << 29, nil},
		{"a plain path", "local_disk: /mnt/kv\nmax_local_disk_size: 5", nil, "/mnt/kv", 5 << 30,
			nil},
		{"a home", "local_disk: 'file://~/kv/'\nmax_local_disk_size: 5", nil, "/home/u/kv", 5 << 30,
			nil},
		{"a relative path", "local_disk: local/kv\nmax_local_disk_size: 5", nil, "/srv/local/kv",
			5 << 30, nil},
		{"several", "local_disk: 'file:///a/,file:///b/'\nmax_local_disk_size: 5", nil, "/a,/b",
			5 << 30, nil},
		{"a list", "local_disk: [/a, /b]\nmax_local_disk_size: 5", nil, "/a,/b", 5 << 30, nil},
		{"page cache", "local_disk: /a\nmax_local_disk_size: 5\nextra_config: {use_odirect: false, disk_io_threads: 7}\ncache_policy: LRU", nil, "/a", 5 << 30, func(c settings.TierConfig) bool {
			return c.Disk.Direct == "never" && c.Workers == 7 && c.Disk.Eviction == "lru"
		}},
		{"O_DIRECT", "local_disk: /a\nmax_local_disk_size: 5\nextra_config: {'use_odirect': True}",
			nil, "/a", 5 << 30, func(c settings.TierConfig) bool {
				return c.Disk.Direct ==
					"auto"
			}},
		{"GDS", "gds_path: /mnt/gds\ncufile_buffer_size: 128", nil, "/mnt/gds", 64 << 30, nil},
		{"fs URL", "remote_url: 'fs://localhost:0/mnt/kv'", nil, "/mnt/kv", 64 << 30, nil},
		{"fs plugin", "remote_storage_plugins: [fs.a]\nextra_config: {remote_storage_plugin.fs.a.base_path: '/x,/y'}", nil, "/x,/y", 64 << 30, nil},
		{"NIXL", "nixl_buffer_device: cpu\nextra_config: {enable_nixl_storage: true, nixl_backend: POSIX, nixl_path: /mnt/nixl/, nixl_pool_size: 64}", nil, "/mnt/nixl", 64 << 30, nil},
		{"fs adapter", "", []string{`{"type": "fs", "base_path": "/a", "use_odirect": false, "checksum": "crc32", "eviction": {"eviction_policy": "LRU"}}`}, "/a", 64 << 30, func(c settings.TierConfig) bool {
			return c.Disk.Direct == "never" && c.Disk.Eviction == "lru"
		}},
		{"native fs adapter", "",
			[]string{`{"type": "fs_native", "base_path": "/a", "num_workers": 32, "max_capacity_gb": 10, "use_odirect": true}`}, "/a", 10 << 30, func(c settings.TierConfig) bool {
				return c.Disk.Direct == "auto" && c.Workers == 32
			}},
		{"NIXL adapter", "", []string{`{"type": "nixl_store_dynamic", "backend": "GDS", "backend_params": {"file_path": "/a", "use_direct_io": "true", "max_capacity_gb": "50"}}`}, "/a", 50 << 30, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			src := source(tc.text)
			src.Adapters = tc.adapters
			r, c := converted(t, src)
			if len(c.Tiers) != 1 || c.Tiers[0].Kind != "disk" ||
				strings.Join(c.Tiers[0].Disk.Paths, ",") != tc.paths ||
				c.Tiers[0].Disk.Capacity != tc.capacity {
				t.Fatalf("%+v\n%s", c.Tiers, r.YAML)
			}
			if tc.more != nil && !tc.more(c.Tiers[0]) {
				t.Errorf("%+v\n%s", c.Tiers[0], r.YAML)
			}
			if m := slices.DeleteFunc(r.Missing(), func(k lmcache.Key) bool {
				return strings.Contains(k.Key, "pool_size") || strings.Contains(k.Key, "gds") ||
					strings.Contains(k.Key, "cufile") || strings.Contains(k.Key, "nixl")
			}); len(m) > 0 {
				t.Errorf("%+v", m)
			}
		})
	}
	r, c := converted(t, source("local_disk: /a\n"))
	if len(c.Tiers) != 0 || key(t, r, "local_disk").Outcome != lmcache.Unused {
		t.Errorf("a disk of no size: %+v, %+v", c.Tiers, r.Keys)
	}
	src := source("gds_path: /mnt/gds")
	src.DiskCapacityBytes = 3 << 30
	if _, c := converted(t, src); c.Tiers[0].Disk.Capacity != 3<<30 {
		t.Errorf("%+v", c.Tiers)
	}
}

func TestRedis(t *testing.T) {
	for _, tc := range []struct {
		text     string
		environ  []string
		adapters []string
		// Addrs, Mode, Master, DB, User, TLS, Password, Prefix, TTL, Serde
		want remote.RedisOptions
	}{
		{"remote_url: redis://h:6380", nil, nil, remote.RedisOptions{Addrs: []string{"h:6380"}}},
		{"remote_url: redis://u:hunter2@h/3", nil, nil,
			remote.RedisOptions{Addrs: []string{"h:6379"}, User: "u", DB: 3,
				Password: remote.Secret{Env: "REDIS_PASSWORD"}}},
		{"remote_url: 'redis://h?db=4&password=hunter2&ssl_cert_reqs=none'", nil, nil,
			remote.RedisOptions{Addrs: []string{"h:6379"}, DB: 4,
				Password: remote.Secret{Env: "REDIS_PASSWORD"}}},
		{"remote_url: rediss://h", nil, nil, remote.RedisOptions{Addrs: []string{"h:6379"},
			TLS: true}},
		{"remote_url: 'unix:///run/redis.sock?db=2'", nil, nil,
			remote.RedisOptions{Addrs: []string{"/run/redis.sock"}, DB: 2}},
		{"remote_url: 'redis-sentinel://a:1,b:2'", nil, nil,
			remote.RedisOptions{Mode: remote.RedisSentinel, Master: "redismaster",
				Addrs: []string{"a:1", "b:2"}}},
		{"remote_url: 'redis-sentinel://u:hunter2@a:1,b:2'",
			[]string{"REDIS_SERVICE_NAME=mymaster"}, nil, remote.RedisOptions{
				Mode: remote.RedisSentinel, Master: "mymaster", Addrs: []string{"a:1", "b:2"},
				User: "u", Password: remote.Secret{Env: "REDIS_PASSWORD"}}},
		{"remote_url: 'redis-cluster://a:1,b:2'\nremote_serde: naive", nil, nil,
			remote.RedisOptions{Mode: remote.RedisCluster, Addrs: []string{"a:1", "b:2"},
				Serde: "raw"}},
		{"remote_url: 'valkey://h:1'\nextra_config: {valkey_username: u, valkey_password: hunter2, valkey_database: 5}\nremote_serde: cachegen", nil, nil, remote.RedisOptions{
			Addrs: []string{"h:1"}, User: "u", DB: 5,
			Password: remote.Secret{Env: "REDIS_PASSWORD"}, Serde: "lossless"}},
		{"remote_url: 'cache.internal:6380'\nextra_config: {valkey_username: u, valkey_num_workers: 32}", nil, nil, remote.RedisOptions{Addrs: []string{"cache.internal:6380"}, User: "u"}},
		{"remote_url: 'a-1.b:7000, a-2.b:7001,[::1]:7002'\nextra_config: {valkey_mode: cluster}",
			nil, nil, remote.RedisOptions{Mode: remote.RedisCluster, Addrs: []string{"a-1.b:7000",
				"a-2.b:7001", "[::1]:7002"}}},
		{"remote_url: valkey-sync://h:1", nil, nil, remote.RedisOptions{Addrs: []string{"h:1"}}},
		{"remote_url: 'valkey://a:1, valkey://b:2'\nextra_config: {valkey_mode: cluster}", nil, nil,
			remote.RedisOptions{Mode: remote.RedisCluster, Addrs: []string{"a:1", "b:2"}}},
		{"", nil, []string{`{"type": "resp", "host": "h", "port": 6380, "username": "u", "password": "hunter2", "num_workers": 16}`}, remote.RedisOptions{
			Addrs: []string{"h:6380"}, User: "u",
			Password: remote.Secret{Env: "LMCACHE_RESP_PASSWORD"}}},
		{"", []string{"LMCACHE_RESP_HOST=h", "LMCACHE_RESP_PORT=7", "LMCACHE_RESP_USERNAME=u",
			"LMCACHE_RESP_PASSWORD=hunter2"}, []string{`{"type": "resp"}`}, remote.RedisOptions{
			Addrs: []string{"h:7"}, User: "u",
			Password: remote.Secret{Env: "LMCACHE_RESP_PASSWORD"}}},
		{"", nil, []string{`{"type": "valkey", "startup_nodes": "a:1,b:2", "cluster_mode": true, "tls_enable": true, "key_prefix": "kv", "ttl_seconds": 3600, "serde": {"type": "fp8"}}`}, remote.RedisOptions{
			Mode: remote.RedisCluster, TLS: true, Addrs: []string{"a:1", "b:2"}, Prefix: "kv",
			TTL: time.Hour, Serde: "fp8"}},
		{"", nil, []string{`{"type": "valkey", "startup_nodes": "a:1,b:2", "database_id": 3, "request_timeout": 7, "connection_timeout": 1.5}`}, remote.RedisOptions{Addrs: []string{"a:1"}, DB: 3, DialTimeout: 1500 * time.Millisecond}},
	} {
		src := source(tc.text)
		src.Environ, src.Adapters = tc.environ, tc.adapters
		r, c := converted(t, src)
		if len(c.Tiers) != 1 || c.Tiers[0].Kind != "redis" {
			t.Errorf("%s%v: %+v\n%s", tc.text, tc.adapters, c.Tiers, r.YAML)
			continue
		}
		got := c.Tiers[0].Redis
		same := got.Mode == tc.want.Mode && slices.Equal(got.Addrs, tc.want.Addrs) &&
			got.Master == tc.want.Master && got.DB == tc.want.DB && got.User == tc.want.User &&
			got.TLS == tc.want.TLS &&
			got.Password == tc.want.Password && got.TTL == tc.want.TTL && (tc.want.Serde == "" ||
			got.Serde == tc.want.Serde) && (tc.want.Prefix == "" || got.Prefix == tc.want.Prefix) &&
			(tc.want.DialTimeout == 0 || got.DialTimeout == tc.want.DialTimeout)
		if !same {
			t.Errorf("%s%v: %+v\n%s", tc.text, tc.adapters, got, r.YAML)
		}
		noSecret(t, r, "hunter2")
	}
	_, c := converted(t, source("remote_url: redis://h\nblocking_timeout_secs: 100"))
	if c.Tiers[0].LoadTimeout != 100*time.Second {
		t.Errorf("%+v", c.Tiers)
	}
}

func noSecret(t *testing.T, r *lmcache.Result, secret string) {
	t.Helper()
	var table bytes.Buffer
	if err := r.WriteTable(&table); err != nil {
		t.Fatal(err)
	}
	j, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	for what, text := range map[string]string{"YAML": r.YAML, "table": table.String(),
		"JSON": string(j)} {
		if strings.Contains(text, secret) {
			t.Errorf("the %s has a secret in it:\n%s", what, text)
		}
	}
}

func TestS3(t *testing.T) {
	for _, tc := range []struct {
		text     string
		adapters []string
		want     remote.S3Options
	}{
		{"remote_url: s3://kv-cache\nextra_config: {s3_region: eu-1, s3_max_io_concurrency: 64, s3_max_inflight_reqs: 48, s3_file_prefix: a/b/}", nil,
			remote.S3Options{Bucket: "kv-cache", Prefix: "a/b", Region: "eu-1", Pool: 48,
				Endpoint: "https://s3.amazonaws.com"}},
		{"remote_url: s3://test-127.cwlota.com\nextra_config: {s3_prefer_http2: false, save_chunk_meta: false}", nil,
			remote.S3Options{Bucket: "test-127", Endpoint: "https://cwlota.com",
				VirtualHost: true}},
		{"remote_url: s3://kv-cache.s3.eu-1.amazonaws.com", nil,
			remote.S3Options{Bucket: "kv-cache", Endpoint: "https://s3.amazonaws.com"}},
		{"", []string{`{"type": "s3", "s3_endpoint": "s3://kv-cache", "s3_region": "us-west-2", "s3_num_io_threads": 2000, "aws_access_key_id": "hunter2", "aws_secret_access_key": "hunter2"}`},
			remote.S3Options{Bucket: "kv-cache", Region: "us-west-2", Pool: 1024,
				Endpoint: "https://s3.amazonaws.com"}},
		{"", []string{`{"type": "s3", "s3_endpoint": "s3.internal:8111", "s3_region": "x", "s3_addressing_style": "path", "s3_bucket": "kv-cache", "s3_ca_bundle": "/ca.pem"}`},
			remote.S3Options{Bucket: "kv-cache", Region: "x", Endpoint: "https://s3.internal:8111",
				Files: remote.TLSFiles{CA: "/ca.pem"}}},
		{"", []string{`{"type": "s3", "s3_endpoint": "kv-cache.minio.local:9000", "s3_region": "x", "disable_tls": true, "serde": {"type": "fp8"}}`},
			remote.S3Options{Bucket: "kv-cache", Region: "x", Endpoint: "http://minio.local:9000",
				VirtualHost: true, Serde: "fp8"}},
		{"extra_config: {enable_nixl_storage: true, nixl_backend: OBJ, nixl_backend_params: {access_key: hunter2, secret_key: hunter2, bucket: kv-cache, region: x, endpoint_override: 'https://o.example'}}", nil,
			remote.S3Options{Bucket: "kv-cache", Region: "x", Endpoint: "https://o.example"}},
	} {
		src := source(tc.text)
		src.Adapters = tc.adapters
		r, c := converted(t, src)
		if len(c.Tiers) != 1 || c.Tiers[0].Kind != "s3" {
			t.Errorf("%s%v: %+v\n%s", tc.text, tc.adapters, c.Tiers, r.YAML)
			continue
		}
		got := c.Tiers[0].S3
		if got.Bucket != tc.want.Bucket || got.Prefix != tc.want.Prefix ||
			got.Region != tc.want.Region || got.Endpoint != tc.want.Endpoint ||
			got.VirtualHost != tc.want.VirtualHost ||
			got.Files != tc.want.Files || tc.want.Pool != 0 && got.Pool != tc.want.Pool ||
			tc.want.Serde != "" && got.Serde != tc.want.Serde {
			t.Errorf("%s%v: %+v\n%s", tc.text, tc.adapters, got, r.YAML)
		}
		noSecret(t, r, "hunter2")
	}
}

func TestDAX(t *testing.T) {
	type want struct {
		devices        string
		hotplug, files bool
		eviction       string
		keys           int // that became the tier
	}
	for _, tc := range []struct {
		name, text, adapter string
		want                want
	}{
		{"plugin", "storage_plugins: [dax]\ncache_policy: LRU\nextra_config:\n  storage_plugin.dax.module_path: lmcache.v1.storage_backend.plugins.dax_backend\n  storage_plugin.dax.class_name: DaxBackend\n" +
			"  dax.device_path: /dev/dax1.0\n  dax.max_dax_size: 100\n  dax.restore_workers: 16\n  dax.restore_max_regions: 12\n  dax.retrieve_staging_slab_bytes: 268435456\n", "",
			want{"/dev/dax1.0 107374182400", false, false, "lru", 3}},
		{"one device", "", `{"type": "dax", "device_path": "/dev/dax1.0", "max_dax_size_gb": 100, "slot_bytes": 268435456, "num_store_workers": 1, "num_lookup_workers": 2, "num_load_workers": 4, "persist_enabled": true,
			"eviction": {"eviction_policy": "LRU", "trigger_watermark": 0.9, "eviction_ratio": 0.1}}`,
			want{"/dev/dax1.0 107374182400", false, false, "lru", 4}},
		{"two devices", "", `{"type": "dax", "devices": [{"device_path": "/dev/dax0.0", "max_dax_size_gb": 1.5}, {"device_path": "/dev/dax0.1", "max_dax_size_gb": 2}], "slot_bytes": 1, "hotplug_enabled": true}`,
			want{"/dev/dax0.0 1610612736,/dev/dax0.1 2147483648", true, false,
				"adaptive", 3}},
		{"none yet", "", `{"type": "dax", "devices": [], "slot_bytes": 1, "hotplug_enabled": true}`,
			want{"", true, false, "adaptive", 3}},
		{"a file", "", `{"type": "dax", "device_path": "/mnt/kv.img", "max_dax_size_gb": 1, "slot_bytes": 1}`, want{"/mnt/kv.img 1073741824", false, true, "adaptive", 3}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			src := source(tc.text)
			if tc.adapter != "" {
				src.Adapters = []string{tc.adapter}
			}
			r, c := converted(t, src)
			if len(c.Tiers) != 1 || c.Tiers[0].Kind != "dax" {
				t.Fatalf("%+v\n%s", c.Tiers, r.YAML)
			}
			d := c.Tiers[0].DAX
			var devices []string
			for _, dev := range d.Devices {
				devices = append(devices, fmt.Sprintf("%s %d", dev.Path, dev.Size))
			}
			got := want{strings.Join(devices, ","), d.HotPlug, d.AllowFiles, d.Eviction, 0}
			for _, k := range r.Keys {
				if len(k.To) > 0 && strings.HasPrefix(k.To[0], "tiers: dax") {
					got.keys++
				}
			}
			if got != tc.want {
				t.Errorf("%+v, want %+v\n%s", got, tc.want, r.YAML)
			}
			if m := r.Missing(); len(m) > 0 {
				t.Errorf("without an equivalent: %+v", m)
			}
		})
	}
}

// Tiers are in LMCache's order, but that devices, which are memory, come before disks.
func TestOrderOfTiers(t *testing.T) {
	_, c := converted(t, source("remote_url: redis://h\nlocal_disk: /a\nmax_local_disk_size: 1"))
	if len(c.Tiers) != 2 || c.Tiers[0].Kind != "disk" || c.Tiers[1].Kind != "redis" {
		t.Errorf("%+v", c.Tiers)
	}
	src := source("")
	src.Adapters = []string{`{"type": "s3", "s3_endpoint": "s3://kv1", "s3_region": "x"}`,
		`{"type": "fs", "base_path": "/a"}`}
	_, c = converted(t, src)
	if len(c.Tiers) != 2 || c.Tiers[0].Kind != "s3" || c.Tiers[1].Kind != "disk" {
		t.Errorf("%+v", c.Tiers)
	}
}

func TestEnvironmentOverridesTheFile(t *testing.T) {
	src := source("max_local_cpu_size: 10\nlocal_disk: /a\nmax_local_disk_size: 7\nextra_config: {disk_io_threads: 3, use_odirect: false}")
	src.Environ = []string{
		"LMCACHE_MAX_LOCAL_CPU_SIZE=20", "LMCACHE_LOCAL_DISK='file:///b/'",
		`LMCACHE_EXTRA_CONFIG={"disk_io_threads": 9}`, "LMCACHE_CONFIG_FILE=x",
		"LMCACHE_LOG_LEVEL=WARNING",
		"LMCACHE_NUMA_MODE=", "LMCACHE_ENABLE_XPYD=True", "LMCACHE_EC_LOCAL_DISK=/c",
		"LMCACHE_NO_SUCH_KEY=1", "PYTHONHASHSEED=0", "HOME=/x", "LMCACHE_TRACK_USAGE=false",
	}
	r, c := converted(t, src)
	if c.Arena.Limit != 20<<30 || c.Tiers[0].Disk.Paths[0] != "/b" ||
		c.Tiers[0].Disk.Capacity != 7<<30 || c.Tiers[0].Workers != 9 ||
		c.Tiers[0].Disk.Direct != "never" || c.Log.Level != "warn" {
		t.Errorf("%+v\n%s", c, r.YAML)
	}
	if k := key(t, r, "max_local_cpu_size"); k.Outcome != lmcache.Unused ||
		!strings.Contains(k.Why, "LMCACHE_MAX_LOCAL_CPU_SIZE") || k.Value != "10" {
		t.Errorf("%+v", k)
	}
	for name, want := range map[string]lmcache.Outcome{
		"LMCACHE_ENABLE_XPYD": lmcache.VLLM, "LMCACHE_EC_LOCAL_DISK": lmcache.None,
		"LMCACHE_NO_SUCH_KEY": lmcache.Unknown, "PYTHONHASHSEED": lmcache.VLLM,
		"LMCACHE_NUMA_MODE": lmcache.Unused, "LMCACHE_LOG_LEVEL": lmcache.Set,
		"LMCACHE_TRACK_USAGE": lmcache.BuiltIn,
	} {
		if k := key(t, r, name); k.Outcome != want {
			t.Errorf("%+v, want %s", k, want)
		}
	}
	for _, k := range r.Keys {
		if k.Key == "HOME" {
			t.Errorf("%+v", k)
		}
	}
}

// JSON in place of a file may be of several kinds.
func TestKindsOfText(t *testing.T) {
	_, c := converted(t, source(`{"max_local_cpu_size": 7,
	"local_disk": null}`))
	if c.Arena.Limit != 7<<30 {
		t.Errorf("%+v", c.Arena)
	}
	for _, text := range []string{`{"type": "fs", "base_path": "/a"}`,
		`[{"type": "fs", "base_path": "/a"}, {"type": "resp", "host": "h", "port": 1}]`} {
		_, c = converted(t, source(text))
		if len(c.Tiers) == 0 || c.Tiers[0].Disk.Paths[0] != "/a" || c.Arena.Limit != 4<<30 {
			t.Errorf("%s: %+v", text, c)
		}
	}
	r, c := converted(t, source(`{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both", "kv_connector_extra_config": {
		"lmcache.max_local_cpu_size": 9, "lmcache.mp.port": 6555, "lmcache.mp.autostart": true, "lmcache.mp.save_decode_cache": true, "lmcache.mp.lazy_offload": true, "other.key": 1}}`))
	if c.Arena.Limit != 9<<30 || r.Connector["lookaside.autostart"] != true ||
		r.Connector["lookaside.save_decode"] != true {
		t.Errorf("%+v, %v", c.Arena, r.Connector)
	}
	if key(t, r, "lmcache.mp.lazy_offload").Outcome != lmcache.None ||
		key(t, r, "other.key").Outcome != lmcache.Unknown ||
		key(t, r, "lmcache.mp.port").Outcome != lmcache.VLLM {
		t.Errorf("%+v", r.Keys)
	}
}

func TestServersCommandLine(t *testing.T) {
	src := source("")
	src.Server = []string{
		"lmcache", "server", "--l1-size-gb", "100", "--l1-use-lazy", "--l1-init-size-gb=20",
		"--eviction-policy", "ARC", "--chunk-size", "512", "--port", "6555",
		"--l2-adapter", `{"type": "fs", "base_path": "/a"}`, "--http-host", "127.0.0.1",
		"--http-port", "9000", "--l1-read-ttl-seconds", "300", "--script-allowed-imports", "numpy",
		"pandas",
		"--enable-tracing", "--no-such-flag", "x", "--p2p-advertise-url", "h:1",
	}
	r, c := converted(t, src)
	if c.Arena.Limit != 100<<30 || c.Arena.Initial != 20<<30 || c.Arena.Eviction != "arc" ||
		c.Admin.Listen != "127.0.0.1:9000" || c.Lookup.Lease != 5*time.Minute || len(c.Tiers) != 1 {
		t.Errorf("%+v\n%s", c, r.YAML)
	}
	for name, want := range map[string]lmcache.Outcome{"--no-such-flag": lmcache.Unknown,
		"--enable-tracing": lmcache.None, "--p2p-advertise-url": lmcache.None,
		"--port": lmcache.None, "--script-allowed-imports": lmcache.None} {
		if k := key(t, r, name); k.Outcome != want {
			t.Errorf("%+v, want %s", k, want)
		}
	}
	src.Server = []string{"--l1-manager", `{"type":"DRAM","tag":"_default","size_gb":8}`,
		"--no-l1-use-lazy"}
	if _, c := converted(t, src); c.Arena.Limit != 8<<30 {
		t.Errorf("%+v", c.Arena)
	}
}

// An arena on a device is one here too, and what was said of memory says nothing of it.
func TestArenaOnDevices(t *testing.T) {
	server := func(args ...string) lmcache.Source {
		src := source("")
		src.Server = args
		return src
	}
	type want struct {
		devices string
		files   bool
		unused  []string
		shared  bool // ranks are told what to do
	}
	for _, tc := range []struct {
		name string
		src  lmcache.Source
		want want
	}{
		{"primary", source("max_local_cpu_size: 80\nlocal_cpu_use_hugepages: true\nnuma_mode: auto\nstorage_plugins: [dax]\nextra_config:\n  dax.mode: primary\n  dax.device_path: /dev/dax1.0\n  dax.max_dax_size: 100\n  dax.restore_workers: 16"),
			want{"/dev/dax1.0 107374182400", false, []string{"max_local_cpu_size",
				"local_cpu_use_hugepages", "numa_mode"}, false}},
		{"primary, all of it", source(
			"extra_config: {dax.mode: Primary, dax.device_path: /dev/dax1.0}"),
			want{"/dev/dax1.0 0", false, nil, false}},
		{"the server's", server("--l1-devdax-path", "/dev/dax0.0", "--l1-size-gb", "100",
			"--l1-use-lazy", "--l1-init-size-gb", "20", "--l1-use-hugepages"),
			want{"/dev/dax0.0 107374182400", false, []string{"--l1-init-size-gb",
				"--l1-use-hugepages"}, true}},
		{"the server's, a file", server("--l1-devdax-path=/mnt/pmem/kv", "--l1-size-gb=1"),
			want{"/mnt/pmem/kv 1073741824", true, nil, true}},
		{"the server's managers",
			server("--l1-manager", `{"type":"DEVDAX","size_gb":2,"path":"/dev/dax0.0"}`,
				"--l1-manager", `{"type":"devdax","size_gb":3,"path":"/dev/dax1.0"}`),
			want{"/dev/dax0.0 2147483648,/dev/dax1.0 3221225472", false, nil, true}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r, c := converted(t, tc.src)
			var devices []string
			for _, d := range c.Arena.DAX.Devices {
				devices = append(devices, fmt.Sprintf("%s %d", d.Path, d.Size))
			}
			if got := strings.Join(devices, ","); c.Arena.Kind != "dax" || got != tc.want.devices ||
				c.Arena.DAX.AllowFiles != tc.want.files || len(c.Tiers) != 0 {
				t.Errorf("%+v, %+v\n%s", c.Arena, c.Tiers, r.YAML)
			}
			for _, name := range tc.want.unused {
				if k := key(t, r, name); k.Outcome != lmcache.Unused || k.Why == "" ||
					len(k.To) > 0 {
					t.Errorf("%+v", k)
				}
			}
			if got := strings.Contains(r.YAML,
				"# LMCache's server held this for all ranks together"); got != tc.want.shared {
				t.Errorf("%s", r.YAML)
			}
			if m := r.Missing(); len(m) > 0 {
				t.Errorf("without an equivalent: %+v", m)
			}
		})
	}
	// Beside memory it is below it.
	_, c := converted(t, server("--l1-manager", `{"type":"DRAM","size_gb":8}`, "--l1-manager",
		`{"type":"DEVDAX","size_gb":2,"path":"/dev/dax0.0"}`))
	if c.Arena.Limit != 8<<30 || len(c.Tiers) != 1 || c.Tiers[0].Kind != "dax" {
		t.Errorf("%+v", c)
	}
}

// keyList is testdata/keys.yaml.
type keyList struct {
	With          map[string]map[string]any
	Config, Extra map[string]any
	Server        map[string]any
	Adapters      map[string]map[string]any
}

func readKeyList(t *testing.T) keyList {
	t.Helper()
	b, err := os.ReadFile("testdata/keys.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var list keyList
	if err := yaml.Unmarshal(b, &list); err != nil {
		t.Fatal(err)
	}
	return list
}

// text is a configuration with a key and what it needs.
func (l keyList) text(t *testing.T, name string, value any, extra bool) string {
	t.Helper()
	m, best := map[string]any{}, ""
	for prefix := range l.With {
		if strings.HasPrefix(name, prefix) && len(prefix) > len(best) {
			best = prefix
		}
	}
	for k, v := range l.With[best] {
		m[k] = v
		if nested, ok := v.(map[string]any); ok {
			m[k] = maps.Clone(nested)
		}
	}
	if extra {
		if m["extra_config"] == nil {
			m["extra_config"] = map[string]any{}
		}
		m["extra_config"].(map[string]any)[name] = value
	} else {
		m[name] = value
	}
	b, err := yaml.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// each converts every key of the list with what it needs, and calls f with what became of it.
func (l keyList) each(t *testing.T, f func(part, name string, k lmcache.Key, r *lmcache.Result)) {
	t.Helper()
	one := func(part, name, shown string, src lmcache.Source) {
		t.Helper()
		r, err := lmcache.Convert(src)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		f(part, name, key(t, r, shown), r)
	}
	for _, name := range slices.Sorted(maps.Keys(l.Config)) {
		if name != "extra_config" { // which has keys of its own
			one("config", name, name, source(l.text(t, name, l.Config[name], false)))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(l.Extra)) {
		one("extra_config", name, "extra_config."+name,
			source(l.text(t, name, l.Extra[name], true)))
	}
	for _, name := range slices.Sorted(maps.Keys(l.Server)) {
		src := source("")
		src.Server = []string{"--" + name}
		if l.Server[name] != nil {
			src.Server = append(src.Server, fmt.Sprint(l.Server[name]))
		}
		one("server", "--"+name, "--"+name, src)
	}
	for _, kind := range slices.Sorted(maps.Keys(l.Adapters)) {
		keys := maps.Clone(l.Adapters[kind])
		if keys == nil {
			keys = map[string]any{}
		}
		keys["type"] = kind
		text, err := json.Marshal(keys)
		if err != nil {
			t.Fatal(err)
		}
		src := source("")
		src.Adapters = []string{string(text)}
		for _, name := range slices.Sorted(maps.Keys(keys)) {
			one("adapter "+kind, name, "--l2-adapter 1: "+name, src)
		}
	}
}

// The role in LMCache's transfer from prefiller to decoder is the connector's.
func TestRoles(t *testing.T) {
	for role, want := range map[string]string{"sender": "kv_producer", "receiver": "kv_consumer"} {
		r, _ := converted(t, source("enable_pd: true\npd_role: "+role))
		if !strings.Contains(r.YAML, `"kv_role":"`+want+`"`) {
			t.Errorf("%s:\n%s", role, r.YAML)
		}
	}
	if r, _ := converted(t, source("enable_pd: false\npd_role: sender")); !strings.Contains(r.YAML,
		`"kv_role":"kv_both"`) {
		t.Errorf("off:\n%s", r.YAML)
	}
}

// Every key that LMCache documents is known here, on or off, and what is said of it is a reason or
// a setting.
func TestEveryKeyIsKnown(t *testing.T) {
	list := readKeyList(t)
	unused := 0
	if len(list.Config) < 130 || len(list.Extra) < 60 || len(list.Adapters) < 20 ||
		len(list.Server) < 60 {
		t.Errorf("%d keys, %d extra, %d flags, %d adapters", len(list.Config), len(list.Extra),
			len(list.Server), len(list.Adapters))
	}
	list.each(t, func(part, name string, k lmcache.Key, r *lmcache.Result) {
		t.Helper()
		made := k.Outcome == lmcache.Set || k.Outcome == lmcache.VLLM
		if k.Outcome == lmcache.Unused {
			unused++
		}
		if k.Outcome == lmcache.Unknown || !made && k.Why == "" || made && len(k.To) == 0 {
			t.Errorf("%s: %+v", part, k)
		}
		if flat := strings.Join(strings.Fields(strings.ReplaceAll(r.YAML, "\n#", " ")),
			" "); k.Outcome == lmcache.None && !strings.Contains(flat, k.Why) {
			t.Errorf("the YAML lacks why %s has no equivalent:\n%s", name, r.YAML)
		}
		if _, err := settings.Parse(name, []byte(r.YAML), nil); err != nil {
			t.Errorf("%v:\n%s", err, r.YAML)
		}
		if part == "config" {
			// Without a value it says nothing.
			r, _ := converted(t, source(name+":"))
			if k := key(t, r, name); k.Outcome != lmcache.Unused && k.Outcome != lmcache.None {
				t.Errorf("%+v", k)
			}
		}
	})
	if unused > 4 {
		t.Errorf("%d keys are not seen to do anything", unused)
	}
	// All at once.
	text, err := yaml.Marshal(list.Config)
	if err != nil {
		t.Fatal(err)
	}
	if r, _ := converted(t, source(string(text))); len(r.Keys) != len(list.Config) {
		t.Errorf("%d of %d keys", len(r.Keys), len(list.Config))
	}
}

// The tables of the document are what the rules say.
func TestDocument(t *testing.T) {
	const path, begin, end = "../../docs/from-lmcache.md", "<!-- keys: generated -->\n",
		"<!-- end of keys -->\n"
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(b), begin)
	_, after, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatalf("%s lacks its marks", path)
	}
	const noEquivalent = "no equivalent"
	type row struct {
		to, why string
		keys    []string
	}
	var parts []string
	rows := map[string][]row{}
	readKeyList(t).each(t, func(part, name string, k lmcache.Key, _ *lmcache.Result) {
		if !slices.Contains(parts, part) {
			parts = append(parts, part)
		}
		to := strings.Join(k.To, ", ")
		if to == "" {
			to = map[lmcache.Outcome]string{lmcache.None: noEquivalent, lmcache.BuiltIn: "built in",
				lmcache.Unused: "without effect"}[k.Outcome]
		}
		why := k.Why
		list := rows[part]
		i := slices.IndexFunc(list, func(r row) bool { return r.to == to && r.why == why })
		if i < 0 {
			list = append(list, row{to: to, why: why})
			i = len(list) - 1
		}
		list[i].keys = append(list[i].keys, "`"+name+"`")
		rows[part] = list
	})
	var out strings.Builder
	head := func(title string) {
		fmt.Fprintf(&out,
			"\n### %s\n\n| LMCache | Lookaside | |\n|---|---|---|\n", title)
	}
	write := func(rows []row) {
		for _, r := range rows {
			fmt.Fprintf(&out, "| %s | %s | %s |\n", strings.Join(r.keys, ", "), r.to,
				strings.ReplaceAll(r.why, "|", "\\|"))
		}
	}
	var none []row
	for _, part := range parts {
		switch kind, adapter := strings.CutPrefix(part, "adapter "); {
		case !adapter:
			head(map[string]string{"config": "The configuration", "extra_config": "`extra_config`",
				"server": "The server's flags"}[part])
			write(rows[part])
		case slices.ContainsFunc(rows[part], func(r row) bool {
			return slices.Contains(r.keys,
				"`type`") && r.to == noEquivalent
		}):
			i := slices.IndexFunc(rows[part], func(r row) bool {
				return slices.Contains(r.keys,
					"`type`")
			})
			r := rows[part][i]
			if i := slices.IndexFunc(none, func(o row) bool { return o.why == r.why }); i >= 0 {
				none[i].keys = append(none[i].keys, "`"+kind+"`")
			} else {
				none = append(none, row{r.to, r.why, []string{"`" + kind + "`"}})
			}
		default:
			head("Adapters of type `" + kind + "`")
			write(rows[part])
		}
	}
	head("Adapters that are no tier")
	write(none)
	want := before + begin + out.String() + "\n" + end + after
	if *update {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if want != string(b) {
		t.Errorf("%s is out of date: go test ./internal/lmcache -run Document -update", path)
	}
}

func TestWhatIsWrongIsSaid(t *testing.T) {
	for _, tc := range []struct {
		text     string
		adapters []string
		server   []string
		want     []string
	}{
		{"", nil, nil, []string{"nothing to convert"}},
		{"a: b: c", nil, nil, []string{"neither YAML nor JSON"}},
		{"just words", nil, nil, []string{"keys and values"}},
		{"max_local_cpu_size: lots", nil, nil, []string{"max_local_cpu_size", `"lots"`, "number"}},
		{"max_local_cpu_size: 1e300", nil, nil, []string{"max_local_cpu_size", "GiB"}},
		{"max_local_cpu_size: .nan", nil, nil, []string{"max_local_cpu_size", "number"}},
		{"chunk_size: 0", nil, nil, []string{"chunk_size", "whole number"}},
		{"numa_mode: maybe", nil, nil, []string{"numa_mode", "manual"}},
		{"numa_mode: manual\nextra_config: {gpu_to_numa_mapping: {0: x}}", nil, nil,
			[]string{"gpu_to_numa_mapping", `"x"`}},
		{"enable_lazy_memory_allocator: true\nlazy_memory_initial_ratio: 3", nil, nil,
			[]string{"lazy_memory_initial_ratio", "0 to 1"}},
		{"remote_url: no-url", nil, nil, []string{"remote_url", "URL", "HOST:PORT"}},
		{"remote_url: u:hunter2@h:1", nil, nil, []string{"remote_url", "URL", "HOST:PORT"}},
		{"enable_pd: true\npd_role: both", nil, nil, []string{"pd_role", "sender or receiver"}},
		{"remote_url: redis://u:hunter2@h/x", nil, nil, []string{"remote_url", "database"}},
		{"remote_url: 's3://'", nil, nil, []string{"remote_url", "bucket"}},
		{"extra_config: [1]", nil, nil, []string{"extra_config", "map"}},
		{"pin_timeout_sec: -1", nil, nil, []string{"pin_timeout_sec", "seconds"}},
		{"extra_config: {dax.device_path: /dev/dax0.0, dax.max_dax_size: 0}", nil, nil,
			[]string{"dax.max_dax_size", "above 0"}},
		{"", []string{"{"}, nil, []string{"--l2-adapter 1", "JSON"}},
		{"", []string{`{"a": 1}`}, nil, []string{"--l2-adapter 1", "type"}},
		{"", []string{`["fs"]`}, nil, []string{"--l2-adapter 1", "object"}},
		{"", []string{`{"type": "fs"}`}, nil, []string{"--l2-adapter 1", "base_path"}},
		{"", []string{`{"type": "resp"}`}, nil, []string{"--l2-adapter 1", "host", "--env"}},
		{"", []string{`{"type": "s3"}`}, nil, []string{"s3_endpoint"}},
		{"", []string{`{"type": "valkey"}`}, nil, []string{"startup_nodes"}},
		{"", []string{`{"type": "dax", "slot_bytes": 1}`}, nil,
			[]string{"no devices", "hotplug_enabled"}},
		{"", []string{`{"type": "dax", "devices": [{"device_path": "/dev/dax0.0"}]}`}, nil,
			[]string{"devices[0].max_dax_size_gb", "number"}},
		{"", []string{`{"type": "dax", "devices": [3]}`}, nil, []string{"devices[0]", "object"}},
		{"", []string{`{"type": "dax", "device_path": " ", "max_dax_size_gb": 1}`}, nil,
			[]string{"device_path is missing"}},
		{"", nil, []string{"--l1-size-gb", "0"}, []string{"--l1-size-gb", "above 0"}},
		{"", nil, []string{"lmcache", "server", "-x"}, []string{`"-x"`, "flag"}},
		{"", nil, []string{"--l1-manager", "x"}, []string{"--l1-manager", "JSON"}},
		{"a: \xff", nil, nil, []string{"UTF-8"}},
		{strings.Repeat("#", 1<<20+1), nil, nil, []string{"larger than"}},
	} {
		src := source(tc.text)
		src.Adapters, src.Server = tc.adapters, tc.server
		_, err := lmcache.Convert(src)
		if err == nil {
			t.Errorf("%.100s%v%v: accepted", tc.text, tc.adapters, tc.server)
			continue
		}
		for _, w := range tc.want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%.100s%v%v: %q does not say %s", tc.text, tc.adapters, tc.server, err, w)
			}
		}
		if strings.Contains(err.Error(), "hunter2") {
			t.Errorf("a secret in: %v", err)
		}
	}
}

func TestTable(t *testing.T) {
	r, _ := converted(t, source(
		"enable_p2p: true\nno_such_key: 1\nchunk_size: 256\nlocal_cpu: true\nmax_local_cpu_size: 5"))
	var b bytes.Buffer
	if err := r.WriteTable(&b); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(b.String(), "\n")
	for i, want := range []string{"LMCACHE", "enable_p2p: true", "no_such_key: (not shown)",
		"chunk_size: 256"} {
		if !strings.HasPrefix(lines[i], want) {
			t.Errorf("line %d is %q, want %s", i, lines[i], want)
		}
	}
	if !strings.Contains(b.String(),
		"5 keys: 1 without an equivalent, 1 unknown, 1 to be set in vLLM, 1 converted, 1 built in") || strings.Contains(b.String(), "local_cpu:") {
		t.Error(b.String())
	}
	if m := r.Missing(); len(m) != 2 || m[0].Key != "enable_p2p" || m[1].Key != "no_such_key" {
		t.Errorf("%+v", m)
	}
}

// Whatever is read, what is written is YAML that says what Config says. A text of endlessly many
// keys, or of one again and again, is refused before the decoder compares each with each other.
func TestManyKeys(t *testing.T) {
	numbered := ""
	for i := range 20000 {
		numbered += fmt.Sprintf("k%d:\n", i)
	}
	for text, want := range map[string]string{
		strings.Repeat("a:\n", 2000): "line 2: the key of line 1 again",
		"extra_config: {" + strings.Repeat("S3CR3T: 1, ", 2000) +
			"x: 1}": "line 1: the key of line 1 again",
		"a: &x {b: 1}\nb: *x\nc: *x\nb: 2": "line 4: the key of line 2 again",
		strings.Repeat("a:\n", 100000):     "line 1: a map of 100000 keys",
		numbered:                           "line 1: a map of 20000 keys",
	} {
		if _, err := lmcache.Convert(source(text)); err == nil ||
			!strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "S3CR3T") {
			t.Errorf("%.20q…: %v, want %q", text, err, want)
		}
	}
}

func FuzzConvert(f *testing.F) {
	inputs, _ := filepath.Glob("testdata/*.lmcache")
	for _, in := range append(inputs, "testdata/keys.yaml") {
		b, err := os.ReadFile(in)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(string(b), "LMCACHE_LOCAL_DISK=/a")
	}
	f.Add("remote_url: \"redis://a:S3CR3T@b\\n# x: y\"\nextra_config: {valkey_password: S3CR3T}",
		"LMCACHE_REMOTE_URL=redis://:S3CR3T@h")
	f.Add(`[{"type": "resp", "host": "h\u2028: [", "port": 1, "password": "S3CR3T"}]`, "")
	f.Add("local_disk: \"/a\\\": b\"\nmax_local_disk_size: 1", "")
	f.Fuzz(func(t *testing.T, text, variable string) {
		src := source(text)
		src.Environ = []string{variable}
		r, err := lmcache.Convert(src)
		if err != nil {
			return
		}
		var m map[string]any
		if err := yaml.Unmarshal([]byte(r.YAML), &m); err != nil {
			t.Fatalf("%v:\n%s", err, r.YAML)
		}
		list, _ := m["tiers"].([]any)
		want, _ := r.Config["tiers"].([]any)
		if len(list) != len(want) {
			t.Fatalf("%d tiers are written of %d:\n%s", len(list), len(want), r.YAML)
		}
		for i := range want {
			for key, value := range want[i].(map[string]any) {
				a, _ := json.Marshal(list[i].(map[string]any)[key])
				b, _ := json.Marshal(value)
				if !bytes.Equal(a, b) {
					t.Fatalf("%s: %s is written as %s:\n%s", key, b, a, r.YAML)
				}
			}
		}
	})
}
