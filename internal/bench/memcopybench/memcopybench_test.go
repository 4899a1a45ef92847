package memcopybench

import (
	"context"
	"errors"
	"slices"
	"testing"

	"lookaside/dax"
	"lookaside/internal/leak"
)

func TestMain(m *testing.M) { leak.Main(m) }

func TestRun(t *testing.T) {
	ms, err := Run(t.Context(), Options{
		SizesBytes: []int{4096, 64 << 10}, Threads: []int{1, 2}, Rounds: 2,
		WorkingSetBytes: 4 << 20, Kind: dax.KindMemfd})
	if err != nil {
		t.Fatal(err)
	}
	if len(ms) != 4 {
		t.Fatalf("%d measurements, want 4", len(ms))
	}
	for _, m := range ms {
		for _, speeds := range [][]float64{m.GoCopy, m.Copy, m.Pool} {
			if len(speeds) != 2 || slices.Min(speeds) <= 0 {
				t.Errorf("%+v", m)
			}
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Run(ctx, Options{WorkingSetBytes: 64 << 20,
		Kind: dax.KindMemfd}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	for _, bad := range []Options{{SizesBytes: []int{0}}, {SizesBytes: []int{2 << 20},
		WorkingSetBytes: 1 << 20}, {Threads: []int{-1}}} {
		if _, err := Run(t.Context(), bad); err == nil {
			t.Errorf("%+v accepted", bad)
		}
	}
}
