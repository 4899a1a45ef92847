package elsewhere

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"lookaside/dax"
	"lookaside/tiers"
)

const (
	// firstScratch is the number of the first scratch region. The arena's are below it.
	firstScratch = 3 << 30
	// scratchUnit is what scratch memory is given out in: values may then be read and written by
	// O_DIRECT.
	scratchUnit = 4096
	// leastScratch is the size of a scratch region, if no larger one is needed.
	leastScratch = 16 << 20
)

// span is part of a scratch region.
type span struct {
	area   *area
	offset int64
	size   int64
}

func (s span) bytes() []byte { return s.area.region.Bytes()[s.offset : s.offset+s.size] }

// area is a scratch region and its free parts, by rising offset.
type area struct {
	id     uint32
	region *dax.Region
	free   []span
}

// scratch gives out memory that is mapped by the program and is nobody else's. Any goroutine.
type scratch struct {
	limit int64
	// added is called with a new area, before any of it is given out. It may be called by several
	// goroutines.
	added func(ctx context.Context, a *area) error

	mu     sync.Mutex // guards what follows
	areas  []*area
	bytes  int64 // of all areas
	closed bool
	growth sync.Mutex // held while an area is added; taken before mu
}

func roundUp(n, unit int64) int64 { return (n + unit - 1) / unit * unit }

// take gives out size bytes. ErrBusy: the limit is reached.
func (s *scratch) take(ctx context.Context, size int64) (span, error) {
	size = roundUp(size, scratchUnit)
	for {
		if sp, ok := s.find(size); ok {
			return sp, nil
		}
		if err := s.grow(ctx, size); err != nil {
			return span{}, err
		}
	}
}

func (s *scratch) find(size int64) (span, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, a := range s.areas {
		for i := range a.free {
			if f := &a.free[i]; f.size >= size {
				sp := span{a, f.offset, size}
				f.offset, f.size = f.offset+size, f.size-size
				if f.size == 0 {
					a.free = slices.Delete(a.free, i, i+1)
				}
				return sp, true
			}
		}
	}
	return span{}, false
}

// give takes a span back that nobody writes to any more.
func (s *scratch) give(sp span) {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := sp.area
	i, _ := slices.BinarySearchFunc(a.free, sp.offset, func(f span, at int64) int {
		return int(min(1, max(-1, f.offset-at)))
	})
	a.free = slices.Insert(a.free, i, sp)
	if i+1 < len(a.free) && a.free[i].offset+a.free[i].size == a.free[i+1].offset {
		a.free[i].size += a.free[i+1].size
		a.free = slices.Delete(a.free, i+1, i+2)
	}
	if i > 0 && a.free[i-1].offset+a.free[i-1].size == a.free[i].offset {
		a.free[i-1].size += a.free[i].size
		a.free = slices.Delete(a.free, i, i+1)
	}
}

// grow adds an area with room for size bytes, unless another goroutine just has.
func (s *scratch) grow(ctx context.Context, size int64) error {
	s.growth.Lock()
	defer s.growth.Unlock()
	if sp, ok := s.find(size); ok {
		s.give(sp)
		return nil
	}
	s.mu.Lock()
	n, have, closed := len(s.areas), s.bytes, s.closed
	s.mu.Unlock()
	want := max(leastScratch, roundUp(size, dax.HugePageSize))
	switch {
	case closed:
		return tiers.ErrClosed
	case have > 0 && have+want > s.limit:
		return fmt.Errorf("%w: %d bytes of scratch memory are in use", tiers.ErrBusy, have)
	}
	r, err := dax.Create(ctx, dax.Options{Kind: dax.KindMemfd, SizeBytes: want,
		NUMANode: dax.NoNUMANode})
	if err != nil {
		return fmt.Errorf("scratch memory: %w", err)
	}
	a := &area{id: firstScratch + uint32(n), region: r}
	s.mu.Lock()
	s.areas, s.bytes = append(s.areas, a), s.bytes+r.Size()
	s.mu.Unlock()
	err = s.added(ctx, a)
	s.mu.Lock()
	a.free = []span{{a, 0, r.Size()}}
	s.mu.Unlock()
	return err
}

// list returns all areas.
func (s *scratch) list() []*area {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.areas)
}

// close frees the memory. Nobody uses any of it.
func (s *scratch) close() (err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for _, a := range s.areas {
		if cerr := a.region.Close(); err == nil {
			err = cerr
		}
	}
	s.areas = nil
	return err
}
