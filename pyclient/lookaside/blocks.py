"""Blocks of a host buffer, kept in a sidecar: for engines that copy to host memory by themselves.

The buffer has rows of one size. A row can hold a block; a block has a name of NAME_BYTES bytes that
stands for its whole prefix, and an index in that prefix. A BlockStore finds out which blocks a
sidecar holds (``find``), copies rows into the sidecar's arena (``store``) and copies blocks into
rows (``load``).

**Threads.** ``find`` and the Found that it returns are for one thread at a time, which they never
hold for longer than they are told to. ``store`` and ``load`` only queue a job; any thread may call
them. One thread of this module, the mover, talks to the sidecar about jobs and starts their copies,
which run in native code without the GIL. ``finished`` returns the jobs that are over, in the order
of their ends. Every job ends, whatever happens to the sidecar: a job never waits longer than
``timeout_s`` for an answer, and without a session it fails at once.

**Memory.** Between ``store`` or ``load`` and the job's end the mover reads or writes the job's
rows. ``close`` waits for that; after it the buffer may go.

**Failures.** Nothing here raises because of a sidecar. Blocks that are not found are misses. Blocks
that could not be copied are the job's ``bad`` ones.

Loads come before stores: a request waits for them. Stores are cut into pieces of PIECE_BYTES, and
what would make more than ``queue_bytes`` wait is refused at once, so that rows are not kept from
their owner by a sidecar that is slow.

This module imports neither torch nor vLLM.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from lookaside import wire
from lookaside.arena import Arena, Live
from lookaside.connection import SessionUnavailable
from lookaside.copies import CpuCopies
from lookaside.handshake import SessionOptions
from lookaside.layout import PageLayout, Segment
from lookaside.lookups import Lookup, LookupClient
from lookaside.mapping import RegionError
from lookaside.ratelog import RateLimitedLog
from lookaside.regions import Hold
from lookaside.session import Session

# Below "vllm", so that its handlers show it.
logger = logging.getLogger("vllm.lookaside")

NAME_BYTES = 32
"""The length of a block's name."""

PIECE_BYTES = 32 << 20
"""What one store asks room for at once. A load waits for no more than the copy of this."""

# A store names the block before its first one. This stands for one that is not known.
_UNKNOWN = bytes(NAME_BYTES)
# While a session may still come, blocks are not known to be missing.
_START_S = 2.0


class Buffer(NamedTuple):
    """Where the rows are: row r has the bytes from ``address + r * stride`` on."""

    address: int
    rows: int
    stride: int
    block_bytes: int


class Settings(NamedTuple):
    """Bounds of a BlockStore. All times are seconds."""

    timeout_s: float = 2.0
    """How long a job waits for each answer of the sidecar."""
    find_s: float = 0.1
    """How long find may be out before it counts as a miss."""
    promotion_s: float = 3.0
    """How long it may be out for blocks that a tier below the memory brings up."""
    queue_bytes: int = 1 << 30
    """The most that stores may wait for together."""
    threads: int = 2
    """Threads of one copy."""
    tenant: str = ""
    """To whom blocks are counted."""


@dataclass(slots=True)
class Part:
    """Consecutive blocks of one prefix, and the rows that they are in or go to."""

    first: int
    """The index of the first block in its prefix."""
    names: list[bytes]
    rows: list[int]
    """By block; a load leaves out those with a row below 0."""
    tags: list[Any]
    """What the caller calls the blocks; given back in Done."""
    before: bytes = b""
    """Of a store: the name of the block before the first one; empty if it is not known."""
    found: Found | None = None
    """Of a load: what leases the blocks. first and names are those of some of its blocks."""


class Done(NamedTuple):
    """A job that is over."""

    job: int
    good: list[Any]
    """Tags of blocks that are in the sidecar now, or in their rows."""
    bad: list[Any]
    """Tags of the others. The rows of a load's bad blocks may have been written to. A store that
    was refused at once has neither good nor bad blocks."""
    moved_bytes: int
    seconds: float
    """From the job's first request to its end; its time in the queue does not count."""


@dataclass(slots=True)
class _Job:
    number: int
    parts: Callable[[], list[Part]]
    size: int
    good: list[Any] = field(default_factory=list)
    bad: list[Any] = field(default_factory=list)
    moved: int = 0


class Found:
    """How many of the blocks that find was asked for are held, and a lease on them.

    For the thread that called find.
    """

    __slots__ = ("_lookup", "first", "names", "taken")

    def __init__(self, lookup: Lookup, first: int, names: list[bytes]) -> None:
        self._lookup = lookup
        self.first = first
        self.names = names
        self.taken = False
        """A load has been ordered for it. There can be only one."""

    def poll(self) -> int | None:
        """Return how many blocks are held, from the first on; None while that is not known."""
        return self._lookup.poll()

    def wait(self, timeout_s: float) -> int | None:
        """Poll for so long at most; shorter if the answer cannot come soon."""
        return self._lookup.wait(timeout_s)

    @property
    def refs(self) -> tuple[wire.LeaseRef, ...]:
        return self._lookup.refs

    def cancel(self) -> None:
        """End the lease, unless a load has it. Safe to call again."""
        if not self.taken:
            self._lookup.cancel()


class BlockStore:
    """See the module's comment. start connects in the background."""

    def __init__(
        self,
        endpoint: str,
        engine_id: str,
        fields: Mapping[str, str],
        buffer: Buffer,
        block_tokens: int = 1,
        settings: Settings = Settings(),  # noqa: B008  # it is immutable
        about: Mapping[str, str] | None = None,
        on_absent: Callable[[], None] | None = None,
    ) -> None:
        """fields name the space: all that must agree for blocks to mean the same. on_absent is
        called when nothing listens on the endpoint. block_tokens is for people's statistics.

        Raises ValueError for a buffer that does not fit its rows.
        """
        self._settings = settings
        self._buffer = buffer
        self._autostart = on_absent is not None
        self._copies = CpuCopies(_layout(buffer, block_tokens), settings.threads)
        self._arena = Arena(self._copies)
        self._log = RateLimitedLog(logger)
        options = {
            "endpoint": endpoint,
            "engine_id": engine_id,
            "rank": 0,
            "page_tokens": block_tokens,
            "page_bytes": buffer.block_bytes,
            "pages_per_chunk": 1,
            "digest_bytes": NAME_BYTES,
            "fields": dict(fields),
            "about": dict(about or {}),
        }
        self._worker = Session(
            SessionOptions(role="worker", **options), on_absent, self._arena.mappings.held
        )
        self._worker.subscribe(self._arena)
        self._scheduler = Session(SessionOptions(role="scheduler", **options), on_absent)
        self._lookups = LookupClient(
            [self._scheduler], settings.find_s, settings.promotion_s, count=self._count
        )
        self.counts: dict[str, int] = {}
        """What happened how often; for tests and people."""
        self._since = time.monotonic()
        self._started = False  # there was a session with its memory
        self._finished: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._mover = threading.Thread(target=self._run, name="lookaside-mover", daemon=True)
        self._wake = threading.Condition()
        # Guarded by _wake, all below.
        self._loads: deque[_Job] = deque()
        self._stores: deque[_Job] = deque()
        self._open = 0  # jobs that have not ended
        self._waiting = 0  # bytes of stores among them
        self._closed = False

    def start(self) -> None:
        """Begin to connect. Call once."""
        self._since = time.monotonic()
        self._worker.start()
        self._scheduler.start()
        self._mover.start()

    def move(self, fields: Mapping[str, str]) -> None:
        """Go on in another space. What was found before is void."""
        self._since, self._started = time.monotonic(), False
        self._worker.move(fields)
        self._scheduler.move(fields)

    @property
    def starting(self) -> bool:
        """Whether a session may still come: a find now would miss what one a moment later finds."""
        if self._started or time.monotonic() - self._since > _START_S:
            return False
        if self.connected:
            self._started = True
            return False
        return self._worker.connected or self._autostart or not self._worker.settled

    @property
    def connected(self) -> bool:
        """Whether blocks can be found and copied now."""
        live = self._arena.live
        return self._scheduler.available and live is not None and live.ready.is_set()

    # ---- finding, on one thread at a time ----

    def find(self, first: int, before: bytes, names: list[bytes], request: str = "") -> Found:
        """Ask how many of the blocks are held, from the first on, and lease these.

        first is the index of names[0], before the name of the block before it, if that is known.
        """
        welcome = self._scheduler.welcome
        if welcome is not None:
            names = names[: welcome.max_pages]
        lookup = self._lookups.start(
            first, before, b"".join(names), tenant=self._settings.tenant, request=request
        )
        return Found(lookup, first, names)

    # ---- jobs, from any thread ----

    def store(self, job: int, blocks: int, parts: Callable[[], list[Part]]) -> None:
        """Have rows copied into the sidecar. parts is called on the mover's thread.

        blocks is how many there are in all.
        """
        size = blocks * self._buffer.block_bytes
        made = _Job(job, parts, size)
        with self._wake:
            refused = (
                self._closed
                or not self.connected
                or (self._waiting > 0 and self._waiting + size > self._settings.queue_bytes)
            )
            self._open += 1
            if not refused:
                self._waiting += size
                self._stores.append(made)
                self._wake.notify()
        if refused:
            self._count("stores_refused")
            made.size = 0
            self._end(made, time.monotonic(), ())

    def load(self, job: int, parts: list[Part]) -> None:
        """Have blocks copied into rows. Each part takes its Found, which is of no use after."""
        for part in parts:
            if part.found is not None:
                part.found.taken = True
        made = _Job(job, lambda: parts, 0)
        with self._wake:
            self._open += 1
            refused = self._closed
            if not refused:
                self._loads.append(made)
                self._wake.notify()
        if refused:
            self._end(made, time.monotonic(), parts)

    def finished(self) -> list[Done]:
        """Return the jobs that have ended since the last call. Never waits."""
        done: list[Done] = []
        try:
            while True:
                done.append(self._finished.get_nowait())
        except queue.Empty:
            return done

    def drain(self) -> None:
        """Wait until every job has ended."""
        with self._wake:
            self._wake.wait_for(lambda: not self._open)

    def close(self) -> None:
        """End everything. Jobs that have not begun fail; copies under way are waited for."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        if self._mover.ident is not None:
            self._mover.join()
        self._lookups.close()
        self._scheduler.close()
        self._worker.close()
        self._arena.mappings.close()
        self._copies.close()

    # ---- the mover ----

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closed or self._loads or self._stores)
                if self._closed:
                    left = [*self._loads, *self._stores]
                    self._loads.clear()
                    self._stores.clear()
                    break
                job = self._stores.popleft() if self._stores and not self._loads else None
            self._run_loads()
            if job is not None:
                self._guard(job, self._store_part, self._confirm)
        for job in left:
            self._end(job, time.monotonic(), self._parts_of(job))

    def _run_loads(self) -> None:
        while True:
            with self._wake:
                if not self._loads or self._closed:
                    return
                job = self._loads.popleft()
            self._guard(job, self._load_part)

    def _guard(
        self,
        job: _Job,
        move: Callable[[_Job, Part], None],
        then: Callable[[_Job], None] = lambda job: None,
    ) -> None:
        begun = time.monotonic()
        parts = self._parts_of(job)
        while parts and not self._closed:
            part = parts.pop(0)
            before = len(job.good) + len(job.bad)
            try:
                move(job, part)
            except Exception:  # a job must end
                self._log.warning("job", "blocks could not be copied", exc_info=True)
                told = len(job.good) + len(job.bad) - before
                job.bad += _wanted(part)[told:]
        then(job)
        self._end(job, begun, parts)

    def _confirm(self, job: _Job) -> None:
        """Wait until the sidecar has taken in a store's commits, which it does not answer.

        Lookups come to it on another socket. So what was reported as stored is found from now on.
        """
        if not job.moved:
            return
        _, reply = self._ask(lambda i: wire.Ping(i))
        if not isinstance(reply, wire.Pong):
            job.bad += job.good
            job.good = []

    def _parts_of(self, job: _Job) -> list[Part]:
        try:
            return list(job.parts())
        except Exception:
            self._log.warning("parts", "a job's blocks could not be told", exc_info=True)
            return []

    def _end(self, job: _Job, begun: float, left: Sequence[Part]) -> None:
        """Report a job, of which the parts that are left were not moved."""
        for part in left:
            job.bad += _wanted(part)
        done = Done(job.number, job.good, job.bad, job.moved, time.monotonic() - begun)
        self._finished.put(done)
        with self._wake:
            self._open -= 1
            self._waiting -= job.size
            if not self._open:
                self._wake.notify_all()

    def _store_part(self, job: _Job, part: Part) -> None:
        size = self._buffer.block_bytes
        welcome = self._worker.welcome
        most = wire.max_store_pages(NAME_BYTES)
        most = min(most, welcome.max_pages) if welcome is not None else most
        most = max(1, min(most, PIECE_BYTES // size))
        before = part.before if part.first else b""
        for begin in range(0, len(part.names), most):
            self._run_loads()
            names = part.names[begin : begin + most]
            tags = part.tags[begin : begin + most]
            if begin:
                before = part.names[begin - 1]
            rows = part.rows[begin : begin + most]
            good, moved = self._store_piece(part.first + begin, before, names, rows)
            for tag, ok in zip(tags, good, strict=True):
                (job.good if ok else job.bad).append(tag)
            job.moved += moved * size

    def _store_piece(
        self, first: int, before: bytes, names: list[bytes], rows: list[int]
    ) -> tuple[list[bool], int]:
        """Store consecutive blocks; return for each whether it is held now, and how many moved."""
        none = [False] * len(names), 0
        if first and len(before) != NAME_BYTES:
            before = _UNKNOWN
        hashes, tenant = b"".join(names), self._settings.tenant
        live, reply = self._ask(lambda i: wire.PrepareStore(i, first, before, hashes, 1, 0, tenant))
        if live is None or not isinstance(reply, wire.StoreGrant):
            self._explain("store", reply)
            return none
        granted = [(e.page - first + k, e, k) for e in reply.grants for k in range(e.pages)]
        copied = self._copy(
            self._copies.gather,
            [rows[at] for at, _, _ in granted],
            [(e, k) for _, e, k in granted],
            live.regions.acquire(),
            write=True,
        )
        if reply.store:
            message = wire.CommitStore(reply.store) if copied else wire.AbortStore(reply.store)
            if not self._worker.send(message, live.session_id):
                return none
        if not copied:
            return none
        there = {at for at, _, _ in granted}
        # What has found no room is at the end, and cannot be told there from what was held.
        held_to = len(names) if not reply.shed else max(there, default=-1) + 1
        if reply.shed:
            self._count("blocks_shed", reply.shed)
        return [at in there or at < held_to for at in range(len(names))], len(granted)

    def _load_part(self, job: _Job, part: Part) -> None:
        good = self._load_piece(part)
        for at, row in enumerate(part.rows):
            if row >= 0:
                (job.good if good else job.bad).append(part.tags[at])
        if good:
            job.moved += sum(row >= 0 for row in part.rows) * self._buffer.block_bytes

    def _load_piece(self, part: Part) -> bool:
        if part.found is None:
            return False
        (ref,) = part.found.refs
        if not ref.session:
            return False
        names = wire.names(part.names, part.first, 1)
        live, reply = self._ask(
            lambda i: wire.PrepareLoad(
                i, ref.session, ref.lookup, ref.ticket, part.first, len(part.names), names
            )
        )
        if live is None or not isinstance(reply, wire.LoadGrant):
            self._explain("load", reply)
            return False
        where = {e.page + k - part.first: (e, k) for e in reply.extents for k in range(e.pages)}
        wanted = [at for at, row in enumerate(part.rows) if row >= 0]
        good = reply.names == names and all(at in where for at in wanted)
        if good:
            good = self._copy(
                self._copies.scatter_now,
                [part.rows[at] for at in wanted],
                [where[at] for at in wanted],
                live.regions.acquire(),
                write=False,
            )
        self._worker.send(wire.Release(reply.load), live.session_id)
        return good

    def _ask(self, make: Callable[[int], Any]) -> tuple[Live | None, Any]:
        """Return the sidecar's reply, and the session whose memory it is about.

        Without a session, and for a reply of another one than that, both are None.
        """
        live = self._arena.live
        if live is None or not live.ready.is_set():
            return None, None
        try:
            pending = self._worker.submit(make, self._undo)
        except SessionUnavailable:
            return None, None
        reply = pending.wait(self._settings.timeout_s)
        if pending.session_id != live.session_id:  # it began between the two lines above
            self._undo(reply)
            return None, None
        return live, reply

    def _undo(self, reply: Any) -> None:
        """End what nobody waits for any more. It is void anyway if its session has ended."""
        session_id = self._worker.session_id
        if isinstance(reply, wire.StoreGrant) and reply.store:
            self._worker.send(wire.AbortStore(reply.store), session_id)
        elif isinstance(reply, wire.LoadGrant):
            self._worker.send(wire.Release(reply.load), session_id)

    def _copy(
        self,
        copy: Callable[[np.ndarray, np.ndarray], Any],
        rows: list[int],
        places: list[tuple[wire.Extent, int]],
        hold: Hold | None,
        write: bool,
    ) -> bool:
        """Copy between rows and places in the arena; return whether all of it was."""
        if hold is None:
            return False
        try:
            bases: dict[int, int] = {}
            addresses = np.empty(len(places), dtype=np.uint64)
            for at, (extent, page) in enumerate(places):
                base = bases.get(extent.region)
                if base is None:
                    base = bases[extent.region] = hold.locate(
                        extent.region, 0, 0, self._settings.timeout_s, write
                    )
                addresses[at] = base + extent.offset + page * self._buffer.block_bytes
            # The plan checks that each address is in a region that is attached.
            ticket = copy(np.array(rows, dtype=np.int64), addresses)
            while not ticket.wait(1.0):
                pass
            if ticket.error is not None:
                self._log.warning("copy", "blocks could not be copied: %s", ticket.error)
            return ticket.error is None
        except RegionError as error:
            self._log.warning("region", "%s", error)
            return False
        finally:
            hold.release()

    def _explain(self, what: str, reply: Any) -> None:
        self._count(f"{what}s_failed")
        if isinstance(reply, wire.Error):
            if reply.code not in ("not_found", "stale"):
                self._log.warning(what, "a %s failed: %s (%s)", what, reply.message, reply.code)
        elif self._worker.connected:
            self._log.warning(what, "a %s was not answered in time", what)

    def _count(self, name: str, by: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + by


def _wanted(part: Part) -> list[Any]:
    return [tag for tag, row in zip(part.tags, part.rows, strict=True) if row >= 0]


def _layout(buffer: Buffer, block_tokens: int) -> PageLayout:
    if buffer.rows < 1 or not 0 < buffer.block_bytes <= buffer.stride:
        raise ValueError(f"a buffer of {buffer.rows} rows with {buffer.block_bytes} bytes each")
    return PageLayout(
        segments=(Segment(buffer.address, buffer.stride, buffer.block_bytes, 0),),
        page_bytes=buffer.block_bytes,
        num_blocks=buffer.rows,
        page_tokens=block_tokens,
        spans=((buffer.address, (buffer.rows - 1) * buffer.stride + buffer.block_bytes),),
    )
