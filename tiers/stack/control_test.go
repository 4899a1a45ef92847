package stack

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/tenant"
	"lookaside/tiers/tiertest"
)

// has checks how many pages of a prefix a tier has without a gap.
func (r *rig) has(name string, p tiertest.Prefix, n, want int) {
	r.t.Helper()
	run := p.Run(r.space, 0, n)
	held := make([]uint16, run.Chunks())
	var err error
	if name == arenaName {
		err = r.engine.Contains(r.id, 0, run.Hashes, held)
	} else {
		err = r.mem[name[1]-'0'].Contains(r.t.Context(), run, held)
	}
	if err != nil {
		r.t.Fatal(err)
	}
	pages := 0
	for i, h := range held {
		pages += int(h)
		if int(h) < pagesOf(n, ppc, i) {
			break
		}
	}
	if pages != want {
		r.t.Errorf("%s has %d pages, want %d", name, pages, want)
	}
}

// Lookups far beyond what the arena can promote at a time wait their turn; none starves, none
// dead-locks, and each holds nothing while it waits.
func TestTurns(t *testing.T) {
	for _, slots := range []int{4, 16, 24} {
		t.Run(fmt.Sprint(slots), func(t *testing.T) {
			inBubble(t, rigOptions{
				slots:  slots,
				tiers:  []tiertest.MemoryOptions{{Local: true, BytesPerSec: 2000 * slotBytes}},
				config: func(c *Config) { c.LookupDeadline = time.Minute },
			}, func(t *testing.T, r *rig) {
				const lookups, chunks = 40, 6
				rnd := rand.New(rand.NewPCG(1, 1))
				var list []tiertest.Prefix
				for range lookups {
					p := prefix(rnd, chunks*ppc)
					for n := 0; n < chunks*ppc; {
						if n += 2 * ppc; slots == 4 { // no chunk is evicted before it is written
							n -= ppc
						}
						r.store(p, n)
						r.flush()
					}
					list = append(list, p)
				}
				r.clearArena()
				most := min(chunks, slots/2) * ppc // half of the slots may be promoted into
				for i, p := range list {
					r.ask(uint64(i), p, 0, chunks*ppc)
				}
				for i, p := range list {
					n, ok := r.answer(uint64(i), time.Minute)
					if !ok || n != most {
						t.Fatalf("lookup %d: %d pages, %v; want %d: %+v", i, n, ok, most,
							r.engine.Stats())
					}
					r.load(uint64(i), p, 0, n)
				}
			})
		})
	}
}

// When others hold all the room and release none, a lookup is not kept for its whole deadline.
func TestNoRoom(t *testing.T) {
	inBubble(t, rigOptions{slots: 8, tiers: []tiertest.MemoryOptions{{Local: true}}},
		func(t *testing.T, r *rig) {
			rnd := rand.New(rand.NewPCG(1, 1))
			a, b := prefix(rnd, 16), prefix(rnd, 32)
			r.store(a, 16)
			r.flush()
			r.clearArena()
			r.store(b, 32)
			r.flush()
			pin, n, err := r.engine.Pin(r.id, b.Digests(0, 32, 32))
			if err != nil || n != 32 {
				t.Fatal(n, err)
			}
			start := time.Now()
			if n := r.lookup(1, a, 0, 16); n != 0 {
				t.Errorf("%d pages", n)
			}
			if took := time.Since(start); took > 2*roomPatience {
				t.Errorf("answered after %v", took)
			}
			// Room that comes in time is used.
			go func() {
				time.Sleep(roomPatience / 2)
				if err := r.engine.Unpin(pin); err != nil {
					t.Error(err)
				}
			}()
			r.want(2, a, 0, 16, 16)
		})
}

// An owner that has leased all of its share waits for itself, and lets others pass.
func TestOthersPass(t *testing.T) {
	inBubble(t, rigOptions{
		slots: 32, tiers: []tiertest.MemoryOptions{{Local: true, BytesPerSec: 10000 * slotBytes}},
		engine: func(c *engine.Config) { c.OwnerShare = 0.25 },
	}, func(t *testing.T, r *rig) {
		rnd := rand.New(rand.NewPCG(1, 1))
		var list []tiertest.Prefix
		for range 8 {
			p := prefix(rnd, 16)
			r.store(p, 16)
			r.flush()
			list = append(list, p)
		}
		r.clearArena()
		for i := range uint64(2) { // 8 slots are the share
			if n := r.lookup(i, list[i], 0, 16); n != 16 {
				t.Fatalf("%d pages", n)
			}
		}
		for i := uint64(2); i < 7; i++ {
			r.ask(i, list[i], 0, 16, func(q *Query) { q.Recompute = 100 * time.Millisecond / 16 })
		}
		other := engine.Owner(3)
		if err := r.engine.AddOwner(other, r.id); err != nil {
			t.Fatal(err)
		}
		defer r.RemoveOwner(other)
		got := make(answer, 1)
		start := time.Now()
		q := Query{Owner: other, Lookup: 1, Space: r.id, Hashes: list[7].Digests(0, 16, 32)}
		if n, done, err := r.Lookup(&q, got); n != 0 || done || err != nil {
			t.Fatal(n, done, err)
		}
		if n := <-got; n != 16 || time.Since(start) > 10*time.Millisecond {
			t.Errorf("%d pages after %v", n, time.Since(start))
		}
		// What waits has room once the owner has loaded, as long as waiting is not longer than
		// computing.
		time.Sleep(40 * time.Millisecond)
		r.load(0, list[0], 0, 16)
		if n, ok := r.answer(2, 10*time.Millisecond); !ok || n != 16 {
			t.Errorf("%d pages, %v", n, ok)
		}
		for i := uint64(3); i < 7; i++ {
			if n, ok := r.answer(i, time.Second); !ok || n != 0 ||
				time.Since(start) > 110*time.Millisecond {
				t.Errorf("%d pages, %v, after %v", n, ok, time.Since(start))
			}
		}
	})
}

func TestPendingIsBounded(t *testing.T) {
	inBubble(t, rigOptions{
		tiers:  []tiertest.MemoryOptions{{Latency: 100 * time.Millisecond}},
		config: func(c *Config) { c.MaxPending, c.MaxPendingBytes = 10, 8*32*32+100 },
	}, func(t *testing.T, r *rig) {
		rnd := rand.New(rand.NewPCG(1, 1))
		later := 0
		for i := range uint64(100) {
			if _, done := r.ask(i, prefix(rnd, 4), 0, 4); !done {
				later++
			}
		}
		if later != 10 || r.LookupStats().Refused != 90 {
			t.Errorf("%d go on, %+v", later, r.LookupStats())
		}
		time.Sleep(10 * time.Second)
		later = 0
		for i := range uint64(20) {
			if _, done := r.ask(200+i, prefix(rnd, 32), 0, 32); !done {
				later++
			}
		}
		if later != 8 {
			t.Errorf("%d go on", later)
		}
		// However many are asked and cancelled while a tier sleeps, what is kept of them is
		// bounded.
		for i := range uint64(5000) {
			r.ask(1000+i, prefix(rnd, 4), 0, 4)
			_ = r.Cancel(scheduler, 1000+i)
		}
		r.Stack.mu.Lock()
		defer r.Stack.mu.Unlock()
		if n := len(r.Stack.tiers[0].seeks.list); n > 200 {
			t.Errorf("%d are queued", n)
		}
	})
}

func TestPrefetch(t *testing.T) {
	inBubble(t, rigOptions{
		slots: 512, tiers: []tiertest.MemoryOptions{{Local: true, BytesPerSec: 10000 * slotBytes},
			{Latency: time.Millisecond}},
		config: func(c *Config) { c.Promote = PromoteNever },
	}, func(t *testing.T, r *rig) {
		p := prefix(rand.New(rand.NewPCG(1, 1)), 1000)
		r.store(p, 802)
		r.flush()
		r.clearArena()
		if n, err := r.Prefetch(t.Context(), r.id, tenant.None, p.Digests(0, 1000, 32)); n != 802 ||
			err != nil {
			t.Fatalf("%d pages, %v", n, err)
		}
		r.has(arenaName, p, 1000, 802)
		r.want(1, p, 0, 1000, 802)
		if n, err := r.Prefetch(t.Context(), r.id, tenant.None, p.Digests(0, 1000, 32)); n != 802 ||
			err != nil {
			t.Fatalf("again: %d pages, %v", n, err)
		}
		r.clearArena()
		ctx, cancel := context.WithTimeoutCause(t.Context(), 10*time.Millisecond, errBroken)
		defer cancel()
		if n, err := r.Prefetch(ctx, r.id, tenant.None, p.Digests(0, 1000, 32)); n >= 802 ||
			!errors.Is(err, errBroken) {
			t.Errorf("%d pages, %v", n, err)
		}
		if _, err := r.Prefetch(t.Context(), 77, tenant.None, nil); !errors.Is(err,
			tiers.ErrNotFound) {
			t.Error(err)
		}
		if _, err := r.Prefetch(t.Context(), r.id, tenant.None, make([]byte, 33)); !errors.Is(err,
			tiers.ErrInvalid) {
			t.Error(err)
		}
	})
}

func TestMove(t *testing.T) {
	places := []string{arenaName, "t0", "t1"}
	for _, from := range places {
		for _, to := range places {
			for _, keep := range []bool{true, false} {
				if from == to {
					continue
				}
				t.Run(fmt.Sprintf("%s to %s, keep %v", from, to, keep), func(t *testing.T) {
					inBubble(t, rigOptions{slots: 256,
						tiers: []tiertest.MemoryOptions{{Local: true}, {Latency: time.Millisecond}},
						config: func(c *Config) {
							c.BounceBytes = 3 * slotBytes
							c.Tiers[0].Admit, c.Tiers[1].Admit = engine.AdmitNever,
								engine.AdmitNever
						}}, func(t *testing.T, r *rig) {
						p := prefix(rand.New(rand.NewPCG(1, 1)), 400)
						r.store(p, 350)
						if from != arenaName {
							if n, err := r.Move(t.Context(), r.id, p.Digests(0, 350, 32), arenaName,
								from, false); n != 350 || err != nil {
								t.Fatalf("%d pages, %v", n, err)
							}
							r.has(arenaName, p, 400, 0)
						}
						if n, err := r.Move(t.Context(), r.id, p.Digests(0, 400, 32), from, to,
							keep); n != 350 || err != nil {
							t.Fatalf("%d pages, %v", n, err)
						}
						left := 0
						if keep {
							left = 350
						}
						r.has(from, p, 400, left)
						r.has(to, p, 400, 350)
						for i, first := range []int{0, 128, 256} {
							if n := min(128, 350-first); first == 0 || keep || from != arenaName {
								r.want(uint64(i), p, first, first+n, n)
							}
						}
					})
				})
			}
		}
	}
	inBubble(t, rigOptions{tiers: []tiertest.MemoryOptions{{Local: true}}},
		func(t *testing.T, r *rig) {
			for from, to := range map[string]string{"t0": "t0", "t9": "t0", "t0 ": "arena",
				"arena": ""} {
				if _, err := r.Move(t.Context(), r.id, nil, from, to, true); !errors.Is(err,
					tiers.ErrInvalid) && !errors.Is(err, tiers.ErrNotFound) {
					t.Errorf("%q to %q: %v", from, to, err)
				}
			}
		})
}

func TestDropPrefix(t *testing.T) {
	o := rigOptions{tiers: []tiertest.MemoryOptions{{Local: true}, {Latency: 5 * time.Millisecond,
		BytesPerSec: 1000 * slotBytes}}}
	inBubble(t, o, func(t *testing.T, r *rig) {
		rng := rand.New(rand.NewPCG(1, 1))
		p := prefix(rng, 64)
		q := prefix(rng, 64, p[:32]...) // leaves p in the middle
		digests := func(p tiertest.Prefix, pages int) []byte {
			return p.Digests(0, pages,
				r.space.Geometry.DigestBytes)
		}
		names := []string{arenaName, "t0", "t1"}
		has := func(prefix tiertest.Prefix, pages int) {
			t.Helper()
			for _, name := range names {
				r.has(name, prefix, 64, pages)
			}
		}
		r.store(p, 64)
		r.store(q, 64)
		r.flush()
		has(p, 64)
		has(q, 64)
		out, err := r.Drop(t.Context(), r.id, digests(p, 64), 42, "t1")
		if err != nil || len(out) != 1 || out[0] != (Cleared{"t1", -1, nil}) {
			t.Fatalf("%+v, %v", out, err)
		}
		r.has("t1", p, 64, 40)
		r.has("t0", p, 64, 64)
		if out, err = r.Drop(t.Context(), r.id, digests(p, 64), 42, ""); err != nil ||
			len(out) != 3 || out[0] != (Cleared{arenaName, 6, nil}) {
			t.Fatalf("%+v, %v", out, err)
		}
		has(p, 40)
		has(q, 64)
		// What continues a prefix goes out of sight with it.
		if _, err = r.Drop(t.Context(), r.id, digests(p, 4), 0, ""); err != nil {
			t.Fatal(err)
		}
		has(p, 0)
		has(q, 0)
		for _, first := range []int{-1, 64} {
			if _, err := r.Drop(t.Context(), r.id, digests(p, 64), first, ""); !errors.Is(err,
				tiers.ErrInvalid) {
				t.Error(first, err)
			}
		}
		if _, err := r.Drop(t.Context(), r.id, digests(p, 64), 0, "t2"); !errors.Is(err,
			tiers.ErrNotFound) {
			t.Error(err)
		}
		// What is on its way down or up when it begins is gone when it has ended.
		for i := range 20 {
			q := prefix(rand.New(rand.NewPCG(uint64(i), 2)), 64)
			r.store(q, 32)
			time.Sleep(time.Duration(i) * time.Millisecond)
			r.ask(uint64(i), q, 0, 64)
			if out, err = r.Drop(t.Context(), r.id, digests(q, 64), 0, ""); err != nil ||
				len(out) != 3 || out[0].Err != nil || out[2].Err != nil {
				t.Fatalf("%+v, %v", out, err)
			}
			has(q, 0)
			time.Sleep(time.Second)
			has(q, 0)
		}
	})
}

// A space is cleared because its bytes are wrong from now on. What an earlier run has left must not
// come after that.
func TestClearWaitsForWhatIsRestored(t *testing.T) {
	var back chan struct{}
	o := rigOptions{tiers: []tiertest.MemoryOptions{{Local: true}}, config: func(c *Config) {
		back = make(chan struct{}) // of the bubble
		c.Restored = func(ctx context.Context) error {
			select {
			case <-back:
				return nil
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
	}}
	inBubble(t, o, func(t *testing.T, r *rig) {
		early, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		out, err := r.Clear(early, r.space.Fingerprint, "")
		if err != nil || len(out) != 2 || !errors.Is(out[0].Err, context.DeadlineExceeded) {
			t.Fatalf("cleared before all was there: %+v, %v", out, err)
		}
		p := prefix(rand.New(rand.NewPCG(1, 1)), 64)
		cleared := make(chan []Cleared)
		go func() {
			out, _ := r.Clear(t.Context(), r.space.Fingerprint, "")
			cleared <- out
		}()
		synctest.Wait()
		r.store(p, 64) // stands for what is restored
		close(back)
		if out := <-cleared; len(out) != 2 || errors.Join(out[0].Err, out[1].Err) != nil {
			t.Fatalf("%+v", out)
		}
		r.has(arenaName, p, 64, 0)
		r.has("t0", p, 64, 0)
	})
}

func TestClear(t *testing.T) {
	o := rigOptions{tiers: []tiertest.MemoryOptions{{Local: true}, {Latency: 5 * time.Millisecond,
		BytesPerSec: 1000 * slotBytes}}}
	inBubble(t, o, func(t *testing.T, r *rig) {
		p := prefix(rand.New(rand.NewPCG(1, 1)), 64)
		r.store(p, 64)
		r.flush()
		out, err := r.Clear(t.Context(), r.space.Fingerprint, "t1")
		if err != nil || len(out) != 1 || out[0] != (Cleared{"t1", 16, nil}) {
			t.Fatalf("%+v, %v", out, err)
		}
		r.has("t1", p, 64, 0)
		r.has("t0", p, 64, 64)
		if out, err = r.Clear(t.Context(), tiers.Fingerprint{1}, ""); err != nil || len(out) != 3 {
			t.Fatalf("%+v, %v", out, err)
		}
		r.has("t0", p, 64, 64)
		if _, err = r.Clear(t.Context(), tiers.Fingerprint{}, "t2"); !errors.Is(err,
			tiers.ErrNotFound) {
			t.Error(err)
		}
		// What is on its way down or up when it begins is gone when it has ended.
		for i := range 20 {
			q := prefix(rand.New(rand.NewPCG(uint64(i), 2)), 64)
			r.store(q, 32)
			time.Sleep(time.Duration(i) * time.Millisecond)
			r.ask(uint64(i), p, 0, 64)
			if out, err = r.Clear(t.Context(), tiers.Fingerprint{}, ""); err != nil ||
				len(out) != 3 || out[0].Tier != arenaName || out[2].Err != nil {
				t.Fatalf("%+v, %v", out, err)
			}
			for _, name := range []string{arenaName, "t0", "t1"} {
				r.has(name, p, 64, 0)
				r.has(name, q, 64, 0)
			}
			time.Sleep(time.Second)
			for _, name := range []string{arenaName, "t0", "t1"} {
				r.has(name, q, 64, 0)
			}
			r.store(p, 64)
			r.flush()
			r.clearArena()
		}
	})
	// One that does not get an answer says so, and lets storing go on.
	inBubble(t, o, func(t *testing.T, r *rig) {
		p := prefix(rand.New(rand.NewPCG(1, 1)), 64)
		r.mem[1].SetFault(func(ctx context.Context, op tiertest.Op,
			_ tiers.Run) error {
			return tiertest.Wait(ctx, time.Hour)
		})
		r.store(p, 64)
		synctest.Wait()
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, errBroken)
		defer cancel()
		out, err := r.Clear(ctx, r.space.Fingerprint, "")
		if err != nil || out[0].Err != nil || out[1].Err != nil ||
			!errors.Is(out[2].Err, errBroken) {
			t.Fatalf("%+v, %v", out, err)
		}
		r.mem[1].SetFault(nil)
		time.Sleep(2 * time.Minute) // for what is under way, twice, and the breaker
		r.store(p, 64)
		r.flush()
		r.has("t1", p, 64, 64)
	})
}

func TestFlush(t *testing.T) {
	inBubble(t, rigOptions{slots: 256,
		tiers: []tiertest.MemoryOptions{{BytesPerSec: 100 * slotBytes}}},
		func(t *testing.T, r *rig) {
			p := prefix(rand.New(rand.NewPCG(1, 1)), 402)
			r.store(p, 402)
			ctx, cancel := context.WithTimeoutCause(t.Context(), 100*time.Millisecond, errBroken)
			defer cancel()
			if err := r.Flush(ctx); !errors.Is(err, errBroken) {
				t.Error(err)
			}
			r.flush()
			r.has("t0", p, 402, 402)
			// A tier that is off is not waited for.
			r.mem[0].SetFault(func(context.Context, tiertest.Op,
				tiers.Run) error {
				return errBroken
			})
			for i := range 4 {
				r.store(prefix(rand.New(rand.NewPCG(uint64(i), 5)), 200), 200)
				time.Sleep(10 * time.Millisecond)
			}
			start := time.Now()
			if err := r.Flush(t.Context()); err == nil || time.Since(start) > time.Second {
				t.Errorf("%v after %v", err, time.Since(start))
			}
		})
}

// Flush writes partly filled chunks at once, however long they would wait otherwise.
func TestFlushDoesNotWaitForPartials(t *testing.T) {
	inBubble(t, rigOptions{tiers: []tiertest.MemoryOptions{{}},
		engine: func(c *engine.Config) { c.PartialDelay = time.Hour }},
		func(t *testing.T, r *rig) {
			p := prefix(rand.New(rand.NewPCG(1, 1)), 2*ppc+1)
			r.store(p, 2*ppc+1)
			start := time.Now()
			r.flush()
			if in := time.Since(start); in > time.Second {
				t.Errorf("it took %v", in)
			}
			r.has("t0", p, 2*ppc+1, 2*ppc+1)
		})
}

// upper is a tier that names its victims: all that it has beyond a number of chunks, the oldest
// first.
type upper struct {
	*tiertest.Memory
	mu    sync.Mutex
	order []tiers.Run // as they were stored
	out   map[uint64]tiers.Run
	next  uint64
	keep  int
	ready chan struct{}
	ended map[bool]int
}

func (u *upper) Store(ctx context.Context, list []tiers.Transfer, done func(int, error)) {
	u.Memory.Store(ctx, list, func(i int, err error) {
		if err == nil {
			run := list[i].Run
			run.Hashes, run.Prev = append([]byte(nil), run.Hashes...),
				append([]byte(nil), run.Prev...)
			u.mu.Lock()
			u.order = append(u.order, run)
			u.mu.Unlock()
			ring(u.ready)
		}
		done(i, err)
	})
}

func (u *upper) NextVictims(most int, out []tiers.Victim) []tiers.Victim {
	u.mu.Lock()
	defer u.mu.Unlock()
	for ; most > 0 && len(u.order) > u.keep; most-- {
		u.next++
		u.out[u.next] = u.order[0]
		out = append(out, tiers.Victim{Run: u.order[0], Handle: u.next})
		u.order = u.order[1:]
	}
	return out
}

func (u *upper) EndVictim(handle uint64, ok bool) {
	u.mu.Lock()
	run := u.out[handle]
	delete(u.out, handle)
	u.ended[ok]++
	u.mu.Unlock()
	if ok {
		if err := u.Drop(context.Background(), run); err != nil {
			panic(err)
		}
	}
}

func (u *upper) count() (kept, lost, out int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.ended[true], u.ended[false], len(u.out)
}

func (u *upper) VictimsReady() <-chan struct{} { return u.ready }

// What a tier is about to drop goes to the one below that admits what is evicted, through a small
// buffer, and is found there.
func TestVictims(t *testing.T) {
	u := &upper{out: map[uint64]tiers.Run{}, keep: 4, ended: map[bool]int{}}
	o := rigOptions{
		slots: 128, tiers: []tiertest.MemoryOptions{{Local: true}, {Latency: time.Millisecond}},
		wrap: func(i int, t tiers.Tier) tiers.Tier {
			if i > 0 {
				return t
			}
			u.Memory, u.ready = t.(*tiertest.Memory), make(chan struct{}, 1)
			return u
		},
		config: func(c *Config) {
			c.BounceBytes = 3*slotBytes + 100
			c.Tiers[1].Admit = engine.AdmitEvicted
			c.Tiers[0].StoreWorkers = 1 // they are stored in their order
		},
	}
	inBubble(t, o, func(t *testing.T, r *rig) {
		p := prefix(rand.New(rand.NewPCG(1, 1)), 200)
		r.store(p, 198)
		r.flush()
		time.Sleep(time.Second)
		r.has("t1", p, 200, 46*ppc)
		r.has("t0", p, 200, 0)
		st := r.Status()[1]
		if kept, lost, out := u.count(); st.Demoted != 46 || st.Stores != 46 || kept != 46 ||
			lost+out != 0 {
			t.Errorf("%+v, %d kept, %d lost, %d out", st, kept, lost, out)
		}
		r.clearArena()
		r.want(1, p, 0, 200, 198)
		// What is below already is not written again; what cannot be written is not dropped.
		r.flush()
		time.Sleep(time.Second)
		if st := r.Status()[1]; st.Stores > 50 || st.Demoted < 90 {
			t.Errorf("%+v", st)
		}
		r.mem[1].SetFault(func(context.Context, tiertest.Op, tiers.Run) error { return errBroken })
		q := prefix(rand.New(rand.NewPCG(2, 1)), 200)
		r.store(q, 40)
		r.flush()
		time.Sleep(10 * time.Second)
		if _, lost, out := u.count(); out != 0 || lost == 0 {
			t.Errorf("%d victims are out, %d lost", out, lost)
		}
		r.has("t0", q, 200, 40)
	})
}
