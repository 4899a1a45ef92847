package directory

import (
	"context"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"lookaside/dax"
	"lookaside/internal/invariants"
	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/tiertest"
)

// TestManyAtOnce: sessions store and drop chunks of two geometries that take the same memory from
// one another, while keepers, patrols and flushes run. In the end all that is held is found again.
func TestManyAtOnce(t *testing.T) {
	steps := 20_000
	if testing.Short() || invariants.Enabled {
		steps = 2000
	}
	m := newMachine(t, small, tiers.Geometry{PageBytes: 700, PagesPerChunk: 3, PageTokens: 16,
		DigestBytes: 16})
	p := m.start(engine.Config{}, nil)
	const size = 128 << 10
	p.addRegion(size)
	// Not of the Go heap: keepers read what others may fill, as in a real arena.
	memory, err := dax.NewTable[byte](size)
	if err != nil {
		t.Fatal(err)
	}
	defer memory.Close()
	m.memory[0] = memory.Slice()
	p.d.Attach(p.e, p.d.bytes)
	var wait sync.WaitGroup
	for session := range 4 {
		space := session % 2
		o := engine.Owner(100 + session)
		if err := p.e.AddOwner(o, p.ids[space]); err != nil {
			t.Fatal(err)
		}
		wait.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(session), 1))
			var at engine.PatrolPlace
			for range steps {
				prefix := randomPrefix(rnd, 1+rnd.IntN(12), 2)
				run := prefix.Run(m.spaces[space], 0, len(prefix))
				res, all, err := p.e.PrepareStore(o, 0, nil, run.Hashes, nil)
				if err != nil {
					t.Error(err)
					return
				}
				if len(all) > 0 {
					p.fill(&grants{space, res.Store, all, run})
					if err := p.e.CommitStore(o, res.Store, nil); err != nil {
						t.Error(err)
						return
					}
				}
				switch rnd.IntN(12) {
				case 0:
					if _, err := p.e.Drop(p.ids[space], 0, run.Hashes); err != nil {
						t.Error(err)
					}
				case 1:
					p.e.ClearSpace(p.ids[space])
				case 2:
					if err := p.d.Flush(t.Context()); err != nil {
						t.Error(err)
					}
				default:
					if v, _, ok := p.e.NextPatrol(&at, nil); ok {
						// If it is bad, it went while it was read.
						_, err := p.d.Recheck(&v)
						if err != nil && p.e.DropRotten(v.Handle, false) {
							t.Errorf("%+v: %v", v, err)
						}
					}
				}
			}
		})
	}
	wait.Wait()
	last := tiertest.Prefix("a dozen page") // they may have ended with clearing all
	for space := range m.spaces {
		p.store(space, last, 0, len(last))
	}
	if err := p.d.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	st := p.e.Stats()
	if n := p.d.Stats(); n.Kept != st.ReadySlots || n.Failed != 0 {
		t.Errorf("%+v of %d", n, st.ReadySlots)
	}
	t.Logf("%d pieces taken for others", st.Recarved)
	if err := p.e.Check(); err != nil {
		t.Error(err)
	}
	p.close()
	p = m.start(engine.Config{}, nil)
	defer p.close()
	if p.found.Damaged != 0 || p.found.Chunks > st.ReadySlots {
		t.Errorf("%+v of %d", p.found, st.ReadySlots)
	}
	rnd := rand.New(rand.NewPCG(3, 3))
	for range 2000 {
		space := rnd.IntN(2)
		p.verifyAll(space, randomPrefix(rnd, 12, 2))
	}
	for space := range m.spaces {
		p.verifyAll(space, last)
		if n := p.readable(space, last); n != len(last) {
			t.Errorf("space %d: %d pages of %d", space, n, len(last))
		}
	}
	if st := p.e.Stats(); st.VerifyFailed != 0 {
		t.Errorf("%+v", st)
	}
}

// More is committed than can wait for keepers: the rest is found by a walk.
func TestMoreThanCanWait(t *testing.T) {
	const chunks = queued + 2000
	g := tiers.Geometry{PageBytes: 256, PagesPerChunk: 1, PageTokens: 16, DigestBytes: 8}
	m := newMachine(t, g)
	p := m.start(engine.Config{MaxPages: 1 << 20}, nil)
	p.addRegion((chunks/16 + 1) * 4096)
	prefix := make(tiertest.Prefix, chunks)
	for from := 0; from < chunks; from += 1000 {
		p.commit(p.prepare(0, prefix[:min(from+1000, chunks)], from, min(from+1000, chunks)))
	}
	if n := p.e.Stats().KeepLost; n < 2000 {
		t.Fatalf("%d chunks did not find room", n)
	}
	if err := p.d.Flush(context.Background()); err != nil {
		t.Fatal(err)
	}
	if n, ready := p.d.Stats().Kept, p.e.Stats().ReadySlots; n != ready || n < chunks {
		t.Errorf("%d of %d are kept", n, ready)
	}
	p.close()
	p = m.start(engine.Config{MaxPages: 1 << 20}, nil)
	defer p.close()
	if p.found.Chunks != chunks {
		t.Errorf("%+v", p.found)
	}
}

// TestLeaveWaits: when Leave returns, nobody writes an entry, and nobody begins to.
func TestLeaveWaits(t *testing.T) {
	m := newMachine(t, small)
	p := m.start(engine.Config{}, nil)
	defer p.close()
	p.addRegion(64 << 10)
	p.store(0, tiertest.Prefix("some pages"), 0, 10)
	v := list(p.e)[0]
	using, _ := p.d.using(&v)
	if using == nil {
		t.Fatal("the chunk is not there")
	}
	var written atomic.Bool
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.d.Leave()
		if !written.Load() {
			t.Error("it did not wait for who was writing")
		}
	}()
	for !p.d.left.Load() {
		runtime.Gosched()
	}
	written.Store(true)
	using.life.RUnlock()
	<-done
	if using, _ := p.d.using(&v); using != nil {
		t.Error("somebody may write after Leave")
	}
}

// Flush ends with its context.
func TestFlushEnds(t *testing.T) {
	m := newMachine(t, small)
	p := m.start(engine.Config{}, nil)
	defer p.close()
	p.addRegion(64 << 10)
	p.store(0, tiertest.Prefix("some pages"), 0, 10)
	// A keeper that does not come to an end holds a turn.
	v := list(p.e)[0]
	_, turn := p.d.using(&v)
	p.d.pieces[v.Piece].Load().life.RUnlock()
	turn.Lock()
	p.d.Attach(p.e, p.d.bytes)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- p.d.Flush(ctx) }()
	cancel()
	turn.Unlock()
	<-done
	if err := p.d.Flush(t.Context()); err != nil {
		t.Error(err)
	}
	if n := p.d.Stats().Kept; n != 3 {
		t.Errorf("%d are kept", n)
	}
}
