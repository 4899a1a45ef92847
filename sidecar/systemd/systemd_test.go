package systemd

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"lookaside/internal/leak"
)

// childEnv makes the test program print what it inherits, as a service would.
const childEnv = "LOOKASIDE_TEST_INHERITS"

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		if os.Getenv("LISTEN_PID") == "" {
			_ = os.Setenv("LISTEN_PID", fmt.Sprint(os.Getpid()))
		}
		for _, fd := range Inherited() {
			b := make([]byte, 16)
			n, err := unix.Pread(fd, b, 0)
			flags, _ := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
			fmt.Printf("%d %s %v %v;", fd, b[:max(n, 0)], err, flags&unix.FD_CLOEXEC != 0)
		}
		fmt.Print(os.Getenv("LISTEN_FDS") + os.Getenv("LISTEN_FDNAMES") + os.Getenv("LISTEN_PID"))
		os.Exit(0)
	}
	leak.Main(m)
}

// manager listens as a service manager does.
func manager(t *testing.T) (*net.UnixConn, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "notify")
	c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c, path
}

// said returns the next message, and its descriptors, which the caller closes.
func said(t *testing.T, c *net.UnixConn) (string, []int) {
	t.Helper()
	b, oob := make([]byte, 4096), make([]byte, 256)
	n, on, _, _, err := c.ReadMsgUnix(b, oob)
	if err != nil {
		t.Fatal(err)
	}
	var fds []int
	messages, err := unix.ParseSocketControlMessage(oob[:on])
	if err != nil {
		t.Fatal(err)
	}
	for i := range messages {
		some, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			t.Fatal(err)
		}
		fds = append(fds, some...)
	}
	return string(b[:n]), fds
}

func TestManager(t *testing.T) {
	c, path := manager(t)
	t.Setenv("NOTIFY_SOCKET", path)
	m := Find()
	if os.Getenv("NOTIFY_SOCKET") != "" {
		t.Error("children would speak to the manager too")
	}
	if !m.Keeps() {
		t.Error("a manager that does not say what it keeps is not tried")
	}
	fd, err := unix.MemfdCreate("region", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	for _, step := range []struct {
		do   func() error
		want string
		fds  int
	}{
		{m.Ready, "READY=1", 0},
		{func() error { return m.Store(fd) }, "FDSTORE=1\nFDNAME=lookaside-region\nFDPOLL=0", 1},
		{m.Clear, "FDSTOREREMOVE=1\nFDNAME=lookaside-region", 0},
		{m.Stopping, "STOPPING=1", 0},
	} {
		if err := step.do(); err != nil {
			t.Fatal(err)
		}
		got, fds := said(t, c)
		if got != step.want || len(fds) != step.fds {
			t.Errorf("said %q with %d descriptors, want %q with %d", got, len(fds), step.want,
				step.fds)
		}
		for _, got := range fds {
			var a, b unix.Stat_t
			if unix.Fstat(fd, &a) != nil || unix.Fstat(got, &b) != nil || a.Ino != b.Ino {
				t.Error("another file was stored")
			}
			unix.Close(got)
		}
	}
}

func TestNoManager(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", "")
	m := Find()
	if m.Keeps() {
		t.Error("keeps without a manager")
	}
	for _, err := range []error{m.Ready(), m.Stopping(), m.Store(0), m.Clear()} {
		if err != nil {
			t.Error(err)
		}
	}
	t.Setenv("NOTIFY_SOCKET", filepath.Join(t.TempDir(), "nobody"))
	if err := Find().Ready(); err == nil || !strings.Contains(err.Error(), "NOTIFY_SOCKET") {
		t.Errorf("a manager that does not listen: %v", err)
	}
}

func TestManagerThatStoresNothing(t *testing.T) {
	c, path := manager(t)
	t.Setenv("NOTIFY_SOCKET", path)
	t.Setenv("FDSTORE", "0")
	m := Find()
	if err := m.Store(0); err != nil || m.Keeps() {
		t.Errorf("%v, keeps %v", err, m.Keeps())
	}
	if err := m.Ready(); err != nil {
		t.Fatal(err)
	}
	if got, _ := said(t, c); got != "READY=1" {
		t.Errorf("said %q before READY", got)
	}
}

func TestInherited(t *testing.T) {
	file := func(text string) *os.File {
		f, err := os.CreateTemp(t.TempDir(), "")
		if err == nil {
			_, err = f.WriteString(text)
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return f
	}
	for _, tc := range []struct {
		name string
		env  []string
		want string
	}{
		{"all", []string{"LISTEN_FDS=3", "LISTEN_FDNAMES=lookaside-region:other:lookaside-region"},
			"3 a <nil> true;5 c <nil> true;"},
		{"of another process", []string{"LISTEN_PID=1", "LISTEN_FDS=3",
			"LISTEN_FDNAMES=lookaside-region:other:lookaside-region"}, ""},
		{"without names", []string{"LISTEN_FDS=3"}, ""},
		{"no number", []string{"LISTEN_FDS=x"}, ""},
		{"too many", []string{"LISTEN_FDS=100000000"}, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cmd := exec.Command(os.Args[0])
			cmd.Env = append(slices.DeleteFunc(os.Environ(), func(e string) bool {
				return strings.HasPrefix(e, "LISTEN_")
			}), append(tc.env, childEnv+"=1")...)
			cmd.ExtraFiles = []*os.File{file("a"), file("b"), file("c")}
			out, err := cmd.CombinedOutput()
			if err != nil || string(out) != tc.want {
				t.Errorf("%q, %v, want %q", out, err, tc.want)
			}
		})
	}
}
