//go:build linux

#include "textflag.h"

// func dccvap(at unsafe.Pointer, lines int)
//
// DC CVAP is ordered after earlier stores to its own line. The DSB waits for all of them.
TEXT ·dccvap(SB), NOSPLIT, $0-16
	MOVD at+0(FP), R0
	MOVD lines+8(FP), R1

line:
	DC CVAP, R0
	ADD $64, R0
	SUBS $1, R1
	BNE line
	DSB $15
	RET
