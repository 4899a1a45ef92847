/*
 * A stand-in for libcuda: enough of the driver for the connector's copies, on host memory.
 *
 * Streams are lists of work that runs only when the test says so (fake_run), so a test can see what was ordered after
 * what. The test drives it through the fake_* functions: fail the Nth call of a function, run streams, read the log.
 * Not safe for several threads except as the tests use it: one mutex around everything.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { COPY, RECORD, WAIT };

typedef struct {
    int kind;
    void *target;
    const void *source;
    size_t size;
    struct event *event;
    unsigned generation; /* of the event, when recorded or waited for */
} task;

typedef struct event {
    unsigned recorded, happened;
    int alive;
} event;

typedef struct {
    task *tasks;
    size_t count, next;
} stream;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static stream *streams[64];
static size_t stream_count;
static size_t pinned, pinned_for_reading, live_events, batches, copies;
static long contexts; /* pushed and not popped */
static char fail_name[64];
static int fail_after, fail_result, broken, eager;

/* What call `name` is to answer: 0, or the error planted for it. */
static int plant(const char *name) {
    if (broken) return broken;
    if (strcmp(name, fail_name) != 0) return 0;
    if (fail_after-- > 0) return 0;
    fail_name[0] = 0;
    return fail_result;
}

static int ready(const task *t) { return t->kind != WAIT || t->event->happened >= t->generation; }

static void run_all(void) {
    for (int moved = 1; moved;) {
        moved = 0;
        for (size_t i = 0; i < stream_count; i++) {
            stream *s = streams[i];
            while (s->next < s->count && ready(&s->tasks[s->next])) {
                task *t = &s->tasks[s->next++];
                if (t->kind == COPY) memcpy(t->target, t->source, t->size);
                if (t->kind == RECORD) t->event->happened = t->generation;
                moved = 1;
            }
        }
    }
}

static int enqueue(void *handle, task t) {
    stream *s = handle;
    s->tasks = realloc(s->tasks, (s->count + 1) * sizeof *s->tasks);
    s->tasks[s->count++] = t;
    return 0;
}

#define CALL(name)                          \
    pthread_mutex_lock(&lock);              \
    int result = plant(name);               \
    if (result == 0 && contexts == 0 && strncmp(name, "cuCtxPush", 9) != 0) result = 201 /* no context */;
#define DONE                                \
    if (eager) run_all();                   \
    pthread_mutex_unlock(&lock);            \
    return result;

int cuInit(unsigned flags) { return flags == 0 ? plant("cuInit") : 1; }
int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal + 100;
    return ordinal < 2 ? 0 : 101;
}
static int context;
static size_t retained;
int cuDevicePrimaryCtxRetain(void **out, int device) {
    (void)device;
    *out = &context;
    retained++;
    return 0;
}
int cuDevicePrimaryCtxRelease_v2(int device) {
    (void)device;
    retained--;
    return 0;
}
int cuCtxPushCurrent_v2(void *wanted) {
    CALL("cuCtxPushCurrent")
    if (result == 0 && wanted != &context) result = 201;
    if (result == 0) contexts++;
    DONE
}
int cuCtxPopCurrent_v2(void **popped) {
    pthread_mutex_lock(&lock);
    contexts--;
    *popped = &context;
    pthread_mutex_unlock(&lock);
    return 0;
}
int cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0, *greatest = -5;
    return plant("cuCtxGetStreamPriorityRange");
}
int cuMemHostRegister_v2(void *address, size_t size, unsigned flags) {
    CALL("cuMemHostRegister")
    if (result == 0 && (address == NULL || size == 0 || (flags != 1 && flags != 9))) result = 1;
    if (result == 0) pinned++;
    if (result == 0 && flags == 9) pinned_for_reading++;
    DONE
}
int cuMemHostUnregister(void *address) {
    CALL("cuMemHostUnregister")
    (void)address;
    if (result == 0) pinned--;
    DONE
}
int cuStreamCreateWithPriority(void **out, unsigned flags, int priority) {
    CALL("cuStreamCreate")
    if (result == 0 && (flags != 1 || priority != 0)) result = 1;
    if (result == 0) *out = streams[stream_count++] = calloc(1, sizeof(stream));
    DONE
}
int cuStreamDestroy_v2(void *handle) {
    CALL("cuStreamDestroy")
    (void)handle; /* kept: the log outlives it */
    DONE
}
int cuStreamWaitEvent(void *handle, void *wanted, unsigned flags) {
    CALL("cuStreamWaitEvent")
    event *e = wanted;
    if (result == 0 && (flags != 0 || !e->alive)) result = 400;
    if (result == 0) enqueue(handle, (task){.kind = WAIT, .event = e, .generation = e->recorded});
    DONE
}
int cuEventCreate(void **out, unsigned flags) {
    CALL("cuEventCreate")
    if (result == 0 && flags != 2) result = 1;
    if (result == 0) {
        event *e = calloc(1, sizeof *e); /* never freed: a destroyed event may still be waited for */
        e->alive = 1;
        live_events++;
        *out = e;
    }
    DONE
}
int cuEventDestroy_v2(void *handle) {
    CALL("cuEventDestroy")
    event *e = handle;
    if (!e->alive) {
        fprintf(stderr, "fake cuda: event destroyed twice\n");
        abort();
    }
    e->alive = 0;
    live_events--;
    DONE
}
int cuEventRecord(void *handle, void *where) {
    CALL("cuEventRecord")
    event *e = handle;
    if (result == 0) enqueue(where, (task){.kind = RECORD, .event = e, .generation = ++e->recorded});
    DONE
}
int cuEventQuery(void *handle) {
    CALL("cuEventQuery")
    event *e = handle;
    if (result == 0 && !e->alive) result = 400;
    if (result == 0 && e->happened < e->recorded) result = 600;
    DONE
}
static void copy(void *where, uint64_t target, uint64_t source, size_t size) {
    copies++;
    enqueue(where, (task){.kind = COPY, .target = (void *)target, .source = (void *)source, .size = size});
}
int cuMemcpyHtoDAsync_v2(uint64_t target, const void *source, size_t size, void *where) {
    CALL("cuMemcpyHtoDAsync")
    if (result == 0) copy(where, target, (uint64_t)(uintptr_t)source, size);
    DONE
}
int cuMemcpyDtoHAsync_v2(void *target, uint64_t source, size_t size, void *where) {
    CALL("cuMemcpyDtoHAsync")
    if (result == 0) copy(where, (uint64_t)(uintptr_t)target, source, size);
    DONE
}
#ifndef FAKE_OLD_DRIVER
int cuMemcpyBatchAsync(uint64_t *targets, uint64_t *sources, size_t *sizes, size_t count, unsigned *attributes,
                       size_t *indexes, size_t attribute_count, size_t *failed, void *where) {
    CALL("cuMemcpyBatchAsync")
    if (result == 0 && (attribute_count != 1 || indexes[0] != 0 || attributes[0] != 1 || where == NULL)) result = 1;
    batches += result == 0;
    for (size_t i = 0; result == 0 && i < count; i++) copy(where, targets[i], sources[i], sizes[i]);
    *failed = 0;
    DONE
}
#endif
int cuGetErrorName(int result, const char **name) {
    *name = result == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_OTHER";
    return 0;
}

/* ---- for the test ---- */

void *fake_stream(void) { return streams[stream_count++] = calloc(1, sizeof(stream)); }
void fake_run(void) {
    pthread_mutex_lock(&lock);
    run_all();
    pthread_mutex_unlock(&lock);
}
/* Work on a stream that ends when fake_release is called: a forward pass. */
void *fake_block(void *where) {
    event *e = calloc(1, sizeof *e);
    e->recorded = 1;
    enqueue(where, (task){.kind = WAIT, .event = e, .generation = 1});
    return e;
}
void fake_copy(void *where, void *target, void *source, size_t size) {
    enqueue(where, (task){.kind = COPY, .target = target, .source = source, .size = size});
}
void fake_release(void *handle) { ((event *)handle)->happened = 1; }
void fake_fail(const char *name, int after, int with) {
    pthread_mutex_lock(&lock);
    snprintf(fail_name, sizeof fail_name, "%s", name);
    fail_after = after, fail_result = with;
    pthread_mutex_unlock(&lock);
}
void fake_break(int with) { broken = with; }
void fake_eager(int on) { eager = on; }
size_t fake_pinned(void) { return pinned; }
size_t fake_pinned_for_reading(void) { return pinned_for_reading; }
size_t fake_events(void) { return live_events; }
size_t fake_batches(void) { return batches; }
size_t fake_copies(void) { return copies; }
size_t fake_retained(void) { return retained; }
long fake_contexts(void) { return contexts; }
