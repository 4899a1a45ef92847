"""The data regions of a session, and until when their memory may be touched.

Data regions are shared memory that this process reads and writes in place. Nothing found in them is
trusted for an offset or a length: every extent that a message names is checked against the size of
the mapping it lies in.

The regions of one session form a RegionSet. When the session ends, the set is closed. Its mappings
stay until the last copy that holds the set has ended: memory that vanished under a copy would be a
SIGSEGV in the engine. The sidecar may not give that memory to others before either, so the set
reports when no byte of it moves any more. The mappings may stay longer, for the next session
(mappings.py), whose copies may move other bytes of the same memory meanwhile. A region that the
sidecar removes is unmapped alone, once no hold is left that has an address in it. Mappings are
marked MADV_DONTFORK: a forked child can neither keep the arena alive nor write to it, and fork need
not copy page tables.

This module imports neither torch nor vLLM.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass

from lookaside.mapping import RegionError
from lookaside.mappings import Mapping, Mappings


@dataclass(slots=True, eq=False)
class Region:
    """One data region of a session."""

    mapping: Mapping
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
        mapping = self._set._pin(self, region_id)
        if write and mapping.read_only:
            raise RegionError(f"region {region_id} is for reading only")
        if offset < 0 or size < 0 or offset + size > mapping.size:
            raise RegionError(
                f"[{offset}, {offset + size}) is outside region {region_id} of {mapping.size} bytes"
            )
        if not mapping.settled.is_set() and not mapping.settled.wait(max(0.0, timeout_s)):
            raise RegionError(f"region {region_id} is not ready yet")
        if mapping.failed is not None:
            raise RegionError(mapping.failed)
        return mapping.address + offset

    def release(self) -> None:
        """End the hold: whatever was located may be unmapped from now on."""
        self._set._release(self)


class RegionSet:
    """The regions of one session, shared by the threads that copy.

    The session's thread adds, removes and closes. Other threads bracket their work with acquire and
    Hold.release. Between the two no mapping that the hold has an address in goes away, and the
    session's end unmaps nothing. Whoever releases the last hold of a closed set gives its mappings
    back.
    """

    def __init__(self, mappings: Mappings, on_idle: Callable[[], None] | None = None) -> None:
        """on_idle is called once, on any thread, when the set is closed and nothing moves in its
        memory any more."""
        self._mappings = mappings
        self._on_idle = on_idle
        self._lock = threading.Lock()
        self._regions: dict[int, Region] = {}
        self._holds = 0
        self._leaving = 0  # removed regions that are still mapped
        self._closed = False
        self._taken = False  # closed, and its mappings are being given back or are
        self._idle = threading.Event()

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
        memory: bool = False,
        then: Callable[[], object] = lambda: None,
    ) -> bool:
        """Map a region, or take its mapping of an earlier session; return whether that was kept.

        fd is the caller's and may be closed afterwards. For the arguments see map_region, populate
        for write, and Mapping for memory. A read_only region is populated for reading. With
        background a thread of its own fills the page tables and attaches the region, which is not
        ready before; without, it is ready on return. Raises RegionError for a region that cannot be
        mapped or attached; if it fails in the background, Hold.locate raises. then is called, on
        any thread, when the region is ready or has failed, but not when this call raises.
        """
        with self._lock:
            if self._closed:
                raise RegionError("the session has ended")
            if region_id in self._regions:
                raise RegionError(f"region {region_id} was added twice")
            mapping, kept = self._mappings.take(
                fd, size, huge, offset, page_size, read_only, memory
            )
            region = Region(mapping)
            self._regions[region_id] = region
            hold = Hold(self)
            hold._regions.add(region)
            region.holds += 1
            self._holds += 1

        def prepare() -> None:
            if kept:
                mapping.settled.wait()  # by the thread of an earlier session
            else:
                self._mappings.prepare(
                    mapping, write and not read_only, lambda: region.on_removed is None
                )
            hold.release()

        if not background or mapping.settled.is_set():
            prepare()
            if mapping.failed is not None:
                raise RegionError(mapping.failed)
            then()
            return kept

        def prepare_and_tell() -> None:
            prepare()
            then()

        try:
            threading.Thread(target=prepare_and_tell, name="lookaside-region", daemon=True).start()
        except RuntimeError as error:
            if not kept:
                mapping.failed = str(error)
                mapping.settled.set()
            hold.release()
            raise RegionError(str(error)) from error
        return kept

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

    def _pin(self, hold: Hold, region_id: int) -> Mapping:
        with self._lock:
            region = self._regions.get(region_id)
            if region is None:
                raise RegionError(f"region {region_id} is not mapped")
            if region not in hold._regions:
                hold._regions.add(region)
                region.holds += 1
        return region.mapping

    def _release(self, hold: Hold) -> None:
        leave: list[Region] = []
        with self._lock:
            for region in hold._regions:
                region.holds -= 1
                if region.on_removed is not None and not region.holds:
                    leave.append(region)
            hold._regions.clear()
            self._holds -= 1
            given_back = self._take_if_idle()
        for region in leave:
            self._leave(region)
        self._give_back(given_back)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing moves in the memory of a closed set; return whether that is so."""
        return self._idle.wait(timeout_s)

    def close(self) -> None:
        """Refuse new holds, and give the mappings back once the last one is released.

        The next session may take them over at once.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                self._mappings.keep([region.mapping for region in self._regions.values()])
            given_back = self._take_if_idle()
        self._give_back(given_back)

    def _take_if_idle(self) -> list[Region] | None:
        if not self._closed or self._holds or self._leaving or self._taken:
            return None
        self._taken = True
        given_back = list(self._regions.values())
        self._regions.clear()
        return given_back

    def _leave(self, region: Region) -> None:
        """Give back a removed region that nobody holds. It is unmapped then."""

        def gone() -> None:
            assert region.on_removed is not None
            try:
                region.on_removed()
            finally:
                with self._lock:
                    self._leaving -= 1
                    given_back = self._take_if_idle()
                self._give_back(given_back)

        self._mappings.release(region.mapping, gone)

    def _give_back(self, regions: list[Region] | None) -> None:
        if regions is None:
            return
        for region in regions:
            self._mappings.release(region.mapping)
        self._idle.set()
        if self._on_idle is not None:
            self._on_idle()

    @property
    def bytes_mapped(self) -> int:
        """The sizes of all regions mapped now, together."""
        with self._lock:
            return sum(region.mapping.size for region in self._regions.values())
