package stack

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/engine"
)

// beginStore waits until the tier is not paused, and counts a call of its Store. endStore ends it.
// It returns false if the Stack is closed.
func (s *Stack) beginStore(t *tier) bool {
	s.mu.Lock()
	defer s.unlockAndWake()
	for t.paused > 0 && !s.closed {
		t.calm.Wait()
	}
	if s.closed {
		return false
	}
	t.storing++
	return true
}

func (s *Stack) endStore(t *tier) {
	s.mu.Lock()
	defer s.unlockAndWake()
	if t.storing--; t.storing == 0 {
		t.calm.Broadcast()
	}
	if s.written != nil {
		close(s.written)
		s.written = nil
	}
}

// nextWritten returns a channel that is closed when a call of any tier's Store has ended.
func (s *Stack) nextWritten() <-chan struct{} {
	s.mu.Lock()
	defer s.unlockAndWake()
	if s.written == nil {
		s.written = make(chan struct{})
	}
	return s.written
}

// storeWorker writes what the engine has queued for a tier.
func (s *Stack) storeWorker(t *tier) {
	var items []engine.CascadeItem
	var buf []byte
	for {
		if wait := t.breaker.wait(); wait > 0 {
			if !sleep(s.ctx, wait) {
				return
			}
			continue
		}
		if !s.beginStore(t) {
			return
		}
		ok, probe := t.breaker.enter()
		if !ok {
			s.endStore(t)
			continue
		}
		most := t.Batch
		if probe {
			most = 1
		}
		items, buf = s.engine.NextCascades(t.index, most, buf, items[:0])
		if len(items) == most {
			ring(t.bell) // there may be some for another worker
		}
		v := neither
		if len(items) > 0 {
			v = s.store(t, items)
		}
		t.breaker.leave(v)
		s.endStore(t)
		if len(items) == 0 {
			select {
			case <-t.bell:
			case <-s.ctx.Done():
				return
			}
		}
	}
}

// store writes a batch of the arena's chunks to a tier. A chunk that fails is tried once more. If
// it fails again it is written when it is used next.
func (s *Stack) store(t *tier, items []engine.CascadeItem) (v verdict) {
	if items = s.recheckItems(s.verifyItems(items)); len(items) == 0 {
		return neither
	}
	transfers := make([]tiers.Transfer, 0, len(items))
	handles := make([]uint64, 0, len(items))
	for i := range items {
		c := &items[i]
		sp := s.space(c.Space)
		if sp == nil {
			s.engine.EndCascade(c.Handle, false)
			continue
		}
		size := uint64(c.Pages) * uint64(sp.Geometry.PageBytes)
		transfers = append(transfers, tiers.Transfer{
			Run: tiers.Run{Space: sp, First: c.First, Prev: c.Prev, Hashes: c.Hashes,
				Tenant: c.Tenant},
			Bytes: s.cfg.Arena(c.Region)[c.Offset : c.Offset+size : c.Offset+size],
		})
		handles = append(handles, c.Handle)
	}
	for attempt := range 2 {
		last := attempt == 1
		var mu sync.Mutex // done may be called by any goroutine of the tier
		var again []int
		var drop []tiers.Run
		v = s.callStore(t, transfers, func(i int, err error) {
			if !last && s.judge(err) == failed {
				mu.Lock()
				defer mu.Unlock()
				again = append(again, i)
				return
			}
			if s.engine.EndCascade(handles[i], err == nil) && err == nil {
				mu.Lock()
				defer mu.Unlock()
				drop = append(drop, transfers[i].Run)
			}
		})
		for _, run := range drop {
			s.drop(t, run)
		}
		if len(again) == 0 {
			return v
		}
		rest, names := make([]tiers.Transfer, len(again)), make([]uint64, len(again))
		for to, i := range again {
			rest[to], names[to] = transfers[i], handles[i]
		}
		transfers, handles = rest, names
	}
	return v
}

// callStore calls a tier's Store and counts the outcome.
func (s *Stack) callStore(t *tier, transfers []tiers.Transfer,
	done func(i int, err error)) verdict {
	start := time.Now()
	return s.call(t.Tier.Store, t.StoreTimeout, transfers, func(i int, err error) {
		if err == nil {
			bytes := int64(len(transfers[i].Bytes))
			t.count.stored(bytes)
			if s.cfg.Tenants != nil {
				s.cfg.Tenants.Wrote(transfers[i].Tenant, t.index, bytes)
			}
			if s.cfg.Observe != nil {
				s.cfg.Observe(t.index, OpStore, bytes, time.Since(start))
			}
		} else {
			t.count.failed(OpStore, err)
		}
		done(i, err)
	})
}

// drop makes a tier forget a run that was cleared while it was being stored.
func (s *Stack) drop(t *tier, run tiers.Run) {
	ctx, cancel := context.WithTimeoutCause(s.ctx, t.StoreTimeout, errLate)
	defer cancel()
	if err := t.Tier.Drop(ctx, run); err != nil {
		t.count.failed(OpStore, err)
	}
}

// demoteWorker copies to a tier what the tier above it is about to drop, through a buffer of its
// own.
func (s *Stack) demoteWorker(t *tier) {
	above := s.tiers[t.index-1]
	var bounce []byte
	var list []tiers.Victim
	for {
		if wait := max(t.breaker.wait(), above.breaker.wait()); wait > 0 {
			if !sleep(s.ctx, wait) {
				return
			}
			continue
		}
		if !s.beginStore(t) {
			return
		}
		list = t.victims.NextVictims(t.Batch, list[:0])
		for i := range list {
			list[i].Space = s.spaceLike(list[i].Space)
		}
		for rest := list; len(rest) > 0; {
			var n int
			if bounce, n = s.bounce(bounce, len(rest),
				func(i int) tiers.Run { return rest[i].Run }); n == 0 {
				t.count.noRoom.Add(1)
				t.victims.EndVictim(rest[0].Handle, false)
				rest = rest[1:]
				continue
			}
			transfers, kept := carry(bounce, n, func(i int) tiers.Run { return rest[i].Run }),
				make([]bool, n)
			s.copyUp(above, t, transfers, kept)
			for i, v := range rest[:n] {
				if kept[i] {
					t.count.demoted.Add(1)
				}
				t.victims.EndVictim(v.Handle, kept[i])
			}
			rest = rest[n:]
		}
		s.endStore(t)
		if len(list) < t.Batch {
			select {
			case <-t.victims.VictimsReady():
			case <-s.ctx.Done():
				return
			}
		}
	}
}

// spaceLike returns the space as the Stack knows it. If it does not, it returns sp, which a tier
// made of what it keeps.
func (s *Stack) spaceLike(sp *tiers.Space) *tiers.Space {
	for _, known := range *s.spaces.Load() {
		if known != nil && known.Fingerprint == sp.Fingerprint {
			return known
		}
	}
	return sp
}

// bounce makes the buffer between two tiers, if there is none, and returns how many of n runs fit
// it. 0: the first is larger than the buffer.
func (s *Stack) bounce(buf []byte, n int, run func(i int) tiers.Run) ([]byte, int) {
	if buf == nil {
		buf = make([]byte, s.cfg.BounceBytes)
	}
	size := int64(0)
	for i := range n {
		if size += bytesOf(run(i)); size > int64(len(buf)) {
			return buf, i
		}
	}
	return buf, n
}

func bytesOf(run tiers.Run) int64 { return int64(run.Pages()) * run.Space.Geometry.PageBytes }

// carry lays n runs of one chunk each out in a buffer.
func carry(buf []byte, n int, run func(i int) tiers.Run) []tiers.Transfer {
	out := make([]tiers.Transfer, n)
	at := int64(0)
	for i := range out {
		r := run(i)
		size := bytesOf(r)
		out[i] = tiers.Transfer{Run: r, Bytes: buf[at : at+size : at+size]}
		at += size
	}
	return out
}

// copyUp copies chunks from one tier to another through the transfers' bytes, except those that it
// holds already. It sets kept[i] if the tier holds chunk i in the end.
func (s *Stack) copyUp(from, to *tier, transfers []tiers.Transfer, kept []bool) {
	if ok, _ := to.breaker.enter(); !ok {
		return
	}
	v := neither
	defer func() { to.breaker.leave(v) }()
	var todo []int
	var held [1]uint16
	for i := range transfers {
		ctx, cancel := context.WithTimeoutCause(s.ctx, to.LookupTimeout, errLate)
		held[0] = 0
		err := to.Tier.Contains(ctx, transfers[i].Run, held[:])
		cancel()
		if err != nil {
			to.count.failed(OpLookup, err)
			v = s.judge(err)
			return
		}
		v = worked
		if kept[i] = int(held[0]) >= transfers[i].Pages(); !kept[i] {
			todo = append(todo, i)
		}
	}
	if len(todo) == 0 {
		return
	}
	if ok, _ := from.breaker.enter(); !ok {
		return
	}
	pick := func(list []int) []tiers.Transfer {
		out := make([]tiers.Transfer, len(list))
		for j, i := range list {
			out[j] = transfers[i]
		}
		return out
	}
	var mu sync.Mutex
	var read []int
	some := pick(todo)
	from.breaker.leave(s.call(from.Tier.Load, from.LoadTimeout, some, func(j int, err error) {
		if err != nil {
			from.count.failed(OpLoad, err)
			return
		}
		from.count.loaded(int64(len(some[j].Bytes)))
		mu.Lock()
		defer mu.Unlock()
		read = append(read, todo[j])
	}))
	if len(read) == 0 {
		return
	}
	v = s.callStore(to, pick(read), func(j int, err error) {
		mu.Lock()
		defer mu.Unlock()
		kept[read[j]] = err == nil
	})
}

// Flush waits until what is queued for the tiers has been written, or ctx ends. Partly filled
// chunks do not wait for their delay. Flush does not wait for a tier that is off. The error names
// what was not written.
func (s *Stack) Flush(ctx context.Context) error {
	s.engine.HurryPartials()
	for {
		var left []error
		waiting := false
		for i, t := range s.tiers {
			n, _ := s.engine.CascadeQueue(i)
			s.mu.Lock()
			busy := t.storing > 0
			s.unlockAndWake()
			if n == 0 && !busy {
				continue
			}
			left = append(left, fmt.Errorf("tier %s: %d chunks wait to be written", t.Name, n))
			if t.breaker.wait() == 0 {
				waiting = true
				ring(t.bell) // a chunk that was just growing comes a little later
			}
		}
		if !waiting || s.ctx.Err() != nil {
			return errors.Join(left...)
		}
		select {
		case <-ctx.Done():
			return errors.Join(append(left, context.Cause(ctx))...)
		case <-s.ctx.Done():
		case <-time.After(flushPoll):
		}
	}
}

// flushPoll is how often Flush looks.
const flushPoll = 10 * time.Millisecond
