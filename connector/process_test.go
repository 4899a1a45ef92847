package connector_test

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"lookaside/ipc/client"
	"lookaside/ipc/wire"
)

// The tests here start the test binary again as a client process: clientMain is what it does. Its first argument is the
// endpoint, its second how far to go; then it says so on standard output and waits for standard input to close.
func clientMain() {
	if err := runClient(os.Args[1], os.Args[2]); err != nil {
		fmt.Println("error:", err)
		os.Exit(1)
	}
	fmt.Println("ready")
	_, _ = io.Copy(io.Discard, os.Stdin)
	if os.Args[2] == stageDeaf { // as a client should: read up to the end, then close
		w := kept[0].(*worker)
		for err := error(nil); err == nil; {
			_, err = w.recv(false)
		}
		w.ses.Close()
	}
}

// The stages at which a client process can be, in the order of their doing. Each includes a worker's session with the arena
// mapped but the first; the prefix that it uses is 1 for what it reads and 2 for what it writes.
const (
	stageConnected = "connected" // no hello yet
	stageWelcomed  = "welcomed"
	stagePrepared  = "prepared" // a store was granted
	stageFilled    = "filled"   // its bytes are written
	stageDeaf      = "deaf"     // and more answers are asked for than it reads
	stageLooked    = "looked"   // a lookup holds leases
	stageLoading   = "loading"  // a load holds them
	stageVerified  = "verified" // its bytes were right, and it was released
	stageUnmapped  = "unmapped" // a region has gone
)

// kept is what a client process holds until its end: not even its finalizers may close it.
var kept []any

func runClient(dir, stage string) error {
	if stage == stageConnected {
		ses, err := client.Connect(dir)
		kept = append(kept, ses)
		return err
	}
	w, err := dialWorker(dir, workerHello("child"))
	kept = append(kept, w)
	if err != nil || stage == stageWelcomed {
		return err
	}
	if stage == stageUnmapped {
		for len(w.gone) == 0 {
			if _, err := w.recv(true); err != nil {
				return err
			}
		}
		return nil
	}
	if stage == stagePrepared || stage == stageFilled || stage == stageDeaf {
		p := onePrefix(2)
		g, err := w.prepare(p, 0, 8)
		if err != nil || stage == stagePrepared {
			return err
		}
		if err = w.fill(p, g.Grants); err == nil && stage == stageDeaf {
			blocked := make(chan struct{})
			go floodAfter(w.ses, sync.OnceFunc(func() { close(blocked) }))
			<-blocked
		}
		return err
	}
	ses, err := client.Dial(dir, schedulerHello("child"), patience)
	if err != nil {
		return err
	}
	l, err := client.NewLookups(ses.Welcome.LookupEndpoint, ses.Welcome.ReplyEndpoint, false)
	kept = append(kept, ses, l)
	if err != nil {
		return err
	}
	p := onePrefix(1)
	r, err := l.Lookup(&wire.Lookup{Session: ses.Welcome.Session, Lookup: 1, Hashes: p.hashes(0, 8)}, patience)
	if err != nil {
		return err
	}
	if r.HitPages != 8 {
		return fmt.Errorf("%d of 8 pages hit", r.HitPages)
	}
	if stage == stageLooked {
		return nil
	}
	g, err := w.load(&scheduler{ses: ses}, 1, p, 0, 8) // checks the bytes
	if err != nil || stage == stageLoading {
		return err
	}
	return w.ses.Send(&wire.Release{Load: g.Load})
}

// A process is a client in another process.
type process struct {
	cmd   *exec.Cmd
	stdin io.Closer
}

// start runs a client process up to a stage.
func (r *rig) start(stage string) *process {
	r.t.Helper()
	cmd := exec.Command(os.Args[0], r.dir, stage)
	cmd.Env = append(os.Environ(), clientEnv+"=1")
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	check(r.t, err)
	stdout, err := cmd.StdoutPipe()
	check(r.t, err)
	check(r.t, cmd.Start())
	p := &process{cmd: cmd, stdin: stdin}
	r.t.Cleanup(p.kill)
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil || strings.TrimSpace(line) != "ready" {
		r.t.Fatalf("client process at stage %s: %q, %v", stage, line, err)
	}
	return p
}

// kill ends the process with SIGKILL and waits for it. It may be called twice.
func (p *process) kill() {
	if p.cmd.ProcessState == nil {
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait()
	}
}

// Another process sees the bytes that this one wrote, on the mapping itself.
func TestSecondProcessReadsWhatTheFirstWrote(t *testing.T) {
	r := newRig(t, rigOptions{})
	w := r.worker(workerHello("e"))
	w.store(onePrefix(1), 0, 8)
	p := r.start(stageVerified)
	r.eventually("8 pages are loaded and released", func() bool { return r.engine.Stats().Leases == 0 && r.server.Counters().LoadedPages == 8 })
	check(t, p.stdin.Close())
	check(t, p.cmd.Wait())
}

// Whatever a client was doing when it was killed, within a second it holds nothing.
func TestDeathAtEveryStage(t *testing.T) {
	for _, stage := range []string{stageConnected, stageWelcomed, stagePrepared, stageFilled, stageLooked, stageLoading} {
		t.Run(stage, func(t *testing.T) {
			r := newRig(t, rigOptions{})
			w := r.worker(workerHello("e"))
			s := r.scheduler(schedulerHello("e"))
			w.store(onePrefix(1), 0, 8)
			p := r.start(stage)
			st := r.engine.Stats()
			switch stage {
			case stagePrepared, stageFilled:
				if st.OpenStores != 1 || st.FillingSlots != 2 {
					t.Fatalf("%+v", st)
				}
			case stageLooked, stageLoading:
				if st.Leases != 2 {
					t.Fatalf("%+v", st)
				}
			}
			check(t, p.cmd.Process.Signal(syscall.SIGKILL))
			r.eventually("all that it held is free", func() bool {
				st := r.engine.Stats()
				return st.Owners == 2 && st.Leases == 0 && st.OpenStores == 0 && st.OpenLoads == 0 && st.OpenLookups == 0 && st.FillingSlots == 0 &&
					r.listener.Stats().Sessions == 2
			})
			if _, hit := s.lookup(onePrefix(2), 0, 8); hit != 0 {
				t.Errorf("%d pages of a store that was never committed are visible", hit)
			}
			if _, hit := s.lookup(onePrefix(1), 0, 8); hit != 8 {
				t.Errorf("%d of 8 pages hit", hit)
			}
			w.store(onePrefix(2), 0, 8)
		})
	}
}

// A frozen client keeps what it holds, because it lives; others notice nothing, also while the arena grows.
func TestFrozenClient(t *testing.T) {
	r := newRig(t, rigOptions{regionBytes: 8 * perChunk * pageBytes})
	w := r.worker(workerHello("e"))
	s := r.scheduler(schedulerHello("e"))
	w.store(onePrefix(1), 0, 8)
	p := r.start(stageLoading)
	check(t, p.cmd.Process.Signal(syscall.SIGSTOP))

	r.grow(8 * perChunk * pageBytes)
	for i := range uint8(40) { // fills the arena many times over
		q := onePrefix(10 + i)
		w.store(q, 0, 8)
		if _, hit := s.lookup(q, 0, 8); hit != 8 {
			t.Fatalf("prefix %d: %d of 8 pages hit", i, hit)
		}
		s.cancel(s.next)
	}
	st := r.engine.Stats()
	if st.OpenLoads != 1 || st.Evictions == 0 {
		t.Errorf("%d loads, %d evictions: the frozen client's load must stand, and others be evicted", st.OpenLoads, st.Evictions)
	}
	if _, hit := s.lookup(onePrefix(1), 0, 8); hit != 8 {
		t.Error("a leased chunk was evicted")
	}
	s.cancel(s.next)
	check(t, p.cmd.Process.Signal(syscall.SIGKILL)) // also ends a stopped process
	r.eventually("all that it held is free", func() bool { st := r.engine.Stats(); return st.OpenLoads == 0 && st.Leases == 0 })
}

// A client that sends and never reads is given up, and nobody waits for it.
func TestClientThatDoesNotRead(t *testing.T) {
	r := newRig(t, rigOptions{})
	w := r.worker(workerHello("e"))
	served := 0
	for tries := uint64(1); served < 3; tries++ { // on a busy machine the other may come too late to be answered meanwhile, but not each time
		deaf := r.worker(workerHello("deaf"))
		_, err := deaf.prepare(onePrefix(2), 0, 8)
		check(t, err)
		go flood(deaf.ses)
		served = 0
		for end := time.Now().Add(patience); len(r.lingering()) == 0; served++ {
			w.sync()
			if time.Now().After(end) {
				t.Fatal("it still is connected")
			}
		}
		if n := r.server.Sessions(); n != 1 {
			t.Errorf("%d sessions", n)
		}
		deaf.close()
		r.eventually("what it held is free", func() bool { return r.engine.Stats().OpenStores == 0 && r.listener.Stats().Sessions == 1 })
		if n := r.errorCount("send"); n != tries {
			t.Errorf("%d counted after %d", n, tries)
		}
		if served < 3 && tries == 10 {
			t.Fatalf("others were answered %d times meanwhile", served)
		}
	}
}

// maps says whether a process has a file mapped.
func (p *process) maps(t *testing.T, file string) bool {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", p.cmd.Process.Pid))
	check(t, err)
	return strings.Contains(string(b), file)
}

// When a region is retracted, no process that was told of it has it mapped any more.
func TestRetractedRegionIsMappedNowhere(t *testing.T) {
	r := newRig(t, rigOptions{})
	f := device(t, 4096)
	r.server.AnnounceRegion(part(f, 7, 0))
	welcomed := r.start(stageWelcomed)
	if !welcomed.maps(t, f.Name()) {
		t.Fatal("a worker has not mapped the region")
	}
	welcomed.kill()
	r.eventually("it is gone", func() bool { return r.server.Sessions() == 0 })
	done := make(chan struct{})
	go func() {
		defer close(done)
		for r.server.Sessions() == 0 {
			time.Sleep(time.Millisecond)
		}
		r.server.RetractRegion(7, patience)
	}()
	p := r.start(stageUnmapped)
	<-done
	if p.maps(t, f.Name()) {
		t.Error("it is mapped")
	}
	if n := r.server.Sessions(); n != 1 {
		t.Errorf("%d sessions", n)
	}
}

// A frozen process keeps a region mapped that is retracted: it is given up, nobody waits for it any longer, and what it reads stays its own until it is dead.
func TestFrozenClientKeepsARegion(t *testing.T) {
	r := newRig(t, rigOptions{})
	r.server.AnnounceRegion(part(device(t, 4096), 7, 0))
	w := r.worker(workerHello("e"))
	w.store(onePrefix(1), 0, 8)
	p := r.start(stageLoading)
	check(t, p.cmd.Process.Signal(syscall.SIGSTOP))
	done, giveUp := r.retractUntil(7)
	w.readsRegion(wire.TypeRegionRemoved)
	w.sync()
	if finished(done) {
		t.Error("retracted while a process that lives has it mapped")
	}
	giveUp()
	<-done
	r.waitLingering(1)
	if st := r.engine.Stats(); st.OpenLoads != 1 {
		t.Errorf("%d loads", st.OpenLoads)
	}
	w.sync()
	check(t, p.cmd.Process.Signal(syscall.SIGKILL))
	r.eventually("all that it held is free", func() bool { return r.engine.Stats().Leases == 0 && len(r.lingering()) == 0 })
}
