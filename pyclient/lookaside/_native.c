/*
 * lookaside._native: copies between vLLM's KV cache and the mapped arena, and short waits, without the GIL.
 *
 * Plan   one KV cache's layout and the arena regions attached to it; gather and scatter on the CPU.
 * Cuda   the driver calls that the same copies need on a GPU.
 *
 * Memory rules. A Plan holds addresses, not objects: whoever makes one keeps the KV cache alive as long as the plan, and
 * keeps a region mapped until every copy that was started before its detach has ended. What a caller passes per copy
 * (block ids and addresses) is copied first, then checked, then used, so changing the arrays meanwhile does no harm. A copy on
 * the CPU that meets a bus error raises BusError; those that the driver makes are its own affair.
 */
#define _GNU_SOURCE /* ppoll, sendmmsg */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <poll.h>
#include <sys/socket.h>

#include "_copycore.h"
#include "_cudacore.h"
#include "_guard.h"

/* ---- arguments ------------------------------------------------------------------------------------------------- */

/* A private copy of n pairs, made while the GIL is held. */
typedef struct {
    int64_t *blocks;
    uint64_t *addresses;
    size_t count;
} pairs;

static void pairs_free(pairs *p) { PyMem_Free(p->blocks); }

/* One-dimensional contiguous buffer of 8-byte integers of the given sign. */
static int take_buffer(PyObject *object, Py_buffer *view, int is_signed, const char *name) {
    if (PyObject_GetBuffer(object, view, PyBUF_ND | PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0) return -1;
    const char *format = view->format != NULL ? view->format : "B";
    if (*format == '@' || *format == '=') format++;
    int right = view->ndim == 1 && view->itemsize == 8 && format[0] != 0 && format[1] == 0 &&
                strchr(is_signed ? "lqn" : "LQN", format[0]) != NULL;
    if (!right) {
        PyErr_Format(PyExc_TypeError, "%s must be a one-dimensional array of %s", name, is_signed ? "int64" : "uint64");
        PyBuffer_Release(view);
        return -1;
    }
    return 0;
}

static int pairs_take(pairs *out, PyObject *blocks, PyObject *addresses) {
    Py_buffer block_view, address_view;
    if (take_buffer(blocks, &block_view, 1, "blocks") < 0) return -1;
    if (take_buffer(addresses, &address_view, 0, "addresses") < 0) {
        PyBuffer_Release(&block_view);
        return -1;
    }
    int status = -1;
    size_t count = (size_t)block_view.len / 8;
    if (block_view.len != address_view.len) {
        PyErr_Format(PyExc_ValueError, "%zu blocks but %zu addresses", count, (size_t)address_view.len / 8);
    } else {
        out->count = count;
        out->blocks = PyMem_Malloc(count * 16 + 1);
        out->addresses = (uint64_t *)(out->blocks + count);
        if (out->blocks == NULL) {
            PyErr_NoMemory();
        } else {
            memcpy(out->blocks, block_view.buf, count * 8);
            memcpy(out->addresses, address_view.buf, count * 8);
            status = 0;
        }
    }
    PyBuffer_Release(&block_view);
    PyBuffer_Release(&address_view);
    return status;
}

/* ---- Plan ------------------------------------------------------------------------------------------------------ */

typedef struct {
    PyObject_HEAD
    la_plan plan;
    /* Attached regions, in two parallel arrays; read and written with the GIL held. */
    la_span *regions;
    uint64_t *region_ids;
    size_t region_count;
} PlanObject;

static void plan_dealloc(PyObject *object) {
    PlanObject *self = (PlanObject *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyMem_Free(self->plan.segments);
    PyMem_Free(self->regions);
    PyMem_Free(self->region_ids);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

/* Reads a sequence of `width`-tuples of unsigned 64-bit integers into a fresh array. */
static uint64_t *take_rows(PyObject *object, size_t width, size_t *count, const char *name) {
    uint64_t *rows = NULL;
    PyObject *list = PySequence_List(object);
    if (list == NULL) return NULL;
    Py_ssize_t size = PyList_Size(list);
    rows = PyMem_Malloc((size_t)size * width * 8 + 1);
    if (rows == NULL) PyErr_NoMemory();
    for (Py_ssize_t i = 0; rows != NULL && i < size; i++) {
        PyObject *row = PySequence_Tuple(PyList_GetItem(list, i));
        if (row != NULL && PyTuple_Size(row) != (Py_ssize_t)width)
            PyErr_Format(PyExc_ValueError, "%s[%zd] must hold %zu integers", name, i, width);
        for (size_t k = 0; row != NULL && !PyErr_Occurred() && k < width; k++)
            rows[(size_t)i * width + k] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(row, (Py_ssize_t)k));
        Py_XDECREF(row);
        if (row == NULL || PyErr_Occurred()) {
            PyMem_Free(rows);
            rows = NULL;
        }
    }
    Py_DECREF(list);
    *count = (size_t)size;
    return rows;
}

/* Why a plan cannot be made of these numbers, or NULL. */
static const char *plan_fault(const la_plan *plan, const la_span *spans, size_t span_count, size_t *segment) {
    uint64_t end = 0;
    *segment = 0;
    if (plan->num_blocks == 0 || plan->num_blocks > INT64_MAX) return "num_blocks out of range";
    if (plan->segment_count == 0) return "no segments";
    if (plan->codec != LA_PLAIN && !la_codec_takes(plan->codec, plan->element)) return "the codec has no form of such elements";
    uint64_t room = plan->codec == LA_PLAIN ? plan->page_bytes : UINT64_MAX;
    for (size_t i = 0; i < span_count; i++)
        if (spans[i].start + spans[i].size < spans[i].start) return "a span wraps around the address space";
    for (size_t i = 0; i < plan->segment_count; i++) {
        const la_segment *s = &plan->segments[i];
        *segment = i;
        if (s->length == 0) return "length is 0";
        if (s->stride < s->length && plan->num_blocks > 1) return "blocks overlap: stride below length";
        if (s->page_offset < end) return "page_offset overlaps the segment before";
        if (plan->codec != LA_PLAIN && (s->page_offset != end || s->length % la_element_bytes(plan->element) != 0))
            return "to be encoded, runs must be whole elements, one after another";
        if (__builtin_add_overflow(s->page_offset, s->length, &end) || end > room) return "reaches beyond page_bytes";
        if (!la_segment_inside(s, plan->num_blocks, spans, span_count)) return "reaches beyond the KV cache";
    }
    if (plan->codec == LA_PLAIN) return NULL;
    uint64_t encoded = la_encoded_bytes(plan->codec, plan->element, end);
    return encoded == 0 || encoded > plan->page_bytes ? "an encoded block is larger than page_bytes" : NULL;
}

static PyObject *plan_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    static char *names[] = {"segments", "num_blocks", "page_bytes", "spans", "codec", "element", NULL};
    PyObject *segments, *spans;
    unsigned long long num_blocks, page_bytes;
    int codec = LA_PLAIN, element = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OKKO|ii:Plan", names, &segments, &num_blocks, &page_bytes, &spans,
                                     &codec, &element))
        return NULL;
    la_plan plan = {
        .num_blocks = num_blocks, .page_bytes = page_bytes, .codec = (la_codec)codec, .element = (la_element)element};
    size_t span_count = 0, fault_at = 0;
    plan.segments = (la_segment *)take_rows(segments, 4, &plan.segment_count, "segments");
    if (plan.segments == NULL) return NULL;
    la_span *limits = (la_span *)take_rows(spans, 2, &span_count, "spans");
    if (limits == NULL) {
        PyMem_Free(plan.segments);
        return NULL;
    }
    PlanObject *self = NULL;
    const char *fault = plan_fault(&plan, limits, span_count, &fault_at);
    if (fault != NULL) {
        PyErr_Format(PyExc_ValueError, "segment %zu: %s", fault_at, fault);
    } else {
        allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
        self = (PlanObject *)allocate(type, 0);
    }
    PyMem_Free(limits);
    if (self == NULL) {
        PyMem_Free(plan.segments);
        return NULL;
    }
    for (size_t i = 0; i < plan.segment_count; i++) plan.block_bytes += plan.segments[i].length;
    self->plan = plan;
    return (PyObject *)self;
}

static PyObject *plan_attach(PyObject *object, PyObject *args) {
    PlanObject *self = (PlanObject *)object;
    unsigned long long id, address, size;
    if (!PyArg_ParseTuple(args, "KKK:attach", &id, &address, &size)) return NULL;
    if (size == 0 || address + size < address || address + size > UINTPTR_MAX)
        return PyErr_Format(PyExc_ValueError, "region %llu: address or size out of range", id);
    for (size_t i = 0; i < self->region_count; i++)
        if (self->region_ids[i] == id) return PyErr_Format(PyExc_ValueError, "region %llu is attached already", id);
    int failed = la_guard_install(); /* no copy begins without a region */
    if (failed != 0) return PyErr_Format(PyExc_RuntimeError, "no handler of bus errors: %s", strerror(failed));
    la_span *regions = PyMem_Realloc(self->regions, (self->region_count + 1) * sizeof *regions);
    if (regions == NULL) return PyErr_NoMemory();
    self->regions = regions;
    uint64_t *ids = PyMem_Realloc(self->region_ids, (self->region_count + 1) * sizeof *ids);
    if (ids == NULL) return PyErr_NoMemory();
    self->region_ids = ids;
    regions[self->region_count] = (la_span){address, size};
    ids[self->region_count++] = id;
    Py_RETURN_NONE;
}

static PyObject *plan_detach(PyObject *object, PyObject *args) {
    PlanObject *self = (PlanObject *)object;
    unsigned long long id;
    if (!PyArg_ParseTuple(args, "K:detach", &id)) return NULL;
    for (size_t i = 0; i < self->region_count; i++) {
        if (self->region_ids[i] != id) continue;
        size_t last = --self->region_count;
        self->regions[i] = self->regions[last];
        self->region_ids[i] = self->region_ids[last];
        Py_RETURN_TRUE;
    }
    Py_RETURN_FALSE;
}

static int plan_check_pairs(const PlanObject *self, const pairs *p) {
    size_t bad = 0;
    switch (la_check(&self->plan, self->regions, self->region_count, p->blocks, p->addresses, p->count, &bad)) {
    case LA_OK: return 0;
    case LA_BAD_BLOCK:
        PyErr_Format(PyExc_ValueError, "blocks[%zu] is %lld: not one of the %llu blocks", bad, (long long)p->blocks[bad],
                     (unsigned long long)self->plan.num_blocks);
        break;
    case LA_BAD_ADDRESS: {
        char address[24]; /* PyErr_Format has no 64-bit hexadecimal before Python 3.12 */
        snprintf(address, sizeof address, "0x%llx", (unsigned long long)p->addresses[bad]);
        PyErr_Format(PyExc_ValueError, "addresses[%zu]: no attached region has a page of %llu bytes at %s", bad,
                     (unsigned long long)self->plan.page_bytes, address);
        break;
    }
    }
    return -1;
}

static PyObject *plan_check(PyObject *object, PyObject *args) {
    PyObject *blocks, *addresses;
    pairs p;
    if (!PyArg_ParseTuple(args, "OO:check", &blocks, &addresses)) return NULL;
    if (pairs_take(&p, blocks, addresses) < 0) return NULL;
    int status = plan_check_pairs((PlanObject *)object, &p);
    pairs_free(&p);
    if (status < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *bus_error_type; /* set once at import; never freed */

static PyObject *bus_error(uint64_t address) {
    char where[24]; /* as above */
    snprintf(where, sizeof where, "0x%llx", (unsigned long long)address);
    PyObject *message = PyUnicode_FromFormat("bus error at %s: a device has gone, a page is bad or a file was cut short", where);
    PyObject *arguments = message != NULL ? Py_BuildValue("(NK)", message, (unsigned long long)address) : NULL;
    if (arguments != NULL) {
        PyErr_SetObject(bus_error_type, arguments);
        Py_DECREF(arguments);
    }
    return NULL;
}

/* Tells which of the pairs failed: in a writable buffer of a byte for each, if there is one, else by an error. */
static int tell_failed(PyObject *told, const unsigned char *failed, size_t count, size_t failures, la_direction direction) {
    if (told == Py_None) {
        if (failures == 0) return 0;
        PyErr_Format(PyExc_ValueError, "%zu of %zu pages cannot be %s", failures, count,
                     direction == LA_GATHER ? "encoded" : "decoded");
        return -1;
    }
    Py_buffer view;
    if (PyObject_GetBuffer(told, &view, PyBUF_WRITABLE) < 0) return -1;
    int right = (size_t)view.len == count;
    if (right)
        memcpy(view.buf, failed, count);
    else
        PyErr_Format(PyExc_ValueError, "failed must be %zu writable bytes", count);
    PyBuffer_Release(&view);
    return right ? 0 : -1;
}

static PyObject *plan_copy(PyObject *object, PyObject *args, PyObject *keywords, la_direction direction) {
    static char *names[] = {"blocks", "addresses", "kernel", "failed", NULL};
    PlanObject *self = (PlanObject *)object;
    PyObject *blocks, *addresses, *told = Py_None;
    int kernel = la_kernel_default();
    pairs p;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OO|iO", names, &blocks, &addresses, &kernel, &told)) return NULL;
    if (!la_kernel_usable((la_kernel)kernel)) return PyErr_Format(PyExc_ValueError, "kernel %d cannot run here", kernel);
    if (pairs_take(&p, blocks, addresses) < 0) return NULL;
    if (plan_check_pairs(self, &p) < 0) {
        pairs_free(&p);
        return NULL;
    }
    if (p.count == 0) { /* also without a region, and so without a handler */
        pairs_free(&p);
        return PyLong_FromLong(0);
    }
    unsigned char *failed = PyMem_Calloc(p.count, 1);
    if (failed == NULL) {
        pairs_free(&p);
        return PyErr_NoMemory();
    }
    int faulted;
    size_t failures = 0;
    uint64_t fault = 0;
    Py_BEGIN_ALLOW_THREADS
    faulted = la_copy_guarded(&self->plan, (la_kernel)kernel, direction, p.blocks, p.addresses, p.count, failed, &failures,
                              &fault);
    Py_END_ALLOW_THREADS
    unsigned long long bytes = (unsigned long long)(p.count - failures) * self->plan.block_bytes;
    int status = faulted ? 0 : tell_failed(told, failed, p.count, failures, direction);
    PyMem_Free(failed);
    pairs_free(&p);
    if (faulted) return bus_error(fault);
    return status < 0 ? NULL : PyLong_FromUnsignedLongLong(bytes);
}

static PyObject *plan_gather(PyObject *self, PyObject *args, PyObject *keywords) {
    return plan_copy(self, args, keywords, LA_GATHER);
}

static PyObject *plan_scatter(PyObject *self, PyObject *args, PyObject *keywords) {
    return plan_copy(self, args, keywords, LA_SCATTER);
}

static PyObject *plan_get_payload(PyObject *self, void *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(((PlanObject *)self)->plan.block_bytes);
}

static PyMethodDef plan_methods[] = {
    {"attach", plan_attach, METH_VARARGS, "attach(region_id, address, size): let copies reach [address, address + size)."},
    {"detach", plan_detach, METH_VARARGS,
     "detach(region_id) -> bool: refuse copies from now on; those under way go on. False if it was not attached."},
    {"check", plan_check, METH_VARARGS, "check(blocks, addresses): raise ValueError as gather and scatter would."},
    {"gather", (PyCFunction)(void (*)(void))plan_gather, METH_VARARGS | METH_KEYWORDS,
     "gather(blocks, addresses, kernel=DEFAULT, failed=None) -> bytes: copy KV-cache blocks to arena addresses. Blocks that the\n"
     "codec cannot encode are set to 1 in failed, a writable byte for each; without it they raise ValueError."},
    {"scatter", (PyCFunction)(void (*)(void))plan_scatter, METH_VARARGS | METH_KEYWORDS,
     "scatter(blocks, addresses, kernel=DEFAULT, failed=None) -> bytes: copy arena addresses to KV-cache blocks. Those that the\n"
     "codec cannot decode are told as by gather; what their blocks hold then is not known."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef plan_properties[] = {
    {"payload_bytes", plan_get_payload, NULL, "Bytes that one page moves in the KV cache.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot plan_slots[] = {
    {Py_tp_new, plan_new},
    {Py_tp_dealloc, plan_dealloc},
    {Py_tp_methods, plan_methods},
    {Py_tp_getset, plan_properties},
    {Py_tp_doc, "Plan(segments, num_blocks, page_bytes, spans, codec=PLAIN, element=0): how pages lie in a KV cache. With a codec,\n"
                 "page_bytes is the size of an encoded page; element is the type of its elements."},
    {0, NULL},
};

static PyType_Spec plan_spec = {
    .name = "lookaside._native.Plan",
    .basicsize = sizeof(PlanObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = plan_slots,
};

/* ---- Cuda ------------------------------------------------------------------------------------------------------ */

typedef struct {
    PyObject_HEAD
    la_cuda cuda;
    int batched;
    int priority; /* of our streams: the lowest, so that copies yield to compute */
} CudaObject;

static PyTypeObject *plan_type; /* set once at import, before any Cuda exists; never freed */

static void cuda_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    la_cuda_close(&((CudaObject *)object)->cuda);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static PyObject *cuda_failed(const CudaObject *self, const char *call, int result) {
    if (result == -1) return PyErr_NoMemory();
    return PyErr_Format(PyExc_RuntimeError, "%s: %s (%d)", call, la_cuda_error(&self->cuda, result), result);
}

/* Runs statements with our context current and the GIL released; `result` and `call` tell how it went. */
#define CUDA_CALL(self, name, expression)                               \
    int result;                                                         \
    const char *call = "cuCtxPushCurrent";                              \
    Py_BEGIN_ALLOW_THREADS                                              \
    result = (self)->cuda.context_push((self)->cuda.context);           \
    if (result == 0) {                                                  \
        void *popped;                                                   \
        call = name;                                                    \
        result = (expression);                                          \
        (self)->cuda.context_pop(&popped);                              \
    }                                                                   \
    Py_END_ALLOW_THREADS

static PyObject *cuda_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    static char *names[] = {"ordinal", "library", "batched", NULL};
    const char *library = "libcuda.so.1";
    int ordinal, batched = 1, status;
    char message[256];
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "i|sp:Cuda", names, &ordinal, &library, &batched)) return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    CudaObject *self = (CudaObject *)allocate(type, 0);
    if (self == NULL) return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = la_cuda_open(&self->cuda, library, ordinal, message, sizeof message);
    Py_END_ALLOW_THREADS
    if (status < 0) {
        Py_DECREF(self);
        return PyErr_Format(PyExc_OSError, "%s", message);
    }
    self->batched = batched && self->cuda.copy_batch != NULL;
    int greatest = 0;
    CUDA_CALL(self, "cuCtxGetStreamPriorityRange", self->cuda.stream_priorities(&self->priority, &greatest))
    if (result != 0) {
        cuda_failed(self, call, result);
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyObject *pin_with(PyObject *object, PyObject *args, unsigned flags) {
    CudaObject *self = (CudaObject *)object;
    unsigned long long address, size;
    if (!PyArg_ParseTuple(args, "KK:pin", &address, &size)) return NULL;
    CUDA_CALL(self, "cuMemHostRegister", self->cuda.host_register((void *)(uintptr_t)address, (size_t)size, flags))
    if (result != 0) return cuda_failed(self, call, result);
    Py_RETURN_NONE;
}

static PyObject *cuda_pin(PyObject *object, PyObject *args) { return pin_with(object, args, LA_CUDA_HOST_PORTABLE); }

static PyObject *cuda_pin_for_reading(PyObject *object, PyObject *args) {
    return pin_with(object, args, LA_CUDA_HOST_PORTABLE | LA_CUDA_HOST_READ_ONLY);
}

static PyObject *cuda_unpin(PyObject *object, PyObject *args) {
    CudaObject *self = (CudaObject *)object;
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "K:unpin", &address)) return NULL;
    CUDA_CALL(self, "cuMemHostUnregister", self->cuda.host_unregister((void *)(uintptr_t)address))
    if (result != 0) return cuda_failed(self, call, result);
    Py_RETURN_NONE;
}

static PyObject *cuda_stream(PyObject *object, PyObject *unused) {
    CudaObject *self = (CudaObject *)object;
    void *stream = NULL;
    (void)unused;
    CUDA_CALL(self, "cuStreamCreateWithPriority",
              self->cuda.stream_create(&stream, LA_CUDA_STREAM_NON_BLOCKING, self->priority))
    if (result != 0) return cuda_failed(self, call, result);
    return PyLong_FromVoidPtr(stream);
}

static PyObject *cuda_stream_free(PyObject *object, PyObject *args) {
    CudaObject *self = (CudaObject *)object;
    unsigned long long stream;
    if (!PyArg_ParseTuple(args, "K:stream_free", &stream)) return NULL;
    CUDA_CALL(self, "cuStreamDestroy", self->cuda.stream_destroy((void *)(uintptr_t)stream))
    if (result != 0) return cuda_failed(self, call, result);
    Py_RETURN_NONE;
}

static PyObject *cuda_event(PyObject *object, PyObject *unused) {
    CudaObject *self = (CudaObject *)object;
    void *event = NULL;
    (void)unused;
    CUDA_CALL(self, "cuEventCreate", self->cuda.event_create(&event, LA_CUDA_EVENT_DISABLE_TIMING))
    if (result != 0) return cuda_failed(self, call, result);
    return PyLong_FromVoidPtr(event);
}

static PyObject *cuda_event_free(PyObject *object, PyObject *args) {
    CudaObject *self = (CudaObject *)object;
    unsigned long long event;
    if (!PyArg_ParseTuple(args, "K:event_free", &event)) return NULL;
    CUDA_CALL(self, "cuEventDestroy", self->cuda.event_destroy((void *)(uintptr_t)event))
    if (result != 0) return cuda_failed(self, call, result);
    Py_RETURN_NONE;
}

static PyObject *cuda_record(PyObject *object, PyObject *args) {
    CudaObject *self = (CudaObject *)object;
    unsigned long long event, stream;
    if (!PyArg_ParseTuple(args, "KK:record", &event, &stream)) return NULL;
    CUDA_CALL(self, "cuEventRecord", self->cuda.event_record((void *)(uintptr_t)event, (void *)(uintptr_t)stream))
    if (result != 0) return cuda_failed(self, call, result);
    Py_RETURN_NONE;
}

static PyObject *cuda_wait(PyObject *object, PyObject *args) {
    CudaObject *self = (CudaObject *)object;
    unsigned long long stream, event;
    if (!PyArg_ParseTuple(args, "KK:wait", &stream, &event)) return NULL;
    CUDA_CALL(self, "cuStreamWaitEvent", self->cuda.stream_wait((void *)(uintptr_t)stream, (void *)(uintptr_t)event, 0))
    if (result != 0) return cuda_failed(self, call, result);
    Py_RETURN_NONE;
}

static PyObject *cuda_query(PyObject *object, PyObject *args) {
    CudaObject *self = (CudaObject *)object;
    unsigned long long event;
    if (!PyArg_ParseTuple(args, "K:query", &event)) return NULL;
    CUDA_CALL(self, "cuEventQuery", self->cuda.event_query((void *)(uintptr_t)event))
    if (result == LA_CUDA_NOT_READY) Py_RETURN_FALSE;
    if (result != 0) return cuda_failed(self, call, result);
    Py_RETURN_TRUE;
}

static PyObject *cuda_copy(PyObject *object, PyObject *args, la_direction direction) {
    CudaObject *self = (CudaObject *)object;
    PyObject *plan, *blocks, *addresses;
    unsigned long long stream;
    pairs p;
    if (!PyArg_ParseTuple(args, "O!KOO", plan_type, &plan, &stream, &blocks, &addresses)) return NULL;
    if (((PlanObject *)plan)->plan.codec != LA_PLAIN)
        return PyErr_Format(PyExc_ValueError, "a GPU's driver copies pages as they are: the plan has a codec");
    if (pairs_take(&p, blocks, addresses) < 0) return NULL;
    if (plan_check_pairs((PlanObject *)plan, &p) < 0) {
        pairs_free(&p);
        return NULL;
    }
    const char *step = NULL;
    CUDA_CALL(self, NULL,
              la_cuda_copy(&self->cuda, &self->batched, &((PlanObject *)plan)->plan, direction, p.blocks, p.addresses,
                           p.count, (void *)(uintptr_t)stream, &step))
    unsigned long long bytes = (unsigned long long)p.count * ((PlanObject *)plan)->plan.block_bytes;
    pairs_free(&p);
    if (result != 0) return cuda_failed(self, call != NULL ? call : step, result);
    return PyLong_FromUnsignedLongLong(bytes);
}

static PyObject *cuda_gather(PyObject *self, PyObject *args) { return cuda_copy(self, args, LA_GATHER); }

static PyObject *cuda_scatter(PyObject *self, PyObject *args) { return cuda_copy(self, args, LA_SCATTER); }

static PyMethodDef cuda_methods[] = {
    {"pin", cuda_pin, METH_VARARGS, "pin(address, size): page-lock mapped memory for DMA."},
    {"pin_for_reading", cuda_pin_for_reading, METH_VARARGS,
     "pin_for_reading(address, size): page-lock memory that is mapped for reading only."},
    {"unpin", cuda_unpin, METH_VARARGS, "unpin(address): undo pin."},
    {"stream", cuda_stream, METH_NOARGS, "stream() -> handle of a new non-blocking stream of the lowest priority."},
    {"stream_free", cuda_stream_free, METH_VARARGS, "stream_free(stream)"},
    {"event", cuda_event, METH_NOARGS, "event() -> handle of a new event without timing."},
    {"event_free", cuda_event_free, METH_VARARGS, "event_free(event)"},
    {"record", cuda_record, METH_VARARGS, "record(event, stream): the event happens when the stream gets here."},
    {"wait", cuda_wait, METH_VARARGS, "wait(stream, event): hold the stream back until the event."},
    {"query", cuda_query, METH_VARARGS, "query(event) -> bool: whether it has happened; raises what went wrong before it."},
    {"gather", cuda_gather, METH_VARARGS, "gather(plan, stream, blocks, addresses) -> bytes: enqueue; KV cache to arena."},
    {"scatter", cuda_scatter, METH_VARARGS, "scatter(plan, stream, blocks, addresses) -> bytes: enqueue; arena to KV cache."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot cuda_slots[] = {
    {Py_tp_new, cuda_new},
    {Py_tp_dealloc, cuda_dealloc},
    {Py_tp_methods, cuda_methods},
    {Py_tp_doc, "Cuda(ordinal, library='libcuda.so.1', batched=True): the driver, on one device."},
    {0, NULL},
};

static PyType_Spec cuda_spec = {
    .name = "lookaside._native.Cuda",
    .basicsize = sizeof(CudaObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = cuda_slots,
};

/* ---- module ---------------------------------------------------------------------------------------------------- */

static PyObject *usable(PyObject *module, PyObject *args) {
    int kernel;
    (void)module;
    if (!PyArg_ParseTuple(args, "i:usable", &kernel)) return NULL;
    return PyBool_FromLong(la_kernel_usable((la_kernel)kernel));
}

static PyObject *encoded_bytes(PyObject *module, PyObject *args) {
    int codec, element;
    unsigned long long block_bytes;
    (void)module;
    if (!PyArg_ParseTuple(args, "iiK:encoded_bytes", &codec, &element, &block_bytes)) return NULL;
    uint64_t bytes = 0;
    if (la_codec_takes((la_codec)codec, (la_element)element))
        bytes = la_encoded_bytes((la_codec)codec, (la_element)element, block_bytes);
    if (bytes == 0)
        return PyErr_Format(PyExc_ValueError, "codec %d has no form of %llu bytes of elements %d", codec, block_bytes, element);
    return PyLong_FromUnsignedLongLong(bytes);
}

/* Waits until one of the descriptors is readable, or has an error. */
static PyObject *wait_readable(PyObject *module, PyObject *args) {
    PyObject *list;
    long long timeout_us;
    (void)module;
    if (!PyArg_ParseTuple(args, "OL:wait_readable", &list, &timeout_us)) return NULL;
    PyObject *fds = PySequence_List(list);
    if (fds == NULL) return NULL;
    Py_ssize_t count = PyList_Size(fds);
    struct pollfd *items = PyMem_Malloc((count > 0 ? (size_t)count : 1) * sizeof *items);
    if (items == NULL) {
        Py_DECREF(fds);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        long fd = PyLong_AsLong(PyList_GetItem(fds, i));
        if (fd == -1 && PyErr_Occurred()) {
            PyMem_Free(items);
            Py_DECREF(fds);
            return NULL;
        }
        items[i] = (struct pollfd){.fd = (int)fd, .events = POLLIN};
    }
    Py_DECREF(fds);
    if (timeout_us < 0) timeout_us = 0;
    struct timespec timeout = {.tv_sec = timeout_us / 1000000, .tv_nsec = timeout_us % 1000000 * 1000};
    int ready;
    Py_BEGIN_ALLOW_THREADS
    ready = ppoll(items, (nfds_t)count, &timeout, NULL);
    Py_END_ALLOW_THREADS
    PyMem_Free(items);
    if (ready < 0 && errno != EINTR) return PyErr_SetFromErrno(PyExc_OSError);
    return PyBool_FromLong(ready > 0);
}

enum { MAX_PACKETS = 64 };

static PyObject *send_packets(PyObject *module, PyObject *args) {
    int fd;
    PyObject *list;
    (void)module;
    if (!PyArg_ParseTuple(args, "iO:send_packets", &fd, &list)) return NULL;
    PyObject *packets = PySequence_List(list);
    if (packets == NULL) return NULL;
    Py_ssize_t count = PyList_Size(packets);
    if (count > MAX_PACKETS) count = MAX_PACKETS;
    struct iovec data[MAX_PACKETS];
    struct mmsghdr messages[MAX_PACKETS];
    memset(messages, 0, sizeof messages);
    for (Py_ssize_t i = 0; i < count; i++) {
        char *bytes;
        Py_ssize_t size;
        if (PyBytes_AsStringAndSize(PyList_GetItem(packets, i), &bytes, &size) < 0) {
            Py_DECREF(packets);
            return NULL;
        }
        data[i] = (struct iovec){.iov_base = bytes, .iov_len = (size_t)size};
        messages[i].msg_hdr.msg_iov = &data[i];
        messages[i].msg_hdr.msg_iovlen = 1;
    }
    int sent;
    Py_BEGIN_ALLOW_THREADS
    sent = sendmmsg(fd, messages, (unsigned)count, MSG_DONTWAIT | MSG_NOSIGNAL);
    Py_END_ALLOW_THREADS
    Py_DECREF(packets);
    if (sent >= 0) return PyLong_FromLong(sent);
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return PyLong_FromLong(0);
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyMethodDef module_methods[] = {
    {"send_packets", send_packets, METH_VARARGS,
     "send_packets(fd, packets) -> int: send bytes, each as a packet, in one system call and without waiting; how many were taken."},
    {"wait_readable", wait_readable, METH_VARARGS,
     "wait_readable(fds, timeout_us) -> bool: wait, without the GIL, until one of the descriptors is readable."},
    {"encoded_bytes", encoded_bytes, METH_VARARGS,
     "encoded_bytes(codec, element, block_bytes) -> the size of an encoded block; ValueError if there is no form of it."},
    {"usable", usable, METH_VARARGS, "usable(kernel) -> bool: whether this CPU can run the copy kernel."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "lookaside._native",
    .m_doc = "Copies between vLLM's KV cache and the mapped arena, and short waits, without the GIL.",
    .m_size = -1,
    .m_methods = module_methods,
};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *module = PyModule_Create(&module_def);
    if (module == NULL) return NULL;
    bus_error_type = PyErr_NewExceptionWithDoc("lookaside._native.BusError",
                                               "BusError(message, address): the memory of a copy was not there (address 0: where "
                                               "is not known). How much of it was copied is not known, either.",
                                               PyExc_RuntimeError, NULL);
    if (bus_error_type == NULL || PyModule_AddObjectRef(module, "BusError", bus_error_type) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    plan_type = (PyTypeObject *)PyType_FromSpec(&plan_spec);
    PyObject *cuda_type = PyType_FromSpec(&cuda_spec);
    if (plan_type == NULL || cuda_type == NULL || PyModule_AddObjectRef(module, "Plan", (PyObject *)plan_type) < 0 ||
        PyModule_AddObjectRef(module, "Cuda", cuda_type) < 0 ||
        PyModule_AddIntConstant(module, "MEMCPY", LA_KERNEL_MEMCPY) < 0 ||
        PyModule_AddIntConstant(module, "AVX512", LA_KERNEL_AVX512) < 0 ||
        PyModule_AddIntConstant(module, "NEON", LA_KERNEL_NEON) < 0 ||
        PyModule_AddIntConstant(module, "AVX2", LA_KERNEL_AVX2) < 0 ||
        PyModule_AddIntConstant(module, "PLAIN", LA_PLAIN) < 0 || PyModule_AddIntConstant(module, "INT8", LA_INT8) < 0 ||
        PyModule_AddIntConstant(module, "FP8", LA_FP8) < 0 || PyModule_AddIntConstant(module, "LOSSLESS", LA_LOSSLESS) < 0 ||
        PyModule_AddIntConstant(module, "BFLOAT16", LA_BFLOAT16) < 0 ||
        PyModule_AddIntConstant(module, "FLOAT16", LA_FLOAT16) < 0 ||
        PyModule_AddIntConstant(module, "FLOAT32", LA_FLOAT32) < 0 ||
        PyModule_AddIntConstant(module, "DEFAULT", la_kernel_default()) < 0) {
        Py_XDECREF(cuda_type);
        Py_DECREF(module);
        return NULL;
    }
    Py_DECREF(cuda_type);
    return module;
}
