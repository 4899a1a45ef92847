/*
 * Seeded sweep of the copy core under sanitizers: native_sweep SEED ROUNDS.
 *
 * Every round makes a random plan (segments of any length and alignment) over memory allocated to the byte, gathers and
 * scatters random blocks with each kernel that runs here and through a pretended GPU, and compares with a copy made byte
 * by byte. All kernels encode and decode random numbers and random bytes alike. The checks are compared with the same question asked in 128-bit arithmetic. And threads copy from and to a file
 * that is cut short. Prints what differed and exits 1.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "_cudacore.h"
#include "_guard.h"

static uint64_t state;

static uint64_t draw(void) { /* splitmix64 */
    uint64_t z = (state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static uint64_t below(uint64_t n) { return draw() % n; }

static void fail(const char *what, uint64_t a, uint64_t b) {
    fprintf(stderr, "%s: %llu, %llu\n", what, (unsigned long long)a, (unsigned long long)b);
    exit(1);
}

static void fill(unsigned char *p, size_t n) {
    for (size_t i = 0; i < n; i++) p[i] = (unsigned char)draw();
}

/* The kernel of this machine with four streams; memcpy where there is none. */
static la_kernel streams(void) {
    return la_kernel_usable(LA_KERNEL_NEON) ? LA_KERNEL_NEON : la_kernel_default();
}

/* A pretended driver: copies at once. */
static size_t single_copies, batch_copies;

static int to_device(uint64_t target, const void *source, size_t size, void *stream) {
    (void)stream;
    single_copies++;
    memcpy((void *)(uintptr_t)target, source, size);
    return 0;
}

static int to_host(void *target, uint64_t source, size_t size, void *stream) {
    (void)stream;
    single_copies++;
    memcpy(target, (const void *)(uintptr_t)source, size);
    return 0;
}

static int batch(uint64_t *targets, uint64_t *sources, size_t *sizes, size_t count, la_cuda_attributes *attributes,
                 size_t *indexes, size_t attribute_count, size_t *failed, void *stream) {
    (void)stream;
    if (attribute_count != 1 || indexes[0] != 0 || attributes->source_access_order != 1 || *failed != 0) return 1;
    if (count == 0 || count > LA_CUDA_BATCH) return 1;
    for (size_t i = 0; i < count; i++) {
        batch_copies++;
        memcpy((void *)(uintptr_t)targets[i], (const void *)(uintptr_t)sources[i], sizes[i]);
    }
    return 0;
}

static void copy_round(void) {
    la_segment segments[6];
    la_plan plan = {.segments = segments, .segment_count = 1 + below(6), .num_blocks = 1 + below(6)};
    size_t cache_bytes = below(64);
    for (size_t k = 0; k < plan.segment_count; k++) {
        /* Lengths about every branch: short runs, one group, several, with heads and tails. */
        uint64_t scale[] = {16, 2 * LA_SHORT_RUN, 6 * LA_STREAM, 20 * LA_STREAM};
        uint64_t length = 1 + below(scale[below(4)]);
        plan.page_bytes += below(3) * below(100);
        segments[k] = (la_segment){cache_bytes, length + below(2) * below(200), length, plan.page_bytes};
        cache_bytes += segments[k].stride * (plan.num_blocks - 1) + length + below(70);
        plan.page_bytes += length;
    }
    size_t count = below(plan.num_blocks + 1), lead = below(64);
    size_t arena_bytes = lead + count * plan.page_bytes;
    unsigned char *cache = malloc(cache_bytes + 1), *arena = malloc(arena_bytes + 1);
    unsigned char *expected_cache = malloc(cache_bytes + 1), *expected_arena = malloc(arena_bytes + 1);
    int64_t *blocks = malloc(count * sizeof *blocks + 1);
    uint64_t *addresses = malloc(count * sizeof *addresses + 1);
    for (size_t k = 0; k < plan.segment_count; k++) segments[k].base += (uintptr_t)cache;
    uint64_t first = below(plan.num_blocks);
    for (size_t i = 0; i < count; i++) { /* distinct blocks, pages in any order */
        blocks[i] = (int64_t)((first + i) % plan.num_blocks);
        addresses[i] = (uintptr_t)arena + lead + (count - 1 - i) * plan.page_bytes;
    }
    la_span region = {(uintptr_t)arena, arena_bytes}, span = {(uintptr_t)cache, cache_bytes};
    size_t bad;
    for (size_t k = 0; k < plan.segment_count; k++)
        if (!la_segment_inside(&segments[k], plan.num_blocks, &span, 1)) fail("segment refused", k, cache_bytes);
    if (la_check(&plan, &region, 1, blocks, addresses, count, &bad) != LA_OK) fail("pairs refused", bad, count);

    la_cuda with_batch = {.copy_to_device = to_device, .copy_to_host = to_host, .copy_batch = batch};
    la_cuda without = {.copy_to_device = to_device, .copy_to_host = to_host};
    for (int way = 0; way < 8; way++) {
        la_direction direction = way & 1 ? LA_SCATTER : LA_GATHER;
        la_kernel kernel = way / 2 == 0 ? LA_KERNEL_MEMCPY : streams();
        fill(cache, cache_bytes);
        fill(arena, arena_bytes);
        memcpy(expected_cache, cache, cache_bytes);
        memcpy(expected_arena, arena, arena_bytes);
        for (size_t i = 0; i < count; i++) {
            for (size_t k = 0; k < plan.segment_count; k++) {
                size_t c = segments[k].base - (uintptr_t)cache + (size_t)blocks[i] * segments[k].stride;
                size_t a = addresses[i] - (uintptr_t)arena + segments[k].page_offset;
                for (size_t j = 0; j < segments[k].length; j++) {
                    if (direction == LA_GATHER)
                        expected_arena[a + j] = cache[c + j];
                    else
                        expected_cache[c + j] = arena[a + j];
                }
            }
        }
        if (way < 4) {
            if (la_copy(&plan, kernel, direction, blocks, addresses, count, NULL) != 0) fail("no codec failed", way, count);
        } else {
            int batched = way < 6;
            const char *call = NULL;
            if (la_cuda_copy(way < 6 ? &with_batch : &without, &batched, &plan, direction, blocks, addresses, count, NULL,
                             &call) != 0)
                fail(call, (uint64_t)way, count);
        }
        if (memcmp(cache, expected_cache, cache_bytes) != 0) fail("KV cache differs", (uint64_t)way, count);
        if (memcmp(arena, expected_arena, arena_bytes) != 0) fail("arena differs", (uint64_t)way, count);
    }
    free(cache), free(arena), free(expected_cache), free(expected_arena), free(blocks), free(addresses);
}

/* Numbers as they come, of many magnitudes, of one with zeros, infinities and NaNs now and then; or any bits. */
static void fill_numbers(unsigned char *p, size_t n, la_element element, uint64_t kind) {
    const size_t size = la_element_bytes(element);
    fill(p, n);
    if (kind == 3) return;
    for (size_t i = 0; i + size <= n; i += size) {
        float value = (float)(int64_t)draw() / 9.3e18f;
        if (kind == 1) value *= la_float((uint32_t)below(255) << 23);
        if (kind == 2 && below(300) == 0) value = la_float(below(2) ? 0x7f800000u : 0xffc00001u);
        if (below(50) == 0) value = 0;
        const uint32_t bits = la_bits(value);
        const uint16_t half = (uint16_t)(element == LA_FLOAT16 ? la_to_half(value) : bits >> 16);
        memcpy(p + i, size == 4 ? (const void *)&bits : (const void *)&half, size);
    }
}

/* All kernels encode to the same bytes and decode to the same numbers, or refuse alike, and touch nothing else. */
static void codec_round(void) {
    const la_codec codec = (la_codec)(1 + below(3));
    const la_element element = (la_element)(1 + below(3));
    if (!la_codec_takes(codec, element)) return;
    const size_t size = la_element_bytes(element);
    la_segment segments[5];
    la_plan plan = {.segments = segments, .segment_count = 1 + below(5), .num_blocks = 2, .codec = codec, .element = element};
    size_t cache_bytes = below(64);
    for (size_t k = 0; k < plan.segment_count; k++) {
        /* Runs shorter than a group, of some, and of whole groups. */
        const uint64_t length = size * (below(2) ? 1 + below(below(2) ? 40 : 900) : LA_GROUP * (1 + below(6)));
        segments[k] = (la_segment){cache_bytes, length + below(2) * below(200), length, plan.block_bytes};
        cache_bytes += 2 * segments[k].stride + below(70);
        plan.block_bytes += length;
    }
    plan.page_bytes = la_encoded_bytes(codec, element, plan.block_bytes);
    unsigned char *cache = malloc(cache_bytes + 1), *from = malloc(cache_bytes + 1), *first = malloc(cache_bytes + 1);
    unsigned char *arena = malloc(plan.page_bytes), *encoded = malloc(plan.page_bytes);
    for (size_t k = 0; k < plan.segment_count; k++) segments[k].base += (uintptr_t)cache;
    const int64_t block = (int64_t)below(2);
    const uint64_t address = (uintptr_t)arena;
    const la_kernel kernels[] = {LA_KERNEL_MEMCPY, LA_KERNEL_AVX2, LA_KERNEL_AVX512, LA_KERNEL_NEON};
    unsigned char refused[4] = {0}, wrong[4] = {0}, seen = 0;
    fill_numbers(from, cache_bytes, element, 3);
    for (size_t k = 0; k < plan.segment_count; k++)
        fill_numbers(from + (segments[k].base - (uintptr_t)cache) + (size_t)block * segments[k].stride, segments[k].length,
                     element, below(8) ? 0 : below(4));
    const int any = below(4) == 0; /* decode any bytes, not what was encoded */
    if (any) fill(encoded, plan.page_bytes);
    for (int i = 0; i < 4; i++) {
        if (!la_kernel_usable(kernels[i])) continue;
        memcpy(cache, from, cache_bytes);
        memset(arena, 0, plan.page_bytes);
        la_copy(&plan, kernels[i], LA_GATHER, &block, &address, 1, &refused[i]);
        if (memcmp(cache, from, cache_bytes) != 0) fail("encoding wrote to the KV cache", codec, element);
        if (refused[i] != refused[0]) fail("kernels do not refuse alike", codec, element);
        if (any)
            memcpy(arena, encoded, plan.page_bytes);
        else if (refused[0])
            continue;
        else if (!seen)
            memcpy(encoded, arena, plan.page_bytes);
        else if (memcmp(arena, encoded, plan.page_bytes) != 0)
            fail("encoded bytes differ", codec, element);
        memset(cache, 0xaa, cache_bytes);
        la_copy(&plan, kernels[i], LA_SCATTER, &block, &address, 1, &wrong[i]);
        if (memcmp(arena, encoded, plan.page_bytes) != 0) fail("decoding wrote to the arena", codec, element);
        if (wrong[i] != wrong[0] || (wrong[0] && !any)) fail("kernels do not decode alike", codec, element);
        if (!seen)
            memcpy(first, cache, cache_bytes);
        else if (!any && memcmp(cache, first, cache_bytes) != 0) /* the payload of NaNs, which no codec writes, may differ */
            fail("decoded bytes differ", codec, element);
        seen = 1;
        unsigned char *gap = cache; /* what lies between the runs of the block is not touched */
        for (size_t k = 0; k < plan.segment_count; k++) {
            unsigned char *run = (unsigned char *)(uintptr_t)(segments[k].base + (uint64_t)block * segments[k].stride);
            for (; gap < run; gap++)
                if (*gap != 0xaa) fail("decoding wrote beside the block", codec, element);
            gap = run + segments[k].length;
            if (codec == LA_LOSSLESS && !any && memcmp(run, from + (run - cache), segments[k].length) != 0)
                fail("lossless lost something", codec, element);
        }
    }
    free(cache), free(from), free(first), free(arena), free(encoded);
}

/* A number near one of the places where arithmetic breaks. */
static uint64_t edge(void) {
    uint64_t bases[] = {0, 4096, (uint64_t)1 << 32, (uint64_t)1 << 63, UINT64_MAX};
    return bases[below(5)] + below(9) - 4;
}

static void check_round(void) {
    la_span span = {edge(), edge()};
    if (span.start + span.size < span.start) span.size = UINT64_MAX - span.start;
    typedef unsigned __int128 wide;
    wide end = (wide)span.start + span.size;

    la_plan plan = {.num_blocks = 1 + below(100), .page_bytes = edge()};
    int64_t block = (int64_t)edge();
    uint64_t address = edge();
    size_t bad;
    la_verdict want = block < 0 || (uint64_t)block >= plan.num_blocks ? LA_BAD_BLOCK
                      : address >= span.start && (wide)address + plan.page_bytes <= end ? LA_OK
                                                                                        : LA_BAD_ADDRESS;
    la_span regions[] = {{8, 0}, span};
    if (la_check(&plan, regions, 2, &block, &address, 1, &bad) != want) fail("verdict", address, (uint64_t)block);

    la_segment segment = {edge(), edge(), edge(), 0};
    uint64_t blocks = edge();
    int fits = 0;
    if (blocks != 0 && segment.length != 0) {
        wide reach = (wide)segment.stride * (blocks - 1), top = (wide)segment.base + segment.length;
        fits = segment.base >= span.start && reach <= end && top <= end && reach + top <= end;
    }
    if (la_segment_inside(&segment, blocks, &span, 1) != fits) fail("segment", segment.base, blocks);
}

#define GUARD_PAGE 65536u
#define GUARD_PAGES 4u

/* Copies pages of a file of which only the first half is left, with whole pages between those that fail. */
static void *guard_rounds(void *argument) {
    int file = *(int *)argument;
    if (ftruncate(file, GUARD_PAGES * GUARD_PAGE) != 0) fail("file", 0, 0);
    unsigned char *arena = mmap(NULL, GUARD_PAGES * GUARD_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    unsigned char *cache = malloc(GUARD_PAGES * GUARD_PAGE);
    if (arena == MAP_FAILED || cache == NULL) fail("no memory", 0, 0);
    if (ftruncate(file, GUARD_PAGES / 2 * GUARD_PAGE) != 0) fail("cut", 0, 0);
    la_segment segment = {(uintptr_t)cache, GUARD_PAGE, GUARD_PAGE, 0};
    la_plan plan = {.segments = &segment, .segment_count = 1, .num_blocks = GUARD_PAGES, .page_bytes = GUARD_PAGE};
    for (int i = 0; i < 400; i++) {
        la_kernel kernel = i & 1 ? streams() : LA_KERNEL_MEMCPY;
        la_direction direction = i & 2 ? LA_SCATTER : LA_GATHER;
        int bad = i & 4, page = bad ? 2 : 1;
        int64_t block = 3;
        uint64_t address = (uintptr_t)arena + (unsigned)page * GUARD_PAGE, fault = 0;
        memset(cache, i, GUARD_PAGES * GUARD_PAGE);
        size_t failures = 1;
        int failed = la_copy_guarded(&plan, kernel, direction, &block, &address, 1, NULL, &failures, &fault);
        if (!bad && failures != 0) fail("failures", failures, 0);
        if (failed != !!bad) fail("guarded copy", (uint64_t)failed, (uint64_t)i);
        if (bad && (fault < address || fault >= address + GUARD_PAGE)) fail("address of the fault", fault, address);
        if (!bad && memcmp(cache + 3 * GUARD_PAGE, arena + GUARD_PAGE, GUARD_PAGE) != 0) fail("guarded bytes", (uint64_t)i, 0);
    }
    munmap(arena, GUARD_PAGES * GUARD_PAGE);
    free(cache);
    return NULL;
}

static void guard_threads(void) {
    int files[4];
    pthread_t threads[4];
    if (la_guard_install() != 0 || la_guard_install() != 0) fail("guard", 0, 0);
    for (int i = 0; i < 4; i++) {
        files[i] = memfd_create("cut", 0);
        if (files[i] < 0) fail("memfd", (uint64_t)i, 0);
        if (pthread_create(&threads[i], NULL, guard_rounds, &files[i]) != 0) fail("thread", (uint64_t)i, 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        close(files[i]);
    }
}

int main(int count, char **arguments) {
    if (count != 3) return 2;
    state = strtoull(arguments[1], NULL, 10);
    for (uint64_t rounds = strtoull(arguments[2], NULL, 10); rounds > 0; rounds--) {
        copy_round();
        for (int i = 0; i < 10; i++) codec_round();
        for (int i = 0; i < 1000; i++) check_round();
    }
    guard_threads();
    if (single_copies == 0 || batch_copies == 0) fail("a driver's path was never taken", single_copies, batch_copies);
    return 0;
}
