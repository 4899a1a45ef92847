//go:build linux

package dax

import (
	"math"
	"testing"
	"unsafe"
)

type entry struct {
	Tag    uint16
	Digest [32]byte
	Link   uint32
	Links  [2]struct{ A, B int64 }
	F      float32
	P      uintptr
	_      [0]*int // no room for a pointer
}

// TestCut: tables lie one behind another, hold what was put there, and what is discarded reads as
// zeros while its neighbours stay.
func TestCut(t *testing.T) {
	sizes := []int{1, 1000, 100_003, 0, 7}
	bytes := 0
	for _, n := range sizes {
		bytes += CutBytes[entry](n)
	}
	table, err := NewTable[byte](bytes)
	if err != nil {
		t.Fatal(err)
	}
	mustClose(t, table)
	left := table.Slice()
	var cuts [][]entry
	var parts [][]byte
	for _, n := range sizes {
		before := left
		var s []entry
		s, left = Cut[entry](left, n)
		if len(s) != n || len(before)-len(left) != CutBytes[entry](n) {
			t.Fatalf("%d of %d entries with %d bytes", len(s), n, len(before)-len(left))
		}
		cuts, parts = append(cuts, s), append(parts, before[:len(before)-len(left)])
		for i := range s {
			s[i].Tag, s[i].P = uint16(n), uintptr(i)
		}
	}
	if len(left) != 0 {
		t.Errorf("%d bytes are left", len(left))
	}
	Discard(parts[2])
	Discard(nil)
	zeros := 0
	for k, s := range cuts {
		for i := range s {
			switch {
			case k == 2 && s[i] == (entry{}):
				zeros++
			case s[i].Tag != uint16(sizes[k]) || s[i].P != uintptr(i):
				if k != 2 {
					t.Fatalf("entry %d of table %d is %+v", i, k, s[i])
				}
			}
		}
	}
	if zeros < sizes[2]*9/10 {
		t.Errorf("%d of %d discarded entries are zero", zeros, sizes[2])
	}
	for name, f := range map[string]func(){
		"too long":     func() { Cut[entry](table.Slice(), bytes) },
		"not aligned":  func() { Cut[byte](table.Slice()[1:], 1) },
		"with pointer": func() { Cut[*int](table.Slice(), 1) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			f()
		}()
	}
}

func TestTable(t *testing.T) {
	const n = 100_003
	table, err := NewTable[entry](n)
	if err != nil {
		t.Fatal(err)
	}
	mustClose(t, table)
	s := table.Slice()
	if len(s) != n || cap(s) != n {
		t.Fatalf("len %d cap %d", len(s), cap(s))
	}
	for i := range s {
		if s[i] != (entry{}) {
			t.Fatalf("entry %d is not zero", i)
		}
		s[i].Link, s[i].Digest[31] = uint32(i), byte(i)
	}
	for i := range s {
		if s[i].Link != uint32(i) || s[i].Digest[31] != byte(i) {
			t.Fatalf("entry %d is %+v", i, s[i])
		}
	}
	if err := table.Close(); err != nil {
		t.Fatal(err)
	}
	if table.Slice() != nil {
		t.Error("a slice after Close")
	}
}

// A table is paid for as it is touched, not when it is made.
func TestTableIsLazy(t *testing.T) {
	table, err := NewTable[byte](64 << 30)
	if err != nil {
		t.Fatal(err)
	}
	mustClose(t, table)
	table.Slice()[40<<30] = 1
	if rss := smaps(t, table.mem, "Rss"); rss == 0 || rss > HugePageSize {
		t.Errorf("one byte touched, %d bytes taken", rss)
	}
}

func TestTableRefusesPointers(t *testing.T) {
	refused := func(name string, err error) {
		t.Helper()
		if err == nil {
			t.Errorf("%s accepted", name)
		}
	}
	_, err := NewTable[*int](1)
	refused("*int", err)
	_, err = NewTable[[]byte](1)
	refused("[]byte", err)
	_, err = NewTable[string](1)
	refused("string", err)
	_, err = NewTable[map[int]int](1)
	refused("map", err)
	_, err = NewTable[chan int](1)
	refused("chan", err)
	_, err = NewTable[func()](1)
	refused("func", err)
	_, err = NewTable[any](1)
	refused("any", err)
	_, err = NewTable[unsafe.Pointer](1)
	refused("unsafe.Pointer", err)
	_, err = NewTable[struct {
		A int
		B [3]struct{ C []int32 }
	}](1)
	refused("nested", err)
	wantError(t, err, nil, "B: C: []int32")
}

func TestTableRefusesSizes(t *testing.T) {
	for _, n := range []int{0, -1, math.MinInt, math.MaxInt, math.MaxInt / 8, 1 << 57} {
		if _, err := NewTable[uint64](n); err == nil {
			t.Errorf("%d entries accepted", n)
		}
	}
	if _, err := NewTable[struct{}](1); err == nil {
		t.Error("entries of no size accepted")
	}
}
