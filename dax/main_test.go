//go:build linux

package dax

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"lookaside/internal/leak"
)

// helperEnv makes the test binary play another process: see helpers.
const helperEnv = "LOOKASIDE_DAX_TEST_HELPER"

// helpers are what a second process can be asked to do; each gets one argument
// and says on stdout how it went.
var helpers = map[string]func(arg string) string{
	"own-file":    helperOwnFile,
	"check-limit": helperCheckLimit,
	"map-region":  helperMapRegion,
	"own-device":  helperOwnDevice,
}

func TestMain(m *testing.M) {
	if name, arg, ok := strings.Cut(os.Getenv(helperEnv), "="); ok {
		fmt.Print(helpers[name](arg))
		return
	}
	leak.Main(m)
}

// helper is a second process that runs one of helpers.
func helper(t *testing.T, name, arg string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), helperEnv+"="+name+"="+arg)
	cmd.Stderr = os.Stderr
	return cmd
}

// systemSetting writes value to a kernel setting for the length of the test. It
// needs root, and a lock, since the setting is everybody's.
func systemSetting(t *testing.T, name, value string) {
	t.Helper()
	lock, err := os.OpenFile(filepath.Join(os.TempDir(), "lookaside-test-settings.lock"),
		os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { lock.Close() })
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	old, err := os.ReadFile(name)
	if err != nil {
		t.Skipf("SKIPPED: %v", err)
	}
	before := strings.TrimSpace(string(old))
	if open := strings.IndexByte(before, '['); open >= 0 {
		before, _, _ = strings.Cut(before[open+1:], "]")
	}
	if err := os.WriteFile(name, []byte(value), 0); err != nil {
		t.Skipf("SKIPPED: cannot set %s to %s: %v", name, value, err)
	}
	t.Cleanup(func() {
		if err := os.WriteFile(name, []byte(before), 0); err != nil {
			t.Errorf("%s stays %s: %v", name, value, err)
		}
	})
}

// needTHP makes this host give transparent huge pages to memfds, or skips.
func needTHP(t *testing.T) {
	t.Helper()
	if choiceTHP(systemHost) != nil {
		systemSetting(t, "/"+thpShmem, "advise")
	}
	if err := choiceTHP(systemHost); err != nil {
		t.Skipf("SKIPPED: %v", err)
	}
}

// needHugetlb makes the pool have pages free pages, or skips.
func needHugetlb(t *testing.T, pages int64) {
	t.Helper()
	if free, err := freeHugePages(systemHost); err == nil && free >= pages {
		return
	}
	const setting = "/proc/sys/vm/nr_hugepages"
	total, err := systemHost.readInt(setting)
	if err != nil {
		t.Skipf("SKIPPED: %v", err)
	}
	// Some more than needed: another test may take a few meanwhile.
	systemSetting(t, setting, strconv.FormatInt(total+pages+8, 10))
	if free, err := freeHugePages(systemHost); err != nil || free < pages {
		t.Skipf("SKIPPED: asked for %d huge pages, %d are free (%v)", pages, free, err)
	}
}

// fakeHost is a host whose kernel files are these.
func fakeHost(t *testing.T, files map[string]string) host {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		full := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(full), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(full, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return host{root: root}
}

func mustClose(t *testing.T, c interface{ Close() error }) {
	t.Helper()
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
		if err := c.Close(); err != nil {
			t.Errorf("second Close: %v", err)
		}
	})
}

// smaps is one number, in bytes, of the mapping that begins with mem.
func smaps(t *testing.T, mem []byte, field string) int64 {
	t.Helper()
	text, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok := strings.Cut("\n"+string(text), fmt.Sprintf("\n%x-", address(mem)))
	if !ok {
		t.Fatalf("no mapping at %#x", address(mem))
	}
	_, rest, ok = strings.Cut(rest, "\n"+field+":")
	if !ok {
		t.Fatalf("no %s in smaps", field)
	}
	var kib int64
	if _, err := fmt.Sscan(rest, &kib); err != nil {
		t.Fatal(err)
	}
	return kib << 10
}

func address(mem []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(mem))) }

// wantError checks that err wraps target and names every one of words.
func wantError(t *testing.T, err, target error, words ...string) {
	t.Helper()
	if err == nil || target != nil && !errors.Is(err, target) {
		t.Fatalf("error %v, want one that wraps %v", err, target)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error %q does not say %q", err, w)
		}
	}
}
