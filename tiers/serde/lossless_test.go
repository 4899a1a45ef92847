package serde

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
)

// likeKV is n bytes of bfloat16 as keys and values have them: normal in each of 128 channels, whose
// scales differ.
func likeKV(rnd *rand.Rand, n int) []byte {
	b := make([]byte, n)
	var scale [128]float64
	for i := range scale {
		scale[i] = math.Exp(rnd.NormFloat64())
	}
	for i := range n / 2 {
		binary.LittleEndian.PutUint16(b[2*i:],
			uint16((math.Float32bits(float32(rnd.NormFloat64()*scale[i%128]))+0x8000)>>16))
	}
	return b
}

func noise(rnd *rand.Rand, n int) []byte {
	b := make([]byte, n+8)
	for i := 0; i < n; i += 8 {
		binary.LittleEndian.PutUint64(b[i:], rnd.Uint64())
	}
	return b[:n]
}

func TestLossless(t *testing.T) {
	const seed = 1
	rnd := rand.New(rand.NewPCG(seed, 0))
	for _, n := range []int{0, 1, 2, 3, 4, 5, 7, 16, 255, 1000, 4096, 70001, 128<<10 - 1, 128 << 10,
		128<<10 + 2, 1<<20 + 3} {
		for kind, page := range map[string][]byte{
			"kv": likeKV(rnd, n), "noise": noise(rnd, n), "zeros": make([]byte, n),
			"ones": bytes.Repeat([]byte{1}, n), "text": bytes.Repeat([]byte("abcab"), n/5+1)[:n],
		} {
			for _, element := range []string{"bfloat16", "float32", "float8", ""} {
				what := fmt.Sprintf("%d bytes of %s as %q", n, kind, element)
				b, err := Lossless{}.Encode([]byte("before"), page, element)
				if err != nil || string(b[:6]) != "before" {
					t.Fatalf("%s: %v", what, err)
				}
				b = b[6:]
				if int64(len(b)) > Bound(int64(n)) || len(b) > n+1 ||
					kind == "kv" && element == "bfloat16" && n > 4096 &&
						float64(len(b)) > 0.73*float64(n) {
					t.Errorf("%s: encoded to %d", what, len(b))
				}
				got := noise(rnd, n)
				if err := (Lossless{}).Decode(got, b, "whatever"); err != nil ||
					!bytes.Equal(got, page) {
					t.Fatalf("%s: another page, %v", what, err)
				}
				// Any other length of either, and no page.
				for _, cut := range []int{0, 1, 2, len(b) / 2, len(b) - 1} {
					if cut < len(b) {
						if err := (Lossless{}).Decode(got, b[:cut], element); !errors.Is(err,
							ErrMalformed) {
							t.Fatalf("%s: %v with %d of %d bytes", what, err, cut, len(b))
						}
					}
				}
				if err := (Lossless{}).Decode(got, append(b, 0), element); !errors.Is(err,
					ErrMalformed) {
					t.Fatalf("%s: %v with a byte more", what, err)
				}
			}
		}
	}
}

// FuzzLossless: no bytes make the decoder panic; what it takes is a page.
func FuzzLossless(f *testing.F) {
	rnd := rand.New(rand.NewPCG(1, 0))
	for _, n := range []int{16, 1001, 140 << 10} {
		b, _ := Lossless{}.Encode(nil, likeKV(rnd, n), "bfloat16")
		f.Add(b, n)
	}
	b, _ := Lossless{}.Encode(nil, make([]byte, 4000), "float32")
	f.Add(b, 4000)
	f.Fuzz(func(t *testing.T, b []byte, n int) {
		page := make([]byte, min(max(n, 0), 1<<20))
		if err := (Lossless{}).Decode(page, b, ""); err != nil {
			if !errors.Is(err, ErrMalformed) {
				t.Fatal(err)
			}
			return
		}
		for _, element := range []string{"bfloat16", "float32", "float8"} {
			again, _ := Lossless{}.Encode(nil, page, element)
			got := make([]byte, len(page))
			if err := (Lossless{}).Decode(got, again, ""); err != nil || !bytes.Equal(got, page) {
				t.Fatal("another page", err)
			}
		}
	})
}

func BenchmarkLossless(b *testing.B) {
	rnd := rand.New(rand.NewPCG(1, 0))
	for kind, page := range map[string][]byte{"kv": likeKV(rnd, 1<<20),
		"noise": noise(rnd, 1<<20)} {
		out, _ := Lossless{}.Encode(nil, page, "bfloat16")
		b.Run("encode."+kind, func(b *testing.B) {
			b.SetBytes(1 << 20)
			b.ReportAllocs()
			for b.Loop() {
				out, _ = Lossless{}.Encode(out[:0], page, "bfloat16")
			}
			b.ReportMetric(float64(len(page))/float64(len(out)), "ratio")
		})
		b.Run("decode."+kind, func(b *testing.B) {
			b.SetBytes(1 << 20)
			b.ReportAllocs()
			for b.Loop() {
				if err := (Lossless{}).Decode(page, out, ""); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
