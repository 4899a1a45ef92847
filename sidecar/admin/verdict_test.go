package admin

import (
	"testing"
	"time"

	"lookaside/connector"
)

// Rates are of the last minute, whatever happened before, and of all the time while there is less.
func TestRatesOfTheLastMinute(t *testing.T) {
	var r rates
	start := time.Unix(1000, 0)
	if got := r.last(start, connector.Counters{Lookups: 5}); got != (LastMinute{}) {
		t.Errorf("before the first note: %+v", got)
	}
	count := func(requests uint64) connector.Counters {
		return connector.Counters{
			Tokens: connector.TokenCount{Requests: requests, Asked: 100 * requests,
				Found: 75 * requests, Loaded: 50 * requests, Computed: 50 * requests},
			Lookups: 2 * requests, Loads: requests, StoredPages: 3 * requests,
			StoredBytes: 4096 * requests, LoadedBytes: 8192 * requests, ShedPages: requests,
		}
	}
	// One request a second for ten minutes, then none.
	r.note(start, count(0))
	const busy = 600
	for s := 1; s <= busy; s++ {
		now := start.Add(time.Duration(s) * time.Second)
		if s%5 == 0 {
			r.note(now, count(uint64(s)))
		}
		got := r.last(now, count(uint64(s)))
		covers := min(s, 60+s%5)
		n := uint64(covers)
		want := LastMinute{
			Seconds: float64(covers), LoadedRatio: 0.5,
			Tokens: connector.TokenCount{Requests: n, Asked: 100 * n, Found: 75 * n,
				Loaded: 50 * n, Computed: 50 * n},
			Lookups: 2 * n, Loads: n, StoredPages: 3 * n, StoredBytes: 4096 * n,
			LoadedBytes: 8192 * n, ShedPages: n,
		}
		if got != want {
			t.Fatalf("after %d s:\n%+v\n%+v", s, got, want)
		}
		if len(r.noted) > 13 {
			t.Fatalf("after %d s: %d notes are kept", s, len(r.noted))
		}
	}
	// A sidecar that stood still for a while has notes that are old. Nothing is made of what was
	// before them.
	late := start.Add((busy + 1000) * time.Second)
	r.note(late, count(busy))
	if got := r.last(late, count(busy)); got.Lookups != 0 || got.LoadedRatio != 0 {
		t.Errorf("%+v", got)
	}
}

func TestVerdicts(t *testing.T) {
	engine := func(st *Status, ids ...string) {
		for _, id := range ids {
			st.Sessions = append(st.Sessions, connector.SessionStatus{EngineID: id, Role: "worker"},
				connector.SessionStatus{EngineID: id, Role: "scheduler"})
		}
		st.Counters.SessionsOpened = uint64(len(st.Sessions)) + 1
	}
	tokens := func(st *Status, asked, found, loaded uint64) {
		st.LastMinute.Tokens = connector.TokenCount{Requests: 1, Asked: asked, Found: found,
			Loaded: loaded, Computed: asked - loaded}
		st.LastMinute.LoadedRatio = st.LastMinute.Tokens.LoadedRatio()
	}
	for _, c := range []struct {
		want string
		make func(*Status)
	}{
		{"no engine has connected", func(*Status) {}},
		{"no engine is connected now", func(st *Status) { st.Counters.SessionsOpened = 2 }},
		{"healthy: 1 engine connected, no tokens were asked for in the last minute",
			func(st *Status) { engine(st, "a") }},
		{"healthy: 2 engines connected, 62 % of the tokens asked for were loaded in the last minute", func(st *Status) { engine(st, "a", "b"); tokens(st, 1000, 700, 620) }},
		{"healthy: 1 engine connected, 0 % of the tokens asked for were loaded in the last minute",
			func(st *Status) { engine(st, "a"); tokens(st, 1000, 0, 0) }},
		{"nothing is loaded: 700 tokens were found in the last minute, and none loaded; the log of vLLM says why", func(st *Status) { engine(st, "a"); tokens(st, 1000, 700, 0) }},
		{"healthy: 1 engine connected, 70 % of the tokens asked for were loaded in the last minute",
			func(st *Status) {
				engine(st, "a")
				tokens(st, 1000, 700, 700)
				st.LastMinute.ShedPages, st.LastMinute.StoredPages = 1, 100
			}},
		{"the arena is too small: 50 pages found no room in the last minute, and 100 were stored",
			func(st *Status) {
				engine(st, "a")
				tokens(st, 1000, 700, 700)
				st.LastMinute.ShedPages, st.LastMinute.StoredPages = 50, 100
			}},
		{"1 client was given up while it lives and holds slots: process 7", func(st *Status) {
			engine(st, "a")
			st.Lingering = []connector.LingeringStatus{
				{SessionStatus: connector.SessionStatus{PID: 7}},
			}
		}},
		{"2 clients are frozen and hold slots: process 7, 9", func(st *Status) {
			engine(st, "a")
			st.Frozen = []connector.FrozenStatus{{SessionStatus: connector.SessionStatus{PID: 9}},
				{SessionStatus: connector.SessionStatus{PID: 7}}}
		}},
		{"tier disk is down: no such device", func(st *Status) {
			engine(st, "a")
			st.Tiers = []TierStatus{{Name: "disk", State: "open", Error: "no such device"},
				{Name: "s3", State: breakerClosed}}
		}},
		{"tiers disk, s3 are down: no such device", func(st *Status) {
			st.Tiers = []TierStatus{{Name: "disk", State: "open", Error: "no such device"},
				{Name: "s3", State: "probing", Error: "refused"}}
		}},
		{"the arena's devices fail: 1 of 4 slabs are given up: bad memory", func(st *Status) {
			st.Arena.DAX = &DAXArenaState{Slabs: 4, SlabsGivenUp: 1, Error: "bad memory"}
		}},
		{"starting, the arena is waiting for workers: engines are connected, and find nothing yet",
			func(st *Status) { st.Arena.State = "waiting for workers" }},
		{"nothing is stored in what was found at the start, because clients of the sidecar before may still copy there: process 7, 9",
			func(st *Status) {
				engine(st, "a")
				st.Arena.Recovered = RecoveredStatus{Frozen: true, PIDs: []int{7, 9}}
			}},
		{"draining: no new client is taken", func(st *Status) {
			engine(st, "a")
			st.State = stateDraining
			st.Tiers = []TierStatus{{Name: "disk", State: "open"}}
		}},
	} {
		st := Status{State: stateServing}
		st.Arena.State = "ready"
		c.make(&st)
		if got := st.verdict(); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
}
