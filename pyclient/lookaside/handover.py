"""Hands a prompt over from the instance that computed it to one that goes on with it.

Prefill and decode on separate instances meet in the sidecar: the prefiller stores, the decoder
looks up. A lookup of vLLM's block hashes alone leaves two things open. This module has what both
sides need for them.

**The last, incomplete page.** vLLM names full blocks only. The page with the end of a prompt is
named here the way vLLM would name it: by its own hash function over the digest of the page before,
the tokens that are there and the same extra keys. The number of tokens goes into that hash, so that
no full block, and no other prompt, has the name. Both sides compute it from their own request. So a
decoder finds the page only if its prompt is the very same.

**The promise.** A prefiller's answer may be out before its last pages are visible: copies and
commits go on behind it. Its ``kv_transfer_params`` tell how much of the prompt has been handed to
the workers, and the name of its last page. A decoder that is given these compares the name with its
own, and waits a moment for what is not there yet. Nothing else in a promise is believed: it cannot
name pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from lookaside import interface

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

_KEY = "lookaside"  # ours alone: a MultiConnector merges the parameters of several
_DIGEST_BYTES = 32


class Promise(NamedTuple):
    """The first ``tokens`` of a prompt are stored, or about to be.

    ``digest`` names the page that they end in.
    """

    tokens: int
    digest: bytes


def is_asked(request: Request) -> bool:
    """Report whether the request's sender means to hand it over to a decoder."""
    params = request.kv_transfer_params
    return isinstance(params, dict) and params.get("do_remote_decode") is True


def write(promise: Promise) -> dict[str, Any]:
    """Return the promise as the ``kv_transfer_params`` of an answer."""
    return {_KEY: {"tokens": promise.tokens, "digest": promise.digest.hex()}}


def read(request: Request) -> Promise | None:
    """Return the promise that came with a request; None if it is malformed.

    The sender is not trusted.
    """
    params = request.kv_transfer_params
    ours = params.get(_KEY) if isinstance(params, dict) else None
    if not isinstance(ours, dict):
        return None
    tokens, digest = ours.get("tokens"), ours.get("digest")
    if type(tokens) is not int or not 0 < tokens <= request.num_prompt_tokens:
        return None
    if not isinstance(digest, str) or len(digest) > 2 * _DIGEST_BYTES:
        return None
    try:
        return Promise(tokens, bytes.fromhex(digest))
    except ValueError:
        return None


class PageNames:
    """Names the page that a prefix ends in. Holds nothing of a request."""

    def __init__(
        self, vllm_config: VllmConfig, page_tokens: int, hashes_per_page: int, lookahead: int
    ) -> None:
        """lookahead is how many tokens after a block its hash covers. Where it does, the end of a
        prompt has no name: the tokens after it are not known."""
        from vllm.utils.hashing import get_hash_fn_by_name

        self._names_parts = not lookahead and interface.lacks("tails") is None
        self._hash = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        self._page = page_tokens
        self._hashes_per_page = hashes_per_page

    def digest(self, request: Request, tokens: int) -> bytes:
        """Return the name of the page that the first tokens of a request end in; empty if it has
        none."""
        pages, left = divmod(tokens, self._page)
        known = len(request.block_hashes) // self._hashes_per_page
        if tokens <= 0 or tokens > request.num_tokens or pages > known:
            return b""
        before = request.block_hashes[pages * self._hashes_per_page - 1] if pages else None
        if not left:
            return bytes(before or b"")
        if not self._names_parts or request.prompt_embeds is not None:
            return b""
        from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, hash_block_tokens

        start = pages * self._page
        extra, _ = generate_block_hash_extra_keys(request, start, tokens, 0)
        return bytes(
            hash_block_tokens(self._hash, before, request.all_token_ids[start:tokens], extra)
        )
