// Package programbench measures how fast chunks go to a program that is a tier, and back. The limit
// is a bare loop that copies the same chunks with the same number of goroutines, in this process.
package programbench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"lookaside/dax"
	"lookaside/tiers"
	"lookaside/tiers/elsewhere"
	"lookaside/tiers/remote"
)

// Options selects what to move.
type Options struct {
	Command     []string // starts the program
	ChunkBytes  int64    // of 16 pages
	Bytes       int64    // moved in each round and direction
	Concurrency int      // concurrent calls
	Batch       int      // chunks of one call
	Isolated    bool     // the program does not map the arena
	Rounds      int
}

// Figures has a value for each round, in GB/s.
type Figures struct{ Put, BarePut, Get, BareGet []float64 }

const pagesPerChunk = 16

// Run moves chunks to the program and back, and the same number with the bare loop in between.
func (o Options) Run(ctx context.Context) (f Figures, err error) {
	m := mover{o: o, n: int(o.Bytes / o.ChunkBytes)}
	if m.n < 1 || o.Rounds < 1 || o.Batch < 1 || o.Concurrency < 1 ||
		o.ChunkBytes%pagesPerChunk != 0 {
		return f, fmt.Errorf("bench of %d chunks of %d bytes, %d rounds: want 1 or more of %d pages",
			m.n, o.ChunkBytes, o.Rounds, pagesPerChunk)
	}
	if m.tier, err = remote.OpenProgram(elsewhere.Options{Name: "bench", Command: o.Command,
		Isolated: o.Isolated}); err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, m.tier.Close()) }()
	arena, err := dax.Create(ctx, dax.Options{SizeBytes: int64(m.n) * o.ChunkBytes,
		NUMANode: dax.NoNUMANode, Populate: true})
	if err != nil {
		return f, err
	}
	// Close of the tier comes first: it waits for the program.
	defer func() { err = errors.Join(err, m.tier.Close(), arena.Close()) }()
	if err := m.tier.Check(ctx); err != nil {
		return f, err
	}
	m.tier.Program.AddRegion(elsewhere.Region{ID: 1, Kind: string(arena.Kind()), FD: arena.FD(),
		SizeBytes: arena.Size(), PageSize: arena.PageSize(), Mem: arena.Bytes()})
	_, _ = rand.NewChaCha8([32]byte{1}).Read(arena.Bytes())
	m.arena, m.values = arena.Bytes(), make([][]byte, m.n)
	g := tiers.Geometry{PageBytes: o.ChunkBytes / pagesPerChunk, PagesPerChunk: pagesPerChunk,
		PageTokens: 16, DigestBytes: 32}
	m.space = &tiers.Space{Fingerprint: tiers.FingerprintOf(fmt.Append(nil, g)), Geometry: g}
	// The first round does not count: memory is new.
	for round := range o.Rounds + 1 {
		for _, x := range []struct {
			move func(context.Context, int) error
			to   *[]float64
		}{{m.put, &f.Put}, {m.barePut, &f.BarePut}, {m.get, &f.Get}, {m.bareGet, &f.BareGet}} {
			speed, err := m.time(ctx, x.move)
			if err != nil {
				return f, err
			}
			if round > 0 {
				*x.to = append(*x.to, speed)
			}
		}
		clear(m.values)
		if _, err := m.tier.Clear(ctx, m.space.Fingerprint); err != nil {
			return f, err
		}
	}
	return f, nil
}

type mover struct {
	o      Options
	n      int
	tier   *remote.ProgramTier
	arena  []byte
	space  *tiers.Space
	values [][]byte // of the bare loop
}

// time moves all chunks and returns GB/s.
func (m *mover) time(ctx context.Context, move func(ctx context.Context, from int) error) (float64,
	error) {
	var failed atomic.Pointer[error]
	var next atomic.Int64
	var wait sync.WaitGroup
	start := time.Now()
	for range m.o.Concurrency {
		wait.Go(func() {
			for failed.Load() == nil {
				from := int(next.Add(int64(m.o.Batch))) - m.o.Batch
				if from >= m.n {
					return
				}
				if err := move(ctx, from); err != nil {
					failed.Store(&err)
				}
			}
		})
	}
	wait.Wait()
	took := time.Since(start)
	if err := failed.Load(); err != nil {
		return 0, *err
	}
	return float64(m.n) * float64(m.o.ChunkBytes) / took.Seconds() / 1e9, nil
}

func (m *mover) bytes(i int) []byte {
	return m.arena[int64(i)*m.o.ChunkBytes : int64(i+1)*m.o.ChunkBytes]
}

func (m *mover) batch(from int) (ts []tiers.Transfer) {
	for i := from; i < min(from+m.o.Batch, m.n); i++ {
		rnd := rand.NewPCG(uint64(i), 1)
		var h []byte
		for range pagesPerChunk * 4 {
			h = fmt.Appendf(h, "%08x", uint32(rnd.Uint64()))
		}
		ts = append(ts, tiers.Transfer{Run: tiers.Run{Space: m.space, Hashes: h},
			Bytes: m.bytes(i)})
	}
	return ts
}

func (m *mover) put(ctx context.Context, from int) (failed error) {
	m.tier.Store(ctx, m.batch(from), func(_ int, err error) { failed = errors.Join(failed, err) })
	return failed
}

func (m *mover) get(ctx context.Context, from int) (failed error) {
	m.tier.Load(ctx, m.batch(from), func(_ int, err error) { failed = errors.Join(failed, err) })
	return failed
}

func (m *mover) barePut(_ context.Context, from int) error {
	for i := from; i < min(from+m.o.Batch, m.n); i++ {
		m.values[i] = append([]byte(nil), m.bytes(i)...)
	}
	return nil
}

func (m *mover) bareGet(_ context.Context, from int) error {
	for i := from; i < min(from+m.o.Batch, m.n); i++ {
		copy(m.bytes(i), m.values[i])
	}
	return nil
}
