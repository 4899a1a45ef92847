package simulate

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"

	"lookaside/tiers/policy"
)

// Plan describes a simulation: each policy on each trace at each capacity.
type Plan struct {
	Traces     []*Trace
	Policies   []string
	Capacities []int // blocks
	Seed       uint64
	// Progress, if not nil, is called now and then with the part of the work that is done, from 0
	// to 1. Any goroutine may call it.
	Progress func(done float64)
}

// Run runs the plan on all cores. The results are in the plan's order: by trace, then policy, then
// capacity. The first error ends it.
func (p Plan) Run(ctx context.Context) ([]Result, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	results := make([]Result, len(p.Traces)*len(p.Policies)*len(p.Capacities))
	total := 0
	for _, t := range p.Traces {
		total += t.Requests() * len(p.Policies) * len(p.Capacities)
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
				capacity := p.Capacities[i%len(p.Capacities)]
				name := p.Policies[i/len(p.Capacities)%len(p.Policies)]
				trace := p.Traces[i/len(p.Capacities)/len(p.Policies)]
				order, err := policy.New(name, policy.Options{Seed: p.Seed})
				if err == nil {
					results[i], err = Run(ctx, trace, order, capacity, progress)
				}
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
