package simulate

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
)

// MaxLine bounds a line of a trace, in bytes: a request of a million blocks.
const MaxLine = 16 << 20

// MaxBlocks bounds the blocks of all requests of a trace. They are kept in memory at 4 bytes each,
// and each distinct one takes some 60 more.
const MaxBlocks = 1 << 28

// Trace is a sequence of requests, each a path in the tree of prefixes. Blocks are numbered from 0
// in the order of their first appearance, so a block's prefix has a smaller number than the block.
// In a recording they are pages, and a request may also be of pages that are stored.
type Trace struct {
	Name          string
	PagesPerChunk int   // 1 unless it is a recording
	PageBytes     int64 // of a recording, else 0
	PageTokens    int   // likewise

	// What was recorded, and what the sidecar counted meanwhile: see Recorded.
	recorded Recorded

	parent   []int32  // by block: the block that it continues, -1 for none or not known
	blocks   []uint32 // of all requests end to end
	requests []request
	asked    int // blocks looked up
}

// request is a run of blocks from a page on.
type request struct {
	end    int    // where its blocks end; they begin where those of the one before end
	first  uint32 // the number of the first page in its prefix
	prev   int32  // the block before the first, -1 for none or not known
	insert uint32 // so many are stored if they are not held
	stored bool   // they are stored, not looked up
}

// Requests returns the number of requests.
func (t *Trace) Requests() int { return len(t.requests) }

// Blocks returns the number of blocks that were looked up, and the number of distinct ones.
func (t *Trace) Blocks() (asked, distinct int) { return t.asked, len(t.parent) }

// Ceiling returns the hit ratio of a cache that never evicts.
func (t *Trace) Ceiling() float64 {
	if t.asked == 0 {
		return 0
	}
	held := make([]bool, len(t.parent))
	hits := 0
	for i := range t.requests {
		r, blocks := &t.requests[i], t.request(i)
		if !r.stored {
			n := 0
			for n < len(blocks) && held[blocks[n]] {
				n++
			}
			hits += n
		}
		for _, b := range blocks[:r.insert] {
			held[b] = true
		}
	}
	return float64(hits) / float64(t.asked)
}

// request returns the blocks of a request.
func (t *Trace) request(i int) []uint32 {
	from := 0
	if i > 0 {
		from = t.requests[i-1].end
	}
	return t.blocks[from:t.requests[i].end]
}

// key returns the key of a block. It is never 0.
func key(block uint32) uint64 { return (uint64(block) + 1) * 0x9E3779B97F4A7C15 }

// walk makes w what a request asks of a cache.
func (t *Trace) walk(i int, w *Walk) {
	r := &t.requests[i]
	*w = Walk{First: int(r.first), Keys: w.Keys[:0], Insert: int(r.insert)}
	if r.prev >= 0 {
		w.Prev = key(uint32(r.prev))
	}
	for _, b := range t.request(i) {
		w.Keys = append(w.Keys, key(b))
	}
	if r.stored {
		w.From = len(w.Keys)
	}
}

// A Builder makes a Trace request by request.
type Builder struct {
	t    Trace
	tree map[edge]uint32
}

type edge struct {
	parent int32
	id     uint64
}

// NewBuilder begins a trace.
func NewBuilder(name string) *Builder {
	return &Builder{t: Trace{Name: name, PagesPerChunk: 1}, tree: map[edge]uint32{}}
}

// Add appends a request for the blocks with the given ids, first to last. A block is identified by
// its id and all ids before it, so ids need not be cumulative.
func (b *Builder) Add(ids []uint64) error {
	if len(b.t.blocks)+len(ids) > MaxBlocks {
		return fmt.Errorf("more than %d blocks", MaxBlocks)
	}
	parent := int32(-1)
	for _, id := range ids {
		e := edge{parent, id}
		n, ok := b.tree[e]
		if !ok {
			n = uint32(len(b.t.parent))
			b.tree[e] = n
			b.t.parent = append(b.t.parent, parent)
		}
		b.t.blocks = append(b.t.blocks, n)
		parent = int32(n)
	}
	b.t.asked += len(ids)
	b.t.requests = append(b.t.requests, request{end: len(b.t.blocks), prev: -1,
		insert: uint32(len(ids))})
	return nil
}

// Trace returns the trace. The builder must not be used any more.
func (b *Builder) Trace() *Trace { return &b.t }

// Read reads a trace of JSON objects, one a line, each with hash_ids, a list of whole numbers from
// 0: the form that Mooncake publishes. Other fields are ignored, and so are empty lines. Errors
// name the line.
func Read(name string, r io.Reader) (*Trace, error) {
	b := NewBuilder(name)
	in := bufio.NewScanner(r)
	in.Buffer(make([]byte, 0, 64<<10), MaxLine)
	line := 0
	for in.Scan() {
		line++
		text := bytes.TrimSpace(in.Bytes())
		if len(text) == 0 {
			continue
		}
		var request struct {
			HashIDs *[]uint64 `json:"hash_ids"`
		}
		if err := json.Unmarshal(text, &request); err != nil {
			return nil, fmt.Errorf("%s: line %d: %s", name, line, plain(err))
		}
		if request.HashIDs == nil {
			return nil, fmt.Errorf("%s: line %d: no hash_ids", name, line)
		}
		if err := b.Add(*request.HashIDs); err != nil {
			return nil, fmt.Errorf("%s: line %d: %w", name, line, err)
		}
	}
	if err := in.Err(); errors.Is(err, bufio.ErrTooLong) {
		return nil, fmt.Errorf("%s: line %d: longer than %d bytes", name, line+1, MaxLine)
	} else if err != nil {
		return nil, fmt.Errorf("%s: line %d: %w", name, line+1, err)
	}
	if len(b.t.blocks) == 0 {
		return nil, fmt.Errorf("%s: no request with a block", name)
	}
	if len(b.t.parent) > math.MaxInt32 {
		return nil, fmt.Errorf("%s: too many blocks", name)
	}
	return b.Trace(), nil
}

// plain describes what is wrong with a line in terms of a trace, not of Go's types.
func plain(err error) string {
	var wrong *json.UnmarshalTypeError
	if errors.As(err, &wrong) {
		if wrong.Field == "" {
			return fmt.Sprintf("not an object but %s", wrong.Value)
		}
		return fmt.Sprintf("%s: %s where a list of whole numbers from 0 belongs", wrong.Field,
			wrong.Value)
	}
	return err.Error()
}
