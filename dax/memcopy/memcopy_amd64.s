//go:build linux

#include "textflag.h"

// func copyGroups(dst, src *byte, groups int)
//
// A group is four pages of 4096 bytes. Each turn of the inner loop moves two
// lines of 64 bytes of each page. R8 runs ahead of SI by 1024 bytes, from the end of
// the pages into the next group: the processor's own prefetchers end with a page.
TEXT ·copyGroups(SB), NOSPLIT, $0-24
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ groups+16(FP), CX
	TESTQ CX, CX
	JLE  done

group:
	LEAQ 1024(SI), R8
	MOVQ $32, DX

lines:
	PREFETCHT1 (R8)
	PREFETCHT1 64(R8)
	PREFETCHT1 4096(R8)
	PREFETCHT1 4160(R8)
	PREFETCHT1 8192(R8)
	PREFETCHT1 8256(R8)
	PREFETCHT1 12288(R8)
	PREFETCHT1 12352(R8)
	VMOVDQU64 (SI), Z0
	VMOVDQU64 64(SI), Z1
	VMOVDQU64 4096(SI), Z2
	VMOVDQU64 4160(SI), Z3
	VMOVDQU64 8192(SI), Z4
	VMOVDQU64 8256(SI), Z5
	VMOVDQU64 12288(SI), Z6
	VMOVDQU64 12352(SI), Z7
	VMOVNTDQ  Z0, (DI)
	VMOVNTDQ  Z1, 64(DI)
	VMOVNTDQ  Z2, 4096(DI)
	VMOVNTDQ  Z3, 4160(DI)
	VMOVNTDQ  Z4, 8192(DI)
	VMOVNTDQ  Z5, 8256(DI)
	VMOVNTDQ  Z6, 12288(DI)
	VMOVNTDQ  Z7, 12352(DI)
	ADDQ      $128, SI
	ADDQ      $128, DI
	ADDQ      $128, R8
	CMPQ      DX, $9
	JNE       on
	ADDQ      $12288, R8 // the next group

on:
	DECQ      DX
	JNZ       lines

	// The other three pages of this group are done as well.
	ADDQ $12288, SI
	ADDQ $12288, DI
	DECQ CX
	JNZ  group

	// Non-temporal stores are weakly ordered: whoever is told of them next
	// must see them.
	SFENCE
	VZEROUPPER

done:
	RET
