//go:build linux

package memcopy

import "golang.org/x/sys/cpu"

// fast says that the CPU and the operating system have AVX-512F.
var fast = cpu.X86.HasAVX512F

// copyGroups copies groups runs of groupBytes from src to dst, which is aligned
// to lineBytes and does not overlap src, and then fences. It has no frame and
// touches nothing but dst and src, so a fault in it unwinds like one in copy.
//
//go:noescape
func copyGroups(dst, src *byte, groups int)
