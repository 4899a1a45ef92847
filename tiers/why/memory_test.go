package why

import (
	"testing"
	"time"

	"lookaside/internal/leak"
	"lookaside/tiers"
)

func TestMain(m *testing.M) { leak.Main(m) }

func newMemory(t *testing.T, pages int) *Memory {
	m, err := NewMemory(pages)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

func TestReasonsHaveNames(t *testing.T) {
	seen := map[string]bool{}
	for r := range Reasons {
		name := Reason(r).String()
		if name == "" || name == "unknown" || seen[name] {
			t.Errorf("reason %d is called %q", r, name)
		}
		seen[name] = true
	}
	if Reason(Reasons).String() != "unknown" {
		t.Error("a reason that is none has a name")
	}
	if Reasons > 16 {
		t.Error("an entry has 4 bits for a reason")
	}
}

// TestRoundTrip: what is noted last of a page is found, with each of its parts.
func TestRoundTrip(t *testing.T) {
	m := newMemory(t, 1000)
	if m.Pages() < 1000 || m.Pages() > 2000 {
		t.Fatalf("room for %d pages", m.Pages())
	}
	at := time.Unix(1_700_000_000, 0)
	m.now = func() time.Time { return at }
	salt := Salt(tiers.Fingerprint{7})
	key := Key(salt, []uint64{1, 2, 3, 4})
	if g := m.Find(key); g.Reason != NeverStored {
		t.Fatalf("a page that never was: %+v", g)
	}
	m.Note([]uint64{key}, Evicted, By{1, 2, 3})
	by := By{Space: 65535, Tenant: 79, Tier: 8}
	m.Note([]uint64{key, key + 1}, Lost, by)
	for _, k := range []uint64{key, key + 1} {
		if g := m.Find(k); g.Reason != Lost || g.By != by || !g.At.Equal(at) {
			t.Fatalf("found %+v", g)
		}
	}
	other := Key(Salt(tiers.Fingerprint{8}), []uint64{1, 2, 3, 4})
	if g := m.Find(other); g.Reason != NeverStored {
		t.Fatalf("another space's page: %+v", g)
	}
}

// TestOldestIsForgotten: a line keeps what was noted last.
func TestOldestIsForgotten(t *testing.T) {
	m := newMemory(t, ways)
	for k := range uint64(6) {
		m.Note([]uint64{k + 1}, Cleared, By{})
	}
	m.Note([]uint64{3}, Evicted, By{}) // newest again
	m.Note([]uint64{7}, Cleared, By{})
	for k, want := range []Reason{0, NeverStored, NeverStored, Evicted, NeverStored, Cleared,
		Cleared, Cleared} {
		if k > 0 && m.Find(uint64(k)).Reason != want {
			t.Errorf("page %d: %v, want %v", k, m.Find(uint64(k)).Reason, want)
		}
	}
}

func TestNothingIsRemembered(t *testing.T) {
	none, err := NewMemory(0)
	if none != nil || err != nil {
		t.Fatal(none, err)
	}
	closed := newMemory(t, 8)
	if err := closed.Close(); err != nil {
		t.Fatal(err)
	}
	for _, m := range []*Memory{none, closed} {
		m.Note([]uint64{1}, Evicted, By{})
		if g := m.Find(1); g.Reason != NeverStored {
			t.Errorf("found %+v", g)
		}
	}
	if none.Pages() != 0 || none.Close() != nil {
		t.Error("a memory of nothing is not empty")
	}
}

func TestAllocatesNothing(t *testing.T) {
	m := newMemory(t, 1<<12)
	keys := make([]uint64, 64)
	n := uint64(0)
	if a := testing.AllocsPerRun(100, func() {
		for i := range keys {
			n++
			keys[i] = Key(5, []uint64{n, n})
		}
		m.Note(keys, Evicted, By{})
		m.Find(keys[0])
	}); a > 0 {
		t.Errorf("%v allocations", a)
	}
}

func BenchmarkNote(b *testing.B) {
	m, err := NewMemory(1 << 18)
	if err != nil {
		b.Fatal(err)
	}
	defer m.Close()
	keys := make([]uint64, 16)
	n := uint64(0)
	b.ReportAllocs()
	for b.Loop() {
		for i := range keys {
			n++
			keys[i] = Key(5, []uint64{n, n})
		}
		m.Note(keys, Evicted, By{})
	}
}
