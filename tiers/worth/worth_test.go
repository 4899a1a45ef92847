package worth

import (
	"math/rand/v2"
	"testing"
)

// model is chunks that leave an arena, and come back or not, by their traits.
type model struct {
	*rand.Rand
	l    *Learner
	next uint64
	due  map[int][]uint64 // by step: the keys that come back
	step int
}

func newModel(seed uint64, slots int) *model {
	m := &model{Rand: rand.New(rand.NewPCG(seed, 2)), l: New(seed), due: map[int][]uint64{}}
	m.l.SetRoom(slots)
	return m
}

// leave judges a new chunk, which comes back after so many steps; 0: never.
func (m *model) leave(x Traits, after int) bool {
	for _, key := range m.due[m.step] {
		m.l.Wanted(key)
	}
	delete(m.due, m.step)
	m.step++
	m.next++
	write, _ := m.l.Judge(m.next, &x)
	if after > 0 {
		m.due[m.step+after] = append(m.due[m.step+after], m.next)
	}
	return write
}

// run lets chunks of two kinds leave by turns, and returns how many of the last half of each were
// written. The chances are those of coming back.
func (m *model) run(n int, a, b Traits, chanceA, chanceB float64, after int) (of [2]float64) {
	for i := range n {
		x, chance, k := a, chanceA, 0
		if i%2 == 1 {
			x, chance, k = b, chanceB, 1
		}
		back := 0
		if m.Float64() < chance {
			back = after
		}
		if m.leave(x, back) && i >= n/2 {
			of[k] += 4 / float64(n)
		}
	}
	return of
}

func TestDeclinesWhatDoesNotComeBack(t *testing.T) {
	t.Parallel()
	for seed := range uint64(4) {
		for _, slots := range []int{0, 100000} {
			got := newModel(seed, slots).run(40000, Traits{Turn: 2, Height: 4}, Traits{}, 0.5, 0.01,
				300)
			if got[0] < 0.99 || got[1] > 0.01 {
				t.Errorf("seed %d, %d slots: written %.3f and %.3f", seed, slots, got[0], got[1])
			}
		}
	}
}

func TestWritesAllIfAllAreAlike(t *testing.T) {
	t.Parallel()
	got := newModel(1, 1000000).run(40000, Traits{Depth: 3}, Traits{Height: 2}, 0.2, 0.25, 300)
	if got[0] < 0.99 || got[1] < 0.99 {
		t.Errorf("written %.3f and %.3f", got[0], got[1])
	}
}

// In a tier with little room only what comes back soonest is worth it; if all fits, both are.
func TestRoomDecides(t *testing.T) {
	t.Parallel()
	often, seldom := Traits{Uses: 1}, Traits{}
	if got := newModel(1, 400).run(60000, often, seldom, 0.6, 0.2, 600); got[0] < 0.99 ||
		got[1] > 0.01 {
		t.Errorf("little room: written %.3f and %.3f", got[0], got[1])
	}
	if got := newModel(1, 1000000).run(60000, often, seldom, 0.6, 0.2, 600); got[0] < 0.99 ||
		got[1] < 0.99 {
		t.Errorf("room for all: written %.3f and %.3f", got[0], got[1])
	}
}

func TestChangesItsMind(t *testing.T) {
	t.Parallel()
	m := newModel(3, 0)
	a, b := Traits{Depth: 1}, Traits{Depth: 100}
	if got := m.run(60000, a, b, 0.5, 0.005, 300); got[1] > 0.01 {
		t.Fatalf("written %.3f and %.3f", got[0], got[1])
	}
	if got := m.run(600000, a, b, 0.005, 0.5, 300); got[1] < 0.9 {
		t.Fatalf("afterwards: written %.3f and %.3f", got[0], got[1])
	}
}

// A prefix is worth what its continuation is.
func TestAPrefixHasItsContinuationsMark(t *testing.T) {
	t.Parallel()
	m := newModel(1, 0)
	m.run(40000, Traits{Turn: 2}, Traits{}, 0.5, 0.01, 300)
	_, mark := m.l.Judge(1<<40, &Traits{Turn: 2})
	write, own := m.l.Judge(1<<40+1, &Traits{Floor: mark})
	if !write || own != mark {
		t.Errorf("the prefix of a chunk with mark %d has mark %d, written: %v", mark, own, write)
	}
}

func TestUsesAreCountedOn(t *testing.T) {
	t.Parallel()
	l := New(5)
	if n := l.Wanted(7); n != 0 {
		t.Errorf("%d uses of a chunk that never left", n)
	}
	l.Judge(7, &Traits{Uses: 3})
	if n := l.Wanted(7); n != 4 {
		t.Errorf("%d uses", n)
	}
	if n := l.Wanted(7); n != 0 {
		t.Errorf("%d uses of a chunk that is there", n)
	}
	l.Judge(7, &Traits{Uses: 255})
	if n := l.Wanted(7); n != maxUses {
		t.Errorf("%d uses", n)
	}
}

// Any calls are allowed, and answer the same each time.
func TestAnyHistory(t *testing.T) {
	t.Parallel()
	run := func() (sum uint64) {
		rng := rand.New(rand.NewPCG(9, 9))
		l := New(9)
		for range 200000 {
			key := rng.Uint64N(5000)
			switch rng.IntN(8) {
			case 0:
				l.SetRoom(rng.IntN(3) * rng.IntN(10000))
			case 1, 2, 3:
				sum = sum*31 + uint64(l.Wanted(key))
			default:
				write, mark := l.Judge(key, &Traits{Uses: uint8(rng.Uint32()),
					Turn: uint8(rng.Uint32()), Height: uint16(rng.Uint32() >> rng.IntN(32)),
					Depth: rng.Uint32() >> rng.IntN(32), Age: rng.Uint64() >> rng.IntN(64)})
				if mark >= marks {
					t.Fatalf("mark %d", mark)
				}
				sum = sum*31 + uint64(mark)
				if write {
					sum++
				}
			}
		}
		return sum
	}
	if a, b := run(), run(); a != b {
		t.Errorf("%d and %d", a, b)
	}
}

func TestAllocatesNothing(t *testing.T) {
	l := New(1)
	key := uint64(0)
	if n := testing.AllocsPerRun(2000, func() {
		key++
		l.Judge(key, &Traits{Depth: uint32(key)})
		l.Wanted(key / 2)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkJudge(b *testing.B) {
	l := New(1)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		l.Judge(uint64(i), &Traits{Depth: uint32(i), Height: uint16(i >> 3)})
		if i&3 == 0 {
			l.Wanted(uint64(i - 500))
		}
	}
}
