// Package recording is the form in which the requests of a sidecar are recorded: which prefixes
// were looked up and stored, and when. docs/traces.md describes it. The form has no tokens, no text
// and none of vLLM's hashes: a page's name in a recording comes from its hash by a key that was
// made for the recording and is not in it. So recordings tell which requests have a beginning in
// common, and nothing of what it is; two recordings cannot be compared.
//
// A recording is a stream of records. The sidecar makes them (Append…), `lookaside record`
// compresses the stream into a file (Create), and a Reader reads either. What a Reader is given is
// not trusted.
package recording

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// Version is the version of the form that this package writes, and the only one that it reads.
const Version = 1

// magic begins a stream, before the version.
const magic = "LKRECORD"

const (
	// MaxPages bounds the pages of a record.
	MaxPages = 1 << 20
	// MaxSpaces bounds the spaces of a recording.
	MaxSpaces = 1 << 12
	// MaxParts bounds the files of a recording.
	MaxParts = 1 << 30
	// maxNumber bounds all other numbers, so that no sum of them wraps.
	maxNumber = 1 << 48
)

// Kind is the kind of a record.
type Kind uint8

// The kinds. Others are an error.
const (
	KindSpace   Kind = 1 // pages of a kind, for records after it
	KindLookup  Kind = 2 // a request's pages were looked up
	KindStore   Kind = 3 // pages were stored
	KindDropped Kind = 4 // here requests are missing, because the sidecar had no time for them
	KindEnd     Kind = 5 // the last record
	KindPart    Kind = 6 // the first record of a file that is one of several of a recording
)

// Space describes pages of a kind, and the memory that there was for them.
type Space struct {
	PageBytes     int64
	PageTokens    int
	PagesPerChunk int
	ArenaBytes    int64 // arena.limit
}

// Record is one record. Which fields matter depends on its kind.
type Record struct {
	Kind Kind

	Space   Space  // of KindSpace; its number is how many came before it
	Number  int    // of lookups and stores: the number of their space
	AfterMs int64  // likewise: since the record of a lookup or a store before
	First   int    // likewise: the number of the first page in its prefix
	Prev    uint64 // likewise: the page before First; 0 if there is none or it is not known
	// Pages are the names of the pages. In a record from a Reader they are valid until the next
	// one.
	Pages []uint64
	Held  int // of lookups: how many pages were found, in the arena or in tiers
	// TierHeld are those of Held that came from a tier or a peer.
	TierHeld int

	Dropped uint64 // of KindDropped: requests

	Part Part // of KindPart
}

// Part says which file of a recording one is. Each file can be read alone; the spaces so far are in
// it.
type Part struct {
	ID     uint64 // of the recording: a random number
	Number int    // from 1 on
}

// AppendStart appends what a stream begins with.
func AppendStart(b []byte) []byte { return append(append(b, magic...), Version) }

// Append appends a record.
func Append(b []byte, r *Record) []byte {
	b = append(b, byte(r.Kind))
	number := func(n int64) { b = binary.AppendUvarint(b, uint64(max(n, 0))) }
	switch r.Kind {
	case KindSpace:
		number(r.Space.PageBytes)
		number(int64(r.Space.PageTokens))
		number(int64(r.Space.PagesPerChunk))
		number(r.Space.ArenaBytes)
	case KindLookup, KindStore:
		number(int64(r.Number))
		number(r.AfterMs)
		number(int64(r.First))
		number(int64(len(r.Pages)))
		if r.Kind == KindLookup {
			number(int64(r.Held))
			number(int64(r.TierHeld))
		}
		if r.First > 0 {
			b = binary.LittleEndian.AppendUint64(b, r.Prev)
		}
		for _, p := range r.Pages {
			b = binary.LittleEndian.AppendUint64(b, p)
		}
	case KindDropped:
		number(int64(r.Dropped))
	case KindPart:
		b = binary.LittleEndian.AppendUint64(b, r.Part.ID)
		number(int64(r.Part.Number))
	}
	return b
}

// ErrCut is returned by Next where a stream ends without its last record: the recording was killed,
// or is still being written. What came before is good.
var ErrCut = errors.New("the recording ends in the middle: its writer was killed, or still writes")

// ErrDamaged is returned by Next, wrapped, for what no writer writes.
var ErrDamaged = errors.New("the recording is damaged")

// Reader reads a stream.
type Reader struct {
	in     *bufio.Reader
	begun  bool
	err    error
	spaces []Space
	pages  []uint64
	buf    []byte
}

// NewReader returns a reader of a stream that is not compressed.
func NewReader(in io.Reader) *Reader { return &Reader{in: bufio.NewReaderSize(in, 64<<10)} }

// Spaces returns the spaces so far, by number.
func (r *Reader) Spaces() []Space { return r.spaces }

// Next reads the next record. At the end it returns io.EOF, or ErrCut if the last record is
// missing. After an error it returns the same error.
func (r *Reader) Next(rec *Record) error {
	if r.err == nil {
		r.err = r.next(rec)
		if errors.Is(r.err, io.ErrUnexpectedEOF) {
			r.err = ErrCut
		}
	}
	return r.err
}

func damaged(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrDamaged}, args...)...)
}

func (r *Reader) next(rec *Record) error {
	if !r.begun {
		var head [len(magic) + 1]byte
		if _, err := io.ReadFull(r.in, head[:]); err == io.EOF {
			return io.ErrUnexpectedEOF
		} else if err != nil {
			return err
		}
		if string(head[:len(magic)]) != magic {
			return damaged("it does not begin as a recording does")
		}
		if v := head[len(magic)]; v != Version {
			return fmt.Errorf("the recording is of version %d, and this lookaside reads version %d: use the release that made it", v, Version)
		}
		r.begun = true
	}
	kind, err := r.in.ReadByte()
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	} else if err != nil {
		return err
	}
	*rec = Record{Kind: Kind(kind)}
	switch rec.Kind {
	case KindSpace:
		return r.space(rec)
	case KindLookup, KindStore:
		return r.request(rec)
	case KindDropped:
		n, err := r.number("dropped", maxNumber)
		rec.Dropped = uint64(n)
		return err
	case KindPart:
		b, err := r.bytes(8)
		if err != nil {
			return err
		}
		rec.Part.ID = binary.LittleEndian.Uint64(b)
		n, err := r.number("part", MaxParts)
		rec.Part.Number = int(n)
		return err
	case KindEnd:
		return io.EOF
	}
	return damaged("a record of kind %d", kind)
}

// number reads a number from 0 to most.
func (r *Reader) number(name string, most int64) (int64, error) {
	n, err := binary.ReadUvarint(r.in)
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		if errors.Is(err, io.ErrUnexpectedEOF) {
			return 0, err
		}
		return 0, damaged("%s: %v", name, err)
	}
	if n > uint64(most) {
		return 0, damaged("%s is %d, more than %d", name, n, most)
	}
	return int64(n), nil
}

func (r *Reader) space(rec *Record) error {
	s := &rec.Space
	var tokens, chunk int64
	for _, f := range []struct {
		name string
		to   *int64
		most int64
	}{
		{"page_bytes", &s.PageBytes, maxNumber}, {"page_tokens", &tokens, 1 << 20},
		{"pages_per_chunk", &chunk, 1 << 15}, {"arena_bytes", &s.ArenaBytes, maxNumber},
	} {
		n, err := r.number(f.name, f.most)
		if err != nil {
			return err
		}
		if n == 0 {
			return damaged("%s is 0", f.name)
		}
		*f.to = n
	}
	s.PageTokens, s.PagesPerChunk = int(tokens), int(chunk)
	if len(r.spaces) == MaxSpaces {
		return damaged("more than %d spaces", MaxSpaces)
	}
	r.spaces = append(r.spaces, *s)
	return nil
}

func (r *Reader) request(rec *Record) error {
	var number, first, pages, held, tier int64
	for _, f := range []struct {
		name   string
		to     *int64
		most   int64
		lookup bool
	}{
		{"space", &number, int64(len(r.spaces)) - 1, false},
		{"after_ms", &rec.AfterMs, maxNumber, false},
		{"first_page", &first, 1 << 30, false}, {"pages", &pages, MaxPages, false},
		{"held", &held, MaxPages, true}, {"tier_held", &tier, MaxPages, true},
	} {
		if f.most < 0 {
			return damaged("a request before the first space")
		}
		if f.lookup && rec.Kind != KindLookup {
			continue
		}
		n, err := r.number(f.name, f.most)
		if err != nil {
			return err
		}
		*f.to = n
	}
	if held > pages || tier > held {
		return damaged("%d pages were found, %d of them in tiers, of %d", held, tier, pages)
	}
	rec.Number, rec.First, rec.Held, rec.TierHeld = int(number), int(first), int(held), int(tier)
	if first > 0 {
		b, err := r.bytes(8)
		if err != nil {
			return err
		}
		rec.Prev = binary.LittleEndian.Uint64(b)
	}
	// The room grows with what is there, not with what a number promises.
	r.pages = r.pages[:0]
	for left := int(pages); left > 0; {
		n := min(left, 4096)
		b, err := r.bytes(8 * n)
		if err != nil {
			return err
		}
		for i := range n {
			r.pages = append(r.pages, binary.LittleEndian.Uint64(b[8*i:]))
		}
		left -= n
	}
	rec.Pages = r.pages
	return nil
}

// bytes reads n bytes. They are valid until the next call.
func (r *Reader) bytes(n int) ([]byte, error) {
	if cap(r.buf) < n {
		r.buf = make([]byte, n)
	}
	_, err := io.ReadFull(r.in, r.buf[:n])
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return r.buf[:n], err
}
