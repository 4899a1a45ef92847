package promotionbench

import (
	"testing"

	"go.uber.org/zap"
)

// The bench measures what it says, and its own check of every byte passes.
func TestRun(t *testing.T) {
	f, err := Run(t.Context(), Options{
		Dir: t.TempDir(), Bytes: 4 << 20, PageBytes: 64 << 10, PagesPerChunk: 4, Workers: 2,
		PieceBytes: 256 << 10, Rounds: 2,
	}, zap.NewNop())
	if err != nil {
		t.Fatal(err)
	}
	if len(f.LookupSeconds) != 2 || len(f.BareSeconds) != 2 || len(f.ArenaSeconds) != 2 ||
		f.Bytes != 4<<20 || f.LookupSeconds[1] <= 0 || f.BareSeconds[1] <= 0 {
		t.Errorf("%+v", f)
	}
}
