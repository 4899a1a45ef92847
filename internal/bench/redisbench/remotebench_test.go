package redisbench

import (
	"testing"

	"lookaside/internal/leak"
)

func TestMain(m *testing.M) { leak.Main(m) }

// TestRun only shows that it runs: what it measures is not for tests.
func TestRun(t *testing.T) {
	addr, stop, err := Server(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	f, err := Options{Server: addr, ChunkBytes: 1 << 20, Bytes: 8 << 20, Concurrency: 2, Batch: 3,
		Rounds: 2}.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range [][]float64{f.Put, f.BarePut, f.Get, f.BareGet} {
		if len(v) != 2 || v[0] <= 0 || v[1] <= 0 {
			t.Errorf("%+v", f)
		}
	}
}
