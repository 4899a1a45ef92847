package wire

import (
	"encoding/binary"
	"math"
)

// The messages between two sidecars of one host; see docs/protocol.md, "Between sidecars". The
// borrower connects. They talk about what the lender holds.

// MaxBatchHints is how many hints one [PeerPages] may carry.
const MaxBatchHints = (MaxPacketBytes - overheadBytes) / 8

// MaxLeasePages returns how many pages one PeerLease may name: their hashes fit a packet, and so
// does the grant.
func MaxLeasePages(digestBytes int) int {
	if digestBytes < 1 {
		return 0
	}
	return min(MaxExtents, (MaxPacketBytes-overheadBytes-FingerprintBytes)/digestBytes)
}

// PeerHello opens a connection between sidecars. The borrower sends it.
type PeerHello struct {
	Version    uint16 // written as [Version] when 0
	Generation uint64 // of this run of the borrower, never 0
}

func (m *PeerHello) fields(v *visitor) *visitor {
	v.begin(TypePeerHello)
	v.version(&m.Version)
	v.id("generation", &m.Generation)
	return v
}

// PeerWelcome accepts a borrower. The lender may send a Refuse instead.
type PeerWelcome struct {
	Version    uint16 // written as [Version] when 0
	Generation uint64 // of this run of the lender, never 0
	MaxPages   uint32 // pages that a PeerLease may name, at least 1; see also MaxLeasePages
}

func (m *PeerWelcome) fields(v *visitor) *visitor {
	v.begin(TypePeerWelcome)
	v.version(&m.Version)
	v.id("generation", &m.Generation)
	v.count("max_pages", &m.MaxPages)
	return v
}

// PeerSpace tells a borrower of a space that the lender has. It is sent again when more is known of
// the space.
type PeerSpace struct {
	Fingerprint   []byte // FingerprintBytes long; aliases the input
	PageTokens    uint32 // 0: not known
	PageBytes     uint64
	PagesPerChunk uint32
	DigestBytes   uint8
	Fields        []Field // what its worker declared, by rising key; none: not known
}

func (m *PeerSpace) fields(v *visitor) *visitor {
	v.begin(TypePeerSpace)
	v.exactly("fingerprint", &m.Fingerprint, FingerprintBytes)
	v.u32("page_tokens", &m.PageTokens)
	v.size("page_bytes", &m.PageBytes)
	v.check(m.PageBytes != 0, "page_bytes", "zero")
	v.count("pages_per_chunk", &m.PagesPerChunk)
	v.digest(&m.DigestBytes)
	v.named("fields", &m.Fields, v.lim.Fields)
	return v
}

// PeerPages tells a borrower what the lender holds, as a hint for each page: 8 bytes,
// little-endian. The lowest bit is 1 if the page is held from now on and 0 if not any more. The
// other bits are those of the XXH64 of the space's fingerprint and the page's hash. The last hint
// for a page holds. Only a grant is a promise.
type PeerPages struct {
	Seq   uint64 // counts these messages, from 1
	Begin bool   // all earlier hints are void
	// End means that the hints since the last Begin were all pages held at some moment since the
	// last message.
	End   bool
	Hints []byte // packed; aliases the input
}

func (m *PeerPages) fields(v *visitor) *visitor {
	v.begin(TypePeerPages)
	v.id("seq", &m.Seq)
	v.flag("begin", &m.Begin)
	v.flag("end", &m.End)
	v.bin("hints", &m.Hints, 8*MaxBatchHints)
	v.check(len(m.Hints)%8 == 0, "hints", "not whole hints")
	return v
}

// Hint returns the i-th of the hints.
func (m *PeerPages) Hint(i int) uint64 { return binary.LittleEndian.Uint64(m.Hints[8*i:]) }

// PeerLease asks a lender for leases on those of consecutive pages that it holds, from the first on
// without a gap.
type PeerLease struct {
	ID          uint32
	Fingerprint []byte // of the space, FingerprintBytes long; aliases the input
	FirstPage   uint32 // index of the first page in its prefix
	Touch       bool   // leases nothing: the pages are only counted as used
	// Pages is 0 if Hashes has the hashes of all pages. Otherwise it is how many pages are asked
	// for, from the first page of a chunk on, and Hashes has the hash of the last page of each
	// chunk. It is 0 with Touch.
	Pages  uint32
	Hashes []byte // packed page hashes, at least one byte; aliases the input
}

func (m *PeerLease) fields(v *visitor) *visitor {
	v.begin(TypePeerLease)
	v.u32("id", &m.ID)
	v.exactly("fingerprint", &m.Fingerprint, FingerprintBytes)
	v.u32("first_page", &m.FirstPage)
	v.flag("touch", &m.Touch)
	v.u32("pages", &m.Pages)
	v.bin("hashes", &m.Hashes, v.lim.Pages*MaxDigestBytes)
	v.check(len(m.Hashes) != 0, "hashes", "empty")
	n := max(uint64(m.Pages), uint64(len(m.Hashes)))
	v.check(uint64(m.FirstPage)+n <= math.MaxUint32, "first_page", "out of range")
	v.check(!m.Touch || m.Pages == 0, "pages", "must be 0 with touch")
	return v
}

// PeerGrant is the reply to a PeerLease.
type PeerGrant struct {
	ID    uint32
	Load  uint64 // handle for PeerRelease, 0 if nothing was leased
	Pages uint32 // leased, or with Touch held, from the first asked for on
	More  bool   // the page after them is held, but cannot be leased now
	// Soon is set, together with More, while the lender checks the page's bytes after a restart.
	// The borrower should ask again.
	Soon    bool
	Extents []Extent // where the leased pages are, one for each chunk, in their order
}

func (m *PeerGrant) fields(v *visitor) *visitor {
	v.begin(TypePeerGrant)
	v.u32("id", &m.ID)
	v.u64("load", &m.Load)
	v.u32("pages", &m.Pages)
	v.flag("more", &m.More)
	v.flag("soon", &m.Soon)
	v.extents("extents", &m.Extents)
	v.check((m.Load == 0) == (len(m.Extents) == 0), "extents",
		"must be empty without a load, and only then")
	v.check(!m.Soon || m.More, "soon", "must not be set without more")
	return v
}

// PeerRelease ends leases. There is no reply.
type PeerRelease struct {
	// Load is the handle of a grant. 0 ends everything that the borrower has or is being granted;
	// it is the borrower's last message.
	Load    uint64
	Extents []uint32 // indices into PeerGrant.Extents, rising; none: all that are left of the load
	Bad     bool     // the extents' bytes failed their checksum: their chunks are dropped
}

func (m *PeerRelease) fields(v *visitor) *visitor {
	v.begin(TypePeerRelease)
	v.u64("load", &m.Load)
	v.indices("extents", &m.Extents)
	v.flag("bad", &m.Bad)
	v.check(m.Load != 0 || len(m.Extents) == 0 && !m.Bad, "extents",
		"must be empty without a load, and nothing bad")
	return v
}
