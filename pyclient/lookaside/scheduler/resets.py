"""When the sidecars clear what a reset has made void.

They clear it after the saves and loads that were under way at the reset. What such a save commits
must not stay behind. Such a load is good, as what a running request has computed is.
"""

from __future__ import annotations

import logging

from lookaside.scheduler.loads import Loads
from lookaside.scheduler.saves import Saves
from lookaside.scheduler.setup import Setup

logger = logging.getLogger(__name__)


class Resets:
    """Waits, between steps, for what was under way at the last reset."""

    def __init__(self, setup: Setup, saves: Saves, loads: Loads) -> None:
        self._setup = setup
        self._saves = saves
        self._loads = loads
        self._waits = False
        self._saves_before = 0  # the saves with a lower id
        self._loads_before: set[str] = set()

    def begin(self) -> None:
        """Have the sidecars clear, now if nothing is under way, within the deadline."""
        self._waits = True
        self._saves_before, self._loads_before = self._saves.next_id, set(self._loads.blocks)
        self._clear_when_quiet(self._setup.config.reset_timeout_ms / 1e3)

    def go_on(self) -> None:
        """Have the sidecars clear if what was under way has ended. Does not wait."""
        if self._waits:
            self._clear_when_quiet(0.0)

    def _clear_when_quiet(self, timeout_s: float) -> None:
        self._loads_before &= self._loads.blocks.keys()
        oldest = next(iter(self._saves.pins), self._saves_before)
        if self._loads_before or oldest < self._saves_before:
            return
        self._waits = False
        if not self._setup.sidecars.clear(timeout_s) and timeout_s:
            logger.warning(
                "lookaside: the cache is reset, but not every sidecar has cleared its space;"
                " nothing is loaded or stored until all have"
            )
