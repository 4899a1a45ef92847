package ipc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lookaside/ipc/wire"
)

func listen(t testing.TB, opt Options) *Listener {
	t.Helper()
	l, err := Listen(runDir(t), opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// pair returns both ends of a session.
func pair(t testing.TB, l *Listener) (*Conn, *net.UnixConn) {
	t.Helper()
	client, err := dial(l.Dir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	c, err := l.Accept(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c, client
}

func TestExchange(t *testing.T) {
	l := listen(t, Options{})
	c, client := pair(t, l)
	if p := c.Peer(); int(p.PID) != os.Getpid() || int(p.UID) != os.Getuid() ||
		int(p.GID) != os.Getgid() {
		t.Fatalf("peer %+v", p)
	}
	if c.pidfd == nil {
		t.Log("this kernel has no SO_PEERPIDFD")
	}
	if err := client.SetWriteBuffer(wire.SocketBufferBytes); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, wire.MaxPacketBytes+1)
	for _, n := range []int{1, 1000, wire.MaxPacketBytes} {
		msg := bytes.Repeat([]byte{byte(n)}, n)
		if _, err := client.Write(msg); err != nil {
			t.Fatal(err)
		}
		got, err := c.Recv()
		if err != nil || !bytes.Equal(got, msg) {
			t.Fatalf("%d bytes, %v", len(got), err)
		}
		if err := c.Send(got); err != nil {
			t.Fatal(err)
		}
		if k, err := client.Read(buf); err != nil || !bytes.Equal(buf[:k], msg) {
			t.Fatalf("%d bytes back, %v", k, err)
		}
	}
	for _, n := range []int{0, wire.MaxPacketBytes + 1} {
		if err := c.Send(make([]byte, n)); !errors.Is(err, ErrOversize) {
			t.Fatalf("sending %d bytes: %v", n, err)
		}
	}
	if _, err := client.Write(make([]byte, wire.MaxPacketBytes+1)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Recv(); !errors.Is(err, ErrOversize) {
		t.Fatalf("oversize: %v", err)
	}
	if s := l.Stats(); s.Sessions != 1 || s.Accepted != 1 {
		t.Fatalf("%+v", s)
	}
}

func TestSendsDescriptorsAndTakesNone(t *testing.T) {
	l := listen(t, Options{})
	c, client := pair(t, l)
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteString("region"); err != nil {
		t.Fatal(err)
	}
	if err := c.Send([]byte("added"), int(f.Fd()), int(f.Fd())); err != nil {
		t.Fatal(err)
	}
	buf, oob := make([]byte, 64), make([]byte, 256)
	n, oobn, flags, _, err := client.ReadMsgUnix(buf, oob)
	if err != nil || string(buf[:n]) != "added" || flags&unix.MSG_CTRUNC != 0 {
		t.Fatalf("%q, flags %x, %v", buf[:n], flags, err)
	}
	cmsgs, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil || len(cmsgs) != 1 {
		t.Fatalf("%d control messages, %v", len(cmsgs), err)
	}
	fds, err := unix.ParseUnixRights(&cmsgs[0])
	if err != nil || len(fds) != 2 {
		t.Fatalf("%v, %v", fds, err)
	}
	got := make([]byte, 6)
	if _, err := unix.Pread(fds[0], got, 0); err != nil || string(got) != "region" {
		t.Fatalf("%q, %v", got, err)
	}
	for _, fd := range fds {
		unix.Close(fd)
	}

	// A client's descriptors are not let in.
	before := countFDs(t)
	for range 8 {
		if _, _, err := client.WriteMsgUnix([]byte("take this"), unix.UnixRights(int(f.Fd()),
			int(f.Fd())), nil); err != nil {
			t.Fatal(err)
		}
		if got, err := c.Recv(); err != nil || string(got) != "take this" {
			t.Fatalf("%q, %v", got, err)
		}
	}
	if after := countFDs(t); after > before {
		t.Fatalf("%d descriptors became %d", before, after)
	}
}

func countFDs(t testing.TB) int {
	t.Helper()
	e, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(e)
}

func TestRecvEnds(t *testing.T) {
	l := listen(t, Options{})

	c, client := pair(t, l)
	client.Close()
	if _, err := c.Recv(); err != io.EOF {
		t.Fatalf("closed peer: %v", err)
	}

	c, client = pair(t, l)
	if _, err := client.Write(nil); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Recv(); err != ErrEmpty { // it reads like an end, but its sender is there
		t.Fatalf("empty packet: %v", err)
	}

	c, client = pair(t, l)
	if err := client.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Recv(); err != io.EOF {
		t.Fatalf("peer that has ended its side: %v", err)
	}

	c, client = pair(t, l)
	if err := c.SetRecvDeadline(time.Now().Add(10 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Recv(); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("deadline: %v", err)
	}
	if err := c.SetRecvDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Write([]byte("late")); err != nil {
		t.Fatal(err)
	}
	if got, err := c.Recv(); err != nil || string(got) != "late" {
		t.Fatalf("after the deadline: %q, %v", got, err)
	}

	closed := make(chan error)
	go func() { _, err := c.Recv(); closed <- err }()
	time.Sleep(5 * time.Millisecond)
	c.Close()
	if err := <-closed; err != ErrClosed {
		t.Fatalf("closed by us: %v", err)
	}
	if err := c.Send([]byte("x")); err != ErrClosed {
		t.Fatalf("send after close: %v", err)
	}
	if err := c.Close(); err != nil {
		t.Fatalf("second close: %v", err)
	}

	c, client = pair(t, l)
	client.Close()
	if err := c.Send([]byte("x")); err != ErrPeerGone {
		t.Fatalf("send to a closed peer: %v", err)
	}
}

func TestPeerThatDoesNotRead(t *testing.T) {
	l := listen(t, Options{SendPatience: 50 * time.Millisecond})
	c, client := pair(t, l)
	start := time.Now()
	var wg sync.WaitGroup
	for range 4 { // several senders: the patience is not theirs one after the other
		wg.Go(func() {
			for {
				if err := c.Send(make([]byte, 64<<10)); err != nil {
					if err != ErrPeerStuck && !errors.Is(err, ErrPeerStuck) {
						t.Errorf("%v", err)
					}
					return
				}
			}
		})
	}
	wg.Wait()
	if took := time.Since(start); took > 30*time.Second {
		t.Fatalf("took %v", took)
	}
	if _, err := c.Recv(); err != ErrPeerStuck {
		t.Fatalf("Recv: %v", err)
	}
	lingered := linger(c)
	select {
	case <-lingered:
		t.Fatal("it was given up, but it is there")
	case <-time.After(50 * time.Millisecond):
	}
	if n := l.Stats().Sessions; n != 1 {
		t.Fatalf("%d sessions are counted", n)
	}
	// What it was sent is still there to read, and then the end.
	buf, packets := make([]byte, 64<<10), 0
	for {
		n, err := client.Read(buf)
		if n == 0 || err != nil {
			break
		}
		packets++
	}
	if packets == 0 {
		t.Fatal("nothing was there to read")
	}
	client.Close()
	<-lingered
	c.Close()
	if n := l.Stats().Sessions; n != 0 {
		t.Fatalf("%d sessions are counted after its end", n)
	}
}

// linger lingers in the background; the channel closes when that is over.
func linger(c *Conn) <-chan struct{} {
	over := make(chan struct{})
	go func() {
		c.Linger()
		close(over)
	}()
	return over
}

func TestGivenUp(t *testing.T) {
	l := listen(t, Options{MaxSessions: 2})
	cause := errors.New("we have heard enough")
	for _, tc := range []struct {
		name  string
		leave func(c *Conn, client *net.UnixConn)
	}{
		{"the peer closes", func(_ *Conn, client *net.UnixConn) { client.Close() }},
		{"the peer ends its side", func(_ *Conn, client *net.UnixConn) { _ = client.CloseWrite() }},
		{"we close", func(c *Conn, _ *net.UnixConn) { c.Close() }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, client := pair(t, l)
			if err := c.Send([]byte("before")); err != nil {
				t.Fatal(err)
			}
			waiting := make(chan error)
			go func() { _, err := c.Recv(); waiting <- err }()
			time.Sleep(5 * time.Millisecond)
			if !c.GiveUp(cause) {
				t.Fatal("the peer is there")
			}
			if err := <-waiting; err != cause {
				t.Fatalf("a Recv that waited: %v", err)
			}
			if !c.GiveUp(errors.New("again")) {
				t.Fatal("the peer is still there")
			}
			lingered := linger(c)
			// Nothing that it says is heard, and what it may say is bounded by its own buffer.
			_ = client.SetWriteDeadline(time.Now().Add(50 * time.Millisecond))
			for {
				if _, err := client.Write(make([]byte, 1000)); errors.Is(err,
					os.ErrDeadlineExceeded) {
					break
				} else if err != nil {
					t.Fatal(err)
				}
			}
			if err := c.Send([]byte("after")); err != cause {
				t.Fatalf("Send: %v", err)
			}
			buf := make([]byte, 64)
			if n, err := client.Read(buf); string(buf[:n]) != "before" {
				t.Fatalf("%q, %v", buf[:n], err)
			}
			if n, err := client.Read(buf); n != 0 || err != nil && err != io.EOF {
				t.Fatalf("then %d bytes, %v", n, err)
			}
			select {
			case <-lingered:
				t.Fatal("nobody has left")
			default:
			}
			if n := l.Stats().Sessions; n != 1 {
				t.Fatalf("%d sessions", n)
			}
			tc.leave(c, client)
			<-lingered
			if c.GiveUp(cause) {
				t.Error("the peer is gone, or we are")
			}
			c.Close()
			if _, err := c.Recv(); err != cause {
				t.Errorf("Recv: %v", err)
			}
			if n := l.Stats().Sessions; n != 0 {
				t.Errorf("%d sessions", n)
			}
		})
	}
}

// Those that were given up take the places of sessions: their descriptors are open.
func TestGivenUpCountForTheCap(t *testing.T) {
	l := listen(t, Options{MaxSessions: 2})
	first, gone := pair(t, l)
	first.GiveUp(ErrPeerStuck)
	pair(t, l)
	third, err := dial(l.Dir())
	if err != nil {
		t.Fatal(err)
	}
	defer third.Close()
	accepted := make(chan *Conn)
	go func() {
		c, _ := l.Accept(context.Background())
		accepted <- c
	}()
	eventually(t, "the third is refused", func() bool { return l.Stats().RefusedBusy == 1 })
	gone.Close()
	first.Linger()
	first.Close()
	fourth, err := dial(l.Dir())
	if err != nil {
		t.Fatal(err)
	}
	defer fourth.Close()
	c := <-accepted
	if c == nil {
		t.Fatal("no room after one has left")
	}
	c.Close()
}

// What a client has not read keeps its place, so that nobody can have any amount of memory held by
// coming again and again.
func TestUnreadCountsForTheCap(t *testing.T) {
	l := listen(t, Options{MaxSessions: 2})
	leave := func(c *Conn, client *net.UnixConn) {
		t.Helper()
		if err := c.Send(make([]byte, 4096)); err != nil {
			t.Fatal(err)
		}
		if err := client.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Recv(); !errors.Is(err, io.EOF) {
			t.Fatal(err)
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
	c, reader := pair(t, l)
	leave(c, reader)
	c, closer := pair(t, l)
	leave(c, closer)
	if n := l.Stats().Sessions; n != 2 {
		t.Fatalf("%d count", n)
	}
	if n, err := reader.Read(make([]byte, 8192)); n != 4096 || err != nil {
		t.Fatal(n, err)
	}
	eventually(t, "the one that has read everything does not count",
		func() bool { return l.Stats().Sessions == 1 })
	closer.Close()
	eventually(t, "the one that has left does not count",
		func() bool { return l.Stats().Sessions == 0 })
	// The end of the listener ends it, too.
	c, client := pair(t, l)
	leave(c, client)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if n := l.Stats().Sessions; n != 0 {
		t.Fatalf("%d count", n)
	}
}

// A process that is stopped, or whose child holds the socket, lingers until it is dead.
func TestLingeringProcessDies(t *testing.T) {
	l := listen(t, Options{SendPatience: 50 * time.Millisecond})
	cmd, _, child := helper(t, "connect and fork", l.Dir(), -1)
	pid, err := strconv.Atoi(child)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = syscall.Kill(pid, syscall.SIGKILL) }()
	c, err := l.Accept(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if c.pidfd == nil {
		t.Skip("this kernel has no SO_PEERPIDFD")
	}
	if err := cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for err == nil {
		err = c.Send(make([]byte, 64<<10))
	}
	if !errors.Is(err, ErrPeerStuck) {
		t.Fatal(err)
	}
	lingered := linger(c)
	select {
	case <-lingered:
		t.Fatal("it is only stopped")
	case <-time.After(2 * deathGrace):
	}
	start := time.Now()
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	<-lingered
	if took := time.Since(start); took > 30*time.Second {
		t.Fatalf("its death was noticed after %v", took)
	}
	_ = syscall.Kill(pid, syscall.SIGKILL) // the child has the socket with what was not read
	eventually(t, "the session is given back", func() bool { return l.Stats().Sessions == 0 })
}

// The peer is dead, but its child holds the socket: no end of file comes.
func TestDeadPeerIsNoticed(t *testing.T) {
	l := listen(t, Options{})
	cmd, _, child := helper(t, "connect and fork", l.Dir(), -1)
	pid, err := strconv.Atoi(child)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = syscall.Kill(pid, syscall.SIGKILL) }()
	c, err := l.Accept(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if int(c.Peer().PID) != cmd.Process.Pid {
		t.Fatalf("peer %+v, want pid %d", c.Peer(), cmd.Process.Pid)
	}
	if c.pidfd == nil {
		t.Skip("this kernel has no SO_PEERPIDFD")
	}
	start := time.Now()
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Recv(); err != ErrPeerGone {
		t.Fatalf("Recv: %v", err)
	}
	if took := time.Since(start); took > 30*time.Second {
		t.Fatalf("noticed after %v", took)
	}
	eventually(t, "the session is given back", func() bool { return l.Stats().Sessions == 0 })
}

// What a peer sent before it died is still heard, even if it did not read what
// it was sent itself, which the kernel reports as an error first.
func TestLastWordsAreHeard(t *testing.T) {
	grace := deathGrace
	// no copy of the socket keeps the end from coming; it is only this test that may come late
	deathGrace = time.Hour
	defer func() { deathGrace = grace }()
	l := listen(t, Options{})
	for range 3 {
		cmd, stdin, _ := helper(t, "last words", l.Dir(), -1)
		c, err := l.Accept(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Send([]byte("unread")); err != nil {
			t.Fatal(err)
		}
		if _, err := stdin.WriteString("\n"); err != nil {
			t.Fatal(err)
		}
		if _, err := cmd.Process.Wait(); err != nil {
			t.Fatal(err)
		}
		if got, err := c.Recv(); err != nil || string(got) != "commit" {
			t.Fatalf("%q, %v", got, err)
		}
		if _, err := c.Recv(); err != io.EOF && err != ErrPeerGone {
			t.Fatalf("then: %v", err)
		}
		c.Close()
	}
}

func TestSessionCap(t *testing.T) {
	l := listen(t, Options{MaxSessions: 2})
	first, _ := pair(t, l)
	pair(t, l)
	third, err := dial(l.Dir())
	if err != nil {
		t.Fatal(err)
	}
	defer third.Close()
	// It has said hello already: what is left unread must not hide the refusal.
	if _, err := third.Write((&wire.Ping{ID: 1}).Append(nil)); err != nil {
		t.Fatal(err)
	}
	accepted := make(chan *Conn)
	go func() {
		c, _ := l.Accept(context.Background())
		accepted <- c
	}()
	buf := make([]byte, 4096)
	n, err := third.Read(buf)
	if err != nil {
		t.Fatal(err)
	}
	var refuse wire.Refuse
	if err := refuse.Decode(buf[:n], &wire.DefaultLimits); err != nil ||
		refuse.Code != wire.RefuseBusy || refuse.Want != "2" {
		t.Fatalf("%+v, %v", refuse, err)
	}
	if n, err := third.Read(buf); n != 0 || err != nil && err != io.EOF {
		t.Fatalf("then %d bytes, %v", n, err)
	}
	first.Close()
	fourth, err := dial(l.Dir())
	if err != nil {
		t.Fatal(err)
	}
	defer fourth.Close()
	c := <-accepted
	if c == nil {
		t.Fatal("no room after one has left")
	}
	c.Close()
	if s := l.Stats(); s.RefusedBusy != 1 || s.Accepted != 3 || s.Sessions != 1 {
		t.Fatalf("%+v", s)
	}
}

// However many ask at once, each can read why there is no room for it.
func TestEveryRefusedClientLearnsWhy(t *testing.T) {
	l := listen(t, Options{MaxSessions: 1})
	pair(t, l)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept(ctx)
			if err != nil {
				return
			}
			t.Error("accepted")
			c.Close()
		}
	}()
	hello := (&wire.Hello{Role: wire.RoleScheduler, EngineID: "e", PageTokens: 16, PagesPerChunk: 4,
		DigestBytes: 32}).Append(nil)
	// Some say hello at once, as clients do, some late, some never.
	refused := func(wait time.Duration) error {
		c, err := dial(l.Dir())
		if err != nil {
			return err
		}
		defer c.Close()
		if wait < time.Minute {
			time.Sleep(wait)
			if _, err := c.Write(hello); err != nil && !errors.Is(err, unix.EPIPE) {
				return err
			}
		}
		buf := make([]byte, 4096)
		n, err := c.Read(buf)
		if errors.Is(err, unix.ECONNRESET) { // told once; what was sent before is there
			n, err = c.Read(buf)
		}
		if err != nil {
			return err
		}
		var refuse wire.Refuse
		if err := refuse.Decode(buf[:n], &wire.DefaultLimits); err != nil {
			return err
		}
		if refuse.Code != wire.RefuseBusy || refuse.Field != "sessions.limit" {
			return fmt.Errorf("%+v", refuse)
		}
		return nil
	}
	var wg sync.WaitGroup
	for i := range 150 {
		wg.Go(func() {
			wait := time.Duration(0)
			switch i % 5 {
			case 0:
				wait = time.Duration(i) * time.Millisecond / 2
			case 1:
				wait = time.Hour
			}
			if err := refused(wait); err != nil {
				t.Errorf("client %d: %v", i, err)
			}
		})
	}
	wg.Wait()
	cancel()
	<-done
	if s := l.Stats(); s.RefusedBusy != 150 || s.Sessions != 1 {
		t.Errorf("%+v", s)
	}
}

func TestSessionFlood(t *testing.T) {
	l := listen(t, Options{MaxSessions: 4})
	var conns []*Conn
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept(context.Background())
			if err != nil {
				return
			}
			conns = append(conns, c)
		}
	}()
	const flood = 300
	for range flood {
		c, err := dial(l.Dir())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	// The clients say nothing, and each refusal waits a little for their hello; but
	// only of a few at a time.
	eventually(t, "all are dealt with", func() bool {
		s := l.Stats()
		return s.Accepted+s.RefusedBusy == flood
	})
	if s := l.Stats(); s.Accepted != 4 || s.Sessions != 4 {
		t.Fatalf("%+v", s)
	}
	l.Close()
	<-done
	for _, c := range conns {
		c.Close()
	}
}

func TestAnotherUserIsRefused(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root to be another user")
	}
	l := listen(t, Options{})
	// The directory alone keeps others out; open it to see that the credentials do too.
	for path, mode := range map[string]os.FileMode{filepath.Dir(l.Dir()): 0o755, l.Dir(): 0o755,
		filepath.Join(l.Dir(), sessionName): 0o777} {
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	accepted := make(chan *Conn, 1)
	go func() {
		c, _ := l.Accept(ctx)
		accepted <- c
	}()
	if _, _, said := helper(t, "connect", l.Dir(), 65534); said != "refused" {
		t.Fatalf("a stranger was %s", said)
	}
	cancel()
	if c := <-accepted; c != nil {
		c.Close()
		t.Fatal("accepted a stranger")
	}
	if s := l.Stats(); s.RefusedUID != 1 || s.Accepted != 0 || s.Sessions != 0 {
		t.Fatalf("%+v", s)
	}
}

func TestAcceptEnds(t *testing.T) {
	l := listen(t, Options{})
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		time.Sleep(5 * time.Millisecond)
		cancel()
	}()
	if _, err := l.Accept(ctx); err != context.Canceled {
		t.Fatalf("canceled: %v", err)
	}
	if _, err := l.Accept(ctx); err != context.Canceled {
		t.Fatalf("canceled before: %v", err)
	}
	pair(t, l) // and it works again
	go func() {
		time.Sleep(5 * time.Millisecond)
		l.Close()
	}()
	if _, err := l.Accept(t.Context()); err != ErrClosed {
		t.Fatalf("closed: %v", err)
	}
	if _, err := os.Lstat(filepath.Join(l.Dir(), sessionName)); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("the socket is still there: %v", err)
	}
	if err := l.Close(); err != nil {
		t.Fatalf("second close: %v", err)
	}
}

func TestSecondOwner(t *testing.T) {
	dir := runDir(t)
	cmd, _, _ := helper(t, "listen", dir, -1)
	for range 2 {
		_, err := Listen(dir, Options{})
		var owned *OwnedError
		if !errors.As(err, &owned) || owned.PID != cmd.Process.Pid ||
			!strings.Contains(err.Error(), fmt.Sprint("pid ", cmd.Process.Pid)) {
			t.Fatalf("%v, want the owner's pid %d", err, cmd.Process.Pid)
		}
	}
	if _, err := dial(dir); err != nil {
		t.Fatalf("the owner lost its socket: %v", err)
	}
	// It dies without tidying up: lock, pid and sockets stay behind.
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_, _ = cmd.Process.Wait()
	for _, name := range []string{lookupName, replyName} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Lstat(filepath.Join(dir, sessionName)); err != nil {
		t.Fatalf("no stale socket to replace: %v", err)
	}
	l, err := Listen(dir, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	pair(t, l)
	names, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range names {
		if e.Name() != lockName && e.Name() != sessionName {
			t.Errorf("%s was left behind", e.Name())
		}
	}
}

func TestDirectoryChecks(t *testing.T) {
	expect := func(dir, want string) {
		t.Helper()
		l, err := Listen(dir, Options{})
		if err == nil {
			l.Close()
			t.Fatalf("%s: no error, want %q", dir, want)
		}
		if !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "runtime.dir") {
			t.Fatalf("%s: %v, want %q", dir, err, want)
		}
	}
	parent := filepath.Dir(runDir(t))

	long := filepath.Join(parent, strings.Repeat("x", maxSocketPath))
	expect(long, "107")
	if _, err := os.Lstat(long); err == nil {
		t.Error("a directory whose path is too long was made")
	}
	// The longest path that fits, fits.
	room := maxSocketPath - len(parent) - 1 - 1 - len(longestName)
	l, err := Listen(filepath.Join(parent, strings.Repeat("y", room)), Options{})
	if err != nil {
		t.Fatal(err)
	}
	l.Close()

	wide := filepath.Join(parent, "wide")
	if err := os.Mkdir(wide, 0o755); err != nil {
		t.Fatal(err)
	}
	expect(wide, "0755")

	narrow := filepath.Join(parent, "narrow")
	if err := os.Mkdir(narrow, 0o700); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(parent, "link")
	if err := os.Symlink(narrow, link); err != nil {
		t.Fatal(err)
	}
	expect(link, "symlink")

	file := filepath.Join(parent, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	expect(file, "not a directory")

	if err := os.Symlink(file, filepath.Join(narrow, lockName)); err != nil {
		t.Fatal(err)
	}
	expect(narrow, "lock")

	if os.Getuid() == 0 {
		theirs := filepath.Join(parent, "theirs")
		if err := os.Mkdir(theirs, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(theirs, 65534, 65534); err != nil {
			t.Fatal(err)
		}
		expect(theirs, "uid 65534")
	}

	odd := filepath.Join(parent, `odd[*?\]`)
	for range 2 {
		l, err := Listen(odd, Options{})
		if err != nil {
			t.Fatal(err)
		}
		if st, err := os.Stat(odd); err != nil || st.Mode().Perm() != 0o700 {
			t.Fatalf("%v, %v", st.Mode(), err)
		}
		l.Close()
		if err := os.WriteFile(filepath.Join(odd, "reply-1.sock"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func TestDescriptorLimit(t *testing.T) {
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		t.Fatal(err)
	}
	_, err := Listen(runDir(t), Options{MaxSessions: int(min(lim.Cur, 1<<30))})
	if err == nil || !strings.Contains(err.Error(), "sessions.limit") ||
		!strings.Contains(err.Error(), fmt.Sprint(lim.Cur)) {
		t.Fatalf("%v", err)
	}
}

// Random clients that come, talk, stall, and leave: at the end no session is
// counted and nothing is left open.
func TestSessionsComeAndGo(t *testing.T) {
	l := listen(t, Options{MaxSessions: 8, SendPatience: 20 * time.Millisecond})
	var served sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	acceptor := make(chan struct{})
	go func() {
		defer close(acceptor)
		for {
			c, err := l.Accept(ctx)
			if err != nil {
				return
			}
			served.Go(func() {
				defer c.Close()
				for {
					msg, err := c.Recv()
					if err != nil {
						return
					}
					for range int(msg[0]) {
						if c.Send(msg) != nil {
							return
						}
					}
				}
			})
		}
	}()
	var clients sync.WaitGroup
	for i := range 16 {
		clients.Go(func() {
			for j := range 20 {
				c, err := dial(l.Dir())
				if err != nil {
					t.Error(err)
					return
				}
				_ = c.SetDeadline(time.Now().Add(5 * time.Second))
				_, _ = c.Write(bytes.Repeat([]byte{byte(1 + (i+j)%40)}, 100+i*j))
				if (i+j)%3 > 0 {
					_, _ = c.Read(make([]byte, 1000))
				}
				c.Close()
			}
		})
	}
	clients.Wait()
	eventually(t, "all sessions end", func() bool { return l.Stats().Sessions == 0 })
	cancel()
	<-acceptor
	served.Wait()
}
