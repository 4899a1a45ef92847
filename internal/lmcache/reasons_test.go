package lmcache_test

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"lookaside/internal/lmcache"
	"lookaside/sidecar/settings"
)

// A claim is what a reason says of the program, so that a reason cannot outlive what it was true
// of. Each has something that is checked, or says that it is not about the program.
type claim struct {
	// settings that there must be: as "peers.enabled", "disk: capacity", "lookaside.autostart"
	has   []string
	lacks []string // words of which no setting, kind of tier or policy may have any in its name
	docs  string   // where the documents say it: FILE#HEADING, or FILE: WORDS
	aside string   // why there is nothing to check
}

const (
	ofLMCache   = "it is about LMCache, or about this conversion"
	ofTheServer = "it is about the server of a remote tier"
)

// remotes are the tiers that hosts share.
var remotes = []string{"redis: url", "s3: url"}

// claims are of each reason that a key of LMCache can get.
var claims = map[string]claim{
	"settings come from a file, the environment and flags":                                                                                      {docs: "docs/configuration.md: environment"},
	"there is no auditing proxy":                                                                                                                {lacks: []string{"audit"}},
	"KV of text that is not a prefix is not reused":                                                                                             {lacks: []string{"blend", "segment", "dedup"}},
	"there are no statistics of chunks; lookaside simulate replays traces, and /metrics counts hits":                                            {lacks: []string{"statistic"}, docs: "docs/eviction.md: lookaside simulate"},
	"there is no controller of a fleet: each sidecar's admin server has status, pin, move and clear":                                            {lacks: []string{"controller", "coordinator", "fleet"}, has: []string{"admin.listen"}, docs: "docs/operations.md: lookaside pin"},
	"arena.eviction: adaptive learns by itself, and has nothing to set":                                                                         {has: []string{"arena.eviction"}, lacks: []string{"half_life", "ewma"}, docs: "docs/eviction.md: `adaptive`"},
	"KV does not go from storage to the GPU directly, but through the arena, which the worker maps and pins":                                    {lacks: []string{"gds", "cufile"}},
	"by way of the arena: KV does not go from storage to the GPU directly, but through the arena, which the worker maps and pins":               {lacks: []string{"gds", "cufile"}},
	"sidecars of one host find each other and share by themselves (peers.enabled); those of several hosts share a redis or s3 tier":             {has: append([]string{"peers.enabled", "peers.dir"}, remotes...), docs: "docs/peers.md#What happens"},
	"encoder outputs are not cached":                                                                                                            {lacks: []string{"encoder"}},
	"hidden states are not cached":                                                                                                              {lacks: []string{"hidden"}},
	"loads never hold up the scheduler or other requests":                                                                                       {docs: "docs/connector.md: other requests run meanwhile"},
	`with "enable_kv_cache_events": true there, vLLM publishes what the sidecars hold, too; a sidecar publishes by itself with events.endpoint`: {has: []string{"events.endpoint"}, docs: "docs/events.md#From the engine"},
	"KV goes by way of the arena: between prefiller and decoder there is no channel, buffer or port to set up":                                  {lacks: []string{"channel", "buffer_device", "prefill"}, docs: "docs/connector.md#Prefill and decode on separate instances"},
	"prefiller and decoder meet in one sidecar, or in sidecars of one host that share; those of several hosts need a redis or s3 tier":          {has: append([]string{"peers.enabled"}, remotes...), docs: "docs/connector.md#Prefill and decode on separate instances"},
	"kv_producer": {docs: "docs/connector.md: `kv_producer`"},
	"the scheduler always asks the sidecars, over their lookup sockets": {docs: "docs/protocol.md: lookup.sock", lacks: []string{"bypass"}},
	"hits are found in the sidecars":                                    {lacks: []string{"external_lookup", "lookup_client"}},
	"hits cannot be made up for experiments":                            {lacks: []string{"hit_miss", "hit_ratio"}},
	"a load that fails is reported, and vLLM computes it":               {docs: "docs/connector.md#When something fails"},
	"no code is loaded into the sidecar": {lacks: []string{"plugin",
		"module"}},
	"rank 0's; the next ranks' sidecars want the next ports. LMCache's default was every address of the host: this is the loopback": {has: []string{"admin.listen"}},
	"each rank's sidecar wants a port of its own": {has: []string{"admin.listen"}},
	"every sidecar has an admin server":           {has: []string{"admin.listen"}},
	"/metrics is served by the admin server: admin.listen": {has: []string{"admin.listen"},
		docs: "docs/operations.md#What the metrics mean"},
	"the admin server also listens on admin.sock in runtime.dir": {has: []string{"runtime.dir"},
		docs: "docs/operations.md: admin.sock"},
	"the admin server runs no scripts":   {lacks: []string{"script"}},
	"it decided whether the arena grows": {has: []string{"arena.initial"}},
	"the arena":                          {aside: ofLMCache},
	"a sidecar spreads its chunks over all of its directories: name in each rank's settings those that are its own":                         {has: []string{"disk: paths"}},
	"every rank's sidecar is asked for that rank's pages":                                                                                   {docs: "docs/connector.md#Tensor parallelism, and ranks that hold the same bytes"},
	"ranks that hold the same pages, as with MLA, store them once where they have one sidecar, or sidecars that share":                      {has: []string{"peers.enabled"}, docs: "docs/connector.md#Tensor parallelism, and ranks that hold the same bytes"},
	"there is no client of Maru's server; sidecars of one host share by themselves (peers.enabled)":                                         {has: []string{"peers.enabled"}, lacks: []string{"maru"}},
	"with lookup.promote: auto, what vLLM computes sooner than it arrives is not waited for":                                                {has: []string{"lookup.promote"}, lacks: []string{"min_retrieve", "min_tokens"}},
	"they are for SGLang, and Lookaside is for vLLM":                                                                                        {aside: ofLMCache},
	"NIXL is not used: disk, redis and s3 tiers read and write straight from and into the arena":                                            {has: append([]string{"disk: paths"}, remotes...), lacks: []string{"nixl"}},
	"a lease that has run out is freed at once":                                                                                             {has: []string{"lookup.lease"}, lacks: []string{"check_interval"}},
	"it runs until a worker begins to load; from then on the lease lasts as long as the worker":                                             {has: []string{"lookup.lease"}},
	"prefixes are named by vLLM's own block hashes; sha256_cbor is the one that all processes compute alike":                                {lacks: []string{"hash_algorithm"}, docs: "docs/connector.md: sha256_cbor"},
	"requests are stored whatever their priority":                                                                                           {lacks: []string{"priority"}},
	"no Python runs in the sidecar":                                                                                                         {lacks: []string{"python", "_gc"}},
	"there is no cachegen: lossless is smaller than raw and changes nothing; fp8 and int8 are half the size and change the pages a little":  {has: []string{"redis: serde", "s3: serde"}, lacks: []string{"cachegen"}},
	"none of these is a tier of Lookaside's: disk, redis and s3 are":                                                                        {has: append([]string{"disk: paths"}, remotes...), lacks: []string{"mooncake", "infinistore"}},
	"at its start the sidecar checks that host and cgroups can give arena.limit, and takes no more: choose it so that this much stays free": {has: []string{"arena.limit"}, lacks: []string{"reserve"}, docs: "docs/operations.md: every cgroup"},
	"all tiers are asked, nearest first; one that is not wanted is left out of the list tiers":                                              {lacks: []string{"retrieve_locations"}, has: []string{"disk: paths"}},
	"a partly filled last chunk is always stored, and found by the page":                                                                    {lacks: []string{"unfull", "partial_chunk"}, docs: "docs/connector.md#What is stored and loaded"},
	"every tier is written to unless its admit is never":                                                                                    {has: []string{"disk: admit", "redis: admit", "s3: admit", "dax: admit"}},
	"KV moves through shared memory on a host, and through redis and s3 tiers between hosts":                                                {has: remotes, lacks: []string{"channel", "rdma"}},
	"there is one way to copy": {lacks: []string{"gpu_connector"}},
	"a prefix is loaded before its request is scheduled, beside other requests' steps, and not layer by layer within its own": {lacks: []string{"layerwise"}, docs: "docs/connector.md#What is stored and loaded"},
	"put it into the environment of the sidecar, as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a credentials_file":  {has: []string{"s3: credentials_file"}, docs: "docs/configuration.md: AWS_ACCESS_KEY_ID"},
	"put it into the environment of the sidecar, as REDIS_PASSWORD":                                                           {has: []string{"redis: password_env"}},
	"put it into the environment of the sidecar, as LMCACHE_RESP_PASSWORD":                                                    {has: []string{"redis: password_env"}},
	"what it holds is found again after a restart; several ranks may share it: see rank and ranks":                            {has: []string{"dax: rank", "dax: ranks"}},
	"what it holds is found again after a restart; several ranks may share a device: see rank and ranks":                      {has: []string{"dax: rank", "dax: ranks"}},
	"the arena lies on the device, and what it holds is found again after a restart":                                          {has: []string{"arena.kind", "arena.dax.devices"}, docs: "docs/dax.md#The arena"},
	"what a tier holds is always found again after a restart":                                                                 {lacks: []string{"persist"}},
	"the program chooses how many threads copy: as many as memory and processors allow":                                       {lacks: []string{"restore_workers", "store_workers", "lookup_workers", "restore_max_regions"}},
	"nothing is staged: a restore is one copy from the device into the arena":                                                 {lacks: []string{"staging"}},
	"Mooncake is not a tier: a redis or s3 tier shares between hosts":                                                         {has: remotes, lacks: []string{"mooncake"}},
	"Aerospike is not a tier: a redis or s3 tier shares between hosts":                                                        {has: remotes, lacks: []string{"aerospike"}},
	"Bigtable is not a tier: a redis or s3 tier shares between hosts":                                                         {has: remotes, lacks: []string{"bigtable"}},
	"it is not a tier: an s3 tier takes its place":                                                                            {has: remotes, lacks: []string{"hfbucket"}},
	"it is not a tier: a redis or s3 tier shares between hosts":                                                               {has: remotes, lacks: []string{"sagemaker", "wqs"}},
	"it belongs to an adapter that is no tier":                                                                                {aside: ofLMCache},
	"it is for tests":            {aside: ofLMCache},
	"0 is no limit":              {aside: ofLMCache},
	"a cluster has one database": {aside: ofTheServer},
	"the server makes room itself, by its maxmemory-policy or lifecycle rules; a redis tier may have a ttl":                  {has: []string{"redis: ttl"}},
	"the server has its own limit, and makes room itself":                                                                    {aside: ofTheServer},
	"chunks lie in slabs of equal slots, which are written in place: there is no file a chunk":                               {has: []string{"disk: slab"}},
	"chunks lie in slabs of equal slots, which are written in place: there are no temporary files and nothing to read ahead": {has: []string{"disk: slab"}, lacks: []string{"read_ahead", "tmp"}},
	"O_DIRECT is used where the file system allows it":                                                                       {has: []string{"disk: direct"}},
	"the buckets of histograms are fixed":                                                                                    {lacks: []string{"histogram"}},
	"the scheduler asks again at its next step":                                                                              {lacks: []string{"backoff"}},
	"room is counted in bytes: capacity":                                                                                     {has: []string{"disk: capacity"}, lacks: []string{"pool_size"}},
	"S3 Express is not spoken":                                                                                               {lacks: []string{"express"}},
	"a chunk is one object, which is uploaded in one piece":                                                                  {lacks: []string{"part_size", "multipart"}},
	"HTTP/1.1 is spoken, over as many connections as pool says":                                                              {has: []string{"s3: pool"}, lacks: []string{"http2"}},
	"a chunk is kept with its description and checksums, always":                                                             {lacks: []string{"chunk_meta", "checksum"}},
	"every chunk has checksums, which are always looked at":                                                                  {lacks: []string{"checksum"}},
	"a tier of kind dax is part of the sidecar":                                                                              {has: []string{"dax: devices"}},
	"there is no export of traces, and /metrics is always served by the admin server; what is stored and dropped is published by events.endpoint": {has: []string{"events.endpoint", "admin.listen"}, lacks: []string{"trace", "otlp"}},
	"nothing is evicted before room is wanted: there is no watermark and no batch to set":                                                         {lacks: []string{"watermark", "eviction_ratio"}},
	"vLLM finds the sidecar by lookaside.endpoint, on the same host: there is no port for it":                                                     {has: []string{"lookaside.endpoint"}, lacks: []string{"port"}},
	"workers copy from and to the arena, whose memory they are given over the session's socket":                                                   {docs: "docs/protocol.md: session.sock", lacks: []string{"transfer", "shm"}},
	"slots are aligned for direct I/O": {lacks: []string{"align"}},
	"LMCache's server held this for all ranks together: where there are several, give each rank's sidecar the same device, with arena.dax.ranks and its arena.dax.rank. Changing devices while it serves wants arena.dax.hotplug: true": {has: []string{"arena.dax.devices", "arena.dax.ranks", "arena.dax.rank", "arena.dax.hotplug"}},
	"LMCache's server held this for all ranks together, and a sidecar is for one: divide it by them":                                                                                                                                    {has: []string{"arena.limit"}},
	"the arena grows when it is four fifths full, by a quarter of arena.limit or by arena.initial, whichever is more":                                                                                                                   {has: []string{"arena.initial", "arena.limit"}, lacks: []string{"arena.step", "grow_at"}},
	"the arena grows from arena.initial to arena.limit":                                                     {has: []string{"arena.initial", "arena.limit"}},
	"a store is its session's, for as long as that lives":                                                   {lacks: []string{"write_ttl", "store_ttl"}},
	"promotions are bounded by slots: they fill at most half of the arena's at a time":                      {lacks: []string{"promotion.share", "in_flight"}},
	"what was brought up is in the arena, and stays until room is wanted":                                   {lacks: []string{"prefetch_policy"}},
	"what was written to a tier stays in the arena until room is wanted":                                    {lacks: []string{"store_policy"}},
	"vLLM's workers copy for themselves, and each tier has its own workers":                                 {has: []string{"lookaside.load_threads", "disk: workers", "redis: workers", "s3: workers"}},
	"loads and stores have as many workers each":                                                            {has: []string{"redis: workers"}, lacks: []string{"per_op"}},
	"how much is read at a time is not bounded in bytes, but by workers":                                    {has: []string{"disk: workers"}, lacks: []string{"in_flight"}},
	"vLLM's null block is never stored":                                                                     {lacks: []string{"null_block"}},
	"nothing is polled":                                                                                     {lacks: []string{"notifier"}},
	"a page has the blocks of all KV-cache groups; of sliding windows, those that a hit can need":           {docs: "docs/connector.md#Sliding windows and several KV-cache groups"},
	"a dead worker is noticed at once, by its socket, and a slow one is not dead":                           {lacks: []string{"reap", "heartbeat"}, docs: "docs/operations.md#When something fails"},
	"slots are as large as the chunks in them; a device has chunks of several sizes":                        {lacks: []string{"slot_bytes"}},
	"chunks come from the arena, of which there is one":                                                     {lacks: []string{"affinity"}},
	"local tiers keep pages as they are":                                                                    {lacks: []string{"disk: serde", "dax: serde"}},
	"sidecars with the same prefix of a redis or s3 tier share it; a disk or dax tier is its sidecar's own": {has: []string{"redis: prefix", "s3: url"}, lacks: []string{"disk: prefix", "dax: prefix"}},
	"sidecars do not share a directory: what several hosts are to share goes into a redis or s3 tier":       {has: append([]string{"disk: paths"}, remotes...)},
	"Google's own protocol is not spoken; its S3-compatible interface may be used by an s3 tier":            {has: []string{"s3: endpoint"}, lacks: []string{"gcs", "google"}},
	"a disk tier is made in directories: make a file system on the device":                                  {has: []string{"disk: paths"}, lacks: []string{"raw_block", "blkio"}},
	"Redis and Valkey are spoken to over TCP: a redis tier at the same server takes its place":              {has: []string{"redis: url"}, lacks: []string{"rdma"}},
}

// settingNames are all settings: those of the sidecar, of each kind of tier, and of the connector.
func settingNames(t *testing.T) []string {
	t.Helper()
	var names []string
	for _, s := range settings.All() {
		names = append(names, s.Key)
	}
	for _, s := range settings.OfTiers() {
		for _, kind := range s.Kinds {
			names = append(names, kind+": "+s.Key)
		}
	}
	// The connector's table is what its own tests hold it to.
	for _, row := range regexp.MustCompile(
		"(?m)^\\| `(lookaside\\.[a-z_]+)`").FindAllStringSubmatch(document(t, "docs/connector.md"),
		-1) {
		names = append(names, row[1])
	}
	return names
}

func document(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile("../../" + path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// What is said of a key without an equivalent is true of this program: each reason has claims,
// which are checked, and names no setting that there is not.
func TestReasons(t *testing.T) {
	names := settingNames(t)
	used := map[string]bool{}
	mention := regexp.MustCompile(
		`\b(?:lookaside|runtime|arena|lookup|promotion|cascade|sessions|spaces|lmcache|events|peers|admin|log|lifecycle)(?:\.[a-z_]+)+`)
	readKeyList(t).each(t, func(part, name string, k lmcache.Key, _ *lmcache.Result) {
		t.Helper()
		if k.Why == "" {
			return
		}
		used[k.Why] = true
		if _, ok := claims[k.Why]; !ok {
			t.Errorf("%s %s: nothing is known of the reason %q", part, name, k.Why)
		}
		for _, setting := range mention.FindAllString(k.Why, -1) {
			if setting != "admin.sock" && !slices.Contains(names, setting) {
				t.Errorf("%s %s: there is no setting %s: %q", part, name, setting, k.Why)
			}
		}
	})
	for _, why := range slices.Sorted(maps.Keys(claims)) {
		c := claims[why]
		if !used[why] {
			t.Errorf("no key gets the reason %q", why)
		}
		if (c.aside == "") == (len(c.has)+len(c.lacks)+len(c.docs) == 0) {
			t.Errorf("%q: claims something, or says why not", why)
		}
		for _, name := range c.has {
			if !slices.Contains(names, name) {
				t.Errorf("%q: there is no setting %s", why, name)
			}
		}
		for _, word := range c.lacks {
			for _, name := range names {
				if strings.Contains(name, word) {
					t.Errorf("%q: there is a setting %s", why, name)
				}
			}
		}
		if file, heading, ok := strings.Cut(c.docs, "#"); ok {
			if text := document(t, file); !strings.Contains(text, "\n## "+heading+"\n") &&
				!strings.Contains(text, "\n### "+heading+"\n") {
				t.Errorf("%q: %s has no section %q", why, file, heading)
			}
		} else if file, words, ok := strings.Cut(c.docs, ": "); ok &&
			!strings.Contains(document(t, file), words) {
			t.Errorf("%q: %s does not say %q", why, file, words)
		}
	}
}
