//go:build linux

package dax

import (
	"errors"
	"maps"
	"os"
	"strconv"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// twoNodes is a host of two nodes with eight CPUs each; node 2 has no memory.
func twoNodes(cpus, mems string) map[string]string {
	files := map[string]string{
		"sys/devices/system/node/has_memory":    "0-1\n",
		"sys/devices/system/node/node0/cpulist": "0-3,8-11\n",
		"sys/devices/system/node/node1/cpulist": "4-7,12-15\n",
		"sys/devices/system/node/node2/cpulist": "16-19\n",
	}
	status := "Name:\tlookaside\nCpus_allowed:\tffff\nCpus_allowed_list:\t" + cpus +
		"\nMems_allowed_list:\t" + mems + "\n"
	files["proc/self/status"] = status
	return files
}

func TestNUMANode(t *testing.T) {
	one := map[string]string{
		"sys/devices/system/node/has_memory":    "0\n",
		"sys/devices/system/node/node0/cpulist": "0-1\n",
		"proc/self/status":                      "Cpus_allowed_list:\t0-1\nMems_allowed_list:\t0\n",
	}
	for _, c := range []struct {
		name, setting string
		files         map[string]string
		node          int
		words         []string // of the refusal, or of the reason
		refused       bool
	}{
		{"none", "none", twoNodes("4-7", "0-1"), NoNUMANode, nil, false},
		{"unset", "", nil, NoNUMANode, nil, false},
		{"auto, first", "auto", twoNodes("0-2,9", "0-1"), 0, []string{"node 0"}, false},
		{"auto, second", "auto", twoNodes("4,12-15", "0-1"), 1, []string{"node 1"}, false},
		{"auto, both", "auto", twoNodes("0-15", "0-1"), NoNUMANode, []string{"several"}, false},
		{"auto, node without memory", "auto", twoNodes("16-17", "0-1"), NoNUMANode,
			[]string{"several"}, false},
		{"auto, cpuset leaves one node's memory", "auto", twoNodes("4-7", "0"), NoNUMANode,
			[]string{"one node"}, false},
		{"auto, one node", "auto", one, NoNUMANode, []string{"one node"}, false},
		{"auto, no NUMA", "auto", nil, NoNUMANode, []string{"one node"}, false},
		{"auto, garbled", "auto", twoNodes("4-x", "0-1"), NoNUMANode, []string{"4-x"}, false},
		{"number", "1", twoNodes("0-3", "0-1"), 1, nil, false},
		{"number on one node", "0", one, 0, nil, false},
		{"no NUMA, node 0", "0", nil, 0, nil, false},
		{"no such node", "3", twoNodes("0-3", "0-1"), 0, []string{"node 3", "0, 1"}, true},
		{"without memory", "2", twoNodes("0-3", "0-1"), 0, []string{"node 2"}, true},
		{"forbidden by cpuset", "1", twoNodes("0-3", "0"), 0, []string{"node 1", "there is 0"},
			true},
		{"negative", "-1", twoNodes("0-3", "0-1"), 0, []string{`"-1"`}, true},
		{"huge", "99999999999999999999", twoNodes("0-3", "0-1"), 0, []string{"number"}, true},
		{"word", "node1", twoNodes("0-3", "0-1"), 0, []string{`"node1"`, "none, auto"}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			node, reason, err := numaNode(fakeHost(t, c.files), c.setting)
			if c.refused {
				wantError(t, err, nil, c.words...)
				return
			}
			if err != nil || node != c.node || reason == "" {
				t.Fatalf("%d, %q, %v; want %d", node, reason, err, c.node)
			}
			for _, w := range c.words {
				if !strings.Contains(reason, w) {
					t.Errorf("reason %q does not say %q", reason, w)
				}
			}
		})
	}
}

func TestNodeOfProcess(t *testing.T) {
	files := twoNodes("0-15", "0-1")
	maps.Copy(files, map[string]string{"proc/42/status": "Cpus_allowed_list:\t4-5\n"})
	h := fakeHost(t, files)
	if node, reason := nodeOfProcess(h, "42"); node != 1 {
		t.Errorf("%d (%s), want 1", node, reason)
	}
	if node, reason := nodeOfProcess(h, "43"); node != NoNUMANode {
		t.Errorf("a process that is not there: %d (%s)", node, reason)
	}
	if node, _ := nodeOfProcess(systemHost, strconv.Itoa(os.Getpid())); node < NoNUMANode {
		t.Errorf("this process: %d", node)
	}
}

func TestParseList(t *testing.T) {
	for text, want := range map[string]string{"": "", "0": "0", "0-2,7\n": "0, 1, 2, 7",
		" 3,1 ": "1, 3", "0-0": "0"} {
		got, err := parseList(text, 100)
		if err != nil || listOf(got) != want {
			t.Errorf("%q: %q, %v", text, listOf(got), err)
		}
	}
	for _, text := range []string{",", "1,", "-", "1-", "-1", "2-1", "100", "0-4000000000", "a",
		"1 2", "1--2"} {
		if got, err := parseList(text, 100); err == nil {
			t.Errorf("%q accepted: %v", text, got)
		}
	}
}

// The policy reaches the memory, which is then also every client's.
func TestBindNode(t *testing.T) {
	r, err := Create(t.Context(), Options{Kind: KindMemfd, SizeBytes: 1 << 20, NUMANode: 0,
		Populate: true})
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENOSYS) {
		t.Skipf("SKIPPED: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	mustClose(t, r)
	other, err := unix.Mmap(r.FD(), 0, int(r.Size()), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(other) }()
	for name, mem := range map[string][]byte{"ours": r.Bytes(), "a client's": other} {
		var mode int32
		var mask [maxNUMANodes / 64]uint64
		_, _, errno := unix.Syscall6(unix.SYS_GET_MEMPOLICY, uintptr(unsafe.Pointer(&mode)),
			uintptr(unsafe.Pointer(&mask)),
			maxNUMANodes, address(mem), unix.MPOL_F_ADDR, 0)
		if errno != 0 {
			t.Skipf("SKIPPED: get_mempolicy: %v", errno)
		}
		if mode != unix.MPOL_PREFERRED || mask[0] != 1 {
			t.Errorf("%s mapping: policy %d, nodes %b", name, mode, mask[0])
		}
	}
}
