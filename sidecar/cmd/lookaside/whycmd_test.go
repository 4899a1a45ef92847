package main

import (
	"testing"

	"lookaside/internal/prefixes"
	"lookaside/ipc/client"
	"lookaside/ipc/wire"
	"lookaside/sidecar/admin"
	"lookaside/tiers/why"
)

// TestWhy asks about a request's lookups, and about what is held now.
func TestWhy(t *testing.T) {
	s := serveProcess(t)
	c := commander{t, s.dir}
	words := storePages(t, s, 10)
	ses, err := client.Dial(s.dir, hello(wire.RoleScheduler), patience)
	if err != nil {
		t.Fatal(err)
	}
	defer ses.Close()
	lookups, err := ses.Lookups()
	if err != nil {
		t.Fatal(err)
	}
	defer lookups.Close()
	var packed []byte
	for i := range 12 {
		d := prefixes.Digest(1, i)
		packed = append(packed, d[:]...)
	}
	ask := func(lookup uint64, request string) wire.LookupResult {
		t.Helper()
		r, err := lookups.Lookup(&wire.Lookup{Session: ses.Welcome.Session,
			Secret: ses.Welcome.Secret, Lookup: lookup, Hashes: packed,
			Request: wire.Label(request)}, patience)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	if r := ask(1, "cmpl-one"); r.HitPages != 10 || why.Reason(r.Reason) != why.NeverStored ||
		r.TookUs == 0 || r.BeganUs != 0 || len(r.Sources) > 0 {
		t.Errorf("%+v", r)
	}
	c.says([]string{"why", words[0], words[1]}, nil, "held now: 2 of 2 pages (32 tokens)",
		"ends: end")
	c.says([]string{"clear", "--all", "--yes"}, nil)
	ask(2, "cmpl-two")
	if err := ses.Send(&wire.Prefilled{Tokens: 32, Own: 160, Lookup: 2,
		Reason: uint8(why.EngineHad)}); err != nil {
		t.Fatal(err)
	}
	if err := ses.Call(&wire.Ping{ID: 1}, new(wire.Pong), patience); err != nil {
		t.Fatal(err)
	}
	var r admin.WhyResult
	c.says([]string{"why", "cmpl-", "--json"}, &r)
	if len(r.Lookups) != 2 {
		t.Fatalf("%+v", r)
	}
	two, one := r.Lookups[0], r.Lookups[1]
	if two.Request != "cmpl-two" || two.End.Reason != "cleared" || two.End.At == nil ||
		two.Pages != 0 || two.PagesAsked != 12 || !two.Admitted || two.Own != 160 ||
		two.NotTaken != "engine_had" || two.Computed != 32 {
		t.Errorf("%+v", two)
	}
	if one.Request != "cmpl-one" || one.End.Reason != "never_stored" || one.Pages != 10 ||
		one.Admitted || !one.Answered {
		t.Errorf("%+v", one)
	}
	c.says([]string{"why", "cmpl-two"}, nil, "0 of 12 pages", "ends: cleared", "not loaded: engine_had",
		"had 160 tokens itself")
	c.says([]string{"why", words[0]}, nil, "held now: 0 of 1 pages", "ends: cleared")
	c.fails([]string{"why", "cmpl-three"}, "cmpl-three", "404")
	c.fails([]string{"why"}, "name a request")
	var st admin.Status
	c.says([]string{"status", "--json"}, &st)
	for reason, want := range map[string]why.Count{"never_stored": {Ends: 1, Pages: 2},
		"cleared": {Ends: 1, Pages: 12}, "engine_had": {Ends: 1, Pages: 10}} {
		if st.Misses[reason] != want {
			t.Errorf("%s: %+v, want %+v", reason, st.Misses[reason], want)
		}
	}
	if len(st.Misses) != why.Reasons {
		t.Errorf("%+v", st.Misses)
	}
}
