package stack

import (
	"sync"
	"time"
)

const (
	// estimateWindow is the time over which the bandwidth of a busy tier is taken.
	estimateWindow = 100 * time.Millisecond
	// estimateWeight is that of the newest sample in the average.
	estimateWeight = 0.3
)

// estimate is a tier's latency and bandwidth as seen in loads: exponentially weighted averages.
// Bandwidth is that of all loads at one time, so what is ahead in the queue counts. Any goroutine.
type estimate struct {
	mu      sync.Mutex
	latency float64   // s, of a call's first chunk beyond the time to move it
	rate    float64   // bytes/s; 0: not known
	seen    time.Time // of the last load

	calls int // under way
	since time.Time
	bytes int64 // since then
	idle  bool  // nothing was under way when the window began
}

// begin records that a call begins. alone reports that no other call is under way: then the caller
// calls first, for the latency.
func (e *estimate) begin() (alone bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if alone = e.calls == 0; alone {
		e.since, e.bytes, e.idle = time.Now(), 0, true
	}
	e.calls++
	return alone
}

// first records how long the first chunk took of a call that began alone.
func (e *estimate) first(took time.Duration, bytes int64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	l := took.Seconds() / 2
	if e.rate > 0 {
		l = max(0, took.Seconds()-float64(bytes)/e.rate)
	}
	if e.seen.IsZero() {
		e.latency = l
	} else {
		e.latency += estimateWeight * (l - e.latency)
	}
}

// moved records that a chunk came.
func (e *estimate) moved(bytes int64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	now := time.Now()
	e.seen = now
	e.bytes += bytes
	if now.Sub(e.since) >= estimateWindow {
		e.sample(now)
		e.since, e.bytes, e.idle = now, 0, false
	}
}

// end records that a call has ended.
func (e *estimate) end() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.calls--; e.calls == 0 && e.bytes > 0 {
		e.sample(time.Now())
		e.bytes = 0
	}
}

func (e *estimate) sample(now time.Time) {
	d := now.Sub(e.since).Seconds()
	if e.idle {
		d -= min(e.latency, d/2)
	}
	if d <= 0 {
		return
	}
	rate := float64(e.bytes) / d
	switch {
	case e.rate == 0:
		e.rate = rate
	default:
		e.rate += estimateWeight * (rate - e.rate)
	}
}

// pace returns the estimates as they are now, for a tier from which others wait for so many bytes.
func (e *estimate) pace(ahead int64) pace {
	e.mu.Lock()
	defer e.mu.Unlock()
	return pace{latency: e.latency, rate: e.rate, ahead: ahead}
}

// read returns the estimates, and how old they are.
func (e *estimate) read() (latency time.Duration, bytesPerSec float64, age time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.seen.IsZero() {
		age = time.Since(e.seen)
	}
	return time.Duration(e.latency * float64(time.Second)), e.rate, age
}
