package connector_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/pebbe/zmq4"

	"lookaside/ipc/client"
	"lookaside/ipc/wire"
)

// held is what the engine counts as held by sessions, and what is free.
func (r *rig) held() [9]int {
	st := r.engine.Stats()
	return [...]int{st.Leases, st.LeasedSlots, st.OpenLookups, st.OpenLoads, st.OpenStores,
		st.FillingSlots, st.FreeSlots, st.ReadySlots, st.Pages}
}

// TestDoubleAndForeignEndsChangeNothing: what ends a load or a store a second time, or in the name
// of another session, or by a number that was another thing's, is refused and counted, and every
// count of what is held stays as it was.
func TestDoubleAndForeignEndsChangeNothing(t *testing.T) {
	r := newRig(t, rigOptions{})
	w, s := r.worker(workerHello("e")), r.scheduler(schedulerHello("e"))
	foreign, same := r.worker(workerHello("other")), r.worker(workerHello("e"))
	p, q := onePrefix(1), onePrefix(2)
	w.store(p, 0, 12)
	id, _ := s.lookup(p, 0, 12)
	load, err := w.load(s, id, p, 0, 12)
	check(t, err)
	store, err := w.prepare(q, 0, 8)
	check(t, err)
	check(t, w.fill(q, store.Grants))

	refused := func() uint64 {
		return r.errorCount("stale") + r.errorCount("not_found") +
			r.errorCount("malformed")
	}
	unchanged := func(what string, by *worker, messages ...wire.Message) {
		t.Helper()
		before, errs := r.held(), refused()
		for i, m := range messages {
			check(t, by.ses.Send(m))
			by.sync()
			if now := r.held(); now != before {
				t.Fatalf("%s, %v: held was %v, is %v", what, m.Type(), before, now)
			}
			if n := refused() - errs; n != uint64(i+1) {
				t.Errorf("%s, %v: %d refusals counted of %d", what, m.Type(), n, i+1)
			}
		}
	}
	ends := []wire.Message{
		&wire.Release{Load: load.Load}, &wire.Release{Load: load.Load, Bad: []uint32{0, 1, 2}},
		&wire.CommitStore{Store: store.Store}, &wire.CommitStore{Store: store.Store,
			Failed: []uint32{0}}, &wire.AbortStore{Store: store.Store},
	}
	unchanged("by another engine's worker", foreign, ends...)
	unchanged("by another worker of the engine", same, ends...)
	unchanged("by the other's number", w,
		&wire.Release{Load: store.Store}, &wire.CommitStore{Store: load.Load},
		&wire.AbortStore{Store: load.Load},
		&wire.Release{Load: load.Load + 1<<32}, &wire.Release{Load: 1},
		&wire.Release{Load: ^uint64(0)}, &wire.AbortStore{Store: ^uint64(0)})
	unchanged("by extents that there are not", w, &wire.Release{Load: load.Load, Bad: []uint32{3}},
		&wire.CommitStore{Store: store.Store, Failed: []uint32{2}})

	check(t, w.ses.Send(&wire.Release{Load: load.Load}))
	check(t, w.ses.Send(&wire.CommitStore{Store: store.Store}))
	w.sync()
	if st := r.engine.Stats(); st.OpenLoads+st.OpenStores+st.Leases+st.FillingSlots != 0 ||
		st.Pages != 20 {
		t.Fatalf("held after the ends: %v", r.held())
	}
	unchanged("a second time", w, ends...)

	// What is begun next may use the same books: the numbers of before do not end it.
	id, _ = s.lookup(p, 0, 12)
	again, err := w.load(s, id, p, 0, 12)
	check(t, err)
	next, err := w.prepare(onePrefix(3), 0, 8)
	check(t, err)
	if again.Load == load.Load || next.Store == store.Store {
		t.Fatal("a number is used again")
	}
	unchanged("by numbers of before", w, ends...)
	check(t, w.verify(p, again.Extents, 0, 12))
	before := r.held()
	_, err = w.load(s, id, p, 0, 12) // the lookup that was loaded
	wantCode(t, err, wire.CodeNotFound)
	if now := r.held(); now != before {
		t.Errorf("held was %v, is %v", before, now)
	}
}

// TestPicklesAreNotEvaluated: a pickle on any socket is a message that makes no sense, and nothing
// else. Evaluated it would make a file.
func TestPicklesAreNotEvaluated(t *testing.T) {
	r := newRig(t, rigOptions{lmcache: true})
	w, s := r.worker(workerHello("e")), r.scheduler(schedulerHello("e"))
	p := onePrefix(1)
	w.store(p, 0, 4)
	proof := filepath.Join(t.TempDir(), "evaluated")
	pickles := [][]byte{
		fmt.Appendf(nil, "cposix\nsystem\n(S'touch %s'\ntR.", proof), // protocol 0
		append(append([]byte("\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c"),
			append([]byte{byte(len("touch ") + len(proof))}, "touch "+proof...)...),
			"\x94\x85\x94R\x94."...),
	}
	for _, b := range pickles {
		// In place of a Hello.
		c, err := client.Connect(r.dir)
		check(t, err)
		check(t, c.SendRaw(b))
		m, _, err := c.Recv(patience)
		check(t, err)
		var no wire.Refuse
		check(t, no.Decode(m, &wire.DefaultLimits))
		if no.Code != wire.RefuseMalformed {
			t.Errorf("%+v", no)
		}
		c.Close()
		// Of a session that was welcomed, as a whole message and inside one.
		for _, raw := range [][]byte{b, (&wire.PrepareStore{ID: 1, Hashes: b}).Append(nil)} {
			h := workerHello("victim")
			h.DigestBytes = 8
			v := r.worker(h)
			check(t, v.ses.SendRaw(raw))
			if m, err := v.recv(false); err == nil {
				if k, _ := wire.Peek(m); k != wire.TypeError && k != wire.TypeStoreGrant {
					t.Errorf("answered by a %v", k)
				}
			}
			v.close()
		}
		// On the sockets of lookups, native and LMCache's, and where answers come from.
		before := r.lookups.Stats().Malformed + r.errorCount("malformed")
		check(t, s.lookups.Send(b))
		l, err := client.NewLookups(r.lmcache[0], r.lmcache[1], nil)
		check(t, err)
		check(t, l.Send(b))
		check(t, l.Send([]byte("id"), b, b, b))
		ctx, err := zmq4.NewContext()
		check(t, err)
		d, err := ctx.NewSocket(zmq4.DEALER)
		check(t, err)
		check(t, errors.Join(d.SetLinger(0), d.Connect(s.ses.Welcome.ReplyEndpoint)))
		_, err = d.SendBytes(b, 0)
		check(t, err)
		r.eventually("the pickles are counted", func() bool {
			return r.lookups.Stats().Malformed+
				r.errorCount("malformed") >= before+4
		})
		check(t, errors.Join(d.Close(), ctx.Term(), l.Close()))
		_ = os.Remove(strings.TrimPrefix(r.lmcache[1], "ipc://"))
	}
	if _, hit := s.lookup(p, 0, 4); hit != 4 {
		t.Errorf("%d pages hit afterwards", hit)
	}
	if _, err := os.Stat(proof); err == nil {
		t.Error("a pickle was evaluated")
	}
}

// TestLookupNumbersUsedAgain: a lookup's number may be used again, answered late, cancelled twice
// and loaded after it was cancelled: each leaves exactly what the last one asked for.
func TestLookupNumbersUsedAgain(t *testing.T) {
	r := newRig(t, rigOptions{})
	w, s := r.worker(workerHello("e")), r.scheduler(schedulerHello("e"))
	p, q := onePrefix(1), onePrefix(2)
	w.store(p, 0, 8)
	w.store(q, 0, 4)
	ask := func(p prefix, pages int) int {
		res, err := s.lookups.Lookup(&wire.Lookup{
			Session: s.ses.Welcome.Session, Secret: s.ses.Welcome.Secret, Lookup: 7,
			Hashes: p.hashes(0, pages),
		}, patience)
		check(t, err)
		return int(res.HitPages)
	}
	want := func(slots int) {
		t.Helper()
		r.eventually(fmt.Sprint(slots, " slots are leased"), func() bool {
			st := r.engine.Stats()
			return st.LeasedSlots == slots && st.OpenLookups == min(slots, 1)
		})
	}
	for range 3 {
		if ask(p, 8) != 8 || ask(q, 4) != 4 {
			t.Fatal("not all is hit")
		}
		want(1)
		_, err := w.load(s, 7, p, 0, 8) // by the number, for what it was before
		wantCode(t, err, wire.CodeStale)
		if ask(p, 8) != 8 {
			t.Fatal("not all is hit")
		}
		want(2)
		s.cancel(7)
		s.cancel(7)
		want(0)
		_, err = w.load(s, 7, p, 0, 8)
		wantCode(t, err, wire.CodeNotFound)
	}
	if n := r.errorCount("forged"); n != 0 {
		t.Errorf("%d forgeries", n)
	}
}
