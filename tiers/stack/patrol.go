package stack

import (
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"lookaside/tiers"
	"lookaside/tiers/engine"
)

const (
	// patrolYields is how long it waits at most, before each chunk, for loads to end.
	patrolYields = time.Second
	// patrolSteps is how many chunks a walk goes on by in Config.PatrolEvery at least, if
	// Config.PatrolBytes allows that. An arena may fill while the walk waits behind its only chunk.
	patrolSteps = 100
	// rotLogEvery is the least time between two log lines about chunks that have rotted: a failing
	// memory module or a hostile client can cause many.
	rotLogEvery = 10 * time.Second
)

// patrol is what finds chunks of the arena whose bytes have changed.
type patrol struct {
	checked atomic.Uint64 // chunks that were compared with a checksum
	passes  atomic.Uint64 // walks over all of the arena that have ended

	told atomic.Int64  // when the last line was logged, in ns since the Stack began
	mute atomic.Uint64 // chunks that were dropped since, without a line
}

// patroller reads the arena's chunks over and over, at most Config.PatrolBytes a second.
func (s *Stack) patroller() {
	var (
		names []byte
		place engine.PatrolPlace
		walk  = time.Now() // when the walk goes on
		began time.Time    // zero: the next chunk begins a walk
	)
	for sleep(s.ctx, time.Until(walk)) {
		now := time.Now()
		if began.IsZero() {
			began = now
		}
		var v engine.Verification
		var ok bool
		if v, names, ok = s.engine.NextPatrol(&place, names); !ok {
			s.patrol.passes.Add(1)
			walk, began = began.Add(s.cfg.PatrolEvery), time.Time{}
			continue
		}
		walk = now.Add(s.patrolPause(&v))
		s.giveWay()
		s.recheck(&v)
	}
}

// patrolPause returns how long a walk waits behind a chunk: the chunk's part of Config.PatrolEvery,
// but at least what Config.PatrolBytes asks for. The part is that of what the arena holds now. It
// may have held next to nothing when the walk began.
func (s *Stack) patrolPause(v *engine.Verification) time.Duration {
	sp, ok := s.engine.Space(v.Space) // no session need have it open
	if !ok {
		return 0 // and the chunk is gone
	}
	size, every := float64(v.Pages)*float64(sp.Geometry.PageBytes), float64(s.cfg.PatrolEvery)
	part := min(size/float64(max(s.engine.Stats().UsedBytes, 1)), 1./patrolSteps)
	return time.Duration(max(part*every, size/float64(s.cfg.PatrolBytes)*float64(time.Second)))
}

// giveWay waits until no request waits for chunks to be loaded or verified, at most patrolYields.
func (s *Stack) giveWay() {
	const step = 10 * time.Millisecond
	for waited := time.Duration(0); waited < patrolYields; waited += step {
		s.mu.Lock()
		busy := len(s.loads) > 0 || s.unsure > 0
		s.unlockAndWake()
		if !busy || !sleep(s.ctx, step) {
			return
		}
	}
}

// recheck compares a chunk with its checksum, and drops it if they differ. It returns false if it
// was dropped or cannot be read.
func (s *Stack) recheck(v *engine.Verification) bool {
	known, err := s.cfg.Recheck(v)
	if known {
		s.patrol.checked.Add(1)
	}
	if err == nil || !s.engine.DropRotten(v.Handle, !errors.Is(err, tiers.ErrCorrupt)) {
		return err == nil
	}
	_ = s.forget() // a restored arena must not find it
	now := time.Since(s.start).Nanoseconds()
	last := s.patrol.told.Load()
	if (last != 0 && now-last < rotLogEvery.Nanoseconds()) ||
		!s.patrol.told.CompareAndSwap(last, max(now, 1)) {
		s.patrol.mute.Add(1)
		return false
	}
	s.log.Error("a chunk in the arena is bad and was dropped; memory errors, or a client that writes where it must not, are the usual causes", zap.Error(err),
		zap.Uint32("region", v.Region), zap.Uint64("offset", v.Offset), zap.Int("pages", v.Pages),
		zap.Uint64("not_logged_before", s.patrol.mute.Swap(0)))
	return false
}

// recheckItems rechecks what is about to be written to a tier. It returns the items that may be
// written, and ends the others, which have rotted.
func (s *Stack) recheckItems(items []engine.CascadeItem) []engine.CascadeItem {
	if s.cfg.PatrolBytes == 0 {
		return items
	}
	return slices.DeleteFunc(items, func(c engine.CascadeItem) bool {
		v := engine.Verification{Handle: c.VerifyHandle, Space: c.Space, Region: c.Region,
			Offset: c.Offset, First: c.First, Pages: c.Pages, Hashes: c.Hashes}
		bad := !s.recheck(&v)
		if bad {
			s.engine.EndCascade(c.Handle, false)
		}
		return bad
	})
}
