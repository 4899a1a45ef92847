"""The block tables of the requests in a step, as vLLM hands them to its connector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_Table = Sequence[list[int]]


class Tables:
    """Returns the tables of the step that is being built.

    vLLM 0.30 and later look up a table when they are asked for it. vLLM 0.29 only hands out the
    tables that grew in the step, so the last one of each request is kept here.
    """

    def __init__(self) -> None:
        self._state: Any = None
        self._grown: dict[str, _Table] = {}

    def begin_step(self, output: SchedulerOutput) -> None:
        """Take in what vLLM says of the step's tables. Call it once a step, before ``of``."""
        self._state = output.kv_connector_block_state
        if self._state is not None and not hasattr(self._state, "get_block_ids"):
            self._grown.update(self._state.block_ids)
            for request_id in output.finished_req_ids:
                self._grown.pop(request_id, None)

    def of(self, request_id: str) -> _Table:
        """Return a request's blocks, of each group; empty if vLLM does not say."""
        if hasattr(self._state, "get_block_ids"):
            return self._state.get_block_ids(request_id) or ()
        return self._grown.get(request_id, ())

    def end_step(self) -> None:
        """Let go of what vLLM said: it is valid within the step only."""
        self._state = None
