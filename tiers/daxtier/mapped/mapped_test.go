package mapped

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"lookaside/dax"
	"lookaside/internal/leak"
	"lookaside/tiers/vfs"
)

const (
	mib = 1 << 20
	// childEnv makes the test binary another process, which mounts what it names and waits to be
	// killed.
	childEnv = "MAPPED_TEST_CHILD"
)

func TestMain(m *testing.M) {
	if name := os.Getenv(childEnv); name != "" {
		err := New(nil).Mount(name, dax.DeviceOptions{Path: name, AllowFile: true})
		fmt.Println(err)
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}
	leak.Main(m)
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func is(t testing.TB, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("error is %v, want %v", err, want)
	}
}

// mounted is a file system with a partition of a file.
func mounted(t testing.TB, path string, sizeBytes int64) *FS {
	t.Helper()
	f := New(nil)
	ok(t, f.Mount(path, dax.DeviceOptions{Path: path, SizeBytes: sizeBytes, AllowFile: true}))
	t.Cleanup(func() { ok(t, f.Close()) })
	return f
}

func open(t testing.TB, f *FS, name string, flags vfs.Flag) vfs.File {
	t.Helper()
	file, err := f.OpenFile(name, flags)
	ok(t, err)
	t.Cleanup(func() { file.Close() })
	return file
}

func write(t testing.TB, f vfs.File, off int64, text string) {
	t.Helper()
	n, err := f.WriteAt([]byte(text), off)
	ok(t, err)
	if n != len(text) {
		t.Fatalf("wrote %d of %d bytes", n, len(text))
	}
}

func read(t testing.TB, f vfs.File, off int64, n int) string {
	t.Helper()
	p := make([]byte, n)
	m, err := f.ReadAt(p, off)
	if err != nil && !errors.Is(err, io.EOF) || (m < n) != (err != nil) {
		t.Fatalf("read %d of %d bytes: %v", m, n, err)
	}
	return string(p[:m])
}

// TestFiles is package vfs's test of that name, less what this file system has not: directories and
// holes.
func TestFiles(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "dev")
	v := mounted(t, dir, mib)
	ok(t, v.MkdirAll(dir))
	ok(t, v.SyncDir(dir))
	is(t, v.MkdirAll(dir+"/sub"), fs.ErrPermission)
	is(t, v.MkdirAll("/elsewhere"), fs.ErrNotExist)
	name := dir + "/f"
	_, err := v.OpenFile(name, 0)
	is(t, err, fs.ErrNotExist)
	_, err = v.OpenFile(dir, 0)
	is(t, err, syscall.EISDIR)
	_, err = v.OpenFile(name, vfs.Create|vfs.Direct)
	is(t, err, vfs.ErrNoDirect)
	_, err = v.OpenFile(dir+"/"+strings.Repeat("n", 25), vfs.Create)
	is(t, err, syscall.ENAMETOOLONG)
	f := open(t, v, name, vfs.Create|vfs.Exclusive)
	_, err = v.OpenFile(name, vfs.Create|vfs.Exclusive)
	is(t, err, fs.ErrExist)
	is(t, v.MkdirAll(name), syscall.ENOTDIR)
	_, err = v.ReadDir(name)
	is(t, err, syscall.ENOTDIR)
	if mem, off := f.DirectAlign(); mem != 1 || off != 1 {
		t.Errorf("aligned to %d, %d", mem, off)
	}

	write(t, f, 5000, "hello")
	if got := read(t, f, 5000, 10); got != "hello" {
		t.Errorf("read %q", got)
	}
	if got := read(t, f, 6000, 1); got != "" {
		t.Errorf("read %q behind the end", got)
	}
	ok(t, f.Allocate(0, 4096))
	if size, err := f.Size(); err != nil || size != 5005 {
		t.Errorf("%d bytes, %v", size, err)
	}
	ok(t, f.Allocate(100, 200<<10))
	if got := read(t, f, 5000, 5); got != "hello" {
		t.Errorf("after growing: %q", got)
	}
	info, err := v.Stat(name)
	if err != nil || info.Dir || info.Size != 100+200<<10 || info.Allocated < info.Size {
		t.Errorf("stat %+v, %v", info, err)
	}
	if info, err := v.Stat(dir); err != nil || !info.Dir {
		t.Errorf("stat of the directory %+v, %v", info, err)
	}
	_, err = v.Stat(dir + "/none")
	is(t, err, fs.ErrNotExist)
	ok(t, f.Truncate(5003))
	if got := read(t, f, 5000, 10); got != "hel" {
		t.Errorf("after cutting: %q", got)
	}
	ok(t, f.Truncate(9000))
	ok(t, f.Datasync())
	ok(t, f.Advise(0, 0, vfs.DontNeed))
	ro := open(t, v, name, vfs.ReadOnly)
	if got := read(t, ro, 5000, 3); got != "hel" {
		t.Errorf("read %q", got)
	}
	if _, err := ro.WriteAt([]byte("x"), 0); err == nil {
		t.Error("wrote to what is open for reading only")
	}
	if ro.Allocate(0, 10000) == nil || ro.Truncate(0) == nil || f.Truncate(-1) == nil ||
		f.Allocate(-1, 5) == nil {
		t.Error("took what makes no sense")
	}
	if _, err := f.ReadAt(nil, -1); err == nil {
		t.Error("read before the beginning")
	}

	other := open(t, v, dir+"/b", vfs.Create)
	write(t, other, 0, "other")
	ok(t, v.Rename(name, dir+"/b"))
	ok(t, v.Rename(dir+"/b", dir+"/b"))
	if got := read(t, f, 5000, 3); got != "hel" {
		t.Errorf("renamed: %q", got)
	}
	if got := read(t, other, 0, 5); got != "other" {
		t.Errorf("replaced, and still open: %q", got)
	}
	is(t, v.Rename(dir+"/none", dir+"/c"), fs.ErrNotExist)
	is(t, v.Rename(dir+"/b", "/elsewhere/c"), fs.ErrNotExist)
	is(t, v.Rename(dir+"/b", dir+"/"+strings.Repeat("n", 25)), syscall.ENAMETOOLONG)
	open(t, v, dir+"/a", vfs.Create)
	names, err := v.ReadDir(dir)
	if err != nil || !slices.Equal(names, []string{"a", "b"}) {
		t.Errorf("%q, %v", names, err)
	}
	ok(t, v.Remove(dir+"/b"))
	is(t, v.Remove(dir+"/b"), fs.ErrNotExist)
	if got := read(t, f, 5000, 3); got != "hel" {
		t.Errorf("removed, and still open: %q", got)
	}
	ok(t, f.Close())
	is(t, f.Close(), fs.ErrClosed)
}

// What is removed while it is open keeps its piece until the last one closes it.
func TestRoom(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "dev")
	v := mounted(t, dir, mib)
	free := func() int64 {
		n, err := v.FreeSpace(dir)
		ok(t, err)
		return n
	}
	whole := free()
	if c, err := v.Capacity(dir); err != nil || c != whole || c != CapacityOf(mib) ||
		c != mib-8192 {
		t.Errorf("capacity %d of %d free, %v", c, whole, err)
	}
	a, b, c := open(t, v, dir+"/a", vfs.Create), open(t, v, dir+"/b", vfs.Create),
		open(t, v, dir+"/c", vfs.Create)
	ok(t, a.Allocate(0, 300<<10))
	ok(t, b.Allocate(0, 300<<10))
	ok(t, c.Allocate(0, 300<<10))
	is(t, c.Allocate(0, 600<<10), syscall.ENOSPC)
	is(t, a.Allocate(0, 301<<10), syscall.ENOSPC) // b is in the way
	if !vfs.IsNoSpace(a.Truncate(301 << 10)) {
		t.Error("a file grew through another")
	}
	_, err := a.WriteAt(make([]byte, 100), 300<<10)
	is(t, err, syscall.ENOSPC)
	ok(t, c.Allocate(0, 400<<10)) // nothing is
	if got := free(); got != whole-1000<<10 {
		t.Errorf("%d bytes are free of %d", got, whole)
	}
	// What is made anew goes where it was, whatever the order.
	ok(t, errors.Join(v.Remove(dir+"/a"), v.Remove(dir+"/c"), a.Close(), c.Close()))
	if got := free(); got != max(300<<10, whole-600<<10) {
		t.Errorf("%d bytes are free in one piece", got)
	}
	c = open(t, v, dir+"/c", vfs.Create)
	ok(t, c.Allocate(0, 400<<10))
	a = open(t, v, dir+"/a", vfs.Create)
	ok(t, a.Allocate(0, 300<<10))
	write(t, b, 0, "still there")
	ok(t, v.Remove(dir+"/b"))
	d := open(t, v, dir+"/b", vfs.Create)
	is(t, d.Allocate(0, 300<<10), syscall.ENOSPC)
	if got := read(t, b, 0, 11); got != "still there" {
		t.Errorf("read %q", got)
	}
	ok(t, b.Close())
	ok(t, d.Allocate(0, 300<<10))
	ok(t, d.Truncate(0))
	ok(t, a.Allocate(0, 600<<10)) // what lay behind it is gone
	for i := range MaxFiles {
		f, err := v.OpenFile(fmt.Sprintf("%s/%d", dir, i), vfs.Create)
		if i >= MaxFiles-3 {
			is(t, err, syscall.ENOSPC)
			continue
		}
		ok(t, err)
		ok(t, f.Close())
	}
}

func TestMounts(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "dev")
	o := dax.DeviceOptions{Path: path, SizeBytes: mib, AllowFile: true}
	v := New(nil)
	ok(t, v.Mount(path, o))
	is(t, v.Mount(path, o), fs.ErrExist)
	if err := New(nil).Mount(path, o); !errors.Is(err, dax.ErrBusy) ||
		!strings.Contains(err.Error(), fmt.Sprintf("process %d ", os.Getpid())) {
		t.Errorf("mounted twice: %v", err)
	}
	f := open(t, v, path+"/f", vfs.Create)
	write(t, f, 0, "hello")
	ok(t, f.Datasync())
	ok(t, v.Unmount(path))
	is(t, v.Unmount(path), fs.ErrNotExist)
	_, err := f.ReadAt(make([]byte, 5), 0)
	is(t, err, fs.ErrClosed)
	_, err = f.WriteAt(make([]byte, 5), 0)
	is(t, err, fs.ErrClosed)
	is(t, f.Datasync(), fs.ErrClosed)
	is(t, f.Truncate(0), fs.ErrClosed)
	is(t, f.Allocate(0, mib/2), fs.ErrClosed)
	_, err = v.OpenFile(path+"/f", 0)
	is(t, err, fs.ErrNotExist)
	_, err = v.Capacity(path)
	is(t, err, fs.ErrNotExist)
	if v.Device(path) != nil {
		t.Error("a device that is unmounted")
	}

	v = mounted(t, path, 0)
	if got := read(t, open(t, v, path+"/f", 0), 0, 5); got != "hello" {
		t.Errorf("mounted again: %q", got)
	}
	if d := v.Device(path); d == nil || d.Size() != mib {
		t.Errorf("device %v", d)
	}
	is(t, New(nil).Mount(dir, dax.DeviceOptions{Path: dir, AllowFile: true}), dax.ErrDevice)
	is(t, New(nil).Mount(path+"2", dax.DeviceOptions{Path: path + "2", AllowFile: true,
		SizeBytes: 8192}), dax.ErrDevice)
}

func TestMountExisting(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "dev")
	o := dax.DeviceOptions{Path: path, AllowFile: true}
	is(t, New(nil).MountExisting(path, o), fs.ErrNotExist)
	ok(t, os.WriteFile(path, make([]byte, 2*mib), 0o600))
	is(t, New(nil).MountExisting(path, o), fs.ErrNotExist)
	v := New(nil)
	o.Ranks = 2
	ok(t, v.Mount("/zero", o))
	o.Rank = 1
	ok(t, v.Mount("/one", o))
	is(t, New(nil).MountExisting(path, dax.DeviceOptions{Path: path, AllowFile: true}), dax.ErrBusy)
	ok(t, v.Close())
	for _, offset := range []int64{0, mib} {
		ok(t, v.MountExisting("/any", dax.DeviceOptions{Path: path, AllowFile: true,
			OffsetBytes: offset}))
		if d := v.Device("/any"); d.Size() != mib || d.Offset() != offset {
			t.Errorf("%d bytes from %d on", d.Size(), d.Offset())
		}
		ok(t, v.Close())
	}
	for _, offset := range []int64{4096, 2 * mib, 100 * mib} {
		is(t, v.MountExisting("/any", dax.DeviceOptions{Path: path, AllowFile: true,
			OffsetBytes: offset}), fs.ErrNotExist)
	}
	is(t, v.MountExisting("/any", dax.DeviceOptions{Path: path}), dax.ErrDevice)
}

func TestLock(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "dev")
	v := mounted(t, path, mib)
	l, err := v.Lock(path + "/lock")
	ok(t, err)
	_, err = v.Lock(path + "/lock")
	var locked *vfs.LockedError
	if !errors.As(err, &locked) || locked.PID != os.Getpid() {
		t.Errorf("locked twice: %v", err)
	}
	ok(t, errors.Join(l.Close(), l.Close()))
	l, err = v.Lock(path + "/lock")
	ok(t, err)
	ok(t, l.Close())
}

// The owner's pid is in the error of who comes second, and its death lets go.
func TestOtherProcess(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "dev")
	v := New(nil)
	ok(t, v.Mount(path, dax.DeviceOptions{Path: path, SizeBytes: mib, AllowFile: true}))
	ok(t, v.Close())
	self, err := os.Executable()
	ok(t, err)
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), childEnv+"="+path)
	stdin, err := cmd.StdinPipe()
	ok(t, err)
	defer stdin.Close()
	stdout, err := cmd.StdoutPipe()
	ok(t, err)
	ok(t, cmd.Start())
	line := make([]byte, 6)
	if _, err := io.ReadFull(stdout, line); err != nil || string(line) != "<nil>\n" {
		t.Fatalf("%q, %v", line, err)
	}
	err = New(nil).Mount(path, dax.DeviceOptions{Path: path, SizeBytes: 192 << 10,
		OffsetBytes: 128 << 10, AllowFile: true})
	if !errors.Is(err, dax.ErrBusy) ||
		!strings.Contains(err.Error(), fmt.Sprintf("process %d ", cmd.Process.Pid)) {
		t.Errorf("mounted: %v", err)
	}
	ok(t, cmd.Process.Kill())
	_ = cmd.Wait()
	mounted(t, path, 0)
}

func TestResize(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "dev")
	v := mounted(t, path, mib)
	a, b := open(t, v, path+"/a", vfs.Create), open(t, v, path+"/b", vfs.Create)
	ok(t, a.Allocate(0, 500<<10))
	ok(t, b.Allocate(0, 500<<10))
	write(t, a, 0, "first")
	write(t, b, 0, "second")
	is(t, v.Resize(path, mib/2), syscall.EBUSY)
	is(t, v.Resize(path+"/a", mib/2), fs.ErrNotExist)
	is(t, v.Resize(path, mib+1), dax.ErrDevice)
	ok(t, v.Resize(path, 2*mib))
	if n, err := v.Capacity(path); err != nil || n != CapacityOf(2*mib) {
		t.Errorf("capacity %d, %v", n, err)
	}
	ok(t, b.Allocate(0, mib))
	ok(t, v.Remove(path+"/b"))
	is(t, v.Resize(path, mib/2+64<<10), syscall.EBUSY) // it is open
	ok(t, b.Close())
	ok(t, v.Resize(path, mib/2+64<<10))
	if got := read(t, a, 0, 5); got != "first" {
		t.Errorf("read %q", got)
	}
	ok(t, v.Unmount(path))
	// Mounted smaller than it is, what lies behind the end is dropped.
	w := New(nil)
	ok(t, w.Mount(path, dax.DeviceOptions{Path: path, SizeBytes: 64 << 10, AllowFile: true}))
	names, err := w.ReadDir(path)
	if err != nil || len(names) != 0 {
		t.Errorf("%q, %v", names, err)
	}
	ok(t, w.Close())
	is(t, w.Resize(path, mib), fs.ErrNotExist)
}

// What is in a file that is not ours stays; a damaged header of ours starts empty; another version
// is refused.
func TestForeign(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "dev")
	o := dax.DeviceOptions{Path: path, AllowFile: true}
	text := bytes.Repeat([]byte("precious"), mib/8)
	ok(t, os.WriteFile(path, text, 0o600))
	is(t, New(nil).Mount(path, o), ErrForeign)
	if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, text) {
		t.Errorf("what was there has changed: %v", err)
	}
	ok(t, os.WriteFile(path, make([]byte, mib), 0o600))
	v := New(nil)
	ok(t, v.Mount(path, o))
	f, err := v.OpenFile(path+"/f", vfs.Create)
	ok(t, err)
	ok(t, errors.Join(f.Allocate(0, 4096), f.Close(), v.Close()))
	good, err := os.ReadFile(path)
	ok(t, err)
	mount := func(change func(b []byte)) ([]string, error) {
		b := bytes.Clone(good)
		change(b)
		ok(t, os.WriteFile(path, b, 0o600))
		v := New(nil)
		if err := v.Mount(path, o); err != nil {
			return nil, err
		}
		names, err := v.ReadDir(path)
		return names, errors.Join(err, v.Close())
	}
	for i := range 2 {
		names, err := mount(func(b []byte) { b[i*blockBytes+100] ^= 1 })
		if err != nil || len(names) != 1 {
			t.Errorf("copy %d is torn: %q, %v", i, names, err)
		}
	}
	names, err := mount(func(b []byte) { b[100] ^= 1; b[blockBytes+100] ^= 1 })
	if err != nil || len(names) != 0 {
		t.Errorf("both copies are torn: %q, %v", names, err)
	}
	names, err = mount(func(b []byte) {
		copy(b, b[blockBytes:2*blockBytes])
		clear(
			b[blockBytes : 2*blockBytes])
	})
	if err != nil || len(names) > 1 {
		t.Errorf("a copy is in the wrong place: %q, %v", names, err)
	}
	names, err = mount(func(b []byte) { b[8]++; b[blockBytes+8]++ })
	if err != nil || len(names) != 0 {
		t.Errorf("a bit of both versions has flipped: %q, %v", names, err)
	}
	_, err = mount(func(b []byte) {
		for _, at := range []int{0, blockBytes} { // what another version writes has its own sum
			b[at+8]++
			b[at+20]++
		}
	})
	is(t, err, ErrVersion)
	// That of a partition elsewhere in the device is none of this one.
	ok(t, os.WriteFile(path, append(make([]byte, mib), good...), 0o600))
	v = New(nil)
	o.OffsetBytes = mib
	ok(t, v.Mount(path, o))
	names, err = v.ReadDir(path)
	if err != nil || len(names) != 0 {
		t.Errorf("%q, %v", names, err)
	}
	ok(t, v.Close())
}

// behindCut reports whether an offset is of the first bytes that are gone of a file that begins
// behind the headers, on memory that was cut at 1 MiB. Copies read four pages side by side: which
// of them faults first depends on the processor.
func behindCut(off int64) bool { return off >= mib-headBytes && off < mib-headBytes+4*4096 }

// A file that was cut short is an error of the call, and the process lives: fault 15.
func TestCutShort(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "dev")
	v := New(nil)
	ok(t, v.Mount(path, dax.DeviceOptions{Path: path, SizeBytes: 4 * mib, AllowFile: true}))
	f := open(t, v, path+"/f", vfs.Create)
	ok(t, f.Allocate(0, 3*mib))
	text := bytes.Repeat([]byte{7}, 3*mib)
	_, err := f.WriteAt(text, 0)
	ok(t, err)
	ok(t, os.Truncate(path, mib))
	_, err = f.ReadAt(make([]byte, 3*mib), 0)
	is(t, err, syscall.EIO)
	var bad *vfs.BadPlaceError
	if errors.Is(err, dax.ErrFault) || !errors.As(err, &bad) || !behindCut(bad.Off) {
		t.Errorf("the caller would be blamed, or another place: %v, %+v", err, bad)
	}
	_, err = f.WriteAt(text, 0)
	is(t, err, syscall.EIO)
	if got := read(t, f, 5, 3); got != "\x07\x07\x07" {
		t.Errorf("what is left of it: %q", got)
	}
	// Nor is the partition blamed for the caller's memory.
	gone, err := dax.Create(t.Context(), dax.Options{Kind: dax.KindFile, Path: path + "2",
		SizeBytes: mib,
		NUMANode:  dax.NoNUMANode})
	ok(t, err)
	ok(t, os.Truncate(path+"2", 0))
	_, err = f.ReadAt(gone.Bytes()[:1000], 0)
	if !errors.Is(err, dax.ErrFault) || errors.Is(err, syscall.EIO) {
		t.Errorf("the caller's memory is gone: %v", err)
	}
	ok(t, gone.Close())
	ok(t, os.Truncate(path, 0))
	_, err = f.ReadAt(make([]byte, 10), 10000)
	is(t, err, syscall.EIO)
	if errors.As(err, &bad) {
		t.Errorf("a place is blamed, and nothing is left: %v", err)
	}
	_, err = v.OpenFile(path+"/g", vfs.Create)
	is(t, err, syscall.EIO)
	if _, err := v.OpenFile(path+"/f", 0); err != nil {
		t.Errorf("what needs no header: %v", err)
	}
	if v.Close() == nil {
		t.Error("closed as if nothing had been")
	}
}

// TestAgainstBytes does the same at random to files and to byte slices.
func TestAgainstBytes(t *testing.T) {
	t.Parallel()
	for seed := range uint64(6) {
		rnd := rand.New(rand.NewPCG(seed, 5))
		dir := filepath.Join(t.TempDir(), "dev")
		v := New(nil)
		mount := func() {
			ok(t, v.Mount(dir, dax.DeviceOptions{Path: dir, SizeBytes: 2 * mib,
				AllowFile: true}))
		}
		mount()
		model := map[string][]byte{}
		for step := range 400 {
			name := string(rune('a' + rnd.IntN(5)))
			where := fmt.Sprintf("seed %d step %d file %s", seed, step, name)
			want, have := model[name]
			switch k := rnd.IntN(20); {
			case k == 0:
				ok(t, v.Unmount(dir))
				mount()
			case k == 1 && have:
				ok(t, v.Remove(dir+"/"+name))
				delete(model, name)
			case k == 2 && have:
				to := string(rune('a' + rnd.IntN(5)))
				ok(t, v.Rename(dir+"/"+name, dir+"/"+to))
				delete(model, name)
				model[to] = want
			default:
				f, err := v.OpenFile(dir+"/"+name, vfs.Create)
				ok(t, err)
				switch {
				case k < 6:
					size := int64(rnd.IntN(300 << 10))
					switch err := f.Truncate(size); {
					case err == nil && size <= int64(len(want)):
						want = want[:size]
					case err == nil: // what was there before
						more := make([]byte, size-int64(len(want)))
						_, err := f.ReadAt(more, int64(len(want)))
						ok(t, err)
						want = append(want, more...)
					case !vfs.IsNoSpace(err):
						t.Fatalf("%s: %v", where, err)
					}
				default:
					p := make([]byte, rnd.IntN(100<<10))
					for i := range p {
						p[i] = byte(rnd.Uint32())
					}
					at := rnd.IntN(len(want) + 1)
					switch _, err := f.WriteAt(p, int64(at)); {
					case err == nil:
						want = append(want[:at:at],
							append(p, want[min(at+len(p), len(want)):]...)...)
					case !vfs.IsNoSpace(err):
						t.Fatalf("%s: %v", where, err)
					}
				}
				model[name] = want
				got := make([]byte, len(want))
				if _, err := f.ReadAt(got, 0); err != nil || !bytes.Equal(got, want) {
					t.Fatalf("%s: %v", where, err)
				}
				ok(t, f.Datasync())
				ok(t, f.Close())
			}
			if step%40 == 0 {
				names, err := v.ReadDir(dir)
				ok(t, err)
				if len(names) != len(model) {
					t.Fatalf("%s: %q, want %d", where, names, len(model))
				}
				for name, want := range model {
					f, err := v.OpenFile(dir+"/"+name, vfs.ReadOnly)
					ok(t, err)
					got := make([]byte, len(want))
					if _, err := f.ReadAt(got, 0); err != nil || !bytes.Equal(got, want) {
						t.Fatalf("%s: %s is wrong: %v", where, name, err)
					}
					ok(t, f.Close())
				}
			}
		}
		ok(t, v.Close())
	}
}

func FuzzDecodeHeader(f *testing.F) {
	h := &header{pid: 1, offset: 4096, size: mib, epoch: 3,
		files: []entry{{"slab-000", headBytes, 4096, 100}, {"lock", 0, 0, 0}}}
	good := append(make([]byte, blockBytes), h.encode()...)
	f.Add(good, int64(4096))
	f.Add(make([]byte, headBytes), int64(0))
	f.Fuzz(func(t *testing.T, b []byte, offset int64) {
		b = append(b, make([]byte, headBytes)...)[:headBytes]
		h, err := decodeHeader(b, offset)
		if err != nil {
			return
		}
		// Encoded again it is what it was, and all is in its place.
		end := int64(headBytes)
		for _, e := range h.pieces() {
			if e.at < end || e.size > e.capacity || e.capacity <= 0 {
				t.Fatalf("files %+v", h.files)
			}
			end = e.at + e.capacity
		}
		again, err := decodeCopy(h.encode())
		if err != nil || again.epoch != h.epoch || !slices.Equal(again.files, h.files) {
			t.Fatalf("%+v became %+v: %v", h, again, err)
		}
	})
}
