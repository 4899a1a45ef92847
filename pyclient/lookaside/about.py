"""What a session tells operators of itself: releases and settings that decide nothing.

The sidecar shows them, and `lookaside doctor` compares them with what they should be. None of it is
a secret: of the seed of the hashes it says only whether there is one.

This module imports neither torch nor vLLM until a function needs them.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import platform
import sys
from typing import Any

from lookaside import __version__, interface, space
from lookaside.config import Config

MAX_KEYS = 32
"""As many as a Hello may have (wire.MaxAbout)."""
_VALUE_BYTES = 512

# Settings that are told if they are not the default. Others may name files or arguments.
_TOLD = frozenset({
    "autostart",
    "chunk_tokens",
    "compress",
    "handover_timeout_ms",
    "load_in_step_ms",
    "load_in_step_share",
    "load_threads",
    "load_timeout_ms",
    "lookup_timeout_max_ms",
    "lookup_timeout_ms",
    "lookup_wait_ms",
    "lookup_wait_step_ms",
    "promotion_timeout_ms",
    "reset_timeout_ms",
    "save_decode",
    "store_timeout_ms",
    "watch_weights",
})  # fmt: skip


def of_engine(config: Config, vllm_config: Any, kv_cache_config: Any) -> dict[str, str]:
    """Return what either role tells: short strings by rising key. Never raises."""
    told: dict[str, str] = {}
    for name, find in _FINDERS.items():
        try:
            value = find(config, vllm_config, kv_cache_config)
        except Exception:  # a vLLM that is different: what it does not say is left out
            continue
        if value:
            text = value.encode()[:_VALUE_BYTES].decode(errors="ignore")
            told[name] = text.replace("\0", "")
    return dict(sorted(told.items())[:MAX_KEYS])


def _block_tokens(config: Config, vllm_config: Any, kv_cache_config: Any) -> str:
    return str(getattr(vllm_config.cache_config, "block_size", ""))


def _own_tokens(config: Config, vllm_config: Any, kv_cache_config: Any) -> str:
    """Return how many tokens vLLM's own cache has room for, where all layers keep all of them."""
    if space.is_hybrid(kv_cache_config):
        return ""
    geometry, _ = space.geometry(config, vllm_config, kv_cache_config)
    return str(getattr(kv_cache_config, "num_blocks", 0) * geometry.page_tokens)


def _device(config: Config, vllm_config: Any, kv_cache_config: Any) -> str:
    platforms: Any = importlib.import_module("vllm.platforms")
    kind = str(platforms.current_platform.device_type)
    return kind if kind == "cpu" else f"{kind} {platforms.current_platform.get_device_name()}"


def _failure_policy(config: Config, vllm_config: Any, kv_cache_config: Any) -> str:
    return str(getattr(vllm_config.kv_transfer_config, "kv_load_failure_policy", "recompute"))


def _kv_role(config: Config, vllm_config: Any, kv_cache_config: Any) -> str:
    return str(getattr(vllm_config.kv_transfer_config, "kv_role", ""))


def _kv_connector(config: Config, vllm_config: Any, kv_cache_config: Any) -> str:
    return str(getattr(vllm_config.kv_transfer_config, "kv_connector", ""))


def _hash_seed(config: Config, vllm_config: Any, kv_cache_config: Any) -> str:
    """Return whether vLLM derives the seed of its hashes from one that is set."""
    return "not set" if os.environ.get("PYTHONHASHSEED") is None else "set"


def _max_model_len(config: Config, vllm_config: Any, kv_cache_config: Any) -> str:
    return str(getattr(vllm_config.model_config, "max_model_len", ""))


def _sleep_mode(config: Config, vllm_config: Any, kv_cache_config: Any) -> str:
    return "on" if getattr(vllm_config.model_config, "enable_sleep_mode", False) else "off"


def _settings(config: Config, vllm_config: Any, kv_cache_config: Any) -> str:
    """Return the settings that are not the default ones."""
    return ", ".join(
        f"{field.name}={getattr(config, field.name)}"
        for field in sorted(dataclasses.fields(config), key=lambda field: field.name)
        if field.name in _TOLD and getattr(config, field.name) != field.default
    )


def _notes(config: Config, vllm_config: Any, kv_cache_config: Any) -> str:
    """Return what is off or not tested with this vLLM."""
    return "; ".join(interface.notes())


def _vllm(config: Config, vllm_config: Any, kv_cache_config: Any) -> str:
    from vllm import __version__ as version

    return str(version)


def _torch(config: Config, vllm_config: Any, kv_cache_config: Any) -> str:
    return str(getattr(sys.modules.get("torch"), "__version__", ""))


_FINDERS = {
    "block_tokens": _block_tokens,
    "chunk_tokens": lambda config, *_: str(config.chunk_tokens),
    "device": _device,
    "endpoint": lambda config, *_: config.endpoint,
    "failure_policy": _failure_policy,
    "hash_seed": _hash_seed,
    "kv_connector": _kv_connector,
    "kv_role": _kv_role,
    "lookaside": lambda *_: __version__,
    "max_model_len": _max_model_len,
    "notes": _notes,
    "own_tokens": _own_tokens,
    "python": lambda *_: platform.python_version(),
    "settings": _settings,
    "sleep_mode": _sleep_mode,
    "torch": _torch,
    "vllm": _vllm,
}
"""How each is found, by its name."""
