package enginebench

import (
	"slices"
	"testing"

	"lookaside/internal/leak"
)

func TestMain(m *testing.M) { leak.Main(m) }

// TestRun is small: it is about the bench's working, not about speed.
func TestRun(t *testing.T) {
	defer func(n int) { rounds = n }(rounds)
	rounds = 101
	r, err := Run(3 * hitPages)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range []Figures{r.Chunked, r.Single} {
		if f.Pages != 3*hitPages || f.BytesPerPage <= 0 || f.LookupsPerSecond <= 0 ||
			f.ShortPerSecond <= 0 || f.StorePagesPerSecond <= 0 || f.FillPagesPerSecond <= 0 {
			t.Errorf("%+v", f)
		}
		if len(f.HitsUs) == 0 || len(f.HitsUs) != len(f.BareUs) || slices.Min(f.HitsUs) <= 0 ||
			slices.Min(f.BareUs) < 0 {
			t.Errorf("%d rounds of hits, %d of their limit", len(f.HitsUs), len(f.BareUs))
		}
	}
	if _, err := Run(1); err == nil {
		t.Error("a bench of one page")
	}
}
