package connector_test

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vmihailenco/msgpack/v5"
	"golang.org/x/sys/unix"

	"lookaside/connector"
	"lookaside/ipc"
	"lookaside/ipc/client"
	"lookaside/ipc/wire"
	"lookaside/tiers/engine"
)

// directHello is schedulerHello with a direct socket, over which no message is lost.
func directHello(engine string) *wire.Hello {
	h := schedulerHello(engine)
	h.Direct = true
	return h
}

// files returns files of copies of descriptors.
func files(t testing.TB, fds ...int) (out []*os.File) {
	t.Helper()
	for _, fd := range fds {
		own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		check(t, err)
		out = append(out, os.NewFile(uintptr(own), "handed over"))
	}
	return out
}

// takeOver replaces all of the rig but its memory and its tiers by new ones, as another process
// would: the directory's part is played by the pieces that OnCarve has told of and by a walk over
// the old engine. quiet is called while the old server only looks up and loads; nil: nothing is.
func (r *rig) takeOver(quiet func()) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	check(r.t, r.server.Hold(ctx))
	r.server.Quiet(len(r.tiers) > 0)
	check(r.t, r.server.AwaitChanges(ctx))
	r.stack.Settle(0)
	check(r.t, r.stack.Flush(ctx))
	r.stack.Close()

	old := *r
	r.pieces = map[uint32]engine.Piece{}
	r.openEngine()
	r.restore(&old)
	if quiet != nil {
		now := *r
		*r = old // who looks at the rig looks at the one that serves
		quiet()
		*r = now
	}

	old.cancel()
	check(r.t, <-old.served)
	check(r.t, old.server.Freeze(ctx))
	state, fds, err := old.server.Export(old.lookups.Detach())
	check(r.t, err)
	sockets := files(r.t, fds...)
	for _, fd := range fds {
		check(r.t, unix.Close(fd))
	}
	lock, sock, err := old.listener.FDs()
	check(r.t, err)
	moved := files(r.t, lock, sock)
	check(r.t, old.listener.Leave())
	old.server.Close()
	old.engine.Close()
	check(r.t, old.control.Leave())

	r.listener, err = ipc.AdoptListener(r.dir, moved[0], moved[1], ipc.Options{MaxSessions: 64,
		Log: r.log})
	check(r.t, err)
	a, err := r.server.Adopt(state, sockets, r.listener)
	check(r.t, err)
	for id := range r.there {
		check(r.t, r.engine.Undrain(id))
	}
	r.openLookups()
	check(r.t, a.Start())
	check(r.t, r.engine.Check())
	r.serve()
}

// restore gives the rig's engine what another rig's holds.
func (r *rig) restore(from *rig) {
	r.t.Helper()
	for id := range from.there {
		reg := r.regions[id]
		check(r.t, r.engine.AddDrainedRegion(id, reg.Size()))
		r.server.AnnounceRegion(connector.Region{ID: id, Kind: string(reg.Kind()), FD: reg.FD(),
			SizeBytes: reg.Size(), PageSize: reg.PageSize()})
	}
	numbers, spaces := map[uint32]uint32{}, map[engine.SpaceID]engine.SpaceID{}
	for num, p := range from.pieces {
		var err error
		numbers[num], err = r.engine.RestorePiece(p)
		check(r.t, err)
	}
	for _, sp := range from.engine.Spaces() {
		id, err := r.engine.RecoverSpace(sp.Fingerprint, sp.Geometry)
		check(r.t, err)
		spaces[sp.ID] = id
	}
	var at engine.PatrolPlace
	for order := uint64(1); ; order++ {
		v, _, ok := from.engine.NextPatrol(&at, nil)
		if !ok {
			break
		}
		check(r.t, r.engine.RestoreIn(numbers[v.Piece], []engine.Restored{{Slot: v.Slot,
			Space: spaces[v.Space], First: v.First, Pages: v.Pages, Prev: bytes.Clone(v.Prev),
			Hashes: bytes.Clone(v.Hashes), Order: order}}))
	}
	r.engine.EndRestore()
}

// Sessions go on over a takeover with all that they have: a load that is open is read and released
// after it, a lookup that was answered is loaded, what waited is replied to in its order.
func TestTakeover(t *testing.T) {
	r := newRig(t, rigOptions{})
	w, other := r.worker(workerHello("e")), r.worker(workerHello("other"))
	s := r.scheduler(directHello("e"))
	p, q := onePrefix(1), onePrefix(2)
	w.store(p, 0, 16)
	open, hit := s.lookup(p, 0, 16)
	if hit != 16 {
		t.Fatalf("%d pages hit", hit)
	}
	g, err := w.load(s, open, p, 0, 8)
	check(t, err)
	later, _ := s.lookup(p, 0, 12)

	var held []uint32
	r.takeOver(func() {
		// A load begins and ends while the next process restores.
		id, hit := s.lookup(p, 0, 4)
		if hit != 4 {
			t.Errorf("%d pages hit", hit)
		}
		g, err := w.load(s, id, p, 0, 4)
		check(t, err)
		check(t, w.ses.Send(&wire.Release{Load: g.Load}))
		// Stores wait, and with them what comes after them.
		for i := range 3 {
			m := wire.PrepareStore{ID: w.ses.NextID(), FirstPage: uint32(4 * i),
				Hashes: q.hashes(4*i, 4)}
			if i > 0 {
				m.Prev = q.hashes(4*i-1, 1)
			}
			held = append(held, m.ID)
			check(t, w.ses.Send(&m))
		}
		var pong wire.Pong
		check(t, w.call(&wire.Ping{ID: 77}, &pong))
	})
	for _, id := range held {
		b, err := w.recv(false)
		check(t, err)
		var g wire.StoreGrant
		check(t, g.Decode(b, &wire.DefaultLimits))
		if g.ID != id || g.Store == 0 {
			t.Fatalf("%+v, want the reply to %d", g, id)
		}
		check(t, w.fill(q, g.Grants))
		check(t, w.ses.Send(&wire.CommitStore{Store: g.Store}))
	}
	w.sync()
	if _, hit := s.lookup(q, 0, 12); hit != 12 {
		t.Errorf("%d pages hit of what waited to be stored", hit)
	}
	check(t, w.verify(p, g.Extents, 0, 8))
	check(t, w.ses.Send(&wire.Release{Load: g.Load}))
	if g, err = w.load(s, later, p, 0, 12); err != nil {
		t.Fatalf("a lookup that was answered before: %v", err)
	}
	check(t, w.verify(p, g.Extents, 0, 12))
	check(t, w.ses.Send(&wire.Release{Load: g.Load, Bad: []uint32{0}}))
	w.sync()
	if _, hit := s.lookup(p, 0, 16); hit != 0 {
		t.Errorf("%d pages hit of what was reported as bad", hit)
	}
	other.sync()
	if n := r.server.Sessions(); n != 3 {
		t.Errorf("%d sessions", n)
	}
	r.worker(workerHello("new")).store(onePrefix(5), 0, 8)
	r.takeOver(nil)
	w.sync()
	if _, hit := s.lookup(q, 0, 12); hit != 12 {
		t.Errorf("%d pages hit after the second takeover", hit)
	}
}

// A load that reports bad extents while the next process restores is handled there: the chunk is
// not found any more.
// TestWhatClientsSayOfThemselves checks that it is shown, is no part of the space, and outlives the
// process.
func TestWhatClientsSayOfThemselves(t *testing.T) {
	r := newRig(t, rigOptions{})
	one, other := workerHello("e"), workerHello("other")
	one.About = []wire.Field{{Key: "failure_policy", Value: "fail"}, {Key: "vllm", Value: "0.33"}}
	r.worker(one)
	r.worker(other)
	shown := func() {
		t.Helper()
		st := r.server.Status()
		if len(st.Spaces) != 1 || len(st.Sessions) != 2 {
			t.Fatalf("%d spaces, %d sessions", len(st.Spaces), len(st.Sessions))
		}
		for _, ses := range st.Sessions {
			want := map[string]string{}
			if ses.EngineID == "e" {
				want = map[string]string{"failure_policy": "fail", "vllm": "0.33"}
			}
			if !maps.Equal(ses.About, want) {
				t.Errorf("engine %s says %v", ses.EngineID, ses.About)
			}
		}
	}
	shown()
	r.takeOver(nil)
	shown()
}

func TestTakeoverWithBadExtents(t *testing.T) {
	r := newRig(t, rigOptions{})
	w, s := r.worker(workerHello("e")), r.scheduler(directHello("e"))
	p := onePrefix(1)
	w.store(p, 0, 16)
	id, _ := s.lookup(p, 0, 16)
	g, err := w.load(s, id, p, 0, 16)
	check(t, err)
	r.takeOver(func() {
		check(t, w.ses.Send(&wire.Release{Load: g.Load, Bad: []uint32{1}}))
		w.sync()
	})
	w.sync()
	if _, hit := s.lookup(p, 0, 16); hit != perChunk {
		t.Errorf("%d pages hit", hit)
	}
}

// If a store does not end, all goes on, and who holds it is named.
func TestHoldNamesWhoDoesNotEnd(t *testing.T) {
	r := newRig(t, rigOptions{})
	w := r.worker(workerHello("e"))
	g, err := w.prepare(onePrefix(1), 0, 8)
	check(t, err)
	ctx, cancel := context.WithCancelCause(context.Background())
	held := make(chan error, 1)
	go func() { held <- r.server.Hold(ctx) }()
	r.eventually("stores are held back", r.server.Holding)
	next := wire.PrepareStore{ID: w.ses.NextID(), Hashes: onePrefix(2).hashes(0, 8)}
	check(t, w.ses.Send(&next))
	stranger := make(chan error, 1)
	go func() {
		late, err := dialWorker(r.dir, workerHello("late"))
		if err == nil {
			late.close()
		}
		stranger <- err
	}()
	w.sync()
	cancel(fmt.Errorf("it took too long"))
	err = <-held
	if want := fmt.Sprintf("it took too long: open stores: 1 of pid %d (engine \"e\")",
		os.Getpid()); err == nil || err.Error() != want {
		t.Errorf("%v; want %s", err, want)
	}
	r.server.Resume()
	check(t, <-stranger)
	var other wire.StoreGrant
	b, err := w.recv(false)
	check(t, err)
	check(t, other.Decode(b, &wire.DefaultLimits))
	if other.ID != next.ID || other.Store == 0 {
		t.Errorf("%+v", other)
	}
	for _, store := range []uint64{g.Store, other.Store} {
		check(t, w.ses.Send(&wire.AbortStore{Store: store}))
	}
	w.sync()
}

// A scheduler without a direct socket has its answers over ZMQ, as soon as that has connected anew.
func TestTakeoverOverZMQ(t *testing.T) {
	r := newRig(t, rigOptions{})
	w, s := r.worker(workerHello("e")), r.scheduler(schedulerHello("e"))
	p := onePrefix(1)
	w.store(p, 0, 16)
	for range 3 {
		if _, hit := s.lookup(p, 0, 16); hit != 16 {
			t.Errorf("%d pages hit", hit)
		}
		r.takeOver(nil)
	}
	if _, hit := s.lookup(p, 0, 16); hit != 16 {
		t.Errorf("%d pages hit", hit)
	}
}

// Who connects meanwhile is welcomed by the next process.
func TestTakeoverWithNewcomers(t *testing.T) {
	r := newRig(t, rigOptions{})
	w := r.worker(workerHello("e"))
	w.store(onePrefix(1), 0, 8)
	connected, dir := make(chan error, 8), r.dir
	r.takeOver(func() {
		for i := range cap(connected) {
			go func() {
				w, err := dialWorker(dir, workerHello(fmt.Sprint("late", i)))
				if err == nil {
					w.close()
				}
				connected <- err
			}()
		}
		time.Sleep(time.Millisecond)
	})
	for range cap(connected) {
		check(t, <-connected)
	}
	w.sync()
}

// A client that dies during a takeover leaves nothing behind.
func TestTakeoverWithDeadClients(t *testing.T) {
	r := newRig(t, rigOptions{})
	w, s := r.worker(workerHello("e")), r.scheduler(directHello("e"))
	p := onePrefix(1)
	w.store(p, 0, 16)
	id, _ := s.lookup(p, 0, 16)
	if _, err := w.load(s, id, p, 0, 8); err != nil {
		t.Fatal(err)
	}
	_, _ = s.lookup(p, 0, 16)
	r.takeOver(func() {
		w.close()
		s.close()
	})
	r.eventually("they are gone", func() bool { return r.server.Sessions() == 0 })
	r.eventually("what they held is free", func() bool { return r.engine.Stats().Leases == 0 })
}

// LMCache's sockets go on in the next process.
func TestTakeoverWithLMCache(t *testing.T) {
	r := newRig(t, rigOptions{lmcache: true})
	w := r.worker(lmHello("lm"))
	storeLM(t, w, 1, 5)
	l, err := client.NewLookups(r.lmcache[0], r.lmcache[1], nil)
	check(t, err)
	defer func() {
		check(t, l.Close())
		_ = os.Remove(strings.TrimPrefix(r.lmcache[1], "ipc://")) // libzmq leaves it
	}()
	b, err := msgpack.Marshal(map[string]any{"type": "LookupRequestMsg", "lookup_id": "x",
		"hashes": []int64{lmHash(1, 0), lmHash(1, 1)}, "offsets": []uint32{256, 256}})
	check(t, err)
	ask := func() (tokens any) {
		t.Helper()
		// LMCache asks again if it hears nothing: its client may still be connecting.
		r.eventually("an answer", func() bool {
			check(t, l.Send(b))
			frames, err := l.Recv(50 * time.Millisecond)
			var m map[string]any
			if err != nil || msgpack.Unmarshal(frames[0], &m) != nil {
				return false
			}
			tokens = m["num_hit_tokens"]
			return true
		})
		return tokens
	}
	for range 2 {
		if got := fmt.Sprint(ask()); got != "512" {
			t.Errorf("%s tokens hit", got)
		}
		r.takeOver(nil)
	}
	if got := fmt.Sprint(ask()); got != "512" {
		t.Errorf("%s tokens hit", got)
	}
}
