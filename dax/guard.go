//go:build linux

package dax

import (
	"errors"
	"fmt"
	"runtime/debug"
	"unsafe"
)

// ErrFault means that the memory behind a mapping is gone: a file was truncated, a page is
// poisoned, or a device went away.
var ErrFault = errors.New("memory fault")

// FaultError describes an access that faulted. It wraps [ErrFault].
type FaultError struct {
	// Offset of the faulting address in the guarded slice Slice, in bytes.
	Offset int64
	// Slice is the index of that slice among Guard's arguments.
	Slice int
}

func (e *FaultError) Error() string {
	return fmt.Sprintf("%v at byte %d of mapping %d", ErrFault, e.Offset, e.Slice)
}

func (e *FaultError) Unwrap() error { return ErrFault }

// Guard calls fn and turns a fault (SIGBUS, SIGSEGV) at an address inside one of mem into a
// [FaultError]. Effects of fn before the fault stay. Every other panic, and a fault anywhere else,
// is passed on: it is a bug.
//
// It costs some tens of nanoseconds and covers only the calling goroutine. A system call on such
// memory returns EFAULT by itself.
func Guard(fn func(), mem ...[]byte) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		p := recover()
		if p == nil {
			return
		}
		if fault, ok := p.(interface {
			error
			Addr() uintptr
		}); ok {
			for i, m := range mem {
				base := uintptr(unsafe.Pointer(unsafe.SliceData(m)))
				if at := fault.Addr(); at >= base && at-base < uintptr(len(m)) {
					err = &FaultError{Offset: int64(at - base), Slice: i}
					return
				}
			}
		}
		panic(p)
	}()
	fn()
	return nil
}
