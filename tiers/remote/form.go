package remote

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"

	"github.com/zeebo/xxh3"

	"lookaside/tiers"
	"lookaside/tiers/serde"
)

// The form of an object: a header, and the encoded pages end to end. All numbers are little-endian.
//
//	 0  "LAKV"
//	 4  version (1)
//	 5  length of a digest: 8, 16 or 32
//	 6  pages of the chunk, 2 bytes
//	 8  fingerprint of the space, 32 bytes
//	40  bytes of a page, 8 bytes
//	48  pages of a whole chunk, 4 bytes
//	52  0, 4 bytes
//	56  name of the codec, 16 bytes, filled with 0
//	72  bytes of a part, where the pages are kept in parts, else 0; 8 bytes
//	80  for each page: its digest; how many bytes it was encoded to, 8 bytes; XXH3-64 of the page
//	    as it is decoded, seeded by the digest, 8 bytes
//	…   XXH3-64 of all before it, 8 bytes
const (
	formVersion = 1
	fixedBytes  = 80
	sumBytes    = 8
	codecBytes  = 16
	maxPages    = 4096 // of a chunk, as the engine bounds it
)

var formMagic = []byte("LAKV")

// headerBytes is how long the header of a chunk is.
func headerBytes(pages, digestBytes int) int {
	return fixedBytes + pages*(digestBytes+16) +
		sumBytes
}

// maxHeaderBytes is the longest that a header can be.
var maxHeaderBytes = headerBytes(maxPages, 32)

// header is what a header says. Its slices point into the bytes that it was read from.
type header struct {
	fingerprint   []byte
	pageBytes     int64
	pagesPerChunk int
	codec         string
	partBytes     int64
	digestBytes   int
	pages         int
	entries       []byte // of the pages: digest, length, sum
}

func (h *header) entry(i int) []byte {
	n := h.digestBytes + 16
	return h.entries[i*n : (i+1)*n]
}

func (h *header) digest(i int) []byte { return h.entry(i)[:h.digestBytes] }
func (h *header) length(i int) int64 {
	return int64(binary.LittleEndian.Uint64(h.entry(i)[h.digestBytes:]))
}
func (h *header) sum(i int) uint64 {
	return binary.LittleEndian.Uint64(
		h.entry(i)[h.digestBytes+8:])
}

// bytes is how many bytes the first pages were encoded to.
func (h *header) bytes(pages int) (n int64) {
	for i := range pages {
		n += h.length(i)
	}
	return n
}

// sumOf is the checksum of a page: a page that lies in another's place does not have it.
func sumOf(page, digest []byte) uint64 {
	return xxh3.HashSeed(page, seedOf(digest))
}

func seedOf(digest []byte) uint64 { return binary.LittleEndian.Uint64(digest) }

// appendHeader appends the header of a chunk whose pages were encoded to these lengths and,
// decoded, have these sums.
func appendHeader(b []byte, run tiers.Run, codec string, partBytes int64, lengths []int64,
	sums []uint64) []byte {
	at, g := len(b), run.Space.Geometry
	b = append(b, formMagic...)
	b = append(b, formVersion, byte(g.DigestBytes))
	b = binary.LittleEndian.AppendUint16(b, uint16(run.Pages()))
	b = append(b, run.Space.Fingerprint[:]...)
	b = binary.LittleEndian.AppendUint64(b, uint64(g.PageBytes))
	b = binary.LittleEndian.AppendUint32(b, uint32(g.PagesPerChunk))
	b = binary.LittleEndian.AppendUint32(b, 0)
	b = append(b, codec...)
	b = append(b, make([]byte, codecBytes-len(codec))...)
	b = binary.LittleEndian.AppendUint64(b, uint64(partBytes))
	for i := range run.Pages() {
		b = append(b, run.Hashes[i*g.DigestBytes:(i+1)*g.DigestBytes]...)
		b = binary.LittleEndian.AppendUint64(b, uint64(lengths[i]))
		b = binary.LittleEndian.AppendUint64(b, sums[i])
	}
	return binary.LittleEndian.AppendUint64(b, xxh3.Hash(b[at:]))
}

// parseHeader reads the header that b is. Nobody vouches for b. An error wraps tiers.ErrCorrupt.
func parseHeader(b []byte) (*header, error) {
	bad := func(format string, args ...any) (*header, error) {
		return nil, fmt.Errorf("%w: "+format, append([]any{tiers.ErrCorrupt}, args...)...)
	}
	if len(b) < fixedBytes+sumBytes || !bytes.Equal(b[:4], formMagic) {
		return bad("no header")
	}
	if b[4] != formVersion {
		return bad("version %d of the form, and this is version %d", b[4], formVersion)
	}
	h := &header{
		digestBytes:   int(b[5]),
		pages:         int(binary.LittleEndian.Uint16(b[6:])),
		fingerprint:   b[8:40],
		pageBytes:     int64(binary.LittleEndian.Uint64(b[40:])),
		pagesPerChunk: int(binary.LittleEndian.Uint32(b[48:])),
		codec:         string(bytes.TrimRight(b[56:72], "\x00")),
		partBytes:     int64(binary.LittleEndian.Uint64(b[72:])),
	}
	switch {
	case h.digestBytes != 8 && h.digestBytes != 16 && h.digestBytes != 32:
		return bad("digests of %d bytes", h.digestBytes)
	case h.pages < 1 || h.pages > h.pagesPerChunk || h.pagesPerChunk > maxPages:
		return bad("%d pages in a chunk of %d", h.pages, h.pagesPerChunk)
	case h.pageBytes < 1 || h.pageBytes > 1<<40:
		return bad("pages of %d bytes", h.pageBytes)
	case h.partBytes != 0 && (h.partBytes < minSplit || h.partBytes > maxSplit):
		return bad("parts of %d bytes", h.partBytes)
	case len(b) != headerBytes(h.pages, h.digestBytes):
		return bad("%d bytes of header for %d pages", len(b), h.pages)
	case xxh3.Hash(b[:len(b)-sumBytes]) != binary.LittleEndian.Uint64(b[len(b)-sumBytes:]):
		return bad("checksum of the header")
	}
	h.entries = b[fixedBytes : len(b)-sumBytes]
	for i := range h.pages {
		if n := h.length(i); n < 1 || n > serde.Bound(h.pageBytes) {
			return bad("%d bytes for a page of %d", n, h.pageBytes)
		}
	}
	return h, nil
}

// name names an object: in which space, which pages. Digests are cumulative, so the last one alone
// says which prefix the chunk is the end of.
type name struct {
	space       *tiers.Space
	first, last string // digests
	pages       int
}

// nameOf is the name of the first pages of a run of one chunk.
func nameOf(run tiers.Run, pages int) name {
	d := run.Space.Geometry.DigestBytes
	return name{space: run.Space, first: string(run.Hashes[:d]),
		last: string(run.Hashes[(pages-1)*d : pages*d]), pages: pages}
}

// append appends the name's part behind that of its first page: the last page's digest and the
// number of pages.
func (n name) append(b []byte) []byte {
	b = append(hex.AppendEncode(b, []byte(n.last)), '-')
	return strconv.AppendInt(b, int64(n.pages), 10)
}

// parseName is the inverse of append, for an object of the chunk that run begins. Strangers may
// have put anything there: ok says whether it is a name.
func parseName(run tiers.Run, s string) (n name, ok bool) {
	d := run.Space.Geometry.DigestBytes
	last, pages, _ := strings.Cut(s, "-")
	digest, err := hex.DecodeString(last)
	n = name{space: run.Space, first: string(run.Hashes[:d]), last: string(digest)}
	if err != nil || len(digest) != d {
		return n, false
	}
	n.pages, err = strconv.Atoi(pages)
	return n, err == nil && n.pages >= 1 && n.pages <= run.Space.Geometry.PagesPerChunk &&
		string(n.append(nil)) == s
}

// agrees says how many pages, from the first on, the chunk of this name has in common with a run of
// one chunk, as far as the name alone can say it. sure: it is exactly that many.
func (n name) agrees(run tiers.Run) (pages int, sure bool) {
	d := run.Space.Geometry.DigestBytes
	if n.pages <= run.Pages() && string(run.Hashes[(n.pages-1)*d:n.pages*d]) == n.last {
		return n.pages, true
	}
	// The pages up to one that is the same are the same. So its first page is, and if it is the
	// only one, that is all.
	return 1, n.pages == 1 || run.Pages() == 1
}

// verify says whether a header is that of the object of this name.
func (n name) verify(h *header) error {
	g := n.space.Geometry
	if h.digestBytes != g.DigestBytes || h.pageBytes != g.PageBytes ||
		h.pagesPerChunk != g.PagesPerChunk || h.pages != n.pages ||
		!bytes.Equal(h.fingerprint, n.space.Fingerprint[:]) || string(h.digest(0)) != n.first ||
		string(h.digest(h.pages-1)) != n.last {
		return fmt.Errorf("%w: another chunk's header", tiers.ErrCorrupt)
	}
	return nil
}

// agree is how many pages, from the first on, a chunk with this header has in common with a run of
// one chunk in the same space.
func (h *header) agree(run tiers.Run) (pages int) {
	d := h.digestBytes
	for most := min(h.pages, run.Pages()); pages < most; pages++ {
		if !bytes.Equal(h.digest(pages), run.Hashes[pages*d:(pages+1)*d]) {
			break
		}
	}
	return pages
}
