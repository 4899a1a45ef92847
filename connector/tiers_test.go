package connector_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vmihailenco/msgpack/v5"

	"lookaside/ipc/client"
	"lookaside/ipc/wire"
	"lookaside/tiers"
	"lookaside/tiers/tiertest"
)

// slow is a tier across a network, and gate one whose loads wait until it is opened.
var slow = tiertest.MemoryOptions{Latency: 2 * time.Millisecond, BytesPerSec: 4 << 20}

// gate makes a tier's calls of some kinds wait. open lets them go on.
func gate(m *tiertest.Memory, ops ...tiertest.Op) (open func()) {
	opened := make(chan struct{})
	m.SetFault(func(ctx context.Context, op tiertest.Op, _ tiers.Run) error {
		for _, o := range ops {
			if o == op {
				select {
				case <-opened:
				case <-ctx.Done():
					return context.Cause(ctx)
				}
			}
		}
		return nil
	})
	return func() { close(opened) }
}

// below stores pages of a prefix, waits until they are in the tiers, and clears the arena.
func (r *rig) below(w *worker, p prefix, pages int) {
	r.t.Helper()
	w.store(p, 0, pages)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	check(r.t, r.stack.Flush(ctx))
	for _, sp := range r.engine.Spaces() {
		r.engine.ClearSpace(sp.ID)
	}
}

// send asks without waiting.
func (s *scheduler) send(p prefix, first, pages int) (id uint64) {
	s.t.Helper()
	s.next++
	m := wire.Lookup{Session: s.ses.Welcome.Session, Secret: s.ses.Welcome.Secret, Lookup: s.next,
		FirstPage: uint32(first), Hashes: p.hashes(first, pages)}
	if first > 0 {
		m.Prev = p.hashes(first-1, 1)
	}
	check(s.t, s.lookups.Send(m.Append(nil)))
	return s.next
}

// recv receives one message on the lookup socket.
func (s *scheduler) recv() wire.Message {
	s.t.Helper()
	frames, err := s.lookups.Recv(patience)
	check(s.t, err)
	t, err := wire.Peek(frames[0])
	check(s.t, err)
	m := wire.New(t)
	check(s.t, m.Decode(frames[0], &wire.DefaultLimits))
	return m
}

// quiet checks that no message comes.
func (s *scheduler) quiet() {
	s.t.Helper()
	if frames, err := s.lookups.Recv(50 * time.Millisecond); !errors.Is(err,
		os.ErrDeadlineExceeded) {
		s.t.Fatalf("%x, %v", frames, err)
	}
}

// What only a tier has is promised, then answered, then loaded with the right bytes.
func TestLookupInTiers(t *testing.T) {
	for name, o := range map[string]tiertest.MemoryOptions{"local": {Local: true}, "remote": slow} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, rigOptions{tiers: []tiertest.MemoryOptions{o}})
			w := r.worker(workerHello("e"))
			s := r.scheduler(schedulerHello("e"))
			p := prefix{stretches: [4]uint8{1, 2, 3, 4}, stretch: 16}
			r.below(w, p, 30)
			id := s.send(p, 0, 64)
			pending, ok := s.recv().(*wire.LookupPending)
			if !ok || pending.Lookup != id || pending.Pages != 0 {
				t.Fatalf("%+v", pending) // at once: it takes longer than what memory holds
			}
			pending, ok = s.recv().(*wire.LookupPending)
			if !ok || pending.Lookup != id || pending.Pages != 30 {
				t.Fatalf("%+v", pending)
			}
			result, ok := s.recv().(*wire.LookupResult)
			for !ok { // it may be promised again
				result, ok = s.recv().(*wire.LookupResult)
			}
			if result.Lookup != id || result.HitPages != 30 || result.HitTokens != 30*pageTokens {
				t.Fatalf("%+v", result)
			}
			g, err := w.load(s, id, p, 0, 30)
			check(t, err)
			check(t, w.ses.Send(&wire.Release{Load: g.Load}))
			w.sync()
			// By now the arena has it, and says so at once and alone.
			id, hit := s.lookup(p, 4, 60)
			if hit != 26 {
				t.Errorf("%d pages", hit)
			}
			s.cancel(id)
			c := r.server.Counters()
			if c.Lookups != 2 || c.HitPages != 56 || c.Promised == 0 || c.LookupPages != 124 {
				t.Errorf("%+v", c)
			}
			s.quiet()
		})
	}
}

// Lookups that wait delay none that need not, and are answered in whatever order they end.
func TestSlowTierDelaysNobody(t *testing.T) {
	r := newRig(t, rigOptions{tiers: []tiertest.MemoryOptions{slow}})
	w := r.worker(workerHello("e"))
	s := r.scheduler(schedulerHello("e"))
	p := prefix{stretches: [4]uint8{1, 2, 3, 4}, stretch: 16}
	q := prefix{stretches: [4]uint8{5, 6, 7, 8}, stretch: 16}
	r.below(w, p, 64)
	w.store(q, 0, 64)
	open := gate(r.tiers[0], tiertest.Load)
	late := s.send(p, 0, 64)
	for range 20 {
		_, hit := s.lookup(q, 0, 64) // skips the promise to the other
		if hit != 64 {
			t.Fatalf("%d pages", hit)
		}
	}
	open()
	for {
		if m, ok := s.recv().(*wire.LookupResult); ok {
			if m.Lookup != late || m.HitPages != 64 {
				t.Fatalf("%+v", m)
			}
			break
		}
	}
	_, err := w.load(s, late, p, 0, 64)
	check(t, err)
}

// A session that ends while its lookups wait leaves nothing behind; the rig's audit says so.
func TestSchedulerLeavesWhileTiersAreAsked(t *testing.T) {
	for _, op := range []tiertest.Op{tiertest.Contains, tiertest.Load} {
		t.Run(fmt.Sprint(op), func(t *testing.T) {
			r := newRig(t, rigOptions{tiers: []tiertest.MemoryOptions{slow}})
			w := r.worker(workerHello("e"))
			s := r.scheduler(schedulerHello("e"))
			p := prefix{stretches: [4]uint8{1, 2, 3, 4}, stretch: 16}
			r.below(w, p, 64)
			open := gate(r.tiers[0], op)
			for i := range 8 {
				s.send(p, 4*i, 64-4*i)
			}
			r.eventually("the lookups wait",
				func() bool { return r.stack.LookupStats().Pending == 8 })
			s.close()
			r.eventually("they have ended",
				func() bool {
					return r.stack.LookupStats().Pending == 0 &&
						r.engine.Stats().OpenLookups == 0
				})
			open()
			s = r.scheduler(schedulerHello("e"))
			if _, hit := s.lookup(p, 0, 64); hit != 64 {
				t.Errorf("%d pages", hit)
			}
		})
	}
}

// Trim and cancel reach lookups that wait.
func TestTrimAndCancelInTiers(t *testing.T) {
	r := newRig(t, rigOptions{tiers: []tiertest.MemoryOptions{slow}})
	w := r.worker(workerHello("e"))
	s := r.scheduler(schedulerHello("e"))
	p := prefix{stretches: [4]uint8{1, 2, 3, 4}, stretch: 16}
	r.below(w, p, 64)
	open := gate(r.tiers[0], tiertest.Load)
	cancelled, trimmed := s.send(p, 0, 64), s.send(p, 0, 64)
	for range 2 {
		if m, ok := s.recv().(*wire.LookupPending); !ok {
			t.Fatalf("%+v", m)
		}
	}
	s.cancel(cancelled)
	s.trim(trimmed, 42)
	r.eventually("one is cancelled", func() bool { return r.stack.LookupStats().Pending == 1 })
	open()
	for {
		m, ok := s.recv().(*wire.LookupResult)
		if !ok {
			continue
		}
		if m.Lookup != trimmed || m.HitPages != 64 {
			t.Fatalf("%+v", m)
		}
		break
	}
	_, err := w.load(s, trimmed, p, 40, 24)
	check(t, err)
	s.quiet()
}

// Clearing a space clears it in every tier, and a tier that cannot be cleared is not kept quiet.
func TestClearSpaceInTiers(t *testing.T) {
	r := newRig(t, rigOptions{tiers: []tiertest.MemoryOptions{{Local: true}, slow}})
	w := r.worker(workerHello("e"))
	s := r.scheduler(schedulerHello("e"))
	p := prefix{stretches: [4]uint8{1, 2, 3, 4}, stretch: 16}
	r.below(w, p, 64)
	var cleared wire.Cleared
	check(t, w.call(&wire.ClearSpace{ID: w.ses.NextID()}, &cleared))
	if cleared.Chunks != 32 {
		t.Errorf("%d chunks", cleared.Chunks)
	}
	if _, hit := s.lookup(p, 0, 64); hit != 0 {
		t.Errorf("%d pages", hit)
	}
	r.below(w, p, 64)
	r.tiers[1].SetFault(func(_ context.Context, op tiertest.Op, _ tiers.Run) error {
		if op == tiertest.Clear {
			return errors.New("the server is gone")
		}
		return nil
	})
	var failed *client.CallError
	if err := w.call(&wire.ClearSpace{ID: w.ses.NextID()}, &cleared); !errors.As(err, &failed) ||
		failed.Code != wire.CodeBusy || !strings.Contains(failed.Message, "t1") {
		t.Errorf("%v", err)
	}
}

// LMCache's lookups wait for tiers too, and are answered in the form that they came in.
func TestLMCacheInTiers(t *testing.T) {
	r := newRig(t, rigOptions{lmcache: true, tiers: []tiertest.MemoryOptions{slow}})
	w := r.worker(lmHello("lm"))
	storeLM(t, w, 1, 5)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	check(t, r.stack.Flush(ctx))
	l, err := client.NewLookups(r.lmcache[0], r.lmcache[1], nil)
	check(t, err)
	defer func() {
		check(t, l.Close())
		_ = os.Remove(strings.TrimPrefix(r.lmcache[1], "ipc://")) // libzmq leaves it
	}()
	hashes, offsets := []int64{}, []uint32{256, 256, 256, 256, 100}
	for i := range 5 {
		hashes = append(hashes, lmHash(1, i))
	}
	marshal := func(v any) []byte {
		b, err := msgpack.Marshal(v)
		check(t, err)
		return b
	}
	clearArena := func() {
		for _, sp := range r.engine.Spaces() {
			r.engine.ClearSpace(sp.ID)
		}
	}
	for i := range 6 {
		clearArena()
		id := fmt.Sprintf("req-%d", i)
		if i%2 == 0 {
			check(t, l.Send(marshal(map[string]any{"type": "LookupRequestMsg", "lookup_id": id,
				"hashes": hashes, "offsets": offsets, "request_configs": nil})))
		} else {
			check(t, l.Send([]byte(id), marshal(hashes), marshal(offsets), nil))
		}
		frames, err := l.Recv(patience)
		check(t, err)
		if i%2 == 0 {
			var m map[string]any
			check(t, msgpack.Unmarshal(frames[0], &m))
			if m["lookup_id"] != id || fmt.Sprint(m["num_hit_tokens"]) != "1124" {
				t.Fatalf("%v", m)
			}
		} else if len(frames) != 2 || string(frames[0]) != id ||
			binary.BigEndian.Uint32(frames[1]) != 1124 {
			t.Fatalf("%q", frames)
		}
		check(t, l.Send(marshal(map[string]any{"type": "LookupCleanupMsg", "lookup_id": id})))
		r.eventually("the lookup is cleaned up",
			func() bool { return r.engine.Stats().OpenLookups == 0 })
	}
	// One that is cleaned up while it waits is not answered.
	clearArena()
	open := gate(r.tiers[0], tiertest.Load)
	check(t, l.Send(marshal(map[string]any{"type": "LookupRequestMsg", "lookup_id": "x",
		"hashes": hashes, "offsets": offsets})))
	r.eventually("it waits", func() bool { return r.stack.LookupStats().Loading == 5 })
	check(t, l.Send(marshal(map[string]any{"type": "LookupCleanupMsg", "lookup_id": "x"})))
	r.eventually("it has ended", func() bool { return r.stack.LookupStats().Pending == 0 })
	open()
	if frames, err := l.Recv(50 * time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("%x, %v", frames, err)
	}
}

// A scheduler with a direct socket is answered there, at once or later, and told so.
func TestDirectSocket(t *testing.T) {
	r := newRig(t, rigOptions{tiers: []tiertest.MemoryOptions{slow}})
	w := r.worker(workerHello("e"))
	hello := schedulerHello("e")
	hello.Direct = true
	s := r.scheduler(hello)
	if s.ses.Direct == nil || s.ses.Welcome.ReplyEndpoint != "" {
		t.Fatalf("%+v", s.ses.Welcome)
	}
	p := prefix{stretches: [4]uint8{1, 2, 3, 4}, stretch: 16}
	if _, hit := s.lookup(p, 0, 64); hit != 0 {
		t.Fatalf("%d pages", hit)
	}
	r.below(w, p, 30)
	id := s.send(p, 0, 64)
	if m, ok := s.recv().(*wire.LookupPending); !ok || m.Lookup != id || m.Pages != 0 {
		t.Fatalf("%+v", m)
	}
	result, ok := s.recv().(*wire.LookupResult)
	for !ok {
		result, ok = s.recv().(*wire.LookupResult)
	}
	if result.Lookup != id || result.HitPages != 30 {
		t.Fatalf("%+v", result)
	}
	g, err := w.load(s, id, p, 0, 30)
	check(t, err)
	check(t, w.ses.Send(&wire.Release{Load: g.Load}))
	w.sync()
	id, hit := s.lookup(p, 0, 64)
	if hit != 30 {
		t.Errorf("%d pages", hit)
	}
	s.cancel(id)
	s.quiet()

	// A worker that asks for one is refused.
	bad := workerHello("f")
	bad.Direct = true
	if _, err := client.Dial(r.dir, bad, patience); err == nil {
		t.Error("welcomed")
	}
}
