package remote

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"lookaside/dax"
	"lookaside/tiers"
	"lookaside/tiers/elsewhere"
	"lookaside/tiers/elsewhere/elsewheretest"
	"lookaside/tiers/tiertest"
)

// openProgram opens a tier on a store, and waits until its program serves.
func openProgram(s *elsewheretest.Store, o elsewhere.Options) (*ProgramTier, error) {
	o.Name, o.FirstPause = "test", time.Millisecond
	if o.Socket == "" {
		o.Command = s.Command()
	}
	tier, err := OpenProgram(o)
	if err != nil {
		return nil, err
	}
	if err := serves(tier); err != nil {
		return nil, errors.Join(err, tier.Close())
	}
	return tier, nil
}

// serves waits until the program of a tier serves.
func serves(tier *ProgramTier) error {
	ctx, cancel := context.WithTimeout(context.Background(), unhurried)
	defer cancel()
	err := tier.Check(ctx)
	for ; err != nil && ctx.Err() == nil; err = tier.Check(ctx) {
		time.Sleep(time.Millisecond)
	}
	return err
}

// freshTier is a tier whose figures are asked for whenever they are wanted.
type freshTier struct{ *ProgramTier }

func (f freshTier) Stats() tiers.TierStats {
	_ = f.Check(context.Background())
	return f.ProgramTier.Stats()
}

func fresh(tier *ProgramTier, err error) (tiers.Tier, error) {
	if err != nil {
		return nil, err
	}
	return freshTier{tier}, nil
}

// arenaTier is a tier whose transfers lie in a region of its program's.
type arenaTier struct {
	freshTier
	region *dax.Region
	mu     sync.Mutex // guards at
	at     int        // the memory is used in a ring
}

func (a *arenaTier) Memory(size int) []byte {
	a.mu.Lock()
	defer a.mu.Unlock()
	mem := a.region.Bytes()
	if a.at+size > len(mem) {
		a.at = 0
	}
	a.at += size
	return mem[a.at-size : a.at : a.at]
}

// inArena opens a tier whose program maps the memory of all transfers.
func inArena(t testing.TB, s *elsewheretest.Store, o elsewhere.Options) (*arenaTier, error) {
	tier, err := openProgram(s, o)
	if err != nil {
		return nil, err
	}
	r, err := dax.Create(t.Context(), dax.Options{Kind: dax.KindMemfd, SizeBytes: 64 << 20,
		NUMANode: dax.NoNUMANode})
	if err != nil {
		return nil, errors.Join(err, tier.Close())
	}
	t.Cleanup(func() { // the suite uses its memory after Close
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	tier.Program.AddRegion(elsewhere.Region{ID: 1, Kind: string(r.Kind()), FD: r.FD(),
		SizeBytes: r.Size(), PageSize: r.PageSize(), Mem: r.Bytes()})
	return &arenaTier{freshTier: freshTier{tier}, region: r}, nil
}

func medium(t testing.TB, m tiertest.MediumOptions) (*elsewheretest.Store, *tiertest.Medium) {
	s := elsewheretest.New(t)
	s.FailNth = m.FailNth
	return s, &tiertest.Medium{
		Open: func() (tiers.Tier, error) {
			return fresh(openProgram(s, elsewhere.Options{}))
		},
		Failed: s.Failed, Rot: s.Rot, Stall: func() (resume func()) {
			s.Set(elsewheretest.Stall)
			return func() { s.Set("") }
		},
	}
}

func TestProgramTier(t *testing.T) {
	t.Parallel()
	tiertest.Run(t, tiertest.Factory{Persistent: true,
		New: func(t testing.TB, m tiertest.MediumOptions) *tiertest.Medium {
			_, medium := medium(t, m)
			return medium
		}})
}

// The program reads and writes the transfers' memory in place.
func TestProgramTierInPlace(t *testing.T) {
	t.Parallel()
	tiertest.Run(t, tiertest.Factory{Persistent: true, Brief: true,
		New: func(t testing.TB, m tiertest.MediumOptions) *tiertest.Medium {
			s, medium := medium(t, m)
			medium.Open = func() (tiers.Tier, error) {
				return inArena(t, s, elsewhere.Options{})
			}
			return medium
		}})
}

// A program that drops the oldest values for room.
func TestProgramTierEvicts(t *testing.T) {
	t.Parallel()
	tiertest.Run(t, tiertest.Factory{Persistent: true, Brief: true, Evicts: true, MayForget: true,
		New: func(t testing.TB, m tiertest.MediumOptions) *tiertest.Medium {
			s, medium := medium(t, m)
			s.CapacityBytes = max(m.CapacityBytes, 4<<20)
			return medium
		}})
}

// A program that listens, and takes one item at a time.
func TestProgramTierOnASocket(t *testing.T) {
	t.Parallel()
	tiertest.Run(t, tiertest.Factory{Persistent: true, Brief: true,
		New: func(t testing.TB, m tiertest.MediumOptions) *tiertest.Medium {
			s, medium := medium(t, m)
			s.MaxItems, s.MaxCalls = 1, 2
			s.Listen = filepath.Join(t.TempDir(), "program.sock")
			elsewheretest.Start(t, s)
			medium.Open = func() (tiers.Tier, error) {
				return fresh(openProgram(s, elsewhere.Options{Socket: s.Listen, Isolated: true}))
			}
			return medium
		}})
}

// A program that lies costs misses: the chunk is corrupt once, and then gone.
func TestProgramLies(t *testing.T) {
	t.Parallel()
	space := tiertest.NewSpace("lies", geometry)
	for name, lie := range map[string]func(s *elsewheretest.Store){
		"other bytes": func(s *elsewheretest.Store) { s.Set(elsewheretest.Wrong) },
		"nothing":     func(s *elsewheretest.Store) { s.Set(elsewheretest.Nothing) },
		"rot":         func(s *elsewheretest.Store) { s.Rot() },
		"another value": func(s *elsewheretest.Store) {
			var chunks []string
			for _, v := range s.Values() {
				if strings.HasPrefix(filepath.Base(v), "v-63") { // 'c'
					chunks = append(chunks, v)
				}
			}
			if len(chunks) != 2 {
				t.Fatalf("%d chunks", len(chunks))
			}
			tmp := chunks[0] + ".tmp"
			if err := errors.Join(os.Rename(chunks[0], tmp), os.Rename(chunks[1], chunks[0]),
				os.Rename(tmp, chunks[1])); err != nil {
				t.Fatal(err)
			}
		},
	} {
		for _, isolated := range []bool{false, true} {
			s := elsewheretest.New(t)
			tier, err := inArena(t, s, elsewhere.Options{Isolated: isolated})
			if err != nil {
				t.Fatal(err)
			}
			one, other := chunkOf(space, 1, 0, 1), chunkOf(space, 2, 0, 1)
			store := func(ts ...tiers.Transfer) {
				tier.Store(t.Context(), ts, func(_ int, err error) {
					if err != nil {
						t.Fatalf("%s: store: %v", name, err)
					}
				})
			}
			load := func(tr tiers.Transfer) (err error) {
				tr.Bytes = tier.Memory(len(tr.Bytes))
				clear(tr.Bytes)
				tier.Load(t.Context(), []tiers.Transfer{tr}, func(_ int, e error) { err = e })
				if page := tiertest.WrongPage(tr.Bytes, tr.Run); err == nil && page >= 0 {
					t.Errorf("%s: page %d is wrong", name, page)
				}
				return err
			}
			store(one, other)
			lie(s)
			if err := load(one); !errors.Is(err, tiers.ErrCorrupt) {
				t.Errorf("%s: load: %v", name, err)
			}
			s.Set("")
			if err := load(one); !errors.Is(err, tiers.ErrNotFound) {
				t.Errorf("%s: load again: %v", name, err)
			}
			store(one)
			if err := load(one); err != nil {
				t.Errorf("%s: load of what is stored again: %v", name, err)
			}
			if err := tier.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

// More chunks that begin alike than an index record has room for: the oldest are dropped, and
// nothing is found after a Drop.
func TestProgramIndexOverflows(t *testing.T) {
	t.Parallel()
	s := elsewheretest.New(t)
	tier, err := openProgram(s, elsewhere.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer tier.Close()
	space := tiertest.NewSpace("overflow", tiers.Geometry{PageBytes: 256, PagesPerChunk: 2,
		PageTokens: 16, DigestBytes: 32})
	most := newRecord(tiertest.Prefix{0}.Run(space, 0, 1)).most()
	run := func(i int) tiers.Run { return tiertest.Prefix{0, byte(i)}.Run(space, 0, 2) }
	held := func(i int) bool {
		held := make([]uint16, 1)
		if err := tier.Contains(t.Context(), run(i), held); err != nil {
			t.Fatal(err)
		}
		return held[0] == 2
	}
	for i := range most + 5 {
		tr := tiers.Transfer{Run: run(i), Bytes: make([]byte, 512)}
		tiertest.FillRun(tr.Bytes, tr.Run)
		tier.Store(t.Context(), []tiers.Transfer{tr}, func(_ int, err error) {
			if err != nil {
				t.Fatal(err)
			}
		})
	}
	for i := range most + 5 {
		if held(i) != (i >= 5) {
			t.Errorf("chunk %d of %d, with room for %d: held %v", i, most+5, most, held(i))
		}
	}
	if err := tier.Drop(t.Context(), tiertest.Prefix{0}.Run(space, 0, 1)); err != nil {
		t.Fatal(err)
	}
	for i := range most + 5 {
		if held(i) {
			t.Errorf("chunk %d is held after a Drop", i)
		}
	}
}

func FuzzIndexRecord(f *testing.F) {
	space := tiertest.NewSpace("record", tiers.Geometry{PageBytes: 256, PagesPerChunk: 3,
		PageTokens: 16, DigestBytes: 16})
	r := newRecord(tiertest.Prefix{0}.Run(space, 0, 1))
	f.Add(r.encode())
	r.change([]name{nameOf(tiertest.Prefix{0, 1}.Run(space, 0, 2), 2)}, nil)
	f.Add(r.encode())
	f.Add([]byte("LAIX"))
	f.Fuzz(func(t *testing.T, b []byte) {
		got := newRecord(tiertest.Prefix{0}.Run(space, 0, 1))
		got.decode(b)
		for _, n := range got.names {
			if n.pages < 1 || n.pages > 3 || len(n.last) != 16 {
				t.Fatalf("%+v", n)
			}
		}
		again := newRecord(tiertest.Prefix{0}.Run(space, 0, 1))
		again.decode(got.encode())
		if len(again.names) != len(got.names) {
			t.Fatalf("%d names became %d", len(got.names), len(again.names))
		}
		// The record of another page does not pass for this one's.
		other := newRecord(tiertest.Prefix{1}.Run(space, 0, 1))
		if other.decode(got.encode()); len(other.names) != 0 {
			t.Fatal("a record of another page was accepted")
		}
	})
}
