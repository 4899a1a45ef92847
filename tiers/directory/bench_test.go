package directory

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/tiertest"
)

// filled is a process that holds n chunks of whole pages, and has kept none of them.
func filled(b *testing.B, g tiers.Geometry, n int) (*machine, *process) {
	m := newMachine(b, g)
	p := m.start(engine.Config{MaxPages: 1 << 20}, nil)
	p.addRegion((n + 1) * g.PagesPerChunk * int(g.PageBytes))
	for i := 0; i < n; i += 100 {
		prefix := make(tiertest.Prefix, min(100, n-i)*g.PagesPerChunk)
		copy(prefix, fmt.Sprint(i))
		if x := p.prepare(0, prefix, 0, len(prefix)); x != nil {
			p.commit(x) // its bytes do not matter
		}
	}
	if got := p.e.Stats().ReadySlots; got < n {
		b.Fatalf("%d chunks of %d", got, n)
	}
	return m, p
}

// BenchmarkKeep keeps chunks of 16 pages. The checksums are a part of it.
func BenchmarkKeep(b *testing.B) {
	for _, page := range []int64{256, 4096, 64 << 10} {
		b.Run(fmt.Sprintf("page=%d", page), func(b *testing.B) {
			g := tiers.Geometry{PageBytes: page, PagesPerChunk: 16, PageTokens: 16, DigestBytes: 32}
			n := int(min(20_000, 1<<28/page/16))
			for b.Loop() {
				b.StopTimer()
				m, p := filled(b, g, n)
				for i := 0; i < len(m.memory[0]); i += 4096 {
					m.memory[0][i] = 1 // it is there
				}
				k := newScratch()
				b.StartTimer()
				for range n {
					p.d.keepNext(k)
				}
				b.StopTimer()
				if got := p.d.Stats().Kept; got < n {
					b.Fatalf("%d chunks of %d", got, n)
				}
				p.close()
				b.StartTimer()
			}
			each := float64(b.Elapsed().Nanoseconds()) / float64(b.N) / float64(n)
			b.ReportMetric(each, "ns/chunk")
			b.ReportMetric(float64(page)*16/each, "GB/s")
		})
	}
}

// BenchmarkGone drops chunks of 16 pages, all at once, with and without their entries.
func BenchmarkGone(b *testing.B) {
	for _, kept := range []bool{false, true} {
		b.Run(fmt.Sprintf("kept=%v", kept), func(b *testing.B) {
			g := tiers.Geometry{PageBytes: 256, PagesPerChunk: 16, PageTokens: 16, DigestBytes: 32}
			const n = 100_000
			for b.Loop() {
				b.StopTimer()
				_, p := filled(b, g, n)
				if kept {
					p.keepAll()
				}
				b.StartTimer()
				p.e.ClearSpace(p.ids[0])
				b.StopTimer()
				p.close()
				b.StartTimer()
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/n, "ns/chunk")
		})
	}
}

// BenchmarkRestore finds chunks of 16 pages.
func BenchmarkRestore(b *testing.B) {
	for _, n := range []int{10_000, 100_000} {
		b.Run(fmt.Sprintf("chunks=%d", n), func(b *testing.B) {
			g := tiers.Geometry{PageBytes: 256, PagesPerChunk: 16, PageTokens: 16, DigestBytes: 32}
			m, p := filled(b, g, n)
			p.keepAll()
			p.close()
			b.ResetTimer()
			for b.Loop() {
				q := m.start(engine.Config{MaxPages: 1 << 20}, nil)
				b.StopTimer()
				if q.found.Chunks < n {
					b.Fatalf("%+v", q.found)
				}
				q.close()
				b.StartTimer()
			}
		})
	}
}

// BenchmarkOnGone is what a chunk that leaves costs more under the engine's lock. The chunks lie at
// random places.
func BenchmarkOnGone(b *testing.B) {
	g := tiers.Geometry{PageBytes: 256, PagesPerChunk: 16, PageTokens: 16, DigestBytes: 32}
	const n = 20_000
	_, p := filled(b, g, n)
	defer p.close()
	p.keepAll()
	all := list(p.e)
	rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	b.ReportAllocs()
	for b.Loop() {
		b.StopTimer()
		for _, v := range all {
			x := p.d.pieces[v.Piece].Load()
			x.region.view.store(x.entry(v.Slot), 1)
		}
		b.StartTimer()
		for i := range all {
			p.d.onGone(all[i].Piece, all[i].Slot)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(all)), "ns/chunk")
}
