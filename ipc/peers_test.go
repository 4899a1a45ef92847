package ipc

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lookaside/ipc/wire"
)

func peerDir(t *testing.T) *PeerDir {
	t.Helper()
	d, err := OpenPeerDir(runDir(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

func (d *PeerDir) listen(t *testing.T, gen uint64, opt Options) *Listener {
	t.Helper()
	l, err := d.Listen(gen, opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// peerPair returns the lender's end and the borrower's.
func peerPair(t *testing.T, d *PeerDir, l *Listener, gen uint64) (lender, borrower *Conn) {
	t.Helper()
	b, err := d.Dial(gen, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	a, err := l.Accept(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close() })
	return a, b
}

func TestPeerDir(t *testing.T) {
	d := peerDir(t)
	if info, err := os.Stat(d.Path()); err != nil || info.Mode().Perm() != 0o700 {
		t.Fatalf("%v, %v", info, err)
	}
	if err := d.Current(); err != nil {
		t.Fatal(err)
	}
	id, err := d.ID()
	if err != nil || id == 0 {
		t.Fatalf("%x, %v", id, err)
	}
	same, err := OpenPeerDir(filepath.Join(d.Path(), "..", filepath.Base(d.Path())))
	if err != nil {
		t.Fatal(err)
	}
	defer same.Close()
	if got, err := same.ID(); err != nil || got != id {
		t.Errorf("opened again it is %x, not %x: %v", got, id, err)
	}
	if got, err := peerDir(t).ID(); err != nil || got == id {
		t.Errorf("another one is %x as well: %v", got, err)
	}
	for what, make := range map[string]func(path string) error{
		"mode 0750": func(path string) error {
			return errors.Join(os.Mkdir(path, 0o700),
				os.Chmod(path, 0o750))
		},
		"symlink":   func(path string) error { return os.Symlink(d.Path(), path) },
		"be opened": func(path string) error { return os.WriteFile(path, nil, 0o600) },
		"uid 12345, not": func(path string) error {
			return errors.Join(os.Mkdir(path, 0o700),
				os.Chown(path, 12345, 0))
		},
		// and neither is its parent there
		"cannot be opened": func(path string) error { return nil },
	} {
		path := filepath.Join(t.TempDir(), "peers")
		if what == "cannot be opened" {
			path = filepath.Join(path, "deeper")
		}
		if strings.HasPrefix(what, "uid") && os.Getuid() != 0 {
			continue
		}
		if err := make(path); err != nil {
			t.Fatal(err)
		}
		o, err := OpenPeerDir(path)
		var e *PeerDirError
		if !errors.As(err, &e) || !strings.Contains(err.Error(), what) && what != "symlink" ||
			e.Do == "" {
			t.Errorf("%s: %v", what, err)
		}
		if err == nil {
			o.Close()
		}
	}

	// It goes, and another takes its place.
	if err := os.Rename(d.Path(), d.Path()+"-gone"); err != nil {
		t.Fatal(err)
	}
	if err := d.Current(); err == nil {
		t.Error("it is not there")
	}
	if err := os.Mkdir(d.Path(), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := d.Current(); err == nil {
		t.Error("it is another one")
	}
}

func TestPeerSockets(t *testing.T) {
	d := peerDir(t)
	a := d.listen(t, 0xA, Options{})
	b := d.listen(t, 0xB, Options{})
	for _, name := range []string{"peer-zz.sock", "peer-000000000000000C.sock",
		"peer-0000000000000000.sock", "peer-0000000000000001", "lock", "rank-0"} {
		if err := os.WriteFile(filepath.Join(d.Path(), name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	peers := func() []uint64 {
		t.Helper()
		all, err := d.Peers(nil, 100)
		if err != nil {
			t.Fatal(err)
		}
		slices.Sort(all)
		return all
	}
	if all := peers(); !slices.Equal(all, []uint64{0xA, 0xB}) || !a.Present() || !b.Present() {
		t.Fatalf("%x", all)
	}
	if _, err := d.Dial(0xC, time.Second); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("one that is not there: %v", err)
	}
	info, err := os.Stat(filepath.Join(d.Path(), peerName(0xA)))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}

	// One whose socket was removed listens, but is not there; another of its name stays when it
	// closes.
	if err := os.Remove(filepath.Join(d.Path(), peerName(0xA))); err != nil {
		t.Fatal(err)
	}
	again := d.listen(t, 0xA, Options{})
	if a.Present() || !again.Present() {
		t.Error("which is there")
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	peerPair(t, d, again, 0xA)
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	if all := peers(); !slices.Equal(all, []uint64{0xA}) {
		t.Fatalf("%x", all)
	}

	// A dead one's socket is removed by who finds that nobody listens; one that is being made only
	// when it is old.
	for _, name := range []string{peerName(0xD), "peer-000000000000000e.new",
		"peer-000000000000000f.new"} {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
		if err == nil {
			err = unix.Bind(fd, &unix.SockaddrUnix{Name: filepath.Join(d.Path(), name)})
		}
		if err == nil {
			err = unix.Close(fd)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	old := time.Now().Add(-time.Hour)
	if err := os.Chtimes(filepath.Join(d.Path(), "peer-000000000000000f.new"), old,
		old); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Dial(0xD, time.Second); !errors.Is(err, ErrPeerGone) {
		t.Errorf("a dead one: %v", err)
	}
	if all := peers(); !slices.Equal(all, []uint64{0xA}) {
		t.Fatalf("%x", all)
	}
	left, _ := filepath.Glob(filepath.Join(d.Path(), "*.new"))
	if len(left) != 1 || !strings.HasSuffix(left[0], "e.new") {
		t.Errorf("%v", left)
	}
}

func TestPeersOfAnotherUser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root to be another user")
	}
	d := peerDir(t)
	l := d.listen(t, 0xA, Options{})
	// Let another in by force: credentials refuse it all the same.
	for _, p := range []string{filepath.Dir(d.Path()), d.Path(),
		filepath.Join(d.Path(), peerName(0xA))} {
		if err := os.Chmod(p, 0o777); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Rename(filepath.Join(d.Path(), peerName(0xA)),
		filepath.Join(d.Path(), sessionName)); err != nil {
		t.Fatal(err)
	}
	accepted := make(chan error, 1)
	go func() {
		_, err := l.Accept(t.Context())
		accepted <- err
	}()
	if _, _, said := helper(t, "connect", d.Path(), 12345); said != "refused" {
		t.Errorf("another user is %s", said)
	}
	if st := l.Stats(); st.RefusedUID != 1 {
		t.Errorf("%+v", st)
	}
	l.Close()
	if err := <-accepted; !errors.Is(err, ErrClosed) {
		t.Errorf("%v", err)
	}
}

func TestPeersPassDescriptors(t *testing.T) {
	d := peerDir(t)
	a, b := peerPair(t, d, d.listen(t, 0xA, Options{}), 0xA)
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteString("region"); err != nil {
		t.Fatal(err)
	}
	var fds []int
	if err := errors.Join(a.SendWaiting([]byte("plain")), a.SendWaiting([]byte("with two"),
		int(f.Fd()), int(f.Fd()))); err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{"plain", "with two"} {
		var m []byte
		if m, fds, err = b.RecvFDs(fds); err != nil || string(m) != want || len(fds) != 2*i {
			t.Fatalf("%q, %v, %v", m, fds, err)
		}
	}
	buf := make([]byte, 10)
	n, err := unix.Pread(fds[1], buf, 0)
	if err != nil || string(buf[:n]) != "region" {
		t.Errorf("%q, %v", buf[:n], err)
	}
	if flags, err := unix.FcntlInt(uintptr(fds[0]), unix.F_GETFD, 0); err != nil ||
		flags&unix.FD_CLOEXEC == 0 {
		t.Error("it would be inherited")
	}
	for _, fd := range fds {
		unix.Close(fd)
	}
	// More than are wanted: none is left open (the leak check looks).
	many := slices.Repeat([]int{int(f.Fd())}, wire.MaxHeldFDs+3)
	if err := a.SendWaiting([]byte("many"), many...); err != nil {
		t.Fatal(err)
	}
	if _, fds, err = b.RecvFDs(fds[:0]); !errors.Is(err, ErrOversize) || len(fds) != 0 {
		t.Fatalf("%v, %v", fds, err)
	}
}

func TestPeersTrySend(t *testing.T) {
	d := peerDir(t)
	a, b := peerPair(t, d, d.listen(t, 0xA, Options{}), 0xA)
	msg := make([]byte, wire.MaxPacketBytes)
	n := 0
	for {
		sent, err := b.TrySend(msg)
		if err != nil {
			t.Fatal(err)
		}
		if !sent {
			break
		}
		if n++; n > 1000 {
			t.Fatal("it is never full")
		}
	}
	waited := make(chan error, 1)
	go func() { waited <- b.SendWaiting([]byte("last")) }()
	takeFull(t, a, n)
	if err := <-waited; err != nil {
		t.Fatal(err)
	}
	if m, err := a.Recv(); err != nil || string(m) != "last" {
		t.Fatalf("%d bytes, %v", len(m), err)
	}
	// The end of one side.
	a.EndSending()
	if _, _, err := b.RecvFDs(nil); !errors.Is(err, io.EOF) {
		t.Errorf("%v", err)
	}
	if sent, err := b.TrySend([]byte("returned")); err != nil || !sent {
		t.Errorf("%v, %v", sent, err)
	}
	if m, err := a.Recv(); err != nil || string(m) != "returned" {
		t.Errorf("%q, %v", m, err)
	}
	b.Close()
	<-b.Closed()
	if _, err := b.TrySend(msg); !errors.Is(err, ErrClosed) {
		t.Errorf("%v", err)
	}
	if _, err := a.TrySend(msg); !errors.Is(err, ErrPeerGone) {
		t.Errorf("%v", err)
	}
}

// takeFull takes in the n packets that fill a socket.
func takeFull(t *testing.T, from *Conn, n int) {
	t.Helper()
	for range n {
		if m, err := from.Recv(); err != nil || len(m) != wire.MaxPacketBytes {
			t.Fatalf("%d bytes, %v", len(m), err)
		}
	}
}

// A peer's death is told, also when somebody else keeps its socket open.
func TestPeerDied(t *testing.T) {
	d := peerDir(t)
	l := d.listen(t, 0xA, Options{})
	if err := os.Symlink(peerName(0xA), filepath.Join(d.Path(), sessionName)); err != nil {
		t.Fatal(err)
	}
	cmd, _, child := helper(t, "connect and fork", d.Path(), -1)
	pid, err := strconv.Atoi(child)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Kill(pid, unix.SIGKILL) }()
	c, err := l.Accept(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if c.Died() == nil {
		t.Skip("this kernel does not tell")
	}
	select {
	case <-c.Died():
		t.Fatal("it lives")
	default:
	}
	_ = cmd.Process.Kill()
	<-c.Died()
	<-c.Closed()
}
