//go:build linux

package memcopy

import (
	"encoding/binary"
	"math/bits"
	"unsafe"

	"github.com/zeebo/xxh3"
)

// These are the numbers of XXH3 (Yann Collet, the xxHash specification 0.2.0) for inputs of more
// than 240 bytes. Its state is eight lanes of 64 bits, one register of AVX-512. A block of 1,024
// bytes is hashed in stripes of 64, each with the secret 8 bytes further on. The state is scrambled
// after each block except the last. The last stripe of the last block has the secret from 121 on.
const (
	blockBytes  = 1024
	secretBytes = 192
	mergeSecret = 11 // offset in the secret for merging the lanes

	prime32x1 = 0x9E3779B1
	prime32x2 = 0x85EBCA77
	prime32x3 = 0xC2B2AE3D
	prime64x1 = 0x9E3779B185EBCA87
	prime64x2 = 0xC2B2AE3D27D4EB4F
	prime64x3 = 0x165667B19E3779F9
	prime64x4 = 0x85EBCA77C2B2AE63
	prime64x5 = 0x27D4EB2F165667C5
)

// defaultSecret is the secret of seed 0.
var defaultSecret = [secretBytes / 8]uint64{
	0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072,
	0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0,
	0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
	0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8,
	0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
	0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,
}

// streams is how many pages are copied and hashed side by side. The reason is the same as for
// Copy's four pages.
const streams = 4

// turnBlocks is how many blocks of each stream make up PieceBytes.
const turnBlocks = PieceBytes / streams / blockBytes

// aside is how much is copied and then hashed where the kernel cannot do both at once. It is small
// enough to be still in the core's cache.
const aside = 128 << 10

// states holds the lanes and the secrets of the pages that are being hashed.
type states struct {
	lanes  [streams][8]uint64
	secret [streams][secretBytes]byte
}

// CopySums copies len(sums) pages of pageBytes each and computes the XXH3-64 of each, with its
// seed. The pages are contiguous in dst and in src. The slices have exactly these bytes and do not
// overlap. It calls yield, which may be nil, after every PieceBytes.
//
// With AVX-512, pages of whole KiB are hashed while they are copied, four at a time, and all stores
// bypass the caches (SumsStreamed). The copy waits for memory, and the arithmetic fits into that
// time. Other pages are copied in small parts, and each part is hashed after its copy.
func CopySums(dst, src []byte, pageBytes int, seeds, sums []uint64, yield func()) {
	i := 0
	if SumsStreamed(dst, pageBytes) {
		var s states
		for ; len(sums)-i >= streams; i += streams {
			then := 0 // offset of the next pages, prefetched so that they are ready when these end
			if len(sums)-i >= 2*streams {
				then = aheadBytes + (streams-1)*pageBytes
			}
			copySums(dst[i*pageBytes:], src[i*pageBytes:], pageBytes, then, seeds[i:i+streams],
				sums[i:i+streams], &s, yield)
		}
	}
	for ; i < len(sums); i++ {
		copySum(dst[i*pageBytes:(i+1)*pageBytes], src[i*pageBytes:(i+1)*pageBytes], seeds[i],
			&sums[i], yield)
	}
}

// Sums computes the XXH3-64 of len(sums) pages of pageBytes each, with their seeds, without a copy.
// The pages are contiguous in src. It calls yield, which may be nil, after every PieceBytes.
func Sums(src []byte, pageBytes int, seeds, sums []uint64, yield func()) {
	since := 0 // bytes since the last yield
	for i := range sums {
		page := src[i*pageBytes : (i+1)*pageBytes]
		if pageBytes <= PieceBytes {
			sums[i] = xxh3.HashSeed(page, seeds[i])
			if since += pageBytes; since >= PieceBytes && yield != nil {
				yield()
				since = 0
			}
			continue
		}
		h := xxh3.NewSeed(seeds[i])
		for len(page) > 0 {
			n := min(len(page), PieceBytes)
			_, _ = h.Write(page[:n]) // it never fails
			page = page[n:]
			if yield != nil {
				yield()
			}
		}
		sums[i] = h.Sum64()
	}
}

// SumsStreamed reports whether CopySums copies to dst in groups of four pages with stores past the
// caches.
func SumsStreamed(dst []byte, pageBytes int) bool {
	return fast && pageBytes >= 2*blockBytes && pageBytes%blockBytes == 0 &&
		uintptr(unsafe.Pointer(unsafe.SliceData(dst)))%lineBytes == 0
}

// SumsGroup is how many pages CopySums copies together.
const SumsGroup = streams

func copySum(dst, src []byte, seed uint64, sum *uint64, yield func()) {
	if len(dst) <= aside {
		Copy(dst, src)
		*sum = xxh3.HashSeed(src, seed)
		if yield != nil {
			yield()
		}
		return
	}
	h := xxh3.NewSeed(seed)
	for len(dst) > 0 {
		n := min(len(dst), aside)
		Copy(dst[:n], src[:n])
		_, _ = h.Write(src[:n]) // it never fails
		dst, src = dst[n:], src[n:]
		if yield != nil {
			yield()
		}
	}
	*sum = h.Sum64()
}

// copySums does the work of CopySums for a group of streams pages, with the kernel.
func copySums(dst, src []byte, pageBytes, then int, seeds, sums []uint64, s *states, yield func()) {
	_, _ = dst[streams*pageBytes-1], src[streams*pageBytes-1]
	for k := range streams {
		s.lanes[k] = [8]uint64{prime32x3, prime64x1, prime64x2, prime64x3, prime64x4, prime32x2,
			prime64x5, prime32x1}
		seedSecret(&s.secret[k], seeds[k])
	}
	for at, blocks := 0, pageBytes/blockBytes; blocks > 0; {
		n := min(blocks, turnBlocks)
		copyHash(&dst[at], &src[at], pageBytes, n, blocks-aheadBytes/blockBytes, then, s,
			n == blocks)
		at += n * blockBytes
		blocks -= n
		if yield != nil {
			yield()
		}
	}
	for k := range streams {
		sums[k] = s.sum(k, pageBytes)
	}
}

// seedSecret derives the secret from a seed.
func seedSecret(secret *[secretBytes]byte, seed uint64) {
	le := binary.LittleEndian
	for i := 0; i < len(defaultSecret); i += 2 {
		le.PutUint64(secret[8*i:], defaultSecret[i]+seed)
		le.PutUint64(secret[8*i+8:], defaultSecret[i+1]-seed)
	}
}

// sum returns the hash of a page after all its blocks were hashed.
func (s *states) sum(k, pageBytes int) uint64 {
	le := binary.LittleEndian
	lanes, secret := &s.lanes[k], s.secret[k][mergeSecret:]
	sum := uint64(pageBytes) * prime64x1
	for i := 0; i < 8; i += 2 {
		hi, lo := bits.Mul64(lanes[i]^le.Uint64(secret[8*i:]), lanes[i+1]^le.Uint64(secret[8*i+8:]))
		sum += hi ^ lo
	}
	sum ^= sum >> 37
	sum *= 0x165667919E3779F9
	return sum ^ sum>>32
}
