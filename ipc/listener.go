// Package ipc connects the sidecar to other processes: clients on the session socket and the ZMQ
// lookup sockets, other sidecars of the host on peer sockets, and subscribers to KV events.
//
// The sockets of clients are in one directory of mode 0700 that belongs to the sidecar's user. The
// process that holds the lock on its file "lock" owns the sockets in it. Only the owner may remove
// stale ones, because ZMQ silently takes over the path of a live socket. Clients and peers are
// processes of the same user; subscribers may be anybody. Nothing that any of them sends is trusted
// for a length or a handle. None can make the sidecar wait, block the others, or grow past its
// limits.
//
// Goroutines: a [Listener] has a few short-lived ones, for clients that it refuses. A [Conn] has
// one that waits for its peer's death. A [LookupSockets] has one, locked to its thread; no other
// uses its ZMQ sockets. An [EventPublisher] has one for itself and two for each connection.
//
// Locks: a Conn takes closeMu while it holds sendMu. No other lock of this package is taken while
// one is held.
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

// maxSocketPath is the number of path bytes in a sockaddr_un, without the final 0.
const maxSocketPath = 107

var (
	// ErrClosed is returned by operations after Close.
	ErrClosed = errors.New("closed")
	// ErrOversize means that a peer sent a packet above the limit.
	ErrOversize = errors.New("message exceeds its limit")
	// ErrEmpty means that a peer sent a packet of no bytes.
	ErrEmpty = errors.New("empty message")
	// ErrPeerGone means that a peer has died or closed its end.
	ErrPeerGone = errors.New("peer is gone")
	// ErrPeerStuck means that a peer was given up because it did not read in time.
	ErrPeerStuck = errors.New("peer does not read")
	// ErrHandedOver means that another process has the connection now.
	ErrHandedOver = errors.New("handed over to another process")
)

const (
	// maxRefusing is how many refused clients the listener waits for at a time. helloPatience is
	// how long it waits for each.
	maxRefusing   = 16
	helloPatience = 100 * time.Millisecond
)

// OwnedError reports that another sidecar owns the directory.
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
	// MaxSessions is how many connections may be open at once, those included that were given up
	// and not yet closed. Further ones are refused as busy. Default 64. Listen fails if the
	// process's limit of file descriptors is too low for them.
	MaxSessions int
	// OtherFDs is how many file descriptors the process needs besides those of sessions and a fixed
	// reserve. Listen includes them in its check.
	OtherFDs int
	// SendBuffer is the SO_SNDBUF of a connection, bytes. Default: enough for the longest packet.
	SendBuffer int
	// Limit is the name of the setting that MaxSessions comes from. Default "sessions.limit".
	Limit string
	// SendPatience is how long Send waits for a peer that does not read, before it gives the
	// connection up. Default 1 s.
	SendPatience time.Duration
	// Log receives refusals. Default: no log.
	Log *zap.Logger
}

// Check returns an error if the process's limit of file descriptors is too low for the options.
func (o Options) Check() error {
	o.ensureDefaults()
	return checkFDs(o.MaxSessions, o.OtherFDs)
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

// File descriptors that checkFDs counts, besides those for connections to the lookup and the reply
// socket.
const (
	fdsPerSession = 3   // the connection, the pidfd and the direct socket
	fdsReserved   = 256 // for the rest of the process: regions, admin HTTP, log, runtime
)

// Listener accepts connections: of clients, in a directory that it owns until Close, or of peers
// (see [PeerDir.Listen]). Its methods may be called from any goroutine, Accept from one at a time.
type Listener struct {
	dir  string
	opt  Options
	lock *os.File // holds the flock; closed last; nil for peers
	sock *net.UnixListener

	there  func() bool // reports whether the socket is where it was made; nil but for peers
	remove func()      // removes the socket; nil but for peers

	sessions    atomic.Int64
	accepted    atomic.Uint64
	refusedUID  atomic.Uint64
	refusedBusy atomic.Uint64

	refusing chan struct{}  // has a token for each refusal under way
	refusals sync.WaitGroup // the goroutines of refuseBusy and release

	releaseMu sync.Mutex
	closing   chan struct{} // closed by Close, with releaseMu held

	closeOnce sync.Once
	closeErr  error
}

// ListenerStats are counts since Listen, except Sessions.
type ListenerStats struct {
	Sessions    int    // connections open now
	Accepted    uint64 // connections handed out
	RefusedUID  uint64 // of another user
	RefusedBusy uint64 // above MaxSessions
}

// Listen locks the directory, which it makes if missing, and listens on its session socket. It
// returns an [*OwnedError] if another sidecar owns the directory. It also fails if the directory is
// not of mode 0700 and this user's (a symlink is refused), if its path is too long for sockets, and
// if the limit of file descriptors is too low.
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

// checkPath returns an error for a socket path that the kernel would cut.
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

// MakeDir makes a sidecar's directory and its missing parents, with mode 0700. It fails if the
// directory exists and others than this user may enter it.
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

// takeDir makes and checks the directory and returns its locked lock file.
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
	if err := writeOwner(lock); err != nil {
		lock.Close()
		return nil, fmt.Errorf("runtime.dir %s: lock: %w", dir, err)
	}
	return lock, nil
}

// writeOwner writes this process's pid into the lock file. It is one write of fixed length, so that
// a reader sees the old owner or the new one.
func writeOwner(lock *os.File) error {
	_, err := lock.WriteAt(fmt.Appendf(nil, "%-10d\n", os.Getpid()), 0)
	return err
}

// Owner returns the pid of the sidecar that owns a directory, or 0 if none does.
func Owner(dir string) int {
	lock, err := os.OpenFile(filepath.Join(dir, lockName), os.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return 0
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_SH|unix.LOCK_NB); err == nil {
		return 0
	}
	return readOwner(lock)
}

// readOwner returns the pid in a lock file that another process has locked, or 0. The owner may not
// have written its pid yet, so an empty file is read again.
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

// listenSession removes the sockets of an earlier owner and binds the session socket.
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

// Present reports whether the socket of a listener for peers is still where it was made.
func (l *Listener) Present() bool { return l.there() }

// Dir returns the absolute path of the listener's directory.
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

// Accept waits for the next connection and returns it. It refuses connections of other users and
// those above MaxSessions itself. It returns ErrClosed after Close, and the context's error when
// the context is done. One goroutine at a time may call it.
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
			// Descriptors or memory have run out for a while. The peer stays in the backlog.
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

// release closes a connection, now or when the kernel holds no unread packets for its client: when
// the client has read them, closed its end, or died. Until then the connection counts for
// MaxSessions. Otherwise clients could take any amount of memory by connecting again and again.
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

// refuseBusy sends a client the refusal and closes the connection. It first reads the client's
// Hello, because closing with it unread would reset the connection, and the client would see the
// reset before the reason. The Hello is normally there already. If not, refuseBusy waits for it, in
// the background and for at most maxRefusing clients at a time; others are closed at once.
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

// takePacket drops a packet if there is one, and reports whether there was.
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

// Close stops accepting, removes the socket and unlocks the directory. Open connections stay open.
// Lookup sockets in the directory must be closed before.
func (l *Listener) Close() error {
	l.closeOnce.Do(func() {
		if l.remove != nil {
			l.remove() // first, so that no peer finds a socket that refuses
		}
		l.releaseMu.Lock()
		close(l.closing)
		l.releaseMu.Unlock()
		l.closeErr = l.sock.Close() // also unlinks the session socket, which is still ours
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
