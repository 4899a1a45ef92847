"""How long a step's forward takes. For the worker's main thread alone."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Timed forwards that may be under way on a device; further ones are not timed.
_MAX_FORWARDS = 16


class _Forward:
    """The time of one forward, from here to end().

    On a device two events on the present stream take it, else the clock.
    """

    __slots__ = ("_begin", "_end", "_first", "_last", "step")

    def __init__(self, step: int, device: bool) -> None:
        self.step = step
        self._first = self._last = None
        self._begin = self._end = 0.0
        if device:
            self._first, self._last = _event(), _event()
            self._first.record()
        else:
            self._begin = time.monotonic()

    def end(self) -> None:
        """Mark the forward's end, the first time that this is called."""
        if self._end:
            return
        self._end = time.monotonic()
        if self._last is not None:
            self._last.record()

    def seconds(self) -> float | None:
        """Return how long it took; None if it is not over. Never waits."""
        if not self._end:
            return None
        if self._first is None or self._last is None:
            return self._end - self._begin
        return self._first.elapsed_time(self._last) / 1e3 if self._last.query() else None


class Forwards:
    """The timed forwards whose time has not been reported."""

    def __init__(self) -> None:
        self._timed: deque[_Forward] = deque()  # the newest one is perhaps not over

    def begin(self, step: int, device: bool) -> None:
        """Start to time the forward of a step, which comes now."""
        if len(self._timed) < _MAX_FORWARDS:
            self._timed.append(_Forward(step, device))

    def end(self) -> None:
        """The step's forward is over. Safe to call again, and in steps that are not timed."""
        if self._timed:
            self._timed[-1].end()

    def take(self) -> dict[int, float]:
        """Return the seconds of forwards that are over, by step; each is returned once."""
        taken: dict[int, float] = {}
        while self._timed:
            seconds = self._timed[0].seconds()
            if seconds is None:
                break
            taken[self._timed.popleft().step] = seconds
        return taken


def _event() -> torch.cuda.Event:
    import torch

    return torch.cuda.Event(enable_timing=True)
