//go:build linux

package dax

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

func testKind(t *testing.T, kind Kind) *Region {
	t.Helper()
	o := Options{Kind: kind, SizeBytes: 4<<20 - 5000, NUMANode: NoNUMANode, Populate: true,
		Threads: 2}
	if kind == KindFile {
		o.Path = filepath.Join(t.TempDir(), "region")
	}
	r, err := Create(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	mustClose(t, r)
	wantPage := int64(os.Getpagesize())
	if kind == KindHugetlb || kind == KindTHP {
		wantPage = HugePageSize
	}
	wantSize := (o.SizeBytes + wantPage - 1) / wantPage * wantPage
	if r.Kind() != kind || r.PageSize() != wantPage || r.Size() != wantSize ||
		int64(len(r.Bytes())) != wantSize {
		t.Fatalf("%s: page %d size %d len %d, want page %d size %d", r.Kind(), r.PageSize(),
			r.Size(), len(r.Bytes()), wantPage, wantSize)
	}
	if address(r.Bytes())%HugePageSize != 0 {
		t.Errorf("mapped at %#x, not at a multiple of a huge page", address(r.Bytes()))
	}
	if !bytes.Equal(r.Bytes(), make([]byte, r.Size())) {
		t.Error("not zeroed")
	}
	if kind != KindHugetlb { // hugetlb pages have a line of their own
		if rss := smaps(t, r.Bytes(), "Rss"); rss != wantSize {
			t.Errorf("populated %d of %d bytes", rss, wantSize)
		}
	}
	// A second process maps the descriptor, sees our bytes, and we see its.
	r.Bytes()[0], r.Bytes()[r.Size()-1] = 11, 22
	cmd := helper(t, "map-region", strconv.FormatInt(r.Size(), 10))
	cmd.ExtraFiles = []*os.File{dupFile(t, r.FD())}
	out, err := cmd.Output()
	if err != nil || string(out) != "ok" {
		t.Fatalf("second process: %q, %v", out, err)
	}
	if r.Bytes()[0] != 33 || r.Bytes()[r.Size()-1] != 44 {
		t.Error("what a second process wrote is not seen")
	}
	return r
}

func dupFile(t *testing.T, fd int) *os.File {
	t.Helper()
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(dup), "region")
	t.Cleanup(func() { f.Close() })
	return f
}

func helperMapRegion(arg string) string {
	size, err := strconv.Atoi(arg)
	if err != nil {
		return err.Error()
	}
	mem, err := unix.Mmap(3, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return err.Error()
	}
	if mem[0] != 11 || mem[size-1] != 22 {
		return fmt.Sprintf("saw %d and %d", mem[0], mem[size-1])
	}
	mem[0], mem[size-1] = 33, 44
	return "ok"
}

func TestMemfd(t *testing.T) {
	r := testKind(t, KindMemfd)
	if huge := smaps(t, r.Bytes(), "ShmemPmdMapped"); huge != 0 {
		t.Errorf("%d bytes of huge pages in a region that was to have none", huge)
	}
	testSealed(t, r)
}

// The trap: only mmap, MADV_HUGEPAGE, populate, in this order, gives huge pages.
func TestTHP(t *testing.T) {
	needTHP(t)
	r := testKind(t, KindTHP)
	if huge := smaps(t, r.Bytes(), "ShmemPmdMapped"); huge == 0 {
		t.Error("no huge page in the region")
	} else if huge != r.Size() {
		t.Logf("%d of %d bytes in huge pages: memory is fragmented", huge, r.Size())
	}
	testSealed(t, r)
}

func TestHugetlb(t *testing.T) {
	needHugetlb(t, 2)
	r := testKind(t, KindHugetlb)
	if huge := smaps(t, r.Bytes(), "KernelPageSize"); huge != HugePageSize {
		t.Errorf("pages of %d bytes", huge)
	}
	testSealed(t, r)
}

func TestAuto(t *testing.T) {
	r, err := Create(t.Context(), Options{SizeBytes: 1 << 20, NUMANode: NoNUMANode, Populate: true})
	if err != nil {
		t.Fatal(err)
	}
	mustClose(t, r)
	if r.Kind() == KindAuto || r.Kind() == "" {
		t.Errorf("kind %q", r.Kind())
	}
	r.Bytes()[r.Size()-1] = 1
}

// The pool can lose its pages between the check and the mapping: auto goes on
// to the next kind, hugetlb itself is a clean error (fault 18).
func TestHugetlbExhausted(t *testing.T) {
	needHugetlb(t, 1) // so that the kernel has the pool
	free, err := freeHugePages(systemHost)
	if err != nil {
		t.Fatal(err)
	}
	size := (free + 64) * HugePageSize
	_, err = Create(t.Context(), Options{Kind: KindHugetlb, SizeBytes: size, NUMANode: NoNUMANode,
		Populate: true})
	wantError(t, err, ErrNoMemory, "huge pages", "hugepages-2048kB/nr_hugepages")

	fd, err := createMemfd("lookaside", size, true)
	if err == nil {
		defer unix.Close(fd)
		_, err = mapAligned(fd, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err == nil {
			t.Fatal("the pool gave more pages than it has")
		}
		err = mapError(err, KindHugetlb, size)
	}
	wantError(t, err, ErrNoMemory, "hugepages-2048kB/nr_hugepages")
}

// Fault 10, and what else a client with the descriptor might try.
func testSealed(t *testing.T, r *Region) {
	t.Helper()
	for _, size := range []int64{0, r.Size() - r.PageSize(), r.Size() + r.PageSize()} {
		if err := unix.Ftruncate(r.FD(), size); !errors.Is(err, unix.EPERM) {
			t.Errorf("ftruncate to %d: %v, want EPERM", size, err)
		}
	}
	if _, err := unix.FcntlInt(uintptr(r.FD()), unix.F_ADD_SEALS, unix.F_SEAL_WRITE); !errors.Is(
		err, unix.EPERM) {
		t.Errorf("adding a seal: %v, want EPERM", err)
	}
	// Punching a hole stays possible; it reads as zeros and faults nobody.
	r.Bytes()[0] = 1
	if err := unix.Fallocate(r.FD(), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0,
		r.PageSize()); err != nil {
		t.Errorf("punch: %v", err)
	}
	if err := Guard(func() {
		if r.Bytes()[0] != 0 {
			t.Error("a hole does not read as zeros")
		}
	}, r.Bytes()); err != nil {
		t.Errorf("reading a hole: %v", err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(r.FD(), &st); err != nil || st.Mode&0o777 != 0o600 {
		t.Errorf("mode %o (%v), want 600", st.Mode&0o777, err)
	}
	if flags, err := unix.FcntlInt(uintptr(r.FD()), unix.F_GETFD, 0); err != nil ||
		flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("not close-on-exec (%v)", err)
	}
}

func TestCreateRefuses(t *testing.T) {
	for _, o := range []Options{
		{Kind: "ramdisk", SizeBytes: 1},
		{Kind: KindMemfd},
		{Kind: KindMemfd, SizeBytes: -1},
		{Kind: KindMemfd, SizeBytes: math.MaxInt64},
		{Kind: KindAuto, SizeBytes: 0},
		{Kind: KindAuto, SizeBytes: math.MaxInt64 - 1<<30},
		{Kind: KindHugetlb, SizeBytes: 1 << 60},
		{Kind: KindFile, SizeBytes: 4096},
		{Kind: KindFile, SizeBytes: 4096, Path: filepath.Join(t.TempDir(), "no", "such",
			"directory")},
		{Kind: KindMemfd, SizeBytes: 4096, NUMANode: maxNUMANodes},
		{Kind: KindMemfd, SizeBytes: 4096, NUMANode: maxNUMANodes - 1},
	} {
		if r, err := Create(t.Context(), o); err == nil || r != nil {
			t.Errorf("%+v accepted: %v, %v", o, r, err)
		}
	}
}

func TestParseKind(t *testing.T) {
	for _, k := range Kinds {
		if got, err := ParseKind(string(k)); got != k || err != nil {
			t.Errorf("%s: %q, %v", k, got, err)
		}
	}
	_, err := ParseKind("Huge")
	wantError(t, err, nil, `"Huge"`, "hugetlb", "memfd")
}

// A leaf of the promise that a failed Create leaves nothing behind: the leak
// check of TestMain looks at what these attempts held when they failed.
func TestFailedCreateLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "region")
	for range 3 {
		if _, err := Create(t.Context(), Options{Kind: KindFile, Path: path, SizeBytes: 1 << 20,
			NUMANode: maxNUMANodes}); err == nil {
			t.Fatal("accepted")
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left %v (%v)", left, err)
	}
}

// interrupted is a context that ends when it was asked so many times whether it has.
type interrupted struct {
	context.Context
	left atomic.Int32
}

func (c *interrupted) Err() error {
	if c.left.Add(-1) < 0 {
		return context.Canceled
	}
	return nil
}

// TestPopulateEnds: whoever is to end does not wait until all of a region is populated.
func TestPopulateEnds(t *testing.T) {
	path := filepath.Join(t.TempDir(), "region")
	o := fileOptions(path)
	o.SizeBytes, o.Populate, o.Threads = 10*populateStep, true, 1
	ctx := &interrupted{Context: t.Context()}
	ctx.left.Store(3)
	if _, err := Create(ctx, o); !errors.Is(err, context.Canceled) {
		t.Fatalf("it ended with %v", err)
	}
	if n := -ctx.left.Load(); n > 2 {
		t.Errorf("it went on and asked %d times more", n)
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file is left: %v", err)
	}
}

func TestPopulateThreads(t *testing.T) {
	for _, threads := range []int{0, 1, 3, 100} {
		r, err := Create(t.Context(), Options{Kind: KindMemfd,
			SizeBytes: 3*populateStep/2 + basePage,
			NUMANode:  NoNUMANode, Populate: true, Threads: threads})
		if err != nil {
			t.Fatal(err)
		}
		if rss := smaps(t, r.Bytes(), "Rss"); rss != r.Size() {
			t.Errorf("%d threads populated %d of %d bytes", threads, rss, r.Size())
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	}
	r, err := Create(t.Context(), Options{Kind: KindMemfd, SizeBytes: 1 << 20,
		NUMANode: NoNUMANode})
	if err != nil {
		t.Fatal(err)
	}
	mustClose(t, r)
	if rss := smaps(t, r.Bytes(), "Rss"); rss != 0 {
		t.Errorf("populated %d bytes unasked", rss)
	}
	if err := touch(r.Bytes()); err != nil {
		t.Error(err)
	}
	if rss := smaps(t, r.Bytes(), "Rss"); rss != r.Size() {
		t.Errorf("without MADV_POPULATE_WRITE populated %d of %d bytes", rss, r.Size())
	}
}

func BenchmarkPopulate(b *testing.B) {
	const size = 1 << 30
	for _, kind := range []Kind{KindMemfd, KindTHP, KindHugetlb} {
		b.Run(string(kind), func(b *testing.B) {
			b.SetBytes(size)
			for b.Loop() {
				r, err := Create(context.Background(), Options{Kind: kind, SizeBytes: size,
					NUMANode: NoNUMANode, Populate: true})
				if err != nil {
					b.Skip(err)
				}
				b.StopTimer()
				if err := r.Close(); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
		})
	}
}
