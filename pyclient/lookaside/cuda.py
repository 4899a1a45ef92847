"""Copies between a KV cache in GPU memory and the arena, by the GPU's own copy engines.

Regions are page-locked as they are attached, so each page moves by DMA straight between the mapping
and the KV cache. Another sidecar's region is mapped for reading only, and the driver has to be
told. A driver that does not support this refuses the region, and nothing is loaded from there.

Gathers and scatters have one stream each, of the lowest priority. A gather waits for what the
compute stream had been given when it was asked for: the forward pass that fills its blocks. A
scatter waits for what that stream had been given at its mark: the previous user of the blocks, as
vLLM may hand out a block while a kernel that still writes to it is queued. The forward pass that
comes after the mark runs beside it. Compute never waits for us: vLLM does not run a request before
its load is reported.

Handing tens of thousands of runs to the driver takes milliseconds. So one thread of ours does it,
and the engine's step only records an event. The driver is called from native code, without torch;
only the compute stream comes from torch.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lookaside import _native
from lookaside.copies import AllOf, InFlight, Piece, Plans, Ticket, finished
from lookaside.layout import PageLayout

# How often a wait looks at its event. The driver's own wait has no deadline, so ours polls.
POLL_S = 0.0002
# How long close waits for copies before it leaves their streams to the process's end.
CLOSE_S = 5.0


class CudaTicket(Ticket):
    """A copy on a stream: submitted by our thread, then done when its event is."""

    def __init__(self, driver: _native.Cuda) -> None:
        super().__init__()
        self._driver = driver
        self._lock = threading.Lock()  # guards _event and _failure
        self._event: int | None = None  # recorded behind the copy; owned, freed once seen
        self._failure: str | None = None  # of submitting; reported when the stream is quiet

    def done(self) -> bool:
        if self._over.is_set():
            return True
        with self._lock:
            if self._event is None or self._over.is_set():
                return self._over.is_set()
            error = self._failure
            try:
                if not self._driver.query(self._event):
                    return False
            except RuntimeError as fault:
                error = error or str(fault)
            _quietly(self._driver.event_free, self._event)
            self._event = None
            self._finish(error)
            return True

    def wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not self.done():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(POLL_S, left))
        return True

    def _submitted(self, event: int | None, failure: str | None) -> None:
        """Note that nothing more will be queued. event is behind all of it, None if nothing was."""
        with self._lock:
            self._event, self._failure = event, failure
            if event is None:
                self._finish(failure)


class _Mark:
    """An event on the compute stream, freed with its last user."""

    __slots__ = ("_driver", "event")

    def __init__(self, driver: _native.Cuda, stream: int) -> None:
        """Raises RuntimeError if the device is broken."""
        self._driver = driver
        self.event = driver.event()
        driver.record(self.event, stream)

    def __del__(self) -> None:
        if hasattr(self, "event"):
            _quietly(self._driver.event_free, self.event)


@dataclass
class _Job:
    ticket: CudaTicket
    copy: Callable[[_native.Plan, int, np.ndarray, np.ndarray], int]
    stream: int
    after: _Mark | None
    """None once it was submitted."""
    pieces: list[Piece]


class _Unpin(Ticket):
    """A detached region: done once no copy can touch it and it is not pinned any more."""

    def __init__(self, driver: _native.Cuda, address: int, copies: list[Ticket]) -> None:
        super().__init__()
        self._driver, self._address, self._copies = driver, address, AllOf(copies)
        self._lock = threading.Lock()

    def done(self) -> bool:
        if self._over.is_set() or not self._copies.done():
            return self._over.is_set()
        with self._lock:
            if not self._over.is_set():
                error = None
                try:
                    self._driver.unpin(self._address)
                except RuntimeError as fault:
                    error = str(fault)
                self._finish(error)
        return True

    def wait(self, timeout_s: float) -> bool:
        return self._copies.wait(timeout_s) and self.done()


class CudaCopies:
    """Copies for a KV cache on one GPU. Methods may be called from any thread.

    compute_stream returns the handle of the stream that vLLM computes on. The default is torch's
    current stream: gather and scatter are then to be called on the thread that runs the model.
    """

    def __init__(
        self,
        layout: PageLayout,
        ordinal: int,
        *,
        library: str = "libcuda.so.1",
        batched: bool = True,
        compute_stream: Callable[[], int] | None = None,
    ) -> None:
        self._plans = Plans(layout)
        self._driver = _native.Cuda(ordinal, library, batched)
        self._compute_stream = compute_stream or _torch_stream(ordinal)
        self._gathers = self._driver.stream()
        self._scatters = self._driver.stream()
        self._inflight = InFlight()
        self._lock = threading.Lock()  # guards _pinned and _closed
        self._pinned: dict[int, int] = {}  # region id -> address
        self._closed = False
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._submit_all, name="lookaside-cuda", daemon=True)
        self._thread.start()

    def attach(self, region_id: int, address: int, size: int, read_only: bool = False) -> None:
        (self._driver.pin_for_reading if read_only else self._driver.pin)(address, size)
        try:
            with self._lock:
                if self._closed:
                    raise RuntimeError("copies are closed")
                self._plans.attach(region_id, address, size)
                self._pinned[region_id] = address
        except (RuntimeError, ValueError):
            _quietly(self._driver.unpin, address)
            raise

    def detach(self, region_id: int) -> Ticket:
        # In this order: a copy that was checked before the region left is in the snapshot, a later
        # one is refused.
        self._plans.detach(region_id)
        with self._lock:
            address = self._pinned.pop(region_id, None)
        copies = self._inflight.snapshot()
        return AllOf(copies) if address is None else _Unpin(self._driver, address, copies)

    def gather(self, blocks: np.ndarray, addresses: np.ndarray) -> Ticket:
        return self._start(self._driver.gather, self._gathers, blocks, addresses, None)

    def mark(self) -> object:
        try:
            return _Mark(self._driver, self._compute_stream())
        except RuntimeError:
            return None  # the copy will meet the fault

    def scatter(self, blocks: np.ndarray, addresses: np.ndarray, after: object = None) -> Ticket:
        return self._start(self._driver.scatter, self._scatters, blocks, addresses, after)

    def scatter_now(self, blocks: np.ndarray, addresses: np.ndarray) -> Ticket:
        return finished("loads within a step are for CPUs")

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            regions = list(self._pinned)
        self._jobs.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive() or not AllOf(self._inflight.snapshot()).wait(CLOSE_S):
            return  # a stuck device: freeing what it may still use would be worse than leaving it
        for region_id in regions:
            self.detach(region_id).done()
        for stream in (self._gathers, self._scatters):
            _quietly(self._driver.stream_free, stream)

    def _start(
        self,
        copy: Callable[[_native.Plan, int, np.ndarray, np.ndarray], int],
        stream: int,
        blocks: np.ndarray,
        addresses: np.ndarray,
        after: object,
    ) -> Ticket:
        try:
            pieces = self._plans.pieces(blocks, addresses)
            mark = (
                after if isinstance(after, _Mark) else _Mark(self._driver, self._compute_stream())
            )
        except (TypeError, ValueError, RuntimeError) as fault:
            return finished(str(fault))
        ticket = CudaTicket(self._driver)
        with self._lock:
            if self._closed:
                return finished("copies are closed")
            self._inflight.add(ticket)
            self._jobs.put(_Job(ticket, copy, stream, mark, pieces))
        return ticket

    def _submit_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._submit(job)

    def _submit(self, job: _Job) -> None:
        event: int | None = None
        failure: str | None = None
        assert job.after is not None
        try:
            event = self._driver.event()
            self._driver.wait(job.stream, job.after.event)
            for plan, blocks, addresses, _ in job.pieces:
                job.copy(plan, job.stream, blocks, addresses)
        except Exception as fault:
            failure = f"{type(fault).__name__}: {fault}"
        job.after = None
        if event is not None:
            # A copy that failed gets its event too: what was queued before still moves.
            try:
                self._driver.record(event, job.stream)
            except RuntimeError as fault:
                failure = failure or str(fault)
                _quietly(self._driver.event_free, event)
                event = None
        job.ticket._submitted(event, failure)


def _torch_stream(ordinal: int) -> Callable[[], int]:
    import torch

    return lambda: torch.cuda.current_stream(ordinal).cuda_stream


def _quietly(release: Callable[[int], None], handle: int) -> None:
    """Release a handle of a device that may be broken; an error is of no use to anybody."""
    try:
        release(handle)
    except RuntimeError:
        pass
