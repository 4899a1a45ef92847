"""Loads within the step that asks: when they are offered, and what becomes of them.

The workers copy such a load before the forward, which computes the request in the same step. If the
copy fails, the forward has run on what the blocks held before. vLLM drops what it computed and goes
back to the first invalid block. This is right only under conditions that are checked here:

- The V1 model runner. V2 keeps the count of computed tokens on the device and does not take it back
  (vLLM #49250; so it is in 0.32, where update_requests writes the host's copy alone).
- One step at a time. With asynchronous scheduling the next step of the request is scheduled before
  the failure is known, and its token would count.
- No speculation, no pooling and no seed: drafts, pooled states and random numbers of the failed
  step are not taken back.
- One KV-cache group: vLLM cannot take invalid blocks of several.
- A CPU, where the copy is over before the forward begins.

Where vLLM is to compute anew what failed, it leaves the blocks in its own cache until then, also if
the request ends before. So they are evicted here, with those computed from them.

No other request may use the blocks in that step: vLLM caches them at once, and a request that
shares an invalid block does not wait until the one that computes it anew has done so. It is told to
ask again. Nor is anything saved of the request in that step: it could be garbage, also on a rank
whose own copy went well.

The pages must lie in the sidecars' own memory (LookupResult.in_memory). The copy must be short, as
all requests in the batch wait for it (pace.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lookaside import interface
from lookaside.scheduler.pace import Pace
from lookaside.scheduler.promises import Promises
from lookaside.scheduler.requests import RequestState
from lookaside.scheduler.setup import Setup

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request


def recovers(vllm_config: VllmConfig) -> bool:
    """Report whether vLLM recovers from a load that fails within its step."""
    return (
        interface.lacks("in step") is None
        and vllm_config.device_config.device_type == "cpu"
        and not getattr(vllm_config, "use_v2_model_runner", True)
        and vllm_config.speculative_config is None
        and getattr(vllm_config, "max_concurrent_batches", 2) == 1
    )


class InStep:
    """The loads within the step that is being scheduled, and within the one under way."""

    def __init__(self, setup: Setup, pace: Pace, promises: Promises) -> None:
        self._setup = setup
        self._pace = pace
        self._promises = promises
        self._heads: list[tuple[int, Any]] = []
        """The first page of each load ordered in this step, and its hash."""
        self._ordered: dict[str, frozenset[int]] = {}
        self.blocks: dict[str, frozenset[int]] = {}
        """The blocks that loads of the step under way fill and those after them, by request."""
        self.pool: BlockPool | None = None
        """vLLM's, to evict what failed from; without it no load happens within a step."""

    def may_offer(self, state: RequestState, computed: int, tokens: int, alone: bool) -> bool:
        """Report whether a hit of so many tokens may be loaded within the step."""
        setup, request, asked = self._setup, state.request, state.asked
        if not setup.in_step or not setup.config.load_in_step_ms or setup.hybrid or setup.drafts:
            return False
        if self.pool is None:
            return False
        if asked is None or asked.lookup is None or not asked.lookup.in_memory:
            return False
        params = request.sampling_params
        if request.pooling_params is not None or params is None or params.seed is not None:
            return False
        if tokens % setup.page or computed + tokens >= request.num_tokens:
            return False
        if self._promises.hands_over(request):
            return False  # the end of its prompt is saved in the very step
        return self._pace.fits_step(tokens // setup.page, alone)

    def is_shared(self, request: Request, local_page: int) -> bool:
        """Report whether vLLM's own hit for a request has blocks that are loaded in this step."""
        return any(
            first < local_page and request.block_hashes[self._name(first)] == name
            for first, name in self._heads
        )

    def order(self, state: RequestState, end: int, table: list[int]) -> None:
        """Note that pages up to end are loaded within this step. table has the request's blocks."""
        first = state.local_page
        self._heads.append((first, state.request.block_hashes[self._name(first)]))
        self._ordered[state.request.request_id] = frozenset(table[first:])
        self._pace.spend(end - first)

    def evict(self, failed: set[str]) -> None:
        """Remove from vLLM's own cache what was loaded and computed for requests that failed."""
        blocks = {block for r in failed & self.blocks.keys() for block in self.blocks[r]}
        if blocks and self.pool is not None:
            self.pool.evict_blocks(blocks)

    def begin(self) -> None:
        """The step that was scheduled goes to the workers. The one before it is over."""
        self.blocks, self._ordered = self._ordered, {}
        self._heads.clear()

    def _name(self, page: int) -> int:
        return (page + 1) * self._setup.hashes_per_page - 1
