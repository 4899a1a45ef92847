package engine

import (
	"math/rand/v2"
	"testing"
)

// TestFlightTable: it is a map, whatever collides in it.
func TestFlightTable(t *testing.T) {
	for _, bits := range []int{3, 7, 64} { // of the hashes that come up
		rnd := rand.New(rand.NewPCG(1, uint64(bits)))
		var table flightTable
		want := map[uint64]uint32{}
		for step := range 20_000 {
			hash := rnd.Uint64() >> (64 - bits) << rnd.IntN(2)
			ref := uint32(1 + rnd.IntN(3))
			if step/2000%2 == 0 && rnd.IntN(3) > 0 {
				table.set(hash, ref)
				want[hash] = ref
			} else {
				if len(want) > 0 && rnd.IntN(2) == 0 { // one that is there
					for hash, ref = range want {
						break
					}
				}
				table.remove(hash, ref)
				if want[hash] == ref {
					delete(want, hash)
				}
			}
			if table.get(hash) != want[hash] || table.n != len(want) {
				t.Fatalf("step %d: hash %#x has %d of %d, want %d of %d", step, hash,
					table.get(hash), table.n, want[hash], len(want))
			}
			if step%500 == 0 {
				for hash, ref := range want {
					if table.get(hash) != ref {
						t.Fatalf("step %d: hash %#x has %d, want %d", step, hash, table.get(hash),
							ref)
					}
				}
			}
		}
	}
}
