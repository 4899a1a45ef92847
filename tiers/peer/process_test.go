package peer

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lookaside/dax"
	"lookaside/internal/leak"
)

// helpers are sidecars in processes of their own: named by LOOKASIDE_PEER_HELPER, with the
// directory in LOOKASIDE_PEER_DIR. They print a line when they are ready, and then wait to be
// killed.
var helpers = map[string]func(t helperTB, dir string){
	// lend holds the test's prefix.
	"lend": func(t helperTB, dir string) {
		s := newSide(t, dir, "lender", sideOptions{})
		s.gen = s.p.cfg.Generation
		s.store(theirSpace, theirPrefix)
		fmt.Printf("%x\n", s.gen)
	},
	// borrow has borrowed it.
	"borrow": func(t helperTB, dir string) {
		s := newSide(t, dir, "borrower", sideOptions{})
		s.verify(s.borrows(theirSpace, theirPrefix, 16))
		fmt.Printf("%x\n", s.gen)
	},
	// fork has borrowed it, and a child of it keeps its sockets open.
	"fork": func(t helperTB, dir string) {
		s := newSide(t, dir, "borrower", sideOptions{})
		s.verify(s.borrows(theirSpace, theirPrefix, 16))
		child := exec.Command("sleep", "100")
		child.ExtraFiles = sockets()
		check(t, child.Start())
		fmt.Printf("%d\n", child.Process.Pid)
	},
}

var (
	theirSpace  = space("theirs", 4)
	theirPrefix = prefix(stretch(9, 16)...)
)

// helperTB is a testing.TB outside of a test.
type helperTB struct{ testing.TB }

func (helperTB) Helper()        {}
func (helperTB) Cleanup(func()) {}
func (helperTB) Errorf(f string, args ...any) {
	fmt.Printf("failed: "+f+"\n", args...)
	os.Exit(1)
}
func (t helperTB) Fatalf(f string, args ...any) { t.Errorf(f, args...) }
func (t helperTB) Fatal(args ...any)            { t.Errorf("%s", fmt.Sprint(args...)) }
func (t helperTB) Error(args ...any)            { t.Errorf("%s", fmt.Sprint(args...)) }

// sockets are copies of all that this process has.
func sockets() (out []*os.File) {
	names, _ := filepath.Glob("/proc/self/fd/*")
	for _, name := range names {
		if to, err := os.Readlink(name); err == nil && strings.HasPrefix(to, "socket:") {
			var fd int
			fmt.Sscan(filepath.Base(name), &fd)
			if dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0); err == nil {
				out = append(out, os.NewFile(uintptr(dup), to))
			}
		}
	}
	return out
}

func TestMain(m *testing.M) {
	if name := os.Getenv("LOOKASIDE_PEER_HELPER"); name != "" {
		generations.n = uint64(os.Getpid()) << 32
		helpers[name](helperTB{}, os.Getenv("LOOKASIDE_PEER_DIR"))
		time.Sleep(5 * time.Minute)
		os.Exit(0)
	}
	leak.Main(m)
}

// process is a sidecar of its own.
type process struct {
	t    *testing.T
	cmd  *exec.Cmd
	said string
}

func start(t *testing.T, name, dir string) *process {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "LOOKASIDE_PEER_HELPER="+name, "LOOKASIDE_PEER_DIR="+dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	check(t, err)
	check(t, cmd.Start())
	p := &process{t: t, cmd: cmd}
	t.Cleanup(p.kill)
	line, err := bufio.NewReader(out).ReadString('\n')
	p.said = strings.TrimSpace(line)
	if err != nil || strings.HasPrefix(line, "failed:") {
		t.Fatalf("%s: %s %v", name, line, err)
	}
	return p
}

func (p *process) signal(s syscall.Signal) { check(p.t, p.cmd.Process.Signal(s)) }

func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

// A lender's death is noticed, what it lent can be read on, and nothing more is borrowed of it.
func TestLenderIsKilled(t *testing.T) {
	dir := peerDir(t)
	them := start(t, "lend", dir)
	s := newSide(t, dir, "a", sideOptions{})
	s.learns(theirSpace, theirPrefix, 16)
	loans := s.borrows(theirSpace, theirPrefix, 16)
	check(t, s.verify(loans))
	them.kill()
	peer := loans[0].Peer
	eventually(t, "OnGone", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.gone[peer] == 1
	})
	if n := s.hinted(theirSpace, theirPrefix); n != 0 {
		t.Errorf("%d pages of a dead sidecar", n)
	}
	if _, pages, _ := s.borrow(theirSpace, theirPrefix); pages != 0 {
		t.Errorf("%d pages borrowed of a dead sidecar", pages)
	}
	// A worker that still reads keeps the memory, and the bytes in it.
	if err := s.verify(loans); err != nil && !errorsIsUnmapped(err) {
		t.Error(err)
	}
	eventually(t, "the region is unmapped",
		func() bool { return errorsIsUnmapped(s.verify(loans[:1])) })
	if st := s.p.Status().Lenders; len(st) != 1 || !st[0].Gone || st[0].Loans != 4 {
		t.Errorf("%+v", st)
	}
	s.giveBack(loans, true)
	eventually(t, "it is forgotten", func() bool { return len(s.p.Status().Lenders) == 0 })
	eventually(t, "its socket is removed", func() bool {
		left, _ := filepath.Glob(filepath.Join(dir, "peer-*"))
		return len(left) == 1
	})
	for s.p.hints.sweep() {
	}
	if st := s.p.Status(); st.HintPages != 0 {
		t.Errorf("%d pages of a dead sidecar are left", st.HintPages)
	}
}

// As long as loans of a region of memory can be read, the region has a lock that a sidecar which
// finds the memory of a dead one looks for.
func TestLentMemoryIsLocked(t *testing.T) {
	dir := peerDir(t)
	them := start(t, "lend", dir)
	regions := make(chan int, 10)
	s := newSide(t, dir, "a", sideOptions{config: func(c *Config) {
		add := c.OnRegion
		c.OnRegion = func(r Region) error {
			fd, err := unix.Dup(r.FD)
			if err != nil {
				return err
			}
			regions <- fd
			return add(r)
		}
	}})
	s.learns(theirSpace, theirPrefix, 16)
	loans := s.borrows(theirSpace, theirPrefix, 16)
	region := <-regions
	defer unix.Close(region)
	if !dax.IsMemory(region) {
		t.Fatal("the region is not memory")
	}
	locked := func() bool {
		l := unix.Flock_t{Type: unix.F_WRLCK, Start: 1 << 61, Len: int64(1) << 61}
		check(t, unix.FcntlFlock(uintptr(region), unix.F_OFD_GETLK, &l))
		return l.Type != unix.F_UNLCK
	}
	if !locked() {
		t.Fatal("no lock while it is lent")
	}
	them.kill()
	peer := loans[0].Peer
	eventually(t, "OnGone", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.gone[peer] == 1
	})
	s.giveBack(loans[1:], false)
	if !locked() {
		t.Fatal("no lock while a loan of a dead lender is out")
	}
	s.giveBack(loans[:1], false)
	eventually(t, "the lock ends", func() bool { return !locked() })
}

// A borrower's death frees what it had, also when a child of it keeps its sockets open.
func TestBorrowerIsKilled(t *testing.T) {
	for _, how := range []string{"borrow", "fork"} {
		t.Run(how, func(t *testing.T) {
			dir := peerDir(t)
			s := newSide(t, dir, "a", sideOptions{})
			s.store(theirSpace, theirPrefix)
			them := start(t, how, dir)
			if how == "fork" {
				var child int
				fmt.Sscan(them.said, &child)
				defer func() { _ = syscall.Kill(child, syscall.SIGKILL) }()
			}
			s.lends(4)
			them.kill()
			s.noLoans()
			eventually(t, "it is forgotten", func() bool {
				st := s.p.Status()
				return len(st.Borrowers) == 0 && len(st.Lenders) == 0
			})
			if st := s.e.Stats(); st.Owners != 1 || st.LeasedSlots != 0 {
				t.Errorf("%+v", st)
			}
		})
	}
}

// A lender that does not answer costs whoever asks it a moment once, and then nothing, until it
// answers again.
func TestLenderIsStopped(t *testing.T) {
	dir := peerDir(t)
	them := start(t, "lend", dir)
	s := newSide(t, dir, "a", sideOptions{impatient: true})
	other := newSide(t, dir, "b", sideOptions{})
	other.store(theirSpace, theirPrefix[:8*32])
	s.giveBack(s.borrows(theirSpace, theirPrefix, 16), false)
	eventually(t, "both are known", func() bool { return s.lenders() == 2 })
	them.signal(syscall.SIGSTOP)
	// What another has is borrowed all the same.
	eventually(t, "it is passed over", func() bool {
		loans, pages, _ := s.borrow(theirSpace, theirPrefix)
		s.giveBack(loans, false)
		return pages == 8
	})
	stalled := func() (n int) {
		for _, l := range s.p.Status().Lenders {
			if l.Stalled {
				n++
			}
		}
		return n
	}
	eventually(t, "it is told to be stalled", func() bool { return stalled() == 1 })
	if n := s.hinted(theirSpace, theirPrefix); n != 8 {
		t.Errorf("%d pages are said to be held beside one that does not answer", n)
	}
	s.patient(true) // with the other
	asked := s.p.Status().FailedBorrows
	for range 100 {
		loans, pages, err := s.borrow(theirSpace, theirPrefix)
		if pages != 8 || err != nil {
			t.Fatalf("%d pages, %v", pages, err)
		}
		s.giveBack(loans, false)
	}
	if n := s.p.Status().FailedBorrows; n != asked {
		t.Errorf("%d calls failed", n-asked)
	}
	them.signal(syscall.SIGCONT)
	eventually(t, "it is asked again", func() bool { return stalled() == 0 })
	loans := s.borrows(theirSpace, theirPrefix, 16)
	check(t, s.verify(loans))
	s.giveBack(loans, false)
	// What it granted too late has been returned: it is counted at the lender, which tells nobody,
	// but a third borrower can have all of it.
	if st := s.p.Status(); st.Malformed != 0 {
		t.Errorf("%+v", st)
	}
}

// Joining and leaving take effect soon; how soon is logged.
func TestJoinAndLeave(t *testing.T) {
	dir := peerDir(t)
	s := newSide(t, dir, "a", sideOptions{})
	for range 3 {
		before := time.Now()
		them := start(t, "lend", dir)
		up := time.Now()
		s.learns(theirSpace, theirPrefix, 16)
		t.Logf("known %v after it was ready, %v after it was started", time.Since(up),
			time.Since(before))
		them.kill()
		dead := time.Now()
		s.learns(theirSpace, theirPrefix, 0)
		t.Logf("forgotten %v after its death", time.Since(dead))
	}
}
