// Package poolbench measures the tier on DAX devices: restores and stores beside a bare copy loop, how fast a pool with many slots opens, and what lookups feel of a migration.
package poolbench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"lookaside/dax"
	"lookaside/dax/memcopy"
	"lookaside/tiers"
	"lookaside/tiers/chunk"
	"lookaside/tiers/pool"
)

// Transfers says what to move.
type Transfers struct {
	// Dir is where files are made that stand in for devices: in memory, or the disk is what is measured. Default /dev/shm.
	Dir       string
	SlotBytes int64 // of a chunk of 16 pages
	Chunks    int   // that are restored and stored a round
	Threads   int   // that copy
	Regions   int   // see pool.Options.MaxRegions
	Kind      dax.Kind
	Rounds    int
}

// Figures has a value for each round, in GB/s.
type Figures struct {
	Memory              string // what the arena is made of
	Chunks              int    // fewer than wanted where memory is short
	Restore, RestoreLim []float64
	Store, StoreLim     []float64
	Loop                string // which copy was the faster limit, in most rounds
}

const (
	defaultDir   = "/dev/shm"
	pagesPerSlot = 16
	// arenaBytes bounds the arena, which is gone through again and again where the chunks are more.
	arenaBytes = 1 << 30
)

// makeDir makes a directory of its own in dir. remove takes it away.
func makeDir(dir string) (path string, remove func(error) error, err error) {
	if dir == "" {
		dir = defaultDir
	}
	path, err = os.MkdirTemp(dir, "lookaside-dax-")
	return path, func(err error) error { return errors.Join(err, os.RemoveAll(path)) }, err
}

// Run stores and restores chunks, a bare loop copying as much with as many threads in between.
func (o Transfers) Run(ctx context.Context) (f Figures, err error) {
	if o.SlotBytes < pagesPerSlot*256 || o.Chunks < 1 || o.Rounds < 1 || o.Threads < 1 {
		return f, fmt.Errorf("bench of %d slots of %d bytes, %d threads, %d rounds: want 1 or more", o.Chunks, o.SlotBytes, o.Threads, o.Rounds)
	}
	n := o.Chunks
	sizes := func() (device, arena int64) {
		device = (int64(n)*(o.SlotBytes+64<<10) + 64<<20) / dax.HugePageSize * dax.HugePageSize
		return device, min(arenaBytes/o.SlotBytes, int64(n)) * o.SlotBytes
	}
	for n > 1 {
		device, arena := sizes()
		if dax.CheckBudget(2*(device+2*arena), dax.KindMemfd) == nil { // half of what there is
			break
		}
		n /= 2
	}
	f.Chunks = n
	device, arenaSize := sizes()
	dir, remove, err := makeDir(o.Dir)
	if err != nil {
		return f, err
	}
	defer func() { err = remove(err) }()
	arena, err := dax.Create(dax.Options{Kind: o.Kind, SizeBytes: arenaSize, NUMANode: dax.NoNUMANode, Populate: true})
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, arena.Close()) }()
	f.Memory = string(arena.Kind())
	p, err := pool.Open(pool.Options{
		Devices: []pool.DeviceSpec{{Path: filepath.Join(dir, "dax0.0"), SizeBytes: device}}, AllowFiles: true, SlabBytes: device, Policy: "lru", // what is stored last stays
		LoadWorkers: o.Threads, StoreWorkers: o.Threads, MaxRegions: o.Regions,
	})
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	// The limit is on memory of the same kind.
	limit, err := dax.OpenDevice(dax.DeviceOptions{Path: filepath.Join(dir, "limit"), SizeBytes: (arenaSize + dax.HugePageSize - 1) / dax.HugePageSize * dax.HugePageSize, AllowFile: true})
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, limit.Close()) }()
	g := tiers.Geometry{PageBytes: o.SlotBytes / pagesPerSlot, PagesPerChunk: pagesPerSlot, PageTokens: 16, DigestBytes: 32}
	m := mover{o: o, p: p, n: n, arena: arena.Bytes(), limit: limit.Bytes(), space: &tiers.Space{Fingerprint: chunk.FingerprintOf(fmt.Append(nil, g)), Geometry: g}}
	fill(m.arena)
	copy(m.limit, m.arena)
	// The pages of the files are mapped by the first round, which does not count.
	fast := 0
	for round := range o.Rounds + 1 {
		if ctx.Err() != nil {
			return f, context.Cause(ctx)
		}
		for _, store := range []bool{true, false} {
			speed, err := m.move(ctx, round, store)
			if err != nil {
				return f, err
			}
			ours, plain := m.loop(store, func(dst, src []byte) { memcopy.Copy(dst, src) }), m.loop(store, func(dst, src []byte) { copy(dst, src) })
			if ours > plain {
				fast++
			}
			switch {
			case round == 0:
			case store:
				f.Store, f.StoreLim = append(f.Store, speed), append(f.StoreLim, max(ours, plain))
			default:
				f.Restore, f.RestoreLim = append(f.Restore, speed), append(f.RestoreLim, max(ours, plain))
			}
		}
	}
	f.Loop = "the built-in copy"
	if fast > o.Rounds {
		f.Loop = "four pages side by side past the caches"
	}
	return f, nil
}

// fill writes bytes that are not all the same.
func fill(p []byte) {
	x := uint64(88172645463325252)
	for i := 0; i+8 <= len(p); i += 8 {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		for j := range 8 {
			p[i+j] = byte(x >> (8 * j))
		}
	}
}

type mover struct {
	o            Transfers
	p            *pool.Pool
	n            int
	arena, limit []byte
	space        *tiers.Space
}

// move stores as many new chunks, or restores those of the round, a batch for what the arena holds. It answers GB/s.
func (m *mover) move(ctx context.Context, round int, store bool) (speed float64, err error) {
	size := int(m.o.SlotBytes)
	per := len(m.arena) / size
	batches := [][]tiers.Transfer{}
	for from := 0; from < m.n; from += per {
		ts := make([]tiers.Transfer, min(per, m.n-from))
		for i := range ts {
			ts[i] = tiers.Transfer{Run: tiers.Run{Space: m.space, Hashes: digests(nil, round*m.n+from+i)}, Bytes: m.arena[i*size : (i+1)*size]}
		}
		batches = append(batches, ts)
	}
	var failed atomic.Pointer[error]
	done := func(_ int, err error) {
		if err != nil {
			failed.Store(&err)
		}
	}
	start := time.Now()
	for _, ts := range batches {
		if store {
			m.p.Store(ctx, ts, done)
		} else {
			m.p.Load(ctx, ts, done)
		}
	}
	took := time.Since(start).Seconds()
	if err := failed.Load(); err != nil {
		return 0, *err
	}
	return float64(m.n) * float64(size) / 1e9 / took, nil
}

// loop copies as much between the arena and the memory that is the limit, with as many threads. It answers GB/s.
func (m *mover) loop(store bool, do func(dst, src []byte)) float64 {
	size := int(m.o.SlotBytes)
	per := len(m.arena) / size
	dst, src := m.arena, m.limit
	if store {
		dst, src = src, dst
	}
	var next atomic.Int64
	var wait sync.WaitGroup
	start := time.Now()
	for range m.o.Threads {
		wait.Go(func() {
			for i := int(next.Add(1)) - 1; i < m.n; i = int(next.Add(1)) - 1 {
				at := i % per * size
				do(dst[at:at+size], src[at:at+size])
			}
		})
	}
	wait.Wait()
	return float64(m.n) * float64(size) / 1e9 / time.Since(start).Seconds()
}
