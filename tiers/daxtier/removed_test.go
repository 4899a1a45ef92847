package daxtier

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// A file that stands in for a device and is removed, or replaced, under a tier: its slabs are given
// up, as what is stored in it would not be found again. The other device goes on.
func TestRemovedUnderneath(t *testing.T) {
	t.Parallel()
	for name, after := range map[string]func(path string) error{
		"removed": func(string) error { return nil },
		"replaced": func(path string) error {
			return os.WriteFile(path, make([]byte, 4<<20),
				0o600)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := files(memory(t), 2, 4<<20)
			o.SlabBytes, o.WatchEvery = 1<<20, time.Millisecond
			p := mustOpen(t, o)
			whole := p.Stats().CapacityBytes
			mustStore(t, p, 0, 40)
			noError(t, os.Remove(o.Devices[0].Path))
			noError(t, after(o.Devices[0].Path))
			eventually(t, "the device is given up",
				func() bool { return p.Stats().CapacityBytes <= whole/2 })
			time.Sleep(5 * o.RetryEvery) // healers try
			st := p.Stats()
			if st.CapacityBytes != whole/2 || !strings.Contains(st.Detail, "4 given up") ||
				!strings.Contains(st.Detail, "file") {
				t.Errorf("%+v", st)
			}
			mustStore(t, p, 100, 110)
			for i, err := range load(t, p, 100, 110) {
				if err != nil {
					t.Errorf("chunk %d: %v", 100+i, err)
				}
			}
		})
	}
}

// An arena whose file is removed goes on with what workers have mapped, and says that a restart
// will not find it.
func TestArenaRemovedUnderneath(t *testing.T) {
	t.Parallel()
	o := arenaOptions(files(memory(t), 1, 4<<20))
	o.SlabBytes, o.WatchEvery = 1<<20, time.Millisecond
	space := testSpace()
	r := openRig(t, o)
	r.store(space, prefixOf(1, 4), 4)
	r.flush()
	if st := r.a.Stats(); st.Why != nil {
		t.Fatalf("%+v", st)
	}
	path := o.Devices[0].Path
	noError(t, os.Rename(path, path+".away"))
	eventually(t, "the arena says that its file is gone",
		func() bool { return r.a.Stats().Why != nil })
	if st := r.a.Stats(); st.GivenUp != 0 ||
		!strings.Contains(st.Why.Error(), filepath.Base(path)) {
		t.Errorf("%+v", st)
	}
	if n := r.find(space, prefixOf(1, 4)); n != 4 {
		t.Errorf("%d pages are found", n)
	}
	r.store(space, prefixOf(2, 4), 4)
	if n := r.find(space, prefixOf(2, 4)); n != 4 {
		t.Errorf("%d pages are found of what came after", n)
	}
	noError(t, os.Rename(path+".away", path))
	eventually(t, "all is well again", func() bool { return r.a.Stats().Why == nil })
}
