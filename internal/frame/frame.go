// Package frame has the frame of headers on media: a magic of 8 bytes, a version of 4, and in the
// last 8 bytes a checksum, XXH3-64 of all before. Slabs and partitions of DAX devices have such
// headers.
package frame

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"github.com/zeebo/xxh3"
)

// Form is the frame of one kind of header, and the errors for a header without it.
type Form struct {
	Magic   string // 8 bytes
	Version uint32
	Seed    uint64 // of the checksum

	Foreign error // another magic
	Other   error // another version, whose checksum may be anywhere
	Corrupt error // a wrong checksum
}

// Begin writes magic and version into a block.
func (f *Form) Begin(block []byte) {
	copy(block, f.Magic)
	binary.LittleEndian.PutUint32(block[8:], f.Version)
}

// Seal writes the checksum of all before into the end of the block.
func (f *Form) Seal(block []byte) {
	at := len(block) - 8
	binary.LittleEndian.PutUint64(block[at:], xxh3.HashSeed(block[:at], f.Seed))
}

// Check returns nil if the block has this form, else one of the form's errors.
func (f *Form) Check(block []byte) error {
	if string(block[:8]) != f.Magic {
		return f.Foreign
	}
	if v := binary.LittleEndian.Uint32(block[8:]); v != f.Version {
		ours := bytes.Clone(block)
		f.Begin(ours)
		if f.intact(ours) { // a bit of the version has flipped
			return f.Corrupt
		}
		return fmt.Errorf("%w: version %d, this is for %d", f.Other, v, f.Version)
	}
	if !f.intact(block) {
		return f.Corrupt
	}
	return nil
}

func (f *Form) intact(block []byte) bool {
	at := len(block) - 8
	return xxh3.HashSeed(block[:at], f.Seed) == binary.LittleEndian.Uint64(block[at:])
}
