/*
 * Codecs for pages: what a block of the KV cache becomes in the arena of a space that compresses.
 *
 * No Python in here, as in _copycore.h. A block is seen as its elements one after another, in the order of the plan's
 * segments, in groups of LA_GROUP. The last group of a block is filled up with zeros. Every encoded block of a plan has the
 * same size, la_encoded_bytes, whatever is in it. With G groups:
 *
 *   int8, fp8   G scales (float32), then 128 G codes of a byte. This is the body of the sidecar's codecs of these names
 *               (tiers/serde/quantised.go), for blocks of whole groups byte for byte:
 *               scale = largest magnitude / 127 or / 448, code = the nearest integer or E4M3 number of x / scale.
 *   lossless    128 G low bytes (7 bits of mantissa under the sign), 64 G bytes with two 4-bit codes of exponents each (elements
 *               i and i + 64 of the group), for float32 128 G halfwords with the rest of the mantissa, G bytes with the
 *               largest exponent of each group, and LA_ESCAPES G bytes for exponents that no code can say. A code is how far
 *               below the largest an exponent is; LA_ESCAPE: it is the next of the exponents at the end; LA_NOTHING: it is 0.
 *
 * What a codec cannot keep is refused, not stored: infinities and NaNs by int8 and fp8, and by lossless a block with more
 * exponents of the rare kind than there is room for. Decoding takes any bytes: none makes it read or write elsewhere.
 *
 * The loops are plain C over whole groups, compiled once for each instruction set that the machine may have; int8 and fp8 for
 * AVX-512 are written by hand. All of them compute the same: integers, and single multiplications and additions in float32 that
 * no compiler may join (-ffp-contract=off).
 *
 * Rejected: Huffman codes for the exponents leave two thirds of bfloat16 and not three quarters, at a tenth of the speed, and
 * their sizes vary. Codes of 3 bits leave less, too, but then exponents 6 below the largest are escapes: some 2 % of a group that
 * is normally distributed, and many more where a group has elements of several scales.
 */
#ifndef LOOKASIDE_CODEC_H
#define LOOKASIDE_CODEC_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef enum { LA_PLAIN = 0, LA_INT8 = 1, LA_FP8 = 2, LA_LOSSLESS = 3 } la_codec;

typedef enum { LA_BFLOAT16 = 1, LA_FLOAT16 = 2, LA_FLOAT32 = 3 } la_element;

#define LA_GROUP 128u
/* Room for escaped exponents, a group. */
#define LA_ESCAPES 2u
#define LA_ESCAPE 14u
#define LA_NOTHING 15u
/* Encoded blocks are whole lines of a cache. */
#define LA_LINE 64u

#define LA_INLINE static inline __attribute__((always_inline))

typedef uint16_t la_u16 __attribute__((aligned(1), may_alias));
typedef uint32_t la_u32 __attribute__((aligned(1), may_alias));

static inline size_t la_element_bytes(la_element element) { return element == LA_FLOAT32 ? 4 : 2; }

/* Whether the codec has a form of such elements. Lossless would save a sixteenth of float16 and is not worth it. */
static inline int la_codec_takes(la_codec codec, la_element element) {
    if (element < LA_BFLOAT16 || element > LA_FLOAT32) return 0;
    return codec == LA_INT8 || codec == LA_FP8 || (codec == LA_LOSSLESS && element != LA_FLOAT16);
}

/* Bytes of a block of so many bytes once encoded; 0 if it has no whole elements, or its size would overflow. */
static inline uint64_t la_encoded_bytes(la_codec codec, la_element element, uint64_t block_bytes) {
    const uint64_t size = la_element_bytes(element);
    if (block_bytes == 0 || block_bytes % size != 0 || block_bytes > UINT64_MAX / 8) return 0;
    uint64_t groups = (block_bytes / size + LA_GROUP - 1) / LA_GROUP;
    uint64_t bytes = groups * (LA_GROUP + 4);
    if (codec == LA_LOSSLESS) {
        bytes = groups * (LA_GROUP + LA_GROUP / 2 + 1 + LA_ESCAPES);
        if (element == LA_FLOAT32) bytes += groups * LA_GROUP * 2;
    }
    return (bytes + LA_LINE - 1) / LA_LINE * LA_LINE;
}

/* An encoded block that is being written or read. */
typedef struct {
    unsigned char *start;
    size_t groups;  /* of the whole block */
    size_t done;    /* groups written or read so far */
    size_t escapes; /* escapes written or read so far */
} la_encoded;

LA_INLINE float la_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

LA_INLINE uint32_t la_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

/* a where the condition holds, else b. By masks: with a branch, compilers leave loops of floats as they are. */
LA_INLINE uint32_t la_select(int condition, uint32_t a, uint32_t b) {
    const uint32_t mask = -(uint32_t)condition;
    return (a & mask) | (b & ~mask);
}

/* ---- int8 and fp8 ---- */

/* What la_to_e4m3 has to subtract: 8 for each of the exponent's units above that of the smallest normal number. */
#define LA_E4M3_BIAS ((20u + 127u - 6u) << 3)

LA_INLINE float la_from_half(uint32_t half) {
    const uint32_t sign = (half & 0x8000u) << 16, b = half & 0x7fffu;
    const uint32_t special = 0x7f800000u | (b & 0x3ffu) << 13; /* an infinity or NaN */
    const uint32_t tiny = la_bits((float)(int32_t)b * (1.0f / (1 << 24)));
    const uint32_t normal = (b << 13) + ((127u - 15u) << 23);
    return la_float(sign | la_select(b >= 0x7c00u, special, la_select(b < 0x400u, tiny, normal)));
}

/* To the nearest, ties to even; what is too large becomes the largest. value is no NaN. */
LA_INLINE uint32_t la_to_half(float value) {
    const uint32_t bits = la_bits(value), sign = bits >> 16 & 0x8000u, b = bits & 0x7fffffffu;
    const uint32_t tiny = la_bits(la_float(b) + 0.5f) - 0x3f000000u; /* the sum keeps multiples of 2^-24 */
    const uint32_t rounded = b + 0xfffu + (b >> 13 & 1u);
    const uint32_t normal = (rounded - ((127u - 15u) << 23)) >> 13;
    return sign | la_select(b < (127u - 14u) << 23, tiny, la_select(rounded >= (127u + 16u) << 23, 0x7bffu, normal));
}

/*
 * The E4M3 number nearest to a value whose magnitude rounds to 448 at most, ties to even.
 *
 * Adding 2^20 of the power of two below the magnitude (at least that of the smallest normal number) rounds it to 3 bits below
 * its first. Of the sum, the low byte is then the magnitude in units of the last of these bits, and the exponent lies from bit
 * 23 on, which is 3 bits further left than the code has it, 20 times 8 too large and biased by 127, not 7.
 */
LA_INLINE uint32_t la_to_e4m3(float value) {
    const uint32_t bits = la_bits(value), b = bits & 0x7fffffffu;
    const uint32_t least = (127u - 6u) << 23, own = b & 0x7f800000u, power = own > least ? own : least;
    const uint32_t sum = la_bits(la_float(b) + la_float(power + (20u << 23)));
    return ((sum + (sum >> 20) - LA_E4M3_BIAS) & 0x7fu) | (bits >> 24 & 0x80u);
}

/* 0x7f and 0xff, NaN to others, are never written; they would be 480. */
LA_INLINE float la_from_e4m3(uint32_t code) {
    const uint32_t b = code & 0x7fu, below = -(uint32_t)(b < 8); /* a subnormal number */
    const float one_more = la_float((b << 20) + ((127u - 7u) << 23) + (below & 1u << 23));
    const float value = one_more - la_float(below & (127u - 6u) << 23);
    return la_float((code & 0x80u) << 24 | la_bits(value));
}

/* Reads a group; returns the bits of the largest magnitude, which is above those of all numbers if there is a NaN. */
LA_INLINE uint32_t la_read_group(float *x, const unsigned char *from, la_element element) {
    uint32_t largest = 0;
    if (element == LA_BFLOAT16) {
        const la_u16 *values = (const la_u16 *)from;
        uint16_t most = 0;
        for (size_t i = 0; i < LA_GROUP; i++) {
            const uint16_t magnitude = values[i] & 0x7fffu;
            most = magnitude > most ? magnitude : most;
            x[i] = la_float((uint32_t)values[i] << 16);
        }
        largest = (uint32_t)most << 16;
    } else if (element == LA_FLOAT16) {
        const la_u16 *values = (const la_u16 *)from;
        uint16_t most = 0;
        for (size_t i = 0; i < LA_GROUP; i++) {
            const uint16_t magnitude = values[i] & 0x7fffu;
            most = magnitude > most ? magnitude : most;
            x[i] = la_from_half(values[i]);
        }
        largest = la_bits(la_from_half(most));
    } else {
        const la_u32 *values = (const la_u32 *)from;
        for (size_t i = 0; i < LA_GROUP; i++) {
            const uint32_t magnitude = values[i] & 0x7fffffffu;
            largest = magnitude > largest ? magnitude : largest;
            x[i] = la_float(values[i]);
        }
    }
    return largest;
}

LA_INLINE void la_write_group(unsigned char *to, const float *x, la_element element) {
    if (element == LA_BFLOAT16) {
        la_u16 *values = (la_u16 *)to;
        for (size_t i = 0; i < LA_GROUP; i++) {
            const uint32_t b = la_bits(x[i]);
            values[i] = (uint16_t)((b + 0x7fffu + (b >> 16 & 1u)) >> 16);
        }
    } else if (element == LA_FLOAT16) {
        la_u16 *values = (la_u16 *)to;
        for (size_t i = 0; i < LA_GROUP; i++) values[i] = (uint16_t)la_to_half(x[i]);
    } else {
        la_u32 *values = (la_u32 *)to;
        for (size_t i = 0; i < LA_GROUP; i++) {
            const uint32_t b = la_bits(x[i]); /* the largest float32 may have become an infinity */
            values[i] = b - ((b & 0x7fffffffu) == 0x7f800000u);
        }
    }
}

/* Has the processor fetch what comes some groups later: its own foresight ends with each page of memory. */
LA_INLINE void la_ahead(const unsigned char *from, la_element element) {
    for (size_t i = 0; i < LA_GROUP * la_element_bytes(element); i += LA_LINE) __builtin_prefetch(from + 2048 + i);
}

/* Whether the groups can be kept; then they are encoded. */
LA_INLINE int la_quantise(la_encoded *to, const unsigned char *from, size_t count, la_element element, la_codec codec) {
    la_u32 *scales = (la_u32 *)to->start + to->done;
    unsigned char *codes = to->start + 4 * to->groups + to->done * LA_GROUP;
    const float most = codec == LA_INT8 ? 127.0f : 448.0f;
    for (size_t g = 0; g < count; g++, from += LA_GROUP * la_element_bytes(element), codes += LA_GROUP) {
        float x[LA_GROUP];
        la_ahead(from, element);
        const uint32_t largest = la_read_group(x, from, element);
        if (largest >= 0x7f800000u) return 0;
        float scale = la_float(largest) / most;
        float inverse = scale > 0 ? 1.0f / scale : 0;
        if (la_bits(inverse) >= 0x7f800000u) scale = inverse = 0; /* the group is next to 0 */
        scales[g] = la_bits(scale);
        if (codec == LA_INT8) {
            /* Adding 1.5 * 2^23 rounds to the nearest integer, ties to even, whose low byte is then that of the sum. */
            for (size_t i = 0; i < LA_GROUP; i++) codes[i] = (unsigned char)la_bits(x[i] * inverse + 12582912.0f);
        } else {
            for (size_t i = 0; i < LA_GROUP; i++) codes[i] = (unsigned char)la_to_e4m3(x[i] * inverse);
        }
    }
    to->done += count;
    return 1;
}

LA_INLINE int la_restore(la_encoded *from, unsigned char *to, size_t count, la_element element, la_codec codec) {
    const la_u32 *scales = (const la_u32 *)from->start + from->done;
    const unsigned char *codes = from->start + 4 * from->groups + from->done * LA_GROUP;
    for (size_t g = 0; g < count; g++, to += LA_GROUP * la_element_bytes(element), codes += LA_GROUP) {
        float x[LA_GROUP];
        const float scale = la_float(scales[g]);
        if (codec == LA_INT8) {
            for (size_t i = 0; i < LA_GROUP; i++) x[i] = (float)(signed char)codes[i] * scale;
        } else {
            for (size_t i = 0; i < LA_GROUP; i++) x[i] = la_from_e4m3(codes[i]) * scale;
        }
        la_write_group(to, x, element);
    }
    from->done += count;
    return 1;
}

/* ---- lossless ---- */

/* Where the parts of a group are. */
typedef struct {
    unsigned char *low, *codes, *base, *escapes;
    la_u16 *rest;
} la_parts;

LA_INLINE la_parts la_parts_of(const la_encoded *block, la_element element) {
    const size_t n = block->groups * LA_GROUP;
    la_parts parts;
    parts.low = block->start + block->done * LA_GROUP;
    parts.codes = block->start + n + block->done * (LA_GROUP / 2);
    unsigned char *next = block->start + n + n / 2;
    parts.rest = (la_u16 *)next + block->done * LA_GROUP;
    if (element == LA_FLOAT32) next += 2 * n;
    parts.base = next + block->done;
    parts.escapes = next + block->groups;
    return parts;
}

LA_INLINE int la_pack(la_encoded *to, const unsigned char *from, size_t count, la_element element) {
    la_parts p = la_parts_of(to, element);
    const size_t room = to->groups * LA_ESCAPES;
    for (size_t g = 0; g < count; g++, from += LA_GROUP * la_element_bytes(element)) {
        unsigned char exponents[LA_GROUP], codes[LA_GROUP];
        la_ahead(from, element);
        const la_u16 *halves = (const la_u16 *)from;
        const la_u32 *words = (const la_u32 *)from;
        for (size_t i = 0; i < LA_GROUP; i++) {
            const uint16_t v = element == LA_FLOAT32 ? (uint16_t)(words[i] >> 16) : halves[i];
            exponents[i] = (unsigned char)(v >> 7);
            p.low[i] = (unsigned char)((v & 0x7fu) | (v >> 8 & 0x80u));
        }
        if (element == LA_FLOAT32)
            for (size_t i = 0; i < LA_GROUP; i++) p.rest[i] = (uint16_t)words[i];
        unsigned char base = 0, escapes = 0;
        for (size_t i = 0; i < LA_GROUP; i++) base = exponents[i] > base ? exponents[i] : base;
        for (size_t i = 0; i < LA_GROUP; i++) {
            const unsigned char below = (unsigned char)(base - exponents[i]);
            const unsigned char code = exponents[i] == 0 ? LA_NOTHING : below < LA_ESCAPE ? below : LA_ESCAPE;
            codes[i] = code;
            escapes += code == LA_ESCAPE;
        }
        for (size_t i = 0; i < LA_GROUP / 2; i++)
            p.codes[i] = (unsigned char)(codes[i] | codes[i + LA_GROUP / 2] << 4);
        *p.base = base;
        if (escapes) {
            if (to->escapes + escapes > room) return 0;
            for (size_t i = 0; i < LA_GROUP; i++)
                if (codes[i] == LA_ESCAPE) p.escapes[to->escapes++] = exponents[i];
        }
        p.low += LA_GROUP, p.codes += LA_GROUP / 2, p.rest += LA_GROUP, p.base++;
    }
    to->done += count;
    return 1;
}

LA_INLINE int la_unpack(la_encoded *from, unsigned char *to, size_t count, la_element element) {
    la_parts p = la_parts_of(from, element);
    const size_t room = from->groups * LA_ESCAPES;
    for (size_t g = 0; g < count; g++, to += LA_GROUP * la_element_bytes(element)) {
        unsigned char exponents[LA_GROUP], codes[LA_GROUP], escapes = 0;
        const unsigned char base = *p.base;
        for (size_t i = 0; i < LA_GROUP / 2; i++) {
            codes[i] = p.codes[i] & 15u;
            codes[i + LA_GROUP / 2] = p.codes[i] >> 4;
        }
        for (size_t i = 0; i < LA_GROUP; i++) {
            exponents[i] = codes[i] == LA_NOTHING ? 0 : (unsigned char)(base - codes[i]);
            escapes += codes[i] == LA_ESCAPE;
        }
        if (escapes) {
            if (from->escapes + escapes > room) return 0;
            for (size_t i = 0; i < LA_GROUP; i++)
                if (codes[i] == LA_ESCAPE) exponents[i] = p.escapes[from->escapes++];
        }
        la_u16 *halves = (la_u16 *)to;
        la_u32 *words = (la_u32 *)to;
        for (size_t i = 0; i < LA_GROUP; i++) {
            const uint16_t v = (uint16_t)((p.low[i] & 0x7fu) | (uint16_t)exponents[i] << 7 | (p.low[i] & 0x80u) << 8);
            if (element == LA_FLOAT32)
                words[i] = (uint32_t)v << 16 | p.rest[i];
            else
                halves[i] = v;
        }
        p.low += LA_GROUP, p.codes += LA_GROUP / 2, p.rest += LA_GROUP, p.base++;
    }
    from->done += count;
    return 1;
}

/* ---- an instruction set each ---- */

LA_INLINE int la_encode_groups(la_encoded *to, const unsigned char *from, size_t count, la_codec codec,
                               la_element element) {
    if (codec == LA_LOSSLESS)
        return element == LA_BFLOAT16 ? la_pack(to, from, count, LA_BFLOAT16) : la_pack(to, from, count, LA_FLOAT32);
    if (codec == LA_INT8) {
        if (element == LA_BFLOAT16) return la_quantise(to, from, count, LA_BFLOAT16, LA_INT8);
        if (element == LA_FLOAT16) return la_quantise(to, from, count, LA_FLOAT16, LA_INT8);
        return la_quantise(to, from, count, LA_FLOAT32, LA_INT8);
    }
    if (element == LA_BFLOAT16) return la_quantise(to, from, count, LA_BFLOAT16, LA_FP8);
    if (element == LA_FLOAT16) return la_quantise(to, from, count, LA_FLOAT16, LA_FP8);
    return la_quantise(to, from, count, LA_FLOAT32, LA_FP8);
}

LA_INLINE int la_decode_groups(la_encoded *from, unsigned char *to, size_t count, la_codec codec, la_element element) {
    if (codec == LA_LOSSLESS)
        return element == LA_BFLOAT16 ? la_unpack(from, to, count, LA_BFLOAT16) : la_unpack(from, to, count, LA_FLOAT32);
    if (codec == LA_INT8) {
        if (element == LA_BFLOAT16) return la_restore(from, to, count, LA_BFLOAT16, LA_INT8);
        if (element == LA_FLOAT16) return la_restore(from, to, count, LA_FLOAT16, LA_INT8);
        return la_restore(from, to, count, LA_FLOAT32, LA_INT8);
    }
    if (element == LA_BFLOAT16) return la_restore(from, to, count, LA_BFLOAT16, LA_FP8);
    if (element == LA_FLOAT16) return la_restore(from, to, count, LA_FLOAT16, LA_FP8);
    return la_restore(from, to, count, LA_FLOAT32, LA_FP8);
}

/* ---- vectors of 16 ---- */

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>

/*
 * int8 and fp8 by hand for AVX-512: compilers make twice as many instructions of the loops above, most of them between elements
 * of different sizes. A group is eight vectors of floats.
 */
#if defined(__clang__) && __clang_major__ >= 18 && __clang_major__ < 22
/* These count the long vectors as a feature apart, which some builds of them leave out. */
#define LA_512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,evex512")))
#else
#define LA_512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#endif
#define LA_512_INLINE LA_512 static inline __attribute__((always_inline))
#define LA_VECTORS (LA_GROUP / 16)

LA_512_INLINE __m512 la_load16(const unsigned char *from, size_t i, la_element element) {
    if (element == LA_FLOAT32) return _mm512_loadu_ps(from + 64 * i);
    const __m256i halves = _mm256_loadu_si256((const __m256i *)(from + 32 * i));
    if (element == LA_FLOAT16) return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

LA_512_INLINE void la_store16(unsigned char *to, size_t i, __m512 x, la_element element) {
    const __m512i b = _mm512_castps_si512(x), magnitude = _mm512_and_si512(b, _mm512_set1_epi32(0x7fffffff));
    const __m512i one = _mm512_set1_epi32(1);
    if (element == LA_FLOAT32) {
        const __mmask16 infinite = _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7f800000));
        _mm512_storeu_si512(to + 64 * i, _mm512_mask_sub_epi32(b, infinite, b, one));
    } else if (element == LA_FLOAT16) {
        /* The instruction makes infinities of what is too large. */
        const __m512 limit = _mm512_set1_ps(65504.0f), low = _mm512_set1_ps(-65504.0f);
        const __m256i half = _mm512_cvtps_ph(_mm512_max_ps(low, _mm512_min_ps(limit, x)), _MM_FROUND_TO_NEAREST_INT);
        _mm256_storeu_si256((__m256i *)(to + 32 * i), half);
    } else {
        const __m512i even = _mm512_and_si512(_mm512_srli_epi32(b, 16), one);
        const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(b, _mm512_set1_epi32(0x7fff)), even);
        _mm256_storeu_si256((__m256i *)(to + 32 * i), _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16)));
    }
}

/* Codes in the low bytes, those of fp8 without sign and LA_E4M3_BIAS too large; see la_to_e4m3. */
LA_512_INLINE __m512i la_codes16(__m512 x, __m512 inverse, la_codec codec) {
    const __m512 v = _mm512_mul_ps(x, inverse);
    if (codec == LA_INT8) return _mm512_castps_si512(_mm512_add_ps(v, _mm512_set1_ps(12582912.0f)));
    const __m512i bits = _mm512_castps_si512(v);
    const __m512 magnitude = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
    const __m512i own = _mm512_and_si512(bits, _mm512_set1_epi32(0x7f800000));
    const __m512 power = _mm512_castsi512_ps(_mm512_max_epu32(own, _mm512_set1_epi32((127 - 6) << 23)));
    /* The product is exact, so that this is the sum of la_to_e4m3. */
    const __m512i sum = _mm512_castps_si512(_mm512_fmadd_ps(power, _mm512_set1_ps(1 << 20), magnitude));
    return _mm512_add_epi32(sum, _mm512_srli_epi32(sum, 20));
}

/* The bits of the largest magnitude of a group. */
LA_512_INLINE uint32_t la_largest_512(const unsigned char *from, la_element element) {
    __m512i top = _mm512_setzero_si512();
    if (element == LA_FLOAT32) {
        const __m512i unsign = _mm512_set1_epi32(0x7fffffff);
        for (size_t i = 0; i < LA_VECTORS; i++)
            top = _mm512_max_epu32(top, _mm512_and_si512(_mm512_loadu_si512(from + 64 * i), unsign));
        return _mm512_reduce_max_epu32(top);
    }
    const __m512i unsign = _mm512_set1_epi16(0x7fff);
    for (size_t i = 0; i < LA_VECTORS / 2; i++)
        top = _mm512_max_epu16(top, _mm512_and_si512(_mm512_loadu_si512(from + 64 * i), unsign));
    /* Of each pair, the upper one and the lower one. */
    top = _mm512_max_epu32(_mm512_srli_epi32(top, 16), _mm512_and_si512(top, _mm512_set1_epi32(0xffff)));
    const uint32_t largest = _mm512_reduce_max_epu32(top);
    return element == LA_BFLOAT16 ? largest << 16 : la_bits(la_from_half(largest));
}

LA_512_INLINE int la_quantise_512(la_encoded *to, const unsigned char *from, size_t count, la_element element,
                                  la_codec codec) {
    la_u32 *scales = (la_u32 *)to->start + to->done;
    unsigned char *codes = to->start + 4 * to->groups + to->done * LA_GROUP;
    const float most = codec == LA_INT8 ? 127.0f : 448.0f;
    for (size_t g = 0; g < count; g++, from += LA_GROUP * la_element_bytes(element), codes += LA_GROUP) {
        la_ahead(from, element);
        const uint32_t largest = la_largest_512(from, element);
        if (largest >= 0x7f800000u) return 0;
        float scale = la_float(largest) / most;
        float inverse = scale > 0 ? 1.0f / scale : 0;
        if (la_bits(inverse) >= 0x7f800000u) scale = inverse = 0; /* the group is next to 0 */
        scales[g] = la_bits(scale);
        const __m512 by = _mm512_set1_ps(inverse);
        if (element == LA_BFLOAT16) { /* in pairs: a bfloat16 is the upper half of a float32 */
            for (size_t i = 0; i < LA_VECTORS / 2; i++) {
                const __m512i pairs = _mm512_loadu_si512(from + 64 * i);
                const __m512 low = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
                const __m512 high = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)));
                const __m512i lower = la_codes16(low, by, codec), upper = la_codes16(high, by, codec);
                const __m512i both = _mm512_mask_blend_epi16(0xaaaaaaaau, lower, _mm512_slli_epi32(upper, 16));
                __m256i code = _mm512_cvtepi16_epi8(both);
                if (codec == LA_FP8) {
                    code = _mm256_sub_epi8(code, _mm256_set1_epi8((char)LA_E4M3_BIAS));
                    code = _mm256_mask_add_epi8(code, _mm512_movepi16_mask(pairs), code, _mm256_set1_epi8((char)0x80));
                }
                _mm256_storeu_si256((__m256i *)(codes + 32 * i), code);
            }
            continue;
        }
        for (size_t i = 0; i < LA_VECTORS; i++) {
            const __m512 x = la_load16(from, i, element);
            __m128i code = _mm512_cvtepi32_epi8(la_codes16(x, by, codec));
            if (codec == LA_FP8) {
                code = _mm_sub_epi8(code, _mm_set1_epi8((char)LA_E4M3_BIAS));
                const __mmask16 negative = _mm512_movepi32_mask(_mm512_castps_si512(x));
                code = _mm_mask_add_epi8(code, negative, code, _mm_set1_epi8((char)0x80));
            }
            _mm_storeu_si128((__m128i *)(codes + 16 * i), code);
        }
    }
    to->done += count;
    return 1;
}

LA_512_INLINE int la_restore_512(la_encoded *from, unsigned char *to, size_t count, la_element element, la_codec codec) {
    const la_u32 *scales = (const la_u32 *)from->start + from->done;
    const unsigned char *codes = from->start + 4 * from->groups + from->done * LA_GROUP;
    for (size_t g = 0; g < count; g++, to += LA_GROUP * la_element_bytes(element), codes += LA_GROUP) {
        const __m512 scale = _mm512_set1_ps(la_float(scales[g]));
        for (size_t i = 0; i < LA_VECTORS; i++) {
            const __m128i code = _mm_loadu_si128((const __m128i *)(codes + 16 * i));
            __m512 x;
            if (codec == LA_INT8) {
                x = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(code));
            } else { /* an E4M3 number is a float16 of the same bits further left, times 256 */
                const __m256i wide = _mm256_cvtepi8_epi16(code);
                const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(0x3f80));
                const __m256i sign = _mm256_and_si256(wide, _mm256_set1_epi16((short)0x8000));
                x = _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(half, sign)), _mm512_set1_ps(256.0f));
            }
            la_store16(to, i, _mm512_mul_ps(x, scale), element);
        }
    }
    from->done += count;
    return 1;
}

LA_512_INLINE int la_encode_groups_512(la_encoded *to, const unsigned char *from, size_t count, la_codec codec,
                                       la_element element) {
    if (codec == LA_LOSSLESS) return la_encode_groups(to, from, count, LA_LOSSLESS, element);
    if (codec == LA_INT8) {
        if (element == LA_BFLOAT16) return la_quantise_512(to, from, count, LA_BFLOAT16, LA_INT8);
        if (element == LA_FLOAT16) return la_quantise_512(to, from, count, LA_FLOAT16, LA_INT8);
        return la_quantise_512(to, from, count, LA_FLOAT32, LA_INT8);
    }
    if (element == LA_BFLOAT16) return la_quantise_512(to, from, count, LA_BFLOAT16, LA_FP8);
    if (element == LA_FLOAT16) return la_quantise_512(to, from, count, LA_FLOAT16, LA_FP8);
    return la_quantise_512(to, from, count, LA_FLOAT32, LA_FP8);
}

LA_512_INLINE int la_decode_groups_512(la_encoded *from, unsigned char *to, size_t count, la_codec codec,
                                       la_element element) {
    if (codec == LA_LOSSLESS) return la_decode_groups(from, to, count, LA_LOSSLESS, element);
    if (codec == LA_INT8) {
        if (element == LA_BFLOAT16) return la_restore_512(from, to, count, LA_BFLOAT16, LA_INT8);
        if (element == LA_FLOAT16) return la_restore_512(from, to, count, LA_FLOAT16, LA_INT8);
        return la_restore_512(from, to, count, LA_FLOAT32, LA_INT8);
    }
    if (element == LA_BFLOAT16) return la_restore_512(from, to, count, LA_BFLOAT16, LA_FP8);
    if (element == LA_FLOAT16) return la_restore_512(from, to, count, LA_FLOAT16, LA_FP8);
    return la_restore_512(from, to, count, LA_FLOAT32, LA_FP8);
}
#endif

/* ---- the calls ---- */

typedef int la_encode_call(la_encoded *, const unsigned char *, size_t, la_codec, la_element);
typedef int la_decode_call(la_encoded *, unsigned char *, size_t, la_codec, la_element);

#define LA_CODEC_FOR(name, attribute, encode, decode)                                                                \
    attribute static int la_encode_##name(la_encoded *to, const unsigned char *from, size_t count, la_codec codec,   \
                                          la_element element) {                                                      \
        return encode(to, from, count, codec, element);                                                              \
    }                                                                                                                \
    attribute static int la_decode_##name(la_encoded *from, unsigned char *to, size_t count, la_codec codec,         \
                                          la_element element) {                                                      \
        return decode(from, to, count, codec, element);                                                              \
    }

LA_CODEC_FOR(plain, , la_encode_groups, la_decode_groups)
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define LA_CODEC_SETS 1
LA_CODEC_FOR(avx2, __attribute__((target("avx2,f16c"))), la_encode_groups, la_decode_groups)
LA_CODEC_FOR(avx512, LA_512, la_encode_groups_512, la_decode_groups_512)
#endif

#endif
