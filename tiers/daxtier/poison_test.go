package daxtier

import (
	"errors"
	"os"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"lookaside/tiers"
	"lookaside/tiers/slab/media"
	"lookaside/tiers/vfs"
)

// The ioctls of userfaultfd(2) that make a page fault as memory that the machine has found to be
// bad does (Linux 6.6).
const (
	uffdAPI         = 0xc018aa3f
	uffdRegister    = 0xc020aa00
	uffdPoison      = 0xc020aa08
	uffdAPIVersion  = 0xaa
	uffdFeatPoison  = 1 << 14
	uffdModeMissing = 1
)

// poison makes pages of a mapping raise SIGBUS at each access, as a bad DIMM's do.
type poison struct {
	t   *testing.T
	fd  int
	mem []byte
}

func newPoison(t *testing.T, mem []byte) *poison {
	t.Helper()
	fd, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|unix.O_NONBLOCK, 0, 0)
	if errno != 0 {
		t.Skipf("SKIPPED: userfaultfd: %v", errno)
	}
	t.Cleanup(func() { unix.Close(int(fd)) })
	p := &poison{t, int(fd), mem}
	api := struct{ api, features, ioctls uint64 }{uffdAPIVersion, uffdFeatPoison, 0}
	if err := p.ioctl(uffdAPI, unsafe.Pointer(&api)); err != nil {
		t.Skipf("SKIPPED: this kernel cannot poison pages: %v", err)
	}
	register := struct{ start, length, mode, ioctls uint64 }{p.address(0), uint64(len(mem)),
		uffdModeMissing, 0}
	if err := p.ioctl(uffdRegister, unsafe.Pointer(&register)); err != nil {
		t.Skipf("SKIPPED: userfaultfd does not take this mapping: %v", err)
	}
	return p
}

func (p *poison) address(off int64) uint64 {
	return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(p.mem)))) + uint64(off)
}

func (p *poison) ioctl(request uintptr, arg unsafe.Pointer) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(p.fd), request,
		uintptr(arg)); errno != 0 {
		return errno
	}
	return nil
}

// page poisons the page that has a byte.
func (p *poison) page(off int64) {
	p.t.Helper()
	off = off / 4096 * 4096
	if err := unix.Madvise(p.mem[off:off+4096], unix.MADV_DONTNEED); err != nil {
		// of the page tables: the file keeps it
		p.t.Fatal(err)
	}
	arg := struct {
		start, length, mode uint64
		updated             int64
	}{p.address(off), 4096, 0, 0}
	if err := p.ioctl(uffdPoison, unsafe.Pointer(&arg)); err != nil {
		p.t.Fatal(err)
	}
}

// where answers the places of all chunks' data in the device, by chunk as far as they are in use.
func where(t *testing.T, p *devices) (at []int64) {
	t.Helper()
	mem := p.fs.Device(p.o.Devices[0].Path).Bytes()
	eachEntry(t, p, func(file vfs.File, h *media.Header, slot int, e *media.Entry) {
		// Found by what is there: the pages of all chunks differ.
		first := make([]byte, 256)
		if _, err := file.ReadAt(first, h.Layout.SlotOffset(slot)); err != nil {
			t.Fatal(err)
		}
		for i := int64(0); i < int64(len(mem)); i += 4096 {
			if string(mem[i:i+256]) == string(first) {
				at = append(at, i)
			}
		}
	})
	return at
}

// Fault 16: a page goes bad. The chunk that lies on it is a miss, all others stay, and the tier
// works on.
func TestPoisonedPages(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: needs root, for userfaultfd")
	}
	o := files(memory(t), 1, 8<<20)
	o.SlabBytes = 2 << 20
	p := mustOpen(t, o)
	const n = 60
	mustStore(t, p, 0, n)
	places := where(t, &p.devices)
	if len(places) != n {
		t.Fatalf("%d places of %d chunks", len(places), n)
	}
	bad := newPoison(t, p.fs.Device(o.Devices[0].Path).Bytes())
	for i := 0; i < n; i += 10 {
		bad.page(places[i] + 20<<10)
	}
	failed := 0
	for i, err := range load(t, p, 0, n) {
		switch {
		case err == nil:
		case errors.Is(err, syscall.EIO):
			failed++
		default:
			t.Errorf("chunk %d: %v", i, err)
		}
	}
	if failed != n/10 {
		t.Errorf("%d loads failed, for %d poisoned pages", failed, n/10)
	}
	left := 0
	for i, err := range load(t, p, 0, n) {
		switch {
		case err == nil:
			left++
		case !errors.Is(err, tiers.ErrNotFound):
			t.Errorf("chunk %d again: %v", i, err)
		}
	}
	if left != n-failed {
		t.Errorf("%d of %d good chunks are left", left, n-failed)
	}
	// The bad places are met again when something is stored there.
	refused := 0
	for i := range 40 {
		err := store(t.Context(), p, testSpace(), n+i, n+i+1)[0]
		if err != nil {
			refused++
			continue
		}
		if err := load(t, p, n+i, n+i+1)[0]; err != nil {
			t.Errorf("chunk %d was stored, and cannot be loaded: %v", n+i, err)
		}
	}
	t.Logf("%d of 40 stores failed; %+v", refused, p.Stats())
	if refused > failed {
		t.Errorf("%d stores failed, for %d bad places", refused, failed)
	}
	left = 0
	for _, err := range load(t, p, 0, n) {
		if err == nil {
			left++
		}
	}
	if left != n-failed {
		t.Errorf("%d of %d good chunks are left in the end", left, n-failed)
	}
}
