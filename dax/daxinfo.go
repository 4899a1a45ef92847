//go:build linux

package dax

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// daxInfo is the kernel's description of a DAX character device.
type daxInfo struct {
	size  int64 // bytes
	align int64 // of mappings, in bytes
	node  int
}

// readDaxInfo reads the attributes of a character device, which fstat does not have. They are in
// the directory of the device's number. Kernels before 5.1, and those with
// CONFIG_DEV_DAX_PMEM_COMPAT, have the alignment in the parent's directory.
func readDaxInfo(sysFS, path string, rdev uint64) (daxInfo, error) {
	name := fmt.Sprintf("%d:%d", unix.Major(rdev), unix.Minor(rdev))
	dir := filepath.Join(sysFS, "dev", "char", name)
	subsystem, err := os.Readlink(filepath.Join(dir, "subsystem"))
	if err != nil || filepath.Base(subsystem) != "dax" {
		return daxInfo{}, fmt.Errorf(
			"%s: %w: character device %s is not of the kernel's DAX subsystem", path, ErrDevice,
			name)
	}
	if err := canWriteBack(); err != nil {
		return daxInfo{}, fmt.Errorf("%s: %w", path, err)
	}
	h := host{dir}
	info := daxInfo{align: HugePageSize, node: NoNUMANode}
	if info.size, err = h.readInt("size"); err != nil {
		return daxInfo{}, fmt.Errorf("%s: %w: its size: %w", path, ErrDevice, err)
	}
	for _, at := range []string{"align", "device/align", "dax_region/align",
		"device/dax_region/align"} {
		if n, err := h.readInt(at); err == nil {
			info.align = n
			break
		}
	}
	if page := int64(os.Getpagesize()); info.align < page || info.align&(info.align-1) != 0 ||
		info.align > maxAlign {
		return daxInfo{}, fmt.Errorf("%s: %w: an alignment of %d bytes", path, ErrDevice,
			info.align)
	}
	for _, at := range []string{"numa_node", "device/numa_node", "target_node"} {
		if n, err := h.readInt(at); err == nil && n < maxNUMANodes { // -1 is none
			info.node = int(n)
			break
		}
	}
	return info, nil
}

// maxAlign is larger than any architecture's pages.
const maxAlign = 16 << 30
