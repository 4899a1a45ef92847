package stack

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/tenant"
	"lookaside/tiers/tiertest"
)

var (
	seedFlag  = flag.Uint64("seed", 0, "the one seed of the histories; 0: some")
	stepsFlag = flag.Int("steps", 250, "steps of each history")
)

// A configuration is one way to run a history.
type configuration struct {
	name     string
	o        rigOptions
	faults   bool // tiers fail, forget, rot and stall
	complete bool // nothing that was stored and flushed is ever lost
	restored int  // chunks that the arena has from its last run, some of them corrupt
	peers    bool // others hold some of it,
	copies   bool // and what is read there is copied
}

func configurations() []configuration {
	local, remote := tiertest.MemoryOptions{Local: true},
		tiertest.MemoryOptions{Latency: time.Millisecond, BytesPerSec: 5000 * slotBytes}
	slow := tiertest.MemoryOptions{Latency: 20 * time.Millisecond, BytesPerSec: 300 * slotBytes}
	tiny := func(c *Config) {
		c.MaxPending, c.MaxPendingBytes = 3, 4000
		for i := range c.Tiers {
			t := &c.Tiers[i]
			t.Queue, t.LookupWorkers, t.LoadWorkers, t.StoreWorkers, t.Batch = 2, 1, 1, 1, 1
		}
	}
	long := func(c *Config) { c.LongChunks = 2 }
	return []configuration{
		{name: "no tier", o: rigOptions{slots: 256}, complete: true},
		{name: "local", o: rigOptions{slots: 256, tiers: []tiertest.MemoryOptions{local}},
			complete: true},
		{name: "remote", o: rigOptions{slots: 256, tiers: []tiertest.MemoryOptions{remote}},
			complete: true},
		{name: "both, few slots", o: rigOptions{slots: 40, tiers: []tiertest.MemoryOptions{local,
			slow}}, complete: true},
		{name: "one slot", o: rigOptions{slots: 1, tiers: []tiertest.MemoryOptions{local}},
			complete: true},
		{name: "two slots, remote",
			o: rigOptions{slots: 2, tiers: []tiertest.MemoryOptions{remote}}, complete: true},
		{name: "tiny queues", o: rigOptions{slots: 16, tiers: []tiertest.MemoryOptions{local, slow},
			config: tiny}},
		{name: "small share", o: rigOptions{slots: 32, tiers: []tiertest.MemoryOptions{local,
			remote}, engine: func(c *engine.Config) {
			c.OwnerShare, c.PromotingShare = 0.25,
				0.1
		}}},
		{name: "small local", o: rigOptions{slots: 16,
			tiers: []tiertest.MemoryOptions{{Local: true, CapacityBytes: 20 * slotBytes}, remote}}},
		{name: "reused, evicted", o: rigOptions{slots: 24, tiers: []tiertest.MemoryOptions{local,
			remote}, config: func(c *Config) {
			c.Tiers[0].Admit, c.Tiers[1].Admit = engine.AdmitReused, engine.AdmitEvicted
		}}},
		{name: "faults", o: rigOptions{slots: 24, tiers: []tiertest.MemoryOptions{local, remote}},
			faults: true},
		{name: "faults, tiny queues", o: rigOptions{slots: 6, tiers: []tiertest.MemoryOptions{local,
			slow}, config: tiny}, faults: true},
		{name: "faults, three tiers", o: rigOptions{slots: 32,
			tiers: []tiertest.MemoryOptions{local, remote, slow}, config: func(c *Config) {
				c.Promote = PromoteAlways
				for i := range c.Tiers {
					c.Tiers[i].LoadTimeout, c.Tiers[i].LookupTimeout, c.Tiers[i].StoreTimeout =
						50*time.Millisecond, 30*time.Millisecond, 100*time.Millisecond
				}
			}}, faults: true},
		{name: "restored", o: rigOptions{slots: 256}, restored: 150},
		{name: "restored, never promoted", o: rigOptions{slots: 40,
			tiers:  []tiertest.MemoryOptions{local},
			config: func(c *Config) { c.Promote = PromoteNever }}, restored: 40},
		{name: "restored, both", o: rigOptions{slots: 64, tiers: []tiertest.MemoryOptions{local,
			slow}}, restored: 60},
		{name: "restored, reused, evicted", o: rigOptions{slots: 80,
			tiers: []tiertest.MemoryOptions{local, remote}, config: func(c *Config) {
				c.Tiers[0].Admit, c.Tiers[1].Admit = engine.AdmitReused, engine.AdmitEvicted
			}}, restored: 80},
		{name: "restored, tiny queues, faults", o: rigOptions{slots: 48,
			tiers: []tiertest.MemoryOptions{local, slow}, config: tiny}, restored: 40,
			faults: true},
		{name: "peers", o: rigOptions{slots: 1024}, peers: true, complete: true},
		{name: "peers, local", o: rigOptions{slots: 1024, tiers: []tiertest.MemoryOptions{local}},
			peers: true, complete: true},
		{name: "peers, never promoted", o: rigOptions{slots: 40,
			tiers: []tiertest.MemoryOptions{local}, config: func(c *Config) {
				c.Promote,
					c.Linger = PromoteNever, 5*time.Millisecond
			}}, peers: true},
		{name: "peers, both, few slots, faults", o: rigOptions{slots: 24,
			tiers:  []tiertest.MemoryOptions{local, slow},
			config: func(c *Config) { c.Linger = 20 * time.Millisecond }}, peers: true,
			faults: true},
		{name: "peers, few foreign slots, faults", o: rigOptions{slots: 16,
			tiers:  []tiertest.MemoryOptions{local, remote},
			engine: func(c *engine.Config) { c.ForeignSlots, c.OwnerShare = 6, 0.5 }}, peers: true,
			faults: true},
		{name: "peers, tiny queues, faults", o: rigOptions{slots: 24,
			tiers: []tiertest.MemoryOptions{slow}, config: tiny}, peers: true, faults: true},
		{name: "peers, copied", o: rigOptions{slots: 1024,
			engine: func(c *engine.Config) { c.CopyAfter = 2 }}, peers: true, complete: true,
			copies: true},
		{name: "peers, copied, both, few slots, faults", o: rigOptions{slots: 48,
			tiers:  []tiertest.MemoryOptions{local, slow},
			config: func(c *Config) { c.Linger = 20 * time.Millisecond },
			engine: func(c *engine.Config) {
				c.CopyAfter = 1
			}}, peers: true, faults: true, copies: true},
		{name: "long, no tier", o: rigOptions{slots: 256, config: long}, complete: true},
		{name: "long, both, few slots", o: rigOptions{slots: 40,
			tiers: []tiertest.MemoryOptions{local, slow}, config: long}, complete: true},
		{name: "long, tiny queues, faults", o: rigOptions{slots: 16,
			tiers:  []tiertest.MemoryOptions{local, slow},
			config: func(c *Config) { tiny(c); long(c) }}, faults: true},
		{name: "long, restored, both", o: rigOptions{slots: 64,
			tiers: []tiertest.MemoryOptions{local, slow}, config: long}, restored: 60},
		{name: "long, peers, both, few slots, faults", o: rigOptions{slots: 24,
			tiers: []tiertest.MemoryOptions{local, slow}, config: long}, peers: true, faults: true},
		{name: "peers, restored", o: rigOptions{slots: 64, tiers: []tiertest.MemoryOptions{local}},
			peers: true, restored: 60},
	}
}

// stored is what was committed, as the model knows it.
type stored struct {
	p tiertest.Prefix
	n int
}

// open is a lookup of a history that has not been loaded or cancelled.
type open struct {
	id      uint64
	p       tiertest.Prefix
	first   int
	n       int
	trimmed int
}

// history is a run of random operations on a rig and on a model of it.
type history struct {
	*rig
	c      configuration
	rnd    *rand.Rand
	held   []stored // since it was cleared
	ever   []stored
	open   []open
	next   uint64
	checks []int // results at the points where all complete configurations must agree
}

// prefix makes a prefix that begins like one of those before it.
func (h *history) prefix() tiertest.Prefix {
	var base tiertest.Prefix
	list := h.held
	if h.lenders != nil && h.rnd.IntN(2) == 0 {
		list = h.lenders.list
	}
	if len(list) > 0 && h.rnd.IntN(8) > 0 {
		s := list[h.rnd.IntN(len(list))]
		base = s.p[:h.rnd.IntN(len(s.p)+1)]
	}
	return prefix(h.rnd, max(len(base)+1, min(60, len(base)+1+h.rnd.IntN(24))), base...)
}

// there is how many pages of a prefix a tier or a peer has.
func (h *history) there(p tiertest.Prefix) int {
	if h.lenders == nil {
		return known(h.held, p)
	}
	return max(known(h.held, p), known(h.lenders.list, p))
}

// known is how many pages of a prefix were stored.
func known(list []stored, p tiertest.Prefix) (most int) {
	for _, s := range list {
		n := 0
		for n < min(s.n, len(p)) && s.p[n] == p[n] {
			n++
		}
		most = max(most, n)
	}
	return most
}

// settleOne waits for a lookup's answer, checks it, and loads some of it.
func (h *history) settleOne(i int) {
	l := h.open[i]
	h.open = slices.Delete(h.open, i, i+1)
	pages, ok := h.answer(l.id, time.Minute)
	if !ok {
		h.t.Fatalf("lookup %d is not answered", l.id)
	}
	if most := max(0, known(h.ever, l.p[:l.n])-l.first); pages > most {
		h.t.Fatalf("lookup %d of pages %d to %d hits %d, and %d were stored; trimmed %d", l.id,
			l.first, l.n-1, pages, most, l.trimmed)
	}
	from, to := max(l.first, l.trimmed), l.first+pages
	if from >= to {
		_ = h.Cancel(scheduler, l.id)
		return
	}
	// What was cleared or found bad since cannot be loaded any more; all else can, and has the
	// right bytes.
	n := 1 + h.rnd.IntN(to-from)
	load, extents, err := h.engine.PrepareLoad(worker, scheduler, l.id, from, n, nil)
	if err != nil {
		_ = h.Cancel(scheduler, l.id)
		return
	}
	for _, x := range extents {
		part := l.p.Run(h.space, int(x.Page), int(x.Page+x.Pages))
		if bad := tiertest.WrongPage(h.memoryOf(x), part); bad >= 0 {
			h.t.Fatalf("page %d of lookup %d has wrong bytes", int(x.Page)+bad, l.id)
		}
	}
	var bad []uint32
	if h.c.faults && extents[0].Region == lentRegion && h.rnd.IntN(10) == 0 {
		bad = []uint32{0}
	}
	if err := h.engine.Release(worker, load, bad); err != nil {
		h.t.Fatal(err)
	}
}

func (h *history) settleAll() {
	for len(h.open) > 0 {
		h.settleOne(0)
	}
}

func (h *history) lookup(o ...func(*Query)) {
	p := h.prefix()
	first := 0
	if h.rnd.IntN(3) == 0 {
		first = h.rnd.IntN(len(p))
	}
	h.next++
	l := open{id: h.next, p: p, first: first, n: len(p)}
	pages, done := h.ask(l.id, p, first, len(p), o...)
	if done {
		h.mu.Lock()
		h.answers[l.id] = pages
		h.mu.Unlock()
	}
	h.open = append(h.open, l)
}

// checkpoint lets everything come to rest and compares a lookup with the model.
func (h *history) checkpoint(p tiertest.Prefix) {
	h.settleAll()
	time.Sleep(2 * time.Second) // loads that no lookup waits for
	if h.c.complete {
		h.flush()
	}
	h.next++
	want, slots := h.there(p), len(h.arena)/slotBytes
	pages := h.rig.lookup(h.next, p, 0, len(p))
	if pages > want {
		h.t.Fatalf("%d pages hit, and %d were stored", pages, want)
	}
	if h.c.complete {
		least := want
		if slots < 256 {
			least = min(want, slots/2*ppc) // what may be promoted at a time
		}
		if slots <= 2 {
			// the rest may be taken by a shorter version of the chunk, and by one that continues it
			least = min(want, 1)
		}
		if pages < least {
			h.t.Fatalf("%d pages hit, want %d or more: %d were stored", pages, least, want)
		}
		if slots >= 256 && h.lenders == nil {
			h.checks = append(h.checks, pages)
		}
	}
	h.load(h.next, p, 0, pages)
	if err := h.engine.Check(); err != nil {
		h.t.Fatal(err)
	}
}

// fault lets tiers misbehave in one of many ways.
func (h *history) fault() {
	m := h.mem[h.rnd.IntN(len(h.mem))]
	var count atomic.Uint64
	count.Store(h.rnd.Uint64())
	switch h.rnd.IntN(6) {
	case 0:
		m.Forget(h.rnd, 0.3)
	case 1:
		m.Rot(h.rnd, 0.1)
	case 2, 3:
		m.SetFault(nil)
	default:
		kinds, share := h.rnd.IntN(32), []int{2, 5, 20}[h.rnd.IntN(3)]
		stall := h.rnd.IntN(2) == 0
		m.SetFault(func(ctx context.Context, op tiertest.Op, run tiers.Run) error {
			seed := count.Add(1) * 0x9E3779B97F4A7C15
			seed = (seed ^ seed>>29) * 0xBF58476D1CE4E5B9
			if kinds>>op&1 == 0 || int(seed>>33)%share != 0 {
				return nil
			}
			if stall && seed>>60&1 == 0 {
				return tiertest.Wait(ctx, time.Duration(seed>>40%300)*time.Millisecond)
			}
			return []error{errBroken, tiers.ErrBusy, tiers.ErrCorrupt,
				tiers.ErrNotFound}[seed>>50%4]
		})
	}
}

// restore lets the arena have some prefixes, not all of them right or whole.
func (h *history) restore(m *medium) {
	h.rig = m.rig
	m.took = time.Duration(h.rnd.IntN(4000)) * time.Microsecond
	for m.next < h.c.restored {
		p := h.prefix()
		m.add(p, 0, len(p), func(int) bool { return h.rnd.IntN(8) > 0 })
		for range h.rnd.IntN(2) {
			m.rot(h.rnd.IntN(max(1, m.next)))
		}
		h.held, h.ever = append(h.held, stored{p, len(p)}), append(h.ever, stored{p, len(p)})
	}
}

// lend has peers hold something more, or lets one go.
func (h *history) lend() {
	if h.rnd.IntN(4) == 0 {
		h.lenders.mu.Lock()
		gone := h.lenders.peer
		h.lenders.peer++
		h.lenders.mu.Unlock()
		h.PeerGone(gone)
		return
	}
	p := h.prefix()
	h.lenders.hold(p, len(p))
	h.ever = append(h.ever, stored{p, len(p)})
}

// step does one random operation.
func (h *history) step() {
	rnd := h.rnd
	switch k := rnd.IntN(100); {
	case k < 25:
		p := h.prefix()
		if h.c.complete {
			h.settleAll() // what they promote would take the room of what is not written yet
		}
		n := h.store(p, len(p))
		if h.c.complete {
			h.flush()
		}
		if n > 0 {
			h.held, h.ever = append(h.held, stored{p, n}), append(h.ever, stored{p, n})
		}
	case k < 60:
		h.lookup(func(q *Query) {
			if rnd.IntN(4) == 0 {
				q.Deadline = time.Duration(1+rnd.IntN(20)) * time.Millisecond
			}
			if rnd.IntN(3) == 0 {
				q.Recompute = time.Duration(rnd.IntN(1000)) * time.Microsecond
			}
			if rnd.IntN(4) == 0 {
				q.Prev = nil
			}
		})
	case k < 72 && len(h.open) > 0:
		h.settleOne(rnd.IntN(len(h.open)))
	case k < 77 && len(h.open) > 0:
		i := rnd.IntN(len(h.open))
		_ = h.Cancel(scheduler, h.open[i].id)
		h.open = slices.Delete(h.open, i, i+1)
	case k < 84 && len(h.open) > 0:
		l := &h.open[rnd.IntN(len(h.open))]
		l.trimmed = max(l.trimmed, rnd.IntN(l.n+5))
		_ = h.Trim(scheduler, l.id, l.trimmed)
	case k < 86:
		h.RemoveOwner(scheduler)
		if err := h.engine.AddOwner(scheduler, h.id); err != nil {
			h.t.Fatal(err)
		}
		h.open = nil
	case k < 88:
		h.clearArena()
		if len(h.mem) == 0 {
			h.held = nil
		}
	case k < 90 && h.lenders != nil:
		h.lend()
	case k < 89 && !h.c.faults:
		h.settleAll()
		if _, err := h.Clear(h.t.Context(), tiers.Fingerprint{}, ""); err != nil {
			h.t.Fatal(err)
		}
		h.held = nil
	case k < 92:
		p := h.prefix()
		ctx, cancel := context.WithTimeout(h.t.Context(), 200*time.Millisecond)
		if n, _ := h.Prefetch(ctx, h.id, tenant.None, p.Digests(0, len(p), 32)); n > h.there(p) {
			h.t.Fatalf("%d pages fetched, and %d were stored", n, known(h.held, p))
		}
		cancel()
	case k < 95 && h.c.faults && len(h.mem) > 0:
		h.fault()
	case k < 98:
		time.Sleep(time.Duration(rnd.IntN(30)) * time.Millisecond)
	default:
		h.checkpoint(h.prefix())
	}
	if err := h.engine.Check(); err != nil {
		h.t.Fatal(err)
	}
}

// lent reports that chunks were borrowed, and copied where they must be, if there are lenders and
// enough steps to expect it. A few histories take longer to come to that.
func (h *history) lent() bool {
	if h.lenders == nil || *stepsFlag < 250 {
		return true
	}
	st := h.PeerStats()
	return st.Chunks > 0 && (st.Copied > 0 || !h.c.copies)
}

// Any history of requests, faults and ends, in any configuration: no wrong byte, no page that was
// not stored, nothing held at the end. Where nothing is lost, all that was stored is found.
func TestHistories(t *testing.T) {
	seeds := []uint64{*seedFlag}
	if *seedFlag == 0 {
		seeds = []uint64{1, 2, rand.Uint64()}
	}
	for _, seed := range seeds {
		for _, c := range configurations() {
			t.Run(fmt.Sprintf("%s/seed %d", c.name, seed), func(t *testing.T) {
				h := &history{c: c, rnd: rand.New(rand.NewPCG(seed, 0))}
				if c.restored > 0 {
					c.o.restore = h.restore
				}
				if c.peers {
					c.o.peers = rand.New(rand.NewPCG(seed, 4))
				}
				inBubble(t, c.o, func(t *testing.T, r *rig) {
					h.rig = r
					if r.lenders != nil {
						r.lenders.faults = c.faults
						for range 8 {
							p := h.prefix()
							r.lenders.hold(p, len(p))
							h.ever = append(h.ever, stored{p, len(p)})
						}
						h.lookup()
					}
					for i := 0; i < *stepsFlag || i < 10**stepsFlag && !h.lent(); i++ {
						h.step()
					}
					for _, m := range r.mem {
						m.SetFault(nil)
					}
					h.checkpoint(h.prefix())
					if r.lenders != nil {
						if st := r.PeerStats(); !h.lent() || !c.copies && st.Copied > 0 {
							t.Errorf("borrowed and copied: %+v", st)
						} else {
							t.Logf("%+v", st)
						}
					}
				})
			})
		}
	}
}

// One history of stores and checks gives the same results in all configurations that lose nothing.
func TestConfigurationsAgree(t *testing.T) {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	var want []int
	var first string
	for _, c := range configurations() {
		if !c.complete || c.o.slots < 256 || c.peers {
			continue
		}
		inBubble(t, c.o, func(t *testing.T, r *rig) {
			h := &history{rig: r, c: c, rnd: rand.New(rand.NewPCG(seed, 1))}
			for i := range *stepsFlag {
				p := h.prefix()
				if i%2 == 0 {
					if n := h.store(p, len(p)); n > 0 {
						h.held = append(h.held, stored{p, n})
					}
					if len(h.held) > 12 { // they fit the arena
						h.held = nil
						if _, err := h.Clear(t.Context(), tiers.Fingerprint{}, ""); err != nil {
							t.Fatal(err)
						}
					}
					continue
				}
				h.checkpoint(p)
				if len(h.mem) > 0 && i%5 == 0 {
					h.clearArena()
				}
			}
			if want == nil {
				want, first = h.checks, c.name
			} else if !slices.Equal(h.checks, want) {
				t.Errorf("seed %d: %q answers %v, %q %v", seed, c.name, h.checks, first, want)
			}
		})
	}
}
