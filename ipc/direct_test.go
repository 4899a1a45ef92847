package ipc

import (
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lookaside/ipc/wire"
)

// directClient is the client's end of a session's direct socket.
type directClient struct {
	t   testing.TB
	fd  int
	id  uint64
	buf []byte
}

// directSession adds a session with a direct socket.
func directSession(t testing.TB, s *LookupSockets, id uint64) *directClient {
	t.Helper()
	fd, err := s.AddDirect(id)
	if err != nil {
		t.Fatal(err)
	}
	c := &directClient{t: t, fd: fd, id: id, buf: make([]byte, 256)}
	t.Cleanup(c.close)
	return c
}

func (c *directClient) close() {
	closeFD(c.fd)
	c.fd = -1
}

func (c *directClient) send(msg []byte) error {
	for {
		_, err := unix.Write(c.fd, msg)
		if err != unix.EAGAIN {
			return err
		}
		c.wait(unix.POLLOUT)
	}
}

// recv returns the next packet; of no bytes at the end.
func (c *directClient) recv() []byte {
	c.t.Helper()
	c.wait(unix.POLLIN)
	n, err := unix.Read(c.fd, c.buf)
	if err != nil {
		c.t.Fatal(err)
	}
	return c.buf[:n]
}

func (c *directClient) wait(events int16) {
	c.t.Helper()
	p := []unix.PollFd{{Fd: int32(c.fd), Events: events}}
	for end := time.Now().Add(patience); ; {
		if n, err := unix.Poll(p, 100); n == 1 && err == nil {
			return
		}
		if time.Now().After(end) {
			c.t.Fatalf("the direct socket is not ready in %v", patience)
		}
	}
}

func (c *directClient) lookup(lookup uint64, pages int) []byte {
	return (&wire.Lookup{Session: c.id, Secret: secretOf(c.id), Lookup: lookup,
		Hashes: make([]byte, 32*pages)}).Append(nil)
}

func (c *directClient) ask(lookup uint64, pages int) {
	c.t.Helper()
	if err := c.send(c.lookup(lookup, pages)); err != nil {
		c.t.Fatal(err)
	}
	c.expect(lookup, pages)
}

func (c *directClient) expect(lookup uint64, pages int) {
	c.t.Helper()
	var r wire.LookupResult
	if err := r.Decode(c.recv(), &wire.DefaultLimits); err != nil {
		c.t.Fatal(err)
	}
	if r.Lookup != lookup || r.HitPages != uint32(pages) {
		c.t.Fatalf("%+v for lookup %d of %d pages", r, lookup, pages)
	}
}

// Sessions with direct sockets are answered there, inline and by Post, beside those of ZMQ. What
// does not fit a packet may come by ZMQ.
func TestDirectSockets(t *testing.T) {
	s, _ := lookupSockets(t, LookupOptions{})
	zmq := session(t, s, 1)
	dropped := s.Stats().Dropped // what the ZMQ client asked before it was connected
	a, b := directSession(t, s, 2), directSession(t, s, 3)
	for i, pages := range []int{1, 64, 4096} {
		a.ask(uint64(i), pages)
		b.ask(uint64(i), pages)
		zmq.ask(1, uint64(i), pages)
	}
	if err := a.send(a.lookup(9, 65536)); !errors.Is(err, unix.EMSGSIZE) {
		t.Fatal(err)
	}
	zmq.send(a.lookup(10, 65536))
	a.expect(10, 65536)
	s.Post(3, (&wire.LookupResult{Lookup: 11, HitPages: 5}).Append(nil))
	b.expect(11, 5)

	// Many that are sent before the first is answered.
	for i := range uint64(500) {
		if err := a.send(a.lookup(i, 8)); err != nil {
			t.Fatal(err)
		}
	}
	for i := range uint64(500) {
		a.expect(i, 8)
	}
	if st := s.Stats(); st.Sessions != 3 || st.Malformed != 0 || st.Dropped != dropped {
		t.Errorf("%+v", st)
	}

	// The end of a session is the end of its direct socket, and of no other.
	s.RemoveSession(2)
	if m := a.recv(); len(m) != 0 {
		t.Errorf("%x after the end of the session", m)
	}
	s.Post(2, []byte{1})
	eventually(t, "the answer to nobody is counted",
		func() bool { return s.Stats().NoSession == 1 })
	b.ask(12, 3)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if m := b.recv(); len(m) != 0 {
		t.Errorf("%x after Close", m)
	}
	if _, err := s.AddDirect(4); !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
}

// A client that closes its direct socket, with answers unread or not, costs its own answers alone.
func TestDirectSocketClosedByItsClient(t *testing.T) {
	s, _ := lookupSockets(t, LookupOptions{})
	a, b, c := directSession(t, s, 1), directSession(t, s, 2), directSession(t, s, 3)
	a.ask(1, 1)
	if err := b.send(b.lookup(1, 1)); err != nil {
		t.Fatal(err)
	}
	b.wait(unix.POLLIN)
	a.close()
	b.close()
	c.ask(1, 1)
	eventually(t, "answers to closed sockets are dropped", func() bool {
		s.Post(1, []byte{1})
		s.Post(2, []byte{1})
		return s.Stats().Dropped >= 2
	})
	c.ask(2, 7)
	s.RemoveSession(1)
	s.RemoveSession(2)
	again := directSession(t, s, 1)
	again.ask(3, 2)
	c.ask(4, 2)
}

// A client that does not read loses answers, and delays nobody.
func TestDirectSocketThatIsNotRead(t *testing.T) {
	s, _ := lookupSockets(t, LookupOptions{})
	deaf, good := directSession(t, s, 1), directSession(t, s, 2)
	for i := uint64(0); s.Stats().Dropped == 0; i++ {
		if err := deaf.send(deaf.lookup(i, 1)); err != nil {
			t.Fatal(err)
		}
		good.ask(i, 4)
	}
}

// Whatever comes over a direct socket, the loop goes on and answers.
func TestMalformedDirectMessages(t *testing.T) {
	s, h := lookupSockets(t, LookupOptions{})
	c := directSession(t, s, 1)
	bad := uint64(0)
	for _, raw := range refusedMessages(t) {
		if len(raw) == 0 { // it would end the socket
			continue
		}
		if err := c.send(raw); err != nil {
			t.Fatal(err)
		}
		bad++
	}
	eventually(t, "golden vectors to refuse are refused",
		func() bool { return h.malformed.Load() == bad })
	c.ask(1, 5)
	// An empty packet reads as the end.
	if err := c.send(nil); err != nil {
		t.Fatal(err)
	}
	if m := c.recv(); len(m) != 0 {
		t.Errorf("%x after an empty packet", m)
	}
}

func TestDirectSocketAllocatesNothing(t *testing.T) {
	s, _ := lookupSockets(t, LookupOptions{Tick: time.Hour})
	c := directSession(t, s, 1)
	msg := c.lookup(1, 64)
	n := testing.AllocsPerRun(500, func() {
		if _, err := unix.Write(c.fd, msg); err != nil {
			t.Fatal(err)
		}
		for {
			if _, err := unix.Read(c.fd, c.buf); err == nil {
				return
			}
		}
	})
	if n > 0 {
		t.Errorf("%.1f allocations a lookup", n)
	}
}
