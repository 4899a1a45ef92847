//go:build linux

package dax

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"lookaside/internal/bytesize"
)

const (
	thpShmem    = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
	thpShmem2MB = "sys/kernel/mm/transparent_hugepage/hugepages-2048kB/shmem_enabled"
	thpSize     = "sys/kernel/mm/transparent_hugepage/hpage_pmd_size"
)

// Choose returns the kind that a region of sizeBytes would become, and the reason in words for the
// log. KindAuto becomes hugetlb if the pool has enough free pages, else transparent huge pages if
// the host allows them for shared memory, else 4 KiB pages. Any other kind is returned as it is.
// The error is ErrUnsupported if this host cannot provide the kind at all, ErrNoMemory if it cannot
// provide that much.
func Choose(want Kind, sizeBytes int64) (Kind, string, error) {
	return choose(systemHost, want, sizeBytes)
}

func choose(h host, want Kind, size int64) (Kind, string, error) {
	if size <= 0 {
		return "", "", fmt.Errorf("region size %d bytes: must be positive", size)
	}
	switch want {
	case "", KindAuto:
		hugetlb := checkHugetlb(h, size)
		if hugetlb == nil {
			return KindHugetlb, fmt.Sprintf("the huge page pool has %s free", bytesize.Format(size)), nil
		}
		thp := choiceTHP(h)
		if thp == nil {
			return KindTHP, fmt.Sprintf("no hugetlb (%v); transparent huge pages are allowed",
				hugetlb), nil
		}
		return KindMemfd, fmt.Sprintf("no hugetlb (%v); no transparent huge pages (%v)", hugetlb,
			thp), nil
	case KindHugetlb:
		if err := checkHugetlb(h, size); err != nil {
			return "", "", err
		}
		return want, "as set", nil
	case KindTHP:
		if err := choiceTHP(h); err != nil {
			return "", "", err
		}
		return want, "as set", nil
	case KindMemfd, KindFile:
		return want, "as set", nil
	default:
		_, err := ParseKind(string(want))
		return "", "", err
	}
}

// choiceTHP returns nil if a memfd gets huge pages after MADV_HUGEPAGE.
func choiceTHP(h host) error {
	global, err := selected(h, thpShmem)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: this kernel has no transparent huge pages", ErrUnsupported)
	}
	if err != nil {
		return err
	}
	mode, name := global, "/"+thpShmem
	if global != "deny" && global != "force" {
		// Since Linux 6.11 each size has a switch, by default "inherit".
		size, err := selected(h, thpShmem2MB)
		switch {
		case err == nil && size != "inherit":
			mode, name = size, "/"+thpShmem2MB
		case err != nil && !errors.Is(err, fs.ErrNotExist):
			return err
		case err != nil:
			// Where base pages are larger than 4 KiB, as some arm64 kernels have them, the one
			// switch is for huge pages of 32 or 512 MiB, to which no region is aligned.
			if large, err := h.readInt(thpSize); err == nil && large != HugePageSize {
				return fmt.Errorf("%w: the only transparent huge pages of this kernel have %s, not 2MiB; set arena.kind to hugetlb or memfd", ErrUnsupported, bytesize.Format(large))
			}
		}
	}
	switch mode {
	case "advise", "within_size", "always", "force":
		return nil
	}
	return fmt.Errorf("%w: %s is %q; write \"advise\" to it", ErrUnsupported, name, mode)
}

// selected returns the word in brackets of a file like "always [madvise] never".
func selected(h host, name string) (string, error) {
	s, err := h.read(name)
	if err != nil {
		return "", err
	}
	for _, word := range strings.Fields(s) {
		if len(word) > 2 && word[0] == '[' && word[len(word)-1] == ']' {
			return word[1 : len(word)-1], nil
		}
	}
	return "", fmt.Errorf("/%s: nothing selected in %.80q", name, s)
}
