package ipc

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/cespare/xxhash/v2"
	"golang.org/x/sys/unix"

	"lookaside/ipc/wire"
)

// Names in a directory of peers: a socket each, by the generation of the sidecar's run, and while
// it is being made another.
const (
	peerPrefix = "peer-"
	peerSuffix = ".sock"
	peerMaking = ".new"
)

// makingPatience is how old a socket must be that was being made for it to be somebody's who died
// at that.
const makingPatience = 10 * time.Second

// PeerDirError says why sidecars cannot find each other in a directory, and what to do about it.
type PeerDirError struct {
	Dir, Why, Do string
}

func (e *PeerDirError) Error() string {
	return fmt.Sprintf("peers.dir %s %s, so no sidecars are looked for: %s", e.Dir, e.Why, e.Do)
}

// PeerDir is a directory in which the sidecars of one user find each other: each has a socket
// there. It is open; what it was opened by may name another meanwhile, or nothing. Its methods may
// be called from any goroutine, but Close only when nobody calls another.
type PeerDir struct {
	path string
	fd   int
}

// OpenPeerDir opens a directory that only this user may enter; it is made if its parent is there.
// The error is a *PeerDirError if it is not as it must be.
func OpenPeerDir(path string) (*PeerDir, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("peers.dir: %w", err)
	}
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		if err = unix.Mkdir(path, 0o700); err == nil || errors.Is(err, unix.EEXIST) {
			fd, err = unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC,
				0)
		}
	}
	if err != nil {
		return nil, &PeerDirError{path, "cannot be opened as a directory (a symlink is not): " +
			err.Error(), "name another"}
	}
	d := &PeerDir{path: path, fd: fd}
	if err := d.check(); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return d, nil
}

// check says whether only this user may enter the directory.
func (d *PeerDir) check() error {
	var st unix.Stat_t
	if err := unix.Fstat(d.fd, &st); err != nil {
		return fmt.Errorf("peers.dir %s: %w", d.path, err)
	}
	if uid := os.Geteuid(); int(st.Uid) != uid {
		return &PeerDirError{d.path, fmt.Sprintf("belongs to uid %d, not to uid %d", st.Uid, uid),
			"name a directory of this user's own, of mode 0700"}
	}
	if mode := st.Mode & 0o7777; mode&0o077 != 0 {
		return &PeerDirError{d.path, fmt.Sprintf("has mode %04o, which lets others in", mode),
			"chmod 0700 it, or name another"}
	}
	return nil
}

// Path is the directory's path when it was opened, absolute.
func (d *PeerDir) Path() string { return d.path }

// ID names the directory, whatever path leads to it: never 0, and on one host another for each
// directory.
func (d *PeerDir) ID() (uint64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(d.fd, &st); err != nil {
		return 0, fmt.Errorf("peers.dir %s: %w", d.path, err)
	}
	b := binary.LittleEndian.AppendUint64(nil, uint64(st.Dev))
	return max(1, xxhash.Sum64(binary.LittleEndian.AppendUint64(b, st.Ino))), nil
}

// Current returns nil while the directory is what its path names, and is as it must be.
func (d *PeerDir) Current() error {
	var named, open unix.Stat_t
	if err := unix.Lstat(d.path, &named); err != nil {
		return &PeerDirError{d.path, "is not there any more: " + err.Error(),
			"it is looked for again and again"}
	}
	if err := unix.Fstat(d.fd, &open); err != nil {
		return fmt.Errorf("peers.dir %s: %w", d.path, err)
	}
	if named.Dev != open.Dev || named.Ino != open.Ino {
		return &PeerDirError{d.path, "is another one now", "it is opened anew"}
	}
	return d.check()
}

// Close closes the directory.
func (d *PeerDir) Close() error { return unix.Close(d.fd) }

// at is a path of a name in the directory that is short, however long that of the directory is, and
// that no rename leads elsewhere.
func (d *PeerDir) at(name string) string { return fmt.Sprintf("/proc/self/fd/%d/%s", d.fd, name) }

func peerName(generation uint64) string {
	return fmt.Sprintf("%s%016x%s", peerPrefix, generation, peerSuffix)
}

// Peers appends to out the generations of the sidecars that have a socket in the directory, which
// may be dead ones'. At most limit names are looked at.
func (d *PeerDir) Peers(out []uint64, limit int) ([]uint64, error) {
	f, err := os.Open(d.at("."))
	if err != nil {
		return out, fmt.Errorf("peers.dir %s: %w", d.path, err)
	}
	defer f.Close()
	names, err := f.Readdirnames(limit)
	if err != nil && len(names) == 0 {
		return out, nil // io.EOF: it is empty
	}
	for _, name := range names {
		hex, ok := strings.CutPrefix(name, peerPrefix)
		if hex, isSocket := strings.CutSuffix(hex, peerSuffix); ok && isSocket && len(hex) == 16 {
			if g, err := strconv.ParseUint(hex, 16, 64); err == nil && peerName(g) == name &&
				g != 0 {
				out = append(out, g)
			}
			continue
		}
		if ok && strings.HasSuffix(name, peerMaking) {
			var st unix.Stat_t
			if unix.Fstatat(d.fd, name, &st, unix.AT_SYMLINK_NOFOLLOW) == nil &&
				time.Since(time.Unix(st.Mtim.Unix())) > makingPatience {
				_ = unix.Unlinkat(d.fd, name, 0)
			}
		}
	}
	return out, nil
}

// Listen makes the socket of the sidecar whose run has that generation. The directory must stay
// open until it is closed.
func (d *PeerDir) Listen(generation uint64, opt Options) (*Listener, error) {
	if opt.SendBuffer == 0 {
		opt.SendBuffer = wire.SocketBufferBytes // peers tell each other much at a time
	}
	opt.ensureDefaults()
	name := peerName(generation)
	making := peerPrefix + fmt.Sprintf("%016x", generation) + peerMaking
	_ = unix.Unlinkat(d.fd, making, 0)
	sock, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: d.at(making), Net: "unixpacket"})
	if err != nil {
		return nil, fmt.Errorf("peer socket: %w", err)
	}
	sock.SetUnlinkOnClose(false)
	// By its name it is found only once it listens: others take one that refuses them for a dead
	// one's.
	var st unix.Stat_t
	err = unix.Fchmodat(d.fd, making, 0o600, 0)
	if err == nil {
		err = unix.Fstatat(d.fd, making, &st, unix.AT_SYMLINK_NOFOLLOW)
	}
	if err == nil {
		err = unix.Renameat(d.fd, making, d.fd, name)
	}
	if err != nil {
		_ = unix.Unlinkat(d.fd, making, 0)
		sock.Close()
		return nil, fmt.Errorf("peer socket: %w", err)
	}
	there := func() bool {
		var now unix.Stat_t
		return unix.Fstatat(d.fd, name, &now, unix.AT_SYMLINK_NOFOLLOW) == nil &&
			now.Dev == st.Dev && now.Ino == st.Ino
	}
	return &Listener{
		dir: d.path, opt: opt, sock: sock, refusing: make(chan struct{}, maxRefusing),
		closing: make(chan struct{}), there: there, remove: func() {
			if there() {
				_ = unix.Unlinkat(d.fd, name, 0)
			}
		},
	}, nil
}

// Dial connects to a sidecar. If nobody listens on its socket any more, that is removed and the
// error is ErrPeerGone; os.ErrNotExist is one that is not there. It does not wait: for one that
// does not accept, ErrPeerStuck.
func (d *PeerDir) Dial(generation uint64, patience time.Duration) (*Conn, error) {
	name := peerName(generation)
	uc, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: d.at(name), Net: "unixpacket"})
	switch {
	case err == nil:
	case errors.Is(err, unix.ECONNREFUSED):
		_ = unix.Unlinkat(d.fd, name, 0)
		return nil, fmt.Errorf("%w: nobody listens on %s", ErrPeerGone, name)
	case errors.Is(err, unix.EAGAIN):
		return nil, fmt.Errorf("%w: %s has too many callers waiting", ErrPeerStuck, name)
	default:
		return nil, fmt.Errorf("peer %s: %w", name, err)
	}
	peer, pidfd, err := credentials(uc)
	if err == nil && peer.UID != uint32(os.Geteuid()) {
		closeFD(pidfd)
		err = fmt.Errorf("%s is of uid %d", name, peer.UID)
	}
	if err != nil {
		uc.Close()
		return nil, fmt.Errorf("peer %s: %w", name, err)
	}
	return newConn(uc, peer, pidfd, wire.SocketBufferBytes, patience, (*net.UnixConn).Close)
}

// TrySend is Send without waiting: it says false if there is no room for the packet now.
func (c *Conn) TrySend(msg []byte) (sent bool, err error) {
	if len(msg) == 0 {
		return false, fmt.Errorf("%w: %d bytes", ErrOversize, len(msg))
	}
	if cause := c.endedBy(); cause != nil {
		return false, cause
	}
	ctlErr := c.raw.Control(func(fd uintptr) {
		for {
			if err = unix.Sendto(int(fd), msg, unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT,
				nil); err != unix.EINTR {
				return
			}
		}
	})
	switch {
	case ctlErr != nil:
		return false, ErrPeerGone
	case err == nil:
		return true, nil
	case errors.Is(err, unix.EAGAIN):
		return false, nil
	case errors.Is(err, unix.EPIPE), errors.Is(err, unix.ECONNRESET), errors.Is(err, unix.ENOTCONN):
		return false, ErrPeerGone
	}
	return false, fmt.Errorf("send: %w", err)
}

// SendWaiting is Send without patience: it waits for as long as the peer lives and the connection
// is open.
func (c *Conn) SendWaiting(msg []byte, fds ...int) error { return c.send(msg, time.Time{}, fds...) }

// Died is closed when the peer's process has died: then all its descriptors are closed, its sockets
// to others included. It is closed, too, once the Conn is. It is nil where the kernel does not tell
// (before Linux 6.5).
func (c *Conn) Died() <-chan struct{} { return c.watchDone }

// RecvFDs is Recv for a peer that may send descriptors: those that come with the packet are
// appended to fds, close-on-exec, and are the caller's. Beside an error none are. A packet with
// more than maxRecvFDs is ErrOversize.
func (c *Conn) RecvFDs(fds []int) ([]byte, []int, error) {
	if c.recvOOB == nil {
		c.recvOOB = make([]byte, unix.CmsgSpace(maxRecvFDs*4))
		c.recvMsgFunc = c.recvMsgOnce
	}
	had := len(fds)
	c.recvFDs = fds
	err := c.raw.Read(c.recvMsgFunc)
	fds, c.recvFDs = c.recvFDs, nil
	b, err := c.received(err)
	if err != nil {
		for _, fd := range fds[had:] {
			unix.Close(fd)
		}
		return nil, fds[:had], err
	}
	return b, fds, nil
}

// maxRecvFDs is how many descriptors a peer may send with a packet.
const maxRecvFDs = 4

func (c *Conn) recvMsgOnce(fd uintptr) bool {
	for {
		var oobn, flags int
		c.recvN, oobn, flags, _, c.recvErr = unix.Recvmsg(int(fd), c.buf, c.recvOOB,
			unix.MSG_CMSG_CLOEXEC)
		switch c.recvErr {
		case unix.EINTR, unix.ECONNRESET: // as in recvOnce
			continue
		case unix.EAGAIN:
			return false
		}
		if oobn > 0 {
			c.takeFDs(c.recvOOB[:oobn])
		}
		if flags&unix.MSG_CTRUNC != 0 && c.recvErr == nil {
			c.recvErr = ErrOversize
		}
		if c.recvN == 0 {
			c.recvGone = ended(fd)
		}
		return true
	}
}

func (c *Conn) takeFDs(oob []byte) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return
	}
	for i := range msgs {
		if fds, err := unix.ParseUnixRights(&msgs[i]); err == nil {
			c.recvFDs = append(c.recvFDs, fds...)
		}
	}
}

// EndSending ends our side: the peer reads the end once it has read what it was sent before. What
// it sends is received as before.
func (c *Conn) EndSending() { _ = c.uc.CloseWrite() }

// Closed is closed when the connection is closed by us, or because the peer has died.
func (c *Conn) Closed() <-chan struct{} { return c.closedCh }
