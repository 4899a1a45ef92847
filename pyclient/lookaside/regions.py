"""The data regions of a session, and until when they stay mapped.

Data regions are shared memory that this process reads and writes in place. Nothing found in them is
trusted for an offset or a length: every extent that a message names is checked against the size of
the mapping it lies in.

The regions of one session form a RegionSet. When the session ends, the set is closed. Its mappings
stay until the last copy that holds the set has ended: memory that vanished under a copy would be a
SIGSEGV in the engine. The sidecar may not give that memory to others before either, so the set
reports when no byte of it moves any more. A region that the sidecar removes is unmapped alone, once
no hold is left that has an address in it. Mappings are marked MADV_DONTFORK: a forked child can
neither keep the arena alive nor write to it, and fork need not copy page tables.

This module imports neither torch nor vLLM.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from lookaside.mapping import RegionError, map_region, populate, unmap

_DETACH_PATIENCE_S = 5.0


class Waitable(Protocol):
    """Something that ends (copies.Ticket)."""

    def wait(self, timeout_s: float) -> bool:
        """Wait at most so long; return whether it has ended."""
        ...


class Attachable(Protocol):
    """What is told of each region before bytes move there (copies.Copies)."""

    def attach(self, region_id: int, address: int, size: int, read_only: bool = False) -> None:
        """Make the region usable. May take long: on CUDA it pins the memory.

        Nobody writes to a read_only region.
        """
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
    """Holds that have an address in it, and that of the thread that prepares it."""
    on_removed: Callable[[], object] | None = None
    """Set when the sidecar removes the region; called once it is unmapped."""


class Hold:
    """Keeps the mappings of a set. One thread at a time uses it, and releases it once."""

    __slots__ = ("_regions", "_set")

    def __init__(self, of: RegionSet) -> None:
        self._set = of
        self._regions: set[Region] = set()  # it has an address in; guarded by the set's lock

    def locate(
        self, region_id: int, offset: int, size: int, timeout_s: float, write: bool = False
    ) -> int:
        """Return the address of size bytes at offset of a region, valid until release.

        Waits up to timeout_s for a region that is not ready yet. Raises RegionError for a region
        that is unknown, removed or not ready, for bytes outside it, and with write for a region
        that is for reading only.
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
        """End the hold: whatever was located may be unmapped from now on."""
        self._set._release(self)


class RegionSet:
    """The regions of one session, shared by the threads that copy.

    The session's thread adds, removes and closes. Other threads bracket their work with acquire and
    Hold.release. Between the two no mapping that the hold has an address in goes away, and the
    session's end unmaps nothing. Whoever releases the last hold of a closed set unmaps it. A
    removed region is unmapped on a thread of its own, because that may wait for a device.
    """

    _handles_lock = threading.Lock()
    _next_handle = 0

    def __init__(
        self, attachable: Attachable | None = None, on_unmapped: Callable[[], None] | None = None
    ) -> None:
        """on_unmapped is called once, on any thread, when the set is closed and nothing touches its
        memory any more."""
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

        For the arguments see map_region, and populate for write. A read_only region is populated
        for reading. With background a thread of its own fills the page tables and attaches the
        region, which is not ready before; without, it is ready on return. Raises RegionError for a
        region that cannot be mapped or attached; if it fails in the background, Hold.locate raises.
        then is called, on any thread, when the region is ready or has failed, but not when this
        call raises.
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
        """Populate and attach a mapped region; release the hold that add took."""
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
        """Forget a region, unmap it once no hold has an address in it, and then call then.

        then runs on any thread; at once, on this one, if there is no such region. It does not run
        if the set is closed, or if a device does not give the region back.
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
        """Return a hold of the mappings; None if the set is closed."""
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
        """Wait until a closed set has no mapping left; return whether it has none."""
        return self._unmapped.wait(timeout_s)

    def close(self) -> None:
        """Refuse new holds, and unmap once the last one is released."""
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
        """Unmap a removed region that nobody holds, on a thread of its own."""
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
            return  # still registered with a device: as in _unmap, nobody learns that it is over
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
            return  # and on_unmapped is never called
        if not stuck:
            self._gone()
            return
        with contextlib.suppress(RuntimeError):  # no thread to be had: as above
            threading.Thread(
                target=self._unmap_late, args=(stuck,), name="lookaside-unmap", daemon=True
            ).start()

    def _unmap_late(self, stuck: list[tuple[Region, Waitable]]) -> None:
        """Unmap what a device still uses, each region once the device is done with it."""
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
        """The sizes of all regions mapped now, together."""
        with self._lock:
            return sum(region.size for region in self._regions.values())
