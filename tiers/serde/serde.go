// Package serde encodes pages for tiers on other machines. A codec works on one page at a time, so
// that the first pages of a chunk can be read alone.
package serde

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// ErrMalformed is returned by Decode for bytes that no Encode makes.
var ErrMalformed = errors.New("malformed")

// Codec encodes pages. It is safe for concurrent use.
type Codec interface {
	// Name returns the name that New takes, at most 15 bytes. It is stored with what was encoded.
	Name() string
	// Lossy reports whether Decode may return other bytes than Encode took.
	Lossy() bool
	// Encode appends the encoded page to dst, at most Bound(len(src)) bytes. The encoding of a page
	// may change between versions, but Decode reads those of all versions. element is the type of
	// the page's elements, as in tiers.Space, or "" if not known.
	Encode(dst, src []byte, element string) ([]byte, error)
	// Decode fills dst, which has the length of the page, from src, which is not trusted. It needs
	// at most a small multiple of the page as memory.
	Decode(dst, src []byte, element string) error
}

// Bound returns the largest encoding of a page of n bytes.
func Bound(n int64) int64 { return n + 64 }

// codecs has all codecs.
var codecs = []Codec{Raw{}, Lossless{}, FP8{}, Int8{}}

// Names returns the names of all codecs.
func Names() (names []string) {
	for _, c := range codecs {
		names = append(names, c.Name())
	}
	return names
}

// New returns the codec of a name.
func New(name string) (Codec, error) {
	if i := slices.IndexFunc(codecs, func(c Codec) bool { return c.Name() == name }); i >= 0 {
		return codecs[i], nil
	}
	return nil, fmt.Errorf("%q is no codec: there are %s", name, strings.Join(Names(), ", "))
}

// Raw leaves pages unchanged. Its users check for it and copy nothing.
type Raw struct{}

// Name implements Codec.
func (Raw) Name() string { return "raw" }

// Lossy implements Codec.
func (Raw) Lossy() bool { return false }

// Encode implements Codec.
func (Raw) Encode(dst, src []byte, _ string) ([]byte, error) { return append(dst, src...), nil }

// Decode implements Codec.
func (Raw) Decode(dst, src []byte, _ string) error {
	if len(src) != len(dst) {
		return fmt.Errorf("%w: %d bytes for a page of %d", ErrMalformed, len(src), len(dst))
	}
	copy(dst, src)
	return nil
}
