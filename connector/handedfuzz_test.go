package connector

import (
	"reflect"
	"testing"
	"time"

	"lookaside/ipc/handover"
	"lookaside/tiers/engine"
)

// What decodes as the state of a server is encoded to the same again.
func FuzzHandedState(f *testing.F) {
	state := handedState{
		spaces:  []handedSpace{{fingerprint: make([]byte, 32), hello: []byte("hello")}},
		regions: []uint32{0, 1 << 31},
		sessions: []handedSession{{file: 0, direct: -1, id: 7, secret: make([]byte, 16),
			engine: "e", ranks: 1, since: 5, notices: []string{"n"}, unmapping: []uint32{3},
			loads: []handedAccount{{handle: 9, pages: []uint32{1, 2}}}, held: [][]byte{{1}},
			lookups: [][]byte{{2, 3}}, lingers: true, why: "bad"}},
		visitors: []handedVisitor{{file: 1, hello: []byte("x"), held: 2}},
		leases: engine.Handover{Generation: 4, Held: []engine.Held{{Kind: engine.HeldLookup,
			Owner: 7, Lookup: 1, Takers: 1, Left: time.Second, Pages: 3,
			Places: []engine.Place{{Region: 0, Offset: 4096}}, Ends: make([]byte, 32)}}},
		pins: [][]byte{make([]byte, 32)},
	}
	b := handover.Encode(state.fields)
	var again handedState
	if err := handover.Decode(b, again.fields); err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		var one, two handedState
		if handover.Decode(b, one.fields) != nil {
			return
		}
		if err := handover.Decode(handover.Encode(one.fields), two.fields); err != nil ||
			!reflect.DeepEqual(one, two) {
			t.Errorf("%+v became %+v: %v", one, two, err)
		}
	})
}
