//go:build linux

package memcopy

import "testing"

// The fallback of CPUs without AVX-512 gives the same bytes.
func TestCopyFallback(t *testing.T) {
	defer func(was bool) { fast = was }(fast)
	fast = false
	testEdges(t)
}
