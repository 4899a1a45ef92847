package connector_test

import (
	"context"
	"encoding/binary"
	"errors"
	"testing"

	"lookaside/ipc/wire"
	"lookaside/tiers"
	"lookaside/tiers/tiertest"
)

// contains asks for pages of a prefix, and returns the counts of each chunk.
func (w *worker) contains(p prefix, first, n int, waitMs uint32) (held, below []int,
	m wire.Contained) {
	w.t.Helper()
	q := wire.Contains{ID: 6, FirstPage: uint32(first), Hashes: p.hashes(first, n), WaitMs: waitMs}
	if first > 0 {
		q.Prev = p.hashes(first-1, 1)
	}
	check(w.t, w.call(&q, &m))
	for i := 0; i < len(m.Held); i += 2 {
		held = append(held, int(binary.LittleEndian.Uint16(m.Held[i:])))
		below = append(below, int(binary.LittleEndian.Uint16(m.Below[i:])))
	}
	return held, below, m
}

func wantCounts(t *testing.T, what string, got []int, want ...int) {
	t.Helper()
	for i := range want {
		if len(got) != len(want) || got[i] != want[i] {
			t.Fatalf("%s: %v, want %v", what, got, want)
		}
	}
}

// Contains counts the pages of each chunk by itself, leases nothing, and brings nothing up.
func TestContains(t *testing.T) {
	r := newRig(t, rigOptions{})
	w := r.worker(workerHello("e"))
	p := onePrefix(7)
	w.store(p, 0, perChunk)
	w.store(p, 2*perChunk, 2)
	held, below, m := w.contains(p, 0, 3*perChunk, 0)
	wantCounts(t, "held", held, perChunk, 0, 2)
	wantCounts(t, "below", below, 0, 0, 0)
	if m.Waiting != 0 || m.Tiers != 0 || m.ID != 6 {
		t.Fatalf("%+v", m)
	}
	held, _, _ = w.contains(p, 2*perChunk, 1, 0)
	wantCounts(t, "a part of a chunk", held, 1)
	held, _, _ = w.contains(onePrefix(8), 0, perChunk+1, 0)
	wantCounts(t, "another prefix", held, 0, 0)
	if st := r.engine.Stats(); st.Leases != 0 || st.Lookups != 0 {
		t.Fatalf("%+v", st)
	}
	for what, q := range map[string]wire.Contains{
		"the middle of a chunk": {FirstPage: 1, Prev: p.hashes(0, 1), Hashes: p.hashes(1, 1)},
		"short hashes":          {Hashes: p.hashes(0, 1)[:8]},
	} {
		var m wire.Contained
		t.Log(what)
		wantCode(t, w.call(&q, &m), wire.CodeMalformed)
	}
}

// With a time to wait, the reply comes when what was stored is in the tiers, or will never be.
func TestContainsWaitsForTheTiers(t *testing.T) {
	r := newRig(t, rigOptions{tiers: []tiertest.MemoryOptions{{Local: true}}})
	w := r.worker(workerHello("e"))
	p := onePrefix(7)
	open, full := make(chan struct{}), onePrefix(9)
	r.tiers[0].SetFault(func(ctx context.Context, op tiertest.Op, run tiers.Run) error {
		if op != tiertest.Store {
			return nil
		}
		if string(run.Hashes[:8]) == string(full.hashes(0, 1)[:8]) {
			return errors.New("no space left")
		}
		select {
		case <-open:
		case <-ctx.Done():
		}
		return nil
	})
	w.store(p, 0, perChunk)
	held, below, m := w.contains(p, 0, perChunk, 0)
	wantCounts(t, "held at once", held, perChunk)
	wantCounts(t, "below at once", below, 0)
	if m.Waiting != 1 || m.Tiers != 1 {
		t.Fatalf("%+v", m)
	}
	if _, _, m = w.contains(p, 0, perChunk, 1); m.Waiting != 1 {
		t.Fatalf("after a millisecond: %+v", m)
	}
	close(open)
	for m.Waiting > 0 { // a reply waits for a second at most, which can be short here
		_, below, m = w.contains(p, 0, perChunk, 10_000)
	}
	wantCounts(t, "below", below, perChunk)

	w.store(full, 0, perChunk)
	for m.Waiting = 1; m.Waiting > 0; {
		held, below, m = w.contains(full, 0, perChunk, 10_000)
	}
	wantCounts(t, "held, refused by the tier", held, perChunk)
	wantCounts(t, "below, refused by the tier", below, 0)
}

// What only a tier holds counts, and stays there.
func TestContainsInATier(t *testing.T) {
	r := newRig(t, rigOptions{tiers: []tiertest.MemoryOptions{{Local: true}}})
	w := r.worker(workerHello("e"))
	p := onePrefix(7)
	w.store(p, 0, perChunk+1)
	m := wire.Contained{Waiting: 1}
	for m.Waiting > 0 {
		_, _, m = w.contains(p, 0, perChunk+1, 10_000)
	}
	_, err := r.stack.Clear(t.Context(), tiers.Fingerprint(w.ses.Welcome.Fingerprint), "arena")
	check(t, err)
	held, below, _ := w.contains(p, 0, 2*perChunk, 0)
	wantCounts(t, "held", held, perChunk, 1)
	wantCounts(t, "below", below, perChunk, 1)
}
