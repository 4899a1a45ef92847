package ipc

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// hostsName is the socket for schedulers that want a session with a sidecar of another host.
const hostsName = "hosts.sock"

// ListenHosts listens on the socket of the directory for sessions with sidecars of other hosts. A
// stale socket is removed. The result must be closed before l.
func (l *Listener) ListenHosts(opt Options) (*Listener, error) {
	opt.ensureDefaults()
	path := filepath.Join(l.dir, hostsName)
	if err := checkPath("runtime.dir", path); err != nil {
		return nil, err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("%s: %w", hostsName, err)
	}
	sock, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", hostsName, err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		sock.Close()
		return nil, fmt.Errorf("%s: %w", hostsName, err)
	}
	return &Listener{dir: l.dir, opt: opt, sock: sock, refusing: make(chan struct{}, maxRefusing),
		closing: make(chan struct{})}, nil
}

// DialSession connects to the session socket of the sidecar in a directory, as a client of it.
// patience is that of the connection's Send.
func DialSession(dir string, patience time.Duration) (*Conn, error) {
	uc, err := net.DialUnix("unixpacket", nil,
		&net.UnixAddr{Name: filepath.Join(dir, sessionName), Net: "unixpacket"})
	if errors.Is(err, unix.EAGAIN) {
		return nil, fmt.Errorf("%w: too many clients wait to be accepted", ErrPeerStuck)
	}
	if err != nil {
		return nil, fmt.Errorf("session socket: %w", err)
	}
	peer, pidfd, err := credentials(uc)
	if err != nil {
		uc.Close()
		return nil, fmt.Errorf("session socket: %w", err)
	}
	return newConn(uc, peer, pidfd, sessionSendBuffer, patience, (*net.UnixConn).Close)
}

// DirectPair returns both ends of a direct socket: ours, and the descriptor of the client's, which
// the caller sends to the client and closes.
func DirectPair() (ours *net.UnixConn, theirs int, err error) {
	fd, theirs, err := directPair()
	if err != nil {
		return nil, -1, err
	}
	if ours, err = DirectConn(fd); err != nil {
		closeFD(theirs)
		return nil, -1, fmt.Errorf("direct socket: %w", err)
	}
	return ours, theirs, nil
}

// DirectConn returns a connection of one end of a direct socket. It owns fd, also when it fails.
func DirectConn(fd int) (*net.UnixConn, error) {
	f := os.NewFile(uintptr(fd), "direct socket")
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	uc, ok := c.(*net.UnixConn)
	if !ok {
		c.Close()
		return nil, fmt.Errorf("%w: not a Unix socket", unix.EINVAL)
	}
	return uc, nil
}
