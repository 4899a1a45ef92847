"""Names the space of a secondary tier of vLLM: all that must agree for its blocks to be reusable.

A block of vLLM's CPU tier has the bytes of all ranks. What the fields of the connector's space say
(space.py) holds for it too; what is added is how the block is put together.

vLLM hands a tier its OffloadingConfig only. That has neither the revision of the model nor its
quantization, the seed of the hashes or the adapters. So the VllmConfig that the tier is made from
is looked for where it certainly is: in the frames that call the tier's constructor. Without it the
space is the engine's own, so that nothing is shared and nothing outlives the engine: any doubt is a
miss. The user can vouch for what is not known by the setting ``identity``.

This module imports vLLM only in functions that need it.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from typing import Any

from lookaside import space
from lookaside.blocks import NAME_BYTES

_FIELD_BYTES = 512
_FRAMES = 64
_FORMAT = "lookaside.vllm_tier 1"


def vllm_config_of_callers() -> Any | None:
    """Return the VllmConfig that a caller of this function's caller has as a variable, or None."""
    from vllm.config import VllmConfig

    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None:
            return None
        for value in frame.f_locals.values():
            if isinstance(value, VllmConfig):
                return value
        frame = frame.f_back
    return None


def tier_fields(
    config: Any, vllm_config: Any | None, block_bytes: int, engine_id: str, identity: str
) -> tuple[dict[str, str], list[str]]:
    """Return the fields of a tier's space, and why some of what they name is the engine's own.

    config is vLLM's OffloadingConfig, engine_id what makes a field unique. Values have up to 512
    bytes; longer ones are replaced by a digest.
    """
    own: list[str] = []
    fields: dict[str, str] = {}
    if vllm_config is not None:
        fields.update(_engine(config, vllm_config, engine_id))
        lora = getattr(vllm_config, "lora_config", None) is not None
        inputs = bool(getattr(vllm_config.model_config, "is_multimodal_model", False))
        if lora and not identity:
            own.append("adapters may differ between engines under one name")
        if inputs and not identity:
            own.append("multimodal inputs may have identifiers that clients chose")
        if any(value.startswith("engine:") for value in fields.values()):
            own.append("the hashes or the data type of the KV cache are this engine's own")
    else:
        fields["model"] = space._model_name(config.model.name)
        fields["kv_dtype"] = str(config.model.dtype)
        if not identity:
            own.append("vLLM's configuration was not found")
    if identity:
        fields["identity"] = identity
    if own:
        fields["engine"] = engine_id
    fields.update(_blocks(config, block_bytes))
    fields.update(_device(vllm_config))
    return {key: _short(value) for key, value in fields.items()}, own


def _engine(config: Any, vllm_config: Any, engine_id: str) -> dict[str, str]:
    """What the connector's space has too: model, weights, data types, seed and form of hashes."""
    tokens = config.groups[0].tokens_per_block * config.cache.blocks_per_chunk
    geometry = space.Geometry(tokens, 1, NAME_BYTES, max(1, tokens // config.cache.tokens_per_hash))
    return space.space_fields(vllm_config, 0, 0, heads=1, engine_id=engine_id, geometry=geometry)


def _blocks(config: Any, block_bytes: int) -> dict[str, str]:
    """How a block is put together."""
    parallel = config.parallel
    groups = [
        f"{group.group_id}:{group.tokens_per_block}:{','.join(group.layer_names)}"
        for group in config.groups
    ]
    fields = {
        "client": _FORMAT,
        "block_bytes": str(block_bytes),
        "blocks_per_chunk": str(config.cache.blocks_per_chunk),
        "tokens_per_hash": str(config.cache.tokens_per_hash),
        "worker_bytes_per_block": str(config.worker_kv_bytes_per_block),
        "groups": ";".join(groups),
        "layout": str(getattr(config, "kv_cache_layout", None)),
        "replicated": str(getattr(config, "replicated_layout", False)),
        "canonical": "",
        "parallel": ",".join(
            f"{name}={getattr(parallel, name)}"
            for name in ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
        ),
    }
    if getattr(config, "canonical_layout", False):
        fields["canonical"] = _canonical(fields["layout"])
    return fields


def _canonical(layout: str) -> str:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (
        canonical_format_id,
    )

    return str(canonical_format_id(layout))


def _device(vllm_config: Any | None) -> dict[str, str]:
    """What decides how an attention backend lays out what is inside a block."""
    from vllm.platforms import current_platform

    backend = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    fields = {"attention": str(getattr(backend, "name", backend))}
    try:
        capability = current_platform.get_device_capability()
        fields["device"] = f"{current_platform.device_type} {capability}"
    except Exception:  # a platform that cannot tell
        fields["device"] = str(current_platform.device_type)
    return fields


def with_reset(fields: Mapping[str, str], engine_id: str, number: int) -> dict[str, str]:
    """Return the fields of a space that only this engine has, after its reset of this number."""
    return {**fields, "reset": f"{engine_id} {number}"}


def _short(value: str) -> str:
    if len(value.encode()) <= _FIELD_BYTES:
        return value
    return f"sha256:{hashlib.sha256(value.encode()).hexdigest()}"
