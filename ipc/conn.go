package ipc

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"lookaside/ipc/wire"
)

// soPeerPIDFD is SO_PEERPIDFD (Linux 6.5), which x/sys does not name yet for
// every platform.
const soPeerPIDFD = 77

// sessionSendBuffer is the SO_SNDBUF of a client's connection: the kernel doubles it, and then a
// packet of wire.MaxPacketBytes fits. What a client does not read stays in the kernel's memory, on
// our account.
const sessionSendBuffer = wire.MaxPacketBytes/2 + 4<<10

// unreadPause is the first and unreadPauseMost the longest pause between two looks at whether a
// client has read what it was sent.
const (
	unreadPause     = time.Millisecond
	unreadPauseMost = 100 * time.Millisecond
)

// deathGrace is how long a dead peer's last packets may still be read. Its own
// descriptors are closed before its pidfd tells of its death, so normally the
// reader has met the end already; the grace is for when a child of the peer
// keeps the socket open. Tests change it.
var deathGrace = 100 * time.Millisecond

// Peer is the process at the other end, as the kernel vouches for it.
type Peer struct {
	PID int32
	UID uint32
	GID uint32
}

// Conn is one connection on the session socket: packets, at most
// wire.MaxPacketBytes long, each of them one message.
//
// One goroutine calls Recv and Linger; the other methods may be called from any.
// The connection ends when its peer dies, even if other processes hold copies of
// the peer's socket (where the kernel has SO_PEERPIDFD, Linux 6.5).
//
// States: open; given up, when we want nothing more of a peer that may live: it
// sees the end of what we send, nothing of it is received any more, and its
// leaving can still be noticed (Linger); closed.
type Conn struct {
	uc       *net.UnixConn
	raw      syscall.RawConn
	peer     Peer
	patience time.Duration
	release  func(*net.UnixConn) error // closes uc, now or when it may be

	// Recv's, kept so that it allocates nothing.
	buf      []byte
	recvN    int
	recvErr  error
	recvGone bool // at an empty read: the peer has ended its side
	recvFunc func(uintptr) bool

	// RecvFDs's, besides.
	recvOOB     []byte
	recvFDs     []int
	recvMsgFunc func(uintptr) bool

	sendMu   sync.Mutex
	sendMsg  []byte // guarded by sendMu, as the next three
	sendOOB  []byte
	sendErr  error
	sendFunc func(uintptr) bool

	pidfd     *os.File // nil where the kernel has none
	watchDone chan struct{}

	closeMu sync.Mutex
	// why it was given up or closed, nil while it is open; guarded by closeMu, as the next
	cause  error
	closed bool

	closedCh chan struct{} // closed with it
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

// credentials returns who is at the other end, and a pidfd or -1.
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

// unread returns how many bytes of the kernel's memory hold what the peer has not read.
func unread(uc *net.UnixConn) (n int) {
	raw, err := uc.SyscallConn()
	if err != nil {
		return 0
	}
	_ = raw.Control(func(fd uintptr) { n, _ = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) })
	return n
}

func closeFD(fd int) {
	if fd >= 0 {
		unix.Close(fd)
	}
}

// recvBuffers are those of connections that have ended: without them, clients that come and go
// would leave 256 KiB of garbage each.
var recvBuffers = sync.Pool{New: func() any {
	b := make([]byte, wire.MaxPacketBytes+1)
	return &b
}}

// Recycle gives Recv's buffer to another connection. The goroutine that calls Recv may call it
// once, after Close, when it needs nothing more of what it has received.
func (c *Conn) Recycle() {
	b := c.buf
	c.buf = nil
	recvBuffers.Put(&b)
}

// newConn takes over uc and pidfd, also when it fails. sendBuffer is the socket's SO_SNDBUF.
// release is called once, to close uc.
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
	ctlErr := raw.Control(func(fd uintptr) {
		// FORCE needs CAP_NET_ADMIN; without it the kernel's cap (wmem_max) holds.
		if unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, sendBuffer) != nil {
			err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUF, sendBuffer)
		}
	})
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

// Peer returns who is at the other end.
func (c *Conn) Peer() Peer { return c.peer }

// SetRecvDeadline makes a Recv that has nothing by then fail with
// os.ErrDeadlineExceeded, as the first message of a session should; the
// connection stays usable. The zero time means never. A Recv that waits heeds it,
// too. Once the connection was given up or closed, it fails with the cause.
func (c *Conn) SetRecvDeadline(t time.Time) error {
	c.closeMu.Lock()
	defer c.closeMu.Unlock()
	if c.cause != nil {
		return c.cause // and the deadline is GiveUp's
	}
	return c.uc.SetReadDeadline(t)
}

// Recv waits for the next packet. The bytes are valid until the next Recv. It
// returns io.EOF when the peer has closed or has shut down its sending side,
// ErrPeerGone when it has died, ErrEmpty for a packet of no bytes, ErrOversize
// for one above wire.MaxPacketBytes, the cause after GiveUp, ErrClosed after
// Close. After an error other than os.ErrDeadlineExceeded the caller must Close,
// at once or after GiveUp and Linger. File descriptors that a peer sends along
// are dropped by the kernel.
func (c *Conn) Recv() ([]byte, error) {
	return c.received(c.raw.Read(c.recvFunc))
}

// received judges what recvOnce has brought.
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
			// A peer that closed with packets of ours unread: said once, before what
			// it had sent, which is still to be read.
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

// ended says whether the peer of a socket has closed its end or shut down its
// sending side. Reading nothing does not tell: an empty packet reads the same.
func ended(fd uintptr) bool {
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
	n, err := unix.Poll(p, 0)
	return err == nil && n == 1
}

// Send sends one packet and with it file descriptors, which stay the caller's.
// A peer that leaves no room for it within the patience is given up, and the
// error wraps ErrPeerStuck; one that has gone gives ErrPeerGone. The order of
// packets is the order of calls.
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
		// We may have stood still meanwhile, not the peer: it is stuck if there is no room now.
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

// GiveUp ends the exchange for a reason of ours: Recv and Send return cause from
// now on, and the peer reads the end once it has read what it was sent before.
// The connection still counts for [Options].MaxSessions, because the peer may
// live: Linger waits for it to leave, Close does not. GiveUp says whether the
// peer has its end open still; if it was given up before, only that.
func (c *Conn) GiveUp(cause error) (open bool) {
	c.closeMu.Lock()
	defer c.closeMu.Unlock()
	if c.closed {
		return false
	}
	if c.cause == nil {
		c.cause = cause
		// Errors mean that there is nobody to tell. A Recv or Send that waits ends.
		_ = c.uc.CloseWrite()
		_ = c.uc.SetDeadline(time.Unix(1, 0))
	}
	ctlErr := c.raw.Control(func(fd uintptr) { open = !ended(fd) })
	return open && ctlErr == nil
}

// Linger waits, after GiveUp, until the peer has closed its end or shut down its
// sending side, until it has died, or until Close.
func (c *Conn) Linger() {
	if c.uc.SetReadDeadline(time.Time{}) == nil {
		// What the peer still sends stays in its own buffer.
		_ = c.raw.Read(ended)
	}
}

// Close ends the connection; Recv and Send return ErrClosed from then on, unless
// there was a cause before. Closing again does nothing.
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
