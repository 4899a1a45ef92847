package elsewhere

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lookaside/dax"
	"lookaside/internal/leak"
	"lookaside/tiers/elsewhere/elsewheretest"
)

func TestMain(m *testing.M) {
	elsewheretest.Main()
	leak.Main(m)
}

// unhurried is for what happens at once, however slow the machine is.
const unhurried = time.Minute

// rig is a program, its store, and a region of an arena.
type rig struct {
	t testing.TB
	*Program
	store  *elsewheretest.Store
	region *dax.Region
	used   int
}

// quick are options with which what a program does wrong is found soon.
func quick() Options {
	return Options{Name: "test", CancelTimeout: 20 * time.Millisecond,
		StatsEvery: 5 * time.Millisecond, FirstPause: time.Millisecond,
		LastPause: 10 * time.Millisecond, EndTimeout: 200 * time.Millisecond}
}

func newRig(t testing.TB, o Options, change ...func(s *elsewheretest.Store)) *rig {
	t.Helper()
	r := &rig{t: t, store: elsewheretest.New(t)}
	for _, c := range change {
		c(r.store)
	}
	if o.Socket == "" {
		o.Command = r.store.Command()
	}
	var err error
	if r.region, err = dax.Create(t.Context(), dax.Options{Kind: dax.KindMemfd,
		SizeBytes: 8 << 20, NUMANode: dax.NoNUMANode}); err != nil {
		t.Fatal(err)
	}
	if r.Program, err = Open(o); err != nil {
		t.Fatal(err)
	}
	r.AddRegion(r.asRegion(1))
	t.Cleanup(func() {
		r.store.Set("")
		if err := errors.Join(r.Close(), r.region.Close()); err != nil {
			t.Error(err)
		}
	})
	return r
}

func (r *rig) asRegion(id uint32) Region {
	return Region{ID: id, Kind: string(r.region.Kind()), FD: r.region.FD(),
		SizeBytes: r.region.Size(), PageSize: r.region.PageSize(), Mem: r.region.Bytes()}
}

// memory returns poisoned memory of the region, that no other call of it returns.
func (r *rig) memory(n int) []byte {
	at := r.used
	r.used += (n + 4095) &^ 4095
	mem := r.region.Bytes()[at : at+n : at+n]
	poison(mem)
	return mem
}

func poison(mem []byte) {
	for i := range mem {
		mem[i] = 0xa5
	}
}

func poisoned(mem []byte) bool { return bytes.Count(mem, []byte{0xa5}) == len(mem) }

// value is the value of a key.
func value(key string, n int) []byte {
	return bytes.Repeat([]byte(key+"|"), n/(len(key)+1)+1)[:n]
}

// eventually waits until ok.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(unhurried); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s has not come", what)
		}
	}
}

// serving waits until the program serves and has mapped the region.
func (r *rig) serving() *rig {
	r.t.Helper()
	eventually(r.t, "the program", func() bool {
		if r.Check(context.Background()) != nil {
			return false
		}
		r.mu.Lock()
		c := r.conn
		r.mu.Unlock()
		return c != nil && (r.o.Isolated || len(*c.places.Load()) > 1)
	})
	return r
}

func (r *rig) put(ctx context.Context, key string, mem ...[]byte) (err error) {
	r.Put(ctx, []Item{{[]byte(key), mem}}, func(_ int, e error) { err = e })
	return err
}

func (r *rig) get(ctx context.Context, key string, mem ...[]byte) (err error) {
	r.Get(ctx, []Item{{[]byte(key), mem}}, func(_ int, e error) { err = e })
	return err
}

// mustPut stores the value of a key.
func (r *rig) mustPut(key string, n int) {
	r.t.Helper()
	mem := r.memory(n)
	copy(mem, value(key, n))
	if err := r.put(context.Background(), key, mem); err != nil {
		r.t.Fatalf("put of %s: %v", key, err)
	}
}

// mustGet checks that the value of a key is there.
func (r *rig) mustGet(key string, n int) {
	r.t.Helper()
	mem := r.memory(n)
	if err := r.get(context.Background(), key, mem); err != nil {
		r.t.Fatalf("get of %s: %v", key, err)
	}
	if !bytes.Equal(mem, value(key, n)) {
		r.t.Fatalf("get of %s returned other bytes", key)
	}
}

func withTimeout(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeoutCause(context.Background(), d, errLate)
	t.Cleanup(cancel)
	return ctx
}

var errLate = errors.New("the test's deadline")

// mapped returns how many regions a process maps.
func mapped(pid int) int {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	return strings.Count(string(b), "memfd:lookaside")
}

func signal(t testing.TB, pid int, s unix.Signal) {
	t.Helper()
	if err := unix.Kill(pid, s); err != nil {
		t.Fatal(err)
	}
}

// stop stops a process, and waits until all of its threads have stopped.
func stop(t testing.TB, pid int) {
	t.Helper()
	signal(t, pid, unix.SIGSTOP)
	eventually(t, "the stop", func() bool {
		stats, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
		for _, name := range stats {
			b, err := os.ReadFile(name)
			if _, state, _ := strings.Cut(string(b), ") "); err == nil && state[0] != 'T' {
				return false
			}
		}
		return len(stats) > 0
	})
}
