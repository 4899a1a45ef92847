//go:build linux

// Package copypool copies memory on threads of its own, which yield to all other work. The benches
// use it, as the load that lookups meet, and as a way to copy that they measure.
package copypool

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"lookaside/dax"
	"lookaside/dax/memcopy"
)

// ErrClosed means that the pool was closed before the copy was done.
var ErrClosed = errors.New("copypool: pool closed")

// poolNice is the priority of a pool's threads. Four goroutines that copy at full speed raise a
// lookup's p99.9 to 40–50 ms. With a Gosched between pieces it is 2–4 ms. On locked threads at this
// priority it is 0.6 ms.
const poolNice = 10

// Job is one copy: min(len(Dst), len(Src)) bytes. A Dst must not overlap any other slice of the
// jobs of one call.
type Job struct{ Dst, Src []byte }

// Pool copies on a few system threads of low priority, in turns of
// memcopy.PieceBytes. Between turns they
// yield, so copies use only idle processor time. Any goroutine may call its methods.
//
// Threads take turns from the queue themselves, under a mutex. A turn lasts some 25 µs, and a
// channel hop between locked threads takes three times that.
type Pool struct {
	mu     sync.Mutex // guards the fields below and those of every batch
	work   sync.Cond  // signalled when queue or closed changes
	queue  []*batch   // batches with pieces that no thread has taken, oldest first
	closed bool
	wg     sync.WaitGroup
}

// batch is one call of Do.
type batch struct {
	jobs    []Job // jobs not taken yet; the first may be partly taken
	copying int   // turns in progress on threads
	err     error // the first error
	done    chan struct{}
}

// New starts the given number of threads; 0 means one for each core that this process may use.
// Close ends them.
func New(threads int) *Pool {
	if threads <= 0 {
		threads = runtime.GOMAXPROCS(0)
	}
	p := &Pool{}
	p.work.L = &p.mu
	p.wg.Add(threads)
	for range threads {
		go p.run()
	}
	return p
}

// Do copies all jobs and returns when they are done. It stops early with an error when ctx ends or
// the pool closes; any part may have been copied by then. It never returns while a thread still
// uses the slices. A fault in the memory of a job, as in a truncated file, is an error that wraps
// [dax.ErrFault]. If the slices of a job overlap, Do returns an error before anything is copied.
func (p *Pool) Do(ctx context.Context, jobs ...Job) error {
	b := &batch{done: make(chan struct{})}
	for _, j := range jobs {
		n := min(len(j.Dst), len(j.Src))
		if n > 0 && memcopy.Overlap(j.Dst[:n], j.Src[:n]) {
			return fmt.Errorf("copypool: source and destination of %d bytes overlap", n)
		}
		if n > 0 {
			b.jobs = append(b.jobs, Job{j.Dst[:n], j.Src[:n]})
		}
	}
	if err := ctx.Err(); err != nil || len(b.jobs) == 0 {
		return err
	}
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return ErrClosed
	}
	p.queue = append(p.queue, b)
	p.mu.Unlock()
	p.work.Broadcast()
	select {
	case <-b.done:
	case <-ctx.Done():
		p.mu.Lock()
		p.stop(b, ctx.Err())
		p.mu.Unlock()
		<-b.done
	}
	return b.err
}

// Close stops the threads and waits for them. Unfinished copies end with ErrClosed. It is
// idempotent.
func (p *Pool) Close() {
	p.mu.Lock()
	p.closed = true
	for len(p.queue) > 0 {
		p.stop(p.queue[0], ErrClosed)
	}
	p.mu.Unlock()
	p.work.Broadcast()
	p.wg.Wait()
}

// run is the body of one thread.
func (p *Pool) run() {
	defer p.wg.Done()
	// Never unlocked: raising the priority again needs privilege, so the thread ends with its
	// goroutine.
	runtime.LockOSThread()
	// Best effort: a seccomp filter may forbid it, and copies work without it.
	_ = unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), poolNice)
	y := memcopy.NewYielder(1)
	var turn []Job // reused
	for {
		var b *batch
		if b, turn = p.take(turn[:0]); b == nil {
			return
		}
		var err error
		for _, j := range turn {
			if err = dax.Guard(func() { memcopy.Copy(j.Dst, j.Src) }, j.Dst, j.Src); err != nil {
				break
			}
		}
		clear(turn) // do not keep callers' memory alive
		p.finish(b, err)
		y.Yield()
	}
}

// take waits for work and appends up to memcopy.PieceBytes of one batch to turn. A nil batch means
// that the pool is closed.
func (p *Pool) take(turn []Job) (*batch, []Job) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.queue) == 0 {
		if p.closed {
			return nil, turn
		}
		p.work.Wait()
	}
	b := p.queue[0]
	b.copying++
	for left := memcopy.PieceBytes; left > 0 && len(b.jobs) > 0; {
		j := &b.jobs[0]
		n := min(len(j.Dst), left)
		turn = append(turn, Job{j.Dst[:n], j.Src[:n]})
		left -= n
		if j.Dst, j.Src = j.Dst[n:], j.Src[n:]; len(j.Dst) == 0 {
			b.jobs = b.jobs[1:]
		}
	}
	if len(b.jobs) == 0 {
		p.queue = p.queue[1:]
	}
	return b, turn
}

// finish accounts for a turn that was copied or has faulted.
func (p *Pool) finish(b *batch, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	b.copying--
	if err != nil && len(b.jobs) > 0 {
		p.stop(b, fmt.Errorf("copypool: %w", err))
		return
	}
	if err != nil && b.err == nil {
		b.err = fmt.Errorf("copypool: %w", err)
	}
	if len(b.jobs) == 0 && b.copying == 0 {
		close(b.done)
	}
}

// stop ends a batch early: threads take no more of it. The caller holds mu. A batch that is not in
// the queue has been taken completely, and runs to its end.
func (p *Pool) stop(b *batch, err error) {
	at := slices.Index(p.queue, b)
	if at < 0 {
		return
	}
	p.queue = slices.Delete(p.queue, at, at+1)
	b.jobs = nil
	if b.err == nil {
		b.err = err
	}
	if b.copying == 0 {
		close(b.done)
	}
}
