"""The data regions that this process has mapped, and what is kept of them between sessions.

Mapping and pinning hundreds of GiB takes a minute. A sidecar that comes back finds its memory again
(docs/protocol.md, "What outlives a session"). So a mapping outlives its session: it stays mapped
and attached, with a descriptor of its own. A region of the next session that is the same bytes of
the same file takes it over as it is. What no region of that session has taken is unmapped.

A mapping is made by one session's set of regions (regions.py) and belongs to at most one set that
is open. Sets that have ended may still have copies in it: each is a user until its last copy has
ended. A mapping without users that is not kept is unmapped, on a thread of its own because that may
wait for a device.

This module imports neither torch nor vLLM.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from lookaside import wire
from lookaside.mapping import RegionError, check_place, map_region, populate, unmap

# Below "vllm", so that its handlers show it.
logger = logging.getLogger("vllm.lookaside")

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
class Mapping:
    """One mapped region. It never moves or changes size."""

    address: int
    size: int
    handle: int
    """Unique in the process: the attachable knows the mapping by it."""
    read_only: bool
    identity: tuple[int, ...]
    fd: int
    """A descriptor of the mapping's own; -1 if the mapping is not kept."""
    memory: bool
    """The file is memory, which a sidecar can lose."""
    settled: threading.Event = field(default_factory=threading.Event)
    """Set once the mapping is attached or has failed."""
    attached: bool = False
    failed: str | None = None
    # Guarded by Mappings._lock.
    users: int = 1
    on_unmapped: list[Callable[[], object]] = field(default_factory=list)


class Mappings:
    """All mapped regions of one worker. Methods may be called from any thread.

    A forked child's copy is empty: the memory is not mapped there.
    """

    _handles_lock = threading.Lock()
    _next_handle = 0

    def __init__(self, attachable: Attachable | None = None) -> None:
        self.attachable = attachable
        """Set before the first mapping is made."""
        self._lock = threading.Condition()
        # Guarded by _lock, all below.
        self._all: set[Mapping] = set()
        self._kept: dict[tuple[int, ...], Mapping] = {}  # of no open set
        self._closed = False
        _live_mappings.add(self)

    @classmethod
    def _handle(cls) -> int:
        # Region ids begin anew with each sidecar, while an old set may still be in use.
        with cls._handles_lock:
            cls._next_handle += 1
            return cls._next_handle

    def take(
        self,
        fd: int,
        size: int,
        huge: bool,
        offset: int,
        page_size: int,
        read_only: bool,
        memory: bool,
    ) -> tuple[Mapping, bool]:
        """Return a mapping for a set, and whether it was kept. The set releases it.

        A kept one is settled, or will be by the set that made it. A new one must be prepared. For
        the arguments see map_region; fd stays the caller's. Raises RegionError.
        """
        check_place(fd, size, offset, page_size)
        status = os.fstat(fd)
        identity = (status.st_dev, status.st_ino, status.st_rdev, offset, size)
        with self._lock:
            kept = None if read_only else self._kept.get(identity)
            if kept is not None and kept.failed is None and kept.address % page_size == 0:
                del self._kept[identity]
                kept.users += 1
                return kept, True
            address = map_region(fd, size, huge, offset, page_size, read_only)
            try:
                own = -1 if read_only else os.dup(fd)
            except OSError as error:
                unmap(address, size)
                raise RegionError(error.errno, str(error)) from error
            made = Mapping(address, size, self._handle(), read_only, identity, own, memory)
            self._all.add(made)
        return made, False

    def prepare(self, mapping: Mapping, write: bool, wanted: Callable[[], bool]) -> None:
        """Populate and attach a new mapping. wanted reports whether that still makes sense."""
        try:
            if wanted():
                populate(mapping.address, mapping.size, write)
            if not wanted():
                raise RegionError("it was removed")
            if self.attachable is not None:
                self.attachable.attach(
                    mapping.handle, mapping.address, mapping.size, mapping.read_only
                )
            mapping.attached = True
        except Exception as error:  # whatever a device's driver raises
            mapping.failed = f"region could not be attached: {error}"
        mapping.settled.set()

    def keep(self, mappings: list[Mapping]) -> None:
        """Keep the mappings of a set that ends, for the next one. They still have their users."""
        with self._lock:
            if self._closed:
                return
            for mapping in mappings:
                if mapping.fd >= 0 and mapping.failed is None:
                    self._kept.setdefault(mapping.identity, mapping)

    def release(self, mapping: Mapping, then: Callable[[], object] | None = None) -> None:
        """End one use of a mapping. It is unmapped if that was the last one and it is not kept.

        then is called on any thread once it is unmapped, but not if a device does not give it back.
        """
        with self._lock:
            mapping.users -= 1
            if then is not None:
                mapping.on_unmapped.append(then)
            unused = self._unused([mapping])
        self._retire(unused)

    def drop_kept(self) -> None:
        """Unmap all that is kept and has no user, and keep nothing of the rest."""
        with self._lock:
            kept, self._kept = list(self._kept.values()), {}
            unused = self._unused(kept)
        self._retire(unused)

    def close(self) -> None:
        """Keep nothing from now on. Safe to call again."""
        with self._lock:
            self._closed = True
        self.drop_kept()

    def held(self) -> list[int]:
        """Return copies of the descriptors of memory that is kept. The caller closes them."""
        copies: list[int] = []
        with self._lock:
            kept = [m for m in self._kept.values() if m.memory and m.failed is None]
            try:
                for mapping in kept[: wire.MAX_HELD_FDS]:
                    copies.append(os.dup(mapping.fd))
            except OSError as error:
                # Better none than some: the sidecar begins anew instead of with holes.
                logger.warning("memory cannot be given back to the sidecar: %s", error)
                while copies:
                    os.close(copies.pop())
        return copies

    def wait_unmapped(self, timeout_s: float) -> bool:
        """Wait until all that is mapped is kept or in use; return whether it is."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while self._unused(list(self._all)):
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._lock.wait(left)
        return True

    def _unused(self, mappings: list[Mapping]) -> list[Mapping]:
        """Return those that are neither used nor kept. The caller holds _lock."""
        return [
            m
            for m in mappings
            if m in self._all and not m.users and self._kept.get(m.identity) is not m
        ]

    def _retire(self, mappings: list[Mapping]) -> None:
        """Unmap, on a thread of its own."""
        if not mappings:
            return
        try:
            threading.Thread(
                target=self._unmap, args=(mappings,), name="lookaside-unmap", daemon=True
            ).start()
        except RuntimeError:
            self._unmap(mappings)

    def _unmap(self, mappings: list[Mapping]) -> None:
        for mapping in mappings:
            try:
                if self.attachable is not None and mapping.attached:
                    detached = self.attachable.detach(mapping.handle)
                    while not detached.wait(_DETACH_PATIENCE_S):
                        pass
            except Exception:
                # Still registered with a device: a leaked mapping is better than a device that
                # writes to other memory. Nobody is told that it is unmapped.
                logger.warning("a device does not give a region back", exc_info=True)
                continue
            unmap(mapping.address, mapping.size)
            with self._lock:
                self._all.discard(mapping)
                if mapping.fd >= 0:
                    os.close(mapping.fd)
                told = mapping.on_unmapped
                self._lock.notify_all()
            for then in told:
                then()

    def _forget_after_fork(self) -> None:
        """Give all up in a forked child, where nothing is mapped and no lock may be touched."""
        self._lock = threading.Condition()
        self._closed = True
        mappings, self._all, self._kept = self._all, set(), {}
        for mapping in mappings:
            if mapping.fd >= 0:
                os.close(mapping.fd)


_live_mappings: weakref.WeakSet[Mappings] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for mappings in list(_live_mappings):
        mappings._forget_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
