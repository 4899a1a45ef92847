package slab

import (
	"testing"
	"time"

	"lookaside/internal/leak"
	"lookaside/tiers"
	"lookaside/tiers/tiertest"
	"lookaside/tiers/vfs/vfstest"
)

func TestMain(m *testing.M) { leak.Main(m) }

func TestContract(t *testing.T) {
	t.Parallel()
	tiertest.Run(t, tiertest.Factory{
		Persistent: true,
		Evicts:     true,
		New: func(t testing.TB, o tiertest.MediumOptions) *tiertest.Medium {
			mem := vfstest.NewMem()
			options := Options{Dirs: []string{"/a", "/b"}, CapacityBytes: 8 << 20,
				SlabBytes: 1 << 20, PieceBytes: 64 << 10, RetryEvery: 10 * time.Millisecond}
			if o.CapacityBytes > 0 {
				options.CapacityBytes, options.SlabBytes = 2*o.CapacityBytes, o.CapacityBytes/4
			}
			gate := newGate()
			counter := &vfstest.Counter{Kinds: vfstest.OpAny, N: o.FailNth,
				Fault: vfstest.Fault{Err: errInjected}}
			options.FS = vfstest.Faulty(mem, func(c vfstest.Call) vfstest.Fault {
				gate.wait()
				return counter.Inject(c)
			})
			m := &tiertest.Medium{
				Open:  func() (tiers.Tier, error) { return Open(options) },
				Rot:   func() { rot(t, mem, options.Dirs) },
				Stall: gate.close,
			}
			if o.FailNth > 0 {
				m.Failed = counter.Met
			}
			return m
		},
	})
}
