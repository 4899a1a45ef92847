package slab

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"lookaside/tiers/vfs"
)

// Slabs that somebody removes, or replaces, under the store are noticed: the store says so, and
// makes new ones. Its lock is taken again, unless another was faster: then nothing in the directory
// is touched until that one has left.
func TestRemovedUnderneath(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "kv")
	o := testOptions(nil)
	o.FS, o.Dirs = nil, []string{dir}
	u := newUniverse(testGeometry)
	d := mustOpen(t, o)
	whole := d.Stats().CapacityBytes
	mustStore(t, u, d)
	slabs, err := filepath.Glob(filepath.Join(dir, slabPrefix+"*"))
	if err != nil || len(slabs) != 4 {
		t.Fatal(slabs, err)
	}
	n, errs := found(t, u, d)
	d.watch()
	if m, _ := found(t, u, d); n == 0 || m != n || len(errs) > 0 {
		t.Fatalf("%d chunks, %d after a look at the files: %v", n, m, errs)
	}
	back := func(what string) {
		t.Helper()
		eventually(t, what, func() bool { return d.Stats().CapacityBytes == whole })
		for _, name := range slabs {
			if info, err := os.Lstat(name); err != nil || !info.Mode().IsRegular() {
				t.Errorf("%s: %v", what, err)
			}
		}
		mustStore(t, u, d)
		if m, errs := found(t, u, d); m != n || len(errs) > 0 {
			t.Errorf("%s: %d of %d chunks: %v", what, m, n, errs)
		}
		d.watch()
		if st := d.Stats(); st.CapacityBytes != whole {
			t.Errorf("%s: %+v", what, st)
		}
	}

	for _, name := range slabs {
		if err := os.Remove(name); err != nil {
			t.Fatal(err)
		}
	}
	d.o.RetryEvery = time.Hour // so that it stays given up
	d.watch()
	if st := d.Stats(); st.CapacityBytes == whole ||
		!strings.Contains(st.Detail, errRemoved.Error()) {
		t.Errorf("nothing is given up: %+v", st)
	}
	mustClose(t, d)

	d = mustOpen(t, o)
	mustStore(t, u, d)
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	d.watch()
	back("after the directory was removed")
	var locked *vfs.LockedError
	if _, err := Open(o); !errors.As(err, &locked) {
		t.Errorf("another store can open the directory: %v", err)
	}

	for _, name := range slabs { // as when the directory is restored from somewhere
		if err := errors.Join(os.Rename(name, name+".old"), os.WriteFile(name, []byte("other"),
			0o600)); err != nil {
			t.Fatal(err)
		}
	}
	d.watch()
	back("after the slabs were replaced")

	if err := os.Remove(filepath.Join(dir, LockName)); err != nil {
		t.Fatal(err)
	}
	other, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	d.watch()
	eventually(t, "it is given up", func() bool { return d.Stats().CapacityBytes == 0 })
	if st := d.Stats(); !strings.Contains(st.Detail, "locked by process") {
		t.Errorf("it does not say that another has the directory: %+v", st)
	}
	if m, errs := found(t, u, other); m != n || len(errs) > 0 {
		t.Errorf("the one that has it has %d of %d chunks: %v", m, n, errs)
	}
	mustClose(t, other)
	back("after the other has left")
}
