package ipc

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pebbe/zmq4"
	"go.uber.org/zap"
)

// resident returns the resident memory of this process.
func resident(t testing.TB) int64 {
	t.Helper()
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Fatal(err)
	}
	var size, pages int64
	if _, err := fmt.Sscan(string(b), &size, &pages); err != nil {
		t.Fatal(err)
	}
	return pages * int64(os.Getpagesize())
}

// rawPeer connects to a publisher and shakes hands with it, as a socket of the given type.
func rawPeer(t testing.TB, endpoint, socketType string) net.Conn {
	t.Helper()
	network, address, _ := strings.Cut(endpoint, "://")
	c, err := net.Dial(map[string]string{"tcp": "tcp", "ipc": "unix"}[network], address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if _, err := c.Write([]byte(greetingOf(socketType))); err != nil {
		t.Fatal(err)
	}
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	answer := make([]byte, 66)
	if _, err := io.ReadFull(c, answer); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, answer[65])); err != nil {
		t.Fatal(err)
	}
	return c
}

// greetingOf is what a socket of the given type sends first; without a type its metadata are empty.
func greetingOf(socketType string) string {
	metadata := ""
	if socketType != "" {
		metadata = "\x0bSocket-Type\x00\x00\x00" + string(rune(len(socketType))) + socketType
	}
	return "\xff" + strings.Repeat("\x00", 8) + "\x7f\x03\x00NULL" + strings.Repeat("\x00", 48) +
		"\x04" + string(rune(6+len(metadata))) + "\x05READY" + metadata
}

// longFrame is a frame with a length of 8 bytes.
func longFrame(flags byte, body []byte) []byte {
	return append(binary.BigEndian.AppendUint64([]byte{flags | 2}, uint64(len(body))), body...)
}

// TestEventPeersThatFlood: whatever one peer sends, the memory stays within bounds, lookups are
// answered, and a subscriber beside it stays connected and misses nothing.
func TestEventPeersThatFlood(t *testing.T) {
	const bound = 48 << 20
	subscriptions := func(i int) []byte {
		return longFrame(0, fmt.Appendf(nil, "\x01%d%s", i, strings.Repeat("x", 2000)))
	}
	endless := bytes.Repeat([]byte{2, 0x7f, 255, 255, 255, 255, 255, 255, 255}, 1000)
	for name, attack := range map[string]struct {
		socketType string
		replay     bool
		frame      func(i int) []byte
	}{
		"subscriptions": {"SUB", false, subscriptions},
		"short subscriptions": {"XSUB", false,
			func(i int) []byte {
				return binary.BigEndian.AppendUint64([]byte{0, 9, 1}, uint64(i))
			}},
		"the same subscription": {"SUB", false, func(int) []byte { return subscriptions(1) }},
		"messages": {"XSUB", false,
			func(int) []byte { return longFrame(0, make([]byte, 2000)) }},
		"unfinished message": {"SUB", false,
			func(int) []byte { return longFrame(1, make([]byte, 2000)) }},
		"unfinished request": {"DEALER", true,
			func(int) []byte { return longFrame(1, make([]byte, 60)) }},
		"requests": {"DEALER", true,
			func(int) []byte { return append([]byte{1, 0, 0, 8}, make([]byte, 8)...) }},
		"pings": {"SUB", false,
			func(int) []byte {
				return append([]byte{4, 23},
					"\x04PING\x00\x10sixteen bytes ctx"...)[:25]
			}},
		"commands": {"SUB", false,
			func(int) []byte {
				return longFrame(4, append([]byte("\x04WHAT"),
					make([]byte, 2000)...))
			}},
		"a frame without an end": {"SUB", false, func(int) []byte { return endless }},
	} {
		t.Run(name, func(t *testing.T) {
			flood := 16 << 20
			if name == "subscriptions" || name == "unfinished message" {
				flood = 59 << 20 // libzmq took 1.7 GB for these
			}
			l, _ := lookupSockets(t, LookupOptions{HeapBytes: bound})
			victim := session(t, l, 1)
			src := &testSource{}
			p := newPublisher(t, EventOptions{Endpoint: "tcp://127.0.0.1:*",
				ReplayEndpoint: "tcp://127.0.0.1:*"}, src)
			sub, seq := subscribe(t, p, src)
			endpoint, replay := p.Endpoints()
			if attack.replay {
				endpoint = replay
			}
			debug.FreeOSMemory()
			before := resident(t)
			most := int64(0)
			sent, cut := 0, 0
			for i := 0; sent < flood && cut < 100; cut++ {
				c := rawPeer(t, endpoint, attack.socketType)
				for sent < flood {
					var b bytes.Buffer
					for b.Len() < 256<<10 {
						b.Write(attack.frame(i))
						i++
					}
					if err := c.SetWriteDeadline(time.Now().Add(patience)); err != nil {
						t.Fatal(err)
					}
					n, err := c.Write(b.Bytes())
					sent += n
					if errors.Is(err, os.ErrDeadlineExceeded) {
						t.Fatal("the peer is neither read nor cut off")
					}
					if err != nil {
						break
					}
					most = max(most, resident(t)-before)
				}
				c.Close()
				victim.ask(1, uint64(cut), 4)
			}
			t.Logf("%d MiB more at most, after %d MiB in %d connections", most>>20, sent>>20, cut)
			if most > bound {
				t.Errorf("%d MiB", most>>20)
			}
			eventually(t, "only the peer that floods is cut off", func() bool {
				st := p.Stats()
				return st.Cut > 0 && st.Subscribers == 1
			})
			if st := l.Stats(); st.FloodBreaks != 0 {
				t.Errorf("lookups were shut: %+v", st)
			}
			src.more(p, 3)
			for range 3 {
				seq++
				if frames := received(t, sub); binary.BigEndian.Uint64(frames[1]) != seq {
					t.Fatalf("%q, want %d", frames[1], seq)
				}
			}
			if seqs, _ := replayed(t, p, zmq4.DEALER, seq); len(seqs) != 1 {
				t.Fatal(seqs)
			}
		})
	}
}

// cutOff waits until the publisher has closed a connection.
func cutOff(t *testing.T, c net.Conn) {
	t.Helper()
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatal("the connection is still there")
	}
}

// TestSubscriptionsAreLimited: as many as are allowed work, one more cuts the peer off, and taking
// one back makes room.
func TestSubscriptionsAreLimited(t *testing.T) {
	p := newPublisher(t, EventOptions{Endpoint: "tcp://127.0.0.1:*"}, &testSource{})
	endpoint, _ := p.Endpoints()
	write := func(c net.Conn, frames ...[]byte) {
		t.Helper()
		if _, err := c.Write(bytes.Join(frames, nil)); err != nil {
			t.Fatal(err)
		}
	}
	// sane says whether the connection is there once all that was written before has been handled.
	sane := func(c net.Conn) {
		t.Helper()
		write(c, appendCommand(nil, "PING", []byte("\x00\x10ctx")))
		want := appendCommand(nil, "PONG", []byte("ctx"))
		got := make([]byte, len(want))
		if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("%q %v", got, err)
		}
	}
	subscribe := func(i int) []byte { return longFrame(0, fmt.Appendf(nil, "\x01%d", i)) }
	c := rawPeer(t, endpoint, "SUB")
	for i := range maxSubscriptions {
		write(c, subscribe(i), subscribe(i))
	}
	sane(c)
	write(c, longFrame(0, []byte("\x0017")), longFrame(0, []byte("\x0017")),
		longFrame(0, []byte("\x00none")))
	// As ZMTP 3.1 has it.
	write(c, appendCommand(nil, "SUBSCRIBE", []byte("x")), appendCommand(nil, "CANCEL",
		[]byte("x")), appendCommand(nil, "SUBSCRIBE", []byte("y")))
	sane(c)
	if cut := p.Stats().Cut; cut != 0 {
		t.Fatalf("%d cut off", cut)
	}
	write(c, subscribe(1000))
	cutOff(t, c)

	c = rawPeer(t, endpoint, "SUB")
	for i := range maxSubscriptionBytes / 4000 {
		write(c, longFrame(0, append([]byte{1, byte(i)}, make([]byte, 3999)...)))
	}
	sane(c)
	write(c, longFrame(0, append([]byte{1, 100}, make([]byte, 3999)...)))
	cutOff(t, c)
	eventually(t, "both are counted", func() bool {
		st := p.Stats()
		return st.Cut == 2 &&
			st.Subscribers == 0
	})
}

// TestEventPeersOfNoUse: what is no subscriber of ours is cut off, and who was first stays.
func TestEventPeersOfNoUse(t *testing.T) {
	src := &testSource{}
	p := newPublisher(t, EventOptions{Endpoint: "tcp://127.0.0.1:*"}, src)
	sub, seq := subscribe(t, p, src)
	endpoint, _ := p.Endpoints()
	for name, first := range map[string]string{
		"HTTP":   "GET / HTTP/1.1\r\nHost: x\r\nAccept: */*\r\nUser-Agent: one that is long enough for a greeting\r\n\r\n",
		"ZMTP 2": "\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x01" + strings.Repeat("\x00", 53),
		"CURVE": "\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00CURVE" +
			strings.Repeat("\x00", 47),
		"a PUSH":     greetingOf("PUSH"),
		"no type":    greetingOf(""),
		"no READY":   greetingOf("SUB")[:64] + "\x04\x06\x05HELLO",
		"short":      greetingOf("SUB")[:64] + "\x04\x02\x05H",
		"bad length": greetingOf("SUB")[:64] + "\x04\x16\x05READY\x0bSocket-Type\xff\xff\xff\xff",
		"long":       greetingOf("SUB")[:64] + "\x06\x00\x00\x00\x00\x00\xff\xff\xff",
		"bad flags":  greetingOf("SUB")[:64] + "\xf4\x02",
	} {
		c, err := net.Dial("tcp", strings.TrimPrefix(endpoint, "tcp://"))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		before := p.Stats().Cut
		if _, err := c.Write([]byte(first)); err != nil {
			t.Fatal(name, err)
		}
		cutOff(t, c)
		eventually(t, name+" is counted", func() bool { return p.Stats().Cut == before+1 })
	}
	// More than there is room for: those beyond are refused, the first stays.
	var conns []net.Conn
	for range maxSubscribers - 1 {
		conns = append(conns, rawPeer(t, endpoint, "SUB"))
	}
	eventually(t, "all are there", func() bool { return p.Stats().Subscribers == maxSubscribers })
	before := p.Stats().Cut
	for range 5 {
		c, err := net.Dial("tcp", strings.TrimPrefix(endpoint, "tcp://"))
		if err != nil {
			t.Fatal(err)
		}
		cutOff(t, c)
		c.Close()
	}
	if st := p.Stats(); st.Cut != before+5 || st.Subscribers != maxSubscribers {
		t.Fatalf("%+v", st)
	}
	src.more(p, 1)
	if frames := received(t, sub); binary.BigEndian.Uint64(frames[1]) != seq+1 {
		t.Fatalf("%q", frames[1])
	}
	for _, c := range conns {
		c.Close()
	}
	eventually(t, "they have left", func() bool { return p.Stats().Subscribers == 1 })
}

// TestSurplusConnections: the address with the most connections loses one, first one that has not
// shaken hands.
func TestSurplusConnections(t *testing.T) {
	peer := func(from string, ready bool) *eventPeer { return &eventPeer{from: from, ready: ready} }
	a1, a2, b, waiting := peer("a", true), peer("a", true), peer("b", true), peer("a", false)
	for name, c := range map[string]struct {
		peers []*eventPeer
		want  *eventPeer
	}{
		"the newcomer of the greediest": {[]*eventPeer{a1, b, a2}, a2},
		"another's newcomer":            {[]*eventPeer{a1, a2, b}, a2},
		"one that waits":                {[]*eventPeer{waiting, a1, b, a2}, waiting},
		"all alike":                     {[]*eventPeer{a1, b}, b},
	} {
		d := &eventDoor{peers: c.peers}
		if got := d.surplus(); got != c.want {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

// TestEventToken: a peer without the token receives nothing, and can ask for nothing.
func TestEventToken(t *testing.T) {
	src := &testSource{}
	p := newPublisher(t, EventOptions{Endpoint: "tcp://127.0.0.1:*",
		ReplayEndpoint: "tcp://127.0.0.1:*", Token: "secret"}, src)
	publish, replay := p.Endpoints()
	connect := func(kind zmq4.Type, endpoint, token string) *zmq4.Socket {
		ctx, err := zmq4.NewContext()
		if err != nil {
			t.Fatal(err)
		}
		s, err := ctx.NewSocket(kind)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			s.Close()
			ctx.Term()
		})
		errs := []error{s.SetLinger(0), s.SetRcvtimeo(50 * time.Millisecond)}
		if kind == zmq4.SUB {
			errs = append(errs, s.SetSubscribe(""))
		}
		if token != "" {
			errs = append(errs, s.SetPlainUsername("router"), s.SetPlainPassword(token))
		}
		if err := errors.Join(append(errs, s.Connect(endpoint))...); err != nil {
			t.Fatal(err)
		}
		return s
	}
	var strangers []*zmq4.Socket
	for _, token := range []string{"", "Secret", "secret2"} {
		before := p.Stats().Cut
		s := connect(zmq4.DEALER, replay, token)
		if _, err := s.SendMessage("", make([]byte, 8)); err != nil {
			t.Fatal(err)
		}
		strangers = append(strangers, s, connect(zmq4.SUB, publish, token))
		eventually(t, "strangers are refused", func() bool { return p.Stats().Cut >= before+2 })
	}
	sub := connect(zmq4.SUB, publish, "secret")
	eventually(t, "the subscriber is there", func() bool { return p.Stats().Subscribers == 1 })
	eventually(t, "it is told", func() bool {
		src.more(p, 1)
		_, err := sub.RecvMessageBytes(0)
		return err == nil
	})
	req := connect(zmq4.DEALER, replay, "secret")
	if err := req.SetRcvtimeo(patience); err != nil {
		t.Fatal(err)
	}
	if _, err := req.SendMessage("", make([]byte, 8)); err != nil {
		t.Fatal(err)
	}
	if frames := received(t, req); len(frames) != 4 || binary.BigEndian.Uint64(frames[2]) != 0 {
		t.Fatalf("%q", frames)
	}
	for _, s := range strangers {
		if frames, err := s.RecvMessageBytes(zmq4.DONTWAIT); err == nil {
			t.Fatalf("a stranger got %q", frames)
		}
	}
	if st := p.Stats(); st.Replays != 1 || st.Subscribers != 1 {
		t.Fatalf("%+v", st)
	}
}

// TestSubscriberThatStops loses the oldest batches, which are counted, and is sent the newest when
// it goes on; what is kept is bounded.
func TestSubscriberThatStops(t *testing.T) {
	src := &testSource{bytes: 64 << 10}
	p := newPublisher(t, EventOptions{Endpoint: "tcp://127.0.0.1:*", HWM: 8}, src)
	endpoint, _ := p.Endpoints()
	c := rawPeer(t, endpoint, "SUB")
	if _, err := c.Write(longFrame(0, []byte("\x01kv"))); err != nil {
		t.Fatal(err)
	}
	total := uint64(0)
	more := func(n int) {
		src.more(p, n)
		total += uint64(n)
		eventually(t, "all is published", func() bool { return p.Stats().Batches == total })
	}
	eventually(t, "some are lost", func() bool {
		more(100)
		return p.Stats().Dropped > 0 ||
			total > 10000
	})
	p.mu.Lock()
	kept := len(p.kept)
	p.mu.Unlock()
	if kept > 8 {
		t.Fatalf("%d batches are kept", kept)
	}
	// It reads on: what comes is in order, up to the last, and as much as was not counted as lost.
	z := newZMTP(c, 1<<20)
	got, next := uint64(0), uint64(0)
	for next < total {
		if _, err := z.next(1 << 20); err != nil {
			t.Fatal(err)
		}
		f, err := z.next(1 << 20)
		if err != nil {
			t.Fatal(err)
		}
		seq := binary.BigEndian.Uint64(f.body)
		if seq < next {
			t.Fatalf("%d comes after %d", seq, next-1)
		}
		next = seq + 1
		got++
		if f, err = z.next(1 << 20); err != nil || f.more || len(f.body) != 64<<10 {
			t.Fatal(err, len(f.body))
		}
	}
	// Those before the subscription are neither.
	if lost := p.Stats().Dropped; got+lost > total || lost == 0 {
		t.Fatalf("%d received, %d lost, of %d", got, lost, total)
	}
}

// FuzzEventPeer: whatever a peer sends, the publisher neither panics nor keeps more than it may.
func FuzzEventPeer(f *testing.F) {
	f.Add([]byte(greetingOf("SUB")+"\x00\x04\x01kv@\x04\x0b\x04PING\x00\x10ctx!\x00\x04\x00kv@"),
		false)
	f.Add([]byte(greetingOf("DEALER")+"\x01\x00\x00\x08\x00\x00\x00\x00\x00\x00\x00\x00"), true)
	f.Add([]byte(greetingOf("XSUB")+"\x04\x0c\x09SUBSCRIBEkv\x01\x01x"), false)
	f.Fuzz(func(t *testing.T, sent []byte, replay bool) {
		p := &EventPublisher{opt: EventOptions{BufferSteps: 4, HWM: 4, Log: zap.NewNop()},
			resync: make(chan struct{}, 1)}
		p.kept, p.oldest = []batch{{"kv@a", []byte("x")}, {"b", []byte("y")}}, 3
		d := &eventDoor{
			p: p, limit: 4, ready: new(atomic.Int64), own: "PUB", types: []string{"SUB", "XSUB"},
			frame: maxSubscribeFrame, replay: replay,
		}
		if replay {
			d.own, d.types, d.frame = "ROUTER", []string{"DEALER"}, maxRequestFrame
		}
		p.doors = []*eventDoor{d}
		ours, theirs := net.Pipe()
		peer := d.admit(ours)
		p.wg.Go(peer.serve)
		go func() { _, _ = io.Copy(io.Discard, theirs) }()
		_ = theirs.SetWriteDeadline(time.Now().Add(patience))
		_, _ = theirs.Write(sent)
		theirs.Close()
		p.wg.Wait()
		if len(peer.subscriptions) > maxSubscriptions || peer.bytes > maxSubscriptionBytes ||
			len(peer.requests) > maxRequests || len(d.peers) > 0 {
			t.Fatalf("%+v", peer)
		}
	})
}
