package remote

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/zeebo/xxh3"

	"lookaside/tiers"
	"lookaside/tiers/serde"
	"lookaside/tiers/tiertest"
)

func testHeader(run tiers.Run, partBytes int64) []byte {
	lengths, sums := make([]int64, run.Pages()), make([]uint64, run.Pages())
	for i := range lengths {
		lengths[i], sums[i] = run.Space.Geometry.PageBytes-int64(i), uint64(i)*0x9e3779b97f4a7c15
	}
	return appendHeader([]byte("xyz"), run, "a codec of 15 b", partBytes, lengths, sums)[3:]
}

func TestHeader(t *testing.T) {
	for _, g := range tiertest.Geometries() {
		space := tiertest.NewSpace("form", g)
		n := g.PagesPerChunk
		p := make(tiertest.Prefix, 2*n)
		run := p.Run(space, n, 2*n)
		b := testHeader(run, minSplit)
		if len(b) != headerBytes(n, g.DigestBytes) {
			t.Fatalf("%d bytes, want %d", len(b), headerBytes(n, g.DigestBytes))
		}
		h, err := parseHeader(b)
		if err != nil {
			t.Fatal(err)
		}
		if h.codec != "a codec of 15 b" || h.partBytes != minSplit || h.agree(run) != n ||
			nameOf(run, n).verify(h) != nil {
			t.Errorf("%+v", h)
		}
		want := int64(0)
		for i := range n {
			if h.bytes(i) != want || h.sum(i) != uint64(i)*0x9e3779b97f4a7c15 {
				t.Errorf("page %d: %+v", i, h)
			}
			want += h.length(i)
		}
		// Another space, another chunk, other pages.
		other := tiertest.NewSpace("other", g)
		for _, o := range []name{nameOf(p.Run(other, n, 2*n), n), nameOf(p.Run(space, 0, n), n)} {
			if err := o.verify(h); !errors.Is(err, tiers.ErrCorrupt) {
				t.Errorf("%v for another chunk", err)
			}
		}
		p[2*n-1] = 1
		if got := h.agree(p.Run(space, n, 2*n)); got != n-1 {
			t.Errorf("agree says %d, want %d", got, n-1)
		}
		// Any change of any byte, and any other length, is refused.
		for i := range b {
			b[i] ^= 1 << (i % 8)
			if _, err := parseHeader(b); !errors.Is(err, tiers.ErrCorrupt) {
				t.Fatalf("%v with byte %d changed", err, i)
			}
			b[i] ^= 1 << (i % 8)
			if _, err := parseHeader(b[:i]); !errors.Is(err, tiers.ErrCorrupt) {
				t.Fatalf("%v with %d bytes", err, i)
			}
		}
		if _, err := parseHeader(append(b, 0)); !errors.Is(err, tiers.ErrCorrupt) {
			t.Errorf("%v with a byte more", err)
		}
	}
}

func TestNames(t *testing.T) {
	g := tiertest.Geometries()[2]
	space := tiertest.NewSpace("names", g)
	run := make(tiertest.Prefix, 16).Run(space, 0, 16)
	for pages := 1; pages <= 16; pages++ {
		n := nameOf(run, pages)
		text := string(n.append(nil))
		got, ok := parseName(run, text)
		if !ok || got != n {
			t.Errorf("%s: %+v %v", text, got, ok)
		}
		if agree, sure := n.agrees(run); agree != pages || !sure {
			t.Errorf("%s agrees for %d pages, %v", text, agree, sure)
		}
		for _, bad := range []string{"", text + "0", text + "/0", "0" + text, text[:len(text)-1],
			text[1:], text[:66] + "+" + text[66:], text[:66] + "0" + text[66:], "A" + text[1:]} {
			if bad == text || pages == 1 && bad == text+"0" { // 10 pages
				continue
			}
			if n, ok := parseName(run, bad); ok && string(n.append(nil)) != bad {
				t.Errorf("%q passes for %+v", bad, n)
			}
		}
	}
}

// FuzzHeader: no bytes make the decoder panic or take memory, and what it accepts is what it would
// write.
func FuzzHeader(f *testing.F) {
	for _, g := range tiertest.Geometries() {
		run := make(tiertest.Prefix, g.PagesPerChunk).Run(tiertest.NewSpace("fuzz", g), 0,
			g.PagesPerChunk)
		f.Add(testHeader(run, 0), false)
		f.Add(testHeader(run, 1<<20), true)
	}
	f.Fuzz(func(t *testing.T, b []byte, seal bool) {
		if n := len(b) - sumBytes; seal && n >= 0 {
			binary.LittleEndian.PutUint64(b[n:], xxh3.Hash(b[:n]))
		}
		h, err := parseHeader(b)
		if err != nil {
			if !errors.Is(err, tiers.ErrCorrupt) {
				t.Fatal(err)
			}
			return
		}
		space := &tiers.Space{Geometry: tiers.Geometry{PageBytes: h.pageBytes,
			PagesPerChunk: h.pagesPerChunk, DigestBytes: h.digestBytes}}
		copy(space.Fingerprint[:], h.fingerprint)
		run := tiers.Run{Space: space}
		var lengths []int64
		var sums []uint64
		for i := range h.pages {
			run.Hashes = append(run.Hashes, h.digest(i)...)
			lengths, sums = append(lengths, h.length(i)), append(sums, h.sum(i))
			if lengths[i] > serde.Bound(h.pageBytes) {
				t.Fatalf("a page of %d bytes takes %d", h.pageBytes, lengths[i])
			}
		}
		if h.bytes(h.pages) < 1 || h.agree(run) != h.pages ||
			nameOf(run, h.pages).verify(h) != nil {
			t.Fatalf("%+v", h)
		}
		again := appendHeader(nil, run, h.codec, h.partBytes, lengths, sums)
		copy(b[52:56], again[52:56]) // reserved
		if !bytes.Equal(again[:len(again)-sumBytes], b[:len(b)-sumBytes]) {
			t.Fatalf("%x\nis written as\n%x", b, again)
		}
	})
}

func TestSumsDependOnThePage(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 1))
	page, a, b := make([]byte, 1000), make([]byte, 8), make([]byte, 8)
	for i := range page {
		page[i] = byte(rnd.Uint32())
	}
	copy(a, page)
	if sumOf(page, a) == sumOf(page, b) {
		t.Error("the sum of a page in another's place is the same")
	}
}
