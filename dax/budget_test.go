//go:build linux

package dax

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

const (
	gib  = 1 << 30
	v1No = "9223372036854771712\n" // how v1 writes "no limit"
)

// plenty is a host with 64 GiB available.
func plenty(more map[string]string) map[string]string {
	files := map[string]string{"proc/meminfo": "MemTotal:       134217728 kB\nMemFree:  1 kB\nMemAvailable:   67108864 kB\n"}
	for name, text := range more {
		files[name] = text
	}
	return files
}

func v1(own string, more map[string]string) map[string]string {
	files := plenty(more)
	files["proc/self/cgroup"] = "9:name=systemd:/\n4:cpu,memory:" + own + "\n0::/\n"
	files["proc/self/mountinfo"] = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n" +
		"35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,cpu,memory\n" +
		"41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
	return files
}

func v2(own, mountRoot string, more map[string]string) map[string]string {
	files := plenty(more)
	files["proc/self/cgroup"] = "0::" + own + "\n"
	files["proc/self/mountinfo"] = "29 23 0:26 " + mountRoot +
		" /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw,nsdelegate\n"
	return files
}

func TestBudget(t *testing.T) {
	const v1dir, v2dir = "sys/fs/cgroup/memory/", "sys/fs/cgroup/"
	for _, c := range []struct {
		name  string
		files map[string]string
		size  int64
		kind  Kind
		words []string // of the refusal; none means that it fits
	}{
		{"host has it", plenty(nil), 63 * gib, KindMemfd, nil},
		{"host has not", plenty(nil), 64 * gib, KindTHP, []string{"need 64GiB", "68719476736 bytes",
			"MemAvailable 64GiB", "63.94GiB"}},
		{"file needs no memory", plenty(nil), 640 * gib, KindFile, nil},
		{"auto is memory here", plenty(nil), 65 * gib, KindAuto, []string{"MemAvailable"}},

		{"v1 unlimited", v1("/a", map[string]string{v1dir + "a/memory.limit_in_bytes": v1No,
			v1dir + "memory.limit_in_bytes": v1No}), 60 * gib, KindMemfd, nil},
		{"v1 own limit", v1("/a/b", map[string]string{
			v1dir + "a/b/memory.limit_in_bytes": "8589934592\n",
			v1dir + "a/b/memory.usage_in_bytes": "1073741824\n",
			v1dir + "a/memory.limit_in_bytes":   v1No}),
			8 * gib, KindMemfd, []string{"need 8GiB",
				"sys/fs/cgroup/memory/a/b/memory.limit_in_bytes is 8GiB with 1GiB used",
				"6.94GiB"}},
		{"v1 cache can go", v1("/a/b", map[string]string{
			v1dir + "a/b/memory.limit_in_bytes": "8589934592\n",
			v1dir + "a/b/memory.usage_in_bytes": "8589934592\n",
			v1dir + "a/b/memory.stat":           "inactive_file 1\ntotal_cache 9\ntotal_inactive_file 4294967296\ntotal_active_file 3221225472\n"}),
			6 * gib, KindMemfd, nil},
		{"v1 parent is tighter", v1("/a/b", map[string]string{
			v1dir + "a/b/memory.limit_in_bytes": v1No,
			v1dir + "a/memory.limit_in_bytes":   "1073741824\n",
			v1dir + "a/memory.usage_in_bytes":   "0\n"}),
			gib, KindTHP, []string{"memory/a/memory.limit_in_bytes is 1GiB"}},
		{"v1 the mount's own root", v1("/", map[string]string{
			v1dir + "memory.limit_in_bytes": "1073741824\n",
			v1dir + "memory.usage_in_bytes": "0\n"}),
			gib, KindMemfd, []string{"memory/memory.limit_in_bytes"}},

		{"v2 root group has no files", v2("/", "/", nil), 60 * gib, KindMemfd, nil},
		{"v2 max", v2("/pod/c", "/", map[string]string{
			v2dir + "pod/c/memory.max": "max\n", v2dir + "pod/c/memory.high": "max\n",
			v2dir + "pod/memory.max": "4294967296\n", v2dir + "pod/memory.high": "max\n",
			v2dir + "pod/memory.current": "2147483648\n",
			v2dir + "pod/memory.stat":    "anon 5\nfile 1073741824\ninactive_file 536870912\nactive_file 536870912\n"}),
			3 * gib, KindMemfd, []string{"sys/fs/cgroup/pod/memory.max is 4GiB with 1GiB used",
				"2.94GiB"}},
		{"v2 high", v2("/pod", "/", map[string]string{
			v2dir + "pod/memory.max": "max\n", v2dir + "pod/memory.high": "1073741824\n",
			v2dir + "pod/memory.current": "0\n"}),
			gib, KindMemfd, []string{"pod/memory.high is 1GiB"}},
		{"v2 within", v2("/pod", "/", map[string]string{
			v2dir + "pod/memory.max": "4294967296\n", v2dir + "pod/memory.current": "0\n"}),
			3 * gib, KindMemfd, nil},
		{"container, its group is the mount", v2("/docker/77", "/docker/77", map[string]string{
			v2dir + "memory.max": "1073741824\n", v2dir + "memory.current": "0\n"}), gib, KindMemfd,
			[]string{"sys/fs/cgroup/memory.max"}},
		{"container, group outside the mount", v2("/../other", "/docker/77", map[string]string{
			v2dir + "memory.max": "1073741824\n", v2dir + "memory.current": "0\n"}), gib, KindMemfd,
			[]string{"sys/fs/cgroup/memory.max"}},
		{"limit below what is used", v2("/pod", "/", map[string]string{
			v2dir + "pod/memory.max": "1048576\n", v2dir + "pod/memory.current": "2147483648\n"}),
			4096, KindMemfd, []string{"0B (0 bytes) can be taken"}},
		{"garbled limit", v2("/pod", "/", map[string]string{v2dir + "pod/memory.max": "lots\n"}),
			4096, KindMemfd, []string{"memory.max", "lots"}},
		{"no meminfo", map[string]string{}, 4096, KindMemfd, []string{"meminfo"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := fakeHost(t, c.files)
			err := checkBudget(h, c.size, c.kind, BudgetReserve)
			if len(c.words) == 0 {
				if err != nil {
					t.Errorf("refused: %v", err)
				}
				return
			}
			wantError(t, err, nil, c.words...)
		})
	}
}

// Whether waiting may help is told apart: what is more than there is in all never fits.
func TestBudgetForEver(t *testing.T) {
	group := map[string]string{"sys/fs/cgroup/pod/memory.max": "4294967296\n",
		"sys/fs/cgroup/pod/memory.current": "2147483648\n"}
	for _, c := range []struct {
		files map[string]string
		size  int64
		ever  bool
	}{
		{plenty(nil), 65 * gib, false},
		{plenty(nil), 128 * gib, true},
		{v2("/pod", "/", group), 3 * gib, false},
		{v2("/pod", "/", group), 4 * gib, true},
	} {
		err := checkBudget(fakeHost(t, c.files), c.size, KindMemfd, BudgetReserve)
		wantError(t, err, ErrNoMemory)
		if errors.Is(err, ErrTooLarge) != c.ever {
			t.Errorf("%v", err)
		}
	}
}

func pool(total, free, reserved, overcommit, surplus int) map[string]string {
	files := map[string]string{}
	for name, n := range map[string]int{"nr_hugepages": total, "free_hugepages": free,
		"resv_hugepages":          reserved,
		"nr_overcommit_hugepages": overcommit, "surplus_hugepages": surplus} {
		files[filepath.Join(hugePagesDir, name)] = strconv.Itoa(n) + "\n"
	}
	return plenty(files)
}

func TestBudgetHugetlb(t *testing.T) {
	const size = 100 * HugePageSize
	if err := checkBudget(fakeHost(t, pool(200, 150, 50, 0, 0)), size, KindHugetlb, 0); err != nil {
		t.Error(err)
	}
	if err := checkBudget(fakeHost(t, pool(200, 150, 60, 20, 10)), size, KindHugetlb,
		0); err != nil {
		t.Errorf("overcommit: %v", err)
	}
	err := checkBudget(fakeHost(t, pool(200, 150, 51, 0, 0)), size, KindHugetlb, 0)
	wantError(t, err, ErrNoMemory, "need 100 huge pages", "200MiB", "99 free",
		"/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")
	err = checkBudget(fakeHost(t, pool(200, 150, 50, 0, 0)), size+1, KindHugetlb, 0)
	wantError(t, err, ErrNoMemory, "need 101 huge pages")
	err = checkBudget(fakeHost(t, plenty(nil)), size, KindHugetlb, 0)
	wantError(t, err, ErrUnsupported)

	files := pool(200, 200, 0, 0, 0)
	files["proc/self/cgroup"] = "0::/pod\n"
	files["proc/self/mountinfo"] = "29 23 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n"
	files["sys/fs/cgroup/pod/hugetlb.2MB.max"] = "104857600\n"
	files["sys/fs/cgroup/pod/hugetlb.2MB.current"] = "2097152\n"
	err = checkBudget(fakeHost(t, files), size, KindHugetlb, 0)
	wantError(t, err, ErrNoMemory, "hugetlb.2MB.max is 100MiB with 2MiB used")
	delete(files, "sys/fs/cgroup/pod/hugetlb.2MB.max")
	files["proc/self/cgroup"] = "7:hugetlb:/pod\n"
	files["proc/self/mountinfo"] = "29 23 0:26 / /sys/fs/cgroup/h ro - cgroup cgroup rw,hugetlb\n"
	files["sys/fs/cgroup/h/pod/hugetlb.2MB.limit_in_bytes"] = "104857600\n"
	files["sys/fs/cgroup/h/pod/hugetlb.2MB.usage_in_bytes"] = "0\n"
	err = checkBudget(fakeHost(t, files), size, KindHugetlb, 0)
	wantError(t, err, ErrNoMemory, "hugetlb.2MB.limit_in_bytes is 100MiB")
}

// This very host: what it has not is refused with its numbers, what is little
// is given.
func TestBudgetHere(t *testing.T) {
	wantError(t, CheckBudget(1<<50, KindMemfd, BudgetReserve), ErrNoMemory, "1024TiB")
	if err := CheckBudget(1<<20, KindMemfd, BudgetReserve); err != nil {
		t.Error(err)
	}
	_, err := Create(t.Context(), Options{Kind: KindMemfd, SizeBytes: 1 << 50, NUMANode: NoNUMANode,
		Populate: true})
	wantError(t, err, ErrNoMemory, "1024TiB")
}

func helperCheckLimit(arg string) string {
	size, err := strconv.ParseInt(arg, 10, 64)
	if err != nil {
		return err.Error()
	}
	fmt.Println(CheckBudget(size, KindMemfd, BudgetReserve))
	ctx := context.Background()
	_, err = Create(ctx, Options{Kind: KindMemfd, SizeBytes: size, NUMANode: NoNUMANode,
		Populate: true})
	fmt.Println(err)
	r, err := Create(ctx, Options{Kind: KindMemfd, SizeBytes: 16 << 20, NUMANode: NoNUMANode,
		Populate: true})
	if err != nil {
		return err.Error()
	}
	if err := r.Close(); err != nil {
		return err.Error()
	}
	return "lives\n"
}

// Fault 19: in a real control group, populating beyond the limit would be
// answered by the killer; we refuse up front.
func TestBudgetInControlGroup(t *testing.T) {
	groups, err := systemHost.cgroups("memory")
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range groups {
		limit := "memory.max"
		if g.version == 1 {
			limit = "memory.limit_in_bytes"
		}
		dir := filepath.Join(g.mount, g.path, fmt.Sprintf("lookaside-test-%d", os.Getpid()))
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Logf("no control group under %s: %v", filepath.Join(g.mount, g.path), err)
			continue
		}
		defer os.Remove(dir)
		if err := os.WriteFile(filepath.Join(dir, limit), []byte("268435456"), 0); err != nil {
			t.Logf("%v", err)
			continue
		}
		// The shell enters the group and becomes the helper there.
		cmd := helper(t, "check-limit", "536870912")
		cmd.Args = []string{"sh", "-c", `echo $$ > "$0/cgroup.procs" && exec "$1"`, dir, cmd.Path}
		cmd.Path = "/bin/sh"
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("killed, or worse: %v\n%s", err, out)
		}
		lines := strings.Split(string(out), "\n")
		if len(lines) != 4 || lines[2] != "lives" {
			t.Fatalf("%s", out)
		}
		for _, refusal := range lines[:2] {
			for _, word := range []string{"need 512MiB", filepath.Join(dir, limit) + " is 256MiB"} {
				if !strings.Contains(refusal, word) {
					t.Errorf("%q does not say %q", refusal, word)
				}
			}
		}
		return
	}
	t.Skip("SKIPPED: no memory control group in which to make another")
}
