package wire

import (
	"bytes"
	"encoding/binary"
	"math"
	"unicode/utf8"
)

// LMCacheRequest is a request of LMCache's asynchronous lookup client: a lookup, or the cleanup
// that ends one. It has two forms. One is a single frame: a msgpack map whose "type" is
// LookupRequestMsg or LookupCleanupMsg. The multipart form is that of earlier LMCache versions, and
// only for lookups. Its frames are
//
//	lookup_id (UTF-8), hashes (msgpack list), offsets (msgpack list), configs ("k%v@k%v")
//
// Hashes are 64-bit integers, or byte strings of one length. An integer becomes 8 bytes big-endian,
// in two's complement if negative.
type LMCacheRequest struct {
	Cleanup     bool     // a cleanup, which has only an ID
	Multipart   bool     // the form; the reply must have the same
	ID          []byte   // lookup id, UTF-8, not empty; aliases the input
	Hashes      []byte   // packed, DigestBytes each; the request's own buffer
	DigestBytes int      // 0 when there are no hashes
	Offsets     []uint32 // tokens of each chunk, as many as hashes; their sum fits 32 bits
	// Tagged is set if the configs have an "lmcache.tag." entry. LMCache makes such tags part of
	// every key, but not of the hashes. Chunks here have no tags, so a tagged lookup hits nothing.
	Tagged bool
}

const (
	lmcacheLookup   = "LookupRequestMsg"
	lmcacheCleanup  = "LookupCleanupMsg"
	lmcacheResponse = "LookupResponseMsg"
)

var (
	lmcacheTag   = []byte("lmcache.tag.")
	lmcacheAtTag = []byte("@lmcache.tag.")
)

// MaxLMCacheFrames is the number of frames of the multipart form.
const MaxLMCacheFrames = 4

// Decode replaces the request by the one in the frames. It allocates nothing once Hashes and
// Offsets have grown.
func (m *LMCacheRequest) Decode(frames [][]byte, lim *Limits) error {
	*m = LMCacheRequest{Hashes: m.Hashes[:0], Offsets: m.Offsets[:0]}
	switch len(frames) {
	case 1:
		return m.decodeMap(frames[0], lim)
	case MaxLMCacheFrames:
		m.Multipart = true
		return m.decodeFrames(frames, lim)
	}
	return &DecodeError{Message: "LMCache message", Reason: "neither 1 nor 4 frames"}
}

func (m *LMCacheRequest) decodeMap(b []byte, lim *Limits) error {
	const (
		hasType = 1 << iota
		hasID
		hasHashes
		hasOffsets
		hasConfigs
	)
	r := reader{buf: b, name: "LMCache message"}
	seen := 0
	mark := func(bit int) {
		if seen&bit != 0 {
			r.fail("", "duplicate field")
		}
		seen |= bit
	}
	for n := r.mapping("", 5); n > 0 && r.err == nil; n-- {
		switch key := r.strBytes("", len("request_configs")); string(key) {
		case "type":
			mark(hasType)
			switch tag := r.strBytes("type", len(lmcacheResponse)); string(tag) {
			case lmcacheLookup:
			case lmcacheCleanup:
				m.Cleanup = true
			default:
				r.fail("type", "neither a lookup nor a cleanup")
			}
		case "lookup_id":
			mark(hasID)
			m.ID = r.strBytes("lookup_id", lim.LMCacheIDBytes)
		case "hashes":
			mark(hasHashes)
			m.hashes(&r, lim)
		case "offsets":
			mark(hasOffsets)
			m.offsets(&r, lim)
		case "request_configs":
			mark(hasConfigs)
			m.configs(&r, lim)
		default:
			r.fail("", "unknown field")
		}
	}
	if r.err == nil {
		want, optional := hasType|hasID|hasHashes|hasOffsets, hasConfigs
		if m.Cleanup {
			want, optional = hasType|hasID, 0
		}
		if seen&^optional != want {
			r.fail("", "a field is missing or does not belong there")
		}
	}
	m.check(&r)
	return r.end()
}

func (m *LMCacheRequest) decodeFrames(frames [][]byte, lim *Limits) error {
	r := reader{name: "LMCache message"}
	if m.ID = frames[0]; len(m.ID) > lim.LMCacheIDBytes || !utf8.Valid(m.ID) {
		r.fail("lookup_id", "too long or not UTF-8")
		return r.err
	}
	configs := frames[3]
	if len(configs) > lim.LMCacheConfigBytes || !utf8.Valid(configs) {
		r.fail("request_configs", "too long or not UTF-8")
		return r.err
	}
	m.Tagged = bytes.HasPrefix(configs, lmcacheTag) || bytes.Contains(configs, lmcacheAtTag)
	r.buf = frames[1]
	m.hashes(&r, lim)
	if err := r.end(); err != nil {
		return err
	}
	r.buf, r.pos = frames[2], 0
	m.offsets(&r, lim)
	m.check(&r)
	return r.end()
}

// check compares the fields with each other.
func (m *LMCacheRequest) check(r *reader) {
	if r.err != nil {
		return
	}
	if len(m.ID) == 0 {
		r.fail("lookup_id", "empty")
		return
	}
	hashes := 0
	if m.DigestBytes > 0 {
		hashes = len(m.Hashes) / m.DigestBytes
	}
	if hashes != len(m.Offsets) {
		r.fail("offsets", "not as many as hashes")
	}
}

func (m *LMCacheRequest) hashes(r *reader, lim *Limits) {
	for n := r.array("hashes", lim.Pages); n > 0 && r.err == nil; n-- {
		size := 8
		if c := r.peek(); c >= 0xc4 && c <= 0xc6 {
			p := r.binBytes("hashes", MaxDigestBytes)
			if r.err == nil && len(p) == 0 {
				r.fail("hashes", "an empty hash")
			}
			size = len(p)
			m.Hashes = append(m.Hashes, p...)
		} else {
			v, _ := r.integer("hashes")
			m.Hashes = binary.BigEndian.AppendUint64(m.Hashes, v)
		}
		if m.DigestBytes == 0 {
			m.DigestBytes = size
		}
		if r.err == nil && size != m.DigestBytes {
			r.fail("hashes", "of different lengths")
		}
	}
}

func (m *LMCacheRequest) offsets(r *reader, lim *Limits) {
	sum := uint64(0)
	for n := r.array("offsets", lim.Pages); n > 0 && r.err == nil; n-- {
		v := r.uint("offsets", math.MaxUint32)
		if sum += v; sum > math.MaxUint32 {
			r.fail("offsets", "sum out of range")
		}
		m.Offsets = append(m.Offsets, uint32(v))
	}
}

// configs reads nil or a map from strings to scalars. It keeps only whether a tag is among them.
func (m *LMCacheRequest) configs(r *reader, lim *Limits) {
	if r.peek() == 0xc0 {
		r.code("request_configs")
		return
	}
	for n := r.mapping("request_configs", lim.LMCacheConfigs); n > 0 && r.err == nil; n-- {
		key := r.strBytes("request_configs", lim.LMCacheConfigBytes)
		m.Tagged = m.Tagged || bytes.HasPrefix(key, lmcacheTag)
		switch c := r.peek(); {
		case c == 0xc0 || c == 0xc2 || c == 0xc3: // nil, false, true
			r.code("request_configs")
		case c == 0xca || c == 0xcb: // float32, float64
			r.code("request_configs")
			r.take("request_configs", 4<<(c-0xca))
		case c >= 0xa0 && c <= 0xbf || c >= 0xd9 && c <= 0xdb:
			r.strBytes("request_configs", lim.LMCacheConfigBytes)
		default:
			r.integer("request_configs")
		}
	}
}

// peek returns the next byte without taking it. At the end it returns 0xc1, which msgpack never
// uses.
func (r *reader) peek() byte {
	if r.err != nil || r.pos >= len(r.buf) {
		return 0xc1
	}
	return r.buf[r.pos]
}

// AppendLMCacheResponse appends a LookupResponseMsg, the reply to a lookup of one frame.
func AppendLMCacheResponse(dst, id []byte, hitTokens uint32) []byte {
	dst = appendMap(dst, 3)
	dst = appendStr(appendStr(dst, "type"), lmcacheResponse)
	dst = appendStr(appendStr(dst, "lookup_id"), id)
	return appendUint(appendStr(dst, "num_hit_tokens"), uint64(hitTokens))
}

// AppendLMCacheTokens appends the second frame of the reply to a multipart lookup. The first is the
// lookup's id.
func AppendLMCacheTokens(dst []byte, hitTokens uint32) []byte {
	return binary.BigEndian.AppendUint32(dst, hitTokens)
}
