// Package ipc reaches the sidecar's peers: the session socket with its
// handshake credentials and file descriptors, and the ZMQ lookup sockets.
//
// Everything lives in one directory of mode 0700 that belongs to the sidecar's
// user. Whoever holds the lock on its file "lock" owns the sockets in it, and
// only the owner may remove stale ones: ZMQ would steal a live path silently.
// Peers are processes of the same user; still, nothing that one sends is
// trusted for a length or a handle, and none can make the sidecar wait, block
// others, or grow past its limits.
//
// Goroutines: a [Listener] has a few, short-lived, for clients that it turns
// away; a [Conn] has one that waits for
// its peer's death; a [LookupSockets] has one, locked to its thread, which alone
// touches ZMQ sockets. A Conn's sendMu may be held when its closeMu is taken; no
// other lock of this package is held while another is taken.
package ipc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"lookaside/ipc/wire"
)

// Names inside the runtime directory.
const (
	lockName    = "lock"
	sessionName = "session.sock"
	lookupName  = "lookup.sock"
	replyName   = "reply.sock"
	longestName = sessionName
)

// maxSocketPath is how many bytes of path sockaddr_un holds, less the final 0.
const maxSocketPath = 107

var (
	// ErrClosed is returned by operations on what was closed.
	ErrClosed = errors.New("closed")
	// ErrOversize means that a peer sent a packet above the limit.
	ErrOversize = errors.New("message exceeds its limit")
	// ErrEmpty means that a peer sent a packet of no bytes.
	ErrEmpty = errors.New("empty message")
	// ErrPeerGone means that a peer has died or closed its end.
	ErrPeerGone = errors.New("peer is gone")
	// ErrPeerStuck means that a peer did not read in time, and was given up.
	ErrPeerStuck = errors.New("peer does not read")
)

const (
	// maxRefusing is how many refused clients are waited for at a time, and
	// helloPatience how long for each.
	maxRefusing   = 16
	helloPatience = 100 * time.Millisecond
)

// OwnedError says that another sidecar owns the directory.
type OwnedError struct {
	Dir string
	PID int // of the owner, 0 if it could not be read
}

func (e *OwnedError) Error() string {
	if e.PID == 0 {
		return fmt.Sprintf("runtime.dir %s is owned by another sidecar", e.Dir)
	}
	return fmt.Sprintf("runtime.dir %s is owned by another sidecar, pid %d", e.Dir, e.PID)
}

// Options configure a Listener.
type Options struct {
	// MaxSessions is how many connections may be open at once, those included that
	// were given up and not yet closed; further ones are refused as busy. Default
	// 64. Their file descriptors are reserved: Listen fails if the process's limit
	// does not allow for them.
	MaxSessions int
	// OtherFDs is how many file descriptors the process needs besides those of sessions
	// and a fixed reserve: they are reserved with them.
	OtherFDs int
	// SendBuffer is the SO_SNDBUF of a connection. Default: what the longest packet needs.
	SendBuffer int
	// Limit names the setting that MaxSessions is. Default "sessions.limit".
	Limit string
	// SendPatience is how long Send waits for a peer that does not read before
	// the connection is given up. Default 1 s.
	SendPatience time.Duration
	// Log is told of refusals. Default: nothing.
	Log *zap.Logger
}

func (o *Options) ensureDefaults() {
	if o.MaxSessions <= 0 {
		o.MaxSessions = 64
	}
	if o.Limit == "" {
		o.Limit = "sessions.limit"
	}
	if o.SendBuffer <= 0 {
		o.SendBuffer = sessionSendBuffer
	}
	if o.SendPatience <= 0 {
		o.SendPatience = time.Second
	}
	if o.Log == nil {
		o.Log = zap.NewNop()
	}
}

// File descriptors that one session may take: connection and pidfd. The rest of the process
// (regions, admin HTTP, log, runtime) has what is reserved, and the peers of the lookup and the
// reply socket theirs.
const (
	fdsPerSession = 2
	fdsReserved   = 256
)

// Listener accepts sessions in a directory that it owns until Close.
// Its methods may be called from any goroutine.
type Listener struct {
	dir  string
	opt  Options
	lock *os.File // holds the flock; closed last; nil for peers
	sock *net.UnixListener

	there  func() bool // of peers: the socket is where it was made
	remove func()      // of peers: removes it

	sessions    atomic.Int64
	accepted    atomic.Uint64
	refusedUID  atomic.Uint64
	refusedBusy atomic.Uint64

	refusing chan struct{}  // a token for each refusal under way
	refusals sync.WaitGroup // their goroutines, and those of release

	releaseMu sync.Mutex
	closing   chan struct{} // closed by Close, with releaseMu held

	closeOnce sync.Once
	closeErr  error
}

// ListenerStats are counts since Listen, but for Sessions.
type ListenerStats struct {
	Sessions    int    // connections open now
	Accepted    uint64 // connections handed out
	RefusedUID  uint64 // of another user
	RefusedBusy uint64 // above MaxSessions
}

// Listen takes the directory, making it if need be, and listens on its session
// socket. It fails with an [*OwnedError] if another sidecar owns it; if it is
// not a directory of mode 0700 of this user (a symlink is refused); if its
// path is too long for sockets; and if the limit on file descriptors is too low.
func Listen(dir string, opt Options) (*Listener, error) {
	opt.ensureDefaults()
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("runtime.dir: %w", err)
	}
	if err := checkPath("runtime.dir", filepath.Join(dir, longestName)); err != nil {
		return nil, err
	}
	if err := checkFDs(opt.MaxSessions, opt.OtherFDs); err != nil {
		return nil, err
	}
	lock, err := takeDir(dir)
	if err != nil {
		return nil, err
	}
	sock, err := listenSession(dir)
	if err != nil {
		lock.Close()
		return nil, err
	}
	return &Listener{dir: dir, opt: opt, lock: lock, sock: sock, refusing: make(chan struct{},
		maxRefusing), closing: make(chan struct{})}, nil
}

// checkPath refuses a socket path that the kernel would cut.
func checkPath(setting, path string) error {
	if n := len(path); n > maxSocketPath {
		return fmt.Errorf("%s: socket path %s has %d bytes, and a Unix socket's may have %d: choose a shorter %s",
			setting, path, n, maxSocketPath, setting)
	}
	if strings.IndexByte(path, 0) >= 0 {
		return fmt.Errorf("%s: socket path %q holds a zero byte", setting, path)
	}
	return nil
}

func checkFDs(sessions, others int) error {
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		return fmt.Errorf("getrlimit: %w", err)
	}
	need := uint64(fdsReserved + others + 2*maxLookupPeers + sessions*fdsPerSession)
	if lim.Cur < need {
		return fmt.Errorf("sessions.limit %d needs %d file descriptors, and this process may have %d: raise RLIMIT_NOFILE or lower sessions.limit",
			sessions, need, lim.Cur)
	}
	return nil
}

// MakeDir makes a sidecar's directory, and what is missing above it, with mode 0700. It fails if
// the directory exists and is not this user's alone.
func MakeDir(dir string) error {
	fd, err := checkedDir(dir)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// checkedDir makes, checks and opens the directory.
func checkedDir(dir string) (_ int, err error) {
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return -1, fmt.Errorf("runtime.dir: %w", err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return -1, fmt.Errorf("runtime.dir: %w", err)
	}
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("runtime.dir %s: not a directory that may be used (a symlink is not): %w", dir, err)
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
		}
	}()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return -1, fmt.Errorf("runtime.dir %s: %w", dir, err)
	}
	if uid := os.Geteuid(); int(st.Uid) != uid {
		return -1, fmt.Errorf("runtime.dir %s belongs to uid %d, not to uid %d", dir, st.Uid, uid)
	}
	if mode := st.Mode & 0o7777; mode&0o077 != 0 {
		return -1, fmt.Errorf("runtime.dir %s has mode %04o, and must have 0700", dir, mode)
	}
	return fd, nil
}

// takeDir makes and checks the directory and takes its lock.
func takeDir(dir string) (*os.File, error) {
	fd, err := checkedDir(dir)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	lfd, err := unix.Openat(fd, lockName, unix.O_RDWR|unix.O_CREAT|unix.O_NOFOLLOW|unix.O_CLOEXEC,
		0o600)
	if err != nil {
		return nil, fmt.Errorf("runtime.dir %s: lock: %w", dir, err)
	}
	lock := os.NewFile(uintptr(lfd), filepath.Join(dir, lockName))
	if err := unix.Flock(lfd, unix.LOCK_EX|unix.LOCK_NB); err != nil {
		defer lock.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, &OwnedError{Dir: dir, PID: readOwner(lock)}
		}
		return nil, fmt.Errorf("runtime.dir %s: lock: %w", dir, err)
	}
	// One write of fixed length: a reader sees the old owner or the new one.
	if _, err := lock.WriteAt(fmt.Appendf(nil, "%-10d\n", os.Getpid()), 0); err != nil {
		lock.Close()
		return nil, fmt.Errorf("runtime.dir %s: lock: %w", dir, err)
	}
	return lock, nil
}

// readOwner reads the pid in a lock file that another process holds. That one
// may have locked and not yet written, so an empty file is read again.
func readOwner(lock *os.File) int {
	var b [16]byte
	for range 20 {
		n, _ := lock.ReadAt(b[:], 0)
		if pid, err := strconv.Atoi(string(bytes.TrimSpace(b[:n]))); err == nil {
			return pid
		}
		time.Sleep(5 * time.Millisecond)
	}
	return 0
}

// listenSession removes what an earlier owner left and binds the session socket.
func listenSession(dir string) (*net.UnixListener, error) {
	stale, err := filepath.Glob(filepath.Join(globQuote(dir), "*.sock"))
	if err != nil {
		return nil, fmt.Errorf("runtime.dir %s: %w", dir, err)
	}
	for _, path := range stale {
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("runtime.dir: stale socket: %w", err)
		}
	}
	path := filepath.Join(dir, sessionName)
	sock, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		return nil, fmt.Errorf("session socket: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		sock.Close()
		return nil, fmt.Errorf("session socket: %w", err)
	}
	return sock, nil
}

func globQuote(s string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(s)
}

// Present says, of a listener for peers, whether its socket is still where it was made.
func (l *Listener) Present() bool { return l.there() }

// Dir returns the directory that the listener owns, as an absolute path.
func (l *Listener) Dir() string { return l.dir }

// Stats returns the listener's counts.
func (l *Listener) Stats() ListenerStats {
	return ListenerStats{
		Sessions:    int(l.sessions.Load()),
		Accepted:    l.accepted.Load(),
		RefusedUID:  l.refusedUID.Load(),
		RefusedBusy: l.refusedBusy.Load(),
	}
}

// Accept waits for the next connection that may have a session: one of the same
// user, with room for it. Others are refused without the caller's help. It
// returns ErrClosed after Close and the context's error when that is done.
// One goroutine at a time.
func (l *Listener) Accept(ctx context.Context) (*Conn, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = l.sock.SetDeadline(time.Unix(1, 0)) })
	defer func() {
		if !stop() {
			_ = l.sock.SetDeadline(time.Time{})
		}
	}()
	for {
		uc, err := l.sock.AcceptUnix()
		switch {
		case err == nil:
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case errors.Is(err, net.ErrClosed):
			return nil, ErrClosed
		default:
			// Out of descriptors or memory for a while: the peer stays in the backlog.
			l.opt.Log.Warn("session socket: accept failed", zap.Error(err))
			select {
			case <-ctx.Done():
			case <-time.After(50 * time.Millisecond):
			}
			continue
		}
		if c := l.admit(uc); c != nil {
			return c, nil
		}
	}
}

// admit makes a Conn of an accepted socket, or closes it and returns nil.
func (l *Listener) admit(uc *net.UnixConn) *Conn {
	peer, pidfd, err := credentials(uc)
	if err != nil {
		l.opt.Log.Info("session refused", zap.Error(err))
		uc.Close()
		return nil
	}
	if uid := uint32(os.Geteuid()); peer.UID != uid {
		l.refusedUID.Add(1)
		l.opt.Log.Warn("session refused: another user", zap.Uint32("uid", peer.UID),
			zap.Int32("pid", peer.PID))
		closeFD(pidfd)
		uc.Close()
		return nil
	}
	if l.sessions.Add(1) > int64(l.opt.MaxSessions) {
		l.sessions.Add(-1)
		l.refusedBusy.Add(1)
		l.opt.Log.Warn("session refused: "+l.opt.Limit+" is reached",
			zap.Int("limit", l.opt.MaxSessions), zap.Int32("pid", peer.PID))
		closeFD(pidfd)
		l.refuseBusy(uc)
		return nil
	}
	c, err := newConn(uc, peer, pidfd, l.opt.SendBuffer, l.opt.SendPatience, l.release)
	if err != nil {
		l.opt.Log.Warn("session refused", zap.Error(err))
		return nil
	}
	l.accepted.Add(1)
	return c
}

// release closes a connection. What its client has not read stays in memory until the client reads
// it, closes its end, or dies: until then the connection stays and counts, or clients could have
// any amount of memory taken by coming again and again.
func (l *Listener) release(uc *net.UnixConn) error {
	end := func() error {
		defer l.sessions.Add(-1)
		return uc.Close()
	}
	if unread(uc) == 0 {
		return end()
	}
	l.releaseMu.Lock()
	defer l.releaseMu.Unlock()
	select {
	case <-l.closing:
		return end()
	default:
	}
	err := errors.Join(uc.CloseRead(), uc.CloseWrite())
	l.refusals.Go(func() {
		defer func() { _ = end() }()
		for pause := unreadPause; unread(uc) > 0; pause = min(2*pause, unreadPauseMost) {
			select {
			case <-l.closing:
				return
			case <-time.After(pause):
			}
		}
	})
	return err
}

// refuseBusy tells a client that there is no room, and closes. It first takes in
// the client's Hello: closing over it would reset the connection, and the client
// would see that before the reason. Normally it is there already; a few clients
// at a time are worth waiting for it; of more, each is closed at once.
func (l *Listener) refuseBusy(uc *net.UnixConn) {
	refuse := wire.Refuse{
		Code: wire.RefuseBusy, Field: l.opt.Limit, Want: strconv.Itoa(l.opt.MaxSessions),
		Message: fmt.Sprintf("the sidecar has its %d connections already", l.opt.MaxSessions),
	}
	_, _ = uc.Write(refuse.Append(nil)) // a fresh socket has room at once
	_ = uc.SetReadDeadline(time.Now().Add(helloPatience))
	if takePacket(uc) {
		uc.Close()
		return
	}
	select {
	case l.refusing <- struct{}{}:
	default:
		uc.Close()
		return
	}
	l.refusals.Go(func() {
		_, _ = uc.Read(make([]byte, 1)) // the rest of the packet is dropped
		uc.Close()
		<-l.refusing
	})
}

// takePacket drops one packet if there is one.
func takePacket(uc *net.UnixConn) (took bool) {
	raw, err := uc.SyscallConn()
	if err != nil {
		return false
	}
	ctlErr := raw.Control(func(fd uintptr) {
		_, _, err = unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_DONTWAIT)
	})
	return ctlErr == nil && err == nil
}

// Close stops accepting, removes the session socket and gives up the directory.
// Open connections stay open. Lookup sockets in the directory must have been
// closed before.
func (l *Listener) Close() error {
	l.closeOnce.Do(func() {
		if l.remove != nil {
			l.remove() // before it refuses
		}
		l.releaseMu.Lock()
		close(l.closing)
		l.releaseMu.Unlock()
		l.closeErr = l.sock.Close() // unlinks the socket, which is still ours, but for peers
		l.refusals.Wait()
		if l.lock == nil {
			return
		}
		if err := l.lock.Close(); l.closeErr == nil {
			l.closeErr = err
		}
	})
	return l.closeErr
}
