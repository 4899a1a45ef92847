package faults

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"lookaside/dax"
	"lookaside/tiers/daxtier"
)

// The pool of DAX devices on files whose memory goes away under it.

// poolOptions are of a pool of slabs of 4 MiB on one file.
func poolOptions(dir string, sizeBytes int64) daxtier.Options {
	return daxtier.Options{
		Devices: []daxtier.DeviceSpec{{Path: filepath.Join(dir, "dax0.0"),
			SizeBytes: sizeBytes}},
		AllowFiles: true, SlabBytes: 4 << 20, RetryEvery: 20 * time.Millisecond,
	}
}

func openPool(t *testing.T, o daxtier.Options) *daxtier.Pool {
	t.Helper()
	p, err := daxtier.Open(o)
	ok(t, err)
	t.Cleanup(func() { _ = p.Close() })
	return p
}

func checkPool(t *testing.T, o daxtier.Options) {
	t.Helper()
	r, err := daxtier.Check(t.Context(), daxtier.CheckOptions{Devices: []string{o.Devices[0].Path}})
	if err != nil || r.Bad() > 0 {
		t.Fatalf("check: %v, %+v", err, r)
	}
}

// neitherLieNorPanic loads, and wants nothing but hits, misses and I/O errors.
func neitherLieNorPanic(t *testing.T, p *daxtier.Pool, from, to int) (hits int) {
	t.Helper()
	for i, err := range loaded(t, p, from, to) {
		switch {
		case err == nil:
			hits++
		case !errors.Is(err, syscall.EIO) && !isMissing(err) && !isCorrupt(err):
			t.Errorf("chunk %d: neither an I/O error nor a miss: %v", from+i, err)
		}
	}
	return hits
}

// Fault 15: somebody cuts the file short while it is mapped, and makes it long again.
func TestPoolCutShort(t *testing.T) {
	t.Parallel()
	o := poolOptions(t.TempDir(), 32<<20)
	p := openPool(t, o)
	capacity := p.Stats().CapacityBytes
	const n = 100
	stored(t, p, 0, n)
	path := o.Devices[0].Path
	for _, left := range []int64{16 << 20, 6 << 20, 0} {
		ok(t, os.Truncate(path, left))
		hits := neitherLieNorPanic(t, p, 0, n)
		if max := int(left / (256 << 10)); hits > max {
			t.Errorf("%d hits in %d bytes", hits, left)
		}
		again := neitherLieNorPanic(t, p, 0, n)
		if again > hits {
			t.Errorf("%d chunks are back", again-hits)
		}
		t.Logf("%d bytes: %d of %d chunks; %+v", left, hits, n, p.Stats())
	}
	for m := n; m < n+80; m += 4 { // may fail: no wrong bytes
		store(t.Context(), p, m, m+4)
		neitherLieNorPanic(t, p, m, m+4)
	}
	ok(t, os.Truncate(path, 32<<20))
	recovers(t, p, capacity)
	ok(t, p.Close())
	p = openPool(t, o)
	neitherLieNorPanic(t, p, 0, n+80)
	recovers(t, p, capacity)
	ok(t, p.Close())
	checkPool(t, o)
}

// Fault 17: the device goes away. Here it is a file of a FUSE file system whose connection is
// aborted.
func TestPoolDeviceRemoved(t *testing.T) {
	need(t)
	if _, err := os.Stat("/dev/fuse"); err != nil {
		t.Skip("SKIPPED: needs /dev/fuse")
	}
	dir := removable(t)
	var st unix.Stat_t
	ok(t, unix.Stat(dir, &st))
	// The second device stays, so that what remains of the pool can be seen.
	o := poolOptions(dir, 16<<20)
	o.Devices = append(o.Devices, daxtier.DeviceSpec{Path: filepath.Join(t.TempDir(), "dax1.0"),
		SizeBytes: 16 << 20})
	p, err := daxtier.Open(o)
	if errors.Is(err, dax.ErrDevice) || errors.Is(err, dax.ErrUnsupported) {
		t.Skipf("SKIPPED: a file of this FUSE cannot be mapped: %v", err)
	}
	ok(t, err)
	t.Cleanup(func() { _ = p.Close() })
	const n = 80
	stored(t, p, 0, n)
	if hits := neitherLieNorPanic(t, p, 0, n); hits != n {
		t.Fatalf("%d of %d chunks are there before anything fails", hits, n)
	}
	if err := abort(t, unix.Minor(st.Dev)); err != nil {
		t.Skipf("SKIPPED: cannot abort the connection: %v", err)
	}
	// What is in the page cache stays readable; what is written can never be synced again, so the
	// device's slabs are given up.
	hits := neitherLieNorPanic(t, p, 0, n)
	failed := 0
	for m := n; m < n+200 && failed < 20; m++ {
		if err := store(t.Context(), p, m, m+1)[0]; err != nil {
			failed++
		}
		neitherLieNorPanic(t, p, m, m+1)
	}
	st2 := p.Stats()
	t.Logf("%d of %d chunks are left, %d stores failed; %+v", hits, n, failed, st2)
	if failed == 0 {
		t.Error("no store failed")
	}
	if !strings.Contains(st2.Detail, "given up") {
		t.Errorf("nothing is given up: %s", st2.Detail)
	}
	for m := 1000; ; m++ { // and the rest serves
		if m == 1200 {
			t.Fatalf("the device that is left does not work: %+v", p.Stats())
		}
		if store(t.Context(), p, m, m+1)[0] == nil && loaded(t, p, m, m+1)[0] == nil {
			break
		}
	}
	if err := p.Close(); err == nil {
		t.Log("Close did not mind")
	}
}

// fuseEnv makes this binary a process that serves one directory under another, both named in it:
// one that serves what it maps itself would wait for itself.
const fuseEnv = "FAULTS_TEST_FUSE"

// removable is a directory whose files can be mapped, of a FUSE file system.
func removable(t *testing.T) (dir string) {
	t.Helper()
	under, dir := t.TempDir(), filepath.Join(t.TempDir(), "fuse")
	ok(t, os.Mkdir(dir, 0o700))
	self, err := os.Executable()
	ok(t, err)
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), fuseEnv+"="+under+"#"+dir)
	out, err := cmd.StdoutPipe()
	ok(t, err)
	ok(t, cmd.Start())
	t.Cleanup(func() {
		_ = unix.Unmount(dir, unix.MNT_DETACH|unix.MNT_FORCE)
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || line != "mounted\n" {
		t.Skipf("SKIPPED: cannot mount FUSE: %s %v", line, err)
	}
	return dir
}

func serveFUSE(dirs string) {
	under, dir, _ := strings.Cut(dirs, "#")
	root, err := fs.NewLoopbackRoot(under)
	if err != nil {
		fmt.Println(err)
		return
	}
	server, err := fs.Mount(dir, &cachedNode{root.(*fs.LoopbackNode)},
		&fs.Options{MountOptions: fuse.MountOptions{DirectMountStrict: true, FsName: "removable",
			Name: "removable"}})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("mounted")
	server.Wait()
}

// cachedNode is a file or directory of a loopback whose files are the kernel's to cache and to map,
// and come to it through the connection.
type cachedNode struct{ *fs.LoopbackNode }

func (n *cachedNode) WrapChild(_ context.Context, child fs.InodeEmbedder) fs.InodeEmbedder {
	return &cachedNode{child.(*fs.LoopbackNode)}
}

func (n *cachedNode) Open(ctx context.Context, flags uint32) (fs.FileHandle, uint32,
	syscall.Errno) {
	h, _, errno := n.LoopbackNode.Open(ctx, flags)
	if errno != 0 {
		return nil, 0, errno
	}
	return cachedHandle{h.(*fs.LoopbackFile)}, 0, 0
}

func (n *cachedNode) Create(ctx context.Context, name string, flags, mode uint32,
	out *fuse.EntryOut) (*fs.Inode, fs.FileHandle, uint32, syscall.Errno) {
	child, h, _, errno := n.LoopbackNode.Create(ctx, name, flags, mode, out)
	if errno != 0 {
		return nil, nil, 0, errno
	}
	return child, cachedHandle{h.(*fs.LoopbackFile)}, 0, 0
}

// cachedHandle has what a LoopbackFile has, but that the kernel may not go to the file below by
// itself.
type cachedHandle struct{ f *fs.LoopbackFile }

func (h cachedHandle) Read(ctx context.Context, p []byte,
	off int64) (fuse.ReadResult, syscall.Errno) {
	return h.f.Read(ctx, p, off)
}

func (h cachedHandle) Write(ctx context.Context, p []byte, off int64) (uint32, syscall.Errno) {
	return h.f.Write(ctx, p, off)
}

func (h cachedHandle) Fsync(ctx context.Context, flags uint32) syscall.Errno {
	return h.f.Fsync(ctx, flags)
}

func (h cachedHandle) Allocate(ctx context.Context, off, n uint64, mode uint32) syscall.Errno {
	return h.f.Allocate(ctx, off, n, mode)
}

func (h cachedHandle) Release(ctx context.Context) syscall.Errno { return h.f.Release(ctx) }

func abort(t *testing.T, connection uint32) error {
	t.Helper()
	const dir = "/sys/fs/fuse/connections"
	file := filepath.Join(dir, strconv.Itoa(int(connection)), "abort")
	if _, err := os.Stat(file); err != nil {
		m := mount(t, "fusectl", "fusectl", "")
		file = filepath.Join(m.dir, strconv.Itoa(int(connection)), "abort")
	}
	return os.WriteFile(file, []byte("1"), 0)
}

// Fault 24: the medium below the file cannot be read.
func TestPoolLoopDeviceTooShort(t *testing.T) {
	need(t, "losetup", "mkfs.ext4")
	device, backing := loop(t, t.TempDir(), 96<<20)
	m := mount(t, device, "ext4", "")
	o := poolOptions(m.dir, 64<<20)
	o.SlabBytes = 32 << 20 // or what is read ahead of the directories is all that there is
	p := openPool(t, o)
	const n = 200
	stored(t, p, 0, n)
	ok(t, p.Close())
	m.unmount() // for the page cache to forget
	m.remount()
	p = openPool(t, o)
	ok(t, os.Truncate(backing, 40<<20))
	hits := neitherLieNorPanic(t, p, 0, n)
	if hits == n || hits == 0 {
		t.Errorf("%d of %d chunks are hits, though half of the device is gone", hits, n)
	}
	if again := neitherLieNorPanic(t, p, 0, n); again > hits {
		t.Errorf("%d chunks are back", again-hits)
	}
	t.Logf("%d of %d chunks; %+v", hits, n, p.Stats())
	_ = p.Close() // what it writes last may fail
	ok(t, os.Truncate(backing, 96<<20))
}

// Fault 21: a file that does not fit is refused before anything is mapped, so that no store into it
// meets a full file system.
func TestPoolFullTmpfs(t *testing.T) {
	need(t)
	m := mount(t, "tmpfs", "tmpfs", "size=20m")
	if _, err := daxtier.Open(poolOptions(m.dir, 32<<20)); !errors.Is(err, dax.ErrNoSpace) ||
		!strings.Contains(err.Error(), "free") {
		t.Fatalf("32 MiB in 20: %v", err)
	}
	ok(t, os.Remove(filepath.Join(m.dir, "dax0.0")))
	o := poolOptions(m.dir, 16<<20)
	p := openPool(t, o)
	stored(t, p, 0, 4)
	filler, err := os.Create(filepath.Join(m.dir, "filler"))
	ok(t, err)
	for err == nil {
		_, err = filler.Write(make([]byte, 64<<10))
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	ok(t, filler.Close())
	for n := 4; n < 200; n += 4 { // around the pool several times
		stored(t, p, n, n+4)
	}
	if n := count(loaded(t, p, 190, 200), isNil); n != 10 {
		t.Errorf("%d of the last 10 chunks are there", n)
	}
	ok(t, p.Close())
	checkPool(t, o)
}
