//go:build linux

package memcopy

import (
	"runtime"
	"runtime/metrics"
)

// Yielder yields the processor between pieces of a copy if other goroutines wait. One goroutine at
// a time may use it.
//
// After a switch the streams begin cold. With copies that checksum, a check after each piece cost
// up to a tenth of the speed, after every fourth piece one or two percent.
//
// A Gosched costs a third of a microsecond if no goroutine waits. For a locked goroutine it is two
// switches between system threads, 15 µs on an idle machine: most of the time of a piece. A check
// whether any goroutine waits costs 60 ns, so the switch happens only when it helps. Events that
// the runtime notices only while it schedules (timers, sockets that became ready) are served every
// yieldTurns turns.
type Yielder struct {
	runnable [1]metrics.Sample
	every    int // pieces
	turns    int
}

const yieldTurns = 16 // 4 MiB, some 400 µs

// NewYielder returns a Yielder that checks after every given number of pieces.
func NewYielder(every int) *Yielder {
	return &Yielder{every: every,
		runnable: [1]metrics.Sample{{Name: "/sched/goroutines/runnable:goroutines"}}}
}

// Yield must be called after each piece.
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
