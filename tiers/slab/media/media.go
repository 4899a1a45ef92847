// Package media is the form of slots on a durable medium: slab files, DAX devices, and files in
// their place. It encodes and decodes. When to write and to sync is the caller's business.
//
// # A slab
//
//	0       header, two copies of 4 KiB each; of the intact ones that of the higher epoch counts
//	8 KiB   directory: one entry a slot, of the same size for all of them
//	…       slots, each from a multiple of 4 KiB on; page p of a slot at p × PageBytes in it
//
// A slab is carved for one geometry, or it is not carved and has only a header. Numbers are
// little-endian. Bytes that are not described are zero.
//
// # Why nothing on a medium is taken for something else
//
// Everything has an XXH3-64 checksum that is seeded with the place where it belongs.
//
//   - An entry's checksum is seeded with the slab's identity (store, number, and the random number of
//     its formatting) and the slot's number. An entry from a wrong place, or from before the slab was
//     formatted anew, does not match.
//   - A page's checksum is seeded with its digest, the slab's identity and the slot's generation,
//     which no two fillings of a slab share. Bytes of another page, another place or an earlier
//     filling do not match.
//
// Each page has a checksum of its own, so that the first pages of a chunk can be read and checked
// without the others. Nothing that is read decides how much is allocated. Any bytes decode to
// something or to an error; the fuzz tests check that.
package media

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/zeebo/xxh3"

	"lookaside/internal/frame"
	"lookaside/tiers"
)

// Version is the version of the form described here.
const Version = 1

const (
	// BlockBytes is the size of a header, and the alignment of everything but entries.
	BlockBytes = 4096
	// directoryAt is where the directory begins, behind both headers.
	directoryAt = 2 * BlockBytes
	// entryHead is the part of an entry before its digests.
	entryHead = 128
	// entryAlign divides the size of an entry. The part that marks an entry as free has this size,
	// so it lies in one sector.
	entryAlign = 64

	maxPages    = 4096    // a slot
	maxSlots    = 1 << 26 // limit of the pages of all slots of a slab
	maxFirst    = 1 << 30
	maxEpoch    = 1 << 24
	pageTokens  = 1 // of the geometries in headers: it does not matter for where bytes lie
	minPage     = 256
	maxSlabSize = 1 << 50
)

// Reasons for which a header or an entry is refused.
var (
	ErrBlank   = errors.New("blank")   // nothing was ever written there
	ErrCorrupt = errors.New("corrupt") // no intact header
	// this program cannot read the header
	ErrVersion = errors.New("another version of the format")
	// the geometry does not fit into the slab
	ErrLayout = errors.New("no such layout")
)

var headerForm = frame.Form{Magic: "LookSlab", Version: Version, Seed: 0x4C6F6F6B61736964,
	Foreign: ErrCorrupt, Other: ErrVersion, Corrupt: ErrCorrupt}

// Layout says where things lie in a slab carved for a geometry.
type Layout struct {
	Geometry    tiers.Geometry // PageTokens is 1
	Slots       int
	EntryBytes  int
	DataOffset  int64 // of slot 0
	StrideBytes int64 // from one slot to the next
}

// NewLayout lays out a slab of a size for a geometry. It returns ErrLayout if not a single slot
// fits, or if the geometry is invalid.
func NewLayout(g tiers.Geometry, slabBytes int64) (Layout, error) {
	l, err := EntryLayout(g)
	if err != nil {
		return Layout{}, err
	}
	if slabBytes < 0 || slabBytes > maxSlabSize {
		return Layout{}, fmt.Errorf("%w: a slab of %d bytes", ErrLayout, slabBytes)
	}
	l.StrideBytes = roundUp(g.PageBytes*int64(g.PagesPerChunk), BlockBytes)
	n := min((slabBytes-directoryAt)/(l.StrideBytes+int64(l.EntryBytes)),
		int64((maxSlots-1)/g.PagesPerChunk))
	for ; n > 0; n-- { // the directory's end is rounded up: at most one slot too many
		l.DataOffset = roundUp(directoryAt+n*int64(l.EntryBytes), BlockBytes)
		if l.DataOffset+n*l.StrideBytes <= slabBytes {
			break
		}
	}
	if n <= 0 {
		return Layout{}, fmt.Errorf("%w: a slab of %d bytes holds no slot of %d", ErrLayout,
			slabBytes, l.StrideBytes)
	}
	l.Slots = int(n)
	return l, nil
}

// EntryLayout returns the part of a layout that says what entries of a geometry look like. It has
// no slots. It returns ErrLayout if the geometry is invalid.
func EntryLayout(g tiers.Geometry) (Layout, error) {
	g.PageTokens = pageTokens
	if g.PageBytes < minPage || g.PageBytes > maxSlabSize/maxPages || g.PagesPerChunk < 1 ||
		g.PagesPerChunk > maxPages ||
		g.DigestBytes != 8 && g.DigestBytes != 16 && g.DigestBytes != 32 {
		return Layout{}, fmt.Errorf("%w: geometry %+v", ErrLayout, g)
	}
	return Layout{Geometry: g, EntryBytes: int(roundUp(
		int64(entryHead+g.PagesPerChunk*(g.DigestBytes+8)), entryAlign))}, nil
}

func roundUp(n, to int64) int64 { return (n + to - 1) / to * to }

// EntryOffset returns the offset of a slot's entry in the slab. It is a multiple of entryAlign.
func (l *Layout) EntryOffset(slot int) int64 {
	return directoryAt + int64(slot)*int64(
		l.EntryBytes)
}

// DirectoryBytes returns the size of the directory.
func (l *Layout) DirectoryBytes() int64 { return int64(l.Slots) * int64(l.EntryBytes) }

// SlotOffset returns the offset of a slot's first page in the slab.
func (l *Layout) SlotOffset(slot int) int64 { return l.DataOffset + int64(slot)*l.StrideBytes }

// Header is a decoded header.
type Header struct {
	Store  [16]byte // the store that made it
	Index  uint32   // its number among those of its directory
	Bytes  int64    // its size
	Format uint64   // random, new each time the slab is formatted
	// Epoch rises with each header that is written, at most to EpochLimit.
	Epoch uint64
	// Stable is a commit number. Entries up to it were durable, with their data, when the header
	// was written.
	Stable uint64
	// Layout is zero if the slab is not carved.
	Layout Layout
}

// EpochLimit bounds epochs. A slab that reaches it must be formatted anew.
const EpochLimit = maxEpoch

// Generation returns the n-th generation of an epoch: a number that no other filling of any slot of
// the slab has.
func Generation(epoch, n uint64) uint64 { return epoch<<40 | n&(1<<40-1) }

// Carved reports whether the slab has a directory and slots.
func (h *Header) Carved() bool { return h.Layout.Slots > 0 }

// HeaderOffset returns the offset of the header of an epoch.
func HeaderOffset(epoch uint64) int64 { return int64(epoch%2) * BlockBytes }

// Encode writes the header into a block of BlockBytes, to be written at HeaderOffset(h.Epoch).
func (h *Header) Encode(block []byte) {
	b := block[:BlockBytes]
	clear(b)
	headerForm.Begin(b)
	le := binary.LittleEndian
	le.PutUint32(b[12:], h.Index)
	copy(b[16:], h.Store[:])
	le.PutUint64(b[32:], uint64(h.Bytes))
	le.PutUint64(b[40:], h.Format)
	le.PutUint64(b[48:], h.Epoch)
	le.PutUint64(b[56:], h.Stable)
	l := &h.Layout
	le.PutUint64(b[64:], uint64(l.Geometry.PageBytes))
	le.PutUint32(b[72:], uint32(l.Geometry.PagesPerChunk))
	le.PutUint32(b[76:], uint32(l.Geometry.DigestBytes))
	le.PutUint64(b[80:], uint64(l.Slots))
	le.PutUint64(b[88:], uint64(l.EntryBytes))
	le.PutUint64(b[96:], uint64(l.DataOffset))
	le.PutUint64(b[104:], uint64(l.StrideBytes))
	headerForm.Seal(b)
}

// DecodeHeader decodes a slab's first 2 × BlockBytes. It returns ErrBlank, ErrCorrupt or
// ErrVersion. A header that b does not have whole counts as not intact.
func DecodeHeader(b []byte) (Header, error) {
	var best Header
	found, blank := false, true
	var newer error
	for i := range 2 {
		from := min(i*BlockBytes, len(b))
		block := b[from:min(from+BlockBytes, len(b))]
		for _, c := range block {
			if c != 0 {
				blank = false
				break
			}
		}
		h, err := decodeHeader(block)
		switch {
		case err == nil && HeaderOffset(h.Epoch) != int64(from):
			// Written to, or read from, the wrong place.
		case err == nil && (!found || h.Epoch > best.Epoch):
			best, found = h, true
		case errors.Is(err, ErrVersion):
			newer = err
		}
	}
	switch {
	case found:
		return best, nil
	case newer != nil:
		return Header{}, newer
	case blank:
		return Header{}, ErrBlank
	}
	return Header{}, ErrCorrupt
}

func decodeHeader(b []byte) (Header, error) {
	if len(b) < BlockBytes {
		return Header{}, ErrCorrupt
	}
	if err := headerForm.Check(b[:BlockBytes]); err != nil {
		return Header{}, err
	}
	le := binary.LittleEndian
	h := Header{
		Index: le.Uint32(b[12:]), Store: [16]byte(b[16:32]), Format: le.Uint64(b[40:]),
		Epoch: le.Uint64(b[48:]), Stable: le.Uint64(b[56:]),
	}
	size := le.Uint64(b[32:])
	if size > maxSlabSize || h.Epoch >= maxEpoch {
		return Header{}, ErrCorrupt
	}
	h.Bytes = int64(size)
	pageBytes, ppc, digest := le.Uint64(b[64:]), le.Uint32(b[72:]), le.Uint32(b[76:])
	if pageBytes == 0 {
		return h, nil
	}
	if pageBytes > math.MaxInt64 || ppc > maxPages {
		return Header{}, ErrCorrupt
	}
	l, err := NewLayout(tiers.Geometry{PageBytes: int64(pageBytes), PagesPerChunk: int(ppc),
		DigestBytes: int(digest)}, h.Bytes)
	if err != nil || uint64(l.Slots) != le.Uint64(b[80:]) ||
		uint64(l.EntryBytes) != le.Uint64(b[88:]) ||
		uint64(l.DataOffset) != le.Uint64(b[96:]) || uint64(l.StrideBytes) != le.Uint64(b[104:]) {
		return Header{}, ErrCorrupt
	}
	h.Layout = l
	return h, nil
}

// Identity seeds the checksums of one slab. It is immutable.
type Identity struct{ seed uint64 }

// Identity returns the identity of the slab as formatted now.
func (h *Header) Identity() Identity { return NewIdentity(h.Store, h.Index, h.Format) }

// NewIdentity returns the identity of the slab with a number in a store. format is the random
// number of its formatting.
func NewIdentity(store [16]byte, index uint32, format uint64) Identity {
	var b [28]byte
	copy(b[:], store[:])
	binary.LittleEndian.PutUint32(b[16:], index)
	binary.LittleEndian.PutUint64(b[20:], format)
	return Identity{xxh3.Hash(b[:])}
}

// entrySeed returns the seed of the checksum of a slot's entry.
func (id Identity) entrySeed(slot int) uint64 {
	return id.seed ^ (uint64(slot)+1)*0x9E3779B97F4A7C15
}

// PageSum returns the checksum of a page's bytes in a slot of a generation.
func (id Identity) PageSum(digest []byte, generation uint64, page []byte) uint64 {
	return xxh3.HashSeed(page, id.PageSeed(digest, generation))
}

// Entry is the directory's entry of a slot in use. The slices of a decoded entry point into the
// decoded bytes.
type Entry struct {
	Generation uint64 // of this filling; seeds the checksums of its pages
	Commit     uint64 // number of the commit in its slab, from 1
	Stable     uint64 // commits up to this one were durable when the entry was written
	Space      tiers.Fingerprint
	First      int      // index of the chunk's first page in its prefix
	Pages      int      // that the slot holds
	Prev       []byte   // digest of the page before; empty if there is none or it is not known
	Digests    []byte   // of the pages, end to end
	Tenant     [16]byte // names whose chunk it is; zero: nobody's
	Sums       []byte   // checksums of the pages, 8 bytes each; see Sum
}

// Sum returns the checksum of page i of the slot.
func (e *Entry) Sum(i int) uint64 { return binary.LittleEndian.Uint64(e.Sums[8*i:]) }

// An entry: checksum of all that follows 0, generation 8, commit 16, stable 24, state 32, pages 36,
// first 40, length of prev 44, space 48, prev 80, tenant 112, digests from 128, checksums right
// behind the room for PagesPerChunk digests. A free one begins with entryAlign zeros.
const stateUsed = 0x55534544

// State is the result of decoding an entry.
type State uint8

const (
	Free State = iota
	Used
	Bad // torn, damaged, or from another place
)

// EncodeEntry writes the entry of a slot into b, which has Layout.EntryBytes.
func (l *Layout) EncodeEntry(b []byte, id Identity, slot int, e *Entry) {
	b = b[:l.EntryBytes]
	clear(b)
	le := binary.LittleEndian
	le.PutUint64(b[8:], e.Generation)
	le.PutUint64(b[16:], e.Commit)
	le.PutUint64(b[24:], e.Stable)
	le.PutUint32(b[32:], stateUsed)
	le.PutUint32(b[36:], uint32(e.Pages))
	le.PutUint32(b[40:], uint32(e.First))
	le.PutUint32(b[44:], uint32(len(e.Prev)))
	copy(b[48:], e.Space[:])
	copy(b[80:112], e.Prev)
	copy(b[112:entryHead], e.Tenant[:])
	copy(b[entryHead:], e.Digests[:e.Pages*l.Geometry.DigestBytes])
	copy(b[entryHead+l.Geometry.PagesPerChunk*l.Geometry.DigestBytes:], e.Sums[:e.Pages*8])
	le.PutUint64(b, xxh3.HashSeed(b[8:], id.entrySeed(slot)))
}

// FreeEntry returns the bytes to write over the beginning of a slot's entry to free it. They lie in
// one sector.
func FreeEntry() []byte { return make([]byte, entryAlign) }

// DecodeEntry decodes the entry of a slot into e. The entry is valid only if the state is Used, and
// only as long as b.
func (l *Layout) DecodeEntry(b []byte, id Identity, slot int, e *Entry) State {
	if len(b) < l.EntryBytes {
		return Bad
	}
	b = b[:l.EntryBytes]
	le := binary.LittleEndian
	sum := le.Uint64(b)
	if sum == 0 && [entryAlign]byte(b) == [entryAlign]byte{} {
		return Free
	}
	if xxh3.HashSeed(b[8:], id.entrySeed(slot)) != sum {
		return Bad
	}
	g := &l.Geometry
	pages, first, prev := le.Uint32(b[36:]), le.Uint32(b[40:]), le.Uint32(b[44:])
	if le.Uint32(b[32:]) != stateUsed || pages < 1 || pages > uint32(g.PagesPerChunk) ||
		first > maxFirst-pages || first%uint32(g.PagesPerChunk) != 0 ||
		prev != 0 && (prev != uint32(g.DigestBytes) || first == 0) {
		return Bad
	}
	*e = Entry{
		Generation: le.Uint64(b[8:]), Commit: le.Uint64(b[16:]), Stable: le.Uint64(b[24:]),
		Space: tiers.Fingerprint(b[48:80]), First: int(first), Pages: int(pages),
		Prev: b[80 : 80+prev], Tenant: [16]byte(b[112:entryHead]),
	}
	n := int(pages)
	e.Digests = b[entryHead : entryHead+n*g.DigestBytes]
	sums := entryHead + g.PagesPerChunk*g.DigestBytes
	e.Sums = b[sums : sums+8*n]
	return Used
}

// PageHasher returns a hasher that computes a PageSum piece by piece.
func (id Identity) PageHasher(digest []byte, generation uint64) *xxh3.Hasher {
	return xxh3.NewSeed(id.PageSeed(digest, generation))
}

// PageSeed returns the seed of a page's checksum, which is its XXH3-64.
func (id Identity) PageSeed(digest []byte, generation uint64) uint64 {
	return xxh3.HashSeed(digest, id.seed^generation*0xC2B2AE3D27D4EB4F)
}
