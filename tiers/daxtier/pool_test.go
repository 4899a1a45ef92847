package daxtier

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"lookaside/dax"
	"lookaside/internal/leak"
	"lookaside/tiers"
	"lookaside/tiers/tiertest"
)

func TestMain(m *testing.M) {
	if spec := os.Getenv(childEnv); spec != "" {
		child(spec)
		return
	}
	if spec := os.Getenv(arenaChildEnv); spec != "" {
		arenaChild(spec)
		return
	}
	leak.Main(m)
}

// files are the options of a pool on files that stand in for so many devices.
func files(dir string, n int, sizeBytes int64) Options {
	o := Options{AllowFiles: true, RetryEvery: 10 * time.Millisecond}
	for i := range n {
		o.Devices = append(o.Devices,
			DeviceSpec{Path: filepath.Join(dir, fmt.Sprintf("dax%d.0", i)), SizeBytes: sizeBytes})
	}
	return o
}

func mustOpen(t testing.TB, o Options) *Pool {
	t.Helper()
	p, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return p
}

// memory is a directory in memory where there is one: the kill and fault tests care for what the
// mapping holds, not for the disk below it.
func memory(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "lookaside-pool-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func TestContract(t *testing.T) {
	t.Parallel()
	tiertest.Run(t, tiertest.Factory{
		Persistent: true,
		Evicts:     true,
		New: func(t testing.TB, o tiertest.MediumOptions) *tiertest.Medium {
			options := files(memory(t), 2, 4<<20)
			options.SlabBytes = 1 << 20
			if o.CapacityBytes > 0 {
				options = files(memory(t), 2, o.CapacityBytes)
				options.SlabBytes = o.CapacityBytes / 4
			}
			var p *Pool
			return &tiertest.Medium{
				Open: func() (_ tiers.Tier, err error) {
					if p, err = Open(options); err != nil {
						return nil, err
					}
					return p, nil
				},
				Rot: func() { rot(t, &p.devices) },
			}
		},
	})
}

const testPages = 4

func testSpace() *tiers.Space {
	return tiertest.NewSpace("pool", tiers.Geometry{PageBytes: 16 << 10, PagesPerChunk: testPages,
		PageTokens: 16, DigestBytes: 32})
}

// run is the n-th chunk of a space, each of a prefix of its own.
func run(space *tiers.Space, n int) tiers.Run {
	prefix := make(tiertest.Prefix, testPages)
	prefix[0], prefix[1], prefix[2] = byte(n), byte(n>>8), byte(n>>16)
	return prefix.Run(space, 0, testPages)
}

func transfer(space *tiers.Space, n int) tiers.Transfer {
	r := run(space, n)
	return tiers.Transfer{Run: r, Bytes: make([]byte, int64(r.Pages())*space.Geometry.PageBytes)}
}

func store(ctx context.Context, p tiers.Tier, space *tiers.Space, from, to int) []error {
	errs := make([]error, to-from)
	var ts []tiers.Transfer
	for n := from; n < to; n++ {
		t := transfer(space, n)
		tiertest.FillRun(t.Bytes, t.Run)
		ts = append(ts, t)
	}
	p.Store(ctx, ts, func(i int, err error) { errs[i] = err })
	return errs
}

func mustStore(t testing.TB, p tiers.Tier, from, to int) {
	t.Helper()
	if err := errors.Join(store(t.Context(), p, testSpace(), from, to)...); err != nil {
		t.Fatal(err)
	}
}

// load answers each chunk's error. Wrong bytes are the one thing that must never be.
func load(t testing.TB, p tiers.Tier, from, to int) []error {
	t.Helper()
	space := testSpace()
	errs := make([]error, to-from)
	var ts []tiers.Transfer
	for n := from; n < to; n++ {
		ts = append(ts, transfer(space, n))
	}
	p.Load(context.Background(), ts, func(i int, err error) { errs[i] = err })
	for i, err := range errs {
		if err == nil {
			if page := tiertest.WrongPage(ts[i].Bytes, ts[i].Run); page >= 0 {
				t.Fatalf("page %d of chunk %d is wrong", page, from+i)
			}
		}
	}
	return errs
}

func TestReopened(t *testing.T) {
	t.Parallel()
	o := files(t.TempDir(), 2, 8<<20)
	p := mustOpen(t, o)
	mustStore(t, p, 0, 100)
	if _, err := Open(o); !errors.Is(err, dax.ErrBusy) ||
		!strings.Contains(err.Error(), fmt.Sprintf("process %d", os.Getpid())) {
		t.Errorf("opened twice: %v", err)
	}
	st := p.Stats()
	if st.Kind != "dax" || st.Chunks != 100 || !st.Local || !strings.Contains(st.Detail, "dax1.0") {
		t.Errorf("stats %+v", st)
	}
	if err := errors.Join(p.Close(), p.Close()); err != nil {
		t.Fatal(err)
	}
	p = mustOpen(t, o)
	if err := errors.Join(load(t, p, 0, 100)...); err != nil {
		t.Error(err)
	}
}

// Ranks share devices, and each finds its own again.
func TestRanks(t *testing.T) {
	t.Parallel()
	o := files(t.TempDir(), 2, 16<<20)
	o.Ranks = 2
	open := func(rank int) *Pool {
		o := o
		o.Rank = rank
		return mustOpen(t, o)
	}
	one, zero := open(1), open(0)
	mustStore(t, zero, 0, 50)
	mustStore(t, one, 50, 100)
	if err := errors.Join(zero.Close(), one.Close()); err != nil {
		t.Fatal(err)
	}
	zero, one = open(0), open(1)
	if err := errors.Join(append(load(t, zero, 0, 50), load(t, one, 50, 100)...)...); err != nil {
		t.Error(err)
	}
	for i, err := range append(load(t, one, 0, 50), load(t, zero, 50, 100)...) {
		if !errors.Is(err, tiers.ErrNotFound) {
			t.Errorf("chunk %d of the other rank: %v", i, err)
		}
	}
}

func TestOptions(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for name, edit := range map[string]func(*Options){
		"no device":     func(o *Options) { o.Devices = nil },
		"twice":         func(o *Options) { o.Devices = append(o.Devices, o.Devices[0]) },
		"rank":          func(o *Options) { o.Rank, o.Ranks = 2, 2 },
		"workers":       func(o *Options) { o.LoadWorkers = -1 },
		"no files":      func(o *Options) { o.AllowFiles = false },
		"not aligned":   func(o *Options) { o.Devices[0].SizeBytes++ },
		"little":        func(o *Options) { o.Devices[0].SizeBytes = 4096 },
		"policy":        func(o *Options) { o.Policy = "most-recently-mentioned" },
		"lookups":       func(o *Options) { o.LookupWorkers = -1 },
		"negative":      func(o *Options) { o.OffsetBytes = -4096 },
		"tiny":          func(o *Options) { o.Devices[0].SizeBytes = 32 << 10 },
		"no such place": func(o *Options) { o.Devices[0].Path = filepath.Join(dir, "no", "such") },
	} {
		o := files(filepath.Join(dir), 1, 8<<20)
		o.Devices[0].Path += "-" + strings.ReplaceAll(name, " ", "-")
		edit(&o)
		if p, err := Open(o); err == nil {
			t.Errorf("%s: opened", name)
			p.Close()
		}
	}
}
