// Package daxbench measures the tier on DAX devices: restores and stores beside a bare copy loop,
// how fast a pool with many slots opens, and how a migration affects lookups.
package daxbench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"lookaside/dax"
	"lookaside/dax/memcopy"
	"lookaside/tiers"
	"lookaside/tiers/daxtier"
)

// Transfers selects what to move.
type Transfers struct {
	// Dir is the directory of the files that stand in for devices. It should be in memory, or the
	// bench measures the disk. Default /dev/shm.
	Dir       string
	SlotBytes int64 // of a chunk of 16 pages
	Chunks    int   // restored and stored in each round
	Threads   int   // threads that copy
	Regions   int   // see daxtier.Options.MaxRegions
	Kind      dax.Kind
	Rounds    int
}

// Figures has values in GB/s, one or more for each round. Small chunks move quickly, so their
// rounds are measured several times.
type Figures struct {
	Memory         string // what the arena is made of
	Chunks         int    // fewer than wanted if memory is short
	Restore, Store Direction
}

// Direction has the values of one direction. The three ways are measured by turns.
type Direction struct {
	Tier  []float64
	Plain []float64 // the built-in copy
	Side  []float64 // memcopy.Copy: four pages side by side, past the caches
}

// Limit returns the values of the faster bare loop, by its median, and its name.
func (d *Direction) Limit() (values []float64, loop string) {
	median := func(v []float64) float64 { return slices.Sorted(slices.Values(v))[len(v)/2] }
	if median(d.Side) > median(d.Plain) {
		return d.Side, "four pages side by side past the caches"
	}
	return d.Plain, "the built-in copy"
}

const (
	defaultDir   = "/dev/shm"
	pagesPerSlot = 16
	// arenaBytes bounds the arena. If the chunks are more than it holds, it is used several times.
	arenaBytes = 1 << 30
	// roundBytes is what a round moves, in up to roundTurns turns.
	roundBytes = 1 << 30
	roundTurns = 4
)

// makeDir makes a new directory in dir. remove removes it.
func makeDir(dir string) (path string, remove func(error) error, err error) {
	if dir == "" {
		dir = defaultDir
	}
	path, err = os.MkdirTemp(dir, "lookaside-dax-")
	return path, func(err error) error { return errors.Join(err, os.RemoveAll(path)) }, err
}

// Run stores and restores chunks. A bare loop copies as much with as many threads in between.
func (o Transfers) Run(ctx context.Context) (f Figures, err error) {
	if o.SlotBytes < pagesPerSlot*256 || o.Chunks < 1 || o.Rounds < 1 || o.Threads < 1 {
		return f, fmt.Errorf("bench of %d slots of %d bytes, %d threads, %d rounds: want 1 or more",
			o.Chunks, o.SlotBytes, o.Threads, o.Rounds)
	}
	n := o.Chunks
	sizes := func() (device, arena int64) {
		device = (int64(n)*(o.SlotBytes+64<<10) + 64<<20) / dax.HugePageSize * dax.HugePageSize
		return device, min(arenaBytes/o.SlotBytes, int64(n)) * o.SlotBytes
	}
	for n > 1 {
		device, arena := sizes()
		if dax.CheckBudget(2*(device+2*arena), dax.KindMemfd, dax.BudgetReserve) == nil {
			// half of the available memory
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
	arena, err := dax.Create(ctx, dax.Options{Kind: o.Kind, SizeBytes: arenaSize,
		NUMANode: dax.NoNUMANode, Populate: true})
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, arena.Close()) }()
	f.Memory = string(arena.Kind())
	p, err := daxtier.Open(daxtier.Options{
		// the chunks stored last stay
		Devices:    []daxtier.DeviceSpec{{Path: filepath.Join(dir, "dax0.0"), SizeBytes: device}},
		AllowFiles: true, SlabBytes: device, Policy: "lru",
		LoadWorkers: o.Threads, StoreWorkers: o.Threads, MaxRegions: o.Regions,
	})
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	// The limit is on memory of the same kind.
	limit, err := dax.OpenDevice(dax.DeviceOptions{Path: filepath.Join(dir, "limit"),
		SizeBytes: (arenaSize + dax.HugePageSize - 1) / dax.HugePageSize * dax.HugePageSize,
		AllowFile: true})
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, limit.Close()) }()
	g := tiers.Geometry{PageBytes: o.SlotBytes / pagesPerSlot, PagesPerChunk: pagesPerSlot,
		PageTokens: 16, DigestBytes: 32}
	m := mover{o: o, p: p, n: n, arena: arena.Bytes(), limit: limit.Bytes(),
		space: &tiers.Space{Fingerprint: tiers.FingerprintOf(fmt.Append(nil, g)), Geometry: g}}
	fill(m.arena)
	copy(m.limit, m.arena)
	// The pages of the files are mapped by the first turn, which does not count.
	turns := o.Rounds * min(roundTurns, max(1, int(roundBytes/(int64(n)*o.SlotBytes))))
	for turn := range turns + 1 {
		if ctx.Err() != nil {
			return f, context.Cause(ctx)
		}
		batches := m.batches(turn)
		for _, store := range []bool{true, false} {
			d := &f.Restore
			if store {
				d = &f.Store
			}
			ways := []func() error{
				func() (err error) {
					d.Tier, err = m.move(ctx, batches, store,
						d.Tier)
					return err
				},
				func() error {
					d.Plain = m.loop(store, func(dst, src []byte) { copy(dst, src) },
						d.Plain)
					return nil
				},
				func() error {
					d.Side = m.loop(store, func(dst, src []byte) { memcopy.Copy(dst, src) }, d.Side)
					return nil
				},
			}
			for i := range ways { // the first may find the processors asleep
				if err := ways[(turn+i)%len(ways)](); err != nil {
					return f, err
				}
			}
			if turn == 0 {
				*d = Direction{}
			}
		}
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
	p            *daxtier.Pool
	n            int
	arena, limit []byte
	space        *tiers.Space
}

// batches returns what to store and then restore in a turn: new chunks, in calls of as many as the
// arena holds.
func (m *mover) batches(turn int) (calls [][]tiers.Transfer) {
	size := int(m.o.SlotBytes)
	per := len(m.arena) / size
	for from := 0; from < m.n; from += per {
		ts := make([]tiers.Transfer, min(per, m.n-from))
		for i := range ts {
			ts[i] = tiers.Transfer{Run: tiers.Run{Space: m.space,
				Hashes: digests(nil, turn*m.n+from+i)}, Bytes: m.arena[i*size : (i+1)*size]}
		}
		calls = append(calls, ts)
	}
	return calls
}

// move stores or restores chunks, and appends the speed in GB/s.
func (m *mover) move(ctx context.Context, batches [][]tiers.Transfer, store bool,
	speeds []float64) ([]float64, error) {
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
		return nil, *err
	}
	return append(speeds, m.gigabytes()/took), nil
}

// gigabytes returns how much goes each way in a turn.
func (m *mover) gigabytes() float64 { return float64(m.n) * float64(m.o.SlotBytes) / 1e9 }

// loop copies as much between the arena and the limit's memory, with as many threads, and appends
// the speed in GB/s.
func (m *mover) loop(store bool, do func(dst, src []byte), speeds []float64) []float64 {
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
	return append(speeds, m.gigabytes()/time.Since(start).Seconds())
}
