package stack

import (
	"math/rand/v2"
	"testing"

	"lookaside/tiers/tiertest"
)

// A lookup that the arena answers costs with tiers what it costs without.
func BenchmarkLookup(b *testing.B) {
	for name, tiers := range map[string][]tiertest.MemoryOptions{"arena": nil,
		"tiers": {{Local: true}, {}}} {
		b.Run(name, func(b *testing.B) {
			r := newRig(b, rigOptions{slots: 1024, tiers: tiers})
			defer r.close()
			p := prefix(rand.New(rand.NewPCG(1, 1)), 1024)
			r.store(p, 1024)
			q := Query{Owner: scheduler, Lookup: 1, Space: r.id, Hashes: p.Digests(0, 1024, 32)}
			b.ReportAllocs()
			for b.Loop() {
				if pages, done, err := r.Lookup(&q, r); pages != 1024 || !done || err != nil {
					b.Fatal(pages, done, err)
				}
			}
		})
	}
}
