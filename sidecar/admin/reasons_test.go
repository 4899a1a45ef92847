package admin

import (
	"slices"
	"testing"

	"lookaside/tiers/why"
)

// Each reason of a miss says what it means, and, but for a hit of vLLM's own cache, what to do.
func TestMissReasons(t *testing.T) {
	names := []string{why.End.String()} // no miss
	for _, m := range MissReasons() {
		names = append(names, m.Reason)
		if m.Means == "" || (m.Fix == "") != (m.Reason == why.EngineHad.String()) {
			t.Errorf("%+v", m)
		}
	}
	if !slices.Equal(names, why.Names()) {
		t.Errorf("reasons of %q, want %q", names, why.Names())
	}
}
