//go:build linux

package dax

import "unsafe"

// lineBytes is the size of a cache line, the unit of a write-back.
const lineBytes = 64

// writeBackPiece bounds how long a write-back delays a garbage collection, which cannot preempt
// assembly.
const writeBackPiece = 256 << 10

// writeBack writes the cache lines of mem back to the memory behind them. When it returns, all
// earlier stores of this thread, including those past the caches, are in the domain that survives a
// power cut.
func writeBack(mem []byte) {
	if len(mem) == 0 {
		return
	}
	at := uintptr(unsafe.Pointer(unsafe.SliceData(mem)))
	skew := int(at % lineBytes)
	base := unsafe.Add(unsafe.Pointer(unsafe.SliceData(mem)), -skew) // the start of the first line
	lines := (len(mem) + skew + lineBytes - 1) / lineBytes
	for lines > 0 {
		n := min(lines, writeBackPiece/lineBytes)
		writeBackLines(base, n)
		if lines -= n; lines > 0 {
			base = unsafe.Add(base, n*lineBytes)
		}
	}
}
