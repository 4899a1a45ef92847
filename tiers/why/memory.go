package why

import (
	"math"
	"math/bits"
	"sync"
	"time"

	"lookaside/dax"
	"lookaside/tiers"
	"lookaside/tiers/tenant"
)

// By is what caused that pages are gone.
type By struct {
	Space  uint16    // Mark of the space whose store or load took the room; 0: not known
	Tenant tenant.ID // whose store or load that was
	Tier   uint8     // where the page was: 0 is the arena, i+1 the i-th tier below it
}

// Gone is what is remembered of a page that is gone.
type Gone struct {
	Reason Reason // NeverStored: nothing is remembered
	At     time.Time
	By
}

// Memory remembers the pages that went last: why, when and by what. It lies off the Go heap,
// allocates nothing, and takes memory as it is used. It is exact but for collisions of 64-bit keys,
// which explain a page wrongly and do nothing else.
//
// An entry takes 16 bytes. Entries with one home are a cache line, so that noting or finding a page
// costs one cache miss. A new entry takes the place of the oldest of its line.
//
// A nil Memory remembers nothing. Any goroutine may call the methods.
type Memory struct {
	now   func() time.Time
	table *dax.Table[line]
	pages int

	mu      sync.Mutex
	lines   []line // nil after Close; guarded by mu
	touched uint64 // keeps a loop that only reads; guarded by mu
}

// ways is how many entries are in a line.
const ways = 4

// line is a cache line of entries, newest first.
type line [ways]entry

// entry is one page. The data has, from the top: seconds since 1970, the mark of a space, a tenant,
// a tier and the reason.
type entry struct{ key, data uint64 }

// NewMemory returns a memory of about so many pages; nil with 0.
func NewMemory(pages int) (*Memory, error) {
	if pages <= 0 {
		return nil, nil
	}
	n := 1 << bits.Len(uint(max(pages/ways-1, 0)))
	t, err := dax.NewTable[line](n)
	if err != nil {
		return nil, err
	}
	return &Memory{now: time.Now, table: t, pages: n * ways, lines: t.Slice()}, nil
}

// Close gives the memory back. After it nothing is remembered.
func (m *Memory) Close() error {
	if m == nil {
		return nil
	}
	m.mu.Lock()
	m.lines = nil
	m.mu.Unlock()
	return m.table.Close()
}

// Salt returns what the keys of a space's pages begin with.
func Salt(fp tiers.Fingerprint) (salt uint64) {
	for i := range 4 {
		w := uint64(0)
		for _, b := range fp[8*i : 8*i+8] {
			w = w<<8 | uint64(b)
		}
		salt = mix(salt, w)
	}
	return salt
}

// Mark returns the number by which By names a space. It is never 0.
func Mark(fp tiers.Fingerprint) uint16 { return max(uint16(fp[0])<<8|uint16(fp[1]), 1) }

// Key returns a page's key by the salt of its space and the words of its digest, little endian.
func Key(salt uint64, words []uint64) uint64 {
	for _, w := range words {
		salt = mix(salt, w)
	}
	return max(salt, 1)
}

func mix(h, w uint64) uint64 {
	hi, lo := bits.Mul64(h^w, 0x9E3779B97F4A7C15)
	return hi ^ lo
}

// Note remembers that pages are gone now.
func (m *Memory) Note(keys []uint64, r Reason, by By) {
	if m == nil || len(keys) == 0 {
		return
	}
	at := min(max(m.now().Unix(), 0), math.MaxUint32)
	data := uint64(at)<<32 | uint64(by.Space)<<16 | uint64(by.Tenant)<<8 |
		uint64(by.Tier&15)<<4 | uint64(r)
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.lines == nil {
		return
	}
	mask := uint64(len(m.lines) - 1)
	seen := uint64(0)
	for _, k := range keys { // the cache misses of a loop that only reads overlap
		seen |= m.lines[k&mask][0].key
	}
	m.touched = seen
	for _, k := range keys {
		l := &m.lines[k&mask]
		i := 0
		for i < ways-1 && l[i].key != k && l[i].key != 0 {
			i++
		}
		copy(l[1:i+1], l[:i])
		l[0] = entry{k, data}
	}
}

// Find returns what is remembered of a page.
func (m *Memory) Find(key uint64) Gone {
	if m == nil {
		return Gone{Reason: NeverStored}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.lines == nil {
		return Gone{Reason: NeverStored}
	}
	for _, e := range m.lines[key&uint64(len(m.lines)-1)] {
		if e.key == key {
			return Gone{Reason: Reason(e.data & 15), At: time.Unix(int64(e.data>>32), 0),
				By: By{Space: uint16(e.data >> 16), Tenant: tenant.ID(e.data >> 8),
					Tier: uint8(e.data>>4) & 15}}
		}
	}
	return Gone{Reason: NeverStored}
}

// Pages returns how many pages can be remembered.
func (m *Memory) Pages() int {
	if m == nil {
		return 0
	}
	return m.pages
}
