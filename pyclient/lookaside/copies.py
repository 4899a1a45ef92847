"""Moves pages between vLLM's KV cache and the mapped arena.

A copy names, for each page, a block of the KV cache and the arena address of the page. Both are
checked in native code before the first byte moves, and the bytes move there too, without the GIL.
Nothing here raises for a copy that cannot be made: its ticket has an error, so that a bad grant
costs one page and never the engine. A copy by the CPU has an error, too, if it meets memory that is
not there any more, because a device has gone or a page of it is bad.

Where the layout has an encoding, the copies encode and decode (encoding.py). A page that the codec
cannot keep is named by the gather's ticket.

On the CPU a gather is over when it returns (its blocks may be rewritten by the next step), a
scatter runs on a small pool while the engine computes. On CUDA both are queued on streams of their
own; see cuda.py.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np

from lookaside import _native
from lookaside.layout import PageLayout, Segment

# Forces a copy kernel: "memcpy", "avx2", "avx512" or "neon". Meant for tests and for telling a slow
# machine from a slow kernel.
KERNEL_ENV = "LOOKASIDE_COPY_KERNEL"

# One thread copies at some 12 GB/s here and two at 21 (the memory's limit); more would only take
# cores from vLLM.
POOL_THREADS = 2
# Copies smaller than this are not worth handing half of to another thread (about 0.3 ms).
SPLIT_BYTES = 4 << 20
_NO_ROWS = np.zeros(0, np.int64)
# Stands for a block of a page that is not to be copied. Not 0, vLLM's null block: that one exists.
ABSENT = -1


class Ticket:
    """One copy under way. For any thread. An error is final, and known once the copy is done."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._error: str | None = None
        self._faults: tuple[int, ...] = ()
        self._unfit: tuple[int, ...] = ()

    def done(self) -> bool:
        """Report whether no byte of the copy will move any more. Never blocks."""
        return self._over.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the copy at most so long; return whether it is done."""
        return self._over.wait(timeout_s)

    @property
    def error(self) -> str | None:
        """Why the copy failed; None while it is under way, and when it succeeded.

        No byte of a copy that failed may be used.
        """
        return self._error

    @property
    def faults(self) -> tuple[int, ...]:
        """Addresses at which a copy that is done found no memory: they will fail again."""
        return self._faults

    @property
    def unfit(self) -> tuple[int, ...]:
        """Rows of a gather that is done whose pages its codec cannot keep: nothing was copied."""
        return self._unfit

    def _finish(
        self, error: str | None, faults: tuple[int, ...] = (), unfit: tuple[int, ...] = ()
    ) -> None:
        self._error, self._faults, self._unfit = error, faults, unfit
        self._over.set()


def finished(error: str | None = None) -> Ticket:
    ticket = Ticket()
    ticket._finish(error)
    return ticket


class AllOf(Ticket):
    """Done when each of its parts is; its error is the first part's that has one."""

    def __init__(self, parts: list[Ticket]) -> None:
        super().__init__()
        self._parts = parts

    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    def wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        return all(part.wait(max(0.0, deadline - time.monotonic())) for part in self._parts)

    @property
    def error(self) -> str | None:
        if not self.done():
            return None
        return next((part.error for part in self._parts if part.error is not None), None)

    @property
    def faults(self) -> tuple[int, ...]:
        return tuple(fault for part in self._parts for fault in part.faults)

    @property
    def unfit(self) -> tuple[int, ...]:
        return tuple(row for part in self._parts for row in part.unfit)


class InFlight:
    """The copies that may still touch memory. Guarded by its own lock; used by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tickets: list[Ticket] = []

    def add(self, ticket: Ticket) -> None:
        with self._lock:
            self._tickets = [t for t in self._tickets if not t.done()]
            self._tickets.append(ticket)

    def snapshot(self) -> list[Ticket]:
        with self._lock:
            self._tickets = [t for t in self._tickets if not t.done()]
            return list(self._tickets)


class Copies(Protocol):
    """What a worker needs of a device. Methods may be called from any thread."""

    def attach(self, region_id: int, address: int, size: int, read_only: bool = False) -> None:
        """Let copies reach a mapped region; pin it where the device needs that.

        Raises ValueError or RuntimeError when it cannot: the region is then not attached. The
        caller keeps the mapping until the ticket of detach is done. Pinning takes about 0.1 s a
        GiB.
        """
        ...

    def detach(self, region_id: int) -> Ticket:
        """Refuse copies to the region from now on; once the ticket is done, it may be unmapped."""
        ...

    def gather(self, blocks: np.ndarray, addresses: np.ndarray) -> Ticket:
        """Copy KV-cache blocks to arena pages (uint64 addresses).

        blocks are int64 ids, [pages, columns], or [pages] where a page has one block. ABSENT ones
        are left out.
        """
        ...

    def mark(self) -> object:
        """Return what stands for all that vLLM has given the device to compute so far.

        For the thread that runs the model.
        """
        ...

    def scatter(self, blocks: np.ndarray, addresses: np.ndarray, after: object = None) -> Ticket:
        """Copy arena pages to KV-cache blocks, which are given as to gather.

        The copy waits for what was computed before the mark after; without one, for what was given
        to the device before this call.
        """
        ...

    def scatter_now(self, blocks: np.ndarray, addresses: np.ndarray) -> Ticket:
        """Copy as scatter does, on this thread too, and return when it is done.

        For a CPU; elsewhere the ticket has an error.
        """
        ...

    def close(self) -> None:
        """Wait for copies under way, end what is queued, and unpin what is attached.

        Copies that are asked for later fail.
        """
        ...


class Piece(NamedTuple):
    """A part of a copy: blocks that all lie alike, and the arena address of each one's bytes."""

    plan: _native.Plan
    blocks: np.ndarray
    addresses: np.ndarray
    rows: np.ndarray
    """The row of each block in what was asked for; empty where nothing is encoded."""


class Plans:
    """The native plans of a layout: one for all the columns of a page whose blocks lie alike. Any
    thread may use it."""

    def __init__(self, layout: PageLayout) -> None:
        """Raise ValueError if the layout does not lie within its spans."""
        self._columns = len(layout.column_bytes)
        self.encoding = layout.encoding
        codec, element = self.encoding or (_native.PLAIN, 0)
        # Where each block lies in a page of the arena, if it is encoded.
        offsets = list(accumulate(layout.encoded_bytes, initial=0))
        alike: dict[
            tuple[Segment, ...], list[tuple[int, int]]
        ] = {}  # segments of a block -> (column, page offset)
        for column in range(self._columns):
            segments = [s for s in layout.segments if s.column == column]
            begin = segments[0].page_offset
            block = tuple(s._replace(page_offset=s.page_offset - begin, column=0) for s in segments)
            where = begin if layout.encoding is None else offsets[column]
            alike.setdefault(block, []).append((column, where))
        # A page of one block has its own length, which may be more than its bytes.
        whole = layout.page_bytes if self._columns == 1 else 0
        sizes = layout.column_bytes
        self._plans = [
            (
                _native.Plan(
                    [s[:4] for s in block],
                    layout.num_blocks,
                    whole or sizes[columns[0][0]],
                    layout.spans,
                    codec,
                    element,
                ),
                columns,
            )
            for block, columns in alike.items()
        ]

    def attach(self, region_id: int, address: int, size: int) -> None:
        """Let all plans copy to a region. Raises ValueError or RuntimeError; then none does."""
        for number, (plan, _) in enumerate(self._plans):
            try:
                plan.attach(region_id, address, size)
            except (MemoryError, RuntimeError, ValueError):
                for other, _ in self._plans[:number]:
                    other.detach(region_id)
                raise

    def detach(self, region_id: int) -> None:
        for plan, _ in self._plans:
            plan.detach(region_id)

    def pieces(self, blocks: np.ndarray, addresses: np.ndarray) -> list[Piece]:
        """Return what is to be copied for rows of blocks (see Copies), checked. Raises TypeError or
        ValueError."""
        if blocks.ndim == 1:
            blocks = blocks[:, None]
        if blocks.ndim != 2 or blocks.shape[1] != self._columns or len(blocks) != len(addresses):
            raise ValueError(
                f"blocks {blocks.shape} of {self._columns} columns for {len(addresses)} pages"
            )
        found: list[Piece] = []
        for plan, columns in self._plans:
            ids: list[np.ndarray] = []
            where: list[np.ndarray] = []
            rows: list[np.ndarray] = []
            for column, offset in columns:
                there = blocks[:, column] != ABSENT
                ids.append(blocks[there, column])
                where.append(addresses[there] + np.uint64(offset))
                if self.encoding is not None:
                    rows.append(np.flatnonzero(there))
            piece = Piece(
                plan,
                np.concatenate(ids),
                np.concatenate(where),
                np.concatenate(rows) if rows else _NO_ROWS,
            )
            plan.check(piece.blocks, piece.addresses)
            found.append(piece)
        return found


def copy_kernel() -> int:
    """Return the copy kernel to use here: the native part's default, or the one that the
    environment forces. Raises ValueError if that one cannot run."""
    forced = os.environ.get(KERNEL_ENV, "")
    if not forced:
        return _native.DEFAULT
    kernels = {"memcpy": _native.MEMCPY, "avx2": _native.AVX2}
    kernels |= {"avx512": _native.AVX512, "neon": _native.NEON}
    kernel = kernels.get(forced)
    if kernel is None or not _native.usable(kernel):
        usable = ", ".join(repr(k) for k, number in kernels.items() if _native.usable(number))
        raise ValueError(f"{KERNEL_ENV}={forced!r}: on this CPU it must be one of {usable}")
    return kernel


class CpuCopies:
    """Copies for a KV cache in host memory."""

    def __init__(self, layout: PageLayout, threads: int = POOL_THREADS) -> None:
        self._plans = Plans(layout)
        self._kernel = copy_kernel()
        self._threads = threads
        self._pool = ThreadPoolExecutor(
            threads, thread_name_prefix="lookaside-copy", initializer=use_all_cores
        )
        self._inflight = InFlight()

    def attach(self, region_id: int, address: int, size: int, read_only: bool = False) -> None:
        self._plans.attach(region_id, address, size)

    def detach(self, region_id: int) -> Ticket:
        # In this order: a copy that was checked before the region left is in the snapshot, and a
        # later copy is refused.
        self._plans.detach(region_id)
        return AllOf(self._inflight.snapshot())

    def gather(self, blocks: np.ndarray, addresses: np.ndarray) -> Ticket:
        return self._start(_native.Plan.gather, blocks, addresses, inline=True)

    def mark(self) -> object:
        return None  # what was computed here is over

    def scatter(self, blocks: np.ndarray, addresses: np.ndarray, after: object = None) -> Ticket:
        return self._start(_native.Plan.scatter, blocks, addresses, inline=False)

    def scatter_now(self, blocks: np.ndarray, addresses: np.ndarray) -> Ticket:
        return self._start(_native.Plan.scatter, blocks, addresses, inline=True)

    def close(self) -> None:
        self._pool.shutdown(wait=True)

    def _start(
        self, copy: Callable[..., Any], blocks: np.ndarray, addresses: np.ndarray, *, inline: bool
    ) -> Ticket:
        """Split a copy over the threads.

        With inline this thread takes a part, and then every part that no other thread has begun.
        """
        try:
            pieces = self._plans.pieces(
                blocks, addresses
            )  # copies: the caller may reuse its own once we return
        except (TypeError, ValueError) as fault:
            return finished(str(fault))
        size = sum(len(piece.blocks) * piece.plan.payload_bytes for piece in pieces)
        count = min(self._threads, max(1, size // SPLIT_BYTES))
        shares: list[tuple[Ticket, list[Piece]]] = []
        for i in range(count):
            part: list[Piece] = []
            for plan, ids, where, rows in pieces:
                of = slice(len(ids) * i // count, len(ids) * (i + 1) // count)
                part.append(Piece(plan, ids[of], where[of], rows[of]))
            shares.append((Ticket(), part))
        whole = AllOf([ticket for ticket, _ in shares])
        self._inflight.add(whole)
        futures: list[Future[None]] = []
        try:
            for share in shares[1:] if inline else shares:
                futures.append(self._pool.submit(self._run, copy, *share))
        except RuntimeError:
            for ticket, _ in shares[len(futures) + inline :]:
                ticket._finish("copies are closed")
        if inline:
            self._run(copy, *shares[0])
            for future, share in zip(futures, shares[1:], strict=False):
                # The pool may be busy with a long scatter: the engine's step does not queue behind
                # that.
                if future.cancel():
                    self._run(copy, *share)
                share[0]._over.wait()  # bounded by the time of our own share
        return whole

    def _run(self, copy: Callable[..., Any], ticket: Ticket, pieces: list[Piece]) -> None:
        error: str | None = "copy interrupted"
        faults: tuple[int, ...] = ()
        unfit: list[int] = []
        try:
            for plan, blocks, addresses, rows in pieces:
                if self._plans.encoding is None:
                    copy(plan, blocks, addresses, kernel=self._kernel)
                    continue
                failed = np.zeros(len(blocks), np.uint8)
                copy(plan, blocks, addresses, kernel=self._kernel, failed=failed)
                unfit += rows[failed != 0].tolist()
            error = None
            if unfit and copy is _native.Plan.scatter:
                error = f"{len(unfit)} pages of the arena cannot be decoded"
        except _native.BusError as fault:
            error, faults = fault.args[0], (fault.args[1],)
        except Exception as fault:
            error = f"{type(fault).__name__}: {fault}"
        finally:
            ticket._finish(error, faults, tuple(unfit))


def use_all_cores() -> None:
    """Free the calling thread, and those that it starts, from the main thread's binding to a core.

    vLLM on a CPU binds each compute thread, the main one among them, to one core, and new threads
    inherit that. What all threads of the process together may use is what the process was given.
    """
    try:
        cores: set[int] = set()
        for task in os.listdir("/proc/self/task"):
            cores |= os.sched_getaffinity(int(task))
        os.sched_setaffinity(0, cores)
    except OSError:
        pass  # a thread that has just ended; the binding costs speed only
