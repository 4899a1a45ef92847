"""No copy touches the KV cache while vLLM has taken its memory away.

vLLM's sleep unmaps the KV cache. A copy under way would then read or write memory that is nobody's,
or somebody else's. So before the memory goes, everything here that could touch it ends: copies that
have begun are waited for, and those that have not are given up. Until vLLM wakes, every save is
acknowledged as not carried out and every load is reported as failed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from lookaside.worker.link import Link
from lookaside.worker.loads import Loads
from lookaside.worker.reports import Reports
from lookaside.worker.saves import Saves

logger = logging.getLogger("vllm.lookaside")

# How often a wait for copies is logged. It has no deadline, because vLLM unmaps the memory after
# it. What it waits for is a copy that has begun: it takes as long as the device takes.
_TELL_EVERY_S = 5.0


class Quiet:
    """Ends all copies, and lets them begin again. For the worker's main thread alone."""

    def __init__(self, link: Link, loads: Loads, saves: Saves, reports: Reports) -> None:
        self._link = link
        self._loads = loads
        self._saves = saves
        self._reports = reports

    def begin(self) -> None:
        """Begin no copy from now on, and return once the last one has ended. Safe to call again.

        The device is not waited for beyond our own copies.
        """
        self._link.quiet = True
        self._loads.give_up_in_step()
        self._saves.give_up()
        _wait(self._saves.wait_copied, "saved")
        self._saves.finish()
        _wait(self._reports.wait_ended, "loaded")

    def end(self) -> None:
        """Let copies begin again. Safe to call again."""
        self._link.quiet = False


def _wait(ended: Callable[[float], bool], what: str) -> None:
    while not ended(_TELL_EVERY_S):
        logger.warning("lookaside: vLLM's sleep waits for pages that are being %s", what)
