// Counts the bytes that libzmq has allocated: by C's functions, which heap.hpp renames, and by
// operator new, which is replaced here for the whole program. In the sidecar only libzmq is C++.
#define LOOKASIDE_LIBZMQ_HEAP_ITSELF
#include "heap.hpp"

#include <atomic>
#include <malloc.h>

namespace
{
// Only the sum matters, so no order is needed between it and anything else.
std::atomic<size_t> in_use (0);

void *count (void *ptr)
{
    if (ptr)
        in_use.fetch_add (malloc_usable_size (ptr), std::memory_order_relaxed);
    return ptr;
}

void discount (void *ptr)
{
    if (ptr)
        in_use.fetch_sub (malloc_usable_size (ptr), std::memory_order_relaxed);
}

void *allocate (size_t size)
{
    return count (malloc (size ? size : 1));
}
}

extern "C" {
void *lookaside_malloc (size_t size)
{
    return count (malloc (size));
}

void *lookaside_realloc (void *ptr, size_t size)
{
    const size_t before = ptr ? malloc_usable_size (ptr) : 0;
    void *const now = realloc (ptr, size);
    // A failed realloc leaves the memory as it was; one to size 0 may have freed it.
    if (now || size == 0)
        in_use.fetch_sub (before, std::memory_order_relaxed);
    return count (now);
}

int lookaside_posix_memalign (void **ptr, size_t alignment, size_t size)
{
    const int error = posix_memalign (ptr, alignment, size);
    if (!error)
        count (*ptr);
    return error;
}

void lookaside_free (void *ptr)
{
    discount (ptr);
    free (ptr);
}

size_t lookaside_zmq_heap (void)
{
    return in_use.load (std::memory_order_relaxed);
}
}

void *operator new (size_t size)
{
    void *const ptr = allocate (size);
    if (!ptr)
        throw std::bad_alloc ();
    return ptr;
}
void *operator new (size_t size, const std::nothrow_t &) noexcept
{
    return allocate (size);
}
void *operator new[] (size_t size)
{
    return operator new (size);
}
void *operator new[] (size_t size, const std::nothrow_t &) noexcept
{
    return allocate (size);
}
void operator delete (void *ptr) noexcept
{
    lookaside_free (ptr);
}
void operator delete (void *ptr, const std::nothrow_t &) noexcept
{
    lookaside_free (ptr);
}
void operator delete[] (void *ptr) noexcept
{
    lookaside_free (ptr);
}
void operator delete[] (void *ptr, const std::nothrow_t &) noexcept
{
    lookaside_free (ptr);
}
