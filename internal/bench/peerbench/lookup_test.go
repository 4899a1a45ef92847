package peerbench

import (
	"context"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/peer"
	"lookaside/tiers/stack"
)

// asker is a sidecar that others lend to, as far as lookups go: all of sidecar, connector and
// sockets but ZMQ.
type asker struct {
	engine *engine.Engine
	peers  *peer.Peers
	stack  *stack.Stack
	id     engine.SpaceID
	answer chan stack.Answer

	mu  sync.RWMutex
	ids map[[2]uint64]uint32
}

func newAsker(b *testing.B, dir string, space *tiers.Space) *asker {
	b.Helper()
	a := &asker{answer: make(chan stack.Answer, 1), ids: map[[2]uint64]uint32{}}
	bell := stack.NewBell()
	var err error
	a.engine, err = engine.New(engine.Config{OwnerShare: 1, JournalBytes: 1 << 20,
		ForeignSlots: 4096, Wake: bell.Ring, ArenaLimitBytes: 1 << 30})
	must(b, err)
	a.id, err = a.engine.OpenSpace(space.Fingerprint, space.Geometry)
	must(b, err)
	must(b, a.engine.AddRegion(1, 8192*pageBytes))
	must(b, a.engine.AddOwner(1, a.id))
	must(b, a.engine.AddOwner(2, a.id))
	a.stack, err = stack.New(stack.Config{Engine: a.engine, Bell: bell,
		Arena: func(uint32) []byte { panic("nothing is promoted") }, Peers: a, Linger: time.Hour})
	must(b, err)
	a.stack.OpenSpace(a.id, space)
	a.peers, err = peer.Start(peer.Config{Dir: dir, Generation: 1, Engine: a.engine,
		OnRegion: a.onRegion, OnGone: func(p uint64) { a.stack.PeerGone(p) }})
	must(b, err)
	b.Cleanup(func() {
		a.stack.Close()
		must(b, a.peers.Close())
		a.engine.Close()
	})
	return a
}

func must(b *testing.B, err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

func (a *asker) onRegion(r peer.Region) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ids[[2]uint64{r.Peer, uint64(r.ID)}] = 1000 + uint32(len(a.ids))
	return nil
}

func (a *asker) Contains(run tiers.Run, held []uint16) (pages, by int) {
	return a.peers.Contains(run, held)
}

func (a *asker) Borrow(ctx context.Context, run tiers.Run, out func(chunk int, l engine.Loan)) (int,
	error) {
	return a.peers.Borrow(ctx, run, func(chunk int, l peer.Loan) {
		a.mu.RLock()
		defer a.mu.RUnlock()
		out(chunk, engine.Loan{Peer: l.Peer, Region: a.ids[[2]uint64{l.Peer, uint64(l.Region)}],
			Offset: l.Offset, Pages: l.Pages, Handle: l.Handle})
	})
}

func (a *asker) Ask(run tiers.Run, peer int, done func(loans []engine.Loan)) bool {
	return a.peers.Ask(run, peer, func(loans []engine.Loan) {
		a.mu.RLock()
		for i := range loans {
			loans[i].Region = a.ids[[2]uint64{loans[i].Peer, uint64(loans[i].Region)}]
		}
		a.mu.RUnlock()
		done(loans)
	})
}

func (a *asker) Memory(uint32) []byte { return nil }

func (a *asker) Return(handles []uint64, bad bool) { a.peers.Return(handles, bad) }

func (a *asker) LookupPending(engine.Owner, uint64, int, time.Duration) {}

func (a *asker) LookupAnswered(x stack.Answer) { a.answer <- x }

// look asks, and waits for the answer.
func (a *asker) look(b *testing.B, hashes []byte) (pages int) {
	q := stack.Query{Owner: 2, Lookup: 1, Space: a.id, Hashes: hashes, Deadline: time.Second}
	pages, done, err := a.stack.Lookup(&q, a)
	must(b, err)
	if !done {
		pages = (<-a.answer).Pages
	}
	return pages
}

// empty has all that is borrowed returned.
func (a *asker) empty() {
	_ = a.stack.Cancel(2, 1)
	a.engine.DropPeer(0)
	for a.stack.PeerStats().Used > 0 {
		time.Sleep(20 * time.Microsecond)
		a.engine.DropPeer(0) // what was just being borrowed
	}
}

// storePrefix stores one prompt, of any length.
func storePrefix(e *engine.Engine, hashes []byte) error {
	res, _, err := e.PrepareStore(1, 0, nil, hashes, nil)
	if err == nil {
		err = e.CommitStore(1, res.Store, nil)
	}
	return err
}

// Lookups of prefixes in the own arena, and of such at a peer: borrowed anew each time, and
// lingering. The medians count: us/lookup, us to cancel it, and us to give back what was borrowed.
func BenchmarkLookup(b *testing.B) {
	dir := b.TempDir()
	must(b, os.Chmod(dir, 0o700))
	g := tiers.Geometry{PageBytes: pageBytes, PagesPerChunk: pagesPerChunk, PageTokens: 16,
		DigestBytes: 32}
	space := &tiers.Space{Fingerprint: tiers.FingerprintOf(fmt.Append(nil, g)), Geometry: g}
	other, err := newSidecar(dir, space, 1, 1<<17)
	must(b, err)
	defer other.close()
	must(b, other.fill(1<<16))
	a := newAsker(b, dir, space)
	own, theirs := digests(nil, 99, 1, hitPages), digests(nil, 99, 2, hitPages)
	must(b, storePrefix(a.engine, own))
	must(b, storePrefix(other.engine, theirs))
	for end := time.Now().Add(10 * time.Second); a.look(b, theirs) < hitPages; { // it is on its way
		if time.Now().After(end) {
			b.Fatal(a.peers.Status())
		}
		a.empty()
		time.Sleep(time.Millisecond)
	}
	a.empty()
	for _, n := range []int{64, 1024, 4096} {
		for _, kind := range []string{"own", "peer", "lingering"} {
			b.Run(fmt.Sprintf("%d/%s", n, kind), func(b *testing.B) {
				hashes := theirs[:n*32]
				if kind == "own" {
					hashes = own[:n*32]
				}
				took, ended, back := make([]float64, 0, b.N), make([]float64, 0, b.N),
					make([]float64, 0, b.N)
				b.ReportAllocs()
				for b.Loop() {
					start := time.Now()
					pages := a.look(b, hashes)
					took = append(took, us(start))
					if pages != n {
						b.Fatal(pages, a.stack.PeerStats())
					}
					start = time.Now()
					must(b, a.stack.Cancel(2, 1))
					ended = append(ended, us(start))
					if kind == "peer" {
						start = time.Now()
						a.empty()
						back = append(back, us(start))
					}
				}
				a.empty()
				for name, v := range map[string][]float64{"us/lookup": took, "us/cancel": ended,
					"us/return": back} {
					if len(v) > 0 {
						slices.Sort(v)
						b.ReportMetric(v[len(v)/2], name)
					}
				}
			})
		}
	}
}
