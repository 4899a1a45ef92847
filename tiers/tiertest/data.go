package tiertest

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"reflect"

	"github.com/cespare/xxhash/v2"

	"lookaside/tiers"
)

// NewSpace returns a space for tests. Spaces of another name or geometry differ from it.
func NewSpace(name string, g tiers.Geometry) *tiers.Space {
	return &tiers.Space{Fingerprint: tiers.FingerprintOf(fmt.Appendf(nil, "%s %+v", name, g)),
		Geometry: g, Element: "bfloat16"}
}

// Prefix is a sequence of tokens, one a page. The digests of its pages chain as those of engines
// do, so prefixes that begin alike share their first pages.
type Prefix []byte

// Digests returns the digests of pages [from, to), of size bytes each, end to end.
func (p Prefix) Digests(from, to, size int) []byte {
	out := make([]byte, 0, (to-from)*size)
	h := sha256.Sum256([]byte("root"))
	for i, token := range p[:to] {
		h = sha256.Sum256(append(h[:], token))
		if i >= from {
			out = append(out, h[:size]...)
		}
	}
	return out
}

// Run returns pages [from, to) as a run of a space; from is the beginning of a chunk.
func (p Prefix) Run(space *tiers.Space, from, to int) tiers.Run {
	size := space.Geometry.DigestBytes
	r := tiers.Run{Space: space, First: from, Hashes: p.Digests(from, to, size)}
	if from > 0 {
		r.Prev = p.Digests(from-1, from, size)
	}
	return r
}

// noise is the source of pages' bytes.
var noise = func() []byte {
	p := make([]byte, 1<<18)
	rnd := rand.NewPCG(1, 2)
	for i := 0; i < len(p); i += 8 {
		binary.LittleEndian.PutUint64(p[i:], rnd.Uint64())
	}
	return p
}()

// Fill writes the bytes of a page, which depend on the space and the whole digest. They are noise
// with marks that depend on their place, so that no 256 bytes occur twice. Fill is fast, also under
// the race detector.
func Fill(page []byte, space *tiers.Space, digest []byte) {
	seed := xxhash.Sum64(append(space.Fingerprint[:len(space.Fingerprint):len(space.Fingerprint)],
		digest...))
	for at := 0; at < len(page); {
		at += copy(page[at:], noise[(seed+uint64(at))%(1<<17):])
	}
	for at := 0; at+8 <= len(page); at += 256 {
		binary.LittleEndian.PutUint64(page[at:], seed+uint64(at))
	}
}

// FillRun writes the bytes of all pages of a run.
func FillRun(p []byte, run tiers.Run) {
	g := run.Space.Geometry
	for i := range run.Pages() {
		Fill(p[int64(i)*g.PageBytes:int64(i+1)*g.PageBytes], run.Space,
			run.Hashes[i*g.DigestBytes:(i+1)*g.DigestBytes])
	}
}

// WrongPage returns the first page of a run whose bytes differ from those of Fill, or -1.
func WrongPage(p []byte, run tiers.Run) int {
	g := run.Space.Geometry
	want := make([]byte, g.PageBytes)
	for i := range run.Pages() {
		Fill(want, run.Space, run.Hashes[i*g.DigestBytes:(i+1)*g.DigestBytes])
		if !bytes.Equal(want, p[int64(i)*g.PageBytes:int64(i+1)*g.PageBytes]) {
			return i
		}
	}
	return -1
}

const (
	pageSize = 4096
	guard    = 64 // bytes before and behind each transfer that nobody may touch
	poison   = 0xa5
)

// memory stands in for a piece of an arena for one transfer: it begins a page, or lies shift bytes
// behind its beginning.
type memory struct {
	all, bytes []byte
}

// MemorySource is an optional interface of a tier under test: where the memory of its transfers
// comes from. The default is Go's heap.
type MemorySource interface {
	// Memory returns size bytes, which nobody else uses until the test has made many more calls.
	Memory(size int) []byte
}

func newMemory(tier tiers.Tier, n, shift int) memory {
	var room []byte
	if m, ok := tier.(MemorySource); ok {
		room = m.Memory(2*pageSize + n + 2*guard + shift)
	} else {
		room = make([]byte, 2*pageSize+n+2*guard+shift)
	}
	memory{all: room}.repoison()
	at := guard + (-(int(reflect.ValueOf(room).Pointer()) + guard))&(pageSize-1) + shift
	return memory{all: room, bytes: room[at : at+n : at+n]}
}

// overrun reports whether bytes beside the memory were written.
func (m memory) overrun() bool {
	at := int(reflect.ValueOf(m.bytes).Pointer() - reflect.ValueOf(m.all).Pointer())
	clean := bytes.Count(m.all[:at], []byte{poison}) + bytes.Count(m.all[at+len(m.bytes):],
		[]byte{poison})
	return clean != len(m.all)-len(m.bytes)
}

// untouched reports whether all bytes are poison.
func (m memory) untouched() bool {
	return bytes.Count(m.all, []byte{poison}) == len(m.all)
}

func (m memory) repoison() { copy(m.all, bytes.Repeat([]byte{poison}, len(m.all))) }
