package peerbench

import (
	"testing"
	"time"

	"lookaside/internal/leak"
)

func TestMain(m *testing.M) { leak.Main(m) }

func TestRun(t *testing.T) {
	f, err := Options{Sidecars: 3, Pages: 16384, Rounds: 2, Events: 50 * time.Millisecond,
		Lookups: 5}.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if f.Held != 2*16384 || len(f.JoinSeconds) != 2 || len(f.LeaseUs) != 10 ||
		len(f.ContainsUs) != 10 || f.BytesPerHint[0] < 16 || len(f.EventsPerSec) != 2 ||
		len(f.ContainsBusyUs) == 0 {
		t.Errorf("%+v", f)
	}
	if _, err := (Options{Sidecars: 1}).Run(t.Context()); err == nil {
		t.Error("one sidecar")
	}
}
