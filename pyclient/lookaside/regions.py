"""Maps the memory that the sidecar hands over: data regions and control region.

Data regions are shared memory that this process reads and writes in place, so
nothing found in them is ever trusted for an offset or a length: every extent
that a message names is checked against the size of the mapping it lies in.
The control region is mapped read-only; the sidecar alone writes it.

The regions of one session form a RegionSet. When the session ends, the set is
closed, but its mappings stay until the last copy that holds the set has ended:
a thread that copies must never see its memory vanish (that would be SIGSEGV in
the engine). Nor may the sidecar give that memory to others before: the set says
when no byte of it moves any more. Mappings are marked MADV_DONTFORK: a forked child can neither keep
the arena alive nor write to it, and fork need not copy page tables.

libc is called through ctypes because that releases the GIL: populating a
region of 4 KiB pages takes 0.1 s per GiB, during which the engine must run.
This module imports neither torch nor vLLM.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

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
_MADV_POPULATE_WRITE = 23
_HUGE = 2 << 20
# The kernel holds the process's mapping lock while it populates a range; pieces
# bound how long another thread's mmap can wait for it (some 6 ms of 4 KiB pages).
_POPULATE_PIECE = 64 << 20
_DETACH_PATIENCE_S = 5.0

CONTROL_BYTES = 4096
_CONTROL_MAGIC = b"LOOKASID"
_CONTROL_LAYOUT = 1


class RegionError(OSError):
    """A region that could not be mapped, or does not hold what was asked of it."""


def map_region(fd: int, size: int, huge: bool) -> int:
    """Map size bytes of fd read-write and return the address; fd stays open.

    With huge the address is a multiple of 2 MiB, without which the kernel could
    not map transparent huge pages, and the mapping asks for them. The size must
    be what the object behind fd has: a shorter one would make later copies die
    of SIGBUS. Raises RegionError.
    """
    if size <= 0 or size % mmap.PAGESIZE:
        raise RegionError(f"region size {size} is not a positive multiple of the page")
    actual = os.fstat(fd).st_size
    if actual < size:
        raise RegionError(f"region of {size} bytes announced, but its fd holds {actual}")
    if not huge:
        address = _mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd)
    else:
        room = size + _HUGE
        reserved = _mmap(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
        address = (reserved + _HUGE - 1) & ~(_HUGE - 1)
        try:
            _mmap(
                address,
                size,
                mmap.PROT_READ | mmap.PROT_WRITE,
                mmap.MAP_SHARED | _MAP_FIXED,
                fd,
            )
        except RegionError:
            _libc.munmap(reserved, room)
            raise
        # Both ends of the reservation, up to the next page after the region.
        if address > reserved:
            _libc.munmap(reserved, address - reserved)
        tail = address + size
        if reserved + room > tail:
            _libc.munmap(tail, reserved + room - tail)
        # Refused for hugetlb, which needs no asking.
        _libc.madvise(address, size, _MADV_HUGEPAGE)
    if _libc.madvise(address, size, _MADV_DONTFORK) != 0:
        code = ctypes.get_errno()
        _libc.munmap(address, size)
        raise RegionError(code, f"madvise(MADV_DONTFORK): {os.strerror(code)}")
    return address


def populate(address: int, size: int) -> bool:
    """Fill the page tables of a mapping, without the GIL.

    Returns whether the kernel could: one before 5.14 cannot, and then the first
    touch of each page pays for it instead.
    """
    for start in range(0, size, _POPULATE_PIECE):
        piece = min(_POPULATE_PIECE, size - start)
        if _libc.madvise(address + start, piece, _MADV_POPULATE_WRITE) != 0:
            return False
    return True


def unmap(address: int, size: int) -> None:
    """Unmap what map_region returned."""
    _libc.munmap(address, size)


def _mmap(address: int | None, size: int, protection: int, flags: int, fd: int) -> int:
    result = _libc.mmap(address, size, protection, flags, fd, 0)
    if result is None or result == _MAP_FAILED:
        code = ctypes.get_errno()
        raise RegionError(code, f"mmap of {size} bytes: {os.strerror(code)}")
    return result


class Waitable(Protocol):
    """Something that ends (copies.Ticket)."""

    def wait(self, timeout_s: float) -> bool:
        """Wait at most so long; whether it has ended."""
        ...


class Attachable(Protocol):
    """What wants to know each region before bytes move there (copies.Copies)."""

    def attach(self, region_id: int, address: int, size: int) -> None:
        """Make the region usable; may take long (it pins the memory on CUDA)."""
        ...

    def detach(self, region_id: int) -> Waitable:
        """Forget the region; once the result is done it may be unmapped."""
        ...


@dataclass(slots=True)
class Region:
    """One mapped data region. It never moves or changes size."""

    address: int
    size: int
    handle: int
    settled: threading.Event = field(default_factory=threading.Event)
    """Set once the region is attached or has failed."""
    attached: bool = False
    failed: str | None = None


class RegionSet:
    """The regions of one session, shared by the threads that copy.

    One thread (the session's) adds and closes. Others bracket their work with
    acquire and release; between the two no mapping of the set goes away, even
    if the session ends. Whoever drops the last hold of a closed set unmaps it.
    """

    _handles_lock = threading.Lock()
    _next_handle = 0

    def __init__(self, attachable: Attachable | None = None, on_unmapped: Callable[[], None] | None = None) -> None:
        """on_unmapped is called once, on whatever thread: the set is closed, and nothing touches its memory."""
        self._attachable = attachable
        self._on_unmapped = on_unmapped
        self._lock = threading.Lock()
        self._regions: dict[int, Region] = {}
        self._holds = 0
        self._closed = False
        self._unmapped = threading.Event()

    @classmethod
    def _handle(cls) -> int:
        # Region ids begin anew with each sidecar, while an old set may still
        # be in use; handles are unique in the process.
        with cls._handles_lock:
            cls._next_handle += 1
            return cls._next_handle

    def add(self, region_id: int, fd: int, size: int, huge: bool, background: bool) -> None:
        """Map a region; fd is the caller's and may be closed afterwards.

        With background the page tables are filled and the region attached on a
        thread of its own, and it is not ready before; without, on return.
        Raises RegionError for what cannot be mapped or attached.
        """
        with self._lock:
            if self._closed:
                raise RegionError("the session has ended")
            if region_id in self._regions:
                raise RegionError(f"region {region_id} was added twice")
            region = Region(map_region(fd, size, huge), size, self._handle())
            self._regions[region_id] = region
            self._holds += 1
        if background:
            try:
                threading.Thread(target=self._prepare, args=(region,), name="lookaside-region", daemon=True).start()
            except RuntimeError as error:
                region.failed = str(error)
                region.settled.set()
                self.release()
                raise RegionError(region.failed) from error
        else:
            self._prepare(region)
        if region.failed is not None:
            raise RegionError(region.failed)

    def _prepare(self, region: Region) -> None:
        """Make a mapped region fast and attach it; drops the hold that add took."""
        try:
            populate(region.address, region.size)
            if self._attachable is not None:
                self._attachable.attach(region.handle, region.address, region.size)
            region.attached = True
        except Exception as error:  # whatever a device's driver raises
            region.failed = f"region could not be attached: {error}"
        finally:
            region.settled.set()
            self.release()

    def acquire(self) -> bool:
        """Hold the mappings; False if the set is closed already."""
        with self._lock:
            if self._closed:
                return False
            self._holds += 1
            return True

    def release(self) -> None:
        """Drop a hold."""
        with self._lock:
            self._holds -= 1
            gone = self._take_if_idle()
        self._unmap(gone)

    def wait_unmapped(self, timeout_s: float) -> bool:
        """Wait until a closed set has no mapping left; False if copies still hold it."""
        return self._unmapped.wait(timeout_s)

    def close(self) -> None:
        """Refuse new holds, and unmap once the last one is dropped."""
        with self._lock:
            self._closed = True
            gone = self._take_if_idle()
        self._unmap(gone)

    def _take_if_idle(self) -> list[Region] | None:
        if not self._closed or self._holds:
            return None
        gone = list(self._regions.values())
        self._regions.clear()
        return gone

    def _unmap(self, regions: list[Region] | None) -> None:
        if regions is None:
            return
        deadline = time.monotonic() + _DETACH_PATIENCE_S
        stuck: list[tuple[Region, Waitable]] = []
        known = True
        for region in regions:
            if self._attachable is not None and region.attached:
                try:
                    detached = self._attachable.detach(region.handle)
                    if not detached.wait(max(0.0, deadline - time.monotonic())):
                        stuck.append((region, detached))
                        continue
                except Exception:
                    # Still registered with a device: a leaked mapping is
                    # better than a device that writes to other memory.
                    known = False
                    continue
            unmap(region.address, region.size)
        if not known:
            return  # nor will anybody be told that it is over
        if not stuck:
            self._gone()
            return
        with contextlib.suppress(RuntimeError):  # no thread to be had: as above
            threading.Thread(target=self._unmap_late, args=(stuck,), name="lookaside-unmap", daemon=True).start()

    def _unmap_late(self, stuck: list[tuple[Region, Waitable]]) -> None:
        """Unmaps what a device still uses, as it lets go of it."""
        for region, detached in stuck:
            while not detached.wait(_DETACH_PATIENCE_S):
                pass
            unmap(region.address, region.size)
        self._gone()

    def _gone(self) -> None:
        self._unmapped.set()
        if self._on_unmapped is not None:
            self._on_unmapped()

    def locate(self, region_id: int, offset: int, size: int, timeout_s: float) -> int:
        """The address of size bytes at offset of a region.

        Waits up to timeout_s for a region that is not ready yet. The caller
        holds the set. Raises RegionError for an unknown region, one that is not
        ready, and bytes outside it.
        """
        with self._lock:
            region = self._regions.get(region_id)
        if region is None:
            raise RegionError(f"region {region_id} is not mapped")
        if offset < 0 or size < 0 or offset + size > region.size:
            raise RegionError(f"[{offset}, {offset + size}) is outside region {region_id} of {region.size} bytes")
        if not region.settled.is_set() and not region.settled.wait(max(0.0, timeout_s)):
            raise RegionError(f"region {region_id} is not ready yet")
        if region.failed is not None:
            raise RegionError(region.failed)
        return region.address + offset

    @property
    def bytes_mapped(self) -> int:
        """Sum of the sizes of the regions mapped now."""
        with self._lock:
            return sum(region.size for region in self._regions.values())


class Control:
    """The sidecar's control region, mapped read-only.

    Every field is one aligned word that the sidecar stores at once, so a read
    is never torn. Not safe for use while another thread closes it.
    """

    SERVING, DRAINING, CLOSED = 1, 2, 3

    def __init__(self, fd: int) -> None:
        """Map the region behind fd (which stays the caller's). Raises RegionError."""
        try:
            self._map = mmap.mmap(fd, CONTROL_BYTES, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise RegionError(f"control region: {error}") from error
        self._words64: memoryview = memoryview(self._map).cast("Q")
        self._words32: memoryview = memoryview(self._map).cast("I")
        magic = struct.pack("=Q", self._words64[0])
        layout = self._words32[2]
        if magic != _CONTROL_MAGIC or layout != _CONTROL_LAYOUT:
            self.close()
            raise RegionError(f"not a control region of layout 1: {magic!r}, layout {layout}")

    @property
    def state(self) -> int:
        """SERVING, DRAINING or CLOSED."""
        return self._words32[3]

    @property
    def generation(self) -> int:
        """The number of this run of the sidecar."""
        return self._words64[2]

    @property
    def capacity_bytes(self) -> int:
        """Bytes of arena in all regions."""
        return self._words64[4]

    @property
    def used_bytes(self) -> int:
        """Bytes of arena that hold committed chunks or are being filled."""
        return self._words64[5]

    def close(self) -> None:
        """Unmap; may be called twice."""
        self._words64.release()
        self._words32.release()
        self._map.close()
