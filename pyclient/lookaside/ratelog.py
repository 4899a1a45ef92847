"""A log that repeats itself at most once a minute."""

from __future__ import annotations

import logging
import threading
import time


class RateLimitedLog:
    """Logs each kind of trouble at once, then at most once a minute with a count.

    Safe for use by several threads.
    """

    def __init__(self, target: logging.Logger, every_s: float = 60.0) -> None:
        self._target = target
        self._every_s = every_s
        self._lock = threading.Lock()
        self._kinds: dict[str, tuple[float, int]] = {}
        self.counts: dict[str, int] = {}

    def warning(self, kind: str, message: str, *args: object, exc_info: bool = False) -> None:
        """Count one occurrence of kind, and log it unless one was logged lately."""
        now = time.monotonic()
        with self._lock:
            self.counts[kind] = self.counts.get(kind, 0) + 1
            last, muted = self._kinds.get(kind, (float("-inf"), 0))
            if now - last < self._every_s:
                self._kinds[kind] = (last, muted + 1)
                return
            self._kinds[kind] = (now, 0)
        if muted:
            message += f" (and {muted} more times like it)"
        self._target.warning(message, *args, exc_info=exc_info)
