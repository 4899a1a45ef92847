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
type Trace struct {
	Name   string
	parent []int32  // by block: the block that it continues, -1 for none
	blocks []uint32 // of all requests end to end
	ends   []int    // by request: where its blocks end
}

// Requests returns the number of requests.
func (t *Trace) Requests() int { return len(t.ends) }

// Blocks returns the number of blocks of all requests, and the number of distinct ones.
func (t *Trace) Blocks() (all, distinct int) { return len(t.blocks), len(t.parent) }

// Ceiling returns the hit ratio of a cache that never evicts.
func (t *Trace) Ceiling() float64 {
	if len(t.blocks) == 0 {
		return 0
	}
	return float64(len(t.blocks)-len(t.parent)) / float64(len(t.blocks))
}

// request returns the blocks of a request.
func (t *Trace) request(i int) []uint32 {
	from := 0
	if i > 0 {
		from = t.ends[i-1]
	}
	return t.blocks[from:t.ends[i]]
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
	return &Builder{t: Trace{Name: name}, tree: map[edge]uint32{}}
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
	b.t.ends = append(b.t.ends, len(b.t.blocks))
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
