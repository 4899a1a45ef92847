"""Where the bytes of a page lie in vLLM's KV cache.

A page is one block of one rank, all layers. vLLM may put the layers of a model into several groups,
each with a block table of its own (full attention and sliding windows, say). Then a page is the
tokens of one *scheduler block*, the least common multiple of all groups' blocks. It has one or more
blocks of each group, side by side; each is a *column* of the page.

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

Of a sliding window, a page has only the blocks that the window of some hit can reach. Hits end
where pages do. So a block that ends more than the window before a page's end is never read again,
and vLLM may have freed it by then.

For layers that keep a *state* (Mamba and its kin, in vLLM's mode "align"), vLLM has a block at some
pages' ends only: the state there stands for all tokens before. A state is a page of its own, one
for each group with states, named after the page that it ends (state_names). Its column, one of the
last, lies at the start of that page and alone there.

This module imports neither torch nor vLLM: it uses tensors, config and specs as they come.
"""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

# A block of 200 layers with 256 heads a layer, each a run of its own, stays below this.
MAX_SEGMENTS = 1 << 16

# Specs whose blocks hold all tokens of the prefix, position by position, and nothing else. Their
# subclasses are not included: each of them (sinks, reference windows, hidden states) has rules of
# its own.
FULL_ATTENTION_SPECS = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
# Specs whose blocks vLLM frees once the window has left them behind. Subclasses are not included:
# they keep more than their window, or less.
WINDOW_SPECS = frozenset({"SlidingWindowSpec"})
# Specs whose block is a state of all tokens before its end.
STATE_SPECS = frozenset({"MambaSpec"})
# Flags of a CPU by which kernels choose how to lay a state out.
_CPU_FLAGS = ("asimd", "bf16", "avx2", "avx512f", "avx512_bf16", "amx_tile")


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


class Share(NamedTuple):
    """What one KV-cache group has of every page: the last ``kept`` of its ``blocks`` there."""

    blocks: int
    kept: int  # blocks before these no hit can need
    reach: int  # how many blocks before its end a hit needs; 0: all
    state: bool = False  # a hit needs the block at its end, which has a page of its own


@dataclass(frozen=True)
class PageLayout:
    """How one rank's pages lie in its KV cache.

    Valid as long as the tensors that it was built from.
    """

    segments: tuple[Segment, ...]  # by column, and by page_offset within it
    page_bytes: int
    num_blocks: int
    page_tokens: int
    spans: tuple[tuple[int, int], ...]  # (address, size) of the allocations that hold the KV cache
    # What another instance must have in common to reuse the bytes of a page; part of the space.
    description: dict[str, str] = field(default_factory=dict)
    states: int = 0  # so many of the columns, the last ones, are states: each is alone in its page

    @property
    def column_bytes(self) -> tuple[int, ...]:
        """The bytes of each of a page's blocks.

        The blocks follow one another in the page, except those of states.
        """
        sizes = [0] * (self.segments[-1].column + 1)
        for segment in self.segments:
            sizes[segment.column] += segment.length
        return tuple(sizes)


def shares(kv_cache_groups: Sequence[Any], page_tokens: int) -> tuple[Share, ...]:
    """Return what each group has of a page. page_tokens is a multiple of all block sizes."""
    found = []
    for group in kv_cache_groups:
        block, window = group.kv_cache_spec.block_size, window_tokens(group)
        blocks = page_tokens // block
        if keeps_state(group):
            found.append(Share(blocks, 0, 1, state=True))
            continue
        # Blocks that vLLM needs at a hit; it has the null block in place of all before.
        reach = -(-(window - 1) // block) if window else 0
        found.append(Share(blocks, min(blocks, reach) if window else blocks, reach))
    return tuple(found)


def window_tokens(group: Any) -> int:
    """Return how many tokens a group's sliding window attends to, the newest included.

    0 if it has no window.
    """
    (window,) = {spec.sliding_window for spec in specs_of(group) if _is_window(spec)} or {0}
    return window


def keeps_state(group: Any) -> bool:
    """Report whether a group's layers keep a state, and no KV of single tokens."""
    return any(_is_state(spec) for spec in specs_of(group))


def state_names(digest: bytes, groups: int) -> list[bytes]:
    """Return the names of the states at the end of the page with this digest, one for each
    group."""
    size = len(digest)
    return [
        hashlib.sha256(b"lookaside state %d:" % number + digest).digest()[:size]
        for number in range(groups)
    ]


def _is_window(spec: Any) -> bool:
    return type(spec).__name__ in WINDOW_SPECS


def _is_state(spec: Any) -> bool:
    return type(spec).__name__ in STATE_SPECS


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
        for name, spec in _layer_specs(group)
    }
    num_blocks = int(kv_cache_config.num_blocks)

    runs: list[list[tuple[int, int, int]]] = [[] for _ in groups]  # base, stride, length
    shapes: list[str] = []
    spans: dict[tuple[int, int], None] = {}  # in order of appearance
    for placement in kv_cache_config.kv_cache_tensors:
        for index, name in enumerate(placement.layers):
            tensor, (spec, group) = kv_caches.get(name), specs.get(name, (None, 0))
            if tensor is None or spec is None:
                raise UnsupportedLayout("layout", f"layer {name} was not registered")
            storage = tensor.untyped_storage()
            spans[storage.data_ptr(), storage.nbytes()] = None
            layer = _layer_runs(name, tensor, num_blocks)
            base = min(run[0] for run in layer)
            expected = storage.data_ptr() + placement.offset + index * placement.layer_stride
            if base != expected or any(stride != placement.block_stride for _, stride, _ in layer):
                raise UnsupportedLayout(
                    "layout", f"layer {name} does not lie where vLLM's KV-cache config says"
                )
            page = spec.real_page_size_bytes if _is_state(spec) else spec.unpadded_page_size_bytes
            payload = sum(length for *_, length in layer)
            if payload != page:
                raise UnsupportedLayout(
                    "layout", f"layer {name} has {payload} bytes a block instead of {page}"
                )
            runs[group] += layer
            shapes.append(_shape(tensor, spec, num_blocks))
    if len(shapes) != len(specs):
        raise UnsupportedLayout("layout", f"{len(specs)} layers, but vLLM placed {len(shapes)}")
    if not all(runs):
        raise UnsupportedLayout("layout", "this rank has no layer of one of the KV-cache groups")

    if len(spans) > 1:
        raise UnsupportedLayout("layout", f"the KV cache is spread over {len(spans)} allocations")
    page_tokens = math.lcm(*(group.kv_cache_spec.block_size for group in groups))
    segments: list[Segment] = []
    column = end = page_bytes = 0
    parts = shares(groups, page_tokens)
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
    return PageLayout(
        segments=tuple(segments),
        page_bytes=page_bytes,
        num_blocks=num_blocks,
        page_tokens=page_tokens,
        spans=tuple(spans),
        description=_describe(kv_cache_config, vllm_config, shapes, segments, specs),
        states=sum(share.state for share in parts),
    )


def config_fault(kv_cache_config: Any) -> str | None:
    """Return why pages of this KV cache cannot be kept, going by its config; None if they can."""
    groups = list(kv_cache_config.kv_cache_groups)
    if not groups:
        return "the model has no KV cache"
    for group in groups:
        if not getattr(group, "enable_kv_transfer", True) or getattr(group, "host_resident", False):
            return "the model's KV cache does not lie in transferable blocks of the device's"
        specs = specs_of(group)
        for spec in specs:
            name = type(spec).__name__
            if name not in FULL_ATTENTION_SPECS | WINDOW_SPECS | STATE_SPECS:
                return (
                    f"{name} is not supported, only full attention, MLA, sliding windows and "
                    f"Mamba states are"
                )
            if not getattr(spec, "prefix_cacheable", True):
                return f"{name} of a kind that vLLM does not share between prompts"
            if _is_state(spec) and spec.mamba_cache_mode != "align":
                return (
                    f"vLLM shares states with --mamba-cache-mode align only, not "
                    f"{spec.mamba_cache_mode}"
                )
            if _is_state(spec) and spec.num_speculative_blocks:
                return "states beside speculative decoding are not supported"
            if getattr(spec, "non_causal", False):
                return "attention is not causal, so prefixes cannot be shared"
            if _is_window(spec) and (
                spec.sliding_window < 2 or getattr(spec, "extra_retained_tokens", 0)
            ):
                return (
                    "a sliding window that attends to one token only, or keeps more than it "
                    "attends to"
                )
        alike = {
            (spec.block_size, spec.sliding_window if _is_window(spec) else 0, _is_state(spec))
            for spec in specs
        }
        if len(alike) != 1:
            return "a KV-cache group whose layers have different block sizes or sliding windows"
    if all(keeps_state(group) for group in groups):
        return "a model with states alone, without attention, is not supported"
    return None


def _layer_specs(group: Any) -> Iterable[tuple[str, Any]]:
    """Return the layers of a group by name, each with its own spec."""
    own = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    for name in group.layer_names:
        yield name, group.kv_cache_spec if own is None else own[name]


def specs_of(group: Any) -> list[Any]:
    """Return the specs of a group's layers. A rank of a pipeline may have none of them."""
    own = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return list(own.values()) if own else [group.kv_cache_spec]


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
    offsets = [
        sum(parts) for parts in product(*([i * stride for i in range(n)] for stride, n in inner))
    ]
    return [(tensor.data_ptr() + offset, strides[0] * ratio, length) for offset in offsets]


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


def _shape(tensor: Any, spec: Any, num_blocks: int) -> str:
    """Return what the bytes of one layer's block mean, as far as vLLM says."""
    ratio = tensor.shape[0] // num_blocks
    mode = getattr(getattr(spec, "kv_quant_mode", None), "name", "")
    inner = "x".join(str(n) for n in tensor.shape[1:])
    kind = type(spec).__name__
    if _is_state(spec):
        parts = ",".join(
            f"{shape}:{dtype}" for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        )
        return f"{kind}:{getattr(spec.mamba_type, 'name', '')}:{parts}"
    return f"{kind}:{ratio}x{inner}:{str(tensor.dtype).removeprefix('torch.')}:{mode}"


def _describe(
    kv_cache_config: Any,
    vllm_config: Any | None,
    shapes: Sequence[str],
    segments: Sequence[Segment],
    specs: Iterable[str],
) -> dict[str, str]:
    """Return the description of a layout: short, the same in every process that lays pages out in
    the same way."""
    cache = getattr(vllm_config, "cache_config", None)
    layout = (
        getattr(kv_cache_config, "kv_cache_layout", None)
        or getattr(cache, "kv_cache_layout", None)
        or ""
    )
    page = hashlib.sha256()
    for segment in segments:
        page.update(f"{segment.page_offset}+{segment.length};".encode())
    for shape in shapes:
        page.update(f"{shape};".encode())
    groups = kv_cache_config.kv_cache_groups
    if len(groups) > 1 or window_tokens(groups[0]):
        described = {"groups": _groups(groups, segments[-1].column + 1)}
    else:
        described = {}
    if any(keeps_state(group) for group in groups):
        described["state_isa"] = _cpu_flags()
    compilation = getattr(vllm_config, "compilation_config", None)
    modules = getattr(compilation, "static_forward_context", None) or {}
    layers = [modules[name] for name in specs if name in modules]
    return {
        "layout": str(layout),
        "layers": str(len(shapes)),
        "page": page.hexdigest(),
        "shapes": _few(shapes),
        "attention": _few(_backend(layer) for layer in layers),
        # CPU backends order the bytes of a block by instruction set. vLLM keeps that set's name on
        # the layer.
        "isa": _few(str(getattr(layer, "isa", "")) for layer in layers),
        **described,
    }


def _groups(groups: Sequence[Any], columns: int) -> str:
    """Return the groups in their order, as far as that is short, and a digest of all that is to be
    known of them."""
    kinds: list[str] = []
    exact = hashlib.sha256(f"{columns};".encode())
    for group in groups:
        names = {type(spec).__name__ for spec in specs_of(group)}
        kinds.append(
            f"{'+'.join(sorted(names))}:{group.kv_cache_spec.block_size}:{window_tokens(group)}"
        )
        exact.update(f"{kinds[-1]};{','.join(group.layer_names)};".encode())
    return f"{'|'.join(kinds)[:256]}|{exact.hexdigest()[:32]}"


def _cpu_flags() -> str:
    """Return the kind of CPU: two that differ may keep states in different orders."""
    try:
        with open("/proc/cpuinfo") as info:
            line = next((line for line in info if line.startswith(("flags", "Features"))), "")
    except OSError:
        line = ""
    return " ".join([platform.machine(), *sorted(set(line.split()) & set(_CPU_FLAGS))])


def _backend(layer: Any) -> str:
    get = getattr(layer, "get_attn_backend", None)
    backend = get() if callable(get) else getattr(layer, "attn_backend", None)
    name = getattr(backend, "get_name", None)
    return str(name()) if callable(name) else ""


def _few(values: Iterable[str]) -> str:
    """Return the distinct values in one string of bounded length; many are told apart by the page
    digest."""
    distinct = sorted(set(values) - {""})
    text = ",".join(distinct)
    return (
        text
        if len(text) <= 256
        else f"{len(distinct)} kinds, {hashlib.sha256(text.encode()).hexdigest()}"
    )
