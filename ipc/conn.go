package ipc

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"lookaside/ipc/wire"
)

// soPeerPIDFD is SO_PEERPIDFD (Linux 6.5), which x/sys does not define for every platform yet.
const soPeerPIDFD = 77

// sessionSendBuffer is the SO_SNDBUF of a client's connection. The kernel doubles it, and then a
// packet of wire.MaxPacketBytes fits. It is no larger because unread packets stay in the kernel's
// memory, charged to the sidecar.
const sessionSendBuffer = wire.MaxPacketBytes/2 + 4<<10

// unreadPause is the first and unreadPauseMost the longest pause between two checks whether a
// client has read what it was sent.
const (
	unreadPause     = time.Millisecond
	unreadPauseMost = 100 * time.Millisecond
)

// deathGrace is how long a dead peer's last packets may still be read. The kernel closes the
// process's descriptors before it signals the pidfd, so the reader normally has reached the end
// already. The grace matters when a child of the peer keeps the socket open. Tests change it.
var deathGrace = 100 * time.Millisecond

// Peer is the process at the other end, as reported by the kernel.
type Peer struct {
	PID int32
	UID uint32
	GID uint32
}

// Conn is one connection on the session socket. It carries packets of at most wire.MaxPacketBytes,
// each of them one message.
//
// Only one goroutine may call Recv and Linger; the other methods may be called from any. The
// connection ends when its peer dies, even if other processes hold copies of the peer's socket.
// This needs a kernel with SO_PEERPIDFD (Linux 6.5).
//
// States: open, given up, closed. A connection is given up when the sidecar wants nothing more from
// a peer that may still live. The peer then reads the end of what it was sent, nothing more is
// received from it, and Linger can wait for it to leave.
type Conn struct {
	uc       *net.UnixConn
	raw      syscall.RawConn
	peer     Peer
	patience time.Duration
	release  func(*net.UnixConn) error // closes uc, now or later

	// Used by Recv only, and kept so that it allocates nothing.
	buf      []byte
	recvN    int
	recvErr  error
	recvGone bool // the read was empty because the peer has ended its side
	recvFunc func(uintptr) bool

	// Used by RecvFDs only.
	recvOOB     []byte
	recvFDs     []int
	recvMsgFunc func(uintptr) bool

	sendMu   sync.Mutex
	sendMsg  []byte             // guarded by sendMu
	sendOOB  []byte             // guarded by sendMu
	sendErr  error              // guarded by sendMu
	sendFunc func(uintptr) bool // guarded by sendMu

	pidfd     *os.File // nil where the kernel has none
	watchDone chan struct{}

	closeMu sync.Mutex
	cause   error // why it was given up or closed, nil while open; guarded by closeMu
	closed  bool  // guarded by closeMu

	closedCh chan struct{} // closed when the connection is
	lingered atomic.Bool   // set by EndLinger
}

// PeerUID returns the user of the process that made the connection.
func PeerUID(uc *net.UnixConn) (uint32, error) {
	raw, err := uc.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	if ctlErr := raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); ctlErr != nil {
		return 0, ctlErr
	}
	if err != nil {
		return 0, fmt.Errorf("SO_PEERCRED: %w", err)
	}
	return cred.Uid, nil
}

// credentials returns the process at the other end and its pidfd, or -1 where the kernel has none.
func credentials(uc *net.UnixConn) (peer Peer, pidfd int, err error) {
	raw, err := uc.SyscallConn()
	if err != nil {
		return Peer{}, -1, err
	}
	pidfd = -1
	ctlErr := raw.Control(func(fd uintptr) {
		var cred *unix.Ucred
		if cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET,
			unix.SO_PEERCRED); err != nil {
			err = fmt.Errorf("SO_PEERCRED: %w", err)
			return
		}
		peer = Peer{PID: cred.Pid, UID: cred.Uid, GID: cred.Gid}
		v, pidErr := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, soPeerPIDFD)
		switch {
		case pidErr == nil:
			pidfd = v
		case errors.Is(pidErr, unix.ESRCH):
			err = fmt.Errorf("%w: pid %d", ErrPeerGone, peer.PID)
		}
	})
	if ctlErr != nil {
		return Peer{}, -1, ctlErr
	}
	return peer, pidfd, err
}

// unread returns how many bytes of the kernel's memory hold packets that the peer has not read.
func unread(uc *net.UnixConn) (n int) {
	raw, err := uc.SyscallConn()
	if err != nil {
		return 0
	}
	_ = raw.Control(func(fd uintptr) { n, _ = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) })
	return n
}

// setSendBuffer sets a socket's SO_SNDBUF, bytes. FORCE needs CAP_NET_ADMIN; without it the
// kernel's cap (wmem_max) holds.
func setSendBuffer(fd, n int) error {
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, n) == nil {
		return nil
	}
	return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, n)
}

func closeFD(fd int) {
	if fd >= 0 {
		unix.Close(fd)
	}
}

// recvBuffers holds the buffers of connections that have ended. Without it, each client that comes
// and goes would leave 256 KiB of garbage.
var recvBuffers = sync.Pool{New: func() any {
	b := make([]byte, wire.MaxPacketBytes+1)
	return &b
}}

// Recycle returns Recv's buffer to the pool. It may be called once, after Close, by the goroutine
// that calls Recv. Packets received before are invalid from then on.
func (c *Conn) Recycle() {
	b := c.buf
	c.buf = nil
	recvBuffers.Put(&b)
}

// newConn makes a Conn of uc and pidfd. It owns both, also when it fails. sendBuffer is the
// socket's SO_SNDBUF. release is called once, to close uc.
func newConn(uc *net.UnixConn, peer Peer, pidfd, sendBuffer int, patience time.Duration,
	release func(*net.UnixConn) error) (*Conn, error) {
	fail := func(err error) (*Conn, error) {
		closeFD(pidfd)
		_ = release(uc)
		return nil, err
	}
	raw, err := uc.SyscallConn()
	if err != nil {
		return fail(err)
	}
	ctlErr := raw.Control(func(fd uintptr) { err = setSendBuffer(int(fd), sendBuffer) })
	if err = errors.Join(err, ctlErr); err != nil {
		return fail(fmt.Errorf("SO_SNDBUF: %w", err))
	}
	c := &Conn{
		uc: uc, raw: raw, peer: peer, patience: patience, release: release,
		buf: *recvBuffers.Get().(*[]byte), closedCh: make(chan struct{}),
	}
	c.recvFunc = c.recvOnce
	c.sendFunc = c.sendOnce
	if pidfd >= 0 {
		if err := unix.SetNonblock(pidfd, true); err != nil {
			return fail(fmt.Errorf("pidfd: %w", err))
		}
		c.pidfd = os.NewFile(uintptr(pidfd), "pidfd")
		c.watchDone = make(chan struct{})
		go c.watch()
	}
	return c, nil
}

// watch closes the connection when the peer process dies.
func (c *Conn) watch() {
	defer close(c.watchDone)
	raw, err := c.pidfd.SyscallConn()
	if err != nil {
		return
	}
	dead := false
	_ = raw.Read(func(fd uintptr) bool {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(p, 0)
		dead = err == nil && n == 1
		return dead
	})
	if dead {
		time.AfterFunc(deathGrace, func() { _ = c.close(ErrPeerGone) })
	}
}

// Peer returns the process at the other end.
func (c *Conn) Peer() Peer { return c.peer }

// SetRecvDeadline makes Recv fail with os.ErrDeadlineExceeded if no packet has come by t. It also
// affects a Recv that already waits. The connection stays usable. The zero time means no deadline.
// Once the connection is given up or closed, SetRecvDeadline returns the cause.
func (c *Conn) SetRecvDeadline(t time.Time) error {
	c.closeMu.Lock()
	defer c.closeMu.Unlock()
	if c.cause != nil {
		return c.cause // the deadline that GiveUp has set must stay
	}
	return c.uc.SetReadDeadline(t)
}

// Recv waits for the next packet and returns its bytes, which are valid until the next Recv. The
// kernel drops file descriptors that come with the packet. The errors are
//
//   - io.EOF: the peer has closed its end or shut down its sending side,
//   - ErrPeerGone: the peer has died,
//   - ErrEmpty: the packet has no bytes,
//   - ErrOversize: the packet is longer than wire.MaxPacketBytes,
//   - the cause, after GiveUp,
//   - ErrClosed, after Close,
//   - os.ErrDeadlineExceeded: see SetRecvDeadline.
//
// After any error but the last the caller must Close, at once or after GiveUp and Linger.
func (c *Conn) Recv() ([]byte, error) {
	return c.received(c.raw.Read(c.recvFunc))
}

// received returns the packet or the error that recvOnce has stored.
func (c *Conn) received(err error) ([]byte, error) {
	if cause := c.endedBy(); cause != nil {
		return nil, cause
	}
	if err == nil {
		err = c.recvErr
	}
	if err != nil {
		return nil, err
	}
	switch n := c.recvN; {
	case n <= 0 && c.recvGone:
		return nil, io.EOF
	case n <= 0:
		return nil, ErrEmpty
	case n > wire.MaxPacketBytes:
		return nil, ErrOversize
	default:
		return c.buf[:n], nil
	}
}

func (c *Conn) recvOnce(fd uintptr) bool {
	for {
		c.recvN, c.recvErr = unix.Read(int(fd), c.buf)
		switch c.recvErr {
		case unix.EINTR, unix.ECONNRESET:
			// The peer closed with packets of ours unread. The kernel reports this once, before
			// the packets that the peer had sent, which are still to be read.
			continue
		case unix.EAGAIN:
			return false
		}
		if c.recvN == 0 {
			c.recvGone = ended(fd)
		}
		return true
	}
}

// ended reports whether the peer of a socket has closed its end or shut down its sending side. A
// read of no bytes cannot tell, because an empty packet reads the same.
func ended(fd uintptr) bool {
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
	n, err := unix.Poll(p, 0)
	return err == nil && n == 1
}

// Send sends one packet, together with file descriptors, which the caller keeps. Packets are sent
// in the order of calls. If the peer leaves no room for the packet within the patience, Send gives
// the connection up and returns an error that wraps ErrPeerStuck. If the peer is gone, it returns
// ErrPeerGone.
func (c *Conn) Send(msg []byte, fds ...int) error {
	return c.send(msg, time.Now().Add(c.patience), fds...)
}

func (c *Conn) send(msg []byte, deadline time.Time, fds ...int) error {
	if len(msg) == 0 || len(msg) > wire.MaxPacketBytes {
		return fmt.Errorf("%w: %d bytes", ErrOversize, len(msg))
	}
	c.sendMu.Lock()
	defer c.sendMu.Unlock()
	if cause := c.endedBy(); cause != nil {
		return cause
	}
	c.sendMsg, c.sendOOB = msg, nil
	if len(fds) > 0 {
		c.sendOOB = unix.UnixRights(fds...)
	}
	err := c.uc.SetWriteDeadline(deadline)
	if err == nil {
		err = c.raw.Write(c.sendFunc)
	}
	if errors.Is(err, os.ErrDeadlineExceeded) && c.endedBy() == nil {
		// This process may have been stopped, not the peer. The peer is stuck only if there is no
		// room now.
		if c.raw.Control(func(fd uintptr) { c.sendOnce(fd) }) == nil && c.sendErr != unix.EAGAIN {
			err = nil
		}
	}
	if err == nil {
		err = c.sendErr
	}
	c.sendMsg, c.sendOOB = nil, nil
	if err == nil {
		return nil
	}
	if cause := c.endedBy(); cause != nil {
		return cause
	}
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		c.GiveUp(ErrPeerStuck)
		return fmt.Errorf("%w for %v", ErrPeerStuck, c.patience)
	case errors.Is(err, unix.EPIPE), errors.Is(err, unix.ECONNRESET), errors.Is(err, unix.ENOTCONN):
		return ErrPeerGone
	}
	return fmt.Errorf("session socket: send: %w", err)
}

func (c *Conn) sendOnce(fd uintptr) bool {
	for {
		_, c.sendErr = unix.SendmsgN(int(fd), c.sendMsg, c.sendOOB, nil,
			unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT)
		switch c.sendErr {
		case unix.EINTR:
			continue
		case unix.EAGAIN:
			return false
		}
		return true
	}
}

func (c *Conn) endedBy() error {
	c.closeMu.Lock()
	defer c.closeMu.Unlock()
	return c.cause
}

// GiveUp ends the exchange and reports whether the peer still has its end open. Recv and Send
// return cause from then on, and the peer reads the end after what it was sent before. The
// connection still counts for [Options].MaxSessions, because the peer may live. Linger waits for
// the peer to leave, Close does not. The first cause stays: a second GiveUp only reports.
func (c *Conn) GiveUp(cause error) (open bool) {
	c.closeMu.Lock()
	defer c.closeMu.Unlock()
	if c.closed {
		return false
	}
	if c.cause == nil {
		c.cause = cause
		// An error means that the peer is gone. The deadline ends a Recv or Send that waits.
		_ = c.uc.CloseWrite()
		_ = c.uc.SetDeadline(time.Unix(1, 0))
	}
	ctlErr := c.raw.Control(func(fd uintptr) { open = !ended(fd) })
	return open && ctlErr == nil
}

// EndLinger makes Linger return, one that goes on and later ones. Any goroutine may call it.
func (c *Conn) EndLinger() {
	c.lingered.Store(true)
	_ = c.uc.SetReadDeadline(time.Unix(1, 0))
}

// Linger waits until the peer has closed its end, shut down its sending side or died, or until
// Close or EndLinger. It may be called after GiveUp.
func (c *Conn) Linger() {
	if c.uc.SetReadDeadline(time.Time{}) == nil && !c.lingered.Load() {
		// Packets that the peer still sends stay in its own buffer.
		_ = c.raw.Read(ended)
	}
}

// Close ends the connection. Recv and Send return ErrClosed from then on, or the cause if the
// connection was given up before. A second Close has no effect.
func (c *Conn) Close() error {
	err := c.close(ErrClosed)
	if c.watchDone != nil {
		<-c.watchDone
	}
	return err
}

func (c *Conn) close(cause error) error {
	c.closeMu.Lock()
	if c.closed {
		c.closeMu.Unlock()
		return nil
	}
	c.closed = true
	if c.cause == nil {
		c.cause = cause
	}
	c.closeMu.Unlock()
	close(c.closedCh)
	if c.pidfd != nil {
		c.pidfd.Close()
	}
	return c.release(c.uc)
}
