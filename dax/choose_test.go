//go:build linux

package dax

import (
	"maps"
	"strings"
	"testing"
)

func thp(global, size string) map[string]string {
	pick := func(modes, mode string) string {
		return strings.Replace(modes, mode, "["+mode+"]", 1) +
			"\n"
	}
	files := map[string]string{thpShmem: pick("always within_size advise never deny force", global)}
	if size != "" {
		files[thpShmem2MB] = pick("always inherit within_size advise never", size)
	}
	return files
}

func TestChoose(t *testing.T) {
	const size = 100 * HugePageSize
	for _, c := range []struct {
		name   string
		want   Kind
		parts  []map[string]string
		kind   Kind // "" is refused
		reason []string
	}{
		{"auto, pool", KindAuto, []map[string]string{pool(100, 100, 0, 0, 0), thp("advise", "")},
			KindHugetlb, []string{"200MiB"}},
		{"unset is auto", "", []map[string]string{pool(100, 100, 0, 0, 0)}, KindHugetlb, nil},
		{"auto, pool too small", KindAuto, []map[string]string{pool(100, 99, 0, 0, 0),
			thp("advise", "inherit")}, KindTHP, []string{"99 free", "allowed"}},
		{"auto, neither", KindAuto, []map[string]string{pool(0, 0, 0, 0, 0),
			thp("never", "inherit")}, KindMemfd, []string{"0 free", "shmem_enabled", "never",
			"advise"}},
		{"auto, old kernel", KindAuto, nil, KindMemfd, []string{"no 2 MiB huge pages",
			"no transparent huge pages"}},
		{"hugetlb", KindHugetlb, []map[string]string{pool(100, 100, 0, 0, 0)}, KindHugetlb, nil},
		{"hugetlb, too small", KindHugetlb, []map[string]string{pool(100, 99, 0, 0, 0)}, "",
			[]string{"99 free"}},
		{"thp advise", KindTHP, []map[string]string{thp("advise", "")}, KindTHP, nil},
		{"thp within_size", KindTHP, []map[string]string{thp("within_size", "inherit")}, KindTHP,
			nil},
		{"thp always", KindTHP, []map[string]string{thp("always", "inherit")}, KindTHP, nil},
		{"thp size says advise", KindTHP, []map[string]string{thp("never", "advise")}, KindTHP,
			nil},
		{"thp size says never", KindTHP, []map[string]string{thp("advise", "never")}, "",
			[]string{"hugepages-2048kB", "never"}},
		{"thp denied over all", KindTHP, []map[string]string{thp("deny", "always")}, "",
			[]string{"deny"}},
		{"thp forced over all", KindTHP, []map[string]string{thp("force", "never")}, KindTHP, nil},
		{"thp of 512 MiB", KindTHP, []map[string]string{thp("advise", ""), {thpSize: "536870912\n"}},
			"", []string{"512MiB", "arena.kind", "hugetlb or memfd"}},
		{"auto, thp of 512 MiB", KindAuto, []map[string]string{thp("always", ""),
			{thpSize: "536870912\n"}}, KindMemfd, []string{"512MiB"}},
		{"thp of 32 MiB beside 2 MiB", KindTHP, []map[string]string{thp("never", "advise"),
			{thpSize: "33554432\n"}}, KindTHP, nil},
		{"thp of 32 MiB, 2 MiB inherit", KindTHP, []map[string]string{thp("advise", "inherit"),
			{thpSize: "33554432\n"}}, KindTHP, nil},
		{"thp of 2 MiB", KindTHP, []map[string]string{thp("advise", "inherit"),
			{thpSize: "2097152\n"}}, KindTHP, nil},
		{"thp garbled", KindTHP, []map[string]string{{thpShmem: "what\n"}}, "", []string{"what"}},
		{"thp absent", KindTHP, nil, "", []string{"no transparent"}},
		{"memfd", KindMemfd, nil, KindMemfd, nil},
		{"file", KindFile, nil, KindFile, nil},
		{"unknown", "pmem", nil, "", []string{"pmem", "hugetlb"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			files := map[string]string{}
			for _, p := range c.parts {
				maps.Copy(files, p)
			}
			kind, reason, err := choose(fakeHost(t, files), c.want, size)
			if kind != c.kind || (err == nil) != (c.kind != "") {
				t.Fatalf("%q, %v; want %q", kind, err, c.kind)
			}
			if err != nil {
				reason = err.Error()
			}
			if reason == "" {
				t.Error("no reason")
			}
			for _, w := range c.reason {
				if !strings.Contains(reason, w) {
					t.Errorf("reason %q does not say %q", reason, w)
				}
			}
		})
	}
	if _, _, err := Choose(KindMemfd, 0); err == nil {
		t.Error("a size of zero accepted")
	}
	if kind, reason, err := Choose(KindAuto, 1<<20); err != nil || kind == KindAuto ||
		reason == "" {
		t.Errorf("here: %q, %q, %v", kind, reason, err)
	}
}
