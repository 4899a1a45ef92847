//go:build linux

package dax

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

func fileOptions(path string) Options {
	return Options{Kind: KindFile, Path: path, SizeBytes: 1 << 20, NUMANode: NoNUMANode}
}

func TestFile(t *testing.T) {
	r := testKind(t, KindFile)
	path := r.path
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	if st.Mode&0o777 != 0o600 || st.Size != r.Size() || st.Blocks*512 < r.Size() {
		t.Errorf("mode %o size %d blocks %d: want 600, %d bytes all allocated", st.Mode&0o777,
			st.Size, st.Blocks, r.Size())
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Errorf("the file outlives its region: %v", err)
	}
}

func TestFileReplacesStale(t *testing.T) {
	path := filepath.Join(t.TempDir(), "region")
	if err := os.WriteFile(path, bytes.Repeat([]byte{7}, 1<<20), 0o644); err != nil {
		t.Fatal(err)
	}
	old, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer old.Close()
	mapped, err := unix.Mmap(int(old.Fd()), 0, 1<<20, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(mapped) }()
	r, err := Create(t.Context(), fileOptions(path))
	if err != nil {
		t.Fatal(err)
	}
	mustClose(t, r)
	if !bytes.Equal(r.Bytes(), make([]byte, r.Size())) {
		t.Error("the new region has the old file's bytes")
	}
	r.Bytes()[0] = 1
	if mapped[0] != 7 || mapped[1<<20-1] != 7 {
		t.Error("the old file changed under its mapping")
	}
}

func helperOwnFile(path string) string {
	r, err := Create(context.Background(), fileOptions(path))
	if err != nil {
		return err.Error()
	}
	fmt.Print("owned\n")
	_, _ = io.Copy(io.Discard, os.Stdin) // until told, or killed
	if err := r.Close(); err != nil {
		return err.Error()
	}
	return "closed"
}

// Fault 45: a second owner is refused, and told of the first. Once the first
// was killed, its file is stale, though a client still maps it.
func TestFileSecondOwner(t *testing.T) {
	path := filepath.Join(t.TempDir(), "region")
	cmd := helper(t, "own-file", path)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer stdin.Close()
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	answer := make([]byte, 6)
	if _, err := io.ReadFull(stdout, answer); err != nil || string(answer) != "owned\n" {
		t.Fatalf("%q, %v", answer, err)
	}
	_, err = Create(t.Context(), fileOptions(path))
	wantError(t, err, ErrBusy, path, "process "+strconv.Itoa(cmd.Process.Pid))

	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // "signal: killed"
	r, err := Create(t.Context(), fileOptions(path))
	if err != nil {
		t.Fatalf("after the owner's death: %v", err)
	}
	mustClose(t, r)
}

// The lock does not live on in a client that was handed the descriptor.
func TestFileLockStaysHome(t *testing.T) {
	path := filepath.Join(t.TempDir(), "region")
	first, err := Create(t.Context(), fileOptions(path))
	if err != nil {
		t.Fatal(err)
	}
	first.Bytes()[0] = 9
	client := dupFile(t, first.FD())
	if _, err := Create(t.Context(), fileOptions(path)); err == nil {
		t.Fatal("two owners")
	}
	// Death: all of the first owner's descriptors go, the client's stays.
	if err := unix.Close(first.lock); err != nil {
		t.Fatal(err)
	}
	first.lock = -1
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	second, err := Create(t.Context(), fileOptions(path))
	if err != nil {
		t.Fatal(err)
	}
	mustClose(t, second)
	var b [1]byte
	if _, err := client.ReadAt(b[:], 0); err != nil || b[0] != 9 {
		t.Errorf("the client's bytes: %v, %v", b, err)
	}
	if err := unlinkStale(systemHost, path); err == nil {
		t.Error("an owned file counts as stale")
	}
}

// Close removes only a file that is still its own.
func TestFileCloseSparesOthers(t *testing.T) {
	path := filepath.Join(t.TempDir(), "region")
	r, err := Create(t.Context(), fileOptions(path))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path, path+".moved"); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("somebody else's"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "somebody else's" {
		t.Errorf("%q, %v", b, err)
	}
}

func TestFileRefuses(t *testing.T) {
	dir := t.TempDir()
	target := filepath.Join(dir, "target")
	if err := os.WriteFile(target, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	link, fifo := filepath.Join(dir, "link"), filepath.Join(dir, "fifo")
	if err := os.Symlink(target, link); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := Create(t.Context(), fileOptions(link))
	wantError(t, err, nil, link, "symbolic link")
	_, err = Create(t.Context(), fileOptions(fifo))
	wantError(t, err, ErrUnsupported, fifo, "not a regular file")
	_, err = Create(t.Context(), fileOptions(dir))
	wantError(t, err, nil, dir)
	o := fileOptions(filepath.Join(dir, "huge"))
	o.SizeBytes = 1 << 55
	_, err = Create(t.Context(), o)
	wantError(t, err, ErrNoSpace, "need 32768TiB", "free ")
	_, err = Create(t.Context(), fileOptions("/proc/region"))
	wantError(t, err, nil, "/proc/region")
	if b, err := os.ReadFile(target); err != nil || string(b) != "precious" {
		t.Errorf("%q, %v", b, err)
	}
	for _, name := range []string{"huge"} {
		if _, err := os.Lstat(filepath.Join(dir, name)); !os.IsNotExist(err) {
			t.Errorf("a refused region left %s: %v", name, err)
		}
	}
}

// Faults 20 and 21: a full filesystem is an error at creation, never a SIGBUS
// later.
func TestFileNoSpace(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("lookaside-test", dir, "tmpfs", 0, "size=2m"); err != nil {
		t.Skipf("SKIPPED: cannot mount a tmpfs: %v", err)
	}
	defer func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Errorf("unmount: %v", err)
		}
	}()
	path := filepath.Join(dir, "region")
	o := fileOptions(path)
	o.SizeBytes = 3 << 20
	_, err := Create(t.Context(), o)
	wantError(t, err, ErrNoSpace, path, "need 3MiB", "free 2MiB")

	// The kernel's own refusal, past our check of the free space.
	f, err := os.Create(filepath.Join(dir, "raw"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	wantError(t, allocate(f.Name(), int(f.Fd()), 0, 3<<20), ErrNoSpace, "fallocate")
	if err := os.Remove(f.Name()); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}

	o.SizeBytes, o.Populate = 2<<20, true
	r, err := Create(t.Context(), o)
	if err != nil {
		t.Fatalf("what fits: %v", err)
	}
	for i := range r.Bytes() {
		r.Bytes()[i] = 1
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left %v (%v)", left, err)
	}
}
