package daxbench

import (
	"slices"
	"testing"

	"lookaside/dax"
	"lookaside/internal/leak"
)

func TestMain(m *testing.M) { leak.Main(m) }

// What the benches measure works; how fast is not asked here.
func TestBenches(t *testing.T) {
	dir := t.TempDir()
	f, err := Transfers{Dir: dir, SlotBytes: 256 << 10, Chunks: 10, Threads: 2, Kind: dax.KindMemfd,
		Rounds: 2}.Run(t.Context())
	if err != nil || f.Chunks != 10 || f.Memory != "memfd" {
		t.Errorf("%+v, %v", f, err)
	}
	for _, d := range []Direction{f.Restore, f.Store} {
		limit, loop := d.Limit()
		if loop == "" {
			t.Errorf("%+v", d)
		}
		for _, values := range [][]float64{d.Tier, d.Plain, d.Side, limit} {
			if len(values) != 2*roundTurns || slices.Min(values) <= 0 {
				t.Errorf("%+v", d)
			}
		}
	}
	seconds, err := Recovery{Dir: dir, Chunks: 2000, Rounds: 2}.Run(t.Context())
	if err != nil || len(seconds) != 2 {
		t.Errorf("%v, %v", seconds, err)
	}
	m, err := Migration{Dir: dir, SlotBytes: 256 << 10, Chunks: 100, Run: 20, Rounds: 2}.Measure(
		t.Context())
	if err != nil || len(m.With) != 2 || len(m.Without) != 2 || len(m.Speed) != 2 {
		t.Errorf("%+v, %v", m, err)
	}
	for _, err := range []error{
		func() error {
			_, err := Transfers{Dir: dir, SlotBytes: 1, Chunks: 1, Threads: 1, Rounds: 1}.Run(
				t.Context())
			return err
		}(),
		func() error {
			_, err := Recovery{Dir: dir, Chunks: 1, Rounds: 1}.Run(
				t.Context())
			return err
		}(),
		func() error {
			_, err := Migration{Dir: dir, SlotBytes: 1 << 20, Chunks: 1, Run: 2, Rounds: 1}.Measure(
				t.Context())
			return err
		}(),
	} {
		if err == nil {
			t.Error("measured nonsense")
		}
	}
}
