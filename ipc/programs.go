package ipc

import (
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"lookaside/ipc/wire"
)

// DialProgram connects to a program that listens on a Unix socket of type SEQPACKET. patience is
// that of the connection's Send. It does not wait for the program. It refuses a program of a user
// that is neither this process's nor root. The error wraps [os.ErrNotExist] if there is no socket,
// and [ErrPeerGone] if nobody listens on it.
func DialProgram(path string, patience time.Duration) (*Conn, error) {
	uc, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: path, Net: "unixpacket"})
	if errors.Is(err, unix.ECONNREFUSED) {
		return nil, fmt.Errorf("%w: no process listens on %s", ErrPeerGone, path)
	}
	if err != nil {
		return nil, err
	}
	peer, pidfd, err := credentials(uc)
	if err == nil && peer.UID != uint32(os.Geteuid()) && peer.UID != 0 {
		closeFD(pidfd)
		err = fmt.Errorf("%s is of uid %d, and this process of uid %d", path, peer.UID,
			os.Geteuid())
	}
	if err != nil {
		return nil, errors.Join(err, uc.Close())
	}
	return newConn(uc, peer, pidfd, wire.SocketBufferBytes, patience, (*net.UnixConn).Close)
}

// ProgramPair returns a connection and its other end, for a program that this process starts. The
// connection ends when all copies of the other end are closed. The caller must close other once the
// program has it.
func ProgramPair(patience time.Duration) (c *Conn, other *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	own, other := os.NewFile(uintptr(fds[0]), "tier"), os.NewFile(uintptr(fds[1]), "program")
	fc, err := net.FileConn(own) // a copy
	if err = errors.Join(err, own.Close()); err != nil {
		return nil, nil, errors.Join(err, other.Close())
	}
	c, err = newConn(fc.(*net.UnixConn), Peer{}, -1, wire.SocketBufferBytes, patience,
		(*net.UnixConn).Close)
	if err != nil {
		return nil, nil, errors.Join(err, other.Close())
	}
	return c, other, nil
}

// StrandClaim turns a claim into one that counts for every sidecar, also for one that takes this
// one's generation over. It is for a process that does not say what it still copies, when this
// process cannot wait for it.
func StrandClaim(fd int) error {
	lk := unix.Flock_t{Type: unix.F_RDLCK, Start: 0, Len: 1} // no generation is 0
	if err := unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, &lk); err != nil {
		return fmt.Errorf("strand a claim: %w", err)
	}
	return nil
}
