package elsewhere

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"lookaside/ipc"
	"lookaside/tiers"
	. "lookaside/tiers/elsewhere/elsewheretest"
)

func TestValues(t *testing.T) {
	t.Parallel()
	r := newRig(t, quick()).serving()
	ctx := context.Background()
	r.mustPut("one", 100_000)
	r.mustGet("one", 100_000)
	r.mustGet("one", 10) // a beginning
	if err := r.get(ctx, "two", r.memory(10)); !errors.Is(err, tiers.ErrNotFound) {
		t.Fatalf("get of what is not there: %v", err)
	}
	if err := r.get(ctx, "one", r.memory(100_001)); err == nil {
		t.Fatal("more was got than was put")
	}
	// Pieces of the region and of Go's heap, mixed.
	heap, arena := value("heap", 5000), r.memory(6000)
	copy(arena, value("arena", 6000))
	if err := r.put(ctx, "mixed", heap, arena, heap[:1]); err != nil {
		t.Fatal(err)
	}
	got := [][]byte{make([]byte, 5000), r.memory(6000), make([]byte, 1)}
	if err := r.get(ctx, "mixed", got...); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(got[0], heap) || !slices.Equal(got[1], arena) || got[2][0] != heap[0] {
		t.Fatal("other bytes")
	}
	held := []bool{false, true, false}
	keys := [][]byte{[]byte("one"), []byte("two"), []byte("mixed")}
	if err := r.Contains(ctx, keys, held); err != nil || !slices.Equal(held,
		[]bool{true, false, true}) {
		t.Fatalf("held %v, %v", held, err)
	}
	if err := r.Drop(ctx, keys[:2]); err != nil {
		t.Fatal(err)
	}
	if err := r.get(ctx, "one", r.memory(10)); !errors.Is(err, tiers.ErrNotFound) {
		t.Fatalf("get of what was dropped: %v", err)
	}
	if n, err := r.Clear(ctx, []byte("mi")); n != 1 || err != nil {
		t.Fatalf("cleared %d, %v", n, err)
	}
	if n, err := r.Clear(ctx, nil); n != 0 || err != nil {
		t.Fatalf("cleared %d, %v", n, err)
	}
	if err := r.Check(ctx); err != nil {
		t.Fatal(err)
	}
	if s := r.Stats(); s.Keys != 0 || s.Down != "" || s.PID == 0 || s.Starts != 1 ||
		s.Failures != 0 ||
		!strings.HasPrefix(s.Detail, "elsewheretest: ") {
		t.Fatalf("%+v", s)
	}
}

// More items and keys than one message may have, and more calls than the program wants.
func TestManyItems(t *testing.T) {
	t.Parallel()
	r := newRig(t, quick(), func(s *Store) { s.MaxItems, s.MaxCalls = 3, 2 }).serving()
	const n = 10
	var items []Item
	var keys [][]byte
	for i := range n {
		key := strings.Repeat(string(rune('a'+i)), 20)
		mem := r.memory(5000)
		copy(mem, value(key, 5000))
		items = append(items, Item{[]byte(key), [][]byte{mem}})
		keys = append(keys, []byte(key))
	}
	r.Put(t.Context(), items, func(i int, err error) {
		if err != nil {
			t.Errorf("put %d: %v", i, err)
		}
	})
	var wg sync.WaitGroup
	for range 6 {
		mine := slices.Clone(items)
		for i := range mine {
			mine[i].Mem = [][]byte{r.memory(5000)}
		}
		wg.Go(func() {
			held, calls := make([]bool, n), 0
			if err := r.Contains(t.Context(), keys, held); err != nil || slices.Contains(held,
				false) {
				t.Errorf("held %v, %v", held, err)
			}
			r.Get(t.Context(), mine, func(i int, err error) {
				calls++
				if err != nil || !slices.Equal(mine[i].Mem[0], value(string(keys[i]), 5000)) {
					t.Errorf("get %d: %v", i, err)
				}
			})
			if calls != n {
				t.Errorf("done was called %d times", calls)
			}
		})
	}
	wg.Wait()
}

// What a program does to a get, or to a put. Each is an error in time, the memory is not touched
// afterwards, and the next call finds a program that works.
func TestFaults(t *testing.T) {
	t.Parallel()
	for _, f := range []struct {
		fault   string
		restart bool // the connection is lost
		within  bool // the call fails before its deadline
	}{
		{Hang, true, false},
		{Stall, false, false},
		{Late, false, false},
		{LateWrite, false, false},
		{Garbage, true, true},
		{Flood, true, true},
		{Leave, true, true},
		{Die, true, true},
		{Stranger, true, true},
		{Beyond, true, true},
		{DropHolds, true, true},
		{Failing, false, true},
	} {
		t.Run(f.fault, func(t *testing.T) {
			t.Parallel()
			o := quick()
			if f.fault == LateWrite {
				o.CancelTimeout = unhurried
			}
			r := newRig(t, o).serving()
			r.mustPut("key", 9000)
			before := r.Stats()
			r.store.Set(f.fault)
			patience := unhurried
			if !f.within {
				patience = 30 * time.Millisecond
			}
			direct, bounce := r.memory(9000), make([]byte, 9000)
			var calls sync.WaitGroup
			for _, mem := range [][]byte{direct, bounce} {
				poison(mem)
				calls.Go(func() {
					err := r.get(withTimeout(t, patience), "key", mem)
					late := f.fault == Late || f.fault == LateWrite // they may be in time
					if err == nil && !late || !f.within && err != nil && !errors.Is(err, errLate) {
						t.Errorf("get: %v", err)
					}
					poison(mem)
				})
			}
			calls.Wait()
			r.store.Set("")
			r.serving()
			r.mustGet("key", 9000)
			if !poisoned(direct) || !poisoned(bounce) {
				t.Error("memory was touched after the call had returned")
			}
			after := r.Stats()
			if (after.PID != before.PID) != f.restart || (after.Failures > 0) != f.restart {
				t.Errorf("before %+v, after %+v", before, after)
			}
		})
	}
}

// What a program does to a put: the value is there whole or not at all.
func TestFaultsOfPuts(t *testing.T) {
	t.Parallel()
	for _, fault := range []string{Hang, Stall, DieInPut, Full, Failing, DropHolds} {
		t.Run(fault, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, quick()).serving()
			r.store.Set(fault)
			patience := 30 * time.Millisecond
			if fault == DieInPut || fault == Full || fault == Failing {
				patience = unhurried
			}
			mem := r.memory(9000)
			copy(mem, value("key", 9000))
			err := r.put(withTimeout(t, patience), "key", mem)
			if err == nil || errors.Is(err, tiers.ErrBusy) != (fault == Full) {
				t.Errorf("put: %v", err)
			}
			r.store.Set("")
			r.serving()
			if err := r.get(context.Background(), "key", r.memory(9000)); !errors.Is(err,
				tiers.ErrNotFound) {
				t.Errorf("get: %v", err)
			}
			r.mustPut("key", 9000)
			r.mustGet("key", 9000)
		})
	}
}

// A result that comes twice ends the connection, and is accepted once.
func TestResultsTwice(t *testing.T) {
	t.Parallel()
	r := newRig(t, quick()).serving()
	r.mustPut("key", 100)
	r.store.Set(Twice)
	for r.Stats().Failures == 0 {
		calls := 0
		r.Get(withTimeout(t, unhurried), []Item{{[]byte("key"), [][]byte{r.memory(100)}}},
			func(int, error) { calls++ })
		if calls != 1 {
			t.Fatalf("done was called %d times", calls)
		}
	}
	r.store.Set("")
	r.serving().mustGet("key", 100)
}

// A program that is stopped is killed when it does not report a cancelled call, and started again.
func TestStoppedProgram(t *testing.T) {
	t.Parallel()
	r := newRig(t, quick()).serving()
	r.mustPut("key", 9000)
	pid := r.Stats().PID
	stop(t, pid)
	mem := r.memory(9000)
	if err := r.get(withTimeout(t, 20*time.Millisecond), "key", mem); !errors.Is(err, errLate) {
		t.Errorf("get: %v", err)
	}
	if unix.Kill(pid, 0) == nil {
		t.Error("Get has returned, and the program is not dead")
	}
	poison(mem)
	r.serving().mustGet("key", 9000)
	if !poisoned(mem) {
		t.Error("memory was touched after the call had returned")
	}
}

// A program that sends no figures is killed also when nobody calls it.
func TestSilentProgram(t *testing.T) {
	t.Parallel()
	o := quick()
	o.StatsTimeout = 50 * time.Millisecond
	r := newRig(t, o).serving()
	pid := r.Stats().PID
	stop(t, pid)
	eventually(t, "its end", func() bool { return unix.Kill(pid, 0) != nil })
	r.serving()
	r.store.Set(Mute)
	failures := r.Stats().Failures
	eventually(t, "its end", func() bool { return r.Stats().Failures > failures })
}

// A program that listens is not killed: what it was to fill stays with the call until it has left.
func TestStoppedListener(t *testing.T) {
	t.Parallel()
	for _, end := range []unix.Signal{unix.SIGCONT, unix.SIGKILL} {
		t.Run(end.String(), func(t *testing.T) {
			t.Parallel()
			o := quick()
			o.Socket = filepath.Join(t.TempDir(), "socket")
			var process *os.Process
			r := newRig(t, o, func(s *Store) {
				s.Listen = o.Socket
				process = Start(t, s)
			}).serving()
			r.mustPut("key", 9000)
			if pid := r.Stats().PID; pid != process.Pid {
				t.Errorf("pid %d, want %d", pid, process.Pid)
			}
			stop(t, process.Pid)
			direct, bounce := r.memory(9000), make([]byte, 9000)
			poison(bounce)
			returned := make(chan error)
			go func() { returned <- r.get(withTimeout(t, 20*time.Millisecond), "key", direct) }()
			// Memory of no region is not waited for.
			if err := r.get(withTimeout(t, 20*time.Millisecond), "key", bounce); err == nil {
				t.Error("a stopped program has reported a get")
			}
			eventually(t, "the end of the connection", func() bool { return r.Stats().Down != "" })
			// The tier is off: calls fail at once.
			if err := r.Contains(t.Context(), [][]byte{[]byte("key")},
				make([]bool, 1)); err == nil {
				t.Error("Contains of a stopped program")
			}
			select {
			case err := <-returned:
				t.Fatalf("Get has returned while the program may write: %v", err)
			default:
			}
			signal(t, process.Pid, end)
			if err := <-returned; !errors.Is(err, errLate) {
				t.Errorf("get: %v", err)
			}
			poison(direct)
			if end == unix.SIGKILL {
				return
			}
			r.serving().mustGet("key", 9000)
			if !poisoned(direct) || !poisoned(bounce) {
				t.Error("memory was touched after the call had returned")
			}
		})
	}
}

// Close does not wait for ever for a program that is not ours to kill: its claim then counts for
// every sidecar.
func TestCloseStrandsTheClaim(t *testing.T) {
	t.Parallel()
	const generation = 77
	dir := filepath.Join(t.TempDir(), "runtime")
	listener, err := ipc.Listen(dir, ipc.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	o := quick()
	o.EndTimeout = 20 * time.Millisecond
	o.Socket = filepath.Join(t.TempDir(), "socket")
	o.Claim = func() (int, error) { return listener.Claim(generation) }
	var process *os.Process
	r := newRig(t, o, func(s *Store) {
		s.Listen = o.Socket
		process = Start(t, s)
	}).serving()
	r.mustPut("key", 9000)
	held := func(except uint64) bool {
		held, err := listener.Claims(except)
		if err != nil {
			t.Fatal(err)
		}
		return held
	}
	if !held(generation+1) || held(generation) {
		t.Error("the program has no claim on its sidecar's generation, or on another")
	}
	stop(t, process.Pid)
	returned := make(chan error)
	go func() { returned <- r.get(t.Context(), "key", r.memory(9000)) }()
	eventually(t, "the call", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.conn.mu.Lock()
		defer r.conn.mu.Unlock()
		return len(r.conn.calls) > 0
	})
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	if err := <-returned; !errors.Is(err, tiers.ErrClosed) {
		t.Errorf("get: %v", err)
	}
	if !held(generation) {
		t.Error("a sidecar of the same generation does not learn that the program may still write")
	}
	signal(t, process.Pid, unix.SIGKILL)
	eventually(t, "the end of the claim", func() bool {
		return !held(generation) &&
			!held(generation+1)
	})
}

func TestRegions(t *testing.T) {
	t.Parallel()
	r := newRig(t, quick()).serving()
	pid := r.Stats().PID
	if n := mapped(pid); n != 2 { // the region and scratch memory
		t.Fatalf("%d regions are mapped", n)
	}
	if err := r.RemoveRegion(1, unhurried); err != nil {
		t.Fatal(err)
	}
	if n := mapped(pid); n != 1 {
		t.Fatalf("%d regions are mapped", n)
	}
	r.mustPut("key", 9000) // by scratch memory
	r.mustGet("key", 9000)
	r.AddRegion(r.asRegion(2))
	r.serving().mustGet("key", 9000)
	if n := mapped(pid); n != 2 {
		t.Fatalf("%d regions are mapped", n)
	}
	// A program that does not unmap is killed for it.
	stop(t, pid)
	if err := r.RemoveRegion(2, 50*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	if unix.Kill(pid, 0) == nil {
		t.Error("RemoveRegion has returned, and the program may still have the region mapped")
	}
}

// A program that cannot map a region works by copies, and so does one that is not given it.
func TestRegionsThatAreNotMapped(t *testing.T) {
	t.Parallel()
	for _, isolated := range []bool{false, true} {
		o := quick()
		o.Isolated = isolated
		r := newRig(t, o, func(s *Store) { s.Set(Unmapped) })
		eventually(t, "the program", func() bool { return r.Check(context.Background()) == nil })
		r.mustPut("key", 3_000_000)
		r.mustGet("key", 3_000_000)
		if isolated && mapped(r.Stats().PID) != 1 {
			t.Error("an isolated program has the arena mapped")
		}
	}
}

// Values larger than all scratch memory so far, and more of them than its limit allows at a time.
func TestScratchGrows(t *testing.T) {
	t.Parallel()
	o := quick()
	o.Isolated, o.ScratchBytes = true, 40<<20
	r := newRig(t, o)
	big := value("big", 17<<20)
	if err := r.put(t.Context(), "big", big); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(big))
	if err := r.get(t.Context(), "big", got); err != nil || !slices.Equal(got, big) {
		t.Fatalf("get: %v", err)
	}
	var errs []error
	r.Put(t.Context(), []Item{{[]byte("a"), [][]byte{big}}, {[]byte("b"), [][]byte{big}}},
		func(_ int, err error) { errs = append(errs, err) })
	if len(errs) != 2 || !errors.Is(errors.Join(errs...), tiers.ErrBusy) || errs[1] != nil {
		t.Fatalf("puts of more than the limit: %v", errs)
	}
}

// Programs that cannot be started, or do not do the handshake.
func TestProgramsThatDoNotServe(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	notSocket := filepath.Join(dir, "file")
	if err := os.WriteFile(notSocket, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	with := func(change func(s *Store)) []string {
		s := New(t)
		change(s)
		return s.Command()
	}
	for _, c := range []struct {
		o    Options
		want string
	}{
		{Options{Command: []string{"/no/such/program"}}, "no such file"},
		{Options{Command: []string{"false"}}, "exit status 1"},
		{Options{Command: []string{"sleep", "1000"}, StartTimeout: 30 * time.Millisecond},
			"has not welcomed the sidecar within 30ms"},
		{Options{Command: with(func(s *Store) { s.Version = 2 })}, "want 1, got 2"},
		{Options{Command: with(func(s *Store) { s.MaxItems = 0 })}, "max_items: zero"},
		{Options{Command: with(func(s *Store) { s.Set(Refuse) })},
			"the program refuses: it was told to"},
		{Options{Socket: filepath.Join(dir, "none")}, "no such file"},
		{Options{Socket: notSocket}, "no process listens"},
	} {
		q := quick()
		q.Command, q.Socket, q.StartTimeout = c.o.Command, c.o.Socket, c.o.StartTimeout
		p, err := Open(q)
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, "a second failure", func() bool { return p.Stats().Failures > 1 })
		eventually(t, c.want, func() bool { return strings.Contains(p.Stats().Down, c.want) })
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		if err := p.Contains(t.Context(), [][]byte{{1}}, make([]bool, 1)); !errors.Is(err,
			tiers.ErrClosed) {
			t.Errorf("Contains after Close: %v", err)
		}
	}
	for _, o := range []Options{{}, {Command: []string{"x"}, Socket: "y"},
		{Socket: strings.Repeat("x", 108)}, {Socket: "x", CancelTimeout: -1}} {
		if _, err := Open(o); err == nil {
			t.Errorf("%+v was accepted", o)
		}
	}
}

// What a program prints is logged, and all processes of its group end with it.
func TestOutputAndGroup(t *testing.T) {
	t.Parallel()
	core, logs := observer.New(zapcore.InfoLevel)
	o := quick()
	o.Log = zap.New(core)
	pidFile := filepath.Join(t.TempDir(), "pid")
	o.Command = []string{"sh", "-c", "echo hello; sleep 1000 & echo $! > " + pidFile + "; wait"}
	p, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	var child int
	eventually(t, "its child", func() bool {
		b, _ := os.ReadFile(pidFile)
		child = 0
		for _, c := range strings.TrimSpace(string(b)) {
			child = 10*child + int(c-'0')
		}
		return strings.HasSuffix(string(b), "\n")
	})
	eventually(t, "its output", func() bool {
		return logs.FilterMessage("the program prints").FilterField(zap.String("line",
			"hello")).Len() > 0
	})
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	eventually(t, "the end of its child", func() bool {
		stat, err := os.ReadFile(filepath.Join("/proc", itoa(child), "stat"))
		return err != nil || strings.Contains(string(stat), ") Z ") // nobody may reap it here
	})
}

func itoa(n int) string {
	var b []byte
	for ; n > 0; n /= 10 {
		b = append(b, byte('0'+n%10))
	}
	slices.Reverse(b)
	return string(b)
}

// Random calls while the program is killed, stopped and told to misbehave: a get without an error
// has the bytes that were put, the memory of a call that has returned stays as it is, and in the
// end everything works.
func TestHistory(t *testing.T) {
	t.Parallel()
	const seed = 1
	t.Logf("seed %d", seed)
	for _, listens := range []bool{false, true} {
		o := quick()
		r := newHistoryRig(t, o, listens)
		var wg sync.WaitGroup
		over := make(chan struct{})
		// What is put does not change: a program may read it after a put has failed.
		sources := map[string][][]byte{}
		for k := 'a'; k < 'a'+8; k++ {
			v := value(string(k), 20_000)
			mem := r.memory(len(v))
			copy(mem, v)
			sources[string(k)] = [][]byte{mem, v}
		}
		for w := range uint64(3) {
			rnd := rand.New(rand.NewPCG(seed, w))
			direct, heap := r.memory(20_000), make([]byte, 20_000)
			wg.Go(func() {
				for {
					select {
					case <-over:
						return
					default:
					}
					key := string(rune('a' + rnd.IntN(8)))
					mem := [][]byte{direct, heap}[rnd.IntN(2)][:1+rnd.IntN(20_000)]
					ctx, cancel := context.WithTimeoutCause(context.Background(),
						time.Duration(rnd.IntN(40))*time.Millisecond, errLate)
					switch rnd.IntN(6) {
					case 0:
						_ = r.Drop(ctx, [][]byte{[]byte(key)})
					case 1:
						_ = r.Contains(ctx, [][]byte{[]byte(key)}, make([]bool, 1))
					case 2, 3:
						_ = r.put(ctx, key, sources[key][rnd.IntN(2)])
					default:
						poison(mem)
						if r.get(ctx, key, mem) == nil && !slices.Equal(mem,
							sources[key][1][:len(mem)]) {
							t.Errorf("get of %s returned other bytes", key)
						}
						poison(mem)
						time.Sleep(time.Duration(rnd.IntN(2000)) * time.Microsecond)
						if !poisoned(mem) {
							t.Error("memory was touched after the call had returned")
						}
					}
					cancel()
				}
			})
		}
		rnd := rand.New(rand.NewPCG(seed, 99))
		faults := []string{Hang, Stall, Late, LateWrite, Garbage, Leave, Die, DieInPut, Twice,
			Stranger, Beyond, Full, Failing, DropHolds}
		for range 25 {
			if pid := r.Stats().PID; rnd.IntN(3) == 0 && pid > 1 && !listens {
				_ = unix.Kill(pid, []unix.Signal{unix.SIGKILL, unix.SIGSTOP}[rnd.IntN(2)])
			} else if fault := faults[rnd.IntN(len(faults))]; !listens || fault != Die &&
				fault != DieInPut && fault != DropHolds {
				r.store.Set(fault)
			}
			time.Sleep(time.Duration(rnd.IntN(20)) * time.Millisecond)
			r.store.Set("")
			time.Sleep(time.Duration(rnd.IntN(10)) * time.Millisecond)
		}
		close(over)
		wg.Wait()
		r.serving()
		r.mustPut("z", 20_000)
		r.mustGet("z", 20_000)
		for _, a := range r.scratch.list() { // all of it is free again
			eventually(t, "the scratch memory", func() bool {
				r.scratch.mu.Lock()
				defer r.scratch.mu.Unlock()
				return len(a.free) == 1 && a.free[0].size == a.region.Size()
			})
		}
	}
}

func newHistoryRig(t *testing.T, o Options, listens bool) *rig {
	if !listens {
		return newRig(t, o).serving()
	}
	o.Socket = filepath.Join(t.TempDir(), "socket")
	return newRig(t, o, func(s *Store) {
		s.Listen = o.Socket
		Start(t, s)
	}).serving()
}

func TestScratch(t *testing.T) {
	t.Parallel()
	const seed = 1
	rnd := rand.New(rand.NewPCG(seed, 0))
	s := &scratch{limit: 64 << 20,
		added: func(context.Context, *area) error { return nil }}
	defer s.close()
	var taken []span
	for range 3000 {
		if len(taken) > 0 && rnd.IntN(2) == 0 {
			i := rnd.IntN(len(taken))
			s.give(taken[i])
			taken = slices.Delete(taken, i, i+1)
			continue
		}
		sp, err := s.take(t.Context(), int64(1+rnd.IntN(3<<20)))
		if err != nil {
			if !errors.Is(err, tiers.ErrBusy) {
				t.Fatal(err)
			}
			continue
		}
		for _, o := range taken {
			if o.area == sp.area && o.offset < sp.offset+sp.size && sp.offset < o.offset+o.size {
				t.Fatalf("seed %d: a span was given out twice", seed)
			}
		}
		taken = append(taken, sp)
	}
	for _, sp := range taken {
		s.give(sp)
	}
	for _, a := range s.list() {
		if len(a.free) != 1 || a.free[0].offset != 0 || a.free[0].size != a.region.Size() {
			t.Fatalf("seed %d: free in the end: %d parts", seed, len(a.free))
		}
	}
}

func TestWords(t *testing.T) {
	t.Parallel()
	for text, want := range map[string][]string{
		"":                           nil,
		"  ":                         nil,
		"a":                          {"a"},
		" python  a.py\t--dir /x ":   {"python", "a.py", "--dir", "/x"},
		`a 'b c' "d 'e'" f\ g ''`:    {"a", "b c", "d 'e'", "f g", ""},
		`x"y z"w 'it'\''s' "a\"b\c"`: {"xy zw", "it's", `a"b\c`},
	} {
		if got, err := Words(text); err != nil || !slices.Equal(got, want) {
			t.Errorf("%q: %q, %v", text, got, err)
		}
	}
	for _, text := range []string{"'a", `"b`, `a "`} {
		if _, err := Words(text); err == nil {
			t.Errorf("%q was accepted", text)
		}
	}
}
