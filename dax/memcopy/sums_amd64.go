//go:build linux

package memcopy

// copyHash copies blocks blocks of each of four streams, stride bytes apart in dst
// and in src, and takes them into the states, scrambling after each block. dst and
// stride are multiples of lineBytes. Then it fences. Like copyGroups it has no
// frame and touches nothing else.
//
//go:noescape
func copyHash(dst, src *byte, stride, blocks int, s *states)
