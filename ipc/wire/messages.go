// Package wire has the messages between clients and the sidecar, their limits,
// and their bounded decoding. It knows no engine types.
//
// Every message is one msgpack array whose first element is its type. The peer
// is a stranger: it may send anything. So the decoders are written by hand,
// with the schema as their only shape: exact number of fields, exact types
// (integers of any msgpack width), no recursion, no trailing bytes, and no
// length believed before it was checked against the bytes left and a limit.
// msgpack.Unmarshal is not used: an 8-byte message makes it allocate gigabytes.
//
// Decoding reads in place. A []byte field of a decoded message aliases the
// buffer that it was decoded from and is valid only as long as that is; strings
// are copies. Slices of a message are reused when it is decoded into again, so a
// caller that keeps one message value decodes without allocating. Encoding
// appends to the caller's buffer in the shortest form and does not fail: it is
// the caller who keeps its own messages within the limits.
//
// testdata/vectors.json has golden messages, good ones and ones to refuse,
// which the Go and the Python tests both read.
package wire

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"math"
	"strconv"
)

// Version is the protocol version. Peers of different versions refuse each other.
const Version = 8

// MaxPacketBytes is the largest message on the session socket. A Unix datagram
// must fit the sender's buffer whole, so both ends set SO_SNDBUF to
// [SocketBufferBytes].
const MaxPacketBytes = 256 << 10

// SocketBufferBytes is the SO_SNDBUF that a session socket needs for
// [MaxPacketBytes] and the kernel's bookkeeping.
const SocketBufferBytes = 1 << 20

// MaxDigestBytes is the longest page hash.
const MaxDigestBytes = 32

// FingerprintBytes is the length of a space's fingerprint.
const FingerprintBytes = 32

// SecretBytes is the length of a session's secret, TicketBytes that of a [Ticket], and NamesBytes
// that of [Names].
const (
	SecretBytes = 16
	TicketBytes = 16
	NamesBytes  = sha256.Size
)

const (
	maxArity      = 16 // fields of any message, type included
	extentBytes   = 25 // encoded bytes of one Extent, at most
	overheadBytes = 96 // encoded bytes of a PrepareStore or a grant without its lists, at most

	// MaxExtents is the number of extents that fit one packet whatever they are.
	// A store or load that needs more must be asked for in parts.
	MaxExtents = (MaxPacketBytes - overheadBytes) / extentBytes
)

// MaxStorePages is the number of pages of one PrepareStore whose hashes, with
// the one before them, fit a packet and whose grants do too.
func MaxStorePages(digestBytes int) int {
	if digestBytes < 1 {
		return 0
	}
	return min(MaxExtents, (MaxPacketBytes-overheadBytes)/digestBytes-1)
}

// Limits caps what a decoder accepts.
type Limits struct {
	// EngineIDBytes caps the engine id of a Hello.
	EngineIDBytes int
	// Fields caps how many fields a space declares; FieldKeyBytes and
	// FieldValueBytes cap each.
	Fields, FieldKeyBytes, FieldValueBytes int
	// TextBytes caps every other string: endpoints, codes, messages.
	TextBytes int
	// Pages caps the pages named by one lookup or store.
	Pages int
	// Extents caps the extents of a grant and the indices of a commit or release.
	Extents int
	// LMCacheIDBytes caps the lookup id of an LMCache message;
	// LMCacheConfigs the entries and LMCacheConfigBytes each key and value of its
	// configs (the whole string, in the multipart form).
	LMCacheIDBytes, LMCacheConfigs, LMCacheConfigBytes int
}

// DefaultLimits are the limits of the protocol.
var DefaultLimits = Limits{
	EngineIDBytes:      256,
	Fields:             64,
	FieldKeyBytes:      64,
	FieldValueBytes:    512,
	TextBytes:          1024,
	Pages:              65536,
	Extents:            MaxExtents,
	LMCacheIDBytes:     256,
	LMCacheConfigs:     64,
	LMCacheConfigBytes: 4096,
}

// MessageBytes is the longest lookup message, native or LMCache's, that fits
// the limits: the size of a receive buffer, and what a socket refuses beyond.
func (l *Limits) MessageBytes() int {
	native := 128 + l.Pages*MaxDigestBytes
	lmcache := 256 + l.LMCacheIDBytes + l.Pages*(MaxDigestBytes+2+5) +
		l.LMCacheConfigs*2*(l.LMCacheConfigBytes+5)
	return max(native, lmcache)
}

// Ticket is what a load proves by that it was ordered by whoever made the lookup: the start of an
// HMAC-SHA256 of the lookup's number, keyed by the session's secret. Both ends can compute it, so
// that it is neither sent with the lookup nor kept for it, and who has one learns nothing about
// another.
func Ticket(secret []byte, lookup uint64) (t [TicketBytes]byte) {
	var number [8]byte
	binary.LittleEndian.PutUint64(number[:], lookup)
	mac := hmac.New(sha256.New, secret)
	mac.Write(number[:])
	copy(t[:], mac.Sum(nil))
	return t
}

// Names is one name for the pages of a load: the SHA-256 of the page hashes at which its chunks
// end, one behind the other, in rising order. The last chunk ends where the load does. A page hash
// names all of its prefix, so that no other is needed.
func Names(ends []byte) [NamesBytes]byte { return sha256.Sum256(ends) }

// NamesOf is Names of pages whose hashes are given, packed, the first being that of firstPage.
func NamesOf(hashes []byte, digestBytes, firstPage, pagesPerChunk int) (names [NamesBytes]byte) {
	h := sha256.New()
	for page, n := firstPage, len(hashes)/digestBytes; page < firstPage+n; {
		page = min(firstPage+n, (page/pagesPerChunk+1)*pagesPerChunk)
		at := (page - 1 - firstPage) * digestBytes
		h.Write(hashes[at : at+digestBytes])
	}
	h.Sum(names[:0])
	return names
}

// Type is the first element of a message.
type Type uint8

// The types. Session socket below 60, lookup sockets from 60, between sidecars from 70 (and
// RegionAdded, RegionRemoved, RegionUnmapped, Refuse).
const (
	TypeHello          Type = 1
	TypeWelcome        Type = 2
	TypeRefuse         Type = 3
	TypePrepareStore   Type = 10
	TypeStoreGrant     Type = 11
	TypeCommitStore    Type = 12
	TypeAbortStore     Type = 13
	TypePrepareLoad    Type = 20
	TypeLoadGrant      Type = 21
	TypeRelease        Type = 22
	TypePing           Type = 30
	TypePong           Type = 31
	TypeClearSpace     Type = 32
	TypeCleared        Type = 33
	TypeReadEvents     Type = 34
	TypeEvents         Type = 35
	TypePrefilled      Type = 36
	TypeRegionAdded    Type = 40
	TypeRegionRemoved  Type = 41
	TypeRegionUnmapped Type = 42
	TypeRegionMapped   Type = 43
	TypeNotice         Type = 44
	TypeError          Type = 50
	TypeLookup         Type = 60
	TypeLookupResult   Type = 61
	TypeTrim           Type = 62
	TypeCancel         Type = 63
	TypeLookupPending  Type = 64

	TypePeerHello   Type = 70
	TypePeerWelcome Type = 71
	TypePeerSpace   Type = 72
	TypePeerPages   Type = 73
	TypePeerLease   Type = 74
	TypePeerGrant   Type = 75
	TypePeerRelease Type = 76
)

var typeNames = map[Type]string{
	TypeHello: "Hello", TypeWelcome: "Welcome", TypeRefuse: "Refuse",
	TypePrepareStore: "PrepareStore", TypeStoreGrant: "StoreGrant", TypeCommitStore: "CommitStore",
	TypeAbortStore:  "AbortStore",
	TypePrepareLoad: "PrepareLoad", TypeLoadGrant: "LoadGrant", TypeRelease: "Release",
	TypePing: "Ping", TypePong: "Pong", TypeClearSpace: "ClearSpace", TypeCleared: "Cleared",
	TypeReadEvents: "ReadEvents", TypeEvents: "Events", TypePrefilled: "Prefilled",
	TypeRegionAdded: "RegionAdded", TypeRegionRemoved: "RegionRemoved",
	TypeRegionUnmapped: "RegionUnmapped", TypeRegionMapped: "RegionMapped",
	TypeNotice: "Notice",
	TypeError:  "Error",
	TypeLookup: "Lookup", TypeLookupResult: "LookupResult", TypeTrim: "Trim", TypeCancel: "Cancel",
	TypeLookupPending: "LookupPending",
	TypePeerHello:     "PeerHello", TypePeerWelcome: "PeerWelcome", TypePeerSpace: "PeerSpace",
	TypePeerPages: "PeerPages",
	TypePeerLease: "PeerLease", TypePeerGrant: "PeerGrant", TypePeerRelease: "PeerRelease",
}

// String names the type as the struct is named.
func (t Type) String() string {
	if s, ok := typeNames[t]; ok {
		return s
	}
	return "Type(" + strconv.Itoa(int(t)) + ")"
}

// Message is any message of this package.
type Message interface {
	// Type is the message's first element.
	Type() Type
	// Append appends the encoded message to dst.
	Append(dst []byte) []byte
	// Decode replaces the message by the one that b holds. On an error, which
	// wraps [ErrMalformed] or [ErrVersion], its content is undefined.
	Decode(b []byte, lim *Limits) error
}

// New returns an empty message of a type, or nil if there is no such type.
func New(t Type) Message {
	switch t {
	case TypeHello:
		return new(Hello)
	case TypeWelcome:
		return new(Welcome)
	case TypeRefuse:
		return new(Refuse)
	case TypePrepareStore:
		return new(PrepareStore)
	case TypeStoreGrant:
		return new(StoreGrant)
	case TypeCommitStore:
		return new(CommitStore)
	case TypeAbortStore:
		return new(AbortStore)
	case TypePrepareLoad:
		return new(PrepareLoad)
	case TypeLoadGrant:
		return new(LoadGrant)
	case TypeRelease:
		return new(Release)
	case TypePing:
		return new(Ping)
	case TypePong:
		return new(Pong)
	case TypeClearSpace:
		return new(ClearSpace)
	case TypeCleared:
		return new(Cleared)
	case TypeReadEvents:
		return new(ReadEvents)
	case TypeEvents:
		return new(Events)
	case TypePrefilled:
		return new(Prefilled)
	case TypeRegionAdded:
		return new(RegionAdded)
	case TypeRegionRemoved:
		return new(RegionRemoved)
	case TypeRegionUnmapped:
		return new(RegionUnmapped)
	case TypeRegionMapped:
		return new(RegionMapped)
	case TypeNotice:
		return new(Notice)
	case TypeError:
		return new(Error)
	case TypeLookup:
		return new(Lookup)
	case TypeLookupResult:
		return new(LookupResult)
	case TypeTrim:
		return new(Trim)
	case TypeCancel:
		return new(Cancel)
	case TypeLookupPending:
		return new(LookupPending)
	case TypePeerHello:
		return new(PeerHello)
	case TypePeerWelcome:
		return new(PeerWelcome)
	case TypePeerSpace:
		return new(PeerSpace)
	case TypePeerPages:
		return new(PeerPages)
	case TypePeerLease:
		return new(PeerLease)
	case TypePeerGrant:
		return new(PeerGrant)
	case TypePeerRelease:
		return new(PeerRelease)
	}
	return nil
}

// Roles of a session.
const (
	RoleScheduler = "scheduler"
	RoleWorker    = "worker"
)

// Field is one named property of a space.
type Field struct{ Key, Value string }

// Hello opens a session. A worker declares its space; a scheduler may leave
// PageBytes 0 and give fewer fields, but what it gives must equal its worker's.
type Hello struct {
	Version  uint16 // set by Append to [Version] when 0
	Role     string // RoleScheduler or RoleWorker
	EngineID string
	Rank     uint32
	// ranks from Rank on that a scheduler asks for at once, as they share a space; set by Append to
	// 1 when 0, as it is for workers
	Ranks         uint32
	PageTokens    uint32  // tokens of a page, at least 1
	PageBytes     uint64  // KV bytes of a page
	PagesPerChunk uint32  // at least 1
	DigestBytes   uint8   // length of a page hash, 1 to MaxDigestBytes
	Fields        []Field // by rising Key, unique
}

// Type implements Message.
func (*Hello) Type() Type { return TypeHello }

// Append implements Message.
func (m *Hello) Append(dst []byte) []byte {
	dst = appendVersioned(dst, TypeHello, 11, m.Version)
	dst = appendStr(dst, m.Role)
	dst = appendStr(dst, m.EngineID)
	dst = appendUint(dst, uint64(m.Rank))
	dst = appendUint(dst, uint64(max(1, m.Ranks)))
	dst = appendUint(dst, uint64(m.PageTokens))
	dst = appendUint(dst, m.PageBytes)
	dst = appendUint(dst, uint64(m.PagesPerChunk))
	dst = appendUint(dst, uint64(m.DigestBytes))
	return appendFields(dst, m.Fields)
}

// Decode implements Message.
func (m *Hello) Decode(b []byte, lim *Limits) error {
	r := reader{buf: b, message: "Hello"}
	m.Version = r.versioned(TypeHello, 11)
	m.Role = r.str("role", len(RoleScheduler))
	if r.err == nil && m.Role != RoleScheduler && m.Role != RoleWorker {
		r.fail("role", "neither scheduler nor worker")
	}
	m.EngineID = r.str("engine_id", lim.EngineIDBytes)
	m.Rank = r.u32("rank")
	m.Ranks = r.u32("ranks")
	m.PageTokens = r.u32("page_tokens")
	m.PageBytes = r.uint("page_bytes", math.MaxInt64)
	m.PagesPerChunk = r.u32("pages_per_chunk")
	m.DigestBytes = uint8(r.uint("digest_bytes", MaxDigestBytes))
	if r.err == nil {
		switch {
		case m.Ranks == 0:
			r.fail("ranks", "zero")
		case m.Ranks > 1 && m.Role == RoleWorker:
			r.fail("ranks", "a worker is one rank")
		case uint64(m.Rank)+uint64(m.Ranks) > math.MaxUint32+1:
			r.fail("ranks", "out of range")
		case m.PageTokens == 0:
			r.fail("page_tokens", "zero")
		case m.PagesPerChunk == 0:
			r.fail("pages_per_chunk", "zero")
		case m.DigestBytes == 0:
			r.fail("digest_bytes", "zero")
		case m.PageBytes == 0 && m.Role == RoleWorker:
			r.fail("page_bytes", "zero")
		}
	}
	m.Fields = r.fields(m.Fields, lim)
	return r.done()
}

func appendVersioned(dst []byte, t Type, arity int, version uint16) []byte {
	if version == 0 {
		version = Version
	}
	return appendUint(appendHeader(dst, t, arity), uint64(version))
}

// Welcome accepts a session. The control region's fd travels with it.
type Welcome struct {
	Version uint16 // set by Append to [Version] when 0
	Session uint64 // never 0; not a secret: status names it
	// SecretBytes long: what the client sends on the lookup socket, and its reply socket's routing
	// id
	Secret         []byte
	Generation     uint64 // of this run of the sidecar
	Fingerprint    []byte // of the space, FingerprintBytes long
	LookupEndpoint string // ZMQ endpoint that the sidecar's PULL is bound to
	ReplyEndpoint  string // ZMQ endpoint that the sidecar's ROUTER is bound to, "" for workers
	Regions        uint32 // how many RegionAdded follow at once, 0 for schedulers
	MaxPages       uint32 // pages a Lookup or PrepareStore may name; see also MaxStorePages
	LeaseMs        uint32 // how long an answered lookup keeps its lease, ms
	// names the sidecars of this host that lend each other what they hold, this one among them:
	// theirs is the same number; 0: it is alone
	Peers uint64
}

// Type implements Message.
func (*Welcome) Type() Type { return TypeWelcome }

// Append implements Message.
func (m *Welcome) Append(dst []byte) []byte {
	dst = appendVersioned(dst, TypeWelcome, 12, m.Version)
	dst = appendUint(dst, m.Session)
	dst = appendBin(dst, m.Secret)
	dst = appendUint(dst, m.Generation)
	dst = appendBin(dst, m.Fingerprint)
	dst = appendStr(dst, m.LookupEndpoint)
	dst = appendStr(dst, m.ReplyEndpoint)
	dst = appendUint(dst, uint64(m.Regions))
	dst = appendUint(dst, uint64(m.MaxPages))
	dst = appendUint(dst, uint64(m.LeaseMs))
	return appendUint(dst, m.Peers)
}

// Decode implements Message.
func (m *Welcome) Decode(b []byte, lim *Limits) error {
	r := reader{buf: b, message: "Welcome"}
	m.Version = r.versioned(TypeWelcome, 12)
	m.Session = r.id("session")
	m.Secret = r.exactly("secret", SecretBytes)
	m.Generation = r.u64("generation")
	m.Fingerprint = r.exactly("fingerprint", FingerprintBytes)
	m.LookupEndpoint = r.str("lookup_endpoint", lim.TextBytes)
	m.ReplyEndpoint = r.str("reply_endpoint", lim.TextBytes)
	m.Regions = r.u32("regions")
	m.MaxPages = r.u32("max_pages")
	m.LeaseMs = r.u32("lease_ms")
	m.Peers = r.u64("peers")
	return r.done()
}

// Codes of a Refuse.
const (
	RefuseVersion      = "version"      // another protocol version
	RefuseIncompatible = "incompatible" // the space disagrees with one it must agree with
	RefuseNoWorker     = "no_worker"    // a scheduler came before its worker: try again
	RefuseBusy         = "busy"         // no room for another session: try again
	RefuseDraining     = "draining"     // the sidecar is going away
	RefuseLimit        = "limit"        // a configured limit is in the way
	RefuseMalformed    = "malformed"    // the Hello could not be decoded
)

// Refuse refuses a session; the sidecar closes the socket behind it.
type Refuse struct {
	Version uint16 // set by Append to [Version] when 0
	Code    string // Refuse…
	Field   string // the field that disagrees, or ""
	Want    string // the sidecar's value of it
	Got     string // the client's value of it
	Message string // for people
}

// Type implements Message.
func (*Refuse) Type() Type { return TypeRefuse }

// Append implements Message. Texts are cut to their limit.
func (m *Refuse) Append(dst []byte) []byte {
	limit := DefaultLimits.TextBytes
	dst = appendVersioned(dst, TypeRefuse, 7, m.Version)
	dst = appendStr(dst, clip(m.Code, limit))
	dst = appendStr(dst, clip(m.Field, limit))
	dst = appendStr(dst, clip(m.Want, limit))
	dst = appendStr(dst, clip(m.Got, limit))
	return appendStr(dst, clip(m.Message, limit))
}

// Decode implements Message.
func (m *Refuse) Decode(b []byte, lim *Limits) error {
	r := reader{buf: b, message: "Refuse"}
	m.Version = r.versioned(TypeRefuse, 7)
	m.Code = r.str("code", lim.TextBytes)
	m.Field = r.str("field", lim.TextBytes)
	m.Want = r.str("want", lim.TextBytes)
	m.Got = r.str("got", lim.TextBytes)
	m.Message = r.str("message", lim.TextBytes)
	return r.done()
}

// PrepareStore asks for room for the pages from FirstPage on that are not held. Where several
// workers hold the same pages each asks for every nth chunk: for those whose number in the prefix
// leaves Which when divided by Every.
type PrepareStore struct {
	ID        uint32
	FirstPage uint32 // index of the first page in its prefix, a multiple of PagesPerChunk
	Prev      []byte // hash of the page before, empty when FirstPage is 0; aliases the input
	Hashes    []byte // packed page hashes, at least one byte; aliases the input
	Every     uint32 // set by Append to 1, all chunks, when 0
	Which     uint32 // below Every
}

// Type implements Message.
func (*PrepareStore) Type() Type { return TypePrepareStore }

// Append implements Message.
func (m *PrepareStore) Append(dst []byte) []byte {
	dst = appendHeader(dst, TypePrepareStore, 7)
	dst = appendUint(dst, uint64(m.ID))
	dst = appendUint(dst, uint64(m.FirstPage))
	dst = appendBin(dst, m.Prev)
	dst = appendBin(dst, m.Hashes)
	dst = appendUint(dst, uint64(max(1, m.Every)))
	return appendUint(dst, uint64(m.Which))
}

// Decode implements Message. It does not allocate.
func (m *PrepareStore) Decode(b []byte, lim *Limits) error {
	r := reader{buf: b, message: "PrepareStore"}
	r.header(TypePrepareStore, 7)
	m.ID = r.u32("id")
	m.FirstPage = r.u32("first_page")
	m.Prev = r.bin("prev", MaxDigestBytes)
	m.Hashes = r.bin("hashes", lim.Pages*MaxDigestBytes)
	if r.err == nil {
		switch {
		case len(m.Hashes) == 0:
			r.fail("hashes", "empty")
		case (m.FirstPage == 0) != (len(m.Prev) == 0):
			r.fail("prev", "must be empty for the first page of a prefix, and only there")
		case len(m.Prev) != 0 && len(m.Hashes)%len(m.Prev) != 0:
			r.fail("hashes", "not whole hashes")
		case uint64(m.FirstPage)+uint64(len(m.Hashes)) > math.MaxUint32:
			r.fail("first_page", "out of range")
		}
	}
	m.Every = r.u32("every")
	m.Which = r.u32("which")
	if r.err == nil && m.Which >= m.Every {
		r.fail("which", "not below every")
	}
	return r.done()
}

// Extent is a run of consecutive pages in a region.
type Extent struct {
	Page   uint32 // index, in its prefix, of the first page
	Pages  uint32 // how many, at least 1
	Region uint32
	Offset uint64 // of the first page in the region, bytes
}

func appendExtents(dst []byte, extents []Extent) []byte {
	dst = appendArray(dst, len(extents))
	for i := range extents {
		e := &extents[i]
		dst = appendArray(dst, 4)
		dst = appendUint(dst, uint64(e.Page))
		dst = appendUint(dst, uint64(e.Pages))
		dst = appendUint(dst, uint64(e.Region))
		dst = appendUint(dst, e.Offset)
	}
	return dst
}

func (r *reader) extents(field string, into []Extent, limit int) []Extent {
	n := r.array(field, limit)
	into = into[:0]
	for i := 0; i < n && r.err == nil; i++ {
		if r.pos < len(r.buf) && r.buf[r.pos] == 0x94 { // as we send it
			r.pos++
		} else if r.array(field, 4) != 4 {
			r.fail(field, "an extent has four fields")
		}
		e := Extent{Page: r.u32(field), Pages: r.u32(field), Region: r.u32(field),
			Offset: r.uint(field, math.MaxInt64)}
		if r.err == nil && (e.Pages == 0 || uint64(e.Page)+uint64(e.Pages) > math.MaxUint32) {
			r.fail(field, "pages out of range")
		}
		into = append(into, e)
	}
	return into
}

// StoreGrant answers PrepareStore: where to copy what is not held.
type StoreGrant struct {
	ID     uint32
	Store  uint64 // handle for CommitStore, 0 if there is nothing to store
	Held   uint32 // pages asked for that are held already
	Shed   uint32 // pages refused for want of room
	Grants []Extent
}

// Type implements Message.
func (*StoreGrant) Type() Type { return TypeStoreGrant }

// Append implements Message.
func (m *StoreGrant) Append(dst []byte) []byte {
	dst = appendHeader(dst, TypeStoreGrant, 6)
	dst = appendUint(dst, uint64(m.ID))
	dst = appendUint(dst, m.Store)
	dst = appendUint(dst, uint64(m.Held))
	dst = appendUint(dst, uint64(m.Shed))
	return appendExtents(dst, m.Grants)
}

// Decode implements Message.
func (m *StoreGrant) Decode(b []byte, lim *Limits) error {
	r := reader{buf: b, message: "StoreGrant"}
	r.header(TypeStoreGrant, 6)
	m.ID = r.u32("id")
	m.Store = r.u64("store")
	m.Held = r.u32("held")
	m.Shed = r.u32("shed")
	m.Grants = r.extents("grants", m.Grants, lim.Extents)
	if r.err == nil && (m.Store == 0) != (len(m.Grants) == 0) {
		r.fail("grants", "must be empty without a store, and only then")
	}
	return r.done()
}

func appendIndices(dst []byte, indices []uint32) []byte {
	dst = appendArray(dst, len(indices))
	for _, i := range indices {
		dst = appendUint(dst, uint64(i))
	}
	return dst
}

func (r *reader) indices(field string, into []uint32, limit int) []uint32 {
	n := r.array(field, limit)
	into = into[:0]
	for i := 0; i < n && r.err == nil; i++ {
		v := r.u32(field)
		if i > 0 && r.err == nil && v <= into[i-1] {
			r.fail(field, "not in rising order")
		}
		into = append(into, v)
	}
	return into
}

// CommitStore makes a store visible, but for the grants whose copy failed.
// There is no reply.
type CommitStore struct {
	Store  uint64
	Failed []uint32 // indices into StoreGrant.Grants, rising
}

// Type implements Message.
func (*CommitStore) Type() Type { return TypeCommitStore }

// Append implements Message.
func (m *CommitStore) Append(dst []byte) []byte {
	dst = appendHeader(dst, TypeCommitStore, 3)
	return appendIndices(appendUint(dst, m.Store), m.Failed)
}

// Decode implements Message.
func (m *CommitStore) Decode(b []byte, lim *Limits) error {
	r := reader{buf: b, message: "CommitStore"}
	r.header(TypeCommitStore, 3)
	m.Store = r.id("store")
	m.Failed = r.indices("failed", m.Failed, lim.Extents)
	return r.done()
}

// AbortStore gives a store up. There is no reply.
type AbortStore struct{ Store uint64 }

// Type implements Message.
func (*AbortStore) Type() Type { return TypeAbortStore }

// Append implements Message.
func (m *AbortStore) Append(dst []byte) []byte {
	return appendUint(appendHeader(dst, TypeAbortStore, 2), m.Store)
}

// Decode implements Message.
func (m *AbortStore) Decode(b []byte, _ *Limits) error {
	r := reader{buf: b, message: "AbortStore"}
	r.header(TypeAbortStore, 2)
	m.Store = r.id("store")
	return r.done()
}

// PrepareLoad takes over what a scheduler's lookup has leased.
type PrepareLoad struct {
	ID        uint32
	Session   uint64 // the scheduler's
	Lookup    uint64 // the scheduler's
	Ticket    []byte // the lookup's, see [Ticket]; aliases the input
	FirstPage uint32
	Pages     uint32 // at least 1
	Names     []byte // of the pages, see [Names]; aliases the input
}

// Type implements Message.
func (*PrepareLoad) Type() Type { return TypePrepareLoad }

// Append implements Message.
func (m *PrepareLoad) Append(dst []byte) []byte {
	dst = appendHeader(dst, TypePrepareLoad, 8)
	dst = appendUint(dst, uint64(m.ID))
	dst = appendUint(dst, m.Session)
	dst = appendUint(dst, m.Lookup)
	dst = appendBin(dst, m.Ticket)
	dst = appendUint(dst, uint64(m.FirstPage))
	dst = appendUint(dst, uint64(m.Pages))
	return appendBin(dst, m.Names)
}

// Decode implements Message.
func (m *PrepareLoad) Decode(b []byte, lim *Limits) error {
	r := reader{buf: b, message: "PrepareLoad"}
	r.header(TypePrepareLoad, 8)
	m.ID = r.u32("id")
	m.Session = r.id("session")
	m.Lookup = r.u64("lookup")
	m.Ticket = r.exactly("ticket", TicketBytes)
	m.FirstPage = r.u32("first_page")
	m.Pages = uint32(r.uint("pages", uint64(lim.Pages)))
	m.Names = r.exactly("names", NamesBytes)
	if r.err == nil && (m.Pages == 0 || uint64(m.FirstPage)+uint64(m.Pages) > math.MaxUint32) {
		r.fail("pages", "out of range")
	}
	return r.done()
}

// LoadGrant answers PrepareLoad: where the pages are.
type LoadGrant struct {
	ID   uint32
	Load uint64 // handle for Release, never 0
	// of the pages that lie there, by the sidecar's index: see [Names]; aliases the input
	Names   []byte
	Extents []Extent
}

// Type implements Message.
func (*LoadGrant) Type() Type { return TypeLoadGrant }

// Append implements Message.
func (m *LoadGrant) Append(dst []byte) []byte {
	dst = appendHeader(dst, TypeLoadGrant, 5)
	dst = appendUint(dst, uint64(m.ID))
	dst = appendUint(dst, m.Load)
	dst = appendBin(dst, m.Names)
	return appendExtents(dst, m.Extents)
}

// Decode implements Message.
func (m *LoadGrant) Decode(b []byte, lim *Limits) error {
	r := reader{buf: b, message: "LoadGrant"}
	r.header(TypeLoadGrant, 5)
	m.ID = r.u32("id")
	m.Load = r.id("load")
	m.Names = r.exactly("names", NamesBytes)
	m.Extents = r.extents("extents", m.Extents, lim.Extents)
	return r.done()
}

// Release ends a load. Chunks of bad extents are dropped. There is no reply.
type Release struct {
	Load uint64
	Bad  []uint32 // indices into LoadGrant.Extents, rising
}

// Type implements Message.
func (*Release) Type() Type { return TypeRelease }

// Append implements Message.
func (m *Release) Append(dst []byte) []byte {
	dst = appendHeader(dst, TypeRelease, 3)
	return appendIndices(appendUint(dst, m.Load), m.Bad)
}

// Decode implements Message.
func (m *Release) Decode(b []byte, lim *Limits) error {
	r := reader{buf: b, message: "Release"}
	r.header(TypeRelease, 3)
	m.Load = r.id("load")
	m.Bad = r.indices("bad", m.Bad, lim.Extents)
	return r.done()
}

// Ping asks for a Pong.
type Ping struct{ ID uint32 }

// Type implements Message.
func (*Ping) Type() Type { return TypePing }

// Append implements Message.
func (m *Ping) Append(dst []byte) []byte {
	return appendNumber(dst, TypePing, m.ID)
}

// Decode implements Message.
func (m *Ping) Decode(b []byte, _ *Limits) (err error) {
	m.ID, err = decodeNumber(b, TypePing, "id")
	return err
}

// Pong answers a Ping.
type Pong struct {
	ID         uint32
	Generation uint64
}

// Type implements Message.
func (*Pong) Type() Type { return TypePong }

// Append implements Message.
func (m *Pong) Append(dst []byte) []byte {
	return appendUint(appendUint(appendHeader(dst, TypePong, 3), uint64(m.ID)), m.Generation)
}

// Decode implements Message.
func (m *Pong) Decode(b []byte, _ *Limits) error {
	r := reader{buf: b, message: "Pong"}
	r.header(TypePong, 3)
	m.ID = r.u32("id")
	m.Generation = r.u64("generation")
	return r.done()
}

// ClearSpace drops every chunk of the session's space.
type ClearSpace struct{ ID uint32 }

// Type implements Message.
func (*ClearSpace) Type() Type { return TypeClearSpace }

// Append implements Message.
func (m *ClearSpace) Append(dst []byte) []byte {
	return appendNumber(dst, TypeClearSpace, m.ID)
}

// Decode implements Message.
func (m *ClearSpace) Decode(b []byte, _ *Limits) (err error) {
	m.ID, err = decodeNumber(b, TypeClearSpace, "id")
	return err
}

// Cleared answers ClearSpace.
type Cleared struct {
	ID     uint32
	Chunks uint32 // how many were dropped
}

// Type implements Message.
func (*Cleared) Type() Type { return TypeCleared }

// Append implements Message.
func (m *Cleared) Append(dst []byte) []byte {
	return appendUint(appendUint(appendHeader(dst, TypeCleared, 3), uint64(m.ID)), uint64(m.Chunks))
}

// Decode implements Message.
func (m *Cleared) Decode(b []byte, _ *Limits) error {
	r := reader{buf: b, message: "Cleared"}
	r.header(TypeCleared, 3)
	m.ID = r.u32("id")
	m.Chunks = r.u32("chunks")
	return r.done()
}

// ReadEvents asks a sidecar what has changed in the session's space since the
// session asked before.
type ReadEvents struct{ ID uint32 }

// Type implements Message.
func (*ReadEvents) Type() Type { return TypeReadEvents }

// Append implements Message.
func (m *ReadEvents) Append(dst []byte) []byte {
	return appendNumber(dst, TypeReadEvents, m.ID)
}

// Decode implements Message. It does not allocate.
func (m *ReadEvents) Decode(b []byte, _ *Limits) (err error) {
	m.ID, err = decodeNumber(b, TypeReadEvents, "id")
	return err
}

// Run is pages that came or went together.
type Run struct {
	Removed bool   // they cannot be found any more; else they can
	Hashes  []byte // packed page hashes, at least one byte; aliases the input
}

// Events answers ReadEvents.
type Events struct {
	ID    uint32
	Reset bool // what was told before is void
	More  bool // there is more at once
	Runs  []Run
}

// Type implements Message.
func (*Events) Type() Type { return TypeEvents }

// Append implements Message.
func (m *Events) Append(dst []byte) []byte {
	dst = appendUint(appendHeader(dst, TypeEvents, 5), uint64(m.ID))
	dst = appendArray(appendFlag(appendFlag(dst, m.Reset), m.More), len(m.Runs))
	for i := range m.Runs {
		dst = appendBin(appendFlag(appendArray(dst, 2), m.Runs[i].Removed), m.Runs[i].Hashes)
	}
	return dst
}

// Decode implements Message. It allocates only for more runs than it had before.
func (m *Events) Decode(b []byte, lim *Limits) error {
	r := reader{buf: b, message: "Events"}
	r.header(TypeEvents, 5)
	m.ID = r.u32("id")
	m.Reset = r.flag("reset")
	m.More = r.flag("more")
	n := r.array("runs", lim.Pages)
	m.Runs = m.Runs[:0]
	for i := 0; i < n && r.err == nil; i++ {
		if r.array("runs", 2) != 2 {
			r.fail("runs", "a run has two fields")
		}
		run := Run{Removed: r.flag("runs"), Hashes: r.bin("runs", MaxPacketBytes)}
		if r.err == nil && len(run.Hashes) == 0 {
			r.fail("runs", "empty")
		}
		m.Runs = append(m.Runs, run)
	}
	return r.done()
}

// Prefilled tells what became of one request: how many of its tokens vLLM's own
// cache did not have, and where they came from. A scheduler sends it once for each
// time that vLLM admits a request, to one session of each sidecar. There is no
// reply. The sidecar only counts.
type Prefilled struct {
	Tokens uint32 // that vLLM's own cache did not have
	Found  uint32 // of these, from the first on: held by the sidecars of all ranks
	Loaded uint32 // of these, from the first on: loaded; vLLM computes the others
}

// Type implements Message.
func (*Prefilled) Type() Type { return TypePrefilled }

// Append implements Message.
func (m *Prefilled) Append(dst []byte) []byte {
	dst = appendUint(appendHeader(dst, TypePrefilled, 4), uint64(m.Tokens))
	return appendUint(appendUint(dst, uint64(m.Found)), uint64(m.Loaded))
}

// Decode implements Message. It does not allocate.
func (m *Prefilled) Decode(b []byte, _ *Limits) error {
	r := reader{buf: b, message: "Prefilled"}
	r.header(TypePrefilled, 4)
	m.Tokens = r.u32("tokens")
	m.Found = r.u32("found")
	m.Loaded = r.u32("loaded")
	if r.err == nil && (m.Found > m.Tokens || m.Loaded > m.Tokens) {
		r.fail("tokens", "less than a part of them")
	}
	return r.done()
}

// RegionAdded tells a worker of a region to map; its fd travels with it.
type RegionAdded struct {
	Region     uint32 // not that of a region that there was before in this run
	Generation uint64
	Kind       string // such as "memfd"
	Offset     uint64 // of the region in its fd, bytes: a multiple of PageSize
	SizeBytes  uint64 // at least 1
	// bytes of the pages that back it, at least 1; the address that it is mapped at must be a
	// multiple, too
	PageSize uint64
	// it is another sidecar's: to be mapped for reading only, as the fd may allow no more
	ReadOnly bool
}

// Type implements Message.
func (*RegionAdded) Type() Type { return TypeRegionAdded }

// Append implements Message.
func (m *RegionAdded) Append(dst []byte) []byte {
	dst = appendHeader(dst, TypeRegionAdded, 8)
	dst = appendUint(dst, uint64(m.Region))
	dst = appendUint(dst, m.Generation)
	dst = appendStr(dst, m.Kind)
	dst = appendUint(dst, m.Offset)
	dst = appendUint(dst, m.SizeBytes)
	dst = appendUint(dst, m.PageSize)
	return appendFlag(dst, m.ReadOnly)
}

// Decode implements Message.
func (m *RegionAdded) Decode(b []byte, lim *Limits) error {
	r := reader{buf: b, message: "RegionAdded"}
	r.header(TypeRegionAdded, 8)
	m.Region = r.u32("region")
	m.Generation = r.u64("generation")
	m.Kind = r.str("kind", lim.TextBytes)
	m.Offset = r.uint("offset", math.MaxInt64)
	m.SizeBytes = r.uint("size", math.MaxInt64)
	m.PageSize = r.uint("page_size", math.MaxInt64)
	m.ReadOnly = r.flag("read_only")
	if r.err == nil {
		switch {
		case m.SizeBytes == 0:
			r.fail("size", "zero")
		case m.PageSize == 0:
			r.fail("page_size", "zero")
		case m.Offset%m.PageSize != 0:
			r.fail("offset", "not a multiple of the page size")
		case m.Offset+m.SizeBytes > math.MaxInt64:
			r.fail("offset", "out of range")
		}
	}
	return r.done()
}

// RegionRemoved tells a worker to unmap a region, once no copy of its own is left
// that began before, and to say so by RegionUnmapped. No grant or lease that is
// open names the region.
type RegionRemoved struct{ Region uint32 }

// Type implements Message.
func (*RegionRemoved) Type() Type { return TypeRegionRemoved }

// Append implements Message.
func (m *RegionRemoved) Append(dst []byte) []byte {
	return appendNumber(dst, TypeRegionRemoved, m.Region)
}

// Decode implements Message.
func (m *RegionRemoved) Decode(b []byte, _ *Limits) (err error) {
	m.Region, err = decodeNumber(b, TypeRegionRemoved, "region")
	return err
}

// RegionUnmapped answers RegionRemoved: the worker has the region mapped no more.
// There is no reply.
type RegionUnmapped struct{ Region uint32 }

// Type implements Message.
func (*RegionUnmapped) Type() Type { return TypeRegionUnmapped }

// Append implements Message.
func (m *RegionUnmapped) Append(dst []byte) []byte {
	return appendNumber(dst, TypeRegionUnmapped, m.Region)
}

// Decode implements Message.
func (m *RegionUnmapped) Decode(b []byte, _ *Limits) (err error) {
	m.Region, err = decodeNumber(b, TypeRegionUnmapped, "region")
	return err
}

// RegionMapped says that a worker can copy into a region that came after its
// handshake, or has found that it never will. There is no reply.
type RegionMapped struct{ Region uint32 }

// Type implements Message.
func (*RegionMapped) Type() Type { return TypeRegionMapped }

// Append implements Message.
func (m *RegionMapped) Append(dst []byte) []byte {
	return appendNumber(dst, TypeRegionMapped, m.Region)
}

// Decode implements Message.
func (m *RegionMapped) Decode(b []byte, _ *Limits) (err error) {
	m.Region, err = decodeNumber(b, TypeRegionMapped, "region")
	return err
}

// Notice tells a client what its user should know. It may come at any time after
// the handshake, and is not answered.
type Notice struct{ Text string }

// Type implements Message.
func (*Notice) Type() Type { return TypeNotice }

// Append implements Message.
func (m *Notice) Append(dst []byte) []byte {
	return appendStr(appendHeader(dst, TypeNotice, 2), clip(m.Text, DefaultLimits.TextBytes))
}

// Decode implements Message.
func (m *Notice) Decode(b []byte, lim *Limits) error {
	r := reader{buf: b, message: "Notice"}
	r.header(TypeNotice, 2)
	m.Text = r.str("text", lim.TextBytes)
	return r.done()
}

// Codes of an Error.
const (
	CodeNotFound     = "not_found"    // no such lookup, store or load, or its lease has gone
	CodeStale        = "stale"        // of an earlier generation
	CodeIncompatible = "incompatible" // the two sessions are not of one space
	CodeBusy         = "busy"         // a limit is reached: try later
	CodeMalformed    = "malformed"    // the request makes no sense
	CodeClosed       = "closed"       // the sidecar is going away
)

// Error answers the request ID instead of its grant.
type Error struct {
	ID      uint32
	Code    string // Code…
	Message string // for people
}

// Type implements Message.
func (*Error) Type() Type { return TypeError }

// Append implements Message. Texts are cut to their limit.
func (m *Error) Append(dst []byte) []byte {
	dst = appendUint(appendHeader(dst, TypeError, 4), uint64(m.ID))
	dst = appendStr(dst, clip(m.Code, DefaultLimits.TextBytes))
	return appendStr(dst, clip(m.Message, DefaultLimits.TextBytes))
}

// Decode implements Message.
func (m *Error) Decode(b []byte, lim *Limits) error {
	r := reader{buf: b, message: "Error"}
	r.header(TypeError, 4)
	m.ID = r.u32("id")
	m.Code = r.str("code", lim.TextBytes)
	m.Message = r.str("message", lim.TextBytes)
	return r.done()
}

// Lookup asks how much of a prefix is held, and leases it. One with a session
// and lookup already used frees the earlier one first. Slower tiers know chunks
// only by all their pages: a first page within a chunk hits in them only if
// memory holds the rest of that chunk, so ask from the chunk's first page.
type Lookup struct {
	Session   uint64 // the asking scheduler's session
	Secret    []byte // that session's; aliases the input
	Lookup    uint64 // chosen by the client, unique in its session
	FirstPage uint32 // index of the first page asked for
	// hash of the page before; empty when FirstPage is 0 or it is not known; aliases the input
	Prev   []byte
	Hashes []byte // packed page hashes, at least one byte; aliases the input
	// the answer is of no use after so many ms, the wait after a LookupPending included; 0: not
	// said
	DeadlineMs  uint32
	RecomputeUs uint32 // what computing one page anew takes, µs, 0 when it is not known
}

// Type implements Message.
func (*Lookup) Type() Type { return TypeLookup }

// Append implements Message.
func (m *Lookup) Append(dst []byte) []byte {
	dst = appendHeader(dst, TypeLookup, 9)
	dst = appendUint(dst, m.Session)
	dst = appendBin(dst, m.Secret)
	dst = appendUint(dst, m.Lookup)
	dst = appendUint(dst, uint64(m.FirstPage))
	dst = appendBin(dst, m.Prev)
	dst = appendBin(dst, m.Hashes)
	dst = appendUint(dst, uint64(m.DeadlineMs))
	return appendUint(dst, uint64(m.RecomputeUs))
}

// Decode implements Message. It does not allocate.
func (m *Lookup) Decode(b []byte, lim *Limits) error {
	r := reader{buf: b, message: "Lookup"}
	r.header(TypeLookup, 9)
	m.Session = r.id("session")
	m.Secret = r.exactly("secret", SecretBytes)
	m.Lookup = r.u64("lookup")
	m.FirstPage = r.u32("first_page")
	m.Prev = r.bin("prev", MaxDigestBytes)
	m.Hashes = r.bin("hashes", lim.Pages*MaxDigestBytes)
	m.DeadlineMs = r.u32("deadline_ms")
	m.RecomputeUs = r.u32("recompute_us")
	if r.err == nil {
		switch {
		case len(m.Hashes) == 0:
			r.fail("hashes", "empty")
		case m.FirstPage == 0 && len(m.Prev) != 0:
			r.fail("prev", "must be empty for the first page of a prefix")
		case len(m.Prev) != 0 && len(m.Hashes)%len(m.Prev) != 0:
			r.fail("hashes", "not whole hashes")
		case uint64(m.FirstPage)+uint64(len(m.Hashes)) > math.MaxUint32:
			r.fail("first_page", "out of range")
		}
	}
	return r.done()
}

// LookupResult answers a Lookup.
type LookupResult struct {
	Lookup    uint64
	HitPages  uint32 // consecutive, from the lookup's first page
	HitTokens uint32 // the same in tokens
}

// Type implements Message.
func (*LookupResult) Type() Type { return TypeLookupResult }

// Append implements Message.
func (m *LookupResult) Append(dst []byte) []byte {
	dst = appendHeader(dst, TypeLookupResult, 4)
	dst = appendUint(dst, m.Lookup)
	dst = appendUint(dst, uint64(m.HitPages))
	return appendUint(dst, uint64(m.HitTokens))
}

// Decode implements Message. It does not allocate.
func (m *LookupResult) Decode(b []byte, _ *Limits) error {
	r := reader{buf: b, message: "LookupResult"}
	r.header(TypeLookupResult, 4)
	m.Lookup = r.u64("lookup")
	m.HitPages = r.u32("hit_pages")
	m.HitTokens = r.u32("hit_tokens")
	return r.done()
}

// LookupPending tells the asker of a Lookup, before its result, that what it asks
// for is on its way from a slower tier. A later one takes the place of an earlier
// one.
type LookupPending struct {
	Lookup uint64
	Pages  uint32 // the hit to expect, from the lookup's first page; at least 1
	EtaMs  uint32 // when to expect it, ms from now
}

// Type implements Message.
func (*LookupPending) Type() Type { return TypeLookupPending }

// Append implements Message.
func (m *LookupPending) Append(dst []byte) []byte {
	dst = appendHeader(dst, TypeLookupPending, 4)
	dst = appendUint(dst, m.Lookup)
	dst = appendUint(dst, uint64(m.Pages))
	return appendUint(dst, uint64(m.EtaMs))
}

// Decode implements Message. It does not allocate.
func (m *LookupPending) Decode(b []byte, _ *Limits) error {
	r := reader{buf: b, message: "LookupPending"}
	r.header(TypeLookupPending, 4)
	m.Lookup = r.u64("lookup")
	m.Pages = r.u32("pages")
	m.EtaMs = r.u32("eta_ms")
	if r.err == nil && m.Pages == 0 {
		r.fail("pages", "zero")
	}
	return r.done()
}

// Trim frees a lookup's leases on chunks wholly below FirstPage.
type Trim struct {
	Session   uint64
	Secret    []byte // the session's; aliases the input
	Lookup    uint64
	FirstPage uint32
}

// Type implements Message.
func (*Trim) Type() Type { return TypeTrim }

// Append implements Message.
func (m *Trim) Append(dst []byte) []byte {
	dst = appendHeader(dst, TypeTrim, 5)
	dst = appendUint(dst, m.Session)
	dst = appendBin(dst, m.Secret)
	dst = appendUint(dst, m.Lookup)
	return appendUint(dst, uint64(m.FirstPage))
}

// Decode implements Message. It does not allocate.
func (m *Trim) Decode(b []byte, _ *Limits) error {
	r := reader{buf: b, message: "Trim"}
	r.header(TypeTrim, 5)
	m.Session = r.id("session")
	m.Secret = r.exactly("secret", SecretBytes)
	m.Lookup = r.u64("lookup")
	m.FirstPage = r.u32("first_page")
	return r.done()
}

// Cancel frees a lookup's leases.
type Cancel struct {
	Session uint64
	Secret  []byte // the session's; aliases the input
	Lookup  uint64
}

// Type implements Message.
func (*Cancel) Type() Type { return TypeCancel }

// Append implements Message.
func (m *Cancel) Append(dst []byte) []byte {
	dst = appendHeader(dst, TypeCancel, 4)
	return appendUint(appendBin(appendUint(dst, m.Session), m.Secret), m.Lookup)
}

// Decode implements Message. It does not allocate.
func (m *Cancel) Decode(b []byte, _ *Limits) error {
	r := reader{buf: b, message: "Cancel"}
	r.header(TypeCancel, 4)
	m.Session = r.id("session")
	m.Secret = r.exactly("secret", SecretBytes)
	m.Lookup = r.u64("lookup")
	return r.done()
}
