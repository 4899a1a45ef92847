package ipc

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lookaside/ipc/handover"
	"lookaside/ipc/wire"
)

// handoverPair returns both ends of a connection on the handover socket of l.
func handoverPair(t testing.TB, l *Listener) (old, next *Handover) {
	t.Helper()
	hl, err := l.ListenHandover()
	if err != nil {
		t.Fatal(err)
	}
	defer hl.Close()
	accepted := make(chan error, 1)
	go func() {
		var err error
		old, err = hl.Accept()
		accepted <- err
	}()
	if next, err = DialHandover(l.Dir()); err != nil {
		t.Fatal(err)
	}
	if err := <-accepted; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		old.Close()
		next.Close()
	})
	return old, next
}

func TestHandoverMessages(t *testing.T) {
	l := listen(t, Options{})
	old, next := handoverPair(t, l)
	if int(old.Peer().PID) != os.Getpid() {
		t.Errorf("peer %+v", old.Peer())
	}
	before := countFDs(t)
	for _, tc := range []struct{ size, files int }{
		{0, 0}, {1, 1}, {handoverPart, handoverFDs}, {3*handoverPart + 5, 2*handoverFDs + 7},
	} {
		body := bytes.Repeat([]byte{0xab}, tc.size)
		fds := make([]int, tc.files)
		for i := range fds {
			fds[i] = 1
		}
		sent := make(chan error, 1)
		go func() { sent <- old.Send(handover.TypeState, body, fds...) }()
		typ, got, files, err := next.Recv()
		if err != nil || typ != handover.TypeState || !bytes.Equal(got, body) ||
			len(files) != tc.files {
			t.Errorf("%+v: type %d, %d bytes, %d files, %v", tc, typ, len(got), len(files), err)
		}
		CloseFiles(files)
		if err := <-sent; err != nil {
			t.Error(err)
		}
	}
	if after := countFDs(t); after != before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
	ctx, cancel := context.WithCancel(t.Context())
	stop := next.Until(ctx)
	cancel()
	if _, _, _, err := next.Recv(); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("after the end of its context: %v", err)
	}
	stop()
	old.Close()
	if _, _, _, err := next.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("from one that has left: %v", err)
	}
}

func TestNobodyHandsOver(t *testing.T) {
	dir := runDir(t)
	if _, err := DialHandover(dir); !errors.Is(err, ErrNoHandover) {
		t.Errorf("without a directory: %v", err)
	}
	if pid := Owner(dir); pid != 0 {
		t.Errorf("pid %d owns a directory that is not there", pid)
	}
	l, err := Listen(dir, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := DialHandover(dir); !errors.Is(err, ErrNoHandover) {
		t.Errorf("without the socket: %v", err)
	}
	if pid := Owner(dir); pid != os.Getpid() {
		t.Errorf("pid %d owns it", pid)
	}
	l.Close()
	if pid := Owner(dir); pid != 0 {
		t.Errorf("pid %d owns a directory whose sidecar has ended", pid)
	}
}

// Packets of any form, with descriptors or without, must not do more than fail, and leave no
// descriptor open.
func FuzzHandover(f *testing.F) {
	f.Add([]byte(handoverMagic+"\x01\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00"),
		[]byte("ab"), []byte{1}, uint8(1))
	f.Add([]byte(handoverMagic), []byte{}, []byte{}, uint8(0))
	l := listen(f, Options{})
	f.Fuzz(func(t *testing.T, a, b, c []byte, files uint8) {
		fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		before := countFDs(t)
		file := os.NewFile(uintptr(fds[0]), "")
		nc, err := net.FileConn(file)
		if err != nil {
			t.Fatal(err)
		}
		file.Close()
		h, err := newHandover(nc.(*net.UnixConn))
		if err != nil {
			t.Fatal(err)
		}
		rights := unix.UnixRights(make([]int, min(files, 10))...)
		for _, p := range [][]byte{a, b, c} {
			_ = unix.Sendmsg(fds[1], p[:min(len(p), 1<<15)], rights, nil, unix.MSG_DONTWAIT)
		}
		unix.Close(fds[1])
		for range 3 {
			_, _, got, err := h.Recv()
			CloseFiles(got)
			if err != nil {
				break
			}
		}
		h.Close()
		if after := countFDs(t); after != before-2 {
			t.Errorf("%d descriptors before, %d after", before-2, after)
		}
	})
	l.Close()
}

// A listener with its connections becomes another process's: here it is the same process, by copies
// of the descriptors, as they would come over the handover socket. Clients notice nothing: what
// they have sent is received once, who waits to be accepted is accepted, and the directory never
// stops having an owner.
func TestListenerMoves(t *testing.T) {
	before := countFDs(t)
	dir := runDir(t)
	l, err := Listen(dir, Options{})
	if err != nil {
		t.Fatal(err)
	}
	c, client := pair(t, l)
	given, leaver := pair(t, l)
	late, err := dial(dir) // not accepted yet
	if err != nil {
		t.Fatal(err)
	}
	defer late.Close()
	send := func(uc *net.UnixConn, texts ...string) {
		for _, text := range texts {
			if _, err := uc.Write([]byte(text)); err != nil {
				t.Fatal(err)
			}
		}
	}
	send(client, "one", "two", "three")
	send(late, "hello")
	if b, err := c.Recv(); err != nil || string(b) != "one" {
		t.Fatalf("%q, %v", b, err)
	}
	given.GiveUp(errors.New("it was bad"))

	if _, err := given.Detach(false); err == nil {
		t.Error("a connection that was given up was handed over as if it was open")
	}
	files := func(fds ...int) (out []*os.File) {
		for _, fd := range fds {
			own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, os.NewFile(uintptr(own), "handed over"))
		}
		return out
	}
	detach := func(c *Conn, given bool) *os.File {
		fd, err := c.Detach(given)
		if err != nil {
			t.Fatal(err)
		}
		return os.NewFile(uintptr(fd), "handed over")
	}
	socket, other := detach(c, false), detach(given, true)
	if err := c.Send([]byte("x")); !errors.Is(err, ErrHandedOver) {
		t.Errorf("sent after the handover: %v", err)
	}
	lock, sock, err := l.FDs()
	if err != nil {
		t.Fatal(err)
	}
	moved := files(lock, sock)
	c.Close()
	given.Close()
	if err := l.Leave(); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(dir, Options{}); err == nil {
		t.Fatal("the directory had no owner during the handover")
	}

	l, err = AdoptListener(dir, moved[0], moved[1], Options{})
	if err != nil {
		t.Fatal(err)
	}
	if c, err = l.Adopt(socket); err != nil {
		t.Fatal(err)
	}
	if p := c.Peer(); int(p.PID) != os.Getpid() || c.pidfd == nil {
		t.Errorf("peer %+v", p)
	}
	for _, want := range []string{"two", "three"} {
		if b, err := c.Recv(); err != nil || string(b) != want {
			t.Fatalf("%q, %v; want %q", b, err, want)
		}
	}
	if err := c.Send([]byte("answer")); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 16)
	if n, err := client.Read(buf); err != nil || string(buf[:n]) != "answer" {
		t.Fatalf("%q, %v", buf[:n], err)
	}
	if given, err = l.Adopt(other); err != nil {
		t.Fatal(err)
	}
	given.GiveUp(errors.New("it was bad"))
	lingered := linger(given)
	leaver.Close()
	<-lingered
	given.Close()
	accepted, err := l.Accept(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if b, err := accepted.Recv(); err != nil || string(b) != "hello" {
		t.Errorf("%q, %v", b, err)
	}
	if n := l.Stats().Sessions; n != 2 {
		t.Errorf("%d sessions count", n)
	}
	accepted.Close()
	c.Close()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(filepath.Join(dir, sessionName)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the session socket is left: %v", err)
	}
	if next, err := Listen(dir, Options{}); err != nil {
		t.Errorf("the directory has an owner still: %v", err)
	} else {
		next.Close()
	}
	client.Close()
	late.Close()
	eventually(t, "no descriptor is left", func() bool { return countFDs(t) == before })
}

func TestAdoptListenerRefuses(t *testing.T) {
	dir := runDir(t)
	l, err := Listen(dir, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	null := func() *os.File {
		f, err := os.Open(os.DevNull)
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	if _, err := AdoptListener(dir, null(), null(), Options{}); err == nil {
		t.Error("another file was taken for the lock")
	}
	stranger, err := os.OpenFile(filepath.Join(dir, lockName), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = AdoptListener(dir, stranger, null(), Options{})
	if !errors.Is(err, unix.EWOULDBLOCK) {
		t.Errorf("a lock that is another's: %v", err)
	}
	if _, err := l.Adopt(null()); err == nil {
		t.Error("another file was taken for a connection")
	}
	lock, _, err := l.FDs()
	if err != nil {
		t.Fatal(err)
	}
	own, err := unix.FcntlInt(uintptr(lock), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := AdoptListener(dir, os.NewFile(uintptr(own), ""), null(), Options{}); err == nil {
		t.Error("another file was taken for the session socket")
	}
}

// EndLinger ends a Linger, whether it comes before or after it.
func TestEndLinger(t *testing.T) {
	l := listen(t, Options{})
	for range 20 {
		c, _ := pair(t, l)
		c.GiveUp(errors.New("it was bad"))
		lingered := linger(c)
		c.EndLinger()
		<-lingered
		c.Linger()
	}
}

// Lookups go on over a handover: what was sent before is answered once, by whoever received it.
func TestLookupSocketsMove(t *testing.T) {
	s, h := lookupSockets(t, LookupOptions{})
	zmq := session(t, s, 1)
	a, b := directSession(t, s, 2), directSession(t, s, 3)
	a.ask(1, 5)
	// The loop is busy while these come, so that some are unread when it is detached.
	const each = 200
	go s.do(func() { time.Sleep(5 * time.Millisecond) })
	for i := range uint64(each) {
		if err := errors.Join(a.send(a.lookup(i, 8)), b.send(b.lookup(i, 9))); err != nil {
			t.Fatal(err)
		}
		zmq.send((&wire.Lookup{Session: 1, Secret: secretOf(1), Lookup: i,
			Hashes: make([]byte, 32*7)}).Append(nil))
	}
	s.Post(3, (&wire.LookupResult{Lookup: 1 << 40, HitPages: 1}).Append(nil))
	directs := s.Detach()
	if len(directs) != 2 {
		t.Fatalf("%v", directs)
	}
	if err := s.AddSession(9, secretOf(9)); !errors.Is(err, ErrClosed) {
		t.Errorf("after Detach: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}

	next, err := NewLookupSockets(s.dir, LookupOptions{}, h)
	if err != nil {
		t.Fatal(err)
	}
	defer next.Close()
	for _, fd := range directs { // as by os.File.Fd
		if err := unix.SetNonblock(fd, false); err != nil {
			t.Fatal(err)
		}
	}
	held := [][]byte{a.lookup(1<<41, 3), a.lookup(1<<41+1, 4)}
	if err := errors.Join(next.Adopt(2, secretOf(2), directs[2], held),
		next.Adopt(3, secretOf(3), directs[3], nil),
		next.Adopt(1, secretOf(1), -1, nil)); err != nil {
		t.Fatal(err)
	}
	answers := func(c *directClient, n int) map[uint64]int {
		got := map[uint64]int{}
		for range n {
			var r wire.LookupResult
			if err := r.Decode(c.recv(), &wire.DefaultLimits); err != nil {
				t.Fatal(err)
			}
			got[r.Lookup]++
		}
		return got
	}
	check := func(who string, got map[uint64]int, more ...uint64) {
		for i := range uint64(each) {
			more = append(more, i)
		}
		for _, id := range more {
			if got[id] != 1 {
				t.Errorf("%s: %d answers to lookup %d", who, got[id], id)
			}
		}
	}
	check("a", answers(a, each+2), 1<<41, 1<<41+1)
	check("b", answers(b, each+1), 1<<40)
	// ZMQ connects anew by itself. What it receives meanwhile may lack a way back.
	again := (&wire.Lookup{Session: 1, Secret: secretOf(1), Lookup: 7000,
		Hashes: make([]byte, 32)}).Append(nil)
	eventually(t, "an answer by ZMQ", func() bool {
		zmq.send(again)
		for {
			n, _, errno := zmq.pull.recv(zmq.buf)
			var r wire.LookupResult
			if errno != 0 || r.Decode(zmq.buf[:n], &wire.DefaultLimits) == nil && r.Lookup == 7000 {
				return errno == 0
			}
		}
	})
	a.ask(5000, 6)
	next.Handle(func() [][]byte { return [][]byte{b.lookup(6000, 2)} })
	b.expect(6000, 2)
}
