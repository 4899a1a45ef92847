package simulate

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
)

// Plan describes a simulation: each policy on each trace with each tier at each capacity.
type Plan struct {
	Traces     []*Trace
	Policies   []string
	Capacities []int // chunks; of a trace without chunks: blocks
	Tiers      []int // likewise, of a tier below; 0 is none, and so is an empty list
	OnEviction bool  // see Setup
	Seed       uint64
	// Progress, if not nil, is called now and then with the part of the work that is done, from 0
	// to 1. Any goroutine may call it.
	Progress func(done float64)
}

// Run runs the plan on all cores. The results are in the plan's order: by trace, then policy, then
// tier, then capacity. The first error ends it.
func (p Plan) Run(ctx context.Context) ([]Result, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if len(p.Tiers) == 0 {
		p.Tiers = []int{0}
	}
	each := len(p.Policies) * len(p.Tiers) * len(p.Capacities) // of a trace
	results := make([]Result, len(p.Traces)*each)
	total := 0
	for _, t := range p.Traces {
		total += t.Requests() * each
	}
	var done, next atomic.Int64
	progress := func(requests int) {
		if p.Progress != nil {
			p.Progress(float64(done.Add(int64(requests))) / float64(max(total, 1)))
		}
	}
	var wg sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), len(results)) {
		wg.Go(func() {
			for ctx.Err() == nil {
				i := int(next.Add(1)) - 1
				if i >= len(results) {
					return
				}
				n := len(p.Capacities)
				how := Setup{Capacity: p.Capacities[i%n], Tier: p.Tiers[i/n%len(p.Tiers)],
					Policy: p.Policies[i/n/len(p.Tiers)%len(p.Policies)], Seed: p.Seed,
					OnEviction: p.OnEviction}
				var err error
				results[i], err = Run(ctx, p.Traces[i/each], how, progress)
				if err != nil {
					cancel(err)
				}
			}
		})
	}
	wg.Wait()
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	return results, nil
}
