"""The session with this rank's sidecar, and the memory that it gives."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, field

from lookaside import wire
from lookaside.copies import Copies
from lookaside.mapping import RegionError
from lookaside.mappings import Mappings
from lookaside.ratelog import RateLimitedLog
from lookaside.regions import RegionSet
from lookaside.session import Session, Subscriber
from lookaside.stats import Collector
from lookaside.worker.pages import Pages

# Below "vllm", so that its handlers show it.
logger = logging.getLogger("vllm.lookaside")

# What shutdown waits for a device that gives memory back.
_UNMAP_PATIENCE_S = 5.0
# Kinds of region that are mapped by pages of 2 MiB, where their pages and the kernel allow it.
_HUGE_KINDS = ("hugetlb", "thp", "devdax", "fsdax")
# The kind whose pages are the page cache's: writing to each of them would have all of the file
# written back.
_FILE_KIND = "file"
# Kinds that are nothing but memory: a sidecar that dies has it no more.
_MEMORY_KINDS = ("memfd", "thp", "hugetlb")


@dataclass(slots=True)
class Memory:
    """The sidecar's own regions of a session. For the session's thread alone."""

    mapped_bytes: int = 0
    """Mapped, and pinned for a GPU, in this session."""
    kept_bytes: int = 0
    """Mapped in an earlier one."""


@dataclass(frozen=True, slots=True)
class Live:
    """The present session, and the mappings that its grants point into."""

    session_id: int
    regions: RegionSet
    max_pages: int
    """Pages of one PrepareStore, a multiple of a chunk."""
    memory: Memory = field(default_factory=Memory)


class Link(Subscriber):
    """What saves and loads share. The role fills it as the KV cache is registered.

    The methods named on_ run on the session's thread.
    """

    def __init__(self, stats: Collector, log: RateLimitedLog) -> None:
        self._stats = stats
        self._log = log
        self.pages = Pages()
        self.copies: Copies | None = None
        self.mappings = Mappings()
        """What is mapped of the arena, by this session or an earlier one."""
        self.session: Session | None = None
        self.live: Live | None = None
        """Replaced, never changed, by the session's thread; None while there is no session."""
        self.closed = False
        """The role is shut down, and orders nothing more."""
        self.quiet = False
        """The KV cache is not there: no copy may begin (quiet.py). The main thread sets it; a copy
        that another thread begins while it is set is waited for."""

    def use(self, copies: Copies) -> None:
        """Copy by these. Call once, before the session starts."""
        self.copies = self.mappings.attachable = copies

    def close(self) -> None:
        """Unmap everything, as far as no copy is under way. The session is closed."""
        self.mappings.close()
        self.mappings.wait_unmapped(_UNMAP_PATIENCE_S)

    def send(self, message: object, session_id: int) -> None:
        """Send a message if the session that it is of is the present one. Any thread."""
        if self.session is not None:
            self.session.send(message, session_id)

    def on_connected(self, session: Session, welcome: wire.Welcome) -> None:
        """Begin with a new session: grants of the one before mean nothing any more."""
        pages = min(welcome.max_pages, wire.max_store_pages(self.pages.digest_bytes))
        chunks = max(1, pages // self.pages.per_chunk)
        regions = RegionSet(self.mappings, on_idle=session.hold())
        self.live = Live(welcome.session, regions, chunks * self.pages.per_chunk)

    def on_region(self, session: Session, region: wire.RegionAdded, fd: int) -> None:
        """Map a region, unless it is mapped from an earlier session.

        One that cannot be mapped costs its grants, not the session.

        Nothing waits for another sidecar's region: the session comes first. The sidecar grants
        nothing in a region before it learns that the region is ready, except in those that it names
        before the session is connected.
        """
        live = self.live
        if live is None:
            return
        mapped = functools.partial(session.send, wire.RegionMapped(region.region), live.session_id)
        try:
            kept = live.regions.add(
                region.region,
                fd,
                region.size,
                huge=region.kind in _HUGE_KINDS,
                background=session.connected or bool(region.read_only),
                offset=region.offset,
                page_size=region.page_size,
                write=region.kind != _FILE_KIND,
                read_only=bool(region.read_only),
                memory=region.kind in _MEMORY_KINDS,
                then=mapped,
            )
            if not region.read_only:
                self._count(live.memory, region, kept)
        except RegionError as error:
            mapped()
            self._stats.add("errors")
            whose = "another sidecar's arena" if region.read_only else "the arena"
            self._log.warning(
                f"region {region.read_only}", "region %d of %s: %s", region.region, whose, error
            )

    def _count(self, memory: Memory, region: wire.RegionAdded, kept: bool) -> None:
        """Count a region of the sidecar's own that was mapped, or was mapped before."""
        if kept:
            memory.kept_bytes += region.size
            self._stats.add("regions_kept")
            self._stats.add("kept_bytes", region.size)
        else:
            memory.mapped_bytes += region.size
            self._stats.add("regions_mapped")
            self._stats.add("mapped_bytes", region.size)

    def on_regions_ready(self, session: Session) -> None:
        """Give up what earlier sessions have mapped and this one has not: it is nobody's now."""
        self.mappings.drop_kept()
        if self.live is not None:
            logger.info(
                "the sidecar's memory: %d MiB mapped, %d MiB kept from the session before",
                self.live.memory.mapped_bytes >> 20,
                self.live.memory.kept_bytes >> 20,
            )

    def on_given_up(self, session: Session) -> None:
        """Give up everything that is mapped: no sidecar has come for long."""
        self.mappings.drop_kept()

    def on_region_removed(self, session: Session, region: int) -> None:
        """Unmap a region once no copy of ours can touch it, and report that it is unmapped."""
        live = self.live
        if live is not None:
            live.regions.remove(
                region,
                functools.partial(session.send, wire.RegionUnmapped(region), live.session_id),
            )

    def on_lost(self, session: Session) -> None:
        """End a session. Its mappings stay for the next one, and copies go on in them."""
        live, self.live = self.live, None
        if live is not None:
            live.regions.close()
