/*
 * The few calls of the CUDA driver that copies need, bound at run time.
 *
 * The library is opened by name, so that one build of the extension serves machines with and without a GPU, needs no
 * CUDA headers, and can be tested against a stand-in. Only plain C types cross the boundary: the driver's handles are
 * pointers, its device addresses 64-bit integers, its results ints with 0 for success.
 */
#ifndef LOOKASIDE_CUDACORE_H
#define LOOKASIDE_CUDACORE_H

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "_copycore.h"

#define LA_CUDA_NOT_READY 600
#define LA_CUDA_NOT_SUPPORTED 801
#define LA_CUDA_HOST_PORTABLE 1u
#define LA_CUDA_HOST_READ_ONLY 8u
#define LA_CUDA_STREAM_NON_BLOCKING 1u
#define LA_CUDA_EVENT_DISABLE_TIMING 2u
#define LA_CUDA_SOURCE_IN_STREAM_ORDER 1u
/* Descriptors handed to the driver at once: bounds our memory, and is far above where batching stops paying. */
#define LA_CUDA_BATCH 8192u

/* CUmemcpyAttributes of CUDA 12.8 and later. */
typedef struct {
    unsigned source_access_order;
    struct {
        unsigned type;
        int id;
    } source_location, target_location;
    unsigned flags;
} la_cuda_attributes;

typedef struct {
    void *library;
    int device;
    void *context; /* the device's primary one, which PyTorch uses too */

    int (*init)(unsigned);
    int (*device_get)(int *, int);
    int (*context_retain)(void **, int);
    int (*context_release)(int);
    int (*context_push)(void *);
    int (*context_pop)(void **);
    int (*host_register)(void *, size_t, unsigned);
    int (*host_unregister)(void *);
    int (*stream_priorities)(int *, int *);
    int (*stream_create)(void **, unsigned, int);
    int (*stream_destroy)(void *);
    int (*stream_wait)(void *, void *, unsigned);
    int (*event_create)(void **, unsigned);
    int (*event_destroy)(void *);
    int (*event_record)(void *, void *);
    int (*event_query)(void *);
    int (*copy_to_device)(uint64_t, const void *, size_t, void *);
    int (*copy_to_host)(void *, uint64_t, size_t, void *);
    /* Absent before CUDA 12.8. */
    int (*copy_batch)(uint64_t *, uint64_t *, size_t *, size_t, la_cuda_attributes *, size_t *, size_t, size_t *, void *);
    int (*error_name)(int, const char **);
} la_cuda;

/* Opens the driver; on failure says why in message and leaves nothing open. */
static inline int la_cuda_open(la_cuda *cuda, const char *library, int ordinal, char *message, size_t room) {
    memset(cuda, 0, sizeof *cuda);
    cuda->library = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (cuda->library == NULL) {
        const char *why = dlerror();
        snprintf(message, room, "cannot open %s: %s", library, why != NULL ? why : "unknown error");
        return -1;
    }
    struct {
        const char *name;
        void **where;
        int optional;
    } symbols[] = {
        {"cuInit", (void **)&cuda->init, 0},
        {"cuDeviceGet", (void **)&cuda->device_get, 0},
        {"cuDevicePrimaryCtxRetain", (void **)&cuda->context_retain, 0},
        {"cuDevicePrimaryCtxRelease_v2", (void **)&cuda->context_release, 0},
        {"cuCtxPushCurrent_v2", (void **)&cuda->context_push, 0},
        {"cuCtxPopCurrent_v2", (void **)&cuda->context_pop, 0},
        {"cuMemHostRegister_v2", (void **)&cuda->host_register, 0},
        {"cuMemHostUnregister", (void **)&cuda->host_unregister, 0},
        {"cuCtxGetStreamPriorityRange", (void **)&cuda->stream_priorities, 0},
        {"cuStreamCreateWithPriority", (void **)&cuda->stream_create, 0},
        {"cuStreamDestroy_v2", (void **)&cuda->stream_destroy, 0},
        {"cuStreamWaitEvent", (void **)&cuda->stream_wait, 0},
        {"cuEventCreate", (void **)&cuda->event_create, 0},
        {"cuEventDestroy_v2", (void **)&cuda->event_destroy, 0},
        {"cuEventRecord", (void **)&cuda->event_record, 0},
        {"cuEventQuery", (void **)&cuda->event_query, 0},
        {"cuMemcpyHtoDAsync_v2", (void **)&cuda->copy_to_device, 0},
        {"cuMemcpyDtoHAsync_v2", (void **)&cuda->copy_to_host, 0},
        {"cuMemcpyBatchAsync", (void **)&cuda->copy_batch, 1},
        {"cuGetErrorName", (void **)&cuda->error_name, 1},
    };
    for (size_t i = 0; i < sizeof symbols / sizeof symbols[0]; i++) {
        *symbols[i].where = dlsym(cuda->library, symbols[i].name);
        if (*symbols[i].where == NULL && !symbols[i].optional) {
            snprintf(message, room, "%s has no %s: the driver is too old", library, symbols[i].name);
            goto failed;
        }
    }
    int result;
    const char *call = "cuInit";
    if ((result = cuda->init(0)) == 0) {
        call = "cuDeviceGet";
        if ((result = cuda->device_get(&cuda->device, ordinal)) == 0) {
            call = "cuDevicePrimaryCtxRetain";
            if ((result = cuda->context_retain(&cuda->context, cuda->device)) == 0) return 0;
        }
    }
    snprintf(message, room, "%s failed with %d", call, result);
failed:
    dlclose(cuda->library);
    memset(cuda, 0, sizeof *cuda);
    return -1;
}

/* Gives the context back. The driver stays loaded: it runs threads of its own. */
static inline void la_cuda_close(la_cuda *cuda) {
    if (cuda->context != NULL) cuda->context_release(cuda->device);
    cuda->context = NULL;
}

static inline const char *la_cuda_error(const la_cuda *cuda, int result) {
    const char *name = NULL;
    if (cuda->error_name != NULL && cuda->error_name(result, &name) == 0 && name != NULL) return name;
    return "unknown CUDA error";
}

/*
 * Enqueues the copies of checked pairs on the stream. The context must be current. On failure *call names the driver's
 * function, and copies enqueued before it may still be under way: wait for the stream before touching either side.
 * *batched says whether the batch call may be used, and is cleared where this device turns out not to take it.
 */
static inline int la_cuda_copy(const la_cuda *cuda, int *batched, const la_plan *plan, la_direction direction,
                               const int64_t *blocks, const uint64_t *addresses, size_t count, void *stream,
                               const char **call) {
    size_t total = count * plan->segment_count, room = total < LA_CUDA_BATCH ? total : LA_CUDA_BATCH, filled = 0;
    if (total == 0) return 0;
    uint64_t *sides = malloc(room * (2 * sizeof(uint64_t) + sizeof(size_t)));
    *call = "malloc";
    if (sides == NULL) return -1;
    uint64_t *targets = sides, *sources = sides + room;
    size_t *sizes = (size_t *)(sources + room), done = 0;
    int result = 0;
    for (size_t i = 0; i < count && result == 0; i++) {
        for (size_t k = 0; k < plan->segment_count && result == 0; k++) {
            const la_segment *segment = &plan->segments[k];
            uint64_t cache = segment->base + (uint64_t)blocks[i] * segment->stride;
            uint64_t arena = addresses[i] + segment->page_offset;
            targets[filled] = direction == LA_GATHER ? arena : cache;
            sources[filled] = direction == LA_GATHER ? cache : arena;
            sizes[filled] = (size_t)segment->length;
            done++;
            if (++filled < room && done < total) continue;
            int batch = *batched && cuda->copy_batch != NULL;
            if (batch) {
                la_cuda_attributes attributes = {.source_access_order = LA_CUDA_SOURCE_IN_STREAM_ORDER};
                size_t first = 0, failed = 0;
                *call = "cuMemcpyBatchAsync";
                result = cuda->copy_batch(targets, sources, sizes, filled, &attributes, &first, 1, &failed, stream);
                if (result == LA_CUDA_NOT_SUPPORTED) *batched = batch = result = 0;
            }
            for (size_t j = 0; !batch && j < filled && result == 0; j++) {
                if (direction == LA_GATHER) {
                    *call = "cuMemcpyDtoHAsync";
                    result = cuda->copy_to_host((void *)(uintptr_t)targets[j], sources[j], sizes[j], stream);
                } else {
                    *call = "cuMemcpyHtoDAsync";
                    result = cuda->copy_to_device(targets[j], (const void *)(uintptr_t)sources[j], sizes[j], stream);
                }
            }
            filled = 0;
        }
    }
    free(sides);
    return result;
}

#endif
