// Package handover has the messages by which a sidecar that serves passes its work to the next
// process (see docs/protocol.md), and their encoding. It knows no sockets.
//
// Each message has one function that names its fields. It encodes and decodes them, so that the two
// cannot differ. Numbers are varints; texts and lists have their length before them. Decoding
// trusts no length: a list can be no longer than the bytes that are left, and than its limit.
package handover

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
)

// ErrMalformed is wrapped by every error of [Decode].
var ErrMalformed = errors.New("malformed handover message")

// A Coder encodes the fields of a message, or decodes them. The first error of a decoding stays:
// all later fields are zero.
type Coder struct {
	buf      []byte
	decoding bool
	err      error
}

// Encode returns the encoding of the fields that f names.
func Encode(f func(c *Coder)) []byte {
	var c Coder
	f(&c)
	return c.buf
}

// Decode decodes b into the fields that f names. It fails if bytes are left. Texts and byte strings
// alias b.
func Decode(b []byte, f func(c *Coder)) error {
	c := Coder{buf: b, decoding: true}
	f(&c)
	if c.err == nil && len(c.buf) > 0 {
		c.Fail("%d bytes too many", len(c.buf))
	}
	return c.err
}

// Fail makes the decoding fail, unless it has failed already.
func (c *Coder) Fail(format string, args ...any) {
	if c.err == nil {
		c.err = fmt.Errorf("%w: %s", ErrMalformed, fmt.Sprintf(format, args...))
		c.buf = nil
	}
}

// Uint64 is a number.
func (c *Coder) Uint64(v *uint64) {
	if !c.decoding {
		c.buf = binary.AppendUvarint(c.buf, *v)
		return
	}
	*v = 0
	if c.err != nil {
		return
	}
	got, n := binary.Uvarint(c.buf)
	if n <= 0 {
		c.Fail("a number is cut short, or too large")
		return
	}
	*v, c.buf = got, c.buf[n:]
}

// Uint32 is a number of 32 bits.
func (c *Coder) Uint32(v *uint32) {
	wide := uint64(*v)
	if c.Uint64(&wide); wide > math.MaxUint32 {
		c.Fail("%d does not fit 32 bits", wide)
		wide = 0
	}
	*v = uint32(wide)
}

// Int64 is a number that is not negative.
func (c *Coder) Int64(v *int64) {
	wide := uint64(*v)
	if c.Uint64(&wide); wide > math.MaxInt64 {
		c.Fail("%d is too large", wide)
		wide = 0
	}
	*v = int64(wide)
}

// Int is a number from 0 to most.
func (c *Coder) Int(v *int, most int) {
	wide := uint64(*v)
	if c.Uint64(&wide); wide > uint64(most) {
		c.Fail("%d is more than %d", wide, most)
		wide = 0
	}
	*v = int(wide)
}

// Bool is true or false.
func (c *Coder) Bool(v *bool) {
	n := 0
	if *v {
		n = 1
	}
	c.Int(&n, 1)
	*v = n == 1
}

// Bytes is a byte string of at most most bytes. A decoded one aliases the input.
func (c *Coder) Bytes(v *[]byte, most int) {
	n := len(*v)
	c.Int(&n, most)
	if !c.decoding {
		c.buf = append(c.buf, *v...)
		return
	}
	if n > len(c.buf) {
		c.Fail("a text ends before its length")
		n = 0
	}
	*v, c.buf = c.buf[:n:n], c.buf[n:]
}

// Text is a text of at most most bytes. A longer one is cut when it is encoded.
func (c *Coder) Text(v *string, most int) {
	b := []byte(*v)
	b = b[:min(len(b), most)]
	c.Bytes(&b, most)
	*v = string(b)
}

// List is a list of at most most elements, each of at least one byte. each is called with every
// element in turn.
func List[T any](c *Coder, list *[]T, most int, each func(v *T)) {
	n := len(*list)
	c.Int(&n, most)
	if c.decoding {
		if *list = nil; n > len(c.buf) {
			c.Fail("a list of %d elements in %d bytes", n, len(c.buf))
			return
		}
		*list = make([]T, n)
	}
	for i := range *list {
		if each(&(*list)[i]); c.err != nil {
			*list = nil
			return
		}
	}
}
