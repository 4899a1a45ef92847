package simulate

import (
	"errors"
	"fmt"
	"io"
	"math"

	"lookaside/internal/recording"
)

// Recorded is what a recording tells beside its requests.
type Recorded struct {
	Lookups    int     `json:"lookups"`
	Stores     int     `json:"stores"`
	Seconds    float64 `json:"seconds"`     // from its first request to its last
	HeldPages  int     `json:"held_pages"`  // that the lookups found then, in the arena or in tiers
	TierPages  int     `json:"tier_pages"`  // those of them that came from a tier or a peer
	ArenaBytes int64   `json:"arena_bytes"` // arena.limit then
	PageBytes  int64   `json:"page_bytes"`
	PageTokens int     `json:"page_tokens"`
	ChunkPages int     `json:"pages_per_chunk"`
	// OtherPages were looked up in spaces of other geometries, and are left out.
	OtherPages int    `json:"other_pages,omitempty"`
	Dropped    uint64 `json:"dropped_requests,omitempty"` // not recorded, for want of time
	Cut        bool   `json:"cut,omitempty"`              // its end is missing
}

// Recorded describes the recording that the trace was read from; nil if it was another form.
func (t *Trace) Recorded() *Recorded {
	if t.recorded.PageBytes == 0 {
		return nil
	}
	return &t.recorded
}

// ChunkBytes returns the size of a chunk, 0 if the trace does not have it.
func (t *Trace) ChunkBytes() int64 { return t.PageBytes * int64(t.PagesPerChunk) }

// recorder makes the trace of all spaces of one geometry.
type recorder struct {
	t       Trace
	numbers map[uint64]uint32 // of pages
}

// ReadRecording reads a recording, whose files are given in their order. If it has spaces of
// several geometries, it takes the one that was asked for most pages. A recording whose end is
// missing is read as far as it goes.
func ReadRecording(name string, files ...io.Reader) (*Trace, error) {
	r := reading{name: name, alike: map[recording.Space]*recorder{}}
	for _, in := range files {
		if err := r.file(in); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	return r.trace()
}

// reading is a recording that is being read.
type reading struct {
	name    string
	of      []*recorder // by the number of the space in the file that is read
	alike   map[recording.Space]*recorder
	order   []*recorder // of alike, as they came
	all     Recorded
	blocks  int
	elapsed int64
}

// file reads one file.
func (x *reading) file(in io.Reader) error {
	f, err := recording.Open(in)
	if err != nil {
		return err
	}
	defer f.Close()
	x.of = nil
	var rec recording.Record
	for {
		err := f.Next(&rec)
		if errors.Is(err, recording.ErrCut) {
			x.all.Cut = true
			return nil
		} else if err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		switch rec.Kind {
		case recording.KindPart:
		case recording.KindSpace:
			r := x.alike[rec.Space]
			if r == nil {
				r = newRecorder(x.name, rec.Space)
				x.alike[rec.Space] = r
				x.order = append(x.order, r)
			}
			x.of = append(x.of, r)
		case recording.KindDropped:
			x.all.Dropped += rec.Dropped
		default:
			if x.blocks += len(rec.Pages); x.blocks > MaxBlocks {
				return fmt.Errorf("more than %d pages: record for a shorter time, or read fewer files",
					MaxBlocks)
			}
			if x.all.Lookups+x.all.Stores > 0 {
				x.elapsed += rec.AfterMs
			}
			if rec.Kind == recording.KindLookup {
				x.all.Lookups++
			} else {
				x.all.Stores++
			}
			x.of[rec.Number].add(&rec)
		}
	}
}

// trace returns what was read, of the geometry that was asked for most pages.
func (x *reading) trace() (*Trace, error) {
	var most *recorder
	asked := 0
	for _, r := range x.order {
		if most == nil || r.t.asked > most.t.asked {
			most = r
		}
		asked += r.t.asked
	}
	if asked == 0 {
		return nil, fmt.Errorf("%s: no request with a page: nobody looked anything up while it was recorded", x.name)
	}
	t := &most.t
	t.recorded.Lookups, t.recorded.Stores = x.all.Lookups, x.all.Stores
	t.recorded.Dropped, t.recorded.Cut = x.all.Dropped, x.all.Cut
	t.recorded.Seconds, t.recorded.OtherPages = float64(x.elapsed)/1000, asked-t.asked
	return t, nil
}

func newRecorder(name string, s recording.Space) *recorder {
	return &recorder{numbers: map[uint64]uint32{}, t: Trace{Name: name,
		PagesPerChunk: s.PagesPerChunk, PageBytes: s.PageBytes, PageTokens: s.PageTokens,
		recorded: Recorded{ArenaBytes: s.ArenaBytes, PageBytes: s.PageBytes,
			PageTokens: s.PageTokens, ChunkPages: s.PagesPerChunk}}}
}

// add appends a lookup or a store.
func (r *recorder) add(rec *recording.Record) {
	t := &r.t
	prev := int32(-1)
	if n, ok := r.numbers[rec.Prev]; rec.First > 0 && ok {
		prev = int32(n)
	}
	up := prev
	for _, name := range rec.Pages {
		n, ok := r.numbers[name]
		if !ok {
			n = uint32(len(t.parent))
			r.numbers[name] = n
			t.parent = append(t.parent, up)
		}
		t.blocks = append(t.blocks, n)
		up = int32(n)
	}
	q := request{end: len(t.blocks), first: uint32(rec.First), prev: prev,
		insert: uint32(len(rec.Pages)), stored: rec.Kind == recording.KindStore}
	if !q.stored {
		// What was found is there; what was not may never have been stored.
		q.insert = uint32(rec.Held)
		t.asked += len(rec.Pages)
		t.recorded.HeldPages += rec.Held
		t.recorded.TierPages += rec.TierHeld
	}
	t.requests = append(t.requests, q)
}

// slotsIn returns how many chunks of a trace there are in bytes of memory, at least 1.
func (t *Trace) slotsIn(bytes int64) int {
	return int(min(max(bytes/max(t.ChunkBytes(), 1), 1), math.MaxInt32))
}

// Slots returns how many chunks there is room for in each of sizes, in bytes.
func (t *Trace) Slots(sizes []int64) []int {
	var out []int
	for _, b := range sizes {
		if b == 0 {
			out = append(out, 0)
			continue
		}
		out = append(out, t.slotsIn(b))
	}
	return out
}
