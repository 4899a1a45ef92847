package stack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/zeebo/xxh3"

	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/tenant"
	"lookaside/tiers/tiertest"
)

// medium is what a rig's arena was restored from: it knows the pages' checksums, and verifies with
// them what is in the arena.
type medium struct {
	*rig
	next     int               // slot
	sums     map[string]uint64 // by digest
	took     time.Duration     // that a chunk takes
	hook     func(v *engine.Verification)
	forgot   atomic.Int32
	failWith error // of forget

	mu     sync.Mutex
	calls  map[uint64]int // by handle
	active map[uint64]bool
	order  []int // first pages, as they were verified
}

func newMedium(r *rig) *medium {
	return &medium{rig: r, sums: map[string]uint64{}, calls: map[uint64]int{},
		active: map[uint64]bool{}}
}

// add restores the chunks of pages [from, to) of a prefix for which keep says so, as far as there
// are slots. from is where a chunk begins.
func (m *medium) add(p tiertest.Prefix, from, to int, keep func(chunk int) bool) {
	m.t.Helper()
	var list []engine.Restored
	for first := from; first < to && m.next < len(m.arena)/slotBytes; first += ppc {
		if keep != nil && !keep(first/ppc) {
			continue
		}
		run := p.Run(m.space, first, min(first+ppc, to))
		mem := m.arena[m.next*slotBytes:]
		tiertest.FillRun(mem, run)
		for i := range run.Pages() {
			m.sums[string(run.Hashes[32*i:32*i+32])] = xxh3.Hash(mem[i*pageBytes : (i+1)*pageBytes])
		}
		list = append(list, engine.Restored{
			Slot: uint32(m.next), Space: m.id, First: first, Pages: run.Pages(), Prev: run.Prev,
			Hashes: run.Hashes, Order: uint64(m.next), Unverified: true,
		})
		m.next++
	}
	if err := m.engine.Restore(7, list); err != nil {
		m.t.Fatal(err)
	}
}

// rot changes a byte of a slot.
func (m *medium) rot(slot int) { m.arena[slot*slotBytes+slot%pageBytes]++ }

func (m *medium) verify(ctx context.Context, list []engine.Verification) {
	for i := range list {
		v := &list[i]
		m.mu.Lock()
		if m.active[v.Handle] {
			m.t.Errorf("%+v is verified twice at once", *v)
		}
		m.active[v.Handle] = true
		m.calls[v.Handle]++
		m.order = append(m.order, v.First)
		m.mu.Unlock()
		if m.hook != nil {
			m.hook(v)
		}
		if m.took > 0 && tiertest.Wait(ctx, m.took) != nil {
			return
		}
		good := true
		for i := range v.Pages {
			at := int(v.Offset) + i*pageBytes
			good = good && xxh3.Hash(m.arena[at:at+pageBytes]) == m.sums[string(
				v.Hashes[32*i:32*i+32])]
		}
		m.mu.Lock()
		delete(m.active, v.Handle)
		m.mu.Unlock()
		m.engine.EndVerify(v.Handle, good)
	}
}

func (m *medium) forget() error {
	m.forgot.Add(1)
	return m.failWith
}

// most is how often a chunk was verified at most.
func (m *medium) most() (most int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, n := range m.calls {
		most = max(most, n)
	}
	return most
}

// keepIn stores pages [0, n) of a prefix in a tier.
func (r *rig) keepIn(tier int, p tiertest.Prefix, n int) {
	r.t.Helper()
	run := p.Run(r.space, 0, n)
	var list []tiers.Transfer
	for i := range run.Chunks() {
		part := run.Chunk(i)
		mem := make([]byte, part.Pages()*pageBytes)
		tiertest.FillRun(mem, part)
		list = append(list, tiers.Transfer{Run: part, Bytes: mem})
	}
	r.mem[tier].Store(r.t.Context(), list, func(_ int, err error) {
		if err != nil {
			r.t.Error(err)
		}
	})
}

var verifyRigs = []struct {
	name string
	o    rigOptions
}{
	{"no tier", rigOptions{}},
	{"never", rigOptions{tiers: []tiertest.MemoryOptions{{Local: true}},
		config: func(c *Config) { c.Promote = PromoteNever }}},
	{"local", rigOptions{tiers: []tiertest.MemoryOptions{{Local: true}}}},
	{"remote", rigOptions{tiers: []tiertest.MemoryOptions{{Latency: time.Millisecond}}}},
}

// A hit on restored chunks waits until they are verified, near ones first, and is answered at once
// from then on. One that is corrupt ends it.
func TestVerifies(t *testing.T) {
	for _, c := range verifyRigs {
		for _, rotten := range []int{-1, 0, 5, 11} {
			t.Run(fmt.Sprintf("%s/%d", c.name, rotten), func(t *testing.T) {
				p := prefix(rand.New(rand.NewPCG(1, 1)), 46)
				o := c.o
				o.restore = func(m *medium) {
					m.took = time.Millisecond
					if m.add(p, 0, 46, nil); rotten >= 0 {
						m.rot(rotten)
					}
				}
				inBubble(t, o, func(t *testing.T, r *rig) {
					want, chunks := 46, uint64(12)
					if rotten >= 0 {
						want, chunks = rotten*ppc, 11
					}
					if n, done := r.ask(1, p, 0, 46); done || n != 0 {
						t.Fatal(n, done)
					}
					n, ok := r.answer(1, time.Minute)
					if !ok || n != want {
						t.Fatalf("%d pages, %v; want %d", n, ok, want)
					}
					r.mu.Lock()
					promised := r.pending[1]
					r.mu.Unlock()
					if promised != 46 {
						t.Errorf("%d pages were promised", promised)
					}
					r.load(1, p, 0, n)
					if st := r.engine.Stats(); st.Verified != chunks ||
						st.VerifyFailed != 12-chunks || st.Bad != 12-chunks || st.Unverified != 0 {
						t.Errorf("%+v", st)
					}
					if !slices.IsSorted(r.medium.order) || len(r.medium.order) != 12 ||
						r.medium.most() != 1 {
						t.Errorf("verified in the order %v", r.medium.order)
					}
					if n := r.LookupStats().Verified; n != 1 {
						t.Errorf("%d lookups waited", n)
					}
					if n, done := r.ask(2, p, 0, want); want > 0 && (!done || n != want) {
						t.Fatal(n, done)
					}
					behind := 46 - 13
					if want > 13 {
						behind = want - 13
					}
					r.want(3, p, 13, 46, behind)
				})
			})
		}
	}
}

// What a tier has goes on behind a restored chunk that was dropped, and behind it what was verified
// is not loaded again.
func TestTiersGoOnBehindCorruptChunk(t *testing.T) {
	for _, mo := range []tiertest.MemoryOptions{{Local: true}, {Latency: time.Millisecond}} {
		p := prefix(rand.New(rand.NewPCG(1, 2)), 38)
		inBubble(t, rigOptions{tiers: []tiertest.MemoryOptions{mo}, restore: func(m *medium) {
			m.add(p, 0, 30, func(chunk int) bool { return chunk != 4 })
			m.rot(2)
		}}, func(t *testing.T, r *rig) {
			r.keepIn(0, p, 38)
			r.want(1, p, 0, 38, 38)
			if st := r.Status()[0]; st.Loads != 5 {
				// chunks 2 and 4, 7, of which two pages were restored, and the two behind
				t.Errorf("%d chunks were loaded", st.Loads)
			}
			r.want(2, p, 0, 38, 38)
		})
	}
}

// At its deadline a lookup is answered with what is verified.
func TestDeadlineWhileVerifying(t *testing.T) {
	for _, c := range verifyRigs {
		t.Run(c.name, func(t *testing.T) {
			p := prefix(rand.New(rand.NewPCG(1, 3)), 60*ppc)
			o := c.o
			o.restore = func(m *medium) {
				m.took = 10 * time.Millisecond
				m.add(p, 0, len(p), nil)
			}
			inBubble(t, o, func(t *testing.T, r *rig) {
				start := time.Now()
				n := r.lookup(1, p, 0, len(p),
					func(q *Query) { q.Deadline = 205 * time.Millisecond })
				if took := time.Since(start); n != 20*ppc || took < 200*time.Millisecond ||
					took > 220*time.Millisecond || r.LookupStats().Late != 1 {
					t.Fatalf("%d pages after %v: %+v", n, took, r.LookupStats())
				}
				r.load(1, p, 0, n)
				if n, ok := r.medium.most(), r.lookup(2, p, 0, len(p)) == len(p); !ok || n != 1 {
					t.Fatal(n, ok)
				}
			})
		})
	}
}

// Askers of lookups that are being verified hear of it often enough to wait.
func TestRemindsWhileVerifying(t *testing.T) {
	p := prefix(rand.New(rand.NewPCG(1, 3)), 4)
	inBubble(t, rigOptions{restore: func(m *medium) {
		m.took = time.Second // one slow chunk
		m.add(p, 0, 4, nil)
	}}, func(t *testing.T, r *rig) {
		told, before := 0, time.Now()
		listen := &listener{rig: r, pending: func() {
			if gap := time.Since(before); gap > 100*time.Millisecond {
				t.Errorf("told nothing for %v", gap)
			}
			told, before = told+1, time.Now()
		}}
		q := Query{Owner: scheduler, Lookup: 1, Space: r.id, Hashes: p.Digests(0, 4, 32)}
		if n, done, err := r.Lookup(&q, listen); n != 0 || done || err != nil {
			t.Fatal(n, done, err)
		}
		if n, ok := r.answer(1, time.Minute); !ok || n != 4 || told < 10 {
			t.Fatal(n, ok, told)
		}
	})
}

// listener is an Asker that hears of each promise.
type listener struct {
	*rig
	pending func()
}

func (l *listener) LookupPending(o engine.Owner, lookup uint64, pages int, eta time.Duration) {
	l.rig.LookupPending(o, lookup, pages, eta)
	l.pending()
}

// Lookups of the same chunks share their verification.
func TestVerifiesOnce(t *testing.T) {
	p := prefix(rand.New(rand.NewPCG(1, 4)), 120)
	inBubble(t, rigOptions{restore: func(m *medium) {
		m.took = time.Millisecond
		m.add(p, 0, 120, nil)
	}}, func(t *testing.T, r *rig) {
		for id := range uint64(8) {
			r.ask(id, p, 0, 120-7*int(id))
		}
		for id := range uint64(8) {
			if n, ok := r.answer(id, time.Minute); !ok || n != 120-7*int(id) {
				t.Fatalf("lookup %d: %d pages, %v", id, n, ok)
			}
			r.load(id, p, 0, 120-7*int(id))
		}
		if n := r.medium.most(); n != 1 {
			t.Errorf("a chunk was verified %d times", n)
		}
	})
}

// A lookup whose chunks are being verified may be trimmed, cancelled, repeated or lose its owner,
// what it waits for may be cleared, and the Stack may be closed.
func TestEndsWhileVerifying(t *testing.T) {
	const chunks = 40
	p := prefix(rand.New(rand.NewPCG(1, 5)), chunks*ppc)
	for _, c := range verifyRigs {
		for name, do := range map[string]func(t *testing.T, r *rig, release func()){
			"cancel": func(t *testing.T, r *rig, release func()) {
				if err := r.Cancel(scheduler, 1); err != nil && !errors.Is(err, tiers.ErrNotFound) {
					t.Error(err)
				}
				release()
				if n, ok := r.answer(1, time.Second); ok {
					t.Errorf("answered with %d pages", n)
				}
			},
			"trim": func(t *testing.T, r *rig, release func()) {
				if err := r.Trim(scheduler, 1, 17*ppc+1); err != nil {
					t.Error(err)
				}
				release()
				if n, ok := r.answer(1, time.Minute); !ok || n != chunks*ppc {
					t.Errorf("%d pages, %v", n, ok)
				}
				if st := r.engine.Stats(); st.Leases != chunks-17 || st.Verified != 16+chunks-17 {
					// the first batch was under way
					t.Errorf("%+v", st)
				}
				r.load(1, p, 17*ppc, (chunks-17)*ppc)
			},
			"trim all": func(t *testing.T, r *rig, release func()) {
				if err := r.Trim(scheduler, 1, chunks*ppc); err != nil {
					t.Error(err)
				}
				if n, ok := r.answer(1, time.Second); !ok || n != 0 {
					t.Errorf("%d pages, %v", n, ok)
				}
				release()
			},
			"repeat": func(t *testing.T, r *rig, release func()) {
				if n, done := r.ask(1, p, 0, 30*ppc); n != 0 || done {
					t.Error(n, done)
				}
				release()
				if n, ok := r.answer(1, time.Minute); !ok || n != 30*ppc {
					t.Errorf("%d pages, %v", n, ok)
				}
				r.load(1, p, 0, 30*ppc)
			},
			"owner": func(t *testing.T, r *rig, release func()) {
				r.RemoveOwner(scheduler)
				release()
				synctest.Wait()
				if err := r.engine.AddOwner(scheduler, r.id); err != nil {
					t.Error(err)
				}
				r.want(2, p, 0, chunks*ppc, chunks*ppc)
			},
			"clear": func(t *testing.T, r *rig, release func()) {
				out, err := r.Clear(t.Context(), tiers.Fingerprint{}, arenaName)
				if err != nil || len(out) != 1 || out[0].Err != nil || out[0].Chunks != chunks ||
					r.medium.forgot.Load() != 1 {
					t.Errorf("%+v, %v, forgot %d times", out, err, r.medium.forgot.Load())
				}
				release()
				if n, ok := r.answer(1, time.Minute); !ok || n != 0 {
					t.Errorf("%d pages, %v", n, ok)
				}
			},
			"close": func(t *testing.T, r *rig, release func()) {
				go func() {
					<-r.ctx.Done()
					release()
				}()
				r.Stack.Close()
				if n, ok := r.answer(1, time.Second); ok {
					t.Errorf("answered with %d pages", n)
				}
			},
		} {
			t.Run(c.name+"/"+name, func(t *testing.T) {
				o := c.o
				var gate chan struct{}
				o.restore = func(m *medium) {
					gate = make(chan struct{})
					m.hook = func(*engine.Verification) { <-gate }
					m.add(p, 0, len(p), nil)
				}
				inBubble(t, o, func(t *testing.T, r *rig) {
					if n, done := r.ask(1, p, 0, len(p)); n != 0 || done {
						t.Fatal(n, done)
					}
					synctest.Wait()
					do(t, r, sync.OnceFunc(func() { close(gate) }))
					if err := r.engine.Check(); err != nil {
						t.Error(err)
					}
				})
			})
		}
	}
}

// What is to be written to a tier is verified first. The corrupt is not written.
func TestCascadesAreVerified(t *testing.T) {
	for _, admit := range []engine.Admission{engine.AdmitReused, engine.AdmitEvicted} {
		t.Run(admit.String(), func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(1, 6))
			p, other := prefix(rnd, 32), prefix(rnd, 32*ppc)
			inBubble(t, rigOptions{slots: 32, tiers: []tiertest.MemoryOptions{{Local: true}},
				config: func(c *Config) { c.Tiers[0].Admit = admit }, restore: func(m *medium) {
					m.add(p, 0, 32, nil)
					m.rot(5)
				}}, func(t *testing.T, r *rig) {
				rotten := p.Run(r.space, 5*ppc, 6*ppc)
				r.mem[0].SetFault(func(_ context.Context, op tiertest.Op, run tiers.Run) error {
					if op == tiertest.Store && bytes.Equal(run.Hashes, rotten.Hashes) {
						t.Error("a corrupt chunk is written")
					}
					return nil
				})
				if n := r.engine.Unverified(); n != 8 {
					t.Fatal(n)
				}
				if admit == engine.AdmitReused {
					if n := r.store(p, 32); n != 32 { // held: a use
						t.Fatal(n)
					}
					r.flush()
				} else {
					for n := ppc; n <= len(other) && r.engine.Stats().Evictions < 8; n += ppc {
						r.store(other, n)
						synctest.Wait()
					}
				}
				synctest.Wait()
				r.has("t0", p, 32, 5*ppc)
				if st := r.engine.Stats(); st.VerifyFailed != 1 || st.Verified != 7 ||
					r.medium.most() != 1 {
					t.Errorf("%+v", st)
				}
			})
		})
	}
}

// Operators' calls see verified chunks only, and wait for them.
func TestControlsVerify(t *testing.T) {
	p := prefix(rand.New(rand.NewPCG(1, 7)), 80*ppc)
	o := rigOptions{slots: 128, tiers: []tiertest.MemoryOptions{{Local: true}},
		restore: func(m *medium) {
			m.took = time.Millisecond
			m.add(p, 0, len(p), nil)
			m.rot(70)
		}}
	const good = 70 * ppc
	t.Run("prefetch", func(t *testing.T) {
		inBubble(t, o, func(t *testing.T, r *rig) {
			n, err := r.Prefetch(t.Context(), r.id, tenant.None, p.Digests(0, len(p), 32))
			if n != good || err != nil {
				t.Fatal(n, err)
			}
		})
	})
	t.Run("verify", func(t *testing.T) {
		inBubble(t, o, func(t *testing.T, r *rig) {
			ctx, cancel := context.WithTimeout(t.Context(), 40*time.Millisecond)
			defer cancel()
			if err := r.Verify(ctx, r.id, p.Digests(0, len(p), 32)); !errors.Is(err,
				context.DeadlineExceeded) {
				t.Fatal(err)
			}
			if n := r.engine.Unverified(); n != 80-48 { // three batches
				t.Fatal(n)
			}
			if err := r.Verify(t.Context(), r.id, p.Digests(0, len(p), 32)); err != nil {
				t.Fatal(err)
			}
			pin, n, err := r.engine.Pin(r.id, p.Digests(0, len(p), 32))
			if n != good || err != nil || r.medium.most() != 1 {
				t.Fatal(n, err, r.medium.most())
			}
			if err := r.engine.Unpin(pin); err != nil {
				t.Fatal(err)
			}
			if err := r.Verify(t.Context(), r.id, p.Digests(0, len(p), 32)); err != nil {
				t.Fatal(err)
			}
		})
	})
	t.Run("move", func(t *testing.T) {
		inBubble(t, o, func(t *testing.T, r *rig) {
			r.medium.failWith = errBroken
			n, err := r.Move(t.Context(), r.id, p.Digests(0, len(p), 32), arenaName, "t0", false)
			if n != 64*ppc || !errors.Is(err, errBroken) || r.medium.forgot.Load() != 1 {
				// a window
				t.Fatal(n, err, r.medium.forgot.Load())
			}
			r.medium.failWith = nil
			r.has("t0", p, len(p), 64*ppc)
			r.has(arenaName, p, 64*ppc, 0)
		})
	})
	t.Run("clear", func(t *testing.T) {
		inBubble(t, o, func(t *testing.T, r *rig) {
			r.medium.failWith = errBroken
			out, err := r.Clear(t.Context(), r.space.Fingerprint, "")
			if err != nil || len(out) != 2 || !errors.Is(out[0].Err, errBroken) ||
				out[0].Chunks != 80 || out[1].Err != nil || r.engine.Unverified() != 0 {
				t.Fatalf("%+v, %v", out, err)
			}
		})
	})
}

// A verifier that never says what it found costs the hit, no lookup its answer.
func TestVerifierThatSaysNothing(t *testing.T) {
	p := prefix(rand.New(rand.NewPCG(1, 8)), 40)
	inBubble(t, rigOptions{config: func(c *Config) {
		c.Verify = func(context.Context,
			[]engine.Verification) {
		}
	}, restore: func(m *medium) { m.add(p, 0, 40, nil) }},
		func(t *testing.T, r *rig) {
			start := time.Now()
			if n := r.lookup(1, p, 0, 40); n != 0 || time.Since(start) > 100*time.Millisecond {
				t.Fatal(n, time.Since(start))
			}
			if n, err := r.Prefetch(t.Context(), r.id, tenant.None, p.Digests(0, 40, 32)); n != 0 ||
				err != nil {
				t.Fatal(n, err)
			}
		})
}

// With too many lookups under way, one more is answered with what is verified.
func TestVerifyingIsBounded(t *testing.T) {
	p := prefix(rand.New(rand.NewPCG(1, 9)), 40)
	inBubble(t, rigOptions{config: func(c *Config) { c.MaxPending = 1 }, restore: func(m *medium) {
		m.took = time.Millisecond
		m.add(p, 0, 40, nil)
	}}, func(t *testing.T, r *rig) {
		if n, done := r.ask(1, p, 0, 40); n != 0 || done {
			t.Fatal(n, done)
		}
		if n, done := r.ask(2, p, 0, 40); n != 0 || !done || r.LookupStats().Refused != 1 {
			t.Fatal(n, done)
		}
		if n, ok := r.answer(1, time.Minute); n != 40 || !ok {
			t.Fatal(n, ok)
		}
	})
}
