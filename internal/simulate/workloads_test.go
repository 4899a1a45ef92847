package simulate

import (
	"math"
	"math/rand/v2"
)

// workload writes requests of a kind that servers see. All of one seed's choices are its own, so
// traces can be made again.
type workload struct {
	*rand.Rand
	b    *Builder
	next uint64 // block id that was not used yet
}

func newWorkload(name string, seed uint64) *workload {
	return &workload{Rand: rand.New(rand.NewPCG(seed, 1)), b: NewBuilder(name), next: 1}
}

// fresh appends n new blocks.
func (w *workload) fresh(prefix []uint64, n int) []uint64 {
	out := append([]uint64(nil), prefix...)
	for range n {
		out = append(out, w.next)
		w.next++
	}
	return out
}

func (w *workload) ask(blocks []uint64) {
	if err := w.b.Add(blocks); err != nil {
		panic(err)
	}
}

// length is log-normal around a median, at least 1.
func (w *workload) length(median, spread float64) int {
	return max(1, int(median*math.Exp(spread*w.NormFloat64())+0.5))
}

// zipf draws from 0 … n-1, the first the likeliest.
func (w *workload) zipf(n int, s float64) *rand.Zipf {
	return rand.NewZipf(w.Rand, s, 4, uint64(n-1))
}

// chats is conversations of several turns, active of them at a time, each below one of a few system
// prompts. A turn's last block is half full: the next turn does not find it again.
func (w *workload) chats(requests, active int, stop float64) {
	prompts := make([][]uint64, 4)
	for i := range prompts {
		prompts[i] = w.fresh(nil, 1+2*i)
	}
	z := w.zipf(len(prompts), 1.5)
	open := make([][]uint64, active)
	begin := func() []uint64 { return w.fresh(prompts[z.Uint64()], w.length(6, 1)) }
	for i := range open {
		open[i] = begin()
	}
	for range requests {
		i := min(w.IntN(active), w.IntN(active)) // some write faster than others
		w.ask(w.fresh(open[i], 1))
		if open[i] = w.fresh(open[i], w.length(2, 0.7)); w.Float64() < stop || len(open[i]) > 200 {
			open[i] = begin()
		}
	}
}

// documents is questions about documents of skewed popularity.
func (w *workload) documents(requests, documents int, skew float64) {
	docs := make([][]uint64, documents)
	for i := range docs {
		docs[i] = w.fresh(nil, w.length(20, 0.8))
	}
	order := w.Perm(documents)
	z := w.zipf(documents, skew)
	for range requests {
		w.ask(w.fresh(docs[order[z.Uint64()]], 1+w.IntN(2)))
	}
}

// agents is runs of many quick steps, each longer by a few blocks, below system prompts that all
// runs of a kind share; some runs fork.
func (w *workload) agents(requests, kinds, active int) {
	prompts := make([][]uint64, kinds)
	for i := range prompts {
		prompts[i] = w.fresh(nil, w.length(25, 0.4))
	}
	z := w.zipf(kinds, 1.3)
	type run struct {
		blocks []uint64
		left   int
	}
	open := make([]run, active)
	begin := func() run {
		return run{w.fresh(prompts[z.Uint64()], w.length(4, 0.5)),
			3 + w.IntN(30)}
	}
	for i := range open {
		open[i] = begin()
	}
	for range requests {
		r := &open[w.IntN(active)]
		w.ask(w.fresh(r.blocks, 1))
		if w.Float64() < 0.03 {
			w.ask(w.fresh(r.blocks, 5+w.IntN(10)))
		}
		r.blocks = w.fresh(r.blocks, 1+w.IntN(3))
		if r.left--; r.left <= 0 {
			*r = begin()
		}
	}
}

// swe is runs on software: each begins with one of a few long system prompts and with a repository
// that some runs share, and sends all of its growing context again with each step. Some steps are
// sampled several times. A run may be given up at any step.
func (w *workload) swe(requests, repositories, active int) {
	prompts := [][]uint64{w.fresh(nil, 12), w.fresh(nil, 20), w.fresh(nil, 30)}
	repos := make([][]uint64, repositories)
	for i := range repos {
		repos[i] = w.fresh(prompts[w.IntN(len(prompts))], w.length(20, 0.6))
	}
	z := w.zipf(repositories, 1.2)
	type run struct {
		blocks []uint64
		left   int
	}
	begin := func() run {
		return run{w.fresh(repos[z.Uint64()], w.length(6, 0.5)), w.length(25, 0.8)}
	}
	open := make([]run, active)
	for i := range open {
		open[i] = begin()
	}
	for range requests {
		r := &open[w.IntN(active)]
		w.ask(w.fresh(r.blocks, 1))
		for w.Float64() < 0.1 {
			w.ask(w.fresh(r.blocks, 1+w.IntN(4)))
		}
		r.blocks = w.fresh(r.blocks, w.length(3, 0.8))
		if r.left--; r.left <= 0 || len(r.blocks) > 500 {
			*r = begin()
		}
	}
}

// loop asks for the same prompts in the same order again and again: an evaluation, a batch job.
func (w *workload) loop(rounds, prompts int, median float64) {
	all := make([][]uint64, prompts)
	for i := range all {
		all[i] = w.fresh(nil, w.length(median, 0.5))
	}
	for range rounds {
		for _, p := range all {
			w.ask(p)
		}
	}
}

// scan is prompts that never come back.
func (w *workload) scan(requests int, median float64) {
	for range requests {
		w.ask(w.fresh(nil, w.length(median, 0.8)))
	}
}

// workloads are what adaptive must do well on besides the published traces. size scales the number
// of requests.
func workloads(seed uint64, size int) []*Trace {
	make := func(name string, fill func(*workload)) *Trace {
		w := newWorkload(name, seed)
		fill(w)
		return w.b.Trace()
	}
	return []*Trace{
		make("chat", func(w *workload) { w.chats(4*size, size/4, 0.2) }),
		make("short-chat", func(w *workload) { w.chats(4*size, size/2, 0.6) }),
		make("documents", func(w *workload) { w.documents(4*size, size/2, 1.2) }),
		make("flat-documents", func(w *workload) { w.documents(4*size, size/4, 1.01) }),
		make("agents", func(w *workload) { w.agents(4*size, 12, size/20) }),
		make("swe", func(w *workload) { w.swe(2*size, max(size/40, 4), max(size/60, 3)) }),
		make("loop", func(w *workload) { w.loop(10, size/4, 12) }),
		make("chat+scans", func(w *workload) {
			for range 8 {
				w.chats(size/3, size/12, 0.15)
				w.scan(size/12, 20)
			}
		}),
		make("shifting", func(w *workload) {
			for range 2 {
				w.chats(size/2, size/10, 0.2)
				w.documents(size/2, size/10, 1.2)
				w.loop(4, size/10, 12)
				w.agents(size/2, 6, size/40)
				w.documents(size/2, size/5, 1.05)
			}
		}),
	}
}
