package serde

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"math"
	"math/rand/v2"
	"os"
	"testing"
)

// nearest is the e4m3 code of the closest value, by looking at all of them; ties go to the even
// code.
func nearest(x float32) byte {
	best, at := math.Inf(1), byte(0)
	for c := range 127 {
		if d := math.Abs(math.Abs(float64(x)) - float64(e4m3Values[c])); d < best ||
			d == best && c%2 == 0 {
			best, at = d, byte(c)
		}
	}
	if math.Signbit(float64(x)) {
		at |= 0x80
	}
	return at
}

func TestE4M3RoundsToTheNearest(t *testing.T) {
	t.Parallel()
	for c := range 256 {
		if c&0x7F == 0x7F {
			continue
		}
		if got := toE4M3(e4m3Values[c]); got != byte(c) && e4m3Values[c] != 0 {
			t.Errorf("code %#x stands for %v, which is encoded as %#x", c, e4m3Values[c], got)
		}
	}
	if e4m3Values[0x7E] != maxE4M3 || e4m3Values[1] != 1.0/512 || e4m3Values[8] != 1.0/64 {
		t.Errorf("largest, smallest and smallest normal number are %v, %v, %v", e4m3Values[0x7E],
			e4m3Values[1], e4m3Values[8])
	}
	r := rand.New(rand.NewPCG(1, 2))
	for range 20000 {
		x := float32(r.NormFloat64() * math.Pow(2, float64(r.IntN(20)-11)))
		if got, want := toE4M3(x), nearest(x); got != want {
			t.Fatalf("%v is encoded as %#x (%v), nearest is %#x (%v)", x, got, e4m3Values[got],
				want, e4m3Values[want])
		}
	}
	// Halfway between neighbours.
	for c := range 126 {
		x := (e4m3Values[c] + e4m3Values[c+1]) / 2
		if got, want := toE4M3(x), nearest(x); got != want {
			t.Errorf("%v lies between %#x and %#x and is encoded as %#x", x, c, c+1, got)
		}
	}
}

func TestHalfIsItsOwnInverse(t *testing.T) {
	t.Parallel()
	for h := range 1 << 16 {
		x := fromHalf(uint16(h))
		if h&0x7C00 == 0x7C00 {
			if f := float64(x); !math.IsInf(f, 0) && !math.IsNaN(f) {
				t.Fatalf("%#x is %v", h, x)
			}
			continue
		}
		if got := toHalf(x); got != uint16(h) {
			t.Fatalf("%#x is %v, which is %#x", h, x, got)
		}
		if h&0x7FFF < 0x7BFF { // to even between neighbours
			between := (float64(x) + float64(fromHalf(uint16(h+1)))) / 2
			if got, want := toHalf(float32(between)), uint16(h+h%2); got != want {
				t.Fatalf("halfway above %#x is %#x", h, got)
			}
		}
	}
}

// page makes a page of elements of which every 128th is an outlier.
func page(r *rand.Rand, element string, n int) []byte {
	var b []byte
	for i := range n {
		x := float32(r.NormFloat64())
		if i%1024 == 0 {
			x *= 60
		}
		switch element {
		case "bfloat16":
			b = binary.LittleEndian.AppendUint16(b, uint16(math.Float32bits(x)>>16))
		case "float16":
			b = binary.LittleEndian.AppendUint16(b, toHalf(x))
		default:
			b = binary.LittleEndian.AppendUint32(b, math.Float32bits(x))
		}
	}
	return b
}

func floats(b []byte, element string) []float32 {
	var out []float32
	var x [groupSize]float32
	size := elementBytes(element)
	for len(b) > 0 {
		n := min(groupSize*size, len(b))
		toFloats(&x, b[:n], element)
		out = append(out, x[:n/size]...)
		b = b[n:]
	}
	return out
}

func TestQuantisedPagesAreNearAndSmall(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(3, 4))
	for _, c := range []struct {
		codec Codec
		// An element's error is at most relative of itself or absolute of its channel's largest
		// magnitude.
		relative, absolute float64
	}{{Int8{}, 0.005, 0.5/127 + 0.004}, {FP8{}, 1.0/16 + 0.005, 1.0 / 448 / 512}} {
		for _, element := range []string{"bfloat16", "float16", "float32"} {
			for _, n := range []int{groupSize, 16384, 5 * groupSize / 2, 1000} {
				src := page(r, element, n)
				enc, err := c.codec.Encode([]byte("before"), src, element)
				if err != nil || string(enc[:6]) != "before" {
					t.Fatalf("%s of %d %s: %v", c.codec.Name(), n, element, err)
				}
				enc = enc[6:]
				if most := n + 4*(n/groupSize+1) + 1; len(enc) > most {
					t.Errorf("%s of %d %s takes %d bytes, more than %d", c.codec.Name(), n, element,
						len(enc), most)
				}
				dst := make([]byte, len(src))
				if err := c.codec.Decode(dst, enc, element); err != nil {
					t.Fatal(err)
				}
				want, got := floats(src, element), floats(dst, element)
				for from := 0; from < n; from += groupSize {
					var largest float64
					for _, x := range want[from:min(n, from+groupSize)] {
						largest = max(largest, math.Abs(float64(x)))
					}
					for i := from; i < min(n, from+groupSize); i++ {
						if off := math.Abs(float64(want[i] - got[i])); off > max(
							c.relative*math.Abs(float64(want[i])), c.absolute*largest) {
							t.Fatalf("%s of %s: element %d is %v instead of %v, largest of its channel %v", c.codec.Name(), element, i, got[i], want[i], largest)
						}
					}
				}
				// What was decoded once stays what it is.
				again, _ := c.codec.Encode(nil, dst, element)
				twice := make([]byte, len(src))
				if err := c.codec.Decode(twice, again, element); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}

func TestPagesThatCannotBeQuantisedStayAsTheyAre(t *testing.T) {
	t.Parallel()
	inf := page(rand.New(rand.NewPCG(5, 6)), "float32", 1000)
	binary.LittleEndian.PutUint32(inf[400:], 0x7F800000)
	nan := bytes.Clone(inf)
	binary.LittleEndian.PutUint32(nan[400:], 0xFFC00001)
	for _, codec := range []Codec{Int8{}, FP8{}} {
		for name, c := range map[string]struct {
			src     []byte
			element string
		}{
			"unknown element":  {[]byte("any bytes at all"), ""},
			"one-byte element": {make([]byte, 256), "float8"}, "odd": {make([]byte, 257),
				"bfloat16"},
			"infinity": {inf, "float32"}, "not a number": {nan, "float32"},
			"empty": {nil, "float32"}, "one": {[]byte{1, 2, 3, 4}, "float32"},
		} {
			enc, err := codec.Encode(nil, c.src, c.element)
			if err != nil || int64(len(enc)) > Bound(int64(len(c.src))) {
				t.Fatalf("%s, %s: %d bytes, %v", codec.Name(), name, len(enc), err)
			}
			dst := make([]byte, len(c.src))
			if err := codec.Decode(dst, enc, c.element); err != nil || !bytes.Equal(dst, c.src) {
				t.Errorf("%s, %s: changed (%v)", codec.Name(), name, err)
			}
		}
		zeros := make([]byte, 4096)
		enc, _ := codec.Encode(nil, zeros, "bfloat16")
		dst := bytes.Repeat([]byte{1}, 4096)
		if err := codec.Decode(dst, enc, "bfloat16"); err != nil || !bytes.Equal(dst, zeros) {
			t.Errorf("%s: zeros changed (%v)", codec.Name(), err)
		}
	}
}

func FuzzQuantisedDecode(f *testing.F) {
	src := page(rand.New(rand.NewPCG(7, 8)), "bfloat16", 256)
	for _, codec := range []Codec{Int8{}, FP8{}} {
		enc, _ := codec.Encode(nil, src, "bfloat16")
		f.Add(enc, uint16(len(src)))
	}
	f.Add([]byte{}, uint16(0))
	f.Add([]byte{1, 0, 0, 192, 127}, uint16(2))
	f.Fuzz(func(t *testing.T, enc []byte, n uint16) {
		for _, codec := range []Codec{Int8{}, FP8{}} {
			for _, element := range []string{"", "bfloat16", "float16", "float32"} {
				dst := make([]byte, n)
				_ = codec.Decode(dst, enc, element)
			}
		}
	})
}

func BenchmarkQuantised(b *testing.B) {
	src := page(rand.New(rand.NewPCG(9, 10)), "bfloat16", 1<<19)
	for _, codec := range []Codec{Int8{}, FP8{}} {
		enc, _ := codec.Encode(nil, src, "bfloat16")
		b.Run(codec.Name()+"/encode", func(b *testing.B) {
			b.SetBytes(int64(len(src)))
			buf := make([]byte, 0, 2*len(src))
			for b.Loop() {
				_, _ = codec.Encode(buf, src, "bfloat16")
			}
		})
		b.Run(codec.Name()+"/decode", func(b *testing.B) {
			b.SetBytes(int64(len(src)))
			dst := make([]byte, len(src))
			for b.Loop() {
				_ = codec.Decode(dst, enc, "bfloat16")
			}
		})
	}
}

// TestLargestNumbersStayFinite: the scale of the largest float32 is rounded up. The largest code
// times that scale is an infinity.
func TestLargestNumbersStayFinite(t *testing.T) {
	t.Parallel()
	for _, codec := range []Codec{Int8{}, FP8{}} {
		src, dst := make([]byte, 4*groupSize), make([]byte, 4*groupSize)
		for i := range groupSize {
			binary.LittleEndian.PutUint32(src[4*i:],
				math.Float32bits(math.MaxFloat32)|uint32(i%2)<<31)
		}
		enc, _ := codec.Encode(nil, src, "float32")
		if err := codec.Decode(dst, enc, "float32"); err != nil {
			t.Fatal(err)
		}
		for i := range groupSize {
			x := float64(math.Float32frombits(binary.LittleEndian.Uint32(dst[4*i:])))
			if math.IsInf(x, 0) || math.Signbit(x) != (i%2 == 1) ||
				math.Abs(x) < 0.99*math.MaxFloat32 {
				t.Fatalf("%s: element %d is %v", codec.Name(), i, x)
			}
		}
	}
}

// TestGolden reads pages that the worker's copies have encoded (pyclient/tests/test_encoding.py).
// The codecs here write and read the same bytes, behind one that says how.
func TestGolden(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("testdata/quantised.json")
	if err != nil {
		t.Fatal(err)
	}
	var golden []struct{ Codec, Element, Page, Encoded, Decoded string }
	if err := json.Unmarshal(text, &golden); err != nil || len(golden) != 6 {
		t.Fatalf("%d pages, %v", len(golden), err)
	}
	for _, g := range golden {
		codec, err := New(g.Codec)
		if err != nil {
			t.Fatal(err)
		}
		page, err := hex.DecodeString(g.Page)
		if err != nil {
			t.Fatal(err)
		}
		enc, err := codec.Encode(nil, page, g.Element)
		if err != nil || enc[0] != quantised || hex.EncodeToString(enc[1:]) != g.Encoded {
			t.Errorf("%s of %s: encoded to other bytes (%v)", g.Codec, g.Element, err)
		}
		err = codec.Decode(page, enc, g.Element)
		if err != nil || hex.EncodeToString(page) != g.Decoded {
			t.Errorf("%s of %s: decoded to another page (%v)", g.Codec, g.Element, err)
		}
	}
}
