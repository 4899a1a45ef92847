package serde

import (
	"encoding/binary"
	"fmt"
	"math"
)

// The lossy codecs halve pages of two-byte elements and quarter those of four. They treat each run
// of groupSize consecutive elements as a channel with a scale of its own, so that an outlier
// affects its own channel only. How the engine's kernels pack a page is opaque here, so these
// channels are not those of the model. But with the usual sizes of heads a run of this length never
// mixes tokens or heads.
//
// A page is encoded as a byte that says how (0: the page unchanged), then a float32 scale for each
// channel, little-endian, then a byte for each element. Three kinds of pages stay unchanged: pages
// whose elements are not known to be floats, pages with infinities or NaNs, and pages of one-byte
// elements.
//
// int8 is symmetric: scale = largest magnitude / 127. fp8 is E4M3 without infinities ("FP8 Formats
// for Deep Learning", Micikevicius et al., 2022), scaled so that the largest magnitude becomes 448,
// its largest number.
const groupSize = 128

const (
	asIs      = 0
	quantised = 1
)

// Int8 keeps 8-bit integers with a scale for each channel.
type Int8 struct{}

// Name implements Codec.
func (Int8) Name() string { return "int8" }

// Lossy implements Codec.
func (Int8) Lossy() bool { return true }

// Encode implements Codec.
func (Int8) Encode(dst, src []byte, element string) ([]byte, error) {
	return quantise(dst, src, element, 127, func(out []byte, x *[groupSize]float32,
		inverse float32) {
		for i := range out {
			// Adding and subtracting 1.5·2²³ rounds to the nearest even integer.
			const round = 3 << 22
			v := x[i]*inverse + round
			out[i] = byte(int8(v - round))
		}
	})
}

// Decode implements Codec.
func (Int8) Decode(dst, src []byte, element string) error {
	return restore(dst, src, element, &int8Values)
}

// FP8 keeps E4M3 numbers with a scale for each channel.
type FP8 struct{}

// Name implements Codec.
func (FP8) Name() string { return "fp8" }

// Lossy implements Codec.
func (FP8) Lossy() bool { return true }

// Encode implements Codec.
func (FP8) Encode(dst, src []byte, element string) ([]byte, error) {
	return quantise(dst, src, element, maxE4M3, func(out []byte, x *[groupSize]float32,
		inverse float32) {
		for i := range out {
			out[i] = toE4M3(x[i] * inverse)
		}
	})
}

// Decode implements Codec.
func (FP8) Decode(dst, src []byte, element string) error {
	return restore(dst, src, element, &e4m3Values)
}

const maxE4M3 = 448

// int8Values and e4m3Values have the value of each byte, before its channel's scale.
var int8Values, e4m3Values = func() (i, f [256]float32) {
	for b := range 256 {
		i[b] = float32(int8(b))
		exponent, mantissa := b>>3&15, b&7
		v := float64(mantissa) / 8 * math.Pow(2, -6)
		if exponent > 0 {
			v = (1 + float64(mantissa)/8) * math.Pow(2, float64(exponent-7))
		}
		if b&0x7F == 0x7F {
			v = 0 // NaN, which toE4M3 never returns
		}
		if b >= 128 {
			v = -v
		}
		f[b] = float32(v)
	}
	return i, f
}()

// toE4M3 rounds to the nearest number of the format, ties to even; magnitudes that are too large
// become the largest. x is finite.
func toE4M3(x float32) byte {
	b := math.Float32bits(x)
	sign := byte(b >> 24 & 0x80)
	b &= 0x7FFFFFFF
	const smallestNormal = (127 - 6) << 23
	if b < smallestNormal {
		// Subnormal: a multiple of 2⁻⁹. Adding 2¹⁴ leaves just these bits of the sum's mantissa,
		// rounded.
		const magic = 1 << 14
		return sign | byte(math.Float32bits(math.Float32frombits(b)+magic)&0xF)
	}
	b += 1<<19 - 1 + b>>20&1 // 3 of 23 bits of mantissa stay
	if b >= (127+9)<<23 {
		return sign | 0x7E
	}
	return sign | min(0x7E, byte(b>>20-(127-7)<<3)) // 0x7F is NaN
}

// elementBytes returns the bytes of an element that can be quantised, 0 for any other.
func elementBytes(element string) int {
	switch element {
	case "bfloat16", "float16":
		return 2
	case "float32":
		return 4
	}
	return 0
}

// quantise appends the encoded form of a page. fill encodes a channel, given the inverse of its
// scale. most is the code of the largest magnitude.
func quantise(dst, src []byte, element string, most float32,
	fill func(out []byte, x *[groupSize]float32, inverse float32)) ([]byte, error) {
	size := elementBytes(element)
	start := len(dst)
	whole := func() ([]byte, error) { return append(append(dst[:start], asIs), src...), nil }
	if size == 0 || len(src)%size != 0 {
		return whole()
	}
	n := len(src) / size
	groups := (n + groupSize - 1) / groupSize
	if 1+4*groups+n > len(src) {
		return whole() // a handful of elements
	}
	dst = append(dst, quantised)
	scales := len(dst)
	dst = append(dst, make([]byte, 4*groups+n)...)
	values := dst[scales+4*groups:]
	var x [groupSize]float32
	for g := range groups {
		from := g * groupSize
		k := min(groupSize, n-from)
		largest := toFloats(&x, src[from*size:(from+k)*size], element)
		if largest >= 0x7F800000 { // an infinity or NaN
			return whole()
		}
		scale := math.Float32frombits(largest) / most
		var inverse float32
		if scale > 0 {
			inverse = 1 / scale
		}
		if math.IsInf(float64(inverse), 0) { // the channel is next to 0
			scale, inverse = 0, 0
		}
		binary.LittleEndian.PutUint32(dst[scales+4*g:], math.Float32bits(scale))
		fill(values[from:from+k], &x, inverse)
	}
	return dst, nil
}

// restore fills a page from its encoded form.
func restore(dst, src []byte, element string, values *[256]float32) error {
	if len(src) == 0 {
		return fmt.Errorf("%w: nothing", ErrMalformed)
	}
	how, src := src[0], src[1:]
	if how == asIs {
		return Raw{}.Decode(dst, src, element)
	}
	size := elementBytes(element)
	if how != quantised || size == 0 || len(dst)%size != 0 {
		return fmt.Errorf("%w: form %d of elements %q in a page of %d bytes", ErrMalformed, how,
			element, len(dst))
	}
	n := len(dst) / size
	groups := (n + groupSize - 1) / groupSize
	if len(src) != 4*groups+n {
		return fmt.Errorf("%w: %d bytes for %d elements", ErrMalformed, len(src), n)
	}
	codes := src[4*groups:]
	for g := range groups {
		scale := math.Float32frombits(binary.LittleEndian.Uint32(src[4*g:]))
		from := g * groupSize
		k := min(groupSize, n-from)
		fromFloats(dst[from*size:(from+k)*size], codes[from:from+k], values, scale, element)
	}
	return nil
}

// toFloats decodes elements into x and returns the bits of the largest magnitude. Magnitudes are
// ordered as their bits are, and NaN is above all of them.
func toFloats(x *[groupSize]float32, src []byte, element string) (largest uint32) {
	switch element {
	case "bfloat16":
		for i := 0; 2*i < len(src); i++ {
			b := uint32(binary.LittleEndian.Uint16(src[2*i:])) << 16
			x[i] = math.Float32frombits(b)
			largest = max(largest, b&0x7FFFFFFF)
		}
	case "float16":
		for i := 0; 2*i < len(src); i++ {
			x[i] = fromHalf(binary.LittleEndian.Uint16(src[2*i:]))
			largest = max(largest, math.Float32bits(x[i])&0x7FFFFFFF)
		}
	case "float32":
		for i := 0; 4*i < len(src); i++ {
			b := binary.LittleEndian.Uint32(src[4*i:])
			x[i] = math.Float32frombits(b)
			largest = max(largest, b&0x7FFFFFFF)
		}
	}
	return largest
}

// fromFloats writes the elements of the codes of one channel.
func fromFloats(dst, codes []byte, values *[256]float32, scale float32, element string) {
	switch element {
	case "bfloat16":
		for i, c := range codes {
			b := math.Float32bits(values[c] * scale)
			b += 0x7FFF + b>>16&1
			binary.LittleEndian.PutUint16(dst[2*i:], uint16(b>>16))
		}
	case "float16":
		for i, c := range codes {
			binary.LittleEndian.PutUint16(dst[2*i:], toHalf(values[c]*scale))
		}
	case "float32":
		for i, c := range codes {
			b := math.Float32bits(values[c] * scale)
			if b&0x7FFFFFFF == 0x7F800000 {
				b-- // the scale of the largest float32 was rounded up
			}
			binary.LittleEndian.PutUint32(dst[4*i:], b)
		}
	}
}

// fromHalf returns the value of an IEEE 754 binary16.
func fromHalf(h uint16) float32 {
	sign, b := uint32(h&0x8000)<<16, uint32(h&0x7FFF)
	switch {
	case b >= 0x7C00: // infinity, NaN
		return math.Float32frombits(sign | 0x7F800000 | (b&0x3FF)<<13)
	case b < 0x400: // subnormal: a multiple of 2⁻²⁴
		return math.Float32frombits(sign | math.Float32bits(float32(b)*(1.0/(1<<24))))
	}
	return math.Float32frombits(sign | (b<<13 + (127-15)<<23))
}

// toHalf rounds to the nearest binary16, ties to even; magnitudes that are too large become the
// largest finite one.
func toHalf(x float32) uint16 {
	b := math.Float32bits(x)
	sign := uint16(b >> 16 & 0x8000)
	b &= 0x7FFFFFFF
	if b < (127-14)<<23 {
		// subnormal: adding 2⁻¹ leaves multiples of 2⁻²⁴ in the sum's mantissa, rounded
		return sign | uint16(math.Float32bits(math.Float32frombits(b)+0.5)-math.Float32bits(0.5))
	}
	b += 1<<12 - 1 + b>>13&1
	if b >= (127+16)<<23 {
		return sign | 0x7BFF
	}
	return sign | uint16((b-(127-15)<<23)>>13)
}
