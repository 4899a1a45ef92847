"""The memory of one session of a client: which regions it has now, and when all are there.

This module imports neither torch nor vLLM.
"""

from __future__ import annotations

import threading

from lookaside import wire
from lookaside.mapping import RegionError
from lookaside.mappings import Attachable, Mappings
from lookaside.regions import RegionSet
from lookaside.session import Session, Subscriber

_HUGE_KINDS = ("hugetlb", "thp", "devdax", "fsdax")
_MEMORY_KINDS = ("memfd", "thp", "hugetlb")


class Live:
    """A session and its regions."""

    def __init__(self, session: Session, welcome: wire.Welcome, mappings: Mappings) -> None:
        self.session_id = welcome.session
        self.regions = RegionSet(mappings, on_idle=session.hold())
        self.ready = threading.Event()


class Arena(Subscriber):
    """The session's memory. The methods named on_ run on the session's thread."""

    def __init__(self, copies: Attachable | None = None) -> None:
        """copies are told of each region before anything is granted to this client there."""
        self.mappings = Mappings(copies)
        self.changed = threading.Condition()
        self.live: Live | None = None  # guarded by changed

    def on_connected(self, session: Session, welcome: wire.Welcome) -> None:
        with self.changed:
            self.live = Live(session, welcome, self.mappings)

    def on_region(self, session: Session, region: wire.RegionAdded, fd: int) -> None:
        live = self.live
        if live is None:
            return

        def mapped() -> None:
            session.send(wire.RegionMapped(region.region), live.session_id)

        try:
            live.regions.add(
                region.region,
                fd,
                region.size,
                huge=region.kind in _HUGE_KINDS,
                background=True,  # a grant waits for its region, and only that
                offset=region.offset,
                page_size=region.page_size,
                write=False,
                read_only=bool(region.read_only),
                memory=region.kind in _MEMORY_KINDS,
                then=mapped,
            )
        except RegionError:
            mapped()  # what is granted there fails, and only that

    def on_regions_ready(self, session: Session) -> None:
        self.mappings.drop_kept()
        with self.changed:
            if self.live is not None:
                self.live.ready.set()
            self.changed.notify_all()

    def on_region_removed(self, session: Session, region: int) -> None:
        live = self.live
        if live is not None:
            live.regions.remove(
                region, lambda: session.send(wire.RegionUnmapped(region), live.session_id)
            )

    def on_lost(self, session: Session) -> None:
        with self.changed:
            live, self.live = self.live, None
            self.changed.notify_all()
        if live is not None:
            live.regions.close()

    def on_given_up(self, session: Session) -> None:
        self.mappings.drop_kept()
