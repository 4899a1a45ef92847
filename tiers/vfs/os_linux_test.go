package vfs

import (
	"testing"

	"lookaside/internal/leak"
)

func TestMain(m *testing.M) { leak.Main(m) }

// A file system without fallocate gets its blocks by writing, and keeps what the file holds.
func TestAllocateByWriting(t *testing.T) {
	name := t.TempDir() + "/f"
	f, err := OS.OpenFile(name, Create)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte("hello"), 10000); err != nil {
		t.Fatal(err)
	}
	if err := f.(*osFile).allocateByWriting(3, 3<<20); err != nil {
		t.Fatal(err)
	}
	info, err := OS.Stat(name)
	if err != nil {
		t.Fatal(err)
	}
	if info.Size != 3<<20+3 || info.Allocated < info.Size {
		t.Errorf("%+v", info)
	}
	got := make([]byte, 7)
	if _, err := f.ReadAt(got, 9999); err != nil || string(got) != "\x00hello\x00" {
		t.Errorf("read %q, %v", got, err)
	}
}
