/*
 * Copies between a paged KV cache and page-major arena memory.
 *
 * No Python in here: the extension and the sanitizer harness build the same code.
 *
 * A plan describes how one page lies in the KV cache: `segments` runs of bytes, the run of
 * block b being [base + b*stride, +length), which lands at page + page_offset in the arena.
 * With a codec (_codec.h) the block is encoded instead: page_offset is then where the run lies in the block before it is
 * encoded, and page_bytes the size of an encoded block.
 * A copy names (block, arena address) pairs. Everything that came from outside is checked
 * by la_check before la_copy moves the first byte; la_copy itself checks nothing.
 *
 * Why not memcpy: one stream of loads and stores leaves the memory idle half of the time.
 * Four streams a few KiB apart keep four DRAM pages open, and non-temporal stores save the
 * read that a normal store makes of the line that it is about to overwrite. Together they
 * reach 1.6 to 1.9 times memcpy on x86-64 once a run is longer than about a KiB.
 *
 * arm64 has the same four streams, by pairs of NEON registers, but its default is memcpy: nobody
 * has measured the streams there yet. Cores such as Grace's avoid the read of a line by themselves
 * when it is written as a whole, so the streams may win little.
 */
#ifndef LOOKASIDE_COPYCORE_H
#define LOOKASIDE_COPYCORE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "_codec.h"

/* LA_STREAMS is the kernel with four streams that this build has; LA_TARGET goes before its functions. */
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define LA_STREAMS LA_KERNEL_AVX512
#if defined(__clang__) && __clang_major__ >= 18 && __clang_major__ < 22
/* These count the long vectors as a feature apart, which some builds of them leave out. */
#define LA_TARGET __attribute__((target("avx512f,evex512")))
#else
#define LA_TARGET __attribute__((target("avx512f")))
#endif
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__) && (defined(__GNUC__) || defined(__clang__))
#define LA_STREAMS LA_KERNEL_NEON
#define LA_TARGET
#endif

typedef struct {
    uint64_t base;        /* address of block 0 */
    uint64_t stride;      /* bytes from one block to the next */
    uint64_t length;      /* bytes of the run, at least 1 */
    uint64_t page_offset; /* where the run lies in a page of the arena */
} la_segment;

/* [start, start + size), never wrapping. */
typedef struct {
    uint64_t start;
    uint64_t size;
} la_span;

typedef struct {
    la_segment *segments;
    size_t segment_count;
    uint64_t num_blocks;
    uint64_t page_bytes;
    uint64_t block_bytes; /* the sum of the segments' lengths */
    la_codec codec;
    la_element element; /* with a codec */
} la_plan;

/* For a codec, memcpy and NEON stand for plain C; for plain copies, AVX2 stands for memcpy. */
typedef enum { LA_KERNEL_MEMCPY = 1, LA_KERNEL_AVX512 = 2, LA_KERNEL_NEON = 3, LA_KERNEL_AVX2 = 4 } la_kernel;

typedef enum { LA_GATHER = 0, LA_SCATTER = 1 } la_direction;

typedef enum { LA_OK = 0, LA_BAD_BLOCK = 1, LA_BAD_ADDRESS = 2 } la_verdict;

/* Runs shorter than this go to memcpy: its setup is cheaper than four streams of a line. */
#define LA_SHORT_RUN 1024u
/* Long runs are cut into groups of four streams of this many bytes each. */
#define LA_STREAM 8192u

/* Whether [start, start + size) lies in span, for any values. */
static inline int la_inside(const la_span *span, uint64_t start, uint64_t size) {
    return start >= span->start && size <= span->size && start - span->start <= span->size - size;
}

/*
 * Whether every block's run of the segment lies in one of the spans. Call once, when the plan is made:
 * afterwards base + block*stride cannot wrap for any block below num_blocks.
 */
static inline int la_segment_inside(const la_segment *segment, uint64_t num_blocks, const la_span *spans,
                                    size_t span_count) {
    uint64_t reach;
    if (num_blocks == 0 || segment->length == 0) return 0;
    if (__builtin_mul_overflow(segment->stride, num_blocks - 1, &reach)) return 0;
    if (__builtin_add_overflow(reach, segment->length, &reach)) return 0;
    for (size_t i = 0; i < span_count; i++)
        if (la_inside(&spans[i], segment->base, reach)) return 1;
    return 0;
}

/*
 * Checks all pairs against the plan and the attached regions; *bad is the first that fails.
 * A page must lie in one region: regions need not be neighbours, even where their addresses are.
 */
static inline la_verdict la_check(const la_plan *plan, const la_span *regions, size_t region_count,
                                  const int64_t *blocks, const uint64_t *addresses, size_t count, size_t *bad) {
    size_t last = 0;
    for (size_t i = 0; i < count; i++) {
        *bad = i;
        if (blocks[i] < 0 || (uint64_t)blocks[i] >= plan->num_blocks) return LA_BAD_BLOCK;
        if (last < region_count && la_inside(&regions[last], addresses[i], plan->page_bytes)) continue;
        for (last = 0; last < region_count; last++)
            if (la_inside(&regions[last], addresses[i], plan->page_bytes)) break;
        if (last == region_count) return LA_BAD_ADDRESS;
    }
    return LA_OK;
}

#ifdef LA_STREAMS
#if defined(__x86_64__)
/* Four streams of `size` bytes, `size` apart; dst and size are multiples of 64. */
LA_TARGET static inline void la_four_streams(char *dst, const char *src, size_t size) {
    const char *s0 = src, *s1 = src + size, *s2 = src + 2 * size, *s3 = src + 3 * size;
    char *d0 = dst, *d1 = dst + size, *d2 = dst + 2 * size, *d3 = dst + 3 * size;
    for (size_t i = 0; i < size; i += 64) {
        __m512i a = _mm512_loadu_si512(s0 + i);
        __m512i b = _mm512_loadu_si512(s1 + i);
        __m512i c = _mm512_loadu_si512(s2 + i);
        __m512i d = _mm512_loadu_si512(s3 + i);
        _mm512_stream_si512((void *)(d0 + i), a);
        _mm512_stream_si512((void *)(d1 + i), b);
        _mm512_stream_si512((void *)(d2 + i), c);
        _mm512_stream_si512((void *)(d3 + i), d);
    }
}

/* Non-temporal stores are weakly ordered: nobody may learn of the copy before this. */
LA_TARGET static inline void la_streams_end(void) { _mm_sfence(); }
#else
/* Four streams of `size` bytes, `size` apart; dst and size are multiples of 64. */
static inline void la_four_streams(char *dst, const char *src, size_t size) {
    const char *s0 = src, *s1 = src + size, *s2 = src + 2 * size, *s3 = src + 3 * size;
    char *d0 = dst, *d1 = dst + size, *d2 = dst + 2 * size, *d3 = dst + 3 * size;
    for (size_t i = 0; i < size; i += 64)
        __asm__ volatile(
            "ldp q0, q1, [%[s0]]\n\t"
            "ldp q2, q3, [%[s0], #32]\n\t"
            "ldp q4, q5, [%[s1]]\n\t"
            "ldp q6, q7, [%[s1], #32]\n\t"
            "ldp q16, q17, [%[s2]]\n\t"
            "ldp q18, q19, [%[s2], #32]\n\t"
            "ldp q20, q21, [%[s3]]\n\t"
            "ldp q22, q23, [%[s3], #32]\n\t"
            "stnp q0, q1, [%[d0]]\n\t"
            "stnp q2, q3, [%[d0], #32]\n\t"
            "stnp q4, q5, [%[d1]]\n\t"
            "stnp q6, q7, [%[d1], #32]\n\t"
            "stnp q16, q17, [%[d2]]\n\t"
            "stnp q18, q19, [%[d2], #32]\n\t"
            "stnp q20, q21, [%[d3]]\n\t"
            "stnp q22, q23, [%[d3], #32]\n\t"
            :
            : [s0] "r"(s0 + i), [s1] "r"(s1 + i), [s2] "r"(s2 + i), [s3] "r"(s3 + i), [d0] "r"(d0 + i),
              [d1] "r"(d1 + i), [d2] "r"(d2 + i), [d3] "r"(d3 + i)
            : "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23",
              "memory");
}

/* Every store on arm64 is weakly ordered, these among them: nobody may learn of the copy before this. */
static inline void la_streams_end(void) { __asm__ volatile("dmb ishst" ::: "memory"); }
#endif

/* One run of any length and alignment. The caller fences. */
LA_TARGET static inline void la_run_streams(char *dst, const char *src, size_t length) {
    if (length < LA_SHORT_RUN) {
        memcpy(dst, src, length);
        return;
    }
    size_t head = (size_t)(-(uintptr_t)dst & 63);
    if (head != 0) {
        memcpy(dst, src, head);
        dst += head, src += head, length -= head;
    }
    /* The last group takes up to twice the usual, so that no short remainder is left over. */
    while (length >= 8 * LA_STREAM) {
        la_four_streams(dst, src, LA_STREAM);
        dst += 4 * LA_STREAM, src += 4 * LA_STREAM, length -= 4 * LA_STREAM;
    }
    size_t stream = (length / 4) & ~(size_t)63;
    la_four_streams(dst, src, stream);
    if (length > 4 * stream) memcpy(dst + 4 * stream, src + 4 * stream, length - 4 * stream);
}

LA_TARGET static void la_copy_streams(const la_plan *plan, la_direction direction,
                                                              const int64_t *blocks, const uint64_t *addresses,
                                                              size_t count) {
    for (size_t i = 0; i < count; i++) {
        for (size_t k = 0; k < plan->segment_count; k++) {
            const la_segment *segment = &plan->segments[k];
            char *cache = (char *)(uintptr_t)(segment->base + (uint64_t)blocks[i] * segment->stride);
            char *arena = (char *)(uintptr_t)(addresses[i] + segment->page_offset);
            if (direction == LA_GATHER)
                la_run_streams(arena, cache, (size_t)segment->length);
            else
                la_run_streams(cache, arena, (size_t)segment->length);
        }
    }
    la_streams_end();
}
#endif

static void la_copy_memcpy(const la_plan *plan, la_direction direction, const int64_t *blocks,
                           const uint64_t *addresses, size_t count) {
    for (size_t i = 0; i < count; i++) {
        for (size_t k = 0; k < plan->segment_count; k++) {
            const la_segment *segment = &plan->segments[k];
            char *cache = (char *)(uintptr_t)(segment->base + (uint64_t)blocks[i] * segment->stride);
            char *arena = (char *)(uintptr_t)(addresses[i] + segment->page_offset);
            if (direction == LA_GATHER)
                memcpy(arena, cache, (size_t)segment->length);
            else
                memcpy(cache, arena, (size_t)segment->length);
        }
    }
}

/* ---- codecs ---- */

/* Bytes of a group before it is encoded, at most. */
#define LA_GROUP_BYTES (LA_GROUP * 4)

static inline la_encoded la_encoded_block(const la_plan *plan, uint64_t address) {
    const size_t elements = (size_t)plan->block_bytes / la_element_bytes(plan->element);
    return (la_encoded){.start = (unsigned char *)(uintptr_t)address, .groups = (elements + LA_GROUP - 1) / LA_GROUP};
}

/* Whether a block could be encoded. Groups that lie in several runs go through memory of their own. */
static int la_encode_block(const la_plan *plan, la_encode_call *encode, uint64_t block, uint64_t address) {
    const size_t group = LA_GROUP * la_element_bytes(plan->element);
    la_encoded to = la_encoded_block(plan, address);
    unsigned char part[LA_GROUP_BYTES];
    size_t held = 0;
    for (size_t k = 0; k < plan->segment_count; k++) {
        const la_segment *segment = &plan->segments[k];
        const unsigned char *from = (const unsigned char *)(uintptr_t)(segment->base + block * segment->stride);
        size_t left = (size_t)segment->length;
        if (held > 0) {
            const size_t take = left < group - held ? left : group - held;
            memcpy(part + held, from, take);
            from += take, left -= take, held += take;
            if (held < group) continue;
            if (!encode(&to, part, 1, plan->codec, plan->element)) return 0;
            held = 0;
        }
        const size_t whole = left / group;
        if (whole > 0 && !encode(&to, from, whole, plan->codec, plan->element)) return 0;
        held = left - whole * group;
        memcpy(part, from + whole * group, held);
    }
    if (held == 0) return 1;
    memset(part + held, 0, group - held);
    return encode(&to, part, 1, plan->codec, plan->element);
}

/* Whether a block could be decoded. */
static int la_decode_block(const la_plan *plan, la_decode_call *decode, uint64_t block, uint64_t address) {
    const size_t group = LA_GROUP * la_element_bytes(plan->element);
    la_encoded from = la_encoded_block(plan, address);
    unsigned char part[LA_GROUP_BYTES];
    size_t held = 0; /* bytes of part, its last ones, that belong to the next run */
    for (size_t k = 0; k < plan->segment_count; k++) {
        const la_segment *segment = &plan->segments[k];
        unsigned char *to = (unsigned char *)(uintptr_t)(segment->base + block * segment->stride);
        size_t left = (size_t)segment->length;
        const size_t take = left < held ? left : held;
        memcpy(to, part + group - held, take);
        to += take, left -= take, held -= take;
        const size_t whole = left / group;
        if (whole > 0 && !decode(&from, to, whole, plan->codec, plan->element)) return 0;
        to += whole * group, left -= whole * group;
        if (left == 0) continue;
        if (!decode(&from, part, 1, plan->codec, plan->element)) return 0;
        memcpy(to, part, left);
        held = group - left;
    }
    return 1;
}

#if defined(__x86_64__) && defined(LA_STREAMS)
typedef struct {
    int avx2, avx512, avx512_codecs;
} la_features;

/* What the processor has and the kernel keeps the registers of: AVX2, AVX512F, and what the codecs use beside it. The
   compiler's own __builtin_cpu_supports needs a variable that not every compiler's library has. The result is kept: in a
   virtual machine the instruction that asks takes microseconds. */
static la_features la_have(void) {
    static int kept; /* bits of the features, and 8: known; threads that write it together write the same */
    int known = __atomic_load_n(&kept, __ATOMIC_RELAXED);
    if (known == 0) {
        const unsigned registers = 0xe6, shorter = 0x6; /* of SSE, AVX and AVX512 in XCR0 */
        const unsigned more = bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
        unsigned a, b, c, d, low = 0, high = 0;
        known = 8;
        if (__get_cpuid(1, &a, &b, &c, &d) && (c & bit_OSXSAVE)) {
            const int half = (c & bit_F16C) != 0;
            __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
            if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) b = 0;
            if ((low & shorter) == shorter && (b & bit_AVX2) && half) known |= 1;
            if ((low & registers) == registers && (b & bit_AVX512F)) known |= (b & more) == more ? 6 : 2;
        }
        __atomic_store_n(&kept, known, __ATOMIC_RELAXED);
    }
    return (la_features){.avx2 = known & 1, .avx512 = known >> 1 & 1, .avx512_codecs = known >> 2 & 1};
}
#endif

/* Whether this CPU and its operating system can run the kernel. */
static inline int la_kernel_usable(la_kernel kernel) {
    if (kernel == LA_KERNEL_MEMCPY) return 1;
#if defined(__x86_64__) && defined(LA_STREAMS)
    if (kernel == LA_KERNEL_AVX512) return la_have().avx512;
    if (kernel == LA_KERNEL_AVX2) return la_have().avx2;
#elif defined(LA_STREAMS)
    if (kernel == LA_STREAMS) return 1; /* every arm64 processor that runs Linux has NEON */
#endif
    return 0;
}

/* The kernel to copy with where nobody asks for another: plain copies are by memcpy, unless one was measured to be faster. */
static inline la_kernel la_kernel_default(void) {
    return la_kernel_usable(LA_KERNEL_AVX512) ? LA_KERNEL_AVX512
           : la_kernel_usable(LA_KERNEL_AVX2) ? LA_KERNEL_AVX2
                                              : LA_KERNEL_MEMCPY;
}

/* Copies by the plan's codec. Sets failed[i] to 1 where it cannot encode or decode pair i; returns how many these are. */
static size_t la_copy_coded(const la_plan *plan, la_kernel kernel, la_direction direction, const int64_t *blocks,
                            const uint64_t *addresses, size_t count, unsigned char *failed) {
    la_encode_call *encode = la_encode_plain;
    la_decode_call *decode = la_decode_plain;
#ifdef LA_CODEC_SETS
    if (kernel == LA_KERNEL_AVX512 && la_have().avx512_codecs)
        encode = la_encode_avx512, decode = la_decode_avx512;
    else if (kernel != LA_KERNEL_MEMCPY && la_have().avx2)
        encode = la_encode_avx2, decode = la_decode_avx2;
#endif
    (void)kernel;
    size_t failures = 0;
    for (size_t i = 0; i < count; i++) {
        const int done = direction == LA_GATHER ? la_encode_block(plan, encode, (uint64_t)blocks[i], addresses[i])
                                                : la_decode_block(plan, decode, (uint64_t)blocks[i], addresses[i]);
        if (done) continue;
        failed[i] = 1;
        failures++;
    }
    return failures;
}

/*
 * Copies checked pairs with a usable kernel. Safe from several threads on different pairs. Returns how many pairs the plan's
 * codec could not encode or decode, and sets their bytes of failed, count zeros, to 1. Without a codec there are none, and
 * failed is not used.
 */
static inline size_t la_copy(const la_plan *plan, la_kernel kernel, la_direction direction, const int64_t *blocks,
                             const uint64_t *addresses, size_t count, unsigned char *failed) {
    if (plan->codec != LA_PLAIN) return la_copy_coded(plan, kernel, direction, blocks, addresses, count, failed);
#ifdef LA_STREAMS
    if (kernel == LA_STREAMS) {
        la_copy_streams(plan, direction, blocks, addresses, count);
        return 0;
    }
#endif
    (void)kernel;
    la_copy_memcpy(plan, direction, blocks, addresses, count);
    return 0;
}

#endif
