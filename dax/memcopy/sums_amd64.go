//go:build linux

package memcopy

// aheadBytes is how far ahead copyHash prefetches.
const aheadBytes = 1024

// copyHash copies blocks blocks of each of four streams, stride bytes apart in dst
// and in src, and takes them into the states, scrambling after each block, but not
// after the last one if that ends the streams. As it goes it prefetches what lies aheadBytes
// further on, and after ahead blocks what lies then bytes further on. dst and stride are
// multiples of lineBytes. Then it fences. Like copyGroups it has no frame and touches nothing else.
//
//go:noescape
func copyHash(dst, src *byte, stride, blocks, ahead, then int, s *states, last bool)
