// Package serde encodes pages on their way to tiers on other machines. A codec sees one page at a
// time, so that the first pages of a chunk can be read alone.
package serde

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// ErrMalformed is what a Decode of bytes returns that no Encode makes.
var ErrMalformed = errors.New("malformed")

// Codec encodes pages. It is safe for concurrent use.
type Codec interface {
	// Name is what New takes, at most 15 bytes. It is kept with what was encoded.
	Name() string
	// Lossy says that Decode may give other bytes than Encode took.
	Lossy() bool
	// Encode appends the encoded page to dst: never more than Bound(len(src)) bytes. Which bytes it
	// makes of the same page may change; all that any version of it ever made can be decoded.
	// element is what the page is made of, as tiers.Space has it, or "" if it is not known.
	Encode(dst, src []byte, element string) ([]byte, error)
	// Decode fills dst, whose length is that of the page, from src, which nobody vouches for. It
	// needs no more memory than a small multiple of the page.
	Decode(dst, src []byte, element string) error
}

// Bound is the most bytes that a page of n bytes can be encoded to.
func Bound(n int64) int64 { return n + 64 }

// codecs are all that there are, by their names.
var codecs = []Codec{Raw{}, Lossless{}, FP8{}, Int8{}}

// Names are the names of all codecs.
func Names() (names []string) {
	for _, c := range codecs {
		names = append(names, c.Name())
	}
	return names
}

// New is the codec of a name.
func New(name string) (Codec, error) {
	if i := slices.IndexFunc(codecs, func(c Codec) bool { return c.Name() == name }); i >= 0 {
		return codecs[i], nil
	}
	return nil, fmt.Errorf("%q is no codec: there are %s", name, strings.Join(Names(), ", "))
}

// Raw leaves pages as they are. Its users know it and copy nothing.
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
