package wire

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"math"
	"math/rand/v2"
	"os"
	"reflect"
	"runtime"
	"strings"
	"testing"

	"github.com/vmihailenco/msgpack/v5"
)

func TestGolden(t *testing.T) {
	var vectors []vector
	for _, file := range []string{vectorsFile, peersFile, hostsFile, tierFile} {
		golden(t, file, allVectors(t, file))
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var some []vector
		dec := json.NewDecoder(bytes.NewReader(b))
		dec.UseNumber() // 64-bit integers do not fit a float
		if err := dec.Decode(&some); err != nil {
			t.Fatal(err)
		}
		vectors = append(vectors, some...)
	}
	types := map[string]Type{}
	for typ, k := range kinds {
		types[k.name] = typ
	}
	seen := map[Type]bool{}
	for _, v := range vectors {
		t.Run(v.Name, func(t *testing.T) {
			raw, err := hex.DecodeString(v.Hex)
			if err != nil {
				t.Fatal(err)
			}
			m := New(types[v.Type])
			err = m.Decode(raw, &DefaultLimits)
			if !v.Valid {
				if err == nil {
					t.Fatalf("accepted: %+v", m)
				}
				wantVersion := strings.Contains(v.Why, "another version") ||
					v.Why == "version above 16 bits"
				if errors.Is(err, ErrVersion) != wantVersion ||
					errors.Is(err, ErrMalformed) == wantVersion {
					t.Fatalf("refused by the wrong kind of error: %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			seen[m.Type()] = true
			if typ, err := Peek(raw); err != nil || typ != m.Type() {
				t.Fatalf("Peek: %v, %v", typ, err)
			}
			want, _ := json.Marshal(v.Message)
			if got, _ := json.Marshal(toJSON(t, m)); !bytes.Equal(got, want) {
				t.Fatalf("decoded %s, want %s", got, want)
			}
			if v.Canonical && !bytes.Equal(m.Append(nil), raw) {
				t.Fatalf("encoded %x, want %x", m.Append(nil), raw)
			}
			// Every prefix is cut short somewhere, and must be refused.
			for n := range raw {
				if New(m.Type()).Decode(raw[:n], &DefaultLimits) == nil {
					t.Fatalf("accepted the first %d of %d bytes", n, len(raw))
				}
			}
		})
	}
	for typ := range kinds {
		if !seen[typ] {
			t.Errorf("no golden message of type %v", typ)
		}
	}
}

// Refusing costs constant memory, whatever a length declares.
func TestRefusingAllocatesLittle(t *testing.T) {
	for _, v := range badMessages() {
		raw, _ := hex.DecodeString(v.Hex)
		var m Message
		for typ, k := range kinds {
			if k.name == v.Type {
				m = New(typ)
			}
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_ = m.Decode(raw, &DefaultLimits)
		runtime.ReadMemStats(&after)
		if n := after.TotalAlloc - before.TotalAlloc; n > 64<<10 {
			t.Errorf("%s: allocated %d bytes", v.Name, n)
		}
	}
}

func TestLimits(t *testing.T) {
	lim := DefaultLimits
	lim.Pages, lim.Extents = 4, 3
	lookup := Lookup{Session: 1, Secret: make([]byte, SecretBytes),
		Hashes: make([]byte, 4*MaxDigestBytes)}
	store := PrepareStore{Hashes: make([]byte, 4*MaxDigestBytes)}
	load := PrepareLoad{Session: 1, Ticket: make([]byte, TicketBytes), Pages: 4,
		Names: make([]byte, NamesBytes)}
	commit := CommitStore{Store: 1, Failed: []uint32{1, 2, 3}}
	grant := LoadGrant{Load: 1, Names: make([]byte, NamesBytes), Extents: manyExtents(3)}
	for _, c := range []struct {
		m    Message
		grow func()
	}{
		{&lookup, func() { lookup.Hashes = append(lookup.Hashes, 0) }},
		{&store, func() { store.Hashes = append(store.Hashes, 0) }},
		{&load, func() { load.Pages++ }},
		{&commit, func() { commit.Failed = append(commit.Failed, 4) }},
		{&grant, func() { grant.Extents = manyExtents(4) }},
	} {
		if err := New(c.m.Type()).Decode(c.m.Append(nil), &lim); err != nil {
			t.Errorf("at the limit: %v", err)
		}
		c.grow()
		if err := New(c.m.Type()).Decode(c.m.Append(nil), &lim); !errors.Is(err, ErrMalformed) {
			t.Errorf("above the limit, %v: %v", c.m.Type(), err)
		}
	}
}

// What the encoder of one side may send, the packet limit must have room for.
func TestPacketLimits(t *testing.T) {
	worst := Extent{Page: math.MaxUint32 - 1, Pages: 1 << 30, Region: math.MaxUint32,
		Offset: math.MaxInt64}
	grant := StoreGrant{ID: math.MaxUint32, Store: math.MaxUint64, Held: math.MaxUint32,
		Shed: math.MaxUint32}
	for range MaxExtents {
		grant.Grants = append(grant.Grants, worst)
	}
	if n := len(grant.Append(nil)); n > MaxPacketBytes {
		t.Errorf("a grant of MaxExtents has %d bytes", n)
	}
	for _, size := range []int{8, 16, 32} {
		n := MaxStorePages(size)
		store := PrepareStore{ID: math.MaxUint32, FirstPage: 1 << 31, Prev: make([]byte, size),
			Hashes: make([]byte, n*size), Every: math.MaxUint32, Which: math.MaxUint32 - 1,
			Tenant: make(Label, MaxTenantBytes), Hints: Hints{Priority: MaxPriority,
				RetainMs: math.MaxUint32, PinMs: math.MaxUint32, FromUse: math.MaxUint8}}
		if got := len(store.Append(nil)); got > MaxPacketBytes || n > MaxExtents {
			t.Errorf("a store of %d pages of %d bytes has %d bytes", n, size, got)
		}
	}
	for _, size := range []int{8, 16, 32} {
		n := MaxLeasePages(size)
		lease := PeerLease{ID: math.MaxUint32, Fingerprint: make([]byte, FingerprintBytes),
			FirstPage: 1 << 31, Pages: 1 << 30, Hashes: make([]byte, n*size)}
		if got := len(lease.Append(nil)); got > MaxPacketBytes || n > MaxExtents {
			t.Errorf("a lease of %d pages of %d bytes has %d bytes", n, size, got)
		}
	}
	peerGrant := PeerGrant{ID: math.MaxUint32, Load: math.MaxUint64, Pages: math.MaxUint32,
		More: true, Extents: grant.Grants}
	if n := len(peerGrant.Append(nil)); n > MaxPacketBytes {
		t.Errorf("a peer's grant of MaxExtents has %d bytes", n)
	}
	release := PeerRelease{Load: math.MaxUint64, Extents: make([]uint32, MaxExtents), Bad: true}
	for i := range release.Extents {
		release.Extents[i] = math.MaxUint32 - MaxExtents + uint32(i)
	}
	if n := len(release.Append(nil)); n > MaxPacketBytes {
		t.Errorf("a release of MaxExtents has %d bytes", n)
	}
	pages := PeerPages{Seq: math.MaxUint64, Begin: true, End: true,
		Hints: make([]byte, 8*MaxBatchHints)}
	if n := len(pages.Append(nil)); n > MaxPacketBytes {
		t.Errorf("pages of MaxBatchHints have %d bytes", n)
	}
	space := PeerSpace{Fingerprint: make([]byte, 32), PageTokens: math.MaxUint32,
		PageBytes: math.MaxInt64, PagesPerChunk: math.MaxUint32, DigestBytes: 32}
	for i := range DefaultLimits.Fields {
		key := strings.Repeat("k", DefaultLimits.FieldKeyBytes-2) + string(rune('A'+i/10)) +
			string(rune('0'+i%10))
		space.Fields = append(space.Fields,
			Field{key, strings.Repeat("v", DefaultLimits.FieldValueBytes)})
	}
	if raw := space.Append(nil); len(raw) > MaxPacketBytes ||
		new(PeerSpace).Decode(raw, &DefaultLimits) != nil {
		t.Errorf("the longest space has %d bytes", len(raw))
	}
	if MaxStorePages(0) != 0 || MaxLeasePages(0) != 0 {
		t.Error("pages of no hash")
	}
	l := DefaultLimits
	lookup := Lookup{Session: math.MaxUint64, Secret: make([]byte, SecretBytes),
		Lookup: math.MaxUint64, FirstPage: math.MaxUint32, DeadlineMs: math.MaxUint32,
		RecomputeUs: math.MaxUint32,
		Prev:        make([]byte, MaxDigestBytes), Hashes: make([]byte, l.Pages*MaxDigestBytes),
		Tenant: make(Label, MaxTenantBytes)}
	if n := len(lookup.Append(nil)); n > l.MessageBytes() {
		t.Errorf("the longest lookup has %d bytes, above %d", n, l.MessageBytes())
	}
	advise := Advise{Session: math.MaxUint64, Secret: lookup.Secret, FirstPage: math.MaxUint32,
		Prev: lookup.Prev, Hashes: lookup.Hashes, Action: AdviseDemote, Ms: math.MaxUint32,
		Priority: MaxPriority, Tenant: lookup.Tenant}
	if n := len(advise.Append(nil)); n > l.MessageBytes() {
		t.Errorf("the longest advice has %d bytes, above %d", n, l.MessageBytes())
	}
}

func TestErrorTextIsClipped(t *testing.T) {
	long := strings.Repeat("é", 2000)
	refuse := Refuse{Code: RefuseLimit, Field: "a\xffb", Want: long, Got: "x" + long, Message: long}
	var got Refuse
	if err := got.Decode(refuse.Append(nil), &DefaultLimits); err != nil {
		t.Fatal(err)
	}
	if got.Field != "a\uFFFDb" || got.Want != long[:1024] || got.Got != ("x" + long)[:1023] {
		t.Fatalf("%q %d %d", got.Field, len(got.Want), len(got.Got))
	}
}

// random returns a valid message of a type.
func random(r *rand.Rand, typ Type) Message {
	u64 := func() uint64 { return r.Uint64() >> r.IntN(64) }
	id := func() uint64 { return u64() | 1 }
	u32 := func() uint32 { return r.Uint32() >> r.IntN(32) }
	text := func() string {
		n := []int{0, 3, 31, 32, 255, 256}[r.IntN(6)]
		return strings.Repeat(string(rune('a'+r.IntN(26))), n)
	}
	tenant := func() Label {
		return Label(strings.Repeat(string(rune('a'+r.IntN(26))), r.IntN(MaxTenantBytes+1)))
	}
	raw := func(n int) []byte {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		return b
	}
	keys := func() [][]byte {
		out := make([][]byte, 1+r.IntN(40))
		for i := range out {
			out[i] = raw(1 + r.IntN(MaxTierKeyBytes))
		}
		return out
	}
	items := func() []TierItem {
		out := make([]TierItem, 1+r.IntN(40))
		for i := range out {
			out[i] = TierItem{raw(1 + r.IntN(MaxTierKeyBytes)),
				make([]TierPiece, 1+r.IntN(MaxTierPieces))}
			for j := range out[i].Pieces {
				out[i].Pieces[j] = TierPiece{u32(), u64() >> 1, 1 + u64()>>2}
			}
		}
		return out
	}
	indices := func() []uint32 {
		var out []uint32
		for v := uint32(r.IntN(3)); len(out) < r.IntN(40); v += 1 + u32()>>8 {
			out = append(out, v)
		}
		return out
	}
	extents := func() []Extent {
		out := make([]Extent, 1+r.IntN(40))
		for i := range out {
			out[i] = Extent{Page: u32() >> 1, Pages: 1 + u32()>>2, Region: u32(),
				Offset: u64() >> 1}
		}
		return out
	}
	switch typ {
	case TypeHello:
		m := &Hello{Version: Version, Role: []string{RoleScheduler, RoleWorker}[r.IntN(2)],
			EngineID: text(), Rank: u32() >> 1, Ranks: 1, PageTokens: 1 | u32(),
			PageBytes: 1 | u64()>>1, PagesPerChunk: 1 | u32(), DigestBytes: uint8(1 + r.IntN(32))}
		if m.Role == RoleScheduler {
			m.Ranks, m.Direct = 1|u32()>>1, r.IntN(2) == 1
		} else {
			m.Held = uint32(r.IntN(MaxHeldFDs + 1))
		}
		for i := range r.IntN(40) {
			m.Fields = append(m.Fields, Field{string(rune('A' + i)), text()})
		}
		for i := range r.IntN(MaxAbout + 1) {
			m.About = append(m.About, Field{string(rune('A' + i)), text()})
		}
		return m
	case TypeWelcome:
		return &Welcome{Version: Version, Session: id(), Secret: raw(16), Generation: u64(),
			Fingerprint: raw(32), LookupEndpoint: text(), ReplyEndpoint: text(), Regions: u32(),
			MaxPages: u32(), LeaseMs: u32(), Peers: u64(), Preparing: r.IntN(2) == 1}
	case TypeRefuse:
		return &Refuse{Version: Version, Code: text(), Field: text(), Want: text(), Got: text(),
			Message: text()}
	case TypePrepareStore:
		size := []int{8, 16, 32}[r.IntN(3)]
		m := &PrepareStore{ID: u32(), FirstPage: u32() >> 1, Prev: raw(size),
			Hashes: raw(size * (1 + r.IntN(3000))), Every: 1 | u32(),
			Tenant: tenant(), Hints: Hints{Priority: uint8(r.IntN(MaxPriority + 1)),
				RetainMs: u32(), PinMs: u32(), FromUse: uint8(r.Uint32())}}
		m.Which = u32() % m.Every
		if m.FirstPage == 0 {
			m.Prev = []byte{}
		}
		return m
	case TypeStoreGrant:
		return &StoreGrant{ID: u32(), Store: id(), Held: u32(), Shed: u32(), Grants: extents()}
	case TypeCommitStore:
		return &CommitStore{Store: id(), Failed: indices()}
	case TypeAbortStore:
		return &AbortStore{Store: id()}
	case TypePrepareLoad:
		return &PrepareLoad{ID: u32(), Session: id(), Lookup: u64(), Ticket: raw(16),
			FirstPage: u32() >> 1, Pages: 1 + uint32(r.IntN(65536)), Names: raw(32)}
	case TypeLoadGrant:
		return &LoadGrant{ID: u32(), Load: id(), Names: raw(32), Extents: extents()}
	case TypeFetch:
		return &Fetch{ID: u32(), Hash: raw(32)}
	case TypeContains:
		m := &Contains{ID: u32(), FirstPage: u32() >> 1, Prev: raw(16), Hashes: raw(16 * 48),
			WaitMs: u32()}
		if m.FirstPage == 0 {
			m.Prev = []byte{}
		}
		return m
	case TypeContained:
		return &Contained{ID: u32(), Held: raw(64), Below: raw(64), Waiting: u32(), Tiers: 3}
	case TypeRelease:
		return &Release{Load: id(), Bad: indices()}
	case TypePing:
		return &Ping{ID: u32()}
	case TypePong:
		return &Pong{ID: u32(), Generation: u64()}
	case TypeClearSpace:
		return &ClearSpace{ID: u32()}
	case TypeCleared:
		return &Cleared{ID: u32(), Chunks: u32()}
	case TypeReadEvents:
		return &ReadEvents{ID: u32()}
	case TypeEvents:
		m := &Events{ID: u32(), Reset: r.IntN(2) == 0, More: r.IntN(2) == 0}
		for range r.IntN(30) {
			m.Runs = append(m.Runs, Run{r.IntN(2) == 0, raw(32 * (1 + r.IntN(100)))})
		}
		return m
	case TypePrefilled:
		n := u32()
		return &Prefilled{Tokens: n, Found: n >> 1, Loaded: n >> 2, Own: u32()}
	case TypeRegionAdded:
		page := 1 + u64()>>40
		return &RegionAdded{Region: u32(), Generation: u64(), Kind: text(),
			Offset: u64() >> 2 / page * page, SizeBytes: 1 | u64()>>2, PageSize: page,
			ReadOnly: r.IntN(2) == 0}
	case TypeRegionRemoved:
		return &RegionRemoved{Region: u32()}
	case TypeRegionUnmapped:
		return &RegionUnmapped{Region: u32()}
	case TypeRegionMapped:
		return &RegionMapped{Region: u32()}
	case TypeRegionsReady:
		return &RegionsReady{Regions: u32()}
	case TypeMoved:
		return &Moved{Generation: u64(), LookupEndpoint: text(), ReplyEndpoint: text()}
	case TypeNameWeights:
		return &NameWeights{Epoch: text()}
	case TypeNotice:
		return &Notice{Text: text()}
	case TypeError:
		return &Error{ID: u32(), Code: text(), Message: text()}
	case TypeLookup:
		size := []int{8, 16, 32}[r.IntN(3)]
		m := &Lookup{Session: id(), Secret: raw(16), Lookup: u64(), FirstPage: u32() >> 1,
			Prev: raw(size), Hashes: raw(size * (1 + r.IntN(5000))), DeadlineMs: u32(),
			RecomputeUs: u32(), Tenant: tenant()}
		if m.FirstPage == 0 || r.IntN(3) == 0 {
			m.Prev = []byte{}
		}
		return m
	case TypeLookupResult:
		return &LookupResult{Lookup: u64(), HitPages: u32(), HitTokens: u32(),
			InMemory: r.IntN(2) == 1, Reason: uint8(r.IntN(256)), TookUs: u32(), BeganUs: u32(),
			Sources: tenant(), HitBytes: u64()}
	case TypeTrim:
		return &Trim{Session: id(), Secret: raw(16), Lookup: u64(), FirstPage: u32()}
	case TypeCancel:
		return &Cancel{Session: id(), Secret: raw(16), Lookup: u64()}
	case TypeAdvise:
		return &Advise{Session: id(), Secret: raw(16), FirstPage: 1 | u32()>>1, Prev: raw(32),
			Hashes: raw(32 * (1 + r.IntN(5000))), Action: Action(1 + r.IntN(4)), Ms: u32(),
			Priority: uint8(r.IntN(MaxPriority + 1)), Tenant: tenant()}
	case TypeLookupPending:
		return &LookupPending{Lookup: u64(), Pages: u32(), EtaMs: u32()}
	case TypePeerHello:
		return &PeerHello{Version: Version, Generation: id()}
	case TypePeerWelcome:
		return &PeerWelcome{Version: Version, Generation: id(), MaxPages: 1 | u32()}
	case TypePeerSpace:
		m := &PeerSpace{Fingerprint: raw(32), PageTokens: u32(), PageBytes: 1 | u64()>>1,
			PagesPerChunk: 1 | u32(), DigestBytes: uint8(1 + r.IntN(32))}
		for i := range r.IntN(40) {
			m.Fields = append(m.Fields, Field{string(rune('A' + i)), text()})
		}
		return m
	case TypePeerPages:
		return &PeerPages{Seq: id(), Begin: r.IntN(2) == 0, End: r.IntN(2) == 0,
			Hints: raw(8 * r.IntN(3000))}
	case TypePeerLease:
		m := &PeerLease{ID: u32(), Fingerprint: raw(32), FirstPage: u32() >> 1,
			Touch: r.IntN(2) == 0, Hashes: raw(1 + r.IntN(100000))}
		if !m.Touch {
			m.Pages = u32() >> 1
		}
		return m
	case TypePeerGrant:
		return &PeerGrant{ID: u32(), Load: id(), Pages: u32(), More: r.IntN(2) == 0,
			Extents: extents()}
	case TypePeerRelease:
		return &PeerRelease{Load: id(), Extents: indices(), Bad: r.IntN(2) == 0}
	case TypeReach:
		return &Reach{Version: Version, Address: "a" + text()}
	case TypeHostsChallenge:
		return &HostsChallenge{Version: Version, Nonce: raw(32), Token: r.IntN(2) == 0}
	case TypeHostsProof:
		return &HostsProof{Nonce: raw(32), Token: r.IntN(2) == 0, Proof: raw(32)}
	case TypeHostsAccept:
		return &HostsAccept{Proof: raw(32)}
	case TypeTierHello:
		return &TierHello{Version: TierVersion, Tier: text(), Holds: uint8(r.IntN(9))}
	case TypeTierWelcome:
		return &TierWelcome{Version: TierVersion, Program: text(), MaxItems: 1 + u32()>>20,
			MaxCalls: 1 + u32()>>22}
	case TypeTierRefuse:
		return &TierRefuse{Version: TierVersion, Message: text()}
	case TypeTierRegion:
		return &TierRegion{Region: u32(), Kind: text(), SizeBytes: 1 + u64()>>2,
			Offset: u64() >> 1, PageSize: 1 + u64()>>2}
	case TypeTierRegionReady:
		return &TierRegionReady{Region: u32(), Error: text()}
	case TypeTierRegionGone:
		return &TierRegionGone{Region: u32()}
	case TypeTierRegionLeft:
		return &TierRegionLeft{Region: u32()}
	case TypeTierContains:
		return &TierContains{ID: id(), Keys: keys()}
	case TypeTierPut:
		return &TierPut{ID: id(), Items: items()}
	case TypeTierGet:
		return &TierGet{ID: id(), Items: items()}
	case TypeTierDrop:
		return &TierDrop{ID: id(), Keys: keys()}
	case TypeTierClear:
		return &TierClear{ID: id(), Prefix: raw(r.IntN(MaxTierKeyBytes + 1))}
	case TypeTierStats:
		return &TierStats{ID: id()}
	case TypeTierCancel:
		return &TierCancel{ID: id()}
	case TypeTierDone:
		m := &TierDone{ID: id(), Results: make([]TierResult, 1+r.IntN(40)), Text: text()}
		for i := range m.Results {
			m.Results[i] = TierResult{u32(), uint8(r.IntN(5))}
		}
		return m
	case TypeTierCleared:
		return &TierCleared{ID: id(), Keys: u64(), Error: text()}
	case TypeTierFigures:
		return &TierFigures{ID: id(), CapacityBytes: u64() >> 1, UsedBytes: u64() >> 1,
			Keys: u64(), Evictions: u64(), Problem: text(), Detail: text()}
	}
	return nil
}

// oracle encodes a message with msgpack/v5.
func oracle(t *testing.T, m Message) []byte {
	t.Helper()
	var b bytes.Buffer
	enc := msgpack.NewEncoder(&b)
	enc.UseCompactInts(true)
	enc.SetSortMapKeys(true)
	v := reflect.ValueOf(m).Elem()
	must := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	var fields []reflect.Value
	for i := range v.NumField() {
		if f := v.Field(i); v.Type().Field(i).Anonymous { // its fields are the message's
			for j := range f.NumField() {
				fields = append(fields, f.Field(j))
			}
		} else {
			fields = append(fields, f)
		}
	}
	must(enc.EncodeArrayLen(1 + len(fields)))
	must(enc.EncodeUint(uint64(m.Type())))
	for _, field := range fields {
		switch f := field.Interface().(type) {
		case []Field:
			fields := map[string]string{}
			for _, e := range f {
				fields[e.Key] = e.Value
			}
			must(enc.Encode(fields))
		case []Extent:
			must(enc.EncodeArrayLen(len(f)))
			for _, e := range f {
				must(enc.EncodeArrayLen(4))
				must(errors.Join(enc.EncodeUint(uint64(e.Page)), enc.EncodeUint(uint64(e.Pages)),
					enc.EncodeUint(uint64(e.Region)), enc.EncodeUint(e.Offset)))
			}
		case []Run:
			must(enc.EncodeArrayLen(len(f)))
			for _, e := range f {
				removed := uint64(0)
				if e.Removed {
					removed = 1
				}
				must(errors.Join(enc.EncodeArrayLen(2), enc.EncodeUint(removed),
					enc.EncodeBytes(e.Hashes)))
			}
		case []uint32:
			must(enc.EncodeArrayLen(len(f)))
			for _, e := range f {
				must(enc.EncodeUint(uint64(e)))
			}
		case [][]byte:
			must(enc.EncodeArrayLen(len(f)))
			for _, e := range f {
				must(enc.EncodeBytes(e))
			}
		case []TierItem:
			must(enc.EncodeArrayLen(len(f)))
			for _, e := range f {
				must(errors.Join(enc.EncodeArrayLen(2), enc.EncodeBytes(e.Key),
					enc.EncodeArrayLen(len(e.Pieces))))
				for _, p := range e.Pieces {
					must(errors.Join(enc.EncodeArrayLen(3), enc.EncodeUint(uint64(p.Region)),
						enc.EncodeUint(p.Offset), enc.EncodeUint(p.SizeBytes)))
				}
			}
		case []TierResult:
			must(enc.EncodeArrayLen(len(f)))
			for _, e := range f {
				must(errors.Join(enc.EncodeArrayLen(2), enc.EncodeUint(uint64(e.Index)),
					enc.EncodeUint(uint64(e.Status))))
			}
		case []byte:
			must(enc.EncodeBytes(f))
		case Label:
			must(enc.EncodeString(string(f)))
		case string:
			must(enc.EncodeString(f))
		case bool: // 0 or 1
			n := uint64(0)
			if f {
				n = 1
			}
			must(enc.EncodeUint(n))
		default:
			must(enc.EncodeUint(field.Uint()))
		}
	}
	return b.Bytes()
}

func TestAgainstOracle(t *testing.T) {
	const seed = 1
	r := rand.New(rand.NewPCG(seed, 0))
	for typ := range kinds {
		reused := New(typ)
		for range 50 {
			m := random(r, typ)
			raw := m.Append([]byte("before"))[len("before"):]
			if want := oracle(t, m); !bytes.Equal(raw, want) {
				t.Fatalf("seed %d, %v: encoded %x, msgpack/v5 %x", seed, typ, raw, want)
			}
			if err := reused.Decode(raw, &DefaultLimits); err != nil {
				t.Fatalf("seed %d, %v: %v", seed, typ, err)
			}
			if again := reused.Append(nil); !bytes.Equal(again, raw) {
				t.Fatalf("seed %d, %v: encoded again %x, want %x", seed, typ, again, raw)
			}
		}
	}
}

func TestHotMessagesDoNotAllocate(t *testing.T) {
	r := rand.New(rand.NewPCG(2, 0))
	buf := make([]byte, 0, 1<<20)
	for _, typ := range []Type{
		TypeLookup, TypeLookupResult, TypeLookupPending, TypeTrim, TypeCancel, TypeAdvise,
		TypePrepareStore, TypeStoreGrant, TypeCommitStore,
		TypePrepareLoad, TypeLoadGrant, TypeRelease, TypeFetch, TypeContains, TypeContained,
		TypePing, TypePong,
		TypePeerPages, TypePeerLease, TypePeerGrant, TypePeerRelease,
		TypeTierContains, TypeTierDrop,
	} {
		raw := random(r, typ).Append(nil)
		m := New(typ)
		if err := m.Decode(raw, &DefaultLimits); err != nil {
			t.Fatal(err)
		}
		n := testing.AllocsPerRun(100, func() {
			if m.Decode(raw, &DefaultLimits) != nil {
				panic("refused")
			}
			buf = m.Append(buf[:0])
		})
		if n != 0 {
			t.Errorf("%v: %v allocations", typ, n)
		}
	}
}

// Hashes alias the input, so decoding does not copy them.
func TestHashesAlias(t *testing.T) {
	raw := (&Lookup{Session: 1, Secret: make([]byte, 16), Hashes: digests(2, 32)}).Append(nil)
	var m Lookup
	if err := m.Decode(raw, &DefaultLimits); err != nil {
		t.Fatal(err)
	}
	if &m.Hashes[0] != &raw[len(raw)-4-64] || cap(m.Hashes) != 64 {
		t.Fatal("hashes are a copy, or reach beyond themselves")
	}
}

func FuzzDecode(f *testing.F) {
	for _, g := range goodMessages() {
		f.Add(g.m.Append(nil))
	}
	for _, v := range badMessages() {
		raw, _ := hex.DecodeString(v.Hex)
		f.Add(raw)
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		accepted := 0
		for typ := range kinds {
			m := New(typ)
			if m.Decode(raw, &DefaultLimits) != nil {
				continue
			}
			accepted++
			if got, err := Peek(raw); err != nil || got != typ {
				t.Fatalf("decoded as %v, Peek says %v, %v", typ, got, err)
			}
			short := m.Append(nil)
			if len(short) > len(raw) {
				t.Fatalf("%v: %d bytes became %d", typ, len(raw), len(short))
			}
			again := New(typ)
			if err := again.Decode(short, &DefaultLimits); err != nil {
				t.Fatalf("%v: cannot read what it wrote: %v", typ, err)
			}
			if !bytes.Equal(again.Append(nil), short) || !bytes.Equal(oracle(t, m), short) {
				t.Fatalf("%v: does not encode to the same bytes again", typ)
			}
		}
		if accepted > 1 {
			t.Fatal("one message of two types")
		}
	})
}

func BenchmarkLookupDecode(b *testing.B) {
	raw := (&Lookup{Session: 1, Secret: make([]byte, 16), Lookup: 1 << 40,
		Hashes: digests(4096, 32), DeadlineMs: 20}).Append(nil)
	var m Lookup
	b.SetBytes(int64(len(raw)))
	b.ReportAllocs()
	for b.Loop() {
		if m.Decode(raw, &DefaultLimits) != nil {
			b.Fatal("refused")
		}
	}
}
