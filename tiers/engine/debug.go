package engine

import (
	"fmt"
	"runtime"
	"slices"
	"strings"

	"lookaside/internal/invariants"
)

// Debug builds (package invariants) look for broken books where they break, not where they are read
// next:
//
//   - At the end of a call the engine checks itself (Check), if the arena is small. See selfCheck.
//   - What a slot held is overwritten when the slot becomes free (poison), and must be
//     unchanged when the slot is granted again.
//   - A lease that ends twice panics with the stacks of both ends (noteEnd). The buffer that it had
//     is overwritten.
//
// A release build has none of this: invariants.Enabled is a constant.

// debugState is what a debug build keeps.
type debugState struct {
	credit  int      // see selfCheck
	failed  bool     // a check has failed
	checker *checker // of the last check: its maps are used again
	ends    []stack  // by lease: the stack of its last end
}

const (
	// checkedRecords is the most records of an arena that checks itself, and checkedWords the most
	// entries that its index has room for.
	checkedRecords = 2048
	checkedWords   = 1 << 15
	// checkCredit is how much of a check each call pays for. A check costs one for each record and
	// lease, and baseCost.
	checkCredit = 32
	baseCost    = 64
)

// fail panics, and ends the engine's checks of itself: the call that is under way leaves its books
// unfinished.
func (e *Engine) fail(why string) {
	e.debug.failed = true
	panic("engine: " + why)
}

// unlock ends a call.
func (e *Engine) unlock() {
	if invariants.Enabled {
		defer e.mu.Unlock()
		e.selfCheck()
		return
	}
	e.mu.Unlock()
}

// pause lets others have the lock between slices of longer work. It reports whether the engine is
// still open.
func (e *Engine) pause() bool {
	if invariants.Enabled {
		e.selfCheck()
	}
	e.mu.Unlock()
	e.mu.Lock()
	return !e.closed
}

// selfCheck panics if an invariant does not hold. A check looks at everything, so each call only
// pays for a part, and the call that has paid the rest checks: a tiny arena is checked after every
// few calls, a larger one now and then, a large one never. So tests take little longer.
func (e *Engine) selfCheck() {
	words := len(e.idx.cur.words) + len(e.idx.old.words)
	if e.closed || e.debug.failed || e.records > checkedRecords || words > checkedWords {
		return
	}
	cost := baseCost + e.records + words/64 + len(e.leases.all)
	if e.debug.credit += checkCredit; e.debug.credit < cost {
		return
	}
	e.debug.credit = 0
	if err := e.check(); err != nil {
		e.fail(err.Error())
	}
}

// Poison has values that no slot in use can have, and that lead into no region.
const (
	poison32 = 0xDEADBEEF | maxRegions<<recordBits
	poison64 = poison32<<32 | poison32
)

// poison overwrites the books of a slot that becomes free. What outlives that stays: its
// generation, its flags and the digest of its last page.
func (r *region) poison(i uint32) {
	s, k := &r.slots[i], &r.kin[i]
	s.stamp, s.chunk, s.space = poison64, poison32, poison32&0xFFFF
	k.parent, k.prev, k.child = poison32, poison32, poison32
	for pos := range r.ppc - 1 {
		d := r.digest(i, pos)
		for j := range d {
			d[j] = poison64
		}
	}
}

// checkPoison panics if the books of a free slot were written to. A slot that was never granted, or
// that EndRestore left free, is not poisoned.
func (e *Engine) checkPoison(r *region, i uint32) {
	s, k := &r.slots[i], &r.kin[i]
	if s.stamp != poison64 {
		return
	}
	ok := s.state == free && s.chunk == poison32 && s.space == poison32&0xFFFF &&
		k.parent == poison32 && k.prev == poison32 && k.child == poison32
	for pos := range r.ppc - 1 {
		ok = ok && !slices.ContainsFunc(r.digest(i, pos), func(w uint64) bool {
			return w != poison64
		})
	}
	if !ok {
		e.fail(fmt.Sprintf("free slot %d of region %d was written to: %+v %+v", i, r.id, *s, *k))
	}
}

// checkLives panics if a lease has ended.
func (e *Engine) checkLives(x *lease) {
	if x.kind != noLease {
		return
	}
	var now stack
	runtime.Callers(2, now[:])
	e.fail(fmt.Sprintf("lease %d, use %d, ends twice: at\n%vafter it has ended at\n%v", x.index,
		x.gen, &now, &e.debug.ends[x.index]))
}

// noteEnd keeps the stack of a lease's end, and overwrites its buffer. It panics if the lease has
// ended before.
func (e *Engine) noteEnd(x *lease) {
	e.checkLives(x)
	for len(e.debug.ends) <= int(x.index) {
		e.debug.ends = append(e.debug.ends, stack{})
	}
	at := &e.debug.ends[x.index]
	clear(at[:])
	runtime.Callers(2, at[:])
	buf := x.buf[:cap(x.buf)]
	for i := range buf {
		buf[i] = poison32
	}
}

// stack is the innermost callers of a function.
type stack [16]uintptr

// String is the functions of a stack, one a line.
func (s *stack) String() string {
	var b strings.Builder
	for frames := runtime.CallersFrames(s[:]); ; {
		f, more := frames.Next()
		fmt.Fprintf(&b, "\t%s %s:%d\n", f.Function, f.File, f.Line)
		if !more {
			return b.String()
		}
	}
}
