//go:build linux

package memcopy

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

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

func TestPool(t *testing.T) {
	r := newRandom(t)
	pool := NewPool(3)
	defer pool.Close()
	src := make([]byte, 8<<20)
	fill(src[:1<<20], r)
	for at := 1 << 20; at < len(src); at *= 2 {
		copy(src[at:], src[:at])
		src[at] ^= 0xff
	}
	for range 20 {
		var jobs []Job
		dst := make([]byte, len(src)+1)
		want := make([]byte, len(dst))
		for at := 0; at < len(src); {
			n := min(r.IntN(1<<r.IntN(22))+1, len(src)-at)
			if r.IntN(4) > 0 { // some gaps stay as they are
				jobs = append(jobs, Job{dst[at+1 : at+1+n], src[at : at+n]})
				copy(want[at+1:at+1+n], src[at:])
			}
			at += n
		}
		r.Shuffle(len(jobs), func(i, j int) { jobs[i], jobs[j] = jobs[j], jobs[i] })
		if err := pool.Do(t.Context(), jobs...); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(dst, want) {
			t.Fatalf("%d jobs: differs first at %d", len(jobs), firstDifference(dst, want))
		}
	}
	if err := pool.Do(t.Context()); err != nil {
		t.Errorf("no jobs: %v", err)
	}
	if err := pool.Do(t.Context(), Job{}, Job{Dst: src}); err != nil {
		t.Errorf("empty jobs: %v", err)
	}
}

func TestPoolConcurrentCalls(t *testing.T) {
	pool := NewPool(2)
	defer pool.Close()
	errs := make(chan error, 8)
	for g := range cap(errs) {
		go func() {
			errs <- func() error {
				src := bytes.Repeat([]byte{byte(g + 1)}, 700_000)
				for range 10 {
					dst := make([]byte, len(src))
					if err := pool.Do(t.Context(), Job{dst, src}); err != nil {
						return err
					}
					if !bytes.Equal(dst, src) {
						return fmt.Errorf("call %d returned before its copy was done", g)
					}
				}
				return nil
			}()
		}()
	}
	for range cap(errs) {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
}

func TestPoolRefusesOverlap(t *testing.T) {
	pool := NewPool(1)
	defer pool.Close()
	buf := make([]byte, 1000)
	buf[0] = 1
	if err := pool.Do(t.Context(), Job{buf[500:], buf[:500]},
		Job{buf[10:20], buf[15:25]}); err == nil {
		t.Error("overlapping job accepted")
	}
	if buf[500] != 0 {
		t.Error("copied a part of what was refused")
	}
}

func TestPoolStops(t *testing.T) {
	big := func() Job { return Job{make([]byte, 64<<20), make([]byte, 64<<20)} }

	pool := NewPool(1)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := pool.Do(ctx, big()); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled before: %v", err)
	}
	// Either call would take many seconds, and the deadline of the second is over
	// long before, also if the first is late, and if the deadline is told late.
	first := make(chan error, 1)
	b := big()
	var many []Job
	for range 1024 {
		many = append(many, b)
	}
	go func() {
		var err error
		for err == nil {
			err = pool.Do(context.Background(), many...)
		}
		first <- err
	}()
	time.Sleep(time.Millisecond)
	ctx, cancel = context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := pool.Do(ctx, many...); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("past its deadline: %v", err)
	}
	pool.Close()
	if err := <-first; !errors.Is(err, ErrClosed) {
		t.Errorf("closed in the middle: %v", err)
	}
	if err := pool.Do(t.Context(), b); !errors.Is(err, ErrClosed) {
		t.Errorf("closed before: %v", err)
	}
	pool.Close()
}

// Fault 15: the file behind a mapping is truncated during copies.
func TestPoolSurvivesTruncatedFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "region")
	r, err := dax.Create(dax.Options{Kind: dax.KindFile, Path: path, SizeBytes: 4 << 20,
		NUMANode: dax.NoNUMANode})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if err := os.Truncate(path, 1<<20); err != nil {
		t.Fatal(err)
	}
	pool := NewPool(2)
	defer pool.Close()
	other := make([]byte, 4<<20)
	if err := pool.Do(t.Context(), Job{other, r.Bytes()}); !errors.Is(err, dax.ErrFault) {
		t.Errorf("reading it: %v, want a fault", err)
	}
	if err := pool.Do(t.Context(), Job{r.Bytes(), other}); !errors.Is(err, dax.ErrFault) {
		t.Errorf("writing it: %v, want a fault", err)
	}
	if err := pool.Do(t.Context(), Job{r.Bytes()[:1<<20], other}); err != nil {
		t.Errorf("the part that is left: %v", err)
	}
	if err := dax.Guard(func() { Copy(other, r.Bytes()) }, r.Bytes()); !errors.Is(err,
		dax.ErrFault) {
		t.Errorf("Copy under Guard: %v, want a fault", err)
	}
}

// A pool's threads are of low priority, and nobody else becomes so: not a
// thread that the runtime starts meanwhile, and none that stays behind.
func TestPoolThreadsAreNice(t *testing.T) {
	pool := NewPool(2)
	waitForNice(t, "at least two threads", func(tids []int) bool { return len(tids) >= 2 })
	pool.Close()
	// The runtime keeps the process's first thread, asleep for good, when a
	// goroutine that was locked to it ends.
	waitForNice(t, "no thread but the first", func(tids []int) bool {
		return len(tids) == 0 || len(tids) == 1 && tids[0] == os.Getpid()
	})
}

func waitForNice(t *testing.T, what string, enough func(tids []int) bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		tasks, err := os.ReadDir("/proc/self/task")
		if err != nil {
			t.Fatal(err)
		}
		var nice []int
		for _, task := range tasks {
			var tid int
			if _, err := fmt.Sscan(task.Name(), &tid); err != nil {
				t.Fatal(err)
			}
			// The system call returns 20 − nice.
			if p, err := unix.Getpriority(unix.PRIO_PROCESS, tid); err == nil && 20-p == poolNice {
				nice = append(nice, tid)
			}
		}
		if enough(nice) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("threads %v of process %d are at nice %d, want %s", nice, os.Getpid(),
				poolNice, what)
		}
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
