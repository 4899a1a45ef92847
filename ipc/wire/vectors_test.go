package wire

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"math"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unicode"
)

var update = flag.Bool("update", false, "write the golden vectors anew")

const (
	vectorsFile = "testdata/vectors.json"
	lmcacheFile = "testdata/lmcache.json"
	peersFile   = "testdata/peers.json" // which only sidecars read
	hostsFile   = "testdata/hosts.json" // likewise
	tierFile    = "testdata/tier_vectors.json"
)

// A vector is a golden message, or bytes that must be refused.
type vector struct {
	Name string `json:"name"`
	Type string `json:"type"` // the message decoded as
	// who receives it: "sidecar", "client", "lender", "borrower", "caller", "answerer",
	// "program" or "tier"
	To      string         `json:"to"`
	Message map[string]any `json:"message,omitempty"` // the fields; bytes in hex
	Hex     string         `json:"hex"`
	Valid   bool           `json:"valid"`
	// Canonical says that encoding the message gives these very bytes.
	Canonical bool   `json:"canonical"`
	Why       string `json:"why"`
}

// toClient are the messages that the sidecar sends.
var toClient = map[Type]bool{
	TypeWelcome: true, TypeRefuse: true, TypeStoreGrant: true, TypeLoadGrant: true, TypePong: true,
	TypeContained: true, TypeCleared: true, TypeEvents: true, TypeRegionAdded: true,
	TypeRegionRemoved: true,
	TypeNotice:        true, TypeRegionsReady: true, TypeMoved: true, TypeNameWeights: true,
	TypeError:        true,
	TypeLookupResult: true, TypeLookupPending: true,
}

func receiver(t Type) string {
	switch t {
	case TypePeerHello, TypePeerLease, TypePeerRelease:
		return "lender"
	case TypePeerWelcome, TypePeerSpace, TypePeerPages, TypePeerGrant:
		return "borrower"
	case TypeHostsChallenge, TypeHostsAccept:
		return "caller"
	case TypeHostsProof:
		return "answerer"
	case TypeTierWelcome, TypeTierRefuse, TypeTierRegionReady, TypeTierRegionLeft, TypeTierDone,
		TypeTierCleared, TypeTierFigures:
		return "tier" // the sidecar's
	case TypeTierHello, TypeTierRegion, TypeTierRegionGone, TypeTierContains, TypeTierPut,
		TypeTierGet, TypeTierDrop, TypeTierClear, TypeTierStats, TypeTierCancel:
		return "program"
	}
	if toClient[t] {
		return "client"
	}
	return "sidecar"
}

func digests(n, size int) []byte {
	b := make([]byte, n*size)
	for i := range b {
		b[i] = byte(i*7 + i/size)
	}
	return b
}

type named struct {
	name string
	m    Message
}

func goodMessages() []named {
	const big = math.MaxUint64
	return []named{
		{"hello worker", &Hello{Version: Version, Role: RoleWorker, EngineID: "engine-0", Rank: 3,
			Ranks: 1, PageTokens: 16, PageBytes: 2 << 20, PagesPerChunk: 16, DigestBytes: 32,
			Fields: []Field{{"dtype", "bfloat16"}, {"hash", "sha256_cbor"},
				{"model", "größer/モデル"}}}},
		{"hello scheduler", &Hello{Version: Version, Role: RoleScheduler, EngineID: "e", Ranks: 1,
			PageTokens: 128, PagesPerChunk: 2, DigestBytes: 8}},
		{"hello scheduler direct", &Hello{Version: Version, Role: RoleScheduler, EngineID: "e",
			Ranks: 1, PageTokens: 128, PagesPerChunk: 2, DigestBytes: 8, Direct: true}},
		{"hello scheduler of several ranks", &Hello{Version: Version, Role: RoleScheduler,
			EngineID: "e", Rank: math.MaxUint32 - 7, Ranks: 8, PageTokens: 128, PagesPerChunk: 2,
			DigestBytes: 8}},
		{"hello full map", &Hello{Version: Version, Role: RoleWorker, PageTokens: 1,
			PageBytes: math.MaxInt64, PagesPerChunk: math.MaxUint32, DigestBytes: 1,
			Rank: math.MaxUint32, Ranks: 1,
			EngineID: strings.Repeat("x", 256), Fields: manyFields(64)}},
		{"hello of a worker that has memory", &Hello{Version: Version, Role: RoleWorker,
			EngineID: "e", Ranks: 1, PageTokens: 16, PageBytes: 4096, PagesPerChunk: 4,
			DigestBytes: 32, Held: MaxHeldFDs}},
		{"hello that tells about its client", &Hello{Version: Version, Role: RoleScheduler,
			EngineID: "e", Ranks: 1, PageTokens: 16, PagesPerChunk: 4, DigestBytes: 32,
			Direct: true, About: []Field{{"failure_policy", "recompute"}, {"vllm", "größer"}}}},
		{"hello that tells all about its client", &Hello{Version: Version, Role: RoleWorker,
			EngineID: "e", Ranks: 1, PageTokens: 16, PageBytes: 4096, PagesPerChunk: 4,
			DigestBytes: 32, About: manyFields(MaxAbout)}},
		{"welcome before the memory is there", &Welcome{Version: Version, Session: 2,
			Secret: digests(1, 16), Generation: 1<<62 - 1, Fingerprint: digests(1, 32),
			LookupEndpoint: "ipc:///run/l/lookup.sock", MaxPages: 65536, LeaseMs: 30000,
			Preparing: true}},
		{"welcome worker", &Welcome{Version: Version, Session: big, Secret: digests(1, 16),
			Generation: 1 << 63, Fingerprint: digests(1, 32),
			LookupEndpoint: "ipc:///run/l/lookup.sock", Regions: 2, MaxPages: 65536,
			LeaseMs: 30000}},
		{"welcome scheduler", &Welcome{Version: Version, Session: 1, Secret: make([]byte, 16),
			Fingerprint: make([]byte, 32), LookupEndpoint: "ipc:///run/l/lookup.sock",
			ReplyEndpoint: "ipc:///run/l/reply.sock", MaxPages: 1, LeaseMs: math.MaxUint32,
			Peers: big}},
		{"refuse", &Refuse{Version: Version, Code: RefuseIncompatible, Field: "dtype",
			Want: "bfloat16", Got: "float32", Message: "the worker's dtype differs"}},
		{"refuse empty", &Refuse{Version: Version, Code: RefuseBusy}},
		{"prepare store first", &PrepareStore{ID: 1, Prev: []byte{}, Hashes: digests(3, 32),
			Every: 1}},
		{"prepare store later", &PrepareStore{ID: math.MaxUint32, FirstPage: 4096,
			Prev: digests(1, 16), Hashes: digests(20, 16), Every: 1}},
		{"prepare store of every fourth chunk", &PrepareStore{ID: 3, FirstPage: 32,
			Prev: digests(1, 16), Hashes: digests(20, 16), Every: 4, Which: 3}},
		{"prepare store of what is rarely anybody's", &PrepareStore{ID: 4, Prev: []byte{},
			Hashes: digests(1, 32), Every: math.MaxUint32, Which: math.MaxUint32 - 1}},
		{"prepare store of a tenant, with hints", &PrepareStore{ID: 5, Prev: []byte{},
			Hashes: digests(2, 32), Every: 1, Tenant: Label("größer/モデル"),
			Hints: Hints{Priority: 80, RetainMs: 3_600_000, PinMs: 60_000, FromUse: 2}}},
		{"prepare store with all that hints may say", &PrepareStore{ID: 6, Prev: []byte{},
			Hashes: digests(1, 32), Every: 1,
			Tenant: Label(strings.Repeat("t", MaxTenantBytes)),
			Hints: Hints{Priority: MaxPriority, RetainMs: math.MaxUint32, PinMs: math.MaxUint32,
				FromUse: math.MaxUint8}}},
		{"store grant", &StoreGrant{ID: 1, Store: 7, Held: 2, Grants: []Extent{{2, 14, 0, 0},
			{16, 16, 1, 1 << 40}}}},
		{"store grant nothing", &StoreGrant{ID: 2, Held: 65536, Shed: 300}},
		{"commit store", &CommitStore{Store: 7}},
		{"commit store failed", &CommitStore{Store: big, Failed: []uint32{0, 5, 200}}},
		{"abort store", &AbortStore{Store: 300}},
		{"prepare load", &PrepareLoad{ID: 9, Session: 0xfeedfacecafebeef, Lookup: 1 << 33,
			Ticket: digests(1, 16), FirstPage: 70000, Pages: 65536, Names: digests(1, 32)}},
		{"fetch", &Fetch{ID: 9, Hash: digests(1, 32)}},
		{"fetch by a short hash", &Fetch{ID: 10, Hash: digests(1, 8)}},
		{"contains", &Contains{ID: 11, Prev: []byte{}, Hashes: digests(3, 16)}},
		{"contains, waiting", &Contains{ID: 12, FirstPage: 64, Prev: digests(1, 16),
			Hashes: digests(2, 16), WaitMs: 1000}},
		{"contained", &Contained{ID: 11, Held: []byte{32, 0, 0, 1}, Below: []byte{16, 0, 0, 0},
			Waiting: 1, Tiers: 2}},
		{"contained, nothing", &Contained{ID: 12, Held: []byte{}, Below: []byte{}}},
		{"load grant", &LoadGrant{ID: 9, Load: 8, Names: digests(1, 32),
			Extents: []Extent{{math.MaxUint32 - 1, 1, math.MaxUint32, math.MaxInt64}}}},
		{"load grant many", &LoadGrant{ID: 9, Load: 8, Names: digests(1, 32),
			Extents: manyExtents(17)}},
		{"release", &Release{Load: 8}},
		{"release bad", &Release{Load: 8, Bad: []uint32{0, 1, 127, 128, 255, 256, 65535, 65536}}},
		{"ping", &Ping{ID: 128}},
		{"pong", &Pong{ID: 255, Generation: 256}},
		{"clear space", &ClearSpace{ID: 65535}},
		{"cleared", &Cleared{ID: 65536, Chunks: 127}},
		{"read events", &ReadEvents{ID: 70}},
		{"events", &Events{ID: 70, More: true, Runs: []Run{{false, digests(3, 32)},
			{true, digests(20, 16)}}}},
		{"events nothing", &Events{ID: 71, Reset: true}},
		{"prefilled", &Prefilled{Tokens: 70000, Found: 65536, Loaded: 65535,
			Own: math.MaxUint32}},
		{"prefilled, and vLLM had it", &Prefilled{Tokens: 5, Own: 4096, Lookup: big, Reason: 9}},
		{"prefilled by computing", &Prefilled{Tokens: math.MaxUint32}},
		{"region added", &RegionAdded{Region: 1, Generation: 3, Kind: "hugetlb", SizeBytes: 1 << 30,
			PageSize: 2 << 20}},
		{"region added at an offset", &RegionAdded{Region: 9, Generation: big, Kind: "devdax",
			Offset: 6 << 20, SizeBytes: 4 << 20, PageSize: 2 << 20}},
		{"region added at the end of all offsets", &RegionAdded{Region: math.MaxUint32,
			Offset: math.MaxInt64 - 1, SizeBytes: 1, PageSize: 1}},
		{"region added for reading", &RegionAdded{Region: 1 << 31, Generation: 3, Kind: "thp",
			SizeBytes: 1 << 30, PageSize: 2 << 20, ReadOnly: true}},
		{"region removed", &RegionRemoved{Region: 9}},
		{"region removed large", &RegionRemoved{Region: math.MaxUint32}},
		{"region unmapped", &RegionUnmapped{Region: 9}},
		{"region unmapped large", &RegionUnmapped{Region: math.MaxUint32}},
		{"region mapped", &RegionMapped{Region: 9}},
		{"region mapped large", &RegionMapped{Region: math.MaxUint32}},
		{"regions ready", &RegionsReady{Regions: 5}},
		{"moved", &Moved{Generation: 1<<62 - 1, LookupEndpoint: "ipc:///run/l/lookup.sock",
			ReplyEndpoint: "ipc:///run/l/reply.sock"}},
		{"moved worker", &Moved{Generation: 1}},
		{"weights named", &NameWeights{Epoch: "step 17, größer"}},
		{"weights without a name", &NameWeights{}},
		{"notice", &Notice{Text: "the seed of the hashes differs"}},
		{"error", &Error{ID: 4, Code: CodeNotFound, Message: "no such load"}},
		{"lookup", &Lookup{Session: 5, Secret: digests(1, 16), Lookup: 6, FirstPage: 7,
			Prev: digests(1, 32), Hashes: digests(4, 32), DeadlineMs: 20, RecomputeUs: 1500}},
		{"lookup bin16", &Lookup{Session: big, Secret: digests(1, 16), Lookup: big, Prev: []byte{},
			Hashes: digests(8, 32), DeadlineMs: 70000}},
		{"lookup of one 8-byte hash", &Lookup{Session: 5, Secret: digests(1, 16), Lookup: 0,
			Prev: []byte{}, Hashes: digests(1, 8), DeadlineMs: 1, RecomputeUs: math.MaxUint32}},
		{"lookup from a later page, the one before not known",
			&Lookup{Session: 5, Secret: digests(1, 16), Lookup: 7, FirstPage: 16, Prev: []byte{},
				Hashes: digests(2, 16)}},
		{"lookup of a tenant", &Lookup{Session: 5, Secret: digests(1, 16), Lookup: 8,
			Prev: []byte{}, Hashes: digests(1, 32), Tenant: Label("größer/モデル")}},
		{"lookup of the longest tenant", &Lookup{Session: 5, Secret: digests(1, 16), Lookup: 9,
			Prev: []byte{}, Hashes: digests(1, 32),
			Tenant: Label(strings.Repeat("t", MaxTenantBytes))}},
		{"lookup of a request", &Lookup{Session: 5, Secret: digests(1, 16), Lookup: 9,
			Prev: []byte{}, Hashes: digests(1, 32),
			Request: Label("cmpl-" + strings.Repeat("7", MaxRequestBytes-5))}},
		{"lookup result", &LookupResult{Lookup: 6, HitPages: 4, HitTokens: 64}},
		{"lookup result in memory", &LookupResult{Lookup: 6, HitPages: 4, HitTokens: 64,
			InMemory: true}},
		{"lookup result miss", &LookupResult{Lookup: big}},
		{"lookup result from tiers", &LookupResult{Lookup: 6, HitPages: 64, HitTokens: 1024,
			Reason: 3, TookUs: 70000, BeganUs: 300, Sources: Label("arena 16, disk 48"),
			HitBytes: 64 << 20}},
		{"lookup pending", &LookupPending{Lookup: 6, Pages: 4, EtaMs: 120}},
		{"lookup pending without a promise", &LookupPending{Lookup: 6}},
		{"lookup pending large", &LookupPending{Lookup: big, Pages: math.MaxUint32,
			EtaMs: math.MaxUint32}},
		{"trim", &Trim{Session: 5, Secret: digests(1, 16), Lookup: 6, FirstPage: 32}},
		{"advise retain", &Advise{Session: 5, Secret: digests(1, 16), Prev: []byte{},
			Hashes: digests(4, 32), Action: AdviseRetain, Ms: 60_000, Priority: 90,
			Tenant: Label("a")}},
		{"advise pin", &Advise{Session: big, Secret: digests(1, 16), FirstPage: 16,
			Prev: digests(1, 32), Hashes: digests(4, 32), Action: AdvisePin, Ms: math.MaxUint32,
			Tenant: Label(strings.Repeat("t", MaxTenantBytes))}},
		{"advise prefetch", &Advise{Session: 5, Secret: digests(1, 16), FirstPage: 7,
			Prev: []byte{}, Hashes: digests(1, 8), Action: AdvisePrefetch}},
		{"advise demote", &Advise{Session: 5, Secret: digests(1, 16), Prev: []byte{},
			Hashes: digests(300, 32), Action: AdviseDemote, Priority: MaxPriority}},
		{"cancel", &Cancel{Session: 5, Secret: digests(1, 16), Lookup: 6}},

		{"peer hello", &PeerHello{Version: Version, Generation: 0xfeedfacecafebeef}},
		{"peer welcome", &PeerWelcome{Version: Version, Generation: 1, MaxPages: 65536}},
		{"peer space", &PeerSpace{Fingerprint: digests(1, 32), PageTokens: 16, PageBytes: 2 << 20,
			PagesPerChunk: 16, DigestBytes: 32, Fields: []Field{{"hash_seed", "0"},
				{"model", "m"}}}},
		{"peer space of which little is known", &PeerSpace{Fingerprint: make([]byte, 32),
			PageBytes: math.MaxInt64, PagesPerChunk: math.MaxUint32, DigestBytes: 8}},
		{"peer pages begin", &PeerPages{Seq: 1, Begin: true, Hints: digests(3, 8)}},
		{"peer pages end", &PeerPages{Seq: big, End: true, Hints: []byte{}}},
		{"peer pages many", &PeerPages{Seq: 70000, Begin: true, End: true, Hints: digests(600, 8)}},
		{"peer lease", &PeerLease{ID: math.MaxUint32, Fingerprint: digests(1, 32), FirstPage: 4096,
			Hashes: digests(5, 32)}},
		{"peer lease touch", &PeerLease{ID: 1, Fingerprint: digests(1, 32), Touch: true,
			Hashes: digests(40, 8)}},
		{"peer lease ends", &PeerLease{ID: 2, Fingerprint: digests(1, 32), FirstPage: 4096,
			Pages: 70, Hashes: digests(5, 32)}},
		{"peer grant", &PeerGrant{ID: 9, Load: 8, Pages: 26, Extents: []Extent{{64, 16, 1, 1 << 40},
			{80, 10, 0, 0}}}},
		{"peer grant nothing", &PeerGrant{ID: 9, More: true}},
		{"peer grant soon", &PeerGrant{ID: 9, More: true, Soon: true}},
		{"peer grant touched", &PeerGrant{ID: 10, Pages: 640}},
		{"peer release", &PeerRelease{Load: big, Extents: []uint32{0, 1, 300}, Bad: true}},
		{"peer release all", &PeerRelease{Load: 1}},
		{"peer release everything", &PeerRelease{}},
		{"tier hello", &TierHello{Version: TierVersion, Tier: "mooncake", Holds: 2}},
		{"tier welcome", &TierWelcome{Version: TierVersion, Program: "größer 1.0", MaxItems: 4096,
			MaxCalls: 1024}},
		{"tier welcome of the least", &TierWelcome{Version: TierVersion, MaxItems: 1, MaxCalls: 1}},
		{"tier refuse", &TierRefuse{Version: TierVersion, Message: "no master"}},
		{"tier region", &TierRegion{Region: 1, Kind: "thp", SizeBytes: 1 << 30,
			PageSize: 2 << 20}},
		{"tier region at an offset", &TierRegion{Region: math.MaxUint32, Kind: "devdax",
			SizeBytes: math.MaxInt64, Offset: 6 << 20, PageSize: 4096}},
		{"tier region ready", &TierRegionReady{Region: 1}},
		{"tier region refused", &TierRegionReady{Region: 300, Error: "cannot be registered"}},
		{"tier region gone", &TierRegionGone{Region: 70000}},
		{"tier region left", &TierRegionLeft{Region: 70000}},
		{"tier contains", &TierContains{ID: 7, Keys: [][]byte{digests(1, 1), digests(1, 67),
			digests(1, MaxTierKeyBytes)}}},
		{"tier contains many", &TierContains{ID: big, Keys: slices.Repeat([][]byte{{1}}, 20)}},
		{"tier put", &TierPut{ID: 8, Items: []TierItem{
			{digests(1, 67), []TierPiece{{1 << 31, 4096, 4096}, {1, 1 << 40, 2 << 20}}},
			{[]byte("k"), []TierPiece{{0, 0, 1}}}}}},
		{"tier get", &TierGet{ID: 9, Items: []TierItem{{digests(1, 67), slices.Repeat(
			[]TierPiece{{7, math.MaxInt64, math.MaxInt64}}, MaxTierPieces)}}}},
		{"tier drop", &TierDrop{ID: 10, Keys: [][]byte{digests(1, 67)}}},
		{"tier clear", &TierClear{ID: 11, Prefix: digests(1, 33)}},
		{"tier clear all", &TierClear{ID: 12, Prefix: []byte{}}},
		{"tier stats", &TierStats{ID: 13}},
		{"tier cancel", &TierCancel{ID: 14}},
		{"tier done", &TierDone{ID: 8, Results: []TierResult{{1, TierOK}, {0, TierMissing},
			{300, TierNoRoom}, {4095, TierFailed}, {2, TierCancelled}}, Text: "größer"}},
		{"tier cleared", &TierCleared{ID: 11, Keys: big}},
		{"tier not cleared", &TierCleared{ID: 11, Error: "no"}},
		{"tier figures", &TierFigures{ID: 13, CapacityBytes: math.MaxInt64, UsedBytes: 1 << 40,
			Keys: big, Evictions: 5, Problem: "full", Detail: "/data"}},
		{"tier figures of the least", &TierFigures{ID: 13}},
		{"reach", &Reach{Version: Version, Address: "10.0.0.2:7411"}},
		{"reach by name", &Reach{Version: Version, Address: "[fe80::1%größe]:1"}},
		{"hosts challenge", &HostsChallenge{Version: Version, Nonce: digests(1, 32), Token: true}},
		{"hosts challenge without a token", &HostsChallenge{Version: Version,
			Nonce: digests(1, 32)}},
		{"hosts proof", &HostsProof{Nonce: digests(2, 16), Token: true, Proof: digests(1, 32)}},
		{"hosts proof without a token", &HostsProof{Nonce: digests(2, 16),
			Proof: make([]byte, 32)}},
		{"hosts accept", &HostsAccept{Proof: digests(1, 32)}},
	}
}

func manyFields(n int) []Field {
	var f []Field
	for i := range n {
		f = append(f, Field{fmt.Sprintf("key-%03d", i), strings.Repeat("v", i)})
	}
	return f
}

func manyExtents(n int) []Extent {
	var e []Extent
	for i := range n {
		e = append(e, Extent{uint32(i * 16), 16, uint32(i % 3), uint64(i) << 20})
	}
	return e
}

// badMessages are bytes to refuse. Their Why is the reason, in the words of the
// Go decoder where it has such.
func badMessages() []vector {
	var out []vector
	add := func(t Type, why, h string) {
		h = strings.ReplaceAll(strings.ReplaceAll(h, " ", ""), "@@", fmt.Sprintf("%02x", Version))
		out = append(out, vector{
			Name: "refuse " + t.String() + ": " + why, Type: t.String(), To: receiver(t), Hex: h,
			Why: why,
		})
	}
	rep := func(s string, n int) string { return strings.Repeat(s, n) }
	hexOf := func(s string) string { return hex.EncodeToString([]byte(s)) }
	digest := rep("00", 32)
	secret := "c410" + rep("5e", 16)
	names := "c420" + digest

	// Each both where the sidecar decodes and where a client does.
	for _, t := range []struct {
		t       Type
		good    string // "[" type fields "]" without the array header
		arity   string
		longer  string
		shorter string
	}{
		{TypeLookup, "3c 05" + secret + "06 07 c400 c401aa 14 00 a0 a0", "9b", "9c", "9a"},
		// One field too many by itself.
		{TypeLookupResult, "3d 06 04 18 40 00 00 00 00 a0 00", "9a", "9b", "99"},
	} {
		add(t.t, "empty", "")
		add(t.t, "array bomb of 8 bytes", "dd ffffffff 000000")
		add(t.t, "array bomb of 5 bytes", "dd ffffffff")
		add(t.t, "map instead of an array", "81 a474797065 3c")
		add(t.t, "nesting", rep("91", 1024))
		add(t.t, "nested maps", rep("81a161", 1024))
		add(t.t, "one field too many", t.longer+t.good+"00")
		add(t.t, "one field too few", t.shorter+t.good[:len(t.good)-2])
		add(t.t, "a pickle", hexOf(
			"\x80\x04\x95\x20\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94."))
		add(t.t, "an old pickle", hexOf("cos\nsystem\n(S'true'\ntR."))
		add(t.t, "JSON", hexOf(`[60, 5, 6]`))
		add(t.t, "unknown type", "94 7f 01 01 01")
		add(t.t, "type above a byte", "94 cd0100 01 01 01")
		add(t.t, "negative type", "94 ff 01 01 01")
		add(t.t, "type as a string", "94 a13c 01 01 01")
		add(t.t, "an extension", "d6 01 00000000")
		add(t.t, "the unused byte", "c1")
	}

	lookup := "9b 3c 05" + secret + "06 07 c400"
	add(TypeLookup, "trailing bytes", lookup+"c401aa 14 00 a0 a0 00")
	add(TypeLookup, "another message", "94 3d 06 04 40")
	add(TypeLookup, "zero session", "9b 3c 00"+secret+"06 07 c400 c401aa 14 00 a0 a0")
	add(TypeLookup, "negative session", "9b 3c ff"+secret+"06 07 c400 c401aa 14 00 a0 a0")
	add(TypeLookup, "session as a float", "9b 3c cb4014000000000000"+secret+
		"06 07 c400 c401aa 14 00 a0")
	add(TypeLookup, "session as a boolean", "9b 3c c3"+secret+"06 07 c400 c401aa 14 00 a0 a0")
	add(TypeLookup, "session as nil", "9b 3c c0"+secret+"06 07 c400 c401aa 14 00 a0 a0")
	add(TypeLookup, "first page above 32 bits",
		"9b 3c 05"+secret+"06 cf0000000100000000 c400 c401aa 14 00 a0 a0")
	add(TypeLookup, "first page wraps", "9b 3c 05"+secret+"06 ceffffffff c400 c401aa 14 00 a0 a0")
	add(TypeLookup, "hashes as a string", lookup+"a1 61 14 00 a0 a0")
	add(TypeLookup, "hashes as a list", lookup+"91 01 14 00 a0 a0")
	add(TypeLookup, "hashes empty", lookup+"c400 14 00 a0 a0")
	add(TypeLookup, "hashes declare 4 GiB", lookup+"c6 ffffffff aa 14 00 a0 a0")
	add(TypeLookup, "hashes declare 1 byte too many", lookup+"c4 04 aa 14 00 a0 a0")
	add(TypeLookup, "cut in a length", lookup+"c6 0000")
	add(TypeLookup, "the body of version 7", "98 3c 05 06 07 c400 c401aa 14 00")
	add(TypeLookup, "a short secret", "9b 3c 05 c40f"+rep("5e", 15)+"06 07 c400 c401aa 14 00 a0 a0")
	add(TypeLookup, "a long secret", "9b 3c 05 c411"+rep("5e", 17)+"06 07 c400 c401aa 14 00 a0 a0")
	add(TypeLookup, "an empty secret", "9b 3c 05 c400 06 07 c400 c401aa 14 00 a0 a0")
	add(TypeLookup, "secret as a string", "9b 3c 05 b0"+rep("5e", 16)+"06 07 c400 c401aa 14 00 a0 a0")
	add(TypeLookup, "secret declares 4 GiB", "9b 3c 05 c6 ffffffff aa")
	add(TypeLookup, "negative deadline", lookup+"c401aa d0ff 00 a0 a0")
	add(TypeLookup, "deadline above 32 bits", lookup+"c401aa cf0000000100000000 00 a0 a0")
	add(TypeLookup, "negative recompute time", lookup+"c401aa 14 ff a0 a0")
	add(TypeLookup, "recompute time above 32 bits", lookup+"c401aa 14 cf0000000100000000 a0 a0")
	add(TypeLookup, "the body of version 1", "96 3c 05 06 07 c401aa 14")
	add(TypeLookup, "a hash before the first page",
		"9b 3c 05"+secret+"06 00 c401aa c401aa 14 00 a0 a0")
	add(TypeLookup, "hash before above the limit", "9b 3c 05"+secret+"06 07 c421"+digest+"00 c421"+
		digest+"00 14 00 a0")
	add(TypeLookup, "hash before as a string", "9b 3c 05"+secret+"06 07 a161 c401aa 14 00 a0 a0")
	add(TypeLookup, "hash before as nil", "9b 3c 05"+secret+"06 07 c0 c401aa 14 00 a0 a0")
	add(TypeLookup, "not whole hashes", "9b 3c 05"+secret+"06 07 c402aaaa c403aaaaaa 14 00 a0 a0")
	add(TypeLookup, "hash before declares 4 GiB", "9b 3c 05"+secret+"06 07 c6 ffffffff aa")
	add(TypeLookup, "the body of version 10", "99 3c 05"+secret+"06 07 c400 c401aa 14 00")
	add(TypeLookup, "tenant above the limit", lookup+"c401aa 14 00 d941"+rep("61", 65))
	add(TypeLookup, "tenant as bytes", lookup+"c401aa 14 00 c40161")
	add(TypeLookup, "tenant not UTF-8", lookup+"c401aa 14 00 a1ff")
	add(TypeLookup, "tenant declares 4 GiB", lookup+"c401aa 14 00 db ffffffff 61")
	add(TypeLookup, "the body of version 11", "9a 3c 05"+secret+"06 07 c400 c401aa 14 00 a0")
	add(TypeLookup, "request above the limit", lookup+"c401aa 14 00 a0 d961"+rep("61", 97))
	add(TypeLookup, "request as bytes", lookup+"c401aa 14 00 a0 c40161")
	add(TypeLookup, "request not UTF-8", lookup+"c401aa 14 00 a0 a1ff")

	add(TypeHello, "another version", "9a 01 02 a6776f726b6572 a0 00 10 cd1000 10 20 80")
	add(TypeHello, "another version with another body", "92 01 0f")
	add(TypeHello, "another version before a bomb", "93 01 01 dd ffffffff")
	add(TypeHello, "version above 16 bits", "92 01 ce00010001")
	add(TypeHello, "negative version", "92 01 ff")
	const worker = "9e 01 0e a6776f726b6572"
	add(TypeHello, "unknown role", "9e 01 0e a561646d696e a0 00 01 10 cd1000 10 20 80 00 00 80")
	add(TypeHello, "empty role", "9e 01 0e a0 a0 00 01 10 cd1000 10 20 80 00 00 80")
	add(TypeHello, "role as bytes", "9e 01 0e c406776f726b6572 a0 00 01 10 cd1000 10 20 80 00 00 80")
	add(TypeHello, "engine id not UTF-8", worker+"a2c328 00 01 10 cd1000 10 20 80 00 00 80")
	add(TypeHello, "engine id above the limit", worker+"da0101"+rep("61", 257)+
		"00 01 10 cd1000 10 20 80 00 00 80")
	add(TypeHello, "a worker with a direct socket", worker+"a0 00 01 10 cd1000 10 20 80 01 00 80")
	add(TypeHello, "direct as a boolean", worker+"a0 00 01 10 cd1000 10 20 80 c2 00 80")
	add(TypeHello, "the body of version 8", "9b 01 0e a6776f726b6572 a0 00 01 10 cd1000 10 20 80")
	add(TypeHello, "the body of version 9",
		"9c 01 0e a6776f726b6572 a0 00 01 10 cd1000 10 20 80 00")
	add(TypeHello, "the body of version 11",
		"9d 01 0e a6776f726b6572 a0 00 01 10 cd1000 10 20 80 00 00")
	add(TypeHello, "descriptors above the limit", worker+"a0 00 01 10 cd1000 10 20 80 00 41 80")
	add(TypeHello, "negative descriptors", worker+"a0 00 01 10 cd1000 10 20 80 00 ff 80")
	add(TypeHello, "a scheduler with descriptors",
		"9e 01 0e a97363686564756c6572 a0 00 01 10 00 10 20 80 00 01 80")
	add(TypeHello, "engine id declares 4 GiB", worker+"db ffffffff 61")
	add(TypeHello, "no ranks", worker+"a0 00 00 10 cd1000 10 20 80 00 00 80")
	add(TypeHello, "two ranks of a worker", worker+"a0 00 02 10 cd1000 10 20 80 00 00 80")
	add(TypeHello, "ranks wrap",
		"9e 01 0e a97363686564756c6572 a0 ceffffffff 02 10 00 10 20 80 00 00 80")
	add(TypeHello, "zero page tokens", worker+"a0 00 01 00 cd1000 10 20 80 00 00 80")
	add(TypeHello, "zero page bytes of a worker", worker+"a0 00 01 10 00 10 20 80 00 00 80")
	add(TypeHello, "page bytes above 63 bits",
		worker+"a0 00 01 10 cfffffffffffffffff 10 20 80 00 00 80")
	add(TypeHello, "zero pages per chunk", worker+"a0 00 01 10 cd1000 00 20 80 00 00 80")
	add(TypeHello, "zero digest bytes", worker+"a0 00 01 10 cd1000 10 00 80 00 00 80")
	add(TypeHello, "digest bytes above 32", worker+"a0 00 01 10 cd1000 10 21 80 00 00 80")
	add(TypeHello, "fields as an array", worker+"a0 00 01 10 cd1000 10 20 90 00 00 80")
	add(TypeHello, "duplicate field", worker+"a0 00 01 10 cd1000 10 20 82 a161a131 a161a132 00 00 80")
	add(TypeHello, "fields out of order",
		worker+"a0 00 01 10 cd1000 10 20 82 a162a131 a161a132 00 00 80")
	add(TypeHello, "field key as a number", worker+"a0 00 01 10 cd1000 10 20 81 01 a131 00 00 80")
	add(TypeHello, "field value nested", worker+"a0 00 01 10 cd1000 10 20 81 a161 81a161a162 00 00 80")
	add(TypeHello, "field key above the limit", worker+"a0 00 01 10 cd1000 10 20 81 d941"+rep("61",
		65)+"a131 00 00 80")
	add(TypeHello, "field value above the limit", worker+"a0 00 01 10 cd1000 10 20 81 a161 da0201"+
		rep("61", 513)+"00 00 80")
	add(TypeHello, "map bomb", worker+"a0 00 01 10 cd1000 10 20 df ffffffff")
	var many strings.Builder
	for i := range 65 {
		fmt.Fprintf(&many, "a3%x a0", fmt.Sprintf("%03d", i))
	}
	add(TypeHello, "fields above the limit", worker+"a0 00 01 10 cd1000 10 20 de0041"+
		many.String()+"00 00 80")
	const whole = worker + "a0 00 01 10 cd1000 10 20 80 00 00 "
	add(TypeHello, "about as an array", whole+"90")
	add(TypeHello, "about out of order", whole+"82 a162a131 a161a132")
	add(TypeHello, "about value as a number", whole+"81 a161 01")
	add(TypeHello, "about value above the limit", whole+"81 a161 da0201"+rep("61", 513))
	add(TypeHello, "about above the limit", whole+"de0021"+many.String()[:33*11])
	add(TypeHello, "bytes behind about", whole+"80 00")

	const none = "a0 00 00 00 00" // no tenant, no hints
	add(TypePrepareStore, "hashes empty", "9c 0a 01 00 c400 c400 01 00 "+none)
	add(TypePrepareStore, "no hash before a later page",
		"9c 0a 01 10 c400 c420"+digest+"01 00 "+none)
	add(TypePrepareStore, "a hash before the first page", "9c 0a 01 00 c420"+digest+"c420"+digest+
		"01 00 "+none)
	add(TypePrepareStore, "not whole hashes",
		"9c 0a 01 10 c420"+digest+"c421"+digest+"00 01 00 "+none)
	add(TypePrepareStore, "hash before above the limit", "9c 0a 01 10 c421"+digest+"00 c421"+digest+
		"00 01 00 "+none)
	add(TypePrepareStore, "first page wraps", "9c 0a 01 cefffffff0 c420"+digest+"c420"+digest+
		"01 00 "+none)
	add(TypePrepareStore, "no chunks", "9c 0a 01 00 c400 c401aa 00 00 "+none)
	add(TypePrepareStore, "a chunk beyond the last", "9c 0a 01 00 c400 c401aa 02 02 "+none)
	add(TypePrepareStore, "the body of version 4", "95 0a 01 00 c400 c401aa")
	const store = "9c 0a 01 00 c400 c401aa 01 00"
	add(TypePrepareStore, "the body of version 10", "97 0a 01 00 c400 c401aa 01 00")
	add(TypePrepareStore, "tenant above the limit", store+"d941"+rep("61", 65)+"00 00 00 00")
	add(TypePrepareStore, "tenant as bytes", store+"c40161 00 00 00 00")
	add(TypePrepareStore, "tenant not UTF-8", store+"a1ff 00 00 00 00")
	add(TypePrepareStore, "priority above 100", store+"a0 65 00 00 00")
	add(TypePrepareStore, "negative priority", store+"a0 ff 00 00 00")
	add(TypePrepareStore, "retained above 32 bits", store+"a0 00 cf0000000100000000 00 00")
	add(TypePrepareStore, "pinned above 32 bits", store+"a0 00 00 cf0000000100000000 00")
	add(TypePrepareStore, "uses above a byte", store+"a0 00 00 00 cd0100")
	add(TypePrepareStore, "trailing bytes", store+none+"00")
	add(TypeCommitStore, "zero store", "93 0c 00 90")
	add(TypeCommitStore, "indices out of order", "93 0c 01 92 02 01")
	add(TypeCommitStore, "duplicate index", "93 0c 01 92 02 02")
	add(TypeCommitStore, "indices bomb", "93 0c 01 dd ffffffff")
	add(TypeAbortStore, "zero store", "92 0d 00")
	add(TypePrepareLoad, "zero session", "98 14 01 00 01"+secret+"00 01"+names)
	add(TypePrepareLoad, "no pages", "98 14 01 01 01"+secret+"00 00"+names)
	add(TypePrepareLoad, "pages above the limit", "98 14 01 01 01"+secret+"00 ce00010001"+names)
	add(TypePrepareLoad, "pages wrap", "98 14 01 01 01"+secret+"ceffffffff 01"+names)
	add(TypePrepareLoad, "a short ticket", "98 14 01 01 01 c40f"+rep("5e", 15)+"00 01"+names)
	add(TypePrepareLoad, "short names", "98 14 01 01 01"+secret+"00 01 c410"+rep("00", 16))
	add(TypePrepareLoad, "the body of version 7", "96 14 01 01 01 00 01")
	add(TypeFetch, "no hash", "93 17 01 c400")
	add(TypeFetch, "a hash too long", "93 17 01 c421"+rep("5e", 33))
	add(TypeFetch, "a second hash", "94 17 01 c401 5e c401 5e")
	add(TypeContains, "no hashes", "96 18 01 00 c400 c400 00")
	add(TypeContains, "a page before the first", "96 18 01 00 c401 5e c401 5e 00")
	add(TypeContains, "half a hash", "96 18 01 01 c402 5e5e c403 5e5e5e 00")
	add(TypeContained, "half a count", "96 19 01 c401 5e c401 5e 00 00")
	add(TypeContained, "counts of two lengths", "96 19 01 c402 5e5e c400 00 00")
	add(TypeRelease, "zero load", "93 16 00 90")
	add(TypePing, "negative id", "92 1e d1ff00")
	add(TypeTrim, "zero session", "95 3e 00"+secret+"01 01")
	add(TypeTrim, "a short secret", "95 3e 01 c40f"+rep("5e", 15)+"01 01")
	add(TypeCancel, "trailing bytes", "94 3f 01"+secret+"01 c0")
	add(TypeCancel, "without a secret", "93 3f 01 01")
	advise := "9a 41 05" + secret
	add(TypeAdvise, "zero session", "9a 41 00"+secret+"00 c400 c401aa 01 00 00 a0")
	add(TypeAdvise, "a short secret", "9a 41 05 c40f"+rep("5e", 15)+"00 c400 c401aa 01 00 00 a0")
	add(TypeAdvise, "hashes empty", advise+"00 c400 c400 01 00 00 a0")
	add(TypeAdvise, "not whole hashes", advise+"07 c402aaaa c403aaaaaa 01 00 00 a0")
	add(TypeAdvise, "a hash before the first page", advise+"00 c401aa c401aa 01 00 00 a0")
	add(TypeAdvise, "zero action", advise+"00 c400 c401aa 00 00 00 a0")
	add(TypeAdvise, "an unknown action", advise+"00 c400 c401aa 05 00 00 a0")
	add(TypeAdvise, "a duration above 32 bits",
		advise+"00 c400 c401aa 01 cf0000000100000000 00 a0")
	add(TypeAdvise, "negative duration", advise+"00 c400 c401aa 01 ff 00 a0")
	add(TypeAdvise, "priority above 100", advise+"00 c400 c401aa 01 00 65 a0")
	add(TypeAdvise, "tenant above the limit", advise+"00 c400 c401aa 01 00 00 d941"+rep("61", 65))
	add(TypeAdvise, "tenant as bytes", advise+"00 c400 c401aa 01 00 00 c40161")
	add(TypeAdvise, "tenant declares 4 GiB", advise+"00 c400 c401aa 01 00 00 db ffffffff 61")
	add(TypeAdvise, "one field too few", "99 41 05"+secret+"00 c400 c401aa 01 00 00")
	add(TypeAdvise, "trailing bytes", advise+"00 c400 c401aa 01 00 00 a0 00")

	welcome := func(session, fp, rest string) string {
		return "9d 02 0e" + session + secret + "00" +
			fp + rest
	}
	add(TypeWelcome, "another version", "9a 02 02 01 00 c420"+digest+"a161 a0 00 01 01")
	add(TypeWelcome, "another version with another body", "93 02 0f c0")
	add(TypeWelcome, "zero session", welcome("00", "c420"+digest, "a161 a0 00 01 01 00 00"))
	add(TypeWelcome, "the body of version 9", "9c 02 0e 01"+secret+"00 c420"+digest+
		"a161 a0 00 01 01 00")
	add(TypeWelcome, "a flag of two", welcome("01", "c420"+digest, "a161 a0 00 01 01 00 02"))
	add(TypeWelcome, "short fingerprint",
		welcome("01", "c41f"+digest[2:], "a161 a0 00 01 01 00 00"))
	add(TypeWelcome, "fingerprint as a string",
		welcome("01", "d920"+digest, "a161 a0 00 01 01 00 00"))
	add(TypeWelcome, "endpoint above the limit", welcome("01", "c420"+digest,
		"da0401"+rep("61", 1025)+"a0 00 01 01 00 00"))
	add(TypeWelcome, "a short secret", "9d 02 0e 01 c40f"+rep("5e", 15)+"00 c420"+digest+
		"a161 a0 00 01 01 00 00")
	add(TypeRefuse, "another version", "97 03 02 a0 a0 a0 a0 a0")
	add(TypeRefuse, "code not UTF-8", "97 03 0e a1ff a0 a0 a0 a0")
	add(TypeStoreGrant, "grants without a store", "96 0b 01 00 00 00 91 94 00 01 00 00")
	add(TypeStoreGrant, "a store without grants", "96 0b 01 01 00 00 90")
	add(TypeStoreGrant, "an extent of three", "96 0b 01 01 00 00 91 93 00 01 00")
	add(TypeStoreGrant, "an extent of five", "96 0b 01 01 00 00 91 95 00 01 00 00 00")
	add(TypeStoreGrant, "an extent without pages", "96 0b 01 01 00 00 91 94 00 00 00 00")
	add(TypeStoreGrant, "an extent that wraps", "96 0b 01 01 00 00 91 94 ceffffffff 01 00 00")
	add(TypeStoreGrant, "a negative offset", "96 0b 01 01 00 00 91 94 00 01 00 ff")
	add(TypeStoreGrant, "an offset above 63 bits",
		"96 0b 01 01 00 00 91 94 00 01 00 cf8000000000000000")
	add(TypeStoreGrant, "grants bomb", "96 0b 01 01 00 00 dd ffffffff")
	add(TypeStoreGrant, "extent bomb", "96 0b 01 01 00 00 91 dd ffffffff")
	add(TypeLoadGrant, "zero load", "95 15 01 00"+names+"90")
	add(TypeLoadGrant, "short names", "95 15 01 01 c41f"+rep("00", 31)+"90")
	add(TypePong, "generation as a string", "93 1f 01 a131")
	add(TypeReadEvents, "no id", "91 22")
	add(TypeEvents, "a flag of two", "95 23 01 02 00 90")
	add(TypeEvents, "a run of one", "95 23 01 00 00 91 91 00")
	add(TypeEvents, "a run without hashes", "95 23 01 00 00 91 92 00 c400")
	add(TypeEvents, "hashes as a string", "95 23 01 00 00 91 92 00 a161")
	add(TypeEvents, "runs bomb", "95 23 01 00 00 dd ffffffff")
	add(TypePrefilled, "more found than there are", "97 24 05 06 04 00 00 00")
	add(TypePrefilled, "more loaded than there are", "97 24 05 05 06 00 00 00")
	add(TypePrefilled, "tokens above 32 bits", "97 24 cf0000000100000000 00 00 00 00 00")
	add(TypePrefilled, "own above 32 bits", "97 24 05 05 05 cf0000000100000000 00 00")
	add(TypePrefilled, "reason above 8 bits", "97 24 05 05 05 00 00 cd0100")
	add(TypePrefilled, "the body of version 11", "94 24 05 05 05")
	add(TypePrefilled, "negative tokens", "97 24 ff 00 00 00 00 00")
	add(TypeCleared, "chunks above 32 bits", "93 21 01 cf0000000100000000")
	add(TypeRegionAdded, "zero size", "98 28 00 00 a0 00 00 01 00")
	add(TypeRegionAdded, "size above 63 bits", "98 28 00 00 a0 00 cf8000000000000000 01 00")
	add(TypeRegionAdded, "zero page size", "98 28 00 00 a0 00 01 00 00")
	add(TypeRegionAdded, "page size above 63 bits", "98 28 00 00 a0 00 01 cf8000000000000000 00")
	add(TypeRegionAdded, "offset within a page", "98 28 00 00 a0 cd1001 cd1000 cd1000 00")
	add(TypeRegionAdded, "negative offset", "98 28 00 00 a0 ff 01 01 00")
	add(TypeRegionAdded, "offset above 63 bits", "98 28 00 00 a0 cf8000000000000000 01 01 00")
	add(TypeRegionAdded, "an end above 63 bits", "98 28 00 00 a0 cf7fffffffffffffff 01 01 00")
	add(TypeRegionAdded, "the body of version 2", "96 28 00 00 a0 cd1000 cd1000")
	add(TypeRegionAdded, "the body of version 3", "97 28 00 00 a0 00 cd1000 cd1000")
	add(TypeRegionAdded, "a flag of two", "98 28 00 00 a0 00 cd1000 cd1000 02")
	add(TypeRegionRemoved, "region above 32 bits", "92 29 cf0000000100000000")
	add(TypeRegionRemoved, "negative region", "92 29 ff")
	add(TypeRegionRemoved, "no region", "91 29")
	add(TypeRegionRemoved, "trailing bytes", "92 29 01 00")
	add(TypeRegionUnmapped, "region above 32 bits", "92 2a cf0000000100000000")
	add(TypeRegionUnmapped, "negative region", "92 2a ff")
	add(TypeRegionUnmapped, "region as a string", "92 2a a131")
	add(TypeRegionUnmapped, "one field too many", "93 2a 01 00")
	add(TypeRegionMapped, "region above 32 bits", "92 2b cf0000000100000000")
	add(TypeRegionMapped, "negative region", "92 2b ff")
	add(TypeRegionMapped, "region as a string", "92 2b a131")
	add(TypeRegionMapped, "no region", "91 2b")
	add(TypeNotice, "text that is a number", "92 2c 01")
	add(TypeNotice, "no text", "91 2c")
	add(TypeNotice, "text that is not UTF-8", "92 2c a1ff")
	add(TypeRegionsReady, "no number", "91 2d")
	add(TypeRegionsReady, "trailing bytes", "92 2d 01 00")
	add(TypeNameWeights, "no name", "91 2f")
	add(TypeNameWeights, "name as bytes", "92 2f c400")
	add(TypeNameWeights, "name that is not UTF-8", "92 2f a1ff")
	add(TypeNameWeights, "name above the limit", "92 2f da0101"+rep("61", 257))
	add(TypeNameWeights, "more than a name", "93 2f a161 01")
	add(TypeMoved, "no endpoints", "92 2e 01")
	add(TypeMoved, "negative generation", "94 2e ff a0 a0")
	add(TypeMoved, "endpoint as bytes", "94 2e 01 c400 a0")
	add(TypeMoved, "endpoint above the limit", "94 2e 01 da0401"+rep("61", 1025)+"a0")
	add(TypeError, "message as bytes", "94 32 01 a0 c400")
	add(TypeLookupResult, "hit pages above 32 bits", "9a 3d 06 cf0000000100000000 00 00 00 00 00 a0 00")
	add(TypeLookupResult, "negative hit", "9a 3d 06 ff 00 00 00 00 00 a0 00")
	add(TypeLookupResult, "trailing bytes", "9a 3d 06 04 40 00 00 00 00 a0 00 00")
	add(TypeLookupResult, "a float", "9a 3d 06 ca40800000 40 00 00 00 00 a0 00")
	add(TypeLookupResult, "in memory above one", "9a 3d 06 04 40 02 00 00 00 a0 00")
	add(TypeLookupResult, "reason above 8 bits", "9a 3d 06 04 40 00 cd0100 00 00 a0 00")
	add(TypeLookupResult, "sources above the limit", "9a 3d 06 04 40 00 00 00 00 da0100"+
		rep("61", 256)+"00")
	add(TypeLookupResult, "negative bytes", "9a 3d 06 04 40 00 00 00 00 a0 ff")
	add(TypeLookupResult, "in memory as a bool", "9a 3d 06 04 40 c3 00 00 00 a0 00")
	add(TypeLookupPending, "negative pages", "94 40 06 ff 14")
	add(TypeLookupPending, "eta above 32 bits", "94 40 06 04 cf0000000100000000")
	add(TypeLookupPending, "one field too few", "93 40 06 04")
	add(TypeLookupPending, "trailing bytes", "94 40 06 04 14 00")

	hello := func(version, generation string) string { return "93 46" + version + generation }
	add(TypePeerHello, "another version", hello("02", "01"))
	add(TypePeerHello, "another version with another body", "92 46 0f")
	add(TypePeerHello, "zero generation", hello("0e", "00"))
	add(TypePeerHello, "generation as bytes", hello("0e", "c40101"))
	add(TypePeerHello, "one field too many", "94 46 0e 01 00")
	add(TypePeerHello, "trailing bytes", hello("0e", "01 00"))
	add(TypePeerWelcome, "another version", "94 47 05 01 01")
	add(TypePeerWelcome, "zero generation", "94 47 0e 00 01")
	add(TypePeerWelcome, "no pages", "94 47 0e 01 00")
	add(TypePeerWelcome, "max pages above 32 bits", "94 47 0e 01 cf0000000100000000")
	const space = "97 48 c420"
	add(TypePeerSpace, "short fingerprint", "97 48 c41f"+digest[2:]+"10 cd1000 10 20 80")
	add(TypePeerSpace, "fingerprint above the limit", "97 48 c421"+digest+"00 10 cd1000 10 20 80")
	add(TypePeerSpace, "fingerprint as a string", "97 48 d920"+digest+"10 cd1000 10 20 80")
	add(TypePeerSpace, "zero page bytes", space+digest+"10 00 10 20 80")
	add(TypePeerSpace, "page bytes above 63 bits", space+digest+"10 cfffffffffffffffff 10 20 80")
	add(TypePeerSpace, "zero pages per chunk", space+digest+"10 cd1000 00 20 80")
	add(TypePeerSpace, "zero digest bytes", space+digest+"10 cd1000 10 00 80")
	add(TypePeerSpace, "digest bytes above 32", space+digest+"10 cd1000 10 21 80")
	add(TypePeerSpace, "fields out of order", space+digest+"10 cd1000 10 20 82 a162a131 a161a132")
	add(TypePeerSpace, "fields bomb", space+digest+"10 cd1000 10 20 df ffffffff")
	add(TypePeerPages, "zero seq", "95 49 00 01 00 c400")
	add(TypePeerPages, "begin above 1", "95 49 01 02 00 c400")
	add(TypePeerPages, "end as a boolean", "95 49 01 00 c3 c400")
	add(TypePeerPages, "not whole hints", "95 49 01 00 00 c407 00000000000000")
	add(TypePeerPages, "hints as an array", "95 49 01 00 00 91 01")
	add(TypePeerPages, "hints declare 4 GiB", "95 49 01 00 00 c6 ffffffff 00")
	add(TypePeerPages, "trailing bytes", "95 49 01 00 00 c400 00")
	const lease = "97 4a 01 c420"
	add(TypePeerLease, "the body of version 5", "96 4a 01 c420"+digest+"00 00 c40100")
	add(TypePeerLease, "hashes empty", lease+digest+"00 00 00 c400")
	add(TypePeerLease, "touch above 1", lease+digest+"00 02 00 c40100")
	add(TypePeerLease, "first page wraps", lease+digest+"ceffffffff 00 00 c40100")
	add(TypePeerLease, "pages wrap", lease+digest+"10 00 cefffffff0 c40100")
	add(TypePeerLease, "touch with pages", lease+digest+"00 01 01 c40100")
	add(TypePeerLease, "short fingerprint", "97 4a 01 c41f"+digest[2:]+"00 00 00 c40100")
	add(TypePeerLease, "hashes declare 4 GiB", lease+digest+"00 00 00 c6 ffffffff 00")
	add(TypePeerLease, "negative id", "97 4a ff c420"+digest+"00 00 00 c40100")
	add(TypePeerGrant, "the body of version 5", "96 4b 01 00 00 00 90")
	add(TypePeerGrant, "extents without a load", "97 4b 01 00 01 00 00 91 94 00 01 00 00")
	add(TypePeerGrant, "a load without extents", "97 4b 01 01 01 00 00 90")
	add(TypePeerGrant, "more above 1", "97 4b 01 00 00 02 00 90")
	add(TypePeerGrant, "soon above 1", "97 4b 01 00 00 01 02 90")
	add(TypePeerGrant, "soon without more", "97 4b 01 00 00 00 01 90")
	add(TypePeerGrant, "extents bomb", "97 4b 01 01 01 00 00 dd ffffffff")
	add(TypePeerGrant, "a negative offset", "96 4b 01 01 01 00 91 94 00 01 00 ff")
	add(TypePeerRelease, "extents without a load", "94 4c 00 91 00 00")
	add(TypePeerRelease, "bad without a load", "94 4c 00 90 01")
	add(TypePeerRelease, "indices out of order", "94 4c 01 92 02 01 00")
	add(TypePeerRelease, "indices bomb", "94 4c 01 dd ffffffff")
	add(TypePeerRelease, "bad above 1", "94 4c 01 90 02")
	add(TypeTierHello, "another version", "94 5a 02 a174 00")
	add(TypeTierHello, "another version, and other fields", "92 5a 02")
	add(TypeTierHello, "more descriptors than may travel", "94 5a 01 a174 09")
	add(TypeTierHello, "trailing bytes", "94 5a 01 a174 00 00")
	add(TypeTierWelcome, "another version", "95 5b 02 a174 01 01")
	add(TypeTierWelcome, "no items", "95 5b 01 a174 00 01")
	add(TypeTierWelcome, "no calls", "95 5b 01 a174 01 00")
	add(TypeTierWelcome, "too many items", "95 5b 01 a174 cd1001 01")
	add(TypeTierWelcome, "too many calls", "95 5b 01 a174 01 cd0401")
	add(TypeTierWelcome, "name bomb", "95 5b 01 dbffffffff")
	add(TypeTierRefuse, "another version", "93 5c 02 a0")
	add(TypeTierRefuse, "text as bytes", "93 5c 01 c400")
	add(TypeTierRegion, "no size", "96 5d 01 a174 00 00 01")
	add(TypeTierRegion, "no page", "96 5d 01 a174 01 00 00")
	add(TypeTierRegion, "offset above 63 bits", "96 5d 01 a174 01 cf8000000000000000 01")
	add(TypeTierRegionReady, "negative region", "93 5e ff a0")
	add(TypeTierRegionReady, "one field too few", "92 5e 01")
	add(TypeTierRegionReady, "text above the limit", "93 5e 01 da0401"+rep("61", 1025))
	add(TypeTierRegionGone, "region above 32 bits", "92 5f cf0000000100000000")
	add(TypeTierRegionLeft, "a negative region", "92 60 ff")
	add(TypeTierRegionLeft, "trailing bytes", "92 60 01 00")
	add(TypeTierContains, "no keys", "93 61 01 90")
	add(TypeTierContains, "an empty key", "93 61 01 91 c400")
	add(TypeTierContains, "a key above the limit", "93 61 01 91 c50100"+rep("00", 256))
	add(TypeTierContains, "no id", "93 61 00 91 c40100")
	add(TypeTierContains, "keys bomb", "93 61 01 ddffffffff")
	add(TypeTierPut, "no items", "93 62 01 90")
	add(TypeTierPut, "an item without memory", "93 62 01 91 92 c40100 90")
	add(TypeTierPut, "a piece of no bytes", "93 62 01 91 92 c40100 91 93 00 00 00")
	add(TypeTierPut, "a piece of two numbers", "93 62 01 91 92 c40100 91 92 00 00")
	add(TypeTierPut, "too many pieces", "93 62 01 91 92 c40100 99"+rep("93000001", 9))
	add(TypeTierPut, "a negative offset", "93 62 01 91 92 c40100 91 93 00 ff 01")
	add(TypeTierGet, "an item of three", "93 63 01 91 93 c40100 91 93 00 00 01 00")
	add(TypeTierGet, "items bomb", "93 63 01 dcffff")
	add(TypeTierDrop, "no keys", "93 64 01 90")
	add(TypeTierClear, "a prefix above the limit", "93 65 01 c50100"+rep("00", 256))
	add(TypeTierStats, "no id", "92 66 00")
	add(TypeTierCancel, "no id", "92 67 00")
	for _, t := range []struct {
		t    Type
		good string
	}{{TypeTierDone, "68 01 91 92 00 00 a0"}, {TypeTierCleared, "69 01 05 a0"},
		{TypeTierFigures, "6a 01 00 00 00 00 a0 a0"}} {
		n := map[Type]int{TypeTierDone: 4, TypeTierCleared: 4, TypeTierFigures: 8}[t.t]
		add(t.t, "empty", "")
		add(t.t, "one field too many", fmt.Sprintf("%02x", 0x90+n+1)+t.good+"00")
		add(t.t, "one field too few", fmt.Sprintf("%02x", 0x90+n-1)+t.good[:len(t.good)-2])
		add(t.t, "trailing bytes", fmt.Sprintf("%02x", 0x90+n)+t.good+"00")
		add(t.t, "array bomb of 5 bytes", "dd ffffffff")
		add(t.t, "nesting", rep("91", 1024))
		add(t.t, "no id", fmt.Sprintf("%02x", 0x90+n)+strings.Replace(t.good, "01", "00", 1))
		add(t.t, "a pickle", hexOf("\x80\x04\x8c\x05posix\x94R\x94."))
	}
	add(TypeTierDone, "no results", "94 68 01 90 a0")
	add(TypeTierDone, "results bomb", "94 68 01 ddffffffff")
	add(TypeTierDone, "an unknown status", "94 68 01 91 92 00 05 a0")
	add(TypeTierDone, "a result of three", "94 68 01 91 93 00 00 00 a0")
	add(TypeTierDone, "a negative index", "94 68 01 91 92 ff 00 a0")
	add(TypeTierFigures, "capacity above 63 bits", "98 6a 01 cf8000000000000000 00 00 00 a0 a0")
	add(TypeTierFigures, "not UTF-8", "98 6a 01 00 00 00 00 a1ff a0")
	add(TypeReach, "another version", "93 50 05 a161")
	add(TypeReach, "no address", "93 50 @@ a0")
	add(TypeReach, "address as bytes", "93 50 @@ c40161")
	add(TypeReach, "address above the limit", "93 50 @@ da0401"+rep("61", 1025))
	add(TypeReach, "address bomb", "93 50 @@ dbffffffff")
	add(TypeReach, "trailing bytes", "93 50 @@ a161 00")
	add(TypeHostsChallenge, "another version", "94 51 05 c420"+digest+"00")
	add(TypeHostsChallenge, "short nonce", "94 51 @@ c41f"+digest[2:]+"00")
	add(TypeHostsChallenge, "nonce above its length", "94 51 @@ c421"+digest+"00 00")
	add(TypeHostsChallenge, "token above 1", "94 51 @@ c420"+digest+"02")
	add(TypeHostsChallenge, "one field too few", "93 51 @@ c420"+digest)
	add(TypeHostsProof, "short proof", "94 52 c420"+digest+"01 c41f"+digest[2:])
	add(TypeHostsProof, "proof as a string", "94 52 c420"+digest+"01 d920"+digest)
	add(TypeHostsProof, "token as a bool", "94 52 c420"+digest+"c3 c420"+digest)
	add(TypeHostsProof, "nonce bomb", "94 52 c6ffffffff 01 c420"+digest)
	add(TypeHostsAccept, "empty proof", "92 53 c400")
	add(TypeHostsAccept, "proof bomb", "92 53 c6ffffffff")
	add(TypeHostsAccept, "trailing bytes", "92 53 c420"+digest+"00")
	return out
}

// wideMessages are valid and not the shortest form.
func wideMessages(t *testing.T) []vector {
	one := func(name string, m Message, h string) vector {
		h = strings.ReplaceAll(h, " ", "")
		return vector{Name: name, Type: m.Type().String(), To: receiver(m.Type()),
			Message: toJSON(t, m), Hex: h, Valid: true, Why: "integers and lengths of any width"}
	}
	return []vector{
		one("ping wide", &Ping{ID: 5}, "dc0002 cc1e cf0000000000000005"),
		one("ping signed", &Ping{ID: 5}, "dd00000002 d01e d30000000000000005"),
		one("pong wide", &Pong{ID: 5, Generation: 1}, "dc0003 cd001f ce00000005 d10001"),
		one("lookup wide", &Lookup{Session: 1, Secret: make([]byte, 16), Lookup: 2, FirstPage: 3,
			Prev: []byte{0xbb}, Hashes: []byte{0xaa}, DeadlineMs: 4, RecomputeUs: 5,
			Tenant: Label("t"), Request: Label("r")},
			"9b 3c d200000001 c5 0010"+strings.Repeat("00", 16)+
				"cc02 03 c5 0001 bb c6 00000001 aa 04 cd0005 d901 74 da0001 72"),
		one("error wide", &Error{ID: 1, Code: "a", Message: "b"}, "94 32 01 d901 61 db00000001 62"),
		one("peer lease wide", &PeerLease{ID: 1, Fingerprint: make([]byte, 32), FirstPage: 2,
			Touch: true, Hashes: []byte{0xaa}}, "dc0007 cc4a cd0001 c5 0020"+strings.Repeat("00",
			32)+"cc02 d001 cd0000 c6 00000001 aa"),
		one("tier done wide", &TierDone{ID: 1, Results: []TierResult{{0, TierMissing}}},
			"94 68 d001 dc0001 dc0002 cc00 cd0001 d900"),
		one("store grant wide", &StoreGrant{ID: 1, Store: 1, Grants: []Extent{{0, 1, 0, 0}}},
			"96 0b 01 01 00 00 dc0001 dd00000004 00 cc01 00 00"),
	}
}

// toJSON turns a message into what the vectors hold: names as in Python, bytes in hex.
func toJSON(t *testing.T, m any) map[string]any {
	t.Helper()
	v := reflect.ValueOf(m)
	if v.Kind() == reflect.Pointer {
		v = v.Elem()
	}
	out := map[string]any{}
	for i := range v.NumField() {
		name := snake(v.Type().Field(i).Name)
		switch f := v.Field(i).Interface().(type) {
		case Label:
			out[name] = string(f)
		case Hints: // its fields are the message's
			maps.Copy(out, toJSON(t, f))
		case []byte:
			out[name] = hex.EncodeToString(f)
		case []Field:
			fields := map[string]any{}
			for _, e := range f {
				fields[e.Key] = e.Value
			}
			out[name] = fields
		case []Extent:
			list := []any{}
			for _, e := range f {
				list = append(list, toJSON(t, e))
			}
			out[name] = list
		case [][]byte:
			list := []any{}
			for _, e := range f {
				list = append(list, hex.EncodeToString(e))
			}
			out[name] = list
		case []TierItem:
			list := []any{}
			for i := range f {
				list = append(list, toJSON(t, &f[i]))
			}
			out[name] = list
		case []TierPiece:
			list := []any{}
			for i := range f {
				list = append(list, toJSON(t, &f[i]))
			}
			out[name] = list
		case []TierResult:
			list := []any{}
			for i := range f {
				list = append(list, toJSON(t, &f[i]))
			}
			out[name] = list
		case []Run:
			list := []any{}
			for _, e := range f {
				list = append(list, toJSON(t, e))
			}
			out[name] = list
		case []uint32:
			list := []any{}
			for _, e := range f {
				list = append(list, e)
			}
			out[name] = list
		default:
			out[name] = f
		}
	}
	return out
}

func snake(name string) string {
	if name == "SizeBytes" {
		return "size"
	}
	var b strings.Builder
	for i, c := range name {
		if unicode.IsUpper(c) && i > 0 && !unicode.IsUpper(rune(name[i-1])) {
			b.WriteByte('_')
		}
		b.WriteRune(unicode.ToLower(c))
	}
	return b.String()
}

// allVectors are those in a file.
func allVectors(t *testing.T, file string) []vector {
	var out []vector
	for _, g := range goodMessages() {
		out = append(out, vector{
			Name: g.name, Type: g.m.Type().String(), To: receiver(g.m.Type()),
			Message: toJSON(t, g.m),
			Hex:     hex.EncodeToString(g.m.Append(nil)), Valid: true, Canonical: true,
		})
	}
	out = append(append(out, wideMessages(t)...), badMessages()...)
	return slices.DeleteFunc(out, func(v vector) bool { return fileOf(v.To) != file })
}

// fileOf returns the file with the messages to a receiver.
func fileOf(to string) string {
	switch to {
	case "lender", "borrower":
		return peersFile
	case "caller", "answerer":
		return hostsFile
	case "program", "tier":
		return tierFile
	}
	return vectorsFile
}

// golden compares a file with what it should hold, or writes it.
func golden(t *testing.T, file string, content any) {
	t.Helper()
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", " ")
	if err := enc.Encode(content); err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile(file, b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(have, b.Bytes()) {
		t.Fatalf("%s is not what the tests generate: run go test ./ipc/wire -update and look at the difference", file)
	}
}
