//go:build linux

package dax

import (
	"bytes"
	"testing"

	"golang.org/x/sys/cpu"
)

func TestWriteBackInstructions(t *testing.T) {
	for ebx, want := range map[uint32]int{0: opCLFLUSH, 1 << 23: opCLFLUSHOPT, 1 << 24: opCLWB,
		3 << 23: opCLWB, ^uint32(3 << 23): opCLFLUSH} {
		if got := bestWriteBack(0, ebx, 0, 0); got != want {
			t.Errorf("leaf 7 EBX %#x: %d, want %d", ebx, got, want)
		}
	}
	_, ebx, _, _ := cpuid(7, 0)
	if has := ebx&(1<<5) != 0; cpu.X86.HasAVX2 && !has {
		t.Error("CPUID does not say what package cpu found")
	}
	table, err := NewTable[byte](1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer table.Close()
	mem := table.Slice()
	for i := range mem {
		mem[i] = byte(i * 11)
	}
	want := bytes.Clone(mem)
	defer func(op int) { writeBackOp = op }(writeBackOp)
	for op := opCLFLUSH; op <= bestWriteBack(cpuid(7, 0)); op++ {
		// a processor with a better one has all that are worse
		writeBackOp = op
		writeBack(mem[1:])
		if !bytes.Equal(mem, want) {
			t.Errorf("instruction %d changed the bytes", op)
		}
	}
}

func BenchmarkWriteBack(b *testing.B) {
	table, err := NewTable[byte](2 << 20)
	if err != nil {
		b.Fatal(err)
	}
	defer table.Close()
	b.SetBytes(2 << 20)
	for range b.N {
		writeBack(table.Slice())
	}
}
