package stack

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/tiertest"
)

var errBroken = errors.New("broken")

// What was stored is found after the arena has forgotten it, in each kind of tier, whole and partly
// filled chunks alike.
func TestPromotes(t *testing.T) {
	for name, o := range map[string]tiertest.MemoryOptions{
		"local":  {Local: true},
		"remote": {Latency: time.Millisecond, BytesPerSec: 100 << 20},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, rigOptions{tiers: []tiertest.MemoryOptions{o}}, func(t *testing.T, r *rig) {
				p := prefix(rand.New(rand.NewPCG(1, 1)), 30)
				r.store(p, 22)
				r.flush()
				r.clearArena()
				r.want(1, p, 0, 30, 22)
				r.mu.Lock()
				if r.pending[1] != 22 {
					t.Errorf("%d pages were promised", r.pending[1])
				}
				r.mu.Unlock()
				r.want(2, p, 0, 30, 22) // in the arena by now
				if st := r.Status()[0]; st.Loads != 6 || st.LoadBytes != 22*pageBytes ||
					st.Stores != 6 {
					t.Errorf("%+v", st)
				}
				r.want(3, p, 8, 30, 14)
			})
		})
	}
}

// A promoted chunk is not written back to where it came from.
func TestNothingIsStoredTwice(t *testing.T) {
	inBubble(t, rigOptions{tiers: []tiertest.MemoryOptions{{Local: true}, {}}},
		func(t *testing.T, r *rig) {
			p := prefix(rand.New(rand.NewPCG(1, 1)), 16)
			r.store(p, 16)
			r.flush()
			for i := range uint64(3) {
				r.clearArena()
				r.want(i, p, 0, 16, 16)
				r.flush()
			}
			for _, st := range r.Status() {
				if st.Stores > 4+12 || st.Name == "t0" && st.Stores != 4 {
					t.Errorf("%s: %d stores", st.Name, st.Stores)
				}
			}
		})
}

func TestAnswersAtOnce(t *testing.T) {
	inBubble(t, rigOptions{tiers: []tiertest.MemoryOptions{{Local: true}}},
		func(t *testing.T, r *rig) {
			p := prefix(rand.New(rand.NewPCG(1, 1)), 64)
			r.store(p, 32)
			r.flush()
			for first, want := range map[int]int{0: 32, 5: 27, 31: 1} {
				if pages, done := r.ask(1, p, first, 64); !done || pages != want {
					t.Errorf("from page %d: %d, %v", first, pages, done)
				}
			}
			if pages, done := r.ask(1, prefix(rand.New(rand.NewPCG(2, 2)), 64), 0, 64); !done ||
				pages != 0 {
				t.Errorf("a miss: %d, %v", pages, done)
			}
			// A remote tier that is off is not waited for.
		})
	inBubble(t, rigOptions{tiers: []tiertest.MemoryOptions{{}},
		config: func(c *Config) { c.Promote = PromoteNever }}, func(t *testing.T, r *rig) {
		if pages, done := r.ask(1, prefix(rand.New(rand.NewPCG(2, 2)), 64), 0, 64); !done ||
			pages != 0 {
			t.Errorf("promote never: %d, %v", pages, done)
		}
	})
}

// The path of a lookup that the arena answers, or that no local tier can better, allocates nothing.
func TestLookupAllocatesNothing(t *testing.T) {
	none := &nothing{}
	r := newRig(t, rigOptions{tiers: []tiertest.MemoryOptions{{Local: true}},
		wrap: func(_ int, t tiers.Tier) tiers.Tier {
			none.Tier = t
			return none
		}})
	defer r.close()
	p := prefix(rand.New(rand.NewPCG(1, 1)), 64)
	r.store(p, 64)
	r.flush() // what is stored goes to the tier in the background
	hit := Query{Owner: scheduler, Lookup: 1, Space: r.id, Hashes: p.Digests(0, 64, 32)}
	if n := testing.AllocsPerRun(200, func() {
		if pages, done, err := r.Lookup(&hit, r); pages != 64 || !done || err != nil {
			panic("no hit")
		}
	}); n != 0 {
		t.Errorf("a hit: %v allocations", n)
	}
	miss := Query{Owner: scheduler, Lookup: 1, Space: r.id,
		Hashes: prefix(rand.New(rand.NewPCG(3, 1)), 64).Digests(0, 64, 32)}
	if n := testing.AllocsPerRun(200, func() {
		if pages, done, err := r.Lookup(&miss, r); pages != 0 || !done || err != nil {
			panic("no miss")
		}
	}); n != 0 {
		t.Errorf("a miss: %v allocations", n)
	}
	if none.asked.Load() == 0 {
		t.Error("the tier was not asked")
	}
}

// nothing is a local tier that reports that it holds nothing.
type nothing struct {
	tiers.Tier
	asked atomic.Int64
}

func (n *nothing) Contains(context.Context, tiers.Run,
	[]uint16) error {
	n.asked.Add(1)
	return nil
}

// Lookups that want the same chunks share their loads.
func TestLoadsAreShared(t *testing.T) {
	for name, o := range map[string]tiertest.MemoryOptions{
		"local":  {Local: true, Latency: 0, BytesPerSec: 1 << 20},
		"remote": {Latency: 5 * time.Millisecond, BytesPerSec: 1 << 20},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, rigOptions{tiers: []tiertest.MemoryOptions{o}}, func(t *testing.T, r *rig) {
				rnd := rand.New(rand.NewPCG(1, 1))
				a := prefix(rnd, 32)
				b := prefix(rnd, 32, a[:16]...)
				r.store(a, 32)
				r.store(b, 32)
				r.flush()
				r.clearArena()
				for i := range uint64(10) {
					r.ask(2*i, a, 0, 32)
					r.ask(2*i+1, b, 0, 32)
				}
				for i := range uint64(20) {
					if n, ok := r.answer(i, time.Minute); !ok || n != 32 {
						t.Fatalf("lookup %d: %d, %v", i, n, ok)
					}
					p := a
					if i%2 == 1 {
						p = b
					}
					r.load(i, p, 0, 32)
				}
				if st := r.Status()[0]; st.Loads != 12 {
					t.Errorf("%d loads of 12 chunks", st.Loads)
				}
			})
		})
	}
}

// What one tier fails to give comes from the next, whether it had been asked or not.
func TestNextTierIsTried(t *testing.T) {
	for name, fault := range map[string]error{"fails": errBroken, "corrupt": tiers.ErrCorrupt,
		"forgot": tiers.ErrNotFound} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, rigOptions{tiers: []tiertest.MemoryOptions{{Local: true}, {}}},
				func(t *testing.T, r *rig) {
					p := prefix(rand.New(rand.NewPCG(1, 1)), 32)
					r.store(p, 32)
					r.flush()
					r.clearArena()
					r.mem[0].SetFault(func(_ context.Context, op tiertest.Op, run tiers.Run) error {
						if op == tiertest.Load && run.First%8 == 0 {
							return fault
						}
						return nil
					})
					r.want(1, p, 0, 32, 32)
					if a, b := r.Status()[0].Loads, r.Status()[1].Loads; a != 4 || b != 4 {
						t.Errorf("%d and %d loads", a, b)
					}
				})
		})
	}
}

// A chunk that cannot be loaded ends the hit before it, and what comes after is released.
func TestHitEndsBeforeFailure(t *testing.T) {
	inBubble(t, rigOptions{tiers: []tiertest.MemoryOptions{{Local: true, BytesPerSec: 1 << 20}},
		config: func(c *Config) { c.Tiers[0].Batch = 2 }}, func(t *testing.T, r *rig) {
		p := prefix(rand.New(rand.NewPCG(1, 1)), 64)
		r.store(p, 64)
		r.flush()
		r.clearArena()
		r.mem[0].SetFault(func(_ context.Context, op tiertest.Op, run tiers.Run) error {
			if op == tiertest.Load && run.First == 20 {
				return tiers.ErrCorrupt
			}
			return nil
		})
		r.want(1, p, 0, 64, 20)
		r.mem[0].SetFault(nil)
		r.want(2, p, 0, 64, 20) // it was dropped
		r.store(p, 64)
		r.want(3, p, 0, 64, 64)
	})
}

func TestHolesBetweenTiers(t *testing.T) {
	inBubble(t, rigOptions{tiers: []tiertest.MemoryOptions{{Local: true},
		{Latency: time.Millisecond}}}, func(t *testing.T, r *rig) {
		p := prefix(rand.New(rand.NewPCG(1, 1)), 40)
		r.store(p, 38)
		r.flush()
		// Chunk i is in: the arena, tier 0, tier 1, or several.
		drop := func(where string, chunks ...int) {
			for _, c := range chunks {
				run := p.Run(r.space, c*ppc, min((c+1)*ppc, 38))
				if where == arenaName {
					if _, err := r.engine.Drop(r.id, run.First, run.Hashes); err != nil {
						t.Fatal(err)
					}
				} else if err := r.mem[where[1]-'0'].Drop(t.Context(), run); err != nil {
					t.Fatal(err)
				}
			}
		}
		drop(arenaName, 1, 2, 4, 5, 7, 9)
		drop("t0", 2, 3, 5, 6, 9)
		drop("t1", 1, 3, 4, 6)
		r.want(1, p, 0, 40, 38)
		drop(arenaName, 3)
		r.want(2, p, 0, 40, 12)
	})
}

// At the deadline the answer is what is ready, and it is a prefix.
func TestDeadline(t *testing.T) {
	inBubble(t, rigOptions{tiers: []tiertest.MemoryOptions{{Local: true,
		BytesPerSec: 100 * slotBytes}}}, func(t *testing.T, r *rig) {
		p := prefix(rand.New(rand.NewPCG(1, 1)), 128)
		r.store(p, 128)
		r.flush()
		r.clearArena()
		start := time.Now()
		// 32 chunks take 160 ms by two workers
		n := r.lookup(1, p, 0, 128, func(q *Query) { q.Deadline = 155 * time.Millisecond })
		if took := time.Since(start); took < 155*time.Millisecond || took > 160*time.Millisecond {
			t.Errorf("answered after %v", took)
		}
		if n < 15*ppc || n >= 128 || n%ppc != 0 {
			t.Errorf("%d pages", n)
		}
		r.load(1, p, 0, n)
		if st := r.LookupStats(); st.Late != 1 {
			t.Errorf("%+v", st)
		}
	})
	// A tier that does not return in time counts as empty.
	inBubble(t, rigOptions{tiers: []tiertest.MemoryOptions{{Local: true}, {Latency: time.Hour}}},
		func(t *testing.T, r *rig) {
			p := prefix(rand.New(rand.NewPCG(1, 1)), 32)
			r.store(p, 16)
			synctest.Wait()
			start := time.Now()
			if n := r.lookup(1, p, 0, 32,
				func(q *Query) { q.Deadline = 50 * time.Millisecond }); n != 16 ||
				time.Since(start) > 51*time.Millisecond {
				t.Errorf("%d pages after %v", n, time.Since(start))
			}
			start = time.Now()
			if n := r.lookup(2, p, 0, 32); n != 16 || time.Since(start) > 501*time.Millisecond {
				t.Errorf("%d pages after %v", n, time.Since(start))
			}
		})
}

// A lookup may be cancelled, trimmed or lose its owner at any moment.
func TestEndsInEveryPhase(t *testing.T) {
	for _, end := range []string{"cancel", "trim", "repeat", "owner", "close"} {
		t.Run(end, func(t *testing.T) {
			for step := range 40 {
				// 0.5 ms each: seeking takes 3 ms, loading 8 chunks of 2 ms by two workers
				inBubble(t, rigOptions{
					tiers: []tiertest.MemoryOptions{{Latency: 3 * time.Millisecond,
						BytesPerSec: 500 * slotBytes}},
					config: func(c *Config) { c.Tiers[0].Batch = 1 },
				}, func(t *testing.T, r *rig) {
					p := prefix(rand.New(rand.NewPCG(1, 1)), 40)
					r.store(p, 40)
					r.flush()
					q := p.Run(r.space, 8, 40)
					if _, err := r.engine.Drop(r.id, 8, q.Hashes); err != nil {
						t.Fatal(err)
					}
					if n, done := r.ask(1, p, 0, 40); n != 8 || done {
						t.Fatalf("%d, %v", n, done)
					}
					time.Sleep(time.Duration(step) * 500 * time.Microsecond)
					_, over := r.answer(1, 0)
					switch end {
					case "cancel":
						if err := r.Cancel(scheduler, 1); err != nil {
							t.Fatal(err)
						}
					case "trim":
						if err := r.Trim(scheduler, 1, 20); err != nil {
							t.Fatal(err)
						}
						if n, ok := r.answer(1, time.Minute); !ok || n != 40 {
							t.Fatalf("step %d: %d, %v", step, n, ok)
						}
						r.load(1, p, 20, 20)
						return
					case "repeat":
						r.mu.Lock()
						delete(r.answers, 1)
						delete(r.pending, 1)
						r.mu.Unlock()
						r.want(1, p, 0, 40, 40)
						return
					case "owner":
						r.RemoveOwner(scheduler)
					case "close":
						r.Stack.Close()
						if n, done := r.ask(2, p, 0, 40); n < 8 || !done {
							t.Fatalf("%d, %v", n, done)
						}
					}
					if err := r.engine.Check(); err != nil {
						t.Fatal(err)
					}
					time.Sleep(time.Second)
					if _, ok := r.answer(1, 0); ok != over {
						t.Fatal("it was answered all the same")
					}
				})
			}
		})
	}
}

// Trimming all of a lookup ends it, and what no lookup waits for is not loaded.
func TestTrimStopsLoads(t *testing.T) {
	inBubble(t, rigOptions{
		tiers:  []tiertest.MemoryOptions{{Local: true, BytesPerSec: 100 * slotBytes}},
		config: func(c *Config) { c.Tiers[0].Batch, c.Tiers[0].LoadWorkers = 1, 1 },
	}, func(t *testing.T, r *rig) {
		p := prefix(rand.New(rand.NewPCG(1, 1)), 64)
		r.store(p, 64)
		r.flush()
		r.clearArena()
		r.ask(1, p, 0, 64)
		time.Sleep(15 * time.Millisecond) // the second of 16 chunks is being loaded
		if err := r.Trim(scheduler, 1, 50); err != nil {
			t.Fatal(err)
		}
		if n, ok := r.answer(1, time.Minute); !ok || n != 64 {
			t.Fatalf("%d, %v", n, ok)
		}
		r.load(1, p, 50, 14)
		if n := r.Status()[0].Loads; n != 2+4 {
			t.Errorf("%d loads", n)
		}
		r.clearArena()
		r.ask(2, p, 0, 64)
		if err := r.Trim(scheduler, 2, 64); err != nil {
			t.Fatal(err)
		}
		if n, ok := r.answer(2, time.Second); !ok || n != 0 {
			t.Fatalf("%d, %v", n, ok)
		}
	})
}

// A tier that fails is off, reports that, is not asked, is tried again, and comes back.
func TestBreaker(t *testing.T) {
	inBubble(t, rigOptions{tiers: []tiertest.MemoryOptions{{Latency: time.Millisecond}}},
		func(t *testing.T, r *rig) {
			rnd := rand.New(rand.NewPCG(1, 1))
			p := prefix(rnd, 32)
			r.store(p, 32)
			r.flush()
			r.clearArena()
			var calls atomic.Int64
			r.mem[0].SetFault(func(context.Context, tiertest.Op,
				tiers.Run) error {
				calls.Add(1)
				return errBroken
			})
			for i := range uint64(20) {
				r.want(i, p, 0, 32, 0)
			}
			st := r.Status()[0]
			if calls.Load() != 3 || st.Breaker != "open" || st.Opened != 1 ||
				st.LookupFailures != 3 ||
				st.LastError != errBroken.Error() {
				t.Fatalf("%d calls: %+v", calls.Load(), st)
			}
			if _, done := r.ask(100, p, 0, 32); !done {
				t.Error("it is asked though it is off")
			}
			// What is stored meanwhile waits.
			q := prefix(rnd, 32)
			r.store(q, 32)
			time.Sleep(900 * time.Millisecond)
			if calls.Load() != 3 || r.Status()[0].StoreQueue != 8 {
				t.Errorf("%d calls, %+v", calls.Load(), r.Status()[0])
			}
			// One call a pause, which doubles.
			time.Sleep(10 * time.Second)
			if n := calls.Load(); n < 3+2 || n > 3+100 {
				t.Errorf("%d calls", n)
			}
			r.mem[0].SetFault(nil)
			time.Sleep(time.Minute)
			if st := r.Status()[0]; st.Breaker != "closed" || st.StoreQueue != 0 {
				t.Fatalf("%+v", st)
			}
			r.clearArena()
			r.want(200, p, 0, 32, 32)
			r.want(201, q, 0, 32, r.lookup(202, q, 0, 32))
		})
}

// Loads that come too late turn a tier off too; the lookups are answered by their deadline at the
// latest.
func TestSlowTier(t *testing.T) {
	inBubble(t, rigOptions{tiers: []tiertest.MemoryOptions{{Local: true}},
		config: func(c *Config) { c.Tiers[0].LoadTimeout = 200 * time.Millisecond }},
		func(t *testing.T, r *rig) {
			p := prefix(rand.New(rand.NewPCG(1, 1)), 128)
			r.store(p, 128)
			r.flush()
			r.clearArena()
			r.mem[0].SetFault(func(ctx context.Context, op tiertest.Op, _ tiers.Run) error {
				if op == tiertest.Load {
					return tiertest.Wait(ctx, time.Hour)
				}
				return nil
			})
			for i := range uint64(20) {
				start := time.Now()
				r.want(i, p, 0, 128, 0)
				if took := time.Since(start); took > 3*time.Second {
					t.Errorf("answered after %v", took)
				}
			}
			synctest.Wait() // the last call has ended
			if st := r.Status()[0]; st.Breaker != "open" || st.Late == 0 {
				t.Errorf("%+v", st)
			}
			r.mem[0].SetFault(nil)
			time.Sleep(3 * time.Second)
			r.want(100, p, 0, 128, 128)
			synctest.Wait()
			if st := r.Status()[0]; st.Breaker != "closed" {
				t.Errorf("%+v", st)
			}
		})
}

// A hit is cut where computing it would be faster than waiting for it.
func TestLoadOrRecompute(t *testing.T) {
	// two workers: 1 ms a chunk
	o := rigOptions{slots: 256,
		tiers: []tiertest.MemoryOptions{{Local: true, BytesPerSec: 1000 * slotBytes / 2}}}
	recompute := func(perChunk time.Duration) func(*Query) {
		return func(q *Query) { q.Recompute = perChunk / ppc }
	}
	inBubble(t, o, func(t *testing.T, r *rig) {
		rnd := rand.New(rand.NewPCG(1, 1))
		p := prefix(rnd, 160)
		r.store(p, 160)
		r.flush()
		r.clearArena()
		// Nothing is known yet: all is promoted.
		if n := r.lookup(1, p, 0, 160, recompute(time.Microsecond)); n != 160 {
			t.Fatalf("%d pages", n)
		}
		r.load(1, p, 0, 160)
		synctest.Wait() // the last call has ended
		st := r.Status()[0]
		if rate := st.BytesPerSecond / slotBytes; rate < 700 || rate > 1400 {
			t.Errorf("%v chunks/s", rate)
		}
		r.clearArena()
		if n, done := r.ask(2, p, 0, 160, recompute(500*time.Microsecond)); !done || n != 0 {
			t.Errorf("slower than computing, and %d, %v", n, done)
		}
		if n := r.lookup(3, p, 0, 160, recompute(3*time.Millisecond)); n != 160 {
			t.Errorf("faster than computing, and %d", n)
		}
		if st := r.LookupStats(); st.Cut == 0 {
			t.Errorf("%+v", st)
		}
		// What is ahead in the queue counts.
		r.clearArena()
		q := prefix(rnd, 160)
		r.store(q, 160)
		r.flush()
		r.clearArena()
		r.ask(4, p, 0, 160, recompute(time.Hour))
		time.Sleep(time.Millisecond)
		if n, done := r.ask(5, q, 0, 16, recompute(3*time.Millisecond)); !done || n != 0 {
			t.Errorf("behind 40 chunks: %d, %v", n, done)
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		if eta := r.etas[4]; eta < 25*time.Millisecond || eta > 60*time.Millisecond {
			t.Errorf("eta %v", eta)
		}
	})
	// A tier that looks slow is measured again now and then, and used once it is fast.
	inBubble(t, o, func(t *testing.T, r *rig) {
		p := prefix(rand.New(rand.NewPCG(1, 1)), 160)
		r.store(p, 160)
		r.flush()
		r.clearArena()
		r.mem[0].SetFault(func(ctx context.Context, op tiertest.Op, _ tiers.Run) error {
			if op == tiertest.Load {
				return tiertest.Wait(ctx, 20*time.Millisecond)
			}
			return nil
		})
		r.lookup(1, p, 0, 160)
		r.mem[0].SetFault(nil)
		for i := uint64(2); ; i++ {
			r.clearArena()
			if n := r.lookup(i, p, 0, 160, recompute(5*time.Millisecond)); n > ppc {
				break
			}
			if i > 60 {
				t.Fatalf("it still looks slow: %+v", r.Status()[0])
			}
			time.Sleep(time.Second)
		}
	})
	o.config = func(c *Config) { c.Promote = PromoteAlways }
	inBubble(t, o, func(t *testing.T, r *rig) {
		p := prefix(rand.New(rand.NewPCG(1, 1)), 160)
		r.store(p, 160)
		r.flush()
		for i := range uint64(3) {
			r.clearArena()
			if n := r.lookup(i, p, 0, 160, recompute(time.Microsecond)); n != 160 {
				t.Fatalf("%d pages", n)
			}
		}
	})
}

// TestLongLookupsTakeTurns: owners with long lookups take turns, one that asks for many at once
// makes no other wait for all of them, and a short one does not wait at all.
func TestLongLookupsTakeTurns(t *testing.T) {
	const other = engine.Owner(3)
	inBubble(t, rigOptions{slots: 64, config: func(c *Config) { c.LongChunks = 2 }},
		func(t *testing.T, r *rig) {
			if err := r.engine.AddOwner(other, r.id); err != nil {
				t.Fatal(err)
			}
			defer r.RemoveOwner(other)
			p := make(tiertest.Prefix, 40)
			if r.store(p, len(p)) != len(p) {
				t.Fatal("shed")
			}
			order := &order{}
			ask := func(o engine.Owner, lookup uint64, n int) (pages int, done bool) {
				pages, done, err := r.Lookup(&Query{Owner: o, Lookup: lookup, Space: r.id,
					Hashes: p.Digests(0, n, 32)}, order)
				if err != nil {
					t.Fatal(err)
				}
				return pages, done
			}
			r.callers.Add(1) // the walker waits for callers
			for i := range uint64(4) {
				if pages, done := ask(scheduler, 10+i, len(p)); done || pages != 2*ppc {
					t.Fatalf("lookup %d: %d pages at once, done %v", i, pages, done)
				}
			}
			if _, done := ask(other, 20, len(p)); done {
				t.Fatal("the other's is done")
			}
			for i := range uint64(3) {
				if pages, done := ask(other, 30+i, 2*ppc); !done || pages != 2*ppc {
					t.Fatalf("a short one has %d pages, done %v", pages, done)
				}
			}
			r.callers.Add(-1)
			synctest.Wait()
			answers := order.take()
			var got []uint64
			for _, a := range answers {
				if got = append(got, a.Lookup); a.Pages != len(p) {
					t.Errorf("lookup %d has %d pages", a.Lookup, a.Pages)
				}
			}
			if at := slices.Index(got, 20); len(got) != 5 || at < 0 || at > 2 {
				t.Errorf("the other's turn came late: %v", got)
			}
			if got = slices.DeleteFunc(got,
				func(l uint64) bool { return l == 20 }); !slices.IsSorted(
				got) {
				t.Errorf("out of order: %v", got)
			}
			for _, l := range append(got, 30, 31, 32, 20) {
				_ = r.Cancel(scheduler, l)
				_ = r.Cancel(other, l)
			}
		})
}

// TestLongLookupsAreBounded: an owner's long lookups take a part of the memory that there is for
// lookups under way. One more is answered with its first part.
func TestLongLookupsAreBounded(t *testing.T) {
	inBubble(t, rigOptions{slots: 64, config: func(c *Config) {
		c.LongChunks, c.MaxPendingBytes = 2,
			8*3000
	}}, func(t *testing.T, r *rig) {
		p := make(tiertest.Prefix, 40) // 1,280 bytes of digests
		r.store(p, len(p))
		r.callers.Add(1)
		for i, want := range []bool{false, false, true} {
			if pages, done := r.ask(uint64(i), p, 0, len(p)); done != want || pages != 2*ppc {
				t.Errorf("lookup %d: %d pages, done %v", i, pages, done)
			}
		}
		r.callers.Add(-1)
		for i := range uint64(2) {
			if pages, ok := r.answer(i, time.Minute); !ok || pages != len(p) {
				t.Errorf("lookup %d has %d pages", i, pages)
			}
		}
		if n := r.lookup(5, p, 0, len(p)); n != len(p) {
			t.Errorf("%d pages when there is room again", n)
		}
		for i := range uint64(6) {
			_ = r.Cancel(scheduler, i)
		}
	})
}

// order notes answers as they come.
type order struct {
	mu      sync.Mutex
	answers []Answer
}

func (o *order) LookupPending(engine.Owner, uint64, int, time.Duration) {}

func (o *order) LookupAnswered(a Answer) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.answers = append(o.answers, a)
}

func (o *order) take() []Answer {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.answers)
}
