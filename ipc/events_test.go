package ipc

import (
	"encoding/binary"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/pebbe/zmq4"
)

// testSource has a given number of batches of a given length.
type testSource struct {
	mu      sync.Mutex
	left    int
	bytes   int
	told    int
	resyncs int
	last    bool
	buf     []byte
}

func (s *testSource) NextBatch() (string, []byte, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.left == 0 {
		return "", nil, false
	}
	s.left--
	s.buf = append(s.buf[:0], fmt.Sprintf("batch %d", s.told)...)
	for len(s.buf) < s.bytes {
		s.buf = append(s.buf, '.')
	}
	s.told++
	return "kv@here@m", s.buf, true
}

func (s *testSource) LastBatch() (string, []byte, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.last {
		return "", nil, false
	}
	s.last = true
	return "kv@here@m", []byte("the end"), true
}

func (s *testSource) Resync() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.resyncs++
}

func (s *testSource) more(p *EventPublisher, n int) {
	s.mu.Lock()
	s.left += n
	s.mu.Unlock()
	p.Wake()
}

func newPublisher(t *testing.T, opt EventOptions, src *testSource) *EventPublisher {
	t.Helper()
	if opt.BufferSteps == 0 {
		opt.BufferSteps = 100
	}
	if opt.HWM == 0 {
		opt.HWM = 1000
	}
	opt.Bind = true
	p, err := NewEventPublisher(opt, src)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

// subscriberSocket is a socket of libzmq that connects to a publisher.
func subscriberSocket(t *testing.T, kind zmq4.Type, endpoint string) *zmq4.Socket {
	t.Helper()
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
	if kind == zmq4.SUB {
		err = s.SetSubscribe("kv@")
	}
	for _, e := range []error{err, s.SetLinger(0), s.SetRcvtimeo(patience), s.SetRcvhwm(10),
		s.Connect(strings.Replace(endpoint, "0.0.0.0", "127.0.0.1", 1))} {
		if e != nil {
			t.Fatal(e)
		}
	}
	return s
}

func received(t *testing.T, s *zmq4.Socket) [][]byte {
	t.Helper()
	for {
		frames, err := s.RecvMessageBytes(0)
		if err == nil {
			return frames
		}
		if zmq4.AsErrno(err) != zmq4.Errno(syscall.EINTR) {
			t.Fatal(err)
		}
	}
}

// subscribe waits until a subscriber gets what is published, and has got the last of it.
func subscribe(t *testing.T, p *EventPublisher, src *testSource) (*zmq4.Socket, uint64) {
	t.Helper()
	endpoint, _ := p.Endpoints()
	sub := subscriberSocket(t, zmq4.SUB, endpoint)
	if err := sub.SetRcvtimeo(50 * time.Millisecond); err != nil {
		t.Fatal(err)
	}
	for tries := 0; ; {
		frames, err := sub.RecvMessageBytes(0)
		if err != nil {
			if tries++; tries > 400 {
				t.Fatal("nothing is received")
			}
			src.mu.Lock()
			published := p.Stats().Batches == uint64(src.told+src.left)
			src.mu.Unlock()
			if published {
				src.more(p, 1)
			}
			continue
		}
		seq := binary.BigEndian.Uint64(frames[1])
		src.mu.Lock()
		last := seq == uint64(src.told+src.left)-1
		src.mu.Unlock()
		if !last {
			continue // what was published while it was not there yet, or was slow
		}
		if err := sub.SetRcvtimeo(patience); err != nil {
			t.Fatal(err)
		}
		return sub, seq
	}
}

// replayed asks for the batches from a number on, and answers the numbers and topics that come.
func replayed(t *testing.T, p *EventPublisher, kind zmq4.Type,
	from uint64) (seqs []uint64, payloads []string) {
	t.Helper()
	_, endpoint := p.Endpoints()
	req := subscriberSocket(t, kind, endpoint)
	ask := binary.BigEndian.AppendUint64(nil, from)
	if _, err := req.SendMessage("", ask); err != nil {
		t.Fatal(err)
	}
	for {
		frames := received(t, req)
		if len(frames) != 4 || len(frames[0]) != 0 || len(frames[2]) != 8 {
			t.Fatalf("%q", frames)
		}
		seq := binary.BigEndian.Uint64(frames[2])
		if seq == 1<<64-1 {
			if len(frames[1]) != 0 || len(frames[3]) != 0 {
				t.Fatalf("%q", frames)
			}
			return seqs, payloads
		}
		if string(frames[1]) != "kv@here@m" {
			t.Fatalf("%q", frames)
		}
		seqs, payloads = append(seqs, seq), append(payloads, string(frames[3]))
	}
}

func TestEventsArePublishedAndReplayed(t *testing.T) {
	dir := filepath.Dir(runDir(t))
	for name, opt := range map[string]EventOptions{
		"tcp": {Endpoint: "tcp://127.0.0.1:*", ReplayEndpoint: "tcp://127.0.0.1:*"},
		"ipc": {Endpoint: "ipc://" + filepath.Join(dir, "ev"), ReplayEndpoint: "ipc://" +
			filepath.Join(dir, "re")},
	} {
		t.Run(name, func(t *testing.T) {
			src := &testSource{}
			opt.linger = patience
			p := newPublisher(t, opt, src)
			sub, seq := subscribe(t, p, src)
			src.more(p, 5)
			for range 5 {
				seq++
				frames := received(t, sub)
				if len(frames) != 3 || string(frames[0]) != "kv@here@m" ||
					binary.BigEndian.Uint64(frames[1]) != seq ||
					string(frames[2]) != fmt.Sprintf("batch %d", seq) {
					t.Fatalf("%q, want %d", frames, seq)
				}
			}
			seqs, payloads := replayed(t, p, zmq4.DEALER, seq-3)
			if len(seqs) != 4 || seqs[0] != seq-3 ||
				payloads[0] != fmt.Sprintf("batch %d", seq-3) || seqs[3] != seq {
				t.Fatal(seqs, payloads)
			}
			if seqs, _ := replayed(t, p, zmq4.DEALER, seq+1); len(seqs) != 0 {
				t.Fatal(seqs)
			}
			// What is no request is not answered, and does no harm.
			_, endpoint := p.Endpoints()
			bad := subscriberSocket(t, zmq4.DEALER, endpoint)
			for _, m := range [][]any{{"x"}, {"", "", "", ""}, {"", "123456789"}, {""}} {
				if _, err := bad.SendMessage(m...); err != nil {
					t.Fatal(err)
				}
			}
			if seqs, _ := replayed(t, p, zmq4.DEALER, seq); len(seqs) != 1 {
				t.Fatal(seqs)
			}
			if st := p.Stats(); st.Replays != 3 || st.Dropped != 0 || st.Resyncs != 0 ||
				st.Subscribers != 1 {
				t.Fatalf("%+v", st)
			}
			done := make(chan struct{})
			go func() { p.Close(); p.Close(); close(done) }()
			if frames := received(t, sub); string(frames[2]) != "the end" {
				t.Fatalf("%q", frames)
			}
			<-done
		})
	}
}

// TestReplayOfWhatIsGone gets what is left, and has all published anew, once.
func TestReplayOfWhatIsGone(t *testing.T) {
	src := &testSource{left: 50}
	p := newPublisher(t, EventOptions{Endpoint: "tcp://127.0.0.1:*",
		ReplayEndpoint: "tcp://127.0.0.1:*", BufferSteps: 7, resyncPause: time.Hour}, src)
	p.Wake()
	for range 2 {
		for { // until all are published
			if seqs, _ := replayed(t, p, zmq4.DEALER, 3); len(seqs) == 7 && seqs[6] == 49 {
				if seqs[0] != 43 {
					t.Fatal(seqs)
				}
				break
			}
		}
	}
	src.mu.Lock()
	defer src.mu.Unlock()
	if src.resyncs != 1 {
		t.Fatalf("%d resyncs", src.resyncs)
	}
}

// TestSlowSubscribers: neither one that does not read nor a replay that nobody reads holds anything
// up.
func TestSlowSubscribers(t *testing.T) {
	src := &testSource{bytes: 32 << 10}
	p := newPublisher(t, EventOptions{Endpoint: "tcp://127.0.0.1:*",
		ReplayEndpoint: "tcp://127.0.0.1:*", HWM: 4, BufferSteps: 1000}, src)
	subscribe(t, p, src)
	published := func(more int) (all uint64) {
		src.more(p, more)
		src.mu.Lock()
		all = uint64(src.told + src.left)
		src.mu.Unlock()
		eventually(t, "all is published", func() bool { return p.Stats().Batches == all })
		return all
	}
	published(900) // 28 MiB: more than there is room for on the way
	_, endpoint := p.Endpoints()
	stuck := subscriberSocket(t, zmq4.DEALER, endpoint)
	if _, err := stuck.SendMessage("", make([]byte, 8)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the replay begins", func() bool { return p.Stats().Replays == 1 })
	all := published(2100)
	// Another is served meanwhile.
	last := all - 1
	if seqs, _ := replayed(t, p, zmq4.DEALER, last); len(seqs) != 1 || seqs[0] != last {
		t.Fatal(seqs)
	}
	// And the one that was slow gets it all, in order.
	var want uint64
	for {
		frames := received(t, stuck)
		seq := binary.BigEndian.Uint64(frames[2])
		if seq == 1<<64-1 {
			break
		}
		if seq < want {
			t.Fatalf("%d after %d", seq, want)
		}
		want = seq + 1
	}
	if want != last+1 {
		t.Fatalf("replayed up to %d of %d", want, last)
	}
}

func TestEventsConnect(t *testing.T) {
	ctx, err := zmq4.NewContext()
	if err != nil {
		t.Fatal(err)
	}
	sub, err := ctx.NewSocket(zmq4.SUB)
	if err != nil {
		t.Fatal(err)
	}
	defer ctx.Term()
	defer sub.Close()
	for _, e := range []error{sub.Bind("tcp://127.0.0.1:*"), sub.SetSubscribe(""),
		sub.SetRcvtimeo(50 * time.Millisecond)} {
		if e != nil {
			t.Fatal(e)
		}
	}
	at, err := sub.GetLastEndpoint()
	if err != nil {
		t.Fatal(err)
	}
	src := &testSource{}
	p, err := NewEventPublisher(EventOptions{Endpoint: at, BufferSteps: 100, HWM: 1000}, src)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	for range 400 {
		src.more(p, 1)
		if _, err = sub.RecvMessageBytes(0); err == nil {
			break
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := NewEventPublisher(EventOptions{Endpoint: "tcp://nowhere*", Bind: true,
		BufferSteps: 1, HWM: 1}, src); err == nil {
		t.Fatal("an endpoint that is none is bound")
	}
	if _, err := NewEventPublisher(EventOptions{Endpoint: at, ReplayEndpoint: "tcp://nowhere*",
		BufferSteps: 1, HWM: 1}, src); err == nil {
		t.Fatal("an endpoint that is none is bound")
	}
}
