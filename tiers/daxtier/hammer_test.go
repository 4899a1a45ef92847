package daxtier

import (
	"errors"
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"lookaside/tiers"
)

// Fault 13: headers, entries and pages change at any moment, between being checked and being used:
// somebody else has the file mapped and writes to it all the time. What decides is a copy that was
// taken once, so there are errors and misses, but no panic, no access outside of the partition, and
// no page with other bytes than were stored.
func TestHeadersChangeUnderneath(t *testing.T) {
	t.Parallel()
	seeds(t, 3, func(t *testing.T, seed uint64) {
		o := files(memory(t), 1, 4<<20)
		o.SlabBytes = 1 << 20
		p := mustOpen(t, o)
		mustStore(t, p, 0, 40)
		noError(t, p.Close())
		path := o.Devices[0].Path
		good, err := os.ReadFile(path)
		noError(t, err)
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		noError(t, err)
		mem, err := unix.Mmap(int(f.Fd()), 0, len(good), unix.PROT_READ|unix.PROT_WRITE,
			unix.MAP_SHARED)
		noError(t, errors.Join(err, f.Close()))
		stop := make(chan struct{})
		// blows of this round: on a slow machine, too, something is to be left whole
		var left atomic.Int64
		var hammer sync.WaitGroup
		hammer.Go(func() {
			rnd := rand.New(rand.NewPCG(seed, 13))
			const head = 16 << 10 // of the partition and of each slab: headers and entries
			bad := make([]byte, 8)
			for {
				select {
				case <-stop:
					return
				default:
				}
				if left.Add(-1) < 0 {
					runtime.Gosched()
					continue
				}
				at := rnd.IntN(4)*(1<<20) + rnd.IntN(head)/8*8
				if rnd.IntN(8) == 0 {
					at = rnd.IntN(len(mem)) / 8 * 8
				}
				for i := range bad {
					bad[i] = byte(rnd.Uint32())
				}
				copy(mem[at:at+8], bad)
				if rnd.IntN(16) > 0 { // and is right again
					copy(mem[at:at+8], good[at:at+8])
				}
			}
		})
		opened, hits := 0, 0
		for round := range int64(30) {
			left.Store(50 << (round % 8))
			if _, err := Check(t.Context(), CheckOptions{Devices: []string{path}}); err != nil &&
				t.Context().Err() != nil {
				t.Fatal(err)
			}
			q, err := Open(o)
			if err != nil {
				if !errors.Is(err, ErrForeign) && !errors.Is(err, ErrDevice) &&
					!errors.Is(err, unix.EIO) {
					t.Logf("open: %v", err)
				}
			} else {
				opened++
				for n := range 40 {
					switch err := load(t, q, n, n+1)[0]; { // wrong bytes end the test
					case err == nil:
						hits++
					case !errors.Is(err, tiers.ErrNotFound) && !errors.Is(err, tiers.ErrCorrupt) &&
						!errors.Is(err, unix.EIO):
						t.Errorf("chunk %d: %v", n, err)
					}
				}
				store(t.Context(), q, testSpace(), 100, 104) // may fail
				_ = q.Close()
			}
			copy(mem, good) // for the next to find something
		}
		close(stop)
		hammer.Wait()
		noError(t, unix.Munmap(mem))
		t.Logf("opened %d times, %d hits", opened, hits)
		if opened == 0 || hits == 0 {
			t.Error("nothing was ever opened, or found")
		}
	})
}
