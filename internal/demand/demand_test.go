package demand

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"lookaside/internal/leak"
	"lookaside/internal/recording"
	"lookaside/internal/simulate"
	"lookaside/tiers"
	"lookaside/tiers/policy"
)

func TestMain(m *testing.M) { leak.Main(m) }

// workload is requests of which each names the pages of its prompt by digests of 8 bytes.
type workload struct {
	*rand.Rand
	next uint64
	asks [][]uint64
}

// grow returns a longer prompt.
func (w *workload) grow(prompt []uint64, n int) []uint64 {
	out := append([]uint64(nil), prompt...)
	for range n {
		w.next++
		out = append(out, w.next*0x9E3779B97F4A7C15)
	}
	return out
}

func (w *workload) pages(median float64) int {
	return max(1, int(median*math.Exp(0.8*w.NormFloat64())))
}

// chats is conversations below a few common prompts, some of which are written faster.
func (w *workload) chats(requests, active int, pages float64) {
	prompts := [][]uint64{w.grow(nil, 37), w.grow(nil, 64), nil}
	open := make([][]uint64, active)
	for range requests {
		i := min(w.IntN(active), w.IntN(active))
		if len(open[i]) == 0 || w.Float64() < 0.15 {
			open[i] = prompts[w.IntN(len(prompts))]
		}
		open[i] = w.grow(open[i], w.pages(pages))
		w.asks = append(w.asks, open[i])
	}
}

// documents is questions about documents of skewed popularity.
func (w *workload) documents(requests, documents int, pages float64) {
	docs := make([][]uint64, documents)
	for i := range docs {
		docs[i] = w.grow(nil, w.pages(pages))
	}
	z := rand.NewZipf(w.Rand, 1.1, 4, uint64(documents-1))
	for range requests {
		w.asks = append(w.asks, w.grow(docs[z.Uint64()], 1+w.IntN(3)))
	}
}

// loop is the same prompts again and again, in their order.
func (w *workload) loop(rounds, prompts int, pages float64) {
	all := make([][]uint64, prompts)
	for i := range all {
		all[i] = w.grow(nil, w.pages(pages))
	}
	for range rounds {
		w.asks = append(w.asks, all...)
	}
}

// workloads are of about as many pages each.
func workloads(scale int, pages float64) map[string]*workload {
	out := map[string]*workload{}
	for name, fill := range map[string]func(*workload){
		"chats":     func(w *workload) { w.chats(20*scale, scale, pages/2) },
		"documents": func(w *workload) { w.documents(20*scale, 4*scale, pages) },
		"loop":      func(w *workload) { w.loop(10, 2*scale, pages) },
		"mixed": func(w *workload) {
			for range 3 {
				w.chats(3*scale, scale/3, pages/2)
				w.documents(3*scale, scale, pages)
			}
		},
	} {
		w := &workload{Rand: rand.New(rand.NewPCG(7, 8))}
		fill(w)
		out[name] = w
	}
	return out
}

func digests(pages []uint64) (b []byte) {
	for _, p := range pages {
		b = binary.LittleEndian.AppendUint64(b, p)
	}
	return b
}

// serve has a Demand watch the requests of a workload, one after another, as a sidecar whose arena
// has the given slots answers them: each finds what is held, and stores the rest. It returns the
// recording of them, and how many pages were found.
func serve(t testing.TB, d *Demand, w *workload, slots int,
	g *tiers.Geometry) (trace *simulate.Trace, found int) {
	t.Helper()
	rec, err := d.Record()
	if err != nil {
		t.Fatal(err)
	}
	order, err := policy.New("", policy.Options{})
	if err != nil {
		t.Fatal(err)
	}
	arena, err := simulate.NewCache(order, slots, g.PagesPerChunk)
	if err != nil {
		t.Fatal(err)
	}
	read := make(chan error)
	go func() {
		var err error
		trace, err = simulate.ReadRecording("recorded", rec)
		read <- err
	}()
	space := tiers.Fingerprint{1, 2, 3}
	for i, pages := range w.asks {
		b := digests(pages)
		held := arena.Held(pages)
		if i%3 == 0 { // its answer comes later
			d.Lookup(space, g, 1, uint64(i), 0, nil, b, held/2, false)
			d.Answered(1, uint64(i), held)
		} else {
			d.Lookup(space, g, 1, uint64(i), 0, nil, b, held, true)
		}
		found += held
		arena.Do(&simulate.Walk{Keys: pages, Insert: held})
		arena.Do(&simulate.Walk{Keys: pages, From: len(pages), Insert: len(pages)})
		first := held / g.PagesPerChunk * g.PagesPerChunk
		if first < len(pages) {
			var prev []byte
			if first > 0 {
				prev = b[8*(first-1):][:8]
			}
			d.Store(space, g, first, prev, b[8*first:])
		}
		d.Sync()
	}
	rec.Stop()
	d.Sync()
	if err := <-read; err != nil {
		t.Fatal(err)
	}
	return trace, found
}

// TestCurve compares the curve with what the simulator finds for each of its sizes from a recording
// of the same requests: it may be wrong by 2 %. It does so where all chunks are watched, and where
// a sample is.
func TestCurve(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name        string
		ppc, slots  int
		scale       int
		pages       float64
		memory      int64
		least, most float64 // of the rate
	}{
		{"all", 16, 300, 100, 60, MinMemory + 8<<20, 1, 1},
		{"sample", 1, 3000, 200, 10, MinMemory, 0.2, 0.5},
	} {
		for name, w := range workloads(c.scale, c.pages) {
			t.Run(c.name+"/"+name, func(t *testing.T) {
				t.Parallel()
				g := tiers.Geometry{PageBytes: 1 << 10, PagesPerChunk: c.ppc, PageTokens: 16,
					DigestBytes: 8}
				arena := int64(c.slots*c.ppc) << 10
				d := New(Config{MemoryBytes: c.memory, Seed: 5,
					ArenaBytes: func() int64 { return arena }})
				trace, found := serve(t, d, w, c.slots, &g)
				r := trace.Recorded()
				if r == nil || r.HeldPages != found || r.TierPages == 0 || r.Dropped != 0 ||
					r.ArenaBytes != arena || d.Dropped() != 0 ||
					trace.ChunkBytes() != arena/int64(c.slots) {
					t.Fatalf("%+v, want %d found, of %d", r, found, arena)
				}
				curve, ok := d.Curve()
				if !ok || len(curve.Points) != 6 || curve.Rate < c.least || curve.Rate > c.most {
					t.Fatalf("%+v", curve)
				}
				spread := 0.0
				for i, p := range curve.Points {
					simulated := func(seed uint64) simulate.Result {
						r, err := simulate.Run(context.Background(), trace, simulate.Setup{
							Capacity: int(float64(c.slots) * p.Multiple), Seed: seed}, nil)
						if err != nil {
							t.Fatal(err)
						}
						return r
					}
					want := simulated(0)
					got := 1 - float64(p.Missed)/float64(curve.Asked)
					lo, hi := want.Ratio()-0.02, want.Ratio()+0.02
					if got < lo || got > hi {
						// The default policy learns from a sample that its seed selects. Where a
						// size is just too small for a loop, that decides what it learns.
						other := simulated(1).Ratio()
						lo, hi = min(lo, other-0.02), max(hi, other+0.02)
					}
					t.Logf("× %-4v %.4f, simulated %.4f to %.4f", p.Multiple, got, lo, hi)
					if got < lo || got > hi {
						t.Errorf("%v arenas: %.4f, want %.4f to %.4f", p.Multiple, got, lo, hi)
					}
					if i == 0 {
						spread = -want.Ratio()
					} else if i == 5 {
						spread += want.Ratio()
					}
					if curve.Rate == 1 && p.Full != (want.Evicted > 0) {
						t.Errorf("%v arenas: full is %v, with %d evictions", p.Multiple, p.Full,
							want.Evicted)
					}
					if p.Bytes != int64(float64(arena)*p.Multiple) {
						t.Errorf("%d bytes", p.Bytes)
					}
				}
				if spread < 0.05 {
					t.Errorf("the size hardly matters: %.4f", spread)
				}
				// The size of the arena itself: what was found, where it was the arena's alone.
				all, _ := trace.Blocks()
				if got, want := 1-float64(curve.Points[2].Missed)/float64(curve.Asked),
					float64(found)/float64(all); math.Abs(got-want) > 0.02 {
					t.Errorf("%.4f as large as it is, and %.4f were found", got, want)
				}
			})
		}
	}
}

// TestReuse compares the distances with the hits of an LRU cache: the part of all lookups of chunks
// whose distance is no more than a size is what a cache of this size hits. Chunks are single pages
// without prefixes.
func TestReuse(t *testing.T) {
	t.Parallel()
	const pageBytes = 1 << 20
	r := rand.New(rand.NewPCG(3, 4))
	z := rand.NewZipf(r, 1.05, 200, 1<<16)
	now := time.Unix(1e9, 0)
	d := New(Config{MemoryBytes: MinMemory, Seed: 9, ArenaBytes: func() int64 { return 1 << 30 },
		Now: func() time.Time { return now }})
	g := tiers.Geometry{PageBytes: pageBytes, PagesPerChunk: 1, PageTokens: 16, DigestBytes: 8}
	lru := map[int]*simulate.Cache{}
	hits := map[int]int{}
	for i := range 6 {
		order, _ := policy.New("lru", policy.Options{})
		var err error
		if lru[i], err = simulate.NewCache(order, 256<<i<<1, 1); err != nil {
			t.Fatal(err)
		}
	}
	const lookups = 60000
	for range lookups {
		page := []uint64{(z.Uint64() + 1) * 0x9E3779B97F4A7C15}
		d.Lookup(tiers.Fingerprint{}, &g, 1, 1, 0, nil, digests(page), 0, true)
		now = now.Add(time.Second)
		d.Sync()
		for i, c := range lru {
			_, n := c.Do(&simulate.Walk{Keys: page, Insert: 1})
			hits[i] += n
		}
	}
	reuse, ok := d.Reuse()
	if !ok || reuse.Rate >= 0.5 || reuse.Rate < 0.05 {
		t.Fatalf("%+v", reuse)
	}
	total, seconds := reuse.First, uint64(0)
	for i := range reuse.Bytes {
		total += reuse.Bytes[i]
		seconds += reuse.Seconds[i]
	}
	if seconds != total-reuse.First || reuse.SumBytes <= 0 || reuse.SumSeconds <= 0 {
		t.Errorf("%+v", reuse)
	}
	if off := float64(total)/lookups - 1; math.Abs(off) > 0.05 {
		t.Errorf("%d lookups counted, of %d", total, lookups)
	}
	sum := reuse.Bytes[0]
	for i := range 6 {
		sum += reuse.Bytes[i+1] // up to 256 MiB << i << 1
		got, want := float64(sum)/float64(total), float64(hits[i])/lookups
		t.Logf("%d MiB: %.4f, LRU %.4f", 512<<i, got, want)
		if math.Abs(got-want) > 0.02 {
			t.Errorf("%d MiB: %.4f, want %.4f", 512<<i, got, want)
		}
	}
}

// TestReuseTimes counts the time since the last use, be it a lookup or a store.
func TestReuseTimes(t *testing.T) {
	t.Parallel()
	now := time.Unix(1e9, 0)
	d := New(Config{MemoryBytes: MinMemory, ArenaBytes: func() int64 { return 1 << 30 },
		Now: func() time.Time { return now }})
	g := tiers.Geometry{PageBytes: 1 << 28, PagesPerChunk: 2, PageTokens: 16, DigestBytes: 8}
	ask := func(f func(b []byte), pages ...uint64) {
		f(digests(pages))
		d.Sync()
	}
	lookup := func(b []byte) { d.Lookup(tiers.Fingerprint{}, &g, 1, 1, 0, nil, b, 0, true) }
	store := func(b []byte) { d.Store(tiers.Fingerprint{}, &g, 0, nil, b) }
	ask(lookup, 1, 2, 3)
	now = now.Add(time.Minute)
	ask(store, 1, 2, 3)
	ask(store, 7)
	now = now.Add(100 * time.Second)
	ask(lookup, 1, 2)
	got, _ := d.Reuse()
	want := Reuse{First: 2, SumSeconds: 100, SumBytes: 3 << 29, Rate: 1}
	want.Seconds[7], want.Bytes[3] = 1, 1 // up to 128 s, and 1.5 GiB of 512 MiB chunks
	if got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}

// TestFull drops requests when the ring is full, and says so, also in a recording.
func TestFull(t *testing.T) {
	t.Parallel()
	d := New(Config{ArenaBytes: func() int64 { return 1 << 30 }})
	g := tiers.Geometry{PageBytes: 1 << 20, PagesPerChunk: 16, PageTokens: 16, DigestBytes: 8}
	pages := digests(make([]uint64, 30000))
	d.Lookup(tiers.Fingerprint{}, &g, 1, 1, 0, nil, pages, 0, true) // nobody listens
	rec, err := d.Record()
	if err != nil {
		t.Fatal(err)
	}
	for i := range 7 {
		d.Lookup(tiers.Fingerprint{}, &g, 1, uint64(i), 0, nil, pages, 9, true)
	}
	if n := d.Dropped(); n != 3 {
		t.Errorf("%d dropped", n)
	}
	d.Sync()
	d.Lookup(tiers.Fingerprint{}, &g, 1, 1, 0, nil, pages, 9, true)
	rec.Stop()
	d.Sync()
	trace, err := simulate.ReadRecording("x", rec)
	if err != nil {
		t.Fatal(err)
	}
	if r := trace.Recorded(); r.Lookups != 5 || r.Dropped != 3 || r.HeldPages != 45 || r.Cut {
		t.Errorf("%+v", r)
	}
	if _, ok := d.Curve(); ok {
		t.Error("there is a curve")
	}
}

// TestRecordings are apart: each names the same page in its own way, a slow reader loses requests
// and is told, and nothing is left when they have ended.
func TestRecordings(t *testing.T) {
	t.Parallel()
	d := New(Config{ArenaBytes: func() int64 { return 1 << 30 }})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { d.Run(ctx) })
	defer wg.Wait()
	defer cancel()
	var recs []*Recording
	for range MaxRecordings {
		r, err := d.Record()
		if err != nil {
			t.Fatal(err)
		}
		recs = append(recs, r)
	}
	if _, err := d.Record(); !errors.Is(err, ErrTooMany) {
		t.Error(err)
	}
	g := tiers.Geometry{PageBytes: 1 << 20, PagesPerChunk: 16, PageTokens: 16, DigestBytes: 8}
	d.Lookup(tiers.Fingerprint{}, &g, 1, 1, 0, nil, digests([]uint64{1, 2, 1 << 40}), 1, true)
	names := map[uint64]int{}
	for i, r := range recs {
		if i == 3 {
			r.Abandon()
			if n, err := r.Read(make([]byte, 1)); n != 0 || err != io.EOF {
				t.Error(n, err)
			}
			continue
		}
		r.Stop()
		in := recording.NewReader(r)
		var rec recording.Record
		kinds := ""
		var err error
		for err = in.Next(&rec); err == nil; err = in.Next(&rec) {
			kinds += fmt.Sprint(rec.Kind)
			for _, p := range rec.Pages {
				names[p]++
			}
		}
		if err != io.EOF || kinds != "12" {
			t.Errorf("%v, kinds %s", err, kinds)
		}
	}
	if len(names) != 9 || names[1]+names[2]+names[1<<40] != 0 {
		t.Errorf("pages are named %v", names)
	}
	if d.on.Load() {
		t.Error("it still watches")
	}
	// The daemon's end ends what is left.
	r, err := d.Record()
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if b, err := io.ReadAll(r); err != nil || len(b) == 0 ||
		recording.Kind(b[len(b)-1]) != recording.KindEnd {
		t.Error(len(b), err)
	}
	wg.Wait()
	if _, err := d.Record(); !errors.Is(err, ErrOff) {
		t.Error(err)
	}
}

// TestCost: watching allocates nothing, on or off.
func TestCost(t *testing.T) {
	for _, memory := range []int64{0, MinMemory} {
		d := New(Config{MemoryBytes: memory, ArenaBytes: func() int64 { return 1 << 30 }})
		g := tiers.Geometry{PageBytes: 1 << 20, PagesPerChunk: 16, PageTokens: 16, DigestBytes: 32}
		hashes := make([]byte, 64*32)
		if n := testing.AllocsPerRun(1000, func() {
			d.Lookup(tiers.Fingerprint{}, &g, 1, 1, 0, nil, hashes, 1, true)
			d.Store(tiers.Fingerprint{}, &g, 0, nil, hashes)
		}); n != 0 {
			t.Errorf("%v allocations", n)
		}
	}
}

// BenchmarkLookup is what a lookup of 256 chunks of 16 pages pays, and what it costs the reader.
func BenchmarkLookup(b *testing.B) {
	g := tiers.Geometry{PageBytes: 1 << 20, PagesPerChunk: 16, PageTokens: 16, DigestBytes: 32}
	hashes := make([]byte, 4096*32)
	for i := range 4096 {
		binary.LittleEndian.PutUint64(hashes[32*i:], uint64(i)*0x9E3779B97F4A7C15)
	}
	d := New(Config{MemoryBytes: 64 << 20, ArenaBytes: func() int64 { return 64 << 30 }})
	d.Store(tiers.Fingerprint{}, &g, 0, nil, hashes)
	d.Sync()
	var reading time.Duration
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		d.Lookup(tiers.Fingerprint{}, &g, 1, 1, 0, nil, hashes, 4096, true)
		if i%16 == 0 {
			b.StopTimer()
			begun := time.Now()
			d.Sync()
			reading += time.Since(begun)
			b.StartTimer()
		}
	}
	b.ReportMetric(float64(reading.Nanoseconds())/float64(b.N), "reader-ns/op")
}
