//go:build linux

package dax

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
)

// host is the root of the kernel's text files: "/" or, in tests, a directory with a made-up /proc
// and /sys.
type host struct{ root string }

var systemHost = host{root: "/"}

// maxHostFile bounds the bytes read of such a file; mountinfo is the largest.
const maxHostFile = 4 << 20

func (h host) read(name string) (string, error) {
	f, err := os.Open(filepath.Join(h.root, name))
	if err != nil {
		return "", err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxHostFile))
	return string(b), err
}

// readInt reads a file with one number; "max" is MaxInt64.
func (h host) readInt(name string) (int64, error) {
	s, err := h.read(name)
	if err != nil {
		return 0, err
	}
	s = strings.TrimSpace(s)
	if s == "max" {
		return math.MaxInt64, nil
	}
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", name, err)
	}
	return int64(min(n, math.MaxInt64)), nil
}

// fields reads a file of lines "name value …" or "name: value …" into numbers.
func (h host) fields(name string) (map[string]int64, error) {
	s, err := h.read(name)
	if err != nil {
		return nil, err
	}
	out := make(map[string]int64)
	for lines := bufio.NewScanner(strings.NewReader(s)); lines.Scan(); {
		f := strings.Fields(lines.Text())
		if len(f) < 2 {
			continue
		}
		if n, err := strconv.ParseInt(f[1], 10, 64); err == nil {
			out[strings.TrimSuffix(f[0], ":")] = n
		}
	}
	return out, nil
}

// cgroup is one controller's hierarchy as this process sees it.
type cgroup struct {
	version int
	mount   string // mount point, relative to the host's root
	path    string // this process's group below mount; "/" is the mount itself
}

// cgroups returns the hierarchies that may limit the v1 controller or, under v2, this process. Both
// may exist side by side. None is not an error.
func (h host) cgroups(controller string) ([]cgroup, error) {
	own, err := h.read("proc/self/cgroup")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	mounts, err := h.read("proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	var out []cgroup
	for lines := bufio.NewScanner(strings.NewReader(own)); lines.Scan(); {
		// "4:memory:/a/b", "0::/a/b"
		f := strings.SplitN(lines.Text(), ":", 3)
		if len(f) != 3 {
			continue
		}
		version := 1
		switch {
		case f[0] == "0" && f[1] == "":
			version = 2
		case !contains(f[1], controller):
			continue
		}
		if mount, root, ok := cgroupMount(mounts, version, controller); ok {
			out = append(out, cgroup{version: version, mount: mount, path: below(root, f[2])})
		}
	}
	return out, nil
}

// cgroupMount finds where a hierarchy is mounted and which of its groups is the root of that mount.
// Inside a container that is often the container's own group.
func cgroupMount(mountinfo string, version int, controller string) (mount, root string, ok bool) {
	for lines := bufio.NewScanner(strings.NewReader(mountinfo)); lines.Scan(); {
		// "35 31 0:32 /root /mount options - cgroup source memory,rw"
		left, right, found := strings.Cut(lines.Text(), " - ")
		l, r := strings.Fields(left), strings.Fields(right)
		if !found || len(l) < 5 || len(r) < 3 {
			continue
		}
		if version == 2 && r[0] == "cgroup2" || version == 1 && r[0] == "cgroup" &&
			contains(r[2], controller) {
			mount, root, ok = unescape(l[4]), unescape(l[3]), true
			if root == "/" {
				return mount, root, ok
			}
		}
	}
	return mount, root, ok
}

// below returns group as seen under a mount whose root is the group root. A group outside the mount
// is not visible there; then the mount's own root is the nearest visible one.
func below(root, group string) string {
	group = path.Clean("/" + group)
	if root == "/" {
		return group
	}
	if rest, ok := strings.CutPrefix(group, root); ok && (rest == "" || rest[0] == '/') {
		return path.Clean("/" + rest)
	}
	return "/"
}

func contains(list, item string) bool {
	for _, s := range strings.Split(list, ",") {
		if s == item {
			return true
		}
	}
	return false
}

// unescape resolves mountinfo's octal escapes of blanks and backslashes.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}
