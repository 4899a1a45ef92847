//go:build linux && !amd64

package memcopy

const fast = false

func copyGroups(dst, src *byte, groups int) { panic("memcopy: no kernel on this CPU") }

const aheadBytes = 0

func copyHash(dst, src *byte, stride, blocks, ahead, then int, s *states, last bool) {
	panic("memcopy: no kernel on this CPU")
}
