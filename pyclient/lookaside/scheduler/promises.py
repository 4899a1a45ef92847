"""Prompts that one instance hands over to another (handover.py).

A prompt that is handed over is stored to its last token, the incomplete page included, and may be
hit to its last token: vLLM then computes that one alone. Only what was handed over is hit beyond
the last whole page. Only a lookup of a prompt with a promise is repeated while it falls short.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from lookaside import handover
from lookaside.scheduler.names import Names
from lookaside.scheduler.requests import Question, RequestState
from lookaside.scheduler.setup import Setup

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class Promises:
    """Reads the promises that come with requests, and writes those of our own answers."""

    def __init__(self, setup: Setup, names: Names) -> None:
        self._setup = setup
        self._names = names
        self._warned = False  # of a promise that cannot be kept

    # ---- at the decoder ----

    def expect(self, state: RequestState) -> None:
        """Note what a prefiller may have handed over of a new request."""
        setup, request = self._setup, state.request
        if not setup.may_load or getattr(request, "resumable", False):
            return
        promise = self._read(state)
        if promise is not None:
            state.promised = -(-promise.tokens // setup.page)
            state.patient_until = setup.clock() + setup.config.handover_timeout_ms / 1e3
        if setup.whole_pages:
            return
        if promise is not None:
            tokens = promise.tokens
        else:
            # An instance that only loads is a decoder, whether its proxy passes promises on or not.
            tokens = 0 if setup.may_save else request.num_prompt_tokens
        if tokens % setup.page:
            state.tail = self._names.end(state, tokens)
            if not state.tail:
                return
        state.handed = tokens

    def _read(self, state: RequestState) -> handover.Promise | None:
        """Return the promise that came with a request, if it can be kept here."""
        promise = handover.read(state.request)
        if promise is None:
            return None
        if promise.tokens % self._setup.page and self._setup.whole_pages:
            return None  # this model has layers that an incomplete page lacks
        if self._names.end(state, promise.tokens) == promise.digest:
            return promise
        if not self._warned:
            self._warned = True
            logger.warning(
                "lookaside: a prefiller names the pages of a prompt otherwise than this decoder, "
                "which will not find them: compare the prompt as the two get it, its adapter's "
                "files, --block-size, --prefix-caching-hash-algo and PYTHONHASHSEED"
            )
        return None

    @staticmethod
    def falls_short(state: RequestState, asked: Question) -> bool:
        """Report whether an answer is in and less than what was promised."""
        return asked.held is not None and asked.held < min(state.promised, asked.end_page)

    def may_wait(self, state: RequestState, asked: Question) -> bool:
        """Report whether to look up again after an answer that falls short of the promise.

        The last lookup starts after the deadline. Otherwise one that was started early and answered
        long ago, while the request waited for other things, would decide.
        """
        return asked.since < state.patient_until and self._setup.sidecars.available

    # ---- at the prefiller ----

    def hands_over(self, request: Request) -> bool:
        """Report whether a request is computed here for another instance to go on with."""
        if not self._setup.may_save or getattr(request, "resumable", False):
            return False
        return handover.is_asked(request) or (not self._setup.may_load and request.max_tokens == 1)

    def tail(self, state: RequestState) -> bytes:
        """Return the name of a prompt's incomplete last page if that is to be stored, else b"".

        A page with one token in it is not: the decoder computes that token anyway.
        """
        setup, tokens = self._setup, state.request.num_prompt_tokens
        if tokens % setup.page < 2 or setup.whole_pages or not self.hands_over(state.request):
            return b""
        return self._names.end(state, tokens)

    def write(self, state: RequestState) -> dict[str, Any] | None:
        """Return the kv_transfer_params of a request's answer; None if it is not handed over."""
        request, page = state.request, self._setup.page
        if not self.hands_over(request) or not self._setup.sidecars.available:
            return None
        tokens = request.num_prompt_tokens
        if not state.saved_tail:
            # The decoder knows the tokens of the prompt alone, and must be able to name the pages.
            tokens = min(state.saved, max(0, tokens - self._setup.lookahead) // page) * page
        digest = self._names.end(state, tokens)
        return handover.write(handover.Promise(tokens, digest)) if digest else None
