package stack

import (
	"context"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/engine"
)

// unwrittenPoll is how often Held looks beside the ends of calls of Store: chunks can also be shed.
const unwrittenPoll = 50 * time.Millisecond

// Held is what is held of a run, chunk by chunk: how many of its pages, from the first one on.
// Chunks behind a gap count as well.
type Held struct {
	Pages   []uint16 // by the arena or a tier
	Below   []uint16 // by a tier
	Waiting int      // chunks that are still to be written to a tier
}

// Held looks for consecutive pages, of which the first is the first of a chunk. It leases nothing,
// moves nothing, and counts as no use. It returns when none of the chunks is still to be written to
// a tier, but at once if wait has ended. ctx bounds the tiers that do not know from memory what
// they hold; one that fails holds nothing. Peers are not asked.
func (s *Stack) Held(ctx, wait context.Context, id engine.SpaceID, first int, prev,
	hashes []byte) (h Held, err error) {
	sp := s.space(id)
	if sp == nil {
		return h, tiers.ErrNotFound
	}
	if first%sp.Geometry.PagesPerChunk != 0 {
		return h, tiers.ErrInvalid
	}
	// What is not waiting any more is found in the tiers, which are asked afterwards.
	if h.Waiting, err = s.engine.Unwritten(id, first, hashes); err != nil {
		return h, err
	}
	for h.Waiting > 0 && wait.Err() == nil {
		written := s.nextWritten()
		if h.Waiting, err = s.engine.Unwritten(id, first, hashes); err != nil {
			return h, err
		}
		if h.Waiting == 0 {
			break
		}
		select {
		case <-written:
		case <-wait.Done():
		case <-time.After(unwrittenPoll):
		}
	}
	run := tiers.Run{Space: sp, First: first, Prev: prev, Hashes: hashes}
	n := run.Chunks()
	h.Pages, h.Below = make([]uint16, n), make([]uint16, n)
	some := make([]uint16, n)
	for _, t := range s.tiers {
		clear(some)
		if !t.breaker.usable() || t.Tier.Contains(ctx, run, some) != nil {
			continue
		}
		for i := range some {
			h.Below[i] = max(h.Below[i], some[i])
		}
	}
	if err := s.engine.Contains(id, first, hashes, h.Pages); err != nil {
		return h, err
	}
	for i := range some {
		h.Pages[i] = max(h.Pages[i], h.Below[i])
	}
	return h, nil
}
