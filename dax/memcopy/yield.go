//go:build linux

package memcopy

import (
	"runtime"
	"runtime/metrics"
)

// Yielder gives the processor away between pieces of a copy, when somebody wants it. It is for one
// goroutine at a time.
//
// Whoever goes on after a switch begins with cold streams: of copies that checksum, asking after
// each piece cost up to a tenth of the speed, after every fourth a hundredth or two.
//
// A Gosched costs a third of a microsecond where nobody waits, and for a locked goroutine it is two
// switches between system threads, 15 µs on an idle machine: most of a piece. Asking the runtime
// whether any goroutine is waiting costs 60 ns, so the switch is paid when it helps. What the
// runtime would only notice while scheduling (timers, sockets that became ready) gets its chance
// every yieldTurns turns.
type Yielder struct {
	runnable [1]metrics.Sample
	every    int // pieces
	turns    int
}

const yieldTurns = 16 // 4 MiB, some 400 µs

// NewYielder makes a Yielder that asks after every so many pieces.
func NewYielder(every int) *Yielder {
	return &Yielder{every: every,
		runnable: [1]metrics.Sample{{Name: "/sched/goroutines/runnable:goroutines"}}}
}

// Yield is called after each piece.
func (y *Yielder) Yield() {
	y.turns++
	if y.turns%y.every != 0 {
		return
	}
	metrics.Read(y.runnable[:])
	v := y.runnable[0].Value
	if v.Kind() == metrics.KindUint64 && v.Uint64() == 0 && y.turns < yieldTurns {
		return
	}
	y.turns = 0
	runtime.Gosched()
}
