package slab

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"lookaside/dax"
	"lookaside/tiers"
	"lookaside/tiers/slab/media"
	"lookaside/tiers/tiertest"
	"lookaside/tiers/vfs"
	"lookaside/tiers/vfs/vfstest"
)

var testGeometry = tiers.Geometry{PageBytes: 5000, PagesPerChunk: 3, PageTokens: 16,
	DigestBytes: 32}

func testOptions(fsys vfs.FS) Options {
	return Options{FS: fsys, Dirs: []string{"/a", "/b"}, CapacityBytes: 4 << 20, SlabBytes: 1 << 20,
		PieceBytes: 8192, RetryEvery: time.Millisecond}
}

func mustOpen(t testing.TB, o Options) *Disk {
	t.Helper()
	d, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	return d
}

func mustClose(t testing.TB, d *Disk) {
	t.Helper()
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
}

func all(u *universe) (which []int) {
	for i := range u.runs {
		which = append(which, i)
	}
	return which
}

func mustStore(t testing.TB, u *universe, d *Disk) {
	t.Helper()
	if err := errors.Join(u.store(context.Background(), d, all(u)...)...); err != nil {
		t.Fatal(err)
	}
}

// found is how many chunks can be loaded. Errors that are no misses are answered as well.
func found(t testing.TB, u *universe, d *Disk) (n int, errs []error) {
	t.Helper()
	for i := range u.runs {
		switch err := u.load(t, d, i); {
		case err == nil:
			n++
		case !errors.Is(err, tiers.ErrNotFound):
			errs = append(errs, err)
		}
	}
	return n, errs
}

// switchable lets a test turn a fault on for some operations.
type switchable struct {
	inject func(vfstest.Call) vfstest.Fault
	gate   gate
}

func (s *switchable) set(f func(vfstest.Call) vfstest.Fault) {
	s.gate.mu.Lock()
	s.inject = f
	s.gate.mu.Unlock()
}

func (s *switchable) ask(c vfstest.Call) vfstest.Fault {
	s.gate.mu.Lock()
	f := s.inject
	s.gate.mu.Unlock()
	if f == nil {
		return vfstest.Fault{}
	}
	return f(c)
}

func inSlabs(ops vfstest.Op, dir string, f vfstest.Fault) func(vfstest.Call) vfstest.Fault {
	return func(c vfstest.Call) vfstest.Fault {
		if c.Op&ops != 0 && strings.HasPrefix(c.Name, dir+"/"+slabPrefix) {
			return f
		}
		return vfstest.Fault{}
	}
}

func eventually(t testing.TB, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("never: ", what)
		}
	}
}

// TestSyncFails: what was not synced is not acknowledged, the slab is given up alone, and comes
// back empty when it works again.
func TestSyncFails(t *testing.T) {
	t.Parallel()
	var faults switchable
	mem := vfstest.NewMem()
	u := newUniverse(testGeometry)
	d := mustOpen(t, testOptions(vfstest.Faulty(mem, faults.ask)))
	mustStore(t, u, d)
	faults.set(inSlabs(vfstest.OpSync, "/a", vfstest.Fault{Err: syscall.EIO}))
	u2 := newUniverse(testGeometry, testGeometry) // another space
	failed := 0
	for _, err := range u2.store(t.Context(), d, all(u2)...) {
		if errors.Is(err, syscall.EIO) {
			failed++
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if failed == 0 {
		t.Fatal("no store met the fault")
	}
	eventually(t, "the slab's chunks are gone and the others are there", func() bool {
		n, errs := found(t, u, d)
		if len(errs) > 0 {
			t.Fatal(errs)
		}
		return n > 0 && n < len(u.runs)
	})
	if st := d.Stats(); !strings.Contains(st.Detail, "given up") {
		t.Fatalf("%+v", st)
	}
	faults.set(nil)
	eventually(t, "it works again", func() bool {
		return !strings.Contains(d.Stats().Detail,
			"given up")
	})
	mustStore(t, u, d)
	if n, errs := found(t, u, d); n != len(u.runs) {
		t.Fatal(n, errs)
	}
	mustClose(t, d)
	cleanCheck(t, mem, []string{"/a", "/b"})
}

// TestAllGone: with every slab given up stores say why and loads are misses, and all of it comes
// back.
func TestAllGone(t *testing.T) {
	t.Parallel()
	for _, what := range []error{syscall.EIO, syscall.ENOSPC} {
		var faults switchable
		u := newUniverse(testGeometry)
		d := mustOpen(t, testOptions(vfstest.Faulty(vfstest.NewMem(), faults.ask)))
		mustStore(t, u, d)
		faults.set(inSlabs(vfstest.OpRead|vfstest.OpWrite|vfstest.OpSync|vfstest.OpAllocate, "",
			vfstest.Fault{Err: what}))
		faults.set(func(c vfstest.Call) vfstest.Fault {
			if c.Op&(vfstest.OpRead|vfstest.OpWrite|vfstest.OpSync|vfstest.OpAllocate) != 0 {
				return vfstest.Fault{Err: what}
			}
			return vfstest.Fault{}
		})
		u2 := newUniverse(testGeometry, testGeometry)
		eventually(t, "stores say why", func() bool {
			for _, err := range u2.store(t.Context(), d, all(u2)[len(u2.runs)/2:]...) {
				if !errors.Is(err, what) {
					return false
				}
			}
			return true
		})
		eventually(t, "every load is a miss",
			func() bool { n, errs := found(t, u, d); return n == 0 && len(errs) == 0 })
		faults.set(nil)
		eventually(t, "it works again",
			func() bool { return errors.Join(u.store(t.Context(), d, all(u)...)...) == nil })
		if n, errs := found(t, u, d); n != len(u.runs) {
			t.Fatal(n, errs)
		}
		mustClose(t, d)
	}
}

// TestDamage: whatever happens to a read or a write of data, no wrong byte comes up.
func TestDamage(t *testing.T) {
	t.Parallel()
	for _, f := range []vfstest.Fault{{Flip: 12345}, {Torn: true}, {Shift: 8192}, {Shift: -8192},
		{Shift: 16384}, {Err: syscall.EIO}} {
		for _, op := range []vfstest.Op{vfstest.OpRead, vfstest.OpWrite} {
			if f.Torn && op == vfstest.OpRead {
				continue
			}
			for seed := range uint64(8) {
				rnd := rand.New(rand.NewPCG(seed, 5))
				var faults switchable
				u := newUniverse(testGeometry)
				mem := vfstest.NewMem()
				o := testOptions(vfstest.Faulty(mem, faults.ask))
				d := mustOpen(t, o)
				faults.set(func(c vfstest.Call) vfstest.Fault {
					faults.gate.mu.Lock()
					defer faults.gate.mu.Unlock()
					if c.Op == op && rnd.IntN(4) == 0 {
						return f
					}
					return vfstest.Fault{}
				})
				u.store(t.Context(), d, all(u)...)
				found(t, u, d) // it fails if a byte is wrong
				if err := d.Close(); err != nil && f.Err == nil && f.Shift == 0 {
					t.Fatal(err)
				}
				// Nor is there one when it is opened again, now on a medium that works.
				faults.set(nil)
				d, err := Open(o)
				if err != nil {
					t.Fatal(err)
				}
				for i := range u.runs {
					if err := u.load(t, d, i); err != nil && !errors.Is(err, tiers.ErrNotFound) &&
						!errors.Is(err, tiers.ErrCorrupt) {
						t.Fatal(err)
					}
				}
				if _, errs := found(t, u, d); len(errs) > 0 { // what was corrupt was dropped
					t.Fatal(errs)
				}
				mustClose(t, d)
				if _, err := Check(t.Context(), CheckOptions{FS: mem, Dirs: o.Dirs,
					Repair: true}); err != nil {
					t.Fatal(err)
				}
				cleanCheck(t, mem, o.Dirs)
			}
		}
	}
}

func TestCheckAndRepair(t *testing.T) {
	t.Parallel()
	mem := vfstest.NewMem()
	o := testOptions(mem)
	u := newUniverse(testGeometry)
	d := mustOpen(t, o)
	mustStore(t, u, d)
	if _, err := Check(t.Context(), CheckOptions{FS: mem, Dirs: o.Dirs}); !errors.As(err,
		new(*vfs.LockedError)) {
		t.Fatal(err)
	}
	mustClose(t, d)
	r, err := Check(t.Context(), CheckOptions{FS: mem, Dirs: o.Dirs})
	if err != nil || r.Bad() != 0 {
		t.Fatalf("%+v %v", r, err)
	}
	chunks := 0
	for _, s := range r.Slabs {
		chunks += s.Chunks
	}
	n := 0
	eachEntry(t, mem, o.Dirs, func(file vfs.File, h *media.Header, slot int, e *media.Entry) {
		switch n++; n {
		case 1: // a page
			if _, err := file.WriteAt([]byte("damage"), h.Layout.SlotOffset(slot)+
				7000); err != nil {
				t.Fatal(err)
			}
		case 2: // an entry
			if _, err := file.WriteAt([]byte("damage"), h.Layout.EntryOffset(slot)+70); err != nil {
				t.Fatal(err)
			}
		}
	})
	last := path.Join("/b", SlabName(1))
	f, err := mem.OpenFile(last, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt(make([]byte, 2*media.BlockBytes), 0); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	for _, repair := range []bool{false, true} {
		told := int64(0)
		r, err = Check(t.Context(), CheckOptions{FS: mem, Dirs: o.Dirs, Repair: repair,
			Progress: func(done, total int64) {
				if done < told || done > total {
					t.Errorf("progress %d of %d after %d", done, total, told)
				}
				told = done
			}})
		if err != nil || r.Bad() != 3 || told == 0 {
			t.Fatalf("%+v %v", r, err)
		}
	}
	cleanCheck(t, mem, o.Dirs)
	d = mustOpen(t, o)
	if st := d.Stats(); st.Chunks > int64(chunks-2) || st.CapacityBytes != o.CapacityBytes {
		t.Fatalf("%+v, %d chunks before", st, chunks)
	}
	mustStore(t, u, d)
	mustClose(t, d)
	cleanCheck(t, mem, o.Dirs)
	if _, err := Check(t.Context(), CheckOptions{FS: mem, Dirs: []string{"/"}}); !errors.Is(err,
		tiers.ErrNotFound) {
		t.Fatal(err)
	}
}

// TestOpenRefusals: what Open refuses it names, and leaves nothing open.
func TestOpenRefusals(t *testing.T) {
	t.Parallel()
	mem := vfstest.NewMem()
	o := testOptions(mem)
	d := mustOpen(t, o)
	_, err := Open(o)
	var locked *vfs.LockedError
	if !errors.As(err, &locked) || locked.PID != os.Getpid() ||
		!strings.Contains(err.Error(), strconv.Itoa(os.Getpid())) {
		t.Fatal(err)
	}
	mustClose(t, d)

	f, err := mem.OpenFile("/a/"+SlabName(0), 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, at := range []int64{8, media.BlockBytes + 8} {
		// What another version writes has its own checksum: any other than ours.
		if _, err := f.WriteAt([]byte{9}, at); err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteAt([]byte("another form"), at+media.BlockBytes/2); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(o); !errors.Is(err, media.ErrVersion) ||
		!strings.Contains(err.Error(), "/a/"+SlabName(0)) {
		t.Fatal(err)
	}

	small := vfstest.NewMem()
	small.SpaceBytes = 2 << 20
	if _, err := Open(testOptions(small)); !vfs.IsNoSpace(err) ||
		!strings.Contains(err.Error(), "are free") {
		t.Fatal(err)
	}
	if _, err := Open(testOptions(vfstest.Faulty(vfstest.NewMem(),
		func(c vfstest.Call) vfstest.Fault {
			if c.Op == vfstest.OpOpen {
				return vfstest.Fault{Err: syscall.EMFILE}
			}
			return vfstest.Fault{}
		}))); !errors.Is(err, syscall.EMFILE) {
		t.Fatal(err)
	}
	undirect := vfstest.NewMem()
	undirect.Align = 0
	o = testOptions(undirect)
	o.Direct = DirectAlways
	if _, err := Open(o); !errors.Is(err, vfs.ErrNoDirect) {
		t.Fatal(err)
	}
	for _, change := range []func(*Options){
		func(o *Options) { o.Dirs = nil }, func(o *Options) { o.Dirs = []string{"/a", "/a"} },
		func(o *Options) { o.CapacityBytes = 1 },
		func(o *Options) { o.SlabBytes = 1 }, func(o *Options) { o.Workers = -1 },
		func(o *Options) { o.PieceBytes = 1000 }, func(o *Options) { o.Direct = "perhaps" },
		func(o *Options) { o.Policy = "none such" },
	} {
		o := testOptions(vfstest.NewMem())
		change(&o)
		if _, err := Open(o); err == nil {
			t.Fatalf("%+v was taken", o)
		}
	}
}

// TestResize: another capacity adds slabs, or drops some from the end, and the rest stays.
func TestResize(t *testing.T) {
	t.Parallel()
	mem := vfstest.NewMem()
	o := testOptions(mem)
	u := newUniverse(testGeometry)
	d := mustOpen(t, o)
	mustStore(t, u, d)
	before, _ := found(t, u, d)
	mustClose(t, d)
	for _, capacity := range []int64{8 << 20, 2 << 20, 6 << 20} {
		o.CapacityBytes = capacity
		d = mustOpen(t, o)
		if st := d.Stats(); st.CapacityBytes != capacity {
			t.Fatalf("%+v, want %d", st, capacity)
		}
		if n, errs := found(t, u, d); len(errs) > 0 || n != before {
			// it was all in the first slab of each directory
			t.Fatal(n, errs)
		}
		mustClose(t, d)
	}
	cleanCheck(t, mem, o.Dirs)
}

// TestOtherGeometry: a slab goes to a geometry that has none when it was not used for a while.
func TestOtherGeometry(t *testing.T) {
	t.Parallel()
	o := testOptions(vfstest.NewMem())
	o.CapacityBytes, o.SlabBytes = 2<<20, 1<<20
	d := mustOpen(t, o)
	u := newUniverse(testGeometry)
	mustStore(t, u, d)
	other := testGeometry
	other.PageBytes = 3000
	v := newUniverse(other)
	eventually(t, "the other geometry has room", func() bool {
		err := errors.Join(v.store(t.Context(), d, all(v)...)...)
		if err != nil && !errors.Is(err, tiers.ErrBusy) {
			t.Fatal(err)
		}
		return err == nil
	})
	if n, errs := found(t, v, d); n != len(v.runs) {
		t.Fatal(n, errs)
	}
	if n, errs := found(t, u, d); n == 0 || len(errs) > 0 {
		t.Fatal(n, errs)
	}
}

// storeInSpace stores a chunk in the ith of many spaces.
func storeInSpace(t *testing.T, d *Disk, i int) tiers.Run {
	t.Helper()
	space := &tiers.Space{Fingerprint: tiers.FingerprintOf([]byte{byte(i)}),
		Geometry: testGeometry}
	run := tiers.Run{Space: space, Hashes: make([]byte, 32)}
	d.Store(t.Context(), []tiers.Transfer{{Run: run, Bytes: make([]byte, 5000)}},
		func(_ int, err error) {
			if err != nil {
				t.Fatalf("space %d: %v", i, err)
			}
		})
	return run
}

// TestManySpaces: spaces without chunks make room for others.
func TestManySpaces(t *testing.T) {
	t.Parallel()
	o := testOptions(vfstest.NewMem())
	o.MaxSpaces = 3
	d := mustOpen(t, o)
	for i := range 10 {
		run := storeInSpace(t, d, i)
		if i%2 == 0 {
			if _, err := d.Clear(t.Context(), run.Space.Fingerprint); err != nil {
				t.Fatal(err)
			}
		} else if err := d.Drop(t.Context(), run); err != nil {
			t.Fatal(err)
		}
	}
}

// TestSpacesWithoutRoom: a store that is opened with room for fewer spaces than it has logs and
// counts what it drops.
func TestSpacesWithoutRoom(t *testing.T) {
	t.Parallel()
	o := testOptions(vfstest.NewMem())
	d := mustOpen(t, o)
	for i := range 5 {
		storeInSpace(t, d, i)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	core, logs := observer.New(zap.InfoLevel)
	o.MaxSpaces, o.Log = 3, zap.New(core)
	mustOpen(t, o)
	if n := logs.FilterMessageSnippet("chunks of a space are dropped").Len(); n != 2 {
		t.Errorf("%d spaces are logged as dropped, want 2", n)
	}
	opened := logs.FilterMessage("opened").All()
	if len(opened) != 1 {
		t.Fatalf("%d lines \"opened\"", len(opened))
	}
	fields := opened[0].ContextMap()
	if fields["chunks"] != int64(3) || fields["spaceless"] != int64(2) {
		t.Errorf("opened with %v", fields)
	}
}

// TestRealDisk moves chunks on a real file system, around the page cache where it can be, from
// memory at odd addresses too.
func TestRealDisk(t *testing.T) {
	t.Parallel()
	for _, direct := range []Direct{DirectAuto, DirectNever} {
		dirs := []string{path.Join(t.TempDir(), "a"), path.Join(t.TempDir(), "b")}
		o := Options{Dirs: dirs, CapacityBytes: 16 << 20, SlabBytes: 4 << 20, Direct: direct}
		u := newUniverse(testGeometry, tiers.Geometry{PageBytes: 64 << 10, PagesPerChunk: 4,
			PageTokens: 16, DigestBytes: 16})
		d := mustOpen(t, o)
		mustStore(t, u, d)
		if n, errs := found(t, u, d); n != len(u.runs) {
			t.Fatal(n, errs)
		}
		memory, err := dax.NewTable[byte](1 << 20)
		if err != nil {
			t.Fatal(err)
		}
		for _, shift := range []int{0, 1, 512} {
			tr := u.transfer(len(u.runs) - 1)
			tr.Bytes = memory.Slice()[shift : shift+len(tr.Bytes)]
			d.Load(t.Context(), []tiers.Transfer{tr}, func(_ int, err error) {
				if err != nil {
					t.Errorf("%s, shift %d: %v", direct, shift, err)
				}
			})
		}
		mustClose(t, d)
		if err := memory.Close(); err != nil {
			t.Fatal(err)
		}
		cleanCheck(t, vfs.OS, dirs)
		d = mustOpen(t, o)
		if n, errs := found(t, u, d); n != len(u.runs) {
			t.Fatal(n, errs)
		}
		mustClose(t, d)
	}
}

// FuzzOpen: whatever is in a slab, opening it and looking for all that may be in it ends well, and
// no wrong byte comes up.
func FuzzOpen(f *testing.F) {
	u := newUniverse(tiers.Geometry{PageBytes: 700, PagesPerChunk: 3, PageTokens: 16,
		DigestBytes: 32})
	base := vfstest.NewMem()
	o := Options{FS: base, Dirs: []string{"/a"}, CapacityBytes: 128 << 10, SlabBytes: 128 << 10,
		RetryEvery: time.Hour}
	d := mustOpen(f, o)
	mustStore(f, u, d)
	mustClose(f, d)
	f.Add(uint32(20), []byte{1, 2, 3}, uint32(9000), []byte("x"), uint32(1<<20))
	f.Add(uint32(4096), make([]byte, 4096), uint32(0), make([]byte, 4096), uint32(1<<20))
	f.Add(uint32(8192), []byte{0xFF}, uint32(40000), []byte{7}, uint32(9000))
	f.Fuzz(func(t *testing.T, at1 uint32, b1 []byte, at2 uint32, b2 []byte, cut uint32) {
		o := o
		o.FS = base.CrashClone(1)
		file, err := o.FS.OpenFile("/a/"+SlabName(0), 0)
		if err != nil {
			t.Fatal(err)
		}
		size := int64(128 << 10)
		for at, b := range map[uint32][]byte{at1: b1, at2: b2} {
			b = b[:min(len(b), 8192)]
			if _, err := file.WriteAt(b, int64(at)%size); err != nil {
				t.Fatal(err)
			}
		}
		if err := errors.Join(file.Truncate(min(size, int64(cut))), file.Close()); err != nil {
			t.Fatal(err)
		}
		if _, err := Check(t.Context(), CheckOptions{FS: o.FS, Dirs: o.Dirs}); err != nil {
			t.Fatal(err)
		}
		d, err := Open(o)
		if errors.Is(err, media.ErrVersion) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		found(t, u, d)
		if err := d.engine.Check(); err != nil {
			t.Fatal(err)
		}
		u.store(t.Context(), d, all(u)...)
		found(t, u, d)
		mustClose(t, d)
	})
}

// TestNoEvictionBesideBlankSlabs: several that store at once, into slabs that are carved as they
// are needed, evict nothing before all of them are full.
func TestNoEvictionBesideBlankSlabs(t *testing.T) {
	t.Parallel()
	g := tiers.Geometry{PageBytes: 4096, PagesPerChunk: 1, PageTokens: 16, DigestBytes: 16}
	space := tiertest.NewSpace("blank slabs", g)
	const slabs, slabBytes, workers = 30, leastSlabBytes, 16
	layout, err := media.NewLayout(g, slabBytes)
	if err != nil {
		t.Fatal(err)
	}
	for range 50 {
		d := mustOpen(t, Options{FS: vfstest.NewMem(), Dirs: []string{"/d"},
			CapacityBytes: slabs * slabBytes, SlabBytes: slabBytes})
		var next atomic.Int64
		var running sync.WaitGroup
		for range workers {
			running.Go(func() {
				for n := next.Add(1); n <= int64(slabs*layout.Slots); n = next.Add(1) {
					run := tiertest.Prefix{byte(n), byte(n >> 8)}.Run(space, 0, 2).Chunk(1)
					d.Store(t.Context(), []tiers.Transfer{{Run: run,
						Bytes: make([]byte, g.PageBytes)}}, func(_ int, err error) {
						if err != nil {
							t.Error(err)
						}
					})
				}
			})
		}
		running.Wait()
		if st := d.Stats(); st.Evictions > 0 || st.Chunks != int64(slabs*layout.Slots) {
			t.Fatalf("%d evictions, %d chunks in %d slots", st.Evictions, st.Chunks,
				slabs*layout.Slots)
		}
		mustClose(t, d)
	}
}
