package connector_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lookaside/connector"
	"lookaside/ipc/client"
	"lookaside/ipc/wire"
)

// breaks are the ways in which a client that lives can make the sidecar give it up.
var breaks = []struct {
	name string
	do   func(s *client.Session) error
}{
	{"no message", func(s *client.Session) error { return s.SendRaw([]byte{0xc1}) }},
	{"trailing bytes", func(s *client.Session) error {
		return s.SendRaw(
			append((&wire.Ping{ID: 1}).Append(nil), 0))
	}},
	{"second hello", func(s *client.Session) error { return s.Send(workerHello("bad")) }},
	{"empty packet", func(s *client.Session) error { return s.SendRaw(nil) }},
	{"oversize packet", func(s *client.Session) error {
		return s.SendRaw(make([]byte,
			wire.MaxPacketBytes+1))
	}},
	{"does not read", func(s *client.Session) error { flood(s); return nil }},
}

// flood sends pings and reads nothing, until the sidecar has given it up for that, or the session
// is closed.
func flood(s *client.Session) { floodAfter(s, func() {}) }

// floodAfter calls blocked whenever the sidecar has not read for a while. It may only be slow: so
// the flood goes on.
func floodAfter(s *client.Session, blocked func()) {
	ping := (&wire.Ping{ID: 1}).Append(nil)
	for {
		_ = s.Conn().SetWriteDeadline(time.Now().Add(300 * time.Millisecond))
		err := s.SendRaw(ping)
		if err == nil {
			continue
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) || givenUp(s) {
			_ = s.Conn().SetWriteDeadline(time.Time{})
			return
		}
		blocked()
	}
}

// givenUp reports whether the sidecar has ended what it sends to a session.
func givenUp(s *client.Session) (ended bool) {
	raw, err := s.Conn().SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) {
			n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}, 0)
			ended = err == nil && n == 1
		})
	}
	return ended || err != nil
}

func (r *rig) lingering() []connector.LingeringStatus { return r.server.Status().Lingering }

// waitLingering waits for as many sessions to linger; a client that does not read is given up after
// a second.
func (r *rig) waitLingering(n int) {
	r.t.Helper()
	for end := time.Now().Add(patience); len(r.lingering()) != n; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			r.t.Fatalf("%d sessions linger, want %d; engine %+v", len(r.lingering()), n,
				r.engine.Stats())
		}
	}
}

// readsEnd reads what was sent before the end, which must come.
func (w *worker) readsEnd() {
	w.t.Helper()
	for {
		if _, err := w.recv(false); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			w.t.Fatalf("got %v, want the end", err)
		}
	}
}

// disjoint checks that no two extents share bytes.
func disjoint(t *testing.T, extents ...[]wire.Extent) {
	t.Helper()
	seen := map[string]bool{}
	for _, list := range extents {
		for _, e := range list {
			for i := range uint64(e.Pages) {
				key := fmt.Sprint(e.Region, e.Offset+i*pageBytes)
				if seen[key] {
					t.Errorf("the page at %d of region %d was granted or leased to two",
						e.Offset+i*pageBytes, e.Region)
				}
				seen[key] = true
			}
		}
	}
}

// A worker that is given up may go on copying: its slots go to no other owner until it has left,
// and then they are free.
func TestGivenUpWorkerKeepsItsSlots(t *testing.T) {
	const slots = 8
	for _, tc := range breaks {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, rigOptions{regionBytes: slots * perChunk * pageBytes})
			loaded, stored, others := onePrefix(1), onePrefix(2), onePrefix(3)
			bad := r.worker(workerHello("bad"))
			badScheduler := r.scheduler(schedulerHello("bad"))
			bad.store(loaded, 0, 2*perChunk)
			id, _ := badScheduler.lookup(loaded, 0, 2*perChunk)
			lg, err := bad.load(badScheduler, id, loaded, 0, 2*perChunk)
			check(t, err)
			sg, err := bad.prepare(stored, 0, 2*perChunk)
			check(t, err)
			w, s := r.worker(workerHello("e")), r.scheduler(schedulerHello("e"))

			check(t, tc.do(bad.ses))
			r.waitLingering(1)
			l := r.lingering()[0]
			if l.EngineID != "bad" || l.PID != int32(os.Getpid()) || l.Stores != 1 ||
				l.Loads != 1 || l.Why == "" ||
				l.Session != fmt.Sprintf("%016x", bad.ses.Welcome.Session) {
				t.Errorf("status %+v", l)
			}
			for _, open := range r.server.Status().Sessions {
				if open.Session == l.Session {
					t.Error("it is listed as connected, too")
				}
			}
			if n := r.server.Counters().Lingered; n != 1 {
				t.Errorf("%d counted", n)
			}
			if n := r.listener.Stats().Sessions; n != 4 {
				t.Errorf("%d connections count for the cap, want all 4", n)
			}
			bad.readsEnd()

			// It asks for everything that is not leased or being filled, and gets no more.
			g, err := w.prepare(others, 0, slots*perChunk)
			check(t, err)
			if len(g.Grants) != slots-4 || g.Shed != 4*perChunk {
				t.Fatalf("%d slots granted, %d pages shed", len(g.Grants), g.Shed)
			}
			disjoint(t, g.Grants, lg.Extents, sg.Grants)
			check(t, w.fill(others, g.Grants))
			check(t, w.ses.Send(&wire.CommitStore{Store: g.Store}))
			w.sync()

			// Its copies end only now, and it reports that: it is not read.
			check(t, bad.fill(stored, sg.Grants))
			check(t, bad.verify(loaded, lg.Extents, 0, 2*perChunk))
			// its buffer may be full
			_ = bad.ses.Conn().SetWriteDeadline(time.Now().Add(50 * time.Millisecond))
			_ = bad.ses.Send(&wire.CommitStore{Store: sg.Store})
			_ = bad.ses.Send(&wire.Release{Load: lg.Load})
			id, hit := s.lookup(others, 0, slots*perChunk)
			if hit != (slots-4)*perChunk {
				t.Errorf("%d pages hit", hit)
			}
			_, err = w.load(s, id, others, 0, hit) // checks the bytes
			check(t, err)
			if _, hit := s.lookup(stored, 0, 1); hit != 0 {
				t.Error("what it was filling is visible")
			}
			if st := r.engine.Stats(); st.OpenStores != 1 || st.OpenLoads != 2 ||
				st.FillingSlots != 2 {
				t.Errorf("engine %+v", st)
			}
			check(t, r.engine.Check())

			// Meanwhile its engine may come back, also as another model.
			_, err = client.Dial(r.dir, schedulerHello("bad"), patience)
			var no *client.Refused
			if !errors.As(err, &no) || no.Code != wire.RefuseNoWorker {
				t.Errorf("a scheduler whose only worker lingers: %v", err)
			}
			badScheduler.close()
			r.eventually("the scheduler is gone", func() bool { return r.server.Sessions() == 2 })
			anew := workerHello("bad")
			anew.Fields[1].Value = "other"
			r.worker(anew)

			bad.close()
			r.eventually("all that it held is free", func() bool {
				st := r.engine.Stats()
				return st.OpenStores == 0 && st.OpenLoads == 1 && st.FillingSlots == 0 &&
					len(r.lingering()) == 0 && r.listener.Stats().Sessions == 3
			})
			if _, hit := s.lookup(stored, 0, 1); hit != 0 {
				t.Error("what it was filling is visible after its end")
			}
			w.store(onePrefix(4), 0, 4*perChunk)
		})
	}
}

// A client that holds no bytes has nothing to linger for: the session is closed at once, though its
// client is there.
func TestGivenUpWithoutBytesEndsAtOnce(t *testing.T) {
	r := newRig(t, rigOptions{})
	w, s := r.worker(workerHello("e")), r.scheduler(schedulerHello("e"))
	w.store(onePrefix(1), 0, 8)
	if _, hit := s.lookup(onePrefix(1), 0, 8); hit != 8 {
		t.Fatalf("%d hits", hit)
	}
	check(t, s.ses.SendRaw([]byte{0xc1}))
	r.eventually("the scheduler's leases are free", func() bool {
		return r.engine.Stats().Leases == 0 && r.listener.Stats().Sessions == 1 &&
			r.lookups.Stats().Sessions == 0
	})
	check(t, w.ses.SendRaw([]byte{0xc1}))
	r.eventually("the worker's session is closed",
		func() bool { return r.listener.Stats().Sessions == 0 })
	if n := r.server.Counters().Lingered; n != 0 {
		t.Errorf("%d lingered", n)
	}
}

// A client whose end cannot be detected by reading alone: it reads no more, but it is there.
func TestClientThatShutsItsReadingSide(t *testing.T) {
	r := newRig(t, rigOptions{})
	w := r.worker(workerHello("e"))
	g, err := w.prepare(onePrefix(1), 0, 8)
	check(t, err)
	check(t, w.ses.Conn().CloseRead())
	check(t, w.ses.Send(&wire.Ping{ID: 1}))
	r.waitLingering(1)
	check(t, w.fill(onePrefix(1), g.Grants))
	if st := r.engine.Stats(); st.FillingSlots != 2 {
		t.Errorf("%+v", st)
	}
	check(t, w.ses.Conn().CloseWrite()) // has the same effect as closing
	r.eventually("its slots are free", func() bool {
		return r.engine.Stats().FillingSlots == 0 &&
			len(r.lingering()) == 0
	})
}

func TestDrainDoesNotWaitForWhatLingers(t *testing.T) {
	r := newRig(t, rigOptions{})
	bad, w := r.worker(workerHello("bad")), r.worker(workerHello("e"))
	_, err := bad.prepare(onePrefix(1), 0, 8)
	check(t, err)
	check(t, bad.ses.SendRaw([]byte{0xc1}))
	r.waitLingering(1)
	g, err := w.prepare(onePrefix(2), 0, 8)
	check(t, err)

	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if err := r.server.Drain(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("drained with a store under way: %v", err)
	}
	check(t, w.ses.Send(&wire.AbortStore{Store: g.Store}))
	ctx, cancel = context.WithTimeout(context.Background(), patience)
	defer cancel()
	check(t, r.server.Drain(ctx))
	if n := len(r.lingering()); n != 1 {
		t.Errorf("%d linger", n)
	}
	// The rig's close ends the server while it lingers.
}

// A process that was stopped in the middle of a store is given up when it does not read, but it
// lives: what it was granted is its own, until it is killed or goes on and leaves.
func TestGivenUpProcess(t *testing.T) {
	for _, tc := range []struct {
		name string
		end  func(p *process) error
	}{
		{"killed", func(p *process) error { return p.cmd.Process.Signal(syscall.SIGKILL) }},
		{"continued", func(p *process) error {
			return errors.Join(p.stdin.Close(), p.cmd.Process.Signal(syscall.SIGCONT))
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			const slots = 8
			r := newRig(t, rigOptions{regionBytes: slots * perChunk * pageBytes})
			w := r.worker(workerHello("e"))
			p := r.start(stageDeaf)
			// It does not read what it asks for, and is stopped when that seems to have filled its
			// buffer: if the sidecar was only slow, it goes on.
			check(t, p.cmd.Process.Signal(syscall.SIGSTOP))
			nudge := time.NewTicker(2 * time.Second)
			defer nudge.Stop()
			r.eventually("it is given up", func() bool {
				select {
				case <-nudge.C:
					check(t, p.cmd.Process.Signal(syscall.SIGCONT))
					time.Sleep(50 * time.Millisecond)
					check(t, p.cmd.Process.Signal(syscall.SIGSTOP))
				default:
				}
				return len(r.lingering()) == 1
			})
			if l := r.lingering()[0]; int(l.PID) != p.cmd.Process.Pid || l.Stores != 1 {
				t.Errorf("status %+v", l)
			}
			for round := range uint8(3) {
				g, err := w.prepare(onePrefix(10+round), 0, slots*perChunk)
				check(t, err)
				if len(g.Grants) != slots-2 || g.Shed != 2*perChunk {
					t.Fatalf("%d slots granted, %d pages shed", len(g.Grants), g.Shed)
				}
				check(t, w.ses.Send(&wire.AbortStore{Store: g.Store}))
				w.sync()
				time.Sleep(100 * time.Millisecond)
			}
			check(t, tc.end(p))
			r.eventually("all that it held is free", func() bool {
				return r.engine.Stats().FillingSlots == 0 && len(r.lingering()) == 0 &&
					r.listener.Stats().Sessions == 1
			})
			w.store(onePrefix(20), 0, slots*perChunk)
		})
	}
}
