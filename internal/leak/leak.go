//go:build linux

// Package leak fails a package's tests when they leave something behind: an
// open descriptor, a mapping of Lookaside's shared memory, or a goroutine.
package leak

import (
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
)

// patience is how long leftovers may take to go away by themselves, such as a goroutine that is
// ending or a descriptor that the runtime closes later.
const patience = 30 * time.Second

// memfdName marks the memory that package dax shares (see /proc/self/maps).
const memfdName = "memfd:lookaside"

// Main runs a package's tests, then looks for leaks. Call it from TestMain; it does not return. A
// leak turns a pass into a failure and is printed, each goroutine with its stack. Fuzzing is not
// checked, because its engine keeps workers.
func Main(m *testing.M) {
	flag.Parse()
	before := Take()
	code := m.Run()
	if fuzz := flag.Lookup("test.fuzz"); code == 0 && (fuzz == nil || fuzz.Value.String() == "") {
		if left := Wait(before, patience); len(left) > 0 {
			Report(os.Stderr, left)
			code = 1
		}
	}
	os.Exit(code)
}

// Snapshot lists what a process holds at one moment.
type Snapshot struct {
	fds        map[string]int // by what the descriptors are open on: their number
	mappings   map[string]int
	goroutines map[string]string // id → stack
}

// Take returns a snapshot.
func Take() Snapshot {
	// The runtime opens its epoll descriptors with the first pipe or socket and keeps them. Open
	// them now, so that they do not count as a leak of the first user.
	if r, w, err := os.Pipe(); err == nil {
		r.Close()
		w.Close()
	}
	return Snapshot{fds: openFDs(), mappings: mappings(), goroutines: goroutines()}
}

// Wait compares before with the present until nothing new is left or patience ends. It returns a
// description of each leftover.
func Wait(before Snapshot, patience time.Duration) []string {
	for deadline := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		left := since(before, Take())
		if len(left) == 0 || time.Now().After(deadline) {
			return left
		}
		runtime.GC() // finalizers close forgotten os.Files, as they would later anyway
	}
}

// Report prints the leftovers.
func Report(w io.Writer, left []string) {
	fmt.Fprintf(w, "leak: %d left behind by the tests:\n", len(left))
	for _, l := range left {
		fmt.Fprintf(w, "  %s\n", strings.ReplaceAll(l, "\n", "\n    "))
	}
}

func since(before, now Snapshot) []string {
	var left []string
	more := func(what string, before, now map[string]int) {
		for _, name := range slices.Sorted(maps.Keys(now)) {
			if n := now[name] - before[name]; n > 0 {
				left = append(left, fmt.Sprintf("%s: %s (%d)", what, name, n))
			}
		}
	}
	more("descriptor", before.fds, now.fds)
	more("mapping", before.mappings, now.mappings)
	for _, id := range slices.Sorted(maps.Keys(now.goroutines)) {
		if _, ok := before.goroutines[id]; !ok {
			left = append(left, now.goroutines[id])
		}
	}
	return left
}

func openFDs() map[string]int {
	const dir = "/proc/self/fd"
	out := make(map[string]int)
	entries, err := os.ReadDir(dir)
	if err != nil {
		panic(fmt.Sprintf("leak: %v", err)) // no /proc, no check
	}
	for _, e := range entries {
		// The descriptor of this listing itself is closed by now.
		if target, err := os.Readlink(filepath.Join(dir, e.Name())); err == nil {
			out[fdName(e.Name(), target)]++
		}
	}
	return out
}

// fdName returns a name for a descriptor. Equal names are interchangeable: sockets and pipes are
// named by their inode, others by what they are open on.
func fdName(fd, target string) string {
	if strings.HasPrefix(target, "anon_inode:") {
		return fd + " → " + target // only its number distinguishes it
	}
	return target
}

func mappings() map[string]int {
	out := make(map[string]int)
	text, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		panic(fmt.Sprintf("leak: %v", err))
	}
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, memfdName) {
			out[strings.TrimSpace(line)]++
		}
	}
	return out
}

// goroutines returns all goroutines except those of the runtime, of package testing, and the
// caller.
func goroutines() map[string]string {
	buf := make([]byte, 1<<16)
	for {
		n := runtime.Stack(buf, true)
		if n < len(buf) {
			buf = buf[:n]
			break
		}
		buf = make([]byte, 2*len(buf))
	}
	out := make(map[string]string)
	for i, stack := range strings.Split(string(buf), "\n\n") {
		if i == 0 || ignored(stack) { // the first is the caller
			continue
		}
		// "goroutine 12 [running]:\n…"; ids are never reused
		id, _, _ := strings.Cut(stack, " [")
		out[id] = strings.TrimSpace(stack)
	}
	return out
}

func ignored(stack string) bool {
	for _, own := range []string{
		"\ntesting.(*M).", "\ntesting.(*T).Run(", "\ntesting.runFuzzing(", "\ntesting.runTests(",
		"\ntesting.tRunner.func",
		"\nos/signal.loop(", "\nos/signal.signal_recv(", "created by runtime.",
		"created by testing.",
		"\nruntime.ensureSigM", "\nruntime/pprof.", "\nruntime.goexit0",
	} {
		if strings.Contains(stack, own) {
			return true
		}
	}
	return false
}
