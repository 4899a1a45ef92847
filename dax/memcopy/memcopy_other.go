//go:build linux && !amd64

package memcopy

const fast = false

func copyGroups(dst, src *byte, groups int) { panic("memcopy: no kernel on this CPU") }
