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

// Names in a directory of peers: prefix, generation of the sidecar's run, suffix.
const (
	peerPrefix = "peer-"
	peerSuffix = ".sock"
	peerMaking = ".new" // the suffix while the socket is being made
)

// makingPatience is the age from which a socket with the suffix peerMaking counts as left by a
// process that died while it made it.
const makingPatience = 10 * time.Second

// PeerDirError reports why sidecars cannot find each other in a directory, and what the user can
// do.
type PeerDirError struct {
	Dir, Why, Do string
}

func (e *PeerDirError) Error() string {
	return fmt.Sprintf("peers.dir %s %s, so this sidecar does not look for others: %s", e.Dir, e.Why, e.Do)
}

// PeerDir is a directory in which the sidecars of one user find each other: each has a socket
// there. The directory is kept open, because its path may come to name another one or none. The
// methods may be called from any goroutine. Close must not run at the same time as another method.
type PeerDir struct {
	path string
	fd   int
}

// OpenPeerDir opens a directory, and makes it if only its parent exists. It returns a *PeerDirError
// if the directory cannot be opened or if others than this user may enter it.
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

// check returns a *PeerDirError if others than this user may enter the directory.
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
		return &PeerDirError{d.path, fmt.Sprintf("has mode %04o, which gives other users access", mode),
			"chmod 0700 it, or name another"}
	}
	return nil
}

// Path returns the absolute path that the directory was opened by.
func (d *PeerDir) Path() string { return d.path }

// ID returns a number of the directory, whatever path leads to it. It is never 0, and differs
// between the directories of a host.
func (d *PeerDir) ID() (uint64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(d.fd, &st); err != nil {
		return 0, fmt.Errorf("peers.dir %s: %w", d.path, err)
	}
	b := binary.LittleEndian.AppendUint64(nil, uint64(st.Dev))
	return max(1, xxhash.Sum64(binary.LittleEndian.AppendUint64(b, st.Ino))), nil
}

// Current returns an error if the path no longer names the open directory, or if others than this
// user may enter it.
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

// at returns a path for a name in the directory. It is short even if the directory's path is long,
// and stays right if the directory is renamed.
func (d *PeerDir) at(name string) string { return fmt.Sprintf("/proc/self/fd/%d/%s", d.fd, name) }

func peerName(generation uint64) string {
	return fmt.Sprintf("%s%016x%s", peerPrefix, generation, peerSuffix)
}

// Peers appends to out the generations of the sidecars with a socket in the directory. Some may be
// dead. It reads at most limit names, and removes sockets that were left half made.
func (d *PeerDir) Peers(out []uint64, limit int) ([]uint64, error) {
	f, err := os.Open(d.at("."))
	if err != nil {
		return out, fmt.Errorf("peers.dir %s: %w", d.path, err)
	}
	defer f.Close()
	names, err := f.Readdirnames(limit)
	if err != nil && len(names) == 0 {
		return out, nil // io.EOF: the directory is empty
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

// Listen makes the socket for a generation and listens on it. The directory must stay open until
// the Listener is closed.
func (d *PeerDir) Listen(generation uint64, opt Options) (*Listener, error) {
	if opt.SendBuffer == 0 {
		opt.SendBuffer = wire.SocketBufferBytes // peers send each other many packets at once
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
	// The socket gets its name only when it listens, because others take a socket that refuses them
	// for that of a dead sidecar.
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

// Dial connects to the sidecar with the given generation. It does not wait. patience is that of the
// connection's Send. It returns ErrPeerGone if nobody listens on the socket any more, and removes
// the socket; os.ErrNotExist if there is no such socket; and ErrPeerStuck if the sidecar does not
// accept. All are wrapped.
func (d *PeerDir) Dial(generation uint64, patience time.Duration) (*Conn, error) {
	name := peerName(generation)
	uc, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: d.at(name), Net: "unixpacket"})
	switch {
	case err == nil:
	case errors.Is(err, unix.ECONNREFUSED):
		_ = unix.Unlinkat(d.fd, name, 0)
		return nil, fmt.Errorf("%w: no process listens on %s", ErrPeerGone, name)
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

// TrySend sends one packet without waiting. It returns false if there is no room for it now.
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

// SendWaiting sends like Send, but waits for room without a limit: as long as the peer lives and
// the connection is open.
func (c *Conn) SendWaiting(msg []byte, fds ...int) error { return c.send(msg, time.Time{}, fds...) }

// Died returns a channel that is closed when the peer's process has died, or after Close. All
// descriptors of a dead process are closed, also those of its sockets to others. The channel is nil
// where the kernel has no SO_PEERPIDFD (before Linux 6.5).
func (c *Conn) Died() <-chan struct{} { return c.watchDone }

// RecvFDs receives like Recv, with file descriptors. It appends the descriptors that come with the
// packet to fds; they are close-on-exec, and the caller owns them. With an error it appends none. A
// packet with more than wire.MaxHeldFDs descriptors is ErrOversize.
func (c *Conn) RecvFDs(fds []int) ([]byte, []int, error) {
	if c.recvOOB == nil {
		c.recvOOB = make([]byte, unix.CmsgSpace(wire.MaxHeldFDs*4))
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

func (c *Conn) recvMsgOnce(fd uintptr) bool {
	for {
		var oobn, flags int
		c.recvN, oobn, flags, _, c.recvErr = unix.Recvmsg(int(fd), c.buf, c.recvOOB,
			unix.MSG_CMSG_CLOEXEC)
		switch c.recvErr {
		case unix.EINTR, unix.ECONNRESET: // see recvOnce
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

// EndSending ends our side of the connection. The peer reads the end after what it was sent before.
// Packets from the peer are still received.
func (c *Conn) EndSending() { _ = c.uc.CloseWrite() }

// Closed returns a channel that is closed when the connection is closed, by Close or because the
// peer has died.
func (c *Conn) Closed() <-chan struct{} { return c.closedCh }
