package main

import (
	"slices"
	"strings"
	"testing"

	"lookaside/ipc/client"
	"lookaside/ipc/wire"
	"lookaside/sidecar/admin"
)

func TestWeightsFromTheCommandLine(t *testing.T) {
	s := serveProcess(t)
	c := commander{t, s.dir}
	c.fails([]string{"weights", "step-1"}, "no engine is connected", "lookaside.weights_epoch")
	c.fails([]string{"weights", "--all"}, "NAME")

	schedulers := map[string]*client.Session{}
	for _, engine := range []string{"one", "two"} {
		h := hello(wire.RoleWorker)
		h.EngineID = engine
		s.workerOf(h)
		h = hello(wire.RoleScheduler)
		h.EngineID = engine
		ses, err := client.Dial(s.dir, h, patience)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { ses.Close() })
		schedulers[engine] = ses
	}
	c.says([]string{"weights"}, nil, "ENGINE", "one", "two", "as the model names them")
	c.fails([]string{"weights", "step-1"}, "2 engines", "one, two")
	c.fails([]string{"weights", "step-1", "--engine=three"}, `"three"`, "one, two")
	c.fails([]string{"weights", "a\nb", "--all"}, "printable")
	c.fails([]string{"weights", strings.Repeat("ö", 200), "--all"}, "256 bytes")
	c.says([]string{"weights", "step-1", "--engine=one"}, nil, "named step-1", "one")
	var told admin.NameWeightsResult
	c.says([]string{"weights", "", "--all", "--json"}, &told)
	if !slices.Equal(told.Engines, []string{"one", "two"}) {
		t.Errorf("%+v", told)
	}
	for engine, want := range map[string][]string{"one": {"step-1", ""}, "two": {""}} {
		ses := schedulers[engine]
		if err := ses.Call(&wire.Ping{ID: 1}, new(wire.Pong), patience); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(ses.Epochs, want) {
			t.Errorf("%s was told %q", engine, ses.Epochs)
		}
	}
}
