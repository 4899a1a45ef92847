package slab

import (
	"context"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"lookaside/dax"
	"lookaside/tiers"
	"lookaside/tiers/daxtier/mapped"
	"lookaside/tiers/engine"
	"lookaside/tiers/slab/media"
	"lookaside/tiers/tiertest"
	"lookaside/tiers/vfs"
)

// slowSums is a file system whose files compute checksums only while a gate is open.
type slowSums struct {
	*mapped.FS
	gate    *gate
	waiting *atomic.Int32 // at the gate
}

func (f slowSums) OpenFile(name string, flags vfs.Flag) (vfs.File, error) {
	file, err := f.FS.OpenFile(name, flags)
	if err != nil {
		return nil, err
	}
	return slowFile{file.(vfs.Resident), f}, nil
}

type slowFile struct {
	vfs.Resident
	fs slowSums
}

func (f slowFile) Sums(off, pageBytes int64, seeds, sums []uint64) error {
	f.fs.waiting.Add(1)
	f.fs.gate.wait()
	f.fs.waiting.Add(-1)
	return f.Resident.Sums(off, pageBytes, seeds, sums)
}

// arenaRig is an arena on one device, with one space and a session.
type arenaRig struct {
	*Arena
	t      *testing.T
	fs     slowSums
	device *dax.Device
	space  *tiers.Space
	id     engine.SpaceID
	owner  engine.Owner
	bytes  map[uint32][]byte // by region
}

func openArena(t *testing.T, path string) *arenaRig {
	t.Helper()
	r := &arenaRig{t: t, fs: slowSums{mapped.New(nil), newGate(), new(atomic.Int32)},
		bytes: map[uint32][]byte{}}
	r.space = tiertest.NewSpace("arena", tiers.Geometry{PageBytes: 16 << 10, PagesPerChunk: 4,
		PageTokens: 16, DigestBytes: 32})
	mustBe(t, r.fs.Mount("/dax", dax.DeviceOptions{Path: path, SizeBytes: 4 << 20,
		AllowFile: true}))
	r.device = r.fs.Device("/dax")
	t.Cleanup(func() { mustBe(t, r.fs.Close()) })
	var err error
	r.Arena, err = OpenArena(ArenaOptions{
		Options: Options{FS: r.fs, Recycled: true, Dirs: []string{"/dax"},
			CapacityBytes: 4<<20 - 8192, SlabBytes: 4<<20 - 8192, Workers: 2, Direct: DirectNever,
			RetryEvery: 10 * time.Millisecond},
		Books: engine.Config{OwnerShare: 1},
		Added: func(region uint32, file string, at, bytes int64) (int64, error) {
			p, err := r.fs.Piece(file)
			r.bytes[region] = r.device.Bytes()[p.At+at : p.At+at+bytes]
			return 0, err
		},
		Removed: func(uint32) {},
	})
	mustBe(t, err)
	t.Cleanup(func() { mustBe(t, r.Close()) })
	r.id, err = r.Engine().OpenSpace(r.space.Fingerprint, r.space.Geometry)
	mustBe(t, err)
	r.owner = engine.Owner(r.id)
	mustBe(t, r.Engine().AddOwner(r.owner, r.id))
	return r
}

func (r *arenaRig) hashes(n int) []byte {
	return tiertest.Prefix{byte(n), 0, 0, 0}.Digests(0, 4,
		32)
}

// prepare fills a slot with a chunk that is not committed yet.
func (r *arenaRig) prepare(n int) (store uint64, at uint64) {
	r.t.Helper()
	r.MakeRoom(r.space.Geometry, 1)
	res, grants, err := r.Engine().PrepareStore(r.owner, 0, nil, r.hashes(n), nil)
	mustBe(r.t, err)
	if len(grants) != 1 {
		r.t.Fatalf("%+v, %+v", res, grants)
	}
	tiertest.FillRun(r.bytes[grants[0].Region][grants[0].Offset:][:4*r.space.Geometry.PageBytes],
		tiertest.Prefix{byte(n), 0, 0, 0}.Run(r.space, 0, 4))
	return res.Store, grants[0].Offset
}

func (r *arenaRig) put(n int) (at uint64) {
	r.t.Helper()
	store, at := r.prepare(n)
	mustBe(r.t, r.Engine().CommitStore(r.owner, store, nil))
	return at
}

func (r *arenaRig) flush() {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	mustBe(r.t, r.Flush(ctx))
}

// entries is how many entries of a chunk there are on the device.
func (r *arenaRig) entries(n int) (count int) {
	r.t.Helper()
	eachEntry(r.t, r.fs, []string{"/dax"}, func(_ vfs.File, _ *media.Header, _ int,
		e *media.Entry) {
		if string(e.Digests) == string(r.hashes(n)) {
			count++
		}
	})
	return count
}

// TestArenaClearedWhileKept: a chunk that is dropped while its entry is about to be written, and
// leased as well, is not found again once Forget has returned.
func TestArenaClearedWhileKept(t *testing.T) {
	t.Parallel()
	r := openArena(t, filepath.Join(t.TempDir(), "dev"))
	r.put(0)
	r.flush()
	if r.entries(0) != 1 {
		t.Fatal("a chunk is kept, and has no entry")
	}
	open := r.fs.gate.close()
	r.put(1)
	if n, err := r.Engine().Lookup(r.owner, 1, 0, r.hashes(1)); n != 4 || err != nil {
		t.Fatal(n, err)
	}
	for r.fs.waiting.Load() == 0 {
		time.Sleep(time.Millisecond)
	}
	if n := r.Engine().ClearSpace(r.id); n != 2 {
		t.Fatalf("%d chunks are cleared", n)
	}
	forgotten := make(chan error)
	go func() { forgotten <- r.Forget() }()
	select {
	case err := <-forgotten:
		open()
		t.Fatalf("Forget does not wait for what is being written: %v", err)
	case <-time.After(20 * time.Millisecond):
	}
	open()
	mustBe(t, <-forgotten)
	for n := range 2 {
		if got := r.entries(n); got != 0 {
			t.Errorf("%d entries of chunk %d, which was cleared", got, n)
		}
	}
	mustBe(t, r.Engine().Cancel(r.owner, 1))
}

// TestArenaOneEntry: when a chunk that was dropped is kept again, the entry of where it was is
// gone: that place may be another's by now.
func TestArenaOneEntry(t *testing.T) {
	t.Parallel()
	r := openArena(t, filepath.Join(t.TempDir(), "dev"))
	was := r.put(0)
	r.flush()
	if _, err := r.Engine().Drop(r.id, 0, r.hashes(0)); err != nil {
		t.Fatal(err)
	}
	store, at := r.prepare(1)
	if at != was {
		t.Fatalf("another chunk goes to %d, not to %d", at, was)
	}
	r.put(0)
	r.flush()
	if got := r.entries(0); got != 1 {
		t.Errorf("%d entries", got)
	}
	mustBe(t, r.Engine().AbortStore(r.owner, store))
}
