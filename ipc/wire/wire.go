// Package wire has the messages between clients and the sidecar, their limits, and their bounded
// encoding. It knows no engine types.
//
// Every message is one msgpack array whose first element is the message's type. Each message lists
// its fields once, in a method fields(*visitor). The list serves both directions: Append walks it
// to write the message, Decode walks it to read one.
//
// The peer is a stranger and may send anything. So the list of fields is the only shape that Decode
// accepts: the exact number of fields and the exact types (integers of any msgpack width), no
// recursion and no trailing bytes. Every length is checked against the bytes left and a limit
// before it is used. msgpack.Unmarshal is not used: an 8-byte message makes it allocate gigabytes.
//
// Decode reads in place. A []byte or [Label] field of a decoded message aliases the decoded buffer
// and is valid only as long as that buffer; strings are copies. Decode reuses the slices of the
// message, so a caller that keeps one message decodes without allocating. Append writes the
// shortest form and does not fail: the caller keeps its own messages within the limits.
//
// testdata/vectors.json has golden messages, good ones and ones to refuse, which the Go and the
// Python tests both read.
package wire

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
)

// Version is the protocol version. Peers of different versions refuse each other.
const Version = 14

// MaxPacketBytes is the largest message on the session socket. A Unix datagram must fit the
// sender's buffer whole, so both ends set SO_SNDBUF to [SocketBufferBytes].
const MaxPacketBytes = 256 << 10

// SocketBufferBytes is the SO_SNDBUF that a session socket needs for [MaxPacketBytes] and the
// kernel's bookkeeping.
const SocketBufferBytes = 1 << 20

// MaxHeldFDs is how many descriptors may travel with a Hello.
const MaxHeldFDs = 64

// MaxAbout is how many properties of itself a client may name in a Hello.
const MaxAbout = 32

// Lengths of the byte strings in messages.
const (
	MaxDigestBytes   = 32 // the longest page hash
	FingerprintBytes = 32 // the fingerprint of a space
	SecretBytes      = 16 // the secret of a session
	TicketBytes      = 16 // a [Ticket]
	NamesBytes       = sha256.Size
	MaxTenantBytes   = 64 // the longest tenant, a str
	MaxRequestBytes  = 96 // the longest name of a request, a str
	MaxSourcesBytes  = 255
)

const (
	extentBytes   = 25  // encoded bytes of one Extent, at most
	overheadBytes = 160 // encoded bytes of a PrepareStore or a grant without its lists, at most

	// MaxExtents is the number of extents that fit one packet whatever their values. A store or
	// load that needs more must be split.
	MaxExtents = (MaxPacketBytes - overheadBytes) / extentBytes
)

// MaxStorePages returns how many pages one PrepareStore may name: their hashes, with the hash of
// the page before them, fit a packet, and so does the grant.
func MaxStorePages(digestBytes int) int {
	if digestBytes < 1 {
		return 0
	}
	return min(MaxExtents, (MaxPacketBytes-overheadBytes)/digestBytes-1)
}

// Limits caps what Decode accepts.
type Limits struct {
	// EngineIDBytes caps the engine id of a Hello.
	EngineIDBytes int
	// Fields caps the number of fields that a space declares. FieldKeyBytes and FieldValueBytes cap
	// the key and the value of each.
	Fields, FieldKeyBytes, FieldValueBytes int
	// TextBytes caps every other string: endpoints, codes, messages.
	TextBytes int
	// Pages caps the pages named by one lookup or store.
	Pages int
	// Extents caps the extents of a grant and the indices of a commit or release.
	Extents int
	// LMCacheIDBytes caps the lookup id of an LMCache message. LMCacheConfigs caps the entries of
	// its configs. LMCacheConfigBytes caps each key and value of the configs, or, in the multipart
	// form, the whole string.
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

// MessageBytes returns the length of the longest lookup message, native or LMCache's, within the
// limits. It sizes receive buffers, and sockets refuse longer messages.
func (l *Limits) MessageBytes() int {
	native := 320 + l.Pages*MaxDigestBytes
	lmcache := 256 + l.LMCacheIDBytes + l.Pages*(MaxDigestBytes+2+5) +
		l.LMCacheConfigs*2*(l.LMCacheConfigBytes+5)
	return max(native, lmcache)
}

// Ticket returns what a load must present to prove that the lookup's owner ordered it: the first
// bytes of an HMAC-SHA256 of the lookup's number, keyed by the session's secret. Both ends compute
// a ticket, so none is sent with the lookup or kept for it. A ticket tells nothing about another.
func Ticket(secret []byte, lookup uint64) (t [TicketBytes]byte) {
	var number [8]byte
	binary.LittleEndian.PutUint64(number[:], lookup)
	mac := hmac.New(sha256.New, secret)
	mac.Write(number[:])
	copy(t[:], mac.Sum(nil))
	return t
}

// Names returns one name for all pages of a load: the SHA-256 of the hashes of the last page of
// each chunk, packed in rising order. The last chunk ends where the load ends. A page hash names
// its whole prefix, so the last page of a chunk is enough.
func Names(ends []byte) [NamesBytes]byte { return sha256.Sum256(ends) }

// NamesOf returns the [Names] of consecutive pages from firstPage on, whose hashes are packed in
// hashes.
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
