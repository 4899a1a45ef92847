package directory

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/zeebo/xxh3"

	"lookaside/internal/frame"
	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/slab/media"
)

// Version is the version of the form that the package comment describes.
const Version = 1

const (
	headerBytes = 4096
	recordBytes = 128
	records     = 64 // of regions, and of pieces
	regionsAt   = 2 * headerBytes
	piecesAt    = regionsAt + records*recordBytes
	entriesAt   = 64 << 10 // a multiple of any page size of an entry's mapping
	entryAlign  = 64

	bootBytes = 40 // of the kernel's id, with zeros behind it
	kindBytes = 16

	maxEpoch  = media.EpochLimit
	maxRegion = 1 << 20 // limit of ids
	maxBytes  = 1 << 50 // of a region
	// maxGeneration is the limit of generations. There are locks at bytes of this number.
	maxGeneration = 1 << 62
)

// Reasons for which a directory is not used.
var (
	errDamaged = errors.New("it is damaged")
	errVersion = errors.New("another version of the program has written it")
	errBoot    = errors.New("it is of before the last start of this machine, or of another machine")
	errLock    = errors.New("it was made in another runtime directory")
	errShort   = errors.New("it was cut short")
	errOld     = errors.New("it was opened too often")
)

var headerForm = frame.Form{Magic: "LookDirM", Version: Version, Seed: 0x4C6F6F6B44697265,
	Foreign: errDamaged, Other: errVersion, Corrupt: errDamaged}

// header is what a directory belongs to.
type header struct {
	boot       string   // the kernel's id of the machine's start
	lockDev    uint64   // of the lock file of the runtime directory
	lockInode  uint64   //
	store      [16]byte // random, of this directory
	epoch      uint64   // rises each time the directory is opened
	trusted    uint64   // the epoch of the first of the processes that have handed over since
	generation uint64   // of the run that has the directory
	next       uint32   // no region had this id or a higher one when the header was written
}

func headerOffset(epoch uint64) int64 { return int64(epoch%2) * headerBytes }

func (h *header) encode() []byte {
	b := make([]byte, headerBytes)
	headerForm.Begin(b)
	le := binary.LittleEndian
	le.PutUint32(b[12:], h.next)
	copy(b[16:16+bootBytes], h.boot)
	copy(b[56:], h.store[:])
	le.PutUint64(b[72:], h.lockDev)
	le.PutUint64(b[80:], h.lockInode)
	le.PutUint64(b[88:], h.epoch)
	le.PutUint64(b[96:], h.trusted)
	le.PutUint64(b[104:], h.generation)
	headerForm.Seal(b)
	return b
}

// decodeHeader decodes the first bytes of a file.
func decodeHeader(b []byte) (header, error) {
	var best header
	var found bool
	why := errDamaged
	for at := 0; at < regionsAt && at+headerBytes <= len(b); at += headerBytes {
		block := b[at : at+headerBytes]
		if err := headerForm.Check(block); err != nil {
			if errors.Is(err, errVersion) {
				why = err
			}
			continue
		}
		le := binary.LittleEndian
		h := header{
			next: le.Uint32(block[12:]), boot: text(block[16 : 16+bootBytes]),
			store: [16]byte(block[56:72]), lockDev: le.Uint64(block[72:]),
			lockInode: le.Uint64(block[80:]), epoch: le.Uint64(block[88:]),
			trusted: le.Uint64(block[96:]), generation: le.Uint64(block[104:]),
		}
		if headerOffset(h.epoch) == int64(at) && (!found || h.epoch > best.epoch) {
			best, found = h, true
		}
	}
	if !found {
		return header{}, why
	}
	return best, nil
}

func text(b []byte) string { return string(bytes.TrimRight(b, "\x00")) }

// Region is the memory of one region of the arena. Device, inode, size and seals tell it from other
// memory; see dax.Identity.
type Region struct {
	ID         uint32
	Kind       string
	Dev, Inode uint64
	SizeBytes  int64
	PageSize   int64
	Seals      int
}

// regionRecord is a region, and where its entries begin in the file.
type regionRecord struct {
	Region
	at int64
}

// pieceRecord is a piece, and the random number of its carving.
type pieceRecord struct {
	engine.Piece
	format uint64
	bare   bool // its place was not made ready for entries
}

// sumOf returns the checksum of a record: of its bytes behind the checksum, with the place where it
// belongs.
func sumOf(b []byte, store [16]byte, offset int64) uint64 {
	seed := xxh3.Hash(store[:]) ^ uint64(offset)*0x9E3779B97F4A7C15
	return max(xxh3.HashSeed(b[8:recordBytes], seed), 1)
}

// seal writes the checksum of a record for an offset of the file.
func seal(b []byte, store [16]byte, offset int64) []byte {
	binary.LittleEndian.PutUint64(b, sumOf(b, store, offset))
	return b
}

// bareSum returns the checksum of the record of a piece that is bare. sum is that of the record
// when the piece is not bare any more.
func bareSum(sum uint64) uint64 { return max(^sum, 1) }

// sealed reports whether a record is valid.
func sealed(b []byte, store [16]byte, offset int64) bool {
	return binary.LittleEndian.Uint64(b) == sumOf(b, store, offset)
}

func (r *regionRecord) encode() []byte {
	b := make([]byte, recordBytes)
	le := binary.LittleEndian
	le.PutUint32(b[8:], r.ID)
	le.PutUint32(b[12:], uint32(r.Seals))
	copy(b[16:16+kindBytes], r.Kind)
	le.PutUint64(b[32:], r.Dev)
	le.PutUint64(b[40:], r.Inode)
	le.PutUint64(b[48:], uint64(r.SizeBytes))
	le.PutUint64(b[56:], uint64(r.PageSize))
	le.PutUint64(b[64:], uint64(r.at))
	return b
}

// decodeRegion decodes a valid record. It returns false if no program of this version can have
// written it.
func decodeRegion(b []byte) (regionRecord, bool) {
	le := binary.LittleEndian
	size, page, at := le.Uint64(b[48:]), le.Uint64(b[56:]), le.Uint64(b[64:])
	r := regionRecord{at: int64(at), Region: Region{
		ID: le.Uint32(b[8:]), Seals: int(le.Uint32(b[12:])), Kind: text(b[16 : 16+kindBytes]),
		Dev: le.Uint64(b[32:]), Inode: le.Uint64(b[40:]), SizeBytes: int64(size),
		PageSize: int64(page),
	}}
	ok := r.ID < maxRegion && size > 0 && size <= maxBytes && page > 0 && page&(page-1) == 0 &&
		size%page == 0 && at >= entriesAt && at <= 1<<61 && at%entriesAt == 0
	return r, ok
}

func (p *pieceRecord) encode() []byte {
	b := make([]byte, recordBytes)
	le := binary.LittleEndian
	le.PutUint32(b[8:], p.Region)
	le.PutUint32(b[12:], uint32(p.Slots))
	le.PutUint64(b[16:], uint64(p.Offset))
	le.PutUint64(b[24:], uint64(p.Stride))
	le.PutUint64(b[32:], uint64(p.Geometry.PageBytes))
	le.PutUint32(b[40:], uint32(p.Geometry.PagesPerChunk))
	le.PutUint32(b[44:], uint32(p.Geometry.DigestBytes))
	le.PutUint64(b[48:], p.format)
	return b
}

// decodePiece decodes a valid record. It returns false if no program of this version can have
// written it. Whether it lies in its region is not checked.
func decodePiece(b []byte) (p pieceRecord, ok bool) {
	le := binary.LittleEndian
	slots, offset, stride := le.Uint32(b[12:]), le.Uint64(b[16:]), le.Uint64(b[24:])
	page, ppc, digest := le.Uint64(b[32:]), le.Uint32(b[40:]), le.Uint32(b[44:])
	if slots == 0 || slots > 1<<26 || offset > maxBytes || stride > maxBytes || page > maxBytes ||
		ppc > 1<<16 || digest > 32 {
		return pieceRecord{}, false
	}
	p = pieceRecord{format: le.Uint64(b[48:]), Piece: engine.Piece{
		Region: le.Uint32(b[8:]), Slots: int(slots),
		Placement: engine.Placement{Offset: int64(offset), Stride: int64(stride)},
		Geometry: tiers.Geometry{PageBytes: int64(page), PagesPerChunk: int(ppc),
			DigestBytes: int(digest)},
	}}
	_, err := p.layout()
	return p, err == nil && int64(ppc)*int64(page) <= int64(stride)
}

// layout returns the form of the piece's entries.
func (p *pieceRecord) layout() (media.Layout, error) {
	l, err := media.EntryLayout(p.Geometry)
	l.Slots = p.Slots
	return l, err
}

// entries returns where the piece's entries lie in the part of a region of so many bytes. It
// returns false if the piece, or its entries, do not fit into the region.
func (p *pieceRecord) entries(entryBytes int, regionBytes int64) (from, size int64, ok bool) {
	if p.Slots < 1 || p.Offset < 0 || p.Stride <= 0 || p.Offset > regionBytes ||
		int64(p.Slots) > (regionBytes-p.Offset)/p.Stride {
		return 0, 0, false
	}
	from = roundUp(p.Offset, entryAlign)
	end := p.Offset + int64(p.Slots)*p.Stride
	size = int64(p.Slots) * int64(entryBytes)
	return from, size, size <= end-from
}

func roundUp(n, to int64) int64 { return (n + to - 1) / to * to }

// contents is what a directory has, except entries.
type contents struct {
	header  header
	regions [records]*regionRecord // nil: none, or not valid
	pieces  [records]*pieceRecord  // likewise
}

// decode decodes a directory's first entriesAt bytes. size is that of the file. It returns an error
// if the directory cannot be used; it wraps one of the reasons above.
func decode(b []byte, size int64) (*contents, error) {
	h, err := decodeHeader(b)
	if err != nil {
		return nil, err
	}
	if len(b) < entriesAt {
		return nil, errShort
	}
	c := &contents{header: h}
	var parts []*regionRecord
	for i := range c.regions {
		at := int64(regionsAt + i*recordBytes)
		if rec := b[at : at+recordBytes]; sealed(rec, h.store, at) {
			r, ok := decodeRegion(rec)
			if !ok || slices.ContainsFunc(parts, r.meets) {
				return nil, errDamaged
			}
			if r.at+roundUp(r.SizeBytes, entriesAt) > size {
				return nil, errShort
			}
			c.regions[i] = &r
			parts = append(parts, &r)
		}
	}
	for i := range c.pieces {
		at := int64(piecesAt + i*recordBytes)
		rec := b[at : at+recordBytes]
		bare := binary.LittleEndian.Uint64(rec) == bareSum(sumOf(rec, h.store, at))
		if bare || sealed(rec, h.store, at) {
			p, ok := decodePiece(rec)
			p.bare = bare
			in := slices.IndexFunc(parts, func(r *regionRecord) bool { return r.ID == p.Region })
			if !ok || in < 0 {
				return nil, fmt.Errorf("%w: a piece of no region", errDamaged)
			}
			l, err := p.layout()
			if err != nil {
				return nil, fmt.Errorf("%w: %w", errDamaged, err)
			}
			if _, _, ok := p.entries(l.EntryBytes, parts[in].SizeBytes); !ok {
				return nil, fmt.Errorf("%w: a piece is not in its region", errDamaged)
			}
			c.pieces[i] = &p
		}
	}
	return c, nil
}

// meets reports whether two regions cannot both be there.
func (r *regionRecord) meets(o *regionRecord) bool {
	return r.ID == o.ID || r.at < o.at+roundUp(o.SizeBytes, entriesAt) &&
		o.at < r.at+roundUp(r.SizeBytes, entriesAt)
}
