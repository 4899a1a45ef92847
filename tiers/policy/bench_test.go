package policy

import (
	"math/rand/v2"
	"testing"
)

// BenchmarkUse is a lookup's part: chunks of a prefix are used that are leased, so nothing moves.
// They are neighbours, as chunks of a prefix mostly are, or lie in random places of a table larger
// than the caches.
func BenchmarkUse(b *testing.B) {
	const slots, run = 1 << 20, 256
	for _, name := range Names() {
		p := full(name, slots)
		rnd := rand.New(rand.NewPCG(1, 2))
		for _, scattered := range []bool{false, true} {
			var refs [1 << 16]uint32
			for i := range refs {
				if refs[i] = 1<<SlotBits | rnd.Uint32N(slots); !scattered && i%run > 0 {
					refs[i] = 1<<SlotBits | (refs[i-1]&SlotMask+1)%slots
				}
			}
			b.Run(name+map[bool]string{true: "/scattered"}[scattered], func(b *testing.B) {
				b.ReportAllocs()
				for i := 0; i < b.N; i += run {
					for _, ref := range refs[i%len(refs):][:run] {
						p.Use(ref)
					}
				}
			})
		}
	}
}

// BenchmarkTurnover is what a new chunk costs in all: a victim leaves, a chunk enters and is
// offered.
func BenchmarkTurnover(b *testing.B) {
	const slots = 1 << 16
	for _, name := range Names() {
		b.Run(name, func(b *testing.B) {
			p := full(name, slots)
			for i := range uint32(slots) {
				p.Offer(1<<SlotBits | i)
			}
			b.ReportAllocs()
			key := uint64(1) << 40
			for b.Loop() {
				v, ok := p.Victim(0)
				if !ok {
					b.Fatal("nothing is offered")
				}
				p.Leave(v, true)
				key++
				p.Enter(v, mix(key), 0, 0)
				p.Offer(v)
			}
		})
	}
}

// BenchmarkWork is one step.
func BenchmarkWork(b *testing.B) {
	p := full("adaptive", 1<<20)
	for b.Loop() {
		p.Use(1 << SlotBits)
		p.Work(1)
	}
}

func full(name string, slots int) Policy {
	p, err := New(name, Options{Seed: 1})
	if err != nil {
		panic(err)
	}
	p.Grow(1, slots)
	for i := range uint32(slots) {
		p.Enter(1<<SlotBits|i, mix(uint64(i)+1), 0, 0)
	}
	return p
}
