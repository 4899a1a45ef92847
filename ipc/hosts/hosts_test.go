package hosts

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"lookaside/dax"
	"lookaside/internal/leak"
	"lookaside/ipc"
	"lookaside/ipc/client"
	"lookaside/ipc/wire"
)

func TestMain(m *testing.M) { leak.Main(m) }

const testPatience = 2 * time.Minute

// fakeSidecar welcomes every client of its session socket, and sends back what comes on the session
// and on the direct socket.
type fakeSidecar struct {
	listener *ipc.Listener
	hosts    *Hosts
	maxPages uint32
}

func startFake(t *testing.T, edit func(*Options)) *fakeSidecar {
	t.Helper()
	dir, err := os.MkdirTemp("", "la")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	l, err := ipc.Listen(dir, ipc.Options{})
	if err != nil {
		t.Fatal(err)
	}
	opt := Options{Listen: "127.0.0.1:0", Connections: 4, Log: zap.NewNop()}
	if edit != nil {
		edit(&opt)
	}
	h, err := Start(l, opt)
	if err != nil {
		t.Fatal(err)
	}
	f := &fakeSidecar{listener: l, hosts: h, maxPages: 65536}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan struct{})
	go func() {
		defer close(served)
		for {
			c, err := l.Accept(ctx)
			if err != nil {
				return
			}
			go f.serve(c)
		}
	}()
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
		cancel()
		<-served
		l.Close()
	})
	return f
}

func (f *fakeSidecar) serve(c *ipc.Conn) {
	defer c.Close()
	if _, _, err := c.RecvFDs(nil); err != nil {
		return
	}
	control, err := dax.NewControl(7)
	if err != nil {
		return
	}
	defer control.Close()
	ours, theirs, err := ipc.DirectPair()
	if err != nil {
		return
	}
	defer ours.Close()
	w := wire.Welcome{Session: 5, Secret: make([]byte, 16), Generation: 7,
		Fingerprint: make([]byte, 32), LookupEndpoint: "ipc:///there", MaxPages: f.maxPages,
		Peers: 9}
	err = c.Send(w.Append(nil), control.FD(), theirs)
	unix.Close(theirs)
	if err != nil {
		return
	}
	go func() {
		buf := make([]byte, wire.MaxPacketBytes)
		for {
			n, err := ours.Read(buf)
			if err != nil || n == 0 {
				return
			}
			if _, err := ours.Write(buf[:n]); err != nil {
				return
			}
		}
	}()
	for {
		b, err := c.Recv()
		if err != nil || c.Send(b) != nil {
			return
		}
	}
}

var scheduler = wire.Hello{Role: wire.RoleScheduler, EngineID: "e", PageTokens: 16, PagesPerChunk: 4,
	DigestBytes: 32, Direct: true}

func (f *fakeSidecar) reach(t *testing.T, address string) *client.Session {
	t.Helper()
	s, err := client.Reach(f.listener.Dir(), address, &scheduler, testPatience)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(testPatience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it has not come to pass that %s", what)
		}
	}
}

// Packets of every length come through both channels, both ways, unchanged.
func TestPacketsComeThrough(t *testing.T) {
	a, b := startFake(t, nil), startFake(t, nil)
	s := a.reach(t, b.hosts.Addr())
	if s.Welcome.Generation != 7 || s.Welcome.LookupEndpoint != "" || s.Welcome.Peers == 9 ||
		s.Welcome.Peers == 0 || s.Welcome.MaxPages != maxPages(32) {
		t.Fatalf("%+v", s.Welcome)
	}
	buf := make([]byte, wire.MaxPacketBytes)
	for _, n := range []int{1, 2, 100, 4095, 4096, 4097, 100_000, wire.MaxPacketBytes} {
		want := make([]byte, n)
		_, _ = rand.Read(want)
		if err := s.SendRaw(want); err != nil {
			t.Fatal(err)
		}
		got, _, err := s.Recv(testPatience)
		if err != nil || !bytes.Equal(got, want) {
			t.Fatalf("%d bytes on the session: %d came, %v", n, len(got), err)
		}
		if _, err := s.Direct.Write(want); err != nil {
			t.Fatal(err)
		}
		poll := []unix.PollFd{{Fd: int32(s.Direct.Fd()), Events: unix.POLLIN}}
		if _, err := unix.Poll(poll, int(testPatience.Milliseconds())); err != nil {
			t.Fatal(err)
		}
		if k, err := s.Direct.Read(buf); err != nil || !bytes.Equal(buf[:k], want) {
			t.Fatalf("%d bytes on the direct socket: %d came, %v", n, k, err)
		}
	}
}

func dial(t *testing.T, f *fakeSidecar) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", f.hosts.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// ended waits until the sidecar has ended a connection.
func ended(t *testing.T, c net.Conn) {
	t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(testPatience))
	if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatal("the connection is still there")
	}
}

// What strangers send is no way to keep a caller out, or to stay.
func TestStrangers(t *testing.T) {
	token := func(o *Options) { o.Token = "secret" }
	a, b := startFake(t, token), startFake(t, token)
	huge := binary.LittleEndian.AppendUint32(nil, 1<<31)
	for name, send := range map[string][]byte{
		"garbage":       []byte(strings.Repeat("x", 1000)),
		"TLS":           append([]byte{0x16, 3, 1, 2, 0}, make([]byte, 100)...),
		"huge frame":    append([]byte(preamble), append(huge, byte(onGreeting))...),
		"empty frame":   append([]byte(preamble), 0, 0, 0, 0, byte(onGreeting)),
		"other channel": append([]byte(preamble), 1, 0, 0, 0, 9, 9),
		"early session": append([]byte(preamble), appendFrame(nil, onSession, []byte("x"))...),
		"no message":    append([]byte(preamble), appendFrame(nil, onGreeting, []byte("x"))...),
		"wrong proof": append([]byte(preamble), appendFrame(nil, onGreeting,
			(&wire.HostsProof{Nonce: nonce(), Token: true, Proof: make([]byte, 32)}).Append(
				nil))...),
		"nothing": nil,
		"half":    []byte(preamble[:4]),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := dial(t, b)
			if _, err := c.Write(send); err != nil {
				t.Fatal(err)
			}
			ended(t, c)
		})
	}
	t.Run("slowly", func(t *testing.T) {
		t.Parallel()
		c := dial(t, b)
		for _, each := range []byte(strings.Repeat(preamble, 1000)) {
			if _, err := c.Write([]byte{each}); err != nil {
				return // it was not let go on
			}
			time.Sleep(10 * time.Millisecond)
		}
		t.Fatal("it could go on for 80 s")
	})
	t.Run("a flood", func(t *testing.T) {
		t.Parallel()
		var silent []net.Conn
		for range 4 * maxStrangers {
			silent = append(silent, dial(t, b))
		}
		a.reach(t, b.hosts.Addr())
		for _, c := range silent {
			ended(t, c)
		}
	})
}

// Who was let in can end its own session alone.
func TestCallersThatBreakTheProtocol(t *testing.T) {
	a, b := startFake(t, nil), startFake(t, nil)
	good := a.reach(t, b.hosts.Addr())
	for name, send := range map[string][]byte{
		"huge frame":      append(binary.LittleEndian.AppendUint32(nil, wire.MaxPacketBytes+1), 0),
		"another channel": {1, 0, 0, 0, 3, 0},
		"greeting":        appendFrame(nil, onGreeting, []byte("x")),
		"cut":             {100, 0, 0, 0, 0, 1, 2},
	} {
		t.Run(name, func(t *testing.T) {
			c := dial(t, b)
			g := &greetings{conn: c, frames: newFrames(c)}
			if _, err := c.Write([]byte(preamble)); err != nil {
				t.Fatal(err)
			}
			if err := g.call(); err != nil {
				t.Fatal(err)
			}
			if _, err := c.Write(appendFrame(nil, onSession, scheduler.Append(nil))); err != nil {
				t.Fatal(err)
			}
			if _, err := g.frames.on(onSession, wire.MaxPacketBytes); err != nil {
				t.Fatal(err)
			}
			await(t, "both are carried", func() bool { return len(b.hosts.Status().Carried) == 2 })
			if _, err := c.Write(send); err != nil {
				t.Fatal(err)
			}
			if name == "cut" {
				_ = c.(*net.TCPConn).CloseWrite()
			}
			ended(t, c)
			await(t, "one is left", func() bool { return len(b.hosts.Status().Carried) == 1 })
		})
	}
	if err := good.SendRaw([]byte("ping")); err != nil {
		t.Fatal(err)
	}
	if got, _, err := good.Recv(testPatience); err != nil || string(got) != "ping" {
		t.Fatal(got, err)
	}
}

// A scheduler that reads no answers loses these, not its session.
func TestAnswersThatNobodyReadsAreDropped(t *testing.T) {
	a, b := startFake(t, nil), startFake(t, nil)
	s := a.reach(t, b.hosts.Addr())
	packet := make([]byte, 64<<10)
	await(t, "some are dropped", func() bool {
		_, err := s.Direct.Write(packet)
		if err != nil && !errors.Is(err, unix.EAGAIN) {
			t.Fatal(err)
		}
		return a.hosts.Status().Dropped > 0
	})
	if err := s.SendRaw([]byte("ping")); err != nil {
		t.Fatal(err)
	}
	if got, _, err := s.Recv(testPatience); err != nil || string(got) != "ping" {
		t.Fatal(got, err)
	}
}

// Close waits for nobody who has not said yet whom to reach.
func TestCloseEndsWhoSaysNothing(t *testing.T) {
	defer func(was time.Duration) { helloPatience = was }(helloPatience)
	helloPatience = time.Hour
	a := startFake(t, nil)
	c, err := net.Dial("unixpacket", filepath.Join(a.listener.Dir(), "hosts.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	await(t, "it is accepted", func() bool { return a.hosts.local.Stats().Sessions == 1 })
	if err := a.hosts.Close(); err != nil {
		t.Fatal(err)
	}
	ended(t, c)
}

func TestSessionsOfOtherHostsAreBounded(t *testing.T) {
	a := startFake(t, func(o *Options) { o.Connections = 8 })
	b := startFake(t, func(o *Options) { o.Connections = 2 })
	first := a.reach(t, b.hosts.Addr())
	a.reach(t, b.hosts.Addr())
	_, err := client.Reach(a.listener.Dir(), b.hosts.Addr(), &scheduler, testPatience)
	var r *client.Refused
	if !errors.As(err, &r) || r.Code != wire.RefuseBusy || r.Field != "hosts.connections" {
		t.Fatal(err)
	}
	first.Close()
	await(t, "there is room", func() bool { return len(b.hosts.Status().Carried) == 1 })
	a.reach(t, b.hosts.Addr())
}

// An answerer that says nothing is given up before the scheduler gives the caller up.
func TestSilentAnswerer(t *testing.T) {
	a := startFake(t, nil)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, err = client.Reach(a.listener.Dir(), l.Addr().String(), &scheduler, testPatience)
	var r *client.Refused
	if !errors.As(err, &r) || r.Code != wire.RefuseUnreachable ||
		!strings.Contains(r.Message, "did not answer within") {
		t.Fatal(err)
	}
}

// Whatever comes, a packet is no longer than the limit, and memory is taken only for what came.
func FuzzFrames(f *testing.F) {
	f.Add(appendFrame(nil, onSession, []byte("packet")))
	f.Add(appendFrame(appendFrame(nil, onDirect, make([]byte, 5000)), onGreeting, []byte{1}))
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 0})
	f.Add([]byte{0, 0, 4, 0, 0, 1})
	f.Add([]byte(preamble))
	f.Fuzz(func(t *testing.T, raw []byte) {
		const limit = 64 << 10
		frames := newFrames(bytes.NewReader(raw))
		var again []byte
		for {
			ch, packet, err := frames.next(limit)
			if err != nil {
				break
			}
			if len(packet) == 0 || len(packet) > limit || ch > onGreeting {
				t.Fatalf("%d bytes on channel %d", len(packet), ch)
			}
			again = appendFrame(again, ch, packet)
		}
		if !bytes.HasPrefix(raw, again) {
			t.Fatalf("read %x of %x", again, raw)
		}
		if cap(frames.buf) > 2*len(raw)+8<<10 {
			t.Fatalf("took %d bytes for %d", cap(frames.buf), len(raw))
		}
	})
}
