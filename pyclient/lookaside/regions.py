"""Maps the memory that the sidecar hands over: data regions and control region.

Data regions are shared memory that this process reads and writes in place, so
nothing found in them is ever trusted for an offset or a length: every extent
that a message names is checked against the size of the mapping it lies in.
The control region is mapped read-only; the sidecar alone writes it.

The regions of one session form a RegionSet. When the session ends, the set is
closed, but its mappings stay until the last copy that holds the set has ended:
a thread that copies must never see its memory vanish (that would be SIGSEGV in
the engine). Nor may the sidecar give that memory to others before: the set says
when no byte of it moves any more. A region that the sidecar removes goes alone,
when no hold is left that was told an address in it. Mappings are marked
MADV_DONTFORK: a forked child can neither keep the arena alive nor write to it,
and fork need not copy page tables.

libc is called through ctypes because that releases the GIL: populating a
region of 4 KiB pages takes 0.1 s per GiB, during which the engine must run.
This module imports neither torch nor vLLM.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import stat
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
_MADV_POPULATE_READ = 22
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


def map_region(
    fd: int,
    size: int,
    huge: bool,
    offset: int = 0,
    page_size: int = mmap.PAGESIZE,
    read_only: bool = False,
) -> int:
    """Map size bytes at offset of fd, read-write unless read_only, and return the address; fd stays
    open.

    The address is a multiple of page_size, and with huge of 2 MiB, without which the kernel could
    not map transparent huge pages, for which the mapping then asks. A file must have what is
    mapped: a shorter one would make later copies fail of SIGBUS. Raises RegionError.
    """
    if size <= 0 or size % mmap.PAGESIZE:
        raise RegionError(f"region size {size} is not a positive multiple of the page")
    if page_size <= 0 or page_size & (page_size - 1) or offset < 0 or offset % page_size:
        raise RegionError(f"region at {offset}: not at a page of {page_size} bytes")
    status = os.fstat(fd)
    # A device tells no size there, and refuses to map more than it has.
    if not stat.S_ISCHR(status.st_mode) and status.st_size < offset + size:
        raise RegionError(
            f"region of {size} bytes at {offset} announced, but its fd holds {status.st_size}"
        )
    align = max(page_size, _HUGE if huge else 0)
    protection = mmap.PROT_READ if read_only else mmap.PROT_READ | mmap.PROT_WRITE
    if align <= mmap.PAGESIZE:
        address = _mmap(None, size, protection, mmap.MAP_SHARED, fd, offset)
    else:
        room = size + align
        reserved = _mmap(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
        address = (reserved + align - 1) & ~(align - 1)
        try:
            _mmap(
                address,
                size,
                protection,
                mmap.MAP_SHARED | _MAP_FIXED,
                fd,
                offset,
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
    if huge:
        # Refused for hugetlb, which needs no asking.
        _libc.madvise(address, size, _MADV_HUGEPAGE)
    if _libc.madvise(address, size, _MADV_DONTFORK) != 0:
        code = ctypes.get_errno()
        _libc.munmap(address, size)
        raise RegionError(code, f"madvise(MADV_DONTFORK): {os.strerror(code)}")
    return address


def populate(address: int, size: int, write: bool = True) -> bool:
    """Fill the page tables of a mapping, without the GIL.

    With write for writing too, which would make all of a file dirty. Returns
    whether the kernel could: one before 5.14 cannot, nor can any for pages that
    are bad, and then the first touch of each page pays for it instead.
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


def _mmap(
    address: int | None, size: int, protection: int, flags: int, fd: int, offset: int = 0
) -> int:
    result = _libc.mmap(address, size, protection, flags, fd, offset)
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

    def attach(self, region_id: int, address: int, size: int, read_only: bool = False) -> None:
        """Make the region usable; may take long (it pins the memory on CUDA). None writes to a
        read-only one."""
        ...

    def detach(self, region_id: int) -> Waitable:
        """Forget the region; once the result is done it may be unmapped."""
        ...


@dataclass(slots=True, eq=False)
class Region:
    """One mapped data region. It never moves or changes size."""

    address: int
    size: int
    handle: int
    read_only: bool = False
    settled: threading.Event = field(default_factory=threading.Event)
    """Set once the region is attached or has failed."""
    attached: bool = False
    failed: str | None = None
    # Guarded by the set's lock.
    holds: int = 0
    """Those that were told an address in it, and that of the thread that prepares it."""
    on_removed: Callable[[], object] | None = None
    """Set when the sidecar removes it: to be called when it is unmapped."""


class Hold:
    """Keeps the mappings of a set. One thread at a time uses it, and releases it once."""

    __slots__ = ("_regions", "_set")

    def __init__(self, of: RegionSet) -> None:
        self._set = of
        self._regions: set[Region] = set()  # told of; guarded by the set's lock

    def locate(
        self, region_id: int, offset: int, size: int, timeout_s: float, write: bool = False
    ) -> int:
        """The address of size bytes at offset of a region, valid until release.

        Waits up to timeout_s for a region that is not ready yet. Raises
        RegionError for an unknown or removed region, one that is not ready,
        bytes outside it, and with write for one that is only for reading.
        """
        region = self._set._pin(self, region_id)
        if write and region.read_only:
            raise RegionError(f"region {region_id} is for reading only")
        if offset < 0 or size < 0 or offset + size > region.size:
            raise RegionError(
                f"[{offset}, {offset + size}) is outside region {region_id} of {region.size} bytes"
            )
        if not region.settled.is_set() and not region.settled.wait(max(0.0, timeout_s)):
            raise RegionError(f"region {region_id} is not ready yet")
        if region.failed is not None:
            raise RegionError(region.failed)
        return region.address + offset

    def release(self) -> None:
        """Let go: whatever was located may be unmapped from now on."""
        self._set._release(self)


class RegionSet:
    """The regions of one session, shared by the threads that copy.

    One thread (the session's) adds, removes and closes. Others bracket their
    work with acquire and Hold.release; between the two no mapping that the hold
    was told of goes away, and no mapping at all because the session ends.
    Whoever drops the last hold of a closed set unmaps it; a removed region is
    unmapped on a thread of its own, as that may wait for a device.
    """

    _handles_lock = threading.Lock()
    _next_handle = 0

    def __init__(
        self, attachable: Attachable | None = None, on_unmapped: Callable[[], None] | None = None
    ) -> None:
        """on_unmapped is called once, on whatever thread: the set is closed, and nothing touches
        its memory."""
        self._attachable = attachable
        self._on_unmapped = on_unmapped
        self._lock = threading.Lock()
        self._regions: dict[int, Region] = {}
        self._holds = 0
        self._leaving = 0  # removed regions that are still mapped
        self._closed = False
        self._taken = False  # closed, and its regions are being unmapped or are
        self._unmapped = threading.Event()

    @classmethod
    def _handle(cls) -> int:
        # Region ids begin anew with each sidecar, while an old set may still
        # be in use; handles are unique in the process.
        with cls._handles_lock:
            cls._next_handle += 1
            return cls._next_handle

    def add(
        self,
        region_id: int,
        fd: int,
        size: int,
        huge: bool,
        background: bool,
        offset: int = 0,
        page_size: int = mmap.PAGESIZE,
        write: bool = True,
        read_only: bool = False,
        then: Callable[[], object] = lambda: None,
    ) -> None:
        """Map a region; fd is the caller's and may be closed afterwards.

        See map_region, and populate for write; a read_only one is populated for
        reading. With background the page tables are filled and the region
        attached on a thread of its own, and it is not ready before; without, on
        return. Raises RegionError for what cannot be mapped
        or attached; what fails in the background, Hold.locate tells. then is
        called, on whatever thread, when the region is ready or has failed, but
        not for a RegionError that is raised.
        """
        with self._lock:
            if self._closed:
                raise RegionError("the session has ended")
            if region_id in self._regions:
                raise RegionError(f"region {region_id} was added twice")
            address = map_region(fd, size, huge, offset, page_size, read_only)
            region = Region(address, size, self._handle(), read_only)
            self._regions[region_id] = region
            hold = Hold(self)
            hold._regions.add(region)
            region.holds += 1
            self._holds += 1
        if background:

            def prepare() -> None:
                self._prepare(region, hold, write and not read_only)
                then()

            try:
                threading.Thread(target=prepare, name="lookaside-region", daemon=True).start()
            except RuntimeError as error:
                region.failed = str(error)
                region.settled.set()
                hold.release()
                raise RegionError(region.failed) from error
            return
        self._prepare(region, hold, write and not read_only)
        if region.failed is not None:
            raise RegionError(region.failed)
        then()

    def _prepare(self, region: Region, hold: Hold, write: bool) -> None:
        """Make a mapped region fast and attach it; releases the hold that add took."""
        try:
            if region.on_removed is None:
                populate(region.address, region.size, write)
            if region.on_removed is not None:
                raise RegionError("it was removed")
            if self._attachable is not None:
                self._attachable.attach(
                    region.handle, region.address, region.size, region.read_only
                )
            region.attached = True
        except Exception as error:  # whatever a device's driver raises
            region.failed = f"region could not be attached: {error}"
        finally:
            region.settled.set()
            hold.release()

    def remove(self, region_id: int, then: Callable[[], object]) -> None:
        """Forget a region, unmap it once no hold has been told of it, and then call then on
        whatever thread.

        At once, on this one, if there is no such region. Not at all once the set is closed, or if a
        device does not give the region back.
        """
        with self._lock:
            if self._closed:
                return
            region = self._regions.pop(region_id, None)
            if region is not None:
                region.on_removed = then
                self._leaving += 1
            idle = region is not None and not region.holds
        if region is None:
            then()
        elif idle:
            self._leave(region)

    def acquire(self) -> Hold | None:
        """Hold the mappings; None if the set is closed already."""
        with self._lock:
            if self._closed:
                return None
            self._holds += 1
        return Hold(self)

    def _pin(self, hold: Hold, region_id: int) -> Region:
        with self._lock:
            region = self._regions.get(region_id)
            if region is None:
                raise RegionError(f"region {region_id} is not mapped")
            if region not in hold._regions:
                hold._regions.add(region)
                region.holds += 1
        return region

    def _release(self, hold: Hold) -> None:
        leave: list[Region] = []
        with self._lock:
            for region in hold._regions:
                region.holds -= 1
                if region.on_removed is not None and not region.holds:
                    leave.append(region)
            hold._regions.clear()
            self._holds -= 1
            gone = self._take_if_idle()
        for region in leave:
            self._leave(region)
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
        if not self._closed or self._holds or self._leaving or self._taken:
            return None
        self._taken = True
        gone = list(self._regions.values())
        self._regions.clear()
        return gone

    def _leave(self, region: Region) -> None:
        """Unmap a removed region that nobody holds, not on the thread that noticed."""
        try:
            threading.Thread(
                target=self._unmap_removed, args=(region,), name="lookaside-unmap", daemon=True
            ).start()
        except RuntimeError:
            self._unmap_removed(region)

    def _unmap_removed(self, region: Region) -> None:
        try:
            if self._attachable is not None and region.attached:
                detached = self._attachable.detach(region.handle)
                while not detached.wait(_DETACH_PATIENCE_S):
                    pass
        except Exception:
            return  # still registered with a device, as in _unmap: nobody is told that it is over
        unmap(region.address, region.size)
        assert region.on_removed is not None
        try:
            region.on_removed()
        finally:
            with self._lock:
                self._leaving -= 1
                gone = self._take_if_idle()
            self._unmap(gone)

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
            threading.Thread(
                target=self._unmap_late, args=(stuck,), name="lookaside-unmap", daemon=True
            ).start()

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
