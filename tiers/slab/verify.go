package slab

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"

	"go.uber.org/zap"

	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/vfs"
)

// Verify checks chunks that were found when the arena was opened, several at a time and roughly in
// order. It reports each result to the engine. Chunks not checked when ctx ends stay unverified,
// and so do all while the arena is frozen.
// For a chunk that another caller is checking, Verify waits for that check.
func (a *Arena) Verify(ctx context.Context, v []engine.Verification) {
	if a.Frozen() || a.d.begin(ctx) != nil {
		return
	}
	defer a.d.end()
	var next atomic.Int64
	work := func() {
		for {
			i := int(next.Add(1)) - 1
			if i >= len(v) || a.d.going(ctx) != nil {
				return
			}
			a.verifyOnce(ctx, &v[i])
		}
	}
	var wait sync.WaitGroup
	for range min(len(v), cap(a.checks)) - 1 {
		wait.Go(work)
	}
	work()
	wait.Wait()
}

// verifyOnce checks a chunk, or waits for the caller that does.
func (a *Arena) verifyOnce(ctx context.Context, v *engine.Verification) {
	a.checkMu.Lock()
	ended, there := a.checking[v.Handle]
	if !there {
		ended = make(chan struct{})
		a.checking[v.Handle] = ended
	}
	a.checkMu.Unlock()
	if there {
		select {
		case <-ended:
		case <-ctx.Done():
		case <-a.d.stopping:
		}
		return
	}
	defer func() {
		a.checkMu.Lock()
		delete(a.checking, v.Handle)
		a.checkMu.Unlock()
		close(ended)
	}()
	if a.d.engine.Verified(v.Handle) { // another caller has checked it
		return
	}
	select {
	case a.checks <- struct{}{}:
		defer func() { <-a.checks }()
	case <-ctx.Done():
		return
	case <-a.d.stopping:
		return
	}
	a.verify(v)
}

// Recheck compares a chunk, which may be in use, with the checksums that it was kept with. known
// reports whether it has any. The caller needs no lease; if the chunk goes meanwhile, the result
// means nothing. The error wraps tiers.ErrCorrupt if the bytes have changed. Any other error means
// that they cannot be read.
func (a *Arena) Recheck(v *engine.Verification) (known bool, err error) {
	d := a.d
	if err := d.begin(context.Background()); err != nil {
		return false, nil
	}
	defer d.end()
	s := d.slabOf(v.Region)
	if s == nil {
		return false, nil
	}
	s.life.RLock()
	defer s.life.RUnlock()
	slot := s.slotAt(v.Offset)
	if s.closed || !s.isKept(slot) {
		return false, nil
	}
	gen, want := s.getSums(slot, v.Pages, nil)
	if page, err := s.compare(slot, gen, v, want); err != nil {
		d.faulty(s, err)
		return false, err
	} else if page >= 0 {
		return true, s.corrupt(v.First+page, slot)
	}
	return true, nil
}

// compare computes the checksums of a chunk in place. It returns the first page whose checksum
// differs, or -1. The caller holds life.
func (s *slab) compare(slot int, gen uint64, v *engine.Verification,
	want []uint64) (page int, err error) {
	sums := make([]uint64, v.Pages)
	if err := s.buffed.(vfs.Resident).Sums(s.layout.SlotOffset(slot), s.layout.Geometry.PageBytes,
		s.seeds(nil, v.Hashes, gen), sums); err != nil {
		return -1, err
	}
	for i := range sums {
		if sums[i] != want[i] {
			return i, nil
		}
	}
	return -1, nil
}

// verify checks a chunk without a lease. The chunk may be gone at any moment and its slot reused.
// Then the result means nothing, and the old handle changes nothing in the engine.
func (a *Arena) verify(v *engine.Verification) {
	d, s := a.d, a.d.slabOf(v.Region)
	if s == nil {
		return
	}
	s.life.RLock()
	defer s.life.RUnlock()
	if s.closed {
		return
	}
	slot := s.slotAt(v.Offset)
	gen, want := s.getSums(slot, v.Pages, nil)
	page, err := s.compare(slot, gen, v, want)
	if err == nil && page >= 0 {
		err = s.corrupt(v.First+page, slot)
	}
	if err != nil && !errors.Is(err, tiers.ErrCorrupt) {
		d.faulty(s, err)
	}
	switch ended := d.engine.EndVerify(v.Handle, err == nil); {
	case !ended:
	case err == nil:
		a.verified.Add(1)
		s.faults.Store(0)
	case errors.Is(err, tiers.ErrCorrupt):
		d.corrupt.Add(1)
		d.log.Warn("a chunk that was found is corrupt; dropped", zap.Error(err))
	default:
		d.unread.Add(1)
		d.log.Warn("a chunk that was found cannot be read; dropped", zap.Error(err))
	}
}
