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

// An object is a header and the encoded pages end to end. All numbers are little-endian.
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
//	72  bytes of a part if the pages are kept in parts, else 0; 8 bytes
//	80  for each page: its digest; its encoded length in bytes, 8 bytes; XXH3-64 of the decoded
//	    page, seeded by the digest, 8 bytes
//	…   XXH3-64 of everything before it, 8 bytes
const (
	formVersion = 1
	fixedBytes  = 80
	sumBytes    = 8
	codecBytes  = 16
	maxPages    = 4096 // of a chunk; the engine has the same limit
)

var formMagic = []byte("LAKV")

// headerBytes returns the length of the header of a chunk.
func headerBytes(pages, digestBytes int) int {
	return fixedBytes + pages*(digestBytes+16) +
		sumBytes
}

// maxHeaderBytes is the length of the longest header.
var maxHeaderBytes = headerBytes(maxPages, 32)

// header is a parsed header. Its slices point into the bytes that it was parsed from.
type header struct {
	fingerprint   []byte
	pageBytes     int64
	pagesPerChunk int
	codec         string
	partBytes     int64
	digestBytes   int
	pages         int
	entries       []byte // for each page: digest, length, sum
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

// bytes returns the encoded length of the first pages together.
func (h *header) bytes(pages int) (n int64) {
	for i := range pages {
		n += h.length(i)
	}
	return n
}

// sumOf returns the checksum of a page. It is seeded by the digest, so a page in another page's
// place fails the check.
func sumOf(page, digest []byte) uint64 {
	return xxh3.HashSeed(page, seedOf(digest))
}

func seedOf(digest []byte) uint64 { return binary.LittleEndian.Uint64(digest) }

// appendHeader appends the header of a chunk. lengths are those of the encoded pages, sums those of
// the decoded ones.
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

// parseHeader parses a header. b is not trusted. An error wraps tiers.ErrCorrupt.
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

// name names an object by its space and pages. Digests are cumulative, so the last one alone
// identifies the prefix that the chunk ends.
type name struct {
	space       *tiers.Space
	first, last string // digests
	pages       int
}

// nameOf returns the name of the first pages of a run of one chunk.
func nameOf(run tiers.Run, pages int) name {
	d := run.Space.Geometry.DigestBytes
	return name{space: run.Space, first: string(run.Hashes[:d]),
		last: string(run.Hashes[(pages-1)*d : pages*d]), pages: pages}
}

// append appends the part of the name that follows the first page's digest: the last page's digest
// and the number of pages.
func (n name) append(b []byte) []byte {
	b = append(hex.AppendEncode(b, []byte(n.last)), '-')
	return strconv.AppendInt(b, int64(n.pages), 10)
}

// parseName is the inverse of append, for an object of the chunk that run begins. s is not trusted;
// ok reports whether it is a name.
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

// agrees returns how many pages, from the first on, the named chunk has in common with a run of one
// chunk. The name alone gives a lower bound; sure reports whether the number is exact.
func (n name) agrees(run tiers.Run) (pages int, sure bool) {
	d := run.Space.Geometry.DigestBytes
	if n.pages <= run.Pages() && string(run.Hashes[(n.pages-1)*d:n.pages*d]) == n.last {
		return n.pages, true
	}
	// If one page is equal, all pages before it are. So the first page is equal. The result is
	// exact if the chunk or the run has no other page.
	return 1, n.pages == 1 || run.Pages() == 1
}

// verify returns an error unless h is the header of the object with this name.
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

// agree returns how many pages, from the first on, a chunk with this header has in common with a
// run of one chunk in the same space.
func (h *header) agree(run tiers.Run) (pages int) {
	d := h.digestBytes
	for most := min(h.pages, run.Pages()); pages < most; pages++ {
		if !bytes.Equal(h.digest(pages), run.Hashes[pages*d:(pages+1)*d]) {
			break
		}
	}
	return pages
}
