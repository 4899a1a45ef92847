package connector

import (
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"lookaside/ipc/wire"
	"lookaside/tiers/engine"
	"lookaside/tiers/stack"
	"lookaside/tiers/why"
)

// TestReasonsOfClients: a client's numbers are this side's.
func TestReasonsOfClients(t *testing.T) {
	b, err := os.ReadFile("../pyclient/lookaside/wire.py")
	if err != nil {
		t.Fatal(err)
	}
	list := regexp.MustCompile(`(?s)\nREASONS = \((.*?)\n\)`).FindSubmatch(b)
	if list == nil {
		t.Fatal("no REASONS")
	}
	var names []string
	for _, m := range regexp.MustCompile(`"(\w+)"`).FindAllSubmatch(list[1], -1) {
		names = append(names, string(m[1]))
	}
	if !slices.Equal(names, why.Names()) {
		t.Errorf("%v, want %v", names, why.Names())
	}
}

// TestLastLookupsAreRemembered: so many, found by their request, and nothing is allocated for one.
func TestLastLookupsAreRemembered(t *testing.T) {
	s := &Server{}
	ses := &session{id: 5, space: &space{id: 1}}
	var a engine.Absence
	a.Reason = why.Evicted
	n, name := uint64(0), make([]byte, 0, 32)
	note := func() {
		n++
		kind := "r-"
		if n%2 == 0 {
			kind = "even-"
		}
		name = strconv.AppendUint(append(name[:0], kind...), n, 10)
		m := wire.Lookup{Lookup: n, Request: name}
		s.ends.begin(ses, &m, 9, time.Now())
		s.ends.answer(5, n, 3, a, stack.Sources{Arena: 3}, time.Millisecond)
	}
	note()
	if allocs := testing.AllocsPerRun(100, note); allocs > 0 {
		t.Errorf("%v allocations", allocs)
	}
	for n < 2*endsKept+10 {
		note()
	}
	if got := s.Ends("", 3*endsKept); len(got) != endsKept || !got[0].Answered ||
		got[0].Why.Reason != why.Evicted || got[0].Pages != 3 || got[0].Asked != 9 {
		t.Fatalf("%d, %+v", len(got), got[0])
	}
	if got := s.Ends("ev", 3*endsKept); len(got) != endsKept/2 || !strings.HasPrefix(got[0].Request, "even-") {
		t.Errorf("%d, %+v", len(got), got[0])
	}
	if got := s.Ends("even", 2); len(got) != 2 {
		t.Errorf("%d", len(got))
	}
	if got := s.Ends("none", 2); len(got) != 0 {
		t.Errorf("%+v", got)
	}
	s.ends.admit(6, &wire.Prefilled{Lookup: n}) // another session's
	s.ends.admit(5, &wire.Prefilled{Lookup: n, Own: 7})
	if got := s.Ends("", 1)[0]; !got.Admitted || got.Own != 7 {
		t.Errorf("%+v", got)
	}
}
