//go:build linux

package dax

import (
	"fmt"
	"math"
	"os"

	"golang.org/x/sys/unix"
)

// Attached is another process's region, mapped. Its bytes are valid until Close.
type Attached struct{ mem []byte }

// Attach maps sizeBytes at offsetBytes of a region's descriptor that came over a socket, to read
// and to write. The offset is a multiple of pageSize, that of the pages behind the descriptor (0:
// the system's), and so is the address. The descriptor stays the caller's, and may be closed at
// once.
func Attach(f *os.File, offsetBytes, sizeBytes, pageSize int64) (*Attached, error) {
	return attach(int(f.Fd()), offsetBytes, sizeBytes, pageSize, unix.PROT_READ|unix.PROT_WRITE)
}

// AttachReadOnly is Attach of a plain descriptor, to read only.
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
	// Beyond the file's end an access would be a bus error, not an error. A device tells no size
	// here, and maps no more than it has.
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

// Bytes is the whole region. Others may change it at any moment.
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
