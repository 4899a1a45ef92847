//go:build linux

package dax

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/cpu"
)

// canWriteBack returns an error unless the processor can write a line back to where it lasts: DC
// CVAP, in ARMv8.2 and later. The kernel announces it only if processes may use it. DC CVAC would
// stop at a point that need not survive a power cut.
func canWriteBack() error {
	if !cpu.ARM64.HasDCPOP {
		return fmt.Errorf("%w: DAX devices on this processor: it has no instruction that writes a cache line back to persistent memory (dcpop in /proc/cpuinfo)", ErrUnsupported)
	}
	return nil
}

// writeBackLines writes lines of lineBytes back, and waits until they last. Processors whose lines
// are longer write some of them back twice; none with DC CVAP has shorter ones.
func writeBackLines(at unsafe.Pointer, lines int) { dccvap(at, lines) }

//go:noescape
func dccvap(at unsafe.Pointer, lines int)
