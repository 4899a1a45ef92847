//go:build linux

package dax

import (
	"fmt"
	"math"
	"os"
	"reflect"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Table is a slice of T outside the Go heap: private, zeroed, and paid for page
// by page as it is first touched. The garbage collector neither scans nor
// counts it, which is what lets an index of millions of entries cost nothing
// per collection; hence T may hold no pointer of any kind.
//
// Close may be called once nobody uses the slice any more. A Table that is
// dropped without Close leaks its memory until the process ends, as slices of
// it do not keep it alive.
type Table[T any] struct {
	slice   []T
	mem     []byte
	closing sync.Once
	err     error
}

// NewTable maps n entries. It fails when T has pointers, when n is not
// positive or too large, and when address space runs out.
func NewTable[T any](n int) (*Table[T], error) {
	t := reflect.TypeFor[T]()
	if path := pointerIn(t); path != "" {
		return nil, fmt.Errorf("table of %v: %s holds a pointer, which the garbage collector would not see", t, path)
	}
	if n <= 0 {
		return nil, fmt.Errorf("table of %d entries of %v: must be positive", n, t)
	}
	if t.Size() == 0 {
		return nil, fmt.Errorf("table of %v: its entries have no size", t)
	}
	if uint64(n) > (math.MaxInt64-HugePageSize)/uint64(t.Size()) {
		return nil, fmt.Errorf("table of %d entries of %v: too large", n, t)
	}
	mem, err := mapAligned(-1, int64(n)*int64(t.Size()), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("table of %d entries of %v: %w", n, t, err)
	}
	if len(mem) >= HugePageSize {
		// Random probes of a large table miss the TLB each time with 4 KiB
		// pages. Best effort: without THP the table is merely slower.
		_ = unix.Madvise(mem, unix.MADV_HUGEPAGE)
	}
	return &Table[T]{slice: unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(mem))), n), mem: mem},
		nil
}

// AdviseHuge asks for huge pages under a large slice of the Go heap that is read at random places,
// as NewTable does for a table: where each read misses the TLB it takes twice as long. Best effort.
func AdviseHuge[T any](s []T) {
	var t T
	at := uintptr(unsafe.Pointer(unsafe.SliceData(s)))
	size := uintptr(len(s)) * unsafe.Sizeof(t)
	skip := -at & (HugePageSize - 1)
	if size < skip+HugePageSize {
		return
	}
	mem := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), size)
	_ = unix.Madvise(mem[skip:skip+(size-skip)&^(HugePageSize-1)], unix.MADV_HUGEPAGE)
}

// Slice is all entries. It is valid until Close.
func (t *Table[T]) Slice() []T { return t.slice }

// Close gives the memory back. It is idempotent and returns its first error.
func (t *Table[T]) Close() error {
	t.closing.Do(func() {
		t.slice = nil
		t.err = unmap(t.mem)
		t.mem = nil
	})
	return t.err
}

// cutAlign is what tables that Cut makes are aligned to: a cache line.
const cutAlign = 64

// CutBytes is how many bytes Cut takes for n entries.
func CutBytes[T any](n int) int {
	var t T
	return (n*int(unsafe.Sizeof(t)) + cutAlign - 1) &^ (cutAlign - 1)
}

// Cut makes the beginning of some memory a slice of n entries, and returns what is left of the
// memory. That must be zeroed, as long as CutBytes says, and its beginning a multiple of 64: the
// memory of a Table[byte], or what an earlier Cut left. T may hold no pointer, as with NewTable.
// The slice is valid as long as the memory is.
func Cut[T any](mem []byte, n int) (entries []T, left []byte) {
	if path := pointerIn(reflect.TypeFor[T]()); path != "" {
		panic(fmt.Sprintf("dax: a cut of %v: %s holds a pointer", reflect.TypeFor[T](), path))
	}
	at := unsafe.Pointer(unsafe.SliceData(mem))
	if size := CutBytes[T](n); size > len(mem) || uintptr(at)%cutAlign != 0 {
		panic(fmt.Sprintf("dax: a cut of %d bytes out of %d at %p", size, len(mem), at))
	}
	return unsafe.Slice((*T)(at), n), mem[CutBytes[T](n):]
}

// Discard gives the pages that lie wholly in a part of a Table[byte] back to the kernel. They read
// as zeros from then on. Best effort.
func Discard(mem []byte) {
	at, page := uintptr(unsafe.Pointer(unsafe.SliceData(mem))), uintptr(os.Getpagesize())
	skip := -at & (page - 1)
	if size := uintptr(len(mem)); size > skip {
		if n := (size - skip) &^ (page - 1); n > 0 {
			_ = unix.Madvise(mem[skip:skip+n], unix.MADV_DONTNEED)
		}
	}
}

// pointerIn is the path to the first pointer in t, "" if there is none.
func pointerIn(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Array:
		if t.Len() == 0 {
			return ""
		}
		return pointerIn(t.Elem())
	case reflect.Struct:
		for f := range t.NumField() {
			if p := pointerIn(t.Field(f).Type); p != "" {
				return t.Field(f).Name + ": " + p
			}
		}
		return ""
	case reflect.Bool, reflect.Uintptr,
		reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64,
		reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64,
		reflect.Float32, reflect.Float64, reflect.Complex64, reflect.Complex128:
		return ""
	default:
		return t.String()
	}
}
