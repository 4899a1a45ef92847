//go:build linux

package dax

import (
	"fmt"
	"math"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Attached is a mapped region of another process. Its bytes are valid until Close.
type Attached struct{ mem []byte }

// Attach maps sizeBytes at offsetBytes of a region's descriptor that came over a socket, to read
// and to write. The offset and the address are multiples of pageSize, the size of the pages behind
// the descriptor (0: the system's). The caller keeps ownership of the descriptor and may close it
// at once.
func Attach(f *os.File, offsetBytes, sizeBytes, pageSize int64) (*Attached, error) {
	return attach(int(f.Fd()), offsetBytes, sizeBytes, pageSize, unix.PROT_READ|unix.PROT_WRITE)
}

// AttachReadOnly does what Attach does with a plain descriptor, to read only.
func AttachReadOnly(fd int, offsetBytes, sizeBytes, pageSize int64) (*Attached, error) {
	return attach(fd, offsetBytes, sizeBytes, pageSize, unix.PROT_READ)
}

func attach(fd int, offsetBytes, sizeBytes, pageSize int64, prot int) (*Attached, error) {
	if pageSize == 0 {
		pageSize = int64(os.Getpagesize())
	}
	if sizeBytes <= 0 || offsetBytes < 0 || offsetBytes > math.MaxInt64-sizeBytes {
		return nil, fmt.Errorf("region of %d bytes at %d: out of range", sizeBytes, offsetBytes)
	}
	if pageSize < 0 || pageSize&(pageSize-1) != 0 || offsetBytes%pageSize != 0 {
		return nil, fmt.Errorf("region at %d bytes: not at a page of %d bytes", offsetBytes,
			pageSize)
	}
	// An access beyond the file's end would be a bus error. A device has no size here, and maps no
	// more than it has.
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, os.NewSyscallError("fstat", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFCHR && st.Size < offsetBytes+sizeBytes {
		return nil, fmt.Errorf("region of %d bytes at %d in a file of %d", sizeBytes, offsetBytes,
			st.Size)
	}
	mem, err := mapAlignedAt(fd, offsetBytes, sizeBytes, max(pageSize, HugePageSize), prot,
		unix.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	return &Attached{mem: mem}, nil
}

// Bytes returns the whole region. Other processes may change it at any moment.
func (a *Attached) Bytes() []byte { return a.mem }

// Close unmaps the region. It is idempotent.
func (a *Attached) Close() error {
	if a.mem == nil {
		return nil
	}
	mem := a.mem
	a.mem = nil
	return unmap(mem)
}

// OffsetIn returns where part begins in mem, both slices of one mapping. ok is false if part is
// empty or does not lie in mem as a whole.
func OffsetIn(mem, part []byte) (offset int64, ok bool) {
	if len(part) == 0 || len(part) > len(mem) {
		return 0, false
	}
	base, at := uintptr(unsafe.Pointer(unsafe.SliceData(mem))),
		uintptr(unsafe.Pointer(unsafe.SliceData(part)))
	if at < base || at-base > uintptr(len(mem)-len(part)) {
		return 0, false
	}
	return int64(at - base), true
}
