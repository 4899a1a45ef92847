package daxtier

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"lookaside/tiers"
	"lookaside/tiers/slab/media"
	"lookaside/tiers/tiertest"
	"lookaside/tiers/vfs"
)

// findAll returns how many of prefixes [0, n) of one chunk are found.
func (r *rig) findAll(space *tiers.Space, n int) (found int) {
	for i := range n {
		switch got := r.find(space, prefixOf(i, testPages)); got {
		case testPages:
			found++
		case 0:
		default:
			r.t.Errorf("%d pages of chunk %d", got, i)
		}
	}
	return found
}

// What does not check out on the devices is a miss, and is gone then; all else is found: faults 26
// and 27.
func TestArenaRot(t *testing.T) {
	t.Parallel()
	o := arenaOptions(files(memory(t), 2, 8<<20))
	o.SlabBytes = 1 << 20
	r := openRig(t, o)
	const n = 60
	for i := range n {
		r.store(testSpace(), prefixOf(i, testPages), testPages)
	}
	r.flush()
	k := 0
	eachEntry(t, &r.a.devices, func(file vfs.File, h *media.Header, slot int, e *media.Entry) {
		if k++; k%3 != 0 {
			return
		}
		var b [1]byte
		at := h.Layout.SlotOffset(slot) + int64(k*977)%(testPages*h.Layout.Geometry.PageBytes)
		_, err := file.ReadAt(b[:], at)
		if err == nil {
			b[0] ^= 0x20
			_, err = file.WriteAt(b[:], at)
		}
		if err != nil {
			t.Fatal(err)
		}
	})
	r.close()
	r = openRig(t, o)
	if got := r.findAll(testSpace(), n); got != n-n/3 {
		t.Errorf("%d of %d chunks are found, of which a third is bad", got, n)
	}
	if st := r.a.Stats(); st.Corrupt != n/3 || st.Verified != n-n/3 || st.Unverified != 0 {
		t.Errorf("%+v", st)
	}
	r.close()
	if rep := checkClean(t, o.Options); chunksOf(rep) != n-n/3 {
		t.Errorf("%d chunks are whole", chunksOf(rep))
	}
}

// Everything else that can be wrong with what is on the devices costs chunks at most: faults 26 to
// 29.
func TestArenaDamaged(t *testing.T) {
	t.Parallel()
	seeds(t, 4, func(t *testing.T, seed uint64) {
		rnd := rand.New(rand.NewPCG(seed, 3))
		o := arenaOptions(files(memory(t), 1, 8<<20))
		o.SlabBytes = 2 << 20
		r := openRig(t, o)
		const n = 80
		for i := range n {
			r.store(testSpace(), prefixOf(i, testPages), testPages)
		}
		r.flush()
		r.close()
		path := o.Devices[0].Path
		good, err := os.ReadFile(path)
		noError(t, err)
		for round := range 2 * damages {
			what, b := damage(rnd, round, bytes.Clone(good))
			oo := o
			if what == "cut short" {
				oo.Options = files(filepath.Dir(path), 1, 0)
				oo.SlabBytes = o.SlabBytes
			}
			noError(t, os.WriteFile(path, b, 0o600))
			q, err := tryRig(t, oo)
			if err != nil { // its very first bytes are none of ours any more
				if !errors.Is(err, ErrForeign) {
					t.Fatalf("round %d, %s: %v", round, what, err)
				}
				continue
			}
			found := q.findAll(testSpace(), n)
			for i := range 5 {
				if held := q.store(testSpace(), prefixOf(1000+i, testPages),
					testPages); held != testPages ||
					q.find(testSpace(), prefixOf(1000+i, testPages)) != testPages {
					t.Errorf("round %d, %s: what is stored after it is not found", round, what)
				}
			}
			q.flush()
			t.Logf("round %d, %s: %d of %d chunks are left; %+v", round, what, found, n,
				q.a.Stats())
			q.close()
		}
	})
}

// Fault 16: pages go bad. What lies on them is a miss, whether it was found there or is just being
// stored, all else stays, and their places are not used again.
func TestArenaPoisonedPages(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: needs root, for userfaultfd")
	}
	o := arenaOptions(files(memory(t), 1, 8<<20))
	o.SlabBytes = 2 << 20
	r := openRig(t, o)
	const n = 60
	for i := range n {
		r.store(testSpace(), prefixOf(i, testPages), testPages)
	}
	r.flush()
	r.close()

	r = openRig(t, o)
	places := where(t, &r.a.devices)
	if len(places) != n {
		t.Fatalf("%d places of %d chunks", len(places), n)
	}
	bad := newPoison(t, r.a.fs.Device(o.Devices[0].Path).Bytes())
	for i := 0; i < n; i += 10 {
		bad.page(places[i] + 20<<10)
	}
	if got := r.findAll(testSpace(), n); got != n-n/10 {
		t.Errorf("%d of %d chunks are found, %d of which are on bad pages", got, n, n/10)
	}
	if st := r.a.Stats(); st.Unreadable != n/10 || st.Corrupt != 0 || st.GivenUp != 0 {
		t.Errorf("%+v", st)
	}
	// A page that goes bad after its chunk was committed and before it is kept. The worker's
	// mapping is another, and knows nothing of it.
	_, owner := r.session(testSpace())
	p := prefixOf(1000, testPages)
	r.a.MakeRoom(testSpace().Geometry, 1)
	res, grants, err := r.e.PrepareStore(owner, 0, nil, p.Digests(0, testPages, 32), nil)
	noError(t, err)
	region := r.regions[grants[0].Region]
	tiertest.FillRun(r.at(region.ID, grants[0].Offset, testPages*testSpace().Geometry.PageBytes),
		p.Run(testSpace(), 0, testPages))
	bad.page(region.OffsetBytes - r.a.fs.Device(o.Devices[0].Path).Offset() +
		int64(grants[0].Offset))
	noError(t, r.e.CommitStore(owner, res.Store, nil))
	r.flush()
	if got := r.find(testSpace(), p); got != 0 {
		t.Errorf("%d pages of a chunk are found that cannot be read", got)
	}
	if st := r.a.Stats(); st.Unreadable != n/10+1 || st.GivenUp != 0 {
		t.Errorf("%+v", st)
	}
	// What comes now is found: no bad place is granted again.
	for i := range 60 {
		q := prefixOf(2000+i, testPages)
		if held := r.store(testSpace(), q, testPages); held != testPages ||
			r.find(testSpace(), q) != testPages {
			t.Errorf("chunk %d is not found", 2000+i)
		}
	}
	r.flush()
	if st := r.a.Stats(); st.Unreadable != n/10+1 || st.Failed != 0 || st.GivenUp != 0 {
		t.Errorf("%+v", st)
	}
}

// Faults 15 and 17: the device is gone. Slabs are given up, their regions go, everything is a miss;
// when it is back, the arena works again.
func TestArenaTruncated(t *testing.T) {
	t.Parallel()
	o := arenaOptions(files(memory(t), 2, 4<<20))
	o.SlabBytes = 1 << 20
	r := openRig(t, o)
	const n = 40
	for i := range n {
		r.store(testSpace(), prefixOf(i, testPages), testPages)
	}
	r.flush()
	r.close()
	r = openRig(t, o)
	path := o.Devices[0].Path
	noError(t, os.Truncate(path, 64<<10))
	found := r.findAll(testSpace(), n)
	if found == 0 || found == n {
		t.Errorf("%d of %d chunks are found on the device that is left", found, n)
	}
	// What is stored there cannot be written by the worker: it says so. Here nothing is, until the
	// slabs have been given up.
	eventually(t, "the slabs are given up", func() bool {
		_ = r.findAll(testSpace(), n)
		st := r.a.Stats()
		return st.GivenUp > 0 && st.Why != nil
	})
	noError(t, os.Truncate(path, 4<<20))
	eventually(t, "the slabs are back", func() bool { return r.a.Stats().GivenUp == 0 })
	for i := range 30 {
		q := prefixOf(3000+i, testPages)
		if held := r.store(testSpace(), q, testPages); held != testPages ||
			r.find(testSpace(), q) != testPages {
			t.Errorf("chunk %d is not found", 3000+i)
		}
	}
	r.flush()
	r.close()
	r = openRig(t, o) // slabs that had nothing, not even a header any more, are made anew
	if got := r.findAll(testSpace(), n); got != found {
		t.Errorf("%d chunks are found again, of %d", got, found)
	}
	r.close()
	checkClean(t, o.Options)
}

// Chunks that nobody has checked, and such that nobody has kept yet, move with their device's
// others, and are checked and kept by that.
func TestArenaMigration(t *testing.T) {
	t.Parallel()
	o := arenaOptions(files(memory(t), 2, 8<<20))
	o.SlabBytes = 1 << 20
	r := openRig(t, o)
	const n = 60
	for i := range n {
		r.store(testSpace(), prefixOf(i, testPages), testPages)
	}
	r.flush()
	eachEntry(t, &r.a.devices, func(file vfs.File, h *media.Header, slot int, e *media.Entry) {
		if string(e.Digests) == string(prefixOf(7, testPages).Digests(0, testPages, 32)) {
			if _, err := file.WriteAt([]byte("rotten"), h.Layout.SlotOffset(slot)+
				5000); err != nil {
				t.Fatal(err)
			}
		}
	})
	r.close()
	r = openRig(t, o)
	for i := range 20 {
		r.store(testSpace(), prefixOf(n+i, testPages), testPages)
	}
	noError(t, r.a.Remove(context.Background(), o.Devices[0].Path, Migrate, true))
	for id, x := range r.regions {
		if x.Path != o.Devices[1].Path {
			t.Errorf("region %d is on %s, which is removed", id, x.Path)
		}
	}
	noError(t, r.e.Check())
	if got := r.findAll(testSpace(), n+20); got != n+20-1 {
		t.Errorf("%d of %d chunks are found, one of which is bad", got, n+20)
	}
	r.flush()
	o.Devices = o.Devices[1:]
	r.close()
	if rep := checkClean(t, o.Options); chunksOf(rep) != n+20-1 {
		t.Errorf("%d chunks are whole", chunksOf(rep))
	}
	r = openRig(t, o)
	if got := r.findAll(testSpace(), n+20); got != n+20-1 {
		t.Errorf("%d chunks are found again", got)
	}
}

// A device that is leased is only removed by force, and then when the leases have ended; one that
// is drained keeps what it has.
func TestArenaLeased(t *testing.T) {
	t.Parallel()
	o := arenaOptions(files(memory(t), 1, 4<<20))
	o.SlabBytes = 1 << 20
	r := openRig(t, o)
	p := prefixOf(1, testPages)
	r.store(testSpace(), p, testPages)
	r.flush()
	_, owner := r.session(testSpace())
	if n, err := r.e.Lookup(owner, 77, 0, p.Digests(0, testPages, 32)); n != testPages ||
		err != nil {
		t.Fatal(n, err)
	}
	path := o.Devices[0].Path
	if err := r.a.Remove(t.Context(), path, Evict, false); !errors.Is(err, ErrLeased) {
		t.Errorf("a device in use is removed: %v", err)
	}
	noError(t, r.a.Remove(t.Context(), path, Drain, false))
	if held := r.store(testSpace(), prefixOf(2, testPages), testPages); held != 0 {
		t.Error("a drained device takes a chunk")
	}
	if got := r.find(testSpace(), p); got != testPages {
		t.Errorf("%d pages are found on a drained device", got)
	}
	noError(t, r.a.Add(t.Context(), path, 0))
	if held := r.store(testSpace(), prefixOf(2, testPages), testPages); held != testPages {
		t.Error("a device that is in use again takes nothing")
	}
	done := make(chan error, 1)
	go func() { done <- r.a.Remove(context.Background(), path, Evict, true) }()
	eventually(t, "the chunk is dropped", func() bool { return r.find(testSpace(), p) == 0 })
	select {
	case err := <-done:
		t.Errorf("removed while it is leased: %v", err)
	default:
	}
	r.mu.Lock()
	left := len(r.regions)
	r.mu.Unlock()
	if left == 0 {
		t.Error("no region is left for the one who has a lease")
	}
	noError(t, r.e.Cancel(owner, 77))
	noError(t, <-done)
	if len(r.regions) != 0 {
		t.Errorf("%d regions are left without a device", len(r.regions))
	}
}

// A geometry gets blank slabs before anything is evicted for it, and another one takes over what
// the first has left cold.
func TestArenaMakeRoom(t *testing.T) {
	t.Parallel()
	o := arenaOptions(files(memory(t), 2, 4<<20))
	o.SlabBytes = 512 << 10
	r := openRig(t, o)
	space := testSpace()
	capacity := int64(0)
	for i := 0; r.e.Stats().Evictions == 0; i++ {
		r.store(space, prefixOf(i, testPages), testPages)
		capacity = r.e.Stats().CapacityBytes
		if i > 1000 {
			t.Fatal("nothing is ever evicted")
		}
	}
	if capacity < 2*3<<20 {
		t.Errorf("something is evicted with %d bytes in use", capacity)
	}
	other := tiertest.NewSpace("other", tiers.Geometry{PageBytes: 8 << 10, PagesPerChunk: 2,
		PageTokens: 16, DigestBytes: 16})
	eventually(t, "the other geometry has room", func() bool {
		return r.store(other, prefixOf(5, 2),
			2) == 2
	})
	if got := r.find(other, prefixOf(5, 2)); got != 2 {
		t.Errorf("%d pages", got)
	}
	noError(t, r.e.Check())
}
