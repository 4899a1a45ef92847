"""What the tests of the HiCache backend need of SGLang: the real thing, or its recorded interface.

Real: where ``sglang`` can be imported, or LOOKASIDE_SGLANG names directories with it and what it
needs, by colons. docs/sglang.md has the commands; no GPU is needed. Recorded: the interface of
sglang 0.5.23, as far as the backend is called through it, and pools with its attributes and
layouts. With the real one the tests also compare the two.
"""

from __future__ import annotations

import inspect
import os
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

MODULE = "sglang.srt.mem_cache.hicache_storage"
LAYOUTS = ("layer_first", "page_first", "page_first_direct")


def install() -> bool:
    """Make the interface importable; return whether it is the real one."""
    more = [each for each in os.environ.get("LOOKASIDE_SGLANG", "").split(":") if each]
    sys.path += [each for each in more if each not in sys.path]
    try:
        __import__(MODULE)
        return hasattr(sys.modules[MODULE], "HiCacheFile")
    except ImportError as error:
        if more:
            raise
        assert error.name is not None
    parts = MODULE.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        sys.modules.setdefault(name, ModuleType(name))
    vars(sys.modules[MODULE]).update(HiCacheStorage=Storage, HiCacheStorageConfig=Config)
    return False


@dataclass
class Config:
    """Recorded: HiCacheStorageConfig."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    enable_storage_metrics: bool
    is_page_first_layout: bool
    model_name: str | None
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    dp_rank: int = 0
    extra_config: dict | None = None
    dcp_size: int = 1
    dcp_rank: int = 0
    logical_page_size: int | None = None


class Storage(ABC):
    """Recorded: HiCacheStorage."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def batch_get_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> Any:
        raise NotImplementedError

    def batch_set_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> Any:
        raise NotImplementedError

    @abstractmethod
    def get(self, key: Any, target_location: Any = None, target_sizes: Any = None) -> Any:
        raise NotImplementedError

    @abstractmethod
    def batch_get(self, keys: Any, target_locations: Any = None, target_sizes: Any = None) -> Any:
        raise NotImplementedError

    @abstractmethod
    def set(
        self, key: Any, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> Any:
        raise NotImplementedError

    @abstractmethod
    def batch_set(
        self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> Any:
        raise NotImplementedError

    @abstractmethod
    def exists(self, key: Any) -> Any:
        raise NotImplementedError

    def batch_exists(self, keys: Any, extra_info: Any = None) -> Any:
        raise NotImplementedError

    def clear(self) -> None:
        raise NotImplementedError

    def get_stats(self) -> Any:
        raise NotImplementedError


METHODS = (
    *("batch_get_v1", "batch_set_v1", "get", "batch_get", "set", "batch_set"),
    *("exists", "batch_exists", "clear", "get_stats"),
)


def parameters(of: Any, method: str) -> list[tuple[str, Any, Any]]:
    """Name, kind and default of each parameter of a method."""
    found = inspect.signature(getattr(of, method)).parameters.values()
    return [(each.name, each.kind, each.default) for each in found]


def config(**values: Any) -> Any:
    """A HiCacheStorageConfig of a single rank, with changes."""
    made = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0,
        "attn_cp_size": 1, "is_mla_model": False, "enable_storage_metrics": False,
        "is_page_first_layout": False, "model_name": "org/model", **values,
    }  # fmt: skip
    return sys.modules[MODULE].HiCacheStorageConfig(**made)  # type: ignore[attr-defined]


PAGE, LAYERS, HEADS, DIM, PAGES = 4, 3, 2, 8, 40


def pool(real: bool, mla: bool, layout: str, pages: int = PAGES) -> Any:
    """A host pool of 16-bit floats."""
    if real:
        return _real_mla(layout, pages) if mla else _real_mha(layout, pages)
    return _recorded(mla, layout, pages)


def _real_mha(layout: str, pages: int) -> Any:
    from sglang.srt.mem_cache import device_pool_info as info  # type: ignore[import-not-found]
    from sglang.srt.mem_cache.pool_host.mha import (  # type: ignore[import-not-found]
        MHATokenToKVPoolHost,
    )

    k = tuple(torch.zeros(PAGE, HEADS, DIM, dtype=torch.bfloat16) for _ in range(LAYERS))
    v = tuple(torch.zeros(PAGE, HEADS, DIM, dtype=torch.bfloat16) for _ in range(LAYERS))
    pointers = [torch.tensor([t.data_ptr() for t in ts], dtype=torch.uint64) for ts in (k, v)]
    device = info.MHABufferInfo(
        buffers=info.KVBuffers(
            k=k, v=v, k_data_ptrs=pointers[0], v_data_ptrs=pointers[1],
            layout=next(iter(info.KVBufferLayout)),
        ),
        page_size=PAGE, head_num=HEADS, head_dim=DIM, v_head_dim=DIM,
        dtype=torch.bfloat16, device=torch.device("cpu"),
    )  # fmt: skip
    return MHATokenToKVPoolHost(
        device, 2.0, 0, PAGE, layout, pin_memory=False, device_capacity_tokens=PAGE,
        start_layer=0, end_layer=LAYERS, host_token_capacity=pages * PAGE,
    )  # fmt: skip


def _real_mla(layout: str, pages: int) -> Any:
    from sglang.srt.mem_cache import device_pool_info as info  # type: ignore[import-not-found]
    from sglang.srt.mem_cache.pool_host.mla import (  # type: ignore[import-not-found]
        MLATokenToKVPoolHost,
    )

    rows = tuple(torch.zeros(PAGE, 1, DIM, dtype=torch.bfloat16) for _ in range(LAYERS))
    device = info.MLABufferInfo(
        buffers=rows,
        data_ptrs=torch.tensor([t.data_ptr() for t in rows], dtype=torch.uint64),
        layer_indices=tuple(range(LAYERS)), device_layer_num=LAYERS, page_size=PAGE,
        kv_lora_rank=DIM - 2, qk_rope_head_dim=2, kv_cache_dim=DIM,
        dtype=torch.bfloat16, device=torch.device("cpu"),
    )  # fmt: skip
    return MLATokenToKVPoolHost(
        device, 2.0, 0, PAGE, layout, pin_memory=False, device_capacity_tokens=PAGE,
        start_layer=0, end_layer=LAYERS, target_layer_num=LAYERS,
        host_token_capacity=pages * PAGE,
    )  # fmt: skip


def _recorded(mla: bool, layout: str, pages: int) -> Any:
    tokens, parts = pages * PAGE, 1 if mla else 2
    heads, dim = (1, DIM) if mla else (HEADS, DIM)
    shape = {
        "layer_first": (parts, LAYERS, tokens, heads, dim),
        "page_first": (parts, tokens, LAYERS, heads, dim),
        "page_first_direct": (parts, pages, LAYERS, PAGE, heads, dim),
    }[layout]
    made = SimpleNamespace(
        layout=layout, dtype=torch.bfloat16, page_size=PAGE, layer_num=LAYERS, start_layer=0,
        end_layer=LAYERS, head_num=heads, head_dim=dim, size=tokens, page_num=pages,
        kv_buffer=torch.zeros(shape, dtype=torch.bfloat16),
    )  # fmt: skip
    row = heads * dim * 2

    def get_page_buffer_meta(indices: Any) -> tuple[list[int], list[int]]:
        pointers: list[int] = []
        base, part = made.kv_buffer.data_ptr(), made.kv_buffer[0].nbytes
        for first in indices.tolist()[::PAGE]:
            if layout == "layer_first":
                for layer in range(LAYERS):
                    at = base + (layer * tokens + first) * row
                    pointers += [at + p * part for p in range(parts)]
            else:
                pointers += [base + first * LAYERS * row + p * part for p in range(parts)]
        size = PAGE * row * (1 if layout == "layer_first" else LAYERS)
        return pointers, [size] * len(pointers)

    made.get_page_buffer_meta = get_page_buffer_meta
    return made
