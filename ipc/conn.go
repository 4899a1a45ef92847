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

// deathGrace is how long a dead peer's last packets may still be read. Its own
// descriptors are closed before its pidfd tells of its death, so normally the
// reader has met the end already; the grace is for when a child of the peer
// keeps the socket open.
const deathGrace = 100 * time.Millisecond

// Peer is the process at the other end, as the kernel vouches for it.
type Peer struct {
	PID int32
	UID uint32
	GID uint32
}

// Conn is one connection on the session socket: packets, at most
// wire.MaxPacketBytes long, each of them one message.
//
// One goroutine calls Recv; Send and Close may be called from any. The
// connection ends when its peer dies, even if other processes hold copies of the
// peer's socket (where the kernel has SO_PEERPIDFD, Linux 6.5).
type Conn struct {
	uc       *net.UnixConn
	raw      syscall.RawConn
	peer     Peer
	patience time.Duration
	onClose  func()

	// Recv's, kept so that it allocates nothing.
	buf      []byte
	recvN    int
	recvErr  error
	recvFunc func(uintptr) bool

	sendMu   sync.Mutex
	sendMsg  []byte // guarded by sendMu, as the next three
	sendOOB  []byte
	sendErr  error
	sendFunc func(uintptr) bool

	pidfd     *os.File // nil where the kernel has none
	watchDone chan struct{}

	closeMu sync.Mutex
	cause   error // why it was closed, nil while it is open; guarded by closeMu
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
		if cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err != nil {
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

func closeFD(fd int) {
	if fd >= 0 {
		unix.Close(fd)
	}
}

// newConn takes over uc and pidfd, also when it fails. onClose is called once.
func newConn(uc *net.UnixConn, peer Peer, pidfd int, patience time.Duration, onClose func()) (*Conn, error) {
	fail := func(err error) (*Conn, error) {
		closeFD(pidfd)
		uc.Close()
		onClose()
		return nil, err
	}
	raw, err := uc.SyscallConn()
	if err != nil {
		return fail(err)
	}
	ctlErr := raw.Control(func(fd uintptr) {
		// FORCE needs CAP_NET_ADMIN; without it the kernel's cap (wmem_max) holds.
		if unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, wire.SocketBufferBytes) != nil {
			err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUF, wire.SocketBufferBytes)
		}
	})
	if err = errors.Join(err, ctlErr); err != nil {
		return fail(fmt.Errorf("SO_SNDBUF: %w", err))
	}
	c := &Conn{
		uc: uc, raw: raw, peer: peer, patience: patience, onClose: onClose,
		buf: make([]byte, wire.MaxPacketBytes+1),
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
// connection stays usable. The zero time means never.
func (c *Conn) SetRecvDeadline(t time.Time) error { return c.uc.SetReadDeadline(t) }

// Recv waits for the next packet. The bytes are valid until the next Recv. It
// returns io.EOF when the peer has closed (an empty packet counts as that),
// ErrPeerGone when it has died, ErrOversize for a packet above
// wire.MaxPacketBytes, ErrClosed after Close. After an error other than
// os.ErrDeadlineExceeded the caller must Close. File descriptors that a peer
// sends along are dropped by the kernel.
func (c *Conn) Recv() ([]byte, error) {
	err := c.raw.Read(c.recvFunc)
	if err == nil {
		err = c.recvErr
	}
	if err != nil {
		if cause := c.closedBy(); cause != nil {
			return nil, cause
		}
		return nil, err
	}
	switch n := c.recvN; {
	case n <= 0:
		return nil, io.EOF
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
		return true
	}
}

// Send sends one packet and with it file descriptors, which stay the caller's.
// A peer that leaves no room for it within the patience is closed, and the
// error wraps ErrPeerStuck; one that has gone gives ErrPeerGone. The order of
// packets is the order of calls.
func (c *Conn) Send(msg []byte, fds ...int) error {
	if len(msg) == 0 || len(msg) > wire.MaxPacketBytes {
		return fmt.Errorf("%w: %d bytes", ErrOversize, len(msg))
	}
	c.sendMu.Lock()
	defer c.sendMu.Unlock()
	if cause := c.closedBy(); cause != nil {
		return cause
	}
	c.sendMsg, c.sendOOB = msg, nil
	if len(fds) > 0 {
		c.sendOOB = unix.UnixRights(fds...)
	}
	err := c.uc.SetWriteDeadline(time.Now().Add(c.patience))
	if err == nil {
		err = c.raw.Write(c.sendFunc)
	}
	if err == nil {
		err = c.sendErr
	}
	c.sendMsg, c.sendOOB = nil, nil
	if err == nil {
		return nil
	}
	if cause := c.closedBy(); cause != nil {
		return cause
	}
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		_ = c.close(ErrPeerStuck)
		return fmt.Errorf("%w for %v", ErrPeerStuck, c.patience)
	case errors.Is(err, unix.EPIPE), errors.Is(err, unix.ECONNRESET), errors.Is(err, unix.ENOTCONN):
		return ErrPeerGone
	}
	return fmt.Errorf("session socket: send: %w", err)
}

func (c *Conn) sendOnce(fd uintptr) bool {
	for {
		_, c.sendErr = unix.SendmsgN(int(fd), c.sendMsg, c.sendOOB, nil, unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT)
		switch c.sendErr {
		case unix.EINTR:
			continue
		case unix.EAGAIN:
			return false
		}
		return true
	}
}

func (c *Conn) closedBy() error {
	c.closeMu.Lock()
	defer c.closeMu.Unlock()
	return c.cause
}

// Close ends the connection; Recv and Send return ErrClosed from then on.
// Closing again does nothing.
func (c *Conn) Close() error {
	err := c.close(ErrClosed)
	if c.watchDone != nil {
		<-c.watchDone
	}
	return err
}

func (c *Conn) close(cause error) error {
	c.closeMu.Lock()
	if c.cause != nil {
		c.closeMu.Unlock()
		return nil
	}
	c.cause = cause
	c.closeMu.Unlock()
	err := c.uc.Close()
	if c.pidfd != nil {
		c.pidfd.Close()
	}
	c.onClose()
	return err
}
