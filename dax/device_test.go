//go:build linux

package dax

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"lookaside/internal/bytesize"
)

const mib = 1 << 20

var basePage = int64(os.Getpagesize())

func mustOpenDevice(t *testing.T, o DeviceOptions) *Device {
	t.Helper()
	d, err := OpenDevice(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// wantNoDevice wants an open to fail with an error that wraps want and says all of words.
func wantNoDevice(t *testing.T, o DeviceOptions, want error, words ...string) {
	t.Helper()
	d, err := OpenDevice(o)
	if err == nil {
		d.Close()
		t.Fatalf("%+v was opened", o)
	}
	wantError(t, err, want, words...)
}

func TestDeviceFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "dev")
	o := DeviceOptions{Path: path, SizeBytes: mib, AllowFile: true}
	wantNoDevice(t, DeviceOptions{Path: path, SizeBytes: mib}, ErrDevice, "no such file", "daxctl")
	wantNoDevice(t, DeviceOptions{Path: path, AllowFile: true}, ErrDevice, "no size")
	d := mustOpenDevice(t, o)
	if d.Kind() != PlainFile || d.Size() != mib || len(d.Bytes()) != mib ||
		d.Align() != basePage || d.NUMANode() != NoNUMANode || d.Direct() ||
		d.Path() != path || d.Offset() != 0 {
		t.Errorf("opened %+v", d)
	}
	var st unix.Stat_t
	if err := unix.Fstat(d.FD(), &st); err != nil || st.Size != mib || st.Blocks*512 < mib ||
		st.Mode&0o777 != 0o600 {
		t.Errorf("file of %d bytes in %d blocks, mode %o: %v", st.Size, st.Blocks, st.Mode, err)
	}
	copy(d.Bytes()[mib-5:], "hello")
	if err := d.Persist(mib-5, 5); err != nil {
		t.Error(err)
	}
	if err := d.Persist(0, 0); err != nil {
		t.Error(err)
	}
	if err := errors.Join(d.Close(), d.Close()); err != nil {
		t.Fatal(err)
	}
	wantNoDevice(t, DeviceOptions{Path: path}, ErrDevice, "regular file", "allow_files")
	wantNoDevice(t, DeviceOptions{Path: path, AllowFile: true, SizeBytes: 2 * mib}, ErrDevice,
		"does not fit", "1MiB")
	wantNoDevice(t, DeviceOptions{Path: path, AllowFile: true, SizeBytes: basePage + 1}, ErrDevice,
		"not aligned to "+bytesize.Format(basePage), "pages of this machine")
	wantNoDevice(t, DeviceOptions{Path: path, AllowFile: true, OffsetBytes: 5}, ErrDevice,
		"not aligned")
	wantNoDevice(t, DeviceOptions{Path: path, AllowFile: true, OffsetBytes: mib}, ErrDevice)
	wantNoDevice(t, DeviceOptions{Path: path, AllowFile: true, OffsetBytes: -1}, ErrDevice)
	wantNoDevice(t, DeviceOptions{Path: path, AllowFile: true, OffsetBytes: 1 << 62,
		SizeBytes: 1 << 62}, ErrDevice)
	// its own size
	d = mustOpenDevice(t, DeviceOptions{Path: path, AllowFile: true, OffsetBytes: mib / 2})
	if d.Size() != mib/2 || string(d.Bytes()[mib/2-5:]) != "hello" {
		t.Errorf("%d bytes, the last %q", d.Size(), d.Bytes()[d.Size()-5:])
	}
}

func TestDeviceThatIsNone(t *testing.T) {
	dir := t.TempDir()
	wantNoDevice(t, DeviceOptions{Path: dir, AllowFile: true}, ErrDevice, "directory")
	wantNoDevice(t, DeviceOptions{Path: "/dev/null", SizeBytes: mib}, ErrDevice, "DAX subsystem")
	fifo := filepath.Join(dir, "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	wantNoDevice(t, DeviceOptions{Path: fifo, SizeBytes: mib}, ErrDevice, "pipe")
	if os.Geteuid() == 0 {
		block := filepath.Join(dir, "pmem0")
		if err := unix.Mknod(block, unix.S_IFBLK|0o600, int(unix.Mkdev(7, 250))); err == nil {
			// a loop device that nobody set up opens, if there is one
			_, err := OpenDevice(DeviceOptions{Path: block, SizeBytes: mib})
			wantError(t, err, ErrDevice)
		}
	}
}

// Sparse files are allocated, or a store could meet a full disk.
func TestDeviceAllocates(t *testing.T) {
	path := filepath.Join(t.TempDir(), "dev")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	wantNoDevice(t, DeviceOptions{Path: path, AllowFile: true}, ErrDevice, "empty")
	if err := os.Truncate(path, 3*mib); err != nil {
		t.Fatal(err)
	}
	d := mustOpenDevice(t, DeviceOptions{Path: path, AllowFile: true, OffsetBytes: mib})
	var st unix.Stat_t
	if err := unix.Fstat(d.FD(), &st); err != nil || st.Blocks*512 != 2*mib {
		t.Errorf("%d bytes are allocated: %v", st.Blocks*512, err)
	}
	wantNoDevice(t, DeviceOptions{Path: filepath.Join(t.TempDir(), "dev"), AllowFile: true,
		SizeBytes: 1 << 50}, ErrNoSpace, "free")
}

// TestDeviceAllocatesInMemory: a hole in a file that was whole is filled again, on tmpfs too, which
// is asked for blocks only where some are missing.
func TestDeviceAllocatesInMemory(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("/dev/shm", "lookaside-test-")
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	o := DeviceOptions{Path: filepath.Join(dir, "dax0.0"), SizeBytes: 2 * mib, AllowFile: true}
	for _, hole := range []bool{true, false, true} {
		d, err := OpenDevice(o)
		if err != nil {
			t.Fatal(err)
		}
		var st unix.Stat_t
		if err := unix.Fstat(d.FD(), &st); err != nil || st.Blocks*512 != 2*mib {
			t.Errorf("%d bytes are allocated: %v", st.Blocks*512, err)
		}
		if hole {
			if err := unix.Fallocate(d.FD(), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE,
				mib-basePage, basePage); err != nil {
				t.Error(err)
			}
		}
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// Ranks that share a device have a partition each, and no byte twice.
func TestDevicePartitions(t *testing.T) {
	path := filepath.Join(t.TempDir(), "dev")
	part := func(offset, size int64) DeviceOptions {
		return DeviceOptions{Path: path, OffsetBytes: offset, SizeBytes: size, AllowFile: true}
	}
	if err := os.WriteFile(path, make([]byte, 4*mib), 0o600); err != nil {
		t.Fatal(err)
	}
	a := mustOpenDevice(t, part(0, mib))
	b := mustOpenDevice(t, part(mib, mib))
	for _, o := range []DeviceOptions{part(0, mib), part(mib-basePage, basePage),
		part(basePage, 2*basePage), part(mib, 3*mib), part(0, 4*mib)} {
		wantNoDevice(t, o, ErrBusy, "has its bytes")
	}
	var busy *RangeLockedError
	if _, err := OpenDevice(part(mib+basePage, mib)); !errors.As(err, &busy) ||
		busy.OffsetBytes != mib || busy.SizeBytes != mib || busy.PID != 0 {
		t.Errorf("locked: %+v", busy)
	}
	a.Bytes()[mib-1], b.Bytes()[0] = 1, 2
	whole, err := os.ReadFile(path)
	if err != nil || len(whole) != 4*mib || whole[mib-1] != 1 || whole[mib] != 2 {
		t.Errorf("the file: %d bytes, %v", len(whole), err)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	c := mustOpenDevice(t, part(mib, 2*mib))
	if c.Bytes()[0] != 2 {
		t.Error("what was on the partition is gone")
	}
}

func TestDeviceRanks(t *testing.T) {
	path := filepath.Join(t.TempDir(), "dev")
	o := DeviceOptions{Path: path, SizeBytes: 3*mib + 4096, Ranks: 3, Rank: 3, AllowFile: true}
	wantNoDevice(t, o, ErrDevice, "rank 3 of 3")
	var all [3]*Device
	for _, rank := range []int{1, 0, 2} { // whoever comes first makes the file
		o.Rank = rank
		all[rank] = mustOpenDevice(t, o)
		if d := all[rank]; d.Size() != mib || d.Offset() != int64(rank)*mib {
			t.Errorf("rank %d has %d bytes from %d on", rank, d.Size(), d.Offset())
		}
		wantError(t, all[rank].Resize(mib+basePage), ErrDevice, "does not fit")
	}
	wantNoDevice(t, o, ErrBusy)
	o.OffsetBytes, o.SizeBytes = 3*mib+basePage, 0
	wantNoDevice(t, o, ErrDevice)
	o.OffsetBytes, o.SizeBytes = 0, 4*mib
	wantNoDevice(t, o, ErrDevice, "does not fit")
	info, err := os.Stat(path)
	if err != nil || info.Size() != 3*mib+4096 {
		t.Errorf("the file has %d bytes: %v", info.Size(), err)
	}
	o = DeviceOptions{Path: path, OffsetBytes: 3 * mib, SizeBytes: 4096, Ranks: 2, AllowFile: true}
	wantNoDevice(t, o, ErrDevice, "2 parts")

	// A file is cut in the same way whatever the pages are, or it is refused.
	o = DeviceOptions{Path: path, Ranks: 2, Rank: 1, AllowFile: true}
	for _, d := range all {
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
	}
	const share = (3*mib + 4096) / 2 / 4096 * 4096
	if share%basePage != 0 {
		wantNoDevice(t, o, ErrDevice, "pages of this machine")
	} else if d := mustOpenDevice(t, o); d.Offset() != share || d.Size() != share {
		t.Errorf("rank 1 of 2 has %d bytes from %d on", d.Size(), d.Offset())
	}
}

func TestDeviceResize(t *testing.T) {
	path := filepath.Join(t.TempDir(), "dev")
	o := DeviceOptions{Path: path, SizeBytes: mib, AllowFile: true}
	d := mustOpenDevice(t, o)
	mem := d.Bytes()
	mem[0], mem[mib-1] = 1, 2
	if err := d.Resize(3 * mib); err != nil {
		t.Fatal(err)
	}
	if grown := d.Bytes(); len(grown) != 3*mib || &grown[0] != &mem[0] || grown[mib-1] != 2 ||
		grown[mib] != 0 {
		t.Errorf("grown to %d bytes", len(grown))
	}
	d.Bytes()[3*mib-1] = 3
	tail := DeviceOptions{Path: path, OffsetBytes: 2 * mib, SizeBytes: mib, AllowFile: true}
	wantNoDevice(t, tail, ErrBusy)
	wantError(t, d.Resize(mib+1), ErrDevice, "not aligned")
	wantError(t, d.Resize(0), ErrDevice)
	wantError(t, d.Resize(2<<40), ErrDevice, "does not fit")
	whole := d.Bytes()
	if err := d.Resize(2 * mib); err != nil {
		t.Fatal(err)
	}
	if err := Guard(func() { whole[3*mib-1]++ }, whole); !errors.Is(err, ErrFault) {
		t.Errorf("what was cut off: %v", err)
	}
	other := mustOpenDevice(t, tail)
	if other.Bytes()[mib-1] != 3 {
		t.Error("shrinking lost what was there")
	}
	wantError(t, d.Resize(3*mib), ErrBusy)
	if d.Size() != 2*mib || d.Bytes()[0] != 1 {
		t.Errorf("after a refusal: %d bytes", d.Size())
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	wantError(t, d.Resize(mib), ErrDevice, "closed")
}

// The lock is this process's until it dies, however it does.
func TestDeviceOfAnotherProcess(t *testing.T) {
	path := filepath.Join(t.TempDir(), "dev")
	cmd := helper(t, "own-device", path)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line := make([]byte, 4)
	if _, err := stdout.Read(line); err != nil || string(line) != "open" {
		t.Fatalf("%q, %v", line, err)
	}
	o := DeviceOptions{Path: path, SizeBytes: mib, AllowFile: true}
	wantNoDevice(t, o, ErrBusy)
	b := make([]byte, 5)
	if err := Peek(path, "", mib-5, b); err != nil || string(b) != "child" {
		t.Errorf("peeked %q, %v", b, err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	stdin.Close()
	mustOpenDevice(t, o)
}

func helperOwnDevice(path string) string {
	d, err := OpenDevice(DeviceOptions{Path: path, SizeBytes: mib, AllowFile: true})
	if err != nil {
		return err.Error()
	}
	copy(d.Bytes()[mib-5:], "child")
	fmt.Print("open")
	_, _ = os.Stdin.Read(make([]byte, 1))
	return ""
}

func TestDeviceWithoutPermission(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to be somebody else")
	}
	dir, err := os.MkdirTemp("", "lookaside-dax-") // t.TempDir's parent is for its owner only
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(self)
	if err != nil {
		t.Fatal(err)
	}
	exe, path := filepath.Join(dir, "test"), filepath.Join(dir, "dax0.0")
	if err := errors.Join(os.Chmod(dir, 0o755), os.WriteFile(exe, text, 0o755),
		os.WriteFile(path, make([]byte, mib), 0o600)); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), helperEnv+"=own-device="+path)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "permission denied") ||
		!strings.Contains(string(out), "uid 65534") || !strings.Contains(string(out), "udev") {
		t.Errorf("%s: %v", out, err)
	}
}

// fakeDax is a made-up sysfs in which the character device /dev/zero is a DAX device: it maps as
// shared memory, which is all that is wanted of it here.
func fakeDax(t *testing.T, subsystem string, attributes map[string]string) (sysFS, path string) {
	t.Helper()
	sysFS, path = t.TempDir(), filepath.Join(t.TempDir(), "dax0.0")
	if err := unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 5))); err != nil {
		path = "/dev/zero"
	}
	if fd, err := unix.Open(path, unix.O_RDWR, 0); err != nil { // mounted without devices
		path = "/dev/zero"
	} else {
		unix.Close(fd)
	}
	device := filepath.Join(sysFS, "devices", "platform", "hmem.0", "dax0.0")
	bus := filepath.Join(sysFS, subsystem)
	if err := errors.Join(os.MkdirAll(device, 0o755), os.MkdirAll(bus, 0o755),
		os.MkdirAll(filepath.Join(sysFS, "dev", "char"), 0o755),
		os.Symlink("../../devices/platform/hmem.0/dax0.0", filepath.Join(sysFS, "dev", "char",
			"1:5")), os.Symlink(bus, filepath.Join(device, "subsystem"))); err != nil {
		t.Fatal(err)
	}
	for name, text := range attributes {
		at := filepath.Join(device, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(at), 0o755), os.WriteFile(at, []byte(text),
			0o644)); err != nil {
			t.Fatal(err)
		}
	}
	return sysFS, path
}

func TestDevDax(t *testing.T) {
	if err := canWriteBack(); err != nil {
		t.Skip(err)
	}
	sysFS, path := fakeDax(t, "bus/dax", map[string]string{"size": "67108864\n",
		"align": "2097152\n", "numa_node": "1\n", "target_node": "2\n"})
	d := mustOpenDevice(t, DeviceOptions{Path: path, SysFS: sysFS})
	if d.Kind() != DevDAX || d.Size() != 64*mib || d.Align() != 2*mib || d.NUMANode() != 1 ||
		!d.Direct() {
		t.Errorf("%s of %d bytes, aligned to %d, on node %d", d.Kind(), d.Size(), d.Align(),
			d.NUMANode())
	}
	wantNoDevice(t, DeviceOptions{Path: path, SysFS: sysFS, SizeBytes: 2 * mib}, ErrBusy)
	copy(d.Bytes()[100:], "hello")
	if err := d.Persist(100, 5); err != nil || string(d.Bytes()[100:105]) != "hello" {
		t.Errorf("%q, %v", d.Bytes()[100:105], err)
	}
	if err := d.Persist(1, 64*mib-1); err != nil {
		t.Error(err)
	}
	if err := d.Resize(32 * mib); err != nil {
		t.Fatal(err)
	}
	wantError(t, d.Resize(66*mib), ErrDevice, "does not fit")
	wantError(t, d.Resize(33*mib), ErrDevice, "not aligned to 2MiB")
	second := mustOpenDevice(t, DeviceOptions{Path: path, SysFS: sysFS, OffsetBytes: 32 * mib})
	if second.Size() != 32*mib || second.Offset() != 32*mib {
		t.Errorf("%d bytes from %d on", second.Size(), second.Offset())
	}
	for _, o := range []DeviceOptions{{OffsetBytes: mib}, {SizeBytes: mib}, {SizeBytes: 66 * mib},
		{OffsetBytes: 64 * mib}} {
		o.Path, o.SysFS = path, sysFS
		wantNoDevice(t, o, ErrDevice)
	}
	if err := errors.Join(d.Close(), second.Close()); err != nil {
		t.Fatal(err)
	}
	if err := Peek(path, sysFS, 4096, make([]byte, 100)); err != nil {
		t.Error(err)
	}
}

func TestDaxInfo(t *testing.T) {
	if err := canWriteBack(); err != nil {
		t.Skip(err)
	}
	for name, c := range map[string]struct {
		subsystem  string
		attributes map[string]string
		want       daxInfo
		err        string
	}{
		"1 GiB pages": {"bus/dax", map[string]string{"size": "4294967296",
			"align": "1073741824"}, daxInfo{4 << 30, 1 << 30, NoNUMANode}, ""},
		"base pages": {"bus/dax", map[string]string{"size": strconv.FormatInt(2*basePage, 10),
			"align": strconv.FormatInt(basePage, 10)},
			daxInfo{2 * basePage, basePage, NoNUMANode}, ""},
		"old class": {"class/dax", map[string]string{"size": "8388608",
			"device/align": "4194304"}, daxInfo{8 << 20, 4 << 20, NoNUMANode}, ""},
		"region": {"bus/dax", map[string]string{"size": "8388608",
			"dax_region/align": "2097152", "target_node": "3"}, daxInfo{8 << 20, 2 << 20, 3}, ""},
		"no alignment": {"bus/dax", map[string]string{"size": "8388608", "numa_node": "-1"},
			daxInfo{8 << 20, 2 << 20, NoNUMANode}, ""},
		"odd alignment": {"bus/dax", map[string]string{"size": "8388608", "align": "3145728"},
			daxInfo{}, "alignment of 3145728"},
		"small alignment": {"bus/dax", map[string]string{"size": "8388608", "align": "512"},
			daxInfo{}, "alignment"},
		"huge alignment": {"bus/dax", map[string]string{"size": "8388608",
			"align": "9223372036854775807"}, daxInfo{}, "alignment"},
		"no size": {"bus/dax", map[string]string{"align": "2097152"}, daxInfo{}, "size"},
		"garbage": {"bus/dax", map[string]string{"size": "many"}, daxInfo{}, "size"},
		"of another kind": {"class/mem", map[string]string{"size": "8388608"}, daxInfo{},
			"DAX subsystem"},
	} {
		t.Run(name, func(t *testing.T) {
			sysFS, _ := fakeDax(t, c.subsystem, c.attributes)
			got, err := readDaxInfo(sysFS, "/dev/dax0.0", unix.Mkdev(1, 5))
			if c.err != "" {
				wantError(t, err, ErrDevice, c.err)
			} else if err != nil || got != c.want {
				t.Errorf("%+v, %v; want %+v", got, err, c.want)
			}
		})
	}
	sysFS, _ := fakeDax(t, "bus/dax", nil)
	_, err := readDaxInfo(sysFS, "/dev/dax1.0", unix.Mkdev(1, 6))
	wantError(t, err, ErrDevice)
}

// Faults 15 and 16 meet whoever uses the bytes as an error.
func TestDeviceFileCutShort(t *testing.T) {
	path := filepath.Join(t.TempDir(), "dev")
	d := mustOpenDevice(t, DeviceOptions{Path: path, SizeBytes: mib, AllowFile: true})
	mem := d.Bytes()
	mem[mib-1] = 1
	if err := os.Truncate(path, basePage); err != nil {
		t.Fatal(err)
	}
	if err := Guard(func() { mem[mib-1]++ }, mem); !errors.Is(err, ErrFault) {
		t.Errorf("store: %v", err)
	}
	mem[0] = 1
	if err := d.Persist(0, 1); err != nil {
		t.Errorf("what is left of it: %v", err)
	}
}

func TestWriteBack(t *testing.T) {
	table, err := NewTable[byte](1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer table.Close()
	mem := table.Slice()
	for i := range mem {
		mem[i] = byte(i * 7)
	}
	want := bytes.Clone(mem)
	if canWriteBack() == nil {
		for _, r := range [][2]int{{0, 0}, {0, 1}, {63, 65}, {64, 128}, {100, 1 << 20},
			{0, 1 << 20}} {
			writeBack(mem[r[0]:r[1]])
		}
	}
	if !bytes.Equal(mem, want) {
		t.Error("it changed the bytes")
	}
}

func TestDevicePaths(t *testing.T) {
	// A symbolic link, as udev makes them, is followed.
	dir := t.TempDir()
	path, link := filepath.Join(dir, "dev"), filepath.Join(dir, "link")
	d := mustOpenDevice(t, DeviceOptions{Path: path, SizeBytes: mib, AllowFile: true})
	if err := errors.Join(d.Close(), os.Symlink(path, link)); err != nil {
		t.Fatal(err)
	}
	mustOpenDevice(t, DeviceOptions{Path: link, AllowFile: true})
	wantNoDevice(t, DeviceOptions{Path: path, AllowFile: true}, ErrBusy, strconv.Itoa(mib-1))
}
