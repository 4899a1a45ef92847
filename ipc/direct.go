package ipc

import (
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"lookaside/ipc/wire"
)

// This file has direct sockets: a pair of connected SOCK_SEQPACKET sockets for the lookups of one
// session. The client gets its end with the Welcome, so that no other process can use it. The loop
// of LookupSockets serves the other end.
//
// A message over ZMQ passes through two threads of libzmq each way, one in either process. On a
// busy host each of them waits for a core. A direct socket wakes nobody but the loop and the
// client's thread.

// directBuffer is the SO_SNDBUF of each end, bytes: lookups that the loop has not read yet, and
// answers that the client has not. The kernel doubles it, and counts some 800 bytes for an answer.
// Its cap for processes without privileges has room for the answers to as many lookups as a
// scheduler has at a time. The buffer bounds the memory that a client can take by sending, or by
// not reading.
const directBuffer = wire.SocketBufferBytes

// direct is the loop's end of a session's direct socket.
type direct struct {
	fd int // -1 once closed
}

// AddDirect is AddSession for a session with a direct socket. It returns the descriptor of the
// client's end, which the caller sends to the client and closes.
func (l *LookupSockets) AddDirect(id uint64) (int, error) {
	ours, theirs, err := directPair()
	if err != nil {
		return -1, err
	}
	if err := l.add(id, &replyTo{direct: &direct{fd: ours}}); err != nil {
		closeFD(ours)
		closeFD(theirs)
		return -1, fmt.Errorf("direct socket: %w", err)
	}
	return theirs, nil
}

// directPair returns the descriptors of both ends of a direct socket.
func directPair() (ours, theirs int, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX,
		unix.SOCK_SEQPACKET|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, -1, fmt.Errorf("direct socket: %w", err)
	}
	err = errors.Join(setSendBuffer(fds[0], directBuffer), setSendBuffer(fds[1], directBuffer))
	if err != nil {
		closeFD(fds[0])
		closeFD(fds[1])
		return -1, -1, fmt.Errorf("direct socket: %w", err)
	}
	return fds[0], fds[1], nil
}

// send sends one packet. It returns syscall.EAGAIN if the client does not read, and syscall.EPIPE
// once either end is closed.
func (d *direct) send(msg []byte) syscall.Errno {
	if d.fd < 0 {
		return syscall.EPIPE
	}
	for {
		switch _, err := unix.Write(d.fd, msg); err {
		case nil:
			return 0
		case unix.EINTR:
		default:
			if errno, ok := err.(syscall.Errno); ok {
				return errno
			}
			return syscall.EIO
		}
	}
}

func (d *direct) close() {
	closeFD(d.fd)
	d.fd = -1
}

// pollDirects has the loop wait for all direct sockets.
func (l *LookupSockets) pollDirects() {
	fds := make([]int, len(l.directs))
	for i, d := range l.directs {
		fds[i] = d.fd
	}
	l.poll.setFDs(fds)
}

// closeDirect closes the loop's end of a direct socket. Replies to its session are dropped from
// then on.
func (l *LookupSockets) closeDirect(d *direct) {
	if i := slices.Index(l.directs, d); i >= 0 {
		l.directs = slices.Delete(l.directs, i, i+1)
		l.pollDirects()
	}
	d.close()
}

// serveDirects handles the messages that wait on direct sockets, at most a burst of each.
func (l *LookupSockets) serveDirects() {
	first := 1 + 2*len(l.watched)
	for i := len(l.directs) - 1; i >= 0; i-- { // a socket that is closed moves those behind it
		if l.poll.ready(first + i) {
			l.serveDirect(l.directs[i])
		}
	}
}

func (l *LookupSockets) serveDirect(d *direct) {
	for n, start := 0, time.Now(); n < burst && (n == 0 || time.Since(start) < burstTime); n++ {
		size, err := unix.Read(d.fd, l.buf)
		switch {
		case err == unix.EAGAIN || err == unix.EINTR:
			return
		case err == unix.ECONNRESET:
			continue // the client left with replies unread; what it had sent comes next
		case err != nil || size == 0:
			l.closeDirect(d)
			return
		}
		l.count.messages.Add(1)
		l.handle(l.buf[:size])
	}
}
