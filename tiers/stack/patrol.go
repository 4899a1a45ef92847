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
		began = walk
		rate  float64 // of the walk, in bytes a second
	)
	for sleep(s.ctx, time.Until(walk)) {
		now := time.Now()
		if rate == 0 { // a new walk
			began = now
			rate = min(float64(s.cfg.PatrolBytes),
				float64(max(s.engine.Stats().UsedBytes, 1))/s.cfg.PatrolEvery.Seconds())
		}
		var v engine.Verification
		var ok bool
		if v, names, ok = s.engine.NextPatrol(&place, names); !ok {
			s.patrol.passes.Add(1)
			rate = 0
			walk = began.Add(s.cfg.PatrolEvery)
			continue
		}
		walk = now.Add(time.Duration(float64(s.sizeOf(&v)) / rate * 1e9))
		s.giveWay()
		s.recheck(&v)
	}
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
