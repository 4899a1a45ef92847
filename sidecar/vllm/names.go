// Package vllm names the pages of a prompt as vLLM does, and gets the tokens of a text from a vLLM
// server. It is for commands: a sidecar only ever sees names.
//
// A page is named by vLLM's hash of its last block, which covers the whole prefix: H((hash of the
// block before, token ids, extra keys)). The worker declares H, the start value of the first block
// and the block size as fields of its space. pyclient/tests/test_names.py compares the names with
// vLLM's own hasher and writes testdata/names.json.
package vllm

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/fxamacker/cbor/v2"
	"github.com/zeebo/xxh3"
)

// A Scheme describes how one space names pages.
type Scheme struct {
	pageTokens int
	hashTokens int // tokens of one of vLLM's blocks; a page has one or more blocks
	first      []byte
	encode     func(parent []byte, tokens []uint32, salt any) ([]byte, error)
	digest     func([]byte) []byte
	salted     func(salt string) any // nil: this vLLM's names for salted prompts are unknown
}

// These are the two forms of vLLM's extra keys for a request with an adapter and a salt. The
// connector declares the digest of one of them as hash_keys; see _key_format in
// pyclient/lookaside/space.py.
const (
	taggedKeys = "(('lora', 'name', 'path'), ('cache_salt', 'salt'))" // from 0.31 on
	bareKeys   = "('name', 'salt')"
)

// SchemeOf returns the scheme of a space by its fields. The error describes what is unknown.
func SchemeOf(fields map[string]string, pageTokens int) (*Scheme, error) {
	s := &Scheme{pageTokens: pageTokens, hashTokens: pageTokens}
	if v, ok := fields["hash_tokens"]; ok {
		n, err := strconv.Atoi(v)
		if err != nil || n <= 0 || pageTokens%n != 0 {
			return nil, fmt.Errorf("the space has blocks of %q tokens in pages of %d", v,
				pageTokens)
		}
		s.hashTokens = n
	}
	algorithm := fields["hash"]
	switch algorithm {
	case "sha256", "sha256_cbor":
		s.digest = func(b []byte) []byte { d := sha256.Sum256(b); return d[:] }
	case "xxhash", "xxhash_cbor":
		s.digest = func(b []byte) []byte { d := xxh3.Hash128(b).Bytes(); return d[:] }
	case "":
		return nil, errors.New("the space does not say how its pages are named (it has no field hash): give page hashes")
	default:
		return nil, fmt.Errorf("pages of this space are named by %q, which is not known here: give page hashes, or use --prefix-caching-hash-algo sha256_cbor", algorithm)
	}
	pickled := !strings.HasSuffix(algorithm, "_cbor")
	if s.encode = encodeCBOR; pickled {
		s.encode = encodePickle
	}
	var err error
	if s.first, err = hex.DecodeString(fields["none_hash"]); err != nil || len(s.first) == 0 {
		return nil, fmt.Errorf("names of this space begin with a random number that only its vLLM knows: set PYTHONHASHSEED there, or use --prefix-caching-hash-algo sha256_cbor")
	}
	switch form := keyForm(fields["hash_keys"], pickled); form {
	case taggedKeys:
		s.salted = func(salt string) any { return []any{[]any{"cache_salt", salt}} }
	case bareKeys:
		s.salted = func(salt string) any { return []any{salt} }
	}
	return s, nil
}

// keyForm returns the form whose digest was declared, or "".
func keyForm(declared string, pickled bool) string {
	for _, form := range []string{taggedKeys, bareKeys} {
		texts := []string{form}
		if pickled { // the connector then adds Python's version
			texts = nil
			for minor := 9; minor < 30; minor++ {
				texts = append(texts, fmt.Sprintf("%s python 3.%d", form, minor))
			}
		}
		for _, text := range texts {
			if d := sha256.Sum256([]byte(text)); hex.EncodeToString(d[:16]) == declared {
				return form
			}
		}
	}
	return ""
}

// Pages returns the names of a prompt's whole pages, in hexadecimal. salt is the request's
// cache_salt, or "".
func (s *Scheme) Pages(tokens []uint32, salt string) ([]string, error) {
	if len(tokens) < s.pageTokens {
		return nil, fmt.Errorf("the prompt has %d tokens, and a page has %d: what is shorter than a page is not stored under a name of its own", len(tokens), s.pageTokens)
	}
	var extra any
	if salt != "" {
		if s.salted == nil {
			return nil, errors.New("how this vLLM names prompts with a cache_salt is not known here: give page hashes")
		}
		extra = s.salted(salt)
	}
	var pages []string
	parent := s.first
	for end := s.hashTokens; end <= len(tokens)/s.pageTokens*s.pageTokens; end += s.hashTokens {
		b, err := s.encode(parent, tokens[end-s.hashTokens:end], extra)
		if err != nil {
			return nil, err
		}
		// a salt is part of the first block's hash, and so of all later ones
		parent, extra = s.digest(b), nil
		if end%s.pageTokens == 0 {
			pages = append(pages, hex.EncodeToString(parent))
		}
	}
	return pages, nil
}

var canonical = func() cbor.EncMode {
	mode, err := cbor.CanonicalEncOptions().EncMode()
	if err != nil {
		panic(err)
	}
	return mode
}()

// encodeCBOR returns cbor2.dumps(…, canonical=True).
func encodeCBOR(parent []byte, tokens []uint32, extra any) ([]byte, error) {
	return canonical.Marshal([]any{parent, tokens, extra})
}

// maxPickle is the size at which Python begins a second frame.
const maxPickle = 64 << 10

// encodePickle returns pickle.dumps(…, protocol=5) of (bytes, tuple of ints, None or a tuple), as
// CPython writes it. Each object that could be referred to again is followed by MEMOIZE, even if
// nothing refers to it.
func encodePickle(parent []byte, tokens []uint32, extra any) ([]byte, error) {
	const memoize = 0x94
	var b []byte
	if len(parent) > math.MaxUint8 {
		return nil, fmt.Errorf("a hash of %d bytes", len(parent))
	}
	b = append(b, 'C', byte(len(parent)))
	b = append(append(b, parent...), memoize)
	if len(tokens) > 3 {
		b = append(b, '(')
	}
	for _, t := range tokens {
		switch {
		case t <= math.MaxUint8:
			b = append(b, 'K', byte(t))
		case t <= math.MaxUint16:
			b = binary.LittleEndian.AppendUint16(append(b, 'M'), uint16(t))
		case t <= math.MaxInt32:
			b = binary.LittleEndian.AppendUint32(append(b, 'J'), t)
		default:
			return nil, fmt.Errorf("%d is no token id", t)
		}
	}
	b = append(b, tupleEnd(len(tokens)), memoize)
	var add func(v any) error
	add = func(v any) error {
		switch v := v.(type) {
		case nil:
			b = append(b, 'N')
		case string:
			if len(v) <= math.MaxUint8 {
				b = append(b, 0x8c, byte(len(v)))
			} else {
				b = binary.LittleEndian.AppendUint32(append(b, 'X'), uint32(len(v)))
			}
			b = append(append(b, v...), memoize)
		case []any:
			for _, e := range v {
				if err := add(e); err != nil {
					return err
				}
			}
			b = append(b, tupleEnd(len(v)), memoize)
		default:
			return fmt.Errorf("%T cannot be pickled here", v)
		}
		return nil
	}
	if err := add(extra); err != nil {
		return nil, err
	}
	b = append(b, tupleEnd(3), memoize, '.')
	if len(b) > maxPickle {
		return nil, fmt.Errorf("blocks of %d tokens are too long to be named by pickles here: use --prefix-caching-hash-algo sha256_cbor", len(tokens))
	}
	out := binary.LittleEndian.AppendUint64([]byte{0x80, 5, 0x95}, uint64(len(b)))
	return append(out, b...), nil
}

// tupleEnd returns the opcode that makes a tuple of n objects; above three they follow a mark.
func tupleEnd(n int) byte {
	switch n {
	case 0:
		return ')'
	case 1, 2, 3:
		return 0x84 + byte(n)
	}
	return 't'
}
