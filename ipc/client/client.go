// Package client is a client of the sidecar's sockets, for the tools of the lookaside command and
// for tests. vLLM's client is the Python package.
package client

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/pebbe/zmq4"
	"golang.org/x/sys/unix"

	"lookaside/ipc/wire"
)

// Refused is the error for a session that the sidecar has refused.
type Refused struct{ wire.Refuse }

func (r *Refused) Error() string {
	if r.Field == "" {
		return fmt.Sprintf("the sidecar refused the session (%s): %s", r.Code, r.Message)
	}
	return fmt.Sprintf("the sidecar refused the session (%s): %s: it has %q, asked was %q: %s",
		r.Code, r.Field, r.Want, r.Got, r.Message)
}

// Session is a client's session. One goroutine at a time may use it. Close may be called from any.
type Session struct {
	conn    *net.UnixConn
	Welcome wire.Welcome
	Control *os.File // the control region
	Claim   *os.File // a worker's claim
	Direct  *os.File // the direct socket, if the Hello asked for one
	Notices []string // the texts of the sidecar's notices, oldest first
	Epochs  []string // the names that it has given to the weights, oldest first
	Ready   bool     // a worker was sent all regions that the sidecar begins with

	buf []byte
	oob []byte
	id  uint32
}

// Connect connects to the session socket in dir and sends nothing. Hello must follow.
func Connect(dir string) (*Session, error) { return connect(dir, "session.sock") }

func connect(dir, socket string) (*Session, error) {
	conn, err := net.DialUnix("unixpacket", nil,
		&net.UnixAddr{Name: filepath.Join(dir, socket), Net: "unixpacket"})
	if err != nil {
		return nil, fmt.Errorf("no sidecar answers at %s: %w", dir, err)
	}
	if err := conn.SetWriteBuffer(wire.SocketBufferBytes); err != nil {
		conn.Close()
		return nil, err
	}
	return &Session{conn: conn, buf: make([]byte, wire.MaxPacketBytes),
		oob: make([]byte, unix.CmsgSpace(4*8))}, nil
}

// Dial opens a session, and sends the descriptors with its Hello. It returns a *Refused if the
// sidecar refuses it.
func Dial(dir string, hello *wire.Hello, timeout time.Duration, held ...int) (*Session, error) {
	s, err := Connect(dir)
	if err != nil {
		return nil, err
	}
	if err := s.Hello(hello, timeout, held...); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// Reach opens a scheduler's session with the sidecar of another host, through the sidecar in dir.
func Reach(dir, address string, hello *wire.Hello, timeout time.Duration) (*Session, error) {
	s, err := connect(dir, "hosts.sock")
	if err != nil {
		return nil, err
	}
	if err = s.Send(&wire.Reach{Address: address}); err == nil {
		err = s.Hello(hello, timeout)
	}
	if err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// Hello does the handshake after Connect, and sends the descriptors with the message, which must
// give their number. The RegionAdded messages that follow it are not received.
func (s *Session) Hello(hello *wire.Hello, timeout time.Duration, held ...int) error {
	_, _, sendErr := s.conn.WriteMsgUnix(hello.Append(nil), unix.UnixRights(held...), nil)
	if sendErr != nil && !errors.Is(sendErr, unix.EPIPE) {
		return sendErr
	}
	// Receive even if the sidecar has closed: a refusal may be there to read.
	b, fds, err := s.Recv(timeout)
	if err != nil {
		return fmt.Errorf("handshake: %w", errors.Join(sendErr, err))
	}
	for _, fd := range fds {
		switch {
		case s.Control == nil:
			s.Control = fd
		case s.Claim == nil && hello.Role == wire.RoleWorker:
			s.Claim = fd
		case s.Direct == nil && hello.Direct:
			s.Direct = fd
		default:
			fd.Close()
		}
	}
	t, err := wire.Peek(b)
	if err != nil {
		return err
	}
	if t == wire.TypeRefuse {
		r := new(Refused)
		if err := r.Decode(b, &wire.DefaultLimits); err != nil {
			return err
		}
		return r
	}
	if err := s.Welcome.Decode(b, &wire.DefaultLimits); err != nil {
		return err
	}
	s.Welcome.Fingerprint = bytes.Clone(s.Welcome.Fingerprint) // it aliases the buffer
	s.Welcome.Secret = bytes.Clone(s.Welcome.Secret)
	if s.Control == nil {
		return errors.New("handshake: no control region came with the welcome")
	}
	if s.Claim == nil && hello.Role == wire.RoleWorker {
		return errors.New("handshake: no claim came with the welcome")
	}
	if s.Direct == nil && hello.Direct {
		return errors.New("handshake: no direct socket came with the welcome")
	}
	s.Ready = !s.Welcome.Preparing
	return nil
}

// Ticket returns the ticket that a worker needs to load what a lookup of this session has leased.
func (s *Session) Ticket(lookup uint64) []byte {
	t := wire.Ticket(s.Welcome.Secret, lookup)
	return t[:]
}

// NextID returns an id for the next request.
func (s *Session) NextID() uint32 { s.id++; return s.id }

// Send sends one message.
func (s *Session) Send(m wire.Message) error { return s.SendRaw(m.Append(nil)) }

// SendRaw sends b as one packet.
func (s *Session) SendRaw(b []byte) error {
	_, err := s.conn.Write(b)
	return err
}

// Recv waits for the next packet and returns it with the files that came with it. The bytes are
// valid until the next call. The caller owns the files. A Notice, a NameWeights, a RegionsReady and
// a Moved are noted in the session, and not returned.
func (s *Session) Recv(timeout time.Duration) ([]byte, []*os.File, error) {
	if err := s.conn.SetReadDeadline(time.Now().Add(timeout)); err != nil {
		return nil, nil, err
	}
	for {
		b, files, err := s.recv()
		if err != nil || !s.note(b, files) {
			return b, files, err
		}
	}
}

// note reports whether a packet needs no caller, and if so notes what it says.
func (s *Session) note(b []byte, files []*os.File) bool {
	var notice wire.Notice
	var named wire.NameWeights
	var ready wire.RegionsReady
	var moved wire.Moved
	switch {
	case notice.Decode(b, &wire.DefaultLimits) == nil:
		s.Notices = append(s.Notices, notice.Text)
	case named.Decode(b, &wire.DefaultLimits) == nil:
		s.Epochs = append(s.Epochs, named.Epoch)
	case ready.Decode(b, &wire.DefaultLimits) == nil:
		s.Ready = true
	case moved.Decode(b, &wire.DefaultLimits) == nil && len(files) == 1:
		_ = s.Control.Close()
		s.Control = files[0]
		s.Welcome.Generation = moved.Generation
		s.Welcome.LookupEndpoint = moved.LookupEndpoint
		s.Welcome.ReplyEndpoint = moved.ReplyEndpoint
	default:
		return false
	}
	return true
}

func (s *Session) recv() ([]byte, []*os.File, error) {
	n, oobn, flags, _, err := s.conn.ReadMsgUnix(s.buf, s.oob)
	if errors.Is(err, unix.ECONNRESET) {
		// The sidecar closed with packets of ours unread. The kernel reports this once, before the
		// packets that the sidecar had sent.
		n, oobn, flags, _, err = s.conn.ReadMsgUnix(s.buf, s.oob)
	}
	if err != nil {
		return nil, nil, err
	}
	var files []*os.File
	if oobn > 0 {
		msgs, err := unix.ParseSocketControlMessage(s.oob[:oobn])
		if err != nil {
			return nil, nil, err
		}
		for i := range msgs {
			fds, err := unix.ParseUnixRights(&msgs[i])
			if err != nil {
				continue
			}
			for _, fd := range fds {
				unix.CloseOnExec(fd)
				files = append(files, os.NewFile(uintptr(fd), "passed"))
			}
		}
	}
	if n == 0 {
		return nil, files, io.EOF
	}
	if flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		return nil, files, errors.New("packet cut short")
	}
	return s.buf[:n], files, nil
}

// Call sends a request and waits for its reply, which it decodes into reply. It returns a
// *CallError if the sidecar replies with an Error.
func (s *Session) Call(request, reply wire.Message, timeout time.Duration) error {
	if err := s.Send(request); err != nil {
		return err
	}
	b, files, err := s.Recv(timeout)
	for _, f := range files {
		f.Close()
	}
	if err != nil {
		return err
	}
	t, err := wire.Peek(b)
	if err != nil {
		return err
	}
	if t == wire.TypeError {
		var e wire.Error
		if err := e.Decode(b, &wire.DefaultLimits); err != nil {
			return err
		}
		return (*CallError)(&e)
	}
	return reply.Decode(b, &wire.DefaultLimits)
}

// CallError is the sidecar's reply to a request that failed.
type CallError wire.Error

func (e *CallError) Error() string { return e.Code + ": " + e.Message }

// Conn returns the socket.
func (s *Session) Conn() *net.UnixConn { return s.conn }

// Close ends the session.
func (s *Session) Close() error {
	err := s.conn.Close()
	if s.Control != nil {
		err = errors.Join(err, s.Control.Close())
		s.Control = nil
	}
	if s.Claim != nil {
		err = errors.Join(err, s.Claim.Close())
		s.Claim = nil
	}
	if s.Direct != nil {
		err = errors.Join(err, s.Direct.Close())
		s.Direct = nil
	}
	return err
}

// Lookups is a client's pair of lookup sockets, or its direct socket. One goroutine may use it.
type Lookups struct {
	direct *os.File // nil: the ZMQ sockets are used
	buf    []byte   // of direct

	ctx  *zmq4.Context
	push *zmq4.Socket
	pull *zmq4.Socket
}

// maxReplyBytes is the longest reply to a lookup, in bytes.
const maxReplyBytes = 256

// connectPatience is how long NewLookups waits for a connection.
const connectPatience = 10 * time.Second

// Lookups connects to the sidecar's lookup sockets as this session. With a direct socket it uses
// that one, which must stay open as long.
func (s *Session) Lookups() (*Lookups, error) {
	if s.Direct != nil {
		return &Lookups{direct: s.Direct, buf: make([]byte, maxReplyBytes)}, nil
	}
	return NewLookups(s.Welcome.LookupEndpoint, s.Welcome.ReplyEndpoint, s.Welcome.Secret)
}

// NewLookups connects to the endpoints of a Welcome as the session with the secret. If secret is
// nil, it binds replyEndpoint instead, as LMCache does. It returns when both sockets are connected,
// because the sidecar drops replies to a socket that is not.
func NewLookups(lookupEndpoint, replyEndpoint string, secret []byte) (*Lookups, error) {
	ctx, err := zmq4.NewContext()
	if err != nil {
		return nil, err
	}
	l := &Lookups{ctx: ctx}
	if err := l.open(lookupEndpoint, replyEndpoint, secret); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

func (l *Lookups) open(lookupEndpoint, replyEndpoint string, secret []byte) (err error) {
	if err := l.ctx.SetBlocky(false); err != nil {
		return err
	}
	if l.push, err = l.ctx.NewSocket(zmq4.PUSH); err != nil {
		return err
	}
	kind := zmq4.DEALER
	if secret == nil {
		kind = zmq4.PULL
	}
	if l.pull, err = l.ctx.NewSocket(kind); err != nil {
		return err
	}
	if err := errors.Join(l.pull.SetLinger(0), l.push.SetLinger(0)); err != nil {
		return err
	}
	start := l.pull.Bind
	if secret != nil {
		if err := l.pull.SetIdentity(string(secret)); err != nil {
			return err
		}
		start = l.pull.Connect
	}
	err = l.up(l.pull, "reply", func() error { return start(replyEndpoint) })
	if err != nil {
		return fmt.Errorf("%s: %w", replyEndpoint, err)
	}
	if err := l.up(l.push, "lookup",
		func() error { return l.push.Connect(lookupEndpoint) }); err != nil {
		return fmt.Errorf("%s: %w", lookupEndpoint, err)
	}
	return nil
}

// up starts a socket and waits until a peer is connected.
func (l *Lookups) up(s *zmq4.Socket, name string, start func() error) error {
	endpoint := "inproc://" + name
	if err := s.Monitor(endpoint, zmq4.EVENT_HANDSHAKE_SUCCEEDED); err != nil {
		return err
	}
	monitor, err := l.ctx.NewSocket(zmq4.PAIR)
	if err != nil {
		return err
	}
	// libzmq reports events by a blocking send. So it must stop reporting before the receiving end
	// is closed.
	defer func() {
		_ = s.Monitor("", 0)
		_ = monitor.Close()
	}()
	if err := errors.Join(monitor.SetLinger(0), monitor.Connect(endpoint), start()); err != nil {
		return err
	}
	deadline := time.Now().Add(connectPatience)
	for {
		if err := monitor.SetRcvtimeo(max(time.Until(deadline), time.Millisecond)); err != nil {
			return err
		}
		_, _, _, err := monitor.RecvEvent(0)
		switch zmq4.AsErrno(err) {
		case zmq4.Errno(syscall.EINTR):
			continue
		case zmq4.Errno(syscall.EAGAIN):
			return os.ErrDeadlineExceeded
		}
		return err
	}
}

// Send sends one message of one or more frames, over a direct socket of one frame that fits a
// packet.
func (l *Lookups) Send(frames ...[]byte) error {
	if l.direct != nil {
		_, err := l.direct.Write(frames[0])
		return err
	}
	parts := make([]any, len(frames))
	for i, f := range frames {
		parts[i] = f
	}
	_, err := l.push.SendMessageDontwait(parts...)
	return err
}

// Recv waits for the next message and returns its frames. It returns os.ErrDeadlineExceeded if none
// has come within timeout. Frames of a direct socket are valid until the next call.
func (l *Lookups) Recv(timeout time.Duration) ([][]byte, error) {
	deadline := time.Now().Add(timeout)
	if l.direct != nil {
		if err := l.direct.SetReadDeadline(deadline); err != nil {
			return nil, err
		}
		n, err := l.direct.Read(l.buf)
		return [][]byte{l.buf[:n]}, err
	}
	for {
		// At least a millisecond, because less is rounded down to 0, and 0 does not wait.
		if err := l.pull.SetRcvtimeo(max(time.Until(deadline), time.Millisecond)); err != nil {
			return nil, err
		}
		frames, err := l.pull.RecvMessageBytes(0)
		switch zmq4.AsErrno(err) {
		case zmq4.Errno(syscall.EINTR):
			continue
		case zmq4.Errno(syscall.EAGAIN):
			return nil, os.ErrDeadlineExceeded
		}
		return frames, err
	}
}

// Lookup sends a lookup and waits for its result. It skips results of earlier lookups, and every
// LookupPending.
func (l *Lookups) Lookup(m *wire.Lookup, timeout time.Duration) (wire.LookupResult, error) {
	var r wire.LookupResult
	if err := l.Send(m.Append(nil)); err != nil {
		return r, err
	}
	deadline := time.Now().Add(timeout)
	for {
		frames, err := l.Recv(time.Until(deadline))
		if err != nil {
			return r, err
		}
		if len(frames) != 1 {
			return r, fmt.Errorf("answer of %d frames", len(frames))
		}
		if t, _ := wire.Peek(frames[0]); t == wire.TypeLookupPending {
			continue
		}
		if err := r.Decode(frames[0], &wire.DefaultLimits); err != nil {
			return r, err
		}
		if r.Lookup == m.Lookup {
			return r, nil
		}
	}
}

// Close closes the sockets. Messages that are not sent yet are lost.
func (l *Lookups) Close() error {
	if l.direct != nil {
		return nil // it is the session's
	}
	var errs []error
	for _, s := range []*zmq4.Socket{l.push, l.pull} {
		if s != nil {
			errs = append(errs, s.Close())
		}
	}
	return errors.Join(append(errs, l.ctx.Term())...)
}
