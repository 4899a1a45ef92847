package tenant

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
)

func registry(t *testing.T, listed []string, most int) (*Registry, *int64) {
	t.Helper()
	now := new(int64)
	r, err := New(Config{Listed: listed, Max: most, Now: func() int64 { return *now }})
	if err != nil {
		t.Fatal(err)
	}
	return r, now
}

// TestPlaces: a name that is not listed has an ID only if there is a place, and loses it to another
// name when nothing is held of it and it has been idle.
func TestPlaces(t *testing.T) {
	t.Parallel()
	r, now := registry(t, []string{"team a"}, 2)
	find := func(name string) ID { return r.Find([]byte(name)) }
	a, x, y := find("team a"), find("x"), find("y")
	if a < first || x < first || y < first || a == x || x == y || a == y {
		t.Fatalf("IDs %d, %d and %d", a, x, y)
	}
	if find("") != None || find(OtherName) != Other || find("z") != Other || find("x") != x {
		t.Fatalf("%d for none, %d for other, %d for one too many", find(""), find(OtherName),
			find("z"))
	}
	r.Asked(y, 7)
	r.Hit(y, 5)
	life := r.Hold(x, true)
	*now = idleAfter
	if find("x") != x { // it was in use all the time
		t.Fatal("x has another ID")
	}
	*now++
	if z := find("z"); z != y {
		t.Fatalf("z has ID %d, want that of y, %d", z, y)
	}
	if find("team a") != a {
		t.Fatal("a listed name has another ID")
	}
	for _, i := range r.List() {
		if i.ID == y && (i.Name != "z" || i.Asked != 0 || i.Hit != 0) {
			t.Fatalf("z begins with %+v", i)
		}
	}
	*now += 2 * idleAfter
	find("z")
	if got := find("y"); got != Other {
		t.Fatalf("y has ID %d, although z is in use and something is held of x", got)
	}
	if r.Hold(x, false) != life {
		t.Fatal("x has changed while something was held of it")
	}
	if got := find("y"); got != x || r.Life(x) == life {
		t.Fatalf("y has ID %d, want that of x, %d", got, x)
	}
}

// TestNamesOfStrangers: what is no name is Other, and takes no place.
func TestNamesOfStrangers(t *testing.T) {
	t.Parallel()
	r, _ := registry(t, nil, 1)
	for _, name := range []string{strings.Repeat("x", MaxName+1), "a\nb", "\x00", "\xff", "a\u202Eb",
		"a\u00A0b"} {
		if id := r.Find([]byte(name)); id != Other {
			t.Errorf("%q has ID %d", name, id)
		}
	}
	for _, name := range []string{strings.Repeat("x", MaxName), "Zürich", "組", "a b", "`$(x)`\""} {
		if !ValidName([]byte(name)) {
			t.Errorf("%q is refused", name)
		}
	}
	if n := len(r.List()); n != 2 {
		t.Errorf("%d tenants, want None and Other", n)
	}
}

// TestKeys: a tenant that was found on a medium has its ID before it has its name.
func TestKeys(t *testing.T) {
	t.Parallel()
	before, _ := registry(t, nil, 4)
	key := before.Key(before.Find([]byte("x")))
	if before.Key(None) != (Key{}) || key == (Key{}) || key == before.Key(Other) {
		t.Fatalf("keys %x, %x and %x", before.Key(None), before.Key(Other), key)
	}
	r, _ := registry(t, []string{"a"}, 1)
	id := r.FindKey(key)
	if id < first || r.FindKey(key) != id || r.FindKey(Key{}) != None ||
		r.FindKey(before.Key(Other)) != Other || r.FindKey(Key{1}) != Other {
		t.Fatalf("ID %d", id)
	}
	if got := r.List()[3].Name; got != fmt.Sprintf("#%x", key[:6]) {
		t.Fatalf("it is called %q", got)
	}
	for range 2 {
		if r.Find([]byte("x")) != id || r.List()[3].Name != "x" {
			t.Fatalf("%+v after a request with the name", r.List()[3])
		}
	}
}

func TestConfig(t *testing.T) {
	t.Parallel()
	var many []string
	for i := range MaxIDs {
		many = append(many, fmt.Sprint(i))
	}
	for _, listed := range [][]string{{""}, {"a\tb"}, many} {
		if _, err := New(Config{Listed: listed}); err == nil {
			t.Errorf("%d names, the first %q, are accepted", len(listed), listed[0])
		}
	}
	r, _ := registry(t, []string{"a", "a", OtherName}, 1000)
	ids := map[ID]bool{}
	for i := range 1000 {
		ids[r.Find(fmt.Append(nil, i))] = true
	}
	if len(ids) != MaxIDs-2 { // None and a are not among them
		t.Errorf("%d IDs for a thousand names", len(ids))
	}
}

func TestNothingIsAllocated(t *testing.T) {
	r, _ := registry(t, []string{"team a"}, 0)
	name, unknown := []byte("team a"), []byte("unknown")
	if n := testing.AllocsPerRun(100, func() {
		r.Asked(r.Find(name), 1)
		r.Find(nil)
		r.Hit(None, 1)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
	if r.Find(unknown) != Other {
		t.Error("a name without a place has one")
	}
}

// TestAtOnce is for the race detector.
func TestAtOnce(t *testing.T) {
	t.Parallel()
	r, err := New(Config{Max: 5})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i := range uint64(4) {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(i, 0))
			for range 2000 {
				id := r.Find(fmt.Append(nil, rnd.IntN(8)))
				r.Hold(id, true)
				r.Asked(id, 1)
				r.Wrote(id, rnd.IntN(9), 1)
				r.FindKey(r.Key(id))
				r.Hold(id, false)
				r.List()
			}
		})
	}
	wg.Wait()
	asked := uint64(0)
	for _, i := range r.List() {
		asked += i.Asked
	}
	if asked != 8000 {
		t.Errorf("%d asked", asked)
	}
}

func TestShares(t *testing.T) {
	t.Parallel()
	r, _ := registry(t, []string{"a", "b"}, 4)
	a, x := r.Find([]byte("a")), r.Find([]byte("x"))
	for _, c := range []struct {
		s      Shares
		on     bool
		others int
		a, x   float64
	}{
		{Shares{}, false, 1, 1, 1},
		{Shares{Default: 0.25}, true, 2, 0.25, 0.25},
		{Shares{Default: 0.25}, true, 5, 0.2, 0.2},
		{Shares{Named: map[string]float64{"a": 0.4, "b": 0.2}}, true, 2, 0.4, 0.2},
		{Shares{Named: map[string]float64{"a": 0.4}, Default: 0.1}, true, 2, 0.4, 0.1},
		{Shares{Named: map[string]float64{"a": 0.4, "b": 0.6}}, true, 1, 0.4, 0},
	} {
		table, err := c.s.Table(r)
		if err != nil {
			t.Fatal(err)
		}
		if ga, gx := table.Part(a, c.others), table.Part(x, c.others); table.On() != c.on ||
			ga-c.a > 1e-9 || c.a-ga > 1e-9 || gx-c.x > 1e-9 || c.x-gx > 1e-9 {
			t.Errorf("%+v among %d: on %v, a has %v, x has %v", c.s, c.others, table.On(), ga, gx)
		}
	}
	for want, s := range map[string]Shares{
		"add up to 100.5 %":   {Named: map[string]float64{"a": 0.6, "b": 0.405}},
		`"a" is 0 %`:          {Named: map[string]float64{"a": 0}},
		`"a" is 101 %`:        {Named: map[string]float64{"a": 1.01}},
		"default share is 2":  {Default: 2},
		`"x" has a share and`: {Named: map[string]float64{"x": 0.1}},
	} {
		if _, err := s.Table(r); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", s, err, want)
		}
	}
}
