"""Loads that are ordered, and how they ended.

Loads are asynchronous, or happen within the step (in_step.py). Once vLLM has given the blocks, the
workers own the lookup's leases, and report an asynchronous load as received, whatever happens. A
request whose load failed is not offered a hit again: vLLM would loop.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lookaside import wire
from lookaside.metadata import LoadSpec
from lookaside.scheduler.hits import Hits
from lookaside.scheduler.in_step import InStep
from lookaside.scheduler.requests import Question, RequestState
from lookaside.scheduler.rows import Rows
from lookaside.scheduler.setup import Setup
from lookaside.scheduler.states import States

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Prefill:
    """What becomes of the tokens of an admitted request that vLLM's own cache did not have."""

    tokens: int
    found: int
    loaded: int
    own: int
    """The tokens of the request that it had."""
    lookup: int
    """The id of the request's last lookup."""
    trace: tuple[Mapping[str, str], float, int] | None = None
    """The headers of its trace, when the load was ordered, and the bytes of a page."""
    reason: int = 0
    """Why what it found was not loaded: see wire.REASONS."""


_EXPIRED, _ENGINE_HAD, _LATE, _LOST = (
    wire.REASONS.index(name) for name in ("expired", "engine_had", "late", "lost")
)


def _parks_loads() -> bool:
    """Report whether vLLM may leave a request whose load has ended behind one that waits for its
    blocks: before 0.31."""
    from vllm.v1.core.sched.scheduler import Scheduler

    return not hasattr(Scheduler, "_holds_kv_blocks")


class Loads:
    """Orders loads, and knows which are under way."""

    def __init__(
        self, setup: Setup, rows: Rows, hits: Hits, states: States, in_step: InStep
    ) -> None:
        self._setup = setup
        self._rows = rows
        self._hits = hits
        self._states = states
        self.in_step = in_step
        self.blocks: dict[str, frozenset[int]] = {}
        """The blocks that each load under way fills, by request."""
        self.prefills: dict[str, _Prefill] = {}
        """Of these requests, until it is known what was loaded."""
        self._parked: set[str] | None = set() if _parks_loads() else None
        """Requests whose load has ended and that vLLM has yet to go on with; None where vLLM never
        leaves one behind."""
        # For the next step's metadata.
        self.ordered: list[LoadSpec] = []
        self.aborted: list[str] = []

    # ---- orders ----

    def note_admission(self, state: RequestState, asked: Question | None, to_load: int) -> None:
        """Report to the sidecars what becomes of a request that was just admitted, now or when its
        load has ended."""
        request, page = state.request, self._setup.page
        local = state.local_page * page
        held = asked.held if asked is not None and asked.held is not None else 0
        tokens = max(0, request.num_tokens - local)
        own = request.num_tokens - tokens
        found = max(0, min(held * page - local, tokens))
        if to_load <= 0:
            reason = self._reason(state, asked)
            self._setup.sidecars.report_prefilled(tokens, found, 0, own, state.lookup_id, reason)
        else:
            self.prefills[request.request_id] = _Prefill(
                tokens, found, min(to_load, tokens), own, state.lookup_id
            )
            if self._setup.tracer is not None and state.trace:
                page_bytes = asked.page_bytes if asked is not None else 0
                trace = (state.trace, self._setup.clock(), page_bytes)
                self.prefills[request.request_id].trace = trace

    def _reason(self, state: RequestState, asked: Question | None) -> int:
        """Return why nothing is loaded for a request, if its lookup's own reason does not say."""
        if state.expired and asked is None:
            return _EXPIRED
        if asked is None and state.lookup_id and self._hits.is_local(state):
            return _ENGINE_HAD
        if asked is None or asked.held is None:
            return 0
        if asked.first_page < asked.held <= state.local_page:
            return _ENGINE_HAD
        return _LATE if asked.late else 0

    def order(self, state: RequestState, tables: Sequence[list[int]], tokens: int) -> int:
        """Order a load of so many tokens into vLLM's blocks; return the page it ends at."""
        request_id, first = state.request.request_id, state.local_page
        end = first - (-tokens // self._setup.page)
        refs, at_end = (), ()
        if not self._setup.hybrid or self._rows.is_loadable(tables, first, end):
            refs, at_end = self._hits.take_over(state, end)
        else:
            self._setup.stats.add("errors")
            logger.warning(
                "lookaside: vLLM's block tables are not as a hit of %d pages needs them", end
            )
        self._hits.drop(state)
        block_ids = self._rows.of(tables, first, end)
        # Without refs the workers report a failure, which is what it is.
        digests = self._hits.wanted(state, first, end) if refs else []
        names = wire.names(digests, first, self._setup.chunk) if refs else b""
        self.ordered.append(LoadSpec(request_id, refs, first, block_ids, names, state.in_step))
        if state.in_step:
            self.in_step.order(state, end, tables[0])
            return end
        if at_end:
            load = self._states.load(request_id, at_end, tables, end, digests[-1])
            self.ordered.append(load)
            block_ids = block_ids + load.block_ids
        self.blocks[request_id] = frozenset(block_ids)
        return end

    def abort(self, request_id: str) -> bool:
        """Note that a request ends; return whether it is being loaded.

        Its blocks stay with vLLM until the workers report it.
        """
        self.go_on(request_id)
        if request_id not in self.blocks:
            return False
        self.aborted.append(request_id)
        self.prefills.pop(request_id, None)  # neither computed nor of use
        return True

    # ---- ends ----

    def end(
        self,
        output: KVConnectorOutput,
        failed: set[str],
        requests: Mapping[str, RequestState],
    ) -> None:
        """Take in which loads ended, and which failed beside those in failed."""
        if output.invalid_block_ids:
            failed.update(
                request_id
                for request_id, block_ids in self.blocks.items()
                if not block_ids.isdisjoint(output.invalid_block_ids)
            )
            failed.update(
                request_id
                for request_id, block_ids in self.in_step.blocks.items()
                if not block_ids.isdisjoint(output.invalid_block_ids)
            )
        self.in_step.evict(failed)
        for request_id in failed & (self.blocks.keys() | self.in_step.blocks.keys()):
            state = requests.get(request_id)
            if state is not None:
                state.denied = True
                state.saved = 0
            if (prefill := self.prefills.get(request_id)) is not None:
                prefill.loaded, prefill.reason = 0, _LOST
        for request_id in output.finished_recving or ():
            self._received(request_id, requests)
        for request_id in self.in_step.blocks:
            self._report_prefill(request_id)
        self.in_step.blocks = {}

    def begin_step(self) -> None:
        """The loads within the step before this one have ended; this one's begin."""
        for request_id in self.in_step.blocks:
            self._report_prefill(request_id)
        self.in_step.begin()

    def is_unsure(self, request_id: str) -> bool:
        """Report whether a request is computed in the step under way from blocks whose load may
        fail."""
        return request_id in self.in_step.blocks

    def _received(self, request_id: str, requests: Collection[str]) -> None:
        self.blocks.pop(request_id, None)
        if self._parked is not None and request_id in requests:  # it was not aborted
            self._parked.add(request_id)
        self._report_prefill(request_id)

    def _report_prefill(self, request_id: str) -> None:
        if (prefill := self.prefills.pop(request_id, None)) is not None:
            if prefill.trace is not None and self._setup.tracer is not None:
                headers, since, page_bytes = prefill.trace
                self._setup.tracer.load(
                    request_id,
                    headers,
                    self._setup.clock() - since,
                    prefill.loaded,
                    prefill.loaded // self._setup.page * page_bytes,
                    prefill.reason,
                )
            self._setup.sidecars.report_prefilled(
                prefill.tokens,
                prefill.found,
                prefill.loaded,
                prefill.own,
                prefill.lookup,
                prefill.reason,
            )

    def must_wait(self, request_id: str) -> bool:
        """Report whether a request must wait for others whose load has ended.

        vLLM would stop at this one if it had no blocks for it, while those that wait behind it hold
        them all.
        """
        return bool(self._parked and request_id not in self._parked)

    def go_on(self, request_id: str) -> None:
        """Note that vLLM goes on with a request, or has ended it."""
        if self._parked:
            self._parked.discard(request_id)
