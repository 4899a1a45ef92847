/* Included before each source of libzmq: memory that libzmq allocates is counted (heap.cpp). A C
   library counts it as well, but musl and glibc before 2.33 do not say how much it is. */
#ifndef LOOKASIDE_LIBZMQ_HEAP_HPP
#define LOOKASIDE_LIBZMQ_HEAP_HPP

/* What declares malloc and free must not be renamed. */
#include <stdlib.h>
#ifdef __cplusplus
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <set>
#include <string>
#include <vector>
extern "C" {
#endif

void *lookaside_malloc (size_t size);
void *lookaside_realloc (void *ptr, size_t size);
int lookaside_posix_memalign (void **ptr, size_t alignment, size_t size);
void lookaside_free (void *ptr);
/* The bytes in use. ipc/zmq.go calls it. */
size_t lookaside_zmq_heap (void);

#ifdef __cplusplus
}
namespace std
{
using ::lookaside_free;
using ::lookaside_malloc;
using ::lookaside_realloc;
}
#endif

#ifndef LOOKASIDE_LIBZMQ_HEAP_ITSELF
#define malloc lookaside_malloc
#define realloc lookaside_realloc
#define posix_memalign lookaside_posix_memalign
#define free lookaside_free
/* Nothing may allocate uncounted and then be freed as counted. */
#define calloc lookaside_has_no_calloc
#define aligned_alloc lookaside_has_no_aligned_alloc
#define strdup lookaside_has_no_strdup
#endif

#endif
