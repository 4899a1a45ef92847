package doctor

import (
	"bufio"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"lookaside/dax"
)

// Host is what the kernel says of this host. Sizes are in bytes; -1 is unknown.
type Host struct {
	MemTotal, MemAvailable   int64
	HugePageBytes            int64 // of one page of the default size
	HugePages, HugePagesFree int64
	ShmemEnabled             string // the choice in transparent_hugepage/shmem_enabled; "" unknown
	Memlock                  int64  // RLIMIT_MEMLOCK of this process; MaxInt64: unlimited
	GroupFree                int64  // what the control groups leave; -1: no limit
	Nodes                    int    // NUMA nodes with memory
	ShmTotal, ShmFree        int64  // of /dev/shm
	CPUs                     int
	Driver                   string   // of NVIDIA, such as 570.86; "" if there is none
	GPUs                     []string // their models
}

func readHost(root string) Host {
	at := func(name string) string { return filepath.Join(root, name) }
	h := Host{MemTotal: -1, MemAvailable: -1, HugePages: -1, HugePagesFree: -1, ShmTotal: -1,
		ShmFree: -1, GroupFree: -1, CPUs: runtime.NumCPU()}
	mem := readNumbers(at("proc/meminfo"))
	for name, to := range map[string]*int64{"MemTotal": &h.MemTotal,
		"MemAvailable": &h.MemAvailable, "Hugepagesize": &h.HugePageBytes} {
		if v, ok := mem[name]; ok {
			*to = v << 10
		}
	}
	for name, to := range map[string]*int64{"HugePages_Total": &h.HugePages,
		"HugePages_Free": &h.HugePagesFree} {
		if v, ok := mem[name]; ok {
			*to = v
		}
	}
	if b, err := os.ReadFile(at("sys/kernel/mm/transparent_hugepage/shmem_enabled")); err == nil {
		if m := regexp.MustCompile(`\[(\w+)\]`).FindSubmatch(b); m != nil {
			h.ShmemEnabled = string(m[1])
		}
	}
	var limit unix.Rlimit
	if h.Memlock = -1; unix.Getrlimit(unix.RLIMIT_MEMLOCK, &limit) == nil {
		h.Memlock = int64(min(limit.Cur, math.MaxInt64))
	}
	if free, limited, err := dax.GroupMemory(); err == nil && limited {
		h.GroupFree = max(free, 0)
	}
	nodes, _ := filepath.Glob(at("sys/devices/system/node/node[0-9]*/meminfo"))
	h.Nodes = len(nodes)
	var st unix.Statfs_t
	if unix.Statfs(at("dev/shm"), &st) == nil {
		h.ShmTotal, h.ShmFree = int64(st.Blocks)*st.Bsize, int64(st.Bavail)*st.Bsize
	}
	if b, err := os.ReadFile(at("proc/driver/nvidia/version")); err == nil {
		h.Driver = "unknown"
		if m := regexp.MustCompile(`Kernel Module.*?\s(\d{3,}(?:\.\d+)+)`).FindSubmatch(b); m != nil {
			h.Driver = string(m[1])
		}
	}
	cards, _ := filepath.Glob(at("proc/driver/nvidia/gpus/*/information"))
	for _, card := range cards {
		b, _ := os.ReadFile(card)
		model := "unknown"
		for line := range strings.SplitSeq(string(b), "\n") {
			if v, ok := strings.CutPrefix(line, "Model:"); ok {
				model = strings.TrimSpace(v)
			}
		}
		h.GPUs = append(h.GPUs, model)
	}
	return h
}

// readNumbers reads lines "Name: number …".
func readNumbers(name string) map[string]int64 {
	out := map[string]int64{}
	f, err := os.Open(name)
	if err != nil {
		return out
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		name, rest, _ := strings.Cut(lines.Text(), ":")
		if fields := strings.Fields(rest); len(fields) > 0 {
			if n, err := strconv.ParseInt(fields[0], 10, 64); err == nil {
				out[name] = n
			}
		}
	}
	return out
}
