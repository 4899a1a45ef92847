package remote

import (
	"context"
	"errors"
	"path/filepath"
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
