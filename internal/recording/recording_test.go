package recording

import (
	"bytes"
	"errors"
	"io"
	"reflect"
	"slices"
	"strings"
	"testing"

	"lookaside/internal/leak"
)

func TestMain(m *testing.M) { leak.Main(m) }

// sample is a stream of each kind of record, and the records.
func sample() ([]byte, []Record) {
	want := []Record{
		{Kind: KindSpace, Space: Space{PageBytes: 2 << 20, PageTokens: 16, PagesPerChunk: 16,
			ArenaBytes: 64 << 30}},
		{Kind: KindLookup, AfterMs: 12, Pages: []uint64{1, 2, 1 << 63}, Held: 2, TierHeld: 1},
		{Kind: KindSpace, Space: Space{PageBytes: 1, PageTokens: 1, PagesPerChunk: 1,
			ArenaBytes: 1}},
		{Kind: KindStore, Number: 1, AfterMs: 0, First: 7, Prev: 9, Pages: []uint64{5}},
		{Kind: KindLookup, Number: 0, First: 300},
		{Kind: KindDropped, Dropped: 1000},
		{Kind: KindPart, Part: Part{ID: 1 << 63, Number: 7}},
		{Kind: KindLookup, Pages: many(10000), Held: 10000},
	}
	b := AppendStart(nil)
	for i := range want {
		b = Append(b, &want[i])
	}
	return Append(b, &Record{Kind: KindEnd}), want
}

func many(n int) []uint64 {
	out := make([]uint64, n)
	for i := range out {
		out[i] = uint64(i) * 0x9E3779B97F4A7C15
	}
	return out
}

func read(t testing.TB, in io.Reader) (got []Record, err error) {
	f, err := Open(in)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for {
		var r Record
		if err := f.Next(&r); err != nil {
			if again := f.Next(&r); again == nil {
				t.Errorf("after %v there is more", err)
			}
			return got, err
		}
		if r.Pages != nil {
			r.Pages = append([]uint64(nil), r.Pages...)
		}
		got = append(got, r)
	}
}

func TestRead(t *testing.T) {
	t.Parallel()
	stream, want := sample()
	var file bytes.Buffer
	c, err := Compress(&file)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(stream); i += 1000 {
		if _, err := c.Write(stream[i:min(i+1000, len(stream))]); err != nil {
			t.Fatal(err)
		}
		if err := c.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Close(); err != nil || c.Size() != int64(file.Len()) {
		t.Fatal(err, c.Size(), file.Len())
	}
	for name, b := range map[string][]byte{"plain": stream, "compressed": file.Bytes()} {
		got, err := read(t, bytes.NewReader(b))
		if err != io.EOF || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %d records, %v", name, len(got), err)
		}
		if !IsRecording(b[:8]) {
			t.Errorf("%s: is no recording", name)
		}
		// Wherever it is cut, what is before the cut is read, and the cut is noticed.
		for n := 0; n < len(b); n += 1 + len(b)/500 {
			got, err := read(t, bytes.NewReader(b[:n]))
			if !errors.Is(err, ErrCut) && !(name == "compressed" && errors.Is(err, ErrDamaged)) ||
				len(got) > 0 && !reflect.DeepEqual(got, want[:len(got)]) {
				t.Fatalf("%s cut at %d: %d records, %v", name, n, len(got), err)
			}
		}
	}
}

func TestReadRefuses(t *testing.T) {
	t.Parallel()
	clip := slices.Clip[[]byte]
	start := clip(AppendStart(nil)) // what is appended goes elsewhere
	space := clip(Append(start, &Record{Kind: KindSpace, Space: Space{
		PageBytes: 1, PageTokens: 1, PagesPerChunk: 1, ArenaBytes: 1}}))
	for want, b := range map[string][]byte{
		"does not begin as a recording":       []byte("something else"),
		"is of version 2, and this lookaside": append([]byte(magic), 2),
		"a record of kind 9":                  append(start, 9),
		"a request before the first space":    append(start, 2, 0),
		"page_bytes is 0":                     append(start, 1, 0),
		"space is 1, more than 0":             append(space, 2, 1),
		"2 pages were found, 0 of them in tiers": append(space, 2, 0, 0, 0, 1, 2,
			0),
		"1 pages were found, 2 of them in tiers": append(space, 2, 0, 0, 0, 1, 1,
			2),
		"pages is 2097152, more than 1048576": append(space, 3, 0, 0, 0,
			0x80, 0x80, 0x80, 1),
		"after_ms: binary: varint overflows": append(append(space, 3, 0),
			bytes.Repeat([]byte{0xff}, 12)...),
	} {
		if _, err := read(t, bytes.NewReader(b)); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

// FuzzRead: whatever a file holds, reading it ends, within bounds, and what was read is written
// as it was.
func FuzzRead(f *testing.F) {
	stream, _ := sample()
	f.Add(stream[:200])
	f.Add(AppendStart(nil))
	var file bytes.Buffer
	c, err := Compress(&file)
	if err != nil {
		f.Fatal(err)
	}
	_, _ = c.Write(stream[:300])
	_ = c.Close()
	f.Add(file.Bytes())
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > 1<<16 {
			return
		}
		file, err := Open(bytes.NewReader(b))
		if err != nil {
			return
		}
		defer file.Close()
		out := AppendStart(nil)
		var r Record
		for n := 0; n < 1<<12 && len(out) < 1<<22; n++ {
			if err = file.Next(&r); err != nil {
				break
			}
			if r.Number >= max(len(file.Spaces()), 1) || r.Held > len(r.Pages) || r.First < 0 {
				t.Fatalf("%+v", r)
			}
			out = Append(out, &r)
		}
		if err == io.EOF {
			again, err := read(t, bytes.NewReader(Append(out, &Record{Kind: KindEnd})))
			if err != io.EOF || len(again) == 0 && len(out) > len(magic)+1 {
				t.Fatal(len(again), err)
			}
		}
	})
}
