//go:build linux && !amd64 && !arm64

package dax

import (
	"fmt"
	"runtime"
	"unsafe"
)

// canWriteBack returns an error: this processor cannot make stores to memory last.
func canWriteBack() error {
	return fmt.Errorf("%w: DAX devices on %s: writing caches back is not implemented for it",
		ErrUnsupported, runtime.GOARCH)
}

func writeBackLines(unsafe.Pointer, int) { panic("dax: write-back without canWriteBack") }
