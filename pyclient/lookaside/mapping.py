"""Maps shared memory, populates it and unmaps it.

libc is called through ctypes because that releases the GIL: populating a region of 4 KiB pages
takes 0.1 s per GiB, during which the engine must run. This module imports neither torch nor vLLM.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_HUGE = 2 << 20
# The kernel holds the process's mapping lock while it populates a range; pieces
# bound how long another thread's mmap can wait for it (some 6 ms of 4 KiB pages).
_POPULATE_PIECE = 64 << 20


class RegionError(OSError):
    """A region that could not be mapped, or does not hold what was asked of it."""


def map_region(
    fd: int,
    size: int,
    huge: bool,
    offset: int = 0,
    page_size: int = mmap.PAGESIZE,
    read_only: bool = False,
) -> int:
    """Map size bytes at offset of fd, read-write unless read_only, and return the address.

    fd stays open. The address is a multiple of page_size. With huge it is a multiple of 2 MiB as
    well, and the mapping asks for transparent huge pages, which the kernel maps nowhere else. A
    file must hold all that is mapped: a shorter one would make later copies fail of SIGBUS. Raises
    RegionError.
    """
    check_place(fd, size, offset, page_size)
    align = max(page_size, _HUGE if huge else 0)
    protection = mmap.PROT_READ if read_only else mmap.PROT_READ | mmap.PROT_WRITE
    if align <= mmap.PAGESIZE:
        address = _mmap(None, size, protection, mmap.MAP_SHARED, fd, offset)
    else:
        address = _map_aligned(fd, size, offset, protection, align)
    if huge:
        # Refused for hugetlb, which needs no asking.
        _libc.madvise(address, size, _MADV_HUGEPAGE)
    if _libc.madvise(address, size, _MADV_DONTFORK) != 0:
        code = ctypes.get_errno()
        _libc.munmap(address, size)
        raise RegionError(code, f"madvise(MADV_DONTFORK): {os.strerror(code)}")
    return address


def populate(address: int, size: int, write: bool = True) -> bool:
    """Fill the page tables of a mapping, without the GIL; return whether the kernel could.

    With write they are filled for writing as well, which would make all of a file dirty. A kernel
    before 5.14 cannot fill them, and none can for bad pages. Then the first touch of each page pays
    for it.
    """
    advice = _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ
    filled = True
    for start in range(0, size, _POPULATE_PIECE):
        piece = min(_POPULATE_PIECE, size - start)
        filled = _libc.madvise(address + start, piece, advice) == 0 and filled
    return filled


def unmap(address: int, size: int) -> None:
    """Unmap what map_region returned."""
    _libc.munmap(address, size)


def check_place(fd: int, size: int, offset: int, page_size: int) -> None:
    """Raise RegionError for a place that cannot be mapped, or that the file does not have."""
    if size <= 0 or size % mmap.PAGESIZE:
        raise RegionError(f"region size {size} is not a positive multiple of the page")
    if page_size <= 0 or page_size & (page_size - 1) or offset < 0 or offset % page_size:
        raise RegionError(f"region at {offset}: not at a page of {page_size} bytes")
    status = os.fstat(fd)
    # A device has no size there, and refuses to map more than it has.
    if not stat.S_ISCHR(status.st_mode) and status.st_size < offset + size:
        raise RegionError(
            f"region of {size} bytes at {offset} announced, but its fd holds {status.st_size}"
        )


def _map_aligned(fd: int, size: int, offset: int, protection: int, align: int) -> int:
    """Map size bytes at offset of fd at a multiple of align, and return the address."""
    room = size + align
    reserved = _mmap(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
    address = (reserved + align - 1) & ~(align - 1)
    try:
        _mmap(address, size, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, offset)
    except RegionError:
        _libc.munmap(reserved, room)
        raise
    # Both ends of the reservation, up to the next page after the region.
    if address > reserved:
        _libc.munmap(reserved, address - reserved)
    tail = address + size
    if reserved + room > tail:
        _libc.munmap(tail, reserved + room - tail)
    return address


def _mmap(
    address: int | None, size: int, protection: int, flags: int, fd: int, offset: int = 0
) -> int:
    result = _libc.mmap(address, size, protection, flags, fd, offset)
    if result is None or result == _MAP_FAILED:
        code = ctypes.get_errno()
        raise RegionError(code, f"mmap of {size} bytes: {os.strerror(code)}")
    return result
