"""Moves runs of pages between a tensor in host memory and a sidecar, down to its disk and back.

What is moved is cut into *pieces*, runs of chunks of one prefix. A piece that is stored goes
through four stages: room in the arena, the copy (from then on the tensor may be changed), the
commit, and the wait until a tier below the memory has it. A piece that is loaded goes through
three: a lookup, which brings it up from the tiers, the load of what was leased, and the copy.

**Threads.** The copy threads copy, without the GIL, and ask for room and loads. The *finder* alone
looks up. The *settler* waits for the tiers. All of them sleep while there is nothing to do. What is
between the first stage and the last is bounded by a window of bytes for each direction, so that the
arena never fills with what one process has under way. Loads go before stores.

**Failures.** No room, a session that is lost and a hit that was cut for lack of room are tried
again, for PATIENCE_S. What cannot be moved by then has failed. Nothing here raises for it: the
job is told. A grant counts in the session that gave it, and in no other.

**Locks.** Pages._changed guards the queues. A job's own lock is never held while it is taken.

This module imports neither torch nor vLLM.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from lookaside import __version__, _native, wire
from lookaside.arena import Arena, Live
from lookaside.connection import Pending, SessionUnavailable
from lookaside.copies import CpuCopies
from lookaside.handshake import SessionOptions
from lookaside.layout import PageLayout, Segment
from lookaside.lookups import Lookup, LookupClient
from lookaside.mapping import RegionError
from lookaside.session import Session
from lookaside.wakeup import Wakeup

logger = logging.getLogger("lookaside.pages")

PATIENCE_S = 60.0
"""How long a stage of a piece is tried."""
DIGEST_BYTES = 16
PIECE_BYTES = 16 << 20
"""A piece is about so long: long enough for the disk, short enough for two to overlap."""
PIECE_PAGES = 4096
"""So many hashes fit a message that no socket buffer is too small for."""
WINDOW_BYTES = 256 << 20
"""What may be under way in each direction."""
MAX_CHUNK_PAGES = 4096  # as the sidecar demands
CHUNK_BYTES = 2 << 20  # the least that is worth a request to a disk

_REPLY_S = 10.0
_SETTLE_MS = 1000
_SLICE_S = 0.05  # how often the finder looks whether the session was lost
_FIRST_PAUSE_S = 0.002
_LAST_PAUSE_S = 0.1
_ASKED_AT_ONCE = 4
_IDLE_US = 3600 * 1_000_000  # the finder is woken


def pages_per_chunk(pages_per_block: int, page_bytes: int) -> int:
    """Return how many pages a chunk has: a divisor of a block's.

    The smallest one of at least CHUNK_BYTES, else the largest one that the sidecar takes.
    """
    divisors = [n for n in range(1, MAX_CHUNK_PAGES + 1) if pages_per_block % n == 0]
    return next((n for n in divisors if n * page_bytes >= CHUNK_BYTES), divisors[-1])


class Job(Protocol):
    """Whose pages a piece has. Pages are counted from the start of the prefix. Any thread."""

    def begin(self, first: int, pages: int) -> bool:
        """Return whether any of these pages is still wanted; note that work on them begins."""
        ...

    def begin_copy(self, first: int, pages: int) -> bool:
        """As begin, before the tensor is touched. If it returns True, end_copy follows."""
        ...

    def end_copy(self) -> None:
        """The tensor is not touched any more."""
        ...

    def copied(self, first: int, pages: int) -> None:
        """The pages were copied to the arena, or are held: the tensor may be changed."""
        ...

    def finished(self, first: int, pages: int) -> None:
        """The pages are where they should be."""
        ...

    def failed(self, first: int, pages: int) -> int:
        """The pages cannot be moved. Return the first page after the blocks that they are of."""
        ...


@dataclass(eq=False, slots=True)
class Piece:
    """Consecutive pages of one prefix, of which the first is the first of a chunk."""

    job: Job
    store: bool
    first: int
    prev: bytes
    hashes: bytes
    rows: np.ndarray
    """Where each page is in the tensor (int64)."""
    until: float = field(default=0.0)
    """When the present stage is given up; 0: it has not begun."""
    pause_s: float = _FIRST_PAUSE_S

    @property
    def pages(self) -> int:
        return len(self.rows)

    def part(self, begin: int, end: int) -> Piece:
        """Return the piece of pages [begin, end), counted from this one's first."""
        size = DIGEST_BYTES
        prev = self.hashes[(begin - 1) * size : begin * size] if begin else self.prev
        return Piece(
            self.job, self.store, self.first + begin, prev,
            self.hashes[begin * size : end * size], self.rows[begin:end], self.until, self.pause_s,
        )  # fmt: skip

    def rest(self, time_s: float = PATIENCE_S) -> bool:
        """Pause before another attempt; return False if the stage has had its time."""
        now = time.monotonic()
        self.until = self.until or now + time_s
        if now >= self.until:
            return False
        time.sleep(self.pause_s)
        self.pause_s = min(2 * self.pause_s, _LAST_PAUSE_S)
        return True

    def next_stage(self) -> None:
        self.until, self.pause_s = 0.0, _FIRST_PAUSE_S


@dataclass(frozen=True, slots=True)
class Held:
    """What is held of a run, by its chunks: pages from the chunk's first one on (uint16)."""

    pages: np.ndarray
    below: np.ndarray
    """In a tier below the memory; if there is none, anywhere."""
    waiting: int
    """Chunks that are still to be written to a tier."""


class Pages:
    """The pages of one tensor, and the sidecar that keeps them. Any thread may call its methods.

    It connects in the background. close ends it; pieces that are under way then fail.
    """

    def __init__(
        self,
        endpoint: str,
        address: int,
        num_pages: int,
        page_bytes: int,
        per_chunk: int,
        threads: int,
        *,
        name: str,
        on_absent: Callable[[], None] | None = None,
    ) -> None:
        """The tensor's memory is at address, page by page; it stays the caller's until close.

        name is part of the space: clients of one name and geometry share what they hold.
        """
        self.endpoint = endpoint
        self.page_bytes = page_bytes
        self.per_chunk = per_chunk
        self._copies = CpuCopies(
            PageLayout(
                segments=(Segment(address, page_bytes, page_bytes, 0),),
                page_bytes=page_bytes,
                num_blocks=num_pages,
                page_tokens=1,
                spans=((address, num_pages * page_bytes),),
            )
        )
        self._arena = Arena(self._copies)
        options = {
            "endpoint": endpoint,
            "engine_id": f"blocks-{os.getpid()}-{secrets.token_hex(8)}",
            "rank": 0,
            "page_tokens": 1,
            "page_bytes": page_bytes,
            "pages_per_chunk": per_chunk,
            "digest_bytes": DIGEST_BYTES,
            "fields": {"client": "lookaside.pages 1", "name": name},
            "about": {"client": f"lookaside.pages {__version__}", "space": name},
        }
        self._worker = Session(
            SessionOptions(role="worker", **options), on_absent, self._arena.mappings.held
        )
        self._worker.subscribe(self._arena)
        self._scheduler = Session(SessionOptions(role="scheduler", **options), on_absent)
        self._lookups = LookupClient([self._scheduler], PATIENCE_S, PATIENCE_S)
        self._window = max(WINDOW_BYTES, per_chunk * page_bytes)

        self._changed = threading.Condition()
        # Guarded by _changed, all below.
        self._stores: deque[Piece] = deque()  # wait for their turn
        self._loads: deque[Piece] = deque()  # wait to be looked up
        self._found: deque[tuple[Piece, Lookup, int]] = deque()  # leased, wait to be loaded
        self._settling: deque[tuple[Piece, Pending | None]] = deque()  # committed
        self._storing_bytes = 0
        self._loading_bytes = 0
        self._closed = False
        self._wakeup = Wakeup()  # the finder's
        self._wakeup.open()
        self._threads = [
            threading.Thread(target=target, name=f"lookaside-{name}", daemon=True)
            for target, name in (
                *[(self._copy_pieces, "blocks")] * threads,
                (self._find_pieces, "finder"),
                (self._settle_pieces, "settler"),
            )
        ]
        self._worker.start()
        self._scheduler.start()
        for thread in self._threads:
            thread.start()

    # ---- for callers ----

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until stores and lookups can succeed; return whether they can."""
        deadline = time.monotonic() + timeout_s
        live = self._await_live(timeout_s)
        return live is not None and self._scheduler.wait_connected(
            max(0.0, deadline - time.monotonic())
        )

    @property
    def refused(self) -> wire.Refuse | None:
        """Why the sidecar refuses this client; None if it does not."""
        return self._worker.refused

    @property
    def piece_pages(self) -> int:
        """How many pages a piece has at most: whole chunks."""
        most = min(PIECE_BYTES // self.page_bytes, PIECE_PAGES)
        return max(1, most // self.per_chunk) * self.per_chunk

    def held(
        self, prev: bytes, first: int, parts: Iterable[bytes], timeout_s: float
    ) -> Held | None:
        """Return what is held of pages from ``first`` on, the first one of a chunk.

        Each of the parts has the hashes of up to PIECE_PAGES pages, and of whole chunks unless it
        is the last. A part is asked for as it comes. None if the sidecar did not answer in time.
        Leases nothing and brings nothing up.
        """
        deadline = time.monotonic() + timeout_s
        live = self._await_live(timeout_s)
        if live is None:
            return None
        out: deque[Pending] = deque()
        found: list[Held] = []

        def take() -> bool:
            reply = out.popleft().wait(max(0.0, deadline - time.monotonic()))
            if isinstance(reply, wire.Contained):
                found.append(_held(reply))
            return isinstance(reply, wire.Contained)

        for part in parts:
            if len(out) == _ASKED_AT_ONCE and not take():
                return None
            pending = self._ask(live, _contains(first, prev, part, 0))
            if pending is None:
                return None
            out.append(pending)
            first, prev = first + len(part) // DIGEST_BYTES, part[-DIGEST_BYTES:]
        while out:
            if not take():
                return None
        return Held(
            np.concatenate([each.pages for each in found]),
            np.concatenate([each.below for each in found]),
            sum(each.waiting for each in found),
        )

    def add(self, pieces: Sequence[Piece]) -> None:
        """Begin to move pieces. Their jobs are told how it ends, on any thread."""
        with self._changed:
            closed = self._closed
            if not closed:
                for piece in pieces:
                    (self._stores if piece.store else self._loads).append(piece)
                self._changed.notify_all()
        if closed:
            self._fail(pieces)
        self._wakeup.set()

    def close(self) -> None:
        """End the sessions. Returns when the tensor is not touched any more. Safe to call again."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        with self._arena.changed:
            self._arena.changed.notify_all()
        self._wakeup.set()
        # These end what is waited for. Copies that are under way end by themselves.
        self._scheduler.close()
        self._worker.close()
        here = threading.current_thread()
        for thread in self._threads:
            if thread is not here:
                thread.join()
        left = [*self._stores, *self._loads, *(piece for piece, _ in self._settling)]
        left += [piece for piece, _, _ in self._found]
        self._fail(left)
        self._lookups.close()
        self._copies.close()
        self._arena.mappings.close()
        os.close(self._wakeup.fd)
        self._wakeup.fd = -1

    # ---- the session ----

    def _await_live(self, timeout_s: float) -> Live | None:
        """Return the present session once all of its memory is there; None if none comes."""
        deadline = time.monotonic() + timeout_s
        with self._arena.changed:
            while not self._closed:
                live = self._arena.live
                if live is not None and live.ready.is_set() and self._worker.available:
                    return live
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                # A session becomes available without a notice, a moment after its memory is there.
                self._arena.changed.wait(min(left, _SLICE_S))
        return None

    def _ask(
        self,
        live: Live,
        make: Callable[[int], Any],
        undo: Callable[[Any], None] | None = None,
    ) -> Pending | None:
        try:
            return self._worker.submit(make, undo, live.session_id)
        except SessionUnavailable:
            return None

    def _reply(
        self,
        live: Live,
        make: Callable[[int], Any],
        undo: Callable[[Any], None] | None = None,
    ) -> Any:
        pending = self._ask(live, make, undo)
        return pending.wait(_REPLY_S) if pending is not None else None

    # ---- the copy threads ----

    def _copy_pieces(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not self._found and not self._may_store():
                    self._changed.wait()
                if self._closed:
                    return
                found = self._found.popleft() if self._found else None
                if found is None:
                    piece = self._stores.popleft()
                    self._storing_bytes += self._bytes(piece)
            try:
                if found is not None:
                    self._load(*found)
                else:
                    self._store(piece)
            except Exception:
                logger.exception("a piece failed")
                self._end(found[0] if found is not None else piece, moved=False)

    def _may_store(self) -> bool:
        if not self._stores:
            return False
        return not self._storing_bytes or (
            self._storing_bytes + self._bytes(self._stores[0]) <= self._window
        )

    def _bytes(self, piece: Piece) -> int:
        return piece.pages * self.page_bytes

    def _end(self, piece: Piece, *, moved: bool) -> None:
        """Tell a piece's job how it ended, and let others have its share of the window."""
        if moved:
            piece.job.finished(piece.first, piece.pages)
        else:
            piece.job.failed(piece.first, piece.pages)
        self._leave(piece)

    def _leave(self, piece: Piece) -> None:
        with self._changed:
            if piece.store:
                self._storing_bytes -= self._bytes(piece)
            else:
                self._loading_bytes -= self._bytes(piece)
            self._changed.notify_all()
        if not piece.store:
            self._wakeup.set()

    def _fail(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            piece.job.failed(piece.first, piece.pages)

    # ---- stores ----

    def _store(self, piece: Piece) -> None:
        while True:
            if not piece.job.begin(piece.first, piece.pages):
                self._end(piece, moved=False)
                return
            live = self._await_live(_REPLY_S)
            if live is not None and self._store_once(piece, live):
                break
            if self._closed or not piece.rest():
                self._end(piece, moved=False)
                return
        piece.job.copied(piece.first, piece.pages)
        piece.next_stage()
        pending = self._ask(live, _contains(piece.first, piece.prev, piece.hashes, _SETTLE_MS))
        with self._changed:
            self._settling.append((piece, pending))
            self._changed.notify_all()

    def _store_once(self, piece: Piece, live: Live) -> bool:
        """Store what is not held; return whether all of the piece is held then."""

        def undo(reply: Any) -> None:
            if isinstance(reply, wire.StoreGrant) and reply.store:
                self._worker.send(wire.AbortStore(reply.store), live.session_id)

        reply = self._reply(
            live,
            lambda i: wire.PrepareStore(i, piece.first, piece.prev, piece.hashes, 1, 0),
            undo,
        )
        if not isinstance(reply, wire.StoreGrant):
            return False
        if not reply.store:
            return not reply.shed
        hold = live.regions.acquire()
        try:
            copied = hold is not None and self._copy(piece, hold, reply.grants, store=True)
            end = wire.CommitStore(reply.store) if copied else wire.AbortStore(reply.store)
            return self._worker.send(end, live.session_id) and copied and not reply.shed
        finally:
            if hold is not None:
                hold.release()

    def _copy(
        self, piece: Piece, hold: Any, extents: Sequence[wire.Extent], *, store: bool
    ) -> bool:
        """Copy pages of a piece to or from the arena; return whether all bytes moved."""
        rows: list[np.ndarray] = []
        addresses: list[np.ndarray] = []
        try:
            for extent in extents:
                at = extent.page - piece.first
                if at < 0 or at + extent.pages > piece.pages:
                    return False
                size = extent.pages * self.page_bytes
                address = hold.locate(extent.region, extent.offset, size, _REPLY_S, store)
                rows.append(piece.rows[at : at + extent.pages])
                addresses.append(
                    np.arange(address, address + size, self.page_bytes, dtype=np.uint64)
                )
        except RegionError:
            return False
        if not piece.job.begin_copy(piece.first, piece.pages):
            return False
        try:
            copy = self._copies.gather if store else self._copies.scatter_now
            ticket = copy(np.concatenate(rows), np.concatenate(addresses))
            while not ticket.wait(_REPLY_S):
                pass  # the tensor is the caller's again only when no byte moves any more
        finally:
            piece.job.end_copy()
        if ticket.error is not None:
            logger.warning("a copy failed: %s", ticket.error)
        return ticket.error is None

    # ---- the settler ----

    def _settle_pieces(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not self._settling:
                    self._changed.wait()
                if self._closed:
                    return
                piece, pending = self._settling[0]
            reply = pending.wait(_REPLY_S) if pending is not None else None
            held = _held(reply) if isinstance(reply, wire.Contained) else None
            there = self._there(piece, held.below if held is not None else None)
            if not there.all() and (held is None or held.waiting) and self._settle_again(piece):
                continue
            with self._changed:
                if self._closed:
                    return
                self._settling.popleft()
            for i, moved in enumerate(there.tolist()):
                begin = i * self.per_chunk
                pages = min(self.per_chunk, piece.pages - begin)
                (piece.job.finished if moved else piece.job.failed)(piece.first + begin, pages)
            self._leave(piece)

    def _settle_again(self, piece: Piece) -> bool:
        """Ask once more what became of a piece; return False if it has had its time."""
        if not piece.job.begin(piece.first, piece.pages) or not piece.rest():
            return False
        live = self._await_live(_REPLY_S)
        pending = None
        if live is not None:
            pending = self._ask(live, _contains(piece.first, piece.prev, piece.hashes, _SETTLE_MS))
        with self._changed:
            if self._closed:
                return False
            self._settling[0] = (piece, pending)
        return True

    def _there(self, piece: Piece, pages: np.ndarray | None) -> np.ndarray:
        """Return for each chunk of a piece whether all its pages are there; None: no page is."""
        wanted = chunk_pages(piece.pages, self.per_chunk)
        return np.zeros(len(wanted), bool) if pages is None else pages >= wanted

    # ---- the finder ----

    def _find_pieces(self) -> None:
        out: list[tuple[Piece, Lookup]] = []
        while True:
            with self._changed:
                begun: list[Piece] = []
                while self._loads and not self._closed:
                    size = self._bytes(self._loads[0])
                    if self._loading_bytes and self._loading_bytes + size > self._window:
                        break
                    self._loading_bytes += size
                    begun.append(self._loads.popleft())
                if self._closed:
                    self._found.extend((piece, lookup, 0) for piece, lookup in out)
                    self._loads.extend(begun)
                    return
            for piece in begun:
                if not piece.job.begin(piece.first, piece.pages):
                    self._end(piece, moved=False)
                else:
                    out.append((piece, self._lookups.start(piece.first, piece.prev, piece.hashes)))
            waiting: list[tuple[Piece, Lookup]] = []
            found: list[tuple[Piece, Lookup, int]] = []
            for piece, lookup in out:
                hits = lookup.poll()
                if hits is None:
                    waiting.append((piece, lookup))
                else:
                    found.append((piece, lookup, hits))
            out = waiting
            if found:
                with self._changed:
                    self._found.extend(found)
                    self._changed.notify_all()
            if out:
                self._lookups.wait_readable(_SLICE_S, self._wakeup.fd)
            else:
                _native.wait_readable([self._wakeup.fd], _IDLE_US)
            self._wakeup.clear()

    # ---- loads ----

    def _load(self, piece: Piece, lookup: Lookup, hits: int) -> None:
        """Load what a lookup has leased of a piece, and decide about the rest."""
        # A chunk that is not held as far as is needed is looked up again, if at all, as a whole.
        loaded = piece.pages if hits >= piece.pages else hits // self.per_chunk * self.per_chunk
        if loaded and self._load_hits(piece.part(0, loaded), lookup):
            piece.job.finished(piece.first, loaded)
            if loaded == piece.pages:
                self._leave(piece)
                return
        else:
            loaded = 0
        rest = piece.part(loaded, piece.pages)
        again = self._worth_another(rest)
        self._leave(piece)
        if again is not None:
            with self._changed:
                self._loads.append(again)
            self._wakeup.set()

    def _load_hits(self, piece: Piece, lookup: Lookup) -> bool:
        live = self._await_live(0.0)
        if live is None:
            return False
        ref = lookup.refs[0]
        if not ref.session:
            return False
        size = DIGEST_BYTES
        digests = [piece.hashes[at : at + size] for at in range(0, len(piece.hashes), size)]
        names = wire.names(digests, piece.first, self.per_chunk)

        def undo(reply: Any) -> None:
            if isinstance(reply, wire.LoadGrant):
                self._worker.send(wire.Release(reply.load), live.session_id)

        reply = self._reply(
            live,
            lambda i: wire.PrepareLoad(
                i, ref.session, ref.lookup, ref.ticket, piece.first, piece.pages, names
            ),
            undo,
        )
        if not isinstance(reply, wire.LoadGrant):
            return False
        hold = live.regions.acquire()
        try:
            whole = sum(extent.pages for extent in reply.extents) == piece.pages
            return (
                hold is not None
                and whole
                and reply.names == names
                and self._copy(piece, hold, reply.extents, store=False)
                # What another sidecar has lent is void once its end has ended our session.
                and self._worker.is_current(live.session_id)
            )
        finally:
            if hold is not None:
                hold.release()
            self._worker.send(wire.Release(reply.load), live.session_id)

    def _worth_another(self, piece: Piece) -> Piece | None:
        """Return what of a piece is to be looked up again; None if nothing is.

        What is held was not leased for want of room, or time, or because the sidecar went away.
        What is not held has failed, and with it the block that it is of.
        """
        if self._closed or not piece.job.begin(piece.first, piece.pages):
            self._fail([piece])
            return None
        held = self.held(piece.prev, piece.first, [piece.hashes], _REPLY_S)
        if held is None:
            if piece.rest():
                return piece
            self._fail([piece])
            return None
        if self._there(piece, held.pages)[0]:
            if piece.rest():
                return piece
            self._fail([piece])
            return None
        end = piece.job.failed(piece.first, 1)
        if end >= piece.first + piece.pages:
            return None
        return piece.part(end - piece.first, piece.pages)


def chunk_pages(pages: int, per_chunk: int) -> np.ndarray:
    """Return how many of so many pages lie in each chunk, from the first page of a chunk on."""
    starts = np.arange(0, pages, per_chunk)
    return np.minimum(pages - starts, per_chunk)


def _contains(first: int, prev: bytes, hashes: bytes, wait_ms: int) -> Callable[[int], Any]:
    return lambda i: wire.Contains(i, first, prev, hashes, wait_ms)


def _held(reply: wire.Contained) -> Held:
    pages = np.frombuffer(reply.held, dtype="<u2")
    below = np.frombuffer(reply.below, dtype="<u2") if reply.tiers else pages
    return Held(pages, below, reply.waiting)
