"""A storage backend for SGLang's HiCache that keeps its pages in a sidecar.

SGLang copies pages between the GPU and a pool in host memory; this backend copies them between that
pool and a sidecar's arena. SGLang loads it by name::

    --enable-hierarchical-cache --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "lookaside",
        "module_path": "lookaside.hicache", "class_name": "LookasideStorage", "interface_v1": 1}'

docs/sglang.md has the settings, which are further keys of the same object.

A page is one value of a space, and its key is SGLang's hash of the page, which covers the whole
prefix. The space's name is made of all that must agree for bytes to be reusable: model and weights,
data type, layout, page size, layers and heads, and the rank among those whose pages differ. Ranks
with the same pages (MLA) share one space, of which SGLang has one rank write.

**Copies.** ``batch_get_v1`` and ``batch_set_v1`` move whole batches between the host pool and the
arena, in native code without the GIL; there is no other copy. The older calls move one tensor each.

**Failures.** Nothing raises because of a sidecar: what is not there is a miss, and what cannot be
stored was not. Without a sidecar a call waits ``timeout_s`` once, and later ones not at all until
it is back.

Any thread may call the methods; SGLang has one for reading and one for writing.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import (  # pyright: ignore[reportMissingImports]
    HiCacheStorage,
)

from lookaside.client import Allocation, Client, NoRoom, SidecarUnavailable, Space, Value
from lookaside.config import ConfigError
from lookaside.copies import CpuCopies
from lookaside.layout import PageLayout, Segment
from lookaside.ratelog import RateLimitedLog

logger = logging.getLogger("lookaside.hicache")

# Room, or leases, that one call has at a time.
_PIECE_BYTES = 32 << 20
# How long nobody asks a sidecar that did not answer.
_ABSENT_S = 1.0
_FORMAT = "lookaside.hicache 1"

# Settings, beside those of SGLang: name, type, default.
_SETTINGS: dict[str, tuple[type | tuple[type, ...], Any]] = {
    "endpoint": (str, ""),
    "timeout_s": ((int, float), 2.0),
    "tenant": (str, ""),
    "identity": (str, ""),
    "copy_threads": (int, 2),
    "autostart": (bool, False),
    "binary": (str, "lookaside"),
    "sidecar_args": ((list, str), ()),
}
# Keys that are SGLang's own.
_SGLANG = ("backend_name", "module_path", "class_name", "tp_lcm_size")
_SGLANG_PREFIXES = ("interface_", "prefetch_", "hicache_", "linker_")
# What a pool may be made of, by attribute: the memory that pages are in.
_BUFFERS = (
    *("kv_buffer", "k_buffer", "v_buffer", "index_k_buffer", "index_k_scale_buffer"),
    *("k_data_refs", "v_data_refs", "data_refs"),
)
# What of a pool decides what its bytes mean.
_SHAPE = (
    *("layout", "dtype", "store_dtype", "page_size", "layer_num", "start_layer", "end_layer"),
    *("head_num", "head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim"),
    *("logical_page_size", "dcp_size", "size_per_token", "storage_format_tag"),
)

_T = TypeVar("_T")


class LookasideStorage(HiCacheStorage):
    """See the module's comment. Made by SGLang, which then registers its host pool."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        """kwargs is what SGLang hands to dynamic backends besides; nothing of it is used.

        Raises ConfigError for a setting that cannot be used. Does not connect.
        """
        self._config = storage_config
        self._settings = _settings(getattr(storage_config, "extra_config", None) or {})
        if getattr(storage_config, "should_split_heads", False):
            raise ConfigError(
                "LookasideStorage does not split pages by heads: remove tp_lcm_size from "
                "--hicache-storage-backend-extra-config"
            )
        use = self._settings
        arguments = use["sidecar_args"]
        self._client = Client(
            use["endpoint"] or None,
            autostart=use["autostart"],
            binary=use["binary"],
            sidecar_arguments=arguments.split() if isinstance(arguments, str) else list(arguments),
            tenant=use["tenant"],
            timeout_s=float(use["timeout_s"]),
        )
        self._log = RateLimitedLog(logger)
        self._absent_until = 0.0
        self._space: Space | None = None
        self._copies: CpuCopies | None = None
        self._page_size = 1
        self._page_bytes = 0

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the host pool that pages are copied from and to, and connect.

        Raises ConfigError for a pool whose pages do not lie at even distances: SGLang then starts
        without a backend that could not work.
        """
        super().register_mem_pool_host(mem_pool_host)
        layout = page_layout(mem_pool_host)
        self._page_size = _page_tokens(mem_pool_host)
        self._page_bytes = layout.page_bytes
        self._copies = CpuCopies(layout, self._settings["copy_threads"])
        fields = space_fields(
            self._config, mem_pool_host, self._settings["identity"], self._page_bytes
        )
        digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
        name = os.path.basename(fields["model"].rstrip("/"))[:100]
        self._space = self._client.space(
            f"sglang {name} {digest}".encode()[-200:].decode(errors="ignore"),
            self._page_bytes,
            self._copies,
        )

    # ---- pages of the host pool ----

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Copy pages into the host pool; return for each whether it is there now."""
        found: list[bool] = []
        for some, blocks in self._pieces(keys, host_indices):
            found += self._guard(lambda s=some, b=blocks: self._load(s, b), [False] * len(some))
        return found

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Copy pages out of the host pool; return for each whether the sidecar has it now."""
        stored: list[bool] = []
        for some, blocks in self._pieces(keys, host_indices):
            stored += self._guard(lambda s=some, b=blocks: self._save(s, b), [False] * len(some))
        return stored

    def _pieces(self, keys: Sequence[str], host_indices: Any) -> Iterator[tuple[list[str], Any]]:
        """Cut a batch so that a piece needs little of the arena at a time."""
        size = self._page_size
        if len(host_indices) != len(keys) * size:
            raise ValueError(
                f"{len(host_indices)} host indices for {len(keys)} pages of {size} tokens"
            )
        # Of each page the index of its first token.
        firsts = torch.as_tensor(host_indices)[::size].to("cpu", torch.int64).numpy()
        if (firsts % size).any():
            raise ValueError(f"host indices that are not multiples of the page of {size} tokens")
        blocks = np.ascontiguousarray(firsts // size)
        count = max(1, _PIECE_BYTES // max(1, self._page_bytes))
        for begin in range(0, len(keys), count):
            yield list(keys[begin : begin + count]), blocks[begin : begin + count]

    def _load(self, keys: list[str], blocks: np.ndarray) -> list[bool]:
        assert self._space is not None and self._copies is not None
        values = self._space.retrieve_many(_key(key) for key in keys)
        try:
            good = [v is not None and len(v) == self._page_bytes for v in values]
            held = [v for v, ok in zip(values, good, strict=True) if v is not None and ok]
            if held and not self._copy(self._copies.scatter_now, blocks[np.array(good)], held):
                return [False] * len(keys)
            return good
        finally:
            for value in values:
                if value is not None:
                    value.close()

    def _save(self, keys: list[str], blocks: np.ndarray) -> list[bool]:
        assert self._space is not None and self._copies is not None
        rooms = self._space.alloc_many((_key(key) for key in keys), self._page_bytes)
        new = np.array([not room.held for room in rooms], dtype=bool)
        try:
            fresh = [room for room in rooms if not room.held]
            if fresh and not self._copy(self._copies.gather, blocks[new], fresh):
                return [room.held for room in rooms]
            return [_stored(room) for room in rooms]
        finally:
            for room in rooms:
                room.abort()  # of no effect once it is stored

    def _copy(
        self, copy: Callable[..., Any], blocks: np.ndarray, places: Sequence[Allocation | Value]
    ) -> bool:
        addresses = np.array([place.address for place in places], dtype=np.uint64)
        ticket = copy(np.ascontiguousarray(blocks), addresses)
        while not ticket.wait(1.0):
            pass
        if ticket.error is not None:
            self._log.warning("copy", "pages could not be copied: %s", ticket.error)
        return ticket.error is None

    # ---- what exists ----

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return how many pages are there from the first one on, up to the first that is not."""
        space = self._space
        if space is None:
            return 0
        count = 0
        for begin in range(0, len(keys), 16):
            some = [_key(key) for key in keys[begin : begin + 16]]
            there = self._guard(lambda s=some: space.exists_many(s), [False])
            count += there.index(False) if False in there else len(there)
            if False in there:
                break
        return count

    # ---- one tensor each ----

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Copy a page into a tensor, or into a new one of bytes; None if it is not there."""
        return self._guard(lambda: self._get(key, target_location), None)

    def _get(self, key: str, target: torch.Tensor | None) -> torch.Tensor | None:
        assert self._space is not None
        value = self._space.retrieve(_key(key))
        if value is None:
            return None
        with value:
            if target is None:
                target = torch.empty(len(value), dtype=torch.uint8)
            if target.nbytes != len(value) or not target.is_contiguous():
                self._log.warning(
                    "size", "a page of %d bytes does not fit %d", len(value), target.nbytes
                )
                return None
            ctypes.memmove(target.data_ptr(), value.address, len(value))  # without the GIL
        return target

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        """Copy pages into tensors; None for each that is not there."""
        targets = target_locations if target_locations is not None else [None] * len(keys)
        return [self.get(key, target) for key, target in zip(keys, targets, strict=True)]

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store a tensor's bytes; return whether the sidecar has the page now."""
        return value is not None and self._guard(lambda: self._set(key, value), False)

    def _set(self, key: str, value: torch.Tensor) -> bool:
        assert self._space is not None
        source = value.contiguous()
        with self._space.alloc(_key(key), source.nbytes) as room:
            if not room.held:
                ctypes.memmove(room.address, source.data_ptr(), source.nbytes)
        return True

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store tensors; return whether the sidecar has all of them."""
        return values is not None and all(
            self.set(key, value) for key, value in zip(keys, values, strict=True)
        )

    # ---- the rest ----

    def clear(self) -> bool:
        """Drop all pages of this rank's space, for all who share it."""
        space = self._space
        return space is not None and self._guard(lambda: space.clear() >= 0, False)

    def get_stats(self) -> None:
        """Return None: the sidecar has the metrics."""

    def close(self) -> None:
        """End the session. What is stored stays."""
        self._client.close()
        if self._copies is not None:
            self._copies.close()

    def _guard(self, call: Callable[[], _T], otherwise: _T) -> _T:
        """Return what a call does, or otherwise if the sidecar is in the way."""
        if self._space is None or time.monotonic() < self._absent_until:
            return otherwise
        try:
            return call()
        except SidecarUnavailable as error:
            self._absent_until = time.monotonic() + _ABSENT_S
            self._log.warning("absent", "no pages are stored or found: %s", error)
        except NoRoom as error:
            self._log.warning("room", "%s", error)
        except Exception:
            self._log.warning("failed", "a call failed", exc_info=True)
        return otherwise


def _stored(room: Allocation) -> bool:
    try:
        room.store()
        return True
    except SidecarUnavailable:
        return False


def _key(key: str) -> bytes:
    return key.encode()


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    """Return checked settings. Raises ConfigError, which names the one that cannot be used."""
    use = {name: default for name, (_, default) in _SETTINGS.items()}
    for name, value in given.items():
        if name in _SGLANG or name.startswith(_SGLANG_PREFIXES):
            continue
        if name not in _SETTINGS:
            raise ConfigError(
                f"--hicache-storage-backend-extra-config: LookasideStorage has no setting {name!r};"
                f" it has {', '.join(_SETTINGS)}"
            )
        wanted = _SETTINGS[name][0]
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            raise ConfigError(f"--hicache-storage-backend-extra-config: {name}={value!r}")
        use[name] = value
    if use["timeout_s"] <= 0 or use["copy_threads"] < 1:
        raise ConfigError("timeout_s must be above 0, and copy_threads at least 1")
    return use


def _page_tokens(pool: Any) -> int:
    """Return the tokens of a page as host indices count them."""
    return int(getattr(pool, "logical_page_size", None) or pool.page_size)


def page_layout(pool: Any) -> PageLayout:
    """Return where the bytes of a host pool's pages lie. Raises ConfigError if that is not regular.

    SGLang tells the addresses of any page. From those of the first two follows where all others
    are; the last one is compared.
    """
    tokens = _page_tokens(pool)
    pages = int(getattr(pool, "logical_size", None) or pool.size) // tokens
    if not hasattr(pool, "get_page_buffer_meta") or pages < 1:
        raise ConfigError(
            f"LookasideStorage: {type(pool).__name__} with the layout "
            f"{getattr(pool, 'layout', None)} does not tell where its pages lie"
        )

    def of(page: int) -> tuple[list[int], list[int]]:
        begin = page * tokens
        return pool.get_page_buffer_meta(torch.arange(begin, begin + tokens))

    first, sizes = of(0)
    second = of(1)[0] if pages > 1 else [at + size for at, size in zip(first, sizes, strict=True)]
    last, last_sizes = of(pages - 1)
    segments: list[Segment] = []
    offset = 0
    for at, then, end, size in zip(first, second, last, sizes, strict=True):
        if end != at + (then - at) * (pages - 1) or then - at < size or last_sizes != sizes:
            raise ConfigError(
                f"LookasideStorage: pages of {type(pool).__name__} with the layout {pool.layout} "
                "do not lie at even distances: choose another --hicache-mem-layout"
            )
        segments.append(Segment(int(at), int(then - at), int(size), offset))
        offset += int(size)
    return PageLayout(
        segments=tuple(segments),
        page_bytes=offset,
        num_blocks=pages,
        page_tokens=tokens,
        spans=tuple(_spans(pool)),
    )


def _spans(pool: Any) -> Iterator[tuple[int, int]]:
    """Return address and size of the memory of a pool."""
    for name in _BUFFERS:
        value = getattr(pool, name, None)
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and tensor.nbytes:
                yield tensor.data_ptr(), tensor.nbytes


def space_fields(config: Any, pool: Any, identity: str, page_bytes: int) -> dict[str, str]:
    """Return all that must agree for the bytes of a page to be reusable."""
    model = str(config.model_name or "")
    fields = {
        "format": _FORMAT,
        "model": os.path.realpath(model) if os.path.isdir(model) else model,
        "weights": weights_of(model),
        "identity": identity,
        "pool": type(pool).__name__,
        "page_bytes": str(page_bytes),
        "mla": str(bool(config.is_mla_model)),
        "pp": f"{config.pp_rank}/{config.pp_size}",
        "cp": f"{getattr(config, 'attn_cp_rank', 0)}/{getattr(config, 'attn_cp_size', 1)}",
        "dcp": f"{getattr(config, 'dcp_rank', 0)}/{getattr(config, 'dcp_size', 1)}",
    }
    if not config.is_mla_model:
        fields["tp"] = f"{config.tp_rank}/{config.tp_size}"
    for name in _SHAPE:
        fields[f"pool.{name}"] = str(getattr(pool, name, None))
    return fields


def weights_of(model: str) -> str:
    """Return what tells two sets of weights under one name apart, as far as that is cheap.

    Of a directory, the names, sizes and times of its weights and the bytes of its configuration; of
    a repository, the commit that the local cache has of its main branch.
    """
    if os.path.isdir(model):
        seen = hashlib.sha256()
        for entry in sorted(os.scandir(model), key=lambda entry: entry.name):
            if entry.name.endswith((".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")):
                status = entry.stat()
                seen.update(f"{entry.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
            elif entry.name in ("config.json", "params.json", "hf_quant_config.json"):
                with open(entry.path, "rb") as file:
                    seen.update(f"{entry.name}\0".encode() + file.read())
        return f"files:{seen.hexdigest()}"
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json")
    except Exception:  # not the name of a repository
        return ""
    return f"commit:{os.path.basename(os.path.dirname(found))}" if isinstance(found, str) else ""
