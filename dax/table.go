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

// Table is a slice of T outside the Go heap. It is private and zeroed, and takes memory page by
// page at the first touch. The garbage collector neither scans nor counts it, so an index of
// millions of entries costs nothing at a collection. Therefore T may hold no pointer of any kind.
//
// Close may be called once the slice is no longer used. A Table that is dropped without Close leaks
// its memory until the process ends, because slices of it do not keep it alive.
type Table[T any] struct {
	slice   []T
	mem     []byte
	closing sync.Once
	err     error
}

// NewTable maps n entries. It returns an error if T has pointers, if n is not positive or too
// large, or if address space runs out.
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
		// Random probes of a large table miss the TLB each time with 4 KiB pages. Best effort:
		// without THP the table is only slower.
		_ = unix.Madvise(mem, unix.MADV_HUGEPAGE)
	}
	return &Table[T]{slice: unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(mem))), n), mem: mem},
		nil
}

// AdviseHuge requests huge pages for a large slice of the Go heap that is read at random places, as
// NewTable does for a table. Reads that miss the TLB take twice as long. Best effort.
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

// Slice returns all entries. It is valid until Close.
func (t *Table[T]) Slice() []T { return t.slice }

// Close frees the memory. It is idempotent and returns its first error.
func (t *Table[T]) Close() error {
	t.closing.Do(func() {
		t.slice = nil
		t.err = unmap(t.mem)
		t.mem = nil
	})
	return t.err
}

// cutAlign is the alignment of tables that Cut makes: a cache line.
const cutAlign = 64

// CutBytes returns how many bytes Cut takes for n entries.
func CutBytes[T any](n int) int {
	var t T
	return (n*int(unsafe.Sizeof(t)) + cutAlign - 1) &^ (cutAlign - 1)
}

// Cut makes the beginning of mem a slice of n entries and returns the rest of mem. mem must be
// zeroed, have at least CutBytes bytes, and begin at a multiple of 64: it is the memory of a
// Table[byte], or the rest from an earlier Cut. T may hold no pointer, as with NewTable. The slice
// is valid as long as mem is.
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

// Discard frees the pages that lie completely in a part of a Table[byte]. They read as zeros
// afterwards. Best effort.
func Discard(mem []byte) {
	at, page := uintptr(unsafe.Pointer(unsafe.SliceData(mem))), uintptr(os.Getpagesize())
	skip := -at & (page - 1)
	if size := uintptr(len(mem)); size > skip {
		if n := (size - skip) &^ (page - 1); n > 0 {
			_ = unix.Madvise(mem[skip:skip+n], unix.MADV_DONTNEED)
		}
	}
}

// pointerIn returns the path to the first pointer in t, or "" if there is none.
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
