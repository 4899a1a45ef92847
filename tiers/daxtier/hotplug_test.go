package daxtier

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/slab"
	"lookaside/tiers/tiertest"
)

var (
	plugSeed  = flag.Uint64("plug.seed", 0, "replay this one seed of the histories of devices")
	plugSeeds = flag.Int("plug.seeds", 12, "histories of devices to run")
	plugSteps = flag.Int("plug.steps", 60, "calls of each")
)

// hotOptions are those of a pool of files in a directory in memory, with so many devices of a size
// at the start.
func hotOptions(t testing.TB, n int, sizeBytes int64) Options {
	o := files(memory(t), n, sizeBytes)
	o.SlabBytes, o.HotPlug = 512<<10, true
	return o
}

// mustLoad fails unless all of some chunks are there.
func mustLoad(t testing.TB, p tiers.Tier, from, to int) {
	t.Helper()
	if err := errors.Join(load(t, p, from, to)...); err != nil {
		t.Fatal(err)
	}
}

func noError(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// A pool begins without a device, gets some, moves from one to the other, and finds all of it
// again.
func TestHotPlug(t *testing.T) {
	t.Parallel()
	o := hotOptions(t, 0, 0)
	dir := memory(t)
	p := mustOpen(t, o)
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	if err := store(t.Context(), p, testSpace(), 0, 1)[0]; !errors.Is(err, tiers.ErrBusy) {
		t.Fatalf("a store without a device: %v", err)
	}
	if st := p.Status(); len(st.Devices) != 0 || st.TotalCapacityBytes != 0 {
		t.Fatalf("%+v", st)
	}
	noError(t, p.Add(t.Context(), a, 4<<20))
	mustStore(t, p, 0, 30)
	noError(t, p.Add(t.Context(), b, 8<<20))
	mustStore(t, p, 30, 60)
	noError(t, p.Resize(t.Context(), a, 6<<20, Migrate, false))
	mustStore(t, p, 60, 120)
	mustLoad(t, p, 0, 120)
	st := p.Status()
	if len(st.Devices) != 2 || st.Devices[0].Path != a || st.Devices[0].SizeBytes != 6<<20 ||
		st.Devices[1].SizeBytes != 8<<20 || st.TotalUsedBytes != 120*64<<10 ||
		st.TotalCapacityBytes < 13<<20 || st.Devices[0].State != slab.Active ||
		st.Devices[0].Slots.Used+st.Devices[1].Slots.Used != 120 {
		t.Fatalf("%+v", st)
	}
	if err := p.Remove(t.Context(), b, Migrate, false); !errors.Is(err, ErrNoRoom) {
		t.Fatal(err)
	}
	noError(t, p.Resize(t.Context(), a, 10<<20, Migrate, false))
	noError(t, p.Remove(t.Context(), b, Migrate, false))
	mustLoad(t, p, 0, 120)
	if st := p.Status(); len(st.Devices) != 1 || st.Devices[0].SizeBytes != 10<<20 {
		t.Fatalf("%+v", st)
	}
	// Nobody has the other one any more.
	other := o
	other.Devices = []DeviceSpec{{Path: b}}
	q := mustOpen(t, other)
	if err := load(t, q, 30, 31)[0]; !errors.Is(err, tiers.ErrNotFound) {
		t.Fatalf("a device that was migrated away still has a chunk: %v", err)
	}
	if err := p.Add(t.Context(), b, 0); !errors.Is(err, ErrLeased) {
		t.Fatalf("a device that somebody else has: %v", err)
	}
	noError(t, q.Close())
	noError(t, p.Add(t.Context(), b, 0)) // all of it
	if st := p.Status(); st.Devices[1].SizeBytes != 8<<20 {
		t.Fatalf("%+v", st)
	}
	noError(t, p.Close())
	o.Devices = []DeviceSpec{{Path: a}, {Path: b}}
	p = mustOpen(t, o)
	mustLoad(t, p, 0, 120)
	noError(t, p.Remove(t.Context(), b, Evict, false))
	noError(t, p.Resize(t.Context(), a, 9<<20+512<<10, Migrate, false))
	mustLoad(t, p, 0, 120)
	noError(t, p.Close())
	for path, want := range map[string]int64{a: 10 << 20, b: 8 << 20} { // files stay as they are
		if info, err := os.Stat(path); err != nil || info.Size() != want {
			t.Errorf("%s: %v %v", path, info.Size(), err)
		}
	}
	o.Devices = []DeviceSpec{{Path: a, SizeBytes: 9<<20 + 512<<10}}
	mustLoad(t, mustOpen(t, o), 0, 120)
}

// Every reason for which nothing happens.
func TestHotPlugRefused(t *testing.T) {
	t.Parallel()
	o := hotOptions(t, 1, 4<<20)
	p := mustOpen(t, o)
	dir, have := memory(t), o.Devices[0].Path
	foreign := filepath.Join(dir, "letters")
	noError(t, os.WriteFile(foreign, append([]byte("Dear Sir or Madam"), make([]byte, 1<<20)...),
		0o600))
	mustStore(t, p, 0, 40)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	before := p.Status()
	for what, c := range map[string]struct{ err, want error }{
		"added twice":   {p.Add(t.Context(), have, 4<<20), ErrExists},
		"other size":    {p.Add(t.Context(), have+"/../"+filepath.Base(have), 8<<20), ErrExists},
		"no such place": {p.Add(t.Context(), filepath.Join(dir, "no", "such"), 1<<20), ErrDevice},
		"no size":       {p.Add(t.Context(), filepath.Join(dir, "new"), 0), ErrDevice},
		"a directory":   {p.Add(t.Context(), dir, 1<<20), ErrDevice},
		"letters":       {p.Add(t.Context(), foreign, 0), ErrDevice},
		"not aligned":   {p.Add(t.Context(), filepath.Join(dir, "odd"), 1<<20+1), ErrDevice},
		"tiny":          {p.Add(t.Context(), filepath.Join(dir, "tiny"), 16<<10), ErrDevice},
		"huge":          {p.Add(t.Context(), filepath.Join(dir, "huge"), 1<<50), ErrNoRoom},
		"not there": {p.Remove(t.Context(), filepath.Join(dir, "new"), Evict, true),
			ErrNotFound},
		"not there, size": {p.Resize(t.Context(), filepath.Join(dir, "new"), 1<<20, Evict, true),
			ErrNotFound},
		"mode":          {p.Remove(t.Context(), have, "throw away", true), tiers.ErrInvalid},
		"mode of size":  {p.Resize(t.Context(), have, 2<<20, Drain, true), tiers.ErrInvalid},
		"odd size":      {p.Resize(t.Context(), have, 2<<20+1, Migrate, true), ErrDevice},
		"no bytes":      {p.Resize(t.Context(), have, 0, Migrate, true), ErrDevice},
		"few bytes":     {p.Resize(t.Context(), have, 4096, Migrate, true), ErrDevice},
		"huge size":     {p.Resize(t.Context(), have, 1<<50, Migrate, true), ErrDevice},
		"no room":       {p.Remove(t.Context(), have, Migrate, true), ErrNoRoom},
		"no room, size": {p.Resize(t.Context(), have, 1<<20, Migrate, true), ErrNoRoom},
		"cancelled":     {p.Remove(ctx, have, Evict, true), context.Canceled},
	} {
		if !errors.Is(c.err, c.want) {
			t.Errorf("%s: %v, want %v", what, c.err, c.want)
		}
	}
	after := p.Status()
	before.Devices[0].Total, after.Devices[0].Total = 0, 0
	if len(after.Devices) != 1 || before.Devices[0] != after.Devices[0] {
		t.Errorf("%+v became %+v", before, after)
	}
	mustLoad(t, p, 0, 40)
	noError(t, p.Remove(t.Context(), have, Drain, false))
	if err := p.Add(t.Context(), have, 8<<20); !errors.Is(err, ErrExists) {
		t.Errorf("a drained device in another size: %v", err)
	}
	noError(t, p.Add(t.Context(), have, 4<<20))
	noError(t, p.Close())
	for what, err := range map[string]error{"add": p.Add(t.Context(), filepath.Join(dir, "late"),
		1<<20), "remove": p.Remove(t.Context(), have, Evict, true)} {
		if !errors.Is(err, tiers.ErrClosed) {
			t.Errorf("%s after Close: %v", what, err)
		}
	}
	if st := p.Status(); len(st.Devices) != 0 {
		t.Errorf("%+v", st)
	}
	ranks := hotOptions(t, 1, 8<<20)
	ranks.Rank, ranks.Ranks = 1, 2
	p = mustOpen(t, ranks)
	if err := p.Resize(t.Context(), ranks.Devices[0].Path, 4<<20, Migrate, true); !errors.Is(err,
		ErrDevice) {
		t.Errorf("one of two ranks is resized: %v", err)
	}
	shared := filepath.Join(dir, "shared")
	noError(t, p.Add(t.Context(), shared, 8<<20))
	if st := p.Status(); st.Devices[1].SizeBytes != 4<<20 {
		t.Errorf("%+v", st)
	}
	noError(t, p.Remove(t.Context(), shared, Drain, false))
	noError(t, p.Add(t.Context(), shared, 8<<20))
}

// Lookups, loads and stores go on while devices come and go, and find all that they should.
func TestHotPlugUnderTraffic(t *testing.T) {
	t.Parallel()
	o := hotOptions(t, 2, 6<<20)
	p := mustOpen(t, o)
	const n = 60
	mustStore(t, p, 0, n)
	stop := make(chan struct{})
	var traffic sync.WaitGroup
	var loads atomic.Int64
	for w := range 3 {
		traffic.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(w), 4))
			space := testSpace()
			held := make([]uint16, 1)
			for {
				select {
				case <-stop:
					return
				default:
				}
				i := rnd.IntN(n)
				if err := p.Contains(context.Background(), run(space, i), held); err != nil ||
					held[0] != testPages {
					t.Errorf("chunk %d: %d pages, %v", i, held[0], err)
					return
				}
				if err := load(t, p, i, i+1)[0]; err != nil {
					t.Errorf("chunk %d: %v", i, err)
					return
				}
				if w == 0 {
					_ = store(context.Background(), p, space, n+rnd.IntN(20), n+21)
				}
				loads.Add(1)
			}
		})
	}
	paths := []string{o.Devices[0].Path, o.Devices[1].Path}
	for i := 0; i < 6 && !t.Failed(); i++ {
		next := fmt.Sprintf("%s-%d", o.Devices[0].Path, i)
		for _, err := range []error{
			p.Add(t.Context(), next, 6<<20), p.Resize(t.Context(), paths[0], 8<<20, Migrate, true),
			p.Resize(t.Context(), paths[0], 4<<20, Migrate, true),
			p.Remove(t.Context(), paths[1], Drain, true), p.Remove(t.Context(), paths[0], Migrate,
				true), p.Add(t.Context(), paths[1], 0),
		} {
			if err != nil {
				t.Error(err)
			}
		}
		paths = append(paths[1:], next)
	}
	close(stop)
	traffic.Wait()
	mustLoad(t, p, 0, n)
	t.Logf("%d loads meanwhile", loads.Load())
}

// A pool's devices come and go, in random histories, with the pool closed or left as a killed
// process leaves it now and then: what was stored is there with its bytes unless it was evicted,
// dropped, or went with its device by Evict.
func TestHotPlugHistories(t *testing.T) {
	t.Parallel()
	told := map[string]int{}
	history := func(seed uint64) {
		rnd := rand.New(rand.NewPCG(seed, 21))
		o := hotOptions(t, 0, 0)
		dir := memory(t)
		p := mustOpen(t, o)
		space := testSpace()
		const chunks = 150
		must := map[int]bool{}
		var evictions uint64
		step := 0
		fatal := func(format string, args ...any) {
			t.Helper()
			t.Fatalf("seed %d step %d (replay: go test ./tiers/daxtier -run TestHotPlugHistories -plug.seed=%d): %s", seed, step, seed, fmt.Sprintf(format, args...))
		}
		verify := func(what string) {
			t.Helper()
			for i, err := range load(t, p, 0, chunks) {
				if err != nil && (must[i] || !errors.Is(err, tiers.ErrNotFound)) {
					fatal("%s: chunk %d: %v; %+v", what, i, err, p.Status())
				}
			}
		}
		retake := func() {
			for i, err := range load(t, p, 0, chunks) {
				if err != nil {
					delete(must, i)
				}
			}
		}
		size := func() int64 { return int64(2+rnd.IntN(14)) << 18 }
		for step = range *plugSteps {
			var path string
			if n := len(o.Devices); n > 0 {
				path = o.Devices[rnd.IntN(n)].Path
			}
			mode := []Mode{Migrate, Migrate, Evict}[rnd.IntN(3)]
			var err error
			what := ""
			evicts := mode == Evict
			switch k := rnd.IntN(12); {
			case k < 4:
				from := rnd.IntN(chunks - 12)
				for i, err := range store(t.Context(), p, space, from, from+12) {
					if err == nil {
						must[from+i] = true
					} else if !errors.Is(err, tiers.ErrBusy) {
						fatal("store: %v", err)
					}
				}
			case k < 5:
				i := rnd.IntN(chunks)
				if err := p.Drop(t.Context(), run(space, i)); err != nil {
					fatal("drop: %v", err)
				}
				delete(must, i)
			case k < 8 && len(o.Devices) < 4:
				what, evicts = "add", false
				d := DeviceSpec{Path: filepath.Join(dir, fmt.Sprintf("dax%d-%d", step, seed)),
					SizeBytes: size()}
				if err = p.Add(t.Context(), d.Path, d.SizeBytes); err == nil {
					o.Devices = append(slices.Clone(o.Devices), d)
				}
			case path == "":
			case k < 9:
				what = "resize"
				bytes := size()
				i := slices.IndexFunc(o.Devices, func(d DeviceSpec) bool { return d.Path == path })
				if err = p.Resize(t.Context(), path, bytes, mode, true); err == nil {
					o.Devices = slices.Clone(o.Devices)
					o.Devices[i].SizeBytes = bytes
				}
			case k < 10:
				what = "remove"
				if err = p.Remove(t.Context(), path, mode, true); err == nil {
					o.Devices = slices.DeleteFunc(slices.Clone(o.Devices),
						func(d DeviceSpec) bool { return d.Path == path })
				}
			case k < 11:
				what, evicts = "drain", false
				if err = p.Remove(t.Context(), path, Drain, false); err == nil {
					verify("drained")
					err = p.Add(t.Context(), path, 0)
				}
			default:
				if err := p.Close(); err != nil {
					fatal("%v", err)
				}
				p, evictions = mustOpen(t, o), 0
				what, evicts = "reopen", false
			}
			switch {
			case err == nil:
				told[what]++
			case errors.Is(err, ErrNoRoom):
				told["no room"]++
			default:
				fatal("%s: %v", what, err)
			}
			if st := p.Stats(); st.Evictions > evictions || evicts {
				evictions = st.Evictions
				retake()
			}
			verify(what)
		}
		noError(t, p.Close())
		if len(o.Devices) > 0 {
			var paths []string
			for _, d := range o.Devices {
				paths = append(paths, d.Path)
			}
			if r, err := Check(t.Context(), CheckOptions{Devices: paths}); err != nil ||
				r.Bad() > 0 {
				fatal("%+v %v", r, err)
			}
		}
	}
	if *plugSeed != 0 {
		history(*plugSeed)
		return
	}
	for seed := range uint64(*plugSeeds) {
		history(seed + 1)
	}
	t.Log(told)
}

// BenchmarkLookupWhileMoving is what a lookup of 128 chunks takes at the 99th of a hundred, with
// and without a migration under way.
func BenchmarkLookupWhileMoving(b *testing.B) {
	for _, moving := range []bool{false, true} {
		b.Run(fmt.Sprintf("moving %v", moving), func(b *testing.B) {
			o := hotOptions(b, 2, 512<<20)
			o.SlabBytes = 128 << 20
			p := mustOpen(b, o)
			const n = 3000
			mustStore(b, p, 0, n)
			prefix := make(tiertest.Prefix, 128*testPages)
			prefix[0] = 255
			long := prefix.Run(testSpace(), 0, len(prefix))
			buf := make([]byte, int64(long.Pages())*testSpace().Geometry.PageBytes)
			var ts []tiers.Transfer
			for i := range long.Chunks() {
				c := long.Chunk(i)
				size := int64(c.Pages()) * testSpace().Geometry.PageBytes
				ts = append(ts, tiers.Transfer{Run: c, Bytes: buf[int64(i)*size : int64(i+1)*size]})
			}
			p.Store(b.Context(), ts, func(_ int, err error) { noError(b, err) })
			stop := make(chan struct{})
			var mover sync.WaitGroup
			if moving {
				mover.Go(func() {
					for k := 0; ; k++ {
						select {
						case <-stop:
							return
						default:
						}
						path := o.Devices[k%2].Path
						if err := errors.Join(p.Remove(context.Background(), path, Migrate, true),
							p.Add(context.Background(), path, 0)); err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			held := make([]uint16, long.Chunks())
			var took []time.Duration
			b.ResetTimer()
			for b.Loop() {
				start := time.Now()
				noError(b, p.Contains(b.Context(), long, held))
				took = append(took, time.Since(start))
				time.Sleep(50 * time.Microsecond)
			}
			b.StopTimer()
			close(stop)
			mover.Wait()
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds()), "p99-ns")
			b.ReportMetric(float64(took[len(took)/2].Nanoseconds()), "p50-ns")
		})
	}
}
