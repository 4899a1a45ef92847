//go:build linux

package dax

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// NoNUMANode means that memory may come from any node.
const NoNUMANode = -1

const (
	numaDir = "sys/devices/system/node"
	// maxNUMANodes and maxCPUs bound the numbers in a list.
	maxNUMANodes = 1024
	maxCPUs      = 8192
)

// NUMANode turns the setting arena.numa into Options.NUMANode, with the reason in words for the
// log. "none" is no node. "auto" is the node that all CPUs of this process belong to, or none if
// they span several or the host has only one. A number is that node, which must have memory that
// this process may use.
func NUMANode(setting string) (node int, reason string, err error) {
	return numaNode(systemHost, setting)
}

func numaNode(h host, setting string) (int, string, error) {
	switch setting {
	case "", "none":
		return NoNUMANode, "not bound", nil
	case "auto":
		node, reason := nodeOfProcess(h, "self")
		return node, reason, nil
	}
	node, err := strconv.Atoi(setting)
	if err != nil || node < 0 || node >= maxNUMANodes {
		return 0, "", fmt.Errorf("NUMA node %q: want none, auto or a node's number", setting)
	}
	nodes, err := memoryNodes(h)
	if err != nil {
		return 0, "", fmt.Errorf("NUMA node %d: %w", node, err)
	}
	if !nodes[node] {
		return 0, "", fmt.Errorf(
			"NUMA node %d has no memory here that this process may use; there is %s", node,
			listOf(nodes))
	}
	return node, "as set", nil
}

func nodeOfProcess(h host, pid string) (node int, reason string) {
	nodes, err := memoryNodes(h)
	if err != nil {
		return NoNUMANode, fmt.Sprintf("not bound: %v", err)
	}
	if len(nodes) < 2 {
		return NoNUMANode, "not bound: one node only"
	}
	cpus, err := statusList(h, pid, "Cpus_allowed_list", maxCPUs)
	if err != nil {
		return NoNUMANode, fmt.Sprintf("not bound: %v", err)
	}
	for n := range nodes {
		text, err := h.read(path.Join(numaDir, "node"+strconv.Itoa(n), "cpulist"))
		if err != nil {
			continue
		}
		if own, err := parseList(text, maxCPUs); err == nil && subset(cpus, own) {
			return n, fmt.Sprintf("all CPUs of process %s are on node %d", pid, n)
		}
	}
	return NoNUMANode, fmt.Sprintf("not bound: the CPUs of process %s span several nodes", pid)
}

// memoryNodes returns the nodes that have memory and that this process's cpuset allows.
func memoryNodes(h host) (map[int]bool, error) {
	text, err := h.read(path.Join(numaDir, "has_memory"))
	if errors.Is(err, fs.ErrNotExist) {
		return map[int]bool{0: true}, nil // a kernel without NUMA
	}
	if err != nil {
		return nil, err
	}
	nodes, err := parseList(text, maxNUMANodes)
	if err != nil {
		return nil, err
	}
	if allowed, err := statusList(h, "self", "Mems_allowed_list", maxNUMANodes); err == nil {
		for n := range nodes {
			if !allowed[n] {
				delete(nodes, n)
			}
		}
	}
	return nodes, nil
}

// statusList reads a list field of /proc/PID/status.
func statusList(h host, pid, field string, limit int) (map[int]bool, error) {
	text, err := h.read(path.Join("proc", pid, "status"))
	if err != nil {
		return nil, err
	}
	for _, line := range strings.Split(text, "\n") {
		if value, ok := strings.CutPrefix(line, field+":"); ok {
			return parseList(value, limit)
		}
	}
	return nil, fmt.Errorf("/proc/%s/status has no %s", pid, field)
}

// parseList reads the kernel's "0-3,8" form. Every number is below limit.
func parseList(s string, limit int) (map[int]bool, error) {
	out := make(map[int]bool)
	s = strings.TrimSpace(s)
	if s == "" {
		return out, nil
	}
	for _, part := range strings.Split(s, ",") {
		first, last, ranged := strings.Cut(part, "-")
		a, err := strconv.Atoi(first)
		b := a
		if ranged && err == nil {
			b, err = strconv.Atoi(last)
		}
		if err != nil || a < 0 || b < a || b >= limit {
			return nil, fmt.Errorf("malformed list %.80q", s)
		}
		for ; a <= b; a++ {
			out[a] = true
		}
	}
	return out, nil
}

func subset(a, b map[int]bool) bool {
	for x := range a {
		if !b[x] {
			return false
		}
	}
	return len(a) > 0
}

func listOf(nodes map[int]bool) string {
	var names []string
	for n := range maxNUMANodes {
		if nodes[n] {
			names = append(names, strconv.Itoa(n))
		}
	}
	return strings.Join(names, ", ")
}

// bindNode requests that mem's pages come from node. It uses the preferred policy, not the strict
// one. If page cache fills the node, a strict policy gets this process or its worker killed; with a
// preferred one the arena is only partly remote. For a memfd the policy belongs to the memory, so
// pages that a client touches first follow it too.
func bindNode(mem []byte, node int) error {
	if node >= maxNUMANodes {
		return fmt.Errorf("NUMA node %d: too large", node)
	}
	var mask [maxNUMANodes / 64]uint64
	mask[node/64] = 1 << (node % 64)
	_, _, errno := unix.Syscall6(unix.SYS_MBIND,
		uintptr(unsafe.Pointer(unsafe.SliceData(mem))), uintptr(len(mem)),
		unix.MPOL_PREFERRED, uintptr(unsafe.Pointer(&mask)), maxNUMANodes+1, 0)
	switch errno {
	case 0:
		return nil
	case unix.ENOSYS, unix.EPERM: // no NUMA, or a container's seccomp filter
		if node == 0 && !fileExists(path.Join("/", numaDir, "node1")) {
			return nil
		}
	}
	return fmt.Errorf("bind to NUMA node %d (%d bytes at %#x): %w", node, len(mem),
		uintptr(unsafe.Pointer(unsafe.SliceData(mem))), os.NewSyscallError("mbind", errno))
}

func fileExists(name string) bool {
	_, err := os.Stat(name)
	return err == nil
}
