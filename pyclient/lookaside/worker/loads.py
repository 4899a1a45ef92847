"""From the order to load pages to its report, on a thread of its own.

Locks: Loads._lock guards what the threads share, marked so, and is held for bookkeeping only.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Collection, Iterable
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

# The sidecar answers PrepareLoad from memory; this is generous for a busy machine.
_GRANT_PATIENCE_S = 0.5
# How long a step without a forward waits for a load; new requests wait as long.
_IDLE_STEP_PATIENCE_S = 0.005
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
    """Takes over leases, copies pages in, and reports. See the package's comment."""

    def __init__(
        self,
        config: Config,
        link: Link,
        stats: Collector,
        log: RateLimitedLog,
        whole_failures: bool,
    ) -> None:
        """whole_failures: a load that fails is reported as failed as a whole, not by its blocks."""
        self.config = config
        self._link = link
        self._stats = stats
        self._log = log
        self._whole_failures = whole_failures
        self.rank = 0
        self._in_step: list[_Load] = []  # to be loaded before this step's forward
        self._thread: threading.Thread | None = None
        self._queue: queue.SimpleQueue[_Load | None] = queue.SimpleQueue()

        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        # Guarded by _lock.
        self._out: dict[str, int] = {}  # request -> loads of it that are out
        self._failed: set[str] = set()  # of these requests, those that cannot succeed any more
        self._aborted: set[str] = set()
        self._received: set[str] = set()
        self._invalid_blocks: set[int] = set()
        self._failed_requests: set[str] = set()  # received, but failed as a whole
        self._failures: dict[str, int] = {}
        self._copied: dict[str, tuple[int, float]] = {}

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

    def expect(self, specs: Iterable[LoadSpec], aborted: Iterable[str]) -> None:
        """Count a step's loads before the first of them is ordered.

        Otherwise one that fails at once would be taken for the last of its request.
        """
        with self._lock:
            for spec in specs:
                if spec.in_step:
                    continue
                self._out[spec.request_id] = self._out.get(spec.request_id, 0) + 1
            self._aborted.update(request for request in aborted if request in self._out)

    def order(self, spec: LoadSpec, after: object) -> None:
        """Begin a load that expect has counted: take over its leases, and have the loader copy.

        after is a mark of the copies. Whatever happens, the load is reported in the end. One within
        the step is copied by load_now.
        """
        try:
            live, session = self._link.live, self._link.session
            if live is None or session is None or self._link.closed:
                raise SessionUnavailable("not connected")
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
            self._report(spec, str(error))

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
            self._report(load.spec, "vLLM did not ask for it before the forward")

    @staticmethod
    def _release_late(session: Session, session_id: int, reply: object) -> None:
        """Give back leases that came too late."""
        if isinstance(reply, wire.LoadGrant) and reply.load:
            session.send(wire.Release(reply.load), session_id)

    # ---- reports ----

    def take_received(self, idle: bool) -> set[str]:
        """Return the requests whose loads have ended since the last call.

        idle: the step computes nothing, so wait a little for one to end.
        """
        with self._lock:
            if idle and self._out:
                self._ended.wait_for(lambda: self._received, _IDLE_STEP_PATIENCE_S)
            received, self._received = self._received, set()
        return received

    def take_failed_requests(self, received: set[str]) -> set[str]:
        """Return which of these requests, just taken as received, failed as a whole."""
        with self._lock:
            failed = self._failed_requests & received
            self._failed_requests -= failed
        return failed

    def take_invalid_blocks(self) -> set[int]:
        """Return the blocks that loads should have filled and did not, since the last call."""
        with self._lock:
            invalid, self._invalid_blocks = self._invalid_blocks, set()
        return invalid

    def take_failures(self) -> dict[str, int]:
        """Return the requests that could not be loaded since the last call, as the metadata has
        them."""
        with self._lock:
            failures, self._failures = self._failures, {}
        return failures

    def take_copies(self) -> dict[str, tuple[int, float]]:
        """Return the pages copied since the last call, and how long that took, by request."""
        with self._lock:
            copied, self._copied = self._copied, {}
        return copied

    def _report_in_step(self, spec: LoadSpec, error: str | None) -> None:
        """Record how a load within the step ended: vLLM must not be told that it was received."""
        if error is None:
            self._stats.add("loads")
            self._stats.add("loads_in_step")
            return
        with self._lock:
            self._invalid_blocks.update(block for block in spec.block_ids if block)
            self._failures[spec.request_id] = 1
        self._stats.add("load_failures")
        self._log.warning("load", "a prefix could not be loaded; vLLM computes it: %s", error)

    def _report(self, spec: LoadSpec, error: str | None) -> None:
        """Record how a load ended, once no byte of it moves any more. Any thread."""
        if spec.in_step:
            self._report_in_step(spec, error)
            return
        with self._lock:
            aborted = spec.request_id in self._aborted
            if error is not None:
                self._failed.add(spec.request_id)
                if not (aborted or self._whole_failures):
                    # Before the request counts as received, or vLLM would use them.
                    self._invalid_blocks.update(block for block in spec.block_ids if block)
            left = self._out.get(spec.request_id, 1) - 1
            if left:
                self._out[spec.request_id] = left
            else:
                self._receive(spec.request_id, aborted)
        if error is None:
            self._stats.add("loads")
        elif not aborted:
            self._stats.add("load_failures")
            self._log.warning("load", "a prefix could not be loaded; vLLM computes it: %s", error)

    def _receive(self, request_id: str, aborted: bool) -> None:
        """Note that all loads of a request have ended. The lock is held."""
        self._out.pop(request_id, None)
        self._aborted.discard(request_id)
        self._received.add(request_id)
        self._ended.notify()
        if request_id in self._failed:
            self._failed.discard(request_id)
            if not aborted:
                self._failures[request_id] = 1
                if self._whole_failures:
                    self._failed_requests.add(request_id)

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
            if not load.pending.done and time.monotonic() < load.grant_deadline:
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
            with self._lock:
                if load.spec.request_id in self._aborted:
                    raise RegionError("aborted")
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
            self._report(load.spec, str(error))
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
                with self._lock:
                    self._copied[load.spec.request_id] = (pages, now - load.begun)
                self._stats.add("load_bytes", load.size)
                self._stats.observe("load_seconds", time.monotonic() - load.since)
        except Exception as fault:
            error = error or str(fault)
        self._report(load.spec, error)

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
