"""How long vLLM's steps and prefills take, as far as lookups depend on it.

Each lookup carries what computing a page takes (prefill.py), from the forward times that the
workers report. So a sidecar does not bring up what vLLM would compute sooner.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lookaside.metadata import LookasideMetadata
from lookaside.prefill import PrefillRate
from lookaside.scheduler.requests import RequestState
from lookaside.scheduler.setup import Setup

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

# The least time that a load's order may take to reach the worker, whose taking over ends the lease.
# A lease that is shorter than four times this allows a quarter of itself. Steps that are under way
# come on top.
_TAKE_OVER_S = 0.5
# The longest recent step counts less with each further one.
_STEP_DECAY = 0.9
# A longer step counts as this long: the engine may have been paused.
_LONGEST_STEP_S = 30.0
# Timed steps whose time has not come back; an engine has a few under way.
_MAX_TIMED = 64
_MAX_RECOMPUTE_US = 0xFFFFFFFF


class Pace:
    """Measures steps, and learns the rate of prefills."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.rate = PrefillRate()
        self.timed: dict[int, int] = {}
        """Prompt tokens of each timed step whose time is not known yet."""
        self._next_timed = 1
        self._step_s = 0.0
        """The longest recent step."""
        self._stepped: float | None = None
        """When the last step was, if requests have been there since."""

    def note_step(self, has_requests: bool) -> None:
        """Measure the step, unless it comes after a pause: its length would say nothing."""
        now, before = self._setup.clock(), self._stepped
        self._stepped = now if has_requests else None
        if before is not None:
            self._step_s = max(min(now - before, _LONGEST_STEP_S), _STEP_DECAY * self._step_s)

    def pause(self) -> None:
        """Note that no requests are left."""
        self._stepped = None

    def hit_life_s(self) -> float:
        """Return how long after its leases began a hit may be offered.

        At most half of the lease; less if the steps that the worker carries out first take longer
        than the other half.
        """
        lease = self._setup.sidecars.lease_s
        return min(
            lease / 2,
            lease - min(_TAKE_OVER_S, lease / 4) - self._setup.steps_ahead * self._step_s,
        )

    def recompute_us(self) -> int:
        """Return what computing a page takes, in microseconds; 0 while it is not known."""
        us = self.rate.seconds_per_token * self._setup.page * 1e6
        return min(max(1, round(us)), _MAX_RECOMPUTE_US) if us else 0

    def prefill_s(self, pages: int) -> float:
        """Return what computing so many pages takes, in seconds; 0 while it is not known."""
        return self.rate.seconds_per_token * self._setup.page * pages

    def time_forward(
        self,
        output: SchedulerOutput,
        requests: Mapping[str, RequestState],
        meta: LookasideMetadata,
    ) -> None:
        """Have the step timed if it mostly computes prompts."""
        prompt_tokens = 0
        for request_id, scheduled in output.num_scheduled_tokens.items():
            state = requests.get(request_id)
            if state is None:
                continue
            request = state.request
            left = request.num_tokens - request.num_computed_tokens
            if left > 1:  # a request that generates computes only its last token, and drafts
                prompt_tokens += min(scheduled, left)
        if PrefillRate.is_worth_timing(prompt_tokens, output.total_num_scheduled_tokens):
            meta.timed = self._next_timed
            self._next_timed += 1
            self.timed[meta.timed] = prompt_tokens
            if len(self.timed) > _MAX_TIMED:
                del self.timed[next(iter(self.timed))]

    def note_forwards(self, seconds: Mapping[int, float]) -> None:
        """Take in how long timed steps took, by their numbers."""
        for step, took in seconds.items():
            self.rate.add(self.timed.pop(step, 0), took)
        if seconds and self.rate.seconds_per_token:
            self._setup.stats.set(
                "prefill_tokens_per_second", round(1 / self.rate.seconds_per_token, 1)
            )
