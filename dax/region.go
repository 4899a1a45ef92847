//go:build linux

// Package dax owns the memory that Lookaside shares or keeps off the Go heap:
// regions (memfd with 4 KiB pages, with transparent huge pages or from the
// hugetlb pool, or a file), the control region that clients may only read, and
// typed tables for the engine's index. It is the only package that maps
// memory, seals a memfd or uses unsafe to reach either.
//
// # Trust
//
// A [Region] is mapped read-write by workers, so its bytes may change at any moment, and nothing in
// them may decide an offset, a length or a state. Its memfd is sealed against shrinking and growing
// when it is made, so a client cannot make the sidecar fault by truncating it. Punching holes stays
// possible and yields zeros. A file has no seals: any process that can write it can truncate it, so
// every access to one belongs inside [Guard]. A [Control] region is written by the sidecar alone:
// F_SEAL_FUTURE_WRITE refuses any later writable mapping, also through /proc/PID/fd.
//
// # Page kinds
//
// The kind of page has the largest effect on how fast an arena is populated, how fast a second
// process maps it, and how well O_DIRECT reaches it: factors of three to two hundred. So [Choose]
// prefers hugetlb, then transparent huge pages, then 4 KiB. On a memfd, transparent huge pages
// require this order: map, then MADV_HUGEPAGE, then touch. fallocate and MAP_POPULATE would
// allocate 4 KiB pages before the advice.
package dax

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"strings"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"lookaside/internal/bytesize"
)

// Kind is the kind of memory behind a region.
type Kind string

const (
	// KindAuto is the best of hugetlb, THP and memfd that the host provides.
	KindAuto Kind = "auto"
	// KindHugetlb is a memfd of 2 MiB pages from the kernel's pool of that size.
	KindHugetlb Kind = "hugetlb"
	// KindTHP is a memfd of transparent 2 MiB pages. The kernel may still
	// use 4 KiB pages where memory is fragmented.
	KindTHP Kind = "thp"
	// KindMemfd is a memfd of base pages: 4 KiB, or up to 64 KiB on arm64.
	KindMemfd Kind = "memfd"
	// KindFile is a regular file at Options.Path.
	KindFile Kind = "file"
)

// Kinds lists every kind that [ParseKind] accepts.
var Kinds = []Kind{KindAuto, KindHugetlb, KindTHP, KindMemfd, KindFile}

// ParseKind returns the kind with the given name, or an error.
func ParseKind(s string) (Kind, error) {
	names := make([]string, len(Kinds))
	for i, k := range Kinds {
		if s == string(k) {
			return k, nil
		}
		names[i] = string(k)
	}
	return "", fmt.Errorf("unknown memory kind %q: one of %s", s, strings.Join(names, ", "))
}

// These are the errors that this package wraps. The wrapping errors contain the numbers.
var (
	// ErrNoMemory means that the host, its cgroup or its huge page pool has too little memory.
	ErrNoMemory = errors.New("not enough memory")
	// ErrTooLarge means that the host or its cgroup would have too little even with all of it free.
	// It wraps ErrNoMemory.
	ErrTooLarge = fmt.Errorf("%w, even with all of it free", ErrNoMemory)
	// ErrNoSpace means that the filesystem has too little room.
	ErrNoSpace = errors.New("not enough space on the filesystem")
	// ErrUnsupported means that this host or filesystem cannot provide the kind at all.
	ErrUnsupported = errors.New("not supported here")
	// ErrBusy means that another process owns the file.
	ErrBusy = errors.New("in use")
)

// HugePageSize is the size of the pages of KindHugetlb and KindTHP, in bytes. arm64 has hugetlb
// pages of this size whatever its base pages are.
const HugePageSize = 2 << 20

// Options describes a region to create.
type Options struct {
	// Kind of memory; "" is KindAuto.
	Kind Kind
	// SizeBytes is rounded up to the kind's page size. It must be positive.
	SizeBytes int64
	// Path of the backing file, for KindFile only. Every region needs a path of its own. A stale
	// file there is replaced, never truncated: processes that still map it keep the old bytes.
	Path string
	// NUMANode is the node that pages should come from; NoNUMANode (-1) for none. It is a
	// preference, see bindNode.
	NUMANode int
	// Populate allocates every page before Create returns. That takes some 125 ms a GiB with huge
	// pages and 400 ms with 4 KiB pages, and a minute where a hypervisor has to find the memory.
	Populate bool
	// Threads that populate; 0 means one for each core that this process may use.
	Threads int
}

// Region is one mapping of fixed size, shared with the clients that get its descriptor. It never
// grows, moves or changes.
//
// Any goroutine may call its methods. The bytes are valid until Close. The owner must ensure that
// they are not in use at Close. That is why no garbage-collector cleanup unmaps a forgotten region:
// slices of it do not keep the Region alive.
type Region struct {
	kind     Kind
	pageSize int64
	fd       int
	mem      []byte
	path     string // KindFile: removed at Close if it is still ours
	lock     int    // KindFile: the descriptor that holds the lock, else -1
	closing  sync.Once
	closeErr error
}

// Create makes a region, after checking that the host can provide it ([CheckBudget]). With KindAuto
// it falls back to the next kind if the better one is not available; Kind returns the result. A
// failed Create leaves nothing behind. When ctx ends, Create stops to populate and fails with ctx's
// cause; the region does not depend on ctx afterwards.
func Create(ctx context.Context, o Options) (*Region, error) {
	switch o.Kind {
	case "", KindAuto:
		kind, _, err := Choose(KindAuto, o.SizeBytes)
		if err != nil {
			return nil, err
		}
		for ; ; kind = worse(kind) {
			o.Kind = kind
			r, err := create(ctx, o)
			if err == nil || kind == KindMemfd || ctx.Err() != nil {
				return r, err
			}
		}
	default:
		if _, _, err := Choose(o.Kind, o.SizeBytes); err != nil {
			return nil, err
		}
		return create(ctx, o)
	}
}

// worse returns the next kind to try if k is not available.
func worse(k Kind) Kind {
	if k == KindHugetlb && choiceTHP(systemHost) == nil {
		return KindTHP
	}
	return KindMemfd
}

func create(ctx context.Context, o Options) (r *Region, err error) {
	pageSize := pageSizeOf(o.Kind)
	size, err := roundUp(o.SizeBytes, pageSize)
	if err != nil {
		return nil, err
	}
	if o.Kind != KindFile {
		if err := CheckBudget(size, o.Kind, regionReserve); err != nil {
			return nil, err
		}
	}
	r = &Region{kind: o.Kind, pageSize: pageSize, fd: -1, lock: -1}
	defer func() {
		if err != nil {
			err = fmt.Errorf("%s region of %s: %w", o.Kind, bytesize.Format(size), err)
			_ = r.Close()
			r = nil
		}
	}()
	if o.Kind == KindFile {
		if r.fd, r.lock, err = createFile(systemHost, o.Path, size); err != nil {
			return r, err
		}
		r.path = o.Path
	} else if r.fd, err = createMemfd("lookaside", size, o.Kind == KindHugetlb); err != nil {
		return r, err
	}
	if err = r.mapMemory(size, o.NUMANode); err != nil {
		return r, err
	}
	if o.Populate {
		if err = populate(ctx, r.mem, o.Threads); err != nil {
			return r, err
		}
	}
	return r, nil
}

// Bytes returns the whole region. Any client may change it at any moment.
func (r *Region) Bytes() []byte { return r.mem }

// Size returns the size in bytes, a multiple of PageSize.
func (r *Region) Size() int64 { return int64(len(r.mem)) }

// Kind returns the kind that the region became, never KindAuto.
func (r *Region) Kind() Kind { return r.kind }

// PageSize returns the requested page size in bytes.
func (r *Region) PageSize() int64 { return r.pageSize }

// FD returns the descriptor to pass to clients. The region keeps ownership.
func (r *Region) FD() int { return r.fd }

// Close unmaps the region and closes its descriptor. Clients that mapped it keep their mapping. A
// region's file is removed, because its content is useless without the index. Close is idempotent
// and returns its first error.
func (r *Region) Close() error {
	r.closing.Do(func() { r.closeErr = r.close(true) })
	return r.closeErr
}

func (r *Region) close(remove bool) error {
	var errs []error
	if r.mem != nil {
		errs = append(errs, unmap(r.mem))
		r.mem = nil
	}
	if r.lock >= 0 {
		if remove {
			errs = append(errs, removeIfSame(r.path, r.lock))
		}
		errs = append(errs, unix.Close(r.lock))
		r.lock = -1
	}
	if r.fd >= 0 {
		errs = append(errs, unix.Close(r.fd))
		r.fd = -1
	}
	return errors.Join(errs...)
}

func pageSizeOf(k Kind) int64 {
	if k == KindHugetlb || k == KindTHP {
		return HugePageSize
	}
	return int64(os.Getpagesize())
}

func roundUp(size, unit int64) (int64, error) {
	if size <= 0 {
		return 0, fmt.Errorf("region size %d bytes: must be positive", size)
	}
	if size > math.MaxInt64-unit {
		return 0, fmt.Errorf("region size %d bytes: too large", size)
	}
	return (size + unit - 1) / unit * unit, nil
}

// createMemfd makes a memfd of size bytes that can neither shrink nor grow, nor be sealed further.
func createMemfd(name string, size int64, hugetlb bool) (int, error) {
	fd, err := newMemfd(name, size, hugetlb)
	if err != nil {
		return -1, err
	}
	if err := addSeals(fd, regionSeals); err != nil {
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// newMemfd makes a memfd of size bytes without seals.
func newMemfd(name string, size int64, hugetlb bool) (int, error) {
	flags := unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	if hugetlb {
		flags |= unix.MFD_HUGETLB | unix.MFD_HUGE_2MB
	}
	// MFD_NOEXEC_SEAL (Linux 6.3) makes sure that the memory can never hold a program. Older
	// kernels refuse the flag; there the file mode forbids it.
	fd, err := unix.MemfdCreate(name, flags|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) {
		fd, err = unix.MemfdCreate(name, flags)
	}
	if err != nil {
		return -1, fmt.Errorf("memfd_create: %w", err)
	}
	if err := unix.Fchmod(fd, 0o600); err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("fchmod: %w", err)
	}
	if err := unix.Ftruncate(fd, size); err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("ftruncate to %d bytes: %w", size, err)
	}
	return fd, nil
}

func addSeals(fd, seals int) error {
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		return fmt.Errorf("add seals %#x: %w", seals, err)
	}
	return nil
}

// mapAligned maps size bytes of fd, or anonymous memory if fd is -1, at a multiple of a huge page.
// Without that alignment none of its pages could be mapped as huge pages.
func mapAligned(fd int, size int64, prot, flags int) ([]byte, error) {
	return mapAlignedAt(fd, 0, size, HugePageSize, prot, flags)
}

// mapAlignedAt maps size bytes of fd from off on at an address that is a multiple of align, which
// is a power of two and at least a page.
func mapAlignedAt(fd int, off, size, align int64, prot, flags int) ([]byte, error) {
	if size > math.MaxInt64-2*align {
		return nil, fmt.Errorf("mmap of %d bytes: too large", size)
	}
	unit := uintptr(align)
	length := (uintptr(size) + unit - 1) &^ (unit - 1)
	reserved, err := unix.MmapPtr(-1, 0, nil, length+unit, unix.PROT_NONE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("mmap: reserve %d bytes: %w", length, err)
	}
	head := -uintptr(reserved) & (unit - 1)
	at := unsafe.Add(reserved, head)
	if _, err := unix.MmapPtr(fd, off, at, uintptr(size), prot, flags|unix.MAP_FIXED); err != nil {
		// Unmap the whole reservation, whether or not MAP_FIXED cleared a part.
		_ = unix.MunmapPtr(reserved, length+unit)
		return nil, fmt.Errorf("mmap of %d bytes: %w", size, err)
	}
	if head > 0 {
		err = unix.MunmapPtr(reserved, head)
	}
	page := uintptr(os.Getpagesize())
	end := (uintptr(size) + page - 1) &^ (page - 1)
	if tail := length + unit - head - end; err == nil && tail > 0 {
		err = unix.MunmapPtr(unsafe.Add(at, end), tail)
	}
	if err != nil {
		_ = unix.MunmapPtr(reserved, length+unit)
		return nil, fmt.Errorf("munmap: %w", err)
	}
	return unsafe.Slice((*byte)(at), size), nil
}

func unmap(mem []byte) error {
	return unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(mem)), uintptr(len(mem)))
}

// mapError explains an mmap that failed for lack of memory.
func mapError(err error, kind Kind, size int64) error {
	if !errors.Is(err, unix.ENOMEM) {
		return err
	}
	if kind == KindHugetlb {
		return fmt.Errorf("%w: the huge page pool gave less than %d pages: %w (raise /%s/nr_hugepages)",
			ErrNoMemory, size/HugePageSize, err, hugePagesDir)
	}
	return fmt.Errorf("%w: %w (address-space limit, or vm.overcommit_memory=2)", ErrNoMemory, err)
}
