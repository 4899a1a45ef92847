//go:build linux

package dax

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"path"

	"lookaside/internal/bytesize"
)

// BudgetReserve is the memory that usually stays free beside an arena. It covers page tables, the
// process itself, and allocations between our check and the kernel's.
const BudgetReserve = 64 << 20

// regionReserve stays free beside a region that [Create] makes.
const regionReserve = 16 << 20

const hugePagesDir = "sys/kernel/mm/hugepages/hugepages-2048kB"

// CheckBudget returns an error unless this host, and every control group (v1 or v2) that this
// process is in, can provide sizeBytes of memory of the kind now, and reserve more bytes of
// ordinary memory. Call it before populating: if a group exceeds its limit, a process is killed,
// and no call returns an error. The error wraps ErrNoMemory, or ErrTooLarge if waiting cannot help.
// It contains the numbers and the limit's name.
//
// The result holds for this moment and reserves nothing. KindFile needs only memory that the kernel
// can take back, so it always passes; [Create] checks the filesystem instead. KindAuto is checked
// as the kind that [Choose] returns.
func CheckBudget(sizeBytes int64, kind Kind, reserve int64) error {
	return checkBudget(systemHost, sizeBytes, kind, reserve)
}

// GroupMemory returns the memory that the control groups of this process leave it: the least of
// them. limited is false if no group has a limit.
func GroupMemory() (free int64, limited bool, err error) {
	return groupMemory(systemHost)
}

func groupMemory(h host) (free int64, limited bool, err error) {
	rooms, err := groupRooms(h)
	free = math.MaxInt64
	for _, r := range rooms {
		free = min(free, r.free)
	}
	return free, len(rooms) > 0, err
}

func checkBudget(h host, size int64, kind Kind, reserve int64) error {
	if kind == "" || kind == KindAuto {
		kind, _, _ = choose(h, KindAuto, size)
	}
	switch kind {
	case KindFile:
		return nil
	case KindHugetlb:
		return checkHugetlb(h, size)
	default:
		return checkMemory(h, size, reserve)
	}
}

// refused returns the error for a limit that leaves free bytes, fewer than size. most is what the
// limit could leave if nothing else used any of it.
func refused(size, most, free int64, limit string) error {
	cause := ErrNoMemory
	if size > most {
		cause = ErrTooLarge
	}
	return fmt.Errorf("%w: need %s (%d bytes), but %s", cause, bytesize.Format(size), size, limit+
		fmt.Sprintf(", of which %s (%d bytes) can be taken", bytesize.Format(max(free, 0)),
			max(free, 0)))
}

// room is what one limit leaves free.
type room struct {
	total int64 // if nothing used any of it
	free  int64
	limit string // its name and numbers
}

func checkMemory(h host, size, reserve int64) error {
	info, err := h.fields("proc/meminfo")
	if err != nil {
		return fmt.Errorf("memory budget: %w", err)
	}
	available := info["MemAvailable"] << 10
	rooms, err := groupRooms(h)
	if err != nil {
		return err
	}
	rooms = append([]room{{info["MemTotal"] << 10, available,
		fmt.Sprintf("the host has MemAvailable %s", bytesize.Format(available))}}, rooms...)
	for _, r := range rooms {
		if free := r.free - reserve; size > free {
			return refused(size, r.total-reserve, free, r.limit)
		}
	}
	return nil
}

// groupRooms returns what each limit of the memory groups leaves free.
func groupRooms(h host) ([]room, error) {
	groups, err := h.cgroups("memory")
	if err != nil {
		return nil, fmt.Errorf("memory budget: %w", err)
	}
	var rooms []room
	for _, g := range groups {
		err := g.walk(func(dir string) error {
			more, err := roomsOf(h, g.version, dir)
			rooms = append(rooms, more...)
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	return rooms, nil
}

// walk calls check for the group and all its parents, because any of them may be the tightest.
func (g cgroup) walk(check func(dir string) error) error {
	for p := g.path; ; p = path.Dir(p) {
		if err := check(path.Join(g.mount, p)); err != nil {
			return err
		}
		if p == "/" {
			return nil
		}
	}
}

// roomsOf returns what the limits of one group leave free. Page cache counts as free, because the
// kernel drops it before it kills.
func roomsOf(h host, version int, dir string) (rooms []room, err error) {
	limits, usage, prefix := []string{"memory.max", "memory.high"}, "memory.current", ""
	if version == 1 {
		limits, usage, prefix = []string{"memory.limit_in_bytes"}, "memory.usage_in_bytes", "total_"
	}
	for _, name := range limits {
		limit, err := h.readInt(path.Join(dir, name))
		if errors.Is(err, fs.ErrNotExist) { // the root group, or no controller here
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("memory budget: %w", err)
		}
		if limit >= math.MaxInt64>>12<<12 { // v1 writes "none" like this
			continue
		}
		used, err := h.readInt(path.Join(dir, usage))
		if err != nil {
			return nil, fmt.Errorf("memory budget: %w", err)
		}
		stat, err := h.fields(path.Join(dir, "memory.stat"))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("memory budget: %w", err)
		}
		used = max(used-stat[prefix+"inactive_file"]-stat[prefix+"active_file"], 0)
		rooms = append(rooms, room{limit, limit - used,
			fmt.Sprintf("the control group limit %s is %s with %s used",
				path.Join(dir, name), bytesize.Format(limit), bytesize.Format(used))})
	}
	return rooms, nil
}

// freeHugePages returns how many 2 MiB pages the pool can provide, including those that
// vm.nr_overcommit_hugepages allows.
func freeHugePages(h host) (pages int64, err error) {
	var n [4]int64
	for i, name := range []string{"free_hugepages", "resv_hugepages", "nr_overcommit_hugepages",
		"surplus_hugepages"} {
		if n[i], err = h.readInt(path.Join(hugePagesDir, name)); err != nil {
			return 0, err
		}
	}
	return max(n[0]-n[1], 0) + max(n[2]-n[3], 0), nil
}

func checkHugetlb(h host, size int64) error {
	need := (size + HugePageSize - 1) / HugePageSize
	free, err := freeHugePages(h)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: this kernel has no 2 MiB huge pages", ErrUnsupported)
	}
	if err != nil {
		return fmt.Errorf("huge page budget: %w", err)
	}
	if free < need {
		return fmt.Errorf("%w: need %d huge pages of 2 MiB (%s), but the pool has %d free (%s); raise /%s/nr_hugepages",
			ErrNoMemory, need, bytesize.Format(size), free, bytesize.Format(free*HugePageSize),
			hugePagesDir)
	}
	groups, err := h.cgroups("hugetlb")
	if err != nil {
		return fmt.Errorf("huge page budget: %w", err)
	}
	for _, g := range groups {
		limitName, usageName := "hugetlb.2MB.max", "hugetlb.2MB.current"
		if g.version == 1 {
			limitName, usageName = "hugetlb.2MB.limit_in_bytes", "hugetlb.2MB.usage_in_bytes"
		}
		err := g.walk(func(dir string) error {
			limit, err := h.readInt(path.Join(dir, limitName))
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err != nil {
				return fmt.Errorf("huge page budget: %w", err)
			}
			used, err := h.readInt(path.Join(dir, usageName))
			if err != nil {
				return fmt.Errorf("huge page budget: %w", err)
			}
			if limit-used < size {
				return refused(size, limit, limit-used,
					fmt.Sprintf("the control group limit %s is %s with %s used",
						path.Join(dir, limitName), bytesize.Format(limit), bytesize.Format(used)))
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}
