package vfstest

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
	"strconv"
	"strings"
	"syscall"
	"testing"

	"lookaside/internal/leak"
	"lookaside/tiers/vfs"
)

func TestMain(m *testing.M) {
	if name := os.Getenv("VFS_TEST_LOCK"); name != "" {
		// the other process of TestLockOfAnotherProcess
		l, err := vfs.OS.Lock(name)
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println("locked")
		_, _ = io.Copy(io.Discard, os.Stdin)
		_ = l // not closed: death lets go of it
		os.Exit(0)
	}
	leak.Main(m)
}

// both runs a test on the real file system and on that in memory.
func both(t *testing.T, test func(t *testing.T, fs vfs.FS, dir string)) {
	t.Run("os", func(t *testing.T) { test(t, vfs.OS, t.TempDir()) })
	t.Run("mem", func(t *testing.T) {
		m := NewMem()
		if err := m.MkdirAll("/a/b"); err != nil {
			t.Fatal(err)
		}
		test(t, m, "/a/b")
	})
	t.Run("faulty", func(t *testing.T) { // without faults
		test(t, Faulty(vfs.OS, func(Call) Fault { return Fault{} }), t.TempDir())
	})
}

func ok(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func is(t *testing.T, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("error is %v, want %v", err, want)
	}
}

func open(t *testing.T, fs vfs.FS, name string, flags vfs.Flag) vfs.File {
	t.Helper()
	f, err := fs.OpenFile(name, flags)
	ok(t, err)
	t.Cleanup(func() { f.Close() })
	return f
}

func write(t *testing.T, f vfs.File, off int64, text string) {
	t.Helper()
	n, err := f.WriteAt([]byte(text), off)
	ok(t, err)
	if n != len(text) {
		t.Fatalf("wrote %d of %d bytes", n, len(text))
	}
}

func read(t *testing.T, f vfs.File, off int64, n int) string {
	t.Helper()
	p := make([]byte, n)
	m, err := f.ReadAt(p, off)
	if err != nil && !errors.Is(err, io.EOF) || (m < n) != (err != nil) {
		t.Fatalf("read %d of %d bytes: %v", m, n, err)
	}
	return string(p[:m])
}

func TestFiles(t *testing.T) {
	both(t, func(t *testing.T, fsys vfs.FS, dir string) {
		sub := dir + "/x/y"
		ok(t, fsys.MkdirAll(sub))
		ok(t, fsys.MkdirAll(sub))
		name := sub + "/f"
		_, err := fsys.OpenFile(name, 0)
		is(t, err, fs.ErrNotExist)
		f := open(t, fsys, name, vfs.Create|vfs.Exclusive)
		_, err = fsys.OpenFile(name, vfs.Create|vfs.Exclusive)
		is(t, err, fs.ErrExist)
		_, err = fsys.OpenFile(sub, 0)
		is(t, err, syscall.EISDIR)
		is(t, fsys.MkdirAll(name), syscall.ENOTDIR)
		is(t, fsys.MkdirAll(name+"/z"), syscall.ENOTDIR)

		write(t, f, 5000, "hello")
		if got := read(t, f, 4998, 10); got != "\x00\x00hello" {
			t.Errorf("read %q", got)
		}
		if got := read(t, f, 6000, 1); got != "" {
			t.Errorf("read %q behind the end", got)
		}
		ok(t, f.Allocate(0, 4096)) // changes no byte, nor the size
		size, err := f.Size()
		ok(t, err)
		if got := read(t, f, 5000, 5); size != 5005 || got != "hello" {
			t.Errorf("after allocating: %d bytes, %q", size, got)
		}
		ok(t, f.Allocate(4096, 20000))
		info, err := fsys.Stat(name)
		ok(t, err)
		if info.Size != 24096 || info.Allocated < 24096 || info.Dir {
			t.Errorf("allocated: %+v", info)
		}
		if got := read(t, f, 5000, 10); got != "hello\x00\x00\x00\x00\x00" {
			t.Errorf("after growing: %q", got)
		}
		ok(t, f.Truncate(5003))
		ok(t, f.Truncate(5005))
		if got := read(t, f, 5000, 10); got != "hel\x00\x00" {
			t.Errorf("after cutting: %q", got)
		}
		ok(t, f.Datasync())
		ok(t, f.Advise(0, 0, vfs.DontNeed))
		ok(t, f.Advise(0, 4096, vfs.Sequential))
		ok(t, f.Advise(0, 4096, vfs.Random))
		if mem, off := f.DirectAlign(); mem != 1 || off != 1 {
			t.Errorf("alignment %d, %d of a file that is not direct", mem, off)
		}

		r := open(t, fsys, name, vfs.ReadOnly)
		if got := read(t, r, 5000, 3); got != "hel" {
			t.Errorf("read %q", got)
		}
		_, err = r.WriteAt([]byte("x"), 0)
		is(t, err, syscall.EBADF)

		is(t, fsys.Rename(name+"no", name), fs.ErrNotExist)
		g := open(t, fsys, sub+"/g", vfs.Create)
		write(t, g, 0, "g")
		ok(t, fsys.Rename(name, sub+"/g")) // takes the place of the old g, which is still open
		ok(t, fsys.SyncDir(sub))
		if got := read(t, g, 0, 2); got != "g" {
			t.Errorf("what was replaced: %q", got)
		}
		names, err := fsys.ReadDir(sub)
		ok(t, err)
		if !slices.Equal(names, []string{"g"}) {
			t.Errorf("the directory has %q", names)
		}
		if err := fsys.Remove(sub); err == nil {
			t.Error("removed a directory that is not empty")
		}
		ok(t, fsys.Remove(sub+"/g"))
		is(t, fsys.Remove(sub+"/g"), fs.ErrNotExist)
		ok(t, fsys.Remove(sub))
		_, err = fsys.Stat(sub)
		is(t, err, fs.ErrNotExist)
		_, err = fsys.ReadDir(sub)
		is(t, err, fs.ErrNotExist)
		free, err := fsys.FreeSpace(dir)
		ok(t, err)
		if free <= 0 {
			t.Errorf("%d bytes are free", free)
		}
	})
}

// Direct I/O gives and takes the same bytes, or is refused with the one error that says so.
func TestDirect(t *testing.T) {
	both(t, func(t *testing.T, fsys vfs.FS, dir string) {
		f, err := fsys.OpenFile(dir+"/f", vfs.Create|vfs.Direct)
		if errors.Is(err, vfs.ErrNoDirect) {
			t.Skip("no direct I/O under", dir)
		}
		ok(t, err)
		defer f.Close()
		mem, off := f.DirectAlign()
		if mem < 1 || off < 512 || mem&(mem-1) != 0 || off&(off-1) != 0 {
			t.Fatalf("alignment %d, %d", mem, off)
		}
		want := bytes.Repeat([]byte("0123456789abcdef"), 1<<12)
		p := alignedCopy(f, want)
		_, err = f.WriteAt(p, int64(off))
		ok(t, err)
		q := alignedCopy(f, make([]byte, len(p)))
		_, err = f.ReadAt(q, int64(off))
		ok(t, err)
		if !bytes.Equal(q, want) {
			t.Error("other bytes than were written")
		}
		if g := open(t, fsys, dir+"/f", vfs.ReadOnly); read(t, g, int64(off), len(want)) != string(
			want) {
			t.Error("other bytes without direct")
		}
	})
	t.Run("refused", func(t *testing.T) {
		m := NewMem()
		m.Align = 0
		_, err := m.OpenFile("/f", vfs.Create|vfs.Direct)
		is(t, err, vfs.ErrNoDirect)
	})
	t.Run("misaligned", func(t *testing.T) {
		m := NewMem()
		f := open(t, m, "/f", vfs.Create|vfs.Direct)
		p := alignedCopy(f, make([]byte, 1024))
		for _, c := range []struct {
			p   []byte
			off int64
		}{{p[:512], 1}, {p[:100], 0}, {p[8:520], 0}, {p, -512}} {
			_, err := f.WriteAt(c.p, c.off)
			is(t, err, syscall.EINVAL)
			_, err = f.ReadAt(c.p, c.off)
			is(t, err, syscall.EINVAL)
		}
	})
}

func TestLock(t *testing.T) {
	both(t, func(t *testing.T, fsys vfs.FS, dir string) {
		name := dir + "/lock"
		l, err := fsys.Lock(name)
		ok(t, err)
		_, err = fsys.Lock(name)
		var locked *vfs.LockedError
		if !errors.As(err, &locked) || locked.PID != os.Getpid() ||
			!strings.Contains(err.Error(), name+": locked by process "+strconv.Itoa(os.Getpid())) {
			t.Errorf("the second lock: %v", err)
		}
		ok(t, l.Close())
		l, err = fsys.Lock(name)
		ok(t, err)
		ok(t, l.Close())
	})
}

func TestLockOfAnotherProcess(t *testing.T) {
	name := filepath.Join(t.TempDir(), "lock")
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "VFS_TEST_LOCK="+name)
	in, err := cmd.StdinPipe()
	ok(t, err)
	out, err := cmd.StdoutPipe()
	ok(t, err)
	ok(t, cmd.Start())
	defer in.Close()
	line := make([]byte, 7)
	_, err = io.ReadFull(out, line)
	ok(t, err)
	_, err = vfs.OS.Lock(name)
	var locked *vfs.LockedError
	if !errors.As(err, &locked) || locked.PID != cmd.Process.Pid {
		t.Errorf("%v, want the pid %d", err, cmd.Process.Pid)
	}
	ok(t, cmd.Process.Kill())
	_ = cmd.Wait()
	l, err := vfs.OS.Lock(name)
	ok(t, err)
	ok(t, l.Close())
}

// A model that keeps every version of every sector since it was last synced, against clones made at
// random moments.
func TestCrashClone(t *testing.T) {
	const seed, sectors, rounds = 1, 40, 400
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	m := NewMem()
	f := open(t, m, "/f", vfs.Create)
	ok(t, f.Allocate(0, sectors*memSector))
	ok(t, f.Datasync())
	ok(t, m.SyncDir("/"))
	may := make([]map[byte]bool, sectors) // what each sector may be full of
	now := make([]byte, sectors)
	for i := range may {
		may[i] = map[byte]bool{0: true}
	}
	seen := map[string]int{}
	for range rounds {
		switch at, n := rnd.IntN(sectors), 1+rnd.IntN(12); {
		case rnd.IntN(6) == 0:
			ok(t, f.Datasync())
			for i := range may {
				may[i] = map[byte]bool{now[i]: true}
			}
		default:
			n = min(n, sectors-at)
			v := byte(rnd.Uint32())
			_, err := f.WriteAt(bytes.Repeat([]byte{v}, n*memSector), int64(at*memSector))
			ok(t, err)
			for i := at; i < at+n; i++ {
				may[i][v], now[i] = true, v
			}
		}
		seed := rnd.Uint64()
		c := m.CrashClone(seed)
		g := open(t, c, "/f", 0)
		got := read(t, g, 0, sectors*memSector)
		if again := open(t, m.CrashClone(seed), "/f", 0); read(t, again, 0,
			sectors*memSector) != got {
			t.Fatal("a seed gives two clones")
		}
		for i := range may {
			s := got[i*memSector : (i+1)*memSector]
			if strings.Trim(s, s[:1]) != "" {
				t.Fatalf("sector %d is torn", i)
			}
			if !may[i][s[0]] {
				t.Fatalf("sector %d has %d, which it never had since the sync", i, s[0])
			}
			if len(may[i]) > 1 {
				seen[map[bool]string{true: "kept", false: "lost"}[s[0] == now[i]]]++
			}
		}
		if whole := open(t, m.Clone(), "/f", 0); read(t, whole, 0, sectors*memSector) != read(t, f,
			0, sectors*memSector) {
			t.Fatal("a clone without a crash differs")
		}
		write(t, g, 0, "independent")
		if read(t, f, 0, 11) == "independent" {
			t.Fatal("a clone shares bytes with what it was made from")
		}
	}
	if seen["kept"] < 1000 || seen["lost"] < 1000 {
		t.Errorf("the clones are one-sided: %v", seen)
	}
}

func TestCrashOfDirectories(t *testing.T) {
	seen := map[string]bool{}
	m := NewMem()
	ok(t, m.MkdirAll("/d"))
	write(t, open(t, m, "/d/synced", vfs.Create), 0, "x")
	ok(t, m.SyncDir("/d"))
	open(t, m, "/d/new", vfs.Create)
	ok(t, m.Rename("/d/new", "/d/renamed"))
	ok(t, m.Remove("/d/synced"))
	for seed := range uint64(200) {
		names, err := m.CrashClone(seed).ReadDir("/d")
		ok(t, err)
		seen[strings.Join(names, " ")] = true
	}
	for _, want := range []string{"synced", "new synced", "renamed synced", "renamed"} {
		if !seen[want] {
			t.Errorf("never left %q", want)
		}
		delete(seen, want)
	}
	if len(seen) > 0 {
		t.Errorf("left what never was: %v", seen)
	}
	// A directory that was synced does not save the bytes of a file that was not.
	seen = map[string]bool{}
	ok(t, m.SyncDir("/d"))
	f := open(t, m, "/d/renamed", 0)
	write(t, f, 0, "x")
	for seed := range uint64(100) {
		seen[read(t, open(t, m.CrashClone(seed), "/d/renamed", 0), 0, 2)] = true
	}
	if len(seen) != 2 || !seen[""] || !seen["x"] {
		t.Errorf("unsynced bytes: %v", seen)
	}
}

func TestMemFull(t *testing.T) {
	m := NewMem()
	m.SpaceBytes = 10 * memBlock
	f := open(t, m, "/f", vfs.Create)
	ok(t, f.Allocate(0, 8*memBlock))
	is(t, f.Allocate(8*memBlock, 3*memBlock), syscall.ENOSPC)
	if !vfs.IsNoSpace(f.Allocate(0, 11*memBlock)) {
		t.Error("not the error of a full disk")
	}
	write(t, f, 7*memBlock, strings.Repeat("x", memBlock)) // has its block
	_, err := f.WriteAt(make([]byte, 3*memBlock), 8*memBlock)
	is(t, err, syscall.ENOSPC)
	g := open(t, m, "/g", vfs.Create)
	write(t, g, 0, strings.Repeat("x", 2*memBlock))
	free := func() int64 {
		n, err := m.FreeSpace("/")
		ok(t, err)
		return n
	}
	if free() != 0 {
		t.Errorf("%d bytes are free", free())
	}
	ok(t, f.Truncate(memBlock))
	if free() != 7*memBlock {
		t.Errorf("%d bytes are free after cutting", free())
	}
	ok(t, m.Remove("/g"))
	if free() != 7*memBlock {
		t.Errorf("%d bytes are free while a removed file is open", free())
	}
	ok(t, g.Close())
	if free() != 9*memBlock || m.Clone().used != memBlock {
		t.Errorf("%d bytes are free after removing", free())
	}
}

func TestOnWrite(t *testing.T) {
	m := NewMem()
	n := 0
	m.OnWrite(func() { n++; m.CrashClone(uint64(n)) })
	f := open(t, m, "/f", vfs.Create)
	write(t, f, 0, "x")
	ok(t, f.Datasync())
	ok(t, f.Allocate(0, 10))
	ok(t, f.Truncate(3))
	ok(t, m.SyncDir("/"))
	ok(t, m.Rename("/f", "/g"))
	ok(t, m.Remove("/g"))
	if n != 8 {
		t.Errorf("called %d times for 8 changes", n)
	}
}

func TestFaults(t *testing.T) {
	m := NewMem()
	var next Fault
	fsys := Faulty(m, func(c Call) Fault {
		if c.Op&(OpRead|OpWrite|OpSync) == 0 {
			return Fault{}
		}
		f := next
		next = Fault{}
		return f
	})
	f := open(t, fsys, "/f", vfs.Create|vfs.Direct)
	p := alignedCopy(f, bytes.Repeat([]byte{'a'}, 2048))
	put := func(fault Fault, off int64) error {
		next = fault
		_, err := f.WriteAt(p, off)
		return err
	}
	under := open(t, m, "/f", 0)
	a, none := strings.Repeat("a", 1024), strings.Repeat("\x00", 1024)
	ok(t, f.Truncate(8192))

	is(t, put(Fault{Err: syscall.EIO}, 0), syscall.EIO)
	if read(t, under, 0, 2048) != none+none {
		t.Error("a write that failed wrote")
	}
	ok(t, put(Fault{Torn: true}, 0))
	if read(t, under, 0, 2048) != a+none {
		t.Error("a torn write is not half")
	}
	is(t, put(Fault{Torn: true, Err: syscall.ENOSPC}, 2048), syscall.ENOSPC)
	if read(t, under, 2048, 2048) != a+none {
		t.Error("a torn write that fails is not half")
	}
	ok(t, put(Fault{Shift: 512}, 4096))
	if read(t, under, 4096, 1024) != none[:512]+a[:512] {
		t.Error("the write is not where it was misdirected to")
	}
	ok(t, put(Fault{Shift: -512}, 0)) // before the beginning: goes behind instead
	if read(t, under, 512, 2048) != a+a {
		t.Error("the write is not where it was misdirected to")
	}
	ok(t, put(Fault{Flip: 8 * 3}, 0))
	if got := read(t, under, 0, 2048); got[3] != 'a'^1 || strings.Count(got, "a") != 2047 ||
		bytes.Count(p, []byte("a")) != 2048 {
		t.Errorf("a flipped bit on the way down: %q…", got[:8])
	}
	q := alignedCopy(f, make([]byte, 512))
	get := func(fault Fault) error {
		next = fault
		_, err := f.ReadAt(q, 0)
		return err
	}
	ok(t, get(Fault{Flip: 8 * 3}))
	if string(q) != a[:512] {
		t.Error("two flips are not none")
	}
	ok(t, get(Fault{Shift: 512}))
	if string(q) != a[:512] {
		t.Error("a misdirected read reads what it should")
	}
	is(t, get(Fault{Err: syscall.EIO}), syscall.EIO)

	// After a sync that failed a later one saves only what was written since.
	ok(t, f.Datasync())
	for i := range int64(4) {
		ok(t, put(Fault{}, 8192+i*memBlock))
	}
	next = Fault{Err: syscall.EIO}
	is(t, f.Datasync(), syscall.EIO)
	ok(t, f.Datasync())
	ok(t, m.SyncDir("/"))
	kept := 0
	got := read(t, open(t, m.CrashClone(1), "/f", 0), 0, 8192+4*memBlock)
	for at := 8192; at < len(got); at += memSector {
		if got[at] == 'a' {
			kept++
		}
	}
	if kept == 4*2048/memSector {
		t.Error("a sync that failed lost nothing")
	}
	if read(t, under, 8192, 1024) != a {
		t.Error("what a failed sync lost is not read as before")
	}
}

// Every operation can be made to fail, and says so with its name.
func TestEveryOperationFails(t *testing.T) {
	ops := func(fsys vfs.FS) []error {
		var errs []error
		did := func(err error) { errs = append(errs, err) }
		did(fsys.MkdirAll("/d"))
		f, err := fsys.OpenFile("/d/f", vfs.Create)
		did(err)
		if err == nil {
			defer f.Close()
			_, err = f.WriteAt([]byte("x"), 0)
			did(err)
			_, err = f.ReadAt([]byte("y"), 0)
			did(err)
			did(f.Allocate(0, 1))
			did(f.Truncate(1))
			did(f.Datasync())
			_, err = f.Size()
			did(err)
		}
		did(fsys.SyncDir("/d"))
		_, err = fsys.ReadDir("/d")
		did(err)
		_, err = fsys.Stat("/d")
		did(err)
		_, err = fsys.FreeSpace("/d")
		did(err)
		l, err := fsys.Lock("/d/l")
		did(err)
		if err == nil {
			did(l.Close())
		}
		did(fsys.Rename("/d/f", "/d/g"))
		did(fsys.Remove("/d/g"))
		return errs
	}
	for _, err := range ops(NewMem()) {
		ok(t, err)
	}
	n := int64(1)
	for ; ; n++ {
		c := &Counter{Kinds: OpAny, N: n, Fault: Fault{Err: syscall.EIO}}
		errs := ops(Faulty(NewMem(), c.Inject))
		if !c.Met() {
			break
		}
		failed := slices.DeleteFunc(errs,
			func(err error) bool { return !errors.Is(err, syscall.EIO) })
		if len(failed) != 1 {
			t.Errorf("operation %d: %d failed", n, len(failed))
		} else if !strings.Contains(failed[0].Error(), "/d") {
			t.Errorf("%v says not where", failed[0])
		}
	}
	if n != 16 {
		t.Errorf("%d operations could fail, want 15", n-1)
	}
	c := &Counter{Kinds: OpRead | OpSync, N: 1, Stays: true, Fault: Fault{Err: syscall.EIO}}
	failed := slices.DeleteFunc(ops(Faulty(NewMem(), c.Inject)),
		func(err error) bool { return err == nil })
	if len(failed) != 2 {
		t.Errorf("%d failed, want the read and the sync", len(failed))
	}
}

// Files in memory against plain bytes, over several leaves, with syncs and crashes between that
// must cost nothing that was synced.
func TestMemAgainstBytes(t *testing.T) {
	const seed = 1
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 1))
	m := NewMem()
	f := open(t, m, "/f", vfs.Create)
	ok(t, m.SyncDir("/"))
	var want []byte
	grow := func(n int) {
		if n > len(want) {
			want = append(want, make([]byte, n-len(want))...)
		}
	}
	const most = 3*int(leafBytes) + 1000
	for i := range 150 {
		off, n := rnd.IntN(most), 1+rnd.IntN(most/(1+rnd.IntN(100)))
		switch rnd.IntN(8) {
		case 0:
			ok(t, f.Allocate(int64(off), int64(n)))
			grow(off + n)
		case 1:
			ok(t, f.Truncate(int64(off)))
			want = want[:min(off, len(want))]
			grow(off)
		case 2:
			ok(t, f.Datasync())
			if got := read(t, open(t, m.CrashClone(uint64(i)), "/f", 0), 0, most*2); got != string(
				want) {
				t.Fatalf("step %d: what was synced is not what a crash leaves", i)
			}
		default:
			p := bytes.Repeat([]byte{byte(1 + rnd.IntN(255))}, n)
			_, err := f.WriteAt(p, int64(off))
			ok(t, err)
			grow(off + n)
			copy(want[off:], p)
		}
		if got := read(t, f, int64(off), n); got != string(want[min(off, len(want)):min(off+n,
			len(want))]) {
			t.Fatalf("step %d: read other bytes", i)
		}
		c := m.Clone()
		if n := c.root.entries["f"].now.missing(0, int64(most*2)); c.used !=
			(int64(most*2+memBlock-1)/memBlock-n)*memBlock || c.used != m.used {
			t.Fatalf("step %d: %d bytes used, %d in the clone, %d blocks missing", i, m.used,
				c.used, n)
		}
		clear(want[len(want):cap(want)])
	}
	if got := read(t, f, 0, most*2); got != string(want) {
		t.Fatal("other bytes at the end")
	}
}

// What is no regular file is not opened, and nobody waits for it: a pipe without a writer, links,
// and links to pipes. Links to directories on the way there are followed.
func TestNotRegular(t *testing.T) {
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	ok(t, os.WriteFile(path("file"), []byte("text"), 0o600))
	ok(t, os.Mkdir(path("dir"), 0o700))
	ok(t, syscall.Mkfifo(path("pipe"), 0o600))
	for name, to := range map[string]string{"link": "file", "to-pipe": "pipe",
		"to-nothing": "nothing", "to-itself": "to-itself", "to-zero": "/dev/zero", "here": "."} {
		ok(t, os.Symlink(to, path(name)))
	}
	for _, name := range []string{"pipe", "link", "to-pipe", "to-nothing", "to-itself", "to-zero"} {
		for _, flags := range []vfs.Flag{0, vfs.ReadOnly, vfs.Create, vfs.Direct} {
			if _, err := vfs.OS.OpenFile(path(name), flags); !errors.Is(err, vfs.ErrNotRegular) &&
				!errors.Is(err, vfs.ErrNoDirect) {
				t.Errorf("opening %s with %d: %v", name, flags, err)
			}
		}
		_, err := vfs.OS.Lock(path(name))
		is(t, err, vfs.ErrNotRegular)
	}
	_, err := os.Stat(path("nothing"))
	is(t, err, fs.ErrNotExist)
	_, err = vfs.OS.OpenFile(path("dir"), vfs.ReadOnly)
	is(t, err, syscall.EISDIR)
	if got := read(t, open(t, vfs.OS, path("here/file"), 0), 0, 4); got != "text" {
		t.Errorf("read %q", got)
	}
}

// A file has another ID than the one that has its name later, as long as that is open.
func TestFileID(t *testing.T) {
	both(t, func(t *testing.T, fsys vfs.FS, dir string) {
		id := func() vfs.FileID {
			info, err := fsys.Stat(dir + "/f")
			ok(t, err)
			return info.ID
		}
		open(t, fsys, dir+"/f", vfs.Create)
		first := id()
		if first == (vfs.FileID{}) || id() != first {
			t.Errorf("%v, then %v", first, id())
		}
		ok(t, fsys.Remove(dir+"/f"))
		open(t, fsys, dir+"/f", vfs.Create)
		if id() == first {
			t.Errorf("both files are %v", first)
		}
	})
}
