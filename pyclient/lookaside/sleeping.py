"""Has vLLM tell the connector that it takes the KV cache's memory away, where it does not do so.

vLLM 0.33 calls unregister_kv_caches of the connector before it unmaps the KV cache, and
restore_kv_caches after it has mapped it again. Earlier versions call neither. There the methods of
their worker class that do both are wrapped, in the worker's process, and call the two at the same
places.
"""

from __future__ import annotations

import functools
import importlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

# Below "vllm", so that its handlers show it.
logger = logging.getLogger("vllm.lookaside")

_wrapping = threading.Lock()


def follow(vllm_config: Any) -> bool:
    """Have sleep and wake-up told to the connector of this process. Safe to call again.

    Returns False if this vLLM neither tells them nor has the methods to wrap. That is logged.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    if hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
        return True
    worker = _worker_class(vllm_config)
    if worker is None or not callable(getattr(worker, "sleep", None)):
        logger.warning("lookaside: this vLLM's sleep cannot be followed: do not use it")
        return False
    with _wrapping:
        if not hasattr(worker.sleep, "lookaside"):
            _wrap(worker, "sleep", before=lambda *_, **__: _tell("unregister_kv_caches"))
            _wrap(worker, "wake_up", after=_note_wake_up)
            _wrap(worker, "discard", before=_note_discard)
    return True


def _worker_class(vllm_config: Any) -> Any:
    """Return the class that vLLM's worker is of; None if its config does not name one."""
    name = getattr(vllm_config.parallel_config, "worker_cls", None)
    if not isinstance(name, str) or "." not in name:
        return None
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute, None)


def _wrap(
    worker: Any,
    name: str,
    before: Callable[..., None] | None = None,
    after: Callable[..., None] | None = None,
) -> None:
    """Have before and after called, with the arguments, around a method, if there is one."""
    original = getattr(worker, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        result = original(self, *args, **kwargs)
        if after is not None:
            after(*args, **kwargs)
        return result

    call.lookaside = True  # type: ignore[attr-defined]
    setattr(worker, name, call)


def _note_wake_up(tags: Sequence[str] | None = None) -> None:
    if tags is None or "kv_cache" in tags:
        _tell("restore_kv_caches")


def _note_discard(tags: Sequence[str]) -> None:
    if "kv_cache" in tags:
        _tell("unregister_kv_caches")


def _tell(what: str) -> None:
    """Call a method of the process's connector, or of those of a MultiConnector that have it."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        return
    group: Any = get_kv_transfer_group()
    for connector in getattr(group, "_connectors", [group]):
        method = getattr(connector, what, None)
        if method is not None:
            method()
