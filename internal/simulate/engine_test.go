package simulate

import (
	"encoding/binary"
	"fmt"
	"math"
	"testing"

	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/policy"
)

// served is an engine with a tier below that takes no time.
type served struct {
	t     *testing.T
	e     *engine.Engine
	tier  *Cache
	keys  map[[8]byte]uint64 // by digest
	items []engine.CascadeItem
	buf   []byte
}

const (
	client = engine.Owner(1)
	lookup = 7
	piece  = 8 // chunks that are stored by one call
)

func serve(t *testing.T, slots, tier int, admit engine.Admission) *served {
	t.Helper()
	order, err := policy.New("", policy.Options{Seed: 1})
	if err != nil {
		t.Fatal(err)
	}
	x := &served{t: t, keys: map[[8]byte]uint64{}}
	if x.tier, err = NewCache(order, tier, 1); err != nil {
		t.Fatal(err)
	}
	now := int64(0)
	x.e, err = engine.New(engine.Config{Now: func() int64 { now++; return now }, MinPageBytes: 1,
		OwnerShare: 1, Seed: 1, Tiers: []engine.TierAdmission{{Admit: admit,
			RoomBytes: int64(tier) * 64}}})
	if err != nil {
		t.Fatal(err)
	}
	x.ok(x.e.AddRegion(1, int64(slots)*64))
	id, err := x.e.OpenSpace(tiers.Fingerprint{1}, tiers.Geometry{PageBytes: 64, PagesPerChunk: 1,
		PageTokens: 16, DigestBytes: 8})
	x.ok(err)
	x.ok(x.e.AddOwner(client, id))
	t.Cleanup(func() {
		x.ok(x.e.Check())
		x.e.Close()
	})
	return x
}

func (x *served) ok(err error) {
	x.t.Helper()
	if err != nil {
		x.t.Fatal(err)
	}
}

// ask does what a request for pages does in a sidecar, and returns how many were found in the arena
// and only in the tier. They stay leased until the rest is stored.
func (x *served) ask(keys []uint64) (held, below int) {
	var hashes []byte
	for _, k := range keys {
		d := [8]byte(binary.LittleEndian.AppendUint64(nil, k))
		x.keys[d] = k
		hashes = append(hashes, d[:]...)
	}
	prev := func(page int) []byte {
		if page == 0 {
			return nil
		}
		return hashes[8*(page-1):][:8]
	}
	held, err := x.e.Lookup(client, lookup, 0, hashes)
	x.ok(err)
	below = x.tier.Held(keys[held:])
	found := held + below
	if below > 0 {
		x.tier.Do(&Walk{Keys: keys[:found], From: held})
		have := make([]uint16, below)
		for i := range have {
			have[i] = 1
		}
		chunks, err := x.e.PreparePromotion(client, lookup, engine.PromotionRun{FirstPage: held,
			Prev: prev(held), Hashes: hashes[8*held : 8*found], Have: have}, nil)
		x.ok(err)
		if len(chunks) < below {
			x.t.Fatalf("room for %d of %d chunks", len(chunks), below)
		}
		for _, c := range chunks {
			x.ok(x.e.FinishPromotion(c.Promotion, true, 0))
		}
		n, err := x.e.SettleLookup(client, lookup, found)
		if x.ok(err); n != found {
			x.t.Fatalf("%d pages of %d came", n, found)
		}
		x.cascade()
	}
	load := uint64(0)
	if found > 0 {
		load, _, err = x.e.PrepareLoad(client, client, lookup, 0, found, nil)
		x.ok(err)
	}
	for at := found; at < len(keys); at += piece {
		end := min(at+piece, len(keys))
		res, _, err := x.e.PrepareStore(client, at, prev(at), hashes[8*at:8*end], nil)
		if x.ok(err); res.Shed > 0 {
			x.t.Fatalf("%d pages had no room", res.Shed)
		}
		x.ok(x.e.CommitStore(client, res.Store, nil))
		x.cascade()
	}
	if load != 0 {
		x.ok(x.e.Release(client, load, nil))
	}
	x.cascade()
	return held, below
}

// cascade writes what is queued to the tier.
func (x *served) cascade() {
	for {
		x.items, x.buf = x.e.NextCascades(0, 16, x.buf, x.items[:0])
		if len(x.items) == 0 {
			return
		}
		for _, item := range x.items {
			w := Walk{First: item.First, Keys: []uint64{x.keys[[8]byte(item.Hashes)]}, From: 1,
				Insert: 1}
			if len(item.Prev) > 0 {
				w.Prev = x.keys[[8]byte(item.Prev)]
			}
			x.tier.Do(&w)
			x.e.EndCascade(item.Handle, true)
		}
	}
}

// TestAgainstTheEngine has an engine serve the requests that are simulated: what it hits in the
// arena and in the tier, and what it writes, is what the simulation finds. They are not the same to
// the page: the engine makes room for several chunks at a time, and its clock counts calls.
func TestAgainstTheEngine(t *testing.T) {
	t.Parallel()
	for _, trace := range workloads(17, 800) {
		if trace.Name != "chat" && trace.Name != "agents" && trace.Name != "documents" {
			continue
		}
		for _, admit := range []engine.Admission{engine.AdmitStored, engine.AdmitReused,
			engine.AdmitEvicted, engine.AdmitLearned} {
			t.Run(fmt.Sprint(trace.Name, "/", admit), func(t *testing.T) {
				t.Parallel()
				const slots, tier = 1200, 3600
				x := serve(t, slots, tier, admit)
				arena, below := 0, 0
				var w Walk
				for i := range trace.requests {
					trace.walk(i, &w)
					a, b := x.ask(w.Keys)
					arena, below = arena+a, below+b
				}
				// A long prefix that comes up at once evicts more than is cold.
				if _, shed := x.e.CascadeQueue(0); shed > uint64(x.tier.stored/100) {
					t.Errorf("%d chunks were shed", shed)
				}
				r, err := Run(t.Context(), trace, Setup{Seed: 1, Capacity: slots, Tier: tier,
					Admit: Admission(admit.String())}, nil)
				if err != nil {
					t.Fatal(err)
				}
				t.Logf("arena %d, simulated %d; tier %d, %d; written %d, %d of %d", arena,
					r.Hits-r.TierHits, below, r.TierHits, x.tier.stored, r.TierWrites, r.Blocks)
				near := func(what string, got, want int, within float64) {
					if math.Abs(float64(got-want)) > within*float64(want) {
						t.Errorf("%s: %d, simulated %d", what, got, want)
					}
				}
				near("hits of the arena", arena, r.Hits-r.TierHits, 0.03)
				near("hits", arena+below, r.Hits, 0.03)
				near("written", x.tier.stored, r.TierWrites, 0.1)
			})
		}
	}
}
