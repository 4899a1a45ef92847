"""Where the bytes of a page lie in vLLM's KV cache.

A page is one block of one rank, all layers. vLLM may put the layers of a model into several groups,
each with a block table of its own (full attention and sliding windows, say). Then a page is the
tokens of one *scheduler block*, the least common multiple of all groups' blocks. It has one or more
blocks of each group, side by side; each is a *column* of the page. kvgroups.py says which blocks.

With decode context parallelism a block has the tokens of several ranks, and each rank has every
n-th of them in its own block. Then a rank's page is its own part of these tokens.

vLLM (0.29 and later) gives each layer a logical view [B', H, N, C] into one allocation; the
physical order differs by backend, and kernels may split blocks (B' = num_blocks * ratio). From
shape and strides we derive the runs of bytes that a block consists of, and join neighbours. The
result is checked against what the KV cache config has about placement. If the two disagree, we do
not understand this vLLM, and a page that is not understood is not cached.

    LBHNC, LBNHC, MLA      one run a layer
    BLHNC, BLNHC, BHLNC    one run a block, all layers
    LHBNC                  one run a layer and head

Pages are opaque: nothing looks inside a run (on the CPU its bytes are in the order of the
instruction set's tiles). Alignment padding at a page's end is not copied.

This module imports neither torch nor vLLM: it uses tensors, config and specs as they come.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

from lookaside.description import describe, layer_shape
from lookaside.kvgroups import (
    Share,
    block_tokens,
    config_fault,
    dcp_size,
    is_state,
    layer_specs,
    shares,
)

# A block of 200 layers with 256 heads a layer, each a run of its own, stays below this.
MAX_SEGMENTS = 1 << 16


class UnsupportedLayout(Exception):
    """This KV cache cannot be kept outside the engine.

    kind is "attention" (of a kind that is not covered) or "layout" (not understood).
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(f"unsupported: {kind}: {reason}")
        self.kind = kind
        self.reason = reason


class Segment(NamedTuple):
    """One run of bytes of every block."""

    base: int  # address of block 0's run
    stride: int  # bytes from one block's run to the next block's
    length: int  # bytes of the run
    page_offset: int  # where the run lies in a page of the arena
    column: int = 0  # which of a page's blocks it is of


class Encoding(NamedTuple):
    """How pages are encoded in the arena (encoding.py)."""

    codec: int  # _native.INT8 and its like
    element: int  # _native.BFLOAT16 and its like


@dataclass(frozen=True)
class PageLayout:
    """How one rank's pages lie in its KV cache.

    Valid as long as the tensors that it was built from.
    """

    segments: tuple[Segment, ...]  # by column, and by page_offset within it
    page_bytes: int  # in the arena
    num_blocks: int
    page_tokens: int
    spans: tuple[tuple[int, int], ...]  # (address, size) of the allocations that hold the KV cache
    # What another instance must have in common to reuse the bytes of a page; part of the space.
    description: dict[str, str] = field(default_factory=dict)
    states: int = 0  # so many of the columns, the last ones, are states: each is alone in its page

    encoding: Encoding | None = None  # None: pages lie in the arena as they are in the KV cache
    encoded_bytes: tuple[int, ...] = ()  # of each of a page's blocks, which follow one another

    @property
    def column_bytes(self) -> tuple[int, ...]:
        """The bytes that each of a page's blocks has in the arena."""
        return self.encoded_bytes if self.encoding is not None else self.block_bytes

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """The bytes that each of a page's blocks has in the KV cache.

        The blocks follow one another in the page, except those of states.
        """
        sizes = [0] * (self.segments[-1].column + 1)
        for segment in self.segments:
            sizes[segment.column] += segment.length
        return tuple(sizes)


@dataclass
class _Cache:
    """What the tensors of a KV cache are made of."""

    runs: list[list[tuple[int, int, int]]]
    """Base, stride and length of each run of bytes, by group."""
    shapes: list[str] = field(default_factory=list)
    """What each layer's bytes mean."""
    spans: dict[tuple[int, int], None] = field(default_factory=dict)
    """Address and size of each allocation, in the order of their appearance."""


def build_layout(
    kv_cache_config: Any, kv_caches: Mapping[str, Any], vllm_config: Any | None = None
) -> PageLayout:
    """Return the page layout of the tensors that vLLM registers. Raises UnsupportedLayout."""
    reason = config_fault(kv_cache_config)
    if reason is not None:
        raise UnsupportedLayout("attention", reason)
    if not all(hasattr(t, "layer_stride") for t in kv_cache_config.kv_cache_tensors):
        raise UnsupportedLayout(
            "layout", "vLLM before 0.29 (its KV-cache tensors do not say where layers lie)"
        )
    groups = list(kv_cache_config.kv_cache_groups)
    specs = {
        name: (spec, number)
        for number, group in enumerate(groups)
        for name, spec in layer_specs(group)
    }
    cache = _read(kv_cache_config, kv_caches, specs)
    dcp = dcp_size(vllm_config)
    page_tokens = math.lcm(*(block_tokens(group, dcp) for group in groups))
    parts = shares(groups, page_tokens, dcp)
    segments, page_bytes = _lay_out(cache.runs, parts)
    return PageLayout(
        segments=tuple(segments),
        page_bytes=page_bytes,
        num_blocks=int(kv_cache_config.num_blocks),
        page_tokens=page_tokens,
        spans=tuple(cache.spans),
        description=describe(
            kv_cache_config,
            vllm_config,
            cache.shapes,
            [(segment.page_offset, segment.length) for segment in segments],
            segments[-1].column + 1,
            specs,
        ),
        states=sum(share.state for share in parts),
    )


def _read(
    kv_cache_config: Any, kv_caches: Mapping[str, Any], specs: Mapping[str, tuple[Any, int]]
) -> _Cache:
    """Read the tensors of all layers. specs has each layer's spec and the number of its group."""
    cache = _Cache([[] for _ in kv_cache_config.kv_cache_groups])
    num_blocks = int(kv_cache_config.num_blocks)
    for placement in kv_cache_config.kv_cache_tensors:
        for index, name in enumerate(placement.layers):
            tensor, (spec, group) = kv_caches.get(name), specs.get(name, (None, 0))
            if tensor is None or spec is None:
                raise UnsupportedLayout("layout", f"layer {name} was not registered")
            storage = tensor.untyped_storage()
            cache.spans[storage.data_ptr(), storage.nbytes()] = None
            layer = _layer_runs(name, tensor, num_blocks)
            base = storage.data_ptr() + placement.offset + index * placement.layer_stride
            _check_layer(name, spec, layer, base, placement.block_stride)
            cache.runs[group] += layer
            cache.shapes.append(layer_shape(tensor, spec, num_blocks))
    if len(cache.shapes) != len(specs):
        raise UnsupportedLayout(
            "layout", f"{len(specs)} layers, but vLLM placed {len(cache.shapes)}"
        )
    if not all(cache.runs):
        raise UnsupportedLayout("layout", "this rank has no layer of one of the KV-cache groups")
    if len(cache.spans) > 1:
        raise UnsupportedLayout(
            "layout", f"the KV cache is spread over {len(cache.spans)} allocations"
        )
    return cache


def _check_layer(
    name: str, spec: Any, runs: Sequence[tuple[int, int, int]], base: int, stride: int
) -> None:
    """Raise UnsupportedLayout unless a layer's runs are what vLLM's config says of them."""
    if base != min(run[0] for run in runs) or any(each != stride for _, each, _ in runs):
        raise UnsupportedLayout(
            "layout", f"layer {name} does not lie where vLLM's KV-cache config says"
        )
    page = spec.real_page_size_bytes if is_state(spec) else spec.unpadded_page_size_bytes
    payload = sum(length for *_, length in runs)
    if payload != page:
        raise UnsupportedLayout(
            "layout", f"layer {name} has {payload} bytes a block instead of {page}"
        )


def _lay_out(
    runs: Sequence[Sequence[tuple[int, int, int]]], parts: Sequence[Share]
) -> tuple[list[Segment], int]:
    """Return the segments of a page and its bytes, from the runs and the share of each group."""
    segments: list[Segment] = []
    column = end = page_bytes = 0
    for group, share in sorted(enumerate(parts), key=lambda part: part[1].state):
        # Within one allocation the order of addresses is the same in every process, and puts
        # neighbours side by side.
        block = _join(sorted(runs[group]))
        if share.state:
            end = 0
        for _ in range(share.kept + share.state):
            segments += (s._replace(page_offset=end + s.page_offset, column=column) for s in block)
            end = segments[-1].page_offset + segments[-1].length
            page_bytes = max(page_bytes, end)
            column += 1
        if len(segments) > MAX_SEGMENTS:
            raise UnsupportedLayout("layout", f"more than {MAX_SEGMENTS} runs of bytes a page")
    return segments, page_bytes


def _layer_runs(name: str, tensor: Any, num_blocks: int) -> list[tuple[int, int, int]]:
    """Return the runs (base, stride, length) of one layer's view, in no order."""
    shape, size = tuple(tensor.shape), tensor.element_size()
    strides = tuple(stride * size for stride in tensor.stride())
    if len(shape) < 2 or shape[0] < num_blocks or shape[0] % num_blocks != 0 or 0 in shape:
        raise UnsupportedLayout("layout", f"layer {name} has shape {shape} for {num_blocks} blocks")
    ratio = shape[0] // num_blocks
    # The block's inside, outermost stride first: kernel blocks, then whatever axes the view has.
    inner = [(strides[0], ratio), *zip(strides[1:], shape[1:], strict=True)]
    inner = sorted((axis for axis in inner if axis[1] > 1), reverse=True)
    length = size
    while inner and inner[-1][0] == length:
        length *= inner.pop()[1]
    if any(stride < length for stride, _ in inner):
        raise UnsupportedLayout(
            "layout", f"layer {name} overlaps itself: shape {shape}, strides {strides}"
        )
    base, stride = tensor.data_ptr(), strides[0] * ratio
    return [(base + offset, stride, length) for offset in _offsets(inner)]


def _offsets(axes: Sequence[tuple[int, int]]) -> list[int]:
    """Return where the elements of an array begin whose axes have these strides and lengths."""
    return [
        sum(parts) for parts in product(*([i * stride for i in range(n)] for stride, n in axes))
    ]


def _join(runs: Sequence[tuple[int, int, int]]) -> tuple[Segment, ...]:
    """Lay the runs out in a page; runs that are neighbours in the cache become one segment."""
    segments: list[Segment] = []
    end = 0
    for base, stride, length in runs:
        last = segments[-1] if segments else None
        if last is not None and last.stride == stride and last.base + last.length == base:
            segments[-1] = last._replace(length=last.length + length)
        else:
            segments.append(Segment(base, stride, length, end))
        end += length
    return tuple(segments)
