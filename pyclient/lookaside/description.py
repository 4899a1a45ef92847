"""What the bytes of a page mean: what another instance must have in common to reuse them.

This module imports neither torch nor vLLM: it uses tensors, config and specs as they come.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Sequence
from typing import Any

from lookaside.kvgroups import dcp_size, is_state, keeps_state, specs_of, window_tokens

# Flags of a CPU by which kernels choose how to lay a state out.
_CPU_FLAGS = ("asimd", "bf16", "avx2", "avx512f", "avx512_bf16", "amx_tile")


def layer_shape(tensor: Any, spec: Any, num_blocks: int) -> str:
    """Return what the bytes of one layer's block mean, as far as vLLM says."""
    ratio = tensor.shape[0] // num_blocks
    mode = getattr(getattr(spec, "kv_quant_mode", None), "name", "")
    inner = "x".join(str(n) for n in tensor.shape[1:])
    kind = type(spec).__name__
    if is_state(spec):
        parts = ",".join(
            f"{shape}:{dtype}" for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        )
        return f"{kind}:{getattr(spec.mamba_type, 'name', '')}:{parts}"
    return f"{kind}:{ratio}x{inner}:{str(tensor.dtype).removeprefix('torch.')}:{mode}"


def describe(
    kv_cache_config: Any,
    vllm_config: Any | None,
    shapes: Sequence[str],
    runs: Iterable[tuple[int, int]],
    columns: int,
    specs: Iterable[str],
) -> dict[str, str]:
    """Return the description of a layout: short, the same in every process that lays pages out in
    the same way.

    shapes has layer_shape of each layer. runs has the offset and length of each run of bytes in a
    page, which has so many columns. specs has the names of the layers.
    """
    cache = getattr(vllm_config, "cache_config", None)
    layout = (
        getattr(kv_cache_config, "kv_cache_layout", None)
        or getattr(cache, "kv_cache_layout", None)
        or ""
    )
    page = hashlib.sha256()
    for offset, length in runs:
        page.update(f"{offset}+{length};".encode())
    for shape in shapes:
        page.update(f"{shape};".encode())
    groups = kv_cache_config.kv_cache_groups
    if len(groups) > 1 or window_tokens(groups[0]):
        described = {"groups": _groups(groups, columns)}
    else:
        described = {}
    if any(keeps_state(group) for group in groups):
        described["state_isa"] = _cpu_flags()
    if dcp_size(vllm_config) > 1:
        parallel = getattr(vllm_config, "parallel_config", None)
        # How many tokens in a row are one rank's. vLLM prefers the older name of the setting.
        older = getattr(parallel, "dcp_kv_cache_interleave_size", 1)
        newer = getattr(parallel, "cp_kv_cache_interleave_size", 1)
        described["interleave"] = str(older if older > 1 else newer)
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
