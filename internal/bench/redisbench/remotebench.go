// Package redisbench measures how fast chunks go to a Redis server and back. The limit is a bare
// loop of the same client that moves the same values.
package redisbench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"lookaside/dax"
	"lookaside/tiers"
	"lookaside/tiers/remote"
)

// Options selects what to move.
type Options struct {
	Server      string // host:port of a Redis server without a password. Default: one is started
	ChunkBytes  int64
	Bytes       int64 // moved in each round and direction
	Concurrency int   // concurrent calls
	Batch       int   // chunks of one call
	Split       int64 // like the tier's setting
	Serde       string
	Rounds      int
}

// Figures has a value for each round, in GB/s.
type Figures struct {
	Put, BarePut, Get, BareGet []float64
}

const pagesPerChunk = 16

// Server starts a redis-server without persistence on a port of this machine. stop ends it.
func Server(ctx context.Context) (addr string, stop func(), err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	addr = l.Addr().String()
	_, port, _ := net.SplitHostPort(addr)
	l.Close()
	dir, err := os.MkdirTemp("", "lookaside-redis-")
	if err != nil {
		return "", nil, err
	}
	var out bytes.Buffer
	cmd := exec.Command("redis-server", "--bind", "127.0.0.1", "--port", port, "--save", "",
		"--appendonly", "no", "--dir", dir)
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		return "", nil, errors.Join(fmt.Errorf("%w: install redis-server, or name a server", err),
			os.RemoveAll(dir))
	}
	stop = func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		_ = os.RemoveAll(dir)
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		conn, err := net.Dial("tcp", addr)
		if err == nil {
			conn.Close()
			return addr, stop, nil
		}
		if time.Now().After(deadline) || ctx.Err() != nil {
			stop()
			return "", nil, fmt.Errorf("redis-server does not answer: %w\n%s", err, out.String())
		}
	}
}

// Run moves chunks to a server and back, and the same number with the bare loop in between.
func (o Options) Run(ctx context.Context) (f Figures, err error) {
	n := int(o.Bytes/o.ChunkBytes) / o.Concurrency * o.Concurrency
	if n < 1 || o.Rounds < 1 || o.Batch < 1 || o.ChunkBytes%pagesPerChunk != 0 {
		return f, fmt.Errorf("bench of %d chunks of %d bytes, %d rounds: want 1 or more of %d pages", n, o.ChunkBytes, o.Rounds, pagesPerChunk)
	}
	tier, err := remote.OpenRedis(remote.RedisOptions{Addrs: []string{o.Server},
		Prefix: "lookaside-bench", SplitBytes: o.Split, Serde: o.Serde, Pool: 2 * o.Concurrency,
		DialTimeout: time.Minute})
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, tier.Close()) }()
	if err := tier.Check(ctx); err != nil {
		return f, err
	}
	bare := redis.NewClient(&redis.Options{Addr: o.Server, PoolSize: 2 * o.Concurrency,
		DialTimeout: time.Minute, ReadTimeout: time.Minute, WriteTimeout: time.Minute})
	defer func() { err = errors.Join(err, bare.Close()) }()
	size := int64(o.Concurrency*o.Batch) * o.ChunkBytes
	arena, err := dax.Create(ctx, dax.Options{SizeBytes: size, NUMANode: dax.NoNUMANode,
		Populate: true})
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, arena.Close()) }()
	rnd := rand.NewChaCha8([32]byte{1})
	_, _ = rnd.Read(arena.Bytes())

	m := &mover{o: o, n: n, tier: tier, bare: bare, arena: arena.Bytes()}
	m.space = spaceOf(o.ChunkBytes)
	defer m.clean(context.WithoutCancel(ctx))
	// The first round does not count: connections and the server's memory are new.
	for round := range o.Rounds + 1 {
		moves := []struct {
			move func(context.Context, int) error
			to   *[]float64
		}{{m.put, &f.Put}, {m.barePut, &f.BarePut}, {m.get, &f.Get}, {m.bareGet, &f.BareGet}}
		if round%2 == 1 { // the order alternates
			moves[0], moves[1], moves[2], moves[3] = moves[1], moves[0], moves[3], moves[2]
		}
		for _, x := range moves {
			speed, err := m.time(ctx, x.move)
			if err != nil {
				return f, err
			}
			if round > 0 {
				*x.to = append(*x.to, speed)
			}
		}
		if err := m.clean(ctx); err != nil {
			return f, err
		}
	}
	return f, nil
}

func spaceOf(chunkBytes int64) *tiers.Space {
	g := tiers.Geometry{PageBytes: chunkBytes / pagesPerChunk, PagesPerChunk: pagesPerChunk,
		PageTokens: 16, DigestBytes: 32}
	return &tiers.Space{Fingerprint: tiers.FingerprintOf(fmt.Append(nil, g)), Geometry: g,
		Element: "bfloat16"}
}

type mover struct {
	o     Options
	n     int
	tier  *remote.Tier
	bare  *redis.Client
	arena []byte
	space *tiers.Space
}

// time moves n chunks and returns GB/s. Each of Concurrency goroutines moves its share in batches.
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

// bytes returns the memory of a chunk. Chunks that move at the same time do not share memory.
func (m *mover) bytes(i int) []byte {
	at := int64(i%(m.o.Concurrency*m.o.Batch)) * m.o.ChunkBytes
	return m.arena[at : at+m.o.ChunkBytes]
}

// run returns the run of a chunk. Its digests are as distinct as real ones.
func (m *mover) run(i int) tiers.Run {
	rnd := rand.NewPCG(uint64(i), 1)
	h := make([]byte, 0, pagesPerChunk*32)
	for range pagesPerChunk * 4 {
		h = fmt.Appendf(h, "%08x", uint32(rnd.Uint64()))
	}
	return tiers.Run{Space: m.space, Hashes: h}
}

func (m *mover) batch(from int) (ts []tiers.Transfer) {
	for i := from; i < min(from+m.o.Batch, m.n); i++ {
		ts = append(ts, tiers.Transfer{Run: m.run(i), Bytes: m.bytes(i)})
	}
	return ts
}

func (m *mover) put(ctx context.Context, from int) error {
	var failed error
	m.tier.Store(ctx, m.batch(from), func(_ int, err error) {
		if err != nil {
			failed = err
		}
	})
	return failed
}

func (m *mover) get(ctx context.Context, from int) error {
	var failed error
	m.tier.Load(ctx, m.batch(from), func(_ int, err error) {
		if err != nil {
			failed = err
		}
	})
	return failed
}

func (m *mover) key(i int) string { return "lookaside-bench-bare/" + strconv.Itoa(i) }

func (m *mover) barePut(ctx context.Context, from int) error {
	for i := from; i < min(from+m.o.Batch, m.n); i++ {
		if err := m.bare.Set(ctx, m.key(i), m.bytes(i), 0).Err(); err != nil {
			return err
		}
	}
	return nil
}

func (m *mover) bareGet(ctx context.Context, from int) error {
	for i := from; i < min(from+m.o.Batch, m.n); i++ {
		if b, err := m.bare.Get(ctx, m.key(i)).Bytes(); err != nil ||
			int64(len(b)) != m.o.ChunkBytes {
			return fmt.Errorf("bare get of %d bytes: %w", len(b), err)
		}
	}
	return nil
}

// clean removes everything that was stored.
func (m *mover) clean(ctx context.Context) error {
	_, err := m.tier.Clear(ctx, m.space.Fingerprint)
	for i := range m.n {
		err = errors.Join(err, m.bare.Unlink(ctx, m.key(i)).Err())
	}
	return err
}
