"""How long vLLM spends in the connector's calls, of each call and of its steps together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from lookaside.stats import Collector

# Below "vllm", so that its handlers show it.
logger = logging.getLogger("vllm.lookaside")

# The share of vLLM's steps that the calls may take before a warning.
_MOST = 0.05
# The share is taken over so many steps that compute, one after the other.
_WINDOW = 200


class CallTimes:
    """Times the calls of one role. For the thread that makes them, vLLM's own."""

    def __init__(
        self, role: str, stats: Collector, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """role is for the warning. clock is in seconds."""
        self._role = role
        self._stats = stats
        self.clock = clock
        self._spent = 0.0
        """In the calls since the last step that computed."""
        self._last: float | None = None
        """When the last step ended; None if it did not compute."""
        self._steps = 0
        self._in_calls = 0.0
        self._in_steps = 0.0
        self._warned = False

    def add(self, call: str, seconds: float) -> None:
        """Record one call."""
        self._stats.observe(f"call_seconds:{call}", seconds)
        self._spent += seconds

    def end_step(self, computes: bool) -> None:
        """Note the end of a step, and whether it computes. Call it once a step, in the last call.

        Logs a warning, once, if calls have taken too much of many steps.
        """
        now = self.clock()
        if computes and self._last is not None:
            self._steps += 1
            self._in_calls += self._spent
            self._in_steps += now - self._last
        self._spent = 0.0
        self._last = now if computes else None
        if self._steps < _WINDOW:
            return
        share = self._in_calls / self._in_steps if self._in_steps else 0.0
        self._steps, self._in_calls, self._in_steps = 0, 0.0, 0.0
        if share > _MOST and not self._warned:
            self._warned = True
            logger.warning(
                "lookaside: the connector's calls take %.0f %% of the time of vLLM's steps (%s); "
                "the histogram vllm:lookaside_call_seconds says which. Give the host more memory "
                "bandwidth or cores, or set lookaside.save_decode to false or "
                "lookaside.lookup_wait_step_ms to 0 (logged once)",
                share * 100,
                self._role,
            )
