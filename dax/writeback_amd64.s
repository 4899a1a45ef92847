//go:build linux

#include "textflag.h"

// func clwb(at unsafe.Pointer, lines int)
TEXT ·clwb(SB), NOSPLIT, $0-16
	MOVQ at+0(FP), SI
	MOVQ lines+8(FP), CX

line:
	CLWB (SI)
	ADDQ $64, SI
	DECQ CX
	JNZ  line
	SFENCE
	RET

// func clflushopt(at unsafe.Pointer, lines int)
TEXT ·clflushopt(SB), NOSPLIT, $0-16
	MOVQ at+0(FP), SI
	MOVQ lines+8(FP), CX

line:
	CLFLUSHOPT (SI)
	ADDQ $64, SI
	DECQ CX
	JNZ  line
	SFENCE
	RET

// func clflush(at unsafe.Pointer, lines int)
TEXT ·clflush(SB), NOSPLIT, $0-16
	MOVQ at+0(FP), SI
	MOVQ lines+8(FP), CX

line:
	CLFLUSH (SI)
	ADDQ $64, SI
	DECQ CX
	JNZ  line
	SFENCE
	RET

// func cpuid(leaf, sub uint32) (eax, ebx, ecx, edx uint32)
TEXT ·cpuid(SB), NOSPLIT, $0-24
	MOVL leaf+0(FP), AX
	MOVL sub+4(FP), CX
	CPUID
	MOVL AX, eax+8(FP)
	MOVL BX, ebx+12(FP)
	MOVL CX, ecx+16(FP)
	MOVL DX, edx+20(FP)
	RET
