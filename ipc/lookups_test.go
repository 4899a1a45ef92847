package ipc

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/pebbe/zmq4"
	"golang.org/x/sys/unix"

	"lookaside/internal/bench/zmqecho"
	"lookaside/ipc/wire"
)

// testHandler answers lookups: all pages hit.
type testHandler struct {
	lookup    wire.Lookup
	result    wire.LookupResult
	malformed atomic.Uint64
	ticks     atomic.Uint64
	within    atomic.Pointer[func()] // called with each lookup, if set
	cleanups  atomic.Uint64
}

func (h *testHandler) HandleLookup(msg, reply []byte) (uint64, []byte) {
	if err := h.lookup.Decode(msg, &wire.DefaultLimits); err != nil {
		h.malformed.Add(1)
		return 0, nil
	}
	if f := h.within.Load(); f != nil {
		(*f)()
	}
	pages := uint32(len(h.lookup.Hashes) / 32)
	h.result = wire.LookupResult{Lookup: h.lookup.Lookup, HitPages: pages, HitTokens: pages * 16}
	return h.lookup.Session, h.result.Append(reply)
}

func (h *testHandler) HandleLMCache(req *wire.LMCacheRequest) (uint32, bool) {
	if req.Cleanup {
		h.cleanups.Add(1)
		return 0, false
	}
	tokens := uint32(0)
	for _, o := range req.Offsets {
		tokens += o
	}
	return tokens, true
}

func (h *testHandler) Tick() { h.ticks.Add(1) }

func lookupSockets(t testing.TB, opt LookupOptions) (*LookupSockets, *testHandler) {
	t.Helper()
	l, err := Listen(runDir(t), Options{})
	if err != nil {
		t.Fatal(err)
	}
	h := new(testHandler)
	s, err := NewLookupSockets(l.Dir(), opt, h)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if left, _ := filepath.Glob(filepath.Join(l.Dir(), "*.sock")); len(left) != 1 {
			t.Errorf("left behind: %v", left)
		}
		l.Close()
	})
	return s, h
}

// zmqClient is the scheduler's end: a PUSH for requests, and for answers a DEALER with the
// session's secret as its routing id, or LMCache's PULL.
type zmqClient struct {
	t          testing.TB
	ctx        *zmq4.Context
	push, pull *zsock
	buf        []byte
}

func newClient(t testing.TB, pushTo, pullFrom string, bindPull bool) *zmqClient {
	t.Helper()
	join := (*zsock).Connect
	if bindPull {
		join = (*zsock).Bind
	}
	return connect(t, pushTo, zmq4.PULL, func(pull *zsock) error { return join(pull, pullFrom) })
}

// connect makes a client whose socket for answers is of a kind, and is started by join.
func connect(t testing.TB, pushTo string, kind zmq4.Type, join func(pull *zsock) error) *zmqClient {
	t.Helper()
	ctx, err := zmq4.NewContext()
	if err != nil {
		t.Fatal(err)
	}
	c := &zmqClient{t: t, ctx: ctx, buf: make([]byte, 1<<16)}
	if c.push, err = newZsock(ctx, zmq4.PUSH); err != nil {
		t.Fatal(err)
	}
	if c.pull, err = newZsock(ctx, kind); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.close)
	err = errors.Join(c.push.SetLinger(0), c.pull.SetLinger(0), c.pull.SetRcvtimeo(patience),
		c.push.SetSndtimeo(patience))
	if err := errors.Join(err, join(c.pull), c.push.Connect(pushTo)); err != nil {
		t.Fatal(err)
	}
	return c
}

func (c *zmqClient) close() {
	c.push.Close()
	c.pull.Close()
	if err := c.ctx.Term(); err != nil {
		c.t.Error(err)
	}
}

// secretOf is the secret of a session in these tests.
func secretOf(id uint64) []byte {
	b := bytes.Repeat([]byte{0x5e}, wire.SecretBytes)
	binary.LittleEndian.PutUint64(b, id)
	return b
}

// sessionClient is a client that is answered as a session.
func sessionClient(t testing.TB, lookup, reply string, id uint64) *zmqClient {
	t.Helper()
	return connect(t, lookup, zmq4.DEALER, func(pull *zsock) error {
		return errors.Join(pull.SetIdentity(string(secretOf(id))), pull.Connect(reply))
	})
}

// session adds a session and a client of it that has had its first answer, so that
// both directions are connected.
func session(t testing.TB, s *LookupSockets, id uint64) *zmqClient {
	t.Helper()
	if err := s.AddSession(id, secretOf(id)); err != nil {
		t.Fatal(err)
	}
	c := sessionClient(t, s.LookupEndpoint(), s.ReplyEndpoint(), id)
	c.warm(id)
	return c
}

// warm asks until an answer comes: one that finds the reply socket without its
// peer is dropped.
func (c *zmqClient) warm(id uint64) {
	c.t.Helper()
	msg := (&wire.Lookup{Session: id, Secret: secretOf(id), Lookup: 1 << 62,
		Hashes: make([]byte, 32)}).Append(nil)
	eventually(c.t, "the first answer", func() bool {
		_, _ = c.push.SendBytes(msg, zmq4.DONTWAIT)
		time.Sleep(5 * time.Millisecond)
		return c.drain() > 0
	})
	c.ask(id, 1<<62+1, 1) // after it, nothing of the above is under way
}

func (c *zmqClient) drain() (n int) {
	for {
		if _, _, errno := c.pull.recv(c.buf); errno != 0 {
			return n
		}
		n++
	}
}

func (c *zmqClient) send(frames ...[]byte) {
	c.t.Helper()
	for i, f := range frames {
		var flag zmq4.Flag
		if i+1 < len(frames) {
			flag = zmq4.SNDMORE
		}
		if _, err := c.push.SendBytes(f, flag); err != nil {
			c.t.Fatal(err)
		}
	}
}

func (c *zmqClient) recv() [][]byte {
	c.t.Helper()
	m, err := c.pull.RecvMessageBytes(0)
	if err != nil {
		c.t.Fatal(err)
	}
	return m
}

// ask does one lookup and checks its answer; others' answers are skipped.
func (c *zmqClient) ask(id, lookup uint64, pages int) {
	c.t.Helper()
	c.send((&wire.Lookup{Session: id, Secret: secretOf(id), Lookup: lookup,
		Hashes: make([]byte, 32*pages)}).Append(nil))
	for {
		var r wire.LookupResult
		m := c.recv()
		if len(m) != 1 {
			c.t.Fatalf("%d frames", len(m))
		}
		if err := r.Decode(m[0], &wire.DefaultLimits); err != nil {
			c.t.Fatal(err)
		}
		if r.Lookup != lookup {
			continue
		}
		if r.HitPages != uint32(pages) || r.HitTokens != uint32(pages*16) {
			c.t.Fatalf("%+v for %d pages", r, pages)
		}
		return
	}
}

func TestLookups(t *testing.T) {
	s, h := lookupSockets(t, LookupOptions{Tick: 5 * time.Millisecond})
	a, b := session(t, s, 1), session(t, s, 1<<63)
	for i, pages := range []int{1, 64, 4096, 65536} {
		a.ask(1, uint64(i), pages)
		b.ask(1<<63, uint64(i), pages)
	}
	if err := s.AddSession(1, secretOf(1)); err != nil { // again
		t.Fatal(err)
	}
	a.ask(1, 9, 1)
	eventually(t, "ticks", func() bool { return h.ticks.Load() > 3 })
	if st := s.Stats(); st.Sessions != 2 || st.Answers < 9 || st.Malformed != 0 ||
		st.FloodBreaks != 0 {
		t.Fatalf("%+v", st)
	}
	for _, name := range []string{lookupName, replyName} {
		if st, err := os.Lstat(filepath.Join(filepath.Dir(strings.TrimPrefix(s.LookupEndpoint(),
			"ipc://")), name)); err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", name, st.Mode(), err)
		}
	}

	s.RemoveSession(1)
	s.RemoveSession(1)
	a.send((&wire.Lookup{Session: 1, Secret: secretOf(1), Lookup: 10,
		Hashes: make([]byte, 32)}).Append(nil))
	eventually(t, "the answer to nobody is counted",
		func() bool { return s.Stats().NoSession == 1 })
	b.ask(1<<63, 11, 1)
	// The session comes back, and its client with it.
	if err := s.AddSession(1, secretOf(1)); err != nil {
		t.Fatal(err)
	}
	a.warm(1)
	a.ask(1, 12, 3)
}

// refusedMessages returns the golden messages that must be refused.
func refusedMessages(t *testing.T) (all [][]byte) {
	t.Helper()
	b, err := os.ReadFile("wire/testdata/vectors.json")
	if err != nil {
		t.Fatal(err)
	}
	var vectors []struct {
		Hex   string
		Valid bool
	}
	if err := json.Unmarshal(b, &vectors); err != nil {
		t.Fatal(err)
	}
	for _, v := range vectors {
		if !v.Valid {
			raw, err := hex.DecodeString(v.Hex)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, raw)
		}
	}
	return all
}

// Whatever comes over the lookup socket, the loop goes on and serves lookups.
func TestMalformedLookups(t *testing.T) {
	s, h := lookupSockets(t, LookupOptions{})
	c := session(t, s, 1)
	dropped := func(what string, before LookupStats, n uint64) {
		t.Helper()
		eventually(t, what+" are dropped",
			func() bool { return s.Stats().Malformed-before.Malformed == n })
		c.ask(1, 1, 5)
	}
	before := s.Stats()
	c.send([]byte("a"), []byte("b"))
	c.send(make([][]byte, 100)...)
	c.send(bytes.Repeat([]byte("x"), 1<<20), bytes.Repeat([]byte("y"), 1<<20),
		bytes.Repeat([]byte("z"), 1<<20))
	dropped("messages of several frames", before, 3)

	refused := refusedMessages(t)
	for _, raw := range refused {
		c.send(raw)
	}
	eventually(t, "golden vectors to refuse are refused",
		func() bool { return h.malformed.Load() == uint64(len(refused)) })
	c.ask(1, 2, 5)

	const seed = 3
	r := rand.New(rand.NewPCG(seed, 0))
	for range 2000 {
		noise := make([]byte, r.IntN(200))
		for i := range noise {
			noise[i] = byte(r.Uint32())
		}
		c.send(noise)
	}
	c.ask(1, 3, 5)

	// libzmq ends the connection of a frame that is too long; the client comes back.
	c.send(make([]byte, wire.DefaultLimits.MessageBytes()+1))
	c.warm(1)
	c.ask(1, 4, 5)
}

func TestBytesThatAreNotZMTP(t *testing.T) {
	s, _ := lookupSockets(t, LookupOptions{})
	c := session(t, s, 1)
	path := strings.TrimPrefix(s.LookupEndpoint(), "ipc://")
	r := rand.New(rand.NewPCG(4, 0))
	greeting := append(append([]byte{0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 0, 'N', 'U', 'L', 'L'},
		make([]byte, 48)...), 0)
	for i := range 60 {
		raw, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		defer raw.Close()
		_ = raw.SetDeadline(time.Now().Add(5 * time.Second))
		switch i % 5 {
		case 0:
			_, _ = raw.Write([]byte("GET / HTTP/1.1\r\n\r\n"))
		case 1:
			noise := make([]byte, 4096)
			for i := range noise {
				noise[i] = byte(r.Uint32())
			}
			_, _ = raw.Write(noise)
		case 2:
			_, _ = raw.Write(greeting[:r.IntN(len(greeting))]) // and then silence
		case 3: // a good greeting, then noise
			_, _ = raw.Write(append(bytes.Clone(greeting[:64]), bytes.Repeat([]byte{0xff}, 300)...))
		case 4: // a good greeting, then a frame of 2^63 bytes
			_, _ = raw.Write(append(bytes.Clone(greeting[:64]), 0x06, 0x7f, 0xff, 0xff, 0xff, 0xff,
				0xff, 0xff, 0xff))
		}
		c.ask(1, uint64(i), 3)
	}
	eventually(t, "those that say nothing are let go", func() bool { return s.Stats().Peers == 2 })
	c.ask(1, 99, 3)
}

func TestPeerThatDoesNotReadAnswers(t *testing.T) {
	s, _ := lookupSockets(t, LookupOptions{})
	good := session(t, s, 1)
	if err := s.AddSession(2, secretOf(2)); err != nil {
		t.Fatal(err)
	}
	lazy := connect(t, s.LookupEndpoint(), zmq4.DEALER, func(pull *zsock) error {
		return errors.Join(pull.SetRcvhwm(1), pull.SetIdentity(string(secretOf(2))),
			pull.Connect(s.ReplyEndpoint()))
	})
	lazy.warm(2)
	heap := heapBytes()
	msg := (&wire.Lookup{Session: 2, Secret: secretOf(2), Lookup: 3,
		Hashes: make([]byte, 32)}).Append(nil)
	eventually(t, "answers are dropped", func() bool {
		for range 1000 {
			lazy.send(msg)
		}
		return s.Stats().Dropped > 5000
	})
	good.ask(1, 1, 5)
	if grown := heapBytes() - heap; grown > 16<<20 {
		t.Errorf("the C heap grew by %d bytes", grown)
	}
}

func TestConnectionFlood(t *testing.T) {
	s, _ := lookupSockets(t, LookupOptions{})
	c := session(t, s, 1)
	for _, path := range []string{strings.TrimPrefix(s.LookupEndpoint(), "ipc://"),
		strings.TrimPrefix(s.ReplyEndpoint(), "ipc://")} {
		before := s.Stats().FloodBreaks
		var raws []net.Conn
		eventually(t, "the flood is broken", func() bool {
			for range 100 {
				if raw, err := net.DialTimeout("unix", path, time.Second); err == nil {
					raws = append(raws, raw)
				}
			}
			return s.Stats().FloodBreaks > before
		})
		for _, raw := range raws {
			raw.Close()
		}
		c.warm(1)
		c.ask(1, 1, 5)
	}
	eventually(t, "only the honest peer is left", func() bool { return s.Stats().Peers <= 2 })
}

// TestAnswersAreTheirSessionsAlone: who connects to the reply socket without a session's secret
// gets none of its answers, whatever it calls itself, and what it sends there does no harm. A PUSH
// would have given it every other one.
func TestAnswersAreTheirSessionsAlone(t *testing.T) {
	s, _ := lookupSockets(t, LookupOptions{})
	const id = 0x1122334455667788
	victim := session(t, s, id)
	other := session(t, s, 7)
	var thieves []*zmqClient
	add := func(kind zmq4.Type, name string) {
		thieves = append(thieves, connect(t, s.LookupEndpoint(), kind, func(pull *zsock) error {
			if name != "" {
				if err := pull.SetIdentity(name); err != nil {
					return err
				}
			}
			return pull.Connect(s.ReplyEndpoint())
		}))
	}
	add(zmq4.PULL, "")
	add(zmq4.DEALER, "")
	add(zmq4.DEALER, fmt.Sprintf("%016x", uint64(id)))
	add(zmq4.DEALER, string(binary.LittleEndian.AppendUint64(nil, id)))
	add(zmq4.DEALER, string(secretOf(id)[:15]))
	add(zmq4.ROUTER, string(secretOf(id+1)))
	eventually(t, "the thieves are connected", func() bool { return s.Stats().Peers >= 4+5+5 })
	before := s.Stats()
	for i := range 200 {
		victim.ask(id, uint64(i), 1+i%5)
		other.ask(7, uint64(i), 1)
		for _, c := range thieves[1:5] {
			_, _ = c.pull.SendBytes([]byte("me, too"), zmq4.DONTWAIT)
		}
	}
	for i, c := range thieves {
		if n := c.drain(); n != 0 {
			t.Errorf("thief %d has %d answers", i, n)
		}
	}
	st := s.Stats()
	if st.Dropped != before.Dropped || st.Answers != before.Answers+400 {
		t.Errorf("before %+v, now %+v", before, st)
	}
	if st.Malformed == before.Malformed {
		t.Error("what came over the reply socket is not counted")
	}
	// A second client that has the secret, as after a reconnect, takes the first one's place.
	again := sessionClient(t, s.LookupEndpoint(), s.ReplyEndpoint(), id)
	again.warm(id)
	again.ask(id, 1000, 3)
}

// libzmq aborts the process when it cannot accept for want of descriptors.
func TestFloodWithFewDescriptors(t *testing.T) { testFlood(t, "serve", 4, 1500) }

// TestFloodWhileLookupsStall: while one lookup takes long, connections are not counted. With a hard
// limit of 1,024 files libzmq used to abort the process.
func TestFloodWhileLookupsStall(t *testing.T) { testFlood(t, "serve slowly", 4, 1500) }

// testFlood floods a helper that serves with few descriptors from so many goroutines with so many
// connections each.
func testFlood(t *testing.T, mode string, goroutines, connections int) {
	dir := runDir(t)
	cmd, _, said := helper(t, mode, dir, -1)
	lookup, reply, _ := strings.Cut(said, " ")
	c := sessionClient(t, lookup, reply, 1)
	c.warm(1)
	for range 3 {
		for _, path := range []string{strings.TrimPrefix(lookup, "ipc://"),
			strings.TrimPrefix(reply, "ipc://"), filepath.Join(dir, sessionName)} {
			_, _ = c.push.SendBytes(stalling(1), zmq4.DONTWAIT) // "serve slowly" takes long for it
			kind := unix.SOCK_STREAM
			if strings.HasSuffix(path, sessionName) {
				kind = unix.SOCK_SEQPACKET
			}
			var flood sync.WaitGroup
			for range goroutines {
				flood.Go(func() {
					var raws []int
					for range connections {
						fd, err := unix.Socket(unix.AF_UNIX,
							kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
						if err != nil {
							break
						}
						raws = append(raws, fd)
						// A full backlog empties only as the server accepts.
						for again := 0; again < 20 &&
							errors.Is(unix.Connect(fd, &unix.SockaddrUnix{Name: path}),
								unix.EAGAIN); again++ {
							time.Sleep(time.Millisecond)
						}
					}
					for _, fd := range raws {
						unix.Close(fd)
					}
				})
			}
			flood.Wait()
		}
		if err := cmd.Process.Signal(syscall.Signal(0)); err != nil {
			t.Fatalf("the server is gone: %v", err)
		}
		// What was sent before the socket was shut is lost, so it is asked again until there is an
		// answer to the last question.
		lookup := uint64(100)
		eventually(t, "it answers again", func() bool {
			lookup++
			_, _ = c.push.SendBytes((&wire.Lookup{Session: 1, Secret: secretOf(1), Lookup: lookup,
				Hashes: make([]byte, 32)}).Append(nil), zmq4.DONTWAIT)
			time.Sleep(20 * time.Millisecond)
			for {
				size, _, errno := c.pull.recv(c.buf)
				if errno != 0 {
					return false
				}
				var r wire.LookupResult
				if r.Decode(c.buf[:size], &wire.DefaultLimits) == nil && r.Lookup == lookup {
					return true
				}
			}
		})
	}
}

// stallLookup is the number of the lookups that "serve slowly" takes stall for.
const (
	stallLookup = 4711
	stall       = 500 * time.Millisecond
)

func stalling(id uint64) []byte {
	return (&wire.Lookup{Session: id, Secret: secretOf(id), Lookup: stallLookup,
		Hashes: make([]byte, 32)}).Append(nil)
}

// Frames of a message that never ends are not bounded by any option of libzmq.
func TestUnfinishedMessage(t *testing.T) {
	if heapBytes() == 0 {
		t.Skip("this C library does not tell its heap")
	}
	// The sender is in this process, so its queue counts too; its own is small.
	s, _ := lookupSockets(t, LookupOptions{HeapBytes: 48 << 20, Tick: 10 * time.Millisecond})
	c := session(t, s, 1)
	heap := heapBytes()
	bad := newClient(t, s.LookupEndpoint(), "inproc://nobody", true)
	part := make([]byte, 1<<20)
	eventually(t, "it is broken off", func() bool {
		if heapBytes() < heap+(128<<20) { // enough, however late that is seen
			_, _ = bad.push.SendBytes(part, zmq4.SNDMORE|zmq4.DONTWAIT)
		}
		return s.Stats().FloodBreaks > 0
	})
	bad.push.Close()
	c.warm(1)
	c.ask(1, 1, 5)
	eventually(t, "the memory is free again", func() bool { return heapBytes() < heap+(32<<20) })
}

func TestLookupsOfAnotherUser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root to be another user")
	}
	s, _ := lookupSockets(t, LookupOptions{})
	c := session(t, s, 1)
	path := strings.TrimPrefix(s.LookupEndpoint(), "ipc://")
	for p, mode := range map[string]os.FileMode{path: 0o777, s.dir: 0o755,
		filepath.Dir(s.dir): 0o755} {
		if err := os.Chmod(p, mode); err != nil {
			t.Fatal(err)
		}
	}
	before := s.Stats().Messages
	helper(t, "push", s.LookupEndpoint(), 65534)
	time.Sleep(200 * time.Millisecond)
	if n := s.Stats().Messages; n != before {
		t.Fatalf("%d messages of a stranger", n-before)
	}
	c.ask(1, 1, 1)
	helper(t, "push", s.LookupEndpoint(), -1)
	eventually(t, "our own user's come through", func() bool {
		return s.Stats().Messages > before+
			1
	})
}

// TestTickWithin: a Handler that wants to be called soon is, once.
func TestTickWithin(t *testing.T) {
	s, h := lookupSockets(t, LookupOptions{Tick: time.Hour})
	c := session(t, s, 1)
	within := func() {
		s.TickWithin(time.Hour)
		s.TickWithin(time.Millisecond)
		s.TickWithin(time.Minute)
	}
	h.within.Store(&within)
	for n := range uint64(3) {
		if got := h.ticks.Load(); got != n {
			t.Fatalf("%d ticks, want %d", got, n)
		}
		c.ask(1, n, 1)
		eventually(t, "it ticks", func() bool { return h.ticks.Load() == n+1 })
	}
}

func TestSteadyStateAllocatesNothing(t *testing.T) {
	s, _ := lookupSockets(t, LookupOptions{Tick: time.Hour})
	c := session(t, s, 1)
	msg := (&wire.Lookup{Session: 1, Secret: secretOf(1), Lookup: 2,
		Hashes: make([]byte, 32*4096)}).Append(nil)
	answered := s.Stats().Answers
	n := testing.AllocsPerRun(500, func() {
		if c.push.send(msg, false) != 0 {
			panic("send")
		}
		for {
			if _, _, errno := c.pull.recv(c.buf); errno != syscall.EAGAIN {
				break
			}
		}
	})
	if n != 0 {
		t.Errorf("%v allocations a lookup", n)
	}
	eventually(t, "all are answered", func() bool { return s.Stats().Answers-answered >= 500 })
}

func TestLMCacheSockets(t *testing.T) {
	dir := openDir(t)
	worker, scheduler := filepath.Join(dir, "worker"), filepath.Join(dir, "scheduler")
	// One path with ipc://, one without; the worker's is a stale socket.
	stale, err := net.Listen("unix", worker)
	if err != nil {
		t.Fatal(err)
	}
	stale.(*net.UnixListener).SetUnlinkOnClose(false)
	stale.Close()
	s, h := lookupSockets(t, LookupOptions{LMCacheWorker: "ipc://" + worker,
		LMCacheScheduler: scheduler})
	native := session(t, s, 1)
	c := newClient(t, "ipc://"+worker, "ipc://"+scheduler, true)

	b, err := os.ReadFile("wire/testdata/lmcache.json")
	if err != nil {
		t.Fatal(err)
	}
	var vectors []struct {
		Name    string
		Frames  []string
		Valid   bool
		Request struct {
			ID      string   `json:"lookup_id"`
			Offsets []uint32 `json:"offsets"`
		}
		Answer []string
	}
	if err := json.Unmarshal(b, &vectors); err != nil {
		t.Fatal(err)
	}
	bad := uint64(0)
	for range 3 {
		for _, v := range vectors {
			var frames [][]byte
			for _, f := range v.Frames {
				raw, _ := hex.DecodeString(f)
				frames = append(frames, raw)
			}
			if len(frames) == 0 {
				continue
			}
			c.send(frames...)
			if !v.Valid {
				bad++
				continue
			}
			if len(v.Answer) == 0 {
				continue
			}
			tokens := uint32(0)
			for _, o := range v.Request.Offsets {
				tokens += o
			}
			got := c.recv()
			want := [][]byte{wire.AppendLMCacheResponse(nil, []byte(v.Request.ID), tokens)}
			if len(frames) > 1 {
				want = [][]byte{frames[0], wire.AppendLMCacheTokens(nil, tokens)}
			}
			if !bytes.Equal(bytes.Join(got, []byte("|")), bytes.Join(want, []byte("|"))) {
				t.Fatalf("%s: %x, want %x", v.Name, got, want)
			}
		}
	}
	eventually(t, "the bad ones are counted", func() bool { return s.Stats().Malformed == bad })
	eventually(t, "cleanups arrive", func() bool { return h.cleanups.Load() == 3 })
	native.ask(1, 1, 1)

	// Steady state allocates nothing here either.
	msg, _ := hex.DecodeString(vectors[0].Frames[0])
	n := testing.AllocsPerRun(500, func() {
		if c.push.send(msg, false) != 0 {
			panic("send")
		}
		for {
			if _, _, errno := c.pull.recv(c.buf); errno != syscall.EAGAIN {
				break
			}
		}
	})
	if n != 0 {
		t.Errorf("%v allocations a lookup", n)
	}
}

// A scheduler that is not there costs answers, not the loop.
func TestLMCacheWithoutScheduler(t *testing.T) {
	dir := openDir(t)
	worker, scheduler := filepath.Join(dir, "worker"), filepath.Join(dir, "scheduler")
	s, _ := lookupSockets(t, LookupOptions{LMCacheWorker: worker, LMCacheScheduler: scheduler})
	c := newClient(t, "ipc://"+worker, "ipc://"+scheduler+"-elsewhere", true)
	msg := [][]byte{[]byte("id"), {0x91, 1}, {0x91, 1}, nil}
	eventually(t, "answers are dropped", func() bool {
		for range 100 {
			c.send(msg...)
		}
		return s.Stats().Dropped > 100
	})
	native := session(t, s, 1)
	native.ask(1, 1, 1)
}

// TestLMCacheSchedulerThatDoesNotRead: answers that LMCache's scheduler does not read are dropped
// beyond a bound, and others are answered as ever.
func TestLMCacheSchedulerThatDoesNotRead(t *testing.T) {
	dir := openDir(t)
	worker, scheduler := filepath.Join(dir, "worker"), filepath.Join(dir, "scheduler")
	s, _ := lookupSockets(t, LookupOptions{LMCacheWorker: worker, LMCacheScheduler: scheduler})
	lazy := connect(t, "ipc://"+worker, zmq4.PULL, func(pull *zsock) error {
		return errors.Join(pull.SetRcvhwm(1), pull.Bind("ipc://"+scheduler))
	})
	native := session(t, s, 1)
	heap := heapBytes()
	msg := [][]byte{bytes.Repeat([]byte("i"), wire.DefaultLimits.LMCacheIDBytes), {0x91, 1},
		{0x91, 1}, nil}
	eventually(t, "answers are dropped", func() bool {
		for range 1000 {
			lazy.send(msg...)
		}
		return s.Stats().Dropped > 5000
	})
	native.ask(1, 1, 5)
	if grown := heapBytes() - heap; grown > 16<<20 {
		t.Errorf("the C heap grew by %d bytes", grown)
	}
}

func TestLMCacheEndpoints(t *testing.T) {
	dir := openDir(t)
	worker, scheduler := filepath.Join(dir, "worker"), filepath.Join(dir, "scheduler")
	l := listen(t, Options{})
	expect := func(worker, scheduler, want string) {
		t.Helper()
		before := countFDs(t)
		s, err := NewLookupSockets(l.Dir(), LookupOptions{LMCacheWorker: worker,
			LMCacheScheduler: scheduler}, new(testHandler))
		if err == nil {
			s.Close()
			t.Fatalf("no error, want %q", want)
		}
		if !strings.Contains(err.Error(), want) {
			t.Fatalf("%v, want %q", err, want)
		}
		if after := countFDs(t); after > before {
			t.Fatalf("%d descriptors became %d", before, after)
		}
	}
	expect(worker, "", "both or neither")
	expect("", scheduler, "both or neither")
	expect("tcp://127.0.0.1:5555", scheduler, "lmcache.worker_endpoint")
	expect("relative", scheduler, "lmcache.worker_endpoint")
	expect(worker, "ipc://tcp://x", "lmcache.scheduler_endpoint")
	expect(worker, worker, "same path")
	expect(filepath.Join(dir, strings.Repeat("x", 120)), scheduler, "lmcache.worker_endpoint")
	expect(worker, filepath.Join(dir, strings.Repeat("x", 120)), "lmcache.scheduler_endpoint")
	expect(filepath.Join(dir, "no", "such", "directory"), scheduler, "lmcache.worker_endpoint")

	live, err := net.Listen("unix", worker)
	if err != nil {
		t.Fatal(err)
	}
	expect(worker, scheduler, "another process listens")
	live.Close()
	if err := os.WriteFile(worker, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	expect(worker, scheduler, "not a socket")
	if b, err := os.ReadFile(worker); err != nil || string(b) != "precious" {
		t.Fatalf("%q, %v", b, err)
	}
}

// Sessions and clients that come and go while others ask, and a close in the
// middle of it.
func TestLookupSessionsComeAndGo(t *testing.T) {
	s, _ := lookupSockets(t, LookupOptions{Tick: time.Millisecond})
	c := session(t, s, 1000)
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for j := range 25 {
				id := uint64(1 + i*100 + j)
				if err := s.AddSession(id, secretOf(id)); err != nil {
					t.Error(err)
				}
				if j%2 == 0 {
					s.RemoveSession(id)
				}
			}
		})
	}
	for i := range 100 {
		c.ask(1000, uint64(i), 2)
	}
	wg.Wait()
	if n := s.Stats().Sessions; n != 1+4*12 {
		t.Fatalf("%d sessions", n)
	}
	for range 3 {
		wg.Go(func() {
			for i := uint64(0); ; i++ {
				if err := s.AddSession(1+i%8, secretOf(1+i%8)); err != nil {
					if err != ErrClosed {
						t.Error(err)
					}
					return
				}
				s.RemoveSession(1 + i%8)
			}
		})
	}
	time.Sleep(20 * time.Millisecond)
	s.Close()
	wg.Wait()
	s.RemoveSession(1)
}

func BenchmarkLookupRoundTrip(b *testing.B) {
	for _, pages := range []int{64, 1024, 4096} {
		b.Run(fmt.Sprint(pages), func(b *testing.B) {
			s, _ := lookupSockets(b, LookupOptions{})
			c := session(b, s, 1)
			msg := (&wire.Lookup{Session: 1, Secret: secretOf(1), Lookup: 2,
				Hashes: make([]byte, 32*pages)}).Append(nil)
			roundTrips(b, c, msg)
		})
	}
}

// The limit of the benchmark above: the same bytes through a bare echo.
func BenchmarkEchoRoundTrip(b *testing.B) {
	for _, pages := range []int{64, 1024, 4096} {
		b.Run(fmt.Sprint(pages), func(b *testing.B) {
			dir := openDir(b)
			in, out := endpoint(filepath.Join(dir, "in")), endpoint(filepath.Join(dir, "out"))
			reply := len((&wire.LookupResult{Lookup: 2, HitPages: 4096, HitTokens: 65535}).Append(
				nil))
			ready, done := make(chan struct{}), make(chan error, 1)
			go func() { done <- zmqecho.Serve(in, out, reply, func() { close(ready) }) }()
			<-ready
			c := newClient(b, in, out, false)
			msg := (&wire.Lookup{Session: 1, Secret: secretOf(1), Lookup: 2,
				Hashes: make([]byte, 32*pages)}).Append(nil)
			roundTrips(b, c, msg)
			c.send(nil)
			c.recv()
			if err := <-done; err != nil {
				b.Fatal(err)
			}
		})
	}
}

// roundTrips waits in libzmq, as a client does, and not in a busy loop.
func roundTrips(b *testing.B, c *zmqClient, msg []byte) {
	b.ReportAllocs()
	for b.Loop() {
		if errno := c.push.send(msg, false); errno != 0 {
			b.Fatal(errno)
		}
		if _, err := c.pull.RecvBytes(0); err != nil {
			b.Fatal(err)
		}
	}
}
