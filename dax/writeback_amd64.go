//go:build linux

package dax

import "unsafe"

// These are the instructions that write a line back, from the best to the one that every processor
// has. CLWB leaves the line in the cache; CLFLUSHOPT and CLFLUSH do not, and CLFLUSH handles one
// line at a time. See Intel's Software Developer's Manual, volume 1, 11.4.6 and 12.11, and
// "Persistent Memory Programming" (Scargall, 2020), chapter 2.
const (
	opCLFLUSH = iota
	opCLFLUSHOPT
	opCLWB
)

var writeBackOp = bestWriteBack(cpuid(7, 0))

// bestWriteBack returns the instruction for leaf 7 of CPUID.
func bestWriteBack(_, ebx, _, _ uint32) int {
	switch {
	case ebx&(1<<24) != 0:
		return opCLWB
	case ebx&(1<<23) != 0:
		return opCLFLUSHOPT
	}
	return opCLFLUSH
}

// canWriteBack returns nil: every amd64 processor can make stores to memory last.
func canWriteBack() error { return nil }

func writeBackLines(at unsafe.Pointer, lines int) {
	switch writeBackOp {
	case opCLWB:
		clwb(at, lines)
	case opCLFLUSHOPT:
		clflushopt(at, lines)
	default:
		clflush(at, lines)
	}
}

//go:noescape
func clwb(at unsafe.Pointer, lines int)

//go:noescape
func clflushopt(at unsafe.Pointer, lines int)

//go:noescape
func clflush(at unsafe.Pointer, lines int)

func cpuid(leaf, sub uint32) (eax, ebx, ecx, edx uint32)
