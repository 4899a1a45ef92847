"""How long a step of vLLM may wait for the answers to lookups.

An answer from the memory of this host takes a fraction of a millisecond, a step 10 to 40 ms. To
tell vLLM "ask again" costs the request a whole step. So a call that finds its lookup unanswered
waits a moment: for a bounded time itself, and for a bounded time together with all other calls of
the step. What waits for a tier says so at once, and is not waited for.
"""

from __future__ import annotations

from lookaside.scheduler.contract import Lookup
from lookaside.scheduler.setup import Setup


class Waiting:
    """Polls lookups, and waits for them within the step's bounds."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._call_s = setup.config.lookup_wait_ms / 1e3
        self._step_s = setup.config.lookup_wait_step_ms / 1e3
        self._left_s = self._step_s

    def begin_step(self) -> None:
        """Allow the next step its whole time."""
        self._left_s = self._step_s

    def answer(self, lookup: Lookup) -> int | None:
        """Return the answer of a lookup; None if it is not there in the time that may be waited."""
        pages = lookup.poll()
        if pages is not None or self._left_s <= 0 or not lookup.is_due:
            return pages
        begin = self._setup.clock()
        pages = lookup.wait(min(self._call_s, self._left_s))
        waited = self._setup.clock() - begin
        self._left_s -= waited
        self._setup.stats.observe("lookup_wait_seconds", waited)
        return pages
