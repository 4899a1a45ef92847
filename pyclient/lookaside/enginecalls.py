"""Has the scheduler role told of vLLM's calls that may change the weights.

vLLM tells its connector neither that weights are loaded anew nor why its cache is reset. All that
changes weights from outside goes through two methods of its engine: collective_rpc, which calls a
method of all workers, and _reset_caches, which ends every pause and precedes every sleep. Both are
wrapped, in the process of the scheduler role.

The engine itself is found on the stack: it makes its scheduler, and that makes the role.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lookaside.scheduler.epochs import Epochs

# Below "vllm", so that its handlers show it.
logger = logging.getLogger("vllm.lookaside")

# Methods of vLLM's workers that leave the weights as they are. One that is missing here costs a
# digest of the weights, and nothing else.
_HARMLESS = frozenset({
    "add_lora", "check_health", "checkpoint_prepare", "compute_weight_checksums",
    "determine_available_memory", "execute_dummy_batch", "get_cache_block_size_bytes",
    "get_compilation_match_table", "get_encoder_timing_stats",
    "get_kv_connector_handshake_metadata", "get_kv_cache_spec", "get_model_inspection",
    "get_supported_tasks", "init_weight_transfer_engine", "list_loras", "pin_lora", "profile",
    "remove_lora", "reset_encoder_cache", "reset_mm_cache", "save_sharded_state",
    "save_tensorized_model", "shutdown_weight_transfer_engine", "supports_draft_weight_updates",
    "synchronize_device", "update_config", "update_max_model_len",
})  # fmt: skip

_NEEDED = ("collective_rpc", "_reset_caches", "model_executor")

_wrapping = threading.Lock()


def follow() -> Any:
    """Return the engine whose scheduler is being made, and have its calls told from now on.

    None if no engine of vLLM is on the stack, or if it lacks the methods to wrap, which is logged.
    """
    from vllm.v1.engine.core import EngineCore

    engine = _on_stack(EngineCore)
    if engine is None:
        return None
    if not all(hasattr(engine, name) for name in _NEEDED):
        logger.warning(
            "lookaside: this vLLM's engine cannot be followed; a pause clears what is stored, and "
            "new weights must be named, or the cache reset"
        )
        return None
    with _wrapping:
        if not hasattr(EngineCore.collective_rpc, "lookaside"):
            _wrap(EngineCore)
    return engine


def _on_stack(kind: type) -> Any:
    frame = sys._getframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, kind):
            return found
        frame = frame.f_back
    return None


def _wrap(engine_class: Any) -> None:
    rpc, reset = engine_class.collective_rpc, engine_class._reset_caches

    @functools.wraps(rpc)
    def collective_rpc(engine: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        if method not in _HARMLESS:
            try:
                for epochs in _epochs_of(engine):
                    epochs.expect_change()
            except Exception:
                logger.exception("lookaside: a call that may change weights was not followed")
        return rpc(engine, method, *args, **kwargs)

    @functools.wraps(reset)
    def _reset_caches(engine: Any, *args: Any, **kwargs: Any) -> Any:
        all_epochs = list(_epochs_of(engine))
        for epochs in all_epochs:
            epochs.pausing = True
        try:
            return reset(engine, *args, **kwargs)
        finally:
            for epochs in all_epochs:
                epochs.pausing = False

    collective_rpc.lookaside = True  # type: ignore[attr-defined]
    engine_class.collective_rpc, engine_class._reset_caches = collective_rpc, _reset_caches


def _epochs_of(engine: Any) -> Iterator[Epochs]:
    """Return what is to be told, of an engine's connector or of those of its MultiConnector."""
    connector = getattr(getattr(engine, "scheduler", None), "connector", None)
    for each in getattr(connector, "_connectors", [connector]):
        epochs = getattr(each, "lookaside_epochs", None)
        if epochs is not None:
            yield epochs
