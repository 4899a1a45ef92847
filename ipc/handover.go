package ipc

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"lookaside/ipc/handover"
)

// This file has the handover socket, over which a sidecar passes its work to the process that takes
// over (lookaside serve --takeover), and what is passed: the listener and its connections.
//
// A message is a packet with a header, packets with its body, and packets with its files:
//
//	header  magic, type, bytes of the body, number of files
//	body    at most handoverPart bytes each
//	files   one byte and at most handoverFDs descriptors each
//
// Both processes are of the same user. Even so neither trusts a length: what comes is bounded, and
// memory is taken only for what has come.

const (
	handoverName  = "handover.sock"
	handoverMagic = "LKSDHAND"
	handoverPart  = 64 << 10
	handoverFDs   = 200 // the kernel takes 253 with a packet
	// maxHandoverBytes and maxHandoverFiles bound one message.
	maxHandoverBytes = 256 << 20
	maxHandoverFiles = 1 << 16
	handoverHeader   = 8 + 4 + 8 + 4
)

// ErrNoHandover means that the sidecar in a directory has no handover socket, or that no sidecar
// serves there.
var ErrNoHandover = errors.New("no handover socket")

// A HandoverListener accepts processes that want to take over.
type HandoverListener struct{ sock *net.UnixListener }

// ListenHandover listens on the handover socket in the directory. A stale one is removed. The
// listener must be closed before l.
func (l *Listener) ListenHandover() (*HandoverListener, error) {
	path := filepath.Join(l.dir, handoverName)
	if err := checkPath("runtime.dir", path); err != nil {
		return nil, err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("handover socket: %w", err)
	}
	sock, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		return nil, fmt.Errorf("handover socket: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		sock.Close()
		return nil, fmt.Errorf("handover socket: %w", err)
	}
	return &HandoverListener{sock}, nil
}

// Accept waits for a process of this user that wants to take over. It returns ErrClosed after
// Close.
func (l *HandoverListener) Accept() (*Handover, error) {
	for {
		uc, err := l.sock.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return nil, ErrClosed
		}
		if err != nil {
			return nil, fmt.Errorf("handover socket: %w", err)
		}
		h, err := newHandover(uc)
		if err == nil {
			return h, nil
		}
	}
}

// Close stops listening and removes the socket.
func (l *HandoverListener) Close() error { return l.sock.Close() }

// A Handover is one end of the connection between the process that serves and the one that takes
// over. One goroutine may use it; Close may be called from any.
type Handover struct {
	uc   *net.UnixConn
	peer Peer
	buf  []byte
	oob  []byte
}

// newHandover makes a Handover of a connection, which it closes if the other process is of another
// user.
func newHandover(uc *net.UnixConn) (*Handover, error) {
	peer, pidfd, err := credentials(uc)
	closeFD(pidfd)
	if err == nil && peer.UID != uint32(os.Geteuid()) {
		err = fmt.Errorf("handover socket: the other process is of uid %d", peer.UID)
	}
	if err != nil {
		uc.Close()
		return nil, err
	}
	return &Handover{uc: uc, peer: peer, buf: make([]byte, handoverPart),
		oob: make([]byte, unix.CmsgSpace(4*handoverFDs))}, nil
}

// DialHandover connects to the sidecar that serves in dir. The error wraps ErrNoHandover if there
// is none, or if it is of a release without a handover socket.
func DialHandover(dir string) (*Handover, error) {
	uc, err := net.DialUnix("unixpacket", nil,
		&net.UnixAddr{Name: filepath.Join(dir, handoverName), Net: "unixpacket"})
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ECONNREFUSED) {
		return nil, fmt.Errorf("%w in %s: %w", ErrNoHandover, dir, err)
	}
	if err != nil {
		return nil, fmt.Errorf("handover socket: %w", err)
	}
	return newHandover(uc)
}

// Peer returns the other process.
func (h *Handover) Peer() Peer { return h.peer }

// Close ends the connection.
func (h *Handover) Close() error { return h.uc.Close() }

// Until makes Send and Recv fail from ctx's end on, until the result is called.
func (h *Handover) Until(ctx context.Context) (stop func()) {
	cancel := context.AfterFunc(ctx, func() { _ = h.uc.SetDeadline(time.Unix(1, 0)) })
	return func() {
		if !cancel() {
			_ = h.uc.SetDeadline(time.Time{})
		}
	}
}

// Send sends a message with copies of descriptors.
func (h *Handover) Send(t uint32, body []byte, fds ...int) error {
	b := append(make([]byte, 0, handoverHeader), handoverMagic...)
	b = binary.LittleEndian.AppendUint32(b, t)
	b = binary.LittleEndian.AppendUint64(b, uint64(len(body)))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(fds)))
	_, err := h.uc.Write(b)
	for len(body) > 0 && err == nil {
		n := min(len(body), handoverPart)
		_, err = h.uc.Write(body[:n])
		body = body[n:]
	}
	for len(fds) > 0 && err == nil {
		n := min(len(fds), handoverFDs)
		_, _, err = h.uc.WriteMsgUnix([]byte{1}, unix.UnixRights(fds[:n]...), nil)
		fds = fds[n:]
	}
	if err != nil {
		return fmt.Errorf("handover: send: %w", err)
	}
	return nil
}

// Recv waits for a message. The caller owns the files, which are close-on-exec. It returns io.EOF
// if the other process is gone or has closed its end, and an error that wraps
// handover.ErrMalformed for what is no message.
func (h *Handover) Recv() (t uint32, body []byte, files []*os.File, err error) {
	defer func() {
		if err != nil {
			CloseFiles(files)
			files = nil
		}
	}()
	n, got, err := h.packet()
	files = got
	if err != nil {
		return 0, nil, files, err
	}
	head := h.buf[:n]
	if n != handoverHeader || string(head[:8]) != handoverMagic || len(files) > 0 {
		return 0, nil, files, fmt.Errorf("%w: a packet of %d bytes is no header",
			handover.ErrMalformed, n)
	}
	t = binary.LittleEndian.Uint32(head[8:])
	size, count := binary.LittleEndian.Uint64(head[12:]), binary.LittleEndian.Uint32(head[20:])
	if size > maxHandoverBytes || count > maxHandoverFiles {
		return 0, nil, files, fmt.Errorf("%w: %d bytes and %d files", handover.ErrMalformed, size,
			count)
	}
	for uint64(len(body)) < size {
		n, got, err := h.packet()
		files = append(files, got...)
		if err != nil {
			return 0, nil, files, err
		}
		if body = append(body, h.buf[:n]...); uint64(len(body)) > size || len(got) > 0 {
			return 0, nil, files, fmt.Errorf("%w: the body has more than %d bytes",
				handover.ErrMalformed, size)
		}
	}
	for uint32(len(files)) < count {
		_, got, err := h.packet()
		if files = append(files, got...); err == nil && (len(got) == 0 ||
			uint32(len(files)) > count) {
			err = fmt.Errorf("%w: %d files of %d", handover.ErrMalformed, len(files), count)
		}
		if err != nil {
			return 0, nil, files, err
		}
	}
	return t, body, files, nil
}

// packet receives one packet into h.buf, with its files.
func (h *Handover) packet() (n int, files []*os.File, err error) {
	n, oobn, flags, _, err := h.uc.ReadMsgUnix(h.buf, h.oob)
	if errors.Is(err, unix.ECONNRESET) {
		err = io.EOF
	}
	if err != nil {
		return 0, nil, fmt.Errorf("handover: receive: %w", err)
	}
	if oobn > 0 {
		msgs, err := unix.ParseSocketControlMessage(h.oob[:oobn])
		if err != nil {
			return 0, nil, fmt.Errorf("handover: receive: %w", err)
		}
		for i := range msgs {
			if fds, err := unix.ParseUnixRights(&msgs[i]); err == nil {
				for _, fd := range fds {
					unix.CloseOnExec(fd)
					files = append(files, os.NewFile(uintptr(fd), "handed over"))
				}
			}
		}
	}
	switch {
	case n == 0:
		return 0, files, fmt.Errorf("handover: receive: %w", io.EOF)
	case flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0:
		return 0, files, fmt.Errorf("%w: a packet that is too long", handover.ErrMalformed)
	}
	return n, files, nil
}

// CloseFiles closes files.
func CloseFiles(files []*os.File) {
	for _, f := range files {
		if f != nil {
			_ = f.Close()
		}
	}
}

// FDs returns the descriptors of the lock file and of the session socket, to be sent to the process
// that takes over. They stay the Listener's. The lock that l holds belongs to the open file, and so
// to whoever has a copy of the descriptor.
func (l *Listener) FDs() (lock, sock int, err error) {
	control := func(raw interface{ Control(func(uintptr)) error }, out *int) error {
		return raw.Control(func(fd uintptr) { *out = int(fd) })
	}
	rawLock, err := l.lock.SyscallConn()
	if err != nil {
		return -1, -1, err
	}
	rawSock, err := l.sock.SyscallConn()
	if err != nil {
		return -1, -1, err
	}
	return lock, sock, errors.Join(control(rawLock, &lock), control(rawSock, &sock))
}

// Leave closes the Listener and leaves its socket and its lock to the process that has taken over.
func (l *Listener) Leave() error {
	l.sock.SetUnlinkOnClose(false)
	return l.Close()
}

// AdoptListener makes the Listener of a directory from the lock file and the session socket of the
// process that served there before. It owns both files, also when it fails. It fails if they are
// not those of the directory, or if the lock is not held.
func AdoptListener(dir string, lock, sock *os.File, opt Options) (_ *Listener, err error) {
	opt.ensureDefaults()
	defer sock.Close() // the Listener has a copy
	defer func() {
		if err != nil {
			lock.Close()
		}
	}()
	dir, err = filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("runtime.dir: %w", err)
	}
	if err := checkFDs(opt.MaxSessions, opt.OtherFDs); err != nil {
		return nil, err
	}
	fd, err := checkedDir(dir)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	var named, has unix.Stat_t
	if err := unix.Fstatat(fd, lockName, &named, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return nil, fmt.Errorf("runtime.dir %s: lock: %w", dir, err)
	}
	if err := unix.Fstat(int(lock.Fd()), &has); err != nil {
		return nil, fmt.Errorf("runtime.dir %s: lock: %w", dir, err)
	}
	if named.Dev != has.Dev || named.Ino != has.Ino {
		return nil, fmt.Errorf("runtime.dir %s: the lock that was handed over is another file", dir)
	}
	// Locking a file again that is locked by the same open file has no effect.
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, fmt.Errorf("runtime.dir %s: lock: %w", dir, err)
	}
	ln, err := net.FileListener(sock)
	if err != nil {
		return nil, fmt.Errorf("session socket: %w", err)
	}
	l, ok := ln.(*net.UnixListener)
	if !ok || l.Addr().Network() != "unixpacket" {
		ln.Close()
		return nil, fmt.Errorf("session socket: %v was handed over", ln.Addr())
	}
	l.SetUnlinkOnClose(true)
	if err := writeOwner(lock); err != nil {
		l.Close()
		return nil, fmt.Errorf("runtime.dir %s: lock: %w", dir, err)
	}
	return &Listener{dir: dir, opt: opt, lock: lock, sock: l, refusing: make(chan struct{},
		maxRefusing), closing: make(chan struct{})}, nil
}

// Adopt makes the connection of a socket that the process before had accepted here. It owns the
// file. The error wraps ErrPeerGone if the client has died.
func (l *Listener) Adopt(f *os.File) (*Conn, error) {
	defer f.Close() // the Conn has a copy
	nc, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("session socket: %w", err)
	}
	uc, ok := nc.(*net.UnixConn)
	if !ok || uc.LocalAddr().Network() != "unixpacket" {
		nc.Close()
		return nil, fmt.Errorf("session socket: %v was handed over", nc.LocalAddr())
	}
	peer, pidfd, err := credentials(uc)
	if err == nil && peer.UID != uint32(os.Geteuid()) {
		closeFD(pidfd)
		err = fmt.Errorf("session socket: the client is of uid %d", peer.UID)
	}
	if err != nil {
		uc.Close()
		return nil, err
	}
	l.sessions.Add(1)
	return newConn(uc, peer, pidfd, l.opt.SendBuffer, l.opt.SendPatience, l.release)
}

// Detach ends this process's use of a connection without ending the connection. It returns a copy
// of the socket, which the caller owns, for the process that takes over. What the client has sent
// and Recv has not returned stays in the socket. No Recv may be under way. Close must still be
// called. Detach fails if the connection has ended or was given up, unless given is set, which
// allows the latter.
func (c *Conn) Detach(given bool) (fd int, err error) {
	c.sendMu.Lock() // what is being sent is sent before
	defer c.sendMu.Unlock()
	c.closeMu.Lock()
	defer c.closeMu.Unlock()
	if c.closed || c.cause != nil && !given {
		return -1, c.cause
	}
	fd = -1
	if ctlErr := c.raw.Control(func(own uintptr) {
		fd, err = unix.FcntlInt(own, unix.F_DUPFD_CLOEXEC, 0)
	}); ctlErr != nil {
		return -1, ctlErr
	}
	if err != nil {
		return -1, fmt.Errorf("session socket: %w", err)
	}
	c.cause = ErrHandedOver
	c.release = (*net.UnixConn).Close
	return fd, nil
}
