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
	Capacities []int       // chunks; of a trace without chunks: blocks
	Tiers      []int       // likewise, of a tier below; 0 is none, and so is an empty list
	Admits     []Admission // of the tiers; an empty list is what is stored
	Seed       uint64
	// Progress, if not nil, is called now and then with the part of the work that is done, from 0
	// to 1. Any goroutine may call it.
	Progress func(done float64)
}

// Run runs the plan on all cores. The results are in the plan's order: by trace, then policy, then
// admission, then tier, then capacity. The first error ends it.
func (p Plan) Run(ctx context.Context) ([]Result, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if len(p.Tiers) == 0 {
		p.Tiers = []int{0}
	}
	if len(p.Admits) == 0 {
		p.Admits = []Admission{admitStored}
	}
	each := len(p.Policies) * len(p.Admits) * len(p.Tiers) * len(p.Capacities) // of a trace
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
				n, m := len(p.Capacities), len(p.Capacities)*len(p.Tiers)
				how := Setup{Capacity: p.Capacities[i%n], Tier: p.Tiers[i/n%len(p.Tiers)],
					Admit:  p.Admits[i/m%len(p.Admits)],
					Policy: p.Policies[i/m/len(p.Admits)%len(p.Policies)], Seed: p.Seed}
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
