package connector_test

import (
	"bytes"
	"errors"
	"testing"

	"lookaside/ipc/client"
	"lookaside/ipc/wire"
)

// TestFetch stores a page, and finds it in one round trip: as long as it is leased it is not
// evicted, and afterwards it is what any other page is.
func TestFetch(t *testing.T) {
	r := newRig(t, rigOptions{share: 0.01})
	w := r.worker(workerHello("e"))
	p := onePrefix(7)
	fetch := func(hash []byte) (*wire.LoadGrant, error) {
		var g wire.LoadGrant
		err := w.call(&wire.Fetch{ID: 5, Hash: hash}, &g)
		return &g, err
	}
	_, err := fetch(p.hashes(0, 1))
	wantCode(t, err, wire.CodeNotFound)
	w.store(p, 0, 1)
	g, err := fetch(p.hashes(0, 1))
	check(t, err)
	if g.ID != 5 || g.Load == 0 || len(g.Extents) != 1 || g.Extents[0].Page != 0 ||
		g.Extents[0].Pages != 1 || wire.Names(p.hashes(0, 1)) != [wire.NamesBytes]byte(g.Names) {
		t.Fatalf("%+v", g)
	}
	e := g.Extents[0]
	if !bytes.Equal(w.regions[e.Region][e.Offset:e.Offset+pageBytes], p.content(0)) {
		t.Error("other bytes")
	}
	if n := r.engine.Stats().Leases; n == 0 {
		t.Error("nothing is leased")
	}
	check(t, w.ses.Send(&wire.Release{Load: g.Load}))
	w.sync()
	if n := r.engine.Stats().Leases; n != 0 {
		t.Errorf("%d leased after the release", n)
	}
	// A page of another place in its prefix is no page 0.
	long := onePrefix(9)
	w.store(long, 0, 6)
	for page := 1; page < 6; page++ {
		_, err = fetch(long.hashes(page, 1))
		wantCode(t, err, wire.CodeNotFound)
	}
	other := onePrefix(8)
	_, err = fetch(other.hashes(0, 1))
	wantCode(t, err, wire.CodeNotFound)
	_, err = fetch(p.hashes(0, 1)[:8])
	wantCode(t, err, wire.CodeMalformed)

	// One client can lease a share of the arena only, and is told.
	for n := range uint8(200) {
		w.store(onePrefix(n), 0, 1)
	}
	var loads []uint64
	var held []uint8
	for n := range uint8(200) {
		p := onePrefix(n)
		if g, err = fetch(p.hashes(0, 1)); err == nil {
			loads, held = append(loads, g.Load), append(held, n)
		} else if code(err) != wire.CodeNotFound {
			break
		}
	}
	wantCode(t, err, wire.CodeBusy)
	if len(loads) < 2 {
		t.Errorf("only %d leases", len(loads))
	}
	check(t, w.ses.Send(&wire.Release{Load: loads[0]}))
	p = onePrefix(held[0])
	_, err = fetch(p.hashes(0, 1))
	check(t, err)
}

func code(err error) string {
	var e *client.CallError
	if !errors.As(err, &e) {
		return ""
	}
	return e.Code
}
