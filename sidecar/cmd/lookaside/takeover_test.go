package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"lookaside/internal/prefixes"
	"lookaside/ipc"
	"lookaside/ipc/client"
	"lookaside/ipc/handover"
	"lookaside/ipc/wire"
	"lookaside/sidecar/admin"
	"lookaside/tiers/directory"
)

var takeoverShape = prefixes.Shape{PageBytes: 4096, PagesPerChunk: 4, Direct: true}

// takeOver starts a sidecar that takes over from s, and waits until s has exited.
func (s *server) takeOver(args ...string) *server {
	s.t.Helper()
	next := serveIn(s.t, s.dir, []string{binary}, append([]string{"--takeover", "--arena-limit",
		"64M", "--arena-kind", "memfd"}, args...)...)
	if code := s.exit(patience); code != 0 {
		s.t.Errorf("exit code %d of the sidecar that handed over:\n%s", code, s.text())
	}
	return next
}

func (s *server) status() (st admin.Status) {
	s.t.Helper()
	commander{s.t, s.dir}.says([]string{"status", "--json"}, &st)
	return st
}

// traffic is clients that store, look up, load and compare all the time.
type traffic struct {
	t       *testing.T
	stop    chan struct{}
	wg      sync.WaitGroup
	rounds  atomic.Int64
	stored  atomic.Int64
	longest atomic.Int64 // the longest lookup, ns
}

// newTraffic starts clients, each with a worker and a scheduler of its own.
func newTraffic(t *testing.T, dir string, clients int) *traffic {
	t.Helper()
	tr := &traffic{t: t, stop: make(chan struct{})}
	for i := range clients {
		p, err := prefixes.Dial(dir, takeoverShape, 1000*(i+1), 40)
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Store(); err != nil {
			t.Fatal(err)
		}
		tr.wg.Go(func() {
			defer p.Close()
			if err := tr.run(p, 1000*(i+1)); err != nil {
				t.Errorf("client %d, round %d: %v", i, tr.rounds.Load(), err)
			}
		})
	}
	return tr
}

// run looks the first prefix up and loads it, and stores another one now and then. All of it must
// hit at any time.
func (tr *traffic) run(p *prefixes.Prefix, first int) error {
	for n := 1; ; n++ {
		select {
		case <-tr.stop:
			return nil
		default:
		}
		if n%8 == 0 && n < 800 {
			if err := p.Select(first+n, 9); err != nil {
				return err
			}
			if err := p.Store(); err != nil {
				return fmt.Errorf("store: %w", err)
			}
			tr.stored.Add(1)
		}
		if n%8 == 1 {
			if err := p.Select(first, 40); err != nil {
				return err
			}
		}
		took, err := p.Lookup()
		if err != nil {
			return fmt.Errorf("lookup: %w", err)
		}
		for old := tr.longest.Load(); int64(took) > old; old = tr.longest.Load() {
			if tr.longest.CompareAndSwap(old, int64(took)) {
				break
			}
		}
		if err := p.Verify(); err != nil {
			return fmt.Errorf("load: %w", err)
		}
		tr.rounds.Add(1)
	}
}

// more waits until all clients together have done so many rounds more.
func (tr *traffic) more(rounds int64) {
	tr.t.Helper()
	for from, end := tr.rounds.Load(), time.Now().Add(patience); tr.rounds.Load() < from+rounds; {
		if tr.t.Failed() || time.Now().After(end) {
			tr.t.Fatalf("%d rounds in all", tr.rounds.Load())
		}
		time.Sleep(time.Millisecond)
	}
}

func (tr *traffic) end() {
	close(tr.stop)
	tr.wg.Wait()
}

// descriptors returns how many descriptors a process has open.
func (s *server) descriptors() int {
	s.t.Helper()
	list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", s.cmd.Process.Pid))
	if err != nil {
		s.t.Fatal(err)
	}
	return len(list)
}

// Three takeovers under traffic: no lookup misses, no load fails or has a wrong byte, no store is
// lost, no session ends. Afterwards nothing is held, and each process has as many descriptors as
// the one before.
func TestTakeoverUnderTraffic(t *testing.T) {
	t.Parallel()
	s := serveOnly(t, "--arena-limit", "64M", "--arena-kind", "memfd")
	tr := newTraffic(t, s.dir, 4)
	tr.more(100)
	var fds []int
	for i := range 3 {
		before := s.status()
		tr.longest.Store(0)
		s = s.takeOver()
		tr.more(100)
		after := s.status()
		if after.Generation != before.Generation || after.PID == before.PID ||
			len(after.Sessions) != 8 {
			t.Errorf("generation %s and pid %d became %s and %d, with %d sessions",
				before.Generation, before.PID, after.Generation, after.PID, len(after.Sessions))
		}
		fds = append(fds, s.descriptors())
		t.Logf("takeover %d: the longest lookup took %v; %d stores in all", i+1,
			time.Duration(tr.longest.Load()), tr.stored.Load())
	}
	tr.end()
	if fds[2] > fds[1]+2 { // a lookup or a scrape may be under way
		t.Errorf("descriptors after each takeover: %v", fds)
	}
	for end := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		st := s.status()
		if len(st.Sessions) == 0 && st.Leases == 0 {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("left behind: %d sessions, %d leases", len(st.Sessions), st.Leases)
		}
	}
	s.signal(syscall.SIGTERM)
	if code := s.exit(patience); code != 0 {
		t.Errorf("exit code %d:\n%s", code, s.text())
	}
}

// What the new process could not take is refused with a reason, and the traffic does not notice.
func TestTakeoverRefused(t *testing.T) {
	t.Parallel()
	s := serveOnly(t, "--arena-limit", "64M", "--arena-kind", "memfd")
	tr := newTraffic(t, s.dir, 2)
	for _, tc := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"--arena-limit=8M"}, exitOwned, "only 8MiB (arena.limit)"},
		{[]string{"--arena-kind=thp"}, exitOwned, "kind memfd, and the new process wants"},
		{[]string{"--sessions-limit=1"}, exitOwned, "4 sessions, and the new process may have only 1"},
		{[]string{"--lookup-max-pages=16"}, exitOwned, "lookup.max_pages"},
		{[]string{"--arena-limit=never"}, exitSettings, "arena.limit"},
	} {
		_, errs, code := run(t, nil, append([]string{"serve", "--takeover", "--runtime-dir", s.dir,
			"--arena-kind=memfd", "--arena-limit=64M"}, tc.args...)...)
		if code != tc.code || !strings.Contains(errs, tc.want) || code == exitOwned &&
			!strings.Contains(errs, fmt.Sprintf("pid %d", s.cmd.Process.Pid)) {
			t.Errorf("%v: exit code %d: %s", tc.args, code, errs)
		}
	}
	tr.more(100)
	tr.end()
	_, errs, code := run(t, nil, "serve", "--takeover", "--runtime-dir",
		filepath.Join(filepath.Dir(s.dir), "nobody"))
	if code != exitNone || !strings.Contains(errs, "no sidecar serves in") {
		t.Errorf("exit code %d without a sidecar: %s", code, errs)
	}
}

// A store that does not end within lifecycle.drain keeps its sidecar: the new process says whose it
// is. The store and those that waited go on. Once it has ended, the sidecar can be replaced.
func TestTakeoverWaitsForStores(t *testing.T) {
	t.Parallel()
	s := serveOnly(t, "--arena-limit", "64M", "--arena-kind", "memfd", "--lifecycle-drain=300ms")
	w := s.worker()
	packed, _ := hashes(4)
	var g, other wire.StoreGrant
	if err := w.Call(&wire.PrepareStore{ID: 1, Hashes: packed}, &g, patience); err != nil {
		t.Fatal(err)
	}
	_, errs, code := run(t, nil, "serve", "--takeover", "--runtime-dir", s.dir,
		"--arena-kind=memfd", "--arena-limit=64M")
	if code != exitOwned || !strings.Contains(errs, fmt.Sprintf("1 of pid %d", os.Getpid())) ||
		!strings.Contains(errs, "lifecycle.drain (300ms)") {
		t.Errorf("exit code %d: %s", code, errs)
	}
	longer, _ := hashes(8)
	if err := w.Call(&wire.PrepareStore{ID: 2, FirstPage: 4, Prev: packed[len(packed)-32:],
		Hashes: longer[len(packed):]}, &other, patience); err != nil || other.Store == 0 {
		t.Fatalf("%+v, %v", other, err)
	}
	for _, store := range []uint64{g.Store, other.Store} {
		if err := w.Send(&wire.CommitStore{Store: store}); err != nil {
			t.Fatal(err)
		}
	}
	s.takeOver()
	var pong wire.Pong
	if err := w.Call(&wire.Ping{ID: 3}, &pong, patience); err != nil || pong.ID != 3 {
		t.Errorf("%+v, %v", pong, err)
	}
}

// In the background, too. The pins of operators stay.
func TestTakeoverDetached(t *testing.T) {
	t.Parallel()
	s := serveOnly(t, "--arena-limit", "64M", "--arena-kind", "memfd")
	p, err := prefixes.Dial(s.dir, takeoverShape, 1, 8)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if err := p.Store(); err != nil {
		t.Fatal(err)
	}
	c := commander{t, s.dir}
	var pin admin.PinStatus
	c.says(append([]string{"pin", "--json"}, p.Words()...), &pin)
	out, errs, code := run(t, nil, "serve", "--takeover", "--detach", "--runtime-dir", s.dir,
		"--arena-kind=memfd", "--arena-limit=64M")
	if code != 0 || !strings.Contains(out, "serving on "+s.dir) {
		t.Fatalf("exit code %d: %s%s", code, out, errs)
	}
	if code := s.exit(patience); code != 0 {
		t.Errorf("exit code %d:\n%s", code, s.text())
	}
	st := s.status()
	next, err := os.FindProcess(st.PID)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = next.Signal(syscall.SIGKILL) }()
	if st.Pins != 1 {
		t.Errorf("%d pins", st.Pins)
	}
	if _, err := p.Lookup(); err != nil {
		t.Error(err)
	}
	c.says([]string{"unpin", pin.Pin}, nil)
	_ = next.Signal(syscall.SIGTERM)
	for end := time.Now().Add(patience); ipc.Owner(s.dir) != 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it does not end")
		}
	}
}

// testBegin is the Begin of a process that can take over.
var testBegin = handover.Begin{Handover: handover.Version, Protocol: wire.Version,
	Directory: directory.Version, Release: "test", ArenaKind: "memfd", LimitBytes: 64 << 20,
	MaxSessions: 64, MaxSpaces: 64, MaxPages: 1 << 20}

// The process that takes over dies at each step. Before there is no way back the old one goes on as
// if nothing had been asked. After that it ends as well, and the next sidecar finds all that was
// stored with the workers.
func TestTakeoverDies(t *testing.T) {
	t.Parallel()
	begin := testBegin
	old := begin
	old.Handover++
	for _, tc := range []struct {
		name string
		do   func(h *ipc.Handover) error
		ends bool // the old process ends
	}{
		{"connects", func(*ipc.Handover) error { return nil }, false},
		{"sends nonsense", func(h *ipc.Handover) error {
			return h.Send(handover.TypeBegin, []byte("nonsense"))
		}, false},
		{"sends another message", func(h *ipc.Handover) error {
			return h.Send(handover.TypeDone, nil)
		}, false},
		{"is of another version", func(h *ipc.Handover) error {
			return errors.Join(h.Send(handover.TypeBegin, handover.Encode(old.Fields)),
				expect(h, handover.TypeRefuse))
		}, false},
		{"begins", func(h *ipc.Handover) error {
			return h.Send(handover.TypeBegin, handover.Encode(begin.Fields))
		}, false},
		{"waits", func(h *ipc.Handover) error {
			return errors.Join(h.Send(handover.TypeBegin, handover.Encode(begin.Fields)),
				expect(h, handover.TypeHeld))
		}, false},
		{"goes", func(h *ipc.Handover) error {
			return errors.Join(h.Send(handover.TypeBegin, handover.Encode(begin.Fields)),
				expect(h, handover.TypeHeld), h.Send(handover.TypeGo, nil))
		}, true},
		{"has the memory", func(h *ipc.Handover) error {
			return errors.Join(h.Send(handover.TypeBegin, handover.Encode(begin.Fields)),
				expect(h, handover.TypeHeld), h.Send(handover.TypeGo, nil),
				expect(h, handover.TypeMemory))
		}, true},
		{"is ready", func(h *ipc.Handover) error {
			return errors.Join(h.Send(handover.TypeBegin, handover.Encode(begin.Fields)),
				expect(h, handover.TypeHeld), h.Send(handover.TypeGo, nil),
				expect(h, handover.TypeMemory), h.Send(handover.TypeReady, nil))
		}, true},
		{"has the sessions", func(h *ipc.Handover) error {
			return errors.Join(h.Send(handover.TypeBegin, handover.Encode(begin.Fields)),
				expect(h, handover.TypeHeld), h.Send(handover.TypeGo, nil),
				expect(h, handover.TypeMemory), h.Send(handover.TypeReady, nil),
				expect(h, handover.TypeState))
		}, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := serveOnly(t, "--arena-limit", "64M", "--arena-kind", "memfd")
			p, err := prefixes.Dial(s.dir, takeoverShape, 1, 100)
			if err != nil {
				t.Fatal(err)
			}
			defer p.Close()
			if err := p.Store(); err != nil {
				t.Fatal(err)
			}
			h := dialHandover(t, s)
			err = tc.do(h)
			h.Close()
			if err != nil {
				t.Fatal(err)
			}
			if !tc.ends {
				if _, err := p.Lookup(); err != nil {
					t.Fatal(err)
				}
				if err := errors.Join(p.Verify(), p.Select(2, 20), p.Store()); err != nil {
					t.Fatal(err)
				}
				s.takeOver() // it can still be replaced
				if _, err := p.Lookup(); err != nil {
					t.Error(err)
				}
				return
			}
			if code := s.exit(patience); code != exitFailure {
				t.Errorf("exit code %d:\n%s", code, s.text())
			}
			// It waits for the worker, which gives the memory back.
			connected := make(chan error, 1)
			go func() {
				err := p.Reconnect(s.dir)
				for end := time.Now().Add(patience); err != nil && time.Now().Before(end); {
					time.Sleep(time.Millisecond)
					err = p.Reconnect(s.dir)
				}
				connected <- err
			}()
			s = serveIn(t, s.dir, []string{binary}, "--arena-limit", "64M", "--arena-kind", "memfd")
			if err := <-connected; err != nil {
				t.Fatal(err)
			}
			_, err = p.Lookup()
			if err := errors.Join(err, p.Verify()); err != nil {
				t.Errorf("what was stored before: %v:\n%s", err, s.text())
			}
		})
	}
}

// expect receives a message of a type.
func expect(h *ipc.Handover, want uint32) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	defer h.Until(ctx)()
	got, _, files, err := h.Recv()
	ipc.CloseFiles(files)
	if err == nil && got != want {
		err = fmt.Errorf("message %d, want %d", got, want)
	}
	return err
}

// The old process dies while the new one waits for it: the new one says so and ends.
func TestTakeoverOldDies(t *testing.T) {
	t.Parallel()
	s := serveOnly(t, "--arena-limit", "64M", "--arena-kind", "memfd", "--lifecycle-drain=1h")
	w := s.worker()
	packed, _ := hashes(4)
	var g wire.StoreGrant
	if err := w.Call(&wire.PrepareStore{ID: 1, Hashes: packed}, &g, patience); err != nil {
		t.Fatal(err)
	}
	type result struct {
		errs string
		code int
	}
	ended := make(chan result, 1)
	go func() {
		_, errs, code := run(t, nil, "serve", "--takeover", "--runtime-dir", s.dir,
			"--arena-kind=memfd", "--arena-limit=64M")
		ended <- result{errs, code}
	}()
	for end := time.Now().Add(patience); !strings.Contains(s.text(), "another process takes over"); {
		if time.Now().After(end) {
			t.Fatal(s.text())
		}
		time.Sleep(time.Millisecond)
	}
	s.signal(syscall.SIGKILL)
	if r := <-ended; r.code != exitFailure ||
		!strings.Contains(r.errs, fmt.Sprintf("pid %d has ended", s.cmd.Process.Pid)) {
		t.Errorf("exit code %d: %s", r.code, r.errs)
	}
}

// With a disk that holds more than the arena: lookups that need it wait for the new process, and
// find all. Nothing that was stored is lost, neither by the tier nor by its queue.
func TestTakeoverWithADisk(t *testing.T) {
	t.Parallel()
	flags := []string{"--arena-limit", "8M", "--arena-kind", "memfd", "--lookup-deadline=1m",
		"--lookup-promote=always", "--disk", t.TempDir() + ":64M:slab=1M"}
	s := serveOnly(t, flags...)
	const count, pages = 40, 100 // 16 MiB
	p, err := prefixes.Dial(s.dir, takeoverShape, 0, pages)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	for n := range count {
		if err := errors.Join(p.Select(n, pages), p.Store()); err != nil {
			t.Fatal(err)
		}
		if n%8 == 7 { // stores are not to be faster than the disk
			waitFor(t, "what was stored is on the disk", func() bool {
				st := s.status()
				return len(st.Tiers) == 1 && st.Tiers[0].StoreQueue == 0
			})
		}
	}
	waitFor(t, "all is on the disk", func() bool {
		st := s.status()
		return len(st.Tiers) == 1 && st.Tiers[0].StoreQueue == 0
	})
	var taking sync.WaitGroup
	var over atomic.Bool
	taking.Go(func() {
		defer over.Store(true)
		for range 3 {
			next := serveIn(t, s.dir, []string{binary}, append([]string{"--takeover"},
				flags...)...)
			if code := s.exit(patience); code != 0 {
				t.Errorf("exit code %d:\n%s", code, s.text())
			}
			s = next
		}
	})
	longest := time.Duration(0)
	for n := 0; !over.Load() || n%count != 0; n++ {
		if err := p.Select(n%count, pages); err != nil {
			t.Fatal(err)
		}
		took, err := p.Lookup()
		if err == nil {
			err = p.Verify()
		}
		if err != nil {
			t.Fatalf("prefix %d: %v", n%count, err)
		}
		longest = max(longest, took)
	}
	taking.Wait()
	t.Logf("the longest lookup took %v", longest)
}

// Two sidecars that lend to each other are taken over in turns, under traffic on pages that the
// other one lends. A lookup may miss while they find each other again; no byte is wrong, and no
// session ends.
func TestTakeoverWithPeers(t *testing.T) {
	t.Parallel()
	peersDir := t.TempDir()
	if err := os.Chmod(peersDir, 0o700); err != nil {
		t.Fatal(err)
	}
	flags := []string{"--arena-limit", "16M", "--arena-kind", "memfd", "--peers-dir", peersDir,
		"--peers-copy-after=0"}
	var both [2]*server
	var here [2]*prefixes.Prefix
	for i := range both {
		both[i] = serveOnly(t, flags...)
		var err error
		if here[i], err = prefixes.Dial(both[i].dir, takeoverShape, i, 40); err != nil {
			t.Fatal(err)
		}
		defer here[i].Close()
		if err := here[i].Store(); err != nil {
			t.Fatal(err)
		}
	}
	// Each looks up what the other one holds.
	var stop atomic.Bool
	var hits [2]atomic.Int64
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop.Store(true)
	for i, p := range here {
		if err := p.Select(1-i, 40); err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			for !stop.Load() {
				pages, err := p.Find()
				if err == nil && pages == 40 {
					if err = p.Verify(); err == nil {
						hits[i].Add(1)
					}
				}
				var no *client.CallError
				if errors.As(err, &no) && (no.Code == wire.CodeStale ||
					no.Code == wire.CodeNotFound) {
					continue // what was lent has been returned since the lookup
				}
				if err != nil {
					t.Errorf("sidecar %d: %v:\n%s", i, err, both[i].text())
					return
				}
			}
		})
	}
	more := func() {
		t.Helper()
		for i := range hits {
			was := hits[i].Load()
			waitFor(t, fmt.Sprintf("sidecar %d finds what the other holds", i), func() bool {
				return hits[i].Load() > was+20 || t.Failed()
			})
		}
	}
	more()
	for round := range 4 {
		i := round % 2
		next := serveIn(t, both[i].dir, []string{binary}, append([]string{"--takeover"},
			flags...)...)
		if code := both[i].exit(patience); code != 0 {
			t.Errorf("exit code %d:\n%s", code, both[i].text())
		}
		both[i] = next
		more()
	}
}

// waitFor waits for a condition.
func waitFor(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !cond(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it never came: %s", what)
		}
	}
}

// dialHandover connects as the process that takes over from a sidecar. One that has just started
// serves before it can be taken over from.
func dialHandover(t *testing.T, s *server) (h *ipc.Handover) {
	t.Helper()
	waitFor(t, "a handover socket", func() (ok bool) {
		var err error
		h, err = ipc.DialHandover(s.dir)
		return err == nil
	})
	return h
}

// A sidecar that is told to end while another process waits to take over ends: it drains, and the
// other process is refused.
func TestTakeoverOfOneThatEnds(t *testing.T) {
	t.Parallel()
	s := serveOnly(t, "--arena-limit", "64M", "--arena-kind", "memfd", "--lifecycle-drain=1h")
	w := s.worker()
	packed, _ := hashes(4)
	var g wire.StoreGrant
	if err := w.Call(&wire.PrepareStore{ID: 1, Hashes: packed}, &g, patience); err != nil {
		t.Fatal(err)
	}
	h := dialHandover(t, s)
	defer h.Close()
	begin := testBegin
	if err := h.Send(handover.TypeBegin, handover.Encode(begin.Fields)); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "it holds stores back", func() bool {
		return strings.Contains(s.text(), "another process takes over")
	})
	s.signal(syscall.SIGTERM)
	if err := expect(h, handover.TypeRefuse); err != nil {
		t.Error(err)
	}
	if err := w.Send(&wire.CommitStore{Store: g.Store}); err != nil {
		t.Fatal(err)
	}
	if code := s.exit(patience); code != 0 {
		t.Errorf("exit code %d:\n%s", code, s.text())
	}
}
