"""Where the bytes of a page lie in vLLM's KV cache.

A page is one block of one rank, all layers. vLLM (0.29 and later) gives each layer a logical view [B', H, N, C] into
one allocation; the physical order differs by backend, and kernels may split blocks (B' = num_blocks * ratio). From
shape and strides we derive the runs of bytes that a block consists of, join neighbours, and check the result against
what the KV cache config says about placement: two descriptions that disagree mean that we do not understand this vLLM,
and a page that is not understood is not cached.

    LBHNC, LBNHC, MLA      one run a layer
    BLHNC, BLNHC, BHLNC    one run a block, all layers
    LHBNC                  one run a layer and head

Pages are opaque: nothing looks inside a run (on the CPU its bytes are in the order of the instruction set's tiles).
Alignment padding at a page's end is not copied.

torch and vLLM are not imported: tensors, config and specs are used as they come.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

# A block of 200 layers with 256 heads a layer, each a run of its own, stays below this.
MAX_SEGMENTS = 1 << 16

# Specs whose blocks hold all tokens of the prefix, position by position, and nothing else. Their subclasses are not
# included: each (sinks, reference windows, hidden states) came with rules of its own.
FULL_ATTENTION_SPECS = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})


class UnsupportedLayout(Exception):
    """This KV cache cannot be kept outside the engine.

    kind: "hybrid" (several kinds of attention or state in one model), "attention" (a kind we do not cover) or "layout"
    (a placement we do not understand).
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


@dataclass(frozen=True)
class PageLayout:
    """How one rank's pages lie in its KV cache. Valid as long as the tensors that it was built from."""

    segments: tuple[Segment, ...]
    page_bytes: int
    num_blocks: int
    page_tokens: int
    spans: tuple[tuple[int, int], ...]  # (address, size) of the allocations that hold the KV cache
    # Everything about the bytes of a page that another instance must share to reuse it; goes into the space.
    description: dict[str, str] = field(default_factory=dict)


def build_layout(kv_cache_config: Any, kv_caches: Mapping[str, Any], vllm_config: Any | None = None) -> PageLayout:
    """The page layout of the tensors that vLLM registers. Raises UnsupportedLayout."""
    fault = _config_fault(kv_cache_config)
    if fault is not None:
        raise fault
    (group,) = kv_cache_config.kv_cache_groups
    specs = dict(_layer_specs(group))
    num_blocks = int(kv_cache_config.num_blocks)

    runs: list[tuple[int, int, int]] = []  # base, stride, length
    shapes: list[str] = []
    spans: dict[tuple[int, int], None] = {}  # in order of appearance
    for placement in kv_cache_config.kv_cache_tensors:
        for index, name in enumerate(placement.layers):
            tensor, spec = kv_caches.get(name), specs.get(name)
            if tensor is None or spec is None:
                raise UnsupportedLayout("layout", f"layer {name} was not registered")
            storage = tensor.untyped_storage()
            spans[storage.data_ptr(), storage.nbytes()] = None
            layer = _layer_runs(name, tensor, num_blocks)
            base = min(run[0] for run in layer)
            expected = storage.data_ptr() + placement.offset + index * placement.layer_stride
            if base != expected or any(stride != placement.block_stride for _, stride, _ in layer):
                raise UnsupportedLayout("layout", f"layer {name} does not lie where vLLM's KV-cache config says")
            payload, page = sum(length for *_, length in layer), spec.unpadded_page_size_bytes
            if payload != page:
                raise UnsupportedLayout("layout", f"layer {name} has {payload} bytes a block instead of {page}")
            runs += layer
            shapes.append(_shape(tensor, spec, num_blocks))
    if len(shapes) != len(specs):
        raise UnsupportedLayout("layout", f"{len(specs)} layers, but vLLM placed {len(shapes)}")

    if len(spans) > 1:
        raise UnsupportedLayout("layout", f"the KV cache is spread over {len(spans)} allocations")
    # Within one allocation the order of addresses is the same in every process, and puts neighbours side by side.
    segments = _join(sorted(runs))
    if len(segments) > MAX_SEGMENTS:
        raise UnsupportedLayout("layout", f"{len(segments)} runs of bytes a block")
    block_size = next(iter(specs.values())).block_size
    return PageLayout(
        segments=segments,
        page_bytes=segments[-1].page_offset + segments[-1].length,
        num_blocks=num_blocks,
        page_tokens=block_size,
        spans=tuple(spans),
        description=_describe(kv_cache_config, vllm_config, shapes, segments, specs),
    )


def _config_fault(kv_cache_config: Any) -> UnsupportedLayout | None:
    """Why pages of this KV cache cannot be kept, judged by its config alone; None if they can."""
    groups = list(kv_cache_config.kv_cache_groups)
    if not groups:
        return UnsupportedLayout("attention", "the model has no KV cache")
    if len(groups) > 1:
        kinds = sorted({type(spec).__name__ for group in groups for _, spec in _layer_specs(group)})
        return UnsupportedLayout("hybrid", f"{len(groups)} KV-cache groups ({', '.join(kinds)})")
    specs = [spec for _, spec in _layer_specs(groups[0])]
    for spec in specs:
        name = type(spec).__name__
        if name not in FULL_ATTENTION_SPECS:
            return UnsupportedLayout("attention", f"{name} is neither full attention nor MLA")
    if len({spec.block_size for spec in specs}) != 1:
        return UnsupportedLayout("hybrid", "layers with different block sizes")
    if getattr(groups[0], "host_resident", False):
        return UnsupportedLayout("attention", "the KV cache lives in host memory of vLLM's own")
    if not all(hasattr(t, "layer_stride") for t in kv_cache_config.kv_cache_tensors):
        return UnsupportedLayout("layout", "vLLM before 0.29 (its KV-cache tensors do not say where layers lie)")
    return None


def _layer_specs(group: Any) -> Iterable[tuple[str, Any]]:
    """Each layer of a group with its own spec."""
    own = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    for name in group.layer_names:
        yield name, group.kv_cache_spec if own is None else own[name]


def _layer_runs(name: str, tensor: Any, num_blocks: int) -> list[tuple[int, int, int]]:
    """The runs (base, stride, length) of one layer's view, in no order."""
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
        raise UnsupportedLayout("layout", f"layer {name} overlaps itself: shape {shape}, strides {strides}")
    offsets = [sum(parts) for parts in product(*([i * stride for i in range(n)] for stride, n in inner))]
    return [(tensor.data_ptr() + offset, strides[0] * ratio, length) for offset in offsets]


def _join(runs: Sequence[tuple[int, int, int]]) -> tuple[Segment, ...]:
    """Lays the runs out in a page, making one segment of runs that are neighbours in the cache as well."""
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


def _shape(tensor: Any, spec: Any, num_blocks: int) -> str:
    """What the bytes of one layer's block mean, as far as vLLM says."""
    ratio = tensor.shape[0] // num_blocks
    mode = getattr(getattr(spec, "kv_quant_mode", None), "name", "")
    inner = "x".join(str(n) for n in tensor.shape[1:])
    kind = type(spec).__name__
    return f"{kind}:{ratio}x{inner}:{str(tensor.dtype).removeprefix('torch.')}:{mode}"


def _describe(
    kv_cache_config: Any,
    vllm_config: Any | None,
    shapes: Sequence[str],
    segments: Sequence[Segment],
    specs: Mapping[str, Any],
) -> dict[str, str]:
    """The description of a layout: short, the same in every process that lays pages out in the same way."""
    cache = getattr(vllm_config, "cache_config", None)
    layout = getattr(kv_cache_config, "kv_cache_layout", None) or getattr(cache, "kv_cache_layout", None) or ""
    page = hashlib.sha256()
    for segment in segments:
        page.update(f"{segment.page_offset}+{segment.length};".encode())
    for shape in shapes:
        page.update(f"{shape};".encode())
    compilation = getattr(vllm_config, "compilation_config", None)
    modules = getattr(compilation, "static_forward_context", None) or {}
    layers = [modules[name] for name in specs if name in modules]
    return {
        "layout": str(layout),
        "layers": str(len(shapes)),
        "page": page.hexdigest(),
        "shapes": _few(shapes),
        "attention": _few(_backend(layer) for layer in layers),
        # CPU backends order the bytes of a block by instruction set; vLLM leaves the name on the layer.
        "isa": _few(str(getattr(layer, "isa", "")) for layer in layers),
    }


def _backend(layer: Any) -> str:
    get = getattr(layer, "get_attn_backend", None)
    backend = get() if callable(get) else getattr(layer, "attn_backend", None)
    name = getattr(backend, "get_name", None)
    return str(name()) if callable(name) else ""


def _few(values: Iterable[str]) -> str:
    """The distinct values in one string of bounded length; many are told apart by the page digest."""
    distinct = sorted(set(values) - {""})
    text = ",".join(distinct)
    return text if len(text) <= 256 else f"{len(distinct)} kinds, {hashlib.sha256(text.encode()).hexdigest()}"
