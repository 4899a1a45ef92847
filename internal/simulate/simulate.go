// Package simulate replays the requests of a trace through the eviction policies of package policy.
// The result shows which policy keeps most of what is requested again. It keeps only names: the
// books of an engine without an engine.
package simulate

import (
	"context"
	"fmt"

	"lookaside/tiers/policy"
)

// Result is the result of one policy on one trace at one capacity.
type Result struct {
	Trace    string `json:"trace"`
	Policy   string `json:"policy"`
	Capacity int    `json:"capacity"` // blocks
	Requests int    `json:"requests"`
	Blocks   int    `json:"blocks"` // requested
	Hits     int    `json:"hits"`   // in the prefix that was held when the request came
	Evicted  int    `json:"evicted"`
}

// Ratio returns the part of the blocks that hit.
func (r Result) Ratio() float64 { return float64(r.Hits) / float64(max(r.Blocks, 1)) }

// every is how many requests a run handles before it checks ctx and reports progress.
const every = 1024

// Run replays a trace. A request first hits the longest held prefix of its blocks, then stores the
// rest and evicts where there is no room. Its blocks are leased until it is done. A request that is
// larger than the cache keeps what fits. progress, if not nil, is called now and then with the
// number of requests replayed since its last call.
func Run(ctx context.Context, t *Trace, p policy.Policy, capacity int,
	progress func(requests int)) (Result, error) {
	if capacity <= 0 || capacity > policy.SlotMask {
		return Result{}, fmt.Errorf("capacity of %d blocks: must be 1 to %d", capacity,
			policy.SlotMask)
	}
	s := newStore(t, p, capacity)
	res := Result{Trace: t.Name, Policy: p.Name(), Capacity: capacity, Requests: t.Requests(),
		Blocks: len(t.blocks)}
	told := 0
	for i := range t.ends {
		if i%every == 0 && i > 0 {
			if err := ctx.Err(); err != nil {
				return res, err
			}
			if progress != nil {
				progress(i - told)
				told = i
			}
		}
		res.Hits += s.request(t.request(i))
	}
	if progress != nil {
		progress(t.Requests() - told)
	}
	res.Evicted = s.evicted
	return res, nil
}

// store is the engine that a policy sees: which blocks are resident, which block continues which,
// and what is leased.
type store struct {
	t       *Trace
	p       policy.Policy
	at      []uint32 // by block: the ref of its slot, 0 if not resident
	slots   []resident
	free    []uint32
	evicted int
	due     int // blocks since the policy's last Work
}

// workSteps is the size of one Work, and the number of blocks between two, as in the engine.
const workSteps = 32

type resident struct {
	block    uint32
	children uint32
	leased   bool
}

func newStore(t *Trace, p policy.Policy, capacity int) *store {
	s := &store{t: t, p: p, at: make([]uint32, len(t.parent)), slots: make([]resident, capacity),
		free: make([]uint32, capacity)}
	for i := range s.free {
		s.free[i] = region<<policy.SlotBits | uint32(capacity-1-i)
	}
	p.Grow(region, capacity)
	return s
}

// region is the number of the only region.
const region = 1

func (s *store) slot(ref uint32) *resident { return &s.slots[ref&policy.SlotMask] }

// key returns a policy's key for a block. It is never 0.
func key(block uint32) uint64 { return (uint64(block) + 1) * 0x9E3779B97F4A7C15 }

// request replays one request and returns the blocks that hit.
func (s *store) request(blocks []uint32) (hits int) {
	for _, b := range blocks {
		at := s.at[b]
		if at == 0 {
			break
		}
		s.p.Use(at)
		s.p.Hold(at)
		s.slot(at).leased = true
		hits++
	}
	held := hits
	for _, b := range blocks[hits:] {
		slot, ok := s.room()
		if !ok {
			break
		}
		parent := uint32(0)
		if up := s.t.parent[b]; up >= 0 {
			parent = s.at[up]
			s.slot(parent).children++
		}
		*s.slot(slot) = resident{block: b, leased: true}
		s.at[b] = slot
		s.p.Enter(slot, key(b), parent, 0)
		held++
	}
	for i := held - 1; i >= 0; i-- {
		slot := s.at[blocks[i]]
		r := s.slot(slot)
		r.leased = false
		if r.children == 0 {
			s.p.Offer(slot)
		}
	}
	if s.due += len(blocks); s.due >= workSteps {
		s.due = 0
		s.p.Work(workSteps)
	}
	return hits
}

// room returns a free slot. If there is none, it evicts.
func (s *store) room() (slot uint32, ok bool) {
	if n := len(s.free); n > 0 {
		slot = s.free[n-1]
		s.free = s.free[:n-1]
		return slot, true
	}
	slot, ok = s.p.Victim(0)
	if !ok {
		return 0, false
	}
	b := s.slot(slot).block
	up := s.t.parent[b]
	if up >= 0 {
		s.p.Inherit(s.at[up], slot)
	}
	s.p.Leave(slot, true)
	s.at[b] = 0
	s.evicted++
	if up >= 0 {
		above := s.at[up]
		r := s.slot(above)
		r.children--
		if r.children == 0 && !r.leased {
			s.p.Offer(above)
		}
	}
	return slot, true
}
