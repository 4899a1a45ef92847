// Package fakedax has a DAX device for tests on machines without one.
package fakedax

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// New returns the path of a device and the sysfs that describes it: 16 MiB of 2 MiB pages. The
// device is /dev/zero: mapped, it is memory that lasts as long as the mapping. New skips the test
// where such a device cannot be made.
func New(t testing.TB) (path, sysFS string) {
	t.Helper()
	if runtime.GOARCH != "amd64" {
		t.Skip("SKIPPED: DAX devices are for amd64")
	}
	sysFS, path = t.TempDir(), filepath.Join(t.TempDir(), "dax0.0")
	device, bus := filepath.Join(sysFS, "devices", "dax0.0"), filepath.Join(sysFS, "bus", "dax")
	char := filepath.Join(sysFS, "dev", "char")
	if err := errors.Join(os.MkdirAll(device, 0o755), os.MkdirAll(bus, 0o755),
		os.MkdirAll(char, 0o755), os.Symlink(device, filepath.Join(char, "1:5")),
		os.Symlink(bus, filepath.Join(device, "subsystem")),
		os.WriteFile(filepath.Join(device, "size"), []byte("16777216\n"), 0o644),
		os.WriteFile(filepath.Join(device, "align"), []byte("2097152\n"), 0o644)); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 5))); err != nil {
		t.Skipf("SKIPPED: mknod: %v", err)
	}
	return path, sysFS
}
