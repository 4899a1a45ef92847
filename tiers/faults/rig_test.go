package faults

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"lookaside/tiers/vfs"
	"lookaside/tiers/vfs/vfstest"
)

// need skips the test where it is not root or a program is missing, and says so.
func need(t *testing.T, programs ...string) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: needs root, to mount and to set up loop devices")
	}
	for _, p := range programs {
		if _, err := exec.LookPath(p); err != nil {
			t.Skipf("SKIPPED: needs %s, which is not here", p)
		}
	}
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// wait waits until a condition holds.
func wait(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within a minute", what)
		}
	}
}

// command runs a program that has to succeed, and returns what it prints.
func command(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out))
}

// mounted is a directory with something mounted on it.
type mounted struct {
	t      *testing.T
	source string
	dir    string
	fstype string
	up     bool
	cut    bool // the power was cut, and it is not mounted anew yet
}

// mount mounts source on a new directory, or skips the test where the kernel refuses for want of
// the right or of the file system. What is still mounted at the test's end is unmounted.
func mount(t *testing.T, source, fstype, options string) *mounted {
	t.Helper()
	dir := filepath.Join(t.TempDir(), fstype)
	ok(t, os.Mkdir(dir, 0o700))
	if err := unix.Mount(source, dir, fstype, 0, options); err != nil {
		if errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENODEV) {
			t.Skipf("SKIPPED: cannot mount a %s: %v", fstype, err)
		}
		t.Fatal(err)
	}
	m := &mounted{t: t, source: source, dir: dir, fstype: fstype, up: true}
	t.Cleanup(func() {
		if m.up {
			_ = unix.Unmount(dir, unix.MNT_DETACH)
		}
	})
	return m
}

func (m *mounted) unmount() {
	m.t.Helper()
	// With patience: whoever looks at all mounts (an indexer) may hold it.
	for try := 0; ; try++ {
		err := unix.Unmount(m.dir, 0)
		if err == nil {
			m.up = false
			return
		}
		if try == 3000 || !errors.Is(err, unix.EBUSY) {
			m.t.Fatalf("unmount %s: %v", m.dir, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// remount mounts the file system anew, as it is on the medium. Whoever holds a copy of this
// process's mounts, as a container does that is made just now, keeps the one that was unmounted
// alive: then the kernel mounts that again, which is shut down if the power was cut, and takes no
// files. It is let go of after a while.
func (m *mounted) remount() {
	m.t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		ok(m.t, unix.Mount(m.source, m.dir, m.fstype, 0, ""))
		m.up = true
		if !m.cut {
			return
		}
		name := filepath.Join(m.dir, "alive")
		err := os.WriteFile(name, nil, 0o600)
		if err == nil {
			ok(m.t, os.Remove(name))
			m.cut = false
			return
		}
		if time.Now().After(end) {
			m.t.Fatalf("%s cannot be used: %v", m.dir, err)
		}
		m.unmount()
	}
}

// loop sets up a loop device over a sparse file of sizeBytes in dir, with an ext4 on it.
func loop(t *testing.T, dir string, sizeBytes int64) (device, backing string) {
	t.Helper()
	backing = filepath.Join(dir, "image")
	f, err := os.OpenFile(backing, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	ok(t, err)
	ok(t, f.Truncate(sizeBytes))
	ok(t, f.Close())
	out, err := exec.Command("losetup", "--find", "--show", backing).CombinedOutput()
	if err != nil {
		t.Skipf("SKIPPED: no loop device: %v: %s", err, out)
	}
	device = strings.TrimSpace(string(out))
	t.Cleanup(func() {
		if out, err := exec.Command("losetup", "--detach", device).CombinedOutput(); err != nil {
			t.Errorf("losetup --detach %s: %v: %s", device, err, out)
		}
	})
	// Nothing is written later than it must be, so that each byte of the backing file is accounted
	// for at once.
	command(t, "mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard",
		device)
	return device, backing
}

// ext4Shutdown is EXT4_IOC_SHUTDOWN; with noLogFlush the file system stops at once, its journal as
// it is: what a power cut does to it.
const (
	ext4Shutdown = 0x8004587d
	noLogFlush   = 2
)

func powerCut(t *testing.T, m *mounted) {
	t.Helper()
	dir, err := os.Open(m.dir)
	ok(t, err)
	defer dir.Close()
	if err := unix.IoctlSetPointerInt(int(dir.Fd()), ext4Shutdown, noLogFlush); err != nil {
		t.Skipf("SKIPPED: this ext4 cannot be shut down: %v", err)
	}
	m.cut = true
}

// fuseMount serves a directory under another, every read, write, sync and allocation of its files
// through inject (see vfstest.Faulty).
func fuseMount(t *testing.T, inject func(vfstest.Call) vfstest.Fault) (dir string) {
	t.Helper()
	under := t.TempDir()
	dir = filepath.Join(t.TempDir(), "fuse")
	ok(t, os.Mkdir(dir, 0o700))
	root, err := fs.NewLoopbackRoot(under)
	ok(t, err)
	top := &faultyNode{root.(*fs.LoopbackNode), vfstest.Faulty(vfs.OS, inject)}
	server, err := fs.Mount(dir, top,
		&fs.Options{MountOptions: fuse.MountOptions{DirectMountStrict: true, DisableSplice: true,
			MaxWrite: 1 << 20, FsName: "faulty", Name: "faulty"}})
	if err != nil {
		t.Skipf("SKIPPED: cannot mount FUSE: %v", err)
	}
	t.Cleanup(func() {
		for try := 0; ; try++ {
			err := server.Unmount()
			if err == nil {
				return
			}
			if try == 3000 {
				t.Errorf("unmount %s: %v", dir, err)
				_ = unix.Unmount(dir, unix.MNT_DETACH|unix.MNT_FORCE)
				return
			}
			time.Sleep(20 * time.Millisecond)
		}
	})
	return dir
}

// faultyNode is a file or directory of a fuseMount. Its files are opened anew through a faulty vfs,
// and the kernel caches none of their bytes.
type faultyNode struct {
	*fs.LoopbackNode
	faulty vfs.FS
}

func (n *faultyNode) WrapChild(_ context.Context, child fs.InodeEmbedder) fs.InodeEmbedder {
	return &faultyNode{child.(*fs.LoopbackNode), n.faulty}
}

func (n *faultyNode) file(flags uint32) (fs.FileHandle, uint32, syscall.Errno) {
	how := vfs.Flag(0)
	if flags&unix.O_ACCMODE == unix.O_RDONLY {
		how = vfs.ReadOnly
	}
	f, err := n.faulty.OpenFile(filepath.Join(n.RootData.Path, n.Path(n.Root())), how)
	if err != nil {
		return nil, 0, fs.ToErrno(err)
	}
	return &faultyHandle{f: f}, fuse.FOPEN_DIRECT_IO, 0
}

func (n *faultyNode) Open(_ context.Context, flags uint32) (fs.FileHandle, uint32, syscall.Errno) {
	return n.file(flags)
}

func (n *faultyNode) Create(ctx context.Context, name string, flags, mode uint32,
	out *fuse.EntryOut) (*fs.Inode, fs.FileHandle, uint32, syscall.Errno) {
	child, h, _, errno := n.LoopbackNode.Create(ctx, name, flags&^unix.O_DIRECT, mode, out)
	if errno != 0 {
		return nil, nil, 0, errno
	}
	_ = h.(fs.FileReleaser).Release(ctx)
	f, err := n.faulty.OpenFile(filepath.Join(n.RootData.Path, n.Path(n.Root()), name), 0)
	if err != nil {
		return nil, nil, 0, fs.ToErrno(err)
	}
	return child, &faultyHandle{f: f}, fuse.FOPEN_DIRECT_IO, 0
}

type faultyHandle struct{ f vfs.File }

func (h *faultyHandle) Read(_ context.Context, p []byte,
	off int64) (fuse.ReadResult, syscall.Errno) {
	n, err := h.f.ReadAt(p, off)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, fs.ToErrno(underlying(err))
	}
	return fuse.ReadResultData(p[:n]), 0
}

func (h *faultyHandle) Write(_ context.Context, p []byte, off int64) (uint32, syscall.Errno) {
	n, err := h.f.WriteAt(p, off)
	if err != nil {
		return 0, fs.ToErrno(underlying(err))
	}
	return uint32(n), 0
}

func (h *faultyHandle) Fsync(context.Context, uint32) syscall.Errno {
	return fs.ToErrno(underlying(h.f.Datasync()))
}

func (h *faultyHandle) Allocate(_ context.Context, off, n uint64, mode uint32) syscall.Errno {
	if mode != 0 {
		return syscall.EOPNOTSUPP
	}
	return fs.ToErrno(underlying(h.f.Allocate(int64(off), int64(n))))
}

func (h *faultyHandle) Flush(context.Context) syscall.Errno { return 0 }

func (h *faultyHandle) Release(context.Context) syscall.Errno { return fs.ToErrno(h.f.Close()) }

// underlying is the errno in an error, if there is one.
func underlying(err error) error {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno
	}
	return err
}

// switchable is an injector whose fault can be changed at any time.
type switchable struct {
	fault atomic.Pointer[func(vfstest.Call) vfstest.Fault]
	met   atomic.Int64 // operations that a fault was put into
}

func (s *switchable) set(f func(vfstest.Call) vfstest.Fault) {
	if f == nil {
		s.fault.Store(nil)
		return
	}
	s.fault.Store(&f)
}

func (s *switchable) inject(c vfstest.Call) vfstest.Fault {
	f := s.fault.Load()
	if f == nil {
		return vfstest.Fault{}
	}
	fault := (*f)(c)
	if fault != (vfstest.Fault{}) {
		s.met.Add(1)
	}
	return fault
}

// always is a fault in every operation of some kinds.
func always(kinds vfstest.Op, f vfstest.Fault) func(vfstest.Call) vfstest.Fault {
	return func(c vfstest.Call) vfstest.Fault {
		if c.Op&kinds == 0 {
			return vfstest.Fault{}
		}
		return f
	}
}

// straced runs this test binary again, as the child that env makes it, under strace with the given
// injections into its system calls on some files.
func straced(t *testing.T, files, injections []string, env ...string) (output string, err error) {
	t.Helper()
	self, err := os.Executable()
	ok(t, err)
	args := []string{"-f", "-qq", "-o", "/dev/null"}
	for _, f := range files {
		args = append(args, "-P", f)
	}
	for _, i := range injections {
		args = append(args, "-e", i)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "strace", append(args, self)...)
	cmd.Env = append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	if strings.Contains(string(out), "ptrace(PTRACE_") {
		t.Skipf("SKIPPED: strace may not trace here: %s", out)
	}
	if err != nil {
		err = fmt.Errorf("%w\n%s", err, out)
	}
	return string(out), err
}
