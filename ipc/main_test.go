package ipc

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/pebbe/zmq4"
	"golang.org/x/sys/unix"

	"lookaside/internal/leak"
)

// helpers are roles that this test binary plays in a process of its own: named
// by LOOKASIDE_IPC_HELPER, argument in LOOKASIDE_IPC_ARG. They print a line when
// they are ready, and then wait to be killed or for the end of stdin, which the
// end of this process is, too.
var helpers = map[string]func(arg string) error{
	// listen owns the directory.
	"listen": func(dir string) error {
		l, err := Listen(dir, Options{})
		if err != nil {
			return err
		}
		return waitForKill(l.Dir())
	},
	// connect opens a session, and a child keeps the socket open too.
	"connect and fork": func(dir string) error {
		c, err := dial(dir)
		if err != nil {
			return err
		}
		f, err := c.File()
		if err != nil {
			return err
		}
		child := exec.Command("sleep", "60")
		child.ExtraFiles = []*os.File{f}
		if err := child.Start(); err != nil {
			return err
		}
		return waitForKill(fmt.Sprint(child.Process.Pid))
	},
	// connect says whether the sidecar lets us in: it sends a byte and waits for one.
	"connect": func(dir string) error {
		c, err := dial(dir)
		if err != nil {
			return err
		}
		_, err = c.Write([]byte("x"))
		if n, _ := c.Read(make([]byte, 16)); err != nil || n == 0 {
			return waitForKill("refused")
		}
		return waitForKill("accepted")
	},
	// last words sends a packet and dies at once, without reading what it was sent.
	"last words": func(dir string) error {
		c, err := dial(dir)
		if err != nil {
			return err
		}
		if err := waitForLine(); err != nil {
			return err
		}
		_, err = c.Write([]byte("commit"))
		return err
	},
	// serve answers lookups with few descriptors to spend; serve slowly takes long for some.
	"serve":        func(dir string) error { return serveFew(dir, 0) },
	"serve slowly": func(dir string) error { return serveFew(dir, stall) },
	// push sends lookups until killed.
	"push": func(endpoint string) error {
		s, err := zmq4.NewSocket(zmq4.PUSH)
		if err != nil {
			return err
		}
		if err := s.Connect(endpoint); err != nil {
			return err
		}
		go func() {
			for {
				_, _ = s.SendBytes([]byte("hello"), zmq4.DONTWAIT)
				time.Sleep(5 * time.Millisecond)
			}
		}()
		return waitForKill("pushing")
	},
}

// patience is for what comes at once, unless the machine is busy.
const patience = 2 * time.Minute

func waitForKill(say string) error {
	fmt.Println(say)
	_, err := io.Copy(io.Discard, os.Stdin)
	return err
}

func waitForLine() error {
	fmt.Println("ready")
	_, err := bufio.NewReader(os.Stdin).ReadString('\n')
	return err
}

func TestMain(m *testing.M) {
	if name := os.Getenv("LOOKASIDE_IPC_HELPER"); name != "" {
		if err := helpers[name](os.Getenv("LOOKASIDE_IPC_ARG")); err != nil {
			fmt.Println("failed:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	leak.Main(m)
}

// helper starts a helper and returns it with the line that it says. uid -1: ours.
func helper(t *testing.T, name, arg string, uid int) (cmd *exec.Cmd, stdin *os.File, said string) {
	t.Helper()
	exe := os.Args[0]
	if uid >= 0 {
		// Another user may not be able to reach the test binary where go put it.
		exe = filepath.Join(openDir(t), "helper")
		b, err := os.ReadFile(os.Args[0])
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(exe, b, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	cmd = exec.Command(exe)
	cmd.Env = append(os.Environ(), "LOOKASIDE_IPC_HELPER="+name, "LOOKASIDE_IPC_ARG="+arg)
	cmd.Stderr = os.Stderr
	if uid >= 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid),
			Gid: uint32(uid)}}
		cmd.Dir = "/"
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdin = r
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	r.Close()
	t.Cleanup(func() {
		w.Close()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	line = strings.TrimSpace(line)
	if err != nil || strings.HasPrefix(line, "failed:") {
		t.Fatalf("helper %s: %s %v", name, line, err)
	}
	return cmd, w, line
}

// runDir returns the path of a runtime directory that is not there yet, short
// enough for sockets.
func runDir(t testing.TB) string {
	t.Helper()
	parent, err := os.MkdirTemp("", "la-ipc-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(parent) })
	return filepath.Join(parent, "rank-0")
}

// openDir returns a directory that every user may enter.
func openDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "la-ipc-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

func dial(dir string) (*net.UnixConn, error) {
	return net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: filepath.Join(dir, sessionName),
		Net: "unixpacket"})
}

// eventually fails the test if a condition does not come true in time.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

func serveFew(dir string, stall time.Duration) error {
	lim := unix.Rlimit{Cur: 1024, Max: 1024}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		return err
	}
	l, err := Listen(dir, Options{})
	if err != nil {
		return err
	}
	h := new(testHandler)
	within := func() {
		if h.lookup.Lookup == stallLookup {
			time.Sleep(stall)
		}
	}
	h.within.Store(&within)
	s, err := NewLookupSockets(dir, LookupOptions{}, h)
	if err != nil {
		return err
	}
	if err := s.AddSession(1, secretOf(1)); err != nil {
		return err
	}
	go func() {
		for {
			if _, err := l.Accept(context.Background()); err != nil {
				return
			}
		}
	}()
	return waitForKill(s.LookupEndpoint() + " " + s.ReplyEndpoint())
}
