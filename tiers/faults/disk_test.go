package faults

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lookaside/internal/leak"
	"lookaside/tiers"
	"lookaside/tiers/slab"
	"lookaside/tiers/tiertest"
	"lookaside/tiers/vfs"
	"lookaside/tiers/vfs/vfstest"
)

var (
	seedFlag   = flag.Uint64("faults.seed", 1, "of what is random")
	roundsFlag = flag.Int("faults.rounds", 1,
		"how often the random ones run, each with another seed")
)

// childEnv makes this binary the process that strace runs: see TestErrorsInSystemCalls.
const childEnv = "FAULTS_TEST_CHILD"

func TestMain(m *testing.M) {
	if dir := os.Getenv(childEnv); dir != "" {
		if err := child(dir); err != nil {
			fmt.Println("WRONG:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if spec := os.Getenv(cutEnv); spec != "" {
		if err := storeUntilCut(spec); err != nil {
			fmt.Println("WRONG:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if dirs := os.Getenv(fuseEnv); dirs != "" {
		serveFUSE(dirs)
		return
	}
	leak.Main(m)
}

// The space of all tests here: chunks of 256 KiB.
var space = tiertest.NewSpace("faults", tiers.Geometry{PageBytes: 64 << 10, PagesPerChunk: 4,
	PageTokens: 16, DigestBytes: 32})

// chunk is the n-th of endlessly many.
func chunk(n int) tiers.Run {
	p := tiertest.Prefix{byte(n), byte(n >> 8), byte(n >> 16), 0}
	return p.Run(space, 0, len(p))
}

func transfers(from, to int) (ts []tiers.Transfer) {
	for n := from; n < to; n++ {
		run := chunk(n)
		ts = append(ts, tiers.Transfer{Run: run,
			Bytes: make([]byte, int64(run.Pages())*space.Geometry.PageBytes)})
	}
	return ts
}

// store stores chunks [from, to) and says how each went.
func store(ctx context.Context, tier tiers.Tier, from, to int) []error {
	ts := transfers(from, to)
	for _, t := range ts {
		tiertest.FillRun(t.Bytes, t.Run)
	}
	errs := make([]error, len(ts))
	tier.Store(ctx, ts, func(i int, err error) { errs[i] = err })
	return errs
}

// load loads chunks [from, to) and says how each went. The error is about what must never be: a hit
// with other bytes.
func load(ctx context.Context, tier tiers.Tier, from, to int) ([]error, error) {
	ts := transfers(from, to)
	errs := make([]error, len(ts))
	tier.Load(ctx, ts, func(i int, err error) { errs[i] = err })
	for i, t := range ts {
		if errs[i] == nil {
			if page := tiertest.WrongPage(t.Bytes, t.Run); page >= 0 {
				return errs, fmt.Errorf(
					"page %d of chunk %d has other bytes than were stored, and no error", page,
					from+i)
			}
		}
	}
	return errs, nil
}

func stored(t *testing.T, tier tiers.Tier, from, to int) {
	t.Helper()
	for i, err := range store(t.Context(), tier, from, to) {
		if err != nil {
			t.Fatalf("Store of chunk %d: %v", from+i, err)
		}
	}
}

func loaded(t *testing.T, tier tiers.Tier, from, to int) []error {
	t.Helper()
	errs, wrong := load(t.Context(), tier, from, to)
	ok(t, wrong)
	return errs
}

func count(errs []error, is func(error) bool) (n int) {
	for _, err := range errs {
		if is(err) {
			n++
		}
	}
	return n
}

func isNil(err error) bool     { return err == nil }
func isMissing(e error) bool   { return errors.Is(e, tiers.ErrNotFound) }
func isCorrupt(err error) bool { return errors.Is(err, tiers.ErrCorrupt) }

// options are of a store of slabs of 4 MiB.
func options(dir string, capacity int64) slab.Options {
	return slab.Options{Dirs: []string{dir}, CapacityBytes: capacity, SlabBytes: 4 << 20,
		RetryEvery: 20 * time.Millisecond}
}

func open(t *testing.T, o slab.Options) *slab.Disk {
	t.Helper()
	d, err := slab.Open(o)
	ok(t, err)
	t.Cleanup(func() { _ = d.Close() })
	return d
}

// recovers waits until the tier has all of its capacity, and takes and gives chunks again: what
// went wrong is over.
func recovers(t *testing.T, tier tiers.Tier, capacity int64) {
	t.Helper()
	for n, deadline := 1<<20, time.Now().Add(time.Minute); ; n++ {
		if tier.Stats().CapacityBytes == capacity && store(t.Context(), tier, n, n+1)[0] == nil &&
			loaded(t, tier, n, n+1)[0] == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("a minute after the fault was over the tier does not work: %+v", tier.Stats())
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// checkClean verifies a store offline.
func checkClean(t *testing.T, fsys vfs.FS, dir string) {
	t.Helper()
	r, err := slab.Check(t.Context(), slab.CheckOptions{FS: fsys, Dirs: []string{dir}})
	if err != nil || r.Bad() > 0 {
		t.Fatalf("check of %s: %v, %+v", dir, err, r)
	}
}

// Media that do something else than what they say, at every sixth operation in turn (with
// -faults.rounds=3 at every one).
func TestMediaThatLie(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		kinds vfstest.Op
		fault vfstest.Fault
		stays bool
	}{
		"write torn": {vfstest.OpWrite, vfstest.Fault{Torn: true}, false},
		"write torn, failing": {vfstest.OpWrite, vfstest.Fault{Torn: true,
			Err: syscall.ENOSPC}, false},
		"write flipped":         {vfstest.OpWrite, vfstest.Fault{Flip: 12345}, false},
		"write misdirected":     {vfstest.OpWrite, vfstest.Fault{Shift: 4096}, false},
		"write misdirected far": {vfstest.OpWrite, vfstest.Fault{Shift: -128 << 10}, false},
		"read flipped":          {vfstest.OpRead, vfstest.Fault{Flip: 12345}, false},
		"read misdirected":      {vfstest.OpRead, vfstest.Fault{Shift: 4096}, false},
		"no space from then on": {vfstest.OpWrite | vfstest.OpAllocate,
			vfstest.Fault{Err: syscall.ENOSPC}, true},
		"read-only from then on":     {vfstest.OpChange, vfstest.Fault{Err: syscall.EROFS}, true},
		"unreadable from then on":    {vfstest.OpRead, vfstest.Fault{Err: syscall.EIO}, true},
		"syncs fail from then on":    {vfstest.OpSync, vfstest.Fault{Err: syscall.EIO}, true},
		"writes flip from then on":   {vfstest.OpWrite, vfstest.Fault{Flip: 777}, true},
		"reads stray from then on":   {vfstest.OpRead, vfstest.Fault{Shift: 8192}, true},
		"nothing works from then on": {vfstest.OpAny, vfstest.Fault{Err: syscall.EIO}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tiertest.Faults(t, tiertest.Factory{Persistent: true, Evicts: true,
				Lies: c.fault.Err == nil,
				New: func(t testing.TB, o tiertest.MediumOptions) *tiertest.Medium {
					n := o.FailNth // 0: never
					if n > 0 && *roundsFlag < 3 {
						n = 6*n - int64(*seedFlag%6)
					}
					counter := &vfstest.Counter{Kinds: c.kinds, N: n, Fault: c.fault,
						Stays: c.stays}
					opts := options("/d", 16<<20)
					opts.FS = vfstest.Faulty(vfstest.NewMem(), counter.Inject)
					opts.RetryEvery = time.Millisecond
					return &tiertest.Medium{Open: func() (tiers.Tier, error) {
						d, err := slab.Open(opts)
						if err != nil {
							return nil, err
						}
						return d, nil
					}, Failed: counter.Met}
				}})
		})
	}
}

// The file under the loop device is cut: what lies behind is read with EIO.
func TestLoopDeviceTooShort(t *testing.T) {
	need(t, "losetup", "mkfs.ext4")
	device, backing := loop(t, t.TempDir(), 64<<20)
	m := mount(t, device, "ext4", "")
	dir := filepath.Join(m.dir, "kv")
	d := open(t, options(dir, 40<<20))
	const n = 120
	stored(t, d, 0, n)
	if good := count(loaded(t, d, 0, n), isNil); good != n {
		t.Fatalf("%d of %d chunks are there before anything fails", good, n)
	}
	ok(t, os.Truncate(backing, 24<<20))
	errs := loaded(t, d, 0, n)
	good := count(errs, isNil)
	if good == n {
		t.Error("nothing failed, though 40 of 64 MiB are gone")
	}
	for _, err := range errs {
		if err != nil && !errors.Is(err, syscall.EIO) && !isMissing(err) && !isCorrupt(err) {
			t.Errorf("neither an I/O error nor a miss: %v", err)
		}
	}
	t.Logf("%d of %d chunks are left; %+v", good, n, d.Stats())
	// What failed is a miss from now on, and does not come back with the bytes' being gone.
	for i, err := range loaded(t, d, 0, n) {
		if err == nil && errs[i] != nil {
			t.Errorf("chunk %d is back", i)
		}
	}
	store(t.Context(), d, n, n+10) // may fail: no wrong bytes
	loaded(t, d, n, n+10)
	_ = d.Close()
	// The machine is repaired, the lost blocks are zeros.
	ok(t, os.Truncate(backing, 64<<20))
	m.unmount()
	m.remount()
	d, err := slab.Open(options(dir, 40<<20))
	if err != nil { // of the file system, whose own blocks are lost as well
		t.Logf("opened again: %v", err)
		return
	}
	defer d.Close()
	back := loaded(t, d, 0, n)
	t.Logf("%d chunks after the repair, %d corrupt", count(back, isNil), count(back, isCorrupt))
}

// The file system under the loop device is full: writes and syncs fail with EIO, sooner or later.
// What was acknowledged before is there.
func TestLoopDeviceOverFull(t *testing.T) {
	need(t, "losetup", "mkfs.ext4")
	small := mount(t, "tmpfs", "tmpfs", "size=32m")
	device, _ := loop(t, small.dir, 128<<20)
	m := mount(t, device, "ext4", "")
	for _, direct := range []slab.Direct{slab.DirectAuto, slab.DirectNever} {
		dir := filepath.Join(m.dir, string(direct))
		o := options(dir, 40<<20)
		o.Direct = direct
		d, err := slab.Open(o)
		if err != nil {
			if direct == slab.DirectAuto {
				t.Fatal(err)
			}
			t.Logf("%s: the file system is too broken by now: %v", direct, err)
			continue
		}
		var acknowledged []int
		var failed error
		for n := 0; n < 140; n++ {
			if err := store(t.Context(), d, n, n+1)[0]; err != nil {
				failed = err
			} else {
				acknowledged = append(acknowledged, n)
			}
		}
		if failed == nil {
			t.Errorf("%s: 35 MiB went into a device of 32", direct)
		}
		t.Logf("%s: %d stores acknowledged; the last failure: %v; %+v", direct, len(acknowledged),
			failed, d.Stats())
		good := 0
		for _, n := range acknowledged { // given up slabs forget, nothing lies
			good += count(loaded(t, d, n, n+1), isNil)
		}
		if err := d.Close(); err != nil {
			t.Logf("%s: Close: %v", direct, err)
		}
		t.Logf("%s: %d are still there", direct, good)
	}
}

// A disk that lies in each way there is, under the kernel's own file operations.
func TestFUSE(t *testing.T) {
	need(t)
	if _, err := os.Stat("/dev/fuse"); err != nil {
		t.Skip("SKIPPED: needs /dev/fuse")
	}
	var s switchable
	dir := filepath.Join(fuseMount(t, s.inject), "kv")
	d := open(t, options(dir, 16<<20))
	next := 0
	some := func() (from, to int) { next += 8; return next - 8, next }

	from, to := some()
	stored(t, d, from, to)
	if n := count(loaded(t, d, from, to), isNil); n != to-from {
		t.Fatalf("%d of %d chunks without a fault", n, to-from)
	}
	t.Run("flip on reading", func(t *testing.T) {
		s.set(always(vfstest.OpRead, vfstest.Fault{Flip: 4321}))
		errs := loaded(t, d, from, to)
		s.set(nil)
		if n := count(errs, isCorrupt); n != to-from {
			t.Errorf("%d of %d loads say that the chunk is corrupt: %v", n, to-from, errs)
		}
		if n := count(loaded(t, d, from, to), isMissing); n != to-from {
			t.Errorf("%d of %d corrupt chunks were dropped", n, to-from)
		}
	})
	for _, c := range []struct {
		name  string
		fault vfstest.Fault
	}{{"flip on writing", vfstest.Fault{Flip: 999}}, {"torn", vfstest.Fault{Torn: true}},
		{"misdirected", vfstest.Fault{Shift: 64 << 10}}} {
		t.Run(c.name, func(t *testing.T) {
			from, to := some()
			s.set(always(vfstest.OpWrite, c.fault))
			store(t.Context(), d, from, to) // perhaps acknowledged: nobody can know
			s.set(nil)
			if n := count(loaded(t, d, from, to), isNil); n > 0 {
				t.Errorf("%d chunks are a hit", n)
			}
			recovers(t, d, 16<<20)
		})
	}
	for _, op := range []vfstest.Op{vfstest.OpRead, vfstest.OpWrite, vfstest.OpSync} {
		t.Run(map[vfstest.Op]string{vfstest.OpRead: "reads", vfstest.OpWrite: "writes",
			vfstest.OpSync: "syncs"}[op]+" fail", func(t *testing.T) {
			from, to := some()
			if op == vfstest.OpRead {
				stored(t, d, from, to)
			}
			met := s.met.Load()
			s.set(always(op, vfstest.Fault{Err: syscall.EIO}))
			errs := store(t.Context(), d, to+1000, to+1004)
			if op == vfstest.OpRead {
				errs = loaded(t, d, from, to)
			}
			s.set(nil)
			if s.met.Load() == met {
				t.Fatal("no operation met the fault")
			}
			if n := count(errs, isNil); n > 0 {
				t.Errorf("%d of %d calls succeeded", n, len(errs))
			}
			recovers(t, d, 16<<20)
		})
	}
	t.Run("late", func(t *testing.T) {
		from, to := some()
		stored(t, d, from, to)
		slow := func(wait func()) func(vfstest.Call) vfstest.Fault {
			return func(c vfstest.Call) vfstest.Fault {
				if c.Op&(vfstest.OpRead|vfstest.OpWrite) != 0 {
					wait()
				}
				return vfstest.Fault{}
			}
		}
		stopped := make(chan struct{})
		s.set(slow(func() { <-stopped }))
		held, said := make([]uint16, 1), make(chan error, 1)
		go func() { said <- d.Contains(t.Context(), chunk(from), held) }()
		select {
		case err := <-said:
			if err != nil || held[0] != 4 {
				t.Errorf("Contains says %d, %v", held[0], err)
			}
			close(stopped)
		case <-time.After(time.Minute):
			t.Error("Contains waits for the disk")
			close(stopped)
			<-said
		}
		s.set(slow(func() { time.Sleep(300 * time.Millisecond) }))
		ctx, cancel := context.WithTimeoutCause(t.Context(), 50*time.Millisecond, errLate)
		defer cancel()
		errs, wrong := load(ctx, d, from, to)
		s.set(nil)
		ok(t, wrong)
		if n := count(errs, func(err error) bool { return errors.Is(err, errLate) }); n == 0 {
			t.Errorf("no load says that it was late: %v", errs)
		}
		if n := count(loaded(t, d, from, to), isNil); n != to-from {
			t.Errorf("%d of %d chunks are left after loads that were late", n, to-from)
		}
	})
	ok(t, d.Close())
}

var errLate = errors.New("late")

// A store that does not fit is refused with the directory and what is free; one that is open needs
// no more room than it has taken.
func TestFullTmpfs(t *testing.T) {
	need(t)
	m := mount(t, "tmpfs", "tmpfs", "size=1m")
	dir := filepath.Join(m.dir, "kv")
	_, err := slab.Open(options(dir, 16<<20))
	if err == nil {
		t.Fatal("16 MiB fit into 1")
	}
	if !vfs.IsNoSpace(err) || !strings.Contains(err.Error(), dir) {
		t.Errorf("does not say what is full: %v", err)
	}
	t.Logf("refused: %v", err)
	m.unmount()

	m = mount(t, "tmpfs", "tmpfs", "size=20m")
	d := open(t, options(filepath.Join(m.dir, "kv"), 16<<20))
	stored(t, d, 0, 4)
	filler, err := os.Create(filepath.Join(m.dir, "filler"))
	ok(t, err)
	for err == nil {
		_, err = filler.Write(make([]byte, 64<<10))
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	ok(t, filler.Close())
	for n := 4; n < 200; n += 4 { // around the store several times
		stored(t, d, n, n+4)
	}
	if n := count(loaded(t, d, 190, 200), isNil); n != 10 {
		t.Errorf("%d of the last 10 chunks are there", n)
	}
	ok(t, d.Close())
	checkClean(t, vfs.OS, filepath.Join(m.dir, "kv"))
}

// Somebody cuts the slabs short while they are open.
func TestSlabsCutShort(t *testing.T) {
	dir := t.TempDir()
	d := open(t, options(dir, 16<<20))
	stored(t, d, 0, 40)
	slabs, err := filepath.Glob(filepath.Join(dir, "slab-*"))
	ok(t, err)
	for _, s := range slabs {
		ok(t, os.Truncate(s, 1<<20))
	}
	errs := loaded(t, d, 0, 40)
	if count(errs, isNil) > 20 {
		t.Errorf("%d of 40 chunks are a hit", count(errs, isNil))
	}
	recovers(t, d, 16<<20)
	ok(t, d.Close())
	d = open(t, options(dir, 16<<20))
	loaded(t, d, 0, 40)
	recovers(t, d, 16<<20)
}

// Errors that strace puts into the system calls on the slabs, in a process of its own that checks
// itself.
func TestErrorsInSystemCalls(t *testing.T) {
	need(t, "strace")
	for _, c := range []struct {
		name       string
		injections []string
	}{
		{"reads", []string{"inject=pread64:error=EIO:when=20+7"}},
		{"writes", []string{"inject=pwrite64:error=EIO:when=30+11"}},
		{"no space", []string{"inject=pwrite64:error=ENOSPC:when=25+2"}},
		{"syncs", []string{"inject=fdatasync:error=EIO:when=15+9"}},
		{"all", []string{"inject=pread64:error=EIO:when=40+13",
			"inject=pwrite64:error=EIO:when=50+17", "inject=fdatasync:error=EIO:when=30+19"}},
		{"short", []string{"inject=pread64:retval=512:when=20+9"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			var slabs []string
			for i := range 4 {
				slabs = append(slabs, filepath.Join(dir, fmt.Sprintf("slab-%03d", i)))
			}
			out, err := straced(t, slabs, c.injections, childEnv+"="+dir)
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("%s", out)
			if !strings.Contains(out, "failures") || strings.Contains(out, " 0 failures") {
				t.Error("the child met no error")
			}
			d, err := slab.Open(options(dir, 16<<20))
			ok(t, err)
			loaded(t, d, 0, 80)
			recovers(t, d, 16<<20)
			ok(t, d.Close())
		})
	}
}

// child stores and loads while its system calls fail.
func child(dir string) error {
	d, err := slab.Open(options(dir, 16<<20))
	if err != nil {
		return err
	}
	ctx := context.Background()
	hits, failures := 0, 0
	for round := range 3 {
		for n := 0; n < 80; n += 4 {
			failures += count(store(ctx, d, n, n+4), func(err error) bool {
				return err != nil &&
					!errors.Is(err, tiers.ErrBusy)
			})
			errs, wrong := load(ctx, d, max(n-8, 0), n+4)
			if wrong != nil {
				return wrong
			}
			hits += count(errs, isNil)
			failures += count(errs, func(err error) bool { return err != nil && !isMissing(err) })
		}
		if round < 2 {
			time.Sleep(50 * time.Millisecond) // slabs that were given up come back
		}
	}
	err = d.Close()
	fmt.Printf("%d hits, %d failures; %+v; Close: %v\n", hits, failures, d.Stats(), err)
	if hits == 0 {
		return errors.New("not one hit")
	}
	return nil
}
