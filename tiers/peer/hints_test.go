package peer

import (
	"encoding/binary"
	"flag"
	"fmt"
	"math/bits"
	"testing"

	"lookaside/tiers"
)

var (
	seedFlag  = flag.Uint64("peer.seed", 0, "replay this one seed of the histories")
	seedsFlag = flag.Int("peer.seeds", 6, "seeds of the histories to run")
	stepsFlag = flag.Int("peer.steps", 400, "steps of each history")
)

func seeds() []uint64 {
	if *seedFlag != 0 {
		return []uint64{*seedFlag}
	}
	out := make([]uint64, *seedsFlag)
	for i := range out {
		out[i] = uint64(i + 1)
	}
	return out
}

func testTable(t testing.TB, limit int64) *hintTable {
	t.Helper()
	h, err := newHintTable(limit)
	check(t, err)
	t.Cleanup(h.close)
	return h
}

// who is what the table says of one page, whatever it masks out.
func (t *hintTable) who(key uint64, mask uint64) uint64 {
	t.mu.RLock()
	defer t.mu.RUnlock()
	var out [1]uint64
	t.lookUp([]uint64{key}, mask, out[:])
	return out[0]
}

// check checks that every entry can be found and is counted, and answers how many there are.
func (t *hintTable) check() (entries int, err error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	for _, s := range []*hintSlots{&t.cur, &t.old} {
		n := 0
		for _, h := range s.slots {
			if h.key == 0 {
				continue
			}
			n++
			if f := s.find(h.key); f == nil || *f != h {
				return 0, fmt.Errorf("the entry of %x is not found", h.key)
			}
		}
		if n != s.used {
			return 0, fmt.Errorf("%d entries, counted %d", n, s.used)
		}
		entries += n
	}
	return entries, nil
}

// Random histories of peers that come, say what they hold, say it anew and leave, against maps.
func TestHintsAgainstModel(t *testing.T) {
	for _, seed := range seeds() {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			rnd := seeded(seed)
			h := testTable(t, 4<<20)
			held := map[int]map[uint64]bool{} // by bit
			keys := make([]uint64, 20000)
			for i := range keys {
				keys[i] = rnd.Uint64() | 1
			}
			var open []int
			for range 3 * *stepsFlag {
				switch op := rnd.IntN(20); {
				case op < 2 && len(open) < 30:
					bit, _ := h.take()
					if bit < 0 {
						h.sweep()
						continue
					}
					if held[bit] != nil {
						t.Fatalf("bit %d is given out twice", bit)
					}
					open, held[bit] = append(open, bit), map[uint64]bool{}
				case op < 3 && len(open) > 0:
					i := rnd.IntN(len(open))
					h.retire(open[i])
					delete(held, open[i])
					open = append(open[:i], open[i+1:]...)
				case op < 10:
					h.sweep()
				case len(open) > 0:
					bit := open[rnd.IntN(len(open))]
					var words []byte
					for range rnd.IntN(700) {
						k := keys[rnd.IntN(len(keys))]
						if rnd.IntN(3) == 0 {
							words = binary.LittleEndian.AppendUint64(words, k&^1)
							delete(held[bit], k)
						} else {
							words = binary.LittleEndian.AppendUint64(words, k)
							held[bit][k] = true
						}
					}
					h.apply(bit, words)
				}
				for range 20 {
					k := keys[rnd.IntN(len(keys))]
					var want uint64
					for bit, m := range held {
						if m[k] {
							want |= 1 << bit
						}
					}
					if got := h.who(k, h.mask); got != want {
						t.Fatalf("page %x is held by %b, should be %b", k, got, want)
					}
				}
			}
			for h.sweep() {
			}
			all := map[uint64]bool{}
			for bit, m := range held {
				for k := range m {
					all[k] = true
				}
				if n := h.held(bit); n != len(m) {
					t.Errorf("%d pages of bit %d, should be %d", n, bit, len(m))
				}
			}
			if n, err := h.check(); err != nil || n != len(all) {
				t.Fatalf("%d entries, should be %d; %v", n, len(all), err)
			}
			if n := bits.OnesCount64(h.free); n != 64-len(open) || h.dropped != 0 {
				t.Fatalf("%d bits are free with %d in use, %d hints dropped", n, len(open),
					h.dropped)
			}
			for _, bit := range open {
				h.retire(bit)
			}
			for h.sweep() {
			}
			if n, err := h.check(); err != nil || n != 0 || h.free != ^uint64(0) {
				t.Fatalf("%d entries are left, %v", n, err)
			}
		})
	}
}

func packed(from, to int, stored bool) []byte {
	words := make([]byte, 0, 8*(to-from))
	for i := from; i < to; i++ {
		k := hintKey(&tiers.Fingerprint{1}, binary.LittleEndian.AppendUint64(nil, uint64(i)))
		if !stored {
			k &^= 1
		}
		words = binary.LittleEndian.AppendUint64(words, k)
	}
	return words
}

func TestHintsAreBounded(t *testing.T) {
	h := testTable(t, 24000*hintBytes)
	bit, _ := h.take()
	h.apply(bit, packed(0, 100000, true))
	st := h.stats()
	if st.slots != 24000 || st.pages != 18000 || st.dropped != 82000 {
		t.Fatalf("%+v", st)
	}
	h.apply(bit, packed(0, 100000, false))
	h.apply(bit, packed(0, 18000, true))
	if st := h.stats(); st.pages != 18000 || st.dropped != 82000 {
		t.Fatalf("%+v", st)
	}
}

func TestBitsRunOut(t *testing.T) {
	h := testTable(t, 1<<20)
	for range 64 {
		if bit, _ := h.take(); bit < 0 {
			t.Fatal("none left")
		}
	}
	bit, freed := h.take()
	if bit >= 0 {
		t.Fatal("65 bits")
	}
	h.retire(7)
	select {
	case <-freed:
		t.Fatal("free before it was swept")
	default:
	}
	for h.sweep() {
	}
	<-freed
	if bit, _ := h.take(); bit != 7 {
		t.Fatalf("bit %d", bit)
	}
}

func BenchmarkApply(b *testing.B) {
	const n = 1_000_000
	words := packed(0, n, true)
	b.ReportAllocs()
	for b.Loop() {
		h := testTable(b, 1<<30)
		bit, _ := h.take()
		h.apply(bit, words)
		if st := h.stats(); st.pages != n {
			b.Fatal(st)
		}
		h.close()
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/n, "ns/hint")
}

// hintedPeers is a Peers that has heard of a million pages of a peer, and a run of them.
func hintedPeers(t testing.TB, ppc, pages int) (*Peers, tiers.Run) {
	h := testTable(t, 1<<30)
	p := &Peers{hints: h}
	sp := space("bench", ppc)
	bit, _ := h.take()
	h.ask(bit, sp.Fingerprint)
	r := tiers.Run{Space: sp}
	var words []byte
	for i := range 1_000_000 {
		var d [32]byte
		binary.LittleEndian.PutUint64(d[:], uint64(i)*0x9E3779B97F4A7C15)
		words = binary.LittleEndian.AppendUint64(words, hintKey(&sp.Fingerprint, d[:]))
		if i%(1_000_000/pages) == 0 && r.Pages() < pages {
			r.Hashes = append(r.Hashes, d[:]...)
		}
	}
	h.apply(bit, words)
	return p, r
}

func TestContainsDoesNotAllocate(t *testing.T) {
	p, r := hintedPeers(t, 16, 4096)
	held := make([]uint16, r.Chunks())
	if n := testing.AllocsPerRun(50, func() { p.Contains(r, held) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
	for i, n := range held {
		if n != 16 {
			t.Fatalf("chunk %d: %d pages", i, n)
		}
	}
}

func BenchmarkContains(b *testing.B) {
	for _, ppc := range []int{16, 1} {
		b.Run(fmt.Sprint(ppc), func(b *testing.B) {
			p, r := hintedPeers(b, ppc, 4096)
			held := make([]uint16, r.Chunks())
			b.ReportAllocs()
			for b.Loop() {
				p.Contains(r, held)
			}
		})
	}
}
