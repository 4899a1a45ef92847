"""From the order to load pages to the end of its copy, on a thread of its own."""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from lookaside import wire
from lookaside.config import Config
from lookaside.connection import Pending, SessionUnavailable
from lookaside.copies import Ticket, use_all_cores
from lookaside.mapping import RegionError
from lookaside.metadata import LoadSpec
from lookaside.ratelog import RateLimitedLog
from lookaside.regions import Hold
from lookaside.session import Session
from lookaside.stats import Collector
from lookaside.worker.link import Link, Live
from lookaside.worker.reports import Reports

# The sidecar answers PrepareLoad from memory; this is generous for a busy machine.
_GRANT_PATIENCE_S = 0.5
# How long all loads within a step wait for their grants: everybody in the batch waits with them.
_IN_STEP_PATIENCE_S = 0.02
# How often the loader looks at several things that are out at once.
_POLL_S = 0.0005


@dataclass(slots=True)
class _Load:
    """One LoadSpec between its order and its report.

    Made on the main thread, the loader's from then on.
    """

    spec: LoadSpec
    live: Live
    pending: Pending
    since: float
    grant_deadline: float
    deadline: float
    after: object
    """The copies' mark at the order: until then vLLM used the blocks for something else."""
    load: int = 0
    """The sidecar's id of it once granted."""
    hold: Hold | None = None
    sources: list[tuple[int, int]] = field(default_factory=list)
    """[first, last) address of each extent."""
    size: int = 0
    """Bytes being copied."""
    ticket: Ticket | None = None
    begun: float = 0.0
    """When its copy began."""


class Loads:
    """Takes over leases and copies pages in. See the package's comment."""

    def __init__(
        self,
        config: Config,
        link: Link,
        stats: Collector,
        log: RateLimitedLog,
        reports: Reports,
    ) -> None:
        self.config = config
        self._link = link
        self._stats = stats
        self._log = log
        self._reports = reports
        self.rank = 0
        self._in_step: list[_Load] = []  # to be loaded before this step's forward
        self._thread: threading.Thread | None = None
        self._queue: queue.SimpleQueue[_Load | None] = queue.SimpleQueue()

    def run(self) -> None:
        """Start the loader's thread. Call once."""
        self._thread = threading.Thread(target=self._loop, name="lookaside-loader", daemon=True)
        self._thread.start()

    def stop(self, deadline: float) -> None:
        """Have the loader end once its loads have, and wait for it until the deadline."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(max(0.1, deadline - time.monotonic()))

    # ---- orders, on the main thread ----

    def order(self, spec: LoadSpec, after: object) -> None:
        """Begin a load that Reports.expect has counted: take over its leases, have the loader copy.

        after is a mark of the copies. Whatever happens, the load is reported in the end. One within
        the step is copied by load_now.
        """
        try:
            live, session = self._link.live, self._link.session
            if live is None or session is None or self._link.closed or self._link.quiet:
                raise SessionUnavailable("not connected, or vLLM sleeps")
            pages = len(self._link.pages.rows(spec.block_ids))
            if not pages or self.rank >= len(spec.refs):
                raise ValueError("nothing was leased for it")
            ref = spec.refs[self.rank]
            if not ref.session:
                raise ValueError("nothing was leased for it")
            now = time.monotonic()
            pending = session.submit(
                functools.partial(
                    _prepare_load,
                    ref=ref,
                    first_page=spec.first_page,
                    pages=pages,
                    names=spec.names,
                ),
                functools.partial(self._release_late, session, live.session_id),
            )
            timeout_s = self.config.load_timeout_ms / 1000
            load = _Load(
                spec,
                live,
                pending,
                now,
                grant_deadline=now + min(timeout_s, _GRANT_PATIENCE_S),
                deadline=now + timeout_s,
                after=after,
            )
            if spec.in_step:
                self._in_step.append(load)
            else:
                self._queue.put(load)
        except Exception as error:
            self._reports.add(spec, str(error))

    def load_now(self) -> None:
        """Carry out the loads of this step that its forward needs."""
        if not self._in_step:
            return
        loads, self._in_step = self._in_step, []
        deadline = time.monotonic() + _IN_STEP_PATIENCE_S
        for load in loads:
            until = min(deadline, load.grant_deadline)
            load.pending.wait(max(0.0, until - time.monotonic()))
            if self._begin(load):
                self._end(load)

    def give_up_in_step(self) -> None:
        """Fail the loads that the forward needed and that load_now was not called for."""
        loads, self._in_step = self._in_step, []
        for load in loads:
            reply = load.pending.wait(0)
            if isinstance(reply, wire.LoadGrant):
                load.load = reply.load
            self._release(load)
            self._reports.add(load.spec, "vLLM did not ask for it before the forward")

    @staticmethod
    def _release_late(session: Session, session_id: int, reply: object) -> None:
        """Give back leases that came too late."""
        if isinstance(reply, wire.LoadGrant) and reply.load:
            session.send(wire.Release(reply.load), session_id)

    # ---- the loader's thread ----

    def _loop(self) -> None:
        """Bring loads from their grant to their report, several at a time."""
        use_all_cores()
        asked: list[_Load] = []  # waiting for their grant
        moving: list[_Load] = []  # being copied
        stopping = False
        while not (stopping and not asked and not moving):
            try:
                for load in self._arrived(wait=not asked and not moving):
                    if load is None:
                        stopping = True
                    else:
                        asked.append(load)
                if asked:
                    # A load that is alone gets the thread's whole attention.
                    asked[0].pending.wait_done(_POLL_S if moving else 0.05)
                elif moving and moving[0].ticket is not None:
                    moving[0].ticket.wait(_POLL_S if len(moving) > 1 else 0.005)
                asked = self._begin_granted(asked, moving)
                moving = self._end_copied(moving)
            except Exception:
                # _begin and _end catch their own; this is the thread's last line.
                self._stats.add("errors")
                self._log.warning("bug loader", "the loader failed", exc_info=True)
                time.sleep(_POLL_S)

    def _begin_granted(self, asked: list[_Load], moving: list[_Load]) -> list[_Load]:
        """Add to moving what can be copied now; return the loads that still wait for a grant."""
        still: list[_Load] = []
        for load in asked:
            if not (load.pending.done or self._link.quiet) and (
                time.monotonic() < load.grant_deadline
            ):
                still.append(load)
            elif self._begin(load):
                moving.append(load)
        return still

    def _end_copied(self, moving: list[_Load]) -> list[_Load]:
        """End the loads whose copy is over; return the others."""
        still: list[_Load] = []
        for load in moving:
            if load.ticket is not None and not load.ticket.done():
                still.append(load)
            else:
                self._end(load)
        return still

    def _arrived(self, wait: bool) -> list[_Load | None]:
        arrived: list[_Load | None] = []
        try:
            if wait:
                arrived.append(self._queue.get())
            while True:
                arrived.append(self._queue.get_nowait())
        except queue.Empty:
            return arrived

    def _begin(self, load: _Load) -> bool:
        """Start copying a load whose grant is in; False if it has ended, and is reported."""
        try:
            reply = load.pending.wait(0)
            if isinstance(reply, wire.Error):
                raise RegionError(f"{reply.code}: {reply.message}")
            if not isinstance(reply, wire.LoadGrant):
                raise RegionError("the sidecar did not answer in time")
            load.load = reply.load
            if reply.names != load.spec.names:
                raise RegionError("the sidecar granted other pages than were ordered")
            if self._reports.is_aborted(load.spec.request_id):
                raise RegionError("aborted")
            if self._link.quiet:
                raise RegionError("vLLM sleeps")
            load.hold = load.live.regions.acquire()
            if load.hold is None:
                raise RegionError("the session was lost")
            blocks, addresses = self._sources(load, load.hold, reply.extents)
            assert self._link.copies is not None
            load.begun = time.monotonic()
            if load.spec.in_step:
                load.ticket = self._link.copies.scatter_now(blocks, addresses)
            else:
                load.ticket = self._link.copies.scatter(blocks, addresses, load.after)
            load.after = None
            return True
        except Exception as error:
            if load.hold is not None:
                load.hold.release()
            self._release(load)
            self._reports.add(load.spec, str(error))
            return False

    def _sources(
        self, load: _Load, hold: Hold, extents: tuple[wire.Extent, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the blocks to fill, and where their bytes are.

        Raises RegionError unless the extents give exactly what was asked for.
        """
        spec, layout = load.spec, self._link.pages
        rows = layout.rows(spec.block_ids)
        pages = len(rows)
        asked = range(spec.first_page, spec.first_page + pages)
        addresses = np.zeros(pages, np.uint64)
        given = 0
        for extent in extents:
            source = layout.locate(hold, asked, extent, load.deadline - time.monotonic())
            load.sources.append((int(source[0]), int(source[-1]) + layout.page_bytes))
            at = extent.page - spec.first_page
            if addresses[at : at + len(source)].any():
                raise RegionError("a page was granted twice")
            addresses[at : at + len(source)] = source
            given += len(source)
        if given != pages:
            raise RegionError(f"{given} of {pages} pages were granted")
        load.size = layout.bytes_of(rows)
        return layout.copied(rows), addresses

    def _end(self, load: _Load) -> None:
        """Check, release and report a load whose copy has ended."""
        session = self._link.session
        assert load.ticket is not None and load.hold is not None and session is not None
        error, now = load.ticket.error, time.monotonic()
        try:
            if error is None and not session.is_current(load.live.session_id):
                error = "the session was lost during the copy"
            if error is None and time.monotonic() > load.deadline:
                error = "it took too long"
            load.hold.release()
            self._release(load, load.ticket.faults)
            if error is None:
                pages = len(self._link.pages.rows(load.spec.block_ids))
                self._reports.note_copy(load.spec.request_id, pages, now - load.begun)
                self._stats.add("load_bytes", load.size)
                self._stats.observe("load_seconds", time.monotonic() - load.since)
        except Exception as fault:
            error = error or str(fault)
        self._reports.add(load.spec, error)

    def _release(self, load: _Load, faults: Collection[int] = ()) -> None:
        """Give the leases back. What lies at the addresses of faults is bad for good."""
        if load.load:
            bad = tuple(
                index
                for index, (first, end) in enumerate(load.sources)
                if any(first <= fault < end for fault in faults)
            )
            self._link.send(wire.Release(load.load, bad), load.live.session_id)


def _prepare_load(
    request_id: int, ref: wire.LeaseRef, first_page: int, pages: int, names: bytes
) -> wire.PrepareLoad:
    return wire.PrepareLoad(
        request_id, ref.session, ref.lookup, ref.ticket, first_page, pages, names
    )
