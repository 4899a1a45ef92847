"""How long vLLM's steps and prefills take, as far as lookups depend on it.

Each lookup carries what computing a page takes (prefill.py), from the forward times that the
workers report. So a sidecar does not bring up what vLLM would compute sooner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
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
# Steps that the median is of, and how many it takes at least.
_MEDIAN_STEPS = 64
_LEAST_STEPS = 8
# Copies that the rate of the next one is learnt from.
_RATE_COPIES = 16
# What a load within the step takes beside its copy: the grant, and the release.
_LOAD_S = 0.0005


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
        self._computed = False
        """The last step computed something."""
        self._steps: deque[float] = deque(maxlen=_MEDIAN_STEPS)
        self._copies: deque[tuple[int, float]] = deque(maxlen=_RATE_COPIES)
        self._spent_s = 0.0
        """What the loads within the step that is being scheduled are predicted to take."""

    def note_step(self, has_requests: bool, computes: bool = False) -> None:
        """Measure the step, unless it comes after a pause: its length would say nothing.

        computes: the step that begins computes something.
        """
        self._spent_s = 0.0
        computed, self._computed = self._computed, computes
        now, before = self._setup.clock(), self._stepped
        self._stepped = now if has_requests else None
        if before is not None:
            self._step_s = max(min(now - before, _LONGEST_STEP_S), _STEP_DECAY * self._step_s)
            if computed:
                self._steps.append(now - before)

    def pause(self) -> None:
        """Note that no requests are left."""
        self._stepped = None

    def note_copies(self, copies: Mapping[str, tuple[int, float]]) -> None:
        """Take in how many pages were copied for requests, and in how many seconds."""
        self._copies.extend(copies.values())

    def fits_step(self, pages: int, alone: bool) -> bool:
        """Report whether a load of so many pages may happen within this step.

        alone: nobody else is computed, so that nobody waits for it.
        """
        config = self._setup.config
        seconds = self._load_s(pages)
        if seconds is None or (not alone and len(self._steps) < _LEAST_STEPS):
            return False
        limit = config.load_in_step_ms / 1000
        if not alone:
            limit = min(limit, config.load_in_step_share * median(self._steps))
        return self._spent_s + seconds <= limit

    def spend(self, pages: int) -> None:
        """Note that a load of so many pages happens within this step."""
        self._spent_s += self._load_s(pages) or 0.0

    def _load_s(self, pages: int) -> float | None:
        """Return how long a load takes; None while no copy was measured."""
        copied = sum(count for count, _ in self._copies)
        if not copied:
            return None
        return _LOAD_S + pages * sum(took for _, took in self._copies) / copied

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
