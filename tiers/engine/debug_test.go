package engine

import (
	"fmt"
	"strings"
	"testing"

	"lookaside/internal/invariants"
)

// panicOf returns what f panics with, as text.
func panicOf(f func()) (text string) {
	defer func() {
		if p := recover(); p != nil {
			text = fmt.Sprint(p)
		}
	}()
	f()
	return ""
}

// TestDebugBuild breaks the books on purpose: a debug build notices.
func TestDebugBuild(t *testing.T) {
	if !invariants.Enabled {
		t.Skip("not a debug build")
	}
	t.Run("a count is wrong", func(t *testing.T) {
		b := newBench(t, 4, 2, Config{})
		b.store(numbered(1, 4))
		b.e.leases.pins++
		got := panicOf(func() {
			for range 100 { // a call pays for a part of a check
				b.e.Stats()
			}
		})
		b.e.debug.failed = false
		if b.e.leases.pins--; !strings.Contains(got, "broken invariant") {
			t.Errorf("a call ended with %q", got)
		}
	})
	t.Run("a free slot is written to", func(t *testing.T) {
		b := newBench(t, 4, 2, Config{})
		b.store(numbered(1, 2))
		n, err := b.e.Drop(b.sp, 0, numbered(1, 2))
		if n != 1 || err != nil {
			t.Fatal(n, err)
		}
		r := b.e.regions[1]
		r.digest(r.freeList-1, 0)[0] = 1
		got := panicOf(func() { b.store(numbered(2, 2)) })
		b.e.debug.failed = false
		if r.digest(r.freeList-1, 0)[0] = poison64; !strings.Contains(got, "was written to") {
			t.Errorf("a store ended with %q", got)
		}
	})
	t.Run("a lease ends twice", func(t *testing.T) {
		b := newBench(t, 4, 2, Config{})
		b.store(numbered(1, 4))
		if n, err := b.e.Lookup(me, 1, 0, numbered(1, 4)); n != 4 || err != nil {
			t.Fatal(n, err)
		}
		x := b.e.owners[me].lookups[1]
		b.ok(b.e.Cancel(me, 1))
		got := panicOf(func() { b.e.endLease(x) })
		if !strings.Contains(got, "ends twice") || !strings.Contains(got, "Engine).Cancel") {
			t.Errorf("the second end said %q", got)
		}
	})
}
