package slab

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/slab/media"
	"lookaside/tiers/tiertest"
	"lookaside/tiers/vfs"
	"lookaside/tiers/vfs/vfstest"
)

var (
	dirSeed  = flag.Uint64("disk.seed", 0, "replay this one seed of the histories of directories")
	dirSeeds = flag.Int("disk.seeds", 20, "histories of directories to run")
	dirSteps = flag.Int("disk.steps", 60, "calls of each")
)

// many is a universe of n prefixes of two chunks each, some of them partly filled.
func many(g tiers.Geometry, n int) *universe {
	u := &universe{spaces: []*tiers.Space{tiertest.NewSpace("directories", g)}}
	for i := range n {
		pages := 2 * g.PagesPerChunk
		if i%3 == 2 {
			pages--
		}
		prefix := make(tiertest.Prefix, pages)
		prefix[0], prefix[1] = byte(i), byte(i>>8)
		run := prefix.Run(u.spaces[0], 0, pages)
		u.runs = append(u.runs, run.Chunk(0), run.Chunk(1))
	}
	return u
}

func dirOptions(fsys vfs.FS, dirs ...string) Options {
	return Options{FS: fsys, Dirs: dirs, CapacityBytes: int64(len(dirs)) << 20,
		SlabBytes: 256 << 10, PieceBytes: 8192, RetryEvery: time.Millisecond}
}

func mustBe(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// mustHold fails if a chunk cannot be loaded.
func mustHold(t testing.TB, u *universe, d *Disk) {
	t.Helper()
	if n, errs := found(t, u, d); n != len(u.runs) || len(errs) > 0 {
		t.Fatalf("%d of %d chunks are found; %v", n, len(u.runs), errs)
	}
}

func statusOf(t testing.TB, d *Disk, dir string) DirStatus {
	t.Helper()
	for _, st := range d.Dirs() {
		if st.Path == dir {
			return st
		}
	}
	t.Fatalf("%s is not there: %+v", dir, d.Dirs())
	return DirStatus{}
}

// TestAddAndMigrate: a directory is added and takes stores; another one is migrated away and loses
// nothing; what is left is found when it is opened again.
func TestAddAndMigrate(t *testing.T) {
	t.Parallel()
	mem := vfstest.NewMem()
	u := many(testGeometry, 40)
	d := mustOpen(t, dirOptions(mem, "/a", "/b"))
	mustStore(t, u, d)
	mustBe(t, d.AddDir(t.Context(), "/c", 2<<20))
	if st := d.Stats(); st.CapacityBytes != 4<<20 || !strings.Contains(st.Detail, "/c") {
		t.Fatalf("%+v", st)
	}
	used := statusOf(t, d, "/a").Slots.Used
	mustBe(t, d.RemoveDir(t.Context(), "/a", Migrate, false))
	mustHold(t, u, d)
	mustBe(t, d.engine.Check())
	if st := d.engine.Stats(); used == 0 || st.Moved < uint64(used) || st.Evictions > 0 {
		t.Fatalf("%+v, %d were in /a", st, used)
	}
	if numbers, err := slabNumbers(mem, "/a"); err != nil || len(numbers) > 0 {
		t.Fatal(numbers, err)
	}
	if st := statusOf(t, d, "/c"); st.State != Active || st.CapacityBytes != 2<<20 ||
		st.Slots.Used == 0 || st.Slots.Leased+st.Slots.Draining != 0 ||
		st.UsedBytes != int64(st.Slots.Used)*15000 {
		t.Fatalf("%+v", st)
	}
	mustClose(t, d)
	cleanCheck(t, mem, []string{"/b", "/c"})
	o := dirOptions(mem, "/b", "/c")
	o.DirBytes = []int64{1 << 20, 2 << 20}
	d = mustOpen(t, o)
	mustHold(t, u, d)
	if st := statusOf(t, d, "/c"); st.CapacityBytes != 2<<20 {
		t.Fatalf("%+v", st)
	}
	// Nothing is left of the other one, and somebody else may have it.
	mustOpen(t, dirOptions(mem, "/a"))
}

// TestModes: what each mode does to a directory's chunks.
func TestModes(t *testing.T) {
	t.Parallel()
	mem := vfstest.NewMem()
	u := many(testGeometry, 20)
	d := mustOpen(t, dirOptions(mem, "/a", "/b"))
	mustStore(t, u, d)
	in := func(dir string) (n int) {
		eachEntry(t, mem, []string{dir}, func(vfs.File, *media.Header, int, *media.Entry) { n++ })
		return n
	}
	was := in("/a")
	if was == 0 || was == len(u.runs) {
		t.Fatalf("%d chunks in /a", was)
	}

	mustBe(t, d.RemoveDir(t.Context(), "/a", Drain, false))
	if st := statusOf(t, d, "/a"); st.State != Draining || st.Slots.Draining != was ||
		st.Slots.Free != 0 || st.Slots.Used != was {
		t.Fatalf("%+v", st)
	}
	mustHold(t, u, d)
	more := many(testGeometry, 30)
	more.runs = more.runs[len(u.runs):]
	mustStore(t, more, d)
	if n := in("/a"); n != was {
		t.Fatalf("a drained directory had %d chunks, and has %d", was, n)
	}
	if err := d.ResizeDir(t.Context(), "/a", 2<<20, Migrate, false); !errors.Is(err,
		tiers.ErrBusy) {
		t.Fatal(err)
	}
	if err := d.AddDir(t.Context(), "/a", 3<<20); !errors.Is(err, ErrExists) {
		t.Fatal(err)
	}
	mustBe(t, d.AddDir(t.Context(), "/a", 0)) // takes it into use again
	if st := statusOf(t, d, "/a"); st.State != Active || st.Slots.Draining != 0 ||
		st.Slots.Free == 0 {
		t.Fatalf("%+v", st)
	}
	if err := d.AddDir(t.Context(), "/a", 1<<20); !errors.Is(err, ErrExists) {
		t.Fatal(err)
	}
	was = in("/a")

	mustBe(t, d.RemoveDir(t.Context(), "/a", Evict, false))
	n1, errs1 := found(t, u, d)
	n2, errs2 := found(t, more, d)
	if n1+n2 != len(u.runs)+len(more.runs)-was || len(errs1)+len(errs2) > 0 {
		t.Fatalf("%d and %d of %d and %d chunks are left, %d were in /a; %v %v", n1, n2,
			len(u.runs), len(more.runs), was, errs1, errs2)
	}
	if len(d.Dirs()) != 1 {
		t.Fatalf("%+v", d.Dirs())
	}
	mustBe(t, d.RemoveDir(t.Context(), "/b", Evict, true)) // the last one
	if n, errs := found(t, u, d); n != 0 || len(errs) > 0 {
		t.Fatal(n, errs)
	}
	for _, err := range u.store(t.Context(), d, 0, 1) {
		if !errors.Is(err, tiers.ErrBusy) {
			t.Fatalf("a store without a directory: %v", err)
		}
	}
	mustBe(t, d.AddDir(t.Context(), "/b", 1<<20))
	mustStore(t, u, d)
	mustHold(t, u, d)
}

// TestWithoutDirectories: a store may begin with none.
func TestWithoutDirectories(t *testing.T) {
	t.Parallel()
	mem := vfstest.NewMem()
	u := many(testGeometry, 5)
	d := mustOpen(t, Options{FS: mem, SlabBytes: 256 << 10})
	if st := d.Stats(); st.CapacityBytes != 0 || len(d.Dirs()) != 0 {
		t.Fatalf("%+v", st)
	}
	if err := u.store(t.Context(), d, 0)[0]; !errors.Is(err, tiers.ErrBusy) {
		t.Fatal(err)
	}
	mustBe(t, d.AddDir(t.Context(), "/a", 1<<20))
	mustStore(t, u, d)
	mustHold(t, u, d)
}

// TestResizeDir: growing moves nothing, shrinking moves what is in the last slabs, or drops it.
func TestResizeDir(t *testing.T) {
	t.Parallel()
	for _, how := range []Mode{Migrate, Evict} {
		mem := vfstest.NewMem()
		u := many(testGeometry, 50)
		d := mustOpen(t, dirOptions(mem, "/a"))
		mustStore(t, many(testGeometry, 20), d)
		mustBe(t, d.ResizeDir(t.Context(), "/a", 3<<20, how, false))
		if st := d.engine.Stats(); st.Moved != 0 || d.Stats().CapacityBytes != 3<<20 {
			t.Fatalf("%+v %+v", st, d.Stats())
		}
		mustStore(t, u, d)
		mustHold(t, u, d)
		const less = 2<<20 + 100<<10
		mustBe(t, d.ResizeDir(t.Context(), "/a", less, how, false))
		if st := statusOf(t, d, "/a"); st.State != Active || st.CapacityBytes != less/block*block {
			t.Fatalf("%+v", st)
		}
		n, errs := found(t, u, d)
		if how == Migrate && n != len(u.runs) || how == Evict && (n == 0 || n == len(u.runs)) ||
			len(errs) > 0 {
			t.Fatal(how, n, errs)
		}
		mustBe(t, d.engine.Check())
		mustClose(t, d)
		cleanCheck(t, mem, []string{"/a"})
		o := dirOptions(mem, "/a")
		o.DirBytes = []int64{less}
		d = mustOpen(t, o)
		if again, errs := found(t, u, d); again != n || len(errs) > 0 {
			t.Fatal(how, again, n, errs)
		}
	}
}

// TestNoRoom: what does not fit elsewhere is not begun, and the directory is in use as before.
func TestNoRoom(t *testing.T) {
	t.Parallel()
	mem := vfstest.NewMem()
	u := many(testGeometry, 52)
	d := mustOpen(t, dirOptions(mem, "/a", "/b"))
	mustStore(t, u, d)
	before := statusOf(t, d, "/a")
	for range 2 {
		err := d.RemoveDir(t.Context(), "/a", Migrate, true)
		if !errors.Is(err, ErrNoRoom) || !strings.Contains(err.Error(), "bytes are missing") {
			t.Fatal(err)
		}
		if err := d.ResizeDir(t.Context(), "/a", 64<<10, Migrate, true); !errors.Is(err,
			ErrNoRoom) {
			t.Fatal(err)
		}
	}
	after := statusOf(t, d, "/a")
	before.Total, after.Total = 0, 0
	if st := d.engine.Stats(); st.Moved != 0 || before != after {
		t.Fatalf("%+v; %+v became %+v", st, before, after)
	}
	mustHold(t, u, d)
	// a failure leaves that as it is as well
	mustBe(t, d.RemoveDir(t.Context(), "/a", Drain, false))
	if err := d.RemoveDir(t.Context(), "/a", Migrate, true); !errors.Is(err, ErrNoRoom) ||
		statusOf(t, d, "/a").State != Draining {
		t.Fatalf("%v %+v", err, d.Dirs())
	}
	mustBe(t, d.AddDir(t.Context(), "/c", 1<<20))
	mustBe(t, d.RemoveDir(t.Context(), "/a", Migrate, true))
	mustHold(t, u, d)

	small := vfstest.NewMem()
	small.SpaceBytes = 3 << 20
	d = mustOpen(t, dirOptions(small, "/a"))
	if err := d.AddDir(t.Context(), "/b", 8<<20); !errors.Is(err, ErrNoRoom) ||
		!vfs.IsNoSpace(err) {
		t.Fatal(err)
	}
	if err := d.ResizeDir(t.Context(), "/a", 8<<20, Migrate, false); !errors.Is(err, ErrNoRoom) {
		t.Fatal(err)
	}
	if st := d.Stats(); len(d.Dirs()) != 1 || st.CapacityBytes != 1<<20 {
		t.Fatalf("%+v", st)
	}
	mustBe(t, d.AddDir(t.Context(), "/b", 1<<20)) // the failed ones left nothing behind
}

// TestRefused: what makes no sense.
func TestRefused(t *testing.T) {
	t.Parallel()
	mem := vfstest.NewMem()
	other := mustOpen(t, dirOptions(mem, "/taken"))
	o := dirOptions(mem, "/a")
	o.CapacityBytes, o.SlabBytes = 60*leastSlabBytes, leastSlabBytes
	d := mustOpen(t, o)
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("never mind")
	cancel(why)
	for what, c := range map[string]struct{ err, want error }{
		"no directory":     {d.RemoveDir(t.Context(), "/b", Evict, true), tiers.ErrNotFound},
		"resized nothing":  {d.ResizeDir(t.Context(), "/b", 1<<20, Evict, true), tiers.ErrNotFound},
		"mode":             {d.RemoveDir(t.Context(), "/a", "forget", true), tiers.ErrInvalid},
		"drained by size":  {d.ResizeDir(t.Context(), "/a", 1<<20, Drain, true), tiers.ErrInvalid},
		"tiny":             {d.ResizeDir(t.Context(), "/a", 1, Migrate, true), tiers.ErrInvalid},
		"tiny directory":   {d.AddDir(t.Context(), "/b", 1), tiers.ErrInvalid},
		"slabs":            {d.AddDir(t.Context(), "/b", 1<<20), tiers.ErrBusy},
		"more slabs":       {d.ResizeDir(t.Context(), "/a", 1<<30, Migrate, true), tiers.ErrBusy},
		"taken":            {other.AddDir(t.Context(), "/a", 1<<20), new(vfs.LockedError)},
		"cancelled":        {d.RemoveDir(ctx, "/a", Evict, true), why},
		"cancelled adding": {d.AddDir(ctx, "/b", 1<<20), why},
	} {
		var locked *vfs.LockedError
		if !errors.Is(c.err, c.want) && !(errors.As(c.want, &locked) && errors.As(c.err, &locked)) {
			t.Errorf("%s: %v, want %v", what, c.err, c.want)
		}
	}
	mustClose(t, other)
	for what, err := range map[string]error{"add": other.AddDir(t.Context(), "/b", 1<<20),
		"remove": other.RemoveDir(t.Context(), "/taken", Evict, true),
		"resize": other.ResizeDir(t.Context(), "/taken", 1<<20, Evict, true)} {
		if !errors.Is(err, tiers.ErrClosed) {
			t.Errorf("%s after Close: %v", what, err)
		}
	}
	if other.Dirs() != nil {
		t.Error("a closed store has directories")
	}
}

// TestSizes: directories of different sizes.
func TestSizes(t *testing.T) {
	t.Parallel()
	mem := vfstest.NewMem()
	o := Options{FS: mem, Dirs: []string{"/a", "/b", "/c"}, DirBytes: []int64{1 << 20, 8 << 20,
		300 << 10}, SlabBytes: 256 << 10}
	for range 2 {
		d := mustOpen(t, o)
		for i, st := range d.Dirs() {
			if st.Path != o.Dirs[i] || st.CapacityBytes > o.DirBytes[i] ||
				st.CapacityBytes < o.DirBytes[i]-leastSlabBytes {
				t.Errorf("%+v, want %d", st, o.DirBytes[i])
			}
		}
		mustClose(t, d)
	}
	for _, sizes := range [][]int64{{1 << 20}, {1 << 20, 0, 1 << 20}, {1 << 62, 1 << 62, 1 << 62}} {
		o.DirBytes = sizes
		if _, err := Open(o); !errors.Is(err, tiers.ErrInvalid) {
			t.Errorf("%v: %v", sizes, err)
		}
	}
}

// TestLeasedDir: what is being read is not taken away without force; with it, that is waited for.
func TestLeasedDir(t *testing.T) {
	t.Parallel()
	for _, how := range []Mode{Migrate, Evict} {
		t.Run(string(how), func(t *testing.T) {
			t.Parallel()
			var faults switchable
			mem := vfstest.NewMem()
			u := many(testGeometry, 1)
			d := mustOpen(t, dirOptions(vfstest.Faulty(mem, faults.ask), "/a"))
			mustStore(t, u, d)
			mustBe(t, d.AddDir(t.Context(), "/b", 1<<20))
			reading, open := make(chan struct{}), make(chan struct{})
			var once sync.Once
			faults.set(func(c vfstest.Call) vfstest.Fault {
				if c.Op == vfstest.OpRead && strings.HasPrefix(c.Name, "/a") {
					first := false
					once.Do(func() { first = true })
					if first {
						close(reading)
						<-open
					}
				}
				return vfstest.Fault{}
			})
			loaded := make(chan error)
			go func() { loaded <- u.load(t, d, 0) }()
			<-reading
			err := d.RemoveDir(t.Context(), "/a", how, false)
			if st := statusOf(t, d, "/a"); !errors.Is(err, ErrLeased) || st.State != Active ||
				st.Slots.Leased != 1 || st.Slots.Draining != 0 {
				t.Fatalf("%v, %+v", err, st)
			}
			removed := make(chan error)
			go func() { removed <- d.RemoveDir(t.Context(), "/a", how, true) }()
			eventually(t, "it is under way",
				func() bool { return statusOf(t, d, "/a").State != Active })
			if err := d.AddDir(t.Context(), "/c", 1<<20); !errors.Is(err, tiers.ErrBusy) {
				t.Errorf("two changes at once: %v", err)
			}
			if how == Migrate {
				// Others find it meanwhile, and then elsewhere.
				eventually(t, "it has moved",
					func() bool { mustHold(t, u, d); return d.engine.Stats().Moved == 2 })
			}
			select {
			case err := <-removed:
				t.Fatalf("it was removed while it was read: %v", err)
			case <-time.After(10 * time.Millisecond):
			}
			close(open)
			if err := <-loaded; err != nil {
				t.Error(err)
			}
			mustBe(t, <-removed)
			if n, errs := found(t, u, d); how == Migrate && n != 2 || how == Evict && n != 0 ||
				len(errs) > 0 {
				t.Fatal(n, errs)
			}
		})
	}
}

// TestCancelled: a change that is cancelled, or that Close overtakes, leaves a store that works and
// has lost nothing.
func TestCancelled(t *testing.T) {
	t.Parallel()
	for n := int64(1); n < 100; n += 7 {
		for _, byClose := range []bool{false, true} {
			mem := vfstest.NewMem()
			u := many(testGeometry, 20)
			ctx, cancel := context.WithCancel(t.Context())
			var mu sync.Mutex
			var writes int64
			armed := false
			meets := func() bool { // the n-th write
				mu.Lock()
				defer mu.Unlock()
				if armed {
					writes++
				}
				return armed && writes == n
			}
			arm := func(is bool) (met bool) {
				mu.Lock()
				defer mu.Unlock()
				armed = is
				return writes >= n
			}
			var d *Disk
			closed := make(chan error, 1)
			fs := vfstest.Faulty(mem, func(c vfstest.Call) vfstest.Fault {
				if c.Op == vfstest.OpWrite && meets() {
					if byClose {
						go func() { closed <- d.Close() }()
						<-d.stopping
					} else {
						cancel()
					}
				}
				return vfstest.Fault{}
			})
			d = mustOpen(t, dirOptions(fs, "/a", "/b"))
			mustStore(t, u, d)
			arm(true)
			err := d.RemoveDir(ctx, "/a", Migrate, true)
			dirs := []string{"/a", "/b"}
			switch {
			case err == nil:
				dirs = dirs[1:]
			case byClose && !errors.Is(err, tiers.ErrClosed) ||
				!byClose && !errors.Is(err, context.Canceled):
				t.Fatal(err)
			}
			met := arm(false)
			if byClose && met {
				mustBe(t, <-closed)
			} else {
				mustBe(t, d.engine.Check())
				mustHold(t, u, d)
				if len(d.Dirs()) != len(dirs) || d.Dirs()[0].State != Active ||
					d.Dirs()[0].Slots.Draining > 0 {
					t.Fatalf("%+v", d.Dirs())
				}
				mustStore(t, many(testGeometry, 25), d)
				mustClose(t, d)
			}
			cleanCheck(t, mem, dirs)
			d = mustOpen(t, dirOptions(mem, dirs...))
			mustHold(t, u, d)
			mustClose(t, d)
			cancel()
		}
	}
}

// TestMigrationFaults: whichever operation fails while a directory is migrated, no byte is wrong,
// the store works, and an error or a lost slab is all there is.
func TestMigrationFaults(t *testing.T) {
	t.Parallel()
	for _, kinds := range []vfstest.Op{vfstest.OpRead, vfstest.OpWrite, vfstest.OpSync,
		vfstest.OpRemove | vfstest.OpSyncDir | vfstest.OpAllocate} {
		for n := int64(1); ; n += 1 + n/8 {
			mem := vfstest.NewMem()
			u := many(testGeometry, 20)
			counter := &vfstest.Counter{Kinds: kinds, N: n, Fault: vfstest.Fault{Err: syscall.EIO}}
			var faults switchable
			d := mustOpen(t, dirOptions(vfstest.Faulty(mem, faults.ask), "/a", "/b"))
			mustStore(t, u, d)
			faults.set(counter.Inject)
			err := d.RemoveDir(t.Context(), "/a", Migrate, true)
			faults.set(nil)
			mustBe(t, d.engine.Check())
			have, errs := found(t, u, d)
			switch {
			case len(errs) > 0:
				t.Fatalf("operation %d of %b: %v", n, kinds, errs)
			case kinds == vfstest.OpRead && have < len(u.runs)-1: // what cannot be read is dropped
				t.Fatalf("read %d: %d of %d are left", n, have, len(u.runs))
			case kinds == vfstest.OpWrite && have < len(u.runs):
				t.Fatalf("write %d: %d of %d are left; %v", n, have, len(u.runs), err)
			}
			mustStore(t, u, d)
			mustHold(t, u, d)
			mustClose(t, d)
			if !counter.Met() {
				mustBe(t, err)
				break
			}
		}
	}
}

// TestMigrationFindsRot: a chunk that does not check out is not copied.
func TestMigrationFindsRot(t *testing.T) {
	t.Parallel()
	mem := vfstest.NewMem()
	u := many(testGeometry, 10)
	d := mustOpen(t, dirOptions(mem, "/a"))
	mustStore(t, u, d)
	rot(t, mem, []string{"/a"})
	mustBe(t, d.AddDir(t.Context(), "/b", 1<<20))
	mustBe(t, d.RemoveDir(t.Context(), "/a", Migrate, false))
	if n, errs := found(t, u, d); n != 0 || len(errs) > 0 ||
		d.Stats().Corrupt != uint64(len(u.runs)) {
		t.Fatal(n, errs, d.Stats())
	}
	mustStore(t, u, d)
	mustHold(t, u, d)
}

// TestChangesUnderTraffic: while directories are added, resized, drained and migrated, every chunk
// can be loaded at each moment, and stores work.
func TestChangesUnderTraffic(t *testing.T) {
	t.Parallel()
	const seed = 5
	rnd := rand.New(rand.NewPCG(seed, 1))
	mem := vfstest.NewMem()
	u := many(testGeometry, 30)
	d := mustOpen(t, dirOptions(mem, "/0", "/1"))
	mustStore(t, u, d)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var traffic sync.WaitGroup
	for w := range 3 {
		traffic.Go(func() {
			rnd := rand.New(rand.NewPCG(seed, uint64(10+w)))
			for ctx.Err() == nil {
				if i := rnd.IntN(len(u.runs)); u.load(t, d, i) != nil {
					t.Errorf("chunk %d is not to be had: %v", i, u.load(t, d, i))
					return
				}
			}
		})
	}
	traffic.Go(func() { // others come and go
		other := many(tiers.Geometry{PageBytes: 3000, PagesPerChunk: 2, PageTokens: 16,
			DigestBytes: 16}, 10)
		for ctx.Err() == nil {
			for i := range other.runs {
				if err := other.store(ctx, d, i)[0]; err != nil && ctx.Err() == nil &&
					!errors.Is(err, tiers.ErrBusy) {
					t.Error(err)
				}
			}
			if err := d.Drop(context.Background(), other.runs[0]); err != nil {
				t.Error(err)
			}
			if _, err := d.Clear(context.Background(), other.spaces[0].Fingerprint); err != nil {
				t.Error(err)
			}
		}
	})
	dirs := []string{"/0", "/1"}
	for i := 2; i < 14 && !t.Failed(); i++ {
		next := fmt.Sprintf("/%d", i)
		if err := d.AddDir(ctx, next, 1<<20); err != nil {
			t.Fatal(seed, err)
		}
		dirs = append(dirs, next)
		k := rnd.IntN(len(dirs))
		switch rnd.IntN(3) {
		case 0:
			if err := d.ResizeDir(ctx, dirs[k], 2<<20, Migrate, true); err != nil {
				t.Fatal(seed, err)
			}
			if err := d.ResizeDir(ctx, dirs[k], 1<<20, Migrate, true); err != nil {
				t.Fatal(seed, err)
			}
		case 1:
			if err := errors.Join(d.RemoveDir(ctx, dirs[k], Drain, false),
				d.AddDir(ctx, dirs[k], 0)); err != nil {
				t.Fatal(seed, err)
			}
		}
		if err := d.RemoveDir(ctx, dirs[k], Migrate, true); err != nil {
			t.Fatal(seed, err)
		}
		dirs = slices.Delete(dirs, k, k+1)
	}
	stop()
	traffic.Wait()
	if err := d.engine.Check(); err != nil {
		t.Fatal(err)
	}
	mustHold(t, u, d)
	mustClose(t, d)
	cleanCheck(t, mem, dirs)
}

// TestPowerCutWhileMoving clones the files after every change that migrations make, as a power cut
// might leave them. Opened again, nothing is lost, and nothing is there twice. The second
// migration, back to where a first one was cancelled, goes to slots with old entries.
func TestPowerCutWhileMoving(t *testing.T) {
	t.Parallel()
	for seed := range uint64(6) {
		mem := vfstest.NewMem()
		u := many(testGeometry, 12)
		d := mustOpen(t, dirOptions(mem, "/a", "/b"))
		mustStore(t, u, d)
		var mu sync.Mutex
		clones, both := 0, 0
		var cutErr error
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		mem.OnWrite(func() {
			mu.Lock()
			defer mu.Unlock()
			if clones++; clones == 12+4*int(seed) {
				cancel()
			}
			if cutErr != nil || clones%3 != int(seed)%3 {
				return
			}
			cutErr = func() error {
				o := dirOptions(mem.CrashClone(seed<<32|uint64(clones)), "/a", "/b")
				entries := 0
				eachEntry(t, o.FS, o.Dirs, func(vfs.File, *media.Header, int,
					*media.Entry) {
					entries++
				})
				if entries > len(u.runs) {
					both++
				}
				d, err := Open(o)
				if err != nil {
					return err
				}
				n, errs := found(t, u, d)
				if st := d.Stats(); n != len(u.runs) || len(errs) > 0 || st.Chunks != int64(n) {
					err = fmt.Errorf("cut %d: %d of %d chunks are found; %+v %v", clones, n,
						len(u.runs), st, errs)
				}
				err = errors.Join(err, d.engine.Check(), d.Close())
				cleanCheck(t, o.FS, o.Dirs)
				return err
			}()
		})
		first := d.RemoveDir(ctx, "/a", Migrate, false)
		if !errors.Is(first, context.Canceled) {
			first = fmt.Errorf("not cancelled: %v", first)
		} else {
			first = nil
		}
		second := d.RemoveDir(t.Context(), "/b", Migrate, false)
		mu.Lock()
		err, doubled, cuts := errors.Join(first, second, cutErr), both, clones
		mem.OnWrite(nil)
		mu.Unlock()
		if err != nil || doubled == 0 {
			t.Fatalf("seed %d: %v; %d of %d cuts left some chunks twice", seed, err, doubled, cuts)
		}
		mustHold(t, u, d)
		mustClose(t, d)
	}
}

// The model of a store whose directories come and go: which chunks must be there, and what the
// directories are.
type dirWorld struct {
	t     *testing.T
	seed  uint64
	step  int
	rnd   *rand.Rand
	mem   *vfstest.Mem
	u     *universe
	d     *Disk
	names []string
	sizes map[string]int64
	must  map[int]bool // chunks that are there unless something was evicted
	// chunks that were dropped, and not stored since: they are not there, whatever happens
	gone  map[int]bool
	next  int
	stats struct{ moves, evictions uint64 }
	told  map[string]int
}

func (w *dirWorld) fatal(format string, args ...any) {
	w.t.Helper()
	w.t.Fatalf("seed %d step %d (replay: go test ./tiers/slab -run TestDirHistories -disk.seed=%d): %s", w.seed, w.step, w.seed, fmt.Sprintf(format, args...))
}

func (w *dirWorld) options(fsys vfs.FS) Options {
	o := Options{FS: fsys, Dirs: w.names, SlabBytes: 128 << 10, PieceBytes: 8192,
		RetryEvery: time.Millisecond, Seed: w.seed}
	for _, n := range w.names {
		o.DirBytes = append(o.DirBytes, w.sizes[n])
	}
	return o
}

func (w *dirWorld) open() {
	d, err := Open(w.options(w.mem))
	if err != nil {
		w.fatal("%v", err)
	}
	w.d = d
	w.t.Cleanup(func() { _ = d.Close() })
}

// verify looks for everything in a store.
func (w *dirWorld) verify(d *Disk, what string) {
	lost := 0
	ts, errs := make([]tiers.Transfer, len(w.u.runs)), make([]error, len(w.u.runs))
	for i := range ts {
		ts[i] = w.u.transfer(i)
	}
	d.Load(context.Background(), ts, func(i int, err error) { errs[i] = err })
	for i, err := range errs {
		if err == nil {
			if page := tiertest.WrongPage(ts[i].Bytes, ts[i].Run); page >= 0 {
				w.fatal("%s: page %d of chunk %d is wrong", what, page, i)
			}
		}
		if err != nil && !errors.Is(err, tiers.ErrNotFound) {
			w.fatal("%s: chunk %d: %v", what, i, err)
		}
		if err != nil && w.must[i] {
			lost++
		}
		if err == nil && w.gone[i] {
			w.fatal("%s: chunk %d was dropped, and is back", what, i)
		}
	}
	if lost > 0 {
		w.fatal("%s: %d of %d chunks are lost; %+v", what, lost, len(w.must), d.Dirs())
	}
	if err := d.engine.Check(); err != nil {
		w.fatal("%s: %v", what, err)
	}
}

// forget takes what may have been evicted out of the model.
func (w *dirWorld) forget() {
	if st := w.d.engine.Stats(); st.Evictions > w.stats.evictions {
		w.stats.evictions = st.Evictions
		w.retake()
	}
}

// retake makes the model what there is.
func (w *dirWorld) retake() {
	for i := range w.must {
		if w.u.load(w.t, w.d, i) != nil {
			delete(w.must, i)
		}
	}
}

// dir is one of the directories, or sometimes none.
func (w *dirWorld) dir() string {
	if len(w.names) == 0 || w.rnd.IntN(15) == 0 {
		return "/none"
	}
	return w.names[w.rnd.IntN(len(w.names))]
}

func (w *dirWorld) size() int64 { return int64(1+w.rnd.IntN(12)) * (64 << 10) }

// change changes the directories, and now and then looks at what a power cut would leave of it.
func (w *dirWorld) change() {
	ctx, cancel := context.WithCancel(w.t.Context())
	defer cancel()
	var mu sync.Mutex
	var clone *vfstest.Mem
	cutAt, writes := 1+w.rnd.IntN(60), 0
	cancels := w.rnd.IntN(3) == 0
	w.mem.OnWrite(func() {
		mu.Lock()
		defer mu.Unlock()
		if writes++; writes == cutAt {
			clone = w.mem.CrashClone(w.seed<<20 | uint64(w.step))
			if cancels {
				cancel()
			}
		}
	})
	before := w.options(nil)
	name, how, force := w.dir(), []Mode{Migrate, Migrate, Evict, Drain}[w.rnd.IntN(4)],
		w.rnd.IntN(2) == 0
	had := slices.Contains(w.names, name)
	var st DirStatus
	if had {
		st = statusOf(w.t, w.d, name)
	}
	var err error
	var what string
	keeps := true // every chunk
	switch k := w.rnd.IntN(10); {
	case k < 4 && len(w.names) < 6:
		what = "add"
		bytes := w.size()
		if !had || st.State != Draining {
			w.next++
			name, had = fmt.Sprintf("/d%d", w.next), false
			if old := 1 + w.rnd.IntN(w.next); !slices.Contains(w.names, fmt.Sprintf("/d%d", old)) {
				// or one that was there before
				name = fmt.Sprintf("/d%d", old)
			}
		} else {
			bytes = 0
		}
		if err = w.d.AddDir(ctx, name, bytes); err == nil && !had {
			w.names, w.sizes[name] = append(slices.Clone(w.names), name), bytes
		}
	case k < 8:
		what = "remove " + string(how)
		keeps = how != Evict
		if err = w.d.RemoveDir(ctx, name, how, force); err == nil && how != Drain {
			w.names = slices.DeleteFunc(slices.Clone(w.names),
				func(n string) bool { return n == name })
		}
	default:
		if how == Drain {
			how = Evict
		}
		bytes := w.size()
		what = fmt.Sprintf("resize %s from %d to %d", how, w.sizes[name], bytes)
		keeps = how == Migrate || bytes >= w.sizes[name]
		if err = w.d.ResizeDir(ctx, name, bytes, how, force); err == nil {
			w.sizes[name] = bytes
		}
	}
	mu.Lock()
	w.mem.OnWrite(nil)
	mu.Unlock()
	what += " " + name
	switch {
	case err == nil:
		w.told[strings.Fields(what)[0]]++
	case errors.Is(err, ErrNoRoom):
		w.told["no room"]++
	case errors.Is(err, context.Canceled) && cancels:
		w.told["cancelled"]++
	case errors.Is(err, tiers.ErrNotFound) && !had || errors.Is(err, tiers.ErrBusy) &&
		st.State == Draining:
	default:
		w.fatal("%s: %v", what, err)
	}
	if err != nil && had {
		if now := statusOf(w.t, w.d, name); now.State != st.State {
			w.fatal("%s: %v; it was %s and is %s", what, err, st.State, now.State)
		}
	}
	w.forget()
	if keeps {
		w.verify(w.d, what)
	} else {
		w.retake()
	}
	if clone != nil && (keeps || err == nil) {
		o := before
		o.FS = clone
		if what[0] == 'a' && err == nil && len(o.Dirs) == 0 {
			return
		}
		d, err := Open(o)
		if err != nil {
			w.fatal("%s, then a power cut: %v", what, err)
		}
		w.verify(d, what+", then a power cut")
		if err := d.Close(); err != nil {
			w.fatal("%v", err)
		}
		cleanCheck(w.t, clone, o.Dirs)
		w.told["power cut"]++
	}
}

func (w *dirWorld) run(steps int) {
	w.open()
	for w.step = range steps {
		switch k := w.rnd.IntN(20); {
		case k < 7:
			var which []int
			for range 1 + w.rnd.IntN(8) {
				which = append(which, w.rnd.IntN(len(w.u.runs)))
			}
			for j, err := range w.u.store(w.t.Context(), w.d, which...) {
				for k := range w.u.runs {
					if w.u.covers(which[j], k) {
						delete(w.gone, k)
					}
				}
				if err == nil {
					w.must[which[j]] = true
				} else if !errors.Is(err, tiers.ErrBusy) {
					w.fatal("store: %v", err)
				}
			}
			w.forget()
		case k < 9:
			i := w.rnd.IntN(len(w.u.runs))
			if err := w.u.load(w.t, w.d, i); err != nil && (w.must[i] ||
				!errors.Is(err, tiers.ErrNotFound)) {
				w.fatal("chunk %d: %v", i, err)
			}
		case k < 10:
			i := w.rnd.IntN(len(w.u.runs))
			for j := range w.u.runs {
				if w.u.covers(i, j) || w.u.covers(j, i) {
					delete(w.must, j)
				}
				if w.u.covers(j, i) {
					w.gone[j] = true
				}
			}
			if err := w.d.Drop(w.t.Context(), w.u.runs[i]); err != nil {
				w.fatal("drop: %v", err)
			}
			if err := w.u.load(w.t, w.d, i); !errors.Is(err, tiers.ErrNotFound) {
				w.fatal("chunk %d was dropped, and its load says %v", i, err)
			}
		case k < 17:
			w.change()
		case k < 18: // the power fails
			w.stats.moves += w.d.engine.Stats().Moved
			mem := w.mem.CrashClone(w.seed<<40 | uint64(w.step))
			_ = w.d.Close()
			w.mem = mem
			w.open()
			w.stats.evictions = 0
			w.told["crash"]++
		default:
			w.stats.moves += w.d.engine.Stats().Moved
			if err := w.d.Close(); err != nil {
				w.fatal("%v", err)
			}
			if len(w.names) > 0 {
				cleanCheck(w.t, w.mem, w.names)
			}
			w.open()
			w.stats.evictions = 0
		}
		if w.rnd.IntN(4) == 0 {
			w.verify(w.d, "at any time")
		}
	}
	w.verify(w.d, "at the end")
	w.stats.moves += w.d.engine.Stats().Moved
	if err := w.d.Close(); err != nil {
		w.fatal("%v", err)
	}
}

// TestDirHistories: random histories of a store whose directories are added, removed in each mode,
// resized, cancelled and cut from power while chunks are stored, loaded and dropped. A chunk that
// is there has its bytes; one that was stored is there, unless it was evicted for room, dropped, or
// went with its directory by Evict.
func TestDirHistories(t *testing.T) {
	t.Parallel()
	told := map[string]int{}
	run := func(seed uint64) {
		rnd := rand.New(rand.NewPCG(seed, 9))
		w := &dirWorld{t: t, seed: seed, rnd: rnd, mem: vfstest.NewMem(), sizes: map[string]int64{},
			must: map[int]bool{}, gone: map[int]bool{}, told: told}
		w.u = many([]tiers.Geometry{testGeometry, {PageBytes: 1000, PagesPerChunk: 4,
			PageTokens: 16, DigestBytes: 16}}[rnd.IntN(2)], 5+rnd.IntN(30))
		for range rnd.IntN(4) {
			w.next++
			name := fmt.Sprintf("/d%d", w.next)
			w.names, w.sizes[name] = append(w.names, name), w.size()
		}
		w.run(*dirSteps)
		told["moved"] += int(w.stats.moves)
	}
	if *dirSeed != 0 {
		run(*dirSeed)
		return
	}
	seeds := *dirSeeds
	if testing.Short() {
		seeds = 5
	}
	for seed := range uint64(seeds) {
		run(seed + 1)
	}
	t.Log(told)
	for _, what := range []string{"add", "remove", "resize", "crash", "moved"} {
		if told[what] == 0 && seeds >= 20 {
			t.Errorf("the histories never came to %q", what)
		}
	}
}
