package enginebench

import (
	"testing"

	"lookaside/internal/leak"
)

func TestMain(m *testing.M) { leak.Main(m) }

// TestRun is small: it is about the bench's working, not about speed.
func TestRun(t *testing.T) {
	r, err := Run(3 * hitPages)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range []Figures{r.Chunked, r.Single} {
		if f.Pages != 3*hitPages || f.BytesPerPage <= 0 || f.Hits.MedianUs <= 0 || f.BareHits.MedianUs <= 0 || f.LookupsPerSecond <= 0 || f.StoresPerSecond <= 0 {
			t.Errorf("%+v", f)
		}
	}
	if _, err := Run(1); err == nil {
		t.Error("a bench of one page")
	}
}
