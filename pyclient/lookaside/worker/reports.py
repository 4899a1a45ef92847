"""What became of loads, from their order to the call that reports it to vLLM."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from lookaside.metadata import LoadSpec
from lookaside.ratelog import RateLimitedLog
from lookaside.stats import Collector

# How long a step without a forward waits for a load; new requests wait as long.
_IDLE_STEP_PATIENCE_S = 0.005


class Reports:
    """Collects the ends of loads. For any thread: its lock guards all, for bookkeeping only."""

    def __init__(self, stats: Collector, log: RateLimitedLog, whole_failures: bool) -> None:
        """whole_failures: a load that fails is reported as failed as a whole, not by its blocks."""
        self._stats = stats
        self._log = log
        self._whole_failures = whole_failures
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

    def is_aborted(self, request_id: str) -> bool:
        """Report whether the request has ended while loads of it are out."""
        with self._lock:
            return request_id in self._aborted

    def note_copy(self, request_id: str, pages: int, seconds: float) -> None:
        """Note how many pages were copied for a request, and how long that took."""
        with self._lock:
            self._copied[request_id] = (pages, seconds)

    def add(self, spec: LoadSpec, error: str | None) -> None:
        """Record how a load ended, once no byte of it moves any more."""
        if spec.in_step:
            self._add_in_step(spec, error)
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
            self._note_failure(error)

    def _add_in_step(self, spec: LoadSpec, error: str | None) -> None:
        """Record how a load within the step ended: vLLM must not be told that it was received."""
        if error is None:
            self._stats.add("loads")
            self._stats.add("loads_in_step")
            return
        with self._lock:
            self._invalid_blocks.update(block for block in spec.block_ids if block)
            self._failures[spec.request_id] = 1
        self._note_failure(error)

    def _note_failure(self, error: str) -> None:
        """Count and log a load that failed."""
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

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait until no load is out, for so long at most; return whether none is.

        Loads within the step are not counted: they end on the main thread.
        """
        with self._lock:
            return self._ended.wait_for(lambda: not self._out, timeout_s)

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
