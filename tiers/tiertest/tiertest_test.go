package tiertest

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync/atomic"
	"testing"

	"lookaside/internal/leak"
	"lookaside/tiers"
)

func TestMain(m *testing.M) { leak.Main(m) }

var errMedium = errors.New("the medium failed")

// memoryMedium makes a Memory look like a tier with a medium of its own.
func memoryMedium(o MediumOptions, mo MemoryOptions) *Medium {
	var ops atomic.Int64
	var stalled atomic.Pointer[chan struct{}]
	mo.Fault = func(ctx context.Context, op Op, run tiers.Run) error {
		if ops.Add(1) == o.FailNth {
			return errMedium
		}
		if s := stalled.Load(); s != nil && op != Contains {
			select {
			case <-*s:
			case <-ctx.Done():
			}
		}
		return nil
	}
	var m *Memory
	medium := &Medium{
		Open: func() (tiers.Tier, error) { m = NewMemory(mo); return m, nil },
		Rot:  func() { m.Rot(rand.New(rand.NewPCG(1, 0)), 1) },
		Stall: func() func() {
			s := make(chan struct{})
			stalled.Store(&s)
			return func() { stalled.Store(nil); close(s) }
		},
	}
	medium.Failed = func() bool { return ops.Load() >= o.FailNth }
	return medium
}

func TestMemory(t *testing.T) {
	t.Run("endless", func(t *testing.T) {
		Run(t, Factory{New: func(t testing.TB, o MediumOptions) *Medium {
			return memoryMedium(o,
				MemoryOptions{Local: true})
		}})
	})
	t.Run("bounded", func(t *testing.T) {
		Run(t, Factory{Evicts: true, New: func(t testing.TB, o MediumOptions) *Medium {
			return memoryMedium(o, MemoryOptions{CapacityBytes: max(o.CapacityBytes, 2<<20)})
		}})
	})
}
