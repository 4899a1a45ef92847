// Package memcopybench measures the copies of package memcopy against the built-in copy.
package memcopybench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"time"

	"lookaside/dax"
	"lookaside/dax/memcopy"
	"lookaside/internal/bench/copypool"
)

// Options selects what to measure. Zero values mean the defaults.
type Options struct {
	// SizesBytes of single copies; default 16 KiB, 64 KiB, 256 KiB, 2 MiB and 32 MiB.
	SizesBytes []int
	// Threads that copy side by side; default 1 and one a core.
	Threads []int
	// Rounds of each; default 9.
	Rounds int
	// WorkingSetBytes of source and of destination, each: far more than the caches hold; default
	// 256 MiB.
	WorkingSetBytes int64
	// Kind of the memory on both sides; default dax.KindAuto, as an arena's.
	Kind dax.Kind
}

// Measurement is the speed of copies of one size in each round, in 10⁹ bytes a second, all threads
// together.
type Measurement struct {
	SizeBytes int
	Threads   int
	GoCopy    []float64 // the built-in copy: the limit to beat
	Copy      []float64 // memcopy.Copy
	Pool      []float64 // copypool.Pool.Do, which yields to all other work
}

// Run times the built-in copy, [memcopy.Copy] and [copypool.Pool.Do] between two regions. The three
// take turns, so that noise on the machine affects all of them. Each round copies one working set,
// at seeded random offsets. Run stops early when ctx ends.
func Run(ctx context.Context, o Options) (out []Measurement, err error) {
	if len(o.SizesBytes) == 0 {
		o.SizesBytes = []int{16 << 10, 64 << 10, 256 << 10, 2 << 20, 32 << 20}
	}
	if len(o.Threads) == 0 {
		o.Threads = []int{1}
		if n := runtime.GOMAXPROCS(0); n > 1 {
			o.Threads = append(o.Threads, n)
		}
	}
	if o.Rounds <= 0 {
		o.Rounds = 9
	}
	if o.WorkingSetBytes <= 0 {
		o.WorkingSetBytes = 256 << 20
	}
	if largest := slices.Max(o.SizesBytes); slices.Min(o.SizesBytes) <= 0 ||
		int64(largest) > o.WorkingSetBytes ||
		slices.Min(o.Threads) <= 0 {
		return nil, fmt.Errorf("sizes must be from 1 to the working set of %d bytes, threads positive",
			o.WorkingSetBytes)
	}
	var memory [2][]byte
	for i := range memory {
		r, err := dax.Create(ctx, dax.Options{Kind: o.Kind, SizeBytes: o.WorkingSetBytes,
			NUMANode: dax.NoNUMANode, Populate: true})
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, r.Close()) }()
		memory[i] = r.Bytes()
	}
	for _, threads := range o.Threads {
		pool := copypool.New(threads)
		defer pool.Close()
		for _, size := range o.SizesBytes {
			m, err := measure(ctx, o, pool, memory[0], memory[1], size, threads)
			if err != nil {
				return nil, err
			}
			out = append(out, m)
		}
	}
	return out, nil
}

func measure(ctx context.Context, o Options, pool *copypool.Pool, dst, src []byte, size,
	threads int) (Measurement, error) {
	random := rand.New(rand.NewPCG(1, uint64(size)))
	pages := (len(dst) - size) / 4096
	jobs := make([]copypool.Job, max(len(dst)/size, threads))
	for i := range jobs {
		d, s := random.IntN(pages+1)*4096, random.IntN(pages+1)*4096
		jobs[i] = copypool.Job{Dst: dst[d : d+size], Src: src[s : s+size]}
	}
	total := float64(len(jobs) * size)
	each := func(copy func(dst, src []byte) int) func() error {
		return func() error {
			var wg sync.WaitGroup
			for t := range threads {
				wg.Go(func() {
					for i := t; i < len(jobs); i += threads {
						copy(jobs[i].Dst, jobs[i].Src)
					}
				})
			}
			wg.Wait()
			return nil
		}
	}
	ways := []func() error{
		each(func(dst, src []byte) int { return copy(dst, src) }),
		each(memcopy.Copy),
		func() error { return pool.Do(ctx, jobs...) },
	}
	speeds := make([][]float64, len(ways))
	for range o.Rounds {
		for i, way := range ways {
			if err := ctx.Err(); err != nil {
				return Measurement{}, err
			}
			start := time.Now()
			if err := way(); err != nil {
				return Measurement{}, err
			}
			speeds[i] = append(speeds[i], total/time.Since(start).Seconds()/1e9)
		}
	}
	return Measurement{SizeBytes: size, Threads: threads, GoCopy: speeds[0], Copy: speeds[1],
		Pool: speeds[2]}, nil
}
