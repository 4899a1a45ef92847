// Package systemd speaks with the service manager that started this process, as sd_notify(3) and
// sd_listen_fds(3) describe: it reports readiness, and has the manager keep open descriptors of the
// arena's memory while no sidecar runs (FileDescriptorStoreMax in the unit).
package systemd

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// regionName is the name of all stored descriptors (FDNAME).
const regionName = "lookaside-region"

const (
	// firstFD is the number of the first descriptor that the manager passes.
	firstFD = 3
	// mostFDs bounds the descriptors that are taken. An arena has fewer regions.
	mostFDs = 4096
)

// Inherited returns the descriptors of memory that the manager has kept, and takes the variables
// that announce them out of the environment. The caller owns the descriptors. Descriptors of other
// names are closed. Call it once, before any other file is opened by that number.
func Inherited() []int {
	defer func() {
		for _, name := range []string{"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"} {
			_ = os.Unsetenv(name)
		}
	}()
	if os.Getenv("LISTEN_PID") != strconv.Itoa(os.Getpid()) {
		return nil
	}
	n, err := strconv.Atoi(os.Getenv("LISTEN_FDS"))
	if err != nil || n <= 0 || n > mostFDs {
		return nil
	}
	names := strings.Split(os.Getenv("LISTEN_FDNAMES"), ":")
	var fds []int
	for i := range n {
		fd := firstFD + i
		if i >= len(names) || names[i] != regionName {
			_ = unix.Close(fd)
			continue
		}
		unix.CloseOnExec(fd)
		fds = append(fds, fd)
	}
	return fds
}

// A Manager is the service manager. The zero Manager stands for none: nothing is kept, and no call
// fails. Any goroutine may call its methods.
type Manager struct {
	socket string
	keeps  bool
}

// Find returns the manager that wants to hear from this process, and takes NOTIFY_SOCKET out of the
// environment.
func Find() Manager {
	m := Manager{socket: os.Getenv("NOTIFY_SOCKET")}
	_ = os.Unsetenv("NOTIFY_SOCKET")
	// Version 254 says how many descriptors the unit may store. Earlier ones do not, and drop what
	// is above the limit without a word.
	most, err := strconv.Atoi(os.Getenv("FDSTORE"))
	m.keeps = m.socket != "" && (err != nil || most > 0)
	return m
}

// Keeps reports whether the manager may keep descriptors, as far as it is known.
func (m Manager) Keeps() bool { return m.keeps }

// Ready reports that the service is up.
func (m Manager) Ready() error { return m.notify("READY=1") }

// Stopping reports that the service is ending.
func (m Manager) Stopping() error { return m.notify("STOPPING=1") }

// Store has the manager keep a copy of a descriptor until the unit is stopped. The next start of
// the unit gets it by [Inherited]. The caller keeps ownership of fd.
func (m Manager) Store(fd int) error {
	if !m.keeps {
		return nil
	}
	// Without FDPOLL=0 the manager drops a descriptor when it reports an error or a hang-up.
	return m.notify("FDSTORE=1\nFDNAME="+regionName+"\nFDPOLL=0", fd)
}

// Clear has the manager close all descriptors that Store gave it, in this run or in earlier ones.
func (m Manager) Clear() error {
	if !m.keeps {
		return nil
	}
	return m.notify("FDSTOREREMOVE=1\nFDNAME=" + regionName)
}

// notify sends one message.
func (m Manager) notify(text string, fds ...int) error {
	if m.socket == "" {
		return nil
	}
	sock, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("NOTIFY_SOCKET: %w", err)
	}
	defer unix.Close(sock)
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	// A name that begins with @ is abstract, here as in the variable.
	if err := unix.Sendmsg(sock, []byte(text), rights, &unix.SockaddrUnix{Name: m.socket},
		unix.MSG_NOSIGNAL); err != nil {
		return fmt.Errorf("NOTIFY_SOCKET %s: %w", m.socket, err)
	}
	return nil
}
