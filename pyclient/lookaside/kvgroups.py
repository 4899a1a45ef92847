"""vLLM's groups of layers with a block table of their own, and what a page has of each.

Of a group with full attention a page has all blocks.

Of a sliding window, a page has only the blocks that the window of some hit can reach. Hits end
where pages do. So a block that ends more than the window before a page's end is never read again,
and vLLM may have freed it by then. With drafts of several modules vLLM keeps a few tokens more than
the window; it names the blocks of these too, so that a hit must fill them.

For layers that keep a *state* (Mamba and its kin, in vLLM's mode "align"), vLLM has a block at some
pages' ends only: the state there stands for all tokens before. A state is a page of its own, one
for each group with states, named after the page that it ends (state_names). Its column, one of the
last, lies at the start of that page and alone there.

This module imports neither torch nor vLLM: it uses config and specs as they come.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

# Specs whose blocks hold all tokens of the prefix, position by position, and nothing else. Their
# subclasses are not included: each of them (sinks, reference windows, hidden states) has rules of
# its own.
FULL_ATTENTION_SPECS = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
# Specs whose blocks vLLM frees once the window has left them behind.
WINDOW_SPECS = frozenset({"SlidingWindowSpec", "SlidingWindowMLASpec"})
# Specs whose block is a state of all tokens before its end.
STATE_SPECS = frozenset({"MambaSpec"})


class Share(NamedTuple):
    """What one KV-cache group has of every page: the last ``kept`` of its ``blocks`` there."""

    blocks: int
    kept: int  # blocks before these no hit can need
    reach: int  # how many blocks before its end a hit needs; 0: all
    state: bool = False  # a hit needs the block at its end, which has a page of its own


def dcp_size(vllm_config: Any) -> int:
    """Return among how many ranks the tokens of a block are divided (decode context
    parallelism)."""
    parallel = getattr(vllm_config, "parallel_config", None)
    return getattr(parallel, "decode_context_parallel_size", 1)


def block_tokens(group: Any, dcp: int) -> int:
    """Return how many tokens a group's block has, on all the ranks together that divide them."""
    spec = group.kv_cache_spec
    divided = getattr(spec, "dcp_sharded", not keeps_state(group))
    return spec.block_size * (dcp if divided else 1)


def shares(kv_cache_groups: Sequence[Any], page_tokens: int, dcp: int = 1) -> tuple[Share, ...]:
    """Return what each group has of a page. page_tokens is a multiple of all blocks' tokens.

    dcp is among how many ranks these are divided (decode context parallelism).
    """
    found = []
    for group in kv_cache_groups:
        block, kept = block_tokens(group, dcp), kept_tokens(group)
        blocks = page_tokens // block
        if keeps_state(group):
            found.append(Share(blocks, 0, 1, state=True))
            continue
        # Blocks that vLLM needs at a hit; it has the null block in place of all before.
        reach = -(-kept // block)
        found.append(Share(blocks, min(blocks, reach) if kept else blocks, reach))
    return tuple(found)


def window_tokens(group: Any) -> int:
    """Return how many tokens a group's sliding window attends to, the newest included.

    0 if it has no window.
    """
    (window,) = {spec.sliding_window for spec in specs_of(group) if is_window(spec)} or {0}
    return window


def kept_tokens(group: Any) -> int:
    """Return how many tokens vLLM keeps of a sliding window before the next token; 0 for a group
    without a window."""
    kept = {
        spec.sliding_window - 1 + getattr(spec, "extra_retained_tokens", 0)
        for spec in specs_of(group)
        if is_window(spec)
    }
    (tokens,) = kept or {0}
    return tokens


def keeps_state(group: Any) -> bool:
    """Report whether a group's layers keep a state, and no KV of single tokens."""
    return any(is_state(spec) for spec in specs_of(group))


def state_names(digest: bytes, groups: int) -> list[bytes]:
    """Return the names of the states at the end of the page with this digest, one for each
    group."""
    size = len(digest)
    return [
        hashlib.sha256(b"lookaside state %d:" % number + digest).digest()[:size]
        for number in range(groups)
    ]


def is_window(spec: Any) -> bool:
    return type(spec).__name__ in WINDOW_SPECS


def is_state(spec: Any) -> bool:
    return type(spec).__name__ in STATE_SPECS


def config_fault(kv_cache_config: Any) -> str | None:
    """Return why pages of this KV cache cannot be kept, going by its config; None if they can."""
    groups = list(kv_cache_config.kv_cache_groups)
    if not groups:
        return "the model has no KV cache"
    for group in groups:
        fault = _group_fault(group)
        if fault is not None:
            return fault
    if all(keeps_state(group) for group in groups):
        return "a model with states alone, without attention, is not supported"
    return None


def _group_fault(group: Any) -> str | None:
    """Return why pages of one group cannot be kept; None if they can."""
    if not getattr(group, "enable_kv_transfer", True) or getattr(group, "host_resident", False):
        return "the model's KV cache does not lie in transferable blocks of the device's"
    specs = specs_of(group)
    fault = next(filter(None, map(_spec_fault, specs)), None)
    if fault is not None:
        return fault
    alike = {
        (
            spec.block_size,
            is_window(spec) and (spec.sliding_window, getattr(spec, "extra_retained_tokens", 0)),
            is_state(spec),
        )
        for spec in specs
    }
    if len(alike) != 1:
        return "a KV-cache group whose layers have different block sizes or sliding windows"
    return None


def _spec_fault(spec: Any) -> str | None:
    """Return why blocks of one layer cannot be kept; None if they can."""
    name = type(spec).__name__
    if name not in FULL_ATTENTION_SPECS | WINDOW_SPECS | STATE_SPECS:
        return (
            f"{name} is not supported, only full attention, MLA, sliding windows and Mamba states "
            f"are"
        )
    if not getattr(spec, "prefix_cacheable", True):
        return f"{name} of a kind that vLLM does not share between prompts"
    if is_state(spec) and spec.mamba_cache_mode != "align":
        return f"vLLM shares states with --mamba-cache-mode align only, not {spec.mamba_cache_mode}"
    if getattr(spec, "non_causal", False):
        return "attention is not causal, so prefixes cannot be shared"
    if is_window(spec) and spec.sliding_window < 2:
        return "a sliding window that attends to one token only"
    if is_window(spec) and (
        getattr(spec, "model_version", None) or getattr(spec, "tokens_per_state", 1) != 1
    ):
        return "a sliding window that compresses tokens"
    return None


def layer_specs(group: Any) -> Iterable[tuple[str, Any]]:
    """Return the layers of a group by name, each with its own spec."""
    own = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    for name in group.layer_names:
        yield name, group.kv_cache_spec if own is None else own[name]


def specs_of(group: Any) -> list[Any]:
    """Return the specs of a group's layers. A rank of a pipeline may have none of them."""
    own = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return list(own.values()) if own else [group.kv_cache_spec]
