package wire

import (
	"encoding/binary"
	"math"
)

// Messages between two sidecars of one host (see docs/protocol.md, "Between sidecars"): the
// borrower connects, and what the lender holds is what they talk about.

// MaxBatchHints is how many hints one [PeerPages] may carry.
const MaxBatchHints = (MaxPacketBytes - overheadBytes) / 8

// MaxLeasePages is the number of pages of one PeerLease whose hashes fit a packet and whose grant
// does too.
func MaxLeasePages(digestBytes int) int {
	if digestBytes < 1 {
		return 0
	}
	return min(MaxExtents, (MaxPacketBytes-overheadBytes-FingerprintBytes)/digestBytes)
}

// flag reads 0 or 1.
func (r *reader) flag(field string) bool { return r.uint(field, 1) == 1 }

func appendFlag(dst []byte, v bool) []byte {
	if v {
		return append(dst, 1)
	}
	return append(dst, 0)
}

func appendFields(dst []byte, fields []Field) []byte {
	dst = appendMap(dst, len(fields))
	for _, f := range fields {
		dst = appendStr(appendStr(dst, f.Key), f.Value)
	}
	return dst
}

// fields reads what a space declares, by rising key.
func (r *reader) fields(into []Field, lim *Limits) []Field {
	n := r.mapping("fields", lim.Fields)
	into = into[:0]
	for i := 0; i < n && r.err == nil; i++ {
		f := Field{Key: r.str("fields", lim.FieldKeyBytes),
			Value: r.str("fields", lim.FieldValueBytes)}
		if i > 0 && r.err == nil && f.Key <= into[i-1].Key {
			r.fail("fields", "not in rising order of keys")
		}
		into = append(into, f)
	}
	return into
}

// fingerprint reads the name of a space, aliasing the input.
func (r *reader) fingerprint() []byte {
	b := r.bin("fingerprint", FingerprintBytes)
	if r.err == nil && len(b) != FingerprintBytes {
		r.fail("fingerprint", "wrong length")
	}
	return b
}

// PeerHello opens a connection between sidecars. The one that connects is going to borrow.
type PeerHello struct {
	Version    uint16 // set by Append to [Version] when 0
	Generation uint64 // of this run of the borrower, never 0
}

// Type implements Message.
func (*PeerHello) Type() Type { return TypePeerHello }

// Append implements Message.
func (m *PeerHello) Append(dst []byte) []byte {
	return appendUint(appendVersioned(dst, TypePeerHello, 3, m.Version), m.Generation)
}

// Decode implements Message.
func (m *PeerHello) Decode(b []byte, _ *Limits) error {
	r := reader{buf: b, message: "PeerHello"}
	m.Version = r.versioned(TypePeerHello, 3)
	m.Generation = r.id("generation")
	return r.done()
}

// PeerWelcome accepts a borrower. A Refuse may come instead.
type PeerWelcome struct {
	Version    uint16 // set by Append to [Version] when 0
	Generation uint64 // of this run of the lender, never 0
	MaxPages   uint32 // pages that a PeerLease may name, at least 1; see also MaxLeasePages
}

// Type implements Message.
func (*PeerWelcome) Type() Type { return TypePeerWelcome }

// Append implements Message.
func (m *PeerWelcome) Append(dst []byte) []byte {
	dst = appendVersioned(dst, TypePeerWelcome, 4, m.Version)
	return appendUint(appendUint(dst, m.Generation), uint64(m.MaxPages))
}

// Decode implements Message.
func (m *PeerWelcome) Decode(b []byte, _ *Limits) error {
	r := reader{buf: b, message: "PeerWelcome"}
	m.Version = r.versioned(TypePeerWelcome, 4)
	m.Generation = r.id("generation")
	if m.MaxPages = r.u32("max_pages"); r.err == nil && m.MaxPages == 0 {
		r.fail("max_pages", "zero")
	}
	return r.done()
}

// PeerSpace tells a borrower of a space that the lender has; again if more is known of it.
type PeerSpace struct {
	Fingerprint   []byte // FingerprintBytes long; aliases the input
	PageTokens    uint32 // 0: not known
	PageBytes     uint64
	PagesPerChunk uint32
	DigestBytes   uint8
	Fields        []Field // what its worker declared, by rising key; none: not known
}

// Type implements Message.
func (*PeerSpace) Type() Type { return TypePeerSpace }

// Append implements Message.
func (m *PeerSpace) Append(dst []byte) []byte {
	dst = appendBin(appendHeader(dst, TypePeerSpace, 7), m.Fingerprint)
	dst = appendUint(dst, uint64(m.PageTokens))
	dst = appendUint(dst, m.PageBytes)
	dst = appendUint(dst, uint64(m.PagesPerChunk))
	dst = appendUint(dst, uint64(m.DigestBytes))
	return appendFields(dst, m.Fields)
}

// Decode implements Message.
func (m *PeerSpace) Decode(b []byte, lim *Limits) error {
	r := reader{buf: b, message: "PeerSpace"}
	r.header(TypePeerSpace, 7)
	m.Fingerprint = r.fingerprint()
	m.PageTokens = r.u32("page_tokens")
	m.PageBytes = r.uint("page_bytes", math.MaxInt64)
	m.PagesPerChunk = r.u32("pages_per_chunk")
	m.DigestBytes = uint8(r.uint("digest_bytes", MaxDigestBytes))
	if r.err == nil {
		switch {
		case m.PageBytes == 0:
			r.fail("page_bytes", "zero")
		case m.PagesPerChunk == 0:
			r.fail("pages_per_chunk", "zero")
		case m.DigestBytes == 0:
			r.fail("digest_bytes", "zero")
		}
	}
	m.Fields = r.fields(m.Fields, lim)
	return r.done()
}

// PeerPages tells a borrower what the lender holds: 8 bytes a page, little-endian. The lowest bit
// says that the page is held from now on (1) or not any more (0), the others are those of the XXH64
// of the space's fingerprint and the page's hash. Of one page the last word counts. It is a hint:
// only a grant is a promise.
type PeerPages struct {
	Seq   uint64 // counts these messages, from 1
	Begin bool   // all that was said before is void
	// what was said since the last Begin was all that was held at some moment since the last
	// message
	End   bool
	Hints []byte // packed; aliases the input
}

// Type implements Message.
func (*PeerPages) Type() Type { return TypePeerPages }

// Append implements Message.
func (m *PeerPages) Append(dst []byte) []byte {
	dst = appendUint(appendHeader(dst, TypePeerPages, 5), m.Seq)
	return appendBin(appendFlag(appendFlag(dst, m.Begin), m.End), m.Hints)
}

// Decode implements Message. It does not allocate.
func (m *PeerPages) Decode(b []byte, _ *Limits) error {
	r := reader{buf: b, message: "PeerPages"}
	r.header(TypePeerPages, 5)
	m.Seq = r.id("seq")
	m.Begin = r.flag("begin")
	m.End = r.flag("end")
	if m.Hints = r.bin("hints", 8*MaxBatchHints); r.err == nil && len(m.Hints)%8 != 0 {
		r.fail("hints", "not whole hints")
	}
	return r.done()
}

// Hint is the i-th of the hints.
func (m *PeerPages) Hint(i int) uint64 { return binary.LittleEndian.Uint64(m.Hints[8*i:]) }

// PeerLease asks a lender for leases on what it holds of consecutive pages, from the first on
// without a gap.
type PeerLease struct {
	ID          uint32
	Fingerprint []byte // of the space, FingerprintBytes long; aliases the input
	FirstPage   uint32 // index of the first page in its prefix
	Touch       bool   // nothing is leased: it is only counted, as a use
	// 0: Hashes are of all pages. Else, without Touch: so many pages are asked for, from the first
	// of a chunk on, and Hashes are of the last of each chunk of them
	Pages  uint32
	Hashes []byte // packed page hashes, at least one byte; aliases the input
}

// Type implements Message.
func (*PeerLease) Type() Type { return TypePeerLease }

// Append implements Message.
func (m *PeerLease) Append(dst []byte) []byte {
	dst = appendUint(appendHeader(dst, TypePeerLease, 7), uint64(m.ID))
	dst = appendBin(dst, m.Fingerprint)
	dst = appendUint(dst, uint64(m.FirstPage))
	return appendBin(appendUint(appendFlag(dst, m.Touch), uint64(m.Pages)), m.Hashes)
}

// Decode implements Message. It does not allocate.
func (m *PeerLease) Decode(b []byte, lim *Limits) error {
	r := reader{buf: b, message: "PeerLease"}
	r.header(TypePeerLease, 7)
	m.ID = r.u32("id")
	m.Fingerprint = r.fingerprint()
	m.FirstPage = r.u32("first_page")
	m.Touch = r.flag("touch")
	m.Pages = r.u32("pages")
	m.Hashes = r.bin("hashes", lim.Pages*MaxDigestBytes)
	if r.err == nil {
		switch {
		case len(m.Hashes) == 0:
			r.fail("hashes", "empty")
		case uint64(m.FirstPage)+uint64(len(m.Hashes)) > math.MaxUint32, uint64(m.FirstPage)+
			uint64(m.Pages) > math.MaxUint32:
			r.fail("first_page", "out of range")
		case m.Touch && m.Pages != 0:
			r.fail("pages", "must be 0 with touch")
		}
	}
	return r.done()
}

// PeerGrant answers a PeerLease.
type PeerGrant struct {
	ID    uint32
	Load  uint64 // handle for PeerRelease; 0: nothing was leased
	Pages uint32 // that are leased, or with Touch held, from the first asked for on
	More  bool   // the page after them is held, but cannot be leased now
	// as its bytes are just being checked, after a restart of the lender: it is to be asked for
	// again
	Soon    bool
	Extents []Extent // where the leased pages are, one for each chunk, in their order
}

// Type implements Message.
func (*PeerGrant) Type() Type { return TypePeerGrant }

// Append implements Message.
func (m *PeerGrant) Append(dst []byte) []byte {
	dst = appendUint(appendHeader(dst, TypePeerGrant, 7), uint64(m.ID))
	dst = appendUint(dst, m.Load)
	dst = appendFlag(appendFlag(appendUint(dst, uint64(m.Pages)), m.More), m.Soon)
	return appendExtents(dst, m.Extents)
}

// Decode implements Message. It does not allocate.
func (m *PeerGrant) Decode(b []byte, lim *Limits) error {
	r := reader{buf: b, message: "PeerGrant"}
	r.header(TypePeerGrant, 7)
	m.ID = r.u32("id")
	m.Load = r.u64("load")
	m.Pages = r.u32("pages")
	m.More = r.flag("more")
	m.Soon = r.flag("soon")
	m.Extents = r.extents("extents", m.Extents, lim.Extents)
	if r.err == nil && (m.Load == 0) != (len(m.Extents) == 0) {
		r.fail("extents", "must be empty without a load, and only then")
	}
	if r.err == nil && m.Soon && !m.More {
		r.fail("soon", "must not be set without more")
	}
	return r.done()
}

// PeerRelease ends leases. There is no reply.
type PeerRelease struct {
	Load    uint64   // 0: all that the borrower has, and is being granted; it is its last message
	Extents []uint32 // indices into PeerGrant.Extents, rising; none: all that are left of the load
	Bad     bool     // their bytes did not check out: their chunks are dropped
}

// Type implements Message.
func (*PeerRelease) Type() Type { return TypePeerRelease }

// Append implements Message.
func (m *PeerRelease) Append(dst []byte) []byte {
	dst = appendUint(appendHeader(dst, TypePeerRelease, 4), m.Load)
	return appendFlag(appendIndices(dst, m.Extents), m.Bad)
}

// Decode implements Message. It does not allocate.
func (m *PeerRelease) Decode(b []byte, lim *Limits) error {
	r := reader{buf: b, message: "PeerRelease"}
	r.header(TypePeerRelease, 4)
	m.Load = r.u64("load")
	m.Extents = r.indices("extents", m.Extents, lim.Extents)
	m.Bad = r.flag("bad")
	if r.err == nil && m.Load == 0 && (len(m.Extents) != 0 || m.Bad) {
		r.fail("extents", "must be empty without a load, and nothing bad")
	}
	return r.done()
}
