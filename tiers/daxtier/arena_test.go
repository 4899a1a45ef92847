package daxtier

import (
	"testing"

	"lookaside/internal/fakedax"
	"lookaside/tiers"
	"lookaside/tiers/slab/media"
	"lookaside/tiers/tiertest"
	"lookaside/tiers/vfs"
)

// What was committed is found again when the arena is opened anew, also partly filled chunks, and
// is only believed once it was checked.
func TestArenaReopened(t *testing.T) {
	t.Parallel()
	o := arenaOptions(files(memory(t), 2, 8<<20))
	o.SlabBytes = 1 << 20
	space := testSpace()
	r := openRig(t, o)
	const n = 60
	for i := range n {
		if held := r.store(space, prefixOf(i, 6), 6); held != 6 { // a whole chunk and a half
			t.Fatalf("prefix %d: %d pages are held", i, held)
		}
	}
	r.flush()
	if st := r.a.Stats(); st.Kept != 2*n || st.Waiting != 0 || st.Failed != 0 ||
		st.UsedBytes == 0 || st.CapacityBytes == 0 || st.Unverified != 0 {
		t.Errorf("%+v", st)
	}
	if st := r.a.Status(); len(st.Devices) != 2 || st.TotalUsedBytes != r.a.Stats().UsedBytes {
		t.Errorf("%+v", st)
	}
	r.close()
	if rep := checkClean(t, o.Options); chunksOf(rep) != 2*n {
		t.Errorf("%d chunks are whole on the devices", chunksOf(rep))
	}

	r = openRig(t, o)
	if got := r.e.Unverified(); got != 2*n {
		t.Errorf("%d of %d chunks are to be checked", got, 2*n)
	}
	_, owner := r.session(space)
	if got, err := r.e.Lookup(owner, 1, 0, prefixOf(0, 6).Digests(0, 6, 32)); got != 0 ||
		err != nil {
		t.Errorf("%d pages are found that nobody has checked: %v", got, err)
	}
	for i := range n {
		if got := r.find(space, prefixOf(i, 6)); got != 6 {
			t.Errorf("prefix %d: %d pages", i, got)
		}
	}
	if st := r.a.Stats(); st.Verified != 2*n || st.Corrupt != 0 || st.Unverified != 0 ||
		st.Kept != 2*n {
		t.Errorf("%+v", st)
	}
	// They are not written down again, and what comes now is.
	r.flush()
	r.store(space, prefixOf(n, 4), 4)
	r.flush()
	if st := r.a.Stats(); st.Kept != 2*n+1 {
		t.Errorf("%+v", st)
	}
}

// On a device everything is aligned to its pages, and what is kept lasts by writing caches back.
func TestArenaOnDevice(t *testing.T) {
	t.Parallel()
	device, sysFS := fakedax.New(t)
	o := arenaOptions(Options{Devices: []DeviceSpec{{Path: device}}, SysFS: sysFS})
	o.SlabBytes = 3 << 20
	r := openRig(t, o)
	space := testSpace()
	for i := range 40 {
		_, owner := r.session(space)
		r.a.MakeRoom(space.Geometry, 1)
		p := prefixOf(i, 4)
		res, grants, err := r.e.PrepareStore(owner, 0, nil, p.Digests(0, 4, 32), nil)
		noError(t, err)
		// Another mapping of /dev/zero is other memory.
		region := r.regions[grants[0].Region]
		if region.Kind != "devdax" || region.PageSize != 2<<20 {
			t.Fatalf("%+v", region)
		}
		tiertest.FillRun(region.Bytes[grants[0].Offset:int64(grants[0].Offset)+
			4*space.Geometry.PageBytes], p.Run(space, 0, 4))
		noError(t, r.e.CommitStore(owner, res.Store, nil))
	}
	r.flush()
	if st := r.a.Stats(); st.Kept != 40 || st.Failed != 0 {
		t.Errorf("%+v", st)
	}
	seen := 0
	eachEntry(t, &r.a.devices, func(f vfs.File, h *media.Header, slot int, e *media.Entry) {
		seen++
		b := make([]byte, int64(e.Pages)*h.Layout.Geometry.PageBytes)
		if _, err := f.ReadAt(b, h.Layout.SlotOffset(slot)); err != nil {
			t.Fatal(err)
		}
		if wrong := tiertest.WrongPage(b, tiers.Run{Space: space, First: e.First,
			Hashes: e.Digests}); wrong >= 0 {
			t.Errorf("slot %d is not what its entry says", slot)
		}
	})
	if seen != 40 {
		t.Errorf("%d entries", seen)
	}
}
