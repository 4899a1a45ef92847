//go:build linux

package memcopy

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"lookaside/dax"
	"lookaside/internal/bytesize"
	"lookaside/internal/leak"
)

var seed = flag.Uint64("seed", 0, "seed of the random tests; 0 takes one from the clock")

func TestMain(m *testing.M) { leak.Main(m) }

func newRandom(t *testing.T) *rand.Rand {
	s := *seed
	if s == 0 {
		s = uint64(time.Now().UnixNano())
	}
	t.Logf("replay with -seed=%d", s)
	return rand.New(rand.NewPCG(s, 0))
}

func fill(b []byte, r *rand.Rand) {
	for i := range b {
		b[i] = byte(r.Uint32())
	}
}

// margin on both sides of a destination that no copy may touch.
const margin = 4096

// checkCopy copies n bytes between two buffers at the given misalignments and
// compares all of the destination's buffer with what copy makes of it.
func checkCopy(t *testing.T, src []byte, dstSkew, srcSkew, n int) {
	t.Helper()
	if srcSkew+n > len(src) {
		t.Fatalf("bug in the test: %d+%d > %d", srcSkew, n, len(src))
	}
	got := bytes.Repeat([]byte{0xa5}, 2*margin+n+128)
	want := bytes.Clone(got)
	before := bytes.Clone(src[srcSkew : srcSkew+n])
	if c := Copy(got[margin+dstSkew:margin+dstSkew+n], src[srcSkew:srcSkew+n]); c != n {
		t.Fatalf("Copy = %d, want %d", c, n)
	}
	copy(want[margin+dstSkew:margin+dstSkew+n], src[srcSkew:srcSkew+n])
	if !bytes.Equal(got, want) {
		t.Fatalf("n=%d dstSkew=%d srcSkew=%d: differs first at byte %d of the destination",
			n, dstSkew, srcSkew, firstDifference(got, want)-margin-dstSkew)
	}
	if !bytes.Equal(before, src[srcSkew:srcSkew+n]) {
		t.Fatalf("n=%d: the source changed", n)
	}
}

func firstDifference(a, b []byte) int {
	for i := range a {
		if a[i] != b[i] {
			return i
		}
	}
	return -1
}

func testEdges(t *testing.T) {
	src := make([]byte, 2<<20)
	fill(src, rand.New(rand.NewPCG(1, 2)))
	sizes := []int{0, 1, 63, 64, 65, 4095, 4096, groupBytes - 1, groupBytes, groupBytes + 1,
		minFast - 1, minFast, minFast + 1, minFast + 63, minFast + 64, 3*groupBytes - 1,
		3 * groupBytes,
		PieceBytes - 1, PieceBytes, PieceBytes + 1, PieceBytes + groupBytes,
		2*PieceBytes + groupBytes + 77, 1<<20 + 13}
	for _, n := range sizes {
		for _, skew := range [][2]int{{0, 0}, {1, 0}, {0, 1}, {63, 63}, {64, 1}, {33, 7}, {8, 8}} {
			checkCopy(t, src, skew[0], skew[1], n)
		}
	}
}

func TestCopyEdges(t *testing.T) {
	if !fast {
		t.Log("no AVX-512F here: this tests the plain fallback only")
	}
	testEdges(t)
}

func TestCopyRandom(t *testing.T) {
	r := newRandom(t)
	src := make([]byte, 2<<20)
	fill(src, r)
	for range 400 {
		n := r.IntN(1 << r.IntN(21))
		checkCopy(t, src, r.IntN(128), r.IntN(4096), n)
	}
}

// Different lengths: like copy, the shorter one counts.
func TestCopyLengths(t *testing.T) {
	src := make([]byte, 100_000)
	fill(src, rand.New(rand.NewPCG(3, 4)))
	for _, n := range []int{0, 10, 99_999} {
		dst := make([]byte, 100_000)
		if got := Copy(dst[:n], src); got != n || !bytes.Equal(dst[:n], src[:n]) ||
			!bytes.Equal(dst[n:], make([]byte, len(dst)-n)) {
			t.Errorf("Copy to %d of %d = %d, or wrong bytes", n, len(src), got)
		}
		dst = make([]byte, 100_000)
		if got := Copy(dst, src[:n]); got != n || !bytes.Equal(dst[:n], src[:n]) ||
			!bytes.Equal(dst[n:], make([]byte, len(dst)-n)) {
			t.Errorf("Copy of %d to %d = %d, or wrong bytes", n, len(dst), got)
		}
	}
	if Copy(nil, nil) != 0 || Copy(nil, src) != 0 || Copy(src, nil) != 0 {
		t.Error("a copy of nothing copied something")
	}
}

func TestCopyOverlap(t *testing.T) {
	r := newRandom(t)
	for range 200 {
		buf := make([]byte, 300_000)
		fill(buf, r)
		want := bytes.Clone(buf)
		n := 1 + r.IntN(200_000)
		from, to := r.IntN(len(buf)-n+1), r.IntN(len(buf)-n+1)
		Copy(buf[to:to+n], buf[from:from+n])
		copy(want[to:to+n], want[from:from+n])
		if !bytes.Equal(buf, want) {
			t.Fatalf("%d bytes from %d to %d of one buffer: differs from copy", n, from, to)
		}
	}
}

func TestCopyAllocatesNothing(t *testing.T) {
	dst, src := make([]byte, 1<<20), make([]byte, 1<<20)
	if n := testing.AllocsPerRun(10, func() { Copy(dst, src) }); n != 0 {
		t.Errorf("%v allocations a copy", n)
	}
}

func FuzzCopy(f *testing.F) {
	f.Add(uint64(1), uint32(0), uint16(0), uint16(0), false)
	f.Add(uint64(2), uint32(minFast), uint16(1), uint16(63), false)
	f.Add(uint64(3), uint32(PieceBytes+groupBytes+1), uint16(17), uint16(4095), false)
	f.Add(uint64(4), uint32(100_000), uint16(500), uint16(200), true)
	f.Fuzz(func(t *testing.T, seed uint64, n uint32, dstAt, srcAt uint16, same bool) {
		n %= 1 << 20
		r := rand.New(rand.NewPCG(seed, 1))
		src := make([]byte, int(n)+1<<16)
		for i := 0; i+8 <= len(src); i += 8 {
			v := r.Uint64()
			for k := range 8 {
				src[i+k] = byte(v >> (8 * k))
			}
		}
		dst := make([]byte, len(src))
		if same {
			dst = src
		}
		want := bytes.Clone(dst)
		wantSrc := want
		if !same {
			wantSrc = bytes.Clone(src)
		}
		d, s := int(dstAt), int(srcAt)
		if Copy(dst[d:d+int(n)], src[s:s+int(n)]) != copy(want[d:d+int(n)], wantSrc[s:s+int(n)]) {
			t.Fatal("another count than copy")
		}
		if !bytes.Equal(dst, want) || !bytes.Equal(src, wantSrc) {
			t.Fatal("other bytes than copy")
		}
	})
}

// Fault 15: the file behind a mapping is truncated during a copy.
func TestCopySurvivesTruncatedFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "region")
	r, err := dax.Create(t.Context(), dax.Options{Kind: dax.KindFile, Path: path,
		SizeBytes: 4 << 20,
		NUMANode:  dax.NoNUMANode})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if err := os.Truncate(path, 1<<20); err != nil {
		t.Fatal(err)
	}
	other := make([]byte, 4<<20)
	if err := dax.Guard(func() { Copy(other, r.Bytes()) }, r.Bytes()); !errors.Is(err,
		dax.ErrFault) {
		t.Errorf("Copy under Guard: %v, want a fault", err)
	}
}

func BenchmarkCopy(b *testing.B) {
	for _, size := range []int{64 << 10, 256 << 10, 2 << 20, 32 << 20} {
		src, dst := make([]byte, 128<<20), make([]byte, 128<<20)
		for _, way := range []struct {
			name string
			copy func(dst, src []byte) int
		}{{"go", func(dst, src []byte) int { return copy(dst, src) }}, {"memcopy", Copy}} {
			b.Run(fmt.Sprintf("%s/%s", bytesize.Format(int64(size)), way.name), func(b *testing.B) {
				b.SetBytes(int64(size))
				b.ReportAllocs()
				at := 0
				for b.Loop() {
					way.copy(dst[at:at+size], src[at:at+size])
					if at += size; at+size > len(src) {
						at = 0
					}
				}
			})
		}
	}
}
