"""How the pages of a request are named.

A page is named by vLLM's hash of its last block. Where that hash does not tell what the page
depends on, such as the weights of an adapter, a digest of this goes into the name as well
(identity.py).
Lookups, saves, states, tails and events all take their names from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lookaside import handover
from lookaside.scheduler.requests import RequestState
from lookaside.scheduler.setup import Setup

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


class Names:
    """Names pages of requests whose identity is known. Holds nothing of a request."""

    def __init__(self, setup: Setup, vllm_config: VllmConfig) -> None:
        self._page = setup.page
        self._hashes_per_page = setup.hashes_per_page
        self._lookahead = setup.lookahead
        self.ends = handover.PageNames(
            vllm_config, setup.page, setup.hashes_per_page, setup.lookahead
        )

    def known(self, request: Request) -> int:
        """Return how many pages of a request have hashes."""
        return len(request.block_hashes) // self._hashes_per_page

    def of(self, state: RequestState, first_page: int, end_page: int) -> list[bytes]:
        """Return the names of pages [first_page, end_page)."""
        hashes = self.hashes(state.request, first_page, end_page)
        identity = state.identity
        assert identity is not None
        if not identity.keys:
            return hashes
        # A name that covers tokens after the page depends on what these depend on.
        first = (first_page + 1) * self._page + self._lookahead
        ends = range(first, first + len(hashes) * self._page, self._page)
        return [identity.name(each, end) for each, end in zip(hashes, ends, strict=True)]

    def before(self, state: RequestState, first_page: int) -> bytes:
        """Return the name of page first_page - 1; empty for page 0."""
        return self.of(state, first_page - 1, first_page)[0] if first_page else b""

    def end(self, state: RequestState, tokens: int) -> bytes:
        """Return the name of the page that a prefix ends in, perhaps in its middle.

        Empty if that page has no name.
        """
        assert state.identity is not None
        digest = self.ends.digest(state.request, tokens)
        return digest and state.identity.name(digest, tokens + self._lookahead)

    def hashes(self, request: Request, first_page: int, end_page: int) -> list[Any]:
        """Return vLLM's hashes of pages [first_page, end_page): the last one of each page."""
        step = self._hashes_per_page
        if step == 1:
            return request.block_hashes[first_page:end_page]
        return request.block_hashes[(first_page + 1) * step - 1 : end_page * step : step]
