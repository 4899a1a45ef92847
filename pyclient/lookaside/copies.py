"""Moves pages between vLLM's KV cache and the mapped arena.

A copy names, for each page, a block of the KV cache and the arena address of the page. Both are checked in native code
before the first byte moves, and the bytes move there too, without the GIL. Nothing here raises for a copy that cannot
be made: it comes back as a ticket with an error, so that a bad grant costs one page and never the engine. So does one
by the CPU that meets memory that is not there any more: a device has gone, or a page of it is bad.

On the CPU a gather is over when it returns (its blocks may be rewritten by the next step), a scatter runs on a small
pool while the engine computes. On CUDA both are queued on streams of their own; see cuda.py.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from lookaside import _native
from lookaside.layout import PageLayout

# Forces a copy kernel: "memcpy" or "avx512". Meant for tests and for telling a slow machine from a slow kernel.
KERNEL_ENV = "LOOKASIDE_COPY_KERNEL"

# One thread copies at some 12 GB/s here and two at 21 (the memory's limit); more would only take cores from vLLM.
POOL_THREADS = 2
# Copies smaller than this are not worth handing half of to another thread (about 0.3 ms).
SPLIT_BYTES = 4 << 20


class Ticket:
    """One copy under way. Any thread may ask; an error is final and only known once the copy is done."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._error: str | None = None
        self._faults: tuple[int, ...] = ()

    def done(self) -> bool:
        """Whether no byte of the copy will move any more. Never blocks."""
        return self._over.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Waits for the copy at most so long; whether it is done."""
        return self._over.wait(timeout_s)

    @property
    def error(self) -> str | None:
        """Why the copy failed, and no byte of it may be used; None while it is out and when it went well."""
        return self._error

    @property
    def faults(self) -> tuple[int, ...]:
        """Addresses at which memory was not there, of a copy that is done: they will fail again."""
        return self._faults

    def _finish(self, error: str | None, faults: tuple[int, ...] = ()) -> None:
        self._error, self._faults = error, faults
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

    def attach(self, region_id: int, address: int, size: int) -> None:
        """Lets copies reach a mapped region; pins it where the device needs that.

        Raises ValueError or RuntimeError when it cannot: the region is then not attached. The caller keeps the mapping
        until the ticket of detach is done. Pinning takes about 0.1 s a GiB.
        """
        ...

    def detach(self, region_id: int) -> Ticket:
        """Refuses copies to the region from now on; once the ticket is done, it may be unmapped."""
        ...

    def gather(self, blocks: np.ndarray, addresses: np.ndarray) -> Ticket:
        """Copies KV-cache blocks (int64 ids) to arena pages (uint64 addresses)."""
        ...

    def scatter(self, blocks: np.ndarray, addresses: np.ndarray) -> Ticket:
        """Copies arena pages to KV-cache blocks."""
        ...

    def close(self) -> None:
        """Ends what is queued, unpins what is attached. Waits for copies under way; copies after it fail."""
        ...


def make_plan(layout: PageLayout) -> _native.Plan:
    """The native plan of a layout. Raises ValueError if the layout does not lie within its spans."""
    return _native.Plan(layout.segments, layout.num_blocks, layout.page_bytes, layout.spans)


def best_kernel() -> int:
    """The copy kernel to use here. Raises ValueError if the environment forces one that cannot run."""
    forced = os.environ.get(KERNEL_ENV, "")
    if not forced:
        return _native.AVX512 if _native.usable(_native.AVX512) else _native.MEMCPY
    kernel = {"memcpy": _native.MEMCPY, "avx512": _native.AVX512}.get(forced)
    if kernel is None or not _native.usable(kernel):
        raise ValueError(f"{KERNEL_ENV}={forced!r}: must be 'memcpy' or 'avx512', and run on this CPU")
    return kernel


class CpuCopies:
    """Copies for a KV cache in host memory."""

    def __init__(self, layout: PageLayout, threads: int = POOL_THREADS) -> None:
        self._plan = make_plan(layout)
        self._kernel = best_kernel()
        self._threads = threads
        self._split_pages = max(1, -(-SPLIT_BYTES // self._plan.payload_bytes))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="lookaside-copy", initializer=use_all_cores)
        self._inflight = InFlight()

    def attach(self, region_id: int, address: int, size: int) -> None:
        self._plan.attach(region_id, address, size)

    def detach(self, region_id: int) -> Ticket:
        # In this order: a copy that was checked before the region left is in the snapshot, a later one is refused.
        self._plan.detach(region_id)
        return AllOf(self._inflight.snapshot())

    def gather(self, blocks: np.ndarray, addresses: np.ndarray) -> Ticket:
        return self._start(self._plan.gather, blocks, addresses, inline=True)

    def scatter(self, blocks: np.ndarray, addresses: np.ndarray) -> Ticket:
        return self._start(self._plan.scatter, blocks, addresses, inline=False)

    def close(self) -> None:
        self._pool.shutdown(wait=True)

    def _start(self, copy: Callable[..., Any], blocks: np.ndarray, addresses: np.ndarray, *, inline: bool) -> Ticket:
        """Splits a copy over the threads; inline, this thread does what no other has begun when it gets there."""
        try:
            self._plan.check(blocks, addresses)
        except (TypeError, ValueError) as fault:
            return finished(str(fault))
        if not inline:
            blocks, addresses = blocks.copy(), addresses.copy()  # the caller may reuse its own once we return
        count = min(self._threads, max(1, len(blocks) // self._split_pages))
        bounds = [len(blocks) * i // count for i in range(count + 1)]
        shares = [(Ticket(), blocks[i:j], addresses[i:j]) for i, j in pairwise(bounds)]
        whole = AllOf([part for part, *_ in shares])
        self._inflight.add(whole)
        futures: list[Future[None]] = []
        try:
            for share in shares[1:] if inline else shares:
                futures.append(self._pool.submit(self._run, copy, *share))
        except RuntimeError:
            for part, *_ in shares[len(futures) + inline :]:
                part._finish("copies are closed")
        if inline:
            self._run(copy, *shares[0])
            for future, share in zip(futures, shares[1:], strict=False):
                # The pool may be busy with a long scatter: the engine's step does not queue behind that.
                if future.cancel():
                    self._run(copy, *share)
                share[0]._over.wait()  # bounded by the time of our own share
        return whole

    def _run(self, copy: Callable[..., Any], part: Ticket, blocks: np.ndarray, addresses: np.ndarray) -> None:
        error: str | None = "copy interrupted"
        faults: tuple[int, ...] = ()
        try:
            copy(blocks, addresses, kernel=self._kernel)
            error = None
        except _native.BusError as fault:
            error, faults = fault.args[0], (fault.args[1],)
        except Exception as fault:
            error = f"{type(fault).__name__}: {fault}"
        finally:
            part._finish(error, faults)


def use_all_cores() -> None:
    """Frees the calling thread, and those it starts, from the main thread's binding.

    vLLM on a CPU binds each compute thread, the main one among them, to one core, and new threads inherit that. What
    all threads of the process together may use is what the process was given.
    """
    try:
        cores: set[int] = set()
        for task in os.listdir("/proc/self/task"):
            cores |= os.sched_getaffinity(int(task))
        os.sched_setaffinity(0, cores)
    except OSError:
        pass  # a thread that has just ended; the binding costs speed only


def make_copies(
    layout: PageLayout,
    device: object,
    *,
    threads: int = POOL_THREADS,
    compute_stream: Callable[[], int] | None = None,
) -> Copies:
    """The copies for a KV cache on this device ("cpu", "cuda:1", a torch.device).

    threads: how many copy on a CPU. compute_stream: see CudaCopies.
    Raises ValueError for a device that has none, RuntimeError or OSError when its driver cannot be used.
    """
    kind, _, index = str(device).partition(":")
    if kind == "cpu":
        return CpuCopies(layout, threads)
    if kind == "cuda":
        from lookaside.cuda import CudaCopies

        return CudaCopies(layout, int(index or 0), compute_stream=compute_stream)
    raise ValueError(f"KV cache on {device}: only cpu and cuda are supported")
