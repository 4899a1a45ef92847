//go:build linux

package dax

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Attached is another process's region, mapped. Its bytes are valid until Close.
type Attached struct{ mem []byte }

// Attach maps the first sizeBytes of a region's descriptor that came over a socket, to read and to write. The descriptor stays the caller's, and may be
// closed at once.
func Attach(f *os.File, sizeBytes int64) (*Attached, error) {
	if sizeBytes <= 0 {
		return nil, fmt.Errorf("region size %d bytes: must be positive", sizeBytes)
	}
	// Beyond the file's end an access would be a bus error, not an error.
	if info, err := f.Stat(); err != nil {
		return nil, err
	} else if info.Size() < sizeBytes {
		return nil, fmt.Errorf("region of %d bytes in a file of %d", sizeBytes, info.Size())
	}
	mem, err := mapAligned(int(f.Fd()), sizeBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
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
