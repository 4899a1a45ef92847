package hosts

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"lookaside/ipc"
	"lookaside/ipc/wire"
)

// tunnel is one end of a carried session. Three goroutines move packets: from the session socket
// and from the direct socket to the stream, and from the stream to both. The first of them that
// fails ends the others.
type tunnel struct {
	hosts  *Hosts
	info   Carried
	conn   *ipc.Conn     // the session socket, or hosts.sock
	direct *net.UnixConn // the direct socket
	stream net.Conn      // TCP or TLS
	frames *frames
	// dropping says that packets for the direct socket are dropped while its other end does not
	// read, as a sidecar drops answers. Otherwise they wait for it, and the stream with them.
	dropping bool
	welcomed bool // the scheduler has its Welcome: a refusal has no meaning any more

	// Used by toDirect only, and kept so that it allocates nothing.
	raw       syscall.RawConn
	packet    []byte
	wrote     error
	writeFunc func(uintptr) bool

	mu  sync.Mutex // guards out, and orders writes to the stream
	out []byte
}

// run carries packets until any part of the way ends, closes all of it, and returns the reason.
func (t *tunnel) run() (err error) {
	if t.raw, err = t.direct.SyscallConn(); err != nil {
		t.close()
		return err
	}
	t.writeFunc = t.writeOnce
	ends := make(chan error, 3)
	for _, move := range []func() error{t.fromSession, t.fromDirect, t.fromStream} {
		go func() { ends <- move() }()
	}
	err = <-ends
	t.close()
	<-ends
	<-ends
	return err
}

// end has run return. Any goroutine may call it.
func (t *tunnel) end() { _ = t.stream.SetReadDeadline(time.Unix(1, 0)) }

// close closes all parts of the way.
func (t *tunnel) close() {
	t.closeOurs()
	stream := t.stream
	if c, ok := stream.(*tls.Conn); ok {
		stream = c.NetConn() // to close TLS is to wait until the other host reads
	}
	_ = stream.Close()
}

// closeOurs closes the parts of the way on this host.
func (t *tunnel) closeOurs() {
	if t.direct != nil {
		_ = t.direct.Close()
	}
	_ = t.conn.Close()
}

// send writes one packet to the stream.
func (t *tunnel) send(ch channel, packet []byte) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.out = appendFrame(t.out[:0], ch, packet)
	if err := t.stream.SetWriteDeadline(time.Now().Add(unacknowledged)); err != nil {
		return err
	}
	_, err := t.stream.Write(t.out)
	return err
}

func (t *tunnel) fromSession() error {
	for {
		b, err := t.conn.Recv()
		if err != nil {
			return fmt.Errorf("session socket: %w", err)
		}
		if err := t.send(onSession, b); err != nil {
			return err
		}
	}
}

func (t *tunnel) fromDirect() error {
	buf := make([]byte, wire.MaxPacketBytes+1)
	for {
		n, err := t.direct.Read(buf)
		switch {
		case err != nil:
			return fmt.Errorf("direct socket: %w", err)
		case n == 0:
			return fmt.Errorf("direct socket: %w", io.EOF)
		case n == len(buf):
			return fmt.Errorf("direct socket: %w", ipc.ErrOversize)
		}
		if err := t.send(onDirect, buf[:n]); err != nil {
			return err
		}
	}
}

func (t *tunnel) fromStream() error {
	for {
		ch, packet, err := t.frames.next(wire.MaxPacketBytes)
		if err != nil {
			return err
		}
		switch ch {
		case onSession:
			err = t.conn.Send(packet)
		case onDirect:
			err = t.toDirect(packet)
		default:
			err = fmt.Errorf("%w: a greeting within a session", errFrame)
		}
		if err != nil {
			return err
		}
	}
}

// toDirect writes one packet to the direct socket.
func (t *tunnel) toDirect(packet []byte) error {
	if !t.dropping {
		if err := t.direct.SetWriteDeadline(time.Now().Add(stuckAfter)); err != nil {
			return err
		}
		_, err := t.direct.Write(packet)
		return err
	}
	t.packet = packet
	err := t.raw.Write(t.writeFunc)
	if t.packet = nil; err != nil {
		return err
	}
	if errors.Is(t.wrote, unix.EAGAIN) {
		t.hosts.dropped.Add(1)
		return nil
	}
	return t.wrote
}

func (t *tunnel) writeOnce(fd uintptr) bool {
	for {
		if _, t.wrote = unix.Write(int(fd), t.packet); t.wrote != unix.EINTR {
			return true
		}
	}
}
