//go:build linux

package memcopy

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/zeebo/xxh3"

	"lookaside/dax"
)

// aligned is memory that begins at a multiple of a cache line.
func aligned(t testing.TB, n int) []byte {
	t.Helper()
	table, err := dax.NewTable[byte](n)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { table.Close() })
	return table.Slice()
}

func TestSums(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 3))
	src := aligned(t, 3<<20)
	for i := range src {
		src[i] = byte(rnd.Uint32())
	}
	for _, pageBytes := range []int{1, 241, 5000, 64 << 10, PieceBytes, PieceBytes + 64,
		1<<20 + 7} {
		pages := min(len(src)/pageBytes, 50)
		seeds, sums := make([]uint64, pages), make([]uint64, pages)
		for i := range seeds {
			seeds[i] = rnd.Uint64()
		}
		yields := 0
		Sums(src, pageBytes, seeds, sums, func() { yields++ })
		for i, sum := range sums {
			if want := xxh3.HashSeed(src[i*pageBytes:(i+1)*pageBytes], seeds[i]); sum != want {
				t.Errorf("page %d of %d bytes has %x, want %x", i, pageBytes, sum, want)
			}
		}
		if want := pages * pageBytes / (2 * PieceBytes); yields < want {
			t.Errorf("%d pages of %d bytes: %d yields", pages, pageBytes, yields)
		}
		Sums(src, pageBytes, seeds, sums, nil)
	}
}

// What one kind of machine writes, another one reads: the checksums are XXH3-64 on all of them.
func TestSumsAreTheSameEverywhere(t *testing.T) {
	src := aligned(t, 300_000)
	for i := range src {
		src[i] = byte(i * 7 >> 3)
	}
	for _, c := range []struct {
		n           int
		zero, other uint64
	}{
		{1, 0xc44bdff4074eecdb, 0x1a8613b0171e29d5},
		{16, 0x932e4a396c52f79b, 0x2e07e5f739e17fe},
		{128, 0x475a015d90fc4bf3, 0xd7ffac215ba6aaa8},
		{240, 0x721ab1743ce54e6a, 0x8fc4a8e83ff9eaf8},
		{241, 0xa37c87ed6e39ecc4, 0x530de8841c9226cb},
		{1024, 0xc0f91a2524515597, 0xb05b7b378890a2c2},
		{5000, 0x5f9ca8303a38a1bc, 0x50466ae8c0990dd0},
		{65536, 0x7b23faf49ebee652, 0x777ebcc2ec20db23},
		{300000, 0xe060734adbcad7fa, 0x6713da15081fea64},
	} {
		seeds, sums := []uint64{0, 0x4C6F6F6B61736964}, make([]uint64, 1)
		for i, want := range []uint64{c.zero, c.other} {
			Sums(src, c.n, seeds[i:i+1], sums, nil)
			if sums[0] != want {
				t.Errorf("%d bytes, seed %x: %x, want %x", c.n, seeds[i], sums[0], want)
			}
			dst := aligned(t, c.n)
			CopySums(dst, src[:c.n], c.n, seeds[i:i+1], sums, nil)
			if sums[0] != want || !bytes.Equal(dst, src[:c.n]) {
				t.Errorf("%d bytes copied, seed %x: %x, want %x", c.n, seeds[i], sums[0], want)
			}
		}
	}
}

func TestCopySums(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	const room = 6 << 20
	src, dst := aligned(t, room), aligned(t, room)
	for i := range src {
		src[i] = byte(rnd.Uint32())
	}
	for _, pageBytes := range []int{1, 63, 240, 241, 1000, 1024, 2048, 3072, 4096, 5000, 65536,
		70001, 128 << 10, 129 << 10, 256 << 10, 257<<10 + 64, 1 << 20} {
		for _, pages := range []int{1, 3, 4, 5, 8, 11} {
			for _, skew := range []int{0, 64, 7} {
				n := pageBytes * pages
				if n+2*skew > room {
					continue
				}
				from, to := src[skew:skew+n], dst[2*skew:2*skew+n]
				clear(dst[:min(room, n+4096)])
				seeds, sums := make([]uint64, pages), make([]uint64, pages)
				for i := range seeds[1:] {
					seeds[1+i] = rnd.Uint64()
				}
				yields := 0
				CopySums(to, from, pageBytes, seeds, sums, func() { yields++ })
				what := fmt.Sprintf("%d pages of %d bytes, skew %d, streamed %v", pages, pageBytes,
					skew, SumsStreamed(to, pageBytes))
				if !bytes.Equal(to, from) {
					t.Fatalf("%s: other bytes", what)
				}
				for i, sum := range sums {
					if want := xxh3.HashSeed(from[i*pageBytes:(i+1)*pageBytes],
						seeds[i]); sum != want {
						t.Errorf("%s: page %d has %x, want %x", what, i, sum, want)
					}
				}
				if end := 2*skew + n; end < room && dst[end] != 0 {
					t.Errorf("%s: wrote behind the end", what)
				}
				if yields < n/PieceBytes {
					t.Errorf("%s: yielded %d times", what, yields)
				}
				CopySums(to, from, pageBytes, seeds, sums, nil)
			}
		}
	}
	if n := testing.AllocsPerRun(10, func() {
		var seeds, sums [8]uint64
		CopySums(dst[:8*4096], src[:8*4096], 4096, seeds[:], sums[:], nil)
	}); n != 0 && fast {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkCopySums(b *testing.B) {
	const total = 256 << 20
	src, dst := aligned(b, total), aligned(b, total)
	for i := range src {
		src[i] = byte(i * 13)
	}
	copy(dst, src)
	for _, pageBytes := range []int{64 << 10, 128 << 10, 512 << 10, 2 << 20} {
		n := 4
		seeds, sums := make([]uint64, n), make([]uint64, n)
		size := n * pageBytes
		for name, f := range map[string]func(dst, src []byte){
			"sums":  func(dst, src []byte) { CopySums(dst, src, pageBytes, seeds, sums, nil) },
			"plain": func(dst, src []byte) { Copy(dst, src) },
			"two passes": func(dst, src []byte) {
				for i := range n {
					Copy(dst[i*pageBytes:(i+1)*pageBytes], src[i*pageBytes:])
					sums[i] = xxh3.HashSeed(dst[i*pageBytes:(i+1)*pageBytes], seeds[i])
				}
			},
		} {
			b.Run(fmt.Sprintf("%s/%d", name, pageBytes), func(b *testing.B) {
				b.SetBytes(int64(size))
				b.ReportAllocs()
				at := 0
				for range b.N {
					f(dst[at:at+size], src[at:at+size])
					if at += size; at+size > total {
						at = 0
					}
				}
			})
		}
	}
}
