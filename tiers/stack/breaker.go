package stack

import (
	"sync"
	"time"
)

// The first and the longest pause of a tier that is off before it is tried again; it doubles each
// time.
const (
	firstPause = time.Second
	lastPause  = time.Minute
)

// verdict is how a call of a tier went.
type verdict uint8

const (
	worked  verdict = iota // it returned in time, a miss included
	failed                 // it returned an error, or nothing in time
	neither                // the call was not made, or its outcome is not the tier's doing
)

// breaker turns a tier off that fails, and tries it again after a pause, by one call at a time. Any
// goroutine.
//
//	closed ── failures in a row ──▶ open ── pause over, one call ──▶ probing ── works ──▶ closed
//	                                 ▲                                 │
//	                                 └────── fails; a longer pause ────┘
type breaker struct {
	limit int // failures in a row that open it
	// change is called when the breaker closes or stops being closed. mu is held.
	change func(open bool, pause time.Duration)

	mu       sync.Mutex
	failures int // in a row
	open     bool
	probing  bool
	until    time.Time // the pause's end
	pause    time.Duration
	opened   uint64
	tried    chan struct{} // closed when the call that is probing has ended
}

// usable reports whether enter would let a call through now.
func (b *breaker) usable() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return !b.open || !b.probing && !time.Now().Before(b.until)
}

// enter reports whether a call may be made now. If ok, leave must follow. probe reports that the
// call tries a tier that is off: little should depend on it.
func (b *breaker) enter() (ok, probe bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.open {
		if b.probing || time.Now().Before(b.until) {
			return false, false
		}
		b.probing, b.tried = true, make(chan struct{})
	}
	return true, b.open
}

// enterAfter is enter, but first waits for the outcome of a call that tries the tier.
func (b *breaker) enterAfter() bool {
	for {
		if ok, _ := b.enter(); ok {
			return true
		}
		b.mu.Lock()
		tried, probing, paused := b.tried, b.probing, b.open && !b.probing &&
			time.Now().Before(b.until)
		b.mu.Unlock()
		switch {
		case paused:
			return false
		case probing:
			<-tried
		}
	}
}

// leave records how a call went that enter let through.
func (b *breaker) leave(v verdict) {
	b.mu.Lock()
	defer b.mu.Unlock()
	probing := b.probing
	defer func() {
		if probing && !b.probing {
			close(b.tried)
		}
	}()
	switch v {
	case worked:
		b.failures = 0
		if b.open {
			b.open, b.probing, b.pause = false, false, 0
			b.change(false, 0)
		}
	case failed:
		b.failures++
		switch {
		case !b.open && b.failures >= b.limit:
			b.open, b.pause = true, firstPause
			b.until = time.Now().Add(b.pause)
			b.opened++
			b.change(true, b.pause)
		case b.probing:
			b.probing = false
			b.pause = min(2*b.pause, lastPause)
			b.until = time.Now().Add(b.pause)
		}
	case neither:
		b.probing = false
	}
}

// wait returns how long it takes until a call may be made, 0 if one may be made now.
func (b *breaker) wait() time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case !b.open:
		return 0
	case b.probing:
		return firstPause / 4
	}
	return max(0, time.Until(b.until))
}

// state returns closed, open or probing, and how often the breaker opened.
func (b *breaker) state() (string, uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case !b.open:
		return "closed", b.opened
	case b.probing:
		return "probing", b.opened
	}
	return "open", b.opened
}
