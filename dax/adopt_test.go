//go:build linux

package dax

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// dup returns another descriptor of the same open file, as a client has one.
func dup(t *testing.T, fd int) int {
	t.Helper()
	c, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// The bytes of a region outlive it, as long as somebody has a descriptor of it.
func TestAdopt(t *testing.T) {
	path := filepath.Join(t.TempDir(), "region")
	for _, kind := range []Kind{KindMemfd, KindTHP, KindHugetlb, KindFile} {
		t.Run(string(kind), func(t *testing.T) {
			o := Options{Kind: kind, SizeBytes: 4 << 20, NUMANode: NoNUMANode, Populate: true}
			if kind == KindFile {
				o.Path = path
			}
			first, err := Create(t.Context(), o)
			if errors.Is(err, ErrNoMemory) || errors.Is(err, ErrUnsupported) {
				t.Skip(err)
			}
			if err != nil {
				t.Fatal(err)
			}
			copy(first.Bytes()[3<<20:], "what was there")
			dev, ino, size, seals, err := Identity(first.FD())
			if err != nil || size != 4<<20 || (seals == 0) != (kind == KindFile) && seals > 1 {
				t.Fatalf("size %d seals %#x: %v", size, seals, err)
			}
			fd := -1
			if kind == KindFile {
				if _, err := Adopt(first.FD(), kind, size, NoNUMANode); !errors.Is(err, ErrBusy) {
					t.Errorf("a file that is in use: %v", err)
				}
				// its owner's lock goes with the descriptor that has it
				fd = dup(t, first.LockFD())
			} else {
				fd = dup(t, first.LockFD())
			}
			if err := first.Leave(); err != nil {
				t.Fatal(err)
			}
			second, err := Adopt(fd, kind, size, NoNUMANode)
			if err != nil {
				t.Fatal(err)
			}
			dev2, ino2, _, seals2, err := Identity(second.FD())
			if err != nil || dev2 != dev || ino2 != ino || seals2 != seals {
				t.Errorf("%d:%d %#x, was %d:%d %#x: %v", dev2, ino2, seals2, dev, ino, seals, err)
			}
			if second.Kind() != kind || second.Size() != size || second.PageSize() !=
				kind.PageSize() || !strings.HasPrefix(string(second.Bytes()[3<<20:][:20]),
				"what was there") {
				t.Errorf("%s %d %d", second.Kind(), second.Size(), second.PageSize())
			}
			if kind == KindFile {
				if err := RemoveStale(path); !errors.Is(err, ErrBusy) {
					t.Errorf("a file that is in use is stale: %v", err)
				}
			}
			if err := second.Close(); err != nil {
				t.Fatal(err)
			}
			if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("Close leaves the file: %v", err)
			}
		})
	}
}

// A file that a process left is found by its path; one that nobody wants is removed.
func TestLeftFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "region")
	r, err := Create(t.Context(), fileOptions(path))
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(r.Leave(), r.Leave(), r.Close()); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	r, err = Adopt(dup(t, int(f.Fd())), KindFile, 1<<20, NoNUMANode)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(f.Close(), r.Leave(), RemoveStale(path), RemoveStale(path)); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

func TestAdoptRefuses(t *testing.T) {
	memfd := func(seals int) int {
		fd, err := newMemfd("test", 1<<20, false)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		if err := addSeals(fd, seals); err != nil {
			t.Fatal(err)
		}
		return fd
	}
	good := memfd(regionSeals)
	plain, err := os.Create(filepath.Join(t.TempDir(), "plain"))
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	if err := plain.Truncate(1 << 20); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		fd   int
		kind Kind
		size int64
		want error
	}{
		"another size":     {good, KindMemfd, 2 << 20, ErrForeign},
		"no size":          {good, KindMemfd, 0, ErrForeign},
		"part of a page":   {good, KindTHP, 1 << 20, ErrForeign},
		"no seals":         {memfd(0), KindMemfd, 1 << 20, ErrForeign},
		"may shrink":       {memfd(unix.F_SEAL_GROW), KindMemfd, 1 << 20, ErrForeign},
		"nobody writes":    {memfd(regionSeals | unix.F_SEAL_WRITE), KindMemfd, 1 << 20, unix.EPERM},
		"a file":           {int(plain.Fd()), KindMemfd, 1 << 20, ErrForeign},
		"memory as a file": {good, KindFile, 1 << 20, ErrBusy},
		"no kind":          {good, KindAuto, 1 << 20, ErrUnsupported},
		"no descriptor":    {-1, KindMemfd, 1 << 20, unix.EBADF},
	} {
		if r, err := Adopt(tc.fd, tc.kind, tc.size, NoNUMANode); r != nil ||
			!errors.Is(err, tc.want) {
			t.Errorf("%s: %v, want %v", name, err, tc.want)
		}
	}
	var st unix.Stat_t
	if err := unix.Fstat(good, &st); err != nil {
		t.Errorf("the caller's descriptor is closed: %v", err)
	}
}

func TestLent(t *testing.T) {
	r, err := Create(t.Context(), Options{Kind: KindMemfd, SizeBytes: 1 << 20,
		NUMANode: NoNUMANode})
	if err != nil {
		t.Fatal(err)
	}
	mustClose(t, r)
	is := func(want bool) {
		t.Helper()
		if lent, err := Lent(r.FD()); err != nil || lent != want {
			t.Errorf("lent: %v, %v", lent, err)
		}
	}
	is(false)
	l, err := LockLent(r.FD(), 4096, 1<<12)
	if err != nil {
		t.Fatal(err)
	}
	is(true)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	is(false)
	if _, err := Lent(-1); err == nil {
		t.Error("no descriptor")
	}
}

func TestMemory(t *testing.T) {
	f, err := Memory("test")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(1 << 20); err != nil {
		t.Fatal(err)
	}
	a, err := Attach(f, basePage, 2*basePage, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	copy(a.Bytes(), "x")
	var b [1]byte
	if _, err := f.ReadAt(b[:], basePage); err != nil || b[0] != 'x' {
		t.Errorf("%q %v", b, err)
	}
}
