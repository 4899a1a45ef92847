//go:build linux

package memcopy

// aheadBytes is how far ahead copyHash prefetches.
const aheadBytes = 1024

// copyHash copies blocks blocks of each of four streams, stride bytes apart in dst and in src, and
// hashes them into the states. It scrambles after each block, except after the last one if that
// ends the streams. It prefetches aheadBytes ahead, and after ahead blocks then bytes ahead. dst
// and stride are multiples of lineBytes. At the end it fences. Like copyGroups it has no frame and
// accesses nothing else.
//
//go:noescape
func copyHash(dst, src *byte, stride, blocks, ahead, then int, s *states, last bool)
