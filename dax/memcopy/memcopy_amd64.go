//go:build linux

package memcopy

import "golang.org/x/sys/cpu"

// fast reports whether the CPU and the operating system have AVX-512F.
var fast = cpu.X86.HasAVX512F

// copyGroups copies groups runs of groupBytes from src to dst, and then fences. dst is aligned to
// lineBytes and does not overlap src. The function has no frame and accesses only dst and src, so a
// fault in it unwinds like one in copy.
//
//go:noescape
func copyGroups(dst, src *byte, groups int)
