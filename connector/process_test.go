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

	"golang.org/x/sys/unix"

	"lookaside/connector"
	"lookaside/ipc/client"
	"lookaside/ipc/wire"
)

// The tests here start the test binary again as a client process: clientMain is what it does. Its
// first argument is the endpoint, its second how far to go; then it says so on standard output and
// waits for standard input to close.
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
	if os.Args[2] == stageHoarding {
		if err := commitHoard(); err != nil {
			fmt.Println("error:", err)
			os.Exit(1)
		}
	}
}

// The stages at which a client process can be, in the order of their doing. Each includes a
// worker's session with the arena mapped but the first; the prefix that it uses is 1 for what it
// reads and 2 for what it writes.
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

	// as loading, and a child of the process has the worker's socket, too
	stageInherited = "inherited"
	// as many slots were granted as can be had, and written; they are committed at the end of
	// standard input
	stageHoarding = "hoarding"
)

// hoardPages is how many pages a client that hoards wants to store.
const hoardPages = 1024

// hoarded is the prefix that a client process with a pid hoards slots for.
func hoarded(pid int) prefix {
	return prefix{stretches: [4]uint8{uint8(pid), uint8(pid >> 8), uint8(pid >> 16), 99},
		stretch: 1}
}

// commitHoard commits what a client process was granted.
func commitHoard() error {
	w, g := kept[0].(*worker), kept[1].(*wire.StoreGrant)
	if err := w.ses.Send(&wire.CommitStore{Store: g.Store}); err != nil {
		return err
	}
	var pong wire.Pong
	return w.call(&wire.Ping{ID: w.ses.NextID()}, &pong)
}

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
	if stage == stageHoarding {
		p := hoarded(os.Getpid())
		g, err := w.prepare(p, 0, hoardPages)
		kept = append(kept, &g)
		if err != nil {
			return err
		}
		return w.fill(p, g.Grants)
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
	l, err := ses.Lookups()
	kept = append(kept, ses, l)
	if err != nil {
		return err
	}
	p := onePrefix(1)
	r, err := l.Lookup(&wire.Lookup{Session: ses.Welcome.Session, Secret: ses.Welcome.Secret,
		Lookup: 1, Hashes: p.hashes(0, 8)}, patience)
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
	if err == nil && stage == stageInherited {
		socket, err := w.ses.Conn().File()
		if err != nil {
			return err
		}
		child := exec.Command("cat") // until standard input ends
		child.Stdin, child.ExtraFiles = os.Stdin, []*os.File{socket}
		return child.Start()
	}
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
	r.eventually("8 pages are loaded and released",
		func() bool { return r.engine.Stats().Leases == 0 && r.server.Counters().LoadedPages == 8 })
	check(t, p.stdin.Close())
	check(t, p.cmd.Wait())
}

// Whatever a client was doing when it was killed, within a second it holds nothing.
func TestDeathAtEveryStage(t *testing.T) {
	for _, stage := range []string{stageConnected, stageWelcomed, stagePrepared, stageFilled,
		stageLooked, stageLoading, stageInherited} {
		t.Run(stage, func(t *testing.T) {
			if stage == stageInherited && !tellsOfDeaths(t) {
				t.Skip("this kernel has no SO_PEERPIDFD: while a child holds the socket, nothing tells of the death of a process")
			}
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
			case stageLooked, stageLoading, stageInherited:
				if st.Leases != 2 {
					t.Fatalf("%+v", st)
				}
			}
			p.kill()
			r.within(time.Second, "all that it held is free", func() bool {
				st := r.engine.Stats()
				return st.Owners == 2 && st.Leases == 0 && st.OpenStores == 0 &&
					st.OpenLoads == 0 && st.OpenLookups == 0 && st.FillingSlots == 0 &&
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

// tellsOfDeaths reports whether the kernel gives a pidfd of the process at the other end of a
// socket.
func tellsOfDeaths(t *testing.T) bool {
	t.Helper()
	const soPeerPIDFD = 77
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	check(t, err)
	defer unix.Close(pair[0])
	defer unix.Close(pair[1])
	fd, err := unix.GetsockoptInt(pair[0], unix.SOL_SOCKET, soPeerPIDFD)
	if err == nil {
		unix.Close(fd)
	}
	return err == nil
}

// Clients that take all that they can get and freeze are found out and named, keep what they hold,
// and leave room for the others. One that goes on finds what it held as it was.
func TestFrozenClientsLeaveRoom(t *testing.T) {
	const slots = 64
	r := newRig(t, rigOptions{regionBytes: slots * perChunk * pageBytes, share: 0.5, joint: 0.75,
		frozenAfter: 400 * time.Millisecond})
	first, second := r.start(stageHoarding), r.start(stageHoarding)
	for _, p := range []*process{first, second} {
		check(t, p.cmd.Process.Signal(syscall.SIGSTOP))
	}
	var frozen []connector.FrozenStatus
	r.eventually("both are found out", func() bool {
		frozen = r.server.Status().Frozen
		return len(frozen) == 2
	})
	held := 0
	for i, p := range []*process{first, second} {
		if f := frozen[i]; int(f.PID) != p.cmd.Process.Pid || f.Process != "stopped" ||
			f.Stores != 1 || f.Slots == 0 {
			t.Errorf("client %d with pid %d is shown as %+v", i, p.cmd.Process.Pid, f)
		}
		held += frozen[i].Slots
	}
	r.eventually("the engine knows", func() bool {
		st := r.engine.Stats()
		return st.Frozen == 2 &&
			st.FrozenSlots == held
	})
	if n := r.server.Counters().Froze; held > slots*3/4 || n < 2 {
		t.Errorf("frozen clients hold %d of %d slots, %d counted", held, slots, n)
	}

	w, s := r.worker(workerHello("e")), r.scheduler(schedulerHello("e"))
	serve := func() {
		t.Helper()
		for i := range uint8(40) { // more than there is room for
			q := onePrefix(100 + i)
			w.store(q, 0, 2*perChunk)
			id, hit := s.lookup(q, 0, 2*perChunk)
			if hit != 2*perChunk {
				t.Fatalf("prefix %d: %d of %d pages hit", i, hit, 2*perChunk)
			}
			g, err := w.load(s, id, q, 0, 2*perChunk)
			check(t, err)
			check(t, w.ses.Send(&wire.Release{Load: g.Load}))
		}
		w.sync()
	}
	serve()
	if st := r.engine.Stats(); st.OpenStores != 2 || st.FillingSlots != held {
		t.Errorf("%d stores with %d slots, want those of the two that have frozen, %d",
			st.OpenStores, st.FillingSlots, held)
	}

	check(t, first.cmd.Process.Signal(syscall.SIGCONT))
	check(t, first.stdin.Close())
	check(t, first.cmd.Wait())
	r.eventually("one has frozen",
		func() bool { return r.engine.Stats().FrozenSlots == frozen[1].Slots })
	// a session's share is of what frozen sessions do not have
	pages := min(frozen[0].Slots, slots/4) * perChunk
	id, hit := s.lookup(hoarded(first.cmd.Process.Pid), 0, pages)
	if hit != pages {
		t.Fatalf("%d of %d pages hit that the client stored which went on", hit, pages)
	}
	g, err := w.load(s, id, hoarded(first.cmd.Process.Pid), 0, hit)
	check(t, err)
	check(t, w.ses.Send(&wire.Release{Load: g.Load}))
	w.sync()
	second.kill()
	r.within(time.Second, "all is free",
		func() bool { st := r.engine.Stats(); return st.FillingSlots == 0 && st.Leases == 0 })
	r.eventually("none has frozen", func() bool {
		return len(r.server.Status().Frozen) == 0 &&
			r.engine.Stats().FrozenSlots == 0
	})
	serve()
}

// A scheduler that only looks up is not silent. What strangers send in its name does not count.
func TestSchedulerThatLooksUpIsNotSilent(t *testing.T) {
	r := newRig(t, rigOptions{})
	w := r.worker(workerHello("e"))
	s := r.scheduler(schedulerHello("e"))
	p := onePrefix(1)
	w.store(p, 0, 16)
	bad := r.stranger(t, s)
	session := s.ses.Welcome.Session
	heard := func() time.Time { return r.server.Heard(session) }
	wants := func(what string, send func()) {
		t.Helper()
		before := time.Now()
		send()
		r.eventually(what, func() bool { return heard().After(before) })
	}
	var id uint64
	wants("a lookup is heard", func() { id, _ = s.lookup(p, 0, 16) })
	wants("a trim is heard", func() { s.trim(id, 8) })
	wants("a cancel is heard", func() { s.cancel(id) })

	last := heard()
	for i, secret := range bad.guesses() {
		bad.send(&wire.Cancel{Session: session, Secret: secret, Lookup: id})
		r.eventually("the stranger is refused",
			func() bool { return r.errorCount("forged") == uint64(i+1) })
	}
	if now := heard(); !now.Equal(last) {
		t.Errorf("strangers were taken for the scheduler: heard at %v, and then at %v", last, now)
	}
}

// A frozen client keeps what it holds, because it lives; others notice nothing, also while the
// arena grows.
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
	r.eventually("all that it held is free",
		func() bool { st := r.engine.Stats(); return st.OpenLoads == 0 && st.Leases == 0 })
}

// A client that sends and never reads is given up, and nothing waits for it.
func TestClientThatDoesNotRead(t *testing.T) {
	r := newRig(t, rigOptions{})
	w := r.worker(workerHello("e"))
	served := 0
	for tries := uint64(1); served < 3; tries++ {
		// on a busy machine the other may come too late to be answered meanwhile, but not each time
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
		r.eventually("what it held is free",
			func() bool {
				return r.engine.Stats().OpenStores == 0 &&
					r.listener.Stats().Sessions == 1
			})
		if n := r.errorCount("send"); n != tries {
			t.Errorf("%d counted after %d", n, tries)
		}
		if served < 3 && tries == 10 {
			t.Fatalf("others were answered %d times meanwhile", served)
		}
	}
}

// maps reports whether a process has a file mapped.
func (p *process) maps(t *testing.T, file string) bool {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", p.cmd.Process.Pid))
	check(t, err)
	return strings.Contains(string(b), file)
}

// When a region is retracted, no process that it was announced to has it mapped any more.
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

// A frozen process keeps a region mapped that is retracted: it is given up, nothing waits for it
// any longer, and what it reads stays its own until it is dead.
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
	r.eventually("all that it held is free", func() bool {
		return r.engine.Stats().Leases == 0 &&
			len(r.lingering()) == 0
	})
}
