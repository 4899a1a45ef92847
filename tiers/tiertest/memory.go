// Package tiertest has the contract suite that every tiers.Tier passes, and Memory, a correct Tier
// in memory for tests of code that uses tiers.
package tiertest

import (
	"bytes"
	"container/list"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/cespare/xxhash/v2"

	"lookaside/tiers"
)

// Op is a call of a tier.
type Op uint8

const (
	Contains Op = iota
	Load
	Store
	Drop
	Clear
)

// MemoryOptions configures a Memory. With the zero value it is unbounded, never late and never
// fails.
type MemoryOptions struct {
	Kind  string // default "memory"
	Local bool
	// capacity; above it the least recently used chunk is dropped. Default 0: no limit
	CapacityBytes int64
	Latency       time.Duration // the least duration of each call
	BytesPerSec   int64         // limit of each call. Default 0: none
	// Fault is called before each chunk of a Load or Store, and once in each other call, without a
	// lock held. It may wait until ctx ends. Its error is that of the chunk or call; ErrCorrupt
	// drops the chunk. SetFault replaces it.
	Fault func(ctx context.Context, op Op, run tiers.Run) error
}

// Memory is a correct Tier in memory, for tests. Latency and faults use real time, or that of a
// synctest bubble.
type Memory struct {
	o      MemoryOptions
	closed context.Context // ends when Close begins
	close  context.CancelCauseFunc
	calls  sync.WaitGroup

	mu        sync.Mutex
	fault     func(ctx context.Context, op Op, run tiers.Run) error
	closing   bool
	byFirst   map[memKey][]*memChunk // the versions that begin with that page
	used      list.List              // of *memChunk, the one used last in front
	bytes     int64
	pages     int64
	evictions uint64
	corrupt   uint64
}

type memKey struct {
	fp    tiers.Fingerprint
	first string // digest of the chunk's first page
}

type memChunk struct {
	key    memKey
	hashes []byte
	pages  int
	bytes  []byte
	sums   []uint64 // of each page
	at     *list.Element
}

// NewMemory returns an empty Memory.
func NewMemory(o MemoryOptions) *Memory {
	if o.Kind == "" {
		o.Kind = "memory"
	}
	m := &Memory{o: o, fault: o.Fault, byFirst: map[memKey][]*memChunk{}}
	m.closed, m.close = context.WithCancelCause(context.Background())
	return m
}

// SetFault replaces MemoryOptions.Fault; nil: none.
func (m *Memory) SetFault(fault func(ctx context.Context, op Op, run tiers.Run) error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fault = fault
}

// Forget drops each chunk with probability share, as a tier may at any time. It returns how many it
// dropped.
func (m *Memory) Forget(rnd *rand.Rand, share float64) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.each(func(c *memChunk) bool {
		if rnd.Float64() >= share {
			return false
		}
		m.remove(c)
		return true
	})
}

// Rot flips a bit of each chunk with probability share. It returns how many chunks it changed.
func (m *Memory) Rot(rnd *rand.Rand, share float64) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.each(func(c *memChunk) bool {
		if rnd.Float64() >= share {
			return false
		}
		bit := rnd.IntN(8 * len(c.bytes))
		c.bytes[bit/8] ^= 1 << (bit % 8)
		return true
	})
}

// each calls do for all chunks, least recently used first, and returns how often do returned true.
func (m *Memory) each(do func(c *memChunk) bool) (n int) {
	for at := m.used.Back(); at != nil; {
		before := at.Prev()
		if do(at.Value.(*memChunk)) {
			n++
		}
		at = before
	}
	return n
}

// begin starts a call. Without an error the caller must call end. The context ends also when the
// tier is closed.
func (m *Memory) begin(ctx context.Context) (both context.Context, end func(), err error) {
	m.mu.Lock()
	if m.closing {
		m.mu.Unlock()
		return nil, nil, tiers.ErrClosed
	}
	m.calls.Add(1)
	m.mu.Unlock()
	both, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(m.closed, func() { cancel(tiers.ErrClosed) })
	end = func() {
		stop()
		cancel(nil)
		m.calls.Done()
	}
	if ctx.Err() != nil {
		end()
		return nil, nil, context.Cause(ctx)
	}
	return both, end, nil
}

// Wait waits for d, or returns the cause for which ctx ended before.
func Wait(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (m *Memory) ask(ctx context.Context, op Op, run tiers.Run) error {
	m.mu.Lock()
	fault := m.fault
	m.mu.Unlock()
	if fault != nil {
		if err := fault(ctx, op, run); err != nil {
			return err
		}
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return nil
}

func keyOf(run tiers.Run) memKey {
	return memKey{run.Space.Fingerprint, string(run.Hashes[:run.Space.Geometry.DigestBytes])}
}

// agree returns how many pages, from the first, the chunk shares with a run of one chunk.
func (c *memChunk) agree(run tiers.Run) (pages int) {
	d := run.Space.Geometry.DigestBytes
	for most := min(c.pages, run.Pages()); pages < most; pages++ {
		if !bytes.Equal(c.hashes[pages*d:(pages+1)*d], run.Hashes[pages*d:(pages+1)*d]) {
			break
		}
	}
	return pages
}

// best returns the chunk with the most pages of a run of one chunk, and how many.
func (m *Memory) best(run tiers.Run) (best *memChunk, pages int) {
	for _, c := range m.byFirst[keyOf(run)] {
		if n := c.agree(run); n > pages {
			best, pages = c, n
		}
	}
	return best, pages
}

func (m *Memory) remove(c *memChunk) {
	left := m.byFirst[c.key]
	for i := range left {
		if left[i] == c {
			left = append(left[:i:i], left[i+1:]...)
			break
		}
	}
	if len(left) == 0 {
		delete(m.byFirst, c.key)
	} else {
		m.byFirst[c.key] = left
	}
	m.used.Remove(c.at)
	m.bytes -= int64(len(c.bytes))
	m.pages -= int64(c.pages)
}

// Contains implements tiers.Tier.
func (m *Memory) Contains(ctx context.Context, run tiers.Run, held []uint16) error {
	ctx, end, err := m.begin(ctx)
	if err != nil {
		return err
	}
	defer end()
	if len(held) != run.Chunks() {
		return fmt.Errorf("%w: %d chunks, room for the answers of %d", tiers.ErrInvalid,
			run.Chunks(), len(held))
	}
	if err := Wait(ctx, m.o.Latency); err != nil {
		return err
	}
	if err := m.ask(ctx, Contains, run); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range held {
		_, pages := m.best(run.Chunk(i))
		held[i] = uint16(pages)
	}
	return nil
}

// check returns an error for a transfer that no caller may send.
func check(t tiers.Transfer) error {
	g := t.Space.Geometry
	if n := t.Pages(); len(t.Hashes) != n*g.DigestBytes || n < 1 || n > g.PagesPerChunk ||
		t.First%g.PagesPerChunk != 0 || int64(len(t.Bytes)) != int64(n)*g.PageBytes {
		return fmt.Errorf("%w: transfer of %d bytes for %d pages from %d on", tiers.ErrInvalid,
			len(t.Bytes), n, t.First)
	}
	return nil
}

// transfer handles the transfers of a call in order.
func (m *Memory) transfer(ctx context.Context, op Op, transfers []tiers.Transfer,
	done func(int, error), one func(tiers.Transfer) error) {
	both, end, err := m.begin(ctx)
	if err == nil {
		defer end()
		err = Wait(both, m.o.Latency)
	}
	for i, t := range transfers {
		done(i, func() error {
			if err != nil {
				return err
			}
			if err := check(t); err != nil {
				return err
			}
			if m.o.BytesPerSec > 0 {
				if err := Wait(both, time.Duration(float64(len(t.Bytes))/float64(
					m.o.BytesPerSec)*float64(time.Second))); err != nil {
					return err
				}
			}
			if err := m.ask(both, op, t.Run); err != nil {
				if errors.Is(err, tiers.ErrCorrupt) {
					m.drop(t.Run)
				}
				return err
			}
			return one(t)
		}())
	}
}

// drop drops a chunk that a load found bad.
func (m *Memory) drop(run tiers.Run) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if c, _ := m.best(run); c != nil {
		m.remove(c)
		m.corrupt++
	}
}

// Load implements tiers.Tier.
func (m *Memory) Load(ctx context.Context, transfers []tiers.Transfer,
	done func(i int, err error)) {
	m.transfer(ctx, Load, transfers, done, func(t tiers.Transfer) error {
		m.mu.Lock()
		defer m.mu.Unlock()
		c, pages := m.best(t.Run)
		if pages < t.Pages() {
			return tiers.ErrNotFound
		}
		page := t.Space.Geometry.PageBytes
		for i := range pages {
			if xxhash.Sum64(c.bytes[int64(i)*page:int64(i+1)*page]) != c.sums[i] {
				m.remove(c)
				m.corrupt++
				return fmt.Errorf("%w: page %d", tiers.ErrCorrupt, t.First+i)
			}
		}
		copy(t.Bytes, c.bytes)
		m.used.MoveToFront(c.at)
		return nil
	})
}

// Store implements tiers.Tier.
func (m *Memory) Store(ctx context.Context, transfers []tiers.Transfer,
	done func(i int, err error)) {
	m.transfer(ctx, Store, transfers, done, func(t tiers.Transfer) error {
		m.mu.Lock()
		defer m.mu.Unlock()
		held, pages := m.best(t.Run)
		if pages == t.Pages() {
			m.used.MoveToFront(held.at)
			return nil
		}
		if m.o.CapacityBytes > 0 && int64(len(t.Bytes)) > m.o.CapacityBytes {
			return tiers.ErrBusy
		}
		// Drop shorter versions of it.
		for _, c := range append([]*memChunk(nil), m.byFirst[keyOf(t.Run)]...) {
			if c.agree(t.Run) == c.pages {
				m.remove(c)
			}
		}
		for m.o.CapacityBytes > 0 && m.bytes+int64(len(t.Bytes)) > m.o.CapacityBytes {
			m.remove(m.used.Back().Value.(*memChunk))
			m.evictions++
		}
		c := &memChunk{key: keyOf(t.Run), hashes: bytes.Clone(t.Hashes), pages: t.Pages(),
			bytes: bytes.Clone(t.Bytes)}
		page := t.Space.Geometry.PageBytes
		for i := range c.pages {
			c.sums = append(c.sums, xxhash.Sum64(c.bytes[int64(i)*page:int64(i+1)*page]))
		}
		c.at = m.used.PushFront(c)
		m.byFirst[c.key] = append(m.byFirst[c.key], c)
		m.bytes += int64(len(c.bytes))
		m.pages += int64(c.pages)
		return nil
	})
}

// Drop implements tiers.Tier.
func (m *Memory) Drop(ctx context.Context, run tiers.Run) error {
	ctx, end, err := m.begin(ctx)
	if err != nil {
		return err
	}
	defer end()
	if err := Wait(ctx, m.o.Latency); err != nil {
		return err
	}
	if err := m.ask(ctx, Drop, run); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range run.Chunks() {
		r := run.Chunk(i)
		for _, c := range append([]*memChunk(nil), m.byFirst[keyOf(r)]...) {
			if c.agree(r) == min(c.pages, r.Pages()) {
				m.remove(c)
			}
		}
	}
	return nil
}

// Clear implements tiers.Tier.
func (m *Memory) Clear(ctx context.Context, fp tiers.Fingerprint) (int, error) {
	ctx, end, err := m.begin(ctx)
	if err != nil {
		return 0, err
	}
	defer end()
	if err := Wait(ctx, m.o.Latency); err != nil {
		return 0, err
	}
	if err := m.ask(ctx, Clear, tiers.Run{}); err != nil {
		return 0, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.each(func(c *memChunk) bool {
		if fp != (tiers.Fingerprint{}) && c.key.fp != fp {
			return false
		}
		m.remove(c)
		return true
	}), nil
}

// Stats implements tiers.Tier.
func (m *Memory) Stats() tiers.TierStats {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := tiers.TierStats{Kind: m.o.Kind, Local: m.o.Local, CapacityBytes: m.o.CapacityBytes,
		UsedBytes: m.bytes, Chunks: int64(m.used.Len()),
		Pages: m.pages, Evictions: m.evictions, Corrupt: m.corrupt}
	if s.CapacityBytes == 0 {
		s.CapacityBytes = -1
	}
	return s
}

// Close implements tiers.Tier. Waits in calls under way return ErrClosed.
func (m *Memory) Close() error {
	m.mu.Lock()
	m.closing = true
	m.mu.Unlock()
	m.close(tiers.ErrClosed)
	m.calls.Wait()
	return nil
}
