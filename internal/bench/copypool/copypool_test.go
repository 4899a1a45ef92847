//go:build linux

package copypool

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
	"lookaside/internal/leak"
)

var seed = flag.Uint64("seed", 0, "seed of the random tests; 0 takes one from the clock")

func TestMain(m *testing.M) { leak.Main(m) }

func TestPool(t *testing.T) {
	s := *seed
	if s == 0 {
		s = uint64(time.Now().UnixNano())
	}
	t.Logf("replay with -seed=%d", s)
	r := rand.New(rand.NewPCG(s, 0))
	pool := New(3)
	defer pool.Close()
	src := make([]byte, 8<<20)
	for i := range 1 << 20 {
		src[i] = byte(r.Uint32())
	}
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
			t.Fatalf("%d jobs: other bytes than copy", len(jobs))
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
	pool := New(2)
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
	pool := New(1)
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

	pool := New(1)
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
	r, err := dax.Create(t.Context(), dax.Options{Kind: dax.KindFile, Path: path,
		SizeBytes: 4 << 20, NUMANode: dax.NoNUMANode})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if err := os.Truncate(path, 1<<20); err != nil {
		t.Fatal(err)
	}
	pool := New(2)
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
}

// A pool's threads are of low priority, and nobody else becomes so: not a
// thread that the runtime starts meanwhile, and none that stays behind.
func TestPoolThreadsAreNice(t *testing.T) {
	pool := New(2)
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
