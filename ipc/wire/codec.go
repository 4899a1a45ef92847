package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"unicode/utf8"
)

// ErrMalformed is wrapped by every error of Decode for bytes that are not the message asked for,
// except [*VersionError].
var ErrMalformed = errors.New("malformed message")

// ErrVersion is wrapped by [*VersionError].
var ErrVersion = errors.New("protocol version differs")

// VersionError reports a message of another protocol version. Nothing behind the version has been
// looked at.
type VersionError struct {
	Got  uint64 // the version that the peer speaks
	Want uint64 // ours
}

func (e *VersionError) Error() string {
	return fmt.Sprintf("protocol version differs: want %d, got %d", e.Want, e.Got)
}

func (e *VersionError) Unwrap() error { return ErrVersion }

// DecodeError reports which field of which message was refused, and why.
type DecodeError struct {
	Message string // name of the message, such as "Lookup"
	Field   string // name of the field, or "" for the message as a whole
	Reason  string
}

func (e *DecodeError) Error() string {
	if e.Field == "" {
		return fmt.Sprintf("malformed %s: %s", e.Message, e.Reason)
	}
	return fmt.Sprintf("malformed %s: %s: %s", e.Message, e.Field, e.Reason)
}

func (e *DecodeError) Unwrap() error { return ErrMalformed }

// reader reads one msgpack message. The first failure sticks: every later call returns a zero
// value, so the caller reads straight through and checks the error once.
//
// It trusts no length. A count of elements is checked against the bytes left (an element takes at
// least one) and against the caller's limit before it is returned. It never recurses, and allocates
// nothing but the error.
type reader struct {
	buf  []byte
	pos  int
	of   Type   // the message, named by errors
	name string // instead of of, for what has no type
	err  error
}

func (r *reader) fail(field, reason string) {
	if r.err == nil {
		name := r.name
		if name == "" {
			name = r.of.String()
		}
		r.err = &DecodeError{Message: name, Field: field, Reason: reason}
		r.pos = len(r.buf)
	}
}

// take returns the next n bytes, aliasing the input.
func (r *reader) take(field string, n uint64) []byte {
	if r.err != nil {
		return nil
	}
	if n > uint64(len(r.buf)-r.pos) {
		r.fail(field, "ends before its declared length")
		return nil
	}
	p := r.buf[r.pos : r.pos+int(n) : r.pos+int(n)]
	r.pos += int(n)
	return p
}

func (r *reader) code(field string) byte {
	if r.err != nil {
		return 0
	}
	if r.pos >= len(r.buf) {
		r.fail(field, "missing")
		return 0
	}
	c := r.buf[r.pos]
	r.pos++
	return c
}

// word reads a big-endian unsigned integer of n bytes, n being 1, 2, 4 or 8.
func (r *reader) word(field string, n uint64) uint64 {
	p := r.take(field, n)
	switch len(p) {
	case 1:
		return uint64(p[0])
	case 2:
		return uint64(binary.BigEndian.Uint16(p))
	case 4:
		return uint64(binary.BigEndian.Uint32(p))
	case 8:
		return binary.BigEndian.Uint64(p)
	}
	return 0
}

// integer reads an integer of any msgpack width. It returns negative ones in two's complement and
// sets negative.
func (r *reader) integer(field string) (v uint64, negative bool) {
	// The common case first, as lists are long. After an error nothing is left to read.
	if p := r.buf[r.pos:]; len(p) > 8 {
		switch c := p[0]; {
		case c <= 0x7f:
			r.pos++
			return uint64(c), false
		case c == 0xcc:
			r.pos += 2
			return uint64(p[1]), false
		case c == 0xcd:
			r.pos += 3
			return uint64(binary.BigEndian.Uint16(p[1:])), false
		case c == 0xce:
			r.pos += 5
			return uint64(binary.BigEndian.Uint32(p[1:])), false
		case c == 0xcf:
			r.pos += 9
			return binary.BigEndian.Uint64(p[1:]), false
		}
	}
	c := r.code(field)
	switch {
	case r.err != nil:
	case c <= 0x7f:
		return uint64(c), false
	case c >= 0xe0:
		return uint64(int64(int8(c))), true
	case c >= 0xcc && c <= 0xcf:
		return r.word(field, 1<<(c-0xcc)), false
	case c >= 0xd0 && c <= 0xd3:
		n := uint64(1) << (c - 0xd0)
		v := r.word(field, n)
		shift := 64 - 8*n
		s := int64(v<<shift) >> shift
		return uint64(s), s < 0
	default:
		r.fail(field, "not an integer")
	}
	return 0, false
}

// uint reads an integer between 0 and limit.
func (r *reader) uint(field string, limit uint64) uint64 {
	v, negative := r.integer(field)
	if negative {
		r.fail(field, "negative")
		return 0
	}
	if v > limit {
		r.fail(field, "out of range")
		return 0
	}
	return v
}

func (r *reader) n32(field string) uint32 { return uint32(r.uint(field, math.MaxUint32)) }

// length checks a declared length against the bytes left and a limit.
func (r *reader) length(field string, n uint64, limit int) uint64 {
	if r.err != nil {
		return 0
	}
	if n > uint64(len(r.buf)-r.pos) {
		r.fail(field, "declares more than the message holds")
		return 0
	}
	if n > uint64(limit) {
		r.fail(field, "longer than its limit")
		return 0
	}
	return n
}

// binBytes reads a byte string of at most limit bytes, aliasing the input.
func (r *reader) binBytes(field string, limit int) []byte {
	c := r.code(field)
	if r.err != nil {
		return nil
	}
	if c < 0xc4 || c > 0xc6 {
		r.fail(field, "not a byte string")
		return nil
	}
	n := r.word(field, 1<<(c-0xc4))
	return r.take(field, r.length(field, n, limit))
}

// strBytes reads a UTF-8 string of at most limit bytes, aliasing the input.
func (r *reader) strBytes(field string, limit int) []byte {
	c := r.code(field)
	if r.err != nil {
		return nil
	}
	var n uint64
	switch {
	case c >= 0xa0 && c <= 0xbf:
		n = uint64(c & 0x1f)
	case c >= 0xd9 && c <= 0xdb:
		n = r.word(field, 1<<(c-0xd9))
	default:
		r.fail(field, "not a string")
		return nil
	}
	p := r.take(field, r.length(field, n, limit))
	if !utf8.Valid(p) {
		r.fail(field, "not UTF-8")
		return nil
	}
	return p
}

// array reads an array's header and returns its number of elements.
func (r *reader) array(field string, limit int) int {
	return r.elements(field, limit, 0x90, 0xdc, "not an array")
}

// mapping reads a map's header and returns its number of entries.
func (r *reader) mapping(field string, limit int) int {
	return r.elements(field, limit, 0x80, 0xde, "not a map")
}

// elements reads the header of an array or map. Short ones have the code fix with the length in its
// low bits; the codes wide and wide+1 have a length of 2 and of 4 bytes behind them.
func (r *reader) elements(field string, limit int, fix, wide byte, reason string) int {
	c := r.code(field)
	if r.err != nil {
		return 0
	}
	var n uint64
	switch {
	case c&0xf0 == fix:
		n = uint64(c & 0x0f)
	case c == wide:
		n = r.word(field, 2)
	case c == wide+1:
		n = r.word(field, 4)
	default:
		r.fail(field, reason)
		return 0
	}
	return int(r.length(field, n, limit))
}

// end refuses trailing bytes and returns the first error.
func (r *reader) end() error {
	if r.err == nil && r.pos != len(r.buf) {
		r.fail("", "trailing bytes")
	}
	return r.err
}

// maxFields is how many fields a message may have, the type included: as many as an array's header
// of one byte can say.
const maxFields = 15

// Peek returns the type of a message without looking further.
func Peek(msg []byte) (Type, error) {
	r := reader{buf: msg, name: "message"}
	r.array("", maxFields)
	t := r.uint("type", math.MaxUint8)
	return Type(t), r.err
}

// The functions below write the shortest form of each value, as msgspec and the compact form of
// msgpack/v5 do. So equal messages are equal bytes.

func appendUint(dst []byte, v uint64) []byte {
	switch {
	case v <= 0x7f:
		return append(dst, byte(v))
	case v <= math.MaxUint8:
		return append(dst, 0xcc, byte(v))
	case v <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(dst, 0xcd), uint16(v))
	case v <= math.MaxUint32:
		return binary.BigEndian.AppendUint32(append(dst, 0xce), uint32(v))
	}
	return binary.BigEndian.AppendUint64(append(dst, 0xcf), v)
}

func appendArray(dst []byte, n int) []byte {
	switch {
	case n <= 0x0f:
		return append(dst, 0x90|byte(n))
	case n <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(dst, 0xdc), uint16(n))
	}
	return binary.BigEndian.AppendUint32(append(dst, 0xdd), uint32(n))
}

func appendMap(dst []byte, n int) []byte {
	if n <= 0x0f {
		return append(dst, 0x80|byte(n))
	}
	return binary.BigEndian.AppendUint16(append(dst, 0xde), uint16(n))
}

func appendBin[B []byte | string](dst []byte, b B) []byte {
	switch n := len(b); {
	case n <= math.MaxUint8:
		dst = append(dst, 0xc4, byte(n))
	case n <= math.MaxUint16:
		dst = binary.BigEndian.AppendUint16(append(dst, 0xc5), uint16(n))
	default:
		dst = binary.BigEndian.AppendUint32(append(dst, 0xc6), uint32(n))
	}
	return append(dst, b...)
}

func appendStr[S ~[]byte | string](dst []byte, s S) []byte {
	switch n := len(s); {
	case n <= 0x1f:
		dst = append(dst, 0xa0|byte(n))
	case n <= math.MaxUint8:
		dst = append(dst, 0xd9, byte(n))
	case n <= math.MaxUint16:
		dst = binary.BigEndian.AppendUint16(append(dst, 0xda), uint16(n))
	default:
		dst = binary.BigEndian.AppendUint32(append(dst, 0xdb), uint32(n))
	}
	return append(dst, s...)
}

// clip cuts s to at most limit bytes without cutting a rune, and replaces what is not UTF-8. So any
// text, such as that of an error, can be decoded.
func clip(s string, limit int) string {
	if !utf8.ValidString(s) {
		s = string([]rune(s))
	}
	if len(s) <= limit {
		return s
	}
	for limit > 0 && !utf8.RuneStart(s[limit]) {
		limit--
	}
	return s[:limit]
}
