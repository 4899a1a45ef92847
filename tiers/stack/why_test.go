package stack

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/tiertest"
	"lookaside/tiers/why"
)

// remember makes an engine remember what goes.
func remember(t *testing.T) func(c *engine.Config) {
	m, err := why.NewMemory(1 << 12)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.Close() })
	return func(c *engine.Config) { c.Gone = m }
}

// asker keeps the answer to a lookup.
type asker struct {
	answers chan Answer
}

func (a asker) LookupPending(engine.Owner, uint64, int, time.Duration) {}
func (a asker) LookupAnswered(x Answer)                                { a.answers <- x }

// end looks pages [0, n) of a prefix up and returns how it ends.
func (r *rig) end(p tiertest.Prefix, n int, options ...func(*Query)) Answer {
	r.t.Helper()
	q := Query{Owner: scheduler, Lookup: 77, Space: r.id, Hashes: p.Digests(0, n, 32)}
	for _, o := range options {
		o(&q)
	}
	a := asker{make(chan Answer, 1)}
	pages, done, err := r.Lookup(&q, a)
	if err != nil {
		r.t.Fatal(err)
	}
	x := Answer{Asked: n, Pages: pages, Why: q.Why, From: Sources{}.of(pages)}
	if !done {
		clear(q.Hashes)
		x = <-a.answers
	}
	_ = r.Cancel(scheduler, 77)
	if x.Asked != n || x.First != 0 {
		r.t.Fatalf("%+v", x)
	}
	return x
}

func (r *rig) wantEnd(x Answer, pages int, reason why.Reason) {
	r.t.Helper()
	if x.Pages != pages || x.Why.Reason != reason {
		r.t.Fatalf("%d pages, then %v; want %d, then %v", x.Pages, x.Why.Reason, pages, reason)
	}
}

// TestWhyFromArena: lookups that the arena answers at once, short and long ones.
func TestWhyFromArena(t *testing.T) {
	for _, long := range []int{0, 2} {
		o := rigOptions{engine: remember(t), config: func(c *Config) { c.LongChunks = long }}
		inBubble(t, o, func(t *testing.T, r *rig) {
			rnd := rand.New(rand.NewPCG(1, 1))
			p := prefix(rnd, 32)
			r.wantEnd(r.end(p, 32), 0, why.NeverStored)
			r.store(p, 16)
			r.wantEnd(r.end(p, 32), 16, why.NeverStored)
			r.wantEnd(r.end(p, 16), 16, why.End)
			r.clearArena()
			r.wantEnd(r.end(p, 32), 0, why.Cleared)
		})
	}
}

// TestWhyFromTier: what a tier has and does not give, for each reason.
func TestWhyFromTier(t *testing.T) {
	o := rigOptions{engine: remember(t), tiers: []tiertest.MemoryOptions{{Local: true,
		BytesPerSec: 100 * slotBytes}}}
	inBubble(t, o, func(t *testing.T, r *rig) {
		p := prefix(rand.New(rand.NewPCG(1, 1)), 64)
		r.store(p, 48)
		r.flush()
		r.clearArena()
		x := r.end(p, 64)
		r.wantEnd(x, 48, why.NeverStored)
		if x.From.Tiers[0] != 48 || x.From.Arena != 0 || x.Began > x.Took {
			t.Errorf("%+v", x)
		}
		x = r.end(p, 64)
		if r.wantEnd(x, 48, why.NeverStored); x.From.Arena != 48 {
			t.Errorf("%+v", x.From)
		}
		r.clearArena()
		x = r.end(p, 48, func(q *Query) { q.Deadline = 25 * time.Millisecond })
		if x.Pages == 0 || x.Pages >= 48 || x.Why.Reason != why.Late {
			t.Fatalf("%+v", x)
		}
		synctest.Wait()
		r.clearArena()
		r.wantEnd(r.end(p, 48, func(q *Query) { q.Recompute = time.Microsecond }), 0, why.NotWorth)
		r.mem[0].SetFault(func(_ context.Context, op tiertest.Op, run tiers.Run) error {
			if op == tiertest.Load && run.First >= 16 {
				return errors.New("broken")
			}
			return nil
		})
		r.wantEnd(r.end(p, 48), 16, why.Lost)
	})
}

// TestWhyTierIsOff: what the arena has evicted may be in a tier that does not work now.
func TestWhyTierIsOff(t *testing.T) {
	o := rigOptions{slots: 4, engine: remember(t), tiers: []tiertest.MemoryOptions{{}},
		config: func(c *Config) { c.Tiers[0].Failures = 1 }}
	inBubble(t, o, func(t *testing.T, r *rig) {
		rnd := rand.New(rand.NewPCG(1, 1))
		p, q := prefix(rnd, 16), prefix(rnd, 16)
		r.store(p, 16)
		r.flush()
		r.store(q, 16)
		r.flush()
		r.mem[0].SetFault(func(context.Context, tiertest.Op, tiers.Run) error {
			return errors.New("broken")
		})
		r.end(p, 16) // opens the breaker
		x := r.end(p, 16)
		if r.wantEnd(x, 0, why.Lost); x.Why.Tier != 1 {
			t.Errorf("lost by tier %d", x.Why.Tier)
		}
	})
}
