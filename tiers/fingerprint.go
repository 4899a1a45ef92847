package tiers

import (
	"crypto/sha256"
	"encoding/hex"
)

// Fingerprint identifies a space: everything that must agree for KV bytes to be reusable (model,
// dtype, layout, ranks, hash seed, …).
type Fingerprint [sha256.Size]byte

// FingerprintOf returns the fingerprint of a canonical encoding of a space. The encoding must be
// injective: equal bytes if and only if every field is equal.
func FingerprintOf(canonical []byte) Fingerprint { return sha256.Sum256(canonical) }

// String returns the whole fingerprint in hexadecimal.
func (f Fingerprint) String() string { return hex.EncodeToString(f[:]) }

// Short returns a part of the fingerprint, for logs and tables only, never for comparing.
func (f Fingerprint) Short() string { return hex.EncodeToString(f[:6]) }
