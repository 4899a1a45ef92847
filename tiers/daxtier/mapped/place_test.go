package mapped

import (
	"errors"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"testing"

	"lookaside/dax"
	"lookaside/tiers/vfs"
)

// A file's end is what a partition can be shrunk to, and a hole what a file can get.
func TestEndAndHole(t *testing.T) {
	t.Parallel()
	f := New(nil)
	defer f.Close()
	dir := filepath.Join(t.TempDir(), "dax0.0")
	if err := f.Mount(dir, dax.DeviceOptions{Path: dir, SizeBytes: 1 << 20,
		AllowFile: true}); err != nil {
		t.Fatal(err)
	}
	const piece = 128 << 10
	for _, name := range []string{"a", "b", "c"} {
		x, err := f.OpenFile(path.Join(dir, name), vfs.Create)
		if err == nil {
			err = errors.Join(x.Allocate(0, piece), x.Close())
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	capacity, _ := f.Capacity(dir)
	for i, name := range []string{"a", "b", "c"} {
		if end, err := f.End(path.Join(dir, name)); end != int64(i+1)*piece || err != nil {
			t.Errorf("%s ends at %d: %v", name, end, err)
		}
	}
	if n, err := f.Hole(dir); n != capacity-3*piece || err != nil {
		t.Errorf("a hole of %d: %v", n, err)
	}
	if err := f.ResizeDir(dir, 3*piece-4096); err == nil {
		t.Error("shrunk below the end of a file")
	}
	room := int64(3 * piece)
	room += -(headBytes + room) & int64(os.Getpagesize()-1) // the partition ends with a page
	if err := errors.Join(f.Remove(path.Join(dir, "b")), f.ResizeDir(dir, room)); err != nil {
		t.Fatal(err)
	}
	if n, err := f.Hole(dir); n != piece || err != nil {
		t.Errorf("a hole of %d: %v", n, err)
	}
	if _, err := f.End(path.Join(dir, "b")); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	if _, err := f.Hole("/elsewhere"); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
}
